"""Training schemes under a loop of torch, on ranks that are processes."""

import pytest

pytest.importorskip("torch.distributed")

from ranks import LIMIT_OF_STOP_S, PACKAGE, finish, last_json, start  # noqa: E402
from test_torch import check, torchrun  # noqa: E402

#: Of each list the checks of one start of ranks.
STARTS = [
    [
        "each_class_trains_to_equal_parameters",
        "every_scheme_that_there_is_may_be_attached",
        "relations_between_schemes",
        "synchronous_is_ddp",
        "the_group_may_be_one_of_numpy_programs",
        "what_loops_do_besides",
        "buffers_and_optimizer_states",
        "means_under_way",
        "a_saved_state_goes_on_bit_for_bit",
    ],
    ["each_scheme_that_keeps_a_state_goes_on_from_it"],
    [
        "refusals_at_construction",
        "what_must_not_be_changed_under_a_scheme",
        "what_must_be_the_same_on_all_ranks",
        "a_loss_that_is_not_finite_ends_all_ranks",
    ],
    [
        "numbers_that_are_not_finite_end_all_ranks",
    ],
]


@pytest.mark.parametrize("checks", STARTS, ids=lambda checks: checks[0])
def test_schemes_keep_their_promises(checks):
    check("scheme_checks.py", 4, checks)


@pytest.mark.parametrize("scheme", ["local-sgd:every=2", "gossip", "ssp"])
def test_a_rank_that_is_killed_in_a_loop_is_named_by_all_others(scheme):
    outputs = finish(start("scheme_checks.py", 3, "killed", scheme, 1), killed=[1])
    died_at = float(outputs[1].split()[-1])
    for output in outputs[0], outputs[2]:
        said = last_json(output)
        assert said["rank"] == 1 and "rank 1" in said["error"], said
        # Long before the deadline.
        assert said["at"] - died_at < 2 * LIMIT_OF_STOP_S, said


@pytest.mark.parametrize("example", ["diloco.py", "gossip.py"])
def test_the_examples_of_the_repository_learn(example):
    assert "4 ranks: the loss went from" in torchrun(PACKAGE.parent / "examples" / example, 4)
