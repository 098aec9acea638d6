"""Gradients of DDP by partial all-reduce: a communication hook that does not wait for late ranks.

**Invariant:** the rounds of a bucket combine the gradients of the same parameters, in the same order, as
long as they go on. So a late gradient is added to one of its own parameter. When rounds end, their last
result is kept by parameter until a later step adds it, or :meth:`PartialAllReduce.finish` returns it.
"""

# DDP compares the annotations of a hook with types, so they are not kept as texts here.

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pleach

from ._buffers import own_group
from ._comm import translated
from ._tensors import DATA_TYPES
from ._work import Lane

#: What a report counts of a rank.
COUNTS = ("rounds", "late", "carried", "dropped", "corrected", "missed")


class Bucket(NamedTuple):
    """The rounds of a bucket, and what they are of: its type, and its parameters in their order."""

    dtype: torch.dtype
    parameters: Sequence[torch.Tensor]
    rounds: Any

    def is_of(self, dtype: torch.dtype, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns whether these gradients go into the rounds."""
        are_as_many = self.dtype == dtype and len(self.parameters) == len(parameters)
        return are_as_many and all(own is other for own, other in zip(self.parameters, parameters))

    def parts(self, flat: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each parameter with its gradient in the bucket, in the order of memory."""
        return zip(self.parameters, flat.split([parameter.numel() for parameter in self.parameters]))


class PartialAllReduce:
    """The rounds of the gradients of a model, for :func:`partial_all_reduce`.

    activation: when a round opens: "all", "solo", "majority", "quorum:K", "quorum:K+GRACE", "deadline:D" or
    "deadline:pN". late: what becomes of late gradients: "carry", "drop" or "correct", where a step adds the
    correction of its round to the result. divisor: by what sums are divided: "world" or "contributors".
    staleness_max: how many rounds in a row a rank may be left out. What is None is as the activation says, and
    sums are divided by the number of contributors where it says nothing. The same on all ranks. group: a group
    of pleach, by default the whole world.

    Each bucket of DDP has rounds of its own. The ranks meet in its first round to make them. DDP makes other
    buckets after the first step. Then the rounds end on all ranks: gradients that are late in them are added
    to those of the same parameters in the next step, on each rank. A rank that was late gets the gradients of
    the newest round that it missed, so parameters differ between ranks: average the parameters now and then.
    Call :meth:`finish` on all ranks when the training ends.
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
        self._buckets: dict[int, Bucket] = {}
        # By parameter, in the order of memory: what the last rounds of former buckets gave.
        self._left: dict[torch.Tensor, torch.Tensor] = {}
        self._ended: list[dict[str, Any]] = []
        self._lane = Lane("pleach-torch-partial")

    def _contribute(self, index: int, gradient: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """Replaces the gradient of a bucket of these parameters by the result of a round."""
        flat = gradient.view(-1)
        values, late = as_real(flat), self._late(flat)
        try:
            bucket = self._buckets.get(index)
            if bucket is None or not bucket.is_of(gradient.dtype, parameters):
                # DDP builds new buckets after the first step, on all ranks: this and later ones.
                self._end([other for other in sorted(self._buckets) if other >= index])
                name, _ = DATA_TYPES[gradient.dtype]
                rounds = self._group._comm.partial(values.numel(), name, self._activation, self._options)
                bucket = self._buckets[index] = Bucket(gradient.dtype, parameters, rounds)
            round = bucket.rounds.contribute(values, out=values, correction=late)
        except pleach.Error as error:
            raise translated(error) from error
        if round.correction is not None:
            values += late
        if self._left:
            for parameter, own in bucket.parts(flat):
                if (left := self._left.pop(parameter, None)) is not None:
                    own += left

    def _late(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Returns memory for a correction of such gradients, where there may be one."""
        return torch.empty_like(as_real(flat)) if self._options["late"] == "correct" else None

    def _end(self, indices: Iterable[int]) -> None:
        """Ends the rounds of these buckets on all ranks, and keeps what the last ones give."""
        for index in indices:
            bucket = self._buckets.pop(index)
            flat = torch.empty(sum(parameter.numel() for parameter in bucket.parameters), dtype=bucket.dtype)
            values, late = as_real(flat), self._late(flat)
            last = bucket.rounds.finish(out=values, correction=late)
            self._ended.append(bucket.rounds.report())
            # Late gradients alone are in it: carried ones in the result, others in the correction.
            if last.correction is not None and last.correction[0]:
                values.copy_(late)
            elif not last.contributors:
                continue
            for parameter, own in bucket.parts(flat):
                before = self._left.get(parameter)
                self._left[parameter] = own if before is None else before + own

    def report(self) -> dict[str, Any]:
        """Returns how the rounds of all buckets went on this rank: "rounds", "counted" (by rank: in how many
        its gradients are), "late" (the sum of "carried", "dropped" and "corrected") and "missed"."""
        reports = [*self._ended, *(bucket.rounds.report() for bucket in self._buckets.values())]
        total: dict[str, Any] = {name: sum(report[name] for report in reports) for name in COUNTS}
        total["counted"] = [sum(report["counted"][rank] for report in reports) for rank in range(self._group.size())]
        return total

    def finish(self) -> dict[torch.Tensor, torch.Tensor]:
        """Takes part in the rounds of other ranks until all ranks have finished. The hook may not be called
        after this.

        Returns the late gradients that are in no step, by parameter: those of a bucket's ranks together,
        divided as the others are, with the same bits on all ranks. Where none are left there is no parameter.
        With late="correct" and divisor="contributors" they are a sum: no rank contributes to the last round.
        A last step takes them in::

            left = rounds.finish()
            for parameter in model.parameters():
                parameter.grad = left.get(parameter)
            optimizer.step()

        Raises PleachError if a rank is lost.
        """
        self._lane.stop()
        self._lane.join()
        try:
            self._end(sorted(self._buckets))
        except pleach.Error as error:
            raise translated(error) from error
        left, self._left = self._left, {}
        return {parameter: shaped_as(parameter, gradient) for parameter, gradient in left.items()}


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as numbers that are not complex."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def shaped_as(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a parameter that was in the order of memory."""
    gradient = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
    gradient.as_strided((flat.numel(),), (1,)).copy_(flat)
    return gradient


def partial_all_reduce(state: PartialAllReduce, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP. The hook averages the gradients of the ranks that are in time::

        rounds = pleach.torch.PartialAllReduce("quorum:6")
        model.register_comm_hook(rounds, pleach.torch.partial_all_reduce)
        ...
        rounds.finish()

    state: the rounds. The future raises PleachError if a rank is lost.
    """
    gradient, index, parameters = bucket.buffer(), bucket.index(), bucket.parameters()
    work = state._lane.give(lambda: state._contribute(index, gradient, parameters), [gradient], True)
    return work.get_future().then(lambda future: future.value()[0])
