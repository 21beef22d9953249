"""The AlgoPerf submission, called as AlgoPerf's runner calls it, on small workloads with the same interface."""

import inspect
import itertools
import json
import math
import os
import statistics

import pytest
import torch

from benchmarks.algoperf import runner, stand_in
from benchmarks.algoperf.__main__ import RECORDS
from benchmarks.algoperf.workloads import WORKLOADS, Digits, spec
from benchmarks.suite.record import machine, versions
from tests.benchmarks.algoperf_ranks import final, train_interrupted, train_on_rank, train_whole
from tests.benchmarks.runs import needs_data
from tests.torch.parallel import on_ranks

FOLDER = runner.PATH.parent
EACH = [pytest.param("digits"), pytest.param("shakespeare", marks=needs_data)]
STEPS, EVAL_EVERY = 40, 20

# Parameters by name, as algoperf/spec.py has them.
COMMON = "workload current_param_container current_params_types model_state hyperparameters"
SUBMISSION = {
    "get_batch_size": "workload_name",
    "init_optimizer_state": "workload model_params model_state hyperparameters rng",
    "update_params": f"{COMMON} batch loss_type optimizer_state eval_results global_step rng train_state",
    "prepare_for_eval": f"{COMMON} loss_type optimizer_state eval_results global_step rng",
    "data_selection": "workload input_queue optimizer_state current_param_container model_state hyperparameters "
    "global_step rng",
}
INPUT_QUEUE = "self data_rng split data_dir global_batch_size cache repeat_final_dataset num_batches"
BATCH = "augmented_and_preprocessed_input_batch"
METHODS = {
    "init_model_fn": "self rng",
    "model_fn": f"self params {BATCH} model_state mode rng update_batch_norm dropout_rate",
    "loss_fn": "self label_batch logits_batch mask_batch label_smoothing",
    "is_output_params": "self param_key",
    "has_reached_validation_target": "self eval_result",
    "has_reached_test_target": "self eval_result",
    "eval_model": "self global_batch_size params model_state rng data_dir imagenet_v2_data_dir global_step",
    "_build_input_queue": INPUT_QUEUE,
    "_eval_model_on_split": "self split num_examples global_batch_size params model_state rng data_dir global_step",
}
PROPERTIES = (
    *("target_metric_name", "validation_target_value", "test_target_value", "loss_type", "num_train_examples"),
    *("eval_batch_size", "num_eval_train_examples", "num_validation_examples", "num_test_examples", "train_mean"),
    *("train_stddev", "max_allowed_runtime_sec", "eval_period_time_sec", "step_hint", "model_params_types"),
)


@pytest.fixture
def submission():
    return runner.load_submission()


def parameters_of(function):
    return " ".join(inspect.signature(function).parameters)


def test_the_submission_has_the_functions_of_algoperf(submission):
    assert {name: parameters_of(getattr(submission, name)) for name in SUBMISSION} == SUBMISSION


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_small_workloads_have_the_interface_of_algoperfs(name):
    assert {method: parameters_of(getattr(WORKLOADS[name], method)) for method in METHODS} == METHODS
    assert [wanted for wanted in PROPERTIES if not hasattr(WORKLOADS[name], wanted)] == []


@pytest.mark.skipif(spec is stand_in, reason="needs AlgoPerf's own package")
def test_algoperf_itself_has_this_interface():
    assert {name: parameters_of(getattr(spec, name)) for name in SUBMISSION} == SUBMISSION
    assert {name: parameters_of(getattr(spec.Workload, name)) for name in METHODS} == METHODS
    assert {name for name in PROPERTIES if isinstance(getattr(spec.Workload, name), property)} == set(PROPERTIES)
    assert spec.Workload.__abstractmethods__ <= {*METHODS, *PROPERTIES}
    wanted = {name for name in vars(stand_in) if name[0].isupper() and name not in ("Any", "Callable")}
    assert wanted <= set(vars(spec))


def test_the_folder_has_what_a_submission_needs():
    lines = (FOLDER / "submission_info.yml").read_text().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if not line.startswith(" "))
    assert fields["submission_folder"] == f"{FOLDER.parent.name}/{FOLDER.name}"
    assert fields["ruleset"] == "self-tuning"
    assert fields["framework"] == "PyTorch"
    assert {"submission_name", "authors", "affiliations", "version", "description"} <= set(fields)
    wanted = [line for line in (FOLDER / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert wanted == ["mechanic", "torch>=2.5.1"]


def test_batch_sizes_are_of_algoperfs_workloads_and_variants_fall_back(submission):
    assert submission.get_batch_size("ogbg") == 512
    assert all(size % 8 == 0 for size in submission.BATCH_SIZES.values())  # AlgoPerf scores on eight GPUs
    with pytest.raises(ValueError, match="wmt_post_ln"):  # the runner then asks for wmt
        submission.get_batch_size("wmt_post_ln")


def test_the_schedule_warms_up_and_falls_to_its_floor_at_the_step_hint(submission):
    shares = [submission.share_of_peak(step, 1000) for step in range(1500)]
    assert max(shares) == shares[50] == 1.0
    assert all(0 < a < b for a, b in itertools.pairwise(shares[:51]))
    assert all(a > b for a, b in itertools.pairwise(shares[50:1001]))
    assert shares[525] == pytest.approx((1 + submission.FLOOR) / 2)
    assert set(shares[1000:]) == {submission.FLOOR}  # the self-tuning ruleset gives half as much time again
    assert all(0 < submission.share_of_peak(step, 1) <= 1 for step in range(3))


@pytest.mark.parametrize("name", EACH)
def test_it_trains_by_the_schedule_and_is_evaluated(submission, name):
    workload = WORKLOADS[name](STEPS)
    seen = []
    recorded = spied(submission, lambda arguments: seen.append(arguments["optimizer_state"]["scheduler"].get_last_lr()))
    _, model, results = runner.train_once(workload, recorded, STEPS, EVAL_EVERY)
    assert seen == [[submission.share_of_peak(step, STEPS)] for step in range(STEPS)]
    assert [step for step, _ in results] == [EVAL_EVERY, STEPS]
    chance = math.log(10 if name == "digits" else 65)
    assert results[-1][1]["validation/loss"] < results[0][1]["validation/loss"] < 0.85 * chance
    assert not model.training  # as the evaluation leaves it


def spied(submission, look):
    """The submission, with a look at the arguments of every update."""
    module = type("Spied", (), {name: staticmethod(getattr(submission, name)) for name in SUBMISSION})

    def update_params(**arguments):
        look(arguments)
        return submission.update_params(**arguments)

    module.update_params = staticmethod(update_params)
    return module


@pytest.mark.parametrize("name", EACH)
def test_a_run_that_was_interrupted_ends_bit_for_bit_as_if_it_had_not_been(submission, name, tmp_path):
    expected, resumed = train_whole(name, submission), train_interrupted(name, submission, tmp_path)
    assert all(map(torch.equal, final(resumed), final(expected)))
    assert resumed[2] == expected[2]


def test_two_ranks_train_as_one_process_and_resume_bit_for_bit(submission, tmp_path):
    names = [name for name in WORKLOADS if name == "digits" or "MECHANIC_DATA" in os.environ]
    on_ranks(train_on_rank, 2, 120, str(tmp_path), names)
    for name, ((whole, resumed), other) in torch.load(tmp_path / "found.pt").items():
        assert all(map(torch.equal, whole, resumed)), name
        assert all(map(torch.equal, whole + resumed, other[0] + other[1])), name
        alone = final(train_whole(name, submission))
        for a, b in zip(whole, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_record_is_of_this_submission(submission):
    record = json.loads(RECORDS.read_text().splitlines()[0])
    if record["machine"] != machine() or not record["versions"].items() <= versions().items():
        pytest.skip("another CPU, or another version of a package, may round otherwise")
    first = record["evaluations"][0]
    _, _, [(step, found)] = runner.train_once(Digits(record["steps"]), submission, first["step"], first["step"])
    assert first.items() <= {"step": step, **found}.items()


def test_the_table_of_the_readme_is_made_of_the_records():
    finals = {}
    for record in map(json.loads, RECORDS.read_text().splitlines()):
        finals.setdefault((record["workload"], record["lr"]), []).append(record["evaluations"][-1])
    columns = [("digits", "train/loss", 4), ("digits", "validation/error", 3)]
    columns += [("shakespeare", "train/loss", 3), ("shakespeare", "validation/loss", 3)]
    readme = (FOLDER / "README.md").read_text()
    for lr in {lr for _, lr in finals}:
        cells = []
        for workload, key, digits in columns:
            values = [final[key] for final in finals[workload, lr]]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        row = "**submission**" if lr is None else f"bare base, lr {lr:g}"
        assert f"| {row} | {' | '.join(cells)} |" in readme


def test_gradients_are_clipped_and_dropout_is_the_workloads(submission, monkeypatch):
    norms, rates = [], []

    class Steep(Digits):
        dropout_rate = 0.5

        def loss_fn(self, *arguments, **options):
            losses = super().loss_fn(*arguments, **options)
            return {**losses, "summed": 1e4 * losses["summed"]}

        def model_fn(self, *arguments, **options):
            rates.append(options.get("dropout_rate", self.dropout_rate))
            return super().model_fn(*arguments, **options)

    step = submission.Mechanic.step

    def measured(self):
        squares = [p.grad.square().sum() for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack(squares).sum().sqrt().item())
        step(self)

    monkeypatch.setattr(submission.Mechanic, "step", measured)
    runner.train_once(Steep(5), submission, 5, 5)
    assert norms == pytest.approx([submission.MAX_GRAD_NORM] * 5, rel=1e-3)
    assert set(rates) == {0.5}


def test_what_is_learned_is_logged(submission, monkeypatch):
    monkeypatch.setattr(submission, "LOG_EVERY", 2)
    logged = []
    workload = Digits(3)
    workload.metrics_logger = type("Logger", (), {"append_scalar_metrics": lambda self, *words: logged.append(words)})()
    runner.train_once(workload, submission, 3, 3)
    assert [step for _, step in logged] == [0, 2]
    assert logged[1][0]["loss"] > 0
    assert logged[1][0]["learned_scale"] > 0
