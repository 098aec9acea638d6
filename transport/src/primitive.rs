//! The atomics of signal slots and wake sources: the standard library's, or loom's for the tests of
//! all interleavings
//! (`RUSTFLAGS="--cfg loom" cargo test -p pleach-transport --lib --release loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
