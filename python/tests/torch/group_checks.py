"""A rank that checks what a group of pleach does by itself: limits, messages, ends, parts.

usage: group_checks.py NAME...: functions below whose names begin with `check_`
"""

import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import pleach.torch
from pleach.torch import _process_group

from against_gloo import Check, main, same


class Recorder:
    """Stands for the group of the package, and keeps the time limit of each call."""

    def __init__(self, group):
        self._group = group
        self.limits = []

    def start(self, collective, *arguments, timeout=None, **others):
        self.limits.append((collective, timeout))
        return self._group.start(collective, *arguments, timeout=timeout, **others)

    def __getattr__(self, name):
        return getattr(self._group, name)


class FailingSends(Recorder):
    """Stands for the group of the package: each send fails after its end."""

    failed = 0

    def start(self, collective, *arguments, **others):
        pending = super().start(collective, *arguments, **others)
        if collective != "send":
            return pending
        send = FailingSend(self, pending)
        return send if pending is not None else send.wait()


class FailingSend:
    """A send that fails, under way or ended."""

    def __init__(self, group, pending):
        self._group = group
        self._pending = pending

    def wait(self):
        if self._pending is not None:
            self._pending.wait()
        self._group.failed += 1
        raise pleach.LostError("a send failed")


def until(what, is_so):
    """Waits until a condition holds."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() - begin < 60, f"not within 60 s: {what}"
        time.sleep(0.01)


def refused(kind, call):
    """Returns the exception of a call."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("no error")


class GroupChecks(Check):
    def check_limits(self):
        """The limit that a call names is that call's alone."""
        group = dist.new_group(timeout=timedelta(seconds=50))
        recorder = group._comm._group = Recorder(group._comm._group)
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=33)
        group.allreduce([torch.ones(2)], options).wait()
        tensor = torch.ones(2)
        if self.rank < 2:
            (dist.send if self.rank == 0 else dist.recv)(tensor, 1 - self.rank, group=group)
        dist.barrier(group)
        assert [limit for name, limit in recorder.limits if name == "all_reduce"] == [33], recorder.limits
        assert {limit for name, limit in recorder.limits if name != "all_reduce"} == {50}, recorder.limits

    def check_monitored_barrier_with_two_missing(self):
        limit_s = 8
        if self.rank in (2, 3):
            dist.barrier(self.gloo)
            return
        begin = time.monotonic()
        error = refused(
            pleach.torch.PleachTimeout,
            lambda: dist.monitored_barrier(timeout=timedelta(seconds=limit_s), wait_all_ranks=True),
        )
        assert self.rank != 0 or "ranks 2, 3 have not" in str(error), error
        assert time.monotonic() - begin < 2 * limit_s, "each missing rank was waited for in turn"
        dist.barrier(self.gloo)

    def check_partial_all_reduce(self):
        """Gradients of the ranks that are in time do not wait for a late rank, whose steps go on later."""
        last = self.size - 1
        torch.manual_seed(3)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3).to(torch.float64))
        rounds = pleach.torch.PartialAllReduce(f"quorum:{last}", late="drop")
        model.register_comm_hook(rounds, pleach.torch.partial_all_reduce)

        def step(value):
            model.zero_grad()
            model(torch.full((2, 5), value, dtype=torch.float64)).sum().backward()
            return model.module.weight.grad

        # DDP makes its buckets anew after the first step, on all ranks.
        for _ in range(2):
            step(1.0)
            dist.barrier(self.gloo)
        if self.rank == last:
            # The others have made their steps without this rank.
            dist.barrier(self.gloo)
            step(100.0)
        else:
            for _ in range(3):
                # The gradient of a weight is the sum of its inputs, alike on all ranks in time.
                torch.testing.assert_close(step(4.0), torch.full((3, 5), 8.0, dtype=torch.float64))
            dist.barrier(self.gloo)
        dist.barrier(self.gloo)
        rounds.finish()
        report = rounds.report()
        assert report["counted"][0] >= 3 and report["counted"][last] <= report["rounds"] - 3, report
        assert report["dropped"] == report["late"] and (self.rank != last or report["late"] > 0), report

        def contribute(rounds, length=2):
            rounds._contribute(0, torch.ones(length), [torch.ones(length)])

        for wrong, text in [
            ("some", "all solo majority"),
            ("quorum:0", "name 1 to"),
            (f"quorum:{self.size + 1}", "never"),
            ("deadline:0s", "deadline above zero"),
        ]:
            error = refused(ValueError, lambda: contribute(pleach.torch.PartialAllReduce(wrong)))
            assert text in str(error), error
        # What differs between ranks is refused on all of them, and both ways are named.
        first = self.rank == 0
        for mine, names in [
            (pleach.torch.PartialAllReduce("solo" if first else "majority"), (", solo, ", ", majority, ")),
            (pleach.torch.PartialAllReduce("all", late="drop" if first else "carry"), ("late: drop", "late: carry")),
            (
                pleach.torch.PartialAllReduce("all", divisor="world" if first else "contributors"),
                ("divisor: world", "divisor: contributors"),
            ),
        ]:
            error = refused(ValueError, lambda: contribute(mine))
            assert all(name in str(error) for name in names), error
        rounds = pleach.torch.PartialAllReduce("all")
        error = refused(ValueError, lambda: contribute(rounds, 2 if first else 3))
        assert "2 f32 (sum)" in str(error) and "3 f32 (sum)" in str(error), error

    def check_late_gradients_count_once(self):
        """Each rank gets every late gradient once: in a later step, from new buckets too, or at the end."""
        last = self.size - 1
        for late in ("carry", "correct", "drop"):
            torch.manual_seed(3)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3).to(torch.float64))
            rounds = pleach.torch.PartialAllReduce(f"quorum:{last}", late=late, divisor="world")
            model.register_comm_hook(rounds, pleach.torch.partial_all_reduce)
            parameters = list(model.module.parameters())
            total = [torch.zeros_like(parameter) for parameter in parameters]

            def step(value):
                model.zero_grad()
                model(torch.full((2, 5), value, dtype=torch.float64)).sum().backward()
                for sum, parameter in zip(total, parameters):
                    sum += parameter.grad

            def late_at_first(*arguments):
                """Rounds of which the others have made one without this rank, which they met to make them."""
                del comm.partial
                made = comm.partial(*arguments)
                dist.barrier(self.gloo)
                return made

            comm = rounds._group._comm
            if self.rank == last:
                comm.partial = late_at_first
            # DDP makes its buckets anew after the first step, of the same length in another order.
            for number in range(4):
                if self.rank == last and number >= 2:
                    # The others have made this step without this rank.
                    dist.barrier(self.gloo)
                step(10.0 ** (number + 1))
                if self.rank != last and number != 1:
                    dist.barrier(self.gloo)
                dist.barrier(self.gloo)
            left = rounds.finish()
            report = rounds.report()
            assert report["missed"] == 0 and (self.rank != last or report["late"] >= 3), report
            if late == "drop":
                assert left == {}, left
                continue
            assert set(left) == set(parameters), left
            for sum, parameter, gradient in zip(total, parameters, (22220.0, 8.0)):
                assert left[parameter].shape == parameter.shape
                # A weight has twice the values of a step as its gradient, a bias 2.
                expected = torch.full_like(parameter, gradient)
                torch.testing.assert_close(sum + left[parameter], expected, rtol=1e-12, atol=0)

    def check_a_rank_that_leaves_partial_rounds(self):
        """A rank that drops its rounds ends those of the others with its name, and the gradient stays."""
        last = self.size - 1
        rounds = pleach.torch.PartialAllReduce("all")
        gradient, parameters = torch.full((3,), self.rank + 1.0), [torch.ones(3)]
        rounds._contribute(0, gradient, parameters)
        torch.testing.assert_close(gradient, torch.full((3,), (self.size + 1) / 2))
        dist.barrier(self.gloo)
        if self.rank == last:
            rounds._buckets.clear()
        else:
            error = refused(pleach.torch.PleachError, lambda: rounds._contribute(0, gradient, parameters))
            assert f"rank {last} has closed the group" in str(error), error
            torch.testing.assert_close(gradient, torch.full((3,), (self.size + 1) / 2))
        dist.barrier(self.gloo)

    def check_any_source(self):
        """All ranks but 0 send two messages of each of two tags, and rank 0 takes some from anywhere."""
        others = self.size - 1
        if self.rank != 0:
            works = []
            for number in range(2):
                for tag in (4, 7):
                    works.append(dist.isend(torch.tensor([self.rank, tag, number]), 0, tag=tag))
            for work in works:
                work.wait()
        else:
            found = []
            for _ in range(2 * others):
                tensor = torch.zeros(3, dtype=torch.int64)
                assert dist.recv(tensor, tag=7) == tensor[0]
                found.append(tuple(tensor.tolist()))
            ranks = range(1, self.size)
            assert sorted(found) == [(rank, 7, number) for rank in ranks for number in range(2)], found
            for rank in ranks:
                for number in range(2):
                    tensor = torch.zeros(3, dtype=torch.int64)
                    dist.recv(tensor, rank, tag=4)
                    assert tensor.tolist() == [rank, 4, number], tensor
        # Later messages with a named source, collectives, and messages of another shape work as
        # before.
        total = torch.ones(100)
        dist.all_reduce(total)
        same(total, torch.full((100,), float(self.size)), "all_reduce after recv from any source")
        large = torch.full((100_000,), float(self.rank))
        if self.rank == 0:
            for rank in range(1, self.size):
                got = torch.zeros(100_000)
                dist.recv(got, rank)
                same(got, torch.full((100_000,), float(rank)), "a named source after any source")
            got = torch.zeros(400, 500).t()
            source = dist.recv(got)
            same(got, torch.full((500, 400), float(source)), "strided, from any source")
            assert source == 1
        else:
            dist.send(large, 0)
            if self.rank == 1:
                dist.send(torch.ones(500, 400), 0)

    def check_any_source_that_sends_nothing(self):
        group = dist.new_group(timeout=timedelta(seconds=1))
        if self.rank == 0:
            error = refused(pleach.torch.PleachTimeout, lambda: dist.recv(torch.ones(1), group=group))
            assert "tag 0" in str(error) and error.waited_s == 1, error
        dist.barrier(self.gloo)
        total = torch.ones(1)
        group.set_timeout(timedelta(seconds=60))
        dist.all_reduce(total, group=group)
        same(total, torch.tensor([float(self.size)]), "the group after the time of a recv from any source")
        dist.destroy_process_group(group)

    def check_any_source_beside_a_named_receive(self):
        """A receive from any source takes a message that a receive with another tag has kept."""
        if self.rank == 0:
            late, early = torch.zeros(1), torch.zeros(1)
            work = dist.irecv(late, 1, tag=6)
            inbox = dist.group.WORLD._messages._inboxes[1]
            until("the receive that names its source waits", inbox.lock.locked)
            dist.barrier(self.gloo)
            assert dist.recv(early, tag=5) == 1
            dist.barrier(self.gloo)
            work.wait()
            same(early, torch.tensor([5.0]), "from any source")
            same(late, torch.tensor([6.0]), "from a named source")
        else:
            dist.barrier(self.gloo)
            if self.rank == 1:
                dist.send(torch.tensor([5.0]), 0, tag=5)
            dist.barrier(self.gloo)
            if self.rank == 1:
                dist.send(torch.tensor([6.0]), 0, tag=6)

    def check_a_group_is_closed_even_if_its_posted_receives_cannot_be_ended(self):
        limit_s, _process_group.CLOSE_S = _process_group.CLOSE_S, 60.0
        group = dist.new_group(timeout=timedelta(seconds=1))
        native = group._comm._group = FailingSends(group._comm._group)
        if self.rank == 0:
            refused(pleach.torch.PleachTimeout, lambda: dist.recv(torch.ones(1), group=group))
        dist.barrier(self.gloo)
        dist.destroy_process_group(group)
        assert native.closed and native.failed == (self.rank != 0), native.failed
        _process_group.CLOSE_S = limit_s

    def check_monitored_barriers_leave_the_store_as_it_is(self):
        store = dist.group.WORLD.get_group_store()
        counts = []
        for _ in range(2):
            for _ in range(4):
                dist.monitored_barrier(timeout=timedelta(seconds=60))
            dist.barrier(self.gloo)
            counts.append(store.num_keys())
            dist.barrier(self.gloo)
        assert counts[0] == counts[1], counts

    def check_split_group(self):
        if not hasattr(torch._C._distributed_c10d.ProcessGroup, "split_group"):
            # Until torch 2.8 or so it splits groups of GPUs alone.
            return
        half = self.size // 2
        part = dist.split_group(split_ranks=[list(range(half)), list(range(half, self.size))])
        assert part.size() == half and part.rank() == self.rank % half
        tensor = torch.tensor([self.rank])
        dist.all_reduce(tensor, group=part)
        begin = self.rank // half * half
        same(tensor, torch.tensor([sum(range(begin, begin + half))]), "split_group")
        alone = dist.split_group(split_ranks=[[self.size - 1]], group_desc="the last")
        assert (self.rank == self.size - 1) == isinstance(alone, dist.ProcessGroup)

    def check_objects_of_messages(self):
        if self.rank == 0:
            dist.send_object_list([{"from": 0}, "text" * 1000], 1)
            got = [None, None]
            source = dist.recv_object_list(got, 1)
            assert source == 1 and got == ["back", (1, 2)], got
        elif self.rank == 1:
            got = [None, None]
            assert dist.recv_object_list(got, 0) == 0
            assert got == [{"from": 0}, "text" * 1000]
            dist.send_object_list(["back", (1, 2)], 0)
        dist.barrier()

    def check_premultiplied_sums(self):
        for factor in (0.5, torch.tensor([0.25])):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                tensor = torch.full((5,), 2.0 * (self.rank + 1), dtype=dtype)
                dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
                total = 2.0 * self.size * (self.size + 1) / 2 * float(factor)
                same(tensor, torch.full((5,), total, dtype=dtype), f"premultiplied by {factor}")
        output = torch.zeros(2)
        dist.reduce_scatter_tensor(output, torch.ones(2 * self.size), dist._make_nccl_premul_sum(0.5))
        same(output, torch.full((2,), self.size / 2), "premultiplied reduce_scatter")

    def check_overlapping_memory(self):
        whole = torch.zeros(3 * self.size)
        own = whole[3 * self.rank : 3 * self.rank + 3]
        own.fill_(self.rank)
        dist.all_gather_into_tensor(whole, own)
        expected = torch.arange(float(self.size)).repeat_interleave(3)
        same(whole, expected, "all_gather_into_tensor of a part of the output")
        source = torch.arange(3.0 * self.size)
        output = source[3 * self.rank : 3 * self.rank + 3]
        wanted = output * self.size
        before = source.clone()
        dist.reduce_scatter_tensor(output, source)
        same(output, wanted, "reduce_scatter_tensor into a part of the input")
        before[3 * self.rank : 3 * self.rank + 3] = wanted
        same(source, before, "the rest of the input")
        both = torch.full((self.size,), float(self.rank))
        dist.all_to_all_single(both, both)
        same(both, torch.arange(float(self.size)), "all_to_all_single in place")
        tensor = torch.arange(4.0)
        dist.all_gather([tensor] + [torch.zeros(4) for _ in range(self.size - 1)], tensor)
        same(tensor, torch.arange(4.0), "all_gather whose input is an output")

    def check_coalesced_calls_are_under_way_together(self):
        group = dist.new_group()
        recorder = group._comm._group = Recorder(group._comm._group)
        tensors = [torch.full((number,), float(self.rank)) for number in range(100)]
        tensors += [torch.full((40_000,), float(self.rank)), torch.full((7,), self.rank), torch.ones(3, 4).t() * self.rank]
        options = dist.AllreduceCoalescedOptions()
        group.allreduce_coalesced(tensors, options).wait()
        total = self.size * (self.size - 1) // 2
        for tensor in tensors:
            same(tensor, torch.full(tensor.shape, total, dtype=tensor.dtype), "allreduce_coalesced")
        # Short ones of f32 together, the long one, those of i64.
        assert len(recorder.limits) == 3, recorder.limits
        outputs = [torch.zeros(self.size * number) for number in range(1, 40)]
        inputs = [torch.full((number,), float(self.rank)) for number in range(1, 40)]
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        for output in outputs:
            same(output.view(self.size, -1)[:, 0], torch.arange(float(self.size)), "allgather_into_tensor_coalesced")
        lists = [[torch.zeros(number) for _ in range(self.size)] for number in range(1, 20)]
        group.allgather_coalesced(lists, inputs[:19]).wait()
        for outputs in lists:
            same(torch.stack(outputs)[:, 0], torch.arange(float(self.size)), "allgather_coalesced")
        parts = [torch.zeros(number) for number in range(1, 20)]
        group.reduce_scatter_tensor_coalesced(parts, [torch.ones(self.size * part.numel()) for part in parts]).wait()
        for part in parts:
            same(part, torch.full(part.shape, float(self.size)), "reduce_scatter_tensor_coalesced")
        from torch.distributed.distributed_c10d import _coalescing_manager

        parts = [torch.zeros(2), torch.zeros(3, 2)]
        with _coalescing_manager():
            for part in parts:
                dist.reduce_scatter_tensor(part, torch.ones(self.size * part.shape[0], *part.shape[1:]))
        for part in parts:
            same(part, torch.full(part.shape, float(self.size)), "coalesced reduce_scatter_tensor")

    def check_callbacks_that_wait(self):
        """What callbacks start has one place in the order of calls on all ranks, whenever operations end on each."""
        group = dist.new_group()

        def below(depth):
            def callback(future):
                future.value()
                started = dist.all_reduce(torch.full((3,), float(depth)), group=group, async_op=True).get_future()
                same(started.wait()[0], torch.full((3,), float(depth * self.size)), f"a callback of depth {depth}")
                if depth == 1:
                    same(all_reduced(torch.ones(1)), torch.full((1,), float(self.size)), "a call that is not async")
                return started.wait()[0] if depth == 1 else started.then(below(depth - 1)).wait()

            return callback

        def all_reduced(tensor):
            dist.all_reduce(tensor, group=group)
            return tensor

        delays = random.Random(self.rank)
        for _ in range(10):
            futures = []
            for number in range(4):
                # Of the lengths of those of the callbacks: a wrong order is a wrong sum.
                work = dist.all_reduce(torch.full((3,), 100.0 + number), group=group, async_op=True)
                time.sleep(delays.choice((0, 0, 1e-3)))
                futures.append(work.get_future().then(below(2)).then(below(4)))
                time.sleep(delays.choice((0, 0, 3e-3)))
            for future in futures:
                same(future.wait(), torch.full((3,), float(self.size)), "a chain of callbacks")

        def meeting(start, join):
            """What rank 0 starts has not ended when it returns."""
            if self.rank == 0:
                started = start()
                dist.barrier(self.gloo)
                return started
            dist.barrier(self.gloo)
            join()

        # A callback waits for what was started behind its operation.
        behind = []

        def start():
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            future = work.get_future().then(lambda _: behind[0].wait())
            behind.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
            return future

        future = meeting(start, lambda: [all_reduced(torch.ones(count)) for count in (1, 2)])
        assert self.rank != 0 or future.wait()
        # A callback receives from the peer of its message.
        received = torch.zeros(1)

        def send():
            if self.rank == 1:
                dist.send(torch.ones(1), 0, group=group)
                dist.send(torch.full((1,), 2.0), 0, group=group)

        def receive():
            work = dist.irecv(torch.zeros(1), 1, group=group)
            return work.get_future().then(lambda _: dist.recv(received, 1, group=group))

        future = meeting(receive, send)
        assert self.rank != 0 or (future.wait(), received.item()) == (1, 2)
        # A group is destroyed and aborted below a callback.
        for end in (dist.destroy_process_group, lambda group: group.abort()):
            group = dist.new_group()

            def start():
                def callback(_):
                    until("the group has ended", lambda: group._closed)
                    all_reduced(torch.ones(1))

                return dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(callback)

            future = meeting(start, lambda: all_reduced(torch.ones(1)))
            dist.barrier(self.gloo)
            end(group)
            assert self.rank != 0 or "the group is" in str(refused(RuntimeError, future.wait))
            until("the threads of the group have ended", lambda: not (group._lane._thread and group._lane._thread.is_alive()))

    def check_compile(self):
        """A model with functional collectives, compiled: by the compiler of C++ where there is one."""
        import shutil

        import torch.distributed._functional_collectives as functional

        def model(data):
            total = functional.all_reduce(data * 2, "sum", dist.group.WORLD)
            rows = functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)
            part = functional.reduce_scatter_tensor(rows, "sum", 0, dist.group.WORLD)
            return torch.relu(part) + 1

        backend = "inductor" if shutil.which("g++") else "aot_eager"
        data = torch.full((4,), float(self.rank + 1))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        same(compiled(data), model(data), f"torch.compile by {backend}")
        total = self.size * (self.size + 1.0)
        same(compiled(data), torch.full((4,), (total + 1) * self.size + 1), f"torch.compile by {backend}")

    def check_other_devices(self):
        """A name for the CPU is understood; tensors elsewhere are refused with what to do."""
        for backend in ("cpu:pleach", "cpu:pleach,cuda:gloo"):
            group = dist.new_group(backend=backend)
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            same(total, torch.tensor([float(self.size)]), backend)
            meta = torch.ones(1, device="meta")
            error = refused(pleach.torch.PleachUnsupported, lambda: dist.all_reduce(meta, group=group))
            assert "group of another backend" in str(error), error

    def check_dlpack(self):
        """The groups of the package take tensors of torch, of types that NumPy lacks too."""
        group = dist.group.WORLD._comm._group
        for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float32, torch.int16):
            tensor = torch.ones(1000).to(dtype)
            try:
                tensor.__dlpack__()
            except (BufferError, RuntimeError):
                assert dtype == torch.float8_e5m2, dtype  # an older torch does not export it
                continue
            assert group.all_reduce(tensor) is tensor
            same(tensor, torch.full((1000,), float(self.size)).to(dtype), f"DLPack of {dtype}")

    def check_abort(self):
        """The work of all ranks ends, the group says why, and its threads end."""

        def threads():
            return {thread for thread in threading.enumerate() if thread.name.startswith("pleach-")}

        before = threads()
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
        if self.rank == 0:
            receive = dist.irecv(torch.ones(1), 1, group=group)
            dist.barrier(self.gloo)
            group.abort()
            error = refused(pleach.torch.PleachError, lambda: dist.barrier(group))
            assert "aborted" in str(error), error
            refused(pleach.torch.PleachError, receive.wait)
        else:
            work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
            dist.barrier(self.gloo)
            error = refused(pleach.torch.PleachError, work.wait)
            assert error.kind == "aborted" and error.rank == 0, error
            assert "rank 0 aborted" in str(refused(RuntimeError, work.get_future().wait))
            group.abort()
        until("the threads of the group have ended", lambda: threads() <= before)
        # A job that another thread has checked before the end is refused as well.
        for is_async in (True, False):
            refused(pleach.torch.PleachError, lambda: group._lane.give(lambda: None, [], is_async))
        refused(pleach.torch.PleachError, lambda: group._messages.send(torch.ones(1), (self.rank + 1) % self.size, 0, 60))
        dist.barrier()


if __name__ == "__main__":
    main(GroupChecks)
