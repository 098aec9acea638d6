"""Tensors as the memory of calls: element types, checks, addresses, and the reductions of types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pleach import PremulSum

from ._errors import PleachUnsupported

#: Element type of pleach, and how many of its elements a torch element has.
DATA_TYPES = {
    torch.int8: ("int8", 1),
    torch.uint8: ("uint8", 1),
    torch.bool: ("uint8", 1),
    torch.int16: ("int16", 1),
    torch.uint16: ("uint16", 1),
    torch.int32: ("int32", 1),
    torch.uint32: ("uint32", 1),
    torch.int64: ("int64", 1),
    torch.uint64: ("uint64", 1),
    torch.float16: ("float16", 1),
    torch.complex32: ("float16", 2),
    torch.float32: ("float32", 1),
    torch.complex64: ("float32", 2),
    torch.float64: ("float64", 1),
    torch.complex128: ("float64", 2),
    torch.bfloat16: ("bfloat16", 1),
    torch.float8_e4m3fn: ("float8_e4m3fn", 1),
    torch.float8_e5m2: ("float8_e5m2", 1),
}
OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
BIT_OPS = ("BAND", "BOR", "BXOR")
#: Of truth values a sum is true where any is, a product where all are.
BOOL_OPS = {"SUM": "or", "PRODUCT": "and", "MAX": "or", "MIN": "and"} | {name: OPS[name] for name in BIT_OPS}
COMPLEX_OPS = ("SUM", "AVG", "PREMUL_SUM")
#: The longest time that is given to the package, in seconds.
TIMEOUT_S_MAX = 10.0**8


def seconds(timeout: timedelta | None) -> float | None:
    """Returns a timedelta in seconds; None for none."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return min(timeout.total_seconds(), TIMEOUT_S_MAX)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if it is dense, in host memory and of a type that pleach has."""
    if tensor.device.type != "cpu":
        raise PleachUnsupported(
            f"a tensor is on {tensor.device}, and the group works on cpu; move it there, or make a "
            "group of another backend for it"
        )
    if tensor.layout != torch.strided:
        raise PleachUnsupported(f"a tensor is {tensor.layout}; only all_reduce takes sparse tensors (torch.sparse_coo)")
    if tensor.dtype not in DATA_TYPES:
        raise PleachUnsupported(f"the backend does not know {tensor.dtype}")
    return tensor.detach() if tensor.requires_grad else tensor


def as_list(tensors: Any) -> Sequence[torch.Tensor]:
    """Returns the list, or the tensor in a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def only(tensors: Sequence[Any]) -> Any:
    """Returns the only item of a list."""
    if len(tensors) != 1:
        raise PleachUnsupported(f"a call takes one tensor, not {len(tensors)}; CPU groups have one device")
    return tensors[0]


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if its elements lie in order, else a copy of which that is so."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def type_of(tensor: torch.Tensor) -> str:
    """Returns the element type of pleach for a tensor."""
    return DATA_TYPES[tensor.dtype][0]


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and number of elements of pleach."""
    return tensor.data_ptr(), tensor.numel() * DATA_TYPES[tensor.dtype][1]


def same_type(tensors: Iterable[torch.Tensor], what: str) -> None:
    """Refuses tensors of different types."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise PleachUnsupported(f"the tensors of {what} have different types: {', '.join(sorted(map(str, types)))}")


def same_lengths(tensors: Iterable[torch.Tensor], source: torch.Tensor) -> None:
    """Refuses tensors that have not as many elements as the source."""
    for tensor in tensors:
        if tensor.numel() != source.numel():
            raise ValueError(f"a tensor has {tensor.numel()} elements, not {source.numel()}")


def overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two contiguous tensors have bytes in common."""
    begin, other_begin = tensor.data_ptr(), other.data_ptr()
    length, other_length = (one.numel() * one.element_size() for one in (tensor, other))
    return begin < other_begin + other_length and other_begin < begin + length


def store_into(target: torch.Tensor, flat: torch.Tensor) -> None:
    """Copies elements, in rank order, into a tensor of any strides."""
    target.copy_(flat.view(target.shape))


def reduce_op(opts: Any) -> Any:
    """Returns the reduction of options; a sum without any."""
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)


def reduction_of(op: Any, dtype: torch.dtype) -> str | PremulSum:
    """Returns pleach's reduction for one of torch and an element type."""
    kind = getattr(op, "op", op)
    name = kind.name
    number: str | None
    if dtype == torch.bool:
        number = BOOL_OPS.get(name)
    elif dtype.is_complex and name not in COMPLEX_OPS:
        number = None
    elif name == "PREMUL_SUM":
        return premultiplied(op, dtype)
    elif dtype.is_floating_point and name in BIT_OPS:
        number = None
    else:
        number = OPS.get(name)
    if number is None:
        raise PleachUnsupported(f"{name} has no meaning for {dtype}")
    return number


def premultiplied(op: Any, dtype: torch.dtype) -> PremulSum:
    """Returns the sum with the factor of PREMUL_SUM, a number or a tensor of one element."""
    factor = op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise PleachUnsupported("the factor of PREMUL_SUM must have one element")
        factor = factor.item()
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return PremulSum(int(factor) if is_whole else float(factor))
