"""What a step reads and writes, as the compiler counts it, and when it compiles. docs/jax.md has the times."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mechanic.jax import mechanize
from tests.jax.task import cost_of


@pytest.mark.long
def test_a_step_moves_no_more_bytes_than_that_of_optaxs_mechanize():
    ours, theirs = map(cost_of, ("mechanic", "optax.contrib.mechanize"))
    assert ours.words < theirs.words


@pytest.mark.long
@pytest.mark.parametrize("delta", [None, jnp.bfloat16, "int8"])
def test_outside_of_jit_nothing_is_compiled_in_every_step(delta, request):
    """Else a step takes ten times as long, and what was compiled stays in memory."""
    optimizer = mechanize(optax.adamw(1.0), delta=delta)
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    state = optimizer.init(params)
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(listen))
    by_step = []
    for _ in range(6):
        before = len(compiled)
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
        by_step.append(len(compiled) - before)
    assert by_step[0] > 0  # the listener hears
    assert by_step[2:] == [0] * 4
