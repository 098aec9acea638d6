//! A put and a get of the transport beside the receives of the measurement: as many bytes between
//! the same two processes over the same fabric, without keys, leases and messages.

use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use pleach::exchange::{EndpointOptions, ExchangeFabric};
use pleach::transport::shm::ShmDevice;
use pleach::transport::tcp::TcpDevice;
use pleach::transport::verbs::VerbsDevice;
use pleach::transport::{
    Address, Device, DeviceConfig, Event, Rank, RegionKey, RemoteSlice, Secret, SharedMemory, Slice, Source,
    Submitted, Transfer, TransferId, clock,
};

use super::bench::{LIMIT, Measured, SECRET, Sender, byte_at, measure, options};
use crate::cli::CommandError;
use crate::cli::output::print;
use crate::cli::silent::SilentResponder;

/// Events of a device that are taken at once.
const EVENTS: usize = 8;

/// The longest sleep between two looks at a device.
const TURN: Duration = Duration::from_secs(1);

/// The ranks of the process that sends tensors, and of the one that measures.
const SENDER: Rank = 0;
const MEASURER: Rank = 1;

fn failed(error: &dyn std::fmt::Display) -> CommandError {
    CommandError::failed(format!("no measurement: {error}"))
}

/// A device of one of the two processes.
pub(crate) fn open_device(
    fabric: ExchangeFabric,
    rank: Rank,
    signal_slots: usize,
) -> Result<Box<dyn Device>, CommandError> {
    let EndpointOptions { secret, verbs, .. } = options(fabric, 0)?;
    let config = DeviceConfig {
        rank,
        world_size: 2,
        secret: Some(secret.unwrap_or_else(|| Secret::new(SECRET))),
        signal_slots,
        connect_timeout: LIMIT,
        interface: None,
        address: None,
        responder: Arc::new(SilentResponder),
    };
    Ok(match fabric {
        ExchangeFabric::Tcp => Box::new(TcpDevice::new(config).map_err(|error| failed(&error))?),
        ExchangeFabric::Verbs => Box::new(VerbsDevice::new(config, &verbs).map_err(|error| failed(&error))?),
        _ => Box::new(ShmDevice::new(config).map_err(|error| failed(&error))?),
    })
}

/// Connects a device to the other process. Returns the events that came meanwhile.
pub(crate) fn connect(device: &mut dyn Device, address: &str) -> Result<Vec<Event>, CommandError> {
    let peer = 1 - device.info().rank;
    device.connect(peer, &Address(address.trim().to_owned())).map_err(|error| failed(&error))?;
    let (mut events, until) = (Vec::with_capacity(EVENTS), clock::now() + LIMIT);
    while !events.iter().any(|event| matches!(event, Event::Connected { .. })) {
        if let Some(event) = events.iter().find(|event| matches!(event, Event::PeerLost { .. })) {
            return Err(failed(&format!("the other process was lost: {event:?}")));
        }
        if clock::now() >= until {
            return Err(failed(&format!("the other process did not connect within {LIMIT:?}")));
        }
        device.poll(clock::now(), &mut events);
        std::thread::yield_now();
    }
    Ok(events)
}

/// Polls a device, and sleeps until something comes, for a turn at most.
fn poll_or_sleep(device: &mut dyn Device, events: &mut Vec<Event>) {
    device.poll(clock::now(), events);
    if events.is_empty()
        && let Some(armed) = device.arm()
    {
        armed.wait(clock::now(), TURN);
    }
}

/// Has memory for puts of so many bytes, in the process that sends, until the other one is gone.
pub(crate) fn serve(fabric: ExchangeFabric, bytes: u64) -> Result<(), CommandError> {
    let mut device = open_device(fabric, SENDER, 1)?;
    let memory = SharedMemory::new(bytes as usize).map_err(|error| failed(&error))?;
    let region = device.register(memory).map_err(|error| failed(&error))?;
    let RemoteSlice { key, offset, len } = region.remote();
    print("address", &format!("{} {} {offset} {len}\n", device.info().address, key.0))?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).map_err(|error| failed(&error))?;
    if line.is_empty() {
        return Ok(());
    }
    let mut events = connect(&mut *device, &line)?;
    let is_end = |event: &Event| matches!(event, Event::PeerLost { .. } | Event::Departed { .. });
    while !events.iter().any(is_end) {
        events.clear();
        poll_or_sleep(&mut *device, &mut events);
    }
    Ok(())
}

/// Puts into memory of the process that sends.
pub(crate) struct Puts {
    device: Box<dyn Device>,
    target: RemoteSlice,
    source: Slice,
    /// What was put is got back to here.
    back: Slice,
    events: Vec<Event>,
}

impl Puts {
    /// Connects to [`serve`].
    pub(crate) fn connect(sender: &mut Sender, fabric: ExchangeFabric) -> Result<Self, CommandError> {
        let mut device = open_device(fabric, MEASURER, 1)?;
        let line = sender.exchange(&device.info().address.to_string())?;
        let wrong = || failed(&format!("the sending process said {line:?}"));
        let mut words = line.split_whitespace();
        let address = words.next().ok_or_else(wrong)?;
        let mut number = || words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong);
        let target = RemoteSlice { key: RegionKey(number()?), offset: number()?, len: number()? };
        let events = connect(&mut *device, address)?;
        let mut memory = || {
            let memory = SharedMemory::new(target.len as usize).map_err(|error| failed(&error))?;
            device.register(memory).map(|region| region.whole()).map_err(|error| failed(&error))
        };
        let (source, back) = (memory()?, memory()?);
        let content: Vec<u8> = (0..target.len).map(byte_at).collect();
        source.store(&content);
        Ok(Self { device, target, source, back, events })
    }

    /// How long a put of so many bytes takes until the other NIC has acknowledged it, and then how
    /// long a get of them takes.
    pub(crate) fn measure(&mut self, bytes: u64) -> Result<[Measured; 2], CommandError> {
        let puts = measure(|_| {
            let start = clock::now();
            self.transfer(bytes, |source, target| {
                Ok(Transfer::Put { src: Source::Slice(source), dst: target, signal: None })
            })?;
            Ok((start, clock::now(), true))
        })?;
        let back = self.back.clone();
        let gets = measure(|check| {
            let start = clock::now();
            self.transfer(bytes, |source, src| {
                let (start, end) = (source.offset(), source.offset() + source.len());
                let dst = back.slice(start..end).map_err(|error| failed(&error))?;
                Ok(Transfer::Get { src, dst })
            })?;
            let end = clock::now();
            // With the bytes that were put.
            Ok((start, end, check.is_right(&back.to_vec()[..bytes as usize], bytes)))
        })?;
        Ok([puts, gets])
    }

    /// Carries out transfers of the first bytes, as many as they need, and waits for their ends.
    fn transfer(
        &mut self,
        bytes: u64,
        transfer: impl Fn(Slice, RemoteSlice) -> Result<Transfer, CommandError>,
    ) -> Result<(), CommandError> {
        let (most, mut begun) = (self.device.info().transfer_bytes_max, 0);
        while begun < bytes {
            let end = (begun + most).min(bytes);
            let source = self.source.slice(begun as usize..end as usize).map_err(|error| failed(&error))?;
            let target = self.target.slice(begun..end).map_err(|error| failed(&error))?;
            let transfer = transfer(source, target)?;
            let submitted = self.device.submit(SENDER, transfer, TransferId(0));
            if submitted.map_err(|error| failed(&error))? == Submitted::UnderWay {
                self.wait_for_end()?;
            }
            begun = end;
        }
        Ok(())
    }

    fn wait_for_end(&mut self) -> Result<(), CommandError> {
        let until = clock::now() + LIMIT;
        loop {
            for event in self.events.drain(..) {
                match event {
                    Event::Done { result, .. } => return result.map(drop).map_err(|error| failed(&error)),
                    Event::PeerLost { cause, .. } => return Err(failed(&cause)),
                    _ => {}
                }
            }
            if clock::now() >= until {
                return Err(failed(&format!("a put did not end within {LIMIT:?}")));
            }
            poll_or_sleep(&mut *self.device, &mut self.events);
        }
    }
}
