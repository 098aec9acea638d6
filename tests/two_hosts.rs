//! Two hosts, as far as one machine can be two: network namespaces with a wire between them. Real processes find out who
//! is near, share memory there, and reach each other across.
//!
//! It takes root and `ip`; without them the tests say so and try nothing.

mod launcher;

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use launcher::{PATIENCE, finish, pleach};
use pleach::transport::clock::now;
use rustix::process::{Pid, Signal, kill_process};

/// Numbers networks of this process. Relaxed: only uniqueness matters.
static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// Where rank 0 listens, in a namespace of its own.
const PORT: u16 = 29_400;

/// From the death of a rank until all others have said so; it should be one second, this is for busy machines.
const FOUND_WITHIN: Duration = Duration::from_secs(20);

/// Two namespaces, a wire between them, and a secret. Gone with the test.
struct Hosts {
    names: [String; 2],
    addresses: [Ipv4Addr; 2],
    secret: PathBuf,
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

impl Hosts {
    /// `None`, and says why, where this machine or user has no namespaces.
    fn new() -> Option<Self> {
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        // Of a range that is set aside for tests of networks between them.
        let subnet = |last: u8| Ipv4Addr::new(198, 18 + (number % 2) as u8, process as u8, last);
        let names = ["a", "b"].map(|end| format!("pleach-{process}-{number}{end}"));
        let secret = std::env::temp_dir().join(format!("pleach-two-hosts-{process}-{number}"));
        let hosts = Self { names, addresses: [subnet(1), subnet(2)], secret };
        match hosts.build() {
            Ok(()) => {
                let mut command = pleach();
                command.arg("secret").arg(&hosts.secret);
                assert!(finish(command).status.success(), "a secret is written");
                Some(hosts)
            }
            Err(reason) => {
                println!("ignored: no network namespaces here: {reason}");
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        if !rustix::process::geteuid().is_root() {
            return Err("not root".to_owned());
        }
        let [one, other] = self.names.each_ref().map(String::as_str);
        ip(&["netns", "add", one])?;
        ip(&["netns", "add", other])?;
        ip(&["-n", one, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other])?;
        for (name, address) in self.names.iter().zip(self.addresses) {
            ip(&["-n", name, "addr", "add", &format!("{address}/30"), "dev", "wire"])?;
            ip(&["-n", name, "link", "set", "wire", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// A rank of `pleach bench` on one of the hosts.
    fn bench(&self, host: usize, rank: u32, world_size: u32, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[host], env!("CARGO_BIN_EXE_pleach"), "bench"])
            .args(arguments)
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", world_size.to_string())
            .env("PLEACH_RENDEZVOUS", format!("tcp://{}:{PORT}", self.addresses[0]))
            .env("PLEACH_INTERFACE", self.addresses[host].to_string())
            .env("PLEACH_SECRET_FILE", &self.secret)
            .env("PLEACH_LOG", "info")
            .env_remove("PLEACH_HOST")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// So many ranks, of which the first half is on the first host.
    fn start(&self, world_size: u32, arguments: &[&str]) -> Vec<Child> {
        (0..world_size)
            .map(|rank| {
                let host = usize::from(rank >= world_size.div_ceil(2));
                self.bench(host, rank, world_size, arguments).spawn().expect("ip starts")
            })
            .collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Of those that were not made there is nothing to remove. The wire goes with its ends.
            let _ = ip(&["netns", "delete", name]);
        }
        let _ = fs::remove_file(&self.secret);
    }
}

/// Waits for all, each on a thread so that no pipe fills up; a child that does not end is killed with the test.
fn ended(children: Vec<Child>) -> Vec<Output> {
    let waiters: Vec<_> = children
        .into_iter()
        .map(|child| {
            let process = Pid::from_child(&child);
            (process, thread::spawn(move || child.wait_with_output().expect("ends")))
        })
        .collect();
    let deadline = now() + PATIENCE / 2;
    launcher::wait_until("all ranks to end", || {
        let is_late = now() >= deadline;
        for (process, waiter) in waiters.iter().filter(|(_, waiter)| is_late && !waiter.is_finished()) {
            let _ = (waiter, kill_process(*process, Signal::KILL));
        }
        waiters.iter().all(|(_, waiter)| waiter.is_finished())
    });
    waiters.into_iter().map(|(_, waiter)| waiter.join().expect("only waits")).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn ranks_of_two_namespaces_share_memory_inside_and_take_sockets_across() {
    let Some(hosts) = Hosts::new() else { return };
    for (collective, algorithm) in
        [("all-reduce", "auto"), ("all-reduce", "hierarchical"), ("all-gather", "hierarchical")]
    {
        let how =
            [collective, "--algorithm", algorithm, "--sizes", "32,64K,8M", "--iterations", "10", "--json"];
        let outputs = ended(hosts.start(4, &how));
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
    let Some(hosts) = Hosts::new() else { return };
    let outputs = ended(hosts.start(3, &["--fabric", "shm", "--max", "8"]));
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
    let Some(hosts) = Hosts::new() else { return };
    // Rank 3 is on the other host than ranks 0 and 1, and has a neighbour in rank 2.
    let mut children = hosts.start(4, &["--sizes", "1M", "--iterations", "1000000"]);
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
