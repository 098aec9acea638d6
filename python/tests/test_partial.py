"""Partial all-reduce against NumPy, on real processes."""

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
        assert rounds.report()["counted"] == [3] * n


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
    np.testing.assert_array_equal(last.result, np.full(4, float(n)))
    assert last.contributors == [n - 1]
    np.testing.assert_array_equal(round.result, np.full(4, sum(range(1, n)) / (n - 1)))


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
    assert all(20 <= times <= 26 for times in counted), counted


def check_bad_input(group):
    for arguments, text in [
        ((3, "float32", "some"), "there are all solo"),
        ((3, "float32", "quorum:0"), "name 1 to"),
        ((3, "float32", "quorum:9"), "never"),
        ((3, "float32", "deadline:p0"), "above 0 and at most 100"),
    ]:
        with pytest.raises(pleach.ArgumentError, match=text):
            group.partial(*arguments)
    with pytest.raises(pleach.ArgumentError, match="carry drop correct"):
        group.partial(3, late="never")
    with pytest.raises(pleach.ArgumentError, match="ask for the same on all"):
        group.partial(3 + group.rank)
    rounds = group.partial((2, 2), "float32")
    for data in (np.zeros(4, "float32"), np.zeros((2, 2), "float64")):
        with pytest.raises(pleach.ArgumentError, match=r"not \[2, 2\] and float32 as the rounds"):
            rounds.contribute(data)
    with pytest.raises(pleach.NothingGivenError, match="no rank had anything to give"):
        rounds.abstain()
    rounds.finish()
    with pytest.raises(pleach.ArgumentError, match="has finished"):
        rounds.contribute(np.zeros((2, 2), "float32"))


@pytest.mark.parametrize("check", [check_nobody_late, check_late, check_operations_and_outputs, check_bad_input])
def test_partial(check):
    pleach.launch(check, 3)
