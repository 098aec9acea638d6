//! Groups of many processes whose pairs connect on first use.
//!
//! A test starts this program again for each rank, with the test that a rank carries out.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::{ports, ranks};
use pleach_collectives::engine::Fault;
use pleach_collectives::{CollectiveError, Connect, Group, Options, ReduceOp};
use pleach_schedule::Algorithm;
use pleach_transport::clock;
use pleach_transport::rendezvous::{Fabric, FabricChoice, Rendezvous};
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

/// Longest time for anything on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a process knows which rank it is: rank, ranks, fabric, when pairs connect, port where the
/// ranks meet.
const PLACE: &str = "RANK_OF_TEST";

/// One rank of a test of this file: joins, adds, tells what it took and then does as it is told.
#[test]
#[ignore = "a rank of the other tests, which start it"]
fn rank() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let words: Vec<&str> = place.split(' ').collect();
    let [rank, ranks, fabric, connect, port] = words[..] else { panic!("{place}") };
    let (rank, ranks): (u32, u32) = (rank.parse().expect("a number"), ranks.parse().expect("a number"));
    let mut options = Options::new(ranks::world(rank, ranks, "".as_ref()));
    let port = port.parse().expect("a number");
    options.world.rendezvous = Some(Rendezvous::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port });
    options.fabric = FabricChoice::Only(match fabric {
        "tcp" => Fabric::Tcp,
        "hybrid" => Fabric::Hybrid,
        _ => Fabric::Shm,
    });
    options.world.host = (fabric == "hybrid").then(|| format!("host-{}", rank % 2));
    options.connect = match connect {
        "use" => Some(Connect::OnUse),
        "join" => Some(Connect::AtJoin),
        _ => None,
    };
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
    let mut words = String::new();
    std::io::stdin().read_line(&mut words).expect("the test says what to do");
    let words: Vec<&str> = words.split_whitespace().collect();
    let target = || words[1].parse::<u32>().expect("a rank");
    let error = match words[0] {
        "call" => group.barrier().expect_err("the group fails"),
        "leave" => return group.barrier().expect("all are here"),
        "send" => {
            let group = group.within(Duration::from_millis(words[2].parse().expect("a number")));
            println!("\nSENDS");
            group.send(&[rank], target()).expect_err("the group fails")
        }
        "split" => fail_beside_part(&group, target()),
        "abort" => std::thread::scope(|scope| {
            let call = scope.spawn(|| group.send(&[rank], target()).expect_err("the group is aborted"));
            // Most often it connects by then.
            std::thread::park_timeout(Duration::from_millis(100));
            group.abort();
            call.join().expect("no panic")
        }),
        word => panic!("'{word}'"),
    };
    let CollectiveError::Failed(fault) = error else { panic!("{error}") };
    // Not the call in which this rank was told, which is its own.
    let Fault { subject, kind, found_by, detail, waited, .. } = &*fault;
    println!("\nFAULT {subject} {kind:?} by {found_by} after {waited:?}: {detail}");
}

/// Splits the group in two, and calls in both when `killed` is dead: the group's error. The part
/// that the dead rank was not in works on after that.
fn fail_beside_part(group: &Group, killed: u32) -> CollectiveError {
    let rank = group.rank();
    let part = group.split(Some(rank % 2), rank).expect("a split").expect("this rank named a colour");
    let expect_sum = || {
        let mut sum = [1];
        part.all_reduce(&mut sum, ReduceOp::Sum).expect("an all-reduce");
        assert_eq!(sum, [part.world_size()]);
    };
    expect_sum();
    println!("\nSPLIT");
    if rank == killed {
        loop {
            std::thread::park();
        }
    }
    let is_in_part = rank % 2 == killed % 2;
    if is_in_part {
        let error = part.barrier().expect_err("the part fails");
        let CollectiveError::Failed(fault) = error else { panic!("{error}") };
        println!("\nPART {} {:?} by {}: {}", fault.subject, fault.kind, fault.found_by, fault.detail);
    }
    let error = group.barrier().expect_err("the group fails");
    if !is_in_part {
        expect_sum();
    }
    error
}

struct Processes(Vec<(Child, BufReader<std::process::ChildStdout>)>);

impl Processes {
    fn start(ranks: u32, fabric: &str, connect: &str) -> Self {
        let port = ports::reserve(1);
        let program = std::env::current_exe().expect("this program");
        let processes = (0..ranks).map(|rank| {
            let mut child = Command::new(&program)
                .args(["--exact", "processes::rank", "--ignored", "--nocapture", "--test-threads", "1"])
                .env(PLACE, format!("{rank} {ranks} {fabric} {connect} {port}"))
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

    fn signal(&self, rank: usize, signal: Signal) {
        let process = Pid::from_child(&self.0[rank].0);
        rustix::process::kill_process(process, signal).expect("it runs");
    }

    /// Stops a rank, all of its threads.
    fn stop(&self, rank: usize) {
        self.signal(rank, Signal::STOP);
        let process = Pid::from_child(&self.0[rank].0);
        let (_, status) =
            waitpid(Some(process), WaitOptions::UNTRACED).expect("it is a child").expect("it waits");
        assert!(status.stopped(), "rank {rank}: {status:?}");
    }

    /// All of these ranks say that this one is the cause, in the same words; what the first says.
    fn expect_fault(&mut self, ranks: impl IntoIterator<Item = usize>, subject: usize) -> Vec<String> {
        let mut first = None;
        for rank in ranks {
            let fault = self.line(rank, "FAULT ");
            assert_eq!(fault[0], subject.to_string(), "rank {rank}: {fault:?}");
            assert_eq!(&fault, first.get_or_insert_with(|| fault.clone()), "the survivors agree");
        }
        first.expect("there are ranks")
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

/// Joins, adds and leaves. Gives what the slowest rank took for joining and for the first sum, in
/// milliseconds, and the most connections after either.
fn join(ranks: u32, fabric: &str, connect: &str) -> [u64; 4] {
    let mut processes = Processes::start(ranks, fabric, connect);
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
    if connect != "join" {
        assert!(connected <= u64::from(4 * ranks.ilog2()), "{connected} connections");
    }
    (0..ranks as usize).for_each(|rank| processes.tell(rank, "leave"));
    processes.end();
    most
}

#[test]
fn many_processes_join_and_add_over_tcp() {
    join(64, "tcp", "default");
}

#[test]
fn many_processes_join_and_add_over_shared_memory() {
    join(32, "shm", "default");
}

/// Beside each other, for the tables of `docs/scale.md`.
#[test]
#[ignore = "measures, by hand"]
fn joins_of_both_kinds() {
    const TIMES: usize = 3;
    for (ranks, fabric) in [(16, "tcp"), (16, "shm"), (64, "tcp"), (64, "shm")] {
        let mut found = [const { Vec::new() }; 2];
        for _ in 0..TIMES {
            for (found, connect) in found.iter_mut().zip(["join", "use"]) {
                found.push(join(ranks, fabric, connect));
            }
        }
        for (found, connect) in found.into_iter().zip(["at join", "on use"]) {
            let medians: [u64; 4] = std::array::from_fn(|column| {
                let mut column: Vec<u64> = found.iter().map(|row: &[u64; 4]| row[column]).collect();
                column.sort_unstable();
                column[TIMES / 2]
            });
            println!("{ranks} over {fabric}, {connect}: the medians of {TIMES} are {medians:?}");
        }
    }
}

#[test]
#[ignore = "256 processes: a step of .ci/run of its own"]
fn two_hundred_and_fifty_six_processes_join_and_add() {
    join(256, "tcp", "default");
}

fn a_killed_process_is_known_everywhere(fabric: &str) {
    const RANKS: u32 = 20;
    const KILLED: usize = 11;
    let mut processes = Processes::start(RANKS, fabric, "use");
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
    processes.expect_fault(others, KILLED);
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

/// The whole and the part that a dead rank was in both name it, each by the number that it has
/// there, and the other part works on.
fn a_process_that_is_killed_is_the_verdict_of_its_part_and_of_the_whole(fabric: &str) {
    const RANKS: usize = 6;
    const KILLED: usize = 5;
    let mut processes = Processes::start(RANKS as u32, fabric, "default");
    for rank in 0..RANKS {
        processes.line(rank, "JOINED ");
        processes.tell(rank, &format!("split {KILLED}"));
    }
    for rank in 0..RANKS {
        processes.line(rank, "SPLIT");
    }
    processes.signal(KILLED, Signal::KILL);
    let [first, second] = [1, 3].map(|rank| processes.line(rank, "PART "));
    assert_eq!(first, second, "the survivors of the part agree");
    assert_eq!(first[..2], ["2", "Lost"], "{first:?}");
    let fault = processes.expect_fault(0..KILLED, KILLED);
    assert_eq!(fault[1], "Lost", "{fault:?}");
    let _ = processes.0.remove(KILLED);
    processes.end();
}

/// Rank 3 of 20, which is no neighbour of ranks 0 and 10, is stopped, so it connects to nobody.
/// Each of the two sends it a message. `then` is called when they do.
fn while_two_ranks_connect_to_a_stopped_one(
    fabric: &str,
    words: [&str; 2],
    then: impl FnOnce(&mut Processes),
) -> (Processes, Vec<usize>) {
    const RANKS: usize = 20;
    let mut processes = Processes::start(RANKS as u32, fabric, "default");
    for rank in 0..RANKS {
        processes.line(rank, "JOINED ");
    }
    processes.stop(STOPPED);
    let others: Vec<usize> = (0..RANKS).filter(|rank| *rank != STOPPED).collect();
    for rank in &others {
        match rank {
            0 => processes.tell(0, words[0]),
            10 => processes.tell(10, words[1]),
            rank => processes.tell(*rank, "call"),
        }
    }
    then(&mut processes);
    (processes, others)
}

const STOPPED: usize = 3;

fn a_peer_that_is_killed_while_ranks_connect_to_it_is_known_everywhere(fabric: &str) {
    let kill = |processes: &mut Processes| {
        for rank in [0, 10] {
            processes.line(rank, "SENDS");
        }
        processes.signal(STOPPED, Signal::KILL);
    };
    let words = ["send 3 120000"; 2];
    let (mut processes, others) = while_two_ranks_connect_to_a_stopped_one(fabric, words, kill);
    let fault = processes.expect_fault(others, STOPPED);
    assert_eq!(fault[1], "Lost", "{fault:?}");
    let _ = processes.0.remove(STOPPED);
    processes.end();
}

fn a_peer_that_does_not_connect_is_named_at_the_deadline_of_the_call(fabric: &str) {
    let words = ["send 3 1000", "call"];
    let (mut processes, others) = while_two_ranks_connect_to_a_stopped_one(fabric, words, |_| ());
    let fault = processes.expect_fault(others, STOPPED);
    assert_eq!(fault[1], "TimedOut", "{fault:?}");
    // It was severed, and finds that out when it goes on.
    processes.signal(STOPPED, Signal::CONT);
    processes.tell(STOPPED, "call");
    processes.line(STOPPED, "FAULT ");
    processes.end();
}

fn an_abort_ends_a_call_that_connects(fabric: &str) {
    let words = ["abort 3", "send 3 120000"];
    let (mut processes, others) = while_two_ranks_connect_to_a_stopped_one(fabric, words, |_| ());
    let fault = processes.expect_fault(others, 0);
    assert_eq!(fault[1], "Aborted", "{fault:?}");
    processes.signal(STOPPED, Signal::CONT);
    processes.tell(STOPPED, "call");
    processes.line(STOPPED, "FAULT ");
    processes.end();
}

macro_rules! on_every_fabric {
    ($($fabric:ident),*) => {
        $(mod $fabric {
            #[test]
            fn a_peer_that_is_killed_while_ranks_connect_to_it_is_known_everywhere() {
                super::a_peer_that_is_killed_while_ranks_connect_to_it_is_known_everywhere(stringify!($fabric));
            }

            #[test]
            fn a_peer_that_does_not_connect_is_named_at_the_deadline_of_the_call() {
                super::a_peer_that_does_not_connect_is_named_at_the_deadline_of_the_call(stringify!($fabric));
            }

            #[test]
            fn a_process_that_is_killed_is_the_verdict_of_its_part_and_of_the_whole() {
                super::a_process_that_is_killed_is_the_verdict_of_its_part_and_of_the_whole(stringify!($fabric));
            }

            #[test]
            fn an_abort_ends_a_call_that_connects() {
                super::an_abort_ends_a_call_that_connects(stringify!($fabric));
            }
        })*
    };
}
on_every_fabric!(shm, tcp, hybrid);
