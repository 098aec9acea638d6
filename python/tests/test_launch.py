"""Ranks as processes that ``launch`` starts."""

import os
import time

import numpy as np
import pytest

import pleach


def total(group, factor):
    return int(group.all_reduce(np.array([group.rank * factor]))[0]), os.getpid()


def test_fresh_interpreters_are_ranks_too():
    found = pleach.launch(total, 3, 2, start_method="spawn", timeout=60)
    assert [one for one, _ in found] == [6, 6, 6]
    assert len({process for _, process in found} | {os.getpid()}) == 4


def sleep(group, folder):
    (folder / str(group.rank)).write_text(str(os.getpid()))
    if group.rank == 1:
        time.sleep(600)


def test_ranks_that_do_not_end_in_time_are_named_and_killed(tmp_path):
    # So long that both ranks have begun on a busy machine, and less than rank 0 waits for rank 1 at
    # the end.
    with pytest.raises(TimeoutError, match="1.* have not ended in 4"):
        pleach.launch(sleep, 2, tmp_path, timeout=4)
    for process in (tmp_path / str(rank) for rank in range(2)):
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.read_text()), 0)
