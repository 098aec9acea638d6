"""A member of a job whose processes come and go, by torchft: `cargo bench --bench elastic` starts it
beside members of its own, and both say the same lines.

    python torchft_member.py lighthouse|steps|overhead [tuned] [compute=US] [state=MIB]

The variables PLEACH_RANK and PLEACH_RENDEZVOUS=file://FOLDER say which member it is, and where the
lighthouse, which forms the quorums, says its address. Each member is a replica of one process, whose
calls are Gloo's. Without `tuned` every time is torchft's default: a replica is dead when the
lighthouse has not heard of it for 5 s. With it that takes 200 ms; with 100 ms live replicas were
taken for dead on a loaded machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

ELEMENTS = 1024
STEP_NS = 2_000_000
# Results before a member says that it is ready.
WARM_UP = 20
STEPS_IN_TURN, TURNS = 50, 10
# How long the lighthouse's address may take to come.
LIGHTHOUSE_S = 60
TUNED_LIGHTHOUSE = {"heartbeat_timeout_ms": 200, "quorum_tick_ms": 5, "join_timeout_ms": 100}
TUNED_MEMBER = {"heartbeat_interval": timedelta(milliseconds=20)}


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def say(word: str, *numbers: int) -> None:
    print(word, *numbers, flush=True)


def work(nanoseconds: int) -> None:
    until = now() + nanoseconds
    while now() < until:
        pass


def lighthouse(folder: Path, is_tuned: bool) -> None:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **(TUNED_LIGHTHOUSE if is_tuned else {}))
    port = server.address().rsplit(":", 1)[1]
    said = folder / "said"
    said.write_text(f"http://127.0.0.1:{port}")
    said.rename(folder / "lighthouse")
    threading.Event().wait()


def address(folder: Path) -> str:
    until = time.monotonic() + LIGHTHOUSE_S
    while not (folder / "lighthouse").exists():
        if time.monotonic() > until:
            raise SystemExit("error: the lighthouse did not say its address")
        time.sleep(0.01)
    return (folder / "lighthouse").read_text()


class Member:
    """A replica, with the bytes that one that joins reads."""

    def __init__(self, folder: Path, is_tuned: bool, state_mib: int) -> None:
        self.state = torch.full((state_mib << 20,), 7, dtype=torch.uint8)
        self.loaded = None
        at = address(folder)
        say("joins", now())
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rank = os.environ["PLEACH_RANK"]
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=self.load,
            state_dict=lambda: {"state": self.state},
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=at,
            # A process that joins may be told the number of another one.
            replica_id=f"{rank}-{os.getpid()}",
            hostname="127.0.0.1",
            use_async_quorum=False,
            **(TUNED_MEMBER if is_tuned else {}),
        )

    def load(self, state: dict) -> None:
        self.state = state["state"]
        self.loaded = now()

    def attempt(self, compute: int) -> int | None:
        """Makes a step; when its result came, if it counts."""
        self.manager.start_quorum()
        work(compute)
        data = torch.ones(ELEMENTS)
        self.manager.allreduce(data).wait()
        result = now()
        if not self.manager.should_commit():
            return None
        if not bool((data == 1.0).all()):
            raise SystemExit("error: the mean of ones is not one")
        return result


def steps(member: Member, compute: int) -> None:
    """Makes steps for ever, and says when it has the first result among other members."""
    made, before, last, begun = 0, 0, now(), now()
    while True:
        result = member.attempt(compute)
        if result is None:
            continue
        if member.loaded is not None:
            say("healed", member.loaded - begun)
            member.loaded = None
        members = member.manager.num_participants()
        if members != before:
            before = members
            say("change", members, result, result - last)
        made += 1
        if made == WARM_UP:
            say("ready")
        last = result


def overhead(member: Member, folder: Path, size: int) -> None:
    """Medians of a step of a loop on a group of Gloo, and of the same loop by torchft."""
    rank = int(os.environ["PLEACH_RANK"])
    torch.distributed.init_process_group("gloo", f"file://{folder}/gloo", rank=rank, world_size=size)
    times: dict[str, list[int]] = {"group": [], "session": []}
    # The first quorums may be of fewer members.
    while member.manager.num_participants() < size:
        member.attempt(0)
    for turn in range(TURNS + 1):
        torch.distributed.barrier()
        for _ in range(STEPS_IN_TURN):
            begun = now()
            work(STEP_NS)
            torch.distributed.all_reduce(torch.ones(ELEMENTS))
            times["group"].append(now() - begun)
        torch.distributed.barrier()
        for _ in range(STEPS_IN_TURN):
            begun = now()
            if member.attempt(STEP_NS) is None:
                raise SystemExit("error: a member was lost")
            times["session"].append(now() - begun)
        if turn == 0:
            times = {name: [] for name in times}
    for name, found in times.items():
        say(name, int(statistics.median(found)))
    torch.distributed.barrier()


def main() -> None:
    # The bench holds the other end, also when it is killed.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)
    experiment, *settings = sys.argv[1:]
    named = dict(setting.split("=") for setting in settings if "=" in setting)
    folder = Path(os.environ["PLEACH_RENDEZVOUS"].removeprefix("file://"))
    is_tuned = "tuned" in settings
    if experiment == "lighthouse":
        return lighthouse(folder, is_tuned)
    member = Member(folder, is_tuned, int(named.get("state", 0)))
    if experiment == "steps":
        return steps(member, int(named.get("compute", 0)) * 1000)
    overhead(member, folder, int(os.environ["PLEACH_WORLD_SIZE"]))
    os._exit(0)


main()
