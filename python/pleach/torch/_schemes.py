"""A class for each training scheme; each makes the text of its scheme."""

from __future__ import annotations

from typing import Any

import torch

from ._attachable import expect_parameters
from ._errors import PleachSchemeError
from ._scheme import Scheme


def _text(name: str, **values: Any) -> str:
    """The text of a scheme; values that are None are left out."""
    keys = [f"{key.replace('_', '-')}={value}" for key, value in values.items() if value is not None]
    return f"{name}:{','.join(keys)}"


class Synchronous(Scheme):
    """Gradients are averaged in each step. ``sync`` of the command line.

    bucket: bytes of a bucket, as "1M". overlap: buckets are averaged while the backward pass computes others; then
    a step has one backward pass. The other arguments are those of :func:`attach`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket: str | int = "1M",
        overlap: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(_text("sync", bucket=bucket), model, optimizer, **options)
        self._overlaps = overlap


class LocalSGD(Scheme):
    """Each rank makes ``every`` steps by itself, then parameters are averaged. Gradients are averaged in the first
    ``warmup_steps``, as in post-local SGD. The other arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 8,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(_text("local-sgd", every=every, warmup=warmup_steps), model, optimizer, **options)


class DiLoCo(Scheme):
    """An outer optimizer takes a step by what ``every`` local steps have changed in the mean of all ranks.

    outer_lr, outer_momentum: of the built-in outer optimizer, SGD with Nesterov momentum; 0.7 and 0.9. outer_optimizer:
    another one in its place, made of the model's parameters; each rank makes its step on the same numbers. The other
    arguments are those of :func:`attach`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 50,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        if outer_optimizer is None:
            lr, momentum = 0.7 if outer_lr is None else outer_lr, 0.9 if outer_momentum is None else outer_momentum
            text = _text("diloco", every=every, outer_lr=lr, outer_momentum=momentum)
        elif outer_lr is None and outer_momentum is None:
            text = _text("local-sgd", every=every)
        else:
            raise PleachSchemeError(
                "outer_lr and outer_momentum are of the built-in outer optimizer; give them to outer_optimizer"
            )
        super().__init__(text, model, optimizer, **options)
        if outer_optimizer is not None:
            if outer_optimizer is optimizer:
                raise PleachSchemeError(
                    "outer_optimizer is the inner one; make another optimizer of the model's parameters"
                )
            expect_parameters(outer_optimizer, self._named)
            self._outer = outer_optimizer


class ElasticAveraging(Scheme):
    """Each rank and a common centre are pulled together every ``every`` steps: ``easgd``, or ``eamsgd`` with
    ``momentum``. moving: the moving rate of all ranks together. mode: "async", "sync" or "round-robin". The other
    arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        moving: float = 0.9,
        mode: str = "async",
        momentum: float | None = None,
        **options: Any,
    ) -> None:
        name = "easgd" if momentum is None else "eamsgd"
        text = _text(name, every=every, moving=moving, mode=mode, momentum=momentum)
        super().__init__(text, model, optimizer, **options)


class Downpour(Scheme):
    """Each rank adds to a centre what ``every`` steps have changed, and goes on from the centre. The changes of all
    ranks add up: take a learning rate as many times smaller as there are ranks, and no momentum. The other arguments
    are those of :func:`attach`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 10, **options: Any
    ) -> None:
        super().__init__(_text("downpour", every=every), model, optimizer, **options)


class Gossip(Scheme):
    """Ranks mix their parameters with those of single peers. direction: "pull", "push" or "push-sum". peer: "uniform",
    "butterfly" or "ring". The other arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        direction: str = "pull",
        every: int = 1,
        peer: str = "uniform",
        **options: Any,
    ) -> None:
        super().__init__(_text("gossip", direction=direction, every=every, peer=peer), model, optimizer, **options)


class BoundedStaleness(Scheme):
    """No rank is more than ``staleness`` steps ahead of the slowest; 0 is bulk synchronous. ``ssp`` of the command
    line. The other arguments are those of :func:`attach`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, staleness: int = 3, **options: Any
    ) -> None:
        super().__init__(_text("ssp", staleness=staleness), model, optimizer, **options)


class ElasticBSP(Scheme):
    """Parameters are averaged at barriers that are placed where ranks are predicted to end steps at nearly the same
    time, at most ``lookahead`` steps apart. objective: "share" or "range". prediction: "mean" or "last". The other
    arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        lookahead: int = 60,
        objective: str = "share",
        prediction: str = "mean",
        **options: Any,
    ) -> None:
        text = _text("elastic-bsp", lookahead=lookahead, objective=objective, prediction=prediction)
        super().__init__(text, model, optimizer, **options)
