"""Trains a small network on all ranks by DiLoCo: ranks exchange once in 20 steps.

usage: torchrun --nproc-per-node=4 examples/diloco.py

The loop is that of one process. An outer optimizer, here SGD with Nesterov momentum, takes a step by
what the steps of all ranks have changed in the mean.
"""

import torch
import torch.distributed as dist

import pleach.torch


def main():
    dist.init_process_group("pleach")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    # Each rank has points of its own; all learn whether a point is inside of a circle.
    torch.manual_seed(rank + 1)
    points = torch.rand(512, 2) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.6).float()

    first = None
    with pleach.torch.DiLoCo(model, optimizer, every=20, outer_optimizer=outer) as scheme:
        for step in range(200):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = loss.item() if first is None else first

    last = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside).item()
    report = scheme.report()
    assert last < first / 2 and report["parameters_equal"], (first, last, report)
    if rank == 0:
        print(f"{ranks} ranks: the loss went from {first:.3f} to {last:.3f} by {report['agreements']} exchanges")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
