"""A workload that trains in seconds on a CPU: scikit-learn's digits."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

try:
    from algoperf import spec
except ImportError:
    from benchmarks.algoperf import stand_in as spec


class Digits(spec.Workload):
    """1,797 digits of 8 x 8 pixels, the last 360 for validation. Every third one has no weight, as padding has none."""

    def __init__(self, step_hint: int = 300) -> None:
        super().__init__()
        self._step_hint = step_hint

    @functools.cache  # noqa: B019  # a few small tensors
    def data(self, split: str) -> dict[str, Tensor]:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        rows = slice(-360, None) if split == "validation" else slice(-360)
        targets = torch.tensor(labels[rows])
        inputs = torch.tensor(images[rows], dtype=torch.float32) / 16
        return {"inputs": inputs, "targets": targets, "weights": (torch.arange(len(targets)) % 3 > 0).float()}

    def model(self) -> nn.Module:
        layers = {"hidden": nn.Linear(64, 64), "norm": nn.LayerNorm(64), "act": nn.GELU(), "output": nn.Linear(64, 10)}
        return nn.Sequential(OrderedDict(layers))

    # What AlgoPerf asks of a workload. No test split: num_test_examples is None.

    batch_size = 64
    dropout_rate = 0.0
    target_metric_name = "error"
    validation_target_value = test_target_value = 0.0
    loss_type = spec.LossType.SOFTMAX_CROSS_ENTROPY
    eval_batch_size = 500
    num_test_examples = None
    train_mean = 0.0
    train_stddev = 1.0
    max_allowed_runtime_sec = 600
    eval_period_time_sec = 60

    @property
    def step_hint(self) -> int:
        return self._step_hint

    @property
    def num_train_examples(self) -> int:
        return len(self.data("train")["inputs"])

    @property
    def num_eval_train_examples(self) -> int:
        return len(self.data("eval_train")["inputs"])

    @property
    def num_validation_examples(self) -> int:
        return len(self.data("validation")["inputs"])

    def has_reached_validation_target(self, eval_result: dict[str, float]) -> bool:
        return eval_result["validation/error"] <= self.validation_target_value

    def has_reached_test_target(self, eval_result: dict[str, float]) -> bool:
        return False

    def is_output_params(self, param_key: str) -> bool:
        return param_key.startswith("output.")

    def _build_input_queue(
        self,
        data_rng: spec.RandomState,
        split: str,
        data_dir: str,
        global_batch_size: int,
        cache: bool | None = None,
        repeat_final_dataset: bool | None = None,
        num_batches: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Random batches without end; each rank gets its part."""
        data = self.data(split)
        generator = torch.Generator().manual_seed(int(data_rng[0]))
        while True:
            rows = torch.randint(len(data["inputs"]), (global_batch_size,), generator=generator)
            if dist.is_initialized():
                rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
            yield {name: values[rows] for name, values in data.items()}

    def init_model_fn(self, rng: spec.RandomState) -> spec.ModelInitState:
        torch.manual_seed(int(rng[0]))
        model = self.model()
        self._param_types = dict.fromkeys(name for name, _ in model.named_parameters())
        return (DistributedDataParallel(model) if dist.is_initialized() else model), None

    def model_fn(
        self,
        params: spec.ParameterContainer,
        augmented_and_preprocessed_input_batch: dict[str, Tensor],
        model_state: spec.ModelAuxiliaryState,
        mode: spec.ForwardPassMode,
        rng: spec.RandomState,
        update_batch_norm: bool,
        dropout_rate: float | None = None,
    ) -> tuple[Tensor, spec.ModelAuxiliaryState]:
        is_training = mode == spec.ForwardPassMode.TRAIN
        if not is_training:
            params.eval()
        with contextlib.nullcontext() if is_training else torch.no_grad():
            logits = params(augmented_and_preprocessed_input_batch["inputs"])
        rate = self.dropout_rate if dropout_rate is None else dropout_rate
        return nn.functional.dropout(logits, rate, is_training), model_state

    def loss_fn(
        self,
        label_batch: Tensor,
        logits_batch: Tensor,
        mask_batch: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> dict[str, Tensor]:
        losses = nn.functional.cross_entropy(
            logits_batch.flatten(0, -2), label_batch.flatten(), reduction="none", label_smoothing=label_smoothing
        ).view_as(label_batch)
        weights = torch.ones_like(losses) if mask_batch is None else mask_batch
        losses = losses * weights
        return {"summed": losses.sum(), "n_valid_examples": weights.sum(), "per_example": losses}

    def _eval_model_on_split(
        self,
        split: str,
        num_examples: int,
        global_batch_size: int,
        params: spec.ParameterContainer,
        model_state: spec.ModelAuxiliaryState,
        rng: spec.RandomState,
        data_dir: str,
        global_step: int = 0,
    ) -> dict[str, float]:
        """Mean loss and share of wrong predictions. Every rank evaluates everything."""
        model = params.module if isinstance(params, DistributedDataParallel) else params
        batch = {name: values[:num_examples] for name, values in self.data(split).items()}
        logits, _ = self.model_fn(model, batch, model_state, spec.ForwardPassMode.EVAL, rng, False)
        losses = self.loss_fn(batch["targets"], logits, batch["weights"])
        wrong = (logits.argmax(-1) != batch["targets"]) * batch["weights"]
        count = losses["n_valid_examples"]
        return {"loss": (losses["summed"] / count).item(), "error": (wrong.sum() / count).item()}
