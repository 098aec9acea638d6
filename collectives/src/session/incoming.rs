//! What comes to a member: messages of peers, losses, faults of its own engine. It waits here for
//! the caller's thread if that waits, or else for the session's. What is for the epoch's engine is
//! answered at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Thread;

use pleach_membership::Message;
use pleach_transport::mutex::lock;
use pleach_transport::witness::WordPlace;
use pleach_transport::{Incarnation, LossCause, Nanos, Responder, clock};
use pleach_vocabulary::Rank;

use super::envelope::{Assembly, Envelope, of_engine};
use super::heal::Said;
use super::meeting::Meetings;
use super::roster::Neighbour;
use super::shared_device::Messages;
use crate::engine::StatusBoard;

/// Messages about membership that wait. Members send few, and say again what is lost.
const MESSAGES_MAX: usize = 1 << 16;

/// Messages that a peer's engine of an epoch that this rank has not entered sends. Before an engine
/// is ready it sends each peer one.
const EARLY_OF_PEER_MAX: usize = 64;

/// Processes that wait to join, of which this one was told between two looks.
const NEWCOMERS_MAX: usize = 256;

/// What a peer says about states that is kept. It says few things in an epoch.
const SAID_MAX: usize = 32;

/// What has come since the last look. Ranks are those of the device.
#[derive(Default)]
pub(crate) struct Arrivals {
    pub(crate) messages: Vec<(Rank, Message)>,
    pub(crate) words: Vec<(Rank, Incarnation, WordPlace)>,
    pub(crate) newcomers: Vec<Neighbour>,
    /// The incarnation that is asked to leave.
    pub(crate) leaver: Option<u64>,
    pub(crate) lost: Vec<Rank>,
    pub(crate) findings: Vec<Finding>,
}

/// A fault of an epoch's engine, as the session takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// A rank of the epoch keeps a call waiting beyond its deadline, or is gone.
    Late { epoch: u64, rank: Rank },
    /// The step cannot be ended here.
    Failed { epoch: u64 },
}

/// The epoch whose engine listens.
struct Listener {
    epoch: u64,
    /// By rank of the epoch: the rank of the device.
    ranks: Vec<Rank>,
    board: Arc<StatusBoard>,
}

#[derive(Default)]
struct State {
    arrivals: Arrivals,
    assemblies: BTreeMap<Rank, Assembly>,
    listener: Option<Arc<Listener>>,
    early: Vec<(Rank, u64, Vec<u8>)>,
    /// By rank: the newest record of which it has told the end of the epochs before, and what it
    /// has told: below which signal slot it has signalled, and its messages to and from this
    /// rank.
    ends: BTreeMap<Rank, (u64, u16, Messages)>,
    /// By rank: what it has said last about states, and in which epochs.
    said: BTreeMap<Rank, VecDeque<(u64, Said)>>,
    /// By rank: how much of the states it has by its own word, in percent, and in which epoch.
    shares: BTreeMap<Rank, (u64, u8)>,
}

/// See the module. The responder of the session's device.
#[derive(Default)]
pub(crate) struct Incoming {
    state: Mutex<State>,
    thread: OnceLock<Thread>,
    /// The caller's thread, while it waits.
    caller: Mutex<Option<Thread>>,
    /// What members say to make parts of an epoch's group.
    meetings: Arc<Meetings>,
}

impl Incoming {
    /// Who is woken when something comes.
    pub(crate) fn wakes(&self, thread: Thread) {
        self.thread.get_or_init(|| thread);
    }

    /// What members say to make parts of an epoch's group.
    pub(crate) fn meetings(&self) -> &Arc<Meetings> {
        &self.meetings
    }

    /// Wakes the session's thread.
    pub(crate) fn wake_thread(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Wakes the caller's thread, if it waits. Returns whether it does.
    pub(crate) fn wake_caller(&self) -> bool {
        let caller = lock(&self.caller);
        caller.as_ref().inspect(|caller| caller.unpark()).is_some()
    }

    /// The caller's thread waits until then, or until this is so.
    pub(crate) fn wait_for(&self, until: Nanos, is_so: impl Fn() -> bool) {
        if is_so() {
            return;
        }
        self.caller_waits(Some(std::thread::current()));
        while !is_so() && clock::now() < until {
            std::thread::park_timeout(until.since(clock::now()));
        }
        self.caller_waits(None);
        // What came meanwhile has woken only the caller.
        self.wake_thread();
    }

    /// Something has come: wakes whoever takes it in. That is the caller while it waits, which
    /// spares a switch to the session's thread and one back.
    fn wake(&self) {
        if !self.wake_caller() {
            self.wake_thread();
        }
    }

    /// The caller's thread waits from now on, or (`None`) no longer. After `None` the caller must
    /// look once more: what came before has woken only the caller.
    pub(crate) fn caller_waits(&self, caller: Option<Thread>) {
        *lock(&self.caller) = caller;
    }

    /// All that has come.
    pub(crate) fn take(&self) -> Arrivals {
        std::mem::take(&mut lock(&self.state).arrivals)
    }

    /// The engine of an epoch listens from now on, and hears what came before it was there. Returns
    /// its answers, control messages for ranks of the device.
    pub(crate) fn listen(
        &self,
        epoch: u64,
        ranks: Vec<Rank>,
        board: Arc<StatusBoard>,
    ) -> Vec<(Rank, Vec<u8>)> {
        let listener = Arc::new(Listener { epoch, ranks, board });
        let early = {
            let mut state = lock(&self.state);
            state.listener = Some(Arc::clone(&listener));
            let early = std::mem::take(&mut state.early);
            let (now, later): (Vec<_>, Vec<_>) = early.into_iter().partition(|(_, of, _)| *of <= epoch);
            state.early = later;
            now
        };
        let own = early.into_iter().filter(|(_, of, _)| *of == epoch);
        own.filter_map(|(from, _, message)| Some((from, listener.hear(from, &message)?))).collect()
    }

    /// The newest of what a rank has said about states that is picked, by its epoch.
    pub(crate) fn said<T>(&self, rank: Rank, pick: impl Fn(u64, Said) -> Option<T>) -> Option<T> {
        let state = lock(&self.state);
        state.said.get(&rank)?.iter().rev().find_map(|(epoch, said)| pick(*epoch, *said))
    }

    /// A rank says something about states. This process takes its own word too, so that it can tell
    /// of all.
    pub(crate) fn take_said(&self, rank: Rank, epoch: u64, said: Said) {
        let mut state = lock(&self.state);
        let share = match said {
            Said::States { has_them, .. } => Some(if has_them { 100 } else { 0 }),
            Said::Read { percent } => Some(percent),
            Said::Healed => Some(100),
            Said::Manifest(_) | Said::Audit { .. } => None,
        };
        if let Some(share) = share {
            state.shares.insert(rank, (epoch, share));
        }
        // Nobody waits for a share, and there are many.
        if !matches!(said, Said::Read { .. }) {
            let all = state.said.entry(rank).or_default();
            if all.len() == SAID_MAX {
                all.pop_front();
            }
            all.push_back((epoch, said));
        }
    }

    /// How much of the states a rank has, in percent, if it has said so in this epoch or later.
    pub(crate) fn share(&self, rank: Rank, since: u64) -> Option<u8> {
        let state = lock(&self.state);
        state.shares.get(&rank).filter(|(epoch, _)| *epoch >= since).map(|(_, share)| *share)
    }

    /// By rank of the epoch of a record: below which signal slot it has signalled before; `None`:
    /// it has not told.
    pub(crate) fn used_slots(&self, record: u64, ranks: &[Rank]) -> Vec<Option<u16>> {
        let state = lock(&self.state);
        let told = |rank: &Rank| state.ends.get(rank).filter(|(of, ..)| *of == record);
        ranks.iter().map(|rank| told(rank).map(|(_, below, _)| *below)).collect()
    }

    /// What a rank has told of its messages to and from this one, since both are connected, in the
    /// epochs before this record or a later one.
    pub(crate) fn messages(&self, record: u64, rank: Rank) -> Option<Messages> {
        let state = lock(&self.state);
        state.ends.get(&rank).filter(|(of, ..)| *of >= record).map(|(.., messages)| *messages)
    }

    /// A fault of an engine of this epoch: this rank of the epoch is gone or late, or the step
    /// cannot be ended here.
    pub(crate) fn found(&self, epoch: u64, late: Option<Rank>) {
        let finding = late.map_or(Finding::Failed { epoch }, |rank| Finding::Late { epoch, rank });
        lock(&self.state).arrivals.findings.push(finding);
        self.wake();
    }
}

impl Listener {
    fn hear(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        let rank = self.ranks.iter().position(|rank| *rank == from)?;
        let answer = self.board.message(rank as Rank, message)?;
        Some(of_engine(self.epoch, &answer))
    }
}

impl Responder for Incoming {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        match Envelope::open(message)? {
            Envelope::Engine { epoch, message } => {
                let listener = {
                    let mut state = lock(&self.state);
                    let heard = state.listener.as_ref().map(|listener| listener.epoch);
                    let early = state.early.iter().filter(|(sender, ..)| *sender == from).count();
                    if heard.is_none_or(|heard| heard < epoch) && early < EARLY_OF_PEER_MAX {
                        state.early.push((from, epoch, message.to_vec()));
                    }
                    state.listener.clone().filter(|listener| listener.epoch == epoch)?
                };
                listener.hear(from, message)
            }
            Envelope::Part { is_first, is_last, bytes } => {
                let mut state = lock(&self.state);
                let message = state.assemblies.entry(from).or_default().add(is_first, is_last, bytes)?;
                if state.arrivals.messages.len() < MESSAGES_MAX {
                    state.arrivals.messages.push((from, message));
                }
                drop(state);
                self.wake();
                None
            }
            Envelope::End { record, below, messages } => {
                lock(&self.state).ends.insert(from, (record, below, messages));
                // Nobody else waits for it.
                self.wake_caller();
                None
            }
            Envelope::Meeting { epoch, key, value } => {
                self.meetings.set(epoch, key, value);
                None
            }
            Envelope::Said(epoch, said) => {
                self.take_said(from, epoch, said);
                // Who waits for states does not wait for a share of them.
                if !matches!(said, Said::Read { .. }) {
                    self.wake();
                }
                None
            }
            Envelope::Newcomer(neighbour) => {
                let mut state = lock(&self.state);
                let newcomers = &mut state.arrivals.newcomers;
                if newcomers.len() < NEWCOMERS_MAX && !newcomers.contains(&neighbour) {
                    newcomers.push(neighbour);
                }
                drop(state);
                self.wake();
                None
            }
            Envelope::Leave(incarnation) => {
                lock(&self.state).arrivals.leaver = Some(incarnation.0);
                self.wake();
                None
            }
            Envelope::Word(incarnation, place) => {
                let mut state = lock(&self.state);
                // Another process may have the rank by now.
                state.arrivals.words.retain(|(rank, ..)| *rank != from);
                state.arrivals.words.push((from, incarnation, place));
                drop(state);
                self.wake();
                None
            }
        }
    }

    fn lost(&self, peer: Rank, _cause: &LossCause) {
        lock(&self.state).arrivals.lost.push(peer);
        self.wake();
    }
}
