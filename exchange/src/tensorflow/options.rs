//! What two programs with pleach say to each other in `transport_options`, which TensorFlow leaves
//! to the transport: the same as the plug-ins of two tasks (`python/pleach/tensorflow`).
//!
//! | message | in | content |
//! | --- | --- | --- |
//! | Ask | a request | the incarnation of the endpoint to which the receiver has a link |
//! | Introduction | the answer to RecvTensor of [`INTRODUCTION_KEY`] | incarnation and address of the endpoint |
//! | Offer | an answer | the number of the offer, type and shape; the answer has no tensor |
//!
//! Numbers are little-endian, after a name and the version. A message of another version is none.
//! An offer is a tensor under the key whose step is the number; its name is what fits of the
//! rendezvous key ([`Offer::key`]).

use bytes::Bytes;

use super::ElementKind;
use super::messages::TransportOptions;
use crate::key::{Key, NAME_BYTES_MAX};

/// No key of a rendezvous: a task without pleach answers that it is malformed.
pub const INTRODUCTION_KEY: &str = "pleach introduction";

const VERSION: u64 = 1;

/// Most dimensions of an offer, as TensorFlow has them.
const DIMENSIONS_MAX: usize = 254;

const NAMES: &str = "type.googleapis.com/pleach.";

/// A tensor that is received by the exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Random: who was told it may receive the tensor.
    pub number: u64,
    /// The type of the elements; never strings.
    pub element: ElementKind,
    /// The sizes.
    pub dimensions: Vec<u64>,
}

impl Offer {
    /// The key under which the tensor of a rendezvous key is offered.
    #[must_use]
    pub fn key(&self, rendezvous_key: &str) -> Option<Key> {
        // The plug-in's buffer has a byte more than the name.
        let end = rendezvous_key.floor_char_boundary(NAME_BYTES_MAX);
        Key::new(self.number, &rendezvous_key[..end]).ok()
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportOption {
    /// The receiver takes an offer.
    Ask {
        /// Of the endpoint to which the receiver has a link; 0 where there is none.
        incarnation: u64,
    },
    /// Where the sender's endpoint is.
    Introduction {
        /// Its incarnation.
        incarnation: u64,
        /// Its address.
        address: String,
    },
    /// The tensor, by the exchange.
    Offer(Offer),
}

impl TransportOption {
    /// Reads a message; nothing if it is none of these.
    #[must_use]
    pub fn read(options: &TransportOptions) -> Option<Self> {
        let name = options.type_url.strip_prefix(NAMES)?;
        let mut rest = &options.value[..];
        if take(&mut rest)? != VERSION {
            return None;
        }
        match name {
            "Ask" => Some(Self::Ask { incarnation: take(&mut rest)? }),
            "Introduction" => {
                let incarnation = take(&mut rest)?;
                let address = std::str::from_utf8(rest).ok()?.to_owned();
                Some(Self::Introduction { incarnation, address })
            }
            "Offer" => {
                let (number, element) = (take(&mut rest)?, take(&mut rest)?);
                let element = ElementKind::from_number(i32::try_from(element).ok()?)?;
                let (sizes, []) = rest.as_chunks::<8>() else { return None };
                let is_right = element.bytes().is_some() && sizes.len() <= DIMENSIONS_MAX;
                let dimensions = sizes.iter().map(|size| u64::from_le_bytes(*size)).collect();
                is_right.then_some(Self::Offer(Offer { number, element, dimensions }))
            }
            _ => None,
        }
    }

    /// As it is sent.
    #[must_use]
    pub fn write(&self) -> TransportOptions {
        let (name, numbers, text) = match self {
            Self::Ask { incarnation } => ("Ask", vec![*incarnation], ""),
            Self::Introduction { incarnation, address } => {
                ("Introduction", vec![*incarnation], address.as_str())
            }
            Self::Offer(Offer { number, element, dimensions }) => {
                let numbers = [*number, element.number().unsigned_abs().into()];
                ("Offer", numbers.into_iter().chain(dimensions.iter().copied()).collect(), "")
            }
        };
        let numbers = std::iter::once(VERSION).chain(numbers).flat_map(u64::to_le_bytes);
        let value: Bytes = numbers.chain(text.bytes()).collect();
        TransportOptions { type_url: format!("{NAMES}{name}"), value }
    }
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> [TransportOption; 4] {
        let offer = |dimensions| Offer { number: 7, element: ElementKind::Bool, dimensions };
        [
            TransportOption::Ask { incarnation: u64::MAX },
            TransportOption::Introduction { incarnation: 5, address: "127.0.0.1:7".to_owned() },
            TransportOption::Offer(offer(vec![2, 3])),
            TransportOption::Offer(offer(Vec::new())),
        ]
    }

    #[test]
    fn a_message_survives_and_one_of_another_version_is_none() {
        for message in messages() {
            let written = message.write();
            assert_eq!(TransportOption::read(&written), Some(message));
            let mut value = written.value.to_vec();
            value[0] += 1;
            assert_eq!(TransportOption::read(&TransportOptions { value: value.into(), ..written }), None);
        }
    }

    #[test]
    fn what_the_plug_in_writes_is_read() {
        // `Write(const Ask&, …)` of `plugin/messages.h`, with incarnation 258.
        let value = Bytes::from_static(&[1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        let options = TransportOptions { type_url: "type.googleapis.com/pleach.Ask".to_owned(), value };
        assert_eq!(TransportOption::read(&options), Some(TransportOption::Ask { incarnation: 258 }));
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_no_offer() {
        let offer = |number: u64| {
            let (element, dimensions) = (ElementKind::Float, vec![1; DIMENSIONS_MAX]);
            TransportOption::Offer(Offer { number, element, dimensions }).write()
        };
        assert!(TransportOption::read(&offer(1)).is_some());
        let written = offer(1);
        for value in [[&written.value[..], &[0; 8]].concat(), written.value[..25].to_vec()] {
            assert_eq!(TransportOption::read(&TransportOptions { value: value.into(), ..offer(1) }), None);
        }
    }

    #[test]
    fn the_key_of_an_offer_has_what_fits_of_the_name() {
        let offer = Offer { number: 9, element: ElementKind::Float, dimensions: Vec::new() };
        let long = "ä".repeat(NAME_BYTES_MAX);
        assert_eq!(offer.key(&long).map(|key| (key.step(), key.name().len())), Some((9, NAME_BYTES_MAX)));
        assert_eq!(offer.key(""), None);
    }
}
