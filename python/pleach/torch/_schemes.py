"""A class for each training scheme; each makes the text of its scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._attachable import divided, expect_parameters
from ._errors import PleachSchemeError
from ._scheme import Scheme


def _text(name: str, **values: Any) -> str:
    """The text of a scheme; values that are None are left out."""
    keys = [f"{key.replace('_', '-')}={value}" for key, value in values.items() if value is not None]
    return f"{name}:{','.join(keys)}"


class Synchronous(Scheme):
    """Gradients are averaged in each step. ``sync`` of the command line.

    bucket: bytes of a bucket, as "1M". overlap: buckets are averaged while the backward pass computes others; then
    a step has one backward pass. compress: how gradients travel, "none", "bf16" or "f8". The other arguments are those
    of :func:`attach`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket: str | int = "1M",
        overlap: bool = False,
        compress: str = "none",
        **options: Any,
    ) -> None:
        super().__init__(_text("sync", bucket=bucket, compress=compress), model, optimizer, **options)
        self._overlaps = overlap


class LocalSGD(Scheme):
    """Each rank makes ``every`` steps by itself, then parameters are averaged. Gradients are averaged in the first
    ``warmup_steps``, as in post-local SGD. compress: how changes travel, "none", "bf16" or "f8". The other arguments
    are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 8,
        warmup_steps: int = 0,
        compress: str = "none",
        **options: Any,
    ) -> None:
        text = _text("local-sgd", every=every, warmup=warmup_steps, compress=compress)
        super().__init__(text, model, optimizer, **options)


class DiLoCo(Scheme):
    """An outer optimizer takes a step by what ``every`` local steps have changed in the mean of all ranks.

    outer_lr, outer_momentum: of the built-in outer optimizer, SGD with Nesterov momentum; 0.7 and 0.9. outer_optimizer:
    another one in its place, made of the model's parameters; each rank makes its step on the same numbers. fragments:
    the number of equal parts of the parameters that are exchanged in turn, or a list of modules, each of which is a part.
    Together they have all trained parameters, each once; torch.nn.ModuleList and ParameterList make one part of several.
    A part is exchanged ``delay`` steps before its outer step, after which a rank keeps the share ``mix`` of its own
    parameters (streaming DiLoCo). compress: how changes travel, "none", "bf16" or "f8". fragments, delay, mix and
    compress are of the built-in outer optimizer. The other arguments are those of :func:`attach`; buffers are averaged
    with each part.
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
        fragments: int | Sequence[torch.nn.Module] = 1,
        delay: int = 0,
        mix: float = 0.0,
        compress: str = "none",
        **options: Any,
    ) -> None:
        modules = list(fragments) if isinstance(fragments, (list, tuple, torch.nn.ModuleList)) else []
        is_number = isinstance(fragments, int) and not isinstance(fragments, bool)
        are_modules = bool(modules) and all(isinstance(module, torch.nn.Module) for module in modules)
        if not is_number and not are_modules:
            raise PleachSchemeError(
                f"fragments is {type(fragments).__name__}; give the number of parts, as fragments=2, or a list of modules"
            )
        if len(modules) > every:
            raise PleachSchemeError(
                f"{len(modules)} fragments, and a fragment is exchanged once in every={every} steps; give fewer, or a "
                "larger every"
            )
        # The driver in Rust is told of a layer for each module.
        streams = {"fragments": "layers" if modules else fragments, "delay": delay, "mix": mix, "compress": compress}
        if outer_optimizer is None:
            lr, momentum = 0.7 if outer_lr is None else outer_lr, 0.9 if outer_momentum is None else outer_momentum
            text = _text("diloco", every=every, outer_lr=lr, outer_momentum=momentum, **streams)
        elif streams != {"fragments": 1, "delay": 0, "mix": 0.0, "compress": "none"}:
            raise PleachSchemeError(
                "fragments, delay, mix and compress are of the built-in outer optimizer; leave outer_optimizer away"
            )
        elif outer_lr is None and outer_momentum is None:
            text = _text("local-sgd", every=every)
        else:
            raise PleachSchemeError(
                "outer_lr and outer_momentum are of the built-in outer optimizer; give them to outer_optimizer"
            )
        super().__init__(text, model, optimizer, **options)
        if modules:
            self._divide(divided(self._named, modules))
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
    "butterfly" or "ring". reads: "consistent", or "torn" for elements of several versions, with "pull". The other
    arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        direction: str = "pull",
        every: int = 1,
        peer: str = "uniform",
        reads: str = "consistent",
        **options: Any,
    ) -> None:
        text = _text("gossip", direction=direction, every=every, peer=peer, reads=reads)
        super().__init__(text, model, optimizer, **options)


class BoundedStaleness(Scheme):
    """No rank is more than ``staleness`` steps ahead of the slowest; 0 is bulk synchronous. ``ssp`` of the command
    line. The other arguments are those of :func:`attach`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, staleness: int = 3, **options: Any
    ) -> None:
        super().__init__(_text("ssp", staleness=staleness), model, optimizer, **options)


class DynamicStaleness(Scheme):
    """Bounded staleness whose bound is chosen at run time from ``low`` to ``high`` steps. ``dssp`` of the command line.
    The other arguments are those of :func:`attach`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, low: int = 3, high: int = 15, **options: Any
    ) -> None:
        super().__init__(_text("dssp", low=low, high=high), model, optimizer, **options)


class BoundedVersions(Scheme):
    """No update is computed at a copy that lacks more than ``distance`` updates of other ranks. ``bap`` of the command
    line. The other arguments are those of :func:`attach`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, distance: int = 32, **options: Any
    ) -> None:
        super().__init__(_text("bap", distance=distance), model, optimizer, **options)


class Asynchronous(Scheme):
    """Ranks add what their steps change to a table, and none waits for another before the end. ``asp`` of the command
    line. The other arguments are those of :func:`attach`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__("asp", model, optimizer, **options)


class EagerSGD(Scheme):
    """Gradients are averaged in rounds of a partial all-reduce, which do not wait for late ranks, and parameters every
    ``every`` steps. activation: when a round opens, as "majority", "solo" or "quorum:3". late: what becomes of late
    gradients, "carry", "drop" or "correct". divisor: by what sums are divided, "world", "contributors" or "none".
    The other arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        activation: str = "majority",
        late: str = "carry",
        divisor: str = "world",
        every: int = 100,
        **options: Any,
    ) -> None:
        text = _text("eager", activation=activation, late=late, divisor=divisor, every=every)
        super().__init__(text, model, optimizer, **options)


class GridAveraging(Scheme):
    """Every ``every`` steps parameters are mixed, by the share ``rate``, with their average over the ranks of a line of a
    grid of ``dimensions`` dimensions, which take turns. threshold: the share of a line that opens a round. ``bidmach``
    of the command line. The other arguments are those of :func:`attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        rate: float = 0.3,
        dimensions: int = 2,
        threshold: float = 1.0,
        **options: Any,
    ) -> None:
        text = _text("bidmach", every=every, rate=rate, dimensions=dimensions, threshold=threshold)
        super().__init__(text, model, optimizer, **options)


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
