//! The part of one process in the agreement on records and steps. It knows no time.
//!
//! All that safety needs is here, so the model checker walks through this code alone: whoever calls
//! may propose at any moment, any members, as often as wanted. When to propose, and whom, is
//! decided by [`Membership`](crate::Membership).
//!
//! **Invariants**
//!
//! * No two processes learn different records of one number, the dead included.
//! * A learned record is persisted before anybody is told of it ([`Output::Persist`] comes first).
//! * A process that has promised a ballot says nothing more about steps in its epoch.
//! * A record that a certificate names and that is newer is learned, not counted.

use std::collections::BTreeSet;
use std::sync::Arc;

use pleach_derive::ErrorDebug;

use crate::ballot::Ballot;
use crate::certificate::Certificate;
use crate::commit::StepCommit;
use crate::message::Message;
use crate::mutant::Mutant;
use crate::output::Output;
use crate::quorum::{Certificates, suffices};
use crate::record::Cause;
use crate::register::{Acceptor, Answer, Maker, Proposal};
use crate::{Process, Record, RecordError, Seat, Verdict};

/// Why a record cannot be proposed now.
#[derive(Clone, Copy, PartialEq, Eq, ErrorDebug, thiserror::Error)]
pub enum NotProposed {
    /// The process is no member of the newest epoch that it knows.
    #[error("only a member proposes: this process is out of the group, or has not joined")]
    NotMember,
    /// Nothing was asked, or a higher ballot was promised since.
    #[error("no ballot of this process is open: another member's is higher")]
    NoBallot,
    /// Too few have answered.
    #[error(
        "{answered} of {members} members have answered: a majority has to, or all that are not certified dead"
    )]
    NoQuorum {
        /// Those that answered.
        answered: usize,
        /// The members.
        members: usize,
    },
    /// The wanted members are none, too many, or two on one seat.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// One process's part; see the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Participant {
    process: Process,
    maker: Maker,
    latest: Option<Arc<Record>>,
    /// Whether it was a member and is none any more. It does not come back: what the others did
    /// meanwhile is lost to it, even where a later record names it again.
    is_out: bool,
    /// Of the record after the latest, as are the three that follow.
    acceptor: Acceptor,
    proposal: Option<Proposal>,
    rounds: u64,
    steps: Option<StepCommit>,
    certificates: Certificates,
    mutant: Option<Mutant>,
}

impl Participant {
    /// A process that has learned this record, or that waits to join.
    #[must_use]
    pub fn new(process: Process, maker: Maker, record: Option<Arc<Record>>) -> Self {
        let mut participant = Self {
            process,
            maker,
            latest: None,
            is_out: false,
            acceptor: Acceptor::default(),
            proposal: None,
            rounds: 0,
            steps: None,
            certificates: Certificates::new(),
            mutant: None,
        };
        if let Some(record) = record {
            participant.learn(record, &mut Vec::new());
        }
        participant
    }

    /// With a broken rule.
    #[doc(hidden)]
    #[must_use]
    pub fn with_mutant(self, mutant: Option<Mutant>) -> Self {
        Self { mutant, ..self }
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// The newest record that it has learned.
    #[must_use]
    pub fn latest(&self) -> Option<&Arc<Record>> {
        self.latest.as_ref()
    }

    /// The newest record, where the process is a member of it.
    #[must_use]
    pub fn epoch(&self) -> Option<&Arc<Record>> {
        self.latest.as_ref().filter(|record| !self.is_out && record.contains(self.process))
    }

    /// Whether it was a member and is none any more.
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.is_out
    }

    /// Whether it has promised a ballot and so does nothing more in this epoch.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.acceptor.promised().is_some()
    }

    /// The ballot that it has promised.
    #[must_use]
    pub fn promised(&self) -> Option<Ballot> {
        self.acceptor.promised()
    }

    /// The ballot of the record that it has accepted.
    #[must_use]
    pub fn accepted(&self) -> Option<Ballot> {
        self.acceptor.accepted().map(|(ballot, _)| *ballot)
    }

    /// The ballot that it has opened last.
    #[must_use]
    pub fn open_ballot(&self) -> Option<Ballot> {
        self.proposal.as_ref().map(Proposal::ballot)
    }

    /// Whether the last step of this epoch is over.
    #[must_use]
    pub fn is_halted(&self) -> bool {
        self.steps.as_ref().is_some_and(StepCommit::is_halted)
    }

    /// The step that is next or under way.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.steps.as_ref().map(StepCommit::step)
    }

    /// Whether this process knows that all members of this epoch are ready with a step of it.
    #[must_use]
    pub fn knows(&self, epoch: u64, step: u64) -> bool {
        let is_of = self.latest.as_ref().is_some_and(|latest| latest.number() == epoch);
        is_of && self.steps.as_ref().is_some_and(|steps| steps.known() > step)
    }

    /// Members that are not known to be ready with the step under way.
    #[must_use]
    pub fn unready(&self) -> Vec<Process> {
        let members = self.epoch().map_or(&[][..], |record| record.members());
        let is_ready = |rank: &usize| self.steps.as_ref().is_none_or(|steps| steps.is_ready_at(*rank));
        (0..members.len()).filter(|rank| !is_ready(rank)).map(|rank| members[rank]).collect()
    }

    /// The seats that have answered this process's ballot, and whether it is voted on.
    #[must_use]
    pub fn proposal(&self) -> Option<(BTreeSet<Seat>, bool)> {
        self.proposal.as_ref().map(|proposal| (proposal.heard(), proposal.record().is_some()))
    }

    /// Whether a process is certified dead.
    #[must_use]
    pub fn is_certified(&self, process: Process) -> bool {
        self.certificates.contains_key(&process)
    }

    /// All certificates that count in this epoch.
    pub fn certificates(&self) -> impl Iterator<Item = Certificate> {
        let certificate = |(process, learned): (&Process, &Option<Arc<Record>>)| Certificate {
            process: *process,
            learned: learned.clone(),
        };
        self.certificates.iter().map(certificate)
    }

    /// Whether answers of these seats suffice for the next record.
    #[must_use]
    pub fn suffices(&self, seats: &BTreeSet<Seat>) -> bool {
        self.epoch().is_some_and(|record| match self.maker {
            Maker::Members => suffices(record, seats, &self.certificates, self.mutant),
            Maker::Store => seats.contains(&self.process.seat),
        })
    }

    /// Begins the next step; `None` where that must wait for the next record.
    pub fn begin(&mut self) -> Option<u64> {
        if self.is_frozen() || self.epoch().is_none() { None } else { self.steps.as_mut()?.begin() }
    }

    /// The process is ready with its step. `halts`: a planned change waits for the step's end.
    pub fn ready(&mut self, halts: bool) -> Vec<Output> {
        let mut outputs = Vec::new();
        if !self.is_frozen()
            && self.epoch().is_some()
            && let Some(message) = self.steps.as_mut().and_then(|steps| steps.ready(halts))
        {
            self.broadcast(&message, &mut outputs);
            self.go_on(&mut outputs);
        }
        outputs
    }

    /// Opens a ballot for the next record, higher than any that this process has heard of.
    ///
    /// # Errors
    ///
    /// [`NotProposed::NotMember`].
    pub fn propose(&mut self) -> Result<Vec<Output>, NotProposed> {
        let number = self.epoch().ok_or(NotProposed::NotMember)?.number() + 1;
        self.rounds += 1;
        let ballot = Ballot { round: self.rounds, seat: self.process.seat };
        self.proposal = Some(Proposal::new(ballot));
        let mut outputs = Vec::new();
        self.broadcast(&Message::Prepare { number, ballot }, &mut outputs);
        Ok(outputs)
    }

    /// Proposes the record: these members, unless an answer binds it to another record.
    ///
    /// # Errors
    ///
    /// When the answers do not suffice, a higher ballot was promised, or the members make no
    /// record.
    pub fn decide(&mut self, members: Vec<Process>, causes: Vec<Cause>) -> Result<Vec<Output>, NotProposed> {
        let record = Arc::clone(self.epoch().ok_or(NotProposed::NotMember)?);
        let proposal = self.proposal.as_ref().ok_or(NotProposed::NoBallot)?;
        let is_overtaken = self.acceptor.promised().is_some_and(|promised| promised > proposal.ballot());
        if proposal.record().is_some() || is_overtaken {
            return Err(NotProposed::NoBallot);
        }
        let answered = proposal.heard();
        if !self.suffices(&answered) || !answered.contains(&self.process.seat) {
            let (answered, members) = (answered.len(), record.members().len());
            return Err(NotProposed::NoQuorum { answered, members });
        }
        let next = match proposal.bound() {
            Some(bound) => bound,
            None => {
                let (step, verdict) = proposal.verdict();
                Arc::new(record.next(members, step, verdict, causes)?)
            }
        };
        let ballot = proposal.ballot();
        if let Some(proposal) = &mut self.proposal {
            proposal.vote_on(Arc::clone(&next));
        }
        let mut outputs = Vec::new();
        match self.maker {
            Maker::Members => self.broadcast(&Message::Accept { ballot, record: next }, &mut outputs),
            Maker::Store => outputs.push(Output::WriteOnce(next)),
        }
        Ok(outputs)
    }

    /// A record stands in the store.
    pub fn stands(&mut self, record: Arc<Record>) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.adopt(record, true, &mut outputs);
        outputs
    }

    /// A certificate of death.
    pub fn certify(&mut self, certificate: &Certificate) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.certificates.insert(certificate.process, certificate.learned.clone());
        if let Some(learned) = &certificate.learned
            && self.mutant != Some(Mutant::CertificateWithoutRecord)
        {
            self.adopt(Arc::clone(learned), true, &mut outputs);
        }
        self.count_votes(&mut outputs);
        outputs
    }

    /// A message from a process.
    pub fn on(&mut self, from: Process, message: &Message) -> Vec<Output> {
        let mut outputs = Vec::new();
        match message {
            Message::Prepare { number, ballot } => {
                if self.is_of_next(from, *number, &mut outputs) && ballot.seat == from.seat {
                    self.prepare(from, *number, *ballot, &mut outputs);
                }
            }
            Message::Accept { ballot, record } => {
                let number = record.number();
                if self.is_of_next(from, number, &mut outputs) && ballot.seat == from.seat {
                    self.accept(from, *ballot, record, &mut outputs);
                }
            }
            Message::Promise { number, ballot, answer } => {
                if self.is_of_next(from, *number, &mut outputs)
                    && let Some(proposal) = &mut self.proposal
                {
                    proposal.answered(from.seat, *ballot, answer.clone());
                }
            }
            Message::Accepted { number, ballot } => {
                if self.is_of_next(from, *number, &mut outputs)
                    && let Some(proposal) = &mut self.proposal
                {
                    proposal.voted(from.seat, *ballot);
                    self.count_votes(&mut outputs);
                }
            }
            Message::Refused { number, promised } => {
                if self.is_of_next(from, *number, &mut outputs) {
                    self.rounds = self.rounds.max(promised.round);
                }
            }
            Message::Decided(record) => self.adopt(Arc::clone(record), false, &mut outputs),
            Message::Query(number) => {
                if let Some(latest) = &self.latest
                    && number.is_none_or(|number| number < latest.number())
                {
                    outputs.push(Output::Send { to: from, message: Message::Decided(Arc::clone(latest)) });
                }
            }
            Message::Ready { epoch, step, halts } => {
                self.hear_of_step(from, *epoch, &mut outputs, |steps, rank| {
                    steps.heard_ready(rank, *step, *halts);
                });
            }
            Message::Knows { epoch, step } => {
                self.hear_of_step(from, *epoch, &mut outputs, |steps, rank| steps.heard_knows(rank, *step));
            }
            Message::View(_) | Message::Certificate(_) | Message::Alive { .. } => {}
        }
        outputs
    }

    /// Says again what may have been lost: this member's steps and its open ballot.
    #[must_use]
    pub fn repeat(&self) -> Vec<Output> {
        let mut outputs = Vec::new();
        let Some(record) = self.epoch() else { return outputs };
        if let Some(proposal) = &self.proposal {
            let (number, ballot, heard) = (record.number() + 1, proposal.ballot(), proposal.heard());
            let message = match proposal.record() {
                None => Message::Prepare { number, ballot },
                Some(next) => Message::Accept { ballot, record: Arc::clone(next) },
            };
            let silent = record.members().iter().filter(|member| !heard.contains(&member.seat));
            outputs.extend(silent.map(|member| Output::Send { to: *member, message: message.clone() }));
        }
        if let (false, Some(steps)) = (self.is_frozen(), &self.steps) {
            for message in steps.repeat(record.step()) {
                self.broadcast(&message, &mut outputs);
            }
        }
        outputs
    }

    /// Whether a message is about the next record and from a member. Who is behind hears the latest
    /// record; who is ahead is asked for it.
    fn is_of_next(&self, from: Process, number: u64, outputs: &mut Vec<Output>) -> bool {
        let Some(latest) = &self.latest else { return false };
        if number <= latest.number() {
            outputs.push(Output::Send { to: from, message: Message::Decided(Arc::clone(latest)) });
        } else if number > latest.number() + 1 {
            outputs.push(Output::Send { to: from, message: Message::Query(Some(latest.number())) });
        }
        number == latest.number() + 1 && self.epoch().is_some() && latest.contains(from)
    }

    fn prepare(&mut self, from: Process, number: u64, ballot: Ballot, outputs: &mut Vec<Output>) {
        self.rounds = self.rounds.max(ballot.round);
        let message = match self.acceptor.promise(ballot) {
            Ok(()) => Message::Promise { number, ballot, answer: self.answer() },
            Err(promised) => Message::Refused { number, promised },
        };
        outputs.push(Output::Send { to: from, message });
    }

    fn answer(&self) -> Answer {
        let accepted = self.acceptor.accepted().cloned();
        let (known, begun) = self.steps.as_ref().map_or((0, None), |steps| (steps.known(), steps.begun()));
        Answer { accepted, known, begun }
    }

    fn accept(&mut self, from: Process, ballot: Ballot, record: &Arc<Record>, outputs: &mut Vec<Output>) {
        let number = record.number();
        if self.latest.as_ref().is_some_and(|latest| latest.digest() != record.previous()) {
            return; // A record of another history.
        }
        self.rounds = self.rounds.max(ballot.round);
        let message = match self.acceptor.accept(ballot, Arc::clone(record)) {
            Ok(()) => Message::Accepted { number, ballot },
            Err(promised) => Message::Refused { number, promised },
        };
        outputs.push(Output::Send { to: from, message });
    }

    /// Learns the record that is voted on where the votes suffice.
    fn count_votes(&mut self, outputs: &mut Vec<Output>) {
        let Some(proposal) = &self.proposal else { return };
        let Some(record) = proposal.record() else { return };
        let is_overtaken = self.acceptor.promised().is_some_and(|promised| promised > proposal.ballot());
        let is_counted = !is_overtaken || self.mutant == Some(Mutant::LowerBallotsCounted);
        if self.maker == Maker::Members && is_counted && self.suffices(&proposal.heard()) {
            let record = Arc::clone(record);
            self.adopt(record, true, outputs);
        }
    }

    /// Learns a record that stands, where it is newer. `tells`: tells the members of both epochs.
    fn adopt(&mut self, record: Arc<Record>, tells: bool, outputs: &mut Vec<Output>) {
        let is_newer = match &self.latest {
            None => record.contains(self.process),
            Some(latest) if record.number() == latest.number() + 1 => record.previous() == latest.digest(),
            Some(latest) => record.number() > latest.number(),
        };
        if !is_newer {
            return;
        }
        let mut receivers: BTreeSet<Process> = record.members().iter().copied().collect();
        receivers.extend(self.latest.iter().flat_map(|latest| latest.members()).copied());
        receivers.remove(&self.process);
        self.learn(Arc::clone(&record), outputs);
        if tells {
            let message = Message::Decided(record);
            outputs.extend(receivers.into_iter().map(|to| Output::Send { to, message: message.clone() }));
        }
    }

    fn learn(&mut self, record: Arc<Record>, outputs: &mut Vec<Output>) {
        outputs.push(Output::Persist(Arc::clone(&record)));
        let mut is_next = true;
        if let Some(latest) = &self.latest {
            is_next = record.number() == latest.number() + 1;
            self.is_out |= record.member_since(self.process).is_none_or(|since| since > latest.number());
        }
        // A later record than the next says what others did without those that were out meanwhile.
        if let Some(step) = self.steps.as_ref().and_then(StepCommit::begun)
            && (is_next || !self.is_out)
        {
            outputs.push(Output::Verdict { step, verdict: record.verdict_of(step) });
        }
        (self.acceptor, self.proposal, self.rounds) = (Acceptor::default(), None, 0);
        let (number, members, step) = (record.number(), record.members().len(), record.step());
        let rank = record.rank_of(self.process).filter(|_| !self.is_out);
        self.steps = rank.map(|rank| StepCommit::new(number, rank, members, step));
        // The dead of earlier epochs are no members any more.
        self.certificates.retain(|process, _| record.contains(*process));
        outputs.push(Output::Learned(Arc::clone(&record)));
        self.latest = Some(record);
    }

    fn hear_of_step(
        &mut self,
        from: Process,
        epoch: u64,
        outputs: &mut Vec<Output>,
        hear: impl FnOnce(&mut StepCommit, usize),
    ) {
        let Some(latest) = self.latest.as_ref() else { return };
        if epoch != latest.number() {
            // Who is ahead is asked, who is behind is told.
            let is_ahead = u64::from(epoch > latest.number());
            let _ = self.is_of_next(from, epoch.saturating_add(is_ahead), outputs);
            return;
        }
        let Some(rank) = latest.rank_of(from) else { return };
        if self.is_frozen() {
            return;
        }
        let Some(steps) = &mut self.steps else { return };
        hear(steps, rank);
        self.go_on(outputs);
    }

    /// Takes every round of the commit that can be taken.
    fn go_on(&mut self, outputs: &mut Vec<Output>) {
        let mutant = self.mutant;
        while let Some(steps) = &mut self.steps {
            if let Some(message) = steps.learn_ready() {
                self.broadcast(&message, outputs);
            } else if let Some(step) = steps.tell(mutant) {
                outputs.push(Output::Verdict { step, verdict: Verdict::Committed });
            } else {
                return;
            }
        }
    }

    /// To all members. What is about records comes to this process too, as to any other.
    fn broadcast(&self, message: &Message, outputs: &mut Vec<Output>) {
        let includes_self = !matches!(message, Message::Ready { .. } | Message::Knows { .. });
        let members = self.epoch().map_or(&[][..], |record| record.members());
        let receivers = members.iter().filter(|member| includes_self || **member != self.process);
        outputs.extend(receivers.map(|to| Output::Send { to: *to, message: message.clone() }));
    }
}
