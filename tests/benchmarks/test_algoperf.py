"""The AlgoPerf submission, called as AlgoPerf's runner calls it, on a small workload with the same interface."""

import inspect
import itertools
import math
import os
import warnings

import pytest
import torch
from torch import distributed as dist

from benchmarks.algoperf import runner, stand_in
from benchmarks.algoperf.workload import Digits, spec
from tests.torch.parallel import on_ranks

FOLDER = runner.PATH.parent
STEPS, EVAL_EVERY = 20, 10

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


def test_submission_and_small_workload_have_the_interface_of_algoperf(submission):
    assert {name: parameters_of(getattr(submission, name)) for name in SUBMISSION} == SUBMISSION
    assert {method: parameters_of(getattr(Digits, method)) for method in METHODS} == METHODS
    assert [wanted for wanted in PROPERTIES if not hasattr(Digits, wanted)] == []


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


def train(submission, folder=None, steps=STEPS, workload=Digits):
    """How it ends: parameters and all that the optimizer has learned; and what every evaluation found."""
    state, model, results = runner.train_once(workload(STEPS), submission, steps, EVAL_EVERY, folder=folder)
    of_base = state["optimizer"].state_dict()["state"].values()
    tensors = [value for of_one in of_base for value in of_one.values() if torch.is_tensor(value)]
    scale = torch.tensor(state["optimizer"].scales()["default"])
    return [*runner.bare(model).state_dict().values(), *tensors, scale], results


def train_interrupted(submission, folder):
    train(submission, folder, steps=EVAL_EVERY)
    return train(submission, folder)


def train_on_rank(rank, folder):
    """One run through, and one that is interrupted; rank 0 writes how both end on both ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    submission, found = runner.load_submission(), [None, None]
    dist.all_gather_object(found, (train(submission)[0], train_interrupted(submission, folder)[0]))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly exit


def test_a_run_that_was_interrupted_ends_bit_for_bit_as_if_it_had_not_been(submission, tmp_path):
    (expected, results), (resumed, again) = train(submission), train_interrupted(submission, tmp_path)
    assert all(map(torch.equal, resumed, expected))
    assert again == results
    assert [step for step, _ in results] == [EVAL_EVERY, STEPS]
    assert results[1][1]["validation/loss"] < results[0][1]["validation/loss"] < 0.95 * math.log(10)


@pytest.mark.long
def test_two_ranks_train_as_one_process_and_resume_bit_for_bit(submission, tmp_path):
    on_ranks(train_on_rank, 2, 120, tmp_path)
    (whole, resumed), other = torch.load(tmp_path / "found.pt")
    assert all(map(torch.equal, whole, resumed))
    assert all(map(torch.equal, whole + resumed, other[0] + other[1]))
    for a, b in zip(whole, train(submission)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_every_step_follows_the_schedule_clips_and_is_logged(submission, monkeypatch):
    """Dropout is the workload's."""
    norms, rates, dropouts, logged = [], [], [], []

    class Steep(Digits):
        dropout_rate = 0.5

        def __init__(self, step_hint):
            super().__init__(step_hint)
            log = {"append_scalar_metrics": lambda self, *words: logged.append(words)}
            self.metrics_logger = type("Logger", (), log)()

        def loss_fn(self, *arguments, **options):
            losses = super().loss_fn(*arguments, **options)
            return {**losses, "summed": 1e4 * losses["summed"]}

        def model_fn(self, *arguments, **options):
            dropouts.append(options.get("dropout_rate", self.dropout_rate))
            return super().model_fn(*arguments, **options)

    step = submission.Mechanic.step

    def measured(self):
        squares = [p.grad.square().sum() for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack(squares).sum().sqrt().item())
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(submission.Mechanic, "step", measured)
    monkeypatch.setattr(submission, "LOG_EVERY", 2)
    train(submission, steps=5, workload=Steep)
    assert norms == pytest.approx([submission.MAX_GRAD_NORM] * 5, rel=1e-3)
    assert rates == [submission.share_of_peak(step, STEPS) for step in range(5)]
    assert set(dropouts) == {0.5}
    assert [step for _, step in logged] == [0, 2, 4]
    assert all(words["loss"] > 0 < words["learned_scale"] for words, _ in logged[1:])
