//! Inputs that are absent: a rank that gives nothing to a round of a partial all-reduce gives
//! neutral elements, which nobody has to read.
//!
//! Combined with anything, a neutral element leaves the other operand as it is, bit for bit
//! ([`crate::partial`]). So a step that combines leaves out the sources that are known to be
//! neutral, if there is another one. Three things are known: a rank's own input, from its call; a
//! peer's input, from the header of the peer's signals; and what this rank's scratch holds. A put
//! of neutral elements to scratch is a signal that says so, and moves no bytes.
//!
//! **Invariant:** a place that holds neutral elements is known to do so by every rank that reads
//! it, or holds their bytes. Scratch may be known to hold them and not hold their bytes: that is so
//! only in schedules in which no rank maps another's scratch, so its own rank alone reads it.
//! Outputs always hold their bytes.

use std::collections::HashSet;

use pleach_schedule::Part;
use pleach_transport::Slice;
use pleach_vocabulary::Rank;

use super::Run;
use crate::engine::Bytes;
use crate::engine::address::Address;
use crate::engine::plan::{ChunkStep, PlaceSlot, PutProgram};
use crate::engine::signals::Header;

/// What a run in a round of a partial all-reduce needs beside its input and output.
#[derive(Clone, Debug)]
pub(crate) struct RoundInput {
    /// The divisor of an average, if that is not the number of ranks.
    pub(crate) divide_by: Option<u32>,
    /// Neutral elements, as many as the input has.
    pub(crate) neutral: Bytes,
    /// The input is nothing but neutral elements.
    pub(crate) is_absent: bool,
}

/// What a run knows to be absent; see the module.
pub(crate) struct Absence {
    input: RoundInput,
    /// Places of this rank's scratch that hold nothing but neutral elements, by their offsets in
    /// the bank.
    scratch: HashSet<u64>,
}

impl Absence {
    pub(crate) fn new(input: RoundInput) -> Self {
        Self { input, scratch: HashSet::new() }
    }

    /// The divisor of an average over so many ranks.
    pub(crate) fn divisor(&self, ranks: u32) -> u32 {
        self.input.divide_by.unwrap_or(ranks)
    }

    /// Whether this rank's input is absent.
    pub(crate) fn is_absent(&self) -> bool {
        self.input.is_absent
    }

    /// A place of this rank was written, or is to be taken for written.
    fn note(&mut self, scratch_offset: u64, is_neutral: bool) {
        if is_neutral {
            self.scratch.insert(scratch_offset);
        } else {
            self.scratch.remove(&scratch_offset);
        }
    }
}

/// Whether the place is scratch of this rank of which nobody else has to know what it holds.
fn is_kept(step: ChunkStep<'_>, place: &PlaceSlot) -> bool {
    let plan = step.plan();
    matches!(place.part, Part::Scratch(_)) && plan.is_own(place) && plan.keeps_scratch_to_itself()
}

impl Run {
    /// Whether the place is known to hold nothing but neutral elements.
    #[inline]
    pub(crate) fn is_neutral(&self, step: ChunkStep<'_>, place: PlaceSlot) -> bool {
        self.parameters.round.as_ref().is_some_and(|round| match place.part {
            Part::Input | Part::SharedInput if step.plan().is_own(&place) => round.is_absent(),
            Part::SharedInput => self.memory.is_absent(&place),
            Part::Scratch(_) if is_kept(step, &place) => {
                round.scratch.contains(&step.scratch_offset(place.slot))
            }
            Part::Input | Part::Output | Part::SharedOutput | Part::Scratch(_) => false,
        })
    }

    /// Where as many neutral elements are as the longest chunk has.
    pub(crate) fn neutral_address(&self) -> Option<Address> {
        self.parameters.round.as_ref().map(|round| round.input.neutral.base())
    }

    /// The same memory, to be put.
    pub(crate) fn neutral_elements(&self) -> Option<&Slice> {
        match &self.parameters.round.as_ref()?.input.neutral {
            Bytes::Registered(slice) | Bytes::Staged(slice) => Some(slice),
            Bytes::None | Bytes::Lent(_) | Bytes::Private { .. } => None,
        }
    }

    /// Whether nothing but neutral elements would be stored, and only where this rank alone has to
    /// know it. Then it knows, and nothing need be stored.
    pub(crate) fn leaves_out(&mut self, step: ChunkStep<'_>, from: &[PlaceSlot], into: &[PlaceSlot]) -> bool {
        let leaves_out = self.parameters.round.is_some()
            && into.iter().all(|place| is_kept(step, place))
            && from.iter().all(|place| self.is_neutral(step, *place));
        if leaves_out {
            self.note_written(step, into, true);
        }
        leaves_out
    }

    /// A step stores bytes in these places.
    pub(crate) fn note_stored(&mut self, step: ChunkStep<'_>, into: &[PlaceSlot]) {
        if self.parameters.round.is_some() {
            self.note_written(step, into, false);
        }
    }

    fn note_written(&mut self, step: ChunkStep<'_>, into: &[PlaceSlot], is_neutral: bool) {
        let Some(round) = &mut self.parameters.round else { return };
        for place in into.iter().filter(|place| is_kept(step, place)) {
            round.note(step.scratch_offset(place.slot), is_neutral);
        }
    }

    /// A signal of this call has come, with the data of a put to this place or in place of it.
    /// False: it is in place of a put whose bytes are needed.
    pub(crate) fn note_put(
        &mut self,
        step: ChunkStep<'_>,
        from: Rank,
        header: &Header,
        into: Option<PlaceSlot>,
    ) -> bool {
        if self.parameters.round.is_none() {
            return true;
        }
        let history = step.plan().mark(self.parameters.number.history, from);
        let is_neutral = header.is_neutral_of(self.number(), history);
        let Some(place) = into.filter(|place| is_kept(step, place)) else { return !is_neutral };
        self.note_written(step, &[place], is_neutral);
        true
    }

    /// Whether a put moves no bytes, as the peer takes its signal for neutral elements.
    pub(crate) fn is_told_alone(&self, step: ChunkStep<'_>, put: &PutProgram) -> bool {
        self.parameters.round.is_some()
            && matches!(put.dst.part, Part::Scratch(_))
            && step.plan().keeps_scratch_to_itself()
            && self.is_neutral(step, put.src)
    }
}
