//! A whole group in one process: one engine a rank, driven in virtual time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::cost::Platform;
use pleach_schedule::generate::Access;
use pleach_schedule::hosts::HostMap;
use pleach_transport::sim::{self, AccessKind, World};
use pleach_transport::{Device, DeviceConfig, Nanos};
use pleach_vocabulary::Rank;

use crate::compute::simulated::{ComputeMutant, SimulatedCompute};
use crate::engine::{
    Bytes, Engine, Plan, RunId, ScratchLayout, StartError, StatusBoard, Witness, neighbours, signal_slots,
};
use crate::group::{Planner, PlannerCache};
use crate::partial::Rounds;
use crate::window::OneSided;

/// Bytes that a simulated processor touches in a second.
const COMPUTE_BYTES_PER_S: u64 = 20_000_000_000;
/// How long ranks have to connect, in virtual time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The same where pairs connect on first use: longer than any call takes.
const CONNECT_ON_USE_TIMEOUT: Duration = Duration::from_secs(100_000);
/// Most polls of a rank at one instant: more is a livelock.
const POLLS_MAX: usize = 100_000;

/// A rank of the cluster.
pub struct Member {
    /// Its engine.
    pub engine: Engine,
    /// Its status board, to abort through.
    pub board: Arc<StatusBoard>,
    /// Its programs.
    pub planner: Planner,
    /// Where its calls are the rounds of a partial all-reduce.
    pub(crate) rounds: Option<Rounds>,
    /// Where it has a window.
    pub(crate) window: Option<OneSided>,
}

impl Member {
    /// Starts a call of the group on slices that the run holds: [`Bytes::Registered`] ones, which
    /// peers may reach, or [`Bytes::Staged`] ones. Input and output are the same bytes, or one is a
    /// part of the other, or they lie apart.
    ///
    /// # Panics
    ///
    /// When the plan is another rank's, or the bytes overlap in another way or are not the host's:
    /// the caller's check is missing.
    pub fn start(
        &mut self,
        plan: &Arc<Plan>,
        input: Bytes,
        output: Bytes,
        timeout: Duration,
    ) -> Result<RunId, StartError> {
        let (rank, ranks) = plan.place();
        assert_eq!((rank, ranks), (self.engine.rank(), self.engine.ranks()), "the plan of another rank");
        assert!(input.is_on_host() && output.is_on_host(), "simulated ranks have no GPUs");
        plan.expect_all_bytes(&input, &output)?;
        assert!(input.is_apart_from_or_part_of(&output), "input and output overlap");
        self.engine.start(plan, input, output, timeout)
    }
}

/// Simulated ranks that run real engines.
pub struct Cluster {
    /// The world they live in.
    pub world: World,
    /// By rank; dead ranks are gone.
    pub members: Vec<Option<Member>>,
    /// The ranks to poll next.
    due: BTreeSet<Rank>,
    /// When engines want to be polled; kept for its memory.
    wakeups: Vec<(Nanos, Rank)>,
    /// Ranks are polled when all of an instant has happened, not between any two events.
    by_instants: bool,
}

/// Nothing will ever happen any more, or ranks keep each other busy without virtual time passing.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("nothing moves any more at {now}")]
pub struct NoProgress {
    /// The virtual time.
    pub now: Nanos,
}

/// Tells the world which signals a rank has acted on.
struct Reporter {
    world: World,
    rank: Rank,
}

impl Witness for Reporter {
    fn consumed(&mut self, from: Rank, signal_slot: u16, count: u64) {
        self.world.consumed(self.rank, from, signal_slot, count);
    }

    fn wrote(&mut self, address: *const u8, len: usize) {
        self.world.accessed(self.rank, address, len, AccessKind::Write, self.world.now());
    }

    fn completed(&mut self, sequence: u64, runs: u64) {
        self.world.released(self.rank, sequence, runs);
    }

    fn heard_completed(&mut self, from: Rank, sequence: u64, runs: u64) {
        self.world.acquired(self.rank, from, sequence, runs);
    }

    fn take_signalled(&mut self, signal_slots: &mut Vec<(Rank, u16)>) -> bool {
        self.world.take_signalled(self.rank, signal_slots)
    }
}

impl Cluster {
    /// Ranks `0 .. n` of a world that has as many, connecting.
    ///
    /// # Panics
    ///
    /// When scratch memory cannot be had.
    #[must_use]
    pub fn new(options: sim::Options) -> Self {
        Self::with(options, None, false)
    }

    /// The same, with processors that do something wrong on purpose, or that take no time.
    ///
    /// # Panics
    ///
    /// When scratch memory cannot be had.
    #[must_use]
    pub fn with(options: sim::Options, mutant: Option<ComputeMutant>, is_immediate: bool) -> Self {
        let ranks = options.network.ranks();
        let access = if options.maps { Access::Mapped } else { Access::Put };
        let hosts = if options.hosts.is_empty() { HostMap::one(ranks) } else { HostMap::new(&options.hosts) };
        Self::of(options, &Platform::new(hosts, access), mutant, is_immediate, 0, false)
    }

    /// As [`Cluster::with`], of ranks whose pairs connect on first use.
    ///
    /// # Panics
    ///
    /// When scratch memory cannot be had.
    #[must_use]
    pub fn connecting_on_use(
        options: sim::Options,
        mutant: Option<ComputeMutant>,
        is_immediate: bool,
    ) -> Self {
        let ranks = options.network.ranks();
        let access = if options.maps { Access::Mapped } else { Access::Put };
        let hosts = if options.hosts.is_empty() { HostMap::one(ranks) } else { HostMap::new(&options.hosts) };
        Self::of(options, &Platform::new(hosts, access), mutant, is_immediate, 0, true)
    }

    /// Ranks whose devices have so many signal slots for each peer behind those of calls.
    #[cfg(test)]
    pub(crate) fn with_signal_slots(options: sim::Options, further: usize) -> Self {
        let platform = Platform::new(HostMap::one(options.network.ranks()), Access::Put);
        Self::of(options, &platform, None, true, further, false)
    }

    /// Ranks joined by the links that the platform knows, with processors that take no time; where
    /// bytes do not move, they do nothing either. The network of the options is that of these
    /// links. Devices have so many signal slots for each peer behind those of calls.
    ///
    /// # Panics
    ///
    /// When scratch memory cannot be had.
    #[must_use]
    pub fn wired(options: sim::Options, platform: &Platform, further_signal_slots: usize) -> Self {
        Self { by_instants: true, ..Self::of(options, platform, None, true, further_signal_slots, false) }
    }

    fn of(
        options: sim::Options,
        platform: &Platform,
        mutant: Option<ComputeMutant>,
        is_immediate: bool,
        further_signal_slots: usize,
        on_use: bool,
    ) -> Self {
        let (ranks, moves_bytes) = (options.network.ranks(), options.moves_bytes);
        let known = Arc::new(PlannerCache::default());
        let world = World::new(options);
        let board = |rank| if on_use { StatusBoard::on_use(rank, ranks) } else { StatusBoard::new(rank) };
        let boards: Vec<Arc<StatusBoard>> = (0..ranks).map(|rank| Arc::new(board(rank))).collect();
        let mut devices: Vec<_> = boards
            .iter()
            .enumerate()
            .map(|(rank, board)| {
                world.device(DeviceConfig {
                    rank: rank as Rank,
                    world_size: ranks,
                    secret: None,
                    signal_slots: signal_slots(ranks) + further_signal_slots,
                    connect_timeout: if on_use { CONNECT_ON_USE_TIMEOUT } else { CONNECT_TIMEOUT },
                    interface: None,
                    address: None,
                    responder: board.clone(),
                })
            })
            .collect();
        let addresses: Vec<_> = devices.iter().map(|device| device.info().address.clone()).collect();
        for device in &mut devices {
            let own = device.info().rank;
            let peers = if on_use {
                neighbours(own, ranks)
            } else {
                (0..ranks).filter(|peer| *peer != own).collect()
            };
            for peer in peers {
                device.connect(peer, &addresses[peer as usize]).expect("the address of a simulated rank");
            }
        }
        let members = devices.into_iter().zip(boards).map(|(device, board)| {
            let rank = device.info().rank;
            let compute = SimulatedCompute::new(&world, rank, COMPUTE_BYTES_PER_S).with_mutant(mutant);
            let compute = if is_immediate { compute.immediate() } else { compute };
            let compute = if moves_bytes { compute } else { compute.idle() };
            let layout = ScratchLayout { ranks, gpus_copy: false };
            let addresses = if on_use { addresses.clone() } else { Vec::new() };
            let (device, compute) = (Box::new(device), Box::new(compute));
            let mut engine = Engine::connecting(device, compute, board.clone(), layout, addresses)
                .expect("scratch memory for a simulated rank");
            engine.witness(Box::new(Reporter { world: world.clone(), rank }));
            let planner = Planner::new(rank, platform.clone(), None).sharing(known.clone());
            Some(Member { engine, board, planner, rounds: None, window: None })
        });
        let members = members.collect();
        let (due, wakeups) = ((0..ranks).collect(), Vec::new());
        Self { world, members, due, wakeups, by_instants: false }
    }

    /// Lets time pass until `is_done`, looked at whenever ranks have done all they can at an
    /// instant.
    ///
    /// # Errors
    ///
    /// Nothing moves any more.
    pub fn run(&mut self, mut is_done: impl FnMut(&mut Self) -> bool) -> Result<(), NoProgress> {
        // Whatever was started before is looked at first.
        self.due.extend(0..self.members.len() as Rank);
        loop {
            self.settle()?;
            if is_done(self) {
                return Ok(());
            }
            if !self.advance(None) {
                return Err(NoProgress { now: self.world.now() });
            }
        }
    }

    /// Has a rank polled at the next [`Cluster::settle`], because something was asked of its
    /// engine.
    pub fn wake(&mut self, rank: Rank) {
        self.due.insert(rank);
    }

    /// Polls the ranks that can find something new until they have done all they can at this
    /// instant.
    ///
    /// # Errors
    ///
    /// A rank finds something to do for ever without virtual time passing.
    pub fn settle(&mut self) -> Result<(), NoProgress> {
        while let Some(rank) = self.due.pop_first() {
            self.poll(rank)?;
        }
        Ok(())
    }

    /// Notes when engines want to be polled.
    fn note_wakeups(&mut self) {
        let soonest = Nanos(self.world.now().0 + 1);
        let frozen = self.world.frozen();
        let wakeups = self.members.iter().zip(0..).filter_map(|(member, rank)| {
            let Member { engine, rounds, window, .. } =
                member.as_ref().filter(|_| !frozen.contains(&rank))?;
            let rounds = rounds.as_ref().and_then(Rounds::next_wakeup);
            let window = window.as_ref().and_then(OneSided::next_wakeup);
            let at = engine.next_wakeup().into_iter().chain(rounds).chain(window).min()?;
            Some((at.max(soonest), rank))
        });
        self.wakeups.clear();
        self.wakeups.extend(wakeups);
    }

    /// When something happens next, or an engine wants to be polled.
    pub(crate) fn next_at(&mut self) -> Option<Nanos> {
        self.note_wakeups();
        self.wakeups.iter().map(|(at, _)| *at).chain(self.world.next_event()).min()
    }

    /// Goes to the next event, to the first instant at which an engine wants to be polled, or to
    /// `wakeup`, whichever comes first. False when there is none of them.
    pub fn advance(&mut self, wakeup: Option<Nanos>) -> bool {
        self.note_wakeups();
        let next = self.wakeups.iter().map(|(at, _)| *at).chain(wakeup).min();
        let has_advanced =
            if self.by_instants { self.world.advance_instant(next) } else { self.world.advance(next) };
        if !has_advanced {
            return false;
        }
        let now = self.world.now();
        self.due.extend(self.world.take_woken());
        self.due.extend(self.wakeups.iter().filter(|(at, _)| *at <= now).map(|(_, rank)| *rank));
        true
    }

    fn poll(&mut self, rank: Rank) -> Result<(), NoProgress> {
        let entry = &mut self.members[rank as usize];
        if self.world.is_dead(rank) {
            *entry = None;
        }
        let Some(member) = entry else { return Ok(()) };
        if self.world.is_frozen(rank) {
            return Ok(());
        }
        let now = self.world.now();
        for _ in 0..POLLS_MAX {
            let moved = member.engine.poll(now);
            let rounds = member.rounds.as_mut().is_some_and(|rounds| rounds.poll(&mut member.engine, now));
            let window = member.window.as_mut().is_some_and(|window| window.poll(&mut member.engine, now));
            if !moved && !rounds && !window {
                return Ok(());
            }
        }
        Err(NoProgress { now })
    }
}
