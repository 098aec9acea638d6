"""All-reduce of CPU tensors by pleach and by gloo, in one run and by the same processes.

usage: torchrun --nproc-per-node=N python/benches/torch_all_reduce.py

Rank r is bound to processor r modulo their number. The two backends take turns at each size; a row
has the median over the turns of the time of a call, of the slowest rank.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

import pleach.torch  # noqa: F401

SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
TURNS = 5
SECONDS_OF_A_TURN = 0.05


def timed(tensor, group, calls):
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - begin) / calls


def main():
    rank = int(os.environ["RANK"])
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "pleach": dist.new_group(backend="pleach")}
    size = dist.get_world_size()
    if rank == 0:
        print(f"torch {torch.__version__}, {size} ranks on {len(processors)} processors")
        print(f"{'type':>9} {'bytes':>9} {'gloo us':>10} {'pleach us':>10} {'ratio':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        for length in SIZES:
            tensor = torch.zeros(length // dtype.itemsize, dtype=dtype)
            first = torch.tensor([timed(tensor, groups["gloo"], 3)])
            dist.all_reduce(first, dist.ReduceOp.MAX)
            calls = max(3, min(1000, int(SECONDS_OF_A_TURN / first.item())))
            times = {name: [] for name in groups}
            for _ in range(TURNS):
                for name, group in groups.items():
                    slowest = torch.tensor([timed(tensor, group, calls)])
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    times[name].append(slowest.item() * 1e6)
            gloo, own = (statistics.median(times[name]) for name in groups)
            if rank == 0:
                name = str(dtype).removeprefix("torch.")
                print(f"{name:>9} {length:>9} {gloo:>10.1f} {own:>10.1f} {gloo / own:>6.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
