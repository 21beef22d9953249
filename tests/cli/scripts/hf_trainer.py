"""transformers' Trainer, which builds the optimizer inside, on a tiny model of text."""

import argparse
import inspect
import tempfile
import textwrap

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

text = inspect.getsource(textwrap).encode()[:8192]
rows = [{"input_ids": torch.tensor(list(text[i : i + 32])), "labels": torch.tensor(list(text[i : i + 32]))}
        for i in range(0, len(text) - 32, 32)]  # fmt: skip
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        learning_rate=args.lr,
        weight_decay=0.1,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=8,
        max_steps=args.steps,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
print([p.double().sum().item() for p in model.parameters()])
print("final", float(losses[-1]))
