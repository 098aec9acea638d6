//! What stands between the control streams and their users: messages of this backend are kept for
//! its device, all others go to the responder. It also knows why pairs that are on their way are
//! refused, so that the end that follows has that cause, whoever sees it first.
//!
//! Every message on a control stream begins with a byte that says whose it is. **Invariant:** the
//! responder sees exactly the bytes that its peer's user posted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::cm::Entrance;
use super::refusal::Refusal;
use super::wire::{Announcement, Hello};
use crate::Rank;
use crate::device::{LossCause, Responder};

const USER: u8 = 0;
const HELLO: u8 = 1;
const READY: u8 = 2;
const ANNOUNCEMENT: u8 = 3;
const REFUSAL: u8 = 4;
const ENTRANCE: u8 = 5;

/// What a peer said for this backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Where its queue pairs are.
    Hello(Hello),
    /// Where it waits to be called.
    Entrance(Entrance),
    /// Its queue pairs receive and send.
    Ready,
    /// How long a region is, and by what its other NICs know it; or that it is gone.
    Announcement(Announcement),
    /// It makes no connection.
    Refusal(Refusal),
    /// Something that is none of these.
    Nonsense,
}

/// A user's message as it goes over the stream.
pub(super) fn of_user(message: &[u8]) -> Vec<u8> {
    let mut framed = Vec::with_capacity(1 + message.len());
    framed.push(USER);
    framed.extend_from_slice(message);
    framed
}

pub(super) fn of_hello(hello: &Hello) -> Vec<u8> {
    let mut framed = vec![HELLO];
    framed.extend_from_slice(&hello.encode());
    framed
}

pub(super) fn of_announcement(announcement: &Announcement) -> Vec<u8> {
    let mut framed = vec![ANNOUNCEMENT];
    framed.extend_from_slice(&announcement.encode());
    framed
}

pub(super) fn of_entrance(entrance: &Entrance) -> Vec<u8> {
    let mut framed = vec![ENTRANCE];
    framed.extend_from_slice(&entrance.encode());
    framed
}

pub(super) fn of_ready() -> [u8; 1] {
    [READY]
}

pub(super) fn of_refusal(refusal: Refusal) -> Vec<u8> {
    let mut framed = vec![REFUSAL];
    framed.extend(refusal.encode());
    framed
}

/// See the module.
pub(super) struct Desk {
    user: Arc<dyn Responder>,
    told: Mutex<Vec<(Rank, Told)>>,
    any: AtomicBool,
    refused: Mutex<BTreeMap<Rank, LossCause>>,
}

impl Desk {
    pub(super) fn new(user: Arc<dyn Responder>) -> Self {
        Self { user, told: Mutex::new(Vec::new()), any: AtomicBool::new(false), refused: Mutex::default() }
    }

    /// One load: for the busy way.
    pub(super) fn has_any(&self) -> bool {
        // Acquire: pairs with the release in `keep`.
        self.any.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Vec<(Rank, Told)> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // Release: under the lock, so it never hides what is still there.
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *told)
    }

    /// The pair with this peer is refused, here or there, for this cause; the first one counts.
    pub(super) fn refuse(&self, peer: Rank, cause: LossCause) {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).entry(peer).or_insert(cause);
    }

    /// Why a peer is lost of which this was seen.
    pub(super) fn cause(&self, peer: Rank, seen: LossCause) -> LossCause {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.get(&peer).cloned().unwrap_or(seen)
    }

    fn keep(&self, from: Rank, what: Told) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.push((from, what));
        // Release: pairs with the acquire in `has_any`.
        self.any.store(true, Ordering::Release);
    }
}

impl Responder for Desk {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        match message.split_first() {
            Some((&USER, message)) => self.user.message(from, message).map(|reply| of_user(&reply)),
            Some((&HELLO, hello)) => {
                self.keep(from, Hello::decode(hello).map_or(Told::Nonsense, Told::Hello));
                None
            }
            Some((&ENTRANCE, entrance)) => {
                self.keep(from, Entrance::decode(entrance).map_or(Told::Nonsense, Told::Entrance));
                None
            }
            Some((&READY, [])) => {
                self.keep(from, Told::Ready);
                None
            }
            Some((&ANNOUNCEMENT, announced)) => {
                self.keep(from, Announcement::decode(announced).map_or(Told::Nonsense, Told::Announcement));
                None
            }
            Some((&REFUSAL, refusal)) => {
                let refusal = Refusal::decode(refusal);
                // At once: the peer hangs up behind it, and who sees that asks for the cause.
                if let Some(refusal) = refusal {
                    self.refuse(from, refusal.heard());
                }
                self.keep(from, refusal.map_or(Told::Nonsense, Told::Refusal));
                None
            }
            _ => {
                self.keep(from, Told::Nonsense);
                None
            }
        }
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        self.user.lost(peer, &self.cause(peer, cause.clone()));
    }
}
