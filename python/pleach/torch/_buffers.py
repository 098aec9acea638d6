"""Tensors in registered memory, and the communication hook of DDP that works on them."""

# DDP compares the annotations of a hook with types, so they are not kept as texts here.

import ctypes
import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from ._comm import Comm
from ._errors import PleachUnsupported

#: By group and by the first parameter of a bucket of DDP, the registered memory of the bucket.
_of_buckets: weakref.WeakKeyDictionary[Any, WeakTensorKeyDictionary] = weakref.WeakKeyDictionary()


def allocate(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros in memory that is registered with a group as long as its storage lives."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    return over(comm.register(count * dtype.itemsize), dtype).view(shape)


def over(memory: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor over memory of the package, which is kept as long as the storage lives."""
    array: Any = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    # torch keeps the array as long as the storage lives, and the array keeps the memory.
    array._memory = memory
    return torch.frombuffer(array, dtype=dtype)


def buffer(shape: Any, dtype: torch.dtype = torch.float32, group: Any = None) -> torch.Tensor:
    """Returns a tensor of zeros in registered memory. Calls of the group on the tensor and on its
    contiguous parts copy nothing.

    group: a group of pleach, by default the whole world. Raises PleachUnsupported for a group of
    another backend.
    """
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    return allocate(own_group(group)._comm, lengths, dtype)


def all_reduce_registered(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP. The hook averages the gradients in registered memory::

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, pleach.torch.all_reduce_registered)

    group: a group of pleach, by default the whole world. With ``gradient_as_bucket_view`` the first
    steps move the buckets to registered memory, and later steps copy nothing. Without it each step
    copies each bucket to registered memory. Raises PleachUnsupported for a group of another backend.
    """
    own = own_group(group)
    gradient = bucket.buffer()
    places = _of_buckets.setdefault(own, WeakTensorKeyDictionary())
    first = bucket.parameters()[0]
    place = places.get(first)
    if place is None or place.shape != gradient.shape or place.dtype != gradient.dtype:
        # DDP builds new buckets after the first step. The memory of the old buckets is freed.
        for parameter in bucket.parameters():
            places.pop(parameter, None)
        place = places[first] = allocate(own._comm, gradient.shape, gradient.dtype)
    if gradient.data_ptr() == place.data_ptr():
        _follow(bucket, gradient)
    else:
        _move(bucket, gradient, place)
    return own.all_reduce_of_copy(gradient, place).get_future().then(lambda future: future.value()[0])


def _move(bucket: Any, gradient: torch.Tensor, place: torch.Tensor) -> None:
    """Moves a bucket to other memory, with its gradients, if all gradients are views of the bucket."""
    gradients = [parameter.grad for parameter in bucket.parameters()]
    storage = gradient.untyped_storage()
    is_in = [one is not None and one.untyped_storage().data_ptr() == storage.data_ptr() for one in gradients]
    if not is_in or not all(is_in) or gradient.storage_offset() != 0:
        return
    with torch.no_grad():
        place.copy_(gradient)
        for one in gradients:
            one.set_(place.untyped_storage(), one.storage_offset(), one.size(), one.stride())
        gradient.set_(place.untyped_storage(), 0, gradient.size(), gradient.stride())


def _follow(bucket: Any, gradient: torch.Tensor) -> None:
    """Makes the bucket a view of its gradients' memory again, where the version of torch has replaced
    the gradients that :func:`_move` moved."""
    storage = gradient.untyped_storage().data_ptr()
    for parameter in bucket.parameters():
        one = parameter.grad
        if one is not None and one.untyped_storage().data_ptr() != storage:
            with torch.no_grad():
                gradient.set_(one.untyped_storage(), 0, gradient.size(), gradient.stride())
            return


def own_group(group: Any) -> Any:
    from ._process_group import PleachProcessGroup

    found = dist.group.WORLD if group is None else group
    if not isinstance(found, PleachProcessGroup):
        raise PleachUnsupported(f"{type(found).__name__} is no group of pleach; pass one that init_process_group or new_group made")
    return found
