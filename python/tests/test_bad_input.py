"""What a caller does wrong is an error of its class, and the group works on where it can."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import pleach


def check_arguments(group):
    n = group.world_size
    frozen = np.ones(3)
    frozen.setflags(write=False)
    array = np.arange(10.0)
    refused = {
        "format \"O\"": lambda: group.all_reduce(np.array([None])),
        "read-only": lambda: group.all_reduce(frozen),
        "contiguous": lambda: group.all_reduce(np.ones((4, 4)).T),
        "pleach does not have": lambda: group.all_reduce(np.ones(3, ">f4")),
        "datetime64": lambda: group.all_reduce(np.zeros(3, "datetime64[s]")),
        "buffer protocol or DLPack": lambda: group.all_reduce(7),
        "is None": lambda: group.all_reduce(None),
        "not \\[3\\] as data": lambda: group.all_reduce(np.ones(3), out=np.ones((3, 1))),
        "which is 7 elements": lambda: group.all_gather(np.ones(3), out=np.ones(7)),
        "elements of float64": lambda: group.all_reduce(np.ones(3), out=np.ones(3, "float32")),
        "overlap": lambda: group.all_reduce(array[:6], out=array[2:8]),
        "multiple of": lambda: group.reduce_scatter(np.ones(n + 1)),
        "not in this group": lambda: group.broadcast(np.ones(3), n),
        "itself": lambda: group.send(np.ones(3), group.rank),
        "counts": lambda: group.all_gather(np.ones(1), counts=[1], out=np.ones(1)),
        "timeout": lambda: group.barrier(timeout=-1),
    }
    for text, call in refused.items():
        with pytest.raises(pleach.ArgumentError, match=text) as caught:
            call()
        assert caught.value.kind == "argument" and isinstance(caught.value, ValueError)
    assert (group.all_reduce(np.ones(3)) == n).all()
    group.all_gather(frozen)  # is only read
    group.close()
    group.close()
    with pytest.raises(pleach.ClosedError, match="closed"):
        group.barrier()
    with pytest.raises(pleach.ClosedError):
        group.buffer(3)


def test_wrong_arguments_are_refused_and_harm_nothing():
    pleach.launch(check_arguments, 2, timeout=60)


class Tensor:
    """An object with DLPack whose struct says something else than its array: see ``dlpack.h``."""

    #: Offset of a field of DLTensor, and its type.
    FIELDS = {
        "device_type": (8, ctypes.c_int32),
        "code": (20, ctypes.c_uint8),
        "bits": (21, ctypes.c_uint8),
        "lanes": (22, ctypes.c_uint16),
        "byte_offset": (40, ctypes.c_uint64),
    }

    def __init__(self, array, length=None, **fields):
        self.array, self.length, self.fields = array, length, fields

    def __dlpack__(self):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = pointer(capsule, b"dltensor")
        for name, value in self.fields.items():
            offset, kind = self.FIELDS[name]
            kind.from_address(tensor + offset).value = value
        if self.length is not None:
            lengths = ctypes.c_void_p.from_address(tensor + 24).value
            ctypes.c_int64.from_address(lengths).value = self.length
        return capsule


class NoCapsule:
    def __dlpack__(self):
        return 7


class Raises:
    def __dlpack__(self, **_):
        raise RuntimeError("no tensor today")


class Foreign:
    """An array of NumPy by DLPack alone, of the version with flags."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)


def check_foreign_memory(group):
    array = np.ones(6, "float32")
    frozen = np.ones(6)
    frozen.setflags(write=False)
    released = memoryview(bytearray(8))
    released.release()
    closed = mmap.mmap(-1, 4096)
    closed.close()
    used = array.__dlpack__()
    group.all_gather(used)
    refused = {
        "memory of a device \\(DLPack type 2\\)": Tensor(array, device_type=2),
        "DLPack code 3 of 64 bits": Tensor(array, code=3, bits=64),
        "DLPack code 2 of 32 bits": Tensor(array, lanes=4),
        "which no memory has": Tensor(array, length=-1),
        "shape \\[9223372036854775807\\]": Tensor(array, length=2**63 - 1),
        "no memory": Tensor(array, byte_offset=2**64 - 1),
        "not contiguous": Foreign(np.ones((4, 4)).T),
        "gave no capsule": NoCapsule(),
        "was consumed before": used,
        "multiple of|does not begin": Tensor(array, byte_offset=1),
        "read-only": Foreign(frozen) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else frozen,
        "bytes.*no memory|read-only": b"12345678",
        "released": released,
        "closed": closed,
    }
    for text, memory in refused.items():
        with pytest.raises(pleach.ArgumentError, match=text):
            group.all_reduce(memory)
    with pytest.raises(RuntimeError, match="no tensor today"):
        group.all_reduce(Raises())
    group.all_reduce(Tensor(array))
    assert (array == group.world_size).all()


def test_memory_that_is_no_memory_for_a_call_is_refused():
    pleach.launch(check_foreign_memory, 2, timeout=60)


def check_held_memory(group):
    data = bytearray(8)
    if group.rank == 0:
        pending = group.all_reduce(data, async_=True)
        with pytest.raises(BufferError):
            data.append(1)  # would move what peers write to
        group.send(np.ones(1), 1)
        pending.wait()
    else:
        group.recv(np.ones(1), 0)
        group.all_reduce(data)
    data.append(1)
    assert len(data) == 9


def test_memory_of_an_operation_under_way_cannot_be_freed():
    pleach.launch(check_held_memory, 2, timeout=60)


def calls_of(group):
    """Every call that needs the other ranks, and the buffer."""
    array, other = np.ones(4), (group.rank + 1) % group.world_size
    return [
        lambda: group.all_reduce(array),
        lambda: group.reduce(array),
        lambda: group.broadcast(array),
        lambda: group.all_gather(array),
        lambda: group.reduce_scatter(array),
        lambda: group.all_to_all(array),
        lambda: group.gather(array),
        lambda: group.scatter(array if group.rank == 0 else None, out=np.ones(4 // group.world_size)),
        lambda: group.send(array, other),
        lambda: group.recv(array, other),
        lambda: group.barrier(),
        lambda: group.all_reduce(array, async_=True).wait(),
        lambda: group.split(0),
    ]


def check_after_close(group):
    calls = calls_of(group)
    group.close()
    for call in [*calls, lambda: group.buffer(3)]:
        with pytest.raises(pleach.ClosedError, match="closed"):
            call()
    assert group.closed and group.world_size == 2


def test_every_call_after_close_says_so():
    pleach.launch(check_after_close, 2, timeout=60)


def check_after_abort(group):
    calls = calls_of(group)
    if group.rank == 0:
        group.abort()
        group.abort()
    causes = set()
    for call in calls:
        with pytest.raises(pleach.AbortedError) as caught:
            call()
        assert caught.value.rank == 0 and caught.value.kind == "aborted"
        causes.add(str(caught.value))
    assert len(causes) == 1
    with pytest.raises(pleach.AbortedError):
        group.close()
    return causes.pop()


def test_every_call_after_an_abort_names_its_rank():
    texts = pleach.launch(check_after_abort, 2, timeout=60)
    assert texts[0] == texts[1]


def test_a_world_of_one_needs_no_other():
    with pleach.join(rank=0, world_size=1) as group:
        array = np.arange(4.0)
        assert (group.all_reduce(array) == np.arange(4)).all()
        assert group.all_gather(array).shape == (1, 4)
        assert (group.reduce_scatter(array) == array).all()
        assert (group.all_to_all(array) == array).all()
        assert (group.scatter(array, out=np.ones(4)) == array).all()
        group.barrier()
        assert group.split(0).world_size == 1 and group.split(None) is None
        for call in (lambda: group.send(array, 0), lambda: group.recv(array, 0)):
            with pytest.raises(pleach.ArgumentError, match="itself"):
                call()
        with pytest.raises(pleach.ArgumentError, match="not in this group of 1"):
            group.broadcast(array, 1)
    with pytest.raises(pleach.ClosedError):
        group.barrier()


def test_a_free_threaded_build_is_refused_at_the_import():
    program = "import sys; sys.abiflags = 't'; import pleach"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: pleach does not support free-threaded builds of Python" in done.stderr


def check_mismatch(group):
    with pytest.raises(pleach.MismatchError) as caught:
        group.all_reduce(np.ones(3 + group.rank))
    text = str(caught.value)
    assert "of 3 f64" in text and "of 4 f64" in text and caught.value.kind == "mismatch"
    with pytest.raises(pleach.MismatchError):
        group.barrier()
    return text


def test_shapes_that_differ_between_ranks_are_named_on_every_rank(tmp_path):
    def run(group):
        (tmp_path / str(group.rank)).write_text(check_mismatch(group))

    # Closing a group that has failed says so again.
    with pytest.raises(pleach.RankError) as caught:
        pleach.launch(run, 2, timeout=60)
    assert isinstance(caught.value.__cause__, pleach.MismatchError), caught.value.__cause__
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts[0] == texts[1]


def test_an_exception_in_a_rank_ends_all_and_is_raised_with_the_rank():
    def run(group):
        if group.rank == 1:
            raise KeyError("on purpose")
        group.barrier()

    with pytest.raises(pleach.RankError, match="rank 1") as caught:
        pleach.launch(run, 3, timeout=60)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, KeyError)


def check_fork(group):
    child = os.fork()
    if child == 0:
        try:
            group.barrier()
        except pleach.ForkedError as error:
            os._exit(7 if error.kind == "forked" else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    group.barrier()
    return status


def test_a_forked_child_is_refused_and_the_parent_works_on():
    assert pleach.launch(check_fork, 2, timeout=60) == [7, 7]


SURVIVOR = """
    import sys, time, numpy, pleach
    group = pleach.join(timeout=3)
    group.barrier()
    print("ready")
    if group.rank == 1:
        time.sleep(60)
    while True:
        began = time.monotonic()
        try:
            group.all_reduce(numpy.ones(10))
        except pleach.GroupError as error:
            print(type(error).__name__, error.kind, error.rank, error.host, error.operation)
            print(time.monotonic() - began, error.waited_s)
            break
"""


def lines_after(job, rank, send):
    for other in range(len(job.processes)):
        assert job.line(other) == "ready"
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(job.processes[rank].pid, send)
    found = {r: [job.line(r), job.line(r)] for r in range(len(job.processes)) if r != rank}
    return found, time.monotonic() - began


def wait_until_asleep(process):
    """Returns when the main thread of a process waits: it is in the call that it was to make."""
    deadline = time.monotonic() + 60
    with open(f"/proc/{process.pid}/stat") as file:
        while file.read().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < deadline, "it does not wait"
            time.sleep(0.01)
            file.seek(0)
    time.sleep(0.2)  # it may sleep for a moment before the call too


def test_a_killed_rank_is_named_by_every_survivor_at_once(ranks):
    # Far sooner than the deadline of their calls.
    program = SURVIVOR.replace("timeout=3", "timeout=60")
    found, took = lines_after(ranks(4, program), 1, signal.SIGKILL)
    assert took < 10, took
    for lines in found.values():
        assert lines[0] == "LostError lost 1 0 all-reduce of 10 f64 (sum)", lines


def test_a_stopped_rank_is_named_at_the_deadline(ranks):
    found, took = lines_after(ranks(3, SURVIVOR), 1, signal.SIGSTOP)
    assert took < 20.0, took
    for lines in found.values():
        assert lines[0].startswith("DeadlineError timed-out 1 0 all-reduce of 10 f64"), lines
        assert float(lines[1].split()[1]) > 2.5
    # Who made the call first has waited to the end, whenever the others and this test ran.
    assert max(float(lines[1].split()[0]) for lines in found.values()) > 2.5, found


def test_ctrl_c_during_a_call_raises_here_and_aborts_there(ranks, tmp_path):
    go_on = tmp_path / "go_on"
    job = ranks(2, """
        import os, time, numpy, pleach
        group = pleach.join()
        group.barrier()
        try:
            print("ready")
            while group.rank == 1 and not os.path.exists("GO_ON"):
                time.sleep(0.01)
            group.all_reduce(numpy.ones(10))
        except (KeyboardInterrupt, pleach.AbortedError) as error:
            print(type(error).__name__)
    """.replace("GO_ON", str(go_on)))  # fmt: skip
    assert [job.line(0), job.line(1)] == ["ready", "ready"]
    wait_until_asleep(job.processes[0])
    began = time.monotonic()
    job.processes[0].send_signal(signal.SIGINT)
    assert job.line(0) == "KeyboardInterrupt"
    assert time.monotonic() - began < 10
    go_on.touch()
    assert job.line(1) == "AbortedError"


@pytest.mark.parametrize("scheme", ["sync", "bsp"])
def test_ctrl_c_during_a_training_ends_it_on_all_ranks(ranks, tmp_path, scheme):
    go_on = tmp_path / "go_on"
    job = ranks(2, """
        import os, time, pleach
        trainer = pleach.Trainer(pleach.join(), "SCHEME", [4])
        trainer.step()
        try:
            print("ready")
            while os.environ["PLEACH_RANK"] == "1" and not os.path.exists("GO_ON"):
                time.sleep(0.01)
            while trainer.step():
                trainer.update(lambda: None)
        except (KeyboardInterrupt, pleach.GroupError) as error:
            print(type(error).__name__)
    """.replace("GO_ON", str(go_on)).replace("SCHEME", scheme))  # fmt: skip
    assert [job.line(0), job.line(1)] == ["ready", "ready"]
    wait_until_asleep(job.processes[0])
    job.processes[0].send_signal(signal.SIGINT)
    assert job.line(0) == "KeyboardInterrupt"
    go_on.touch()
    assert job.line(1) in ("AbortedError", "LostError")  # a barrier of a step, or of the window


def test_ctrl_c_during_a_wait_leaves_the_operation_under_way(ranks, tmp_path):
    go_on = tmp_path / "go_on"
    job = ranks(2, """
        import os, time, numpy, pleach
        group = pleach.join()
        group.barrier()
        print("ready")
        while group.rank == 1 and not os.path.exists("GO_ON"):
            time.sleep(0.01)
        pending = group.all_reduce(numpy.ones(3), async_=True)
        try:
            pending.wait(0.1)
        except TimeoutError:
            print("timeout")
        try:
            print(pending.wait()[0])
        except KeyboardInterrupt:
            print("interrupted")
            print(pending.wait()[0])
    """.replace("GO_ON", str(go_on)))  # fmt: skip
    assert [job.line(0), job.line(1)] == ["ready", "ready"]
    assert job.line(0) == "timeout"
    wait_until_asleep(job.processes[0])  # in the second wait
    job.processes[0].send_signal(signal.SIGINT)
    assert job.line(0) == "interrupted"
    go_on.touch()
    assert job.line(0) == "2.0"


def test_the_interpreter_ends_with_operations_under_way(ranks):
    job = ranks(2, """
        import numpy, pleach
        group = pleach.join()
        pending = [group.all_reduce(numpy.ones(100000), async_=True) for _ in range(10)]
        if group.rank == 1:
            print(pending[-1].wait()[0])
    """)  # fmt: skip
    assert job.finish(1)[:2] == (0, "2.0\n")
    assert job.finish(0)[0] == 0


def test_the_interpreter_ends_though_nobody_answers(ranks):
    job = ranks(2, """
        import time, numpy, pleach
        group = pleach.join()
        group.barrier()
        if group.rank == 0:
            pending = group.all_reduce(numpy.ones(10), async_=True)
        else:
            time.sleep(20)
    """)  # fmt: skip
    began = time.monotonic()
    assert job.finish(0)[0] == 0
    assert time.monotonic() - began < 12


def test_ranks_that_do_not_come_are_a_join_error(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    with pytest.raises(pleach.JoinError):
        pleach.join(rank=0, world_size=2, rendezvous=f"file://{folder}", join_timeout=0.5)
    with pytest.raises(pleach.JoinError, match="tcp://HOST:PORT"):
        pleach.join(rank=0, world_size=2, rendezvous="nonsense")
    with pytest.raises(pleach.JoinError):
        pleach.join(rank=0)


def test_the_package_is_imported_fast_and_without_numpy():
    program = (
        "import time, sys; began = time.process_time(); import pleach; "
        "print(time.process_time() - began, 'numpy' in sys.modules)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(5)]  # fmt: skip
    times = [run.stdout.split() for run in runs]
    assert all(loaded == "False" for _, loaded in times)
    assert min(float(took) for took, _ in times) < 0.1, times


def test_the_command_runs_ranks_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import pleach\nprint('rank', pleach.join().rank)\n")
    command = [sys.executable, "-m", "pleach", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout and "rank 1" in done.stdout


class Table:
    """A store as torch.distributed.Store, in files."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, key):
        return os.path.join(self.folder, key.replace("/", "_"))

    def set(self, key, value):
        with open(self.path(key) + str(os.getpid()), "wb") as file:
            file.write(value)
        os.rename(file.name, self.path(key))

    def get(self, key):
        with open(self.path(key), "rb") as file:
            return file.read()

    def check(self, keys):
        return all(os.path.exists(self.path(key)) for key in keys)

    def add(self, key, amount):
        number = 0
        while True:
            number += 1
            try:
                os.close(os.open(f"{self.path(key)}.{number}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                pass


def check_store(_, folder, rank_of):
    group = pleach.join_in_store(Table(folder), rank_of(_), 2, prefix="x/", join_timeout=20)
    assert (group.all_reduce(np.ones(3)) == 2).all()
    part = group.split(0, key=1 - group.rank)
    value = part.all_gather(np.array([group.rank])).ravel().tolist()
    part.close()
    group.close()
    return value


def test_a_store_of_python_is_a_rendezvous(tmp_path):
    found = pleach.launch(check_store, 2, str(tmp_path), lambda group: group.rank, timeout=60)
    assert found == [[1, 0], [1, 0]]


class Hosted(Table):
    """A table that ends with the process of rank 0, and that the other ranks ask slowly."""

    def __init__(self, folder, is_host):
        super().__init__(folder)
        self.is_host = is_host

    def end(self):
        self.set("ended", b"")

    def check(self, keys):
        if not self.is_host:
            time.sleep(0.2)
        if os.path.exists(self.path("ended")):
            raise ConnectionResetError("the store has gone")
        return super().check(keys)


def check_hosted_store(group, folder):
    store = Hosted(folder, is_host=group.rank == 0)
    began = time.monotonic()
    with pytest.raises(pleach.JoinError) as refused:
        pleach.join_in_store(store, group.rank, 2, fabric=["shm", "tcp"][group.rank], join_timeout=20)
    if store.is_host:
        store.end()
    return str(refused.value), time.monotonic() - began


def test_all_ranks_are_told_why_they_did_not_join_before_the_host_of_their_store_ends(tmp_path):
    found = pleach.launch(check_hosted_store, 2, str(tmp_path), timeout=60)
    assert all("shm" in reason and "tcp" in reason for reason, _ in found), found
    assert all(took < 10 for _, took in found), found


def check_addresses(group):
    array = np.ones(4, "float32")
    pending = group.start("all_reduce", "float32", "sum", array.ctypes.data, 4, array.ctypes.data, 4, keep=array)
    pending.wait()
    assert (array == group.world_size).all()
    assert group.start("barrier", "uint8", None, 0, 0, 0, 0, blocking=True) is None
    peer = 1 - group.rank
    out = np.zeros(4, "float32")
    sent = group.start("send", "float32", None, array.ctypes.data, 4, 0, 0, root=peer, tag=3)
    group.start("recv", "float32", None, 0, 0, out.ctypes.data, 4, root=peer, tag=3).wait()
    sent.wait()
    assert (out == group.world_size).all()
    for arguments in [("median", "float32", 0), ("all_reduce", "float128", 0), ("all_reduce", "float32", 4)]:
        with pytest.raises(pleach.ArgumentError):
            group.start(arguments[0], arguments[1], "sum", 0, arguments[2], 0, arguments[2])


def test_calls_on_addresses():
    pleach.launch(check_addresses, 2, timeout=60)
