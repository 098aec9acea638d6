//! What a rank allocates while it trains: the rows that it may keep, and a few numbers a sample.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use pleach_collectives::{Group, Options};
use pleach_training::svm::{Kernel, Parameters, Samples, Svm};
use pleach_transport::rendezvous::World;
use pleach_vocabulary::random::Random;

/// Counts the bytes that are allocated, and the most that were.
struct Counting;

// Relaxed: one thread allocates what is measured, and reads it.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: passes everything on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let allocated = ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(allocated, Ordering::Relaxed);
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(address, layout) }
    }
}

const FEATURES: u32 = 256;

/// Two clouds of points that few samples tell apart.
fn clouds(count: usize) -> (Samples, Vec<i32>) {
    let mut random = Random::new(7);
    let mut uniform = move || (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
    let (mut samples, mut labels) = (Samples::new(FEATURES), Vec::new());
    for at in 0..count {
        let label = if at % 2 == 0 { 1 } else { -1 };
        samples.push((0..FEATURES).map(|feature| (feature, f64::from(label) + uniform()))).expect("a sample");
        labels.push(label);
    }
    (samples, labels)
}

/// The most bytes that training allocates beside the samples, and the bytes of these.
fn most_allocated(count: usize, cache_bytes: usize) -> [usize; 2] {
    let (samples, labels) = clouds(count);
    let group = Group::join(&Options::new(World::alone())).expect("a rank alone joins");
    let parameters = Parameters { cache_bytes, ..Parameters::new(Kernel::Linear) };
    let before = ALLOCATED.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let model = Svm::train(&group, &samples, &labels, &parameters).expect("is trained");
    let most = MOST.load(Ordering::Relaxed) - before;
    println!("{count} samples, cache of {cache_bytes}: {most} bytes, {} vectors", model.support_vectors());
    [most, samples.bytes()]
}

#[test]
fn a_rank_allocates_its_cache_and_a_few_numbers_a_sample() {
    /// More than factor, label, diagonal value, error, two limits, place and number take.
    const BYTES_A_SAMPLE: usize = 128;
    const FIXED_BYTES: usize = 256 << 10;
    for (count, cache_bytes) in [(2_000, 0), (8_000, 0), (8_000, 1 << 20)] {
        let [most, of_samples] = most_allocated(count, cache_bytes);
        let bound = cache_bytes + BYTES_A_SAMPLE * count + FIXED_BYTES;
        assert!(most <= bound, "{count} samples, cache of {cache_bytes}: {most} of {bound} bytes");
        assert!(bound < of_samples, "less than a second copy of the samples");
    }
}
