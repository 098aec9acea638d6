"""Places of tensors in one memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._buffers import over
from ._errors import PleachUnsupported

#: At multiples of so many bytes a tensor begins.
ALIGNMENT = 64


class MemoryPart(NamedTuple):
    """A part of a memory of the package, from a byte of it on, which keeps that."""

    memory: Any
    begin: int
    nbytes: int

    @property
    def address(self) -> int:
        """Where the part begins."""
        return int(self.memory.address) + self.begin

    @staticmethod
    def of(tensor: torch.Tensor) -> MemoryPart:
        """The memory of a tensor."""
        return MemoryPart(_OfTensor(tensor), 0, tensor.nbytes)


class _OfTensor(NamedTuple):
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


class TensorPlace(NamedTuple):
    """Where a tensor lies in a memory: at a byte of it, with this shape, these strides and this type."""

    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Any) -> torch.Tensor:
        """The tensor in a memory. Its storage is no longer than the tensor, so that it is saved alone."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        return over(MemoryPart(memory, self.begin, self.nbytes), self.dtype).as_strided(self.shape, self.strides)

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
