//! Linked work requests, posted with one doorbell.
//!
//! The requests of a list are elements of one array. Each is linked to the next one and to its own
//! entry of bytes for good. So a request is written where the driver reads it, and only the fields
//! of its opcode are written. Posting cuts the array behind the last request while the call lasts.
//! A field of an earlier use is read only if the opcode has it, and then it was written anew.
//!
//! **Invariant:** except while the list is posted, every element leads to the next one and to its
//! entry of bytes.

use std::io;
use std::ptr;

use super::objects::QueuePair;
use super::request::Request;
use super::sys;

/// See the module.
pub(super) struct WorkRequestList {
    elements: Vec<sys::ibv_send_wr>,
    /// The local bytes of each request.
    lists: Vec<sys::ibv_sge>,
    /// The number of requests; the elements behind them are free.
    len: usize,
    /// The bytes that the requests move.
    bytes: usize,
    /// Which of them asks for a completion: one is enough.
    signaled: Option<usize>,
}

/// The result of posting a list.
pub(super) struct Posted {
    pub(super) requests: usize,
    /// One of them asks for a completion.
    pub(super) is_signaled: bool,
    /// The error, if not all was posted.
    pub(super) error: Option<io::Error>,
}

// SAFETY: the pointers in `elements` lead into this value's own vectors.
unsafe impl Send for WorkRequestList {}

/// Of a request that names none here.
pub(super) const NO_BYTES: sys::ibv_sge = sys::ibv_sge { addr: 0, length: 0, lkey: 0 };

impl WorkRequestList {
    /// An empty list with room for `places` requests.
    pub(super) fn new(places: usize) -> Self {
        let mut list = Self { elements: Vec::new(), lists: Vec::new(), len: 0, bytes: 0, signaled: None };
        list.grow(places.max(1));
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that its requests move.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a request for these local bytes; returns the element, for fields that only its opcode
    /// has.
    #[inline]
    pub(super) fn add(
        &mut self,
        number: u64,
        request: &Request,
        flags: u32,
        list: sys::ibv_sge,
    ) -> &mut sys::ibv_send_wr {
        if self.len == self.elements.len() {
            self.grow(2 * self.len);
        }
        let index = self.len;
        self.len += 1;
        self.bytes += list.length as usize;
        self.lists[index] = list;
        let place = &mut self.elements[index];
        place.wr_id = number;
        place.num_sge = i32::from(list.length > 0);
        place.opcode = request.opcode;
        place.send_flags = request.flags | flags;
        place.__bindgen_anon_1.imm_data = request.immediate;
        place.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: request.target.address,
            rkey: request.target.key,
        };
        place
    }

    /// Makes the last request ask for a completion, which covers all before it.
    #[inline]
    pub(super) fn signal_last(&mut self) {
        let Some(last) = self.len.checked_sub(1) else { return };
        if let Some(before) = self.signaled {
            self.elements[before].send_flags &= !sys::IBV_SEND_SIGNALED;
        }
        self.elements[last].send_flags |= sys::IBV_SEND_SIGNALED;
        self.signaled = Some(last);
    }

    /// Posts the list with one doorbell. Requests that the NIC does not take stay.
    ///
    /// # Safety
    ///
    /// The list is not empty. The local memory of its requests is registered with the queue pair's
    /// protection domain, and stays until their completion came or the queue pair was dropped.
    /// pair's domain and stays until their completion came, or the queue pair was dropped.
    #[inline]
    pub(super) unsafe fn post(&mut self, queue_pair: &mut QueuePair) -> Posted {
        let base = self.elements.as_mut_ptr();
        let last = self.len - 1;
        let next = std::mem::replace(&mut self.elements[last].next, ptr::null_mut());
        // SAFETY: the caller's; the array and its entries do not move meanwhile.
        let posted = unsafe { queue_pair.post(base) };
        self.elements[last].next = next;
        match posted {
            Ok(()) => {
                let requests = std::mem::take(&mut self.len);
                self.bytes = 0;
                Posted { requests, is_signaled: self.signaled.take().is_some(), error: None }
            }
            Err((error, refused)) => {
                let taken = (refused as usize).saturating_sub(base as usize) / size_of::<sys::ibv_send_wr>();
                self.keep_from(taken.min(self.len), error)
            }
        }
    }

    /// Keeps the requests from `taken` on.
    #[cold]
    fn keep_from(&mut self, taken: usize, error: io::Error) -> Posted {
        let is_signaled = self.signaled.is_some_and(|index| index < taken);
        self.signaled = self.signaled.and_then(|index| index.checked_sub(taken));
        self.elements.copy_within(taken..self.len, 0);
        self.lists.copy_within(taken..self.len, 0);
        self.len -= taken;
        self.bytes = self.lists[..self.len].iter().map(|list| list.length as usize).sum();
        self.link();
        Posted { requests: taken, is_signaled, error: Some(error) }
    }

    /// Grows the array.
    #[cold]
    fn grow(&mut self, places: usize) {
        // SAFETY: numbers and pointers, of which zero is one.
        let nothing: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        self.elements.resize(places, nothing);
        self.lists.resize(places, NO_BYTES);
        self.link();
    }

    fn link(&mut self) {
        let (base, lists, count) = (self.elements.as_mut_ptr(), self.lists.as_mut_ptr(), self.elements.len());
        for (index, place) in self.elements.iter_mut().enumerate() {
            place.sg_list = lists.wrapping_add(index);
            place.next = if index + 1 < count { base.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Target, request};
    use super::*;

    /// Adds a write of `length` bytes.
    fn add(list: &mut WorkRequestList, number: u64, length: u32) {
        let write = request(sys::IBV_WR_RDMA_WRITE, Target { address: number, key: 7 });
        list.add(number, &write, 0, sys::ibv_sge { addr: number, length, lkey: 0 });
    }

    /// A list whose request `n` moves `n` bytes.
    fn list_of(count: u64) -> WorkRequestList {
        let mut list = WorkRequestList::new(2);
        (0..count).for_each(|number| add(&mut list, number, number as u32));
        list
    }

    /// Numbers of the requests as a driver reads them, each with the first byte of its entry.
    fn followed(list: &WorkRequestList) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let mut place = list.elements.as_ptr();
        for _ in 0..list.len() {
            // SAFETY: links of the row lead into it and into the lists, and this ends before the
            // row does.
            unsafe {
                found.push(((*place).wr_id, (*(*place).sg_list).addr));
                place = (*place).next;
            }
        }
        found
    }

    #[test]
    fn a_list_that_grows_is_linked_throughout() {
        let list = list_of(9);
        assert_eq!(followed(&list), (0..9).map(|number| (number, number)).collect::<Vec<_>>());
        assert_eq!((list.len(), list.bytes()), (9, 36));
    }

    #[test]
    fn what_was_not_taken_stays_linked_with_its_signal() {
        for (taken, was_signaled) in [(0, false), (4, false), (6, true), (9, true)] {
            let mut list = list_of(6);
            list.signal_last();
            (6..9).for_each(|number| add(&mut list, number, 1));
            let bytes = list.bytes();
            let posted = list.keep_from(taken, io::ErrorKind::OutOfMemory.into());
            assert_eq!((posted.requests, posted.is_signaled), (taken, was_signaled));
            let rest: Vec<_> = (taken as u64..9).map(|number| (number, number)).collect();
            assert_eq!(followed(&list), rest);
            let gone: u64 = (0..taken as u64).map(|number| if number < 6 { number } else { 1 }).sum();
            assert_eq!(list.bytes(), bytes - gone as usize);
            list.signal_last();
            let signaled = |place: &sys::ibv_send_wr| place.send_flags & sys::IBV_SEND_SIGNALED != 0;
            assert_eq!(
                list.elements[..list.len()].iter().filter(|place| signaled(place)).count(),
                rest.len().min(1)
            );
        }
    }
}
