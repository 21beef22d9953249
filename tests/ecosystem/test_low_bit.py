"""Bases that keep their state in few bits, and transformers' Adafactor: what holds around every base holds here too."""

import copy
import dataclasses
import inspect
import io

import pytest
import torch
from torch.optim import lr_scheduler

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
import bitsandbytes.optim as bnb
import torchao.optim as ao
from transformers.optimization import Adafactor

from mechanic.torch import Mechanic
from tests.torch import test_every_base as every
from tests.torch.bases import Base
from tests.torch.memory import allocations
from tests.torch.paths import by_default
from tests.torch.task import backward, mlp, same_bits, scale, train, train_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclasses.dataclass(frozen=True)
class LowBit(Base):
    has_own_tensors: bool = False  # which cannot be cloned, so neither copied

    def model(self, **options):
        return mlp(hidden=64, **options)  # its first weight has 4096 elements, the fewest that are kept in few bits


TORCHAO = [LowBit(cls.__name__, cls, has_own_tensors=True) for cls in (ao.AdamW8bit, ao.AdamW4bit, ao.AdamWFp8)]
BITSANDBYTES = [LowBit(f"bnb {cls.__name__}", cls) for cls in (bnb.AdamW8bit, bnb.PagedAdamW8bit, bnb.Lion8bit)]
ADAFACTOR = LowBit("Adafactor", Adafactor, {"scale_parameter": False, "relative_step": False})
LOW_BIT = [*TORCHAO, *BITSANDBYTES]
ROWS = [*LOW_BIT, ADAFACTOR]

BEHAVIOURS = [
    every.test_trains,
    every.test_a_scheduler_attached_before_wrapping_does_not_change_the_unit,
    every.test_accumulated_and_clipped_gradients,
    every.test_every_hook_fires_once_per_step,
    every.test_a_group_added_in_mid_training_joins_the_tuner,
    every.test_frozen_layers_do_not_count,
    every.test_a_step_without_any_gradient_changes_nothing,
    every.test_a_zero_gradient_zero_lr_step_changes_nothing,
    every.test_closure_gives_the_same_bits_and_its_loss,
    every.test_grad_scaler_skips_a_step_with_inf_without_a_trace,
]


def by_name(bases):
    return pytest.mark.parametrize("base", [pytest.param(base, id=base.name.replace(" ", "-")) for base in bases])


@pytest.fixture(autouse=True)
def without_compiling():
    """torchao compiles its step, which takes longer than all of these tests."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@by_name(ROWS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda test: test.__name__)
def test_as_every_base(behaviour, base):
    if base.has_own_tensors and "snapshot" in inspect.getsource(behaviour):
        pytest.skip("the state has tensors of a class that cannot be cloned")
    if "wrap" in inspect.signature(behaviour).parameters:
        behaviour(base, by_default)
    else:
        behaviour(base)


def test_a_copy_of_adafactor_goes_on():
    every.test_a_copy_goes_on_with_the_same_bits(ADAFACTOR)


@by_name(LOW_BIT)
def test_the_others_cannot_be_copied_bare_either(base):
    model = base.model()
    bare = base.make(model.parameters(), lr=1e-3)
    train(model, bare, 1)
    with pytest.raises(NotImplementedError if base.has_own_tensors else AttributeError, match=r"clone|initialized"):
        train(*copy.deepcopy((model, bare)), 1)


def moved(model, optimizer):
    tensors = [p.detach() for p in model.parameters()]
    return [*tensors, *(optimizer.state[p]["mechanic_delta"] for p in model.parameters())]


@by_name(ROWS)
@pytest.mark.parametrize("delta", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_resumed_from_a_file_goes_on_bit_for_bit(base, delta, dtype):
    model, twin_model = base.model(dtype=dtype), base.model(dtype=dtype)
    optimizer, twin = (Mechanic(base.make(m.parameters()), delta=delta) for m in (model, twin_model))
    schedules = [lr_scheduler.CosineAnnealingLR(each, 20) for each in (optimizer, twin)]
    train(model, optimizer, 8, scheduler=schedules[0])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedules[0].state_dict()], file)
    file.seek(0)
    for each, state_dict in zip((twin_model, twin, schedules[1]), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state_dict)
    train(model, optimizer, 5, first=8, scheduler=schedules[0])
    train(twin_model, twin, 5, first=8, scheduler=schedules[1])
    assert same_bits(moved(model, optimizer), moved(twin_model, twin))
    assert scale(twin) == scale(optimizer) > 0


@by_name(LOW_BIT)
@pytest.mark.parametrize("delta", [None, "int8"])
def test_bfloat16_ends_where_float32_does_and_is_frozen_and_released(base, delta):
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = base.model(dtype=dtype)
        optimizer = Mechanic(base.make(model.parameters(), weight_decay=0.01), delta=delta)
        train(model, optimizer, 20)
        backward(model, 30)
        optimizer.observe()
        losses[dtype] = train(model, optimizer, 40, first=31)
    assert losses[torch.bfloat16] <= 1.3 * losses[torch.float32] + 0.02
    optimizer.freeze()
    train(model, optimizer, 3, first=71)
    bare = optimizer.release()
    assert not any(key.startswith("mechanic_") for state in bare.state.values() for key in state)
    train(model, bare, 3, first=74)
    assert train_loss(model) < 1


MOST = {"AdamW4bit": 4.2}  # bytes per parameter, of which the residual is 2 and Delta 1.02


@by_name(LOW_BIT)
def test_what_is_kept_beside_bfloat16_parameters(base):
    shapes = [(512, 512)] * 8
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = Mechanic(base.make(params), delta="int8")
    for p in params:
        p.grad = torch.ones_like(p)
    elements = sum(p.numel() for p in params)
    kept, _ = allocations(lambda: [optimizer.step() for _ in range(2)])
    assert kept / elements <= MOST.get(base.name, 5.2)
    assert {state["mechanic_delta"].dtype for state in optimizer.state.values()} == {torch.int8}


def test_the_wrapper_that_offloads_is_refused_with_the_way_to_offload():
    class CPUOffloadOptimizer(torch.optim.SGD):
        """torchao's asks for a GPU when it is built, so it cannot be built here; it is recognised by its name."""

    assert ao.CPUOffloadOptimizer.__name__ == CPUOffloadOptimizer.__name__
    with pytest.raises(TypeError, match="CPUOffloadPolicy"):
        Mechanic(CPUOffloadOptimizer([torch.nn.Parameter(torch.ones(2))], lr=1.0))
