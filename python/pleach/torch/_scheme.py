"""Training schemes: rules by which the ranks of a group train one model, under a loop that does not change.

A :class:`Scheme` is a context manager. In its block ``optimizer.step`` is the scheme's: the driver in
Rust says when the optimizer's own step is made, before or after which exchange. docs/training.md of the
repository has the schemes, what each guarantees, and the keys of their texts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import types
from collections.abc import Callable
from typing import Any

import torch

import pleach
from pleach import _native

from ._attachable import attach_all, detach_all, parameters_of
from ._buckets import Buckets
from ._buffers import over, own_group
from ._comm import translating
from ._errors import PleachError, PleachSchemeError
from ._vector import ParameterVector


def attach(
    scheme: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: Any = None,
    buffers: str = "average",
    optimizer_state: str = "keep",
) -> Scheme:
    """Returns a training scheme for the loop of a ``with`` block::

        with pleach.torch.attach("gossip:direction=pull", model, optimizer) as scheme:
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss(model(inputs), labels).backward()
                optimizer.step()

    scheme: ``NAME[:KEY=VALUE,…]``, as on the command line. model: on the CPU, its parameters of float32,
    not wrapped in DistributedDataParallel or FSDP. optimizer: any of torch whose step evaluates no loss;
    the parameters that it has are trained, and must be the model's. group: a group of the backend
    "pleach", by default the whole world, or a :class:`pleach.Group`. All its ranks enter the block, make
    the same number of steps, and leave it.

    buffers: "average" averages buffers of floating-point numbers, such as running means, with each
    exchange that all ranks make together (of ``sync``, ``local-sgd``, ``diloco`` and ``mode=sync``), in
    :meth:`Scheme.sync` and at the end; "local" leaves them alone. Other buffers stay what they are on
    each rank. optimizer_state: "keep" leaves the optimizer's state alone; after each exchange "reset"
    forgets it, and "average" averages its tensors, which takes an exchange that all ranks make together.

    At the beginning all ranks get the parameters and buffers of rank 0. At the end all have the same
    parameters; those are views of registered memory in the block, and have memory of their own after it.
    An exception that leaves the block ends the training on all ranks.

    Raises PleachSchemeError for a scheme that there is not, and for what contradicts it;
    PleachUnsupported for a model on a GPU, or of another type than float32. The block raises PleachError
    if a rank is lost, or if ranks have different schemes, models or options.
    """
    return Scheme(scheme, model, optimizer, group=group, buffers=buffers, optimizer_state=optimizer_state)


class Scheme:
    """A training scheme with a model and its optimizer: see :func:`attach`."""

    def __init__(
        self,
        scheme: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Any = None,
        buffers: str = "average",
        optimizer_state: str = "keep",
    ) -> None:
        self._source: Any
        if isinstance(group, pleach.Group):
            self._source, size = group, group.world_size
        else:
            self._source = own_group(group)
            size = self._source.size()
        with translating():
            self._facts = _native.scheme_facts(scheme, size)
        self._model = model
        self._optimizer = optimizer
        self._named = parameters_of(model, optimizer)
        #: The same by layer of the driver in Rust.
        self._layers = [[named] for named in self._named]
        self._averages_buffers = _one_of("buffers", buffers, ("average", "local")) == "average"
        self._optimizer_state = _one_of("optimizer_state", optimizer_state, ("keep", "reset", "average"))
        self._refuse_contradictions()
        self._warmup = int(_value_of(self._facts["text"], "warmup") or 0)
        self._takes_gradients: bool = self._facts["averages_gradients"]
        self._warms_up = self._facts["name"] == "local-sgd"
        self._meets: bool = self._facts["meets"]
        self._outer: Any = None
        self._overlaps = False
        #: Before this block, where a state was loaded; and in it.
        self._steps_before = 0
        self._steps = 0
        self._was_entered = False
        self._report: dict[str, Any] | None = None
        # From the beginning of the block to its end.
        self._group: pleach.Group | None = None
        self._trainer: Any = None
        self._vector: Any = None
        self._anchor: Any = None
        self._buckets: Any = None
        self._own_step: Any = None
        self._step_before: Any = None

    def _divide(self, layers: list[list[tuple[str, Any]]]) -> None:
        """Has these layers, which have all parameters. The parameters are in this order from now on."""
        self._named = [named for layer in layers for named in layer]
        self._layers = layers

    def _names_of_layers(self) -> list[list[str]]:
        return [[name for name, _ in layer] for layer in self._layers]

    def _refuse_contradictions(self) -> None:
        name, text = self._facts["name"], self._facts["text"]
        if self._facts["has_momentum"]:
            for settings in self._optimizer.param_groups:
                if settings.get("momentum") or "betas" in settings:
                    raise PleachSchemeError(
                        f"{text} has the momentum of local steps in it, and {type(self._optimizer).__name__} "
                        "has one of its own; take SGD without momentum, or easgd"
                    )
        if self._optimizer_state == "average" and not self._facts["meets"]:
            raise PleachSchemeError(
                f"optimizer_state='average' with {text}: its ranks never exchange all together; take 'keep' or 'reset'"
            )
        if self._optimizer_state != "keep" and name == "sync":
            raise PleachSchemeError(
                f"optimizer_state={self._optimizer_state!r} with sync: ranks make the same steps, so their states "
                "are the same; take 'keep'"
            )
        if self._optimizer_state == "reset" and name in ("ssp", "bsp", "dssp", "bap", "asp"):
            raise PleachSchemeError(
                f"optimizer_state='reset' with {text}: a rank takes new copies whenever it needs them; take 'keep'"
            )
        if self._optimizer_state != "keep" and name == "diloco" and _value_of(text, "fragments") is not None:
            raise PleachSchemeError(
                f"optimizer_state={self._optimizer_state!r} with {text}: each fragment has its own exchange, and the "
                "state is of all; take 'keep'"
            )
        if self._optimizer_state == "reset" and name == "eager":
            raise PleachSchemeError(
                f"optimizer_state='reset' with {text}: ranks exchange gradients in each step; take 'keep'"
            )

    # ---- The block

    def __enter__(self) -> Scheme:
        if self._was_entered:
            raise PleachSchemeError("this scheme was entered before; attach a new one")
        self._expect_right_places()
        attach_all(self._named, f"the scheme {self._facts['text']}")
        self._was_entered = True
        try:
            with translating():
                self._group = self._group_of_its_own()
                self._begin(self._facts["text"])
                with torch.no_grad():
                    self._give_the_rest()
            self._take_step()
        except BaseException as error:
            if getattr(error, "kind", None) == "mismatch" and self._group is not None:
                # All ranks have found it. An abort would reach some of them before they have.
                with contextlib.suppress(pleach.Error):
                    self._group.close()
            self._end(True)
            raise
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        is_failed = True
        try:
            if kind is None:
                self._finish()
                is_failed = False
        finally:
            self._end(is_failed)

    def _group_of_its_own(self) -> pleach.Group:
        """So that calls of the program on its group have no place in the order of the scheme's."""
        if isinstance(self._source, pleach.Group):
            part = self._source.split(0)
        else:
            made: list[Any] = []
            self._source._give(lambda comm, _: made.append(comm._group.split(0)), []).wait()
            part = made[0]
        assert part is not None, "each rank has a colour"
        return part

    def _begin(self, text: str, state: bytes | None = None) -> None:
        """Makes a trainer, and gives all ranks the parameters of rank 0; or goes on from a rank's state."""
        assert self._group is not None
        if self._buckets is not None:
            self._buckets.remove()
        layers = [sum(parameter.numel() for _, parameter in layer) for layer in self._layers]
        self._trainer = _native.Trainer(self._group, text, layers, model=self._hash())
        self._vector = ParameterVector(self._named, *self._trainer.memory())
        self._vector.move_in()
        if state is not None:
            self._trainer.restore(state)
        self._trainer.step()
        if self._outer is not None:
            self._anchor = self._vector.flat.clone()
        if self._overlaps:
            self._buckets = Buckets(self._trainer, self._vector, functools.partial(self._expect_finite, what="gradient"))

    def _hash(self) -> int:
        """A hash of what must be the same on all ranks."""
        shapes = [(name, tuple(one.shape), one.stride()) for name, one in self._named]
        rest = [(name, tuple(one.shape), str(one.dtype)) for name, one in self._rest()]
        outer = None
        if self._outer is not None:
            plain = {key: one for key, one in self._outer.defaults.items() if isinstance(one, (bool, int, float, tuple))}
            outer = (type(self._outer).__name__, sorted(plain.items()))
        options = (self._averages_buffers, self._optimizer_state, outer)
        digest = hashlib.sha256(repr((shapes, rest, options)).encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _rest(self) -> list[tuple[str, Any]]:
        """The parameters that are not trained, and the buffers."""
        trained = {id(parameter) for _, parameter in self._named}
        frozen = [(name, one) for name, one in self._model.named_parameters() if id(one) not in trained]
        return [*frozen, *self._model.named_buffers()]

    def _give_the_rest(self) -> None:
        group = self._group
        assert group is not None
        for tensors in _by_type([one for _, one in self._rest()]):
            _through_one(tensors, lambda flat: group.broadcast(flat, 0))

    def _finish(self) -> None:
        """The last exchange; all ranks have the same parameters after it."""
        self._expect_right_places()
        self._vector.check()
        self._expect_finite(self._vector.not_finite(), "parameter")
        with translating():
            is_exchanged = self._trainer.steps_alone > 0
            self._report = self._trainer.finish()
        if is_exchanged:
            self._step_outer()
        self._average_buffers()
        with translating():
            assert self._group is not None
            self._group.close()

    def _end(self, is_failed: bool) -> None:
        """Gives everything back that the block took."""
        detach_all(self._named)
        if self._own_step is not None:
            if self._optimizer.__dict__.get("step") is self._own_step:
                del self._optimizer.step
                if self._step_before is not None:
                    self._optimizer.step = self._step_before
            # A scheduler that was made in the block keeps the function, which only steps now.
            self._own_step = None
        if self._buckets is not None:
            self._buckets.remove()
        if is_failed and self._group is not None and not self._group.closed:
            with contextlib.suppress(pleach.Error):
                self._group.abort()
            if self._trainer is not None:
                with contextlib.suppress(pleach.Error):
                    self._trainer.abort()
        if self._vector is not None:
            self._vector.move_out()
        self._group = self._trainer = self._vector = self._anchor = self._buckets = None

    # ---- A step

    def _take_step(self) -> None:
        """Makes the optimizer's step the scheme's."""
        optimizer = self._optimizer
        self._step_before = optimizer.__dict__.get("step")
        self._original: Callable[..., Any] = optimizer.step

        @functools.wraps(self._original)
        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._original(closure) if self._own_step is None else self._step(closure)

        # Schedulers take the function of a bound method.
        self._own_step = types.MethodType(step, optimizer)
        optimizer.step = self._own_step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._vector.check_addresses()
        self._vector.expect_parameters(self._optimizer)
        number = loss.item() if isinstance(loss, torch.Tensor) else float(loss or 0.0)
        own_step = self._original
        if self._takes_gradients and (self._warms_up is False or self._steps < self._warmup):
            self._vector.take_gradients()
            # The trainer refuses a loss that is not finite, and says so.
            if self._buckets is None and math.isfinite(number):
                self._expect_finite(self._vector.not_finite_in_step(self._steps, True), "gradient")
        else:
            own_step = self._finite_step
        with translating():
            is_exchanged = self._trainer.update(own_step, number) == 0
            self._steps += 1
        if self._buckets is not None:
            self._buckets.begin_step()
        if is_exchanged:
            if self._outer is not None:
                self._step_outer()
            if self._meets:
                self._average_buffers()
            if self._optimizer_state != "keep" and self._steps > self._warmup:
                self._treat_optimizer_state()
        return loss

    def _finite_step(self) -> None:
        """The optimizer's own step, before an exchange of parameters."""
        self._original()
        try:
            self._expect_finite(self._vector.not_finite_in_step(self._steps, False), "parameter")
        except PleachError:
            # The exchange comes before the exception is raised, and one by windows does not look
            # at the abort.
            assert self._group is not None
            self._group.abort()
            with torch.no_grad():
                self._vector.flat.nan_to_num_(0.0, 0.0, 0.0)
            raise

    def _expect_finite(self, name: str | None, what: str) -> None:
        """Raises PleachError if a parameter of this name was found not to be finite, or its gradient."""
        if name is None:
            return
        assert self._group is not None
        rank = self._group.rank
        subject = f"the gradient of {name}" if what == "gradient" else f"parameter {name}"
        raise PleachError(
            f"{subject} of rank {rank} is not finite in step {self._steps_before + self._steps}; lower the learning "
            "rate, or clip gradients",
            kind="loss",
            rank=rank,
        )

    def _step_outer(self) -> None:
        """Takes a step of the outer optimizer from the last anchor by what the steps since have changed."""
        if self._outer is None:
            return
        flat = self._vector.flat
        before = [place.parameter.grad for place in self._vector.places]
        with torch.no_grad():
            changes = self._vector.named_parts(self._anchor - flat)
            flat.copy_(self._anchor)
            for place in self._vector.places:
                place.parameter.grad = changes[place.name]
        self._outer.step()
        with torch.no_grad():
            self._anchor.copy_(flat)
            for place, gradient in zip(self._vector.places, before):
                place.parameter.grad = gradient

    def _average_buffers(self) -> None:
        if self._averages_buffers:
            self._average(list(self._model.buffers()))

    def _treat_optimizer_state(self) -> None:
        states = [self._optimizer.state.get(parameter, {}) for _, parameter in self._named]
        if self._optimizer_state == "reset":
            for _, parameter in self._named:
                self._optimizer.state.pop(parameter, None)
        elif self._optimizer_state == "average":
            # The numbers of steps are the same.
            tensors = [state[key] for state in states for key in sorted(state) if key != "step"]
            self._average([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])

    def _average(self, tensors: list[Any]) -> None:
        """Replaces tensors of floating-point numbers by the means of all ranks'."""
        if not tensors:
            return
        group = self._group
        assert group is not None
        with translating(), torch.no_grad():
            for alike in _by_type([tensor for tensor in tensors if tensor.is_floating_point()]):
                _through_one(alike, lambda flat: group.all_reduce(flat, "avg"))

    # ---- What a program may ask

    def averaged(self) -> dict[str, torch.Tensor]:
        """Returns the means of all ranks' parameters at present by name, for ``torch.func.functional_call``
        or ``load_state_dict(…, strict=False)``. All ranks call it after the same number of steps. The
        training goes on as if it was not called, but that with ``bap`` each rank takes a newer copy of the table.

        Raises PleachSchemeError with ``elastic-bsp`` between two barriers, where ranks have no common place.
        """
        return dict(self._vector_of_block().named_parts(self._mean()))

    def _mean(self) -> torch.Tensor:
        vector = self._vector_of_block()
        vector.check()
        with translating():
            if self._facts["name"] == "elastic-bsp" and self._trainer.steps_alone == 0:
                return vector.flat.clone()
            return over(self._trainer.mean(), torch.float32)

    def sync(self) -> None:
        """Replaces the parameters of all ranks by their mean, and with ``buffers="average"`` the buffers, as
        for an evaluation. All ranks call it after the same number of steps. The scheme goes on from there; what
        it has besides the parameters (a centre, a table, momentum) stays.

        Raises PleachSchemeError with ``elastic-bsp``, whose ranks make different numbers of steps between barriers,
        and with ``push-sum``, which trains at a quotient.
        """
        if self._facts["name"] == "elastic-bsp":
            raise PleachSchemeError(
                "elastic-bsp gives all ranks the same parameters at its barriers alone; use averaged() there"
            )
        if _value_of(self._facts["text"], "direction") == "push-sum":
            raise PleachSchemeError(
                "push-sum trains at its sum over its weight, so parameters cannot be replaced; use averaged()"
            )
        vector, mean = self._vector_of_block(), self._mean()
        with torch.no_grad():
            vector.flat.copy_(mean)
        self._average_buffers()

    def report(self) -> dict[str, Any]:
        """Returns how the training went on this rank, so far or at the end: "scheme", "guarantee", "steps",
        "time_s", "waiting_s" (with nothing to compute), "communicating_s", "bytes" (averaged, read and written),
        "staleness_mean" and "staleness_max" (steps since the last exchange), "staleness_histogram" (of bins, the
        most of each, None of the last, and its steps), "agreements", "spread" (the distance
        of this rank's parameters from the mean of all ranks as a share of its length, when :meth:`averaged` or
        :meth:`sync` was called last, else None); after the block also "guarantee_held" and "parameters_equal"."""
        if self._report is not None:
            return dict(self._report)
        self._vector_of_block()
        with translating():
            return dict(self._trainer.report())

    def state_dict(self) -> dict[str, Any]:
        """Returns what the scheme has on this rank besides the model and the optimizer.

        ``sync``, ``local-sgd``, and DiLoCo with an outer optimizer have nothing on a rank but its parameters: the
        state is the same on all ranks, and may be loaded on another number of ranks. With other schemes all ranks
        call it after the same number of steps and wait for each other here, and each keeps its own state, which
        has the parameters in it.

        Raises PleachSchemeError with a state that is the same on all ranks between two exchanges, where ranks have
        different parameters.
        """
        self._vector_of_block()
        text = self._facts["text"]
        state: dict[str, Any] = {"scheme": text, "steps": self._steps_before + self._steps, "outer": None}
        if not self._has_state_of_rank():
            with translating():
                alone = self._trainer.steps_alone
            if alone > 0:
                raise PleachSchemeError(
                    f"this rank has made {alone} steps since the last exchange of {text}; save right after an exchange"
                )
            if self._outer is not None:
                state["outer"] = self._outer.state_dict()
            return state
        assert self._group is not None
        self._vector.check()
        with translating():
            own = self._trainer.state()
        # Tensors may be in a file that is loaded with weights_only.
        state["rank"] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        state["place"] = [self._group.rank, self._group.world_size]
        state["layers"] = self._names_of_layers()
        return state

    def _has_state_of_rank(self) -> bool:
        """Whether a rank has more than its parameters, which the model keeps."""
        return self._facts["name"] not in ("sync", "local-sgd") or "compress=f8" in self._facts["text"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; all ranks call it, before the first step of the block. The model and the
        optimizer load their own before. A state of one rank is for that rank, of as many ranks, and its parameters
        take the place of the model's.

        Raises PleachSchemeError for the state of another scheme, model, rank or number of ranks, for one that was
        changed, and after the first step.
        """
        self._vector_of_block()
        if state.get("scheme") != self._facts["text"] or (state.get("outer") is None) != (self._outer is None):
            text = self._facts["text"]
            raise PleachSchemeError(f"the state is of {state.get('scheme')!r}, not of {text!r}; attach that scheme")
        if self._steps > 0:
            raise PleachSchemeError(f"{self._steps} steps were made already; load the state before the first one")
        if self._has_state_of_rank():
            return self._load_state_of_rank(state)
        self._steps_before = int(state["steps"])
        if self._warmup > 0:
            self._warmup = max(0, self._warmup - self._steps_before)
            name, _, rest = self._facts["text"].partition(":")
            others = [part for part in rest.split(",") if not part.startswith("warmup=")]
            self._vector.move_out()
            with translating():
                self._trainer.finish()
                self._begin(f"{name}:{','.join([*others, f'warmup={self._warmup}'])}")
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
            self._anchor.copy_(self._vector.flat)

    def _load_state_of_rank(self, state: dict[str, Any]) -> None:
        assert self._group is not None
        own = [self._group.rank, self._group.world_size]
        place = list(state.get("place", []))
        if place != own or not isinstance(state.get("rank"), torch.Tensor):
            saved = "of rank {} of {}".format(*place) if len(place) == 2 else "of no rank"
            raise PleachSchemeError(
                f"the state is {saved}, and this is rank {own[0]} of {own[1]}; each rank loads its own, of as many ranks"
            )
        if state.get("layers") != self._names_of_layers():
            raise PleachSchemeError(
                "the state has other parameters, or in other fragments; attach the same model with the same fragments"
            )
        self._vector.move_out()
        with translating():
            self._trainer.finish()
            try:
                self._begin(self._facts["text"], state["rank"].numpy().tobytes())
            except (pleach.ArgumentError, pleach.MismatchError):
                # All ranks have found it. An abort would reach some of them before they have.
                with contextlib.suppress(pleach.Error):
                    self._group.close()
                raise
        self._warmup = max(0, self._warmup - int(state["steps"]))
        self._steps_before = int(state["steps"])

    def _vector_of_block(self) -> ParameterVector:
        if self._vector is None:
            raise PleachSchemeError("the scheme works in its block alone: with ... as scheme")
        vector: ParameterVector = self._vector
        return vector

    def _expect_right_places(self) -> None:
        """The parameters of the model are those that were attached."""
        own = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._named:
            if id(parameter) not in own:
                raise PleachSchemeError(
                    f"parameter {name} of the model was replaced by another one; attach after the model is complete"
                )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._facts['text']}, {len(self._named)} parameters>"


# ---- Texts and tensors


def _value_of(text: str, key: str) -> str | None:
    """The value of a key in the text of a scheme; None where it is the usual one."""
    _, _, rest = text.partition(":")
    return dict(part.split("=", 1) for part in rest.split(",") if part).get(key)


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise PleachSchemeError(f"{what} is {value!r}; there are {', '.join(known)}")
    return value


def _by_type(tensors: list[Any]) -> list[list[Any]]:
    """The tensors as lists of one type each, in an order that is the same on all ranks."""
    lists: dict[Any, list[Any]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.dtype, []).append(tensor)
    return list(lists.values())


def _through_one(tensors: list[Any], call: Callable[[Any], Any]) -> None:
    """Makes a call in place on all elements of tensors of one type."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    if flat.numel() > 0:
        call(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view(tensor.shape))
