"""A rank that trains in the ways of torch's libraries, and prints what came out as JSON.

usage: parallel.py BACKEND WAY...: functions below whose names begin with `way_`
"""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ranks import leave

STEPS = 4


def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )


class Sometimes(torch.nn.Module):
    """A network of which rank 0 alone uses a part, in every other step."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.always, self.rarely = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.calls = 0

    def forward(self, data):
        self.calls += 1
        data = self.always(data)
        return self.rarely(data) if self.calls % 2 == 0 and dist.get_rank() == 0 else data


def batch(step, rows=6):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 8, generator=generator)


def trained(model, optimizer=None, inputs=None, skip=()):
    """Returns the sum of the losses of all ranks at each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = model(batch(step) if inputs is None else inputs(step)).square().mean()
        loss.backward()
        if step not in skip:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def ddp(model, **options):
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001, **options)


def way_ddp_bf16_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = ddp(network())
    model.register_comm_hook(None, bf16_compress_hook)
    return trained(model)


def way_ddp_powersgd_hook():
    """torch's own hook, whose callbacks start collectives and wait for them. Each bucket has some, beside those of
    the backward pass; gloo keeps no order between the two, so there the backward pass waits for each bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def in_turn(state, bucket):
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future

    model = ddp(network())
    # DDP makes its buckets anew after the first step, and the hook compresses from the third one
    # on.
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook if dist.get_backend() == "pleach" else in_turn)
    losses = trained(model) + trained(model) + trained(model)
    assert 0 < state.compression_stats()[0] and len(state.error_dict) > 1, "buckets are compressed, and several"
    return losses + [parameter.sum().item() for parameter in model.parameters()]


def registered(model):
    """DDP whose buckets are in registered memory; over gloo, DDP without a hook."""
    if dist.get_backend() == "pleach":
        from pleach.torch import all_reduce_registered

        model.register_comm_hook(None, all_reduce_registered)
    return model


def way_ddp_registered_hook():
    model = registered(ddp(network()))
    return trained(model)


def way_ddp_partial_hook():
    """Of all ranks: the average is that of DDP."""
    model = ddp(network())
    if dist.get_backend() == "pleach":
        from pleach.torch import PartialAllReduce, partial_all_reduce

        rounds = PartialAllReduce("all")
        model.register_comm_hook(rounds, partial_all_reduce)
    losses = trained(model)
    if dist.get_backend() == "pleach":
        rounds.finish()
        report = rounds.report()
        # All rounds but the last one of each bucket, to which no rank gives anything.
        assert len(set(report["counted"])) == 1 and 0 < report["counted"][0] < report["rounds"], report
        assert (report["late"], report["dropped"], report["missed"]) == (0, 0, 0), report
    return losses


def way_ddp_registered_views():
    """The gradients themselves are in registered memory, from the second step on that of the rebuilt buckets."""
    model = registered(ddp(network(), gradient_as_bucket_view=True))
    losses = trained(model) + trained(model, skip=(1, 2))
    if dist.get_backend() == "pleach":
        from pleach.torch._buffers import _of_buckets

        places = {place.untyped_storage().data_ptr() for place in _of_buckets[dist.group.WORLD].values()}
        assert places
        model(batch(9)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad.untyped_storage().data_ptr() in places, "a gradient was copied to its bucket"
        kept = [parameter for parameter in model.parameters() if parameter in _of_buckets[dist.group.WORLD]]
        buckets = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert len(kept) == len(buckets) > 1, "memory of the buckets of the first step is kept"
    else:
        model(batch(9)).square().mean().backward()
    return losses + [parameter.grad.sum().item() for parameter in model.parameters()]


def way_ddp_registered_views_of_unused_parameters():
    return trained(registered(ddp(Sometimes(), find_unused_parameters=True, gradient_as_bucket_view=True)))


def way_ddp_no_sync():
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        with model.no_sync():
            model(batch(10 + step)).square().mean().backward()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def way_ddp_unused_parameters():
    return trained(ddp(Sometimes(), find_unused_parameters=True))


def way_ddp_join():
    """Ranks with different numbers of batches."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(2 + dist.get_rank()):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.sum().item() for parameter in model.parameters()]


def way_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = trained(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return losses


def way_dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0 * dist.get_world_size()).view(-1, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows @ rows.t().redistribute(mesh, [Replicate()])
    return [columns.full_tensor().sum().item(), product.full_tensor().sum().item(), rows.sum().full_tensor().item()]


def way_tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(model, inputs=lambda step: torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))


def way_pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        part = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=size, loss_fn=torch.nn.functional.mse_loss)
        data = torch.randn(4 * size, 8, generator=torch.Generator().manual_seed(3))
        found = []
        if rank == 0:
            schedule.step(data)
        elif rank == size - 1:
            schedule.step(target=torch.zeros(4 * size, 8), losses=found)
        else:
            schedule.step()
        total = torch.tensor([float(sum(loss.item() for loss in found))])
        dist.all_reduce(total)
        gradient = torch.stack([parameter.grad.abs().sum() for parameter in part.parameters()]).sum()
        dist.all_reduce(gradient)
        losses += [total.item(), gradient.item()]
    return losses


def way_checkpoint():
    """Saves a sharded model, and loads it into another one."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = fully_shard(network(), mesh=mesh)
    losses = trained(model)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = fully_shard(network(seed=2), mesh=mesh)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    return losses + [parameter.full_tensor().sum().item() for parameter in other.parameters()]


def way_fsdp_registered_bits():
    """FSDP2 whose communication works on memory of the group: the bits of the losses and of the parameters."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model[::2], model]:
        fully_shard(layer, mesh=mesh)
    made = []
    if dist.get_backend() == "pleach":
        group = mesh.get_group()
        allocate = group.allocate_tensor

        def recorded(*arguments, **others):
            made.append(allocate(*arguments, **others))
            return made[-1]

        group.allocate_tensor = recorded
        for layer in model[::2]:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    losses = trained(model)
    # Of each layer in each step: to gather its parameters, and to reduce its gradients.
    assert dist.get_backend() != "pleach" or len(made) >= 2 * 3 * STEPS, len(made)
    parameters = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return [torch.tensor(losses).view(torch.int32).tolist(), *(one.view(torch.int32).tolist() for one in parameters)]


def main(backend, *ways):
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    results = {way: globals()[f"way_{way}"]() for way in ways}
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    leave(backend == "gloo")


if __name__ == "__main__":
    main(*sys.argv[1:])
