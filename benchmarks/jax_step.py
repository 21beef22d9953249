"""The cost of a step in JAX: bare AdamW, ours around it, and Optax's own mechanize around it.

    python benchmarks/jax_step.py [MILLIONS_OF_PARAMETERS] [STEPS]

Everything in one process, parameters and state donated, the contenders taking turns; the ratios are of medians.
Words are ``compiled.cost_analysis()["bytes accessed"]`` in float32 per parameter, memory is
``compiled.memory_analysis()``.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from mechanic.jax import mechanize

BARE = "adamw"
CONTENDERS = {
    BARE: lambda: optax.adamw(1e-3),
    "mechanic": lambda: mechanize(optax.adamw(1.0)),
    "optax.contrib.mechanize": lambda: optax.contrib.mechanize(optax.adamw(1.0)),
}
LEAVES = 10


def compiled_step(optimizer, params, grads):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # Compiled for what the second step sees: Optax's mechanize makes the dtypes of its state wider in the first.
    state = jax.eval_shape(step, params, jax.eval_shape(optimizer.init, params), grads)[1]
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()


def random_tree(seed, side):
    keys = jax.random.split(jax.random.key(seed), LEAVES)
    return [0.02 * jax.random.normal(key, (side, side)) for key in keys]


def main(millions: float = 10.0, steps: int = 15) -> None:
    side = round((millions * 1e6 / LEAVES) ** 0.5)
    parameters = LEAVES * side**2
    grads = random_tree(1, side)
    steppers, carried = {}, {}
    for name, make in CONTENDERS.items():
        optimizer, params = make(), random_tree(0, side)
        steppers[name] = compiled_step(optimizer, params, grads)
        carried[name] = (params, jax.jit(optimizer.init)(params))
        if name != BARE:  # donated, so the state must not share a buffer with the parameters, which Optax's does
            carried[name] = jax.tree.map(jnp.copy, carried[name])

    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(steps + 2):
        for name, step in steppers.items():
            start = time.perf_counter()
            carried[name] = jax.block_until_ready(step(*carried[name], grads))
            times[name].append(time.perf_counter() - start)

    print(f"{parameters / 1e6:.1f}M parameters in {LEAVES} matrices, {jax.devices()[0].platform}, {steps} steps each")
    print("| | ms | over bare | words per parameter | state, B/parameter | temporary, B/parameter |")
    print("|---|---|---|---|---|---|")
    bare = statistics.median(times[BARE][2:])
    for name, step in steppers.items():
        median = statistics.median(times[name][2:])
        words = step.cost_analysis()["bytes accessed"] / 4 / parameters
        state = sum(leaf.nbytes for leaf in jax.tree.leaves(carried[name][1])) / parameters
        temporary = step.memory_analysis().temp_size_in_bytes / parameters
        print(f"| {name} | {1e3 * median:.1f} | {median / bare:.2f} | {words:.1f} | {state:.2f} | {temporary:.2f} |")


if __name__ == "__main__":
    main(*(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, int(sys.argv[2]) if len(sys.argv) > 2 else 15))
