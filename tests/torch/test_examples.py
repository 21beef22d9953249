"""Every example runs as it stands, and does what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import held_out
import per_group
import probe_then_train

RUN_ELSEWHERE = {"fsdp2", "jax_equinox", "jax_nnx", "jax_optax"}  # by test_torchrun.py and test_jax_examples.py
EXAMPLES = [
    path for path in sorted((Path(__file__).parents[2] / "examples").glob("*.py")) if path.stem not in RUN_ELSEWHERE
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_as_it_stands(path, tmp_path):
    warnings = ["-W", "error", "-W", "ignore:The epoch parameter"]  # SequentialLR's own doing, up to torch 2.6
    result = subprocess.run(
        [sys.executable, *warnings, path], check=True, timeout=300, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.stdout


def test_a_tuner_per_group_beats_one_for_all_and_the_best_of_nine_learning_rates():
    apart, scales = per_group.learned(apart=True)
    shared, _ = per_group.learned(apart=False)
    tuned, lr = per_group.best_of_a_grid()
    assert apart < shared
    assert apart < tuned
    assert 1e-4 < lr < 1  # not at the edge of the grid
    assert 30 < scales["embedding"] / scales["body"] < 3000


def test_a_probed_run_ends_as_low_as_a_learned_one():
    assert probe_then_train.main() < 0.1


def test_held_out_feedback_closes_the_gap_to_a_learning_rate_tuned_on_the_test_data():
    by_train, by_held_out = (held_out.learned(observing=observing) for observing in (False, True))
    best = held_out.tuned_on_test()
    assert by_train - best > 1.0
    assert by_train - by_held_out >= 0.8 * (by_train - best)
