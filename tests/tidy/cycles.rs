//! Modules of a crate depend on each other one way. The modules that are compared are the crate's
//! outermost ones; tests do not count.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{blanked, words};
use super::{Written, written};

/// Cycles that are still there, by crate. One that is gone is taken from here, and none is added.
const KNOWN: &[(&str, &[&str])] = &[
    ("packing", &[]),
    ("schedule", &[]),
    ("collectives", &[]),
    ("transport", &[]),
    ("graph-analyzer", &[]),
    ("exchange", &[]),
];

/// By module: the modules that it uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_of_a_crate_use_each_other_one_way() {
    let files = written();
    for (krate, known) in KNOWN {
        let uses = uses(&files, krate);
        assert!(uses.len() > 5, "{krate}: only {} modules were found", uses.len());
        let in_cycles: BTreeSet<&str> =
            uses.keys().filter(|at| reaches(&uses, at, at)).map(String::as_str).collect();
        let known: BTreeSet<&str> = known.iter().copied().collect();
        let new: Vec<_> = in_cycles.difference(&known).collect();
        assert!(
            new.is_empty(),
            "{krate}: {new:?} use modules that use them: move what both need below the two"
        );
        let gone: Vec<_> = known.difference(&in_cycles).collect();
        assert!(gone.is_empty(), "{krate}: {gone:?} are in no cycle any more: take them from the known ones");
    }
}

fn uses(files: &[Written], krate: &str) -> Uses {
    let folder = format!("{krate}/src/");
    let sources =
        files.iter().filter_map(|file| Some((file.name.strip_prefix(&folder)?, blanked(&file.text))));
    let sources: Vec<(&str, String)> = sources.filter(|(name, _)| name.ends_with(".rs")).collect();
    let tests: Vec<String> = sources.iter().flat_map(|(name, source)| test_modules(name, source)).collect();
    let mut uses = Uses::new();
    for (name, source) in &sources {
        let path: Vec<&str> = name.trim_end_matches(".rs").split('/').filter(|part| *part != "mod").collect();
        if path == ["lib"] || tests.iter().any(|test| is_below(&path, test)) {
            continue;
        }
        let own = uses.entry(path[0].to_owned()).or_default();
        let used = used_modules(without_tests(source), path.len());
        own.extend(used.into_iter().filter(|used| used != path[0]));
    }
    // Names of the crate's root are no modules.
    let modules: BTreeSet<String> = uses.keys().cloned().collect();
    uses.values_mut().for_each(|used| used.retain(|used| modules.contains(used)));
    uses
}

/// The paths of modules that a file declares for tests alone.
fn test_modules(name: &str, source: &str) -> Vec<String> {
    let folder = name.trim_end_matches(".rs").trim_end_matches("/mod").trim_end_matches("lib");
    let declared = |line: &str| {
        line.trim().strip_suffix(';').and_then(|line| line.split("mod ").nth(1)).map(str::to_owned)
    };
    let pairs = source.lines().zip(source.lines().skip(1));
    let of_tests =
        pairs.filter(|(above, _)| above.contains("#[cfg(") && words(above).any(|word| word == "test"));
    of_tests.filter_map(|(_, line)| declared(line)).map(|module| format!("{folder}/{module}")).collect()
}

fn is_below(path: &[&str], test: &str) -> bool {
    let test: Vec<&str> = test.split('/').filter(|part| !part.is_empty()).collect();
    path.starts_with(&test)
}

/// What stands before the tests at a file's end.
fn without_tests(source: &str) -> &str {
    source.find("#[cfg(test)]\nmod tests {").map_or(source, |end| &source[..end])
}

/// The outermost modules that source uses, `depth` levels below the crate's root.
fn used_modules(source: &str, depth: usize) -> BTreeSet<String> {
    let up = "super::".repeat(depth);
    let starts = ["crate::", &up]
        .into_iter()
        .flat_map(|prefix| source.match_indices(prefix).map(move |(at, _)| (at, at + prefix.len())));
    let is_start =
        |at: usize| !source[..at].ends_with(|before: char| before.is_alphanumeric() || "_:".contains(before));
    let starts = starts.filter(|(at, _)| is_start(*at));
    starts.flat_map(|(_, end)| first_names(&source[end..])).collect()
}

/// The first names of a path, or of each path of a list in braces.
pub(crate) fn first_names(rest: &str) -> Vec<String> {
    let name = |text: &str| words(text).next().unwrap_or_default().to_owned();
    let Some(list) = rest.strip_prefix('{') else { return vec![name(rest)] };
    let (mut names, mut depth, mut is_first) = (Vec::new(), 0, true);
    for (at, char) in list.char_indices() {
        match char {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => is_first = true,
            char if is_first && !char.is_whitespace() => {
                names.push(name(&list[at..]));
                is_first = false;
            }
            _ => {}
        }
    }
    names
}

/// Whether a way of at least one step leads from one module to another.
fn reaches(uses: &Uses, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for used in uses.get(module).into_iter().flatten() {
            if used == to {
                return true;
            }
            if seen.insert(used.as_str()) {
                next.push(used);
            }
        }
    }
    false
}

#[test]
fn uses_are_found_in_paths_and_in_lists() {
    let source = "use crate::{Rank, one::{A, B}, two};\nfn f() { crate::three::g(); super::super::four::h(); my_crate::no() }\n";
    let expected = ["Rank", "one", "two", "three", "four"].map(str::to_owned);
    assert_eq!(used_modules(source, 2), BTreeSet::from(expected));
    assert_eq!(test_modules("a/mod.rs", "#[cfg(test)]\nmod hostile;\nmod real;\n"), ["a/hostile"]);
}
