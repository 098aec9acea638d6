//! Control planes of several ranks in one process, of a fabric without data connections.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, WaitOptions, waitpid};

use super::handshake::{EndRanks, Handshake, Progress, Role};
use super::*;
use crate::auth::Secret;
use crate::device::{Incarnation, MESSAGE_BYTES_MAX, Protection, ProtocolViolation, Responder};
use crate::mutex::lock;
use crate::wire::Malformed;

/// How long a test waits for anything: machines are loaded.
const PATIENCE: Duration = Duration::from_secs(30);

/// Lists of connections that are joined.
const LISTS: u32 = 3;

/// What the fabric of these tests says: a number that is not zero; from 100 on why it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number(u8);

impl FabricMessage for Number {
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        match bytes {
            [0] => Err(Malformed),
            &[number] => Ok(Self(number)),
            _ => Err(Malformed),
        }
    }

    fn refusal(&self) -> Option<LossCause> {
        (self.0 >= 100).then_some(LossCause::Files { most: u64::from(self.0) })
    }
}

/// What a responder heard.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Heard {
    Message(Rank, Vec<u8>),
    Lost(Rank, LossCause),
}

#[derive(Default)]
struct Inbox(Mutex<Vec<Heard>>);

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Heard>> {
        lock(&self.0)
    }
}

impl Responder for Inbox {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.lock().push(Heard::Message(from, message.to_vec()));
        (message == b"?").then(|| b"!".to_vec())
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        self.lock().push(Heard::Lost(peer, cause.clone()));
    }
}

fn new_control(config: DeviceConfig) -> Control<ControlEventQueue<Number>> {
    let events = ControlEventQueue::new().expect("a descriptor");
    let known = KnownProcesses::fresh(config.world_size);
    Control::new(config, known, "test", Network::Tcp { data_connections: 0 }, events)
        .expect("listening on loopback")
}

/// Carries out the dialer's part of a handshake without a secret on a Unix socket, as the first of
/// the two ranks to the second.
pub(crate) fn dial_by_hand(stream: &OwnedFd, [rank, peer]: [Rank; 2], world_size: u32, until: Nanos) {
    let identity = Identity {
        rank,
        world_size,
        data_connections: 0,
        signal_slots: 8,
        process: std::process::id(),
        incarnation: Incarnation::fresh(),
        host: [0; 16],
        secret: None,
    };
    let mut handshake = Handshake::dial(
        &identity,
        (Role::Control, 0),
        EndRanks { dialer: rank, listener: peer, share_world: true },
        1,
        Protection::Clear,
    );
    loop {
        let outgoing = std::mem::take(handshake.outgoing());
        if !outgoing.is_empty() {
            packet::send(stream, &outgoing, &[]).expect("room in the stream");
        }
        let received = loop {
            assert!(clock::now() < until, "no answer");
            match packet::receive(stream, handshake.room()) {
                Ok(packet) => break packet.bytes,
                Err(_) => std::thread::yield_now(),
            }
        };
        match handshake.received(received) {
            Progress::Pending => {}
            Progress::Done(_) => return,
            progress => panic!("{progress:?}"),
        }
    }
}

struct End {
    control: Control<ControlEventQueue<Number>>,
    inbox: Arc<Inbox>,
    events: Vec<ControlEvent<Number>>,
}

impl End {
    fn new(rank: Rank, world_size: u32) -> Self {
        Self::with(rank, world_size, PATIENCE)
    }

    fn with(rank: Rank, world_size: u32, connect_timeout: Duration) -> Self {
        let inbox = Arc::new(Inbox::default());
        let config = DeviceConfig {
            rank,
            world_size,
            secret: Some(Secret::new(b"known to all of them")),
            signal_slots: 4,
            connect_timeout,
            interface: None,
            address: None,
            responder: Arc::clone(&inbox) as _,
        };
        let control = new_control(config);
        Self { control, inbox, events: Vec::new() }
    }

    /// Until something has come, or for a moment.
    fn sleep(&self) {
        let moment = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let mut wake_source = [PollFd::new(self.control.wake_source(), PollFlags::IN)];
        let _ = poll(&mut wake_source, Some(&moment));
        self.control.wake_source().drain();
    }

    fn connect(&mut self, other: &Self) {
        self.connect_to(other, false);
    }

    fn connect_to(&mut self, other: &Self, is_again: bool) {
        let kind = PairKind::InWorld(other.control.address());
        self.control.connect(other.control.rank(), kind, is_again).expect("starts");
    }

    /// Waits until an event has come; events before it are kept, in their order.
    fn until(&mut self, what: &str, is_it: impl Fn(&ControlEvent<Number>) -> bool) {
        let until = clock::now() + PATIENCE;
        while !self.events.iter().any(&is_it) {
            assert!(clock::now() < until, "no {what}: {:?}", self.inbox.lock());
            self.sleep();
            self.events.extend(self.control.take_events());
        }
    }

    fn until_opened(&mut self, peer: Rank) {
        self.until(
            "connection",
            |event| matches!(event, ControlEvent::Opened { peer: of, .. } if *of == peer),
        );
    }

    fn until_lost(&mut self, peer: Rank) -> LossCause {
        self.until("loss", |event| matches!(event, ControlEvent::Lost { peer: of, .. } if *of == peer));
        let causes = self.events.iter().filter_map(|event| match event {
            ControlEvent::Lost { cause, .. } => Some(cause.clone()),
            _ => None,
        });
        let causes: Vec<_> = causes.collect();
        assert_eq!(causes.len(), 1, "a loss is told once: {causes:?}");
        let told = self.inbox.lock().contains(&Heard::Lost(peer, causes[0].clone()));
        assert!(told, "the responder hears of it before");
        causes[0].clone()
    }

    fn until_heard(&self, what: &Heard) {
        let until = clock::now() + PATIENCE;
        while !self.inbox.lock().contains(what) {
            assert!(clock::now() < until, "not heard: {what:?}");
            self.sleep();
        }
    }

    /// Connections of TCP at its port, as the kernel lists them. The kernel gives its list in
    /// pieces: while others connect, a line may be left out or come twice, so several lists are
    /// joined.
    fn sockets(&self) -> usize {
        let port = self.control.address().0.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
        let own = format!(":{:04X}", port.expect("an address with a port"));
        let mut connections = BTreeSet::new();
        for _ in 0..LISTS {
            let listed = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's list");
            // Number, own address, other address, state (1: connected).
            let columns = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let at_port = columns.filter(|line| line[1].ends_with(&own) && line[3] == "01");
            connections.extend(at_port.map(|line| (line[1].to_owned(), line[2].to_owned())));
        }
        connections.len()
    }
}

fn connected() -> [End; 2] {
    let [mut low, mut high] = [End::new(0, 2), End::new(1, 2)];
    low.connect(&high);
    high.connect(&low);
    low.until_opened(1);
    high.until_opened(0);
    [low, high]
}

#[test]
fn a_pair_has_one_socket_and_says_all_over_it_in_order() {
    let [mut low, high] = connected();
    assert_eq!([low.sockets(), high.sockets()], [1, 0], "the higher rank has dialed, once");
    assert!(high.control.send_message(0, &[7]));
    high.control.post(0, b"?", false).expect("there is room");
    assert!(high.control.send_message(0, &[8]));
    high.until_heard(&Heard::Message(0, b"!".to_vec()));
    low.until_heard(&Heard::Message(1, b"?".to_vec()));
    low.until("message", |event| matches!(event, ControlEvent::Message { message: Number(8), .. }));
    let said = low.events.iter().filter_map(|event| match event {
        ControlEvent::Message { peer: 1, message } => Some(message.0),
        _ => None,
    });
    assert_eq!(said.collect::<Vec<_>>(), [7, 8]);
    let long = [0; MESSAGE_BYTES_MAX + 1];
    assert_eq!(high.control.post(0, &long, false), Err(PostError::TooLong { bytes: long.len() }));
    assert_eq!(high.control.post(1, b"", false), Err(PostError::NotConnected { peer: 1 }));
    assert_eq!(high.control.post(2, b"", false), Err(PostError::NotConnected { peer: 2 }));
}

#[test]
fn what_a_peer_said_counts_though_its_loss_was_seen_before_elsewhere() {
    let broken = LossCause::ConnectionBroke(io::ErrorKind::Other);
    let [mut low, high] = connected();
    high.control.post(0, b"last words", true).expect("there is room");
    low.control.lose(1, broken.clone());
    // The second cause is not.
    low.control.lose(1, LossCause::ConnectionClosed);
    assert_eq!(low.until_lost(1), broken);
    assert_eq!(low.inbox.lock()[..], [Heard::Message(1, b"last words".to_vec()), Heard::Lost(1, broken)]);

    let [mut low, mut high] = connected();
    high.control.send_bye(0);
    low.control.lose(1, LossCause::ConnectionClosed);
    low.until("bye", |event| matches!(event, ControlEvent::Departed { peer: 1 }));
    drop(high);
    assert_eq!(low.inbox.lock()[..], [], "who said bye is not lost");
}

#[test]
fn why_a_pair_is_refused_tells_more_than_what_is_seen_of_it() {
    let refused = LossCause::Files { most: 101 };
    let [mut low, high] = connected();
    assert!(high.control.send_message(0, &[101]));
    low.control.lose(1, LossCause::ConnectionClosed);
    assert_eq!(low.until_lost(1), refused);
    assert_eq!(low.control.cause(1, LossCause::ConnectionClosed), refused);
    let [mut low, high] = connected();
    low.control.refuse(1, refused.clone());
    drop(high);
    assert_eq!(low.until_lost(1), refused);
}

#[test]
fn a_message_that_no_fabric_sends_costs_the_pair() {
    let [mut low, high] = connected();
    assert!(high.control.send_message(0, &[0]));
    assert_eq!(low.until_lost(1), LossCause::Protocol(ProtocolViolation::MalformedFrame));
}

#[test]
fn pairs_are_connected_one_by_one_when_both_want_it_and_others_never() {
    let mut ends = [End::new(0, 4), End::new(1, 4), End::new(2, 4)];
    let [low, middle, high] = &mut ends;
    // Long before the other wants it.
    high.connect(low);
    high.connect(low);
    middle.connect(high);
    high.connect(middle);
    middle.until_opened(2);
    high.until_opened(1);
    assert!(low.events.is_empty() && !low.control.has_events());
    assert_eq!(low.control.post(2, b"", false), Err(PostError::NotConnected { peer: 2 }));
    low.connect(high);
    low.until_opened(2);
    high.until_opened(0);
    assert_eq!(low.sockets(), 1, "rank 1 is not connected to it");
    // Severed before they were connected: they never are, and nothing is lost.
    low.control.sever(1);
    low.connect(middle);
    assert!(!low.control.send_message(1, &[1]));
    high.control.post(0, b"here", false).expect("it is connected");
    low.until_heard(&Heard::Message(2, b"here".to_vec()));
    assert_eq!(low.events.len(), 1, "one pair, nothing else");
}

#[test]
fn posts_to_a_peer_that_reads_nothing_are_bounded_and_an_urgent_one_has_room() {
    struct Blocking(Mutex<()>);
    impl Responder for Blocking {
        fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
            drop(self.0.lock());
            None
        }
        fn lost(&self, _peer: Rank, _cause: &LossCause) {}
    }
    let blocking = Arc::new(Blocking(Mutex::new(())));
    let held = blocking.0.lock().expect("nobody panics");
    let mut high = End::new(1, 2);
    let config = DeviceConfig {
        rank: 0,
        world_size: 2,
        secret: Some(Secret::new(b"known to all of them")),
        signal_slots: 4,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::clone(&blocking) as _,
    };
    let mut low = new_control(config);
    low.connect(1, PairKind::InWorld(high.control.address()), false).expect("starts");
    high.control.connect(0, PairKind::InWorld(low.address()), false).expect("starts");
    high.until_opened(0);
    let full = [0; MESSAGE_BYTES_MAX];
    let posted = (0..100_000).take_while(|_| high.control.post(0, &full, false).is_ok()).count();
    assert!(posted < 100_000, "{posted} messages wait");
    assert_eq!(high.control.post(0, &full, false), Err(PostError::QueueFull { peer: 0 }));
    high.control.post(0, b"urgent", true).expect("there is always room");
    assert!(high.control.has_output(0));
    drop(held);
    let until = clock::now() + PATIENCE;
    while high.control.has_output(0) {
        assert!(clock::now() < until, "the rest goes out without a call");
        high.sleep();
    }
}

#[test]
fn a_forked_child_may_drop_its_copy_and_harms_nobody() {
    // In a process of its own: threads of other tests may hold locks that a child would wait for.
    let mut forks = std::process::Command::new(std::env::current_exe().expect("a test binary"));
    forks.args(["--exact", "control::tests::fork_and_drop", "--ignored", "--test-threads=1"]);
    let output = forks.output().expect("the test binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "a process that another test starts"]
fn fork_and_drop() {
    let [low, high] = connected();
    // SAFETY: the child drops two control planes, which takes locks that only this thread and idle
    // watchers use, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop([low, high]);
        // SAFETY: ends the child without running what belongs to its parent.
        unsafe { libc::_exit(7) };
    }
    let child = Pid::from_raw(child).expect("fork works");
    let until = clock::now() + PATIENCE;
    let status = loop {
        assert!(clock::now() < until, "the child hangs");
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).expect("a child") {
            break status;
        }
        low.sleep();
    };
    assert_eq!(status.exit_status(), Some(7));
    high.control.post(0, b"still connected", false).expect("it is connected");
    low.until_heard(&Heard::Message(1, b"still connected".to_vec()));
}

/// How often a pair was opened.
fn openings(end: &End, peer: Rank) -> usize {
    let is_opening =
        |event: &&ControlEvent<Number>| matches!(event, ControlEvent::Opened { peer: of, .. } if *of == peer);
    end.events.iter().filter(is_opening).count()
}

#[test]
fn a_rank_is_given_to_another_process_and_the_former_one_is_refused_it() {
    let [mut low, mut former] = connected();
    let mut next = End::new(1, 2);
    low.control.sever(1);
    // It is too early: the rank is not free.
    next.connect(&low);
    assert_eq!(former.until_lost(0), LossCause::ConnectionClosed);
    low.connect_to(&next, true);
    former.connect_to(&low, true);
    low.events.clear();
    low.until_opened(1);
    next.until_opened(0);
    former.until("refusal", |event| {
        let refused = LossCause::Protocol(ProtocolViolation::FormerProcess);
        matches!(event, ControlEvent::Lost { cause, .. } if *cause == refused)
    });
    next.control.post(0, b"from the next one", false).expect("it is connected");
    low.until_heard(&Heard::Message(1, b"from the next one".to_vec()));
    assert_eq!((openings(&low, 1), openings(&former, 0)), (1, 1));
    assert!(!low.inbox.lock().iter().any(|heard| matches!(heard, Heard::Lost(..))), "nobody was lost");
}

#[test]
fn events_of_a_former_generation_that_nobody_took_are_dropped() {
    let [mut low, former] = connected();
    let mut next = End::new(1, 2);
    assert!(former.control.send_message(0, &[7]));
    former.control.post(0, b"after it", false).expect("it is connected");
    // The message before waits in the queue, and the device does not look at it.
    low.until_heard(&Heard::Message(1, b"after it".to_vec()));
    assert!(low.control.has_events());
    low.connect_to(&next, true);
    next.connect(&low);
    low.events.clear();
    low.until_opened(1);
    next.until_opened(0);
    assert!(next.control.send_message(0, &[8]));
    low.until("message", |event| matches!(event, ControlEvent::Message { message: Number(8), .. }));
    assert_eq!(low.events.len(), 2, "the opening and the message of the next one alone");
    drop(former);
}

#[test]
fn a_sever_after_a_connect_that_the_watcher_has_not_seen_holds() {
    for _ in 0..20 {
        let [mut low, former] = connected();
        low.control.sever(1);
        drop(former);
        let next = End::new(1, 2);
        low.connect_to(&next, true);
        low.control.sever(1);
        let taken = LossCause::Protocol(ProtocolViolation::RankTaken);
        // The time of a busy machine may be up before it has asked.
        let refusals = [20, 500, 30_000].into_iter().map(|limit_ms| {
            let mut next = End::with(1, 2, Duration::from_millis(limit_ms));
            next.connect(&low);
            next.until_lost(0)
        });
        let refused = refusals.into_iter().find(|cause| !matches!(cause, LossCause::NotReached(_)));
        assert_eq!(refused, Some(taken), "the rank is severed");
        low.events.extend(low.control.take_events());
        assert_eq!(openings(&low, 1), 1, "the former process alone was connected");
    }
}

#[test]
fn ends_of_different_worlds_name_each_other_and_a_dialer_of_one_world_is_no_such_end() {
    let mut server = End::new(0, 9);
    let mut client = End::new(0, 2);
    let address = server.control.address().clone();
    let dial = PairKind::BetweenWorlds(Meeting::Dial { address: &address, own: 5 });
    client.control.connect(1, dial, false).expect("starts");
    // A rank of one world is refused where one of another is awaited.
    server.control.connect(7, PairKind::BetweenWorlds(Meeting::Await), false).expect("a rank");
    let mut neighbour = End::new(7, 9);
    neighbour.connect(&server);
    assert_eq!(neighbour.until_lost(0), LossCause::Protocol(ProtocolViolation::WrongRank));
    server.control.connect(5, PairKind::BetweenWorlds(Meeting::Await), false).expect("a rank");
    server.until_opened(5);
    client.until_opened(1);
    let own_rank = |end: &End| {
        end.events.iter().find_map(|event| match event {
            ControlEvent::Opened { pair, .. } => Some(pair.own_rank),
            _ => None,
        })
    };
    assert_eq!([own_rank(&server), own_rank(&client)], [Some(1), Some(5)], "as the other calls it");
    for own in [0, 9] {
        let mut stranger = End::new(0, 2);
        let dial = PairKind::BetweenWorlds(Meeting::Dial { address: &address, own });
        stranger.control.connect(1, dial, false).expect("starts");
        assert_eq!(stranger.until_lost(1), LossCause::Protocol(ProtocolViolation::WrongRank));
    }
}
