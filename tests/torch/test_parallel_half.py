"""Parameters in bfloat16, and Deltas in few bytes, over processes, on gloo: ranks agree and follow one process."""

import copy
from functools import partial

import pytest
import torch

from mechanic.torch import Mechanic
from tests.torch import parallel
from tests.torch.parallel import BFLOAT16, GAP, everything, placed, run, same_on_all_ranks, tuners_of, whole
from tests.torch.paths import failing

pytestmark = pytest.mark.long

STEPS = 12


def build(layout, delta, base="AdamW"):
    model, _ = placed(layout, parallel.WideModel().bfloat16())
    if base == "Muon":
        return model, Mechanic(torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1.0), delta=delta)
    return model, parallel.wrap(model, base, per_group=False, delta=delta)


def train(model, optimizer, steps=STEPS, first=0):
    """Every rank sees the whole batch, so its gradient has the bits of one process."""
    parallel.train(model, optimizer, steps, first, everything)


def dtypes_of(state):
    return {
        str(value.dtype).removeprefix("torch.") for entry in state.values() for value in entry.values() if value.ndim
    }


def follow_in_bfloat16(layout, delta=torch.float32, base="AdamW"):
    alone_model, alone = build("alone", delta, base)
    train(alone_model, alone)
    model, optimizer = build(layout, delta, base)
    train(model, optimizer)
    found = parallel.parameters(model)
    expected = {name: p.detach() for name, p in alone_model.named_parameters() if p in alone.state}
    of_scale = abs(optimizer.scales()["default"] / alone.scales()["default"] - 1)
    if delta == torch.float32 and layout != "tp" and base != "Muon":  # whose products are summed in another order
        assert parallel.ulps(found, expected) <= 1
        assert of_scale <= 1e-6
    else:  # and blocks of codes end where shards end
        assert parallel.difference(found, expected) <= 0.05
        assert of_scale <= 0.2
    assert same_on_all_ranks(tuners_of(optimizer))
    assert {p.dtype for p in model.parameters()} == {BFLOAT16}
    assert {p.to_local().device.type for p in optimizer.state if hasattr(p, "to_local")} == {"cpu"}
    # float32 are the moments, or the scales of codes
    others = {None: set(), torch.float32: {"float32"}, "int8": {"float32", "int8"}}
    assert dtypes_of(optimizer.state) == {"bfloat16"} | others[delta]


def shards_fail_are_frozen_and_released(delta):
    model, optimizer = build("fsdp2", delta)
    train(model, optimizer)
    saved, before = copy.deepcopy(optimizer.state_dict()), parallel.parameters(model)
    parallel.loss_of(model, STEPS, everything).backward()
    with failing(optimizer.base, MemoryError(), share=1.0), pytest.raises(MemoryError):
        optimizer.step()
    assert all(value.equal(before[name]) for name, value in parallel.parameters(model).items())
    optimizer.load_state_dict(saved)
    optimizer.freeze()
    train(model, optimizer, 2, first=STEPS)
    base = optimizer.release()
    train(model, base, 2, first=STEPS + 2)
    assert dtypes_of(base.state) == {"bfloat16"}
    assert all(p.isfinite().all() for p in parallel.parameters(model).values())


def codes(optimizer):
    """All bits of what this rank keeps of Delta."""
    kept = [state[key] for state in optimizer.state.values() for key in state if key.startswith("mechanic_delta")]
    kept = [value.to_local() if hasattr(value, "to_local") else value for value in kept]
    return torch.cat([value.detach().contiguous().view(torch.uint8).flatten() for value in kept])


def follow_with_a_rounded_delta(layout, delta):
    """Train, then make one step beside one process that is given the same values and the same Delta."""

    def build_float32(layout, **options):
        model, part = placed(layout, parallel.WideModel())
        return model, parallel.wrap(model, per_group=False, **options), part

    model, optimizer, part = build_float32(layout, delta=delta)
    exact_model, exact, _ = build_float32("alone")
    parallel.train(model, optimizer, part=part)
    parallel.train(exact_model, exact, part=everything)
    assert same_on_all_ranks(tuners_of(optimizer))
    if layout != "fsdp2":
        assert same_on_all_ranks(codes(optimizer))
        assert same_on_all_ranks(torch.cat([whole(p.detach()).flatten() for p in model.parameters()]))

    alone, other, _ = build_float32("alone", delta=delta)
    alone.load_state_dict(parallel.parameters(model))
    assert parallel.loss_of(alone, 0, everything) <= 2 * parallel.loss_of(exact_model, 0, everything)
    saved = optimizer.state_dict()
    state = {key: {name: whole(value) for name, value in entry.items()} for key, entry in saved["state"].items()}
    other.load_state_dict(copy.deepcopy({**saved, "state": state}))
    pairs, scale, gap = (
        ((model, optimizer), (alone, other)),
        optimizer.scales()["default"],
        GAP[torch.int8 if delta == "int8" else delta],
    )
    before, loaded = (parallel.deltas(*pair) for pair in pairs)
    # Loading rounds to nearest where shards had other blocks.
    of_loading = parallel.farthest(loaded, before)
    assert of_loading <= (0.5 * gap if layout == "fsdp2" else 0)
    # Then one step in each: both may round apart by a gap, and x moves by the unrounded ones.
    parallel.train(model, optimizer, 1, first=parallel.STEPS, part=part)
    parallel.train(alone, other, 1, first=parallel.STEPS, part=everything)
    deltas = [parallel.deltas(*pair) for pair in pairs]
    values = [parallel.parameters(each) for each, _ in pairs]
    for name, delta in before.items():
        size = delta.abs().max()
        assert (deltas[0][name] - deltas[1][name]).abs().max() <= (2.5 * gap + 1e-4) * size
        assert (values[0][name] - values[1][name]).abs().max() <= (gap + 1e-4) * scale * size
    assert abs(other.scales()["default"] / optimizer.scales()["default"] - 1) <= (1e-3 if of_loading else 1e-6)


JOBS = {
    2: [
        *(partial(follow_in_bfloat16, "fsdp2", delta) for delta in (torch.float32, None, "int8")),
        partial(follow_in_bfloat16, "fsdp2, offloaded"),
        partial(follow_in_bfloat16, "tp", "int8"),
        *([partial(follow_in_bfloat16, "fsdp2", base="Muon")] if hasattr(torch.optim, "Muon") else []),
        *(partial(shards_fail_are_frozen_and_released, delta) for delta in (None, "int8")),
        *(partial(follow_with_a_rounded_delta, "fsdp2", delta) for delta in (BFLOAT16, "int8")),
        *(partial(follow_with_a_rounded_delta, layout, "int8") for layout in ("hsdp", "ddp")),
    ],
    4: [partial(follow_in_bfloat16, "fsdp2", "int8"), partial(follow_in_bfloat16, "hsdp")],
}


@pytest.mark.parametrize("ranks", JOBS)
def test_few_bits_follow_one_process_as_far_as_rounding_allows(ranks, tmp_path):
    run(ranks, tmp_path / "ranks", JOBS[ranks])
