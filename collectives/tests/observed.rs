//! What a group says of itself: who was late and by how much, what it did last, and in which forms.

#[path = "ranks/meeting.rs"]
mod meeting;
#[path = "../../tests/ports/mod.rs"]
mod ports;
mod ranks;
#[path = "observed/simulated.rs"]
mod simulated;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pleach_collectives::{Group, Options, Report};
use pleach_schedule::Algorithm;
use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Rank, ReduceOp};
use serde_json::Value;

use meeting::Meeting;
use ranks::{Folder, with_group, world};

/// Longest time a test's calls may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How late a late rank is: longer than a busy machine keeps a rank from running. The simulator has
/// the exact values.
const ARRIVAL_SKEW: Duration = Duration::from_secs(1);

/// Lets time pass without anybody waiting for anything.
fn dawdle(time: Duration) {
    let until = clock::now() + time;
    while clock::now() < until {
        let (_sender, receiver) = mpsc::channel::<()>();
        let _ = receiver.recv_timeout(until.since(clock::now()));
    }
}

fn a_late_rank_is_named_with_its_arrival_skew(fabric: Fabric) {
    const RANKS: u32 = 3;
    const LATE: Rank = 1;
    const CALLS: usize = 2;
    // How many of the others are about to make a call.
    let about_to_call = AtomicUsize::new(0);
    let reports = with_group(
        fabric,
        RANKS,
        |_| {},
        |group| {
            // So that every rank hears from every other one.
            let direct = group.with_variant(Algorithm::Direct);
            let mut data = vec![1f32; 5000];
            for call in 1..=CALLS {
                group.barrier().unwrap();
                if group.rank() == LATE {
                    let deadline = clock::now() + PATIENCE;
                    while about_to_call.load(Ordering::Acquire) < 2 * call && clock::now() < deadline {
                        thread::yield_now();
                    }
                    dawdle(ARRIVAL_SKEW);
                } else {
                    about_to_call.fetch_add(1, Ordering::Release);
                }
                direct.all_reduce(&mut data, ReduceOp::Avg).unwrap();
            }
            let report = group.report();
            drop(direct);
            group.close().unwrap();
            report
        },
    );
    for report in reports.iter().filter(|report| report.rank != LATE) {
        let latest = report.latest().unwrap_or_else(|| panic!("nobody was late:\n{report}"));
        assert_eq!(latest.rank, LATE, "\n{report}");
        assert!(latest.last >= CALLS as u64, "\n{report}");
        let least = ARRIVAL_SKEW.mul_f64(0.5) * CALLS as u32;
        assert!(latest.arrival_skew.sum() >= least, "at least {least:?}\n{report}");
        // A busy machine adds to that, but no other unit of time does so little.
        println!("rank {LATE} was late by {:?} in all", latest.arrival_skew.sum());
        assert!(latest.arrival_skew.quantile(0.5) < PATIENCE, "\n{report}");
        let shape = report.shapes.iter().find(|shape| shape.collective == "all-reduce").expect("was called");
        assert_eq!((shape.calls, shape.bytes), (CALLS as u64, CALLS as u64 * 20_000), "\n{report}");
        assert_eq!(shape.bytes_max, 32 << 10);
        assert!(shape.time >= least && shape.waited_calls == shape.calls, "\n{report}");
    }
    let late = reports[LATE as usize].peers.iter().map(|peer| peer.arrival_skew.quantile(0.5));
    assert!(
        late.max().unwrap() < ARRIVAL_SKEW / 2,
        "who comes last finds nobody late:\n{}",
        reports[LATE as usize]
    );
}

#[test]
fn a_late_rank_is_named_with_its_arrival_skew_over_shm() {
    a_late_rank_is_named_with_its_arrival_skew(Fabric::Shm);
}

#[test]
fn a_late_rank_is_named_with_its_arrival_skew_over_tcp() {
    a_late_rank_is_named_with_its_arrival_skew(Fabric::Tcp);
}

#[test]
fn who_is_waited_for_is_said_while_it_is_waited_for() {
    let is_seen = AtomicBool::new(false);
    with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let deadline = clock::now() + PATIENCE;
            if group.rank() == 0 {
                thread::scope(|scope| {
                    let caller = group.clone();
                    let call = scope.spawn(move || caller.barrier());
                    let mut report = group.report();
                    while report.waits_for.is_none() {
                        assert!(clock::now() < deadline, "nobody is waited for:\n{report}");
                        thread::yield_now();
                        report = group.report();
                    }
                    assert_eq!((report.waits_for, report.under_way), (Some(1), 1));
                    is_seen.store(true, Ordering::Release);
                    call.join().unwrap().unwrap();
                });
            } else {
                while !is_seen.load(Ordering::Acquire) && clock::now() < deadline {
                    thread::yield_now();
                }
                group.barrier().unwrap();
            }
            let report = group.report();
            assert_eq!((report.waits_for, report.under_way), (None, 0));
            group.close().unwrap();
        },
    );
}

#[test]
fn quick_calls_are_all_counted_and_their_time_is_estimated() {
    const CALLS: u64 = 1000;
    let reports = with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            let mut data = group.buffer::<f32>(2).unwrap();
            let began = clock::now();
            for _ in 0..CALLS {
                group.all_reduce(&mut data, ReduceOp::Min).unwrap();
            }
            (group.report(), clock::now() - began)
        },
    );
    for (report, took) in reports {
        let shape = report.shapes.iter().find(|shape| shape.collective == "all-reduce").expect("was called");
        assert_eq!((shape.calls, shape.bytes, shape.bytes_max), (CALLS, CALLS * 8, 8));
        assert!(shape.waited_calls <= CALLS);
        println!("{took:?} are estimated as {:?}", shape.time);
        // The call that was timed for all others may be the one in which the rank did not run.
        let most = took * CALLS as u32;
        assert!(shape.time > Duration::ZERO && shape.time <= most, "{:?} of {took:?}\n{report}", shape.time);
    }
}

#[test]
fn a_trace_has_a_track_a_rank_and_every_call() {
    /// Some calls end while they are waited for, others already while they are begun, which happens
    /// now and then.
    const COUNTS: [usize; 102] = {
        let mut counts = [50_000; 102];
        (counts[0], counts[1]) = (1, 2);
        counts
    };
    let folder = Folder::new();
    let path = folder.0.join("trace.json");
    std::fs::write(&path, "left by somebody else").unwrap();
    with_group(
        Fabric::Shm,
        3,
        |options| options.observe.trace = Some(path.clone()),
        |group| {
            for count in COUNTS {
                group.all_reduce(&mut vec![1i32; count], ReduceOp::Sum).unwrap();
            }
            group.close().unwrap();
        },
    );
    let text = std::fs::read_to_string(&path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..3 {
        let own: Vec<&Value> = events.iter().filter(|event| event["tid"] == rank).collect();
        let name = own.iter().find(|event| event["ph"] == "M").expect("a name");
        assert_eq!(name["args"]["name"], format!("rank {rank}"));
        let calls: Vec<&&Value> = own.iter().filter(|event| event["ph"] == "X").collect();
        let names: Vec<&str> = calls.iter().map(|call| call["name"].as_str().unwrap()).collect();
        let mut expected = COUNTS.map(|count| format!("all-reduce of {count} i32 (sum)")).to_vec();
        expected.push("barrier".to_owned());
        assert_eq!(names, expected);
        let mut end = 0.0;
        for call in calls {
            let (begin, took) = (call["ts"].as_f64().unwrap(), call["dur"].as_f64().unwrap());
            assert!(begin >= end && took > 0.0, "calls of a rank follow each other: {text}");
            end = begin + took - 0.01;
            assert!(!call["args"]["algorithm"].as_str().unwrap().is_empty());
        }
    }
}

/// Calls of several groups at once on one track would be drawn as if one were inside another.
#[test]
fn groups_that_are_split_have_tracks_of_their_own_in_a_trace() {
    let folder = Folder::new();
    let path = folder.0.join("trace.json");
    with_group(
        Fabric::Shm,
        4,
        |options| options.observe.trace = Some(path.clone()),
        |group| {
            for count in [1, 2] {
                let part = group.split(Some(group.rank() % 2), 0).unwrap().expect("a colour was named");
                part.all_reduce(&mut vec![1i32; count], ReduceOp::Sum).unwrap();
                part.close().unwrap();
            }
            group.close().unwrap();
        },
    );
    let text = std::fs::read_to_string(&path).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let events = trace["traceEvents"].as_array().unwrap();
    let tracks: Vec<(&Value, &str)> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| (&event["pid"], event["args"]["name"].as_str().unwrap()))
        .collect();
    let mut names: Vec<&str> = tracks.iter().map(|(_, name)| *name).collect();
    names.sort_unstable();
    let of_parts = [
        "rank 0 (rank 0 of all)",
        "rank 0 (rank 1 of all)",
        "rank 1 (rank 2 of all)",
        "rank 1 (rank 3 of all)",
    ];
    let mut expected = [&["rank 0", "rank 1", "rank 2", "rank 3"][..], &of_parts, &of_parts].concat();
    expected.sort_unstable();
    assert_eq!(names, expected, "{text}");
    for (pid, name) in tracks.iter().filter(|(pid, _)| **pid != 0) {
        let rank: u64 = name[5..6].parse().unwrap();
        let calls =
            events.iter().filter(|event| event["ph"] == "X" && event["pid"] == **pid && event["tid"] == rank);
        assert_eq!(calls.count(), 2, "the all-reduce and the barrier of closing: {text}");
        let group = events.iter().find(|event| event["name"] == "process_name" && event["pid"] == **pid);
        assert!(group.unwrap()["args"]["name"].as_str().unwrap().starts_with("part s"), "{text}");
    }
}

fn scrape(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    body.to_owned()
}

/// Every sample: name, labels, value. Panics where the text is not of Prometheus' form.
fn samples(text: &str) -> Vec<(String, String, f64)> {
    let mut typed = std::collections::BTreeSet::new();
    let mut samples = Vec::new();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<&str> = comment.splitn(3, ' ').collect();
            match words[..] {
                ["HELP", _, _] => {}
                ["TYPE", name, kind] => {
                    assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                    assert!(typed.insert(name.to_owned()), "typed twice: {line}");
                }
                _ => panic!("{line}"),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect(line);
        let (name, labels) = series.split_once('{').expect(line);
        let labels = labels.strip_suffix('}').expect(line);
        for label in labels.split(',') {
            let (key, value) = label.split_once('=').expect(line);
            assert!(key.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_'), "{line}");
            assert!(value.len() >= 2 && value.starts_with('"') && value.ends_with('"'), "{line}");
        }
        let base =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        assert!(typed.contains(name) || typed.contains(base), "no type: {line}");
        samples.push((name.to_owned(), labels.to_owned(), value.parse().expect(line)));
    }
    samples
}

#[test]
fn metrics_are_served_in_the_form_of_prometheus() {
    const CALLS: u64 = 10;
    let port = ports::reserve(2);
    let base = SocketAddr::from(([127, 0, 0, 1], port));
    with_group(
        Fabric::Shm,
        2,
        |options| options.observe.metrics = Some(base),
        |group| {
            let mut data = vec![0f64; 100];
            for _ in 0..CALLS {
                group.all_reduce(&mut data, ReduceOp::Max).unwrap();
            }
            let rank = group.rank();
            let text = scrape(SocketAddr::from(([127, 0, 0, 1], port + rank as u16)));
            let samples = samples(&text);
            let value = |name: &str, labels: &str| {
                let found = samples.iter().find(|sample| sample.0 == name && sample.1.contains(labels));
                found.unwrap_or_else(|| panic!("no {name} {labels}:\n{text}")).2
            };
            assert!(samples.iter().all(|sample| sample.1.starts_with(&format!("rank=\"{rank}\""))), "{text}");
            assert_eq!(value("pleach_world_size", ""), 2.0);
            assert_eq!(value("pleach_failed", ""), 0.0);
            assert_eq!(value("pleach_calls_total", "collective=\"all-reduce\""), CALLS as f64);
            assert_eq!(value("pleach_bytes_total", "bytes_max=\"1024\""), (CALLS * 800) as f64);
            let peer = format!("peer=\"{}\"", 1 - rank);
            let heard = value("pleach_arrival_skew_seconds_count", &peer);
            assert_eq!(value("pleach_arrival_skew_seconds_bucket", &format!("{peer},le=\"+Inf\"")), heard);
            group.close().unwrap();
        },
    );
    assert!(TcpStream::connect(base).is_err(), "it is served as long as the group lives");
}

#[test]
fn a_group_that_serves_metrics_can_be_split() {
    let base = SocketAddr::from(([127, 0, 0, 1], ports::reserve(2)));
    with_group(
        Fabric::Shm,
        2,
        |options| options.observe.metrics = Some(base),
        |group| {
            let part = group.split(Some(0), 0).unwrap().expect("a colour was named");
            part.all_reduce(&mut [1f64; 100], ReduceOp::Sum).unwrap();
            let text = scrape(SocketAddr::new(base.ip(), base.port() + group.rank() as u16));
            assert!(
                !text.contains("bytes_max=\"1024\""),
                "the ports are those of the group that was joined: {text}"
            );
            part.close().unwrap();
            group.close().unwrap();
        },
    );
}

#[test]
fn metrics_at_a_port_that_is_taken_are_an_error() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let folder = Folder::new();
    let mut options = Options::new(world(0, 1, &folder.0));
    options.observe.metrics = Some(taken.local_addr().unwrap());
    let error = Group::join(&options).unwrap_err().to_string();
    assert!(error.starts_with("no metrics: 127.0.0.1:") && error.contains("choose another"), "{error}");
}

#[test]
fn the_flight_recorder_names_the_operation_that_failed_and_those_before() {
    let folder = Folder::new();
    with_group(
        Fabric::Tcp,
        2,
        |options| options.observe.flight_recorder = Some(folder.0.clone()),
        |group| {
            group.barrier().unwrap();
            group.all_reduce(&mut [1u8, 2, 3], ReduceOp::Max).unwrap();
            if group.rank() == 0 {
                let limited = group.within(Duration::from_millis(200));
                assert!(limited.broadcast(&mut [0i64; 7], 1).is_err(), "its root never calls it");
            } else {
                // Hears of it in a call of its own that nobody else makes.
                while group.report().failure.is_none() {
                    let mut data = [0u8; 1];
                    if group.recv(&mut data, 0).is_err() {
                        break;
                    }
                }
            }
        },
    );
    let mut files: Vec<_> =
        std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 2, "one a rank: {files:?}");
    let text = std::fs::read_to_string(&files[0]).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(record["rank"], 0);
    assert!(!record["failure"].as_str().unwrap().is_empty());
    let unfinished = &record["unfinished"][0];
    assert_eq!(unfinished["call"], "broadcast root 1 of 7 i64", "{text}");
    assert_eq!(unfinished["waits_for"][0]["rank"], 1, "{text}");
    assert!(!unfinished["waits_for"][0]["step"].as_str().unwrap().is_empty());
    let timed: Vec<&str> =
        record["timed"].as_array().unwrap().iter().map(|flight| flight["call"].as_str().unwrap()).collect();
    assert_eq!(timed[0], "barrier", "the first call is always timed: {text}");
    let begun = record["begun"].as_array().unwrap();
    assert_eq!(begun.len(), 3, "{text}");
    assert_eq!(begun[2]["call"], unfinished["call"]);
}

#[test]
fn every_group_of_a_process_that_fails_leaves_a_record() {
    let folder = Folder::new();
    // Who has split aborts at once, which the other one would find before it has split.
    let have_split = Meeting::new(2);
    with_group(
        Fabric::Shm,
        2,
        |options| options.observe.flight_recorder = Some(folder.0.clone()),
        |group| {
            let part = group.split(Some(0), 0).unwrap().expect("a colour was named");
            have_split.wait();
            part.abort();
            group.abort();
            assert!(part.barrier().is_err() && group.barrier().is_err());
        },
    );
    let files = std::fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().path());
    let records = files.filter(|path| path.to_string_lossy().contains("pleach-flight-rank")).count();
    assert_eq!(records, 4, "of two groups, one a rank");
}

#[test]
fn a_report_is_a_table_for_people() {
    let reports: Vec<Report> = with_group(
        Fabric::Shm,
        2,
        |_| {},
        |group| {
            group.barrier().unwrap();
            group.report()
        },
    );
    let text = reports[0].to_string();
    assert!(text.starts_with("rank 0 of 2, "), "{text}");
    assert!(text.lines().any(|line| line.starts_with("barrier ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("late ")), "{text}");
}
