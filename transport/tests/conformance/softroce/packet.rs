//! Packets of RoCE v2, taken from all interfaces and taken apart.
//!
//! Source of the formats: InfiniBand Architecture Specification, volume 1, release 1.5, chapter 9
//! (BTH 9.2, RETH 9.3.3, AtomicETH 9.3.4, AETH 9.3.5, immediate 9.3.7; opcodes in table 38); annex
//! A17 for UDP port 4791.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with, sockopt};

/// Opcodes of reliable connections.
pub(super) const WRITE_FIRST: u8 = 0x06;
pub(super) const WRITE_MIDDLE: u8 = 0x07;
pub(super) const WRITE_LAST_WITH_IMMEDIATE: u8 = 0x09;
pub(super) const WRITE_ONLY: u8 = 0x0a;
pub(super) const WRITE_ONLY_WITH_IMMEDIATE: u8 = 0x0b;
pub(super) const READ_REQUEST: u8 = 0x0c;
const READ_RESPONSES: std::ops::RangeInclusive<u8> = 0x0d..=0x10;
pub(super) const ACKNOWLEDGE: u8 = 0x11;
pub(super) const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
pub(super) const COMPARE_SWAP: u8 = 0x13;
pub(super) const FETCH_ADD: u8 = 0x14;

/// What an acknowledgement says: all is well, the receiver was not ready, or a reason for refusing.
pub(super) const SYNDROME_WELL: u8 = 0;
pub(super) const SYNDROME_NOT_READY: u8 = 1;
pub(super) const SYNDROME_REFUSED: u8 = 3;
/// Of the reasons: remote access error.
pub(super) const REASON_ACCESS: u8 = 2;

const PORT: u16 = 4791;
const ALL_PROTOCOLS: u16 = 3;

/// Room for packets that were not read yet, in bytes.
const BUFFER_BYTES: usize = 32 << 20;
const PACKET_BYTES_MAX: usize = 16 << 10;

/// One packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Packet {
    /// Which queue pair it goes to.
    pub(super) queue_pair: u32,
    /// Its number on that queue pair.
    pub(super) number: u32,
    pub(super) opcode: u8,
    /// Address, key and length that a write or read names.
    pub(super) target: Option<(u64, u32, u32)>,
    /// What comes with the last packet of a write.
    immediate: Option<u32>,
    /// Syndrome of an acknowledgement: its kind, and what that means.
    pub(super) syndrome: Option<(u8, u8)>,
    /// Data; of atomics their operands, of their answers the old value.
    pub(super) bytes: Vec<u8>,
}

impl Packet {
    pub(super) fn is_answer(&self) -> bool {
        READ_RESPONSES.contains(&self.opcode) || [ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE].contains(&self.opcode)
    }

    pub(super) fn is_read_response(&self) -> bool {
        READ_RESPONSES.contains(&self.opcode)
    }

    /// From an Ethernet frame; `None` where it is something else.
    fn decode(frame: &[u8]) -> Option<Self> {
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (ethernet, ip) = frame.split_at_checked(14)?;
        if ethernet[12..] != [0x08, 0x00] || ip.first()? >> 4 != 4 || *ip.get(9)? != 17 {
            return None;
        }
        let udp = ip.get(usize::from(ip[0] & 15) * 4..)?;
        let (udp, rest) = udp.split_at_checked(8)?;
        let length = (number(&udp[4..6]) as usize).checked_sub(8)?;
        if number(&udp[2..4]) != u64::from(PORT) {
            return None;
        }
        let (base, rest) = rest.get(..length)?.split_at_checked(12)?;
        let padding = usize::from(base[1] >> 4 & 3);
        // A checksum is at the end.
        let mut left = rest.get(..rest.len().checked_sub(4 + padding)?)?;
        let mut take = |count: usize| {
            let (field, rest) = left.split_at_checked(count)?;
            left = rest;
            Some(field)
        };
        let opcode = base[0];
        let target = match opcode {
            WRITE_FIRST | WRITE_ONLY | WRITE_ONLY_WITH_IMMEDIATE | READ_REQUEST => {
                let field = take(16)?;
                Some((number(&field[..8]), number(&field[8..12]) as u32, number(&field[12..]) as u32))
            }
            _ => None,
        };
        let immediate = match opcode {
            WRITE_LAST_WITH_IMMEDIATE | WRITE_ONLY_WITH_IMMEDIATE => Some(number(take(4)?) as u32),
            _ => None,
        };
        let syndrome = match opcode {
            // The middle ones have none.
            0x0d | 0x0f | 0x10 | ACKNOWLEDGE | ATOMIC_ACKNOWLEDGE => {
                let field = take(4)?;
                Some((field[0] >> 5, field[0] & 31))
            }
            _ => None,
        };
        Some(Self {
            queue_pair: number(&base[5..8]) as u32,
            number: number(&base[9..12]) as u32,
            opcode,
            target,
            immediate,
            syndrome,
            bytes: left.to_vec(),
        })
    }
}

/// Everything that goes over any interface from now on.
pub(super) struct Wire {
    socket: OwnedFd,
    /// A packet is seen at each interface that it passes, and again when it is repeated.
    seen: BTreeSet<Packet>,
    packets: Vec<Packet>,
}

impl Wire {
    pub(super) fn new() -> Self {
        super::changed::expect_machine();
        let protocol = u32::from(ALL_PROTOCOLS.to_be()).try_into().map(Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let protocol = protocol.expect("is not zero");
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, Some(protocol));
        let socket = socket.expect("a packet socket, which takes root");
        sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES).expect("room for packets");
        Self { socket, seen: BTreeSet::new(), packets: Vec::new() }
    }

    /// All packets so far, each once.
    pub(super) fn packets(&mut self) -> &[Packet] {
        let mut frame = [0; PACKET_BYTES_MAX];
        loop {
            match recv(&self.socket, &mut frame[..], RecvFlags::empty()) {
                Ok((_, length)) => {
                    let Some(packet) = Packet::decode(&frame[..length.min(PACKET_BYTES_MAX)]) else {
                        continue;
                    };
                    if self.seen.insert(packet.clone()) {
                        self.packets.push(packet);
                    }
                }
                Err(Errno::AGAIN) => return &self.packets,
                Err(Errno::INTR) => {}
                Err(error) => panic!("the wire cannot be read: {error}"),
            }
        }
    }
}
