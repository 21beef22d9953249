"""The data that the paper's networks learn from; ``small`` takes a slice of what is local instead."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from benchmarks.data import datasets as local
from benchmarks.data import sources
from benchmarks.data.datasets import Split
from benchmarks.paper.setup import BERT, GPT2, PIECES, Setup, Tensors
from benchmarks.paper.windows import Mixed, Source, Windows
from benchmarks.suite import task
from benchmarks.suite.shuffled import Shuffled

# Augmentations, on the device and for every image anew.


def shift_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """A crop as large as the image out of the image in a frame of 4 pixels."""
    count, _, height, width = images.shape
    place = functools.partial(torch.randint, 9, (count, 1), generator=generator, device=images.device)
    rows = torch.arange(height, device=images.device) + place()  # [count, height]
    columns = torch.arange(width, device=images.device) + place()
    flipped = torch.rand(count, 1, generator=generator, device=images.device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    framed = functional.pad(images, (4, 4, 4, 4))
    return framed[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def zoom_and_flip(images: Tensor, generator: torch.Generator, size: int = 384) -> Tensor:
    """A part of 5 to 100 % of the image, of an aspect from 3/4 to 4/3, in the size asked for."""
    count = len(images)
    area, aspect, x, y, side = torch.rand(5, count, generator=generator, device=images.device)
    area, aspect = 0.05 + 0.95 * area, (4 / 3) ** (2 * aspect - 1)
    width, height = ((area * ratio).sqrt().clamp(max=1) for ratio in (aspect, 1 / aspect))
    parts = torch.zeros(count, 2, 3, device=images.device)  # affine maps: from the crop's [-1, 1] to the image's
    parts[:, 0, 0], parts[:, 1, 1] = torch.where(side < 0.5, -width, width), height
    parts[:, 0, 2], parts[:, 1, 2] = (1 - width) * (2 * x - 1), (1 - height) * (2 * y - 1)
    grid = functional.affine_grid(parts, [count, images.shape[1], size, size], align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


# Data.


class Batches(Protocol):
    """This rank's share of every batch, without end; its state is the position in the data."""

    def __next__(self) -> Tensors: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Data(NamedTuple):
    """This rank's share of everything."""

    batches: Callable[[int], Batches]  # from a seed
    held_out: dict[str, Tensors]  # what the evaluations see of the train and of the test data: as much on every rank
    samples: int = 0  # in an epoch of all ranks, where there are epochs
    pieces: int = 0
    prepare: Callable[[Tensors, torch.Generator], task.Prepared] = task.as_it_is

    def fingerprint(self) -> str:
        """Of what is held out: another split or another vocabulary has another."""
        digest = hashlib.sha256()
        for tensors in self.held_out.values():
            for tensor in tensors:
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def agreed(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


class _Samples:
    """Batches of samples that are all in memory."""

    def __init__(self, setup: Setup, train: Tensors, seed: int) -> None:
        self.setup, self.train = setup, train
        rows, generator = torch.arange(len(train[0])), torch.Generator().manual_seed(seed)
        self._chosen = Shuffled(rows, setup.batch, generator)

    def __next__(self) -> Tensors:
        own = next(self._chosen).chunk(self.setup.ranks)[self.setup.rank]
        return tuple(tensor[own] for tensor in self.train)

    def state_dict(self) -> dict[str, Any]:
        return self._chosen.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._chosen.load_state_dict(state)


def _of_samples(setup: Setup, split: Split, **options: Any) -> Data:
    def batches(seed: int) -> _Samples:
        return _Samples(setup, split.train, seed)

    held_out = {}
    for part, tensors in split._asdict().items():
        chosen = torch.randperm(len(tensors[0]), generator=torch.Generator().manual_seed(0))[: setup.evaluated]
        own = chosen[: len(chosen) // setup.ranks * setup.ranks].chunk(setup.ranks)[setup.rank]
        held_out[part] = tuple(tensor[own] for tensor in tensors)
    return Data(batches, held_out, samples=len(split.train[0]), **options)


def cifar(setup: Setup, name: str, *, centred: bool = False) -> Data:
    """Standardised, or from -1 to 1, as the ViT's authors have it."""
    if setup.small:
        return _of_samples(setup, local.images(name))
    found = {key: torch.from_numpy(value) for key, value in sources.arrays(name).items()}
    pixels = found["X_train"].float()
    mean, std = (127.5, 127.5) if centred else (pixels.mean((0, 1, 2)), pixels.std((0, 1, 2)))

    def part(key: str) -> Tensors:
        images = (found[f"X_{key}"].float() - mean) / std
        return images.permute(0, 3, 1, 2).contiguous(), found[f"y_{key}"].long()

    return _of_samples(setup, Split(part("train"), part("test")))


def _book_and_wiki() -> list[Source]:
    """Downloaded once, not streamed: neighbouring sentences of a book stay together, and an epoch costs no network.

    By the words BERT's authors count, the books are a quarter of all.
    """
    from datasets import load_dataset

    wiki = load_dataset("wikimedia/wikipedia", "20231101.en", split="train")
    # The branch without a script, which newer versions of ``datasets`` do not run.
    books = load_dataset("bookcorpus/bookcorpus", split="train", revision="refs/convert/parquet")
    return [
        Source(len(wiki) // 100, lambda i: wiki[100 * i : 100 * (i + 1)]["text"], 0.76),
        Source(len(books) // 5000, lambda i: [" ".join(books[5000 * i : 5000 * (i + 1)]["text"])], 0.24),
    ]


def _local_book_and_wiki() -> list[Source]:
    def source(name: str, weight: float) -> Source:
        text = local.text(name)[:200_000]
        return Source(len(text) // 4000, lambda i: [text[4000 * i : 4000 * (i + 1)]], weight)

    return [source("wikitext2_valid", 0.76), source("gutenberg5", 0.24)]


def _tokenizer(setup: Setup, name: str) -> Any:
    if not setup.small:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    from tokenizers.implementations import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    def train() -> dict[str, int]:
        tokenizer = BertWordPieceTokenizer()
        texts = [document for source in _local_book_and_wiki() for document in source.read(0)]
        tokenizer.train_from_iterator(texts, vocab_size=500, show_progress=False)
        return tokenizer.get_vocab()

    # Kept, for it comes out a little different every time, and a run that is continued needs the same.
    return BertTokenizerFast(vocab=agreed(lambda: local.cached("paper-pieces-small", train)))


def _of_text(setup: Setup, tokenizer: Any, length: int, **options: Any) -> Data:
    sources = _local_book_and_wiki() if setup.small else _book_and_wiki()
    learned, kept = [], []  # chunks of every source, this rank's
    for source in sources:
        order = random.Random(0).sample(range(source.chunks), source.chunks)
        border = max(setup.ranks, source.chunks // 1000)
        kept.append(order[:border][setup.rank :: setup.ranks])
        learned.append(order[border:][setup.rank :: setup.ranks])

    def stream(chunks: list[list[int]], seed: int, pool: int, count: int) -> Mixed:
        # Ranks have other chunks, but would draw from the sources in the same order.
        dice = random.Random(f"{seed} {setup.rank}")
        streams = [Windows(*its, tokenizer, length, dice) for its in zip(sources, chunks, strict=True)]
        return Mixed(streams, [source.weight for source in sources], dice, pool, count)

    def batches(seed: int) -> Mixed:
        return stream(learned, seed, 16 if setup.small else 4096, setup.batch // setup.ranks)

    count = setup.evaluated // setup.ranks
    held_out = {part: next(stream(own, 0, 1, count)) for part, own in (("train", learned), ("test", kept))}
    return Data(batches, held_out, pieces=len(tokenizer), **options)


def masked_text(setup: Setup, length: int) -> Data:
    tokenizer = _tokenizer(setup, BERT)

    def prepare(batch: Tensors, generator: torch.Generator) -> task.Prepared:
        """15 % of the tokens are asked for: 80 % of those hidden, 10 % replaced, 10 % left."""
        (tokens,) = batch
        tokens = functional.pad(tokens, (1, 0), value=tokenizer.cls_token_id)
        tokens = functional.pad(tokens, (0, 1), value=tokenizer.sep_token_id)
        chance = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        chance[(tokens == tokenizer.cls_token_id) | (tokens == tokenizer.sep_token_id)] = 1.0
        others = torch.randint(len(tokenizer), tokens.shape, generator=generator, device=tokens.device)
        inputs = torch.where(chance < 0.12, tokenizer.mask_token_id, torch.where(chance < 0.135, others, tokens))
        return (inputs,), torch.where(chance < 0.15, tokens, task.IGNORED)

    return _of_text(setup, tokenizer, setup.cut(length) - 2, prepare=prepare)  # without the first and the last token


def plain_text(setup: Setup, length: int) -> Data:
    return _of_text(setup, _tokenizer(setup, GPT2), setup.cut(length) + 1, prepare=task.next_token)


GLUE = {  # columns and classes
    "mnli": (("premise", "hypothesis"), 3),
    "qqp": (("question1", "question2"), 2),
    "qnli": (("question", "sentence"), 2),
    "sst2": (("sentence",), 2),
    "cola": (("sentence",), 2),
}


def glue(setup: Setup, name: str, length: int) -> Data:
    columns, classes = GLUE[name]
    if setup.small:
        parts = [_questions(part, columns, classes) for part in ("train", "test")]
    else:
        from datasets import load_dataset

        found = load_dataset("nyu-mll/glue", name)
        parts = [found["train"], found["validation_matched" if name == "mnli" else "validation"]]
    tokenizer = _tokenizer(setup, BERT)

    def encode(rows: Any) -> Tensors:
        texts = [list(rows[column]) for column in columns]
        options = {"padding": "max_length", "truncation": True, "max_length": setup.cut(length)}
        encoded = tokenizer(*texts, return_tensors="pt", **options)
        return encoded["input_ids"].int(), encoded["token_type_ids"].int(), torch.tensor(list(rows["label"]))

    return _of_samples(setup, Split(encode(parts[0]), encode(parts[1])), pieces=len(tokenizer))


def _questions(part: str, columns: tuple[str, ...], classes: int) -> dict[str, list[Any]]:
    """Stands in for any of GLUE's tasks: questions to a bank, each beside itself, in arbitrary classes."""
    rows = list(csv.reader(io.StringIO(local.text(f"banking77_{part}"))))[1::20]
    questions = [question for question, _ in rows]
    return {**dict.fromkeys(columns, questions), "label": [len(intent) % classes for _, intent in rows]}


def iwslt14(setup: Setup, length: int) -> Data:
    """German to English, in pieces of one vocabulary; pairs with a longer sentence are left out."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
    from tokenizers import models as piece_models

    length = setup.cut(length)

    def train() -> str:
        tokenizer = Tokenizer(piece_models.BPE(unk_token=local.UNKNOWN))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        options = {"special_tokens": list(local.SPECIAL), "show_progress": False}
        trainer = trainers.BpeTrainer(vocab_size=500 if setup.small else PIECES["iwslt14"], **options)
        tokenizer.train_from_iterator((sentence for pair in pairs for sentence in pair), trainer)
        return tokenizer.to_str()

    pairs = _local_pairs() if setup.small else sources.iwslt14()
    name = "paper-iwslt14" + "-small" * setup.small
    tokenizer = Tokenizer.from_str(agreed(lambda: local.cached(name, train)))
    german, english = (
        [encoded.ids for encoded in tokenizer.encode_batch_fast([pair[side] for pair in pairs])] for side in (0, 1)
    )
    fitting = [i for i in range(len(pairs)) if len(german[i]) <= length and len(english[i]) <= length - 2]

    def padded(lines: list[list[int]]) -> Tensor:
        return torch.tensor([line + [local.PAD_ID] * (length - len(line)) for line in lines])

    def encode(chosen: list[int]) -> Tensors:
        framed = [[local.START_ID, *english[i], local.END_ID] for i in chosen]
        return padded([german[i] for i in chosen]), padded(framed)

    learned, kept = [i for i in fitting if i % 23], [i for i in fitting if i % 23 == 0]
    split = Split(encode(learned), encode(kept))
    return _of_samples(setup, split, pieces=tokenizer.get_vocab_size(), prepare=task.translation)


def _local_pairs() -> list[tuple[str, str]]:
    lines = local.text("tatoeba_deu_eng")[:100_000].split("\n")[:-1]
    return [(german, english) for english, german, *_ in (line.split("\t") for line in lines)]
