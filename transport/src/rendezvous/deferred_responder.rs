//! A responder for devices that are being tried: it stores messages and losses until all ranks have
//! agreed on the device, and drops them if the ranks take another one.

use std::sync::{Arc, Mutex};

use crate::Rank;
use crate::device::{LossCause, Relay, Responder, Urgency};
use crate::mutex::lock;

/// Stored calls at most; a peer sends none before the agreement, and few at once after it.
const DEFERRED_MAX: usize = 4096;

enum DeferredCall {
    Message(Rank, Vec<u8>),
    Lost(Rank, LossCause),
}

enum State {
    Deferring(Vec<DeferredCall>),
    Open(Arc<dyn Responder>),
}

/// A responder that stores all calls until it is opened.
pub(super) struct DeferredResponder(Mutex<State>);

impl Default for DeferredResponder {
    fn default() -> Self {
        Self(Mutex::new(State::Deferring(Vec::new())))
    }
}

impl DeferredResponder {
    /// Passes the stored calls, in order, and all later ones to `responder`. Returns the answers
    /// and other messages to post.
    pub(super) fn open(&self, responder: &Arc<dyn Responder>) -> Vec<(Rank, Vec<u8>)> {
        // Locked meanwhile, so that no later call overtakes.
        let mut state = lock(&self.0);
        let deferred = std::mem::replace(&mut *state, State::Open(Arc::clone(responder)));
        let State::Deferring(deferred) = deferred else { return Vec::new() };
        let mut posts = Vec::new();
        for deferred in deferred {
            let mut relay = |to: Rank, message: &[u8], _: Urgency| {
                posts.push((to, message.to_vec()));
                Ok(())
            };
            match deferred {
                DeferredCall::Message(from, message) => {
                    let reply = responder.message_relaying(from, &message, &mut relay);
                    posts.extend(reply.map(|reply| (from, reply)));
                }
                DeferredCall::Lost(peer, cause) => responder.lost_relaying(peer, &cause, &mut relay),
            }
        }
        posts
    }

    /// The responder, if open; otherwise stores the call.
    fn pass(&self, deferred: impl FnOnce() -> DeferredCall) -> Option<Arc<dyn Responder>> {
        match &mut *lock(&self.0) {
            State::Open(responder) => return Some(Arc::clone(responder)),
            State::Deferring(all) if all.len() < DEFERRED_MAX => all.push(deferred()),
            State::Deferring(_) => {}
        }
        None
    }
}

impl Responder for DeferredResponder {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.pass(|| DeferredCall::Message(from, message.to_vec()))?.message(from, message)
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        if let Some(responder) = self.pass(|| DeferredCall::Lost(peer, cause.clone())) {
            responder.lost(peer, cause);
        }
    }

    fn message_relaying(&self, from: Rank, message: &[u8], relay: &mut Relay<'_>) -> Option<Vec<u8>> {
        self.pass(|| DeferredCall::Message(from, message.to_vec()))?.message_relaying(from, message, relay)
    }

    fn lost_relaying(&self, peer: Rank, cause: &LossCause, relay: &mut Relay<'_>) {
        if let Some(responder) = self.pass(|| DeferredCall::Lost(peer, cause.clone())) {
            responder.lost_relaying(peer, cause, relay);
        }
    }
}
