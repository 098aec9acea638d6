"""All-reduce of CPU tensors by pleach and by gloo, in one run and by the same processes.

usage: torchrun --nproc-per-node=N python/benches/torch_all_reduce.py [--sizes BYTES,...]

Rank r is bound to processor r modulo their number. The ways take turns at each size: gloo, pleach,
pleach on a tensor of `pleach.torch.buffer`, and the call of the package below the backend, on the
same memory as the second. A row has the medians over the turns of the time of a call, of the slowest
rank, and the quotient of the first two.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

import pleach.torch

SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
TURNS = 9
SECONDS_OF_A_TURN = 0.03
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def timed(call, calls):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def slowest(seconds):
    found = torch.tensor([seconds])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def ways(length, dtype, group):
    """The ways by name: functions that make one call."""
    count = length // dtype.itemsize
    plain, registered = torch.zeros(count, dtype=dtype), pleach.torch.buffer(count, dtype, group)
    start, place = group._comm._group.start, (plain.data_ptr(), count)
    return {
        "gloo": lambda: dist.all_reduce(plain),
        "pleach": lambda: dist.all_reduce(plain, group=group),
        "registered": lambda: dist.all_reduce(registered, group=group),
        "below": lambda: start("all_reduce", NAMES[dtype], "sum", *place, *place, timeout=60.0, blocking=True),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=SIZES)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="pleach")
    if rank == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks on {len(processors)} processors, medians in us")
        print(f"{'type':>9} {'bytes':>9} {'gloo':>10} {'pleach':>10} {'registered':>10} {'below':>10} {'gloo/pleach':>12}")
    for dtype, name in NAMES.items():
        for length in options.sizes:
            calls_of = ways(length, dtype, group)
            first = slowest(max(timed(call, 3) for call in calls_of.values()))
            calls = max(3, min(1000, int(SECONDS_OF_A_TURN / first)))
            times = {way: [] for way in calls_of}
            for _ in range(TURNS):
                for way, call in calls_of.items():
                    times[way].append(slowest(timed(call, calls)) * 1e6)
            found = {way: statistics.median(times[way]) for way in times}
            if rank == 0:
                columns = " ".join(f"{one:>10.1f}" for one in found.values())
                print(f"{name:>9} {length:>9} {columns} {found['gloo'] / found['pleach']:>12.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
