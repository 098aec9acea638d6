//! Whatever another program sends for the tensor exchange: no panic. An introduction and a
//! reference that decode survive being encoded, and a reference that is accepted names bytes inside
//! of the region that was announced, a lease of its slot at a time.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzz_target;
use pleach_exchange::introduction::{INTRODUCTION_BYTES_MAX, Introduction};
use pleach_exchange::key::RendezvousKey;
use pleach_exchange::lease::ReturnCounters;
use pleach_exchange::reference::{LinkId, REFERENCE_BYTES};
use pleach_exchange::{Lease, LeaseHolder, Reference};
use pleach_transport::RegionKey;

/// Those of the corpus.
const LINK: LinkId = LinkId(9);
const REGION: RegionKey = RegionKey(0xabc);
const REGION_BYTES: u64 = 200;
const SLOTS: usize = 2;

struct Counters([AtomicU64; SLOTS]);

impl ReturnCounters for Counters {
    fn store(&self, slot: u32, count: u64) {
        // Release: pairs with the acquire in `load`. One thread runs this.
        self.0[slot as usize].store(count, Ordering::Release);
    }

    fn load(&self, slot: u32) -> u64 {
        self.0[slot as usize].load(Ordering::Acquire)
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok((version, introduction)) = Introduction::decode(bytes) {
        let encoded = introduction.encode().expect("was decoded");
        assert!(encoded.len() <= INTRODUCTION_BYTES_MAX);
        assert_eq!(Introduction::decode(&encoded), Ok((version, introduction)));
    }
    if let Some(key) = std::str::from_utf8(bytes).ok().and_then(|text| RendezvousKey::parse(text).ok()) {
        assert_eq!(RendezvousKey::parse(&key.to_string()), Ok(key));
    }
    let counters = Arc::new(Counters([const { AtomicU64::new(0) }; SLOTS]));
    let mut holder = LeaseHolder::new(LINK, SLOTS as u32, counters);
    holder.add_region(REGION, REGION_BYTES).expect("is the first");
    let mut held = Vec::new();
    for message in bytes.chunks(REFERENCE_BYTES) {
        let Ok(reference) = Reference::decode(message) else { continue };
        assert_eq!(reference.encode()[..], *message);
        if let Ok(lease) = holder.accept(&reference) {
            let (slice, slot) = (lease.slice(), lease.number().slot);
            assert!(slice.key == REGION && slice.offset + slice.len <= REGION_BYTES);
            let is_free = held.iter().all(|other: &Lease| other.number().slot != slot);
            assert!(is_free, "a slot is lent again while its lease is held");
            held.push(lease);
        } else if reference.slice.len % 2 == 1 {
            held.pop();
        }
        let _ = holder.recall(reference.lease);
    }
});
