//! What a call waits for before it begins, beside its turn: work that is under way elsewhere, as in
//! a GPU's stream.
//!
//! **Invariant:** until its gate is open a run does nothing. This rank touches no byte of its
//! memory, nor does a peer, which does so only after a signal of this run; and calls that were made
//! later wait for their turn behind it, so banks are used in the order of calls as ever.

use std::time::Duration;

use pleach_transport::Nanos;

use super::fault::{Fault, FaultKind};
use super::{Engine, RunId, SlotOfRun};
use crate::compute::ComputeError;

/// Asked whether it is open, again and again until it is; never waits. An error ends the group.
pub type Gate = Box<dyn FnMut() -> Result<bool, ComputeError> + Send>;

/// How often a closed gate is looked at by who has nothing else to do: nothing rings when it opens.
const LOOK_EVERY: Duration = Duration::from_micros(50);

impl Engine {
    /// Has a run that was accepted just now begin only when this gate is open. Its time runs
    /// nevertheless.
    pub(super) fn put_gate(&mut self, id: RunId, gate: Option<Gate>) {
        self.gates += usize::from(gate.is_some());
        self.slots[usize::from(id.slot)].gate = gate;
    }

    /// Looks at all gates; false when one of them has failed, and the group with it.
    pub(super) fn look_at_gates(&mut self, now: Nanos) -> bool {
        for index in 0..self.order.len() {
            let slot = self.order[index];
            let entry = &mut self.slots[usize::from(slot)];
            match entry.gate.as_mut().map(|is_open| is_open()) {
                None | Some(Ok(false)) => {}
                Some(Ok(true)) => {
                    entry.gate = None;
                    entry.has_moved = true;
                    self.gates -= 1;
                }
                Some(Err(error)) => {
                    let fault = self.gate_failed(slot, &error, now);
                    self.fail(fault, now);
                    return false;
                }
            }
        }
        true
    }

    fn gate_failed(&self, slot: u8, error: &ComputeError, now: Nanos) -> Fault {
        self.fault(FaultKind::Compute, self.rank, error.to_string(), Some(slot), now)
    }
}

impl SlotOfRun {
    /// When its gate wants to be looked at again, if it has one that is closed.
    pub(super) fn gate_wakeup(&self, seen_at: Nanos) -> Option<Nanos> {
        self.gate.as_ref().map(|_| seen_at + LOOK_EVERY)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use pleach_transport::cuda::CudaError;
    use pleach_transport::sim::{Network, Options};
    use pleach_transport::{HostMemory, Slice};
    use pleach_vocabulary::{Collective, DataType, ReduceOp};

    use super::*;
    use crate::call::{Amount, Counts, Descriptor};
    use crate::engine::Bytes;
    use crate::simulate::Cluster;

    const RANKS: usize = 2;
    const LEN: usize = 100_000;
    const TIMEOUT: Duration = Duration::from_millis(500);
    /// Much longer than the calls take where nothing is in their way.
    const LONG: Duration = Duration::from_millis(50);

    type Outcome = Option<Result<(), Arc<Fault>>>;

    /// Two ranks that have started the same calls, of which rank 0's first has a gate.
    struct Ranks {
        cluster: Cluster,
        /// By rank and call.
        runs: Vec<Vec<RunId>>,
        data: Vec<Vec<Slice>>,
        outcomes: Vec<Vec<Outcome>>,
    }

    impl Ranks {
        fn new(gate: Gate, calls: usize) -> Self {
            let network = Network::full_mesh(RANKS as u32, 1_000_000_000, Duration::from_micros(5));
            let mut cluster = Cluster::new(Options::new(network, 1));
            cluster
                .run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))
                .expect("ranks connect");
            let (mut runs, mut data) = (Vec::new(), Vec::new());
            let mut gate = Some(gate);
            for member in cluster.members.iter_mut().flatten() {
                let descriptor = Descriptor {
                    collective: Collective::AllReduce,
                    amount: Amount::Each(LEN as u64),
                    data_type: DataType::U8,
                    op: ReduceOp::Sum,
                    tag: 0,
                };
                let plan =
                    member.planner.plan(&descriptor, &Counts::Each(LEN), None).expect("a plan").clone();
                let engine = &mut member.engine;
                let region = |_| engine.device().register(HostMemory::new(LEN)).expect("registered").whole();
                let slices: Vec<Slice> = (0..calls).map(region).collect();
                slices.iter().for_each(|slice| slice.store(&vec![1; LEN]));
                let start = |slice: &Slice| {
                    let bytes = Bytes::Registered(slice.clone());
                    engine.start_behind(gate.take(), &plan, bytes.clone(), bytes, TIMEOUT).expect("accepted")
                };
                runs.push(slices.iter().map(start).collect());
                data.push(slices);
            }
            Self { cluster, runs, data, outcomes: vec![vec![None; calls]; RANKS] }
        }

        /// Goes on until every call has ended, or for so long; whether they have.
        fn go_on(&mut self, limit: Duration) -> bool {
            let until = self.cluster.world.now() + limit;
            let (runs, outcomes) = (&self.runs, &mut self.outcomes);
            self.cluster
                .run(|cluster| {
                    for (rank, member) in cluster.members.iter_mut().enumerate() {
                        let engine = &mut member.as_mut().expect("nobody dies").engine;
                        for (outcome, run) in outcomes[rank].iter_mut().zip(&runs[rank]) {
                            if outcome.is_none() {
                                *outcome = engine.take_outcome(*run);
                            }
                        }
                    }
                    cluster.world.now() >= until || outcomes.iter().flatten().all(Option::is_some)
                })
                .expect("a gate is looked at again");
            self.outcomes.iter().flatten().all(Option::is_some)
        }

        fn faults(&self) -> Vec<Arc<Fault>> {
            let all = self.outcomes.iter().flatten().flatten();
            all.map(|outcome| outcome.clone().expect_err("the group has failed")).collect()
        }
    }

    #[test]
    fn behind_a_closed_gate_no_byte_is_touched_and_later_calls_wait() {
        let is_open = Arc::new(AtomicBool::new(false));
        let asked = is_open.clone();
        let mut ranks = Ranks::new(Box::new(move || Ok(asked.load(Ordering::Relaxed))), 2);
        assert!(!ranks.go_on(LONG));
        assert!(ranks.outcomes.iter().flatten().all(Option::is_none), "nobody goes on without rank 0");
        // What the work that is waited for does.
        ranks.data[0][0].store(&vec![5; LEN]);
        is_open.store(true, Ordering::Relaxed);
        assert!(ranks.go_on(LONG));
        for (rank, slices) in ranks.data.iter().enumerate() {
            assert!(ranks.outcomes[rank].iter().all(|outcome| *outcome == Some(Ok(()))));
            assert_eq!(slices[0].to_vec(), vec![6; LEN], "rank {rank}");
            assert_eq!(slices[1].to_vec(), vec![2; LEN], "rank {rank}");
        }
    }

    #[test]
    fn a_gate_that_does_not_open_in_time_ends_the_group_with_the_rank_and_the_reason() {
        let mut ranks = Ranks::new(Box::new(|| Ok(false)), 1);
        assert!(ranks.go_on(TIMEOUT * 2));
        for fault in ranks.faults() {
            assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 0), "{fault}");
        }
        let told = ranks.faults().iter().any(|fault| fault.detail.contains("work from before the call"));
        assert!(told, "who waits for its own stream says so: {:?}", ranks.faults());
    }

    #[test]
    fn a_gate_that_fails_ends_the_group_on_all_ranks() {
        let error = || ComputeError::from(CudaError::Freed { address: 0x1000 });
        let mut ranks = Ranks::new(Box::new(move || Err(error())), 2);
        assert!(ranks.go_on(TIMEOUT * 2));
        for fault in ranks.faults() {
            assert_eq!((fault.kind, fault.subject), (FaultKind::Compute, 0), "{fault}");
            assert!(fault.detail.contains("was freed"), "{fault}");
        }
    }
}
