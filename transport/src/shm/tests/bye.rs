//! Byes arrive, however the ends of two processes interleave.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use super::{PATIENCE, Station, pair};
use crate::Rank;
use crate::clock;
use crate::control::packet::{ReceiveError, receive, send};
use crate::device::{Address, Device, Event, Flush, Urgency};

/// Number of streams that end while they are read, unless [`STREAMS_TIME`] has passed before.
const STREAMS: usize = 20_000;
/// How long such streams are tried. On a busy machine the two ends of each stream need several
/// turns of the processor.
const STREAMS_TIME: Duration = Duration::from_secs(3);
/// Polls between two yields. The yields give the other end its turn if both ends share a processor.
const LOOKS: u32 = 64;

const RANKS: u32 = 6;
const GROUPS: usize = 40;
/// Messages to each peer right before a bye, so that the peer's watcher is reading when the bye
/// comes.
const MESSAGES: usize = 3;

/// The system checks for packets first and for the end second. A packet and the end may both come
/// between these checks.
#[test]
fn a_packet_sent_right_before_the_end_of_a_stream_is_received_before_the_end() {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let mut overtaken = 0;
    std::thread::scope(|scope| {
        let (streams, to_end) = std::sync::mpsc::channel::<(std::os::fd::OwnedFd, Arc<AtomicBool>)>();
        scope.spawn(move || {
            for (stream, is_read) in to_end {
                // Acquire: pairs with the release below. The reader is about to find nothing.
                while !is_read.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                send(&stream, b"bye", &[]).expect("there is room");
                shutdown(&stream, Shutdown::Both).expect("a socket");
            }
        });
        let end = clock::now() + STREAMS_TIME;
        for _ in 0..STREAMS {
            if clock::now() > end {
                break;
            }
            let (reader, writer) =
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("two sockets");
            let is_read = Arc::new(AtomicBool::new(false));
            streams.send((writer, is_read.clone())).expect("the other thread lives");
            let mut buffer = [0; 16];
            let deadline = clock::now() + PATIENCE;
            let (mut has_come, mut looks) = (false, 0_u32);
            loop {
                looks += 1;
                if looks.is_multiple_of(LOOKS) {
                    std::thread::yield_now();
                }
                is_read.store(true, Ordering::Release);
                match receive(&reader, &mut buffer) {
                    Ok(packet) if packet.bytes == 0 => break,
                    Ok(_) => has_come = true,
                    Err(ReceiveError::System(Errno::AGAIN)) => {}
                    Err(error) => panic!("{error:?}"),
                }
                assert!(clock::now() < deadline, "neither packet nor end came");
            }
            overtaken += u32::from(!has_come);
        }
    });
    assert_eq!(overtaken, 0, "so many streams ended before the packet that was sent before their end");
}

/// A rank that still has messages for other ranks is not gone when it has sent a bye to one rank.
#[test]
fn who_is_told_bye_and_leaves_too_says_so() {
    let [mut zero, mut one] = pair();
    zero.device.leave();
    one.until_event(&Event::Departed { peer: 0 });
    one.device.leave();
    one.until("the bye has gone out", |station| station.device.flush(Flush::All));
    drop(one);
    zero.until("the end of the other", |station| {
        station.log.iter().any(|event| matches!(event, Event::Departed { peer: 1 } | Event::PeerLost { .. }))
    });
    assert!(zero.log.contains(&Event::Departed { peer: 1 }), "{:?}", zero.log);
}

#[test]
fn ranks_that_leave_in_any_order_while_others_stay_are_never_taken_for_lost() {
    for group in 0..GROUPS {
        let addresses: Mutex<Vec<Option<Address>>> = Mutex::new(vec![None; RANKS as usize]);
        let meeting = Barrier::new(RANKS as usize);
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let (addresses, meeting) = (&addresses, &meeting);
                scope.spawn(move || leave_or_stay(rank, group, addresses, meeting));
            }
        });
    }
}

/// Odd ranks send byes and end. Even ranks stay until they have received them.
fn leave_or_stay(rank: Rank, group: usize, addresses: &Mutex<Vec<Option<Address>>>, meeting: &Barrier) {
    let mut station = Station::new(rank, RANKS);
    addresses.lock().expect("no panic under it")[rank as usize] = Some(station.device.info().address.clone());
    meeting.wait();
    let addresses: Vec<Address> =
        addresses.lock().expect("no panic under it").iter().flatten().cloned().collect();
    let peers = || (0..RANKS).filter(move |peer| *peer != rank);
    for peer in peers() {
        station.device.connect(peer, &addresses[peer as usize]).expect("an address");
    }
    station
        .until("connections", |station| peers().all(|peer| station.log.contains(&Event::Connected { peer })));
    meeting.wait();
    // The delay differs between groups and ranks, and is the same in every run.
    let delay = (group as u64 * 7 + u64::from(rank) * 13) * 0x9e37_79b9 % 20_000;
    (0..delay).for_each(|_| std::hint::spin_loop());
    if rank % 2 == 1 {
        for message in 0..MESSAGES {
            // No messages to the other odd ranks, which may be gone.
            for peer in peers().filter(|peer| peer % 2 == 0) {
                station.device.post(peer, &[message as u8], Urgency::Ordinary).expect("connected");
            }
        }
        station.device.leave();
        station.until("the last words have gone out", |station| station.device.flush(Flush::All));
        return;
    }
    let leaving = || peers().filter(|peer| peer % 2 == 1);
    station.until("byes", |station| {
        leaving().all(|gone| {
            station.log.iter().any(
                |event| matches!(event, Event::Departed { peer } | Event::PeerLost { peer, .. } if *peer == gone),
            )
        })
    });
    let lost: Vec<&Event> =
        station.log.iter().filter(|event| matches!(event, Event::PeerLost { .. })).collect();
    assert!(lost.is_empty(), "group {group}, rank {rank}: {lost:?}");
    for gone in leaving() {
        let said = station.inbox.messages.lock().expect("no panic under it");
        let said = said.iter().filter(|(from, _)| *from == gone).count();
        assert_eq!(said, MESSAGES, "what rank {gone} said before its bye is there");
    }
    // Other even ranks may still poll. They see that this rank has left.
    station.device.leave();
    station.until("the last words have gone out", |station| station.device.flush(Flush::All));
}
