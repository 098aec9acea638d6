//! Striped transfers: the parts on each queue pair of a peer, and when all have arrived or ended.
//! Pure.
//!
//! Queue pairs are not ordered with each other, so the receiver counts ([`IncomingStripedPuts`]):
//! each part of a put with a signal is a write whose immediate states the put's number and the
//! number of its parts. A striped transfer has one part, perhaps an empty one, on each queue pair
//! of its peer. **Invariant:** each queue pair is in order, so the n-th part on each belongs to the
//! n-th striped put, and no put completes before those that were sent before it. The number is a
//! check only, so four bits suffice.

use std::collections::VecDeque;
use std::ops::Range;

use super::wire::{QUEUE_PAIRS_MAX, Stripe};
use crate::device::{ProtocolViolation, TransferId};

/// Parts begin at multiples of this, in bytes, unless they are shorter.
const PART_ALIGN_BYTES: usize = 4096;

/// The range of part `queue` of `queues` in a transfer of `bytes`; the last parts may be shorter,
/// or empty.
pub(super) fn part(bytes: usize, queues: usize, queue: usize) -> Range<usize> {
    let even = bytes.div_ceil(queues);
    let length = if even < PART_ALIGN_BYTES { even } else { even.next_multiple_of(PART_ALIGN_BYTES) };
    (queue * length).min(bytes)..((queue + 1) * length).min(bytes)
}

/// Incomplete striped puts of a peer at most; a queue pair and its completions hold far fewer.
const ARRIVING_MAX: usize = 4096;

/// Striped transfers whose ends are reported.
#[derive(Default)]
pub(super) struct StripedTransfers {
    under_way: VecDeque<StripedTransfer>,
    /// The number of transfers that have ended.
    ended: u64,
    /// The number of parts that have ended, by queue pair.
    parts: [u64; QUEUE_PAIRS_MAX],
}

struct StripedTransfer {
    /// `None`: reported already.
    id: Option<TransferId>,
    parts_left: usize,
}

impl StripedTransfers {
    /// Records a transfer with a part on each of `queues` queue pairs.
    pub(super) fn begin(&mut self, id: TransferId, queues: usize) {
        self.under_way.push_back(StripedTransfer { id: Some(id), parts_left: queues });
    }

    fn next_on(&mut self, queue: usize) -> Option<&mut StripedTransfer> {
        let index = self.parts[queue] - self.ended;
        self.under_way.get_mut(index as usize)
    }

    /// Records the end of the next part on this queue pair; returns its transfer after the last
    /// part.
    pub(super) fn part_ended(&mut self, queue: usize) -> Option<TransferId> {
        let transfer = self.next_on(queue)?;
        transfer.parts_left -= 1;
        let is_last = transfer.parts_left == 0;
        self.parts[queue] += 1;
        if !is_last {
            return None;
        }
        self.ended += 1;
        self.under_way.pop_front()?.id
    }

    /// Records the failure of the next part on this queue pair; returns its transfer, once.
    pub(super) fn part_failed(&mut self, queue: usize) -> Option<TransferId> {
        self.next_on(queue)?.id.take()
    }

    /// The transfers that have not ended.
    pub(super) fn into_ids(self) -> impl Iterator<Item = TransferId> {
        self.under_way.into_iter().filter_map(|transfer| transfer.id)
    }
}

/// Striped puts of a peer of which some parts have arrived.
#[derive(Default)]
pub(super) struct IncomingStripedPuts {
    puts: VecDeque<StripedPut>,
    /// The number of puts that have arrived.
    arrived: u64,
    /// The number of parts that have arrived, by queue pair.
    parts: [u64; QUEUE_PAIRS_MAX],
}

/// A striped put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StripedPut {
    pub(super) signal_slot: u16,
    /// Length of the payload in the inbox slot, if there is one.
    pub(super) payload_bytes: Option<u32>,
    parts_left: usize,
}

impl IncomingStripedPuts {
    /// Records a part on one of `queues` queue pairs; returns its put after the last part.
    pub(super) fn part(
        &mut self,
        queue: usize,
        queues: usize,
        stripe: Stripe,
        signal_slot: u16,
        payload_bytes: Option<u32>,
    ) -> Result<Option<StripedPut>, ProtocolViolation> {
        let number = self.parts[queue];
        if stripe.number != Stripe::number(number) || usize::from(stripe.parts) != queues {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        let index = (number - self.arrived) as usize;
        if index == self.puts.len() && index < ARRIVING_MAX {
            self.puts.push_back(StripedPut { signal_slot, payload_bytes: None, parts_left: queues });
        }
        // A queue pair is at most one part ahead of the newest put.
        let put = self.puts.get_mut(index).ok_or(ProtocolViolation::UnexpectedAnswer)?;
        if put.signal_slot != signal_slot || (put.payload_bytes.is_some() && payload_bytes.is_some()) {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        put.payload_bytes = put.payload_bytes.or(payload_bytes);
        put.parts_left -= 1;
        let is_whole = put.parts_left == 0;
        self.parts[queue] += 1;
        if !is_whole {
            return Ok(None);
        }
        self.arrived += 1;
        Ok(self.puts.pop_front())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripe(number: u64, parts: usize) -> Stripe {
        Stripe { number: Stripe::number(number), parts: parts as u8 }
    }

    #[test]
    fn parts_cover_every_length_once_in_order() {
        for queues in 1..=QUEUE_PAIRS_MAX {
            for bytes in [0, 1, 2, 7, 4095, 4096, 4097, 65_536, 1_000_003] {
                let mut end = 0;
                for queue in 0..queues {
                    let part = part(bytes, queues, queue);
                    assert_eq!(part.start, end, "{bytes} bytes, part {queue} of {queues}");
                    end = part.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn a_put_has_arrived_when_each_queue_pair_brought_its_part_however_far_one_is_ahead() {
        let mut arriving = IncomingStripedPuts::default();
        // Queue pair 0 is 40 puts ahead, more than four bits distinguish.
        for put in 0..40 {
            assert_eq!(arriving.part(0, 2, stripe(put, 2), put as u16, None), Ok(None));
        }
        for put in 0..40 {
            let payload = (put % 3 == 0).then_some(5);
            let arrived = arriving.part(1, 2, stripe(put, 2), put as u16, payload).unwrap();
            let arrived = arrived.expect("both parts are here");
            assert_eq!((arrived.signal_slot, arrived.payload_bytes), (put as u16, payload));
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_a_breach_of_the_protocol() {
        let fresh =
            |queue, said, signal_slot| IncomingStripedPuts::default().part(queue, 2, said, signal_slot, None);
        assert!(fresh(0, stripe(1, 2), 0).is_err(), "the first put's number is 0");
        assert!(fresh(0, stripe(0, 3), 0).is_err(), "there are two queue pairs");
        let mut arriving = IncomingStripedPuts::default();
        assert_eq!(arriving.part(0, 2, stripe(0, 2), 7, Some(1)), Ok(None));
        assert!(arriving.part(1, 2, stripe(0, 2), 8, None).is_err(), "another slot");
        assert!(arriving.part(1, 2, stripe(0, 2), 7, Some(1)).is_err(), "a second payload");
    }

    #[test]
    fn a_striped_transfer_ends_once_with_its_last_part_or_fails_once() {
        let mut striped_transfers = StripedTransfers::default();
        for id in 0..3 {
            striped_transfers.begin(TransferId(id), 2);
        }
        assert_eq!([striped_transfers.part_ended(0), striped_transfers.part_ended(0)], [None, None]);
        assert_eq!(striped_transfers.part_ended(1), Some(TransferId(0)));
        assert_eq!(striped_transfers.part_failed(1), Some(TransferId(1)));
        assert_eq!(striped_transfers.part_failed(1), None);
        assert_eq!(striped_transfers.into_ids().collect::<Vec<_>>(), [TransferId(2)]);
    }
}
