//! Listeners that rest when the system has no descriptor or memory for one more connection: they would be ready for ever, and
//! whoever waits for them would spin.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::epoll;

use crate::Nanos;

/// How long no connection is accepted then.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whether a listener in an epoll set rests, and until when.
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
