"""The parameters of a model as views of one registered vector, and their gradients as views of another.

**Invariant:** from :meth:`ParameterVector.move_in` to :meth:`ParameterVector.move_out` each parameter
is a view of its place in the vector. A program may break that; :meth:`ParameterVector.check` finds out.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch

from ._attachable import expect_parameters
from ._buffers import over
from ._errors import PleachSchemeError, PleachUnsupported

#: In how many steps all elements are looked at, for whether they are finite.
LOOKS = 8
#: The fewest elements of a look, and those at the end of a parameter or of the vector.
LOOK_MIN, END = 1 << 12, 1 << 9


class ParameterPlace(NamedTuple):
    """Where a parameter lies."""

    name: str
    parameter: Any
    view: torch.Tensor
    gradient: torch.Tensor
    begin: int
    #: Of the view and of the gradient's view.
    addresses: tuple[int, int]


def _is_plain(gradient: Any) -> bool:
    """Whether there is a gradient that has all its elements."""
    return gradient is not None and not gradient.is_sparse


def is_finite(elements: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    # A sum takes a twenty-fifth of the time. Finite elements may have a sum that is not.
    return math.isfinite(elements.sum().item()) or bool(elements.isfinite().all())


class ParameterVector:
    """The parameters of these names, in this order; both memories are those of a trainer."""

    def __init__(self, named: list[tuple[str, Any]], parameters: Any, gradient: Any) -> None:
        #: All parameters, one after the other.
        self.flat = over(parameters, torch.float32)
        self.places: list[ParameterPlace] = []
        self._gradient = over(gradient, torch.float32)
        begin = 0
        for name, parameter in named:
            # The strides are kept, as those of channels_last, unless elements lie apart or twice.
            strides = torch.empty_like(parameter, device="meta").stride()
            view, own = (flat.as_strided(parameter.shape, strides, begin) for flat in (self.flat, self._gradient))
            self.places.append(ParameterPlace(name, parameter, view, own, begin, (view.data_ptr(), own.data_ptr())))
            begin += parameter.numel()
        # What each step looks at, in lists: a loop over places would take most of a step of a small
        # model.
        self._parameters = [place.parameter for place in self.places]
        self._addresses = [place.addresses[0] for place in self.places]
        self._gradients = [place.gradient for place in self.places]
        looked = max(LOOK_MIN, -(-begin // LOOKS))
        self._looks = [(flat.split(looked), flat[-END:]) for flat in (self.flat, self._gradient)]
        self._identities = [id(parameter) for parameter in self._parameters]

    def move_in(self) -> None:
        """Makes each parameter a view of its place, with the values that it has."""
        with torch.no_grad():
            for place in self.places:
                place.view.copy_(place.parameter)
                place.parameter.data = place.view

    def move_out(self) -> None:
        """Gives each parameter and each gradient memory of its own, but for those that were changed."""
        for place in self.places:
            parameter, gradient = place.parameter, place.parameter.grad
            is_view = (
                gradient is not None
                and gradient.layout == torch.strided
                and gradient.data_ptr() == place.addresses[1]
            )
            if not self._is_in_place(place):
                if is_view:
                    parameter.grad = None
                continue
            parameter.data = parameter.data.clone()
            if is_view:
                parameter.grad = gradient.clone()

    @staticmethod
    def _is_in_place(place: ParameterPlace) -> bool:
        parameter = place.parameter
        return bool(parameter.data_ptr() == place.addresses[0] and parameter.shape == place.view.shape)

    def check(self) -> None:
        """Raises PleachSchemeError if a parameter was freed, resized or replaced."""
        for place in self.places:
            if not self._is_in_place(place):
                raise PleachSchemeError(
                    f"parameter {place.name} is no longer in the memory of the scheme: it was freed, resized or moved; "
                    f"store values by copy_ in the block, and change shapes, types and devices before it",
                    kind="argument",
                )

    def check_addresses(self) -> None:
        """As :meth:`check`, but for a parameter that became a part of itself: that is found at the end."""
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            self.check()

    def expect_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has the parameters of these places and no others."""
        own = [identity for group in optimizer.param_groups for identity in map(id, group["params"])]
        # The optimizer may have them in another order.
        if own != self._identities:
            expect_parameters(optimizer, [(place.name, place.parameter) for place in self.places])

    def take_gradient(self, place: ParameterPlace) -> None:
        """Makes the gradient of a parameter a view of its place; zeros where there is none."""
        gradient = place.parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise PleachUnsupported(
                f"the gradient of {place.name} is sparse, and this scheme averages gradients; take sparse=False, or "
                "local-sgd"
            )
        if gradient is None:
            place.gradient.zero_()
        elif gradient.data_ptr() == place.addresses[1]:
            return
        else:
            place.gradient.copy_(gradient)
        place.parameter.grad = place.gradient

    def take_gradients(self) -> None:
        """Takes all gradients that are not in their places yet."""
        gradients = [parameter.grad for parameter in self._parameters]
        # The views that this has stored before, as with ``zero_grad(set_to_none=False)``.
        if all(map(operator.is_, gradients, self._gradients)):
            return
        with torch.no_grad():
            if all(map(_is_plain, gradients)):
                # One call for all that a backward pass has made anew.
                torch._foreach_copy_(self._gradients, gradients)
                for parameter, gradient in zip(self._parameters, self._gradients):
                    parameter.grad = gradient
                return
            for place in self.places:
                self.take_gradient(place)

    def not_finite_in_step(self, step: int, is_gradient: bool) -> str | None:
        """Returns the name of a parameter with elements that are not finite, of those that a step looks at: a part
        of the vector, another one in each step, and the vector's end, as a loss that is not finite makes the gradient
        of the last layer so."""
        looks, end = self._looks[is_gradient]
        if is_finite(looks[step % len(looks)]) and (len(looks) == 1 or is_finite(end)):
            return None
        return self.not_finite(is_gradient)

    def not_finite(self, is_gradient: bool = False) -> str | None:
        """Returns the name of the first parameter with elements that are not finite."""
        flat = self._gradient if is_gradient else self.flat
        if is_finite(flat):
            return None
        parts = ((place.name, flat[place.begin :][: place.parameter.numel()]) for place in self.places)
        return next(name for name, part in parts if not is_finite(part))

    def has_finite_end(self, place: ParameterPlace) -> bool:
        """Whether the last elements of the gradient of a parameter are finite."""
        return is_finite(self._gradient[place.begin :][: place.parameter.numel()][-END:])

    def named_parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the parts of a vector with this layout by the names of the parameters."""
        return {
            place.name: flat.as_strided(place.view.shape, place.view.stride(), place.begin) for place in self.places
        }
