//! The handling of the peer's frames, and of the data that follow them.

use super::{Arrival, Core, Outbox, Pending, PutEnd, Report, Split, Then};
use crate::device::{ProtocolViolation, TransferError};
use crate::region::RemoteSlice;
use crate::signals::Signal;
use crate::tcp::connection::{Body, Incoming, Written};
use crate::tcp::frame::Frame;
use crate::tcp::regions::Regions;
use crate::tcp::slab::FOREIGN_TOKEN;
use crate::tcp::{CONNECTIONS, QUEUE_DEPTH};

/// Answers that wait to be sent at most; a peer has at most this many requests under way.
const ANSWERS_MAX: usize = QUEUE_DEPTH * CONNECTIONS;

impl Core {
    /// Handles a frame; returns the destination of its data, if data follow.
    pub(super) fn handle(
        &mut self,
        connection: usize,
        frame: &Frame,
        regions: &mut Regions,
        outbox: &mut Outbox,
    ) -> Result<Option<Incoming<Arrival>>, ProtocolViolation> {
        if connection > 0 && !matches!(frame, Frame::Piece { .. } | Frame::GetReply { .. }) {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let (dst, then) = match *frame {
            Frame::Signal { signal } => {
                self.check_signal(&signal)?;
                self.signal_slots.signal(&signal);
                return Ok(None);
            }
            Frame::Put { dst, signal, answered, others, token } => {
                if let Some(signal) = &signal {
                    self.check_signal(signal)?;
                }
                let place = regions.find(&dst);
                let end = PutEnd { signal, answered, refused: place.is_none(), key: dst.key, token };
                if others == 0 {
                    (place, Then::Put(end))
                } else {
                    self.announce_split(others, end)?;
                    (place, Then::Piece { token, connection })
                }
            }
            Frame::Piece { dst, token } => {
                let place = regions.find(&dst);
                let split = self.splits.iter_mut().find(|split| split.token == token);
                let split = split.ok_or(ProtocolViolation::UnexpectedAnswer)?;
                split.end.refused |= place.is_none();
                (place, Then::Piece { token, connection })
            }
            Frame::GetReply { len, token } => match self.pending.find(token) {
                Some(Pending::Get { dst, connection: asked, .. })
                    if *asked == connection && dst.len() as u64 == len =>
                {
                    (Some(dst.clone()), Then::Get { token, connection })
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
            _ => return self.handle_answer(frame, outbox).map(|()| None),
        };
        Ok(Some(Incoming { dst, at: 0, remaining: frame.body_bytes(), then: Arrival(then) }))
    }

    fn handle_answer(&mut self, frame: &Frame, outbox: &mut Outbox) -> Result<(), ProtocolViolation> {
        match *frame {
            Frame::AtomicReply { old, token } => match self.pending.take(token) {
                Some(Pending::Atomic(id)) => self.report(Report::Transfer(id), Ok(old), outbox),
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Accepted { key, region_bytes, token } => match self.pending.take(token) {
                Some(Pending::Put(id)) => {
                    if !self.revoked.contains(&key) {
                        self.proved.insert(key, region_bytes);
                    }
                    if self.pending.len() == 0 {
                        self.revoked.clear();
                    }
                    self.report(Report::Transfer(id), Ok(0), outbox);
                }
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Refused { key, token } => {
                self.proved.remove(&key);
                if token == 0 || token & FOREIGN_TOKEN != 0 {
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
                        self.report(Report::Transfer(id), refused, outbox);
                    }
                    Some(Pending::Get { connection, report, .. }) => {
                        self.announced[connection] = self.announced[connection].saturating_sub(1);
                        self.report(report, refused, outbox);
                    }
                    None => return Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
            Frame::Bye => self.has_peer_bye = true,
            _ => return Err(ProtocolViolation::MalformedFrame),
        }
        Ok(())
    }

    fn announce_split(&mut self, others: u8, end: PutEnd) -> Result<(), ProtocolViolation> {
        let known = self.splits.iter().any(|split| split.token == end.token);
        if others & 1 != 0
            || u32::from(others) >> CONNECTIONS != 0
            || known
            || self.splits.len() >= QUEUE_DEPTH
        {
            return Err(ProtocolViolation::MalformedFrame);
        }
        for connection in 1..CONNECTIONS {
            self.announced[connection] += u32::from(others >> connection & 1);
        }
        self.splits.push(Split { token: end.token, remaining: 1 + others.count_ones(), end });
        Ok(())
    }

    /// Handles data that have arrived in full.
    pub(super) fn arrived(
        &mut self,
        then: Then,
        regions: &mut Regions,
        outbox: &mut Outbox,
    ) -> Result<(), ProtocolViolation> {
        match then {
            Then::Put(end) => self.put_arrived(&end, regions),
            Then::Piece { token, connection } => {
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
            Then::Get { token, connection } => {
                if connection > 0 {
                    self.announced[connection] = self.announced[connection].saturating_sub(1);
                }
                match self.pending.take(token) {
                    Some(Pending::Get { report, .. }) => {
                        self.report(report, Ok(0), outbox);
                        Ok(())
                    }
                    _ => Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
        }
    }

    fn put_arrived(&mut self, end: &PutEnd, regions: &mut Regions) -> Result<(), ProtocolViolation> {
        let PutEnd { key, token, .. } = *end;
        if end.refused {
            // Refusals that nobody awaits count against the limit of answers.
            if end.answered || self.answers < ANSWERS_MAX {
                self.answer(0, &Frame::Refused { key, token }, Body::Nothing)?;
            }
            return Ok(());
        }
        if let Some(signal) = &end.signal {
            self.signal_slots.signal(signal);
        }
        if end.answered {
            // Zero: released meanwhile; the next put must ask again.
            let region_bytes = regions.entrust(key, self.peer).unwrap_or(0);
            self.answer(0, &Frame::Accepted { key, region_bytes, token }, Body::Nothing)?;
        }
        Ok(())
    }

    fn answer(&mut self, connection: usize, frame: &Frame, body: Body) -> Result<(), ProtocolViolation> {
        if self.answers >= ANSWERS_MAX {
            return Err(ProtocolViolation::TooManyRequests);
        }
        self.answers += 1;
        self.push(connection, frame, body, Written::Answer);
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
