//! `pleach schedule` and `pleach verify`, as a person calls them.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn pleach(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pleach")).args(arguments).output().expect("pleach starts")
}

/// Its exit status, standard output and standard error.
fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A file that goes when the test is over.
struct Written(PathBuf);

impl Written {
    fn new(name: &str, text: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::write(&path, text).expect("a temporary file");
        Self(path)
    }

    fn verified(&self, collective: &str) -> (Option<i32>, String, String) {
        told(&pleach(&["verify", self.0.to_str().expect("UTF-8"), "--collective", collective]))
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn is_one_line_with_status(output: &Output, status: i32, parts: &[&str]) {
    let (code, stdout, stderr) = told(output);
    assert_eq!((code, stdout.as_str()), (Some(status), ""), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
}

#[test]
fn verify_reads_standard_input_and_names_of_collectives_may_be_those_of_other_libraries() {
    let schedule = pleach(&["schedule", "ReduceScatter", "--algorithm", "ring", "--ranks", "3"]);
    let mut verify = Command::new(env!("CARGO_BIN_EXE_pleach"));
    verify.args(["verify", "-", "--collective", "reduce_scatter"]);
    let mut verify = verify.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("pleach starts");
    verify.stdin.take().expect("is piped").write_all(&schedule.stdout).expect("it reads all");
    let (code, stdout, _) = told(&verify.wait_with_output().expect("it ends"));
    assert_eq!(code, Some(0));
    assert!(stdout.starts_with("proved: - is a reduce-scatter of 3 ranks"), "{stdout}");
}

#[test]
fn what_schedule_prints_verify_proves() {
    for (collective, algorithm, more) in [
        ("all-reduce", "ring", &[][..]),
        ("all-reduce", "direct", &["--mapped"]),
        ("all-reduce", "grid:2x2", &[]),
        ("all-reduce", "grid:2x3", &["--mapped"]),
        ("all-gather", "grid:3d", &[]),
        ("all-reduce", "grid-staged:2x3", &[]),
        ("all-reduce", "hierarchical:2x2", &["--mapped"]),
        ("all-gather", "hierarchical:3+1", &[]),
        ("broadcast", "chain", &["--root", "2"]),
        ("gather", "direct", &["--root", "3", "--mapped"]),
        ("scatter", "direct", &["--root", "1"]),
        ("all-to-all", "direct", &[]),
        ("all-to-all", "direct", &["--mapped"]),
        ("barrier", "recursive-doubling", &[]),
    ] {
        let arguments = ["schedule", collective, "--algorithm", algorithm, "--ranks", "4"];
        let (code, text, stderr) = told(&pleach(&[&arguments, more].concat()));
        assert_eq!((code, stderr.as_str()), (Some(0), ""));
        let file = Written::new(&format!("{collective}-{}", algorithm.replace(':', "-")), &text);
        let (code, stdout, stderr) = file.verified(collective);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{collective} {algorithm}");
        assert!(
            stdout.starts_with("proved: ") && !stdout.contains(" a a") && stdout.contains("4 ranks"),
            "{stdout}"
        );
        let rounds = if collective == "all-reduce" { "admitted, " } else { "not admitted, " };
        assert!(stdout.contains(&format!("\npartial rounds: {rounds}")), "{stdout}");
    }
}

#[test]
fn a_schedule_without_one_of_its_waits_is_refuted_with_status_1() {
    let (_, text, _) = told(&pleach(&["schedule", "send-recv", "--algorithm", "direct", "--ranks", "2"]));
    let shorter = text.replacen("1: wait 0 slot 1", "1: wait 0 slot 7", 1);
    assert_ne!(text, shorter, "{text}");
    let (code, stdout, stderr) = Written::new("refuted", &shorter).verified("send-recv");
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
    assert!(stderr.starts_with("error: refuted: ") && stderr.contains("rank"), "{stderr}");
}

#[test]
fn a_syntax_error_is_told_with_line_and_column_and_status_2() {
    let (_, text, _) =
        told(&pleach(&["schedule", "barrier", "--algorithm", "recursive-doubling", "--ranks", "2"]));
    let wrong = text.replacen("signal", "notfiy", 1);
    let line = wrong.lines().position(|line| line.contains("notfiy")).expect("a signal") + 1;
    let (code, _, stderr) = Written::new("syntax", &wrong).verified("barrier");
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains(&format!("line {line}, column ")), "{stderr}");
}

#[test]
fn a_byte_that_is_no_text_is_told_with_line_and_column() {
    let file = Written::new("bytes", "pleach-schedule 1\nab");
    let mut bytes = fs::read(&file.0).expect("was written");
    bytes.extend([0xff, b'\n']);
    fs::write(&file.0, bytes).expect("a temporary file");
    let (code, _, stderr) = file.verified("barrier");
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("line 2, column 3: ") && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn a_file_for_another_collective_or_none_is_a_usage_error() {
    let (_, text, _) =
        told(&pleach(&["schedule", "barrier", "--algorithm", "recursive-doubling", "--ranks", "2"]));
    let (code, _, stderr) = Written::new("other", &text).verified("all-reduce");
    assert_eq!(code, Some(2));
    assert!(stderr.contains("--collective barrier"), "{stderr}");
    let missing = pleach(&["verify", "/nowhere/ring", "--collective", "barrier"]);
    is_one_line_with_status(&missing, 2, &["/nowhere/ring"]);
}

#[test]
fn what_cannot_be_scheduled_is_a_usage_error_that_says_what_can() {
    let schedule = |arguments: &[&str]| pleach(&[&["schedule"], arguments].concat());
    is_one_line_with_status(
        &schedule(&["all-gather", "--algorithm", "chain", "--ranks", "2"]),
        2,
        &["'chain' for all-gather", "direct eager ring halving-doubling grid:AxB"],
    );
    is_one_line_with_status(
        &schedule(&["all-reduce", "--algorithm", "hierarchical", "--ranks", "4"]),
        2,
        &["hierarchical:2x2"],
    );
    is_one_line_with_status(
        &schedule(&["all-reduce", "--algorithm", "ring", "--ranks", "0"]),
        2,
        &["at least 1 rank"],
    );
    is_one_line_with_status(
        &schedule(&["all-reduce", "--algorithm", "grid:2x2", "--ranks", "5"]),
        2,
        &["4 places for 5 ranks", "as grid:2x3"],
    );
    is_one_line_with_status(
        &schedule(&["sum", "--algorithm", "ring", "--ranks", "2"]),
        2,
        &["all-reduce reduce broadcast"],
    );
    is_one_line_with_status(
        &schedule(&["barrier", "--algorithm", "recursive-doubling", "--ranks", "2", "--root", "1"]),
        2,
        &["no root"],
    );
}

/// Two GPUs, each of which sums up its half and sends it back.
const PAIR: &str = include_str!("../schedule/tests/msccl/pair.xml");

#[test]
fn an_msccl_algorithm_is_proved_or_refuted_like_a_schedule() {
    let verify = |file: &Written| told(&pleach(&["verify", file.0.to_str().expect("UTF-8")]));
    let (code, stdout, stderr) = verify(&Written::new("pair.xml", PAIR));
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.starts_with("proved: ") && stdout.contains("an all-reduce of 2 ranks"), "{stdout}");
    let forgets = PAIR.replacen("rrcs", "rcs", 1);
    let (code, _, stderr) = verify(&Written::new("forgets.xml", &forgets));
    assert!(code == Some(1) && stderr.starts_with("error: refuted: "), "{stderr}");
    let wrong = PAIR.replacen("type=\"rrcs\"", "type=\"rrsc\"", 1);
    let (code, _, stderr) = verify(&Written::new("wrong.xml", &wrong));
    assert!(code == Some(2) && stderr.contains("line 7: type=\"rrsc\""), "{stderr}");
}
