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
    """The group, or the endpoint, is closed."""


class ForkedError(Error, RuntimeError):
    """The group, or the endpoint, belongs to the process that this one was forked from."""


class LossError(Error, ArithmeticError):
    """The loss of a rank is not finite. The training has ended on all ranks."""


class NothingGivenError(Error):
    """A round of a partial all-reduce has no result: all ranks have abstained."""


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


class ChangedError(GroupError):
    """The members of the session have changed: the step is repeated, and nobody is at fault."""


class SessionError(Error):
    """The session does not go on, or the step failed too often."""


class ExpelledError(SessionError):
    """The others go on without this process: it was stopped, or out of their reach."""

    #: How they go on: a ``pleach.Change``.
    change: object = None


class NoQuorumError(SessionError):
    """Too few members answer to agree on who goes on."""


class TooFewError(SessionError):
    """There are fewer members than a step needs, for too long. The session still works."""


class StepError(SessionError):
    """The step failed again and again, here (then its exception is the cause) or on another member.
    The session still works."""


class LeftError(SessionError):
    """This process has left the job, as it was told to."""


class DivergedError(SessionError):
    """A state is not the same on all members."""

    #: The seats of the members that differ from most; of all, where there is no majority.
    seats: list[int] | None = None


class ExchangeError(Error):
    """A tensor was not sent or received. ``kind`` is timed-out, aborted, not-found, unavailable,
    exhausted (a limit is reached), cancelled, no-regions or system.
    """

    #: The step of the tensor's key.
    step: int | None = None
    #: The name of the tensor's key.
    name: str | None = None
    #: The address of the peer that was asked.
    peer: str | None = None


class TensorTimeoutError(ExchangeError, TimeoutError):
    """The tensor did not come in time, or there was no room to send it."""


class TensorAbortedError(ExchangeError):
    """The step was aborted or cleaned up, or the peer was restarted: connect anew."""


class TensorNotFoundError(ExchangeError, LookupError):
    """The peer publishes the step, and there is no tensor of this name in it."""


class PeerUnavailableError(ExchangeError, ConnectionError):
    """The peer is not reached, is lost, or has another secret; or the endpoint was closed."""


_CLASSES: dict[str, type[Error]] = {
    "argument": ArgumentError,
    "join": JoinError,
    "closed": ClosedError,
    "forked": ForkedError,
    "loss": LossError,
    "nothing-given": NothingGivenError,
    "lost": LostError,
    "left": LostError,
    "timed-out": DeadlineError,
    "mismatch": MismatchError,
    "aborted": AbortedError,
    "compute": GroupError,
    "out-of-reach": GroupError,
    "protocol": GroupError,
    "changed": ChangedError,
    "session": SessionError,
    "states-differ": SessionError,
    "states-lost": SessionError,
    "expelled": ExpelledError,
    "no-quorum": NoQuorumError,
    "too-few": TooFewError,
    "step": StepError,
    "left-session": LeftError,
    "diverged": DivergedError,
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


_EXCHANGE_CLASSES: dict[str, type[ExchangeError]] = {
    "timed-out": TensorTimeoutError,
    "aborted": TensorAbortedError,
    "not-found": TensorNotFoundError,
    "unavailable": PeerUnavailableError,
}


def make_exchange(
    kind: str,
    text: str,
    step: int | None,
    name: str | None,
    peer: str | None,
    waited_s: float | None,
) -> ExchangeError:
    """The exception of an error of the tensor exchange; called by the native module."""
    error = _EXCHANGE_CLASSES.get(kind, ExchangeError)(text)
    error.kind = kind
    error.step = step
    error.name = name
    error.peer = peer
    error.waited_s = waited_s
    return error
