//! Calls of ranks that are driven one by one in virtual time, with their data as bytes.
//!
//! The ranks are those of [`wired`](super::wired): real engines over wires that carry one transfer
//! after the other, with processors that take no time. They carry out what groups do that are
//! [reproducible](crate::Reproducible) for a world size. A call begins on a rank when it is started
//! there.
//!
//! **Invariant:** the calls of a rank end in the order in which they were started, for who takes
//! their outputs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::cost::Platform;
use pleach_schedule::wiring::Wiring;
use pleach_transport::sim::{Fault, Faults};
use pleach_transport::{Nanos, SharedMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::wired::{TimeError, connected};
use super::{Cluster, NoProgress};
use crate::call::{Counts, Descriptor};
use crate::engine::{Bytes, RunId};
use crate::group::{CollectiveError, Planner, PlannerCache};

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
        let mut cluster = connected(wiring, wiring.routes(), seed, faults, true)?;
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

    fn calls() -> Calls {
        let mut builder = Topology::builder();
        let switch = builder.switch("switch");
        for rank in 0..RANKS {
            let rank = builder.rank(rank.to_string());
            builder.duplex(rank, switch, 1_000_000_000, LATENCY_NS);
        }
        let wiring = Arc::new(Wiring::new(builder.build().expect("connected")));
        Calls::new(&wiring, 1, Faults::none()).expect("they connect")
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
}
