"""What a training scheme adds to `optimizer.step` of a model of small layers, on one rank.

usage: python python/benches/torch_wrapper.py [--turns T] [--layers L]

The optimizer does nothing, and one rank exchanges nothing, so a step in a block is the wrapper alone with
the driver in Rust. Of each scheme: the median and the least time of a step, in microseconds, with gradients that
stay (`zero_grad(set_to_none=False)`), and with gradients that each backward pass makes anew.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import pleach.torch

STEPS = 200
SCHEMES = ["sync", "local-sgd:every=1000000", "gossip:every=1000000", "ssp:staleness=1000000"]


class Nothing(torch.optim.Optimizer):
    """Makes no step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def turn(model, optimizer, fresh):
    parameters = list(model.parameters())
    took = 0.0
    for _ in range(STEPS):
        if fresh is not None:
            for parameter, gradient in zip(parameters, fresh):
                parameter.grad = gradient
        begin = time.perf_counter()
        optimizer.step()
        took += time.perf_counter() - begin
    return took / STEPS * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--layers", type=int, default=80, help="each has two tensors of parameters")
    options = parser.parse_args()
    turns = options.turns
    torch.set_num_threads(1)
    dist.init_process_group("pleach", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}, {2 * options.layers} tensors of parameters, {turns} turns of {STEPS} steps, us a step")
    for scheme in SCHEMES:
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(options.layers)])
        optimizer = Nothing(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        fresh = [parameter.grad.clone() for parameter in model.parameters()]
        with pleach.torch.attach(scheme, model, optimizer):
            stay = [turn(model, optimizer, None) for _ in range(turns)]
            anew = [turn(model, optimizer, fresh) for _ in range(turns)]
        columns = [f"{statistics.median(times):6.1f} ({min(times):.1f})" for times in (stay, anew)]
        print(f"{scheme:>26}: gradients that stay {columns[0]}, new ones {columns[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
