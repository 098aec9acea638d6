//! `pleach plan` and `pleach verify FILE.xml`, as a person calls them.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::process::{Command, Output};

use launcher::{Folder, expect_refused};
use serde_json::Value;

fn pleach(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pleach")).args(arguments).output().expect("pleach starts")
}

/// Standard output and standard error of what succeeded.
fn told(arguments: &[&str]) -> (String, String) {
    let output = pleach(arguments);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
    (stdout, stderr)
}

fn json(arguments: &[&str]) -> Value {
    let (stdout, _) = told(&[&["plan"], arguments, &["--json"]].concat());
    serde_json::from_str(&stdout).expect("JSON")
}

fn is_refused(arguments: &[&str], parts: &[&str]) {
    expect_refused(&pleach(arguments), arguments, parts);
}

/// Two links of 10 GB/s in a line.
const LINE: &str = r#"
[[node]]
name = "a"
kind = "rank"
[[node]]
name = "b"
kind = "rank"
[[node]]
name = "c"
kind = "rank"
[[link]]
from = "a"
to = "b"
bandwidth = 10
[[link]]
from = "b"
to = "c"
bandwidth = 10
"#;

#[test]
fn the_json_of_a_plan_has_exact_rates_in_the_order_that_programs_rely_on() {
    let folder = Folder::new("plan-json");
    let line = folder.file("line.toml", LINE);
    let (text, _) = told(&["plan", "all-reduce", "--topology", &line, "--json"]);
    let keys = [
        "collective",
        "ranks",
        "root",
        "strategy",
        "rate_gb_s",
        "rate",
        "bound_gb_s",
        "bound",
        "optimal",
        "trees",
        "certificate",
        "generation_s",
    ];
    let mut last = 0;
    for key in keys {
        let at = text.find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("{key} is not in {text}"));
        assert!(at >= last || key == "root", "{key} comes too early in {text}");
        last = at.max(last);
    }
    let plan: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(plan["collective"], "all-reduce");
    assert_eq!(plan["ranks"], serde_json::json!(["a", "b", "c"]));
    assert_eq!(plan["root"], Value::Null);
    assert_eq!((&plan["rate"], &plan["bound"]), (&"10000000000/1".into(), &"10000000000/1".into()));
    assert_eq!((plan["rate_gb_s"].as_f64(), plan["optimal"].as_bool()), (Some(10.0), Some(true)));
    assert_eq!(plan["certificate"]["kind"], "partition");
    let words = plan["certificate"]["text"].as_str().expect("text");
    assert!(words.contains("joined") && words.contains("10 GB/s"), "{words}");
    let trees = plan["trees"].as_array().expect("trees");
    assert!(trees.iter().all(|tree| tree["edges"].as_array().map(Vec::len) == Some(2)), "{trees:?}");
    assert!(plan["generation_s"].as_f64().is_some_and(|seconds| seconds > 0.0 && seconds < 60.0));
}

#[test]
fn the_optima_of_known_machines_are_those_of_the_literature() {
    for (collective, topology, rate) in [
        ("broadcast", "dgx-1v", "150000000000/1"),
        ("broadcast", "dgx-1p", "80000000000/1"),
        ("all-reduce", "dgx-1v", "600000000000/7"),
        ("all-gather", "dgx-1v", "1200000000000/7"),
        ("all-gather", "dgx-a100:2", "1040000000000/3"),
    ] {
        let plan = json(&[collective, "--topology", topology]);
        assert_eq!(
            (plan["rate"].as_str(), plan["optimal"].as_bool()),
            (Some(rate), Some(true)),
            "{collective} {topology}"
        );
    }
}

#[test]
fn the_text_of_a_plan_says_what_it_reaches_and_why_in_eighty_columns() {
    for arguments in [
        &["all-reduce", "--topology", "dgx-1v"][..],
        &["all-reduce", "--topology", "dgx-1v", "--only", "0,1,4,5,6"],
        &["broadcast", "--topology", "torus:4x4", "--root", "3"],
        &["all-gather", "--topology", "dgx-a100:2"],
        &["scatter", "--topology", "ring:6", "--root", "2"],
        &["reduce", "--topology", "star:5"],
    ] {
        let (text, _) = told(&[&["plan"], arguments].concat());
        for heading in [
            "optimal: no forwarding schedule can be faster",
            "Why  ",
            "Trees  ",
            "Links  ",
            "Compare  ",
            "Made in  ",
            "GB/s",
        ] {
            assert!(text.contains(heading), "{heading:?} is not in\n{text}");
        }
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest.is_some_and(|widest| widest <= 80), "{widest:?} columns in\n{text}");
    }
    let (text, _) = told(&["plan", "broadcast", "--topology", "dgx-1v"]);
    assert!(text.contains("gpu0 can only be left by 6 links of 25 GB/s"), "{text}");
    let (text, _) = told(&["plan", "all-reduce", "--topology", "dgx-1v"]);
    for other in ["blink", "ring", "double-tree", "reduce-scatter+all-gather"] {
        assert!(text.contains(other), "{other} is not in\n{text}");
    }
    // Of these five no ring visits all over NVLink, so NCCL goes over PCIe.
    let (text, _) = told(&["plan", "all-reduce", "--topology", "dgx-1v", "--only", "0,1,4,5,7"]);
    assert!(text.lines().any(|line| line.trim_start().starts_with("ring")), "{text}");
    // Another strategy is told beside the best one.
    let (text, _) = told(&["plan", "all-reduce", "--topology", "dgx-1v", "--strategy", "blink"]);
    assert!(text.contains("% of the bound of 85.71 GB/s") && text.contains("optimal"), "{text}");
}

#[test]
fn an_allocation_is_renumbered_and_the_root_is_the_new_number() {
    let plan = json(&["broadcast", "--topology", "dgx-1v", "--only", "gpu3,0,gpu4", "--root", "1"]);
    assert_eq!(plan["ranks"], serde_json::json!(["gpu3", "gpu0", "gpu4"]));
    assert_eq!(plan["root"], 1);
    assert!(plan["trees"].as_array().expect("trees").iter().all(|tree| tree["root"] == 1));
}

#[test]
fn a_fixed_number_of_trees_states_its_gap() {
    let plan = json(&["all-gather", "--topology", "dgx-a100:2", "--trees-per-root", "1"]);
    assert_eq!(plan["optimal"], false);
    assert_eq!(plan["trees"].as_array().map(Vec::len), Some(16));
    let rate = plan["rate_gb_s"].as_f64().expect("a rate");
    assert!((342.0..343.0).contains(&rate), "{rate}");
}

#[test]
fn pictures_and_graphs_are_whole_and_name_every_node() {
    let folder = Folder::new("plan-pictures");
    for (collective, topology) in
        [("all-reduce", "dgx-1v"), ("all-gather", "dgx-a100:2"), ("broadcast", "fat-tree:4")]
    {
        let (svg, dot) = (folder.path("plan.svg"), folder.path("plan.dot"));
        told(&["plan", collective, "--topology", topology, "--svg", &svg, "--dot", &dot]);
        let (svg, dot) = (folder.text("plan.svg"), folder.text("plan.dot"));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{topology}");
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
        assert_eq!(svg.matches("<text ").count(), svg.matches("</text>").count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{topology}");
        assert!(svg.contains("prefers-color-scheme") && svg.contains(" %</text>"), "{topology}");
        assert!(dot.starts_with("digraph") && dot.contains("->") && dot.trim_end().ends_with('}'));
        let plan = json(&[collective, "--topology", topology]);
        for rank in plan["ranks"].as_array().expect("ranks") {
            assert!(dot.contains(&format!("{rank} [shape=circle]")), "{rank}");
        }
    }
}

#[test]
fn an_exported_algorithm_and_a_schedule_are_proved_by_verify() {
    let folder = Folder::new("plan-export");
    for (collective, topology) in [
        ("all-reduce", "dgx-1v"),
        ("all-reduce", "ring:5"),
        ("all-gather", "dgx-1p"),
        ("reduce-scatter", "star:4"),
        ("broadcast", "torus:3x3"),
        ("reduce", "dgx-1v"),
    ] {
        let (xml, schedule) = (folder.path("plan.xml"), folder.path("plan.schedule"));
        let arguments =
            ["plan", collective, "--topology", topology, "--msccl", &xml, "--schedule", &schedule];
        let (_, stderr) = told(&arguments);
        assert!(stderr.contains("proved") && stderr.contains("not run on GPUs"), "{stderr}");
        assert!(!matches!(collective, "broadcast" | "reduce") || stderr.contains("has no root"), "{stderr}");
        for file in [&xml, &schedule] {
            let (stdout, _) = told(&["verify", file]);
            assert!(stdout.starts_with("proved: ") && stdout.contains(collective), "{stdout}");
        }
        told(&["verify", &xml, "--collective", collective]);
        is_refused(&["verify", &xml, "--collective", "barrier"], &["other collective", collective]);
    }
    is_refused(
        &["plan", "gather", "--topology", "ring:4", "--msccl", &folder.path("gather.xml")],
        &["no algorithm: ", "gather"],
    );
}

#[test]
fn an_algorithm_that_would_be_too_large_is_refused_with_what_makes_it_smaller() {
    let folder = Folder::new("plan-large");
    let xml = folder.path("plan.xml");
    let plan = |more: &[&'static str]| {
        [&["plan", "all-reduce", "--topology"], more]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let with_xml = |more: &[&'static str]| [plan(more), vec!["--msccl".to_owned(), xml.clone()]].concat();
    let refused = |more: &[&'static str], parts: &[&str]| {
        let arguments = with_xml(more);
        is_refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    };
    refused(&["dgx-a100:2"], &["thread blocks of a GPU", "at most 108", "(--trees-per-root 1)"]);
    let fewer = with_xml(&["dgx-a100:2", "--trees-per-root", "1"]);
    let (_, stderr) = told(&fewer.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(stderr.contains("proved"), "{stderr}");
    let (stdout, _) = told(&["verify", &xml]);
    assert!(stdout.starts_with("proved: "), "{stdout}");
    // Who has few trees already, or a strategy that has no number of them, is told something else.
    refused(&["ring:66", "--trees-per-root", "1"], &["66 trees share one part", "fewer ranks (--only)"]);
    refused(
        &["ring:66", "--strategy", "ring"],
        &["66 trees share one part", "--strategy optimal --trees-per-root 1"],
    );
}

#[test]
fn an_xml_that_is_no_algorithm_is_told_with_its_line() {
    let folder = Folder::new("plan-xml");
    let file = folder.file("system.xml", "<system version=\"1\">\n</system>\n");
    is_refused(&["verify", &file], &["system.xml, line 1: expected '<algo'"]);
}

#[test]
fn what_cannot_be_planned_is_a_usage_error_that_says_what_can() {
    let plan = |more: &[&'static str]| [&["plan"], more].concat();
    is_refused(&plan(&["all-reduce", "--topology", "dgx-9"]), &["'dgx-9'", "dgx-1v"]);
    is_refused(&plan(&["all-reduce", "--topology", "/nowhere/links.toml"]), &["/nowhere/links.toml"]);
    is_refused(&plan(&["broadcast", "--topology", "ring:4", "--root", "4"]), &["rank 4", "0 to 3"]);
    is_refused(&plan(&["all-reduce", "--topology", "ring:4", "--root", "0"]), &["all-reduce has no root"]);
    is_refused(&plan(&["all-to-all", "--topology", "ring:4"]), &["all-to-all", "nothing to pack"]);
    is_refused(
        &plan(&["all-reduce", "--topology", "ring:4", "--strategy", "luck"]),
        &["'luck'", "double-tree"],
    );
    is_refused(&plan(&["all-gather", "--topology", "ring:4", "--trees-per-root", "0"]), &["1 to 64"]);
    is_refused(&plan(&["all-reduce", "--topology", "dgx-1v", "--only", "0,7,9"]), &["no rank 9"]);
    is_refused(&plan(&["all-reduce", "--topology", "dgx-1v", "--only", "0,0"]), &["rank 0 is listed twice"]);
    is_refused(
        &plan(&["all-reduce", "--topology", "dgx-1v", "--only", "gpu0,gpu9"]),
        &["no such rank: 'gpu9'", "numbers from 0 to 7", "names as gpu0 and gpu7"],
    );
    is_refused(
        &plan(&["all-reduce", "--topology", "dgx-1v", "--only", "0,5"]),
        &["{gpu0}, {gpu5} do not reach each other"],
    );
    is_refused(
        &plan(&["all-reduce", "--topology", "ring:4", "--svg", "/nowhere/plan.svg"]),
        &["/nowhere/plan.svg"],
    );
    is_refused(&plan(&["all-reduce"]), &["--topology"]);
}

#[test]
fn a_wrong_file_is_told_by_file_and_line() {
    let folder = Folder::new("plan-wrong");
    for (name, from, to, parts) in [
        ("parts", "from = \"b\"\nto = \"c\"", "from = \"b\"\nto = \"a\"", &["{a, b}, {c} do not reach"][..]),
        ("zero", "bandwidth = 10", "bandwidth = 0", &[":14"]),
        ("negative", "bandwidth = 10", "bandwidth = -3", &[":14"]),
        ("overflow", "bandwidth = 10", "bandwidth = 1e30", &[":14"]),
        ("unknown", "to = \"b\"", "to = \"x\"", &["'x'"]),
        ("twice", "name = \"b\"", "name = \"a\"", &["'a'"]),
        ("key", "bandwidth = 10", "bandwith = 10", &[":14", "bandwith"]),
        ("syntax", "kind = \"rank\"", "kind = rank", &[":4"]),
    ] {
        let text = LINE.replacen(from, to, 1);
        assert_ne!(text, LINE, "{name}");
        let file = folder.file(&format!("{name}.toml"), &text);
        let arguments = ["plan", "all-reduce", "--topology", &file];
        is_refused(&arguments, &[&[file.as_str()], parts].concat());
    }
    let file = folder.file("other.xml", "<algo name=\"x\">\n</algo>\n");
    is_refused(&["plan", "all-reduce", "--topology", &file], &[&file, ":1"]);
}

#[test]
fn a_count_of_links_without_a_bandwidth_says_what_was_assumed() {
    let folder = Folder::new("plan-smi");
    let matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-3\nGPU1\tNV2\t X \t0-3\n";
    let file = folder.file("topo.txt", matrix);
    let (_, stderr) = told(&["plan", "all-reduce", "--topology", &file]);
    assert!(stderr.starts_with("note: ") && stderr.contains("25 GB/s a link"), "{stderr}");
    let plan = |more: &[&str]| json(&[&["all-reduce", "--topology", &file], more].concat())["rate"].clone();
    assert_eq!(plan(&[]), "50000000000/1");
    assert_eq!(plan(&["--nvlink-gb-s", "20"]), "40000000000/1");
    is_refused(&["plan", "all-reduce", "--topology", &file, "--nvlink-gb-s", "-1"], &["--nvlink-gb-s -1"]);
}
