//! The atomics that signal slots and wake sources are made of: the standard library's, or loom's
//! where every interleaving is tried
//! (`RUSTFLAGS="--cfg loom" cargo test -p pleach-transport --lib --release loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
