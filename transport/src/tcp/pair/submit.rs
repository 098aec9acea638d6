//! What this rank asks of the peer: transfers as frames, whole or in pieces on all lanes.

use super::{Core, Parts, Pending, Report};
use crate::cells::Notice;
use crate::device::{Source, SubmitError, Transfer, TransferId};
use crate::region::{RemoteSlice, Slice};
use crate::tcp::frame::Frame;
use crate::tcp::lane::{Body, Written};
use crate::tcp::slab::FOREIGN_TOKEN;
use crate::tcp::{LANES, QUEUE_DEPTH, SPLIT_BYTES_MIN};

/// Pieces of split puts begin at multiples of this many bytes of the put.
const SPLIT_ALIGN_BYTES: usize = 4096;

impl Core {
    /// Queues a transfer that the device has checked.
    pub(in crate::tcp) fn submit(&mut self, transfer: Transfer, id: TransferId) -> Result<(), SubmitError> {
        let notice = if let Transfer::Put { notice, .. } = &transfer { notice.as_ref() } else { None };
        self.expect_room(notice)?;
        self.under_way += 1;
        match transfer {
            Transfer::Put { src, dst, notice } => self.submit_put(src, dst, notice, id),
            Transfer::Get { src, dst } => self.submit_get(src, &dst, id),
            Transfer::Atomic { word, op } => {
                let token = self.pending.insert(Pending::Atomic(id));
                let frame = Frame::Atomic { key: word.key, offset: word.offset, op, token };
                self.push(0, &frame, Body::Nothing, Written::Nothing);
            }
        }
        Ok(())
    }

    /// Queues a notice alone.
    pub(in crate::tcp) fn notify(&mut self, notice: &Notice, id: TransferId) -> Result<(), SubmitError> {
        self.expect_room(Some(notice))?;
        self.under_way += 1;
        self.push(0, &Frame::Notify { notice: *notice }, Body::Nothing, Written::Transfer(id));
        Ok(())
    }

    /// Whether one more transfer may be under way, and the peer has the cell of its notice.
    fn expect_room(&self, notice: Option<&Notice>) -> Result<(), SubmitError> {
        if self.under_way >= QUEUE_DEPTH {
            return Err(SubmitError::QueueFull { peer: self.peer });
        }
        match notice {
            Some(notice) if usize::from(notice.cell) >= self.peer_cells => {
                Err(SubmitError::NoSuchCell { cell: notice.cell, cells: self.peer_cells })
            }
            _ => Ok(()),
        }
    }

    fn submit_put(&mut self, src: Source, dst: RemoteSlice, notice: Option<Notice>, id: TransferId) {
        let end = dst.offset.checked_add(dst.len);
        let proved = self.proved.get(&dst.key).is_some_and(|len| end.is_some_and(|end| end <= *len));
        let pieces = pieces(src.len());
        match src {
            Source::Slice(slice) if pieces > 1 => {
                let (token, written) = if proved {
                    self.next_split += 1;
                    let parts = Parts { id, remaining: pieces as u8, result: Ok(0) };
                    (FOREIGN_TOKEN | self.next_split, Written::Part(self.parts.insert(parts)))
                } else {
                    (self.pending.insert(Pending::Put(id)), Written::Nothing)
                };
                for (lane, (from, to)) in piece_bounds(slice.len(), pieces).enumerate() {
                    let piece = slice.slice(from..to).expect("pieces lie inside their whole");
                    let dst = RemoteSlice {
                        key: dst.key,
                        offset: dst.offset.saturating_add(from as u64),
                        len: (to - from) as u64,
                    };
                    let frame = if lane == 0 {
                        let others = ((1u32 << pieces) - 2) as u8;
                        Frame::Put { dst, notice, answered: !proved, others, token }
                    } else {
                        Frame::Piece { dst, token }
                    };
                    self.push(lane, &frame, Body::Slice(piece), written);
                }
            }
            src => {
                let (token, written) = if proved {
                    (0, Written::Transfer(id))
                } else {
                    (self.pending.insert(Pending::Put(id)), Written::Nothing)
                };
                let frame = Frame::Put { dst, notice, answered: !proved, others: 0, token };
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
            Report::Part(self.parts.insert(Parts { id, remaining: pieces as u8, result: Ok(0) }))
        };
        for (lane, (from, to)) in piece_bounds(dst.len(), pieces).enumerate() {
            let piece = dst.slice(from..to).expect("pieces lie inside their whole");
            let src = RemoteSlice {
                key: src.key,
                offset: src.offset.saturating_add(from as u64),
                len: (to - from) as u64,
            };
            let token = self.pending.insert(Pending::Get { dst: piece, lane, report });
            if lane > 0 {
                self.announced[lane] += 1;
            }
            self.push(0, &Frame::Get { src, lane: lane as u8, token }, Body::Nothing, Written::Nothing);
        }
    }
}

/// How many pieces a transfer of so many bytes travels in.
fn pieces(bytes: usize) -> usize {
    if bytes >= SPLIT_BYTES_MIN { LANES } else { 1 }
}

/// Where the pieces begin and end.
fn piece_bounds(bytes: usize, pieces: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = bytes.div_ceil(pieces).next_multiple_of(SPLIT_ALIGN_BYTES).min(bytes.max(1));
    (0..pieces).map(move |piece| {
        let from = (piece * step).min(bytes);
        (from, if piece + 1 == pieces { bytes } else { (from + step).min(bytes) })
    })
}
