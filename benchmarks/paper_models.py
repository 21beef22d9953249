"""The paper's networks at their real size, and the data they learn from; ``small`` shrinks both to a test's size."""

from __future__ import annotations

import csv
import functools
import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from benchmarks import data as local
from benchmarks import models, sources, tasks
from benchmarks.data import Split

BERT = "google-bert/bert-base-uncased"  # whose vocabulary BERT-L shares
GPT2 = "openai-community/gpt2"
VIT = "google/vit-base-patch16-224-in21k"
PIECES = {"bert": 30_522, "gpt": 50_257, "iwslt14": 10_000}  # sizes of the vocabularies

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Setup:
    """What model and data need to know of a run."""

    small: bool = False
    start: str | None = None  # a checkpoint's folder or name on the Hub
    dropout: float = 0.1
    batch: int = 8  # of all ranks together
    evaluated: int = 64  # samples of the train and of the held-out data, of all ranks together
    rank: int = 0
    ranks: int = 1

    def cut(self, length: int) -> int:
        return min(length, 32) if self.small else length


# Networks.


class Network(NamedTuple):
    model: nn.Module
    blocks: list[nn.Module]  # sharded each on its own, what is left with the root


def resnet18(setup: Setup, classes: int) -> Network:
    model = models.resnet(classes, *((8, (1, 1, 1, 1)) if setup.small else (64, (2, 2, 2, 2))))
    return Network(model, [layer for layer in model if list(layer.children())])


class _WideBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, inputs: Tensor) -> Tensor:
        active = self.activate(inputs)
        return self.convolutions(active) + (inputs if self.shortcut is None else self.shortcut(active))


def wide_resnet(setup: Setup, classes: int) -> Network:
    """WRN-40-10: three stages of six blocks that activate before they convolve."""
    per_stage, factor = (1, 1) if setup.small else (6, 10)
    blocks, channels = [], 16
    for stage in range(3):
        for block in range(per_stage):
            width = 16 * factor * 2**stage
            blocks.append(_WideBlock(channels, width, 2 if stage > 0 and block == 0 else 1))
            channels = width
    end = nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    return Network(nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), *blocks, *end), blocks)


def _transformer_size(size: str) -> dict[str, int]:
    width, layers, heads = {"small": (32, 2, 4), "base": (768, 12, 12), "large": (1024, 24, 16)}[size]
    shape = {"hidden_size": width, "intermediate_size": 4 * width}
    return shape | {"num_hidden_layers": layers, "num_attention_heads": heads}


def masked_bert(setup: Setup, pieces: int, size: str) -> Network:
    from transformers import BertConfig, BertForMaskedLM

    dropouts = {"hidden_dropout_prob": setup.dropout, "attention_probs_dropout_prob": setup.dropout}
    sizes = _transformer_size("small" if setup.small else size)
    model = BertForMaskedLM(BertConfig(vocab_size=pieces, **sizes, **dropouts))
    return Network(models.Logits(model), list(model.bert.encoder.layer))


class Classifier(nn.Module):
    """Of sentences, or of pairs of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        mask = (tokens != self.model.config.pad_token_id).long()
        return self.model(tokens, attention_mask=mask, token_type_ids=types).logits


def classifying_bert(setup: Setup, pieces: int, classes: int) -> Network:
    from transformers import BertConfig, BertForSequenceClassification

    # Attention keeps its dropout where the paper takes the other away.
    options = {"num_labels": classes, "hidden_dropout_prob": setup.dropout, "attention_probs_dropout_prob": 0.1}
    if setup.start is None:
        sizes = _transformer_size("small" if setup.small else "base")
        model = BertForSequenceClassification(BertConfig(vocab_size=pieces, **sizes, **options))
    else:
        model = BertForSequenceClassification.from_pretrained(setup.start, **options)
    return Network(Classifier(model), list(model.bert.encoder.layer))


def gpt(setup: Setup, pieces: int, length: int) -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if setup.small else {}  # else 768, 12, 12
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), setup.dropout)
    ends = {"bos_token_id": pieces - 1, "eos_token_id": pieces - 1}
    config = GPT2Config(vocab_size=pieces, n_positions=length, use_cache=False, **sizes, **dropouts, **ends)
    model = GPT2LMHeadModel(config)
    return Network(models.Logits(model), list(model.transformer.h))


def translator(setup: Setup, pieces: int) -> Network:
    """One embedding for both languages and the answer."""
    # Without dropout when small, so that runs on other numbers of ranks can be compared.
    width, dropout = (16, 0.0) if setup.small else (256, setup.dropout)
    model = models.LSTMTranslator(pieces, width)
    nn.init.normal_(model.embedding.weight, std=width**-0.5)
    model.head.weight = model.embedding.weight
    model.embedding = nn.Sequential(model.embedding, nn.Dropout(dropout))
    model.head = nn.Sequential(nn.Dropout(dropout), model.head)
    return Network(model, [model.encoder, model.decoder])


class _Resized(nn.Module):
    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, images: Tensor) -> Tensor:
        return self.model(functional.interpolate(images, (self.size, self.size), mode="bilinear")).logits


def vit(setup: Setup, classes: int) -> Network:
    """ViT-B/16 for 384 x 384, its head from zero; from a start of another size the positions are stretched."""
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    size = {"image_size": 32, "patch_size": 8} if setup.small else {"image_size": 384, "patch_size": 16}
    width = _transformer_size("small" if setup.small else "base")
    model = ViTForImageClassification(ViTConfig(num_labels=classes, **size, **width))
    if setup.start is not None:
        weights = ViTModel.from_pretrained(setup.start, add_pooling_layer=False).state_dict()
        name, patches = "embeddings.position_embeddings", model.vit.embeddings.patch_embeddings.num_patches
        weights[name] = _stretched(weights[name], patches)
        model.vit.load_state_dict(weights)
    for p in model.classifier.parameters():
        nn.init.zeros_(p)
    return Network(_Resized(model, size["image_size"]), list(model.vit.layers))


def _stretched(positions: Tensor, patches: int) -> Tensor:
    """[1, 1 + before, width] to [1, 1 + patches, width]; the first belongs to no patch."""
    first, rest = positions[:, :1], positions[:, 1:]
    before, after = (math.isqrt(count) for count in (rest.shape[1], patches))
    grid = rest.unflatten(1, (before, before)).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, (after, after), mode="bilinear")
    return torch.cat([first, grid.flatten(2).mT], 1)


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


class Data(NamedTuple):
    """This rank's share of everything."""

    batches: Callable[[int], Iterator[Tensors]]  # from a seed, without end
    held_out: dict[str, Tensors]  # what the evaluations see of the train and of the test data: as much on every rank
    samples: int = 0  # in an epoch of all ranks, where there are epochs
    pieces: int = 0
    prepare: Callable[[Tensors, torch.Generator], tasks.Prepared] = tasks.as_it_is


def agreed(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def _of_samples(setup: Setup, split: Split, **options: Any) -> Data:
    def batches(seed: int) -> Iterator[Tensors]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(split.train[0]), generator=generator)
            for chosen in order[: len(order) // setup.batch * setup.batch].split(setup.batch):
                own = chosen.chunk(setup.ranks)[setup.rank]
                yield tuple(tensor[own] for tensor in split.train)

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


class Source(NamedTuple):
    """A long text in chunks, each of some documents."""

    chunks: int
    read: Callable[[int], list[str]]
    weight: float  # the share of its windows in what is trained on


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

    return BertTokenizerFast(vocab=agreed(train))


def _windows(source: Source, chunks: list[int], tokenizer: Any, length: int) -> Iterator[np.ndarray]:
    """So many tokens each; a document's end is marked, but ends no window."""
    end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    rest = np.empty(0, np.int64)
    for chunk in chunks:
        documents = tokenizer(source.read(chunk), add_special_tokens=False, verbose=False)["input_ids"]
        tokens = np.concatenate([rest, *(np.asarray([*ids, end], np.int64) for ids in documents)])
        whole = len(tokens) // length * length
        yield from tokens[:whole].reshape(-1, length)
        rest = tokens[whole:]


def _mixed(
    sources: list[Source], chunks: list[list[int]], tokenizer: Any, length: int, dice: random.Random, pool: int
) -> Iterator[np.ndarray]:
    """Without end: windows of all sources in proportion to their weights, neighbours apart."""

    def endless(source: Source, own: list[int]) -> Iterator[np.ndarray]:
        while True:
            yield from _windows(source, dice.sample(own, len(own)), tokenizer, length)

    streams = [endless(source, own) for source, own in zip(sources, chunks, strict=True)]
    weights = [source.weight for source in sources]
    waiting: list[np.ndarray] = []
    while True:
        waiting.append(next(dice.choices(streams, weights)[0]))
        if len(waiting) > pool:
            place = dice.randrange(pool)
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            yield waiting.pop()


def _of_text(setup: Setup, tokenizer: Any, length: int, **options: Any) -> Data:
    sources = _local_book_and_wiki() if setup.small else _book_and_wiki()
    learned, kept = [], []  # chunks of every source, this rank's
    for source in sources:
        order = random.Random(0).sample(range(source.chunks), source.chunks)
        border = max(setup.ranks, source.chunks // 1000)
        kept.append(order[:border][setup.rank :: setup.ranks])
        learned.append(order[border:][setup.rank :: setup.ranks])

    def stream(chunks: list[list[int]], seed: int, pool: int, count: int) -> Iterator[Tensors]:
        # Ranks have other chunks, but would draw from the sources in the same order.
        mixed = _mixed(sources, chunks, tokenizer, length, random.Random(f"{seed} {setup.rank}"), pool)
        while True:
            yield (torch.from_numpy(np.stack([next(mixed) for _ in range(count)])),)

    def batches(seed: int) -> Iterator[Tensors]:
        return stream(learned, seed, 16 if setup.small else 4096, setup.batch // setup.ranks)

    count = setup.evaluated // setup.ranks
    held_out = {part: next(stream(own, 0, 1, count)) for part, own in (("train", learned), ("test", kept))}
    return Data(batches, held_out, pieces=len(tokenizer), **options)


def masked_text(setup: Setup, length: int) -> Data:
    tokenizer = _tokenizer(setup, BERT)

    def prepare(batch: Tensors, generator: torch.Generator) -> tasks.Prepared:
        """15 % of the tokens are asked for: 80 % of those hidden, 10 % replaced, 10 % left."""
        (tokens,) = batch
        tokens = functional.pad(tokens, (1, 0), value=tokenizer.cls_token_id)
        tokens = functional.pad(tokens, (0, 1), value=tokenizer.sep_token_id)
        chance = torch.rand(tokens.shape, generator=generator, device=tokens.device)
        chance[(tokens == tokenizer.cls_token_id) | (tokens == tokenizer.sep_token_id)] = 1.0
        others = torch.randint(len(tokenizer), tokens.shape, generator=generator, device=tokens.device)
        inputs = torch.where(chance < 0.12, tokenizer.mask_token_id, torch.where(chance < 0.135, others, tokens))
        return (inputs,), torch.where(chance < 0.15, tokens, tasks.IGNORED)

    return _of_text(setup, tokenizer, setup.cut(length) - 2, prepare=prepare)  # without the first and the last token


def plain_text(setup: Setup, length: int) -> Data:
    return _of_text(setup, _tokenizer(setup, GPT2), setup.cut(length) + 1, prepare=tasks.next_token)


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
    tokenizer = Tokenizer.from_str(agreed(train))
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
    return _of_samples(setup, split, pieces=tokenizer.get_vocab_size(), prepare=tasks.translation)


def _local_pairs() -> list[tuple[str, str]]:
    lines = local.text("tatoeba_deu_eng")[:100_000].split("\n")[:-1]
    return [(german, english) for english, german, *_ in (line.split("\t") for line in lines)]
