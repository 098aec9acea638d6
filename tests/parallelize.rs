//! `pleach parallelize` as a person calls it.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::fs;
use std::process::{Command, Output};

use launcher::{Folder, expect_refused};
use serde_json::Value;

fn parallelize(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    command.arg("parallelize").args(arguments).output().expect("pleach starts")
}

/// Standard output of what succeeded.
fn told(arguments: &[&str]) -> String {
    let output = parallelize(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn json(arguments: &[&str]) -> Vec<Value> {
    let lines = told(&[arguments, &["--json"]].concat());
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn is_refused(arguments: &[&str], parts: &[&str]) {
    expect_refused(&parallelize(arguments), arguments, parts);
}

const KEYS: [&str; 9] =
    ["model", "machine", "batch", "ranks", "speedup", "bound", "step_s", "paper", "layers"];

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} is no number in {value}"))
}

#[test]
fn each_number_of_ranks_is_a_line_of_json_with_all_keys() {
    let plans = json(&["vgg-a", "--batch", "512", "--ranks", "1,64,128"]);
    assert_eq!(plans.len(), 3);
    for (plan, ranks) in plans.iter().zip([1, 64, 128]) {
        let keys: Vec<&String> = plan.as_object().expect("an object").keys().collect();
        assert_eq!(keys, KEYS);
        assert_eq!((plan["ranks"].as_u64(), plan["batch"].as_u64()), (Some(ranks), Some(512)));
        let layers = plan["layers"].as_array().expect("a list");
        assert_eq!(layers.len(), 11);
        let busy: f64 =
            layers.iter().map(|layer| number(layer, "computing_s") + number(layer, "exposed_s")).sum();
        let late = layers.iter().map(|layer| number(layer, "late_s")).fold(0.0, f64::max);
        assert!((number(plan, "step_s") - busy - late).abs() < 1e-6, "{plan}");
        assert!(number(plan, "bound") >= number(plan, "speedup"));
    }
    assert_eq!((number(&plans[0], "speedup"), &plans[0]["paper"]), (1.0, &Value::Null));
    assert_eq!(number(&plans[2], "paper"), 90.0);
    let first = &plans[2]["layers"][0];
    assert_eq!(number(first, "flop_per_byte"), 0.75 * 224.0 * 224.0 * 512.0 / 128.0);
    let plan = &json(&["vgg-a", "--batch", "512", "--ranks", "64"])[0];
    assert_eq!(format!("{:.2}", number(&plan["layers"][9], "ideal_groups")), "2.83");
}

/// The short form of the claims: the row, the bound at least the paper's figure, the prediction
/// within a factor of it.
#[test]
fn the_five_speedups_of_the_paper_are_bounded_and_fitted() {
    for (model, machine, batch, ranks, paper, factor) in [
        ("vgg-a", "haswell-aries", "512", "128", 90.0, 1.2),
        ("vgg-a", "haswell-aries", "256", "64", 53.0, 1.2),
        ("overfeat-fast", "haswell-aries", "256", "64", 42.0, 1.2),
        ("dnn-7", "haswell-fdr", "1024", "16", 6.5, 1.6),
        ("vgg-a", "aws-10g", "256", "16", 14.0, 1.2),
    ] {
        let plan = &json(&[model, "--machine", machine, "--batch", batch, "--ranks", ranks])[0];
        assert_eq!(number(plan, "paper"), paper);
        assert!(number(plan, "bound") >= paper, "{plan}");
        let speedup = number(plan, "speedup");
        assert!(speedup <= factor * paper && paper <= factor * speedup, "{model} on {ranks}: {speedup}");
    }
}

#[test]
fn splits_and_orders_are_those_that_were_asked_for() {
    let arguments = ["vgg-a", "--batch", "256", "--ranks", "16", "--machine", "aws-10g"];
    let with = |more: &[&str]| json(&[&arguments, more].concat()).remove(0);
    for (split, expected) in
        [("data", "data"), ("model", "model"), ("groups=4", "groups=4"), ("groups=16", "data")]
    {
        let plan = with(&["--split", split]);
        assert_eq!(plan["layers"][0]["split"], "data");
        assert_eq!(plan["layers"][8]["split"], expected);
    }
    let step = |order| number(&with(&["--split", "data", "--order", order]), "step_s");
    // The claim of first layers first.
    assert!(step("fifo") >= 1.15 * step("planned"), "{} {}", step("fifo"), step("planned"));
    // Powers of two that are divided in groups.
    let plans = json(&["vgg-a", "--batch", "256", "--split", "groups=3"]);
    let ranks: Vec<u64> = plans.iter().filter_map(|plan| plan["ranks"].as_u64()).collect();
    assert_eq!(ranks, [3, 6, 12, 24, 48, 96]);
}

#[test]
fn the_table_says_what_is_hidden_and_where_the_design_point_is() {
    let text = told(&["vgg-a", "--batch", "512"]);
    for part in
        ["# vgg-a on haswell-aries: 512 images", "132.9 M weights", "speed-up", "paper", "hidden", "conv8"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(text.contains("# optimal design point: 128 ranks of 4 images"), "{text}");
    assert!(text.contains("# 128 ranks: the paper reports 90; predicted "), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("  ")).count(), 8, "{text}");
}

#[test]
fn a_picture_is_drawn_of_many_ranks_in_a_moment() {
    let folder = Folder::new("parallelize-picture");
    let path = folder.0.join("vgg.svg");
    let began = pleach::transport::clock::now();
    let ranks: Vec<String> = (0..=10).map(|power| (1 << power).to_string()).collect();
    let ranks = ranks.join(",");
    told(&["vgg-a", "--batch", "512", "--ranks", &ranks, "--svg", path.to_str().expect("UTF-8")]);
    let took_s = (pleach::transport::clock::now() - began).as_secs_f64();
    // Far above what it takes, for a machine that is busy and a build without optimization.
    assert!(took_s < 20.0, "{took_s} s");
    let picture = fs::read_to_string(&path).expect("was drawn");
    assert_eq!((picture.matches("<polyline").count(), picture.matches("<circle").count()), (2, 1));
    assert!(picture.contains("conv1 data") && picture.ends_with("</svg>\n"));
}

#[test]
fn files_describe_models_and_machines() {
    let folder = Folder::new("parallelize-files");
    let model = folder.file(
        "net.toml",
        "name = \"net \\u001b[31m<&>\"\n[[layer]]\nkind = \"convolution\"\ninputs = 3\noutputs = 8\nkernel = 3\n\
         side = 32\n[[layer]]\nkind = \"fully-connected\"\ninputs = 8192\noutputs = 10\n",
    );
    let machine =
        folder.file("cluster.toml", "name = \"mine\"\ntflop_per_s = 1\ngb_per_s = 10\nlatency_us = 1.5\n");
    let arguments = [model.as_str(), "--machine", &machine, "--batch", "64", "--ranks", "1,4"];
    let plans = json(&arguments);
    assert_eq!(
        (&plans[1]["machine"], plans[1]["layers"].as_array().map(Vec::len)),
        (&"mine".into(), Some(2))
    );
    assert_eq!(plans[1]["paper"], Value::Null);
    // Software costs nothing there, so the prediction is the bound.
    assert_eq!(plans[1]["speedup"], plans[1]["bound"]);
    let path = folder.0.join("net.svg");
    let text = told(&[&arguments[..], &["--svg", path.to_str().expect("UTF-8")]].concat());
    assert!(!text.contains('\u{1b}') && text.contains("layer2"), "{text}");
    let picture = fs::read_to_string(&path).expect("was drawn");
    assert!(picture.contains("&lt;&amp;&gt;") && !picture.contains('\u{1b}'));
}

#[test]
fn bad_input_is_one_line_that_says_what_to_do() {
    is_refused(&["vgg", "--batch", "1"], &["no such model: 'vgg'", "did you mean 'vgg-a'?", "resnet-50"]);
    is_refused(&["nothing-like-it", "--batch", "1"], &["no such model: 'nothing-like-it'; there are vgg-a"]);
    is_refused(&["vgg-a", "--batch", "1", "--machine", "haswel-fdr"], &["no such machine", "'haswell-fdr'"]);
    is_refused(&["vgg-a"], &["--batch"]);
    is_refused(&["vgg-a", "--batch", "0"], &["no plan: a minibatch of 0 images"]);
    is_refused(&["vgg-a", "--batch", "-5"], &["'-5'", "--batch"]);
    is_refused(&["vgg-a", "--batch", "8", "--ranks", "0"], &["no plan: 0 ranks; give 1 to 65536"]);
    is_refused(&["vgg-a", "--batch", "8", "--ranks", "4,x"], &["'x'", "--ranks"]);
    is_refused(&["vgg-a", "--batch", "8", "--split", "group=3"], &["groups=G"]);
    is_refused(&["vgg-a", "--batch", "8", "--order", "plannd"], &["'planned'"]);
    is_refused(
        &["vgg-a", "--batch", "8", "--ranks", "64", "--split", "groups=7"],
        &["7 groups of 64 ranks are not equal", "64 is 8"],
    );
    let many = vec!["1"; 1_025].join(",");
    is_refused(&["vgg-a", "--batch", "8", "--ranks", &many], &["1025 numbers of ranks; give at most 1024"]);
    is_refused(&["vgg-a", "--batch", "8", "--svg", "/nowhere/at/all.svg"], &["picture not written"]);
}

#[test]
fn files_that_are_wrong_are_refused_with_their_place() {
    let folder = Folder::new("parallelize-wrong");
    let refused = |text: &[u8], parts: &[&str]| {
        let file = folder.file("wrong.toml", text);
        is_refused(&[&file, "--batch", "8"], &[&[file.as_str(), "no model: "], parts].concat());
    };
    refused(b"name = \"a\"\nlayer = 3\n", &["2:9: "]);
    refused(b"\xff\xfe", &["invalid utf-8"]);
    refused(&vec![b'#'; (1 << 20) + 1], &["longer than 1048576 bytes"]);
    // A character that is cut where reading ends.
    refused("é".repeat(1 << 20).as_bytes(), &["longer than 1048576 bytes"]);
    refused(b"name = \"a\"\n[[layer]]\nkind = \"convolution\"\ninputs = 1\noutputs = 1\n", &["no kernel"]);
    let folder = folder.0.to_str().expect("UTF-8");
    is_refused(&[folder, "--batch", "8"], &["no model: "]);
    is_refused(&["vgg-a", "--batch", "8", "--machine", folder], &["no machine: "]);
}
