"""Every example runs as it stands, and what it prints is what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RUN_ELSEWHERE = {"fsdp2", "jax_equinox", "jax_nnx", "jax_optax"}  # by test_torchrun.py and test_jax_examples.py
EXAMPLES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
    if path.stem not in RUN_ELSEWHERE
}
CHECKED = {"bf16", "held_out", "per_group", "probe_then_train"}  # below
SHORTER = {"muon_gpt": ("--steps", "30")}  # the others take seconds


def printed(name, folder):
    """What the example prints, where no warning is given."""
    warnings = ["-W", "error", "-W", "ignore:The epoch parameter"]  # SequentialLR's own doing, up to torch 2.6
    command = [sys.executable, *warnings, EXAMPLES[name], *SHORTER.get(name, ())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # beside other tests, threads wait for each other
    return subprocess.run(
        command, check=True, timeout=300, cwd=folder, capture_output=True, text=True, env=environment
    ).stdout


def numbers(text):
    return [float(number) for number in re.findall(r"\d[\d.]*(?:e[-+]\d+)?", text)]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - CHECKED))
def test_runs_as_it_stands(name, tmp_path):
    assert printed(name, tmp_path)


def results(name, folder):
    """The numbers of the lines that begin with a loss; the others tell what the example shows."""
    lines = printed(name, folder).splitlines()
    return [numbers(line) for line in lines if line.startswith(("loss", "test loss", "final loss"))]


def test_a_tuner_per_group_beats_one_for_all_and_the_best_of_nine_learning_rates(tmp_path):
    (shared, _), (apart, embedding, body), (tuned, lr) = results("per_group", tmp_path)
    assert apart < shared
    assert apart < tuned
    assert 1e-4 < lr < 1  # not at the edge of the grid
    assert 30 < embedding / body < 3000


def test_a_probed_run_ends_as_low_as_a_learned_one(tmp_path):
    ((loss, *_),) = results("probe_then_train", tmp_path)
    assert loss < 0.1


def test_bfloat16_loses_steps_of_a_bare_adamw_and_none_of_mechanics(tmp_path):
    rows = [line.split("float32")[1] for line in printed("bf16", tmp_path).splitlines() if "float32" in line]
    *bare, ours = ([float(part.split()[-1]) for part in row.split(",")] for row in rows)
    assert all(half > 1.2 * single for single, half in bare)
    assert max(ours) < 0.01


def test_held_out_feedback_closes_the_gap_to_a_learning_rate_tuned_on_the_test_data(tmp_path):
    by_train, by_held_out, best = (found[0] for found in results("held_out", tmp_path))
    assert by_train - best > 1.0
    assert by_train - by_held_out >= 0.8 * (by_train - best)
