//! Whose answers suffice to make a record.
//!
//! The members of an epoch make the record of the next one. Their answers suffice when they come
//! from a strict majority, or from every member that has no certificate of death. A certificate
//! counts only while it names no newer record than the asker's: a newer one is adopted
//! ([`crate::participant`]).
//!
//! **Invariant:** of two sets that suffice, one has a member of the other, or all that the one
//! lacks have ended without learning a newer record. In the second case nobody but a live proposer
//! can have counted the votes of the dead, and this proposer has promised the higher ballot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::mutant::Mutant;
use crate::{Process, Record, Seat};

/// Certificates by process, with the last record that the process had learned.
pub(crate) type Certificates = BTreeMap<Process, Option<Arc<Record>>>;

/// Whether the answers of these seats suffice in the epoch of this record.
pub(crate) fn suffices(
    record: &Record,
    answers: &BTreeSet<Seat>,
    certificates: &Certificates,
    mutant: Option<Mutant>,
) -> bool {
    let members = record.members();
    let (answered, silent): (Vec<Process>, Vec<Process>) =
        members.iter().partition(|member| answers.contains(&member.seat));
    if answered.is_empty() {
        return false;
    }
    if 2 * answered.len() > members.len() || mutant == Some(Mutant::SilenceIsDeath) {
        return true;
    }
    silent.iter().all(|member| {
        certificates.get(member).is_some_and(|learned| {
            let is_newer = learned.as_ref().is_some_and(|learned| learned.number() > record.number());
            !is_newer || mutant == Some(Mutant::CertificateWithoutRecord)
        })
    })
}
