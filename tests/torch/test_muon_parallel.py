"""Muon over processes follows one process: where it needs whole matrices, DTensors gather them. Real ones, on gloo."""

import pytest
import torch
from filelock import FileLock  # which torch depends on
from torch import optim

from tests.torch import muon_parallel as jobs
from tests.torch.test_parallel import TIMEOUT, assert_followed, run

pytestmark = pytest.mark.long

pytestmark = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon from 2.9 on")

LAYOUTS = {1: ["fsdp2"], 2: ["ddp", "fsdp2", "tp"], 4: ["fsdp2", "hsdp", "tp+fsdp2"]}
SAVED = {1: ["fsdp2"], 2: ["fsdp2", "ddp"], 4: ["fsdp2", "tp+fsdp2"]}
CONTINUED = {  # on so many ranks, under FSDP2: what was saved, on how many
    1: [("fsdp2", 2), ("fsdp2", 4)],
    2: [("fsdp2", 1), ("fsdp2", 4), ("ddp", 2), ("tp+fsdp2", 4)],
    4: [("fsdp2", 1), ("fsdp2", 2)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, worker_id):
    """One for all workers of pytest-xdist."""
    if worker_id == "master":
        return tmp_path_factory.mktemp("muon")
    shared = tmp_path_factory.getbasetemp().parent / "muon"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def found(folder):
    """What all jobs found, by the number of ranks: processes are started once for each, by the first worker."""
    results = folder / "found.pt"
    with FileLock(folder / "lock", timeout=4 * TIMEOUT):
        if not results.exists():
            every = {ranks: run(ranks, folder / f"{ranks}", list(_jobs(ranks, str(folder)))) for ranks in LAYOUTS}
            torch.save(every, results)
    return torch.load(results, weights_only=False)


def _jobs(ranks, folder):
    for layout in LAYOUTS[ranks]:
        yield from (
            (jobs.follow_exactly, (layout, tuners)) for tuners in (("role",) if ranks == 4 else ("one", "role"))
        )
        yield jobs.follow, (layout, "one")
        yield jobs.resume_bitwise, (layout, folder)
        if ranks > 1 and layout != "ddp":
            yield jobs.collectives, (layout,)
    yield from ((jobs.save, (layout, folder)) for layout in SAVED[ranks])
    if ranks == 2:
        yield from ((jobs.follow_with_another, ("fsdp2", name)) for name in ("Muon", "AdaMuon"))
        yield jobs.of_each_alone, ("fsdp2",)
        yield jobs.zero_redundancy, ()
        yield from ((jobs.refused_under_fsdp1, (use_orig_params,)) for use_orig_params in (True, False))
    if ranks == 4:
        yield jobs.refused_with_too_few_rows, ("fsdp2",)


def reports(found, ranks, name):
    here = {case: report for case, report in found[ranks].items() if case[0] == name}
    assert here
    return here


@pytest.mark.parametrize("ranks", sorted(LAYOUTS))
def test_every_layout_follows_one_process(found, ranks):
    assert_followed(reports(found, ranks, "follow_exactly"), within=1e-5)
    # Sums in another order change the last of bfloat16's digits, which is the third.
    assert_followed(reports(found, ranks, "follow"), within=0.01)


def test_other_muons_follow_one_process(found):
    assert_followed(reports(found, 2, "follow_with_another"), within=1e-5)


def test_a_rank_that_took_its_part_for_the_whole_would_make_another_update(found):
    assert found[2]["of_each_alone", "fsdp2"]["off"] > 0.1


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_takes_one_collective_more_than_muon_which_takes_many(found, ranks):
    counted = reports(found, ranks, "collectives")
    assert all(report["ours"] == 1 for report in counted.values())
    assert counted["collectives", "fsdp2"]["per matrix"] > 10


@pytest.mark.parametrize("ranks", sorted(LAYOUTS))
def test_on_as_many_ranks_it_resumes_bit_for_bit(found, ranks):
    # DDP on 2 ranks only: on more, a new DDP adds gradients up in another order, whatever the optimizer.
    assert all(report["same"] for report in reports(found, ranks, "resume_bitwise").values())


@pytest.mark.parametrize("ranks", sorted(CONTINUED))
def test_a_checkpoint_continues_on_other_ranks_and_in_another_layout(found, folder, ranks):
    wanted = [(jobs.resume, (*where, "fsdp2", str(folder))) for where in CONTINUED[ranks]]
    resumed = run(ranks, folder / f"resuming on {ranks}", wanted)
    assert len(resumed) == len(wanted)
    assert_followed(resumed, within=1e-5)


def test_ranks_may_hold_different_matrices(found):
    assert_followed(reports(found, 2, "zero_redundancy"), within=1e-5)


def test_flat_parts_of_matrices_are_refused_before_anything_has_changed(found):
    for use_orig_params in (True, False):
        assert "fully_shard" in found[2]["refused_under_fsdp1", use_orig_params]["built"]
    assert "fully_shard" in found[2]["refused_under_fsdp1", True]["stepped"]
    assert found[2]["refused_under_fsdp1", True]["nothing changed"]


def test_a_matrix_with_fewer_rows_than_ranks_is_refused_by_its_shape_before_anything_has_changed(found):
    report = found[4]["refused_with_too_few_rows", "fsdp2"]
    assert "here one of shape (3, 7)" in report["stepped"]
    assert report["nothing changed"]
    assert report["with the remedy"]
