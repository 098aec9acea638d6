//! Two hosts, as far as one machine can be two: network namespaces with a wire between them. Real processes find out who
//! is near, share memory there, and reach each other across.
//!
//! It takes root and `ip`; without them the tests say so and try nothing.

#[allow(dead_code)] // Nothing is measured on wires of a bandwidth here.
mod links;

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use links::{Hosts, Wire, ended};
use pleach::transport::clock::now;
use rustix::process::{Pid, Signal, kill_process};

/// From the death of a rank until all others have said so; it should be one second, this is for busy machines.
const FOUND_WITHIN: Duration = Duration::from_secs(20);

/// `None`, and says why, where this machine or user has no namespaces.
fn hosts() -> Option<Hosts> {
    let wire = Wire { ends: [0, 1], megabits_per_s: None };
    let hosts = Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), 2, &[wire]);
    hosts.map_err(|reason| println!("ignored: no network namespaces here: {reason}")).ok()
}

/// So many ranks of `pleach bench`, of which the first half is on the first host.
fn start(hosts: &Hosts, world_size: usize, arguments: &[&str]) -> Vec<Child> {
    let host = |rank| usize::from(rank >= world_size.div_ceil(2));
    let bench = [&["bench"], arguments].concat();
    (0..world_size).map(|rank| hosts.start(host(rank), rank, world_size, &bench)).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn ranks_of_two_namespaces_share_memory_inside_and_take_sockets_across() {
    let Some(hosts) = hosts() else { return };
    for (collective, algorithm) in
        [("all-reduce", "auto"), ("all-reduce", "hierarchical"), ("all-gather", "hierarchical")]
    {
        let how =
            [collective, "--algorithm", algorithm, "--sizes", "32,64K,8M", "--iterations", "10", "--json"];
        let outputs = ended(start(&hosts, 4, &how));
        assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
        let (table, log) = (text(&outputs[0].stdout), text(&outputs[0].stderr));
        assert!(
            log.contains("fabric: shm within 2 hosts of 4 ranks, tcp across (rank 2 and rank 0: no descriptor arrived: different network namespaces; no shm+verbs: rank "),
            "{log}"
        );
        assert!(table.contains("shm+tcp") && !table.contains("\"errors\":1"), "{table}");
        // What is best is a matter of prices, what is asked for is not.
        assert!(algorithm == "auto" || table.contains("hierarchical:2x2"), "{table}");
        println!("{table}");
    }
}

#[test]
fn shared_memory_that_was_asked_for_is_refused_across_namespaces() {
    let Some(hosts) = hosts() else { return };
    let outputs = ended(start(&hosts, 3, &["--fabric", "shm", "--max", "8"]));
    for output in &outputs {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains("no shared memory") && error.contains("different network namespaces"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_killed_on_the_other_host_is_named_on_both() {
    let Some(hosts) = hosts() else { return };
    // Rank 3 is on the other host than ranks 0 and 1, and has a neighbour in rank 2.
    let mut children = start(&hosts, 4, &["--sizes", "1M", "--iterations", "1000000"]);
    // The table's head is printed when all have joined; then the measuring goes on for long.
    let mut first = std::io::BufReader::new(children[0].stdout.take().expect("is piped"));
    let mut head = String::new();
    std::io::BufRead::read_line(&mut first, &mut head).expect("rank 0 prints");
    let victim = children.pop().expect("there are four");
    let killed_at = now();
    // `ip netns exec` has become the rank itself.
    kill_process(Pid::from_child(&victim), Signal::KILL).expect("it runs");
    drop(ended(vec![victim]));
    let outputs = ended(children);
    let took = now().since(killed_at);
    for (rank, output) in outputs.iter().enumerate() {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "rank {rank}: {error}");
        assert!(error.contains("rank 3"), "rank {rank}: {error}");
    }
    assert!(took < FOUND_WITHIN, "{took:?}");
}
