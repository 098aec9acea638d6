"""Members of a session that train a model of torch: `elastic_checks.py CHECK FOLDER [ARGUMENT...]`.

Each member says at the end, as JSON, what it has come to.
"""

import copy
import hashlib
import json
import os
import pathlib
import signal
import sys
import time

import torch

import pleach
import pleach.torch
from pleach.torch import ElasticTraining, PleachSchemeError, PleachUnsupported

RANK = int(os.environ["RANK"])
FOLDER = pathlib.Path(sys.argv[2])
#: Inputs and labels of a step, for all members together.
BATCH, INPUTS, CLASSES = 12, 8, 3
TEACHER = torch.linspace(-1, 1, INPUTS * CLASSES).sin().reshape(INPUTS, CLASSES)

OPTIMIZERS = {
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01, amsgrad=True),
    "sgd": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9, dampening=0.3),
    "plain": lambda of: torch.optim.SGD(of, lr=0.05, weight_decay=0.1),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda of: torch.optim.Adadelta(of, lr=1.0),
    "adamax": lambda of: torch.optim.Adamax(of, lr=0.01),
    "asgd": lambda of: torch.optim.ASGD(of, lr=0.05),
    "nadam": lambda of: torch.optim.NAdam(of, lr=0.01),
    "radam": lambda of: torch.optim.RAdam(of, lr=0.01),
    "rmsprop": lambda of: torch.optim.RMSprop(of, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda of: torch.optim.Rprop(of, lr=0.01),
}


class Model(torch.nn.Module):
    """Has buffers that change and others that do not, frozen parameters, and trained ones that it does not use."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(INPUTS, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES)]
        self.body, self.unused = torch.nn.Sequential(*layers), torch.nn.Linear(2, 2)
        layers[0].bias.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.randn(3).double(), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("floor", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("table", torch.rand(1000))
        self.register_buffer("share", torch.ones(1))

    def forward(self, inputs):
        return self.body(inputs)


def made(optimizer, seed=0):
    """A model, an optimizer that has not made a step, and a scheduler. Of the frozen parameters the optimizer has one."""
    torch.manual_seed(seed)
    model = Model()
    own = OPTIMIZERS[optimizer]([*model.body.parameters(), *model.unused.parameters()])
    return model, own, torch.optim.lr_scheduler.MultiStepLR(own, [3, 5, 5], gamma=0.5)


def batch(step, rank, ranks):
    """A member's part of the inputs and labels of a step."""
    inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(step))
    return inputs[rank::ranks], (inputs @ TEACHER).argmax(1)[rank::ranks]


def loss_of(model, inputs, labels):
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def digest(model, optimizer, scheduler):
    """A hash of all that members have in common."""
    digest = hashlib.sha256()
    for name, one in model.state_dict().items():
        digest.update(name.encode() + one.numpy().tobytes())
    state = optimizer.state_dict()
    for number, own in sorted(state["state"].items()):
        for key, one in sorted(own.items()):
            digest.update(f"{number} {key}".encode() + torch.as_tensor(one).numpy().tobytes())
    digest.update(repr((state["param_groups"], sorted(scheduler.state_dict().items()))).encode())
    return digest.hexdigest()


def joined(folder="job", fewest=1, most=4, **options):
    """A session of this job; its members begin together."""
    address = f"file://{FOLDER / folder}"
    options = {"begin_wait": 60, "suspect_after": 1.0, "program": "elastic", **options}
    rank, size = options.pop("world", (RANK, int(os.environ["WORLD_SIZE"])))
    return pleach.Session(fewest, most, rank=rank, world_size=size, rendezvous=address, **options)


def train(session, parts, end, within=lambda attempt, group: None, clears_behind=False):
    """Makes steps until `end` are committed. Returns how many attempts were repeated."""
    model, optimizer, scheduler = parts
    retries = 0
    with ElasticTraining(session, model, optimizer, scheduler) as training:
        for attempt in training.steps(end):
            with attempt as group:
                if not clears_behind:
                    optimizer.zero_grad()
                loss_of(model, *batch(attempt.step, group.rank, group.world_size)).backward()
                within(attempt, group)
            if attempt.verdict:
                optimizer.step()
                scheduler.step()
                model.share.mul_(0.5)
                if clears_behind:
                    optimizer.zero_grad()
            else:
                retries += 1
    return retries


def say(**what):
    print(json.dumps(what), flush=True)


def killed():
    """Member 2 is killed in a step. Members begin with different parameters: those of rank 0 count."""
    parts = made("adamw", seed=RANK)

    def within(attempt, group):
        # All have begun the step.
        group.barrier()
        if RANK == 2 and attempt.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    with joined(fewest=2) as session:
        retries = train(session, parts, 20, within)
        members = session.change.members
    # What no step changes has the bits of rank 0.
    (floor, table), of_rank_0 = (parts[0].floor, parts[0].table), made("adamw")[0]
    assert torch.equal(floor, of_rank_0.floor) and torch.equal(table, of_rank_0.table)
    say(digest=digest(*parts), retries=retries, members=members)


def late(optimizer, heal, behind):
    """Member 2 comes later, with other parameters. All make steps until it has made some. behind: what they do
    behind a step besides: nothing, "decay" weights by gradients of their own, or "skip" some steps of the optimizer."""
    late = FOLDER / "late"
    while RANK == 2 and not late.exists():
        time.sleep(0.01)
    parts = model, own, scheduler = made(optimizer, seed=RANK)
    steps, neutral = 0, 0
    enough = torch.zeros(1)
    with joined(fewest=2, heal=heal, begin_wait=0.02) as session:
        with ElasticTraining(session, model, own, scheduler) as training:
            for attempt in training.steps(1 << 40):
                with attempt as group:
                    neutral += not group.contributes
                    own.zero_grad()
                    loss_of(model, *batch(attempt.step, group.rank, group.world_size)).backward()
                    enough[0] = RANK == 2 and steps >= 5
                    group.all_reduce(enough, "max")
                assert attempt.verdict or attempt.step == 0, attempt.verdict
                if attempt.verdict:
                    for parameter in model.parameters() if behind == "decay" else ():
                        if parameter.grad is not None:
                            parameter.grad.add_(parameter.detach(), alpha=0.1)
                    if behind != "skip" or attempt.step % 2:
                        own.step()
                    scheduler.step()
                    steps += 1
                    if steps == 7 and RANK == 0:
                        late.touch()
                    if enough[0] == 1:
                        break
            step = session.step
            # The last step's buffers and tensors come to the state with the next one.
            with next(training.steps(step + 1)):
                own.zero_grad()
                loss_of(model, *batch(step, RANK, 3)).backward()
            session.audit()
    say(digest=digest(*parts), steps=steps, step=step, neutral=neutral, rate=own.param_groups[0]["lr"])


def first(heal):
    """Member 1 ends before the first step, which the others repeat until member 3 has come in its place."""
    come = FOLDER / "come"
    while RANK == 3 and not come.exists():
        time.sleep(0.01)
    parts = model, own, scheduler = made("adamw", seed=RANK)
    with joined(heal=heal, world=(1 if RANK == 3 else RANK, 3), retries_max=1000) as session:
        if RANK == 1:
            come.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        def within(attempt, group):
            if attempt.step == 0 and group.world_size < 3:
                time.sleep(0.02)
                raise ArithmeticError("too few")

        train(session, parts, 8, within)
    say(digest=digest(*parts))


def repeated():
    """Attempts that are repeated leave no trace, and members average what they have computed."""
    digests = []
    for job, failing in enumerate([(), (0, 2, 5), (0, 2, 5)]):
        parts, raised = made("sgd"), set()

        def within(attempt, group):
            group.barrier()
            if RANK == 1 and attempt.step in failing and attempt.step not in raised:  # noqa: B023
                raised.add(attempt.step)  # noqa: B023
                raise ArithmeticError("of the program")

        with joined(f"job{job}", fewest=2) as session:
            retries = train(session, parts, 9, within, clears_behind=job == 2)
        assert retries == len(failing), retries
        digests.append(digest(*parts))
    assert len(set(digests)) == 1

    model, optimizer, scheduler = made("sgd")
    for step in range(9):
        copies = [copy.deepcopy(model) for _ in range(2)]
        for rank, one in enumerate(copies):
            loss_of(one, *batch(step, rank, 2)).backward()
        for own, *others in zip(model.parameters(), *(one.parameters() for one in copies)):
            given = [one.grad for one in others if one.grad is not None]
            own.grad = torch.stack(given).mean(0) if given else None
        for own, *others in zip(model.buffers(), *(one.buffers() for one in copies)):
            if not torch.equal(own, others[0]):
                own.copy_(torch.stack(others).mean(0) if own.is_floating_point() else others[0])
        optimizer.step()
        scheduler.step()
        model.share.mul_(0.5)
    for (name, one), other in zip(model.state_dict().items(), parts[0].state_dict().values()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    say(digest=digests[0])


def alone():
    """A member that is alone has the bits of a loop without a session, with each optimizer of torch."""
    for name in OPTIMIZERS:
        plain, own = made(name), made(name)
        model, optimizer, scheduler = plain
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, *batch(step, 0, 1)).backward()
            optimizer.step()
            scheduler.step()
            model.share.mul_(0.5)

        def has_own_storages(attempt, group):
            tensors = [one for state in own[1].state.values() for one in state.values()]  # noqa: B023
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in tensors), "each is saved alone"

        with joined(name) as session:
            train(session, own, 6, has_own_storages)
        assert digest(*own) == digest(*plain), name
        # Its memory is its own again, and the optimizer makes steps as ever.
        optimizer.step()
        own[1].step()
        assert digest(*own) == digest(*plain), name
    say()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, of):
        super().__init__(of, {})
        self.base = torch.optim.SGD(of, lr=0.1)

    def step(self, closure=None):
        self.base.step()


def refused(kind, about, make):
    try:
        made = make()
    except kind as error:
        assert about in str(error), error
    else:
        raise AssertionError(f"not refused: {about}, but {made}")


def refusals():
    model, optimizer, scheduler = made("adamw")
    with joined() as session:
        refused(PleachSchemeError, "pass the session", lambda: ElasticTraining(None, model, optimizer))
        other = torch.optim.LBFGS(model.body.parameters())
        refused(PleachUnsupported, "LBFGS evaluates", lambda: ElasticTraining(session, model, other))

        class Holder:
            def state_dict(self):
                return {"rates": torch.ones(3)}

        def with_optimizer(make):
            return lambda: ElasticTraining(session, model, make([model.body[0].weight, model.body[3].weight]))

        refused(PleachUnsupported, "a Tensor as 'rates'", lambda: ElasticTraining(session, model, optimizer, Holder()))
        long = Holder()
        long.state_dict = lambda: {"text": "x" * 100_000}
        refused(PleachSchemeError, "bytes besides tensors", lambda: ElasticTraining(session, model, optimizer, long))
        for make, about in [
            (torch.optim.SparseAdam, "SparseAdam cannot make a step as it is"),
            (lambda of: torch.optim.SGD(of, lr=torch.tensor(0.1)), "a Tensor as 'lr'"),
            (lambda of: Wrapper(of), "Wrapper keeps a SGD in base"),
        ]:
            refused(PleachUnsupported, about, with_optimizer(make))
        spread = copy.deepcopy(model)
        spread.register_buffer("spread", torch.ones(1).expand(3))
        other = torch.optim.SGD(spread.body.parameters(), lr=0.1)
        refused(PleachUnsupported, "buffer spread cannot be written", lambda: ElasticTraining(session, spread, other))
        training = ElasticTraining(session, model, optimizer, scheduler)
        refused(PleachSchemeError, "in its block alone", lambda: training.steps(3))
        with training:
            refused(PleachSchemeError, "that is committed; call it behind", optimizer.step)
            again = ElasticTraining(session, model, optimizer)
            refused(PleachSchemeError, "the session has a training", again.__enter__)
            scheme = pleach.torch.attach("sync", model, optimizer, group=pleach.join(rank=0, world_size=1))
            refused(PleachSchemeError, "has an ElasticTraining already", scheme.__enter__)
            for attempt in training.steps(1):
                with attempt:
                    loss_of(model, *batch(0, 0, 1)).backward()
                    refused(PleachSchemeError, "that is committed; call it behind", optimizer.step)
                optimizer.step()

            def one_more():
                with next(training.steps(2)):
                    model.body[1].running_mean = torch.zeros(16)

            for times in range(4):
                try:
                    one_more()
                except pleach.StepError as error:
                    assert times == 3 and "running_mean was replaced" in str(error.__cause__), error
                    break
        refused(PleachSchemeError, "entered before", training.__enter__)
    with joined("units", fewest=1, most=1, unit=1) as session:
        assert ElasticTraining(session, *made("sgd")[:2])
        session._unit = 2
        refused(PleachUnsupported, "session.split", lambda: ElasticTraining(session, *made("sgd")[:2]))
    say()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[3:])
