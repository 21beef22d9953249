"""The benchmarks measure what they say: the loop, the plan, the records, and a suite on Ray under fire."""

import collections
import contextlib
import functools
import json
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")
from benchmarks.__main__ import main
from benchmarks.report import pages
from benchmarks.suite import plan, record
from benchmarks.suite.contenders import CONTENDERS, MUON_PLANE
from benchmarks.suite.loop import Training, train_plainly
from benchmarks.suite.measure import Settings, evaluate, execute, measure
from benchmarks.suite.record import EVALUATED_AT, TUNER, Run, evaluations, final, machine, raised, versions
from benchmarks.suite.recordbook import RECORDS, RecordBook
from benchmarks.suite.schedules import at_steps
from benchmarks.suite.tasks import TASKS
from mechanic.torch import Mechanic
from tests.benchmarks.runs import KINDS, needs_data, raising, record_of, some_lr

ROOT = Path(__file__).parents[2]


@needs_data
def test_a_baseline_through_the_harness_equals_a_plain_loop_bit_for_bit():
    task = replace(TASKS["mlp-adult"], steps=40)
    through_harness = train_plainly(task, functools.partial(torch.optim.AdamW, lr=1e-3), seed=1)

    torch.manual_seed(1)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = task.data().train
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    for step in range(40):
        chosen = order[step * task.batch : (step + 1) * task.batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3 * task.schedule((step + 1) / 40)
    for found, expected in zip(through_harness.parameters(), model.parameters(), strict=True):
        assert found.equal(expected)


@needs_data
@pytest.mark.parametrize("name", KINDS)
def test_every_contender_goes_through_the_loop(name):
    contender = CONTENDERS[name]
    lr, task = some_lr(contender), replace(TASKS["mlp-adult"], steps=60)
    found = measure(task, contender, lr, seed=0)
    losses = found["curve"]["train_loss"]
    assert len(losses) == len(EVALUATED_AT) == len(found["evaluated"])
    assert losses[-1] < losses[0]
    assert len(found["curve"]["test_accuracy"]) == 4
    assert ("scale" in found["curve"]) == isinstance(contender.build(task.model(), task, lr), Mechanic)


@needs_data
def test_training_goes_the_same_way_whether_it_is_evaluated_or_not():
    task = replace(TASKS["gpt-shakespeare-dropout0.3"], steps=8)  # what draws random numbers could be disturbed
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    for _, evaluated, _ in Training(task, lambda model: adamw(model.parameters()), seed=0):
        evaluate(task, evaluated)
    undisturbed = train_plainly(task, adamw, seed=0)
    for found, expected in zip(evaluated.parameters(), undisturbed.parameters(), strict=True):
        assert found.equal(expected)


@needs_data
def test_no_step_of_a_task_is_taken_at_a_learning_rate_of_0():
    for schedule, whole in {(task.schedule, task.steps) for task in TASKS.values()}:
        for steps in (3, 20, whole):
            factors = [at_steps(schedule, steps)(step) for step in range(steps)]
            assert 0 < min(factors) <= max(factors) <= 1, (schedule, steps)
    # Some optimizers raise at 0, and this gets to the end of a warm-up.
    found = measure(replace(TASKS["gpt-shakespeare"], steps=20), CONTENDERS["d-adaptation sgd"], 1.0, seed=0)
    assert evaluations(found) == len(found["evaluated"])


# Records.


def is_repeatable(record):
    """Another CPU, or another version of a package, may round otherwise; longer runs are left to the suite itself.

    Records without a commit are from before the schedules with a warm-up were fixed, and from an earlier preset.
    """
    ours = ("mechanic ", "variant ", "per layer ", "observing ", "delta ", "flat ")
    preset = record["contender"].startswith(("mechanic-paper ", "towards start "))
    return (
        not raised(record)
        and record["seconds"] < 5
        and ("commit" in record or (TASKS[record["task"]].schedule(0.0) > 0 and not preset))
        and (record.get("tuner") == TUNER or not record["contender"].startswith(ours))
        and record.get("machine", machine()) == machine()
        and record["versions"].items() <= versions().items()
    )


@needs_data
def test_five_random_records_come_out_the_same_in_every_digit():
    records = RecordBook(RECORDS).records
    runs = sorted(run for run, record in records.items() if is_repeatable(record))
    if not runs:
        pytest.skip("the records are of another CPU, or of other versions of packages")
    for run in random.SystemRandom().sample(runs, 5):
        recorded, found = records[run], execute(run, Settings())
        assert {key: found["curve"][key] for key in recorded["curve"]} == recorded["curve"], run
        assert found["evaluated"] == recorded["evaluated"]


@needs_data
def test_what_a_contender_raises_is_recorded_with_its_step_and_is_no_score(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "sgd", raising(ZeroDivisionError))
    monkeypatch.setitem(TASKS, "convex-iris", replace(TASKS["convex-iris"], steps=50))
    record = execute(Run("convex-iris", "sgd", 0.1, 0), Settings())
    assert record["error"] == "ZeroDivisionError: in the third step"
    assert record["error_step"] == 2
    assert evaluations(record) == 3
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        final(record)


@needs_data
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, FileNotFoundError, ImportError, OSError])
def test_what_the_machine_raises_is_never_a_record(monkeypatch, error):
    monkeypatch.setitem(CONTENDERS, "sgd", raising(error))
    with pytest.raises(error):
        execute(Run("convex-iris", "sgd", 0.1, 0), Settings())


def test_a_record_names_the_commit_and_whether_the_code_was_changed(tmp_path, monkeypatch):
    def git(*words):
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() is None  # no git
    records, code = tmp_path / "benchmarks" / "records", tmp_path / "src" / "mechanic"
    for folder in (records, code):
        folder.mkdir(parents=True)
        (folder / "file").write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    name = git("rev-parse", "--short", "HEAD")
    assert record.commit() == name
    (records / "file").write_text("new")  # as every run does
    assert record.commit() == name
    (code / "file").write_text("new")
    assert record.commit() == name + "+"


def test_a_record_has_the_versions_of_all_contenders_and_the_machine_but_no_host():
    found = record.environment("abc1234")
    assert set(record.PACKAGES) <= set(found["versions"])
    assert set(found["machine"]) == {"cpu", "cores"}
    assert not any(private in json.dumps(found) for private in (platform.node(), str(Path.home()), str(ROOT)))


def test_records_are_read_as_they_were_written_and_one_cut_off_by_a_kill_is_run_again(tmp_path):
    path = tmp_path / "convex-iris.jsonl"
    runs = [Run("convex-iris", "adamw", 0.1, seed) for seed in range(4)]
    records = [record_of(run, 0.5) | {"commit": f"commit {run.seed // 2}"} for run in runs]
    for each in records:  # each by a driver of its own
        RecordBook(tmp_path).add(each)
    assert list(RecordBook(tmp_path).records.values()) == records
    whole = path.read_bytes()
    assert whole.count(b'"commit"') == 2  # what runs share is written once
    for end in range(0, len(whole), 20):
        path.write_bytes(whole[:end])
        kept = RecordBook(tmp_path)
        assert list(kept.records) == runs[: len(kept.records)]
        assert path.read_bytes() == whole[:end]  # another driver may still write
        kept.add(*records)
        assert path.read_bytes() == whole


# The plan.


def run_to_the_end(task, contender, loss_of, seeds):
    """Follow the plan until it needs nothing more; None is a run that raises."""
    records = {}
    while runs := plan.needed(task, contender, records, seeds):
        for run in runs:
            assert run not in records
            loss = loss_of(run)
            records[run] = record_of(run, loss) | ({"error": "too large"} if loss is None else {})
    return records


@pytest.mark.parametrize("best", [1e-7, 1e-3, 10.0])
def test_the_grid_grows_until_its_best_is_not_at_the_edge(best):
    def loss_of(run):
        return abs(math.log10(run.lr / best)) / 10

    records = run_to_the_end(TASKS["convex-iris"], CONTENDERS["adamw"], loss_of, seeds=3)
    lrs = sorted({run.lr for run in records})
    assert len(lrs) >= 9
    position = min(range(len(lrs)), key=lambda index: abs(lrs[index] / best - 1))
    assert 0 < position < len(lrs) - 1
    seeds = collections.Counter(run.lr for run in records)
    assert [seeds[lrs[position + offset]] for offset in (-1, 0, 1)] == [3, 3, 3]
    assert seeds.total() == len(lrs) + 6


@pytest.mark.parametrize("best", [(1e-4, 0.1), (3.16e-3, 3.16e-3), (0.1, 1e-3)])
def test_two_learning_rates_are_tuned_until_the_best_pair_has_been_tried_with_all_around_it(best):
    """The loss is a valley that runs across the plane, as where one rate makes up for the other."""

    def pair_of(run):
        return run.lr, float(run.contender.removeprefix("muon "))

    def loss_of(run):
        muon, adamw = (math.log10(found / wanted) for found, wanted in zip(pair_of(run), best, strict=True))
        return (muon**2 + adamw**2 + muon * adamw) / 10 + (0.01 if run.seed else 0.0)

    records = run_to_the_end(TASKS["convex-iris"], MUON_PLANE, loss_of, seeds=3)
    first = {pair_of(run): record for run, record in records.items() if run.seed == 0}
    found = min(first, key=lambda pair: final(first[pair]))
    assert found == pytest.approx(best, rel=0.01)
    near = [pair for pair in first if all(0.3 < a / b < 3.4 for a, b in zip(pair, found, strict=True))]
    assert len(near) == 9
    assert len(records) == len(first) + 5 * 2
    assert len(first) < 60


@pytest.mark.parametrize("works_below", [0.05, 0.0])
def test_the_plan_goes_on_where_some_learning_rates_raise_and_ends_where_all_do(works_below):
    def loss_of(run):
        return run.lr if run.lr < works_below else None

    records = run_to_the_end(TASKS["convex-iris"], CONTENDERS["sgd"], loss_of, seeds=2)
    assert any(not raised(record) for record in records.values()) == bool(works_below)


@pytest.mark.parametrize(
    ("only", "runs"), [(["adamw", "mechanic adamw", "convex-iris"], 18 + 3), (["mechanic adamw"], 12 * 3)]
)
def test_only_some_contenders_or_tasks_are_run(only, runs, tmp_path, monkeypatch, capsys):
    command = ["benchmarks", "--records", str(tmp_path), "run", "convex", "--dry-run", "--only", *only]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert f"\n{runs} runs, " in capsys.readouterr().out


# A real suite, on Ray.

PATIENCE = 400  # seconds: beside other tests each of Ray's processes takes long to start


def workers_of(scratch):
    """Processes of this Ray that have run a benchmark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (process / "cmdline").read_bytes().split(b"\0")[0]
            if name.startswith(b"ray::execute") and str(scratch).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


@needs_data
@pytest.mark.long
def test_a_suite_survives_the_death_of_a_worker_and_is_reported(tmp_path):
    scratch = Path(tempfile.mkdtemp(prefix="ray"))  # the paths of sockets have to be short
    environment = {**os.environ, "HOME": str(scratch), "RAY_TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_CACHE_HOME": str(scratch), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "benchmarks", "--records", str(tmp_path), "run", "smoke", "--seeds", "1"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, **options)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (any(tmp_path.glob("*.jsonl")) and workers_of(scratch)):
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(workers_of(scratch)[0], signal.SIGKILL)
        output, _ = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 0, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)

    book = RecordBook(tmp_path)
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert sum('"contender"' in line for line in lines) == len(book.records)  # none twice
    assert {run.contender for run in book.records} == {contender.name for _, contender in plan.SUITES["smoke"]}
    assert not any(plan.needed(*pair, book.records, seeds=1) for pair in plan.SUITES["smoke"])
    pages.write(tmp_path, tmp_path / "report")
    assert "| convex-iris |" in (tmp_path / "report" / "results.md").read_text()
    for figure in ("rho.svg", "rho.png", "profiles.svg", "profiles.png"):
        assert (tmp_path / "report" / "figures" / figure).stat().st_size > 5_000
