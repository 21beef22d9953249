"""transformers' Trainer, with everything a real run has."""

import pytest
import torch

pytest.importorskip("accelerate", reason="has an environment of its own: make test-ecosystem")
import hf_trainer
from mechanic.integrations.transformers import ScaleCallback
from mechanic.torch import Mechanic, MechanicAdamW, MechanicMuon
from tests.ecosystem.proposed import define

MIDDLE, END = 4, 8


def with_instance(folder, **options):
    model = hf_trainer.small_model()
    optimizer = Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0))
    return hf_trainer.build(folder, model, {"optimizers": (optimizer, None)}, **options)


def with_muon(folder, **options):
    model = hf_trainer.small_model()
    return hf_trainer.build(folder, model, {"optimizers": (MechanicMuon(model), None)}, **options)


def with_class(folder, lr=1.0, cls=MechanicAdamW, **options):
    return hf_trainer.build(
        folder, hf_trainer.small_model(), {"optimizer_cls_and_kwargs": (cls, {"lr": lr})}, **options
    )


def without(folder, **options):
    trainer = with_class(folder, lr=3e-3, cls=torch.optim.AdamW, **options)
    trainer.remove_callback(ScaleCallback)
    return trainer


def trained(trainer, **options):
    """The parameters and the losses by step, after training."""
    trainer.train(**options)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return [p.detach().clone() for p in trainer.model.parameters()], losses


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("build", [without, with_class, with_instance, with_muon])
def test_resume_is_bitwise_as_the_trainers_own_is(build, bf16, tmp_path):
    options = {"bf16": bf16, "max_steps": END, "save_steps": MIDDLE, "logging_steps": 1}
    expected, losses = trained(build(tmp_path, **options))
    found, further = trained(build(tmp_path, **options), resume_from_checkpoint=str(tmp_path / f"checkpoint-{MIDDLE}"))
    assert further == losses
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)


def test_the_lr_is_a_shape_under_accumulation_clipping_and_a_warm_up(tmp_path):
    rates = []
    for lr in (1.0, 5e-5):
        trainer = with_class(tmp_path, lr=lr, max_steps=20, save_strategy="no", bf16=False)
        _, losses = trained(trainer)
        assert losses[20] < losses[10] - 1
        rates.append(trainer.optimizer.optimizer.scales()["default"])
    assert rates[0] == pytest.approx(rates[1], rel=1e-3)


def test_accumulated_batches_train_as_one_large_batch(tmp_path):
    options = {"max_steps": END, "save_strategy": "no", "bf16": False}
    whole, _ = trained(with_class(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=1, **options))
    parts, _ = trained(with_class(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, **options))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_scale_and_rate_are_logged_beside_the_loss_wherever_the_trainer_reports_to(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = with_class(tmp_path, max_steps=6, logging_steps=2, save_strategy="no", report_to="tensorboard")
    trainer.train()
    scale = trainer.optimizer.optimizer.scales()["default"]
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 6]
    ours = [entry for entry in history if "mechanic/scale" in entry]
    assert [entry["step"] for entry in ours] == [2, 4, 6]
    schedule = {entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry}
    for entry in ours:  # of the same step as the Trainer's, and built at lr=1.0
        assert entry["mechanic/lr"] == pytest.approx(entry["mechanic/scale"] * schedule[entry["step"]])
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert {"train/loss", "train/mechanic/scale", "train/mechanic/lr"} <= set(board.Tags()["scalars"])
    assert board.Scalars("train/mechanic/scale")[-1].value == pytest.approx(scale)


def test_scale_and_rate_are_logged_where_the_trainer_logs_by_epochs(tmp_path):
    trainer = with_class(tmp_path, num_train_epochs=2, max_steps=-1, logging_strategy="epoch", save_strategy="no")
    trainer.train()
    history = trainer.state.log_history
    steps = [[entry["step"] for entry in history if key in entry] for key in ("loss", "mechanic/scale")]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 2


def test_without_a_mechanic_the_callback_says_so(tmp_path):
    trainer = without(tmp_path, max_steps=1, logging_steps=1, save_strategy="no")
    trainer.add_callback(ScaleCallback(trainer))
    with pytest.raises(TypeError, match="no Mechanic to read in AcceleratedOptimizer"):
        trainer.train()


@pytest.fixture
def _transformers_with_our_proposal(monkeypatch):
    from transformers import trainer_optimizer, training_args
    from transformers.utils import ExplicitEnum

    names = {**{name.name: name.value for name in training_args.OptimizerNames}, "MECHANIC_ADAMW": "mechanic_adamw"}
    monkeypatch.setattr(training_args, "OptimizerNames", ExplicitEnum("OptimizerNames", names))
    handler = define("_get_mechanic_adamw", trainer_optimizer)
    monkeypatch.setitem(trainer_optimizer._OPTIMIZER_HANDLERS, "mechanic_adamw", handler)


@pytest.mark.usefixtures("_transformers_with_our_proposal")
def test_the_name_that_contrib_proposes_trains_as_the_class_does(tmp_path):
    options = {"max_steps": END, "save_strategy": "no", "bf16": False}
    expected, _ = trained(with_class(tmp_path, **options))
    trainer = hf_trainer.build(
        tmp_path, hf_trainer.small_model(), {}, optim="mechanic_adamw", learning_rate=1.0, **options
    )
    found, _ = trained(trainer)
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)

    small = hf_trainer.build(
        tmp_path, hf_trainer.small_model(), {}, optim="mechanic_adamw", optim_args="delta=int8", **options
    )
    trained(small)
    assert all(state["mechanic_delta"].dtype == torch.int8 for state in small.optimizer.optimizer.state.values())
