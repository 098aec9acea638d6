"""Two programs: one sends NumPy arrays by key, the other one reads them where they are.

    pip install pleach numpy
    python numpy_exchange.py
"""

import subprocess
import sys

import numpy as np

import pleach

STEPS = 5


def send():
    with pleach.Endpoint(timeout=60) as endpoint:
        # Another program, which is told the address.
        receiver = subprocess.Popen([sys.executable, __file__, endpoint.address])
        for step in range(STEPS):
            activations = endpoint.tensor((1024, 256), "float32")  # lendable: it is not copied
            activations[:] = step
            endpoint.send(step, "activations", activations)
        # Any other array is copied once.
        endpoint.send(STEPS, "labels", np.arange(10))
        if receiver.wait(60) != 0:
            raise SystemExit("the receiver has failed")


def receive(address):
    with pleach.Endpoint(timeout=60) as endpoint:
        sender = endpoint.connect(address)
        for step in range(STEPS):
            activations = sender.receive(step, "activations")  # read-only, in the sender's memory
            print(f"step {step}: {activations.shape}, mean {activations.mean():g}")
        print("labels:", sender.receive(STEPS, "labels").copy())


if len(sys.argv) > 1:
    receive(sys.argv[1])
else:
    send()
