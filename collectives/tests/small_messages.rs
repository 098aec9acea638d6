//! What a small all-reduce or message over shared memory may not do: allocate, once it was done
//! before.

mod counting;
#[allow(dead_code)] // Not every test says where its ranks meet.
mod ranks;

use pleach_collectives::{Group, Options};
use pleach_transport::rendezvous::{Fabric, World};
use pleach_vocabulary::ReduceOp;

use counting::allocations;
use ranks::with_group;

const RANKS: u32 = 2;
const ROUNDS: u32 = 100;
/// Batches, each of [`ROUNDS`] calls of each kind. On a busy machine most of them may have a call
/// in which a rank waits so long that it asks what its peer is doing, so they go on until each kind
/// has had one without.
const BATCHES: u32 = 40;
/// Most batches.
const BATCHES_MAX: u32 = 10 * BATCHES;

/// The fewest allocations a rank's thread makes in [`ROUNDS`] calls: of a registered slice, of
/// another, of none, of messages.
fn fewest(group: &Group, elements: usize) -> [u64; 4] {
    let mut buffer = group.buffer::<f32>(elements).unwrap();
    let mut plain = vec![1.0f32; elements];
    let mut fewest = [u64::MAX; 4];
    for batch in 1..=BATCHES_MAX {
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
        if batch % BATCHES == 0 {
            // Of both ranks: they go on together.
            let mut most = [fewest.into_iter().max().unwrap_or_default()];
            group.all_reduce(&mut most, ReduceOp::Max).unwrap();
            if most == [0] {
                break;
            }
        }
    }
    fewest
}

#[test]
fn small_all_reduces_barriers_and_messages_over_shared_memory_allocate_nothing() {
    with_group(
        Fabric::Shm,
        RANKS,
        |options| options.spin = Options::new(World::alone()).spin,
        |group| {
            assert!(allocations() > 0, "the counter counts");
            for elements in [2, 8, 64, 512] {
                assert_eq!(fewest(&group, elements), [0; 4], "{elements} elements");
            }
            group.close().unwrap();
        },
    );
}
