//! Programs in C and C++ that use the library as their authors would: compiled with all warnings as
//! errors, linked with the static and with the shared library, and run on several ranks. What the
//! functions return is compared with what their comments in the header say.
//!
//! Each program is built once for all tests of a run. Most are linked with the shared library: the
//! static one takes the linker 0.8 s a program.
//!
//! `PLEACH_PROGRAM_PREFIX` is put before the command of every program: `.ci/nightly` runs all of
//! them under valgrind so.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_transport::clock::now;
use skipped::skip;

#[path = "../../tests/skipped/mod.rs"]
mod skipped;

/// Longest time that a program may run on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// How much longer a program may take under [`PREFIX_VARIABLE`]: valgrind makes it fifty times
/// slower.
const PREFIX_PATIENCE: u32 = 10;

/// The words before the command of each program that runs, as of valgrind; none by default.
const PREFIX_VARIABLE: &str = "PLEACH_PROGRAM_PREFIX";
static PREFIX: LazyLock<Vec<String>> = LazyLock::new(|| {
    let words = std::env::var(PREFIX_VARIABLE).unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
});

/// The fabrics of tests that name one: valgrind 3.19 does not know `pidfd_open`, without which
/// there is no shared memory.
fn fabrics() -> &'static [&'static str] {
    if PREFIX.is_empty() { &["shm", "tcp"] } else { &["tcp"] }
}

/// As [`fabrics`], of the tensor exchange, which also goes without any.
fn exchange_fabrics() -> &'static [&'static str] {
    if PREFIX.is_empty() { &["shm", "none"] } else { &["none"] }
}

/// The command of a program, behind the prefix.
fn command_of(program: &Path) -> Command {
    let Some((first, further)) = PREFIX.split_first() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(further).arg(program);
    command
}

/// The signal of `raise(SIGKILL)`.
const SIGKILL: i32 = 9;

/// How the library is linked.
#[derive(Clone, Copy, Debug)]
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

fn compiled(source: &str, linked: Linked) -> PathBuf {
    let is_cpp = source.ends_with(".cc") || source.ends_with(".cpp");
    let compiler = if is_cpp { ["c++", "-std=c++17"] } else { ["cc", "-std=c99"] };
    compiled_by(&compiler, source, linked).expect("a compiler runs")
}

/// Compiles a program with these first words of the command, once; `None` without such a compiler.
fn compiled_by(command: &[&str], source: &str, linked: Linked) -> Option<PathBuf> {
    static BUILT: Mutex<BTreeMap<String, Option<PathBuf>>> = Mutex::new(BTreeMap::new());
    let name = format!("{}-{}-{linked:?}", command.concat(), source).replace(['.', '/', '=', '+', ','], "-");
    // Under the lock: one compiler at a time is what two processors have room for beside the ranks.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = built.get(&name) {
        return known.clone();
    }
    let program = build(command, &name, source, linked);
    built.insert(name, program.clone());
    program
}

fn build(command: &[&str], name: &str, source: &str, linked: Linked) -> Option<PathBuf> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (program, part) = (folder.join(name), folder.join(format!("{name}.{}", std::process::id())));
    let libraries = libraries();
    let mut compiler = Command::new(command[0]);
    compiler
        .args(&command[1..])
        .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-D_POSIX_C_SOURCE=200809L", "-I"])
        .arg(crate_folder.join("include"))
        .arg("-o")
        .arg(&part)
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
    std::fs::rename(&part, &program).expect("the program gets its name");
    Some(program)
}

/// The comment of each function of the header.
static COMMENTS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/pleach.h");
    let (mut comments, mut comment) = (BTreeMap::new(), String::new());
    for line in std::fs::read_to_string(path).expect("the header").lines() {
        if let Some(text) = line.strip_prefix("//") {
            comment += text;
            continue;
        }
        let function = line.split_once('(').and_then(|(before, _)| before.rsplit([' ', '*']).next());
        if let Some(name) = function.filter(|name| name.starts_with("pleach") && !line.starts_with('#')) {
            comments.insert(name.to_owned(), std::mem::take(&mut comment));
        }
        comment.clear();
    }
    comments
});

/// Whether each result that a program has noted is one that the comment of its function names.
fn are_documented(folder: &Folder) {
    let noted = std::fs::read_to_string(folder.0.join("seen")).unwrap_or_default();
    for (function, result) in
        noted.lines().collect::<BTreeSet<_>>().iter().filter_map(|line| line.split_once(' '))
    {
        let name = match result.parse() {
            Ok(1) => "pleachUnhandledCudaError",
            Ok(2) => "pleachSystemError",
            Ok(4) => "pleachInvalidArgument",
            Ok(5) => "pleachInvalidUsage",
            Ok(6) => "pleachRemoteError",
            Ok(7) => "pleachInProgress",
            Ok(8) => "pleachTimeout",
            Ok(9) => "pleachExpelled",
            Ok(10) => "pleachNoQuorum",
            Ok(11) => "pleachTooFew",
            Ok(12) => "pleachStepFailed",
            Ok(13) => "pleachLeft",
            Ok(14) => "pleachDiverged",
            Ok(number @ 0..) => panic!("{function} has returned {number}"),
            _ => panic!("'{result}' of {function} is no result"),
        };
        let comment = COMMENTS.get(function).unwrap_or_else(|| panic!("{function} is not in the header"));
        assert!(comment.contains(name), "{function} has returned {name}, which its comment does not name");
    }
}

/// Waits for a program.
fn succeeds(what: &str, child: Child) {
    all_end(vec![(what.to_owned(), false, child)]);
}

/// Waits for programs, each with its name and whether it kills itself. One that fails or takes too
/// long ends all: the others may wait for it.
fn all_end(programs: Vec<(String, bool, Child)>) {
    let begun = now();
    let (mut running, mut failures) = (Vec::new(), Vec::new());
    for (what, kills_itself, mut child) in programs {
        let errors = read_errors(&mut child);
        running.push((what, kills_itself, child, errors));
    }
    let patience = if PREFIX.is_empty() { PATIENCE } else { PATIENCE * PREFIX_PATIENCE };
    while !running.is_empty() {
        std::thread::park_timeout(Duration::from_millis(5));
        if !failures.is_empty() || now().since(begun) > patience {
            for (_, _, child, _) in &mut running {
                let _ = child.kill();
            }
        }
        let mut left = Vec::new();
        for (what, kills_itself, mut child, errors) in running {
            let Some(status) = child.try_wait().expect("a child is waited for") else {
                left.push((what, kills_itself, child, errors));
                continue;
            };
            let is_right = if kills_itself { status.signal() == Some(SIGKILL) } else { status.success() };
            if !is_right {
                let said = errors.join().expect("its errors are read");
                failures.push(format!("{what}: {status}: {}", String::from_utf8_lossy(&said)));
            }
        }
        running = left;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Reads the standard error of a program while the program runs: a program that fills the pipe
/// waits. Valgrind writes a hundred kilobytes about system calls that it does not know.
fn read_errors(child: &mut Child) -> JoinHandle<Vec<u8>> {
    let mut errors = child.stderr.take().expect("programs start with a pipe for their errors");
    std::thread::spawn(move || {
        let mut said = Vec::new();
        errors.read_to_end(&mut said).expect("a pipe is read");
        said
    })
}

fn run(program: &Path, ranks: u32, folder: &Folder) {
    run_with(program, ranks, folder, &[]);
}

/// Runs a program on so many ranks, with these arguments after its own.
fn run_with(program: &Path, ranks: u32, folder: &Folder, arguments: &[&str]) {
    all_succeed(started(program, ranks, folder, arguments));
    are_documented(folder);
}

/// As [`run_with`], of a program whose last rank kills itself.
fn run_killed(program: &Path, ranks: u32, folder: &Folder, arguments: &[&str]) {
    let children = (1..).zip(started(program, ranks, folder, arguments));
    all_end(
        children
            .map(|(next, child)| (format!("rank {} of {ranks}", next - 1), next == ranks, child))
            .collect(),
    );
    are_documented(folder);
}

fn started(program: &Path, ranks: u32, folder: &Folder, arguments: &[&str]) -> Vec<Child> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let id = folder.0.join(format!("id-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let start = |rank: u32| {
        command_of(program)
            .args([rank.to_string(), ranks.to_string()])
            .arg(&id)
            .args(arguments)
            .env("PLEACH_INTERFACE", "127.0.0.1")
            .env("PLEACH_SEEN", folder.0.join("seen"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    (0..ranks).map(start).collect()
}

fn all_succeed(children: Vec<Child>) {
    let ranks = children.len();
    let named = |(rank, child)| (format!("rank {rank} of {ranks}"), false, child);
    all_end(children.into_iter().enumerate().map(named).collect());
}

/// Runs a program whose ranks find each other by their environment.
fn launch(program: &Path, ranks: u32, folder: &Folder) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let store = folder.0.join(format!("store-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let start = |rank: u32| {
        command_of(program)
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
    run(&compiled("collectives.c", Linked::Static), 2, &folder);
    run(&compiled("collectives.c", Linked::Shared), 4, &folder);
}

#[test]
fn partial_all_reduce_is_right_in_c_when_nobody_is_late_and_when_a_rank_is() {
    let folder = Folder::new();
    run(&compiled("partial.c", Linked::Shared), 2, &folder);
    run(&compiled("partial.c", Linked::Shared), 4, &folder);
}

#[test]
fn windows_are_read_and_written_in_c() {
    let folder = Folder::new();
    let program = compiled("window.c", Linked::Shared);
    for fabric in fabrics() {
        run_with(&program, 2, &folder, &[fabric]);
        run_with(&program, 4, &folder, &[fabric]);
    }
}

#[test]
fn a_session_goes_on_in_c_when_a_process_is_killed() {
    let folder = Folder::new();
    let program = compiled("session.c", Linked::Shared);
    for fabric in fabrics() {
        run_killed(&program, 3, &folder, &[fabric]);
        run_killed(&program, 4, &folder, &[fabric]);
    }
}

#[test]
fn a_process_joins_a_session_in_c_and_reads_the_states_behind_its_first_step() {
    let folder = Folder::new();
    let program = compiled("session_joins.c", Linked::Shared);
    for fabric in fabrics() {
        run_with(&program, 3, &folder, &[fabric]);
    }
}

#[test]
fn failures_are_results_with_their_cause_in_c() {
    let folder = Folder::new();
    run(&compiled("failures.c", Linked::Shared), 2, &folder);
    run(&compiled("failures.c", Linked::Shared), 4, &folder);
}

#[test]
fn calls_of_a_forked_child_are_errors_and_the_rank_goes_on() {
    if !PREFIX.is_empty() {
        skip("valgrind takes for leaks what a forked child leaves to its parent");
        return;
    }
    let folder = Folder::new();
    run(&compiled("forked.c", Linked::Shared), 2, &folder);
    run(&compiled("forked.c", Linked::Shared), 4, &folder);
}

#[test]
fn tensors_by_key_come_between_programs_in_place_and_inline() {
    let folder = Folder::new();
    for fabric in exchange_fabrics() {
        run_with(&compiled("exchange.c", Linked::Static), 2, &folder, &[fabric]);
        run_with(&compiled("exchange.c", Linked::Shared), 3, &folder, &[fabric]);
    }
}

#[test]
fn a_peer_that_is_killed_fails_its_receives_and_leaves_what_was_received() {
    let folder = Folder::new();
    for fabric in exchange_fabrics() {
        run_killed(&compiled("exchange_killed.c", Linked::Shared), 2, &folder, &[fabric]);
        run_killed(&compiled("exchange_killed.c", Linked::Shared), 3, &folder, &[fabric]);
    }
}

#[test]
fn nonsense_is_an_error_and_no_crash() {
    let folder = Folder::new();
    run(&compiled("nonsense_exchange.c", Linked::Shared), 1, &folder);
    run(&compiled("nonsense.c", Linked::Shared), 1, &folder);
    run(&compiled("nonsense_device.c", Linked::Shared), 1, &folder);
    run(&compiled("nonsense_session.c", Linked::Shared), 1, &folder);
}

#[test]
fn a_call_that_waits_ends_when_another_thread_aborts_or_destroys() {
    let folder = Folder::new();
    let program = compiled("interrupted.c", Linked::Shared);
    run(&program, 2, &folder);
    run(&program, 4, &folder);
}

#[test]
fn waits_on_a_device_end_when_it_is_closed_and_when_the_peer_is_killed() {
    let folder = Folder::new();
    let program = compiled("interrupted_device.c", Linked::Shared);
    for fabric in fabrics() {
        run_killed(&program, 2, &folder, &[fabric]);
        run_killed(&program, 4, &folder, &[fabric]);
    }
}

#[test]
fn threads_may_use_every_function_while_others_end_what_they_use() {
    let folder = Folder::new();
    run(&compiled("races.c", Linked::Shared), 1, &folder);
    run(&compiled("races_session.c", Linked::Shared), 1, &folder);
    for fabric in exchange_fabrics() {
        run_with(&compiled("races_exchange.c", Linked::Shared), 1, &folder, &[fabric]);
    }
}

#[test]
fn every_function_is_called_with_nonsense_from_several_threads_and_by_the_fuzzer() {
    let text = |name: &str| std::fs::read_to_string(source_path(name)).expect("a source");
    let nonsense = ["", "_device", "_exchange", "_session"];
    let nonsense = nonsense.map(|part| text(&format!("nonsense{part}.c"))).concat();
    let races = text("races.c") + &text("races_exchange.c") + &text("races_session.c");
    let fuzzed = ["c_calls.rs", "c_calls/exchange.rs", "c_calls/session.rs"];
    let fuzzed = fuzzed.map(|name| text(&format!("../../../fuzz/fuzz_targets/{name}"))).concat();
    assert!(COMMENTS.len() > 50, "{} functions", COMMENTS.len());
    for function in COMMENTS.keys() {
        let call = format!("{function}(");
        assert!(nonsense.contains(&call), "{function} is not called with nonsense");
        assert!(races.contains(&call), "{function} is not called from several threads");
        assert!(fuzzed.contains(&call), "{function} is not called by the fuzz target c_calls");
    }
}

#[test]
fn every_comment_says_ownership_threads_blocking_and_results() {
    for (function, comment) in &*COMMENTS {
        for part in [" Ownership: ", " Threads: ", " Blocks: ", " Returns: "] {
            assert!(comment.contains(part), "the comment of {function} has no{part}");
        }
        if !function.starts_with("pleachGetErrorString") && !function.starts_with("pleachGetLastError") {
            for result in ["pleachSuccess", "pleachInternalError"] {
                assert!(comment.contains(result), "the comment of {function} does not name {result}");
            }
        }
    }
}

#[test]
fn nonsense_leaks_nothing_and_reads_nothing_that_is_not_there() {
    if !PREFIX.is_empty() {
        skip(format!("{PREFIX_VARIABLE} stands before every program already"));
        return;
    }
    for source in ["nonsense.c", "nonsense_device.c", "nonsense_exchange.c", "nonsense_session.c"] {
        let program = compiled(source, Linked::Shared);
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
            Err(error) => skip(format_args!("valgrind: {error}")),
        }
    }
}

#[test]
fn the_header_is_one_of_cpp_too() {
    let folder = Folder::new();
    run(&compiled("header.cc", Linked::Shared), 1, &folder);
}

#[test]
fn devices_put_get_add_and_signal_over_shared_memory_and_sockets() {
    let folder = Folder::new();
    let program = compiled("device.c", Linked::Static);
    for fabric in fabrics() {
        run_with(&program, 2, &folder, &[fabric]);
        run_with(&program, 3, &folder, &[fabric]);
    }
}

#[test]
fn memory_is_registered_and_released_and_who_is_late_is_known() {
    let folder = Folder::new();
    let program = compiled("memory.c", Linked::Shared);
    for fabric in fabrics() {
        run_with(&program, 2, &folder, &[fabric]);
        run_with(&program, 4, &folder, &[fabric]);
    }
}

#[test]
fn the_wrapper_of_cpp_works_in_both_standards() {
    let folder = Folder::new();
    run(&compiled("wrapper.cc", Linked::Static), 2, &folder);
    let newer = compiled_by(&["c++", "-std=c++20"], "wrapper.cc", Linked::Shared);
    run(&newer.expect("a compiler runs"), 4, &folder);
    let device = compiled("wrapper_device.cc", Linked::Shared);
    for fabric in fabrics() {
        run_with(&device, 2, &folder, &[fabric]);
    }
    if PREFIX.is_empty() {
        run_with(&device, 4, &folder, &["shm"]);
    }
    let session = compiled("wrapper_session.cc", Linked::Shared);
    run(&session, 2, &folder);
    run(&session, 3, &folder);
    let exchange = compiled_by(&["c++", "-std=c++20"], "wrapper_exchange.cc", Linked::Shared);
    for program in [compiled("wrapper_exchange.cc", Linked::Shared), exchange.expect("a compiler runs")] {
        for fabric in exchange_fabrics() {
            run_with(&program, 1, &folder, &[fabric]);
        }
    }
}

const EXAMPLES: [&str; 3] = ["examples/all_reduce.c", "examples/all_reduce.cpp", "examples/tensor_put.c"];

#[test]
fn the_examples_work_as_they_are() {
    let folder = Folder::new();
    for source in EXAMPLES {
        launch(&compiled(source, Linked::Shared), 2, &folder);
        launch(&compiled(source, Linked::Shared), 3, &folder);
    }
    exchange_example(&compiled(EXCHANGE_EXAMPLE, Linked::Shared));
}

const EXCHANGE_EXAMPLE: &str = "examples/tensor_exchange.c";

/// Runs the example of the tensor exchange, whose sender prints its address.
fn exchange_example(program: &Path) {
    let start = |arguments: &[&str]| {
        let mut command = command_of(program);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program starts")
    };
    let mut sender = start(&[]);
    let mut lines = BufReader::new(sender.stdout.take().expect("is piped")).lines();
    let address = lines.next().expect("the sender prints its address").expect("as text");
    let mut receiver = start(&[&address]);
    let output = receiver.stdout.take().expect("is piped");
    all_succeed(vec![sender, receiver]);
    let steps = BufReader::new(output).lines().filter(|line| {
        line.as_ref().is_ok_and(|line| line.starts_with("step ") && line.contains("1024 x 256"))
    });
    assert_eq!(steps.count(), 10);
}

#[test]
fn clang_takes_what_gcc_takes() {
    let folder = Folder::new();
    for (command, source) in [
        (["clang", "-std=c99"], "collectives.c"),
        (["clang", "-std=c99"], "device.c"),
        (["clang", "-std=c99"], "exchange.c"),
        (["clang", "-std=c99"], "forked.c"),
        (["clang", "-std=c99"], "partial.c"),
        (["clang", "-std=c99"], "window.c"),
        (["clang++", "-std=c++17"], "wrapper.cc"),
        (["clang++", "-std=c++17"], "wrapper_device.cc"),
        (["clang++", "-std=c++17"], "wrapper_exchange.cc"),
    ] {
        if source == "forked.c" && !PREFIX.is_empty() {
            continue; // see the test of forked children
        }
        let Some(program) = compiled_by(&command, source, Linked::Shared) else {
            return skip(format_args!("there is no {}", command[0]));
        };
        let fabric = match source {
            _ if source.contains("device") || source == "window.c" => &fabrics()[..1],
            _ if source.contains("exchange") => &exchange_fabrics()[..1],
            _ => &[],
        };
        run_with(&program, 2, &folder, fabric);
    }
}

#[test]
fn no_address_error_and_no_leak() {
    if !PREFIX.is_empty() {
        skip(format!("its programs do not run behind {PREFIX_VARIABLE}"));
        return;
    }
    let folder = Folder::new();
    let sanitized = |source: &str| {
        let is_cpp = source.ends_with(".cc") || source.ends_with(".cpp");
        let compiler = if is_cpp { ["c++", "-std=c++17"] } else { ["cc", "-std=c99"] };
        let command = [compiler[0], compiler[1], "-g", "-fsanitize=address,undefined"];
        compiled_by(&command, source, Linked::Shared).expect("a compiler runs")
    };
    for source in ["nonsense.c", "nonsense_device.c", "nonsense_exchange.c", "nonsense_session.c"] {
        run(&sanitized(source), 1, &folder);
    }
    for source in ["races.c", "races_session.c"] {
        run(&sanitized(source), 1, &folder);
    }
    run_with(&sanitized("window.c"), 4, &folder, &["shm"]);
    run_with(&sanitized("window.c"), 2, &folder, &["tcp"]);
    run_killed(&sanitized("session.c"), 3, &folder, &["shm"]);
    for source in ["collectives.c", "failures.c", "interrupted.c", "forked.c", "partial.c", "wrapper.cc"] {
        run(&sanitized(source), 4, &folder);
    }
    for source in ["memory.c", "device.c", "wrapper_device.cc"] {
        run_with(&sanitized(source), 2, &folder, &["tcp"]);
        run_with(&sanitized(source), 4, &folder, &["shm"]);
    }
    run_killed(&sanitized("interrupted_device.c"), 4, &folder, &["shm"]);
    run_killed(&sanitized("exchange_killed.c"), 3, &folder, &["shm"]);
    for fabric in exchange_fabrics() {
        run_with(&sanitized("exchange.c"), 2, &folder, &[fabric]);
        for source in ["races_exchange.c", "wrapper_exchange.cc"] {
            run_with(&sanitized(source), 1, &folder, &[fabric]);
        }
    }
    for source in EXAMPLES {
        launch(&sanitized(source), 4, &folder);
    }
    exchange_example(&sanitized(EXCHANGE_EXAMPLE));
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
