//! Partial all-reduce as people start it: real processes, late and stopped ones among them.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use launcher::{field, finish, number, pleach, signal, text, wait_until};
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
fn start_ranks(fabric: &str, ranks: u32, folder: &Path, arguments: &[&str]) -> Vec<Child> {
    let start = |rank: u32| {
        let mut command = pleach();
        command.args(["bench", "partial-all-reduce", "--fabric", fabric, "--json"]).args(arguments);
        command.env("PLEACH_RANK", rank.to_string()).env("PLEACH_WORLD_SIZE", ranks.to_string());
        command.env("PLEACH_RENDEZVOUS", format!("file://{}/meeting", folder.display()));
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
        let arguments =
            ["--activation", "quorum:2", "--skew", "one:2ms", "--rounds", "200", "--sizes", "4K,8K"];
        let ranks = start_ranks(fabric, 3, &folder, &arguments);
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
