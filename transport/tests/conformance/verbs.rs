//! The suite over `verbs`: each rank on the next RDMA device of this machine, from the first one on
//! again. `WIDE`: on that and the next one, over two queue pairs on each, with nearly all transfers
//! in parts over all of them. `CM`: joined by the connection manager.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::verbs::{Connect, Operation, PairError, VerbsDevice, VerbsOptions, WorkStatus};
use pleach_transport::{
    Device, DeviceConfig, Event, Flush, HostMemory, Inline, LossCause, Memory, Nanos, Rank, Responder,
    Secret, SharedMemory, Signal, Source, SubmitError, Submitted, Transfer, TransferId, clock,
};

use crate::rdma_devices::rdma_device;
use crate::world::{Backend, PATIENCE};

mod minimum;
pub(crate) mod rdma_cm;
mod refused;

/// Transfers of at least this length go in parts where the device is wide.
const STRIPE_BYTES: usize = 64;

pub(crate) struct Verbs<const WIDE: bool, const CM: bool = false>;

impl<const WIDE: bool, const CM: bool> Backend for Verbs<WIDE, CM> {
    const NAME: &'static str = if WIDE { "verbs over two NICs" } else { "verbs" };
    const LIVE: bool = true;
    // A NIC tries seven times, each time for 0.54 s.
    const FAILED_AFTER: Duration = Duration::from_secs(5);

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let connect = if CM { Connect::RdmaCm } else { Connect::Rendezvous };
        let wish = VerbsOptions { connect, ..wish(config.rank, WIDE) };
        Box::new(VerbsDevice::new(config, &wish).expect("an RDMA device that is up"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        HostMemory::new(len)
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}

fn wish(rank: Rank, wide: bool) -> VerbsOptions {
    if !wide {
        return VerbsOptions { device: Some(rdma_device(rank)), ..VerbsOptions::default() };
    }
    let devices = format!("{},{}", rdma_device(rank), rdma_device(rank + 1));
    let (queue_pairs, stripe_bytes) = (Some(2), Some(STRIPE_BYTES));
    VerbsOptions { device: Some(devices), queue_pairs, stripe_bytes, ..VerbsOptions::default() }
}

/// Answers nobody.
struct Mute;

impl Responder for Mute {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// Two ranks, each on the RDMA device of its number, polled by the test.
pub(crate) struct Two([VerbsDevice; 2]);

impl Two {
    fn connected(wide: bool) -> Self {
        let mut two = Self::new(|rank| wish(rank, wide), PATIENCE);
        two.connect();
        let mut missing = 2;
        two.until(|event, _| {
            missing -= usize::from(matches!(event, Some(Event::Connected { .. })));
            missing == 0
        });
        two
    }

    /// Not connected yet.
    pub(crate) fn new(wish: impl Fn(Rank) -> VerbsOptions, connect_timeout: Duration) -> Self {
        let device = |rank| {
            let config = DeviceConfig {
                rank,
                world_size: 2,
                secret: Some(Secret::new(b"known to both ends")),
                signal_slots: 4,
                connect_timeout,
                interface: None,
                address: None,
                responder: Arc::new(Mute),
            };
            VerbsDevice::new(config, &wish(rank)).expect("an RDMA device that is up")
        };
        Self([device(0), device(1)])
    }

    pub(crate) fn connect(&mut self) {
        let addresses = [self.0[0].info().address.clone(), self.0[1].info().address.clone()];
        for rank in 0..2_usize {
            self.0[rank].connect(1 - rank as Rank, &addresses[1 - rank]).expect("starts");
        }
    }

    /// Why each loses the other, which both must.
    pub(crate) fn until_lost(&mut self) -> [LossCause; 2] {
        let (deadline, mut events) = (clock::now() + PATIENCE, Vec::with_capacity(64));
        let mut causes = [None, None];
        while causes.iter().any(Option::is_none) {
            assert!(clock::now() < deadline, "not both are lost: {causes:?}");
            for (device, cause) in self.0.iter_mut().zip(&mut causes) {
                device.poll(clock::now(), &mut events);
                for event in events.drain(..) {
                    match event {
                        Event::PeerLost { cause: lost, .. } => assert_eq!(cause.replace(lost), None),
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
        causes.map(|cause| cause.expect("both are there"))
    }

    /// Polls both until it is enough; told each event, and nothing after each round.
    fn until(&mut self, mut is_enough: impl FnMut(Option<Event>, &[VerbsDevice; 2]) -> bool) {
        let (deadline, mut events) = (clock::now() + PATIENCE, Vec::with_capacity(64));
        loop {
            for device in &mut self.0 {
                device.poll(clock::now(), &mut events);
            }
            let mut enough = false;
            for event in events.drain(..) {
                assert!(!matches!(event, Event::PeerLost { .. }), "{event:?}");
                enough |= is_enough(Some(event), &self.0);
            }
            if enough || is_enough(None, &self.0) {
                return;
            }
            assert!(clock::now() < deadline, "it takes longer than {} s", PATIENCE.as_secs());
        }
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn a_long_put_costs_one_request_short_ones_share_a_doorbell_and_no_receiver_is_unready() {
    const PUTS: u64 = 200;
    const BYTES: usize = 16 << 10;
    let mut two = Two::connected(false);
    let [source, target] =
        [0, 1].map(|rank| two.0[rank].register(HostMemory::new(BYTES)).expect("registers"));
    let before = [two.0[0].counts(), two.0[1].counts()];
    let (mut submitted, mut done) = (0, 0);
    // As many as go, again and again: credits run out and come back.
    while done < PUTS {
        while submitted < PUTS {
            let signal = Some(Signal { signal_slot: 1, payload: Inline::EMPTY });
            let put = Transfer::Put { src: Source::Slice(source.whole()), dst: target.remote(), signal };
            match two.0[0].submit(1, put, TransferId(submitted)) {
                Ok(_) => submitted += 1,
                Err(SubmitError::QueueFull { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        two.until(|event, _| {
            done += u64::from(matches!(event, Some(Event::Done { result: Ok(_), .. })));
            event.is_none()
        });
    }
    two.until(|_, devices| devices[1].signal_slots(0).count(1) == PUTS);
    let after = two.0[0].counts();
    assert_eq!(after.requests - before[0].requests, PUTS, "one request a put: {after}");
    assert_eq!(after.doorbells - before[0].doorbells, PUTS, "one doorbell a put: {after}");
    assert_eq!(after.signaled - before[0].signaled, PUTS, "one completion a put: {after}");
    let there = two.0[1].counts();
    assert_eq!(there.receives - before[1].receives, PUTS, "one receive a put: {there}");
    assert!(there.receive_doorbells <= 1 + there.receives / 64, "receives are posted together: {there}");
    assert!(there.requests - before[1].requests <= 2, "credits come back together: {there}");

    let before = two.0[0].counts();
    let signal_slots = two.0[1].signal_slots(0);
    for number in 0..8_u64 {
        let payload = Inline::new(&number.to_le_bytes()).expect("fits");
        let submitted = two.0[0].signal(1, &Signal { signal_slot: 2, payload }, TransferId(0));
        assert_eq!(submitted, Ok(Submitted::Ended(0)));
    }
    two.until(|_, _| signal_slots.count(2) == 8);
    let after = two.0[0].counts();
    assert_eq!(after.requests - before.requests, 8, "{after}");
    assert_eq!(after.doorbells - before.doorbells, 1, "{after}");
    for device in &two.0 {
        assert_eq!(device.receivers_not_ready(), Some(0), "{}", device.reason());
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn a_rank_that_leaves_before_it_polled_its_signals_is_flushed() {
    // More than half of the credits of a pair, so that the signals make some due.
    const SIGNALS: u64 = 200;
    let mut two = Two::connected(false);
    let [source, target] = [0, 1].map(|rank| two.0[rank].register(HostMemory::new(4096)).expect("registers"));
    for _ in 0..SIGNALS {
        let signal = Signal { signal_slot: 1, payload: Inline::EMPTY };
        assert_eq!(two.0[0].signal(1, &signal, TransferId(0)), Ok(Submitted::Ended(0)));
    }
    let (id, src, dst) = (TransferId(1), Source::Slice(source.whole()), target.remote());
    let put = Transfer::Put { src, dst, signal: None };
    assert_eq!(two.0[0].submit(1, put, id), Ok(Submitted::UnderWay));
    let (deadline, mut events) = (clock::now() + PATIENCE, Vec::with_capacity(64));
    // The put comes after the signals, over one queue pair: the other NIC has them all.
    while !events.contains(&Event::Done { id, result: Ok(0) }) {
        assert!(clock::now() < deadline, "the put does not end: {events:?}");
        two.0[0].poll(clock::now(), &mut events);
    }
    two.0[1].leave();
    let signal_slots = two.0[1].signal_slots(0);
    while signal_slots.count(1) < SIGNALS || !two.0[1].flush(Flush::All) {
        assert!(clock::now() < deadline, "{} signals, not flushed: {events:?}", signal_slots.count(1));
        two.0[1].poll(clock::now(), &mut events);
    }
    two.until(|event, _| event == Some(Event::Departed { peer: 1 }));
}

/// Connections of TCP at a device's port, as the kernel lists them.
fn sockets(device: &VerbsDevice) -> usize {
    let address = device.info().address.0.clone();
    let port = address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    let own = format!(":{:04X}", port.expect("an address with a port"));
    let listed = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's list");
    // Number, own address, other address, state (1: connected).
    let columns = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    columns.filter(|line| line[1].ends_with(&own) && line[3] == "01").count()
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn a_pair_has_one_socket_whatever_number_of_queue_pairs() {
    for wide in [false, true] {
        let two = Two::connected(wide);
        assert_eq!(two.0.each_ref().map(sockets), [1, 0], "the higher rank has dialed, once");
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn a_lease_is_good_for_its_slice_until_it_is_taken_back() {
    const LEN: usize = 4096;
    let mut two = Two::connected(false);
    let [source, target] = [0, 1].map(|rank| two.0[rank].register(HostMemory::new(LEN)).expect("registers"));
    let part = target.slice(100..1124).expect("inside");
    let id = TransferId(7);
    let leased = two.0[1].lease(0, &part, id).expect("Soft-RoCE has memory windows");
    assert_ne!(leased.key, target.key(), "the region's own key stays a secret");
    two.until(|event, _| event == Some(Event::Done { id, result: Ok(0) }));
    let put = |two: &mut Two, byte: u8| {
        source.whole().store(&[byte; 1024]);
        let src = Source::Slice(source.slice(0..1024).expect("inside"));
        let put = Transfer::Put { src, dst: leased, signal: None };
        two.0[0].submit(1, put, TransferId(8)).expect("there is room")
    };
    put(&mut two, 1);
    two.until(|event, _| matches!(event, Some(Event::Done { result: Ok(_), .. })));
    assert_eq!(part.to_vec(), [1; 1024]);

    two.0[1].revoke(0, leased.key);
    put(&mut two, 2);
    let (deadline, mut events) = (clock::now() + PATIENCE, Vec::with_capacity(64));
    let is_refused = |event: &Event| {
        let Event::PeerLost { peer: 1, cause } = event else { return false };
        let Some(PairError::QueuePair(failure)) = cause.fabric_error() else { return false };
        assert_eq!((failure.status, failure.operation), (WorkStatus::RemoteAccess, Operation::Write));
        true
    };
    while !events.iter().any(is_refused) {
        assert!(clock::now() < deadline, "who uses a lease that was taken back loses the pair: {events:?}");
        two.0[0].poll(clock::now(), &mut events);
    }
    assert_eq!(part.to_vec(), [1; 1024], "and changes no byte");
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn lent_memory_is_got_by_a_lease_until_the_lease_is_revoked() {
    const LEN: usize = 4096;
    let mut two = Two::connected(false);
    let lent = two.0[1].register(SharedMemory::lendable(LEN).expect("there is memory")).expect("registers");
    lent.whole().store(&[1; LEN]);
    let own = two.0[0].register(HostMemory::new(LEN)).expect("registers").slice(0..1024).expect("inside");
    let part = lent.slice(64..1088).expect("inside");
    // Revoked before it is bound: its window stays until the NIC has bound it.
    let early = two.0[1].lease(0, &part, TransferId(1)).expect("Soft-RoCE has memory windows");
    two.0[1].revoke(0, early.key);
    let id = TransferId(2);
    let leased = two.0[1].lease(0, &part, id).expect("there is another window");
    assert!(![early.key, lent.key()].contains(&leased.key), "each lease has a key of its own");
    two.until(|event, _| event == Some(Event::Done { id, result: Ok(0) }));
    let get = |two: &mut Two, src| {
        two.0[0].submit(1, Transfer::Get { src, dst: own.clone() }, TransferId(3)).expect("there is room")
    };
    get(&mut two, leased);
    two.until(|event, _| event == Some(Event::Done { id: TransferId(3), result: Ok(0) }));
    assert_eq!(own.to_vec(), [1; 1024]);

    two.0[1].revoke(0, leased.key);
    lent.whole().store(&[2; LEN]);
    get(&mut two, leased);
    let (deadline, mut events) = (clock::now() + PATIENCE, Vec::with_capacity(64));
    let is_refused = |event: &Event| {
        let Event::PeerLost { peer: 1, cause } = event else { return false };
        let Some(PairError::QueuePair(failure)) = cause.fabric_error() else { return false };
        assert_eq!((failure.status, failure.operation), (WorkStatus::RemoteAccess, Operation::Read));
        true
    };
    while !events.iter().any(is_refused) {
        assert!(clock::now() < deadline, "the NIC refuses a key that was taken back: {events:?}");
        two.0[0].poll(clock::now(), &mut events);
    }
    assert_eq!(own.to_vec(), [1; 1024], "and nothing was read");
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn a_long_put_goes_in_parts_over_all_queue_pairs_of_two_nics_and_gives_one_signal() {
    const LEN: usize = 100_003;
    let mut two = Two::connected(true);
    let [source, target] = [0, 1].map(|rank| two.0[rank].register(HostMemory::new(LEN)).expect("registers"));
    let (began, mut puts, mut in_parts) = (clock::now(), 0, 0);
    // Whole, until the peer has heard of the region.
    while in_parts < 20 {
        assert!(clock::now() < began + PATIENCE, "{in_parts} of {puts} puts went in parts");
        puts += 1;
        let bytes: Vec<u8> = (0..LEN).map(|index| (index as u64 * puts) as u8).collect();
        source.whole().store(&bytes);
        let payload = Inline::new(&puts.to_le_bytes()).expect("fits");
        let signal = Some(Signal { signal_slot: 3, payload });
        let put = Transfer::Put { src: Source::Slice(source.whole()), dst: target.remote(), signal };
        let before = two.0[0].counts();
        let id = TransferId(puts);
        assert_eq!(two.0[0].submit(1, put, id), Ok(Submitted::UnderWay));
        let after = two.0[0].counts();
        match after.requests - before.requests {
            2 => {}
            5 => in_parts += 1,
            other => panic!("{other} requests for a put: {after}"),
        }
        let signal_slots = two.0[1].signal_slots(0);
        let mut is_done = false;
        two.until(|event, _| {
            is_done |= event == Some(Event::Done { id, result: Ok(0) });
            is_done && signal_slots.count(3) == puts
        });
        assert_eq!(signal_slots.payload(3)[..8], puts.to_le_bytes());
        assert!(target.whole().to_vec() == bytes, "put {puts}");
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn memory_that_is_registered_again_is_registered_once_and_until_its_last_handle() {
    const LEN: usize = 4096;
    let mut two = Two::connected(false);
    let source = two.0[0].register(HostMemory::new(LEN)).expect("registers");
    source.whole().store(&[7; LEN]);
    let before = two.0[1].counts();
    let registered = |two: &Two| {
        let counts = two.0[1].counts();
        (counts.registrations - before.registrations, counts.deregistrations - before.deregistrations)
    };
    let memory = HostMemory::new(LEN);
    let handles: Vec<_> =
        (0..3).map(|_| two.0[1].register(Arc::clone(&memory) as _).expect("registers")).collect();
    assert_eq!(registered(&two), (1, 0), "one registration for three handles");
    let key = handles[0].key();
    assert!(handles.iter().all(|handle| handle.key() == key));
    let other = two.0[1].register(HostMemory::new(LEN)).expect("registers");
    assert_ne!(other.key(), key, "other memory is another region");
    assert_eq!(registered(&two), (2, 0));

    let remote = handles[0].remote();
    let mut handles = handles.into_iter();
    for count in [2, 1] {
        drop(handles.next());
        assert_eq!(handles.len(), count);
        let put = Transfer::Put { src: Source::Slice(source.whole()), dst: remote, signal: None };
        let id = TransferId(count as u64);
        assert_eq!(two.0[0].submit(1, put, id), Ok(Submitted::UnderWay));
        two.until(|event, _| event == Some(Event::Done { id, result: Ok(0) }));
        assert_eq!(registered(&two), (2, 0), "{count} handles are left");
    }
    drop(handles);
    let watched = Arc::downgrade(&memory);
    drop(memory);
    two.until(|_, devices| devices[1].counts().deregistrations - before.deregistrations == 1);
    assert_eq!(watched.strong_count(), 0, "with the last handle the memory goes as well");

    // And whoever registers it then gets a region that is new.
    let again = two.0[1].register(HostMemory::new(LEN)).expect("registers");
    assert_ne!(again.key(), key);
    assert_eq!(registered(&two), (3, 1));
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]
fn devices_that_come_and_go_leave_no_region_with_the_nic() {
    let mut two = Two::connected(true);
    let region = two.0[0].register(HostMemory::new(100)).expect("registers");
    drop(region);
    two.until(|_, devices| devices[0].counts().deregistrations >= 2);
    two.0[0].sever(1);
    let counts = two.0[0].counts();
    assert_eq!(counts.registrations, counts.deregistrations, "{counts}");
}
