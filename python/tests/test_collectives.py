"""Every collective against NumPy, on real processes."""

import asyncio
import concurrent.futures
import threading

import ml_dtypes
import numpy as np
import pytest

import pleach

DTYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "complex64", "complex128", "bool",
]  # fmt: skip


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def values(rank, count, name):
    """Small whole numbers, whose sums are exact in every type."""
    if name == "bool":
        return (np.arange(count) + rank) % 3 == 0
    return ((np.arange(count) + rank) % 3).astype(dtype_of(name))


def check_dtypes(group):
    n, rank = group.world_size, group.rank
    for name in DTYPES:
        inputs = [values(other, 4 * n, name) for other in range(n)]
        if name == "bool":
            op, reduced = "max", np.logical_or.reduce(inputs)
        else:
            wide = np.complex128 if name.startswith("complex") else np.float64
            op, reduced = "sum", sum(array.astype(wide) for array in inputs).astype(dtype_of(name))
        data = inputs[rank].copy()
        assert group.all_reduce(data, op) is data
        np.testing.assert_array_equal(data, reduced, err_msg=name)
        out = np.zeros_like(reduced)
        assert group.all_reduce(inputs[rank], op, out=out) is out
        np.testing.assert_array_equal(out, reduced)
        np.testing.assert_array_equal(inputs[rank], values(rank, 4 * n, name))
        root = n - 1
        out = group.reduce(inputs[rank].copy(), root, op)
        if rank == root:
            np.testing.assert_array_equal(out, reduced)
        else:
            assert out is None
        block = group.reduce_scatter(inputs[rank], op)
        np.testing.assert_array_equal(block, reduced[rank * 4 : rank * 4 + 4])
        gathered = group.all_gather(inputs[rank])
        assert gathered.dtype == inputs[rank].dtype
        np.testing.assert_array_equal(gathered, np.stack(inputs))
        exchanged = group.all_to_all(inputs[rank])
        expected = np.concatenate([array[rank * 4 : rank * 4 + 4] for array in inputs])
        np.testing.assert_array_equal(exchanged, expected)
        data = inputs[rank].copy()
        group.broadcast(data, root)
        np.testing.assert_array_equal(data, inputs[root])
        gathered = group.gather(inputs[rank], root)
        if rank == root:
            np.testing.assert_array_equal(gathered, np.stack(inputs))
        out = np.zeros(4, dtype_of(name))
        group.scatter(inputs[rank] if rank == root else None, root, out=out)
        np.testing.assert_array_equal(out, inputs[root][rank * 4 : rank * 4 + 4])
    return rank


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_collective_of_every_type_is_numpys(n):
    assert pleach.launch(check_dtypes, n, timeout=60) == list(range(n))


def check_reductions(group):
    n, rank = group.world_size, group.rank
    inputs = [np.arange(1, 6) + other for other in range(n)]
    for op, expected in {
        "sum": sum(inputs), "prod": np.prod(inputs, axis=0), "min": np.min(inputs, axis=0),
        "max": np.max(inputs, axis=0), "and": np.bitwise_and.reduce(inputs),
        "or": np.bitwise_or.reduce(inputs), "xor": np.bitwise_xor.reduce(inputs),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(group.all_reduce(inputs[rank].copy(), op), expected, op)
    floats = group.all_reduce(inputs[rank].astype("float32"), "avg")
    np.testing.assert_allclose(floats, np.mean(inputs, axis=0))
    scaled = group.all_reduce(inputs[rank].astype("float64"), pleach.PremulSum(0.5 + rank))
    np.testing.assert_allclose(scaled, sum((0.5 + r) * inputs[r] for r in range(n)))
    for bad in [lambda: group.all_reduce(np.ones(2, bool), "sum"), lambda: group.all_reduce(np.ones(2), "and"),
                lambda: group.all_reduce(np.ones(2), "median"), lambda: group.all_reduce(np.ones(2, "complex64"), "max")]:  # fmt: skip
        with pytest.raises(pleach.ArgumentError):
            bad()


def test_every_reduction_is_numpys():
    pleach.launch(check_reductions, 2, timeout=60)


def check_blocks_of_different_lengths(group):
    n, rank = group.world_size, group.rank
    counts = [r + 1 for r in range(n)]
    own = np.full(counts[rank], rank, "int32")
    everything = np.concatenate([np.full(counts[r], r, "int32") for r in range(n)])
    np.testing.assert_array_equal(group.all_gather(own, counts=counts), everything)
    gathered = group.gather(own, 0, counts=counts)
    if rank == 0:
        np.testing.assert_array_equal(gathered, everything)
    block = group.reduce_scatter(everything, counts=counts)
    np.testing.assert_array_equal(block, np.full(counts[rank], rank * n))
    out = np.zeros(counts[rank], "int32")
    group.scatter(everything if rank == 0 else None, 0, out=out, counts=counts)
    np.testing.assert_array_equal(out, own)
    send = np.concatenate([np.full(rank + to + 1, 10 * rank + to) for to in range(n)])
    sizes = [rank + other + 1 for other in range(n)]
    received = group.all_to_all(send, send_counts=sizes, receive_counts=sizes)
    expected = np.concatenate([np.full(s + rank + 1, 10 * s + rank) for s in range(n)])
    np.testing.assert_array_equal(received, expected)


def test_blocks_may_have_different_lengths():
    pleach.launch(check_blocks_of_different_lengths, 4, timeout=60)


def check_messages_and_pending(group):
    n, rank = group.world_size, group.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in [0, 3, 100_000]:
        out = np.zeros(count)
        sent = group.send(np.full(count, rank, float), right, tag=7, async_=True)
        assert group.recv(out, left, tag=7) is out
        sent.wait()
        assert (out == left).all()
    pending = group.all_reduce(np.ones(1000), async_=True)
    assert (pending.wait(30) == n).all() and pending.done()
    assert (pending.wait() == n).all()

    async def several():
        return await asyncio.gather(*[until(group.all_reduce(np.full(9, i), async_=True)) for i in range(8)])

    async def until(pending):
        return await pending

    for i, array in enumerate(asyncio.run(several())):
        assert (array == i * n).all()
    if rank == 0:
        # A task that is cancelled leaves its operation under way.
        cancelled = group.all_reduce(np.full(9, 1.0), async_=True)
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asyncio.wait_for(until(cancelled), 0.05))
        assert not cancelled.done()
        group.send(np.ones(1), 1)
        assert (cancelled.wait(30) == n).all()
    else:
        # Its part comes only when the task of rank 0 has ended.
        group.recv(np.ones(1), 0)
        group.all_reduce(np.full(9, 1.0))
    for _ in range(200):
        group.all_reduce(np.ones(5000), async_=True)  # dropped while under way
    group.barrier()


def test_messages_pending_operations_and_await():
    pleach.launch(check_messages_and_pending, 2, timeout=60)


def check_memory(group):
    n = group.world_size
    array = group.buffer((8, 4), "float32")
    assert array.shape == (8, 4) and (array == 0).all()
    part = array[2:4]
    part += 1
    del array
    group.all_reduce(part)
    assert (part == n).all()
    for _ in range(20):
        pending = group.all_reduce(group.buffer(5000, "bfloat16"), async_=True)  # only the operation has it
    assert (pending.wait() == 0).all()
    wide = group.buffer(3 * n, "int64")
    wide[:] = group.rank
    group.all_gather(wide[group.rank * 3 : group.rank * 3 + 3], out=wide)
    np.testing.assert_array_equal(wide, np.repeat(np.arange(n), 3))
    data = bytearray(8)
    data[group.rank] = 1
    group.all_reduce(data)
    assert sum(data) == n
    numbers = np.arange(6.0)
    capsule = numbers.__dlpack__()
    group.all_reduce(capsule)
    np.testing.assert_array_equal(numbers, np.arange(6) * n)
    with pytest.raises(pleach.ArgumentError, match="consumed"):
        group.all_reduce(capsule)
    return part


def test_registered_memory_lives_as_long_as_its_arrays():
    for part in pleach.launch(check_memory, 2, timeout=60):
        assert (part == 2).all()


def check_threads(group):
    parts = [group.split(0) for _ in range(3)]

    def work(part):
        for count in range(1, 60):
            assert (part.all_reduce(np.ones(count)) == part.world_size).all()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, part) for part in parts]:
            future.result()
    own = threading.Lock()
    if group.rank == 0:
        # Threads of one group make their calls in one order.
        def send(count):
            with own:
                group.all_reduce(np.ones(3))

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(40)))
    else:
        for _ in range(40):
            group.all_reduce(np.ones(3))


def test_threads_share_a_group_or_have_one_each():
    pleach.launch(check_threads, 2, timeout=60)


def check_split(group):
    part = group.split(group.rank % 2, key=group.world_size - group.rank)
    assert part.world_size == 2
    np.testing.assert_array_equal(part.all_gather(np.array([group.rank])).ravel(), sorted([group.rank, (group.rank + 2) % 4])[::-1])  # fmt: skip
    assert group.split(None) is None


def test_a_group_is_split():
    pleach.launch(check_split, 4, timeout=60)
