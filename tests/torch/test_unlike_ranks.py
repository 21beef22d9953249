"""Ranks that do not do the same are told, or do no harm. Two real processes, on gloo."""

import pytest

from tests.torch import unlike_ranks as job
from tests.torch.test_parallel import run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    jobs = [
        (job.tuners_in_another_order, ()),
        (job.another_number_of_tuners, ()),
        (job.observed_without_reducing, ("through the module",)),
        (job.observed_without_reducing, ("under no_sync",)),
        (job.read_on_one_rank, ()),
        (job.built_before_sharding, ()),
        (job.copied_with_a_process_group, ()),
    ]
    return run(2, tmp_path_factory.mktemp("ranks") / "run", jobs)


def test_other_tuners_on_another_rank_are_refused_on_all_of_them(found):
    for name in ("tuners_in_another_order", "another_number_of_tuners"):
        for message in found[name,]:
            assert "the ranks have different tuners, or have them in another order" in message, name


@pytest.mark.parametrize("how", ["through the module", "under no_sync"])
def test_under_ddp_replicas_stay_the_same_if_observed_gradients_were_not_reduced(found, how):
    first, second = found["observed_without_reducing", how]
    assert first == second
    assert first[0] > 0


def test_reading_on_one_rank_between_backward_and_step_is_refused_and_changes_nothing(found):
    (refused, scale), (none, other) = found["read_on_one_rank",]
    assert (refused, none) == (12, 0)
    assert scale == other > 0


def test_an_optimizer_that_was_built_before_sharding_says_so(found):
    for said in found["built_before_sharding",]:
        assert len(said) == 1
        assert "Build the optimizer after fully_shard" in said[0]


def test_copies_of_an_optimizer_with_a_process_group_go_on(found):
    first, second = found["copied_with_a_process_group",]
    assert first == second
    assert first[0] == first[1] > 0
