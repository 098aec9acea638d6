"""``pleach.Trainer`` under programs of NumPy."""

import gc

import numpy as np
import pytest

import pleach

#: What ranks train: the mean of their targets.
PROGRAM = """
    import numpy as np, pleach
    with pleach.join() as group:
        trainer = pleach.Trainer(group, {scheme!r}, [5, 3], steps=30, checked=True)
        x, g = trainer.parameters, trainer.gradient
        x[:] = group.rank
        target = np.arange(8) * (group.rank + 1)
        while trainer.step():
            assert trainer.number > 0 or not x.any(), "those of rank 0"
            loss = float(((x - target) ** 2).sum())
            for number, (begin, end) in enumerate(trainer.buckets()):
                g[begin:end] = 2 * (x - target)[begin:end]
                if {is_overlapped}:
                    trainer.ready(number)
            trainer.update(lambda: np.subtract(x, 0.1 * g, out=x), loss)
        report = trainer.finish()
        assert report == trainer.finish() == trainer.report()
        assert report["steps"] == 30 and report["guarantee_held"] and report["parameters_equal"], report
        print(x.tobytes().hex(), np.abs(x - 2.5 * np.arange(8)).max())
"""


@pytest.mark.parametrize("scheme", ["sync", "sync:bucket=8", "local-sgd:every=5", "gossip", "ssp"])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_ranks_train_by_a_scheme(ranks, scheme, is_overlapped):
    job = ranks(4, PROGRAM.format(scheme=scheme, is_overlapped=is_overlapped))
    results = [job.finish(rank, timeout=60) for rank in range(4)]
    assert all(status == 0 for status, _, _ in results), results
    assert len({out for _, out, _ in results}) == 1
    if scheme.startswith("sync"):
        assert float(results[0][1].split()[1]) < 0.1


def test_means_and_errors_of_ranks(ranks):
    program = """
        import numpy as np, pleach
        def refused(kind, call):
            try:
                call()
            except kind as error:
                return error
            raise SystemExit("no error")
        group = pleach.join()
        rank = group.rank
        part = group.split(0)
        trainer = pleach.Trainer(part, "gossip", [4])
        for step in range(6):
            trainer.step()
            trainer.update(lambda: trainer.parameters.__iadd__(rank))
            own = trainer.parameters.copy()
            mean, expected = trainer.averaged(), group.all_reduce(own.copy(), "avg")
            assert np.allclose(mean, expected) and (trainer.parameters == own).all()
        trainer.finish()
        part.close()

        different = pleach.Trainer(group.split(0), "gossip" if rank else "easgd:every=3", [4])
        error = refused(pleach.MismatchError, different.step)
        assert error.rank == int(rank == 0) and "easgd:every=3" in str(error), error
        group.barrier()  # no rank leaves the part before all have compared
        seeds = pleach.Trainer(group.split(0), "gossip", [4], model=rank)
        assert "the hash of the model of rank" in str(refused(pleach.MismatchError, seeds.step))
        group.barrier()

        loss = pleach.Trainer(group.split(0), "local-sgd:every=1", [4])
        loss.step()
        if rank:
            error = refused(pleach.LossError, lambda: loss.update(lambda: None, float("nan")))
            assert error.rank == 1 and "step 0" in str(error), error
            assert error.args == refused(pleach.LossError, loss.step).args
        else:
            error = refused(pleach.AbortedError, lambda: [loss.step() and loss.update(lambda: None) for _ in range(9)])
            assert error.rank == 1, error

        failing = pleach.Trainer(group.split(0), "sync", [4])
        failing.step()
        if rank:
            refused(ZeroDivisionError, lambda: failing.update(lambda: 1 / 0))
        else:
            refused(pleach.AbortedError, lambda: [failing.step() and failing.update(lambda: None) for _ in range(9)])
        print("done")
    """
    job = ranks(2, program)
    results = [job.finish(rank, timeout=60) for rank in range(2)]
    assert all((status, out) == (0, "done\n") for status, out, _ in results), results


def test_memory_stays_as_long_as_arrays_over_it():
    with pleach.join(rank=0, world_size=1) as group:
        trainer = pleach.Trainer(group, "sync", [1 << 20])
        x, g, mean = trainer.parameters, trainer.gradient, None
        x[:] = 7
        trainer.step()
        g[:] = 1
        trainer.update(lambda: np.subtract(x, g, out=x))
        mean = trainer.averaged()
        trainer.finish()
        del trainer
    del group
    gc.collect()
    g += 1
    x += g
    assert (x == 8).all() and (g == 2).all() and (mean == 6).all()


def test_mistakes_are_named():
    with pleach.join(rank=0, world_size=1) as group:
        for scheme, layers, text in [
            ("gosip", [1], "did you mean 'gossip'?"),
            ("gossip:peer=anybody", [1], "bad value of peer"),
            ("easgd:moving=7", [1], "diverges on 1 ranks"),
            ("sync", [], "nothing to train"),
        ]:
            with pytest.raises(pleach.ArgumentError, match=text.replace("?", r"\?")):
                pleach.Trainer(group, scheme, layers)
        trainer = pleach.Trainer(group.split(0), "sync:bucket=8", [4])
        assert trainer.step() and trainer.buckets() == [(2, 4), (0, 2)]
        trainer.ready(1)
        with pytest.raises(pleach.ArgumentError, match="bucket 1 of step 0 is being averaged"):
            trainer.averaged()
        with pytest.raises(pleach.ArgumentError, match="another call of this trainer"):
            trainer.update(trainer.step)
        with pytest.raises(pleach.ArgumentError, match="another call of this trainer"):
            trainer.step()  # the first failure counts
        elastic = pleach.Trainer(group.split(0), "elastic-bsp", [4])
        with pytest.raises(pleach.ArgumentError, match="no common place for a mean"):
            elastic.averaged()
        elastic.finish()
        with pytest.raises(pleach.ArgumentError, match="the training has ended"):
            elastic.step()
