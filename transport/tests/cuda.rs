//! GPU memory, with a fake driver everywhere and with a real one where there is a GPU:
//! `cargo test -p pleach-transport --test cuda -- --ignored gpu::`.
#![allow(unsafe_code)]

#[path = "cuda/direct.rs"]
mod direct;
#[path = "fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "cuda/pair.rs"]
mod pair;
#[path = "../../tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "cuda/shared.rs"]
mod shared_by_ranks;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use pleach_transport::cuda::{
    CudaDmaBuf, CudaError, CudaMemory, FlushMethod, FlushScope, ForeignMemory, Gpu, GpuId, ImportedMemory,
    PinnedMemory, SharedAllocation, Stream, gpus,
};
use pleach_transport::{HostMemory, Memory, Share, SharedMemory, Space};

/// How long a test waits for a GPU. Generous: machines are loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// Each of these against the fake driver, and, where a test is asked for by `--ignored gpu::`,
/// against the real one.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod fake {
            use crate::*;

            $(#[test]
            fn $name() {
                fake_cuda::load();
                super::$name(&Gpu::open(0).expect("the fake driver has a GPU"));
            })*
        }
        mod gpu {
            use crate::*;

            $(#[test]
            #[ignore = "needs an NVIDIA GPU: where there is one, run it with --ignored gpu::"]
            fn $name() {
                super::$name(&Gpu::open(0).expect("a GPU"));
            })*
        }
    };
}

use shared_by_ranks::{
    a_gpu_reads_lent_host_memory_and_writes_nothing_there,
    a_host_only_device_refuses_gpu_memory_and_says_what_to_do, a_pair_is_drained_when_gpus_have_copied,
    a_put_between_gpus_is_there_when_its_signal_is, a_region_on_a_gpu_that_is_gone_is_refused,
    a_severed_peer_changes_no_byte_on_the_gpu, host_memory_and_inline_bytes_are_put_on_a_gpu_and_got_back,
    mapped_memory_of_a_gpu_is_the_peers,
};

on_both! {
    memory_is_zeroed_and_keeps_what_is_stored_at_any_offset
    an_allocation_that_is_too_large_is_told_with_its_size
    work_waits_for_marks_of_other_streams
    an_imported_allocation_is_the_same_memory
    a_detached_memory_keeps_its_bytes_and_its_address_and_reaches_nobody
    memory_is_detached_behind_the_work_of_all_streams
    a_detached_import_keeps_its_bytes_and_its_address_and_reaches_nobody
    a_file_or_a_length_that_is_not_the_allocations_is_refused
    descriptors_of_memory_are_closed_in_programs_that_are_started
    memory_of_others_is_told_from_host_memory_and_from_freed_memory
    pinned_host_memory_is_reached_by_copies_and_stays_what_it_was
    the_current_context_of_a_thread_stays_what_it_was
    a_gpu_that_is_not_there_is_told_with_how_many_there_are
    a_gpu_of_another_process_that_is_not_seen_here_is_named
    a_put_between_gpus_is_there_when_its_signal_is
    a_gpu_reads_lent_host_memory_and_writes_nothing_there
    host_memory_and_inline_bytes_are_put_on_a_gpu_and_got_back
    mapped_memory_of_a_gpu_is_the_peers
    a_severed_peer_changes_no_byte_on_the_gpu
    a_pair_is_drained_when_gpus_have_copied
    a_region_on_a_gpu_that_is_gone_is_refused
    a_host_only_device_refuses_gpu_memory_and_says_what_to_do
}

fn memory(gpu: &Arc<Gpu>, bytes: &[u8]) -> Arc<CudaMemory> {
    let memory = CudaMemory::new(gpu, bytes.len()).expect("room");
    memory.store(0, bytes, PATIENCE).expect("stored");
    memory
}

fn bytes_of(memory: &CudaMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.load(0, &mut bytes, PATIENCE).expect("loaded");
    bytes
}

/// The allocation's descriptor and length.
fn shared(memory: &CudaMemory) -> (std::os::fd::BorrowedFd<'_>, usize) {
    assert!(matches!(memory.share(), Share::Private), "only the driver maps it");
    let SharedAllocation { file, bytes, gpu } = memory.shared().expect("the GPU shares it");
    assert_eq!(gpu, memory.gpu().id());
    (file, bytes as usize)
}

fn memory_is_zeroed_and_keeps_what_is_stored_at_any_offset(gpu: &Arc<Gpu>) {
    let memory = CudaMemory::new(gpu, 100_001).expect("room");
    assert_eq!(memory.space(), Space::Gpu { ordinal: 0 });
    assert_eq!(memory.len(), 100_001);
    assert!(bytes_of(&memory).iter().all(|byte| *byte == 0));
    memory.store(99_998, &[1, 2, 3], PATIENCE).expect("stored");
    memory.store(1, &[9], PATIENCE).expect("stored");
    let bytes = bytes_of(&memory);
    assert_eq!((&bytes[..3], &bytes[99_997..]), (&[0, 9, 0][..], &[0, 1, 2, 3][..]));
    assert_eq!(CudaMemory::new(gpu, 0).expect("room").len(), 0);
}

fn an_allocation_that_is_too_large_is_told_with_its_size(gpu: &Arc<Gpu>) {
    let wanted = gpu.bytes() + (1 << 30);
    match CudaMemory::new(gpu, wanted) {
        Err(CudaError::OutOfMemory { ordinal: 0, bytes }) => assert!(bytes >= wanted),
        other => panic!("{other:?}"),
    }
    assert!(CudaMemory::new(gpu, usize::MAX).is_err());
    // Nothing of it is left behind.
    assert_eq!(bytes_of(&memory(gpu, b"room")), b"room");
}

fn work_waits_for_marks_of_other_streams(gpu: &Arc<Gpu>) {
    let (first, second) = (memory(gpu, &[1; 5000]), memory(gpu, &[2; 5000]));
    let (early, late) = (Stream::new(gpu).expect("a stream"), Stream::new(gpu).expect("a stream"));
    // SAFETY: both memories live until the last mark is reached, and only this test touches them.
    unsafe { early.fill(first.base().as_ptr(), 7, 5000).expect("put in") };
    let filled = early.record_event().expect("a mark");
    late.wait_event(&filled).expect("put in");
    // SAFETY: as above.
    unsafe { late.copy(first.base().as_ptr(), second.base().as_ptr(), 5000).expect("put in") };
    let copied = late.record_event().expect("a mark");
    copied.wait(PATIENCE).expect("done");
    assert!(filled.is_reached().expect("no error"), "what a reached mark waited for is done");
    assert!(bytes_of(&second).iter().all(|byte| *byte == 7));
}

#[test]
fn a_mark_that_is_not_reached_in_time_is_told_with_the_time() {
    fake_cuda::load();
    let gpu = Gpu::open(0).expect("the fake driver has a GPU");
    let memory = CudaMemory::new(&gpu, 64).expect("room");
    let stream = Stream::new(&gpu).expect("a stream");
    // SAFETY: the memory lives until the stream has come past this, and only this test touches it.
    unsafe { stream.fill(memory.base().as_ptr(), 1, 64).expect("put in") };
    let mark = stream.record_event().expect("a mark");
    // The fake driver works only when it is asked several times.
    assert!(matches!(mark.wait(Duration::ZERO), Err(CudaError::Late { ordinal: 0, .. })));
    mark.wait(PATIENCE).expect("done");
}

fn an_imported_allocation_is_the_same_memory(gpu: &Arc<Gpu>) {
    let owned = memory(gpu, &[5; 70_000]);
    let (file, bytes) = shared(&owned);
    let imported = ImportedMemory::new(gpu, gpu.id(), file, bytes).expect("imported");
    assert_ne!(imported.base(), owned.base());
    let seen = memory(gpu, &[0; 70_000]);
    owned.store(69_999, &[6], PATIENCE).expect("stored");
    copy(gpu, imported.base().as_ptr(), seen.base().as_ptr(), 70_000);
    let seen = bytes_of(&seen);
    assert_eq!((seen[0], seen[69_999]), (5, 6));
}

fn copy(gpu: &Arc<Gpu>, from: *mut u8, into: *mut u8, bytes: usize) {
    let stream = Stream::new(gpu).expect("a stream");
    // SAFETY: the callers hold both memories, and nobody else touches them.
    unsafe { stream.copy(from, into, bytes).expect("put in") };
    stream.record_event().expect("a mark").wait(PATIENCE).expect("done");
}

fn a_detached_memory_keeps_its_bytes_and_its_address_and_reaches_nobody(gpu: &Arc<Gpu>) {
    let owned = memory(gpu, &[5; 1000]);
    let (file, bytes) = shared(&owned);
    let imported = ImportedMemory::new(gpu, gpu.id(), file, bytes).expect("imported");
    let before = owned.base();
    owned.detach().expect("room for a copy");
    owned.detach().expect("twice is once");
    assert_eq!(owned.base(), before);
    assert!(owned.shared().is_none(), "who joins later cannot import it either");
    // The peer goes on writing.
    copy(gpu, memory(gpu, &[8; 1000]).base().as_ptr(), imported.base().as_ptr(), 1000);
    assert!(bytes_of(&owned).iter().all(|byte| *byte == 5));
    owned.store(0, &[1], PATIENCE).expect("it works on");
    assert_eq!(bytes_of(&owned)[..2], [1, 5]);
}

fn memory_is_detached_behind_the_work_of_all_streams(gpu: &Arc<Gpu>) {
    // A real GPU is busy for milliseconds, the fake one until it was asked often enough.
    let bytes = if gpu.name().starts_with("Fake") { 1000 } else { 256 << 20 };
    let owned = CudaMemory::new(gpu, bytes).expect("room");
    let stream = Stream::new(gpu).expect("a stream");
    for value in 1..=100 {
        // SAFETY: the memory is so long and outlives the stream's work, which the mark is behind.
        unsafe { stream.fill(owned.base().as_ptr(), value, bytes).expect("put in") };
    }
    let mark = stream.record_event().expect("a mark");
    owned.detach().expect("room for a copy");
    mark.wait(PATIENCE).expect("no fill has lost its memory");
    let mut last = [0; 1];
    owned.load(bytes - 1, &mut last, PATIENCE).expect("loaded");
    assert_eq!(last, [100]);
}

fn a_detached_import_keeps_its_bytes_and_its_address_and_reaches_nobody(gpu: &Arc<Gpu>) {
    let owned = memory(gpu, &[5; 1000]);
    let (file, bytes) = shared(&owned);
    let imported = ImportedMemory::new(gpu, gpu.id(), file, bytes).expect("imported");
    let before = imported.base();
    imported.detach().expect("room for a copy");
    assert_eq!(imported.base(), before);
    owned.store(0, &[9; 1000], PATIENCE).expect("stored");
    let seen = memory(gpu, &[0; 1000]);
    copy(gpu, imported.base().as_ptr(), seen.base().as_ptr(), 1000);
    assert!(bytes_of(&seen).iter().all(|byte| *byte == 5));
}

fn a_file_or_a_length_that_is_not_the_allocations_is_refused(gpu: &Arc<Gpu>) {
    let owned = memory(gpu, &[5; 1000]);
    let (file, bytes) = shared(&owned);
    let other = File::open("/dev/null").expect("a file");
    let refused = ImportedMemory::new(gpu, gpu.id(), other.as_fd(), bytes);
    assert!(matches!(refused, Err(CudaError::Call { .. })), "{refused:?}");
    let refused = ImportedMemory::new(gpu, gpu.id(), file, bytes * 64);
    assert!(matches!(refused, Err(CudaError::Call { .. })), "{refused:?}");
    ImportedMemory::new(gpu, gpu.id(), file, bytes).expect("nothing was harmed");
}

fn memory_of_others_is_told_from_host_memory_and_from_freed_memory(gpu: &Arc<Gpu>) {
    let _context = Current::of(gpu);
    let allocate = || {
        let mut address = 0;
        // SAFETY: the driver is there and a context current; it writes one address.
        assert_eq!(unsafe { sys::cuMemAlloc_v2(&mut address, 4096) }, sys::CUresult::CUDA_SUCCESS);
        address
    };
    // SAFETY: allocated above by the same call, freed once.
    let free = |address| unsafe { sys::cuMemFree_v2(address) };
    let address = allocate();
    // SAFETY: that many bytes were allocated; no code accesses them.
    let foreign = unsafe { ForeignMemory::new(gpu, address as *mut u8, 4096) }.expect("memory of the GPU");
    foreign.expect_alive().expect("not freed yet");
    free(address);
    let freed = CudaError::Freed { address };
    assert_eq!(foreign.expect_alive(), Err(freed.clone()));
    // Another allocation, perhaps at the same address, is not the one that it was.
    let again: Vec<u64> = (0..8).map(|_| allocate()).collect();
    assert_eq!(foreign.expect_alive(), Err(freed));
    again.into_iter().for_each(|address| assert_eq!(free(address), sys::CUresult::CUDA_SUCCESS));
    // As little is memory that is mapped where other memory was.
    let mapped = CudaMemory::new(gpu, 4096).expect("room");
    let address = mapped.base().as_ptr();
    // SAFETY: that many bytes were allocated; no code accesses them.
    let foreign = unsafe { ForeignMemory::new(gpu, address, 4096) }.expect("memory of the GPU");
    drop(mapped);
    let _again: Vec<_> = (0..8).map(|_| CudaMemory::new(gpu, 4096).expect("room")).collect();
    assert_eq!(foreign.expect_alive(), Err(CudaError::Freed { address: address as u64 }));

    let host = HostMemory::new(4096);
    let pinned = PinnedMemory::new(gpu, SharedMemory::new(4096).expect("memory")).expect("pinned");
    for base in [host.base().as_ptr(), pinned.base().as_ptr(), std::ptr::null_mut()] {
        // SAFETY: host memory, alive; it is refused.
        let refused = unsafe { ForeignMemory::new(gpu, base, 4096) };
        assert!(matches!(refused, Err(CudaError::NotDeviceMemory { ordinal: 0, .. })), "{refused:?}");
    }
}

fn pinned_host_memory_is_reached_by_copies_and_stays_what_it_was(gpu: &Arc<Gpu>) {
    let host = SharedMemory::new(10_000).expect("memory");
    let pinned = PinnedMemory::new(gpu, host.clone()).expect("pinned");
    assert_eq!((pinned.base(), pinned.space()), (host.base(), Space::Host));
    assert!(matches!(pinned.share(), Share::File { .. }), "it is registered as what it is");
    copy(gpu, memory(gpu, &[3; 10_000]).base().as_ptr(), pinned.base().as_ptr(), 10_000);
    // SAFETY: the copy has filled that many bytes, and no code writes them now.
    let bytes = unsafe { std::slice::from_raw_parts(host.base().as_ptr(), 10_000) };
    assert!(bytes.iter().all(|byte| *byte == 3));
    let refused = PinnedMemory::new(gpu, memory(gpu, &[0; 10]));
    assert!(matches!(refused, Err(CudaError::Unable { .. })), "GPU memory is not the host's: {refused:?}");
}

/// The GPU's context is current on this thread.
struct Current;

impl Current {
    fn of(gpu: &Arc<Gpu>) -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is there, as the GPU is; the context stays retained until the process
        // ends.
        unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, gpu.ordinal() as i32);
            sys::cuCtxSetCurrent(context);
        }
        Self
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: no context is a possible one.
        unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    }
}

fn the_current_context_of_a_thread_stays_what_it_was(gpu: &Arc<Gpu>) {
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is there; it writes one pointer.
        unsafe { sys::cuCtxGetCurrent(&mut context) };
        context
    };
    assert!(current().is_null(), "this thread has none yet");
    let memory = memory(gpu, b"some");
    assert!(current().is_null());
    let _context = Current::of(gpu);
    let before = current();
    memory.store(0, b"more", PATIENCE).expect("stored");
    assert_eq!(current(), before);
}

fn descriptors_of_memory_are_closed_in_programs_that_are_started(gpu: &Arc<Gpu>) {
    let memory = memory(gpu, &[1; 100]);
    let is_closed = |file: std::os::fd::BorrowedFd<'_>| {
        let flags = rustix::io::fcntl_getfd(file).expect("it is open");
        flags.contains(rustix::io::FdFlags::CLOEXEC)
    };
    assert!(is_closed(shared(&memory).0), "by which other processes map it");
    match memory.as_dma_buf() {
        Ok(named) => assert!(is_closed(named.file()), "by which NICs reach it"),
        Err(error) => println!("not looked at: {error}"),
    }
}

fn a_gpu_that_is_not_there_is_told_with_how_many_there_are(_: &Arc<Gpu>) {
    let there = gpus().expect("a driver");
    let error = Gpu::open(there).expect_err("one too many");
    assert_eq!(error, CudaError::NoGpu { ordinal: there, gpus: there });
    assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
}

fn a_gpu_of_another_process_that_is_not_seen_here_is_named(gpu: &Arc<Gpu>) {
    let owned = memory(gpu, &[5; 1000]);
    let (file, bytes) = shared(&owned);
    let unseen = GpuId([0xab; 16]);
    let error = ImportedMemory::new(gpu, unseen, file, bytes).expect_err("there is none");
    assert_eq!(error, CudaError::UnseenGpu { gpu: unseen });
    assert!(error.to_string().contains("GPU-abababab-abab-abab-abab-abababababab"), "{error}");
}

/// The tests of drivers that are otherwise: each is a process of its own, as a process looks for
/// its driver once.
mod otherwise {
    use super::*;

    /// Runs a test of `child` with the fake driver in this environment.
    pub(crate) fn run(test: &str, environment: &[(&str, &str)]) {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "--nocapture", &format!("child::{test}")])
            .env("LD_LIBRARY_PATH", fake_cuda::folder())
            .envs(environment.iter().copied())
            .output()
            .expect("it starts");
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    fn a_driver_without_gpus_is_no_gpu() {
        run("finds_no_gpu", &[("FAKE_CUDA_GPUS", "0")]);
        run("finds_no_gpu", &[("FAKE_CUDA_INIT", "100")]);
    }

    #[test]
    fn a_driver_that_is_too_old_says_which_is_needed() {
        run("finds_an_old_driver", &[("FAKE_CUDA_VERSION", "11080")]);
    }

    #[test]
    fn a_driver_that_does_not_start_says_so() {
        run("finds_a_broken_driver", &[("FAKE_CUDA_INIT", "999")]);
    }

    #[test]
    fn memory_has_a_dma_buf_where_the_driver_has_them() {
        run("has_a_dma_buf", &[]);
        run("has_no_dma_buf", &[("FAKE_CUDA_DMA_BUF", "0")]);
    }

    #[test]
    fn writes_of_others_are_flushed_as_the_gpu_needs_it() {
        run("flushes_by_the_host", &[]);
        run("needs_no_flush", &[("FAKE_CUDA_ORDERING", "100")]);
        run("needs_no_flush", &[("FAKE_CUDA_ORDERING", "200")]);
        run("reads_back", &[("FAKE_CUDA_FLUSH", "0")]);
    }

    #[test]
    fn memory_that_cannot_be_shared_is_private() {
        run("shares_nothing", &[("FAKE_CUDA_SHARES", "0")]);
    }

    #[test]
    fn memory_of_a_copy_that_cannot_be_marked_is_kept() {
        run("marks_no_copy", &[("FAKE_CUDA_UNMARKED_BYTES", "777")]);
    }

    #[test]
    fn a_drain_waits_for_a_copy_that_cannot_be_marked() {
        run("drains_a_copy_without_mark", &[("FAKE_CUDA_UNMARKED_BYTES", "777")]);
    }
}

/// The tests of NICs, likewise: see [`direct`].
mod verbs {
    use super::otherwise::run;

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn what_a_nic_writes_to_a_gpu_is_there_when_it_is_told() {
        // Whether a dma-buf can be had and is refused, or cannot be had.
        run("nics_write", &[("FAKE_CUDA_PEERMEM", "2")]);
        run("nics_write", &[("FAKE_CUDA_PEERMEM", "2"), ("FAKE_CUDA_DMA_BUF", "0")]);
        // A GPU that orders writes of NICs itself.
        run("nics_write", &[("FAKE_CUDA_PEERMEM", "1"), ("FAKE_CUDA_ORDERING", "100")]);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_nic_without_a_way_to_a_gpu_says_which_there_are() {
        run("nics_have_no_way", &[]);
        run("nics_have_no_way", &[("FAKE_CUDA_DMA_BUF", "0")]);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_gpu_that_cannot_be_flushed_is_refused_by_nics() {
        run("nics_refuse", &[("FAKE_CUDA_PEERMEM", "1"), ("FAKE_CUDA_FLUSH", "0")]);
    }
}

mod child {
    use super::*;

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_write() {
        direct::what_a_nic_writes_is_there_when_it_is_told(&gpu());
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_have_no_way() {
        direct::a_nic_without_a_way_to_the_memory_says_which_there_are(&gpu());
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_refuse() {
        direct::a_gpu_that_cannot_be_flushed_is_refused(&gpu());
    }

    fn gpu() -> Arc<Gpu> {
        Gpu::open(0).expect("the fake driver has a GPU")
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn finds_no_gpu() {
        assert_eq!(gpus(), Ok(0));
        let error = Gpu::open(0).expect_err("there is none");
        assert_eq!(error, CudaError::NoGpu { ordinal: 0, gpus: 0 });
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn finds_an_old_driver() {
        let error = Gpu::open(0).expect_err("too old");
        assert_eq!(error, CudaError::OldDriver { version: 11_080 });
        assert!(error.to_string().contains("one for CUDA 11.8; install one for CUDA 12.0"), "{error}");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn finds_a_broken_driver() {
        match Gpu::open(0).expect_err("broken") {
            CudaError::Driver { call: "cuInit", code } => assert_eq!(code.code, 999),
            other => panic!("{other}"),
        }
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn has_a_dma_buf() {
        let memory = memory(&gpu(), &[1; 5000]);
        let named = CudaDmaBuf::new(&memory).expect("a dma-buf");
        assert_eq!((named.offset(), named.len()), (0, 5000));
        let kept = memory.dma_buf().expect("what a NIC is given").file.as_raw_fd();
        assert_eq!(memory.dma_buf().map(|again| again.file.as_raw_fd()), Some(kept), "it is made once");
        memory.detach().expect("room for a copy");
        assert!(memory.dma_buf().is_none(), "it names what is not behind the addresses any more");
        let status = rustix::fs::fstat(named.file()).expect("an open file");
        assert!(status.st_size >= 5000);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn has_no_dma_buf() {
        let refused = CudaDmaBuf::new(&memory(&gpu(), &[1; 5000]));
        assert!(
            matches!(&refused, Err(CudaError::Unable { ordinal: 0, ability }) if ability.contains("nvidia-peermem"))
        );
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn marks_no_copy() {
        shared_by_ranks::memory_of_a_copy_that_cannot_be_marked_is_kept(&gpu(), 777);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn drains_a_copy_without_mark() {
        shared_by_ranks::a_drain_waits_for_a_copy_that_cannot_be_marked(&gpu(), 777);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn flushes_by_the_host() {
        for readers in [FlushScope::Owner, FlushScope::AllDevices] {
            assert_eq!(gpu().flush(readers), FlushMethod::ByHost);
            gpu().flush_writes(readers).expect("flushed");
        }
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn needs_no_flush() {
        assert_eq!(gpu().flush(FlushScope::Owner), FlushMethod::NotNeeded);
        gpu().flush_writes(FlushScope::Owner).expect("nothing to do");
        let is_for_all = std::env::var("FAKE_CUDA_ORDERING").as_deref() == Ok("200");
        let expected = if is_for_all { FlushMethod::NotNeeded } else { FlushMethod::ByHost };
        assert_eq!(gpu().flush(FlushScope::AllDevices), expected);
        gpu().flush_writes(FlushScope::AllDevices).expect("flushed, or nothing to do");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn reads_back() {
        for readers in [FlushScope::Owner, FlushScope::AllDevices] {
            assert_eq!(gpu().flush(readers), FlushMethod::ByReadBack);
            assert!(matches!(gpu().flush_writes(readers), Err(CudaError::Unable { .. })));
        }
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn shares_nothing() {
        assert!(memory(&gpu(), &[1; 10]).shared().is_none());
    }
}
