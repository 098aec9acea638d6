//! Copies to and from bytes that other threads may copy at the same time.
//!
//! Every access is a relaxed atomic access of a single byte. So two copies at the same time are not
//! a data race. (Atomic accesses of different sizes to the same bytes would be a data race.) Copies
//! have no order, so simultaneous copies may give a mixture of bytes. A signal is needed to order
//! them. Transfers do not use these functions; they access memory at full speed.

use std::sync::atomic::{AtomicU8, Ordering};

/// Stores `bytes` from `into` on.
///
/// # Safety
///
/// `len` bytes at `into` are writable. During the call they are accessed only by atomic accesses
/// of single bytes or by transfers.
pub(crate) unsafe fn store(into: *mut u8, bytes: &[u8]) {
    for (index, byte) in bytes.iter().enumerate() {
        // SAFETY: the address is inside the bytes of this function's contract.
        unsafe { AtomicU8::from_ptr(into.add(index)) }.store(*byte, Ordering::Relaxed);
    }
}

/// Loads `bytes` from `from` on.
///
/// # Safety
///
/// `len` bytes at `from` are readable. During the call they are accessed only by atomic accesses of
/// single bytes or by transfers.
pub(crate) unsafe fn load(from: *const u8, bytes: &mut [u8]) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        // SAFETY: the address is inside the bytes of this function's contract. A relaxed load of a
        // byte may read pages that are read-only here.
        *byte = unsafe { AtomicU8::from_ptr(from.add(index).cast_mut()) }.load(Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use crate::memory::HostMemory;
    use crate::region::{Region, RegionKey, Registry, Slice};

    struct Nobody;
    impl Registry for Nobody {
        fn released(&self, _key: RegionKey) {}
    }

    fn slice(len: usize) -> Slice {
        Region::new(HostMemory::new(len), RegionKey(1), Arc::new(Nobody)).whole()
    }

    #[test]
    fn any_part_of_a_slice_is_stored_and_loaded_and_nothing_beside_it() {
        let whole = slice(40);
        for start in 0..10 {
            for len in 0..=40 - start {
                let bytes: Vec<u8> = (0..len as u8).map(|byte| byte + 1).collect();
                whole.store(&[0xee; 40]);
                whole.slice(start..start + len).expect("inside").store(&bytes);
                let all = [vec![0xee; start], bytes.clone(), vec![0xee; 40 - start - len]].concat();
                assert_eq!(whole.to_vec(), all);
                assert_eq!(whole.slice(start..start + len).expect("inside").to_vec(), bytes);
            }
        }
    }

    #[test]
    fn a_lent_slice_names_the_same_bytes_and_can_be_held() {
        let whole = slice(64);
        // SAFETY: `whole` holds the region until the slice holds it.
        let lent = unsafe { whole.slice(8..40).expect("inside").lend() };
        let held = lent.part(4..12).expect("inside").hold();
        held.store(&[7; 8]);
        assert_eq!(whole.to_vec()[11..21], [[0].as_slice(), &[7; 8], &[0]].concat());
        assert!(lent.part(4..33).is_none() && lent.first(99).len() == 32);
        drop(whole);
        assert_eq!(held.to_vec(), [7; 8]);
    }

    #[test]
    fn threads_that_store_and_load_at_once_race_no_byte() {
        let whole = slice(37);
        thread::scope(|scope| {
            for byte in [1u8, 2] {
                let slice = whole.slice(3..37).expect("inside");
                scope.spawn(move || (0..20).for_each(|_| slice.store(&[byte; 34])));
            }
            for _ in 0..20 {
                assert!(whole.to_vec().iter().all(|byte| *byte <= 2));
            }
        });
    }
}
