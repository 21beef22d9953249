"""The recipes of the paper's experiments: every one starts on ranks with local data, and has its real size on paper.

What they take from the Hub is not there in a test, nor is CUDA.
"""

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.torch import parallel

pytest.importorskip("transformers")
from benchmarks.paper import data as paper_data
from benchmarks.paper import models as paper_models
from benchmarks.paper import run as paper
from benchmarks.paper import training
from benchmarks.paper.recipes import RECIPES
from benchmarks.paper.setup import Setup
from benchmarks.paper.training import build
from benchmarks.suite.schedules import at_steps

TIMEOUT = 300  # seconds
STEPS = 3
needs_data = pytest.mark.skipif("MECHANIC_DATA" not in os.environ, reason="MECHANIC_DATA names no folder of local data")


def small(*words):
    return [*words, "--small", "--steps", str(STEPS)]


def run(*words):
    """On the ranks of parallel.main."""
    return paper.run(paper.parse(small(*words)))


def on_two_ranks(folder, commands):
    """One pair of processes for all of them: to import torch and transformers takes longer than to train."""
    parallel.on_ranks(parallel.main, 2, TIMEOUT, 2, str(folder), [(run, command) for command in commands])
    found = torch.load(folder / "results.pt", weights_only=False)
    assert {case: record["error"] for case, record in found.items() if "error" in record} == {}


def only_record(folder, recipe):
    (line,) = (folder / f"paper-{recipe}-small-{STEPS}-steps.jsonl").read_text().splitlines()
    return json.loads(line)


def assert_trained(record, name):
    assert (record["contender"], record["lr"], record["steps"]) == (RECIPES[name].contender, 1.0, STEPS), name
    curve = record["curve"]
    assert curve["step"] == [0, 1, 2, 3], name
    for key in ("train_loss", "test_loss", "test_accuracy"):
        assert all(math.isfinite(value) for value in curve[key]), (name, key, curve[key])
    assert curve["scale"][-1] > 0, name


def assert_started_from(checkpoint):
    from transformers import BertForMaskedLM

    saved = BertForMaskedLM.from_pretrained(checkpoint).bert.state_dict()
    network = paper_models.classifying_bert(Setup(small=True, start=str(checkpoint)), pieces=0, classes=3)
    taken = network.model.model.bert.state_dict()
    assert len(saved) > 30
    for name, value in saved.items():
        assert taken[name].equal(value), name


@needs_data
def test_every_recipe_trains_on_two_ranks_and_leaves_a_record(tmp_path):
    bert, to = tmp_path / "bert", {name: ("--records", str(tmp_path / name)) for name in ("each", "saved", "half")}
    commands = [
        *((name, *to["each"]) for name in RECIPES),
        ("bert-base-mlm", "--contender", "lion", "--lr", "1e-3", "--save", str(bert), *to["saved"]),
        ("glue-mnli", "--from", str(bert), *to["saved"]),
        ("gpt-bookwiki", "--bf16", *to["half"]),
    ]
    on_two_ranks(tmp_path, commands)
    for name in RECIPES:
        assert_trained(only_record(tmp_path / "each", name), name)
    assert_started_from(bert)
    assert_trained(only_record(tmp_path / "saved", "glue-mnli"), "glue-mnli")
    half, single = (only_record(tmp_path / way, "gpt-bookwiki")["curve"] for way in ("half", "each"))
    assert half != single  # the vocabulary is the same: without bf16 every number would be
    assert half["test_loss"] == pytest.approx(single["test_loss"], rel=0.01)


FATAL, LAST = 12, 14  # the step that fails, of so many; the ranks ask every tenth whether to save


class KilledError(Exception):
    pass


def fail_and_continue(name, folder):
    """On the ranks of parallel.main: a run that is killed and run again."""
    words = [name, "--small", "--steps", str(LAST), "--records", folder, "--checkpoint-minutes", "0"]
    learn, learned = training.learn, []

    def counted(*arguments):
        learned.append(1)
        if len(learned) == FATAL:
            raise KilledError
        learn(*arguments)

    training.learn = counted
    try:
        with pytest.raises(KilledError):
            paper.run(paper.parse(words))
        saved = sorted(path.name.split("-step")[1] for path in (Path(folder) / ".partial").glob("*-0-of-2-*"))
        record = paper.run(paper.parse(words))
    finally:
        training.learn = learn
    left = list((Path(folder) / ".partial").glob(f"*-{torch.distributed.get_rank()}-of-2-*"))
    return {"record": record, "saved": saved, "steps": len(learned) - FATAL, "left": left}


def run_whole(name, folder):
    return paper.run(paper.parse([name, "--small", "--steps", str(LAST), "--records", folder]))


@needs_data
def test_a_run_that_fails_on_two_ranks_ends_on_the_same_record(tmp_path):
    # Batch norms and augmentation, a stream of text with masks, and samples with padding.
    names = ("resnet18-cifar10", "bert-base-mlm", "lstm-iwslt14")
    jobs = [(fail_and_continue, (name, str(tmp_path / "continued"))) for name in names]
    jobs += [(run_whole, (name, str(tmp_path / "whole"))) for name in names]
    parallel.on_ranks(parallel.main, 2, TIMEOUT, 2, str(tmp_path), jobs)
    found = torch.load(tmp_path / "results.pt", weights_only=False)
    assert {case: record["error"] for case, record in found.items() if "error" in record} == {}
    for name in names:
        continued = found["fail_and_continue", name, str(tmp_path / "continued")]
        whole = found["run_whole", name, str(tmp_path / "whole")]
        assert continued["saved"] == ["0.pt", "10.pt"]
        assert continued["steps"] == LAST - 10
        assert continued["left"] == []
        assert {**continued["record"], "seconds": 0} == {**whole, "seconds": 0}, name


def torchrun(ranks, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "benchmarks.paper", *small(*words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment) as process:
        try:
            assert process.wait(TIMEOUT) == 0
        finally:
            process.terminate()  # which it passes on to the ranks, if any are left


@needs_data
def test_the_global_batch_is_what_counts_not_its_parts_or_the_ranks(tmp_path):
    # No dropout when small, and a base that heeds the gradient's size.
    lstm = ("lstm-iwslt14", "--contender", "sgd", "--lr", "2")
    torchrun(1, *lstm, "--device-batch", "8", "--records", str(tmp_path / "whole"))
    torchrun(2, *lstm, "--device-batch", "1", "--records", str(tmp_path / "parts"))
    whole, parts = (only_record(tmp_path / way, "lstm-iwslt14")["curve"] for way in ("whole", "parts"))
    assert whole["train_loss"][-1] < whole["train_loss"][0] - 0.1
    for key in ("train_loss", "test_loss"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-4)


def test_a_vit_of_another_size_lends_its_weights(tmp_path):
    from transformers import ViTConfig, ViTModel

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    before = ViTModel(ViTConfig(image_size=16, patch_size=8, **shape))
    torch.nn.init.normal_(before.embeddings.position_embeddings)
    before.save_pretrained(tmp_path)
    network = paper_models.vit(Setup(small=True, start=str(tmp_path)), classes=10)
    after = network.model.model.vit
    assert after.layers[1].attention.q_proj.weight.equal(before.layers[1].attention.q_proj.weight)
    (old,), (new,) = before.embeddings.position_embeddings, after.embeddings.position_embeddings
    assert new.shape == (1 + 4 * 4, 32)
    assert new[0].equal(old[0])
    corners = new[1:].unflatten(0, (4, 4))[[0, 0, 3, 3], [0, 3, 0, 3]]  # of a 4 x 4 grid that was 2 x 2
    torch.testing.assert_close(corners, old[1:])
    assert network.model(torch.randn(2, 3, 32, 32)).eq(0).all()  # the head is not lent


def test_augmented_images_are_parts_of_the_images():
    generator = torch.Generator().manual_seed(0)
    ramp = torch.arange(32.0).expand(64, 3, 32, 32)  # from left to right
    moved = paper_data.shift_and_flip(ramp, generator)
    steps = moved[:, 0, 16].diff(dim=1)[:, 8:-8]
    assert moved.shape == ramp.shape
    assert set(steps[:, 0].tolist()) == {1.0, -1.0}
    assert steps.eq(steps[:, :1]).all()
    zoomed = paper_data.zoom_and_flip(ramp, generator, size=48)
    widths = (zoomed[:, 0, 0, -1] - zoomed[:, 0, 0, 0]) / 31
    assert zoomed.shape == (64, 3, 48, 48)
    assert widths.min() < -0.5
    assert widths.max() > 0.5
    assert 0.15 < widths.abs().min() < 0.5


class Numbers:
    """Stands in for a tokenizer: document 7 is 700, 701, ... 719."""

    sep_token_id = 0

    def __len__(self):
        return 10_000

    def __call__(self, documents, **options):
        return {"input_ids": [[100 * int(document) + i for i in range(20)] for document in documents]}


def test_ranks_share_the_text_and_hold_some_of_it_out(monkeypatch):
    source = paper_data.Source(chunks=40, read=lambda i: [str(2 * i + 1), str(2 * i + 2)], weight=1.0)
    monkeypatch.setattr(paper_data, "_local_book_and_wiki", lambda: [source])
    seen = []
    for rank in range(2):
        setup = Setup(small=True, rank=rank, ranks=2, batch=16, evaluated=8)
        data = paper_data._of_text(setup, Numbers(), length=7)
        batches = data.batches(0)
        learned = torch.cat([next(batches)[0] for _ in range(30)])  # a bit more than an epoch of 240 windows
        assert learned.shape == (240, 7)
        assert data.held_out["test"][0].shape == (4, 7)
        seen += [
            {token // 100 for token in part.flatten().tolist() if token} for part in (learned, *data.held_out["test"])
        ]
    documents = set().union(*seen)
    assert len(documents) == sum(map(len, seen))
    assert documents <= set(range(1, 81))
    assert len(documents) > 60


def test_the_hubs_articles_stay_apart_and_sentences_of_a_book_together(monkeypatch):
    class Table(list):
        def __getitem__(self, rows):
            return {"text": super().__getitem__(rows)}

    tables = {
        "wikimedia/wikipedia": Table(f"article {i}" for i in range(250)),
        "bookcorpus/bookcorpus": Table(f"sentence {i} ." for i in range(12_000)),
    }
    fake = types.SimpleNamespace(load_dataset=lambda name, *_, **options: tables[name])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    wiki, books = paper_data._book_and_wiki()
    assert (wiki.chunks, books.chunks) == (2, 2)
    assert wiki.read(1)[0] == "article 100"
    assert len(wiki.read(1)) == 100
    (text,) = books.read(1)
    assert text.startswith("sentence 5000 . sentence 5001 .")


def test_no_step_of_a_recipe_is_taken_at_a_learning_rate_of_0():
    for name, recipe in RECIPES.items():
        for steps in (STEPS, 20, recipe.steps or 1000 * recipe.epochs):
            factors = [at_steps(recipe.schedule, steps)(step) for step in range(steps)]
            assert 0 < min(factors) <= max(factors) <= 1, (name, steps)


def test_a_base_without_a_learning_rate_is_refused_with_the_papers_own(capsys):
    with pytest.raises(SystemExit):
        paper.parse(["bert-large-mlm", "--contender", "lion"])
    assert "pass --lr; the paper's for bert-large-mlm: 0.0002" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("resnet18-cifar10", 11.2), ("resnet18-cifar100", 11.2), ("wrn40-10-cifar100", 55.8)),
        *(("bert-base-mlm", 109.5), ("bert-large-mlm", 335.2), ("glue-mnli", 109.5)),
        *(("gpt-bookwiki", 124.0), ("lstm-iwslt14", 3.75), ("vit-finetune-cifar10", 86.1)),
    ],
)
def test_a_network_has_the_papers_size(name, millions):
    recipe = RECIPES[name]
    with torch.device("meta"):
        network = build(recipe, Setup(), recipe.pieces)
    assert sum(p.numel() for p in network.model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    inner = {id(module) for module in network.model.modules()}
    assert network.blocks
    assert all(id(block) in inner for block in network.blocks)
