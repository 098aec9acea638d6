"""What the examples of training schemes learn: whether a point is inside of a circle.

The loop is that of one process; the examples put it into the block of a scheme.
"""

import torch
import torch.distributed as dist


def begin():
    """Joins the other ranks, and returns a model and the points of this rank."""
    dist.init_process_group("pleach")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    # Each rank has points of its own.
    torch.manual_seed(dist.get_rank() + 1)
    points = torch.rand(512, 2) * 2 - 1
    return model, (points, (points.square().sum(1, keepdim=True) < 0.6).float())


def loss_of(model, data):
    points, inside = data
    return torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)


def learn(model, optimizer, data):
    """Makes 200 steps, and returns the loss of the first one."""
    first = None
    for _ in range(200):
        loss = loss_of(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    return first


def end(model, data, first, scheme, share, text):
    """Checks that the loss is below this share of the first one, and says so on rank 0."""
    last, report = loss_of(model, data).item(), scheme.report()
    assert last < share * first and report["parameters_equal"] and report["guarantee_held"], (first, last, report)
    if dist.get_rank() == 0:
        text = text.format(**report)
        print(f"{dist.get_world_size()} ranks: the loss went from {first:.3f} to {last:.3f}{text}")
    dist.destroy_process_group()
