//! That the documents say what is there: commands, files, variables, code.

use std::collections::BTreeSet;
use std::process::Command;

use pleach::variables::VARIABLES;

use super::{Written, read, root, say, written};

/// Set by pleach itself for the processes that it starts: not for users.
const INTERNAL_VARIABLES: &[&str] = &["PLEACH_TERMINAL"];

#[test]
fn the_commands_in_the_documents_exist() {
    let Some(pleach) = option_env!("CARGO_BIN_EXE_pleach") else {
        say("skipped the_commands_in_the_documents_exist: this build has no command (feature cli)");
        return;
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
    for document in
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions.md", "docs/quickstart.md"]
    {
        let text = read(document);
        let folder = root().join(document);
        let folder = folder.parent().expect("a document is in a folder");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        for (target, _) in targets {
            if !target.starts_with("http") && !target.starts_with('#') {
                assert!(folder.join(target).exists(), "{document} points to {target}, which is not there");
            }
        }
    }
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
    let folders = ["src/", "transport/src/", "packing/src/", "schedule/src/", "collectives/src/"];
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
