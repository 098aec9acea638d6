//! Who holds which of a rank's contribution buffers.
//!
//! The caller's thread writes one buffer. It hands that over and gets another one, while the
//! progress thread binds rounds and peers read what was bound. Both threads ask under the lock of
//! the group's driver, and touch the buffers outside of it.
//!
//! **Invariant:** a buffer is in one place: with the caller, handed over in time, handed over late,
//! or in the active round. The caller gets none that is elsewhere, nor one that it has handed over
//! and waits for: what is dropped may count after all.
#![cfg_attr(loom, allow(dead_code, unsafe_code, reason = "rounds are not there; its model reads memory"))]

use super::contributions::{Contribution, Contributions};

/// What becomes of a late contribution when a round is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LateGoes {
    /// It is given if there is none that was handed over in time.
    InPlace,
    /// It is given beside that one, to be reduced apart.
    Apart,
    /// It stays.
    Nowhere,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Handover {
    buffers: usize,
    /// For the next round, handed over in time.
    pending: Option<Contributions>,
    /// Too late for their round.
    late: Option<Contributions>,
    /// What the caller has handed over last.
    handed: Option<Contribution>,
    /// In the active round: given, and late ones that are reduced apart.
    bound: [Option<Contributions>; 2],
}

impl Handover {
    /// All of so many buffers are free.
    pub(crate) fn new(buffers: usize) -> Self {
        Self { buffers, pending: None, late: None, handed: None, bound: [None; 2] }
    }

    /// A buffer that the caller may write. `waits`: the caller waits for the round of what it has
    /// handed over last.
    pub(crate) fn free(&self, waits: bool) -> Contribution {
        let handed = self.handed.filter(|_| waits).map(Contributions::of);
        self.free_of([self.pending, self.late, self.bound[0], self.bound[1], handed])
    }

    /// A buffer that the caller may not write: one of the active round, if there is one.
    #[cfg(test)]
    pub(crate) fn free_or_bound(&self, waits: bool) -> Contribution {
        let handed = self.handed.filter(|_| waits).map(Contributions::of);
        self.free_of([self.pending, self.late, handed])
    }

    /// A buffer that is in none of these places.
    fn free_of<const PLACES: usize>(&self, places: [Option<Contributions>; PLACES]) -> Contribution {
        let held = places.into_iter().flatten().fold(Contributions::default(), Contributions::with);
        (0..self.buffers).find(|contribution| !held.contains(*contribution)).expect("one is always free")
    }

    /// The caller hands a contribution over, for the next round. `with`: late ones that go beside
    /// it.
    pub(crate) fn hand_over(&mut self, contribution: Contribution, with: Option<Contributions>) {
        self.handed = Some(contribution);
        self.pending = Some(Contributions::of(contribution).with(with.unwrap_or_default()));
    }

    /// The caller hands over a contribution that is too late for its round. `is_kept`: it is not
    /// dropped.
    pub(crate) fn hand_over_late(
        &mut self,
        contribution: Contribution,
        with: Option<Contributions>,
        is_kept: bool,
    ) {
        self.handed = Some(contribution);
        if is_kept {
            debug_assert!(self.late.is_none(), "an older one goes with it");
            self.late = Some(Contributions::of(contribution).with(with.unwrap_or_default()));
        }
    }

    /// Whether something was handed over in time for the next round.
    pub(crate) fn is_in_time(&self) -> bool {
        self.pending.is_some()
    }

    /// Late contributions, which are the caller's from now on.
    pub(crate) fn take_late(&mut self) -> Option<Contributions> {
        self.late.take()
    }

    /// Binds a round, which holds what it gets until [`Handover::end`]: what is given, and what is
    /// reduced apart.
    pub(crate) fn bind(&mut self, late: LateGoes) -> [Option<Contributions>; 2] {
        let given = self.pending.take();
        self.bound = match late {
            LateGoes::InPlace => [given.or_else(|| self.late.take()), None],
            LateGoes::Apart => [given, self.late.take()],
            LateGoes::Nowhere => [given, None],
        };
        self.bound
    }

    /// The active round has ended: nobody reads its buffers any more.
    pub(crate) fn end(&mut self) {
        self.bound = [None; 2];
    }

    /// What came too late for its round, or was dropped, is in time for the next one.
    pub(crate) fn count_after_all(&mut self) {
        self.pending = self.late.take().or(self.handed.map(Contributions::of));
    }

    /// After the group has failed: a contribution that is in no result, other than this one, which
    /// the caller has. The caller gets it back.
    pub(crate) fn take_back(&mut self, own: Contribution) -> Option<Contribution> {
        let [given, apart] = &mut self.bound;
        let mut places = [&mut self.pending, &mut self.late, given, apart].into_iter().flatten();
        places.find_map(|held| {
            let other = held.iter().find(|contribution| *contribution != own)?;
            *held = held.without(other);
            Some(other)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_free_when_it_is_in_no_place() {
        let mut handover = Handover::new(3);
        assert_eq!(handover.free(false), 0);
        handover.hand_over(0, None);
        assert_eq!(handover.free(true), 1);
        assert_eq!(handover.bind(LateGoes::InPlace), [Some(Contributions::of(0)), None]);
        handover.hand_over_late(1, None, true);
        assert_eq!(handover.free(true), 2, "one is bound, one late");
        handover.end();
        assert_eq!(handover.free(true), 0);
        assert_eq!(handover.bind(LateGoes::Nowhere), [None; 2]);
        assert_eq!(handover.bind(LateGoes::Apart), [None, Some(Contributions::of(1))]);
        handover.end();
        handover.hand_over_late(2, None, false);
        assert_eq!((handover.free(true), handover.take_late()), (0, None), "what was dropped is nowhere");
        handover.count_after_all();
        assert_eq!(handover.bind(LateGoes::Nowhere), [Some(Contributions::of(2)), None]);
    }

    #[test]
    fn what_went_with_a_contribution_comes_back_after_a_failure() {
        let mut handover = Handover::new(4);
        handover.hand_over(1, Some(Contributions::of(3)));
        assert_eq!(handover.clone().take_back(1), Some(3));
        handover.bind(LateGoes::InPlace);
        assert_eq!((handover.take_back(1), handover.take_back(1)), (Some(3), None));
        handover.end();
        handover.hand_over_late(2, None, true);
        assert_eq!(handover.take_back(2), None, "it has that");
        handover.bind(LateGoes::InPlace);
        handover.hand_over_late(0, None, true);
        assert_eq!(
            (handover.take_back(0), handover.take_back(0)),
            (Some(2), None),
            "its round has not ended"
        );
    }
}

/// All interleavings: `RUSTFLAGS="--cfg loom" cargo test -p pleach-collectives --lib --release
/// loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    const BUFFERS: usize = 3;
    /// Contributions of the caller: it combines a late one with the next.
    const VALUES: [u64; 2] = [1, 10];
    /// Rounds that are bound, whether anything was handed over or not.
    const ROUNDS: u64 = 2;

    /// What both threads see under the driver's lock.
    struct Rounds {
        handover: Handover,
        bound: u64,
        ended: u64,
    }

    struct Model {
        rounds: Mutex<Rounds>,
        has_ended: Condvar,
        buffers: [UnsafeCell<u64>; BUFFERS],
    }

    impl Model {
        fn read(&self, buffer: Contribution) -> u64 {
            // SAFETY: loom checks that nobody writes meanwhile, which is what is tested.
            self.buffers[buffer].with(|value| unsafe { *value })
        }

        fn write(&self, buffer: Contribution, value: u64) {
            // SAFETY: as in `read`; nobody reads either.
            self.buffers[buffer].with_mut(|place| unsafe { *place = value });
        }

        /// Binds rounds as a progress thread does, and reads what was bound as runs do: without
        /// the lock. Gives the sum.
        fn serve(&self) -> u64 {
            let mut sum = 0;
            for _ in 0..ROUNDS {
                let [given, _] = {
                    let mut rounds = self.rounds.lock().unwrap();
                    rounds.bound += 1;
                    rounds.handover.bind(LateGoes::InPlace)
                };
                let given = given.into_iter().flat_map(Contributions::iter);
                sum += given.map(|buffer| self.read(buffer)).sum::<u64>();
                let mut rounds = self.rounds.lock().unwrap();
                rounds.handover.end();
                rounds.ended += 1;
                self.has_ended.notify_one();
            }
            sum
        }

        /// Contributes as a caller does: while a round goes on that it waits for, it writes the
        /// next contribution. `free`: where.
        fn contribute(&self, free: fn(&Handover) -> Contribution) {
            let (mut seen, mut current) = (0, 0);
            self.write(current, VALUES[0]);
            for number in 0..VALUES.len() {
                let mut rounds = self.rounds.lock().unwrap();
                if let Some(late) = rounds.handover.take_late() {
                    drop(rounds);
                    let late: u64 = late.iter().map(|buffer| self.read(buffer)).sum();
                    self.write(current, VALUES[number] + late);
                    rounds = self.rounds.lock().unwrap();
                }
                let awaited = if rounds.bound == seen {
                    rounds.handover.hand_over(current, None);
                    seen + 1
                } else {
                    rounds.handover.hand_over_late(current, None, true);
                    rounds.bound
                };
                current = free(&rounds.handover);
                drop(rounds);
                self.write(current, *VALUES.get(number + 1).unwrap_or(&0));
                if awaited > ROUNDS {
                    // No round comes any more.
                    return;
                }
                let mut rounds = self.rounds.lock().unwrap();
                while rounds.ended < awaited {
                    rounds = self.has_ended.wait(rounds).unwrap();
                }
                seen = awaited;
            }
        }
    }

    /// All interleavings of a caller and the thread that binds: nothing is touched by both at once,
    /// and what was read in rounds and what is still held are all contributions.
    fn check(free: fn(&Handover) -> Contribution) {
        loom::model(move || {
            let rounds = Rounds { handover: Handover::new(BUFFERS), bound: 0, ended: 0 };
            let model = Arc::new(Model {
                rounds: Mutex::new(rounds),
                has_ended: Condvar::new(),
                buffers: std::array::from_fn(|_| UnsafeCell::new(0)),
            });
            let server = {
                let model = model.clone();
                thread::spawn(move || model.serve())
            };
            model.contribute(free);
            let read = server.join().unwrap();
            let rounds = model.rounds.lock().unwrap();
            let held = [rounds.handover.pending, rounds.handover.late].into_iter().flatten();
            let held: u64 = held.flat_map(Contributions::iter).map(|buffer| model.read(buffer)).sum();
            assert_eq!(read + held, VALUES.iter().sum::<u64>(), "{read} in rounds, {held} held");
        });
    }

    #[test]
    fn loom_a_contribution_is_touched_by_one_thread_at_a_time_and_none_is_lost() {
        check(|handover| handover.free(true));
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_memory_of_the_active_round_that_is_given_to_the_caller_is_caught() {
        check(|handover| handover.free_or_bound(true));
    }
}
