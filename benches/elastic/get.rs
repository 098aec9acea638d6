//! A plain get: rank 1 reads as many bytes of rank 0 as a state has, in pieces of the same length
//! and as many at a time as a process that heals has under way.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pleach::transport::rendezvous::Rendezvous;
use pleach::transport::shm::ShmDevice;
use pleach::transport::tcp::TcpDevice;
use pleach::transport::{
    Address, Device, DeviceConfig, Event, LossCause, Rank, RegionKey, RemoteSlice, Responder, Secret,
    SharedMemory, Submitted, Transfer, TransferId, clock,
};
use pleach::{Fabric, Options};

use super::member::say;

type Failure = Box<dyn std::error::Error>;

/// Bytes of a piece.
const PIECE: usize = 4 << 20;

/// Pieces at a time.
const AT_ONCE: u64 = 2;

/// How long the other process may take.
const PATIENCE: Duration = Duration::from_secs(60);

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// A rendezvous beside this one, of the same processes.
pub(crate) fn beside(rendezvous: Rendezvous) -> Result<Rendezvous, Failure> {
    let Rendezvous::File { folder } = rendezvous else { return Err("the ranks meet in a folder".into()) };
    let folder = folder.join("beside");
    std::fs::create_dir_all(&folder)?;
    Ok(Rendezvous::File { folder })
}

/// Writes a file as a whole.
fn write(file: &Path, text: &str) -> Result<(), Failure> {
    let part = file.with_extension("part");
    std::fs::write(&part, text)?;
    Ok(std::fs::rename(part, file)?)
}

/// Reads a file once it is there.
fn read(file: &Path) -> Result<String, Failure> {
    let until = clock::now() + PATIENCE;
    loop {
        match std::fs::read_to_string(file) {
            Ok(text) => return Ok(text),
            Err(error) if clock::now() >= until => return Err(error.into()),
            Err(_) => std::thread::yield_now(),
        }
    }
}

struct End {
    device: Box<dyn Device>,
    events: Vec<Event>,
}

impl End {
    /// Polls until there is such an event, which it takes.
    fn await_event(&mut self, is_it: impl Fn(&Event) -> bool) -> Result<(), Failure> {
        let until = clock::now() + PATIENCE;
        loop {
            if let Some(at) = self.events.iter().position(&is_it) {
                self.events.remove(at);
                return Ok(());
            }
            if clock::now() >= until {
                return Err("the other end did nothing".into());
            }
            let mut events = Vec::with_capacity(16);
            self.device.poll(clock::now(), &mut events);
            self.events.append(&mut events);
            std::thread::yield_now();
        }
    }
}

pub(crate) fn run(fabric: Fabric, bytes: usize) -> Result<(), Failure> {
    let world = Options::from_env()?.world;
    let Some(Rendezvous::File { folder }) = world.rendezvous else { return Err("no folder".into()) };
    let file = |rank: Rank, name: &str| -> PathBuf { folder.join(format!("{name}-{rank}")) };
    let config = DeviceConfig {
        rank: world.rank,
        world_size: 2,
        secret: Some(Secret::new(&[7; 32])),
        signal_slots: 1,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    };
    let device: Box<dyn Device> = match fabric {
        Fabric::Tcp => Box::new(TcpDevice::new(config)?),
        _ => Box::new(ShmDevice::new(config)?),
    };
    let mut end = End { device, events: Vec::new() };
    let region = end.device.register(SharedMemory::new(bytes)?)?;
    // The pages that are read are there. Those that are written come with the bytes, as where a
    // process heals.
    (0..if world.rank == 0 { bytes } else { 0 }).step_by(PIECE).try_for_each(|at| {
        let piece = region.whole().slice(at..bytes.min(at + PIECE)).map_err(|error| format!("{error:?}"))?;
        piece.store(&vec![1; piece.len()]);
        Ok::<_, Failure>(())
    })?;
    let RemoteSlice { key, offset, len } = region.remote();
    let peer = 1 - world.rank;
    write(&file(world.rank, "address"), &end.device.info().address.0)?;
    write(&file(world.rank, "memory"), &format!("{} {offset} {len}", key.0))?;
    end.device.connect(peer, &Address(read(&file(peer, "address"))?))?;
    end.await_event(|event| matches!(event, Event::Connected { .. }))?;
    if world.rank == 0 {
        // Until the other one is done, or this process is ended.
        return end.await_event(|event| matches!(event, Event::PeerLost { .. } | Event::Departed { .. }));
    }
    let there = read(&file(peer, "memory"))?;
    let words = there.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let [key, offset, len] = words[..] else { return Err(there.into()) };
    let remote = RemoteSlice { key: RegionKey(key), offset, len };
    let began = clock::now();
    let (mut next, mut begun, mut ended) = (0, 0, 0);
    while next < bytes || ended < begun {
        while next < bytes && begun - ended < AT_ONCE {
            let piece = next..bytes.min(next + PIECE);
            let src =
                remote.slice(piece.start as u64..piece.end as u64).map_err(|error| format!("{error:?}"))?;
            let dst = region.whole().slice(piece.clone()).map_err(|error| format!("{error:?}"))?;
            let submitted = end.device.submit(peer, Transfer::Get { src, dst }, TransferId(begun))?;
            next = piece.end;
            if submitted == Submitted::UnderWay {
                begun += 1;
            }
        }
        if ended < begun {
            end.await_event(|event| matches!(event, Event::Done { result: Ok(_), .. }))?;
            ended += 1;
        }
    }
    say("got", &[clock::now().since(began).as_nanos() as u64]);
    let found = region.whole().to_vec();
    if found[..bytes].iter().any(|byte| *byte != 1) {
        return Err("a get has brought other bytes".into());
    }
    Ok(())
}
