//! This rank's end of a connected pair: its connections, and the operations under way on them.
//!
//! **Invariants:** every accepted transfer has exactly one owner: a queued frame, a
//! [`SplitTransfer`] or a [`Pending`]. The code that removes the owner reports the transfer. A
//! signal is raised when this thread has received every byte of its put.

use std::os::fd::OwnedFd;

use super::connection::{Body, InConnection, Incoming, OutConnection, Received, SendCompletion};
use super::frame::{Frame, Token};
use super::regions::Regions;
use super::{CONNECTIONS, QUEUE_DEPTH, SPLIT_BYTES_MIN};
use crate::Rank;
use crate::control::{OpenedPair, socket};
use crate::device::{
    DRAINS_MAX, Event, LossCause, ProtocolViolation, Source, SubmitError, Transfer, TransferError, TransferId,
};
use crate::drain::Drains;
use crate::region::{KeyMap, RegionKey, RemoteSlice, Slice};
use crate::signals::{Signal, Signals};
use crate::slab::{NO_TOKEN_BIT, Slab};

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
struct PutCompletion {
    signal: Option<Signal>,
    wants_answer: bool,
    refused: bool,
    key: RegionKey,
    token: Token,
}

/// What a drain waits for on each connection.
#[derive(Clone, Copy)]
enum DrainStage {
    /// The peer's mark has come.
    Marked,
    /// The answer to the peer's mark was sent.
    Answering,
    /// The peer's answer to this rank's mark has come.
    Answered,
}

impl DrainStage {
    const ALL: usize = 3;

    /// Its number on a connection.
    fn on(self, connection: usize) -> usize {
        Self::ALL * connection + self as usize
    }
}

/// The action when data have arrived.
enum ReceiveAction {
    Put(PutCompletion),
    Piece { token: Token, connection: usize },
    Get { token: Token, connection: usize },
}

/// The state of this rank's bye.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByeState {
    No,
    /// Asked for; waits for answers to earlier requests.
    Wanted,
    Queued,
    Sent,
}

/// A connected pair.
pub(super) struct Pair {
    incoming: Vec<InConnection<ReceiveAction>>,
    state: PairState,
}

/// The state of a pair without its receiving connections.
pub(super) struct PairState {
    peer: Rank,
    signal_slots: Signals,
    peer_signal_slots: usize,
    out: Vec<OutConnection>,
    pending: Slab<Pending>,
    parts: Slab<SplitTransfer>,
    splits: Vec<IncomingSplitPut>,
    next_split: u64,
    /// Lengths of the peer's regions that have accepted a put: puts inside them need no answer.
    accepted: KeyMap<u64>,
    /// Regions that were revoked before they were accepted.
    revoked: Vec<RegionKey>,
    /// Frames that connection 0, a request or a drain has announced on connection `n`. Entry 0 is
    /// unused.
    announced: [u32; CONNECTIONS],
    /// Connections on which a piece or a mark waits for its announcement on connection 0.
    is_held: [bool; CONNECTIONS],
    /// With the [`DrainStage`]s of each connection; `None`: the pair gives no `Drained` any more.
    drains: Option<Drains>,
    /// Transfers accepted and not reported.
    under_way: usize,
    answers: usize,
    bye: ByeState,
    has_peer_bye: bool,
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
        OpenedPair { signal_slots: peer_signal_slots, data: [to_peer, from_peer], .. }: OpenedPair,
    ) -> Self {
        Self {
            incoming: from_peer.into_iter().map(InConnection::new).collect(),
            state: PairState {
                peer,
                signal_slots,
                peer_signal_slots: peer_signal_slots as usize,
                out: to_peer.into_iter().map(OutConnection::new).collect(),
                pending: Slab::default(),
                parts: Slab::default(),
                splits: Vec::new(),
                next_split: 0,
                accepted: KeyMap::default(),
                revoked: Vec::new(),
                announced: [0; CONNECTIONS],
                is_held: [false; CONNECTIONS],
                drains: Some(Drains::new(DrainStage::ALL * CONNECTIONS)),
                under_way: 0,
                answers: 0,
                bye: ByeState::No,
                has_peer_bye: false,
                written: Vec::new(),
            },
        }
    }

    /// The part of the pair that submits and answers.
    pub(super) fn state(&mut self) -> &mut PairState {
        &mut self.state
    }

    /// Makes epoll report exactly when a connection can proceed: those that `reads` or `writes`
    /// allows.
    pub(super) fn watch(&mut self, epoll: &OwnedFd, reads: bool, writes: bool) -> rustix::io::Result<()> {
        let peer = self.state.peer;
        for connection in 0..self.incoming.len() {
            let wanted = reads && self.expects(connection);
            self.incoming[connection].watch(epoll, peer, wanted)?;
        }
        for connection in &mut self.state.out {
            let wanted = writes && !connection.is_empty();
            connection.watch(epoll, peer, wanted)?;
        }
        Ok(())
    }

    /// Closes the connections from the peer.
    pub(super) fn close_incoming(&mut self, epoll: &OwnedFd) {
        for mut connection in self.incoming.drain(..) {
            // Explicitly, because a forked child may keep the connection open.
            let _ = connection.watch(epoll, self.state.peer, false);
        }
    }

    /// Closes the connections from the peer, and lets epoll forget those to the peer.
    pub(super) fn close(&mut self, epoll: &OwnedFd) {
        self.close_incoming(epoll);
        for connection in &mut self.state.out {
            let _ = connection.watch(epoll, self.state.peer, false);
        }
    }

    /// Whether any bytes have come in this poll.
    pub(super) fn has_received(&self) -> bool {
        self.incoming.iter().any(InConnection::has_received)
    }

    /// Whether frames wait and a socket is not known to be full.
    pub(super) fn is_ready_to_send(&self) -> bool {
        self.state.out.iter().any(OutConnection::is_ready)
    }

    /// Whether to receive from `connection`: always from connection 0, from others when a piece is
    /// announced.
    fn expects(&self, connection: usize) -> bool {
        if connection == 0 {
            !self.state.has_peer_bye
        } else {
            self.state.announced[connection] > 0 && !self.state.is_held[connection]
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
                Ok(Received::Violated(violation)) => return Err(violation.into()),
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
        state.is_held[connection] = false;
        loop {
            if stream.is_amid_data() {
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
                state.is_held[connection] = true;
                return Ok(());
            }
            if frame == Frame::DrainMark && connection > 0 && !state.is_mark_announced(connection) {
                state.is_held[connection] = true;
                return Ok(());
            }
            stream.consume(used);
            stream.expect_data(state.handle(connection, &frame, regions, event_queue)?);
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
        self.out[connection].push(frame.encode(), body, completion);
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
                let Some(parts) = self.parts.find_mut(token) else { return };
                parts.remaining -= 1;
                if parts.result.is_ok() {
                    parts.result = result;
                }
                if parts.remaining > 0 {
                    return;
                }
                match self.parts.remove(token) {
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
        self.tell_drained(event_queue);
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
            SendCompletion::DrainAnswer(connection) => {
                self.answers -= 1;
                self.pass_drain(DrainStage::Answering, connection);
            }
            SendCompletion::Bye => {
                if result.is_ok() {
                    self.bye = ByeState::Sent;
                }
            }
        }
    }

    /// This rank leaves: sends its bye, once, as soon as no answer is awaited.
    pub(super) fn say_bye(&mut self) {
        if self.bye == ByeState::No {
            self.bye = ByeState::Wanted;
        }
        self.queue_bye();
    }

    pub(super) fn has_said_bye(&self) -> bool {
        self.bye == ByeState::Sent
    }

    /// The peer has departed, and a connection to it broke: nothing more is sent, nor the bye.
    pub(super) fn give_up(&mut self, event_queue: &mut EventQueue) {
        self.fail_all(&TransferError::Departed { peer: self.peer }, false, event_queue);
        self.bye = ByeState::Sent;
    }

    /// The peer has departed, and reads on: only what is partly sent, and the bye, are still sent.
    pub(super) fn peer_departed(&mut self, event_queue: &mut EventQueue) {
        self.fail_all(&TransferError::Departed { peer: self.peer }, true, event_queue);
        if self.bye == ByeState::Queued {
            self.bye = ByeState::Wanted;
            self.queue_bye();
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
        self.drains = None;
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
        for pending in self.pending.drain() {
            let report = match pending {
                Pending::Put(id) | Pending::Atomic(id) => Report::Transfer(id),
                Pending::Get { report, .. } => report,
            };
            self.report(report, Err(error.clone()), event_queue);
        }
    }
}

/// Answers that wait to be sent at most; a peer has at most this many requests and marks under way.
const ANSWERS_MAX: usize = (QUEUE_DEPTH + DRAINS_MAX as usize) * CONNECTIONS;

impl PairState {
    /// Queues the marks of a drain.
    pub(crate) fn drain(&mut self) -> Result<(), SubmitError> {
        let Some(drains) = &mut self.drains else { return Ok(()) };
        drains.begin(self.peer)?;
        for connection in 0..CONNECTIONS {
            self.push(connection, &Frame::DrainMark, Body::Nothing, SendCompletion::Nothing);
        }
        // The peer's answer.
        self.announced[1..].iter_mut().for_each(|announced| *announced += 1);
        Ok(())
    }

    /// Whether connection 0 has brought the mark that is next on this connection.
    fn is_mark_announced(&self, connection: usize) -> bool {
        self.drains.as_ref().is_none_or(|drains| {
            let marked = |connection| drains.passed(DrainStage::Marked.on(connection));
            marked(connection) < marked(0)
        })
    }

    /// Drains of the peer whose marks have come on all connections.
    fn drains_marked(&self) -> u64 {
        let Some(drains) = &self.drains else { return 0 };
        let marks = (0..CONNECTIONS).map(|connection| drains.passed(DrainStage::Marked.on(connection)));
        marks.min().unwrap_or(0)
    }

    fn pass_drain(&mut self, stage: DrainStage, connection: usize) {
        if let Some(drains) = &mut self.drains {
            drains.pass(stage.on(connection), 1);
        }
    }

    /// Handles a mark of the peer.
    fn drain_marked(&mut self, connection: usize) -> Result<(), ProtocolViolation> {
        // An honest peer has at most so many drains of its own that wait for this end's.
        if let Some(drains) = &self.drains
            && drains.passed(DrainStage::Marked.on(connection)) >= drains.begun() + DRAINS_MAX
        {
            return Err(ProtocolViolation::TooManyRequests);
        }
        let marked_before = self.drains_marked();
        self.pass_drain(DrainStage::Marked, connection);
        if connection > 0 {
            self.announced[connection] = self.announced[connection].saturating_sub(1);
        } else {
            self.announced[1..].iter_mut().for_each(|announced| *announced += 1);
        }
        if self.drains_marked() > marked_before {
            // All before the mark has arrived, so the answers to it are queued.
            for connection in 0..CONNECTIONS {
                let answer = SendCompletion::DrainAnswer(connection);
                self.answer_as(connection, &Frame::DrainAnswer, Body::Nothing, answer)?;
            }
        }
        Ok(())
    }

    /// Handles the peer's answer to a mark.
    fn drain_answered(&mut self, connection: usize) -> Result<(), ProtocolViolation> {
        let Some(drains) = &mut self.drains else { return Ok(()) };
        let stage = DrainStage::Answered.on(connection);
        if drains.passed(stage) >= drains.begun() {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        drains.pass(stage, 1);
        if connection > 0 {
            self.announced[connection] = self.announced[connection].saturating_sub(1);
        }
        Ok(())
    }

    /// Reports the drains that are over.
    fn tell_drained(&mut self, event_queue: &mut EventQueue) {
        let Some(drains) = &mut self.drains else { return };
        while let Some(drained) = drains.next_drained(self.peer) {
            event_queue.push_back(drained);
        }
    }
}

impl PairState {
    /// Handles a frame; returns the destination of its data, if data follow.
    fn handle(
        &mut self,
        connection: usize,
        frame: &Frame,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<Option<Incoming<ReceiveAction>>, ProtocolViolation> {
        let is_on_all = |frame: &Frame| {
            matches!(
                frame,
                Frame::Piece { .. } | Frame::GetReply { .. } | Frame::DrainMark | Frame::DrainAnswer
            )
        };
        if connection > 0 && !is_on_all(frame) {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let (dst, action) = match *frame {
            Frame::Signal { signal } => {
                self.check_signal(&signal)?;
                self.signal_slots.signal(&signal);
                return Ok(None);
            }
            Frame::Put { dst, signal, wants_answer, other_connections, token } => {
                if let Some(signal) = &signal {
                    self.check_signal(signal)?;
                }
                let place = regions.find(&dst, self.peer, true);
                let end =
                    PutCompletion { signal, wants_answer, refused: place.is_none(), key: dst.key, token };
                if other_connections == 0 {
                    (place, ReceiveAction::Put(end))
                } else {
                    self.announce_split(other_connections, end)?;
                    (place, ReceiveAction::Piece { token, connection })
                }
            }
            Frame::Piece { dst, token } => {
                let place = regions.find(&dst, self.peer, true);
                let split = self.splits.iter_mut().find(|split| split.token == token);
                let split = split.ok_or(ProtocolViolation::UnexpectedAnswer)?;
                split.end.refused |= place.is_none();
                (place, ReceiveAction::Piece { token, connection })
            }
            Frame::GetReply { len, token } => match self.pending.find_mut(token) {
                Some(Pending::Get { dst, connection: asked, .. })
                    if *asked == connection && dst.len() as u64 == len =>
                {
                    (Some(dst.clone()), ReceiveAction::Get { token, connection })
                }
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Get { src, connection, token } => {
                if usize::from(connection) >= CONNECTIONS {
                    return Err(ProtocolViolation::MalformedFrame);
                }
                match regions.find(&src, self.peer, false) {
                    Some(slice) => {
                        let reply = Frame::GetReply { len: src.len, token };
                        self.answer(usize::from(connection), &reply, Body::Slice(slice))?;
                    }
                    None => self.answer(0, &Frame::Refused { key: src.key, token }, Body::Nothing)?,
                }
                return Ok(None);
            }
            Frame::Atomic { key, offset, op, token } => {
                let word = regions.find(&RemoteSlice { key, offset, len: 8 }, self.peer, true);
                let reply = match word.and_then(|word| word.atomic(op)) {
                    Some(old) => Frame::AtomicReply { old, token },
                    None => Frame::Refused { key, token },
                };
                self.answer(0, &reply, Body::Nothing)?;
                return Ok(None);
            }
            Frame::DrainMark | Frame::DrainAnswer => {
                if *frame == Frame::DrainMark {
                    self.drain_marked(connection)?;
                } else {
                    self.drain_answered(connection)?;
                }
                self.tell_drained(event_queue);
                return Ok(None);
            }
            _ => return self.handle_answer(frame, event_queue).map(|()| None),
        };
        Ok(Some(Incoming::new(dst, frame.body_bytes(), action)))
    }

    fn handle_answer(
        &mut self,
        frame: &Frame,
        event_queue: &mut EventQueue,
    ) -> Result<(), ProtocolViolation> {
        match *frame {
            Frame::AtomicReply { old, token } => match self.pending.remove(token) {
                Some(Pending::Atomic(id)) => self.report(Report::Transfer(id), Ok(old), event_queue),
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Accepted { key, region_bytes, token } => match self.pending.remove(token) {
                Some(Pending::Put(id)) => {
                    if !self.revoked.contains(&key) {
                        self.accepted.insert(key, region_bytes);
                    }
                    if self.pending.len() == 0 {
                        self.revoked.clear();
                    }
                    self.report(Report::Transfer(id), Ok(0), event_queue);
                }
                _ => return Err(ProtocolViolation::UnexpectedAnswer),
            },
            Frame::Refused { key, token } => {
                self.accepted.remove(&key);
                if token == 0 || token & NO_TOKEN_BIT != 0 {
                    // The put was complete before the peer's revocation arrived.
                    tracing::warn!(
                        peer = self.peer,
                        ?key,
                        "a put named a region that its owner had released; nothing was written and no signal shown"
                    );
                    return Ok(());
                }
                let refused = Err(TransferError::Refused { peer: self.peer, key });
                match self.pending.remove(token) {
                    Some(Pending::Put(id) | Pending::Atomic(id)) => {
                        self.report(Report::Transfer(id), refused, event_queue);
                    }
                    Some(Pending::Get { connection, report, .. }) => {
                        self.announced[connection] = self.announced[connection].saturating_sub(1);
                        self.report(report, refused, event_queue);
                    }
                    None => return Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
            Frame::Bye => self.has_peer_bye = true,
            _ => return Err(ProtocolViolation::MalformedFrame),
        }
        Ok(())
    }

    fn announce_split(&mut self, other_connections: u8, end: PutCompletion) -> Result<(), ProtocolViolation> {
        let known = self.splits.iter().any(|split| split.token == end.token);
        if other_connections & 1 != 0
            || u32::from(other_connections) >> CONNECTIONS != 0
            || known
            || self.splits.len() >= QUEUE_DEPTH
        {
            return Err(ProtocolViolation::MalformedFrame);
        }
        for connection in 1..CONNECTIONS {
            self.announced[connection] += u32::from(other_connections >> connection & 1);
        }
        self.splits.push(IncomingSplitPut {
            token: end.token,
            remaining: 1 + other_connections.count_ones(),
            end,
        });
        Ok(())
    }

    /// Handles data that have arrived in full.
    fn arrived(
        &mut self,
        action: ReceiveAction,
        regions: &mut Regions,
        event_queue: &mut EventQueue,
    ) -> Result<(), ProtocolViolation> {
        match action {
            ReceiveAction::Put(end) => self.put_arrived(&end, regions),
            ReceiveAction::Piece { token, connection } => {
                if connection > 0 {
                    self.announced[connection] = self.announced[connection].saturating_sub(1);
                }
                let Some(at) = self.splits.iter().position(|split| split.token == token) else {
                    return Err(ProtocolViolation::UnexpectedAnswer);
                };
                self.splits[at].remaining = self.splits[at].remaining.saturating_sub(1);
                if self.splits[at].remaining == 0 {
                    let split = self.splits.swap_remove(at);
                    self.put_arrived(&split.end, regions)?;
                }
                Ok(())
            }
            ReceiveAction::Get { token, connection } => {
                if connection > 0 {
                    self.announced[connection] = self.announced[connection].saturating_sub(1);
                }
                match self.pending.remove(token) {
                    Some(Pending::Get { report, .. }) => {
                        self.report(report, Ok(0), event_queue);
                        Ok(())
                    }
                    _ => Err(ProtocolViolation::UnexpectedAnswer),
                }
            }
        }
    }

    fn put_arrived(&mut self, end: &PutCompletion, regions: &mut Regions) -> Result<(), ProtocolViolation> {
        let PutCompletion { key, token, .. } = *end;
        if end.refused {
            // Refusals that nobody awaits count against the limit of answers.
            if end.wants_answer || self.answers < ANSWERS_MAX {
                self.answer(0, &Frame::Refused { key, token }, Body::Nothing)?;
            }
            return Ok(());
        }
        if let Some(signal) = &end.signal {
            self.signal_slots.signal(signal);
        }
        if end.wants_answer {
            // Zero: released meanwhile; the next put must ask again.
            let region_bytes = regions.grant(key, self.peer).unwrap_or(0);
            self.answer(0, &Frame::Accepted { key, region_bytes, token }, Body::Nothing)?;
        }
        Ok(())
    }

    fn answer(&mut self, connection: usize, frame: &Frame, body: Body) -> Result<(), ProtocolViolation> {
        self.answer_as(connection, frame, body, SendCompletion::Answer)
    }

    fn answer_as(
        &mut self,
        connection: usize,
        frame: &Frame,
        body: Body,
        completion: SendCompletion,
    ) -> Result<(), ProtocolViolation> {
        if self.answers >= ANSWERS_MAX {
            return Err(ProtocolViolation::TooManyRequests);
        }
        self.answers += 1;
        self.push(connection, frame, body, completion);
        Ok(())
    }

    fn check_signal(&self, signal: &Signal) -> Result<(), ProtocolViolation> {
        if usize::from(signal.signal_slot) < self.signal_slots.len() {
            Ok(())
        } else {
            Err(ProtocolViolation::UnknownSignalSlot)
        }
    }
}

/// Pieces of split puts begin at multiples of this many bytes of the put.
const SPLIT_ALIGN_BYTES: usize = 4096;

impl PairState {
    /// Queues a transfer that the device has checked.
    pub(super) fn submit(&mut self, transfer: Transfer, id: TransferId) -> Result<(), SubmitError> {
        let signal = if let Transfer::Put { signal, .. } = &transfer { signal.as_ref() } else { None };
        self.expect_room(signal)?;
        self.under_way += 1;
        match transfer {
            Transfer::Put { src, dst, signal } => self.submit_put(src, dst, signal, id),
            Transfer::Get { src, dst } => self.submit_get(src, &dst, id),
            Transfer::Atomic { word, op } => {
                let token = self.pending.insert(Pending::Atomic(id));
                let frame = Frame::Atomic { key: word.key, offset: word.offset, op, token };
                self.push(0, &frame, Body::Nothing, SendCompletion::Nothing);
            }
        }
        Ok(())
    }

    /// Queues a signal without data.
    pub(super) fn signal(&mut self, signal: &Signal, id: TransferId) -> Result<(), SubmitError> {
        self.expect_room(Some(signal))?;
        self.under_way += 1;
        self.push(0, &Frame::Signal { signal: *signal }, Body::Nothing, SendCompletion::Transfer(id));
        Ok(())
    }

    /// Whether one more transfer may be under way, and the peer has the signal slot.
    fn expect_room(&self, signal: Option<&Signal>) -> Result<(), SubmitError> {
        if self.under_way >= QUEUE_DEPTH {
            return Err(SubmitError::QueueFull { peer: self.peer });
        }
        match signal {
            Some(signal) if usize::from(signal.signal_slot) >= self.peer_signal_slots => {
                Err(SubmitError::NoSuchSignalSlot {
                    signal_slot: signal.signal_slot,
                    signal_slots: self.peer_signal_slots,
                })
            }
            _ => Ok(()),
        }
    }

    fn submit_put(&mut self, src: Source, dst: RemoteSlice, signal: Option<Signal>, id: TransferId) {
        let end = dst.offset.checked_add(dst.len);
        let accepted = self.accepted.get(&dst.key).is_some_and(|len| end.is_some_and(|end| end <= *len));
        let pieces = pieces(src.len());
        match src {
            Source::Slice(slice) if pieces > 1 => {
                let (token, written) = if accepted {
                    self.next_split += 1;
                    let parts = SplitTransfer { id, remaining: pieces as u8, result: Ok(0) };
                    (NO_TOKEN_BIT | self.next_split, SendCompletion::Part(self.parts.insert(parts)))
                } else {
                    (self.pending.insert(Pending::Put(id)), SendCompletion::Nothing)
                };
                for (connection, (from, to)) in piece_bounds(slice.len(), pieces).enumerate() {
                    let piece = slice.slice(from..to).expect("pieces lie inside their whole");
                    let dst = RemoteSlice {
                        key: dst.key,
                        offset: dst.offset.saturating_add(from as u64),
                        len: (to - from) as u64,
                    };
                    let frame = if connection == 0 {
                        let other_connections = ((1u32 << pieces) - 2) as u8;
                        Frame::Put { dst, signal, wants_answer: !accepted, other_connections, token }
                    } else {
                        Frame::Piece { dst, token }
                    };
                    self.push(connection, &frame, Body::Slice(piece), written);
                }
            }
            src => {
                let (token, written) = if accepted {
                    (0, SendCompletion::Transfer(id))
                } else {
                    (self.pending.insert(Pending::Put(id)), SendCompletion::Nothing)
                };
                let frame = Frame::Put { dst, signal, wants_answer: !accepted, other_connections: 0, token };
                let body = match src {
                    Source::Slice(slice) => Body::Slice(slice),
                    Source::Inline(inline) => Body::Inline(inline),
                };
                self.push(0, &frame, body, written);
            }
        }
    }

    fn submit_get(&mut self, src: RemoteSlice, dst: &Slice, id: TransferId) {
        let pieces = pieces(dst.len());
        let report = if pieces == 1 {
            Report::Transfer(id)
        } else {
            Report::Part(self.parts.insert(SplitTransfer { id, remaining: pieces as u8, result: Ok(0) }))
        };
        for (connection, (from, to)) in piece_bounds(dst.len(), pieces).enumerate() {
            let piece = dst.slice(from..to).expect("pieces lie inside their whole");
            let src = RemoteSlice {
                key: src.key,
                offset: src.offset.saturating_add(from as u64),
                len: (to - from) as u64,
            };
            let token = self.pending.insert(Pending::Get { dst: piece, connection, report });
            if connection > 0 {
                self.announced[connection] += 1;
            }
            self.push(
                0,
                &Frame::Get { src, connection: connection as u8, token },
                Body::Nothing,
                SendCompletion::Nothing,
            );
        }
    }
}

/// The number of pieces of a transfer of this many bytes.
fn pieces(bytes: usize) -> usize {
    if bytes >= SPLIT_BYTES_MIN { CONNECTIONS } else { 1 }
}

/// The first byte and the end of each piece.
fn piece_bounds(bytes: usize, pieces: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = bytes.div_ceil(pieces).next_multiple_of(SPLIT_ALIGN_BYTES).min(bytes.max(1));
    (0..pieces).map(move |piece| {
        let from = (piece * step).min(bytes);
        (from, if piece + 1 == pieces { bytes } else { (from + step).min(bytes) })
    })
}
