"""What the submission and the small workload need of ``algoperf.spec``, for where AlgoPerf is not installed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

Tensor = RandomState = Hyperparameters = ModelAuxiliaryState = ModelInitState = Any
ParameterContainer = ParameterTypeTree = OptimizerState = UpdateReturn = Any


class LossType(enum.Enum):
    SOFTMAX_CROSS_ENTROPY = 0


class ForwardPassMode(enum.Enum):
    TRAIN = 0
    EVAL = 1


class Workload:
    """The part that AlgoPerf's own class implements."""

    num_eval_train_examples: int
    num_validation_examples: int
    _eval_model_on_split: Callable[..., dict[str, float]]

    def __init__(self) -> None:
        self._param_types: ParameterTypeTree = None
        self.metrics_logger: Any = None

    @property
    def model_params_types(self) -> ParameterTypeTree:
        return self._param_types

    def eval_model(
        self,
        global_batch_size: int,
        params: ParameterContainer,
        model_state: ModelAuxiliaryState,
        rng: RandomState,
        data_dir: str,
        imagenet_v2_data_dir: str | None,
        global_step: int,
    ) -> dict[str, float]:
        splits = {
            "train": ("eval_train", self.num_eval_train_examples),
            "validation": ("validation", self.num_validation_examples),
        }
        results: dict[str, float] = {}
        for name, (split, size) in splits.items():
            found = self._eval_model_on_split(
                split, size, global_batch_size, params, model_state, rng, data_dir, global_step
            )
            results |= {f"{name}/{key}": value for key, value in found.items()}
        return results
