"""Saving, copying and resuming, and checkpoints that do not fit."""

from __future__ import annotations

import copy
import io
import operator
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler

from benchmarks.failures import processes
from benchmarks.failures.contenders import Contender
from benchmarks.failures.task import (
    SAME_BITS,
    STEPS,
    Training,
    batch,
    keeps_up_with_undisturbed,
    loss_on,
    same_bits,
    same_bits_as_undisturbed,
    undisturbed_values,
)
from benchmarks.failures.verdicts import REFUSED, WRONG, Outcome, is_refusal, outcome_of, text_of, theme, worst

situation = theme("Checkpoints")
SAVED_AT, END = 60, 100
# What a message has to name to count as a refusal.
NAN, SHAPE, ENTRY = r"finite|\bnan\b", r"shape|size", r"missing|entr|state|key"
OTHER, ORDER = r"base|optimizer|checkpoint|state", r"shape|size|order|group"
REFUSES = (
    "It loads and the run keeps up with the undisturbed one. A refusal counts if the next 40 steps are bitwise those "
    "of a run in which nothing was loaded."
)


def _saved(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copies of the state dicts of the model and of the optimizer."""
    return copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))


def _resumed(contender: Contender, model: dict[str, Any], optimizer: dict[str, Any]) -> Training:
    """A new model and optimizer, loaded."""
    training = Training(contender)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    return training


def _continued(contender: Contender, training: Training) -> Outcome:
    return same_bits_as_undisturbed(training.run(END - SAVED_AT, first=SAVED_AT), contender, END)


@situation("state_dict round trip", "A new optimizer loads a copy of the state dict and continues.", SAME_BITS)
def round_trip(contender: Contender) -> Outcome:
    return _continued(contender, _resumed(contender, *_saved(Training(contender).run(SAVED_AT))))


@situation(
    "torch.load(weights_only=True)",
    "The state dict goes through a file, loaded as torch does by default.",
    SAME_BITS,
)
def weights_only(contender: Contender) -> Outcome:
    former = Training(contender).run(SAVED_AT)
    file = io.BytesIO()
    torch.save((former.model.state_dict(), former.optimizer.state_dict()), file)
    file.seek(0)
    return _continued(contender, _resumed(contender, *torch.load(file, weights_only=True)))


@situation(
    "resume in mid-accumulation",
    "A checkpoint with gradients, after two of a batch's four parts.",
    "Parameters are bitwise those of the run that was not interrupted.",
)
def mid_accumulation(contender: Contender) -> Outcome:
    def parts(step: int) -> Iterator[Any]:
        return zip(*(tensor.chunk(4) for tensor in batch(step)), strict=True)

    def train(interrupted: bool) -> list[torch.Tensor]:
        training = Training(contender)
        for step in range(END):
            training.optimizer.zero_grad()
            for part, (inputs, targets) in enumerate(parts(step)):
                if interrupted and (step, part) == (SAVED_AT, 2):
                    gradients = [p.grad.clone() for p in training.params()]
                    training = _resumed(contender, *_saved(training))
                    for p, gradient in zip(training.params(), gradients, strict=True):
                        p.grad = gradient
                (loss_on(training.model, inputs, targets) / 4).backward()
            training.optimizer.step()
        return training.values()

    return same_bits(train(interrupted=True), train(interrupted=False))


@situation(
    "resume under a scheduler",
    "Optimizer and CosineAnnealingLR are saved and loaded in the middle of the cosine.",
    "Parameters are bitwise those of the run that was not interrupted.",
)
def under_a_scheduler(contender: Contender) -> Outcome:
    def train(interrupted: bool) -> list[torch.Tensor]:
        training = Training(contender)
        scheduler = lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=END)
        for step in range(END):
            if interrupted and step == SAVED_AT:
                saved, state = _saved(training), scheduler.state_dict()
                training = Training(contender)
                scheduler = lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=END)
                training.model.load_state_dict(saved[0])
                training.optimizer.load_state_dict(saved[1])
                scheduler.load_state_dict(state)
            training.run(1, first=step, after_step=lambda step: scheduler.step())  # noqa: B023
        return training.values()

    return same_bits(train(interrupted=True), train(interrupted=False))


@situation(
    "process killed and resumed",
    "SIGKILL in the middle of step 25's optimizer step; a new process continues from the checkpoint of step 20.",
    "Parameters are bitwise those of a process that was not killed.",
    seconds=240.0,
)
def killed(contender: Contender) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        killed, undisturbed = Path(name) / "killed", Path(name) / "undisturbed"
        processes.start("train_and_be_killed", contender.key, killed, killed_on_purpose=True)
        assert not (killed / "result.pt").exists(), "the process was to be killed"
        processes.start("train_on", contender.key, killed)
        processes.start("train_on", contender.key, undisturbed)
        found, expected = (torch.load(folder / "result.pt") for folder in (killed, undisturbed))
    return same_bits(found, expected)


def _copied(contender: Contender, copied: Callable[[Any], Any]) -> Outcome:
    """Train the copy, then the original: neither may have anything of the other."""
    training = Training(contender).run(SAVED_AT)
    model, optimizer = copied((training.model, training.optimizer))
    twin = Training.__new__(Training)
    twin.model, twin.optimizer = model, optimizer
    expected = undisturbed_values(contender.key, END)
    found = [other.run(END - SAVED_AT, first=SAVED_AT).values() for other in (twin, training)]
    return same_bits([*found[0], *found[1]], [*expected, *expected])


@situation("deepcopy", "Model and optimizer are copied together; both continue.", "Both: " + SAME_BITS)
def deep_copied(contender: Contender) -> Outcome:
    return _copied(contender, copy.deepcopy)


@situation("pickle", "Model and optimizer are pickled together; both continue.", "Both: " + SAME_BITS)
def pickled(contender: Contender) -> Outcome:
    return _copied(contender, lambda pair: pickle.loads(pickle.dumps(pair)))


def _loading(
    contender: Contender,
    spoiled: dict[str, Any],
    refusal: str,
    groups: Callable[[Any], Any] = torch.nn.Module.parameters,
) -> Outcome:
    """Load a state dict that does not fit into an optimizer that has made some steps, and train on."""
    training = Training(contender, groups=groups).run(SAVED_AT)
    try:
        training.optimizer.load_state_dict(spoiled)
    except Exception as error:
        if not is_refusal(error, refusal):
            return outcome_of(error, refusal)
        never_tried = Training(contender, groups=groups).run(END)
        try:
            training.run(END - SAVED_AT, first=SAVED_AT)
        except Exception as later:
            return Outcome(WRONG, f"refused, but the next step raises {text_of(later)}")
        continued = same_bits(training.values(), never_tried.values())
        if continued.verdict == WRONG:
            return Outcome(WRONG, f"refused, but the optimizer has changed: {continued.detail}")
        return Outcome(REFUSED, text_of(error))
    training.switch(training=True)
    return keeps_up_with_undisturbed(training.run(STEPS - SAVED_AT, first=SAVED_AT), contender)


def _loading_each(
    contender: Contender,
    spoil: Callable[[dict[str, Any], str], None],
    refusal: str,
    least_dim: int = 0,
    parts: tuple[str, ...] = ("state", "param_groups"),
) -> Outcome:
    """Load a checkpoint in which one tensor of the first parameter or group is spoiled; the worst tensor counts."""
    saved = Training(contender).run(SAVED_AT).optimizer.state_dict()
    outcomes = {}
    for part in parts:
        for name, value in saved[part][0].items():
            if torch.is_tensor(value) and value.is_floating_point() and value.dim() >= least_dim:
                spoiled = copy.deepcopy(saved)
                spoil(spoiled[part][0], name)
                outcomes[name] = _loading(contender, spoiled, refusal)
    return worst(outcomes)


@situation(
    "checkpoint with NaN",
    "One tensor of a checkpoint holds a NaN; every tensor in turn, the worst one counts.",
    REFUSES,
    NAN,
)
def with_nan(contender: Contender) -> Outcome:
    def put_nan(entries: dict[str, Any], name: str) -> None:
        entries[name] = entries[name].clone()
        entries[name].view(-1)[0] = float("nan")

    return _loading_each(contender, put_nan, NAN)


@situation(
    "checkpoint with a wrong shape",
    "One tensor of a checkpoint has more rows; every tensor in turn, the worst one counts.",
    REFUSES,
    SHAPE,
)
def with_wrong_shape(contender: Contender) -> Outcome:
    def double_rows(entries: dict[str, Any], name: str) -> None:
        entries[name] = torch.cat([entries[name], entries[name]])

    return _loading_each(contender, double_rows, SHAPE, least_dim=1)


@situation(
    "checkpoint with an entry missing",
    "One tensor of the first parameter's state is missing; every one in turn, the worst one counts.",
    REFUSES,
    ENTRY,
)
def with_missing_entry(contender: Contender) -> Outcome:
    return _loading_each(contender, operator.delitem, ENTRY, parts=("state",))


def _loading_from(contender: Contender, make: Callable[..., torch.optim.Optimizer], **options: Any) -> Outcome:
    """Load what another optimizer has saved."""
    other = Training(contender)
    other.optimizer = make(other.model.parameters(), lr=contender.lr, **options)
    state_dict = other.run(SAVED_AT).optimizer.state_dict()
    return _loading(contender, copy.deepcopy(state_dict), OTHER)


@situation(
    "checkpoint of another base",
    "The checkpoint is that of SGD with momentum (in the same tuner, where there is one).",
    REFUSES,
    OTHER,
)
def of_another_base(contender: Contender) -> Outcome:
    make: Any = torch.optim.SGD if contender.with_base is None else contender.with_base(torch.optim.SGD)
    return _loading_from(contender, make, momentum=0.9)


@situation(
    "checkpoint of AdamW",
    "A run with torch's AdamW is to go on with the method: its checkpoint is loaded after 60 steps.",
    REFUSES,
    OTHER,
)
def of_adamw(contender: Contender) -> Outcome:
    return _loading_from(contender, torch.optim.AdamW)


def _by_shape(model: Any) -> list[dict[str, Any]]:
    """Weights and biases apart, as for weight decay."""
    return [{"params": [p for p in model.parameters() if p.dim() == dim]} for dim in (2, 1)]


@situation(
    "groups in another order",
    "Saved with groups of weights and biases, loaded with groups of biases and weights.",
    REFUSES,
    ORDER,
)
def in_another_order(contender: Contender) -> Outcome:
    saved = Training(contender, groups=_by_shape).run(SAVED_AT)
    spoiled = copy.deepcopy(saved.optimizer.state_dict())
    return _loading(contender, spoiled, ORDER, groups=lambda model: _by_shape(model)[::-1])


@situation(
    "checkpoint of fewer groups",
    "Saved with one group, loaded into an optimizer with two.",
    REFUSES,
    ORDER,
)
def of_fewer_groups(contender: Contender) -> Outcome:
    saved = Training(contender).run(SAVED_AT)
    return _loading(contender, copy.deepcopy(saved.optimizer.state_dict()), ORDER, groups=_by_shape)


@situation(
    "truncated checkpoint file",
    "The file breaks off in the middle. torch.load tells so before any optimizer sees it.",
    "Cannot be loaded. A refusal counts if the next 40 steps are bitwise those of a run in which nothing was loaded.",
)
def truncated(contender: Contender) -> Outcome:
    training = Training(contender).run(SAVED_AT)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        # With something beside it: of files below 64 kB torch.load says less.
        torch.save({"optimizer": training.optimizer.state_dict(), "other": torch.zeros(100_000)}, file)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        try:
            training.optimizer.load_state_dict(torch.load(file, weights_only=False)["optimizer"])
        except Exception as error:
            continued = _continued(contender, training)
            return continued if continued.verdict == WRONG else Outcome(REFUSED, text_of(error))
    return Outcome(WRONG, "half a file was loaded")
