//! Bodies around those of tonic: one lends, one accepts.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::body::Body;
use tonic::{Code, Status, TimeoutExpired};

use super::fields::{self, FieldName, Lender, lending_by};
use super::introduction::one_line;
use crate::endpoint::rpcs::{AcceptedField, FieldError, OverRpc, PendingField};
use crate::endpoint::{Endpoint, ReceivedTensor};
use crate::gathered::{self, Beginning};
use crate::reference::LinkId;

/// Names of fields that a body remembers before it looks which of them were taken.
const ACCEPTED_MAX: usize = 64;

/// What an end has to say when an RPC is over.
pub(crate) struct RpcEnd {
    pub(crate) endpoint: Endpoint,
    pub(crate) rpc: u64,
    /// What has lent for it.
    pub(crate) lender: Option<Arc<Lender>>,
    /// See [`OverRpc`].
    pub(crate) recalls: bool,
    /// See [`OverRpc`]. `None` when the answer has come to its end, so all of it was seen.
    pub(crate) misses: Option<LinkId>,
}

impl RpcEnd {
    fn over(&mut self) -> Option<OverRpc> {
        let lends = self.lender.take().and_then(|lender| lender.end());
        let (rpc, recalls, misses) = (self.rpc, self.recalls, self.misses.take());
        (lends.is_some() || misses.is_some()).then_some(OverRpc { rpc, lends, recalls, misses })
    }

    /// The body has come to its end.
    pub(crate) fn finish(mut self) {
        self.misses = None;
        if let Some(over) = self.over() {
            self.endpoint.rpc_over(over);
        }
    }
}

impl Drop for RpcEnd {
    fn drop(&mut self) {
        if let Some(over) = self.over() {
            self.endpoint.rpc_dropped(over);
        }
    }
}

/// A body that is sent: its encoder lends fields.
pub(crate) struct LendingBody {
    inner: Body,
    lender: Arc<Lender>,
    /// What the end of the body means at this end.
    end: Option<RpcEnd>,
}

impl LendingBody {
    pub(crate) fn new(inner: Body, lender: Arc<Lender>, end: Option<RpcEnd>) -> Self {
        Self { inner, lender, end }
    }
}

impl HttpBody for LendingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let inner = Pin::new(&mut this.inner);
        let polled = lending_by(this.lender.clone(), || inner.poll_frame(context));
        let is_over = match &polled {
            Poll::Ready(Some(Ok(frame))) => frame.is_trailers(),
            Poll::Ready(_) => true,
            Poll::Pending => false,
        };
        if is_over && let Some(end) = this.end.take() {
            end.finish();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // Of what the encoder will write nothing is known.
        SizeHint::default()
    }
}

/// The status of a call that failed at this end, or whose answer did: it names the call, and its
/// source is what happened. A lost server is `UNAVAILABLE`, and the end of tonic's timer
/// `DEADLINE_EXCEEDED`; of all else the code is tonic's.
pub(crate) fn failed(call: &str, error: Status) -> Status {
    let (mut is_lost, mut is_late) = (false, false);
    let mut cause: &dyn Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
        is_late |= cause.is::<TimeoutExpired>();
        is_lost |= ends_connection(cause);
    }
    let cause = match error.source() {
        Some(_) => cause.to_string(),
        None => error.message().to_owned(),
    };
    let (code, what) = match error.code() {
        _ if is_late => (Code::DeadlineExceeded, "there is no answer in time"),
        _ if is_lost => (Code::Unavailable, "the server is lost"),
        code => (code, "it failed"),
    };
    let mut status = Status::new(code, format!("{call}: {what}: {}", one_line(&cause)));
    status.set_source(Arc::new(error));
    status
}

/// Whether an error is the end of a connection: of its socket, or of a call that waits for a place
/// on it. For tonic the first one is unknown and the second one cancelled.
fn ends_connection(error: &(dyn Error + 'static)) -> bool {
    error.is::<io::Error>()
        // It keeps the error of the socket to itself.
        || error.downcast_ref().is_some_and(h2::Error::is_io)
        || error.downcast_ref().is_some_and(hyper::Error::is_canceled)
}

/// A body that is read: references are accepted before their message is given to the decoder.
pub(crate) struct AcceptingBody {
    inner: Body,
    endpoint: Endpoint,
    scanner: Scanner,
    /// Fields whose bytes are on their way.
    pending: VecDeque<(FieldName, PendingField)>,
    /// The frame that waits for them.
    held: Option<Frame<Bytes>>,
    /// Fields that were accepted, which the decoder may not have taken.
    accepted: Vec<FieldName>,
    end: Option<RpcEnd>,
}

impl AcceptingBody {
    pub(crate) fn new(inner: Body, endpoint: Endpoint, end: Option<RpcEnd>) -> Self {
        let end = if inner.is_end_stream() {
            end.into_iter().for_each(RpcEnd::finish);
            None
        } else {
            end
        };
        let (scanner, pending) = (Scanner::default(), VecDeque::new());
        Self { inner, endpoint, scanner, pending, held: None, accepted: Vec::new(), end }
    }

    fn accept(&mut self, data: &Bytes) -> Result<(), Status> {
        for field in self.scanner.scan(data)? {
            let name = (field.reference.link, field.reference.lease);
            match self.endpoint.accept_for_rpc(&field).map_err(status)? {
                AcceptedField::Here(tensor) => self.put(name, tensor),
                AcceptedField::Coming(pending) => self.pending.push_back((name, pending)),
            }
        }
        Ok(())
    }

    /// A field waits for the decoder from now on.
    fn put(&mut self, name: FieldName, tensor: ReceivedTensor) {
        fields::put(name, tensor.into_bytes());
        self.accepted.push(name);
    }

    /// Waits for the bytes of the fields.
    fn poll_pending(&mut self, context: &Context<'_>) -> Poll<Result<(), Status>> {
        while let Some((name, pending)) = self.pending.front() {
            let tensor = ready!(pending.poll(context.waker())).map_err(status)?;
            let name = *name;
            self.put(name, tensor);
            self.pending.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

fn status(error: FieldError) -> Status {
    match error {
        FieldError::Lost(text) => Status::unavailable(format!("a field by reference: {text}")),
        FieldError::Wrong(text) => Status::data_loss(format!("a field by reference: {text}")),
    }
}

impl HttpBody for AcceptingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            ready!(this.poll_pending(context))?;
            if let Some(frame) = this.held.take() {
                return Poll::Ready(Some(Ok(frame)));
            }
            // The decoder has taken the fields of the messages before, as it asks for more.
            if this.accepted.len() >= ACCEPTED_MAX {
                this.accepted.retain(fields::waits);
            }
            let polled = ready!(Pin::new(&mut this.inner).poll_frame(context));
            match polled {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        this.accept(data)?;
                    } else if let Some(end) = this.end.take() {
                        end.finish();
                    }
                    this.held = Some(frame);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    this.end.take().into_iter().for_each(RpcEnd::finish);
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for AcceptingBody {
    fn drop(&mut self) {
        for name in &self.accepted {
            drop(fields::take(name));
        }
    }
}

/// Finds references in a stream of gRPC's messages: each has five bytes before it, whether it is
/// compressed and its length.
#[derive(Default)]
struct Scanner {
    state: Scan,
}

/// Bytes before a message of gRPC.
const PREFIX_BYTES: usize = 5;

enum Scan {
    /// The prefix of the next message has not come as a whole.
    Prefix(Vec<u8>),
    /// The beginning of a message of this length has not come as a whole.
    Beginning { length: usize, bytes: Vec<u8> },
    /// So many bytes of a message are of no interest.
    Rest(usize),
}

impl Default for Scan {
    fn default() -> Self {
        Self::Prefix(Vec::new())
    }
}

impl Scanner {
    /// The fields by reference whose names end in these bytes.
    fn scan(&mut self, data: &Bytes) -> Result<Vec<gathered::Field>, Status> {
        let malformed = |_| Status::data_loss("a message by reference is malformed");
        let (mut rest, mut fields) = (&data[..], Vec::new());
        // A state that needs no more bytes is left also where none are there.
        loop {
            let next = match &mut self.state {
                Scan::Prefix(prefix) => {
                    fill(prefix, PREFIX_BYTES, &mut rest);
                    let [is_compressed, length @ ..] = &prefix[..] else { return Ok(fields) };
                    let Ok(length) = <[u8; 4]>::try_from(length) else { return Ok(fields) };
                    match (u32::from_be_bytes(length) as usize, is_compressed) {
                        (length, 0) => Scan::Beginning { length, bytes: Vec::new() },
                        (length, _) => Scan::Rest(length),
                    }
                }
                Scan::Beginning { length, bytes } => {
                    match gathered::decode(bytes, *length).map_err(malformed)? {
                        Beginning::Needs(_) if rest.is_empty() => return Ok(fields),
                        Beginning::Needs(all) => {
                            fill(bytes, all, &mut rest);
                            continue;
                        }
                        Beginning::Ordinary => Scan::Rest(*length - bytes.len()),
                        Beginning::Fields(found, all) => {
                            fields.extend(found);
                            Scan::Rest(*length - all)
                        }
                    }
                }
                Scan::Rest(0) => Scan::default(),
                Scan::Rest(_) if rest.is_empty() => return Ok(fields),
                Scan::Rest(left) => {
                    let here = (*left).min(rest.len());
                    rest.advance(here);
                    Scan::Rest(*left - here)
                }
            };
            self.state = next;
        }
    }
}

/// Takes bytes until there are so many.
fn fill(bytes: &mut Vec<u8>, all: usize, rest: &mut &[u8]) {
    let here = all.saturating_sub(bytes.len()).min(rest.len());
    bytes.extend_from_slice(&rest[..here]);
    rest.advance(here);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::gathered::{Field, RegisteredPart};
    use crate::reference::{LeaseNumber, Reference};

    fn field(number: u64) -> Field {
        let slice = RegisteredPart::NONE.slice;
        let lease = LeaseNumber { slot: 1, generation: number };
        Field {
            at: 0,
            reference: Reference { link: LinkId(1), lease, slice },
            registered: RegisteredPart::NONE,
        }
    }

    /// A message as gRPC sends it.
    fn framed(is_compressed: bool, message: &[u8]) -> Vec<u8> {
        let length = (message.len() as u32).to_be_bytes();
        [&[u8::from(is_compressed)], &length[..], message].concat()
    }

    proptest! {
        #[test]
        fn references_are_found_wherever_the_stream_is_cut(
            kinds in prop::collection::vec((0..4, prop::sample::select(vec![0, 1, 7, 300_usize])), 1..12),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let (mut stream, mut expected) = (Vec::new(), Vec::new());
            for (number, (kind, length)) in kinds.into_iter().enumerate() {
                let fields: Vec<Field> = (0..=number as u64 % 3).map(field).collect();
                let reference = [gathered::encode(&fields), vec![9; length]].concat();
                match kind {
                    0 => stream.extend(framed(false, &vec![1; length])),
                    // What is compressed is not looked into.
                    1 => stream.extend(framed(true, &reference)),
                    _ => {
                        stream.extend(framed(false, &reference));
                        expected.extend(fields);
                    }
                }
            }
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            ends.push(stream.len());
            ends.sort_unstable();
            let (mut scanner, mut found, mut start) = (Scanner::default(), Vec::new(), 0);
            for end in ends {
                let piece = Bytes::copy_from_slice(&stream[start..end]);
                found.extend(scanner.scan(&piece).expect("is good"));
                start = end;
            }
            prop_assert_eq!(found, expected);
            prop_assert!(matches!(&scanner.state, Scan::Prefix(prefix) if prefix.is_empty()));
        }
    }

    #[test]
    fn a_message_that_begins_as_one_by_reference_and_is_none_is_refused() {
        let wrong = Bytes::from(framed(false, &[0; 20]));
        let refused = Scanner::default().scan(&wrong).expect_err("is malformed");
        assert_eq!(refused.code(), tonic::Code::DataLoss);
    }
}
