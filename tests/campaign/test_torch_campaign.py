"""Random sequences of everything that may happen to a Mechanic in PyTorch keep its promises."""

import pytest

from tests.campaign.campaign import run, session_seed
from tests.campaign.torch_bases import BASES
from tests.campaign.torch_machine import machine_for

OPERATIONS = 150  # of every base

every_base = pytest.mark.parametrize("base", [pytest.param(base, id=base.name.replace(" ", "-")) for base in BASES])


@pytest.mark.long
@every_base
def test_promises_hold_in_sequences_of_a_fixed_and_of_a_new_seed(base, record_property):
    operations = run(machine_for(base), seed=0, operations=OPERATIONS)
    assert operations >= OPERATIONS
    print(f"MECHANIC_CAMPAIGN_SEED={session_seed()}")  # noqa: T201
    record_property("campaign_operations", operations + run(machine_for(base), session_seed()))
