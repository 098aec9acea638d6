"""The example of two tasks of TensorFlow (`examples/tensorflow_two_tasks.py`), trained to the same
loss by "grpc" and by "grpc+pleach", and with its variables in the task that computes.

    python python/benches/tensorflow_training.py [--loss 0.05] [--rounds 5] [--write-docs]

All ways take turns. Figures are medians over the runs. The share of communication is what a step
takes longer than where nothing crosses. `--write-docs` writes the table of `docs/tensorflow.md`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

from tensorflow_step import when, write

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensorflow_two_tasks.py"
STEPS_MAX = 1000
RUN_LIMIT_S = 600

#: The name of each way, and the options of the example.
WAYS = {
    "`grpc`": ["--protocol", "grpc"],
    "`grpc+pleach`": ["--protocol", "grpc+pleach"],
    "nothing crosses": ["--protocol", "grpc", "--alone"],
}
#: The line at the end of a run.
LINE = re.compile(r"loss ([\d.]+) after (\d+) steps in ([\d.]+) s")


def run(options: list[str], loss: float) -> tuple[float, int, float]:
    """The loss, the steps and the seconds of one run."""
    command = [sys.executable, str(EXAMPLE), *options, "--steps", str(STEPS_MAX), "--loss", str(loss)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    found = LINE.search(ended.stdout)
    if ended.returncode != 0 or not found:
        raise SystemExit(f"a run has failed:\n{ended.stdout}{ended.stderr}")
    return float(found[1]), int(found[2]), float(found[3])


def table(runs: dict[str, list[tuple[float, int, float]]]) -> str:
    """The rows of Markdown."""
    seconds = {way: statistics.median(one[2] for one in of_way) for way, of_way in runs.items()}
    steps = {way: of_way[0][1] for way, of_way in runs.items()}
    step = {way: seconds[way] / steps[way] for way in runs}
    alone = step["nothing crosses"]
    rows = ["| way | loss | steps | s to the loss | ms a step | share of communication |", "|:--|--:|--:|--:|--:|--:|"]
    for way, of_way in runs.items():
        share = "–" if step[way] == alone else f"{(1 - alone / step[way]) * 100:.0f} %"
        loss = of_way[0][0]
        rows.append(f"| {way} | {loss:.4f} | {steps[way]} | {seconds[way]:.2f} | {step[way] * 1e3:.1f} | {share} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    begun = when()
    runs: dict[str, list[tuple[float, int, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, arguments in WAYS.items():
            runs[way].append(run(arguments, options.loss))
    ends = {way: {one[:2] for one in of_way} for way, of_way in runs.items()}
    is_same = len(set.union(*ends.values())) == 1
    written = f"{begun} Medians of {options.rounds} runs.\n\n{table(runs)}"
    print(written)
    if not is_same:
        raise SystemExit(f"the runs do not end with the same loss after the same steps: {ends}")
    if options.write_docs:
        write("trained", written)


if __name__ == "__main__":
    main()
