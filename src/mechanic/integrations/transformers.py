"""For transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mechanic.integrations import readings

__all__ = ["ScaleCallback"]


class ScaleCallback(TrainerCallback):
    """Logs S, the learned rate and the effective one, wherever the Trainer reports to.

    ``trainer.add_callback(ScaleCallback(trainer))``. It logs on the steps on which the Trainer logs, in a record of
    its own, under the keys of :func:`mechanic.integrations.readings`; ``mechanic/lr`` is the rate of the step that was
    made. The Trainer's ``learning_rate`` is the schedule alone.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer  # callbacks are not handed what could log

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_log:
            self.trainer.log(readings(kwargs["optimizer"]))
            control.should_log = True  # the Trainer takes this for its own record, which is still to come

    on_epoch_end = on_step_end  # with logging_strategy="epoch"
