//! Who is on this host: whom this rank can hand memory to.
//!
//! Two ranks are neighbours when a memfd that each passes to the other over an abstract Unix socket
//! arrives there and maps, and their `PLEACH_HOST` agrees. Names of hosts and machines are not
//! asked: containers share or hide them as they like, and shared memory needs what is tried here.
//!
//! Of two ranks the higher one knocks at the other's [`Door`], which a thread answers until all
//! ranks have told what they found. **Invariant:** a door is there before its address is told, so
//! one that is not found is on another host, and nobody waits to learn that. All ranks make the
//! same [`Hosts`] of the same answers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::Timespec;

use super::fabrics::Fabric;
use crate::auth::{TAG_BYTES, challenge};
use crate::clock::now;
use crate::control::packet::{self, ReceiveError};
use crate::device::Address;
use crate::hybrid::Route;
use crate::memory::{SharedMemory, shows};
use crate::{Nanos, Rank};

/// How long one who has knocked may take to say the next word, and who was knocked at to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How two ranks stand to each other, as the higher one found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// Memory passes both ways.
    Neighbours,
    /// Their `PLEACH_HOST` differs.
    Named,
    /// The socket of the other is not here.
    NotFound,
    /// It belongs to another user.
    OtherUser,
    /// No answer came, or one without a descriptor.
    NoDescriptor,
    /// What came does not map.
    NotMapped,
}

const LETTERS: [(Distance, char); 6] = [
    (Distance::Neighbours, '+'),
    (Distance::Named, 'h'),
    (Distance::NotFound, 'n'),
    (Distance::OtherUser, 'u'),
    (Distance::NoDescriptor, 'd'),
    (Distance::NotMapped, 'm'),
];

impl Distance {
    pub(super) fn letter(self) -> char {
        LETTERS.iter().find(|(distance, _)| *distance == self).map_or('n', |(_, letter)| *letter)
    }

    pub(super) fn from_letter(letter: char) -> Option<Self> {
        LETTERS.iter().find(|(_, other)| *other == letter).map(|(distance, _)| *distance)
    }

    /// Why they are no neighbours, for people. `same_machine` makes the words clearer and decides
    /// nothing.
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
        }
    }
}

/// Where others knock to find out whether memory can be shared.
#[derive(Debug)]
pub struct Door {
    address: Address,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// A door that is answered until it is dropped.
    ///
    /// # Errors
    ///
    /// What the kernel says: too many files or threads.
    pub fn open() -> io::Result<Self> {
        let (listener, address) = packet::bind_anywhere()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("pleach-neighbours".to_owned())
            .spawn(move || answer_all(&listener, &stopped))?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// What others knock at.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address.0
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // It fails only when the counter is full, and then the file is readable already.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // The thread does nothing that panics.
            let _ = thread.join();
        }
    }
}

fn answer_all(listener: &OwnedFd, stop: &OwnedFd) {
    loop {
        let mut files = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        // Interrupted or not: look at both.
        let _ = poll(&mut files, None);
        if files[1].revents().contains(PollFlags::IN) {
            return;
        }
        if let Ok(stream) = packet::accept(listener)
            && packet::is_same_user(&stream)
        {
            // Who says nothing more is found out by itself, and by nobody else.
            let _ = answer(stream, stop);
        }
    }
}

/// Takes a descriptor, and gives one back if it maps. Ends when it is to stop, whatever who knocked
/// still has to say.
fn answer(stream: OwnedFd, stop: &OwnedFd) -> Result<(), Distance> {
    take(&stream, now() + ANSWER_LIMIT, Some(stop))?;
    give(&stream)
}

/// Finds out whether whose door this is, is a neighbour. Waits for an answer until `deadline`, and
/// 10 s at most.
#[must_use]
pub fn knock(door: &str, deadline: Nanos) -> Distance {
    let until = deadline.min(now() + ANSWER_LIMIT);
    let outcome = || -> Result<(), Distance> {
        let name = packet::parse_text(door).ok_or(Distance::NotFound)?;
        let stream = packet::dial(name).map_err(|_| Distance::NotFound)?;
        if !packet::is_same_user(&stream) {
            return Err(Distance::OtherUser);
        }
        give(&stream)?;
        take(&stream, until, None)
    };
    outcome().err().unwrap_or(Distance::Neighbours)
}

/// Passes a descriptor, and what it shows when it is mapped.
fn give(stream: &OwnedFd) -> Result<(), Distance> {
    let token = challenge();
    let memory = SharedMemory::new(TAG_BYTES).map_err(|_| Distance::NoDescriptor)?;
    if rustix::io::pwrite(memory.file(), &token, 0) != Ok(TAG_BYTES) {
        return Err(Distance::NoDescriptor);
    }
    packet::send(stream, &token, &[memory.file()]).map_err(|_| Distance::NoDescriptor)
}

/// Takes a descriptor and looks whether it maps. Waits until then, or until `stop` can be read.
fn take(stream: &OwnedFd, until: Nanos, stop: Option<&OwnedFd>) -> Result<(), Distance> {
    // One more than there should be, so that a longer word is seen.
    let mut token = [0; TAG_BYTES + 1];
    loop {
        match packet::receive(stream, &mut token) {
            Ok(mut packet) => {
                let file = packet.files.pop().filter(|_| packet.bytes == TAG_BYTES);
                let file = file.ok_or(Distance::NoDescriptor)?;
                let maps = shows(file, &token[..TAG_BYTES]);
                return if maps { Ok(()) } else { Err(Distance::NotMapped) };
            }
            Err(ReceiveError::System(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)) => {
                let left = until.since(now());
                let limit =
                    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
                let mut files: Vec<_> = [Some(stream), stop]
                    .into_iter()
                    .flatten()
                    .map(|file| PollFd::new(file, PollFlags::IN))
                    .collect();
                // Interrupted or not: look again.
                let _ = poll(&mut files, Some(&limit));
                let is_over = files.get(1).is_some_and(|stop| !stop.revents().is_empty());
                if left.is_zero() || is_over {
                    return Err(Distance::NoDescriptor);
                }
            }
            Err(_) => return Err(Distance::NoDescriptor),
        }
    }
}

/// The ranks by host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hosts {
    /// By rank: the number of its host, counted from 0 in the order of their first ranks.
    pub(super) of: Vec<u32>,
    /// A pair that is not on one host, and how it stands.
    pub(super) apart: Option<(Rank, Rank, Distance)>,
    /// A pair on one host whose users differ.
    pub(super) other_users: Option<(Rank, Rank)>,
}

impl Hosts {
    /// From what each rank found out about those below it.
    pub(super) fn new(found: &[Vec<Distance>]) -> Self {
        let are_neighbours = |low: usize, high: usize| found[high].get(low) == Some(&Distance::Neighbours);
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut of = Vec::with_capacity(found.len());
        for rank in 0..found.len() {
            // Neighbours of all: a rank that two hosts could claim belongs to the first.
            let host = members.iter().position(|ranks| ranks.iter().all(|&low| are_neighbours(low, rank)));
            let host = host.unwrap_or_else(|| {
                members.push(Vec::new());
                members.len() - 1
            });
            members[host].push(rank);
            of.push(host as u32);
        }
        let pairs = (0..found.len()).flat_map(|high| (0..high).map(move |low| (low, high)));
        let mut of_other_users =
            pairs.clone().filter(|&(low, high)| found[high].get(low) == Some(&Distance::OtherUser));
        let other_users = of_other_users.next().map(|(low, high)| (low as Rank, high as Rank));
        let apart = pairs
            .filter(|&(low, high)| of[low] != of[high])
            .map(|(low, high)| (low as Rank, high as Rank, found[high][low]))
            .find(|(.., distance)| *distance != Distance::Neighbours);
        Self { of, apart, other_users }
    }

    /// A host for each rank, as if nobody were near.
    pub(super) fn apart(world_size: u32) -> Self {
        Self { of: (0..world_size).collect(), apart: None, other_users: None }
    }

    /// How many hosts there are.
    pub(super) fn count(&self) -> u32 {
        self.of.iter().max().map_or(0, |last| last + 1)
    }

    /// The fabric that uses what there is.
    pub(super) fn fabric(&self) -> Fabric {
        match self.count() as usize {
            1 => Fabric::Shm,
            hosts if hosts == self.of.len() => Fabric::Tcp,
            _ => Fabric::Hybrid,
        }
    }

    /// What joins a rank to each other.
    pub(super) fn routes(&self, rank: Rank) -> Vec<Route> {
        let here = self.of[rank as usize];
        self.of.iter().map(|&host| if host == here { Route::Shm } else { Route::Across }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::WakeSource;
    use crate::other_user::{as_nobody, can_act_as_nobody};

    #[test]
    fn a_door_of_this_process_is_a_neighbours_and_one_that_is_not_there_is_not() {
        let door = Door::open().expect("the system gives a socket");
        let deadline = now() + Duration::from_secs(60);
        for _ in 0..3 {
            assert_eq!(knock(door.address(), deadline), Distance::Neighbours);
        }
        let address = door.address().to_owned();
        drop(door);
        assert_eq!(knock(&address, deadline), Distance::NotFound);
        assert_eq!(knock("tcp:1.2.3.4:5", deadline), Distance::NotFound);
    }

    #[test]
    fn the_door_of_another_user_is_told_from_one_that_is_not_there() {
        if !can_act_as_nobody() {
            return;
        }
        let deadline = now() + Duration::from_secs(60);
        let door = Door::open().expect("the system gives a socket");
        assert_eq!(as_nobody(|| knock(door.address(), deadline)), Distance::OtherUser);
        let door = as_nobody(|| Door::open().expect("the system gives a socket"));
        assert_eq!(knock(door.address(), deadline), Distance::OtherUser);
    }

    #[test]
    fn who_says_nothing_or_passes_nothing_is_no_neighbour() {
        let (listener, address) = packet::bind_anywhere().expect("the system gives a socket");
        assert_eq!(knock(&address.0, now() + Duration::from_millis(20)), Distance::NoDescriptor);
        let mute = thread::spawn(move || {
            // The one before is still in the queue.
            let _ = packet::accept(&listener);
            WakeSource::File(Arc::new(listener.try_clone().expect("a descriptor"))).wait(ANSWER_LIMIT);
            let stream = packet::accept(&listener).expect("somebody knocks");
            packet::send(&stream, &[7; TAG_BYTES], &[]).expect("there is room");
            WakeSource::File(Arc::new(stream)).wait(ANSWER_LIMIT);
        });
        assert_eq!(knock(&address.0, now() + Duration::from_secs(60)), Distance::NoDescriptor);
        mute.join().expect("it answers without a descriptor");
    }

    #[test]
    fn a_door_closes_at_once_also_while_one_who_knocked_is_silent() {
        let door = Door::open().expect("the system gives a socket");
        let name = packet::parse_text(door.address()).expect("an address");
        let silent = packet::dial(name).expect("it is answered");
        // Most likely the thread waits for its word by then; where it does not, the door closes all
        // the sooner.
        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
        let closing = now();
        drop(door);
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
        assert_eq!(take(&other, now() + ANSWER_LIMIT, None), Err(Distance::NotMapped));
        give(&one).expect("there is room");
        assert_eq!(take(&other, now() + ANSWER_LIMIT, None), Ok(()));
    }

    #[test]
    fn hosts_are_made_of_ranks_that_are_all_neighbours() {
        use Distance::{Named, Neighbours, NotFound};
        let found = |lines: [&[Distance]; 4]| Hosts::new(&lines.map(<[Distance]>::to_vec));
        let one = found([&[], &[Neighbours], &[Neighbours; 2], &[Neighbours; 3]]);
        assert_eq!((one.of.as_slice(), one.apart, one.fabric()), (&[0, 0, 0, 0][..], None, Fabric::Shm));
        let none = found([&[], &[NotFound], &[NotFound; 2], &[Named; 3]]);
        assert_eq!((none.count(), none.fabric()), (4, Fabric::Tcp));
        assert_eq!(none.apart, Some((0, 1, NotFound)));
        let two = found([&[], &[NotFound], &[Neighbours, NotFound], &[NotFound, Neighbours, NotFound]]);
        assert_eq!((two.of.as_slice(), two.fabric()), (&[0, 1, 0, 1][..], Fabric::Hybrid));
        assert_eq!(two.routes(1), [Route::Across, Route::Shm, Route::Across, Route::Shm]);
        // 2 is a neighbour of 1 but not of 0, so it cannot join the two.
        let chain = found([&[], &[Neighbours], &[NotFound, Neighbours], &[NotFound, NotFound, Neighbours]]);
        assert_eq!(chain.of, [0, 0, 1, 1]);
        assert_eq!(chain.apart, Some((0, 2, NotFound)));
    }

    #[test]
    fn a_pair_of_different_users_is_seen_also_where_others_are_apart() {
        use Distance::{Neighbours, NotFound, OtherUser};
        let found = [&[][..], &[NotFound], &[Neighbours, OtherUser]].map(<[Distance]>::to_vec);
        assert_eq!(Hosts::new(&found).other_users, Some((1, 2)));
        assert_eq!(Hosts::new(&found[..2]).other_users, None);
    }

    #[test]
    fn distances_travel_as_letters() {
        for (distance, letter) in LETTERS {
            assert_eq!(distance.letter(), letter);
            assert_eq!(Distance::from_letter(letter), Some(distance));
        }
        assert_eq!(Distance::from_letter('?'), None);
    }
}
