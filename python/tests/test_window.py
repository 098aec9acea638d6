"""One-sided memory of a group, on real processes."""

import numpy as np
import pytest

import pleach

PROGRAM = """
    import numpy as np, pleach
    with pleach.join(fabric="FABRIC") as group:
        n, rank = group.world_size, group.rank
        with group.window((2, 3), "float32", slots=2) as window:
            assert (list(window.shape), window.slots) == ([2, 3], 2)
            zeros, version, word = window.read((rank + 1) % n)
            assert not zeros.any() and (version, word) == (0, bytes(48))
            group.barrier()
            own = np.arange(6, dtype="float32").reshape(2, 3) + 10 * rank
            assert window.publish(own, 7 + rank) == 1
            group.barrier()
            for peer in range(n):
                part, version, word = window.read(peer, 1, 4)
                np.testing.assert_array_equal(part, np.arange(1, 4) + 10 * peer)
                assert part.dtype == np.float32 and version == 1
                assert int.from_bytes(word[:8], "little") == 7 + peer and not any(word[8:])
            out = np.empty(6, "float32")
            same, version, word = window.read((rank + 1) % n, out=out, torn=True)
            assert same is out and version == 1 and word == bytes(48)
            np.testing.assert_array_equal(out, np.arange(6) + 10 * ((rank + 1) % n))

            # Each rank writes twice to each peer; those of one peer come in their order.
            for number in range(2):
                for peer in range(n):
                    if peer != rank:
                        window.write(peer, number, np.full(number + 1, rank, "float32"), bytes([number]))
            seen = []
            while len(seen) < 2 * (n - 1):
                seen += window.poll(10.0)
            for peer in range(n):
                mine = [arrival for arrival in seen if arrival.source == peer]
                assert [arrival.slot for arrival in mine] == ([] if peer == rank else [0, 1])
                for number, arrival in enumerate(mine):
                    assert arrival.word[:1] == bytes([number])
                    np.testing.assert_array_equal(arrival.data, np.full(number + 1, peer, "float32"))
            group.barrier()
            assert window.poll() == [] and all(window.is_free(peer, 1) for peer in range(n) if peer != rank)
        try:
            window.publish(own)
        except pleach.Error as error:
            assert "closed" in str(error)
        window.close()
        print("done")
"""


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_ranks_read_and_write_each_other(ranks, fabric):
    job = ranks(4, PROGRAM.replace("FABRIC", fabric))
    results = [job.finish(rank, timeout=60) for rank in range(4)]
    assert all((status, out) == (0, "done\n") for status, out, _ in results), results


def test_a_window_that_is_aborted_ends_for_all_and_the_group_goes_on(ranks):
    program = """
        import numpy as np, pleach
        with pleach.join() as group:
            window = group.window(4)
            group.barrier()
            if group.rank == 1:
                window.abort()
            try:
                while True:
                    window.poll(5.0)
            except pleach.AbortedError as error:
                assert error.rank == 1, error
            assert group.all_reduce(np.ones(2)).tolist() == [4, 4]
            print("done")
    """
    job = ranks(4, program)
    results = [job.finish(rank, timeout=60) for rank in range(4)]
    assert all((status, out) == (0, "done\n") for status, out, _ in results), results


def test_windows_of_other_elements_are_refused_on_all_ranks(ranks):
    program = """
        import numpy as np, pleach
        with pleach.join() as group:
            try:
                # As many bytes.
                group.window(*((6, "float32") if group.rank == 0 else (3, "float64")))
            except pleach.MismatchError as error:
                assert error.rank == 1 - group.rank, error
                assert "float32" in str(error) and "float64" in str(error), error
            assert group.all_reduce(np.ones(2)).tolist() == [2, 2]
            print("done")
    """
    job = ranks(2, program)
    results = [job.finish(rank, timeout=60) for rank in range(2)]
    assert all((status, out) == (0, "done\n") for status, out, _ in results), results


def test_mistakes_are_named():
    with pleach.join(rank=0, world_size=1) as group, group.window(4, "int32") as window:
        for call, text in [
            (lambda: window.publish(np.zeros(3, "int32")), r"shape \[3\], not \[4\]"),
            (lambda: window.publish(np.zeros(4)), "type float64, not int32"),
            (lambda: window.publish(np.zeros(4, "int32"), bytes(49)), "up to 48 bytes"),
            (lambda: window.publish(np.zeros(4, "int32"), -1), "up to 48 bytes"),
            (lambda: window.read(1), "rank 1"),
            (lambda: window.read(0, 2, 5), "elements 2 to 5"),
            (lambda: window.read(0, out=np.zeros(3, "int32")), "16"),
            (lambda: window.write(0, 0, np.zeros(1, "int32")), "rank 0"),
            (lambda: window.poll(-1.0), "timeout is -1"),
        ]:
            with pytest.raises(pleach.Error, match=text):
                call()
        assert window.publish(np.arange(4, dtype="int32")) == 1
        assert window.read(0)[0].tolist() == [0, 1, 2, 3]
