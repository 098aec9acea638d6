//! Ranks that are processes and share the GPU: descriptors of its memory go over sockets, and
//! kernels of the one work on memory of the other.
#![allow(unsafe_code)]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pleach_collectives::{
    CollectiveError, Element, F8E4M3, F8E5M2, GpuBuffer, Group, Operation, Options, bf16, f16,
};
use pleach_schedule::Algorithm;
use pleach_transport::cuda::{CudaError, CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::rendezvous::{Fabric, FabricChoice};
use pleach_transport::{Memory, clock};
use pleach_vocabulary::ReduceOp;

use crate::group::{GPU, filled};
use crate::ranks::Folder;
use crate::starts::{LEN, PIECES, keep_busy};

/// Within this time a call with a deadline of 5 s fails also where the GPU gives memory back late.
const FAILS_WITHIN: Duration = Duration::from_secs(15);

/// Names the fabric to the processes that a test starts.
const FABRIC: &str = "GPU_MEMORY_TEST_FABRIC";

/// Where ranks meet and what they move bytes by.
struct Job {
    ranks: Vec<Child>,
    _folder: Folder,
}

impl Job {
    /// Starts the ranks, each of which runs a test of `child`.
    fn start(test: &str, fabric: &str, world_size: u32, change: impl Fn(u32, &mut Command)) -> Self {
        let folder = Folder::new();
        let rank = |rank: u32| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command
                .args(["--ignored", "--exact", "--nocapture", &format!("between_processes::child::{test}")])
                .env(FABRIC, fabric)
                .env("PLEACH_RANK", rank.to_string())
                .env("PLEACH_WORLD_SIZE", world_size.to_string())
                .env("PLEACH_RENDEZVOUS", format!("file://{}", folder.0.display()))
                .env("PLEACH_JOIN_TIMEOUT", "180")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            change(rank, &mut command);
            command.spawn().expect("it starts")
        };
        Self { ranks: (0..world_size).map(rank).collect(), _folder: folder }
    }

    /// Waits for all but those of `stopping`, which stop and are killed by the drop. Calls have
    /// deadlines, so all others end.
    fn expect_well(mut self, stopping: &[usize]) {
        let (mut stopped, mut outputs) = (Vec::new(), Vec::new());
        for (rank, child) in std::mem::take(&mut self.ranks).into_iter().enumerate() {
            if stopping.contains(&rank) {
                stopped.push(child);
            } else {
                outputs.push((rank, child.wait_with_output()));
            }
        }
        self.ranks = stopped;
        for (rank, output) in outputs {
            let output = output.expect("it ends");
            let text = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            let is_well = output.status.success() && text.contains("1 passed");
            assert!(is_well, "rank {rank}: {text}");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

fn by_the_fake_driver(_rank: u32, command: &mut Command) {
    command.env("LD_LIBRARY_PATH", crate::fake_cuda::folder());
}

fn by_the_real_driver(_rank: u32, _command: &mut Command) {}

mod fake {
    use super::*;

    #[test]
    fn two_and_four_processes_that_share_a_gpu_have_every_type_right() {
        for ranks in [2, 4] {
            Job::start("every_type_is_right", "shm", ranks, by_the_fake_driver).expect_well(&[]);
        }
    }

    #[test]
    fn processes_whose_gpu_memory_is_staged_have_every_type_right() {
        Job::start("every_type_is_right", "tcp", 2, by_the_fake_driver).expect_well(&[]);
    }

    #[test]
    fn starting_a_call_waits_for_nothing() {
        // The fake driver does nothing unless it is asked, and then seldom.
        let slow = |rank: u32, command: &mut Command| {
            by_the_fake_driver(rank, command);
            command.env("FAKE_CUDA_LAG", "20");
        };
        Job::start("a_call_is_started_while_its_stream_is_busy", "tcp", 2, slow).expect_well(&[]);
    }

    #[test]
    fn memory_that_is_freed_while_a_group_has_it_is_told_and_the_group_goes_on() {
        Job::start("freed_memory_is_told", "shm", 2, by_the_fake_driver).expect_well(&[]);
    }

    #[test]
    fn a_process_that_dies_is_named_and_leaves_the_memory_of_the_others_to_them() {
        Job::start("a_peer_that_dies_is_named", "shm", 3, by_the_fake_driver).expect_well(&[1]);
    }

    #[test]
    fn a_buffer_that_the_gpu_has_no_room_to_copy_is_lost_and_the_call_fails_in_time() {
        let small = |rank: u32, command: &mut Command| {
            by_the_fake_driver(rank, command);
            command.env("FAKE_CUDA_BYTES", (1 << 30).to_string());
        };
        Job::start("a_peer_stops_where_memory_is_short", "shm", 2, small).expect_well(&[1]);
    }

    #[test]
    fn gpus_that_do_not_reach_each_other_are_staged() {
        // Rank 0 sees both GPUs, but the two have no peer access; rank 1 does not see the GPU of
        // rank 0.
        let apart = |rank: u32, command: &mut Command| {
            by_the_fake_driver(rank, command);
            let (first, gpus) = if rank == 0 { ("0", "2") } else { ("1", "1") };
            command.env("FAKE_CUDA_FIRST", first).env("FAKE_CUDA_GPUS", gpus).env("FAKE_CUDA_P2P", "0");
        };
        Job::start("what_is_out_of_reach_is_staged", "shm", 2, apart).expect_well(&[]);
    }

    #[test]
    fn long_calls_take_few_launches_and_copies() {
        Job::start("launches_are_few", "shm", 2, by_the_fake_driver).expect_well(&[]);
    }

    #[test]
    fn a_gpu_that_hangs_ends_the_process_with_the_reason() {
        let mut job = Job::start("a_gpu_hangs_in_a_call", "shm", 2, by_the_fake_driver);
        let hung = job.ranks.remove(0).wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&hung.stderr).into_owned();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&hung.status),
            Some(libc::SIGABRT),
            "{text}"
        );
        assert!(text.contains("the GPU has not ended its kernels"), "{text}");
    }
}

mod gpu {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU: where there is one, run it with --ignored gpu::"]
    fn two_and_four_processes_that_share_a_gpu_have_every_type_right() {
        let _gpu = crate::alone_on_the_gpu();
        for ranks in [2, 4] {
            Job::start("every_type_is_right", "shm", ranks, by_the_real_driver).expect_well(&[]);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU: where there is one, run it with --ignored gpu::"]
    fn a_process_that_dies_is_named_and_leaves_the_memory_of_the_others_to_them() {
        let _gpu = crate::alone_on_the_gpu();
        Job::start("a_peer_that_dies_is_named", "shm", 3, by_the_real_driver).expect_well(&[1]);
    }
}

/// RDMA to and from a GPU's memory. The fake driver's "GPU" memory is then memory that any device
/// may be given, as if nvidia-peermem were loaded.
mod verbs {
    use super::*;

    fn on_its_device(rank: u32, command: &mut Command) {
        command
            .env("PLEACH_HOST", format!("host-{rank}"))
            .env("PLEACH_VERBS_DEVICE", crate::rdma_devices::rdma_device(rank))
            .env("LD_LIBRARY_PATH", crate::fake_cuda::folder())
            .env("FAKE_CUDA_DMA_BUF", "0");
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn nics_read_and_write_gpu_memory_where_the_kernel_gives_it_to_them() {
        let direct = |rank: u32, command: &mut Command| {
            on_its_device(rank, command);
            command.env("FAKE_CUDA_PEERMEM", "1");
        };
        Job::start("nics_reach_the_memory", "verbs", 2, direct).expect_well(&[]);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn gpu_memory_is_staged_where_the_kernel_does_not_give_it_to_nics() {
        Job::start("nics_do_not_reach_the_memory", "verbs", 2, on_its_device).expect_well(&[]);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn ranks_whose_nics_reach_gpu_memory_and_ranks_that_stage_it_make_a_group() {
        let one_of_them = |rank: u32, command: &mut Command| {
            on_its_device(rank, command);
            command.env("FAKE_CUDA_PEERMEM", if rank == 1 { "1" } else { "0" });
        };
        Job::start("nics_of_rank_1_reach_the_memory", "verbs", 2, one_of_them).expect_well(&[]);
    }

    /// Two ranks on each host, which share its device.
    fn on_its_host(rank: u32, command: &mut Command) {
        on_its_device(rank / 2, command);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn neighbours_map_gpu_memory_that_nics_of_other_hosts_read_and_write() {
        let direct = |rank: u32, command: &mut Command| {
            on_its_host(rank, command);
            command.env("FAKE_CUDA_PEERMEM", "1");
        };
        Job::start("kernels_and_nics_reach_the_memory", "shm+verbs", 4, direct).expect_well(&[]);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn all_hosts_stage_gpu_memory_where_nics_of_one_rank_do_not_reach_it() {
        let without_one = |rank: u32, command: &mut Command| {
            on_its_host(rank, command);
            command.env("FAKE_CUDA_PEERMEM", if rank == 2 { "0" } else { "1" });
        };
        Job::start("all_hosts_stage_the_memory", "shm+verbs", 4, without_one).expect_well(&[]);
    }
}

/// What ranks do, each a process of its own.
mod child {
    use super::*;

    /// This rank's group on host memory, and the same on the GPU's.
    fn groups() -> (Group, Group) {
        let mut options = Options::from_env().expect("the test says which rank this is");
        let fabric = std::env::var(FABRIC).expect("the test names the fabric");
        let known = [Fabric::Shm, Fabric::Tcp, Fabric::Verbs, Fabric::HybridVerbs];
        let fabric = known.into_iter().find(|one| one.to_string() == fabric).expect("a fabric");
        options.fabric = FabricChoice::Only(fabric);
        let host = Group::join(&options).unwrap_or_else(|error| panic!("{error}"));
        let group = host.in_memory(GPU).unwrap_or_else(|error| panic!("{error}"));
        (host, group)
    }

    fn bytes_of<T: Element>(buffer: &GpuBuffer<T>) -> Vec<u8> {
        bytemuck::cast_slice(&buffer.to_vec().expect("loaded")).to_vec()
    }

    fn check_type<T: Element>((host, group): (&Group, &Group), lens: &[usize], make: impl Fn(u32) -> T) {
        let (rank, ranks) = (group.rank(), group.world_size());
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        for &len in lens {
            let of = |rank: u32| -> Vec<T> {
                (0..len as u32).map(|index| make((index + 5 * rank) % 13)).collect()
            };
            let own = of(rank);
            let everyone: Vec<T> = (0..ranks).flat_map(of).collect();

            let mut all = group.gpu_buffer::<T>(everyone.len()).expect("room");
            group.on(&stream).all_gather(&filled(group, &own), &mut all).expect("all-gather");
            assert!(all.to_vec().expect("loaded") == everyone, "all-gather of {len} {}", T::DATA_TYPE);

            let mut data = filled(group, &own);
            group.on(&stream).broadcast(&mut data, ranks - 1).expect("broadcast");
            assert!(data.to_vec().expect("loaded") == of(ranks - 1), "broadcast of {len} {}", T::DATA_TYPE);

            for algorithm in [Algorithm::Direct, Algorithm::Ring] {
                let host = host.with_variant(algorithm.clone());
                let group = group.with_variant(algorithm.clone());
                for op in [ReduceOp::Sum, ReduceOp::Max] {
                    let (mut expected, mut data) = (own.clone(), filled(&group, &own));
                    host.all_reduce(&mut expected, op).expect("on the host");
                    group.on(&stream).all_reduce(&mut data, op).expect("on the GPU");
                    let expected: &[u8] = bytemuck::cast_slice(&expected);
                    let what = format!("{op} of {len} {} by {algorithm}", T::DATA_TYPE);
                    assert!(bytes_of(&data) == expected, "{what}");
                }
            }
        }
    }

    fn check_every_type(groups: (&Group, &Group), lens: &[usize]) {
        check_type(groups, lens, |value| f64::from(value) / 3.0);
        check_type(groups, lens, |value| value as f32 / 3.0);
        check_type(groups, lens, |value| f16::from_f32(value as f32 / 3.0));
        check_type(groups, lens, |value| bf16::from_f32(value as f32 / 3.0));
        check_type(groups, lens, |value| F8E4M3::from_f32(value as f32 / 3.0));
        check_type(groups, lens, |value| F8E5M2::from_f32(value as f32 / 3.0));
        check_type(groups, lens, |value| i64::from(value) - 5);
        check_type(groups, lens, |value| value as i32 - 5);
        check_type(groups, lens, |value| value as i8 - 5);
        check_type(groups, lens, u64::from);
        check_type(groups, lens, |value| value);
        check_type(groups, lens, |value| value as u8);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn every_type_is_right() {
        let (host, group) = groups();
        check_every_type((&host, &group), &[777, 30_000]);
        group.close().expect("closed");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_reach_the_memory() {
        let (host, group) = groups();
        assert!(group.info().reaches_gpu, "its memory is registered with the NIC");
        check_every_type((&host, &group), &[777]);
        check_type((&host, &group), &[200_000], |value| value as f32);
        group.close().expect("closed");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_do_not_reach_the_memory() {
        let (host, group) = groups();
        assert!(!group.info().reaches_gpu, "the kernel gives it to no NIC");
        check_type((&host, &group), &[777, 200_000], |value| value as f32);
        group.close().expect("closed");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn nics_of_rank_1_reach_the_memory() {
        let (host, group) = groups();
        assert_eq!(group.info().reaches_gpu, group.rank() == 1);
        check_type((&host, &group), &[777, 200_000], |value| value as f32);
        group.close().expect("closed");
    }

    fn check_hosts((host, group): (&Group, &Group)) {
        assert_eq!(group.info().fabric, Some(Fabric::HybridVerbs));
        assert_eq!(group.info().hosts, host.info().hosts);
        check_type((host, group), &[777, 50_000], |value| value as f32);
        check_type((host, group), &[777], |value| bf16::from_f32(value as f32 / 3.0));
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn kernels_and_nics_reach_the_memory() {
        let (host, group) = groups();
        assert!(group.info().reaches_gpu, "neighbours map it and NICs take it");
        check_hosts((&host, &group));
        group.close().expect("closed");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn all_hosts_stage_the_memory() {
        let (host, group) = groups();
        assert!(!group.info().reaches_gpu, "the kernel does not give rank 2's to its NIC");
        check_hosts((&host, &group));
        group.close().expect("closed");
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_call_is_started_while_its_stream_is_busy() {
        let (_host, group) = groups();
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        let busy = filled(&group, &[0_u8; LEN]);
        let mark = keep_busy(&stream, &busy);
        let started = group.on(&stream).start(Operation::broadcast(busy, 0)).expect("started");
        assert!(!mark.is_reached().expect("no error"), "who starts a call does not wait for the stream");
        let data = started.wait().expect("ends");
        assert!(mark.is_reached().expect("no error"));
        assert!(data.to_vec().expect("loaded").iter().all(|byte| *byte == PIECES));
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn freed_memory_is_told() {
        let (_host, group) = groups();
        let gpu: &std::sync::Arc<Gpu> = &group.info().gpu.expect("it works on one");
        let stream = Stream::new(gpu).expect("a stream");
        let owner = CudaMemory::new(gpu, 4000).expect("room");
        // SAFETY: the owner's memory, which this rank alone touches.
        let foreign = unsafe { ForeignMemory::new(gpu, owner.base().as_ptr(), 4000) }.expect("on the GPU");
        let mut data = GpuBuffer::<f32>::of(foreign).expect("aligned");
        data.store(&[1.5; 1000]).expect("stored");
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all-reduce");
        assert_eq!(data.to_vec().expect("loaded"), [3.0; 1000]);
        group.barrier().expect("all have done so");
        let address = owner.base().as_ptr() as u64;
        drop(owner);
        let error = group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect_err("it was freed");
        assert!(matches!(error, CollectiveError::Gpu(CudaError::Freed { address: at }) if at == address));
        assert!(error.to_string().contains("keep it until the buffer is dropped"), "{error}");
        let mut own = filled(&group, &[group.rank() + 1; 1000]);
        group.on(&stream).all_reduce(&mut own, ReduceOp::Sum).expect("the group goes on");
        assert_eq!(own.to_vec().expect("loaded"), [3; 1000]);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_peer_stops_where_memory_is_short() {
        let (_host, group) = groups();
        let mut data = filled(&group, &vec![1_u32; 100_000]);
        // More than half of the GPU, so that there is no room for a copy.
        let bytes = if group.rank() == 0 { 600 << 20 } else { 1 };
        let large = group.gpu_buffer::<u8>(bytes).expect("room");
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
        if group.rank() == 1 {
            // A process that has ended maps nothing, so nothing is copied because of it.
            // SAFETY: takes no memory.
            unsafe { libc::raise(libc::SIGSTOP) };
        }
        let begun = clock::now();
        let within = group.within(Duration::from_secs(5));
        let error = within.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect_err("a peer has stopped");
        let took = clock::now().since(begun);
        assert!(took < FAILS_WITHIN, "{took:?}: {error}");
        assert!(matches!(error, CollectiveError::Failed(_)), "{error}");
        let lost =
            large.to_vec().map(|bytes| bytes.len()).expect_err("there was no room to keep it").to_string();
        assert!(lost.contains("were lost when a peer failed"), "{lost}");
        assert_eq!(data.to_vec().expect("kept").len(), 100_000);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn what_is_out_of_reach_is_staged() {
        let (_host, group) = groups();
        assert!(!group.info().reaches_gpu, "kernels do not reach the peer's GPU");
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        let mut data = filled(&group, &[1_u32 + group.rank(); 5000]);
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
        assert_eq!(data.to_vec().expect("loaded"), [3; 5000]);
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn launches_are_few() {
        const BYTES: usize = 64 << 20;
        /// A launch costs about as long as a GPU takes for 4 MiB, and should be little beside the
        /// work.
        const LAUNCH_BYTES_MIN: usize = 8 << 20;
        let (_host, group) = groups();
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        let mut data = group.gpu_buffer::<u32>(BYTES / 4).expect("room");
        let mut all = group.gpu_buffer::<u32>(2 * BYTES / 4).expect("room");
        let on = group.on(&stream);
        let expect_few = |what: &str, call: &mut dyn FnMut()| {
            let before = crate::fake_cuda::launches_and_copies();
            call();
            let after = crate::fake_cuda::launches_and_copies();
            let work: i64 = after.iter().sum::<i64>() - before.iter().sum::<i64>();
            println!("{what}: {work} launches and copies for {BYTES} bytes");
            // An all-gather copies each rank's own part too.
            assert!(work as usize <= 2 * BYTES / LAUNCH_BYTES_MIN, "{what}: {work}");
        };
        expect_few("all-reduce", &mut || on.all_reduce(&mut data, ReduceOp::Sum).expect("all are there"));
        expect_few("broadcast", &mut || on.broadcast(&mut data, 0).expect("all are there"));
        expect_few("all-gather", &mut || on.all_gather(&data, &mut all).expect("all are there"));
        expect_few("message", &mut || match group.rank() {
            0 => on.send(&data, 1).expect("it is there"),
            _ => on.recv(&mut data, 0).expect("it is there"),
        });
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_gpu_hangs_in_a_call() {
        let (_host, group) = groups();
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        let mut data = filled(&group, &[1_u32; 5000]);
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
        if group.rank() == 0 {
            // SAFETY: the fake driver reads it in calls of this thread, and nothing else reads the
            // environment now.
            unsafe { std::env::set_var("FAKE_CUDA_HANGS", "1") };
        }
        let within = group.within(Duration::from_millis(300));
        let outcome = within.on(&stream).all_reduce(&mut data, ReduceOp::Sum);
        panic!("the process is there yet: {:?}", outcome.map_err(|error| error.to_string()));
    }

    #[test]
    #[ignore = "started by another test, in a process of its own"]
    fn a_peer_that_dies_is_named() {
        let (_host, group) = groups();
        let stream = Stream::new(&group.info().gpu.expect("it works on one")).expect("a stream");
        let mut data = filled(&group, &vec![1_u32; 100_000]);
        group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
        assert_eq!(data.to_vec().expect("loaded"), [3; 100_000]);
        if group.rank() == 1 {
            std::process::abort();
        }
        match group.on(&stream).all_reduce(&mut data, ReduceOp::Sum).expect_err("rank 1 has died") {
            CollectiveError::Failed(fault) => assert_eq!(fault.subject, 1, "{fault}"),
            other => panic!("{other}"),
        }
        // It was taken from who mapped it, and is this rank's alone now.
        data.store(&[7; 100_000]).expect("stored");
        assert_eq!(data.to_vec().expect("loaded"), [7; 100_000]);
    }
}
