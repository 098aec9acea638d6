//! `pleach train` as people start it.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::process::Output;

use launcher::{field, finish, number, pleach, text};

fn train(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.arg("train").args(arguments);
    finish(command)
}

#[test]
fn ranks_learn_to_read_digits_and_stay_one_network_over_every_fabric() {
    for (fabric, ranks) in [("shm", 4), ("tcp", 2)] {
        let output = train(&["--ranks", &ranks.to_string(), "--fabric", fabric, "--epochs", "12", "--json"]);
        assert!(output.status.success(), "{fabric}: {}", text(&output.stderr));
        let lines: Vec<&str> = text(&output.stdout).lines().collect();
        assert_eq!(lines.len(), ranks + 1, "{fabric}: {lines:?}");
        for (rank, line) in lines[..ranks].iter().enumerate() {
            assert_eq!(field(line, "rank"), rank.to_string());
            assert!(number(line, "steps_per_s") > 0.0, "{line}");
            assert!((0.0..=1.0).contains(&number(line, "communication_share")), "{line}");
        }
        let last = lines[ranks];
        assert!(number(last, "test_accuracy") >= 0.95, "{fabric}: {last}");
        assert_eq!(field(last, "ranks"), ranks.to_string());
        assert_eq!(field(last, "parameters_equal"), "true", "{fabric}: {last}");
        assert_eq!(field(last, "matches_one_rank"), "true", "{fabric}: {last}");
    }
}

#[test]
fn more_ranks_than_processors_and_batches_that_they_do_not_divide_are_no_trouble() {
    let output = train(&["--ranks", "7", "--epochs", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let last = text(&output.stdout).lines().last().expect("prints");
    assert_eq!(
        (field(last, "parameters_equal"), field(last, "matches_one_rank")),
        ("true", "true"),
        "{last}"
    );
}

#[test]
fn a_person_is_told_speeds_checks_and_accuracy_and_sees_no_bar_in_a_pipe() {
    let output = train(&["--ranks", "2", "--epochs", "3"]);
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && error.is_empty(), "{error}");
    for part in ["steps/s", "communicating", "bit for bit: yes", "up to rounding: yes", "test accuracy 0."] {
        assert!(out.contains(part), "no '{part}' in\n{out}");
    }
}

#[test]
fn what_was_typed_wrongly_is_one_line_and_status_2() {
    for (arguments, part) in [
        (&["--data", "/nonexistent"][..], "/nonexistent/t10k-images-idx3-ubyte"),
        (&["--fabric", "carrier-pigeon"], "there are shm tcp shm+tcp verbs shm+verbs auto"),
        (&["--ranks", "0"], "--ranks 0"),
        (&["--epochs", "0"], "--epochs"),
    ] {
        let output = train(arguments);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{arguments:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(part), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}
