"""Delta in bfloat16 and int8 over processes, on gloo: ranks agree, and follow one process within the rounding."""

import pytest
import torch

from tests.torch import parallel_storage
from tests.torch.test_parallel import run

pytestmark = pytest.mark.long

STORAGES = torch.bfloat16, "int8"
GAP = {None: 1e-6, torch.bfloat16: 2**-7, "int8": 2 / 127}  # relative to the largest element


def test_ranks_agree_and_follow_one_process_within_the_rounding(tmp_path):
    layouts = "fsdp2", "hsdp", "ddp"
    jobs = [(parallel_storage.train, (layout, delta)) for layout in layouts for delta in (None, *STORAGES)]
    found = run(2, tmp_path / "ranks", jobs)
    for (_, layout, delta), report in found.items():
        case = layout, delta, report
        assert report["tuners agree"], case
        assert report.get("codes agree", True), case
        assert report.get("parameters agree", True), case
        # Loading rounds to nearest where shards had other blocks.
        assert report["Delta loaded"] <= 0.5 * GAP[delta], case
        assert layout == "fsdp2" or report["Delta loaded"] == 0, case
        # Then one step in each: both may round apart by a gap, and x moves by the unrounded ones.
        assert report["Delta"] <= 2.5 * GAP[delta] + 1e-4, case
        assert report["parameters"] <= GAP[delta] + 1e-4, case
        assert report["scales"] <= (1e-3 if report["Delta loaded"] else 1e-6), case
        assert report["loss"] <= 2 * found["train", layout, None]["loss"], case


def test_a_checkpoint_continues_on_other_ranks_and_in_another_storage(tmp_path):
    folder = str(tmp_path)
    for ranks in (1, 2):
        run(ranks, tmp_path / f"saving on {ranks}", [(parallel_storage.save, ("fsdp2", d, folder)) for d in STORAGES])
    for ranks in (1, 2):
        jobs = [
            (parallel_storage.resume, ("fsdp2", then, before, "fsdp2", after, folder))
            for then in (1, 2)
            for before in STORAGES
            for after in (None, *STORAGES)
        ]
        for case, report in run(ranks, tmp_path / f"resuming on {ranks}", jobs).items():
            _, _, then, before, _, after, _ = case
            assert report["Delta"] <= 0.5 * GAP[after], (case, report)
            assert report["end"] <= 0.05, (case, report)
            if then == ranks and before == after:
                assert report["bitwise"], (case, report)
