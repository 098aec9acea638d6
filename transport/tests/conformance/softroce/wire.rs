//! What transfers are on the wire: packets of RoCE v2, taken from all interfaces and taken apart.
//!
//! Source of the formats: InfiniBand Architecture Specification, volume 1, release 1.5, chapter 9
//! (BTH 9.2, RETH 9.3.3, AtomicETH 9.3.4, AETH 9.3.5, immediate 9.3.7; opcodes in table 38); annex
//! A17 for UDP port 4791.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use pleach_transport::{
    AtomicOp, Inline, RegionKey, RemoteSlice, Source, SubmitError, Transfer, TransferError,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with, sockopt};

use crate::verbs::Verbs;
use crate::world::{BackendKind, Submission, World, assert_bytes, noise, put, signal};

/// Opcodes of reliable connections.
const WRITE_FIRST: u8 = 0x06;
const WRITE_MIDDLE: u8 = 0x07;
const WRITE_LAST_WITH_IMMEDIATE: u8 = 0x09;
const WRITE_ONLY: u8 = 0x0a;
const WRITE_ONLY_WITH_IMMEDIATE: u8 = 0x0b;
const READ_REQUEST: u8 = 0x0c;
const READ_RESPONSES: std::ops::RangeInclusive<u8> = 0x0d..=0x10;
const ACKNOWLEDGE: u8 = 0x11;
const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
const COMPARE_SWAP: u8 = 0x13;
const FETCH_ADD: u8 = 0x14;

/// What an acknowledgement says: all is well, the receiver was not ready, or a reason for refusing.
const SYNDROME_WELL: u8 = 0;
const SYNDROME_NOT_READY: u8 = 1;
const SYNDROME_REFUSED: u8 = 3;
/// Of the reasons: remote access error.
const REASON_ACCESS: u8 = 2;

const PORT: u16 = 4791;
const ALL_PROTOCOLS: u16 = 3;

/// Room for packets that were not read yet, in bytes.
const BUFFER_BYTES: usize = 32 << 20;
const PACKET_BYTES_MAX: usize = 16 << 10;

/// One packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    /// Which queue pair it goes to.
    queue_pair: u32,
    /// Its number on that queue pair.
    number: u32,
    opcode: u8,
    /// Address, key and length that a write or read names.
    target: Option<(u64, u32, u32)>,
    /// What comes with the last packet of a write.
    immediate: Option<u32>,
    /// Syndrome of an acknowledgement: its kind, and what that means.
    syndrome: Option<(u8, u8)>,
    /// Data; of atomics their operands, of their answers the old value.
    bytes: Vec<u8>,
}

impl Packet {
    fn is_answer(&self) -> bool {
        READ_RESPONSES.contains(&self.opcode) || [ACKNOWLEDGE, ATOMIC_ACKNOWLEDGE].contains(&self.opcode)
    }

    fn is_read_response(&self) -> bool {
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
struct Wire {
    socket: OwnedFd,
    /// A packet is seen at each interface that it passes, and again when it is repeated.
    seen: BTreeSet<Packet>,
    packets: Vec<Packet>,
}

impl Wire {
    fn new() -> Self {
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
    fn packets(&mut self) -> &[Packet] {
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

/// Carries out one transfer from rank 0 to rank 1; what it was on the wire, requests and answers
/// apart.
fn seen(
    world: &mut World,
    submission: impl Into<Submission>,
    is_complete: impl Fn(&[Packet]) -> bool,
) -> (Vec<Packet>, Vec<Packet>) {
    let mut wire = Wire::new();
    assert!(world.carry_out(0, 1, submission).is_ok());
    world.until("all its packets", |_| is_complete(wire.packets()));
    // And nothing else besides.
    world.watch(|_| {});
    wire.packets().iter().cloned().partition(|packet| !packet.is_answer())
}

/// Whether the last of these requests was acknowledged.
fn acknowledged(requests: usize) -> impl Fn(&[Packet]) -> bool {
    move |packets| {
        let mut sent = packets.iter().filter(|packet| !packet.is_answer()).map(|packet| packet.number);
        let last = sent.nth(requests - 1);
        packets.iter().any(|packet| packet.opcode == ACKNOWLEDGE && Some(packet.number) == last)
    }
}

fn opcodes(packets: &[Packet]) -> Vec<u8> {
    packets.iter().map(|packet| packet.opcode).collect()
}

fn check_well(answers: &[Packet]) {
    for answer in answers.iter().filter_map(|answer| answer.syndrome) {
        assert_eq!(answer.0, SYNDROME_WELL, "{answers:?}");
    }
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_small_put_with_its_signal_is_one_packet() {
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let (mine, theirs) = (world.region_of(0, &noise(1, 64)), world.region(1, 4096));
    let target = theirs.slice(128..192).expect("inside").remote();
    let (requests, answers) = seen(&mut world, put(&mine.whole(), target, Some(3)), acknowledged(1));
    assert_eq!(opcodes(&requests), [WRITE_ONLY_WITH_IMMEDIATE]);
    let (_, key, length) = requests[0].target.expect("a write names its target");
    assert_eq!((key, length), ((theirs.key().0 >> 32) as u32, 64), "the NIC's own key, and all of the bytes");
    assert_bytes(&requests[0].bytes, &noise(1, 64), "the packet");
    check_well(&answers);
    assert_eq!(world.count(1, 0, 3), 1);
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_signal_is_one_packet_that_carries_its_payload() {
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let (requests, answers) =
        seen(&mut world, Submission::Signal(signal(5, b"what is beside a counter")), acknowledged(1));
    assert_eq!(opcodes(&requests), [WRITE_ONLY_WITH_IMMEDIATE]);
    assert_eq!(requests[0].bytes, b"what is beside a counter");
    check_well(&answers);
    let (requests, _) = seen(&mut world, Submission::Signal(signal(5, b"")), acknowledged(1));
    assert_eq!(opcodes(&requests), [WRITE_ONLY_WITH_IMMEDIATE]);
    assert_eq!(requests[0].bytes, b"");
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn bytes_with_a_payload_are_two_writes_of_which_the_second_is_the_signal() {
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let theirs = world.region(1, 64);
    let src = Source::Inline(Inline::new(&noise(4, 40)).expect("fits"));
    let dst = theirs.slice(0..40).expect("inside").remote();
    let transfer = Transfer::Put { src, dst, signal: Some(signal(2, b"beside")) };
    let (requests, answers) = seen(&mut world, transfer, acknowledged(2));
    assert_eq!(opcodes(&requests), [WRITE_ONLY, WRITE_ONLY_WITH_IMMEDIATE]);
    assert_bytes(&requests[0].bytes, &noise(4, 40), "the first packet");
    assert_eq!(requests[1].bytes, b"beside");
    let queue_pairs = [requests[0].queue_pair, requests[1].queue_pair];
    assert_eq!(queue_pairs[0], queue_pairs[1], "a queue pair keeps the order of its writes, two do not");
    assert_eq!(requests[1].number, (requests[0].number + 1) & 0x00ff_ffff);
    check_well(&answers);
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_put_of_several_packets_has_its_signal_in_the_last_one() {
    const LEN: usize = 13_000;
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let (mine, theirs) = (world.region_of(0, &noise(6, LEN)), world.region(1, LEN));
    let is_complete = |packets: &[Packet]| {
        let last = packets.iter().find(|packet| packet.opcode == WRITE_LAST_WITH_IMMEDIATE);
        let number = last.map(|packet| packet.number);
        last.is_some()
            && packets.iter().any(|packet| packet.opcode == ACKNOWLEDGE && Some(packet.number) == number)
    };
    let (mut requests, answers) = seen(&mut world, put(&mine.whole(), theirs.remote(), Some(1)), is_complete);
    let first = requests[0].number;
    requests.sort_by_key(|packet| packet.number.wrapping_sub(first) & 0x00ff_ffff);
    let codes = opcodes(&requests);
    assert_eq!((codes[0], codes[codes.len() - 1]), (WRITE_FIRST, WRITE_LAST_WITH_IMMEDIATE));
    assert!(
        codes.len() > 3 && codes[1..codes.len() - 1].iter().all(|code| *code == WRITE_MIDDLE),
        "{codes:x?}"
    );
    assert_eq!(requests[0].target.map(|target| target.2), Some(LEN as u32));
    let bytes: Vec<u8> = requests.iter().flat_map(|packet| packet.bytes.iter().copied()).collect();
    assert_bytes(&bytes, &noise(6, LEN), "the packets");
    check_well(&answers);
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_get_is_a_read() {
    const LEN: usize = 9_000;
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let (mine, theirs) = (world.region(0, LEN), world.region_of(1, &noise(7, LEN)));
    let transfer = Transfer::Get { src: theirs.remote(), dst: mine.whole() };
    let is_complete = |packets: &[Packet]| {
        let came = packets.iter().filter(|packet| packet.is_read_response());
        came.map(|packet| packet.bytes.len()).sum::<usize>() >= LEN
    };
    let (requests, mut answers) = seen(&mut world, transfer, is_complete);
    assert_eq!(opcodes(&requests), [READ_REQUEST]);
    assert_eq!(requests[0].target.map(|target| target.2), Some(LEN as u32));
    answers.sort_by_key(|packet| packet.number.wrapping_sub(requests[0].number) & 0x00ff_ffff);
    let bytes: Vec<u8> = answers.iter().flat_map(|packet| packet.bytes.iter().copied()).collect();
    assert_bytes(&bytes, &noise(7, LEN), "the responses");
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn atomics_are_atomic_operations_of_the_peers_device() {
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let theirs = world.region_of(1, &77u64.to_ne_bytes());
    let word = theirs.whole().remote();
    let is_complete = |packets: &[Packet]| packets.iter().any(|packet| packet.opcode == ATOMIC_ACKNOWLEDGE);
    let (requests, answers) = seen(&mut world, Transfer::Atomic { word, op: AtomicOp::Add(5) }, is_complete);
    assert_eq!(opcodes(&requests), [FETCH_ADD]);
    // Address and key, then what is added.
    assert_eq!(requests[0].bytes[12..20], 5u64.to_be_bytes());
    assert_eq!(answers[0].bytes, 77u64.to_be_bytes(), "the old value");
    let op = AtomicOp::CompareSwap { expected: 82, new: 9 };
    let (requests, answers) = seen(&mut world, Transfer::Atomic { word, op }, is_complete);
    assert_eq!(opcodes(&requests), [COMPARE_SWAP]);
    assert_eq!(requests[0].bytes[12..28], [9u64.to_be_bytes(), 82u64.to_be_bytes()].concat());
    assert_eq!(answers[0].bytes, 82u64.to_be_bytes(), "the old value");
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn no_signal_ever_finds_its_receiver_not_ready() {
    const SIGNALS: u64 = 2_000;
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let mut wire = Wire::new();
    let (mut sent, mut refusals) = (0, 0);
    let mut not_ready = 0;
    while sent < SIGNALS {
        // Rank 1 takes nothing until rank 0 can send no more.
        world.set_polled(1, false);
        world.submit(0, 1, Submission::Signal(signal(0, &sent.to_le_bytes())));
        sent += 1;
        loop {
            match world.try_submit(0, 1, Submission::Signal(signal(0, &sent.to_le_bytes()))) {
                Ok(_) => sent += 1,
                Err(SubmitError::QueueFull { .. }) => break,
                Err(error) => panic!("{error}"),
            }
            world.pump();
            wire.packets();
        }
        refusals += 1;
        world.set_polled(1, true);
        world.until("all to be taken", |world| world.count(1, 0, 0) == sent);
    }
    for packet in wire.packets() {
        not_ready += u32::from(packet.syndrome.is_some_and(|(kind, _)| kind == SYNDROME_NOT_READY));
    }
    assert!(refusals > 3, "credits were used up {refusals} times");
    let signals = wire.packets().iter().filter(|packet| packet.opcode == WRITE_ONLY_WITH_IMMEDIATE).count();
    assert!(signals as u64 >= sent, "{signals} of {sent} signals were seen");
    assert_eq!(not_ready, 0, "receivers that were not ready");
}

#[test]
#[ignore = "sees the packets of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_wrong_key_is_refused_by_the_peers_device_itself() {
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    let (mine, theirs) = (world.region(0, 64), world.region(1, 64));
    let key = RegionKey(theirs.key().0 ^ 0x5555_0000_0000_0000);
    let mut wire = Wire::new();
    let ending = world.carry_out(0, 1, put(&mine.whole(), RemoteSlice { key, offset: 0, len: 64 }, None));
    assert_eq!(ending, Err(TransferError::Refused { peer: 1, key }));
    let refusal = Some((SYNDROME_REFUSED, REASON_ACCESS));
    let refusals = wire.packets().iter().filter(|packet| packet.syndrome == refusal).count();
    assert!(refusals > 0, "{:?}", wire.packets());
}
