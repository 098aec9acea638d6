//! How far apart ranks may go that train at copies of a table, and what is known of each.

use pleach_transport::clock::Nanos;

use crate::state::{Remembered, State};

/// How far apart ranks may go. A clock is a step of one rank, a version an update of any rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// A rank with a copy that lacks a clock more than `low` below its own takes a new one, or goes
    /// on where that makes it wait less. No copy lacks a clock more than `high` below.
    Clocks { low: u64, high: u64 },
    /// No update is added to a shard that holds more than so many updates of others that the copy
    /// lacks by which it was computed.
    Versions { distance: u64 },
    /// Nobody waits before the end.
    None,
}

impl Bound {
    pub(crate) fn is_of_clocks(self) -> bool {
        matches!(self, Self::Clocks { .. })
    }

    /// With a bound of clocks: how many clocks before the last moment a rank begins to ask for a
    /// new copy of a shard. An owner that is not heard of within one step of this rank is, most
    /// likely, within two.
    pub(crate) fn clocks_ahead(low: u64) -> u64 {
        low / 2
    }

    /// With versions: updates that a rank may push and the copy of another rank lacks.
    pub(crate) fn of_a_rank(distance: u64, ranks: u32) -> u64 {
        distance / u64::from(ranks - 1).max(1)
    }

    /// Writes that a rank may be ahead of a peer so that the bound is what makes it wait.
    pub(crate) fn slots(self, ranks: u32) -> u16 {
        /// Each has its memory.
        const SLOTS_MAX: u64 = 16;
        match self {
            Self::Versions { distance } => Self::of_a_rank(distance, ranks).min(SLOTS_MAX) as u16,
            Self::Clocks { .. } | Self::None => 0,
        }
    }
}

/// What a rank knows of a rank; of itself, too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    /// Its updates that this rank's shard holds.
    pub(crate) clocks: u64,
    /// When the last of them came, and how long it was computed, in nanoseconds.
    pub(crate) came: Nanos,
    pub(crate) interval: u64,
    /// Complete clocks in this rank's copy of its shard.
    pub(crate) copied: u64,
    /// Questions of this rank to it so far, and of it to this rank.
    pub(crate) asked: u64,
    pub(crate) heard: u64,
    /// Whether the last question counts: this rank has added nothing since it asked.
    pub(crate) is_asked: bool,
    /// What it has answered to the last question, if that counts: the clocks or versions of its
    /// shard.
    pub(crate) answer: Option<u64>,
    /// Updates of others in this rank's shard when it was answered last.
    pub(crate) others_answered: u64,
    /// Of its updates those that this rank's shard held when this rank asked for its copy.
    pub(crate) asked_with: u64,
    /// Of this rank's updates those that its copy holds, as it has told.
    pub(crate) holds: u64,
}

impl Known {
    /// This rank asks it.
    pub(crate) fn ask(&mut self) {
        self.asked += 1;
        (self.is_asked, self.answer) = (true, None);
    }

    /// It has answered a question, perhaps one before the last.
    pub(crate) fn answered(&mut self, answer: Answer) {
        if self.is_asked && answer.question == self.asked & Answer::QUESTION_MOST {
            self.answer = Some(answer.held);
        }
    }

    /// Answers to what was asked so far do not count.
    pub(crate) fn outdate(&mut self) {
        (self.is_asked, self.answer) = (false, None);
    }
}

/// What an owner answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The clocks or versions of its shard.
    held: u64,
    /// Which of the questions of the rank that asks, from 1, by the last bits of its number: one
    /// that has asked so often since is not answered any more.
    question: u64,
}

impl Answer {
    /// Bits of what is held; those above it, in a word of a policy, are of the question.
    const HELD_BITS: u32 = 42;
    const QUESTION_MOST: u64 = (1 << 20) - 1;

    pub(crate) fn new(held: u64, question: u64) -> Self {
        Self { held, question }
    }

    /// The clocks or versions of its shard.
    pub(crate) fn held(self) -> u64 {
        self.held
    }

    /// The number of a word.
    pub(crate) fn encode(self) -> u64 {
        (self.question & Self::QUESTION_MOST) << Self::HELD_BITS | self.held.min((1 << Self::HELD_BITS) - 1)
    }

    pub(crate) fn decode(number: u64) -> Self {
        let question = number >> Self::HELD_BITS & Self::QUESTION_MOST;
        Self { held: number & ((1 << Self::HELD_BITS) - 1), question }
    }
}

/// The word that goes with an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Push {
    /// How long it was computed, in nanoseconds. More than 73 minutes are sent as 73 minutes.
    interval: u64,
    /// For how many clocks its rank asks the receiver, behind the update.
    asks: Option<u64>,
}

impl Push {
    /// Bits of the interval. Those above it say how far the clocks that are asked for are below the
    /// update's clock and 2: from 1, and 0 without a question.
    const INTERVAL_BITS: u32 = 42;
    const BELOW_MOST: u64 = (1 << (64 - Self::INTERVAL_BITS)) - 1;

    pub(crate) fn new(interval: u64, asks: Option<u64>) -> Self {
        Self { interval, asks }
    }

    pub(crate) fn interval(self) -> u64 {
        self.interval
    }

    pub(crate) fn asks(self) -> Option<u64> {
        self.asks
    }

    /// `clock`: that of the update. Not more than its clock and 1 can be asked for.
    pub(crate) fn encode(self, clock: u64) -> u64 {
        let below =
            self.asks.map_or(0, |needed| (clock + 2).saturating_sub(needed).clamp(1, Self::BELOW_MOST));
        below << Self::INTERVAL_BITS | self.interval.min((1 << Self::INTERVAL_BITS) - 1)
    }

    pub(crate) fn decode(word: u64, clock: u64) -> Self {
        let below = word >> Self::INTERVAL_BITS;
        let asks = (below > 0).then(|| (clock + 2).saturating_sub(below));
        Self { interval: word & ((1 << Self::INTERVAL_BITS) - 1), asks }
    }
}

impl Remembered for Known {
    /// Without the answer and what is kept, as nobody asks or keeps anything when all are at rest.
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.clocks);
        state.field(&mut self.copied);
        state.field(&mut self.asked);
        state.field(&mut self.heard);
        state.field(&mut self.came.0);
        state.field(&mut self.interval);
        state.field(&mut self.others_answered);
        state.field(&mut self.asked_with);
        state.field(&mut self.holds);
    }
}

/// Most steps that are weighed at a time.
const CREDITS_MAX: u64 = 1 << 12;

/// How many more steps a rank makes before it waits (Zhao et al. 2019, DSSP, algorithm 2): those
/// after which the next push of the slowest rank comes soonest. `most`: so many may be made.
pub(crate) fn credits(now: Nanos, interval: u64, slowest: &Known, most: u64) -> u64 {
    if interval == 0 || slowest.interval == 0 {
        return 0;
    }
    let waiting = |steps: &u64| {
        let own = now.0.saturating_add(steps.saturating_mul(interval));
        let since = own.saturating_sub(slowest.came.0);
        let pushes = since.div_ceil(slowest.interval).max(1);
        pushes.saturating_mul(slowest.interval) - since
    };
    (0..=most.min(CREDITS_MAX)).min_by_key(waiting).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_of_an_update_comes_back() {
        for clock in [0, 1, 9, 1 << 30] {
            for asks in [None, Some(clock + 1), Some(clock), Some(clock / 2), Some(0)] {
                let push = Push { interval: 12_345_678_901, asks };
                let again = Push::decode(push.encode(clock), clock);
                // What lies too far below is asked for as the lowest number that there is.
                let most = (clock + 2).saturating_sub(Push::BELOW_MOST);
                assert_eq!(again, Push { asks: asks.map(|needed| needed.max(most)), ..push }, "{clock}");
            }
        }
        let long = Push { interval: u64::MAX, asks: Some(3) };
        let again = Push::decode(long.encode(5), 5);
        assert_eq!((again.interval, again.asks), ((1 << Push::INTERVAL_BITS) - 1, Some(3)));
    }

    #[test]
    fn only_the_answer_to_a_question_behind_all_updates_counts() {
        let mut owner = Known::default();
        let answer = |held, question| {
            let again = Answer::decode(Answer { held, question }.encode());
            assert_eq!(again, Answer { held, question: question & Answer::QUESTION_MOST });
            again
        };
        owner.ask();
        owner.answered(answer(3, 1));
        assert_eq!(owner.answer, Some(3));
        owner.outdate();
        owner.ask();
        owner.answered(answer(4, 1));
        assert_eq!(owner.answer, None, "that was the one before the update");
        owner.answered(answer(5, 2));
        assert_eq!(owner.answer, Some(5));
        owner.outdate();
        owner.answered(answer(6, 2));
        assert_eq!(owner.answer, None, "an update followed");
        owner.asked = (1 << 30) - 1;
        owner.ask();
        owner.answered(answer(7, 1 << 30));
        assert_eq!(owner.answer, Some(7));
    }

    #[test]
    fn credits_are_the_steps_after_which_the_slowest_rank_pushes_soonest() {
        let slowest = Known { came: Nanos(100), interval: 35, ..Known::default() };
        // The slowest pushes at 135, 170 and so on; this rank at 101, 111, 121, 131.
        assert_eq!(credits(Nanos(101), 10, &slowest, 12), 3);
        assert_eq!(credits(Nanos(101), 10, &slowest, 2), 2);
        assert_eq!(credits(Nanos(101), 10, &slowest, 0), 0);
        assert_eq!(credits(Nanos(101), 0, &slowest, 12), 0, "nothing is known yet");
    }
}
