//! Decodes a request of unknown origin.
//!
//! A submessage or a text of two bytes becomes a struct of a hundred, so they are counted before
//! anything is decoded. What else repeats takes at most eight times its bytes.

use bytes::Buf;
use prost::Message as _;

use super::InferenceError;
use super::messages::ModelInferRequest;

/// The most fields with a length that a request may have: tensors, parameters, texts, contents.
pub const FIELDS_MAX: usize = 1 << 14;

/// Messages in messages, from the request to an element of text.
const DEPTH_MAX: u32 = 5;

/// Decodes a request, in one piece or several. Clones of it share its bytes.
///
/// # Errors
///
/// [`InferenceError::Invalid`]: it is none, or has more than [`FIELDS_MAX`] fields.
pub fn decode(message: impl Buf + Clone) -> Result<ModelInferRequest, InferenceError> {
    let mut left = FIELDS_MAX;
    count(&mut message.clone(), 0, REQUEST, DEPTH_MAX, &mut left)?;
    ModelInferRequest::decode(message).map_err(|error| invalid(&error.to_string()))
}

fn invalid(reason: &str) -> InferenceError {
    InferenceError::Invalid(format!("this is no ModelInferRequest: {reason}"))
}

/// The fields of a message that are messages, with theirs.
struct Shape(&'static [(u64, &'static Shape)]);

const LEAF: &Shape = &Shape(&[]);
const PARAMETER: &Shape = &Shape(&[(2, LEAF)]);
const INPUT: &Shape = &Shape(&[(4, PARAMETER), (5, LEAF)]);
const OUTPUT: &Shape = &Shape(&[(2, PARAMETER)]);
const REQUEST: &Shape = &Shape(&[(4, PARAMETER), (5, INPUT), (6, OUTPUT)]);

/// Counts the fields with a length, down to the leaves, of a message behind which `behind` bytes
/// remain.
fn count(
    bytes: &mut impl Buf,
    behind: usize,
    shape: &Shape,
    depth: u32,
    left: &mut usize,
) -> Result<(), InferenceError> {
    let cut = || invalid("it is cut off or malformed");
    while bytes.remaining() > behind {
        let key = varint(bytes, behind).ok_or_else(cut)?;
        let length = match key & 7 {
            0 => {
                varint(bytes, behind).ok_or_else(cut)?;
                0
            }
            1 => 8,
            2 => {
                *left = left.checked_sub(1).ok_or_else(|| {
                    let most = FIELDS_MAX;
                    invalid(&format!("it has more than {most} tensors, parameters and texts"))
                })?;
                varint(bytes, behind).ok_or_else(cut)?
            }
            5 => 4,
            _ => return Err(cut()),
        };
        let length = usize::try_from(length).ok().filter(|length| *length <= bytes.remaining() - behind);
        let length = length.ok_or_else(cut)?;
        let inner = shape.0.iter().find(|(tag, _)| *tag == key >> 3 && key & 7 == 2);
        if let Some((_, inner)) = inner {
            let depth = depth.checked_sub(1).ok_or_else(cut)?;
            count(bytes, bytes.remaining() - length, inner, depth, left)?;
        } else {
            bytes.advance(length);
        }
    }
    Ok(())
}

/// A number of at most 64 bits.
fn varint(bytes: &mut impl Buf, behind: usize) -> Option<u64> {
    let mut value = 0_u64;
    for place in 0..10 {
        if bytes.remaining() <= behind {
            return None;
        }
        let byte = bytes.get_u8();
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::messages::InferTensorContents;
    use super::super::messages::model_infer_request::InferInputTensor;
    use super::*;

    /// A message in two pieces.
    #[derive(Clone)]
    struct Pair<'a>(&'a [u8], &'a [u8]);

    impl Buf for Pair<'_> {
        fn remaining(&self) -> usize {
            self.0.len() + self.1.len()
        }

        fn chunk(&self) -> &[u8] {
            if self.0.is_empty() { self.1 } else { self.0 }
        }

        fn advance(&mut self, count: usize) {
            let first = count.min(self.0.len());
            self.0.advance(first);
            self.1.advance(count - first);
        }
    }

    #[test]
    fn a_request_is_decoded_as_it_was_encoded() {
        let contents = InferTensorContents { int_contents: vec![-1, 5], ..InferTensorContents::default() };
        let input = InferInputTensor {
            name: "x".to_owned(),
            datatype: "INT32".to_owned(),
            shape: vec![2],
            contents: Some(contents),
            ..InferInputTensor::default()
        };
        let request = ModelInferRequest {
            model_name: "m".to_owned(),
            inputs: vec![input],
            raw_input_contents: vec![Bytes::from_static(b"abc")],
            ..ModelInferRequest::default()
        };
        let encoded = request.encode_to_vec();
        assert_eq!(decode(&encoded[..]), Ok(request.clone()));
        for place in 0..encoded.len() {
            let (before, behind) = encoded.split_at(place);
            assert_eq!(decode(Pair(before, behind)), Ok(request.clone()), "cut at {place}");
        }
    }

    #[test]
    fn what_would_become_longer_in_memory_is_counted_first() {
        let most = ModelInferRequest {
            inputs: vec![InferInputTensor::default(); FIELDS_MAX],
            ..ModelInferRequest::default()
        };
        assert!(decode(&most.encode_to_vec()[..]).is_ok());
        let texts = vec![Bytes::new(); FIELDS_MAX];
        let contents = InferTensorContents { bytes_contents: texts, ..InferTensorContents::default() };
        let input = InferInputTensor { contents: Some(contents), ..InferInputTensor::default() };
        let more = ModelInferRequest { inputs: vec![input], ..ModelInferRequest::default() };
        let error = decode(&more.encode_to_vec()[..]).expect_err("it has too many").to_string();
        assert!(error.contains("more than 16384"), "{error}");
        for wrong in [&b"\x2a"[..], b"\x2a\x05a", b"\x0b", b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"] {
            assert!(matches!(decode(wrong), Err(InferenceError::Invalid(_))));
        }
    }
}
