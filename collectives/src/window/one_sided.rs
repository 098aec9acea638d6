//! The window of one rank: its reads, its writes, the data that it publishes and the data that it
//! has received. It takes `now`, never blocks, and is pure except that it uses the device of the
//! [`Engine`].

use std::time::Duration;

use pleach_transport::{MapError, Mapped, Nanos, ReadOnlyMapped, RemoteSlice, Signals, Slice};
use pleach_vocabulary::Rank;

use super::layout::Layout;
use super::memory::{Publisher, View};
use super::reads::{READS_STAGING_BYTES, ReadId, Reads, Request};
use super::slots::{STAGED_MAX, Slots};
use crate::engine::{Engine, signal_slots};

/// How often a transfer is tried that a device had no room for.
pub(crate) const RETRIED_AFTER: Duration = Duration::from_micros(50);

/// The memory of one rank, as this rank reaches it.
pub(crate) struct PeerMemory {
    /// What the peer publishes.
    pub(crate) published: RemoteSlice,
    /// Into what its peers write.
    pub(crate) written: RemoteSlice,
    /// What it publishes, at an address.
    pub(crate) view: Option<View>,
    /// This rank's slots there, where they are mapped: all of them, or none.
    pub(crate) slots: Vec<Mapped>,
    /// Whether this rank still tries to map them: what a peer has registered becomes known to this
    /// rank a moment later.
    must_map: bool,
    /// Whether the pair is connected, and this rank has tried to map them.
    is_met: bool,
}

/// The registered memory of a window at one rank.
pub(crate) struct OwnMemory {
    /// What it publishes: zeros.
    pub(crate) published: Slice,
    /// Into what its peers write.
    pub(crate) written: Slice,
    /// For transfers to and from peers whose memory is not mapped, of [`staging_bytes`].
    pub(crate) staging: Option<Slice>,
}

/// Bytes of [`OwnMemory::staging`].
pub(crate) fn staging_bytes(layout: &Layout) -> usize {
    READS_STAGING_BYTES
        .saturating_add(STAGED_MAX.saturating_mul(layout.slot(0, 0, layout.data_bytes()).len()))
}

/// What the caller's thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// A write into one of its slots.
    Arrival,
    /// The credit of a slot at a peer.
    Credit(Rank, u16),
}

/// See the module.
pub(crate) struct OneSided {
    layout: Layout,
    pub(crate) publisher: Publisher,
    pub(crate) reads: Reads,
    pub(crate) slots: Slots,
    /// By rank.
    peers: Vec<PeerMemory>,
    awaited: Option<Awaited>,
    /// Whether transfers end without a poll of their target.
    is_passive: bool,
    retry_at: Option<Nanos>,
    /// Kept for its memory.
    ended: Vec<u64>,
}

impl OneSided {
    /// The window of the engine's rank. `places`: by rank, what it publishes and into what its
    /// peers write, which is as long as the layout says.
    pub(crate) fn new(
        engine: &mut Engine,
        layout: Layout,
        own: OwnMemory,
        places: &[[RemoteSlice; 2]],
    ) -> Self {
        let (rank, ranks) = (engine.rank(), engine.ranks());
        let peers: Vec<PeerMemory> = (0..ranks)
            .zip(places)
            .map(|(peer, [published, written])| {
                let (published, written) = (*published, *written);
                let view = (peer == rank).then(|| View::Own(own.published.clone()));
                let is_met = peer == rank || engine.has_all_pairs() || engine.has_peer(peer);
                let must_map = is_met && peer != rank && maps(engine, peer);
                PeerMemory { published, written, view, slots: Vec::new(), must_map, is_met }
            })
            .collect();
        let info = engine.device().info();
        let is_passive = (0..ranks).all(|peer| peer == rank || info.reach[peer as usize].passive);
        let transfer_bytes_max = info.transfer_bytes_max;
        let signals_of = |peer| if peer == rank { Signals::new(0) } else { engine.signals_of(peer) };
        let signals = (0..ranks).map(signals_of).collect();
        let OwnMemory { published, written, staging } = own;
        let place = |index: usize, bytes: usize| {
            let from = READS_STAGING_BYTES + index * bytes;
            staging.as_ref().map(|staging| staging.slice(from..from + bytes).expect("inside of the staging"))
        };
        let slot_bytes = layout.slot(0, 0, layout.data_bytes()).len();
        let places = (0..STAGED_MAX).filter_map(|index| place(index, slot_bytes)).collect();
        let credit_slot = signal_slots(ranks) as u16;
        Self {
            layout,
            publisher: Publisher::new(published, layout),
            reads: Reads::new(layout, staging, transfer_bytes_max),
            slots: Slots::new(rank, layout, credit_slot, written, signals, places),
            peers,
            awaited: None,
            is_passive,
            retry_at: None,
            ended: Vec::new(),
        }
    }

    /// By rank.
    pub(crate) fn peers(&self) -> &[PeerMemory] {
        &self.peers
    }

    /// The slots, and the memory of all ranks.
    pub(crate) fn slots_and_peers(&mut self) -> (&mut Slots, &[PeerMemory]) {
        (&mut self.slots, &self.peers)
    }

    /// Whether this rank has to poll though its caller is in no call.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.is_passive || self.reads.are_under_way() || self.slots.owes()
    }

    /// The caller's thread waits for this from now on: before it sleeps it is looked at.
    pub(crate) fn await_signal(&mut self, awaited: Option<Awaited>) {
        self.awaited = awaited;
    }

    /// Whether the signal has come that the caller's thread waits for.
    pub(crate) fn has_come(&self) -> bool {
        match self.awaited {
            None => false,
            Some(Awaited::Arrival) => self.slots.has_arrival(),
            Some(Awaited::Credit(peer, slot)) => {
                self.slots.is_free(peer, slot) && self.slots.has_place(&self.peers, peer)
            }
        }
    }

    /// Whether all memory is mapped that can be.
    pub(crate) fn has_mapped(&self) -> bool {
        !self.peers.iter().any(|peer| peer.must_map)
    }

    /// Whether this rank reaches the memory of all ranks by its address.
    pub(crate) fn are_all_mapped(&self) -> bool {
        self.peers.iter().all(|peer| peer.view.is_some())
    }

    /// Whether this rank may use a peer's memory: the pair is connected, and what can be mapped is
    /// mapped. Begins to map it where that was not begun.
    pub(crate) fn reaches(&mut self, engine: &mut Engine, peer: Rank) -> bool {
        let memory = &mut self.peers[peer as usize];
        if !memory.is_met && engine.has_peer(peer) {
            (memory.is_met, memory.must_map) = (true, maps(engine, peer));
        }
        memory.is_met && !memory.must_map
    }

    /// Maps memory of peers that has become known; true when anything moved.
    fn map_peers(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let mut moved = false;
        for (memory, peer) in self.peers.iter_mut().zip(0..).filter(|(memory, _)| memory.must_map) {
            match map(engine, &self.layout, peer, memory) {
                Ok((published, slots)) => {
                    if let Some(view) = View::of_peer(published)
                        && slots.iter().all(|slot| slot.is_on_host())
                    {
                        (memory.view, memory.slots) = (Some(view), slots);
                    }
                }
                Err(MapError::Unknown { .. }) => {
                    self.retry_at = Some(now + RETRIED_AFTER);
                    continue;
                }
                // Without room for a mapping, transfers do.
                Err(_) => {}
            }
            (memory.must_map, moved) = (false, true);
        }
        moved
    }

    /// Accepts a read: see [`Reads::start`].
    pub(crate) fn start_read(&mut self, request: Request) -> Option<ReadId> {
        let view = self.peers[request.peer as usize].view.clone();
        self.reads.start(request, view)
    }

    /// When to poll at the latest, if nothing wakes this rank.
    pub(crate) fn next_wakeup(&self) -> Option<Nanos> {
        self.reads.next_wakeup().into_iter().chain(self.retry_at).min()
    }

    /// Makes some progress; true when anything moved, and it is to be polled again. To be called
    /// after the engine was polled.
    ///
    /// **It has no loop:** an owner that publishes all the time would keep it there, as each look
    /// at its version moves a read. Between two polls the caller looks at the clock.
    pub(crate) fn poll(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        self.retry_at = None;
        if !engine.works() {
            return false;
        }
        let mut moved = !self.has_mapped() && self.map_peers(engine, now);
        engine.take_ended_transfers(&mut self.ended);
        moved |= !self.ended.is_empty();
        for number in self.ended.drain(..) {
            if number & 1 == 0 { self.reads.note_ended(number) } else { self.slots.note_ended(number) }
        }
        let credits_at = self.slots.give_credits(engine, now);
        self.retry_at = self.retry_at.into_iter().chain(credits_at).min();
        moved |= self.reads.poll(&self.peers, engine, now);
        // A transfer may end as soon as it is submitted.
        moved || engine.has_ended_transfers()
    }
}

/// Whether a peer's memory can be mapped.
fn maps(engine: &mut Engine, peer: Rank) -> bool {
    engine.device().info().reach[peer as usize].maps
}

/// Maps what a peer publishes, and this rank's slots there.
fn map(
    engine: &mut Engine,
    layout: &Layout,
    peer: Rank,
    memory: &PeerMemory,
) -> Result<(ReadOnlyMapped, Vec<Mapped>), MapError> {
    let rank = engine.rank();
    let device = engine.device();
    let published = device.map_read_only(peer, &memory.published)?;
    let map = |slot: u16| {
        let at = layout.slot(rank, slot, layout.data_bytes());
        let slice = memory.written.slice(at.start as u64..at.end as u64);
        device.map(peer, &slice.expect("a peer's memory was found to be long enough"))
    };
    Ok((published, (0..layout.slots()).map(map).collect::<Result<Vec<Mapped>, MapError>>()?))
}

#[cfg(test)]
mod tests {
    use pleach_transport::sim;

    use super::*;
    use crate::engine::Address;
    use crate::simulate::Cluster;
    use crate::simulate::in_window::open;
    use crate::window::Word;

    /// Ranks that are connected.
    fn ready(options: sim::Options) -> Cluster {
        let mut cluster = Cluster::with_signal_slots(options, 3);
        let are_ready =
            |cluster: &mut Cluster| cluster.members.iter().flatten().all(|it| it.engine.is_ready());
        cluster.run(are_ready).expect("they connect");
        cluster
    }

    #[test]
    fn mapped_memory_that_begins_at_no_line_is_not_looked_at() {
        let network = sim::Network::full_mesh(2, 1_000_000_000, Duration::from_micros(5));
        let options = sim::Options { maps: true, ..sim::Options::new(network, 1) };
        let mut cluster = ready(options);
        open(&mut cluster, Layout::new(100, 0, 2).expect("a few bytes"), |_| ());
        let member = cluster.members[0].as_mut().expect("no rank has died");
        let published = member.window.as_ref().expect("installed before").peers()[1].published;
        for (offset, is_seen) in [(0, true), (64, true), (8, false), (1, false), (63, false)] {
            let part = published.slice(offset..published.len).expect("a part");
            let mapped = member.engine.device().map_read_only(1, &part).expect("mapped before");
            assert_eq!(View::of_peer(mapped).is_some(), is_seen, "{offset}");
        }
    }

    #[test]
    fn a_write_that_lacks_staging_has_not_come_and_the_oldest_put_is_known() {
        let network = sim::Network::full_mesh(3, 1_000_000_000, Duration::from_micros(5));
        let mut cluster = ready(sim::Options::new(network, 1));
        open(&mut cluster, Layout::new(100, 2, 3).expect("a few bytes"), |_| ());
        let now = cluster.world.now();
        let member = cluster.members[0].as_mut().expect("no rank has died");
        let (window, engine) = (member.window.as_mut().expect("installed before"), &mut member.engine);
        window.await_signal(Some(Awaited::Credit(2, 0)));
        assert!(window.has_come(), "it may write");
        for (peer, slot) in [(1, 0), (1, 1)] {
            assert_eq!(window.slots.oldest_on_its_way(), (slot > 0).then_some(1));
            let (slots, peers) = window.slots_and_peers();
            let place = slots.place(peers, peer, slot).expect("staging for two");
            place.fill(slots.header(peer, 0), Address::NULL);
            assert!(slots.send(engine, peers, (peer, slot), (&place, 0), Word::EMPTY, now));
        }
        // The slot is free, but it sleeps until a put has ended.
        assert!(window.slots.is_free(2, 0) && !window.has_come());
        assert_eq!(window.slots.oldest_on_its_way(), Some(1));
        let has_come = |cluster: &mut Cluster| {
            let window = cluster.members[0].as_ref().and_then(|it| it.window.as_ref());
            window.is_some_and(OneSided::has_come)
        };
        cluster.run(has_come).expect("the puts arrive");
    }
}
