//! How long operations of simulated ranks take, and in which order transfers have the links.

use std::collections::HashMap;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

/// The links between simulated ranks.
///
/// A function from bytes to a time is one, in which both an all-reduce and a transfer take that
/// time.
pub trait Network {
    /// How long an all-reduce of that many bytes takes.
    fn all_reduce(&mut self, bytes: u64) -> Duration;

    /// How long an all-reduce of that many bytes takes among some of the ranks: as a ring, unless
    /// changed.
    fn all_reduce_among(&mut self, ranks: &[Rank], bytes: u64) -> Duration {
        let part = bytes.div_ceil(ranks.len().max(1) as u64);
        let mut step = Duration::ZERO;
        for (from, to) in ranks.iter().zip(ranks.iter().cycle().skip(1)) {
            let TransferTime { latency, sending } = self.transfer(*from, *to, part);
            step = step.max(latency + sending);
        }
        // As many to add the parts up as to hand the sums out.
        step * 2 * (ranks.len().saturating_sub(1) as u32)
    }

    /// How long bytes of one rank take to another, if nothing else is on the links between them.
    fn transfer(&mut self, from: Rank, to: Rank, bytes: u64) -> TransferTime;
}

/// The time of a transfer over links that carry nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferTime {
    /// From the end of the sending to the arrival.
    pub latency: Duration,
    /// How long the sender sends.
    pub sending: Duration,
}

impl<F: FnMut(u64) -> Duration> Network for F {
    fn all_reduce(&mut self, bytes: u64) -> Duration {
        self(bytes)
    }

    fn transfer(&mut self, _: Rank, _: Rank, bytes: u64) -> TransferTime {
        TransferTime { latency: Duration::ZERO, sending: self(bytes) }
    }
}

/// When the one-sided transfers of ranks arrive.
///
/// **Invariants:** a rank sends one transfer at a time and receives one at a time, and what one
/// rank sends another arrives in the order in which it was sent.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    /// By rank: until when it sends, and until when it receives.
    busy: HashMap<Rank, [Nanos; 2]>,
    /// By sender and receiver: the latest arrival.
    arrivals: HashMap<(Rank, Rank), Nanos>,
}

impl Transfers {
    /// Sends bytes; returns when they arrive.
    pub(crate) fn send(
        &mut self,
        network: &mut dyn Network,
        now: Nanos,
        from: Rank,
        to: Rank,
        bytes: u64,
    ) -> Nanos {
        let TransferTime { latency, sending } = network.transfer(from, to, bytes);
        let begin = now.max(self.busy(from)[0]).max(self.busy(to)[1]);
        let end = begin + sending;
        self.busy(from)[0] = end;
        self.busy(to)[1] = end;
        let latest = self.arrivals.entry((from, to)).or_default();
        *latest = (*latest).max(end + latency);
        *latest
    }

    fn busy(&mut self, rank: Rank) -> &mut [Nanos; 2] {
        self.busy.entry(rank).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A millisecond, and a nanosecond a byte.
    struct Links;

    impl Network for Links {
        fn all_reduce(&mut self, _: u64) -> Duration {
            unreachable!("no test here sums")
        }

        fn transfer(&mut self, _: Rank, _: Rank, bytes: u64) -> TransferTime {
            TransferTime { latency: Duration::from_millis(1), sending: Duration::from_nanos(bytes) }
        }
    }

    #[test]
    fn a_rank_sends_and_receives_one_transfer_at_a_time() {
        let (mut transfers, now) = (Transfers::default(), Nanos(5));
        let mut send = |from, to, bytes| transfers.send(&mut Links, now, from, to, bytes).0;
        assert_eq!(send(0, 1, 100), 5 + 100 + 1_000_000);
        assert_eq!(send(0, 2, 10), 5 + 110 + 1_000_000, "rank 0 sends");
        assert_eq!(send(3, 1, 10), 5 + 110 + 1_000_000, "rank 1 receives");
        assert_eq!(send(1, 0, 10), 5 + 10 + 1_000_000, "rank 1 sends nothing, and rank 0 receives nothing");
    }
}
