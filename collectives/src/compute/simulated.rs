//! A processor in virtual time. It carries out a job in random pieces, so that its accesses through
//! mappings are spread over time and race with transfers.

use std::time::Duration;

use pleach_transport::sim::{AccessKind, Random, World};
use pleach_transport::{Nanos, Rank};

use super::{Compute, HostCompute, Job};

/// Most pieces of a job.
const PIECES_MAX: u64 = 4;

/// A mutation of the processor: a defect that checkers must catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComputeMutant {
    /// The last source of every reduction is combined into the result twice.
    Twice,
    /// Every reduction is reported complete before its last element is done.
    Unfinished,
}

/// The processor of a simulated rank.
#[derive(Debug)]
pub struct SimulatedCompute {
    world: World,
    rank: Rank,
    random: Random,
    host: HostCompute,
    /// The number of bytes of sources and destinations that it touches in a second.
    bytes_per_s: u64,
    busy_until: Nanos,
    mutant: Option<ComputeMutant>,
    is_immediate: bool,
    is_idle: bool,
}

impl SimulatedCompute {
    /// The processor of `rank`.
    #[must_use]
    pub fn new(world: &World, rank: Rank, bytes_per_s: u64) -> Self {
        let random = world.random("compute").split_number(u64::from(rank));
        Self {
            world: world.clone(),
            rank,
            random,
            host: HostCompute::new(),
            bytes_per_s,
            busy_until: Nanos::ZERO,
            mutant: None,
            is_immediate: false,
            is_idle: false,
        }
    }

    /// The same processor, with this defect from now on.
    #[must_use]
    pub fn with_mutant(self, mutant: Option<ComputeMutant>) -> Self {
        Self { mutant, ..self }
    }

    /// The same processor, but it takes no time and does every job in one piece.
    #[must_use]
    pub fn immediate(self) -> Self {
        Self { is_immediate: true, ..self }
    }

    /// The same processor, but it takes no time and does nothing: for simulations of times only.
    #[must_use]
    pub fn idle(self) -> Self {
        Self { is_immediate: true, is_idle: true, ..self }
    }

    /// Reports to checkers the bytes that a piece touches between the piece before it and now.
    fn report(&self, job: &Job, elements: usize) {
        let size = job.data_type.bytes();
        let (skip, len) = (job.elements_done * size, elements * size);
        for source in &job.from {
            self.world.accessed(
                self.rank,
                source.wrapping_add(skip),
                len,
                AccessKind::Read,
                self.world.now(),
            );
        }
        for destination in &job.into {
            let address = destination.wrapping_add(skip).cast_const();
            self.world.accessed(self.rank, address, len, AccessKind::Write, self.world.now());
        }
    }
}

// SAFETY: each piece is computed at once, on host memory.
unsafe impl Compute for SimulatedCompute {
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool {
        if now < self.busy_until {
            return false;
        }
        if self.is_idle {
            job.elements_done = job.elements;
            return true;
        }
        let left = (job.elements - job.elements_done) as u64;
        let piece = if self.is_immediate || self.random.coin() {
            left
        } else {
            self.random.between(1, left.max(1)).max(left / PIECES_MAX)
        };
        let mut piece = piece.min(left) as usize;
        let reduces = job.from.len() > 1;
        if reduces && self.mutant == Some(ComputeMutant::Unfinished) && piece as u64 == left {
            piece -= 1;
            job.elements -= 1;
        }
        let first = job.elements_done;
        self.report(job, piece);
        let elements = std::mem::replace(&mut job.elements, job.elements_done + piece);
        // SAFETY: the piece is a part of the job, whose memory the caller promises to be valid.
        while !unsafe { self.host.advance(job, now) } {}
        job.elements = elements;
        if reduces && self.mutant == Some(ComputeMutant::Twice) && piece > 0 {
            let skip = first * job.data_type.bytes();
            let result = job.into[0].wrapping_add(skip);
            let last = job.from[job.from.len() - 1].wrapping_add(skip);
            let mut again = Job {
                from: vec![result.cast_const(), last],
                into: vec![result],
                elements: piece,
                elements_done: 0,
                ..*job
            };
            // SAFETY: the memory is that of the job, which the caller promises to be valid. The
            // result is one of the sources, and the other source is the same memory or does not
            // overlap it.
            while !unsafe { self.host.advance(&mut again, now) } {}
        }
        let bytes = (piece * job.data_type.bytes() * (job.from.len() + job.into.len())) as u64;
        if self.is_immediate {
            return job.elements_done == job.elements;
        }
        self.busy_until = now + Duration::from_nanos(bytes * 1_000_000_000 / self.bytes_per_s + 1);
        job.elements_done == job.elements
    }

    fn is_immediate(&self) -> bool {
        self.is_immediate
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        Some(self.busy_until)
    }
}
