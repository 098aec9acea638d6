//! A plan: all that the calls of one shape share, worked out once, so that a call computes nothing but what differs.

use std::sync::Arc;

use super::bank::{self, Class, TooLarge};
use super::header::INLINE_DATA_BYTES;
use super::layout::Layout;
use super::program::Program;
use super::signature::{Descriptor, Stream};

/// A program for so many elements of a type, reduced by an operation. See the module.
#[derive(Debug)]
pub struct Plan {
    pub(super) program: Arc<Program>,
    pub(super) descriptor: Descriptor,
    /// Of the call itself: the same on all ranks for the same call.
    pub(super) signature: u64,
    pub(super) stream: Stream,
    pub(super) class: Class,
    pub(super) chunk_bytes: usize,
    pub(super) layout: Layout,
    /// Data travel in the cells themselves.
    pub(super) inline: bool,
    pub(super) lanes: Vec<LanePlan>,
    /// Steps of all chunks that can be under way.
    pub(super) states: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LanePlan {
    pub(super) chunks: u32,
    /// Where the states of its steps begin.
    pub(super) states: u32,
}

impl Plan {
    /// What carries out calls of this shape by this program.
    ///
    /// # Errors
    ///
    /// See [`TooLarge`].
    pub fn new(program: Arc<Program>, descriptor: Descriptor) -> Result<Self, TooLarge> {
        let element_bytes = descriptor.data_type.bytes();
        let count = descriptor.count as usize;
        let (chunk_bytes, class) = bank::chunking(&program, count * element_bytes)?;
        let mut layout = Layout::default();
        layout.set(&program, count, element_bytes, chunk_bytes);
        let mut states = 0;
        let mut lanes = Vec::with_capacity(program.lanes.len());
        for lane in &program.lanes {
            lanes.push(LanePlan { chunks: layout.chunks(lane.block), states });
            states += lane.steps * program.window;
        }
        Ok(Self {
            signature: descriptor.signature(program.schedule_hash, chunk_bytes),
            stream: Stream::of(program.collective),
            inline: !program.maps && chunk_bytes <= INLINE_DATA_BYTES,
            descriptor,
            class,
            chunk_bytes,
            layout,
            lanes,
            states,
            program,
        })
    }

    /// What the calls are.
    #[must_use]
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// What carries them out.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }
}
