//! Seats of a job that takes new processes while it runs.
//!
//! The processes that begin the job meet as any ranks do ([`join`](super::join())), but enough of
//! their world suffice ([`Founding`]), and the store where they met stays open. One of them, the
//! holder, serves seats from it ([`SeatServer`]). A process that comes later finds the store at the
//! same address, and gets a [`SeatGrant`]:
//!
//! | key | by | value |
//! | --- | --- | --- |
//! | `seat/open` | the holder | its record: settings that must be equal |
//! | `seat/request-K` | the newcomer | the seat that it would like, or a person's question |
//! | `seat/answer-K-P` | the holder | the answer, in parts: a seat and what it needs, or a refusal |
//! | `seat/ready-K` | the newcomer | incarnation and address of its device |
//!
//! The holder tells the members of the newcomer, and both sides connect. Where the holder is gone,
//! another member opens the store again ([`SeatServer::reopen`]).
//!
//! **Invariant:** who does not prove the job's secret, or has other settings, is given no seat. The
//! server only introduces: who is a member is the members' agreement.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::backoff::Backoff;
use super::file::is_named;
use super::join::{Met, compared_knobs, found};
use super::listening::listening_address;
use super::outside::store_of;
use super::outside::table::Beat;
use super::record::RankRecord;
use super::{
    Claim, Fabric, JoinError, JoinOptions, Joined, OpenStoreError, Place, Registers, Rendezvous, Store,
    StoreError, SystemDevices, VALUE_BYTES_MAX, World,
};
use crate::auth::Secret;
use crate::clock::now;
use crate::device::{Address, Device, DeviceConfig, Incarnation, Responder};
use crate::hybrid::HostId;
use crate::rendezvous::DeviceFactory;
use crate::wire::{Malformed, Reader, Writer};
use crate::{Nanos, Rank};

const OPEN: &str = "seat/open";

/// In the place of the world's size: the job has as many ranks as it has now.
const ANY_SIZE: u32 = 0;

/// In the place of a seat: a question follows.
const NO_SEAT: u32 = u32::MAX;

/// The file in a rendezvous folder that members hold locked.
const MEMBERS: &str = "members";

/// Bytes of an answer in one value.
const PART_BYTES: usize = VALUE_BYTES_MAX - 8;

/// Parts of an answer at most: 4096 members with addresses of 200 bytes.
const PARTS_MAX: u32 = 64;

/// Newcomers and questions that one server takes at most, together; another one is opened then.
const REQUESTS_MAX: u64 = 64;

/// How long a newcomer looks for the server at a time where members hold its folder.
const LOOK: Duration = Duration::from_millis(100);

/// As [`LOOK`], in a store outside of the job: the holder has to be seen alive there.
const LOOK_OUTSIDE: Duration = Duration::from_secs(1);

/// As [`LOOK`], at each of several places.
const LOOK_AT_PLACES: Duration = Duration::from_millis(200);

/// How long a `TCPStore` is watched for a sign of life of the holder, and some more.
const HOLDER_GONE: Duration = Duration::from_secs(6);

/// How long the store may take to answer the holder.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// How long a member tries to say that it lives, while others look whether one does, and how long a
/// store outside of the job may take to take that.
const PRESENCE_LIMIT: Duration = Duration::from_secs(2);

/// How a job begins on one host to which processes of others may come.
const LATER_HOSTS: &str = "begin it over auto, tcp or verbs (Options::fabric, --fabric), with a PLEACH_SECRET_FILE and \
                           a PLEACH_RENDEZVOUS that other hosts reach";

/// What the devices of a job have in common.
#[derive(Clone, Debug)]
pub struct Terms {
    fabric: Fabric,
    seats: u32,
    secret: Secret,
    /// Whether they listen on addresses that other hosts reach.
    listens_outside: bool,
}

impl Terms {
    pub(crate) fn new(fabric: Fabric, seats: u32, secret: Secret, listens_outside: bool) -> Self {
        Self { fabric, seats, secret, listens_outside }
    }

    /// The fabric.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        self.fabric
    }

    /// The registers of the job with this digest, where ranks of `world` meet; `None`: there are
    /// none. `begins`: the job begins in this process.
    ///
    /// # Errors
    ///
    /// See [`OpenStoreError`].
    pub fn registers(
        &self,
        world: &World,
        job: &[u8; 32],
        begins: bool,
    ) -> Result<Option<Registers>, OpenStoreError> {
        Registers::open(world, &self.secret, job, begins)
    }

    fn encode(&self, writer: Writer, gives_secret: bool) -> Writer {
        let secret: &[u8] = if gives_secret { self.secret.as_bytes() } else { &[] };
        let fabric = self.fabric.to_string();
        let writer = writer.bytes(fabric.as_bytes()).u32(self.seats);
        writer.u8(u8::from(self.listens_outside)).bytes(secret)
    }

    fn decode(reader: &mut Reader<'_>, own: Option<&Secret>) -> Result<Self, Malformed> {
        let fabric = reader.text(32)?.parse().map_err(|_| Malformed)?;
        let (seats, listens_outside) = (reader.u32()?, reader.u8()? == 1);
        let given = reader.bytes(crate::auth::SECRET_BYTES_MAX)?;
        let secret = own.cloned().unwrap_or_else(|| Secret::of_this_host(given));
        Ok(Self { fabric, seats, secret, listens_outside })
    }
}

/// How a job begins: with all ranks of a world, or with enough of them.
#[derive(Clone, Copy, Debug)]
pub struct Founding {
    seats: u32,
    fewest: u32,
    wait: Duration,
    unit: u32,
}

impl Founding {
    /// Each device has `seats` ranks. When `fewest` ranks of the world are there, rank 0 among
    /// them, the others have so much time to come: at most half of the time that is left of the
    /// join's.
    #[must_use]
    pub fn new(seats: u32, fewest: u32, wait: Duration) -> Self {
        Self { seats, fewest, wait, unit: 1 }
    }

    /// Ranks begin in whole units of so many: ranks 0 to `unit - 1`, and so on.
    #[must_use]
    pub fn in_units_of(self, unit: u32) -> Self {
        Self { unit: unit.max(1), ..self }
    }

    /// Of these ranks, in order, those whose units are whole.
    pub(crate) fn whole_units(&self, ranks: &[Rank]) -> Vec<Rank> {
        let units = ranks.chunk_by(|one, next| one / self.unit == next / self.unit);
        units.filter(|unit| unit.len() as u32 == self.unit).flatten().copied().collect()
    }

    pub(crate) fn seats(&self) -> u32 {
        self.seats
    }

    pub(crate) fn fewest(&self) -> u32 {
        self.fewest
    }

    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }
}

/// How a process came to a job.
pub enum Arrival {
    /// It began the job with others of its world.
    Founded {
        /// The others. What is there by rank is here by place among `ranks`. The store is gone, or
        /// is the server's.
        joined: Joined,
        /// The ranks that began the job, in order.
        ranks: Vec<Rank>,
        /// The server, where this process is the holder.
        server: Option<SeatServer>,
        /// What all devices have in common.
        terms: Terms,
    },
    /// The job runs, and a member has given it a seat.
    Granted(SeatGrant),
}

/// A process that was given a seat, and is not connected yet.
pub struct SeatGrant {
    /// The seat: the rank of its device.
    pub seat: Rank,
    /// Its device, which is connected to nobody.
    pub device: Box<dyn Device>,
    /// What all devices have in common.
    pub terms: Terms,
    /// What the holder says of the members, in its own words.
    pub roster: Vec<u8>,
}

/// The addresses of the members that are in what the holder says of them.
pub type MemberAddresses = dyn Fn(&[u8]) -> Result<Vec<Address>, Malformed>;

/// Comes to a job: begins it with other ranks of `world`, or is given a seat where it runs.
/// `addresses` reads what the holder says.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn arrive(
    world: &World,
    options: &JoinOptions,
    founding: Founding,
    responder: &Arc<dyn Responder>,
    addresses: &MemberAddresses,
) -> Result<Arrival, JoinError> {
    let deadline = now() + options.timeout;
    loop {
        let is_last = now() >= deadline;
        match arrive_once(world, options, founding, (responder, addresses), deadline) {
            Err(error) if has_gone(&error) && !is_last => {}
            result => return result,
        }
    }
}

/// Whether the holder has just gone: another member opens the store.
fn has_gone(error: &JoinError) -> bool {
    matches!(error, JoinError::Store(StoreError::Lost { .. }) | JoinError::Closed { is_over: true, .. })
}

fn arrive_once(
    world: &World,
    options: &JoinOptions,
    founding: Founding,
    (responder, addresses): (&Arc<dyn Responder>, &MemberAddresses),
    deadline: Nanos,
) -> Result<Arrival, JoinError> {
    let (mut store, is_own) = open(world, deadline)?;
    if !is_own && let Some(mut running) = store.take() {
        if let Some(open) = await_open(&mut *running, deadline)? {
            let asked = (responder, addresses);
            return request_seat(running, &open, world, options, asked, deadline).map(Arrival::Granted);
        }
        store = Some(running);
    }
    let path = store.as_ref().and_then(|store| store.path());
    let (mut joined, terms, ranks) = match found(world, options, founding, Arc::clone(responder), store)? {
        Met::Here { joined, terms, ranks } => (*joined, terms, ranks),
        Met::Late(mut store) => {
            let open = await_begun(&mut *store, deadline)?;
            let of_member = (responder, addresses);
            return request_seat(store, &open, world, options, of_member, deadline).map(Arrival::Granted);
        }
    };
    let store = joined.store.take().filter(|_| world.rank == 0);
    let own = own_record(world, options, path)?;
    let server = store.map(|store| SeatServer::open(store, &own, deadline));
    let server = server.transpose().map_err(JoinError::Store)?;
    Ok(Arrival::Founded { joined, ranks, server, terms })
}

/// What the holder says first, once the others have begun the job.
fn await_begun(store: &mut dyn Store, deadline: Nanos) -> Result<Vec<u8>, JoinError> {
    match store.wait(&[OPEN.to_owned()], deadline, deadline) {
        Ok(values) => Ok(values.into_iter().next().unwrap_or_default()),
        Err(StoreError::Missing { .. }) => {
            let reason = "its ranks have not met yet".to_owned();
            Err(JoinError::Closed { reason, is_over: false })
        }
        Err(StoreError::Failed { reason }) => Err(JoinError::Ended { reason }),
        Err(error) => Err(JoinError::Store(error)),
    }
}

/// What the holder of a store says first where the job runs; `None`: its ranks meet there. Who has
/// made the store says either first.
fn await_open(store: &mut dyn Store, deadline: Nanos) -> Result<Option<Vec<u8>>, JoinError> {
    let mut look = |key: &str, until: Nanos| match store.wait(&[key.to_owned()], until, deadline) {
        Ok(values) => Ok(values.into_iter().next()),
        Err(StoreError::Missing { .. }) => Ok(None),
        Err(StoreError::Failed { reason }) => Err(JoinError::Ended { reason }),
        Err(error) => Err(JoinError::Store(error)),
    };
    let mut until = now();
    loop {
        if let Some(open) = look(OPEN, until)? {
            return Ok(Some(open));
        }
        if look("rank/0", now())?.is_some() || now() >= deadline {
            return Ok(None);
        }
        until = deadline.min(now() + LOOK / 4);
    }
}

/// The store at the rendezvous address, and whether this process has made it: rank 0 does, unless
/// the job runs.
fn open(world: &World, deadline: Nanos) -> Result<(Option<Box<dyn Store>>, bool), JoinError> {
    let as_rank = |rank: Rank, deadline: Nanos| {
        // A world of one has no store otherwise.
        World { rank, world_size: world.world_size.max(2), ..world.clone() }.open_store(deadline)
    };
    if world.rank != 0 || world.rendezvous.is_none() {
        return Ok((as_rank(world.rank, deadline)?, false));
    }
    match &world.rendezvous {
        Some(Rendezvous::File { folder } | Rendezvous::JobFolder { folder }) => {
            if let Ok(store) = as_rank(1, now()) {
                return Ok((store, false));
            }
            while is_inhabited(folder) && now() < deadline {
                if let Ok(store) = as_rank(1, deadline.min(now() + LOOK)) {
                    return Ok((store, false));
                }
            }
        }
        // Another one of the places may be served.
        Some(Rendezvous::TcpList { places }) => {
            if let Some(store) = served(world, places, deadline) {
                return Ok((Some(store), false));
            }
        }
        Some(rendezvous) => {
            if let Some(mut outside) = store_of(rendezvous).map_err(OpenStoreError::Outside)? {
                while outside.is_inhabited(deadline).map_err(OpenStoreError::Outside)? && now() < deadline {
                    match as_rank(1, deadline.min(now() + LOOK_OUTSIDE)) {
                        Ok(store) => return Ok((store, false)),
                        // No member has opened it again yet.
                        Err(OpenStoreError::NobodyThere { .. }) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        None => {}
    }
    match as_rank(0, deadline) {
        Err(error) if is_served_elsewhere(&error) => {
            as_rank(1, deadline).map(|store| (store, false)).map_err(|_| error.into())
        }
        result => Ok((result?, true)),
    }
}

/// Whether the store is another process's: that has made it, or the address is another host's.
fn is_served_elsewhere(error: &OpenStoreError) -> bool {
    match error {
        OpenStoreError::PortInUse { .. } | OpenStoreError::Busy { .. } | OpenStoreError::InUse { .. } => true,
        OpenStoreError::Listen { source, .. } => source.kind() == ErrorKind::AddrNotAvailable,
        _ => false,
    }
}

/// The store at one of these places, where one is served.
fn served(world: &World, places: &[Place], deadline: Nanos) -> Option<Box<dyn Store>> {
    places.iter().find_map(|Place { host, port }| {
        let rendezvous = Some(Rendezvous::Tcp { host: host.clone(), port: *port });
        let one = World { rank: 1, world_size: world.world_size.max(2), rendezvous, ..world.clone() };
        one.open_store(deadline.min(now() + LOOK_AT_PLACES)).ok().flatten()
    })
}

/// The record of this process, by which settings are compared.
fn own_record(
    world: &World,
    options: &JoinOptions,
    path: Option<super::StorePath>,
) -> Result<RankRecord, JoinError> {
    let knobs = compared_knobs(world, options)?;
    Ok(RankRecord::own(ANY_SIZE, world.host.as_deref(), None, path, &knobs))
}

/// Asks for a seat, and waits for it.
fn request_seat(
    mut store: Box<dyn Store>,
    open: &[u8],
    world: &World,
    options: &JoinOptions,
    (responder, addresses): (&Arc<dyn Responder>, &MemberAddresses),
    deadline: Nanos,
) -> Result<SeatGrant, JoinError> {
    let unreadable = || JoinError::Unreadable { rank: world.rank };
    let holder = RankRecord::decode(open).map_err(|_| unreadable())?.map_err(|_| unreadable())?;
    let own = own_record(world, options, store.path())?;
    let own = RankRecord::decode(&own.encode()).map_err(|_| unreadable())?.map_err(|_| unreadable())?;
    holder.compare(0, &own, world.rank)?;
    let wanted = Writer::default().u32(world.rank).finish();
    let number = take_number(&mut *store, &wanted, deadline)?;
    let answer = read_answer(&mut *store, number, deadline)?;
    let mut reader = Reader::new(&answer);
    if reader.u8().map_err(|_| unreadable())? == 0 {
        let reason = reader.text_to_end(answer.len()).map_err(|_| unreadable())?.to_owned();
        return Err(JoinError::Closed { reason, is_over: false });
    }
    let seat = reader.u32().map_err(|_| unreadable())?;
    let terms = Terms::decode(&mut reader, world.secret.as_ref()).map_err(|_| unreadable())?;
    if seat >= terms.seats {
        return Err(unreadable());
    }
    let roster = reader.rest(answer.len()).map_err(|_| unreadable())?.to_vec();
    let members = addresses(&roster).map_err(|_| unreadable())?;
    let host = HostId::among(&members, world.host.as_deref());
    let device = device(world, options, &terms, (seat, host), [&holder, &own], Arc::clone(responder))?;
    let info = device.info();
    let ready = Writer::default().u64(info.incarnation.0).raw(info.address.0.as_bytes()).finish();
    store.set(&format!("seat/ready-{number}"), &ready, deadline).map_err(JoinError::Store)?;
    Ok(SeatGrant { seat, device, terms, roster })
}

/// Takes the next number.
fn take_number(store: &mut dyn Store, wanted: &[u8], deadline: Nanos) -> Result<u64, JoinError> {
    for number in 0..REQUESTS_MAX {
        match store.claim(&format!("seat/request-{number}"), wanted, deadline).map_err(JoinError::Store)? {
            Claim::Taken => return Ok(number),
            Claim::Present(_) => {}
        }
    }
    Err(JoinError::Closed { reason: "too many processes have come at once".to_owned(), is_over: true })
}

fn read_answer(store: &mut dyn Store, number: u64, deadline: Nanos) -> Result<Vec<u8>, JoinError> {
    let mut answer = Vec::new();
    let (mut part, mut parts) = (0, 1);
    while part < parts {
        let keys = [format!("seat/answer-{number}-{part}")];
        let value = match store.wait(&keys, deadline, deadline) {
            Ok(values) => values.into_iter().next().unwrap_or_default(),
            Err(StoreError::Missing { .. }) => {
                let reason = "no member has answered in time".to_owned();
                return Err(JoinError::Closed { reason, is_over: false });
            }
            Err(error) => return Err(JoinError::Store(error)),
        };
        let mut reader = Reader::new(&value);
        parts = reader.u32().unwrap_or(0).min(PARTS_MAX);
        answer.extend_from_slice(reader.rest(value.len()).unwrap_or_default());
        part += 1;
    }
    Ok(answer)
}

/// The device on a seat. `records`: of the holder and of this process.
fn device(
    world: &World,
    options: &JoinOptions,
    terms: &Terms,
    (seat, host): (Rank, HostId),
    [holder, own]: [&RankRecord; 2],
    responder: Arc<dyn Responder>,
) -> Result<Box<dyn Device>, JoinError> {
    let is_here = own.same_machine(holder) && own.network == holder.network;
    if !terms.listens_outside && !is_here {
        let reason = match terms.fabric {
            Fabric::Shm => "its members share the memory of one host",
            _ => "its members are on one host, and listen for no other one",
        };
        let reason = format!("{reason}; {LATER_HOSTS}");
        return Err(JoinError::Closed { reason, is_over: false });
    }
    let address = if terms.listens_outside {
        let mut elsewhere = holder.clone();
        elsewhere.network.clear();
        listening_address(&World { rank: 1, ..world.clone() }, &[elsewhere, own.clone()], false)?
    } else {
        None
    };
    let config = DeviceConfig {
        rank: seat,
        world_size: terms.seats,
        secret: Some(terms.secret.clone()),
        signal_slots: options.signal_slots,
        connect_timeout: options.timeout,
        interface: world.interface.clone(),
        address,
        responder,
    };
    let fabric = terms.fabric;
    let failed =
        |error: super::FabricError| JoinError::Fabric { fabric, rank: seat, reason: error.to_string() };
    SystemDevices.make(fabric, host, &[], config).map_err(failed)
}

/// Asks the member that gives seats a question of the caller's, and returns its answer. `world` has
/// the rendezvous address and the secret.
///
/// # Errors
///
/// See [`JoinError`]; at the latest at the deadline.
pub fn ask(world: &World, question: &[u8], deadline: Nanos) -> Result<Vec<u8>, JoinError> {
    let mut backoff = Backoff::until(deadline);
    loop {
        match ask_once(world, question, deadline) {
            Err(error) if has_gone(&error) && backoff.again() => {}
            result => return result,
        }
    }
}

fn ask_once(world: &World, question: &[u8], deadline: Nanos) -> Result<Vec<u8>, JoinError> {
    let asker = World { rank: 1, world_size: 2, ..world.clone() };
    let store = asker.open_store(deadline)?;
    let mut store = store.ok_or(JoinError::NoRendezvous { world_size: 2 })?;
    if await_open(&mut *store, deadline)?.is_none() {
        let reason = "it takes no questions: its ranks are still meeting, or it is no session".to_owned();
        return Err(JoinError::Closed { reason, is_over: false });
    }
    let value = Writer::default().u32(NO_SEAT).raw(question).finish();
    let number = take_number(&mut *store, &value, deadline)?;
    let answer = read_answer(&mut *store, number, deadline)?;
    let unreadable = || JoinError::Unreadable { rank: 0 };
    match answer.split_first() {
        Some((1, answer)) => Ok(answer.to_vec()),
        _ => Err(unreadable()),
    }
}

/// A process that has asked for a seat, or a question.
#[derive(Clone, Debug)]
pub struct SeatRequest {
    number: u64,
    wanted: Rank,
    question: Option<Vec<u8>>,
}

impl SeatRequest {
    /// The seat that it would like.
    #[must_use]
    pub fn wanted(&self) -> Rank {
        self.wanted
    }

    /// The question, where no seat is asked for.
    #[must_use]
    pub fn question(&self) -> Option<&[u8]> {
        self.question.as_deref()
    }
}

/// The server of a job, where this process holds it. Closed when it is dropped.
pub struct SeatServer {
    store: Box<dyn Store>,
    next: u64,
}

impl SeatServer {
    fn open(mut store: Box<dyn Store>, own: &RankRecord, deadline: Nanos) -> Result<Self, StoreError> {
        store.set(OPEN, &own.encode(), deadline)?;
        Ok(Self { store, next: 0 })
    }

    /// Opens the server at the rendezvous address where nobody holds it; `None` where the world has
    /// no address.
    ///
    /// # Errors
    ///
    /// Another process has it, the address is not of this host, or the store cannot be used.
    pub fn reopen(world: &World, options: &JoinOptions, deadline: Nanos) -> Result<Option<Self>, JoinError> {
        let begun = now();
        if let Some(Rendezvous::TcpList { places }) = &world.rendezvous
            && served(world, places, now() + LOOK_AT_PLACES.saturating_mul(places.len() as u32)).is_some()
        {
            let places: Vec<String> = places.iter().map(ToString::to_string).collect();
            return Err(OpenStoreError::InUse { place: places.join(",") }.into());
        }
        // Looking at other places took some of the time.
        let deadline = deadline + now().since(begun);
        let holder = World { rank: 0, world_size: world.world_size.max(2), ..world.clone() };
        // That the former holder is gone shows there only after a while.
        let is_outside = matches!(world.rendezvous, Some(Rendezvous::C10d { .. }));
        let deadline = if is_outside { deadline.max(now() + HOLDER_GONE) } else { deadline };
        let Some(store) = holder.open_store(deadline)? else { return Ok(None) };
        let own = own_record(world, options, store.path())?;
        Ok(Some(Self::open(store, &own, deadline).map_err(JoinError::Store)?))
    }

    /// Whether it has looked after as many newcomers and questions as one server does.
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.next == REQUESTS_MAX
    }

    /// The next process that has asked for a seat, if one has until then.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn next(&mut self, until: Nanos) -> Result<Option<SeatRequest>, StoreError> {
        let number = self.next;
        let Some(value) = self.value(format!("seat/request-{number}"), until)? else { return Ok(None) };
        self.next += 1;
        let mut reader = Reader::new(&value);
        let wanted = reader.u32().unwrap_or(0);
        let question = reader.rest(value.len()).unwrap_or_default().to_vec();
        let question = (wanted == NO_SEAT).then_some(question);
        Ok(Some(SeatRequest { number, wanted, question }))
    }

    /// Gives a seat. `roster`: what the newcomer is told of the members.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn invite(
        &mut self,
        request: &SeatRequest,
        seat: Rank,
        terms: &Terms,
        roster: &[u8],
        deadline: Nanos,
    ) -> Result<(), StoreError> {
        let gives_secret = terms.secret.is_of_this_host();
        let answer = terms.encode(Writer::default().u8(1).u32(seat), gives_secret).raw(roster).finish();
        self.answer(request, &answer, deadline)
    }

    /// Answers a question.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn reply(&mut self, request: &SeatRequest, answer: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        let answer = Writer::default().u8(1).raw(answer).finish();
        self.answer(request, &answer, deadline)
    }

    /// Refuses a newcomer.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn refuse(&mut self, request: &SeatRequest, reason: &str, deadline: Nanos) -> Result<(), StoreError> {
        let answer = Writer::default().u8(0).raw(super::cut(reason).as_bytes()).finish();
        self.answer(request, &answer, deadline)
    }

    fn answer(&mut self, request: &SeatRequest, answer: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        let parts = answer.len().div_ceil(PART_BYTES) as u32;
        for (part, bytes) in answer.chunks(PART_BYTES).enumerate() {
            let value = Writer::default().u32(parts).raw(bytes).finish();
            self.store.set(&format!("seat/answer-{}-{part}", request.number), &value, deadline)?;
        }
        Ok(())
    }

    /// Incarnation and address of the newcomer's device, if it has said them until then.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    pub fn arrived(
        &mut self,
        request: &SeatRequest,
        until: Nanos,
    ) -> Result<Option<(Incarnation, Address)>, StoreError> {
        let Some(value) = self.value(format!("seat/ready-{}", request.number), until)? else {
            return Ok(None);
        };
        let mut reader = Reader::new(&value);
        let arrived = reader.u64().and_then(|incarnation| {
            let address = reader.text_to_end(value.len())?.to_owned();
            Ok((Incarnation(incarnation), Address(address)))
        });
        Ok(arrived.ok())
    }

    fn value(&mut self, key: String, until: Nanos) -> Result<Option<Vec<u8>>, StoreError> {
        match self.store.wait(&[key], until, until + ANSWER_LIMIT) {
            Ok(values) => Ok(values.into_iter().next()),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Says, in a rendezvous folder or a store outside of the job, that a member of the job lives: then
/// a process that comes as rank 0 does not begin the job anew. Held until it is dropped, at the
/// latest when the process ends or a few seconds after that.
#[derive(Debug)]
pub struct Presence(Sign);

#[derive(Debug)]
enum Sign {
    Folder { file: File, path: PathBuf },
    Outside(#[allow(dead_code)] Beat), // Held alone.
}

impl Presence {
    /// `None`: the rendezvous is no folder and no such store, or cannot be written.
    #[must_use]
    pub fn of(world: &World) -> Option<Self> {
        let folder = match &world.rendezvous {
            Some(Rendezvous::File { folder } | Rendezvous::JobFolder { folder }) => folder,
            rendezvous => return Self::outside(rendezvous.as_ref()?),
        };
        let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).mode(0o600).custom_flags(flags);
        let path = folder.join(MEMBERS);
        let deadline = now() + PRESENCE_LIMIT;
        while now() < deadline {
            let file = options.open(&path).ok()?;
            match flock(&file, FlockOperation::NonBlockingLockShared) {
                // The file may have been removed since it was opened. Nobody would find it.
                Ok(()) if is_named(CWD, &path, &file) => return Some(Self(Sign::Folder { file, path })),
                // Somebody looks whether members are here, or the last one removes the file: both
                // hold it for a moment.
                Ok(()) | Err(Errno::WOULDBLOCK) => std::thread::yield_now(),
                Err(_) => return None,
            }
        }
        tracing::warn!("{} is locked: a process that comes as rank 0 may begin another job", path.display());
        None
    }

    fn outside(rendezvous: &Rendezvous) -> Option<Self> {
        let mut store = store_of(rendezvous).ok()??;
        match store.presence(now() + PRESENCE_LIMIT) {
            Ok(lease) => Some(Self(Sign::Outside(Beat::start(store, lease, true).ok()?))),
            Err(error) => {
                tracing::warn!("the store is not told that this member lives: {error}");
                None
            }
        }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Sign::Folder { file, path } = &self.0
            && flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // The last one; without the file nobody holds the folder either.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whether a member of a job lives that meets in this folder. Who looks holds the file's lock for a
/// moment, so another one that looks meanwhile may take it for a member: it looks again.
fn is_inhabited(folder: &Path) -> bool {
    let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(folder.join(MEMBERS));
    file.is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Locks are those of an opened file, so one process can stand for several.
    #[test]
    fn members_come_and_go_while_others_look_and_are_always_seen() {
        let folder = std::env::temp_dir().join(format!("pleach-presence-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("is new");
        let world = World { rendezvous: Some(Rendezvous::File { folder: folder.clone() }), ..World::alone() };
        // Relaxed: it ends a loop.
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        is_inhabited(&folder);
                    }
                });
            }
            let members = [0; 2].map(|_| {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let presence = Presence::of(&world).expect("the folder is there");
                        assert!(is_inhabited(&folder), "this member lives");
                        drop(presence);
                    }
                })
            });
            let ended = members.map(|member| member.join().is_ok());
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(ended, [true, true]);
        });
        assert!(!is_inhabited(&folder), "nobody is left");
        std::fs::remove_dir_all(&folder).expect("is there");
    }
}
