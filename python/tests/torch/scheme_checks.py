"""A rank that checks the training schemes.

usage: scheme_checks.py NAME...: functions below whose names begin with `check_`
       scheme_checks.py killed SCHEME RANK: trains until the rank kills itself, and prints what the others raise
"""

import copy
import json
import math
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import pleach
import pleach.torch as pt

from against_gloo import main
from group_checks import refused
from ranks import LIMIT_OF_STOP_S

FEATURES = 6

#: Each class, with settings of which exchanges come often.
CLASSES = [
    lambda *of: pt.Synchronous(*of),
    lambda *of: pt.Synchronous(*of, bucket=64, overlap=True),
    lambda *of: pt.LocalSGD(*of, every=4, warmup_steps=3),
    lambda *of: pt.DiLoCo(*of, every=5, outer_momentum=0.5),
    lambda *of: pt.DiLoCo(*of, every=5, outer_optimizer=torch.optim.Adam(of[0].parameters(), lr=0.03)),
    lambda *of: pt.ElasticAveraging(*of, every=2),
    lambda *of: pt.ElasticAveraging(*of, every=2, mode="sync"),
    lambda *of: pt.ElasticAveraging(*of, every=2, mode="round-robin", momentum=0.5),
    lambda *of: pt.Downpour(*of, every=2),
    lambda *of: pt.Gossip(*of),
    lambda *of: pt.Gossip(*of, direction="push", peer="ring"),
    lambda *of: pt.Gossip(*of, direction="push-sum", every=2),
    lambda *of: pt.BoundedStaleness(*of, staleness=2),
    lambda *of: pt.ElasticBSP(*of, lookahead=8),
    lambda *of: pt.attach("bsp", *of),
    lambda *of: pt.Synchronous(*of, compress="f8"),
    lambda *of: pt.LocalSGD(*of, every=4, compress="bf16"),
    lambda *of: pt.DiLoCo(*of, every=5, outer_momentum=0.5, fragments=2, delay=1, mix=0.2),
    lambda *of: pt.DiLoCo(*of, every=5, outer_momentum=0.5, fragments=[of[0][1], of[0][0]], delay=1),
    lambda *of: pt.Gossip(*of, reads="torn"),
    lambda *of: pt.DynamicStaleness(*of, low=1, high=4),
    lambda *of: pt.BoundedVersions(*of, distance=9),
    lambda *of: pt.Asynchronous(*of),
    lambda *of: pt.EagerSGD(*of, activation="quorum:2", late="correct", every=10),
    lambda *of: pt.EagerSGD(*of, activation="all", every=7),
    lambda *of: pt.GridAveraging(*of, threshold=0.5),
    lambda *of: pt.GridAveraging(*of, every=2, rate=0.5, dimensions=1),
]


def batches(rank, steps, seed=0):
    """Points of a linear function; each rank has other points."""
    weights = torch.linspace(-1, 1, FEATURES)
    random = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        inputs = torch.randn(16, FEATURES, generator=random)
        yield inputs, (inputs @ weights).unsqueeze(1)


def model_of(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, 1))


def sgd(model, lr=0.02, **settings):
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def train(model, optimizer, data):
    """A loop as any user has it; returns the losses."""
    losses = []
    for inputs, targets in data:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(model):
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


class Checks:
    def __init__(self):
        dist.init_process_group("pleach", timeout=timedelta(seconds=60))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def of_all(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def expect_equal(self, model, what):
        values = self.of_all(flat(model))
        assert all(torch.equal(values[0], other) for other in values), what

    def trained(self, make, steps=20, seed=3, **settings):
        """Trains a model by a scheme."""
        model = model_of(seed)
        optimizer = sgd(model, **settings)
        with make(model, optimizer) as scheme:
            train(model, optimizer, batches(self.rank, steps))
        return model, scheme

    def check_each_class_trains_to_equal_parameters(self):
        for make in CLASSES:
            model = model_of(self.rank)
            downpour = "Downpour" in repr(make(model, sgd(model)))
            optimizer = sgd(model, lr=0.01 if downpour else 0.04)
            inputs, targets = next(batches(99, 1))
            with make(model, optimizer) as scheme:
                before = torch.nn.functional.mse_loss(model(inputs), targets).item()
                train(model, optimizer, batches(self.rank, 60))
                storages = {one.untyped_storage().data_ptr() for one in model.parameters()}
                assert len(storages) == 1, "views of one vector"
                so_far = scheme.report()
                assert so_far["steps"] == 60 and "guarantee_held" not in so_far
            self.expect_equal(model, scheme)
            report = scheme.report()
            assert report["guarantee_held"] and report["parameters_equal"] and report["steps"] == 60, report
            # How far ranks come that wait for nobody depends on when each had a processor.
            after = torch.nn.functional.mse_loss(model(inputs), targets).item()
            assert after < before, (scheme, before, after)
            assert len({one.untyped_storage().data_ptr() for one in model.parameters()}) == 4, "memory of their own"
            assert "step" not in optimizer.__dict__
            train(model, optimizer, batches(self.rank, 1))

    def check_every_scheme_that_there_is_may_be_attached(self):
        texts = pleach._native.schemes()
        names = [text.partition(":")[0] for text in texts]
        assert len(set(names)) == len(texts) >= 15 and {"dssp", "bap", "asp", "eager", "bidmach"} <= set(names), texts
        for text in texts:
            model = model_of(self.rank)
            optimizer = sgd(model, lr=0.002)
            with pt.attach(text, model, optimizer) as scheme:
                train(model, optimizer, batches(self.rank, 12))
            self.expect_equal(model, text)
            report = scheme.report()
            assert report["guarantee_held"] and report["parameters_equal"] and report["steps"] == 12, report

    def check_relations_between_schemes(self):
        momentum = {"lr": 0.02, "momentum": 0.9, "nesterov": True}

        def outer(*of):
            return pt.DiLoCo(*of, every=5, outer_optimizer=torch.optim.SGD(of[0].parameters(), lr=0.7, momentum=0.9, nesterov=True))

        pairs = [
            (lambda *of: pt.Synchronous(*of), lambda *of: pt.LocalSGD(*of, every=1), {}),
            (lambda *of: pt.Synchronous(*of), lambda *of: pt.Synchronous(*of, bucket=64, overlap=True), momentum),
            (lambda *of: pt.Synchronous(*of), lambda *of: pt.LocalSGD(*of, warmup_steps=99), momentum),
            (lambda *of: pt.LocalSGD(*of, every=5), lambda *of: pt.DiLoCo(*of, every=5, outer_lr=1, outer_momentum=0), momentum),
            (lambda *of: pt.DiLoCo(*of, every=5), outer, momentum),
            (lambda *of: pt.attach("bsp", *of), lambda *of: pt.BoundedStaleness(*of, staleness=0), momentum),
            (lambda *of: pt.LocalSGD(*of, every=1), lambda *of: pt.ElasticBSP(*of, lookahead=1), {}),
        ]
        for number, (one, other, settings) in enumerate(pairs):
            found, expected = (flat(self.trained(make, 23, **settings)[0]) for make in (one, other))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"pair {number}: {text}")

    def check_synchronous_is_ddp(self):
        model, _ = self.trained(pt.Synchronous, momentum=0.9)
        plain = model_of(3)
        optimizer = sgd(plain, momentum=0.9)
        train(torch.nn.parallel.DistributedDataParallel(plain), optimizer, batches(self.rank, 20))
        torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-6)

    def check_the_group_may_be_one_of_numpy_programs(self):
        with pleach.join_in_store(dist.group.WORLD.get_group_store(), self.rank, self.size, prefix="numpy/") as group:
            model = model_of(self.rank)
            optimizer = sgd(model)
            with pt.attach("local-sgd:every=3", model, optimizer, group=group):
                train(model, optimizer, batches(self.rank, 7))
            self.expect_equal(model, "a group of the package")

    def check_what_loops_do_besides(self):
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 1)
        )
        for parameter in model[1].parameters():
            parameter.requires_grad = False
        torch.nn.init.constant_(model[1].weight, 1 + self.rank)
        model[1].running_mean += self.rank
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        strides = model[0].weight.stride()
        losses = []
        with pt.LocalSGD(model, optimizer, every=3) as scheme:
            assert model[1].weight.tolist() == [1] * 4 and model[1].running_mean.tolist() == [0] * 4
            assert model[0].weight.stride() == strides != model[0].weight.contiguous().stride()
            inside = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            torch.manual_seed(self.rank)
            for step in range(7):
                inputs = torch.randn(8, 2, 4, 4)

                def closure():
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    loss = (model(inputs) - inputs.mean((1, 2, 3)).unsqueeze(1)).square().mean()
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure).item())
                before.step()
                inside.step()
                # A call of the program on its group has no place in the scheme's.
                dist.all_reduce(torch.ones(1))
        assert all(math.isfinite(loss) for loss in losses)
        self.expect_equal(model, "a model with convolutions")
        means = self.of_all(model[1].running_mean)
        assert all(torch.equal(means[0], mean) for mean in means), "buffers were averaged"
        assert int(model[1].num_batches_tracked) == 7 and scheme.report()["steps"] == 7
        assert model[0].weight.stride() == strides
        optimizer.step()

    def check_buffers_and_optimizer_states(self):
        for buffers in ("average", "local"):
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES), torch.nn.Linear(FEATURES, 1))
            optimizer = sgd(model)
            with pt.Gossip(model, optimizer, buffers=buffers):
                train(model, optimizer, batches(self.rank, 5))
            means = self.of_all(model[0].running_mean)
            assert all(torch.equal(means[0], mean) for mean in means) == (buffers == "average"), buffers
        for state in ("keep", "reset", "average"):
            model = model_of(0)
            optimizer = torch.optim.Adam(model.parameters())
            with pt.LocalSGD(model, optimizer, every=4, optimizer_state=state):
                train(model, optimizer, batches(self.rank, 4))
                first = next(iter(model.parameters()))
                if state == "reset":
                    assert not optimizer.state
                else:
                    averages = self.of_all(optimizer.state[first]["exp_avg"])
                    assert torch.equal(averages[0], averages[1]) == (state == "average")

    def check_means_under_way(self):
        for text in ("gossip", "gossip:direction=push-sum", "easgd", "ssp", "bap", "local-sgd", "sync"):
            model = model_of(0)
            optimizer = sgd(model)
            with pt.attach(text, model, optimizer) as scheme:
                for _ in range(5):
                    train(model, optimizer, batches(self.rank, 3))
                    own = flat(model)
                    means = scheme.averaged()
                    assert list(means) == [name for name, _ in model.named_parameters()]
                    expected = torch.stack(self.of_all(own)).mean(0)
                    found = torch.cat([mean.reshape(-1) for mean in means.values()])
                    torch.testing.assert_close(found, expected)
                    # By ``bap`` this rank has taken a newer copy.
                    assert text == "bap" or torch.equal(flat(model), own), "the training goes on as it was"
                spread = scheme.report()["spread"]
                assert spread >= 0 and (spread < 1e-6) == (text == "sync"), (text, spread)
                if "push-sum" in text:
                    assert "use averaged()" in str(refused(pt.PleachSchemeError, scheme.sync))
                else:
                    scheme.sync()
                    self.expect_equal(model, text)
                    train(model, optimizer, batches(self.rank, 3))
            self.expect_equal(model, text)
        model = model_of(0)
        optimizer = sgd(model)
        with pt.ElasticBSP(model, optimizer) as scheme:
            train(model, optimizer, batches(self.rank, 1))  # a barrier follows the first step
            assert torch.equal(scheme.averaged()["1.bias"], model[1].bias)
            assert "barriers alone" in str(refused(pt.PleachSchemeError, scheme.sync))

    def check_a_saved_state_goes_on_bit_for_bit(self):
        def outer(model, optimizer):
            return pt.DiLoCo(model, optimizer, every=5, outer_optimizer=torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9))

        for make in (pt.Synchronous, lambda *of: pt.LocalSGD(*of, every=5, warmup_steps=15), outer):
            whole = list(batches(self.rank, 20))
            expected, _ = model_of(1), None
            optimizer = sgd(expected, momentum=0.9)
            with make(expected, optimizer) as scheme:
                train(expected, optimizer, whole[:10])
                saved = copy.deepcopy((expected.state_dict(), optimizer.state_dict(), scheme.state_dict()))
                train(expected, optimizer, whole[10:])
            model = model_of(2)
            optimizer = sgd(model, momentum=0.9)
            with make(model, optimizer) as scheme:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                scheme.load_state_dict(saved[2])
                train(model, optimizer, whole[10:])
                assert "before the first one" in str(refused(pt.PleachSchemeError, lambda: scheme.load_state_dict(saved[2])))
            assert torch.equal(flat(model), flat(expected)), make
        model = model_of(0)
        optimizer = sgd(model)
        with pt.LocalSGD(model, optimizer, every=4) as scheme:
            assert "attach that scheme" in str(refused(pt.PleachSchemeError, lambda: scheme.load_state_dict({"scheme": "sync", "outer": None})))
            train(model, optimizer, batches(self.rank, 3))
            assert "has made 3 steps" in str(refused(pt.PleachSchemeError, scheme.state_dict))

    def check_a_state_with_modules_as_fragments_is_for_the_same_modules(self):
        def attached(seed, first, second):
            model = model_of(seed)
            optimizer = sgd(model, lr=0.002)
            return model, optimizer, pt.DiLoCo(model, optimizer, every=4, fragments=[model[first], model[second]], delay=1)

        whole = list(batches(self.rank, 20))
        expected, optimizer, scheme = attached(1, 1, 0)
        with scheme:
            train(expected, optimizer, whole[:11])
            saved = copy.deepcopy(scheme.state_dict())
            train(expected, optimizer, whole[11:])
        model, optimizer, scheme = attached(2, 0, 1)
        with scheme:
            assert "same fragments" in str(refused(pt.PleachSchemeError, lambda: scheme.load_state_dict(saved)))
        model, optimizer, scheme = attached(2, 1, 0)
        with scheme:
            scheme.load_state_dict(saved)
            train(model, optimizer, whole[11:])
        assert torch.equal(flat(model), flat(expected))

    def check_each_scheme_that_keeps_a_state_goes_on_from_it(self):
        #: By which a training that goes on ends with the bits of one that was never left.
        repeated = {
            "diloco:every=4", "diloco:every=6,fragments=3,delay=2,mix=0.5", "sync:compress=f8", "local-sgd:every=3,compress=f8",
            "easgd:every=3,mode=sync", "eamsgd:every=2,mode=round-robin,momentum=0.5", "gossip:direction=push,peer=ring",
            "gossip:direction=push-sum,peer=ring", "bsp", "elastic-bsp:lookahead=1", "eager:activation=all,every=4", "bidmach",
        }
        others = {
            "gossip", "gossip:direction=push", "easgd:every=3", "downpour:every=3", "ssp:staleness=2", "dssp:low=1,high=4", "bap", "asp",
            "eager", "bidmach:threshold=0.5",
        }
        for text in sorted(repeated | others):
            whole = list(batches(self.rank, 20))
            model = model_of(1)
            optimizer = sgd(model, lr=0.002)
            with pt.attach(text, model, optimizer) as scheme:
                train(model, optimizer, whole[:11])
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheme.state_dict()))
                train(model, optimizer, whole[11:])
            expected = flat(model)
            model = model_of(2)
            optimizer = sgd(model, lr=0.002)
            with pt.attach(text, model, optimizer) as scheme:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                assert "each rank loads its own" in str(
                    refused(pt.PleachSchemeError, lambda: scheme.load_state_dict({**saved[2], "place": [self.rank, self.size + 1]}))
                )
                scheme.load_state_dict(saved[2])
                train(model, optimizer, whole[11:])
            report = scheme.report()
            assert report["guarantee_held"] and report["parameters_equal"], (text, report)
            if text in repeated:
                assert torch.equal(flat(model), expected), text
        # Of a text that was changed all ranks hear.
        model = model_of(0)
        optimizer = sgd(model)
        with pt.attach("gossip", model, optimizer) as scheme:
            train(model, optimizer, batches(self.rank, 3))
            state = scheme.state_dict()
        def go_on():
            with pt.attach("gossip", model, optimizer) as scheme:
                cut = state if self.rank != 1 else {**state, "rank": state["rank"][:-3]}
                scheme.load_state_dict(cut)

        if self.rank == 1:
            assert "no state of a rank" in str(refused(pt.PleachError, go_on))
        else:
            error = refused(pt.PleachError, go_on)
            assert error.rank == 1, error

    def check_refusals_at_construction(self):
        model = model_of(0)
        optimizer = sgd(model)

        def expect(text, make, kind=pt.PleachSchemeError):
            error = str(refused(kind, make))
            assert text in error, error

        expect("did you mean 'gossip'?", lambda: pt.attach("gosip", model, optimizer))
        expect("did you mean 'every'?", lambda: pt.attach("gossip:evry=3", model, optimizer))
        expect("bad value of every", lambda: pt.LocalSGD(model, optimizer, every=0))
        expect("diverges on 4 ranks", lambda: pt.ElasticAveraging(model, optimizer, mode="sync", moving=3.5))
        expect("take SGD without momentum", lambda: pt.ElasticAveraging(model, sgd(model, momentum=0.9), momentum=0.9))
        expect("take SGD without momentum", lambda: pt.ElasticAveraging(model, torch.optim.Adam(model.parameters()), momentum=0.9))
        expect("never exchange all together", lambda: pt.Gossip(model, optimizer, optimizer_state="average"))
        expect("make the same steps", lambda: pt.Synchronous(model, optimizer, optimizer_state="reset"))
        expect("new copies whenever", lambda: pt.BoundedStaleness(model, optimizer, optimizer_state="reset"))
        expect("exchange gradients in each step", lambda: pt.EagerSGD(model, optimizer, optimizer_state="reset"))
        expect("never exchange all together", lambda: pt.GridAveraging(model, optimizer, optimizer_state="average"))
        expect("of the built-in outer optimizer", lambda: pt.DiLoCo(model, optimizer, fragments=2, outer_optimizer=sgd(model)))
        for modules in ([], model, True, [model[0], 1]):
            expect("or a list of modules", lambda: pt.DiLoCo(model, optimizer, fragments=modules))
        expect("parameter 1.weight is in no fragment", lambda: pt.DiLoCo(model, optimizer, fragments=[model[0]]))
        expect("parameter 0.weight of fragments[1]", lambda: pt.DiLoCo(model, optimizer, fragments=[model[0], model]))
        expect("no trained parameter", lambda: pt.DiLoCo(model, optimizer, fragments=[model, torch.nn.ReLU()]))
        expect("give fewer", lambda: pt.DiLoCo(model, optimizer, every=1, fragments=[model[0], model[1]]))
        expect("at most 4 fragments", lambda: pt.DiLoCo(model, optimizer, every=4, fragments=5))
        expect("take 'keep'", lambda: pt.DiLoCo(model, optimizer, fragments=2, optimizer_state="reset"))
        expect("pleach train --scheme hybrid", lambda: pt.attach("hybrid", model, optimizer))
        expect("with direction=pull", lambda: pt.Gossip(model, optimizer, direction="push", reads="torn"))
        expect("give distance at least 3", lambda: pt.BoundedVersions(model, optimizer, distance=1))
        expect("there are average, local", lambda: pt.Gossip(model, optimizer, buffers="sum"))
        expect("there are keep, reset, average", lambda: pt.Gossip(model, optimizer, optimizer_state="drop"))
        expect("give them to outer_optimizer", lambda: pt.DiLoCo(model, optimizer, outer_lr=1, outer_optimizer=sgd(model)))
        expect("is the inner one", lambda: pt.DiLoCo(model, optimizer, outer_optimizer=optimizer))
        expect("has other parameters", lambda: pt.DiLoCo(model, optimizer, outer_optimizer=sgd(model[0])))
        expect("parameters that the model has not", lambda: pt.Gossip(model[0], optimizer))
        expect("no torch.nn.Module", lambda: pt.Gossip(model.parameters(), optimizer))
        expect("no torch.optim.Optimizer", lambda: pt.Gossip(model, None))
        expect("pass model.module", lambda: pt.Gossip(torch.nn.parallel.DistributedDataParallel(model), optimizer))
        lbfgs = torch.optim.LBFGS(model.parameters())
        expect("evaluates the loss several times", lambda: pt.Gossip(model, lbfgs), pt.PleachUnsupported)
        double, meta = model_of(0).double(), model_of(0).to("meta")
        expect("take model.float()", lambda: pt.Gossip(double, sgd(double)), pt.PleachUnsupported)
        expect("lie in memory of the host", lambda: pt.LocalSGD(meta, sgd(meta)), pt.PleachUnsupported)
        expect("take model.cpu()", lambda: pt.Gossip(meta, sgd(meta)), pt.PleachUnsupported)
        gloo = dist.new_group(backend="gloo")
        expect("is no group of pleach", lambda: pt.Gossip(model, optimizer, group=gloo), pt.PleachUnsupported)
        expect("works in its block alone", pt.Gossip(model, optimizer).averaged)

    def check_what_must_not_be_changed_under_a_scheme(self):
        model = model_of(0)
        optimizer = sgd(model)
        with pt.Gossip(model, optimizer):
            error = refused(pt.PleachSchemeError, pt.Downpour(model, sgd(model)).__enter__)
            assert "0.weight has the scheme gossip already" in str(error)
            train(model, optimizer, batches(self.rank, 3))

        def free(model, optimizer):
            model[1].bias.data = torch.empty(0)

        def resize(model, optimizer):
            model[1].bias.data = torch.zeros(3)

        def add(model, optimizer):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})

        def fail(model, optimizer):
            optimizer.register_step_pre_hook(lambda *_: 1 / 0)

        ways = [
            (free, pt.PleachSchemeError, "1.bias is no longer in the memory of the scheme"),
            (resize, pt.PleachSchemeError, "1.bias is no longer in the memory of the scheme"),
            (add, pt.PleachSchemeError, "has other parameters than those of the scheme"),
            (fail, ZeroDivisionError, "division by zero"),
        ]
        for scheme in ("sync", "ssp"):
            for change, kind, text in ways:
                model = model_of(0)
                optimizer = sgd(model)

                def loop():
                    with pt.attach(scheme, model, optimizer):
                        train(model, optimizer, batches(self.rank, 3))
                        if self.rank == 2:
                            inputs, targets = next(batches(2, 1))
                            torch.nn.functional.mse_loss(model(inputs), targets).backward()
                            change(model, optimizer)
                            optimizer.step()
                        train(model, optimizer, batches(self.rank, 500))

                if self.rank == 2:
                    error = refused(kind, loop)
                    assert text in str(error), error
                else:
                    error = refused(pt.PleachError, loop)
                    assert error.kind == "aborted" and error.rank == 2, error
                assert "step" not in optimizer.__dict__
                dist.barrier()
        # The parameters are free again, and the group of the world works on.
        optimizer = sgd(model)
        with pt.Gossip(model, optimizer):
            train(model, optimizer, batches(self.rank, 3))
        self.expect_equal(model, "a scheme after one that has failed")

        def replace():
            with pt.Gossip(model, optimizer):
                dist.barrier()
                model[1].bias = torch.nn.Parameter(torch.zeros(1))

        assert "was replaced by another one" in str(refused(pt.PleachSchemeError, replace))
        optimizer = sgd(model)

        def accumulate():
            with pt.Synchronous(model, optimizer, overlap=True):
                dist.barrier()
                for inputs, targets in batches(self.rank, 2):
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()

        assert "take overlap=False" in str(refused(pt.PleachSchemeError, accumulate))

    def check_what_must_be_the_same_on_all_ranks(self):
        model = model_of(0)
        ways = [
            (lambda: pt.Gossip(model, sgd(model)), lambda: pt.LocalSGD(model, sgd(model)), "the scheme of rank"),
            (lambda: pt.LocalSGD(model, sgd(model)), lambda: pt.LocalSGD(model, sgd(model), every=7), "local-sgd:every=7"),
            (lambda: pt.Gossip(model, sgd(model)), lambda: pt.Gossip(model, sgd(model), buffers="local"), "the hash of the model"),
            (lambda: pt.Gossip(model, sgd(model)), lambda: pt.Gossip(model[0], sgd(model[0])), "the hash of the layout"),
        ]
        for most, one, text in ways:
            error = refused(pt.PleachError, (one if self.rank == 1 else most)().__enter__)
            assert error.kind == "mismatch" and error.rank == (0 if self.rank == 1 else 1) and text in str(error), error
        model = model_of(self.rank)
        with pt.Gossip(model, sgd(model)):
            self.expect_equal(model, "they begin with those of rank 0")

    def check_a_loss_that_is_not_finite_ends_all_ranks(self):
        model = model_of(0)
        optimizer = sgd(model)

        def loop():
            with pt.attach("sync", model, optimizer):
                for step in range(50):
                    optimizer.step(lambda: torch.tensor(math.nan if self.rank == 3 and step == 4 else 1.0))

        error = refused(pt.PleachError, loop)
        assert error.rank == 3 and (error.kind == "loss" and "step 4" in str(error) if self.rank == 3 else error.kind == "aborted"), error

    def check_numbers_that_are_not_finite_end_all_ranks(self):
        """In a loop that tells the scheme no loss; the rank with the numbers is named, before it gives them to others."""
        ways = [
            lambda *of: pt.LocalSGD(*of, every=3),
            lambda *of: pt.LocalSGD(*of, every=9, warmup_steps=9),
            lambda *of: pt.Synchronous(*of),
            lambda *of: pt.Synchronous(*of, bucket=64, overlap=True),
            lambda *of: pt.DiLoCo(*of, every=3, outer_optimizer=torch.optim.SGD(of[0].parameters(), lr=1.0)),
            lambda *of: pt.Gossip(*of),
            lambda *of: pt.ElasticAveraging(*of, every=2),
            lambda *of: pt.BoundedStaleness(*of),
        ]
        for number, make in enumerate(ways):
            for value in (math.nan, math.inf):
                model = model_of(0)
                optimizer = sgd(model)

                def loop():
                    with make(model, optimizer):
                        for step, batch in enumerate(batches(self.rank, 500)):
                            if self.rank == 3 and step == 4:
                                batch = (batch[0] * value, batch[1])
                            train(model, optimizer, [batch])

                error = refused(pt.PleachError, loop)
                assert error.rank == 3, (number, error)
                if self.rank == 3:
                    assert error.kind == "loss" and "of rank 3 is not finite in step 4" in str(error), (number, error)
                else:
                    assert error.kind == "aborted" and flat(model).isfinite().all(), (number, error)
                dist.barrier()
        # A single element of many, at which each eighth step looks, and all ranks before the last
        # exchange.
        for steps in (0, 8):
            model = torch.nn.Sequential(torch.nn.Linear(1000, 1000, bias=False), torch.nn.Linear(1000, 1, bias=False))
            optimizer = sgd(model)

            def loop():
                with pt.LocalSGD(model, optimizer, every=100):
                    with torch.no_grad():
                        model[0].weight[700, 7] = math.nan if self.rank == 1 else 1
                    for _ in range(steps):
                        model[0].weight.grad = torch.zeros(1000, 1000)
                        optimizer.step()
                    assert steps == 0 or self.rank != 1, "found too late"

            error = refused(pt.PleachError, loop)
            assert error.rank == 1 and (self.rank != 1 or "parameter 0.weight of rank 1" in str(error)), error
            dist.barrier()
        # Finite elements of which the sum is infinite.
        model = model_of(0)
        torch.nn.init.constant_(model[0].weight, 1e37)
        assert not flat(model).sum().isfinite()
        optimizer = sgd(model)
        with pt.LocalSGD(model, optimizer, every=3):
            for _ in range(4):
                model[1].weight.grad = torch.zeros_like(model[1].weight)
                optimizer.step()


def killed(scheme, victim):
    """The rank kills itself between two steps, and the others print the exception."""
    dist.init_process_group("pleach", timeout=timedelta(seconds=4 * LIMIT_OF_STOP_S))
    model = model_of(0)
    optimizer = sgd(model)
    try:
        with pt.attach(scheme, model, optimizer):
            train(model, optimizer, batches(dist.get_rank(), 20))
            if dist.get_rank() == victim:
                print(time.time(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, batches(dist.get_rank(), 100))
    except pt.PleachError as error:
        print(json.dumps({"error": str(error), "rank": error.rank, "at": time.time()}), flush=True)
        os._exit(0)
    raise SystemExit("the block has ended without the killed rank")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "killed":
        killed(sys.argv[2], int(sys.argv[3]))
    else:
        main(Checks)
