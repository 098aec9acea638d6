//! The messages of ranks that the connection manager connects: a [`ListenerAddress`] over the
//! control stream, then one [`PrivateData`] each way for each queue pair. All bytes of a peer are
//! decoded here.

use std::net::Ipv6Addr;

use crate::Rank;
use crate::verbs::port::Kind;
use crate::verbs::wire::{Fields, Hello, QUEUE_PAIRS_MAX, QueuePairHello, VERSION};

/// Where a rank listens for its peer. The token authenticates the peer's connect requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::verbs) struct Entrance {
    pub(super) token: u64,
    /// One for each of its queue pairs.
    pub(super) doors: Vec<Door>,
}

/// The address of the listener for one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Door {
    /// The GID of its port.
    pub(super) address: Ipv6Addr,
    pub(super) kind: Kind,
    /// The port number of rdma_cm's TCP port space.
    pub(super) number: u16,
}

impl Door {
    /// Whether an address of this rank reaches the endpoint. The manager chooses the version of
    /// RoCE, so unlike for [`GidType`] only the address families must agree.
    pub(super) fn meets(&self, own: Ipv6Addr) -> bool {
        self.address.to_ipv4_mapped().is_some() == own.to_ipv4_mapped().is_some()
    }
}

const DOOR_BYTES: usize = 16 + 1 + 2;

impl Entrance {
    pub(in crate::verbs) fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(self.token.to_le_bytes());
        bytes.push(self.doors.len() as u8);
        for Door { address, kind, number } in &self.doors {
            bytes.extend(address.octets());
            bytes.push(*kind as u8);
            bytes.extend(number.to_le_bytes());
        }
        bytes
    }

    pub(in crate::verbs) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if u16::from_le_bytes(fields.take()?) != VERSION {
            return None;
        }
        let token = u64::from_le_bytes(fields.take()?);
        let count = usize::from(fields.take::<1>()?[0]);
        if !(1..=QUEUE_PAIRS_MAX).contains(&count) || fields.0.len() != count * DOOR_BYTES {
            return None;
        }
        let mut doors = Vec::with_capacity(count);
        for _ in 0..count {
            doors.push(Door {
                address: Ipv6Addr::from(fields.take::<16>()?),
                kind: *Kind::ALL.get(usize::from(fields.take::<1>()?[0]))?,
                number: u16::from_le_bytes(fields.take()?),
            });
        }
        Some(Self { token, doors })
    }
}

/// Private data of a connect request, in bytes, without those that the manager itself needs.
const SAID_BYTES_MAX: usize = 56;

const GREETING_BYTES: usize = 2 + 4 + 8 + 1 + 1 + 1 + 1 + 1 + 4 + 4 + 8 + 4;
const _: () = assert!(GREETING_BYTES <= SAID_BYTES_MAX);

/// The private data of a connect request and of its response: the sender's end of a queue pair. Its
/// address is known to the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
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

impl Greeting {
    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = Vec::with_capacity(GREETING_BYTES);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.token.to_le_bytes());
        bytes.extend([self.queue, self.queues, self.nic, self.mtu, self.reads]);
        bytes.extend(self.credits.to_le_bytes());
        bytes.extend(self.signal_slots.to_le_bytes());
        bytes.extend(self.inbox_address.to_le_bytes());
        bytes.extend(self.inbox_key.to_le_bytes());
        let mut whole = [0; GREETING_BYTES];
        whole.copy_from_slice(&bytes);
        whole
    }

    /// Decodes private data, which may be longer: the manager pads it.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if u16::from_le_bytes(fields.take()?) != VERSION {
            return None;
        }
        let (rank, token) = (Rank::from_le_bytes(fields.take()?), u64::from_le_bytes(fields.take()?));
        let [queue, queues, nic, mtu, reads] = fields.take()?;
        let greeting = Self {
            rank,
            token,
            queue,
            queues,
            nic,
            mtu,
            reads,
            credits: u32::from_le_bytes(fields.take()?),
            signal_slots: u32::from_le_bytes(fields.take()?),
            inbox_address: u64::from_le_bytes(fields.take()?),
            inbox_key: u32::from_le_bytes(fields.take()?),
        };
        let is_possible = (1..=QUEUE_PAIRS_MAX).contains(&usize::from(queues))
            && queue < queues
            && greeting.credits > 0
            && (queue > 0 || nic == 0)
            && greeting.of_queue(0).is_possible();
        is_possible.then_some(greeting)
    }

    /// The same contents as a hello of the control stream.
    pub(super) fn hello(&self, queue_pair: u32) -> (Hello, QueuePairHello) {
        let queue = self.of_queue(queue_pair);
        let Self { reads, credits, inbox_address, signal_slots, .. } = *self;
        (Hello { reads, credits, inbox_address, signal_slots, queues: vec![queue] }, queue)
    }

    fn of_queue(&self, queue_pair: u32) -> QueuePairHello {
        let Self { mtu, nic, inbox_key, .. } = *self;
        // The manager knows the address.
        let kind = Kind::InfiniBand;
        QueuePairHello { queue_pair, packet: 0, gid: [0; 16], kind, lid: 0, mtu, nic, inbox_key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entrances_come_back_and_impossible_ones_are_refused() {
        let address = "::ffff:10.0.0.1".parse().unwrap();
        let door = Door { address, kind: Kind::RoceV2Ipv4, number: 4791 };
        let entrance = Entrance { token: 7 << 40, doors: vec![door; 3] };
        let bytes = entrance.encode();
        assert_eq!(Entrance::decode(&bytes), Some(entrance.clone()));
        assert_eq!(Entrance::decode(&bytes[..bytes.len() - 1]), None);
        for count in [0, QUEUE_PAIRS_MAX + 1] {
            let other = Entrance { doors: vec![door; count], ..entrance.clone() };
            assert_eq!(Entrance::decode(&other.encode()), None, "{count} doors");
        }
        let mut other = bytes.clone();
        other[2 + 8 + 1 + 16] = Kind::ALL.len() as u8;
        assert_eq!(Entrance::decode(&other), None, "no kind of address");
        let mut other = bytes;
        other[0] ^= 0x55;
        assert_eq!(Entrance::decode(&other), None, "another version");
    }

    #[test]
    fn greetings_come_back_also_filled_up_and_impossible_ones_are_refused() {
        let greeting = Greeting {
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
        let mut bytes = greeting.encode().to_vec();
        assert_eq!(Greeting::decode(&bytes[..bytes.len() - 1]), None);
        bytes.resize(SAID_BYTES_MAX, 0);
        assert_eq!(Greeting::decode(&bytes), Some(greeting));
        let impossible = [
            Greeting { queue: 2, ..greeting },
            Greeting { queues: QUEUE_PAIRS_MAX as u8 + 1, ..greeting },
            Greeting { mtu: 0, ..greeting },
            Greeting { nic: 4, ..greeting },
            Greeting { queue: 0, ..greeting },
            Greeting { credits: 0, ..greeting },
        ];
        for greeting in impossible {
            assert_eq!(Greeting::decode(&greeting.encode()), None, "{greeting:?}");
        }
        assert_eq!(Greeting::decode(&[]), None);
    }
}
