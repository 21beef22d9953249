"""``mechanic run``: scripts as they are, with their optimizers wrapped."""

import os
import subprocess
import sys

import pytest

from tests.cli.running import SCRIPTS, by_hand, edited, mechanic

IMPORT = ("\nimport torch\n", "\nimport torch\nfrom mechanic.torch import Mechanic\n")


def wrapping(*calls):
    """The edits that wrap the optimizers by hand."""
    return IMPORT, *((call, f"Mechanic({call})") for call in calls)


BY_HAND = {
    "digits_cnn": wrapping("optim.Adadelta(model.parameters(), lr=args.lr)"),
    "language_model": wrapping(
        "torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)"
    ),
    "gan": wrapping(*(f"optim.Adam(net{net}.parameters(), lr=opt.lr, betas=(0.5, 0.999))" for net in "GD")),
    "vae": wrapping("Adam(model.parameters(), lr=args.lr, fused=True)"),
    "regression": wrapping("optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)"),
    "reinforce": wrapping("torch.optim.Adam(policy.parameters(), lr=args.lr, maximize=True)"),
    "amp": wrapping("torch.optim.AdamW(model.parameters(), lr=args.lr / 25, weight_decay=0.05, fused=True)"),
    "compiled": wrapping("torch.optim.NAdam(model.parameters(), lr=args.lr, foreach=True)"),
    "image_groups": wrapping("classes[args.opt](groups, lr=args.lr, **options)"),
    "resumed": (
        *wrapping("torch.optim.RMSprop(model.parameters(), lr=args.lr)"),
        ("if not isinstance(optimizer,", "if not isinstance(optimizer.base,"),
    ),
    "own_classes": (
        *wrapping("Lion(body.parameters(), lr=args.lr)", 'Counting(head.parameters(), args.lr * 10, label="head")'),
        (
            "print(optimizers[1].describe(), isinstance(optimizers[1], Counting), isinstance(optimizers[1], SGD))",
            "print(optimizers[1].base.describe(), True, True)",
        ),
    ),
}
SHORTER = {  # than by default, and how many steps that makes
    "digits_cnn": (["--epochs", "1"], 29),
    "language_model": (["--steps", "25"], 25),
    "gan": (["--steps", "80"], 80),
    "vae": (["--epochs", "3"], 45),
    "regression": (["--steps", "100"], 100),
    "reinforce": (["--episodes", "61"], 61),
    "amp": (["--steps", "60"], 60),
    "compiled": (["--steps", "30", "--backend", "eager"], 30),
    "image_groups": (["--epochs", "3"], 84),
    "resumed": (["--steps", "60"], 30),
    "own_classes": (["--steps", "50"], 50),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_script_trains_as_if_it_were_wrapped_by_hand_to_the_last_bit(name, tmp_path):
    arguments, steps = SHORTER[name]
    expected = by_hand(name, *BY_HAND[name], folder=tmp_path, arguments=arguments)
    assert expected.code == 0, expected.err
    found = mechanic("run", SCRIPTS / f"{name}.py", *arguments, folder=tmp_path)
    assert found.code == 0, found.err
    assert found.out == expected.out
    assert len(found.out.splitlines()) > 3
    assert f"{name}.py:" in found.err
    assert f", {steps} steps" in found.err
    assert "learned rate" in found.err


# Ranks have threads, and a process that forked them could hang: these start as a user's do.


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_ranks_under_torchrun_train_as_if_wrapped_by_hand(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]  # finds a free port itself
    command = ["-m", "mechanic", "run", "--log-to", "rates.csv", SCRIPTS / "ddp.py"]
    found = run_python(*launcher, *command, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert len((tmp_path / "rates.csv").read_text().splitlines()) == 1 + 3  # by one of the ranks
    script = edited("ddp", *wrapping("torch.optim.AdamW(model.parameters(), lr=args.lr)"), folder=tmp_path)
    expected = run_python(*launcher, script)
    assert expected.returncode == 0, expected.stderr
    assert found.stdout.splitlines() == expected.stdout.splitlines()
    assert found.stderr.count("mechanic: wrapped AdamW") == 1  # by the first rank
    assert found.stderr.count("learned rate: ") == 1


def test_processes_that_a_script_spawns_are_wrapped_as_well(tmp_path):
    found = run_python("-m", "mechanic", "run", SCRIPTS / "ddp_spawn.py", "--ranks", 1, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    wrapped = wrapping("torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)")
    expected = run_python(edited("ddp_spawn", *wrapped, folder=tmp_path), "--ranks", 1)
    assert expected.returncode == 0, expected.stderr
    assert found.stdout.splitlines() == expected.stdout.splitlines()
    assert found.stderr.count("learned rate: ") == 1
    assert "built no" not in found.stderr


# What a script can see of how it is run.

SEES = """
import sys, os, multiprocessing
seen = dict(argv=sys.argv, file=__file__, name=__name__, path=sys.path[0], package=__package__,
            spec=__spec__ and __spec__.name, main=sys.modules["__main__"].__dict__ is globals(),
            cached=__cached__, torch="torch" in sys.modules)
print(seen)
"""


def test_a_script_sees_what_it_sees_under_python(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(SEES)
    arguments = ["folder/script.py", "--lr", "3", "-m", "--probe"]
    expected = run_python(*arguments, cwd=tmp_path)
    found = run_python("-m", "mechanic", "run", *arguments, cwd=tmp_path)
    assert found.stdout == expected.stdout
    assert "'torch': False" in found.stdout  # the script may still set OMP_NUM_THREADS
    assert "built no PyTorch optimizer" in found.stderr


def test_a_module_sees_what_it_sees_under_python_m(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "script.py").write_text(SEES.replace(", cached=__cached__", ""))
    expected = run_python("-m", "package.script", "--lr", "3", cwd=tmp_path)
    found = run_python("-m", "mechanic", "run", "-m", "package.script", "--lr", "3", cwd=tmp_path)
    assert found.stdout == expected.stdout


ENDINGS = {
    "raises": "def f():\n    raise ValueError('wrong')\n\nf()\n",
    "code": "import sys\nsys.exit(3)\n",
    "words": "raise SystemExit('no data')\n",
    "syntax": "x = = 3\n",
    "hook": "import sys\nsys.excepthook = lambda *found: print(len(found), 'caught')\nraise KeyError(1)\n",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_codes_and_tracebacks_are_those_of_python(ending, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(ENDINGS[ending])
    expected = run_python(path)
    found = run_python("-m", "mechanic", "run", path)
    assert found.returncode == expected.returncode != 0
    assert found.stdout == expected.stdout
    lines = [line for line in found.stderr.splitlines() if line and not line.startswith("mechanic: ")]
    assert lines == expected.stderr.splitlines()


# Options.

SMALL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1}]
first = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
other = torch.optim.SGD((p for p in [torch.nn.Parameter(torch.ones(2))]), lr=0.1)
for step in range(40):
    inputs = torch.randn(16, 8)
    first.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    other.param_groups[0]["params"][0].square().sum().backward()
    first.step()
    other.step()
    print(step)
print(type(first).__name__, type(other).__name__, first.config.decay if hasattr(first, "config") else None)
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def run_small(small, *options):
    found = mechanic("run", *options, small.name, folder=small.parent)
    assert found.code == 0, found.err
    return found


def test_only_the_class_that_is_named_is_wrapped(small):
    found = run_small(small, "--only", "SGD")
    assert "AdamW SGD" not in found.out
    assert "AdamW Mechanic None" in found.out
    assert "left AdamW at small.py:6 as it is: --only names others" in found.err
    assert "wrapped SGD at small.py:7 (2 parameters)" in found.err
    assert "AdamW Mechanic None" in run_small(small, "--only", "torch.optim.sgd.SGD").out


def test_a_rate_per_group_and_the_line_to_paste(small):
    found = run_small(small, "--per-group", "--only", "AdamW")
    assert "learned rate of group 0: " in found.err
    assert "learned rate of group 1: " in found.err
    (line,) = (line for line in found.err.splitlines() if "torch.optim.AdamW(" in line)
    made = eval(line.replace("...", "[torch.nn.Parameter(torch.ones(1))]"), {"torch": __import__("torch")})
    assert made.defaults["weight_decay"] == 0.1
    assert made.param_groups[0]["lr"] != made.param_groups[1]["lr"]


def test_the_pasted_rate_is_what_release_leaves(small):
    small.write_text(SMALL + "print([group['lr'] for group in first.release().param_groups])\n")
    found = run_small(small, "--only", "AdamW")
    released = eval(found.out.splitlines()[-1])
    for index, lr in enumerate(released):
        assert f"group {index}: {lr:.3g} (you passed" in found.err


def test_the_tuner_can_be_configured(small):
    assert run_small(small, "--config", "decay=0.5", "--config", "guard=false").out.endswith("Mechanic Mechanic 0.5\n")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_log_has_scale_and_rate_of_every_optimizer(suffix, small):
    import csv
    import json

    run_small(small, "--log-to", f"log.{suffix}", "--every", "20")
    with open(small.parent / f"log.{suffix}", encoding="utf-8") as file:
        rows = list(csv.DictReader(file)) if suffix == "csv" else [json.loads(line) for line in file]
    assert [(int(row["optimizer"]), row["class"], int(row["step"])) for row in rows] == [
        (0, "AdamW", 20),
        (1, "SGD", 20),
        (0, "AdamW", 40),
        (1, "SGD", 40),
    ]
    assert all(float(row["scale"]) > 0 and float(row["lr"]) > 0 for row in rows)
    assert {row["tuner"] for row in rows} == {"default"}


def test_a_probe_stops_after_its_steps_and_answers(small):
    found = run_small(small, "--probe", "7")
    assert found.out.split() == [str(step) for step in range(6)]  # the seventh step is the last thing that happens
    assert found.err.count(", 7 steps\n") == 2
    assert "still rising" in found.err


def test_a_probe_ends_before_a_further_step_if_another_optimizer_makes_fewer(small):
    small.write_text(SMALL.replace("    other.step()\n", "    other.step() if step % 2 else None\n"))
    found = run_small(small, "--probe", "6")
    assert ", 6 steps\n" in found.err
    assert ", 3 steps\n" in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "decay=-1", "small.py"], "decay must be non-negative"),
        (["--config", "dacay=1", "small.py"], "config has no field dacay"),
        (["--config", "decay", "small.py"], "expected KEY=VALUE"),
        (["--config", "decay=a b", "small.py"], "not a value that Python can read"),
        (["--log-to", "log.txt", "small.py"], "--log-to writes a .jsonl or a .csv file"),
        (["--log-to", "nowhere/log.csv", "small.py"], "--log-to: there is no folder"),
        (["--probe", "0", "small.py"], "a whole number above 0"),
        (["small.ipynb"], "small.ipynb is a notebook"),
        (["missing.py"], "there is no file missing.py"),
        (["torch.thing"], "for a module, write -m"),
        ([], "name the script to run"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(arguments, message, small):
    found = mechanic("run", *arguments, folder=small.parent)
    assert found.code == 2
    assert message in found.err
    assert found.out == ""


def test_annotations_are_what_they_are_under_python(small):
    small.write_text("""
import dataclasses, sys
@dataclasses.dataclass
class Options:
    lr: float = 0.1
print([field.type("0.5") for field in dataclasses.fields(Options)])
sys.exit()
""")
    found = run_small(small)
    assert found.out == "[0.5]\n"
    assert "built no PyTorch optimizer" in found.err  # also if the script ends by sys.exit(main())


def test_processes_that_a_script_forks_report_for_themselves(small):
    small.write_text("""
import multiprocessing, torch
def train(optimizer=None):
    x = torch.ones(3, requires_grad=True) if optimizer is None else optimizer.param_groups[0]["params"][0]
    optimizer = optimizer or torch.optim.SGD([x], lr=0.1)
    for step in range(60):
        optimizer.zero_grad()
        x.square().sum().backward()
        optimizer.step()
before = torch.optim.Adam([torch.ones(3, requires_grad=True)], lr=0.1)
for arguments in ((), (before,)):
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join()
""")
    found = run_small(small, "--log-to", "rates.csv")
    assert found.err.count("learned rate: ") == 2
    for line in ("SGD at small.py:5, 60 steps", "Adam at small.py:10, 60 steps"):
        assert line in found.err
    assert "built no" not in found.err


def test_the_log_is_where_it_was_asked_for(small):
    small.write_text(SMALL.replace("import torch\n", "import os, torch\nos.mkdir('inside')\nos.chdir('inside')\n"))
    found = run_small(small, "--log-to", "rates.csv")
    assert (small.parent / "rates.csv").exists()
    assert f"are in {os.path.join(os.pardir, 'rates.csv')}" in found.err


def test_a_script_that_sets_its_own_rates_is_told_their_peak(small):
    small.write_text("""
import torch
x = torch.ones(3, requires_grad=True)
optimizer = torch.optim.AdamW([x], lr=1e-3)
for step in range(60):
    optimizer.param_groups[0]["lr"] = 0.05 * min((step + 1) / 10, 1 - step / 60)
    optimizer.zero_grad()
    (x - 3).square().sum().backward()
    optimizer.step()
print(max(optimizer.learned_rates().values()))
""")
    found = run_small(small)
    assert "(the largest that you set was 0.0433333)" in found.err
    learned = float(found.out) * 0.0433333 / 1e-3  # the learning rate that it was built with counts as 1
    assert f"learned rate: {learned:.3g} (" in found.err
    assert f"sets the learning rate itself. To train without Mechanic, let its peak be {learned:.3g}." in found.err
    assert "write:" not in found.err


def test_an_optimizer_inside_another_is_left_to_it(small):
    small.write_text("""
import torch
class Around(torch.optim.Optimizer):
    def __init__(self, params, cls):
        self.inner = cls(params, lr=0.1)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}
    def first_step(self): ...
    def second_step(self): ...
optimizer = Around(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD)
print(type(optimizer).__name__, type(optimizer.inner).__name__, len(optimizer.param_groups[0]["params"]))
""")
    found = run_small(small)
    assert found.out == "Around SGD 2\n"
    assert "left Around at small.py:9 as it is: Mechanic cannot wrap Around: it needs several gradients" in found.err
    assert "no optimizer that Mechanic could wrap" in found.err


def test_what_is_set_on_the_optimizer_reaches_it_and_steps_beside_it_are_told(small):
    small.write_text("""
import torch, warnings
warnings.simplefilter("default")
class Own(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.boost = 1.0
    def step_boosted(self):
        print(self.boost)
        self.step()
x = torch.ones(2, requires_grad=True)
optimizer = Own([x])
optimizer.boost = 5.0
x.sum().backward()
optimizer.step_boosted()
""")
    found = run_small(small)
    assert found.out == "5.0\n"
    assert "the script made no step with what was wrapped, so nothing was tuned" in found.err


def test_hooks_of_the_script_run_once_per_step(small):
    small.write_text(
        SMALL
        + """
calls = []
first.register_step_post_hook(lambda *found: calls.append(len(found)))
model(inputs).sum().backward()
first.step()
print(calls)
"""
    )
    assert run_small(small).out.endswith("[3]\n")


def test_a_script_that_frees_its_optimizer_frees_its_parameters(small):
    small.write_text("""
import gc, weakref, torch
p = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([p], lr=0.1)
p.sum().backward()
optimizer.step()
gone = weakref.ref(p)
del p, optimizer
gc.collect()
print(gone())
""")
    assert run_small(small).out == "None\n"


def test_many_optimizers_of_one_line_are_announced_once(small):
    small.write_text("""
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
model(torch.ones(1, 2)).sum().backward()
for optimizer in optimizers:
    optimizer.step()
""")
    found = run_small(small)
    assert found.err.count("mechanic: wrapped SGD at small.py:4") == 1
    assert found.err.count("mechanic: SGD at small.py:4") == 8
    assert "and 4 more optimizers" in found.err


def test_a_class_keeps_its_signature(small):
    """Frameworks filter what they pass by it."""
    small.write_text("""
import inspect, torch
class Own(torch.optim.AdamW):
    ...
print(list(inspect.signature(Own).parameters)[:3])
optimizer = Own([torch.nn.Parameter(torch.ones(2))], 0.1, (0.8, 0.9))
optimizer.param_groups[0]["params"][0].sum().backward()
optimizer.step()
optimizer.step()
""")
    found = run_small(small)
    assert found.out == "['params', 'lr', 'betas']\n"
    assert "Own(params, lr=" in found.err
    assert "betas=(0.8, 0.9))" in found.err
