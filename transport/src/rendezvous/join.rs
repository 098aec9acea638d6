//! Joining: ranks claim their numbers, compare settings, agree on a fabric and connect.
//!
//! The protocol runs through the store, in rounds: each rank writes its line, then reads the lines
//! of all. **Invariants:** all ranks take the same fabric and agree on the ranks of each host,
//! because each decides from the same lines. No rank returns before every rank is connected to all
//! others, or to those that it was given ([`join_to_some`]), so the first message of a caller
//! reaches a peer that is ready for it. Devices always have a secret: the user's, or one that rank
//! 0 makes and puts into the store, which admits only ranks that may join.
//!
//! A job to which processes come later may begin without some ranks of its world ([`Founding`]).
//! Rank 0 alone says which ranks begin it, under one key (`begin/0`), and all others read it there:
//! a rank that is not among them has met nobody, and asks for a seat.

mod beginning;
mod known_ranks;
mod reach_error;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub use self::known_ranks::{KnownRanks, OpenedPart};
use self::reach_error::ReachError;
use super::deferred_responder::DeferredResponder;
use super::device_factory::{DeviceFactory, Fabric, FabricChoice};
use super::error::JoinError;
use super::listening::listening_address;
use super::neighbours::{Hosts, ProbeListener, ProbeOutcome, probe};
use super::record::{Difference, PROTOCOL_VERSION, RankRecord, ranks_a_processor};
use super::seats::Founding;
use super::{Claim, OpenStoreError, Store, StoreError, Terms, World, cut};
use crate::auth::Secret;
use crate::clock::now;
use crate::device::{Address, Device, DeviceConfig, Event, Responder, Urgency};
use crate::hybrid::HostId;
use crate::tls::Tls;
use crate::{Nanos, Rank};

/// Default of [`JoinOptions::timeout`].
pub const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How to join.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The fabric to use.
    pub fabric: FabricChoice,
    /// Settings that must be equal on all ranks, by name; their values are compared as text.
    pub knobs: Vec<(String, String)>,
    /// Signal slots for each peer.
    pub signal_slots: usize,
    /// How long ranks wait for each other.
    pub timeout: Duration,
}

/// A rank that has joined: it is connected to all its peers.
pub struct Joined {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: u32,
    /// This rank's number on its host, if known.
    pub local_rank: Option<u32>,
    /// How many of the ranks, this one included, are on this host and share its processors.
    pub ranks_here: u32,
    /// By rank: ranks for each processor that it may run on, rounded up, the same on all ranks: 1
    /// if each has a processor of its own. Ranks count that have no other processors than it has.
    pub ranks_a_processor: Vec<u32>,
    /// The fabric that the ranks agreed on.
    pub fabric: Fabric,
    /// By rank: the number of its host, the same on all ranks. Ranks of one number share memory, if
    /// the fabric does.
    pub hosts: Vec<u32>,
    /// The device, connected to all peers, or to those that [`join_to_some`] was given.
    pub device: Box<dyn Device>,
    /// By rank: the address of its device, to connect to it.
    pub addresses: Vec<Address>,
    /// Events that came after `Connected`, for the caller's first poll.
    pub events: Vec<Event>,
    /// What the ranks know of each other, for parts of this world; `None` for a rank that is alone,
    /// and where others come later.
    pub known: Option<Arc<KnownRanks>>,
    /// The store where the ranks met; `None` for a rank that is alone. Rank 0 should keep it until
    /// the job ends: the store tells processes that come too late that all ranks are there.
    pub store: Option<Box<dyn Store>>,
    /// The end of [`JoinOptions::timeout`]: for later rounds of the ranks in the store.
    pub deadline: Nanos,
}

impl fmt::Debug for Joined {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Joined(rank {} of {}, {})", self.rank, self.world_size, self.fabric)
    }
}

/// Joins all ranks of `world`, over the fabrics of this machine.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join(
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
) -> Result<Joined, JoinError> {
    join_over(world, options, responder, &mut super::SystemDevices)
}

/// As [`join`], over devices made by `factory`.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join_over(
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
    fabrics: &mut dyn DeviceFactory,
) -> Result<Joined, JoinError> {
    let started = now();
    if world.world_size == 1 {
        return alone(world, options, None, responder, fabrics);
    }
    let store = world.open_store(started + options.timeout)?;
    let store = store.ok_or(JoinError::NoRendezvous { world_size: world.world_size })?;
    run_with_all(JoinProtocol::new(world, options, started, store, responder, fabrics))
}

/// As [`join`], with this store, which only the ranks of `world` use.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join_at(
    store: Box<dyn Store>,
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
) -> Result<Joined, JoinError> {
    let fabrics = &mut super::SystemDevices;
    run_with_all(JoinProtocol::new(world, options, now(), store, responder, fabrics))
}

/// As [`join`], or [`join_at`] with a store, but connects only to these ranks: at least one, and
/// each of them connects to this rank too. The device connects to others later, by
/// [`Joined::addresses`], and then waits for them without a limit of its own.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join_to_some(
    store: Option<Box<dyn Store>>,
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
    peers: &[Rank],
) -> Result<Joined, JoinError> {
    let (started, fabrics) = (now(), &mut super::SystemDevices);
    let store = match store {
        Some(store) => store,
        None => {
            let store = world.open_store(started + options.timeout)?;
            store.ok_or(JoinError::NoRendezvous { world_size: world.world_size })?
        }
    };
    let protocol = JoinProtocol::new(world, options, started, store, responder, fabrics);
    run_with_all(JoinProtocol { only: Some(peers), ..protocol })
}

/// How the ranks of a world met.
pub(crate) enum Met {
    /// This rank is among those that meet.
    Here {
        /// What it has of the others. What is there by rank is here by place among `ranks`.
        joined: Box<Joined>,
        /// What all devices have in common.
        terms: Terms,
        /// The ranks that met, in order.
        ranks: Vec<Rank>,
    },
    /// The others have begun the job without this rank. Their store.
    Late(Box<dyn Store>),
}

/// As [`join_at`], or alone, with devices of all seats, and the store is not sealed: others come
/// later. Where processes of other hosts may come, the device shares memory inside of a host and
/// takes sockets or RDMA across, also while there is one host.
pub(crate) fn found(
    world: &World,
    options: &JoinOptions,
    founding: Founding,
    responder: Arc<dyn Responder>,
    store: Option<Box<dyn Store>>,
) -> Result<Met, JoinError> {
    let fabrics = &mut super::SystemDevices;
    let world_size = world.world_size;
    if world_size == 1 {
        let seats = founding.seats();
        let secret = world.secret.clone().unwrap_or_else(Secret::fresh);
        let path = store.as_ref().and_then(|store| store.path());
        let own = RankRecord::own(1, world.host.as_deref(), None, path, &[]);
        let address = || listening_address(&World { rank: 0, ..world.clone() }, &[own], true);
        let address = match options.fabric {
            FabricChoice::Only(Fabric::Shm) => None,
            FabricChoice::Only(_) => address()?,
            FabricChoice::Auto => address().unwrap_or_default(),
        };
        let world = World { rank: 0, secret: Some(secret.clone()), world_size: seats, ..world.clone() };
        let mut joined = alone(&world, options, address, responder, fabrics)?;
        joined.store = store;
        let listens_outside = address.is_some() && joined.fabric != Fabric::Shm;
        let terms = Terms::new(joined.fabric, seats, secret, listens_outside);
        return Ok(Met::Here { joined: Box::new(joined), terms, ranks: vec![0] });
    }
    let store = store.ok_or(JoinError::NoRendezvous { world_size })?;
    let protocol = JoinProtocol::new(world, options, now(), store, responder, fabrics);
    run(JoinProtocol { founding: Some(founding), ..protocol })
}

/// All ranks of the world meet.
fn run_with_all(protocol: JoinProtocol<'_>) -> Result<Joined, JoinError> {
    match run(protocol)? {
        Met::Here { joined, .. } => Ok(*joined),
        Met::Late(_) => unreachable!("only a founding goes without ranks"),
    }
}

fn run(mut protocol: JoinProtocol<'_>) -> Result<Met, JoinError> {
    let world = protocol.world;
    let result = protocol.run();
    if let Err(error) = &result
        && protocol.concerns_all(error)
        && !protocol.have_begun_without_it()
    {
        protocol.store.fail(&error.to_string(), protocol.limit);
    }
    let Some(outcome) = result? else { return Ok(Met::Late(protocol.store)) };
    let JoinOutcome { fabric, records, ranks_here, ranks_a_processor, hosts, connected, secret } = outcome;
    let Connected { device, events, addresses, listens_outside, .. } = connected;
    let seats = device.info().reach.len() as u32;
    let known = protocol
        .founding
        .is_none()
        .then(|| KnownRanks::new(fabric, protocol.options.fabric, secret.clone(), records, hosts.of.clone()));
    let terms = Terms::new(fabric, seats, secret, listens_outside);
    let (rank, world_size, local_rank) = (world.rank, world.world_size, world.local_rank);
    let joined = Joined {
        rank,
        world_size,
        local_rank,
        ranks_here,
        ranks_a_processor,
        fabric,
        hosts: hosts.of,
        device,
        addresses,
        events,
        known,
        store: Some(protocol.store),
        deadline: protocol.limit,
    };
    Ok(Met::Here { joined: Box::new(joined), terms, ranks: protocol.ranks })
}

/// A world of one: any device suffices. `address`: what it listens on; loopback when absent.
fn alone(
    world: &World,
    options: &JoinOptions,
    address: Option<IpAddr>,
    responder: Arc<dyn Responder>,
    fabrics: &mut dyn DeviceFactory,
) -> Result<Joined, JoinError> {
    let candidates: &[Fabric] = match &options.fabric {
        FabricChoice::Auto if address.is_some() => {
            &[Fabric::HybridVerbs, Fabric::Hybrid, Fabric::Shm, Fabric::Tcp]
        }
        FabricChoice::Auto => &[Fabric::Shm, Fabric::Tcp],
        FabricChoice::Only(fabric) => std::slice::from_ref(fabric),
    };
    let mut last = None;
    let host = HostId::new(0, world.host.as_deref());
    for &fabric in candidates {
        let secret = world.secret.clone().unwrap_or_else(Secret::fresh);
        match fabrics.make(
            fabric,
            host,
            &[host],
            config(world, options, (secret, address), options.timeout, Arc::clone(&responder)),
        ) {
            Ok(device) => {
                let (events, store) = (Vec::new(), None);
                let local_rank = Some(0);
                let (rank, world_size, ranks_here) = (0, 1, 1);
                let addresses = vec![device.info().address.clone()];
                return Ok(Joined {
                    rank,
                    world_size,
                    local_rank,
                    ranks_here,
                    ranks_a_processor: vec![1],
                    fabric,
                    hosts: vec![0],
                    device,
                    addresses,
                    events,
                    known: None,
                    store,
                    deadline: now() + options.timeout,
                });
            }
            Err(error) => last = Some(JoinError::Fabric { fabric, rank: 0, reason: error.to_string() }),
        }
    }
    Err(last.expect("there is a candidate"))
}

fn config(
    world: &World,
    options: &JoinOptions,
    (secret, address): (Secret, Option<IpAddr>),
    connect_timeout: Duration,
    responder: Arc<dyn Responder>,
) -> DeviceConfig {
    DeviceConfig {
        rank: world.rank,
        world_size: world.world_size,
        secret: Some(secret),
        signal_slots: options.signal_slots,
        connect_timeout,
        interface: world.interface.clone(),
        address,
        responder,
    }
}

/// The most time for trying shared memory, or RDMA, before another fabric is taken.
const SHARING_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a device tries to connect where ranks connect after they have joined: their calls have
/// deadlines, which pass before.
const CONNECT_ON_USE_LIMIT: Duration = Duration::from_secs(30 * 24 * 3600);

/// How long a rank waits in the store between two polls of its device, which its peers may need to
/// connect, and for its device between two looks whether the store has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Share of the remaining time for the round in which ranks report why they did not connect,
const OUTCOME_SHARE: u32 = 5;

/// and its upper limit.
const OUTCOME_TIME_MAX: Duration = Duration::from_secs(2);

/// Share of the whole time for reporting a failure in the store,
const FAILURE_SHARE: u32 = 4;

/// and its upper limit.
const FAILURE_TIME_MAX: Duration = Duration::from_secs(1);

/// Events taken from a device at a time.
const EVENTS: usize = 64;

/// The result of the protocol.
struct JoinOutcome {
    fabric: Fabric,
    records: Vec<RankRecord>,
    /// The number of ranks that share this machine's processors.
    ranks_here: u32,
    /// Whether these ranks are more than their processors.
    ranks_a_processor: Vec<u32>,
    hosts: Hosts,
    connected: Connected,
    /// Of the devices.
    secret: Secret,
}

/// The parameters of a rank's devices.
struct DeviceParameters {
    /// The host of each rank.
    hosts: Vec<HostId>,
    secret: Secret,
    /// The address to listen on; loopback when absent.
    address: Option<IpAddr>,
}

/// A device that is connected to all peers.
struct Connected {
    deferred_responder: Arc<DeferredResponder>,
    device: Box<dyn Device>,
    /// By rank.
    addresses: Vec<Address>,
    /// Its other events.
    events: Vec<Event>,
    /// Whether it listens on an address that other hosts reach.
    listens_outside: bool,
}

struct JoinProtocol<'a> {
    world: &'a World,
    options: &'a JoinOptions,
    started: Nanos,
    /// The time at which this rank gives up.
    deadline: Nanos,
    /// The time until which the other ranks must learn the reason. The protocol ends then in any
    /// case.
    limit: Nanos,
    store: Box<dyn Store>,
    responder: Arc<dyn Responder>,
    fabrics: &'a mut dyn DeviceFactory,
    /// The ranks to connect to, if not to all.
    only: Option<&'a [Rank]>,
    /// How a job begins to which others come later.
    founding: Option<Founding>,
    /// The ranks that meet, in order: all of the world, until rank 0 has named those that begin. A
    /// *place* is a number in this list.
    ranks: Vec<Rank>,
}

impl<'a> JoinProtocol<'a> {
    fn new(
        world: &'a World,
        options: &'a JoinOptions,
        started: Nanos,
        store: Box<dyn Store>,
        responder: Arc<dyn Responder>,
        fabrics: &'a mut dyn DeviceFactory,
    ) -> Self {
        let limit = started + options.timeout;
        let deadline = started + (options.timeout - (options.timeout / FAILURE_SHARE).min(FAILURE_TIME_MAX));
        let (only, founding, ranks) = (None, None, (0..world.world_size).collect());
        Self { world, options, started, deadline, limit, store, responder, fabrics, only, founding, ranks }
    }

    /// The place of a rank that meets.
    fn place(&self, rank: Rank) -> usize {
        self.ranks.binary_search(&rank).expect("it is among those that meet")
    }

    /// `None`: the others have begun without this rank.
    fn run(&mut self) -> Result<Option<JoinOutcome>, JoinError> {
        // Sockets or RDMA alone need no probe for shared memory.
        let may_share = !matches!(self.options.fabric, FabricChoice::Only(Fabric::Tcp | Fabric::Verbs));
        let probe_listener =
            if may_share { ProbeListener::open() } else { Err(std::io::ErrorKind::Unsupported.into()) };
        let address = match &probe_listener {
            Ok(probe_listener) => Some(probe_listener.address()),
            Err(error) => ProbeListener::address_after(error),
        };
        let Some(records) = self.exchange_records(address)? else { return Ok(None) };
        let secret = self.agree_on_secret()?;
        let own = &records[self.place(self.world.rank)];
        let here = records.iter().filter(|record| own.same_machine(record));
        let ranks_here = here.count() as u32;
        let ranks_a_processor = ranks_a_processor(&records);
        if self.founding.is_none() {
            self.store.seal(self.deadline);
        }
        let hosts = if may_share {
            self.probe_neighbours(&records)?
        } else {
            Hosts::all_separate(self.ranks.len() as u32)
        };
        drop(probe_listener);
        self.check_users(&records, &hosts)?;
        let (fabric, mut connected) = self.agree_on_fabric(&records, &hosts, &secret)?;
        for (peer, reply) in connected.deferred_responder.open(&self.responder) {
            // A peer that gets no answer is lost or departed, which the device reports.
            let _ = connected.device.post(peer, &reply, Urgency::Ordinary);
        }
        self.release_store(&mut connected);
        Ok(Some(JoinOutcome { fabric, records, ranks_here, ranks_a_processor, hosts, connected, secret }))
    }

    /// The secret of the devices: the user's, or one for this host that rank 0 makes and puts into
    /// the store.
    fn agree_on_secret(&mut self) -> Result<Secret, JoinError> {
        if let Some(secret) = &self.world.secret {
            return Ok(secret.clone());
        }
        if self.world.rank == 0 {
            let made = Secret::fresh();
            self.store.set("secret/0", made.as_bytes(), self.deadline).map_err(JoinError::Store)?;
        }
        let made = self.wait("secret", &[0], None)?;
        Ok(Secret::of_this_host(&made[0]))
    }

    /// Refuses ranks of several users without a configured secret: no other fabric would admit
    /// them.
    fn check_users(&self, records: &[RankRecord], hosts: &Hosts) -> Result<(), JoinError> {
        match hosts.other_users {
            Some((low, high)) if self.world.secret.is_none() => Err(JoinError::OtherUser {
                first: self.rank_shown(low, records),
                second: self.rank_shown(high, records),
            }),
            _ => Ok(()),
        }
    }

    /// The rank at a place, and its host.
    fn rank_shown(&self, place: u32, records: &[RankRecord]) -> String {
        format!("rank {} on {}", self.ranks[place as usize], records[place as usize].host_shown())
    }

    /// Finds the ranks of each host, from this rank's probes of the ranks below it and from the
    /// lines of all others. Where not all pairs are connected a rank ends with the first neighbour
    /// that it finds: neighbours of one rank are neighbours.
    fn probe_neighbours(&mut self, records: &[RankRecord]) -> Result<Hosts, JoinError> {
        let place = self.place(self.world.rank);
        let own = &records[place];
        let mut line = String::new();
        for record in records[..place].iter().rev() {
            let outcome = match &record.probe_listener {
                _ if record.host != own.host => ProbeOutcome::Named,
                Some(probe_listener) => probe(probe_listener, self.deadline),
                None => ProbeOutcome::NotFound,
            };
            line.push(outcome.into());
            if self.only.is_some() && outcome == ProbeOutcome::Neighbours {
                break;
            }
        }
        // A store does not distinguish an empty value from none.
        let lines = self.exchange("neighbours", &format!("+{line}"), None, &mut Vec::new())?;
        let found = lines.iter().enumerate().map(|(place, line)| {
            let rank = self.ranks[place];
            let found: Option<Vec<_>> = line.chars().skip(1).map(ProbeOutcome::from_letter).collect();
            found.filter(|found| found.len() <= place).ok_or(JoinError::Unreadable { rank })
        });
        Ok(Hosts::new(&found.collect::<Result<Vec<_>, _>>()?))
    }

    /// Claims this rank's number and compares its record with those of all that meet. `None`: the
    /// others have begun without this rank.
    fn exchange_records(
        &mut self,
        probe_listener: Option<&str>,
    ) -> Result<Option<Vec<RankRecord>>, JoinError> {
        let (rank, deadline) = (self.world.rank, self.deadline);
        let knobs = compared_knobs(self.world, self.options)?;
        let (host, path) = (self.world.host.as_deref(), self.store.path());
        let own = RankRecord::own(self.world.world_size, host, probe_listener, path, &knobs);
        // In the form that the other ranks will decode.
        let encoded = own.encode();
        let own = decode(rank, &encoded, rank)?;
        if let Claim::Present(bytes) =
            self.store.claim(&format!("rank/{rank}"), &encoded, deadline).map_err(JoinError::Store)?
        {
            let other = decode(rank, &bytes, rank)?;
            // If the two records differ, the difference is the error.
            other.compare(rank, &own, rank)?;
            return Err(JoinError::Duplicate { rank, own: own.to_string(), other: other.to_string() });
        }
        // Rank 0 first: a rank with another world size would otherwise wait for ranks that do not
        // exist.
        let first = self.wait("rank", &[0], None)?;
        decode(0, &first[0], rank)?.compare(0, &own, rank)?;
        if !self.agree_on_ranks()? {
            return Ok(None);
        }
        let bytes = self.wait("rank", &self.ranks.clone(), None)?;
        let mut records = Vec::with_capacity(bytes.len());
        for (&other, bytes) in self.ranks.iter().zip(&bytes) {
            let record = decode(other, bytes, rank)?;
            own.compare(rank, &record, other)?;
            records.push(record);
        }
        Ok(Some(records))
    }

    fn missing(&self, ranks: Vec<Rank>, fewest: u32, refused: Option<String>) -> JoinError {
        let (world_size, waited) = (self.world.world_size, now().since(self.started));
        JoinError::Missing { ranks, world_size, fewest, waited, refused }
    }

    /// Chooses the fabric, and connects.
    fn agree_on_fabric(
        &mut self,
        records: &[RankRecord],
        hosts: &Hosts,
        secret: &Secret,
    ) -> Result<(Fabric, Connected), JoinError> {
        let best = hosts.fabric();
        let is_asked_for = match self.options.fabric {
            FabricChoice::Only(Fabric::Shm) if best != Fabric::Shm => {
                return Err(self.not_one_host(records, hosts));
            }
            FabricChoice::Only(fabric) => Some(fabric),
            FabricChoice::Auto => None,
        };
        let others_come = self.founding.is_some();
        let address = match is_asked_for.unwrap_or(best) {
            // Ranks that share memory are on one host.
            Fabric::Shm if is_asked_for.is_some() || !others_come => None,
            Fabric::Shm => self.address_for_others(records)?,
            _ => self.listening_address(records)?,
        };
        let hosts_of_world = self.hosts_of_world(records, hosts);
        let parameters = DeviceParameters { hosts: hosts_of_world, secret: secret.clone(), address };
        let (fabric, why, connected) = match is_asked_for {
            Some(fabric) => {
                let limit = self.last_connect_limit();
                (fabric, "it was asked for".to_owned(), self.connect(fabric, &parameters, limit)??)
            }
            None => self.connect_best(best, &parameters, &self.locality_text(records, hosts))?,
        };
        let (ranks, count) = (self.ranks.len(), hosts.count());
        let line = match fabric {
            Fabric::Shm => format!("shm between all of {ranks} ranks ({why})"),
            Fabric::Tcp => format!("tcp between all of {ranks} ranks ({why})"),
            Fabric::Verbs => format!("verbs between all of {ranks} ranks ({why})"),
            Fabric::Hybrid => format!("shm within {count} hosts of {ranks} ranks, tcp across ({why})"),
            Fabric::HybridVerbs => format!("shm within {count} hosts of {ranks} ranks, verbs across ({why})"),
        };
        if self.world.rank == 0 {
            tracing::info!("fabric: {line}");
        } else {
            tracing::debug!("fabric: {line}");
        }
        Ok((fabric, connected))
    }

    /// The address on which this rank, one of a host that has all of them, listens for processes of
    /// other hosts. `None` on all ranks: one of them has none, so no such process can join.
    fn address_for_others(&mut self, records: &[RankRecord]) -> Result<Option<IpAddr>, JoinError> {
        let address = self.listening_address(records).unwrap_or_else(|error| {
            tracing::info!("{error}: no process of another host can join");
            None
        });
        let line = if address.is_some() { "+" } else { "-" };
        let lines = self.exchange("others", line, None, &mut Vec::new())?;
        Ok(address.filter(|_| lines.iter().all(|line| line == "+")))
    }

    /// The address to listen on.
    fn listening_address(&self, records: &[RankRecord]) -> Result<Option<IpAddr>, JoinError> {
        let place = self.place(self.world.rank) as Rank;
        let at_place = World { rank: place, ..self.world.clone() };
        // It knows places only.
        let of = |place: Rank| self.ranks[place as usize];
        listening_address(&at_place, records, self.founding.is_some()).map_err(|error| match error {
            JoinError::NoAddress { rank, host, reason } => {
                JoinError::NoAddress { rank: of(rank), host, reason }
            }
            JoinError::SecretRequired { rank, host, other, other_host } => {
                JoinError::SecretRequired { rank: of(rank), host, other: of(other), other_host }
            }
            error => error,
        })
    }

    /// The host of each rank of the world. A rank that is not there is on a host of its own.
    fn hosts_of_world(&self, records: &[RankRecord], hosts: &Hosts) -> Vec<HostId> {
        let mut of_world = vec![HostId::new(hosts.count(), None); self.world.world_size as usize];
        self.ranks.iter().zip(hosts.ids(records)).for_each(|(rank, host)| of_world[*rank as usize] = host);
        of_world
    }

    /// The text of a reason why two ranks are not on one host, or the text that all are on one.
    fn locality_text(&self, records: &[RankRecord], hosts: &Hosts) -> String {
        let Some((low, high, outcome)) = hosts.separate_pair else {
            return format!("one host, {}: descriptors arrive and map", records[0].host_shown());
        };
        let (low, high) = (low as usize, high as usize);
        let same_machine = records[low].same_machine(&records[high]);
        let reason = outcome.reason(same_machine);
        format!("rank {} and rank {}: {reason}", self.ranks[high], self.ranks[low])
    }

    /// Shared memory was requested, and two ranks cannot share any.
    fn not_one_host(&self, records: &[RankRecord], hosts: &Hosts) -> JoinError {
        // Ranks of different hosts are no neighbours, except when a third rank separates them.
        let (low, high, outcome) = hosts.separate_pair.unwrap_or((0, 0, ProbeOutcome::NoDescriptor));
        let same_machine = records[low as usize].same_machine(&records[high as usize]);
        JoinError::DifferentHosts {
            first: self.rank_shown(low, records),
            second: self.rank_shown(high, records),
            reason: outcome.reason(same_machine),
        }
    }

    /// The best fabric that all ranks have, with the reason. A fabric works on all ranks or on
    /// none.
    fn connect_best(
        &mut self,
        best: Fabric,
        parameters: &DeviceParameters,
        locality: &str,
    ) -> Result<(Fabric, String, Connected), JoinError> {
        let others_come = self.founding.is_some() && parameters.address.is_some();
        let candidates: &[Fabric] = match best {
            Fabric::Shm if others_come => &[Fabric::HybridVerbs, Fabric::Hybrid, Fabric::Shm, Fabric::Tcp],
            Fabric::Shm => &[Fabric::Shm, Fabric::Tcp],
            _ if others_come => &[Fabric::HybridVerbs, Fabric::Hybrid, Fabric::Tcp],
            Fabric::Hybrid => &[Fabric::HybridVerbs, Fabric::Hybrid, Fabric::Tcp],
            _ => &[Fabric::Verbs, Fabric::Tcp],
        };
        let (last, tried) = candidates.split_last().expect("there are candidates");
        let mut why = locality.to_owned();
        for &fabric in tried {
            let left = self.deadline.since(now());
            match self.connect(fabric, parameters, (left / 2).min(SHARING_TIMEOUT))? {
                Ok(connected) => return Ok((fabric, why, connected)),
                // The next fabric is tried: the remedy of this one is for users who request it.
                Err(JoinError::Fabric { fabric, rank, reason }) => {
                    let cause = reason.split(';').next().unwrap_or_default();
                    why = format!("{why}; no {fabric}: rank {rank}: {cause}");
                }
                Err(error) => why = format!("{why}; {error}"),
            }
        }
        let limit = self.last_connect_limit();
        Ok((*last, why, self.connect(*last, parameters, limit)??))
    }

    /// The time limit of the last fabric: the remaining time without that of the outcome round.
    fn last_connect_limit(&self) -> Duration {
        let left = self.deadline.since(now());
        left - (left / OUTCOME_SHARE).min(OUTCOME_TIME_MAX)
    }

    /// Tries one fabric on all ranks. The outer error ends the protocol; the inner one means, on
    /// all ranks alike, that this fabric does not work.
    fn connect(
        &mut self,
        fabric: Fabric,
        parameters: &DeviceParameters,
        limit: Duration,
    ) -> Result<Result<Connected, JoinError>, JoinError> {
        let deferred_responder = Arc::new(DeferredResponder::default());
        let ranks = self.founding.map_or(self.world.world_size, |founding| founding.seats());
        let config = config(
            &World { world_size: ranks, ..self.world.clone() },
            self.options,
            (parameters.secret.clone(), parameters.address),
            if self.only.is_some() { CONNECT_ON_USE_LIMIT } else { limit },
            Arc::<DeferredResponder>::clone(&deferred_responder),
        );
        let rank = self.world.rank as usize;
        // `+` and the address, or `-` and the reason why there is none.
        let (mut device, line) =
            match self.fabrics.make(fabric, parameters.hosts[rank], &parameters.hosts, config) {
                Ok(device) => {
                    let line = format!("+{}", device.info().address);
                    (Some(device), line)
                }
                Err(error) => (None, format!("-{error}")),
            };
        let lines = self.exchange(
            &format!("{}/address", topic(fabric)),
            &line,
            device.as_deref_mut(),
            &mut Vec::new(),
        )?;
        if let Some(error) = self.first_failure(fabric, &lines) {
            return Ok(Err(error));
        }
        let mut events = Vec::new();
        let until = self.deadline.min(now() + limit);
        let mut line = "+".to_owned();
        if let Some(reached) = &mut device
            && let Err(error) = self.connect_all(&mut **reached, &lines, until, &mut events)
        {
            line = format!("{}{error}", if error.is_absence() { '~' } else { '-' });
        }
        let outcome = format!("{}/outcome", topic(fabric));
        self.write(&outcome, &line)?;
        if line != "+" {
            // Dropped at once, so that the others detect the loss before the time is up. But the
            // line comes first: a rank that detects the loss finds the line.
            device = None;
        }
        let outcomes = self.lines(&outcome, device.as_deref_mut(), &mut events)?;
        Ok(match (self.first_failure(fabric, &outcomes), device) {
            (None, Some(device)) => {
                let addresses = lines.iter().map(|line| Address(line[1..].to_owned())).collect();
                let is_outside = |address: IpAddr| !address.is_loopback();
                let listens_outside = fabric != Fabric::Shm && parameters.address.is_some_and(is_outside);
                Ok(Connected { deferred_responder, device, addresses, events, listens_outside })
            }
            (Some(error), _) => Err(error),
            (None, None) => unreachable!("without a device this rank's own line is a failure"),
        })
    }

    /// Connects to all peers, or to those it was asked for, and waits for all connections.
    fn connect_all(
        &self,
        device: &mut dyn Device,
        lines: &[String],
        until: Nanos,
        later: &mut Vec<Event>,
    ) -> Result<(), ReachError> {
        let address_of = |peer: Rank| &lines[self.place(peer)][1..];
        let peers = match self.only {
            Some(peers) => peers.to_vec(),
            None => self.ranks.iter().copied().filter(|&peer| peer != self.world.rank).collect(),
        };
        connect_to(device, peers, address_of, (now(), until), &|| self.store.ended(), later)
    }

    /// Tells rank 0 that this rank no longer needs the store; rank 0 waits for all ranks, so that
    /// it may close the store.
    fn release_store(&mut self, connected: &mut Connected) {
        if self.world.rank == 0 {
            // A rank that does not tell rank 0 is lost, and the device reports the loss.
            let others = self.ranks[1..].to_vec();
            let _ = self.wait("end", &others, Some((&mut *connected.device, &mut connected.events)));
        } else {
            let _ = self.store.set(&format!("end/{}", self.world.rank), b"", self.deadline);
        }
    }

    /// Writes this rank's line and returns the lines of all.
    fn exchange(
        &mut self,
        topic: &str,
        line: &str,
        device: Option<&mut (dyn Device + '_)>,
        events: &mut Vec<Event>,
    ) -> Result<Vec<String>, JoinError> {
        self.write(topic, line)?;
        self.lines(topic, device, events)
    }

    /// Writes this rank's line on a topic.
    fn write(&mut self, topic: &str, line: &str) -> Result<(), JoinError> {
        let key = format!("{topic}/{}", self.world.rank);
        self.store.set(&key, cut(line).as_bytes(), self.deadline).map_err(JoinError::Store)
    }

    /// Waits for the lines of all ranks on a topic, by place.
    fn lines(
        &mut self,
        topic: &str,
        device: Option<&mut (dyn Device + '_)>,
        events: &mut Vec<Event>,
    ) -> Result<Vec<String>, JoinError> {
        let lines = self.wait(topic, &self.ranks.clone(), device.map(|device| (device, events)))?;
        Ok(lines.iter().map(|line| String::from_utf8_lossy(line).into_owned()).collect())
    }

    /// Waits for the lines of these ranks on a topic, and polls the device during the wait.
    fn wait(
        &mut self,
        topic: &str,
        ranks: &[Rank],
        mut polled: Option<(&mut (dyn Device + '_), &mut Vec<Event>)>,
    ) -> Result<Vec<Vec<u8>>, JoinError> {
        let keys: Vec<_> = ranks.iter().map(|rank| format!("{topic}/{rank}")).collect();
        loop {
            // Polled before the store is asked. A rank writes its line before its device goes, so a
            // rank that is lost here and has no line in the store will write nothing more.
            let mut lost = Vec::new();
            if let Some((device, later)) = &mut polled {
                let mut events = Vec::with_capacity(EVENTS);
                device.poll(now(), &mut events);
                later.append(&mut events);
                lost.extend(later.iter().filter_map(|event| match event {
                    Event::PeerLost { peer, .. } | Event::Departed { peer } => Some(*peer),
                    _ => None,
                }));
            }
            let until =
                if polled.is_some() { self.deadline.min(now() + POLL_INTERVAL) } else { self.deadline };
            let error = match self.store.wait(&keys, until, self.limit) {
                Ok(values) => return Ok(values),
                Err(error) => error,
            };
            let StoreError::Missing { keys, refused, .. } = error else {
                return Err(unusable(error));
            };
            let ranks = ranks_of(&keys);
            if ranks.iter().any(|rank| lost.contains(rank)) || now() >= self.deadline {
                return Err(self.missing(ranks, self.world.world_size, refused));
            }
        }
    }

    /// The first rank that failed, with its reason. A rank that knows a cause (`-`) goes before
    /// ranks that only miss a peer (`~`): that peer may be the one that gave up.
    fn first_failure(&self, fabric: Fabric, lines: &[String]) -> Option<JoinError> {
        let lines = || self.ranks.iter().zip(lines);
        let of = |sign: char| lines().find_map(|(rank, line)| Some((*rank, line.strip_prefix(sign)?)));
        let unsigned =
            || lines().find(|(_, line)| !line.starts_with('+')).map(|(rank, line)| (*rank, &**line));
        let (rank, reason) = of('-').or_else(|| of('~')).or_else(unsigned)?;
        Some(JoinError::Fabric { fabric, rank, reason: reason.to_owned() })
    }

    /// Whether the error keeps the other ranks from going on too.
    fn concerns_all(&self, error: &JoinError) -> bool {
        match error {
            JoinError::Ended { .. } => false,
            // A rank outside rank 0's world is misconfigured; the world may be complete without it.
            JoinError::Differs(difference) => {
                difference.setting != "the world size"
                    || difference.first.1.parse().is_ok_and(|world_size: u32| self.world.rank < world_size)
            }
            _ => true,
        }
    }
}

/// Connects to these peers and waits for all connections. `ended`: why not all come any more.
fn connect_to<'a>(
    device: &mut dyn Device,
    mut missing: Vec<Rank>,
    address_of: impl Fn(Rank) -> &'a str,
    (started, until): (Nanos, Nanos),
    ended: &dyn Fn() -> Option<String>,
    later: &mut Vec<Event>,
) -> Result<(), ReachError> {
    for &peer in &missing {
        device.connect(peer, &Address(address_of(peer).to_owned()))?;
    }
    let mut events = Vec::with_capacity(EVENTS);
    loop {
        device.poll(now(), &mut events);
        let quiet = events.is_empty();
        for event in events.drain(..) {
            match event {
                Event::Connected { peer } => missing.retain(|&other| other != peer),
                Event::PeerLost { peer, cause } => {
                    return Err(ReachError::lost(peer, address_of(peer), cause));
                }
                other => later.push(other),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let left = until.since(now());
        if left.is_zero() {
            let (own, waited) = (device.info().rank, now().since(started));
            return Err(ReachError::late(missing, own, waited, address_of));
        }
        if let Some(reason) = ended() {
            return Err(ReachError::Ended(reason));
        }
        if quiet && let Some(armed) = device.arm() {
            armed.wait(now(), left.min(POLL_INTERVAL));
        }
    }
}

/// The topic's name in the store.
fn topic(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Shm => "shm",
        Fabric::Tcp => "tcp",
        Fabric::Hybrid => "hybrid",
        Fabric::Verbs => "verbs",
        Fabric::HybridVerbs => "hybrid-verbs",
    }
}

/// The ranks whose keys these are.
fn ranks_of(keys: &[String]) -> Vec<Rank> {
    keys.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok()).collect()
}

/// Why the store is of no more use.
fn unusable(error: StoreError) -> JoinError {
    match error {
        StoreError::Failed { reason } => JoinError::Ended { reason },
        error => JoinError::Store(error),
    }
}

/// The settings that must be equal on all ranks: those of the caller and those of every rank.
pub(crate) fn compared_knobs(
    world: &World,
    options: &JoinOptions,
) -> Result<Vec<(String, String)>, JoinError> {
    let given = if world.secret.is_some() { "set" } else { "not set" };
    let tls = world.secret.as_ref().map_or_else(Tls::from_env, Secret::tls);
    let tls = tls.map_err(OpenStoreError::Tls)?;
    let common = [
        ("fabric", options.fabric.to_string()),
        ("PLEACH_SECRET_FILE", given.to_owned()),
        ("PLEACH_TLS", tls.to_string()),
    ];
    let common = common.into_iter().map(|(name, value)| (name.to_owned(), value));
    Ok(options.knobs.iter().cloned().chain(common).collect())
}

fn decode(rank: Rank, bytes: &[u8], own: Rank) -> Result<RankRecord, JoinError> {
    match RankRecord::decode(bytes) {
        Ok(Ok(record)) => Ok(record),
        Ok(Err(version)) => Err(JoinError::Differs(Difference {
            setting: "the protocol version".to_owned(),
            first: (rank, version.to_string()),
            second: (own, PROTOCOL_VERSION.to_string()),
        })),
        Err(_) => Err(JoinError::Unreadable { rank }),
    }
}

#[cfg(test)]
mod tests;
