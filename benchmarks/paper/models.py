"""The paper's networks at their real size; ``small`` shrinks them to a test's."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.paper.setup import Setup
from benchmarks.suite import models


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
