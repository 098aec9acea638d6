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
    let of = |row: &Value, name: &str| row["rounds"][name].as_u64();
    wait_until("some rank was late", || {
        let view = wait_for_job(port, 3);
        let rows = view["ranks"].as_array().expect("is a list");
        // A rank has no training before the end of its first step.
        let are_all_there = rows.iter().all(|row| row["rounds"].is_object() && row["training"].is_object());
        // What is late is dropped, and each number is read by itself.
        let is_late = |row: &Value| of(row, "late") > Some(0) && of(row, "dropped") > Some(0);
        let are_late = are_all_there && rows.iter().any(is_late);
        *seen.borrow_mut() = view.clone();
        are_late
    });
    let view = seen.into_inner();
    let rows = view["ranks"].as_array().expect("is a list");
    // They are counts since the group was made.
    let later = wait_for_job(port, 3);
    for (row, later) in rows.iter().zip(later["ranks"].as_array().expect("is a list")) {
        for name in ["late", "dropped", "missed"] {
            let of = |row: &Value| of(row, name).unwrap_or_else(|| panic!("no {name}: {row}"));
            assert!(of(row) <= of(later), "{name}: {row}, then {later}");
        }
    }
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

/// What `pleach top` shows on a terminal, of which `script` makes one, until it has shown enough.
/// `name`: of a folder, of its own among those of the process.
/// `None`: there is no `script`.
fn live_screens(name: &str, arguments: &str, is_enough: impl Fn(&str) -> bool) -> Option<String> {
    if Command::new("script").arg("--version").output().is_err() {
        skip("no 'script' that could make a terminal");
        return None;
    }
    let folder = Folder::new(name);
    let process = folder.path("process");
    let live = format!(
        "echo $$ > '{process}'; exec '{}' top --interval 100 {arguments}",
        env!("CARGO_BIN_EXE_pleach")
    );
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &live, "/dev/null"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut terminal = terminal.spawn().expect("it starts");
    let mut output = terminal.stdout.take().expect("it is piped");
    let terminal = Job(vec![terminal]);
    let shown = Mutex::new(Vec::new());
    let screen = || String::from_utf8_lossy(&shown.lock().expect("no thread panics")).into_owned();
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
        until(&|| is_enough(&screen()));
        let process = folder.text("process").trim().parse().expect("the number of a process");
        // If it has ended, the screen says why. Not SIGINT: programs of a shell's background ignore
        // it.
        let _ = kill_process(Pid::from_raw(process).expect("is no 0"), Signal::TERM);
        until(&|| false);
    });
    let screen = screen();
    assert_eq!(screen.matches("\x1b[2J").count(), 1, "it is cleared once: {screen:?}");
    Some(screen)
}

#[test]
fn a_live_screen_is_drawn_again_in_its_place() {
    let port = ports::reserve(2);
    let mut command = training(port);
    command.args(["--ranks", "2"]);
    let _job = Job(vec![command.spawn().expect("the command starts")]);
    wait_for_job(port, 2);
    let is_drawn = |screen: &str| {
        screen.matches("2 of 2 ranks answer").count() > 2
            && screen.contains("waits for rank") | screen.contains("a call")
    };
    let Some(screen) = live_screens("top-live", &port.to_string(), is_drawn) else { return };
    assert!(is_drawn(&screen), "it is drawn again and again: {screen:?}");
    assert!(screen.contains("\x1b[1;1H"), "{screen:?}");
}

/// A member of a job whose processes come and go.
fn member(rank: u32, job: &str) -> Command {
    let mut command = pleach();
    command.args(["train", "--elastic=1:4", "--epochs", EPOCHS, "--pace", "5ms", "--json", "--member"]);
    command.env("PLEACH_RANK", rank.to_string()).env("PLEACH_WORLD_SIZE", "2");
    command.env("PLEACH_RENDEZVOUS", job);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn members_of(value: &Value) -> Vec<(u64, String)> {
    let row = |row: &Value| {
        (row["seat"].as_u64().expect("a number"), row["state"].as_str().expect("is text").to_owned())
    };
    value["members"].as_array().expect("is a list").iter().map(row).collect()
}

#[test]
fn top_shows_the_members_of_a_job_beside_ranks() {
    let port = ports::reserve(2);
    let address = format!("tcp://127.0.0.1:{}", ports::reserve(1));
    let mut beside = training(port);
    beside.args(["--ranks", "2"]);
    let _beside = Job(vec![beside.spawn().expect("it starts")]);
    let job = [0, 1].map(|rank| member(rank, &address).spawn().expect("it starts"));
    let job = RefCell::new(Job(job.into()));
    let look = |arguments: &[&str]| {
        let mut command = pleach();
        command.arg("top").args(arguments);
        finish(command)
    };
    let await_members = |arguments: &[&str], seats: &[u64], out: &[u64]| {
        let seen = RefCell::new(Value::Null);
        wait_until("all members are seen", || {
            let output = look(&[&["--once", "--json"], arguments].concat());
            if !output.status.success() {
                return false; // They are still meeting, or an epoch begins.
            }
            let view: Value = serde_json::from_slice(&output.stdout).expect("is JSON");
            let (gone, there): (Vec<_>, Vec<_>) =
                members_of(&view).into_iter().partition(|(_, state)| state == "out");
            let are_there = there.into_iter().eq(seats.iter().map(|seat| (*seat, "member".into())))
                && gone.into_iter().map(|(seat, _)| seat).eq(out.iter().copied());
            *seen.borrow_mut() = view;
            are_there
        });
        seen.into_inner()
    };
    let view = await_members(&[&address], &[0, 1], &[]);
    assert_eq!(view["members"][1]["job"], address.as_str(), "{view}");
    assert_eq!((&view["members"][0]["epoch"], &view["ranks"]), (&0.into(), &Value::Null), "{view}");
    let view = await_members(&[&port.to_string(), &address], &[0, 1], &[]);
    assert!(view["ranks"].as_array().is_some_and(|ranks| !ranks.is_empty()), "{view}");
    // The same table as that of the command for members, but for what has gone on meanwhile.
    let columns = |output: &Output| {
        let text = String::from_utf8(output.stdout.clone()).expect("is text");
        let lines = text.lines().skip_while(|line| !line.starts_with("seat "));
        lines.map(|line| line.split_whitespace().take(3).collect::<String>()).collect::<Vec<_>>()
    };
    let mut listing = pleach();
    listing.args(["members", &address]);
    let (shown, listed) = (look(&[&address]), finish(listing));
    assert_eq!((columns(&shown), columns(&shown).len()), (columns(&listed), 3), "{shown:?}");
    let drawn = format!("members of {address}");
    if let Some(screen) = live_screens("top-members", &address, |screen| screen.matches(&drawn).count() > 2) {
        assert!(screen.matches(&drawn).count() > 2 && screen.contains("  member"), "{screen:?}");
    }
    job.borrow_mut().0.push(member(1, &address).spawn().expect("it starts"));
    await_members(&[&address], &[0, 1, 2], &[]);
    job.borrow_mut().0[1].kill().expect("it runs");
    await_members(&[&address], &[0, 2], &[1]);
}

#[test]
fn a_job_that_is_not_reached_is_named_as_by_the_command_for_members() {
    let folder = Folder::new("top-nobody");
    let address = format!("file://{}/nobody", folder.0.display());
    let mut command = pleach();
    command.args(["top", "--once", &address]);
    let output = finish(command);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    let error = String::from_utf8(output.stderr).expect("is text");
    assert!(error.contains("rank 0 is missing: it did not open") && error.contains("nobody"), "{error}");
    let mut command = pleach();
    command.args(["top", "--once", "tcp://nowhere"]);
    let output = finish(command);
    let error = String::from_utf8(output.stderr).expect("is text");
    assert!(output.status.code() == Some(2) && error.contains("bad rendezvous address"), "{error}");
}
