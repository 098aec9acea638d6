//! The addresses of a name, with a deadline. The system's look-up has none, so it runs in a thread
//! of its own.
//!
//! **Invariant:** a peer has at most one such thread, however often its look-up is given up.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::mutex::lock;

use super::slot::Slot;

/// The addresses, or why there are none.
type Addresses = Result<Vec<SocketAddr>, Arc<io::Error>>;

/// The look-up of one name, again and again.
#[derive(Default)]
pub(crate) struct NameLookup {
    /// One that has begun, and that nobody has seen end.
    under_way: Mutex<Option<Arc<Slot<Addresses>>>>,
}

impl NameLookup {
    /// The addresses of `HOST:PORT`; `None`: the system did not tell in time.
    pub(crate) fn addresses(&self, name: &str, limit: Duration) -> Option<Addresses> {
        if let Ok(address) = name.parse() {
            return Some(Ok(vec![address]));
        }
        let name = name.to_owned();
        self.within(limit, move || Ok(name.to_socket_addrs()?.collect()))
    }

    fn within(
        &self,
        limit: Duration,
        look_up: impl FnOnce() -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> Option<Addresses> {
        let mut under_way = lock(&self.under_way);
        let slot = match &*under_way {
            Some(slot) => slot.clone(),
            None => {
                let slot = Arc::new(Slot::new());
                let ends = slot.clone();
                let thread = std::thread::Builder::new().name("pleach-lookup".to_owned());
                let started = thread.spawn(move || drop(ends.end(look_up().map_err(Arc::new))));
                if let Err(error) = started {
                    return Some(Err(Arc::new(error)));
                }
                under_way.insert(slot).clone()
            }
        };
        drop(under_way);
        slot.wait(limit);
        let addresses = slot.peek()?;
        *lock(&self.under_way) = None;
        Some(addresses)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_look_up_that_does_not_end_is_given_up_and_found_again() {
        let lookup = NameLookup::default();
        let (answer, answers) = mpsc::channel();
        let silent = move || answers.recv().map_err(io::Error::other);
        assert!(lookup.within(Duration::from_millis(20), silent).is_none(), "nobody answers");
        let again = || -> io::Result<Vec<SocketAddr>> { panic!("one is under way") };
        assert!(lookup.within(Duration::ZERO, again).is_none());
        let address: SocketAddr = "127.0.0.1:7".parse().expect("an address");
        answer.send(vec![address]).expect("it waits");
        let found = lookup.within(Duration::from_secs(30), again).expect("is answered");
        assert_eq!(found.expect("has addresses"), [address]);
        let refused = || Err(io::Error::from(io::ErrorKind::NotFound));
        let found = lookup.within(Duration::from_secs(30), refused).expect("is answered");
        assert_eq!(found.expect_err("is a new one").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn numbers_need_no_look_up() {
        let found = NameLookup::default().addresses("127.0.0.1:7", Duration::ZERO).expect("at once");
        assert_eq!(found.expect("an address").len(), 1);
    }
}
