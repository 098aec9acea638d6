"""Trains a small network on all ranks with DistributedDataParallel.

usage: torchrun --nproc-per-node=4 examples/ddp.py [BACKEND]

Where the package is installed, torch knows the name "pleach"; over gloo the program is the same.
"""

import sys

import torch
import torch.distributed as dist


def main(backend="pleach"):
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    # Each rank has points of its own; all learn whether a point is inside of a circle.
    torch.manual_seed(rank + 1)
    points = torch.rand(512, 2) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.6).float()

    first = mean = None
    for step in range(100):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= ranks
        first = mean.item() if first is None else first
    assert mean.item() < first / 2, (first, mean.item())
    if rank == 0:
        print(f"{ranks} ranks over {dist.get_backend()}: the loss went from {first:.3f} to {mean.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
