"""Arrays of NumPy, which is imported when the first one is made."""

from __future__ import annotations

from typing import Any


def _dtype(name: Any) -> Any:
    """The NumPy type of a name, of those of ml_dtypes too."""
    import numpy

    try:
        return numpy.dtype(numpy.float32 if name is None else name)
    except TypeError:
        if not isinstance(name, str):
            raise
        import ml_dtypes

        if not hasattr(ml_dtypes, name):
            raise
        return numpy.dtype(getattr(ml_dtypes, name))


def empty(shape: list[int], name: str) -> Any:
    """A new array."""
    import numpy

    return numpy.empty(shape, _dtype(name))


def bytes_of(shape: Any, dtype: Any) -> int:
    """How many bytes an array of this shape has."""
    import math

    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    count: int = math.prod(lengths)
    return count * int(_dtype(dtype).itemsize)


def described(shape: Any, dtype: Any) -> tuple[list[int], str]:
    """A shape as a list, and the name of a type."""
    lengths = [shape] if isinstance(shape, int) else list(shape)
    return lengths, str(_dtype(dtype).name)


def over(memory: Any, shape: Any, dtype: Any) -> Any:
    """An array over registered memory, which it keeps."""
    import numpy

    kind = _dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"registered memory cannot hold {kind}")
    nbytes = bytes_of(shape, kind)
    return numpy.asarray(memory)[:nbytes].view(kind).reshape(shape)


def over_vector(vector: Any) -> Any:
    """An array over a vector of a trainer, which it keeps."""
    import numpy

    return numpy.asarray(vector)
