"""The tasks and our own pieces of them: all there, repeatable, finite; and what an evaluation finds."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("gymnasium")
pytest.importorskip("sklearn")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
from benchmarks.suite import schedules
from benchmarks.suite.contenders import CONTENDERS
from benchmarks.suite.loop import Training, batches
from benchmarks.suite.lora import Adapted, adapt
from benchmarks.suite.losses import squares
from benchmarks.suite.measure import _evaluation_batches, calibration_error, evaluate, measure
from benchmarks.suite.schedule_free_plus import AdamScheduleFreePlus
from benchmarks.suite.split import DEVELOPMENT, HELD_OUT, SPLIT
from benchmarks.suite.tasks import TASKS
from benchmarks.suite.wider import NEW_KINDS
from tests.benchmarks.runs import needs_data

PRETRAINED = {"lora-banking77", "lora-gutenberg"}  # what they adapt takes minutes to train where it is not kept
SPLIT_UP = [
    pytest.param(name, marks=pytest.mark.slow) if name in PRETRAINED else name for name in (*DEVELOPMENT, *HELD_OUT)
]


def test_the_split_names_forty_distinct_tasks_and_all_are_there():
    names = {*DEVELOPMENT, *HELD_OUT}
    assert (len(SPLIT), len(names)) == (20, 40)
    assert {task.name for task in NEW_KINDS} <= names <= TASKS.keys()


@needs_data
@pytest.mark.parametrize("name", SPLIT_UP)
def test_a_task_trains_and_evaluates_finitely_and_a_seed_repeats(name):
    task = replace(TASKS[name], evaluated=32, steps=3)

    def losses():
        training = Training(task, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), seed=0)
        return [evaluate(task, model) for _, model, _ in training]

    found = losses()
    assert found == losses()
    assert found[0] != found[-1]
    classifies = {"train_loss", "test_loss", "train_accuracy", "test_accuracy", "test_ece"}
    for point in found:
        assert point.keys() == (classifies if task.judged_by is None else {"train_loss", "test_loss"})
        assert all(map(math.isfinite, point.values()))


@needs_data
@pytest.mark.parametrize("name", ["convex-iris", "gpt-shakespeare"])
def test_a_classification_is_evaluated_as_torch_does(name):
    task = replace(TASKS[name], evaluated=64)
    model = task.model()
    found = evaluate(task, model)
    with torch.no_grad():
        for part, (inputs, targets) in _evaluation_batches(task).items():
            logits, targets = model(*inputs).flatten(0, -2), targets.flatten()
            assert found[f"{part}_loss"] == nn.functional.cross_entropy(logits, targets).item()
            assert found[f"{part}_accuracy"] == (logits.argmax(-1) == targets).float().mean().item()


@needs_data
def test_tasks_train_on_another_device():
    """Here the meta device, which has no numbers but raises if it meets a tensor of the CPU."""
    for task in NEW_KINDS:
        if task.on_gpu:
            task.loss(task.model().to("meta"), next(batches(task, seed=0, device="meta"))).backward()


@needs_data
def test_on_a_device_of_another_name_the_same_is_found():
    """Of a contender that evaluates at other weights than it trains at, and a model with batch norms."""
    task, contender = replace(TASKS["resnet-cifar10"], steps=20), CONTENDERS["schedule-free sgd"]
    here, there = (measure(task, contender, contender.lr, seed=0, device=device) for device in ("cpu", "cpu:0"))
    assert here["curve"] == there["curve"]
    assert all(map(math.isfinite, here["curve"]["train_loss"]))


def test_a_broken_policy_has_no_return():
    task = TASKS["policy-cartpole"]
    model = task.model()
    assert math.isfinite(evaluate(task, model)["train_loss"])
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert math.isnan(evaluate(task, model)["train_loss"])


def test_the_calibration_error_is_what_the_hand_computes():
    confidence = torch.tensor([0.9, 0.9, 0.6, 0.6])
    logits = torch.stack([confidence, 1 - confidence], 1).log()
    # Two at .9, of which one is right: .4 apart. Two at .6, both right: .4 apart as well.
    assert calibration_error(logits, torch.tensor([0, 1, 0, 0])) == pytest.approx(0.4)
    # None of those at .6 is right: .6 apart.
    assert calibration_error(logits, torch.tensor([0, 1, 1, 1])) == pytest.approx((2 * 0.4 + 2 * 0.6) / 4)
    # Errors of one bin cancel, those of two do not.
    halves = torch.tensor([[0.5, 0.5]]).log().repeat(2, 1)
    assert calibration_error(halves, torch.tensor([0, 1])) == pytest.approx(0.0, abs=1e-6)


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 3)
    before, frozen = model(inputs), [p.detach().clone() for p in model.parameters()]
    adapt(model, rank=2)
    assert model(inputs).equal(before)
    assert [type(module) for module in model] == [Adapted, nn.LayerNorm, Adapted]
    assert sum(p.numel() for p in model.parameters()) == 2 * (3 + 4) + 2 * (4 + 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        squares(model, ((inputs,), torch.ones(5, 2))).backward()
        optimizer.step()
    assert not model(inputs).equal(before)
    assert all(one.equal(other) for one, other in zip(model.buffers(), frozen, strict=True))


def test_one_cycle_is_torchs_and_warm_up_stable_decay_has_three_parts():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=1001, cycle_momentum=False)
    for step in range(1000):
        optimizer.step()
        # torch's peak is one step before 30 % of all.
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedules.one_cycle(step / 1000), abs=0.005)
        cycle.step()
    shares = {0.0: 0.0, 0.025: 0.5, 0.05: 1.0, 0.5: 1.0, 0.8: 1.0, 0.9: 0.5, 1.0: 0.0}
    assert {share: schedules.warm_up_stable_decay(share) for share in shares} == pytest.approx(shares)


def test_schedule_free_plus_follows_its_rule():
    """The loss is y^2 / 2; in one dimension everything can be written down."""
    p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = AdamScheduleFreePlus([p])
    x = y = z = 2.0
    mean = square = weights = largest = 0.0
    for step in range(1, 20):
        loss, grad = y * y / 2, y
        lr = max(0.0, loss + 0.9 * grad * (z - x)) / (math.sqrt(math.pi / 2) * abs(grad))
        mean, square = 0.9 * mean + 0.1 * grad, 0.95 * square + 0.05 * grad**2
        z -= lr * mean / (1 - 0.9**step) / (math.sqrt(square / (1 - 0.95**step)) + 1e-8)
        largest = max(largest, lr)
        weights += largest**2
        x += largest**2 / weights * (z - x)
        y = 0.9 * x + 0.1 * z
        p.grad = p.detach().clone()
        optimizer.step(lambda loss=loss: loss)
        assert p.item() == pytest.approx(y, rel=1e-12)
    optimizer.eval()
    assert p.item() == pytest.approx(x, rel=1e-12)
    optimizer.train()
    assert p.item() == pytest.approx(y, rel=1e-12)
    with pytest.raises(ValueError, match="closure that returns the loss"):
        optimizer.step()
