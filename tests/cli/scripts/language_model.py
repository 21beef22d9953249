"""A character language model with an LSTM, on the text of a module of Python's own; clipped, lr set by hand."""

import argparse
import inspect
import math
import textwrap

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(0)

text = inspect.getsource(textwrap)
vocabulary = sorted(set(text))
data = torch.tensor([vocabulary.index(c) for c in text])


class RNNModel(nn.Module):
    def __init__(self, tokens, size=32):
        super().__init__()
        self.encoder = nn.Embedding(tokens, size)
        self.rnn = nn.LSTM(size, size, batch_first=True)
        self.decoder = nn.Linear(size, tokens)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.encoder(tokens))[0])


def get_lr(step):
    warmup = 10
    if step < warmup:
        return args.lr * (step + 1) / warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (args.steps - warmup)))


model = RNNModel(len(vocabulary))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
losses = []
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    starts = torch.randint(len(data) - 33, (16,))
    batch = torch.stack([data[i : i + 33] for i in starts])
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} | loss {loss.item()!r} | ppl {math.exp(loss.item()):.2f}")
print("final", sum(losses[-10:]) / 10)
