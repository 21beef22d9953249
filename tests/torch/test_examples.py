"""Every example runs as it stands, and what it prints is what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN_ELSEWHERE = {"fsdp2", "jax_equinox", "jax_nnx", "jax_optax"}  # by test_torchrun.py and test_jax_examples.py
EXAMPLES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
    if path.stem not in RUN_ELSEWHERE
}
CHECKED = {"held_out", "per_group", "probe_then_train"}  # below
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


def test_a_tuner_per_group_beats_one_for_all_and_the_best_of_nine_learning_rates(tmp_path):
    (shared, _), (apart, embedding, body), (tuned, lr) = map(numbers, printed("per_group", tmp_path).splitlines())
    assert apart < shared
    assert apart < tuned
    assert 1e-4 < lr < 1  # not at the edge of the grid
    assert 30 < embedding / body < 3000


def test_a_probed_run_ends_as_low_as_a_learned_one(tmp_path):
    last = printed("probe_then_train", tmp_path).splitlines()[-1]
    assert last.startswith("final loss")
    assert numbers(last)[0] < 0.1


def test_held_out_feedback_closes_the_gap_to_a_learning_rate_tuned_on_the_test_data(tmp_path):
    by_train, by_held_out, best = (numbers(line)[0] for line in printed("held_out", tmp_path).splitlines())
    assert by_train - best > 1.0
    assert by_train - by_held_out >= 0.8 * (by_train - best)
