//! The write-once register that holds the record of one number.
//!
//! Two makers stand behind one abstraction. The **members** of the epoch before agree by
//! single-decree Paxos (Lamport, Paxos Made Simple, 2001): [`Acceptor`] is the part that answers,
//! [`Proposal`] the part that asks. An outside **store** writes a key if it is not there and says
//! what stands. In both cases the proposer first asks members what they know of the step under way,
//! and a member that was asked goes no further in this epoch.
//!
//! **Invariant:** an acceptor promises ballots in ascending order and accepts none below its
//! promise. A proposer counts no votes of its ballot once it has promised a higher one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ballot::Ballot;
use crate::{Record, Seat, Verdict};

/// Who makes the records of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Maker {
    /// The members of the epoch before.
    Members,
    /// A store outside the job, which creates a key only once.
    Store,
}

/// A member's answer to a ballot: what it has accepted, and what it knows of steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Answer {
    /// The record of the highest ballot that it accepted.
    pub accepted: Option<(Ballot, Arc<Record>)>,
    /// The first step that it does not know to be ready everywhere.
    pub known: u64,
    /// The step that it has begun and of whose end it was not told.
    pub begun: Option<u64>,
}

/// What one member has promised and accepted for the next record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Acceptor {
    promised: Option<Ballot>,
    accepted: Option<(Ballot, Arc<Record>)>,
}

impl Acceptor {
    /// The highest ballot that it promised.
    pub(crate) fn promised(&self) -> Option<Ballot> {
        self.promised
    }

    pub(crate) fn accepted(&self) -> Option<&(Ballot, Arc<Record>)> {
        self.accepted.as_ref()
    }

    /// Promises a ballot.
    ///
    /// # Errors
    ///
    /// The higher ballot that it has promised.
    pub(crate) fn promise(&mut self, ballot: Ballot) -> Result<(), Ballot> {
        if let Some(higher) = self.promised.filter(|promised| *promised > ballot) {
            return Err(higher);
        }
        self.promised = Some(ballot);
        Ok(())
    }

    /// Accepts a record.
    ///
    /// # Errors
    ///
    /// The higher ballot that it has promised.
    pub(crate) fn accept(&mut self, ballot: Ballot, record: Arc<Record>) -> Result<(), Ballot> {
        self.promise(ballot)?;
        self.accepted = Some((ballot, record));
        Ok(())
    }
}

/// An attempt of one member to make the next record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Proposal {
    ballot: Ballot,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Asking(BTreeMap<Seat, Answer>),
    Voting(Arc<Record>, BTreeSet<Seat>),
}

impl Proposal {
    pub(crate) fn new(ballot: Ballot) -> Self {
        Self { ballot, stage: Stage::Asking(BTreeMap::new()) }
    }

    pub(crate) fn ballot(&self) -> Ballot {
        self.ballot
    }

    /// The record that is voted on.
    pub(crate) fn record(&self) -> Option<&Arc<Record>> {
        match &self.stage {
            Stage::Asking(_) => None,
            Stage::Voting(record, _) => Some(record),
        }
    }

    /// The seats that have answered in this stage.
    pub(crate) fn heard(&self) -> BTreeSet<Seat> {
        match &self.stage {
            Stage::Asking(answers) => answers.keys().copied().collect(),
            Stage::Voting(_, votes) => votes.clone(),
        }
    }

    pub(crate) fn answered(&mut self, seat: Seat, ballot: Ballot, answer: Answer) {
        if let Stage::Asking(answers) = &mut self.stage
            && ballot == self.ballot
        {
            answers.insert(seat, answer);
        }
    }

    /// The record that has to be proposed: that of the highest ballot among the answers.
    pub(crate) fn bound(&self) -> Option<Arc<Record>> {
        let Stage::Asking(answers) = &self.stage else { return None };
        let accepted = answers.values().filter_map(|answer| answer.accepted.as_ref());
        accepted.max_by_key(|(ballot, _)| *ballot).map(|(_, record)| Arc::clone(record))
    }

    /// The step with which the next epoch begins, and the verdict, by the answers.
    pub(crate) fn verdict(&self) -> (u64, Verdict) {
        let Stage::Asking(answers) = &self.stage else { return (0, Verdict::Retry) };
        let step = answers.values().map(|answer| answer.known).max().unwrap_or(0);
        let is_begun = answers.values().any(|answer| answer.begun.is_some_and(|begun| begun >= step));
        (step, if is_begun { Verdict::Retry } else { Verdict::Committed })
    }

    pub(crate) fn vote_on(&mut self, record: Arc<Record>) {
        self.stage = Stage::Voting(record, BTreeSet::new());
    }

    pub(crate) fn voted(&mut self, seat: Seat, ballot: Ballot) {
        if let Stage::Voting(_, votes) = &mut self.stage
            && ballot == self.ballot
        {
            votes.insert(seat);
        }
    }
}
