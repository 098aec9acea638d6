//! Messages of peers that pleachDeviceExchange has not taken yet.

use std::collections::VecDeque;
use std::sync::Mutex;

use pleach_transport::mutex::lock;
use pleach_transport::{LossCause, Rank, Responder};

/// Most messages of a peer that wait. A peer that keeps to the protocol is at most one exchange
/// ahead. Messages above this limit are dropped.
const WAITING_MAX: usize = 8;

/// By peer: its messages in order.
pub(crate) struct Inbox(Mutex<Vec<VecDeque<Vec<u8>>>>);

impl Inbox {
    pub(crate) fn new(world_size: u32) -> Self {
        Self(Mutex::new((0..world_size).map(|_| VecDeque::new()).collect()))
    }

    /// The first message of a peer.
    pub(crate) fn take(&self, from: Rank) -> Option<Vec<u8>> {
        let mut messages = lock(&self.0);
        messages.get_mut(from as usize)?.pop_front()
    }
}

impl Responder for Inbox {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        let mut messages = lock(&self.0);
        if let Some(waiting) = messages.get_mut(from as usize)
            && waiting.len() < WAITING_MAX
        {
            waiting.push_back(message.to_vec());
        }
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}
