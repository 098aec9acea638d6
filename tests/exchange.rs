//! `pleach exchange`, as people run it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-exchange-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a new folder");
        Self(path)
    }

    fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).expect("a new file");
        path
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A file of safetensors with this header.
fn file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Two tensors: `weight`, f32 of 2 by 2, and `bias`, u8 of 3.
fn model() -> Vec<u8> {
    let data: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = r#"{"weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"bias":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}}"#;
    file(header, &[&data[..], &[7, 8, 9]].concat())
}

fn pleach(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    for variable in ["PLEACH_FABRIC", "PLEACH_REQUIRE", "PLEACH_METRICS", "PLEACH_SECRET_FILE"] {
        command.env_remove(variable);
    }
    command.arg("exchange").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    pleach(arguments).output().expect("pleach starts")
}

/// Exit status and the line on standard error.
fn refused(output: &Output) -> (Option<i32>, String) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    (output.status.code(), text)
}

/// A serving process, which is killed at the end.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("pleach starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints its address");
        let address = line.trim().strip_prefix("listening on ").map(str::to_owned);
        Self { child, address: address.unwrap_or_else(|| panic!("the address in {line:?}")) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_tensor_is_fetched_in_each_way_and_written_for_numpy() {
    let folder = Folder::new("fetch");
    let model = folder.file("model.safetensors", &model());
    let server = Server::start(&mut pleach(&["serve", &model]));
    let npy = folder.path("weight.npy");
    for (fabric, way) in [("auto", "in place"), ("shm", "in place"), ("none", "inline"), ("tcp", "copied")] {
        let require = if way == "inline" { &[][..] } else { &["--require", "regions"] };
        let fetch = ["fetch", &server.address, "weight", "-o", &npy, "--fabric", fabric, "--json"];
        let output = run(&[&fetch[..], require].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line: Value = serde_json::from_slice(&output.stdout).expect("one line of JSON");
        assert_eq!(
            (&line["name"], &line["type"], &line["way"]),
            (&"weight".into(), &"f32".into(), &way.into())
        );
        assert_eq!((&line["shape"], &line["bytes"]), (&serde_json::json!([2, 2]), &16.into()));
        let written = std::fs::read(&npy).expect("was written");
        assert!(written.starts_with(b"\x93NUMPY\x01\x00"));
        let header = String::from_utf8_lossy(&written[10..128]).into_owned();
        assert!(header.contains("'<f4'") && header.contains("(2, 2,)"), "{header}");
        assert_eq!(written[written.len() - 16..], model_bytes()[..16]);
    }
    let output = run(&["fetch", &server.address, "bias"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("bias: u8[3], 3 bytes, in place in "), "{text}");
}

fn model_bytes() -> Vec<u8> {
    let model = model();
    model[model.len() - 19..].to_vec()
}

#[test]
fn what_cannot_be_fetched_is_one_line_with_its_reason() {
    let folder = Folder::new("refused");
    let model = folder.file("model.safetensors", &model());
    let server = Server::start(&mut pleach(&["serve", &model, "--fabric", "none"]));
    let (status, text) = refused(&run(&["fetch", &server.address, "wieght"]));
    assert_eq!(status, Some(2));
    assert!(text.contains("no tensor 'wieght' of step 0, did you mean 'weight'?"), "{text}");
    let (status, text) = refused(&run(&["fetch", &server.address, "weight", "--require", "regions"]));
    assert_eq!(status, Some(1));
    assert!(text.contains("the other program has no regions"), "{text}");
    let (status, text) = refused(&run(&["fetch", &server.address, "bias", "-o", "/nowhere/x.npy"]));
    assert_eq!(status, Some(2), "{text}");
    for address in ["nowhere", "127.0.0.1", "127.0.0.1:x"] {
        let (status, text) = refused(&run(&["fetch", address, "weight"]));
        assert_eq!(status, Some(2), "{text}");
    }
    let (status, text) = refused(&run(&["fetch", "127.0.0.1:1", "weight", "--timeout", "5"]));
    assert_eq!(status, Some(1));
    assert!(text.contains("was not reached"), "{text}");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("is bound").to_string();
    let (status, text) = refused(&run(&["fetch", &address, "weight", "--timeout", "0.2"]));
    assert_eq!(status, Some(1));
    assert!(text.contains("did not answer within"), "{text}");
}

#[test]
fn a_fetch_without_the_secret_of_the_server_fails_on_both_ends() {
    let folder = Folder::new("secret");
    let model = folder.file("model.safetensors", &model());
    let secret = |name: &str| {
        let path = folder.path(name);
        let made = Command::new(env!("CARGO_BIN_EXE_pleach")).args(["secret", &path]).status();
        assert!(made.expect("pleach starts").success());
        path
    };
    let (one, other) = (secret("one"), secret("other"));
    let server =
        Server::start(pleach(&["serve", &model]).env("PLEACH_SECRET_FILE", &one).stderr(Stdio::null()));
    let fetch = |secret: Option<&str>| {
        let mut command = pleach(&["fetch", &server.address, "weight"]);
        if let Some(secret) = secret {
            command.env("PLEACH_SECRET_FILE", secret);
        }
        command.output().expect("pleach starts")
    };
    assert!(fetch(Some(&one)).status.success());
    for secret in [None, Some(&other[..])] {
        let (status, text) = refused(&fetch(secret));
        assert_eq!(status, Some(1));
        assert!(text.contains("another secret"), "{text}");
    }
}

#[test]
fn a_file_that_is_not_served_is_one_line_with_its_reason() {
    let folder = Folder::new("files");
    let element = r#"{"mask":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#;
    let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    let shape = r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}}"#;
    let cases = [
        ("empty", Vec::new(), "it is too short"),
        ("text", b"this is no model at all".to_vec(), "longer than the file"),
        ("header", file("{", &[]), "no file of safetensors"),
        ("truncated", model()[..model().len() - 1].to_vec(), "its length is not that of its tensors"),
        ("longer", [model(), vec![0]].concat(), "its length is not that of its tensors"),
        ("overlap", file(overlap, &[0; 6]), "no file of safetensors"),
        ("shape", file(shape, &[0; 4]), "no file of safetensors"),
        ("element", file(element, &[0; 2]), "tensor 'mask' has elements of type BOOL"),
    ];
    for (name, content, expected) in cases {
        let path = folder.file(name, &content);
        let (status, text) = refused(&run(&["serve", &path]));
        assert_eq!(status, Some(2), "{name}: {text}");
        assert!(text.contains(expected), "{name}: {text}");
    }
    let (status, text) = refused(&run(&["serve", &folder.path("absent")]));
    assert!(status == Some(2) && text.contains("look at the path"), "{text}");
    let model = folder.file("model.safetensors", &model());
    let (status, text) = refused(&run(&["serve", &model, "--listen", "here"]));
    assert!(status == Some(2) && text.contains("name HOST:PORT"), "{text}");
    let (status, text) = refused(&run(&["serve", &model, "--fabric", "none", "--require", "regions"]));
    assert!(status == Some(2) && text.contains("regions are required"), "{text}");
}

/// Measures a way at a few sizes, which all come right.
fn measured(way: &str, fabric: &str) {
    let sizes = ["--min", "64", "--max", "64K", "--factor", "32", "--json"];
    let output = run(&[&["bench", "--way", way, "--fabric", fabric][..], &sizes].concat());
    assert!(output.status.success(), "{way}: {}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .collect();
    let bytes: Vec<_> = lines.iter().filter_map(|line| line["bytes"].as_u64()).collect();
    assert_eq!(bytes, [64, 2048, 65536]);
    for line in &lines {
        assert_eq!(
            (&line["way"], &line["fabric"], &line["errors"]),
            (&way.into(), &fabric.into(), &0.into())
        );
        assert!(
            line["time_us_p50"].as_f64() > Some(0.0)
                && line["time_us_p99"].as_f64() >= line["time_us_p50"].as_f64()
        );
        // Beside a put, where its end says that the bytes are there.
        let has_put = way == "copied" && fabric == "verbs";
        assert_eq!(line["put_us_p50"].as_f64().is_some_and(|time| time > 0.0), has_put, "{line}");
    }
}

#[test]
fn the_measurement_checks_each_way_of_grpc() {
    for (way, fabric) in [
        ("grpc", "shm"),
        ("grpc-fabric", "shm"),
        ("grpc-fabric", "tcp"),
        ("grpc-reference", "shm"),
        ("grpc-reference", "tcp"),
    ] {
        measured(way, fabric);
    }
}

#[test]
fn the_measurement_checks_each_way_and_fabric_that_it_has() {
    for (way, fabric) in [("in-place", "shm"), ("copied", "shm"), ("copied", "tcp"), ("inline", "tcp")] {
        measured(way, fabric);
    }
    let (status, text) = refused(&run(&["bench", "--way", "in-place", "--fabric", "tcp"]));
    assert!(status == Some(2) && text.contains("sockets map no memory"), "{text}");
    let (status, text) = refused(&run(&["bench", "--min", "8", "--max", "4"]));
    assert!(status == Some(2) && text.contains("bad sizes"), "{text}");
}

mod verbs {
    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_receive_is_measured_beside_a_put() {
        super::measured("copied", "verbs");
    }
}
