"""The protocol "grpc+pleach" beside "grpc", in an unmodified TensorFlow."""

import ctypes
import fcntl
import os
import pathlib
import subprocess
import sys
import time

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed here")

import grpc  # noqa: E402

from receiver import Receiver  # noqa: E402
from tasks import PACKAGE, TaskError, Tasks  # noqa: E402

#: How soon a receive from a task that was killed must fail, in seconds, on a machine that is busy with other
#: things. It has no deadline.
KILLED_LIMIT_S = 20


@pytest.fixture
def tasks():
    made = Tasks()
    yield made
    made.end()


@pytest.fixture(scope="module")
def pairs():
    """Pairs of tasks, started at once: importing TensorFlow takes longer than most tests."""
    made = Tasks()
    protocols = {
        "grpc": ("grpc", "grpc"),
        "both": ("grpc+pleach", "grpc+pleach"),
        "mixed": ("grpc+pleach", "grpc"),
        "tcp": ("grpc+pleach", "grpc+pleach"),
    }
    started = {}
    for name, of_tasks in protocols.items():
        addresses = made.addresses(2)
        variables = {"PLEACH_FABRIC": "tcp"} if name == "tcp" else {}
        started[name] = [
            made.start(protocol, index, addresses, **variables) for index, protocol in enumerate(of_tasks)
        ]
    for task in sum(started.values(), []):
        task.send("server = serve()")
    for task in sum(started.values(), []):
        task.take()
    yield started
    made.end()


#: Programs of which each crosses tasks in both directions. `results` is what they have computed.
PROGRAMS = """
import hashlib
import numpy as np

def digest(value):
    array = np.asarray(value)
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return [str(array.dtype), list(array.shape), hashlib.sha256(content).hexdigest()]

def crossing(make, use=tf.identity):
    with tf.Graph().as_default():
        with tf.device(there):
            sent = make()
        with tf.device(here):
            kept = use(sent)
        with tf.device(there):
            back = tf.identity(kept)
        with session_of(server) as session:
            return [digest(value) for _ in range(3) for value in session.run([kept, back])]

def numbers(dtype, shape):
    count = int(np.prod(shape))
    return lambda: tf.reshape(tf.cast(tf.range(count) % 251, dtype), shape) * tf.cast(3, dtype)

def looped():
    # Tensors of each iteration cross, and dead ones at the end.
    def body(number, total):
        with tf.device(there):
            grown = total + tf.cast(number, tf.float32)
        with tf.device(here):
            return number + 1, grown * 2.0
    return v1.while_loop(lambda number, _: number < 4, body, [tf.constant(0), tf.ones([150_000])])[1]

def branches():
    with tf.device(there):
        values = tf.range(160_000, dtype=tf.float32)
        is_large = tf.reduce_sum(values) > 10
    def first():
        with tf.device(here):
            return values + 1
    def second():
        with tf.device(here):
            return values - 1
    v1.disable_control_flow_v2()
    chosen = v1.cond(is_large, first, second)
    v1.enable_control_flow_v2()
    return chosen

results = {}
for dtype in ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "complex64"):
    results[dtype] = crossing(numbers(dtype, [3, 300_000]))
results["bool"] = crossing(lambda: tf.cast(tf.range(600_000) % 3, tf.bool))
results["scalar"] = crossing(lambda: tf.constant(7.0))
results["empty"] = crossing(lambda: tf.zeros([0, 5]))
results["dimensions"] = crossing(numbers("float32", [2] * 9 + [300]))
results["large"] = crossing(numbers("float32", [4 << 20]))
results["string"] = crossing(lambda: tf.strings.as_string(tf.range(50_000)))
results["in place"] = crossing(numbers("float32", [200_000]), lambda value: tf.nn.relu(value + 1) - 1)
results["a part"] = crossing(lambda: numbers("float32", [200_000])()[1:180_000])
results["loop"] = crossing(looped)
results["branches"] = crossing(branches)
with tf.Graph().as_default():
    with tf.device(there):
        handle = tf.raw_ops.TensorListFromTensor(tensor=tf.ones([3, 40_000]), element_shape=[40_000])
    with tf.device(here):
        stacked = tf.raw_ops.TensorListStack(input_handle=handle, element_shape=[40_000], element_dtype=tf.float32)
    with session_of(server) as session:
        results["variant"] = digest(session.run(stacked))
answer = results
"""


def test_results_are_those_of_grpc_also_in_a_mixed_cluster(pairs):
    compared = {name: pairs[name] for name in ("grpc", "both", "mixed")}
    for first, _ in compared.values():
        first.send(PROGRAMS)
    results = {name: first.take() for name, (first, _) in compared.items()}
    for name, found in results.items():
        for program, expected in results["grpc"].items():
            assert found[program] == expected, (name, program)
    for task in compared["both"]:
        counts = task.run("answer = counts()")
        assert counts["received_in_place"] > 30 and counts["received_by_grpc"] == 0, counts
    alone = compared["mixed"][0].run("answer = counts()")
    assert alone["received_by_grpc"] > 30 and alone["received_in_place"] == alone["lent"] == 0, alone


#: A tensor that crosses three times.
THREE = """
    with tf.Graph().as_default():
        with tf.device(there):
            sent = tf.range(1 << 20)
        with tf.device(here):
            kept = sent * 2
        with session_of(server) as session:
            for _ in range(3):
                assert (session.run(kept) == range(0, 2 << 20, 2)).all()
    answer = counts()
"""


def test_over_sockets_tensors_come_into_memory_of_the_receiver(pairs):
    counts = pairs["tcp"][0].run(THREE)
    assert counts["received_by_fabric"] == 3, counts
    assert counts["received_in_place"] == counts["received_by_grpc"] == 0, counts


def test_without_a_fabric_tensors_come_by_grpc(tasks, pairs):
    addresses = [*tasks.addresses(1), pairs["both"][1].address]
    alone = tasks.start("grpc+pleach", 0, addresses, PLEACH_FABRIC="none")
    alone.run("server = serve()")
    counts = alone.run(THREE)
    assert counts["received_by_grpc"] == 3 and counts["received_in_place"] == 0, counts


def test_regions_that_are_required_and_not_there_are_an_error(tasks, pairs):
    addresses = [*tasks.addresses(1), pairs["grpc"][1].address]
    alone = tasks.start("grpc+pleach", 0, addresses, PLEACH_REQUIRE="regions")
    alone.run("server = serve()")
    with pytest.raises(TaskError) as raised:
        alone.run(THREE)
    assert raised.value.kind == "FailedPreconditionError"
    assert "PLEACH_REQUIRE=regions" in raised.value.text and "/task:1" in raised.value.text


def wait_for(is_so, limit=60):
    until = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


EAGER = """
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), job_name="worker", task_index=0, protocol=protocol
    )
    with tf.device(there):
        variable = tf.Variable(tf.fill([1 << 20], 1.0))

    @tf.function
    def step():
        with tf.device(there):
            value = variable.read_value()
        with tf.device(here):
            return value + 0.0 * tf.reduce_sum(value)
"""


def test_a_variable_that_is_assigned_while_it_is_lent_stays_as_it_was_received(tasks):
    addresses = tasks.addresses(2)
    first = tasks.start("grpc+pleach", 0, addresses)
    second = tasks.start("grpc+pleach", 1, addresses)
    second.run("server = serve()")
    first.run(EAGER)
    first.run(
        """
        import numpy as np
        held = []
        for number in range(8):
            with tf.device(here):
                held.append(tf.identity(variable))
            held.append(step())
            with tf.device(there):
                if number % 2:
                    variable.assign_add(tf.ones([1 << 20]))
                else:
                    variable.assign(tf.fill([1 << 20], float(number + 2)))
        for place, value in enumerate(held):
            assert (value.numpy() == place // 2 + 1).all(), (place, value)
        assert counts()["received_in_place"] >= 8, counts()
        """
    )
    assert second.run("answer = counts()")["leases"] > 0
    first.run("held.clear(); del value; import gc; gc.collect()")
    # What is held of the last step goes with the next one.
    wait_for(lambda: second.run("answer = counts()")["leases"] <= 1)
    # More than may be kept where the other task has lent them: some come by gRPC.
    first.run(
        """
        with tf.device(there):
            small = tf.Variable(tf.range(1 << 17))
        with tf.device(here):
            held = [tf.identity(small) for _ in range(3050)]
        assert all((value.numpy() == range(1 << 17)).all() for value in held[::300] + held[-1:])
        assert counts()["received_by_grpc"] > 0, counts()
        """
    )


RECEIVE = """
    import threading, time

    def receive(name, incarnation, limit_ms=0, task=1):
        # A graph of this task alone, whose master does not ask for the other one.
        with tf.Graph().as_default():
            with tf.device(here):
                received = tf.raw_ops.Recv(
                    tensor_type=tf.float32, tensor_name=name, recv_device=f"/job:worker/replica:0/task:{index}/device:CPU:0",
                    send_device=f"/job:worker/replica:0/task:{task}/device:CPU:0", send_device_incarnation=incarnation,
                )
            with session_of(server, device_filters=["/job:worker/task:0"]) as session:
                return session.run(received, options=v1.RunOptions(timeout_in_ms=limit_ms))
"""


def test_a_cancelled_receive_does_not_wait_for_a_task_that_does_not_introduce_itself(tasks):
    addresses = tasks.addresses(3)
    first = tasks.start("grpc+pleach", 0, addresses, PLEACH_REQUIRE="regions")
    second = tasks.start("grpc+pleach", 1, addresses)
    for task in (first, second):
        task.send("server = serve()")
    for task in (first, second):
        task.take()
    second.stop()
    first.run(RECEIVE)
    # Of a task that is not there.
    with pytest.raises(TaskError) as raised:
        first.run('receive("nothing", 1, task=2)')
    assert raised.value.kind == "UnavailableError", raised.value.text
    first.run('waits = threading.Thread(target=receive, args=("first", 1, 30_000)); waits.start()')
    with pytest.raises(TaskError) as raised:
        first.run('receive("second", 1, 1_000)')
    assert raised.value.kind == "DeadlineExceededError", raised.value.text
    assert first.run("answer = waits.is_alive()"), "the receive that asks is not that which was cancelled"


CUT = """
    import socket

    def cut(port):
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family == socket.AF_INET and one.getpeername()[1] == port:
                        one.shutdown(socket.SHUT_RDWR)
                        count += 1
            except OSError:
                pass
        assert count > 0
"""


def test_a_link_that_is_cut_between_living_tasks_is_made_again(pairs):
    first, second = pairs["both"]
    _, address = Receiver(second.address).introduction()
    first.run(CUT)
    before = first.run(THREE)
    for _ in range(3):
        first.run(f"cut({address.rpartition(':')[2]})")
        counts = first.run(THREE)
    received = {name: counts[name] - before[name] for name in counts if name.startswith("received")}
    assert received["received_by_grpc"] == 0 and sum(received.values()) == 9, received


def test_a_task_that_is_slowed_is_waited_for(pairs):
    first, second = pairs["both"]
    before = first.run(THREE)
    for slow in (second, first):
        with slow.slowed():
            counts = first.run(THREE)
    received = {name: counts[name] - before[name] for name in counts if name.startswith("received")}
    assert received["received_by_grpc"] == 0 and sum(received.values()) == 6, received


def test_a_link_stays_where_a_task_does_not_offer_its_tensors(tasks):
    addresses = tasks.addresses(2)
    first, second = (tasks.start("grpc+pleach", index, addresses) for index in (0, 1))
    first.send("server = serve()")
    second.send(
        """
        config = v1.ConfigProto()
        config.rpc_options.cache_rpc_response = True
        server = tf.distribute.Server(
            cluster, job_name="worker", task_index=1, protocol=protocol, config=config
        )
        """
    )
    for task in (first, second):
        task.take()
    counts = first.run(THREE)
    assert counts["received_by_grpc"] == 3 and counts["links"] == 1, counts
    # The task is asked whether it is another one, and is not.
    time.sleep(2.1)
    counts = first.run(THREE)
    assert counts["received_by_grpc"] == 6 and counts["links"] == 1, counts


def test_a_killed_task_fails_its_receives_at_once_and_its_successor_is_another_one(tasks):
    addresses = tasks.addresses(2)
    first, second = (tasks.start("grpc+pleach", index, addresses) for index in (0, 1))
    for task in (first, second):
        task.send("server = serve()")
    for task in (first, second):
        task.take()
    step = """
        with tf.Graph().as_default():
            with tf.device(there):
                sent = tf.range(200_000)
            with tf.device(here):
                kept = sent * 2
            session = session_of(server)
            assert (session.run(kept) == range(0, 400_000, 2)).all()
    """
    first.run(step)
    device = "/job:worker/replica:0/task:1/device:CPU:0"
    incarnation = first.run(
        f'answer = next(one.incarnation for one in session.list_devices() if one.name == "{device}")'
    )
    first.run(RECEIVE)
    first.send(f'receive("never", {incarnation})')
    wait_for(lambda: second.run("answer = counts()['waiting']") == 1)
    killed = time.monotonic()
    second.kill()
    with pytest.raises(TaskError) as raised:
        first.take()
    assert time.monotonic() - killed < KILLED_LIMIT_S
    assert raised.value.kind == "UnavailableError", raised.value.text
    assert "never" in raised.value.text and "from task /job:worker/replica:0/task:1" in raised.value.text
    successor = tasks.start("grpc+pleach", 1, addresses)
    successor.run("server = serve()")
    with pytest.raises(TaskError) as raised:
        first.run(f'receive("never", {incarnation})')
    assert raised.value.kind == "AbortedError", raised.value.text
    before = first.run("session.close(); answer = counts()['received_in_place']")
    once_more = step + "    session.close(); answer = counts()['received_in_place']"
    wait_for(lambda: first.run(once_more) > before)
    assert successor.run("answer = counts()")["lent"] > 0


SEND = """
    import threading
    goes_on = threading.Event()
    device = "/job:worker/replica:0/task:{}/device:CPU:0".format

    def send(incarnation):
        with tf.Graph().as_default():
            with tf.device(here):
                sent = tf.raw_ops.Send(
                    tensor=tf.range(200_000), tensor_name="left", send_device=device(1),
                    send_device_incarnation=incarnation, recv_device=device(0),
                )
                # Until then the step goes on, at whose end its tensors are dropped.
                with tf.control_dependencies([sent]):
                    waits = tf.numpy_function(lambda: goes_on.wait(60), [], tf.bool)
            experimental = v1.RunOptions.Experimental(collective_graph_key=77)
            with session_of(server, device_filters=["/job:worker/task:1"]) as session:
                session.run(waits, options=v1.RunOptions(experimental=experimental))

    thread = threading.Thread(target=send, args=({},))
    thread.start()
"""


def test_a_cancelled_receive_leaves_the_tensor_for_the_next(pairs):
    second = pairs["both"][1]
    receiver = Receiver(second.address)
    device = "/job:worker/replica:0/task:{}/device:CPU:0".format
    incarnation = receiver.device_incarnation(device(1))
    step = receiver.next_step(77)
    key = f"{device(1)};{incarnation:016x};{device(0)};left;0:0"
    endpoint, _ = receiver.introduction()
    waiting = "answer = counts()['waiting']"
    first = receiver.start(step, key, endpoint)
    wait_for(lambda: second.run(waiting) == 1)
    first.cancel()
    wait_for(lambda: second.run(waiting) == 0)
    signed = incarnation - (1 << 64 if incarnation >> 63 else 0)
    second.run(SEND.replace("{},)", f"{signed},)"))
    # A receiver that was told of another endpoint gets the bytes.
    answer = receiver.start(step, key, endpoint + 1, request=5).result(60)
    assert 800_000 < len(answer) < 801_000
    with pytest.raises(grpc.RpcError) as raised:
        receiver.start(step, key, endpoint, request=5).result(60)
    assert raised.value.code() == grpc.StatusCode.ABORTED
    second.run("goes_on.set(); thread.join()")


def test_cancelled_receives_into_buffers_hold_no_thread_of_the_sender(pairs):
    second = pairs["both"][1]
    receiver = Receiver(second.address)
    device = "/job:worker/replica:0/task:1/device:CPU:0"
    incarnation, (endpoint, _) = receiver.device_incarnation(device), receiver.introduction()
    for number in range(1, 33):
        key = f"nothing {number}"
        waiting = receiver.start_buffer(99, key, device, incarnation, endpoint, 1000 + number)
        wait_for(lambda: second.run("answer = counts()['waiting']") == 1)
        waiting.cancel()
        wait_for(lambda: second.run("answer = counts()['waiting']") == 0)
    assert receiver.device_incarnation(device) == incarnation


RING = """
    tf_config = {"cluster": cluster, "task": {"type": "worker", "index": index}, "rpc_layer": protocol}
    os.environ["TF_CONFIG"] = json.dumps(tf_config)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )

    @tf.function
    def reduce(values):
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", values * 1.0))

    answer = []
    for count in (10, 100_000, 1_000_003):
        # Neither sums of floats nor their order may differ from those of gRPC.
        values = tf.math.sin(tf.range(count, dtype=tf.float32) * (index + 1)) * 1e3
        for _ in range(3):
            reduced = strategy.experimental_local_results(reduce(values))[0].numpy()
        answer.append(reduced.tobytes().hex()[:4000] + str(reduced.astype("float64").sum()))
"""


ALONE = """
    from tensorflow.python.eager import context
    import threading
    failures = []

    def fail():
        try:
            reduce(values)
        except tf.errors.OpError as raised:
            failures.append(str(raised))

    thread = threading.Thread(target=fail)
    thread.start()
"""

ABORT = """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, "it is enough")
    thread.join(60)
    answer = failures[0]
"""


def test_an_all_reduce_by_ring_is_that_of_grpc(tasks):
    workers = {}
    for protocol in ("grpc", "grpc+pleach"):
        addresses = tasks.addresses(2)
        workers[protocol] = [tasks.start(protocol, index, addresses) for index in (0, 1)]
    for pair in workers.values():
        for task in pair:
            task.send(RING)
    results = {protocol: [task.take() for task in pair] for protocol, pair in workers.items()}
    assert results["grpc+pleach"] == results["grpc"]
    first, second = workers["grpc+pleach"]
    for task in (first, second):
        counts = task.run("answer = counts()")
        assert counts["received_in_place"] >= 6 and counts["received_by_grpc"] == 0, counts
    # The other worker does not take part in this one.
    first.run(ALONE)
    wait_for(lambda: second.run("answer = counts()['waiting']") > 0)
    assert "it is enough" in first.run(ABORT)
    wait_for(lambda: second.run("answer = counts()['waiting']") == 0)


def started(text, **variables):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "TF_CPP_MIN_LOG_LEVEL": "2", **variables}
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_plugin_that_cannot_be_made_says_why(monkeypatch, tmp_path):
    from pleach import _native
    from pleach.tensorflow import PluginError, _build

    def refused():
        with pytest.raises(PluginError) as raised:
            _build.plugin(_native.c_header())
        assert isinstance(raised.value, ImportError)
        return str(raised.value)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "no C++ compiler /nowhere/g++" in refused()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'server.h:1: error: no such thing' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert "server.h:1: error: no such thing" in refused()
    (lock_path,) = tmp_path.rglob("*.lock")
    with open(lock_path) as other, monkeypatch.context() as patched:
        fcntl.flock(other, fcntl.LOCK_EX)
        patched.setattr(_build, "COMPILE_LIMIT_S", 0)
        assert f"another process has held {lock_path}" in refused()
    others = lock_path.with_suffix(".so")
    others.touch()
    others.chmod(0o666)
    assert f"{others} may be written by other users" in refused()
    others.unlink()
    lock_path.parent.chmod(0o777)
    assert f"{lock_path.parent} may be written by other users" in refused()
    lock_path.parent.chmod(0o700)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install g++, or set CXX" in refused()
    with monkeypatch.context() as patched:
        patched.setattr("tensorflow.sysconfig.get_include", lambda: "/nowhere")
        assert "install a wheel of TensorFlow that has its headers" in refused()
    assert not list(tmp_path.rglob("*.so"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", str(failing))
    assert "set XDG_CACHE_HOME" in refused()
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert "XDG_CACHE_HOME=cache is relative" in refused()


def test_a_plugin_of_another_version_is_not_started(tmp_path):
    import tensorflow

    import pleach.tensorflow

    version = tensorflow.__version__.encode()
    other = version[:-1] + (b"9" if version[-1:] != b"9" else b"8")
    built = pathlib.Path(pleach.tensorflow._library._name).read_bytes()
    assert version + b"\0" in built
    copy = tmp_path / "other.so"
    copy.write_bytes(built.replace(version + b"\0", other + b"\0"))
    text, is_lendable = ctypes.create_string_buffer(500), ctypes.c_int()
    assert ctypes.CDLL(str(copy)).pleach_tensorflow_start(text, 500, ctypes.byref(is_lendable)) == 1
    assert text.value == b"the plug-in was built for TensorFlow " + other + b", and this is " + version


def test_a_wrong_variable_is_told_by_the_import():
    ended = started("import tensorflow, pleach.tensorflow", PLEACH_FABRIC="pigeon")
    assert ended.returncode == 1
    assert "PLEACH_FABRIC='pigeon'; it takes auto, shm" in ended.stderr.splitlines()[-1]


def test_a_late_import_is_told():
    text = "import tensorflow as tf\ntf.ones([100])\nimport pleach.tensorflow"
    ended = started(text)
    assert ended.returncode == 0 and "import it right after tensorflow" in ended.stderr, ended.stderr
