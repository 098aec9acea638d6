//! What a small all-reduce or message over shared memory may not do: allocate, once it was done
//! before.

#[allow(dead_code)] // Not every test says where its ranks meet.
mod ranks;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pleach_collectives::Group;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use ranks::with_group;

const RANKS: u32 = 2;
const ROUNDS: u32 = 100;
const BATCHES: u32 = 40;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: passes everything on to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending counts no more.
        let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
        // SAFETY: by the contract of this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: by the contract of this function.
        unsafe { System.dealloc(address, layout) }
    }
}

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// The fewest allocations a rank's thread makes in [`ROUNDS`] calls: of a registered slice, of
/// another, of none, of messages. The fewest of many, because on a busy machine a rank may wait so
/// long that it asks what its peer is doing.
fn fewest(group: &Group, elements: usize) -> [u64; 4] {
    let mut buffer = group.buffer::<f32>(elements).unwrap();
    let mut plain = vec![1.0f32; elements];
    let mut fewest = [u64::MAX; 4];
    for _ in 0..BATCHES {
        let begin = allocations();
        for _ in 0..ROUNDS {
            group.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
        }
        let registered = allocations();
        for _ in 0..ROUNDS {
            group.all_reduce(&mut plain, ReduceOp::Max).unwrap();
        }
        let private = allocations();
        for _ in 0..ROUNDS {
            group.barrier().unwrap();
        }
        let none = allocations();
        for _ in 0..ROUNDS {
            if group.rank() == 0 {
                group.send(&plain, 1).unwrap();
                group.recv(&mut plain, 1).unwrap();
            } else {
                group.recv(&mut plain, 0).unwrap();
                group.send(&plain, 0).unwrap();
            }
        }
        let counts = [registered - begin, private - registered, none - private, allocations() - none];
        for (fewest, count) in fewest.iter_mut().zip(counts) {
            *fewest = count.min(*fewest);
        }
    }
    fewest
}

#[test]
fn small_all_reduces_barriers_and_messages_over_shared_memory_allocate_nothing() {
    with_group(
        Fabric::Shm,
        RANKS,
        |_| (),
        |group| {
            assert!(allocations() > 0, "the counter counts");
            for elements in [2, 8, 64, 512] {
                assert_eq!(fewest(&group, elements), [0; 4], "{elements} elements");
            }
            group.close().unwrap();
        },
    );
}
