//! That the tests of programs without `unsafe` grow with what such programs can name.

use super::{read, words};

/// The tests: what safe code does with memory that calls use.
const TESTS: &[&str] =
    &["tests/sound.rs", "collectives/tests/sound.rs", "collectives/tests/gpu_memory/sound.rs"];

/// Public types that hold no memory that a call works on, or that safe code cannot make.
const OTHERS: &[(&str, &[&str])] = &[
    (
        "plain values",
        &[
            "Activation",
            "Amount",
            "Builder",
            "Collective",
            "Connect",
            "CudaErrorCode",
            "DataType",
            "Distribution",
            "Divisor",
            "ExplicitWorld",
            "F8E4M3",
            "F8E5M2",
            "Factor",
            "Fault",
            "FaultKind",
            "FlushMethod",
            "FlushScope",
            "GpuId",
            "GroupInfo",
            "GroupName",
            "HistogramMetric",
            "Late",
            "Launcher",
            "Link",
            "LossKind",
            "Metric",
            "MetricKind",
            "Node",
            "NodeId",
            "NodeKind",
            "NotExact",
            "NotPartial",
            "Observe",
            "Own",
            "PartialReport",
            "Parts",
            "PeerReport",
            "Progress",
            "RankSet",
            "Report",
            "Reproducible",
            "Secret",
            "ShapeReport",
            "Space",
            "TooLarge",
            "Topology",
            "TopologyName",
            "UnknownName",
            "Violation",
            "Word",
        ],
    ),
    (
        "traits, and names of what the tests make",
        &[
            "BorrowedData",
            "CudaEvent",
            "Data",
            "DataMut",
            "Element",
            "Memory",
            "OwnedData",
            "Started",
            "Store",
        ],
    ),
    ("made by unsafe code alone", &["ForeignMemory", "RawData", "RawPair"]),
    (
        "ways that calls take",
        &[
            "Algorithm",
            "GridShape",
            "HostMap",
            "PackedTrees",
            "PacingPolicy",
            "RankSpace",
            "Tuning",
            "TuningRow",
            "TuningSource",
            "TuningTable",
            "Variant",
        ],
    ),
];

#[test]
fn each_public_type_is_named_by_the_tests_of_safe_code() {
    let facade = read("src/lib.rs");
    let (public, _) = facade.split_once("// The crates below").expect("a line above the crates below");
    let lists =
        public.split("pub use ").skip(1).filter_map(|rest| rest.split_once(';').map(|(list, _)| list));
    let is_type = |word: &&str| word.starts_with(|letter: char| letter.is_ascii_uppercase());
    let types: Vec<&str> = lists.flat_map(|list| words(list).filter(is_type)).collect();
    assert!(types.len() > 40, "only {} public types were found", types.len());
    let tests: Vec<String> = TESTS.iter().map(|test| read(test)).collect();
    for name in &types {
        let is_error = name.ends_with("Error");
        let is_other = is_error || OTHERS.iter().any(|(_, names)| names.contains(name));
        let is_named = tests.iter().any(|test| words(test).any(|word| word == *name));
        assert!(
            is_other || is_named,
            "no test of {TESTS:?} names {name}: forget and drop it while a call uses it"
        );
    }
    for name in OTHERS.iter().flat_map(|(_, names)| *names) {
        assert!(types.contains(name), "{name} is no public type; take it out of tests/tidy/sound.rs");
    }
}
