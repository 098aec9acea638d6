"""A rank that makes each call in a group of pleach and in a group of gloo, and compares the results.

usage: against_gloo.py NAME...: functions below whose names begin with `check_`
"""

import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import pleach.torch
from ranks import leave

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
MOVED = [*FLOATS, *INTEGERS, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16]
REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
BITS = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
SHAPES = [(), (1,), (7,), (3, 5), (0,), (4096, 9)]


def values(shape, dtype, seed, rank):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tensor = torch.randint(0, 3, shape, generator=generator)
    return tensor.to(torch.float32).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else tensor.to(dtype)


def same(actual, expected, what):
    if actual.dtype.is_floating_point and actual.dtype.itemsize == 1:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(actual, expected), f"{what}: {actual} is not {expected}"


class Check:
    def __init__(self):
        dist.init_process_group("pleach", timeout=timedelta(seconds=60))
        self.gloo = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = (dist.group.WORLD, self.gloo)

    def both(self, call, what):
        """Compares what `call` returns, a list of tensors, for both groups."""
        found, expected = (call(group) for group in self.groups)
        assert len(found) == len(expected) and found
        for one, other in zip(found, expected):
            same(one, other, what)

    def check_all_reduce(self):
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
        bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        for dtype in [*FLOATS, *INTEGERS]:
            for op in ops if dtype.is_floating_point else ops + bits:
                for seed, shape in enumerate(SHAPES):
                    def call(group):
                        tensor = values(shape, dtype, seed, self.rank)
                        dist.all_reduce(tensor, op, group=group)
                        return [tensor]

                    self.both(call, f"all_reduce {op} {dtype} {shape}")

    def check_all_reduce_that_gloo_lacks(self):
        mean = torch.tensor([1.0, self.rank])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        same(mean, torch.tensor([1.0, (self.size - 1) / 2]), "avg")
        scaled = torch.ones(3)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        same(scaled, torch.full((3,), self.size / 2), "premultiplied sum")
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = torch.ones(5).to(dtype)
            dist.all_reduce(tensor)
            same(tensor, torch.full((5,), float(self.size)).to(dtype), str(dtype))
        truth = torch.tensor([self.rank == 0, True, False])
        dist.all_reduce(truth)
        same(truth, torch.tensor([True, True, False]), "any")
        truth = torch.tensor([self.rank == 0, True, False])
        dist.all_reduce(truth, dist.ReduceOp.PRODUCT)
        same(truth, torch.tensor([False, True, False]), "all")
        pair = torch.tensor([1 + 2j, 0.5j]) * (self.rank + 1)
        dist.all_reduce(pair)
        same(pair, torch.tensor([1 + 2j, 0.5j]) * (self.size * (self.size + 1) / 2), "complex")

    def check_strides(self):
        """gloo takes contiguous memory from the first element on, so gloo is given contiguous copies."""

        def call(group):
            def pieces(tensor):
                return tensor.contiguous() if group is self.gloo else tensor

            base = values((6, 8), torch.float32, 1, self.rank)
            part = pieces(base.t()[1:5])
            dist.all_reduce(part, group=group)
            base.t()[1:5] = part
            column = pieces(base[:, 6])
            dist.broadcast(column, 1, group=group)
            base[:, 6] = column
            wide = torch.zeros(2 * self.size, 4).t()
            outputs = [pieces(wide[:, 2 * rank]) for rank in range(self.size)]
            dist.all_gather(outputs, base[0, 1:5].contiguous(), group=group)
            for rank, output in enumerate(outputs):
                wide[:, 2 * rank] = output
            return [base, wide]

        self.both(call, "strided tensors")

    def check_moves(self):
        for seed, dtype in enumerate(MOVED):
            for shape in SHAPES[1:]:
                what = f"{dtype} {shape}"

                def broadcast(group):
                    tensor = values(shape, dtype, seed, self.rank)
                    dist.broadcast(tensor, self.size - 1, group=group)
                    return [tensor]

                def all_gather(group):
                    outputs = [torch.zeros(shape).to(dtype) for _ in range(self.size)]
                    dist.all_gather(outputs, values(shape, dtype, seed, self.rank), group=group)
                    return outputs

                def gather(group):
                    outputs = [torch.zeros(shape).to(dtype) for _ in range(self.size)]
                    dist.gather(values(shape, dtype, seed, self.rank), outputs if self.rank == 1 else None, 1, group=group)
                    return outputs

                def scatter(group):
                    output = torch.zeros(shape).to(dtype)
                    inputs = [values(shape, dtype, seed, rank) for rank in range(self.size)]
                    dist.scatter(output, inputs if self.rank == 1 else None, 1, group=group)
                    return [output]

                gloo_has = dtype not in (torch.int16, torch.uint16, torch.complex64) and not (
                    dtype.is_floating_point and dtype.itemsize == 1
                )
                for call in (broadcast, all_gather, gather, scatter):
                    if gloo_has:
                        self.both(call, f"{call.__name__} {what}")
                rank = self.size - 1
                same(broadcast(dist.group.WORLD)[0], values(shape, dtype, seed, rank), f"broadcast {what}")
                for rank, output in enumerate(all_gather(dist.group.WORLD)):
                    same(output, values(shape, dtype, seed, rank), f"all_gather {what}")
                same(scatter(dist.group.WORLD)[0], values(shape, dtype, seed, self.rank), f"scatter {what}")

    def check_reductions_of_blocks(self):
        for op in REDUCTIONS | BITS:
            for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8):
                if dtype.is_floating_point and op in BITS:
                    continue

                def reduce(group):
                    tensor = values((5, 3), dtype, 2, self.rank)
                    dist.reduce(tensor, 1, op, group=group)
                    return [tensor] if self.rank == 1 else [torch.zeros(1)]

                self.both(reduce, "reduce")
                inputs = [values((4, 2), dtype, 3 + rank, self.rank) for rank in range(self.size)]
                whole = [values((4, 2), dtype, 3 + self.rank, rank) for rank in range(self.size)]
                expected = whole[0].clone()
                for one in whole[1:]:
                    expected = (REDUCTIONS | BITS)[op](expected, one)
                output = torch.zeros(4, 2, dtype=dtype)
                dist.reduce_scatter(output, inputs, op)
                same(output, expected, "reduce_scatter")
                output = torch.zeros(4, 2, dtype=dtype)
                dist.reduce_scatter_tensor(output, torch.cat(inputs), op)
                same(output, expected, "reduce_scatter_tensor")

    def check_exchanges(self):
        def into_tensor(group):
            output = torch.zeros(self.size * 3, 2)
            dist.all_gather_into_tensor(output, values((3, 2), torch.float32, 1, self.rank), group=group)
            return [output]

        def single(group):
            output = torch.zeros(self.size * 2, 3)
            dist.all_to_all_single(output, values((self.size * 2, 3), torch.float32, 2, self.rank), group=group)
            return [output]

        def splits(group):
            sent = [(self.rank + rank) % 3 for rank in range(self.size)]
            output = torch.zeros(sum(sent), 2)
            source = values((sum(sent), 2), torch.float32, 3, self.rank)
            dist.all_to_all_single(output, source, sent, sent, group=group)
            return [output]

        for call in (into_tensor, single, splits):
            self.both(call, call.__name__)
        for dtype in MOVED:
            inputs = [values((rank + 1,), dtype, rank, self.rank) for rank in range(self.size)]
            outputs = [torch.zeros(self.rank + 1).to(dtype) for _ in range(self.size)]
            dist.all_to_all(outputs, inputs)
            for rank, output in enumerate(outputs):
                same(output, values((self.rank + 1,), dtype, self.rank, rank), f"all_to_all {dtype}")
            output = torch.zeros(self.size, 3).to(dtype)
            dist.all_to_all_single(output, values((self.size, 3), dtype, 5, self.rank))
            expected = torch.stack([values((self.size, 3), dtype, 5, rank)[self.rank] for rank in range(self.size)])
            same(output, expected, f"all_to_all_single {dtype}")

    def check_coalesced(self):
        from torch.distributed.distributed_c10d import _coalescing_manager

        tensors = [torch.full((number + 1,), float(self.rank)) for number in range(3)]
        with _coalescing_manager() as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        for number, tensor in enumerate(tensors):
            same(tensor, torch.full((number + 1,), self.size * (self.size - 1) / 2), "coalesced all_reduce")
        outputs = [torch.zeros(self.size, 2), torch.zeros(self.size, 3)]
        with _coalescing_manager(async_ops=True) as manager:
            for output in outputs:
                dist.all_gather_into_tensor(output, torch.full((1, output.shape[1]), float(self.rank)))
        manager.wait()
        for output in outputs:
            same(output[:, 0], torch.arange(float(self.size)), "coalesced all_gather_into_tensor")

    def check_messages(self):
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        large = torch.full((300_000,), float(self.rank))
        got = torch.zeros(300_000)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, got, before)])
        for work in works:
            work.wait()
        same(got, torch.full((300_000,), float(before)), "batch_isend_irecv")
        first, second = torch.tensor([1.0]), torch.tensor([2, 3])
        sent = [dist.isend(first, after, tag=5), dist.isend(second, after, tag=9)]
        late, early = torch.zeros(2, dtype=torch.int64), torch.zeros(1)
        dist.recv(late, before, tag=9)
        dist.recv(early, before, tag=5)
        for work in sent:
            work.wait()
        same(late, second, "the later tag first")
        same(early, first, "the earlier tag second")
        if self.size == 2:
            got = torch.zeros(1)
            work = dist.isend(first, after)
            assert dist.recv(got) == before
            work.wait()
            same(got, first, "from any source")

    def check_objects(self):
        mine = {"rank": self.rank, "text": "x" * 1000 * (self.rank + 1)}
        found = [None] * self.size
        dist.all_gather_object(found, mine)
        assert [one["rank"] for one in found] == list(range(self.size))
        assert len(found[-1]["text"]) == 1000 * self.size
        objects = [mine if self.rank == 0 else None]
        dist.broadcast_object_list(objects, 0)
        assert objects[0]["rank"] == 0
        gathered = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, gathered, 0)
        assert self.rank != 0 or [one["rank"] for one in gathered] == list(range(self.size))
        scattered = [None]
        dist.scatter_object_list(scattered, list(range(self.size)) if self.rank == 0 else None, 0)
        assert scattered == [self.rank]

    def check_sparse(self):
        def call(group):
            indices = torch.tensor([[0, self.rank + 1, 0], [1, 0, 1]])
            tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, self.rank]), (6, 2))
            dist.all_reduce(tensor, group=group)
            return [tensor.to_dense()]

        self.both(call, "sparse all_reduce")

    def check_work(self):
        tensors = [torch.full((1000,), float(self.rank)) for _ in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        doubled = works[0].get_future().then(lambda future: future.value()[0] * 2)
        for work, tensor in zip(works, tensors):
            assert work.wait(timedelta(seconds=30))
            assert work.is_completed() and work.is_success()
            same(tensor, torch.full((1000,), self.size * (self.size - 1) / 2), "async all_reduce")
        same(doubled.wait(), tensors[0] * 2, "future")
        if self.rank == 0:
            work = dist.barrier(async_op=True)
            try:
                work.wait(timedelta(milliseconds=50))
            except pleach.torch.PleachTimeout as error:
                assert error.waited_s == 0.05
            else:
                raise AssertionError("the barrier has ended without the other ranks")
            dist.barrier(self.gloo)
            work.wait()
        else:
            dist.barrier(self.gloo)
            dist.barrier()

    def check_groups(self):
        even = dist.new_group(range(0, self.size, 2))
        if self.rank % 2 == 0:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=even)
            same(tensor, torch.tensor([float(len(range(0, self.size, 2)))]), "new_group")
        own, _ = dist.new_subgroups(2)
        tensor = torch.tensor([self.rank])
        dist.all_reduce(tensor, group=own)
        same(tensor, torch.tensor([self.rank // 2 * 4 + 1]), "new_subgroups")

    def check_functional(self):
        import torch.distributed._functional_collectives as functional
        from torch.distributed.device_mesh import init_device_mesh

        total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        same(torch.ones(4) * total, torch.full((4,), float(self.size)), "functional all_reduce")
        gathered = functional.all_gather_tensor(torch.tensor([float(self.rank)]), 0, dist.group.WORLD)
        same(gathered + 0, torch.arange(float(self.size)), "functional all_gather_tensor")
        part = functional.reduce_scatter_tensor(torch.ones(self.size), "sum", 0, dist.group.WORLD)
        same(part + 0, torch.tensor([float(self.size)]), "functional reduce_scatter_tensor")
        mesh = init_device_mesh("cpu", (self.size // 2, 2), mesh_dim_names=("outer", "inner"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mesh.get_group("inner"))
        same(tensor, torch.tensor([2.0]), "group of a mesh")

    def check_monitored_barrier(self):
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        if self.rank == self.size - 1:
            dist.barrier(self.gloo)
            return
        try:
            dist.monitored_barrier(timeout=timedelta(milliseconds=300))
        except pleach.torch.PleachTimeout as error:
            missing = self.size - 1 if self.rank == 0 else 0
            assert error.rank == missing and (self.rank != 0 or f"ranks {missing} " in str(error)), error
        else:
            raise AssertionError("the barrier has ended without the last rank")
        dist.barrier(self.gloo)

    def check_refusals(self):
        def refused(kind, call):
            try:
                call()
            except kind:
                return
            raise AssertionError("no error")

        refused(pleach.torch.PleachUnsupported, lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
        refused(pleach.torch.PleachUnsupported, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG))
        refused(pleach.torch.PleachUnsupported, lambda: dist.all_reduce(torch.ones(2, device="meta")))
        refused(ValueError, lambda: dist.all_gather_into_tensor(torch.ones(1), torch.ones(7)))
        for values in (torch.ones(1, device="meta"), torch.ones(1).to(torch.float8_e4m3fnuz)):
            sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64, device=values.device), values, (3,))
            refused(pleach.torch.PleachUnsupported, lambda: dist.all_reduce(sparse))
        group = dist.group.WORLD
        import importlib

        importlib.reload(pleach.torch)
        dist.barrier()
        dist.destroy_process_group()
        refused(pleach.torch.PleachError, lambda: group.allreduce([torch.ones(1)]))
        refused(pleach.torch.PleachError, lambda: group.send([torch.ones(1)], 0, 0))

    def check_mismatch(self):
        try:
            dist.all_reduce(torch.ones(8 + self.rank))
        except pleach.torch.PleachError as error:
            lengths = set(re.findall(r"of (\d+) f32", str(error)))
            # With more than two lengths, any two of them are the ones that the ranks agree on.
            assert error.kind == "mismatch" and len(lengths) == 2 and lengths <= {"8", "9", "10", "11"}, error
        else:
            raise AssertionError("ranks of different lengths have no error")


def main(kind):
    """Makes the checks that the command line names."""
    torch.set_num_threads(1)
    checks = kind()
    for name in sys.argv[1:]:
        getattr(checks, name)()
        print(f"{name} done", flush=True)
    if dist.is_initialized() and "check_mismatch" not in sys.argv:
        leave(has_gloo=True)


if __name__ == "__main__":
    main(Check)
