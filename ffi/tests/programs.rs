//! Programs in C and C++ that use the library as their authors would: compiled with all warnings as
//! errors, linked with the static and with the shared library, and run on several ranks.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pleach_transport::clock::now;

/// Longest time that a program may run on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the library is linked.
#[derive(Clone, Copy)]
enum Linked {
    Static,
    Shared,
}

/// The folder of a test, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("pleach-ffi-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a folder of its own");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Where cargo puts the libraries: beside this test.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    test.parent().expect("target/debug/deps").to_owned()
}

fn compiled(folder: &Folder, source: &str, linked: Linked) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = folder.0.join(source.replace('.', "-"));
    let (compiler, standard) = match source.ends_with(".cc") {
        true => ("c++", "-std=c++17"),
        false => ("cc", "-std=c99"),
    };
    let libraries = libraries();
    let mut command = Command::new(compiler);
    command
        .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-I"])
        .arg(crate_folder.join("include"))
        .arg("-o")
        .arg(&program)
        .arg(crate_folder.join("tests/programs").join(source));
    match linked {
        Linked::Static => command.arg(libraries.join("libpleach_ffi.a")).args(["-lpthread", "-ldl", "-lm"]),
        Linked::Shared => {
            command.arg(libraries.join("libpleach_ffi.so")).arg(format!("-Wl,-rpath,{}", libraries.display()))
        }
    };
    let output = command.output().expect("a compiler runs");
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Waits for a program; a program that takes too long is killed and fails.
fn succeeds(what: &str, mut child: Child) {
    let begun = now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child is waited for") {
            break status;
        }
        if now().since(begun) > PATIENCE {
            let _ = child.kill();
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    let output = child.wait_with_output().expect("its output");
    assert!(status.success(), "{what}: {status}: {}", String::from_utf8_lossy(&output.stderr));
}

fn run(program: &Path, ranks: u32, folder: &Folder) {
    let start = |rank: u32| {
        Command::new(program)
            .args([rank.to_string(), ranks.to_string()])
            .arg(folder.0.join(format!("id-of-{ranks}")))
            .env("PLEACH_INTERFACE", "127.0.0.1")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    for (rank, child) in children.into_iter().enumerate() {
        succeeds(&format!("rank {rank} of {ranks}"), child);
    }
}

#[test]
fn every_collective_is_right_in_c_on_two_and_four_ranks() {
    let folder = Folder::new();
    run(&compiled(&folder, "collectives.c", Linked::Static), 2, &folder);
    run(&compiled(&folder, "collectives.c", Linked::Shared), 4, &folder);
}

#[test]
fn failures_are_results_with_their_cause_in_c() {
    let folder = Folder::new();
    run(&compiled(&folder, "failures.c", Linked::Static), 2, &folder);
}

#[test]
fn nonsense_is_an_error_and_no_crash() {
    let folder = Folder::new();
    run(&compiled(&folder, "nonsense.c", Linked::Static), 1, &folder);
}

#[test]
fn nonsense_leaks_nothing_and_reads_nothing_that_is_not_there() {
    let folder = Folder::new();
    let program = compiled(&folder, "nonsense.c", Linked::Static);
    let valgrind = Command::new("valgrind")
        .args(["-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"])
        .arg(program)
        .env("PLEACH_INTERFACE", "127.0.0.1")
        .stderr(Stdio::piped())
        .spawn();
    match valgrind {
        Ok(child) => succeeds("under valgrind", child),
        // In a line of its own, so that it is not taken for a test that passed.
        Err(error) => eprintln!("\nskipped nonsense under valgrind: {error}"),
    }
}

#[test]
fn the_header_is_one_of_cpp_too() {
    let folder = Folder::new();
    run(&compiled(&folder, "header.cc", Linked::Shared), 1, &folder);
}
