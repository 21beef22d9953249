"""Running a machine with a given seed, so that what it did can be counted and repeated."""

import itertools
import os
import time
from unittest import mock

import hypothesis
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import run_state_machine_as_test

RULES_PER_SEQUENCE = 30
SEQUENCES_PER_SEED = 4


def run(machine, seed, operations=1):
    """Run random sequences, with this seed and those that follow, until so many operations are done.

    Returns the number of operations. A failure is shrunk to a short sequence, which Hypothesis prints as a program.
    """
    settings = hypothesis.settings(
        max_examples=SEQUENCES_PER_SEED,
        stateful_step_count=RULES_PER_SEQUENCE,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        print_blob=False,
    )
    machine.operations = 0
    # Hypothesis mixes in numbers from the source of all modules that are loaded. Without them the seed decides alone.
    with mock.patch.object(providers, "_get_local_constants", providers.Constants):
        while machine.operations < operations:
            with_seed = hypothesis.seed(f"{machine.__name__} {seed}")  # other sequences for every machine
            run_state_machine_as_test(with_seed(machine), settings=settings)
            seed += 1
    return machine.operations


def session_seed():
    """A new one in every session, unless MECHANIC_CAMPAIGN_SEED was given: see tests/conftest.py."""
    return int(os.environ["MECHANIC_CAMPAIGN_SEED"])


def run_for_minutes(machines, minutes):
    """Run all machines in turn, with another seed in every round."""
    end, operations = time.monotonic() + 60 * minutes, 0
    for seed in itertools.count(session_seed()):
        for machine in machines:
            if time.monotonic() > end:
                return
            print(f"\nMECHANIC_CAMPAIGN_SEED={seed} {machine.__name__}", end="", flush=True)
            operations += run(machine, seed)
            print(f": {operations} operations so far", end="", flush=True)
