//! When a round opens: the rule of rank 0, which hears who is ready. Pure: it takes `now`.
//!
//! **Invariants:** a round opens only when the ranks that the activation names are ready, or have
//! nothing to give. A rank that was left out of [`Activation::staleness_max`] rounds in a row is
//! among those that the next round waits for. A round in which all ranks are ready or have nothing
//! to give opens at once, if a rank waits for it. A round to which no rank gives anything opens in
//! no other case.

use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::random::Random;

use super::RankSet;
use super::activation::{Activation, Opener};
use super::readiness::Readiness;

/// What rank 0 does about the next round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It waits, and looks again at this time at the latest.
    Wait(Option<Nanos>),
    Open,
    /// It opens the last round: all ranks have finished.
    OpenLast,
    /// The round has waited for this rank for too long.
    TimedOut {
        rank: Rank,
        waited: Duration,
    },
}

/// The rule for one group; see the module.
pub(crate) struct Opening {
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
}

impl Opening {
    pub(crate) fn new(ranks: u32, activation: Activation, timeout: Duration) -> Self {
        let left_out = vec![0; ranks as usize];
        Self { ranks, activation, timeout, left_out, awaited_since: None, opener_at: None }
    }

    /// A round has ended with the contributions of these ranks; `of` says what each rank had said
    /// of it.
    pub(crate) fn ended(&mut self, contributors: &RankSet, of: impl Fn(Rank) -> Readiness) {
        for (left_out, rank) in self.left_out.iter_mut().zip(0..) {
            let gives_nothing =
                matches!(of(rank), Readiness::Abstains | Readiness::Absent | Readiness::Finished);
            *left_out = if gives_nothing || contributors.contains(rank) { 0 } else { *left_out + 1 };
        }
        (self.awaited_since, self.opener_at) = (None, None);
    }

    /// What to do about round `round`, of which the ranks have said these words.
    pub(crate) fn decide(&mut self, round: u64, of: impl Fn(Rank) -> Readiness, now: Nanos) -> Decision {
        let (mut ready, mut abstaining, mut silent, mut finished) = (0, 0, 0, 0);
        for rank in 0..self.ranks {
            match of(rank) {
                Readiness::Ready => ready += 1,
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
        let opens_at = match missing {
            Some(_) => None,
            None => Some(*self.opener_at.get_or_insert(now) + self.activation.grace_time()),
        };
        let gives_up_at = awaited_since + self.timeout;
        match (missing, opens_at) {
            (_, Some(at)) if now >= at => Decision::Open,
            (Some(rank), _) if now >= gives_up_at => {
                Decision::TimedOut { rank, waited: now.since(awaited_since) }
            }
            _ => Decision::Wait(Some(opens_at.unwrap_or(gives_up_at))),
        }
    }

    /// A rank that the round waits for, if it waits for any.
    fn missing(&self, round: u64, ready: u32, silent: u32, of: &impl Fn(Rank) -> Readiness) -> Option<Rank> {
        let is_silent = |rank: &Rank| of(*rank) == Readiness::Silent;
        let stale = (0..self.ranks)
            .filter(|rank| self.left_out[*rank as usize] >= self.activation.rounds_left_out_max())
            .find(is_silent);
        if stale.is_some() {
            return stale;
        }
        if ready == 0 {
            // Any rank that may still give something.
            return (0..self.ranks).find(|rank| matches!(of(*rank), Readiness::Silent | Readiness::Absent));
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
                return opener.filter(is_silent);
            }
        };
        if waits { (0..self.ranks).find(is_silent) } else { None }
    }
}

/// The rank that opens the round.
fn drawn(seed: u64, round: u64, ranks: u32) -> Rank {
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
                let expected = if is_awaited { waits } else { Decision::Wait(None) };
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
            Decision::TimedOut { rank: 2, waited: TIMEOUT },
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
