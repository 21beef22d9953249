"""The kernels for GPUs, run by Triton's interpreter on CPU tensors, follow the eager ones."""

import pytest

pytest.importorskip("triton")

import torch

from tests.torch.triton.processes import process

BOUND = 1e-6

WHOLE = (
    *("AdamW", "AdamW maximize", "AdamW lr tensor", "Adam with L2", "SGD", "SGD momentum", "SGD nesterov", "Lion"),
    *("NAdam", "NAdamW", "RMSprop", "RMSprop momentum", "Adagrad"),
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


def test_steps_that_are_counted_on_the_device_are_not_read(interpreter):
    assert_same(interpreter("with_counters_on_the_device"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("base", ["AdamW", ON_DELTA, ON_COPIES])
def test_a_gradient_that_is_not_finite_is_discarded(interpreter, base, value):
    if (base, value) != ("AdamW", float("inf")):
        assert_same(interpreter("with_bad_gradients", base, value))


def test_a_step_is_skipped_as_the_eager_step_is(interpreter):
    errors = interpreter("with_bad_gradients", "AdamW", float("inf"), skip_nonfinite=True)
    assert_same(errors)
    assert errors["launches"][2] == ["five_sums", "add"]


@pytest.mark.parametrize("base", ["AdamW", ON_DELTA, ON_COPIES])
def test_gradients_may_be_missing(interpreter, base):
    assert_same(interpreter("with_missing_gradients", base))


@pytest.mark.parametrize("base", ["AdamW", ON_COPIES])
def test_observed_gradients_tune(interpreter, base):
    assert_same(interpreter("with_observations", base))


@pytest.mark.parametrize("base", [ON_DELTA, ON_COPIES])
def test_what_the_kernels_cannot_take_is_left_to_the_eager_ones(interpreter, base):
    errors = interpreter("in_other_layouts", base)
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "add", "tune", "lend", "move"]


def test_several_tuners_take_no_more_launches(interpreter):
    errors = interpreter("with_several_tuners", "AdamW")
    assert_same(errors)
    assert errors["launches"][-1] == ["five_sums", "tune", "step"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", ["AdamW", ON_COPIES])
def test_in_half_precision_what_is_stored_is_the_same(interpreter, base, dtype):
    errors = interpreter("in_half_precision", base, dtype)
    assert_same(errors)
    assert errors["differing"] == 0


@pytest.mark.parametrize("first", ["eager", "triton"])
def test_a_checkpoint_is_continued_with_other_kernels(interpreter, first):
    assert_same(interpreter("changing_kernels", first, "AdamW"))
