"""Ranks on two hosts, as far as one machine can be two: network namespaces with a wire between them.

It takes root and `ip`; without them the tests are skipped and say so.
"""

import os
import shutil
import subprocess

import pytest

pytest.importorskip("torch.distributed")

from ranks import finish, start  # noqa: E402

ADDRESSES = ["10.118.0.1", "10.118.0.2"]
SCRIPT = """
import torch, torch.distributed as dist
import pleach.torch
try:
    dist.init_process_group("pleach")
except pleach.torch.PleachError as error:
    print("refused:", error)
else:
    tensor = torch.full((100_000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    print("fabric:", dist.group.WORLD._comm._group.fabric)
    dist.destroy_process_group()
"""


@pytest.fixture
def hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    names = [f"pleach-torch-{os.getpid()}-{number}" for number in range(2)]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
            for name, address in zip(names, ADDRESSES):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start_on(hosts, **variables):
    within = [["ip", "netns", "exec", host] for host in hosts]
    return start("-c", 2, SCRIPT, within=within, MASTER_ADDR=ADDRESSES[0], **variables)


def test_ranks_on_two_hosts_meet_in_the_store_of_torch_with_the_secret_of_the_job(hosts, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("1234567890abcdef" * 4 + "\n")
    secret.chmod(0o600)
    for output in finish(start_on(hosts, PLEACH_SECRET_FILE=secret)):
        assert output.startswith("fabric: ") and "tcp" in output, output


def test_ranks_on_two_hosts_without_a_secret_are_told_what_to_set(hosts):
    for output in finish(start_on(hosts)):
        assert output.startswith("refused: ") and "PLEACH_SECRET_FILE" in output, output
