"""Training of a model of torch in a session: members come and go, and the loop goes on.

All that members have in common lies in one state of the session, which a process that joins reads: the
parameters, the optimizer's tensors, the buffers, and plain values such as learning rates. Until the first
step is committed that state is zeros, and each member has in private memory what rank 0 has given to all.

**Invariant:** while a step is attempted that state is the same on all members, bit for bit, and nobody
changes it. So what an attempt changes, which may be repeated, is elsewhere: gradients, and the buffers of the
model, which are copied to the state before the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

import pleach
from pleach import _native

from ._attachable import attach_all, detach_all, parameters_of
from ._buffers import over
from ._errors import PleachSchemeError, PleachUnsupported
from ._optimizer_state import OptimizerState
from ._places import MemoryPart, Places
from ._plain import from_text, to_text
from ._tensors import DATA_TYPES
from ._vector import ParameterVector

#: Bytes for plain values, and how many more there are for each parameter.
PLAIN_BYTES_MAX, PLAIN_BYTES_PER_PARAMETER_MAX = 1 << 16, 1 << 8
#: Bytes of the length of the plain values.
LENGTH_BYTES = 8

_OUTSIDE = "the training works in its block alone: with ... as training"


class ElasticTraining:
    """Trains a model in a session::

        with pleach.Session(2, 8) as session, pleach.torch.ElasticTraining(session, model, optimizer) as training:
            for attempt in training.steps(1000):
                with attempt as group:
                    inputs, labels = batch(attempt.step, group.rank, group.world_size)
                    optimizer.zero_grad()
                    loss(model(inputs), labels).backward()
                if attempt.verdict:          # committed, on all members
                    optimizer.step()

    The end of the inner block averages the gradients of all members, and the buffers that the block has
    changed on one of them, such as running means; of buffers that are no floating-point numbers each element
    is the greatest of all members'. Then the verdict of the step is the same on all members. A step whose
    verdict is false is repeated, and begins without gradients and with the buffers as they were before it.

    model: on the CPU, its trained parameters of float32. optimizer: one of torch whose step evaluates no loss,
    or another one that keeps all it knows in its ``state`` and ``param_groups``. The members that begin the job
    begin with what rank 0 has. A process that joins reads it from the others. stateful: objects with
    ``state_dict`` and ``load_state_dict``, such as schedulers, whose states are numbers, strings, lists, tuples
    and dicts; it reads these too. Between two steps all members change all of this alike. Buffers that are not
    persistent are each member's own.

    In the block parameters and the optimizer's tensors are views of the session's memory; they have memory of
    their own after it. A session trains one model: several are one torch.nn.ModuleList with one optimizer.

    Raises PleachSchemeError for a model or an optimizer that cannot be trained so, and PleachUnsupported for a
    model on a GPU, or of another type than float32.
    """

    def __init__(
        self, session: pleach.Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *stateful: Any
    ) -> None:
        if not isinstance(session, pleach.Session):
            raise PleachSchemeError(f"{type(session).__name__} is no pleach.Session; pass the session")
        if session._unit != 1:
            raise PleachUnsupported(
                f"a session with unit={session._unit}: members with different places in their units train different "
                "parts; average gradients in the group of session.split"
            )
        self._session = session
        self._optimizer = optimizer
        self._stateful = stateful
        self._named = [(name, one) for name, one in parameters_of(model, optimizer) if one.requires_grad]
        trained = {id(parameter) for _, parameter in self._named}
        frozen = [(name, one) for name, one in model.named_parameters() if id(one) not in trained]
        buffers = _buffers_of(model)
        self._buffers = [buffer for _, buffer, _ in buffers]
        #: Of each buffer the dict of its module, and its key there.
        self._owners = [owner for _, _, owner in buffers]
        self._trained_nbytes = sum(parameter.nbytes for _, parameter in self._named)
        places = Places()
        places.end = self._trained_nbytes
        self._frozen = [(one, places.give(one, f"parameter {name}")) for name, one in frozen]
        self._buffer_places = [places.give(one, f"buffer {name}") for name, one, _ in buffers]
        self._optimizer_state = OptimizerState(optimizer, self._named, places)
        plain = PLAIN_BYTES_MAX + PLAIN_BYTES_PER_PARAMETER_MAX * len(self._named)
        self._plain_place = places.give(torch.empty(plain, dtype=torch.uint8), "plain values")
        self._nbytes = places.end
        self._optimizer_state.look()
        self._plain_values()
        self._identities = _identities(optimizer)
        self._hash = self._hash_of([*self._named, *frozen, *[(name, one) for name, one, _ in buffers]])
        # From the begin of the block to its end.
        self._is_open = False
        self._was_open = False
        self._state: _native.SessionState
        self._averages: _Averages
        #: Views of what members have in common. None: this process has not got that.
        self._vector: ParameterVector | None = None
        #: Where that is until the first step of the job is committed; then it is in the state.
        self._packed: torch.Tensor | None = None
        #: The buffers there; before, as they were when the block was entered.
        self._buffer_views: list[torch.Tensor] = []
        self._plain: torch.Tensor
        #: The plain values that lie there.
        self._text = ""
        #: What the last attempt has changed does not count.
        self._is_repeated = False
        #: The last step was committed.
        self._may_step = False

    def _hash_of(self, tensors: list[tuple[str, Any]]) -> str:
        """A hash of what is the same on all members."""
        shapes = [(name, tuple(one.shape), one.stride(), str(one.dtype), one.requires_grad) for name, one in tensors]
        kinds = [type(one).__name__ for one in (self._optimizer, *self._stateful)]
        digest = hashlib.sha256(repr((shapes, self._optimizer_state.places, kinds)).encode())
        return digest.hexdigest()[:16]

    # ---- The block

    def __enter__(self) -> ElasticTraining:
        if self._was_open:
            raise PleachSchemeError("this training was entered before; make a new one")
        if self._session._trains or self._session._has_begun:
            raise PleachSchemeError(
                "the session has a training, or has made a step; begin a training before the first step, and put several "
                "models into one torch.nn.ModuleList with one optimizer"
            )
        attach_all(self._named, "an ElasticTraining")
        self._buffer_views = [buffer.detach().clone() for buffer in self._buffers]
        try:
            native = self._session._native
            self._averages = _Averages(native, self._named, self._buffers)
            self._state = native.state(f"torch {self._hash}", self._nbytes, "uint8")
            self._hook = self._optimizer.register_step_pre_hook(self._before_own_step)
        except BaseException:
            detach_all(self._named)
            raise
        self._session._trains = self._is_open = self._was_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._hook.remove()
        detach_all(self._named)
        if self._is_repeated:
            self._restore_buffers()
        if self._vector is None:
            return
        self._vector.move_out()
        self._optimizer_state.move_out()
        for parameter, _ in self._frozen:
            parameter.data = parameter.data.clone()

    def steps(self, end: int) -> Iterator[pleach.Attempt]:
        """Attempts until ``end`` steps of the job are committed; the body of the loop makes each: see the class."""
        if not self._is_open:
            raise PleachSchemeError(_OUTSIDE)
        return self._session._attempts(end, lambda: _Attempt(self))

    # ---- What members have in common

    def _vector_in(self, memory: Any) -> ParameterVector:
        return ParameterVector(self._named, MemoryPart(memory, 0, self._trained_nbytes), self._averages.memory)

    def _pack(self) -> torch.Tensor:
        """Copies to new memory what this process has."""
        packed = torch.zeros(self._nbytes, dtype=torch.uint8)
        memory = MemoryPart.of(packed)
        with torch.no_grad():
            for trained in self._vector_in(memory).places:
                trained.view.copy_(trained.parameter)
            for parameter, place in self._frozen:
                place.of(memory).copy_(parameter)
            for buffer, place in zip(self._buffers, self._buffer_places):
                place.of(memory).copy_(buffer)
        self._optimizer_state.copy_to(memory)
        _write(self._plain_place.of(memory), self._plain_values())
        return packed

    def _adopt(self, memory: Any) -> None:
        """Makes what lies in a memory that of the model, the optimizer and the others."""
        self._vector = self._vector_in(memory)
        self._optimizer_state.bind(memory)
        self._buffer_views = [place.of(memory) for place in self._buffer_places]
        self._plain = self._plain_place.of(memory)
        with torch.no_grad():
            for trained in self._vector.places:
                trained.parameter.data = trained.view
            for parameter, place in self._frozen:
                parameter.data = place.of(memory)
        length = int.from_bytes(self._plain[:LENGTH_BYTES].numpy().tobytes(), "little")
        self._text = self._plain[LENGTH_BYTES : LENGTH_BYTES + length].numpy().tobytes().decode()
        of_optimizer, of_others = from_text(self._text)
        self._optimizer_state.restore(of_optimizer)
        for other, state in zip(self._stateful, of_others):
            other.load_state_dict(state)
        self._restore_buffers()

    def _plain_values(self) -> str:
        others = [other.state_dict() for other in self._stateful]
        text = to_text([self._optimizer_state.plain_values(), others], "what members have in common")
        most = self._plain_place.nbytes - LENGTH_BYTES
        if len(text) > most:
            raise PleachSchemeError(
                f"the states of the optimizer and of {len(others)} other objects have {len(text)} bytes besides tensors, "
                f"and members keep {most}; pass fewer objects"
            )
        return text

    def _store(self) -> None:
        """Copies to the memory the buffers and the plain values."""
        with torch.no_grad():
            for buffer, view in zip(self._buffers, self._buffer_views):
                view.copy_(buffer)
        text = self._plain_values()
        if text != self._text:
            _write(self._plain, text)
            self._text = text

    def _restore_buffers(self) -> None:
        """Makes the buffers those of the last step that was committed."""
        with torch.no_grad():
            for buffer, view in zip(self._buffers, self._buffer_views):
                buffer.copy_(view)

    # ---- A step

    def _before_step(self) -> None:
        """Before a step begins."""
        if not self._is_open:
            raise PleachSchemeError(_OUTSIDE)
        self._may_step = False
        # Waits until a process that has joined with the step before has read the state.
        if self._vector is None or self._packed is not None or self._state.memory() is None:
            return
        self._vector.check_addresses()
        if _identities(self._optimizer) != self._identities:
            raise PleachSchemeError(
                f"{type(self._optimizer).__name__} has other parameters than at the begin; give it all of them before the block"
            )
        self._optimizer_state.move_in()
        if not self._is_repeated:
            self._store()

    def _begin(self, step: int, group: Any) -> None:
        """When a step has begun in a group."""
        if self._is_repeated:
            for _, parameter in self._named:
                parameter.grad = None
            self._restore_buffers()
        self._is_repeated = True
        if step == 0:
            self._take_of_rank_0(group)
        elif self._vector is None and group.contributes:
            self._adopt(self._state.memory())

    def _take_of_rank_0(self, group: Any) -> None:
        """Makes what rank 0 has that of all members."""
        packed = self._pack()
        group.broadcast(packed, 0)
        self._packed = packed
        self._adopt(MemoryPart.of(packed))

    def _average(self, group: Any) -> None:
        """At the end of the block of an attempt."""
        for own, (buffers, key) in zip(self._buffers, self._owners):
            if buffers.get(key) is not own:
                raise PleachSchemeError(f"buffer {key} was replaced by another tensor; store values by copy_")
        if self._vector is not None:
            self._vector.check_addresses()
            has_gradient = [parameter.grad is not None for _, parameter in self._named]
            self._vector.take_gradients()
            with torch.no_grad():
                are_changed = [not torch.equal(*pair) for pair in zip(self._buffers, self._buffer_views)]
            self._averages.give(has_gradient, are_changed)
        # One that reads the state meanwhile gives nothing.
        self._averages.exchange(group)

    def _end(self, is_committed: bool) -> None:
        """When the verdict of a step is known."""
        self._may_step = is_committed
        self._is_repeated = not is_committed
        if not is_committed:
            return
        if self._vector is None or self._packed is not None:
            # If it has joined with this step, it reads what the step was made with.
            memory = self._state.memory()
            if memory is None:
                # The members have changed. Before its next step it reads what came of this one.
                return
            if self._packed is not None:
                over(memory, torch.uint8)[: self._nbytes].copy_(self._packed)
                self._packed = None
            self._adopt(memory)
        assert self._vector is not None
        self._averages.take([place.gradient for place in self._vector.places])

    def _before_own_step(self, *_: Any) -> None:
        """Before the optimizer's own step."""
        if not self._may_step:
            raise PleachSchemeError(
                "optimizer.step() without a step of training.steps that is committed; call it behind the block of the "
                "attempt: if attempt.verdict: optimizer.step()"
            )
        # Waits until nobody reads the state.
        self._state.memory()

    def __repr__(self) -> str:
        return f"<ElasticTraining: {len(self._named)} parameters, {self._session!r}>"


class _Averages:
    """Gradients and buffers of an attempt, which members average, in registered memory.

    One call averages gradients, buffers of float32, and for each parameter and buffer whether it counts: a gradient
    that no member has stays away, and a buffer that no member has changed stays as it is. Buffers of other types
    take a call for each type, where one of them was changed.
    """

    def __init__(self, native: Any, named: list[tuple[str, Any]], buffers: list[Any]) -> None:
        self._named = named
        self._buffers = buffers
        gradients = sum(parameter.numel() for _, parameter in named)
        of_type: dict[Any, list[int]] = {torch.float32: []}
        for number, buffer in enumerate(buffers):
            of_type.setdefault(buffer.dtype, []).append(number)
        floats = of_type.pop(torch.float32)
        means = sum(buffers[number].numel() for number in floats)
        count = gradients + means + len(named) + len(buffers)
        #: Begins with the gradients.
        self.memory = native.register(4 * count)
        self._flat = over(self.memory, torch.float32)[:count]
        _, of_floats, flags = self._flat.split([gradients, means, len(named) + len(buffers)])
        self._has_gradient, self._are_changed = flags.split([len(named), len(buffers)])
        #: Of types other than float32: all elements, and the numbers of the buffers.
        self._others = []
        #: By number of a buffer: its place here.
        self._places = dict(zip(floats, self._split(of_floats, floats)))
        for dtype, numbers in of_type.items():
            elements = sum(buffers[number].numel() for number in numbers)
            memory = over(native.register(max(1, elements * dtype.itemsize)), torch.uint8)
            flat = memory[: elements * dtype.itemsize].view(dtype)
            self._others.append((flat, numbers))
            self._places.update(zip(numbers, self._split(flat, numbers)))
        self._changed: list[bool] = []

    def _split(self, flat: torch.Tensor, numbers: list[int]) -> list[torch.Tensor]:
        """Views of the elements, with the shapes of these buffers."""
        buffers = [self._buffers[number] for number in numbers]
        parts = flat.split([buffer.numel() for buffer in buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, buffers)]

    def give(self, has_gradient: list[bool], are_changed: list[bool]) -> None:
        """Takes in the buffers, behind the gradients, which lie there."""
        with torch.no_grad():
            self._has_gradient.copy_(torch.tensor(has_gradient))
            if are_changed:
                self._are_changed.copy_(torch.tensor(are_changed))
            for number, place in self._places.items():
                place.copy_(self._buffers[number])

    def exchange(self, group: Any) -> None:
        """Averages all of this with the other members."""
        group.all_reduce(self._flat, "avg")
        self._changed = [share != 0 for share in self._are_changed.tolist()]
        for flat, numbers in self._others:
            if any(self._changed[number] for number in numbers):
                is_mean = flat.is_floating_point() or flat.is_complex()
                group.all_reduce(_as_numbers(flat), "avg" if is_mean else "max")

    def take(self, gradients: list[torch.Tensor]) -> None:
        """Gives the model its gradients and buffers."""
        for share, (_, parameter), gradient in zip(self._has_gradient.tolist(), self._named, gradients):
            parameter.grad = gradient if share != 0 else None
        with torch.no_grad():
            for number, place in self._places.items():
                if self._changed[number]:
                    self._buffers[number].copy_(place)


def _buffers_of(model: torch.nn.Module) -> list[tuple[str, Any, tuple[dict[str, Any], str]]]:
    """The buffers that a state_dict has, each once: its name, itself, and the dict of its module with its key."""
    found = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in found or key in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if buffer.dtype not in DATA_TYPES:
                raise PleachUnsupported(f"buffer {name} is of {buffer.dtype}, which has no mean; take another type")
            is_spread = any(stride == 0 and length > 1 for stride, length in zip(buffer.stride(), buffer.shape))
            if is_spread or buffer.is_inference():
                raise PleachUnsupported(f"buffer {name} cannot be written to; register a clone of it")
            found[id(buffer)] = (name, buffer, (module._buffers, key))
    return list(found.values())


def _write(place: torch.Tensor, text: str) -> None:
    """Writes plain values to their place."""
    data = len(text).to_bytes(LENGTH_BYTES, "little") + text.encode()
    place[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    place[len(data) :].zero_()


def _identities(optimizer: torch.optim.Optimizer) -> list[int]:
    """Which parameters the optimizer has."""
    return [identity for group in optimizer.param_groups for identity in map(id, group["params"])]


def _as_numbers(flat: torch.Tensor) -> torch.Tensor:
    """Truth values and complex numbers as numbers."""
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


class _Attempt(pleach.Attempt):
    """An attempt whose end averages gradients and buffers."""

    def __init__(self, training: ElasticTraining) -> None:
        super().__init__(training._session)
        self._training = training
        #: What has failed before the body of the block.
        self._error: Exception | None = None

    def __enter__(self) -> Any:
        self._training._before_step()
        self._group = super().__enter__()
        assert self.step is not None
        try:
            self._training._begin(self.step, self._group)
        except Exception as error:
            self._error = error
        return self._group

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._error is not None and (error is None or isinstance(error, Exception)):
            error = self._error
        if error is None:
            try:
                self._training._average(self._group)
            except Exception as failed:
                error = failed
        is_handled = super().__exit__(None if error is None else type(error), error, traceback)
        if is_handled:
            self._training._end(bool(self.verdict))
        return is_handled
