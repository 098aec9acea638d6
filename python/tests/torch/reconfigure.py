"""A rank of a group whose members change: rank 3 comes later, and rank 2 kills itself."""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import pleach.torch

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
#: In which the ranks tell each other their handles.
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)


def refused(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError("no error")


def works(ranks):
    """The group has these ranks, and its sums are right, C++ code of torch included."""
    assert dist.get_world_size() == len(ranks) and dist.get_rank() == ranks.index(rank), ranks
    total = torch.full((1000,), float(1 << rank))
    dist.all_reduce(total)
    assert (total == sum(1 << of for of in ranks)).all(), total[0]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank))).sum().backward()
    expected = torch.full((1, 2), sum(ranks) / len(ranks))
    torch.testing.assert_close(model.module.weight.grad, expected)
    tensor = torch.zeros(1)
    group = dist.group.WORLD
    if rank == ranks[0]:
        group.send([torch.ones(1)], 1).wait()
    if rank == ranks[1]:
        group.recv([tensor], 0).wait()
        assert tensor == 1
    dist.barrier()


dist.init_process_group(
    "pleach", store=dist.PrefixStore("group", store), rank=rank, world_size=size, enable_reconfigure=True
)
assert dist._supports_reconfigure()
refused(pleach.torch.PleachError, "call torch.distributed._reconfigure", lambda: dist.all_reduce(torch.ones(1)))
store.set(f"handle-{rank}", dist._get_reconfigure_handle())
handles = [store.get(f"handle-{of}").decode() for of in range(size)]
limit = timedelta(seconds=60)
refused(ValueError, "no handle of a group", lambda: dist._reconfigure(9, [handles[rank], "gloo"]))
refused(ValueError, "more than once", lambda: dist._reconfigure(9, [handles[rank]] * 2))
refused(ValueError, "not among", lambda: dist._reconfigure(9, [handles[rank - 1]]))

if rank != 3:
    dist._reconfigure(1, handles[:3], timeout=limit).wait()
    works([0, 1, 2])
    refused(ValueError, "used before", lambda: dist._reconfigure(1, handles[:3]))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    refused(pleach.torch.PleachError, "rank 2", lambda: dist.all_reduce(torch.ones(10)))
    refused(pleach.torch.PleachError, "rank 2", lambda: dist.all_reduce(torch.ones(10)))
    # The order of the handles is that of the ranks.
    dist._reconfigure(2, [handles[1], handles[0]], timeout=limit).wait()
    works([1, 0])
    if rank == 0:
        # Calls that an abort has ended are none of the next members'.
        aborted = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(8)]
        dist.group.WORLD.abort()
    store.set("come", "now")
store.wait(["come"])
# A set has an order that is the same everywhere.
members = {handles[0], handles[1], handles[3]}
dist._reconfigure(3, members, timeout=limit).wait()
if rank == 0:
    assert all(work.is_completed() for work in aborted)
    for work in aborted:
        refused(pleach.torch.PleachError, "", work.wait)
works([[0, 1, None, 3][handles.index(handle)] for handle in sorted(members)])
print("done", flush=True)
# Rank 0 has the store that torch looks at when a group is destroyed.
dist.barrier()
dist.destroy_process_group()
