"""Trains a small network on all ranks by gossip: after each step a rank reads the parameters of another
one, and waits for nobody.

usage: torchrun --nproc-per-node=4 examples/gossip.py [SCHEME]

SCHEME: any other training scheme, as easgd:every=5 or ssp:staleness=2.
"""

import sys

import torch
import torch.distributed as dist

import pleach.torch


def main(text="gossip:direction=pull"):
    dist.init_process_group("pleach")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    # Each rank has points of its own; all learn whether a point is inside of a circle.
    torch.manual_seed(rank + 1)
    points = torch.rand(512, 2) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.6).float()

    first = None
    with pleach.torch.attach(text, model, optimizer) as scheme:
        for step in range(200):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = loss.item() if first is None else first

    last = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside).item()
    report = scheme.report()
    assert last < first and report["parameters_equal"] and report["guarantee_held"], (first, last, report)
    if rank == 0:
        print(f"{ranks} ranks: the loss went from {first:.3f} to {last:.3f}; {report['guarantee']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
