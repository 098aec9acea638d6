//! Measures a put of 8 bytes with its signal, one way. Two processes send each other the put in
//! turns, through the transport alone.
//!
//! The second process is this program again, started with the address of the first process in its
//! environment.

use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use pleach::transport::clock::{self, Nanos};
use pleach::transport::shm::ShmDevice;
use pleach::transport::{
    Address, Device, DeviceConfig, Event, Inline, LossCause, Rank, Responder, Signal, Signals, TransferId,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::run::Measured;

/// Set for the second process.
const ADDRESS: &str = "FABRICS_SIGNAL_ADDRESS";
const BYTES: u64 = 8;
const SIGNAL_SLOT: u16 = 0;
/// Ends the second process.
const END: u64 = u64::MAX;
const PATIENCE: Duration = Duration::from_secs(20);
/// Round trips of a sample.
const TRIPS: u64 = 200;
const SAMPLES_MIN: usize = 5;
/// After this many puts the ended ones are polled, to make room for more.
const THROWS: u64 = 16;
/// Polls of a signal slot between two checks that the peer still lives.
const LOOKS: u32 = 1 << 16;

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// One end of the pair.
struct End {
    device: ShmDevice,
    peer: Rank,
    signal_slots: Option<Signals>,
    events: Vec<Event>,
    sent: u64,
    seen: u64,
}

impl End {
    fn new(rank: Rank) -> Result<Self, String> {
        let device = ShmDevice::new(DeviceConfig {
            rank,
            world_size: 2,
            secret: None,
            signal_slots: 1,
            connect_timeout: PATIENCE,
            interface: None,
            address: None,
            responder: Arc::new(Silent),
        });
        let device = device.map_err(|error| format!("no device: {error}"))?;
        Ok(Self {
            device,
            peer: 1 - rank,
            signal_slots: None,
            events: Vec::with_capacity(64),
            sent: 0,
            seen: 0,
        })
    }

    fn connect(&mut self, address: &Address) -> Result<(), String> {
        self.device.connect(self.peer, address).map_err(|error| error.to_string())?;
        let (peer, deadline) = (self.peer, clock::now() + PATIENCE);
        while !self.events.contains(&Event::Connected { peer }) {
            self.poll(deadline)?;
        }
        self.events.clear();
        self.signal_slots = Some(self.device.signal_slots(peer));
        Ok(())
    }

    fn poll(&mut self, deadline: Nanos) -> Result<(), String> {
        let now = clock::now();
        self.device.poll(now, &mut self.events);
        match self.events.iter().find(|event| matches!(event, Event::PeerLost { .. })) {
            Some(lost) => Err(format!("the other process is lost: {lost:?}")),
            None if now > deadline => Err(format!("no word for {} s", PATIENCE.as_secs())),
            None => Ok(()),
        }
    }

    fn throw(&mut self, value: u64) -> Result<(), String> {
        let payload = Inline::new(&value.to_ne_bytes()).ok_or("8 bytes do not fit beside a counter")?;
        let signal = Signal { signal_slot: SIGNAL_SLOT, payload };
        self.device.signal(self.peer, &signal, TransferId(self.sent)).map_err(|error| error.to_string())?;
        self.sent += 1;
        if self.sent.is_multiple_of(THROWS) {
            self.device.poll(Nanos::ZERO, &mut self.events);
            self.events.clear();
        }
        Ok(())
    }

    fn catch(&mut self) -> Result<u64, String> {
        let signal_slots = self.signal_slots.clone().ok_or("not connected")?;
        let mut deadline = None;
        loop {
            for _ in 0..LOOKS {
                if signal_slots.count(SIGNAL_SLOT) > self.seen {
                    self.seen += 1;
                    let payload = signal_slots.payload(SIGNAL_SLOT);
                    return Ok(u64::from_ne_bytes(std::array::from_fn(|place| payload[place])));
                }
                std::hint::spin_loop();
            }
            let deadline = *deadline.get_or_insert_with(|| clock::now() + PATIENCE);
            self.poll(deadline)?;
        }
    }
}

/// Whether this process was started by [`measure`].
pub(crate) fn is_second_process() -> bool {
    std::env::var_os(ADDRESS).is_some()
}

/// The second process: answers every put until the end.
pub(crate) fn answer() {
    let answer = || -> Result<(), String> {
        let address = Address(std::env::var(ADDRESS).map_err(|error| error.to_string())?);
        let mut end = End::new(1)?;
        end.connect(&address)?;
        pin(1)?;
        loop {
            let value = end.catch()?;
            end.throw(value)?;
            if value == END {
                return Ok(());
            }
        }
    };
    if let Err(error) = answer() {
        eprintln!("error: second process of the ping-pong: {error}");
    }
}

/// Measures for about `time_ms`.
pub(crate) fn measure(time_ms: u64) -> Result<Measured, String> {
    let mut end = End::new(0)?;
    let address = end.device.info().address.clone();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let child = Command::new(program).env(ADDRESS, &address.0).spawn();
    let mut child = Ended(child.map_err(|error| error.to_string())?);
    let samples = samples(&mut end, &address, Duration::from_millis(time_ms));
    if samples.is_ok() {
        child.0.wait().map_err(|error| error.to_string())?;
    }
    let mut samples = samples?;
    samples.sort_by(f64::total_cmp);
    let at = |percent: usize| samples[(samples.len() * percent).div_ceil(100) - 1];
    Ok(Measured { bytes: BYTES, median_us: at(50), late_us: at(99) })
}

/// Times of one way, in us.
fn samples(end: &mut End, address: &Address, time: Duration) -> Result<Vec<f64>, String> {
    end.connect(address)?;
    let before = sched_getaffinity(None).map_err(|error| error.to_string())?;
    pin(0)?;
    let mut samples = Vec::new();
    let mut value = 0;
    let until = clock::now() + time;
    // The first sample is not counted.
    while samples.len() <= SAMPLES_MIN || clock::now() < until {
        let began = clock::now();
        for _ in 0..TRIPS {
            value += 1;
            end.throw(value)?;
            let back = end.catch()?;
            if back != value {
                return Err(format!("wrong results: {value} came back as {back}"));
            }
        }
        samples.push((clock::now() - began).as_nanos() as f64 / 1e3 / TRIPS as f64 / 2.0);
    }
    end.throw(END)?;
    end.catch()?;
    sched_setaffinity(None, &before).map_err(|error| error.to_string())?;
    Ok(samples.split_off(1))
}

/// A child process that is ended on drop.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The child may have ended already; then the error does not matter.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Keeps this thread on one of the processors that it may use.
fn pin(rank: usize) -> Result<(), String> {
    let allowed = sched_getaffinity(None).map_err(|error| error.to_string())?;
    let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let mut only = CpuSet::new();
    only.set(processors[rank % processors.len()]);
    sched_setaffinity(None, &only).map_err(|error| error.to_string())
}
