//! `pleach tune`: a table that is measured, written, shown and pinned.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::process::Output;

use launcher::{Folder, finish, pleach, wait_until};

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
    let path = folder.0.join("tuning");
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
    std::fs::write(&path, "pleach tuning 1\nworld shm 1x3\nall-reduce 0 ring put -\n")
        .expect("it can be written");
    let bench = |ranks: &str| {
        let mut command = pleach();
        command.env("PLEACH_TUNING", &path);
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
    // A job of another size takes the built-in selection, and one of its ranks says so.
    let output = bench("2");
    assert!(output.status.success(), "{output:?}");
    let errors = text(&output.stderr);
    let warnings: Vec<_> = errors.lines().filter(|line| line.contains("no tuning for shm 1x2")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(&format!("{file} has shm 1x3")), "{errors}");
}

/// At 32 KiB, a variant that carries exactly that size between two ranks is among those that are
/// measured.
#[test]
fn what_just_fits_an_algorithm_for_few_bytes_is_measured() {
    for fabric in ["shm", "tcp"] {
        for ranks in ["2", "3", "4"] {
            let sizes = ["--min", "32K", "--max", "32K", "--time", "1"];
            let which = ["--fabric", fabric, "--ranks", ranks, "--collectives", "reduce"];
            let output = tune(&[&which[..], &sizes].concat());
            assert!(output.status.success(), "{fabric} {ranks}: {output:?}");
            let shown = text(&output.stdout);
            assert!(shown.lines().any(|line| line.starts_with("reduce           32K  ")), "{shown}");
        }
    }
}

/// Tunes every collective in worlds of two to four ranks. Other arguments are left at their
/// defaults.
fn measures_every_collective(fabric: &str) {
    for ranks in ["2", "3", "4"] {
        let output = tune(&["--fabric", fabric, "--ranks", ranks, "--time", "1", "--max", "2M"]);
        assert!(output.status.success(), "{fabric}, {ranks} ranks: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains("all-reduce "), "{fabric}, {ranks} ranks");
    }
}

#[test]
fn every_collective_is_measured_over_shm_in_worlds_of_two_to_four_ranks() {
    measures_every_collective("shm");
}

#[test]
fn every_collective_is_measured_over_tcp_in_worlds_of_two_to_four_ranks() {
    measures_every_collective("tcp");
}

#[test]
fn rows_are_written_as_each_collective_ends() {
    let folder = Folder::new("tune-as-it-goes");
    let path = folder.0.join("tuning");
    let mut command = pleach();
    command.args(["tune", "--fabric", "shm", "--collectives", "barrier,all-reduce", "--time", "1000", "-o"]);
    // The second one takes longer than the test waits.
    let mut child = command
        .arg(&path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let has_barrier = || {
        let Ok(tuning) = std::fs::read_to_string(&path) else { return false };
        assert!(tuning.starts_with("pleach tuning 1\n"), "never half of a file: {tuning}");
        tuning.contains("\nbarrier ")
    };
    wait_until("the first collective is written", has_barrier);
    assert!(child.try_wait().expect("it is ours").is_none(), "it still measures");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let shown = tune(&["--show", path.to_str().expect("a plain name")]);
    assert!(shown.status.success() && !text(&shown.stdout).contains("all-reduce"), "{shown:?}");
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = Folder::new("tune-unwritable");
    let nowhere = folder.0.join("nowhere").join("tuning");
    for path in [nowhere.to_str().expect("a plain name"), folder.0.to_str().expect("a plain name")] {
        let output = tune(&["--fabric", "shm", "-o", path]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains(path) && output.stdout.is_empty(), "{output:?}");
    }
}

#[test]
fn a_bad_file_is_told_by_its_line_and_is_not_overwritten() {
    let folder = Folder::new("tune-bad");
    let path = folder.0.join("tuning");
    let file = path.to_str().expect("a plain name");
    let bad = "pleach tuning 1\nworld shm 1x2\nall-reduce 0 chain put -\n";
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
