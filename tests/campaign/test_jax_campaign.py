"""Random sequences of everything that may happen to mechanic.jax keep its promises."""

import pytest

from campaign import run
from jax_machine import machine_for
from jax_setups import SETUPS

every_setup = pytest.mark.parametrize("setup", [pytest.param(s, id=s.name.replace(" ", "-")) for s in SETUPS])


@every_setup
def test_every_promise_holds_in_sequences_of_a_fixed_seed(setup):
    assert run(machine_for(setup), seed=0, operations=600) >= 600
