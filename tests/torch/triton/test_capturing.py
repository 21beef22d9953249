"""CUDA graphs with Triton's kernels: the table that they read stays as it is, or the step is refused."""

import pytest

from tests.torch.triton.processes import needs_triton, process

pytestmark = needs_triton


def _call(name, *arguments):
    from tests.torch.triton import capturing

    return getattr(capturing, name)(*arguments)


@pytest.fixture(scope="module")
def interpreter():
    with process(TRITON_INTERPRET="1") as run:
        yield lambda name, *arguments: run(_call, name, *arguments)


@pytest.mark.parametrize("delta", [None, "int8"])
def test_a_captured_step_is_three_launches_over_a_table_that_stays(interpreter, delta):
    started, stays, is_kept, same = interpreter("allowed", delta)
    assert started == ["five_sums", "tune", "step"]
    assert stays
    assert is_kept
    assert same


def test_a_gradient_that_has_moved_is_refused_and_the_next_step_is_right(interpreter):
    refused, same = interpreter("moved")
    assert "tensors are elsewhere than in the step before" in refused[0]
    assert same


def test_one_step_before_the_capture_is_not_enough(interpreter):
    assert "make three steps before the capture" in interpreter("early")[0]


def test_a_base_that_steps_by_itself_is_refused(interpreter):
    refused, same = interpreter("around")
    assert "MECHANIC_KERNELS=eager" in refused[0]
    assert same


def test_memory_that_a_graph_reads_is_not_written_again(interpreter):
    assert interpreter("memory_that_is_reused") == (True, True, False, True)
