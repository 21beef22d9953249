"""CUDA graphs: what one can hold of a step, and what is refused. No graph is captured here, a step is only told so."""

import pytest
import torch
from torch.optim import SGD, AdamW

from benchmarks.speed.counter import count_step
from mechanic.torch import Mechanic, capture

SHAPES = [(64, 32), (64,), (), (32, 64)]


@pytest.fixture
def begin(monkeypatch):
    """Call it, and all steps from then on are taken to be captured."""
    return lambda *_: monkeypatch.setattr(capture, "is_capturing", lambda groups: True)


def adamw(params, **options):
    params = list(params)
    lr = torch.ones((), device=params[0].device)
    return AdamW(params, **{"lr": lr, "fused": True, "capturable": True, **options})


def sgd(params):
    """Built with a number, as it compares its learning rate with 0, and meta tensors have no value."""
    base = SGD(params, lr=1.0, momentum=0.9, fused=True)
    base.param_groups[0]["lr"] = torch.ones((), device=params[0].device)
    return base


def mechanic(base, **options):
    return Mechanic(base, peak_lr=1.0, **options)  # whose first step compares with 0 as well, if not given the peak


def trained(base=adamw, steps=1, **options):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = Mechanic(base([p]), **options)
    for _ in range(steps):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [adamw, sgd])
def test_a_step_that_a_graph_can_hold_reads_nothing_and_copies_nothing(begin, build, dtype):
    counted = count_step(lambda params: mechanic(build(params)), SHAPES, dtype, prepare=begin)
    assert counted.calls
    assert counted.host_reads == counted.copies_to_device == 0


def test_a_frozen_step_that_a_graph_can_hold_reads_nothing_and_copies_nothing(begin):
    def freeze(optimizer):
        optimizer.freeze()
        optimizer.step()
        begin()

    counted = count_step(lambda params: mechanic(adamw(params)), SHAPES, prepare=freeze)
    assert counted.calls
    assert counted.host_reads == counted.copies_to_device == 0


def test_several_tuners_can_be_held(begin):
    def build(params):
        base = AdamW([{"params": [p]} for p in params], lr=torch.ones((), device="meta"), fused=True, capturable=True)
        return mechanic(base, per_group=True)

    counted = count_step(build, SHAPES, prepare=begin)
    assert counted.host_reads == counted.copies_to_device == 0


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (adamw, {"skip_nonfinite": True}, "skip_nonfinite=True reads a value on the host"),
        (lambda p: adamw(p, lr=0.5), {}, r"the learning rate is a number, 0.5.* lr=torch.tensor\(1.0, device='cpu'\)"),
        (lambda p: adamw(p, capturable=False), {}, "AdamW counts its steps on the host unless .* capturable=True"),
        (lambda p: SGD(p, lr=torch.tensor(1.0)), {}, "unless it is built with fused=True"),
        (lambda p: torch.optim.Adagrad(p, lr=torch.tensor(1.0)), {}, "Adagrad has no option 'capturable'"),
    ],
    ids=["skip_nonfinite", "lr", "capturable", "SGD", "Adagrad"],
)
def test_what_a_graph_cannot_hold_is_refused_and_changes_nothing(begin, base, options, message):
    optimizer = trained(base, **options)
    begin()
    before = [p.clone() for p in optimizer.param_groups[0]["params"]], optimizer.scales()
    with pytest.raises(RuntimeError, match="a CUDA graph cannot hold this step: .*" + message):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before[0][0])
    assert optimizer.scales() == before[1]


def test_a_learning_rate_on_another_device_is_refused(begin):
    optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.ones((), device="meta")
    begin()
    with pytest.raises(RuntimeError, match="the learning rate is on meta, and the parameters are on cpu"):
        optimizer.step()


def test_a_first_step_is_refused(begin):
    untrained, with_peak = trained(steps=0), trained(steps=0, peak_lr=1.0)
    begin()
    for optimizer in (untrained, with_peak):
        with pytest.raises(RuntimeError, match=r"it is the first step .* make some steps before the capture"):
            optimizer.step()


def test_the_first_step_of_one_parameter_is_refused(begin):
    optimizer = trained()
    new = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [new]})
    begin()
    optimizer.step()  # it has no gradient
    new.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="it is the first step of some parameters"):
        optimizer.step()


def test_the_first_frozen_step_is_refused(begin):
    optimizer = trained(steps=3)
    optimizer.freeze()
    begin()
    with pytest.raises(RuntimeError, match="it is the first step of some parameters"):
        optimizer.step()


def test_observations_are_refused(begin):
    optimizer = trained()
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.observe()
    p.grad = torch.ones(3)
    begin()
    with pytest.raises(RuntimeError, match="every replay would use that one observation"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="observe\\(\\) hands over what it has measured"):
        optimizer.observe()


def test_on_cpus_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)
    trained(lambda p: AdamW(p, lr=1.0), steps=2)


@pytest.mark.parametrize("answer", [False, True])
def test_on_cuda_torch_is_asked(monkeypatch, answer):
    class OnCuda:
        is_cuda = True

    groups = [{"params": []}, {"params": [OnCuda()]}]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answer)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # the tensor is a fake one
    assert not capture.is_capturing(groups)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert capture.is_capturing(groups) is answer
    assert not capture.is_capturing([{"params": []}])


def test_a_schedule_reaches_a_learning_rate_that_is_a_tensor():
    """A graph has its address, so a scheduler has to write to it."""
    optimizer = trained()
    (group,) = optimizer.param_groups
    lr, remembered = group["lr"], group["mechanic_lr"]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4)
    optimizer.step()
    scheduler.step()
    optimizer.step()
    assert group["lr"] is lr
    assert group["mechanic_lr"] is remembered
    assert lr == remembered == 0.75


def test_a_compiled_training_step_makes_the_same_steps():
    """The model is compiled. Mechanic's step is not traced, so it neither splits into graphs nor rounds differently."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Mechanic(AdamW(model.parameters(), lr=1.0)) for model in models]
    x = torch.randn(8, 4)

    def train(model, optimizer):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    counters.clear()
    compiled = torch.compile(train, backend="eager")
    for _ in range(4):
        compiled(models[0], optimizers[0])
        train(models[1], optimizers[1])
    assert counters["stats"]["unique_graphs"] == 1
    assert optimizers[0].scales() == optimizers[1].scales() != {"default": 0.0}
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
