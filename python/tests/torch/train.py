"""A rank that trains a small network on handwritten digits and prints the losses as JSON.

usage: train.py BACKEND ddp|fsdp [STOPPED SIGNAL]: the rank STOPPED sends itself the signal in a backward pass
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from ranks import LIMIT_OF_STOP_S, leave

BATCH = 64
#: `.ci/nightly` makes more.
STEPS = int(os.environ.get("PLEACH_TRAIN_STEPS", "24"))


def main(backend, scheme, stopped=None, number=signal.SIGKILL):
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT_OF_STOP_S) if number == signal.SIGSTOP else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    if scheme == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    losses = []
    for step in range(STEPS):
        begin = (step * size + rank) * (BATCH // size) % (len(images) - BATCH)
        outputs = model(images[begin : begin + BATCH // size])
        loss = torch.nn.functional.cross_entropy(outputs, labels[begin : begin + BATCH // size])
        optimizer.zero_grad()
        if stopped is not None and step == 5:
            if rank == stopped:
                outputs.register_hook(lambda _: (print(time.time(), flush=True), os.kill(os.getpid(), number)))
            try:
                loss.backward()
            except BaseException as error:
                fields = {"error": str(error), "type": type(error).__name__, "at": time.time()}
                print(json.dumps(fields), flush=True)
                os._exit(0)
            raise SystemExit("the backward pass has ended without the stopped rank")
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        print(json.dumps(losses), flush=True)
    leave(backend == "gloo")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
