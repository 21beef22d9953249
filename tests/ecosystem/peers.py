"""What other optimizers that need no learning rate do in the same frameworks: the table in docs/ecosystem.md.

``python tests/ecosystem/peers.py [CHECK]`` in the environment of ``make test-ecosystem``, with dadaptation,
mechanic-pytorch, prodigyopt and schedulefree installed into it.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "frameworks"), str(ROOT)]


def peers():
    import dadaptation
    import mechanic_pytorch
    import prodigyopt
    import schedulefree

    from mechanic.torch import MechanicAdamW

    return {
        "this package": (MechanicAdamW, 1.0),
        "mechanic-pytorch": (mechanic_pytorch.mechanize(torch.optim.AdamW), 1.0),
        "Prodigy": (prodigyopt.Prodigy, 1.0),
        "D-Adaptation": (dadaptation.DAdaptAdam, 1.0),
        "Schedule-Free": (schedulefree.AdamWScheduleFree, 3e-3),
    }


def verdict(straight, resumed):
    same = all(a.equal(b) for a, b in zip(straight, resumed, strict=True))
    return "bitwise" if same else f"differs by {max((a - b).abs().max().item() for a, b in zip(straight, resumed)):.1g}"  # noqa: B905


def in_trainer(cls, lr, folder):
    import hf_trainer
    from mechanic.integrations.transformers import ScaleCallback

    found = []
    for checkpoint in (None, f"{folder}/checkpoint-4"):
        optimizer = {"optimizer_cls_and_kwargs": (cls, {"lr": lr})}
        trainer = hf_trainer.build(folder, hf_trainer.small_model(), optimizer, bf16=False, max_steps=8, save_steps=4)
        trainer.remove_callback(ScaleCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([p.detach().clone() for p in trainer.model.parameters()])
    return "resume " + verdict(*found)


def in_lightning(cls, lr, folder):
    import lightning_module

    class Classifier(lightning_module.Classifier):
        def configure_optimizers(self):
            return cls(self.parameters(), lr=lr)

        def on_train_batch_start(self, *arguments):
            if hasattr(self.optimizers().optimizer, "train"):  # Schedule-Free
                self.optimizers().optimizer.train()

    found = []
    for checkpoint in (None, f"{folder}/step=28.ckpt"):
        trainer = lightning_module.build(folder, 56)
        trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ == "ModelCheckpoint"]
        model = Classifier()
        trainer.fit(model, lightning_module.digits(), ckpt_path=checkpoint)
        found.append([p.detach().clone() for p in model.parameters()])
    return "resume " + verdict(*found)


def in_accelerate(cls, lr, folder, hidden=32):
    """FSDP2 against DDP on two ranks."""
    from tests.torch import parallel

    name = next(name for name, (other, _) in peers().items() if other.__name__ == cls.__name__)
    parallel.on_ranks(_rank, 2, 120, str(folder), name, hidden)
    return torch.load(folder / "verdict.pt")


def on_uneven_shards(cls, lr, folder):
    return in_accelerate(cls, lr, folder, hidden=31)


def _rank(rank, folder, name, hidden):
    from accelerate import DistributedType, PartialState

    import accelerate_loop

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871", RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    cls, lr = peers()[name]

    def build(base):
        optimizer = cls(base.param_groups[0]["params"], lr=lr)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    accelerate_loop.HIDDEN = hidden
    accelerate_loop.Mechanic, accelerate_loop.readings = build, lambda optimizer: {}
    accelerator = accelerate_loop.make_accelerator()
    PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate_loop.sharding()
    try:
        model = accelerate_loop.train(accelerator, Path(folder) / "checkpoints", 8)
        sharded = [p.full_tensor().detach() for p in model.parameters()]
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.MULTI_CPU
        accelerator.free_memory()
        model = accelerate_loop.train(accelerator, Path(folder) / "checkpoints", 8)
        whole = [p.detach() for p in model.parameters()]
        apart = max((a - b).abs().max().item() for a, b in zip(sharded, whole, strict=True))
        found = f"FSDP2 within {apart:.1g} of DDP"
    except Exception as error:
        found = f"FSDP2 raises {type(error).__name__}: {str(error)[:70]}"
    torch.save(found, Path(folder) / "verdict.pt")
    dist.barrier()
    os._exit(0)


def with_groups(cls, lr, folder):
    """Two groups that want rates a hundredfold apart, in one optimizer."""
    import per_group

    model = per_group.Classifier()
    groups = [{"params": list(part.parameters())} for part in (model.embedding, model.body)]
    for group, name in zip(groups, ("embedding", "body"), strict=True):
        group["tuner"] = name
    optimizer = cls(groups, lr=lr, weight_decay=0.0)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return f"loss {per_group.train(model, optimizer):.4f}"


if __name__ == "__main__":
    import logging

    sys.path.insert(0, str(ROOT / "examples"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for check in (in_trainer, in_lightning, in_accelerate, on_uneven_shards, with_groups):
        if check.__name__ not in (sys.argv[1:] or check.__name__):
            continue
        for name, (cls, lr) in peers().items():
            torch.set_grad_enabled(True)  # mechanic-pytorch leaves it off where it raises
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = check(cls, lr, Path(folder))
                except BaseException as error:
                    found = f"raises {type(error).__name__}: {str(error)[:100]!r}"
            print(f"{check.__name__:14} {name:18} {found}", flush=True)
