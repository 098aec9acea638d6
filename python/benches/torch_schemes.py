"""A training step of a model of 25 million parameters by training schemes, and by what torch has of them.

usage: torchrun --nproc-per-node=N python/benches/torch_schemes.py [--batch B] [--turns T] [--width W]

Rank r is bound to processor r modulo their number. The ways take turns, in one run and in the same
processes: the model alone; DDP over gloo and `Synchronous`; torch's PostLocalSGDOptimizer over gloo
and `LocalSGD(every=8)`; torchft's DiLoCo over gloo, where it is installed, and `DiLoCo(every=8)`;
`Gossip`. A turn has 16 steps, of which the last 8 count. A row has medians over the turns: the time of a
step of the slowest rank, and what the exchange takes in it, each with its quotient to that of the peer.
Where ranks exchange once in 8 steps, the exchange is the longest step less the median step; where they
exchange in each step, it is a step less one of the model alone.
"""

import argparse
import contextlib
import importlib.metadata
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import pleach.torch

try:
    import torchft
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo
except ImportError:
    torchft = None

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


def outer(network):
    return torch.optim.SGD(network.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def steps(network, optimizer, batch):
    """Returns the seconds of each step of a turn that counts, of the slowest rank."""
    dist.barrier()
    times = []
    for _ in range(2 * EVERY):
        begin = time.perf_counter()
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times[EVERY:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def torchft_diloco(network, optimizer, rank, blocks):
    """Has the optimizer make DiLoCo's steps by torchft. Each rank is a replica of one process."""
    address = [None]
    if rank == 0:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=dist.get_world_size())
        blocks.callback(server.shutdown)
        address = [f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"]
    dist.broadcast_object_list(address, 0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=dist.get_world_size(),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=str(rank),
        hostname="127.0.0.1",
        use_async_quorum=False,
    )
    # The manager needs its store as long as it lives.
    blocks.callback(lambda _: manager.shutdown(), store)
    blocks.enter_context(TorchftDiLoCo(manager, [network], optimizer, outer(network), sync_every=EVERY))


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

    #: By way: the model, its optimizer, and the way that its times are compared with.
    ways = {}
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
        "DiLoCo": (pleach.torch.DiLoCo, {"every": EVERY}, None if torchft is None else "DiLoCo, torchft"),
        "Gossip": (pleach.torch.Gossip, {"every": EVERY}, "PostLocalSGD, gloo"),
    }
    batch = torch.randn(options.batch, options.width)
    with contextlib.ExitStack() as blocks:
        if torchft is not None:
            own = model(options.width)
            optimizer = sgd(own)
            torchft_diloco(own, optimizer, rank, blocks)
            ways["DiLoCo, torchft"] = (own, optimizer, None)
        for name, (kind, settings, peer) in schemes.items():
            own = model(options.width)
            optimizer = sgd(own)
            blocks.enter_context(kind(own, optimizer, group=group, **settings))
            ways[name] = (own, optimizer, peer)
        turns = {name: [] for name in ways}
        for turn in range(options.turns + 1):
            for name, (network, optimizer, _) in ways.items():
                found = [1e3 * seconds for seconds in steps(network, optimizer, batch)]
                if turn:  # the first one builds buckets
                    turns[name].append(found)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in alone.parameters())
        print(
            f"torch {torch.__version__}, {parameters / 1e6:.1f} M parameters, batch {options.batch}, "
            f"{dist.get_world_size()} ranks on {len(processors)} processors, {options.turns} turns"
        )
        if torchft is None:
            print("DiLoCo of torchft: skipped, it is not installed")
        else:
            print(f"torchft {importlib.metadata.version('torchft')}")
        step = {name: statistics.median(map(statistics.fmean, found)) for name, found in turns.items()}
        exchange = {
            name: step[name] - step["alone"]
            if name.startswith(("DDP", "Synchronous"))
            else statistics.median(max(turn) - statistics.median(turn) for turn in found)
            for name, found in turns.items()
        }
        for name, (_, _, peer) in ways.items():
            columns = [f"{step[name]:>8.1f} ms a step"]
            if name != "alone":
                columns.append(f"exchange {exchange[name]:>8.1f} ms")
            if peer is not None:
                quotients = [times[name] / times[peer] for times in (step, exchange)]
                columns.append(f"{quotients[0]:.2f} and {quotients[1]:.2f} of {peer}")
            print(f"{name:>22} {', '.join(columns)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
