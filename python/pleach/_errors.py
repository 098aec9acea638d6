"""The exceptions, and which of them an error of the library becomes."""

from __future__ import annotations


class Error(Exception):
    """An error of pleach.

    ``kind`` says what happened in one word; the other fields are None where they have no meaning.
    """

    kind: str = "error"
    #: The rank that the error is about.
    rank: int | None = None
    #: The rank that has found it.
    found_by: int | None = None
    #: The host of ``rank``, counted from 0 among the hosts of the group.
    host: int | None = None
    #: The operation, as "all-reduce of 4 f32 (sum)".
    operation: str | None = None
    #: How long the finder had waited, in seconds.
    waited_s: float | None = None


class ArgumentError(Error, ValueError):
    """An argument of a call cannot be right: its type, shape, memory or rank. No peer was told."""


class JoinError(Error):
    """The ranks did not meet, or the environment does not say who this rank is."""


class ClosedError(Error, RuntimeError):
    """The group is closed."""


class ForkedError(Error, RuntimeError):
    """The group belongs to the process that this one was forked from."""


class GroupError(Error):
    """The group has failed, now or before. All ranks that survive raise the same cause."""


class LostError(GroupError):
    """A rank is gone: killed, crashed, cut off, or it has closed its group too early."""


class DeadlineError(GroupError, TimeoutError):
    """A deadline has passed while a rank waited for another one."""


class MismatchError(GroupError):
    """Ranks have made different calls: another collective, shape, element type or tag."""


class AbortedError(GroupError):
    """A rank has aborted the group."""


_CLASSES: dict[str, type[Error]] = {
    "argument": ArgumentError,
    "join": JoinError,
    "closed": ClosedError,
    "forked": ForkedError,
    "lost": LostError,
    "left": LostError,
    "timed-out": DeadlineError,
    "mismatch": MismatchError,
    "aborted": AbortedError,
    "compute": GroupError,
    "out-of-reach": GroupError,
    "protocol": GroupError,
}


def make(
    kind: str,
    text: str,
    rank: int | None,
    found_by: int | None,
    host: int | None,
    operation: str | None,
    waited_s: float | None,
) -> Error:
    """The exception of an error; called by the native module."""
    error = _CLASSES.get(kind, Error)(text)
    error.kind = kind
    error.rank = rank
    error.found_by = found_by
    error.host = host
    error.operation = operation
    error.waited_s = waited_s
    return error
