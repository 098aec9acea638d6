"""What the tests share: ranks as fresh processes that may be killed."""

import os
import subprocess
import sys
import textwrap

import pytest


class Ranks:
    """Processes of one job; each prints its result."""

    def __init__(self, folder, n, program):
        self.processes = []
        for rank in range(n):
            variables = dict(
                os.environ,
                PLEACH_RANK=str(rank),
                PLEACH_WORLD_SIZE=str(n),
                PLEACH_RENDEZVOUS=f"file://{folder}",
            )
            command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
            self.processes.append(
                subprocess.Popen(
                    command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )

    def line(self, rank):
        return self.processes[rank].stdout.readline().strip()

    def finish(self, rank, timeout=30):
        out, error = self.processes[rank].communicate(timeout=timeout)
        return self.processes[rank].returncode, out, error


@pytest.fixture
def ranks(tmp_path):
    jobs = []

    def start(n, program):
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir(mode=0o700)
        jobs.append(Ranks(folder, n, program))
        return jobs[-1]

    yield start
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.communicate()
