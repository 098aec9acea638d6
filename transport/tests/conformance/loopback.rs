//! A perfect fabric inside one process, to try the suite on until a real one is here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use pleach_transport::memory::random_key;
use pleach_transport::{
    Address, AtomicOp, Bell, Caps, Cells, ConnectError, Device, DeviceConfig, Event, LossCause,
    MESSAGE_BYTES_MAX, MapError, Mapped, Memory, Nanos, PostError, Rank, Region, RegionKey, RegisterError,
    Registry, RemoteSlice, Responder, Ring, SharedMemory, Slice, Source, SubmitError, Transfer,
    TransferError, TransferId,
};

use crate::world::Backend;

const QUEUE_DEPTH: usize = 16;

pub(crate) struct Loopback {
    fabric: Arc<Mutex<Fabric>>,
    now: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Tie {
    None,
    Asked,
    Up,
    Lost,
    Left,
    Severed,
}

struct Node {
    responder: Arc<dyn Responder>,
    cells: Vec<Cells>,
    ties: Vec<Tie>,
    regions: HashMap<RegionKey, Region>,
    queue: VecDeque<(Rank, Transfer, TransferId)>,
    events: VecDeque<Event>,
    alive: bool,
    leaving: bool,
}

#[derive(Default)]
struct Fabric {
    nodes: Vec<Option<Node>>,
}

struct Forget;
impl Registry for Forget {
    fn released(&self, _: RegionKey) {}
}

struct Keys(Rank, Arc<Mutex<Fabric>>);
impl Registry for Keys {
    fn released(&self, key: RegionKey) {
        let region = match self.1.lock() {
            Ok(mut fabric) => fabric.node(self.0).regions.remove(&key),
            Err(_) => None,
        };
        drop(region);
    }
}

struct Quiet;
impl Ring for Quiet {
    fn ring(&self) {}
}

struct End {
    rank: Rank,
    world_size: u32,
    caps: Caps,
    fabric: Arc<Mutex<Fabric>>,
    registry: Arc<dyn Registry>,
}

impl Backend for Loopback {
    const NAME: &'static str = "loopback";
    const LIVE: bool = false;

    fn start(world_size: u32) -> Self {
        let nodes = (0..world_size).map(|_| None).collect();
        Self { fabric: Arc::new(Mutex::new(Fabric { nodes })), now: 0 }
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let world = config.world_size as usize;
        let node = Node {
            responder: config.responder,
            cells: (0..world).map(|_| Cells::on_heap(config.cells)).collect(),
            ties: vec![Tie::None; world],
            regions: HashMap::new(),
            queue: VecDeque::new(),
            events: VecDeque::new(),
            alive: true,
            leaving: false,
        };
        self.fabric.lock().unwrap().nodes[config.rank as usize] = Some(node);
        Box::new(End {
            rank: config.rank,
            world_size: config.world_size,
            caps: Caps {
                fabric: "loopback",
                maps: false,
                passive: true,
                checks_keys: true,
                sever_detaches: false,
                cells: config.cells,
                transfer_bytes_max: 32 << 20,
                queue_depth: QUEUE_DEPTH,
                registers_freely: true,
            },
            fabric: Arc::clone(&self.fabric),
            registry: Arc::new(Keys(config.rank, Arc::clone(&self.fabric))),
        })
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        SharedMemory::new(len).unwrap()
    }

    fn tick(&mut self) -> Nanos {
        self.now += 1000;
        Nanos(self.now)
    }
}

impl Fabric {
    fn node(&mut self, rank: Rank) -> &mut Node {
        self.nodes[rank as usize].as_mut().unwrap()
    }

    fn slice(&mut self, rank: Rank, remote: &RemoteSlice) -> Option<Slice> {
        let region = self.node(rank).regions.get(&remote.key)?;
        let end = remote.offset.checked_add(remote.len)?;
        region.slice(remote.offset as usize..end as usize).ok()
    }

    fn lose(&mut self, rank: Rank, peer: Rank) {
        let node = self.node(rank);
        if !matches!(node.ties[peer as usize], Tie::Up | Tie::Asked) || !node.alive {
            return;
        }
        node.ties[peer as usize] = Tie::Lost;
        let cause = LossCause::ProcessEnded;
        node.responder.lost(peer, &cause);
        node.events.push_back(Event::PeerLost { peer, cause: cause.clone() });
        node.flush(peer, &TransferError::Lost { peer, cause });
    }

    fn carry_out(&mut self, from: Rank, to: Rank, transfer: Transfer) -> Result<u64, TransferError> {
        if self.node(to).ties[from as usize] != Tie::Up {
            return Ok(0); // Severed there.
        }
        let refused = |key| TransferError::Refused { peer: to, key };
        match transfer {
            Transfer::Notify(notice) => self.node(to).cells[from as usize].notify(&notice),
            Transfer::Put { src, dst, notice } => {
                let target = self.slice(to, &dst).ok_or(refused(dst.key))?;
                match src {
                    Source::Slice(slice) => target.store(&slice.to_vec()),
                    Source::Inline(inline) => target.store(inline.as_bytes()),
                }
                if let Some(notice) = notice {
                    self.node(to).cells[from as usize].notify(&notice);
                }
            }
            Transfer::Get { src, dst } => {
                dst.store(&self.slice(to, &src).ok_or(refused(src.key))?.to_vec());
            }
            Transfer::Atomic { word, op } => {
                let target = self.slice(to, &word).ok_or(refused(word.key))?;
                let old = u64::from_ne_bytes(target.to_vec().try_into().unwrap());
                let new = match op {
                    AtomicOp::Add(value) => old.wrapping_add(value),
                    AtomicOp::CompareSwap { expected, new } if expected == old => new,
                    AtomicOp::CompareSwap { .. } => old,
                };
                target.store(&new.to_ne_bytes());
                return Ok(old);
            }
        }
        Ok(0)
    }
}

impl Node {
    fn flush(&mut self, peer: Rank, error: &TransferError) {
        let (gone, kept): (VecDeque<_>, VecDeque<_>) =
            self.queue.drain(..).partition(|entry| entry.0 == peer);
        self.queue = kept;
        for (_, transfer, id) in gone {
            std::mem::forget(transfer); // Its drop would lock the fabric again.
            self.events.push_back(Event::Done { id, result: Err(error.clone()) });
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Ok(mut fabric) = self.fabric.lock() else { return };
        let node = fabric.node(self.rank);
        node.alive = false;
        let dropped = (std::mem::take(&mut node.queue), std::mem::take(&mut node.regions), node.leaving);
        for peer in (0..self.world_size).filter(|peer| *peer != self.rank && !dropped.2) {
            fabric.lose(peer, self.rank);
        }
        drop(fabric);
    }
}

impl Device for End {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn rank(&self) -> Rank {
        self.rank
    }
    fn address(&self) -> Address {
        Address(format!("loop:{}", self.rank))
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        let key = random_key();
        let kept = Region::new(Arc::clone(&memory), key, Arc::new(Forget));
        self.fabric.lock().unwrap().node(self.rank).regions.insert(key, kept);
        Ok(Region::new(memory, key, Arc::clone(&self.registry)))
    }

    fn map(&mut self, _: Rank, _: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: "loopback" })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        let (own, world_size) = (self.rank, self.world_size);
        if peer == own || peer >= world_size {
            return Err(ConnectError::Peer { peer, own, world_size });
        }
        if address.0 != format!("loop:{peer}") {
            return Err(ConnectError::Address { fabric: "loopback", address: address.clone() });
        }
        let mut fabric = self.fabric.lock().unwrap();
        fabric.node(own).ties[peer as usize] = Tie::Asked;
        if !fabric.node(peer).alive {
            fabric.lose(own, peer);
        } else if fabric.node(peer).ties[own as usize] == Tie::Asked {
            for (one, other) in [(own, peer), (peer, own)] {
                fabric.node(one).ties[other as usize] = Tie::Up;
                fabric.node(one).events.push_back(Event::Connected { peer: other });
            }
        }
        Ok(())
    }

    fn sever(&mut self, peer: Rank) {
        let mut fabric = self.fabric.lock().unwrap();
        let node = fabric.node(self.rank);
        node.ties[peer as usize] = Tie::Severed;
        node.flush(peer, &TransferError::Severed { peer });
        node.events.push_back(Event::Severed { peer });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<(), SubmitError> {
        let cells = self.caps.cells;
        let check = |mine: Option<&Slice>, mine_bytes: usize, theirs: &RemoteSlice, put: bool| {
            let (own, other) = (mine_bytes as u64, theirs.len);
            let (source_bytes, destination_bytes) = if put { (own, other) } else { (other, own) };
            if source_bytes != destination_bytes {
                return Err(SubmitError::Lengths { source_bytes, destination_bytes });
            }
            if own > self.caps.transfer_bytes_max {
                return Err(SubmitError::TooLong { bytes: own, max: self.caps.transfer_bytes_max });
            }
            match mine {
                Some(slice) if !slice.region().belongs_to(&self.registry) => Err(SubmitError::ForeignRegion),
                _ => Ok(()),
            }
        };
        match &transfer {
            Transfer::Put { src: Source::Slice(slice), dst, .. } => {
                check(Some(slice), slice.len(), dst, true)?
            }
            Transfer::Put { src, dst, .. } => check(None, src.len(), dst, true)?,
            Transfer::Get { src, dst } => check(Some(dst), dst.len(), src, false)?,
            Transfer::Atomic { word, .. } if word.len != 8 || !word.offset.is_multiple_of(8) => {
                return Err(SubmitError::MisalignedWord);
            }
            _ => {}
        }
        if let Transfer::Notify(notice) | Transfer::Put { notice: Some(notice), .. } = &transfer
            && usize::from(notice.cell) >= cells
        {
            return Err(SubmitError::NoSuchCell { cell: notice.cell, cells });
        }
        let mut fabric = self.fabric.lock().unwrap();
        let node = fabric.node(self.rank);
        match node.ties[peer as usize] {
            Tie::None | Tie::Asked => return Err(SubmitError::NotConnected { peer }),
            Tie::Lost => return Err(SubmitError::Lost { peer, cause: LossCause::ProcessEnded }),
            Tie::Left => return Err(SubmitError::Left { peer }),
            Tie::Severed => return Err(SubmitError::Severed { peer }),
            Tie::Up => {}
        }
        if node.queue.iter().filter(|entry| entry.0 == peer).count() == QUEUE_DEPTH {
            drop(fabric);
            return Err(SubmitError::QueueFull { peer });
        }
        node.queue.push_back((peer, transfer, id));
        Ok(())
    }

    fn cells(&self, peer: Rank) -> Cells {
        self.fabric.lock().unwrap().node(self.rank).cells[peer as usize].clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        let mut fabric = self.fabric.lock().unwrap();
        if fabric.node(self.rank).ties[peer as usize] != Tie::Up {
            return Err(PostError::NotConnected { peer });
        }
        if let Some(answer) = fabric.node(peer).responder.message(self.rank, message) {
            fabric.node(self.rank).responder.message(peer, &answer);
        }
        Ok(())
    }

    fn poll(&mut self, _: Nanos, events: &mut Vec<Event>) {
        let mut done = Vec::new();
        let mut fabric = self.fabric.lock().unwrap();
        while let Some((peer, transfer, id)) = fabric.node(self.rank).queue.pop_front() {
            done.push(transfer.clone());
            let result = fabric.carry_out(self.rank, peer, transfer);
            fabric.node(self.rank).events.push_back(Event::Done { id, result });
        }
        if fabric.node(self.rank).leaving {
            for peer in (0..self.world_size).filter(|peer| *peer != self.rank) {
                let node = fabric.node(peer);
                if node.ties[self.rank as usize] == Tie::Up && node.alive {
                    node.ties[self.rank as usize] = Tie::Left;
                    node.flush(self.rank, &TransferError::Left { peer: self.rank });
                    node.events.push_back(Event::Left { peer: self.rank });
                }
            }
        }
        let node = fabric.node(self.rank);
        while events.len() < events.capacity()
            && let Some(event) = node.events.pop_front()
        {
            events.push(event);
        }
        drop(fabric);
    }

    fn arm(&mut self) -> Option<Bell> {
        None
    }
    fn ringer(&self) -> Arc<dyn Ring> {
        Arc::new(Quiet)
    }
    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }
    fn leave(&mut self) {
        self.fabric.lock().unwrap().node(self.rank).leaving = true;
    }
    fn is_flushed(&self) -> bool {
        self.fabric.lock().unwrap().node(self.rank).queue.is_empty()
    }
}
