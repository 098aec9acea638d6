//! Two endpoints that exchange tensors of a step, for tests.

use std::thread;
use std::time::Duration;

use pleach_exchange::{Endpoint, EndpointOptions, Key, Peer, SharedTensor};
use pleach_transport::clock;

/// Longer than any test takes on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn open(options: &EndpointOptions) -> Endpoint {
    Endpoint::open(options).expect("a free port of loopback")
}

/// The sender as the receiver sees it.
pub(crate) fn connect(receiver: &Endpoint, sender: &Endpoint) -> Peer {
    receiver.connect(&sender.address().to_string()).expect("an address").within(LONG)
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(1, name).expect("a good name")
}

pub(crate) fn tensor(endpoint: &Endpoint, values: &[u32]) -> SharedTensor {
    let mut tensor = endpoint.tensor::<u32>(&[values.len()]).expect("there is memory");
    tensor.copy_from_slice(values);
    tensor.share()
}

/// Waits until the sender lends nothing.
pub(crate) fn wait_for_returns(sender: &Endpoint) {
    let until = clock::now() + LONG;
    while sender.counts().bytes_lent > 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        thread::yield_now();
    }
}
