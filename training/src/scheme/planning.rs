//! The order of pieces that all ranks of synchronous SGD follow, planned from how long their steps
//! take ([`crate::order`]).
//!
//! Each rank measures a [`Profile`]: when each bucket becomes ready, when the next forward pass
//! would use it if it never waited, and how long averages take. Now and then the profiles of all
//! ranks are added up, as integers, so all get the same sums and compute the same list from them.
//! Then they compare its digest, and take it before the same step. A list is kept while it delays
//! the forward pass by little more than a new one would ([`DRIFT_SHARE`]).
//!
//! **Invariants** ([`Planning`]): all ranks exchange behind the same pieces, and take a list before
//! the same step: an exchange is asked for at the end of step s, and no piece of step s + 2 starts
//! before it is done. A list whose digest differs on any rank is taken by none.
//!
//! After a checkpoint ranks begin with first come, first served, and measure anew.
//!
//! A time is measured from events, so an average that ends while the program computes counts until
//! the program reports its next bucket. Messages are not measured apart: a piece is taken to be as
//! long as its bytes.

use std::ops::Range;

use pleach_transport::clock::Nanos;
use pleach_vocabulary::digest::chain;

use crate::layout::Bucket;
use crate::order::{self, Link, Order};
use crate::policy::OperationId;

/// Most bytes of a piece. A group carries out two long operations at a time
/// (`collectives/src/engine`), and on processors that compute, an operation waits milliseconds for
/// its turn: with shorter pieces a network is idle meanwhile.
pub(crate) const PIECE_BYTES: usize = 2 << 20;

/// Steps before the first exchange of profiles, and between two.
const FIRST_AFTER: u64 = 3;
const EVERY: u64 = 64;

/// A list is replaced when it delays the forward pass by more than the new one would, by more than
/// one in so many parts of the profile's time.
const DRIFT_SHARE: u64 = 20;

/// Numbers of a profile before those of buckets: steps, time of averages, and their bytes.
const HEAD: usize = 3;

/// A part of a bucket that is averaged by one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) bucket: Bucket,
    pub(crate) elements: Range<usize>,
}

/// The pieces of all buckets in the order in which backward passes make them.
pub(crate) fn first_come(buckets: &[Range<usize>]) -> Vec<Piece> {
    let most = PIECE_BYTES / size_of::<f32>();
    let pieces = |(bucket, elements): (Bucket, &Range<usize>)| {
        let (begin, end) = (elements.start, elements.end);
        let piece = move |start| Piece { bucket, elements: start..end.min(start + most) };
        (begin..end).step_by(most).map(piece)
    };
    buckets.iter().enumerate().flat_map(pieces).collect()
}

/// What a rank has measured since profiles were exchanged.
#[derive(Debug)]
pub(crate) struct Profile {
    is_by_bucket: bool,
    /// [`HEAD`] sums, and of each bucket when it was ready and when it was needed.
    sums: Vec<u64>,
    /// When the first bucket of the step was ready. Times of the step count from then.
    begin: Nanos,
    /// By bucket, of the step: when it was ready and needed, in nanoseconds.
    times: Vec<[u64; 2]>,
    /// Whether the gradient of the step is complete.
    is_computed: bool,
    /// Whether a bucket of the step was ready.
    is_begun: bool,
    /// How long the forward pass has waited, and for which bucket it waits.
    waited_ns: u64,
    waits: Option<(Bucket, Nanos)>,
    last_average: Nanos,
}

impl Profile {
    pub(crate) fn new(buckets: usize, is_by_bucket: bool) -> Self {
        Self {
            is_by_bucket,
            sums: vec![0; HEAD + 2 * buckets],
            begin: Nanos::ZERO,
            times: vec![[0; 2]; buckets],
            is_computed: false,
            is_begun: false,
            waited_ns: 0,
            waits: None,
            last_average: Nanos::ZERO,
        }
    }

    fn since_begin(&self, now: Nanos) -> u64 {
        now.0.saturating_sub(self.begin.0)
    }

    pub(crate) fn ready(&mut self, bucket: Bucket, now: Nanos) {
        if self.is_computed {
            // The forward pass of this step has needed all buckets of the one before.
            self.close();
        }
        if !self.is_begun {
            (self.begin, self.is_begun) = (now, true);
        }
        self.times[bucket][0] = self.since_begin(now);
    }

    pub(crate) fn computed(&mut self, now: Nanos) {
        let needed = self.since_begin(now);
        self.times.iter_mut().for_each(|times| times[1] = needed);
        (self.is_computed, self.waited_ns, self.waits) = (true, 0, None);
        if !self.is_by_bucket {
            self.close();
        }
    }

    pub(crate) fn needed(&mut self, bucket: Bucket, now: Nanos, is_supplied: Option<&bool>) {
        let needed = self.since_begin(now).saturating_sub(self.waited_ns);
        if let (true, Some(times)) = (self.is_computed, self.times.get_mut(bucket)) {
            times[1] = needed;
            self.waits = (is_supplied == Some(&false)).then_some((bucket, now));
        }
    }

    pub(crate) fn supplied(&mut self, bucket: Bucket, now: Nanos) {
        if let Some((_, since)) = self.waits.take_if(|(waits_for, _)| *waits_for == bucket) {
            self.waited_ns = self.waited_ns.saturating_add(now.0.saturating_sub(since.0));
        }
    }

    pub(crate) fn averaged(&mut self, bytes: usize, since: Nanos, now: Nanos) {
        // One average after the other has the network.
        let busy = now.0.saturating_sub(since.0.max(self.last_average.0));
        self.sums[1] = self.sums[1].saturating_add(busy);
        self.sums[2] += bytes as u64;
        self.last_average = now;
    }

    /// Adds the times of a step that is over.
    fn close(&mut self) {
        self.sums[0] += 1;
        let of_buckets = self.sums[HEAD..].chunks_exact_mut(2);
        for (sums, times) in of_buckets.zip(&self.times) {
            sums.iter_mut().zip(times).for_each(|(sum, time)| *sum = sum.saturating_add(*time));
        }
        (self.is_computed, self.is_begun) = (false, false);
    }

    /// All sums, which begin anew.
    fn take(&mut self) -> Vec<u64> {
        let zeros = vec![0; self.sums.len()];
        std::mem::replace(&mut self.sums, zeros)
    }
}

/// How far a new list is.
#[derive(Debug)]
enum Phase {
    /// Ranks measure.
    Measuring,
    /// Profiles are added up.
    Adding { id: OperationId, totals: Vec<u64> },
    /// A list is better than the one that ranks follow.
    Planned { list: Vec<Piece> },
    /// Its digests are added up.
    Comparing { id: OperationId, list: Vec<Piece>, total: u64 },
    /// It is the same on all ranks.
    Agreed { list: Vec<Piece> },
}

/// The exchanges by which ranks come to one list; see the module.
#[derive(Debug)]
pub(crate) struct Planning {
    buckets: Vec<Range<usize>>,
    ranks: u32,
    phase: Phase,
    /// Steps that were made.
    steps: u64,
    /// Profiles are exchanged after so many.
    next_after: u64,
    /// The step behind which was asked last.
    asked_after: u64,
    /// The step behind which this was looked at.
    seen: Option<u64>,
}

impl Planning {
    pub(crate) fn new(buckets: Vec<Range<usize>>, ranks: u32) -> Self {
        Self {
            buckets,
            ranks,
            phase: Phase::Measuring,
            steps: 0,
            next_after: FIRST_AFTER,
            asked_after: 0,
            seen: None,
        }
    }

    /// Ranks measure anew, from the same step on.
    pub(crate) fn begin_anew(&mut self) {
        *self = Self::new(std::mem::take(&mut self.buckets), self.ranks);
    }

    /// The numbers that are to be added up behind the pieces of a step, if there are any.
    pub(crate) fn numbers(&mut self, step: u64, profile: &mut Profile) -> Option<Vec<u64>> {
        if self.seen == Some(step) {
            return None;
        }
        self.seen = Some(step);
        self.steps += 1;
        match &self.phase {
            Phase::Measuring if self.steps >= self.next_after => {
                self.next_after = self.steps + EVERY;
                self.asked_after = step;
                Some(profile.take())
            }
            // Not all ranks know the list one step after the profile.
            Phase::Planned { list } if step >= self.asked_after + 2 => {
                self.asked_after = step;
                Some(vec![digest(list)])
            }
            _ => None,
        }
    }

    /// The numbers are added up by this operation.
    pub(crate) fn asked(&mut self, id: OperationId) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Measuring) {
            Phase::Planned { list } => Phase::Comparing { id, list, total: 0 },
            _ => Phase::Adding { id, totals: vec![0; HEAD + 2 * self.buckets.len()] },
        };
    }

    /// Whether the pieces of a step wait for an exchange.
    pub(crate) fn holds(&self, step: u64) -> bool {
        matches!(self.phase, Phase::Adding { .. } | Phase::Comparing { .. }) && step >= self.asked_after + 2
    }

    pub(crate) fn totalled(&mut self, place: u32, sum: u64) {
        match &mut self.phase {
            Phase::Adding { totals, .. } => {
                if let Some(total) = totals.get_mut(place as usize) {
                    *total = sum;
                }
            }
            Phase::Comparing { total, .. } => *total = sum,
            _ => {}
        }
    }

    /// An exchange is done. Returns whether all ranks have planned the same.
    pub(crate) fn done(&mut self, done: OperationId, list: &[Piece]) -> bool {
        match &mut self.phase {
            Phase::Adding { id, totals } if *id == done => {
                let totals = std::mem::take(totals);
                let planned = self.planned(&totals, list);
                self.phase = planned.map_or(Phase::Measuring, |list| Phase::Planned { list });
                true
            }
            Phase::Comparing { id, list, total } if *id == done => {
                let is_same = *total == digest(list).wrapping_mul(self.ranks.into());
                let list = std::mem::take(list);
                self.phase = if is_same { Phase::Agreed { list } } else { Phase::Measuring };
                is_same
            }
            _ => true,
        }
    }

    /// The list that is to be followed from this step on, if it is a new one.
    pub(crate) fn take_list(&mut self, step: u64) -> Option<Vec<Piece>> {
        match &mut self.phase {
            Phase::Agreed { list } if step >= self.asked_after + 2 => {
                let list = std::mem::take(list);
                self.phase = Phase::Measuring;
                Some(list)
            }
            _ => None,
        }
    }

    /// A list that is better than the present one, by the profiles of all ranks.
    fn planned(&self, totals: &[u64], present: &[Piece]) -> Option<Vec<Piece>> {
        let (buckets, link) = self.mean_of(totals)?;
        let planned = Order::planned(&buckets, link, PIECE_BYTES as u64).ok()?;
        let span = buckets.iter().map(|bucket| bucket.needed_ns.max(bucket.ready_ns)).max()?;
        let delay = order::delay_ns(&buckets, link, present.iter().map(|piece| self.bytes_of(piece)));
        let piece = |piece: &order::Piece| {
            let begin = self.buckets[piece.bucket].start;
            let element = |byte: u64| begin + byte as usize / size_of::<f32>();
            Piece { bucket: piece.bucket, elements: element(piece.range.start)..element(piece.range.end) }
        };
        let is_better = delay > planned.delay_ns().saturating_add(span / DRIFT_SHARE);
        is_better.then(|| planned.pieces().iter().map(piece).collect())
    }

    fn bytes_of(&self, piece: &Piece) -> order::Piece {
        let begin = self.buckets[piece.bucket].start;
        let byte = |element: usize| ((element - begin) * size_of::<f32>()) as u64;
        let range = byte(piece.elements.start)..byte(piece.elements.end);
        order::Piece { bucket: piece.bucket, range }
    }

    /// The mean of all ranks and steps.
    fn mean_of(&self, totals: &[u64]) -> Option<(Vec<order::Bucket>, Link)> {
        const NS_PER_S: u128 = 1_000_000_000;
        let (head, times) = totals.split_at_checked(HEAD)?;
        let (steps, busy_ns, bytes) = (head[0], head[1], head[2]);
        let bytes_per_s = u128::from(bytes) * NS_PER_S / u128::from(busy_ns.max(1));
        let bytes_per_s = u64::try_from(bytes_per_s).unwrap_or(u64::MAX).max(1);
        let bucket = |(times, elements): (&[u64], &Range<usize>)| {
            let mean = |sum: u64| Some(sum.checked_div(steps)?.min(order::TIME_MAX_NS));
            let bytes = (elements.len() * size_of::<f32>()) as u64;
            Some(order::Bucket { ready_ns: mean(times[0])?, needed_ns: mean(times[1])?, bytes })
        };
        let buckets = times.chunks_exact(2).zip(&self.buckets).map(bucket).collect::<Option<_>>()?;
        Some((buckets, Link { bytes_per_s, piece_ns: 0 }))
    }
}

fn digest(list: &[Piece]) -> u64 {
    let words = |piece: &Piece| [piece.bucket, piece.elements.start, piece.elements.end];
    list.iter().flat_map(words).fold(list.len() as u64, |hash, word| chain(hash, word as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of a piece.
    const PIECE: usize = PIECE_BYTES / size_of::<f32>();

    /// The last layer of eight pieces is ready first, and the first of one piece is needed first.
    fn buckets() -> Vec<Range<usize>> {
        vec![PIECE..9 * PIECE, 0..PIECE]
    }

    /// Sums of two ranks and one step each.
    fn totals(ready: u64, needed: u64, busy_ns: u64) -> Vec<u64> {
        let bytes = 2 * 9 * PIECE_BYTES as u64;
        vec![2, busy_ns, bytes, 0, 2 * needed, 2 * ready, 2 * ready]
    }

    /// Exchanges behind a step; the totals are those of all ranks.
    fn exchange(planning: &mut Planning, step: u64, list: &[Piece], totals: &[u64]) -> bool {
        let mut profile = Profile::new(2, true);
        let numbers = planning.numbers(step, &mut profile).expect("it is time");
        assert_eq!(numbers.len(), totals.len());
        planning.asked(OperationId(step));
        assert!(planning.holds(step + 2) && !planning.holds(step + 1));
        (0..).zip(totals).for_each(|(place, total)| planning.totalled(place, *total));
        planning.done(OperationId(step), list)
    }

    #[test]
    fn pieces_are_all_elements_once_and_not_too_long() {
        let list = first_come(&buckets());
        assert_eq!(list.len(), 9);
        assert_eq!(list[0], Piece { bucket: 0, elements: PIECE..2 * PIECE });
        assert_eq!(list[8], Piece { bucket: 1, elements: 0..PIECE });
        assert!(list.windows(2).take(7).all(|pair| pair[0].elements.end == pair[1].elements.start));
    }

    #[test]
    fn a_list_is_planned_compared_and_taken_before_a_step_that_all_ranks_know() {
        let (mut planning, fifo) = (Planning::new(buckets(), 2), first_come(&buckets()));
        let mut profile = Profile::new(2, true);
        let due = FIRST_AFTER - 1;
        assert!((0..due).all(|step| planning.numbers(step, &mut profile).is_none()));
        // A piece takes 1 ms, the first layer is ready after 1 ms and needed at once, the last one
        // after 10 ms.
        assert!(exchange(&mut planning, due, &fifo, &totals(1_000_000, 10_000_000, 18_000_000)));
        assert!(planning.numbers(due + 1, &mut profile).is_none(), "not all ranks know the list yet");
        let Phase::Planned { list } = &planning.phase else { panic!("{:?}", planning.phase) };
        let places: Vec<Bucket> = list.iter().map(|piece| piece.bucket).collect();
        assert_eq!(places, [0, 1, 0, 0, 0, 0, 0, 0, 0], "the first layer goes before the rest of the last");
        let (planned, sum) = (list.clone(), digest(list).wrapping_mul(2));
        assert!(exchange(&mut planning, due + 2, &fifo, &[sum]));
        assert_eq!(planning.take_list(due + 3), None);
        assert_eq!(planning.take_list(due + 4), Some(planned.clone()));
        // The next exchange comes when it is time, and the list is kept while it is good.
        let next = due + EVERY;
        assert!((due + 3..next).all(|step| planning.numbers(step, &mut profile).is_none()));
        assert!(exchange(&mut planning, next, &planned, &totals(1_000_000, 10_500_000, 18_000_000)));
        assert!(matches!(planning.phase, Phase::Measuring), "{:?}", planning.phase);
        // The first layer comes late now: nothing is gained by waiting for it.
        let next = next + EVERY;
        assert!((next - EVERY + 1..next).all(|step| planning.numbers(step, &mut profile).is_none()));
        assert!(exchange(&mut planning, next, &planned, &totals(9_000_000, 9_000_000, 18_000_000)));
        assert!(matches!(planning.phase, Phase::Planned { .. }), "{:?}", planning.phase);
    }

    #[test]
    fn a_list_that_differs_on_a_rank_is_taken_by_none() {
        let (mut planning, fifo) = (Planning::new(buckets(), 2), first_come(&buckets()));
        let mut profile = Profile::new(2, true);
        let due = FIRST_AFTER - 1;
        assert!((0..due).all(|step| planning.numbers(step, &mut profile).is_none()));
        assert!(exchange(&mut planning, due, &fifo, &totals(1_000_000, 10_000_000, 18_000_000)));
        let Phase::Planned { list } = &planning.phase else { panic!("{:?}", planning.phase) };
        let sum = digest(list).wrapping_add(digest(&fifo));
        assert!(planning.numbers(due + 1, &mut profile).is_none());
        assert!(!exchange(&mut planning, due + 2, &fifo, &[sum]));
        assert_eq!(planning.take_list(due + 4), None);
    }

    #[test]
    fn a_profile_leaves_out_how_long_the_forward_pass_has_waited() {
        let mut profile = Profile::new(2, true);
        let at = |millis: u64| Nanos(millis * 1_000_000);
        for step in 0..2 {
            let begin = step * 100;
            profile.ready(0, at(begin));
            profile.ready(1, at(begin + 4));
            profile.averaged(400, at(begin), at(begin + 3));
            profile.computed(at(begin + 5));
            // Bucket 1 is needed first, and comes 7 ms late; bucket 0 is there 2 ms later.
            profile.needed(1, at(begin + 5), Some(&false));
            profile.supplied(0, at(begin + 6));
            profile.supplied(1, at(begin + 12));
            profile.needed(0, at(begin + 14), Some(&true));
        }
        profile.ready(0, at(200));
        let of_two = |millis: u64| 2 * millis * 1_000_000;
        let expected = [2, of_two(3), 800, of_two(0), of_two(7), of_two(4), of_two(5)];
        assert_eq!(profile.take(), expected);
        assert_eq!(profile.take(), [0; 7]);
    }
}
