"""For Lightning."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from mechanic.integrations import readings

__all__ = ["ScaleMonitor"]


class ScaleMonitor(Callback):
    """Logs S and the learning rate really applied, to all loggers of the Trainer.

    ``Trainer(callbacks=[ScaleMonitor()])``. It logs on the steps on which Lightning does, every ``log_every_n_steps``,
    under the keys of :func:`mechanic.integrations.readings`: S so far, and the rate that the step starts from.
    Lightning's ``LearningRateMonitor`` shows the schedule alone.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps:
            return
        for logger in trainer.loggers:
            logger.log_metrics(readings(optimizer), step=trainer.global_step)
