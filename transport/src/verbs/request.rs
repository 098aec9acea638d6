//! The local and remote bytes of a work request.

use super::sys;
use super::wire::{Immediate, KeyParts};
use crate::region::{RemoteSlice, Slice};
use crate::signals::Inline;

/// The remote address and key of a request.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) key: u32,
}

impl Target {
    pub(super) fn of(slice: &RemoteSlice) -> Self {
        let parts = KeyParts::decode(slice.key.0);
        // Beyond the region, or wrapped around: the NIC refuses both.
        Self { address: parts.address().wrapping_add(slice.offset), key: parts.remote_key }
    }
}

/// The local bytes of a request.
#[derive(Clone, Copy)]
pub(super) enum Local<'a> {
    Nothing,
    RegisteredMemory { address: u64, length: u32, key: u32 },
    Inline(&'a Inline),
}

/// The bytes of a registered slice; their addresses are the same here and at peers.
pub(super) fn of_slice(slice: &Slice, key: u32) -> Local<'static> {
    Local::RegisteredMemory { address: Target::of(&slice.remote()).address, length: slice.len() as u32, key }
}

/// An operation on a peer's memory.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) opcode: u32,
    pub(super) flags: u32,
    /// In network order; for an opcode with an immediate.
    pub(super) immediate: u32,
    pub(super) target: Target,
}

/// A request without a completion.
#[inline]
pub(super) fn request(opcode: u32, target: Target) -> Request {
    Request { opcode, flags: 0, immediate: 0, target }
}

#[inline]
pub(super) fn with_immediate(target: Target, immediate: Immediate) -> Request {
    // Any completion wakes the completion queue; the flag is for NICs that need it.
    Request {
        opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
        flags: sys::IBV_SEND_SOLICITED,
        immediate: immediate.encode().to_be(),
        target,
    }
}
