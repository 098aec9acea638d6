//! How a process comes to a job: it begins it with the others of its world, or is given a seat
//! where it runs.

use std::sync::Arc;

use pleach_membership::{Maker, Process, Record, Seat};
use pleach_transport::rendezvous::{
    Arrival, Founding, JoinError, JoinOptions, Joined, Presence, SeatGrant, SeatServer, Terms, World,
    arrive as arrive_there, has_registers,
};
use pleach_transport::wire::{Malformed, Reader};
use pleach_transport::{Device, Event, Responder};
use pleach_vocabulary::Rank;

use super::changes::Changes;
use super::healing::Own;
use super::incoming::Incoming;
use super::member::Member;
use super::roster::{Neighbour, Roster};
use super::seat_thread::SeatThread;
use super::shared_device::SharedDevice;
use super::split::Splits;
use super::{Elastic, Heal, Session, SessionError, TellsOfPanic};
use crate::group::{JoinGroupError, Options, Setting, session_number, session_settings};

/// What a job is, apart from its members.
#[derive(Clone, Debug)]
pub(crate) struct JobIdentity {
    /// The digest of its first record.
    pub(crate) digest: [u8; 32],
    /// Who makes its records.
    pub(crate) maker: Maker,
    /// Where this process was started.
    pub(crate) world: World,
}

/// A process with a seat, whose session has not begun.
pub(crate) struct Arrived {
    options: Options,
    settings: JoinOptions,
    terms: Terms,
    server: Option<SeatServer>,
    process: Process,
    /// The digest of the job's first record.
    job: [u8; 32],
    /// `None`: the process waits to join.
    first: Option<Record>,
    roster: Roster,
    device: Box<dyn Device>,
    events: Vec<Event>,
}

/// Comes to the job.
pub(crate) fn arrive(
    options: Options,
    elastic: &Elastic,
    incoming: &Arc<Incoming>,
) -> Result<Arrived, SessionError> {
    let settings = session_settings(&options, elastic.most, elastic.knobs());
    let responder: Arc<dyn Responder> = Arc::<Incoming>::clone(incoming);
    let addresses = |told: &[u8]| Ok(roster_of(told)?.1.iter().map(|of| of.address().clone()).collect());
    let founding =
        Founding::new(elastic.seats(), elastic.fewest, elastic.begin_wait).in_units_of(elastic.unit);
    let arrival = arrive_there(&options.world, &settings, founding, &responder, &addresses);
    match arrival.map_err(JoinGroupError::from)? {
        Arrival::Founded { joined, ranks, server, terms } => {
            let Elastic { fewest, most, .. } = *elastic;
            let world_size = joined.world_size;
            if world_size < fewest || world_size > most {
                return Err(SessionError::Limits { fewest, most, ranks: world_size });
            }
            Ok(founded(options, settings, (joined, &ranks), server, terms))
        }
        Arrival::Granted(grant) => granted(options, settings, grant),
    }
}

fn founded(
    options: Options,
    settings: JoinOptions,
    (joined, ranks): (Joined, &[Rank]),
    server: Option<SeatServer>,
    terms: Terms,
) -> Arrived {
    let device = &joined.device;
    let process_of = |rank: u32| {
        let other = device.incarnation(rank).filter(|_| rank != joined.rank);
        Process { seat: Seat(rank), incarnation: other.unwrap_or(device.info().incarnation) }
    };
    let neighbour = |(at, &rank): (usize, &Rank)| {
        let (host, share) = (joined.hosts[at], joined.ranks_a_processor[at]);
        Neighbour::new(process_of(rank), host, share, joined.addresses[at].clone())
    };
    let roster = Roster::new(ranks.iter().enumerate().map(neighbour));
    let members = ranks.iter().copied().map(process_of).collect();
    let first = Record::first(members).expect("ranks are connected, and differ");
    let job = first.digest().0;
    let (process, first) = (process_of(joined.rank), Some(first));
    let (device, events) = (joined.device, joined.events);
    Arrived { options, settings, terms, server, process, job, first, roster, device, events }
}

/// The digest of the job's first record, and the members, of which whoever gives seats tells.
fn roster_of(told: &[u8]) -> Result<([u8; 32], Roster), Malformed> {
    let mut reader = Reader::new(told);
    let job = reader.array()?;
    Ok((job, Roster::decode(reader.rest(told.len())?)?))
}

/// Decodes bytes as what a process is told of the job: for fuzzing.
pub(crate) fn check_decoder(bytes: &[u8]) {
    let _ = roster_of(bytes); // The roster in it has a check of its own.
}

fn granted(options: Options, settings: JoinOptions, grant: SeatGrant) -> Result<Arrived, SessionError> {
    let SeatGrant { seat, device, terms, roster } = grant;
    let unreadable = |_| JoinGroupError::from(JoinError::Unreadable { rank: seat });
    let (job, mut roster) = roster_of(&roster).map_err(unreadable)?;
    // Whoever gives seats names those of the job's device alone.
    let seats = device.info().reach.len();
    if roster.iter().any(|neighbour| neighbour.rank() as usize >= seats) {
        return Err(JoinGroupError::from(JoinError::Unreadable { rank: seat }).into());
    }
    let process = Process { seat: Seat(seat), incarnation: device.info().incarnation };
    roster.insert(roster.newcomer(process, device.info().address.clone(), seats as u32));
    let world = World { rank: seat, ..options.world.clone() };
    let (options, events) = (Options { world, ..options }, Vec::new());
    Ok(Arrived { options, settings, terms, server: None, process, job, first: None, roster, device, events })
}

impl Arrived {
    /// The process.
    pub(crate) fn process(&self) -> Process {
        self.process
    }

    /// Its session begins.
    pub(crate) fn enter(self, elastic: &Elastic, incoming: Arc<Incoming>) -> Result<Session, SessionError> {
        let Self { options, settings, terms, server, process, job, first, roster, device, events } = self;
        let begins = first.is_some() && process.seat == Seat(0);
        let registers = terms.registers(&options.world, &job, begins).map_err(JoinError::from);
        let registers = registers.map_err(JoinGroupError::from)?;
        let is_kept = has_registers(options.world.rendezvous.as_ref());
        let maker = if is_kept { Maker::Store } else { Maker::Members };
        let job = JobIdentity { digest: job, maker, world: options.world.clone() };
        // Before there is a thread that answers the others. A session that is not made says
        // nothing.
        let setting = Setting::new(options.clone(), terms.fabric()).map_err(JoinGroupError::from)?;
        let waker = Arc::clone(&incoming);
        let connected = first.as_ref().map_or(&[][..], |first| first.members());
        let connected: Vec<Rank> = connected.iter().map(|member| member.seat.0).collect();
        let device = SharedDevice::new(device, events, &connected, move || waker.wake_thread());
        let first = first.map(Arc::new);
        let (is_founder, committed_in) = (first.is_some(), first.clone());
        let member = Member::new(
            process,
            job,
            first,
            roster,
            elastic.clone(),
            Arc::clone(&device),
            Arc::clone(&incoming),
        );
        let member = member.map_err(SessionError::LastWord)?;
        let runs = Arc::clone(&member);
        let thread = std::thread::Builder::new()
            .name(format!("pleach-seat-{}", process.seat.0 % 1000))
            .spawn(move || {
                let _told = TellsOfPanic(&runs);
                runs.run();
            })
            .map_err(SessionError::Thread)?;
        incoming.wakes(thread.thread().clone());
        incoming.wake_thread();
        let presence = Presence::of(&options.world);
        tracing::debug!("{process} {}", if is_founder { "begins the job" } else { "waits to join" });
        let mut session = Session {
            setting,
            elastic: elastic.clone(),
            process,
            device,
            incoming,
            member: Arc::clone(&member),
            thread: Some(thread),
            seats: None,
            records: None,
            presence,
            epoch: None,
            begun: None,
            step: 0,
            number: session_number(),
            not_entered: None,
            signals: Vec::new(),
            own: Own::new(is_founder, elastic.heal == Heal::Hidden),
            hidden: None,
            gate: Arc::default(),
            lent: Arc::default(),
            splits: Splits::default(),
            changes: Changes::default(),
            committed_in,
        };
        if let Some(registers) = registers {
            session.records = Some(member.keep_records(registers).map_err(SessionError::Thread)?);
        }
        let seats = SeatThread::new(options.world, settings, terms, elastic.seats());
        session.seats = seats.start(&member, server).map_err(SessionError::Thread)?;
        Ok(session)
    }
}
