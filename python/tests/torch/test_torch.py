"""The backend of torch.distributed beside gloo, on ranks that are processes."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch.distributed")

from ranks import HERE, LIMIT_S, environment, finish, free_port, last_json, start  # noqa: E402

#: Of each list the checks of one start of ranks: importing torch takes longer than most of them.
STARTS = [
    ["all_reduce", "all_reduce_that_gloo_lacks", "strides", "sparse", "coalesced"],
    ["moves", "reductions_of_blocks", "exchanges", "objects"],
    ["messages", "work", "groups", "functional", "monitored_barrier", "refusals"],
    ["mismatch"],
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checks", STARTS, ids=lambda checks: checks[0])
def test_calls_do_what_gloo_does(checks, size):
    names = [f"check_{check}" for check in checks]
    for output in finish(start("against_gloo.py", size, *names)):
        assert [line for line in output.splitlines() if line.endswith(" done")] == [f"{name} done" for name in names]


def torchrun(script, size, *arguments):
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*run, str(HERE / script), *arguments], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return last_json(done.stdout)


@pytest.mark.parametrize("scheme", ["ddp", "fsdp"])
def test_training_has_the_loss_curve_of_gloo(scheme):
    losses, expected = (torchrun("train.py", 4, backend, scheme) for backend in ("pleach", "gloo"))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_in_the_backward_pass_is_named_by_all_others_within_a_second(killed):
    outputs = finish(start("train.py", 4, "pleach", "ddp", killed), killed=[killed])
    died_at = float(outputs[killed].split()[-1])
    for rank, output in enumerate(outputs):
        if rank != killed:
            said = last_json(output)
            assert f"rank {killed}" in said["error"], said
            assert said["at"] - died_at < 1, said


def test_a_world_of_one_works():
    script = """
import torch, torch.distributed as dist, pleach.torch
dist.init_process_group("pleach", rank=0, world_size=1, store=dist.HashStore())
tensor = torch.arange(4.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [0, 1, 2, 3]
dist.barrier()
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=LIMIT_S)


def test_a_fork_after_the_start_is_a_clear_error():
    script = """
import os, torch, torch.distributed as dist, pleach.torch
dist.init_process_group("pleach", rank=0, world_size=1, store=dist.HashStore())
child = os.fork()
if child == 0:
    try:
        dist.all_reduce(torch.ones(1))
    except pleach.torch.PleachError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=LIMIT_S)
