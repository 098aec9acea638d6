"""Two torchruns, a worker each, in one session: a worker that is killed is started anew and joins."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch.distributed.run")

from ranks import LIMIT_S, environment, free_port  # noqa: E402

#: Makes steps until the worker that was started anew has made some with the other. Says in files of
#: its own who it is when both have made some, and what it has come to at the end.
WORKER = """
import hashlib, json, os, pathlib, sys
import numpy as np, pleach

folder, replica = pathlib.Path(sys.argv[1]), sys.argv[2]
restarts, retries, own = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0, 0

def say(name, **what):
    (folder / f"new{replica}").write_text(json.dumps(what))
    (folder / f"new{replica}").rename(folder / f"{name}{replica}.json")

with pleach.Session(1, 3, program="replicas") as session:
    weights = session.state("weights", 10_000, "float32")
    gradient, enough = session.buffer(10_000, "float32"), session.buffer(1, "int32")
    def attempt(group, step):
        global members
        # What a lost step, or a state that was not read, would change in all that follows.
        gradient[:] = np.sin(weights.array * 3 + step + session.seat)
        enough[:] = restarts and own >= 10
        group.all_reduce(gradient, "avg")
        group.all_reduce(enough, "max")
        members = group.world_size
    while True:
        verdict = session.attempt(attempt)
        if not verdict:
            retries += 1
            continue
        weights.array[:] -= np.float32(0.1) * gradient
        own += members == 2
        if own == 5 and members == 2:
            say("works", process=os.getpid(), restarts=restarts)
        if enough[0]:
            break
    step, digest = session.step, hashlib.sha256(weights.array.tobytes()).hexdigest()
say("done", restarts=restarts, retries=retries, step=step, members=members, digest=digest)
"""


def torchrun(folder, replica):
    script = folder / "worker.py"
    run = ["--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1", f"--master-port={free_port()}"]
    # A replica is a world of its own to its torchrun: the first one begins the job.
    variables = environment() | {
        "PLEACH_RENDEZVOUS": f"file://{folder / 'job'}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the workers have no group of torch
    }
    command = [sys.executable, "-m", "torch.distributed.run", *run, str(script), str(folder), str(replica)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_worker_that_torchrun_starts_anew_joins_the_session_of_the_other(tmp_path):
    (tmp_path / "job").mkdir(mode=0o700)
    (tmp_path / "worker.py").write_text(WORKER)
    replicas = [torchrun(tmp_path, replica) for replica in range(2)]
    until = time.monotonic() + LIMIT_S
    try:
        works = tmp_path / "works1.json"
        while not works.exists() and all(replica.poll() is None for replica in replicas) and time.monotonic() < until:
            time.sleep(0.02)
        if works.exists():
            os.kill(json.loads(works.read_text())["process"], signal.SIGKILL)
        outputs = [replica.communicate(timeout=max(1, until - time.monotonic()))[0] for replica in replicas]
        assert [replica.returncode for replica in replicas] == [0, 0], "\n".join(outputs)
    finally:
        for replica in replicas:
            replica.terminate()  # it ends its worker
            replica.communicate()
    other, killed = [json.loads((tmp_path / f"done{replica}.json").read_text()) for replica in range(2)]
    assert (killed["restarts"], other["restarts"]) == (1, 0), (killed, other)
    # The death costs one step at most, and the one who comes again costs none.
    assert killed["retries"] == 0 and other["retries"] <= 1, (killed, other)
    assert killed["members"] == other["members"] == 2, (killed, other)
    assert (killed["step"], killed["digest"]) == (other["step"], other["digest"]), (killed, other)
