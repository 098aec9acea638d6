//! The responder of a rank that exchanges no messages with the other ranks.

use pleach::transport::{LossCause, Rank, Responder};

/// Gives no answers, and leaves losses to the events of the device.
pub(crate) struct SilentResponder;

impl Responder for SilentResponder {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}
