//! Whole programs in virtual time: tables, links, leases and references, under faults that a seed
//! draws.
//!
//! What runs is the endpoint: its state ([`Core`]) with all that it decides by (server, calls,
//! leases, tensor table, arena plan), its links, frames, connections and regions. In some runs
//! receivers map memory: messages, status pages and lent memory go over `transport::sim`, whose
//! faults delay, reorder and tear them. In others nothing is mapped: receivers get tensors into
//! their own memory, by devices of `transport::sim` that also lose peers and freeze. The control
//! connections are pairs of sockets with a network between their ends ([`wires`]): bytes
//! come late, in pieces, once, in order, and not at all after a cut. The harness does what
//! threads of programs and the endpoint's thread do, at times that it chooses: it runs an endpoint
//! when a socket is ready or a time has come for which it asked, and never while its process is
//! stopped or has ended.
//!
//! Programs are killed, stopped, and started again as another incarnation. Receives are cancelled,
//! steps end, links are cut or closed, and references are forged: of other links, regions, slots,
//! bytes, and of leases that were accepted before. With gRPC, references also travel in messages of
//! RPCs, which are lost and come twice.
//!
//! Not simulated: the thread itself, handshakes, windows of a NIC, and what the kernel does for
//! `shm`. These are held by `tests/{endpoint,gets,processes}.rs`, with real processes.
//!
//! **Invariant:** the checks ([`oracle`]) stand outside of the code. They know what was sent from
//! the harness, read every byte of what is received, and ask nothing of the code that decides.

#[cfg(feature = "grpc")]
mod fields;
mod oracle;
mod wires;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pleach_transport::sim::{
    Fault, FaultKind, FaultKinds, Faults, Network, Options, Random, SimDevice, World,
};
use pleach_transport::{Nanos, Rank, RegionKey, RemoteSlice};
use pleach_vocabulary::{DataType, Fabric};
use rustix::event::{EventfdFlags, epoll, eventfd};

use self::oracle::{Flaw, Oracle, TensorNumber, Turn};
use self::wires::{WireEnd, Wires};
use super::{Core, LinkSide, ReceiveSlot, SendSlot};
use crate::arena::ArenaLimits;
use crate::calls::CallLimits;
use crate::endpoint::memory::LendableMemory;
use crate::endpoint::options::{EndpointLimits, EndpointOptions, ExchangeFabric};
use crate::endpoint::shared::LinkHold;
use crate::endpoint::simulated::{GetPlan, SimulatedPairs, mapping_options, set_ended};
use crate::endpoint::tensor::{ReceivedTensor, SharedTensor, TensorShape, TensorWay};
use crate::endpoint::{Endpoint, Handle};
use crate::key::Key;
use crate::lease::{LeaseLimits, ReturnCounters, UNTOUCHED};
use crate::reference::{LeaseNumber, LinkId, Reference};
use crate::server::ServerLimits;
use crate::table::{Request, TableLimits};

/// Programs at a time.
const PROGRAMS: usize = 3;

/// Keys of a program.
const KEYS: usize = 4;

/// Ranks of the world: two a link that maps, one a device that gets.
const RANKS: u32 = 64;

/// What the programs do in a run, one after another.
const ACTIONS: u64 = 160;

/// The most virtual time between two of these.
const PAUSE: Duration = Duration::from_millis(2);

/// The time of a receive or send that is patient: beyond all late messages, stops and set-ups.
const PATIENCE: Duration = Duration::from_secs(1);

/// Between two looks of a thread that does not sleep.
const LOOK: Duration = Duration::from_micros(2);

/// How long a thread that has asked looks at the regions of its link.
const WATCH: Duration = Duration::from_micros(100);

/// The longest stop of a program.
const STOP: Duration = Duration::from_millis(100);

/// Small limits, so that all of them are met.
const LIMITS: EndpointLimits = EndpointLimits {
    server: ServerLimits {
        table: TableLimits {
            bytes_held: 8 << 10,
            tensors_held: 16,
            waiting_sends: 6,
            waiting_receives: 12,
            recent_requests: 64,
            ended_steps: 16,
        },
        leases: LeaseLimits { bytes_lent: 8 << 10, leases_per_link: 4, links: 16 },
        calls_per_link: 6,
        wait: Duration::from_secs(60 * 60),
    },
    calls: CallLimits { calls: 8, slots: 4, inline_bytes: 1 << 20 },
    arenas: ArenaLimits { bytes: 24 << 10, arenas: 1 },
};

/// A violation that the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// A holder returns a lease twice.
    ReturnedTwice,
    /// An owner takes its buffers back from a holder whose process still runs.
    ReusedEarly,
    /// A holder accepts a lease that it has accepted before.
    StaleAccepted,
    /// A holder says of a tensor that it has read that nobody has.
    ConsumedTwice,
    /// A holder returns a lease before its get has ended.
    ReturnedEarly,
    /// A receiver uses the destination of a get again when the deadline of the call has come.
    FreedEarly,
    /// Of the tensors of a key the newest is received first.
    NewestFirst,
}

/// A link to another program.
struct Dialed {
    number: u64,
    hold: Arc<LinkHold>,
    /// The other program, by its place among all that there were.
    program: usize,
    wire: usize,
    /// Those of the devices, if it gets: this program's and the other one's.
    ranks: Option<[Rank; 2]>,
}

/// A receive of a tensor of another program.
struct Asked {
    slot: ReceiveSlot,
    call: u64,
    number: u64,
    program: usize,
    wire: usize,
    key: usize,
    since: Nanos,
    deadline: Nanos,
    /// Its answer is never bytes on the connection.
    is_mapped: bool,
    /// It names an incarnation that the other program is not.
    is_stale: bool,
}

/// A tensor that a program reads.
struct Held {
    tensor: ReceivedTensor,
    number: TensorNumber,
    /// The link by which it came.
    link: u64,
}

/// A process, which may have ended.
struct Program {
    core: Core<SimDevice>,
    memory: Arc<LendableMemory>,
    pairs: SimulatedPairs,
    wake: OwnedFd,
    wakes_at: Nanos,
    /// When its thread was awake last.
    turned_at: Nanos,
    stopped_until: Nanos,
    is_alive: bool,
    /// Sockets that are ready.
    ready: BTreeSet<u64>,
    /// By place.
    peers: [Option<Dialed>; PROGRAMS],
    /// Links whose holds are watched, as the drop of the last one closes the link.
    holds: Vec<(u64, Weak<LinkHold>)>,
    /// Links at whose regions threads look, and until when.
    watched: Vec<(u64, Nanos)>,
    asked: Vec<Asked>,
    sends: Vec<(SendSlot, TensorNumber, Nanos)>,
    held: Vec<Held>,
    /// Fields that it gets.
    #[cfg(feature = "grpc")]
    coming: Vec<fields::Coming>,
}

impl Program {
    /// For a mutant: uses the destinations of gets again whose calls have ended.
    fn free_destinations(&mut self) {
        for device in self.core.devices.values_mut() {
            device.free_destinations(&self.memory);
        }
    }
}

struct Simulation {
    world: World,
    random: Random,
    fabric: Fabric,
    is_harmless: bool,
    mutant: Option<Mutant>,
    holder: Arc<Handle>,
    pairs: SimulatedPairs,
    gets: GetPlan,
    programs: Vec<Program>,
    /// The program at each place now.
    places: [usize; PROGRAMS],
    wires: Wires,
    oracle: Oracle,
    #[cfg(feature = "grpc")]
    fields: Vec<fields::Field>,
}

fn key(number: usize) -> Key {
    Key::new(number as u64 % 2, &format!("tensor {number}")).expect("a good name")
}

fn incarnation(program: usize) -> u64 {
    100 + program as u64
}

impl Simulation {
    /// The programs of a seed. `fabric`: `shm` maps, and by `tcp` receivers get. `holder`: the
    /// endpoint that each [`LinkHold`] is given.
    fn new(
        seed: u64,
        fabric: Fabric,
        is_harmless: bool,
        mutant: Option<Mutant>,
        holder: Arc<Handle>,
    ) -> Self {
        let mut random = Random::new(seed).split("programs");
        let network = Network::star(RANKS, 1_000_000_000, Duration::from_micros(2));
        let kinds =
            FaultKinds::of(&[FaultKind::Delay, FaultKind::Reorder, FaultKind::Tear, FaultKind::QueueFull]);
        let faults = Faults::draw(&kinds.swarm(&mut random), seed, &network, PATIENCE);
        let options = match fabric {
            Fabric::Shm => mapping_options(network, seed),
            _ => Options::new(network, seed),
        };
        let world = World::new(Options { faults, ..options });
        set_ended(BTreeSet::new());
        let pairs = SimulatedPairs::new(world.clone(), RANKS);
        let gets = GetPlan::new(world.clone(), RANKS);
        let wires = Wires::new(random.split("wires"));
        let (programs, places, oracle) = (Vec::new(), [0; PROGRAMS], Oracle::default());
        let mut simulation = Self {
            world,
            random,
            fabric,
            is_harmless,
            mutant,
            holder,
            pairs,
            gets,
            programs,
            places,
            wires,
            oracle,
            #[cfg(feature = "grpc")]
            fields: Vec::new(),
        };
        (0..PROGRAMS).for_each(|place| simulation.start(place));
        simulation
    }

    /// A new incarnation of the program at a place.
    fn start(&mut self, place: usize) {
        let program = self.programs.len();
        // One in eight shares no memory.
        let fabric = match self.fabric {
            _ if self.random.below(8) == 0 => ExchangeFabric::None,
            Fabric::Shm => ExchangeFabric::Shm,
            _ => ExchangeFabric::Tcp,
        };
        let options = EndpointOptions { fabric, limits: LIMITS, ..EndpointOptions::default() };
        let memory = LendableMemory::new(LIMITS.arenas);
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
        let wake = eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor");
        let descriptors = [set, wake.try_clone().expect("a descriptor")];
        let pairs = self.pairs.of_another();
        let address = [127, 0, 0, 1].into();
        let (devices, number) = (Box::new(pairs.clone()), incarnation(program));
        let mut core = Core::over(devices, number, &options, address, memory.clone(), descriptors);
        if self.mutant == Some(Mutant::NewestFirst) {
            core.server.give_newest_first();
        }
        self.programs.push(Program {
            core,
            memory,
            pairs,
            wake,
            wakes_at: self.world.now(),
            turned_at: Nanos::ZERO,
            stopped_until: Nanos::ZERO,
            is_alive: true,
            ready: BTreeSet::new(),
            peers: [const { None }; PROGRAMS],
            holds: Vec::new(),
            watched: Vec::new(),
            asked: Vec::new(),
            sends: Vec::new(),
            held: Vec::new(),
            #[cfg(feature = "grpc")]
            coming: Vec::new(),
        });
        self.places[place] = program;
        self.oracle.started(program);
    }

    fn run(mut self) -> Result<Oracle, Flaw> {
        for _ in 0..ACTIONS {
            let pause = self.random.below(PAUSE.as_nanos() as u64);
            self.go_to(self.world.now() + Duration::from_nanos(pause))?;
            self.act()?;
        }
        self.finish()?;
        Ok(self.oracle)
    }

    /// Goes on in virtual time, with all that happens until then.
    fn go_to(&mut self, until: Nanos) -> Result<(), Flaw> {
        loop {
            let now = self.world.now();
            for WireEnd { program, number } in self.wires.deliver(now) {
                self.programs[program].ready.insert(number);
            }
            self.wake_devices(now);
            for program in 0..self.programs.len() {
                self.watch(program, now);
                self.turn(program, now)?;
            }
            let wakes = self.programs.iter().filter(|program| program.is_alive);
            let wakes = wakes.map(|program| {
                let looks = (!program.watched.is_empty()).then_some(now + 4 * LOOK);
                program.wakes_at.min(looks.unwrap_or(program.wakes_at)).max(program.stopped_until)
            });
            let wakes = wakes.min();
            let due = wakes.into_iter().chain(self.wires.next()).min().unwrap_or(until).min(until);
            let is_over = now >= until && due >= until && self.world.next_event().is_none_or(|at| at > until);
            if is_over {
                return Ok(());
            }
            self.world.advance(Some(due.max(now)));
        }
    }

    /// Devices wake the threads of their programs.
    fn wake_devices(&mut self, now: Nanos) {
        // Those that map do not: the peer does, over the connection.
        if self.fabric == Fabric::Shm {
            return;
        }
        let woken = self.world.take_woken();
        for (number, program) in self.programs.iter_mut().enumerate() {
            if self.gets.own(number).iter().any(|rank| woken.contains(rank)) {
                program.wakes_at = program.wakes_at.min(now);
            }
        }
    }

    /// What threads do that have asked: they look for the answer themselves for a while.
    fn watch(&mut self, number: usize, now: Nanos) {
        let program = &mut self.programs[number];
        if !program.is_alive || program.stopped_until > now || program.watched.is_empty() {
            return;
        }
        for (link, until) in std::mem::take(&mut program.watched) {
            if until > now {
                program.core.pump_regions(now, link);
                program.watched.push((link, until));
            } else {
                program.core.end_watch(now, link);
            }
        }
        self.wires.collect(number, now);
    }

    /// What the endpoint's thread does when it is awake, if it is.
    fn turn(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let program = &mut self.programs[number];
        if !program.is_alive || program.stopped_until > now {
            return Ok(());
        }
        let mut count = [0; 8];
        let is_woken = rustix::io::read(&program.wake, &mut count).is_ok();
        if !is_woken && program.ready.is_empty() && program.wakes_at > now {
            return Ok(());
        }
        program.core.wake_up();
        for socket in std::mem::take(&mut program.ready) {
            program.core.pump(now, socket);
        }
        // The drop of the last hold of a link closes the link.
        let (gone, holds): (Vec<_>, Vec<_>) =
            std::mem::take(&mut program.holds).into_iter().partition(|(_, hold)| hold.strong_count() == 0);
        program.holds = holds;
        gone.iter().for_each(|(link, _)| program.core.close_link(now, *link));
        program.core.expire(now);
        program.core.pump_unread(now);
        program.core.poll(now);
        program.core.pump_all_regions(now);
        match self.mutant {
            Some(Mutant::ReturnedEarly) => return_early(&mut program.core, now),
            Some(Mutant::FreedEarly) => program.free_destinations(),
            _ => {}
        }
        drop(program.core.take_dropped());
        let may_sleep = program.core.sleep();
        let until = if may_sleep { program.core.next_deadline(now) } else { Some(now) };
        // What a NIC that is frozen has for the program stays there, however often it looks.
        let is_frozen = self.gets.own(number).iter().any(|rank| self.world.is_frozen(*rank));
        let look = if is_frozen { WATCH } else { LOOK };
        program.wakes_at = until.unwrap_or(Nanos(u64::MAX)).max(now + look);
        program.turned_at = now;
        self.wires.collect(number, now);
        if self.wires.has_unexplained() {
            return Err(Flaw::Unexpected("a link has ended".to_owned()));
        }
        self.take_ends(number, now)
    }

    /// What threads of a program do that wait: they take what has ended.
    fn take_ends(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let program = &mut self.programs[number];
        for (slot, tensor, deadline) in std::mem::take(&mut program.sends) {
            match slot.take() {
                Some(result) => self.oracle.send_ended(tensor, result, now, deadline)?,
                None if program.turned_at >= deadline => return Err(Flaw::Late("a send")),
                None => program.sends.push((slot, tensor, deadline)),
            }
        }
        for asked in std::mem::take(&mut program.asked) {
            let is_linked = program.core.links.contains_key(&asked.number);
            match asked.slot.take() {
                Some(Ok(arrived)) => {
                    let tensor = arrived.take();
                    if asked.is_stale {
                        return Err(Flaw::Stale);
                    }
                    let from = (asked.program, asked.key);
                    let turn = Turn::of_call(asked.since..=now, asked.wire);
                    let found = self.oracle.received(number, from, turn, tensor.as_bytes())?;
                    match tensor.way() {
                        TensorWay::InPlace => self.oracle.begin_reading(found, number),
                        TensorWay::Copied => self.oracle.was_copied(),
                        TensorWay::Inline | TensorWay::Local => {}
                    }
                    if tensor.way() != TensorWay::InPlace {
                        program.core.leases_returned(now, asked.number);
                    }
                    program.held.push(Held { tensor, number: found, link: asked.number });
                }
                Some(Err(error)) => {
                    let wire_has_ended = self.wires.has_ended(asked.wire);
                    self.oracle.call_failed(&error, now, &asked, wire_has_ended, self.is_harmless)?;
                    self.oracle.unanswered(number, &asked);
                }
                None if !is_linked => return Err(Flaw::Late("a receive of a link that has ended")),
                None if program.turned_at >= asked.deadline => return Err(Flaw::Late("a receive")),
                None => program.asked.push(asked),
            }
        }
        self.wires.collect(number, now);
        Ok(())
    }

    /// A program that runs, at a random place.
    fn running(&mut self) -> Option<usize> {
        let program = self.places[self.random.index(PROGRAMS)];
        let Program { is_alive, stopped_until, .. } = self.programs[program];
        (is_alive && stopped_until <= self.world.now()).then_some(program)
    }

    /// Something that a program does, or that happens to it.
    fn act(&mut self) -> Result<(), Flaw> {
        let now = self.world.now();
        self.tell_ended();
        #[cfg(feature = "grpc")]
        fields::come(self, now)?;
        #[cfg(feature = "grpc")]
        fields::take(self, now)?;
        let action = self.random.below(if self.is_harmless { 96 } else { 106 });
        if action == 105 {
            // Also a program that is stopped.
            let place = self.random.index(PROGRAMS);
            if self.programs[self.places[place]].is_alive {
                self.kill(place)
            } else {
                self.start(place)
            };
            return Ok(());
        }
        let Some(program) = self.running() else { return Ok(()) };
        match action {
            0..28 => self.send(program, now)?,
            28..58 => self.ask(program, now),
            58..62 => self.receive_own(program, now)?,
            62..68 => self.cancel(program, now)?,
            #[cfg(feature = "grpc")]
            68..74 => fields::lend(self, program, now)?,
            68..86 => self.drop_some(program, now)?,
            86..92 => self.replay(program)?,
            92..94 => self.end_step(program, now),
            94..96 => {
                let longest = if self.is_harmless { STOP / 5 } else { STOP };
                let stop = Duration::from_nanos(self.random.below(longest.as_nanos() as u64));
                // The process, or a NIC alone.
                match self.gets.own(program) {
                    ranks @ [_, ..] if self.random.coin() => {
                        let rank = ranks[self.random.index(ranks.len())];
                        self.world.inject(Fault::Freeze {
                            rank,
                            duration: stop,
                            watcher: self.random.coin(),
                        });
                    }
                    _ => self.programs[program].stopped_until = now + stop,
                }
            }
            96..100 => {
                let place = self.random.index(PROGRAMS);
                let program = &mut self.programs[program];
                if let Some(Dialed { wire, .. }) = program.peers[place].take() {
                    self.wires.will_close(wire);
                    program.wakes_at = now;
                }
            }
            100..103 => {
                let place = self.random.index(PROGRAMS);
                if let Some(Dialed { wire, ranks, .. }) = self.programs[program].peers[place] {
                    match ranks {
                        // The devices lose each other, and the connection goes on.
                        Some([rank, peer]) if self.random.coin() => {
                            self.wires.will_close(wire);
                            self.world.inject(Fault::OneSidedLoss { rank, peer });
                        }
                        _ => self.wires.cut(wire, now),
                    }
                }
            }
            _ => self.forge(program, now),
        }
        if self.programs[program].is_alive {
            self.wires.collect(program, now);
            self.turn(program, now)?;
        }
        Ok(())
    }

    /// How long a caller waits.
    fn patience(&mut self) -> Duration {
        match self.random.below(4) {
            0 => Duration::from_nanos(self.random.below(5_000_000)),
            _ => PATIENCE,
        }
    }

    fn send(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let (key_number, deadline) = (self.random.index(KEYS), now + self.patience());
        let words = 1 + self.random.index(256);
        let program = &mut self.programs[number];
        // Where there is no memory a program waits or gives up.
        let Ok(mut buffer) = program.memory.allocate(words * 8) else { return Ok(()) };
        self.oracle.allocated(number, &buffer.range())?;
        let tensor = self.oracle.sent(now, number, key_number, buffer.range());
        oracle::fill(tensor, buffer.as_bytes_mut());
        let shape = TensorShape::new(DataType::U64, &[words]).expect("is small");
        let slot = program.core.send(now, &key(key_number), SharedTensor::of_bytes(buffer, shape), deadline);
        program.sends.push((slot, tensor, deadline));
        Ok(())
    }

    /// The link to another program at a place, which may be new.
    fn dial(&mut self, number: usize, place: usize, now: Nanos) -> Option<usize> {
        let other = self.places[place];
        let [program, peer] = self.programs.get_disjoint_mut([number, other]).ok()?;
        if program.peers[place].as_ref().is_some_and(|dialed| !dialed.hold.is_lost()) {
            return program.peers[place].as_ref().map(|dialed| dialed.program);
        }
        program.peers[place] = None;
        if !peer.is_alive || peer.stopped_until > now || !self.pairs.has_ranks() {
            return None;
        }
        let (id, socket) = (LinkId(self.random.bits()), peer.core.next_number());
        let fabric = if self.random.below(6) == 0 { Err("not now".into()) } else { Ok(self.fabric) };
        let mut ranks = None;
        if fabric == Ok(Fabric::Tcp) {
            let (chosen, opened) = self.gets.link(id, [number, other])?;
            ranks = Some(chosen);
            for (owner, device) in opened {
                let core = if owner == number { &mut program.core } else { &mut peer.core };
                let named = core.next_number();
                core.devices.insert(named, device);
            }
        }
        let (wire, [own, theirs]) = self.wires.open();
        let name = format!("program {other}");
        let link = program.core.add_receiver(now, id, &name, own, fabric);
        peer.core.add_sender(now, socket, id, &format!("program {number}"), theirs);
        self.wires.set_ends(
            wire,
            [WireEnd { program: number, number: link }, WireEnd { program: other, number: socket }],
        );
        let hold = LinkHold::new(link, id, &self.holder);
        program.core.hold(&hold);
        program.holds.push((link, Arc::downgrade(&hold)));
        // The threads are awake, as at the end of a handshake.
        (program.wakes_at, peer.wakes_at) = (now, now);
        program.peers[place] = Some(Dialed { number: link, hold, program: other, wire, ranks });
        self.wires.collect(other, now);
        Some(other)
    }

    fn ask(&mut self, number: usize, now: Nanos) {
        let place = self.random.index(PROGRAMS);
        let Some(other) = self.dial(number, place, now) else { return };
        let (key_number, deadline) = (self.random.index(KEYS), now + self.patience());
        // One that knows an earlier program of that place.
        let is_stale = self.random.below(24) == 0;
        let incarnation = incarnation(other) - u64::from(is_stale);
        let program = &mut self.programs[number];
        let Some(Dialed { number: link, hold, wire, .. }) = &program.peers[place] else { return };
        let (link, wire, is_mapped) = (*link, *wire, hold.is_mapped());
        // Threads watch their links one at a time.
        if is_mapped && self.random.coin() && program.watched.iter().all(|(other, _)| *other != link) {
            program.core.begin_watch(link);
            program.watched.push((link, now + WATCH));
        }
        match program.core.ask(now, link, &key(key_number), incarnation, deadline) {
            Some((call, slot)) => program.asked.push(Asked {
                slot,
                call,
                number: link,
                program: other,
                wire,
                key: key_number,
                since: now,
                deadline,
                is_mapped,
                is_stale,
            }),
            None => hold_is_lost(program, place),
        }
    }

    /// A program receives a tensor of its own at once, if there is one.
    fn receive_own(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let key_number = self.random.index(KEYS);
        self.take_own(number, key_number, now).map(drop)
    }

    /// True: there was one.
    fn take_own(&mut self, number: usize, key_number: usize, now: Nanos) -> Result<bool, Flaw> {
        let core = &mut self.programs[number].core;
        let slot = core.receive(now, &key(key_number), Request::default(), now);
        match slot.take() {
            Some(Ok(arrived)) => {
                let tensor = arrived.take();
                self.oracle.received(number, (number, key_number), Turn::at(now), tensor.as_bytes())?;
                Ok(true)
            }
            Some(Err(_)) => Ok(false),
            None => Err(Flaw::Late("a receive whose deadline is now")),
        }
    }

    /// Nobody waits any more for a receive, as when a `PendingTensor` is dropped.
    fn cancel(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        // What has ended is taken.
        self.take_ends(number, now)?;
        let program = &mut self.programs[number];
        if program.asked.is_empty() {
            return Ok(());
        }
        let asked = program.asked.swap_remove(self.random.index(program.asked.len()));
        if let Some(Ok(arrived)) = asked.slot.leave() {
            arrived.decline();
        }
        program.core.cancel(now, asked.number, asked.call);
        self.oracle.unanswered(number, &asked);
        Ok(())
    }

    /// Looks at what is held once more, and lets some of it go.
    fn drop_some(&mut self, number: usize, now: Nanos) -> Result<(), Flaw> {
        let program = &mut self.programs[number];
        for held in &program.held {
            oracle::check(held.number, held.tensor.as_bytes())?;
        }
        if program.held.is_empty() {
            return Ok(());
        }
        let held = program.held.swap_remove(self.random.index(program.held.len()));
        let Held { tensor, number: read, link } = held;
        let leases = held_leases(program, link);
        let returns = match program.core.links.get(&link).map(|link| &link.side) {
            Some(LinkSide::Receiver(side)) => Some(side.returns.clone()),
            _ => None,
        };
        self.oracle.end_reading(read, number);
        drop(tensor);
        if let (Some(returns), Some(mutant)) = (returns, self.mutant) {
            let now_held = held_leases(program, link);
            for LeaseNumber { slot, generation } in
                leases.into_iter().filter(|lease| !now_held.contains(lease))
            {
                match mutant {
                    Mutant::ReturnedTwice => returns.store(slot, generation + 1),
                    Mutant::ConsumedTwice => returns.store(slot, generation | UNTOUCHED),
                    _ => {}
                }
            }
        }
        // The drop of a link's last hold wakes the thread. The return of a lease does not.
        if program.holds.iter().any(|(of, hold)| *of == link && hold.strong_count() == 0) {
            program.wakes_at = program.wakes_at.min(now + LOOK);
        }
        Ok(())
    }

    /// References come that were forged or that came before: none is accepted, and nothing else
    /// changes.
    fn replay(&mut self, number: usize) -> Result<(), Flaw> {
        let (random, program) = (&mut self.random, &mut self.programs[number]);
        let all: Vec<LinkId> = program.core.links.values().map(|link| link.id).collect();
        for link in program.core.links.values_mut() {
            let LinkSide::Receiver(side) = &mut link.side else { continue };
            if self.mutant == Some(Mutant::StaleAccepted) {
                side.calls.accept_stale();
            }
            let before: Vec<LeaseNumber> = side.calls.held().collect();
            let slice = RemoteSlice { key: RegionKey(1), offset: 64 * random.below(300), len: 8 };
            let other = all.iter().copied().find(|other| *other != link.id).unwrap_or(LinkId(random.bits()));
            let mut forged = vec![
                (LinkId(random.bits()), LeaseNumber { slot: 0, generation: 1 }, slice),
                (link.id, LeaseNumber { slot: 4 + random.below(1 << 20) as u32, generation: 1 }, slice),
                (
                    link.id,
                    LeaseNumber { slot: 0, generation: 1 },
                    RemoteSlice { key: RegionKey(random.bits()), ..slice },
                ),
                (
                    link.id,
                    LeaseNumber { slot: 0, generation: 1 },
                    RemoteSlice { offset: u64::MAX - 4, ..slice },
                ),
                (
                    link.id,
                    LeaseNumber { slot: 0, generation: 1 },
                    RemoteSlice { len: (24 << 10) + 1, ..slice },
                ),
                (link.id, LeaseNumber { slot: random.below(4) as u32, generation: 0 }, slice),
            ];
            for lease in &before {
                let LeaseNumber { slot, generation } = *lease;
                forged.extend([
                    (link.id, *lease, slice),
                    (other, *lease, slice),
                    (link.id, LeaseNumber { slot, generation: generation - random.below(generation) }, slice),
                    (link.id, LeaseNumber { slot, generation: generation + 1 + random.below(9) }, slice),
                ]);
            }
            for (link, lease, slice) in forged {
                let reference = Reference { link, lease, slice };
                let decoded = Reference::decode(&reference.encode());
                assert_eq!(decoded, Ok(reference));
                if let Ok(lease) = side.calls.accept(&reference) {
                    return Err(Flaw::Accepted(lease.number()));
                }
            }
            if side.calls.held().collect::<Vec<_>>() != before {
                return Err(Flaw::Changed);
            }
        }
        Ok(())
    }

    /// An answer comes on a link that its sender never sent, or sent before.
    fn forge(&mut self, number: usize, now: Nanos) {
        let program = &mut self.programs[number];
        let place = self.random.index(PROGRAMS);
        let Some(Dialed { number: link, wire, .. }) = &program.peers[place] else { return };
        let (wire, link) = (*wire, *link);
        let Some(open) = program.core.links.get(&link) else { return };
        let call = program.asked.iter().find(|asked| asked.number == link).map_or(1, |asked| asked.call);
        let held = held_leases(program, link);
        let lease = match held.first() {
            Some(lease) => *lease,
            None => LeaseNumber { slot: 9, generation: 1 },
        };
        let slice = RemoteSlice { key: RegionKey(1), offset: 0, len: 64 };
        let reference = Reference { link: open.id, lease, slice };
        let shape = TensorShape::new(DataType::U64, &[8]).expect("is small");
        self.wires.forge(wire, now, &crate::Message::Lent { call, reference, description: shape.describe() });
    }

    fn end_step(&mut self, number: usize, now: Nanos) {
        let (step, core) = (self.random.below(2), &mut self.programs[number].core);
        if self.random.coin() {
            core.abort(now, step, "a test");
        } else {
            core.clean_up(now, step);
        }
        self.oracle.step_ended(number, step, now);
    }

    /// The process at a place ends: nothing of it happens any more, and its memory stays as it is
    /// for who has mapped it.
    fn kill(&mut self, place: usize) {
        let number = self.places[place];
        let program = &mut self.programs[number];
        program.is_alive = false;
        for rank in program.pairs.own().iter().chain(self.gets.own(number)) {
            self.world.inject(Fault::RankDeath { rank: *rank });
        }
        let asked = std::mem::take(&mut program.asked);
        asked.iter().for_each(|asked| self.oracle.unanswered(number, asked));
        self.oracle.killed(number);
        self.wires.kill(number, self.world.now());
        self.tell_ended();
    }

    /// The kernel tells which processes have ended; a mutant takes all for ended.
    fn tell_ended(&self) {
        let is_mutant = self.mutant == Some(Mutant::ReusedEarly);
        let ended = self.programs.iter().filter(|program| is_mutant || !program.is_alive);
        set_ended(ended.flat_map(|program| program.pairs.own()).collect());
    }

    /// Nothing goes wrong any more: all that waits ends, all is let go, and nothing is left.
    fn finish(&mut self) -> Result<(), Flaw> {
        let now = self.world.now();
        for program in &mut self.programs {
            program.stopped_until = now;
            program.wakes_at = now;
        }
        #[cfg(feature = "grpc")]
        while !self.fields.is_empty() || self.programs.iter().any(|program| !program.coming.is_empty()) {
            self.go_to(self.world.now() + PAUSE)?;
            fields::come(self, self.world.now())?;
            fields::take(self, self.world.now())?;
        }
        let alive = |this: &Self| (0..this.programs.len()).filter(|at| this.programs[*at].is_alive).collect();
        let alive: Vec<usize> = alive(self);
        for round in 0..44 {
            for &number in &alive {
                while !self.programs[number].held.is_empty() {
                    self.drop_some(number, self.world.now())?;
                }
                // After all deadlines.
                if round == 24 {
                    self.programs[number].peers = [const { None }; PROGRAMS];
                    self.programs[number].wakes_at = self.world.now();
                }
            }
            if round == 24 {
                self.wires.finish();
            }
            self.go_to(self.world.now() + PATIENCE / 20)?;
        }
        let now = self.world.now();
        for number in alive {
            let program = &self.programs[number];
            if !(program.asked.is_empty() && program.sends.is_empty()) {
                return Err(Flaw::Late("something still waits"));
            }
            for key_number in 0..KEYS {
                while self.take_own(number, key_number, now)? {}
            }
            let counts = self.programs[number].core.counts();
            if (counts.links, counts.leases, counts.bytes_lent, counts.bytes_held) != (0, 0, 0, 0) {
                return Err(Flaw::Left(format!("{counts:?}")));
            }
            if self.programs[number].memory.allocate(LIMITS.arenas.bytes as usize).is_err() {
                return Err(Flaw::Left("memory".to_owned()));
            }
        }
        let has_ended = |wire: usize| self.wires.ended_early(wire);
        self.oracle.finish(self.is_harmless, has_ended)
    }
}

/// Dialed anew next time.
fn hold_is_lost(program: &mut Program, place: usize) {
    if let Some(dialed) = &program.peers[place] {
        dialed.hold.set_lost();
    }
}

/// The leases that a program holds on a link.
fn held_leases(program: &Program, link: u64) -> Vec<LeaseNumber> {
    match program.core.links.get(&link).map(|link| &link.side) {
        Some(LinkSide::Receiver(side)) => side.calls.held().collect(),
        _ => Vec::new(),
    }
}

/// For a mutant: returns the leases of all gets that are under way.
fn return_early(core: &mut Core<SimDevice>, now: Nanos) {
    let mut links = Vec::new();
    for (number, link) in core.links.iter().filter(|(_, link)| link.pair.is_some()) {
        let LinkSide::Receiver(side) = &link.side else { continue };
        for LeaseNumber { slot, generation } in side.calls.held() {
            if side.returns.load(slot) & !UNTOUCHED < generation {
                side.returns.store(slot, generation);
            }
        }
        links.push(*number);
    }
    links.into_iter().for_each(|number| core.leases_returned(now, number));
}

/// The endpoint that each [`LinkHold`] is given.
fn holder() -> Arc<Handle> {
    let options = EndpointOptions { fabric: ExchangeFabric::None, ..EndpointOptions::default() };
    Endpoint::open(&options).expect("a free port of loopback").handle.clone()
}

/// Runs the programs of these seeds. Returns what was seen in all of them.
fn simulate(seeds: std::ops::Range<u64>, fabric: Fabric, is_harmless: bool) -> Oracle {
    let (holder, mut all) = (holder(), Oracle::default());
    for seed in seeds {
        match Simulation::new(seed, fabric, is_harmless, None, holder.clone()).run() {
            Ok(oracle) => all.add(&oracle),
            Err(flaw) => panic!("seed {seed} by {fabric}: {flaw:?}"),
        }
    }
    all
}

#[test]
fn every_tensor_has_one_receiver_and_every_call_an_end_whatever_is_late() {
    let seen = simulate(0..250, Fabric::Shm, true);
    assert!(seen.read_in_place() > 1_500 && seen.timeouts() > 500, "{seen:?}");
}

#[test]
fn a_fault_takes_nothing_from_others_and_no_buffer_is_used_early() {
    let seen = simulate(0..400, Fabric::Shm, false);
    assert!(seen.read_in_place() > 700 && seen.lost_calls() > 300, "{seen:?}");
}

#[test]
fn every_tensor_that_is_got_has_one_receiver_and_every_call_an_end_whatever_is_late() {
    let seen = simulate(0..250, Fabric::Tcp, true);
    assert!(seen.copied() > 1_500 && seen.timeouts() > 500, "{seen:?}");
}

#[test]
fn a_fault_of_a_device_that_gets_takes_nothing_from_others_and_no_buffer_is_used_early() {
    let seen = simulate(0..400, Fabric::Tcp, false);
    assert!(seen.copied() > 700 && seen.lost_calls() > 300, "{seen:?}");
    // A get had failed and was not looked at when its link ended.
    simulate(1_001_202..1_001_203, Fabric::Tcp, false);
}

#[test]
#[ignore = "takes a quarter of an hour: 60,000 seeds"]
fn nothing_is_found_in_many_seeds() {
    for fabric in [Fabric::Tcp, Fabric::Shm] {
        simulate(1_000_000..1_010_000, fabric, true);
        simulate(1_000_000..1_020_000, fabric, false);
    }
}

#[test]
fn each_violation_is_found() {
    let holder = holder();
    for (mutant, fabric) in [
        (Mutant::ReturnedTwice, Fabric::Shm),
        (Mutant::ReusedEarly, Fabric::Shm),
        (Mutant::StaleAccepted, Fabric::Shm),
        (Mutant::ConsumedTwice, Fabric::Shm),
        (Mutant::NewestFirst, Fabric::Shm),
        (Mutant::ReturnedEarly, Fabric::Tcp),
        (Mutant::FreedEarly, Fabric::Tcp),
    ] {
        let is_harmless = !matches!(mutant, Mutant::ReusedEarly | Mutant::FreedEarly);
        let run = |seed| Simulation::new(seed, fabric, is_harmless, Some(mutant), holder.clone()).run();
        let found = (0..150).find_map(|seed| run(seed).err());
        let is_right = match &found {
            Some(Flaw::Unexpected(_)) => matches!(mutant, Mutant::ReturnedTwice | Mutant::ReturnedEarly),
            Some(Flaw::Reused | Flaw::Torn | Flaw::Other) => {
                matches!(mutant, Mutant::ReusedEarly | Mutant::FreedEarly)
            }
            Some(Flaw::Accepted(_)) => mutant == Mutant::StaleAccepted,
            Some(Flaw::Twice) => mutant == Mutant::ConsumedTwice,
            Some(Flaw::Disorder(..)) => mutant == Mutant::NewestFirst,
            _ => false,
        };
        assert!(is_right, "{mutant:?}: {found:?}");
    }
}
