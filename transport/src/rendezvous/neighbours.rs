//! The ranks of this host: those that can share memory with this rank.
//!
//! Two ranks are neighbours under two conditions: each can map the memfd that the other sends over
//! an abstract Unix socket, and both have the same `PLEACH_HOST`. Names of hosts and machines do
//! not count: containers share or hide them, and shared memory needs exactly what the probe tests.
//!
//! The rank with the higher number probes the other's [`ProbeListener`], which a thread serves
//! until all ranks have written their results. Where not all pairs are connected at the beginning,
//! a rank probes the ranks below it, from the next one down, until one of them is its neighbour: so
//! `n` ranks of one host make `n` probes. All neighbours of one rank are taken for neighbours then,
//! as they have its network namespace and its user.
//!
//! **Invariant:** a listener exists before its address is published. So if a rank does not find a
//! listener, the listener is on another host, and the rank learns this without waiting. All ranks
//! compute the same [`Hosts`] from the same results.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::device_factory::Fabric;
use super::record::RankRecord;
use crate::auth::{TAG_BYTES, challenge};
use crate::clock::now;
use crate::control::packet::{self, ReceiveError};
use crate::device::{Address, files_allowed};
use crate::hybrid::HostId;
use crate::memory::{SharedMemory, shows};
use crate::{Nanos, Rank};

/// Time limit of an answer, for both ends of a probe.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How often a listener without a spare file looks for one.
const SPARE_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The result of a probe between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// Memory can be passed in both directions.
    Neighbours,
    /// Their `PLEACH_HOST` differs.
    Named,
    /// The other's socket is not on this host.
    NotFound,
    /// The socket belongs to another user.
    OtherUser,
    /// No answer came, or one without a descriptor.
    NoDescriptor,
    /// The descriptor cannot be mapped.
    NotMapped,
    /// One of the two may open no more files.
    TooManyFiles,
}

/// The answer, or the address, of a rank that may open no more files.
const TOO_MANY_FILES: &str = "too many files";

const LETTERS: [(ProbeOutcome, char); 7] = [
    (ProbeOutcome::Neighbours, '+'),
    (ProbeOutcome::Named, 'h'),
    (ProbeOutcome::NotFound, 'n'),
    (ProbeOutcome::OtherUser, 'u'),
    (ProbeOutcome::NoDescriptor, 'd'),
    (ProbeOutcome::NotMapped, 'm'),
    (ProbeOutcome::TooManyFiles, 'f'),
];

impl From<ProbeOutcome> for char {
    fn from(outcome: ProbeOutcome) -> Self {
        LETTERS.iter().find(|(other, _)| *other == outcome).map_or('n', |(_, letter)| *letter)
    }
}

impl ProbeOutcome {
    pub(super) fn from_letter(letter: char) -> Option<Self> {
        LETTERS.iter().find(|(_, other)| *other == letter).map(|(outcome, _)| *outcome)
    }

    /// The reason in words. `same_machine` only makes the words more precise.
    #[must_use]
    pub fn reason(self, same_machine: bool) -> &'static str {
        match self {
            Self::Neighbours => "descriptors arrive and map",
            Self::Named => "PLEACH_HOST differs",
            Self::NotFound if same_machine => "no descriptor arrived: different network namespaces",
            Self::NotFound => "no descriptor arrived: different machines",
            Self::OtherUser => "processes of different users",
            Self::NoDescriptor => "no descriptor arrived: no answer",
            Self::NotMapped => "the descriptor that arrived does not map",
            Self::TooManyFiles => "one of them may open no more files: raise its limit ('ulimit -n')",
        }
    }
}

/// A listener for probes of other ranks.
#[derive(Debug)]
pub struct ProbeListener {
    address: Address,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ProbeListener {
    /// A listener that is served until it is dropped.
    ///
    /// # Errors
    ///
    /// The kernel's error: too many files or threads.
    pub fn open() -> io::Result<Self> {
        let (listener, address) = packet::bind_anywhere()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let spare = spare_file()?;
        let thread = thread::Builder::new()
            .name("pleach-neighbours".to_owned())
            .spawn(move || serve_probes(&listener, &stopped, Some(spare)))?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// The listener that others probe.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address.0
    }

    /// What others probe instead, if the listener could not be opened for want of files.
    pub(super) fn address_after(error: &io::Error) -> Option<&'static str> {
        files_allowed(error).map(|_| TOO_MANY_FILES)
    }
}

impl Drop for ProbeListener {
    fn drop(&mut self) {
        // It fails only when the counter is full, and then the file is readable already.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread does nothing that panics.
            let _ = thread.join();
        }
    }
}

/// A file that is closed to make room for a connection.
fn spare_file() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC)
}

fn serve_probes(listener: &OwnedFd, stop: &OwnedFd, mut spare: Option<OwnedFd>) {
    loop {
        // Without a spare file, connections cannot be taken: look for one again after a while.
        let (files, limit) = if spare.is_some() { (2, None) } else { (1, Some(&SPARE_INTERVAL)) };
        let mut polled = [PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        // Interrupted or not: check both.
        let _ = poll(&mut polled[..files], limit);
        if polled[0].revents().contains(PollFlags::IN) {
            return;
        }
        let accepted = packet::accept(listener);
        let is_full = matches!(accepted, Err(Errno::MFILE));
        if is_full {
            spare = None;
        }
        let accepted = if is_full { packet::accept(listener) } else { accepted };
        if let Ok(stream) = accepted
            && packet::is_same_user(&stream)
        {
            // A peer that sends nothing more only harms its own probe. Its packet is read before
            // the answer in any case: a stream that is closed with a packet unread, or before the
            // peer sends, gives the peer an error in place of the answer.
            let outcome = match is_full {
                true => receive_descriptor(&stream, now() + ANSWER_LIMIT, Some(stop)),
                false => exchange(&stream, stop),
            };
            if is_full || outcome == Err(ProbeOutcome::TooManyFiles) {
                let _ = packet::send(&stream, TOO_MANY_FILES.as_bytes(), &[]);
            }
        }
        spare = spare.or_else(|| spare_file().ok());
    }
}

/// Receives a descriptor, and sends one back if it can be mapped. Ends when `stop` is readable.
fn exchange(stream: &OwnedFd, stop: &OwnedFd) -> Result<(), ProbeOutcome> {
    receive_descriptor(stream, now() + ANSWER_LIMIT, Some(stop))?;
    send_descriptor(stream)
}

/// Probes another rank's listener. Waits for an answer until `deadline`, and at most 10 s.
#[must_use]
pub fn probe(probe_listener: &str, deadline: Nanos) -> ProbeOutcome {
    let until = deadline.min(now() + ANSWER_LIMIT);
    let outcome = || -> Result<(), ProbeOutcome> {
        if probe_listener == TOO_MANY_FILES {
            return Err(ProbeOutcome::TooManyFiles);
        }
        let name = packet::parse_text(probe_listener).ok_or(ProbeOutcome::NotFound)?;
        let stream = packet::dial(name).map_err(|error| match error {
            Errno::MFILE => ProbeOutcome::TooManyFiles,
            _ => ProbeOutcome::NotFound,
        })?;
        if !packet::is_same_user(&stream) {
            return Err(ProbeOutcome::OtherUser);
        }
        send_descriptor(&stream)?;
        receive_descriptor(&stream, until, None)
    };
    outcome().err().unwrap_or(ProbeOutcome::Neighbours)
}

/// Sends a descriptor, and the contents of its memory.
fn send_descriptor(stream: &OwnedFd) -> Result<(), ProbeOutcome> {
    let token = challenge();
    let memory = SharedMemory::new(TAG_BYTES).map_err(|error| match files_allowed(&error) {
        Some(_) => ProbeOutcome::TooManyFiles,
        None => ProbeOutcome::NoDescriptor,
    })?;
    if rustix::io::pwrite(memory.file(), &token, 0) != Ok(TAG_BYTES) {
        return Err(ProbeOutcome::NoDescriptor);
    }
    packet::send(stream, &token, &[memory.file()]).map(drop).map_err(|_| ProbeOutcome::NoDescriptor)
}

/// Receives a descriptor and maps it. Waits until `until`, or until `stop` is readable.
fn receive_descriptor(stream: &OwnedFd, until: Nanos, stop: Option<&OwnedFd>) -> Result<(), ProbeOutcome> {
    // One byte more than expected, so that a longer message is detected.
    let mut token = [0; TAG_BYTES + 1];
    loop {
        match packet::receive(stream, &mut token) {
            Ok(packet) if packet.files_lost || token[..packet.bytes] == *TOO_MANY_FILES.as_bytes() => {
                return Err(ProbeOutcome::TooManyFiles);
            }
            Ok(mut packet) => {
                let file = packet.files.pop().filter(|_| packet.bytes == TAG_BYTES);
                let file = file.ok_or(ProbeOutcome::NoDescriptor)?;
                let maps = shows(file, &token[..TAG_BYTES]);
                return if maps { Ok(()) } else { Err(ProbeOutcome::NotMapped) };
            }
            Err(ReceiveError::System(Errno::AGAIN | Errno::INTR)) => {
                let left = until.since(now());
                let limit =
                    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
                let mut files: Vec<_> = [Some(stream), stop]
                    .into_iter()
                    .flatten()
                    .map(|file| PollFd::new(file, PollFlags::IN))
                    .collect();
                // Interrupted or not: try again.
                let _ = poll(&mut files, Some(&limit));
                let is_over = files.get(1).is_some_and(|stop| !stop.revents().is_empty());
                if left.is_zero() || is_over {
                    return Err(ProbeOutcome::NoDescriptor);
                }
            }
            Err(_) => return Err(ProbeOutcome::NoDescriptor),
        }
    }
}

/// The ranks by host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hosts {
    /// By rank: the number of its host, counted from 0 in the order of their first ranks.
    pub(super) of: Vec<u32>,
    /// A pair that is not on one host, with its probe's result.
    pub(super) separate_pair: Option<(Rank, Rank, ProbeOutcome)>,
    /// A pair on one host whose users differ.
    pub(super) other_users: Option<(Rank, Rank)>,
}

impl Hosts {
    /// From each rank's probes of the ranks below it, the next one first, as far as it went.
    pub(super) fn new(found: &[Vec<ProbeOutcome>]) -> Self {
        let probed = |low: usize, high: usize| found[high].get(high - low - 1).copied();
        let are_neighbours = |low: usize, high: usize| probed(low, high) == Some(ProbeOutcome::Neighbours);
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut of = Vec::with_capacity(found.len());
        for rank in 0..found.len() {
            // Neighbours of all that were probed: a rank that fits two hosts belongs to the first.
            let fits = |ranks: &Vec<usize>| {
                let is_none = |&low: &usize| probed(low, rank).is_some() && !are_neighbours(low, rank);
                ranks.iter().any(|&low| are_neighbours(low, rank)) && !ranks.iter().any(is_none)
            };
            let host = members.iter().position(fits);
            let host = host.unwrap_or_else(|| {
                members.push(Vec::new());
                members.len() - 1
            });
            members[host].push(rank);
            of.push(host as u32);
        }
        let pairs = (0..found.len()).flat_map(|high| (0..high).map(move |low| (low, high)));
        let mut of_other_users =
            pairs.clone().filter(|&(low, high)| probed(low, high) == Some(ProbeOutcome::OtherUser));
        let other_users = of_other_users.next().map(|(low, high)| (low as Rank, high as Rank));
        let separate_pair = pairs
            .filter(|&(low, high)| of[low] != of[high])
            .filter_map(|(low, high)| Some((low as Rank, high as Rank, probed(low, high)?)))
            .find(|(.., outcome)| *outcome != ProbeOutcome::Neighbours);
        Self { of, separate_pair, other_users }
    }

    /// A host for each rank.
    pub(super) fn all_separate(world_size: u32) -> Self {
        Self { of: (0..world_size).collect(), separate_pair: None, other_users: None }
    }

    /// The hosts of a part of the ranks, whose hosts have these numbers among all.
    pub(crate) fn of_numbers(numbers: impl Iterator<Item = u32>) -> Self {
        let mut hosts = Vec::new();
        let of = numbers.map(|number| {
            let known = hosts.iter().position(|host| *host == number);
            known.unwrap_or_else(|| {
                hosts.push(number);
                hosts.len() - 1
            }) as u32
        });
        Self { of: of.collect(), separate_pair: None, other_users: None }
    }

    /// The number of hosts.
    pub(super) fn count(&self) -> u32 {
        self.of.iter().max().map_or(0, |last| last + 1)
    }

    /// The best fabric.
    pub(super) fn fabric(&self) -> Fabric {
        match self.count() as usize {
            1 => Fabric::Shm,
            hosts if hosts == self.of.len() => Fabric::Tcp,
            _ => Fabric::Hybrid,
        }
    }

    /// The host of each rank. `records`: of all ranks.
    pub(super) fn ids(&self, records: &[RankRecord]) -> Vec<HostId> {
        let ranks = self.of.iter().zip(records);
        ranks.map(|(number, record)| HostId::new(*number, record.host.as_deref())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::WakeSource;
    use crate::other_user::{as_nobody, can_act_as_nobody};

    #[test]
    fn a_door_of_this_process_is_a_neighbours_and_one_that_is_not_there_is_not() {
        let probe_listener = ProbeListener::open().expect("the system gives a socket");
        let deadline = now() + Duration::from_secs(60);
        for _ in 0..3 {
            assert_eq!(probe(probe_listener.address(), deadline), ProbeOutcome::Neighbours);
        }
        let address = probe_listener.address().to_owned();
        drop(probe_listener);
        assert_eq!(probe(&address, deadline), ProbeOutcome::NotFound);
        assert_eq!(probe("tcp:1.2.3.4:5", deadline), ProbeOutcome::NotFound);
    }

    #[test]
    fn the_door_of_another_user_is_told_from_one_that_is_not_there() {
        if !can_act_as_nobody() {
            return;
        }
        let deadline = now() + Duration::from_secs(60);
        let probe_listener = ProbeListener::open().expect("the system gives a socket");
        assert_eq!(as_nobody(|| probe(probe_listener.address(), deadline)), ProbeOutcome::OtherUser);
        let probe_listener = as_nobody(|| ProbeListener::open().expect("the system gives a socket"));
        assert_eq!(probe(probe_listener.address(), deadline), ProbeOutcome::OtherUser);
    }

    #[test]
    fn who_says_nothing_or_passes_nothing_is_no_neighbour() {
        let (listener, address) = packet::bind_anywhere().expect("the system gives a socket");
        assert_eq!(probe(&address.0, now() + Duration::from_millis(20)), ProbeOutcome::NoDescriptor);
        let mute = thread::spawn(move || {
            // The probe before is still in the queue.
            let _ = packet::accept(&listener);
            WakeSource::File(Arc::new(listener.try_clone().expect("a descriptor"))).wait(ANSWER_LIMIT);
            let stream = packet::accept(&listener).expect("a peer probes");
            packet::send(&stream, &[7; TAG_BYTES], &[]).expect("there is room");
            WakeSource::File(Arc::new(stream)).wait(ANSWER_LIMIT);
        });
        assert_eq!(probe(&address.0, now() + Duration::from_secs(60)), ProbeOutcome::NoDescriptor);
        mute.join().expect("it answers without a descriptor");
    }

    #[test]
    fn a_probe_listener_closes_at_once_also_while_a_peer_is_silent() {
        let probe_listener = ProbeListener::open().expect("the system gives a socket");
        let name = packet::parse_text(probe_listener.address()).expect("an address");
        let silent = packet::dial(name).expect("it is answered");
        // Probably the thread waits for its message by then; otherwise the listener closes even
        // sooner.
        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
        let closing = now();
        drop(probe_listener);
        let took = now().since(closing);
        assert!(took < ANSWER_LIMIT / 2, "{took:?}");
        drop(silent);
    }

    #[test]
    fn a_descriptor_that_shows_something_else_does_not_count_as_mapped() {
        let (one, other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .expect("the system gives sockets");
        let memory = SharedMemory::new(TAG_BYTES).expect("memory");
        packet::send(&one, &[7; TAG_BYTES], &[memory.file()]).expect("there is room");
        assert_eq!(receive_descriptor(&other, now() + ANSWER_LIMIT, None), Err(ProbeOutcome::NotMapped));
        send_descriptor(&one).expect("there is room");
        assert_eq!(receive_descriptor(&other, now() + ANSWER_LIMIT, None), Ok(()));
    }

    #[test]
    fn hosts_are_made_of_ranks_that_are_all_neighbours() {
        use ProbeOutcome::{Named, Neighbours, NotFound};
        let found = |lines: [&[ProbeOutcome]; 4]| Hosts::new(&lines.map(<[ProbeOutcome]>::to_vec));
        let one = found([&[], &[Neighbours], &[Neighbours; 2], &[Neighbours; 3]]);
        assert_eq!(
            (one.of.as_slice(), one.separate_pair, one.fabric()),
            (&[0, 0, 0, 0][..], None, Fabric::Shm)
        );
        let none = found([&[], &[NotFound], &[NotFound; 2], &[Named; 3]]);
        assert_eq!((none.count(), none.fabric()), (4, Fabric::Tcp));
        assert_eq!(none.separate_pair, Some((0, 1, NotFound)));
        let two = found([&[], &[NotFound], &[NotFound, Neighbours], &[NotFound, Neighbours, NotFound]]);
        assert_eq!((two.of.as_slice(), two.fabric()), (&[0, 1, 0, 1][..], Fabric::Hybrid));
        let records =
            [None, Some("b"), None, Some("b")].map(|name| RankRecord::own(4, name, None, None, &[]));
        let [first, second] = [HostId::new(0, None), HostId::new(1, Some("b"))];
        assert_eq!(two.ids(&records), [first, second, first, second]);
        // 2 is a neighbour of 1 but not of 0, so it cannot be on the host of both.
        let chain = found([&[], &[Neighbours], &[Neighbours, NotFound], &[Neighbours, NotFound, NotFound]]);
        assert_eq!(chain.of, [0, 0, 1, 1]);
        assert_eq!(chain.separate_pair, Some((0, 2, NotFound)));
        // Each has ended with its first neighbour.
        let ended = found([&[], &[Neighbours], &[Neighbours], &[Neighbours]]);
        assert_eq!((ended.of.as_slice(), ended.separate_pair), (&[0; 4][..], None));
        let in_turns = found([&[], &[NotFound], &[Named, Neighbours], &[Named, Neighbours]]);
        assert_eq!(in_turns.of, [0, 1, 0, 1]);
        assert_eq!(in_turns.separate_pair, Some((0, 1, NotFound)));
    }

    #[test]
    fn a_pair_of_different_users_is_seen_also_where_others_are_apart() {
        use ProbeOutcome::{Neighbours, NotFound, OtherUser};
        let found = [&[][..], &[NotFound], &[OtherUser, Neighbours]].map(<[ProbeOutcome]>::to_vec);
        assert_eq!(Hosts::new(&found).other_users, Some((1, 2)));
        assert_eq!(Hosts::new(&found[..2]).other_users, None);
    }

    #[test]
    fn distances_travel_as_letters() {
        for (outcome, letter) in LETTERS {
            assert_eq!(char::from(outcome), letter);
            assert_eq!(ProbeOutcome::from_letter(letter), Some(outcome));
        }
        assert_eq!(ProbeOutcome::from_letter('?'), None);
    }
}
