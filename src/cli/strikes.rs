//! Faults that befall the members of a job one after the other, while the others go on.
//!
//! **Invariant:** the next fault comes when all others have gone on without the rank before, so
//! never as many ranks are silent as it takes to agree. A rank that was stopped goes on then.

use std::time::Duration;

use pleach::transport::Nanos;
use pleach_vocabulary::random::Random;

use super::faults::Fault;
use super::launch::members::Members;

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    Starting,
    /// In an epoch of so many ranks.
    Working {
        ranks: u32,
    },
    /// A fault has befallen it.
    Struck(Fault),
    /// It has ended well.
    Done,
    /// It has ended in another way.
    Gone,
}

/// A fault that has befallen a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strike {
    at: Nanos,
    began: Nanos,
    fault: Fault,
    seat: u32,
}

impl Strike {
    /// When, by the clock of the host.
    pub(crate) fn at(&self) -> Nanos {
        self.at
    }

    /// How long after all ranks had begun to work.
    pub(crate) fn since_begin(&self) -> Duration {
        self.at.since(self.began)
    }

    pub(crate) fn fault(&self) -> Fault {
        self.fault
    }

    pub(crate) fn seat(&self) -> u32 {
        self.seat
    }
}

/// What came of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Nothing,
    /// A fault has befallen a rank now.
    Struck(Strike),
    /// All others have gone on.
    WentOn(Strike),
}

/// See the module.
pub(crate) struct Strikes {
    /// In turn; none: nobody is struck.
    faults: Vec<Fault>,
    every: Duration,
    fewest: u32,
    /// By seat.
    ranks: Vec<Rank>,
    /// After which the others have not gone on yet.
    newest: Option<Strike>,
    random: Random,
    began: Option<Nanos>,
    next_at: Nanos,
    count: usize,
}

impl Strikes {
    /// So many ranks, of which `fewest` or more are left alone.
    pub(crate) fn new(ranks: u32, fewest: u32, faults: Vec<Fault>, every: Duration, seed: u64) -> Self {
        Self {
            faults,
            every,
            fewest,
            ranks: vec![Rank::Starting; ranks as usize],
            newest: None,
            random: Random::new(seed),
            began: None,
            next_at: Nanos::ZERO,
            count: 0,
        }
    }

    /// A rank works in an epoch of so many.
    pub(crate) fn works(&mut self, seat: u32, ranks: u32) {
        let state = &mut self.ranks[seat as usize];
        if !matches!(state, Rank::Struck(_)) {
            *state = Rank::Working { ranks };
        }
    }

    /// A rank has ended. Returns whether a fault had befallen it.
    pub(crate) fn ended(&mut self, seat: u32, is_well: bool) -> bool {
        let state = &mut self.ranks[seat as usize];
        let was_struck = matches!(state, Rank::Struck(_));
        *state = if is_well && !was_struck { Rank::Done } else { Rank::Gone };
        was_struck
    }

    /// The number of ranks that were started.
    pub(crate) fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The number of ranks that work, and that no fault has befallen.
    pub(crate) fn working(&self) -> u32 {
        self.seats().count() as u32
    }

    /// Whether a rank is left that works, or is about to.
    pub(crate) fn has_ranks(&self) -> bool {
        self.working() > 0 || self.ranks.contains(&Rank::Starting)
    }

    /// Whether a rank has ended well.
    pub(crate) fn has_done(&self) -> bool {
        self.ranks.contains(&Rank::Done)
    }

    /// Whether a rank was stopped that has not ended.
    pub(crate) fn has_stopped(&self) -> bool {
        self.ranks.contains(&Rank::Struck(Fault::Stop))
    }

    /// Lets ranks go on that were stopped.
    pub(crate) fn wake_the_stopped(&self, members: &Members) {
        for (seat, state) in (0..).zip(&self.ranks) {
            if *state == Rank::Struck(Fault::Stop) {
                members.wake(seat);
            }
        }
    }

    /// Strikes a rank where it is time to, and lets one go on that was stopped when the others have
    /// gone on without it.
    pub(crate) fn look(&mut self, members: &Members, now: Nanos) -> Look {
        if self.faults.is_empty() || self.ranks.contains(&Rank::Starting) {
            return Look::Nothing;
        }
        if self.began.is_none() {
            (self.began, self.next_at) = (Some(now), now + self.every);
        }
        let working: Vec<u32> = self.seats().collect();
        if let Some(strike) = self.newest {
            let ranks = working.len() as u32;
            let has_gone_on = |seat: &u32| self.ranks[*seat as usize] == Rank::Working { ranks };
            if !working.iter().all(has_gone_on) {
                return Look::Nothing;
            }
            self.newest = None;
            self.wake_the_stopped(members);
            return Look::WentOn(strike);
        }
        if now < self.next_at || self.has_done() || working.len() <= self.fewest as usize {
            return Look::Nothing;
        }
        let seat = working[self.random.index(working.len())];
        let fault = self.faults[self.count % self.faults.len()];
        let strike = Strike { at: now, began: self.began.unwrap_or(now), fault, seat };
        members.strike(seat, fault);
        self.ranks[seat as usize] = Rank::Struck(fault);
        (self.newest, self.next_at) = (Some(strike), now + self.every);
        self.count += 1;
        Look::Struck(strike)
    }

    /// The ranks that work.
    fn seats(&self) -> impl Iterator<Item = u32> {
        let working = |(seat, rank): (u32, &Rank)| matches!(rank, Rank::Working { .. }).then_some(seat);
        (0..).zip(&self.ranks).filter_map(working)
    }
}
