"""The calibrated contest: one point of every method's knobs, found on some tasks and judged on others."""
