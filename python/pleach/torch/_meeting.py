"""Where processes meet that make a group anew, with other members (``torch.distributed._reconfigure``).

Each process has a store of torch, which listens on a port of its own as long as the process has its group. The
handle of the process names that store. A group meets in the store of its rank 0, under keys that begin with the
number of the group and a digest of all handles. So processes that were told different things do not meet.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from ._errors import PleachError

#: How handles begin.
SCHEME = "pleach"


def own_address() -> str:
    """The address at which other hosts reach this one: as for ``pleachGetUniqueId``."""
    named = os.environ.get("PLEACH_INTERFACE", "")
    try:
        return str(ipaddress.ip_address(named))
    except ValueError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The address is one for documentation. No packet is sent; the system chooses a route.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Meeting:
    """The store of this process, and its handle."""

    def __init__(self) -> None:
        address = own_address()
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        #: Tells other processes where the store is. No two processes have the same one.
        self.handle = f"{SCHEME}|{address}|{self._store.port}|{secrets.token_hex(8)}"
        self._numbers: set[int] = set()

    def ranked(self, number: int, handles: set[str] | list[str]) -> tuple[list[str], int]:
        """The handles by rank, and the rank of this process.

        A set is ranked alike in all processes. Raises ValueError for members that cannot be.
        """
        members = handles if isinstance(handles, list) else sorted(handles)
        if number in self._numbers:
            raise ValueError(f"uuid {number} was used before; give a new one for each reconfiguration")
        if len(set(members)) != len(members):
            raise ValueError("a handle is in the list more than once")
        for handle in members:
            if len(handle.split("|")) != 4 or not handle.startswith(SCHEME):
                raise ValueError(f"{handle!r} is no handle of a group of pleach")
        if self.handle not in members:
            raise ValueError("the handle of this process is not among the handles")
        return members, members.index(self.handle)

    def store(self, number: int, members: list[str], rank: int, limit: timedelta) -> dist.Store:
        """The store in which these members meet. Raises PleachError if it is not reached."""
        self._numbers.add(number)
        digest = hashlib.sha256("\n".join(members).encode()).hexdigest()[:16]
        place = self._store
        if rank != 0:
            _, address, port, _ = members[0].split("|")
            try:
                place = dist.TCPStore(address, int(port), is_master=False, timeout=limit)
            except (RuntimeError, ValueError) as error:
                raise PleachError(f"the store of rank 0 at {address}:{port} is not reached: {error}", kind="join") from error
        return dist.PrefixStore(f"{SCHEME}-{number}-{digest}/", place)
