"""Tensors by key between endpoints of this process, and between processes that are killed."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

import pleach

LONG = 30


@pytest.fixture
def pair():
    """A sender, and the sender as a receiver sees it, with memory shared between them."""
    with pleach.Endpoint(timeout=LONG) as sender, pleach.Endpoint(timeout=LONG) as receiver:
        peer = receiver.connect(sender.address)
        peer.share_regions()
        yield sender, peer


@pytest.fixture
def program():
    """Starts Python programs, of which each prints lines."""
    running = []

    def start(text, *arguments):
        command = [sys.executable, "-u", "-c", textwrap.dedent(text), *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


SENDER = """
    import sys, numpy as np, pleach
    endpoint = pleach.Endpoint()
    for step in range(4):
        tensor = endpoint.tensor(100_000, "int32")
        tensor[:] = 7 + step
        endpoint.send(step, "w", tensor)
    print(endpoint.address)
    sys.stdin.read()
"""


def sender_of(program):
    process = program(SENDER)
    address = process.stdout.readline().strip()
    assert address, process.stderr.read()
    return process, address


def memory_of(array):
    """The object that holds the memory below an array."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def all_is_back(endpoint):
    until = time.monotonic() + LONG
    while endpoint.counts()["bytes_lent"] or endpoint.counts()["bytes_held"]:
        assert time.monotonic() < until, endpoint.counts()
        time.sleep(0.001)


@pytest.mark.parametrize(
    "name",
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split(),
)
def test_tensors_keep_type_and_shape(pair, name):
    sender, peer = pair
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 4), (1,) * 8):
        sent = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        lent = sender.tensor(shape, dtype)
        lent[...] = sent
        sender.send(1, "copied", sent)
        sender.send(1, "lent", lent)
        for key in ("copied", "lent"):
            received = peer.receive(1, key)
            assert received.dtype == dtype and received.shape == shape
            assert received.tobytes() == sent.tobytes()
            assert memory_of(received).way == "in place"


def test_what_comes_is_read_only_and_what_was_sent_is_too(pair):
    sender, peer = pair
    lent = sender.tensor((10, 16))
    assert lent.dtype == np.float32 and lent.flags.writeable
    lent[:] = 3
    sender.send(1, "w", lent)
    received = peer.receive(1, "w")
    for array in (lent, received, received[2:]):
        with pytest.raises(ValueError):
            array[0, 0] = 1
        with pytest.raises(ValueError):
            received.setflags(write=True)
    copy = received.copy()
    copy[0, 0] = 1
    assert received[0, 0] == 3


def test_an_array_of_the_endpoint_is_not_copied_and_parts_of_it_are_not(pair):
    sender, peer = pair
    lent = sender.tensor((100, 1000))
    lent[:] = np.arange(100)[:, None]
    touched = sender.counts()["bytes_lendable"]
    assert touched >= 400_000
    for step in range(20):
        sender.send(step, "all", lent)
        sender.send(step, "part", lent[16:32])
    assert sender.counts()["bytes_lendable"] == touched
    parts = [peer.receive(step, "part") for step in range(20)]
    assert all(part.shape == (16, 1000) and part[0, 0] == 16 for part in parts)
    # A part that does not begin at a multiple of 64 bytes is copied.
    sender.send(1, "crooked", lent[0, 1:11])
    assert sender.counts()["bytes_lendable"] > touched
    assert peer.receive(1, "crooked").tolist() == [0] * 10


def test_complex_numbers_and_bool_come_as_what_they_are_made_of(pair):
    sender, peer = pair
    sender.send(1, "c", np.array([1 + 2j, 3 - 4j], "complex64"))
    received = peer.receive(1, "c")
    assert received.dtype == np.float32 and received.tolist() == [[1, 2], [3, -4]]
    assert received.view("complex64").ravel().tolist() == [1 + 2j, 3 - 4j]
    sender.send(1, "b", np.array([True, False]))
    assert peer.receive(1, "b").tolist() == [1, 0]
    sender.send(1, "bytes", b"abc")
    assert peer.receive(1, "bytes").tobytes() == b"abc"


def test_memory_goes_back_with_the_last_array_and_not_before(pair):
    sender, peer = pair
    sender.send(1, "w", np.arange(1000))
    received = peer.receive(1, "w")
    held = weakref.ref(memory_of(received))
    view = received[10:20]
    del received
    gc.collect()
    assert held() is not None and sender.counts()["bytes_lent"] > 0
    for step in range(50):
        sender.send(step, "v", np.full(1000, step))
        assert peer.receive(step, "v")[0] == step
    assert view.tolist() == list(range(10, 20))
    del view
    gc.collect()
    assert held() is None
    all_is_back(sender)


def test_references_that_are_lost_leave_what_was_sent_and_received(pair):
    sender, peer = pair
    rng = np.random.default_rng(1)
    held = []
    for step in range(100):
        value = int(rng.integers(1 << 30))
        lent = sender.tensor(int(rng.integers(1, 5000)), "int64")
        lent[:] = value
        sender.send(step, "w", lent)
        del lent
        # Of other senders' memory nothing may lie in it.
        sender.tensor(5000, "int64")[:] = -1
        held.append((value, peer.receive(step, "w")))
        if len(held) > 10:
            del held[int(rng.integers(len(held)))]
        assert all((array == value).all() for value, array in held)
    held.clear()
    all_is_back(sender)


def test_arrays_outlive_endpoints_and_peers():
    sender = pleach.Endpoint()
    receiver = pleach.Endpoint()
    sender.send(1, "w", np.arange(100))
    received = receiver.connect(sender.address).receive(1, "w", timeout=LONG)
    receiver.close()
    sender.close()
    del sender, receiver
    gc.collect()
    assert received.sum() == 4950


def test_a_published_step_is_received_any_number_of_times(pair):
    sender, peer = pair
    sender.publish(5, {"layer.0.weight": np.ones(3), "layer.1.weight": sender.tensor(3)})
    for _ in range(3):
        assert peer.receive(5, "layer.0.weight").tolist() == [1, 1, 1]
    with pytest.raises(pleach.TensorNotFoundError, match="layer.0.weight") as raised:
        peer.receive(5, "layer.0.weights")
    error = raised.value
    assert isinstance(error, LookupError) and isinstance(error, pleach.ExchangeError)
    assert (error.kind, error.step, error.name) == ("not-found", 5, "layer.0.weights")
    assert error.peer == peer.address


def test_an_aborted_step_fails_until_it_is_cleaned_up(pair):
    sender, peer = pair
    pending = peer.start_receive(4, "w")
    sender.abort(4, "worker 3 is lost")
    with pytest.raises(pleach.TensorAbortedError, match="worker 3 is lost"):
        pending.wait()
    with pytest.raises(pleach.TensorAbortedError):
        sender.send(4, "w", np.zeros(3))
    sender.clean_up(4)
    sender.send(4, "w", np.zeros(3))
    assert peer.receive(4, "w").shape == (3,)


def test_a_tensor_that_does_not_come_is_a_timeout(pair):
    sender, peer = pair
    for call in (peer.receive, sender.receive):
        begun = time.monotonic()
        with pytest.raises(pleach.TensorTimeoutError) as raised:
            call(1, "never", timeout=0.12)
        assert 0.1 < time.monotonic() - begun < LONG
        error = raised.value
        assert isinstance(error, TimeoutError) and error.kind == "timed-out"
        assert (error.step, error.name) == (1, "never") and error.waited_s >= 0.1
    sender.send(1, "own", np.ones(2))
    assert sender.receive(1, "own").tolist() == [1, 1]


def test_a_send_waits_for_room():
    with pleach.Endpoint(bytes_held=1000, timeout=0.1) as sender:
        sender.send(1, "a", np.zeros(100))
        with pytest.raises(pleach.TensorTimeoutError, match="bytes of at most 1000 are held") as raised:
            sender.send(1, "b", np.zeros(100))
        assert raised.value.waited_s >= 0.1
        with pytest.raises(pleach.ExchangeError, match="raise the limit") as raised:
            sender.send(1, "b", np.zeros(1000))
        assert raised.value.kind == "exhausted"
        timer = threading.Timer(0.1, lambda: sender.receive(1, "a"))
        timer.start()
        sender.send(1, "b", np.zeros(100), timeout=LONG)
        timer.join()
    with pleach.Endpoint(bytes_lendable=4096) as small:
        with pytest.raises(pleach.ExchangeError, match="lendable memory") as raised:
            small.tensor(10_000)
        assert raised.value.kind == "exhausted"


def test_pending_tensors_wait_and_are_cancelled(pair):
    sender, peer = pair
    pending = peer.start_receive(1, "w")
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(timeout=0.01)
    cancelled = peer.start_receive(1, "w")
    sender.send(1, "w", np.array([5]))
    assert pending.wait(LONG).tolist() == [5] and pending.done()
    with pytest.raises(pleach.ExchangeError) as raised:
        pending.wait()
    assert raised.value.kind == "cancelled"
    sender.send(1, "w", np.array([6]))
    while not cancelled.done():
        time.sleep(0.001)
    cancelled.cancel()
    dropped = peer.start_receive(1, "w")
    del dropped
    assert peer.receive(1, "w").tolist() == [6]


def test_tensors_are_awaited(pair):
    sender, peer = pair

    async def receive(step):
        return await peer.start_receive(step, "w")

    async def all_of_them():
        tasks = [asyncio.ensure_future(receive(step)) for step in range(20)]
        cancelled = asyncio.ensure_future(receive(100))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        for step in range(20):
            sender.send(step, "w", np.array([step]))
        received = await asyncio.gather(*tasks)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return [int(array[0]) for array in received]

    assert asyncio.run(all_of_them()) == list(range(20))
    sender.send(100, "w", np.array([1]))
    assert peer.receive(100, "w").tolist() == [1], "the cancelled task took it"


def test_threads_share_endpoint_and_peer(pair):
    sender, peer = pair
    sums = []

    def receive(number):
        sums.append(sum(int(peer.receive(step, f"w{number}")[0]) for step in range(100)))

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for step in range(100):
        for number in range(4):
            sender.send(step, f"w{number}", np.array([step]))
    for thread in threads:
        thread.join()
    assert sums == [4950] * 4


def test_a_killed_sender_fails_its_receives_and_leaves_what_was_received(program):
    sender, address = sender_of(program)
    with pleach.Endpoint(timeout=LONG) as endpoint:
        peer = endpoint.connect(address)
        peer.share_regions()
        held = [peer.receive(step, "w") for step in range(4)]
        pending = peer.start_receive(9, "never")
        threading.Timer(0.2, sender.kill).start()
        begun = time.monotonic()
        with pytest.raises(pleach.PeerUnavailableError) as raised:
            peer.receive(9, "never")
        assert time.monotonic() - begun < LONG / 2, "long before the deadline"
        error = raised.value
        assert isinstance(error, ConnectionError)
        assert (error.step, error.name, error.peer) == (9, "never", address)
        with pytest.raises(pleach.PeerUnavailableError):
            pending.wait()
        sender.wait()
        for step, array in enumerate(held):
            assert (array == 7 + step).all(), "it stays readable after the sender's end"
        del held, array
        gc.collect()


def test_a_restarted_sender_is_another_one(program):
    first = pleach.Endpoint()
    address = first.address
    with pleach.Endpoint(timeout=LONG) as endpoint:
        peer = endpoint.connect(address)
        first.send(1, "w", np.zeros(1))
        peer.receive(1, "w")
        first.close()
        with pleach.Endpoint(address) as second:
            second.send(1, "w", np.ones(1))
            with pytest.raises(pleach.TensorAbortedError, match="restarted"):
                for _ in range(100):
                    try:
                        peer.receive(1, "w")
                    except pleach.PeerUnavailableError:
                        time.sleep(0.01)
            assert endpoint.connect(address).receive(1, "w").tolist() == [1]


def test_a_killed_receiver_gives_everything_back(program):
    with pleach.Endpoint(timeout=LONG) as sender:
        tensor = sender.tensor(100_000)
        sender.publish(0, {"w": tensor})
        receivers = []
        for _ in range(3):
            receiver = program(
                """
                import sys, pleach
                peer = pleach.Endpoint().connect(sys.argv[1])
                peer.share_regions()
                held = [peer.receive(0, "w") for _ in range(10)]
                print("ready")
                peer.receive(1, "never")
                """,
                sender.address,
            )
            assert receiver.stdout.readline() == "ready\n", receiver.stderr.read()
            receivers.append(receiver)
        assert sender.counts()["leases"] == 30
        for receiver in receivers:
            receiver.kill()
            receiver.wait()
        until = time.monotonic() + LONG
        while sender.counts()["leases"]:
            assert time.monotonic() < until, sender.counts()
            time.sleep(0.01)


INTERRUPTED = """
    import sys, signal, threading, time, pleach
    what, address = sys.argv[1:]
    endpoint = pleach.Endpoint(timeout=60, bytes_held=100)
    peer = endpoint.connect(address)
    if what != "link":
        peer.share_regions()
    pending = peer.start_receive(1, "never") if what == "wait" else None
    if what == "send":
        endpoint.send(1, "a", bytes(100))
    begun = time.monotonic()
    try:
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
        if what == "receive" or what == "link":
            peer.receive(1, "never")
        elif what == "own":
            endpoint.receive(1, "never")
        elif what == "wait":
            pending.wait()
        else:
            endpoint.send(1, "a", bytes(100))
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begun < 10)
    if what == "receive":
        print(peer.receive(0, "w").sum())
"""


@pytest.mark.parametrize("what", ["receive", "own", "wait", "send"])
def test_ctrl_c_ends_a_wait(program, what):
    _sender, address = sender_of(program)
    process = program(INTERRUPTED, what, address)
    out, error = process.communicate(timeout=LONG)
    assert process.returncode == 0, error
    assert out.splitlines()[0] == "interrupted True"
    if what == "receive":
        assert out.splitlines()[1] == "700000"


def test_ctrl_c_ends_the_wait_for_a_link(program):
    import socket

    # It takes connections and never answers.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        process = program(INTERRUPTED, "link", f"127.0.0.1:{silent.getsockname()[1]}")
        out, error = process.communicate(timeout=LONG)
    assert process.returncode == 0 and out == "interrupted True\n", error


def test_the_interpreter_ends_with_receives_under_way_and_arrays_held(program):
    _sender, address = sender_of(program)
    process = program(
        """
        import sys, threading, pleach
        endpoint = pleach.Endpoint()
        peer = endpoint.connect(sys.argv[1])
        held = peer.receive(0, "w"), peer.start_receive(1, "never"), endpoint.tensor(10)

        def receive():
            try:
                peer.receive(2, "never")
            except pleach.PeerUnavailableError:
                pass

        threading.Thread(target=receive, daemon=True).start()
        print("ready")
        """,
        address,
    )
    begun = time.monotonic()
    out, error = process.communicate(timeout=LONG)
    assert (process.returncode, out, error) == (0, "ready\n", "")
    assert time.monotonic() - begun < LONG / 2


def test_a_forked_child_gets_errors_and_gives_nothing_back(pair):
    sender, peer = pair
    sender.send(1, "w", np.arange(1000))
    received, lent = peer.receive(1, "w"), sender.tensor(10)
    pending = peer.start_receive(1, "later")
    child = os.fork()
    if child == 0:
        # Not as a test: the child ends here, whatever happens.
        status = 1
        try:
            errors = 0
            for call in (
                lambda: sender.send(1, "x", np.zeros(1)),
                lambda: peer.receive(1, "x"),
                lambda: sender.receive(1, "x"),
                lambda: peer.start_receive(1, "x"),
                lambda: pending.wait(),
                lambda: sender.counts(),
                lambda: sender.close(),
            ):
                try:
                    call()
                except pleach.ForkedError:
                    errors += 1
            del received, lent, pending, peer, sender
            gc.collect()
            status = 0 if errors == 7 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sender.counts()["leases"] == 1, "the child gave the parent's memory back"
    assert received.sum() == 499_500
    sender.send(1, "later", np.ones(1))
    assert pending.wait(LONG).tolist() == [1]
    del received
    gc.collect()
    all_is_back(sender)


def test_wrong_arguments_say_what_is_wrong(pair):
    sender, peer = pair
    zeros = np.zeros((4, 4))
    for name in ("", "w" * 1025):
        with pytest.raises(pleach.ArgumentError):
            sender.send(1, name, zeros)
        with pytest.raises(pleach.ArgumentError):
            peer.receive(1, name)
    for step in (-1, 1 << 64, "1"):
        with pytest.raises((OverflowError, TypeError)):
            peer.receive(step, "w")
    for wrong in (None, 5, np.array([None]), np.array(["a"]), zeros.T[1:], zeros[:, 1], np.zeros((1,) * 9)):
        with pytest.raises(pleach.ArgumentError):
            sender.send(1, "w", wrong)
        with pytest.raises(pleach.ArgumentError):
            sender.publish(1, {"w": wrong})
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(pleach.ArgumentError):
            peer.receive(1, "w", timeout=timeout)
    with pytest.raises(pleach.ArgumentError):
        sender.tensor(3, "datetime64[s]")
    with pytest.raises(pleach.ArgumentError):
        pleach.Endpoint(fabric="pigeon")
    with pytest.raises(pleach.ArgumentError):
        pleach.Endpoint("nowhere")
    with pytest.raises(pleach.ArgumentError, match="/nowhere"):
        pleach.Endpoint(secret_file="/nowhere")
    with pytest.raises(pleach.ArgumentError, match="regions are required"):
        pleach.Endpoint(fabric="none", require_regions=True)
    with pytest.raises(pleach.ExchangeError, match="cannot listen"):
        pleach.Endpoint(sender.address)
    with pytest.raises(pleach.ArgumentError, match="HOST:PORT"):
        sender.connect("127.0.0.1")
    with pytest.raises(pleach.PeerUnavailableError, match="127.0.0.1:1"):
        sender.connect("127.0.0.1:1").receive(1, "w")


def test_a_closed_endpoint_refuses_calls():
    sender, receiver = pleach.Endpoint(), pleach.Endpoint()
    peer = receiver.connect(sender.address)
    lent = sender.tensor(3)
    sender.close()
    sender.close()
    assert sender.closed and "closed" in repr(sender)
    for call in (
        lambda: sender.send(1, "w", lent),
        lambda: sender.tensor(3),
        lambda: sender.receive(1, "w"),
        lambda: sender.connect("127.0.0.1:1"),
        lambda: sender.publish(1, {}),
    ):
        with pytest.raises(pleach.ClosedError):
            call()
    receiver.close()
    with pytest.raises(pleach.PeerUnavailableError, match="the endpoint was closed"):
        peer.receive(1, "w")
    lent[:] = 1


def test_endpoints_without_shared_memory_take_tensors_inline():
    with pleach.Endpoint() as sender, pleach.Endpoint(fabric="none", timeout=LONG) as receiver:
        peer = receiver.connect(sender.address)
        sender.send(1, "w", np.arange(1000))
        received = peer.receive(1, "w")
        assert memory_of(received).way == "inline" and received.sum() == 499_500
        assert not received.flags.writeable
        with pytest.raises(pleach.ExchangeError) as raised:
            peer.share_regions()
        assert raised.value.kind == "no-regions"
        all_is_back(sender)


def test_secrets_must_be_equal(tmp_path):
    (tmp_path / "one").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "two").write_text("fedcba9876543210fedcba9876543210")
    for name in ("one", "two"):
        (tmp_path / name).chmod(0o600)
    with pleach.Endpoint(secret_file=tmp_path / "one") as sender:
        sender.send(1, "w", np.zeros(2))
        with pleach.Endpoint(secret_file=tmp_path / "two", timeout=LONG) as other:
            with pytest.raises(pleach.PeerUnavailableError, match="another secret"):
                other.connect(sender.address).receive(1, "w")
        with pleach.Endpoint(secret_file=tmp_path / "one", timeout=LONG) as same:
            assert same.connect(sender.address).receive(1, "w").shape == (2,)
