"""Trains a small network on all ranks by gossip: after each step a rank reads the parameters of another
one, and waits for nobody.

usage: torchrun --nproc-per-node=4 examples/gossip.py [SCHEME]

SCHEME: any other training scheme, as easgd:every=5 or ssp:staleness=2. The loop is in circle.py.
"""

import sys

import torch

import circle
import pleach.torch


def main(text="gossip:direction=pull"):
    model, data = circle.begin()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pleach.torch.attach(text, model, optimizer) as scheme:
        first = circle.learn(model, optimizer, data)
    circle.end(model, data, first, scheme, 1, "; {guarantee}")


if __name__ == "__main__":
    main(*sys.argv[1:])
