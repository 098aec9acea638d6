//! Measures shared memory between two pinned processes: the one-way latency of a signal of 8 bytes,
//! and the bandwidth of puts beside `memcpy`.
//!
//! `cargo run --release -p pleach-transport --example shm_measure`

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::shm::ShmDevice;
use pleach_transport::{
    Address, Device, DeviceConfig, Event, Inline, LossCause, Rank, Region, RegionKey, RemoteSlice, Responder,
    SharedMemory, Signal, Signals, Source, Transfer, TransferId, clock,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Set for the second process.
const ADDRESS: &str = "PLEACH_MEASURE_ADDRESS";
const SIGNAL_SLOT: u16 = 0;
/// Tells the second process to end.
const END: u16 = 1;
const PATIENCE: Duration = Duration::from_secs(60);
const BATCHES: usize = 200;
const ROUNDS: u64 = 1_000;
const REGION_BYTES: usize = 64 << 20;
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

fn main() {
    match std::env::var(ADDRESS) {
        Ok(address) => answer(&Address(address)),
        Err(_) => measure(),
    }
}

fn device(rank: Rank) -> ShmDevice {
    ShmDevice::new(DeviceConfig {
        rank,
        world_size: 2,
        secret: None,
        signal_slots: 2,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    })
    .expect("the system gives memory and sockets")
}

fn connect(device: &mut ShmDevice, peer: Rank, address: &Address) {
    device.connect(peer, address).expect("an address");
    let mut events = Vec::with_capacity(4);
    let deadline = clock::now() + PATIENCE;
    while !events.contains(&Event::Connected { peer }) {
        assert!(clock::now() < deadline, "the other process does not connect");
        device.poll(clock::now(), &mut events);
    }
}

/// Keeps this thread on the given one of the processors it may use.
fn pin(index: usize) {
    let allowed = sched_getaffinity(None).expect("this thread exists");
    let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut only = CpuSet::new();
    only.set(processors[index % processors.len()]);
    sched_setaffinity(None, &only).expect("it may be used");
}

fn shared(device: &mut ShmDevice) -> Region {
    device.register(SharedMemory::new(REGION_BYTES).expect("memory")).expect("it is shared")
}

/// Rank 1: says where its region is, then answers each signal.
fn answer(address: &Address) {
    pin(1);
    let mut device = device(1);
    connect(&mut device, 0, address);
    let region = shared(&mut device);
    region.whole().store(&vec![1; REGION_BYTES]);
    let signal_slots = device.signal_slots(0);
    let mut events = Vec::with_capacity(64);
    let mut key = Some(region.key().0);
    let mut answered = 0;
    while signal_slots.count(END) == 0 {
        if let Some(key) = key.take() {
            signal(&mut device, 0, SIGNAL_SLOT, key);
        }
        if signal_slots.count(SIGNAL_SLOT) > answered {
            answered += 1;
            signal(&mut device, 0, SIGNAL_SLOT, answered);
        }
        device.poll(clock::Nanos::ZERO, &mut events);
        events.clear();
    }
}

fn signal(device: &mut ShmDevice, peer: Rank, signal_slot: u16, value: u64) {
    let payload = Inline::new(&value.to_ne_bytes()).expect("short");
    device.signal(peer, &Signal { signal_slot, payload }, TransferId(0)).expect("room");
}

fn wait(device: &mut ShmDevice, signal_slots: &Signals, count: u64, events: &mut Vec<Event>) {
    while signal_slots.count(SIGNAL_SLOT) < count {
        device.poll(clock::Nanos::ZERO, events);
        events.clear();
    }
}

fn measure() {
    let mut device = device(0);
    let address = device.info().address.clone();
    let mut child = Command::new(std::env::current_exe().expect("a program"))
        .env(ADDRESS, &address.0)
        .spawn()
        .expect("the program runs");
    pin(0);
    connect(&mut device, 1, &address);
    let signal_slots = device.signal_slots(1);
    let mut events = Vec::with_capacity(64);
    wait(&mut device, &signal_slots, 1, &mut events);
    let key = RegionKey(u64::from_ne_bytes(
        signal_slots.payload(SIGNAL_SLOT)[..8].try_into().expect("eight bytes"),
    ));

    let mut count = 1;
    let mut samples: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let began = clock::now();
            for _ in 0..ROUNDS {
                signal(&mut device, 1, SIGNAL_SLOT, count);
                count += 1;
                wait(&mut device, &signal_slots, count, &mut events);
            }
            clock::now().since(began).as_nanos() as f64 / ROUNDS as f64 / 2.0
        })
        .collect();
    print("signal of 8 bytes, one way", &mut samples, "ns");

    let source = shared(&mut device);
    source.whole().store(&vec![2; REGION_BYTES]);
    let (from, mut to) = (vec![3_u8; REGION_BYTES], vec![4_u8; REGION_BYTES]);
    for bytes in SIZES {
        let dst = RemoteSlice { key, offset: 0, len: bytes as u64 };
        let src = source.slice(0..bytes).expect("inside");
        let rounds = (256 << 20) / bytes;
        let mut puts = Vec::new();
        let mut copies = Vec::new();
        for _ in 0..rounds.min(200) {
            let began = clock::now();
            let put = Transfer::Put { src: Source::Slice(src.clone()), dst, signal: None };
            device.submit(1, put, TransferId(1)).expect("room");
            while events.is_empty() {
                device.poll(clock::Nanos::ZERO, &mut events);
            }
            assert!(matches!(events[0], Event::Done { result: Ok(_), .. }), "{events:?}");
            events.clear();
            puts.push(bytes as f64 / clock::now().since(began).as_nanos() as f64);
            let began = clock::now();
            to[..bytes].copy_from_slice(std::hint::black_box(&from[..bytes]));
            std::hint::black_box(&to);
            copies.push(bytes as f64 / clock::now().since(began).as_nanos() as f64);
        }
        print(&format!("put of {} KiB", bytes >> 10), &mut puts, "GB/s");
        print(&format!("memcpy of {} KiB", bytes >> 10), &mut copies, "GB/s");
    }
    signal(&mut device, 1, END, 0);
    device.poll(clock::now(), &mut events);
    child.wait().expect("a child");
}

fn print(what: &str, samples: &mut [f64], unit: &str) {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share) as usize];
    println!(
        "{what:<28} lowest {:>7.1}  p50 {:>7.1}  p90 {:>7.1}  highest {:>7.1} {unit}",
        at(0.0),
        at(0.5),
        at(0.9),
        at(1.0)
    );
}
