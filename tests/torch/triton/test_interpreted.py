"""The kernels for GPUs, run by Triton's interpreter on CPU tensors, follow the eager ones."""

import pytest
import torch

from mechanic.config import TunerConfig
from tests.torch.triton.processes import needs_triton, process

pytestmark = needs_triton

BOUND = 1e-6

WHOLE = (
    *("AdamW", "AdamW maximize", "AdamW lr tensor", "Adam with L2", "SGD", "SGD momentum", "SGD nesterov", "Lion"),
    *("NAdamW", "RMSprop", "RMSprop momentum", "Adagrad"),
)
ON_DELTA, ON_COPIES = "RAdam", "Adam with L2, amsgrad"


@pytest.fixture(scope="module")
def interpreter():
    """``interpreter(name, ...)`` calls a function of tests.torch.triton.interpreted in a process that interprets."""
    with process(TRITON_INTERPRET="1") as run:
        yield lambda name, *arguments, **options: run(_call, name, *arguments, **options)


def _call(name, *arguments, **options):
    from tests.torch.triton import interpreted

    return getattr(interpreted, name)(*arguments, **options)


def assert_same(errors, *, bound=BOUND):
    assert errors["learned"] > 0
    assert errors["same state"]
    assert max(errors[key] for key in ("params", "deltas", "scales")) <= bound


@pytest.mark.parametrize("base", WHOLE)
def test_a_step_in_one_launch_follows_the_eager_step(interpreter, base):
    errors = interpreter("plain", base)
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "tune", "step"]


@pytest.mark.parametrize("base", [ON_DELTA, ON_COPIES])
def test_around_any_other_base_it_follows_the_eager_step(interpreter, base):
    errors = interpreter("plain", base)
    assert_same(errors)
    assert errors["launches"] == [["five_sums", "tune", "lend", "move"]] * 5


@pytest.mark.parametrize("base", [ON_DELTA, ON_COPIES])
def test_a_base_that_fails_leaves_the_tuners_as_they_were(interpreter, base):
    for tuners_changed, moved in interpreter("failing", base):
        assert tuners_changed < 1e-15
        assert moved < 1e-6


def test_steps_that_are_counted_on_the_device_are_not_read(interpreter):
    assert_same(interpreter("with_counters_on_the_device"))


@pytest.mark.parametrize(("base", "value"), [("AdamW", "nan"), (ON_DELTA, "inf"), (ON_COPIES, "nan")])
def test_a_gradient_that_is_not_finite_is_discarded(interpreter, base, value):
    assert_same(interpreter("with_bad_gradients", base, float(value)))


def test_a_step_is_skipped_as_the_eager_step_is(interpreter):
    errors = interpreter("with_bad_gradients", "AdamW", float("inf"), skip_nonfinite=True)
    assert_same(errors)
    assert errors["launches"][2] == ["five_sums", "add"]


@pytest.mark.parametrize("base", ["AdamW", ON_DELTA])
def test_gradients_may_be_missing(interpreter, base):
    assert_same(interpreter("with_missing_gradients", base))


def test_gradients_may_be_missing_in_half_precision(interpreter):
    errors = interpreter("with_missing_gradients", ON_COPIES, dtype=torch.bfloat16)
    assert_same(errors)
    assert errors["differing"] == 0


def test_observed_gradients_tune(interpreter):
    assert_same(interpreter("with_observations", "AdamW"))


def test_a_base_may_keep_iterates_of_its_own(interpreter):
    errors = interpreter("plain", "SGD momentum", own_iterates=True)
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "tune", "lend", "move"]


@pytest.mark.parametrize("base", [ON_DELTA, ON_COPIES])
def test_what_the_kernels_cannot_take_is_left_to_the_eager_ones(interpreter, base):
    errors = interpreter("in_other_layouts", base)
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "add", "tune", "lend", "move"]


def test_several_tuners_take_no_more_launches(interpreter):
    errors = interpreter("with_several_tuners", "AdamW")
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "tune", "step"]


@pytest.mark.parametrize(
    ("base", "dtype"), [("AdamW", torch.bfloat16), ("AdamW", torch.float16), (ON_COPIES, torch.bfloat16)]
)
def test_in_half_precision_what_is_stored_is_the_same(interpreter, base, dtype):
    errors = interpreter("in_half_precision", base, dtype)
    assert_same(errors)
    assert errors["differing"] == 0


@pytest.mark.parametrize("first", ["eager", "triton"])
def test_a_checkpoint_is_continued_with_other_kernels(interpreter, first):
    assert_same(interpreter("changing_kernels", first, "AdamW"))


def test_besides_its_launches_a_step_only_counts_on_the_host(interpreter):
    called = interpreter("calls_of_torch_besides")
    assert called.count("launch") == 3
    # Step counters and the table are on the host where there is a device, and flags are read only on the host.
    of_host = {"aten._local_scalar_dense", "aten._foreach_add_", "aten._to_copy", "aten.all"}
    free = {"aten.empty", "aten.detach", "aten.unbind", "aten.slice", "aten.view", "launch"}
    of_profiler = {"profiler._record_function_enter_new", "profiler._record_function_exit"}
    assert set(called) <= of_host | free | of_profiler


@pytest.mark.parametrize(("tensors", "tuners"), [(148, 1), (448, 12), (2000, 50)])
def test_a_step_is_three_launches_whatever_the_model(interpreter, tensors, tuners):
    started, uploads = interpreter("launches_at", tensors, tuners)
    assert started == ["five_sums", "tune", "step"]
    assert uploads <= 2  # where nothing moves, nothing is uploaded


def test_the_five_sums_are_exact_to_a_millionth_at_16_million_elements(interpreter):
    assert interpreter("five_sums_error", 1 << 24) <= 1e-6


@pytest.mark.parametrize(
    "config",
    [
        TunerConfig(),
        TunerConfig.paper(),
        TunerConfig(betas=(0.9,), guard=False),
        TunerConfig(settle=False),
        TunerConfig(min_lr=0.1, max_lr=0.2),
    ],
    ids=["default", "paper", "one beta, no guard", "no settling", "bounds"],
)
def test_the_tuner_is_the_same_in_float64(interpreter, config):
    assert interpreter("tune_error", config) <= 1e-13


@pytest.mark.parametrize("half", [False, True])
def test_the_self_test_passes(interpreter, half):
    assert interpreter("reason_not_to_use", half=half) is None


def test_the_kernels_work_with_any_default_device(interpreter):
    assert interpreter("reason_not_to_use", half=False, default_device="meta") is None


def test_the_self_test_notices_a_kernel_that_is_off(interpreter):
    assert interpreter("reason_not_to_use", half=False, broken=True) == "they do not agree with the eager step"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("tuners", ["one", "role"])
def test_muon_takes_four_launches_more(interpreter, tuners):
    started, beyond = interpreter("calls_around_muon", tuners)
    assert started == ["five_sums", "tune", "lend", "move"]
    # Views and empty tensors, and flags that are read only on the host.
    free = {"empty", "empty_like", "detach", "unbind", "slice", "view"}
    of_host, of_profiler = {"_local_scalar_dense", "all"}, {"_record_function_enter_new", "_record_function_exit"}
    assert set(beyond) <= free | of_host | of_profiler
