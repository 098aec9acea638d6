"""The backend of torch.distributed beside gloo, on ranks that are processes."""

import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch.distributed")

from ranks import HERE, LIMIT_OF_STOP_S, LIMIT_S, PACKAGE, environment, finish, free_port, last_json, start  # noqa: E402

#: Of each list the checks of one start of ranks: importing torch takes longer than most of them.
STARTS = [
    ["all_reduce", "all_reduce_that_gloo_lacks", "strides", "sparse", "coalesced"],
    ["moves", "reductions_of_blocks", "exchanges", "objects"],
    ["messages", "work", "groups", "functional", "monitored_barrier", "refusals"],
    ["mismatch"],
]


ANY_SOURCE = [
    "any_source",
    "any_source_that_sends_nothing",
    "any_source_beside_a_named_receive",
    "a_group_is_closed_even_if_its_posted_receives_cannot_be_ended",
]
#: Those of the group alone, and with how many ranks.
GROUP_STARTS = [
    (2, ["limits", "split_group", "objects_of_messages", "premultiplied_sums", "overlapping_memory", "other_devices", "dlpack"]),
    (2, [*ANY_SOURCE, "monitored_barriers_leave_the_store_as_it_is"]),
    (4, ["limits", "monitored_barrier_with_two_missing", *ANY_SOURCE]),
    (4, ["split_group", "objects_of_messages", "overlapping_memory", "coalesced_calls_are_under_way_together", "monitored_barriers_leave_the_store_as_it_is", "abort"]),
    (2, ["partial_all_reduce", "late_gradients_count_once", "a_rank_that_leaves_partial_rounds"]),
    (4, ["partial_all_reduce", "late_gradients_count_once", "a_rank_that_leaves_partial_rounds"]),
    (2, ["compile"]),
    (3, ["callbacks_that_wait"]),
]


def check(script, size, checks):
    names = [f"check_{check}" for check in checks]
    for output in finish(start(script, size, *names)):
        assert [line for line in output.splitlines() if line.endswith(" done")] == [f"{name} done" for name in names]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("checks", STARTS, ids=lambda checks: checks[0])
def test_calls_do_what_gloo_does(checks, size):
    check("against_gloo.py", size, checks)


@pytest.mark.parametrize("size,checks", GROUP_STARTS, ids=lambda part: part if isinstance(part, int) else part[0])
def test_groups_keep_their_promises(size, checks):
    check("group_checks.py", size, checks)


def torchrun(script, size, *arguments):
    """Returns the standard output of all ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*run, str(script), *arguments], env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("scheme", ["ddp", "fsdp"])
def test_training_has_the_loss_curve_of_gloo(scheme):
    losses, expected = (last_json(torchrun(HERE / "train.py", 4, backend, scheme)) for backend in ("pleach", "gloo"))
    # Sums of another order are rounded another way, and many steps carry that on.
    assert losses == pytest.approx(expected, rel=1e-4 if len(losses) <= 24 else 5e-2)
    assert losses[-1] < losses[0]


def test_the_example_of_the_repository_learns():
    assert "2 ranks over pleach: the loss went from" in torchrun(PACKAGE.parent / "examples" / "ddp.py", 2)


#: Of each list the ways of training of one start of ranks.
WAYS = [
    ["ddp_bf16_hook", "ddp_no_sync", "ddp_unused_parameters", "ddp_join", "zero_redundancy_optimizer"],
    ["ddp_powersgd_hook"],
    ["ddp_partial_hook", "ddp_registered_hook", "ddp_registered_views", "ddp_registered_views_of_unused_parameters"],
    ["dtensor", "tensor_parallel", "pipeline", "checkpoint"],
]


@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: ways[0])
def test_the_libraries_of_torch_give_what_they_give_over_gloo(ways):
    found, expected = (last_json(finish(start("parallel.py", 2, backend, *ways))[0]) for backend in ("pleach", "gloo"))
    assert list(found) == list(expected) == ways
    for way in ways:
        assert found[way] and found[way] == pytest.approx(expected[way], rel=1e-3), way


def test_fsdp2_in_memory_of_the_group_gives_the_bits_of_gloo():
    way = "fsdp_registered_bits"
    found, expected = (last_json(finish(start("parallel.py", 2, backend, way))[0]) for backend in ("pleach", "gloo"))
    assert found == expected and found[way]


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_in_the_backward_pass_is_named_by_all_others_at_once(killed):
    outputs = finish(start("train.py", 4, "pleach", "ddp", killed, signal.SIGKILL.value), killed=[killed])
    died_at = float(outputs[killed].split()[-1])
    for rank, output in enumerate(outputs):
        if rank != killed:
            said = last_json(output)
            assert f"rank {killed}" in said["error"], said
            # Long before their deadline, on a machine that is busy with other things.
            assert said["at"] - died_at < 3 * LIMIT_OF_STOP_S, said


def test_a_rank_that_is_stopped_in_the_backward_pass_is_named_at_the_deadline():
    ranks = start("train.py", 3, "pleach", "ddp", 1, signal.SIGSTOP.value)
    try:
        others = finish([ranks[0], ranks[2]])
        for output in others:
            said = last_json(output)
            assert "rank 1" in said["error"] and "RuntimeError" in said["type"], said
    finally:
        ranks[1].kill()
        stopped_at = float(ranks[1].communicate()[0].split()[-1])
    for output in others:
        # A second for the clocks' and the printing's sake.
        assert last_json(output)["at"] - stopped_at > LIMIT_OF_STOP_S - 1


def test_a_group_gets_other_members_when_one_is_killed_and_when_one_comes():
    outputs = finish(start("reconfigure.py", 4), killed=[2])
    assert [output for rank, output in enumerate(outputs) if rank != 2] == ["done\n"] * 3


def test_an_interpreter_ends_with_work_under_way():
    script = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("pleach")
if dist.get_rank() == 0:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    works.append(dist.irecv(torch.ones(1), 1))
    print("under way", flush=True)
    sys.exit(5)
sys.stdin.read()
os._exit(0)
"""
    first, second = start("-c", 2, script)
    try:
        output, errors = first.communicate(timeout=LIMIT_S)
        assert (first.returncode, output) == (5, "under way\n"), (first.returncode, output, errors[-4000:])
    finally:
        second.kill()
        second.communicate()


def test_importing_torch_makes_the_backend_known_and_imports_nothing_of_the_package():
    script = """
import sys, torch, torch.distributed as dist
assert "pleach" in dist.Backend.backend_list and dist.Backend.default_device_backend_map["cpu"] == "gloo"
assert "pleach" not in sys.modules
dist.init_process_group("pleach", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(1))
assert "pleach.torch" in sys.modules
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=LIMIT_S)


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
