//! Groups of many processes whose pairs connect on first use.
//!
//! A test starts this program again for each rank, with the test that a rank carries out.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::ranks;
use pleach_collectives::{CollectiveError, Connect, Group, Options, ReduceOp};
use pleach_schedule::Algorithm;
use pleach_transport::clock;
use pleach_transport::rendezvous::{Fabric, FabricChoice};

/// Longest time for anything on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a process knows which rank it is: rank, ranks, fabric, when pairs connect, folder.
const PLACE: &str = "RANK_OF_TEST";

/// One rank of a test of this file: joins, adds, tells what it took and then does as it is told.
#[test]
#[ignore = "a rank of the other tests, which start it"]
fn rank() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let words: Vec<&str> = place.split(' ').collect();
    let [rank, ranks, fabric, connect, folder] = words[..] else { panic!("{place}") };
    let (rank, ranks): (u32, u32) = (rank.parse().expect("a number"), ranks.parse().expect("a number"));
    let mut options = Options::new(ranks::world(rank, ranks, folder.as_ref()));
    options.fabric = FabricChoice::Only(if fabric == "tcp" { Fabric::Tcp } else { Fabric::Shm });
    options.connect = if connect == "use" { Connect::OnUse } else { Connect::AtJoin };
    (options.timeout, options.join_timeout) = (PATIENCE, PATIENCE);
    let begun = clock::now();
    let group = Group::join(&options).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    let joined = clock::now().since(begun);
    let connections = group.info().connections;
    let mut sum = [rank];
    let by_few = group.with_variant("recursive-doubling".parse::<Algorithm>().expect("an algorithm"));
    by_few.all_reduce(&mut sum, ReduceOp::Sum).expect("an all-reduce");
    assert_eq!(sum, [(0..ranks).sum::<u32>()]);
    let added = clock::now().since(begun) - joined;
    println!(
        "\nJOINED {} {} {connections} {}",
        joined.as_millis(),
        added.as_millis(),
        group.info().connections
    );
    let mut word = String::new();
    std::io::stdin().read_line(&mut word).expect("the test says what to do");
    match word.trim() {
        "call" => {
            let error = group.barrier().expect_err("a rank is gone");
            let CollectiveError::Failed(fault) = error else { panic!("{error}") };
            println!("\nFAULT {} {fault}", fault.subject);
        }
        "leave" => group.barrier().expect("all are here"),
        word => panic!("'{word}'"),
    }
}

struct Processes(Vec<(Child, BufReader<std::process::ChildStdout>)>);

impl Processes {
    fn start(ranks: u32, fabric: &str, connect: &str, folder: &ranks::Folder) -> Self {
        let program = std::env::current_exe().expect("this program");
        let processes = (0..ranks).map(|rank| {
            let mut child = Command::new(&program)
                .args(["--exact", "processes::rank", "--ignored", "--nocapture", "--test-threads", "1"])
                .env(PLACE, format!("{rank} {ranks} {fabric} {connect} {}", folder.0.display()))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a process");
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            (child, output)
        });
        Self(processes.collect())
    }

    /// The words of a rank behind this one, in its next line that begins with it.
    fn line(&mut self, rank: usize, first: &str) -> Vec<String> {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.0[rank].1.read_line(&mut line).expect("its output");
            assert!(read > 0, "rank {rank} has ended without {first}");
            if let Some(rest) = line.strip_prefix(first) {
                return rest.split_whitespace().map(str::to_owned).collect();
            }
        }
    }

    fn tell(&mut self, rank: usize, word: &str) {
        let mut input = self.0[rank].0.stdin.take().expect("it was told nothing");
        writeln!(input, "{word}").expect("it reads");
    }

    fn end(mut self) {
        for (rank, (child, output)) in self.0.iter_mut().enumerate() {
            output.read_to_string(&mut String::new()).expect("its output");
            assert!(child.wait().expect("it ends").success(), "rank {rank}");
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Joins, adds and leaves; prints what the slowest rank took, in milliseconds.
fn join(ranks: u32, fabric: &str, connect: &str) {
    let folder = ranks::Folder::new();
    let mut processes = Processes::start(ranks, fabric, connect, &folder);
    let mut most = [0_u64; 4];
    for rank in 0..ranks as usize {
        let words = processes.line(rank, "JOINED ");
        for (most, word) in most.iter_mut().zip(words) {
            *most = (*most).max(word.parse().expect("a number"));
        }
    }
    let [joined, added, begun, connected] = most;
    println!(
        "{ranks} processes over {fabric}, connected at {connect}: joined in {joined} ms with {begun} connections a rank, first all-reduce in {added} ms with {connected}"
    );
    if connect == "use" {
        assert!(connected <= u64::from(4 * ranks.ilog2()), "{connected} connections");
    }
    (0..ranks as usize).for_each(|rank| processes.tell(rank, "leave"));
    processes.end();
}

#[test]
fn many_processes_join_and_add_over_tcp() {
    join(64, "tcp", "use");
}

#[test]
fn many_processes_join_and_add_over_shared_memory() {
    join(32, "shm", "use");
}

/// Beside each other, for the table of the release.
#[test]
#[ignore = "measures, by hand"]
fn joins_of_both_kinds() {
    for _ in 0..2 {
        for fabric in ["tcp", "shm"] {
            for connect in ["join", "use"] {
                join(64, fabric, connect);
            }
        }
    }
}

#[test]
#[ignore = "128 processes, by hand"]
fn a_hundred_and_twenty_eight_processes_join_and_add() {
    join(128, "tcp", "use");
}

fn a_killed_process_is_known_everywhere(fabric: &str) {
    const RANKS: u32 = 20;
    const KILLED: usize = 11;
    let folder = ranks::Folder::new();
    let mut processes = Processes::start(RANKS, fabric, "use", &folder);
    for rank in 0..RANKS as usize {
        processes.line(rank, "JOINED ");
    }
    // All are in no call when it dies, and stay so for now.
    processes.0[KILLED].0.kill().expect("it runs");
    processes.0[KILLED].0.wait().expect("it ends");
    let others: Vec<usize> = (0..RANKS as usize).filter(|rank| *rank != KILLED).collect();
    for rank in &others {
        processes.tell(*rank, "call");
    }
    let faults: Vec<Vec<String>> = others.iter().map(|rank| processes.line(*rank, "FAULT ")).collect();
    for fault in &faults {
        assert_eq!(fault[0], KILLED.to_string(), "{fault:?}");
        assert_eq!(fault, &faults[0], "the survivors agree");
    }
    let _ = processes.0.remove(KILLED);
    processes.end();
}

#[test]
fn a_killed_process_is_known_everywhere_over_tcp() {
    a_killed_process_is_known_everywhere("tcp");
}

#[test]
fn a_killed_process_is_known_everywhere_over_shared_memory() {
    a_killed_process_is_known_everywhere("shm");
}
