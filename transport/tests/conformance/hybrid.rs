//! Shared memory and sockets in one device, under the suite: once with the pair that most tests are
//! about on one host, and once with it on two, where rank 0 shares its host with others. Both once
//! more with RDMA across.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::hybrid::{HostId, HybridDevice};
use pleach_transport::verbs::VerbsOptions;
use pleach_transport::{
    Device, DeviceConfig, Event, HostMemory, Memory, Nanos, Rank, RegisterError, SharedMemory, TransferError,
    clock,
};

use crate::rdma_devices::rdma_device;
use crate::world::{Backend, BackendKind, PATIENCE, Submission, World, assert_bytes, noise, put, signal};

const SIGNAL_SLOT: u16 = 3;
const LEN: usize = 70_000;

/// Two hosts. `TOGETHER`: ranks 0 and 1 are on the first one, all others on the second; else the
/// ranks take turns. `RDMA`: that is what joins the hosts, each of which has the RDMA device of its
/// number.
pub(crate) struct Hybrid<const TOGETHER: bool, const RDMA: bool = false>;

fn host<const TOGETHER: bool>(rank: Rank) -> u32 {
    if TOGETHER { u32::from(rank > 1) } else { rank % 2 }
}

/// The hosts of the first processes.
fn hosts<const TOGETHER: bool>(world_size: u32) -> Vec<HostId> {
    (0..world_size).map(|rank| HostId::new(host::<TOGETHER>(rank), None)).collect()
}

impl<const TOGETHER: bool, const RDMA: bool> Backend for Hybrid<TOGETHER, RDMA> {
    const NAME: &'static str = match (TOGETHER, RDMA) {
        (true, false) => "hybrid, to a neighbour",
        (false, false) => "hybrid, across",
        (true, true) => "hybrid with RDMA, to a neighbour",
        (false, true) => "hybrid with RDMA, across",
    };
    const LIVE: bool = true;
    const LONG_BYTES: usize = 300 << 10;
    // As over verbs alone.
    const FAILED_AFTER: Duration = Duration::from_millis(if RDMA && !TOGETHER { 5000 } else { 600 });

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let hosts = hosts::<TOGETHER>(config.world_size);
        let here = hosts[config.rank as usize];
        if RDMA {
            let wish = VerbsOptions { device: Some(rdma_device(here.number())), ..VerbsOptions::default() };
            let made = HybridDevice::over_verbs(config, here, &hosts, &wish);
            return Box::new(made.expect("the system gives memory, and an RDMA device is up"));
        }
        Box::new(HybridDevice::new(config, here, &hosts).expect("the system gives memory and sockets"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        SharedMemory::new(len).expect("the system gives memory")
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}

/// As [`Hybrid`], but each process that gets a rank after another one is of the other host, and
/// knows no hosts but its own.
pub(crate) struct Moving<const TOGETHER: bool> {
    /// By rank.
    made: HashMap<Rank, u32>,
}

impl<const TOGETHER: bool> Backend for Moving<TOGETHER> {
    const NAME: &'static str =
        if TOGETHER { "hybrid, from a neighbour's host" } else { "hybrid, from across" };
    const LIVE: bool = true;
    const LONG_BYTES: usize = 300 << 10;

    fn start(_world_size: u32) -> Self {
        Self { made: HashMap::new() }
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let before = self.made.entry(config.rank).or_default();
        let here = HostId::new((host::<TOGETHER>(config.rank) + *before) % 2, None);
        let hosts = if *before == 0 { hosts::<TOGETHER>(config.world_size) } else { Vec::new() };
        *before += 1;
        Box::new(HybridDevice::new(config, here, &hosts).expect("the system gives memory and sockets"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        SharedMemory::new(len).expect("the system gives memory")
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}

/// Ranks 0 and 1 on one host, 2 on another.
fn both_kinds() -> World {
    World::connected(BackendKind::of::<Hybrid<true>>(), 3)
}

#[test]
fn a_region_has_one_key_for_neighbours_and_for_peers_across() {
    let mut world = both_kinds();
    let target = world.region(0, LEN);
    for (turn, from) in [1, 2, 2, 1].into_iter().enumerate() {
        let source = world.region_of(from, &noise(turn as u64, LEN));
        world
            .carry_out(from, 0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)))
            .expect("reaches rank 0");
        world.until("the signal", |world| world.count(0, from, SIGNAL_SLOT) == turn as u64 / 2 + 1);
        assert_bytes(&target.whole().to_vec(), &noise(turn as u64, LEN), "what either peer put");
    }
    let (stale, memory) = (target.remote(), Arc::downgrade(target.memory()));
    drop(target);
    world.announce(0);
    for from in [1, 2] {
        let source = world.region(from, LEN);
        let ending = world.carry_out(from, 0, put(&source.whole(), stale, None));
        assert_eq!(ending, Err(TransferError::Refused { peer: 0, key: stale.key }), "rank {from}");
    }
    world.until("the memory to be released by both fabrics", |_| memory.strong_count() == 0);
}

#[test]
fn severing_a_neighbour_leaves_regions_to_peers_across_and_the_other_way_round() {
    for (severed, other) in [(1, 2), (2, 1)] {
        let mut world = both_kinds();
        let (target, source) = (world.region(0, LEN), world.region_of(other, &noise(7, LEN)));
        world.device(0).sever(severed);
        world.until("the fence", |world| world.saw(0, &Event::Severed { peer: severed }) == 1);
        world
            .carry_out(other, 0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)))
            .expect("the other fabric has heard of nothing");
        world.until("the signal", |world| world.count(0, other, SIGNAL_SLOT) == 1);
        assert_bytes(&target.whole().to_vec(), &noise(7, LEN), "a put over the other fabric");
    }
}

#[test]
fn a_rank_is_reached_by_the_fabric_of_its_process_at_both_ends() {
    let mut world = World::connected(BackendKind::of::<Moving<true>>(), 3);
    let fabrics = |world: &mut World| {
        [[0, 1], [1, 0], [1, 2], [2, 1], [0, 2]]
            .map(|[from, to]| world.device(from).info().reach[to as usize].fabric)
    };
    assert_eq!(fabrics(&mut world), ["shm", "shm", "tcp", "tcp", "tcp"]);
    for (number, expected) in
        [["tcp", "tcp", "shm", "shm", "tcp"], ["shm", "shm", "tcp", "tcp", "tcp"]].into_iter().enumerate()
    {
        world.kill(1);
        for other in [0, 2] {
            world.until("the loss", |world| world.losses(other, 1).len() == number + 1);
        }
        world.replace(1);
        world.connect_pair([0, 1], [number + 2, 1]);
        world.connect_pair([2, 1], [number + 2, 1]);
        assert_eq!(fabrics(&mut world), expected);
        world.check_pair(1, 0);
        world.check_pair(1, 2);
    }
}

#[test]
fn severing_a_rank_ends_once_whatever_its_processes_were_joined_by() {
    let mut world = World::connected(BackendKind::of::<Moving<true>>(), 2);
    // It leaves and runs on, with memory of rank 0 mapped.
    let target = world.region(0, LEN);
    world.device(1).leave();
    world.until("the bye", |world| world.saw(0, &Event::Departed { peer: 1 }) == 1);
    let former = world.replace(1);
    world.connect_pair([0, 1], [2, 1]);
    for times in 1..=3 {
        world.device(0).sever(1);
        world.device(0).sever(1);
        world.until("the fence", |world| world.saw(0, &Event::Severed { peer: 1 }) >= times);
        world.watch(|world| assert_eq!(world.saw(0, &Event::Severed { peer: 1 }), times));
    }
    drop((former, target));
    world.replace(1);
    world.connect_pair([0, 1], [3, 1]);
    world.check_pair(0, 1);
}

#[test]
fn who_connects_as_somebody_else_while_a_rank_is_taken_is_not_taken_for_its_holder() {
    let mut world = World::connected(BackendKind::of::<Moving<true>>(), 2);
    let before = world.replace(1).expect("it runs");
    let address = world.device(1).info().address.clone();
    world.device(0).connect(1, &address).expect("the rank is taken: nothing to do");
    assert_eq!(world.device(0).info().reach[1].fabric, "shm");
    world.watch(|world| assert_eq!(world.saw(0, &Event::Connected { peer: 1 }), 1));
    assert_eq!(world.device(0).incarnation(1), Some(before.info().incarnation));
}

#[test]
fn neighbours_see_on_which_processor_a_rank_waits_and_peers_across_do_not() {
    let mut world = both_kinds();
    let mut exchange = |rank: u32, own: u32| {
        let mut shown = Vec::new();
        world.device(rank).exchange_processors(own, &mut |peer, processor| shown.push((peer, processor)));
        shown
    };
    assert_eq!(exchange(0, 0), [], "nobody has said anything");
    for processor in [0, 7, 7, 1023] {
        exchange(0, processor);
        assert_eq!(exchange(1, 5), [(0, processor)]);
        assert_eq!(exchange(2, 6), [], "who is across sees nobody");
    }
    assert_eq!(exchange(0, 0), [(1, 5)], "and is seen by nobody");
}

#[test]
fn one_wake_source_is_woken_by_neighbours_and_by_peers_across() {
    const ROUNDS: u64 = 50;
    let mut world = both_kinds();
    let signal_slots = [world.signal_slots(0, 1), world.signal_slots(0, 2)];
    let mut sleeper = world.take(0);
    let slept = std::thread::spawn(move || {
        let mut events = Vec::with_capacity(16);
        let (deadline, mut slowest) = (clock::now() + PATIENCE, Duration::ZERO);
        while signal_slots.iter().any(|signal_slots| signal_slots.count(SIGNAL_SLOT) < ROUNDS) {
            assert!(clock::now() < deadline, "{signal_slots:?} do not count to {ROUNDS}");
            sleeper.poll(clock::now(), &mut events);
            let seen = signal_slots.each_ref().map(|signal_slots| signal_slots.count(SIGNAL_SLOT));
            if let Some(armed) = sleeper.arm()
                && seen == signal_slots.each_ref().map(|signal_slots| signal_slots.count(SIGNAL_SLOT))
                && seen != [ROUNDS; 2]
            {
                let began = clock::now();
                armed.wait(began, PATIENCE);
                slowest = slowest.max(clock::now().since(began));
            }
        }
        slowest
    });
    for round in 1..=ROUNDS {
        for from in [1, 2] {
            world.submit(from, 0, Submission::Signal(signal(SIGNAL_SLOT, b"")));
            // Sometimes one after the other, sometimes both at once.
            for _ in 0..if round % 2 == 0 { 50 } else { 0 } {
                world.pump();
            }
        }
    }
    world.until("the sleeper to have seen all", |_| slept.is_finished());
    let slowest = slept.join().expect("the sleeper saw every signal");
    assert!(slowest < PATIENCE / 2, "slept {slowest:?}: a wake source was missed");
}

#[test]
fn memory_that_no_neighbour_could_map_is_refused() {
    let mut world = both_kinds();
    let refused = world.device(0).register(HostMemory::new(LEN));
    assert!(matches!(refused, Err(RegisterError::NotShareable { .. })), "{refused:?}");
}
