"""What must hold after every operation in JAX. All of it is worked out in NumPy, in double precision."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mechanic.jax import scales
from mechanic.jax.storage import decode
from mechanic.tuner import TunerState, delta_retention, total_scale, update

GAPS = {"bfloat16": 2**-7, "int8": 2 / 127}  # how far rounding may take Delta, relative to its largest element


def random(rng, shape, dtype):
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=shape)
    return jnp.asarray(values, dtype)


def wide(array):
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def widened(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def is_half_precision(dtype):
    return jnp.finfo(dtype).bits == 16


def same_bits(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )


def same_values(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def without_counts(tuner, row):
    """One row of a tuner, without what counts steps that were not finite."""
    return [np.asarray(field)[row] for name, field in tuner._asdict().items() if name != "nonfinite_steps"]


def check_same_types(before, after):
    """Else a jitted step would compile again, or a checkpoint no longer fit."""
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.dtype, old.shape) == (new.dtype, new.shape)


def check_finite(params, state):
    """Also of the base's own state."""
    for path, leaf in jax.tree.leaves_with_path((params, state)):
        finite = np.isfinite(wide(leaf)).all()
        assert finite, f"{jax.tree_util.keystr(path)} is not finite: {leaf}"


def check_scales(state, setup):
    found = scales(state)
    assert found.keys() == setup.tuners.keys()
    assert all(scale >= 0 for scale in found.values()), f"scales are {found}"
    if state.tuner is not None:
        total = np.sum(np.asarray(state.tuner.scales), -1, dtype=float)
        np.testing.assert_allclose([float(scale) for scale in found.values()], total, rtol=1e-6)


def check_close(a, b):
    """Of float32, after one step."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-4, atol=1e-4 * np.abs(np.asarray(y)).max())


class Point(NamedTuple):
    start: np.ndarray  # x - S Delta
    x: np.ndarray
    scale: float
    delta: np.ndarray

    def size_with(self, after):
        """Of the numbers that a step adds up."""
        x, delta = (max(np.abs(a).max(), np.abs(b).max()) for a, b in ((self.x, after.x), (self.delta, after.delta)))
        return x + (self.scale + after.scale) * delta


class Start:
    """Where every parameter would be at S = 0: x_1 = x - S Delta. Steps, forgetting included, leave it as it is."""

    def __init__(self, params, state, setup):
        self._points = _points(params, state, setup)

    def check(self, params, state, setup):
        points = _points(params, state, setup)
        for name in points.keys() & self._points.keys():
            former, now = self._points[name], points[name]
            allowed = _rounding(former, now, setup.dtype) + _rounding_of_delta(now, setup.delta)
            moved = np.abs(now.start - former.start)
            assert (moved <= allowed).all(), f"x - S Delta of {name!r} moved by {moved}, rounding allows {allowed}"
        self._points = points


def _points(params, state, setup):
    """By name of the parameter; none where the scale is frozen."""
    points = {}
    for tuner, parts in setup.tuners.items() if state.delta is not None else ():
        scale = float(state.scale[tuner])
        for name in parts:
            x, delta = _value(params[name], state, name), delta_of(state, name)
            points[name] = Point(x - scale * delta, x, scale, delta)
    return points


def _rounding(former, now, dtype):
    """Of one step, by element."""
    eps, size = float(jnp.finfo(dtype).eps), former.size_with(now)
    if not is_half_precision(dtype):
        return np.full(now.x.shape, 32 * eps * size)
    # docs/jax.md: a parameter that more than doubles or halves lands a last bit or two beside its value.
    jumps = np.abs(np.log2(np.abs(now.x) / np.maximum(np.abs(former.x), 1e-30) + 1e-30)) > 0.9
    jumps |= np.sign(now.x) != np.sign(former.x)
    return np.where(jumps, 2 * eps, eps / 32) * size


def _rounding_of_delta(now, storage):
    """Of one step: the parameter moves by Delta before it is rounded."""
    return 1.1 * GAPS.get(storage, 0.0) * now.scale * np.abs(now.delta).max()


def delta_of(state, name):
    """As numbers, whatever it is stored in."""
    of_blocks = None if state.delta_scales is None else state.delta_scales[name]
    return wide(state.delta[name] if of_blocks is None else decode(state.delta[name], of_blocks, jnp.float32))


def _value(p, state, name):
    """What a parameter stands for: in half precision the residual is a part of it."""
    if state.residual is None:
        return wide(p)
    value = np.asarray(p, np.float32) + np.asarray(state.residual[name], np.float32)
    stored = value.astype(np.asarray(p).dtype) == np.asarray(p)
    return np.where(stored, value, np.asarray(p, np.float32)).astype(np.float64)  # else somebody has written to it


class Prediction(NamedTuple):
    params: dict
    deltas: dict
    scales: dict


def predict(params, state, grads, setup):
    """One step of float64 parameters, worked out beside Mechanic: S' in NumPy, the base's update by the bare base."""
    proposed, _ = setup.base.update(grads, state.base, params)
    prediction = Prediction({}, {}, {})
    for row, (tuner, parts) in enumerate(sorted(setup.tuners.items())):
        x, g, d = (
            np.concatenate([wide(tree[name]).ravel() for name in sorted(parts)])
            for tree in (params, grads, state.delta)
        )
        before = TunerState(*(np.asarray(field)[row : row + 1] for field in state.tuner))
        sums = np.array([[d @ g, d @ x, g @ g, x @ x, d @ d]])
        after = update(before, sums, np.array(setup.config.betas), setup.config, np)
        retention = delta_retention(before, after, setup.config, np)
        retention = 1.0 if retention is None else retention[0]
        scale, new_scale = total_scale(before, np)[0], total_scale(after, np)[0]
        prediction.scales[tuner] = new_scale
        for name in parts:
            delta = wide(state.delta[name])
            new_delta = retention * delta + wide(proposed[name]) / setup.peak_lr
            prediction.deltas[name] = new_delta
            prediction.params[name] = wide(params[name]) + new_scale * new_delta - scale * delta
    return prediction


def check_prediction(prediction, params, state):
    for expected, found in (
        (prediction.params, params),
        (prediction.deltas, state.delta),
        (prediction.scales, scales(state)),
    ):
        for name, value in expected.items():
            size = np.abs(value).max()
            np.testing.assert_allclose(np.asarray(found[name]), value, rtol=1e-9, atol=1e-9 * size)
