"""A task of TensorFlow that does what its input says, for `exchange/tests/tensorflow.rs`.

usage: task.py PROTOCOL RUST

PROTOCOL: `grpc`, or `grpc+pleach`. RUST: HOST:PORT of the task `/job:pleach/task:0`. Each line of the
input is a dictionary of JSON, and each line of the output that begins with `answer` its result.
"""

import hashlib
import json
import os
import socket
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

protocol, rust = sys.argv[1:]
if protocol != "grpc":
    import pleach.tensorflow  # noqa: F401

v1 = tf.compat.v1
v1.disable_eager_execution()

#: The incarnation that keys name for the task of Rust.
RUST_INCARNATION = 7
HERE = "/job:worker/replica:0/task:0/device:CPU:0"
THERE = "/job:pleach/replica:0/task:0/device:CPU:0"

# The kernel chooses the port. A socket that is bound and does not listen keeps it from others; the
# server may listen there, as both say SO_REUSEADDR.
place = socket.socket()
place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
place.bind(("127.0.0.1", 0))
address = f"127.0.0.1:{place.getsockname()[1]}"
cluster = {"worker": [address], "pleach": [rust]}
server = tf.distribute.Server(cluster, job_name="worker", task_index=0, protocol=protocol)
lock = threading.Lock()


def answer(value):
    with lock:
        print("answer", json.dumps(value), flush=True)


def digest(value):
    """Type, dimensions, and the elements: themselves where they are few, or their digest."""
    array = np.asarray(value)
    if array.dtype == object:
        elements = [text.decode() for text in array.ravel()]
    elif array.size <= 8:
        elements = array.ravel().tobytes().hex()
    else:
        elements = hashlib.sha256(array.tobytes()).hexdigest()
    return [array.dtype.name, list(array.shape), elements]


def session(order):
    # A session that knows the device of Rust asks that task for its status and a session.
    filters = [] if order.get("all_tasks") else ["/job:worker/task:0"]
    return v1.Session(server.target, config=v1.ConfigProto(device_filters=filters))


def receive(order):
    """Receives the tensor of an edge from Rust and gives its digest."""
    with tf.Graph().as_default(), tf.device(HERE):
        received = tf.raw_ops.Recv(
            tensor_type=tf.as_dtype(order["dtype"]), tensor_name=order["edge"], send_device=THERE,
            send_device_incarnation=order.get("incarnation", RUST_INCARNATION), recv_device=HERE,
        )
        with session(order) as running:
            return [digest(running.run(received)) for _ in range(order.get("times", 1))]


#: What is sent to Rust, by its name.
MADE = {
    "floats": lambda: tf.range(4, dtype=tf.float32) + 1,
    "large": lambda: tf.range(1 << 20, dtype=tf.int32),
    "bools": lambda: tf.constant([True, False]),
    "strings": lambda: tf.constant([["a", "bc"]]),
    "same": lambda: tf.ones([3, 2], tf.bfloat16),
    "empty": lambda: tf.zeros([0, 5]),
}


def send(order):
    """Sends a tensor to Rust, in a run of a graph of this number, and waits until Rust has it.

    The end of a run drops what it has sent and nobody has asked for.
    """
    with tf.Graph().as_default(), tf.device(HERE):
        incarnation = np.uint64(order["incarnation"]).astype(np.int64)
        sent = tf.raw_ops.Send(
            tensor=MADE[order["made"]](), tensor_name=order["made"], send_device=HERE,
            send_device_incarnation=int(incarnation), recv_device=THERE,
        )
        is_there = tf.raw_ops.Recv(
            tensor_type=tf.bool, tensor_name="has " + order["made"], send_device=THERE,
            send_device_incarnation=RUST_INCARNATION, recv_device=HERE,
        )
        experimental = v1.RunOptions.Experimental(collective_graph_key=order["graph"])
        with session(order) as running:
            running.run([sent, is_there], options=v1.RunOptions(experimental=experimental))
    return "sent"


def work(order):
    try:
        answer([order["id"], {"receive": receive, "send": send}[order["do"]](order), None])
    except Exception as raised:  # noqa: BLE001
        answer([order["id"], None, [type(raised).__name__, str(raised)]])


answer([0, address, None])
for line in sys.stdin:
    threading.Thread(target=work, args=[json.loads(line)], daemon=True).start()
os._exit(0)
