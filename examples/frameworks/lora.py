"""PEFT: LoRA adapters with a scale per part of the model.

A small language model is trained on the source of one module, then adapted to another. The adapters of attention and
those of the feed-forward layers are groups that name their own tuner; a UNet and its text encoder would be the same.
"""

import argparse
import inspect
import string
import textwrap

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from mechanic.torch import Mechanic

CODE = inspect.getsource(string) + inspect.getsource(textwrap)  # to adapt to
LENGTH, BATCH = 32, 8


def train(model: torch.nn.Module, optimizer: Mechanic, code: str, steps: int) -> list[float]:
    """Returns the losses, as means of ten steps."""
    pieces = torch.tensor(list(code.encode())).unfold(0, LENGTH, LENGTH)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        batch = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).view(-1, 10).mean(1).tolist()


def pretrained() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    train(model, Mechanic(torch.optim.AdamW(model.parameters(), lr=1.0)), inspect.getsource(argparse), steps=60)
    return model


def adapted(model: LlamaForCausalLM) -> tuple[PeftModel, Mechanic]:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [  # the change: groups that name a tuner
        {"params": [p for name, p in named.items() if "self_attn" in name], "tuner": "attention"},
        {"params": [p for name, p in named.items() if "mlp" in name], "tuner": "feed-forward"},
    ]
    return model, Mechanic(torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, optimizer = adapted(pretrained())
    losses = train(model, optimizer, CODE, steps=100)
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
    print("learned:", ", ".join(f"{name} at {scale:.2g}" for name, scale in optimizer.scales().items()))
