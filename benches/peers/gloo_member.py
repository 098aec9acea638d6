"""A member of a job that goes on without the ranks that are killed, by the `_reconfigure` of
`torch.distributed` with Gloo: `cargo bench --bench elastic` starts it beside members of its own,
and both say the same lines.

    python gloo_member.py lighthouse|steps left=N

The variables PLEACH_RANK, PLEACH_WORLD_SIZE and PLEACH_RENDEZVOUS=file://FOLDER say which member it
is, and where the lighthouse says its address. Who is in, and that all agree on it, is the caller's
matter by that interface. Here the lighthouse is told beforehand how many will be left, and says who
they are when all have come: nothing is found out, and nobody is waited for that is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ELEMENTS = 1024
# Results before a member says that it is ready.
WARM_UP = 20
# How long anything may take.
LIMIT = timedelta(seconds=60)
# How long a call may take. A member whose call waits for others than the one that was killed learns
# of it by this alone: they do not go on with the call, and Gloo does not tell.
CALL_LIMIT = timedelta(seconds=1)
# How often the lighthouse looks.
POLL_S = 0.0005


def say(word: str, *numbers: int) -> None:
    print(word, *numbers, flush=True)


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def lighthouse(folder: Path, size: int, left: int) -> None:
    """Serves the store, and says who the members of each round are."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    said = folder / "said"
    said.write_text(str(store.port))
    said.rename(folder / "lighthouse")
    for turn, members in enumerate([size, left]):
        while store.add(f"{turn}/count", 0) < members:
            time.sleep(POLL_S)
        handles = [store.get(f"{turn}/{place}").decode() for place in range(members)]
        store.set(f"{turn}/members", json.dumps(handles))
    threading.Event().wait()


def reconfigure(store: dist.Store, turn: int) -> int:
    """Meets the other members of a round; how many there are."""
    place = store.add(f"{turn}/count", 1) - 1
    store.set(f"{turn}/{place}", dist._get_reconfigure_handle())
    handles = json.loads(store.get(f"{turn}/members"))
    dist._reconfigure(uuid=turn + 1, handles=handles, timeout=LIMIT).wait()
    return len(handles)


def steps(folder: Path) -> None:
    """Makes steps for ever, and says when it has the first result among other members."""
    rank, size = int(os.environ["PLEACH_RANK"]), int(os.environ["PLEACH_WORLD_SIZE"])
    until = time.monotonic() + LIMIT.total_seconds()
    while not (folder / "lighthouse").exists():
        if time.monotonic() > until:
            raise SystemExit("error: the lighthouse did not say its address")
        time.sleep(0.01)
    port = int((folder / "lighthouse").read_text())
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=size,
        timeout=CALL_LIMIT,
        enable_reconfigure=True,
    )
    if not dist._supports_reconfigure():
        raise SystemExit("error: this torch has no Gloo that takes other members")
    turn, made, before, last = 0, 0, 0, now()
    members = reconfigure(store, turn)
    while True:
        data = torch.ones(ELEMENTS)
        try:
            dist.all_reduce(data)
        except RuntimeError:
            turn += 1
            members = reconfigure(store, turn)
            continue
        result = now()
        if not bool((data == float(members)).all()):
            raise SystemExit("error: the sum of ones is not their number")
        if members != before:
            before = members
            say("change", members, result, result - last)
        made += 1
        if made == WARM_UP:
            say("ready")
        last = result


def main() -> None:
    # The bench holds the other end, also when it is killed.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    folder = Path(os.environ["PLEACH_RENDEZVOUS"].removeprefix("file://"))
    experiment, left = sys.argv[1], int(sys.argv[2].removeprefix("left="))
    if experiment == "lighthouse":
        return lighthouse(folder, int(os.environ["PLEACH_WORLD_SIZE"]), left)
    steps(folder)


main()
