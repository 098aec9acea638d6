//! A peer that knows the secret and sends wrong data harms only itself.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MprotectFlags, mprotect};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::super::message::RegionMessage;
use super::{PATIENCE, Station};
use crate::clock;
use crate::control::ControlFrame;
use crate::control::packet::{dial, parse, receive, send};
use crate::control::tests::dial_by_hand;
use crate::device::{Device, Event, LossCause, MapError, ProtocolViolation, RegisterError};
use crate::memory::{SEALS_FIXED_SIZE, sealed_file};
use crate::region::{RegionKey, RemoteSlice};

/// Longer than any packet.
const PACKET_BYTES: usize = 1 << 13;

const ENOUGH_BYTES: usize = 1 << 20;

/// Rank 1 of 2, whose messages the test writes itself.
struct Liar {
    stream: OwnedFd,
}

impl Liar {
    /// Connects to `zero` and hands over these files.
    fn connect(zero: &mut Station, files: &[BorrowedFd<'_>]) -> Self {
        let address = zero.device.info().address.clone();
        zero.device.connect(1, &address).expect("an address");
        let liar = Self::dial(zero);
        liar.send_frame(&ControlFrame::Ready, files);
        liar
    }

    /// Connects, and proves that it knows the secret.
    fn dial(zero: &Station) -> Self {
        let name = zero.device.info().address.clone();
        let stream = dial(parse(&name).expect("an address")).expect("it listens");
        dial_by_hand(&stream, [1, 0], 2, clock::now() + PATIENCE);
        Self { stream }
    }

    /// Connects as an honest peer does.
    fn connect_honestly(zero: &mut Station) -> Self {
        let (process, file) = (own_process(), sealed());
        let liar = Self::connect(zero, &[process.as_fd(), file.as_fd(), file.as_fd(), file.as_fd()]);
        zero.until_event(&Event::Connected { peer: 1 });
        liar
    }

    fn send_frame(&self, frame: &ControlFrame<'_>, files: &[BorrowedFd<'_>]) {
        send(&self.stream, &frame.to_bytes(), files).expect("room in the stream");
    }

    fn tell(&self, message: &RegionMessage, files: &[BorrowedFd<'_>]) {
        self.send_frame(&ControlFrame::Fabric(&message.encode()), files);
    }
}

fn own_process() -> OwnedFd {
    pidfd_open(getpid(), PidfdFlags::empty()).expect("a process descriptor")
}

fn sealed() -> OwnedFd {
    sealed_file("test", ENOUGH_BYTES, SealFlags::empty()).expect("memory")
}

/// A file that its maker could shorten while it is mapped here.
fn unsealed() -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, ENOUGH_BYTES as u64).expect("memory");
    file
}

fn expect_violation(zero: &mut Station, violation: ProtocolViolation) {
    assert_eq!(zero.until_lost(1), LossCause::Protocol(violation));
}

#[test]
fn files_that_could_be_shortened_are_too_short_or_are_no_memory_are_refused() {
    let (process, good) = (own_process(), sealed());
    let short = sealed_file("test", 64, SealFlags::empty()).expect("memory");
    let (pipe, _other) =
        std::io::pipe().map(|(reader, writer)| (OwnedFd::from(reader), writer)).expect("a pipe");
    for bad in [&unsealed(), &short, &pipe, &process] {
        for place in 0..4 {
            let mut files = [process.as_fd(), good.as_fd(), good.as_fd(), good.as_fd()];
            // A wake source of 64 bytes is long enough.
            if (place == 2 && std::ptr::eq(bad, &short)) || (place == 0 && std::ptr::eq(bad, &process)) {
                continue;
            }
            files[place] = bad.as_fd();
            let mut zero = Station::new(0, 2);
            let _liar = Liar::connect(&mut zero, &files);
            expect_violation(&mut zero, ProtocolViolation::UnsafeFile);
        }
    }
}

#[test]
fn a_peer_that_ends_before_it_has_sent_its_files_is_lost_at_once_whichever_end_is_first() {
    for connects_before in [true, false] {
        let mut zero = Station::new(0, 2);
        let address = zero.device.info().address.clone();
        if connects_before {
            zero.device.connect(1, &address).expect("an address");
        }
        drop(Liar::dial(&zero));
        if !connects_before {
            zero.device.connect(1, &address).expect("an address");
        }
        assert_eq!(zero.until_lost(1), LossCause::ConnectionClosed, "not after the time limit of connects");
        assert!(!zero.log.contains(&Event::Connected { peer: 1 }));
    }
}

#[test]
fn the_descriptor_of_a_process_that_is_not_the_peer_proves_nothing() {
    let mut zero = Station::new(0, 2);
    let mut child = std::process::Command::new("true").spawn().expect("a process");
    let id = rustix::process::Pid::from_child(&child);
    let process = pidfd_open(id, PidfdFlags::empty()).expect("a process descriptor");
    child.wait().expect("it ends");
    let file = sealed();
    let region = zero.region(4096);
    let _liar = Liar::connect(&mut zero, &[process.as_fd(), file.as_fd(), file.as_fd(), file.as_fd()]);
    assert_eq!(zero.until_lost(1), LossCause::ProcessEnded);
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    let again = zero.device.register(region.memory().clone()).map(|_| ());
    assert!(matches!(again, Err(RegisterError::Detached { .. })), "the liar may run: {again:?}");
}

#[test]
fn too_few_files_are_refused() {
    let mut zero = Station::new(0, 2);
    let _liar = Liar::connect(&mut zero, &[own_process().as_fd()]);
    expect_violation(&mut zero, ProtocolViolation::MalformedFrame);
}

#[test]
fn a_region_whose_file_could_be_shortened_or_is_too_short_is_refused() {
    for (file, offset, len) in
        [(unsealed(), 0, 4096), (sealed(), 0, ENOUGH_BYTES as u64 + 1), (sealed(), ENOUGH_BYTES as u64, 1)]
    {
        let mut zero = Station::new(0, 2);
        let liar = Liar::connect_honestly(&mut zero);
        let key = RegionKey(0x77_0003);
        liar.tell(&RegionMessage::Announce { slot: 3, key, offset, len }, &[file.as_fd()]);
        expect_violation(&mut zero, ProtocolViolation::UnsafeFile);
    }
}

#[test]
fn frames_that_make_no_sense_cost_the_pair() {
    let key = RegionKey(0x77_0003);
    let file = sealed();
    let [odd, other, outside, empty] =
        [(3, key, u64::MAX), (4, key, 0), (u16::MAX, RegionKey(u64::MAX), 0), (3, key, 0)]
            .map(|(slot, key, offset)| RegionMessage::Announce { slot, key, offset, len: 2 }.encode());
    let [revoked, no_slot] = [3, u16::MAX].map(|slot| RegionMessage::Revoke { slot }.encode());
    let with_file = [file.as_fd()];
    let cases: [(ControlFrame<'_>, &[BorrowedFd<'_>]); 9] = [
        (ControlFrame::Fabric(&odd), &with_file),
        (ControlFrame::Fabric(&other), &with_file),
        (ControlFrame::Fabric(&outside), &with_file),
        (ControlFrame::Fabric(&empty), &[]),
        (ControlFrame::Fabric(&no_slot), &[]),
        (ControlFrame::Fabric(&revoked), &with_file),
        (ControlFrame::Ready, &[]),
        (ControlFrame::Message(b"with a file"), &with_file),
        (ControlFrame::Bye, &with_file),
    ];
    for (frame, files) in cases {
        let mut zero = Station::new(0, 2);
        let liar = Liar::connect_honestly(&mut zero);
        liar.send_frame(&frame, files);
        expect_violation(&mut zero, ProtocolViolation::MalformedFrame);
    }
}

#[test]
fn a_packet_that_is_no_whole_frame_or_more_than_one_costs_the_pair() {
    let whole = ControlFrame::Message(b"12345678").to_bytes();
    let parts: [(&[u8], _); 3] = [
        (&whole[..whole.len() - 1], ProtocolViolation::MalformedFrame),
        (&[&whole[..], b"x"].concat(), ProtocolViolation::MalformedFrame),
        (&[0; 3 * PACKET_BYTES], ProtocolViolation::OversizedFrame),
    ];
    for (packet, violation) in parts {
        let mut zero = Station::new(0, 2);
        let liar = Liar::connect_honestly(&mut zero);
        send(&liar.stream, packet, &[]).expect("room in the stream");
        expect_violation(&mut zero, violation);
    }
}

#[test]
fn a_region_that_is_sealed_against_writing_is_unknown_and_costs_nothing() {
    let mut zero = Station::new(0, 2);
    let liar = Liar::connect_honestly(&mut zero);
    let file = sealed_file("test", ENOUGH_BYTES, SealFlags::WRITE).expect("memory");
    let key = RegionKey(0x77_0003);
    liar.tell(&RegionMessage::Announce { slot: 3, key, offset: 0, len: 4096 }, &[file.as_fd()]);
    liar.send_frame(&ControlFrame::Message(b"after it"), &[]);
    zero.until("the message", |zero| !zero.inbox.messages.lock().expect("no panic").is_empty());
    assert!(zero.device.map(1, &RemoteSlice { key, offset: 0, len: 8 }).is_err());
    assert!(!zero.log.iter().any(|event| matches!(event, Event::PeerLost { .. })));
}

#[test]
fn the_file_says_whether_a_region_may_be_written() {
    let mut zero = Station::new(0, 2);
    let (process, other, keys) = (own_process(), sealed(), sealed());
    let key = RegionKey(0x77_0003);
    rustix::io::pwrite(&keys, &key.0.to_ne_bytes(), 3 * 8).expect("it can be written");
    let liar = Liar::connect(&mut zero, &[process.as_fd(), other.as_fd(), other.as_fd(), keys.as_fd()]);
    zero.until_event(&Event::Connected { peer: 1 });
    let file = sealed_file("test", ENOUGH_BYTES, SealFlags::FUTURE_WRITE).expect("memory");
    liar.tell(&RegionMessage::Announce { slot: 3, key, offset: 0, len: 4096 }, &[file.as_fd()]);
    liar.send_frame(&ControlFrame::Message(b"after it"), &[]);
    zero.until("the message", |zero| !zero.inbox.messages.lock().expect("no panic").is_empty());
    let slice = RemoteSlice { key, offset: 0, len: 4096 };
    let refused = zero.device.map(1, &slice);
    assert!(matches!(refused, Err(MapError::ReadOnly { peer: 1, .. })), "{refused:?}");
    let mapped = zero.device.map_read_only(1, &slice).expect("announced");
    // SAFETY: a page of this mapping, which nobody accesses meanwhile.
    let widened = unsafe {
        mprotect(mapped.as_ptr().cast_mut().cast(), 4096, MprotectFlags::READ | MprotectFlags::WRITE)
    };
    assert_eq!(widened, Err(Errno::ACCESS), "the kernel gives no right to write it");
}

#[test]
fn what_this_rank_hands_out_cannot_be_shortened_grown_or_sealed_further_and_keys_cannot_be_written() {
    let mut zero = Station::new(0, 2);
    let address = zero.device.info().address.clone();
    let (process, file) = (own_process(), sealed());
    let liar = Liar::connect(&mut zero, &[process.as_fd(), file.as_fd(), file.as_fd(), file.as_fd()]);
    let region = zero.region(4096);
    let mut files = Vec::new();
    let mut buffer = vec![0; PACKET_BYTES];
    zero.until("all files", |_| {
        if let Ok(packet) = receive(&liar.stream, &mut buffer) {
            files.extend(packet.files);
        }
        files.len() == 5
    });
    for file in &files[1..] {
        let seals = rustix::fs::fcntl_get_seals(file).expect("memory");
        assert!(seals.contains(SEALS_FIXED_SIZE | SealFlags::SEAL), "{seals:?}");
        assert!(ftruncate(file, 0).is_err());
    }
    assert!(rustix::io::pwrite(&files[3], &[1; 8], 0).is_err(), "the table of keys is its owner's to write");
    drop((region, address));
}

#[test]
fn a_stranger_that_talks_nonsense_does_not_keep_a_peer_away() {
    let mut zero = Station::new(0, 2);
    let address = zero.device.info().address.clone();
    let stranger = dial(parse(&address).expect("an address")).expect("it listens");
    send(&stranger, b"GET / HTTP/1.1", &[]).expect("room");
    let silent = dial(parse(&address).expect("an address")).expect("it listens");
    let mut one = Station::new(1, 2);
    zero.device.connect(1, &one.device.info().address.clone()).expect("an address");
    one.device.connect(0, &address).expect("an address");
    zero.until_event(&Event::Connected { peer: 1 });
    one.until_event(&Event::Connected { peer: 0 });
    drop(silent);
}
