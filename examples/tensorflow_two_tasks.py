"""A convolutional network that learns digits, in two tasks of TensorFlow: one holds the variables, the
other one computes. Weights cross in each step, and gradients cross back.

    pip install tensorflow, and pleach from a clone: pip install ./python
    python tensorflow_two_tasks.py [--protocol grpc|grpc+pleach] [--steps 40] [--loss 0.1]

The two protocols differ in one import and one word. `--loss` ends the training when a batch has at
most this loss. `--alone` keeps the variables in the task that computes: nothing crosses, so the
difference is the time of the exchange.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

BATCH, SIZE, CLASSES = 32, 28, 10
FILTERS, HIDDEN = 32, 1024

#: Which of seven segments each digit has: top, upper left, upper right, middle, lower left, lower
#: right, bottom.
SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
PLACES = [
    (slice(4, 7), slice(8, 20)),
    (slice(5, 14), slice(7, 10)),
    (slice(5, 14), slice(18, 21)),
    (slice(13, 16), slice(8, 20)),
    (slice(14, 24), slice(7, 10)),
    (slice(14, 24), slice(18, 21)),
    (slice(22, 25), slice(8, 20)),
]


def digits(random):
    """A batch of noisy pictures of digits, and which ones they are."""
    labels = random.integers(0, CLASSES, BATCH)
    pictures = random.normal(0, 0.3, (BATCH, SIZE, SIZE, 1)).astype("float32")
    for picture, label in zip(pictures, labels):
        for is_on, (rows, columns) in zip(SEGMENTS[label], PLACES):
            picture[rows, columns] += float(is_on)
    return pictures, labels


def free_addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def hold_variables(cluster, protocol):
    server = tf.distribute.Server(cluster, job_name="ps", task_index=0, protocol=protocol)
    print("ready", flush=True)
    server.join()


def train(cluster, protocol, steps, goal, holder):
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), job_name="worker", task_index=0, protocol=protocol
    )
    random = np.random.default_rng(1)

    def variable(*shape, scale):
        return tf.Variable(random.normal(0, scale, shape).astype("float32"))

    flat = (SIZE // 2) ** 2 * FILTERS
    with tf.device(holder):
        kernel = variable(3, 3, 1, FILTERS, scale=0.3)
        hidden = variable(flat, HIDDEN, scale=flat**-0.5)
        output = variable(HIDDEN, CLASSES, scale=HIDDEN**-0.5)
    variables = [kernel, hidden, output]

    @tf.function
    def step(pictures, labels):
        with tf.device("/job:worker/task:0"):
            weights = [tf.identity(one) for one in variables]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                features = tf.nn.relu(tf.nn.conv2d(pictures, weights[0], 1, "SAME"))
                features = tf.reshape(tf.nn.max_pool2d(features, 2, 2, "SAME"), [BATCH, flat])
                logits = tf.nn.relu(features @ weights[1]) @ weights[2]
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, weights)
        with tf.device(holder):
            for one, gradient in zip(variables, gradients):
                one.assign_sub(0.05 * gradient)
        return loss

    step(*map(tf.constant, digits(random)))  # builds the graph
    begun = time.perf_counter()
    made, loss = 0, float("inf")
    while made < steps and loss > goal:
        loss = float(step(*map(tf.constant, digits(random))))
        made += 1
        if made % 10 == 0:
            print(f"step {made}: loss {loss:.4f}")
    seconds = time.perf_counter() - begun
    megabytes = sum(one.shape.num_elements() for one in variables) * 4 / 1e6
    print(f"{protocol}: loss {loss:.4f} after {made} steps in {seconds:.2f} s, "
          f"{seconds / made * 1e3:.0f} ms a step; the variables are {megabytes:.1f} MB")  # fmt: skip
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocol", default="grpc+pleach", choices=["grpc", "grpc+pleach"])
    parser.add_argument("--steps", type=int, default=40, help="at most so many")
    parser.add_argument("--loss", type=float, default=0.0, help="end when a batch has at most this loss")
    parser.add_argument("--alone", action="store_true", help="the variables lie in the task that computes")
    parser.add_argument("--hold", nargs=2, metavar="ADDRESS")
    options = parser.parse_args()
    if options.protocol != "grpc":
        import pleach.tensorflow  # noqa: F401 (before the first tensor)
    worker, ps = options.hold or free_addresses(2)
    cluster = {"worker": [worker], "ps": [ps]}
    if options.hold:
        return hold_variables(cluster, options.protocol)
    command = [sys.executable, __file__, "--protocol", options.protocol, "--hold", worker, ps]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if other.stdout.readline() != "ready\n":
            raise SystemExit("the task that holds the variables has failed")
        holder = "/job:worker/task:0" if options.alone else "/job:ps/task:0"
        loss = train(cluster, options.protocol, options.steps, options.loss, holder)
    finally:
        other.kill()
        other.wait()
    # A server of TensorFlow has no end of its own.
    sys.stdout.flush()
    os._exit(0 if loss < 1.0 else 1)


if __name__ == "__main__":
    main()
