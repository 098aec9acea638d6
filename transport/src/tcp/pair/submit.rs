//! This rank's requests to the peer: transfers as frames, whole or in pieces on all connections.

use super::{PairState, Pending, Report, SplitTransfer};
use crate::device::{Source, SubmitError, Transfer, TransferId};
use crate::region::{RemoteSlice, Slice};
use crate::signals::Signal;
use crate::tcp::connection::{Body, SendCompletion};
use crate::tcp::frame::Frame;
use crate::tcp::slab::UNTRACKED_TOKEN;
use crate::tcp::{CONNECTIONS, QUEUE_DEPTH, SPLIT_BYTES_MIN};

/// Pieces of split puts begin at multiples of this many bytes of the put.
const SPLIT_ALIGN_BYTES: usize = 4096;

impl PairState {
    /// Queues a transfer that the device has checked.
    pub(in crate::tcp) fn submit(&mut self, transfer: Transfer, id: TransferId) -> Result<(), SubmitError> {
        let signal = if let Transfer::Put { signal, .. } = &transfer { signal.as_ref() } else { None };
        self.expect_room(signal)?;
        self.under_way += 1;
        match transfer {
            Transfer::Put { src, dst, signal } => self.submit_put(src, dst, signal, id),
            Transfer::Get { src, dst } => self.submit_get(src, &dst, id),
            Transfer::Atomic { word, op } => {
                let token = self.pending.insert(Pending::Atomic(id));
                let frame = Frame::Atomic { key: word.key, offset: word.offset, op, token };
                self.push(0, &frame, Body::Nothing, SendCompletion::Nothing);
            }
        }
        Ok(())
    }

    /// Queues a signal without data.
    pub(in crate::tcp) fn signal(&mut self, signal: &Signal, id: TransferId) -> Result<(), SubmitError> {
        self.expect_room(Some(signal))?;
        self.under_way += 1;
        self.push(0, &Frame::Signal { signal: *signal }, Body::Nothing, SendCompletion::Transfer(id));
        Ok(())
    }

    /// Whether one more transfer may be under way, and the peer has the signal slot.
    fn expect_room(&self, signal: Option<&Signal>) -> Result<(), SubmitError> {
        if self.under_way >= QUEUE_DEPTH {
            return Err(SubmitError::QueueFull { peer: self.peer });
        }
        match signal {
            Some(signal) if usize::from(signal.signal_slot) >= self.peer_signal_slots => {
                Err(SubmitError::NoSuchSignalSlot {
                    signal_slot: signal.signal_slot,
                    signal_slots: self.peer_signal_slots,
                })
            }
            _ => Ok(()),
        }
    }

    fn submit_put(&mut self, src: Source, dst: RemoteSlice, signal: Option<Signal>, id: TransferId) {
        let end = dst.offset.checked_add(dst.len);
        let accepted = self.accepted.get(&dst.key).is_some_and(|len| end.is_some_and(|end| end <= *len));
        let pieces = pieces(src.len());
        match src {
            Source::Slice(slice) if pieces > 1 => {
                let (token, written) = if accepted {
                    self.next_split += 1;
                    let parts = SplitTransfer { id, remaining: pieces as u8, result: Ok(0) };
                    (UNTRACKED_TOKEN | self.next_split, SendCompletion::Part(self.parts.insert(parts)))
                } else {
                    (self.pending.insert(Pending::Put(id)), SendCompletion::Nothing)
                };
                for (connection, (from, to)) in piece_bounds(slice.len(), pieces).enumerate() {
                    let piece = slice.slice(from..to).expect("pieces lie inside their whole");
                    let dst = RemoteSlice {
                        key: dst.key,
                        offset: dst.offset.saturating_add(from as u64),
                        len: (to - from) as u64,
                    };
                    let frame = if connection == 0 {
                        let other_connections = ((1u32 << pieces) - 2) as u8;
                        Frame::Put { dst, signal, wants_answer: !accepted, other_connections, token }
                    } else {
                        Frame::Piece { dst, token }
                    };
                    self.push(connection, &frame, Body::Slice(piece), written);
                }
            }
            src => {
                let (token, written) = if accepted {
                    (0, SendCompletion::Transfer(id))
                } else {
                    (self.pending.insert(Pending::Put(id)), SendCompletion::Nothing)
                };
                let frame = Frame::Put { dst, signal, wants_answer: !accepted, other_connections: 0, token };
                let body = match src {
                    Source::Slice(slice) => Body::Slice(slice),
                    Source::Inline(inline) => Body::Inline(inline),
                };
                self.push(0, &frame, body, written);
            }
        }
    }

    fn submit_get(&mut self, src: RemoteSlice, dst: &Slice, id: TransferId) {
        let pieces = pieces(dst.len());
        let report = if pieces == 1 {
            Report::Transfer(id)
        } else {
            Report::Part(self.parts.insert(SplitTransfer { id, remaining: pieces as u8, result: Ok(0) }))
        };
        for (connection, (from, to)) in piece_bounds(dst.len(), pieces).enumerate() {
            let piece = dst.slice(from..to).expect("pieces lie inside their whole");
            let src = RemoteSlice {
                key: src.key,
                offset: src.offset.saturating_add(from as u64),
                len: (to - from) as u64,
            };
            let token = self.pending.insert(Pending::Get { dst: piece, connection, report });
            if connection > 0 {
                self.announced[connection] += 1;
            }
            self.push(
                0,
                &Frame::Get { src, connection: connection as u8, token },
                Body::Nothing,
                SendCompletion::Nothing,
            );
        }
    }
}

/// The number of pieces of a transfer of this many bytes.
fn pieces(bytes: usize) -> usize {
    if bytes >= SPLIT_BYTES_MIN { CONNECTIONS } else { 1 }
}

/// The first byte and the end of each piece.
fn piece_bounds(bytes: usize, pieces: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = bytes.div_ceil(pieces).next_multiple_of(SPLIT_ALIGN_BYTES).min(bytes.max(1));
    (0..pieces).map(move |piece| {
        let from = (piece * step).min(bytes);
        (from, if piece + 1 == pieces { bytes } else { (from + step).min(bytes) })
    })
}
