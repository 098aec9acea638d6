//! `pleach bench` with real processes: every collective over every fabric, and what is refused.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::cell::RefCell;
use std::process::Output;

use launcher::{finish, pleach, text, wait_until};
use pleach::{Collective, DataType};

const FIELDS: [&str; 12] = [
    "collective",
    "fabric",
    "algorithm",
    "dtype",
    "op",
    "ranks",
    "bytes",
    "time_us_p50",
    "time_us_p99",
    "algbw_gb_s",
    "busbw_gb_s",
    "errors",
];

/// Few iterations: these tests are about what is printed and whether it is right.
const QUICK: [&str; 4] = ["--warmup", "2", "--iterations", "20"];

fn bench(arguments: &[&str]) -> Output {
    let mut command = pleach();
    command.arg("bench").args(arguments);
    finish(command)
}

/// A run whose ranks are bound to cores of their own. Jobs of other tests have cores too, for a
/// while.
fn bench_on_own_cores(arguments: &[&str]) -> Output {
    let output = RefCell::new(None);
    wait_until("the ranks have cores of their own", || {
        let latest = bench(arguments);
        let is_bound = !text(&latest.stderr).contains("other jobs have");
        output.replace(Some(latest));
        is_bound
    });
    output.into_inner().expect("a run")
}

/// The fields of a flat JSON object without commas or colons in its strings, in order.
fn fields(line: &str) -> Vec<(&str, &str)> {
    let inner = line.strip_prefix('{').and_then(|line| line.strip_suffix('}')).expect(line);
    let fields = inner.split(',').map(|field| field.split_once(':').expect(line));
    fields.map(|(name, value)| (name.trim_matches('"'), value.trim_matches('"'))).collect()
}

/// Rows of a run that succeeded, each with exactly the promised fields and no wrong element.
fn rows(arguments: &[&str]) -> Vec<Vec<String>> {
    let run = if arguments.contains(&"--bind") { bench_on_own_cores } else { bench };
    let output = run(&[arguments, &QUICK, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    let lines = text(&output.stdout).lines();
    lines
        .map(|line| {
            let fields = fields(line);
            let names: Vec<_> = fields.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, FIELDS, "{line}");
            let values: Vec<String> = fields.iter().map(|(_, value)| (*value).to_owned()).collect();
            assert_eq!(values[11], "0", "errors: {line}");
            let number = |index: usize| values[index].parse::<f64>().expect(line);
            assert!(number(7) > 0.0 && number(8) >= number(7), "times: {line}");
            let bandwidth = number(6) / number(7) / 1e3;
            assert!((number(9) - bandwidth).abs() <= 1e-3 + 0.01 * bandwidth, "bandwidth: {line}");
            values
        })
        .collect()
}

#[test]
fn names_and_letters_of_nccl_tests_are_understood() {
    let sizes = ["-b", "8", "-e", "32", "-f", "2"];
    let rows = rows(&[&["all_reduce", "--dtype", "half", "--fabric", "shm"][..], &sizes].concat());
    let brief: Vec<_> = rows.iter().map(|row| (row[0].as_str(), row[3].as_str(), row[6].as_str())).collect();
    assert_eq!(brief, ["8", "16", "32"].map(|bytes| ("all-reduce", "f16", bytes)));
    for (alias, name) in [("fp32", "f32"), ("double", "f64"), ("bfloat16", "bf16"), ("uint8", "u8")] {
        assert_eq!(alias.parse::<DataType>().expect("it is known").name(), name);
    }
}

fn every_collective_is_measured_and_right(fabric: &str, ranks: &str) {
    for collective in Collective::NAMES {
        let arguments = [
            collective, "--fabric", fabric, "--ranks", ranks, "--min", "24", "--max", "60K", "--factor", "50",
        ];
        let rows = rows(&arguments);
        let parts: u64 = match collective {
            "all-gather" | "reduce-scatter" | "gather" | "scatter" | "all-to-all" => {
                ranks.parse().expect("a number")
            }
            _ => 1,
        };
        let sizes = if collective == "barrier" { vec![0] } else { vec![24, 1200, 60_000, 61_440] };
        let sizes: Vec<u64> = sizes.into_iter().map(|size| size / (4 * parts) * 4 * parts).collect();
        let bytes: Vec<u64> = rows.iter().map(|row| row[6].parse().expect("a number")).collect();
        assert_eq!(bytes, sizes, "{collective}");
        for row in &rows {
            assert_eq!([&row[0], &row[1], &row[5]], [collective, fabric, ranks]);
            let is_reduction = matches!(collective, "all-reduce" | "reduce" | "reduce-scatter");
            assert_eq!(row[4], if is_reduction { "sum" } else { "none" });
        }
    }
}

#[test]
fn every_collective_over_shared_memory_is_measured_and_right() {
    every_collective_is_measured_and_right("shm", "3");
}

#[test]
fn every_collective_over_sockets_is_measured_and_right() {
    every_collective_is_measured_and_right("tcp", "2");
}

#[test]
fn every_collective_in_virtual_time_is_measured_and_right() {
    every_collective_is_measured_and_right("sim", "5");
}

#[test]
fn every_type_and_reduction_is_exact() {
    for dtype in ["f32", "f64", "f16", "bf16", "i32", "i64", "u8"] {
        for op in ["sum", "prod", "min", "max", "avg"] {
            let rows = rows(&[
                "--fabric", "sim", "--ranks", "3", "--max", "8K", "--factor", "1024", "--dtype", dtype,
                "--op", op,
            ]);
            assert_eq!(rows.len(), 2);
            assert!(rows.iter().all(|row| row[3] == dtype && row[4] == op));
        }
    }
}

#[test]
fn the_same_memory_again_any_slice_and_given_sizes_are_measured_and_right() {
    for collective in Collective::NAMES {
        for memory in ["registered", "slice"] {
            let arguments =
                ["--fabric", "shm", "--ranks", "2", "--reuse", "--bind", "core", "--memory", memory];
            let sizes = if collective == "barrier" { vec![] } else { vec!["--sizes", "4K,40"] };
            let rows = rows(&[&[collective][..], &arguments, &sizes].concat());
            let bytes: Vec<&str> = rows.iter().map(|row| row[6].as_str()).collect();
            assert_eq!(bytes, if collective == "barrier" { vec!["0"] } else { vec!["4096", "40"] });
        }
    }
}

#[test]
fn sums_that_are_the_same_bits_again_are_measured_and_right() {
    for (level, dtype) in [("per-world-size", "f32"), ("exact", "f32"), ("exact", "bf16")] {
        let arguments = ["--fabric", "shm", "--ranks", "3", "--sizes", "96,192K", "--dtype", dtype];
        let rows = rows(&[&arguments[..], &["--op", "avg", "--reproducible", level]].concat());
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|row| (row[2] == "exact") == (level == "exact")), "{level}: {rows:?}");
    }
}

#[test]
fn a_time_for_each_size_takes_the_place_of_iterations() {
    let output = bench(&["--fabric", "shm", "--sizes", "8,1M", "--time", "5", "--json"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).lines().filter(|line| line.contains("\"errors\":0}")).count(), 2);
}

#[test]
fn without_a_fabric_both_are_measured_and_the_named_algorithm_is_taken() {
    let rows = rows(&["--max", "8", "--algorithm", "ring"]);
    assert_eq!(rows.len(), 2);
    assert_eq!([&rows[0][1], &rows[1][1]], ["shm", "tcp"]);
    assert!(rows.iter().all(|row| row[2] == "ring" && row[5] == "2"));
}

#[test]
fn virtual_time_is_the_same_each_time() {
    let arguments = ["--fabric", "sim", "--ranks", "4", "--max", "128K", "--factor", "128"];
    assert_eq!(rows(&arguments), rows(&arguments));
}

#[test]
fn a_table_has_a_head_and_a_row_for_each_size() {
    let output = bench(&["--fabric", "sim", "--ranks", "2", "--max", "128"]);
    assert!(output.status.success());
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 3 + 3, "{lines:?}");
    assert!(lines[0].contains("all-reduce") && lines[0].contains("2 ranks"), "{}", lines[0]);
    for column in ["bytes", "count", "dtype", "op", "algorithm", "p50", "p99", "algbw", "busbw", "errors"] {
        assert!(lines[1].contains(column), "{}", lines[1]);
    }
    for (line, bytes) in lines[3..].iter().zip(["8", "32", "128"]) {
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!((words[0], words[9]), (bytes, "0"), "{line}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_in_one_line_that_says_what_to_do() {
    let cases: [(&[&str], &str); 21] = [
        (&["all-reduced"], "all-reduce reduce broadcast"),
        (&["--fabric", "smoke"], "shm tcp sim"),
        (
            &["--algorithm", "chain"],
            "direct exchange recursive-doubling halving-doubling ring double-tree grid:AxB",
        ),
        (&["broadcast", "--algorithm", "ring"], "direct eager eager-tree double-tree chain"),
        (&["--algorithm", "grid:3x1", "--ranks", "4"], "3 places for 4 ranks"),
        (&["--ranks", "0"], "give 1 to"),
        (&["--min", "10"], "the nearest is 12"),
        (&["--max", "65", "--dtype", "f64"], "the nearest is 64"),
        (&["--min", "1M", "--max", "1K"], "exchange them"),
        (&["--factor", "1"], "--factor"),
        (&["--dtype", "f31"], "f32 f64"),
        (&["--op", "mean"], "sum prod min max avg"),
        (&["send-recv", "--ranks", "1"], "send-recv"),
        (&["--sizes", "8,10"], "--sizes 10 is not a multiple of 4 bytes"),
        (&["--sizes", "8", "--max", "64"], "--sizes"),
        (&["--reproducible", "always"], "no per-world-size exact"),
        (&["--memory", "borrowed"], "registered (or host) slice cuda"),
        (&["--fabric", "sim", "--reuse"], "leave them away with --fabric sim"),
        (&["--ranks", "-1"], "'-1' for '--ranks"),
        (&["--min", "512G", "--max", "512G"], "needs 1024G for 2 ranks"),
        (&["--max", "1024G", "--fabric", "sim", "--ranks", "3"], "needs 3072G for 3 ranks"),
    ];
    for (arguments, what) in cases {
        let output = bench(arguments);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(errors.starts_with("error: ") && errors.lines().count() == 1, "{arguments:?}: {errors}");
        assert!(errors.contains(what), "{arguments:?}: {errors}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn inside_a_world_its_ranks_are_taken_and_not_contradicted() {
    let program = env!("CARGO_BIN_EXE_pleach");
    let inside = |bench: &[&str]| {
        let mut command = pleach();
        command.args(["run", "-n", "2", "--", program, "bench", "--max", "8", "--fabric", "tcp"]);
        command.args(QUICK).args(bench);
        finish(command)
    };
    let output = inside(&["--json"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout).lines().count(), 1, "{output:?}");
    assert!(text(&output.stdout).contains("\"ranks\":2"), "{output:?}");

    let output = inside(&["--ranks", "3"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("ranks contradict: --ranks 3"), "{output:?}");
    assert!(output.stdout.is_empty());

    let mut command = pleach();
    command.args(["bench", "--ranks", "3"]);
    command.env("PLEACH_RANK", "0").env("PLEACH_WORLD_SIZE", "2");
    command.env("PLEACH_RENDEZVOUS", "tcp://127.0.0.1:9");
    let output = finish(command);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn what_was_typed_wrongly_is_said_once_by_the_ranks_of_another_launcher() {
    for (rank, said) in [("0", 1), ("1", 0)] {
        let mut command = pleach();
        command.args(["bench", "--algorithm", "smoke"]);
        command.env("OMPI_COMM_WORLD_RANK", rank).env("OMPI_COMM_WORLD_SIZE", "2");
        command.env("PLEACH_RENDEZVOUS", "tcp://127.0.0.1:9");
        let output = finish(command);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_eq!(text(&output.stderr).lines().count(), said, "rank {rank}: {output:?}");
    }
}

/// The kernel would end a process by a signal that makes a file larger than files may be, and
/// shared memory is a file.
#[test]
fn memory_above_a_limit_is_an_error_and_no_signal() {
    let command = format!(
        "ulimit -f 4; exec '{}' bench --fabric shm --sizes 1M --time 1",
        env!("CARGO_BIN_EXE_pleach")
    );
    let output = std::process::Command::new("sh").args(["-c", &command]).output().expect("a shell starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stderr).contains("use --fabric tcp"), "{output:?}");
}

#[test]
fn a_trace_that_cannot_be_written_is_told_also_where_no_log_is_asked_for() {
    for log in [None, Some("")] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pleach"));
        command.args(["bench", "--fabric", "shm", "--sizes", "8", "--iterations", "10"]);
        command.env("PLEACH_TRACE", "/dev/full").env_remove("PLEACH_LOG");
        if let Some(log) = log {
            command.env("PLEACH_LOG", log);
        }
        let output = command.output().expect("starts");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(text(&output.stderr).contains("no trace: /dev/full"), "{log:?}: {output:?}");
    }
}

/// A row of a simulation over links.
fn over_links(arguments: &[&str]) -> serde_json::Value {
    let output = bench(&[arguments, &["--fabric", "sim", "--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_str(text(&output.stdout).lines().next().expect("a row")).expect("JSON")
}

#[test]
fn links_of_a_topology_are_simulated_for_any_size_and_rows_say_how_near_they_come_to_the_bound() {
    for collective in ["broadcast", "all-gather", "reduce-scatter"] {
        let row = over_links(&[collective, "--topology", "dgx-1p", "--sizes", "256M"]);
        assert_eq!(
            (&row["errors"], &row["ranks"], &row["topology"]),
            (&0.into(), &8.into(), &"dgx-1p".into())
        );
        let of_bound = row["of_bound"].as_f64().expect("a number");
        assert!((0.95..=1.0).contains(&of_bound), "{row}");
        assert!(row["algorithm"].as_str().expect("a name").starts_with("packed"), "{row}");
        let near =
            row["predicted_us"].as_f64().expect("a number") / row["time_us_p50"].as_f64().expect("one");
        assert!((0.9..1.1).contains(&near), "{row}");
    }
    // Small enough to be moved and checked; a collective that has no packing has no bound.
    let row = over_links(&[
        "gather",
        "--topology",
        "star:4",
        "--root",
        "3",
        "--sizes",
        "64K",
        "--algorithm",
        "packed",
    ]);
    assert_eq!(row["errors"], 0, "{row}");
    let row = over_links(&["all-to-all", "--topology", "star:4", "--sizes", "64K"]);
    assert!(row["of_bound"].is_null() && row["errors"] == 0, "{row}");
}

#[test]
fn what_links_do_not_allow_is_refused_with_the_ranks_that_they_do_not_join() {
    let refused = |arguments: &[&str]| {
        let output = bench(&[arguments, &["--fabric", "sim", "--sizes", "1M"]].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty() || text(&output.stdout).starts_with('#'));
        text(&output.stderr).to_owned()
    };
    let error = refused(&["all-reduce", "--algorithm", "ring", "--topology", "dgx-1v"]);
    assert!(error.starts_with("error: no schedule: ") && error.contains("which no link joins"), "{error}");
    let error = refused(&["all-reduce", "--topology", "dgx-0"]);
    assert!(error.starts_with("error: ") && error.contains("dgx-0"), "{error}");
    let error = refused(&["all-gather", "--algorithm", "packed", "--ranks", "2"]);
    assert!(error.contains("give a topology"), "{error}");
    let error = refused(&["broadcast", "--root", "4", "--topology", "star:4"]);
    assert!(error.contains("there are ranks 0 to 3"), "{error}");
}
