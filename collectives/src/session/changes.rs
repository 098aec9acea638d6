//! The changes that a process is told of, each once, and the messages that were lost with the
//! epochs that ended.
//!
//! A pair's messages are counted since it was connected: those that this process has sent and
//! received by its own count, those of the other end by its word, which comes with the drain
//! ([`envelope`](super::envelope)). What one end has sent and the other has not received is lost
//! for good, as no engine takes it up again. What was lost before is told by an earlier change.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_membership::{Process, Record};
use pleach_transport::clock;

use super::change::{Change, Unreceived};
use super::incoming::Incoming;
use super::shared_device::SharedDevice;

/// How long the word of a member is awaited that has drained its pair with this process already.
/// The word is sent before the drain, so it is there but for a stream that is full or slow; then
/// the count is told with the next change.
const WORD_WAIT: Duration = Duration::from_millis(200);

/// See the module.
#[derive(Default)]
pub(crate) struct Changes {
    /// The epoch up to which changes were told.
    told: Option<Arc<Record>>,
    newest: Option<Arc<Change>>,
    /// By process: lost messages to it and from it that were told.
    lost: BTreeMap<Process, (u64, u64)>,
}

impl Changes {
    /// The newest change; `None`: there was none since this process has come.
    pub(crate) fn newest(&self) -> Option<&Arc<Change>> {
        self.newest.as_ref()
    }

    /// This process goes on in the epoch of this record, which was entered.
    pub(crate) fn go_on(&mut self, own: Process, record: &Arc<Record>, of: (&SharedDevice, &Incoming)) {
        let Some(before) = self.told.replace(Arc::clone(record)) else { return };
        if before.number() == record.number() {
            return;
        }
        let both = record.members().iter().copied();
        let both: Vec<Process> = both.filter(|it| *it != own && before.contains(*it)).collect();
        let unreceived = self.unreceived(&both, record.number(), of);
        self.newest = Some(Change::between(&before, record, unreceived));
    }

    fn unreceived(
        &mut self,
        peers: &[Process],
        record: u64,
        (device, incoming): (&SharedDevice, &Incoming),
    ) -> Vec<Unreceived> {
        let has_told = |peer: &Process| incoming.messages(record, peer.seat.0).is_some();
        incoming.wait_for(clock::now() + WORD_WAIT, || peers.iter().all(has_told));
        self.lost.retain(|process, _| peers.contains(process));
        let mut unreceived = Vec::new();
        for &peer in peers {
            let Some(theirs) = incoming.messages(record, peer.seat.0) else { continue };
            let own = device.messages(peer.seat.0);
            let to = own.sent().saturating_sub(theirs.received());
            let from = theirs.sent().saturating_sub(own.received());
            let (to_before, from_before) = self.lost.insert(peer, (to, from)).unwrap_or_default();
            let (to, from) = (to.saturating_sub(to_before), from.saturating_sub(from_before));
            if to > 0 || from > 0 {
                unreceived.push(Unreceived::new(peer, to, from));
            }
        }
        unreceived
    }
}
