//! What programs without `unsafe` may do, and memory stays theirs: calls that are forgotten, panics
//! in calls, threads that touch the same registered bytes.
#![forbid(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use pleach_collectives::call::{Counts, CountsError, Descriptor};
use pleach_collectives::compute::HostCompute;
use pleach_collectives::engine::{Bytes, StartError, StatusBoard, signal_slots};
use pleach_collectives::group::Connection;
use pleach_collectives::simulate::Cluster;
use pleach_collectives::{Group, Operation, Options};
use pleach_schedule::cost::{CostModel, Platform};
use pleach_schedule::generate::Access;
use pleach_transport::rendezvous::World;
use pleach_transport::shm::ShmDevice;
use pleach_transport::sim::{self, Network};
use pleach_transport::{
    Address, Device, DeviceConfig, Event, HostMemory, Rank, SharedMemory, Source, Transfer, TransferId, clock,
};
use pleach_vocabulary::{Collective, DataType, ReduceOp};

const PATIENCE: Duration = Duration::from_secs(20);

fn config(rank: Rank, board: &Arc<StatusBoard>) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size: 2,
        secret: None,
        signal_slots: signal_slots(2),
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: board.clone(),
    }
}

fn connected(mut device: ShmDevice, peer: Rank, address: &Address, board: Arc<StatusBoard>) -> Group {
    device.connect(peer, address).unwrap();
    let mut events = Vec::with_capacity(64);
    while !events.iter().any(|event| matches!(event, Event::Connected { .. })) {
        device.poll(clock::now(), &mut events);
        thread::yield_now();
    }
    let connection = Connection {
        device: Box::new(device),
        events: Vec::new(),
        board,
        platform: Platform::one_host(2, Access::Put, CostModel::LOOPBACK),
        ranks_a_processor: 1,
        store: None,
    };
    connection.into_group(Box::new(HostCompute::new()), &Options::new(World::alone())).unwrap()
}

/// Two ranks in this process, over shared memory.
fn pair() -> [Group; 2] {
    let boards = [0, 1].map(|rank| Arc::new(StatusBoard::new(rank)));
    let [zero, one] = [0, 1].map(|rank| ShmDevice::new(config(rank, &boards[rank as usize])).unwrap());
    let addresses = [zero.info().address.clone(), one.info().address.clone()];
    let [first, second] = boards;
    thread::scope(|scope| {
        let other = scope.spawn(|| connected(one, 0, &addresses[0], second));
        [connected(zero, 1, &addresses[1], first), other.join().unwrap()]
    })
}

#[test]
fn forgotten_calls_cost_their_memory_and_nothing_else() {
    /// More than may be under way at once.
    const CALLS: u32 = 300;
    let [zero, one] = pair();
    thread::scope(|scope| {
        scope.spawn(move || {
            for call in 0..=CALLS {
                let mut data = [call; 4];
                one.all_reduce(&mut data[..], ReduceOp::Sum).unwrap();
                assert_eq!(data, [call * 2; 4]);
            }
            one.barrier().unwrap();
        });
        let kept = zero.start(Operation::all_reduce(vec![0u32; 4], ReduceOp::Sum)).unwrap();
        for call in 1..=CALLS {
            let started = zero.start(Operation::all_reduce(vec![call; 4], ReduceOp::Sum));
            let mut pending = started.unwrap_or_else(|error| panic!("call {call}: {error}"));
            // Of two calls one has ended when it is forgotten.
            assert!(call % 2 == 1 || pending.wait_for(PATIENCE));
            std::mem::forget(pending);
        }
        assert_eq!(kept.wait().unwrap(), [0u32; 4], "what nobody forgot is told, however much came after");
        zero.barrier().unwrap();
    });
}

#[test]
fn threads_that_touch_the_same_registered_bytes_race_nothing() {
    let board = Arc::new(StatusBoard::new(0));
    let mut device = ShmDevice::new(DeviceConfig { world_size: 1, ..config(0, &board) }).unwrap();
    let whole = device.register(SharedMemory::new(1001).unwrap()).unwrap().whole();
    thread::scope(|scope| {
        for byte in [1u8, 2] {
            let slice = whole.slice(1..1001).unwrap();
            scope.spawn(move || (0..50).for_each(|_| slice.store(&[byte; 1000])));
        }
        for _ in 0..50 {
            assert!(whole.to_vec().iter().all(|byte| *byte <= 2));
        }
    });
}

#[test]
fn regions_and_slices_outlive_their_device_also_while_it_moves_bytes() {
    const LEN: usize = 4 << 20;
    let boards = [0, 1].map(|rank| Arc::new(StatusBoard::new(rank)));
    let mut devices = [0, 1].map(|rank| ShmDevice::new(config(rank, &boards[rank as usize])).unwrap());
    let addresses = [0, 1].map(|rank: usize| devices[rank].info().address.clone());
    let mut events = [0, 1].map(|_| Vec::with_capacity(64));
    for rank in [0, 1] {
        devices[rank].connect(1 - rank as Rank, &addresses[1 - rank]).unwrap();
    }
    while !events.iter().all(|events| events.iter().any(|event| matches!(event, Event::Connected { .. }))) {
        for (device, events) in devices.iter_mut().zip(&mut events) {
            device.poll(clock::now(), events);
        }
    }
    let [mut zero, mut one] = devices;
    let [source, target] = [&mut zero, &mut one].map(|device| {
        let memory = SharedMemory::new(LEN).unwrap();
        device.register(memory).unwrap().whole()
    });
    source.store(&[9; LEN]);
    let put = Transfer::Put { src: Source::Slice(source.clone()), dst: target.remote(), signal: None };
    zero.submit(1, put, TransferId(1)).unwrap();
    let part = target.slice(1..LEN).unwrap();
    drop(target);
    drop(zero);
    source.store(&[8; LEN]);
    drop(one);
    assert!(source.to_vec().iter().all(|byte| *byte == 8));
    assert!(part.to_vec().iter().all(|byte| matches!(byte, 0 | 8 | 9)), "what came of the put, and no more");
    part.store(&[3; 10]);
    assert_eq!(part.to_vec()[..11].iter().filter(|byte| **byte == 3).count(), 10);
}

#[test]
fn a_simulated_call_is_refused_slices_that_are_too_short() {
    const COUNT: usize = 100;
    let network = Network::full_mesh(2, 1_000_000_000, Duration::from_micros(1));
    let mut cluster = Cluster::new(sim::Options::new(network, 1));
    let member = cluster.members[0].as_mut().unwrap();
    let counts = Counts::Each(COUNT);
    let (collective, amount, data_type) = (Collective::AllReduce, counts.amount(), DataType::U32);
    let descriptor = Descriptor { collective, amount, data_type, op: ReduceOp::Sum, tag: 0 };
    let plan = member.planner.plan(&descriptor, &counts, None).unwrap().clone();
    let region = member.engine.device().register(HostMemory::new(4 * COUNT)).unwrap();
    let [long, short] = [4 * COUNT, 4 * COUNT - 1].map(|len| region.whole().slice(0..len).unwrap());
    for (input, output) in [(&long, &short), (&short, &long), (&short, &short)] {
        for bytes in [Bytes::Registered, Bytes::Staged] {
            let refused = member.start(&plan, bytes(input.clone()), bytes(output.clone()), PATIENCE);
            assert!(matches!(refused, Err(StartError::Counts(CountsError::Length { .. }))), "{refused:?}");
        }
    }
    let bytes = Bytes::Registered(long);
    assert!(member.start(&plan, bytes.clone(), bytes, PATIENCE).is_ok());
}

/// What becomes of a process in which a subscriber of `tracing` panics in a call.
fn in_child(name: &str) -> Output {
    let arguments = [&format!("child::{name}"), "--exact", "--ignored", "--nocapture"];
    Command::new(std::env::current_exe().unwrap()).args(arguments).output().unwrap()
}

#[test]
fn a_panic_in_a_call_ends_the_process_before_its_memory_is_freed() {
    const SIGABRT: i32 = 6;
    for name in ["a_panic_in_a_blocking_call", "a_panic_while_a_call_is_waited_for", "a_panic_in_a_batch"] {
        let output = in_child(name);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(SIGABRT), "{name}: {text}");
        assert!(text.contains("pleach: the process ends: a panic came up while"), "{name}: {text}");
        assert!(!String::from_utf8_lossy(&output.stdout).contains("freed"), "{name}: {text}");
    }
}

mod child {
    use super::*;

    /// Panics at the first event of the engine.
    struct Panics(AtomicU32);

    impl tracing::Subscriber for Panics {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            metadata.is_event() && metadata.target().starts_with("pleach_collectives::engine")
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            assert!(self.0.fetch_add(1, Ordering::Relaxed) > 0, "a subscriber that panics");
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    /// Data that say when they are freed.
    struct Told;

    impl Drop for Told {
        fn drop(&mut self) {
            println!("freed");
        }
    }

    /// Makes a call that the peer does not make, so that the engine says why the group has failed.
    fn fail(call: impl FnOnce(&Group)) {
        let [zero, _one] = pair();
        let zero = zero.within(Duration::from_millis(50));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _told = Told;
            tracing::subscriber::with_default(Panics(AtomicU32::new(0)), || call(&zero));
        }));
        println!("it went on: {}", caught.is_err());
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_panic_in_a_blocking_call() {
        fail(|group| drop(group.all_reduce(&mut [1u8; 700][..], ReduceOp::Sum)));
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_panic_while_a_call_is_waited_for() {
        fail(|group| drop(group.start(Operation::all_reduce(vec![1u8; 700], ReduceOp::Sum)).unwrap().wait()));
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_panic_in_a_batch() {
        fail(|group| {
            let mut data = [[1u8; 700]; 3];
            let mut batch = group.batch();
            for part in &mut data {
                batch.add(Operation::all_reduce(part, ReduceOp::Sum)).unwrap();
            }
            drop(batch.run());
        });
    }
}
