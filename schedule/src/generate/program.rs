//! The steps of one lane, with the dependencies between them.
//!
//! A [`Program`] collects the steps of a rank for one block. It knows which earlier steps still
//! read or write a part of this rank's memory, and makes a step depend on the steps that it
//! conflicts with. Input, output and their shared windows may all be the same memory, and are
//! treated as such.

use pleach_vocabulary::Rank;

use super::{Access, PeerAccess};
use crate::{BlockId, Lane, Op, Part, Place, SignalSlot, Step, StepId};

/// Where something is delivered: a part of a peer, and the signal slot that tells it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) rank: Rank,
    pub(super) part: Part,
    pub(super) signal_slot: SignalSlot,
}

/// A lane under construction.
pub(super) struct Program<'a> {
    links: PeerAccess<'a>,
    rank: Rank,
    block: BlockId,
    steps: Vec<Step>,
    reads: Vec<(Part, StepId)>,
    writes: Vec<(Part, StepId)>,
}

impl<'a> Program<'a> {
    pub(super) fn new(links: impl Into<PeerAccess<'a>>, rank: Rank, block: BlockId) -> Self {
        Self { links: links.into(), rank, block, steps: Vec::new(), reads: Vec::new(), writes: Vec::new() }
    }

    /// The lane; `None` if there is nothing to do.
    pub(super) fn finish(mut self) -> Option<Lane> {
        self.steps.shrink_to_fit();
        (!self.steps.is_empty()).then_some(Lane { block: self.block, steps: self.steps })
    }

    /// A part of this rank's memory.
    pub(super) fn own(&self, part: Part) -> Place {
        Place { rank: self.rank, part }
    }

    /// Tells a peer, once the given steps are complete.
    pub(super) fn signal(&mut self, to: Rank, signal_slot: SignalSlot, after: &[StepId]) -> StepId {
        self.push(Op::Signal { to, signal_slot }, after.iter().map(|&step| (step, 0)).collect())
    }

    /// Waits for a peer.
    pub(super) fn wait(&mut self, from: Rank, signal_slot: SignalSlot) -> StepId {
        self.push(Op::Wait { from, signal_slot }, Vec::new())
    }

    /// Copies within this rank's memory.
    pub(super) fn copy(&mut self, src: Part, dst: Part) -> StepId {
        self.reduce(vec![self.own(src)], vec![self.own(dst)])
    }

    /// Combines places into places.
    pub(super) fn reduce(&mut self, from: Vec<Place>, into: Vec<Place>) -> StepId {
        let own = |places: &[Place]| -> Vec<Part> {
            places.iter().filter(|place| place.rank == self.rank).map(|place| place.part).collect()
        };
        let (reads, writes) = (own(&from), own(&into));
        // A copy between a part and its shared window changes nothing where the two are the same
        // memory.
        let window_copy = matches!(
            (from.as_slice(), into.as_slice()),
            ([src], [dst]) if src.rank == dst.rank && matches!(
                (src.part, dst.part),
                (Part::Input, Part::SharedInput) | (Part::SharedOutput, Part::Output)
            )
        );
        let after = self.conflicts(&reads, &writes, window_copy);
        let step = self.push(Op::Reduce { from, into }, after);
        self.reads.extend(reads.into_iter().map(|part| (part, step)));
        self.writes.extend(writes.into_iter().map(|part| (part, step)));
        step
    }

    /// Puts a part of this rank's memory.
    pub(super) fn put(&mut self, src: Part, target: Target) -> StepId {
        let after = self.conflicts(&[src], &[], false);
        let Target { rank: to, part: dst, signal_slot } = target;
        let step = self.push(Op::Put { to, src, dst, signal_slot }, after);
        self.reads.push((src, step));
        step
    }

    /// Combines parts of this rank's memory, keeps the result in some of them and delivers it to
    /// peers.
    pub(super) fn deliver(
        &mut self,
        from: &[Part],
        keep: &[Part],
        staging: Part,
        targets: &[Target],
    ) -> StepId {
        let from = from.iter().map(|&part| self.own(part)).collect();
        self.deliver_places(from, keep, staging, targets)
    }

    /// How a peer is reached.
    pub(super) fn access(&self, peer: Rank) -> Access {
        self.links.between(self.rank, peer)
    }

    /// Combines places, keeps the result in parts of this rank's memory and delivers it to peers:
    /// in one pass to those that are mapped, by puts from `staging` (or from the only source, which
    /// needs no pass at all) to the others. Returns the step that reads the sources, or the first
    /// of them.
    pub(super) fn deliver_places(
        &mut self,
        from: Vec<Place>,
        keep: &[Part],
        staging: Part,
        targets: &[Target],
    ) -> StepId {
        let first = self.next();
        let mut into: Vec<Place> = keep.iter().map(|&part| self.own(part)).collect();
        let (mapped, put): (Vec<Target>, Vec<Target>) =
            targets.iter().partition(|target| self.access(target.rank) == Access::Mapped);
        into.extend(mapped.iter().map(|target| Place { rank: target.rank, part: target.part }));
        let only = match from.as_slice() {
            [only] if only.rank == self.rank => Some(only.part),
            _ => None,
        };
        if let Some(part) = only {
            for &target in &put {
                self.put(part, target);
            }
        } else if !keep.contains(&staging) && !put.is_empty() {
            into.push(self.own(staging));
        }
        if !into.is_empty() {
            let pass = self.reduce(from, into);
            for target in &mapped {
                self.signal(target.rank, target.signal_slot, &[pass]);
            }
        }
        if only.is_none() {
            for &target in &put {
                self.put(staging, target);
            }
        }
        first
    }

    /// Makes a step wait for another one of some chunks earlier.
    pub(super) fn after_earlier(&mut self, step: StepId, earlier: StepId, chunks: u32) {
        self.steps[step as usize].after.push((earlier, chunks));
    }

    /// The step of this lane that last wrote a part of this rank's memory, if any did.
    pub(super) fn last_write(&self, part: Part) -> Option<StepId> {
        self.writes.iter().rev().find(|&&(written, _)| written == part).map(|&(_, step)| step)
    }

    /// The steps of this lane that read a part of this rank's memory.
    pub(super) fn readers(&self, part: Part) -> Vec<StepId> {
        self.reads.iter().filter(|&&(read, _)| read == part).map(|&(_, step)| step).collect()
    }

    /// The number of the next step.
    pub(super) fn next(&self) -> StepId {
        self.steps.len() as StepId
    }

    fn push(&mut self, op: Op, after: Vec<(StepId, u32)>) -> StepId {
        let step = self.next();
        self.steps.push(Step { op, after });
        step
    }

    /// The steps that must be complete before one that reads and writes these; forgets what it
    /// overwrites.
    fn conflicts(&mut self, reads: &[Part], writes: &[Part], window_copy: bool) -> Vec<(StepId, u32)> {
        let mut after: Vec<StepId> = Vec::new();
        after.extend(self.writes.iter().filter(|(part, _)| reads.contains(part)).map(|&(_, step)| step));
        for &written in writes {
            let clashes = |part: Part| {
                part == written
                    || if window_copy { window_copy_clash(written, part) } else { may_alias(written, part) }
            };
            for list in [&mut self.reads, &mut self.writes] {
                after.extend(list.iter().filter(|&&(part, _)| clashes(part)).map(|&(_, step)| step));
                list.retain(|&(part, _)| !clashes(part));
            }
        }
        after.sort_unstable();
        after.dedup();
        after.into_iter().map(|step| (step, 0)).collect()
    }
}

/// Whether two different parts may be the same memory.
fn may_alias(one: Part, other: Part) -> bool {
    let callers = |part| !matches!(part, Part::Scratch(_));
    callers(one) && callers(other)
}

/// The same for what a copy out of or into a shared window writes, which is then not the same
/// memory as that window.
fn window_copy_clash(written: Part, other: Part) -> bool {
    written == Part::Output && other == Part::Input
}
