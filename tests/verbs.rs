//! `pleach bench` over RDMA with real processes, each rank on the next device: every collective
//! with every result checked, and what people are told when a link, a limit or an address is wrong.
//!
//! `verbs` runs wherever there are RDMA devices; `softroce` changes links and limits, as root, on a
//! machine made for it: host I has the interface `hI`, the address 10.77.0.I and the device `rxeI`
//! (Soft-RoCE), and `RDMA_VM` is 1.

#[path = "../transport/tests/conformance/softroce/changed.rs"]
#[allow(dead_code)] // Not every change is made here.
mod changed;
#[allow(dead_code)] // Not every test looks at processes.
mod launcher;
mod rdma_devices;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use launcher::{PATIENCE, pleach, wait_until};
use pleach::transport::clock::now;
use rdma_devices::rdma_device;
use rustix::process::{Pid, Signal, kill_process};

/// Numbers jobs of this process. Relaxed: only uniqueness matters.
static JOBS: AtomicU32 = AtomicU32::new(0);

/// How long a job may take: its processors and devices may be software.
const JOB_TIME_MAX: Duration = PATIENCE.saturating_mul(4);

/// Ranks of one job, and the folder where they meet, which goes with it.
struct Job {
    ranks: Vec<Child>,
    folder: PathBuf,
}

impl Job {
    /// `pleach bench` on that many ranks, each on a host of its own by name; `change` has the last
    /// word on how each is started.
    fn start(world_size: u32, arguments: &[&str], change: impl Fn(u32, Command) -> Command) -> Self {
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pleach-verbs-{}-{number}", std::process::id()));
        fs::create_dir(&folder).expect("the folder is new");
        // Ranks may be of another user, whose own the folder in it must be where they meet.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("it is ours");
        let rank = |rank: u32| {
            let mut command = pleach();
            command.arg("bench").args(arguments).args(["--fabric", "verbs"]);
            // Many processes start at once, on processors that may be software.
            command.env("PLEACH_JOIN_TIMEOUT", "180");
            let mut command = change(rank, command);
            command
                .env("PLEACH_RANK", rank.to_string())
                .env("PLEACH_WORLD_SIZE", world_size.to_string())
                .env("PLEACH_RENDEZVOUS", format!("file://{}/meeting", folder.display()))
                .env("PLEACH_HOST", format!("host-{rank}"))
                .env("PLEACH_VERBS_DEVICE", rdma_device(rank))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            command.spawn().expect("the rank starts")
        };
        Self { ranks: (0..world_size).map(rank).collect(), folder }
    }

    /// Waits for all ranks; who does not end is killed with the test.
    fn end(mut self) -> Vec<Output> {
        let waiters: Vec<_> = std::mem::take(&mut self.ranks)
            .into_iter()
            .map(|rank| {
                let process = Pid::from_child(&rank);
                (process, thread::spawn(move || rank.wait_with_output().expect("ends")))
            })
            .collect();
        let deadline = now() + JOB_TIME_MAX;
        while !waiters.iter().all(|(_, waiter)| waiter.is_finished()) && now() < deadline {
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            let _ = rustix::event::poll(&mut [], Some(&pause));
        }
        for (process, waiter) in &waiters {
            if !waiter.is_finished() {
                // It ends by itself at the same moment, or it hangs.
                let _ = kill_process(*process, Signal::KILL);
            }
        }
        waiters.into_iter().map(|(_, waiter)| waiter.join().expect("only waits")).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sees that all ranks ended well, and that the first one's rows, one for each size, have no wrong
/// element.
fn check_rows(outputs: &[Output], sizes: usize, what: &str) {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{what}: rank {rank}: {}", text(&output.stderr));
    }
    let rows = text(&outputs[0].stdout);
    assert_eq!(rows.lines().count(), sizes, "{what}: {rows}");
    for row in rows.lines() {
        assert!(row.contains(r#""fabric":"verbs""#) && row.ends_with(r#""errors":0}"#), "{what}: {row}");
    }
}

/// A collective over `ranks`, in few iterations.
fn check_collective(collective: &str, ranks: u32, sizes: &str) {
    let arguments = [collective, "--sizes", sizes, "--iterations", "5", "--warmup", "1", "--json"];
    let outputs = Job::start(ranks, &arguments, |_, command| command).end();
    let sizes = if collective == "barrier" { 1 } else { sizes.split(',').count() };
    check_rows(&outputs, sizes, &format!("{collective} of {ranks} ranks"));
}

mod verbs {
    use pleach::Collective;

    use super::{Command, Job, check_collective, check_rows, text};

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn every_collective_of_two_ranks_is_right() {
        for collective in Collective::NAMES {
            check_collective(collective, 2, "8,4096,262144");
        }
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn every_collective_of_three_and_eight_ranks_is_right() {
        for ranks in [3, 8] {
            for collective in Collective::NAMES {
                check_collective(collective, ranks, "4096,65536");
            }
        }
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn every_collective_of_three_ranks_that_rdma_cm_joins_is_right() {
        for collective in Collective::NAMES {
            let arguments =
                [collective, "--sizes", "4096,65536", "--iterations", "5", "--warmup", "1", "--json"];
            let by_rdma_cm = |_, mut command: Command| {
                command.env("PLEACH_VERBS_CONNECT", "cm");
                command
            };
            let outputs = Job::start(3, &arguments, by_rdma_cm).end();
            let sizes = if collective == "barrier" { 1 } else { 2 };
            check_rows(&outputs, sizes, &format!("{collective} of ranks joined by the connection manager"));
        }
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_partial_all_reduce_of_three_ranks_that_are_late_is_right() {
        let arguments = ["partial-all-reduce", "--activation", "quorum:2", "--skew", "linear:5ms", "--sizes"];
        let arguments = [&arguments[..], &["64,65536", "--rounds", "8", "--json"]].concat();
        let outputs = Job::start(3, &arguments, |_, command| command).end();
        check_rows(&outputs, 2, "partial all-reduce of 3 ranks");
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_way_to_connect_that_there_is_not_is_an_error_with_those_that_there_are() {
        let other_way = |_, mut command: Command| {
            command.env("PLEACH_VERBS_CONNECT", "udp").env("PLEACH_JOIN_TIMEOUT", "60");
            command
        };
        for output in Job::start(2, &["all-reduce", "--sizes", "8"], other_way).end() {
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(error.contains("PLEACH_VERBS_CONNECT is 'udp'; take 'rendezvous' or 'cm'"), "{error}");
        }
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn collectives_of_four_to_seven_ranks_are_right() {
        for ranks in 4..=7 {
            for collective in ["all-reduce", "all-to-all"] {
                check_collective(collective, ranks, "4096,65536");
            }
        }
    }
}

mod softroce {
    use std::io::BufRead;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::Ordering;

    use pleach::Collective;

    use super::changed::{Changed, expect_machine};
    use super::launcher::{finish, pleach};
    use super::{Command, Duration, JOBS, Job, check_collective, check_rows, now, text, wait_until};

    /// From when a link goes down until all have said whom they miss; NICs try for some seconds.
    const FOUND_WITHIN: Duration = Duration::from_secs(60);

    /// Some user who is not root.
    const USER: u32 = 65_534;

    /// Bytes of the control streams go over the same link as those of the NIC.
    fn on_its_link(rank: u32, mut command: Command, secret: &Path) -> Command {
        let address = format!("10.77.0.{}", rank + 1);
        command.env("PLEACH_INTERFACE", address).env("PLEACH_SECRET_FILE", secret);
        command
    }

    #[test]
    #[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn every_collective_is_right_over_a_link_that_delays_and_loses() {
        let mut changed = Changed::default();
        changed.lossy(1);
        for collective in Collective::NAMES {
            check_collective(collective, 2, "8,65536");
        }
        drop(changed);
    }

    #[test]
    #[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn a_link_that_goes_down_under_a_collective_is_named_by_all_others() {
        let arguments = ["all-reduce", "--sizes", "4096", "--iterations", "1000000", "--reuse"];
        let secret = std::env::temp_dir().join(format!("pleach-verbs-{}-secret", std::process::id()));
        let mut command = pleach();
        command.arg("secret").arg(&secret);
        assert!(finish(command).status.success(), "a secret is written");
        let mut job = Job::start(3, &arguments, |rank, command| on_its_link(rank, command, &secret));
        // The table's head is printed when all have joined; then the measuring goes on for long.
        let output = job.ranks[0].stdout.take().expect("is piped");
        let mut head = String::new();
        std::io::BufReader::new(output).read_line(&mut head).expect("rank 0 prints");
        let mut changed = Changed::default();
        changed.link_down(2);
        let since = now();
        let outputs = job.end();
        let took = now().since(since);
        drop(changed);
        std::fs::remove_file(&secret).expect("it was written");
        for (rank, output) in outputs.iter().enumerate() {
            let error = text(&output.stderr);
            println!("rank {rank}: {error}");
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {error}");
            let lost = if rank == 1 { "rank " } else { "rank 1" };
            assert!(error.starts_with("error: ") && error.contains(lost), "rank {rank}: {error}");
        }
        println!("all ended {took:?} after the link went down");
        assert!(took < FOUND_WITHIN, "{took:?}");
    }

    #[test]
    #[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn a_port_that_is_down_is_an_error_on_all_ranks_that_says_what_to_do() {
        let mut changed = Changed::default();
        changed.link_down(2);
        let set = |_, mut command: Command| {
            command.env("PLEACH_JOIN_TIMEOUT", "90");
            command
        };
        let outputs = Job::start(2, &["all-reduce", "--sizes", "8"], set).end();
        drop(changed);
        let error = text(&outputs[1].stderr);
        assert_eq!(outputs[1].status.code(), Some(1), "{error}");
        assert!(error.contains("rxe2:1 is down ('ip link set h2 up'"), "{error}");
        let error = text(&outputs[0].stderr);
        assert_eq!(outputs[0].status.code(), Some(1), "{error}");
        assert!(error.contains("rank 1"), "{error}");
    }

    /// The command where every user may start it, as builds may lie in a folder that only root
    /// enters; gone with this.
    struct EveryonesCommand(PathBuf);

    impl EveryonesCommand {
        fn new() -> Self {
            let number = JOBS.fetch_add(1, Ordering::Relaxed);
            let name = format!("pleach-everyones-{}-{number}", std::process::id());
            let copy = Self(std::env::temp_dir().join(name));
            std::fs::copy(pleach().get_program(), &copy.0).expect("the command is copied");
            copy
        }
    }

    impl Drop for EveryonesCommand {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).ok();
        }
    }

    /// Two ranks that may lock so little; what they say.
    fn with_locked_memory(kilobytes: u32, sizes: &str) -> Vec<std::process::Output> {
        let everyones = EveryonesCommand::new();
        let limited = |_, command: Command| {
            let mut limited = Command::new("bash");
            let script = format!("ulimit -l {kilobytes} && exec \"$0\" \"$@\"");
            limited.args(["-c", &script]).arg(&everyones.0).args(command.get_args());
            // Root may lock what it likes.
            limited.uid(USER).gid(USER).env("PLEACH_JOIN_TIMEOUT", "90");
            limited
        };
        let arguments = ["all-reduce", "--sizes", sizes, "--iterations", "5", "--warmup", "1", "--json"];
        Job::start(2, &arguments, limited).end()
    }

    #[test]
    #[ignore = "changes limits over Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn memory_that_may_not_be_locked_is_an_error_with_the_lines_to_add() {
        expect_machine();
        // 64 KiB do not do for what a pair of ranks tells each other by, 16 MiB not for the scratch
        // memory of a group.
        for (kilobytes, sizes) in [(64, "8"), (16 << 10, "8")] {
            let outputs = with_locked_memory(kilobytes, sizes);
            for (rank, output) in outputs.iter().enumerate() {
                let error = text(&output.stderr);
                assert_eq!(output.status.code(), Some(1), "{kilobytes} KiB: rank {rank}: {error}");
            }
            let limit = format!("the limit is {} bytes", u64::from(kilobytes) << 10);
            let lines =
                ["ulimit -l unlimited", "* soft memlock unlimited", "* hard memlock unlimited", &limit];
            let told = |output: &std::process::Output| {
                let error = text(&output.stderr);
                lines.iter().all(|line| error.contains(line))
            };
            assert!(outputs.iter().any(told), "{kilobytes} KiB: {outputs:?}");
        }
        check_rows(&with_locked_memory(256 << 10, "4096"), 1, "enough locked memory");
    }

    /// The files by which devices are opened, which only root may use until this is dropped.
    struct Closed;

    impl Closed {
        fn set(mode: u32) {
            let files = std::fs::read_dir("/dev/infiniband").expect("there are RDMA devices");
            let of_device = |path: &std::path::PathBuf| path.to_string_lossy().contains("/uverbs");
            for path in files.map(|entry| entry.expect("readable").path()).filter(of_device) {
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("is root");
            }
        }

        fn new() -> Self {
            expect_machine();
            Self::set(0o600);
            Self
        }
    }

    impl Drop for Closed {
        fn drop(&mut self) {
            Self::set(0o666);
        }
    }

    #[test]
    #[ignore = "changes rights to Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn a_user_without_the_right_to_a_device_is_told_which_right_to_give() {
        let closed = Closed::new();
        let everyones = EveryonesCommand::new();
        let by_user = |_, command: Command| {
            let mut own = Command::new(&everyones.0);
            own.args(command.get_args()).uid(USER).gid(USER).env("PLEACH_JOIN_TIMEOUT", "60");
            own
        };
        let outputs = Job::start(2, &["all-reduce", "--sizes", "8"], by_user).end();
        drop(closed);
        for (rank, output) in outputs.iter().enumerate() {
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {error}");
            assert!(error.contains("no right to open RDMA device rxe"), "rank {rank}: {error}");
            assert!(
                error.contains("read and write access to /dev/infiniband/uverbs"),
                "rank {rank}: {error}"
            );
        }
    }

    #[test]
    #[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn ranks_whose_packets_differ_in_length_both_end_with_both_lengths() {
        let mut changed = Changed::default();
        changed.mtu(2, 1500);
        let soon = |_, mut command: Command| {
            command.env("PLEACH_JOIN_TIMEOUT", "60");
            command
        };
        let outputs = Job::start(2, &["all-reduce", "--sizes", "8"], soon).end();
        drop(changed);
        for (rank, output) in outputs.iter().enumerate() {
            let error = text(&output.stderr);
            println!("rank {rank}: {error}");
            assert_eq!(output.status.code(), Some(1), "rank {rank}: {error}");
            let says = ["1024 bytes", "4096", "the same MTU"];
            assert!(says.iter().all(|part| error.contains(part)), "rank {rank}: {error}");
        }
    }

    #[test]
    #[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
    fn a_rank_whose_address_changes_under_a_collective_is_named_by_all_others() {
        let arguments = ["all-reduce", "--sizes", "4096", "--iterations", "1000000", "--reuse"];
        let mut job = Job::start(3, &arguments, |_, command| command);
        let output = job.ranks[0].stdout.take().expect("is piped");
        let mut head = String::new();
        std::io::BufReader::new(output).read_line(&mut head).expect("rank 0 prints");
        let mut changed = Changed::default();
        changed.without_address(2);
        let outputs = job.end();
        drop(changed);
        for rank in [0, 2] {
            let error = text(&outputs[rank].stderr);
            println!("rank {rank}: {error}");
            assert_eq!(outputs[rank].status.code(), Some(1), "rank {rank}: {error}");
            assert!(error.contains("rank 1"), "rank {rank}: {error}");
        }
        wait_until("the address is back", || {
            let table = std::fs::read_to_string("/sys/class/infiniband/rxe2/ports/1/gids/1");
            table.is_ok_and(|gid| gid.trim().ends_with("0a4d:0002"))
        });
        check_collective("all-reduce", 2, "4096");
    }
}
