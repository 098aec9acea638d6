"""Trains a small network in a session: members may be killed at any time, and others may come.

usage: pleach run -n 3 --elastic --restarts 3 -- python3 examples/elastic_torch.py

Kill one of its processes: the others go on with the step, and the one that is started anew joins them.
"""

import torch

import pleach
import pleach.torch

POINTS, BATCH, STEPS = 3840, 96, 400


def share(step, rank, ranks):
    """The points of a member in a step. The steps of an epoch take each point once, in an order of its own."""
    epoch, place = divmod(step, POINTS // BATCH)
    order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(epoch))
    return order[place * BATCH :][:BATCH][rank::ranks]


def main():
    torch.set_num_threads(1)
    points = torch.rand(POINTS, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    is_inside = (points.square().sum(1, keepdim=True) < 0.6).float()
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    with (
        pleach.Session(1, 4) as session,
        pleach.torch.ElasticTraining(session, model, optimizer, scheduler) as training,
    ):
        for attempt in training.steps(STEPS):
            with attempt as group:
                if group.rank == 0 and attempt.step % 100 == 0:
                    print(f"{group.world_size} members make step {attempt.step}", flush=True)
                own = share(attempt.step, group.rank, group.world_size)
                optimizer.zero_grad()
                loss_of(model(points[own]), is_inside[own]).backward()
            if attempt.verdict:
                optimizer.step()
                scheduler.step()
            else:
                print(f"seat {session.seat}: {attempt.verdict.change}", flush=True)

    with torch.no_grad():
        loss, right = loss_of(model(points), is_inside), ((model(points) > 0) == (is_inside > 0)).float().mean()
    print(f"seat {session.seat}: loss {loss:.4f}, {100 * right:.1f} % of the points are right")


if __name__ == "__main__":
    main()
