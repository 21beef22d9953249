"""Kernels for GPUs, in Triton: a step of a few launches over a table of addresses."""

from mechanic.torch.gpu.choice import takes
from mechanic.torch.gpu.driver import observe, step

__all__ = ["observe", "step", "takes"]
