"""Buckets of the gradient that are averaged while a backward pass computes others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._comm import translating
from ._errors import PleachSchemeError
from ._vector import ParameterVector


class Buckets:
    """Tells the trainer of buckets of the gradient during the backward pass.

    refuse: raises an exception for the parameter of this name, whose gradient is not finite.
    """

    def __init__(self, trainer: Any, vector: ParameterVector, refuse: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._vector = vector
        self._refuse = refuse
        buckets = trainer.buckets()
        #: By parameter: the buckets that have a part of it.
        self._of = [
            [
                number
                for number, (begin, end) in enumerate(buckets)
                if place.begin < end and begin < place.begin + place.parameter.numel()
            ]
            for place in vector.places
        ]
        self._parts = [sum(bucket in of for of in self._of) for bucket in range(len(buckets))]
        self.begin_step()
        self._hooks = [
            place.parameter.register_post_accumulate_grad_hook(functools.partial(self._came, number))
            for number, place in enumerate(vector.places)
        ]

    def begin_step(self) -> None:
        """No gradient has come."""
        self._missing = list(self._parts)
        self._has_come = [False] * len(self._of)

    def _came(self, number: int, _: Any) -> None:
        place = self._vector.places[number]
        if self._has_come[number]:
            raise PleachSchemeError(
                f"parameter {place.name} has a second gradient before optimizer.step; with several backward passes "
                "a step take overlap=False"
            )
        self._has_come[number] = True
        with torch.no_grad():
            self._vector.take_gradient(place)
            if not self._vector.has_finite_end(place):
                self._refuse(place.name)
        for bucket in self._of[number]:
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                with translating():
                    self._trainer.ready(bucket)

    def remove(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
