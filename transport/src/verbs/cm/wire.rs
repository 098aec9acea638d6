//! The messages of ranks that the connection manager connects: a [`ListenerAddress`] over the
//! control stream, then one [`PrivateData`] each way for each queue pair. All bytes of a peer are
//! decoded here.

use std::net::Ipv6Addr;

use crate::Rank;
use crate::verbs::port::GidType;
use crate::verbs::wire::{PairHello, QUEUE_PAIRS_MAX, QueuePairHello, VERSION, queue_pairs, versioned};
use crate::wire::{Malformed, Reader, Writer};

/// Where a rank listens for its peer. The token authenticates the peer's connect requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::verbs) struct ListenerAddress {
    pub(super) token: u64,
    /// One for each of its queue pairs.
    pub(super) endpoints: Vec<Endpoint>,
}

/// The address of the listener for one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// The GID of its port.
    pub(super) address: Ipv6Addr,
    pub(super) kind: GidType,
    /// The port number of rdma_cm's TCP port space.
    pub(super) number: u16,
}

impl Endpoint {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            address: Ipv6Addr::from(reader.array::<16>()?),
            kind: GidType::decode(reader.u8()?)?,
            number: reader.u16()?,
        })
    }

    /// Whether an address of this rank reaches the endpoint. The manager chooses the version of
    /// RoCE, so unlike for [`GidType`] only the address families must agree.
    pub(super) fn is_reachable_from(&self, own: Ipv6Addr) -> bool {
        self.address.to_ipv4_mapped().is_some() == own.to_ipv4_mapped().is_some()
    }
}

impl ListenerAddress {
    pub(in crate::verbs) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default().u16(VERSION).u64(self.token).u8(self.endpoints.len() as u8);
        let writer = self.endpoints.iter().fold(writer, |writer, Endpoint { address, kind, number }| {
            writer.raw(&address.octets()).u8(*kind as u8).u16(*number)
        });
        writer.finish()
    }

    pub(in crate::verbs) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = versioned(bytes)?;
        let mut listener = Self { token: reader.u64()?, endpoints: Vec::new() };
        for _ in 0..queue_pairs(&mut reader)? {
            listener.endpoints.push(Endpoint::decode(&mut reader)?);
        }
        reader.end()?;
        Ok(listener)
    }
}

/// Private data of a connect request, in bytes, without those that the manager itself needs.
const PRIVATE_DATA_BYTES_MAX: usize = 56;

const PRIVATE_DATA_BYTES: usize = 2 + 4 + 8 + 1 + 1 + 1 + 1 + 1 + 4 + 4 + 8 + 4;
const _: () = assert!(PRIVATE_DATA_BYTES <= PRIVATE_DATA_BYTES_MAX);

/// The private data of a connect request and of its response: the sender's end of a queue pair. Its
/// address is known to the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrivateData {
    pub(super) rank: Rank,
    /// The token of the [`ListenerAddress`].
    pub(super) token: u64,
    /// The index of the queue pair; it is connected to the peer's of the same index.
    pub(super) queue: u8,
    /// The number of queue pairs.
    pub(super) queues: u8,
    /// The index of its NIC.
    pub(super) nic: u8,
    /// Path MTU of its port, in the code of the verbs.
    pub(super) mtu: u8,
    pub(super) reads: u8,
    pub(super) credits: u32,
    pub(super) signal_slots: u32,
    pub(super) inbox_address: u64,
    pub(super) inbox_key: u32,
}

impl PrivateData {
    pub(super) fn encode(&self) -> [u8; PRIVATE_DATA_BYTES] {
        let Self { queue, queues, nic, mtu, reads, .. } = *self;
        let writer = Writer::default().u16(VERSION).u32(self.rank).u64(self.token);
        let writer = writer.raw(&[queue, queues, nic, mtu, reads]).u32(self.credits).u32(self.signal_slots);
        writer.u64(self.inbox_address).u32(self.inbox_key).to_array()
    }

    /// Decodes private data, which may be longer: the manager pads it.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = versioned(bytes)?;
        let (rank, token) = (reader.u32()?, reader.u64()?);
        let [queue, queues, nic, mtu, reads] = reader.array()?;
        let data = Self {
            rank,
            token,
            queue,
            queues,
            nic,
            mtu,
            reads,
            credits: reader.u32()?,
            signal_slots: reader.u32()?,
            inbox_address: reader.u64()?,
            inbox_key: reader.u32()?,
        };
        let is_valid = (1..=QUEUE_PAIRS_MAX).contains(&usize::from(queues))
            && queue < queues
            && data.credits > 0
            && (queue > 0 || nic == 0)
            && data.of_queue(0).is_valid();
        if is_valid { Ok(data) } else { Err(Malformed) }
    }

    /// The same contents as a hello of the control stream.
    pub(super) fn hello(&self, queue_pair: u32) -> (PairHello, QueuePairHello) {
        let queue = self.of_queue(queue_pair);
        let Self { reads, credits, inbox_address, signal_slots, .. } = *self;
        (PairHello { reads, credits, inbox_address, signal_slots, queues: vec![queue] }, queue)
    }

    fn of_queue(&self, queue_pair: u32) -> QueuePairHello {
        let Self { mtu, nic, inbox_key, .. } = *self;
        // The manager knows the address.
        let kind = GidType::InfiniBand;
        QueuePairHello { queue_pair, packet: 0, gid: [0; 16], kind, lid: 0, mtu, nic, inbox_key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entrances_come_back_and_impossible_ones_are_refused() {
        let address = "::ffff:10.0.0.1".parse().unwrap();
        let endpoint = Endpoint { address, kind: GidType::RoceV2Ipv4, number: 4791 };
        let listener = ListenerAddress { token: 7 << 40, endpoints: vec![endpoint; 3] };
        let bytes = listener.encode();
        assert_eq!(ListenerAddress::decode(&bytes), Ok(listener.clone()));
        assert_eq!(ListenerAddress::decode(&bytes[..bytes.len() - 1]), Err(Malformed));
        for count in [0, QUEUE_PAIRS_MAX + 1] {
            let other = ListenerAddress { endpoints: vec![endpoint; count], ..listener.clone() };
            assert_eq!(ListenerAddress::decode(&other.encode()), Err(Malformed), "{count} doors");
        }
        let mut other = bytes.clone();
        other[2 + 8 + 1 + 16] = GidType::ALL.len() as u8;
        assert_eq!(ListenerAddress::decode(&other), Err(Malformed), "no kind of address");
        let mut other = bytes;
        other[0] ^= 0x55;
        assert_eq!(ListenerAddress::decode(&other), Err(Malformed), "another version");
    }

    #[test]
    fn greetings_come_back_also_filled_up_and_impossible_ones_are_refused() {
        let data = PrivateData {
            rank: 3,
            token: u64::MAX,
            queue: 1,
            queues: 2,
            nic: 1,
            mtu: 5,
            reads: 16,
            credits: 256,
            signal_slots: 100,
            inbox_address: 1 << 50,
            inbox_key: 9,
        };
        let mut bytes = data.encode().to_vec();
        assert_eq!(PrivateData::decode(&bytes[..bytes.len() - 1]), Err(Malformed));
        bytes.resize(PRIVATE_DATA_BYTES_MAX, 0);
        assert_eq!(PrivateData::decode(&bytes), Ok(data));
        let impossible = [
            PrivateData { queue: 2, ..data },
            PrivateData { queues: QUEUE_PAIRS_MAX as u8 + 1, ..data },
            PrivateData { mtu: 0, ..data },
            PrivateData { nic: 4, ..data },
            PrivateData { queue: 0, ..data },
            PrivateData { credits: 0, ..data },
        ];
        for data in impossible {
            assert_eq!(PrivateData::decode(&data.encode()), Err(Malformed), "{data:?}");
        }
        assert_eq!(PrivateData::decode(&[]), Err(Malformed));
    }
}
