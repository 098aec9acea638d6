"""The exceptions of the backend."""

from __future__ import annotations

import torch.distributed as dist


class PleachError(dist.DistBackendError):
    """A call failed.

    ``kind`` is the kind of the failure, ``rank`` the rank that the failure is about, ``found_by`` the
    rank that found the failure, ``host`` the number of the host of ``rank``, ``operation`` the
    operation of the finder, ``waited_s`` how long the finder waited. A field is None where it does
    not apply.
    """

    def __init__(
        self,
        text: str,
        *,
        kind: str | None = None,
        rank: int | None = None,
        found_by: int | None = None,
        host: int | None = None,
        operation: str | None = None,
        waited_s: float | None = None,
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.rank = rank
        self.found_by = found_by
        self.host = host
        self.operation = operation
        self.waited_s = waited_s


class PleachTimeout(PleachError, TimeoutError):
    """A deadline passed."""


class PleachUnsupported(PleachError, TypeError):
    """The backend has no such operation for these arguments; nothing was sent."""


class PleachSchemeError(PleachError, ValueError):
    """A training scheme cannot be attached so, or something was changed under it; the text says what to do."""
