//! NICs that read and write a GPU's memory: RDMA devices of this machine, and the fake driver,
//! whose "GPU" memory the kernel gives to NICs where the test says so, as if nvidia-peermem were
//! loaded. What NICs write is in that memory only after a flush. Soft-RoCE takes no dma-bufs, so
//! that way is only seen to be tried first.

use std::sync::Arc;

use pleach_transport::cuda::{CudaMemory, Gpu};
use pleach_transport::verbs::{MemoryError, VerbsDevice, VerbsOptions};
use pleach_transport::{
    Device, Event, Inline, Memory, RegisterError, SharedMemory, Source, Transfer, TransferError, TransferId,
};

use crate::pair::{Pair, config, signal};
use crate::{bytes_of, memory};

fn device(rank: u32) -> VerbsDevice {
    VerbsDevice::new(
        config(rank),
        &VerbsOptions { device: Some(crate::rdma_devices::rdma_device(rank)), ..VerbsOptions::default() },
    )
    .expect("a device that is up")
}

pub(crate) fn what_a_nic_writes_is_there_when_it_is_told(gpu: &Arc<Gpu>) {
    const LEN: usize = 150_000;
    let mut pair = Pair::connected([device(0), device(1)]);
    let (from, into) = (memory(gpu, &[0; LEN]), memory(gpu, &[0; LEN]));
    let (source, target) = (pair.region(0, &from), pair.region(1, &into));
    let signal_slots = pair.devices[1].signal_slots(0);
    for round in 1..=4_u8 {
        from.store(0, &vec![round; LEN], crate::PATIENCE).expect("stored");
        let src = Source::Slice(source.whole());
        let put = Transfer::Put { src, dst: target.remote(), signal: signal(2) };
        assert_eq!(pair.carry_out(put, round.into()), Ok(0));
        pair.until("a signal", |_| signal_slots.count(2) == u64::from(round));
        assert!(bytes_of(&into).iter().all(|byte| *byte == round), "the bytes are there when the signal is");
    }
    // Of a put without signal only a drain tells.
    for (drains, byte) in [(1, 7_u8), (2, 4)] {
        from.store(0, &[byte; LEN], crate::PATIENCE).expect("stored");
        let src = Source::Slice(source.whole());
        let put = Transfer::Put { src, dst: target.remote(), signal: None };
        pair.devices[0].submit(1, put, TransferId(20)).expect("room");
        pair.devices[0].drain(1).expect("connected");
        pair.devices[1].drain(0).expect("connected");
        pair.until("a drained pair", |pair| {
            pair.log.iter().filter(|event| **event == Event::Drained { peer: 0 }).count() == drains
        });
        assert!(bytes_of(&into).iter().all(|there| *there == byte), "the bytes are there when drained");
    }
    // Few bytes go another way: inline, and from a GPU never so.
    let inline = Source::Inline(Inline::new(b"few").expect("few bytes"));
    let dst = target.remote().slice(5..8).expect("inside");
    let put = Transfer::Put { src: inline, dst, signal: signal(2) };
    pair.devices[0].submit(1, put, TransferId(9)).expect("room");
    let src = Source::Slice(source.whole().slice(0..2).expect("inside"));
    let dst = target.remote().slice(8..10).expect("inside");
    from.store(0, b"go", crate::PATIENCE).expect("stored");
    assert_eq!(pair.carry_out(Transfer::Put { src, dst, signal: signal(2) }, 10), Ok(0));
    pair.until("two signals", |_| signal_slots.count(2) == 6);
    assert_eq!(bytes_of(&into)[4..11], *b"\x04fewgo\x04");
    // A get's bytes are there when its end is told.
    assert_eq!(pair.carry_out(Transfer::Get { src: target.remote(), dst: source.whole() }, 11), Ok(0));
    assert_eq!(bytes_of(&from)[4..11], *b"\x04fewgo\x04");
    // Host memory of one end, a GPU's of the other.
    let host = pair.devices[0].register(SharedMemory::new(LEN).expect("memory")).expect("registered");
    assert_eq!(pair.carry_out(Transfer::Get { src: target.remote(), dst: host.whole() }, 12), Ok(0));
    assert_eq!(host.whole().to_vec()[4..11], *b"\x04fewgo\x04");
    // Memory that is not registered any more is out of reach.
    let remote = target.remote();
    drop(target);
    let src = Source::Slice(source.whole());
    let mut rounds = 0;
    pair.until("polls", |_| {
        rounds += 1;
        rounds > 2
    });
    let refused = pair.carry_out(Transfer::Put { src, dst: remote, signal: None }, 13);
    assert!(
        matches!(refused, Err(TransferError::Refused { .. } | TransferError::Lost { .. })),
        "{refused:?}"
    );
    assert_eq!(bytes_of(&into)[4..11], *b"\x04fewgo\x04");
}

/// What the fabric says of memory that it does not take.
fn said(error: &RegisterError) -> &MemoryError {
    let RegisterError::Fabric(said) = error else { panic!("{error}") };
    said.downcast_ref().unwrap_or_else(|| panic!("{error}"))
}

pub(crate) fn a_nic_without_a_way_to_the_memory_says_which_there_are(gpu: &Arc<Gpu>) {
    let error = device(0).register(memory(gpu, &[0; 10])).expect_err("the kernel gives it to no NIC");
    match said(&error) {
        MemoryError::NoGpuDirect { ordinal: 0, dma_buf, address } => {
            assert!(!dma_buf.is_empty(), "{error}");
            assert!(address.raw_os_error().is_some(), "what the kernel said: {address:?}");
        }
        other => panic!("{other}"),
    }
    let text = error.to_string();
    for part in ["dma-buf", "sudo modprobe nvidia-peermem", "open kernel modules", "host memory"] {
        assert!(text.contains(part), "{text}");
    }
}

pub(crate) fn a_gpu_that_cannot_be_flushed_is_refused(gpu: &Arc<Gpu>) {
    let memory: Arc<CudaMemory> = memory(gpu, &[0; 10]);
    assert!(memory.dma_buf().is_some());
    let error = device(0).register(memory).expect_err("nobody could tell when bytes are there");
    assert!(matches!(said(&error), MemoryError::NoFlush { ordinal: 0 }), "{error}");
}
