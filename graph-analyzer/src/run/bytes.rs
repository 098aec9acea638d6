//! Bytes of registered memory as slices, while the protocol keeps everybody else from them.
#![allow(unsafe_code)]

use pleach_transport::{Slice, Space};

use super::channels::{Received, ReceivedBytes};

/// The bytes of a source: read while it is sent, or before.
pub(crate) fn of_slice(slice: &Slice) -> &[u8] {
    assert_eq!(slice.region().memory().space(), Space::Host, "a runtime reads host memory");
    // SAFETY: the slice lies in its region, which it holds. It is memory of `TensorTransport`,
    // which peers only read, or a slot that was received: its sender writes it again only after a
    // credit that this rank gives when the reference has ended.
    unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len()) }
}

/// The bytes of a source, to be written.
pub(crate) fn of_slice_mut(slice: &mut Slice) -> &mut [u8] {
    assert_eq!(slice.region().memory().space(), Space::Host, "a runtime writes host memory");
    // SAFETY: as above; this rank waits until every receiver has released what was there
    // (`TensorTransport::wait_free`), and each place has one handle here.
    unsafe { std::slice::from_raw_parts_mut(slice.as_ptr(), slice.len()) }
}

/// The bytes of a tensor that was received, until it is released.
pub(crate) fn of_received(received: &Received) -> &[u8] {
    match &received.bytes {
        ReceivedBytes::Own(slice) => of_slice(slice),
        ReceivedBytes::Mapped(mapped) => {
            assert!(mapped.is_on_host(), "a runtime reads host memory");
            // SAFETY: the mapping is readable while it is held. Its owner writes there again only
            // after the credit, which this rank gives when the reference has ended.
            unsafe { std::slice::from_raw_parts(mapped.as_ptr(), mapped.len()) }
        }
        ReceivedBytes::Gpu(_) => panic!("a runtime reads host memory"),
        ReceivedBytes::Empty => &[],
    }
}
