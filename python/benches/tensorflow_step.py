"""A step of a TensorFlow program with one tensor that crosses from one task to another, by "grpc" and
by "grpc+pleach", and an all-reduce of two tasks by RING.

    python python/benches/tensorflow_step.py [--sizes 65536,1048576,...] [--seconds 10] [--json]
        [--write-docs]

Both protocols run at the same time in processes of their own and take turns, so that what else the
machine does meets both. Figures are medians in microseconds. The time of a step without a crossing
tensor, TensorFlow's own control, is the floor of both. `--write-docs` writes the table of
`docs/tensorflow.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensorflow.md"

PROTOCOLS = ("grpc", "grpc+pleach")
SIZES = (256, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
RING_BYTES = 16 << 20
# Steps that a task makes in one turn, and at most so many seconds.
STEPS, TURN_S = 25, 0.6
WARM_UP = 5


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: a cluster of TensorFlow names all of them at its start."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def imported(protocol: str):
    import tensorflow as tf

    if protocol != "grpc":
        import pleach.tensorflow  # noqa: F401
    return tf


def serve(protocol: str, ports: list[str]) -> None:
    """The task that sends."""
    tf = imported(protocol)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    server = tf.distribute.Server(cluster, job_name="worker", task_index=1, protocol=protocol)
    print("ready", flush=True)
    server.join()


def step(protocol: str, ports: list[str]) -> None:
    """The task that receives: measures as many steps as each line of its input says."""
    tf = imported(protocol)
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    server = tf.distribute.Server(cluster, job_name="worker", task_index=0, protocol=protocol)
    runs = {}
    for line in sys.stdin:
        size = int(line)
        if size not in runs:
            with tf.Graph().as_default():
                with tf.device("/job:worker/task:1"):
                    count = max(size // 4, 1)
                    sent = v1.get_variable("sent", initializer=tf.ones([count]), use_resource=True)
                    crossing = sent.read_value() if size else v1.no_op()
                with tf.device("/job:worker/task:0"):
                    # An element of what has crossed, so that it must cross.
                    wanted = crossing[count - 1] if size else v1.no_op()
                session = v1.Session(server.target)
                session.run(v1.global_variables_initializer())
                runs[size] = session.make_callable(v1.group(wanted, crossing) if not size else wanted)
            for _ in range(WARM_UP):
                assert runs[size]() in (1.0, None)
        print(json.dumps(timed(runs[size])), flush=True)
    os._exit(0)


def ring(protocol: str, ports: list[str], index: str) -> None:
    """One of two workers that reduce."""
    workers = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    task = {"type": "worker", "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": workers, "task": task, "rpc_layer": protocol})
    tf = imported(protocol)
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    )

    @tf.function
    def reduce():
        def of_replica():
            return tf.distribute.get_replica_context().all_reduce("sum", tf.ones([RING_BYTES // 4]))

        return strategy.run(of_replica)

    # Both workers make the same number of calls.
    for _ in range(WARM_UP):
        reduce()
    for _line in sys.stdin:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            float(strategy.experimental_local_results(reduce())[0][0])
            times.append((time.perf_counter() - begun) * 1e6)
        print(json.dumps(times), flush=True)
    os._exit(0)


def when() -> str:
    """When and where figures are measured, as a sentence."""
    day = datetime.now(timezone.utc).strftime("%-d %B %Y")
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"TensorFlow {installed()}, {day}, load before it {load}."


def installed() -> str:
    """The version of TensorFlow, whose package has several names."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-intel"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return "of this environment"


def write(name: str, text: str) -> None:
    """Writes what stands between the page's two lines of this name."""
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def size_name(size: int) -> str:
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if size >> power:
            return f"{size >> power} {unit}"
    return f"{size} B" if size else "nothing"


def table(rows: list[tuple[str, dict[str, float]]]) -> str:
    """The rows of Markdown."""
    lines = ["| what crosses | `grpc` | `grpc+pleach` | times as fast |", "|:--|--:|--:|--:|"]
    for name, found in rows:
        before, now = (found[protocol] for protocol in PROTOCOLS)
        lines.append(f"| {name} | {before:,.0f} | {now:,.0f} | {before / now:.2f} |")
    return "\n".join(lines)


def timed(call) -> list[float]:
    times: list[float] = []
    until = time.perf_counter() + TURN_S
    while len(times) < STEPS and time.perf_counter() < until or len(times) < 3:
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def child(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def ask(process: subprocess.Popen, line: object) -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen) -> list[float]:
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a task of the benchmark has ended; run it by hand to see why")
    return json.loads(line)


def measure_steps(sizes: list[int], seconds: float) -> dict[int, dict[str, float]]:
    tasks, servers = {}, []
    try:
        for protocol in PROTOCOLS:
            ports = [str(port) for port in free_ports(2)]
            servers.append(child("serve", protocol, *ports))
            servers[-1].stdout.readline()
            tasks[protocol] = child("step", protocol, *ports)
        found = {}
        for size in sizes:
            times: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
            until = time.monotonic() + seconds
            rounds = 0
            while time.monotonic() < until or rounds < 3:
                for protocol in PROTOCOLS if rounds % 2 else reversed(PROTOCOLS):
                    ask(tasks[protocol], size)
                    times[protocol] += answer(tasks[protocol])
                rounds += 1
            found[size] = {protocol: statistics.median(times[protocol]) for protocol in PROTOCOLS}
        return found
    finally:
        for process in [*servers, *tasks.values()]:
            process.kill()
            process.wait()


def measure_ring(seconds: float) -> dict[str, float]:
    workers = {}
    try:
        for protocol in PROTOCOLS:
            ports = [str(port) for port in free_ports(2)]
            workers[protocol] = [child("ring", protocol, *ports, index) for index in ("0", "1")]
        times: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
        until = None
        rounds = 0
        while until is None or time.monotonic() < until or rounds < 4:
            for protocol in PROTOCOLS:
                for worker in workers[protocol]:
                    ask(worker, "go")
                of_both = [answer(worker) for worker in workers[protocol]]
                times[protocol] += of_both[0]
            rounds += 1
            # The first round has waited for the start of all workers.
            until = until or time.monotonic() + seconds
        return {protocol: statistics.median(times[protocol][3:]) for protocol in PROTOCOLS}
    finally:
        for process in sum(workers.values(), []):
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, (0, *SIZES))), help="bytes; 0 is no tensor")
    parser.add_argument("--seconds", type=float, default=10, help="of each size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    begun = when()
    sizes = [int(size) for size in options.sizes.split(",")]
    found = measure_steps(sizes, options.seconds)
    ring = measure_ring(options.seconds)
    if options.json:
        print(json.dumps({**found, f"RING {RING_BYTES}": ring}))
        return
    rows = [(size_name(size), of_size) for size, of_size in found.items()]
    rows.append((f"all-reduce of {size_name(RING_BYTES)} by RING, 2 workers", ring))
    written = f"{begun} Microseconds.\n\n{table(rows)}"
    print(written)
    if options.write_docs:
        write("measured", written)


if __name__ == "__main__":
    roles = {"serve": serve, "step": step, "ring": ring}
    if len(sys.argv) > 2 and sys.argv[1] in roles:
        protocol, *rest = sys.argv[2:]
        if sys.argv[1] == "ring":
            ring(protocol, rest[:2], rest[2])
        else:
            roles[sys.argv[1]](protocol, rest)
    else:
        main()
