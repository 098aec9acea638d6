//! Models and samples go to LIBSVM and come from it: the tools `svm-train` and `svm-predict`, where
//! they are installed (Debian: libsvm-tools).

#[path = "../../tests/skipped/mod.rs"]
mod skipped;

use std::fmt::Write as _;
use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;

use pleach_collectives::{Group, Options};
use pleach_training::svm::{Kernel, Model, Parameters, Samples, Svm, libsvm};
use pleach_transport::rendezvous::World;
use pleach_vocabulary::random::Random;
use skipped::skip;

/// A folder that goes away with the test, however it ends.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_there(tool: &str) -> bool {
    // Without arguments the tools print how they are used.
    Command::new(tool).output().is_ok()
}

fn run(tool: &str, arguments: &[&str], files: &[&Path]) -> String {
    let output = Command::new(tool).args(arguments).args(files).output().expect("it is installed");
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Points around the centres of three classes, which overlap, as LIBSVM's text.
fn points(count: usize, seed: u64) -> String {
    let mut random = Random::new(seed);
    let mut uniform = || random.below(1000) as f64 / 500.0 - 1.0;
    let mut text = String::new();
    for at in 0..count {
        let class = at % 3;
        write!(text, "{}", [4, -2, 7][class]).expect("into a string");
        for feature in 0..5 {
            let centre = if feature % 3 == class { 0.7 } else { 0.0 };
            write!(text, " {}:{:.3}", feature + 1, centre + uniform()).expect("into a string");
        }
        text.push('\n');
    }
    text
}

fn samples(text: &str) -> (Samples, Vec<i32>) {
    let read = libsvm::read(text.as_bytes(), |_| true).expect("is LIBSVM's text");
    (read.samples, read.labels)
}

/// The labels that a file of `svm-predict` holds, a line each.
fn labels(path: &Path) -> Vec<i32> {
    let text = fs::read_to_string(path).expect("was written");
    text.lines().map(|line| line.trim().parse().expect("a label")).collect()
}

fn model_of(path: &Path) -> Model {
    let file = fs::File::open(path).expect("was written");
    libsvm::read_model(BufReader::new(file)).expect("is a model of LIBSVM")
}

#[test]
fn libsvm_predicts_by_our_model_as_we_do_and_we_by_its_model_as_it_does() {
    for tool in ["svm-train", "svm-predict"] {
        if !is_there(tool) {
            return skip(format!("{tool} of LIBSVM is not installed"));
        }
    }
    let folder = Folder(std::env::temp_dir().join(format!("pleach-libsvm-{}", std::process::id())));
    fs::create_dir_all(&folder.0).expect("a temporary folder");
    let path = |name: &str| folder.0.join(name);
    let (train, test) = (points(300, 1), points(400, 2));
    fs::write(path("train"), &train).expect("is written");
    fs::write(path("test"), &test).expect("is written");
    let ((train, train_labels), (test, _)) = (samples(&train), samples(&test));
    let group = Group::join(&Options::new(World::alone())).expect("a rank alone joins");
    for (kernel, options) in [
        (Kernel::Rbf { gamma: 0.5 }, vec!["-t", "2", "-g", "0.5"]),
        (Kernel::Linear, vec!["-t", "0"]),
        (
            Kernel::Polynomial { degree: 3, gamma: 0.5, offset: 1.0 },
            vec!["-t", "1", "-d", "3", "-g", "0.5", "-r", "1"],
        ),
    ] {
        let parameters = Parameters { c: 2.0, tolerance: 1e-6, ..Parameters::new(kernel) };
        let ours = Svm::train(&group, &train, &train_labels, &parameters).expect("is trained");
        libsvm::write_model(&ours, fs::File::create(path("ours")).expect("a file")).expect("is written");
        run("svm-predict", &[], &[&path("test"), &path("ours"), &path("by-ours")]);
        let predicted = ours.predict(&test).expect("as many features");
        assert_eq!(labels(&path("by-ours")), predicted, "{kernel:?}: our model, read by svm-predict");

        let options = [&options[..], &["-c", "2", "-e", "0.000001", "-q"]].concat();
        run("svm-train", &options, &[&path("train"), &path("theirs")]);
        run("svm-predict", &[], &[&path("test"), &path("theirs"), &path("by-theirs")]);
        let theirs = model_of(&path("theirs"));
        let by_theirs = theirs.predict(&test).expect("as many features");
        assert_eq!(by_theirs, labels(&path("by-theirs")), "{kernel:?}: the model of svm-train, read here");
        assert_eq!(theirs.support_vectors(), ours.support_vectors(), "{kernel:?}");
        let differ = by_theirs.iter().zip(&predicted).filter(|(left, right)| left != right).count();
        // A decision next to zero may go either way: samples are kept as f32 here.
        assert!(differ <= 4, "{kernel:?}: {differ} of 400 predictions differ");
    }
}
