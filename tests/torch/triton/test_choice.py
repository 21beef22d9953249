"""Which kernels are used, and what happens where those for GPUs do not work."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from mechanic.torch.gpu import choice
from mechanic.torch.stored import StoredBucket

CUDA = torch.device("cuda", 0)


def bucket(device=CUDA, dtype=torch.float32, sharded=False):
    return SimpleNamespace(device=torch.device(device), dtype=dtype, sharded=sharded)


def stored(stored_in):
    flags = {"sharded": False, "has_grad": True, "moves": True}
    return StoredBucket(0, 1.0, 1.0, CUDA, torch.float32, decay=0.0, stored_in=stored_in, **flags)


@pytest.fixture
def with_triton(monkeypatch):
    """As if Triton was installed; what the self-test says is a list to append to."""
    answers = []
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(choice, "reason_not_to_use", lambda *_, **__: answers.pop())
    choice.works.cache_clear()
    yield answers
    choice.works.cache_clear()


def test_on_cuda_the_kernels_are_used_once_they_have_been_tried(with_triton):
    with_triton.append(None)
    assert choice.takes([bucket()], eager=None)
    assert choice.takes([bucket()], eager=None)  # not tried again


def test_where_they_do_not_work_one_warning_says_so_and_the_eager_kernels_are_used(with_triton):
    with_triton.append("they fail")
    with pytest.warns(UserWarning, match="the kernels for GPUs are not used on cuda:0, where they fail"):
        assert not choice.takes([bucket()], eager=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not choice.takes([bucket()], eager=None)


def test_half_precision_is_tried_by_itself(with_triton):
    with_triton += [None, None]
    assert choice.takes([bucket()], eager=None)
    assert choice.takes([bucket(), bucket(dtype=torch.bfloat16)], eager=None)
    assert with_triton == []


def test_stored_deltas_are_tried_by_themselves(with_triton):
    with_triton += [None, None, None]
    assert choice.takes([bucket()], eager=None)
    for stored_in in (torch.bfloat16, torch.int8):
        assert choice.takes([stored(stored_in)], eager=None)
        assert choice.takes([stored(stored_in)], eager=None)
    assert with_triton == []


def test_they_do_not_know_shards_in_half_precision(with_triton):
    with_triton.append(None)
    assert not choice.takes([bucket(), bucket(dtype=torch.bfloat16, sharded=True)], eager=None)
    assert choice.takes([bucket(), bucket(sharded=True)], eager=None)


def test_they_are_not_used_without_triton_on_other_devices_or_if_the_user_says_so(with_triton, monkeypatch):
    assert not choice.takes([], eager=None)
    assert not choice.takes([bucket("cpu")], eager=None)
    assert not choice.takes([bucket("mps")], eager=None)
    monkeypatch.setenv("MECHANIC_KERNELS", "eager")
    assert not choice.takes([bucket()], eager=None)
    monkeypatch.delenv("MECHANIC_KERNELS")
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert not choice.takes([bucket()], eager=None)


def test_they_are_not_tried_on_fake_tensors_where_there_is_no_gpu(with_triton, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not choice.takes([bucket()], eager=None)


def test_a_failure_of_any_kind_is_a_reason():
    reason = choice.reason_not_to_use(torch.device("cpu"), eager=lambda *_: 1 / 0, half=False)
    assert reason == "they fail with ZeroDivisionError: division by zero"


def test_importing_mechanic_torch_imports_neither_triton_nor_the_compiler_of_torch():
    check = "import sys, mechanic.torch; assert not {'triton', 'torch._inductor', 'torch._dynamo'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
