"""Deltas in bfloat16 and int8 with the kernels for GPUs, run by Triton's interpreter: they follow the eager ones."""

import pytest
import torch

from tests.torch.triton.processes import needs_triton, process
from tests.torch.triton.test_interpreted import BOUND, ON_COPIES, ON_DELTA, _call

pytestmark = needs_triton

BASES = "AdamW", "Adam with L2", "SGD", "SGD nesterov", "Lion", "NAdamW", "RMSprop momentum", "Adagrad"
STORAGES = pytest.mark.parametrize("delta", [torch.bfloat16, "int8"])
OF_SUMS = 5e-6  # the eager sums are in float32: over 65,536 numbers in bfloat16, S is off by 2e-6
IN_THREE = ["five_sums", "tune", "step"]


@pytest.fixture(scope="module")
def interpreter():
    with process(TRITON_INTERPRET="1") as run:
        yield lambda name, *arguments, **options: run(_call, name, *arguments, **options)


def assert_same(errors, *, bound=BOUND):
    """The random numbers are the same, so codes differ only where rounding in float32 decides, and by one; twice in a
    few steps by two. A parameter whose code has differed is off by that times the change of S.
    """
    assert errors["learned"] > 0
    assert errors["same state"]
    assert max(errors["differing codes"], errors["beyond a millionth"]) < 0.005
    assert errors["further apart"] <= 1
    assert errors["params"] <= 1e-3
    assert max(errors["scales"], errors["delta scales"]) <= bound


@STORAGES
@pytest.mark.parametrize("base", BASES)
def test_a_step_in_one_launch_follows_the_eager_step(interpreter, base, delta):
    errors = interpreter("plain", base, delta=delta)
    assert_same(errors)
    assert errors["launches"][1:] == [IN_THREE] * 4
    assert errors["launches"][0] == (IN_THREE if base in ("SGD", "Adagrad") else [])  # the others have no state yet


@STORAGES
@pytest.mark.parametrize("base", ["AdamW", "SGD"])
def test_long_tensors(interpreter, base, delta):
    assert_same(interpreter("long_and_stored", base, delta=delta), bound=OF_SUMS)


@STORAGES
@pytest.mark.parametrize("base", [ON_DELTA, ON_COPIES])
def test_around_any_other_base_the_eager_kernels_step(interpreter, base, delta):
    errors = interpreter("plain", base, delta=delta)
    assert errors["launches"] == [[]] * 5
    assert errors["params"] == errors["differing codes"] == 0


@STORAGES
@pytest.mark.parametrize(
    ("base", "dtype"), [("AdamW fused", torch.bfloat16), ("Lion", torch.bfloat16), ("AdamW", torch.float16)]
)
def test_in_half_precision(interpreter, base, dtype, delta):
    errors = interpreter("in_half_precision", base, dtype, delta=delta)
    assert errors["launches"][-1] == IN_THREE
    assert_same(errors, bound=OF_SUMS)


@STORAGES
def test_a_base_that_is_not_fused_rounds_to_bfloat16_more_often(interpreter, delta):
    errors = interpreter("in_half_precision", "SGD momentum", torch.bfloat16, delta=delta)
    assert errors["launches"][-1] == IN_THREE
    assert errors["scales"] <= 1e-3
    assert errors["params"] <= torch.finfo(torch.bfloat16).eps


@STORAGES
def test_a_gradient_that_is_not_finite_is_discarded(interpreter, delta):
    assert_same(interpreter("with_bad_gradients", "AdamW", float("nan"), delta=delta))


def test_a_step_is_skipped_as_the_eager_step_is(interpreter):
    assert_same(interpreter("with_bad_gradients", "AdamW", float("inf"), skip_nonfinite=True, delta="int8"))


@STORAGES
def test_gradients_may_be_missing(interpreter, delta):
    errors = interpreter("with_missing_gradients", "SGD", delta=delta)
    assert_same(errors)
    assert errors["launches"] == [IN_THREE] * 5  # what never had a gradient takes no launch of its own


def test_observed_gradients_tune(interpreter):
    assert_same(interpreter("with_observations", "AdamW", delta="int8"))


@STORAGES
def test_several_tuners_take_no_more_launches(interpreter, delta):
    errors = interpreter("with_several_tuners", "AdamW", delta=delta)
    assert_same(errors)
    assert errors["launches"][-1] == IN_THREE


def test_what_the_kernels_cannot_take_is_left_to_the_eager_ones(interpreter):
    assert interpreter("in_other_layouts", "AdamW", delta="int8")["params"] == 0


@STORAGES
@pytest.mark.parametrize("first", ["eager", "triton"])
def test_a_checkpoint_is_continued_with_other_kernels(interpreter, first, delta):
    assert_same(interpreter("changing_kernels", first, "AdamW", delta=delta))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stored_in", [torch.bfloat16, torch.int8])
def test_the_self_test_passes(interpreter, half, stored_in):
    assert interpreter("reason_not_to_use", half=half, stored_in=stored_in) is None


def test_the_self_test_notices_a_kernel_that_is_off(interpreter):
    said = interpreter("reason_not_to_use", half=False, stored_in=torch.int8, broken=True)
    assert said == "they do not agree with the eager step"
