"""A broken checkpoint is refused by name and changes nothing; one that is not broken continues bit for bit."""

import ast
import copy
import functools
import io
import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import optim

import mechanic
from tests.torch.hostile import (
    BASES,
    BY_NAME,
    SAVED_AFTER,
    SITUATIONS,
    Broken,
    Situation,
    everything,
    faults_of,
    fresh,
    layers,
    make_model,
    one_step,
    same,
    what_changed,
)
from tests.torch.mutations import mutations, wrong_types

every_situation = pytest.mark.parametrize("situation", SITUATIONS, ids=[s.name.replace(" ", "-") for s in SITUATIONS])
"""What is compared is Mechanic's own, and differs by these, not by the base."""


def assert_no_faults(faults):
    lines = [f"  {what}: {found}" for what, found in faults.items() if found]
    if lines:
        pytest.fail("\n".join([f"{len(lines)} of {len(faults)} checkpoints are taken wrongly:", *lines]), pytrace=False)


@every_situation
def test_a_mutated_checkpoint_is_refused_by_name(situation):
    made = mutations(situation.saved[1])
    assert len(made) >= 25
    for trained in (False, True):
        assert_no_faults(faults_of(situation, made, trained=trained))


@every_situation
def test_what_fails_only_while_it_is_loaded_changes_nothing(situation):
    """Content is not checked, as torch does not check it."""
    for trained in (False, True):
        assert_no_faults(faults_of(situation, wrong_types(situation.saved[1]), trained=trained))


def foreign(sources, target, words):
    return [
        Broken(f"{source.name} into {target.name}", functools.partial(fresh, source.saved[1]), words(source))
        for source in sources
        if source is not target
    ]


@pytest.mark.long
@pytest.mark.parametrize("trained", [False, True], ids=["new", "running"])
def test_the_checkpoint_of_another_base_is_refused_by_name(trained):
    bases = [*BASES, BY_NAME["own iterates"]]

    def words(source):
        return type(source.build(0, 0)[1].base).__name__, "mechanic_base", "own_iterates"

    faults = {}
    for target in bases:
        faults |= faults_of(target, foreign(bases, target, words), trained=trained)
    assert_no_faults(faults)


@pytest.mark.parametrize("trained", [False, True], ids=["new", "running"])
def test_other_tuners_or_groups_are_refused_by_name(trained):
    situations = [
        *(BY_NAME[name] for name in ("AdamW", "two groups, one tuner", "two tuners")),
        Situation("b and a", optim.AdamW, layers("b", "a")),
        Situation("a and c", optim.AdamW, layers("a", "c")),
        Situation("a and unnamed", optim.AdamW, layers("a", None)),
        Situation("per group", optim.AdamW, layers(None, None), {"per_group": True}),
    ]
    faults = {}
    for target in situations:
        others = foreign(situations, target, words=lambda source: ("tuner", "group"))
        faults |= faults_of(target, others, trained=trained)
    assert_no_faults(faults)


@pytest.mark.long
@pytest.mark.parametrize("target", BASES, ids=[base.name.replace(" ", "-") for base in BASES])
def test_a_bare_checkpoint_of_another_base_is_refused_or_steps(target):
    """Nothing tells whose it is but its entries. Its own base's loads, and says that the tuner is a fresh one."""
    faults = {}
    for source in BASES:
        model = make_model(0, **(source.model_options or target.model_options))
        bare = source.base(model.parameters(), lr=0.1)
        for step in range(SAVED_AFTER):
            one_step(model, bare, step)
        for trained in (False, True):
            found = how_bare_is_taken(target, bare.state_dict(), trained=trained)
            right = {"loads"} if source is target else {"loads", "refused"}
            where = "a running" if trained else "a new"
            faults[f"{source.name} into {where} {target.name}"] = None if found in right else found
    assert_no_faults(faults)


def how_bare_is_taken(situation, checkpoint, *, trained):
    broken = Broken("", functools.partial(fresh, checkpoint), ("",), may_load=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        faults = [fault for fault in faults_of(situation, [broken], trained=trained).values() if fault]
    if not faults:
        return "refused"
    if not faults[0].startswith("loads, and continues wrongly"):  # than the good one: it has another tuner
        return faults[0]
    return "loads" if any("fresh tuner" in str(warning.message) for warning in said) else "loads without a word"


def test_a_truncated_file_raises_and_nothing_has_changed():
    situation = BY_NAME["AdamW"]
    file = io.BytesIO()
    torch.save(situation.saved[1], file)
    whole = file.getvalue()
    chosen = random.Random(0)
    model, optimizer = situation.loading(trained=True)
    before = copy.deepcopy(everything(model, optimizer))
    for length in (0, 1, len(whole) - 1, *(chosen.randrange(len(whole)) for _ in range(20))):
        with pytest.raises(Exception):  # noqa: B017  torch raises several kinds
            optimizer.load_state_dict(torch.load(io.BytesIO(whole[:length]), weights_only=True))
    assert what_changed(before, everything(model, optimizer)) == ""
    one_step(model, optimizer, 50)
    assert what_changed(situation.undisturbed(True), everything(model, optimizer)) == ""


@every_situation
def test_weights_only_loads_all_that_is_saved(situation):
    for seed, steps in ((0, SAVED_AFTER), (1, 0)):
        _, optimizer = situation.build(seed, steps)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert same(torch.load(file, weights_only=True), optimizer.state_dict())


def test_a_base_that_fails_to_load_is_rolled_back():
    class Fussy(optim.AdamW):
        fails = False

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.param_groups[0]["lr"] = 7.0
            self.extra = 1
            if Fussy.fails:
                raise KeyError("step")

    situation = Situation("fussy", Fussy)
    for trained in (False, True):
        model, optimizer = situation.loading(trained)
        before = copy.deepcopy(everything(model, optimizer))
        Fussy.fails = True
        with pytest.raises(ValueError, match="the checkpoint could not be loaded: KeyError: 'step'"):
            optimizer.load_state_dict(fresh(situation.saved[1]))
        Fussy.fails = False
        assert what_changed(before, everything(model, optimizer)) == ""
        assert not hasattr(optimizer.base, "extra")
        one_step(model, optimizer, 50)
        assert what_changed(situation.undisturbed(trained), everything(model, optimizer)) == ""


@every_situation
def test_a_parameter_without_state_is_one_that_never_had_a_gradient(situation):
    """It loads: there are such parameters, and their Delta is 0."""
    for trained in (False, True):
        checkpoint = fresh(situation.saved[1])
        del checkpoint["state"][0]
        model, optimizer = situation.loading(trained)
        optimizer.load_state_dict(checkpoint)
        state = optimizer.state.get(next(model.parameters()), {})
        assert not any(entry.any() for key, entry in state.items() if key.startswith("mechanic_"))
        one_step(model, optimizer, 50)
        assert all(p.isfinite().all() for p in model.parameters())


# The command reads files: with weights_only=True, and the index of a folder with a short list of classes.
ONLY_THE_COMMAND = {
    "cli/sharded.py: import pickle",
    "cli/sharded.py: from torch.distributed.checkpoint.state_dict_loader import load",
    "cli/sharded.py: pickle.Unpickler",
    "cli/sharded.py: _IndexUnpickler(file).load",
    "cli/sharded.py: torch.load",
    "cli/show.py: torch.load",
    "cli/trial.py: json.loads",
}
NO_FILE = {"torch/checkpoint.py: bases.load"}  # a state dict that is in memory


@pytest.mark.long
def test_the_library_unpickles_nothing():
    unpicklers = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = []
    package = Path(mechanic.__file__).parent
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = {alias.name.partition(".")[0] for alias in node.names}
                modules.add((getattr(node, "module", None) or "").partition(".")[0])
                loads = isinstance(node, ast.ImportFrom) and {"load", "loads"} & {alias.name for alias in node.names}
                if modules & unpicklers or loads:
                    found.append(f"{place}: {ast.unparse(node)}")
            # torch.load, numpy.load and the like
            elif isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "Unpickler"):
                found.append(f"{place}: {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in map(ast.unparse, node.keywords), f"{place}:{node.lineno}"
    assert set(found) == ONLY_THE_COMMAND | NO_FILE
