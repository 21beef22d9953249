"""Running a machine: with a given seed, and so that what it did can be counted and repeated."""

import os
import random

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

RULES_PER_RUN = 30
RUNS_PER_SEED = 8


def run(machine, seed, operations):
    """Random sequences until so many operations are done; returns how many there were.

    A failure is shrunk to a short sequence, which Hypothesis prints as a program.
    """
    machine.operations = 0
    settings = hypothesis.settings(
        max_examples=RUNS_PER_SEED,
        stateful_step_count=RULES_PER_RUN,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        print_blob=False,
    )
    while machine.operations < operations:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
        seed += 1
    return machine.operations


def random_seed():
    """A new one, or that of MECHANIC_CAMPAIGN_SEED."""
    return int(os.environ.get("MECHANIC_CAMPAIGN_SEED") or random.SystemRandom().randrange(2**32))
