//! A processor in virtual time: it works through a job in random pieces, so that accesses through mappings are
//! spread over time and raced like transfers.

use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::Rank;
use pleach_transport::sim::{AccessKind, Random, World};

use super::{Compute, HostCompute, Job};

/// Most pieces a job is cut into.
const PIECES_MAX: u64 = 4;

/// One simulated rank's processor.
#[derive(Debug)]
pub struct SimulatedCompute {
    world: World,
    rank: Rank,
    random: Random,
    host: HostCompute,
    /// How many bytes of sources and destinations it touches in a second.
    bytes_per_s: u64,
    busy_until: Nanos,
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
        }
    }

    /// Tells checkers which bytes a piece touches, at some time since the piece before it.
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

impl Compute for SimulatedCompute {
    unsafe fn advance(&mut self, job: &mut Job, now: Nanos) -> bool {
        if now < self.busy_until {
            return false;
        }
        let left = (job.elements - job.elements_done) as u64;
        let piece = if self.random.coin() {
            left
        } else {
            self.random.between(1, left.max(1)).max(left / PIECES_MAX)
        };
        let piece = piece.min(left) as usize;
        self.report(job, piece);
        let elements = std::mem::replace(&mut job.elements, job.elements_done + piece);
        // SAFETY: a part of the job whose memory the caller vouches for.
        while !unsafe { self.host.advance(job, now) } {}
        job.elements = elements;
        let bytes = (piece * job.data_type.bytes() * (job.from.len() + job.into.len())) as u64;
        self.busy_until = now + Duration::from_nanos(bytes * 1_000_000_000 / self.bytes_per_s + 1);
        job.elements_done == job.elements
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        Some(self.busy_until)
    }
}
