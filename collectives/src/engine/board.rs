//! The board: what this rank tells and hears while its engine may be busy elsewhere.
//!
//! Shared by the engine (which writes what it does and reads the news), the device's watcher (which
//! answers peers' questions and stores what they say) and whoever aborts. The engine's fast path
//! costs one relaxed load ([`Board::news`]) and, once a run, a few stores into the records of its
//! stream.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_transport::{LossCause, RemoteSlice, Responder};
use pleach_vocabulary::Rank;

use super::agreement::Agreement;
use super::bank::EAGER_BANKS;
use super::fault::{Fault, FaultKind};
use super::message::{Blocked, Message, NO_RANK, Record, Standing, Verdict};
use super::records::Records;
use super::stream::Stream;
use crate::call::{Amount, Descriptor, Paired};

/// How many runs back this rank can say what it did.
const RECORDS: usize = 64;

/// How many messages back, for each peer and direction: more than a sender may be ahead.
const MESSAGE_RECORDS: usize = 16;
const _: () = assert!(MESSAGE_RECORDS as u64 > EAGER_BANKS);

/// Of the messages from one rank to another.
pub(super) type Messages = Records<MESSAGE_RECORDS>;

/// What peers said and the engine has not read yet.
#[derive(Default)]
pub(super) struct News {
    pub(super) scratch: Vec<(Rank, RemoteSlice)>,
    pub(super) answers: Vec<Answer>,
    /// Where peers stand that were asked for it.
    pub(super) standings: Vec<(Rank, Standing)>,
    /// Peers that asked about a run of ours and are in another call there.
    pub(super) differs: Vec<(Rank, Stream, Record)>,
}

/// What a peer said of a run.
pub(super) struct Answer {
    pub(super) peer: Rank,
    pub(super) stream: Stream,
    pub(super) verdict: Verdict,
    pub(super) record: Record,
    pub(super) completed: u64,
    pub(super) blocked_on: Option<Rank>,
}

/// Most unread answers kept; more come only from a peer that talks without being asked.
const UNREAD_MAX: usize = 4096;

/// See the module.
pub struct Board {
    rank: Rank,
    /// Something is in `inbox`. Release stores pair with the engine's acquire swap.
    news: AtomicBool,
    inbox: Mutex<News>,
    /// Why the group has failed, once it has.
    agreement: Mutex<Agreement>,
    /// Of the group's collectives.
    collectives: Records<RECORDS>,
    /// By sender and receiver, one of which this rank is.
    messages: Mutex<BTreeMap<(Rank, Rank), Arc<Messages>>>,
    /// The counts of the last runs in which only the two ends of a part know its length, by the
    /// number of the run.
    paired: Mutex<VecDeque<(u64, Arc<Paired>)>>,
    /// For whom this rank waits. Relaxed: only told to those who ask.
    blocked_on: AtomicU64,
    /// Where it waits, if it can make no other call before.
    blocked: Mutex<Option<Blocked>>,
}

fn unpoisoned<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is consistent between any two statements, so a panic elsewhere does
    // not spoil it.
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    /// The board of `rank`; to be given to its device as [`Responder`] and to its engine.
    #[must_use]
    pub fn new(rank: Rank) -> Self {
        Self {
            rank,
            news: AtomicBool::new(false),
            inbox: Mutex::new(News::default()),
            agreement: Mutex::new(Agreement::new(rank)),
            collectives: Records::new(),
            messages: Mutex::new(BTreeMap::new()),
            paired: Mutex::new(VecDeque::new()),
            blocked_on: AtomicU64::new(NO_RANK),
            blocked: Mutex::new(None),
        }
    }

    /// Ends the group's work here, and on all ranks as soon as the engine looks or a peer asks. The
    /// caller wakes the device.
    pub fn abort(&self) {
        self.propose(self.fault(FaultKind::Aborted, self.rank, String::new()));
    }

    /// A fault as this rank finds it while its engine may be busy elsewhere.
    fn fault(&self, kind: FaultKind, subject: Rank, detail: String) -> Fault {
        let (run, during) = self.position();
        let (found_by, waited) = (self.rank, Duration::ZERO);
        Fault {
            kind,
            found_by,
            subject,
            loss: None,
            run,
            during,
            theirs: None,
            detail,
            waited,
            told_during: None,
        }
    }

    /// The number and the call of the oldest run under way; without one the number of the next
    /// collective.
    fn position(&self) -> (u64, Option<Descriptor>) {
        let called = |record: Result<Record, Verdict>| record.ok().and_then(|record| record.describe());
        // In this order: a run that is complete by now has begun.
        let completed = self.collectives.completed();
        if completed < self.collectives.begun() {
            return (completed, called(self.collectives.record(completed)));
        }
        let messages = unpoisoned(&self.messages);
        let unfinished = messages.values().find_map(|messages| {
            let run = messages.completed();
            (run < messages.begun()).then(|| (run, called(messages.record(run))))
        });
        unfinished.unwrap_or((completed, None))
    }

    /// This rank has found a fault; it counts if nothing has failed before.
    pub(super) fn propose(&self, fault: Fault) {
        self.agreement().propose(fault);
        self.news.store(true, Ordering::Release);
    }

    /// What this rank knows of how the group ends.
    pub(super) fn agreement(&self) -> MutexGuard<'_, Agreement> {
        unpoisoned(&self.agreement)
    }

    /// Whether anything has failed, here or at a peer that has said so.
    pub(super) fn has_failed(&self) -> bool {
        self.agreement().claim().is_some()
    }

    /// The answer of a rank whose group has failed.
    fn claimed(&self) -> Option<Vec<u8>> {
        let claim = self.agreement().claim()?.clone();
        Some(Message::Claim { claim, asks: false }.encode())
    }

    /// Whether there is news: the fast path's look.
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed)
    }

    pub(super) fn take_news(&self) -> News {
        self.news.swap(false, Ordering::Acquire);
        std::mem::take(&mut *unpoisoned(&self.inbox))
    }

    /// The engine is about to enter a run with such counts.
    pub(super) fn begin_paired(&self, run: u64, counts: Arc<Paired>) {
        let mut paired = unpoisoned(&self.paired);
        if paired.len() == RECORDS {
            paired.pop_front();
        }
        paired.push_back((run, counts));
    }

    /// What this rank did in the group's collectives, to be written by its engine.
    pub(super) fn collectives(&self) -> &Records<RECORDS> {
        &self.collectives
    }

    /// The same for the messages from one rank to another.
    pub(super) fn messages(&self, from: Rank, to: Rank) -> Arc<Messages> {
        unpoisoned(&self.messages).entry((from, to)).or_insert_with(|| Arc::new(Records::new())).clone()
    }

    /// Whom this rank waits for, as far as it knows.
    pub(super) fn block_on(&self, peer: Option<Rank>) {
        self.blocked_on.store(peer.map_or(NO_RANK, u64::from), Ordering::Relaxed);
    }

    /// Where this rank waits, if it can make no other call before; to be taken back before it does.
    pub(super) fn stand(&self, blocked: Option<Blocked>) {
        *unpoisoned(&self.blocked) = blocked;
    }

    /// For whom this rank waits, once that has taken a millisecond.
    pub(crate) fn waits_for(&self) -> Option<Rank> {
        Rank::try_from(self.blocked_on.load(Ordering::Relaxed)).ok()
    }

    /// Collectives that this rank has begun and not completed.
    pub(crate) fn under_way(&self) -> u64 {
        // In this order: the difference is never below zero.
        let completed = self.collectives.completed();
        self.collectives.begun().saturating_sub(completed)
    }

    /// Collectives that this rank has completed, each with its result.
    pub(crate) fn completed_collectives(&self) -> u64 {
        self.collectives.completed()
    }

    /// The collectives begun last, oldest first.
    pub(crate) fn last_calls(&self) -> Vec<(u64, Descriptor)> {
        let described = |run| Some((run, self.collectives.record(run).ok()?.describe()?));
        self.collectives.last().filter_map(described).collect()
    }

    pub(super) fn has_entered(&self, stream: Stream, run: u64) -> bool {
        self.record(stream, run) != Err(Verdict::NotYet)
    }

    /// Where it waits is read first: who was blocked then, and had not entered the run later, was
    /// free to at no time between.
    fn standing(&self, wave: u64, stream: Stream, run: u64) -> Standing {
        let blocked = *unpoisoned(&self.blocked);
        Standing { wave, stream, run, has_entered: self.has_entered(stream, run), blocked }
    }

    pub(super) fn record(&self, stream: Stream, run: u64) -> Result<Record, Verdict> {
        match stream {
            Stream::Collectives => self.collectives.record(run),
            Stream::Messages { from, to } => match self.known_messages(from, to) {
                Some(messages) => messages.record(run),
                None => Err(Verdict::NotYet),
            },
        }
    }

    fn completed(&self, stream: Stream) -> u64 {
        match stream {
            Stream::Collectives => self.collectives.completed(),
            Stream::Messages { from, to } => {
                self.known_messages(from, to).map_or(0, |messages| messages.completed())
            }
        }
    }

    /// Those that there have been: whoever asks does not make this rank keep any.
    fn known_messages(&self, from: Rank, to: Rank) -> Option<Arc<Messages>> {
        unpoisoned(&self.messages).get(&(from, to)).cloned()
    }

    /// The record as this rank and a peer compare it: with what goes between the two, where that is
    /// all they know.
    pub(super) fn record_for(&self, peer: Rank, stream: Stream, run: u64) -> Result<Record, Verdict> {
        let record = self.record(stream, run)?;
        let Some(descriptor) = record.describe().filter(|record| record.amount == Amount::Paired) else {
            return Ok(record);
        };
        let paired = unpoisoned(&self.paired);
        let counts = paired.iter().rev().find(|(number, _)| *number == run).ok_or(Verdict::Forgotten)?;
        let Some(between) = counts.1.between(self.rank, peer) else { return Ok(record) };
        Ok(Record {
            run,
            signature: between.mark(record.signature),
            history: between.mark(record.history),
            descriptor: Descriptor { amount: between.amount(), ..descriptor }.to_words(),
        })
    }

    fn answer(&self, from: Rank, stream: Stream, asked: &Record) -> Message {
        let completed = self.completed(stream);
        let (verdict, record) = match self.record_for(from, stream, asked.run) {
            Ok(own) if own.signature != asked.signature => {
                let mut inbox = unpoisoned(&self.inbox);
                if inbox.differs.len() < UNREAD_MAX {
                    inbox.differs.push((from, stream, *asked));
                    self.news.store(true, Ordering::Release);
                }
                (Verdict::Different, own)
            }
            Ok(own) if own.history != asked.history => (Verdict::EarlierDiffers, own),
            Ok(own) => (Verdict::Same, own),
            Err(verdict) => (verdict, *asked),
        };
        let blocked_on = Rank::try_from(self.blocked_on.load(Ordering::Relaxed)).ok();
        Message::Answer { stream, verdict, record, completed, blocked_on }
    }
}

impl Responder for Board {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        match Message::decode(message)? {
            Message::Query { stream, record } => {
                // Who asks may not have heard: this rank may be in no call, and tell nobody by
                // itself.
                return self.claimed().or_else(|| Some(self.answer(from, stream, &record).encode()));
            }
            Message::Probe { wave, stream, run } => {
                return Some(Message::Standing(self.standing(wave, stream, run)).encode());
            }
            Message::Standing(standing) => {
                let mut inbox = unpoisoned(&self.inbox);
                if inbox.standings.len() < UNREAD_MAX {
                    inbox.standings.push((from, standing));
                }
            }
            Message::Claim { claim, asks } => {
                self.agreement().hear(from, claim);
                self.news.store(true, Ordering::Release);
                return self.claimed().filter(|_| asks);
            }
            Message::Scratch(slice) => unpoisoned(&self.inbox).scratch.push((from, slice)),
            Message::Answer { stream, verdict, record, completed, blocked_on } => {
                let mut inbox = unpoisoned(&self.inbox);
                if inbox.answers.len() < UNREAD_MAX {
                    inbox.answers.push(Answer { peer: from, stream, verdict, record, completed, blocked_on });
                }
            }
        }
        self.news.store(true, Ordering::Release);
        None
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        self.agreement().lose(peer);
        let fault = self.fault(FaultKind::Lost, peer, cause.to_string());
        self.propose(Fault { loss: Some(cause.kind()), ..fault });
    }
}

impl Record {
    pub(super) fn describe(&self) -> Option<Descriptor> {
        Descriptor::from_words(self.descriptor)
    }
}
