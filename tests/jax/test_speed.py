"""What a step reads and writes, as the compiler counts it. docs/jax.md has the times."""

from benchmarks.speed import jax_step


def test_a_step_moves_at_most_twice_the_bytes_of_the_base_and_fewer_than_optaxs_mechanize():
    names = ("adamw", "mechanic", "optax.contrib.mechanize")
    bare, ours, theirs = (jax_step.cost_of(jax_step.build(name, side=100)) for name in names)
    assert ours.words < 2.1 * bare.words
    assert ours.words < 0.9 * theirs.words
