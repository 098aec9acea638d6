//! Processes that wait to join, as a process of the job knows them.
//!
//! The process that gives seats tells the members of a newcomer. Who hears of one connects to it,
//! and tells all others again and again until the newcomer is a member or is lost: so all of them
//! connect, whoever ends meanwhile. Newcomers are told of the members likewise, who are to
//! them what they are to the members. When one is a member is the agreement's matter.
//!
//! **Invariants:** a newcomer is connected to only when its seat is free here: the process that had
//! it before is no member of the newest record, and is fenced. Who was lost here does not wait here
//! again, so nobody is told of for ever.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use pleach_membership::{Membership, Process, Record};
use pleach_transport::{ConnectError, Nanos};
use pleach_vocabulary::Rank;

use super::envelope::of_newcomer;
use super::roster::Neighbour;
use super::shared_device::SharedDevice;

/// How often others are told of those that wait, while one connects.
const TELL_INTERVAL: Duration = Duration::from_millis(20);

/// How often they are told of those that not all reach, when this process is connected to all.
const REPEAT_INTERVAL: Duration = Duration::from_millis(100);

/// Processes that are remembered as gone.
const GONE_MAX: usize = 256;

/// How long a spare is connected to no member before it takes the job for ended: another spare may
/// have become a member in the change that is under way.
const ALONE_TIME: Duration = Duration::from_secs(1);

/// When a spare was last connected to a member, and last reached all of them.
pub(crate) struct Heard {
    any: Nanos,
    all: Nanos,
}

impl Heard {
    pub(crate) fn new(now: Nanos) -> Self {
        Self { any: now, all: now }
    }

    /// Takes in whether it reaches all members now, and to how many it is connected. Returns
    /// whether these have been too few for too long. Of a change that is under way it hears late,
    /// so twice `suspect_after` is allowed for.
    pub(crate) fn is_over(
        &mut self,
        now: Nanos,
        (reaches_all, members): (bool, usize),
        suspect_after: Duration,
    ) -> bool {
        self.any = if members > 0 { now } else { self.any };
        self.all = if reaches_all { now } else { self.all };
        now.since(self.any) >= ALONE_TIME || now.since(self.all) >= suspect_after.saturating_mul(2)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Newcomers {
    /// By seat: who waits, and whether it is being connected to.
    waiting: BTreeMap<Rank, (Neighbour, bool)>,
    /// The last that were lost or severed.
    gone: VecDeque<Process>,
    told: Nanos,
}

impl Newcomers {
    /// The process that waits on this seat.
    pub(crate) fn on(&self, seat: Rank) -> Option<Process> {
        self.waiting.get(&seat).map(|(waiting, _)| waiting.process())
    }

    pub(crate) fn contains(&self, process: Process) -> bool {
        self.on(process.seat.0) == Some(process)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Neighbour> {
        self.waiting.values().map(|(neighbour, _)| neighbour)
    }

    /// A process waits. Returns whether that is new.
    pub(crate) fn take_in(&mut self, neighbour: Neighbour, device: &SharedDevice) -> bool {
        let (seat, process) = (neighbour.rank(), neighbour.process());
        if self.contains(process) || self.gone.contains(&process) {
            return false;
        }
        if let Some((before, is_connecting)) = self.waiting.get(&seat) {
            if !device.is_free(seat) {
                return false; // It has to go first; the other one will be told again.
            }
            // One that never came.
            let (before, is_connecting) = (before.process(), *is_connecting);
            self.bury(before);
            if is_connecting {
                device.sever_stranger(seat);
            }
        }
        self.waiting.insert(neighbour.rank(), (neighbour, false));
        true
    }

    /// The process of this rank is lost.
    pub(crate) fn lost(&mut self, rank: Rank) {
        if self.waiting.get(&rank).is_some_and(|(_, is_connecting)| *is_connecting)
            && let Some((neighbour, _)) = self.waiting.remove(&rank)
        {
            self.bury(neighbour.process());
        }
    }

    /// A process does not wait any more, for good.
    pub(crate) fn bury(&mut self, process: Process) {
        if self.contains(process) {
            self.waiting.remove(&process.seat.0);
        }
        if self.gone.len() == GONE_MAX {
            self.gone.pop_front();
        }
        self.gone.push_back(process);
    }

    /// A record stands: its members do not wait any more.
    pub(crate) fn admitted(&mut self, record: &Record) {
        self.waiting.retain(|_, (neighbour, _)| !record.contains(neighbour.process()));
    }

    /// Connects to those whose seat is free.
    pub(crate) fn connect(&mut self, record: Option<&Record>, device: &SharedDevice) {
        self.waiting.retain(|seat, (neighbour, is_connecting)| {
            let process = neighbour.process();
            let holder = record.and_then(|record| record.on_seat(process.seat));
            let is_taken = holder.is_some_and(|holder| holder != process) || !device.is_free(*seat);
            if *is_connecting || is_taken {
                return true;
            }
            match device.connect(*seat, neighbour.address()) {
                Ok(()) => *is_connecting = true,
                Err(ConnectError::NotFree { .. }) => {}
                Err(error) => {
                    tracing::warn!("{process} cannot be connected to: {error}");
                    return false;
                }
            }
            true
        });
    }

    /// Whether this process is not connected to one of them yet.
    pub(crate) fn are_awaited(&self, membership: &Membership) -> bool {
        self.iter().any(|newcomer| !membership.is_connected(newcomer.process()))
    }

    /// Tells the members of those that wait, and those of all, now and then; not of those that all
    /// members and all that wait reach.
    pub(crate) fn tell(
        &mut self,
        now: Nanos,
        members: &[&Neighbour],
        membership: &Membership,
        device: &SharedDevice,
    ) {
        let unknown = |neighbour: &&Neighbour| !membership.is_reached_by_all(neighbour.process());
        let interval = if self.are_awaited(membership) { TELL_INTERVAL } else { REPEAT_INTERVAL };
        if now.since(self.told) < interval || !self.iter().any(|neighbour| unknown(&neighbour)) {
            return;
        }
        self.told = now;
        // Who is not connected hears it the next time.
        let tell = |to: Rank, of: &Neighbour| {
            let _ = device.post(to, &of_newcomer(of));
        };
        for neighbour in self.iter().filter(unknown) {
            for member in members {
                tell(member.rank(), neighbour);
                tell(neighbour.rank(), member);
            }
            self.iter().filter(|other| other.rank() != neighbour.rank()).for_each(|other| {
                tell(other.rank(), neighbour);
            });
        }
    }
}
