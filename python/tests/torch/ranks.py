"""Starts ranks as processes of their own, and collects what each of them says."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent.parent
LIMIT_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment():
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(script, size, *arguments):
    """Starts `size` ranks of a script of this folder."""
    port = free_port()
    ranks = []
    for rank in range(size):
        world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        variables = environment() | {name: str(value) for name, value in world.items()}
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return ranks


def finish(ranks, killed=()):
    """Returns the standard output of all ranks; fails if one that is not killed fails."""
    until = time.monotonic() + LIMIT_S
    outputs = []
    try:
        for number, rank in enumerate(ranks):
            output, errors = rank.communicate(timeout=max(1, until - time.monotonic()))
            expected = -signal.SIGKILL if number in killed else 0
            assert rank.returncode == expected, f"rank {number} ended with {rank.returncode}:\n{output}\n{errors[-6000:]}"
            outputs.append(output)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return outputs


def last_json(output):
    """Returns what the last line says that is JSON."""
    return json.loads([line for line in output.splitlines() if line.startswith(("{", "["))][-1])
