//! The messages of two programs about tensors. They travel on the control connection of a link, in
//! the order in which they are sent.
//!
//! A receiver asks ([`Message::Ask`]). The sender's program answers when it has the tensor: by
//! reference ([`Message::Lent`]), or with the bytes behind the message ([`Message::Inline`]).
//! Either way the answer is a lease, whose return says that the bytes are no longer needed.
//!
//! **Invariant:** a message has at most [`pleach_transport::MESSAGE_BYTES_MAX`] bytes. What decodes
//! has a key within its limits, and texts of one line.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::MESSAGE_BYTES_MAX;
use pleach_transport::wire::{Malformed, Reader, Writer};

use crate::key::{Key, NAME_BYTES_MAX};
use crate::reference::{LeaseNumber, REFERENCE_BYTES, Reference};
use crate::table::{ReceiveError, Request};

/// Longest description of a tensor, in bytes: a type and eight dimensions need less.
pub const DESCRIPTION_BYTES_MAX: usize = 128;

/// Longest text of a failure, in bytes. A longer one is cut.
pub const TEXT_BYTES_MAX: usize = 2048;

/// The description of a tensor that a receiver needs beside the bytes: the element type and the
/// dimensions. The interface that both programs use defines its form. The exchange does not read
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description(Arc<[u8]>);

/// A description that is too long.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("the description of a tensor has {bytes} bytes, more than {DESCRIPTION_BYTES_MAX}")]
pub struct DescriptionError {
    /// Its length.
    pub bytes: usize,
}

impl Description {
    /// A description of these bytes.
    ///
    /// # Errors
    ///
    /// When there are too many.
    pub fn new(bytes: &[u8]) -> Result<Self, DescriptionError> {
        let is_short = bytes.len() <= DESCRIPTION_BYTES_MAX;
        if is_short { Ok(Self(bytes.into())) } else { Err(DescriptionError { bytes: bytes.len() }) }
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The kind of a failure, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FailureKind {
    /// The tensor did not come in time. gRPC: `DEADLINE_EXCEEDED`.
    Timeout = 1,
    /// The step ended, the sender is another incarnation, or the request came twice. gRPC:
    /// `ABORTED`.
    Aborted = 2,
    /// A limit is reached. gRPC: `RESOURCE_EXHAUSTED`.
    Exhausted = 3,
    /// The sender offers a fixed set of tensors, and this one is not among them. gRPC: `NOT_FOUND`.
    NotFound = 4,
    /// The sender is not reached, or is lost. gRPC: `UNAVAILABLE`.
    Unavailable = 5,
}

impl FailureKind {
    const ALL: [Self; 5] = [Self::Timeout, Self::Aborted, Self::Exhausted, Self::NotFound, Self::Unavailable];
}

/// Why a peer does not send a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// For programs.
    pub kind: FailureKind,
    /// For people, on one line.
    pub text: String,
}

impl Failure {
    /// A failure of this kind.
    #[must_use]
    pub fn new(kind: FailureKind, error: &impl fmt::Display) -> Self {
        // The reason of an abort may be any text.
        let mut text = error.to_string().replace(char::is_control, " ");
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        Self { kind, text }
    }
}

impl From<&ReceiveError> for Failure {
    fn from(error: &ReceiveError) -> Self {
        Self::new(FailureKind::from(error), error)
    }
}

impl From<&ReceiveError> for FailureKind {
    fn from(error: &ReceiveError) -> Self {
        match error {
            ReceiveError::Timeout { .. } => Self::Timeout,
            ReceiveError::TooManyReceives { .. } => Self::Exhausted,
            ReceiveError::DuplicateRequest { .. }
            | ReceiveError::WrongIncarnation { .. }
            | ReceiveError::Aborted { .. }
            | ReceiveError::CleanedUp { .. } => Self::Aborted,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A receiver asks for a tensor.
    Ask {
        /// The number of the call on this link: higher than those before.
        call: u64,
        /// The key.
        key: Key,
        /// The request.
        request: Request,
        /// How long the receiver waits.
        within: Duration,
    },
    /// The receiver waits no longer.
    Cancel {
        /// The call.
        call: u64,
    },
    /// The tensor of a call, by reference.
    Lent {
        /// The call.
        call: u64,
        /// The bytes.
        reference: Reference,
        /// What the bytes are.
        description: Description,
    },
    /// The tensor of a call; its bytes follow the message.
    Inline {
        /// The call.
        call: u64,
        /// The lease that ends when the bytes are received.
        lease: LeaseNumber,
        /// How many bytes follow.
        bytes: u64,
        /// What the bytes are.
        description: Description,
    },
    /// The call has no tensor.
    Failed {
        /// The call.
        call: u64,
        /// Why.
        failure: Failure,
    },
    /// The sender asks for a lease back whose reference the receiver may never have seen.
    Recall {
        /// The lease.
        lease: LeaseNumber,
    },
    /// The receiver has done with an RPC: references of it that have not come by now are lost.
    RpcEnded {
        /// The RPC.
        rpc: u64,
    },
    /// The counter of a slot, where the owner of leases cannot read the holder's memory.
    Returned {
        /// The slot.
        slot: u32,
        /// See [`crate::lease::ReturnCounters`].
        counter: u64,
    },
}

/// Why bytes are no message. The peer is wrong: sever it.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// There are too many.
    #[error("a message has at most {MESSAGE_BYTES_MAX} bytes, and this one has {bytes}")]
    TooLong {
        /// Their number.
        bytes: usize,
    },
    /// A message of this kind does not exist.
    #[error("a message is of kind {kind}, which this version does not know")]
    UnknownKind {
        /// The kind.
        kind: u8,
    },
    /// A field is missing, too long or not what it should be, or bytes are behind the last one.
    #[error("a message of kind {kind} is malformed")]
    Malformed {
        /// The kind.
        kind: u8,
    },
}

const ASK: u8 = 1;
const CANCEL: u8 = 2;
const LENT: u8 = 3;
const INLINE: u8 = 4;
const FAILED: u8 = 5;
const RETURNED: u8 = 6;
const RECALL: u8 = 7;
const RPC_ENDED: u8 = 8;

impl Message {
    /// Whether it is for the program that sends tensors ([`crate::Server`]), and not for the one
    /// that receives ([`crate::Calls`]).
    #[must_use]
    pub fn is_for_server(&self) -> bool {
        matches!(self, Self::Ask { .. } | Self::Cancel { .. } | Self::Returned { .. } | Self::RpcEnded { .. })
    }

    /// As it is sent.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let kind = |kind: u8| Writer::with_capacity(64).u8(kind);
        let writer = match self {
            Self::Ask { call, key, request, within } => {
                // More than 584 years are as good as these.
                let within_ns = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
                let writer = kind(ASK).u64(*call).u64(key.step()).u64(within_ns).u64(request.id);
                let writer = writer.u8(request.incarnation.is_some().into());
                writer.u64(request.incarnation.unwrap_or(0)).raw(key.name().as_bytes())
            }
            Self::Cancel { call } => kind(CANCEL).u64(*call),
            Self::Lent { call, reference, description } => {
                kind(LENT).u64(*call).raw(&reference.encode()).raw(description.as_bytes())
            }
            Self::Inline { call, lease, bytes, description } => {
                let writer = kind(INLINE).u64(*call).u32(lease.slot).u64(lease.generation);
                writer.u64(*bytes).raw(description.as_bytes())
            }
            Self::Failed { call, failure } => {
                let end = failure.text.floor_char_boundary(TEXT_BYTES_MAX);
                kind(FAILED).u64(*call).u8(failure.kind as u8).raw(&failure.text.as_bytes()[..end])
            }
            Self::Returned { slot, counter } => kind(RETURNED).u32(*slot).u64(*counter),
            Self::Recall { lease } => kind(RECALL).u32(lease.slot).u64(lease.generation),
            Self::RpcEnded { rpc } => kind(RPC_ENDED).u64(*rpc),
        };
        writer.finish()
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// See [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(MessageError::TooLong { bytes: bytes.len() });
        }
        let Some((&kind, rest)) = bytes.split_first() else {
            return Err(MessageError::Malformed { kind: 0 });
        };
        let mut fields = Reader::new(rest);
        let message = match kind {
            ASK => ask(&mut fields),
            CANCEL => cancel(&mut fields),
            LENT => lent(&mut fields),
            INLINE => inline(&mut fields),
            FAILED => failed(&mut fields),
            RETURNED => returned(&mut fields),
            RECALL => recall(&mut fields),
            RPC_ENDED => rpc_ended(&mut fields),
            _ => return Err(MessageError::UnknownKind { kind }),
        };
        let message = message.and_then(|message| fields.end().map(|()| message));
        message.map_err(|Malformed| MessageError::Malformed { kind })
    }
}

fn description(fields: &mut Reader<'_>) -> Result<Description, Malformed> {
    Description::new(fields.rest(DESCRIPTION_BYTES_MAX)?).map_err(|_| Malformed)
}

fn ask(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    let (call, step, within) = (fields.u64()?, fields.u64()?, Duration::from_nanos(fields.u64()?));
    let (id, has_incarnation, incarnation) = (fields.u64()?, fields.u8()?, fields.u64()?);
    let incarnation = match has_incarnation {
        0 if incarnation == 0 => None,
        1 => Some(incarnation),
        _ => return Err(Malformed),
    };
    let key = Key::new(step, fields.text_to_end(NAME_BYTES_MAX)?).map_err(|_| Malformed)?;
    Ok(Message::Ask { call, key, request: Request { id, incarnation }, within })
}

fn cancel(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    Ok(Message::Cancel { call: fields.u64()? })
}

fn lent(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    let call = fields.u64()?;
    let reference = Reference::decode(&fields.array::<REFERENCE_BYTES>()?).map_err(|_| Malformed)?;
    Ok(Message::Lent { call, reference, description: description(fields)? })
}

fn inline(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    let call = fields.u64()?;
    let lease = LeaseNumber { slot: fields.u32()?, generation: fields.u64()? };
    let bytes = fields.u64()?;
    Ok(Message::Inline { call, lease, bytes, description: description(fields)? })
}

fn failed(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    let (call, kind) = (fields.u64()?, fields.u8()?);
    let kind = FailureKind::ALL.into_iter().find(|known| *known as u8 == kind).ok_or(Malformed)?;
    let text = fields.text_to_end(TEXT_BYTES_MAX)?;
    if text.contains(char::is_control) {
        return Err(Malformed);
    }
    Ok(Message::Failed { call, failure: Failure { kind, text: text.to_owned() } })
}

fn returned(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    Ok(Message::Returned { slot: fields.u32()?, counter: fields.u64()? })
}

fn recall(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    Ok(Message::Recall { lease: LeaseNumber { slot: fields.u32()?, generation: fields.u64()? } })
}

fn rpc_ended(fields: &mut Reader<'_>) -> Result<Message, Malformed> {
    Ok(Message::RpcEnded { rpc: fields.u64()? })
}

#[cfg(test)]
mod tests {
    use pleach_transport::{RegionKey, RemoteSlice};
    use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};

    use super::*;
    use crate::reference::LinkId;

    fn lease() -> impl Strategy<Value = LeaseNumber> {
        (any::<u32>(), any::<u64>()).prop_map(|(slot, generation)| LeaseNumber { slot, generation })
    }

    fn description() -> impl Strategy<Value = Description> {
        let bytes = prop::collection::vec(any::<u8>(), 0..=DESCRIPTION_BYTES_MAX);
        bytes.prop_map(|bytes| Description::new(&bytes).expect("is short"))
    }

    fn ask() -> impl Strategy<Value = Message> {
        let request = (any::<u64>(), prop::option::of(any::<u64>()));
        let name = prop_oneof![Just("n".repeat(NAME_BYTES_MAX)), "[a-zä;/]{1,20}".prop_map(String::from)];
        (any::<u64>(), any::<u64>(), name, request, any::<u64>()).prop_map(
            |(call, step, name, (id, incarnation), within)| Message::Ask {
                call,
                key: Key::new(step, &name).expect("a good name"),
                request: Request { id, incarnation },
                within: Duration::from_nanos(within),
            },
        )
    }

    fn message() -> impl Strategy<Value = Message> {
        let lent = (any::<u64>(), any::<[u64; 4]>(), lease(), description()).prop_map(
            |(call, [link, key, offset, len], lease, description)| {
                let slice = RemoteSlice { key: RegionKey(key), offset, len };
                Message::Lent { call, reference: Reference { link: LinkId(link), lease, slice }, description }
            },
        );
        let inline = (any::<u64>(), lease(), any::<u64>(), description()).prop_map(
            |(call, lease, bytes, description)| Message::Inline { call, lease, bytes, description },
        );
        let failed = (any::<u64>(), "[a-zä ]{0,80}").prop_map(|(call, text)| Message::Failed {
            call,
            failure: Failure::new(FailureKind::Exhausted, &text),
        });
        let returned = (any::<u32>(), any::<u64>());
        prop_oneof![
            ask(),
            any::<u64>().prop_map(|call| Message::Cancel { call }),
            lent,
            inline,
            failed,
            returned.prop_map(|(slot, counter)| Message::Returned { slot, counter }),
            lease().prop_map(|lease| Message::Recall { lease }),
            any::<u64>().prop_map(|rpc| Message::RpcEnded { rpc }),
        ]
    }

    proptest! {
        #[test]
        fn a_message_survives_the_wire_and_none_of_its_beginnings_is_taken_for_it(message in message()) {
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{}", bytes.len());
            for end in 0..bytes.len() {
                assert_ne!(Message::decode(&bytes[..end]), Ok(message.clone()));
            }
            prop_assert_eq!(Message::decode(&bytes), Ok(message));
        }

        #[test]
        fn what_decodes_encodes_to_the_same_bytes(kind in 0_u8..10, rest in prop::collection::vec(0_u8..3, 0..80)) {
            let bytes = [&[kind], &rest[..]].concat();
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }

    #[test]
    fn the_longest_failure_is_cut_to_a_message_that_is_understood() {
        let failure = Failure::new(FailureKind::Aborted, &"ä".repeat(TEXT_BYTES_MAX));
        assert_eq!(failure.text.len(), TEXT_BYTES_MAX);
        let message = Message::Failed { call: 1, failure };
        assert_eq!(Message::decode(&message.encode()), Ok(message));
        assert_eq!(Failure::new(FailureKind::Aborted, &"two\nlines").text, "two lines");
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        assert_eq!(Message::decode(&[]), Err(MessageError::Malformed { kind: 0 }));
        assert_eq!(Message::decode(&[77]), Err(MessageError::UnknownKind { kind: 77 }));
        let long = [CANCEL; MESSAGE_BYTES_MAX + 1];
        assert_eq!(Message::decode(&long), Err(MessageError::TooLong { bytes: 4097 }));
        let malformed = |kind| Err(MessageError::Malformed { kind });
        let failure = Failure { kind: FailureKind::Timeout, text: "two\nlines".to_owned() };
        assert_eq!(Message::decode(&Message::Failed { call: 1, failure }.encode()), malformed(FAILED));
        let key = Key::new(1, "w").expect("a good name");
        let ask = Message::Ask { call: 1, key, request: Request::default(), within: Duration::ZERO };
        let mut nameless = ask.encode();
        nameless.pop();
        assert_eq!(Message::decode(&nameless), malformed(ASK));
        let mut long = ask.encode();
        long.extend([b'n'; NAME_BYTES_MAX]);
        assert_eq!(Message::decode(&long), malformed(ASK));
        let mut more = Message::Cancel { call: 1 }.encode();
        more.push(0);
        assert_eq!(Message::decode(&more), malformed(CANCEL));
    }
}
