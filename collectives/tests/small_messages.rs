//! What a small all-reduce over shared memory may not do: allocate, once it was done before.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

use pleach_collectives::{Group, Options, Rank, ReduceOp};
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};

const RANKS: u32 = 2;
const ROUNDS: u32 = 100;
const BATCHES: u32 = 40;

/// Longest time a test's calls may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

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

fn world(rank: Rank, folder: &std::path::Path) -> World {
    World {
        rank,
        world_size: RANKS,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        secret: None,
        host: None,
        interface: None,
        join_timeout: None,
        launcher: Launcher::Arguments,
    }
}

/// The fewest allocations a rank's thread makes in [`ROUNDS`] calls: of a registered slice, of another, of none. The
/// fewest of many, because on a busy machine a rank may wait so long that it asks what its peer is doing.
fn fewest(group: &Group, elements: usize) -> [u64; 3] {
    let mut buffer = group.buffer::<f32>(elements).unwrap();
    let mut plain = vec![1.0f32; elements];
    let mut fewest = [u64::MAX; 3];
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
        let counts = [registered - begin, private - registered, allocations() - private];
        for (fewest, count) in fewest.iter_mut().zip(counts) {
            *fewest = count.min(*fewest);
        }
    }
    fewest
}

#[test]
fn small_all_reduces_and_barriers_over_shared_memory_allocate_nothing() {
    let folder = std::env::temp_dir().join(format!("pleach-small-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let folder = &folder;
            scope.spawn(move || {
                let mut options = Options::new(world(rank, folder));
                options.fabric = FabricChoice::Only(Fabric::Shm);
                options.timeout = PATIENCE;
                let group = Group::join(&options).unwrap();
                assert!(allocations() > 0, "the counter counts");
                for elements in [2, 8, 64, 512] {
                    assert_eq!(fewest(&group, elements), [0; 3], "{elements} elements");
                }
                group.close().unwrap();
            });
        }
    });
    std::fs::remove_dir_all(&folder).ok();
}
