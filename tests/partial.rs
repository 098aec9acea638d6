//! Partial all-reduce as people start it: real processes, late and stopped ones among them.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use launcher::{Folder, field, finish, number, pleach, program, signal, text, wait_until};
use pleach::partial::{Activation, Own};
use pleach::{Group, Options};
use rustix::process::Signal;

fn bench(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.args(["bench", "partial-all-reduce"]).args(arguments);
    finish(command)
}

#[test]
fn every_contribution_is_found_again_whoever_is_late_on_every_fabric() {
    for (fabric, activation, late) in [
        ("shm", "solo", "carry"),
        ("tcp", "majority", "correct"),
        ("shm", "quorum:3", "drop"),
        ("tcp", "deadline:1ms", "carry"),
    ] {
        let arguments = ["--fabric", fabric, "--activation", activation, "--late", late, "--json"];
        let shape = ["--ranks", "4", "--skew", "linear:2ms", "--rounds", "12", "--sizes", "0,64,40K"];
        let output = bench(&[&arguments[..], &shape].concat());
        assert!(output.status.success(), "{activation}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        for line in lines {
            assert_eq!(field(line, "errors"), "0", "{line}");
            let [shown, rule] = ["activation", "late"].map(|name| field(line, name).trim_matches('"'));
            assert!(shown.starts_with(activation) && rule == late, "{line}");
            assert!(number(line, "contributors_mean") >= 1.0 && number(line, "time_us_mean") > 0.0, "{line}");
            assert!(number(line, "ratio_to_all") > 0.0 && number(line, "missed") >= 0.0, "{line}");
        }
    }
}

#[test]
fn all_ranks_are_in_every_round_of_all_and_of_ranks_that_are_not_late() {
    let output =
        bench(&["--ranks", "2", "--activation", "all", "--rounds", "20", "--sizes", "8,1M", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for line in text(&output.stdout).lines() {
        assert_eq!((field(line, "contributors_mean"), field(line, "missed")), ("2.0", "0.0"), "{line}");
    }
    let output = bench(&["--ranks", "2", "--rounds", "3", "--sizes", "64"]);
    let out = text(&output.stdout);
    assert!(out.contains("# partial-all-reduce (solo, late: carry") && out.contains("contributors"), "{out}");
}

#[test]
fn bad_input_is_refused_with_what_to_write() {
    for (arguments, part) in [
        (&["--activation", "some"][..], "there are all solo majority quorum:K"),
        (&["--activation", "quorum:5", "--ranks", "2"], "name 1 to 2 ranks"),
        (&["--activation", "deadline:0s", "--ranks", "2"], "deadline above zero"),
        (&["--skew", "linear:5"], "linear:D"),
        (&["--late", "never"], "carry drop correct"),
        (&["--dtype", "i32"], "sums of f32"),
        (&["--fabric", "sim"], "not simulated"),
        (&["--rounds", "0"], "--rounds"),
    ] {
        let output = bench(arguments);
        assert!(!output.status.success() && text(&output.stderr).contains(part), "{arguments:?}: {output:?}");
    }
}

/// How late a rank is on a busy machine nobody knows, and the later it is the less is learned: the
/// exit status has to say which of the two it was. How much is learned is held in virtual time, by
/// the claims of `benches/training`.
#[test]
fn a_training_that_does_not_wait_for_a_late_rank_is_measured_by_one_rank() {
    let mut command = pleach();
    command.args(["train", "--ranks", "4", "--partial", "majority", "--skew", "one:2ms"]);
    command.args(["--fabric", "shm", "--json"]);
    let output = finish(command);
    let errors = text(&output.stderr);
    let last = text(&output.stdout).lines().last().expect("a verdict");
    assert_eq!((field(last, "parameters_equal"), field(last, "guarantee_held")), ("true", "true"), "{last}");
    let (together, alone) = (number(last, "test_accuracy"), number(last, "test_accuracy_of_one_rank"));
    assert!(together > 0.8 && alone > 0.95, "{last}");
    let has_learned_less = together + 0.02 < alone;
    assert_eq!(output.status.success(), !has_learned_less, "{last}: {errors}");
    assert_eq!(errors.contains("it has learned less"), has_learned_less, "{last}: {errors}");
}

#[expect(clippy::disallowed_methods, reason = "the time for which a rank is stopped")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Ranks that are processes of their own; over two fabrics, those of even and of odd numbers are on
/// different hosts.
fn start_ranks(command: impl Fn() -> Command, fabric: &str, ranks: u32, folder: &Path) -> Vec<Child> {
    let start = |rank: u32| {
        let mut command = command();
        command.env("PLEACH_RANK", rank.to_string()).env("PLEACH_WORLD_SIZE", ranks.to_string());
        command.env("PLEACH_RENDEZVOUS", format!("file://{}/meeting", folder.display()));
        command.env("PLEACH_FABRIC", fabric);
        if fabric.contains('+') {
            command.env("PLEACH_HOST", format!("host-{}", rank % 2));
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the rank starts")
    };
    (0..ranks).map(start).collect()
}

/// A rank that is stopped for less than the deadline is waited for, and nothing is lost.
#[test]
fn a_rank_that_is_stopped_for_a_while_changes_no_result() {
    for (number, fabric) in ["shm", "tcp", "shm+tcp"].into_iter().enumerate() {
        let folder = std::env::temp_dir().join(format!("pleach-partial-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("the folder is new");
        let bench = || {
            let mut command = pleach();
            command.args(["bench", "partial-all-reduce", "--fabric", fabric, "--json"]);
            command.args(["--activation", "quorum:2", "--skew", "one:2ms", "--rounds", "200"]);
            command.args(["--sizes", "4K,8K"]);
            command
        };
        let ranks = start_ranks(bench, fabric, 3, &folder);
        let rank = ranks[1].id();
        // Its further threads show that the rank has joined and serves rounds.
        wait_until("rank 1 serves rounds", || {
            std::fs::read_dir(format!("/proc/{rank}/task")).is_ok_and(|tasks| tasks.count() > 2)
        });
        for _ in 0..3 {
            signal(rank, Signal::STOP);
            pause(Duration::from_millis(100));
            signal(rank, Signal::CONT);
            pause(Duration::from_millis(50));
        }
        let outputs: Vec<Output> =
            ranks.into_iter().map(|rank| rank.wait_with_output().expect("it ends")).collect();
        std::fs::remove_dir_all(&folder).expect("the folder was made here");
        for output in &outputs {
            assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        }
        let lines: Vec<&str> = text(&outputs[0].stdout).lines().collect();
        assert_eq!(lines.len(), 2, "{fabric}: {lines:?}");
        for line in lines {
            assert_eq!(field(line, "errors"), "0", "{fabric}: {line}");
        }
    }
}

/// The rank that is killed.
const KILLED: u32 = 1;

/// One rank of the next test: makes rounds, then waits in one that waits for rank [`KILLED`].
#[test]
#[ignore = "a rank of the next test, which starts it"]
fn rank() {
    if std::env::var_os("PLEACH_RANK").is_none() {
        return;
    }
    let group = Group::join(&Options::from_env().expect("as the test says")).expect("all come");
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut rounds = group.partial::<i64>(1000, Activation::all()).expect("it is the same on all ranks");
    for _ in 0..5 {
        rounds.contribution().fill(1);
        let round = rounds.contribute().expect("all are there");
        assert_eq!((round.result()[0], round.own()), (i64::from(ranks), Own::Counted));
    }
    rounds.contribution().fill(i64::from(rank) + 5);
    if rank != KILLED {
        rounds.start_contribute().expect("the group works");
    }
    println!("\nREADY");
    if rank == KILLED {
        loop {
            std::thread::park();
        }
    }
    let error = rounds.wait().err().expect("a rank was killed").to_string();
    for _ in 0..2 {
        assert_eq!(rounds.contribution(), [i64::from(rank) + 5; 1000]);
        // It stays so.
        assert_eq!(rounds.contribute().err().expect("the group has failed").to_string(), error);
    }
    println!("\nFAILED {error}");
}

/// Processes that end with the test, and what they say.
struct Ranks(Vec<(Child, BufReader<ChildStdout>)>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for (process, _) in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// What follows on the next line that begins with this word.
fn line_of((process, out): &mut (Child, BufReader<ChildStdout>), word: &str) -> String {
    let mut others = Vec::new();
    for line in out.lines().map(|line| line.expect("is text")) {
        match line.strip_prefix(word) {
            Some(rest) => return rest.trim().to_owned(),
            None => others.push(line),
        }
    }
    let mut errors = String::new();
    let _ = process.stderr.take().map(|mut it| it.read_to_string(&mut errors));
    panic!("it has ended without {word}: {others:?}, {errors}");
}

#[test]
fn survivors_of_a_killed_rank_have_the_same_error_and_their_contributions() {
    for (number, fabric) in ["shm", "tcp", "shm+tcp"].into_iter().enumerate() {
        let folder = Folder::new(&format!("partial-killed-{number}"));
        let rank = || {
            let mut command = program(std::env::current_exe().expect("this program"));
            command.args(["--ignored", "--exact", "--nocapture", "rank"]);
            command
        };
        let ranks = start_ranks(rank, fabric, 4, &folder.0).into_iter().map(|mut process| {
            let out = process.stdout.take().expect("is piped");
            (process, BufReader::new(out))
        });
        let mut ranks = Ranks(ranks.collect());
        for rank in &mut ranks.0 {
            line_of(rank, "READY");
        }
        signal(ranks.0[KILLED as usize].0.id(), Signal::KILL);
        let survivors = ranks.0.iter_mut().zip(0..).filter(|(_, rank)| *rank != KILLED);
        let errors: Vec<String> = survivors.map(|(rank, _)| line_of(rank, "FAILED")).collect();
        assert!(errors.iter().all(|error| *error == errors[0]), "{fabric}: {errors:?}");
        assert!(errors[0].contains(&format!("rank {KILLED} is lost")), "{fabric}: {}", errors[0]);
    }
}
