"""A group of the package, with the exceptions of the backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pleach
from pleach import _native

from ._errors import PleachError, PleachSchemeError, PleachTimeout

#: Calls of one list that are under way at a time.
CALLS_UNDER_WAY_MAX = 16


class Call(NamedTuple):
    """A collective with its memory: addresses with numbers of elements.

    The root of a message is the other rank.
    """

    collective: str
    data_type: str = "uint8"
    source: tuple[int, int] = (0, 0)
    target: tuple[int, int] = (0, 0)
    op: str | pleach.PremulSum | None = None
    root: int = 0


class Comm:
    """A group whose ranks meet in a store of torch. Calls block and release the GIL; threads may share it.

    The limit of a call says how long it waits for other ranks, in seconds; None takes the group's.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float | None) -> None:
        try:
            self._group = _native.join_in_store(store, rank, size, timeout=timeout_s, join_timeout=timeout_s)
        except pleach.Error as error:
            raise translated(error) from error

    def run(
        self,
        limit_s: float | None,
        collective: str,
        data_type: str = "uint8",
        source: tuple[int, int] = (0, 0),
        target: tuple[int, int] = (0, 0),
        op: str | pleach.PremulSum | None = None,
        root: int = 0,
        **others: Any,
    ) -> None:
        """Makes a call, as pleach's ``Group.start``, and returns when it has ended."""
        try:
            self._group.start(
                collective, data_type, op, *source, *target, root=root, timeout=limit_s, blocking=True, **others
            )
        except pleach.Error as error:
            raise translated(error) from error

    def run_all(self, limit_s: float | None, calls: Iterable[Call]) -> None:
        """Makes several calls, many of them under way at once, and returns when all have ended."""
        all_calls = list(calls)
        if len(all_calls) == 1:
            self.run(limit_s, *all_calls[0])
            return
        under_way: list[Any] = []
        error: PleachError | ValueError | None = None
        for call in all_calls:
            if len(under_way) == CALLS_UNDER_WAY_MAX:
                error = ended(under_way.pop(0)) or error
            try:
                under_way.append(self.start(limit_s, call))
            except (PleachError, ValueError) as raised:
                error = raised
                break
        # The memory of the caller is in use until each of them has ended.
        for pending in under_way:
            error = ended(pending) or error
        if error is not None:
            raise error

    def start(self, limit_s: float | None, call: Call, **others: Any) -> Any:
        """Starts a call and returns its Pending."""
        try:
            return self._group.start(
                call.collective, call.data_type, call.op, *call.source, *call.target, root=call.root,
                timeout=limit_s, **others,
            )
        except pleach.Error as error:
            raise translated(error) from error

    def register(self, nbytes: int) -> _native.Registered:
        """Returns so many bytes of registered memory."""
        try:
            return self._group.register(nbytes)
        except pleach.Error as error:
            raise translated(error) from error

    def partial(self, count: int, data_type: str, activation: str, options: dict[str, Any]) -> _native.Partial:
        """Returns rounds that average vectors of so many elements; all ranks call it alike."""
        return self._group.partial(count, data_type, activation, op="avg", **options)

    def abort(self) -> None:
        """Ends the work on all ranks."""
        self._group.abort()

    def close(self) -> None:
        """Leaves in order. A group that has failed is left too: its calls have raised the cause."""
        try:
            self._group.close()
        except pleach.Error:
            pass


def ended(pending: Any) -> PleachError | ValueError | None:
    """Waits for the end of a started call; returns the exception of a failure."""
    try:
        pending.wait()
    except pleach.Error as error:
        return translated(error)
    return None


def translated(error: pleach.Error) -> PleachError | ValueError:
    """Returns the exception of the backend for one of the package."""
    if isinstance(error, pleach.ArgumentError):
        return ValueError(str(error))
    kind = PleachTimeout if isinstance(error, TimeoutError) else PleachError
    names = ("kind", "rank", "found_by", "host", "operation", "waited_s")
    return kind(str(error), **{name: getattr(error, name) for name in names})


@contextlib.contextmanager
def translating() -> Iterator[None]:
    """Raises exceptions of the package as those of a training scheme."""
    try:
        yield
    except pleach.ArgumentError as error:
        raise PleachSchemeError(str(error), kind=error.kind, rank=error.rank) from error
    except pleach.Error as error:
        raise translated(error) from error
