//! Sessions as people meet them on the command line: the time line of a fault, and a training whose
//! ranks are killed and stopped. Counts and orders are checked, times never.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::io::{BufRead as _, BufReader};
use std::process::{Output, Stdio};

use launcher::{expect_refused, field, finish, number, pleach, rank_process, signal, text};
use rustix::process::Signal;

fn run(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.args(arguments);
    finish(command)
}

#[test]
fn survivors_of_a_kill_go_on_stage_by_stage_and_register_and_connect_nothing() {
    for fabric in ["shm", "tcp"] {
        let output =
            run(&["bench", "recovery", "--fabric", fabric, "--samples", "2", "--state", "64K", "--json"]);
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let line = text(&output.stdout);
        assert_eq!((field(line, "fabric"), field(line, "fault")), (&*format!("\"{fabric}\""), "\"kill\""));
        assert_eq!((field(line, "ranks"), field(line, "samples")), ("4", "2"), "{line}");
        expect_stages_in_order(line);
        assert_eq!((field(line, "registered"), field(line, "connected")), ("0", "0"), "{line}");
        assert!(number(line, "stop_ms_p99") > 0.0, "{line}");
        assert_eq!(field(line, "state_gb_s"), "null", "nobody reads a state: {line}");
    }
}

#[test]
fn survivors_of_a_stop_go_on_when_they_suspect_it() {
    for fabric in ["shm", "tcp"] {
        let output = run(&[
            "bench",
            "recovery",
            "--fabric",
            fabric,
            "--fault",
            "stop",
            "--ranks",
            "3",
            "--samples",
            "1",
            "--suspect-after",
            "1s",
            "--json",
        ]);
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let line = text(&output.stdout);
        assert_eq!((field(line, "fault"), field(line, "ranks")), ("\"stop\"", "3"), "{line}");
        expect_stages_in_order(line);
        assert_eq!(field(line, "connected"), "0", "{line}");
    }
}

fn expect_stages_in_order(line: &str) {
    for share in ["p50", "p99", "max"] {
        let times = ["found", "agreed", "drained", "planned", "next"]
            .map(|stage| number(line, &format!("{stage}_ms_{share}")));
        assert!(times.is_sorted() && times[0] >= 0.0, "{share}: {line}");
    }
}

#[test]
fn a_person_sees_the_time_line() {
    let output = run(&["bench", "recovery", "--ranks", "2", "--samples", "1"]);
    let out = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for part in
        ["kill of 1 of 2 ranks", "found    agreed   drained   planned      next   stopped", "p99", "0 pairs"]
    {
        assert!(out.contains(part), "no '{part}' in\n{out}");
    }
}

#[test]
fn faults_that_cannot_be_are_refused() {
    let limits = "give MIN:MAX, as 2:6";
    for (arguments, part) in [
        (&["bench", "recovery", "--fault", "join"][..], "there is no join yet; there are kill stop"),
        (&["bench", "recovery", "--fault", "leave"], "there is no leave yet; there are kill stop"),
        (&["bench", "recovery", "--fault", "explode"], "there are kill stop"),
        (&["bench", "recovery", "--ranks", "1"], "give 2 or more"),
        (&["bench", "recovery", "--samples", "0"], "--samples"),
        (&["bench", "recovery", "--suspect-after", "1ms"], "give 10ms or more"),
        (&["bench", "recovery", "--fabric", "sim"], "not simulated"),
        (&["chaos", "--ranks", "3:3"], "give MIN:MAX, as 2:6"),
        (&["chaos", "--faults", "kill,cut"], "there is no cut yet; there are kill stop"),
        (&["chaos", "--every", "often"], "give a time, as 2s"),
        (&["train", "--elastic=8:2"], limits),
        (&["train", "--elastic=0:2"], limits),
        (&["train", "--elastic=some"], limits),
        (&["train", "--elastic=2:4", "--ranks", "5"], "give a number from 2 to 4"),
        (&["train", "--elastic=1:4", "--ranks", "1"], "give --ranks 2 or more"),
        (&["train", "--chaos"], "--elastic"),
        (&["train", "--elastic", "--chaos=explode"], "there are kill stop"),
        (&["train", "--elastic", "--chaos=kill,join"], "there is no join yet"),
        (&["train", "--elastic", "--pace", "soon"], "give a time"),
        (&["train", "--elastic", "--scheme", "sync", "--scheme", "bsp"], "give one --scheme"),
        (
            &["train", "--elastic", "--scheme", "easgd"],
            "easgd does not train in a session: each rank has a shard",
        ),
        (&["train", "--elastic", "--scheme", "hybrid"], "hybrid does not train in a session"),
        (&["train", "--elastic", "--simulate", "4", "--scheme", "sync"], "--simulate"),
        (&["train", "--elastic", "--scheme", "sync", "--checkpoint", "x"], "--checkpoint"),
    ] {
        expect_refused(&run(arguments), arguments, &[part]);
    }
    let mut command = pleach();
    command.args(["bench", "recovery"]).env("PLEACH_RANK", "0").env("PLEACH_WORLD_SIZE", "2");
    command.env("PLEACH_RENDEZVOUS", "tcp://127.0.0.1:1");
    expect_refused(&finish(command), &["recovery", "in a world"], &["without a launcher"]);
}

#[test]
fn each_step_counts_once_on_every_member_whatever_befalls_them() {
    for (fabric, fault) in [("shm", "kill"), ("tcp", "kill"), ("shm", "stop"), ("tcp", "stop")] {
        let arguments = ["chaos", "--ranks", "2:4", "--fabric", fabric, "--every", "500ms", "--for", "1ms"];
        // One job, to its first fault.
        let output = run(&[&arguments[..], &["--faults", fault, "--json"]].concat());
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let (last, faults) = lines.split_last().expect("results");
        assert_eq!(faults.len(), 1, "{lines:?}");
        assert_eq!(field(faults[0], "fault"), format!("\"{fault}\""), "{lines:?}");
        let times = ["found", "agreed", "drained", "planned", "next"];
        assert!(times.map(|stage| number(faults[0], &format!("{stage}_ms"))).is_sorted(), "{lines:?}");
        assert!(number(last, "steps") > 0.0 && number(last, "epochs") >= 2.0, "{last}");
        assert_eq!((field(last, "members_max"), field(last, "members_min")), ("4", "3"), "{last}");
        assert_eq!(field(last, "equal"), "true");
    }
}

/// The lines of a training, of which the last one says what it came to.
fn expect_trained(lines: &[&str], ranks: &str) {
    let last = lines.last().expect("results");
    assert!(number(last, "test_accuracy") >= 0.95, "{last}");
    assert_eq!(
        (field(last, "parameters_equal"), field(last, "matches_one_rank")),
        ("true", "true"),
        "{last}"
    );
    assert_eq!((field(last, "ranks"), field(last, "steps")), (ranks, "276"), "{last}");
}

#[test]
fn ranks_that_nobody_disturbs_train_in_one_epoch_and_repeat_nothing() {
    for fabric in ["shm", "tcp"] {
        let output =
            run(&["train", "--elastic", "--ranks", "3", "--fabric", fabric, "--epochs", "12", "--json"]);
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        expect_trained(&lines, "3");
        assert_eq!((field(lines[0], "retried"), field(lines[0], "epochs")), ("0", "1"), "{lines:?}");
    }
}

#[test]
fn no_step_is_lost_or_applied_twice_while_ranks_are_killed_and_stopped() {
    for fabric in ["shm", "tcp"] {
        let chaos = ["train", "--elastic=2:4", "--chaos=kill,stop", "--fabric", fabric];
        let output = run(&[&chaos[..], &["--epochs", "12", "--pace", "25ms", "--json"]].concat());
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let faults: Vec<&str> = lines[..lines.len() - 1].iter().map(|line| field(line, "fault")).collect();
        // A training of 7 s has 2 faults at least, and then no rank is left to be struck.
        assert_eq!(faults, ["\"kill\"", "\"stop\""], "{lines:?}");
        expect_trained(&lines, "2");
        assert_eq!(field(lines[2], "epochs"), "3", "{lines:?}");
    }
}

#[test]
fn the_others_train_on_when_a_rank_is_killed_that_the_launcher_did_not_strike() {
    let mut command = pleach();
    // One of five is stopped, and one is killed here: then no more than three are left.
    command.args(["train", "--elastic=3:5", "--chaos=stop", "--epochs", "12", "--pace", "25ms", "--json"]);
    let mut training = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut lines = BufReader::new(training.stdout.take().expect("is piped")).lines();
    let fault = lines.next().expect("a fault").expect("is text");
    let other = (number(&fault, "seat") as u32 + 1) % 5;
    signal(rank_process(training.id(), other).expect("it trains"), Signal::KILL);
    let last = lines.next().expect("results").expect("is text");
    expect_trained(&[&last], "3");
    assert!(lines.next().is_none());
    let ended = training.wait_with_output().expect("its own");
    let note = format!("note: rank {other} has ended (signal: 9 (SIGKILL)), and the others go on");
    assert!(ended.status.success() && text(&ended.stderr).contains(&note), "{}", text(&ended.stderr));
}
