import os
import random
import sys
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
    flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# The random part of tests/campaign. Set before the workers of pytest-xdist start, so that they share it.
os.environ.setdefault("MECHANIC_CAMPAIGN_SEED", str(random.SystemRandom().randrange(2**32)))


# The sdist has no records, and so no tests of them.
collect_ignore = [] if (Path(__file__).parents[1] / "benchmarks" / "records").exists() else ["benchmarks"]


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
    "test_torch_campaign.py::test_promises_hold_in_sequences_of_a_fixed_and_of_a_new_seed[Adagrad]": NO_LATE_STATE,
}


def pytest_collection_modifyitems(config, items):
    # xdist gives each worker an equal piece of this list. If it did not begin with its share of the long tests, all
    # others would wait in the end for the worker that has them.
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long, short = (
        [item for item in items if bool(item.get_closest_marker("long")) is is_long] for is_long in (True, False)
    )
    size = -(-len(short) // workers)
    items[:] = [item for n in range(workers) for item in (*long[n::workers], *short[n * size : (n + 1) * size])]
    seen = set()
    for item in items:
        for part, reason in OLD_TORCH_LACKS.items() if IS_OLD_TORCH else ():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"torch {version('torch')}: {reason}"))
        test = item.nodeid.partition("[")[0]
        is_first, is_long = test not in seen, item.get_closest_marker("long")
        is_benchmark, is_torch = (test.startswith(f"tests/{folder}/") for folder in ("benchmarks", "torch"))
        seen.add(test)
        if is_first and not is_benchmark and not is_long and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.quick)
        # Coverage makes Python half as fast. The other cases of a test mostly run the same lines, and the quick tests
        # of torch run all of them but those that need ranks.
        if not is_first or is_benchmark or (is_torch and is_long and "test_parallel" not in test):
            item.add_marker(pytest.mark.unmeasured)


@pytest.fixture(autouse=True)
def _some_tests_and_their_processes_are_not_measured(request, monkeypatch):
    """The no_cover of pytest-cov 7.1 does not do it: its workers have a second collector, which goes on then."""
    if not request.node.get_closest_marker("unmeasured"):
        yield
        return
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed")
    counts = [count for report in reports for key, count in report.user_properties if key == "campaign_operations"]
    if counts:
        seed = os.environ["MECHANIC_CAMPAIGN_SEED"]
        terminalreporter.write_line(f"campaign: {sum(counts)} operations; MECHANIC_CAMPAIGN_SEED={seed} repeats them")
