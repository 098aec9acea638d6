"""Sessions: jobs whose processes come and go."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pleach import _arrays, _native
from pleach._errors import ArgumentError, ChangedError, LeftError, SessionError, StepError

__all__ = ["Attempt", "Change", "Session", "Split", "State", "Verdict"]


@dataclass(frozen=True)
class Change:
    """From the epoch of an attempt to the one that goes on: who left, and who came.

    Processes are named by their seats, which are stable numbers.
    """

    #: The number of the epoch that has ended.
    ended: int
    #: The number of the epoch that begins.
    epoch: int
    #: The step with which it begins.
    step: int
    #: Who left, and why: died, unreachable, left or replaced.
    left: dict[int, str]
    #: Who came.
    came: list[int]
    #: The members of the epoch that begins, by rank.
    members: list[int]
    #: Members whose step failed, where nobody was lost. Of several the one that was told first is named.
    failed: list[int]
    #: Messages that this process has sent to a seat, and the seat to this process, that were not received
    #: when the epoch ended. Nobody receives them: no message crosses an epoch.
    unreceived: dict[int, tuple[int, int]]
    #: All of this in words.
    text: str

    def __str__(self) -> str:
        return self.text


def change(
    ended: int,
    epoch: int,
    step: int,
    left: list[tuple[int, str]],
    came: list[int],
    members: list[int],
    failed: list[int],
    unreceived: list[tuple[int, tuple[int, int]]],
    text: str,
) -> Change:
    """A change; called by the native module."""
    return Change(ended, epoch, step, dict(left), came, members, failed, dict(unreceived), text)


@dataclass(frozen=True)
class Verdict:
    """What became of an attempt: the same on all members. It is true if the step is committed."""

    #: The step.
    step: int
    #: Why the step is repeated; None if it is committed.
    change: Change | None

    def __bool__(self) -> bool:
        return self.change is None


class State:
    """Elements that are equal on all members; ``Session.state`` makes it."""

    def __init__(self, native: _native.SessionState, name: str, shape: list[int], dtype: Any) -> None:
        self._native = native
        self._shape = shape
        self._dtype = dtype
        #: Its name.
        self.name = name

    @property
    def array(self) -> Any:
        """A NumPy array over the elements, which keeps their memory.

        Take it anew after the first step has begun: who joins a running job has read the elements to
        another place. Change it after a step that is committed, as all members do, and before the next
        one begins. With heal="hidden" it waits for processes that read the states, as ``update``, and raises
        SessionError where ``update`` changes nothing.
        """
        memory = self._native.memory()
        if memory is None:
            raise SessionError(
                f"the state {self.name!r} is not here yet: the members changed before this process had read it, "
                "and it reads it before its next step; change states by State.update"
            )
        return _arrays.over(memory, self._shape, self._dtype)

    def update(self, change: Callable[[Any], object]) -> None:
        """Calls ``change(array)``, after a step that is committed, as all members do.

        With heal="hidden" it waits for processes that have joined with that step and read the states. In one
        that could not read them to the end, because the members have changed, it changes nothing: the process
        reads what the others have changed.
        """
        memory = self._native.memory()
        if memory is not None:
            change(_arrays.over(memory, self._shape, self._dtype))

    def __repr__(self) -> str:
        return f"<pleach.State: {self.name}, {self._shape}>"


class Split:
    """A part of the members in each epoch; ``Session.split`` makes it."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self._number = number

    @property
    def group(self) -> _native.Group | None:
        """The group of this process's part while a step is attempted. None if the process has no colour,
        or another one reads the states during this step (heal="hidden").
        """
        return self._session._native.split_group(self._number)


class Attempt:
    """One attempt of a step: ``with attempt as group`` makes it. Then ``verdict`` says what became of it.

    An exception of the block means that the step cannot be done here. It is repeated, at most
    ``retries_max`` times in a row. Then the end of the block raises StepError on all members, here with
    the exception as its cause. KeyboardInterrupt, SystemExit and other exceptions that are no Exception
    pass, and no verdict is asked for. The end of the block makes two calls of the group, so meanwhile no
    other thread makes calls of it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: The number of the step, from the begin of the block on.
        self.step: int | None = None
        #: The verdict of all members, from the end of the block on.
        self.verdict: Verdict | None = None

    def __enter__(self) -> _native.Group:
        self._session._has_begun = True
        self.step, group = self._session._native.next()
        return group

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        assert self.step is not None
        try:
            self.verdict = Verdict(self.step, self._session._native.commit(error is None))
        except StepError as failed:
            raise failed from (None if isinstance(error, ChangedError) else error)
        return True


class Session:
    """This process's membership in a job that makes steps, while processes come and go.

        with pleach.Session(2, 8) as session:
            weights = session.state("weights", 1000, "float32")
            gradient = session.buffer(1000, "float32")
            for attempt in session.steps(100):
                with attempt as group:                       # an ordinary group of this epoch's members
                    gradient[:] = slope(weights.array, attempt.step, group.rank, group.world_size)
                    group.all_reduce(gradient, "avg")
                if attempt.verdict:                          # committed, on all members
                    weights.array[:] -= 0.1 * gradient

    Where no job runs at the rendezvous address, the processes of the world meet and begin it: all of
    them, or ``fewest`` that have waited ``begin_wait`` seconds for the others. Where a job runs, its
    members take this process in at the end of a step.

    fewest, most: steps are made by ``fewest`` members or more; there are at most ``most``. The same on all
    members, as are: suspect_after, seconds of silence after which a member is suspected, 2 by default;
    fewest_wait, seconds that too few members for a step wait for others, 60 by default; quorum_wait,
    seconds that too few members to agree wait for others, 20 by default; retries_max, how often a step
    that cannot be done is repeated, 3 by default; begin_wait, 10 by default; unit, the number of seats
    whose members come and go together, such as those of a replica of a model, 1 by default, of which
    ``fewest`` and ``most`` are multiples; program, a name of the program, that of the script by default;
    heal_wait, seconds that members wait for a process that reads the states, 60 by default, and
    suspect it then; heal, when a process that joins reads the states: "boundary", before its first step,
    for which the members wait, by default, or "hidden", during its first step, in which it contributes
    nothing, for steps that only reduce. The other arguments are those of ``pleach.join``.

    One thread uses it. ``with`` leaves the job at the end of the block; after an exception other than
    LeftError the process is out of it at once. Ctrl-C during a call that waits raises KeyboardInterrupt,
    and the others go on without this process.

    Raises JoinError if the processes do not meet, this one is refused, or the arguments or the environment
    say nothing clear.
    """

    def __init__(
        self,
        fewest: int = 1,
        most: int = 64,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        rendezvous: str | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        join_timeout: float | None = None,
        fabric: str | None = None,
        reproducible: str | None = None,
        suspect_after: float | None = None,
        fewest_wait: float | None = None,
        quorum_wait: float | None = None,
        heal_wait: float | None = None,
        begin_wait: float | None = None,
        retries_max: int | None = None,
        heal: str | None = None,
        unit: int | None = None,
        program: str | None = None,
    ) -> None:
        if program is None:
            program = os.path.basename(sys.argv[0]) if sys.argv else ""
        self._native = _native.Session(
            fewest,
            most,
            program=program,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            secret_file=secret_file,
            timeout=timeout,
            join_timeout=join_timeout,
            fabric=fabric,
            reproducible=reproducible,
            suspect_after=suspect_after,
            fewest_wait=fewest_wait,
            quorum_wait=quorum_wait,
            heal_wait=heal_wait,
            begin_wait=begin_wait,
            retries_max=retries_max,
            heal=heal,
            unit=unit,
        )
        self._trainer: _native.Trainer | None = None
        self._unit = 1 if unit is None else unit
        #: A step has begun; a model of torch is trained.
        self._has_begun = self._trains = False

    @property
    def step(self) -> int:
        """The next step. Every step before it is committed."""
        return self._native.step

    @property
    def seat(self) -> int:
        """The stable number of this process."""
        return self._native.seat

    @property
    def seats(self) -> int:
        """The number of seats: ``most``. Seats are numbers below it."""
        return self._native.seats

    @property
    def epoch(self) -> int:
        """The number of the newest epoch that this process knows."""
        return self._native.epoch

    @property
    def change(self) -> Change | None:
        """The newest change of the members, also by a planned join or leave, which costs no retry. None if
        there was none since this process has come.
        """
        newest: Change | None = (self._trainer or self._native).change
        return newest

    def split(self, color: Callable[[int], int | None]) -> Split:
        """Divides the members of each epoch, from the next step on: those for whose seats ``color(seat)``
        gives the same number are a group, in the order of their seats; None is for none.

        All members make the same splits between the same two steps, and a process that joins makes those
        that the others have made, before its first step. ``color`` is called once for each seat, here.
        """
        return Split(self, self._native.split([color(seat) for seat in range(self._native.seats)]))

    def state(self, name: str, shape: int | Sequence[int], dtype: Any = None) -> State:
        """A state of the job: zeroed elements that are equal on all members.

        All members declare the same states before their first step. Who joins a running job reads them
        from the others when its first step begins.
        """
        lengths, kind = _arrays.described(shape, dtype)
        return State(self._native.state(name, math.prod(lengths), kind), name, lengths, dtype)

    def buffer(self, shape: int | Sequence[int], dtype: Any = None) -> Any:
        """A NumPy array of zeros over memory that is registered for all epochs: calls of their groups on
        it, and on its contiguous parts, copy nothing. The memory stays as long as the array or a view of
        it. Where a process that was stopped was left behind, later calls copy; take a new buffer then.
        """
        registered = self._native.register(_arrays.bytes_of(shape, dtype))
        return _arrays.over(registered, shape, dtype)

    def attempt(self, function: Callable[[_native.Group, int], object]) -> Verdict:
        """Attempts the next step: ``function(group, step)``, and the verdict of all members.

        An exception of the function means that the step cannot be done here: see ``Attempt``.
        """
        attempt = Attempt(self)
        with attempt as group:
            assert attempt.step is not None
            function(group, attempt.step)
        assert attempt.verdict is not None
        return attempt.verdict

    def steps(self, end: int) -> Iterator[Attempt]:
        """Attempts until ``end`` steps are committed; the body of the loop makes each: see ``Attempt``."""
        return self._attempts(end, lambda: Attempt(self))

    def _attempts(self, end: int, make: Callable[[], Attempt]) -> Iterator[Attempt]:
        while self.step < end:
            attempt = make()
            yield attempt
            if attempt.verdict is None:
                raise ArgumentError("the attempt was not made; begin the body of the loop by 'with attempt as group'")

    def trainer(
        self,
        scheme: str,
        layers: Sequence[int],
        *,
        steps: int | None = None,
        model: int = 0,
        checked: bool = False,
    ) -> _native.Trainer:
        """Trains in this session: see ``pleach.Trainer`` for the arguments, which are the same on all members.

        From then on the trainer makes the steps of the session. Of the session itself only ``change`` and
        ``leave`` are called. When members end, stop or are out of reach, the others go on. With ``sync`` the
        remaining members compute such a step again; ``trainer.members`` says who they are. With other schemes
        they make the exchange again. Each step and each exchange counts once. A process that joins begins with
        what all have in common. The program declares states of its own before, such as the optimizer's, and
        changes them with each step. Ctrl-C during an exchange is noticed when the exchange ends.

            with pleach.Session(2, 8) as session:
                trainer = session.trainer("sync", [1000, 10], steps=500)
                while trainer.step():
                    rank, ranks = trainer.members
                    trainer.gradient[:] = slope(trainer.parameters, trainer.number, rank, ranks)
                    trainer.update(lambda: np.subtract(trainer.parameters, 0.1 * trainer.gradient, out=trainer.parameters))
                report = trainer.finish()

        Raises ArgumentError for a scheme that there is not, or by which nobody trains in a session.
        """
        trainer = self._native.trainer(scheme, layers, steps=steps, model=model, checked=checked)
        self._trainer = trainer
        return trainer

    def audit(self) -> None:
        """Compares the states of all members that have committed the last step, between two steps.

        All members call it between the same ones. Raises DivergedError, which names who differs.
        """
        self._native.audit()

    def leave_on(self, signal: int) -> None:
        """Leaves the job when this signal comes, at the end of the step that is under way then, or of the
        next one, so that the others repeat no step for it. The loop goes on until LeftError is raised.
        """
        self._native.leave_on(signal)

    def leave_after_step(self) -> None:
        """As ``leave_on``, without a signal."""
        self._native.leave_after_step()

    def leave(self) -> None:
        """Leaves the job, between two steps. Does nothing when the session is over."""
        (self._trainer or self._native).leave()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, LeftError):
            self.leave()
        else:
            (self._trainer or self._native).close()

    def __repr__(self) -> str:
        return f"<pleach.Session: seat {self.seat}>"
