"""The state of an optimizer as views of one memory, which a process that joins reads from others.

An optimizer makes its tensors in its first step, and says nowhere before which they will be. So a copy
of the optimizer makes a step on copies of the parameters first.

**Invariant:** from :meth:`OptimizerState.move_in` on each tensor of the state of a parameter lies in its
place, unless the optimizer has put another tensor there since.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import torch

from ._errors import PleachSchemeError, PleachUnsupported
from ._places import Places


class OptimizerState:
    """The state that an optimizer has of the parameters of these names, in this order."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: list[tuple[str, Any]], places: Places) -> None:
        self._optimizer = optimizer
        self._named = named
        #: By parameter and key: its place.
        self.places = [
            {key: places.give(one, f"{key} of {name}") for key, one in sorted(state.items()) if isinstance(one, torch.Tensor)}
            for (name, _), state in zip(named, _states_after_a_step(optimizer, named))
        ]
        self._views: list[dict[str, torch.Tensor]] = []
        #: By parameter: how many values its state had last.
        self._lengths = [0] * len(named)
        #: By parameter that has them: its values that are no tensors.
        self._others: dict[int, dict[str, Any]] = {}
        #: By parameter: the keys of its tensors; None if they have changed since they were asked for.
        self._keys: str | None = None

    def bind(self, memory: Any) -> None:
        """Has its places in this memory from now on."""
        self._views = [{key: place.of(memory) for key, place in places.items()} for places in self.places]

    def look(self) -> None:
        """Looks which values the optimizer has."""
        self._keys = None
        self._others = {}
        for number, (_, parameter) in enumerate(self._named):
            state = self._optimizer.state.get(parameter, {})
            self._lengths[number] = len(state)
            others = {key: one for key, one in state.items() if not isinstance(one, torch.Tensor)}
            if others:
                self._others[number] = others

    def copy_to(self, memory: Any) -> None:
        """Copies the tensors that the optimizer has to their places in a memory, and looks which values it has."""
        self.look()
        for (name, parameter), places in zip(self._named, self.places):
            for key, one in self._optimizer.state.get(parameter, {}).items():
                if isinstance(one, torch.Tensor):
                    _moved(one, places[key].of(memory) if key in places else None, f"{key} of {name}")

    def move_in(self) -> None:
        """Moves to their places the tensors that the optimizer has made, and looks which values it has."""
        self._others = {}
        for number, ((name, parameter), views) in enumerate(zip(self._named, self._views)):
            state = self._optimizer.state.get(parameter, {})
            if len(state) != self._lengths[number]:
                self._lengths[number], self._keys = len(state), None
            for key, one in state.items():
                view = views.get(key)
                if one is view:
                    continue
                if isinstance(one, torch.Tensor):
                    state[key] = _moved(one, view, f"{key} of {name}")
                    self._keys = None
                else:
                    self._others.setdefault(number, {})[key] = one

    def plain_values(self) -> Any:
        """Which tensors there were at the last look, the values besides them, and the settings of the groups."""
        if self._keys is None:
            states = [self._optimizer.state.get(parameter, {}) for _, parameter in self._named]
            keys = [sorted(key for key, one in state.items() if isinstance(one, torch.Tensor)) for state in states]
            # As a text, which need not be made anew in each step.
            self._keys = json.dumps(keys)
        return [self._keys, self._others, [_settings(group) for group in self._optimizer.param_groups]]

    def restore(self, values: Any) -> None:
        """Makes the optimizer's state that which lies in the places, with these plain values."""
        self._keys, self._others, settings = values
        for number, (views, keys) in enumerate(zip(self._views, json.loads(values[0]))):
            state = {key: views[key] for key in keys} | self._others.get(number, {})
            self._lengths[number] = len(state)
            parameter = self._named[number][1]
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        for group, own in zip(self._optimizer.param_groups, settings):
            group.update(own)

    def move_out(self) -> None:
        """Gives each tensor that lies in its place memory of its own."""
        for (_, parameter), views in zip(self._named, self._views):
            state = self._optimizer.state.get(parameter, {})
            for key, view in views.items():
                if state.get(key) is view:
                    state[key] = view.clone()


def _moved(tensor: torch.Tensor, view: torch.Tensor | None, name: str) -> torch.Tensor:
    """The place of a tensor, with its elements."""
    if view is None or tensor.shape != view.shape or tensor.dtype != view.dtype:
        raise PleachSchemeError(
            f"{name}, in the optimizer's state, has another shape or type than after a first step; take another optimizer"
        )
    with torch.no_grad():
        return view.copy_(tensor)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters: its learning rate and others."""
    return {key: one for key, one in group.items() if key != "params"}


def _states_after_a_step(optimizer: Any, named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The state of each parameter after a step of a copy of the optimizer, on copies of the parameters."""
    kind = type(optimizer).__name__
    for key, one in vars(optimizer).items():
        if isinstance(one, (torch.optim.Optimizer, torch.Tensor)):
            raise PleachUnsupported(
                f"{kind} keeps a {type(one).__name__} in {key}, which a process that joins cannot be given; take an optimizer "
                "that keeps all in its state"
            )
    with torch.no_grad():
        copies = {id(parameter): torch.nn.Parameter(parameter.clone()) for _, parameter in named}
        for copy in copies.values():
            copy.grad = torch.zeros_like(copy)
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    # Of a scheduler, which counts the steps.
    probe.__dict__.pop("step", None)
    hooks = collections.OrderedDict[int, Callable[..., Any]]
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = hooks(), hooks()
    probe.param_groups = [
        dict(group, params=[copies[id(one)] for one in group["params"] if id(one) in copies])
        for group in optimizer.param_groups
    ]
    probe.state = collections.defaultdict(dict)
    for _, parameter in named:
        if parameter in optimizer.state:
            state = optimizer.state[parameter].items()
            probe.state[copies[id(parameter)]] = {
                key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in state
            }
    try:
        probe.step()
    except Exception as error:
        raise PleachUnsupported(f"{kind} cannot make a step as it is: {error}; take another optimizer") from error
    return [probe.state.get(copies[id(parameter)], {}) for _, parameter in named]
