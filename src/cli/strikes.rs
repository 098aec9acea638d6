//! Faults that befall the members of a job one after the other, while the others go on.
//!
//! A rank here is a process by the number in which it was started; its seat is what it says.
//! **Invariant:** the next fault comes when all others have gone on without the rank before, or
//! with the one that joined, so never as many ranks are silent as it takes to agree. A rank that
//! was stopped goes on then. No fault leaves fewer or more ranks than the limits say; a fault that
//! would is passed over.

use std::time::Duration;

use pleach::transport::Nanos;
use pleach_vocabulary::random::Random;

use super::CommandError;
use super::bounds::Bounds;
use super::faults::Fault;
use super::launch::members::Members;

/// How long nobody of those that work may hold the rendezvous.
const HOLDER_WAIT: Duration = Duration::from_secs(30);

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    /// It begins the job.
    Starting,
    /// It comes to the job.
    Joining,
    /// In an epoch of so many ranks.
    Working { ranks: u32 },
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
    number: u32,
    seat: Option<u32>,
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

    /// The process that it has befallen.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// `None`: it has no seat yet.
    pub(crate) fn seat(&self) -> Option<u32> {
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
    bounds: Bounds,
    /// By number.
    ranks: Vec<Rank>,
    /// By number: the seat that it has said.
    seats: Vec<Option<u32>>,
    /// After which the others have not gone on yet.
    newest: Option<Strike>,
    random: Random,
    began: Option<Nanos>,
    next_at: Nanos,
    /// The place in the list of the fault whose turn it is.
    turn: usize,
    /// Whether a rank has made the last step.
    is_over: bool,
}

impl Strikes {
    /// So many ranks begin the job.
    pub(crate) fn new(ranks: u32, bounds: Bounds, faults: Vec<Fault>, every: Duration, seed: u64) -> Self {
        Self {
            faults,
            every,
            bounds,
            ranks: vec![Rank::Starting; ranks as usize],
            seats: vec![None; ranks as usize],
            newest: None,
            random: Random::new(seed),
            began: None,
            next_at: Nanos::ZERO,
            turn: 0,
            is_over: false,
        }
    }

    /// One more comes to the job. Returns its number.
    pub(crate) fn joins(&mut self) -> u32 {
        self.ranks.push(Rank::Joining);
        self.seats.push(None);
        self.ranks.len() as u32 - 1
    }

    /// A rank works on this seat, in an epoch of so many.
    pub(crate) fn works(&mut self, number: u32, seat: u32, ranks: u32) {
        self.seats[number as usize] = Some(seat);
        let state = &mut self.ranks[number as usize];
        if !matches!(state, Rank::Struck(_)) {
            *state = Rank::Working { ranks };
        }
    }

    /// A rank has ended. Returns the fault that had befallen it.
    pub(crate) fn ended(&mut self, number: u32, is_well: bool) -> Option<Fault> {
        let state = &mut self.ranks[number as usize];
        let struck = match state {
            Rank::Struck(fault) => Some(*fault),
            _ => None,
        };
        *state = if is_well && struck.is_none() { Rank::Done } else { Rank::Gone };
        struck
    }

    /// The number of ranks that work, and that no fault has befallen.
    pub(crate) fn working(&self) -> u32 {
        self.numbers().count() as u32
    }

    /// Whether a rank is left that works, or is about to.
    pub(crate) fn has_ranks(&self) -> bool {
        self.working() > 0 || self.ranks.iter().any(|rank| matches!(rank, Rank::Starting | Rank::Joining))
    }

    /// Whether ranks have to begin, or to go on after a fault.
    pub(crate) fn awaits_ranks(&self) -> bool {
        self.newest.is_some() || self.ranks.contains(&Rank::Starting)
    }

    /// From now on nobody is struck and nobody joins.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
    }

    /// A rank has made the last step.
    pub(crate) fn session_ends(&mut self, number: u32) {
        self.end();
        let state = &mut self.ranks[number as usize];
        if *state == Rank::Joining {
            // It came in time for the last step.
            *state = Rank::Working { ranks: 0 };
        }
    }

    /// Whether nobody is struck any more, and nobody joins.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether a rank has ended well.
    pub(crate) fn has_done(&self) -> bool {
        self.ranks.contains(&Rank::Done)
    }

    /// Whether a rank was stopped or told to leave that has not ended.
    pub(crate) fn has_leaving(&self) -> bool {
        self.ranks.iter().any(|rank| matches!(rank, Rank::Struck(Fault::Stop | Fault::Leave)))
    }

    /// Whether a rank has not ended.
    pub(crate) fn has_any(&self) -> bool {
        self.ranks.iter().any(|rank| !matches!(rank, Rank::Done | Rank::Gone))
    }

    /// The one of which nothing was heard yet: it was started last, or else it was stopped, is out,
    /// and joins anew.
    pub(crate) fn newcomer(&mut self) -> Option<u32> {
        let place = |state: Rank| self.ranks.iter().position(|rank| *rank == state);
        let number = place(Rank::Joining).or_else(|| place(Rank::Struck(Fault::Stop)))?;
        self.ranks[number] = Rank::Joining;
        Some(number as u32)
    }

    /// Whether a rank comes to the job.
    pub(crate) fn is_joining(&self, number: u32) -> bool {
        self.ranks[number as usize] == Rank::Joining
    }

    /// Whether a fault is possible, now or when a process has ended that a fault has befallen.
    pub(crate) fn can_go_on(&self) -> bool {
        self.faults.iter().any(|fault| self.is_within(*fault))
    }

    /// Lets ranks go on that were stopped.
    pub(crate) fn wake_the_stopped(&self, members: &Members) {
        for (number, state) in (0..).zip(&self.ranks) {
            if *state == Rank::Struck(Fault::Stop) {
                members.wake(number);
            }
        }
    }

    /// Ends ranks that come to a job which is over.
    pub(crate) fn give_up_joining(&mut self, members: &Members) {
        for (number, state) in (0..).zip(&mut self.ranks) {
            if *state == Rank::Joining {
                members.strike(number, Fault::Kill);
                *state = Rank::Struck(Fault::Kill);
            }
        }
    }

    /// Strikes a rank where it is time to, and lets one go on that was stopped when the others have
    /// gone on without it.
    pub(crate) fn look(&mut self, members: &mut Members, now: Nanos) -> Result<Look, CommandError> {
        if self.faults.is_empty() || self.ranks.contains(&Rank::Starting) {
            return Ok(Look::Nothing);
        }
        if self.began.is_none() {
            (self.began, self.next_at) = (Some(now), now + self.every);
        }
        let working: Vec<u32> = self.numbers().collect();
        if let Some(strike) = self.newest {
            let ranks = working.len() as u32;
            let has_gone_on = |number: &u32| self.ranks[*number as usize] == Rank::Working { ranks };
            if !working.iter().all(has_gone_on) || self.is_joining(strike.number) {
                return Ok(Look::Nothing);
            }
            // One of the others takes it over, so that processes can join again.
            if strike.fault == Fault::Rendezvous
                && members.holder()?.is_none_or(|holder| holder == strike.number)
            {
                return Ok(Look::Nothing);
            }
            self.newest = None;
            self.wake_the_stopped(members);
            return Ok(Look::WentOn(Strike { seat: self.seats[strike.number as usize], ..strike }));
        }
        if now < self.next_at || self.is_over || self.has_done() {
            return Ok(Look::Nothing);
        }
        let Some((fault, turn)) = self.next_fault() else { return Ok(Look::Nothing) };
        let (number, state) = if fault == Fault::Join {
            members.join()?;
            (self.joins(), Rank::Joining)
        } else if fault == Fault::Rendezvous {
            let holder = members.holder()?.filter(|holder| working.contains(holder));
            let Some(holder) = holder else {
                return if now.since(self.next_at) < HOLDER_WAIT {
                    Ok(Look::Nothing)
                } else {
                    Err(no_holder())
                };
            };
            (holder, Rank::Struck(fault))
        } else {
            (working[self.random.index(working.len())], Rank::Struck(fault))
        };
        members.strike(number, fault);
        self.ranks[number as usize] = state;
        let (began, seat) = (self.began.unwrap_or(now), self.seats[number as usize]);
        let strike = Strike { at: now, began, fault, number, seat };
        (self.newest, self.next_at, self.turn) = (Some(strike), now + self.every, turn);
        Ok(Look::Struck(strike))
    }

    /// The first fault from the one on whose turn it is that is possible now, and the turn after
    /// it.
    fn next_fault(&self) -> Option<(Fault, usize)> {
        let alive = self.ranks.iter().filter(|rank| !matches!(rank, Rank::Done | Rank::Gone)).count();
        // A seat is free when its process has ended.
        let has_seat = alive < self.bounds.most() as usize;
        let count = self.faults.len();
        let turns = (self.turn..self.turn + count).map(|turn| (self.faults[turn % count], turn + 1));
        turns.into_iter().find(|(fault, _)| self.is_within(*fault) && (*fault != Fault::Join || has_seat))
    }

    /// Whether the fault leaves as many ranks as may be.
    fn is_within(&self, fault: Fault) -> bool {
        self.bounds.allow(fault.ranks_after(self.working()))
    }

    /// The ranks that work.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        let working = |(number, rank): (u32, &Rank)| matches!(rank, Rank::Working { .. }).then_some(number);
        (0..).zip(&self.ranks).filter_map(working)
    }
}

fn no_holder() -> CommandError {
    CommandError::failed(format!(
        "nobody holds the rendezvous: for {} s none of the ranks that work; report this with PLEACH_LOG=debug",
        HOLDER_WAIT.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strikes(ranks: u32, faults: &[Fault]) -> Strikes {
        let bounds = "2:4".parse().expect("are bounds");
        let mut strikes = Strikes::new(ranks, bounds, faults.to_vec(), Duration::ZERO, 1);
        (0..ranks).for_each(|number| strikes.works(number, number, ranks));
        strikes
    }

    #[test]
    fn faults_that_the_limits_forbid_are_passed_over_and_come_when_it_is_their_turn_again() {
        let faults = [Fault::Kill, Fault::Stop, Fault::Join, Fault::Leave];
        let next = |ranks, turn| {
            let strikes = Strikes { turn, ..strikes(ranks, &faults) };
            strikes.next_fault()
        };
        assert_eq!(next(4, 0), Some((Fault::Kill, 1)));
        assert_eq!(next(2, 0), Some((Fault::Join, 3)), "two are left alone");
        assert_eq!(next(4, 2), Some((Fault::Leave, 4)), "there is no fifth seat");
        assert_eq!(next(3, 7), Some((Fault::Leave, 8)));
        assert_eq!(strikes(2, &[Fault::Kill]).next_fault(), None);
        assert!(!strikes(2, &[Fault::Kill]).can_go_on() && strikes(2, &faults).can_go_on());
    }

    #[test]
    fn a_seat_is_free_when_its_process_has_ended() {
        let mut strikes = strikes(4, &[Fault::Join]);
        assert_eq!(strikes.next_fault(), None, "all are taken");
        strikes.ranks[1] = Rank::Struck(Fault::Stop);
        assert!(strikes.can_go_on());
        assert_eq!(strikes.next_fault(), None, "it has not ended");
        assert_eq!(strikes.ended(1, false), Some(Fault::Stop));
        assert_eq!(strikes.next_fault(), Some((Fault::Join, 1)));
    }
}
