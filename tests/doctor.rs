//! `pleach doctor` and `pleach devices` on this machine, and, where it has RDMA devices that may be
//! broken, on broken ones.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use launcher::{finish, pleach};
use serde_json::Value;

fn report(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr));
    })
}

/// The only finding about this.
fn finding<'a>(report: &'a Value, subject: &str) -> &'a Value {
    let findings = report["findings"].as_array().expect("a list");
    let mut of = findings.iter().filter(|finding| finding["subject"] == subject);
    let found = of.next().unwrap_or_else(|| panic!("nothing about {subject}: {report:#}"));
    assert!(of.next().is_none(), "{subject} is there twice");
    found
}

fn has(finding: &Value, field: &str, words: &str) {
    assert!(finding[field].as_str().is_some_and(|text| text.contains(words)), "no '{words}' in {finding:#}");
}

#[test]
fn this_machine_is_looked_at_and_the_status_says_whether_there_is_a_problem() {
    let mut command = pleach();
    command.args(["doctor", "--json"]);
    let output = finish(command);
    let report = report(&output);
    let problems = report["problems"].as_u64().expect("a number");
    assert_eq!(output.status.code(), Some(i32::from(problems > 0)), "{report:#}");
    for section in ["limits", "processors and memory", "sockets", "RDMA", "GPU memory"] {
        let findings = report["findings"].as_array().expect("a list");
        assert!(findings.iter().any(|finding| finding["section"] == section), "nothing of {section}");
    }
    for finding in report["findings"].as_array().expect("a list") {
        let needs_command = ["warning", "problem"].contains(&finding["level"].as_str().expect("a level"));
        assert!(!needs_command || finding["command"].is_string(), "nothing mends {finding:#}");
    }
    let uses = report["uses"].as_str().expect("a text");
    assert!(uses.contains("shm inside this host") && uses.contains("--fabric verbs"), "{uses}");
    if !std::path::Path::new("/sys/class/infiniband").exists() {
        assert!(uses.contains("there is no RDMA device"), "{uses}");
        assert_eq!(finding(&report, "devices")["level"], "ok");
    }
    let mut command = pleach();
    command.arg("doctor");
    let text = String::from_utf8(finish(command).stdout).expect("text");
    assert!(text.contains("\nlimits\n") && text.trim_end().ends_with(" ok"), "{text}");
}

#[test]
fn devices_are_listed_for_people_and_programs() {
    let mut command = pleach();
    command.args(["devices", "--json"]);
    let output = finish(command);
    assert!(output.status.success());
    let devices = report(&output);
    assert!(devices["shm"].as_str().expect("a text").contains("free"));
    for interface in devices["tcp"].as_array().expect("a list") {
        assert!(interface["mtu"].as_u64().expect("a number") >= 68, "{interface}");
    }
    assert!(
        devices["rdma"].is_array() && devices["verbs"]["usable"].is_boolean() && devices["gpus"].is_array()
    );
    let mut command = pleach();
    command.arg("devices");
    let text = String::from_utf8(finish(command).stdout).expect("text");
    assert!(text.starts_with("shm    this host, "), "{text}");
    for kind in ["\nverbs", "\ncuda"] {
        assert!(text.contains(kind), "{text}");
    }
}

#[test]
fn a_benchmark_over_rdma_that_is_not_there_says_what_is_missing_and_what_to_take_instead() {
    let mut command = pleach();
    command
        .args(["bench", "all-reduce", "--fabric", "verbs", "--ranks", "2", "--sizes", "8"])
        .env("PLEACH_VERBS_DEVICE", "none");
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("fabric verbs not usable: rank 0: "), "{error}");
    let known =
        ["libibverbs is not here", "this machine has no RDMA device", "there is no RDMA device 'none'"];
    assert!(
        known.iter().any(|reason| error.contains(reason)) && error.contains("choose another fabric"),
        "{error}"
    );
}

/// A report of each side of a pair: who listens at this address, and who comes, each with its own
/// interface.
fn pair(address: &str, interfaces: Option<[&str; 2]>, secret: Option<&PathBuf>) -> [(Value, Option<i32>); 2] {
    let side = |number: usize| {
        let mut command = pleach();
        if let Some(interfaces) = interfaces {
            command.env("PLEACH_INTERFACE", interfaces[number]);
        }
        if let Some(secret) = secret {
            command.env("PLEACH_SECRET_FILE", secret);
        }
        command
    };
    let mut listener = side(1);
    listener.args(["doctor", "--listen", address, "--wait", "120", "--json"]);
    let mut listener = listener.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // It says where it listens, as soon as it does.
    let mut said = BufReader::new(listener.stderr.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("it says something");
    let port =
        line.rsplit(':').next().and_then(|rest| rest.split('\'').next()).unwrap_or_else(|| panic!("{line}"));
    let mut dialer = side(0);
    let host = address.rsplit_once(':').expect("a port").0;
    dialer.args(["doctor", "--peer", &format!("{host}:{port}"), "--json"]);
    let dialed = finish(dialer);
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("it ends");
    let listened = listener.wait_with_output().expect("it ends");
    [(report(&dialed), dialed.status.code()), (report(&listened), listened.status.code())]
}

#[test]
fn a_pair_tells_both_that_they_reach_each_other() {
    for (report, _) in pair("127.0.0.1:0", None, None) {
        for subject in ["pleach", "ports from here", "ports from there", "join", "shared memory", "clocks"] {
            assert_eq!(finding(&report, subject)["level"], "ok", "{report:#}");
        }
        has(finding(&report, "shared memory"), "text", "share memory (shm)");
    }
}

#[test]
fn a_peer_that_is_not_there_and_a_missing_secret_say_what_to_do() {
    let mut command = pleach();
    command.args(["doctor", "--peer", "127.0.0.1:1"]);
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("peer not reached: 127.0.0.1:1") && error.contains("--listen"), "{error}");
    let mut command = pleach();
    command.args(["doctor", "--listen", "0.0.0.0:0", "--wait", "1"]);
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("no secret") && error.contains("PLEACH_SECRET_FILE"), "{error}");
    let mut command = pleach();
    command.args(["doctor", "--listen", "127.0.0.1:0", "--wait", "1"]);
    let output = finish(command);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("nobody came"), "{error}");
}

fn shell(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().expect("a shell");
    assert!(status.success(), "{command}");
}

fn examined(command: &mut Command) -> (Value, Option<i32>) {
    command.env("PLEACH_INTERFACE", "10.77.0.1");
    let output = command.output().expect("it starts");
    (report(&output), output.status.code())
}

/// One after the other, as they all change the same devices; the link last, as routes go with it.
#[test]
#[ignore = "changes RDMA devices rxe1 and rxe2 over interfaces h1 and h2: for a machine made for it"]
fn each_thing_that_is_broken_on_purpose_is_found_with_the_command_that_mends_it() {
    let examine = || {
        let mut command = pleach();
        command.args(["doctor", "--json"]);
        examined(&mut command)
    };
    let (healthy, status) = examine();
    assert_eq!(status, Some(0), "{healthy:#}");
    has(finding(&healthy, "port to use"), "text", "rxe1:1, GID index 1 (10.77.0.1, RoCE v2 over IPv4)");
    for subject in [
        "libibverbs",
        "rxe1 provider",
        "rxe2 provider",
        "rxe1 file",
        "rxe1:1 link",
        "rxe1:1 MTU",
        "locked memory",
    ] {
        assert_eq!(finding(&healthy, subject)["level"], "ok", "{healthy:#}");
    }
    has(finding(&healthy, "rxe1:1 MTU"), "text", "4096 bytes of payload (h1 has MTU 9000)");

    // Not even root exceeds it without the capability.
    let mut limited = Command::new("prlimit");
    limited.args(["--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]);
    limited.args([env!("CARGO_BIN_EXE_pleach"), "doctor", "--json"]);
    let (limited, status) = examined(&mut limited);
    assert_eq!(status, Some(1), "{limited:#}");
    assert_eq!(finding(&limited, "locked memory")["level"], "problem");
    has(finding(&limited, "locked memory"), "text", "64 KiB");
    has(finding(&limited, "locked memory"), "command", "memlock");
    has(finding(&limited, "rxe1 provider"), "text", "16 MiB could not be registered");

    let secret = std::env::temp_dir().join(format!("pleach-doctor-secret-{}", std::process::id()));
    let mut command = pleach();
    assert!(
        finish({
            command.arg("secret").arg(&secret);
            command
        })
        .status
        .success()
    );
    let both = Some(["10.77.0.1", "10.77.0.2"]);
    for (report, status) in pair("10.77.0.2:0", both, Some(&secret)) {
        assert_eq!(status, Some(0), "{report:#}");
        for subject in
            ["MTU", "RDMA", "RDMA interface MTU", "RDMA path MTU", "ports from here", "ports from there"]
        {
            assert_eq!(finding(&report, subject)["level"], "ok", "{report:#}");
        }
    }
    shell("ip link set dev h2 mtu 1500");
    for (report, status) in pair("10.77.0.2:0", both, Some(&secret)) {
        assert_eq!(status, Some(1), "{report:#}");
        for (subject, numbers) in [
            ("MTU", ["9000", "1500"]),
            ("RDMA interface MTU", ["9000", "1500"]),
            ("RDMA path MTU", ["4096", "1024"]),
        ] {
            let found = finding(&report, subject);
            assert_eq!(found["level"], "problem", "{report:#}");
            numbers.iter().for_each(|number| has(found, "text", number));
        }
        has(finding(&report, "MTU"), "command", "ip link set dev h2 mtu 9000");
    }
    shell("ip link set dev h2 mtu 9000");
    std::fs::remove_file(&secret).expect("it was there");

    shell("ip link set dev h1 down");
    let (down, status) = examine();
    assert_eq!(status, Some(1), "{down:#}");
    let link = finding(&down, "rxe1:1 link");
    assert_eq!(link["level"], "problem", "{down:#}");
    has(link, "text", "h1 is switched off");
    has(finding(&down, "port to use"), "text", "rxe1:1 is down");
    let mends = link["command"].as_str().expect("a command");
    assert_eq!(mends, "sudo ip link set dev h1 up");
    shell(mends.trim_start_matches("sudo "));
    launcher::wait_until("the link is up again", || examine().1 == Some(0));
}

#[test]
#[ignore = "changes who may open the files of RDMA devices rxe1 and rxe2: for a machine made for it"]
fn a_benchmark_over_rdma_has_the_table_of_the_others_and_errors_to_act_on() {
    let bench = |command: &mut Command| {
        command.args(["bench", "all-reduce", "--fabric", "verbs", "--ranks", "2", "--sizes", "8,4096"]);
        let output = command.args(["--iterations", "5", "--warmup", "1"]).output().expect("it starts");
        let [out, error] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("text"));
        (output.status.code(), out, error)
    };
    let (status, table, error) = bench(&mut pleach());
    assert_eq!(status, Some(0), "{error}");
    assert!(table.starts_with("# pleach bench all-reduce: fabric verbs, 2 ranks, host "), "{table}");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 2, "{table}");
    for (row, bytes) in rows.iter().zip(["8", "4096"]) {
        assert_eq!((row[0], row.last()), (bytes, Some(&"0")), "{table}");
    }

    let (status, _, error) = bench(pleach().env("PLEACH_VERBS_DEVICE", "mlx5_9"));
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("there is no RDMA device 'mlx5_9'; there are rxe1:1 rxe2:1"), "{error}");

    shell("chmod 600 /dev/infiniband/uverbs*");
    let nobody = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", env!("CARGO_BIN_EXE_pleach")]);
        command
    };
    let (status, _, error) = bench(&mut nobody());
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("give this user read and write access to /dev/infiniband"), "{error}");
    let (report, status) = examined(nobody().args(["doctor", "--json"]));
    assert_eq!(
        (status, &finding(&report, "rxe1 file")["level"]),
        (Some(1), &Value::from("problem")),
        "{report:#}"
    );
    has(finding(&report, "rxe1 file"), "command", "sudo chmod 666 /dev/infiniband/uverbs0");
    shell("chmod 666 /dev/infiniband/uverbs*");
}
