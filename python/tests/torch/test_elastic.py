"""Models of torch that are trained in a session, by members that are processes."""

import subprocess
import sys

import pytest

pytest.importorskip("torch.distributed")

from ranks import LIMIT_S, PACKAGE, environment, finish, last_json, start  # noqa: E402


def members(check, size, folder, *arguments, killed=()):
    outputs = finish(start("elastic_checks.py", size, check, folder, *arguments), killed)
    return [last_json(output) for rank, output in enumerate(outputs) if rank not in killed]


def test_members_that_are_left_go_on_with_equal_bits(tmp_path):
    said = members("killed", 3, tmp_path, killed=[2])
    assert said[0]["digest"] == said[1]["digest"], said
    for one in said:
        assert (one["retries"], one["members"]) == (1, [0, 1]), said


@pytest.mark.parametrize(
    ("optimizer", "heal", "behind"),
    [("adamw", "boundary", "skip"), ("sgd", "hidden", "decay"), ("adagrad", "hidden", "skip")],
)
def test_a_process_that_joins_has_all_that_the_members_have(tmp_path, optimizer, heal, behind):
    said = members("late", 3, tmp_path, optimizer, heal, behind)
    assert len({one["digest"] for one in said}) == 1 and len({one["step"] for one in said}) == 1, said
    assert [one["steps"] < one["step"] for one in said] == [False, False, True], said
    assert [one["neutral"] for one in said] == [0, 0, int(heal == "hidden")], said


@pytest.mark.parametrize("heal", ["boundary", "hidden"])
def test_a_process_that_joins_before_the_first_step_has_what_rank_0_has(tmp_path, heal):
    said = members("first", 4, tmp_path, heal, killed=[1])
    assert len({one["digest"] for one in said}) == 1, said


def test_attempts_that_are_repeated_leave_no_trace(tmp_path):
    said = members("repeated", 2, tmp_path)
    assert said[0] == said[1]


def test_a_member_that_is_alone_trains_as_without_a_session(tmp_path):
    members("alone", 1, tmp_path)


def test_what_cannot_be_trained_is_refused(tmp_path):
    members("refusals", 1, tmp_path)


def test_the_example_goes_on_without_a_member_that_is_killed(tmp_path):
    (tmp_path / "job").mkdir(mode=0o700)
    variables = environment() | {"PLEACH_WORLD_SIZE": "3", "PLEACH_RENDEZVOUS": f"file://{tmp_path / 'job'}"}
    command = [sys.executable, "-u", str(PACKAGE.parent / "examples" / "elastic_torch.py")]
    ranks = [
        subprocess.Popen(command, env=variables | {"PLEACH_RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        assert "3 members make step 0" in ranks[0].stdout.readline()
        ranks[2].kill()
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks[:2]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    ends = [output.splitlines()[-1] for output in outputs]
    assert [rank.returncode for rank in ranks[:2]] == [0, 0], outputs
    assert "go on with step" in outputs[0] and "2 members make step 300" in outputs[0], outputs
    assert ends[0].removeprefix("seat 0") == ends[1].removeprefix("seat 1"), ends
    assert float(ends[0].split(", ")[1].split()[0]) > 95, ends
