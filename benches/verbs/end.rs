//! One end of a connection of pleach, in a process of its own: two devices of one process would
//! share its time.
//!
//! The program starts itself with a variable that holds what to do. An end says where it is and
//! what its memory is called in one line, hears the same of the other one, does its part, and rank
//! 0 says what it took and what it asked of its NIC.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pleach::Rank;
use pleach::transport::clock::now;
use pleach::transport::sleep;
use pleach::transport::verbs::{Counts, VerbsDevice, VerbsOptions};
use pleach::transport::{
    Address, Device, DeviceConfig, Event, Flush, HostMemory, Inline, LossCause, Memory, Nanos, Region,
    RegionKey, RemoteSlice, Responder, Secret, Signal, Source, SubmitError, Submitted, Transfer, TransferId,
};

use crate::report::median;
use crate::window;

/// Rank, device, what to measure, bytes, how often.
pub(crate) const VARIABLE: &str = "PLEACH_BENCH_VERBS_END";

/// What is measured where the two are ranks of a group, which have no end of their own.
pub(crate) const WINDOW: &str = "window";

/// Transfers under way, as `ib_write_bw` has them.
const DEPTH: u64 = 128;

pub(crate) const WARMUP: u64 = 20;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Polls between two looks at the clock, as groups have it.
const POLLS_PER_CLOCK: u32 = 16;

const SIGNAL_SLOTS: usize = 4;

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// What this process was started for, where it is an end.
pub(crate) fn asked() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

pub(crate) fn run(task: &str) -> ExitCode {
    match carry_out(task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

struct End {
    device: VerbsDevice,
    peer: Rank,
    region: Region,
    remote: RemoteSlice,
    events: Vec<Event>,
    clock: Nanos,
    polls: u32,
}

fn carry_out(task: &str) -> Result<(), String> {
    let words: Vec<&str> = task.split(' ').collect();
    let [rank, device, what, bytes, count] = words[..] else { return Err(format!("not understood: {task}")) };
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    let (rank, bytes, count) = (number(rank)? as Rank, number(bytes)?, number(count)?);
    if what == WINDOW {
        return window::run(bytes as usize, count);
    }
    let mut end = End::new(rank, device, bytes as usize)?;
    // All is there before the clock starts, as with the others.
    end.meet(1)?;
    let (took, asked, units) = match (what, rank) {
        ("write" | "read", 0) => {
            end.stream(what == "read", WARMUP)?;
            let (before, began) = (end.device.counts(), now());
            end.stream(what == "read", count)?;
            let seconds = now().since(began).as_secs_f64();
            let asked = asked_of_nic(before, end.device.counts());
            end.meet(2)?;
            let mebibytes = (bytes * count) as f64 / f64::from(1 << 20);
            (mebibytes / seconds, asked, mebibytes)
        }
        ("three-reads", 0) => {
            let took = end.three_reads(count)?;
            end.meet(2)?;
            (took, [0; 4], 1.0)
        }
        ("write" | "read" | "three-reads", _) => {
            end.meet(2)?;
            (0.0, [0; 4], 1.0)
        }
        ("ping-pong", _) => {
            let before = end.device.counts();
            let took = end.ping_pong(bytes as usize, count)?;
            (took, asked_of_nic(before, end.device.counts()), (count + WARMUP) as f64)
        }
        _ => return Err(format!("not understood: {what}")),
    };
    end.check(what, bytes as usize)?;
    if rank == 0 {
        let [requests, doorbells, completions, looks] = asked.map(|count| count as f64 / units);
        println!("{took} {requests:.2} {doorbells:.2} {completions:.2} {looks:.2}");
    }
    end.device.leave();
    let deadline = now() + PATIENCE;
    while !end.device.flush(Flush::All) && now() < deadline {
        end.device.flush(Flush::Transfers);
        end.device.poll(now(), &mut end.events);
        end.events.clear();
    }
    Ok(())
}

/// Requests, doorbells, completions, and looks at the queue that found some.
fn asked_of_nic(before: Counts, after: Counts) -> [u64; 4] {
    [
        after.requests - before.requests,
        after.doorbells - before.doorbells,
        after.completions - before.completions,
        after.polls_with_completions - before.polls_with_completions,
    ]
}

/// Bytes that differ between ranks.
fn pattern(rank: Rank, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index as u8).wrapping_mul(7).wrapping_add(rank as u8 + 1)).collect()
}

impl End {
    /// Connected to the other one.
    fn new(rank: Rank, device: &str, bytes: usize) -> Result<Self, String> {
        let config = DeviceConfig {
            rank,
            world_size: 2,
            secret: Some(Secret::new(b"known to both ends")),
            signal_slots: SIGNAL_SLOTS,
            connect_timeout: PATIENCE,
            interface: None,
            address: None,
            responder: Arc::new(Silent),
        };
        let wish = VerbsOptions { device: Some(device.to_owned()), ..VerbsOptions::default() };
        let mut device = VerbsDevice::new(config, &wish).map_err(|error| error.to_string())?;
        let memory: Arc<dyn Memory> = HostMemory::new(bytes);
        let region = device.register(memory).map_err(|error| error.to_string())?;
        region.whole().store(&pattern(rank, bytes));
        println!("{} {}", device.info().address, region.key().0);
        std::io::stdout().flush().map_err(|error| error.to_string())?;
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map_err(|error| error.to_string())?;
        let (address, key) = line.trim().rsplit_once(' ').ok_or("the other end has ended")?;
        let key = RegionKey(key.parse().map_err(|error| format!("{key}: {error}"))?);
        let peer = 1 - rank;
        device.connect(peer, &Address(address.to_owned())).map_err(|error| error.to_string())?;
        let remote = RemoteSlice { key, offset: 0, len: bytes as u64 };
        let mut end =
            Self { device, peer, region, remote, events: Vec::with_capacity(256), clock: now(), polls: 0 };
        let deadline = now() + PATIENCE;
        while end.poll()? == 0 {
            if now() > deadline {
                return Err("not connected in time".to_owned());
            }
        }
        Ok(end)
    }

    /// How much has ended or begun since.
    fn poll(&mut self) -> Result<u64, String> {
        if self.polls == 0 {
            self.clock = now();
        }
        self.polls = (self.polls + 1) % POLLS_PER_CLOCK;
        self.device.poll(self.clock, &mut self.events);
        if self.events.is_empty() { Ok(0) } else { self.take_events() }
    }

    fn take_events(&mut self) -> Result<u64, String> {
        let mut count = 0;
        for event in self.events.drain(..) {
            match event {
                Event::Connected { .. } | Event::Done { result: Ok(_), .. } => count += 1,
                Event::Done { result: Err(error), .. } => return Err(error.to_string()),
                Event::PeerLost { cause, .. } => return Err(cause.to_string()),
                Event::Departed { .. } | Event::Severed { .. } | Event::Drained { .. } => {}
            }
        }
        Ok(count)
    }

    fn submit(&mut self, transfer: Transfer) -> Result<Option<Submitted>, String> {
        unless_full(self.device.submit(self.peer, transfer, TransferId(0)))
    }

    /// Both ends have come so far; sleeps until they have.
    fn meet(&mut self, number: u64) -> Result<(), String> {
        let signal = Signal { signal_slot: 1, payload: Inline::EMPTY };
        while unless_full(self.device.signal(self.peer, &signal, TransferId(0)))?.is_none() {
            self.poll()?;
        }
        let signal_slots = self.device.signal_slots(self.peer);
        let deadline = now() + PATIENCE;
        loop {
            self.poll()?;
            if signal_slots.count(1) >= number {
                return Ok(());
            }
            if now() > deadline {
                return Err("the other end does not come".to_owned());
            }
            sleep::unless_ready(
                &mut self.device,
                |device| device.arm(),
                |_| signal_slots.count(1) >= number,
                |_, armed| armed.wait(now(), Duration::from_millis(50)),
            );
        }
    }

    /// Transfers all memory `count` times, with many transfers under way at once.
    fn stream(&mut self, is_read: bool, count: u64) -> Result<(), String> {
        let own = self.region.whole();
        let transfer = if is_read {
            Transfer::Get { src: self.remote, dst: own }
        } else {
            Transfer::Put { src: Source::Slice(own), dst: self.remote, signal: None }
        };
        let (mut submitted, mut ended) = (0, 0);
        while ended < count {
            while submitted < count && submitted - ended < DEPTH {
                match self.submit(transfer.clone())? {
                    Some(Submitted::Ended(_)) => (submitted, ended) = (submitted + 1, ended + 1),
                    Some(Submitted::UnderWay) => submitted += 1,
                    None => break,
                }
            }
            ended += self.poll()?;
        }
        Ok(())
    }

    /// Signals there and back; the median of half a turn, in microseconds.
    fn ping_pong(&mut self, bytes: usize, turns: u64) -> Result<f64, String> {
        let src =
            Inline::new(&pattern(self.device.info().rank, bytes)).ok_or("more bytes than a signal has")?;
        let is_first = self.device.info().rank == 0;
        let signal_slots = self.device.signal_slots(self.peer);
        let mut times = Vec::with_capacity(turns as usize);
        for turn in 1..=turns + WARMUP {
            let began = now();
            if is_first {
                self.throw(src)?;
            }
            while signal_slots.count(0) < turn {
                self.poll()?;
            }
            if !is_first {
                self.throw(src)?;
            }
            if turn > WARMUP {
                times.push(now().since(began).as_secs_f64() * 1e6 / 2.0);
            }
        }
        self.meet(2)?;
        Ok(median(times))
    }

    /// Three reads, one after the other, so often; the median of all three, in microseconds.
    fn three_reads(&mut self, times: u64) -> Result<f64, String> {
        let mut took = Vec::with_capacity(times as usize);
        for turn in 0..times + WARMUP {
            let began = now();
            (0..3).try_for_each(|_| self.stream(true, 1))?;
            if turn >= WARMUP {
                took.push(now().since(began).as_secs_f64() * 1e6);
            }
        }
        Ok(median(took))
    }

    fn throw(&mut self, bytes: Inline) -> Result<(), String> {
        let signal = Some(Signal { signal_slot: 0, payload: Inline::EMPTY });
        while self.submit(Transfer::Put { src: Source::Inline(bytes), dst: self.remote, signal })?.is_none() {
            self.poll()?;
        }
        // What is gathered for one doorbell goes now.
        self.device.flush(Flush::Transfers);
        Ok(())
    }

    /// What has come is right.
    fn check(&self, what: &str, bytes: usize) -> Result<(), String> {
        let rank = self.device.info().rank;
        let is_overwritten = match what {
            "write" => rank == 1,
            "read" | "three-reads" => rank == 0,
            _ => true,
        };
        let expected = pattern(if is_overwritten { self.peer } else { rank }, bytes);
        if self.region.whole().to_vec() == expected { Ok(()) } else { Err("wrong bytes".to_owned()) }
    }
}

/// What became of a transfer; `None` where the queue is full.
fn unless_full(submitted: Result<Submitted, SubmitError>) -> Result<Option<Submitted>, String> {
    match submitted {
        Ok(submitted) => Ok(Some(submitted)),
        Err(SubmitError::QueueFull { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}
