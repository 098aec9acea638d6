"""How long Python takes to receive an array in place, beside the command's `exchange bench`.

    python python/benches/exchange_receive.py [path of the command pleach]

The turns alternate; printed are medians, in microseconds. Each array is looked at and dropped.
"""

import json
import statistics
import subprocess
import sys
import time

import numpy as np

import pleach

SIZES = [256, 65_536, 4_194_304, 67_108_864]
TURNS = 5
RECEIVES = 3000


def send():
    with pleach.Endpoint() as endpoint:
        endpoint.publish(1, {str(size): np.full(size, 7, "uint8") for size in SIZES})
        print(endpoint.address, flush=True)
        sys.stdin.read()


def by_rust(command, size):
    options = ["--min", str(size), "--max", str(size), "--json"]
    output = subprocess.run(
        [command, "exchange", "bench", *options], check=True, capture_output=True, text=True
    )
    return json.loads(output.stdout)["time_us_p50"]


def by_python(peer, size):
    name, last, times = str(size), size - 1, []
    for _ in range(RECEIVES):
        begun = time.perf_counter_ns()
        array = peer.receive(1, name)
        assert array[last] == 7
        del array
        times.append((time.perf_counter_ns() - begun) / 1e3)
    return statistics.median(times)


def main():
    command = sys.argv[1] if len(sys.argv) > 1 else "pleach"
    sender = subprocess.Popen(
        [sys.executable, __file__, "--send"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with pleach.Endpoint() as endpoint:
        peer = endpoint.connect(sender.stdout.readline().strip())
        peer.share_regions()
        print(f"{'bytes':>10} {'Rust':>8} {'Python':>8}")
        for size in SIZES:
            rust, python = [], []
            for _ in range(TURNS):
                rust.append(by_rust(command, size))
                python.append(by_python(peer, size))
            print(f"{size:>10} {statistics.median(rust):>8.2f} {statistics.median(python):>8.2f}")
    sender.stdin.close()
    sender.wait()


if "--send" in sys.argv:
    send()
else:
    main()
