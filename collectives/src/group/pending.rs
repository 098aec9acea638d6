//! A collective under way that owns its memory.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::clock;

use super::driver::Driver;
use super::error::CollectiveError;
use super::premultiplied::Products;
use super::summary::{Summarized, Summary};
use super::unwinding::without_unwinding;
use crate::engine::{Fault, RunId};

/// A collective under way. It owns its memory, and gives the memory back when it is done, also with
/// an error.
///
/// A thread of the group makes the progress while the caller computes. With
/// [`Progress::WhenCalled`](super::Progress) there is progress only while any thread of the group
/// is in a call, or tests or waits for an operation. The drop waits for the end of the collective,
/// at most until its deadline. Forgetting a `Pending` leaks the memory and does no other harm,
/// however often.
#[must_use = "a collective that is not waited for ends when this is dropped"]
pub struct Pending<D> {
    driver: Arc<Driver>,
    run: Option<RunId>,
    /// The runs to wait for after this one, the last one first.
    further: Vec<RunId>,
    /// The work that is left when all runs have ended well.
    completion: Option<Completion<D>>,
    outcome: Option<Result<(), CollectiveError>>,
    data: Option<D>,
}

/// How long [`Pending::wait_any`] drives one of several groups before it drives the next one.
const TURN_OF_A_GROUP: Duration = Duration::from_micros(100);

/// Puts results where they belong.
pub(super) type Completion<D> = Box<dyn FnOnce(&mut D) -> Result<(), CollectiveError> + Send>;

/// The result of starting a collective: it is under way, or an error with its memory.
pub type Started<D> = Result<Pending<D>, PendingError<D>>;

/// A non-blocking collective that failed, with its memory.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct PendingError<D> {
    /// The cause.
    pub error: CollectiveError,
    /// The memory of the operation. The contents of outputs are unspecified; no peer changes them
    /// any more.
    pub data: D,
}

impl<D: Summary> std::fmt::Debug for PendingError<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !formatter.alternate() {
            return std::fmt::Debug::fmt(&self.error, formatter);
        }
        let mut fields = formatter.debug_struct("PendingError");
        fields.field("error", &self.error).field("data", &Summarized(&self.data)).finish()
    }
}

impl<D> std::fmt::Debug for Pending<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Pending({:?})", self.run)
    }
}

impl<D> Pending<D> {
    /// A collective of one run, which works on these products too.
    pub(super) fn new(driver: Arc<Driver>, run: RunId, data: D, products: Products) -> Self {
        let keep = |products: Products| -> Completion<D> {
            Box::new(move |_| {
                drop(products);
                Ok(())
            })
        };
        Self {
            driver,
            run: Some(run),
            further: Vec::new(),
            completion: (!products.is_empty()).then(|| keep(products)),
            outcome: None,
            data: Some(data),
        }
    }

    /// A collective of several runs, in the order in which they were started.
    pub(super) fn of_all(
        driver: Arc<Driver>,
        mut runs: Vec<RunId>,
        data: D,
        completion: Option<Completion<D>>,
    ) -> Self {
        runs.reverse();
        let mut pending =
            Self { driver, run: runs.pop(), further: runs, completion, outcome: None, data: Some(data) };
        if pending.run.is_none() {
            pending.complete();
        }
        pending
    }

    /// Makes some progress; returns whether the collective is done. Never blocks for long.
    pub fn test(&mut self) -> bool {
        self.wait_for(Duration::ZERO)
    }

    /// Waits at most `limit`; returns whether the collective is done.
    pub fn wait_for(&mut self, limit: Duration) -> bool {
        self.refuse_in_child();
        if self.run.is_none() {
            return true;
        }
        let until = clock::now() + limit;
        while let Some(run) = self.run {
            let found = self.driver.outcome(self.driver.lock(), run, until);
            let Some(outcome) = found else { return false };
            self.ended(outcome);
        }
        true
    }

    /// Records that a run has ended: the first error counts.
    fn ended(&mut self, outcome: Result<(), Arc<Fault>>) {
        self.run = self.further.pop();
        let before = self.outcome.take().unwrap_or(Ok(()));
        self.outcome = Some(before.and(outcome.map_err(CollectiveError::Failed)));
        if self.run.is_none() {
            self.complete();
        }
    }

    fn complete(&mut self) {
        let completion = self.completion.take();
        if matches!(self.outcome, None | Some(Ok(())))
            && let (Some(complete), Some(data)) = (completion, &mut self.data)
        {
            self.outcome = Some(complete(data));
        }
    }

    /// Waits until the collective is done, at most until its deadline, and gives the memory back.
    ///
    /// # Errors
    ///
    /// The error of the collective, with the memory.
    ///
    /// # Panics
    ///
    /// Never: the memory is there until this call.
    pub fn wait(mut self) -> Result<D, PendingError<D>> {
        self.finish();
        let data = self.data.take().expect("taken only here");
        match self.outcome.take().unwrap_or(Ok(())) {
            Ok(()) => Ok(data),
            Err(error) => Err(PendingError { error, data }),
        }
    }

    /// Waits until one of the collectives is done, at most `limit`. Returns the index of the first
    /// one that is done: `None` after the limit, and when there are none. To take the results as
    /// they come, remove that one and wait for it: `pending.swap_remove(index).wait()`. Collectives
    /// of several groups are polled in turn, each group for 100 us.
    pub fn wait_any(pending: &mut [Self], limit: Duration) -> Option<usize> {
        let until = clock::now() + limit;
        let drivers: Vec<Arc<Driver>> = pending.iter().map(|one| Arc::clone(&one.driver)).collect();
        loop {
            for (index, driver) in drivers.iter().enumerate() {
                if pending[index].test() {
                    return Some(index);
                }
                if drivers[..index].iter().any(|earlier| Arc::ptr_eq(earlier, driver)) {
                    continue;
                }
                let is_alone = drivers.iter().all(|other| Arc::ptr_eq(other, driver));
                let turn = if is_alone { until } else { until.min(clock::now() + TURN_OF_A_GROUP) };
                let runs: Vec<RunId> = pending
                    .iter()
                    .filter(|one| Arc::ptr_eq(&one.driver, driver))
                    .filter_map(|one| one.run)
                    .collect();
                driver.drive_until_any_ends(&runs, turn);
            }
            if pending.is_empty() || clock::now() >= until {
                return pending.iter_mut().position(Self::test);
            }
        }
    }

    /// Waits for all of the collectives and gives their memory back, in their order.
    ///
    /// # Errors
    ///
    /// The error of the first one that failed, with the memory of all: each of them has ended.
    pub fn wait_all(pending: impl IntoIterator<Item = Self>) -> Result<Vec<D>, PendingError<Vec<D>>> {
        let mut failed = None;
        let mut all = Vec::new();
        for one in pending {
            all.push(one.wait().unwrap_or_else(|PendingError { error, data }| {
                failed.get_or_insert(error);
                data
            }));
        }
        match failed {
            None => Ok(all),
            Some(error) => Err(PendingError { error, data: all }),
        }
    }

    /// Ends the group's work on all ranks, this collective included, and waits for that.
    ///
    /// # Errors
    ///
    /// As [`Pending::wait`]; the collective may have ended well before.
    pub fn abort(self) -> Result<D, PendingError<D>> {
        self.driver.abort();
        self.wait()
    }

    /// In a forked child the collective is the parent's: here it ends with an error and this copy
    /// of the memory.
    fn refuse_in_child(&mut self) {
        if self.run.is_some()
            && let Err(error) = self.driver.expect_own_process()
        {
            self.run = None;
            self.further.clear();
            self.completion = None;
            self.outcome = Some(Err(error));
        }
    }

    fn finish(&mut self) {
        self.refuse_in_child();
        while let Some(run) = self.run {
            let outcome = without_unwinding(|| self.driver.finish(self.driver.lock(), run, None));
            self.ended(outcome);
        }
    }
}

impl<D> Drop for Pending<D> {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::mem::forget;

    use pleach_schedule::cost::{CostModel, Platform};
    use pleach_schedule::generate::Access;
    use pleach_transport::rendezvous::World;
    use pleach_transport::sim::{self, Network};
    use pleach_transport::{Device, DeviceConfig, Rank};
    use pleach_vocabulary::ReduceOp;

    use super::*;
    use crate::compute::HostCompute;
    use crate::engine::{StatusBoard, signal_slots};
    use crate::group::{Connection, Group, Operation, Options, Progress};

    #[test]
    fn an_error_says_how_much_it_gives_back_and_not_what_is_in_it() {
        let fields = |error: &dyn std::fmt::Debug| -> String {
            format!("{error:#?}").split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let error = CollectiveError::Closed;
        let one = PendingError { error: error.clone(), data: vec![45u32; 40_001] };
        assert_eq!(fields(&one), "PendingError { error: Closed, data: Vec<u32>(40001 elements), }");
        assert_eq!(format!("{one:?}"), error.to_string(), "the message alone, as of every error");
        let two = PendingError { error: error.clone(), data: (vec![1u8], vec![0.5f32; 70]) };
        assert_eq!(
            fields(&two),
            "PendingError { error: Closed, data: ( Vec<u8>(1 elements), Vec<f32>(70 elements), ), }"
        );
        let many = PendingError { error, data: vec![vec![1i8; 100], vec![2; 200]] };
        assert_eq!(
            fields(&many),
            "PendingError { error: Closed, data: 2 of Vec<i8>(300 elements together), }"
        );
    }

    /// One round takes Miri minutes.
    const ROUNDS: u32 = if cfg!(miri) { 1 } else { 5 };

    /// Elements of a call: more than fit beside a signal.
    const LEN: usize = 100;

    /// Runs `body` as both ranks of a group in a simulated world. So Miri can see what becomes of
    /// the memory: there are no files, no sockets, and no threads but the ranks and time.
    fn with_pair(body: impl Fn(Group) + Sync) {
        let network = Network::full_mesh(2, 1_000_000_000, Duration::from_micros(1));
        let world = sim::World::new(sim::Options::new(network, 1));
        let boards = [0, 1].map(|rank| Arc::new(StatusBoard::new(rank)));
        let device = |rank: Rank| {
            world.device(DeviceConfig {
                rank,
                world_size: 2,
                secret: None,
                signal_slots: signal_slots(2),
                connect_timeout: Duration::from_secs(1),
                interface: None,
                address: None,
                responder: boards[rank as usize].clone(),
            })
        };
        let mut devices = [0, 1].map(device);
        let addresses = [0, 1].map(|rank: usize| devices[rank].info().address.clone());
        for rank in [0, 1] {
            devices[rank].connect(1 - rank as Rank, &addresses[1 - rank]).expect("the address of a rank");
        }
        let mut events = [0, 1].map(|_| Vec::with_capacity(8));
        while events.iter().any(Vec::is_empty) {
            assert!(world.advance(None), "they connect");
            for (device, events) in devices.iter_mut().zip(&mut events) {
                device.poll(world.now(), events);
            }
        }
        std::thread::scope(|scope| {
            let start = |(device, board): (sim::SimDevice, &Arc<StatusBoard>)| {
                let (body, board) = (&body, board.clone());
                scope.spawn(move || {
                    let connection = Connection {
                        device: Box::new(device),
                        events: Vec::new(),
                        board,
                        platform: Platform::one_host(2, Access::Put, CostModel::LOOPBACK),
                        ranks_a_processor: 1,
                        store: None,
                    };
                    let mut options = Options::new(World::alone());
                    options.progress = Progress::WhenCalled;
                    let group = connection.into_group(Box::new(HostCompute::new()), &options);
                    body(group.expect("both are connected"));
                })
            };
            let ranks: Vec<_> = devices.into_iter().zip(&boards).map(start).collect();
            // Time passes as long as a rank works.
            while !ranks.iter().all(|rank| rank.is_finished()) {
                world.advance(None);
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn memory_of_calls_that_are_dropped_or_forgotten_half_done_is_not_given_to_others() {
        with_pair(|group| {
            for round in 1..=ROUNDS {
                forget(group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).expect("started"));
                drop(group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum)).expect("started"));
                let registered = || {
                    let mut buffer = group.buffer(LEN).expect("there is memory");
                    buffer.fill(round);
                    buffer
                };
                forget(group.start(Operation::all_reduce(registered(), ReduceOp::Sum)).expect("started"));
                drop(group.start(Operation::all_reduce(registered(), ReduceOp::Sum)).expect("started"));
                // Memory that these would write to if they got it back.
                let (others, kept) = (vec![7_u32; LEN], registered());
                let moved = group.start(Operation::all_reduce(vec![round; LEN], ReduceOp::Sum));
                let moved = Box::new(moved.expect("started"));
                let mut data = vec![round; LEN];
                group.all_reduce(&mut data, ReduceOp::Sum).expect("both make the same calls");
                assert!(data.iter().all(|value| *value == 2 * round), "{data:?}");
                assert!(moved.wait().expect("it ends").iter().all(|value| *value == 2 * round));
                assert!(others.iter().all(|value| *value == 7) && kept.iter().all(|value| *value == round));
            }
            group.barrier().expect("both are there");
        });
    }
}
