//! Faults that befall the members of a job one after the other, while the others go on.
//!
//! A rank here is a process by the number in which it was started; its seat is what it says.
//! **Invariant:** the next fault comes when all others have gone on without the rank before, or
//! with the one that joined, so never as many ranks are silent as it takes to agree. A rank that
//! was stopped goes on then. One that was slow makes a step with all others afterwards. Of two
//! whose connections were cut one has to go. No fault leaves fewer or more ranks than the limits
//! say; a fault that would is passed over.

use std::time::Duration;

use pleach::transport::{Nanos, clock};
use pleach_vocabulary::random::Random;

use super::CommandError;
use super::bounds::Bounds;
use super::faults::Fault;
use super::launch::members::Members;

/// How long nobody of those that work may hold the rendezvous.
const HOLDER_WAIT: Duration = Duration::from_secs(30);

/// How long a rank is slow.
const SLOW: Duration = Duration::from_secs(2);

/// A turn of a slow rank in milliseconds, and how long it stands still in each.
const TURN_MS: u128 = 200;
const STANDS_MS: u128 = 150;

/// Fewest ranks of which two may lose each other: a majority reaches each of the two.
pub(crate) const CUT_RANKS_MIN: u32 = 3;

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
    /// Of a pair that was cut, the other one.
    other: Option<u32>,
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

    /// The process that it has befallen; of two that were cut, the one that is out.
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
    /// By number: the step that it has committed last.
    steps: Vec<u64>,
    /// Whether a slow rank stands still just now.
    stands: bool,
    /// The newest step when a slow rank was slow no more.
    slow_until: Option<u64>,
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
            steps: vec![0; ranks as usize],
            stands: false,
            slow_until: None,
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
        self.steps.push(0);
        self.ranks.len() as u32 - 1
    }

    /// A rank works on this seat, in an epoch of so many.
    pub(crate) fn works(&mut self, number: u32, seat: u32, ranks: u32) {
        self.seats[number as usize] = Some(seat);
        let state = &mut self.ranks[number as usize];
        // The others still name one that has ended until they have found its end out.
        if matches!(state, Rank::Starting | Rank::Joining | Rank::Working { .. }) {
            *state = Rank::Working { ranks };
        }
    }

    /// A rank has committed a step.
    pub(crate) fn committed(&mut self, number: u32, step: u64) {
        self.steps[number as usize] = step;
    }

    /// A rank is out that has not ended.
    pub(crate) fn is_out(&mut self, number: u32) {
        if self.was_cut(number) {
            self.ranks[number as usize] = Rank::Struck(Fault::Cut);
        }
    }

    /// Whether the newest fault has cut this rank from another one.
    fn was_cut(&self, number: u32) -> bool {
        let is_one = |strike: Strike| strike.number == number || strike.other == Some(number);
        self.newest.is_some_and(|strike| strike.fault == Fault::Cut && is_one(strike))
    }

    /// A rank has ended. Returns the fault that had befallen it.
    pub(crate) fn ended(&mut self, number: u32, is_well: bool) -> Option<Fault> {
        let was_cut = self.was_cut(number);
        let state = &mut self.ranks[number as usize];
        let struck = match state {
            Rank::Struck(fault) => Some(*fault),
            _ => was_cut.then_some(Fault::Cut),
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

    /// The one of which nothing was heard yet: it was started last, or else it is out, and
    /// joins anew.
    pub(crate) fn newcomer(&mut self) -> Option<u32> {
        let place = |state: Rank| self.ranks.iter().position(|rank| *rank == state);
        let out = || place(Rank::Struck(Fault::Stop)).or_else(|| place(Rank::Struck(Fault::Cut)));
        let number = place(Rank::Joining).or_else(out)?;
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
            let Some(strike) = self.went_on(strike, &working, members, now)? else {
                return Ok(Look::Nothing);
            };
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
            // Of a program is known what a member says at the rendezvous: stopped, it says
            // nothing, and nobody else can.
            let is_asked = fault == Fault::Stop && members.is_program();
            let holder = if is_asked { members.holder()? } else { None };
            let others: Vec<u32> = working.iter().copied().filter(|number| Some(*number) != holder).collect();
            let number = others[self.random.index(others.len())];
            // Which of a pair goes is the members' agreement, and who is slow stays.
            let stays = matches!(fault, Fault::Cut | Fault::Slow);
            (number, if stays { self.ranks[number as usize] } else { Rank::Struck(fault) })
        };
        let others: Vec<u32> = working.iter().copied().filter(|other| *other != number).collect();
        let other = (fault == Fault::Cut).then(|| others[self.random.index(others.len())]);
        // Since the look began the holder was looked for.
        let at = clock::now();
        if let Some(other) = other {
            members.cut(number, other)?;
        }
        (self.stands, self.slow_until) = (false, None);
        members.strike(number, fault);
        self.ranks[number as usize] = state;
        let (began, seat) = (self.began.unwrap_or(now), self.seats[number as usize]);
        let strike = Strike { at, began, fault, number, other, seat };
        (self.newest, self.next_at, self.turn) = (Some(strike), now + self.every, turn);
        Ok(Look::Struck(strike))
    }

    /// The fault, if it is over and all others have gone on.
    fn went_on(
        &mut self,
        strike: Strike,
        working: &[u32],
        members: &Members,
        now: Nanos,
    ) -> Result<Option<Strike>, CommandError> {
        let ranks = working.len() as u32;
        let is_out = |number: &u32| !working.contains(number);
        let is_over = match strike.fault {
            Fault::Slow => return Ok(self.was_slow(strike, working, members, now).then_some(strike)),
            Fault::Join => !self.is_joining(strike.number),
            Fault::Cut => is_out(&strike.number) || strike.other.as_ref().is_some_and(is_out),
            // One of the others takes it over, so that processes can join again.
            Fault::Rendezvous => members.holder()?.is_some_and(|holder| holder != strike.number),
            Fault::Kill | Fault::Stop | Fault::Leave | Fault::Store => true,
        };
        let together = working.iter().all(|number| self.ranks[*number as usize] == Rank::Working { ranks });
        let of_pair = strike.other.filter(|other| is_out(other) && !is_out(&strike.number));
        let strike = Strike { number: of_pair.unwrap_or(strike.number), ..strike };
        Ok((is_over && together).then_some(strike))
    }

    /// Slows a rank down. Returns whether it was slow for long enough, and all have made a step
    /// since.
    fn was_slow(&mut self, strike: Strike, working: &[u32], members: &Members, now: Nanos) -> bool {
        let since = now.since(strike.at);
        let stands = since < SLOW && since.as_millis() % TURN_MS < STANDS_MS;
        if std::mem::replace(&mut self.stands, stands) != stands {
            if stands { members.stop(strike.number) } else { members.wake(strike.number) }
        }
        if since < SLOW {
            return false;
        }
        let newest = self.steps.iter().copied().max().unwrap_or_default();
        let until = *self.slow_until.get_or_insert(newest);
        working.iter().all(|number| self.steps[*number as usize] > until)
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
        let ranks = self.working();
        let is_alone = fault == Fault::Cut && ranks < CUT_RANKS_MIN;
        !is_alone && self.bounds.allow(fault.ranks_after(ranks))
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
        assert_eq!(strikes(2, &[Fault::Cut, Fault::Slow]).next_fault(), Some((Fault::Slow, 2)));
        assert!(!strikes(2, &[Fault::Kill]).can_go_on() && strikes(2, &faults).can_go_on());
    }

    #[test]
    fn one_that_has_ended_does_not_work_where_others_name_it() {
        for (fault, is_well) in [(Fault::Kill, false), (Fault::Leave, true)] {
            let mut strikes = strikes(3, &[fault]);
            strikes.ranks[2] = Rank::Struck(fault);
            assert_eq!(strikes.ended(2, is_well), Some(fault));
            (0..3).for_each(|number| strikes.works(number, number, 3));
            assert_eq!((strikes.working(), strikes.next_fault()), (2, None));
        }
    }

    #[test]
    fn of_a_pair_that_was_cut_either_may_go_and_nobody_else() {
        for (gone, expected) in [(0, Some(Fault::Cut)), (1, Some(Fault::Cut)), (2, None)] {
            let mut strikes = strikes(3, &[Fault::Cut]);
            let (at, began, seat) = (Nanos::ZERO, Nanos::ZERO, None);
            strikes.newest = Some(Strike { at, began, fault: Fault::Cut, number: 0, other: Some(1), seat });
            assert_eq!(strikes.ended(gone, false), expected);
        }
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
