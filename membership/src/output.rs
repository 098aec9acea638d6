//! What this crate asks of the process that it runs in.

use std::sync::Arc;

use crate::message::Message;
use crate::{Process, Record, Verdict};

/// What is asked of the process, in this order. A [`Participant`](crate::Participant) asks for the
/// first five alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// Writes the record to the word that outlives the process.
    Persist(
        /// The record.
        Arc<Record>,
    ),
    /// Sends a message. A message to the process itself is delivered like any other. Where no
    /// connection to the receiver is open, one is opened.
    Send {
        /// The receiver.
        to: Process,
        /// The message.
        message: Message,
    },
    /// Writes the record to the store if no record of its number stands there, and says what stands
    /// ([`Participant::stands`](crate::Participant::stands)).
    WriteOnce(
        /// The record.
        Arc<Record>,
    ),
    /// The verdict of a step that this process had begun: the same on all members.
    Verdict {
        /// The step.
        step: u64,
        /// Its verdict.
        verdict: Verdict,
    },
    /// A record was learned. The process may be in it or not.
    Learned(
        /// The record.
        Arc<Record>,
    ),
    /// Says what stands in the store under this number, if anything does.
    ReadStore(
        /// The record's number.
        u64,
    ),
    /// Connects to a process, where it is not connected, and says
    /// [`Connected`](crate::Input::Connected).
    Connect(
        /// The process.
        Process,
    ),
    /// Severs a process that is out: from then on it changes no byte here.
    Sever(
        /// The process.
        Process,
    ),
    /// Drains the pair with a member, and says [`Drained`](crate::Input::Drained).
    Drain {
        /// The member.
        peer: Process,
        /// The number of the epoch that is being entered.
        epoch: u64,
    },
    /// The epoch is entered: who is out is severed, and all pairs are drained. Steps may begin.
    Enter(
        /// Its record.
        Arc<Record>,
    ),
    /// The process is out, and all its pairs have to be severed. Its buffers are its own again. It
    /// may join as a new incarnation.
    Expelled(
        /// The record that does without it.
        Arc<Record>,
    ),
    /// Too few members can be asked for the next record. The process goes on trying.
    NoQuorum {
        /// Those that answer.
        answered: usize,
        /// The members of the epoch.
        members: usize,
    },
}
