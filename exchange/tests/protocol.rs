//! A program that sends tensors and several that receive them, with links on which messages are
//! late, calls that are cancelled and programs that are killed, all by random steps.
//!
//! Outside of what decides stand the checks: each tensor is read by at most one receiver, none is
//! lost but with a receiver that was killed, a tensor that is read is kept, each call and each send
//! ends once, and at the end nothing is held or lent.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pleach_exchange::calls::{CallEvent, CallLimits};
use pleach_exchange::lease::{LeaseLimits, ReturnCounters, UNTOUCHED};
use pleach_exchange::message::Description;
use pleach_exchange::reference::LinkId;
use pleach_exchange::server::{Offer, Place, ServerEvent, ServerLimits};
use pleach_exchange::table::{Outcome, Request, TableLimits};
use pleach_exchange::{Calls, Key, Lease, Message, Server};
use pleach_transport::{Nanos, RegionKey, RemoteSlice};
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

const LIMITS: ServerLimits = ServerLimits {
    table: TableLimits {
        bytes_held: 300,
        tensors_held: 8,
        waiting_sends: 4,
        waiting_receives: 8,
        recent_requests: 8,
        ended_steps: 4,
    },
    leases: LeaseLimits { bytes_lent: 400, leases_per_link: 3, links: CLIENTS },
    calls_per_link: 4,
    wait: Duration::from_nanos(500),
};

const CLIENTS: usize = 3;
const KEYS: usize = 3;
const REGION: RegionKey = RegionKey(5);
/// Tensor `n` lies at `n` times as many bytes.
const STRIDE: u64 = 128;

/// What a program could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// A return does not say that nobody read the lease.
    ForgetsUntouched,
    /// A return says that nobody read the lease, though somebody did.
    ForgetsReading,
    /// The sender takes a lease as returned when it was answered.
    TakesEarly,
}

#[derive(Clone, Debug)]
enum Step {
    Send { key: usize, bytes: u64, patience: u64, is_lendable: bool },
    Ask { client: usize, key: usize, patience: u64 },
    Cancel { client: usize, call: usize },
    ToServer { client: usize },
    ToClient { client: usize },
    Drop { client: usize, lease: usize },
    Collect { client: usize },
    Abort { step: u64 },
    CleanUp { step: u64 },
    Pass(u64),
    Kill { client: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (client, key, at) = (0..CLIENTS, 0..KEYS, any::<usize>());
    let patience = prop_oneof![3 => Just(1_000_u64), 1 => 0_u64..20];
    let step = prop_oneof![
        10 => (key.clone(), 0..=STRIDE, patience.clone(), any::<bool>()).prop_map(
            |(key, bytes, patience, is_lendable)| Step::Send { key, bytes, patience, is_lendable }
        ),
        10 => (client.clone(), key, patience)
            .prop_map(|(client, key, patience)| Step::Ask { client, key, patience }),
        3 => (client.clone(), at).prop_map(|(client, call)| Step::Cancel { client, call }),
        14 => client.clone().prop_map(|client| Step::ToServer { client }),
        14 => client.clone().prop_map(|client| Step::ToClient { client }),
        8 => (client.clone(), at).prop_map(|(client, lease)| Step::Drop { client, lease }),
        8 => client.clone().prop_map(|client| Step::Collect { client }),
        1 => (0_u64..2).prop_map(|step| Step::Abort { step }),
        1 => (0_u64..2).prop_map(|step| Step::CleanUp { step }),
        2 => (0_u64..8).prop_map(Step::Pass),
        1 => client.prop_map(|client| Step::Kill { client }),
    ];
    prop::collection::vec(step, 0..150)
}

fn key(number: usize) -> Key {
    Key::new(number as u64 % 2, &format!("tensor {number}")).expect("a good name")
}

/// Counters in memory of both ends.
struct Counters {
    counters: [AtomicU64; 4],
    mutant: Option<Mutant>,
}

impl ReturnCounters for Counters {
    fn store(&self, slot: u32, count: u64) {
        let count = match self.mutant {
            Some(Mutant::ForgetsUntouched) => count & !UNTOUCHED,
            Some(Mutant::ForgetsReading) => count | UNTOUCHED,
            _ => count,
        };
        // Release: pairs with the acquire in `load`. One thread runs this test.
        self.counters[slot as usize].store(count, Ordering::Release);
    }

    fn load(&self, slot: u32) -> u64 {
        self.counters[slot as usize].load(Ordering::Acquire)
    }
}

/// A message, and the tensor whose bytes follow.
type Packet = (Vec<u8>, Option<Arc<u64>>);

struct Client {
    link: LinkId,
    calls: Calls,
    counters: Arc<Counters>,
    to_server: VecDeque<Packet>,
    to_client: VecDeque<Packet>,
    /// Calls that have not ended.
    open: BTreeSet<u64>,
    /// What it reads, and the tensor.
    leases: Vec<(Lease, u64)>,
    is_alive: bool,
}

struct World {
    server: Server<Arc<u64>>,
    clients: Vec<Client>,
    now: Nanos,
    /// Every tensor that was sent, by its number.
    tensors: Vec<Arc<u64>>,
    /// Sends that have not ended.
    sends: BTreeSet<pleach_exchange::table::SendId>,
    /// How often each tensor was read.
    read: BTreeMap<u64, u32>,
    /// Tensors that came back to who sent them.
    failed: BTreeSet<u64>,
    /// Tensors whose step has ended, or that were on their way to a receiver that was killed.
    given_up: BTreeSet<u64>,
    /// By tensor: its step, and the receiver to which it is on its way.
    steps: Vec<u64>,
    answered: BTreeMap<u64, usize>,
    request: u64,
    mutant: Option<Mutant>,
}

fn check(holds: bool, what: &str) -> Result<(), TestCaseError> {
    if holds { Ok(()) } else { Err(TestCaseError::fail(what.to_owned())) }
}

fn is_right<V, E: std::fmt::Display>(result: Result<V, E>) -> Result<V, TestCaseError> {
    result.map_err(|error| TestCaseError::fail(error.to_string()))
}

impl World {
    fn new(mutant: Option<Mutant>) -> Self {
        let mut server = Server::new(1, LIMITS);
        let clients = (0..CLIENTS).map(|number| {
            let link = LinkId(number as u64 + 10);
            // The last one cannot read the sender's memory.
            server.open_link(link, number + 1 < CLIENTS).expect("is new");
            let counters = Arc::new(Counters { counters: [const { AtomicU64::new(0) }; 4], mutant });
            let limits = CallLimits { calls: 5, slots: 3, inline_bytes: STRIDE };
            let mut calls = Calls::new("the sender", link, limits, counters.clone());
            calls.add_region(REGION, 1 << 20).expect("is the first");
            let (to_server, to_client) = (VecDeque::new(), VecDeque::new());
            let (open, leases) = (BTreeSet::new(), Vec::new());
            Client { link, calls, counters, to_server, to_client, open, leases, is_alive: true }
        });
        let clients = clients.collect();
        let (tensors, sends, read, steps) = (Vec::new(), BTreeSet::new(), BTreeMap::new(), Vec::new());
        let (failed, given_up, answered) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        Self {
            server,
            clients,
            now: Nanos(50),
            tensors,
            sends,
            read,
            failed,
            given_up,
            steps,
            answered,
            request: 0,
            mutant,
        }
    }

    fn run(&mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            self.step(step)?;
            self.events()?;
            self.compare()?;
        }
        self.end()
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let now = self.now;
        match *step {
            Step::Send { key: number, bytes, patience, is_lendable } => {
                self.send(number, bytes, Nanos(now.0 + patience), is_lendable);
            }
            Step::Ask { client, key: number, patience } => {
                self.request += 1;
                let request = Request { id: self.request, incarnation: Some(1) };
                let client = &mut self.clients[client];
                if client.is_alive
                    && let Ok(call) = client.calls.ask(now, &key(number), request, Nanos(now.0 + patience))
                {
                    client.open.insert(call);
                }
            }
            Step::Cancel { client, call } => {
                let client = &mut self.clients[client];
                if let Some(call) = client.open.iter().nth(call % client.open.len().max(1)).copied()
                    && client.calls.cancel(now, call)
                {
                    client.open.remove(&call);
                }
            }
            Step::ToServer { client } => self.deliver_to_server(client)?,
            Step::ToClient { client } => self.deliver_to_client(client)?,
            Step::Drop { client, lease } => {
                let leases = &mut self.clients[client].leases;
                if !leases.is_empty() {
                    leases.swap_remove(lease % leases.len());
                }
            }
            Step::Collect { client } => self.collect(client)?,
            Step::Abort { step } => {
                self.server.abort(now, step, "a test");
                self.server.clean_up(now, step);
                self.give_up(step);
            }
            Step::CleanUp { step } => {
                self.server.clean_up(now, step);
                self.give_up(step);
            }
            Step::Pass(time) => {
                self.now = Nanos(now.0 + time);
                self.server.expire(self.now);
                self.clients.iter_mut().for_each(|client| client.calls.expire(self.now));
            }
            Step::Kill { client } => self.kill(client),
        }
        Ok(())
    }

    fn send(&mut self, number: usize, bytes: u64, deadline: Nanos, is_lendable: bool) {
        let value = self.tensors.len() as u64;
        let tensor = Arc::new(value);
        let buffer = RemoteSlice { key: REGION, offset: value * STRIDE, len: STRIDE };
        let place = is_lendable.then_some(Place { buffer, part: 0..bytes });
        let description = Description::new(&value.to_le_bytes()).expect("is short");
        let offer = Offer { tensor: tensor.clone(), description, place };
        self.tensors.push(tensor);
        self.steps.push(key(number).step());
        match self.server.send(self.now, &key(number), bytes, offer, deadline) {
            Ok(send) => {
                self.sends.insert(send);
            }
            Err(unsent) => {
                self.failed.insert(*unsent.tensor.tensor);
            }
        }
    }

    /// A step has ended: what was sent in it may never be read.
    fn give_up(&mut self, step: u64) {
        let of_step = (0..).zip(&self.steps).filter(|(_, of)| **of == step);
        self.given_up.extend(of_step.map(|(tensor, _)| tensor));
    }

    fn deliver_to_server(&mut self, client: usize) -> Result<(), TestCaseError> {
        let Client { link, to_server, is_alive, .. } = &mut self.clients[client];
        if let Some((bytes, _)) = to_server.pop_front()
            && *is_alive
        {
            let message = is_right(Message::decode(&bytes))?;
            check(message.is_for_server(), "a message for the other side")?;
            is_right(self.server.message(self.now, *link, message))?;
        }
        Ok(())
    }

    fn deliver_to_client(&mut self, number: usize) -> Result<(), TestCaseError> {
        let client = &mut self.clients[number];
        let Some((bytes, tensor)) = client.to_client.pop_front() else { return Ok(()) };
        let message = is_right(Message::decode(&bytes))?;
        check(!message.is_for_server(), "a message for the other side")?;
        is_right(client.calls.message(self.now, message))?;
        self.client_events(number, tensor)
    }

    fn client_events(&mut self, number: usize, tensor: Option<Arc<u64>>) -> Result<(), TestCaseError> {
        let client = &mut self.clients[number];
        for event in client.calls.take_events() {
            match event {
                CallEvent::Post(message) => client.to_server.push_back((message.encode(), None)),
                CallEvent::Lent { call, lease, description } => {
                    check(client.open.remove(&call), "a call ended twice")?;
                    let value = lease.slice().offset / STRIDE;
                    check(description.as_bytes() == value.to_le_bytes(), "another tensor's description")?;
                    *self.read.entry(value).or_default() += 1;
                    client.leases.push((lease, value));
                }
                CallEvent::Inline { call, lease, description, .. } => {
                    check(client.open.remove(&call), "a call ended twice")?;
                    let value = **tensor.as_ref().expect("its bytes follow");
                    check(description.as_bytes() == value.to_le_bytes(), "another tensor's description")?;
                    *self.read.entry(value).or_default() += 1;
                    drop(lease);
                }
                CallEvent::Skip { .. } => check(tensor.is_some(), "there are no bytes to skip")?,
                CallEvent::Failed { call, .. } => check(client.open.remove(&call), "a call ended twice")?,
            }
        }
        Ok(())
    }

    fn collect(&mut self, client: usize) -> Result<(), TestCaseError> {
        let Client { link, counters, is_alive, .. } = &self.clients[client];
        if *is_alive {
            let is_early = self.mutant == Some(Mutant::TakesEarly);
            let collected =
                self.server.collect(self.now, *link, |slot| counters.load(slot) + u64::from(is_early));
            is_right(collected)?;
        }
        Ok(())
    }

    /// The program ends, and the sender is told.
    fn kill(&mut self, number: usize) {
        let client = &mut self.clients[number];
        client.is_alive = false;
        client.calls.lost("it was killed");
        client.leases.clear();
        client.to_client.clear();
        client.to_server.clear();
        self.server.sever(self.now, client.link);
        let on_their_way = self.answered.iter().filter(|(_, client)| **client == number);
        self.given_up.extend(on_their_way.map(|(tensor, _)| *tensor));
    }

    fn events(&mut self) -> Result<(), TestCaseError> {
        for event in self.server.take_events() {
            match event {
                ServerEvent::Post { link, message } => self.post(link, &message, None),
                ServerEvent::PostInline { link, message, tensor } => self.post(link, &message, Some(tensor)),
                ServerEvent::Outcome(Outcome::Sent { send }) => {
                    check(self.sends.remove(&send), "a send ended twice")?;
                }
                ServerEvent::Outcome(Outcome::SendFailed { send, tensor, .. }) => {
                    check(self.sends.remove(&send), "a send ended twice")?;
                    self.failed.insert(*tensor.tensor);
                }
                ServerEvent::Outcome(Outcome::Received { delivered, .. }) => {
                    *self.read.entry(*delivered.tensor.tensor).or_default() += 1;
                }
                ServerEvent::Outcome(Outcome::ReceiveFailed { .. }) => {}
            }
        }
        (0..CLIENTS).try_for_each(|client| self.client_events(client, None))
    }

    fn post(&mut self, link: LinkId, message: &Message, tensor: Option<Arc<u64>>) {
        let number = (link.0 - 10) as usize;
        if let Message::Lent { description, .. } | Message::Inline { description, .. } = message {
            let value = description.as_bytes().try_into().expect("is a number");
            self.answered.insert(u64::from_le_bytes(value), number);
        }
        let client = &mut self.clients[number];
        if client.is_alive {
            client.to_client.push_back((message.encode(), tensor));
        }
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        check(self.read.values().all(|count| *count == 1), "a tensor was read by two receivers")?;
        for (_, value) in self.clients.iter().flat_map(|client| &client.leases) {
            let tensor = &self.tensors[*value as usize];
            check(Arc::strong_count(tensor) > 1, "a tensor that is read was let go")?;
        }
        check(self.server.bytes_lent() <= LIMITS.leases.bytes_lent, "too much is lent")
    }

    /// All messages arrive, all leases are dropped, and what is left is received by the sender.
    fn end(&mut self) -> Result<(), TestCaseError> {
        // All calls and sends that wait end.
        self.step(&Step::Pass(10_000))?;
        self.events()?;
        for _ in 0..4 {
            for client in 0..CLIENTS {
                self.clients[client].leases.clear();
                while !self.clients[client].to_server.is_empty() || !self.clients[client].to_client.is_empty()
                {
                    self.deliver_to_server(client)?;
                    self.events()?;
                    self.deliver_to_client(client)?;
                    self.events()?;
                    self.clients[client].leases.clear();
                }
                self.collect(client)?;
                self.events()?;
                self.compare()?;
            }
        }
        check(self.server.bytes_lent() == 0, "something is still lent")?;
        check(self.clients.iter().all(|client| client.open.is_empty()), "a call did not end")?;
        check(self.sends.is_empty(), "a send did not end")?;
        for number in 0..KEYS {
            while self.server.bytes_held() > 0
                || self.tensors.iter().any(|tensor| Arc::strong_count(tensor) > 1)
            {
                let before = self.read.len();
                // It takes a tensor at once, or fails.
                is_right(self.server.receive(self.now, &key(number), Request::default(), self.now))?;
                self.events()?;
                if self.read.len() == before {
                    break;
                }
            }
        }
        self.compare()?;
        for tensor in &self.tensors {
            check(Arc::strong_count(tensor) == 1, "a tensor is still kept")?;
            let (is_read, has_failed) = (self.read.contains_key(tensor), self.failed.contains(tensor));
            check(!(is_read && has_failed), "a tensor came back and was read")?;
            let is_known = is_read || has_failed || self.given_up.contains(tensor);
            check(is_known, &format!("tensor {tensor} was lost"))?;
        }
        check(self.server.next_deadline().is_none(), "something still waits")
    }
}

proptest! {
    #![proptest_config(Config { cases: 2048, failure_persistence: None, ..Config::default() })]

    #[test]
    fn each_tensor_has_one_reader_and_none_is_lost(steps in steps()) {
        World::new(None).run(&steps)?;
    }
}

#[test]
fn a_program_that_breaks_its_part_is_found() {
    for mutant in [Mutant::ForgetsUntouched, Mutant::ForgetsReading, Mutant::TakesEarly] {
        let config =
            Config { cases: 512, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let found =
            TestRunner::new_with_rng(config, rng).run(&steps(), |steps| World::new(Some(mutant)).run(&steps));
        assert!(found.is_err(), "{mutant:?} is not found");
    }
}
