//! The handling of the peer's frames, and of the data that follow them.

use super::{EventQueue, IncomingSplitPut, PairState, Pending, PutCompletion, ReceiveAction, Report};
use crate::device::{ProtocolViolation, TransferError};
use crate::region::RemoteSlice;
use crate::signals::Signal;
use crate::tcp::connection::{Body, Incoming, SendCompletion};
use crate::tcp::frame::Frame;
use crate::tcp::regions::Regions;
use crate::tcp::slab::UNTRACKED_TOKEN;
use crate::tcp::{CONNECTIONS, QUEUE_DEPTH};

/// Answers that wait to be sent at most; a peer has at most this many requests under way.
const ANSWERS_MAX: usize = QUEUE_DEPTH * CONNECTIONS;

impl PairState {
    /// Handles a frame; returns the destination of its data, if data follow.
    pub(super) fn handle(
        &mut self,
        connection: usize,
        frame: &Frame,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<Option<Incoming<ReceiveAction>>, ProtocolViolation> {
        if connection > 0 && !matches!(frame, Frame::Piece { .. } | Frame::GetReply { .. }) {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let (dst, action) = match *frame {
            Frame::Signal { signal } => {
                self.check_signal(&signal)?;
                self.signal_slots.signal(&signal);
                return Ok(None);
            }
            Frame::Put { dst, signal, wants_answer, other_connections, token } => {
                if let Some(signal) = &signal {
                    self.check_signal(signal)?;
                }
                let place = regions.find(&dst);
                let end =
                    PutCompletion { signal, wants_answer, refused: place.is_none(), key: dst.key, token };
                if other_connections == 0 {
                    (place, ReceiveAction::Put(end))
                } else {
                    self.announce_split(other_connections, end)?;
                    (place, ReceiveAction::Piece { token, connection })
                }
            }
            Frame::Piece { dst, token } => {
                let place = regions.find(&dst);
                let split = self.splits.iter_mut().find(|split| split.token == token);
                let split = split.ok_or(ProtocolViolation::UnexpectedAnswer)?;
                split.end.refused |= place.is_none();
                (place, ReceiveAction::Piece { token, connection })
            }
            Frame::GetReply { len, token } => match self.pending.find(token) {
                Some(Pending::Get { dst, connection: asked, .. })
                    if *asked == connection && dst.len() as u64 == len =>
                {
                    (Some(dst.clone()), ReceiveAction::Get { token, connection })
                }
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Get { src, connection, token } => {
                if usize::from(connection) >= CONNECTIONS {
                    return Err(ProtocolViolation::MalformedFrame);
                }
                match regions.find(&src) {
                    Some(slice) => {
                        let reply = Frame::GetReply { len: src.len, token };
                        self.answer(usize::from(connection), &reply, Body::Slice(slice))?;
                    }
                    None => self.answer(0, &Frame::Refused { key: src.key, token }, Body::Nothing)?,
                }
                return Ok(None);
            }
            Frame::Atomic { key, offset, op, token } => {
                let word = regions.find(&RemoteSlice { key, offset, len: 8 });
                let reply = match word.and_then(|word| word.atomic(op)) {
                    Some(old) => Frame::AtomicReply { old, token },
                    None => Frame::Refused { key, token },
                };
                self.answer(0, &reply, Body::Nothing)?;
                return Ok(None);
            }
            _ => return self.handle_answer(frame, event_queue).map(|()| None),
        };
        Ok(Some(Incoming { dst, at: 0, remaining: frame.body_bytes(), action }))
    }

    fn handle_answer(
        &mut self,
        frame: &Frame,
        event_queue: &mut EventQueue,
    ) -> Result<(), ProtocolViolation> {
        match *frame {
            Frame::AtomicReply { old, token } => match self.pending.take(token) {
                Some(Pending::Atomic(id)) => self.report(Report::Transfer(id), Ok(old), event_queue),
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Accepted { key, region_bytes, token } => match self.pending.take(token) {
                Some(Pending::Put(id)) => {
                    if !self.revoked.contains(&key) {
                        self.accepted.insert(key, region_bytes);
                    }
                    if self.pending.len() == 0 {
                        self.revoked.clear();
                    }
                    self.report(Report::Transfer(id), Ok(0), event_queue);
                }
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Refused { key, token } => {
                self.accepted.remove(&key);
                if token == 0 || token & UNTRACKED_TOKEN != 0 {
                    // The put was complete before the peer's revocation arrived.
                    tracing::warn!(
                        peer = self.peer,
                        ?key,
                        "a put named a region that its owner had released; nothing was written and no signal shown"
                    );
                    return Ok(());
                }
                let refused = Err(TransferError::Refused { peer: self.peer, key });
                match self.pending.take(token) {
                    Some(Pending::Put(id) | Pending::Atomic(id)) => {
                        self.report(Report::Transfer(id), refused, event_queue);
                    }
                    Some(Pending::Get { connection, report, .. }) => {
                        self.announced[connection] = self.announced[connection].saturating_sub(1);
                        self.report(report, refused, event_queue);
                    }
                    None => return Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
            Frame::Bye => self.has_peer_bye = true,
            _ => return Err(ProtocolViolation::MalformedFrame),
        }
        Ok(())
    }

    fn announce_split(&mut self, other_connections: u8, end: PutCompletion) -> Result<(), ProtocolViolation> {
        let known = self.splits.iter().any(|split| split.token == end.token);
        if other_connections & 1 != 0
            || u32::from(other_connections) >> CONNECTIONS != 0
            || known
            || self.splits.len() >= QUEUE_DEPTH
        {
            return Err(ProtocolViolation::MalformedFrame);
        }
        for connection in 1..CONNECTIONS {
            self.announced[connection] += u32::from(other_connections >> connection & 1);
        }
        self.splits.push(IncomingSplitPut {
            token: end.token,
            remaining: 1 + other_connections.count_ones(),
            end,
        });
        Ok(())
    }

    /// Handles data that have arrived in full.
    pub(super) fn arrived(
        &mut self,
        action: ReceiveAction,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<(), ProtocolViolation> {
        match action {
            ReceiveAction::Put(end) => self.put_arrived(&end, regions),
            ReceiveAction::Piece { token, connection } => {
                if connection > 0 {
                    self.announced[connection] = self.announced[connection].saturating_sub(1);
                }
                let Some(at) = self.splits.iter().position(|split| split.token == token) else {
                    return Err(ProtocolViolation::UnexpectedAnswer);
                };
                self.splits[at].remaining = self.splits[at].remaining.saturating_sub(1);
                if self.splits[at].remaining == 0 {
                    let split = self.splits.swap_remove(at);
                    self.put_arrived(&split.end, regions)?;
                }
                Ok(())
            }
            ReceiveAction::Get { token, connection } => {
                if connection > 0 {
                    self.announced[connection] = self.announced[connection].saturating_sub(1);
                }
                match self.pending.take(token) {
                    Some(Pending::Get { report, .. }) => {
                        self.report(report, Ok(0), event_queue);
                        Ok(())
                    }
                    _ => Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
        }
    }

    fn put_arrived(&mut self, end: &PutCompletion, regions: &mut Regions) -> Result<(), ProtocolViolation> {
        let PutCompletion { key, token, .. } = *end;
        if end.refused {
            // Refusals that nobody awaits count against the limit of answers.
            if end.wants_answer || self.answers < ANSWERS_MAX {
                self.answer(0, &Frame::Refused { key, token }, Body::Nothing)?;
            }
            return Ok(());
        }
        if let Some(signal) = &end.signal {
            self.signal_slots.signal(signal);
        }
        if end.wants_answer {
            // Zero: released meanwhile; the next put must ask again.
            let region_bytes = regions.grant(key, self.peer).unwrap_or(0);
            self.answer(0, &Frame::Accepted { key, region_bytes, token }, Body::Nothing)?;
        }
        Ok(())
    }

    fn answer(&mut self, connection: usize, frame: &Frame, body: Body) -> Result<(), ProtocolViolation> {
        if self.answers >= ANSWERS_MAX {
            return Err(ProtocolViolation::TooManyRequests);
        }
        self.answers += 1;
        self.push(connection, frame, body, SendCompletion::Answer);
        Ok(())
    }

    fn check_signal(&self, signal: &Signal) -> Result<(), ProtocolViolation> {
        if usize::from(signal.signal_slot) < self.signal_slots.len() {
            Ok(())
        } else {
            Err(ProtocolViolation::UnknownSignalSlot)
        }
    }
}
