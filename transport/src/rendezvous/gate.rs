//! A responder for devices that are being tried: it stores messages and losses until all ranks have
//! agreed on the device, and drops them if the ranks take another one.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Rank;
use crate::device::{LossCause, Responder};

/// Stored calls at most; a peer sends none before the agreement, and few at once after it.
const KEPT_MAX: usize = 4096;

enum Kept {
    Message(Rank, Vec<u8>),
    Lost(Rank, LossCause),
}

enum State {
    Keeping(Vec<Kept>),
    Open(Arc<dyn Responder>),
}

/// A responder that stores all calls until it is opened.
pub(super) struct Gate(Mutex<State>);

impl Default for Gate {
    fn default() -> Self {
        Self(Mutex::new(State::Keeping(Vec::new())))
    }
}

impl Gate {
    /// Passes the stored calls, in order, and all later ones to `responder`. Returns the answers to
    /// post.
    pub(super) fn open(&self, responder: &Arc<dyn Responder>) -> Vec<(Rank, Vec<u8>)> {
        // Locked meanwhile, so that no later call overtakes.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = std::mem::replace(&mut *state, State::Open(Arc::clone(responder)));
        let State::Keeping(kept) = kept else { return Vec::new() };
        let mut replies = Vec::new();
        for kept in kept {
            match kept {
                Kept::Message(from, message) => {
                    replies.extend(responder.message(from, &message).map(|reply| (from, reply)));
                }
                Kept::Lost(peer, cause) => responder.lost(peer, &cause),
            }
        }
        replies
    }

    /// The responder, if open; otherwise stores the call.
    fn pass(&self, kept: impl FnOnce() -> Kept) -> Option<Arc<dyn Responder>> {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Open(responder) => return Some(Arc::clone(responder)),
            State::Keeping(all) if all.len() < KEPT_MAX => all.push(kept()),
            State::Keeping(_) => {}
        }
        None
    }
}

impl Responder for Gate {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.pass(|| Kept::Message(from, message.to_vec()))?.message(from, message)
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        if let Some(responder) = self.pass(|| Kept::Lost(peer, cause.clone())) {
            responder.lost(peer, cause);
        }
    }
}
