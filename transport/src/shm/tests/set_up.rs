//! Connecting, registering, ending.

use std::ptr::NonNull;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use super::{Station, connect, pair, secret, until_both};
use crate::Rank;
use crate::clock;
use crate::device::{
    Device, Event, Flush, LossCause, ProtocolViolation, RegisterError, Responder, Source, Transfer,
    TransferId, Urgency,
};
use crate::memory::{HostMemory, Memory, Share, SharedMemory, Space};
use crate::mutex::lock;

#[test]
fn a_wrong_secret_is_told_to_both_ends() {
    let mut one = Station::with(1, 2, |config| config.secret = secret("0123456789abcdef"));
    let mut zero = Station::with(0, 2, |config| config.secret = secret("fedcba9876543210"));
    zero.device.connect(1, &one.device.info().address.clone()).expect("an address");
    one.device.connect(0, &zero.device.info().address.clone()).expect("an address");
    let wrong = LossCause::Protocol(ProtocolViolation::WrongSecret);
    assert_eq!(one.until_lost(0), wrong);
    assert_eq!(zero.until_lost(1), wrong);
}

#[test]
fn two_that_claim_one_rank_are_told_apart_and_the_first_stays() {
    let mut stations = pair();
    let [zero, one] = &mut stations;
    // A refusal comes only when the time is up, because the first process may be about to end. On a
    // busy machine the time may be up before the first attempt.
    let refusals = [30, 500, 30_000].into_iter().map(|limit_ms| {
        let limit = std::time::Duration::from_millis(limit_ms);
        let mut second = Station::with(1, 2, |config| config.connect_timeout = limit);
        second.device.connect(0, &zero.device.info().address.clone()).expect("an address");
        second.until_lost(0)
    });
    let refused = refusals.into_iter().find(|cause| !matches!(cause, LossCause::NotReached(_)));
    assert_eq!(refused, Some(LossCause::Protocol(ProtocolViolation::RankTaken)));
    zero.device.post(1, b"still here", Urgency::Ordinary).expect("connected");
    until_both(zero, one, "a message", |_, one| one.inbox.messages.lock().expect("no panic").len() == 1);
}

#[test]
fn a_rank_that_does_not_come_is_lost_when_its_time_is_up() {
    let limit = std::time::Duration::from_millis(30);
    let mut zero = Station::with(0, 2, |config| config.connect_timeout = limit);
    let address = zero.device.info().address.clone();
    zero.device.connect(1, &address).expect("an address");
    assert_eq!(zero.until_lost(1), LossCause::NotReached(limit));
}

#[test]
fn who_dials_a_rank_that_is_gone_is_told_at_once() {
    let address = Station::new(0, 2).device.info().address.clone();
    let mut one = Station::new(1, 2);
    one.device.connect(0, &address).expect("an address");
    let refused = LossCause::ConnectionBroke(std::io::ErrorKind::ConnectionRefused);
    assert_eq!(one.until_lost(0), refused, "not after the time limit of connects");
}

#[test]
fn memory_that_nobody_can_map_is_refused_by_a_name() {
    let mut zero = Station::new(0, 1);
    let refused = zero.device.register(HostMemory::new(64)).map(|_| ());
    assert!(matches!(refused, Err(RegisterError::NotShareable { fabric: "shm" })), "{refused:?}");
}

/// Memory whose file contradicts what it says about its peers.
struct Contradictory(Arc<dyn Memory>);

// SAFETY: the bytes are those of the memory that it contains. No peer gets them, because the device
// refuses the memory.
unsafe impl Memory for Contradictory {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn space(&self) -> Space {
        self.0.space()
    }
    fn share(&self) -> Share<'_> {
        self.0.share()
    }
    fn peers_may_write(&self) -> bool {
        !self.0.peers_may_write()
    }
}

#[test]
fn memory_is_lent_only_if_its_file_is_sealed() {
    let mut zero = Station::new(0, 1);
    let memories: [Arc<dyn Memory>; 2] =
        [SharedMemory::new(64).expect("memory"), SharedMemory::lendable(64).expect("memory")];
    for memory in memories {
        zero.device.register(memory.clone()).expect("file and word agree");
        let refused = zero.device.register(Arc::new(Contradictory(memory))).map(|_| ());
        assert!(matches!(refused, Err(RegisterError::System { bytes: 64, .. })), "{refused:?}");
    }
}

#[test]
fn memory_that_was_detached_is_not_registered_again_by_any_device_of_the_process() {
    let [mut zero, _one] = pair();
    let memory = SharedMemory::new(10_000).expect("memory");
    let region = zero.device.register(memory.clone()).expect("fresh memory");
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    drop(region);
    let mut other = Station::new(0, 1);
    for station in [&mut zero, &mut other] {
        let refused = station.device.register(memory.clone()).map(|_| ());
        assert!(matches!(refused, Err(RegisterError::Detached { .. })), "{refused:?}");
    }
    assert!(zero.device.register(SharedMemory::new(10_000).expect("memory")).is_ok());
}

#[test]
fn memory_released_before_a_peer_is_severed_is_silent_too() {
    let [mut zero, mut one] = pair();
    let memory = SharedMemory::new(10_000).expect("memory");
    let region = zero.device.register(memory.clone()).expect("fresh memory");
    let remote = region.remote();
    let mut mapped = None;
    until_both(&mut zero, &mut one, "the announcement", |_, one| {
        mapped = one.device.map(0, &remote).ok();
        mapped.is_some()
    });
    let mapped = mapped.expect("`until_both` has returned");
    drop(region);
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    mapped.store(0, &[5; 10_000]);
    let fresh = Station::new(0, 1);
    drop(fresh);
    let mut bytes = [1; 10_000];
    // SAFETY: the memory is alive and 10,000 bytes long, and nobody writes to it, as this test
    // shows.
    unsafe {
        std::ptr::copy_nonoverlapping(crate::Memory::base(&*memory).as_ptr(), bytes.as_mut_ptr(), 10_000)
    };
    assert!(bytes.iter().all(|byte| *byte == 0), "what a severed peer writes to released memory shows");
}

#[test]
fn a_key_that_overtakes_its_announcement_works() {
    let [mut zero, mut one] = pair();
    for round in 0..100 {
        let region = one.region(4096);
        // The transfer is submitted at once: rank 0 has learned the key by a faster way than the
        // control stream.
        let transfer = Transfer::Put {
            src: Source::Inline(crate::Inline::new(&[round; 8]).expect("short")),
            dst: region.slice(8..16).expect("inside").remote(),
            signal: None,
        };
        let id = TransferId(u64::from(round));
        zero.carry_out(1, transfer, id);
        let mut bytes = [0; 8];
        region.slice(8..16).expect("inside").load(&mut bytes);
        assert_eq!(bytes, [round; 8]);
    }
}

/// Additions of the owner while its pages are replaced are neither lost nor made twice.
#[test]
fn a_thread_that_writes_while_its_memory_is_detached_loses_nothing() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    const PAGES: usize = 2_000;
    let [mut zero, _one] = pair();
    let region = zero.region(PAGES * 4096);
    let stop = Arc::new(AtomicBool::new(false));
    let (slice, stopped) = (region.whole(), stop.clone());
    let writer = std::thread::spawn(move || {
        let mut rounds = 0_u64;
        // Relaxed: the flag only says that the test is over.
        while !stopped.load(Ordering::Relaxed) {
            for page in 0..PAGES {
                // Plain loads and stores of this thread alone, as by a caller that fills its
                // buffer.
                // SAFETY: the word is aligned, inside the slice, and touched by this thread alone.
                let word = unsafe { AtomicU64::from_ptr(slice.as_ptr().add(page * 4096 + 8).cast()) };
                word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
            rounds += 1;
        }
        rounds
    });
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    stop.store(true, Ordering::Relaxed);
    let rounds = writer.join().expect("the writer only writes");
    for page in 0..PAGES {
        let mut word = [0; 8];
        region.slice(page * 4096 + 8..page * 4096 + 16).expect("inside").load(&mut word);
        assert_eq!(u64::from_ne_bytes(word), rounds, "page {page}");
    }
}

/// Reports that it has a message, and blocks in the watcher until it is told to continue.
struct Blocking(Mutex<(Sender<()>, Receiver<()>)>);

impl Responder for Blocking {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        let channels = lock(&self.0);
        let _ = channels.0.send(());
        let _ = channels.1.recv();
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

#[test]
fn a_responder_that_blocks_does_not_keep_its_device_from_being_dropped() {
    let ((entered, enters), (go_on, blocked)) = (channel(), channel());
    let responder = Arc::new(Blocking(Mutex::new((entered, blocked))));
    let zero = Station::with(0, 2, |config| config.responder = responder);
    let mut stations = [zero, Station::new(1, 2)];
    connect(&mut stations);
    let [zero, mut one] = stations;
    one.device.post(0, b"block", Urgency::Ordinary).expect("connected");
    one.until("the message to be sent", |one| one.device.flush(Flush::All));
    enters.recv_timeout(super::PATIENCE).expect("the watcher has the message");
    let began = clock::now();
    drop(zero);
    assert!(clock::now().since(began) < super::PATIENCE, "dropping a device has a limit");
    one.until_lost(0);
    go_on.send(()).expect("the watcher still waits");
}

#[test]
fn more_memory_than_there_are_addresses_is_an_error() {
    for len in [usize::MAX, usize::MAX - 4096, isize::MAX as usize] {
        assert!(SharedMemory::new(len).is_err(), "{len}");
    }
}
