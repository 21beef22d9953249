"""bfloat16 parameters over processes, on gloo: FSDP2, HSDP and tensor parallelism follow one process."""

import pytest

from tests.torch import parallel_half
from tests.torch.test_parallel import run

pytestmark = pytest.mark.long

DELTAS = None, "int8"
LAYOUTS = {2: ("fsdp2", "offload", "tp"), 4: ("fsdp2", "hsdp")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks report, by number of ranks and case; processes are started as seldom as possible."""
    folder = tmp_path_factory.mktemp("bfloat16")
    reports = {}

    def on(ranks, *jobs):
        reported = run(ranks, folder / f"run {len(list(folder.iterdir()))}", jobs)
        reports.update({(ranks, *case): report for case, report in reported.items()})

    compared = {
        ranks: [(parallel_half.compare, (layout, "AdamW", delta)) for layout in layouts for delta in DELTAS]
        for ranks, layouts in LAYOUTS.items()
    }
    compared[2] += [(parallel_half.compare, ("fsdp2", base, None)) for base in ("SGD momentum", "Muon")]
    compared[2] += [(parallel_half.life, (delta,)) for delta in DELTAS]
    saves = [(parallel_half.save, (delta, str(folder))) for delta in DELTAS]

    def resumes(then):
        return [(parallel_half.resume, (then, delta, str(folder))) for delta in DELTAS]

    on(1, *saves)
    on(2, *compared[2], *saves, *resumes(1), *resumes(2))
    on(4, *compared[4], *saves, *resumes(2))
    on(2, *resumes(4))
    on(1, *resumes(2))
    return reports


def test_shards_in_bfloat16_follow_one_process(found):
    for (ranks, name, *case), report in found.items():
        if name != "compare":
            continue
        layout, base, delta = case
        where = ranks, case, report
        assert report["same on all ranks"], where
        assert report["parameters are"] == {"torch.bfloat16"}, where
        if delta is None and layout != "tp" and base != "Muon":  # whose products are summed in another order
            assert report["ulps"] <= 1, where
            assert report["scales"] <= 1e-6, where
        else:  # and blocks of codes end where shards end
            assert report["relative"] <= 0.05, where
            assert report["scales"] <= 0.2, where
        # float32 are the moments, or the scales of codes
        assert report["dtypes"] == {"torch.float32", "torch.bfloat16"} | ({"torch.int8"} if delta else set()), where
        assert report["on"] == ({"cpu"} if ranks > 1 else set()), where


def test_shards_are_frozen_released_and_survive_a_base_that_fails(found):
    for delta in DELTAS:
        assert found[2, "life", delta] == {"fails": True, "released": {"torch.bfloat16"}, "finite": True}


def test_a_checkpoint_in_bfloat16_continues_on_other_ranks(found):
    resumed = {case: report for case, report in found.items() if case[1] == "resume"}
    assert {(then, ranks) for ranks, _, then, *_ in resumed} == {(1, 2), (2, 2), (2, 4), (4, 2), (2, 1)}
    for case, report in resumed.items():
        ranks, _, then, delta, _ = case
        if then == ranks:
            assert report["ulps"] == report["scales"] == 0, (case, report)
        elif delta is None:
            assert report["ulps"] <= 1, (case, report)
            assert report["scales"] <= 1e-6, (case, report)
        else:
            assert report["relative"] <= 0.05, (case, report)
