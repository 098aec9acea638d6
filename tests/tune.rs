//! `pleach tune`: a table that is measured, written, shown and pinned.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::process::Output;

use launcher::{Folder, finish, pleach};

fn tune(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.arg("tune").args(arguments);
    finish(command)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_is_measured_is_written_shown_and_kept_to() {
    let folder = Folder::new("tune-kept");
    let path = folder.0.join("choices");
    let file = path.to_str().expect("a plain name");
    let measure = |ranks: &str| {
        let arguments = ["--fabric", "shm", "--ranks", ranks, "--min", "8", "--max", "2K", "--time", "1"];
        tune(&[&arguments[..], &["--collectives", "all-reduce,broadcast", "-o", file]].concat())
    };
    for ranks in ["2", "3", "2"] {
        let output = measure(ranks);
        assert!(output.status.success(), "{output:?}");
        let shown = text(&output.stdout);
        assert!(shown.contains(&format!("world shm 1x{ranks}")), "{shown}");
        assert!(shown.contains("\nnear latency_ns"), "{shown}");
    }
    let written = std::fs::read_to_string(&path).expect("it was written");
    assert_eq!(written.matches("world shm").count(), 2, "one table for a world: {written}");
    let shown = tune(&["--show", file]);
    assert!(shown.status.success(), "{shown:?}");
    let without_notes = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.split('#').next().unwrap_or_default().trim().to_owned()).collect()
    };
    assert_eq!(without_notes(&text(&shown.stdout)), without_notes(&written));

    // Another choice than any that is measured, kept to all the same.
    std::fs::write(&path, "pleach choices 1\nworld shm 1x3\nall-reduce 0 ring put -\n")
        .expect("it can be written");
    let bench = |ranks: &str| {
        let mut command = pleach();
        command.env("PLEACH_CHOICES", &path);
        command.args([
            "bench",
            "--fabric",
            "shm",
            "--sizes",
            "8,64K",
            "--iterations",
            "5",
            "--json",
            "--ranks",
            ranks,
        ]);
        finish(command)
    };
    let output = bench("3");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).matches("\"algorithm\":\"ring\"").count(), 2, "{output:?}");
    let output = bench("2");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("shm 1x2 (hosts x ranks) is not among shm 1x3"), "{output:?}");
}

#[test]
fn a_bad_file_is_told_by_its_line_and_is_not_overwritten() {
    let folder = Folder::new("tune-bad");
    let path = folder.0.join("choices");
    let file = path.to_str().expect("a plain name");
    let bad = "pleach choices 1\nworld shm 1x2\nall-reduce 0 chain put -\n";
    std::fs::write(&path, bad).expect("it can be written");
    for arguments in [&["--show", file][..], &["--fabric", "shm", "--max", "8", "--time", "1", "-o", file]] {
        let output = tune(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains("line 3: 'chain' is no algorithm"), "{output:?}");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), bad);
}

#[test]
fn what_is_chosen_without_measurements_can_be_shown() {
    let output = tune(&["--predicted", "--ranks", "4", "--fabric", "tcp", "--max", "1M"]);
    assert!(output.status.success(), "{output:?}");
    let shown = text(&output.stdout);
    assert!(shown.starts_with("world tcp 1x4\n") && shown.contains("\nall-reduce "), "{shown}");
    assert!(!shown.contains("mapped"), "sockets map nothing: {shown}");
    let output = tune(&["--predicted", "--ranks", "1"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
