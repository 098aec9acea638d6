//! Who is in a group whose processes come and go.
//!
//! A job outlives its processes. It runs in **epochs**: an epoch has fixed members, and a
//! [`Record`] says who they are, with which step the epoch begins, and what became of the step
//! before. Each record is a **write-once register**: whoever asks for the record of a number gets
//! the same one. The members of the epoch before make it, or a store outside the job does
//! ([`Maker`]).
//!
//! A [`Process`] is a **seat**, which is a stable number, and an **incarnation**, which no other
//! process has. Ranks of an epoch are its members in the order of their seats. Signals of an epoch
//! are seeded with the [`Digest`] of its record, so no signal of another epoch matches.
//!
//! [`Participant`] is one process's part in the agreement, and knows no time. All that safety needs
//! is there, and model checking walks through it. [`Membership`] is the state machine around it:
//! [`Membership::on`] takes what happened and the time, and returns what is to be done. It decides
//! whom to suspect, when to propose, and how to enter an epoch. Nothing here does I/O or reads a
//! clock.
//!
//! # Invariants
//!
//! 1. There is one record a number, the dead included.
//! 2. A step of which anybody was told that it is committed is committed in every later record.
//! 3. No step is lost or applied twice.
//! 4. Who is out changes no byte of a member that has entered.
//! 5. Any two members reach each other, or one of them is suspected.
//! 6. A planned join or leave costs no retry.
//! 7. Once faults stop, the members of the newest record have entered it within a bound.
//!
//! `docs/membership.md` has the argument and the numbers of states that were walked through.

#![forbid(unsafe_code)]

mod ballot;
mod certificate;
mod commit;
mod cover;
mod detector;
mod encoding;
mod identity;
pub mod membership;
pub mod message;
#[doc(hidden)]
pub mod mutant;
mod output;
pub mod participant;
mod plan;
mod quorum;
mod record;
mod register;
mod view;

pub use ballot::Ballot;
pub use certificate::Certificate;
pub use encoding::{DecodeError, put_process, take_process};
pub use identity::{Process, Seat};
pub use membership::{Input, Membership, Options};
pub use message::Message;
pub use output::Output;
pub use participant::{NotProposed, Participant};
pub use record::{
    CAUSES_MAX, COUNT_MAX, Cause, Digest, MEMBERS_MAX, RECORD_BYTES_MAX, Reason, Record, RecordError, Verdict,
};
pub use register::{Answer, Maker};
pub use view::View;
