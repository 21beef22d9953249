"""What ``mechanic run`` learns in each of the scripts, beside a grid of learning rates: the table of docs/command.md.

    python -m tests.cli.against_a_grid docs/command.md

It needs the environment of ``make test-ecosystem``. A script's last line has its final loss.
"""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cli.running import SCRIPTS, Ended, by_hand, mechanic

# What it is, the optimizer, and the learning rate that the script has by default.
TABLE = {
    "digits_cnn": ("CNN on digits, StepLR", "Adadelta", 1.0),
    "language_model": ("LSTM on text, lr set by hand", "AdamW", 3e-3),
    "gan": ("GAN, two optimizers", "Adam, Adam", 1e-3),
    "vae": ("VAE on digits, fused", "Adam", 1e-3),
    "regression": ("polynomial, closure, ReduceLROnPlateau", "SGD", 0.01),
    "reinforce": ("policy gradient, maximize", "Adam", 0.01),
    "amp": ("bfloat16 autocast, GradScaler, OneCycleLR", "AdamW", 0.01),
    "compiled": ("torch.compile", "NAdam", 3e-3),
    "image_groups": ("groups, warm-up, cosine, moving average", "SGD", 0.05),
    "resumed": ("saved and resumed, LinearLR", "RMSprop", 3e-3),
    "own_classes": ("classes of its own", "Lion, SGD", 1e-3),
    "ddp": ("DDP under torchrun, two ranks", "AdamW", 3e-3),
    "ddp_spawn": ("DDP in spawned processes", "SGD", 0.05),
    "hf_trainer": ("transformers' Trainer", "AdamW", 1e-3),
    "accelerate_loop": ("Accelerate", "AdamW", 3e-3),
    "lightning_fit": ("Lightning", "Adam", 3e-3),
}
GRID = range(-2, 3)  # half decades; it grows until its best is not at the edge
FARTHEST = 8


def run(name, lr=None, *, wrapped=False):
    """The final loss of a script, and what was learned."""
    arguments = [] if lr is None else ["--lr", repr(lr)]
    if name.startswith("ddp"):
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "127.0.0.1:0"]
        launcher *= name == "ddp"
        command = [*launcher, *(["-m", "mechanic", "run"] * wrapped), str(SCRIPTS / f"{name}.py"), *arguments]
        found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
        ended = Ended(found.returncode, found.stdout, found.stderr)
    elif wrapped:
        ended = mechanic("run", SCRIPTS / f"{name}.py", *arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ended = by_hand(name, folder=folder, arguments=arguments)
    if ended.code:
        return math.inf, []  # a plain run that has diverged may raise
    loss = float(re.findall(r"^final (\S+)$", ended.out, re.MULTILINE)[-1])
    rates = [float(rate) for rate in re.findall(r"learned rate[^:]*: (\S+) \(you passed", ended.err)]
    return loss if math.isfinite(loss) else math.inf, rates


def row(name):
    what, optimizer, lr = TABLE[name]
    loss, rates = run(name, wrapped=True)
    rates = rates[1:] if name == "resumed" else rates  # the second optimizer went on from the first
    by_index = {}
    wanted = set(GRID)
    while missing := sorted(wanted - set(by_index)):
        by_index |= {index: run(name, lr=float(f"{lr * 10 ** (index / 2):.2g}"))[0] for index in missing}
        best = min(by_index, key=by_index.get)
        wanted |= {index for index in (best - 1, best + 1) if abs(index) <= FARTHEST}
    has_one = len(rates) == 1 or name == "image_groups"
    pasted = f"{run(name, lr=max(rates))[0]:.3g}" if has_one else "–"
    learned = ", ".join(f"{rate:.2g}" for rate in rates)
    cells = [f"`{name}.py`", what, optimizer, learned, f"{loss:.3g}", pasted]
    return [*cells, f"{lr * 10 ** (best / 2):.2g}", f"{by_index[best]:.3g}", f"{by_index[0]:.3g}"]


def main():
    names = sys.argv[2:] or TABLE
    header = ["script", "", "optimizer", "learned rate", "loss with Mechanic", "loss of plain at that rate"]
    header += ["best of the grid", "its loss", "loss at the script's own rate"]
    lines = ["| " + " | ".join(header) + " |", "|---|---|---|" + "--:|" * 6]
    for name in names:
        lines.append("| " + " | ".join(row(name)) + " |")
        print(lines[-1], flush=True)
    page = Path(sys.argv[1])
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- grid -->\n")
    _, end, after = rest.partition("<!-- end of grid -->")
    page.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
