"""The paper's experiments at their real size, as recipes that run under ``torchrun``."""
