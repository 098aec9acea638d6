//! The device contract over `shm` where regions are on a GPU: what conformance says of host memory,
//! in short.

use std::sync::Arc;

use pleach_transport::cuda::Gpu;
use pleach_transport::hybrid::{HostId, HybridDevice};
use pleach_transport::shm::ShmDevice;
use pleach_transport::tcp::TcpDevice;
use pleach_transport::{
    AtomicOp, Device, Event, Flush, Inline, Memory, Nanos, RegisterError, RemoteSlice, SharedMemory, Source,
    Space, Submitted, Transfer, TransferError, TransferId, clock,
};

use crate::pair::{Pair, config, signal};
use crate::{PATIENCE, bytes_of, copy, memory};

fn neighbours() -> Pair<ShmDevice> {
    Pair::connected([0, 1].map(|rank| ShmDevice::new(config(rank)).expect("memory and sockets")))
}

pub(crate) fn a_put_between_gpus_is_there_when_its_signal_is(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let (from, into) = (memory(gpu, &[0; 300_000]), memory(gpu, &[0; 300_000]));
    let (source, target) = (pair.region(0, &from), pair.region(1, &into));
    let signal_slots = pair.devices[1].signal_slots(0);
    for round in 1..=4_u8 {
        from.store(0, &vec![round; 300_000], PATIENCE).expect("stored");
        let src = Source::Slice(source.whole());
        let put = Transfer::Put { src, dst: target.remote(), signal: signal(2) };
        let submitted = pair.devices[0].submit(1, put, TransferId(round.into())).expect("room");
        assert_eq!(submitted, Submitted::UnderWay, "a GPU's copy ends later");
        assert!(!pair.devices[0].flush(Flush::Transfers), "it takes another poll");
        pair.until("a signal", |_| signal_slots.count(2) == u64::from(round));
        assert!(bytes_of(&into).iter().all(|byte| *byte == round), "the bytes are there when the signal is");
    }
    let done = pair.log.iter().filter(|event| matches!(event, Event::Done { result: Ok(0), .. })).count();
    assert_eq!(done, 4);
}

pub(crate) fn a_gpu_reads_lent_host_memory_and_writes_nothing_there(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let lent = pair.devices[1].register(SharedMemory::lendable(1000).expect("memory")).expect("registered");
    lent.whole().store(&[6; 1000]);
    let own = memory(gpu, &[9; 1000]);
    let local = pair.region(0, &own);
    let put = Transfer::Put { src: Source::Slice(local.whole()), dst: lent.remote(), signal: None };
    let refused = Err(TransferError::Refused { peer: 1, key: lent.key() });
    assert_eq!(pair.carry_out(put, 1), refused);
    assert_eq!(lent.whole().to_vec(), [6; 1000]);
    assert_eq!(pair.carry_out(Transfer::Get { src: lent.remote(), dst: local.whole() }, 2), Ok(0));
    assert_eq!(bytes_of(&own), [6; 1000]);
}

pub(crate) fn host_memory_and_inline_bytes_are_put_on_a_gpu_and_got_back(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let into = memory(gpu, &[0; 1000]);
    let target = pair.region(1, &into);
    let host = pair.devices[0].register(SharedMemory::new(1000).expect("memory")).expect("registered");
    host.whole().store(&[7; 1000]);
    let whole = Source::Slice(host.whole());
    assert_eq!(pair.carry_out(Transfer::Put { src: whole, dst: target.remote(), signal: None }, 1), Ok(0));
    let inline = Source::Inline(Inline::new(b"few").expect("few bytes"));
    let dst = target.remote().slice(5..8).expect("inside");
    assert_eq!(pair.carry_out(Transfer::Put { src: inline, dst, signal: None }, 2), Ok(0));
    host.whole().store(&[0; 1000]);
    assert_eq!(pair.carry_out(Transfer::Get { src: target.remote(), dst: host.whole() }, 3), Ok(0));
    let seen = host.whole().to_vec();
    assert_eq!((&seen[..9], seen[999]), (&b"\x07\x07\x07\x07\x07few\x07"[..], 7));
    // From a GPU to the host's memory of a peer.
    let theirs = pair.devices[1].register(SharedMemory::new(1000).expect("memory")).expect("registered");
    let own = memory(gpu, &[9; 1000]);
    let src = Source::Slice(pair.region(0, &own).whole());
    assert_eq!(pair.carry_out(Transfer::Put { src, dst: theirs.remote(), signal: None }, 4), Ok(0));
    assert_eq!(theirs.whole().to_vec(), [9; 1000]);
    // No bytes are some too, and a GPU has no atomics of a host's.
    let nothing = target.remote().slice(3..3).expect("inside");
    let src = Source::Inline(Inline::new(b"").expect("no bytes"));
    assert_eq!(pair.carry_out(Transfer::Put { src, dst: nothing, signal: None }, 5), Ok(0));
    let word = target.remote().slice(0..8).expect("inside");
    let refused = pair.carry_out(Transfer::Atomic { word, op: AtomicOp::Add(1) }, 6);
    assert!(matches!(refused, Err(TransferError::Refused { peer: 1, .. })), "{refused:?}");
}

pub(crate) fn mapped_memory_of_a_gpu_is_the_peers(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let theirs = memory(gpu, &[4; 5000]);
    let region = pair.region(1, &theirs);
    let mut mapped = None;
    pair.until("a mapping", |pair| {
        mapped = pair.devices[0].map(1, &region.remote()).ok();
        mapped.is_some()
    });
    let mapped = mapped.expect("`until` has returned");
    assert_eq!(mapped.len(), 5000);
    let seen = memory(gpu, &[0; 5000]);
    copy(gpu, mapped.as_ptr(), seen.base().as_ptr(), 5000);
    assert_eq!(bytes_of(&seen), [4; 5000]);
    copy(gpu, memory(gpu, &[6; 10]).base().as_ptr(), mapped.as_ptr(), 10);
    assert_eq!(bytes_of(&theirs)[..11], [6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 4]);
    let beyond = RemoteSlice { len: 5001, ..region.remote() };
    assert!(pair.devices[0].map(1, &beyond).is_err(), "a range that is too long");
}

pub(crate) fn a_severed_peer_changes_no_byte_on_the_gpu(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let own = memory(gpu, &[1; 200_000]);
    let region = pair.region(1, &own);
    let mut mapped = None;
    pair.until("a mapping", |pair| {
        mapped = pair.devices[0].map(1, &region.remote()).ok();
        mapped.is_some()
    });
    let mapped = mapped.expect("`until` has returned");
    // A put is under way while its peer is severed.
    let source = memory(gpu, &[2; 200_000]);
    let src = Source::Slice(pair.region(0, &source).whole());
    let put = Transfer::Put { src, dst: region.remote(), signal: signal(0) };
    pair.devices[0].submit(1, put, TransferId(1)).expect("room");
    let mut events = Vec::with_capacity(16);
    let one = &mut pair.devices[1];
    one.sever(0);
    let deadline = clock::now() + PATIENCE;
    while !events.contains(&Event::Severed { peer: 0 }) {
        assert!(clock::now() < deadline, "fence does not come: {events:?}");
        one.poll(Nanos(clock::now().0), &mut events);
    }
    let silent = bytes_of(&own);
    copy(gpu, memory(gpu, &[3; 200_000]).base().as_ptr(), mapped.as_ptr(), 200_000);
    pair.until("an end", |pair| {
        pair.log.iter().any(|event| matches!(event, Event::Done { id: TransferId(1), .. }))
    });
    assert_eq!(bytes_of(&own), silent, "a peer that goes on writing changes nothing");
    own.store(0, &[8; 200_000], PATIENCE).expect("the memory works on");
    assert_eq!(bytes_of(&own), vec![8; 200_000]);
    let again = pair.devices[1].register(own);
    assert!(matches!(again, Err(RegisterError::Detached { .. })), "nobody could see it: {again:?}");
}

/// The driver cannot mark the end of a copy of `unmarked_bytes`.
pub(crate) fn memory_of_a_copy_that_cannot_be_marked_is_kept(gpu: &Arc<Gpu>, unmarked_bytes: usize) {
    const LEN: usize = 100_000;
    let mut pair = neighbours();
    let into = memory(gpu, &[0; LEN]);
    let target = pair.region(1, &into);
    let mut put = |byte: u8, bytes: usize| {
        // The transfer has the last handle of its memory.
        let source = pair.region(0, &memory(gpu, &[byte; LEN])).slice(0..bytes).expect("inside");
        let dst = target.remote().slice(0..bytes as u64).expect("inside");
        pair.carry_out(Transfer::Put { src: Source::Slice(source), dst, signal: None }, byte.into())
    };
    let failed = put(5, unmarked_bytes);
    assert!(matches!(failed, Err(TransferError::Fabric { peer: 1, .. })), "{failed:?}");
    assert_eq!(put(6, 10), Ok(0), "the GPU works on");
    let expected = [vec![6; 10], vec![5; unmarked_bytes - 10], vec![0; LEN - unmarked_bytes]].concat();
    assert_eq!(bytes_of(&into), expected, "it has made both copies");
}

pub(crate) fn a_region_on_a_gpu_that_is_gone_is_refused(gpu: &Arc<Gpu>) {
    let mut pair = neighbours();
    let theirs = memory(gpu, &[4; 64]);
    let region = pair.region(1, &theirs);
    let remote = region.remote();
    let inline = || Source::Inline(Inline::new(b"few").expect("few bytes"));
    let put = |dst| Transfer::Put { src: inline(), dst, signal: None };
    assert_eq!(pair.carry_out(put(remote.slice(0..3).expect("inside")), 1), Ok(0));
    let beyond = RemoteSlice { offset: 62, len: 3, ..remote };
    assert!(matches!(pair.carry_out(put(beyond), 2), Err(TransferError::Refused { .. })));
    drop(region);
    let gone = pair.carry_out(put(remote.slice(0..3).expect("inside")), 3);
    assert!(matches!(gone, Err(TransferError::Refused { .. })), "{gone:?}");
    assert_eq!(bytes_of(&theirs)[..4], *b"few\x04");
}

pub(crate) fn a_host_only_device_refuses_gpu_memory_and_says_what_to_do(gpu: &Arc<Gpu>) {
    fn expect_refusal(device: &mut dyn Device, name: &str, gpu: &Arc<Gpu>) {
        let error = device.register(memory(gpu, &[0; 10])).expect_err("no memory of the host's");
        match &error {
            RegisterError::Space { fabric, space } => {
                assert_eq!((*fabric, *space), (name, Space::Gpu { ordinal: 0 }));
            }
            other => panic!("{other}"),
        }
        assert!(error.to_string().contains("stage it through host memory"), "{error}");
    }
    expect_refusal(&mut TcpDevice::new(config(0)).expect("sockets"), "tcp", gpu);
    // Shared memory would take it, the sockets across would read it as the host's.
    let hosts = [0, 1].map(|number| HostId::new(number, None));
    let mut both = HybridDevice::new(config(0), hosts[0], &hosts).expect("memory and sockets");
    let name = both.info().fabric;
    expect_refusal(&mut both, name, gpu);
}

pub(crate) fn a_pair_is_drained_when_gpus_have_copied(gpu: &Arc<Gpu>) {
    const LEN: usize = 100_000;
    const PUTS: usize = 3;
    let mut pair = neighbours();
    let (from, into) = (memory(gpu, &[7; LEN]), memory(gpu, &[0; LEN]));
    let (source, target) = (pair.region(0, &from), pair.region(1, &into));
    let (theirs, got) = (memory(gpu, &[8; LEN]), memory(gpu, &[0; LEN]));
    let (origin, fetched) = (pair.region(1, &theirs), pair.region(0, &got));
    for number in 0..PUTS {
        let part = number * LEN / PUTS..(number + 1) * LEN / PUTS;
        let src = Source::Slice(source.slice(part.clone()).expect("inside"));
        let dst = target.slice(part).expect("inside").remote();
        let put = Transfer::Put { src, dst, signal: signal(1) };
        let submitted = pair.devices[0].submit(1, put, TransferId(number as u64)).expect("room");
        assert_eq!(submitted, Submitted::UnderWay, "a GPU's copy ends later");
    }
    let get = Transfer::Get { src: origin.remote(), dst: fetched.whole() };
    pair.devices[0].submit(1, get, TransferId(PUTS as u64)).expect("room");
    pair.devices[0].drain(1).expect("connected");
    pair.devices[1].drain(0).expect("connected");
    pair.until("a drained pair", |pair| pair.log.contains(&Event::Drained { peer: 0 }));
    // Rank 0 sees its copies end, and rank 1 is told later.
    let told = pair.log.iter().position(|event| *event == Event::Drained { peer: 0 });
    let ended = pair.log.iter().take(told.unwrap_or(0));
    let ended = ended.filter(|event| matches!(event, Event::Done { result: Ok(_), .. })).count();
    assert_eq!(ended, PUTS + 1, "{:?}", pair.log);
    assert_eq!(pair.devices[1].signal_slots(0).count(1), PUTS as u64, "all signals");
    assert_eq!(bytes_of(&into), [7; LEN]);
    assert_eq!(bytes_of(&got), [8; LEN]);
    pair.until("the other end", |pair| pair.log.contains(&Event::Drained { peer: 1 }));
}

/// The driver cannot mark the end of a copy of `unmarked_bytes`.
pub(crate) fn a_drain_waits_for_a_copy_that_cannot_be_marked(gpu: &Arc<Gpu>, unmarked_bytes: usize) {
    let mut pair = neighbours();
    let (from, into) = (memory(gpu, &[5; 1000]), memory(gpu, &[0; 1000]));
    let (source, target) = (pair.region(0, &from), pair.region(1, &into));
    let src = Source::Slice(source.slice(0..unmarked_bytes).expect("inside"));
    let dst = target.slice(0..unmarked_bytes).expect("inside").remote();
    let failed = pair.carry_out(Transfer::Put { src, dst, signal: None }, 1);
    assert!(matches!(failed, Err(TransferError::Fabric { peer: 1, .. })), "{failed:?}");
    pair.devices[0].drain(1).expect("connected");
    pair.devices[1].drain(0).expect("connected");
    assert!(pair.devices[0].arm().is_none(), "it asks the GPU until the copy has ended");
    pair.until("a drained pair", |pair| {
        pair.log.contains(&Event::Drained { peer: 0 }) && pair.log.contains(&Event::Drained { peer: 1 })
    });
    let expected = [vec![5; unmarked_bytes], vec![0; 1000 - unmarked_bytes]].concat();
    assert_eq!(bytes_of(&into), expected, "the copy that failed has landed");
    into.store(0, &[9; 1000], PATIENCE).expect("stored");
    pair.devices[0].drain(1).expect("connected");
    pair.devices[1].drain(0).expect("connected");
    pair.until("a second drain", |pair| {
        pair.log.iter().filter(|event| **event == Event::Drained { peer: 0 }).count() == 2
    });
    assert_eq!(bytes_of(&into), [9; 1000], "and does not do so once more");
}
