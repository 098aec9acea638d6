//! Certificates of death.
//!
//! **Invariant:** only who saw a process end gives a certificate: its host's kernel by a pidfd, the
//! launcher that reaped it, or a person who answers for it. A silent peer, a reset connection and
//! an expired deadline are suspicions and never certificates. The certificate names the last record
//! that the dead process had learned, read from the word that outlives it
//! ([`Output::Persist`](crate::Output::Persist)).

use std::sync::Arc;

use crate::{Process, Record};

/// The word of a witness that a process has ended, with the last record that it had learned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Certificate {
    /// The process that has ended.
    pub process: Process,
    /// The last record that it had learned. `None`: it had learned none, as a joiner.
    pub learned: Option<Arc<Record>>,
}
