//! Pairs of ranks: connecting, control messages, byes, losses, severing, deaths.

use std::collections::VecDeque;
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::device::{Event, LossCause, MESSAGE_BYTES_MAX, PostError, SubmitError, TransferError};
use crate::region::RegionKey;
use crate::signals::Signals;
use crate::sim::observer::Record;
use crate::sim::state::{Callback, Happening, QueueKey, State};
use crate::sim::world::Canary;

/// Control messages to one peer that are under way before `QueueFull`.
pub(super) const POSTS_MAX: usize = 1024;

/// The state of a rank's pair with a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Bond {
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
pub(super) struct Side {
    pub(super) bond: Bond,
    /// `sever` was called, whatever had happened before.
    pub(super) severing: bool,
    /// The rank's signal slots for the peer.
    pub(super) signal_slots: Option<Signals>,
    /// Transfers to the peer whose `Done` was not polled yet.
    pub(super) under_way: usize,
    /// The wire to the peer is cut.
    pub(super) cut: bool,
    /// The event that gives up connecting.
    timeout: Option<QueueKey>,
    messages: VecDeque<Control>,
    last_message_at: Nanos,
    /// The bye has arrived at the peer, but earlier transfers have not.
    goodbye_waits: bool,
}

enum Control {
    Message(Vec<u8>),
    Goodbye,
}

impl State {
    pub(super) fn side(&mut self, rank: Rank, peer: Rank) -> &mut Side {
        &mut self.sides[rank as usize * self.ranks.len() + peer as usize]
    }

    pub(super) fn signal_slots(&mut self, rank: Rank, peer: Rank) -> Signals {
        let signal_slots = self.ranks[rank as usize].signal_slots;
        self.side(rank, peer).signal_slots.get_or_insert_with(|| Signals::on_heap(signal_slots)).clone()
    }

    pub(super) fn is_reachable(&mut self, rank: Rank, peer: Rank) -> bool {
        matches!(self.side(rank, peer).bond, Bond::Connecting | Bond::Connected)
    }

    pub(super) fn connect(&mut self, rank: Rank, peer: Rank, limit: Duration) {
        if self.side(rank, peer).bond != Bond::Idle {
            return;
        }
        self.event("connect", &[u64::from(rank), u64::from(peer)]);
        self.side(rank, peer).bond = Bond::Connecting;
        let timeout = self.after(limit, Happening::ConnectTimeout(rank, peer, limit));
        self.side(rank, peer).timeout = Some(timeout);
        let mutual = self.is_reachable(peer, rank) && !self.ranks[peer as usize].dead;
        let whole = !self.side(rank, peer).cut && !self.side(peer, rank).cut;
        if mutual && whole {
            for (rank, peer) in [(rank, peer), (peer, rank)] {
                let wait = self.network.latency(rank, peer) + self.lateness();
                self.after(wait, Happening::Connected(rank, peer));
            }
        }
    }

    pub(super) fn connected(&mut self, rank: Rank, peer: Rank) {
        if self.side(rank, peer).bond != Bond::Connecting || self.ranks[rank as usize].dead {
            return;
        }
        self.event("connected", &[u64::from(rank), u64::from(peer)]);
        self.side(rank, peer).bond = Bond::Connected;
        if let Some(timeout) = self.side(rank, peer).timeout.take() {
            self.cancel(timeout);
        }
        self.push_ready(rank, Event::Connected { peer }, None);
        self.say_goodbye_if_quiet(peer, rank);
    }

    pub(super) fn not_reached(&mut self, rank: Rank, peer: Rank, limit: Duration) {
        if self.side(rank, peer).bond == Bond::Connecting {
            self.detect(rank, peer, LossCause::NotReached(limit));
        }
    }

    pub(super) fn may_submit(&mut self, rank: Rank, peer: Rank) -> Result<(), SubmitError> {
        let left = self.ranks[rank as usize].left;
        match &self.side(rank, peer).bond {
            Bond::Connected if left => Err(SubmitError::NotConnected { peer }),
            Bond::Connected => Ok(()),
            Bond::Idle | Bond::Connecting => Err(SubmitError::NotConnected { peer }),
            Bond::Severed => Err(SubmitError::Severed { peer }),
            Bond::Left => Err(SubmitError::Left { peer }),
            Bond::Lost(cause) => Err(SubmitError::Lost { peer, kind: cause.kind() }),
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
        let side = self.side(rank, peer);
        if side.bond != Bond::Connected || quiet {
            return Err(PostError::NotConnected { peer });
        }
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        if side.messages.len() >= POSTS_MAX && !is_urgent {
            return Err(PostError::QueueFull { peer });
        }
        if is_urgent && self.canary == Some(Canary::UrgentLost) {
            return Ok(());
        }
        self.event("post", &[u64::from(rank), u64::from(peer), message.len() as u64]);
        self.send_control(rank, peer, Control::Message(message));
        Ok(())
    }

    /// Control messages keep their order, however late one is.
    fn send_control(&mut self, rank: Rank, peer: Rank, control: Control) {
        let earliest = self.now + self.network.latency(rank, peer) + self.lateness();
        let side = self.side(rank, peer);
        side.messages.push_back(control);
        side.last_message_at = side.last_message_at.max(earliest);
        let at = side.last_message_at;
        self.at(at, Happening::Message(rank, peer));
    }

    /// Delays later messages until then: a reader of a message knows a key in it.
    pub(super) fn hold_messages_back(&mut self, rank: Rank, until: Nanos) {
        for peer in 0..self.ranks.len() as Rank {
            let side = self.side(rank, peer);
            side.last_message_at = side.last_message_at.max(until);
        }
    }

    pub(super) fn deliver_message(&mut self, from: Rank, to: Rank) {
        let stopped_until = self.ranks[to as usize].stopped_until;
        if self.now < stopped_until {
            self.at(stopped_until, Happening::Message(from, to));
            return;
        }
        let reachable = self.is_reachable(to, from) && !self.ranks[to as usize].dead;
        let side = self.side(from, to);
        // Losses empty the queue but leave the events.
        let Some(control) = side.messages.pop_front() else { return };
        if side.cut || !reachable {
            return;
        }
        match control {
            Control::Message(message) => {
                self.event("message", &[u64::from(from), u64::from(to), message.len() as u64]);
                if let Some(responder) = self.ranks[to as usize].responder.clone() {
                    self.callbacks.push(Callback::Message { responder, from, to, message });
                }
                self.wake(to);
            }
            Control::Goodbye => {
                side.goodbye_waits = true;
                self.say_goodbye_if_quiet(from, to);
            }
        }
    }

    pub(super) fn leave(&mut self, rank: Rank) {
        if std::mem::replace(&mut self.ranks[rank as usize].left, true) {
            return;
        }
        self.event("leave", &[u64::from(rank)]);
        for peer in 0..self.ranks.len() as Rank {
            if self.side(rank, peer).bond == Bond::Connected {
                self.send_control(rank, peer, Control::Goodbye);
            }
        }
    }

    /// Delivers a bye when all that was sent before it has arrived.
    pub(super) fn say_goodbye_if_quiet(&mut self, from: Rank, to: Rank) {
        if !self.side(from, to).goodbye_waits || self.side(to, from).bond != Bond::Connected {
            return;
        }
        if self.flights.iter().any(|(_, flight)| flight.submitter == from && flight.peer == to) {
            return;
        }
        self.event("left", &[u64::from(to), u64::from(from)]);
        self.side(from, to).goodbye_waits = false;
        self.side(to, from).bond = Bond::Left;
        self.push_ready(to, Event::Left { peer: from }, None);
        self.fail_transfers(to, from, &TransferError::Left { peer: from });
    }

    pub(super) fn is_flushed(&self, rank: Rank) -> bool {
        let flights = self.flights.iter().any(|(_, flight)| flight.submitter == rank);
        let ranks = self.ranks.len();
        let said = (self.sides[rank as usize * ranks..][..ranks].iter())
            .all(|side| side.messages.is_empty() && !side.goodbye_waits);
        !flights && said
    }

    /// `rank` detects that `peer` is gone.
    pub(super) fn detect(&mut self, rank: Rank, peer: Rank, cause: LossCause) {
        if !self.is_reachable(rank, peer) || self.ranks[rank as usize].dead {
            return;
        }
        self.event("lost", &[u64::from(rank), u64::from(peer)]);
        self.side(rank, peer).bond = Bond::Lost(cause.clone());
        self.hang_up(rank, peer);
        self.cut_views(rank, peer);
        if let Some(responder) = self.ranks[rank as usize].responder.clone() {
            self.callbacks.push(Callback::Lost { responder, peer, cause: cause.clone() });
        }
        self.push_ready(rank, Event::PeerLost { peer, cause: cause.clone() }, None);
        self.fail_transfers(rank, peer, &TransferError::Lost { peer, cause });
    }

    /// Drops all control messages between the two.
    fn hang_up(&mut self, rank: Rank, peer: Rank) {
        for (from, to) in [(rank, peer), (peer, rank)] {
            let side = self.side(from, to);
            side.messages.clear();
            side.goodbye_waits = false;
        }
    }

    /// Cuts the wire from `rank` to `peer`.
    pub(super) fn cut_wire(&mut self, rank: Rank, peer: Rank) {
        self.side(rank, peer).cut = true;
        self.side(rank, peer).messages.clear();
        let numbers: Vec<_> = (self.flights.iter())
            .filter(|(_, flight)| flight.uses_way(rank, peer))
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            self.end(number);
        }
        self.cut_views(rank, peer);
    }

    /// Cuts the mappings of `rank` off from `peer`; they keep their bytes.
    fn cut_views(&mut self, rank: Rank, peer: Rank) {
        let keys: Vec<_> = (self.views.range((rank, peer, RegionKey(0))..=(rank, peer, RegionKey(u64::MAX))))
            .map(|(&key, _)| key)
            .collect();
        for key in keys {
            if let Some(alias) = self.views.remove(&key).and_then(|view| view.alias.upgrade()) {
                alias.cut().expect("the host has memory for a copy of a mapping");
            }
        }
    }

    pub(super) fn sever(&mut self, rank: Rank, peer: Rank) {
        if std::mem::replace(&mut self.side(rank, peer).severing, true) {
            return;
        }
        self.event("sever", &[u64::from(rank), u64::from(peer)]);
        let side = self.side(rank, peer);
        if matches!(side.bond, Bond::Idle | Bond::Connecting | Bond::Connected) {
            side.bond = Bond::Severed;
        }
        let wait = self.up_to(self.faults.severance);
        self.after(wait, Happening::Fenced(rank, peer));
    }

    pub(super) fn fenced(&mut self, rank: Rank, peer: Rank) {
        self.event("fenced", &[u64::from(rank), u64::from(peer)]);
        self.hang_up(rank, peer);
        if self.canary != Some(Canary::SeveredPeerWrites) {
            self.cut_wire(peer, rank);
        }
        self.cut_views(rank, peer);
        self.fail_transfers(rank, peer, &TransferError::Severed { peer });
        self.note(|| Record::Severed { rank, peer });
        self.push_ready(rank, Event::Severed { peer }, None);
        self.detect_later(peer, rank, LossCause::ConnectionClosed);
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
            self.hang_up(rank, peer);
            self.cut_wire(peer, rank);
            self.cut_views(rank, peer);
            self.detect_later(peer, rank, cause.clone());
        }
    }
}
