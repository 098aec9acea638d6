//! `pleach graph`, as people and programs call it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use pleach::transport::clock;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn light(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("graph-analyzer/tests/data/light/light_{name}.onnx"))
}

fn transformer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("graph-analyzer/tests/data/transformer/transformer.onnx")
}

/// The free dimensions of its inputs.
const SENTENCES: [&str; 4] = ["--dim", "batch=2", "--dim", "length=5"];

fn analyze(model: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    command.args(["graph", "analyze"]).arg(model).args(arguments);
    command.output().expect("pleach starts")
}

fn json(model: &Path, arguments: &[&str]) -> Value {
    let output = analyze(model, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is one object")
}

/// The exit status and the line of an error.
fn refused(model: &Path, arguments: &[&str]) -> (i32, String) {
    let output = analyze(model, arguments);
    let text = String::from_utf8(output.stderr).expect("it is text");
    assert!(output.stdout.is_empty() && text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    (output.status.code().expect("it ended by itself"), text.trim_end().to_owned())
}

/// A file in a folder of its own, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-graph-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("there is a folder for temporary files");
        Self(path)
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).expect("the folder can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_json_has_the_parts_and_the_crossings() {
    let object = json(&light("squeezenet"), &["--ranks", "2", "--planner", "best-fit"]);
    let fields: Vec<&str> = object.as_object().expect("it is an object").keys().map(String::as_str).collect();
    let expected = [
        "model",
        "nodes",
        "tensors",
        "ranks",
        "parts",
        "crossings",
        "operators_without_shapes",
        "crossing_bytes",
        "lower_bound_bytes",
        "arena_bytes",
    ];
    assert_eq!(fields, expected);
    assert_eq!((object["nodes"].as_u64(), object["ranks"].as_u64()), (Some(105), Some(2)));
    let sum = |list: &Value, field: &str| -> u64 {
        list.as_array().expect("it is a list").iter().filter_map(|item| item[field].as_u64()).sum()
    };
    assert_eq!(sum(&object["crossings"], "bytes"), object["crossing_bytes"].as_u64().expect("a number"));
    assert_eq!(sum(&object["parts"], "arena_bytes"), object["arena_bytes"].as_u64().expect("a number"));
    assert_eq!(sum(&object["parts"], "nodes"), 105);
    let crossing = &object["crossings"][0];
    assert_eq!((crossing["from"].as_u64(), crossing["to"].as_u64()), (Some(0), Some(1)));
    assert_eq!((crossing["transfer"].as_str(), crossing["type"].as_str()), (Some("static"), Some("f32")));
    assert_eq!(crossing["space"], "host");
}

#[test]
fn tensors_that_are_received_on_a_gpu_are_named_and_are_in_no_arena_of_the_host() {
    let in_space = |space| json(&light("squeezenet"), &["--ranks", "2", "--space", space]);
    let (host, gpu) = (in_space("1=host"), in_space("1=gpu:3"));
    let space = |object: &Value| object["crossings"][0]["space"].clone();
    assert_eq!((space(&host), space(&gpu)), ("host".into(), "gpu:3".into()));
    let arena = |object: &Value| object["parts"][1]["lower_bound_bytes"].as_u64().expect("a number");
    let slots = 2 * host["crossing_bytes"].as_u64().expect("a number");
    assert!(arena(&gpu) <= arena(&host) && arena(&gpu) + slots >= arena(&host), "{gpu}");
    let words = analyze(&light("squeezenet"), &["--ranks", "2", "--space", "1=gpu:3"]);
    assert!(String::from_utf8_lossy(&words.stdout).contains(", static, gpu:3\n"));
    for (space, says) in [("2=gpu:0", "there are 2 ranks"), ("1=disk", "such as 1=gpu:0")] {
        let refused = analyze(&light("squeezenet"), &["--ranks", "2", "--space", space]);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && error.contains(says), "{error}");
    }
}

#[test]
fn the_words_end_with_the_bottleneck_and_a_picture_is_drawn() {
    let folder = Folder::new("words");
    let picture = folder.0.join("parts.svg");
    let arguments = ["--ranks", "3", "--planner", "tflite", "--svg", picture.to_str().expect("it is text")];
    let output = analyze(&light("vgg19"), &arguments);
    let text = String::from_utf8(output.stdout).expect("it is text");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("Bottleneck   rank "), "{text}");
    let picture = std::fs::read_to_string(picture).expect("it was drawn");
    assert!(picture.starts_with("<svg ") && picture.matches("class=\"box\"").count() == 3, "{picture}");
}

#[test]
fn ranks_that_are_written_into_a_model_are_stages_again() {
    let folder = Folder::new("stages");
    let placed = folder.0.join("placed.onnx");
    let placed_text = placed.to_str().expect("it is text");
    let first = json(&light("shufflenet"), &["--ranks", "3", "--planner", "xla", "-o", placed_text]);
    let again = json(&placed, &["--place", "stages", "--planner", "xla"]);
    for field in ["nodes", "tensors", "ranks", "parts", "crossings", "arena_bytes"] {
        assert_eq!(first[field], again[field], "{field}");
    }
    let (status, error) = refused(&placed, &["--place", "stages", "--ranks", "2"]);
    assert_eq!(status, 2);
    assert!(error.contains("the stages are for 3 ranks, not for 2"), "{error}");
}

#[test]
fn a_symbol_makes_crossings_dynamic_until_it_is_bound() {
    let folder = Folder::new("symbol");
    let model = folder.file(
        "model.graph",
        b"pleach-graph 1\ngraph g\nopset 17\ninput x f32 [batch, 8]\nnode a Relu(x) -> a ? ?\nnode b Relu(a) -> b ? ?\noutput b\n",
    );
    let table = folder.file("ranks.txt", b"a 0\nb 1\n");
    let place = ["--place", table.to_str().expect("it is text")];
    let open = json(&model, &place);
    assert_eq!(open["crossings"][0]["transfer"], "dynamic");
    assert_eq!(open["crossings"][0]["shape"], serde_json::json!(["batch", 8]));
    assert_eq!(open["crossings"][0]["bytes"], Value::Null);
    let bound = json(&model, &[&place[..], &["--dim", "batch=4"]].concat());
    assert_eq!(
        (&bound["crossings"][0]["transfer"], &bound["crossing_bytes"]),
        (&"static".into(), &128.into())
    );
    let (status, error) = refused(&model, &["--dim", "length=4"]);
    assert_eq!(status, 2);
    assert!(error.contains("no dimension is called 'length'; there are batch"), "{error}");
}

#[test]
fn a_report_names_operators_without_shapes_and_obeys_no_name() {
    let folder = Folder::new("names");
    let model = folder.file(
        "model.graph",
        br#"pleach-graph 1 graph g opset 17 input x f32 [8]
            node a com.example:Odd(x) -> "a\u001b[2J\u000ab" ? ? node b "Al\u001bso"(x) -> b f32 [8], c ? ?
            node d Relu("a\u001b[2J\u000ab") -> d ? ? output d"#,
    );
    let table = folder.file("ranks.txt", b"d 1\n* 0\n");
    let place = ["--place", table.to_str().expect("it is text")];
    let output = analyze(&model, &place);
    let text = String::from_utf8(output.stdout).expect("it is text");
    assert!(text.contains("Operators    Al\\u{1b}so, com.example:Odd: shapes of their results do"), "{text}");
    assert!(text.contains("0 -> 1  a\\u{1b}[2J\\nb  "), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    let object = json(&model, &place);
    let expected = serde_json::json!(["Al\u{1b}so", "com.example:Odd"]);
    assert_eq!(object["operators_without_shapes"], expected);
    let (_, error) = refused(&folder.file("bad", b"pleach-graph 1 graph g output \"\\u001b[2J\""), &[]);
    assert!(error.contains("'\\u{1b}[2J'") && !error.contains('\u{1b}'), "{error}");
}

#[test]
fn bad_input_is_one_line_and_an_exit_status() {
    let folder = Folder::new("bad");
    let graph = |name: &str, lines: &str| {
        folder.file(name, format!("pleach-graph 1\ngraph g\nopset 17\n{lines}\n").as_bytes())
    };
    let chain = graph(
        "chain",
        "input x f32 [64]\nnode a Relu(x) -> a ? ?\nnode b Relu(a) -> b ? ?\nnode c Relu(b) -> c ? ?\noutput c",
    );
    let table = |name: &str, text: &str| folder.file(name, text.as_bytes()).display().to_string();
    let whole = std::fs::read(light("squeezenet")).expect("the model is in the tree");
    let cases: Vec<(PathBuf, Vec<String>, i32, &str)> = vec![
        (folder.0.join("missing"), vec![], 2, "model not read"),
        (folder.0.clone(), vec![], 2, "model not read"),
        (folder.file("text", b"not a model"), vec![], 2, "no ONNX model"),
        (folder.file("cut", &whole[..whole.len() / 2]), vec![], 2, "no ONNX model"),
        (
            graph("cycle", "node a Relu(b) -> a ? ?\nnode b Relu(a) -> b ? ?"),
            vec![],
            2,
            "the nodes form a cycle",
        ),
        (graph("weights", "const w f32 [1] in \"w.bin\" at 0"), vec![], 2, "put it beside the model"),
        (graph("dims", "input x f32 [2]\nnode a Relu(x) -> a f32 [3]"), vec![], 2, "correct the dimensions"),
        (chain.clone(), vec!["--place".into(), table("names", "d 0\n* 1")], 2, "no node matches 'd'"),
        (
            chain.clone(),
            vec!["--place".into(), table("high", "a 0\n* 3"), "--ranks".into(), "2".into()],
            2,
            "there are 2 ranks",
        ),
        (chain.clone(), vec!["--place".into(), table("back", "b 1\n* 0")], 2, "the parts form a cycle: rank"),
        (
            chain.clone(),
            vec!["--place".into(), "pipelin".into()],
            2,
            "use pipeline, min-cut, stages or a file",
        ),
        (chain.clone(), vec!["--place".into(), "stages".into()], 2, "has no pipeline_stage"),
        (chain.clone(), vec!["--ranks".into(), "4".into()], 2, "take at most 3 ranks"),
        (chain.clone(), vec!["--memory".into(), "256".into()], 1, "256 more than the limit of 256"),
        (chain.clone(), vec!["--imbalance".into(), "5".into()], 2, "give it with --place min-cut"),
        (
            chain,
            vec!["--svg".into(), folder.0.join("no/folder").display().to_string()],
            1,
            "name another file",
        ),
    ];
    for (model, arguments, status, text) in cases {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (own, error) = refused(&model, &arguments);
        assert_eq!(own, status, "{error}");
        assert!(error.contains(text), "{error}");
    }
}

fn run(model: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    command.args(["graph", "run"]).arg(model).args(arguments);
    command.output().expect("pleach starts")
}

/// The lines of a run with `--json`: of each rank, and of all.
fn run_json(model: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = run(model, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("it is text");
    text.lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
}

fn fields(object: &Value) -> Vec<&str> {
    object.as_object().expect("it is an object").keys().map(String::as_str).collect()
}

#[test]
fn a_model_on_two_ranks_has_the_outputs_of_one_process_and_copies_no_tensor_later() {
    run_on_two_ranks("shm", &light("squeezenet"), &["--random-weights", "1"]);
}

mod verbs {
    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_model_on_two_ranks_has_the_outputs_of_one_process_and_copies_no_tensor_later() {
        // An emulated processor takes more than half a minute for an image.
        super::run_on_two_ranks("verbs", &super::transformer(), &super::SENTENCES);
    }
}

fn run_on_two_ranks(fabric: &str, model: &Path, of_model: &[&str]) {
    let arguments = ["--ranks", "2", "--iterations", "4", "--check", "--fabric", fabric];
    let lines = run_json(model, &[&arguments[..], of_model].concat());
    let of_rank = [
        "rank",
        "iterations",
        "copies_first",
        "copies_later",
        "copied_bytes",
        "bytes_in",
        "bytes_out",
        "heap_allocations_later",
        "arena_bytes",
        "compute_us_p50",
        "wait_us_p50",
    ];
    assert_eq!(lines.len(), 3);
    for (rank, line) in lines[..2].iter().enumerate() {
        assert_eq!(fields(line), of_rank);
        assert_eq!((line["rank"].as_u64(), line["iterations"].as_u64()), (Some(rank as u64), Some(4)));
        assert_eq!(line["copies_later"].as_u64(), Some(0), "{line}");
        assert_eq!(line["heap_allocations_later"].as_u64(), Some(0), "{line}");
        assert!(line["arena_bytes"].as_u64() > Some(0), "{line}");
    }
    assert_eq!(lines[0]["bytes_out"], lines[1]["bytes_in"]);
    let of_all = [
        "iterations_per_s",
        "latency_us_p50",
        "handover_us_p50",
        "equal_to_parts",
        "largest_difference",
        "runtime",
        "fabric",
        "transfer",
    ];
    assert_eq!(fields(&lines[2]), of_all);
    assert_eq!(lines[2]["equal_to_parts"].as_bool(), Some(true));
    assert!(
        lines[2]["largest_difference"].as_f64().is_some_and(|difference| difference < 1e-4),
        "{}",
        lines[2]
    );
    let names =
        ["runtime", "fabric", "transfer"].map(|name| lines[2][name].as_str().expect("a name").to_owned());
    assert_eq!(names, ["rten", fabric, "zero-copy"]);
}

#[test]
fn tensors_of_a_run_are_copied_if_that_is_asked_for_and_cross_sockets_too() {
    let arguments = ["--ranks", "3", "--iterations", "3", "--check"];
    let copied = ["--transfer", "copy", "--fabric", "tcp", "--depth", "1"];
    let lines = run_json(&transformer(), &[&arguments[..], &SENTENCES, &copied].concat());
    assert_eq!(lines[3]["equal_to_parts"].as_bool(), Some(true));
    assert_eq!((lines[3]["fabric"].as_str(), lines[3]["transfer"].as_str()), (Some("tcp"), Some("copy")));
    let (first, later) = (lines[0]["copies_first"].as_u64(), lines[0]["copies_later"].as_u64());
    assert!(first > Some(0) && later == first.map(|first| 2 * first), "{}", lines[0]);
}

/// The other ways of the comparison.
#[test]
fn tensors_of_a_run_cross_by_grpc_over_sockets_and_over_each_fabric() {
    let arguments = ["--ranks", "3", "--iterations", "7", "--check"];
    for (transfer, fabric, depth) in
        [("grpc", "shm", "2"), ("grpc", "tcp", "1"), ("grpc-fabric", "shm", "1"), ("grpc-fabric", "tcp", "3")]
    {
        let of_way = ["--transfer", transfer, "--fabric", fabric, "--depth", depth];
        let lines = run_json(&transformer(), &[&arguments[..], &SENTENCES, &of_way].concat());
        assert_eq!(lines[3]["equal_to_parts"].as_bool(), Some(true), "{transfer} over {fabric}");
        assert_eq!(
            (lines[3]["fabric"].as_str(), lines[3]["transfer"].as_str()),
            (Some(fabric), Some(transfer))
        );
        let later: Vec<Option<u64>> = lines[..3].iter().map(|line| line["copies_later"].as_u64()).collect();
        assert_eq!(later, [Some(0); 3], "messages are made from where the tensors are");
    }
}

#[test]
fn what_cannot_run_is_refused_in_a_line_that_says_what_to_do() {
    let folder = Folder::new("unfit-runs");
    let file = |name: &str, text: &str| folder.file(name, text.as_bytes());
    let graph = "pleach-graph 1\ngraph g\nopset 17\n";
    let free = file("free", &format!("{graph}input x f32 [batch, 8]\nnode a Relu(x) -> a ? ?\noutput a\n"));
    let missing =
        file("missing", &format!("{graph}input x f32 [8]\nnode a Nonsense(x) -> a ? ?\noutput a\n"));
    let weight = file(
        "weight",
        &format!("{graph}input x f32 [8]\nconst w f32 [8]\nnode a Add(x, w) -> a ? ?\noutput a\n"),
    );
    let double = file("double", &format!("{graph}input x f64 [8]\nnode a Relu(x) -> a ? ?\noutput a\n"));
    // A tensor of two numbers: dims 2, type 1, eight raw bytes.
    let input = folder.file("x.pb", &[8, 2, 16, 1, 74, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
    let no_input = file("no-input", "nonsense");
    let input = input.to_str().expect("it is text");
    let cases: [(&Path, &[&str], &str); 8] = [
        (&free, &[], "give --dim batch=SIZE"),
        (&missing, &[], "rten has no operator Nonsense; run with --runtime onnxruntime"),
        (&weight, &[], "only the shape of the weight 'w'; give --random-weights SEED"),
        (&double, &[], "rten has no tensors of f64"),
        (
            &free,
            &["--dim", "batch=1", "--input", input],
            "the input 'x' is f32 [1, 8], and the file has f32 [2]",
        ),
        (&weight, &["--input", input, "--input", input], "2 files of inputs for 1 inputs"),
        (&weight, &["--input", no_input.to_str().expect("it is text")], "no-input"),
        (&weight, &["--runtime", "onnxruntime", "--library", "/nonexistent.so"], "no library of onnxruntime"),
    ];
    for (model, arguments, expected) in cases {
        let output = run(model, arguments);
        let error = String::from_utf8(output.stderr).expect("it is text");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        assert!(error.contains(expected), "{error} does not contain {expected}");
    }
    let output = run(&missing, &["--ranks", "1", "--place", "nowhere"]);
    assert_eq!(output.status.code(), Some(2));
    // Two ranks: the launcher repeats what a rank says, in one line.
    let two = file(
        "two",
        &format!("{graph}input x f32 [8]\nnode a Relu(x) -> a ? ?\nnode b Nonsense(a) -> b ? ?\noutput b\n"),
    );
    let output = run(&two, &["--ranks", "2"]);
    let error = String::from_utf8(output.stderr).expect("it is text");
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.lines().count() == 1 && error.contains("Nonsense"), "{error}");
}

/// The most that a test waits for a process, also on a slow machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// A rank that does not outlive its test.
struct Running(Option<Child>);

impl Running {
    fn start(mut command: Command) -> Self {
        Self(Some(command.stderr(Stdio::piped()).spawn().expect("pleach starts")))
    }

    fn child(&mut self) -> &mut Child {
        self.0.as_mut().expect("it was not waited for")
    }

    fn runs(&mut self) -> bool {
        self.child().try_wait().expect("it is a child").is_none()
    }

    fn signal(&mut self, signal: Signal) {
        kill_process(Pid::from_child(self.child()), signal).expect("it was not waited for");
    }

    /// What it printed, which is short, when it has ended.
    fn output(mut self) -> Output {
        let end = clock::now() + PATIENCE;
        while self.runs() {
            assert!(clock::now() < end, "the rank does not end");
            pause(20);
        }
        self.0.take().expect("it was not waited for").wait_with_output().expect("it is a child")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts two ranks whose parts compute for some microseconds.
fn start_small(folder: &Folder, iterations: &str, arguments: &[&str]) -> [Running; 2] {
    let model = folder.file(
        "small",
        b"pleach-graph 1\ngraph g\nopset 17\ninput x f32 [16, 64]\nconst w f32 [64, 64]\n\
          node a MatMul(x, w) -> a ? ?\nnode b Relu(a) -> b ? ?\noutput b\n",
    );
    let table = folder.file("ranks", b"a 0\nb 1\n");
    let rendezvous = format!("file://{}", folder.0.display());
    ["0", "1"].map(|rank| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
        command.args(["graph", "run"]).arg(&model).args(["--random-weights", "1", "--place"]).arg(&table);
        command.args(["--fabric", "shm", "--iterations", iterations]).args(arguments);
        command.args(["--world-size", "2", "--rank", rank, "--rendezvous", &rendezvous]);
        command.stdout(Stdio::piped());
        Running::start(command)
    })
}

/// Waits until the second rank has memory of tensors: they cross. The time for that does not
/// matter.
fn wait_until_tensors_cross(ranks: &mut [Running; 2]) {
    let maps = format!("/proc/{}/maps", ranks[1].child().id());
    let end = clock::now() + PATIENCE;
    while !std::fs::read_to_string(&maps).expect("it runs").contains("pleach-lendable") {
        assert!(ranks[1].runs(), "rank 1 ended early");
        assert!(clock::now() < end, "no tensor crosses");
        pause(20);
    }
}

fn pause(ms: i64) {
    let time = rustix::time::Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
    let _ = rustix::event::poll(&mut [], Some(&time));
}

#[test]
fn a_rank_that_is_stopped_for_longer_than_the_limit_is_named_and_the_others_end_in_time() {
    for victim in [0, 1] {
        let folder = Folder::new(&format!("stopped-{victim}"));
        let mut ranks = start_small(&folder, "1000000000", &["--timeout", "4"]);
        wait_until_tensors_cross(&mut ranks);
        let [first, second] = ranks;
        let (mut stopped, other) = if victim == 0 { (first, second) } else { (second, first) };
        stopped.signal(Signal::STOP);
        let since = clock::now();
        let output = other.output();
        let waited = clock::now().since(since);
        let error = String::from_utf8(output.stderr).expect("it is text");
        assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
        assert!(
            error.starts_with(&format!("error: run ended: rank {}, the tensor 'a'", 1 - victim)),
            "{error}"
        );
        assert!(error.contains(&format!("rank {victim} ")), "{error}");
        assert!((Duration::from_secs(3)..Duration::from_secs(30)).contains(&waited), "{waited:?}: {error}");
    }
}

#[test]
fn ranks_that_are_stopped_for_a_short_time_again_and_again_compute_the_same() {
    let folder = Folder::new("slowed");
    let mut ranks = start_small(&folder, "30000", &["--check", "--json"]);
    wait_until_tensors_cross(&mut ranks);
    // The first stop is long; each rank has its turns. Then the ranks run to their end, which may
    // come earlier where this test does not run for long.
    let mut stops = 0;
    for stop in 0..8 {
        if !ranks.iter_mut().all(Running::runs) {
            break;
        }
        let slowed = &mut ranks[stop % 2];
        slowed.signal(Signal::STOP);
        pause(if stop == 0 { 1000 } else { 30 });
        slowed.signal(Signal::CONT);
        stops += 1;
        pause(5);
    }
    println!("{stops} stops");
    assert!(stops > 0, "they ended before the first stop");
    let [first, second] = ranks.map(Running::output);
    let errors = [&first, &second].map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(first.status.success() && second.status.success(), "{errors:?}");
    let text = String::from_utf8(first.stdout).expect("it is text");
    let all: Value = serde_json::from_str(text.lines().last().expect("there are lines")).expect("an object");
    assert_eq!(all["equal_to_parts"].as_bool(), Some(true), "{text}");
}

/// Kills a rank while tensors cross from the first to the second. Returns the error of the other.
fn error_after_a_kill(victim: u32, transfer: &str) -> String {
    let folder = Folder::new(&format!("killed-{transfer}"));
    let rendezvous = format!("file://{}", folder.0.display());
    let rank = |rank: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
        command.args(["graph", "run"]).arg(light("squeezenet")).args(["--random-weights", "1"]);
        // More iterations than anybody waits for.
        command.args(["--fabric", "shm", "--iterations", "1000000000", "--transfer", transfer]);
        command.args(["--world-size", "2", "--rank", rank, "--rendezvous", &rendezvous]);
        command.stdout(Stdio::null());
        Running::start(command)
    };
    let mut ranks = [rank("0"), rank("1")];
    wait_until_tensors_cross(&mut ranks);
    let [first, second] = ranks;
    let (victim, other) = if victim == 0 { (first, second) } else { (second, first) };
    // It is killed.
    drop(victim);
    let output = other.output();
    let error = String::from_utf8(output.stderr).expect("it is text");
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

#[test]
fn a_rank_whose_peer_is_killed_says_which_and_which_tensor_it_waited_for() {
    let error = error_after_a_kill(1, "zero-copy");
    assert!(error.starts_with("error: run ended: rank 0, the tensor '"), "{error}");
    assert!(error.contains("rank 1 is lost"), "{error}");
}

#[test]
fn a_rank_whose_sender_is_killed_in_a_run_by_grpc_says_which_and_which_tensor_it_waited_for() {
    for transfer in ["grpc", "grpc-fabric"] {
        let error = error_after_a_kill(0, transfer);
        assert!(error.starts_with("error: run ended: rank 1, the tensor '"), "{error}");
        assert!(error.contains("did not come from rank 0 by gRPC"), "{error}");
    }
}
