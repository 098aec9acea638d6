//! Bounds what decoding takes, by a walk over the fields that makes nothing.
//!
//! A message of two bytes becomes a struct of hundreds, and a number of one byte becomes eight. So
//! messages, texts and numbers are counted before anything is made of them.

use super::{MODEL_BYTES_MAX, OnnxError};

/// Most messages and texts of a model.
const FIELDS_MAX: usize = 1 << 22;

/// Most messages of a model. The largest takes about a kilobyte.
const MESSAGES_MAX: usize = 1 << 20;

/// Most bytes of numbers that are not written as raw bytes.
const NUMBER_BYTES_MAX: usize = 1 << 28;

/// Deepest nesting of messages that is decoded: the decoder's own limit. The model lies at depth 0.
const DEPTH_MAX: usize = 100;

/// The kinds of messages that hold others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    SparseTensor,
    ValueInfo,
    Type,
    TensorTypeOf,
    Wrapper,
    Shape,
    Dimension,
    Function,
    Training,
    NodeConfiguration,
    Sharding,
    ShardedDim,
    DeviceGroup,
    Annotation,
    /// Holds texts and numbers only.
    Flat,
}

/// What a field of bytes is in a kind of message.
fn message_in(kind: Kind, field: u64) -> Option<Kind> {
    use Kind as K;
    Some(match (kind, field) {
        (K::Model, 7) | (K::Attribute, 6 | 11) | (K::Training, 1 | 2) => K::Graph,
        (K::Model, 8 | 14 | 26) | (K::Graph, 16) | (K::Tensor, 3 | 13 | 16) | (K::Node | K::Function, 9) => {
            K::Flat
        }
        (K::Model, 20) => K::Training,
        (K::Model, 25) => K::Function,
        (K::Graph, 1) | (K::Function, 7) => K::Node,
        (K::Graph, 5) | (K::Attribute, 5 | 10) | (K::SparseTensor, 1 | 2) => K::Tensor,
        (K::Graph, 15) | (K::Attribute, 22 | 23) => K::SparseTensor,
        (K::Graph, 11..=13) | (K::Function, 12) => K::ValueInfo,
        (K::Graph, 14) => K::Annotation,
        (K::Node, 5) | (K::Function, 11) => K::Attribute,
        (K::Node, 10) => K::NodeConfiguration,
        (K::NodeConfiguration, 2) => K::Sharding,
        (K::Sharding, 3) => K::DeviceGroup,
        (K::Sharding, 4) => K::ShardedDim,
        (K::Annotation, 2)
        | (K::ShardedDim, 2)
        | (K::Training, 3 | 4)
        | (K::Function, 14)
        | (K::ValueInfo, 4) => K::Flat,
        (K::ValueInfo, 2) | (K::Attribute, 14 | 15) | (K::Wrapper, 1 | 2) => K::Type,
        (K::Type, 1 | 8) => K::TensorTypeOf,
        (K::Type, 4 | 5 | 7 | 9) => K::Wrapper,
        (K::TensorTypeOf, 2) => K::Shape,
        (K::Shape, 1) => K::Dimension,
        _ => return None,
    })
}

/// Whether a field holds numbers that take more memory than bytes.
fn is_numbers(kind: Kind, field: u64) -> bool {
    matches!(
        (kind, field),
        (Kind::Tensor, 1 | 4 | 5 | 7 | 10 | 11)
            | (Kind::Attribute, 7 | 8)
            | (Kind::SparseTensor, 3)
            | (Kind::Sharding | Kind::DeviceGroup, 2)
    )
}

/// Counts what a model holds.
#[derive(Default)]
struct Counts {
    fields: usize,
    messages: usize,
    number_bytes: usize,
}

/// Refuses files that would take too much memory. What is no protobuf is left to the decoder.
pub(super) fn check(bytes: &[u8]) -> Result<(), OnnxError> {
    if bytes.len() > MODEL_BYTES_MAX {
        return Err(OnnxError::TooMuch { what: "bytes", most: MODEL_BYTES_MAX });
    }
    let mut counts = Counts::default();
    let mut open = vec![(Kind::Model, bytes)];
    while let Some((kind, rest)) = open.last_mut() {
        let kind = *kind;
        let Some((field, content)) = next_field(rest) else {
            open.pop();
            continue;
        };
        match content {
            Content::Number(bytes) => {
                counts.number_bytes += if is_numbers(kind, field) { bytes } else { 0 };
            }
            Content::GroupBegins if skip_group(rest).is_some() => {}
            Content::GroupBegins | Content::GroupEnds => drop(open.pop()),
            Content::Bytes(inner) => {
                counts.fields += 1;
                if is_numbers(kind, field) {
                    counts.number_bytes += inner.len();
                } else if let Some(inner_kind) = message_in(kind, field) {
                    counts.messages += 1;
                    if open.len() <= DEPTH_MAX {
                        open.push((inner_kind, inner));
                    }
                }
            }
        }
        counts.check()?;
    }
    Ok(())
}

impl Counts {
    fn check(&self) -> Result<(), OnnxError> {
        let limits = [
            (self.fields, "texts and messages", FIELDS_MAX),
            (self.messages, "messages", MESSAGES_MAX),
            (self.number_bytes, "bytes of numbers that are not raw", NUMBER_BYTES_MAX),
        ];
        let exceeded = limits.into_iter().find(|(count, _, most)| count > most);
        exceeded.map_or(Ok(()), |(_, what, most)| Err(OnnxError::TooMuch { what, most }))
    }
}

/// What a field holds.
enum Content<'a> {
    /// A number that took so many bytes.
    Number(usize),
    Bytes(&'a [u8]),
    /// The mark before the fields of a group, which the decoder skips.
    GroupBegins,
    /// The mark after them.
    GroupEnds,
}

/// The number and content of the next field; nothing at the end or where the bytes are wrong.
fn next_field<'a>(rest: &mut &'a [u8]) -> Option<(u64, Content<'a>)> {
    let key = varint(rest)?;
    let content = match key & 7 {
        0 => {
            let before = rest.len();
            varint(rest)?;
            Content::Number(before - rest.len())
        }
        1 => Content::Number(take(rest, 8)?.len()),
        5 => Content::Number(take(rest, 4)?.len()),
        2 => {
            let length = varint(rest)?;
            Content::Bytes(take(rest, usize::try_from(length).ok()?)?)
        }
        3 => Content::GroupBegins,
        4 => Content::GroupEnds,
        _ => return None,
    };
    Some((key >> 3, content))
}

/// Skips the rest of a group and the groups in it. The decoder checks that each has its own end.
fn skip_group(rest: &mut &[u8]) -> Option<()> {
    let mut open = 1;
    while open > 0 {
        match next_field(rest)?.1 {
            Content::GroupBegins => open += 1,
            Content::GroupEnds => open -= 1,
            Content::Number(_) | Content::Bytes(_) => {}
        }
    }
    Some(())
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for place in 0..10 {
        let byte = *rest.get(place)?;
        number |= u64::from(byte & 0x7f).wrapping_shl(7 * place as u32);
        if byte < 0x80 {
            *rest = &rest[place + 1..];
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of bytes.
    fn field(number: u64, content: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        prost::encoding::encode_varint(number << 3 | 2, &mut bytes);
        prost::encoding::encode_varint(content.len() as u64, &mut bytes);
        bytes.extend(content);
        bytes
    }

    /// A content inside of messages of these fields, the outermost first.
    fn within(fields: &[u64], content: Vec<u8>) -> Vec<u8> {
        fields.iter().rev().fold(content, |content, &number| field(number, &content))
    }

    const TOO_MANY_MESSAGES: Result<(), OnnxError> =
        Err(OnnxError::TooMuch { what: "messages", most: MESSAGES_MAX });

    #[test]
    fn many_small_messages_are_refused_before_they_are_decoded() {
        // Nodes without content, two bytes each, in a graph.
        let nodes = [0x0a, 0x00].repeat(MESSAGES_MAX + 1);
        assert_eq!(check(&field(7, &nodes)), TOO_MANY_MESSAGES);
    }

    #[test]
    fn messages_behind_a_group_are_counted() {
        use prost::Message as _;
        // Group 100 with a number, a text and a group in it; the decoder skips it.
        let group = [0xa3, 0x06, 0x08, 0x01, 0x12, 0x01, 0x61, 0x1b, 0x1c, 0xa4, 0x06];
        let graph = |nodes: usize| field(7, &[group.to_vec(), [0x0a, 0x00].repeat(nodes)].concat());
        let model = crate::onnx::proto::ModelProto::decode(graph(3).as_slice()).expect("it is a model");
        assert_eq!(model.graph.expect("it has a graph").node.len(), 3);
        assert_eq!(check(&graph(3)), Ok(()));
        assert_eq!(check(&graph(MESSAGES_MAX + 1)), TOO_MANY_MESSAGES);
    }

    #[test]
    fn numbers_that_are_packed_count_like_others() {
        let numbers = vec![1; NUMBER_BYTES_MAX + 1];
        let too_many =
            Err(OnnxError::TooMuch { what: "bytes of numbers that are not raw", most: NUMBER_BYTES_MAX });
        // Devices of a tensor, and devices of a group of devices, in a node's configuration.
        for fields in [[7, 1, 10, 2, 2].as_slice(), &[7, 1, 10, 2, 3, 2], &[7, 5, 7]] {
            assert_eq!(check(&within(fields, numbers.clone())), too_many, "{fields:?}");
        }
    }

    #[test]
    fn the_deepest_message_that_is_decoded_is_counted() {
        use prost::Message as _;
        // Bodies of bodies: a graph, 32 times node, attribute and graph, and a tensor at the end.
        let mut fields = vec![7];
        fields.extend([1, 5, 6].repeat(32));
        fields.extend([1, 5, 5]);
        assert_eq!(fields.len(), DEPTH_MAX);
        let model = |texts: usize| within(&fields, [0x32, 0x00].repeat(texts));
        assert!(crate::onnx::proto::ModelProto::decode(model(1).as_slice()).is_ok());
        assert_eq!(check(&model(1)), Ok(()));
        let too_many = Err(OnnxError::TooMuch { what: "texts and messages", most: FIELDS_MAX });
        assert_eq!(check(&model(FIELDS_MAX)), too_many);
        fields.push(13);
        assert!(crate::onnx::proto::ModelProto::decode(within(&fields, Vec::new()).as_slice()).is_err());
    }

    #[test]
    fn a_field_that_is_cut_off_ends_the_walk() {
        assert_eq!(check(&[0x3a, 0x7f, 0x0a]), Ok(()));
        assert_eq!(check(&[0xff; 16]), Ok(()));
    }
}
