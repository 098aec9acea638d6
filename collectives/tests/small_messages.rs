//! What a small all-reduce or message over shared memory may not do: allocate, once it was done
//! before.

mod counting;
#[allow(dead_code)] // Not every test says where its ranks meet.
mod ranks;

use pleach_collectives::Group;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::ReduceOp;

use counting::allocations;
use ranks::with_group;

const RANKS: u32 = 2;
const ROUNDS: u32 = 100;
const BATCHES: u32 = 40;

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
