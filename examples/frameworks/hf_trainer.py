"""transformers' Trainer: a small language model on Python source, with all that a real run has.

Gradient accumulation, clipping, a warm-up, bfloat16, a checkpoint and going on from it. Two lines are Mechanic's: the
class in ``optimizer_cls_and_kwargs``, and the callback that logs what is learned.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mechanic.integrations.transformers import ScaleCallback
from mechanic.torch import MechanicAdamW

STEPS, LENGTH = 40, 32


class Source(torch.utils.data.Dataset):
    """The source of a module of the standard library, byte by byte."""

    def __init__(self) -> None:
        code = torch.tensor(list(Path(argparse.__file__).read_bytes()))
        self.pieces = code[: len(code) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


# The change: a class, and any lr. Or an instance: {"optimizers": (Mechanic(AdamW(model.parameters(), lr=1.0)), None)}.
MECHANIC = {"optimizer_cls_and_kwargs": (MechanicAdamW, {"lr": 1.0})}


def build(folder: str | Path, model: LlamaForCausalLM, optimizer: dict, **options) -> Trainer:
    arguments = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 10,
        "save_steps": 20,
        "max_steps": STEPS,
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **{**arguments, **options}),
        train_dataset=Source(),
        **optimizer,
    )
    trainer.add_callback(ScaleCallback(trainer))  # what to look at
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build(folder, small_model(), MECHANIC).train()
        print("and once more from the checkpoint of step 20:")
        build(folder, small_model(), MECHANIC).train(resume_from_checkpoint=f"{folder}/checkpoint-20")
