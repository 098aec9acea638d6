"""A training step of a model of 25 million parameters by training schemes, and by what torch has of them.

usage: torchrun --nproc-per-node=N python/benches/torch_schemes.py [--batch B] [--turns T] [--width W]

Rank r is bound to processor r modulo their number. The ways take turns, in one run and in the same
processes: the model alone; DDP over gloo and `Synchronous`; torch's PostLocalSGDOptimizer over gloo
and `LocalSGD(every=8)`; `Gossip`. A turn has 8 steps, so one average of local SGD. A row has the time of
a step of the slowest rank, the median over the turns, and its quotient to that of its peer.
"""

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import pleach.torch

LAYERS = 4
EVERY = 8


def model(width):
    torch.manual_seed(1)
    layers = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def sgd(network):
    return torch.optim.SGD(network.parameters(), lr=1e-4)


def steps(network, optimizer, batch):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(EVERY):
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return (time.perf_counter() - begin) / EVERY


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--width", type=int, default=2500)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="pleach")

    #: By way: the model, its optimizer, and the way of which the time is the measure.
    ways, blocks = {}, contextlib.ExitStack()
    alone = model(options.width)
    ways["alone"] = (alone, sgd(alone), None)
    ddp = torch.nn.parallel.DistributedDataParallel(model(options.width), gradient_as_bucket_view=True)
    ways["DDP, gloo"] = (ddp, sgd(ddp), None)
    local = model(options.width)
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    ways["PostLocalSGD, gloo"] = (local, PostLocalSGDOptimizer(sgd(local), averager), None)
    schemes = {
        "Synchronous": (pleach.torch.Synchronous, {}, "DDP, gloo"),
        "Synchronous, overlap": (pleach.torch.Synchronous, {"overlap": True}, "DDP, gloo"),
        "LocalSGD": (pleach.torch.LocalSGD, {"every": EVERY}, "PostLocalSGD, gloo"),
        "Gossip": (pleach.torch.Gossip, {"every": EVERY}, "PostLocalSGD, gloo"),
    }
    for name, (kind, settings, peer) in schemes.items():
        own = model(options.width)
        optimizer = sgd(own)
        blocks.enter_context(kind(own, optimizer, group=group, **settings))
        ways[name] = (own, optimizer, peer)
    batch = torch.randn(options.batch, options.width)
    times = {name: [] for name in ways}
    with blocks:
        for turn in range(options.turns + 1):
            for name, (network, optimizer, _) in ways.items():
                slowest = torch.tensor([steps(network, optimizer, batch)])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn:  # the first one builds buckets
                    times[name].append(slowest.item() * 1e3)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in alone.parameters())
        print(
            f"torch {torch.__version__}, {parameters / 1e6:.1f} M parameters, batch {options.batch}, "
            f"{dist.get_world_size()} ranks on {len(processors)} processors, {options.turns} turns"
        )
        for name, found in times.items():
            own, peer = statistics.median(found), ways[name][2]
            beside = "" if peer is None else f" {own / statistics.median(times[peer]):>6.2f} of {peer}"
            print(f"{name:>22} {own:>9.1f} ms a step ({min(found):.1f} to {max(found):.1f}){beside}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
