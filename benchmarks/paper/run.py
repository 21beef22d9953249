"""The paper's experiments at their real size: ``torchrun --nproc-per-node N -m benchmarks.paper RECIPE``.

Every recipe trains with FSDP2, on CUDA with nccl and bf16 (the convolutional networks in float32: their batch norms
keep statistics), else on gloo in float32. A global batch is the same on any number of ranks; ``--device-batch`` says
how much of it a device takes at once. Rank 0 appends a record like those of ``benchmarks.suite``, of the task
"paper-RECIPE"; a trial with ``--steps`` or ``--small`` is a task of another name, so that it stands in nobody's way.

``--small`` runs the same code with a shrunken network on a slice of the local data (``MECHANIC_DATA``), without
network: that is what the tests do, on the CPU. They cannot tell whether the datasets, tokenizers and checkpoints on the
Hub (``transformers`` and ``datasets`` must be installed for them) still have the names and columns used here, nor how
the recipes fare on CUDA.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.paper import recipes
from benchmarks.paper.checkpoint import Checkpoint
from benchmarks.paper.data import agreed
from benchmarks.paper.recipes import RECIPES
from benchmarks.paper.setup import Setup
from benchmarks.paper.training import save, train
from benchmarks.suite.contenders import CONTENDERS
from benchmarks.suite.partial import path_of
from benchmarks.suite.record import Run, commit, environment
from benchmarks.suite.recordbook import RECORDS, RecordBook


def parse(words: list[str] | None = None) -> argparse.Namespace:
    first, rest = (__doc__ or "").split("\n", 1)
    epilog = f"{rest}\n{recipes.__doc__}"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.paper", description=first, epilog=epilog, formatter_class=formatter)
    parser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument(
        "--contender", choices=CONTENDERS, metavar="NAME", help="by its name in benchmarks.suite.contenders"
    )
    parser.add_argument("--lr", type=float, help="without it the contender's own, 1 for Mechanic")
    parser.add_argument("--steps", type=int, help="to which the schedule is shrunk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device-batch", type=int, help="samples a device takes at once")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="else float32; by default as said above")
    parser.add_argument("--from", dest="start", metavar="CHECKPOINT", help="to fine-tune: a folder or name on the Hub")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for the trained weights")
    parser.add_argument("--checkpoint-minutes", type=float, default=10.0, help="how often the run is saved")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="a trial on local data")
    arguments = parser.parse_args(words)

    recipe = RECIPES[arguments.recipe]
    arguments.contender = contender = CONTENDERS[arguments.contender or recipe.contender]
    arguments.lr = contender.lr if arguments.lr is None else arguments.lr
    if arguments.lr is None:
        tried = ", ".join(map(str, recipe.sweep.get(contender.base, ()))) or "none"
        parser.error(f"{contender.name} is to be tuned: pass --lr; the paper's for {recipe.name}: {tried}")
    if contender.averages:
        parser.error(f"{contender.name} is evaluated at an average of whole weights, which nobody has under FSDP2")
    if arguments.start and not recipe.start:
        parser.error(f"--from: {recipe.name} is trained from scratch; only the GLUE and ViT recipes are fine-tuned")
    if arguments.bf16 and not recipe.bf16:
        parser.error(f"--bf16: the batch norms of {recipe.name} need float32")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run on a process group that is there; its record, which rank 0 has written."""
    recipe, contender = RECIPES[arguments.recipe], arguments.contender
    task = f"paper-{recipe.name}" + "-small" * arguments.small
    task += f"-{arguments.steps}-steps" if arguments.steps else ""
    this = Run(task, contender.name, arguments.lr, arguments.seed)
    if agreed(lambda: this in RecordBook(arguments.records).records):
        raise ValueError(f"{this} is recorded in {arguments.records}: pass another --seed, or another --records")
    start = arguments.start
    if arguments.small:
        recipe = replace(recipe, batch=8, device_batch=2, steps=20, epochs=0, evaluated=8)
    else:
        start = start or recipe.start
    recipe = replace(
        recipe, steps=arguments.steps or recipe.steps, device_batch=arguments.device_batch or recipe.device_batch
    )
    ranks = dist.get_world_size()
    if recipe.batch % ranks:
        raise ValueError(f"{recipe.name}: a batch of {recipe.batch} cannot be shared evenly by {ranks} ranks")
    ours = contender.name.startswith(("mechanic", "flat"))
    setup = Setup(
        small=arguments.small,
        start=start,
        dropout=recipe.our_dropout if ours else recipe.dropout,
        batch=recipe.batch,
        evaluated=recipe.evaluated,
        rank=dist.get_rank(),
        ranks=ranks,
    )
    bf16 = arguments.bf16 if arguments.bf16 is not None else recipe.bf16 and torch.cuda.is_available()
    origin = environment(agreed(commit), "cuda" if torch.cuda.is_available() else "cpu")
    options = {"device_batch": recipe.device_batch, "bf16": bf16, "start": start}
    checkpoint = Checkpoint(path_of(arguments.records, this), {**origin, **options}, arguments.checkpoint_minutes)
    model, found = train(recipe, contender, arguments.lr, setup, arguments.seed, bf16, checkpoint)
    if arguments.save:
        save(model, arguments.save)
    record = {**vars(this), **found, **origin}
    if setup.rank == 0:
        RecordBook(arguments.records).add(record)
    dist.barrier()  # what was saved goes when the record is written
    checkpoint.remove()
    return record
