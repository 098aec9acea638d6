//! `pleach svm` as people start it.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;
#[path = "skipped/mod.rs"]
mod skipped;

use std::path::Path;
use std::process::{Child, Output, Stdio};

use launcher::{Folder, field, finish, number, pleach, rank_process, signal, status_of, text, wait_until};
use skipped::skip;

fn svm(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.arg("svm").args(arguments);
    finish(command)
}

/// The JSON lines of a run that ends well.
fn lines(arguments: &[&str]) -> Vec<String> {
    let output = svm(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn assert_close(line: &str, name: &str, expected: f64, share: f64) {
    let found = number(line, name);
    assert!((found - expected).abs() <= share * expected.abs(), "{name} is {found}, not {expected}: {line}");
}

const KEYS: [&str; 13] = [
    "ranks",
    "samples",
    "features",
    "iterations",
    "kernel_evaluations",
    "reconstructions",
    "support_vectors",
    "bounded",
    "objective",
    "intercept",
    "accuracy",
    "train_s",
    "us_per_iteration",
];

#[test]
fn ranks_over_every_fabric_find_one_solution_and_print_all_keys() {
    let arguments = ["digits", "--labels", "even", "--gamma", "0.1", "--tolerance", "1e-6"];
    let of_one = lines(&[&arguments[..], &["--ranks", "1"]].concat());
    assert!(number(&of_one[0], "accuracy") > 0.97, "{}", of_one[0]);
    for (fabric, ranks) in [("shm", "2"), ("tcp", "3")] {
        let line = lines(&[&arguments[..], &["--ranks", ranks, "--fabric", fabric]].concat()).concat();
        let keys: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        assert_eq!(keys, KEYS, "{line}");
        assert_eq!(field(&line, "ranks"), ranks);
        for key in &KEYS[1..11] {
            assert_eq!(field(&line, key), field(&of_one[0], key), "{fabric}, {ranks} ranks: {key}");
        }
    }
}

#[test]
fn shrinking_saves_kernel_values_and_changes_no_solution() {
    let arguments = ["digits", "--labels", "even", "--gamma", "0.1", "--tolerance", "1e-6", "--cache", "0"];
    let shrinks = ["--shrink", "none", "--shrink", "5%:single", "--shrink", "2:multi", "--ranks", "2"];
    let all = lines(&[&arguments[..], &shrinks].concat());
    let evaluations: Vec<f64> = all.iter().map(|line| number(line, "kernel_evaluations")).collect();
    assert!(evaluations[1] <= 0.6 * evaluations[0], "{evaluations:?}");
    for line in &all {
        assert_close(line, "objective", number(&all[0], "objective"), 1e-6);
        assert_eq!(field(line, "support_vectors"), field(&all[0], "support_vectors"));
    }
    assert_eq!(field(&all[0], "reconstructions"), "0");
    assert!(number(&all[1], "reconstructions") >= 1.0);
    let output = svm(&[&arguments[..5], &shrinks].concat());
    let out = text(&output.stdout);
    assert!(out.contains("# 5%:single saved ") && out.contains("us/iter"), "{out}");
}

#[test]
fn all_digits_are_read_one_against_one_and_curves_are_drawn() {
    let folder = Folder::new("svm-curves");
    let (model, curves) = (folder.0.join("model"), folder.0.join("curves"));
    let [model, curves] = [&model, &curves].map(|path| path.to_str().expect("is text"));
    let line =
        lines(&["digits", "--gamma", "0.1", "--c", "5", "--output", model, "--curves", curves]).concat();
    assert!(number(&line, "accuracy") > 0.98, "{line}");
    assert_eq!(
        line.split("\"intercept\":[").nth(1).map(|rest| rest
            .split(']')
            .next()
            .unwrap_or("")
            .split(',')
            .count()),
        Some(45)
    );
    let written = std::fs::read_to_string(model).expect("was written");
    assert!(written.contains("nr_class 10\n") && written.contains("label 0 1 2 3 4 5 6 7 8 9\n"));
    assert!(
        std::fs::read_to_string(Path::new(curves).join("curves.svg"))
            .expect("was drawn")
            .contains("<polyline")
    );
    assert!(
        std::fs::read_to_string(Path::new(curves).join("curves.csv")).expect("was written").lines().count()
            > 100
    );
}

#[test]
fn files_are_trained_on_and_judged_by_another() {
    let folder = Folder::new("svm-files");
    let write = |name: &str, text: &str| {
        let path = folder.0.join(name);
        std::fs::write(&path, text).expect("can be written");
        path.to_str().expect("is text").to_owned()
    };
    let rows = |from: i32| -> String {
        (from..from + 40)
            .map(|at| format!("{} 1:{} 2:{}\n", if at % 3 == 0 { 1 } else { -1 }, at % 3, at % 7))
            .collect()
    };
    let (train, test) = (write("train", &rows(0)), write("test", &rows(100)));
    let line = lines(&[&train, "--test", &test, "--c", "100", "--ranks", "3"]).concat();
    assert_eq!((field(&line, "accuracy"), field(&line, "samples")), ("1.0", "40"), "{line}");
    for (arguments, part) in [
        (&["/nonexistent/x"][..], "samples not read: /nonexistent/x"),
        (&[&write("bad", "1 1:1\n-1 2:x\n")], "line 2, column 6: the value 'x'"),
        (&[&write("one", "1 1:1\n1 2:2\n")], "all samples have the label 1"),
        (&[&write("empty", "")], "no samples"),
        (&[&train, "--ranks", "41"], "40 samples for 41 ranks"),
        (&[&train, "--test", &write("wide", "1 9:1\n")], "features"),
        (&[&train, "--c", "0"], "C is 0"),
        (&[&train, "--gamma", "-1"], "gamma is -1"),
        (&[&train, "--shrink", "sometimes"], "a share such as 5%"),
        (&[&train, "--labels", "odd"], "give 'even'"),
        (&["/"], "t10k-images-idx3-ubyte"),
    ] {
        let output = svm(arguments);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{arguments:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(part), "{arguments:?}: {error}");
    }
    let output = svm(&[&train, "--output", "/dev/full"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("model not written: /dev/full") && error.contains("No space"), "{error}");
}

/// Two ranks in a training that takes long, and their processes by rank.
fn long_training(more: &[&str]) -> (Child, [u32; 2]) {
    let mut command = pleach();
    command.args(["svm", "digits", "--c", "1000", "--gamma", "0.001", "--tolerance", "1e-9", "--cache", "0"]);
    command.args(["--shrink", "none", "--ranks", "2"]).args(more);
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("pleach starts");
    // A rank that catches SIGINT has joined and is about to train.
    let catches_interrupts = |process: &u32| {
        let status = status_of(*process);
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t")).unwrap_or("0");
        u64::from_str_radix(caught, 16).is_ok_and(|mask| mask & 2 != 0)
    };
    let rank_process = |rank| rank_process(launcher.id(), rank).filter(catches_interrupts);
    wait_until("two ranks train", || rank_process(0).is_some() && rank_process(1).is_some());
    let ranks = [0, 1].map(|rank| rank_process(rank).expect("it trains"));
    (launcher, ranks)
}

#[test]
fn an_interrupt_leaves_the_model_so_far() {
    let folder = Folder::new("svm-interrupt");
    let model = folder.0.join("model");
    let (launcher, _) = long_training(&["--output", model.to_str().expect("is text")]);
    signal(launcher.id(), rustix::process::Signal::INT);
    let output = launcher.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("SIGINT"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("us/iter"), "{}", text(&output.stdout));
    assert!(std::fs::read_to_string(model).expect("was written").starts_with("svm_type c_svc\n"));
}

#[test]
fn a_rank_that_is_killed_in_a_training_ends_it_with_its_name() {
    let (launcher, ranks) = long_training(&[]);
    signal(ranks[1], rustix::process::Signal::KILL);
    let output = launcher.wait_with_output().expect("it ends");
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("rank 1") && error.contains("SIGKILL") && output.stdout.is_empty(), "{error}");
}

#[test]
fn mnist_has_the_objective_and_the_support_vectors_that_libsvm_finds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/mnist");
    if !folder.exists() {
        return skip("no MNIST beside the repository");
    }
    let folder = folder.to_str().expect("is text");
    // scikit-learn 1.9.1, which is LIBSVM: training-facts of the project, section 6.
    let line = lines(&[folder, "--labels", "even", "--c", "10", "--gamma", "0.02", "--ranks", "2"]).concat();
    assert_eq!((field(&line, "samples"), field(&line, "bounded")), ("8000", "0"));
    assert_close(&line, "objective", -1_010.390_75, 1e-6);
    assert_close(&line, "support_vectors", 1973.0, 0.003);
    assert_close(&line, "intercept", -0.390_42, 1e-2);
    assert!(number(&line, "accuracy") > 0.97, "{line}");
}
