//! Requests as the NIC takes them: what they name here and at the peer.

use super::sys;
use super::wire::{Immediate, KeyParts};
use crate::region::{RemoteSlice, Slice};
use crate::signals::Inline;

/// A peer's memory as requests name it.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) key: u32,
}

impl Target {
    pub(super) fn of(slice: &RemoteSlice) -> Self {
        let parts = KeyParts::decode(slice.key.0);
        // Beyond the region or around the end of all addresses: the NIC refuses either.
        Self { address: parts.address().wrapping_add(slice.offset), key: parts.remote_key }
    }
}

/// Bytes of this rank as requests name them.
#[derive(Clone, Copy)]
pub(super) enum Local<'a> {
    Nothing,
    Registered { address: u64, length: u32, key: u32 },
    Carried(&'a Inline),
}

/// Registered bytes go by the same addresses here as at peers.
pub(super) fn of_slice(slice: &Slice, key: u32) -> Local<'static> {
    Local::Registered { address: Target::of(&slice.remote()).address, length: slice.len() as u32, key }
}

/// What the NIC is asked to do at a peer's memory.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) opcode: u32,
    pub(super) flags: u32,
    /// As it travels; of an opcode with an immediate.
    pub(super) immediate: u32,
    pub(super) target: Target,
}

/// One that asks for no completion.
#[inline]
pub(super) fn request(opcode: u32, target: Target) -> Request {
    Request { opcode, flags: 0, immediate: 0, target }
}

#[inline]
pub(super) fn with_immediate(target: Target, immediate: Immediate) -> Request {
    // Who sleeps on the completion queue is woken by any completion; the flag is for NICs that wake
    // by those alone.
    Request {
        opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
        flags: sys::IBV_SEND_SOLICITED,
        immediate: immediate.encode().to_be(),
        target,
    }
}
