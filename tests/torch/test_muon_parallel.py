"""Muon over processes follows one process: where it needs whole matrices, DTensors gather them. Real ones, on gloo."""

from functools import partial

import pytest
from torch import optim

from mechanic.torch import MechanicMuon
from tests.torch import muon_parallel as jobs
from tests.torch.parallel import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon from 2.9 on"),
]

LAYOUTS = {4: ["fsdp2", "hsdp", "tp+fsdp2"], 2: ["ddp", "fsdp2", "tp"], 1: ["fsdp2"]}
OTHERS = {
    2: [
        partial(jobs.follow, "fsdp2", MechanicMuon),
        *(partial(jobs.follow, "fsdp2", partial(jobs.another, name)) for name in ("Muon", "AdaMuon")),
        jobs.of_each_alone,
        jobs.zero_redundancy,
        *(partial(jobs.one_collective_more_than_muon_which_takes_many, layout) for layout in ("fsdp2", "tp")),
    ],
    4: [
        jobs.flat_parts_are_refused_before_anything_has_changed,
        partial(jobs.one_collective_more_than_muon_which_takes_many, "tp+fsdp2"),
        jobs.fewer_rows_than_ranks_are_refused_by_their_shape_before_anything_has_changed,
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_follows_one_process(ranks, tmp_path):
    exact = [partial(jobs.follow, layout, jobs.with_a_tuner_per_role) for layout in LAYOUTS[ranks]]
    as_it_is = [partial(jobs.follow, layout, MechanicMuon, is_exact=False) for layout in LAYOUTS[ranks]]
    run(ranks, tmp_path / "ranks", [*exact, *as_it_is, *OTHERS.get(ranks, [])])


SAVED = {1: ["fsdp2"], 2: ["ddp", "fsdp2", "tp"], 4: ["fsdp2", "hsdp", "tp+fsdp2"]}
# On so many ranks: what was saved, on how many, and into which layout it goes on. On more than two ranks a new DDP adds
# gradients up in another order, whatever the optimizer.
RESUMED = {
    1: [("fsdp2", 1, "fsdp2")],
    2: [*((layout, 2, layout) for layout in SAVED[2]), ("fsdp2", 1, "fsdp2"), ("ddp", 2, "fsdp2")],
    4: [*((layout, 4, layout) for layout in SAVED[4]), ("fsdp2", 1, "fsdp2"), ("fsdp2", 2, "fsdp2")],
}
RESUMED_ON_FEWER = {
    2: [("fsdp2", 4, "fsdp2"), ("tp+fsdp2", 4, "fsdp2")],
    1: [("fsdp2", 2, "fsdp2"), ("fsdp2", 4, "fsdp2")],
}


def test_a_checkpoint_continues_to_the_bit_and_on_other_ranks_and_in_another_layout(tmp_path):
    folder = str(tmp_path)
    for ranks, layouts in SAVED.items():
        saves = [partial(jobs.save, layout, folder) for layout in layouts]
        resumes = [partial(jobs.resume, *found, folder) for found in RESUMED[ranks]]
        run(ranks, tmp_path / f"on {ranks}", [*saves, *resumes])
    for ranks, found in RESUMED_ON_FEWER.items():
        run(ranks, tmp_path / f"again on {ranks}", [partial(jobs.resume, *each, folder) for each in found])
