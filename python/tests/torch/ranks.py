"""Starts ranks as processes of their own, and collects what each of them says."""

import atexit
import importlib.metadata
import json
import os
import pathlib
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent.parent
#: Of a test, in seconds; `.ci/nightly` gives longer runs more.
LIMIT_S = int(os.environ.get("PLEACH_TEST_LIMIT_S", "120"))
#: How long a call waits, in seconds, in a run in which a rank stops.
LIMIT_OF_STOP_S = 8


#: Names of ports that this process has taken.
_taken = []


def free_port():
    """Returns a port that the kernel gives to nobody, and no other test takes.

    A port that the kernel gave may be given to another socket before a rank listens there.
    """
    for port in random.sample(range(10_000, 30_000), 1000):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0pleach-test-port-{port}")
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _taken.append(name)  # until this process ends
        return port
    raise RuntimeError("no port from 10000 to 30000 is free")


def installed():
    """Returns a folder in which Python finds the entry points of the package, as where it is installed."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"pleach-entry-points-{os.getpid()}"
    about = folder / "pleach-0.dist-info"
    if not about.exists():
        about.mkdir(parents=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pleach\nVersion: 0\n")
        groups = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
        lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in points.items()) for group, points in groups.items()]
        (about / "entry_points.txt").write_text("\n".join(lines))
    return folder


def environment():
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(installed()), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _become(script, arguments, variables):
    """Makes of this child of the test, which has imported torch, a rank that runs a script.

    A rank that imports torch by itself takes three seconds of processor time to begin.
    """
    status = 1
    try:
        # Whoever has started it goes on when its other ends are closed. Their numbers stay taken:
        # files of the test may still be written when Python lets go of them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                os.dup2(nothing, number)
        atexit._clear()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as an interpreter begins
        os.environ.clear()
        os.environ.update(variables)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))
        sys.argv = [str(script), *arguments]
        sys.path[:0] = [str(HERE), *variables["PYTHONPATH"].split(os.pathsep)]
        import torch

        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        # As importing torch does.
        for point in importlib.metadata.entry_points(group="torch.backends"):
            point.load()()
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(script, size, *arguments, within=None, **others):
    """Starts `size` ranks of a script of this folder, or of `-c` and a text in an interpreter of their own.

    within: of each rank what goes before its command; others: further variables.
    """
    port = free_port()
    ranks = []
    for rank in range(size):
        world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [*(within[rank] if within else ()), sys.executable, script, *map(str, arguments)]
        variables = environment() | {name: str(value) for name, value in (world | others).items()}
        # What becomes a rank never comes to the command.
        become = None if script == "-c" else lambda: _become(HERE / script, command[2:], variables)  # noqa: B023
        ranks.append(
            subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=become)
        )
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


def leave(has_gloo):
    """Destroys the groups of this rank, as the last step of its script.

    has_gloo: whether a group was gloo's. A thread of gloo may let go of a tensor after its group is
    destroyed. If Python's end has begun by then, torch aborts the process. So the process ends here.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    if has_gloo:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def last_json(output):
    """Returns what the last line says that is JSON."""
    return json.loads([line for line in output.splitlines() if line.startswith(("{", "["))][-1])
