"""Tasks of a TensorFlow cluster as processes that run what a test sends them."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading

PACKAGE = pathlib.Path(__file__).parents[2]
#: Longer than any answer takes on a busy machine, in seconds.
LIMIT_S = 120

#: What each task begins with: it runs the texts of its input, and answers with `answer` of each.
PROGRAM = """
import json, os, sys, traceback
import tensorflow as tf
protocol, index = sys.argv[1], int(sys.argv[2])
addresses = sys.argv[3:]
cluster = {"worker": addresses}
if protocol != "grpc":
    import pleach.tensorflow
    counts = pleach.tensorflow.counts
v1 = tf.compat.v1
here, there = f"/job:worker/task:{index}", f"/job:worker/task:{1 - index}"
names = globals()

def session_of(server, **options):
    # As the graph is written: what crosses is not computed on either side before.
    config = v1.ConfigProto(**options)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return v1.Session(server.target, config=config)

def serve():
    return tf.distribute.Server(cluster, job_name="worker", task_index=index, protocol=protocol)

for line in sys.stdin:
    answer = error = None
    try:
        names["answer"] = None
        exec(json.loads(line), names)
        answer = names["answer"]
    except Exception as raised:
        error = [type(raised).__name__, str(raised), traceback.format_exc()]
    print("answer", json.dumps([answer, error]), flush=True)
os._exit(0)
"""


class TaskError(Exception):
    """A text has raised: `kind` is the name of the exception, and `text` is its message."""

    def __init__(self, kind, text, trace):
        super().__init__(trace)
        self.kind, self.text = kind, text


class Task:
    """A process of a cluster."""

    def __init__(self, protocol, index, addresses, **variables):
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
        self.address = addresses[index]
        self.log = []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, protocol, str(index), *addresses],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
        )
        self.answers = queue.Queue()
        for work in (self._read_answers, self._read_log):
            threading.Thread(target=work, daemon=True).start()

    def _read_answers(self):
        for line in self.process.stdout:
            if line.startswith("answer "):
                self.answers.put(json.loads(line.removeprefix("answer ")))
        self.answers.put(None)

    def _read_log(self):
        self.log.extend(self.process.stderr)

    def send(self, text):
        """Has a text run; `take` waits for its end."""
        self.process.stdin.write(json.dumps(textwrap.dedent(text)) + "\n")
        self.process.stdin.flush()

    def take(self, limit=LIMIT_S):
        """The answer of the oldest text that was sent and not taken."""
        found = self.answers.get(timeout=limit)
        if found is None:
            raise AssertionError("the task has ended: " + "".join(self.log[-30:]))
        answer, error = found
        if error is not None:
            raise TaskError(*error)
        return answer

    def run(self, text):
        self.send(text)
        return self.take()

    def stop(self):
        """Has it do nothing, so that it answers nobody, until it is killed."""
        self.process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def slowed(self):
        """Has it run in short turns only: for 5 of 25 ms."""
        ended = threading.Event()

        def turns():
            while not ended.is_set():
                self.process.send_signal(signal.SIGSTOP)
                ended.wait(0.02)
                self.process.send_signal(signal.SIGCONT)
                ended.wait(0.005)

        thread = threading.Thread(target=turns)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def kill(self):
        self.process.kill()
        self.process.wait()


class Tasks:
    """Starts tasks, and ends all of them."""

    def __init__(self):
        self.started = []
        self.sockets = []

    def addresses(self, count):
        """Addresses for a cluster, which names them before its servers listen.

        The kernel chooses the ports. A socket that is bound and does not listen keeps each from
        others; a server may listen there, as both say SO_REUSEADDR.
        """
        found = []
        for _ in range(count):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
            self.sockets.append(one)
            found.append(f"127.0.0.1:{one.getsockname()[1]}")
        return found

    def start(self, protocol, index, addresses, **variables):
        self.started.append(Task(protocol, index, addresses, **variables))
        return self.started[-1]

    def end(self):
        for task in self.started:
            task.kill()
        for one in self.sockets:
            one.close()
