"""A group of the package, with the exceptions of the backend."""

import pleach
from pleach import _native

from ._errors import PleachError, PleachTimeout


class Comm:
    """A group whose ranks meet in a store of torch. Calls block and release the GIL; threads may share it."""

    def __init__(self, store, rank, size, timeout_s):
        #: How long a call waits for other ranks, in seconds; None takes the time of the group.
        self.timeout_s = timeout_s
        try:
            self._group = _native.join_in_store(store, rank, size, timeout=timeout_s, join_timeout=timeout_s)
        except pleach.Error as error:
            raise translated(error) from error

    def call(self, collective, data_type="uint8", source=(0, 0), target=(0, 0), op=None, **others):
        """Makes a call, as pleach's ``Group.start``; memory is an address with a number of elements."""
        try:
            self._group.start(
                collective, data_type, op, *source, *target, timeout=self.timeout_s, blocking=True, **others
            )
        except pleach.Error as error:
            raise translated(error) from error

    def abort(self):
        """Ends the work on all ranks."""
        self._group.abort()

    def close(self):
        """Leaves in order. A group that has failed is left too: its calls have raised the cause."""
        try:
            self._group.close()
        except pleach.Error:
            pass


def translated(error):
    """Returns the exception of the backend for one of the package."""
    if isinstance(error, pleach.ArgumentError):
        return ValueError(str(error))
    kind = PleachTimeout if isinstance(error, TimeoutError) else PleachError
    names = ("kind", "rank", "found_by", "host", "operation", "waited_s")
    return kind(str(error), **{name: getattr(error, name) for name in names})
