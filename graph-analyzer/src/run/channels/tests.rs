//! The protocol over the simulated fabric, under its faults, and with mutants that must be caught.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::device::Flush;
use pleach_transport::sim::{self, FaultKind, FaultKinds, Faults, Network, Random, SimDevice};
use pleach_transport::{
    Device, DeviceConfig, Event, LossCause, Nanos, Rank, Responder, SharedMemory, Slice, Space,
};

use super::{
    Channel, ChannelEnd, ChannelError, Channels, Form, Problem, Received, ReceivedBytes, TensorForm,
    signal_slots,
};
use crate::element::ElementType;

/// A violation of the protocol, which the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A tensor is sent as soon as the first credit is there.
    CreditIgnored,
    /// Bytes and metadata are read before their signal.
    ReadEarly,
    /// A credit is given before the consumer has finished.
    ReleasedEarly,
    /// A credit is given twice.
    ReleasedTwice,
}

struct Silent;

impl Responder for Silent {
    fn message(&self, _: Rank, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _: Rank, _: &LossCause) {}
}

/// How long a rank waits for another, in virtual time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The longest that a consumer takes.
const SLOWNESS: Duration = Duration::from_millis(2);

/// How long virtual time goes on without an event.
const TICK_NS: u64 = 200_000;

/// What a seed decides.
struct Plan {
    ranks: u32,
    depth: u32,
    iterations: u64,
    maps: bool,
    channels: Vec<Channel>,
    faults: Faults,
    seed: u64,
    mutant: Option<Mutant>,
}

impl Plan {
    fn draw(seed: u64, kinds: &FaultKinds) -> Self {
        let mut random = Random::new(seed).split("plan");
        let ranks = random.between(2, 3) as u32;
        let maps = random.coin();
        let channels = (0..random.between(1, 5))
            .map(|number| {
                // Parts form no cycle.
                let from = random.below(u64::from(ranks) - 1) as u32;
                let to = random.between(u64::from(from) + 1, u64::from(ranks) - 1) as u32;
                let bytes = 4 * random.between(1, 300);
                let form = match random.below(4) {
                    0 => Form::Put { bytes },
                    1 if maps => Form::Lend { bytes },
                    1 => Form::Put { bytes },
                    2 => Form::Fetch { element: Some(ElementType::F32), dimensions: Some(2) },
                    _ => Form::Fetch { element: None, dimensions: None },
                };
                Channel { tensor: format!("t{number}"), from, to, form, space: Space::Host }
            })
            .collect();
        let network = Network::full_mesh(ranks, 1_000_000_000, Duration::from_micros(3));
        let within = Duration::from_millis(20);
        let faults = Faults::draw(&kinds.swarm(&mut random), seed, &network, within);
        let (depth, iterations) = (random.between(1, 3) as u32, random.between(1, 12));
        Self { ranks, depth, iterations, maps, channels, faults, seed, mutant: None }
    }

    /// The type and dimensions of a tensor.
    fn form(&self, channel: usize, iteration: u64) -> TensorForm {
        let dims = match self.channels[channel].form {
            Form::Put { bytes } | Form::Lend { bytes } => vec![bytes / 4],
            Form::Fetch { .. } => {
                let mut random =
                    Random::new(self.seed).split("dims").split_number(iteration << 8 | channel as u64);
                vec![random.below(8), random.between(1, 40)]
            }
        };
        TensorForm { element: ElementType::F32, dims }
    }

    fn bytes(&self, channel: usize, iteration: u64) -> Vec<u8> {
        let len = self.form(channel, iteration).bytes().expect("it is small");
        let mut bytes = vec![0; len as usize];
        Random::new(self.seed).split("bytes").split_number(iteration << 8 | channel as u64).fill(&mut bytes);
        bytes
    }

    fn run(&self) -> Vec<Result<(), Flaw>> {
        let network = Network::full_mesh(self.ranks, 1_000_000_000, Duration::from_micros(3));
        let options = sim::Options {
            maps: self.maps,
            faults: self.faults.clone(),
            ..sim::Options::new(network, self.seed)
        };
        let world = sim::World::new(options);
        let device = |rank| {
            world.device(DeviceConfig {
                rank,
                world_size: self.ranks,
                secret: None,
                signal_slots: signal_slots(&self.channels, self.depth),
                connect_timeout: PATIENCE,
                interface: None,
                address: None,
                responder: Arc::new(Silent),
            })
        };
        let mut devices: Vec<SimDevice> = (0..self.ranks).map(device).collect();
        let addresses: Vec<_> = devices.iter().map(|device| device.info().address.clone()).collect();
        for device in &mut devices {
            let rank = device.info().rank;
            for peer in (0..self.ranks).filter(|&peer| peer != rank) {
                device.connect(peer, &addresses[peer as usize]).expect("it is a peer");
            }
        }
        let mut actors: Vec<Actor> = devices.into_iter().map(|device| Actor::new(self, device)).collect();
        while actors.iter().any(|actor| actor.result.is_none() || actor.device.is_some()) {
            world.advance(Some(Nanos(world.now().0 + TICK_NS)));
            assert!(
                world.now() < Nanos(100 * PATIENCE.as_nanos() as u64),
                "seed {}: it never ends",
                self.seed
            );
            for (rank, actor) in actors.iter_mut().enumerate() {
                if world.is_dead(rank as Rank) {
                    actor.result.get_or_insert(Err(Flaw::Died));
                    actor.device = None;
                } else if !world.is_frozen(rank as Rank) {
                    actor.step(self, world.now());
                }
            }
        }
        actors.into_iter().map(|actor| actor.result.expect("all have ended")).collect()
    }
}

/// How a rank ended without success.
#[derive(Debug)]
enum Flaw {
    /// The simulation ended it.
    Died,
    /// The protocol says so.
    Refused(ChannelError),
    /// The checker found other bytes than were sent, of this channel and iteration.
    Wrong(#[expect(dead_code, reason = "it is shown")] (usize, u64)),
}

impl From<ChannelError> for Flaw {
    fn from(error: ChannelError) -> Self {
        Self::Refused(error)
    }
}

/// A rank: in each iteration it receives, holds what came for a while, and sends.
struct Actor {
    device: Option<SimDevice>,
    channels: Option<Channels>,
    early: Vec<Event>,
    connected: u32,
    random: Random,
    iteration: u64,
    held: Vec<(usize, Received)>,
    holds_until: Option<Nanos>,
    sent: usize,
    sources: Vec<Slice>,
    waits_until: Nanos,
    result: Option<Result<(), Flaw>>,
}

impl Actor {
    fn new(plan: &Plan, mut device: SimDevice) -> Self {
        let random = Random::new(plan.seed).split("actor").split_number(device.info().rank.into());
        let most = 8 * 40 * 4;
        let sources = plan.channels.iter().flat_map(|_| 0..plan.depth);
        let sources = sources.map(|_| {
            let memory = SharedMemory::lendable(most).expect("there is memory");
            device.register(memory).expect("it can be registered").whole()
        });
        let sources = sources.collect();
        Self {
            device: Some(device),
            channels: None,
            early: Vec::with_capacity(64),
            connected: 0,
            random,
            iteration: 0,
            held: Vec::new(),
            holds_until: None,
            sent: 0,
            sources,
            waits_until: Nanos(u64::MAX),
            result: None,
        }
    }

    fn step(&mut self, plan: &Plan, now: Nanos) {
        let Some(mut device) = self.device.take() else { return };
        if self.result.is_none() {
            self.result = self.try_step(plan, &mut device, now).transpose();
            if self.result.is_some() {
                device.leave();
            }
        } else {
            let mut events = Vec::with_capacity(8);
            device.poll(now, &mut events);
        }
        // A process ends when its peers get its bye without it.
        if self.result.is_none() || !device.flush(Flush::All) {
            self.device = Some(device);
        }
    }

    /// Goes on as far as possible; says when all iterations have ended.
    fn try_step(&mut self, plan: &Plan, device: &mut SimDevice, now: Nanos) -> Result<Option<()>, Flaw> {
        if self.channels.is_none() && !self.connects(plan, device, now)? {
            return Ok(None);
        }
        let Some(mut channels) = self.channels.take() else { return Ok(None) };
        channels.mutant = plan.mutant;
        let result = self.go_on(plan, device, &mut channels, now);
        self.channels = Some(channels);
        result
    }

    fn connects(&mut self, plan: &Plan, device: &mut SimDevice, now: Nanos) -> Result<bool, Flaw> {
        device.poll(now, &mut self.early);
        let ends = |event: &&Event| matches!(event, Event::Connected { .. } | Event::PeerLost { .. });
        self.connected = self.early.iter().filter(ends).count() as u32;
        if self.connected + 1 < plan.ranks {
            return Ok(false);
        }
        let mut channels =
            Channels::open(device, plan.channels.clone(), plan.depth).expect("there is memory");
        self.early.drain(..).try_for_each(|event| channels.handle(event))?;
        self.channels = Some(channels);
        self.waits_until = now + PATIENCE;
        Ok(true)
    }

    fn go_on(
        &mut self,
        plan: &Plan,
        device: &mut SimDevice,
        channels: &mut Channels,
        now: Nanos,
    ) -> Result<Option<()>, Flaw> {
        channels.poll(device, now)?;
        while self.iteration < plan.iterations {
            if !(self.receives(plan, device, channels, now)? && self.sends(plan, device, channels, now)?) {
                return Ok(None);
            }
            self.iteration += 1;
            self.sent = 0;
            self.holds_until = None;
            self.waits_until = now + PATIENCE;
        }
        Ok(channels.is_idle(device, now, self.waits_until)?.then_some(()))
    }

    fn receives(
        &mut self,
        plan: &Plan,
        device: &mut SimDevice,
        channels: &mut Channels,
        now: Nanos,
    ) -> Result<bool, Flaw> {
        if self.holds_until.is_some_and(|until| until == Nanos(u64::MAX)) {
            return Ok(true);
        }
        for number in 0..plan.channels.len() {
            let is_held = self.held.iter().any(|(held, _)| *held == number);
            if is_held || !matches!(channels.ends[number], ChannelEnd::Incoming(_)) {
                continue;
            }
            match channels.receive(device, number, self.iteration, now, self.waits_until)? {
                Some(received) => {
                    check(plan, number, self.iteration, &received)?;
                    self.held.push((number, received));
                }
                None => return Ok(false),
            }
        }
        let slow = Duration::from_nanos(self.random.below(SLOWNESS.as_nanos() as u64));
        if now < *self.holds_until.get_or_insert(now + slow) {
            return Ok(false);
        }
        for (number, received) in std::mem::take(&mut self.held) {
            check(plan, number, self.iteration, &received)?;
            channels.release(device, number, self.iteration)?;
        }
        self.holds_until = Some(Nanos(u64::MAX));
        self.waits_until = now + PATIENCE;
        Ok(true)
    }

    fn sends(
        &mut self,
        plan: &Plan,
        device: &mut SimDevice,
        channels: &mut Channels,
        now: Nanos,
    ) -> Result<bool, Flaw> {
        while self.sent < plan.channels.len() {
            let number = self.sent;
            if matches!(channels.ends[number], ChannelEnd::Outgoing(_)) {
                if !channels.is_free(device, number, self.iteration, now, self.waits_until)? {
                    return Ok(false);
                }
                let slot = number * plan.depth as usize + (self.iteration % u64::from(plan.depth)) as usize;
                let bytes = plan.bytes(number, self.iteration);
                let source = self.sources[slot].slice(0..bytes.len()).expect("it is long enough");
                source.store(&bytes);
                let form = plan.form(number, self.iteration);
                channels.send(device, number, self.iteration, source, Some(&form), now, now + PATIENCE)?;
            }
            self.sent += 1;
        }
        Ok(true)
    }
}

/// Compares what came with what was sent.
fn check(plan: &Plan, channel: usize, iteration: u64, received: &Received) -> Result<(), Flaw> {
    let bytes = match &received.bytes {
        ReceivedBytes::Own(slice) => slice.to_vec(),
        ReceivedBytes::Mapped(mapped) => {
            let mut bytes = vec![0; mapped.len()];
            mapped.load(0, &mut bytes);
            bytes
        }
        ReceivedBytes::Gpu(_) => panic!("nothing goes to a GPU here"),
        ReceivedBytes::Empty => Vec::new(),
    };
    let form_fits = received.form.as_ref().is_none_or(|form| *form == plan.form(channel, iteration));
    if form_fits && bytes == plan.bytes(channel, iteration) {
        Ok(())
    } else {
        Err(Flaw::Wrong((channel, iteration)))
    }
}

/// Seeds of each property.
const SEEDS: u64 = 150;

#[test]
fn every_tensor_comes_once_whole_and_in_order_whatever_is_late() {
    for seed in 0..SEEDS {
        let plan = Plan::draw(seed, &FaultKinds::harmless());
        for (rank, result) in plan.run().into_iter().enumerate() {
            assert!(result.is_ok(), "seed {seed}, rank {rank}: {result:?}");
        }
    }
}

#[test]
fn a_rank_that_cannot_go_on_names_the_peer_the_tensor_and_the_iteration() {
    let mut lost = 0;
    for seed in 0..SEEDS {
        let plan = Plan::draw(seed, &FaultKinds::all());
        for (rank, result) in plan.run().into_iter().enumerate() {
            match result {
                Ok(()) | Err(Flaw::Died) => {}
                Err(Flaw::Refused(error)) => {
                    let channel = plan.channels.iter().find(|channel| channel.tensor == error.tensor);
                    let channel = channel.expect("it is a tensor of the plan");
                    let ends = [channel.from, channel.to];
                    assert!(
                        ends.contains(&(rank as Rank)) && ends.contains(&error.peer),
                        "seed {seed}: {error}"
                    );
                    assert!(error.iteration <= plan.iterations, "seed {seed}: {error}");
                    let is_fault = !matches!(error.problem, Problem::Violation { .. } | Problem::Submit(_));
                    assert!(is_fault, "seed {seed}: {error}");
                    lost += 1;
                }
                Err(flaw) => panic!("seed {seed}, rank {rank}: {flaw:?}"),
            }
        }
    }
    assert!(lost > 20, "only {lost} ranks were told of a loss");
}

#[test]
fn each_mutant_is_caught() {
    for mutant in [Mutant::CreditIgnored, Mutant::ReadEarly, Mutant::ReleasedEarly, Mutant::ReleasedTwice] {
        let caught = (0..SEEDS).find(|&seed| {
            let mut plan = Plan::draw(seed, &FaultKinds::of(&[FaultKind::Delay, FaultKind::Reorder]));
            plan.iterations = 12;
            plan.mutant = Some(mutant);
            plan.run().iter().any(|result| {
                matches!(
                    result,
                    Err(Flaw::Wrong(_)
                        | Flaw::Refused(ChannelError { problem: Problem::Violation { .. }, .. }))
                )
            })
        });
        assert!(caught.is_some(), "{mutant:?} was not caught by {SEEDS} seeds");
    }
}

#[test]
fn a_peer_that_does_nothing_is_named_at_the_deadline() {
    let mut plan = Plan::draw(1, &FaultKinds::default());
    plan.ranks = 2;
    plan.depth = 2;
    plan.iterations = 3;
    let (form, space) = (Form::Put { bytes: 64 }, Space::Host);
    plan.channels = vec![Channel { tensor: "x".to_owned(), from: 0, to: 1, form, space }];
    plan.faults = Faults::none();
    let freeze = sim::Fault::Freeze { rank: 0, duration: 5 * PATIENCE, watcher: false };
    plan.faults.timed = vec![(Nanos(1_000_000), freeze)];
    let results = plan.run();
    let Err(Flaw::Refused(error)) = &results[1] else { panic!("{:?}", results[1]) };
    let said = error.to_string();
    assert!(said.contains("'x'") && said.contains("rank 0 did not send it"), "{said}");
    assert!(matches!(error.problem, Problem::Deadline { peer: 0, .. }), "{error:?}");
}
