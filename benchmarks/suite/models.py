"""The networks of the tasks, small enough for a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.data.datasets import PAD_ID, VOCABULARY


def logistic_regression(features: int, classes: int) -> nn.Module:
    """From zero, as convex problems are started."""
    model = nn.Linear(features, classes)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def mlp(features: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(features, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)),
    )


def cnn(classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


class _ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.convolutions(inputs) + self.shortcut(inputs))


def resnet(classes: int, width: int, blocks: tuple[int, ...], stride: int = 1) -> nn.Module:
    """``blocks`` residual blocks per stage; every stage but the first halves the image and doubles the width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_ResidualBlock(channels, width * 2**stage, stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vit(classes: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Logits(ViTForImageClassification(config))


def bert_config(width: int, dropout: float):
    from transformers import BertConfig

    return BertConfig(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        pad_token_id=PAD_ID,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def masked_bert(width: int = 64, dropout: float = 0.0) -> nn.Module:
    from transformers import BertForMaskedLM

    return Logits(BertForMaskedLM(bert_config(width, dropout)))


class ClassifyingBert(nn.Module):
    """A head on the mean over the tokens: so small a pre-training teaches the first token nothing about the rest."""

    def __init__(self, classes: int, dropout: float) -> None:
        from transformers import BertModel

        super().__init__()
        self.bert = BertModel(bert_config(64, dropout), add_pooling_layer=False)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(64, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        counts = (tokens != PAD_ID).long()
        hidden = self.bert(tokens, attention_mask=counts).last_hidden_state * counts.unsqueeze(-1)
        return self.classifier(hidden.sum(1) / counts.sum(1, keepdim=True))


class Logits(nn.Module):
    """A model of ``transformers`` that answers with its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


class GPT(nn.Module):
    """A decoder of pre-norm blocks."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.attend(self.norms[0](hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.dropout(self.feed(self.norms[1](hidden)))


class LSTMTranslator(nn.Module):
    """Encoder and decoder LSTM, with dot-product attention between them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD_ID)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded, state = self.encoder(self.embedding(source))
        decoded, _ = self.decoder(self.embedding(target), state)
        scores = decoded @ encoded.mT / decoded.shape[-1] ** 0.5
        scores = scores.masked_fill((source == PAD_ID).unsqueeze(1), float("-inf"))
        context = scores.softmax(-1) @ encoded
        return self.head(torch.tanh(self.join(torch.cat([decoded, context], -1))))
