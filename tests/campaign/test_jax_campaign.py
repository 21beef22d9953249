"""Random sequences of everything that may happen to mechanic.jax keep its promises."""

import pytest

from tests.campaign.campaign import run, session_seed
from tests.campaign.jax_machine import machine_for
from tests.campaign.jax_setups import SETUPS

OPERATIONS = 100  # of every setup

every_setup = pytest.mark.parametrize("setup", [pytest.param(s, id=s.name.replace(" ", "-")) for s in SETUPS])


@pytest.mark.long
@every_setup
def test_promises_hold_in_sequences_of_a_fixed_and_of_a_new_seed(setup, record_property):
    """In one test, since the time goes into compiling."""
    machine = machine_for(setup)
    operations = run(machine, seed=0, operations=OPERATIONS)
    assert operations >= OPERATIONS
    print(f"MECHANIC_CAMPAIGN_SEED={session_seed()}")  # noqa: T201
    record_property("campaign_operations", operations + run(machine, session_seed()))
