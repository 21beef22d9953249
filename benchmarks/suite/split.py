"""The wider suite: tasks of many kinds, half of them held out.

The kinds and the names were written down before anything was run on them. The algorithm may be changed by what is seen
on the development tasks. The held-out tasks are looked at once, at the end.
"""

from __future__ import annotations

SPLIT = {  # kind: (development, held out)
    "regression, tabular": ("mlp-diabetes", "mlp-friedman"),
    "regression, a function": ("mlp-sin", "mlp-robot-arm"),
    "physics-informed network": ("pinn-heat", "pinn-burgers"),
    "matrix factorisation": ("factors-low-rank", "factors-characters"),
    "autoencoder": ("autoencoder-mnist", "denoising-fashion"),
    "diffusion": ("diffusion-mnist", "diffusion-fashion"),
    "contrastive learning": ("contrastive-mnist", "contrastive-tatoeba"),
    "policy gradient": ("policy-cartpole", "policy-pendulum"),
    "LoRA": ("lora-banking77", "lora-gutenberg"),
    "sets and graphs": ("set-mnist", "graph-triangles"),
    "long sequences": ("gru-mnist", "lstm-adding"),
    "imbalanced classes": ("imbalanced-fashion", "imbalanced-letter"),
    "label noise": ("noisy-labels-mnist", "noisy-labels-usps"),
    "tiny and huge losses": ("mlp-adult-loss1e-6", "gpt-shakespeare-loss1e6"),
    "batch 1 and full batch": ("mlp-pendigits-batch1", "mlp-satimage-full-batch"),
    "no schedule": ("mlp-fashion-constant", "gpt-shakespeare-constant"),
    "warm-up, stable, decay": ("gpt-shakespeare-wsd", "cnn-mnist-wsd"),
    "OneCycle": ("cnn-mnist-onecycle", "resnet-cifar10-onecycle"),
    "plateau": ("plateau-deep-mlp", "plateau-parity"),
    "noise": ("noisy-regression", "noisy-gradients-vowel"),
}
DEVELOPMENT, HELD_OUT = (tuple(pair[side] for pair in SPLIT.values()) for side in (0, 1))
