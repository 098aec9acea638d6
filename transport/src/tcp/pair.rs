//! This rank's end of a connected pair: its connections, and the operations under way on them.
//!
//! **Invariants:** every accepted transfer has exactly one owner: a queued frame, a
//! [`SplitTransfer`] or a [`Pending`]. The code that removes the owner reports the transfer. A
//! signal is raised when this thread has received every byte of its put.

mod frames;
mod submit;

use std::os::fd::OwnedFd;

use super::CONNECTIONS;
use super::connection::{Body, InConnection, OutConnection, OutFrame, Received, SendCompletion};
use super::frame::{Frame, Token};
use super::regions::Regions;
use super::slab::Slab;
use crate::Rank;
use crate::control::socket;
use crate::device::{Event, LossCause, ProtocolViolation, TransferError, TransferId};
use crate::region::{KeyMap, RegionKey, Slice};
use crate::signals::{Signal, Signals};

/// Events that wait to be polled.
pub(super) type EventQueue = std::collections::VecDeque<Event>;

/// How the end of an operation is reported.
#[derive(Clone, Copy)]
enum Report {
    Transfer(TransferId),
    Part(u64),
}

/// A transfer in several parts.
struct SplitTransfer {
    id: TransferId,
    remaining: u8,
    result: Result<u64, TransferError>,
}

/// An operation that awaits an answer.
enum Pending {
    Put(TransferId),
    Get { dst: Slice, connection: usize, report: Report },
    Atomic(TransferId),
}

/// A put that arrives in pieces.
struct IncomingSplitPut {
    token: Token,
    remaining: u32,
    end: PutCompletion,
}

/// The completion of a put that arrives.
#[derive(Clone, Copy)]
pub(super) struct PutCompletion {
    signal: Option<Signal>,
    wants_answer: bool,
    refused: bool,
    key: RegionKey,
    token: Token,
}

/// The action when data have arrived.
pub(super) enum ReceiveAction {
    Put(PutCompletion),
    Piece { token: Token, connection: usize },
    Get { token: Token, connection: usize },
}

/// The state of this rank's bye.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByeState {
    No,
    /// Asked for; waits for answers to earlier requests.
    Wanted,
    Queued,
    Sent,
}

/// A connected pair.
pub(super) struct Pair {
    pub(super) incoming: Vec<InConnection<ReceiveAction>>,
    pub(super) state: PairState,
}

/// The state of a pair without its receiving connections.
pub(super) struct PairState {
    pub(super) peer: Rank,
    signal_slots: Signals,
    peer_signal_slots: usize,
    pub(super) out: Vec<OutConnection>,
    pending: Slab<Pending>,
    parts: Slab<SplitTransfer>,
    splits: Vec<IncomingSplitPut>,
    next_split: u64,
    /// Lengths of the peer's regions that have accepted a put: puts inside them need no answer.
    accepted: KeyMap<u64>,
    /// Regions that were revoked before they were accepted.
    revoked: Vec<RegionKey>,
    /// Pieces that connection 0 or a request has announced on connection `n`. Entry 0 is unused.
    announced: [u32; CONNECTIONS],
    /// Transfers accepted and not reported.
    under_way: usize,
    answers: usize,
    pub(super) bye: ByeState,
    has_peer_bye: bool,
    /// Whether the device lists this pair among those to send to.
    pub(super) is_listed: bool,
    written: Vec<SendCompletion>,
}

/// The result of receiving.
pub(super) enum Outcome {
    /// All available bytes have been received.
    Idle,
    /// There is more.
    More,
    /// The peer has sent its bye, and all earlier data have arrived.
    Left,
}

impl Pair {
    pub(super) fn new(
        peer: Rank,
        signal_slots: Signals,
        peer_signal_slots: usize,
        out: Vec<OwnedFd>,
        incoming: Vec<OwnedFd>,
    ) -> Self {
        Self {
            incoming: incoming.into_iter().map(InConnection::new).collect(),
            state: PairState {
                peer,
                signal_slots,
                peer_signal_slots,
                out: out.into_iter().map(OutConnection::new).collect(),
                pending: Slab::new(),
                parts: Slab::new(),
                splits: Vec::new(),
                next_split: 0,
                accepted: KeyMap::default(),
                revoked: Vec::new(),
                announced: [0; CONNECTIONS],
                under_way: 0,
                answers: 0,
                bye: ByeState::No,
                has_peer_bye: false,
                is_listed: false,
                written: Vec::new(),
            },
        }
    }

    /// Whether to receive from `connection`: always from connection 0, from others when a piece is
    /// announced.
    pub(super) fn expects(&self, connection: usize) -> bool {
        if connection == 0 {
            !self.state.has_peer_bye
        } else {
            self.state.announced[connection] > 0 && !self.incoming[connection].is_held
        }
    }

    /// Whether pieces are announced on connections other than 0.
    pub(super) fn expects_more(&self) -> bool {
        self.state.announced[1..].iter().any(|announced| *announced > 0)
    }

    /// Receives available bytes, up to the limit of a poll.
    pub(super) fn receive(
        &mut self,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<Outcome, LossCause> {
        let mut more = false;
        for connection in 0..self.incoming.len() {
            self.incoming[connection].start_poll();
            more |= self.receive_connection(connection, regions, event_queue)?;
        }
        if self.state.has_peer_bye && self.state.splits.is_empty() {
            return Ok(Outcome::Left);
        }
        Ok(if more { Outcome::More } else { Outcome::Idle })
    }

    /// Returns whether there is more.
    fn receive_connection(
        &mut self,
        connection: usize,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<bool, LossCause> {
        let mut drained = false;
        loop {
            self.decode(connection, regions, event_queue).map_err(LossCause::Protocol)?;
            if !self.expects(connection) || drained {
                return Ok(false);
            }
            if self.incoming[connection].is_spent() {
                return Ok(true);
            }
            match self.incoming[connection].receive() {
                Ok(Received::More) => {}
                Ok(Received::Drained) => drained = true,
                Ok(Received::Closed) => return Err(LossCause::ConnectionClosed),
                Err(error) => return Err(socket::loss(&error)),
            }
        }
    }

    /// Handles the buffered frames.
    fn decode(
        &mut self,
        connection: usize,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<(), ProtocolViolation> {
        let Self { incoming, state } = self;
        let stream = &mut incoming[connection];
        stream.is_held = false;
        loop {
            if stream.incoming.is_some() {
                match stream.settle() {
                    Some(action) => state.arrived(action, regions, event_queue)?,
                    None => return Ok(()),
                }
            }
            let silent = if connection == 0 { state.has_peer_bye } else { state.announced[connection] == 0 };
            if silent {
                return Ok(());
            }
            let Some((frame, used)) = Frame::decode(stream.buffered())? else { return Ok(()) };
            if let Frame::Piece { token, .. } = &frame
                && !state.splits.iter().any(|split| split.token == *token)
            {
                // The piece overtook its announcement on connection 0.
                stream.is_held = true;
                return Ok(());
            }
            stream.consume(used);
            stream.incoming = state.handle(connection, &frame, regions, event_queue)?;
        }
    }

    /// Whether no frame waits to be sent or answered.
    pub(super) fn is_flushed(&self) -> bool {
        let state = &self.state;
        state.out.iter().all(OutConnection::is_empty)
            && state.pending.len() == 0
            && !matches!(state.bye, ByeState::Wanted | ByeState::Queued)
    }
}

impl PairState {
    fn push(&mut self, connection: usize, frame: &Frame, body: Body, completion: SendCompletion) {
        self.out[connection].push(OutFrame { head: frame.encode(), body, completion });
    }

    /// Handles a revocation by the peer.
    pub(super) fn revoked(&mut self, key: RegionKey) {
        if self.accepted.remove(&key).is_none() && self.pending.len() > 0 {
            // Its acceptance may still be under way, on another connection.
            self.revoked.push(key);
        }
    }

    fn report(&mut self, report: Report, result: Result<u64, TransferError>, event_queue: &mut EventQueue) {
        let (id, result) = match report {
            Report::Transfer(id) => (id, result),
            Report::Part(token) => {
                let Some(parts) = self.parts.find(token) else { return };
                parts.remaining -= 1;
                if parts.result.is_ok() {
                    parts.result = result;
                }
                if parts.remaining > 0 {
                    return;
                }
                match self.parts.take(token) {
                    Some(parts) => (parts.id, parts.result),
                    None => return,
                }
            }
        };
        self.under_way -= 1;
        event_queue.push_back(Event::Done { id, result });
    }

    /// Sends what the sockets take.
    pub(super) fn flush(&mut self, event_queue: &mut EventQueue) -> Result<(), LossCause> {
        let mut written = std::mem::take(&mut self.written);
        let mut result = Ok(());
        for connection in 0..self.out.len() {
            if self.out[connection].is_empty() {
                continue;
            }
            if let Err(error) = self.out[connection].flush(&mut written) {
                result = Err(socket::loss(&error));
            }
        }
        for completion in written.drain(..) {
            self.complete_send(completion, Ok(0), event_queue);
        }
        self.written = written;
        result
    }

    fn complete_send(
        &mut self,
        completion: SendCompletion,
        result: Result<u64, TransferError>,
        event_queue: &mut EventQueue,
    ) {
        match completion {
            SendCompletion::Nothing => {}
            SendCompletion::Transfer(id) => self.report(Report::Transfer(id), result, event_queue),
            SendCompletion::Part(token) => self.report(Report::Part(token), result, event_queue),
            SendCompletion::Answer => self.answers -= 1,
            SendCompletion::Bye => {
                if result.is_ok() {
                    self.bye = ByeState::Sent;
                }
            }
        }
    }

    /// Queues the bye when it is wanted and no answer is awaited.
    pub(super) fn queue_bye(&mut self) {
        if self.bye == ByeState::Wanted && self.pending.len() == 0 {
            self.bye = ByeState::Queued;
            self.push(0, &Frame::Bye, Body::Nothing, SendCompletion::Bye);
        }
    }

    /// Whether frames wait to be sent.
    pub(super) fn has_output(&self) -> bool {
        self.out.iter().any(|connection| !connection.is_empty())
    }

    /// Ends every transfer with this error. With `finish`, a frame that is partly sent is still
    /// sent to its end (the peer departed, but reads on).
    pub(super) fn fail_all(&mut self, error: &TransferError, finish: bool, event_queue: &mut EventQueue) {
        let mut abandoned = std::mem::take(&mut self.written);
        for connection in &mut self.out {
            if finish {
                connection.abandon_waiting(&mut abandoned)
            } else {
                connection.abandon(&mut abandoned)
            }
        }
        for completion in abandoned.drain(..) {
            self.complete_send(completion, Err(error.clone()), event_queue);
        }
        self.written = abandoned;
        while let Some(pending) = self.pending.take_any() {
            let report = match pending {
                Pending::Put(id) | Pending::Atomic(id) => Report::Transfer(id),
                Pending::Get { report, .. } => report,
            };
            self.report(report, Err(error.clone()), event_queue);
        }
    }
}
