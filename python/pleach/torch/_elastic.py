"""Training of a model of torch in a session: members come and go, and the loop goes on.

All that members have in common lies in one state of the session, which a process that joins reads: the
parameters, the optimizer's tensors, the buffers as they were after the last step that was committed, and
plain values such as learning rates.

**Invariant:** between two steps that state is the same on all members, bit for bit. So what an attempt
changes, which may be repeated, is kept elsewhere until the step is committed: gradients and the means of
buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

import pleach
from pleach import _native

from ._attachable import attach_all, detach_all, parameters_of
from ._buffers import over
from ._errors import PleachSchemeError, PleachUnsupported
from ._optimizer_state import OptimizerState
from ._places import Places
from ._plain import from_text, to_text
from ._tensors import DATA_TYPES
from ._vector import ParameterVector

#: Bytes for plain values, and how many more there are for each parameter.
PLAIN_MAX, PLAIN_OF_PARAMETER_MAX = 1 << 16, 1 << 8
#: Bytes of the length of the plain values.
LENGTH = 8


class _Part(NamedTuple):
    """The first bytes of a memory, which it keeps."""

    memory: Any
    nbytes: int

    @property
    def address(self) -> int:
        return int(self.memory.address)


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

    The end of the inner block averages the gradients of all members, and the buffers of floating-point
    numbers, such as running means; of other buffers each element is the greatest of all members'. Then the
    verdict of the step is the same on all members. A step whose verdict is false is repeated, and begins with
    the buffers as they were before it.

    model: on the CPU, its trained parameters of float32. optimizer: any of torch whose step evaluates no loss. The
    members that begin the job begin with the parameters, buffers and optimizer state of rank 0. A process that
    joins reads them from the others. others: objects with ``state_dict`` and ``load_state_dict``, such as
    schedulers, whose states are numbers, strings, lists, tuples and dicts; it reads these too. The program calls
    ``scheduler.step()`` after ``optimizer.step()``.

    In the block parameters and the optimizer's tensors are views of the session's memory; they have memory of
    their own after it.

    Raises PleachSchemeError for a model or an optimizer that cannot be trained so, and PleachUnsupported for a
    model on a GPU, or of another type than float32.
    """

    def __init__(
        self, session: pleach.Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *others: Any
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
        self._others = others
        self._named = parameters_of(model, optimizer)
        trained = {id(parameter) for _, parameter in self._named}
        frozen = [(name, one) for name, one in model.named_parameters() if id(one) not in trained]
        buffers = list(model.named_buffers())
        #: Of each buffer the dict of its module, and its key there.
        self._owners = _owners_of(model)
        for name, buffer in buffers:
            if buffer.dtype not in DATA_TYPES:
                raise PleachUnsupported(f"buffer {name} is of {buffer.dtype}, which has no mean; take another type")
        self._buffers = [buffer for _, buffer in buffers]
        self._trained_nbytes = sum(parameter.nbytes for _, parameter in self._named)
        places = Places()
        places.end = self._trained_nbytes
        self._frozen = [(one, places.give(one, f"parameter {name}")) for name, one in frozen]
        self._buffer_places = [places.give(one, f"buffer {name}") for name, one in buffers]
        self._optimizer_state = OptimizerState(optimizer, self._named, places)
        plain = PLAIN_MAX + PLAIN_OF_PARAMETER_MAX * len(self._named)
        self._plain_place = places.give(torch.empty(plain, dtype=torch.uint8), "plain values")
        self._nbytes = places.end
        self._described()
        self._hash = self._hash_of([*self._named, *frozen, *buffers])
        # From the begin of the block to its end.
        self._is_open = False
        self._state: _native.SessionState
        self._gradient: _native.Registered
        self._vector: ParameterVector
        #: The state's memory as bytes.
        self._memory: torch.Tensor
        #: The plain values that lie there.
        self._text = ""
        #: Buffers as the members have averaged them, by type; they lie in the state once the step is committed.
        self._averaged: list[tuple[torch.Tensor, list[int]]] = []
        self._has_begun = False
        #: This process has what the members have in common.
        self._is_here = False
        self._is_repeated = False
        #: The last step was committed.
        self._may_step = False
        self._has_new_buffers = False

    def _hash_of(self, tensors: list[tuple[str, Any]]) -> str:
        """A hash of what is the same on all members."""
        shapes = [(name, tuple(one.shape), one.stride(), str(one.dtype)) for name, one in tensors]
        kinds = [type(one).__name__ for one in (self._optimizer, *self._others)]
        digest = hashlib.sha256(repr((shapes, self._optimizer_state.places, kinds)).encode())
        return digest.hexdigest()[:16]

    # ---- The block

    def __enter__(self) -> ElasticTraining:
        if self._has_begun or self._is_open:
            raise PleachSchemeError("this training was entered before; make a new one")
        attach_all(self._named, "an ElasticTraining")
        try:
            self._open()
        except BaseException:
            detach_all(self._named)
            raise
        return self

    def _open(self) -> None:
        native = self._session._native
        self._state = native.state(f"torch {self._hash}", self._nbytes, "uint8")
        floats = [number for number, one in enumerate(self._buffers) if one.dtype == torch.float32]
        tail = sum(self._buffers[number].nbytes for number in floats)
        self._gradient = native.register(self._trained_nbytes + tail)
        flat = over(self._gradient, torch.float32)
        #: The gradients, and behind them the buffers of the same type, which one call averages.
        self._flat = flat[: (self._trained_nbytes + tail) // 4]
        self._averaged = [(self._flat[self._trained_nbytes // 4 :], floats)] if floats else []
        for dtype in dict.fromkeys(one.dtype for one in self._buffers if one.dtype != torch.float32):
            numbers = [number for number, one in enumerate(self._buffers) if one.dtype == dtype]
            count = sum(self._buffers[number].numel() for number in numbers)
            self._averaged.append((torch.empty(count, dtype=dtype), numbers))
        self._lie_in(self._state.memory())
        self._vector.move_in()
        with torch.no_grad():
            for (parameter, place), view in zip(self._frozen, self._frozen_views()):
                view.copy_(parameter)
                parameter.data = view
            for buffer, view in zip(self._buffers, self._buffer_views()):
                view.copy_(buffer)
        self._store()
        self._hook = self._optimizer.register_step_pre_hook(self._before_own_step)
        self._is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._hook.remove()
        self._vector.move_out()
        self._optimizer_state.move_out()
        for parameter, _ in self._frozen:
            parameter.data = parameter.data.clone()
        detach_all(self._named)

    def steps(self, end: int) -> Iterator[pleach.Attempt]:
        """Attempts until ``end`` steps are committed; the body of the loop makes each: see the class."""
        if not self._is_open:
            raise PleachSchemeError("the training works in its block alone: with ... as training")
        return self._session._attempts(end, lambda: _Attempt(self))

    # ---- Memory

    def _lie_in(self, memory: Any) -> None:
        """Has all that members have in common in this memory from now on."""
        self._memory = over(memory, torch.uint8)
        self._vector = ParameterVector(self._named, _Part(memory, self._trained_nbytes), self._gradient)
        self._optimizer_state.lie_in(self._memory)

    def _frozen_views(self) -> list[torch.Tensor]:
        return [place.of(self._memory) for _, place in self._frozen]

    def _buffer_views(self) -> list[torch.Tensor]:
        return [place.of(self._memory) for place in self._buffer_places]

    def _described(self) -> str:
        """The plain values that members have in common."""
        others = [other.state_dict() for other in self._others]
        text = to_text([self._optimizer_state.described(), others], "what members have in common")
        most = self._plain_place.nbytes - LENGTH
        if len(text) > most:
            raise PleachSchemeError(
                f"the states of the optimizer and of {len(others)} other objects have {len(text)} bytes besides tensors, "
                f"and members keep {most}; pass fewer objects"
            )
        return text

    def _store(self) -> None:
        """Puts the optimizer's new tensors and the plain values where others read them."""
        self._vector.check_addresses()
        self._vector.expect_parameters(self._optimizer)
        self._optimizer_state.move_in()
        text = self._described()
        if text != self._text:
            data = len(text).to_bytes(LENGTH, "little") + text.encode()
            place = self._plain_place.of(self._memory)
            place[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            place[len(data) :].zero_()
            self._text = text

    def _load(self) -> None:
        """Makes what lies in the memory that of the model, the optimizer and the others."""
        place = self._plain_place.of(self._memory)
        length = int.from_bytes(place[:LENGTH].numpy().tobytes(), "little")
        self._text = place[LENGTH : LENGTH + length].numpy().tobytes().decode()
        described, others = from_text(self._text)
        self._optimizer_state.restore(described)
        for other, state in zip(self._others, others):
            other.load_state_dict(state)
        self._restore_buffers()

    def _restore_buffers(self) -> None:
        """Makes the buffers those of the last step that was committed."""
        with torch.no_grad():
            for buffer, view in zip(self._buffers, self._buffer_views()):
                buffer.copy_(view)

    def _arrive(self, memory: Any) -> None:
        """Takes what this process has read from the members."""
        if memory.address != self._memory.data_ptr():
            self._lie_in(memory)
            for place in self._vector.places:
                place.parameter.data = place.view
            for (parameter, _), view in zip(self._frozen, self._frozen_views()):
                parameter.data = view
        self._put_new_buffers()
        self._load()
        self._is_here = True

    # ---- A step

    def _before_step(self) -> None:
        """Before a step begins."""
        if not self._is_open:
            raise PleachSchemeError("the training works in its block alone: with ... as training")
        if not self._has_begun or self._settle():
            self._store()
        self._may_step = False

    def _begin(self, step: int, group: Any) -> None:
        """When a step has begun in a group."""
        self._has_begun = True
        if not self._is_here:
            if not group.contributes:
                # It reads what the members have in common while they make this step.
                return
            # What it has averaged of a step that it could not read behind is in what it has read now.
            self._has_new_buffers = False
            self._arrive(self._state.memory())
        elif self._is_repeated:
            self._restore_buffers()
        if step == 0:
            group.broadcast(self._memory, 0)
            self._load()

    def _average(self, group: Any) -> None:
        """At the end of the block of an attempt."""
        for own, (buffers, key) in zip(self._buffers, self._owners):
            if buffers.get(key) is not own:
                raise PleachSchemeError(f"buffer {key} was replaced by another tensor; store values by copy_")
        self._vector.check_addresses()
        self._vector.take_gradients()
        with torch.no_grad():
            for flat, numbers in self._averaged:
                torch.cat([self._buffers[number].reshape(-1) for number in numbers], out=flat)
        group.all_reduce(self._flat, "avg")
        for flat, _ in self._averaged:
            if flat.dtype != torch.float32:
                is_mean = flat.is_floating_point() or flat.is_complex()
                group.all_reduce(_as_numbers(flat), "avg" if is_mean else "max")

    def _end(self, is_committed: bool) -> None:
        """When the verdict of a step is known."""
        self._may_step = is_committed
        self._is_repeated = not is_committed
        self._has_new_buffers = is_committed
        if is_committed:
            self._put_averaged(self._buffers)

    def _put_averaged(self, into: list[Any]) -> None:
        """Copies the averaged buffers to these tensors, one for each buffer."""
        with torch.no_grad():
            for flat, numbers in self._averaged:
                parts = flat.split([into[number].numel() for number in numbers])
                for number, part in zip(numbers, parts):
                    into[number].copy_(part.view(into[number].shape))

    def _put_new_buffers(self) -> None:
        """Puts the buffers of the last step that was committed where others read them."""
        if self._has_new_buffers:
            self._put_averaged(self._buffer_views())
            self._has_new_buffers = False

    def _settle(self) -> bool:
        """Waits until processes that have joined with the last step have read the state. Returns whether this
        process has it, with the buffers of the last step that was committed."""
        memory = self._state.memory()
        if memory is None:
            # It joined with the last step, and the members have changed before it had read all.
            self._is_here = False
            return False
        if self._is_here:
            self._put_new_buffers()
        else:
            self._arrive(memory)
        return True

    def _before_own_step(self, *_: Any) -> None:
        """Before the optimizer's own step."""
        if not self._may_step:
            raise PleachSchemeError(
                "optimizer.step() without a step that is committed; call it behind the block of the attempt: "
                "if attempt.verdict: optimizer.step()"
            )
        self._settle()

    def __repr__(self) -> str:
        return f"<ElasticTraining: {len(self._named)} parameters, {self._session!r}>"


def _owners_of(model: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Of each buffer, in the order of named_buffers, the dict of its module and its key there."""
    owners: dict[int, tuple[dict[str, Any], str]] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                owners.setdefault(id(buffer), (module._buffers, key))
    return list(owners.values())


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
        if error is None or isinstance(error, Exception) and self._error is not None:
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
