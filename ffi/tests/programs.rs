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

/// A source of this folder, or of the examples.
fn source_path(source: &str) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    match source.strip_prefix("examples/") {
        Some(name) => crate_folder.join("../examples").join(name),
        None => crate_folder.join("tests/programs").join(source),
    }
}

fn compiled(folder: &Folder, source: &str, linked: Linked) -> PathBuf {
    let is_cpp = source.ends_with(".cc") || source.ends_with(".cpp");
    let compiler = if is_cpp { ["c++", "-std=c++17"] } else { ["cc", "-std=c99"] };
    compiled_by(&compiler, folder, source, linked).expect("a compiler runs")
}

/// Compiles a program with these first words of the command; `None` without such a compiler.
fn compiled_by(command: &[&str], folder: &Folder, source: &str, linked: Linked) -> Option<PathBuf> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let name = format!("{}-{}", command.concat(), source).replace(['.', '/', '=', '+'], "-");
    let program = folder.0.join(name);
    let libraries = libraries();
    let mut compiler = Command::new(command[0]);
    compiler
        .args(&command[1..])
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-D_POSIX_C_SOURCE=200809L", "-I"])
        .arg(crate_folder.join("include"))
        .arg("-o")
        .arg(&program)
        .arg(source_path(source))
        .arg("-pthread");
    match linked {
        Linked::Static => compiler.arg(libraries.join("libpleach_ffi.a")).args(["-lpthread", "-ldl", "-lm"]),
        Linked::Shared => compiler
            .arg(libraries.join("libpleach_ffi.so"))
            .arg(format!("-Wl,-rpath,{}", libraries.display())),
    };
    let output = match compiler.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        output => output.expect("a compiler runs"),
    };
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    Some(program)
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
    run_with(program, ranks, folder, &[]);
}

/// Runs a program on so many ranks, with these arguments after its own.
fn run_with(program: &Path, ranks: u32, folder: &Folder, arguments: &[&str]) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let id = folder.0.join(format!("id-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let start = |rank: u32| {
        Command::new(program)
            .args([rank.to_string(), ranks.to_string()])
            .arg(&id)
            .args(arguments)
            .env("PLEACH_INTERFACE", "127.0.0.1")
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    all_succeed((0..ranks).map(start).collect());
}

fn all_succeed(children: Vec<Child>) {
    let ranks = children.len();
    for (rank, child) in children.into_iter().enumerate() {
        succeeds(&format!("rank {rank} of {ranks}"), child);
    }
}

/// Runs a program whose ranks find each other by their environment.
fn launch(program: &Path, ranks: u32, folder: &Folder) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let store = folder.0.join(format!("store-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let start = |rank: u32| {
        Command::new(program)
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", ranks.to_string())
            .env("PLEACH_RENDEZVOUS", format!("file://{}", store.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    all_succeed((0..ranks).map(start).collect());
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
    run(&compiled(&folder, "nonsense_device.c", Linked::Shared), 1, &folder);
}

#[test]
fn nonsense_leaks_nothing_and_reads_nothing_that_is_not_there() {
    let folder = Folder::new();
    for source in ["nonsense.c", "nonsense_device.c"] {
        let program = compiled(&folder, source, Linked::Static);
        let valgrind = Command::new("valgrind")
            .args([
                "-q",
                "--error-exitcode=9",
                "--leak-check=full",
                "--errors-for-leak-kinds=definite,indirect",
            ])
            .arg(program)
            .env("PLEACH_INTERFACE", "127.0.0.1")
            .stderr(Stdio::piped())
            .spawn();
        match valgrind {
            Ok(child) => succeeds(&format!("{source} under valgrind"), child),
            // In a line of its own, so that it is not taken for a test that passed.
            Err(error) => eprintln!("\nskipped {source} under valgrind: {error}"),
        }
    }
}

#[test]
fn the_header_is_one_of_cpp_too() {
    let folder = Folder::new();
    run(&compiled(&folder, "header.cc", Linked::Shared), 1, &folder);
}

#[test]
fn devices_put_get_add_and_signal_over_shared_memory_and_sockets() {
    let folder = Folder::new();
    let program = compiled(&folder, "device.c", Linked::Static);
    run_with(&program, 2, &folder, &["shm"]);
    run_with(&program, 2, &folder, &["tcp"]);
    run_with(&program, 3, &folder, &["tcp"]);
}

#[test]
fn memory_is_registered_and_released_and_who_is_late_is_known() {
    let folder = Folder::new();
    let program = compiled(&folder, "memory.c", Linked::Static);
    run_with(&program, 2, &folder, &["shm"]);
    run_with(&program, 2, &folder, &["tcp"]);
    run_with(&program, 4, &folder, &["shm"]);
}

#[test]
fn the_wrapper_of_cpp_works_in_both_standards() {
    let folder = Folder::new();
    run(&compiled(&folder, "wrapper.cc", Linked::Static), 2, &folder);
    let newer = compiled_by(&["c++", "-std=c++20"], &folder, "wrapper.cc", Linked::Shared);
    run(&newer.expect("a compiler runs"), 4, &folder);
}

#[test]
fn the_examples_work_as_they_are() {
    let folder = Folder::new();
    for (source, ranks) in
        [("examples/all_reduce.c", 2), ("examples/all_reduce.cpp", 2), ("examples/tensor_put.c", 3)]
    {
        launch(&compiled(&folder, source, Linked::Shared), ranks, &folder);
    }
}

#[test]
fn clang_takes_what_gcc_takes() {
    let folder = Folder::new();
    for (command, source) in [
        (["clang", "-std=c99"], "collectives.c"),
        (["clang", "-std=c99"], "device.c"),
        (["clang++", "-std=c++17"], "wrapper.cc"),
    ] {
        let Some(program) = compiled_by(&command, &folder, source, Linked::Static) else {
            eprintln!("\nskipped {source} by {}: there is no such compiler", command[0]);
            continue;
        };
        let fabric: &[&str] = if source == "device.c" { &["shm"] } else { &[] };
        run_with(&program, 2, &folder, fabric);
    }
}

#[test]
fn no_address_error_and_no_leak() {
    let folder = Folder::new();
    let sanitized = |source| {
        let command = ["cc", "-std=c99", "-g", "-fsanitize=address,undefined"];
        compiled_by(&command, &folder, source, Linked::Static).expect("a compiler runs")
    };
    run(&sanitized("nonsense.c"), 1, &folder);
    run(&sanitized("nonsense_device.c"), 1, &folder);
    run(&sanitized("collectives.c"), 2, &folder);
    let (memory, device) = (sanitized("memory.c"), sanitized("device.c"));
    for fabric in ["shm", "tcp"] {
        run_with(&memory, 2, &folder, &[fabric]);
        run_with(&device, 2, &folder, &[fabric]);
    }
}

#[test]
fn the_version_of_the_packages_is_that_of_the_crate() {
    let version = env!("CARGO_PKG_VERSION");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |name: &str| std::fs::read_to_string(crate_folder.join(name)).expect("a file of the crate");
    assert!(text("cmake/pleach-config-version.cmake").contains(&format!("PACKAGE_VERSION \"{version}\"")));
    for (name, number) in ["MAJOR", "MINOR", "PATCH"].iter().zip(version.split('.')) {
        assert!(text("include/pleach.h").contains(&format!("#define PLEACH_VERSION_{name} {number}\n")));
    }
}
