"""Waiting for an operation in an event loop."""

from __future__ import annotations

from typing import Any

from pleach._native import Pending, PendingTensor

#: Seconds between two looks, the first and the longest.
_INTERVALS = (50e-6, 2e-3)


async def until_done(pending: Pending | PendingTensor) -> Any:
    """The output of the operation. The operation goes on when the task is cancelled."""
    import asyncio

    interval = _INTERVALS[0]
    await asyncio.sleep(0)
    while not pending.done():
        await asyncio.sleep(interval)
        interval = min(interval * 2, _INTERVALS[1])
    return pending.wait()


async def until_received(pending: PendingTensor) -> Any:
    """The tensor. The receive is cancelled with the task."""
    try:
        return await until_done(pending)
    except BaseException:
        pending.cancel()
        raise
