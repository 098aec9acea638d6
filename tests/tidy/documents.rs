//! That the documents say what is there: commands, files, variables, code.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use pleach::variables::VARIABLES;

use super::skipped::skip;
use super::source::defined;
use super::{Written, read, root, written};

/// Set by pleach itself for the processes that it starts: not for users.
const INTERNAL_VARIABLES: &[&str] = &["PLEACH_TERMINAL"];

#[test]
fn the_commands_in_the_documents_exist() {
    let Some(pleach) = option_env!("CARGO_BIN_EXE_pleach") else {
        return skip("this build has no command (feature cli)");
    };
    let mut seen = 0;
    for document in ["README.md", "CONTRIBUTING.md", "docs/quickstart.md"] {
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
    let others = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(str::to_owned);
    for document in pages().into_iter().chain(others) {
        let document = &document;
        let text = read(document);
        let folder = root().join(document);
        let folder = folder.parent().expect("a document is in a folder");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        for (target, _) in targets {
            if !target.starts_with("http") && !target.starts_with('#') {
                let target = target.split('#').next().unwrap_or_default();
                assert!(folder.join(target).exists(), "{document} points to {target}, which is not there");
            }
        }
    }
}

#[test]
fn no_page_has_a_place_that_was_to_be_filled() {
    for page in pages() {
        let text = read(&page);
        let is_place = |line: &&str| line.len() > 2 && line.bytes().all(|byte| byte.is_ascii_uppercase());
        assert_eq!(text.lines().find(is_place), None, "{page}");
    }
}

/// The pages of `docs/`.
fn pages() -> Vec<String> {
    let files = fs::read_dir(root().join("docs")).expect("there are documents");
    let names = files.map(|page| format!("docs/{}", page.expect("is listed").file_name().display()));
    names.filter(|page| page.ends_with(".md")).collect()
}

#[test]
fn the_tests_that_the_documents_name_exist() {
    let files = written();
    let mut seen = 0;
    for document in ["README.md", "CONTRIBUTING.md", "docs/hardware.md", "docs/performance.md"] {
        let text = read(document);
        for command in text.split("cargo test").skip(1) {
            let command = command.split(['`', '\n', ',']).next().unwrap_or_default();
            let (selection, filters) = command.split_once(" -- ").unwrap_or((command, ""));
            let names = names_of_tests(&files, selection);
            for filter in filters.split_whitespace().filter(|word| !word.starts_with("--")) {
                seen += 1;
                assert!(
                    is_filter_of(filter, &names),
                    "{document} names 'cargo test{command}', but no test has '{filter}' in its path"
                );
            }
        }
    }
    assert!(seen > 5, "only {seen} filters were found");
}

#[test]
fn commands_that_a_test_runs_are_read_by_that_test_from_their_page() {
    let mut seen = 0;
    for page in pages().into_iter().chain(["README.md".to_owned()]) {
        for marker in read(&page).split("<!-- run: by tests/").skip(1) {
            let test = marker.split([' ', ',']).next().unwrap_or_default();
            let reads = read(&format!("tests/{test}")).contains(&format!("\"{page}\""));
            assert!(reads, "{page} says that tests/{test} runs its commands, which does not read that page");
            seen += 1;
        }
    }
    assert!(seen > 1, "only {seen} such commands were found");
}

/// The names of all modules and functions in the files that this selection of tests compiles.
fn names_of_tests(files: &[Written], selection: &str) -> BTreeSet<String> {
    let words: Vec<&str> = selection.split_whitespace().collect();
    let after = |option: &str| {
        let at = words.iter().enumerate().filter(|(_, word)| **word == option);
        at.filter_map(|(at, _)| words.get(at + 1).copied()).collect::<Vec<_>>()
    };
    let folder = after("-p").first().and_then(|package| package.strip_prefix("pleach-")).unwrap_or_default();
    let targets = after("--test");
    let is_compiled = |file: &&Written| {
        let Some((_, target)) = file.name.split_once("tests/") else { return targets.is_empty() };
        let target = target.split(['/', '.']).next().unwrap_or_default();
        targets.is_empty() || targets.contains(&target)
    };
    let compiled =
        files.iter().filter(|file| file.is_rust() && file.name.starts_with(folder)).filter(is_compiled);
    let lines = compiled.flat_map(|file| file.text.lines().filter_map(defined).collect::<Vec<_>>());
    lines.filter(|(kind, _)| matches!(kind.as_str(), "mod" | "fn")).map(|(_, name)| name).collect()
}

/// Whether a test that consists of these names may have the filter in its path.
fn is_filter_of(filter: &str, names: &BTreeSet<String>) -> bool {
    let segments: Vec<&str> = filter.split("::").collect();
    let last = segments.len() - 1;
    segments.iter().enumerate().all(|(at, segment)| {
        names.iter().any(|name| match (at == 0, at == last) {
            (true, true) => name.contains(segment),
            (true, false) => name.ends_with(segment),
            (false, true) => name.starts_with(segment),
            (false, false) => name == segment,
        })
    })
}

/// Most lines of ARCHITECTURE.md before the invariants: a reader sees them in a minute.
const MAP_LINES_MAX: usize = 120;

#[test]
fn the_map_is_short_and_names_paths_that_are_there() {
    let text = read("ARCHITECTURE.md");
    let (map, _) = text.split_once("## Invariants").expect("the map comes before the invariants");
    assert!(map.lines().count() <= MAP_LINES_MAX, "the map has {} lines", map.lines().count());
    // The picture above is quoted in another way.
    let (_, tables) = map.split_once("## Where to look").expect("a table stands above the map");
    let quoted = tables.split('`').skip(1).step_by(2).filter(|quoted| quoted.contains('/'));
    let paths: Vec<String> = quoted.flat_map(expanded).collect();
    assert!(paths.len() > 50, "only {} paths were found", paths.len());
    for path in paths {
        assert!(root().join(&path).exists(), "ARCHITECTURE.md names {path}, which is not there");
    }
}

/// The paths of a pattern as shells expand it, with at most one pair of braces.
fn expanded(pattern: &str) -> Vec<String> {
    let parts = pattern.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    match parts {
        Some((before, (names, after))) => {
            names.split(',').map(|name| format!("{before}{name}{after}")).collect()
        }
        None => vec![pattern.to_owned()],
    }
}

#[test]
fn the_table_of_variables_is_that_of_the_code_and_names_all() {
    let page = read("docs/environment.md");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let table: Vec<String> = VARIABLES.iter().map(ToString::to_string).collect();
    assert_eq!(
        rows,
        table,
        "docs/environment.md is not src/variables.rs; its table must be:\n{}",
        table.join("\n")
    );
    let known: BTreeSet<&str> =
        VARIABLES.iter().map(|variable| variable.name).chain(INTERNAL_VARIABLES.iter().copied()).collect();
    let mut read_somewhere = BTreeSet::new();
    for file in written().into_iter().filter(is_of_the_program) {
        for name in variables(without_tests(&file.text)) {
            assert!(
                known.contains(name.as_str()),
                "{} names {name}; give it a row in src/variables.rs",
                file.name
            );
            read_somewhere.insert(name);
        }
    }
    for name in known {
        assert!(read_somewhere.contains(name), "nothing reads {name}; take it out of src/variables.rs");
    }
}

#[test]
fn the_code_of_the_quickstart_is_that_of_its_example() {
    let example = read("examples/quickstart.rs");
    let example: Vec<&str> = example.lines().map(str::trim).collect();
    let page = read("docs/quickstart.md");
    let blocks: Vec<&str> =
        page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!blocks.is_empty(), "the page shows code");
    for block in blocks {
        let lines: Vec<&str> = block.lines().map(str::trim).collect();
        assert!(
            example.windows(lines.len()).any(|window| window == lines),
            "docs/quickstart.md shows code that examples/quickstart.rs does not have:\n{block}"
        );
    }
}

/// Whether a file is part of the libraries or of the command, and not the table itself or a test.
fn is_of_the_program(file: &Written) -> bool {
    let folders = [
        "src/",
        "transport/src/",
        "packing/src/",
        "schedule/src/",
        "collectives/src/",
        "graph-analyzer/src/",
        "exchange/src/",
        "training/src/",
    ];
    file.is_rust()
        && folders.iter().any(|folder| file.name.starts_with(folder))
        && file.name != "src/variables.rs"
        && !file.name.contains("tests")
}

/// The part of a file before its tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

/// The variables that string literals of this text name as a whole.
fn variables(text: &str) -> Vec<String> {
    let is_of_a_name = |letter: char| letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '_';
    let names = text.split('"').filter(|part| part.starts_with("PLEACH_") && part.chars().all(is_of_a_name));
    // What ends so is a prefix of several.
    names.filter(|name| !name.ends_with('_')).map(str::to_owned).collect()
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
