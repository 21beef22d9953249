"""A GPT on real text with Muon and no learning rate: small on a CPU in a minute, or as large as GPT-2 on a GPU.

    python examples/muon_gpt.py
    python examples/muon_gpt.py --text corpus.txt --layers 17 --width 768 --heads 12 --context 1024 --steps 5000

The second line has 122M parameters; tokens are bytes. Without ``--text`` the text is tiny Shakespeare, if MECHANIC_DATA
names a folder with text/tinyshakespeare.txt.xz; else it is documentation from Python's standard library.
"""

import argparse
import importlib
import inspect
import lzma
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mechanic.torch import MechanicMuon, roles

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if is_last else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def read_text(path: str | None) -> bytes:
    """A file, tiny Shakespeare, or the docstrings of the standard library."""
    if path:
        return Path(path).read_bytes()
    folder = os.environ.get("MECHANIC_DATA")
    shakespeare = Path(folder or ".") / "text" / "tinyshakespeare.txt.xz"
    if folder and shakespeare.exists():
        return lzma.decompress(shakespeare.read_bytes())
    return "\n".join(_docstrings()).encode()


def _docstrings() -> Iterator[str]:
    for name in ("argparse", "collections", "decimal", "difflib", "email.message", "inspect", "logging", "pathlib"):
        module = importlib.import_module(name)
        for _, value in inspect.getmembers(module, inspect.isclass):
            yield from (inspect.getdoc(member) or "" for _, member in inspect.getmembers(value, callable))


def batch_of(text: Tensor, context: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
    rows = text[starts + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a file to train on")
    sizes = {"width": 96, "layers": 3, "heads": 4, "context": 64, "batch": 16, "steps": 300}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--tuners", choices=["one", "role"], default="one")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    return parser


def main(arguments: argparse.Namespace) -> float:
    """Train to the end of a cosine; returns the loss on the last tenth of the text, in nats per byte."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = torch.frombuffer(bytearray(read_text(arguments.text)), dtype=torch.uint8)
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = GPT(arguments.width, arguments.layers, arguments.heads, arguments.context).to(device)
    print(roles(model))
    optimizer = MechanicMuon(model, tuners=arguments.tuners)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    forward = torch.compile(model) if arguments.compile else model
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)

    def loss_of(text: Tensor, size: int) -> Tensor:
        inputs, targets = (part.to(device) for part in batch_of(text, arguments.context, size, generator))
        with half:
            return cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    for step in range(arguments.steps):
        loss = loss_of(train, arguments.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == arguments.steps - 1:
            learned = ", ".join(f"{name} {scale:.2g}" for name, scale in optimizer.scales().items())
            print(f"step {step:>5}   train loss {loss.item():.3f}   learned scale: {learned}")
    with torch.no_grad():
        held_out_loss = sum(loss_of(held_out, arguments.batch).item() for _ in range(20)) / 20
    print(f"held-out loss {held_out_loss:.3f}, from {math.log(VOCABULARY):.3f} for guessing")
    return held_out_loss


if __name__ == "__main__":
    main(options().parse_args())
