"""Places of tensors in one memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._errors import PleachUnsupported

#: At multiples of so many bytes a tensor begins.
ALIGNMENT = 64


class TensorPlace(NamedTuple):
    """Where a tensor lies in a memory: at a byte of it, with this shape, these strides and this type."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in a memory of bytes."""
        elements = memory[self.begin : self.begin + self.nbytes].view(self.dtype)
        return elements.as_strided(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        """Length of the tensor, in bytes."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class Places:
    """Gives places one behind the other."""

    def __init__(self) -> None:
        #: The end of the last place, in bytes.
        self.end = 0

    def give(self, tensor: torch.Tensor, name: str) -> TensorPlace:
        """A place for a tensor such as this one."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise PleachUnsupported(
                f"{name} is {str(tensor.layout).removeprefix('torch.')} on {tensor.device}; members of a session keep "
                "dense tensors of the host"
            )
        # The strides are kept, as those of channels_last, unless elements lie apart or twice.
        strides = torch.empty_like(tensor, device="meta").stride()
        place = TensorPlace(-(-self.end // ALIGNMENT) * ALIGNMENT, tuple(tensor.shape), strides, tensor.dtype)
        self.end = place.begin + place.nbytes
        return place
