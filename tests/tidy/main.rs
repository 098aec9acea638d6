//! What reviewers should not have to look for: lengths, where `unsafe` stands, who depends on whom,
//! names, leftovers, and that what the documents promise exists. Each failure says what to do.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use manifest::manifests;
use source::{blanked, defined, functions, name_words, words};

mod cycles;
mod documents;
mod manifest;
mod retired;
mod sharing;
#[path = "../skipped/mod.rs"]
mod skipped;
mod sound;
mod source;

/// Lines of a file: printed above the first, refused above the second.
const FILE_LINES: (usize, usize) = (700, 1_000);

/// Lines of a function: printed above the first, refused above the second.
const FUNCTION_LINES: (usize, usize) = (70, 100);

/// Columns of a line of a comment or of a document. Headings, tables and what stands between
/// fences may be wider.
const COMMENT_COLUMNS: usize = 100;

/// Where `unsafe` may stand, and what for.
const UNSAFE_MAY_STAND_IN: &[(&str, &str)] = &[
    ("transport/src/memory", "owns the bytes that transfers touch"),
    ("transport/src/shm", "maps segments of other processes"),
    ("transport/src/verbs", "calls libibverbs"),
    ("transport/src/cuda", "calls the CUDA driver"),
    ("transport/src/control/packet.rs", "asks whose process is at the other end of a socket"),
    ("transport/src/control/tests.rs", "forks without exec"),
    ("transport/src/signals.rs", "signal slots in shared memory"),
    ("transport/src/device.rs", "the contract that implementors promise"),
    ("transport/src/region", "bytes behind slices, and addresses of mapped memory"),
    ("transport/src/fork.rs", "is told of forks"),
    ("transport/src/hybrid/mod.rs", "promises the device contract"),
    ("transport/src/rendezvous/join/tests.rs", "promises the device contract"),
    ("transport/src/sim/alias.rs", "maps memory of simulated ranks once more"),
    ("transport/src/sim/device.rs", "promises the device contract"),
    ("transport/src/sim/world.rs", "breaks the device contract where that is asked for"),
    ("transport/tests/sim/ranks.rs", "breaks the device contract"),
    ("transport/src/tcp/mod.rs", "promises the device contract"),
    ("transport/src/tcp/memory.rs", "sockets that read and write registered memory"),
    ("transport/src/tls/kernel.rs", "sockets whose records the kernel opens"),
    ("transport/tests/conformance/shm.rs", "promises the device contract"),
    ("transport/tests/conformance/sim.rs", "breaks the device contract"),
    ("collectives/src/compute", "kernels over raw memory"),
    ("collectives/src/simulate/trial.rs", "breaks the device contract"),
    ("collectives/tests/gpu_memory", "kernels over raw memory"),
    ("collectives/tests/group/waking.rs", "promises the device contract"),
    ("collectives/tests/counting/mod.rs", "counts allocations"),
    ("collectives/tests/system_calls.rs", "counts system calls"),
    ("collectives/src/engine/address.rs", "the only place of the engine that touches bytes"),
    ("collectives/src/group/batch.rs", "copies between a batch's memory"),
    ("collectives/src/group/data.rs", "registered memory as slices"),
    ("collectives/src/session/epoch_device.rs", "promises the device contract"),
    ("collectives/src/exact/elements.rs", "elements of a call by their addresses"),
    ("collectives/src/group/temporary_registration.rs", "memory lent for one call"),
    ("collectives/src/group/partial/mod.rs", "registered memory as slices, while no round holds it"),
    ("collectives/src/partial/handover.rs", "what loom sees of contributions"),
    ("collectives/src/group/window/mod.rs", "elements of a write as a slice, until its credit"),
    ("collectives/src/window/memory.rs", "how a process reaches the bytes of a window"),
    ("collectives/src/group/premultiplied.rs", "products of a call's elements by their addresses"),
    ("collectives/src/group/raw.rs", "operations on memory by its address"),
    ("collectives/tests/operations/raw.rs", "operations on memory by its address"),
    ("training/tests/memory.rs", "counts allocated bytes"),
    ("benches/training/allocations.rs", "counts allocations"),
    ("training/src/svm/wide.rs", "calls loops that were compiled for vectors of this processor"),
    ("graph-analyzer/src/onnx/weights.rs", "maps files of weights"),
    ("graph-analyzer/src/run/allocator.rs", "the global allocator of programs that run graphs"),
    ("graph-analyzer/src/run/bytes.rs", "registered memory as slices"),
    ("graph-analyzer/src/run/onnxruntime.rs", "calls the library of onnxruntime"),
    ("src/cli/graph/over_grpc.rs", "memory of tensors as bytes of messages"),
    ("src/hypotf.rs", "has the name of a C function"),
    ("ffi/src", "addresses and handles that C programs give"),
    ("ffi/benches", "calls as C programs make them"),
    ("exchange/src/endpoint/memory.rs", "lendable memory as slices"),
    ("exchange/src/grpc/byte_streams/ring.rs", "copies to and from rings that other processes reach"),
    ("exchange/src/grpc/codec.rs", "messages that prost writes without their long fields"),
    ("fuzz/fuzz_targets/c_calls", "calls as C programs make them"),
    ("python/src/calls.rs", "operations on memory that Python objects hold"),
    ("python/src/dlpack.rs", "the structs of DLPack"),
    ("python/src/exchange/memory.rs", "copies of arrays in lendable memory"),
    ("python/src/partial.rs", "copies between arrays and the memory of rounds"),
    ("python/src/view.rs", "Python's buffer protocol"),
    ("python/src/window.rs", "copies between arrays and the memory of windows"),
    ("benches/micro/instructions.rs", "the processor's trap flag"),
    ("benches/micro/benches/reduce.rs", "kernels over raw memory"),
    ("tests/failure/children.rs", "forks without exec"),
    ("transport/tests/cuda.rs", "puts work into streams"),
    ("transport/tests/fake_cuda", "loads the library that tests build"),
];

/// Who may depend on whom among the crates of the workspace.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("pleach-derive", &[]),
    ("pleach-vocabulary", &["pleach-derive"]),
    ("pleach-transport", &["pleach-derive", "pleach-vocabulary"]),
    ("pleach-packing", &["pleach-derive", "pleach-vocabulary"]),
    ("pleach-schedule", &["pleach-derive", "pleach-packing", "pleach-vocabulary"]),
    (
        "pleach-collectives",
        &[
            "pleach-derive",
            "pleach-membership",
            "pleach-packing",
            "pleach-schedule",
            "pleach-transport",
            "pleach-vocabulary",
        ],
    ),
    ("pleach-membership", &["pleach-derive", "pleach-transport", "pleach-vocabulary"]),
    ("pleach-graph-analyzer", &["pleach-derive", "pleach-transport", "pleach-vocabulary"]),
    ("pleach-exchange", &["pleach-derive", "pleach-transport", "pleach-vocabulary"]),
    ("pleach-training", &["pleach-collectives", "pleach-derive", "pleach-transport", "pleach-vocabulary"]),
    ("pleach-onnx-regenerate", &[]),
    ("pleach-exchange-regenerate", &[]),
    ("pleach-ffi", &["pleach-collectives", "pleach-exchange", "pleach-transport", "pleach-vocabulary"]),
    (
        "pleach-micro",
        &[
            "pleach-collectives",
            "pleach-ffi",
            "pleach-graph-analyzer",
            "pleach-packing",
            "pleach-schedule",
            "pleach-transport",
            "pleach-vocabulary",
        ],
    ),
    (
        "pleach-python",
        &["pleach-collectives", "pleach-exchange", "pleach-ffi", "pleach-training", "pleach-transport"],
    ),
    (
        "pleach",
        &[
            "pleach-transport",
            "pleach-packing",
            "pleach-schedule",
            "pleach-collectives",
            "pleach-exchange",
            "pleach-graph-analyzer",
            "pleach-training",
            "pleach-vocabulary",
        ],
    ),
];

/// Words that say nothing about what a thing is. The connection manager of RDMA is the field's
/// name.
const EMPTY_WORDS: &[&str] = &["manager", "helper", "helpers", "util", "utils", "common", "misc"];

/// Left over from work that was to be finished, written so that this file does not hold them.
const LEFTOVERS: &[&str] = &[
    concat!("dbg", "!("),
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("FIX", "ME"),
    concat!("TO", "DO"),
    concat!("XX", "X"),
    concat!("<<<<", "<<< "),
];

/// Endings of files that people write.
const WRITTEN: &[&str] =
    &["rs", "py", "pyi", "c", "h", "cc", "cpp", "hpp", "cu", "sh", "toml", "md", "cmake"];

/// A file that people write.
struct Written {
    /// Relative to the root of the workspace.
    name: String,
    text: String,
}

impl Written {
    fn is_rust(&self) -> bool {
        self.name.ends_with(".rs")
    }

    /// What a comment's line begins with.
    fn comment_marks(&self) -> &'static [&'static str] {
        match self.name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("rs") => &["//"],
            Some("c" | "h" | "cc" | "cpp" | "hpp" | "cu") => &["//", "/*", "* "],
            Some("md") => &[""],
            _ => &["# "],
        }
    }

    fn is_generated(&self) -> bool {
        ["//! generated by ", "/* The C API of pleach. Generated by cbindgen"]
            .iter()
            .any(|first| self.text.starts_with(first))
    }
}

#[test]
fn files_are_short_enough_to_be_read_at_once() {
    let mut too_long = Vec::new();
    for file in written().iter().filter(|file| !file.is_generated()) {
        let lines = file.text.lines().count();
        report(&mut too_long, lines, FILE_LINES, &file.name);
    }
    assert!(too_long.is_empty(), "cut these files at a seam of their subject:\n{}", too_long.join("\n"));
}

#[test]
fn prose_is_narrow_enough_to_be_read() {
    let mut too_wide = Vec::new();
    for file in written().iter().filter(|file| !file.is_generated()) {
        let (mut is_fenced, marks) = (false, file.comment_marks());
        for (number, line) in (1..).zip(file.text.lines()) {
            let Some(comment) = marks.iter().find_map(|mark| line.trim_start().strip_prefix(mark)) else {
                is_fenced = false;
                continue;
            };
            let text = comment.trim_start_matches(['/', '!']).trim_start();
            is_fenced ^= text.starts_with("```");
            let may_be_wide = is_fenced
                || text.starts_with(['|', '#'])
                || ["shellcheck", "<!--"].iter().any(|start| text.starts_with(start));
            if !may_be_wide && line.chars().count() > COMMENT_COLUMNS {
                too_wide.push(format!("{}:{number}", file.name));
            }
        }
    }
    let places = too_wide.join("\n");
    assert!(too_wide.is_empty(), "break these lines at {COMMENT_COLUMNS} columns:\n{places}");
}

#[test]
fn functions_are_short_enough_to_be_understood_at_once() {
    let (mut too_long, mut seen) = (Vec::new(), 0);
    for file in written().iter().filter(|file| file.is_rust() && !file.is_generated()) {
        for (name, line, lines) in functions(&blanked(&file.text)) {
            seen += 1;
            report(&mut too_long, lines, FUNCTION_LINES, &format!("{}:{line} {name}", file.name));
        }
    }
    assert!(seen > 100, "only {seen} functions were found");
    assert!(too_long.is_empty(), "name the parts of these functions:\n{}", too_long.join("\n"));
}

#[test]
fn unsafe_stands_only_where_it_is_allowed() {
    let mut elsewhere = Vec::new();
    for file in written().iter().filter(|file| file.is_rust()) {
        if UNSAFE_MAY_STAND_IN.iter().any(|(place, _)| file.name.starts_with(place)) {
            continue;
        }
        for (number, line) in blanked(&file.text).lines().enumerate() {
            if words(line).any(|word| word == "unsafe") {
                elsewhere.push(format!("{}:{}", file.name, number + 1));
            }
        }
    }
    let allowed: Vec<_> =
        UNSAFE_MAY_STAND_IN.iter().map(|(place, what)| format!("{place}: {what}")).collect();
    assert!(
        elsewhere.is_empty(),
        "put a safe interface into one of\n{}\ninstead of unsafe code in\n{}",
        allowed.join("\n"),
        elsewhere.join("\n")
    );
}

#[test]
fn crates_depend_in_one_direction() {
    for manifest in manifests() {
        let allowed = MAY_DEPEND_ON.iter().find(|(name, _)| *name == manifest.package);
        let (_, allowed) = allowed.unwrap_or_else(|| {
            panic!("{}: say in tests/tidy/main.rs whom it may depend on", manifest.package)
        });
        for dependency in manifest.dependencies.iter().filter(|name| name.starts_with("pleach")) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{} must not depend on {dependency}: see the picture in ARCHITECTURE.md",
                manifest.package
            );
        }
    }
}

/// What the workspace has one of, and other programs take from their standard library or from other
/// crates: the clock, hashes, random numbers, the name that was probably meant.
const FOUNDATIONS: &[&str] = &["clock", "digest", "random", "nearest"];

/// Training is an application: it does with the crates below what any program can do with the
/// facade.
#[test]
fn training_imports_only_what_the_facade_exports() {
    let facade = blanked(&read("src/lib.rs"));
    let (public, _) = facade.split_once("\n#[doc(hidden)]").expect("the crates below come last");
    let exported: Vec<&str> = words(public).collect();
    let (mut seen, mut hidden) = (0, Vec::new());
    for file in written().iter().filter(|file| file.name.starts_with("training/src/")) {
        if file.name.ends_with("/tests.rs") {
            continue;
        }
        let source = blanked(file.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default());
        for (at, prefix) in ["pleach_collectives::", "pleach_transport::", "pleach_vocabulary::"]
            .iter()
            .flat_map(|prefix| source.match_indices(prefix))
        {
            for name in cycles::first_names(&source[at + prefix.len()..]) {
                seen += 1;
                if !exported.contains(&name.as_str()) && !FOUNDATIONS.contains(&name.as_str()) {
                    hidden.push(format!("{}: {name}", file.name));
                }
            }
        }
    }
    assert!(seen > 10, "only {seen} imports were found");
    assert!(hidden.is_empty(), "the facade does not export these names:\n{}", hidden.join("\n"));
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    // A workspace of its own cannot take them; its manifest lists them.
    for manifest in
        manifests().iter().filter(|manifest| !manifest.text.contains("\n[workspace]\n\n[package]"))
    {
        let takes = manifest.text.contains("[lints]\nworkspace = true");
        assert!(takes, "{}: add [lints] workspace = true to its manifest", manifest.package);
    }
}

#[test]
fn every_dependency_says_what_it_is_for() {
    let architecture = read("ARCHITECTURE.md");
    let lines: Vec<&str> = section(&architecture, "## Dependencies").lines().collect();
    for manifest in manifests() {
        for dependency in manifest.dependencies.iter().filter(|name| !name.starts_with("pleach")) {
            let row = format!("| `{dependency}` |");
            assert!(
                lines.iter().any(|line| line.starts_with(&row)),
                "{}: {dependency} has no line '{row} what for |' under Dependencies in ARCHITECTURE.md",
                manifest.package
            );
        }
    }
}

#[test]
fn no_dependency_is_explained_that_is_not_there() {
    let architecture = read("ARCHITECTURE.md");
    let manifests = manifests();
    for line in section(&architecture, "## Dependencies").lines().filter(|line| line.starts_with("| `")) {
        let name = line.trim_start_matches("| `").split('`').next().unwrap_or_default();
        let used = manifests.iter().any(|manifest| manifest.dependencies.iter().any(|used| used == name));
        assert!(used, "ARCHITECTURE.md explains {name}, which no manifest names");
    }
}

/// How a test that cannot run here might say so itself, beside `tests/skipped`.
const SKIPPED: &[&str] = &["skipped", "ignored", "skipping"];

#[test]
fn tests_that_cannot_run_say_so_in_the_form_that_is_counted() {
    let mut kept = Vec::new();
    // Programs have no harness that keeps their output.
    let has_harness = |file: &&Written| file.is_rust() && !file.name.contains("benches/");
    for file in written().iter().filter(has_harness) {
        for (at, call) in file.text.match_indices("println!(") {
            let printed =
                file.text[at + call.len()..].trim_start().trim_start_matches("\"").trim_start_matches("\\n");
            if SKIPPED.iter().any(|word| printed.starts_with(word)) {
                kept.push(format!("{}:{}", file.name, file.text[..at].lines().count()));
            }
        }
    }
    let places = kept.join("\n");
    assert!(kept.is_empty(), "the harness keeps this to itself; call tests/skipped instead:\n{places}");
}

#[test]
fn names_say_what_things_are() {
    let mut empty = Vec::new();
    for file in written() {
        let place = |word: &str| EMPTY_WORDS.contains(&word);
        if name_words(&file.name).iter().any(|word| place(word)) {
            empty.push(file.name.clone());
        }
        if !file.is_rust() {
            continue;
        }
        for (number, line) in blanked(&file.text).lines().enumerate() {
            let Some((kind, name)) = defined(line) else { continue };
            let words = name_words(&name);
            let getter = kind == "fn" && words.first().is_some_and(|word| word == "get") && words.len() > 1;
            if getter
                || words.iter().enumerate().any(|(at, word)| {
                    place(word) && !(word == "manager" && at > 0 && words[at - 1] == "connection")
                })
            {
                empty.push(format!("{}:{}: {name}", file.name, number + 1));
            }
        }
    }
    assert!(empty.is_empty(), "these names do not say what they name:\n{}", empty.join("\n"));
}

/// A `main` that returns an error prints it by `Debug`: that has to be its message.
#[test]
fn public_errors_print_their_message_also_by_debug() {
    let (mut plain, mut seen) = (Vec::new(), 0);
    for file in written().iter().filter(|file| file.is_rust() && file.name.contains("src/")) {
        let mut derives = String::new();
        let mut is_error_type = false;
        for (number, line) in file.text.lines().enumerate().map(|(number, line)| (number + 1, line.trim())) {
            if line.starts_with("#[derive(") {
                (derives, is_error_type) = (line.to_owned(), line.contains("thiserror::Error"));
            } else if line.starts_with("pub enum ") || line.starts_with("pub struct ") {
                if std::mem::take(&mut is_error_type) {
                    seen += 1;
                    if words(&derives).any(|word| word == "Debug") {
                        plain.push(format!("{}:{number}: {line}", file.name));
                    }
                }
            } else if ["enum ", "struct ", "pub("].iter().any(|start| line.starts_with(start)) {
                is_error_type = false;
            }
        }
    }
    assert!(seen > 50, "only {seen} errors were found");
    assert!(
        plain.is_empty(),
        "derive pleach_derive::ErrorDebug in the place of Debug for\n{}",
        plain.join("\n")
    );
}

#[test]
fn nothing_is_left_over() {
    let mut found = Vec::new();
    for file in written() {
        for (number, line) in file.text.lines().enumerate() {
            if let Some(leftover) = LEFTOVERS.iter().find(|leftover| line.contains(**leftover)) {
                found.push(format!("{}:{}: {leftover}", file.name, number + 1));
            }
        }
    }
    assert!(found.is_empty(), "finish it, or open an issue and name it:\n{}", found.join("\n"));
}

/// Prints what is long and keeps what is too long.
fn report(too_long: &mut Vec<String>, lines: usize, (long, most): (usize, usize), what: &str) {
    if lines > most {
        too_long.push(format!("{what}: {lines} lines, at most {most}"));
    } else if lines > long {
        say(&format!("long: {what}: {lines} lines, better {long}"));
    }
}

/// On the terminal and not only in the captured output.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name} cannot be read: {error}"))
}

/// Every file that people write, in order of name.
fn written() -> Vec<Written> {
    let mut files = Vec::new();
    collect(root(), &mut files);
    files.sort();
    assert!(files.len() > 10, "the workspace has files");
    let written = |path: PathBuf| {
        let name = path.strip_prefix(root()).expect("found under the root").display().to_string();
        Written { text: read(&name), name }
    };
    files.into_iter().map(written).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries.map(|entry| entry.expect("a folder can be listed")) {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            let hidden = name.starts_with('.') && name != ".ci";
            if !hidden && name != "target" && name != "corpus" {
                collect(&path, files);
            }
        } else if WRITTEN.iter().any(|ending| name.ends_with(&format!(".{ending}")))
            || path.starts_with(root().join(".ci"))
        {
            files.push(path);
        }
    }
}

/// A section of a document, up to the next heading of its level.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let at = document.find(&format!("{heading}\n")).unwrap_or_else(|| panic!("no section '{heading}'"));
    let rest = &document[at + heading.len()..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}
