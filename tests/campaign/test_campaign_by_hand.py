"""`make campaign MINUTES=30`: sequences of new seeds, as many as there is time for."""

import os

import pytest

from tests.campaign import jax_machine, torch_machine
from tests.campaign.campaign import run_for_minutes
from tests.campaign.jax_setups import SETUPS
from tests.campaign.torch_bases import BASES


@pytest.mark.slow
def test_promises_hold_until_the_time_is_up():
    machines = [torch_machine.machine_for(base) for base in BASES] + [jax_machine.machine_for(s) for s in SETUPS]
    run_for_minutes(machines, float(os.environ.get("MECHANIC_CAMPAIGN_MINUTES", "30")))
