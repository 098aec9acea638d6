//! `pleach scale`, and `pleach bench` of a thousand ranks: what they print, and what they refuse.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::process::Output;

use launcher::{finish, pleach, text};
use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.args(arguments);
    finish(command)
}

fn lines(arguments: &[&str]) -> Vec<Value> {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    let rows = text(&output.stdout).lines().map(|line| serde_json::from_str(line).expect(line));
    rows.collect()
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} of {row}"))
}

#[test]
fn sizes_that_round_to_the_same_blocks_have_points_of_their_own() {
    let output = run(&["scale", "all-gather", "--topology", "star", "--ranks", "8", "--sizes", "4,64,66"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    let sections: Vec<&str> = printed.split("\n# ").skip(1).collect();
    let rows = |size: &str| {
        let named = sections.iter().filter(|section| section.lines().next() == Some(size));
        named
            .map(|section| section.lines().filter(|line| line.trim().starts_with("8 ")).count())
            .sum::<usize>()
    };
    assert!(rows("64") > 0 && rows("64") == rows("66"), "{printed}");
    assert_eq!(rows("4"), 0, "a block of a rank has no bytes: {printed}");
    let refused = run(&["scale", "all-gather", "--topology", "star", "--ranks", "8", "--sizes", "4"]);
    assert!(!refused.status.success());
    let error = text(&refused.stderr);
    assert!(error.contains("give sizes of at least one byte for each block"), "{error}");
}

#[test]
fn a_thousand_ranks_are_benched_in_virtual_time_and_the_row_says_how_many_were_carried_out() {
    let rows = lines(&[
        "bench",
        "all-reduce",
        "--fabric",
        "sim",
        "--topology",
        "dgx-h100:128",
        "--sizes",
        "1M,1G",
        "--json",
    ]);
    assert_eq!(rows.len(), 2);
    for row in &rows {
        assert_eq!((&row["ranks"], &row["errors"]), (&1024.into(), &Value::Null), "{row}");
        assert!((1.0..=8.0).contains(&number(row, "carried_out")), "{row}");
        assert!(number(row, "of_bound") <= 1.0, "{row}");
        assert!(number(row, "time_us_p50") > 0.0 && number(row, "predicted_us") > 0.0, "{row}");
    }
    assert!(number(&rows[1], "of_bound") > 0.5, "{}", rows[1]);
    let table = run(&[
        "bench",
        "all-gather",
        "--fabric",
        "sim",
        "--topology",
        "star:300",
        "--sizes",
        "300K",
        "--algorithm",
        "direct",
    ]);
    let table = text(&table.stdout);
    assert!(table.contains("plans without data") && table.contains("carried out"), "{table}");
}

#[test]
fn a_scale_has_a_point_for_each_algorithm_number_of_ranks_and_size() {
    let svg = std::env::temp_dir().join(format!("pleach-scale-{}.svg", std::process::id()));
    let path = svg.to_str().expect("a path");
    let rows = lines(&[
        "scale",
        "all-reduce",
        "--topology",
        "dgx-h100",
        "--ranks",
        "8..64",
        "--sizes",
        "1M,64M",
        "--json",
        "--svg",
        path,
    ]);
    let picture = std::fs::read_to_string(&svg).expect("a picture");
    std::fs::remove_file(&svg).expect("it is there");
    assert!(picture.starts_with("<svg") && picture.contains("<circle"), "{picture}");
    let mut simulations = 0;
    for ranks in [8, 16, 32, 64] {
        let of_ranks: Vec<&Value> = rows.iter().filter(|row| row["ranks"] == ranks).collect();
        assert!(of_ranks.len() >= 8, "{ranks}: {}", of_ranks.len());
        for row in of_ranks {
            let (model, bound) = (number(row, "model_us"), number(row, "bound_us"));
            assert!(model > 0.0 && row["bound_is_of_packing"] == true, "{row}");
            if row["simulated_us"].is_null() {
                let why = row["not_simulated"].as_str().expect("a reason");
                assert!(why.contains("events on links"), "{row}");
                continue;
            }
            let simulated = number(row, "simulated_us");
            assert!(simulated >= bound * (1.0 - 1e-3) && number(row, "of_bound") <= 1.001, "{row}");
            assert!(model <= simulated * 1.1, "{row}");
            simulations += 1;
        }
    }
    assert!(simulations > 30, "only {simulations}");
    let table = run(&["scale", "broadcast", "--topology", "star", "--ranks", "4,9", "--sizes", "1M"]);
    let table = text(&table.stdout);
    for word in ["# broadcast root 0 on star", "double-tree", "of bound", "carried out"] {
        assert!(table.contains(word), "{word}: {table}");
    }
}

#[test]
fn slow_links_failed_links_and_late_ranks_take_longer() {
    let time = |more: &[&str]| {
        let scale =
            ["scale", "all-reduce", "--topology", "star", "--ranks", "16", "--sizes", "16M", "--json"];
        let rows = lines(&[&scale[..], more].concat());
        let ring = rows.iter().find(|row| row["algorithm"] == "ring").expect("a ring").clone();
        (number(&ring, "simulated_us"), ring)
    };
    let (usual, row) = time(&[]);
    assert_eq!(row["carried_out"], 1, "{row}");
    let (slow, row) = time(&["--slow-link", "0.5"]);
    assert!(slow > 1.8 * usual && slow < 2.3 * usual && row["carried_out"] == 16, "{usual} us, {row}");
    let (late, row) = time(&["--jitter", "uniform:2ms", "--seed", "3"]);
    assert!(late > usual + 500.0 && late < usual + 2_100.0, "{usual} us, {row}");
    assert_eq!(time(&["--jitter", "uniform:2ms", "--seed", "3"]).0, late);
    assert_ne!(time(&["--jitter", "uniform:2ms", "--seed", "4"]).0, late);
    // A rank of a torus whose link has failed is still joined by others.
    let failed =
        ["scale", "all-reduce", "--topology", "torus", "--ranks", "16", "--sizes", "1M", "--slow-link", "0"];
    let output = run(&failed);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("no link joins"), "{}", text(&output.stderr));
}

#[test]
fn what_cannot_be_scaled_is_refused_in_one_line_that_says_what_to_give() {
    for (arguments, wanted) in [
        (&["--topology", "dgx-h100:4"][..], "write dgx-h100"),
        (&["--topology", "dgx-0"], "dgx-a100"),
        (&["--topology", "Cargo.toml"], "a file has one number of ranks"),
        (&["--topology", "star", "--ranks", "1..8"], "2 to 16384"),
        (&["--topology", "star", "--ranks", "8..20000"], "2 to 16384"),
        (&["--topology", "dgx-h100", "--ranks", "8,12"], "no dgx-h100 of 12 ranks"),
        (&["--topology", "mesh", "--ranks", "4096"], "take a smaller one"),
        (&["--topology", "star", "--slow-link", "1.5"], "from 0 to 1"),
        (&["--topology", "star", "--ranks", "8", "--slow-link", "0"], "do not reach each other"),
        (&["--topology", "star", "--jitter", "normal:2us"], "uniform:MOST"),
        (&["--topology", "star", "--seed", "2"], "--jitter"),
        (&["--topology", "star", "--root", "2"], "has no root"),
        (&[], "--topology"),
    ] {
        let output = run(&[&["scale", "all-reduce", "--sizes", "1M"], arguments].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("error: ") && error.contains(wanted), "{arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let bench = |arguments: &[&str]| {
        let output = run(&[&["bench", "all-reduce", "--fabric", "sim", "--sizes", "1M"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stderr).to_owned()
    };
    let error = bench(&["--topology", "dgx-h100:128", "--algorithm", "ring"]);
    assert!(error.contains("no schedule: ring") && error.contains("which no link joins"), "{error}");
    let error = bench(&["--topology", "dgx-h100:128", "--algorithm", "packed"]);
    assert!(error.contains("no schedule: packed"), "{error}");
    let error = bench(&["--topology", "star:512", "--algorithm", "ring"]);
    assert!(error.contains("signal slots"), "{error}");
    let error = bench(&["--ranks", "65"]);
    assert!(error.contains("--topology star:65"), "{error}");
    let error = bench(&["--topology", "star:300", "--ranks", "299"]);
    assert!(error.contains("--ranks"), "{error}");
}
