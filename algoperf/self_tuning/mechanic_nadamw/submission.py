"""AlgoPerf, self-tuning ruleset, PyTorch: NAdamW, whose learning rate Mechanic learns.

Nothing here depends on the workload but the batch size and the length of the schedule. See README.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from algoperf import spec
from mechanic.torch import Mechanic

BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
WARM_UP = 0.05  # of workload.step_hint
FLOOR = 0.01  # of the peak: where the cosine ends, and stays
LOG_EVERY = 500

# Global. Those of AlgoPerf's NAdamW baselines, whose speed step_hint is made for.
BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_silu": 512,
    "imagenet_resnet_gelu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "ogbg": 512,
    "wmt": 128,
    "mnist": 16,
}


def get_batch_size(workload_name: str) -> int:
    """The global batch size. The runner asks for the base workload if a variant is unknown here."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"no batch size for the workload {workload_name!r}")
    return BATCH_SIZES[workload_name]


def share_of_peak(step: int, step_hint: int) -> float:
    """The schedule: a linear warm-up, then a cosine to FLOOR, which is kept from step_hint on."""
    warm_up = max(1, int(WARM_UP * step_hint))
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    done = min(1.0, (step - warm_up) / max(1, step_hint - warm_up))
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def nadamw(model_params: spec.ParameterContainer, lr: float) -> torch.optim.Optimizer:
    return torch.optim.NAdam(
        model_params.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, decoupled_weight_decay=True
    )


def init_optimizer_state(
    workload: spec.Workload,
    model_params: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    rng: spec.RandomState,
) -> spec.OptimizerState:
    """The optimizer and its schedule: both have a ``state_dict``, as the runner's checkpoints need."""
    optimizer = Mechanic(nadamw(model_params, lr=1.0))
    step_hint = workload.step_hint
    return {"optimizer": optimizer, "scheduler": LambdaLR(optimizer, lambda step: share_of_peak(step, step_hint))}


def update_params(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    batch: dict[str, spec.Tensor],
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
    train_state: dict[str, Any] | None = None,
) -> spec.UpdateReturn:
    """One step. Dropout and label smoothing are the workload's own."""
    optimizer = optimizer_state["optimizer"]
    model = with_synchronised_gradients(current_param_container)
    model.train()
    optimizer.zero_grad()
    logits, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
    )
    losses = workload.loss_fn(label_batch=batch["targets"], logits_batch=logits, mask_batch=batch.get("weights"))
    loss = losses["summed"] / examples_per_rank(losses)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=MAX_GRAD_NORM)
    optimizer.step()
    optimizer_state["scheduler"].step()
    if workload.metrics_logger is not None and global_step % LOG_EVERY == 0:
        metrics = {"loss": loss.item(), "learned_scale": optimizer.scales()["default"]}
        workload.metrics_logger.append_scalar_metrics(metrics, global_step)
    return optimizer_state, model, model_state


def with_synchronised_gradients(model: torch.nn.Module) -> torch.nn.Module:
    """The model under DDP, if there are ranks: a run that the runner has restored comes back without it."""
    if not dist.is_initialized() or any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=None if device.index is None else [device.index])


def examples_per_rank(losses: dict[str, spec.Tensor]) -> spec.Tensor:
    """The mean over the ranks: DDP averages the gradients, and the ranks may have different numbers of examples."""
    count = torch.as_tensor(losses["n_valid_examples"]).to(losses["summed"].detach())
    if dist.is_initialized():
        count = count.clone()
        dist.all_reduce(count)
        count /= dist.get_world_size()
    return count


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
) -> spec.UpdateReturn:
    """Nothing to prepare: the parameters that are trained are those to evaluate."""
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: spec.OptimizerState,
    current_param_container: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters,
    global_step: int,
    rng: spec.RandomState,
) -> dict[str, spec.Tensor]:
    """The next batch, whatever it is."""
    return next(input_queue)
