"""A training step of a model of 25 million parameters, by DDP and by FSDP2, over pleach and over gloo.

usage: torchrun --nproc-per-node=N python/benches/torch_ddp.py [--batch B] [--turns T] [--scheme ddp|fsdp] [--views]

Rank r is bound to processor r modulo their number. The ways take turns, in one run and in the same
processes: the model alone, gloo and pleach. DDP has two more ways: DDP that sends nothing, and pleach
with the hook that keeps the buckets in registered memory. A row has the time of a step of the slowest
rank, the median over the turns, and its quotient to that of gloo.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

import pleach.torch

WIDTH, LAYERS = 2500, 4
STEPS_OF_A_TURN = 3


def model():
    torch.manual_seed(1)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def nothing_sent(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def of_ddp(groups, **options):
    ways = {"no DDP": model()}
    ways["nothing sent"] = torch.nn.parallel.DistributedDataParallel(model(), process_group=groups["gloo"], **options)
    ways["nothing sent"].register_comm_hook(None, nothing_sent)
    for name, group in groups.items():
        ways[name] = torch.nn.parallel.DistributedDataParallel(model(), process_group=group, **options)
    registered = torch.nn.parallel.DistributedDataParallel(model(), process_group=groups["pleach"], **options)
    registered.register_comm_hook(groups["pleach"], pleach.torch.all_reduce_registered)
    return ways | {"pleach, registered": registered}


def of_fsdp(groups):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    ways = {"no FSDP": model()}
    for name, group in groups.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = model()
        for layer in whole:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        ways[name] = fully_shard(whole, mesh=mesh)
    return ways


def timed(network, batch):
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS_OF_A_TURN):
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return (time.perf_counter() - begin) / STEPS_OF_A_TURN


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--scheme", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True, in every way of DDP")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "pleach": dist.new_group(backend="pleach")}
    if options.scheme == "ddp":
        ways = of_ddp(groups, gradient_as_bucket_view=options.views)
    else:
        ways = of_fsdp(groups)
    batch = torch.randn(options.batch, WIDTH)
    times = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name, network in ways.items():
            slowest = torch.tensor([timed(network, batch)])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first one builds the buckets
                times[name].append(slowest.item() * 1e3)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model().parameters())
        print(
            f"torch {torch.__version__}, {options.scheme}{' of views' * options.views}, {parameters / 1e6:.1f} M parameters, batch {options.batch}, "
            f"{dist.get_world_size()} ranks on {len(processors)} processors, {options.turns} turns"
        )
        gloo = statistics.median(times["gloo"])
        for name, found in times.items():
            own = statistics.median(found)
            print(f"{name:>20} {own:>9.1f} ms a step ({min(found):.1f} to {max(found):.1f}) {own / gloo:>6.2f} of gloo")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
