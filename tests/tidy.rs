//! What reviewers should not have to look for: lengths, where `unsafe` stands, who depends on whom, names, leftovers, and
//! that what the documents promise exists. Each failure says what to do.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of a file: printed above the first, refused above the second.
const FILE_LINES: (usize, usize) = (500, 1_000);

/// Lines of a function: printed above the first, refused above the second.
const FUNCTION_LINES: (usize, usize) = (70, 100);

/// Where `unsafe` may stand, and what for.
const UNSAFE_MAY_STAND_IN: &[(&str, &str)] = &[
    ("transport/src/memory", "owns the bytes that transfers touch"),
    ("transport/src/shm", "maps segments of other processes"),
    ("transport/src/cells.rs", "cells in shared memory"),
    ("transport/src/device.rs", "addresses of mapped memory"),
    ("collectives/src/compute", "kernels over raw memory"),
];

/// Who may depend on whom among the crates of the workspace.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("pleach-transport", &[]),
    ("pleach-collectives", &["pleach-transport"]),
    ("pleach-graph-analyzer", &["pleach-transport"]),
    ("pleach-training", &["pleach-collectives", "pleach-graph-analyzer", "pleach-transport"]),
    ("pleach-exchange", &["pleach-collectives", "pleach-graph-analyzer", "pleach-transport"]),
    ("pleach-ffi", &["pleach-collectives", "pleach-transport"]),
    ("pleach-python", &["pleach-collectives", "pleach-transport"]),
    (
        "pleach",
        &[
            "pleach-transport",
            "pleach-collectives",
            "pleach-graph-analyzer",
            "pleach-training",
            "pleach-exchange",
        ],
    ),
];

/// Words that say nothing about what a thing is.
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
const WRITTEN: &[&str] = &["rs", "py", "c", "h", "cpp", "sh"];

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

    fn is_generated(&self) -> bool {
        self.text.lines().next().is_some_and(|line| line.contains("generated"))
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
        let (_, allowed) = allowed
            .unwrap_or_else(|| panic!("{}: say in tests/tidy.rs whom it may depend on", manifest.package));
        for dependency in manifest.dependencies.iter().filter(|name| name.starts_with("pleach")) {
            assert!(
                allowed.contains(&dependency.as_str()),
                "{} must not depend on {dependency}: see the picture in ARCHITECTURE.md",
                manifest.package
            );
        }
    }
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() {
    for manifest in manifests() {
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
            let Some(name) = defined(line) else { continue };
            let words = name_words(&name);
            let getter = words.first().is_some_and(|word| word == "get") && words.len() > 1;
            if getter || words.iter().any(|word| place(word)) {
                empty.push(format!("{}:{}: {name}", file.name, number + 1));
            }
        }
    }
    assert!(empty.is_empty(), "these names do not say what they name:\n{}", empty.join("\n"));
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

#[test]
#[ignore = "until `train`, which README opens with, is one of the commands"]
fn the_commands_in_the_documents_exist() {
    let Some(pleach) = option_env!("CARGO_BIN_EXE_pleach") else {
        say("skipped the_commands_in_the_documents_exist: this build has no command (feature cli)");
        return;
    };
    let mut seen = 0;
    for document in ["README.md", "CONTRIBUTING.md"] {
        for line in commands(&read(document)) {
            let Some(arguments) =
                ["cargo run --release -- ", "pleach "].iter().find_map(|start| line.strip_prefix(start))
            else {
                continue;
            };
            seen += 1;
            let subcommand = arguments.split_whitespace().next().unwrap_or_default();
            let output = Command::new(pleach).args([subcommand, "--help"]).output().expect("pleach starts");
            assert!(output.status.success(), "{document} names '{line}', which pleach does not know");
        }
    }
    assert!(seen > 0, "README.md names at least one command of pleach");
}

#[test]
fn the_files_that_the_documents_name_exist() {
    for document in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = read(document);
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        for (target, _) in targets {
            if !target.starts_with("http") && !target.starts_with('#') {
                assert!(root().join(target).exists(), "{document} points to {target}, which is not there");
            }
        }
    }
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

/// Rust source with comments, strings and characters blanked, so that words and braces in them do not count.
fn blanked(source: &str) -> String {
    let source: Vec<char> = source.chars().collect();
    let mut blank = String::with_capacity(source.len());
    let mut at = 0;
    while at < source.len() {
        let end = end_of_text(&source, at);
        if end == at {
            blank.push(source[at]);
            at += 1;
        } else {
            blank.extend(source[at..end].iter().map(|char| if *char == '\n' { '\n' } else { ' ' }));
            at = end;
        }
    }
    blank
}

/// Where the comment, string or character that begins at `at` ends; `at` when none begins there.
fn end_of_text(source: &[char], at: usize) -> usize {
    let next = |offset: usize| source.get(at + offset).copied().unwrap_or('\0');
    let in_word = at > 0 && (source[at - 1].is_alphanumeric() || source[at - 1] == '_');
    match (source[at], next(1)) {
        ('/', '/') => (at..source.len()).find(|end| source[*end] == '\n').unwrap_or(source.len()),
        ('/', '*') => end_of_block_comment(source, at),
        ('"', _) => end_of_quoted(source, at, '"'),
        ('r', '"' | '#') if !in_word => end_of_raw_string(source, at).unwrap_or(at),
        ('\'', '\\') => end_of_quoted(source, at, '\''),
        ('\'', char) if char != '\0' && next(2) == '\'' => at + 3,
        _ => at,
    }
}

fn end_of_quoted(source: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < source.len() && source[at] != quote {
        at += if source[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(source.len())
}

fn end_of_block_comment(source: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < source.len() {
        match (source[at], source.get(at + 1)) {
            ('/', Some('*')) => (at, depth) = (at + 2, depth + 1),
            ('*', Some('/')) => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

fn end_of_raw_string(source: &[char], start: usize) -> Option<usize> {
    let hashes = source[start + 1..].iter().take_while(|char| **char == '#').count();
    let open = start + 1 + hashes;
    if source.get(open) != Some(&'"') {
        return None;
    }
    let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let length = source[open + 1..].windows(close.len()).position(|window| window == close)?;
    Some(open + 1 + length + close.len())
}

/// Name, first line and number of lines of each function with a body, in blanked source.
fn functions(source: &str) -> Vec<(String, usize, usize)> {
    let mut functions = Vec::new();
    for (start, _) in source.match_indices("fn ") {
        let before = source[..start].chars().next_back();
        if before.is_some_and(|char| char.is_alphanumeric() || char == '_') {
            continue;
        }
        let name: String = source[start + 3..]
            .chars()
            .take_while(|char| char.is_alphanumeric() || "_$".contains(*char))
            .collect();
        if let Some(length) = body_end(&source[start..]) {
            let line = source[..start].lines().count().max(1);
            functions.push((name, line, source[start..start + length].lines().count()));
        }
    }
    functions
}

/// Length of a function from its `fn` to the end of its body; `None` where it has none.
fn body_end(source: &str) -> Option<usize> {
    let (mut depth, mut brackets) = (0, 0);
    for (at, char) in source.char_indices() {
        match char {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if depth == 0 && brackets == 0 => return None,
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                if depth == 0 && brackets == 0 {
                    return Some(at + 1);
                }
                if depth < 0 {
                    return None;
                }
            }
            _ => {}
        }
    }
    None
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|char: char| !char.is_alphanumeric() && char != '_').filter(|word| !word.is_empty())
}

/// What a line defines, if anything.
fn defined(line: &str) -> Option<String> {
    const KINDS: [&str; 7] = ["fn", "struct", "enum", "trait", "mod", "type", "const"];
    let words: Vec<&str> = words(line).collect();
    let kind = words.iter().position(|word| KINDS.contains(word))?;
    // `const fn name` defines a function.
    let kind = if words.get(kind + 1) == Some(&"fn") { kind + 1 } else { kind };
    words.get(kind + 1).map(|name| (*name).to_owned())
}

/// The words of `snake_case`, `CamelCase` and paths, in lower case.
fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut lower = false;
    for char in name.chars() {
        if !char.is_alphanumeric() || (char.is_uppercase() && lower) {
            words.push(String::new());
        }
        if char.is_alphanumeric() {
            words.last_mut().expect("never empty").extend(char.to_lowercase());
        }
        lower = char.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

/// A crate of the workspace.
struct Manifest {
    package: String,
    /// Of every kind: for the build, for tests, for a target.
    dependencies: Vec<String>,
    text: String,
}

fn manifests() -> Vec<Manifest> {
    let workspace = read("Cargo.toml");
    let members =
        workspace.lines().find_map(|line| line.strip_prefix("members = ")).expect("a list of members");
    let members: Vec<&str> = words_in_quotes(members);
    assert!(members.len() > 1, "the workspace has members");
    let names = members.iter().map(|member| format!("{member}/Cargo.toml"));
    names.chain(["Cargo.toml".to_owned()]).map(|name| manifest(read(&name))).collect()
}

fn words_in_quotes(line: &str) -> Vec<&str> {
    line.split('"').skip(1).step_by(2).collect()
}

fn manifest(text: String) -> Manifest {
    let (mut table, mut package, mut dependencies) = (String::new(), String::new(), Vec::new());
    for line in text.lines() {
        if let Some(header) = line.strip_prefix('[') {
            table = header.trim_end_matches(']').to_owned();
            continue;
        }
        let key = line.split(['=', '.', ' ']).next().unwrap_or_default();
        if table == "package" && key == "name" {
            package = words_in_quotes(line).concat();
        }
        let of_a_kind = table.ends_with("dependencies") && !table.starts_with("workspace");
        if of_a_kind && !key.is_empty() && !key.starts_with('#') {
            dependencies.push(key.to_owned());
        }
    }
    Manifest { package, dependencies, text }
}

/// A section of a document, up to the next heading of its level.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let at = document.find(&format!("{heading}\n")).unwrap_or_else(|| panic!("no section '{heading}'"));
    let rest = &document[at + heading.len()..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}

/// The lines of a document's shell blocks that are commands.
fn commands(document: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut in_shell = false;
    for line in document.lines() {
        if let Some(language) = line.strip_prefix("```") {
            in_shell = !in_shell && matches!(language, "sh" | "console");
        } else if in_shell {
            commands.push(line.trim_start_matches("$ ").trim().to_owned());
        }
    }
    commands
}

#[test]
fn the_measures_of_this_test_measure() {
    let source = "/* { fn no() { */ fn yes<'a>(x: &'a str) -> [u8; 2] {\n  // }\n  let _ = ('}', \"}\", r#\"}\"#);\n}\n\
                  trait T { fn without(&self); }\n";
    let blank = blanked(source);
    assert_eq!(blank.lines().count(), source.lines().count());
    assert_eq!(functions(&blank), [("yes".to_owned(), 1, 4)]);
    assert_eq!(name_words("transport/src/BufferManager_x"), ["transport", "src", "buffer", "manager", "x"]);
    assert_eq!(defined("pub(crate) const fn len(&self) -> usize {"), Some("len".to_owned()));
    assert!(words("unsafe_code(unsafe fn)").any(|word| word == "unsafe"));
    assert!(!words("allow(unsafe_code)").any(|word| word == "unsafe"));
}
