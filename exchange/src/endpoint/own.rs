//! Receives of a program's own tensors for tasks that wait without a thread: of services that hand
//! the tensors on.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pleach_transport::clock;

use super::Endpoint;
use super::error::ReceiveTensorError;
use super::link::{Arrived, ReceiveSlot};
use super::slot::Slot;
use super::tensor::ReceivedTensor;
use crate::key::Key;
use crate::table::Request;

/// A receive of a tensor of this program. Its drop cancels it: a tensor that was not taken returns
/// to its place, for the next receive.
pub(crate) struct OwnReceive {
    endpoint: Endpoint,
    slot: ReceiveSlot,
}

impl Endpoint {
    /// Asks for a tensor that this program sends.
    pub(crate) fn start_own_receive(&self, key: &Key, request: Request, limit: Duration) -> OwnReceive {
        let now = clock::now();
        let deadline = now + limit;
        let shared = &self.handle.shared;
        let mut core = shared.core();
        // Under the lock: what waits before the end is ended then.
        let slot = if shared.is_over() {
            let slot = Slot::new();
            drop(slot.end(Err(ReceiveTensorError::Closed)));
            slot.into()
        } else {
            let slot = core.receive(now, key, request, deadline);
            // No thread of the program waits until the deadline, so the endpoint's thread does.
            core.be_awake_at(deadline);
            slot
        };
        drop(core);
        OwnReceive { endpoint: self.clone(), slot }
    }
}

impl Future for OwnReceive {
    type Output = Result<ReceivedTensor, ReceiveTensorError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.slot.has_ended() {
            let waker = context.waker().clone();
            self.slot.call_at_end(Box::new(move || waker.wake()));
        }
        match self.slot.take() {
            Some(result) => Poll::Ready(result.map(Arrived::take)),
            None => Poll::Pending,
        }
    }
}

impl Drop for OwnReceive {
    fn drop(&mut self) {
        let mut core = self.endpoint.handle.shared.core();
        // Under the lock, where requests end: the tensor comes before this or not at all.
        match self.slot.leave() {
            Some(Ok(arrived)) => core.restore(clock::now(), arrived),
            Some(Err(_)) => {}
            None => core.give_up_receive(clock::now(), &self.slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::endpoint::{EndpointOptions, SharedTensor};
    use crate::message::FailureKind;

    /// Longer than any test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    fn endpoint() -> Endpoint {
        Endpoint::open(&EndpointOptions::default()).expect("a free port of loopback")
    }

    fn key(step: u64) -> Key {
        Key::new(step, "w").expect("a good name")
    }

    fn tensor(endpoint: &Endpoint, value: u8) -> SharedTensor {
        let mut tensor = endpoint.tensor::<u8>(&[1]).expect("there is memory");
        tensor[0] = value;
        tensor.share()
    }

    fn poll(receive: &mut OwnReceive) -> Poll<Result<u8, FailureKind>> {
        let polled = Pin::new(receive).poll(&mut Context::from_waker(Waker::noop()));
        polled.map(|result| result.map(|tensor| tensor.as_bytes()[0]).map_err(|error| error.kind()))
    }

    #[test]
    fn a_receive_that_is_dropped_leaves_its_tensor_in_its_place() {
        let endpoint = endpoint();
        // One waits for the tensor, and one had it and did not take it.
        drop(endpoint.start_own_receive(&key(1), Request::default(), LONG));
        for value in [1, 2] {
            endpoint.send(&key(1), tensor(&endpoint, value)).expect("there is room");
        }
        drop(endpoint.start_own_receive(&key(1), Request::default(), LONG));
        for value in [1, 2] {
            let mut receive = endpoint.start_own_receive(&key(1), Request::default(), LONG);
            assert_eq!(poll(&mut receive), Poll::Ready(Ok(value)));
        }
    }

    #[test]
    fn a_receive_that_is_dropped_has_the_next_one_get_its_tensor() {
        let endpoint = endpoint();
        let first = endpoint.start_own_receive(&key(1), Request::default(), LONG);
        let mut second = endpoint.start_own_receive(&key(1), Request::default(), LONG);
        assert_eq!(poll(&mut second), Poll::Pending);
        endpoint.send(&key(1), tensor(&endpoint, 5)).expect("there is room");
        assert_eq!(poll(&mut second), Poll::Pending);
        drop(first);
        assert_eq!(poll(&mut second), Poll::Ready(Ok(5)));
    }

    #[test]
    fn a_request_that_is_repeated_and_a_step_that_ends_fail_it() {
        let endpoint = endpoint();
        let request = Request { id: 7, incarnation: None };
        let mut first = endpoint.start_own_receive(&key(1), request, LONG);
        let mut again = endpoint.start_own_receive(&key(1), request, LONG);
        assert_eq!(poll(&mut again), Poll::Ready(Err(FailureKind::Aborted)));
        endpoint.abort(1, "it is over");
        assert_eq!(poll(&mut first), Poll::Ready(Err(FailureKind::Aborted)));
        let mut late = endpoint.start_own_receive(&key(2), Request::default(), Duration::ZERO);
        assert_eq!(poll(&mut late), Poll::Ready(Err(FailureKind::Timeout)));
        endpoint.close();
        let mut closed = endpoint.start_own_receive(&key(3), Request::default(), LONG);
        assert_eq!(poll(&mut closed), Poll::Ready(Err(FailureKind::Unavailable)));
    }
}
