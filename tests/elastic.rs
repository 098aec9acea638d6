//! Sessions as people meet them on the command line: the time line of a fault, a training whose
//! ranks are killed and stopped, join and leave, and ranks that are started anew. Counts and orders
//! are checked, times never.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;
#[allow(dead_code)] // Other tests start PyTorch's.
mod outside_stores;
mod ports;
mod skipped;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use launcher::{expect_refused, field, finish, number, pleach, rank_process, signal, text};
use outside_stores::Etcd;
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
    expect_in_order(line, &["found", "agreed", "drained", "planned", "next"]);
}

fn expect_in_order(line: &str, stages: &[&str]) {
    for share in ["p50", "p99", "max"] {
        let times: Vec<f64> =
            stages.iter().map(|stage| number(line, &format!("{stage}_ms_{share}"))).collect();
        assert!(times.is_sorted() && times[0] >= 0.0, "{share}: {line}");
    }
}

#[test]
fn a_process_that_joins_has_the_state_and_the_others_connect_to_it_alone() {
    for fabric in ["shm", "tcp", "shm+tcp"] {
        let join = ["bench", "recovery", "--fault", "join", "--fabric", fabric];
        let output =
            run(&[&join[..], &["--ranks", "2", "--samples", "1", "--state", "9M", "--json"]].concat());
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let line = text(&output.stdout);
        assert_eq!((field(line, "fault"), field(line, "ranks")), ("\"join\"", "2"), "{line}");
        expect_in_order(line, &["agreed", "drained", "planned", "next"]);
        assert!(number(line, "state_gb_s") > 0.0 && number(line, "stop_ms_p99") > 0.0, "{line}");
        assert_eq!(field(line, "connected"), "1", "{line}");
    }
}

#[test]
fn the_others_go_on_when_one_leaves() {
    let output = run(&["bench", "recovery", "--fault", "leave", "--ranks", "3", "--samples", "1", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let line = text(&output.stdout);
    assert_eq!((field(line, "fault"), field(line, "ranks")), ("\"leave\"", "3"), "{line}");
    expect_in_order(line, &["agreed", "drained", "planned", "next"]);
    assert_eq!((field(line, "state_gb_s"), field(line, "connected")), ("null", "0"), "{line}");
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
        (
            &["bench", "recovery", "--fault", "cut"][..],
            "there are kill stop join leave here; pleach chaos has more",
        ),
        (&["bench", "recovery", "--fault", "explode"], "there are kill stop join leave"),
        (&["bench", "recovery", "--ranks", "1"], "give 2 or more"),
        (&["bench", "recovery", "--samples", "0"], "--samples"),
        (&["bench", "recovery", "--suspect-after", "1ms"], "give 10ms or more"),
        (&["bench", "recovery", "--fabric", "sim"], "not simulated"),
        (&["chaos", "--ranks", "3:3"], "give MIN:MAX, as 2:6"),
        (&["chaos", "--faults", "kill,store"], "the members make the records by themselves there"),
        (&["chaos", "--faults", "explode"], "there are kill stop join leave"),
        (
            &["chaos", "--faults", "store", "--rendezvous", "file:///nowhere"],
            "it is a folder, which this command cannot take away",
        ),
        (&["chaos", "--faults", "store", "--rendezvous", "etcds://127.0.0.1:9/a"], "give an etcd:// address"),
        (
            &["chaos", "--faults", "rendezvous", "--rendezvous", "etcd://127.0.0.1:9/a"],
            "no process of the job is known to hold etcd://127.0.0.1:9/a",
        ),
        (&["chaos", "--every", "often"], "give a time, as 2s"),
        (&["chaos", "--", "no-such-program"], "command not found: no-such-program"),
        (&["chaos", "--fabric", "tcp", "--", "true"], "--fabric"),
        (&["train", "--elastic=8:2"], limits),
        (&["train", "--elastic=0:2"], limits),
        (&["train", "--elastic=some"], limits),
        (&["train", "--elastic=2:4", "--ranks", "5"], "give a number from 2 to 4"),
        (&["train", "--elastic=1:4", "--ranks", "1"], "give --ranks 2 or more"),
        (&["train", "--chaos"], "--elastic"),
        (&["train", "--elastic", "--chaos=explode"], "there are kill stop"),
        (&["train", "--elastic", "--chaos=kill,slow"], "pleach chaos has more"),
        (&["chaos", "--ranks", "1:2", "--faults", "join"], "no fault is possible"),
        (&["chaos", "--ranks", "1:2", "--faults", "kill,cut"], "give a MAX from 3 on"),
        (&["train", "--exact"], "--elastic"),
        (&["train", "--elastic", "--exact", "--scheme", "sync"], "--scheme"),
        (&["run", "-n", "4", "--elastic=8:2", "--", "true"], limits),
        (&["run", "-n", "9", "--elastic=2:8", "--", "true"], "give a number from 2 to 8"),
        (&["run", "-n", "2", "--restarts", "3", "--", "true"], "--elastic"),
        (&["train", "--elastic", "--pace", "soon"], "give a time"),
        (&["train", "--elastic", "--scheme", "sync", "--scheme", "bsp"], "give one --scheme"),
        (
            &["train", "--elastic", "--scheme", "easgd"],
            "easgd does not train in a session: each rank has a shard of the centre that no other rank has; train by \
             mode=sync there",
        ),
        (&["train", "--elastic", "--scheme", "ssp"], "train by local-sgd:every=1 there"),
        (&["train", "--elastic", "--scheme", "easgd:mode=sync,moving=1.5"], "give moving at most 1"),
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
    for (fabric, fault) in [
        ("shm", "kill"),
        ("tcp", "kill"),
        ("shm", "stop"),
        ("tcp", "stop"),
        ("shm", "cut"),
        ("tcp", "cut"),
        ("shm+tcp", "cut"),
    ] {
        let lines = expect_counted_once(fabric, fault, ("4", "3"));
        let times = ["found", "agreed", "drained", "planned", "next"];
        assert!(times.map(|stage| number(&lines[0], &format!("{stage}_ms"))).is_sorted(), "{lines:?}");
    }
    for (fabric, fault, (most, fewest)) in [
        ("shm", "join", ("3", "2")),
        ("tcp", "join", ("3", "2")),
        ("shm+tcp", "join", ("3", "2")),
        ("shm", "leave", ("4", "3")),
        ("tcp", "leave", ("4", "3")),
    ] {
        let lines = expect_counted_once(fabric, fault, (most, fewest));
        let times = ["agreed", "drained", "planned", "next"];
        assert!(times.map(|stage| number(&lines[0], &format!("{stage}_ms"))).is_sorted(), "{lines:?}");
        assert_eq!(field(&lines[1], "retried"), "0", "a planned change costs no step: {lines:?}");
    }
}

#[test]
fn another_process_holds_the_rendezvous_when_its_holder_is_killed() {
    let folder = launcher::Folder::new("chaos-rendezvous");
    let address = format!("file://{}", folder.0.display());
    for arguments in [&["--fabric", "tcp"][..], &["--rendezvous", &address]] {
        let chaos = ["chaos", "--ranks", "2:4", "--every", "200ms", "--for", "1s", "--json"];
        let output = run(&[&chaos[..], &["--faults", "rendezvous,join"], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        assert_eq!((field(lines[0], "fault"), field(lines[0], "seat")), ("\"rendezvous\"", "0"), "{lines:?}");
        // Nobody could join if there were no other holder.
        assert_eq!(field(lines[1], "fault"), "\"join\"", "{lines:?}");
        assert_eq!(field(lines[lines.len() - 1], "equal"), "true", "{lines:?}");
    }
}

#[test]
fn ranks_agree_when_the_store_is_back_that_was_away_while_one_was_killed() {
    let Some(etcd) = Etcd::start(1, ports::reserve(2), &[]) else {
        return skipped::skip("etcd-server is not installed");
    };
    let address = etcd.address("chaos");
    let chaos = ["chaos", "--ranks", "2:3", "--faults", "store", "--rendezvous", &address];
    let output = run(&[&chaos[..], &["--every", "200ms", "--for", "1ms", "--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(field(lines[0], "fault"), "\"store\"", "{lines:?}");
    // It is away for 1 s, in which nothing can be agreed.
    assert!(number(lines[0], "agreed_ms") >= 900.0, "{lines:?}");
    assert_eq!(field(lines[1], "equal"), "true", "{lines:?}");
}

#[test]
fn a_slow_rank_stays_and_costs_no_step() {
    let chaos = ["chaos", "--ranks", "2:3", "--faults", "slow", "--every", "200ms", "--for", "1ms", "--json"];
    let output = run(&chaos);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!((field(lines[0], "fault"), field(lines[0], "epoch")), ("\"slow\"", "0"), "{lines:?}");
    let last = lines[lines.len() - 1];
    assert_eq!(
        (field(last, "epochs"), field(last, "retried"), field(last, "members_min")),
        ("1", "0", "3"),
        "{last}"
    );
}

/// Runs one job to its first fault, and returns its lines.
fn expect_counted_once(fabric: &str, fault: &str, (most, fewest): (&str, &str)) -> Vec<String> {
    let arguments = ["chaos", "--ranks", "2:4", "--fabric", fabric, "--every", "500ms", "--for", "1ms"];
    let output = run(&[&arguments[..], &["--faults", fault, "--json"]].concat());
    assert!(output.status.success(), "{fabric}, {fault}: {}", text(&output.stderr));
    let lines: Vec<String> = text(&output.stdout).lines().map(str::to_owned).collect();
    let (last, faults) = lines.split_last().expect("results");
    assert_eq!(faults.len(), 1, "{lines:?}");
    assert_eq!(field(&faults[0], "fault"), format!("\"{fault}\""), "{lines:?}");
    assert!(number(last, "steps") > 0.0 && number(last, "epochs") >= 2.0, "{last}");
    assert_eq!((field(last, "members_max"), field(last, "members_min")), (most, fewest), "{last}");
    assert_eq!(field(last, "equal"), "true");
    lines
}

/// A training of 2 to 3 processes in a session, as a program that chaos knows nothing of.
const PROGRAM: [&str; 9] = [
    env!("CARGO_BIN_EXE_pleach"),
    "train",
    "--elastic=2:3",
    "--epochs",
    "12",
    "--pace",
    "25ms",
    "--json",
    "--member",
];

#[test]
fn of_a_program_chaos_says_what_its_members_say_and_leaves_open_what_nobody_here_knows() {
    // Where one of three is killed, two are left, which go on to the end.
    let chaos = ["chaos", "--ranks", "2:3", "--faults", "kill", "--every", "300ms", "--json", "--"];
    let output = run(&[&chaos[..], &PROGRAM].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let [fault, last] = lines[..] else { panic!("{lines:?}") };
    assert_eq!((field(fault, "fault"), field(fault, "next_ms")), ("\"kill\"", "null"), "{fault}");
    assert!(number(fault, "epoch") >= 1.0 && number(fault, "seat") < 3.0, "{fault}");
    assert_eq!((field(last, "equal"), field(last, "retried")), ("null", "null"), "{last}");
    assert_eq!((field(last, "members_min"), field(last, "members_max")), ("2", "3"), "{last}");
    assert!(number(last, "steps") > 0.0 && number(last, "epochs") >= 2.0, "{last}");
    // What the program prints is beside it, and it has found by itself whether its results are
    // right.
    let results = text(&output.stderr).lines().filter_map(|line| line.split_once("] "));
    let results: Vec<&str> = results.map(|(_, line)| line).filter(|line| line.starts_with('{')).collect();
    assert_eq!(results.len(), 1, "{}", text(&output.stderr));
    expect_trained(&results, "2");
}

#[test]
fn a_program_is_told_to_leave_when_the_time_is_up_and_one_that_fails_by_itself_fails_chaos() {
    // On a busy machine the time may be up before the first fault.
    let output = ["1s", "3s", "6s"].into_iter().find_map(|lasts| {
        let chaos = ["chaos", "--ranks", "2:3", "--faults", "leave,join", "--every", "100ms", "--for", lasts];
        let output = run(&[&chaos[..], &["--json", "--"], &PROGRAM].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout).lines().count() > 1).then_some(output)
    });
    let output = output.expect("a process is struck before the time is up");
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    let (last, faults) = lines.split_last().expect("results");
    let kinds: Vec<&str> = faults.iter().map(|line| field(line, "fault")).collect();
    let expected = ["\"leave\"", "\"join\""];
    assert!(kinds.iter().zip(expected.iter().cycle()).all(|(one, other)| one == other), "{kinds:?}");
    // Each is an epoch, and so may be the end of one or two of those that are told to leave.
    let epochs = number(last, "epochs") as usize;
    assert!((1 + faults.len()..=3 + faults.len()).contains(&epochs), "{lines:?}");

    let output =
        run(&["chaos", "--ranks", "1:2", "--", "sh", "-c", "echo here; echo 'error: no luck' >&2; exit 3"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("did not go on: no luck") && error.contains("] here\n"), "{error}");
}

/// The accuracy that shows that ranks have learned, where it depends on the moment at which one of
/// them is struck: guesses have 0.1. The accuracy of schemes is held in virtual time.
const LEARNED: f64 = 0.8;

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
        let (last, faults) = lines.split_last().expect("results");
        let faults: Vec<&str> = faults.iter().map(|line| field(line, "fault")).collect();
        // A training of 7 s has a fault, and two if the others go on in time.
        assert!(!faults.is_empty() && ["\"kill\"", "\"stop\""].starts_with(&faults), "{lines:?}");
        let ranks = field(last, "ranks");
        assert!(["2", "3"].contains(&ranks) && number(last, "epochs") >= 2.0, "{lines:?}");
        expect_trained(&[last], ranks);
    }
}

#[test]
fn schemes_whose_ranks_make_steps_by_themselves_go_on_without_a_rank() {
    for (fabric, scheme, faults) in [
        ("shm", "local-sgd", &["kill", "stop"][..]),
        ("tcp", "local-sgd:every=4", &["leave"]),
        ("tcp", "diloco:every=10,outer-momentum=0.5", &["kill"]),
        ("tcp", "easgd:mode=sync,every=4", &["kill"]),
        ("shm", "bidmach", &["kill"]),
        ("tcp", "bidmach:every=2,dimensions=1", &["kill"]),
        ("shm", "elastic-bsp:lookahead=8", &["kill"]),
    ] {
        let left = 4 - faults.len();
        let (limits, chaos) = (format!("--elastic={left}:4"), format!("--chaos={}", faults.join(",")));
        let chaos = ["train", &limits, &chaos, "--fabric", fabric, "--scheme", scheme];
        // A rank of four is struck every 2 s, if the launcher runs then: if it has struck nobody in
        // time, the training is made again with longer steps.
        let mut paces = [1, 2, 4, 8].map(|times| format!("{}ms", 12 * faults.len() * times)).into_iter();
        let output = loop {
            let pace = paces.next().expect("a rank is struck before the last step");
            let output = run(&[&chaos[..], &["--epochs", "12", "--pace", &pace, "--json"]].concat());
            assert!(output.status.success(), "{scheme}: {}", text(&output.stderr));
            if text(&output.stdout).lines().count() > 1 {
                break output;
            }
        };
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let (last, struck) = lines.split_last().expect("results");
        let struck: Vec<&str> = struck.iter().map(|line| field(line, "fault").trim_matches('"')).collect();
        assert!(!struck.is_empty() && faults.starts_with(&struck), "{scheme}: {lines:?}");
        println!("{scheme} over {fabric}: accuracy {}", number(last, "test_accuracy"));
        assert!(number(last, "test_accuracy") >= LEARNED, "{scheme}: {last}");
        assert!((left..4).contains(&(number(last, "ranks") as usize)), "{scheme}: {last}");
        assert!(number(last, "epochs") >= 2.0, "{scheme}: {last}");
        // Of 12 passes over 1,437 images in batches of 4 times 16; none is made twice.
        assert_eq!((field(last, "steps"), field(last, "retried")), ("270", "0"), "{scheme}: {last}");
        assert_eq!(
            (field(last, "parameters_equal"), field(last, "matches_one_rank")),
            ("true", "null"),
            "{scheme}: {last}"
        );
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

#[test]
fn no_step_is_lost_or_applied_twice_while_ranks_join_and_leave_too() {
    for fabric in ["shm", "tcp"] {
        let chaos = ["train", "--elastic=2:4", "--chaos", "--fabric", fabric];
        let output = run(&[&chaos[..], &["--epochs", "12", "--pace", "50ms", "--json"]].concat());
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let (last, faults) = lines.split_last().expect("results");
        let faults: Vec<&str> = faults.iter().map(|line| field(line, "fault")).collect();
        let all = ["\"kill\"", "\"stop\"", "\"join\"", "\"leave\""];
        // One after the other, as many as there is time for.
        assert!(!faults.is_empty() && faults.iter().all(|fault| all.contains(fault)), "{lines:?}");
        assert_eq!(faults[0], all[0], "{lines:?}");
        let ranks = field(last, "ranks");
        assert!(["2", "3", "4"].contains(&ranks), "{last}");
        expect_trained(&[last], ranks);
    }
}

#[test]
fn exact_ranks_have_the_bits_of_one_that_nobody_disturbs() {
    for (fabric, faults) in [("shm", "kill,join"), ("tcp", "leave,join")] {
        let chaos = ["train", "--elastic=2:3", "--exact", "--fabric", fabric];
        let faults = format!("--chaos={faults}");
        let output = run(&[&chaos[..], &[&faults, "--epochs", "12", "--pace", "30ms", "--json"]].concat());
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        let (last, struck) = lines.split_last().expect("results");
        assert!(!struck.is_empty() && number(last, "epochs") >= 2.0, "{lines:?}");
        assert_eq!(field(last, "exact"), "true", "{last}");
        let ranks = field(last, "ranks");
        expect_trained(&[last], ranks);
    }
}

/// A training of three ranks that `pleach run --elastic` has started.
struct Outlived {
    launcher: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// By seat: the number of ranks of its newest epoch.
    epochs: BTreeMap<u32, u32>,
}

impl Outlived {
    fn start(options: &[&str]) -> Self {
        let mut command = pleach();
        command.args(["run", "-n", "3"]).args(options).args(["--", env!("CARGO_BIN_EXE_pleach")]);
        command.args(["train", "--elastic=2:3", "--epochs", "12", "--pace", "60ms", "--json", "--member"]);
        Self::of(command)
    }

    fn of(mut command: Command) -> Self {
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut launcher = started.expect("starts");
        let lines = BufReader::new(launcher.stdout.take().expect("is piped")).lines();
        Self { launcher, lines, epochs: BTreeMap::new() }
    }

    /// The next line that is not for a launcher.
    fn line(&mut self) -> Option<String> {
        for line in self.lines.by_ref() {
            let line = line.expect("is text");
            let (_, line) = line.split_once("] ").expect("bears its rank");
            if line == "@end" {
                continue;
            }
            let Some(epoch) = line.strip_prefix("@epoch ") else { return Some(line.to_owned()) };
            let (seat, ranks) = epoch.split_once(' ').expect("two numbers");
            self.epochs.insert(seat.parse().expect("a seat"), ranks.parse().expect("ranks"));
        }
        None
    }

    /// Waits until so many ranks are in an epoch of so many.
    fn await_ranks(&mut self, ranks: u32) {
        self.await_epochs(ranks as usize, ranks);
    }

    /// Waits until so many of the ranks that were started are in an epoch of `ranks`.
    fn await_epochs(&mut self, count: usize, ranks: u32) {
        while self.epochs.len() != count || self.epochs.values().any(|other| *other != ranks) {
            let line = self.lines.next().expect("the training goes on").expect("is text");
            let (_, epoch) = line.split_once("] @epoch ").unwrap_or_else(|| panic!("{line}"));
            let (seat, ranks) = epoch.split_once(' ').expect("two numbers");
            self.epochs.insert(seat.parse().expect("a seat"), ranks.parse().expect("ranks"));
        }
    }

    fn kill(&mut self, rank: u32) {
        self.epochs.clear();
        signal(rank_process(self.launcher.id(), rank).expect("it trains"), Signal::KILL);
    }
}

#[test]
fn a_rank_that_is_killed_twice_joins_twice() {
    let mut training = Outlived::start(&["--elastic=2:3", "--restarts", "2"]);
    training.await_ranks(3);
    for _ in 0..2 {
        training.kill(1);
        training.await_ranks(3);
    }
    let last = training.line().expect("results");
    expect_trained(&[&last], "3");
    let ended = training.launcher.wait_with_output().expect("its own");
    let notes = text(&ended.stderr);
    assert!(ended.status.success(), "{notes}");
    for number in 1..=2 {
        assert!(notes.contains(&format!("it joins again, restart {number} of 2")), "{notes}");
    }
}

#[test]
fn the_others_go_on_when_no_restart_is_left_and_the_job_ends_when_they_are_too_few() {
    let mut training = Outlived::start(&["--elastic=1:3", "--restarts", "1"]);
    training.await_ranks(3);
    // The holder of the address of the job, and then another one.
    training.kill(0);
    training.await_ranks(3);
    training.kill(2);
    training.await_ranks(2);
    let last = training.line().expect("results");
    expect_trained(&[&last], "2");
    let ended = training.launcher.wait_with_output().expect("its own");
    let notes = text(&ended.stderr);
    assert!(ended.status.success() && notes.contains("rank 2 (process"), "{notes}");
    assert!(notes.contains("the others go on without it"), "{notes}");

    let mut training = Outlived::start(&["--elastic=3:3", "--restarts", "0"]);
    training.await_ranks(3);
    training.kill(1);
    while training.line().is_some() {}
    let ended = training.launcher.wait_with_output().expect("its own");
    let error = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{error}");
    assert!(
        error.contains(
            "error: too few ranks: 2 ranks run and at least 3 must; ranks were started anew 0 of 0 times"
        ),
        "{error}"
    );
}

/// Two ranks on each of two hosts. Those of one are stopped first, so none sees the other end.
#[test]
fn half_of_a_job_goes_on_when_its_launcher_says_that_the_other_half_has_ended() {
    for ends_first in [false, true] {
        let rendezvous = format!("tcp://127.0.0.1:{}", ports::reserve(1));
        let launch = |host: &str, first: &str| {
            let mut command = pleach();
            command.args(["run", "-n", "2", "--world-size", "4", "--first-rank", first, "--restarts", "0"]);
            command.args(["--rendezvous", &rendezvous, "--elastic=1:4", "--", env!("CARGO_BIN_EXE_pleach")]);
            command.args(["train", "--elastic=1:4", "--epochs", "12", "--pace", "20ms", "--json"]);
            command.args(["--member", "--fabric", "shm+tcp"]).env("PLEACH_HOST", host);
            command
        };
        // Rank 0 holds the address of the job, which the others open again.
        let halves = [("a", "0"), ("b", "2")].map(|(host, first)| Outlived::of(launch(host, first)));
        let [mut stays, mut ends] = halves;
        let mut ranks = [2, 3];
        if ends_first {
            (stays, ends, ranks) = (ends, stays, [0, 1]);
        }
        stays.await_epochs(2, 4);
        let dead = ranks.map(|rank| rank_process(ends.launcher.id(), rank).expect("it trains"));
        stays.epochs.clear();
        dead.iter().for_each(|process| signal(*process, Signal::STOP));
        dead.iter().for_each(|process| signal(*process, Signal::KILL));
        stays.await_epochs(2, 2);
        // The rank on the lowest seat prints the results.
        while let Some(line) = stays.line() {
            expect_trained(&[&line], "2");
        }
        let ended = stays.launcher.wait_with_output().expect("its own");
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        assert_eq!(ends.launcher.wait().expect("its own").code(), Some(1));
    }
}

#[test]
fn ranks_that_fail_again_and_again_end_the_job() {
    let output = run(&["run", "-n", "2", "--elastic", "--restarts", "2", "--", "sh", "-c", "exit 3"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("error: too few ranks: 0 ranks run and at least 1 must; ranks were started anew"),
        "{error}"
    );
    assert!(error.contains("exited with status 3"), "{error}");
}

#[test]
fn a_job_whose_last_rank_failed_has_failed_also_when_another_had_ended_well() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("last-end-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    // Rank 1 ends when the launcher has reaped rank 0: until then there is its process.
    let script = r#"if [ $PLEACH_RANK = 0 ]; then echo $$ >"$0/new" && mv "$0/new" "$0/first"; exit 0; fi
        until [ -e "$0/first" ]; do :; done; read first <"$0/first"
        while kill -0 "$first" 2>/dev/null; do :; done; exit 4"#;
    let folder_text = folder.to_str().expect("is text");
    let output = run(&["run", "-n", "2", "--elastic", "--", "sh", "-c", script, folder_text]);
    fs::remove_dir_all(&folder).expect("its own");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("error: rank failed: rank 1 ") && error.contains("exited with status 4"),
        "{error}"
    );
}
