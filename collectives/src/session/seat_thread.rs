//! The thread that gives seats to newcomers, where this process holds the job's seat server.
//!
//! It is a thread of its own, as the store behind the server blocks. Where no process holds the
//! server, the member on the lowest seat opens it again. Newcomers get seats in turn, and may wait
//! for each other; questions are answered meanwhile.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_membership::{Process, Seat};
use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::rendezvous::{
    JoinError, JoinOptions, OpenStoreError, Rendezvous, SeatRequest, SeatServer, StoreError, Terms, World,
};
use pleach_transport::wire::Writer;

use super::asks::{Ask, Reply};
use super::member::Member;

/// How long requests are awaited before the session is looked at.
const LISTEN: Duration = Duration::from_millis(100);

/// How often a member tries to open the server. The one on the lowest seat begins, and each one
/// waits so much longer than the one before: only one of a named host can.
const REOPEN_INTERVAL: Duration = Duration::from_millis(100);

/// As [`REOPEN_INTERVAL`], where another process was found to hold it.
const HELD_INTERVAL: Duration = Duration::from_secs(1);

/// How long it tries at a time.
const REOPEN_LIMIT: Duration = Duration::from_millis(200);

/// How long a newcomer waits for a seat: the death of a member may not be known yet.
const SEAT_WAIT: Duration = Duration::from_secs(5);

/// How often it is looked whether a seat is free.
const SEAT_INTERVAL: Duration = Duration::from_millis(10);

/// How long the newcomer's device may take.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(5);

/// How long the store may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// See the module.
pub(crate) struct SeatThread {
    world: World,
    settings: JoinOptions,
    terms: Terms,
    seats: u32,
}

impl SeatThread {
    pub(crate) fn new(world: World, settings: JoinOptions, terms: Terms, seats: u32) -> Self {
        Self { world, settings, terms, seats }
    }

    /// Gives seats until the session is over. `None`: nobody finds the job.
    pub(crate) fn start(
        self,
        member: &Arc<Member>,
        server: Option<SeatServer>,
    ) -> std::io::Result<Option<JoinHandle<()>>> {
        if self.world.rendezvous.is_none() {
            return Ok(None);
        }
        let member = Arc::clone(member);
        let thread = std::thread::Builder::new().name("pleach-seats".to_owned());
        thread.spawn(move || self.keep(&member, server)).map(Some)
    }

    /// Whether it is this member's turn to open the server, where none was opened since then. A
    /// folder or a store is reached by all members, so there the lowest seat does it.
    fn is_turn(&self, member: &Member, since: Nanos) -> bool {
        let is_of_host =
            matches!(self.world.rendezvous, Some(Rendezvous::Tcp { .. } | Rendezvous::TcpList { .. }));
        member.position().is_some_and(|position| {
            let turn = REOPEN_INTERVAL.saturating_mul(2 * position as u32);
            position == 0 || (is_of_host && now().since(since) >= turn)
        })
    }

    fn keep(&self, member: &Member, mut server: Option<SeatServer>) {
        let mut since = now();
        let mut later = VecDeque::new();
        let (mut lowest, mut next_try) = (None, since);
        while !member.is_over() {
            let Some(open) = &mut server else {
                // With each change of the lowest seat the turns begin anew.
                let lowest_now = member.lowest();
                if lowest_now != lowest {
                    (lowest, since) = (lowest_now, now());
                    next_try = since;
                }
                if now() >= next_try && self.is_turn(member, since) {
                    match SeatServer::reopen(&self.world, &self.settings, now() + REOPEN_LIMIT) {
                        Ok(opened) => server = opened,
                        // Another process holds it, or this host does not have the address.
                        Err(error) => {
                            tracing::debug!("the seat server is not opened here: {error}");
                            if is_held(&error) {
                                next_try = now() + HELD_INTERVAL;
                            }
                        }
                    }
                }
                if server.is_none() {
                    std::thread::park_timeout(REOPEN_INTERVAL);
                }
                continue;
            };
            let result = match later.pop_front() {
                Some(request) => self.seat(member, open, &request, &mut later),
                None => attend(member, open, now() + LISTEN, &mut later),
            };
            if let Err(error) = &result {
                tracing::debug!("the seat server is closed: {error}");
            }
            if result.is_err() || (open.is_worn() && later.is_empty()) {
                (server, since) = (None, now());
                later.clear();
            }
        }
    }

    /// Gives a newcomer a seat, and waits for its device. Others wait in `later`.
    fn seat(
        &self,
        member: &Member,
        server: &mut SeatServer,
        request: &SeatRequest,
        later: &mut VecDeque<SeatRequest>,
    ) -> Result<(), StoreError> {
        let until = now() + SEAT_WAIT;
        let seat = loop {
            let seat = member.free_seat(request.wanted(), self.seats);
            if seat.is_some() || member.is_over() || now() >= until {
                break seat;
            }
            attend(member, server, now() + SEAT_INTERVAL, later)?;
        };
        let deadline = now() + ANSWER_LIMIT;
        let Some(seat) = seat else {
            let reason = format!("all its {} seats are taken", self.seats);
            return server.refuse(request, &reason, deadline);
        };
        let roster = member.roster();
        let told = Writer::default().raw(&member.job().digest).raw(&roster.encode()).finish();
        server.invite(request, seat, &self.terms, &told, deadline)?;
        let until = now() + ARRIVAL_LIMIT;
        while now() < until && !member.is_over() {
            attend(member, server, now(), later)?;
            if let Some((incarnation, address)) = server.arrived(request, until.min(now() + LISTEN))? {
                let process = Process { seat: Seat(seat), incarnation };
                member.newcomer(roster.newcomer(process, address, self.seats));
                break;
            }
        }
        Ok(())
    }
}

/// Answers a question, if one is asked until then. A newcomer that comes waits in `later`, as seats
/// are given in turn.
fn attend(
    member: &Member,
    server: &mut SeatServer,
    until: Nanos,
    later: &mut VecDeque<SeatRequest>,
) -> Result<(), StoreError> {
    let Some(request) = server.next(until)? else { return Ok(()) };
    let Some(question) = request.question() else {
        later.push_back(request);
        return Ok(());
    };
    let reply = match Ask::decode(question) {
        Ok(ask) => member.answer(ask),
        Err(_) => Reply::Refused("the job runs another version and cannot read that".to_owned()),
    };
    server.reply(&request, &reply.encode(), now() + ANSWER_LIMIT)
}

/// Whether another process holds the server.
fn is_held(error: &JoinError) -> bool {
    use OpenStoreError::{Busy, InUse, PortInUse};
    matches!(error, JoinError::Open(PortInUse { .. } | Busy { .. } | InUse { .. }))
}
