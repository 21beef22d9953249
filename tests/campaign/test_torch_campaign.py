"""Random sequences of everything that may happen to a Mechanic in PyTorch keep its promises."""

import pytest

from campaign import random_seed, run
from torch_bases import BASES
from torch_machine import machine_for

every_base = pytest.mark.parametrize("base", [pytest.param(base, id=base.name.replace(" ", "-")) for base in BASES])


@every_base
def test_every_promise_holds_in_sequences_of_a_fixed_seed(base):
    assert run(machine_for(base), seed=0, operations=900) >= 900
