//! The floating-point environment of a thread, and a processor whose results do not depend on it.
//!
//! A program may set a thread to treat subnormal operands as zeros ("denormals are zeros"), to
//! replace subnormal results by zeros ("flush to zero"), or to round in another direction. A new
//! thread inherits this setting. x86-64 keeps it in the register MXCSR (Intel's manual, volume 1,
//! 10.2.3).
//!
//! In a round of a partial all-reduce such a thread would break the promise of equal bits. A thread
//! that flushes a subnormal `x` gets zero as the sum of `x` and a neutral element. A rank that
//! leaves the neutral element out gets `x`. Also, a step of a rank may run on the caller's thread
//! or on the progress thread, whose settings may differ.
//!
//! **Invariant:** while a [`DefaultEnvironment`] lives, its thread rounds to nearest, ties to even,
//! and keeps subnormal numbers. On processors other than x86-64 it changes nothing.

use std::marker::PhantomData;

use pleach_transport::Nanos;

use super::{Compute, HostCompute, Job};

/// The default environment; see the module. It belongs to the thread that made it.
#[must_use = "the environment is as it was when this is dropped"]
pub(crate) struct DefaultEnvironment {
    /// The value of the register to restore.
    before: Option<u32>,
    _of_one_thread: PhantomData<*const ()>,
}

impl DefaultEnvironment {
    /// Sets the default environment in this thread until the value is dropped.
    pub(crate) fn enter() -> Self {
        let before = register::get();
        let before = (before & register::CONTROL != register::DEFAULT).then_some(before);
        if before.is_some() {
            register::set(register::DEFAULT);
        }
        Self { before, _of_one_thread: PhantomData }
    }
}

impl Drop for DefaultEnvironment {
    fn drop(&mut self) {
        self.before.into_iter().for_each(register::set);
    }
}

/// [`HostCompute`] in the default environment, whatever the environment of the thread is.
#[derive(Debug, Default)]
pub(crate) struct IsolatedCompute(HostCompute);

// SAFETY: jobs are computed at once, on host memory, as by `HostCompute`.
unsafe impl Compute for IsolatedCompute {
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool {
        let _environment = DefaultEnvironment::enter();
        // SAFETY: the caller's promise.
        unsafe { self.0.advance(job, now) }
    }

    fn is_immediate(&self) -> bool {
        self.0.is_immediate()
    }
}

/// MXCSR.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    use std::arch::asm;

    /// All exceptions are masked, rounding is to nearest even, and nothing is flushed.
    pub(super) const DEFAULT: u32 = 0x1f80;
    /// All bits but the flags of exceptions that have occurred.
    pub(super) const CONTROL: u32 = !0x3f;

    pub(super) fn get() -> u32 {
        let mut word = 0u32;
        // SAFETY: every x86-64 processor has the register; its four bytes go to `word`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    /// Sets the register. `word` is the default, or a value of [`get`].
    pub(super) fn set(word: u32) {
        // SAFETY: no reserved bit is set, because the word is the default or a former value of the
        // register. For the compiler this statement reads and writes memory. So results that are
        // stored before it are computed before it, and values that are loaded after it are used
        // after it. Rust code assumes that the register has its default value. This function sets
        // the default, or restores the value with which the thread came, and the data of a job pass
        // through memory.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack)) };
    }
}

/// Processors whose register is unknown here.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod register {
    pub(super) const DEFAULT: u32 = 0;
    pub(super) const CONTROL: u32 = 0;

    pub(super) fn get() -> u32 {
        0
    }

    pub(super) fn set(_: u32) {}
}

#[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
#[cfg(test)]
mod tests {
    use half::bf16;
    use pleach_schedule::Algorithm;
    use pleach_transport::rendezvous::Fabric;
    use pleach_vocabulary::{Collective, Rank, ReduceOp};

    use super::*;
    use crate::engine::RoundDivisor;
    use crate::partial::{Activation, Divisor};
    use crate::{Element, Group, Options, Progress, Reproducible, ranks};

    /// The default with "denormals are zeros" and "flush to zero".
    const FLUSHING: u32 = register::DEFAULT | 1 << 15 | 1 << 6;

    #[test]
    fn the_environment_is_restored() {
        register::set(FLUSHING);
        let subnormal = std::hint::black_box(f32::from_bits(4));
        let product =
            |factor: f32| (std::hint::black_box(subnormal) * std::hint::black_box(factor)).to_bits();
        assert_eq!(product(2.0), 0);
        let environment = DefaultEnvironment::enter();
        assert_eq!(product(2.0), 8);
        drop(environment);
        assert_eq!(product(2.0), 0);
        register::set(register::DEFAULT);
        drop(DefaultEnvironment::enter());
        assert_eq!((product(2.0), register::get() & register::CONTROL), (8, register::DEFAULT));
    }

    /// The threads that flush.
    #[derive(Clone, Copy, Debug)]
    enum Flushing {
        All,
        /// Callers, but not their progress threads, which were started before the setting.
        Callers,
        One(Rank),
    }

    /// A subnormal number of a type. The sum of such numbers has the sum of their bits.
    trait Subnormal: Element {
        fn of(bits: u16) -> Self;
    }

    impl Subnormal for f32 {
        fn of(bits: u16) -> Self {
            Self::from_bits(bits.into())
        }
    }

    impl Subnormal for bf16 {
        fn of(bits: u16) -> Self {
            Self::from_bits(bits)
        }
    }

    /// Bits so small that the sum over all ranks stays subnormal in each of the types.
    fn bits(rank: Rank, index: usize) -> u16 {
        (1 + rank as usize + index % 9) as u16
    }

    /// Checks rounds in which a rank contributes nothing.
    fn check<T: Subnormal>(group: &Group, len: usize, flushing: Flushing, name: &str) {
        let (rank, ranks) = (group.rank(), group.world_size());
        let flushes = match flushing {
            Flushing::All | Flushing::Callers => true,
            Flushing::One(one) => one == rank,
        };
        let is_early = !matches!(flushing, Flushing::Callers);
        if flushes && is_early {
            register::set(FLUSHING);
        }
        let activation = Activation::all().divisor(Divisor::None);
        // First rank 0 is absent, then all other ranks are.
        for present in [(1u32 << ranks) - 2, 1] {
            let gives = |rank: Rank| present >> rank & 1 == 1;
            if !is_early {
                register::set(register::DEFAULT);
            }
            let mut rounds = group.partial::<T>(len, activation).expect("all ask for the same");
            if flushes {
                register::set(FLUSHING);
            }
            let round = if gives(rank) {
                let into = rounds.contribution().iter_mut().enumerate();
                into.for_each(|(index, into)| *into = T::of(bits(rank, index)));
                rounds.contribute()
            } else {
                rounds.abstain()
            };
            let round = round.expect("somebody gives something");
            assert!(round.contributors().iter().eq((0..ranks).filter(|rank| gives(*rank))));
            let sum =
                |index| (0..ranks).filter(|rank| gives(*rank)).map(|rank| bits(rank, index)).sum::<u16>();
            let expected: Vec<T> = (0..len).map(|index| T::of(sum(index))).collect();
            let is_right =
                bytemuck::cast_slice::<T, u8>(round.result()) == bytemuck::cast_slice::<T, u8>(&expected);
            assert!(
                is_right,
                "{name}, {len} elements, ranks {present:b} give, {flushing:?} flush, rank {rank}"
            );
            rounds.finish().expect("all finish");
        }
        register::set(register::DEFAULT);
    }

    #[test]
    fn rounds_have_the_same_bits_whatever_threads_do_with_subnormal_numbers() {
        for (fabric, ranks) in [(Fabric::Shm, 2), (Fabric::Tcp, 2), (Fabric::Shm, 3)] {
            ranks::with_group(
                fabric,
                ranks,
                |_| {},
                |group| {
                    for name in ["direct", "recursive-doubling", "ring"] {
                        let algorithm = Algorithm::named(name, Collective::AllReduce).expect("there is one");
                        let group = group.with_variant(algorithm);
                        for flushing in [Flushing::All, Flushing::Callers, Flushing::One(1)] {
                            // Data in signals, and data in memory.
                            check::<f32>(&group, 5, flushing, name);
                            check::<f32>(&group, 100, flushing, name);
                            check::<bf16>(&group, 33, flushing, name);
                        }
                    }
                },
            );
        }
    }

    /// Shows the difference that must not occur: here the processor is that of ordinary groups.
    #[test]
    fn a_round_without_an_environment_of_its_own_would_have_other_bits_on_each_rank() {
        let called = |options: &mut Options| options.progress = Progress::WhenCalled;
        let results = ranks::with_group(Fabric::Shm, 2, called, |group| {
            let algorithm = Algorithm::named("recursive-doubling", Collective::AllReduce);
            let group = group.with_variant(algorithm.expect("there is one"));
            register::set(FLUSHING);
            let given = [<f32 as Subnormal>::of(3); 5];
            let given = (group.rank() == 1).then_some(&given[..]);
            let of_present = group.of_present(5, ReduceOp::Sum);
            let found = of_present.and_then(|calls| calls.all_reduce(given, RoundDivisor::Ranks));
            register::set(register::DEFAULT);
            found.expect("a round").result.iter().map(|element| element.to_bits()).collect::<Vec<_>>()
        });
        // Rank 0 leaves its own neutral elements out, and rank 1 adds them.
        assert_eq!(results, [[3; 5], [0; 5]]);
    }

    #[test]
    fn exact_rounds_have_the_same_bits_whatever_threads_do_with_subnormal_numbers() {
        let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
        ranks::with_group(Fabric::Shm, 2, exact, |group| {
            for flushing in [Flushing::All, Flushing::Callers, Flushing::One(1)] {
                check::<f32>(&group, 100, flushing, "exact");
                check::<bf16>(&group, 100, flushing, "exact");
            }
        });
    }
}
