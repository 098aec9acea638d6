"""Gradients of DDP by partial all-reduce: a communication hook that does not wait for late ranks."""

# DDP compares the annotations of a hook with types, so they are not kept as texts here.

from typing import Any

import torch
import torch.distributed as dist

import pleach

from ._buffers import own_group
from ._comm import translated
from ._tensors import DATA_TYPES
from ._work import Lane


class PartialAllReduce:
    """The rounds of the gradients of a model, for :func:`partial_all_reduce`.

    activation: when a round opens: "all", "solo", "majority", "quorum:K", "quorum:K+GRACE", "deadline:D" or
    "deadline:pN". late: what becomes of late gradients: "carry", "drop" or "correct"; a correction is not
    used. divisor: by what sums are divided: "world" or "contributors". staleness_max: how many rounds in a
    row a rank may be left out. What is None is as the activation says, and sums are divided by the number of
    contributors where it says nothing. The same on all ranks. group: a group of pleach, by default the whole
    world.

    Each bucket of DDP has rounds of its own. The ranks meet in its first round to make them. A rank that was
    late gets the gradients of the newest round that it missed, so parameters differ between ranks: average
    the parameters now and then. Call :meth:`finish` on all ranks when the training ends.
    """

    def __init__(
        self,
        activation: str = "majority",
        *,
        late: str | None = None,
        divisor: str | None = None,
        staleness_max: int | None = None,
        group: Any = None,
    ) -> None:
        self._group = own_group(group)
        self._options = {"late": late, "divisor": divisor, "staleness_max": staleness_max}
        self._activation = activation
        self._rounds: dict[int, tuple[Any, Any]] = {}
        self._ended: list[dict[str, Any]] = []
        self._lane = Lane("pleach-torch-partial")

    def _contribute(self, index: int, gradient: torch.Tensor) -> None:
        """Replaces the gradient of a bucket by the result of a round."""
        name, lanes = DATA_TYPES[gradient.dtype]
        flat = gradient.view(-1)
        flat = flat if lanes == 1 else torch.view_as_real(flat).view(-1)
        shape = (name, flat.numel())
        try:
            before, rounds = self._rounds.get(index, (None, None))
            if before != shape:
                if rounds is not None:
                    # DDP builds new buckets after the first step, on all ranks.
                    self._end(rounds)
                rounds = self._group._comm.partial(flat.numel(), name, self._activation, self._options)
                self._rounds[index] = (shape, rounds)
            rounds.contribute(flat, out=flat)
        except pleach.Error as error:
            raise translated(error) from error

    def _end(self, rounds: Any) -> None:
        rounds.finish()
        self._ended.append(rounds.report())

    def report(self) -> dict[str, Any]:
        """Returns how the rounds of all buckets went on this rank: "rounds", "counted" (by rank: in how many
        its gradients are), "late", "dropped" and "missed"."""
        reports = [*self._ended, *(rounds.report() for _, rounds in self._rounds.values())]
        total: dict[str, Any] = {name: sum(report[name] for report in reports) for name in ("rounds", "late", "dropped", "missed")}
        total["counted"] = [sum(report["counted"][rank] for report in reports) for rank in range(self._group.size())]
        return total

    def finish(self) -> None:
        """Takes part in the rounds of other ranks until all ranks have finished. The hook may not be called
        after this. Raises PleachError if a rank is lost."""
        self._lane.stop()
        self._lane.join()
        try:
            for index in sorted(self._rounds):
                self._end(self._rounds.pop(index)[1])
        except pleach.Error as error:
            raise translated(error) from error


def partial_all_reduce(state: PartialAllReduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP. The hook averages the gradients of the ranks that are in time::

        rounds = pleach.torch.PartialAllReduce("quorum:6")
        model.register_comm_hook(rounds, pleach.torch.partial_all_reduce)
        ...
        rounds.finish()

    state: the rounds. The future raises PleachError if a rank is lost.
    """
    gradient, index = bucket.buffer(), bucket.index()
    work = state._lane.give(lambda: state._contribute(index, gradient), [gradient], True)
    return work.get_future().then(lambda future: future.value()[0])
