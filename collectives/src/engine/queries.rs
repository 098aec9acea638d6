//! Queries: the peers that a run waits for, and their answers.
//!
//! A rank whose run makes no progress for [`QUERY_AFTER`], times the ranks of its processor,
//! queries the peers that the run waits for: what are you doing in this run? Their status boards
//! answer, so a peer that is in no call answers too. An answer tells that the peer is in another
//! call, how far the peer is, and for whom the peer waits itself.
//!
//! **Invariant:** a peer has at most one unanswered query of this rank. So a peer that is stopped
//! is sent one, however long it is waited for. (Where the pair is not connected, other ranks pass
//! the query on, and one that may be lost is sent again.)

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::Rank;

use super::admission::Due;
use super::deadlock::PROBE_INTERVAL_MAX;
use super::fault::{Fault, FaultKind};
use super::message::Message;
use super::status_board::{Comparison, Record};
use super::{Context, Engine, Stream};

/// How long a run may make no progress before peers are queried about it.
pub const QUERY_AFTER: Duration = Duration::from_millis(1);
/// Longest time between two such queries.
pub(super) const QUERY_INTERVAL_MAX: Duration = Duration::from_millis(32);
/// How often the time between two queries doubles at most.
pub(super) const QUERY_DOUBLINGS_MAX: u32 = 5;
const _: () = assert!(QUERY_AFTER.as_nanos() << QUERY_DOUBLINGS_MAX >= QUERY_INTERVAL_MAX.as_nanos());
/// A peer that has not answered for so long is silent, whatever it said before.
const SILENT_AFTER: Duration = Duration::from_millis(100);
/// A run that no rank makes: a query about it asks for nothing but a sign of life.
const NO_RUN: u64 = u64::MAX;

/// A query that is unanswered.
#[derive(Clone, Copy)]
struct OpenQuery {
    since: Nanos,
    about: (Stream, u64),
}

/// A peer's last answer. `blocked_on`: the rank that the peer waits for itself.
struct Answer {
    about: (Stream, u64),
    comparison: Comparison,
    blocked_on: Option<Rank>,
}

/// The queries to peers, and their last answers.
#[derive(Default)]
pub(super) struct Queries {
    answers: BTreeMap<Rank, Answer>,
    open: BTreeMap<Rank, OpenQuery>,
    /// Peers that have left and answer no more.
    left: BTreeSet<Rank>,
}

impl Queries {
    /// The peer has left.
    pub(super) fn has_left(&mut self, peer: Rank) {
        self.left.insert(peer);
    }

    /// The lowest rank that has left.
    pub(crate) fn first_departed(&self) -> Option<Rank> {
        self.left.first().copied()
    }

    /// How many ranks have left.
    pub(crate) fn departures(&self) -> usize {
        self.left.len()
    }

    /// Whether the peer has left.
    pub(crate) fn has_departed(&self, peer: Rank) -> bool {
        self.left.contains(&peer)
    }

    /// This rank was not polled for so long: answers that came meanwhile were not read.
    pub(super) fn postpone(&mut self, unseen: Duration) {
        self.open.values_mut().for_each(|query| query.since += unseen);
    }

    /// Since when the peer has not answered, if that is long.
    fn silent_since(&self, peer: Rank, now: Nanos) -> Option<Nanos> {
        let since = self.open.get(&peer).map(|query| query.since);
        since.filter(|since| now.since(*since) >= SILENT_AFTER)
    }

    /// The peer's last answer, if it is about this run.
    fn answer(&self, peer: Rank, about: (Stream, u64)) -> Option<&Answer> {
        self.answers.get(&peer).filter(|answer| answer.about == about)
    }

    /// Queries a peer about a run; false where a query about another run is unanswered.
    fn send(
        &mut self,
        context: &mut Context,
        peer: Rank,
        stream: Stream,
        record: Record,
        now: Nanos,
    ) -> bool {
        let about = (stream, record.run());
        if let Some(query) = self.open.get(&peer) {
            let may_be_lost = !context.scratch.is_connected(peer) && now.since(query.since) >= SILENT_AFTER;
            if !may_be_lost {
                return query.about == about;
            }
        }
        if context.post(peer, &Message::Query { stream, record }.encode()).is_ok() {
            self.open.insert(peer, OpenQuery { since: now, about });
        }
        true
    }

    /// Which of the peers that `own`'s run waits for is the cause, by what they say, and how to put
    /// it. In this order: a peer that says nothing; a peer that has not made the call, or the rank
    /// that it waits for in another one; the rank that a peer in the call waits for; any peer.
    fn blame(
        &self,
        own: Rank,
        about: (Stream, u64),
        peers: &BTreeMap<Rank, String>,
        now: Nanos,
    ) -> Option<(Rank, String)> {
        let since = |peer: Rank| self.silent_since(peer, now);
        if let Some((peer, step)) =
            peers.iter().filter(|(peer, _)| since(**peer).is_some()).min_by_key(|(peer, _)| since(**peer))
        {
            return Some((*peer, format!("it does not say any more what it is doing ({step})")));
        }
        let answer = |peer: Rank| self.answer(peer, about);
        if let Some((peer, step)) = peers.iter().find(|(peer, _)| answer(**peer).is_none()) {
            return Some((*peer, format!("it does not say what it is doing ({step})")));
        }
        let is_absent =
            |peer: &Rank| answer(*peer).is_some_and(|answer| answer.comparison == Comparison::NotYet);
        if let Some((peer, step)) = peers.iter().find(|(peer, _)| is_absent(peer)) {
            return Some(match answer(*peer).and_then(|answer| answer.blocked_on) {
                // A peer that is a call behind waits for the cause.
                Some(other) if other != own && !peers.contains_key(&other) => {
                    let behind = format!("rank {peer} has not made this call yet");
                    (other, format!("{behind}, as it waits in another one for rank {other} ({step})"))
                }
                Some(other) => {
                    let absent = "it has not made this call yet";
                    (*peer, format!("{absent}, as it waits in another one for rank {other} ({step})"))
                }
                None => (*peer, format!("it has not made this call yet ({step})")),
            });
        }
        let behind = peers.keys().find_map(|peer| Some((*peer, answer(*peer)?.blocked_on?)));
        if let Some((peer, culprit)) = behind.filter(|(_, culprit)| *culprit != own) {
            return Some((culprit, format!("rank {peer} waits for it ({} of rank {peer})", peers[&peer])));
        }
        peers.iter().next().map(|(peer, step)| (*peer, step.clone()))
    }
}

impl Engine {
    /// Asks a peer for a sign of life, unless a query to it is unanswered. False if it cannot be
    /// asked now.
    pub(crate) fn ask_for_life(&mut self, peer: Rank, now: Nanos) -> bool {
        if peer == self.context.rank {
            return true;
        }
        self.queries.send(&mut self.context, peer, Stream::Collectives, Record::nothing(NO_RUN), now);
        self.queries.open.contains_key(&peer)
    }

    /// Whether a peer that was asked lives; `Err`: that is not known yet, and to be looked at again
    /// at this time. (A rank that looks too seldom does not know whether an answer has come.)
    pub(crate) fn lives(&self, peer: Rank, now: Nanos) -> Result<bool, Nanos> {
        match self.queries.open.get(&peer) {
            None => Ok(true),
            Some(_) if self.queries.silent_since(peer, now).is_some() => Ok(false),
            Some(query) => Err((query.since + SILENT_AFTER).min(now + QUERY_INTERVAL_MAX)),
        }
    }

    /// Deadlines, departed peers and queries; true when something failed.
    pub(super) fn check_time(&mut self, now: Nanos) -> bool {
        for index in 0..self.admission.unfinished().len() {
            let slot = self.admission.unfinished()[index];
            let (due, goes_on) = self.admission.due(slot, now);
            if goes_on {
                self.board.block_on(None);
            }
            let fault = match due {
                Due::Nothing => continue,
                Due::Query => self.query(slot, now),
                Due::Fault => Some(self.timed_out(slot, now)),
            };
            if let Some(fault) = fault {
                self.fail(fault, now);
                return true;
            }
            self.probe_for_deadlock(slot, now);
            if self.deadlocks.suspects(slot) {
                self.admission.query_by(slot, now + PROBE_INTERVAL_MAX);
            }
        }
        false
    }

    /// Sets how many ranks take turns on this rank's processor, itself included.
    pub fn share_processor(&mut self, ranks: u32) {
        self.admission.share_processor(ranks);
    }

    /// Peers that a run waits for, with the first step that does.
    pub(super) fn waits_for(&self, slot: u8) -> BTreeMap<Rank, String> {
        let mut peers = BTreeMap::new();
        if let Some(program) = self.admission.unconnected_program(slot) {
            let missing = program.peers().iter().filter(|peer| !self.context.scratch.has(**peer));
            peers.extend(missing.map(|peer| (*peer, "connecting to it".to_owned())));
        }
        if let Some(run) = self.admission.active(slot) {
            run.waits_for(&self.context.signals, &mut |peer, step| {
                peers.entry(peer).or_insert_with(step);
            });
        }
        peers
    }

    /// Queries the peers that a run waits for; a fault when one of them has left.
    fn query(&mut self, slot: u8, now: Nanos) -> Option<Fault> {
        let run = self.admission.run(slot)?;
        let (stream, number) = (run.stream(), run.number());
        let peers = self.waits_for(slot);
        let blamed = self.queries.blame(self.context.rank, (stream, number), &peers, now);
        self.board.block_on(blamed.map(|(peer, _)| peer));
        for (peer, step) in peers {
            if self.queries.left.contains(&peer) {
                return Some(self.fault_of_left(slot, peer, step, now));
            }
            let record = self.board.record_for(peer, stream, number).ok()?;
            if !self.queries.send(&mut self.context, peer, stream, record, now) {
                // A query about another run is unanswered: this run has its turn after the answer.
                self.admission.query_by(slot, now + QUERY_AFTER);
            }
        }
        None
    }

    /// A run waits for a peer that has left: the peer made fewer calls, or another one, as its
    /// signal says. The peer does not answer any more which call that was.
    fn fault_of_left(&self, slot: u8, peer: Rank, step: String, now: Nanos) -> Fault {
        let run = self.admission.run(slot);
        if !run.is_some_and(|run| run.differs_by_signal(&self.context.signals, peer)) {
            return self.fault(FaultKind::Left, peer, step, Some(slot), now);
        }
        self.fault(FaultKind::Mismatch, peer, String::new(), Some(slot), now)
    }

    fn timed_out(&self, slot: u8, now: Nanos) -> Fault {
        let own = self.context.rank;
        let peers = self.waits_for(slot);
        let run = self.admission.run(slot);
        let blamed = run.and_then(|run| self.queries.blame(own, (run.stream(), run.number()), &peers, now));
        let (subject, detail) = match blamed {
            Some(found) => found,
            None if self.admission.is_gated(slot) => {
                (own, "the stream's work from before the call, which the GPU has not done".to_owned())
            }
            None if self.is_ready() => (own, "work of its own (earlier calls are unfinished)".to_owned()),
            None => (self.not_ready().next().unwrap_or(own), "joining the group".to_owned()),
        };
        self.fault(FaultKind::TimedOut, subject, detail, Some(slot), now)
    }

    /// A peer has answered a query.
    pub(super) fn read_answer(
        &mut self,
        peer: Rank,
        stream: Stream,
        comparison: Comparison,
        record: &Record,
        blocked_on: Option<Rank>,
        now: Nanos,
    ) {
        self.queries.open.remove(&peer);
        match comparison {
            Comparison::Different => self.compare(peer, stream, record, now),
            Comparison::EarlierDiffers => self.query_earlier(peer, stream, record.run()),
            Comparison::Same | Comparison::NotYet | Comparison::Forgotten => {}
        }
        self.queries.answers.insert(peer, Answer { about: (stream, record.run()), comparison, blocked_on });
    }

    /// A peer was in another call: unless it lies, the group has failed.
    pub(super) fn compare(&mut self, peer: Rank, stream: Stream, theirs: &Record, now: Nanos) {
        let Ok(own) = self.board.record_for(peer, stream, theirs.run()) else { return };
        if own.is_same_call(theirs) {
            return;
        }
        let fault = self.fault(FaultKind::Mismatch, peer, String::new(), None, now);
        let (during, theirs) = (own.call(), theirs.call());
        self.fail(Fault { run: own.run(), during, theirs, ..fault }, now);
    }

    fn query_earlier(&mut self, peer: Rank, stream: Stream, run: u64) {
        if let Some(earlier) = run.checked_sub(1)
            && let Ok(record) = self.board.record_for(peer, stream, earlier)
        {
            let seen_at = self.observer.seen_at();
            self.queries.send(&mut self.context, peer, stream, record, seen_at);
        }
    }
}
