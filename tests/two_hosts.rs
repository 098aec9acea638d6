//! Several hosts, as far as one machine can be several: network namespaces with wires between them.
//! Real processes find out who is near, share memory there, and reach each other across.
//!
//! It takes root and `ip`; without them the tests are skipped.

#[allow(dead_code)] // Nothing is measured on wires of a bandwidth here.
mod links;
mod skipped;

use std::path::Path;
use std::process::{Child, Output};
use std::time::Duration;

use links::{Hosts, Wire, ended};
use pleach::exchange::{Endpoint, EndpointOptions, ExchangeFabric, Key};
use pleach::session::{Elastic, Session, SessionError, Verdict};
use pleach::transport::clock::now;
use pleach::{FabricChoice, Options, ReduceOp};
use rustix::process::{Pid, Signal, kill_process};
use skipped::skip;

/// From the death of a rank until all others have said so; it should be one second, this is for
/// busy machines.
const FOUND_WITHIN: Duration = Duration::from_secs(20);

/// Two hosts. `None`, and says why, where this machine or user has no namespaces.
fn hosts() -> Option<Hosts> {
    hosts_in_a_row(2)
}

/// So many hosts, each with a wire to the next one.
fn hosts_in_a_row(count: usize) -> Option<Hosts> {
    let wire = |first: usize| Wire { ends: [first, first + 1], megabits_per_s: None };
    let wires: Vec<Wire> = (0..count - 1).map(wire).collect();
    let hosts = Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), count, &wires);
    hosts.map_err(|reason| skip(format_args!("no network namespaces here: {reason}"))).ok()
}

/// `pleach bench` on `world_size` ranks, of which the first half is on the first host.
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
        assert!(log.contains("tcp: who connects here speaks TLS with the job's secret"), "{log}");
        assert!(table.contains("shm+tcp") && !table.contains("\"errors\":1"), "{table}");
        // What is best is a matter of prices, what is asked for is not.
        assert!(algorithm == "auto" || table.contains("hierarchical:2x2"), "{table}");
        println!("{table}");
    }
}

#[test]
fn a_rank_of_another_host_without_tls_is_told_which_variable_to_set() {
    let Some(hosts) = hosts() else { return };
    let [one, other] = [0, 1].map(|host| hosts.address(host).to_string());
    for mode in [&[][..], &["--tls", "require"]] {
        let mut first = hosts.start(0, 0, 2, &[&["bench", "--max", "8"], mode].concat());
        let output = ended(vec![hosts.start(1, 1, 2, &["bench", "--max", "8", "--tls", "off"])]).remove(0);
        let _ = first.kill();
        let told = text(&first.wait_with_output().expect("it was killed").stderr);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        let both =
            "speaks TLS with the job's secret on this connection and this rank speaks no TLS; set PLEACH_TLS";
        assert!(error.contains(&format!("rank 0 at {one}")) && error.contains(both), "{error}");
        // It waits for a rank that is set alike.
        let both =
            "speaks no TLS on this connection and this rank speaks TLS with the job's secret; set PLEACH_TLS";
        assert!(told.contains(&other) && told.contains(both), "{told}");
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

/// Tells a child of this test its part in the exchange of tensors.
const PART: &str = "PLEACH_TEST_PART";

/// After which a host that vanished is given up at the latest: what the kernel's probes take (3 s
/// and 5 s), and more for busy machines. Far below what a receive here waits.
const VANISHED_WITHIN: Duration = Duration::from_secs(25);

/// What a child does; nothing in the process of the tests.
#[test]
fn part_of_a_child() {
    let Ok(part) = std::env::var(PART) else { return };
    if let Some(fabric) = part.strip_prefix("member over ") {
        return member(FabricChoice::Only(fabric.parse().expect("a fabric")));
    }
    if part == "stays" {
        return stay();
    }
    let mut options = EndpointOptions::from_env().expect("they are right");
    options.fabric = ExchangeFabric::Tcp;
    let endpoint = Endpoint::open(&options).expect("a free port");
    if part == "send" {
        let until = now() + 10 * VANISHED_WITHIN;
        let wait_for = |links: u64| {
            while endpoint.counts().links != links {
                assert!(now() < until, "{:?}", endpoint.counts());
                std::thread::park_timeout(Duration::from_millis(1));
            }
        };
        println!("ready {}", endpoint.address());
        wait_for(1);
        println!("linked");
        wait_for(0);
        println!("left");
        return;
    }
    let peer = endpoint.connect(&part).expect("an address").within(10 * VANISHED_WITHIN);
    peer.share_regions().expect("it is reached");
    let pending = peer.start_receive(&Key::new(1, "never").expect("a good name")).expect("it is reached");
    println!("ready");
    let error = pending.wait().expect_err("its host vanished");
    println!("error {:?} {error}", error.kind());
}

/// A member of a session, which makes steps until a process of another host makes them with it.
fn member(fabric: FabricChoice) {
    let mut options = Options::from_env().expect("they are right");
    options.fabric = fabric;
    let mut session = match Session::join(&options, &Elastic::between(1, 4)) {
        Ok(session) => session,
        Err(error) => return println!("refused {error}"),
    };
    println!("member {}", session.seat());
    let mut sum = session.buffer::<f32>(1).expect("it is short");
    let until = now() + VANISHED_WITHIN;
    let mut ranks = 1;
    while ranks == 1 && now() < until {
        let verdict = session.attempt(|group, _| {
            sum.fill(1.0);
            ranks = group.world_size();
            if ranks > 1 {
                // Parts of the group reach each other where its members do.
                let all = group.split(Some(0), group.rank())?.expect("it has a colour");
                let mut ones = [1.0_f32];
                all.all_reduce(&mut ones, ReduceOp::Sum)?;
                assert_eq!(ones, [2.0]);
                all.close()?;
            }
            group.all_reduce(&mut sum, ReduceOp::Sum)
        });
        verdict.expect("nobody ends");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    println!("sum {} of {ranks}", sum[0]);
    session.leave().expect("nobody ends");
}

/// A member of a session over the automatic fabric, until it is told to leave. Says of each epoch
/// which seats are on which hosts, and by which fabric.
fn stay() {
    let options = Options::from_env().expect("they are right");
    let mut elastic = Elastic::between(1, 8);
    elastic.suspect_after = Duration::from_secs(1);
    let mut session = Session::join(&options, &elastic).expect("is taken in");
    session.leave_on(Signal::TERM.as_raw()).expect("can be caught");
    println!("member {}", session.seat());
    let mut sums = session.buffer::<u64>(8).expect("it is short");
    let mut state = session.state::<u64>("sums", 8).expect("it is short");
    let mut said = String::new();
    loop {
        let seat = session.seat().0;
        let (mut hosts, mut fabric) = (None, None);
        let verdict = session.attempt(|group, _| {
            let info = group.info();
            (hosts, fabric) = (Some(info.hosts), info.fabric);
            sums.fill(0);
            sums[seat as usize] = 1;
            group.all_reduce(&mut sums, ReduceOp::Sum)
        });
        match verdict {
            Ok(Verdict::Committed) => {
                state.update(|state| state.iter_mut().zip(sums.iter()).for_each(|(all, one)| *all += one));
                let seats: Vec<String> =
                    (0..8).filter(|seat| sums[*seat] == 1).map(|seat| seat.to_string()).collect();
                let (hosts, fabric) = (hosts.expect("was made"), fabric.expect("they have met"));
                let now = format!("seats {} on hosts {hosts} over {fabric};", seats.join(","));
                if now != said {
                    println!("{now}");
                    said = now;
                }
            }
            Ok(Verdict::Retry(_)) => {}
            Err(SessionError::Left) => break,
            Err(error) => return println!("error {error}"),
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    session.leave().expect("it has left");
    println!("left");
}

/// Members of a session over the automatic fabric, which come from hosts and end.
struct Job<'a> {
    hosts: &'a Hosts,
    members: Vec<(Child, Box<dyn Iterator<Item = String>>)>,
}

impl Job<'_> {
    /// A process comes to the job from this host, and gets seat 1 or the lowest one that is free.
    fn comes_from(&mut self, host: usize) {
        self.starts_on(host, 1, 2);
    }

    /// A process is this rank of so many.
    fn starts_on(&mut self, host: usize, rank: usize, world_size: usize) {
        let rendezvous = format!("tcp://{}:4030,{}:4030", self.hosts.address(0), self.hosts.address(1));
        let (rank, world_size) = (rank.to_string(), world_size.to_string());
        let variables = [
            ("PLEACH_RANK", &*rank),
            ("PLEACH_WORLD_SIZE", &*world_size),
            ("PLEACH_RENDEZVOUS", &*rendezvous),
        ];
        let (child, lines) = started(self.hosts, host, "stays", &variables);
        self.members.push((child, Box::new(lines)));
    }

    /// All that are left make a step with these seats on these hosts, over both fabrics.
    fn expect(&mut self, seats: &str, hosts: &str) {
        let wanted = format!("seats {seats} on hosts {hosts} over shm+tcp;");
        for (_, lines) in &mut self.members {
            heard(lines, &wanted);
        }
    }

    /// A process is killed.
    fn is_killed(&mut self, member: usize) {
        let (child, _) = self.members.remove(member);
        kill_process(Pid::from_child(&child), Signal::KILL).expect("it runs");
        drop(ended(vec![child]));
    }

    /// A process is told to leave.
    fn leaves(&mut self, member: usize) {
        let (child, mut lines) = self.members.remove(member);
        kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
        heard(&mut lines, "left");
        assert!(ended(vec![child])[0].status.success());
    }

    fn end(mut self) {
        while !self.members.is_empty() {
            self.leaves(0);
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for (child, _) in &mut self.members {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// With nothing said about a fabric: the job begins in one process, whose host has no other one.
#[test]
fn a_session_grows_shrinks_and_heals_over_three_hosts() {
    let Some(hosts) = hosts_in_a_row(3) else { return };
    let mut job = Job { hosts: &hosts, members: Vec::new() };
    job.starts_on(0, 0, 1);
    job.expect("0", "1x1");
    // One beside it, then one of another host, and one beside that.
    job.comes_from(0);
    job.expect("0,1", "1x2");
    job.comes_from(1);
    job.expect("0,1,2", "2+1");
    job.comes_from(1);
    job.expect("0,1,2,3", "2x2");
    // The end of one shows to those of its host alone, and a third host has its seat then.
    job.is_killed(2);
    job.expect("0,1,3", "2+1");
    job.comes_from(2);
    job.expect("0,1,2,3", "2+1+1");
    // The one that gives seats: another one does then, on one of the named hosts.
    job.is_killed(0);
    job.expect("1,2,3", "3x1");
    job.comes_from(1);
    job.expect("0,1,2,3", "0,1,2,0");
    job.leaves(0);
    job.expect("0,2,3", "0,1,0");
    job.end();
}

/// The other way round: no two of those that begin share memory.
#[test]
fn a_session_of_ranks_on_a_host_each_takes_processes_that_share_memory_with_them() {
    let Some(hosts) = hosts_in_a_row(2) else { return };
    let mut job = Job { hosts: &hosts, members: Vec::new() };
    job.starts_on(0, 0, 2);
    job.starts_on(1, 1, 2);
    job.expect("0,1", "2x1");
    job.comes_from(1);
    job.expect("0,1,2", "1+2");
    job.comes_from(0);
    job.expect("0,1,2,3", "0,1,1,0");
    job.end();
}

#[test]
fn a_session_that_begins_on_one_host_takes_a_process_of_another_one() {
    let Some(hosts) = hosts() else { return };
    let start = |host: usize, fabric: &str| {
        let rendezvous = format!("tcp://{}:4020", hosts.address(0));
        let alone = [("PLEACH_RANK", "0"), ("PLEACH_WORLD_SIZE", "1"), ("PLEACH_RENDEZVOUS", &*rendezvous)];
        started(&hosts, host, &format!("member over {fabric}"), &alone)
    };
    let (first, mut at_first) = start(0, "tcp");
    assert_eq!(heard(&mut at_first, "member"), "seat 0");
    let (other, mut at_other) = start(1, "tcp");
    assert_eq!(heard(&mut at_other, "member"), "seat 1");
    assert_eq!([heard(&mut at_first, "sum"), heard(&mut at_other, "sum")], ["2 of 2", "2 of 2"]);
    drop(ended(vec![first, other]));

    // Ranks that share memory listen to nobody, and whoever comes is told what to set.
    let (mut first, mut at_first) = start(0, "shm");
    heard(&mut at_first, "member");
    let (other, mut at_other) = start(1, "shm");
    let refused = heard(&mut at_other, "refused");
    assert!(refused.contains("share the memory of one host; begin it over auto, tcp or verbs"), "{refused}");
    first.kill().expect("it runs");
    drop(ended(vec![first, other]));
}

/// A child of this test on a host, and what it prints.
fn part(hosts: &Hosts, host: usize, part: &str) -> (Child, impl Iterator<Item = String> + use<>) {
    let interface = hosts.address(host).to_string();
    started(hosts, host, part, &[("PLEACH_INTERFACE", &interface)])
}

/// The same with these variables besides the secret.
fn started(
    hosts: &Hosts,
    host: usize,
    part: &str,
    variables: &[(&str, &str)],
) -> (Child, impl Iterator<Item = String> + use<>) {
    let program = std::env::current_exe().expect("this test");
    let line = format!("exec {} --exact part_of_a_child --nocapture", program.display());
    let mut command = hosts.shell(host, &line);
    command.env(PART, part).env("PLEACH_SECRET_FILE", hosts.secret());
    command.envs(variables.iter().copied());
    let mut child = command.spawn().expect("ip starts");
    let out = std::io::BufReader::new(child.stdout.take().expect("is piped"));
    (child, std::io::BufRead::lines(out).map_while(Result::ok))
}

/// The rest of the line that has this word.
fn heard(lines: &mut impl Iterator<Item = String>, word: &str) -> String {
    // The harness may have begun the line.
    let mut before = Vec::new();
    for line in lines {
        if let Some(at) = line.find(word) {
            return line[at + word.len()..].trim().to_owned();
        }
        before.push(line);
    }
    panic!("it ended without '{word}': {before:#?}")
}

#[test]
fn a_link_of_the_exchange_to_a_host_that_vanished_ends_at_both_ends() {
    let Some(hosts) = hosts() else { return };
    let (sender, mut sent) = part(&hosts, 0, "send");
    let address = heard(&mut sent, "ready");
    let (receiver, mut received) = part(&hosts, 1, &address);
    heard(&mut received, "ready");
    heard(&mut sent, "linked");
    // Nobody closes anything: packets come no more.
    hosts.ip(0, &["link", "set", "wire0", "down"]).expect("the wire is there");
    let cut_at = now();
    let error = heard(&mut received, "error");
    heard(&mut sent, "left");
    let took = now().since(cut_at);
    assert!(error.starts_with("Unavailable ") && error.contains(&address), "{error}");
    assert!(took < VANISHED_WITHIN, "{took:?}");
    drop(ended(vec![sender, receiver]));
}

/// How the ranks of a host are told who they are and where they meet.
#[derive(Clone, Copy, Debug)]
enum Told {
    Run,
    Torchrun,
    Slurm,
    Folder,
}

/// Two ranks on each host (under Slurm one), told in this way, that reduce eight bytes.
fn start_told(hosts: &Hosts, count: usize, told: Told, secret: Option<&Path>) -> Vec<Child> {
    let bench = ["bench", "all-reduce", "--sizes", "8", "--warmup", "1", "--iterations", "2", "--json"];
    let (zero, mut children) = (hosts.address(0), Vec::new());
    let mut start = |host: usize, arguments: &[&str], variables: &[(&str, String)]| {
        let mut command = hosts.pleach(host);
        command.args(arguments).args(bench).env("PLEACH_JOIN_TIMEOUT", LIMIT.as_secs().to_string());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        if let Some(secret) = secret {
            command.env("PLEACH_SECRET_FILE", secret);
        }
        children.push(command.spawn().expect("ip starts"));
    };
    for host in 0..count {
        let ranks = (2 * count).to_string();
        match told {
            Told::Run | Told::Folder => {
                let place = match told {
                    Told::Run => format!("tcp://{zero}:4000"),
                    _ => format!("file://{}/rendezvous", hosts.folder().display()),
                };
                let first = (2 * host).to_string();
                let run = ["run", "-n", "2", "--world-size", &ranks, "--first-rank", &first];
                let pleach = env!("CARGO_BIN_EXE_pleach");
                start(host, &[&run[..], &["--rendezvous", &place, "--", pleach]].concat(), &[]);
            }
            Told::Torchrun => {
                for local in 0..2 {
                    let variables = [
                        ("RANK", (2 * host + local).to_string()),
                        ("LOCAL_RANK", local.to_string()),
                        ("WORLD_SIZE", ranks.clone()),
                        ("MASTER_ADDR", zero.to_string()),
                        ("MASTER_PORT", "4010".to_owned()),
                    ];
                    start(host, &[], &variables);
                }
            }
            Told::Slurm => {
                let variables = [
                    ("SLURM_PROCID", host.to_string()),
                    ("SLURM_LOCALID", "0".to_owned()),
                    ("SLURM_NTASKS", count.to_string()),
                    ("SLURM_STEP_NODELIST", format!("node[0-{}]", count - 1)),
                    ("SLURM_STEP_NUM_NODES", count.to_string()),
                    ("SLURM_JOB_ID", "77".to_owned()),
                ];
                start(host, &[], &variables);
            }
        }
    }
    children
}

/// How long ranks wait for each other here.
const LIMIT: Duration = Duration::from_secs(20);

/// What must not wait for that limit ends within this time, also on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

/// What ranks said that all failed at once.
fn refused(children: Vec<Child>) -> Vec<String> {
    let started = now();
    let outputs = ended(children);
    let took = now().since(started);
    assert!(took < AT_ONCE, "{took:?}: {outputs:?}");
    assert!(outputs.iter().all(|output| !output.status.success()), "{outputs:?}");
    outputs.iter().map(|output| text(&output.stderr)).collect()
}

#[test]
fn ranks_of_two_and_three_hosts_join_with_nothing_set_but_the_secret() {
    for count in [2, 3] {
        // Host 0 forwards between the others.
        let wires: Vec<Wire> =
            (1..count).map(|host| Wire { ends: [0, host], megabits_per_s: None }).collect();
        let hosts = Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), count, &wires);
        let hosts = match hosts {
            Ok(hosts) => hosts,
            Err(reason) => return skip(format_args!("no network namespaces here: {reason}")),
        };
        for host in 0..count {
            // As Debian writes it: the own name is an address that only this host has.
            let zero = if host == 0 { "127.0.1.1".to_owned() } else { hosts.address(0).to_string() };
            hosts.names(host, &format!("127.0.0.1 localhost\n{zero} node0\n")).expect("root may write there");
        }
        for told in [Told::Run, Told::Torchrun, Told::Slurm, Told::Folder] {
            let outputs = ended(start_told(&hosts, count, told, Some(&hosts.secret())));
            assert!(outputs.iter().all(|output| output.status.success()), "{told:?}, {count}: {outputs:?}");
            let table = text(&outputs[0].stdout);
            // Under Slurm each rank has a host of its own.
            let fabric = if matches!(told, Told::Slurm) { "\"tcp\"" } else { "\"shm+tcp\"" };
            assert!(table.contains(fabric) && table.contains("\"errors\":0"), "{told:?}, {count}: {table}");
        }
    }
}

#[test]
fn ranks_of_two_hosts_without_a_secret_are_told_the_variable_at_once() {
    let Some(hosts) = hosts() else { return };
    for host in [0, 1] {
        hosts.names(host, &format!("{} node0\n", hosts.address(0))).expect("root may write there");
    }
    for told in [Told::Run, Told::Torchrun, Told::Slurm, Told::Folder] {
        for error in refused(start_told(&hosts, 2, told, None)) {
            assert!(error.contains("PLEACH_SECRET_FILE"), "{told:?}: {error}");
        }
    }
}

/// One rank on each of two hosts that meet at this place, with these values of `PLEACH_INTERFACE`.
fn start_at(hosts: &Hosts, place: &str, interfaces: [Option<&str>; 2]) -> Vec<Child> {
    let bench = ["bench", "all-reduce", "--sizes", "8", "--warmup", "1", "--iterations", "2", "--json"];
    let start = |(rank, interface): (usize, Option<&str>)| {
        let mut command = hosts.pleach(rank);
        command.args(bench).args(["--rank", &rank.to_string(), "--world-size", "2", "--rendezvous", place]);
        command.env("PLEACH_SECRET_FILE", hosts.secret());
        command.env("PLEACH_JOIN_TIMEOUT", LIMIT.as_secs().to_string());
        if let Some(interface) = interface {
            command.env("PLEACH_INTERFACE", interface);
        }
        command.spawn().expect("ip starts")
    };
    interfaces.into_iter().enumerate().map(start).collect()
}

#[test]
fn hosts_of_several_addresses_take_the_one_that_reaches_the_rendezvous_and_are_asked_in_a_folder() {
    let Some(hosts) = hosts() else { return };
    for (host, address) in [(0, "fd00:77::1/64"), (1, "fd00:77::2/64")] {
        if let Err(reason) = hosts.ip(host, &["addr", "add", address, "dev", "wire0", "nodad"]) {
            return skip(format_args!("no IPv6 here: {reason}"));
        }
    }
    let folder = format!("file://{}/several", hosts.folder().display());
    let wide = format!("tcp://{}:4020", hosts.address(0));
    let addresses = [0, 1].map(|host| hosts.address(host).to_string());
    let named = [Some("wire0"), Some("fd00:77::2")];
    for (place, interfaces) in [
        (wide.as_str(), [None, None]),
        ("tcp://[fd00:77::1]:4021", [None, None]),
        // Its address for IPv4 is the first one of `lo`, but the rendezvous is not reached
        // from 127.0.0.1.
        (&wide, [Some("lo"), None]),
        (&folder, named),
    ] {
        let outputs = ended(start_at(&hosts, place, interfaces));
        assert!(outputs.iter().all(|output| output.status.success()), "{place}: {outputs:?}");
    }
    for error in refused(start_at(&hosts, &folder, [Some("wire0"), None])) {
        assert!(error.contains("rank 1 on ") && error.contains("set PLEACH_INTERFACE there"), "{error}");
        assert!(error.contains(&addresses[1]) && error.contains("fd00:77::2"), "{error}");
    }
    for error in refused(start_at(&hosts, &wide, [None, Some("127.0.0.1")])) {
        assert!(error.contains("rank 1 on ") && error.contains("PLEACH_INTERFACE=127.0.0.1"), "{error}");
    }
}

/// The commands that a page of the documents leaves to these tests.
fn commands_of(page: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let (_, rest) = text.split_once("<!-- run: by tests/two_hosts.rs").expect("the page names this test");
    let block = rest.split("```").nth(1).expect("a block follows");
    block.lines().skip(1).map(str::to_owned).collect()
}

/// Longest time that rank 0 waits for the others in a command of a page.
const SHOWN_LIMIT: &str = "60";

#[test]
fn the_lines_of_the_quickstart_make_one_job_of_two_hosts() {
    const PROGRAM: &str = "pleach bench all-reduce --sizes 8 --warmup 1 --iterations 2 --json";
    let Some(hosts) = hosts() else { return };
    let lines: Vec<String> = commands_of("docs/quickstart.md")
        .iter()
        .map(|line| line.replace("10.77.0.1", &hosts.address(0).to_string()).replace("PROGRAM", PROGRAM))
        .collect();
    let [secret, first, second] = &lines[..] else { panic!("a secret and two hosts: {lines:?}") };
    let start = |host: usize, line: &str| {
        let mut command = hosts.shell(host, line);
        command.env("PLEACH_JOIN_TIMEOUT", SHOWN_LIMIT).spawn().expect("ip starts")
    };
    let made = ended(vec![start(0, secret)]);
    assert!(made[0].status.success(), "{made:?}");
    let outputs = ended(vec![start(0, first), start(1, second)]);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    let table = text(&outputs[0].stdout);
    assert!(table.contains("\"shm+tcp\"") && table.contains("\"errors\":0"), "{table}");
}

/// Runs these commands on two hosts, the second when the first one listens; what each printed.
fn diagnose(hosts: &Hosts, interface: Option<&str>, [listener, dialer]: [&str; 2]) -> Vec<Output> {
    let mut listener = hosts.shell(0, listener);
    if let Some(interface) = interface {
        listener.env("PLEACH_INTERFACE", interface);
    }
    let mut listener = listener.env("PLEACH_SECRET_FILE", hosts.secret()).spawn().expect("ip starts");
    // It says where it listens, as soon as it does.
    let mut said = std::io::BufReader::new(listener.stderr.take().expect("is piped"));
    std::io::BufRead::read_line(&mut said, &mut String::new()).expect("it says something");
    let mut dialer = hosts.shell(1, dialer);
    let dialer = dialer.env("PLEACH_SECRET_FILE", hosts.secret()).spawn().expect("ip starts");
    ended(vec![listener, dialer])
}

#[test]
fn the_doctor_joins_two_hosts_by_the_lines_of_its_page() {
    let Some(hosts) = hosts() else { return };
    let lines = commands_of("docs/doctor.md");
    let [listener, dialer] = &lines[..] else { panic!("two hosts: {lines:?}") };
    let dialer = dialer.replace("10.0.0.5", &hosts.address(0).to_string());
    for output in diagnose(&hosts, None, [listener, &dialer]) {
        assert!(text(&output.stdout).contains("joined over tcp"), "{output:?}");
    }
}

#[test]
fn the_doctor_finds_what_keeps_ranks_of_two_hosts_apart() {
    let Some(hosts) = hosts() else { return };
    let lines = ["pleach doctor --listen 9401 --wait 60 --json", "pleach doctor --json --peer "];
    let dialer = format!("{}{}", lines[1], hosts.address(0));
    for (interface, level) in [(None, "ok"), (Some("127.0.0.1"), "problem")] {
        for output in diagnose(&hosts, interface, [lines[0], &dialer]) {
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let findings = report["findings"].as_array().expect("a list");
            let join = findings.iter().find(|finding| finding["subject"] == "join").expect("they joined");
            assert_eq!(join["level"], level, "{join}");
            let words = if interface.is_none() { "joined over tcp" } else { "PLEACH_INTERFACE=127.0.0.1" };
            assert!(join["text"].as_str().is_some_and(|text| text.contains(words)), "{join}");
        }
    }
}
