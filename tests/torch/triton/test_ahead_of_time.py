"""The kernels compile for devices that are not there: without spills, in few registers, with wide accesses."""

import pytest

from tests.torch.triton.processes import needs_triton, process

pytestmark = needs_triton

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST_REGISTERS = 96

KERNELS = (
    *("five_sums bf16", "tune", "add", "step ADAM bf16", "lend copies bf16", "move copies bf16"),
    *("five_sums fp32, Delta int8", "step ADAM fp32, Delta int8", "step ADAM bf16, Delta int8, state bf16"),
)
ON_ONE_TARGET = (
    *("five_sums fp32", "step ADAM fp32", "step MOMENTUM fp32", "step SGD fp32", "step LION fp32", "step NADAM fp32"),
    *("step RMSPROP fp32", "step RMSPROP_MOMENTUM fp32", "step ADAGRAD fp32"),
    *("five_sums fp32, Delta bf16", "step ADAM fp32, Delta bf16", "step SGD bf16, Delta int8, state bf16"),
    *("step MOMENTUM bf16, Delta bf16, state bf16", "step LION bf16, Delta int8", "step NADAM fp16, Delta int8"),
    *("lend Delta fp32", "move Delta fp32", "lend copies fp32", "move copies fp32"),
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """``compiler(name, target)`` builds a kernel in a process of its own. None of Triton's earlier results is used."""
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as run:
        yield lambda name, target: run(_build, name, target)


def _build(name, target):
    from tests.torch.triton import ahead_of_time

    if name is None:
        return list(ahead_of_time.kernels())
    *kernel, lists = ahead_of_time.kernels()[name]
    return ahead_of_time.build(*kernel, target), lists


def check(compiler, name, target):
    built, lists = compiler(name, target)
    assert built.spilled == 0
    assert built.registers <= MOST_REGISTERS
    if lists is not None:
        reads, writes = lists
        assert built.loads[16] >= reads
        assert built.stores[16] >= writes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_no_spills_few_registers_and_wide_accesses(compiler, name, target):
    check(compiler, name, target)


@pytest.mark.parametrize("name", ON_ONE_TARGET)
def test_other_variants_as_well(compiler, name):
    check(compiler, name, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_has_no_spills_few_registers_and_wide_accesses(compiler, target):
    for name in compiler(None, target):
        check(compiler, name, target)
