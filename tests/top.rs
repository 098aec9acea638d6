//! `pleach top` and the flight recorder, on real jobs.

#[allow(dead_code)] // Not every test looks at processes.
mod launcher;
mod ports;
mod skipped;

use std::cell::RefCell;
use std::io::Read as _;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use launcher::{Folder, PATIENCE, finish, pleach, wait_until};
use pleach_transport::clock::now;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use skipped::skip;

/// Far more than a test lasts: whoever started the job ends it.
const EPOCHS: &str = "1000000";

/// Processes that end with the test.
struct Job(Vec<Child>);

impl Drop for Job {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Training that others look at.
fn training(port: u16) -> Command {
    let mut command = pleach();
    command.args(["train", "--epochs", EPOCHS, "--fabric", "shm"]).env("PLEACH_METRICS", port.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn top(arguments: &[&str], port: u16) -> Output {
    let mut command = pleach();
    command.arg("top").args(arguments).arg(port.to_string());
    finish(command)
}

/// Looks until all ranks answer and have called something.
fn wait_for_job(port: u16, ranks: u64) -> Value {
    let seen = RefCell::new(Value::Null);
    wait_until("all ranks are seen at work", || {
        let output = top(&["--once", "--json"], port);
        if !output.status.success() {
            return false;
        }
        let view: Value = serde_json::from_slice(&output.stdout).expect("is JSON");
        let is_at_work =
            view["answered"] == ranks && !view["calls"].as_array().expect("is a list").is_empty();
        *seen.borrow_mut() = view;
        is_at_work
    });
    seen.into_inner()
}

#[test]
fn top_shows_every_rank_of_a_live_job() {
    let port = ports::reserve(3);
    // The argument counts before the variable.
    let mut command = training(1);
    command.args(["--ranks", "3", "--metrics", &port.to_string()]);
    let _job = Job(vec![command.spawn().expect("it starts")]);
    let view = wait_for_job(port, 3);
    assert_eq!(view["world_size"], 3, "{view}");
    let calls = &view["calls"].as_array().expect("is a list")[0];
    assert_eq!(calls["collective"], "all-reduce", "{view}");
    assert!(calls["calls_per_s"].as_f64().expect("a number") > 0.0, "{view}");
    assert!(calls["call_us"].as_f64().expect("a number") > 0.0, "{view}");
    let ranks = view["ranks"].as_array().expect("is a list");
    for (rank, row) in ranks.iter().enumerate() {
        assert_eq!((&row["rank"], &row["failed"]), (&rank.into(), &false.into()), "{view}");
        assert!(row["arrival_skew_us"].as_f64().expect("a number") >= 0.0, "{view}");
    }
    // No terminal: one snapshot, and no codes of one.
    let seen = RefCell::new(String::new());
    wait_until("all ranks answer", || {
        let output = top(&[], port);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("is text");
        // A rank that does not run for long is left out.
        let is_whole = text.starts_with("3 of 3 ranks answer, ");
        *seen.borrow_mut() = text;
        is_whole
    });
    let text = seen.into_inner();
    assert!(text.lines().any(|line| line.starts_with("all-reduce ")) && !text.contains('\x1b'), "{text}");
}

#[test]
fn top_shows_each_ranks_share_of_rounds_that_wait_for_nobody() {
    let port = ports::reserve(3);
    let mut command = training(port);
    command.args(["--ranks", "3", "--partial", "quorum:2", "--late", "drop", "--skew", "one:2ms"]);
    let _job = Job(vec![command.spawn().expect("it starts")]);
    let seen = RefCell::new(Value::Null);
    wait_until("some rank was late", || {
        let view = wait_for_job(port, 3);
        let rounds = || view["ranks"].as_array().expect("is a list").iter().map(|row| &row["rounds"]);
        let are_all_there = rounds().all(Value::is_object);
        let are_late = are_all_there && rounds().any(|rounds| rounds["dropped"].as_u64() > Some(0));
        *seen.borrow_mut() = view.clone();
        are_late
    });
    let view = seen.into_inner();
    let rows = view["ranks"].as_array().expect("is a list");
    let shares: Vec<f64> =
        rows.iter().map(|row| row["rounds"]["share"].as_f64().expect("a number")).collect();
    // Two ranks at least are in each round.
    assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)), "{view}");
    assert!(shares.iter().sum::<f64>() > 1.9, "{view}");
    // It is a training by a scheme.
    for row in rows {
        let training = &row["training"];
        let number = |name: &str| training[name].as_f64().unwrap_or_else(|| panic!("no {name}: {view}"));
        assert!(number("steps") >= 1.0 && number("bytes_per_step") > 0.0, "{view}");
        assert!((0.0..=1.0).contains(&number("wait_share")) && number("staleness_max") >= 0.0, "{view}");
        assert!(training["spread"].is_null(), "it is measured at the end: {view}");
    }
}

#[test]
fn top_without_a_job_says_how_to_start_one() {
    let port = ports::reserve(1);
    let output = top(&["--once"], port);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).expect("is text");
    assert!(error.starts_with(&format!("error: no job: 127.0.0.1:{port} (")), "{error}");
    assert!(
        error.contains(&format!("--metrics {port}")) && error.contains(&format!("PLEACH_METRICS={port}"))
    );
    assert!(output.stdout.is_empty(), "{error}");
}

#[test]
fn survivors_of_a_killed_rank_write_down_what_they_were_doing() {
    let folder = Folder::new("top");
    let port = ports::reserve(3);
    std::fs::create_dir(folder.0.join("meeting")).expect("the folder is new");
    let ranks = (0..3).map(|rank: u32| {
        let mut command = training(port);
        command
            .args(["--rank", &rank.to_string(), "--world-size", "3", "--rendezvous"])
            .arg(format!("file://{}", folder.0.join("meeting").display()))
            .env("PLEACH_FLIGHT_RECORDER", &folder.0);
        command.spawn().expect("it starts")
    });
    let job = RefCell::new(Job(ranks.collect()));
    wait_for_job(port, 3);
    job.borrow_mut().0[2].kill().expect("it runs");
    wait_until("the survivors have ended", || {
        let mut job = job.borrow_mut();
        job.0[..2].iter_mut().all(|process| process.try_wait().expect("is ours").is_some())
    });
    let job = job.into_inner();
    for rank in 0..2 {
        let name = format!("pleach-flight-rank{rank}-{}.json", job.0[rank].id());
        let text =
            std::fs::read_to_string(folder.0.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let record: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!(record["rank"], rank, "{text}");
        assert!(record["failure"].as_str().expect("is text").contains("rank 2 is lost"), "{text}");
        let begun = record["begun"].as_array().expect("is a list");
        let last = begun.last().expect("there were calls")["call"].as_str().expect("is text");
        assert!(last.starts_with("all-reduce of ") && last.ends_with("f32 (avg)"), "{text}");
    }
}

/// On a terminal, of which `script` makes one.
#[test]
fn a_live_screen_is_drawn_again_in_its_place() {
    if Command::new("script").arg("--version").output().is_err() {
        return skip("no 'script' that could make a terminal");
    }
    let port = ports::reserve(2);
    let mut command = training(port);
    command.args(["--ranks", "2"]);
    let _job = Job(vec![command.spawn().expect("the command starts")]);
    wait_for_job(port, 2);
    let folder = Folder::new("top-live");
    let process = folder.path("process");
    let live =
        format!("echo $$ > '{process}'; exec '{}' top --interval 100 {port}", env!("CARGO_BIN_EXE_pleach"));
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &live, "/dev/null"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut terminal = terminal.spawn().expect("it starts");
    let mut output = terminal.stdout.take().expect("it is piped");
    let terminal = Job(vec![terminal]);
    let shown = Mutex::new(Vec::new());
    let screen = || String::from_utf8_lossy(&shown.lock().expect("no thread panics")).into_owned();
    let is_drawn = || {
        let screen = screen();
        screen.matches("2 of 2 ranks answer").count() > 2
            && screen.contains("waits for rank") | screen.contains("a call")
    };
    std::thread::scope(|scope| {
        // Ends the terminal before the reader is waited for.
        let _terminal = terminal;
        let reader = scope.spawn(|| {
            let mut piece = [0; 4096];
            while let Ok(bytes @ 1..) = output.read(&mut piece) {
                shown.lock().expect("no thread panics").extend_from_slice(&piece[..bytes]);
            }
        });
        let until = |holds: &dyn Fn() -> bool| {
            let deadline = now() + PATIENCE;
            while !reader.is_finished() && !holds() && now() < deadline {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        };
        until(&is_drawn);
        let process = folder.text("process").trim().parse().expect("the number of a process");
        // If it has ended, the screen says why. Not SIGINT: programs of a shell's background ignore
        // it.
        let _ = kill_process(Pid::from_raw(process).expect("is no 0"), Signal::TERM);
        until(&|| false);
    });
    let screen = screen();
    assert_eq!(screen.matches("\x1b[2J").count(), 1, "it is cleared once: {screen:?}");
    assert!(screen.matches("2 of 2 ranks answer").count() > 2, "it is drawn again and again: {screen:?}");
    assert!(screen.contains("\x1b[1;1H") && screen.contains("waits for rank") | screen.contains("a call"));
}
