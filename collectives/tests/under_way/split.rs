//! A group that is split.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, Group, JoinGroupError, Options, SplitError};
use pleach_transport::rendezvous::{
    Claim, Fabric, FabricChoice, PrefixStore, Store, StoreError, StorePath, World,
};
use pleach_transport::{Nanos, clock};
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use crate::ranks::{Folder, SPIN, with_group, world};

/// Longest time that ranks wait for each other on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A store that counts what is asked of it. Relaxed: the count is read when all is done.
struct Counted {
    store: Box<dyn Store>,
    requests: Arc<AtomicU64>,
}

impl Counted {
    fn count(&mut self) -> &mut dyn Store {
        self.requests.fetch_add(1, Ordering::Relaxed);
        &mut *self.store
    }
}

impl Store for Counted {
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        self.count().set(key, value, deadline)
    }

    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        self.count().claim(key, value, deadline)
    }

    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        self.count().wait(keys, until, deadline)
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        self.count().fail(reason, deadline);
    }

    fn seal(&mut self, deadline: Nanos) {
        self.count().seal(deadline);
    }

    fn path(&self) -> Option<StorePath> {
        self.store.path()
    }

    fn ended(&self) -> Option<String> {
        self.store.ended()
    }
}

/// Runs `body` as every rank, with its options and a store where all meet.
fn with_store(fabric: FabricChoice, ranks: u32, body: impl Fn(&Options, Box<dyn Store>) + Sync) {
    let folder = Folder::new();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (folder, body) = (&folder, &body);
            scope.spawn(move || {
                let mut options = Options::new(world(rank, ranks, &folder.0));
                options.fabric = fabric;
                (options.timeout, options.spin) = (PATIENCE, SPIN);
                let store = options.world.open_store(clock::now() + PATIENCE);
                body(&options, store.expect("a folder").expect("there are others"));
            });
        }
    });
}

fn a_hundred_splits_ask_nothing_of_the_store_and_connect_their_own_pairs(fabric: Fabric) {
    const SPLITS: u32 = 100;
    const KEPT: usize = 10;
    with_store(FabricChoice::Only(fabric), 4, |options, store| {
        let requests = Arc::<AtomicU64>::default();
        let group = Group::join_in(Box::new(Counted { store, requests: requests.clone() }), options);
        let group = group.unwrap_or_else(|error| panic!("{error}"));
        let rank = group.rank();
        let asked = requests.load(Ordering::Relaxed);
        assert!(asked > 0, "the ranks have met there");
        let mut parts: Vec<Group> = Vec::new();
        for split in 0..SPLITS {
            // In turn: neighbours, ranks of one parity, all but rank 0, all.
            let colour = [rank / 2, rank % 2, rank.min(1), 0][split as usize % 4];
            let part = group.split(Some(colour), 0).unwrap().unwrap();
            assert_eq!(part.info().connections, u64::from(part.world_size()) - 1);
            assert_eq!(sum(&part, 1), u64::from(part.world_size()));
            parts.push(part);
            if parts.len() > KEPT {
                let first = parts.remove(0);
                assert_eq!(sum(&first, 2), 2 * u64::from(first.world_size()), "the others did not touch it");
                first.close().unwrap();
            }
        }
        let again = parts.last().expect("some are kept").split(Some(rank / 2), 0).unwrap().unwrap();
        assert_eq!(sum(&again, 1), 2, "a part is split as the whole is");
        assert_eq!(requests.load(Ordering::Relaxed), asked, "of rank {rank}");
        assert_eq!(group.info().connections, 3, "those of the whole are not touched");
        group.barrier().unwrap();
    });
}

/// What ranks of the whole make by a split is what they make when they meet.
#[test]
fn a_part_has_the_fabric_algorithms_and_bits_of_a_group_that_has_met() {
    const RANKS: u32 = 6;
    // By rank in the whole: its host, its colour, and the fabric of its part.
    let rows: [[(u32, u32, Fabric); RANKS as usize]; 2] = [
        [0, 0, 0, 0, 0, 0].map(|host| (host, 0, Fabric::Shm)),
        [
            (0, 0, Fabric::Shm),
            (0, 0, Fabric::Shm),
            (1, 1, Fabric::Hybrid),
            (1, 1, Fabric::Hybrid),
            (0, 1, Fabric::Hybrid),
            (2, 1, Fabric::Hybrid),
        ],
    ];
    for row in rows {
        with_store(FabricChoice::Auto, RANKS, |options, store| {
            let own = options.world.rank;
            let (host, colour, fabric) = row[own as usize];
            let store = Arc::new(Mutex::new(store));
            let join = |name: &str, rank, world_size| {
                let mut options = options.clone();
                options.world = World { rank, world_size, ..options.world };
                options.world.host = Some(format!("host-{host}"));
                let store = Box::new(PrefixStore::new(store.clone(), name));
                Group::join_in(store, &options).unwrap_or_else(|error| panic!("{error}"))
            };
            let members: Vec<Rank> = (0..RANKS).filter(|rank| row[*rank as usize].1 == colour).collect();
            let rank = members.iter().position(|rank| *rank == own).expect("it has a colour");
            let whole = join("whole", own, RANKS);
            let part = whole.split(Some(colour), 0).unwrap().unwrap();
            let met = join(&format!("met-{colour}"), rank as Rank, members.len() as u32);
            assert_eq!(part.info().fabric, Some(fabric), "colour {colour}");
            assert_eq!((part.rank(), part.info().hosts), (met.rank(), met.info().hosts));
            assert_eq!(part.info().fabric, met.info().fabric);
            for elements in [1, 1000, 50_000] {
                let bits = |group: &Group| {
                    let value = |index: u32| 1.0 / (1 + index + 7 * own) as f32;
                    let mut data: Vec<f32> = (0..elements).map(value).collect();
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    let bytes = size_of_val(&*data);
                    let algorithm = group.algorithm_for(Collective::AllReduce, bytes).unwrap();
                    (algorithm, data.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
                };
                assert_eq!(bits(&part), bits(&met), "{elements} elements");
            }
            whole.barrier().unwrap();
        });
    }
}

/// The sum over a group of one number a rank.
fn sum(group: &Group, number: u64) -> u64 {
    let mut data = [number];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    data[0]
}

fn ranks_of_a_colour_become_a_group_numbered_by_key_and_the_others_get_none(fabric: Fabric) {
    with_group(
        fabric,
        5,
        |_| (),
        |group| {
            let rank = group.rank();
            // Even ranks in reverse, odd ranks but 3 in order, 3 in none.
            let colour = (rank != 3).then_some(rank % 2);
            let key = if rank % 2 == 0 { 10 - rank } else { 0 };
            let part = group.split(colour, key).unwrap();
            match &part {
                Some(part) if rank % 2 == 0 => {
                    assert_eq!((part.world_size(), part.rank()), (3, (4 - rank) / 2));
                    assert_eq!(sum(part, rank.into()), 6);
                    let mut all = [0u32; 3];
                    part.all_gather(&[rank][..], &mut all[..]).unwrap();
                    assert_eq!(all, [4, 2, 0]);
                }
                Some(part) => {
                    assert_eq!((rank, part.world_size(), part.rank()), (1, 1, 0));
                    assert_eq!(sum(part, 9), 9);
                }
                None => assert_eq!(rank, 3),
            }
            assert_eq!(sum(&group, 1), 5, "the group that was split works on");
            let again = part.and_then(|part| part.split(Some(part.rank() / 2), 0).unwrap());
            if let Some(again) = &again {
                let expected = if rank == 4 || rank == 2 { 6 } else { u64::from(rank) };
                assert_eq!(sum(again, rank.into()), expected, "a part is split again");
            }
            assert_eq!(sum(&group, 1), 5);
        },
    );
}

/// Rank 0 holds what the others meet in; alone in its part it meets nobody there.
fn rank_0_may_leave_as_soon_as_the_group_is_split(fabric: Fabric) {
    with_group(
        fabric,
        4,
        |_| (),
        |group| {
            let rank = group.rank();
            let part = group.split(Some(rank.min(1)), 0).unwrap().unwrap();
            drop(group);
            assert_eq!(sum(&part, rank.into()), if rank == 0 { 0 } else { 6 });
            part.close().unwrap();
        },
    );
}

fn a_part_outlives_the_group_and_its_failure_is_its_own(fabric: Fabric) {
    with_group(
        fabric,
        4,
        |_| (),
        |group| {
            let rank = group.rank();
            let first = group.split(Some(rank / 2), 0).unwrap().unwrap();
            let second = group.split(Some(rank % 2), 0).unwrap().unwrap();
            if rank < 2 {
                first.abort();
                let error = first.barrier().unwrap_err();
                assert!(
                    matches!(&error, CollectiveError::Failed(fault) if fault.kind == FaultKind::Aborted),
                    "{error}"
                );
            } else {
                assert_eq!(sum(&first, 1), 2);
            }
            assert_eq!(sum(&group, 1), 4, "a part's failure is not the group's");
            group.close().unwrap();
            assert_eq!(sum(&second, rank.into()), u64::from(if rank % 2 == 0 { 2u8 } else { 4 }));
            second.close().unwrap();
        },
    );
}

fn a_rank_that_does_not_split_is_named_at_the_deadline(fabric: Fabric) {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            if group.rank() == 1 {
                wait.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
                return;
            }
            let error = group.within(Duration::from_millis(300)).split(Some(0), 0).unwrap_err();
            let SplitError::Collective(CollectiveError::Failed(fault)) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 1), "{error}");
            done.send(()).unwrap();
        },
    );
}

fn an_all_gather_of_the_callers_is_no_split(fabric: Fabric) {
    with_group(
        fabric,
        2,
        |_| (),
        |group| {
            let error = if group.rank() == 0 {
                group.split(None, 0).map(|_| ()).unwrap_err()
            } else {
                SplitError::Collective(group.all_gather(&[0u64; 4], &mut [0u64; 8]).unwrap_err())
            };
            let SplitError::Collective(CollectiveError::Failed(fault)) = &error else { panic!("{error}") };
            assert_eq!(fault.kind, FaultKind::Mismatch, "{error}");
        },
    );
}

#[test]
fn a_rank_alone_is_split_into_itself() {
    let group = Group::join(&pleach_collectives::Options::new(pleach_transport::rendezvous::World::alone()));
    let group = group.unwrap_or_else(|error: JoinGroupError| panic!("{error}"));
    assert!(group.split(None, 0).unwrap().is_none());
    let part = group.split(Some(u32::MAX), u32::MAX).unwrap().unwrap();
    assert_eq!((part.rank(), part.world_size(), sum(&part, 3)), (0, 1, 3));
}

crate::on_every_fabric!(
    a_hundred_splits_ask_nothing_of_the_store_and_connect_their_own_pairs,
    rank_0_may_leave_as_soon_as_the_group_is_split,
    ranks_of_a_colour_become_a_group_numbered_by_key_and_the_others_get_none,
    a_part_outlives_the_group_and_its_failure_is_its_own,
    a_rank_that_does_not_split_is_named_at_the_deadline,
    an_all_gather_of_the_callers_is_no_split,
);
