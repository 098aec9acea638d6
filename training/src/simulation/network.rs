//! How long operations of simulated ranks take, in which order transfers have the links, and in
//! which order things happen.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
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
    /// By rank.
    ends: Vec<LinkEnd>,
}

/// The transfers of one rank.
#[derive(Debug, Default)]
struct LinkEnd {
    sends_until: Nanos,
    receives_until: Nanos,
    /// The latest arrival of all that it has sent.
    latest: Nanos,
    /// What it has sent and has not arrived: to whom, and when that is there. A matrix of all pairs
    /// of ranks would be in no cache.
    on_the_way: VecDeque<(Rank, Nanos)>,
}

impl Transfers {
    /// Sends what takes this time by itself, and begins `after` now at the earliest; returns when
    /// it arrives.
    pub(crate) fn send(
        &mut self,
        time: TransferTime,
        (now, after): (Nanos, Duration),
        from: Rank,
        to: Rank,
    ) -> Nanos {
        let begin = (now + after).max(self.end(from).sends_until).max(self.end(to).receives_until);
        let sent = begin + time.sending;
        self.end(to).receives_until = sent;
        let sender = self.end(from);
        sender.sends_until = sent;
        let mut arrival = sent + time.latency;
        if sender.latest > arrival {
            let before = sender.on_the_way.iter().filter(|(other, _)| *other == to);
            arrival = before.map(|(_, at)| *at).fold(arrival, Nanos::max);
        }
        sender.latest = sender.latest.max(arrival);
        // Whatever has arrived is before all that is sent from now on.
        while sender.on_the_way.pop_front_if(|(_, at)| *at <= now).is_some() {}
        if arrival > now {
            sender.on_the_way.push_back((to, arrival));
        }
        arrival
    }

    /// The end of a rank, which is made if there is none.
    fn end(&mut self, rank: Rank) -> &mut LinkEnd {
        let place = rank as usize;
        if self.ends.len() <= place {
            self.ends.resize_with(place + 1, LinkEnd::default);
        }
        &mut self.ends[place]
    }
}

/// What happens at a time. Of several in a heap the one that is first comes out, and of those at
/// one time the one of the smallest number. Nothing else is compared, as heaps compare often.
#[derive(Clone, Copy, Debug)]
struct Timed<T> {
    at: Nanos,
    number: u64,
    thing: T,
}

impl<T> Timed<T> {
    fn key(&self) -> u128 {
        u128::from(self.at.0) << 64 | u128::from(self.number)
    }
}

impl<T> PartialEq for Timed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for Timed<T> {}

impl<T> PartialOrd for Timed<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Timed<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

/// What is to happen.
///
/// **Invariant:** things come out by their times, and those of one time in the order in which they
/// were put in.
#[derive(Debug)]
pub(crate) struct Agenda<T> {
    later: BinaryHeap<Timed<T>>,
    /// What was put in for the time of the thing that came out last. Where links are free that is
    /// most, and a heap moves each of them several times.
    at_once: VecDeque<Timed<T>>,
    now: Nanos,
    put: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { later: BinaryHeap::new(), at_once: VecDeque::new(), now: Nanos::ZERO, put: 0 }
    }
}

impl<T> Agenda<T> {
    /// Puts a thing in, not for a time before that of the thing that came out last.
    pub(crate) fn put(&mut self, at: Nanos, thing: T) {
        let timed = Timed { at, number: self.put, thing };
        self.put += 1;
        if at == self.now {
            self.at_once.push_back(timed);
        } else {
            self.later.push(timed);
        }
    }

    /// The time of the next thing.
    pub(crate) fn next_at(&self) -> Option<Nanos> {
        let times = [self.at_once.front(), self.later.peek()];
        times.into_iter().flatten().map(|timed| timed.at).min()
    }

    /// Takes the next thing out, and its time.
    pub(crate) fn take(&mut self) -> Option<(Nanos, T)> {
        let is_at_once = match (self.at_once.front(), self.later.peek()) {
            (Some(at_once), Some(later)) => at_once.key() < later.key(),
            (at_once, _) => at_once.is_some(),
        };
        let Timed { at, thing, .. } = if is_at_once { self.at_once.pop_front() } else { self.later.pop() }?;
        self.now = at;
        Some((at, thing))
    }
}

/// What is on its way, by numbers that are used again.
///
/// **Invariant:** no two things have one number at a time.
#[derive(Debug)]
pub(crate) struct OnTheWay<T> {
    places: Vec<Option<T>>,
    /// Numbers of empty places.
    free: Vec<u64>,
}

impl<T> Default for OnTheWay<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> OnTheWay<T> {
    /// Keeps a thing; returns its number.
    pub(crate) fn put(&mut self, thing: T) -> u64 {
        let Some(number) = self.free.pop() else {
            self.places.push(Some(thing));
            return self.places.len() as u64 - 1;
        };
        self.places[number as usize] = Some(thing);
        number
    }

    /// Takes the thing of this number out.
    ///
    /// # Panics
    ///
    /// There is none.
    pub(crate) fn take(&mut self, number: u64) -> T {
        let thing = self.places[number as usize].take().expect("it is on its way");
        self.free.push(number);
        thing
    }
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::random::Random;

    use super::*;

    #[test]
    fn things_come_out_by_time_and_those_of_one_time_as_they_were_put_in() {
        let (mut agenda, mut random) = (Agenda::default(), Random::new(4));
        let (mut expected, mut found, mut now) = (Vec::new(), Vec::new(), Nanos::ZERO);
        for number in 0..2000_u64 {
            let at = Nanos(now.0 + random.below(3));
            agenda.put(at, number);
            expected.push((at, number));
            if random.below(2) == 0 {
                let next = agenda.take().expect("one was put in");
                now = next.0;
                found.push(next);
            }
        }
        found.extend(std::iter::from_fn(|| agenda.take()));
        expected.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_on_its_way_comes_out_by_its_number_and_leaves_its_place_to_others() {
        let mut on_the_way = OnTheWay::default();
        let numbers: Vec<u64> = ["one", "two", "three"].map(|thing| on_the_way.put(thing)).to_vec();
        assert_eq!((on_the_way.take(numbers[1]), on_the_way.put("four")), ("two", numbers[1]));
        let taken = numbers.iter().map(|number| on_the_way.take(*number)).collect::<Vec<_>>();
        assert_eq!(taken, ["one", "four", "three"]);
        assert_eq!(on_the_way.places.len(), 3, "as many places as were needed at a time");
    }

    #[test]
    fn a_rank_sends_and_receives_one_transfer_at_a_time() {
        let (mut transfers, now) = (Transfers::default(), Nanos(5));
        // A millisecond, and a nanosecond a byte.
        let time =
            |bytes| TransferTime { latency: Duration::from_millis(1), sending: Duration::from_nanos(bytes) };
        let mut send = |from, to, bytes| transfers.send(time(bytes), (now, Duration::ZERO), from, to).0;
        assert_eq!(send(0, 1, 100), 5 + 100 + 1_000_000);
        assert_eq!(send(0, 2, 10), 5 + 110 + 1_000_000, "rank 0 sends");
        assert_eq!(send(3, 1, 10), 5 + 110 + 1_000_000, "rank 1 receives");
        assert_eq!(send(1, 0, 10), 5 + 10 + 1_000_000, "rank 1 sends nothing, and rank 0 receives nothing");
    }

    /// However late each of them is.
    #[test]
    fn what_one_rank_sends_another_arrives_in_its_order() {
        let (mut transfers, mut random) = (Transfers::default(), Random::new(7));
        let (mut latest, mut now) = ([[Nanos::ZERO; 4]; 4], Nanos::ZERO);
        let mut ordered = 0;
        for _ in 0..5_000 {
            now += Duration::from_nanos(random.below(20));
            let [from, to] = [0; 2].map(|_: u8| random.below(4) as Rank);
            let [latency, sending, after] =
                [200, 10, 30].map(|most| Duration::from_nanos(random.below(most)));
            let at = transfers.send(TransferTime { latency, sending }, (now, after), from, to);
            let before = &mut latest[from as usize][to as usize];
            assert!(at >= *before && at >= now + after + sending + latency);
            ordered += u32::from(at == *before && at > now);
            *before = at;
        }
        assert!(ordered > 100, "only {ordered} have waited for the one before");
        let kept = transfers.ends.iter().map(|end| end.on_the_way.len()).max();
        assert!(kept < Some(100), "{kept:?} are kept that have arrived");
    }
}
