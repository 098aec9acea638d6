//! What a rank tells the others of rounds, and hears: who is ready, and which rounds are open.
//!
//! **Invariant:** rounds open in order, and what a rank says of itself grows. Rank 0 hears who is
//! ready; the word that a round is open goes down a binomial tree. Words may be lost where others
//! overtake them: a word to rank 0 is said again as long as its round is not open, and a word down
//! the tree as long as its round has not ended here. If that takes long, rank 0 says it to all
//! ranks, as a rank between may be stopped. A round that has ended was bound by all ranks, so a
//! word about it is told to nobody any more.

use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;

use super::readiness::{Readiness, ReadyWord, ReadyWords};
use crate::engine::{Engine, RoundWord};

/// How long a word stays unanswered before it is said again, at first and at most: it may have been
/// replaced by an older one that it had overtaken.
const SAID_AGAIN_AFTER: Duration = Duration::from_millis(10);
const SAID_AGAIN_AFTER_MAX: Duration = Duration::from_secs(1);

/// From which time between two repetitions on rank 0 says to all ranks which rounds are open: a
/// round whose data take long costs no words to all.
const TOLD_TO_ALL_FROM: Duration = Duration::from_millis(320);
/// How often a word is tried that a peer had no room for.
const RETRIED_AFTER: Duration = Duration::from_micros(50);

/// See the module.
pub(crate) struct RoundWords {
    rank: Rank,
    ranks: u32,
    /// Of rank 0; of other ranks none.
    ready: ReadyWords,
    /// The newest word of this rank.
    own: ReadyWord,
    /// Whether it has never said anything but that it was ready.
    was_always_ready: bool,
    /// The word that it said last, when it says the word again, and how long after that again.
    said: (ReadyWord, Nanos, Duration),
    /// How many rounds are open, and whether the last of them is the last of all.
    open: u64,
    is_last_open: bool,
    /// How many rounds have ended here.
    ended: u64,
    /// The ranks that this rank tells of open rounds, each with the word that it was told.
    children: Vec<(Rank, u64)>,
    /// When they are told again, and how long after that again.
    told: (Nanos, Duration),
}

/// The children of a rank in the binomial tree with root 0.
fn children(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    let first = Rank::BITS - rank.leading_zeros();
    (first..Rank::BITS).filter_map(move |bit| rank.checked_add(1 << bit)).filter(move |child| *child < ranks)
}

/// The parent of a rank other than 0 in that tree.
fn parent(rank: Rank) -> Rank {
    rank & !(1 << (Rank::BITS - 1 - rank.leading_zeros()))
}

impl RoundWords {
    /// Nothing was said, and no round is open.
    pub(crate) fn new(rank: Rank, ranks: u32) -> Self {
        Self {
            rank,
            ranks,
            ready: ReadyWords::new(if rank == 0 { ranks } else { 0 }),
            own: ReadyWord::default(),
            was_always_ready: true,
            said: (ReadyWord::default(), Nanos::MAX, SAID_AGAIN_AFTER),
            open: 0,
            is_last_open: false,
            ended: 0,
            children: children(rank, ranks).map(|child| (child, 0)).collect(),
            told: (Nanos::MAX, SAID_AGAIN_AFTER),
        }
    }

    /// How many rounds are open.
    pub(crate) fn open(&self) -> u64 {
        self.open
    }

    /// Whether no further round will open.
    pub(crate) fn is_last_open(&self) -> bool {
        self.is_last_open
    }

    /// Rank 0 opens a round: the last one, or not.
    pub(crate) fn open_round(&mut self, round: u64, is_last: bool) {
        (self.open, self.is_last_open) = (round + 1, is_last);
    }

    /// A round has ended here. It was open if it has never been said to be: see
    /// [`Rounds::bind`](super::Rounds).
    pub(crate) fn ended(&mut self, round: u64) {
        self.ended = round + 1;
        self.open = self.open.max(self.ended);
        for (_, told) in &mut self.children {
            *told = (*told).max(self.ended * 2);
        }
    }

    /// The newest word of this rank.
    pub(crate) fn own(&self) -> ReadyWord {
        self.own
    }

    /// Has a word for rank 0, about the rounds from `round` on.
    pub(crate) fn say(&mut self, round: u64, readiness: Readiness) {
        self.was_always_ready &= readiness == Readiness::Ready;
        self.own = self.own.then(round, readiness);
    }

    /// Whether rank 0 takes this rank for silent in a round, whichever of its words it has heard.
    pub(crate) fn is_surely_silent(&self, round: u64) -> bool {
        self.was_always_ready && self.own.of(round, 0) == Readiness::Silent
    }

    /// At rank 0, what each rank says of a round; in the rounds from `all_present` on no rank is
    /// absent that was so before.
    pub(crate) fn of(&self, round: u64, all_present: u64) -> impl Fn(Rank) -> Readiness {
        self.ready.of(round, all_present)
    }

    /// Takes what was said to this rank.
    pub(crate) fn hear(&mut self, engine: &Engine) {
        if self.rank != 0 {
            let word = [0, parent(self.rank)].map(|rank| engine.heard(rank, RoundWord::Open));
            let word = word[0].max(word[1]);
            if !self.is_last_open && word > self.open_word() {
                (self.open, self.is_last_open) = (word / 2, word % 2 == 1);
            }
            return;
        }
        let own = self.own;
        self.ready.hear(|rank| match rank {
            0 => own,
            peer => ReadyWord::heard(engine.heard(peer, RoundWord::Ready)),
        });
    }

    fn open_word(&self) -> u64 {
        self.open * 2 + u64::from(self.is_last_open)
    }

    /// Tells others what they do not know yet. Gives when to do so again, if it is to be.
    pub(crate) fn tell(&mut self, engine: &mut Engine, now: Nanos) -> Option<Nanos> {
        let open_again_at = self.tell_children(engine, now);
        let ready_again_at =
            if self.rank != 0 && !self.is_last_open { self.tell_rank_0(engine, now) } else { None };
        open_again_at.into_iter().chain(ready_again_at).min()
    }

    /// Tells the children which rounds are open, and tells them again as long as the newest of
    /// these has not ended here; rank 0 then tells all ranks. Gives when.
    fn tell_children(&mut self, engine: &mut Engine, now: Nanos) -> Option<Nanos> {
        let word = self.open_word();
        let (again_at, interval) = self.told;
        let is_new = self.children.iter().any(|(_, told)| *told < word);
        let is_again = !is_new && self.ended < self.open && now >= again_at;
        let (mut is_any_told, mut must_retry) = (false, false);
        for (child, told) in self.children.iter_mut().filter(|(_, told)| is_again || *told < word) {
            if engine.say(*child, RoundWord::Open, word) {
                (*told, is_any_told) = (word, true);
            } else {
                must_retry = true;
            }
        }
        if is_again && self.rank == 0 && interval >= TOLD_TO_ALL_FROM {
            // Said again where there was no room.
            let others = (1..self.ranks).filter(|rank| parent(*rank) != 0);
            others.for_each(|rank| {
                engine.say(rank, RoundWord::Open, word);
            });
        }
        if is_any_told {
            let interval = if is_again { (interval * 2).min(SAID_AGAIN_AFTER_MAX) } else { SAID_AGAIN_AFTER };
            self.told = (now + interval, interval);
        }
        if must_retry {
            return Some(now + RETRIED_AFTER);
        }
        (self.ended < self.open && !self.children.is_empty()).then_some(self.told.0)
    }

    /// Tells rank 0 this rank's word, and tells it again as long as its round is not open. Gives
    /// when.
    fn tell_rank_0(&mut self, engine: &mut Engine, now: Nanos) -> Option<Nanos> {
        if self.need_not_say() {
            self.said.0 = self.own;
        }
        let (said, again_at, interval) = self.said;
        let is_new = said < self.own;
        if !is_new && said.round().is_none_or(|round| self.open > round) {
            return None;
        }
        if is_new || now >= again_at {
            if !engine.say(0, RoundWord::Ready, self.own.number()) {
                return Some(now + RETRIED_AFTER);
            }
            let interval = if is_new { SAID_AGAIN_AFTER } else { interval * 2 }.min(SAID_AGAIN_AFTER_MAX);
            self.said = (self.own, now + interval, interval);
        }
        Some(self.said.1)
    }

    /// Whether this rank's word is that it was ready for a round that is open, and rank 0 takes
    /// the rank for silent afterwards without it too.
    fn need_not_say(&self) -> bool {
        self.own.readiness() == Readiness::Ready
            && self.own.round().is_some_and(|round| round < self.open)
            && self.said.0.of(self.open, 0) == Readiness::Silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_need_not_say_that_it_was_ready_for_a_round_that_has_ended() {
        let needs = |said, own, ended: Option<u64>| {
            let mut words = RoundWords::new(1, 2);
            words.own = words.own.then(3, said);
            words.said.0 = words.own;
            words.say(4, own);
            ended.into_iter().for_each(|round| words.ended(round));
            !words.need_not_say()
        };
        assert!(!needs(Readiness::Ready, Readiness::Ready, Some(4)));
        assert!(!needs(Readiness::Silent, Readiness::Ready, Some(4)));
        assert!(needs(Readiness::Ready, Readiness::Ready, None), "the round is not open");
        assert!(needs(Readiness::Ready, Readiness::Ready, Some(3)), "the round is not open");
        assert!(needs(Readiness::Absent, Readiness::Ready, Some(4)), "it would stay absent");
        assert!(needs(Readiness::Ready, Readiness::Absent, Some(4)), "it is absent from now on");
    }

    #[test]
    fn a_rank_that_has_abstained_is_not_surely_silent_any_more() {
        let mut words = RoundWords::new(1, 2);
        assert!(words.is_surely_silent(0));
        words.say(0, Readiness::Ready);
        assert!(!words.is_surely_silent(0) && words.is_surely_silent(1));
        words.say(1, Readiness::Absent);
        words.say(2, Readiness::Silent);
        words.say(2, Readiness::Ready);
        assert!(!words.is_surely_silent(3), "rank 0 may take it for absent still");
    }

    #[test]
    fn every_rank_has_one_parent_which_has_it_as_a_child() {
        for ranks in 1..70 {
            let mut told = vec![0; ranks as usize];
            for rank in 0..ranks {
                for child in children(rank, ranks) {
                    assert!(child < ranks && parent(child) == rank, "{rank} of {ranks} tells {child}");
                    told[child as usize] += 1;
                }
            }
            assert!(told[1..].iter().all(|times| *times == 1) && told[0] == 0, "{told:?}");
        }
    }
}
