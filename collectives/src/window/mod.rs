//! One-sided memory of a group: a rank publishes elements that its peers read, and has slots into
//! which its peers write. No rank waits for another one's call.
//!
//! | part | invariant |
//! | --- | --- |
//! | `layout` | what lies where, the same on all ranks |
//! | `version_line` | a mixture of two versions is found, and so is a number that was read while it changed |
//! | `memory` | a copy is overwritten only after the version line says so |
//! | `reads` | a read that ends holds one version, whatever its owner published meanwhile |
//! | `slots` | a slot is written again only after its credit; a write is polled once, in the order of its writer |
//! | [`OneSided`] | all of this for one rank, under the lock of its group |
//!
//! A window has a group of its own, as [`Group::split`](crate::Group::split) makes it. So it has a
//! device, deadlines, failures and signal slots of its own, and calls of the first group cost what
//! they cost without it. Signals of a window use the slots behind those of the group's own calls:
//! one for credits, then one for each slot.
//!
//! **Published memory.** An owner has a *version line* and two copies of its elements, which it
//! writes in turn: version `v` lies in copy `v mod 2`, with a [`Word`]. The line holds two numbers.
//! `begun` is the newest version of which a byte may be written, `published` the newest version
//! that is whole. To publish, the owner sets `begun`, writes the copy, then sets `published`. It
//! never waits. Version 0 is there from the beginning: zeros, and an empty word. Peers can only
//! read this memory (contract line 14).
//!
//! **A read** takes three steps, each begun when the one before has ended, because transfers have
//! no order but that (contract line 2): the version line, which gives `v`; the word and the
//! elements of version `v`; the version line again. Version `v + 2` overwrites the copy, and the
//! owner has set `begun` to `v + 2` before its first byte. So the elements are version `v` if
//! `begun` is at most `v + 1` afterwards. Otherwise the read begins again with the line that it
//! has. One publish during a read does no harm; only a second one makes the read begin again.
//!
//! That holds on every fabric, because nothing but the order of the three steps counts. Where
//! memory is mapped, this rank's processor reads it, with fences between the steps. An RDMA NIC
//! reads it at some time during each get. Over tcp the progress thread of the owner answers a get
//! with the bytes that it finds, a piece at a time, also while the owner publishes; the line is
//! asked for only when all pieces are here. A fabric may also read the line itself in pieces, while
//! it changes. So each number has its hash beside it, and a mixture of two numbers is found (but
//! for one in 2^64).
//!
//! **A write** is one put with a signal into the writer's own slot at the target: a header with the
//! number of the write (each writer counts its writes to a target) and its length, then the
//! elements. The [`Word`] is the signal's payload. Signals overtake each other, so the target takes
//! the writes of one writer by their numbers. When the caller's function has returned, the target
//! signals a credit. Credits are counted, not read: the counter of the signal slot is the number of
//! writes that were polled, whatever order the credits came in. A writer overwrites a slot when the
//! counter is above the number of the slot's last write.
//!
//! **Who polls.** A caller drives its own reads and writes. Where a transfer needs a poll of its
//! target (tcp, verbs), the target's progress thread polls as long as the window is there, so a
//! window needs [`Progress::Thread`](crate::Progress) on such fabrics. Elsewhere the thread runs
//! only for a started read, and for a credit that found a queue full.
//!
//! **Failures.** A transfer that fails, a peer that is lost or has left, and a deadline that passes
//! end the window's group, and every rank gets the group's verdict, after the fence. A stopped rank
//! can be read where its memory is reached without it (shm, RDMA); elsewhere the reader's deadline
//! names it. So does a writer's that waits for a credit.
//!
//! **Cost.** A window takes two copies of the elements, and `ranks * slots` slots of as many
//! elements, of which the system gives the pages that are touched. A read moves each byte once
//! where memory is mapped, registered or registered freely, else twice. A write moves each byte
//! once where memory is mapped, else twice.

mod layout;
mod memory;
mod one_sided;
#[cfg(test)]
mod overwritten;
mod reads;
mod slots;
#[cfg(test)]
mod trial;
mod version_line;
mod word;

pub(crate) use layout::{Layout, Terms, WORDS};
pub(crate) use memory::{Place, View};
pub(crate) use one_sided::{Awaited, OneSided, OwnMemory, staging_bytes};
pub(crate) use reads::{ReadId, Request, Target};
pub(crate) use slots::Arrived;
pub use word::Word;
