"""Training over processes follows one process, whatever the layout. Real processes, on gloo."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch import distributed as dist

from tests.torch import parallel
from tests.torch.parallel import TIMEOUT, follow, run

pytestmark = pytest.mark.long

LAYOUTS = {
    2: ["ddp", "fsdp2", "fsdp2, offloaded", "tp", "fsdp1, original"],
    3: ["ddp", "fsdp2", "tp", "fsdp1, original"],
    4: ["ddp", "fsdp2", "hsdp", "tp", "tp+fsdp2", "two meshes", "fsdp1, original"],
}
JOBS = {
    2: [
        partial(follow, "fsdp2", "SGD momentum", per_group=False),
        partial(follow, "fsdp2", own_iterates=True),
        *(partial(parallel.pipeline, base, base == "AdamW") for base in parallel.BASES),
        partial(parallel.pipeline, loses=True),
        parallel.sequence_parallel,
        parallel.tensor_parallel_without_a_gradient,
        parallel.no_gradient_on_some_ranks,
        parallel.fsdp1_without_a_group,
        parallel.observing,
        *(partial(parallel.mixed_precision, base, base == "AdamW") for base in parallel.BASES),
        parallel.at_most_one_collective_more,
        *(partial(parallel.one_bad_rank, skip=skip) for skip in (False, True)),
    ],
    4: [parallel.meshes_that_do_not_hold_all_ranks],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_follows_one_process(ranks, tmp_path):
    jobs = [partial(follow, layout) for layout in LAYOUTS[ranks]]
    flat = partial(follow, "fsdp1, flat", per_group=False)  # whose groups cannot be told apart
    run(ranks, tmp_path / "ranks", [*jobs, flat, parallel.zero_redundancy, *JOBS.get(ranks, [])])


def fail_on_the_second():
    assert dist.get_rank() == 0, "as it must"


def test_what_goes_wrong_on_any_rank_is_told(tmp_path):
    with pytest.raises(AssertionError, match=r"1 of 1 jobs failed on 2 ranks:\n.*fail_on_the_second.*, on rank 1\n"):
        run(2, tmp_path / "ranks", [fail_on_the_second])


SAVED = {  # on so many ranks: kinds of runs, and layouts
    1: [("AdamW", "fsdp2"), ("Delta in bfloat16", "fsdp2"), ("Delta in int8", "fsdp2"), ("bfloat16", "fsdp2")],
    2: [*((kind, "fsdp2") for kind in parallel.KINDS), ("AdamW", "ddp")],
    4: [("AdamW", "fsdp2"), ("AdamW", "tp+fsdp2"), ("bfloat16", "fsdp2"), ("bfloat16, Delta in int8", "fsdp2")],
}
RESUMED = {  # after all was saved on fewer ranks, and here: what is continued, and as what kind, under FSDP2
    2: [
        *(((kind, "fsdp2", 2), kind) for kind in parallel.KINDS),  # to the bit
        *(((kind, layout, ranks), "AdamW") for kind, layout, ranks in (("AdamW", "fsdp2", 1), ("AdamW", "ddp", 2))),
        (("Delta in bfloat16", "fsdp2", 1), "Delta in int8"),
        (("Delta in int8", "fsdp2", 1), "Delta in float32"),
        (("Delta in int8", "fsdp2", 2), "Delta in bfloat16"),
        (("bfloat16", "fsdp2", 1), "bfloat16"),
    ],
    4: [
        (("AdamW", "fsdp2", 1), "AdamW"),
        (("AdamW", "fsdp2", 2), "AdamW"),
        (("AdamW", "tp+fsdp2", 4), "AdamW"),
        (("bfloat16", "fsdp2", 2), "bfloat16"),
        (("bfloat16, Delta in int8", "fsdp2", 2), "bfloat16, Delta in int8"),
    ],
}
RESUMED_ON_FEWER = {
    2: [
        (("AdamW", "fsdp2", 4), "AdamW"),
        (("AdamW", "tp+fsdp2", 4), "AdamW"),
        (("bfloat16", "fsdp2", 4), "bfloat16"),
        (("bfloat16, Delta in int8", "fsdp2", 4), "bfloat16, Delta in int8"),
    ],
    1: [
        (("AdamW", "fsdp2", 2), "AdamW"),
        (("AdamW", "fsdp2", 4), "AdamW"),
        (("AdamW", "ddp", 2), "AdamW"),
        (("Delta in int8", "fsdp2", 2), "Delta in int8"),
        (("Delta in bfloat16", "fsdp2", 2), "Delta in float32"),
        (("bfloat16", "fsdp2", 2), "bfloat16"),
        (("bfloat16, Delta in int8", "fsdp2", 2), "bfloat16, Delta in int8"),
    ],
}


def test_a_checkpoint_continues_on_other_ranks_in_another_layout_and_in_another_storage(tmp_path):
    folder = str(tmp_path)

    def resumes(found):
        return [
            partial(parallel.resume, saved, kind, "fsdp2", folder, flatten=kind == "AdamW") for saved, kind in found
        ]

    for ranks, runs in SAVED.items():
        saves = [partial(parallel.save, kind, layout, folder, flatten=kind == "AdamW") for kind, layout in runs]
        run(ranks, tmp_path / f"on {ranks}", [*saves, *resumes(RESUMED.get(ranks, []))])
    for ranks, found in RESUMED_ON_FEWER.items():
        run(ranks, tmp_path / f"again on {ranks}", resumes(found))


def test_on_paper_a_large_model_costs_one_small_collective():
    """On 1,024 ranks, as 4 replicas of 256 shards."""
    ranks, replicas = 1024, 4
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.on_paper", str(ranks), str(replicas)]
    output = subprocess.run(
        command, cwd=Path(__file__).parents[2], check=True, timeout=TIMEOUT, capture_output=True, text=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["parameters"] > 4e9
    assert found["collectives per step"] == 1
    assert found["bytes per step"] <= 64
    # Rows that do not divide evenly leave some ranks a row more.
    assert found["bytes of Delta per rank"] == pytest.approx(4 * found["parameters"] * replicas / ranks, rel=0.01)
