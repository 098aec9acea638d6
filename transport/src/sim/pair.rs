//! Pairs of ranks: connecting, control messages, byes, losses, severing, deaths, ranks that are
//! given to another device, and drains.
//!
//! **Drains** (contract line 17). A transfer is in the world's table until nothing of it lands any
//! more and its `Done` can be polled. So a rank's drain mark goes off when no transfer from before
//! the drain is in the table, and arrives like a message, at a time of its own. **Invariant:** a
//! mark that arrived was sent by the device that is connected, over a wire that was not cut since.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Callback, QueueKey, SimEvent, State};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{
    ConnectError, Event, Incarnation, LossCause, MESSAGE_BYTES_MAX, PostError, ProtocolViolation,
    SubmitError, TransferError, awaits_end,
};
use crate::drain::Drains;
use crate::region::RegionKey;
use crate::signals::Signals;
use crate::sim::observer::Record;
use crate::sim::world::Mutant;

/// Control messages to one peer that are under way before `QueueFull`.
const POSTS_MAX: usize = 1024;

/// The stage of a drain: the rank's own transfers from before have ended.
const OWN_MARK: usize = 0;

/// The stage of a drain: the peer's mark has arrived.
const PEER_MARK: usize = 1;

/// The state of a rank's pair with a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum PairStatus {
    #[default]
    Idle,
    Connecting,
    Connected,
    /// `sever` was called before anything else ended it.
    Severed,
    Left,
    Lost(LossCause),
}

/// A rank's state of a peer, and of the wire from the rank to the peer.
#[derive(Default)]
pub(super) struct PeerState {
    status: PairStatus,
    /// The peer's device, once it was connected.
    incarnation: Option<Incarnation>,
    /// The device that had the peer's rank before.
    former: Option<Incarnation>,
    /// `sever` was called, whatever had happened before.
    severing: bool,
    is_fenced: bool,
    /// The rank's signal slots for the peer.
    signal_slots: Option<Signals>,
    /// Transfers to the peer whose `Done` was not polled yet.
    under_way: usize,
    /// The wire to the peer is cut.
    cut: bool,
    /// It is cut for ever, because a link is down.
    link_is_down: bool,
    /// The event that gives up connecting.
    timeout: Option<QueueKey>,
    messages: VecDeque<QueuedMessage>,
    last_message_at: Nanos,
    /// The bye has arrived at the peer, but earlier transfers have not.
    bye_waits: bool,
    drains: Drains,
}

enum QueuedMessage {
    Message(Vec<u8>),
    Bye,
}

impl State {
    fn peer_state(&mut self, rank: Rank, peer: Rank) -> &mut PeerState {
        &mut self.peer_states[rank as usize * self.ranks.len() + peer as usize]
    }

    /// Whether the rank may have one more transfer to the peer under way.
    pub(super) fn has_room(&mut self, rank: Rank, peer: Rank) -> bool {
        self.peer_state(rank, peer).under_way < self.queue_depth
    }

    /// Counts a transfer whose `Done` will be polled; returns the rank's drains before it.
    pub(super) fn transfer_starts(&mut self, rank: Rank, peer: Rank, is_polled: bool) -> u64 {
        let peer_state = self.peer_state(rank, peer);
        peer_state.under_way += usize::from(is_polled);
        peer_state.drains.begun()
    }

    /// The `Done` of a transfer was polled.
    pub(super) fn done_polled(&mut self, rank: Rank, peer: Rank) {
        self.peer_state(rank, peer).under_way -= 1;
    }

    /// Whether the wire from the rank to the peer is cut.
    pub(super) fn is_cut(&mut self, rank: Rank, peer: Rank) -> bool {
        self.peer_state(rank, peer).cut
    }

    /// The signal slots that a signal of this device of `from` changes, if any. Those of `to` are
    /// for the device that has the rank.
    pub(super) fn signal_slots_of(
        &mut self,
        to: Rank,
        from: Rank,
        device: Option<Incarnation>,
    ) -> Option<Signals> {
        self.is_of_pair(to, from, device).then(|| self.signal_slots(to, from))
    }

    /// Whether this device of `from` is the one that `to` is connected with, or will be.
    fn is_of_pair(&mut self, to: Rank, from: Rank, device: Option<Incarnation>) -> bool {
        let current = self.ranks[from as usize].incarnation;
        let peer_state = self.peer_state(to, from);
        match peer_state.incarnation {
            Some(_) => peer_state.incarnation == device,
            None => current == device && peer_state.former != device,
        }
    }

    pub(super) fn signal_slots(&mut self, rank: Rank, peer: Rank) -> Signals {
        let signal_slots = self.ranks[rank as usize].signal_slots;
        self.peer_state(rank, peer).signal_slots.get_or_insert_with(|| Signals::new(signal_slots)).clone()
    }

    pub(super) fn is_connected(&mut self, rank: Rank, peer: Rank) -> bool {
        self.peer_state(rank, peer).status == PairStatus::Connected
    }

    pub(super) fn is_reachable(&mut self, rank: Rank, peer: Rank) -> bool {
        matches!(self.peer_state(rank, peer).status, PairStatus::Connecting | PairStatus::Connected)
    }

    pub(super) fn connect(&mut self, rank: Rank, peer: Rank, limit: Duration) -> Result<(), ConnectError> {
        let peer_state = self.peer_state(rank, peer);
        if peer_state.severing && !peer_state.is_fenced {
            return Err(ConnectError::NotFree { peer });
        }
        match peer_state.status {
            PairStatus::Connecting | PairStatus::Connected => return Ok(()),
            PairStatus::Idle => {}
            PairStatus::Severed | PairStatus::Left | PairStatus::Lost(_) => {
                let mut events = self.ranks[rank as usize].ready.iter().map(|ready| &ready.event);
                if awaits_end(&mut events, peer) {
                    return Err(ConnectError::NotFree { peer });
                }
                self.renew(rank, peer);
            }
        }
        self.event("connect", &[u64::from(rank), u64::from(peer)]);
        self.peer_state(rank, peer).status = PairStatus::Connecting;
        let timeout = self.after(limit, SimEvent::ConnectTimeout(rank, peer, limit));
        self.peer_state(rank, peer).timeout = Some(timeout);
        // A peer that is connected is so with the device that had this rank before.
        let mutual =
            self.peer_state(peer, rank).status == PairStatus::Connecting && !self.ranks[peer as usize].dead;
        let whole = !self.peer_state(rank, peer).cut && !self.peer_state(peer, rank).cut;
        if mutual && whole {
            self.meet(rank, peer);
        }
        Ok(())
    }

    /// Connects two ranks that want it, unless one had the rank before. Then the one with the
    /// higher number, which dials, is told so.
    fn meet(&mut self, rank: Rank, peer: Rank) {
        let ends = [(rank, peer), (peer, rank)];
        let had_rank = ends.into_iter().any(|(rank, peer)| {
            let incarnation = self.ranks[peer as usize].incarnation;
            incarnation.is_some() && self.peer_state(rank, peer).former == incarnation
        });
        for (rank, peer) in ends {
            let wait = self.network.latency(rank, peer) + self.random_delay();
            match self.ranks[peer as usize].incarnation {
                Some(incarnation) if had_rank && rank > peer => {
                    let cause = LossCause::Protocol(ProtocolViolation::FormerProcess);
                    self.after(wait, SimEvent::Detect(rank, peer, cause, incarnation));
                }
                _ if had_rank => {}
                _ => {
                    self.after(wait, SimEvent::Connected(rank, peer));
                }
            }
        }
    }

    /// Forgets all that `rank` knows of the device that had the peer's rank: the next one may come.
    fn renew(&mut self, rank: Rank, peer: Rank) {
        let before = std::mem::take(self.peer_state(rank, peer));
        let renewed = PeerState {
            former: before.incarnation.or(before.former),
            // Their `Done` events were not polled.
            under_way: before.under_way,
            cut: before.link_is_down,
            link_is_down: before.link_is_down,
            ..PeerState::default()
        };
        *self.peer_state(rank, peer) = renewed;
        self.ranks[rank as usize].table.orphan(peer);
        self.queue.retain(|_, event| {
            !matches!(event, SimEvent::Message(from, to) if (*from, *to) == (rank, peer))
                && !matches!(event, SimEvent::Detect(by, of, ..) if (*by, *of) == (rank, peer))
        });
    }

    /// Prepares a rank whose device has died for another device.
    pub(super) fn replace(&mut self, rank: Rank) {
        self.event("replace", &[u64::from(rank)]);
        self.ranks[rank as usize] = super::RankState::default();
        for peer in 0..self.ranks.len() as Rank {
            let link_is_down = self.peer_state(rank, peer).link_is_down;
            *self.peer_state(rank, peer) =
                PeerState { cut: link_is_down, link_is_down, ..PeerState::default() };
            let back = self.peer_state(peer, rank);
            back.messages.clear();
            // A peer that was not connected to the dead device may be connected to the next one.
            if matches!(back.status, PairStatus::Idle | PairStatus::Connecting) {
                back.cut = back.link_is_down;
            }
        }
        // Others may still have to find out the death.
        self.queue.retain(|_, event| match event {
            SimEvent::Message(from, to) | SimEvent::Connected(from, to) => *from != rank && *to != rank,
            SimEvent::ConnectTimeout(by, ..)
            | SimEvent::Detect(by, ..)
            | SimEvent::Fenced(by, _)
            | SimEvent::Unfreeze(by)
            | SimEvent::Announce(by) => *by != rank,
            SimEvent::Depart(_)
            | SimEvent::Piece(_)
            | SimEvent::Arrive(_)
            | SimEvent::Complete(_)
            | SimEvent::DrainMark(..)
            | SimEvent::LateSignal(..)
            | SimEvent::Rewrite(..)
            | SimEvent::InjectFault(_) => true,
        });
    }

    /// The device that has the rank of a peer, or had it last.
    pub(super) fn last_incarnation(&mut self, rank: Rank, peer: Rank) -> Option<Incarnation> {
        let peer_state = self.peer_state(rank, peer);
        peer_state.incarnation.or(peer_state.former)
    }

    pub(super) fn connected(&mut self, rank: Rank, peer: Rank) {
        if self.peer_state(rank, peer).status != PairStatus::Connecting || self.ranks[rank as usize].dead {
            return;
        }
        self.event("connected", &[u64::from(rank), u64::from(peer)]);
        let incarnation = self.ranks[peer as usize].incarnation;
        let peer_state = self.peer_state(rank, peer);
        (peer_state.status, peer_state.incarnation) = (PairStatus::Connected, incarnation);
        if let Some(timeout) = self.peer_state(rank, peer).timeout.take() {
            self.cancel(timeout);
        }
        self.ranks[rank as usize].setup.count_connected();
        self.push_ready(rank, Event::Connected { peer }, None);
        self.tell_drained(rank, peer);
        self.deliver_bye_if_quiet(peer, rank);
    }

    pub(super) fn connect_timed_out(&mut self, rank: Rank, peer: Rank, limit: Duration) {
        if self.peer_state(rank, peer).status == PairStatus::Connecting {
            self.detect(rank, peer, LossCause::NotReached(limit), None);
        }
    }

    pub(super) fn may_submit(&mut self, rank: Rank, peer: Rank) -> Result<(), SubmitError> {
        let left = self.ranks[rank as usize].left;
        match &self.peer_state(rank, peer).status {
            PairStatus::Connected if left => Err(SubmitError::NotConnected { peer }),
            PairStatus::Connected => Ok(()),
            PairStatus::Idle | PairStatus::Connecting => Err(SubmitError::NotConnected { peer }),
            PairStatus::Severed => Err(SubmitError::Severed { peer }),
            PairStatus::Left => Err(SubmitError::Departed { peer }),
            PairStatus::Lost(cause) => Err(SubmitError::Lost { peer, kind: cause.kind() }),
        }
    }

    pub(super) fn post(
        &mut self,
        rank: Rank,
        peer: Rank,
        message: Vec<u8>,
        is_urgent: bool,
    ) -> Result<(), PostError> {
        if peer as usize >= self.ranks.len() {
            return Err(PostError::NotConnected { peer });
        }
        let quiet = self.ranks[rank as usize].left || self.ranks[rank as usize].dead;
        let peer_state = self.peer_state(rank, peer);
        if peer_state.status != PairStatus::Connected || quiet {
            return Err(PostError::NotConnected { peer });
        }
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        if peer_state.messages.len() >= POSTS_MAX && !is_urgent {
            return Err(PostError::QueueFull { peer });
        }
        if is_urgent && self.mutant == Some(Mutant::UrgentLost) {
            return Ok(());
        }
        self.event("post", &[u64::from(rank), u64::from(peer), message.len() as u64]);
        self.send_control(rank, peer, QueuedMessage::Message(message));
        Ok(())
    }

    /// Control messages keep their order, however late one is.
    fn send_control(&mut self, rank: Rank, peer: Rank, message: QueuedMessage) {
        let earliest = self.now + self.network.latency(rank, peer) + self.random_delay();
        let peer_state = self.peer_state(rank, peer);
        peer_state.messages.push_back(message);
        peer_state.last_message_at = peer_state.last_message_at.max(earliest);
        let at = peer_state.last_message_at;
        self.at(at, SimEvent::Message(rank, peer));
    }

    /// Delays later messages until then: a reader of a message knows a key in it.
    pub(super) fn hold_messages_back(&mut self, rank: Rank, until: Nanos) {
        for peer in 0..self.ranks.len() as Rank {
            let peer_state = self.peer_state(rank, peer);
            peer_state.last_message_at = peer_state.last_message_at.max(until);
        }
    }

    pub(super) fn deliver_message(&mut self, from: Rank, to: Rank) {
        let stopped_until = self.ranks[to as usize].stopped_until;
        if self.now < stopped_until {
            self.at(stopped_until, SimEvent::Message(from, to));
            return;
        }
        let reachable = self.is_reachable(to, from) && !self.ranks[to as usize].dead;
        let peer_state = self.peer_state(from, to);
        // Losses empty the queue but leave the events.
        let Some(message) = peer_state.messages.pop_front() else { return };
        if peer_state.cut || !reachable {
            return;
        }
        match message {
            QueuedMessage::Message(message) => {
                self.event("message", &[u64::from(from), u64::from(to), message.len() as u64]);
                if let Some(responder) = self.ranks[to as usize].responder.clone() {
                    self.callbacks.push(Callback::Message { responder, from, to, message });
                }
                self.wake(to);
            }
            QueuedMessage::Bye => {
                peer_state.bye_waits = true;
                self.deliver_bye_if_quiet(from, to);
            }
        }
    }

    pub(super) fn leave(&mut self, rank: Rank) {
        if std::mem::replace(&mut self.ranks[rank as usize].left, true) {
            return;
        }
        self.event("leave", &[u64::from(rank)]);
        for peer in 0..self.ranks.len() as Rank {
            if self.peer_state(rank, peer).status == PairStatus::Connected {
                self.send_control(rank, peer, QueuedMessage::Bye);
            }
        }
    }

    /// Delivers a bye when all that was sent before it has arrived.
    pub(super) fn deliver_bye_if_quiet(&mut self, from: Rank, to: Rank) {
        if !self.peer_state(from, to).bye_waits || self.peer_state(to, from).status != PairStatus::Connected {
            return;
        }
        if self.transfers.iter().any(|(_, active)| active.is_of_pair(from, to)) {
            return;
        }
        self.event("left", &[u64::from(to), u64::from(from)]);
        self.peer_state(from, to).bye_waits = false;
        self.peer_state(to, from).status = PairStatus::Left;
        self.push_ready(to, Event::Departed { peer: from }, None);
        self.fail_transfers(to, from, &TransferError::Departed { peer: from });
    }

    pub(super) fn is_flushed(&self, rank: Rank) -> bool {
        let transfers = self.transfers.iter().any(|(_, active)| active.is_of(rank));
        let ranks = self.ranks.len();
        let said = (self.peer_states[rank as usize * ranks..][..ranks].iter())
            .all(|peer_state| peer_state.messages.is_empty() && !peer_state.bye_waits);
        !transfers && said
    }

    /// `rank` detects that `peer` is gone, or only this device of it.
    pub(super) fn detect(&mut self, rank: Rank, peer: Rank, cause: LossCause, device: Option<Incarnation>) {
        if !self.is_reachable(rank, peer) || self.ranks[rank as usize].dead {
            return;
        }
        let current = self.ranks[peer as usize].incarnation;
        let known = self.peer_state(rank, peer).incarnation.or(current);
        if device.is_some() && device != known {
            return;
        }
        self.event("lost", &[u64::from(rank), u64::from(peer)]);
        self.peer_state(rank, peer).status = PairStatus::Lost(cause.clone());
        self.drop_messages(rank, peer);
        self.cut_mappings(rank, peer);
        if let Some(responder) = self.ranks[rank as usize].responder.clone() {
            self.callbacks.push(Callback::Lost { responder, rank, peer, cause: cause.clone() });
        }
        self.push_ready(rank, Event::PeerLost { peer, cause: cause.clone() }, None);
        self.fail_transfers(rank, peer, &TransferError::Lost { peer, cause });
    }

    /// Drops all control messages between the two.
    fn drop_messages(&mut self, rank: Rank, peer: Rank) {
        for (from, to) in [(rank, peer), (peer, rank)] {
            let peer_state = self.peer_state(from, to);
            peer_state.messages.clear();
            peer_state.bye_waits = false;
        }
    }

    /// Cuts the wire from `rank` to `peer`, whichever devices have the ranks.
    pub(super) fn cut_for_ever(&mut self, rank: Rank, peer: Rank) {
        self.cut_wire(rank, peer);
        self.peer_state(rank, peer).link_is_down = true;
    }

    /// Cuts the wire from `rank` to `peer`.
    fn cut_wire(&mut self, rank: Rank, peer: Rank) {
        self.peer_state(rank, peer).cut = true;
        self.peer_state(rank, peer).messages.clear();
        let numbers: Vec<_> = (self.transfers.iter())
            .filter(|(_, active)| active.uses_wire(rank, peer))
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.end(number);
        }
        self.cut_mappings(rank, peer);
    }

    /// Cuts the mappings of `rank` off from `peer`; they keep their bytes.
    fn cut_mappings(&mut self, rank: Rank, peer: Rank) {
        let keys: Vec<_> =
            (self.mappings.range((rank, peer, RegionKey(0))..=(rank, peer, RegionKey(u64::MAX))))
                .map(|(&key, _)| key)
                .collect();
        for key in keys {
            if let Some(alias) = self.mappings.remove(&key).and_then(|mapping| mapping.alias.upgrade()) {
                alias.cut().expect("the host has memory for a copy of a mapping");
            }
        }
    }

    pub(super) fn sever(&mut self, rank: Rank, peer: Rank) {
        if std::mem::replace(&mut self.peer_state(rank, peer).severing, true) {
            return;
        }
        self.event("sever", &[u64::from(rank), u64::from(peer)]);
        let peer_state = self.peer_state(rank, peer);
        if matches!(peer_state.status, PairStatus::Idle | PairStatus::Connecting | PairStatus::Connected) {
            peer_state.status = PairStatus::Severed;
        }
        let wait = self.up_to(self.faults.severance);
        self.after(wait, SimEvent::Fenced(rank, peer));
    }

    pub(super) fn fenced(&mut self, rank: Rank, peer: Rank) {
        self.event("fenced", &[u64::from(rank), u64::from(peer)]);
        self.drop_messages(rank, peer);
        if self.mutant != Some(Mutant::SeveredPeerWrites) {
            self.cut_wire(peer, rank);
        }
        self.cut_mappings(rank, peer);
        self.fail_transfers(rank, peer, &TransferError::Severed { peer });
        self.peer_state(rank, peer).is_fenced = true;
        self.note(|| Record::Severed { rank, peer });
        self.push_ready(rank, Event::Severed { peer }, None);
        self.detect_later(peer, rank, LossCause::ConnectionClosed);
    }

    /// Drains a connected pair.
    pub(super) fn drain(&mut self, rank: Rank, peer: Rank) -> Result<(), SubmitError> {
        self.peer_state(rank, peer).drains.begin(peer)?;
        self.event("drain", &[u64::from(rank), u64::from(peer)]);
        self.note(|| Record::Drains { rank, peer });
        self.advance_drains(rank, peer);
        Ok(())
    }

    /// Sends the marks of a rank to its peer whose transfers from before have ended.
    pub(super) fn advance_drains(&mut self, rank: Rank, peer: Rank) {
        // Bytes of a dead rank that are on the wire may still land, and nobody knows when.
        while !self.ranks[rank as usize].dead {
            let drains = &self.peer_state(rank, peer).drains;
            let sent = drains.passed(OWN_MARK);
            if sent == drains.begun() || self.is_before_drain_under_way(rank, peer, sent) {
                return;
            }
            self.event("drain-mark", &[u64::from(rank), u64::from(peer), sent + 1]);
            self.peer_state(rank, peer).drains.pass(OWN_MARK, 1);
            let wait = self.network.latency(rank, peer) + self.random_delay();
            let device = self.ranks[rank as usize].incarnation;
            self.after(wait, SimEvent::DrainMark(rank, peer, device));
            self.tell_drained(rank, peer);
        }
    }

    /// Whether a transfer from before the drain after `drains` is under way.
    fn is_before_drain_under_way(&self, rank: Rank, peer: Rank, drains: u64) -> bool {
        self.mutant != Some(Mutant::DrainedBeforeLanding)
            && self.transfers.iter().any(|(_, active)| active.is_before_drain(rank, peer, drains))
    }

    /// Handles the arrival of a mark.
    pub(super) fn drain_marked(&mut self, from: Rank, to: Rank, device: Option<Incarnation>) {
        if self.peer_state(from, to).cut || !self.is_of_pair(to, from, device) {
            return;
        }
        self.peer_state(to, from).drains.pass(PEER_MARK, 1);
        self.tell_drained(to, from);
    }

    /// Reports the drains of a rank that are over.
    fn tell_drained(&mut self, rank: Rank, peer: Rank) {
        if !self.is_connected(rank, peer) {
            return;
        }
        while let Some(drained) = self.peer_state(rank, peer).drains.next_drained(peer) {
            self.event("drained", &[u64::from(rank), u64::from(peer)]);
            self.push_ready(rank, drained, None);
        }
    }

    /// The drains that a rank has begun.
    pub(super) fn drains_begun(&mut self, rank: Rank, peer: Rank) -> u64 {
        self.peer_state(rank, peer).drains.begun()
    }

    /// Removes everything of a rank; the others detect it one by one.
    pub(super) fn die(&mut self, rank: Rank, cause: LossCause) {
        if std::mem::replace(&mut self.ranks[rank as usize].dead, true) {
            return;
        }
        self.event("death", &[u64::from(rank)]);
        if !self.ranks[rank as usize].left {
            self.note(|| Record::Died { rank });
        }
        self.orphan_transfers(rank);
        let state = &mut self.ranks[rank as usize];
        state.inbox.clear();
        state.ready.clear();
        state.table.clear();
        for peer in (0..self.ranks.len() as Rank).filter(|&peer| peer != rank) {
            self.drop_messages(rank, peer);
            self.cut_wire(peer, rank);
            self.cut_mappings(rank, peer);
            self.detect_later(peer, rank, cause.clone());
        }
    }
}
