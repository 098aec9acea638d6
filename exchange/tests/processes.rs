//! Programs that exchange tensors and are killed, stopped or restarted.
//!
//! By shared memory and over sockets; with `PLEACH_TEST_FABRIC=verbs` over RDMA.

#[path = "../../tests/rdma_devices/mod.rs"]
mod rdma_devices;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Key, Peer};
use pleach_transport::sim::Random;
use pleach_transport::{Secret, clock};
use rdma_devices::rdma_device;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Bytes of a tensor, of which 2 % are much beside what a process touches anew when it receives: a
/// third of a megabyte, its code and its heap.
const LARGE: usize = 256 << 20;

/// Tensors of one sender, of several lengths.
const MANY: u32 = 300;

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Calls to a peer that was killed fail within this time, and its leases are back: long before a
/// deadline. It is some milliseconds; this is for machines that are busy with other things.
const SOON: Duration = Duration::from_secs(10);

/// Held by a test that measures a time or memory, and by the one that keeps all processors busy.
/// Pages of this program are divided by its processes too.
static ALONE: Mutex<()> = Mutex::new(());

/// Tells a child its fabric and its part: `send`, `many`, `receive HOST:PORT`, `publish`, or `hold`
/// with the addresses of who publishes and of who says when.
const PART: &str = "PLEACH_TEST_PART";

fn key(step: u64, name: &str) -> Key {
    Key::new(step, name).expect("a good name")
}

/// A test by each fabric by which programs have regions here.
fn by_each_fabric(test: impl Fn(&str)) {
    match std::env::var("PLEACH_TEST_FABRIC") {
        Ok(fabric) => test(&fabric),
        Err(_) => ["shm", "tcp"].into_iter().for_each(test),
    }
}

fn open(fabric: &str) -> Endpoint {
    let mut options = EndpointOptions::default();
    options.fabric = fabric.parse().expect("a fabric");
    if options.fabric == ExchangeFabric::Verbs {
        // A NIC serves those alone that know a secret.
        options.secret = Some(Secret::new(b"a secret of these tests"));
        // Children have the second of two devices, so that bytes cross the network.
        options.verbs.device = Some(rdma_device(u32::from(std::env::var_os(PART).is_some())));
    }
    Endpoint::open(&options).expect("a free port of loopback")
}

/// What a child does; nothing in the process of the tests.
#[test]
fn part_of_a_child() {
    let Ok(part) = std::env::var(PART) else { return };
    let (fabric, part) = part.split_once(' ').expect("a fabric and a part");
    let endpoint = open(fabric);
    if let Some(address) = part.strip_prefix("receive ") {
        let peer = endpoint.connect(address).expect("an address").within(LONG);
        peer.share_regions().expect("is on this host");
        let mut held = Vec::new();
        println!("ready");
        loop {
            let received = peer.receive(&key(0, "w")).expect("is published");
            let values = received.as_slice::<u32>().expect("numbers");
            assert!(values.len() == 10_000 && values.iter().all(|value| *value == 9), "a torn tensor");
            held.push(received);
            if held.len() > 3 {
                held.clear();
            }
        }
    }
    if part == "many" {
        for number in 0..MANY {
            let mut tensor = endpoint.tensor::<u32>(&[100 << (number % 10)]).expect("there is memory");
            tensor.fill(number);
            endpoint.send(&key(1, "many"), tensor.share()).expect("there is room");
        }
    }
    let mut held = None;
    if part == "publish" {
        let mut tensor = endpoint.tensor::<u32>(&[LARGE / 4]).expect("there is memory");
        tensor.fill(7);
        endpoint.publish(0, [("w".to_owned(), tensor.share())].into());
    } else if let Some((from, go)) = part.strip_prefix("hold ").and_then(|both| both.split_once(' ')) {
        let [from, go] =
            [from, go].map(|address| endpoint.connect(address).expect("an address").within(LONG));
        from.share_regions().expect("is on this host");
        println!("ready {}", endpoint.address());
        go.receive(&key(1, "go")).expect("is sent later");
        let received = from.receive(&key(0, "w")).expect("is published");
        assert!(received.as_slice::<u32>().expect("numbers").iter().all(|value| *value == 7));
        held = Some(received);
    }
    let mut tensor = endpoint.tensor::<u32>(&[1000]).expect("there is memory");
    tensor.fill(5);
    endpoint.send(&key(1, "w"), tensor.share()).expect("there is room");
    if held.is_none() {
        println!("ready {}", endpoint.address());
    }
    // Until it is killed.
    let _ = endpoint.receive(&key(9, "never"), Duration::MAX);
}

/// A child that is killed at the end of the test.
struct Program {
    child: Child,
    /// What it printed when it was ready.
    ready: String,
}

impl Program {
    /// A child that may not be ready yet.
    fn spawn(fabric: &str, part: &str) -> Self {
        let program = std::env::current_exe().expect("this test");
        let child = Command::new(program)
            .args(["--exact", "part_of_a_child", "--nocapture"])
            .env(PART, format!("{fabric} {part}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this test starts");
        Self { child, ready: String::new() }
    }

    fn start(fabric: &str, part: &str) -> Self {
        let mut program = Self::spawn(fabric, part);
        let lines = BufReader::new(program.child.stdout.take().expect("is piped")).lines();
        // The harness may have begun the line.
        let ready = lines
            .map_while(Result::ok)
            .find_map(|line| line.find("ready").map(|at| line[at + "ready".len()..].trim().to_owned()));
        program.ready = ready.expect("it prints that it is ready");
        program
    }

    /// The bytes of memory that it has, each page divided by the number of processes that have it.
    fn proportional_bytes(&self) -> usize {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id()));
        let text = text.expect("the kernel tells it");
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("it is told");
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Kills a child that runs until then.
    fn kill(&mut self) {
        self.child.kill().expect("it runs");
        let status = self.child.wait().expect("it was killed");
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "it failed by itself");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn peer_of(endpoint: &Endpoint, program: &Program) -> Peer {
    endpoint.connect(&program.ready).expect("an address").within(LONG)
}

#[test]
fn a_sender_that_is_killed_fails_its_calls_before_their_deadline_and_no_others() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    by_each_fabric(kill_a_sender);
}

fn kill_a_sender(fabric: &str) {
    let (mut killed, other) = (Program::start(fabric, "send"), Program::start(fabric, "send"));
    let endpoint = open(fabric);
    let (peer, other_peer) = (peer_of(&endpoint, &killed), peer_of(&endpoint, &other));
    peer.share_regions().expect("both have the fabric");
    other_peer.share_regions().expect("both have the fabric");
    let received = peer.receive(&key(1, "w")).expect("was sent");
    let pending = peer.start_receive(&key(7, "later")).expect("it listens");
    let other_pending = other_peer.start_receive(&key(7, "later")).expect("it listens");
    let since = clock::now();
    killed.kill();
    let error = pending.wait().expect_err("the sender is gone");
    let waited = clock::now().since(since);
    println!("{fabric}: the call failed after {waited:?}");
    assert!(waited < SOON, "{fabric}: the call failed after {waited:?}");
    assert_eq!(error.kind(), FailureKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("'later' of step 7") && text.contains(&killed.ready), "{text}");
    assert_eq!(received.as_slice::<u32>(), Ok(&[5; 1000][..]), "what was received stays");
    assert!(!other_pending.is_ready());
    assert_eq!(other_peer.receive(&key(1, "w")).expect("was sent").as_slice::<u32>(), Ok(&[5; 1000][..]));
}

#[test]
fn a_sender_that_is_stopped_fails_calls_at_their_deadline_and_goes_on_later() {
    by_each_fabric(stop_a_sender);
}

fn stop_a_sender(fabric: &str) {
    let stopped = Program::start(fabric, "send");
    let endpoint = open(fabric);
    let peer = peer_of(&endpoint, &stopped);
    peer.share_regions().expect("both have the fabric");
    stopped.signal(Signal::STOP);
    // The kernel stops its threads one after another.
    let state = waitpid(Some(Pid::from_child(&stopped.child)), WaitOptions::UNTRACED);
    assert!(state.expect("is a child").is_some_and(|(_, status)| status.stopped()));
    let error = peer.within(Duration::from_millis(50)).receive(&key(1, "w")).expect_err("is stopped");
    assert_eq!(error.kind(), FailureKind::Timeout, "{error}");
    stopped.signal(Signal::CONT);
    // The call that has ended took nothing.
    assert_eq!(peer.receive(&key(1, "w")).expect("was sent").as_slice::<u32>(), Ok(&[5; 1000][..]));
}

#[test]
fn from_a_sender_that_runs_in_short_turns_all_is_received_in_order() {
    by_each_fabric(slow_a_sender);
}

fn slow_a_sender(fabric: &str) {
    let slow = Program::start(fabric, "many");
    let endpoint = open(fabric);
    let peer = peer_of(&endpoint, &slow);
    peer.share_regions().expect("both have the fabric");
    let _slowing = Slowing::begin(&slow.child);
    for number in 0..MANY {
        let received = peer.receive(&key(1, "many"));
        let received = received.unwrap_or_else(|error| panic!("{fabric}: {number}: {error}"));
        let values = received.as_slice::<u32>().expect("numbers");
        let is_right = values.len() == 100 << (number % 10) && values.iter().all(|value| *value == number);
        assert!(is_right, "{fabric}: {number} is torn, or another one");
    }
}

/// Has a program run in turns of 2 of 7 ms, until it is dropped.
struct Slowing {
    is_done: Arc<AtomicBool>,
    turns: Option<JoinHandle<()>>,
}

impl Slowing {
    fn begin(program: &Child) -> Self {
        let (is_done, process) = (Arc::new(AtomicBool::new(false)), Pid::from_child(program));
        let done = Arc::clone(&is_done);
        let turns = thread::spawn(move || {
            // Relaxed: it orders nothing else. Its partner is the store of `drop`.
            while !done.load(Ordering::Relaxed) {
                kill_process(process, Signal::STOP).expect("it runs");
                thread::park_timeout(Duration::from_millis(5));
                kill_process(process, Signal::CONT).expect("it runs");
                thread::park_timeout(Duration::from_millis(2));
            }
        });
        Self { is_done, turns: Some(turns) }
    }
}

impl Drop for Slowing {
    fn drop(&mut self) {
        self.is_done.store(true, Ordering::Relaxed);
        let ended = self.turns.take().map(JoinHandle::join);
        assert!(thread::panicking() || ended.is_some_and(|ended| ended.is_ok()), "it ran until the end");
    }
}

#[test]
fn four_that_hold_a_tensor_in_place_have_its_bytes_once() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let go = open("shm");
    let mut programs = vec![Program::start("shm", "publish")];
    let part = format!("hold {} {}", programs[0].ready, go.address());
    programs.extend((0..4).map(|_| Program::start("shm", &part)));
    let all = || programs.iter().map(Program::proportional_bytes).sum::<usize>();
    let before = all();
    assert!(before > LARGE, "its owner has it");
    for holder in &programs[1..] {
        let word = go.tensor::<u32>(&[1]).expect("there is memory");
        go.send(&key(1, "go"), word.share()).expect("there is room");
        peer_of(&go, holder).receive(&key(1, "w")).expect("is sent when it holds the tensor");
    }
    let more = all().saturating_sub(before);
    assert!(more < LARGE / 50, "{more} bytes more for a tensor of {LARGE} that four hold");
}

/// Clients at a time that are killed.
const CLIENTS: u64 = 64;

/// The same over RDMA, where a machine of tests emulates the network and takes seconds for a link.
const RDMA_CLIENTS: u64 = 8;

/// How long clients come and are killed.
const KILLING: Duration = Duration::from_secs(10);

#[test]
fn clients_that_come_and_are_killed_at_random_leave_nothing_behind() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Every second client reads in place, and every other one gets.
    let fabrics = match std::env::var("PLEACH_TEST_FABRIC") {
        Ok(fabric) => [fabric.clone(), fabric],
        Err(_) => ["shm", "tcp"].map(str::to_owned),
    };
    let endpoint = open(if fabrics[0] == "verbs" { "verbs" } else { "auto" });
    let mut tensor = endpoint.tensor::<u32>(&[10_000]).expect("there is memory");
    tensor.fill(9);
    endpoint.publish(0, [("w".to_owned(), tensor.share())].into());
    let until = clock::now() + KILLING;
    let count = if fabrics[0] == "verbs" { RDMA_CLIENTS } else { CLIENTS };
    let clients = (1..=count).map(|number| {
        let (fabric, address) = (fabrics[(number % 2) as usize].clone(), endpoint.address());
        std::thread::spawn(move || {
            let mut random = Random::new(number);
            let mut killed = 0;
            while killed == 0 || clock::now() < until {
                let part = format!("receive {address}");
                // Some are killed before they have a link, and others while they hold tensors.
                let mut program = if random.below(4) == 0 {
                    Program::spawn(&fabric, &part)
                } else {
                    Program::start(&fabric, &part)
                };
                std::thread::park_timeout(Duration::from_micros(random.below(50_000)));
                program.kill();
                killed += 1;
            }
            killed
        })
    });
    let clients = clients.collect::<Vec<_>>();
    let killed = clients.into_iter().map(|client| client.join().expect("does not panic")).sum::<u64>();
    let counts = endpoint.counts();
    let sent = [&counts.sent_in_place, &counts.sent_copied].map(|sent| sent.tensors);
    let has_sent = if fabrics[0] == fabrics[1] {
        sent.iter().sum::<u64>() > 0
    } else {
        sent.iter().all(|sent| *sent > 0)
    };
    assert!(killed >= count && has_sent, "{killed}: {counts:?}");
    println!("{killed} clients were killed; {sent:?} tensors were read in place and got");
    // A killed client's leases are back.
    let until = clock::now() + SOON;
    while endpoint.counts().bytes_lent > 0 || endpoint.counts().links > 0 || endpoint.counts().leases > 0 {
        assert!(clock::now() < until, "a killed client holds {:?}", endpoint.counts());
        std::thread::yield_now();
    }
    endpoint.publish(0, [].into());
    drop(endpoint.tensor::<u32>(&[10_000]).expect("there is memory"));
    let counts = endpoint.counts();
    assert!(counts.arena_bytes <= 2 * 40_000 + 128, "the memory was used again: {counts:?}");
    // Others are served as before.
    let mut tensor = endpoint.tensor::<u32>(&[10_000]).expect("there is memory");
    tensor.fill(8);
    endpoint.publish(1, [("w".to_owned(), tensor.share())].into());
    let receiver = open(&fabrics[0]);
    let peer = receiver.connect(&endpoint.address().to_string()).expect("an address").within(LONG);
    let received = peer.receive(&key(1, "w")).expect("is published");
    assert!(received.as_slice::<u32>().expect("numbers").iter().all(|value| *value == 8));
}
