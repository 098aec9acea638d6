"""Trains a small network on all ranks by DiLoCo: ranks exchange once in 20 steps.

usage: torchrun --nproc-per-node=4 examples/diloco.py

An outer optimizer, here SGD with Nesterov momentum, takes a step by what the steps of all ranks have
changed in the mean. The loop is in circle.py.
"""

import torch

import circle
import pleach.torch


def main():
    model, data = circle.begin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with pleach.torch.DiLoCo(model, optimizer, every=20, outer_optimizer=outer) as scheme:
        first = circle.learn(model, optimizer, data)
    circle.end(model, data, first, scheme, 0.5, " by {agreements} exchanges")


if __name__ == "__main__":
    main()
