import os
import random
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

try:
    import torch
except ModuleNotFoundError:  # the tests of mechanic.jax run without it
    pass
else:
    # Small tensors: a second thread costs more than it brings, above all beside other test workers.
    torch.set_num_threads(1)

# Small programs: in the tests of mechanic.jax nearly all the time goes into compiling them, and this makes it a third.
flags = ["--xla_backend_optimization_level=0"]
if find_spec("jaxlib") and version("jaxlib").startswith(("0.8.", "0.9.", "0.10.")):  # JAX 0.12 ends at a flag it lost
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# The random part of tests/campaign. Set before the workers of pytest-xdist start, so that they share it.
os.environ.setdefault("MECHANIC_CAMPAIGN_SEED", str(random.SystemRandom().randrange(2**32)))


FAST = set(Path(__file__).with_name("fast.txt").read_text().splitlines())
"""Tests for ``make quick``: up to seven quick ones of every file, so that every promise is tried once."""


# Coverage makes Python half as fast. Long tests of lines that others run as well are not measured, but for fast cases.
UNMEASURED = (
    "tests/benchmarks/",
    "tests/campaign/",
    "tests/cli/test_run.py::test_a_script_trains",  # but for MEASURED
    "tests/jax/test_delta_storage.py",
    "tests/jax/test_every_base.py",
    "tests/jax/test_examples.py",
    "tests/jax/test_lr_is_a_shape.py",
    "tests/jax/test_muon.py",
    "tests/jax/test_resume.py",
    "tests/shared/test_docs.py",
    "tests/shared/test_readme.py",
    "tests/torch/test_bad_numbers.py",
    "tests/torch/test_every_base.py",
    "tests/torch/test_examples.py",
    "tests/torch/test_follows_oracle.py",
    "tests/torch/test_half_precision.py",
    "tests/torch/test_hostile_checkpoints.py",
    "tests/torch/test_kills.py",
    "tests/torch/test_lr_is_a_shape.py",
    "tests/torch/test_muon_parallel.py",
    "tests/torch/test_no_sync.py",
    "tests/torch/test_parallel.py",
    "tests/torch/test_parallel_half.py",
    "tests/torch/test_parallel_storage.py",
    "tests/torch/test_reference_values.py",
    "tests/torch/test_resume.py",
    "tests/torch/test_torchrun.py",
)
BY_HAND = "tests/cli/test_run.py::test_a_script_trains_as_if_it_were_wrapped_by_hand_to_the_last_bit"
MEASURED = {
    "tests/torch/test_parallel.py::test_every_layout_follows_one_process[2]",  # shards
    f"{BY_HAND}[own_classes]",  # the command's disguise
    f"{BY_HAND}[resumed]",
}


# What torch up to 2.6 cannot do itself, by a part of the test's name.
IS_OLD_TORCH = find_spec("torch") is not None and version("torch").startswith(("2.5.", "2.6."))
NO_FSDP2 = "its FSDP2 does not run on CPUs"
NO_LATE_STATE = "its Adagrad makes state when it is built, and no more"
OLD_TORCH_LACKS = {
    "tests/torch/test_parallel.py": NO_FSDP2,
    "tests/torch/test_torchrun.py": NO_FSDP2,
    "tests/torch/test_step_in_backward.py::test_sharded_parameters": NO_FSDP2,
    "tests/torch/test_kills.py::test_a_few_kills_leave_no_trace[fsdp2": NO_FSDP2,
    "[SequentialLR-AdamW-tensor-lr": "its SequentialLR changes the first learning rate if that is a tensor",
    "test_a_parameter_without_state_is_one_that_never_had_a_gradient[Adagrad]": NO_LATE_STATE,
    "test_torch_campaign.py::test_promises_hold_in_sequences_of_a_fixed_seed[Adagrad]": NO_LATE_STATE,
    "test_torch_campaign.py::test_promises_hold_in_sequences_of_a_new_seed[Adagrad]": NO_LATE_STATE,
}


# These take longest, so they start first: at the end of a run no worker waits for another.
LONGEST = (
    "tests/torch/test_parallel.py",
    "tests/torch/test_torchrun.py",
    "tests/benchmarks/",
    "tests/torch/test_kills.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # stable: all else keeps its order
    for item in items:
        for part, reason in OLD_TORCH_LACKS.items() if IS_OLD_TORCH else ():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"torch {version('torch')}: {reason}"))
        if item.nodeid in FAST:
            item.add_marker(pytest.mark.fast)
        elif item.nodeid.startswith(UNMEASURED) and item.nodeid not in MEASURED:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def _processes_are_measured_only_with_their_test(request, monkeypatch):
    if request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed")
    counts = [count for report in reports for key, count in report.user_properties if key == "campaign_operations"]
    if counts:
        seed = os.environ["MECHANIC_CAMPAIGN_SEED"]
        terminalreporter.write_line(f"campaign: {sum(counts)} operations; MECHANIC_CAMPAIGN_SEED={seed} repeats them")
