"""Sessions of real processes, of which some are killed, interrupted, told to leave, or come later."""

import gc
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import pleach

#: Makes steps and says what became of each. Each member adds 1, so the state counts the steps.
PROGRAM = """
    import os, signal, sys
    import numpy as np, pleach
    # All ranks are there from the first step on, however slow the machine is.
    with pleach.Session(1, 8, fabric="FABRIC", program="test", suspect_after=1.0, begin_wait=60) as session:
        state = session.state("steps", (10, 100), "float64")
        sums = session.buffer((4, 1000), "int64")
        steps = 0
        for attempt in session.steps(STEPS):
            with attempt as group:
                sums[:] = 1 << session.seat
                assert group.all_reduce(sums) is sums
                # All members have begun the step.
                if (session.seat, attempt.step) == KILLED:
                    print("killed", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                mean = group.all_reduce(np.ones(3), "avg")
                members = group.world_size
            if attempt.verdict:
                assert attempt.verdict.change is None
                assert (sums == sums[0, 0]).all() and bin(sums[0, 0]).count("1") == members
                state.array[:] += mean[0]
                session.audit()
            else:
                change = attempt.verdict.change
                print(dict(left=change.left, came=change.came, members=change.members), flush=True)
                assert "go on with step" in str(change) and change.step == attempt.step == session.step
            if attempt.step == 3 and attempt.verdict:
                print("at 3", flush=True)
        assert (state.array == STEPS).all(), state.array
    assert (state.array == STEPS).all(), "its memory stays"
    print("done", members, flush=True)
"""


def of(steps, killed=(None, None), fabric="shm"):
    program = PROGRAM.replace("STEPS", str(steps)).replace("KILLED", repr(killed))
    return program.replace("FABRIC", fabric)


#: All ranks but the last one begin; the last one comes later and reads the state behind its first step.
LATE = """
    import os, pathlib, sys, time
    import numpy as np, pleach
    rank, late = int(os.environ["PLEACH_RANK"]), pathlib.Path("FOLDER/late")
    while rank == 2 and not late.exists():
        time.sleep(0.01)
    session = pleach.Session(2, 4, fabric="FABRIC", program="late", begin_wait=0.02, heal="hidden")
    assert session.seat == rank and session.seats == 4
    state, flags = session.state("sum", 30000, "float64"), session.buffer(2, "int64")
    own_part = session.split(lambda seat: seat % 2 if seat else None)
    own, neutral, parts = 0, 0, 0
    while True:
        with next(session.steps(1 << 60)) as group:
            flags[:] = [1 << rank, rank == 2 and own >= 5]
            neutral += not group.contributes
            group.all_reduce(flags)
            part = own_part.group
            if part is not None:
                assert part is own_part.group and part.world_size == 1
                parts += 1
            if rank == 0 and own == 2:
                group.send(np.ones(3), 1)  # Nobody receives it.
        state.update(lambda array: np.add(array, flags[0], out=array))
        own += 1
        if rank == 0 and own == 3:
            late.touch()
        if flags[1]:
            break
    session.audit()
    assert (state.array == state.array[0]).all()
    assert (parts == 0) if rank == 0 else (parts >= 5), parts
    change = session.change
    if rank == 2:
        assert change is None
    else:
        assert change.came == [2] and change.left == {} and change.members == [0, 1, 2], change
        assert change.unreceived == {1 - rank: (1 - rank, rank)}, change
    session.leave()
    print("done", neutral, flush=True)
"""


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_a_rank_that_comes_late_joins_and_reads_behind_its_first_step(ranks, tmp_path, fabric):
    program = LATE.replace("FABRIC", fabric).replace("FOLDER", str(tmp_path))
    job = ranks(3, program)
    results = [job.finish(rank, timeout=60) for rank in range(3)]
    outs = [out for _, out, _ in results]
    assert outs == ["done 0\n", "done 0\n", "done 1\n"], results


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
def test_the_others_go_on_when_a_member_is_killed(ranks, fabric):
    job = ranks(3, of(20, (2, 6), fabric))
    results = [job.finish(rank, timeout=60) for rank in range(3)]
    assert results[2][0] == -signal.SIGKILL and "killed" in results[2][1], results
    for status, out, error in results[:2]:
        assert status == 0, results
        lines = out.splitlines()
        assert lines[-1] == "done 2", lines
        retries = [eval(line) for line in lines if line.startswith("{")]
        assert retries == [dict(left={2: "died"}, came=[], members=[0, 1])], lines


def test_who_comes_later_has_the_state_and_costs_no_retry(ranks, tmp_path):
    # The job goes on until the one that comes later has made steps too.
    program = """
        import os, sys
        import numpy as np, pleach
        is_late = len(sys.argv) > 1
        session = pleach.Session(1, 4, program="late", begin_wait=60)
        state, own, retries = session.state("sum", 100000, "float32"), 0, 0
        enough = session.buffer(1, "int32")
        while True:
            def attempt(group, step):
                enough[:] = own >= 5 and is_late
                group.all_reduce(enough, "max")
                return group.world_size
            verdict = session.attempt(attempt)
            if not verdict:
                retries += 1
                continue
            if own == 0 and is_late:
                assert (state.array == verdict.step).all() and verdict.step > 0, state.array
            state.array[:] += 1
            own += 1
            session.audit()
            if own == 5 and not is_late:
                print("at 5", flush=True)
            if enough[0]:
                break
        session.leave()
        print("done", retries, float(state.array[-1]) == verdict.step + 1, flush=True)
    """
    job = ranks(2, program)
    for rank in range(2):
        assert job.line(rank) == "at 5"
    variables = dict(
        os.environ, PLEACH_RANK="2", PLEACH_WORLD_SIZE="3", PLEACH_RENDEZVOUS=f"file://{tmp_path / 'job0'}"
    )
    command = [sys.executable, "-u", "-c", textwrap.dedent(program), "late"]
    late = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert late.stdout == "done 0 True\n", (late, [process.poll() for process in job.processes])
    for rank in range(2):
        assert job.finish(rank)[:2] == (0, "done 0 True\n")


def test_a_step_that_raises_is_repeated_by_all_and_its_exception_is_the_cause(ranks):
    program = """
        import numpy as np, pleach
        with pleach.Session(2, 2, program="test") as session:
            raised, retries = 0, 0
            def attempt(group, step):
                global raised
                group.barrier()  # all have begun the step
                if session.seat == 1 and (step == 1 and raised < 2 or step == 3):
                    raised += 1
                    raise ZeroDivisionError(f"at {step}")
                group.all_reduce(np.ones(10))
            try:
                while session.step < 9:
                    if not (verdict := session.attempt(attempt)):
                        assert verdict.change.left == {} and verdict.change.members == [0, 1]
                        assert verdict.change.failed == [1] and "failed on seat 1" in str(verdict.change)
                        retries += 1
            except pleach.StepError as error:
                assert isinstance(error, pleach.SessionError) and error.kind == "step"
                print(session.step, retries, repr(error.__cause__), error)
            session.leave()
    """
    job = ranks(2, program)
    results = [job.finish(rank, timeout=60) for rank in range(2)]
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[0][1].startswith("3 5 None step 3 failed 4 times in a row, at last on seat 1"), results
    assert results[1][1].startswith("3 5 ZeroDivisionError('at 3') step 3 failed 4 times in a row, at last"), results


#: Rank 2 is killed, rank 1 leaves, and rank 0 makes the last steps alone. The optimizer has momentum, which
#: is a state.
TRAINED = """
    import os, signal
    import numpy as np, pleach
    session = pleach.Session(1, 4, fabric="FABRIC", program="trained", suspect_after=1.0, begin_wait=60)
    with session:
        velocity = session.state("velocity", 8, "float32")
        trainer = session.trainer("SCHEME", [5, 3], steps=40, checked=True)
        x, gradient = trainer.parameters, trainer.gradient
        x[:] = 9
        updates, changes = 0, []
        def sgd():
            global updates
            updates += 1
            velocity.update(lambda v: np.add(0.5 * v, gradient, out=v))
            np.subtract(x, 0.3 * velocity.array, out=x)
        while trainer.step():
            rank, ranks = trainer.members
            if session.change is not None and session.change.left not in changes:
                changes.append(session.change.left)
            if (session.seat, trainer.number) == (2, 11):
                os.kill(os.getpid(), signal.SIGKILL)
            if (session.seat, trainer.number) == (1, 25):
                break
            gradient[:] = x - 1
            trainer.update(sgd)
        if session.seat == 0:
            report = trainer.finish()
            assert report["guarantee_held"] and report["parameters_equal"], report
            assert (rank, ranks) == (0, 1) and updates == 40, (rank, ranks, updates)
            assert abs(x - 1).max() < 1e-3, x
            print(changes, flush=True)
            assert session.change.left == changes[-1], "it is known after the end"
        for make in (lambda: session.step, lambda: session.trainer("sync", [4])):
            try:
                make()
                raise AssertionError("the session is the trainer's")
            except pleach.ClosedError as error:
                assert "a trainer has it" in str(error), error
    assert len(x) == 8 and x[0] == x[7] and gradient[0] == gradient[7], "memory stays"
    print("done", flush=True)
"""


@pytest.mark.parametrize("fabric, scheme", [("shm", "sync"), ("tcp", "local-sgd:every=3")])
def test_a_training_goes_on_when_a_member_is_killed_and_another_one_leaves(ranks, fabric, scheme):
    job = ranks(3, TRAINED.replace("FABRIC", fabric).replace("SCHEME", scheme))
    results = [job.finish(rank, timeout=60) for rank in range(3)]
    assert [status for status, _, _ in results] == [0, 0, -signal.SIGKILL], results
    assert results[0][1].splitlines() == [str([{2: "died"}, {1: "left"}]), "done"], results
    assert results[1][1] == "done\n", results


def test_a_forked_child_has_no_trainer_of_a_session(ranks):
    program = """
        import os, pleach
        with pleach.Session(1, 1, program="forked") as session:
            trainer = session.trainer("sync", [4], steps=3)
            made = 0
            while trainer.step():
                if made == 1 and os.fork() == 0:
                    refused = 0
                    for call in (trainer.step, lambda: trainer.update(None), trainer.leave, session.leave, trainer.abort):
                        try:
                            call()
                        except pleach.ForkedError:
                            refused += 1
                    assert len(trainer.parameters) == 4
                    del trainer
                    os._exit(refused)
                trainer.update(lambda: None)
                made += 1
            _, status = os.wait()
            assert os.waitstatus_to_exitcode(status) == 5, status
            trainer.finish()
        print("done", made, flush=True)
    """
    assert ranks(1, program).finish(0, timeout=60)[:2] == (0, "done 3\n")


def test_an_optimizer_that_raises_ends_the_training_for_its_process_alone(ranks):
    program = """
        import pleach
        with pleach.Session(1, 2, program="raises", begin_wait=60) as session:
            trainer = session.trainer("sync", [4], steps=9)
            try:
                while trainer.step():
                    wrong = session.seat == 1 and trainer.number == 4
                    trainer.update(lambda: 1 / 0 if wrong else None)
                trainer.finish()
            except ZeroDivisionError as error:
                print(error, flush=True)
            else:
                print("done", session.change.left, flush=True)
    """
    job = ranks(2, program)
    first, second = [job.finish(rank, timeout=60)[:2] for rank in range(2)]
    assert second == (0, "division by zero\n")
    assert first[0] == 0 and first[1].startswith("done {1:"), first


def test_a_trainer_refuses_what_a_session_has_not(ranks):
    program = """
        import pleach
        with pleach.Session(1, 2, program="refused", begin_wait=60) as session:
            # The session stays the program's.
            for scheme, layers in [("gossip", [4]), ("sync", []), ("none", [4])]:
                try:
                    session.trainer(scheme, layers)
                    raise AssertionError("nobody trains so")
                except pleach.ArgumentError as error:
                    print(error, flush=True)
            trainer = session.trainer("sync", [4], steps=2)
            for make in (trainer.state, trainer.averaged, lambda: trainer.restore(b"")):
                try:
                    make()
                    raise AssertionError("a session has none")
                except pleach.ArgumentError as error:
                    print(error, flush=True)
            while trainer.step():
                trainer.update(lambda: None)
            trainer.finish()
    """
    job = ranks(2, program)
    for rank in range(2):
        status, out, error = job.finish(rank, timeout=60)
        assert status == 0 and "gossip" in out and "session" in out, (out, error)


@pytest.mark.parametrize("where", ["call", "commit", "next"])
def test_ctrl_c_ends_a_call_that_waits_and_the_others_go_on(ranks, tmp_path, where):
    program = """
        import pathlib, time
        import numpy as np, pleach
        where, go_on = "WHERE", pathlib.Path("FOLDER/go-on")
        try:
            with pleach.Session(2 if where == "next" else 1, 2, program="test", begin_wait=60) as session:
                seat = session.seat
                assert session.attempt(lambda group, step: group.barrier())
                if seat == 0 and where == "next":
                    session.leave()
                    raise SystemExit
                if seat == 1:
                    print("waits", flush=True)
                for attempt in session.steps(5):
                    with attempt as group:
                        if seat == 1 and where == "call":
                            group.all_reduce(np.ones(4))
                        while seat == 0 and not go_on.exists():
                            time.sleep(0.01)
                        if seat == 0:
                            total = group.all_reduce(np.ones(4))[0]
                print("alone", total)
        except KeyboardInterrupt:
            try:
                session.step
            except pleach.ClosedError:
                print("interrupted", flush=True)
    """
    job = ranks(2, program.replace("WHERE", where).replace("FOLDER", str(tmp_path)))
    assert job.line(1) == "waits"
    job.processes[1].send_signal(signal.SIGINT)
    assert job.line(1) == "interrupted"
    (tmp_path / "go-on").touch()
    assert job.finish(1)[:2] == (0, "")
    assert job.finish(0)[:2] == (0, "" if where == "next" else "alone 1.0\n")


def test_who_is_told_to_leave_leaves_at_the_end_of_a_step(ranks):
    program = """
        import os, signal
        import numpy as np, pleach
        retries, seat = 0, None
        try:
            with pleach.Session(1, 3, program="test", begin_wait=60) as session:
                seat = session.seat
                session.leave_on(signal.SIGTERM)
                for attempt in session.steps(30):
                    with attempt as group:
                        group.all_reduce(np.ones(4))
                    retries += not attempt.verdict
                    if seat == 1 and attempt.step == 5:
                        os.kill(os.getpid(), signal.SIGTERM)
        except pleach.LeftError:
            assert seat == 1
            print("left")
        else:
            assert seat != 1
            print("done", retries, group.world_size)
    """
    job = ranks(3, program)
    results = [job.finish(rank, timeout=60) for rank in range(3)]
    assert [(status, out) for status, out, _ in results] == [
        (0, "done 0 2\n"),
        (0, "left\n"),
        (0, "done 0 2\n"),
    ], results


def test_a_state_that_differs_is_named(ranks):
    program = """
        import numpy as np, pleach
        session = pleach.Session(3, 3, program="test")
        state = session.state("x", 4, "int16")
        assert session.attempt(lambda group, step: group.barrier())
        state.array[:] = 7 + (session.seat == 1)
        try:
            session.audit()
        except pleach.DivergedError as error:
            print(error.seats, "not the same on all members" in str(error))
        session.leave()
    """
    job = ranks(3, program)
    results = [job.finish(rank, timeout=60) for rank in range(3)]
    assert all((status, out) == (0, "[1] True\n") for status, out, _ in results), results


def test_memory_stays_as_long_as_arrays_over_it():
    session = pleach.Session(1, 1)
    state, buffer = session.state("x", (3, 4), "complex64"), session.buffer(1 << 18, "float32")
    x = state.array
    assert x.shape == (3, 4) and x.dtype == np.complex64 and not x.any()
    buffer[:] = 5
    with next(session.steps(1)) as group:
        group.all_reduce(buffer[100:])
        assert group.all_reduce(x) is x
    session.leave()
    with pytest.raises(pleach.ClosedError):
        group.barrier()
    with pytest.raises(pleach.ClosedError, match="session is over"):
        session.step
    session.leave()
    del session, state, group
    gc.collect()
    x += 1
    buffer += 1
    assert (x == 1).all() and (buffer == 6).all()


def test_mistakes_are_named():
    for arguments, text in [
        (dict(fewest=0), "0 to 64 members"),
        (dict(fewest=3, most=2), "3 to 2 members"),
        (dict(fewest=2), "joined by 1"),
        (dict(fabric="pigeon"), "pigeon"),
        (dict(suspect_after=-1), "suspect_after is -1"),
    ]:
        with pytest.raises(pleach.ArgumentError, match=text):
            pleach.Session(**arguments)
    with pleach.Session() as session:
        state = session.state("x", 3, "int32")
        for call, text in [
            (lambda: session.state("x", 3, "int32"), "a state 'x' already"),
            (lambda: session.leave_on(signal.SIGKILL), "signal 9"),
            (lambda: session._native.commit(True), "no step has begun"),
            (lambda: [attempt for attempt in session.steps(2)], "with attempt as group"),
        ]:
            with pytest.raises(pleach.ArgumentError, match=text):
                call()
        step, group = session._native.next()
        for call in (session._native.next, session.audit):
            with pytest.raises(pleach.ArgumentError, match="a step has begun"):
                call()
        assert session._native.commit(True) is None and session.step == 1
        assert str(state.array.dtype) == "int32"
    with pytest.raises(pleach.ClosedError, match="session is over"):
        session.epoch


def test_a_forked_child_has_no_session():
    with pleach.Session() as session:
        state = session.state("x", 3)
        child = os.fork()
        if child == 0:
            try:
                session.step
            except pleach.ForkedError:
                del session, state
                gc.collect()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.attempt(lambda group, step: group.barrier())
