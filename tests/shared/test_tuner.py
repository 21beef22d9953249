"""The tuner by itself: one function for NumPy and torch, and what it must never do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mechanic import TunerConfig
from mechanic.tuner import TunerState, delta_retention, total_scale, update

CONFIGS = [
    TunerConfig(),
    TunerConfig.paper(),
    TunerConfig(betas=(1.0,), guard=False),
    TunerConfig(min_lr=0.1, max_lr=0.2),
]


def random_sums(rng, tuners=3):
    """Sums of vectors that exist, so that Cauchy-Schwarz holds; half of the gradients are tiny."""
    delta, grad, param = rng.normal(size=(3, tuners, 10))
    grad = grad * rng.choice([1.0, 1e-3], size=(tuners, 1))
    pairs = ((delta, grad), (delta, param), (grad, grad), (param, param), (delta, delta))
    return np.stack([(a * b).sum(-1) for a, b in pairs], -1)


def play(config, sums, tuners=3, state=None):
    state = state or TunerState(*np.zeros((len(TunerState._fields), tuners, len(config.betas))))
    for row in sums:
        state = update(state, row, np.array(config.betas), config, np)
    return state


def as_torch(array):
    return torch.tensor(array, dtype=torch.float64)


def as_jax(array):
    return jnp.asarray(array, dtype=jnp.float64)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("module", "convert"), [(torch, as_torch), (jnp, as_jax)], ids=["torch", "jax"])
def test_every_framework_agrees_with_numpy(config, module, convert):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        state = TunerState(*np.zeros((len(TunerState._fields), 3, len(config.betas))))
        twin = TunerState(*(convert(array) for array in state))
        betas = np.array(config.betas)
        for _ in range(50):
            sums = random_sums(rng)
            rate = rng.uniform(size=3)
            state = update(state, sums, betas, config, np, rate)
            twin = update(twin, convert(sums), convert(betas), config, module, convert(rate))
            for array, other in zip(state, twin, strict=True):
                np.testing.assert_allclose(np.asarray(other), array, rtol=1e-12)
    assert (total_scale(state, np) > 0).all()


def test_it_compiles_in_jax():
    config = TunerConfig()
    compiled = jax.jit(lambda state, sums: update(state, sums, jnp.asarray(config.betas), config, jnp))
    state = TunerState(*jnp.zeros((len(TunerState._fields), 1, 5)))
    for _ in range(3):
        state = compiled(state, jnp.asarray([[-1.0, 0.0, 1.0, 4.0, 1.0]]))
    assert compiled._cache_size() == 1
    assert total_scale(state, jnp).item() > 0.01


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(1)
    sums = [random_sums(rng) for _ in range(20)]
    together = play(TunerConfig(), sums)
    for row in range(3):
        alone = play(TunerConfig(), [s[row : row + 1] for s in sums], tuners=1)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_array_equal(a[row : row + 1], b)


@pytest.mark.parametrize("column", range(5))
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_row_with_a_bad_sum_is_kept_and_the_others_go_on(column, bad):
    rng = np.random.default_rng(2)
    state = play(TunerConfig(), [random_sums(rng) for _ in range(10)])
    sums = random_sums(rng)
    good = play(TunerConfig(), [sums], state=state)
    sums[1, column] = bad
    with np.errstate(invalid="ignore"):
        after = play(TunerConfig(), [sums], state=state)
    np.testing.assert_array_equal(after.nonfinite_steps[:, 0], [0, 1, 0])
    as_before = after._replace(nonfinite_steps=state.nonfinite_steps)
    for new, expected, old in zip(as_before, good, state, strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        np.testing.assert_array_equal(new[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(("module", "convert"), [(np, np.asarray), (torch, as_torch), (jnp, as_jax)])
def test_a_row_whose_feedback_overflows_though_its_sums_do_not_is_kept(module, convert):
    config = TunerConfig(decay=1e300)
    won = np.array([[-1.0, 0.0, 1.0, 1.0, 1.0]])
    overflowing = np.array([[-1.0, 1.0, 1e40, 1.0, 1.0]])  # decay * S * |g| * <Delta,x> / |x|
    with jax.enable_x64(True), np.errstate(over="ignore", invalid="ignore"):
        state = play(config, [won], tuners=1)
        state = TunerState(*(convert(array) for array in state))
        after = update(state, convert(overflowing), convert(np.array(config.betas)), config, module)
        for name, new, old in zip(TunerState._fields, after, state, strict=True):
            if name != "nonfinite_steps":
                np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def test_a_row_without_gradient_is_kept():
    rng = np.random.default_rng(3)
    state = play(TunerConfig(), [random_sums(rng) for _ in range(10)])
    sums = random_sums(rng)
    sums[:, [0, 2]] = 0
    for new, old in zip(play(TunerConfig(), [sums] * 100, state=state), state, strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_guard_lets_the_scale_fall_by_half_at_most():
    won, blow = [[-1.0, 0, 1, 1, 1]], [[1e3, 0, 1e6, 1, 1]]

    def fall(guard):
        config = TunerConfig(guard=guard)
        state = play(config, [np.array(won)] * 50, tuners=1)
        struck = play(config, [np.array(blow)], tuners=1, state=state)
        return (total_scale(struck, np) / total_scale(state, np)).item()

    assert fall(guard=False) < 0.01
    assert fall(guard=True) == pytest.approx(0.5)


def test_the_guard_does_not_hold_the_scale_up_where_delta_outgrows_it():
    # A warm-up after a flat start: Delta grows tenfold, and the step that S was right for is now far too long.
    state = play(TunerConfig(), [np.array([[-1.0, 0, 1, 1, 1]])] * 5, tuners=1)
    struck = play(TunerConfig(), [np.array([[1e3, 0, 1e6, 1, 100]])], tuners=1, state=state)
    assert (total_scale(struck, np) / total_scale(state, np)).item() == pytest.approx(0.05)


def test_the_scale_goes_as_far_as_the_learning_rate_lets_it():
    rng, betas, config = np.random.default_rng(4), np.array(TunerConfig().betas), TunerConfig()
    state = TunerState(*np.zeros((len(TunerState._fields), 3, len(betas))))
    for _ in range(10):
        state = update(state, random_sums(rng), betas, config, np, np.full(3, 7.0))
    sums = random_sums(rng)
    scale, wanted = (total_scale(s, np) for s in (state, update(state, sums, betas, config, np, np.full(3, 7.0))))
    for share in (0.0, 0.25, 1.0):
        settled = update(state, sums, betas, config, np, np.full(3, share * 7.0))
        np.testing.assert_allclose(total_scale(settled, np), scale + share * (wanted - scale), rtol=1e-12)
    risen = update(state, sums, betas, config, np, np.full(3, 14.0))
    np.testing.assert_array_equal(total_scale(risen, np), wanted)


@pytest.mark.parametrize("rate", [None, np.full(3, 7.0), np.full(3, 0.7)], ids=["no rate", "its peak", "a tenth of it"])
def test_late_in_a_run_the_scale_goes_a_part_of_its_way_that_falls_with_the_steps(rate):
    rng, betas, config = np.random.default_rng(4), np.array(TunerConfig().betas), TunerConfig()
    state = TunerState(*np.zeros((len(TunerState._fields), 3, len(betas))))
    for _ in range(10):
        state = update(state, random_sums(rng), betas, config, np, None if rate is None else np.full(3, 7.0))
    sums = random_sums(rng)

    def moved(steps):
        late = state._replace(steps=np.full_like(state.steps, steps - 1))
        return total_scale(update(late, sums, betas, config, np, rate), np) - total_scale(state, np)

    share = 0.1 if rate is not None and rate[0] < 7 else 1.0
    np.testing.assert_allclose(moved(1000), moved(11), rtol=1e-8)
    np.testing.assert_allclose(moved(4000), min(1.0, 0.25 / share) * moved(11), rtol=1e-8)
    np.testing.assert_allclose(moved(40_000), 0.025 / share * moved(11), rtol=1e-8)
    np.testing.assert_allclose(moved(1_000_000), moved(50_000), rtol=1e-8)  # so that S can still fall in a long run


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_without_a_positive_learning_rate_the_scale_stays_where_it_is(rate):
    rng, betas, config = np.random.default_rng(5), np.array(TunerConfig().betas), TunerConfig()
    state = TunerState(*np.zeros((len(TunerState._fields), 3, len(betas))))
    for _ in range(3):  # also where no step has had a positive one yet
        state = update(state, random_sums(rng), betas, config, np, np.full(3, rate))
        np.testing.assert_array_equal(state.scales, 0.0)
    for _ in range(3):
        state = update(state, random_sums(rng), betas, config, np, np.full(3, 1.0))
    after = update(state, random_sums(rng), betas, config, np, np.full(3, rate))
    np.testing.assert_array_equal(after.scales, state.scales)


@pytest.mark.parametrize("size", [1e-18, 1e-9, 1.0, 1e9, 1e18])
def test_float32_carries_gradients_as_large_and_as_small_as_their_squares_allow(size):
    rng, config = np.random.default_rng(6), TunerConfig()
    betas = np.array(config.betas)
    state = TunerState(*np.zeros((len(TunerState._fields), 3, len(betas))))
    narrow = TunerState(*(array.astype(np.float32) for array in state))
    for _ in range(20):
        sums = random_sums(rng) * [size**2, size, size**2, 1.0, size**2]  # Delta is in units of g under SGD
        state = update(state, sums, betas, config, np)
        narrow = update(narrow, sums.astype(np.float32), betas.astype(np.float32), config, np)
    assert (narrow.steps == 20).all()
    np.testing.assert_allclose(total_scale(narrow, np), total_scale(state, np), rtol=1e-4)


def test_the_free_stake_moves_the_parameters_by_one_percent_whatever_their_units():
    for unit_of_x, unit_of_delta in ((1.0, 1.0), (1e-6, 1e3), (1e5, 1e-8)):
        sums = np.array([[-unit_of_delta, 0.0, 1.0, unit_of_x**2, unit_of_delta**2]])
        state = play(TunerConfig(), [sums], tuners=1)
        assert total_scale(state, np).item() * unit_of_delta == pytest.approx(0.01 * unit_of_x)


WON, LOST = [[-1.0, 0.0, 1.0, 1.0, 1.0]], [[1.0, 0.0, 1.0, 1.0, 1.0]]


def stake_after(*sums, config=None):
    return play(config or TunerConfig(), [np.array(row) for row in sums], tuners=1).stake.reshape(-1)[0]


def test_the_stake_grows_while_delta_is_rewarded_and_shrinks_to_its_first_size():
    assert stake_after(WON) == 1  # S was 0, so nothing was won
    assert stake_after(*[WON] * 5) == pytest.approx(1.1**4)
    stakes = [stake_after(*[WON] * 5, *[LOST] * steps) for steps in range(20)]
    assert max(stakes) == max(stakes[:10])  # by then the reward is lost
    assert stakes[10] == pytest.approx(stakes[9] / 1.1)
    assert stakes[-1] == 1


@pytest.mark.parametrize("size", [1.5, 30.0, 1e6])
def test_a_step_against_delta_does_not_raise_s_however_large_it_is(size):
    config, betas = TunerConfig(), np.array(TunerConfig().betas)
    state = play(config, [np.array(row) for row in [WON, LOST] * 20], tuners=1)
    state = state._replace(stake=np.full_like(state.stake, 100.0), reward=np.zeros_like(state.reward))
    state = update(state, np.array(LOST), betas, config, np)
    after = update(state, np.array([[size, 0.0, 1.0, 1.0, 1.0]]), betas, config, np)
    assert total_scale(after, np) <= total_scale(state, np)
    # Nor later, when the feedback is as it was, and the large one is still the largest.
    for row in [LOST, WON] * 2:
        after = update(after, np.array(row), betas, config, np)
        assert total_scale(after, np) <= 1.21 * total_scale(state, np)


def test_the_stake_does_not_grow_once_enough_is_won():
    # Larger scales win more with the same feedback.
    stakes = [stake_after(*[WON] * steps) for steps in (10, 20, 40)]
    assert 1 < stakes[0] <= stakes[1] == stakes[2] < 1.1**19


def test_the_stake_does_not_grow_once_gradients_are_small():
    small = [[-0.19, 0.0, 0.19**2, 1.0, 1.0]]
    larger = [[-0.21, 0.0, 0.21**2, 1.0, 1.0]]
    assert stake_after(WON, WON, *[small] * 5) == pytest.approx(1.1)
    assert stake_after(WON, WON, *[larger] * 5) == pytest.approx(1.1**6)


def gradient_of(norm):
    """Sums of a step along Delta, at a cosine of -.05, with parameters along Delta."""
    return [[-0.05 * norm, 0.9, norm**2, 1.0, 1.0]]


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_what_is_learned_by_heart_wins_nothing(unit):
    """Once the gradient is far below a fiftieth of the largest, the pull of ``late_decay`` is stronger, in any unit."""
    steps = [np.array(gradient_of(norm * unit)) for norm in [1.0] * 20 + [1e-3] * 20]
    before, after = (play(TunerConfig(), steps[:count], tuners=1).reward for count in (20, 40))
    assert (after < before * np.array(TunerConfig().betas) ** 20).all()
    without = play(TunerConfig(late_decay=0.0), steps, tuners=1).reward
    assert (without > before * np.array(TunerConfig().betas) ** 20).all()


def test_the_late_pull_waits_until_the_gradient_is_tiny():
    steps = [np.array(gradient_of(norm)) for norm in [1.0] * 20 + [0.021] * 20]
    with_pull, without = (play(config, steps, tuners=1) for config in (TunerConfig(), TunerConfig(late_decay=0.0)))
    for field, other in zip(with_pull, without, strict=True):
        np.testing.assert_array_equal(field, other)


def test_one_huge_gradient_does_not_make_all_others_tiny():
    steps = [np.array(gradient_of(norm)) for norm in [1.0] * 20 + [1e6] + [1.0] * 20]
    assert play(TunerConfig(), steps, tuners=1).largest_grad.max() == 2
    # One that stays large is believed.
    assert play(TunerConfig(), [*steps, *[np.array(gradient_of(1e6))] * 20], tuners=1).largest_grad.max() == 1e6


@pytest.mark.parametrize("config", [TunerConfig.paper(), TunerConfig.starting_at(0.1)])
def test_an_absolute_start_has_no_stake_that_grows(config):
    assert stake_after(*[WON] * 5, config=config) == 0


def test_the_stake_has_a_largest_size():
    # At a learning rate of 0, S and so the reward stay small, and nothing but the limit ends the growth.
    config, betas, won = TunerConfig(), np.array(TunerConfig().betas), np.array(WON)
    state = play(config, [won] * 2, tuners=1)
    nothing = np.array([[-1e-9, 0.0, 1.0, 1.0, 1.0]])
    for _ in range(200):
        state = update(state, nothing, betas, config, np, np.zeros(1))
    np.testing.assert_array_equal(state.stake, 1e4)


def test_all_zero_parameters_still_start():
    sums = np.array([[-1.0, 0.0, 1.0, 0.0, 1.0]])
    assert total_scale(play(TunerConfig(), [sums], tuners=1), np).item() == pytest.approx(0.01)


def test_the_papers_first_scale_is_s_init():
    sums = np.array([[-1.0, 0.0, 1.0, 1.0, 1.0]])
    assert total_scale(play(TunerConfig.paper(), [sums], tuners=1), np).item() == pytest.approx(1e-8, rel=1e-6)


@pytest.mark.parametrize(("unit_of_x", "unit_of_delta"), [(1.0, 1.0), (1e-6, 1e3), (0.0, 1e-8)])
def test_a_warm_start_begins_at_the_rate_that_was_given(unit_of_x, unit_of_delta):
    sums = np.array([[-unit_of_delta, 0.0, 1.0, unit_of_x**2, unit_of_delta**2]])
    state = play(TunerConfig.starting_at(0.003), [sums], tuners=1)
    assert total_scale(state, np).item() == pytest.approx(0.003)


def test_the_scale_stays_within_its_bounds_from_the_first_step_on():
    rng = np.random.default_rng(0)
    bounds = TunerConfig(min_lr=0.03, max_lr=0.2)
    state = None
    reached = {"floor": 0, "cap": 0, "between": 0}
    for _ in range(300):
        state = play(bounds, [random_sums(rng)], state=state)
        for scale in total_scale(state, np):
            assert 0.03 * (1 - 1e-12) <= scale <= 0.2 * (1 + 1e-12)
            reached["floor" if scale < 0.0301 else "cap" if scale > 0.199 else "between"] += 1
    assert min(reached.values()) > 0, reached


def test_a_fresh_tuner_starts_at_its_lower_bound():
    """In its first step, before there is any Delta."""
    state = play(TunerConfig(min_lr=0.03), [np.array([[0.0, 0.0, 1.0, 4.0, 0.0]])], tuners=1)
    assert total_scale(state, np).item() == pytest.approx(0.03)


def test_bounds_that_are_never_reached_change_nothing():
    rng = np.random.default_rng(0)
    sums = [random_sums(rng) for _ in range(50)]
    free, wide = play(TunerConfig(), sums), play(TunerConfig(min_lr=1e-12, max_lr=1e12), sums)
    np.testing.assert_allclose(wide.scales, free.scales, rtol=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"betas": ()}, "betas"),
        ({"betas": (0.9, 1.1)}, "betas"),
        ({"betas": (-0.5, 0.9)}, "betas"),
        ({"s_init": 0.0}, "S never leaves 0"),
        ({"s_init": float("nan")}, "s_init"),
        ({"decay": -1.0}, "decay must be non-negative"),
        ({"eps": float("inf")}, "eps must be non-negative and finite"),
        ({"min_lr": -1.0}, "min_lr <= max_lr"),
        ({"min_lr": 0.2, "max_lr": 0.1}, "got 0.2 and 0.1"),
        ({"max_lr": 0.0}, "0 < max_lr"),
        ({"min_lr": float("inf")}, "min_lr <= max_lr"),
        ({"max_lr": float("nan")}, "min_lr <= max_lr"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TunerConfig(**fields)


def test_a_config_may_be_a_dict_of_known_fields():
    assert TunerConfig.of({"decay": 0.1}) == TunerConfig(decay=0.1)
    assert TunerConfig.of(None) == TunerConfig()
    with pytest.raises(TypeError, match="no field lamda; the fields are betas, decay"):
        TunerConfig.of({"lamda": 0.1})
    with pytest.raises(TypeError, match=r"TunerConfig or a dict of its fields, got 0\.1"):
        TunerConfig.of(0.1)


def retention_of(config=None, *, scale, new_scale, largest_scale, rate):
    """k on step 50, where Delta changes by 4 % at most; the largest learning rate so far is 1."""
    config = config or TunerConfig()

    def state(scale, largest_scale):
        values = {"scales": scale / 5, "largest_scale": largest_scale, "steps": 50.0, "largest_rate": 1.0}
        return TunerState(*(np.full((1, 5), values.get(name, 0.0)) for name in TunerState._fields))

    before, after = state(scale, largest_scale), state(new_scale, max(largest_scale, new_scale))
    return delta_retention(before, after, config, np, np.array([rate])).item()


@pytest.mark.parametrize(
    ("new_scale", "rate", "expected"),
    [
        (1.01, 1.0, 1.0),  # at the peak S alone moves
        (1.01, 0.0, 1 / 1.01),  # at the end S Delta stays where it is
        (0.99, 0.0, 1 / 0.99),
        (1.01, 0.8, 1 - 0.2 * 0.04),  # between them only a part of the 4 % is allowed
        (0.99, 0.8, 1 + 0.2 * 0.04),
        (1.5, 0.0, 0.96),
        (0.5, -0.1, 1.04),
        (2.02, 1.0, 2 / 2.02),  # a new maximum
        (2.02, 0.5, 2 / 2.02),
        (4.0, 0.5, 0.96),
    ],
)
def test_delta_makes_up_for_the_scale_as_the_schedule_falls(new_scale, rate, expected):
    found = retention_of(scale=1.0, new_scale=new_scale, largest_scale=2.0, rate=rate)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scales", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_nothing_is_forgotten_where_one_scale_is_zero(scales):
    assert retention_of(scale=scales[0], new_scale=scales[1], largest_scale=2.0, rate=0.1) == 1.0


def test_without_settling_only_a_new_maximum_is_made_up_for():
    without = TunerConfig(settle=False)
    assert retention_of(without, scale=1.0, new_scale=1.5, largest_scale=2.0, rate=0.0) == 1.0
    assert retention_of(without, scale=1.0, new_scale=2.02, largest_scale=2.0, rate=0.0) == 2 / 2.02
