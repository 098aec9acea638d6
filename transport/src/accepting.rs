//! What keeps a listener serving those who are in while many want in: limits a turn, room for those
//! who have not proved themselves, and a rest where the system has no descriptor or memory for one
//! more.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::epoll;

use crate::Nanos;

/// Connections accepted before those that are there get their turn.
pub(crate) const ACCEPTS_AT_ONCE: usize = 32;

/// How long no connection is accepted where the system has no room for one.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that have not proved themselves, by where they came from. Who holds them asks which
/// one to drop.
///
/// **Invariant:** an address that opens many pushes out its own, not those of others; and silence
/// pushes out no connection that has said a whole hello.
#[derive(Debug, Default)]
pub(crate) struct Unproved {
    /// By whether a hello came, then by source: the connections' numbers, the oldest first. No list
    /// is empty.
    sources: BTreeMap<(bool, Source), VecDeque<u64>>,
    count: usize,
}

/// Who can be told apart by addresses: a host, and in IPv6 a network of 64 bits, of which one host
/// may have all addresses.
type Source = u128;

fn source(from: IpAddr) -> Source {
    match from.to_canonical() {
        IpAddr::V4(address) => Source::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !Source::from(u64::MAX),
    }
}

impl Unproved {
    /// A new connection, which has said nothing.
    pub(crate) fn add(&mut self, from: IpAddr, number: u64) {
        self.put(false, source(from), number);
    }

    /// This connection has said hello.
    pub(crate) fn greeted(&mut self, from: IpAddr, number: u64) {
        if self.take(false, source(from), number) {
            self.put(true, source(from), number);
        }
    }

    /// This connection has proved itself, or is gone. Nothing happens when it is not listed.
    pub(crate) fn remove(&mut self, from: IpAddr, number: u64) {
        let _ = self.take(false, source(from), number) || self.take(true, source(from), number);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// The one to drop first: the oldest of the address with the most, of those that said nothing
    /// where there are any.
    pub(crate) fn first_to_drop(&self) -> Option<u64> {
        let of = |greeted: bool| self.sources.iter().filter(move |((said, _), _)| *said == greeted);
        let most = |greeted| of(greeted).max_by_key(|(_, numbers)| numbers.len());
        most(false).or_else(|| most(true)).and_then(|(_, numbers)| numbers.front().copied())
    }

    fn put(&mut self, greeted: bool, source: Source, number: u64) {
        self.sources.entry((greeted, source)).or_default().push_back(number);
        self.count += 1;
    }

    fn take(&mut self, greeted: bool, source: Source, number: u64) -> bool {
        let Some(numbers) = self.sources.get_mut(&(greeted, source)) else { return false };
        // Most end in the order in which they came.
        let Some(place) = numbers.iter().position(|&other| other == number) else { return false };
        numbers.remove(place);
        if numbers.is_empty() {
            self.sources.remove(&(greeted, source));
        }
        self.count -= 1;
        true
    }
}

/// Whether a listener in an epoll set rests, and until when: it would be ready for ever, and
/// whoever waits for it would spin.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    until: Option<Nanos>,
}

impl Rest {
    /// Takes the listener out of the set for a while.
    pub(crate) fn begin(&mut self, epoll: impl AsFd, listener: impl AsFd, now: Nanos) {
        let _ = epoll::delete(epoll, listener);
        self.until = Some(now + ACCEPT_PAUSE);
    }

    /// Puts it back as `token` when the while is over; returns when that will be.
    pub(crate) fn end(
        &mut self,
        epoll: impl AsFd,
        listener: impl AsFd,
        token: u64,
        now: Nanos,
    ) -> Option<Nanos> {
        let until = self.until?;
        if now < until {
            return Some(until);
        }
        self.until = None;
        let _ = epoll::add(epoll, listener, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const GREEDY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const MODEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn who_opens_many_pushes_out_its_own_oldest_one() {
        let mut unproved = Unproved::default();
        unproved.add(MODEST, 0);
        (1..4).for_each(|number| unproved.add(GREEDY, number));
        assert_eq!((unproved.len(), unproved.first_to_drop()), (4, Some(1)));
        unproved.remove(GREEDY, 1);
        unproved.remove(GREEDY, 1);
        assert_eq!((unproved.len(), unproved.first_to_drop()), (3, Some(2)));
    }

    #[test]
    fn silence_pushes_out_nobody_who_has_said_hello() {
        let mut unproved = Unproved::default();
        unproved.add(GREEDY, 0);
        unproved.greeted(GREEDY, 0);
        unproved.add(MODEST, 1);
        assert_eq!(unproved.first_to_drop(), Some(1));
        unproved.remove(MODEST, 1);
        assert_eq!((unproved.len(), unproved.first_to_drop()), (1, Some(0)));
        unproved.remove(GREEDY, 0);
        assert_eq!((unproved.len(), unproved.first_to_drop()), (0, None));
    }

    #[test]
    fn an_address_of_version_6_counts_as_its_network_and_a_mapped_one_as_what_it_maps() {
        let address = |text: &str| source(IpAddr::V6(text.parse::<Ipv6Addr>().expect("an address")));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:2"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:10.0.0.1"), source(GREEDY));
    }
}
