"""The cost of a step in JAX: bare AdamW, ours around it, Delta in fewer bytes too, and Optax's own mechanize around it.

    python -m benchmarks.speed.jax_step [MILLIONS_OF_PARAMETERS] [STEPS]

Everything in one process, parameters and state donated, the contenders taking turns; the ratios are of medians.
Words are ``compiled.cost_analysis()["bytes accessed"]`` in float32 per parameter, memory is
``compiled.memory_analysis()``.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mechanic.jax import mechanize

BARE = "adamw"
CONTENDERS = {
    BARE: lambda: optax.adamw(1e-3),
    "mechanic": lambda: mechanize(optax.adamw(1.0)),
    "mechanic, delta=bfloat16": lambda: mechanize(optax.adamw(1.0), delta="bfloat16"),
    "mechanic, delta=int8": lambda: mechanize(optax.adamw(1.0), delta="int8"),
    "optax.contrib.mechanize": lambda: optax.contrib.mechanize(optax.adamw(1.0)),
}
LEAVES = 10


class Contender(NamedTuple):
    """A compiled step, ``(params, state, grads) -> (params, state)``, and what to start it with."""

    step: Any
    params: Any
    state: Any


class Cost(NamedTuple):
    """Per parameter."""

    words: float  # read and written, of four bytes
    state: float  # in bytes
    temporary: float  # in bytes, while a step runs


def build(name: str, side: int) -> Contender:
    """Around LEAVES square matrices."""
    optimizer, params = CONTENDERS[name](), random_tree(0, side)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    # Compiled for what the second step sees: Optax's mechanize makes the dtypes of its state wider in the first.
    second = jax.eval_shape(step, params, state, params)[1]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, second, params).compile()
    # Buffers of their own: Optax's state shares some with the parameters, and then nothing can be donated.
    return Contender(compiled, *jax.tree.map(jnp.copy, (params, state)))


def cost_of(contender: Contender) -> Cost:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(contender.params))
    return Cost(
        words=contender.step.cost_analysis()["bytes accessed"] / 4 / parameters,
        state=sum(leaf.nbytes for leaf in jax.tree.leaves(contender.state)) / parameters,
        temporary=contender.step.memory_analysis().temp_size_in_bytes / parameters,
    )


def random_tree(seed: int, side: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), LEAVES)
    return [0.02 * jax.random.normal(key, (side, side)) for key in keys]


def times_of(contenders: dict[str, Contender], grads: Any, steps: int) -> dict[str, float]:
    """Medians in seconds, the first two steps aside."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    carried = {name: (contender.params, contender.state) for name, contender in contenders.items()}
    for _ in range(steps + 2):
        for name, contender in contenders.items():
            start = time.perf_counter()
            carried[name] = jax.block_until_ready(contender.step(*carried[name], grads))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def main(millions: float = 10.0, steps: int = 15) -> None:
    side = round((millions * 1e6 / LEAVES) ** 0.5)
    contenders = {name: build(name, side) for name in CONTENDERS}
    costs = {name: cost_of(contender) for name, contender in contenders.items()}  # before the steps, which donate
    seconds = times_of(contenders, random_tree(1, side), steps)

    platform = jax.devices()[0].platform
    print(f"{LEAVES * side**2 / 1e6:.1f}M parameters in {LEAVES} matrices, {platform}, {steps} steps each")
    print("| | ms | over bare | words per parameter | state, B/parameter | temporary, B/parameter |")
    print("|---|---|---|---|---|---|")
    for name, cost in costs.items():
        print(f"| {name} | {1e3 * seconds[name]:.1f} | {seconds[name] / seconds[BARE]:.2f} ", end="")
        print(f"| {cost.words:.1f} | {cost.state:.2f} | {cost.temporary:.2f} |")


if __name__ == "__main__":
    main(*(convert(given) for convert, given in zip((float, int), sys.argv[1:], strict=False)))
