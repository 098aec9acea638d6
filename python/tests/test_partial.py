"""Partial all-reduce against NumPy, on real processes."""

import queue
import threading

import numpy as np
import pytest

import pleach


def check_nobody_late(group):
    n, rank = group.world_size, group.rank
    for dtype in ("float32", "int64", "complex64", "bfloat16"):
        rounds = group.partial((2, 3), dtype)
        for step in range(3):
            data = np.full((2, 3), rank + step).astype(pleach._arrays._dtype(dtype))
            round = rounds.contribute(data)
            expected = np.full((2, 3), sum(range(n)) + n * step).astype(data.dtype)
            np.testing.assert_array_equal(round.result, expected, err_msg=dtype)
            assert round.result.dtype == data.dtype
            assert (round.contributors, round.own) == (list(range(n)), "counted")
            assert (round.number, round.missed, round.correction) == (step, 0, None)
        assert rounds.finish().contributors == []
        report = rounds.report()
        assert report.pop("counted") == [3] * n
        assert report == {"rounds": 4, "late": 0, "carried": 0, "dropped": 0, "corrected": 0, "missed": 0}


def check_late(group):
    n, rank = group.world_size, group.rank
    rounds = group.partial(4, "float64", f"quorum:{n - 1}", late="carry", divisor="contributors")
    if rank == n - 1:
        group.barrier()  # the round of the others has ended
    round = rounds.contribute(np.full(4, rank + 1.0))
    if rank != n - 1:
        group.barrier()
    np.testing.assert_array_equal(round.result, np.full(4, sum(range(1, n)) / (n - 1)))
    assert round.contributors == list(range(n - 1))
    assert round.own == ("carried" if rank == n - 1 else "counted")
    last = rounds.finish()
    assert rounds.report()["carried"] == int(rank == n - 1)
    np.testing.assert_array_equal(last.result, np.full(4, float(n)))
    assert last.contributors == [n - 1]
    np.testing.assert_array_equal(round.result, np.full(4, sum(range(1, n)) / (n - 1)))


def check_started(group):
    """The next contribution is computed while the round of the one before goes on."""
    n, rank = group.world_size, group.rank
    rounds = group.partial(4, "int64")
    with pytest.raises(pleach.ArgumentError, match="no contribution of this rank is under way"):
        rounds.wait()
    data, out = np.full(4, rank + 1), np.zeros(4, "int64")
    for step in range(3):
        assert rounds.start_contribute(data) is None
        data[:] = rank + 2 + step
        for call in (rounds.contribute, rounds.start_contribute):
            with pytest.raises(pleach.ArgumentError, match="is under way"):
                call(data)
        round = rounds.wait(out=out)
        assert round.result is out and (round.number, round.own) == (step, "counted")
        np.testing.assert_array_equal(out, np.full(4, sum(range(1, n + 1)) + n * step))
    with pytest.raises(pleach.ArgumentError, match=r"data has shape \[3\]"):
        rounds.start_contribute(np.zeros(3, "int64"))
    assert rounds.report()["counted"] == [3] * n
    rounds.finish()
    with pytest.raises(pleach.ArgumentError, match="has finished"):
        rounds.start_contribute(data)


def check_corrections(group):
    n, rank = group.world_size, group.rank
    rounds = group.partial(2, "float64", f"quorum:{n - 1}", late="correct")
    if rank == n - 1:
        group.barrier()  # the round of the others has ended
    assert rounds.contribute(np.full(2, rank + 1.0)).own == ("corrected" if rank == n - 1 else "counted")
    if rank != n - 1:
        group.barrier()
    late = np.zeros(2)
    last = rounds.finish(correction=late)
    assert last.contributors == [] and last.correction[0] == [n - 1]
    assert last.correction[1] is late
    np.testing.assert_array_equal(late, np.full(2, float(n)))
    report, is_late = rounds.report(), int(rank == n - 1)
    assert (report["late"], report["carried"], report["dropped"], report["corrected"]) == (is_late, 0, 0, is_late)
    rounds = group.partial(2, "float64", "quorum:1", late="correct")
    with pytest.raises(pleach.ArgumentError, match=r"correction has shape \[3\]"):
        rounds.contribute(np.zeros(2), correction=np.zeros(3))
    rounds.finish()


def check_operations_and_outputs(group):
    n, rank = group.world_size, group.rank
    data = np.full(3, rank + 1.0)
    rounds = group.partial(3, "float64", op="avg")
    round = rounds.contribute(data, out=data)
    assert round.result is data
    np.testing.assert_array_equal(data, np.full(3, sum(range(1, n + 1)) / n))
    round = rounds.abstain(out=data) if rank == 0 else rounds.contribute(np.full(3, 4.0))
    assert round.contributors == list(range(1, n))
    np.testing.assert_array_equal(round.result, np.full(3, 4.0))
    with pytest.raises(pleach.ArgumentError, match=r"out has shape \[2\]"):
        rounds.contribute(data, out=np.zeros(2))
    rounds.finish()
    rounds = group.partial(2, "float32", op=pleach.PremulSum(float(rank)))
    round = rounds.contribute(np.full(2, 2.0, "float32"))
    np.testing.assert_array_equal(round.result, np.full(2, 2.0 * sum(range(n)), "float32"))
    rounds.finish()
    rounds = group.partial(1, "int64", "deadline:p90", late="carry", divisor="none")
    for step in range(25):
        rounds.contribute(np.array([1]))
    rounds.finish()
    counted = rounds.report()["counted"]
    # How often a rank was in time nobody knows; each is in the last round at the latest.
    assert all(1 <= times <= 26 for times in counted), counted


def check_differences(group):
    """What differs between ranks is refused on all before the first round, and both ways are named."""
    first = group.rank == 0
    for arguments, others, names in [
        ((3,), (4,), ("3 f32 (sum)", "4 f32 (sum)")),
        ((3, "int32"), (3, "float32"), ("3 i32 (sum)", "3 f32 (sum)")),
        ((3, "float32", "solo"), (3, "float32", "majority"), (", solo, ", ", majority, ")),
    ]:
        with pytest.raises(pleach.ArgumentError, match="ask for the same on all") as error:
            group.partial(*(arguments if first else others))
        assert all(name in str(error.value) for name in names), error.value
    for options, others, names in [
        ({"late": "drop"}, {"late": "correct"}, ("late: drop", "late: correct")),
        ({"divisor": "world"}, {"divisor": "contributors"}, ("divisor: world", "divisor: contributors")),
        ({"op": "max"}, {"op": "min"}, ("(max)", "(min)")),
        ({"staleness_max": 3}, {"staleness_max": 4}, ("at most 3 rounds", "at most 4 rounds")),
    ]:
        with pytest.raises(pleach.ArgumentError, match="ask for the same on all") as error:
            group.partial(3, "float32", "quorum:2", **(options if first else others))
        assert all(name in str(error.value) for name in names), error.value
    group.barrier()


def check_threads(group):
    """While a thread waits in a round, another one is refused at once."""
    rounds = group.partial(4, "int64")
    data = np.full(4, group.rank + 1)
    if group.rank == 0:
        outcomes = queue.Queue()

        def contribute():
            try:
                outcomes.put(rounds.contribute(data))
            except pleach.ArgumentError as error:
                outcomes.put(error)

        threads = [threading.Thread(target=contribute) for _ in range(2)]
        for thread in threads:
            thread.start()
        # No round ends before the barrier, so the first outcome is that of the second thread.
        assert "another thread is in a call" in str(outcomes.get(timeout=60))
        group.barrier()
        round = outcomes.get(timeout=60)
        for thread in threads:
            thread.join()
    else:
        group.barrier()
        round = rounds.contribute(data)
    np.testing.assert_array_equal(round.result, np.full(4, sum(range(1, group.world_size + 1))))
    rounds.finish()


def check_a_rank_that_leaves(group):
    """A rank that drops its rounds ends those of the others with its name; the array stays theirs."""
    rounds = group.partial(4, "float64")
    last = group.world_size - 1
    data = np.full(4, group.rank + 1.0)
    rounds.contribute(data)
    group.barrier()  # all have the result
    if group.rank == last:
        del rounds
    else:
        with pytest.raises(pleach.GroupError, match=f"rank {last} has closed the group"):
            rounds.contribute(data)
        np.testing.assert_array_equal(data, np.full(4, group.rank + 1.0))
    group.barrier()


def check_bad_input(group):
    for arguments, text in [
        ((3, "float32", "some"), "there are all solo"),
        ((3, "float32", "quorum:0"), "name 1 to"),
        ((3, "float32", "quorum:9"), "never"),
        ((3, "float32", "deadline:0s"), "deadline above zero"),
        ((3, "float32", "deadline:p0"), "above 0 and at most 100"),
    ]:
        with pytest.raises(pleach.ArgumentError, match=text):
            group.partial(*arguments)
    with pytest.raises(pleach.ArgumentError, match="carry drop correct"):
        group.partial(3, late="never")
    for op in ("and", "xor"):
        with pytest.raises(pleach.ArgumentError):
            group.partial(3, "float32", op=op)
    rounds = group.partial((2, 2), "float32")
    for data in (np.zeros(4, "float32"), np.zeros((2, 2), "float64")):
        with pytest.raises(pleach.ArgumentError, match=r"not \[2, 2\] and float32 as the rounds"):
            rounds.contribute(data)
    with pytest.raises(pleach.NothingGivenError, match="no rank had anything to give"):
        rounds.abstain()
    rounds.finish()
    with pytest.raises(pleach.ArgumentError, match="has finished"):
        rounds.contribute(np.zeros((2, 2), "float32"))


@pytest.mark.parametrize(
    "check",
    [
        check_nobody_late,
        check_late,
        check_started,
        check_corrections,
        check_operations_and_outputs,
        check_differences,
        check_threads,
        check_a_rank_that_leaves,
        check_bad_input,
    ],
)
def test_partial(check):
    pleach.launch(check, 3)
