"""All-reduce of NumPy arrays by pleach and by mpi4py, in one run and by the same processes.

usage: mpirun -n 2 --bind-to none python python/benches/numpy_all_reduce.py

Rank r is bound to processor r modulo their number. Three ways take turns at each size: pleach on
registered memory, pleach on a plain array, mpi4py's Allreduce in place. A row has the median over
the turns of the time of a call of rank 0. Without mpi4py its column is empty (`pleach run -n 2
python ...`). What a call costs over Rust: beside `cargo bench -p pleach-ffi --bench over_rust`.
"""

import os
import statistics
import sys
import time

began = time.perf_counter()
import pleach  # noqa: E402

IMPORT_S = time.perf_counter() - began

import numpy as np  # noqa: E402

SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20]
TURNS = 21
SECONDS_OF_A_TURN = 0.02


def timed(call, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def main():
    try:
        from mpi4py import MPI
    except ImportError:
        MPI = None
    with pleach.join() as group:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[group.rank % len(processors)]})
        if group.rank == 0:
            peer = MPI.Get_library_version().split(",")[0] if MPI else "no mpi4py"
            print(f"{group.world_size} ranks, {group.fabric}, Python {sys.version.split()[0]}, {peer}")
            print(f"import of pleach: {IMPORT_S * 1e3:.1f} ms")
            print(f"{'bytes':>9} {'registered us':>14} {'plain us':>10} {'mpi4py us':>10}")
        for length in SIZES:
            registered = group.buffer(length // 8, "float64")
            plain, other = np.zeros(length // 8), np.zeros(length // 8)
            ways = [
                lambda array=registered: group.all_reduce(array),
                lambda array=plain: group.all_reduce(array),
            ]
            if MPI:
                world, place = MPI.COMM_WORLD, MPI.IN_PLACE
                ways.append(lambda array=other: world.Allreduce(place, array))
            first = np.array([max(timed(way, 10) for way in ways)])
            group.all_reduce(first, "max")
            calls = max(3, min(2000, int(SECONDS_OF_A_TURN * 1e6 / first[0])))
            times = [[] for _ in ways]
            for turn in range(TURNS):
                for way in range(len(ways)):
                    index = (way + turn) % len(ways)
                    group.barrier()
                    times[index].append(timed(ways[index], calls))
            if group.rank == 0:
                columns = [statistics.median(each) for each in times] + [float("nan")] * (3 - len(ways))
                print(f"{length:>9} {columns[0]:>14.2f} {columns[1]:>10.2f} {columns[2]:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
