"""For Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from mechanic.integrations import readings

__all__ = ["ScaleMonitor"]


class ScaleMonitor(Callback):
    """Logs S, the learned rate and the effective one to all loggers of the Trainer.

    ``Trainer(callbacks=[ScaleMonitor()])``. It logs on the steps on which Lightning does, every ``log_every_n_steps``,
    under the keys of :func:`mechanic.integrations.readings`; ``mechanic/lr`` is the rate of the step that was made.
    Lightning's ``LearningRateMonitor`` shows the schedule alone.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._stepping: list[Optimizer] = []  # in this batch, to be read at its end

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._is_due = trainer._logger_connector.should_update_logs  # as LearningRateMonitor asks
        self._stepping = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._is_due and optimizer not in self._stepping:
            self._stepping.append(optimizer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        read = {key: value for optimizer in self._stepping for key, value in readings(optimizer).items()}
        if read:
            for logger in trainer.loggers:
                logger.log_metrics(read, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._stepping = []
