//! Calls of ranks that are driven one by one in virtual time, with their data as bytes; and their
//! window or their rounds of a partial all-reduce, if they have one.
//!
//! The ranks are those of [`wired`](super::wired): real engines over wires that carry one transfer
//! after the other, with processors that take no time. They carry out what groups do that are
//! [reproducible](crate::Reproducible) for a world size. A call begins on a rank when it is started
//! there. A window is that of [`Group::window`](crate::Group::window), on the wires of the calls;
//! where ranks have one, transfers end without a poll of their target, as over RDMA. Ranks that
//! have [rounds](crate::partial) make no calls beside them: a group of its own has them.
//!
//! **Invariants:** the calls of a rank end in the order in which they were started, for who takes
//! their outputs. Nothing here waits: what is not there yet is asked for again when time has
//! passed. A rank that stands still sees nothing and sends nothing.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::cost::Platform;
use pleach_schedule::wiring::Wiring;
use pleach_transport::sim::{self, Fault, Faults};
use pleach_transport::{Nanos, SharedMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::in_rounds::RankRounds;
use super::in_window::{RankWindow, open};
use super::wired::{TimeError, connected, options};
use super::{Cluster, Member, NoProgress};
use crate::call::{Counts, Descriptor};
use crate::engine::{Bytes, RunId};
use crate::group::{CollectiveError, Planner, PlannerCache};
use crate::partial::{Activation, Rounds, Terms};
use crate::window::Layout;

pub use super::in_rounds::RoundSeen;
pub use super::in_window::{ReadSeen, WriteSeen};

/// How long a call may take, in virtual time.
const TIMEOUT: Duration = Duration::from_secs(100_000);

/// A call under way.
struct UnderWay {
    run: RunId,
    input: Slice,
    output: Slice,
}

/// The calls of a rank.
#[derive(Default)]
struct RankCalls {
    under_way: VecDeque<UnderWay>,
    /// Registered memory that no call uses.
    spare: Vec<Slice>,
    window: Option<RankWindow>,
    rounds: Option<RankRounds>,
}

/// See the module.
pub struct Calls {
    cluster: Cluster,
    /// When all ranks were connected.
    began: Nanos,
    ranks: Vec<RankCalls>,
}

impl Calls {
    /// Ranks joined by these links, connected and ready, whose wires have these faults.
    ///
    /// # Errors
    ///
    /// They do not connect.
    pub fn new(wiring: &Arc<Wiring>, seed: u64, faults: Faults) -> Result<Self, NoProgress> {
        let options = sim::Options { faults, ..options(wiring, wiring.routes(), seed) };
        Self::of(options, wiring, 0)
    }

    /// The same ranks, with a window of so many `f32` and slots.
    ///
    /// # Errors
    ///
    /// They do not connect, or no memory is so long.
    pub fn with_window(
        wiring: &Arc<Wiring>,
        seed: u64,
        faults: Faults,
        (len, slots): (usize, u16),
    ) -> Result<Self, TimeError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let layout = Layout::new(bytes, slots, wiring.topology().ranks())
            .ok_or_else(|| TimeError::Memory { bytes, source: std::io::ErrorKind::OutOfMemory.into() })?;
        let options = sim::Options { faults, passive: true, ..options(wiring, wiring.routes(), seed) };
        // A signal slot for credits, and one for each slot.
        let mut calls = Self::of(options, wiring, 1 + usize::from(slots))?;
        let targets = open(&mut calls.cluster, layout, |_| ());
        for (rank, target) in calls.ranks.iter_mut().zip(targets) {
            rank.window = Some(RankWindow::new(target));
        }
        calls.began = calls.cluster.world.now();
        Ok(calls)
    }

    /// The same ranks, which combine so many `f32` in rounds.
    ///
    /// # Errors
    ///
    /// They do not connect, or no schedule carries the rounds out.
    pub fn with_rounds(
        wiring: &Arc<Wiring>,
        seed: u64,
        faults: Faults,
        (len, activation): (usize, Activation),
    ) -> Result<Self, TimeError> {
        let mut calls = Self::new(wiring, seed, faults)?;
        let data_type = DataType::F32;
        let terms = Terms { len, data_type, activation, has_thread: true, can_multiply: true };
        let ranks = calls.ranks.len() as u32;
        let members = calls.cluster.members.iter_mut().flatten().zip(&mut calls.ranks);
        for ((member, of_rank), rank) in members.zip(0..) {
            of_rank.rounds = Some(RankRounds::new(member, (rank, ranks), &terms, TIMEOUT)?);
        }
        Ok(calls)
    }

    fn of(
        options: sim::Options,
        wiring: &Arc<Wiring>,
        further_signal_slots: usize,
    ) -> Result<Self, NoProgress> {
        let mut cluster = connected(options, wiring, further_signal_slots)?;
        let (platform, known) = (Platform::wired(wiring.clone()), Arc::new(PlannerCache::default()));
        for (member, rank) in cluster.members.iter_mut().flatten().zip(0..) {
            let planner = Planner::new(rank, platform.clone(), None);
            member.planner = planner.in_rank_order().sharing(known.clone());
        }
        let ranks = cluster.members.iter().map(|_| RankCalls::default()).collect();
        Ok(Self { began: cluster.world.now(), cluster, ranks })
    }

    /// Time since all ranks were connected.
    #[must_use]
    pub fn now(&self) -> Nanos {
        Nanos(self.cluster.world.now().0 - self.began.0)
    }

    /// Starts a call on a rank, of so many elements a part. An all-reduce is made in place.
    ///
    /// # Errors
    ///
    /// The call cannot be carried out, there is no memory, or the rank has failed before.
    pub fn start(
        &mut self,
        rank: Rank,
        (collective, data_type, op): (Collective, DataType, ReduceOp),
        count: usize,
        input: &[u8],
    ) -> Result<(), TimeError> {
        let input_memory = self.memory(rank, input.len())?;
        input_memory.store(input);
        let output = if collective == Collective::AllReduce {
            input_memory.clone()
        } else {
            let parts = collective.output_parts(rank, self.ranks.len() as u32).len();
            self.memory(rank, parts * count * data_type.bytes())?
        };
        let counts = Counts::Each(count);
        let descriptor = Descriptor { collective, amount: counts.amount(), data_type, op, tag: 0 };
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        let plan = member.planner.plan(&descriptor, &counts, None)?.clone();
        let [given, taken] = [&input_memory, &output].map(|slice| Bytes::Registered(slice.clone()));
        let run = member.start(&plan, given, taken, TIMEOUT).map_err(CollectiveError::from)?;
        self.cluster.wake(rank);
        self.ranks[rank as usize].under_way.push_back(UnderWay { run, input: input_memory, output });
        Ok(())
    }

    /// Registered memory of a rank.
    fn memory(&mut self, rank: Rank, bytes: usize) -> Result<Slice, TimeError> {
        let spare = &mut self.ranks[rank as usize].spare;
        if let Some(place) = spare.iter().position(|slice| slice.len() == bytes) {
            return Ok(spare.swap_remove(place));
        }
        let memory = SharedMemory::new(bytes).map_err(|source| TimeError::Memory { bytes, source })?;
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        let region = member.engine.device().register(memory);
        let region = region.map_err(|error| CollectiveError::Register(Arc::new(error)))?;
        Ok(region.whole().slice(0..bytes).expect("the region is at least as long"))
    }

    /// Lets ranks do all they can at this instant.
    ///
    /// # Errors
    ///
    /// They find something to do for ever.
    pub fn settle(&mut self) -> Result<(), NoProgress> {
        self.cluster.settle()
    }

    /// The output of the oldest call of a rank, if that has ended; it is forgotten then.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn take_output(&mut self, rank: Rank) -> Result<Option<Vec<u8>>, TimeError> {
        let calls = &mut self.ranks[rank as usize];
        let Some(call) = calls.under_way.front() else { return Ok(None) };
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        match member.engine.take_outcome(call.run) {
            None => Ok(None),
            Some(Err(fault)) => Err(TimeError::Failed { rank, cause: fault.to_string() }),
            Some(Ok(())) => {
                let UnderWay { input, output, .. } = calls.under_way.pop_front().expect("it was there");
                let bytes = output.to_vec();
                if output.as_ptr() != input.as_ptr() {
                    calls.spare.push(input);
                }
                calls.spare.push(output);
                Ok(Some(bytes))
            }
        }
    }

    /// A rank that can do something now: the group has not failed, and the rank does not stand
    /// still.
    fn able(&mut self, rank: Rank) -> Result<Option<&mut Member>, TimeError> {
        let is_frozen = self.cluster.world.is_frozen(rank);
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        match member.engine.failure() {
            Some(fault) => Err(TimeError::Failed { rank, cause: fault.to_string() }),
            None if is_frozen || !member.engine.works() => Ok(None),
            None => Ok(Some(member)),
        }
    }

    /// Publishes all elements of a rank in its window, with a word.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    ///
    /// # Panics
    ///
    /// There is no window, or it has another length.
    pub fn publish(&mut self, rank: Rank, elements: &[f32], word: u64) -> Result<(), TimeError> {
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        RankWindow::publish(member, elements, word);
        Ok(())
    }

    /// Starts a read of what a peer has published. A rank makes one at a time. `is_torn`: the
    /// elements may be of several versions.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    ///
    /// # Panics
    ///
    /// There is no window, or a read is under way.
    pub fn read(
        &mut self,
        rank: Rank,
        (peer, range): (Rank, Range<usize>),
        is_torn: bool,
    ) -> Result<(), TimeError> {
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        let window = self.ranks[rank as usize].window.as_mut().expect("ranks with a window read");
        window.read(member, (peer, range), is_torn, TIMEOUT);
        self.cluster.wake(rank);
        Ok(())
    }

    /// What the read of a rank has found, once.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn take_read(&mut self, rank: Rank) -> Result<Option<ReadSeen>, TimeError> {
        let mut window = self.ranks[rank as usize].window.take();
        let read = self.able(rank).map(|member| window.as_mut()?.take_read(member?));
        self.ranks[rank as usize].window = window;
        read
    }

    /// Whether a rank's write before into a slot at a peer was taken.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn has_credit(&mut self, rank: Rank, target: (Rank, u16)) -> Result<bool, TimeError> {
        Ok(self.able(rank)?.is_some_and(|member| RankWindow::has_credit(member, target.0, target.1)))
    }

    /// Writes into a slot of a rank at a peer, with a word. False: its write before was not taken,
    /// or the rank cannot write now.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn write(
        &mut self,
        rank: Rank,
        target: (Rank, u16),
        elements: &[f32],
        word: u64,
    ) -> Result<bool, TimeError> {
        let now = self.cluster.world.now();
        let Some(member) = self.able(rank)? else { return Ok(false) };
        if !RankWindow::is_free(member, target.0, target.1) {
            return Ok(false);
        }
        let is_sent = RankWindow::write(member, target, elements, word, now);
        if !is_sent && member.engine.works() {
            return Err(TimeError::Failed { rank, cause: "its queue is full".to_owned() });
        }
        self.cluster.wake(rank);
        Ok(is_sent)
    }

    /// The next write that has come to a rank, whose slot is free again then.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn take_write(&mut self, rank: Rank) -> Result<Option<WriteSeen>, TimeError> {
        let now = self.cluster.world.now();
        let Some(member) = self.able(rank)? else { return Ok(None) };
        let write = RankWindow::take_write(member, now);
        if write.is_some() {
            self.cluster.wake(rank);
        }
        Ok(write)
    }

    /// The rounds of a rank.
    fn rounds_of(&mut self, rank: Rank) -> Result<&mut Rounds, TimeError> {
        self.cluster.wake(rank);
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        Ok(member.rounds.as_mut().expect("ranks with rounds have a part in them"))
    }

    /// See [`Partial::next_round`](crate::Partial::next_round).
    ///
    /// # Errors
    ///
    /// The rank has ended.
    pub fn next_round(&mut self, rank: Rank) -> Result<Option<u64>, TimeError> {
        Ok(self.rounds_of(rank)?.next_round())
    }

    /// Hands a contribution of a rank over to its rounds.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    pub fn contribute(&mut self, rank: Rank, contribution: &[f32]) -> Result<(), TimeError> {
        let member = self.cluster.members[rank as usize].as_mut().ok_or_else(|| ended(rank))?;
        let rounds = self.ranks[rank as usize].rounds.as_mut().expect("ranks with rounds contribute");
        rounds.contribute(member, contribution);
        self.cluster.wake(rank);
        Ok(())
    }

    /// A rank gives nothing to its rounds before it contributes again.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    pub fn step_aside(&mut self, rank: Rank) -> Result<(), TimeError> {
        self.rounds_of(rank)?.step_aside();
        Ok(())
    }

    /// A rank is waited for again.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    pub fn come_back(&mut self, rank: Rank) -> Result<(), TimeError> {
        self.rounds_of(rank)?.come_back();
        Ok(())
    }

    /// A rank gives nothing any more, and waits for the last round.
    ///
    /// # Errors
    ///
    /// The rank has ended.
    pub fn finish(&mut self, rank: Rank) -> Result<(), TimeError> {
        self.rounds_of(rank)?.finish();
        Ok(())
    }

    /// The round for which a rank waits, once it has ended.
    ///
    /// # Errors
    ///
    /// The group has failed, with its verdict.
    pub fn take_round(&mut self, rank: Rank) -> Result<Option<RoundSeen>, TimeError> {
        let mut rounds = self.ranks[rank as usize].rounds.take();
        let round = self.able(rank).map(|member| rounds.as_mut()?.take(member?));
        self.ranks[rank as usize].rounds = rounds;
        round
    }

    /// When something moves next, if nothing is asked for.
    pub fn next_at(&mut self) -> Option<Nanos> {
        let began = self.began;
        self.cluster.next_at().map(|at| Nanos(at.0 - began.0))
    }

    /// Goes to the next instant at which something moves, or to this time if that comes first.
    /// False when there is neither.
    pub fn advance(&mut self, until: Option<Nanos>) -> bool {
        self.cluster.advance(until.map(|until| Nanos(until.0 + self.began.0)))
    }

    /// A rank makes no progress for a while, and answers nobody.
    pub fn freeze(&mut self, rank: Rank, duration: Duration) {
        self.cluster.world.inject(Fault::Freeze { rank, duration, watcher: true });
    }

    /// A rank ends.
    pub fn end(&mut self, rank: Rank) {
        self.ranks[rank as usize] = RankCalls::default();
        self.cluster.world.inject(Fault::RankDeath { rank });
        self.cluster.wake(rank);
    }
}

fn ended(rank: Rank) -> TimeError {
    TimeError::Failed { rank, cause: "it has ended".to_owned() }
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::{LATENCY_NS, Topology};

    use super::*;

    const RANKS: u32 = 4;

    fn wiring() -> Arc<Wiring> {
        let mut builder = Topology::builder();
        let switch = builder.switch("switch");
        for rank in 0..RANKS {
            let rank = builder.rank(rank.to_string());
            builder.duplex(rank, switch, 1_000_000_000, LATENCY_NS);
        }
        Arc::new(Wiring::new(builder.build().expect("connected")))
    }

    fn calls() -> Calls {
        Calls::new(&wiring(), 1, Faults::none()).expect("they connect")
    }

    /// Lets time pass until there is something.
    fn until<T>(calls: &mut Calls, mut take: impl FnMut(&mut Calls) -> Result<Option<T>, TimeError>) -> T {
        loop {
            calls.settle().expect("goes on");
            if let Some(found) = take(calls).expect("does not fail") {
                return found;
            }
            assert!(calls.advance(None), "nothing moves any more");
        }
    }

    fn sum(calls: &mut Calls, rank: Rank, number: u64) {
        let call = (Collective::AllReduce, DataType::U64, ReduceOp::Sum);
        calls.start(rank, call, 1, &number.to_ne_bytes()).expect("starts");
    }

    /// Lets time pass until a rank has an output.
    fn output(calls: &mut Calls, rank: Rank) -> Result<Vec<u8>, TimeError> {
        loop {
            calls.settle()?;
            if let Some(output) = calls.take_output(rank)? {
                return Ok(output);
            }
            assert!(calls.advance(None), "nothing moves any more");
        }
    }

    #[test]
    fn outputs_come_in_the_order_of_the_calls_and_a_call_waits_for_a_rank_that_is_late() {
        let mut calls = calls();
        for rank in 0..RANKS - 1 {
            sum(&mut calls, rank, 1);
            sum(&mut calls, rank, 10);
        }
        let late = Nanos(5_000_000);
        while calls.now() < late {
            calls.settle().expect("goes on");
            assert!(calls.take_output(0).expect("does not fail").is_none(), "a rank is missing");
            calls.advance(Some(late));
        }
        [1, 10].into_iter().for_each(|number| sum(&mut calls, RANKS - 1, number));
        for expected in [4_u64, 40] {
            for rank in 0..RANKS {
                assert_eq!(output(&mut calls, rank).expect("ends"), expected.to_ne_bytes());
            }
        }
        assert!(calls.now() > late);
    }

    #[test]
    fn when_a_rank_ends_the_others_are_told_which() {
        let mut calls = calls();
        (0..RANKS - 1).for_each(|rank| sum(&mut calls, rank, 1));
        calls.end(RANKS - 1);
        let error = output(&mut calls, 0).expect_err("a rank is gone").to_string();
        assert!(error.contains("rank 3"), "{error}");
    }

    #[test]
    fn what_is_exchanged_by_parts_comes_back_whole() {
        let mut calls = calls();
        let ranks = RANKS as usize;
        let call = (Collective::AllToAll, DataType::U8, ReduceOp::Sum);
        for rank in 0..RANKS {
            let input: Vec<u8> = (0..RANKS).map(|peer| (10 * rank + peer) as u8).collect();
            calls.start(rank, call, 1, &input).expect("starts");
        }
        for rank in 0..RANKS {
            let parts = output(&mut calls, rank).expect("ends");
            assert_eq!(parts, (0..RANKS).map(|peer| (10 * peer + rank) as u8).collect::<Vec<_>>());
            calls
                .start(rank, (Collective::AllGather, DataType::U8, ReduceOp::Sum), ranks, &parts)
                .expect("starts");
        }
        let expected: Vec<u8> =
            (0..RANKS).flat_map(|rank| (0..RANKS).map(move |peer| (10 * peer + rank) as u8)).collect();
        (0..RANKS).for_each(|rank| assert_eq!(output(&mut calls, rank).expect("ends"), expected));
    }

    #[test]
    fn a_read_takes_three_round_trips_and_finds_one_version_also_of_a_rank_that_stands_still() {
        let mut calls = Calls::with_window(&wiring(), 1, Faults::none(), (3, 2)).expect("they connect");
        calls.freeze(1, Duration::from_secs(1));
        for (version, word) in [(0, 0), (1, 7), (2, 9)] {
            let elements = [version as f32; 3];
            if version > 0 {
                calls.publish(1, &elements, word).expect("it lives");
            }
            let before = calls.now();
            calls.read(0, (1, 1..3), false).expect("it lives");
            let read = until(&mut calls, |calls| calls.take_read(0));
            assert_eq!(read, (version, word, elements[1..].to_vec()));
            let round_trip = Duration::from_nanos(4 * LATENCY_NS);
            let took = calls.now().since(before);
            assert!(took >= 3 * round_trip && took < 4 * round_trip, "{took:?}");
        }
    }

    #[test]
    fn writes_come_in_their_order_and_a_slot_is_free_again_when_its_write_was_taken() {
        let mut calls = Calls::with_window(&wiring(), 1, Faults::none(), (3, 2)).expect("they connect");
        for (slot, word) in [(0, 5), (1, 6)] {
            assert!(calls.write(0, (2, slot), &[word as f32], word).expect("goes on"));
            assert!(!calls.write(0, (2, slot), &[], 0).expect("goes on"), "it was not taken");
        }
        for (slot, word) in [(0, 5), (1, 6)] {
            let write = until(&mut calls, |calls| calls.take_write(2));
            assert_eq!(write, WriteSeen { from: 0, slot, word, elements: vec![word as f32] });
        }
        assert!(!calls.write(0, (2, 0), &[], 0).expect("goes on"), "its credit is on its way");
        until(&mut calls, |calls| Ok(calls.write(0, (2, 0), &[], 1)?.then_some(())));
        let before = calls.now();
        calls.freeze(2, Duration::from_secs(1));
        let write = until(&mut calls, |calls| calls.take_write(2));
        assert_eq!((write.word, write.elements), (1, Vec::new()));
        assert!(calls.now().since(before) >= Duration::from_secs(1), "it stands still");
    }

    #[test]
    fn a_round_counts_who_is_there_and_what_is_late_is_in_the_next() {
        let rounds = (2, Activation::quorum(3));
        let mut calls = Calls::with_rounds(&wiring(), 1, Faults::none(), rounds).expect("they connect");
        assert_eq!(calls.next_round(3).expect("it lives"), Some(0));
        (0..3).for_each(|rank| calls.contribute(rank, &[1.0, 10.0]).expect("it lives"));
        for rank in 0..3 {
            let round = until(&mut calls, |calls| calls.take_round(rank));
            assert_eq!((round.contributors, round.result), (3, vec![3.0, 30.0]));
        }
        // It gets the round that it has missed, and what it gave is in the next.
        calls.contribute(3, &[100.0, 0.0]).expect("it lives");
        let round = until(&mut calls, |calls| calls.take_round(3));
        assert_eq!((round.contributors, round.result), (3, vec![3.0, 30.0]));
        (0..4).for_each(|rank| calls.contribute(rank, &[1.0, 1.0]).expect("it lives"));
        for rank in 0..4 {
            let round = until(&mut calls, |calls| calls.take_round(rank));
            assert_eq!((round.contributors, round.result), (4, vec![104.0, 4.0]));
        }
        (0..4).for_each(|rank| calls.finish(rank).expect("it lives"));
        (0..4).for_each(|rank| assert_eq!(until(&mut calls, |calls| calls.take_round(rank)).contributors, 0));
    }

    #[test]
    fn all_things_are_at_the_time_that_is_next() {
        let mut calls = Calls::with_window(&wiring(), 1, Faults::none(), (3, 2)).expect("they connect");
        calls.settle().expect("goes on");
        calls.read(0, (1, 0..3), false).expect("it lives");
        calls.settle().expect("goes on");
        let next = calls.next_at().expect("a read is under way");
        assert!(next > calls.now() && calls.advance(Some(next + Duration::from_secs(1))));
        assert!(calls.now() >= next);
    }
}
