//! When a round opens: the rule of rank 0, which hears who is ready. Pure: it takes `now`.
//!
//! **Invariants:** a round opens only when the ranks that the activation names are ready, or have
//! nothing to give. A rank that was left out of [`Activation::staleness_max`] rounds in a row is
//! among those that the next round waits for. A round in which all ranks are ready or have nothing
//! to give opens at once, if a rank waits for it. A round to which no rank gives anything opens in
//! no other case.

use std::collections::VecDeque;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::random::Random;

use super::RankSet;
use super::activation::{Activation, Grace, Opener};
use super::readiness::Readiness;

/// What rank 0 does about the next round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It waits, and looks again at this time at the latest.
    Wait(Option<Nanos>),
    Open,
    /// It opens the last round: all ranks have finished.
    OpenLast,
    /// The round has waited for these ranks for too long.
    TimedOut {
        missing: RankSet,
        waited: Duration,
    },
}

/// Whom a round waits for.
#[derive(Clone, Copy)]
enum Missing {
    Nobody,
    /// Ranks that were left out too often, as far as they are silent.
    LeftOut,
    /// Ranks that are silent.
    Silent,
    /// Ranks that had nothing to give in an earlier round.
    Absent,
    /// The rank that was drawn, or that stands in for it.
    Drawn(Rank),
}

/// A learned deadline is that of so many rounds.
const LEARNED_ROUNDS: usize = 20;

/// The rule for one group; see the module.
pub struct Opening {
    ranks: u32,
    activation: Activation,
    timeout: Duration,
    /// By rank: how many rounds in a row it was left out, not counting those in which it had
    /// nothing to give.
    left_out: Vec<u32>,
    /// Since when a rank waits for the next round.
    awaited_since: Option<Nanos>,
    /// When the ranks that the activation names were seen there.
    opener_at: Option<Nanos>,
    /// By rank: when it was seen ready for the next round.
    ready_at: Vec<Option<Nanos>>,
    /// Of a learned deadline: by how much the ranks came after the first, of the newest rounds in
    /// which no rank was late.
    delays: VecDeque<Vec<Duration>>,
    /// The deadline, once there are enough of them.
    learned: Option<Duration>,
}

impl Opening {
    pub fn new(ranks: u32, activation: Activation, timeout: Duration) -> Self {
        let left_out = vec![0; ranks as usize];
        let ready_at = vec![None; ranks as usize];
        Self {
            ranks,
            activation,
            timeout,
            left_out,
            awaited_since: None,
            opener_at: None,
            ready_at,
            delays: VecDeque::new(),
            learned: None,
        }
    }

    /// How long a round stays closed after its opener was there; `None` while that is not known.
    fn grace_time(&self) -> Option<Duration> {
        match self.activation.grace_time() {
            Grace::Fixed(grace) => Some(grace),
            Grace::Learned { .. } => self.learned,
        }
    }

    /// Learns from a round that has ended with these contributions, if no rank was late.
    fn learn(&mut self, permille: u32, contributors: &RankSet, of: &impl Fn(Rank) -> Readiness) {
        let is_late = |rank: Rank| of(rank) == Readiness::Silent && !contributors.contains(rank);
        let Some(first) = self.ready_at.iter().flatten().min().copied() else { return };
        if (0..self.ranks).any(is_late) {
            return;
        }
        if self.delays.len() == LEARNED_ROUNDS {
            self.delays.pop_front();
        }
        // A rank that was not seen came when the round was open already, so as late as any.
        let last = self.ready_at.iter().flatten().max().copied().unwrap_or(first);
        let delay = |rank: Rank| self.ready_at[rank as usize].unwrap_or(last).since(first);
        let delays = contributors.iter().filter(|rank| *rank < self.ranks).map(delay).collect();
        self.delays.push_back(delays);
        if self.delays.len() == LEARNED_ROUNDS {
            let mut delays: Vec<Duration> = self.delays.iter().flatten().copied().collect();
            delays.sort_unstable();
            // The least delay that so large a share of them does not exceed.
            let place = (delays.len() * permille as usize).div_ceil(1000).max(1);
            self.learned = delays.get(place - 1).copied();
        }
    }

    /// A round has ended with the contributions of these ranks; `of` says what each rank had said
    /// of it.
    pub fn ended(&mut self, contributors: &RankSet, of: impl Fn(Rank) -> Readiness) {
        for (left_out, rank) in self.left_out.iter_mut().zip(0..) {
            let gives_nothing =
                matches!(of(rank), Readiness::Abstains | Readiness::Absent | Readiness::Finished);
            *left_out = if gives_nothing || contributors.contains(rank) { 0 } else { *left_out + 1 };
        }
        if let Grace::Learned { permille } = self.activation.grace_time() {
            self.learn(permille, contributors, &of);
        }
        self.ready_at.fill(None);
        (self.awaited_since, self.opener_at) = (None, None);
    }

    /// What to do about round `round`, of which the ranks have said these words.
    pub fn decide(&mut self, round: u64, of: impl Fn(Rank) -> Readiness, now: Nanos) -> Decision {
        let (mut ready, mut abstaining, mut silent, mut finished) = (0, 0, 0, 0);
        for rank in 0..self.ranks {
            match of(rank) {
                Readiness::Ready => {
                    ready += 1;
                    self.ready_at[rank as usize].get_or_insert(now);
                }
                Readiness::Abstains => abstaining += 1,
                Readiness::Silent => silent += 1,
                Readiness::Finished => finished += 1,
                Readiness::Absent => {}
            }
        }
        if finished == self.ranks {
            return Decision::OpenLast;
        }
        if ready + abstaining + finished > 0 {
            self.awaited_since.get_or_insert(now);
        }
        if silent == 0 && ready + abstaining > 0 {
            return Decision::Open;
        }
        let Some(awaited_since) = self.awaited_since else { return Decision::Wait(None) };
        let missing = self.missing(round, ready, silent, &of);
        let opens_at = match (missing, self.grace_time()) {
            (Missing::Nobody, Some(grace)) => Some(*self.opener_at.get_or_insert(now) + grace),
            _ => None,
        };
        let gives_up_at = awaited_since + self.timeout;
        match opens_at {
            Some(at) if now >= at => Decision::Open,
            None if now >= gives_up_at => {
                let missing = (0..self.ranks).filter(|rank| self.is_missing(missing, *rank, of(*rank)));
                Decision::TimedOut { missing: missing.collect(), waited: now.since(awaited_since) }
            }
            _ => Decision::Wait(Some(opens_at.unwrap_or(gives_up_at))),
        }
    }

    /// Whom the round waits for.
    fn missing(&self, round: u64, ready: u32, silent: u32, of: &impl Fn(Rank) -> Readiness) -> Missing {
        if (0..self.ranks).any(|rank| self.is_missing(Missing::LeftOut, rank, of(rank))) {
            return Missing::LeftOut;
        }
        if ready == 0 {
            // Any rank that may still give something.
            return if silent > 0 { Missing::Silent } else { Missing::Absent };
        }
        if self.grace_time().is_none() {
            return Missing::Silent;
        }
        let waits = match self.activation.opener() {
            Opener::Quorum(quorum) => ready < quorum,
            Opener::AllBut(backups) => silent > backups,
            Opener::Drawn { seed } => {
                let drawn = drawn(seed, round, self.ranks);
                // The next one stands in for a rank that has nothing to give.
                let opener = (0..self.ranks)
                    .map(|step| (drawn + step) % self.ranks)
                    .find(|rank| matches!(of(*rank), Readiness::Silent | Readiness::Ready));
                let missing = opener.filter(|opener| of(*opener) == Readiness::Silent);
                return missing.map_or(Missing::Nobody, Missing::Drawn);
            }
        };
        if waits { Missing::Silent } else { Missing::Nobody }
    }

    /// Whether a rank that has said this is one of those.
    fn is_missing(&self, missing: Missing, rank: Rank, said: Readiness) -> bool {
        match missing {
            Missing::Nobody => false,
            Missing::LeftOut => {
                said == Readiness::Silent
                    && self.left_out[rank as usize] >= self.activation.rounds_left_out_max()
            }
            Missing::Silent => said == Readiness::Silent,
            Missing::Absent => said == Readiness::Absent,
            Missing::Drawn(drawn) => rank == drawn,
        }
    }
}

/// The rank that opens the round.
pub(crate) fn drawn(seed: u64, round: u64, ranks: u32) -> Rank {
    Random::new(chain(seed, round)).below(ranks.into()) as Rank
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn opening(activation: Activation, ranks: u32) -> Opening {
        Opening::new(ranks, activation, TIMEOUT)
    }

    /// `r` ready, `s` silent, `a` abstains, `x` absent, `f` finished.
    fn words(text: &str) -> impl Fn(Rank) -> Readiness {
        let words: Vec<Readiness> = text
            .chars()
            .map(|letter| match letter {
                'r' => Readiness::Ready,
                'a' => Readiness::Abstains,
                'x' => Readiness::Absent,
                'f' => Readiness::Finished,
                _ => Readiness::Silent,
            })
            .collect();
        move |rank| words[rank as usize]
    }

    fn decide(activation: Activation, text: &str) -> Decision {
        opening(activation, text.len() as u32).decide(0, words(text), Nanos(5))
    }

    #[test]
    fn a_round_opens_when_the_ranks_that_the_activation_names_are_ready() {
        let waits = Decision::Wait(Some(Nanos(5) + TIMEOUT));
        for (activation, opens, stays) in [
            (Activation::all(), ["rrrr", "raxa"], ["rrrs", "ssss"]),
            (Activation::eager_solo(), ["sssr", "axax"], ["ssss", "asss"]),
            (Activation::quorum(3), ["rrrs", "rrxr"], ["rrss", "rass"]),
            (Activation::backup_workers(1), ["rrrs", "srra"], ["rrss", "fffs"]),
        ] {
            for text in opens {
                assert_eq!(decide(activation, text), Decision::Open, "{activation}: {text}");
            }
            for text in stays {
                let is_awaited = text.contains(['r', 'a', 'f']);
                let expected = if is_awaited { waits.clone() } else { Decision::Wait(None) };
                assert_eq!(decide(activation, text), expected, "{activation}: {text}");
            }
        }
        assert_eq!(decide(Activation::quorum(2), "ffff"), Decision::OpenLast);
        assert_eq!(decide(Activation::quorum(2), "fffa"), Decision::Open);
        assert_eq!(decide(Activation::quorum(2), "fffx"), waits, "the last one has not finished");
        assert_eq!(decide(Activation::quorum(2), "xxxx"), Decision::Wait(None), "nobody waits");
    }

    #[test]
    fn the_drawn_rank_opens_or_the_next_one_that_may_have_something_to_give() {
        let activation = Activation::eager_majority(7);
        let drawn = drawn(7, 3, 4) as usize;
        let with = |letter: &str, others: &str| {
            let mut text = others.repeat(4);
            text.replace_range(drawn..=drawn, letter);
            opening(activation, 4).decide(3, words(&text), Nanos(0))
        };
        assert_eq!(with("r", "s"), Decision::Open);
        assert!(matches!(with("s", "r"), Decision::Wait(Some(_))));
        let mut text = "s".repeat(4);
        text.replace_range(drawn..=drawn, "a");
        let next = (drawn + 1) % 4;
        text.replace_range(next..=next, "r");
        assert_eq!(opening(activation, 4).decide(3, words(&text), Nanos(0)), Decision::Open);
        let counts = (0..4000).fold([0; 4], |mut counts, round| {
            counts[super::drawn(7, round, 4) as usize] += 1;
            counts
        });
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }

    #[test]
    fn a_deadline_runs_from_the_first_and_all_that_are_there_end_it() {
        let mut opening = opening(Activation::deadline(Duration::from_nanos(100)), 3);
        assert_eq!(opening.decide(0, words("sss"), Nanos(10)), Decision::Wait(None));
        assert_eq!(opening.decide(0, words("srs"), Nanos(20)), Decision::Wait(Some(Nanos(120))));
        assert_eq!(opening.decide(0, words("srs"), Nanos(119)), Decision::Wait(Some(Nanos(120))));
        assert_eq!(opening.decide(0, words("srs"), Nanos(120)), Decision::Open);
        assert_eq!(opening.decide(0, words("rrr"), Nanos(60)), Decision::Open);
        opening.ended(&[1].into_iter().collect(), words("srs"));
        assert_eq!(opening.decide(1, words("ssr"), Nanos(200)), Decision::Wait(Some(Nanos(300))));
    }

    #[test]
    fn a_learned_deadline_is_a_percentile_of_rounds_in_which_nobody_was_late() {
        let mut opening = opening(Activation::learned_deadline(75.0).staleness_max(2), 4);
        let all: RankSet = (0..4).collect();
        // Ranks come after 0, 10, 20 and 90 ns: the first rounds wait for all.
        let wait_for_all = |opening: &mut Opening, round: u64| {
            let begin = Nanos(1000 * round);
            for (text, after) in [("rsss", 0), ("rrss", 10), ("rrrs", 20), ("rrrs", 89)] {
                let decision = opening.decide(round, words(text), begin + Duration::from_nanos(after));
                assert!(matches!(decision, Decision::Wait(Some(_))), "round {round}, {text}: {decision:?}");
            }
            let last = opening.decide(round, words("rrrr"), begin + Duration::from_nanos(90));
            assert_eq!(last, Decision::Open);
            opening.ended(&all, words("rrrr"));
        };
        for round in 0..LEARNED_ROUNDS as u64 {
            assert_eq!(opening.grace_time(), None, "round {round}");
            wait_for_all(&mut opening, round);
        }
        // Three in four came within 20 ns.
        assert_eq!(opening.grace_time(), Some(Duration::from_nanos(20)));
        for round in [20, 21] {
            let begin = Nanos(1000 * round);
            let opens_at = begin + Duration::from_nanos(20);
            assert_eq!(opening.decide(round, words("rrrs"), begin), Decision::Wait(Some(opens_at)));
            assert_eq!(opening.decide(round, words("rrrs"), opens_at), Decision::Open);
            opening.ended(&(0..3).collect(), words("rrrs"));
        }
        // A rank that was left out too often is waited for, and what is learned then is newer.
        for _ in 0..LEARNED_ROUNDS {
            opening.left_out.fill(2);
            let (begin, last) = (Nanos(50_000), Nanos(50_200));
            assert!(matches!(opening.decide(22, words("rsss"), begin), Decision::Wait(Some(_))));
            assert_eq!(opening.decide(22, words("rrrr"), last), Decision::Open);
            opening.ended(&all, words("rrrr"));
        }
        assert_eq!(opening.grace_time(), Some(Duration::from_nanos(200)));
    }

    #[test]
    fn a_rank_that_was_left_out_too_often_is_waited_for_and_then_named() {
        let mut opening = opening(Activation::eager_solo().staleness_max(2), 3);
        let first: RankSet = [0, 1].into_iter().collect();
        for round in 0..2 {
            assert_eq!(opening.decide(round, words("rss"), Nanos(0)), Decision::Open);
            opening.ended(&first, words("rrs"));
        }
        assert_eq!(opening.decide(2, words("rrs"), Nanos(0)), Decision::Wait(Some(Nanos(0) + TIMEOUT)));
        let late = Nanos(0) + TIMEOUT;
        assert_eq!(
            opening.decide(2, words("rrs"), late),
            Decision::TimedOut { missing: [2].into_iter().collect(), waited: TIMEOUT },
            "nobody waits for ever"
        );
        assert_eq!(opening.decide(2, words("rsr"), Nanos(1)), Decision::Open);
        opening.ended(&[2].into_iter().collect(), words("rsr"));
        assert_eq!(opening.decide(3, words("rss"), Nanos(0)), Decision::Open, "rank 2 was in the last one");
        let mut abstaining = Opening::new(2, Activation::eager_solo().staleness_max(1), TIMEOUT);
        for round in 0..5 {
            assert_eq!(abstaining.decide(round, words("ra"), Nanos(0)), Decision::Open);
            abstaining.ended(&[0].into_iter().collect(), words("ra"));
        }
    }
}
