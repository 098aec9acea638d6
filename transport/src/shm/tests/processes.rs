//! Real processes: stopped, continued, killed, forked. The peer is this test binary run again with
//! a role.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mm::{MsyncFlags, msync};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{PATIENCE, Station, connect, pair, until_both};
use crate::clock;
use crate::device::{
    Address, Device, Event, Flush, LossCause, Source, Submitted, Transfer, TransferId, Urgency,
};
use crate::memory::SharedMemory;
use crate::region::{Mapped, RegionKey, RemoteSlice};
use crate::signals::{self, Inline};

const ROLE: &str = "PLEACH_TEST_ROLE";
const ADDRESS: &str = "PLEACH_TEST_ADDRESS";
const REGION_BYTES: usize = 8 << 20;
const SIGNAL_SLOT: u16 = 2;
const ROUNDS: usize = 100;
/// The ranks of a world in which rank 1 is a process of its own.
const RANKS: u32 = 3;

/// The byte that a peer process prints for each step. Nothing else prints it.
const MARK: u8 = b'#';

/// The time within which a killed process must be found. Longer times show that its process
/// descriptor did not report the end.
const LOSS_LIMIT: Duration = Duration::from_secs(10);

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
}

impl Process {
    fn start(role: &str, address: &Address) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a test binary"))
            .args(["--exact", "shm::tests::processes::peer", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ADDRESS, &address.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test binary runs");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    fn id(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).expect("a process id is positive")
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.id(), signal).expect("it is a child of this process");
    }

    /// Reads `marks` lines; false at the end of the output.
    fn read_marks(&mut self, marks: usize) -> bool {
        let mut seen = 0;
        let mut buffer = [0; 4096];
        while seen < marks {
            match self.output.read(&mut buffer) {
                Ok(0) | Err(_) => return false,
                Ok(bytes) => seen += buffer[..bytes].iter().filter(|byte| **byte == MARK).count(),
            }
        }
        true
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn event() {
    let mut output = std::io::stdout().lock();
    output.write_all(&[MARK]).expect("the test reads");
    output.flush().expect("the test reads");
}

/// Rank 0 of a world whose rank 1 is a process with this role. Rank 1 was told of the region.
fn with_peer(role: &str) -> (Station, Process, crate::Region) {
    let mut zero = Station::new(0, RANKS);
    // Rank 0 is the listener of the pair, so the address that it is given does not matter.
    let address = zero.device.info().address.clone();
    let process = Process::start(role, &address);
    zero.device.connect(1, &address).expect("an address");
    zero.until_event(&Event::Connected { peer: 1 });
    let region = zero.region(REGION_BYTES);
    zero.device.post(1, &region.key().0.to_le_bytes(), Urgency::Ordinary).expect("connected");
    (zero, process, region)
}

fn is_filled_with(region: &crate::Region, byte: u8) -> bool {
    region.whole().to_vec().iter().all(|other| *other == byte)
}

/// Writes to a region that no peer may write any more, lets the process continue to write, and
/// compares the bytes.
fn check_fenced(region: &crate::Region, mut peer_writes: impl FnMut()) {
    let before = region.whole().to_vec();
    peer_writes();
    assert!(region.whole().to_vec() == before, "what was there at the fence has changed");
    region.whole().store(&vec![0xAA; REGION_BYTES]);
    peer_writes();
    assert!(is_filled_with(region, 0xAA), "what was written after the fence has changed");
}

#[test]
fn a_peer_stopped_in_the_middle_of_writing_and_continued_after_the_fence_changes_no_byte() {
    let (mut zero, mut process, region) = with_peer("writer");
    let signal_slots = zero.device.signal_slots(1);
    assert!(process.read_marks(2), "it writes");
    zero.until("signals", |_| signal_slots.count(SIGNAL_SLOT) > 0);
    process.signal(Signal::STOP);
    let (_, status) = waitpid(Some(process.id()), WaitOptions::UNTRACED).expect("a child").expect("it stops");
    assert!(status.stopped());
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    let count = signal_slots.count(SIGNAL_SLOT);
    process.signal(Signal::CONT);
    check_fenced(&region, || assert!(process.read_marks(3), "it writes on"));
    assert_eq!(signal_slots.count(SIGNAL_SLOT), count, "it signals in vain");
}

#[test]
fn a_killed_peer_is_found_though_its_forked_child_holds_its_sockets_and_the_child_maps_nothing() {
    let (mut zero, mut process, region) = with_peer("parent");
    assert!(process.read_marks(1), "it has forked");
    let began = clock::now();
    process.signal(Signal::KILL);
    assert_eq!(zero.until_lost(1), LossCause::ProcessEnded);
    let took = clock::now().since(began);
    assert!(took < LOSS_LIMIT, "found after {took:?}");
    let mut input = process.input.take().expect("piped");
    input.write_all(b"?").expect("the child lives");
    assert!(process.read_marks(1), "the forked child lives and has no mapping");
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    assert!(is_filled_with(&region, 0));
}

/// Connects rank 2, which is in this process, with rank 0.
fn connect_two(zero: &mut Station) -> Station {
    let mut two = Station::new(2, RANKS);
    let addresses = [zero.device.info().address.clone(), two.device.info().address.clone()];
    zero.device.connect(2, &addresses[1]).expect("an address");
    two.device.connect(0, &addresses[0]).expect("an address");
    until_both(zero, &mut two, "a connection", |zero, two| {
        zero.log.contains(&Event::Connected { peer: 2 }) && two.log.contains(&Event::Connected { peer: 0 })
    });
    two
}

/// Severs rank 1, and shows that rank 2 can use a region of rank 0 as before.
fn check_kept(zero: &mut Station, two: &mut Station, region: &crate::Region) {
    let mut mapped = None;
    until_both(zero, two, "a mapping", |_, two| {
        mapped = two.device.map(0, &region.remote()).ok();
        mapped.is_some()
    });
    let mapped = mapped.expect("`until_both` has returned");
    // The transfer is too long for one step, so it is under way before and after the fence.
    let source = two.region(REGION_BYTES);
    source.whole().store(&vec![7; REGION_BYTES]);
    let put = Transfer::Put { src: Source::Slice(source.whole()), dst: region.remote(), signal: None };
    assert_eq!(two.device.submit(0, put, TransferId(9)), Ok(Submitted::UnderWay));
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    two.until_event(&Event::Done { id: TransferId(9), result: Ok(0) });
    assert!(is_filled_with(region, 7), "the put that was under way");
    mapped.store(0, &[8; REGION_BYTES]);
    assert!(is_filled_with(region, 8) && mapped.is_shared(), "the mapping is as good as before");
    zero.device.register(region.memory().clone()).expect("nothing was taken from it");
}

#[test]
fn severing_a_peer_whose_process_has_ended_takes_nothing_from_others() {
    let (mut zero, process, region) = with_peer("writer");
    let mut two = connect_two(&mut zero);
    process.signal(Signal::KILL);
    zero.until_lost(1);
    check_kept(&mut zero, &mut two, &region);
}

#[test]
fn severing_a_peer_that_runs_or_is_stopped_leaves_the_memory_of_others() {
    for is_stopped in [false, true] {
        let (mut zero, mut process, region) = with_peer("writer");
        let mut two = connect_two(&mut zero);
        let memory = SharedMemory::new(REGION_BYTES).expect("memory");
        let kept = zero.device.register_for(2, memory).expect("it is registered");
        assert!(process.read_marks(2), "it writes");
        if is_stopped {
            process.signal(Signal::STOP);
        }
        check_kept(&mut zero, &mut two, &kept);
        if is_stopped {
            process.signal(Signal::CONT);
        }
        check_fenced(&region, || assert!(process.read_marks(3), "it writes on"));
        assert!(is_filled_with(&kept, 8), "it has no way to the memory of another");
    }
}

#[test]
fn no_put_is_torn_or_lost_while_another_peer_is_severed() {
    const PUTS: u64 = 400;
    const PUT_BYTES: usize = 64 << 10;
    let (mut zero, mut process, _region) = with_peer("writer");
    let two = connect_two(&mut zero);
    let memory = SharedMemory::new(PUT_BYTES).expect("memory");
    let target = zero.device.register_for(2, memory).expect("it is registered");
    let (signal_slots, remote) = (zero.device.signal_slots(2), target.remote());
    assert!(process.read_marks(1), "it writes");
    // The reader increases it when it has compared a put, so that the next put may come. Release:
    // pairs with the acquire of the writer.
    let compared = Arc::new(AtomicU64::new(0));
    let seen = compared.clone();
    let writer = std::thread::spawn(move || {
        let mut two = two;
        let source = two.region(PUT_BYTES);
        for round in 1..=PUTS {
            source.whole().store(&[round as u8; PUT_BYTES]);
            let signal = signals::Signal { signal_slot: SIGNAL_SLOT, payload: Inline::EMPTY };
            let src = Source::Slice(source.whole());
            two.carry_out(0, Transfer::Put { src, dst: remote, signal: Some(signal) }, TransferId(round));
            two.until("the reader", |_| seen.load(Ordering::Acquire) == round);
        }
    });
    for round in 1..=PUTS {
        if round == PUTS / 4 {
            zero.device.sever(1);
        }
        zero.until("a put", |_| signal_slots.count(SIGNAL_SLOT) >= round || writer.is_finished());
        assert_eq!(signal_slots.count(SIGNAL_SLOT), round);
        assert!(target.whole().to_vec().iter().all(|byte| *byte == round as u8), "put {round}");
        compared.store(round, Ordering::Release);
    }
    writer.join().expect("every put has ended well");
    zero.until_event(&Event::Severed { peer: 1 });
}

/// Gives rank 1 to another process with this role, and tells it of a new region.
fn replace_peer(zero: &mut Station, role: &str) -> (Process, crate::Region) {
    let connected = Event::Connected { peer: 1 };
    let before = zero.log.iter().filter(|event| **event == connected).count();
    let address = zero.device.info().address.clone();
    let process = Process::start(role, &address);
    zero.device.connect(1, &address).expect("the rank is free");
    zero.until("another process", |zero| {
        zero.log.iter().filter(|event| **event == connected).count() == before + 1
    });
    let region = zero.region(REGION_BYTES);
    zero.device.post(1, &region.key().0.to_le_bytes(), Urgency::Ordinary).expect("connected");
    (process, region)
}

#[test]
fn a_killed_process_is_replaced_while_the_puts_of_a_third_rank_are_under_way() {
    let (mut zero, mut process, region) = with_peer("writer");
    let mut two = connect_two(&mut zero);
    let former = zero.device.incarnation(1).expect("it was connected");
    let target = zero.region(REGION_BYTES);
    let source = two.region(REGION_BYTES);
    source.whole().store(&vec![7; REGION_BYTES]);
    let put = |two: &mut Station, id| {
        let put = Transfer::Put { src: Source::Slice(source.whole()), dst: target.remote(), signal: None };
        assert_eq!(two.device.submit(0, put, TransferId(id)), Ok(Submitted::UnderWay));
    };
    put(&mut two, 1);
    assert!(process.read_marks(2), "it writes");
    process.signal(Signal::KILL);
    assert_eq!(zero.until_lost(1), LossCause::ProcessEnded);
    put(&mut two, 2);
    let old_slots = zero.device.signal_slots(1);
    let (left, count) = (region.whole().to_vec(), old_slots.count(SIGNAL_SLOT));
    let (mut next, new_region) = replace_peer(&mut zero, "writer");
    assert_ne!(zero.device.incarnation(1), Some(former));
    let new_slots = zero.device.signal_slots(1);
    assert!(next.read_marks(2), "the next one writes");
    zero.until("its signals", |_| new_slots.count(SIGNAL_SLOT) > 0);
    zero.until("its bytes", |_| new_region.whole().to_vec().iter().any(|byte| *byte != 0));
    for id in [1, 2] {
        two.until_event(&Event::Done { id: TransferId(id), result: Ok(0) });
    }
    assert!(is_filled_with(&target, 7), "the puts that were under way");
    assert_eq!(old_slots.count(SIGNAL_SLOT), count, "nobody signals there any more");
    assert!(region.whole().to_vec() == left, "the next one does not know that region");
    // The former process has ended, so the memory can be used as before.
    zero.device.register(region.memory().clone()).expect("nothing was taken from it");
}

#[test]
fn a_severed_process_that_goes_on_while_another_has_its_rank_changes_no_byte() {
    let (mut zero, mut process, region) = with_peer("writer");
    assert!(process.read_marks(2), "it writes");
    process.signal(Signal::STOP);
    let (_, status) = waitpid(Some(process.id()), WaitOptions::UNTRACED).expect("a child").expect("it stops");
    assert!(status.stopped());
    zero.device.sever(1);
    zero.until_event(&Event::Severed { peer: 1 });
    let (next, new_region) = replace_peer(&mut zero, "listener");
    let new_slots = zero.device.signal_slots(1);
    process.signal(Signal::CONT);
    check_fenced(&region, || assert!(process.read_marks(3), "it writes on"));
    assert!(is_filled_with(&new_region, 0), "it does not know the region of its successor");
    assert_eq!(new_slots.count(SIGNAL_SLOT), 0, "it signals in vain");
    let connected = zero.log.iter().filter(|event| **event == Event::Connected { peer: 1 }).count();
    assert_eq!(connected, 2);
    zero.device.post(1, b"still connected", Urgency::Ordinary).expect("connected");
    drop(next);
}

#[test]
fn nothing_is_left_of_a_hundred_processes_that_had_one_rank() {
    let mut process = Process::start("returns", &Address(String::new()));
    let mut output = String::new();
    process.output.read_to_string(&mut output).expect("text");
    assert!(process.child.wait().expect("a child").success(), "{output}");
}

#[test]
fn a_peer_process_that_says_bye_is_not_lost() {
    let (mut zero, mut process, _region) = with_peer("leaver");
    zero.until_event(&Event::Departed { peer: 1 });
    assert!(process.child.wait().expect("a child").success());
    assert!(!zero.log.iter().any(|event| matches!(event, Event::PeerLost { .. })));
}

#[test]
fn nothing_is_left_after_a_hundred_connections() {
    let mut process = Process::start("rounds", &Address(String::new()));
    let mut output = String::new();
    process.output.read_to_string(&mut output).expect("text");
    assert!(process.child.wait().expect("a child").success(), "{output}");
}

#[test]
fn a_forked_child_may_drop_the_device_and_harms_nobody() {
    let mut process = Process::start("fork", &Address(String::new()));
    let mut output = String::new();
    process.output.read_to_string(&mut output).expect("text");
    assert!(process.child.wait().expect("a child").success(), "{output}");
}

#[test]
#[ignore = "a process that other tests start"]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "writer" => writer(&mut Told::connect()),
        "parent" => parent(Told::connect()),
        "leaver" => leaver(Told::connect()),
        "listener" => Told::connect().station.until("to be killed", |_| false),
        "rounds" => rounds(),
        "returns" => returns(),
        "fork" => fork_and_drop(),
        other => panic!("no role {other}"),
    }
}

/// Rank 1, told of a region of rank 0.
struct Told {
    station: Station,
    remote: RemoteSlice,
    mapped: Mapped,
}

impl Told {
    fn connect() -> Self {
        let address = Address(std::env::var(ADDRESS).expect("set by the test"));
        let mut station = Station::new(1, RANKS);
        station.device.connect(0, &address).expect("an address");
        let inbox = station.inbox.clone();
        let told = || inbox.messages.lock().expect("no panic").first().map(|(_, message)| message.clone());
        station.until("a key", |_| told().is_some());
        let bytes = told().expect("`until` has returned");
        let key = RegionKey(u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
        let remote = RemoteSlice { key, offset: 0, len: REGION_BYTES as u64 };
        let mut mapped = None;
        station.until("the region", |station| {
            mapped = station.device.map(0, &remote).ok();
            mapped.is_some()
        });
        Self { station, remote, mapped: mapped.expect("`until` has returned") }
    }
}

/// Writes endlessly: through its mapping, by puts, and to a signal slot.
fn writer(told: &mut Told) {
    let deadline = clock::now() + PATIENCE * 2;
    let mut bytes = vec![0; 64 << 10];
    for round in 1_u64.. {
        assert!(clock::now() < deadline, "the test ends this process");
        bytes.fill(round as u8);
        for offset in (0..REGION_BYTES).step_by(bytes.len()) {
            told.mapped.store(offset, &bytes);
        }
        let signal = signals::Signal { signal_slot: SIGNAL_SLOT, payload: Inline::EMPTY };
        let src = Source::Inline(Inline::new(&[round as u8; 8]).expect("short"));
        let dst = told.remote.slice(0..8).expect("inside");
        // The put is refused after the fence, as it must be.
        let _ = told.station.device.submit(
            0,
            Transfer::Put { src, dst, signal: Some(signal) },
            TransferId(round),
        );
        told.station.pump();
        event();
    }
}

/// Forks a child that checks for the mapping whenever it is told to. The parent waits to be killed.
fn parent(told: Told) {
    // SAFETY: the child calls only what needs no lock that another thread may have held.
    if unsafe { libc::fork() } == 0 {
        let mut order = [0];
        // The test closes its end when it is over.
        while rustix::io::read(std::io::stdin(), &mut order) == Ok(1) {
            // SAFETY: the call accesses no byte; it fails where nothing is mapped.
            let found = unsafe { msync(told.mapped.as_ptr().cast(), REGION_BYTES, MsyncFlags::ASYNC) };
            if found == Err(Errno::NOMEM) {
                let _ = rustix::io::write(std::io::stdout(), &[MARK]);
            } else {
                break;
            }
        }
        // SAFETY: the call ends the child without running destructors of its parent.
        unsafe { libc::_exit(0) };
    }
    event();
    let mut station = told.station;
    station.until("to be killed", |_| false);
}

fn leaver(told: Told) {
    let Told { mut station, .. } = told;
    station.device.leave();
    station.until("the bye to be said", |station| station.device.flush(Flush::All));
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("a folder").count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps")
        .expect("a file")
        .lines()
        .filter(|line| line.contains("pleach"))
        .count()
}

fn rounds() {
    /// Rounds after which everything that is made once exists.
    const FIRST: usize = 3;
    let shared = count("/dev/shm");
    let current = || [count("/proc/self/fd"), count("/proc/self/task"), mappings()];
    // The kernel lists a thread for a moment after it was joined, so the least of several counts is
    // taken.
    let mut after_first = [usize::MAX; 3];
    for round in 0..ROUNDS {
        {
            let [zero, one] = &mut pair();
            let region = zero.region(100_000);
            let src = zero.region(100_000).whole();
            let target = one.region(100_000);
            let put = Transfer::Put { src: Source::Slice(src), dst: target.remote(), signal: None };
            zero.carry_out(1, put, TransferId(1));
            if round % 2 == 0 {
                zero.device.sever(1);
                zero.until_event(&Event::Severed { peer: 1 });
            }
            drop(region);
        }
        if round < FIRST {
            after_first.iter_mut().zip(current()).for_each(|(least, now)| *least = now.min(*least));
            continue;
        }
        let deadline = clock::now() + PATIENCE;
        while current() != after_first {
            assert!(
                clock::now() < deadline,
                "files, threads and mappings: {:?}, and {after_first:?}",
                current()
            );
            std::thread::yield_now();
        }
    }
    assert_eq!(count("/dev/shm"), shared);
}

/// One device, whose peer is a new device in each round. The peers end in all different ways.
fn returns() {
    const WAYS: usize = 3;
    /// Objects that are made once may be made after the first rounds. Objects that each round of a
    /// kind leaves behind would be eight times as many.
    const MADE_LATE_MAX: usize = 4;
    let mut zero = Station::new(0, 2);
    let mut before = Vec::new();
    for round in 0..ROUNDS {
        {
            let mut one = Station::new(1, 2);
            let addresses = [zero.device.info().address.clone(), one.device.info().address.clone()];
            zero.device.connect(1, &addresses[1]).expect("the rank is free");
            one.device.connect(0, &addresses[0]).expect("an address");
            until_both(&mut zero, &mut one, "a connection", |zero, one| {
                let is_connected = |event: &Event| matches!(event, Event::Connected { .. });
                zero.log.iter().any(is_connected) && one.log.iter().any(is_connected)
            });
            let target = zero.device.register_for(1, SharedMemory::new(100_000).expect("memory"));
            let (target, source) = (target.expect("it is registered"), one.region(100_000));
            let src = Source::Slice(source.whole());
            let put = Transfer::Put { src, dst: target.remote(), signal: None };
            one.carry_out(0, put, TransferId(1));
            if round % WAYS == 1 {
                one.device.leave();
                one.until("the bye to be said", |one| one.device.flush(Flush::All));
            }
            if round % WAYS == 2 {
                zero.device.sever(1);
                zero.until_event(&Event::Severed { peer: 1 });
            }
        }
        zero.until("its end", |zero| {
            let is_end = |event: &Event| !matches!(event, Event::Connected { .. } | Event::Done { .. });
            zero.log.iter().any(is_end)
        });
        zero.log.clear();
        // The first rounds make the objects that stay. The watcher closes its objects a moment
        // later.
        let open = || [count("/proc/self/fd"), count("/proc/self/task"), mappings()];
        if round < WAYS {
            before.push(open());
        } else {
            for (kind, what) in ["files", "threads", "mappings"].into_iter().enumerate() {
                let most = before[round % WAYS][kind] + MADE_LATE_MAX;
                zero.until(&format!("at most {most} {what} in round {round}"), |_| open()[kind] <= most);
            }
        }
    }
}

fn fork_and_drop() {
    let mut stations = [Station::new(0, 2), Station::new(1, 2)];
    connect(&mut stations);
    let region = stations[0].region(4096);
    // SAFETY: the child drops two devices, which takes locks that only this thread and idle
    // watchers use, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((region, stations));
        // SAFETY: the call ends the child without running destructors of its parent.
        unsafe { libc::_exit(7) };
    }
    let child = Pid::from_raw(child).expect("fork works");
    let deadline = clock::now() + PATIENCE;
    let status = loop {
        assert!(clock::now() < deadline, "the child hangs in dropping the devices");
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).expect("a child") {
            break status;
        }
        stations[0].pump();
    };
    assert_eq!(status.exit_status(), Some(7));
    let [zero, one] = &mut stations;
    let src = Source::Inline(Inline::new(&[9; 8]).expect("short"));
    let dst = region.slice(0..8).expect("inside").remote();
    one.carry_out(0, Transfer::Put { src, dst, signal: None }, TransferId(4));
    zero.device.post(1, b"still connected", Urgency::Ordinary).expect("connected");
    one.until("a message", |one| !one.inbox.messages.lock().expect("no panic").is_empty());
}
