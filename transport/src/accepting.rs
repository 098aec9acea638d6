//! Keeps a listener responsive under a flood of connections: a limit of accepts a turn, limited
//! room for unauthenticated connections, and a pause when the system has no descriptor or memory
//! for one more.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;

use crate::Nanos;

/// Connections accepted before existing connections get their turn.
pub const ACCEPTS_AT_ONCE: usize = 32;

/// How long no connection is accepted when the system has no room for one.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The unauthenticated connections of a listener, by their origin. The listener asks which one to
/// drop.
///
/// **Invariant:** an address that opens many connections displaces its own, not those of others. A
/// connection that has sent nothing displaces none that has sent a whole hello.
#[derive(Debug, Default)]
pub struct UnauthenticatedConnections {
    /// The connections' numbers, the oldest first, by whether a hello came and by source. No list
    /// is empty.
    sources: BTreeMap<(bool, Source), VecDeque<u64>>,
    count: usize,
}

/// A source of connections: a host, or in IPv6 a network of 64 bits, because one host may have all
/// its addresses.
type Source = u128;

fn source(from: IpAddr) -> Source {
    match from.to_canonical() {
        IpAddr::V4(address) => Source::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits() & !Source::from(u64::MAX),
    }
}

impl UnauthenticatedConnections {
    /// Adds a connection that has sent nothing.
    pub fn add(&mut self, from: IpAddr, number: u64) {
        self.put(false, source(from), number);
    }

    /// Records that a connection has sent its hello.
    pub fn hello_received(&mut self, from: IpAddr, number: u64) {
        if self.take(false, source(from), number) {
            self.put(true, source(from), number);
        }
    }

    /// Removes a connection that is authenticated or closed. An unknown connection is ignored.
    pub fn remove(&mut self, from: IpAddr, number: u64) {
        let _ = self.take(false, source(from), number) || self.take(true, source(from), number);
    }

    /// The number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The connection to drop first: the oldest of the source with the most connections, first
    /// among those that sent no hello.
    #[must_use]
    pub fn first_to_drop(&self) -> Option<u64> {
        let of = |has_sent_hello: bool| {
            self.sources.iter().filter(move |((has_sent, _), _)| *has_sent == has_sent_hello)
        };
        let most = |has_sent_hello| of(has_sent_hello).max_by_key(|(_, numbers)| numbers.len());
        most(false).or_else(|| most(true)).and_then(|(_, numbers)| numbers.front().copied())
    }

    fn put(&mut self, has_sent_hello: bool, source: Source, number: u64) {
        self.sources.entry((has_sent_hello, source)).or_default().push_back(number);
        self.count += 1;
    }

    fn take(&mut self, has_sent_hello: bool, source: Source, number: u64) -> bool {
        let Some(numbers) = self.sources.get_mut(&(has_sent_hello, source)) else { return false };
        // Most end in the order in which they came.
        let Some(place) = numbers.iter().position(|&other| other == number) else { return false };
        numbers.remove(place);
        if numbers.is_empty() {
            self.sources.remove(&(has_sent_hello, source));
        }
        self.count -= 1;
        true
    }
}

/// A pause of a listener in an epoll set. Without it the listener would stay ready, and the epoll
/// loop would spin.
#[derive(Debug, Default)]
pub struct AcceptPause {
    until: Option<Nanos>,
}

impl AcceptPause {
    /// Removes the listener from the set for [`ACCEPT_PAUSE`].
    pub fn begin(&mut self, epoll: impl AsFd, listener: impl AsFd, now: Nanos) {
        let _ = epoll::delete(epoll, listener);
        self.until = Some(now + ACCEPT_PAUSE);
    }

    /// Adds the listener again as `token` when the pause is over; returns the end of a pause that
    /// is not over. Where the system has no room for the listener the next pause begins: a listener
    /// that is not in the set accepts nobody.
    pub fn end(&mut self, epoll: impl AsFd, listener: impl AsFd, token: u64, now: Nanos) -> Option<Nanos> {
        let until = self.until?;
        if now < until {
            return Some(until);
        }
        let data = epoll::EventData::new_u64(token);
        self.until = match epoll::add(epoll, listener, data, epoll::EventFlags::IN) {
            Ok(()) | Err(Errno::EXIST) => None,
            Err(_) => Some(now + ACCEPT_PAUSE),
        };
        self.until
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

    use super::*;

    const GREEDY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const MODEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn who_opens_many_pushes_out_its_own_oldest_one() {
        let mut unauthenticated = UnauthenticatedConnections::default();
        unauthenticated.add(MODEST, 0);
        (1..4).for_each(|number| unauthenticated.add(GREEDY, number));
        assert_eq!((unauthenticated.len(), unauthenticated.first_to_drop()), (4, Some(1)));
        unauthenticated.remove(GREEDY, 1);
        unauthenticated.remove(GREEDY, 1);
        assert_eq!((unauthenticated.len(), unauthenticated.first_to_drop()), (3, Some(2)));
    }

    #[test]
    fn silence_pushes_out_nobody_who_has_said_hello() {
        let mut unauthenticated = UnauthenticatedConnections::default();
        unauthenticated.add(GREEDY, 0);
        unauthenticated.hello_received(GREEDY, 0);
        unauthenticated.add(MODEST, 1);
        assert_eq!(unauthenticated.first_to_drop(), Some(1));
        unauthenticated.remove(MODEST, 1);
        assert_eq!((unauthenticated.len(), unauthenticated.first_to_drop()), (1, Some(0)));
        unauthenticated.remove(GREEDY, 0);
        assert_eq!((unauthenticated.len(), unauthenticated.first_to_drop()), (0, None));
    }

    #[test]
    fn a_pause_goes_on_until_the_listener_is_in_the_set_again() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let mut pause = AcceptPause::default();
        assert_eq!(pause.end(&set, &listener, 7, Nanos(0)), None, "no pause has begun");
        pause.begin(&set, &listener, Nanos(0));
        let (until, later) = (Nanos(0) + ACCEPT_PAUSE, Nanos(0) + ACCEPT_PAUSE + ACCEPT_PAUSE);
        assert_eq!(pause.end(&set, &listener, 7, Nanos(1)), Some(until));
        // A plain file cannot be in a set, so this attempt fails.
        let file = std::fs::File::open(std::env::current_exe().expect("a path")).expect("can be read");
        assert_eq!(pause.end(&set, &file, 7, until), Some(later));
        assert_eq!(pause.end(&set, &listener, 7, until), Some(later));
        assert_eq!(pause.end(&set, &listener, 7, later), None);
        let is_added = epoll::add(&set, &listener, epoll::EventData::new_u64(7), epoll::EventFlags::IN);
        assert_eq!(is_added, Err(Errno::EXIST), "the listener is in the set");
    }

    #[test]
    fn an_address_of_version_6_counts_as_its_network_and_a_mapped_one_as_what_it_maps() {
        let address = |text: &str| source(IpAddr::V6(text.parse::<Ipv6Addr>().expect("an address")));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:2"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_eq!(address("::ffff:10.0.0.1"), source(GREEDY));
    }
}
