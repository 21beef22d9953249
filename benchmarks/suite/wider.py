"""Tasks of kinds that the first suite lacks; ``benchmarks.suite.split`` says which are held out.

Those that are an older task with another loss, schedule or batch are in ``benchmarks.suite.tasks``, as is LoRA.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.data import datasets, synthetic
from benchmarks.suite import losses, models, policies
from benchmarks.suite import wider_models as networks
from benchmarks.suite.losses import squares
from benchmarks.suite.schedules import cosine
from benchmarks.suite.task import Task

# A task judged by the loss that is trained: the mean of squares.
regression = partial(Task, schedule=cosine, loss=squares, judged_by=squares)

REGRESSION = [
    regression(
        name="mlp-diabetes",
        data=synthetic.diabetes,
        model=partial(networks.dense, 10, 32, 32, 1),
        steps=500,
        batch=32,
        seconds=0.5,
    ),
    regression(
        name="mlp-friedman",
        data=synthetic.friedman,
        model=partial(networks.dense, 10, 64, 64, 1, between=nn.ReLU),
        steps=1000,
        batch=64,
        seconds=1.0,
    ),
    regression(
        name="mlp-sin",
        data=synthetic.sine_of_sum,
        model=partial(networks.dense, 20, 64, 64, 1),
        steps=1000,
        batch=64,
        seconds=1.0,
    ),
    regression(
        name="mlp-robot-arm",
        data=synthetic.robot_arm,
        model=partial(networks.dense, 5, 64, 64, 2, between=nn.Tanh),
        steps=1000,
        batch=64,
        seconds=1.0,
    ),
]

PHYSICS = [
    Task(
        name=f"pinn-{name}",
        data=partial(synthetic.points, left),
        model=partial(networks.dense, 2, 32, 32, 32, 1, between=nn.Tanh),
        steps=800,
        batch=64,
        schedule=cosine,
        loss=loss,
        judged_by=loss,
        weight_decay=0.0,
        l2=0.0,
        evaluated=500,
        seconds=3.0,
    )
    for name, left, loss in (
        ("heat", 0.0, losses.physics(losses.heat, losses.two_waves)),
        ("burgers", -1.0, losses.physics(losses.burgers, losses.falling_wave)),
    )
]

FACTORS = [
    regression(
        name="factors-low-rank",
        data=synthetic.low_rank,
        model=partial(networks.Factors, 200, 150, rank=8),
        steps=1000,
        batch=256,
        weight_decay=0.0,
        l2=0.0,
        seconds=1.0,
    ),
    Task(
        name="factors-characters",
        data=synthetic.co_occurrences,
        model=partial(networks.Factors, 65, 65, rank=8, biased=True),
        steps=1000,
        batch=256,
        schedule=cosine,
        loss=losses.weighted_squares,
        judged_by=losses.weighted_squares,
        weight_decay=0.0,
        l2=0.0,
        seconds=1.0,
    ),
]

RECONSTRUCTION = [
    regression(
        name="autoencoder-mnist",
        data=partial(datasets.images, "mnist"),
        model=partial(networks.autoencoder, code=16),
        steps=600,
        batch=64,
        prepare=losses.itself,
        evaluated=500,
        seconds=1.5,
    ),
    regression(
        name="denoising-fashion",
        data=partial(datasets.images, "fashion_mnist"),
        model=partial(networks.autoencoder, code=64),
        steps=600,
        batch=64,
        prepare=losses.without_noise,
        evaluated=500,
        seconds=2.0,
    ),
]
RECONSTRUCTION += [
    regression(
        name=f"diffusion-{name}",
        data=partial(synthetic.small_images, images),
        model=partial(networks.UNet, width=8),
        steps=400,
        batch=32,
        prepare=losses.its_noise,
        evaluated=256,
        seconds=5.0,
    )
    for name, images in (("mnist", "mnist"), ("fashion", "fashion_mnist"))
]

CONTRASTIVE = [
    Task(
        name="contrastive-mnist",
        data=partial(datasets.images, "mnist"),
        model=partial(networks.image_encoder, width=32),
        steps=500,
        batch=64,
        schedule=cosine,
        prepare=losses.two_views,
        loss=losses.contrastive(0.2),
        judged_by=losses.contrastive(0.2),
        evaluated=256,
        seconds=4.0,
    ),
    Task(
        name="contrastive-tatoeba",
        data=partial(datasets.translations, 16),
        model=partial(networks.BagOfPieces, datasets.VOCABULARY, width=64),
        steps=500,
        batch=64,
        schedule=cosine,
        prepare=losses.both,
        loss=losses.contrastive(0.1),
        judged_by=losses.contrastive(0.1),
        evaluated=256,
        seconds=2.0,
    ),
]


def _pendulum_network(answers: int) -> nn.Module:
    return networks.dense(3, 64, 64, answers, between=nn.Tanh)


POLICIES = [
    Task(
        name="policy-cartpole",
        data=partial(policies.starts, (0.05, 0.05, 0.05, 0.05)),
        model=partial(networks.dense, 4, 32, 1, between=nn.Tanh),
        steps=150,
        batch=16,
        schedule=cosine,
        prepare=partial(policies.with_chances, horizon=200),
        loss=policies.reinforce,
        judged_by=policies.minus_return,
        weight_decay=0.0,
        l2=0.0,
        on_gpu=False,
        evaluated=64,
        seconds=6.0,
    ),
    Task(
        name="policy-pendulum",
        data=partial(policies.starts, (3.1416, 1.0)),
        model=partial(policies.ActorCritic, _pendulum_network),
        steps=300,
        batch=32,
        schedule=cosine,
        prepare=partial(policies.with_chances, horizon=100),
        loss=policies.actor_critic,
        judged_by=policies.mean_cost,
        weight_decay=0.0,
        l2=0.0,
        on_gpu=False,
        evaluated=64,
        seconds=7.0,
    ),
]

SETS = [
    Task(
        name="set-mnist",
        data=synthetic.lit_pixels,
        model=partial(networks.DeepSet, 10, width=64),
        steps=600,
        batch=64,
        schedule=cosine,
        evaluated=500,
        seconds=3.0,
    ),
    regression(
        name="graph-triangles",
        data=synthetic.triangles,
        model=partial(networks.GraphNetwork, width=32, layers=3),
        steps=600,
        batch=64,
        seconds=2.0,
    ),
]

SEQUENCES = [
    Task(
        name="gru-mnist",
        data=partial(datasets.images, "mnist"),
        model=partial(networks.PatchGRU, 10, width=32),
        steps=250,
        batch=32,
        schedule=cosine,
        evaluated=250,
        seconds=5.0,
    ),
    regression(
        name="lstm-adding",
        data=synthetic.adding,
        model=partial(networks.LastOfLSTM, 2, width=32),
        steps=400,
        batch=32,
        evaluated=500,
        seconds=2.0,
    ),
]

PLATEAUS = [
    Task(
        name="plateau-deep-mlp",
        data=partial(datasets.rows, "pendigits"),
        model=partial(networks.dense, 16, *[32] * 3, 10, between=nn.Sigmoid),
        steps=1000,
        batch=64,
        schedule=cosine,
        weight_decay=0.0,
        l2=0.0,
        seconds=1.5,
    ),
    Task(
        name="plateau-parity",
        data=synthetic.parity,
        model=partial(networks.dense, 20, 128, 2, between=nn.ReLU),
        steps=1000,
        batch=64,
        schedule=cosine,
        seconds=1.0,
    ),
]

NOISE = [
    regression(
        name="noisy-regression",
        data=synthetic.heavy_tails,
        model=partial(models.logistic_regression, 50, 1),
        steps=1000,
        batch=16,
        weight_decay=0.0,
        l2=0.0,
        evaluated=4000,
        seconds=0.5,
    ),
    Task(
        name="noisy-gradients-vowel",
        data=partial(datasets.rows, "vowel"),
        model=partial(models.mlp, 10, 11, width=32),
        steps=1000,
        batch=2,
        schedule=cosine,
        seconds=1.0,
    ),
]

NEW_KINDS = [
    *REGRESSION,
    *PHYSICS,
    *FACTORS,
    *RECONSTRUCTION,
    *CONTRASTIVE,
    *POLICIES,
    *SETS,
    *SEQUENCES,
    *PLATEAUS,
    *NOISE,
]
