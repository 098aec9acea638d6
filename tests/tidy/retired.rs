//! Words that were given up for a word of the field. A word that comes back would name one thing
//! twice.

use super::source::{name_words, words};
use super::written;

/// The word, the beginning of the paths in which it is retired, and the word to take.
const RETIRED: &[(&str, &str, &str)] = &[
    ("notice", "", "signal"),
    ("notices", "", "signals"),
    ("bell", "", "wake source"),
    ("bells", "", "wake sources"),
    ("choices", "schedule", "tuning"),
    ("cell", "schedule", "signal slot"),
    ("cells", "schedule", "signal slots"),
    ("cells", "transport/src", "signal slots"),
    ("lane", "transport/src", "queue pair (verbs), connection (tcp)"),
    ("silence", "transport/src/shm", "fence"),
    ("lateness", "collectives", "arrival skew"),
    ("lateness", "src", "arrival skew"),
    ("sabotage", "", "mutant"),
    ("trouble", "collectives/src/engine", "failure, step error"),
    ("news", "collectives/src/engine", "unread messages"),
    ("outbox", "collectives/src/engine", "pending puts"),
    ("landings", "collectives/src/engine", "buffer addresses"),
    ("glance", "collectives/src/engine", "poll signals"),
    ("circle", "collectives", "cycle"),
    ("circle", "packing", "cycle"),
    ("circle", "schedule", "cycle"),
    ("circle", "tests/failure", "cycle"),
    ("circle", "tests/simulation.rs", "cycle"),
    ("circles", "packing", "cycles"),
    ("landing", "schedule", "put target, buffer address"),
    ("rewire", "collectives", "set topology"),
    ("peel", "packing", "extract"),
    ("peeled", "packing", "extracted"),
    ("peeler", "packing", "extractor"),
    ("sprout", "packing", "partial tree"),
    ("grove", "packing", "arborescence packing"),
    ("joint", "packing", "link pair"),
    ("joints", "packing", "link pairs"),
    ("hung", "packing", "child of"),
    ("speaker", "schedule", "leader (of a host), proxy (of a rank)"),
    ("speakers", "schedule", "leaders (of hosts), proxies (of ranks)"),
    ("strand", "schedule", "channel group"),
    ("strands", "schedule", "channel groups"),
    ("pace", "schedule/src/generate/packed", "pacing"),
    ("goodbye", "transport", "bye"),
    ("switchboard", "transport", "connection manager"),
    ("knock", "transport", "probe"),
    ("canary", "", "mutant"),
    ("canaries", "", "mutants"),
    ("glance", "transport", "look"),
    ("strangers", "transport", "unauthenticated connections"),
];

/// Documents that tell of earlier versions.
const HISTORY: &[&str] = &["CHANGELOG.md", "tests/tidy/retired.rs", "tests/seeds.txt"];

#[test]
fn words_that_were_retired_stay_away() {
    let mut found = Vec::new();
    for file in written().iter().filter(|file| !HISTORY.contains(&file.name.as_str())) {
        let retired: Vec<_> = RETIRED.iter().filter(|(_, place, _)| file.name.starts_with(place)).collect();
        for (number, line) in file.text.lines().enumerate() {
            for word in words(line).flat_map(name_words) {
                if let Some((_, _, instead)) = retired.iter().find(|(old, ..)| *old == word) {
                    found.push(format!("{}:{}: {word}: say {instead}", file.name, number + 1));
                }
            }
        }
    }
    assert!(found.is_empty(), "these words are retired:\n{}", found.join("\n"));
}
