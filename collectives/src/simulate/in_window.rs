//! Windows of simulated ranks: their memory, and a caller who reads and writes without waiting.
//!
//! **Invariant:** a rank makes one read at a time, into memory that nothing else touches meanwhile.

use std::ops::Range;
use std::time::Duration;

use pleach_transport::{Nanos, RemoteSlice, SharedMemory, Slice};
use pleach_vocabulary::Rank;

use super::{Cluster, Member};
use crate::engine::{Address, Engine};
use crate::window::{Layout, OneSided, OwnMemory, ReadId, Request, Target, Word, staging_bytes};

/// Gives each rank a window, which `adjust` changes, and returns when they are mapped. Returns
/// registered memory of each rank, as long as its elements.
pub(crate) fn open(
    cluster: &mut Cluster,
    layout: Layout,
    mut adjust: impl FnMut(&mut OneSided),
) -> Vec<Slice> {
    let mut memory = Vec::new();
    for member in cluster.members.iter_mut().flatten() {
        let mut slice = |bytes: usize| {
            let memory = SharedMemory::new(bytes.max(1)).expect("memory of a simulated rank");
            member.engine.device().register(memory).expect("shared memory").slice(0..bytes).expect("all")
        };
        let published = slice(layout.published_bytes());
        let written = slice(layout.slots_bytes());
        let staging = Some(slice(staging_bytes(&layout)));
        memory.push((OwnMemory { published, written, staging }, slice(layout.data_bytes())));
    }
    let places: Vec<[RemoteSlice; 2]> =
        memory.iter().map(|(own, _)| [own.published.remote(), own.written.remote()]).collect();
    let mut targets = Vec::new();
    for (member, (own, target)) in cluster.members.iter_mut().flatten().zip(memory) {
        let mut window = OneSided::new(&mut member.engine, layout, own, &places);
        adjust(&mut window);
        member.window = Some(window);
        targets.push(target);
    }
    let have_mapped = |cluster: &mut Cluster| {
        cluster.members.iter().flatten().all(|it| it.window.as_ref().is_some_and(OneSided::has_mapped))
    };
    cluster.run(have_mapped).expect("what was registered becomes known");
    targets
}

/// What a read has found: the version, 0 if nothing was published, its word and its elements.
pub type ReadSeen = (u64, u64, Vec<f32>);

/// A write of a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct WriteSeen {
    /// The rank that wrote.
    pub from: Rank,
    /// Its slot.
    pub slot: u16,
    /// The word that it gave.
    pub word: u64,
    /// The elements.
    pub elements: Vec<f32>,
}

/// The window of `f32` of one rank, whose [`Member`] has it.
pub(crate) struct RankWindow {
    /// Where the elements of a read go.
    target: Slice,
    /// The read under way, and how many bytes it fills.
    reading: Option<(ReadId, usize)>,
}

fn parts(member: &mut Member) -> (&mut OneSided, &mut Engine) {
    (member.window.as_mut().expect("opened with the ranks"), &mut member.engine)
}

/// The elements that lie in registered memory.
pub(crate) fn elements(slice: &Slice) -> Vec<f32> {
    let bytes = slice.to_vec();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

impl RankWindow {
    pub(crate) fn new(target: Slice) -> Self {
        Self { target, reading: None }
    }

    /// See [`Window::publish`](crate::Window::publish).
    pub(crate) fn publish(member: &mut Member, elements: &[f32], word: u64) {
        let (window, _) = parts(member);
        let mut bytes = bytemuck::cast_slice(elements).to_vec();
        window.publisher.begin();
        window.publisher.write(Address::of(&mut bytes), 0..bytes.len());
        window.publisher.finish(Word::from(word));
    }

    /// Starts a read of these elements of a peer. `is_torn`: any bytes will do.
    ///
    /// # Panics
    ///
    /// A read is under way.
    pub(crate) fn read(
        &mut self,
        member: &mut Member,
        (peer, range): (Rank, Range<usize>),
        is_torn: bool,
        timeout: Duration,
    ) {
        assert!(self.reading.is_none(), "a rank makes one read at a time");
        let range = range.start * size_of::<f32>()..range.end * size_of::<f32>();
        let bytes = range.len();
        let target = self.target.slice(0..bytes).expect("as long as the elements of a rank");
        let request = Request { peer, range, target: Target::Registered(target), is_torn, timeout };
        let id = parts(member).0.start_read(request).expect("one at a time");
        self.reading = Some((id, bytes));
    }

    /// What the read has found, once it has ended.
    pub(crate) fn take_read(&mut self, member: &mut Member) -> Option<ReadSeen> {
        let (id, bytes) = self.reading?;
        let (version, word) = parts(member).0.reads.take(id)?;
        self.reading = None;
        let target = self.target.slice(0..bytes).expect("it was filled");
        Some((version, word.number(), elements(&target)))
    }

    /// Whether the peer has taken the write before into this slot.
    pub(crate) fn has_credit(member: &mut Member, peer: Rank, slot: u16) -> bool {
        parts(member).0.slots_and_peers().0.is_free(peer, slot)
    }

    /// Whether a write into this slot at a peer waits for nothing.
    pub(crate) fn is_free(member: &mut Member, peer: Rank, slot: u16) -> bool {
        let (slots, peers) = parts(member).0.slots_and_peers();
        slots.is_free(peer, slot) && slots.has_place(peers, peer)
    }

    /// Writes into a slot that is free. Returns whether the write is on its way: else the device
    /// has no room, or the group has failed.
    ///
    /// # Panics
    ///
    /// The slot is not free.
    pub(crate) fn write(
        member: &mut Member,
        (peer, slot): (Rank, u16),
        elements: &[f32],
        word: u64,
        now: Nanos,
    ) -> bool {
        let (window, engine) = parts(member);
        let (slots, peers) = window.slots_and_peers();
        let mut bytes = bytemuck::cast_slice(elements).to_vec();
        let place = slots.place(peers, peer, slot).expect("the slot is free");
        place.fill(slots.header(peer, bytes.len()), Address::of(&mut bytes));
        slots.send(engine, peers, (peer, slot), (&place, bytes.len()), Word::from(word), now)
    }

    /// Takes the next write that has come, and gives its credit.
    pub(crate) fn take_write(member: &mut Member, now: Nanos) -> Option<WriteSeen> {
        let (window, engine) = parts(member);
        let arrived = window.slots.take_arrival(engine, now)?;
        let elements = elements(&arrived.data);
        window.slots.owe(arrived.from);
        window.slots.give_credits(engine, now);
        Some(WriteSeen { from: arrived.from, slot: arrived.slot, word: arrived.word.number(), elements })
    }
}
