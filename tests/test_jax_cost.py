"""What a step costs."""

import pytest

from benchmarks.speed import jax_step


def test_a_step_moves_fewer_bytes_than_optaxs_mechanize_and_keeps_one_number_per_parameter():
    bare, ours, theirs = (jax_step.cost_of(jax_step.build(name, side=100)) for name in jax_step.CONTENDERS)
    assert ours.words < 2.1 * bare.words
    assert ours.words < 0.9 * theirs.words
    assert ours.state == pytest.approx(bare.state + 4, abs=0.01)
    assert ours.temporary < 4.5
