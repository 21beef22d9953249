"""For Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from mechanic.integrations import readings

__all__ = ["ScaleMonitor"]


class ScaleMonitor(Callback):
    """Logs S and the effective learning rate to all loggers of the Trainer.

    ``Trainer(callbacks=[ScaleMonitor()])``. It logs on the steps on which Lightning does, every ``log_every_n_steps``,
    under the keys of :func:`mechanic.integrations.readings`: S and the rate of the step that was made.
    Lightning's ``LearningRateMonitor`` shows the schedule alone.
    """

    def __init__(self) -> None:
        self._due: Optimizer | None = None  # to be read once it has stepped

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self._due = optimizer

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._due is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(readings(self._due), step=trainer.global_step - 1)
        self._due = None
