//! Ranks that are real processes find each other, or say in bounded time why not.
//!
//! A rank is this test program itself, told by its variables to run [`rank_process`] alone.

#[allow(dead_code)] // Not every test writes files.
mod launcher;
mod ports;
mod skipped;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use launcher::{finish, pleach};
use pleach_transport::device::{LossCause, Responder};
use pleach_transport::rendezvous::{FabricChoice, JoinOptions, World, join};
use pleach_transport::{Flush, Rank, clock::now};
use rustix::process::{Gid, Pid, Resource, Rlimit, Signal, Uid, getrlimit, kill_process, setrlimit};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use skipped::skip;

/// How long a rank of the command may take to join, in seconds.
const JOIN_TIMEOUT_VARIABLE: &str = "PLEACH_JOIN_TIMEOUT";

/// How long a rank may take to join, in milliseconds.
const TIMEOUT_VARIABLE: &str = "PLEACH_TEST_TIMEOUT_MS";

/// A setting that all ranks must share.
const KNOB_VARIABLE: &str = "PLEACH_TEST_KNOB";

/// Which fabric to ask for.
const FABRIC_VARIABLE: &str = "PLEACH_TEST_FABRIC";

/// How many more files than it has open a rank may open.
const FILES_VARIABLE: &str = "PLEACH_TEST_FILES";

/// The number of the user that a rank becomes, who is not the one that started it.
const USER_VARIABLE: &str = "PLEACH_TEST_USER";

/// Anybody but root.
const NOBODY: u32 = 65_534;

struct Quiet;

impl Responder for Quiet {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

#[test]
#[ignore = "this is a rank, which the other tests start"]
fn rank_process() {
    let variable = |name| std::env::var(name).ok();
    if let Some(user) = variable(USER_VARIABLE) {
        let user: u32 = user.parse().expect("a number");
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(user));
        set_thread_groups(&[]).expect("root may");
        set_thread_res_gid(group, group, group).expect("root may");
        set_thread_res_uid(user, user, user).expect("root may");
    }
    if let Some(more) = variable(FILES_VARIABLE) {
        // The limit is on the number of a file: an inherited file may have left free numbers below
        // its own.
        let is_free = |number: &u64| std::fs::read_link(format!("/proc/self/fd/{number}")).is_err();
        let free = (0..).filter(is_free).nth(more.parse().expect("a number"));
        let current = Some(free.expect("numbers do not end"));
        let limit = Rlimit { current, ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).expect("a limit may be lowered");
    }
    let joined = World::from_env().map_err(|error| error.to_string()).and_then(|world| {
        let options = JoinOptions {
            fabric: variable(FABRIC_VARIABLE)
                .map_or(FabricChoice::Auto, |text| text.parse().expect("a fabric")),
            knobs: vec![("knob".to_owned(), variable(KNOB_VARIABLE).unwrap_or_default())],
            signal_slots: 8,
            timeout: variable(TIMEOUT_VARIABLE)
                .map_or(launcher::PATIENCE, |text| Duration::from_millis(text.parse().expect("a number"))),
        };
        join(&world, &options, Arc::new(Quiet)).map_err(|error| error.to_string())
    });
    match joined {
        Ok(mut joined) => {
            println!("rank {} of {} joined over {}", joined.rank, joined.world_size, joined.fabric);
            joined.device.leave();
            let deadline = now() + Duration::from_secs(5);
            let mut events = Vec::with_capacity(64);
            while !joined.device.flush(Flush::All) && now() < deadline {
                joined.device.poll(now(), &mut events);
                events.clear();
            }
        }
        Err(error) => {
            // One write: the ranks' lines go to one pipe here and there.
            let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
            std::process::exit(1);
        }
    }
}

/// The command that is a rank.
fn rank_command() -> Vec<PathBuf> {
    let own = std::env::current_exe().expect("has a name");
    [own, "rank_process".into(), "--exact".into(), "--ignored".into(), "--nocapture".into()].into()
}

fn run(ranks: u32, options: &[&str]) -> Command {
    let mut command = pleach();
    command.arg("run").args(["-n", &ranks.to_string()]).args(options).arg("--").args(rank_command());
    command
}

/// A rank that is started by hand.
fn rank(number: u32, world_size: u32, rendezvous: &str) -> Command {
    let rank = rank_command();
    let mut command = Command::new(&rank[0]);
    command
        .args(&rank[1..])
        .env("PLEACH_RANK", number.to_string())
        .env("PLEACH_WORLD_SIZE", world_size.to_string())
        .env("PLEACH_RENDEZVOUS", rendezvous)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn all(commands: impl IntoIterator<Item = Command>) -> Vec<Output> {
    let children: Vec<Child> =
        commands.into_iter().map(|mut command| command.spawn().expect("starts")).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("ends")).collect()
}

fn free_address() -> String {
    format!("tcp://127.0.0.1:{}", ports::reserve(1))
}

fn joined(output: &Output) -> usize {
    String::from_utf8_lossy(&output.stdout).matches(" joined over ").count()
}

fn error(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-rendezvous-{name}-{}", std::process::id()));
        // Ranks meet only where nobody else may write, whatever the umask.
        std::fs::DirBuilder::new().mode(0o700).create(&path).expect("a fresh folder");
        Self(path)
    }

    fn secret(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        let mut command = pleach();
        command.arg("secret").arg(&path);
        assert!(finish(command).status.success());
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_ranks_of_pleach_run_join_over_each_fabric() {
    for (selection, fabric) in [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")] {
        let mut command = run(4, &[]);
        command.env(FABRIC_VARIABLE, selection);
        let output = finish(command);
        assert!(output.status.success() && joined(&output) == 4, "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stdout).contains(&format!("rank 3 of 4 joined over {fabric}"))
        );
    }
}

#[test]
fn two_launchers_make_one_world() {
    let address = free_address();
    let part = |first: &str| run(2, &["--world-size", "4", "--first-rank", first, "--rendezvous", &address]);
    let outputs = all([part("0"), part("2")].map(|mut command| {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }));
    assert!(outputs.iter().all(|output| output.status.success() && joined(output) == 2), "{outputs:?}");
}

#[test]
fn a_rank_with_another_host_name_is_not_on_this_host() {
    let address = free_address();
    let outputs = all([0, 1].map(|number| {
        let mut command = rank(number, 2, &address);
        command.env("PLEACH_HOST", format!("host-{number}"));
        command
    }));
    for output in &outputs {
        assert!(String::from_utf8_lossy(&output.stdout).contains("joined over tcp"), "{output:?}");
    }
    let outputs = all([0, 1].map(|number| {
        let mut command = rank(number, 2, &address);
        command.env("PLEACH_HOST", format!("host-{number}")).env(FABRIC_VARIABLE, "shm");
        command
    }));
    for output in &outputs {
        let error = error(output);
        assert!(error.contains("no shared memory") && error.contains("rank 1 on host-1"), "{error}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_in_bounded_time() {
    let folder = Folder::new("missing");
    for address in [free_address(), format!("file://{}", folder.0.display())] {
        let mut command = run(3, &["--world-size", "4", "--rendezvous", &address]);
        command.env(TIMEOUT_VARIABLE, "6000");
        let before = now();
        let error = error(&finish(command));
        assert!(now().since(before) < launcher::PATIENCE);
        assert!(error.contains("rank 3 of 4 did not come within "), "{error}");
        assert_eq!(error.matches("error: ").count(), 1, "once for the job: {error}");
    }
}

#[test]
fn ranks_without_a_rank_0_say_so() {
    let folder = Folder::new("headless");
    for address in [free_address(), format!("file://{}", folder.0.display())] {
        let mut command = rank(1, 2, &address);
        command.env(TIMEOUT_VARIABLE, "1000");
        let error = error(&finish(command));
        assert!(error.contains("rank 0 is missing"), "{error}");
    }
}

/// A benchmark in which a rank waits a second for what never comes; what it then says.
fn given_up(rank: &str, ranks: &str, address: &str) -> String {
    let mut command = pleach();
    command.args(["bench", "all-reduce", "--max", "8"]);
    command
        .env("PLEACH_RANK", rank)
        .env("PLEACH_WORLD_SIZE", ranks)
        .env("PLEACH_RENDEZVOUS", address)
        .env(JOIN_TIMEOUT_VARIABLE, "1");
    let error = error(&finish(command));
    assert_eq!(error.lines().count(), 1, "one line: {error}");
    assert!(error.starts_with("error: "), "{error}");
    error
}

#[test]
fn the_command_gives_up_after_the_time_that_a_variable_says() {
    let before = now();
    let missing = given_up("0", "2", &free_address());
    assert!(missing.contains("rank 1 of 2 did not come"), "{missing}");
    let address = free_address();
    let nobody = given_up("1", "2", &address);
    assert!(nobody.contains("rank 0 is missing") && nobody.contains(&address["tcp://".len()..]), "{nobody}");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    // The kernel accepts for it, and nothing is ever said.
    let silent = given_up("1", "2", &format!("tcp://{address}"));
    assert!(silent.contains("accepts connections but says nothing") && silent.contains(&address), "{silent}");
    // Far less than the minute that ranks wait where nothing is set.
    assert!(now().since(before) < Duration::from_secs(40), "{:?}", now().since(before));
}

#[test]
fn two_processes_that_claim_one_rank_are_both_told() {
    let address = free_address();
    let outputs = all([0, 1, 1].map(|number| rank(number, 3, &address)));
    for output in &outputs {
        let error = error(output);
        assert!(error.contains("both claim to be rank 1"), "{error}");
    }
}

#[test]
fn a_fifth_rank_for_a_world_of_four_is_told_and_the_four_go_on() {
    let address = free_address();
    let mut outputs = all([4, 0, 1, 2, 3].map(|number| {
        let mut command = rank(number, if number == 4 { 5 } else { 4 }, &address);
        if number == 4 {
            command.env(TIMEOUT_VARIABLE, "5000");
        }
        command
    }));
    let fifth = error(&outputs.remove(0));
    let told = fifth.contains("the world size is 4 at rank 0 and 5 at rank 4");
    assert!(told || fifth.contains("world complete") || fifth.contains("rank 0 is missing"), "{fifth}");
    assert!(outputs.iter().all(|output| joined(output) == 1), "{outputs:?}");
}

#[test]
fn settings_that_differ_are_named_with_both_values_and_ranks() {
    let address = free_address();
    let outputs = all([0, 1].map(|number| {
        let mut command = rank(number, 2, &address);
        command.env(KNOB_VARIABLE, format!("value-{number}"));
        command
    }));
    for output in &outputs {
        let error = error(output);
        assert!(error.contains("value-0 at rank 0") && error.contains("value-1 at rank 1"), "{error}");
    }
}

#[test]
fn a_wrong_secret_is_told_to_the_one_that_has_it_and_named_to_rank_0() {
    let folder = Folder::new("secrets");
    let secrets = [folder.secret("right"), folder.secret("wrong")];
    let address = free_address();
    let outputs = all([0, 1].map(|number| {
        let mut command = rank(number, 2, &address);
        command.env("PLEACH_SECRET_FILE", &secrets[number as usize]).env(TIMEOUT_VARIABLE, "8000");
        command
    }));
    let (zero, one) = (error(&outputs[0]), error(&outputs[1]));
    assert!(one.contains("wrong secret"), "{one}");
    assert!(zero.contains("rank 1 of 2 did not come") && zero.contains("has a wrong secret"), "{zero}");
    let outputs = all([0, 1].map(|number| {
        let mut command = rank(number, 2, &address);
        command.env("PLEACH_SECRET_FILE", &secrets[0]);
        command
    }));
    assert!(outputs.iter().all(|output| joined(output) == 1), "{outputs:?}");
}

#[test]
fn another_user_of_this_host_is_refused_and_named_on_both_sides_and_a_secret_joins_the_two() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can start a rank of another user");
    }
    let folder = Folder::new("users");
    let secrets = [folder.secret("own"), folder.0.join("theirs")];
    std::fs::copy(&secrets[0], &secrets[1]).expect("is written");
    std::os::unix::fs::chown(&secrets[1], Some(NOBODY), Some(NOBODY)).expect("root may");
    for path in [&folder.0, &secrets[0]] {
        let mode = if path == &folder.0 { 0o711 } else { 0o600 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("is ours");
    }
    let join = |with_secret: bool| {
        let address = free_address();
        all([0, 1].map(|number| {
            let mut command = rank(number, 2, &address);
            if number == 1 {
                command.env(USER_VARIABLE, NOBODY.to_string());
            }
            if with_secret {
                command.env("PLEACH_SECRET_FILE", &secrets[number as usize]);
            } else {
                command.env(TIMEOUT_VARIABLE, "8000");
            }
            command.env(FABRIC_VARIABLE, "auto");
            command
        }))
    };
    let refused = join(false);
    assert!(refused.iter().all(|output| joined(output) == 0), "sockets instead: {refused:?}");
    let [zero, one] = [error(&refused[0]), error(&refused[1])];
    assert!(zero.contains("rank 1 of 2 did not come") && zero.contains("a process of user 65534"), "{zero}");
    assert!(one.contains("belongs to user 0, this process is of user 65534"), "{one}");
    for output in join(true) {
        assert!(String::from_utf8_lossy(&output.stdout).contains("joined over tcp"), "{output:?}");
    }
}

#[test]
fn the_command_says_at_once_whom_it_turned_away_and_goes_on_waiting() {
    let folder = Folder::new("turned-away");
    let secrets = [folder.secret("right"), folder.secret("wrong")];
    let address = free_address();
    let bench = |number: usize, secret: &Path| {
        let mut command = pleach();
        command.args(["bench", "all-reduce", "--max", "8", "--iterations", "1"]);
        command.args(["--rank", &number.to_string(), "--world-size", "2", "--rendezvous", &address]);
        command.env("PLEACH_SECRET_FILE", secret).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("starts")
    };
    let mut zero = bench(0, &secrets[0]);
    let turned_away = bench(1, &secrets[1]).wait_with_output().expect("ends");
    assert!(error(&turned_away).contains("wrong secret"), "{turned_away:?}");
    let mut said = String::new();
    let mut lines = BufReader::new(zero.stderr.take().expect("is piped"));
    lines.read_line(&mut said).expect("it says something");
    assert!(said.contains("turned away: rank 1 from 127.0.0.1 has a wrong secret"), "{said}");
    // Anybody can send a wrong proof: the right one still comes in.
    let outputs = [bench(1, &secrets[0]), zero].map(|child| child.wait_with_output().expect("ends"));
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
}

#[test]
fn a_port_that_somebody_has_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    let mut command = run(2, &["--rendezvous", &format!("tcp://{address}")]);
    command.env(TIMEOUT_VARIABLE, "20000");
    let error = error(&finish(command));
    assert!(error.contains("port in use") && error.contains(&address), "{error}");
}

#[test]
fn a_server_that_is_something_else_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody comes");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("answers");
        stream
    });
    let error = error(&finish(rank(1, 2, &format!("tcp://{address}"))));
    assert!(error.contains("not a pleach rendezvous") && error.contains("HTTP/1.1 400"), "{error}");
    drop(server.join());
}

#[test]
fn ranks_of_which_one_may_open_too_few_files_are_all_told_so() {
    // A connection to rank 0 takes two files. A rank that lacks them can tell nobody else.
    let mut alone = rank(1, 3, &free_address());
    alone.env(FILES_VARIABLE, "0");
    let alone = error(&finish(alone));
    assert!(alone.contains("rendezvous not reached") && alone.contains("ulimit -n"), "{alone}");
    // What lacks a file: the probe of neighbours, the device, its signal slots, its connections.
    let shm = (2..=12).chain([60]).map(|more| ("shm", more));
    let tcp = [2, 3, 4, 5, 12, 60].map(|more| ("tcp", more));
    for (fabric, more) in shm.chain(tcp) {
        let is_enough = more == 60;
        let rendezvous = free_address();
        let outputs = all((0..3).map(|number| {
            let mut rank = rank(number, 3, &rendezvous);
            // Sockets that nobody connects to are given up when four fifths of this are over.
            rank.env(FABRIC_VARIABLE, fabric).env(TIMEOUT_VARIABLE, "10000");
            if number == 1 {
                rank.env(FILES_VARIABLE, more.to_string());
            }
            rank
        }));
        for output in &outputs {
            assert_eq!(joined(output), usize::from(is_enough), "{fabric}, {more} files: {output:?}");
            assert!(is_enough || error(output).contains("ulimit -n"), "{fabric}, {more} files: {output:?}");
        }
    }
}

#[test]
fn an_address_that_is_not_loopback_needs_a_secret() {
    let error = error(&finish(rank(0, 2, "tcp://192.0.2.1:4000")));
    assert!(error.contains("secret required") && error.contains("pleach secret"), "{error}");
}

#[test]
fn a_folder_that_a_killed_job_used_serves_the_next_one() {
    let folder = Folder::new("stale");
    let address = format!("file://{}", folder.0.display());
    let mut zero = rank(0, 2, &address).spawn().expect("starts");
    let current = folder.0.join("current");
    launcher::wait_until("rank 0 has opened the folder", || current.exists());
    kill_process(Pid::from_child(&zero), Signal::KILL).expect("it runs");
    zero.wait().expect("ends");
    let stale = std::fs::read_to_string(&current).expect("is left");
    let outputs = all([1, 0].map(|number| rank(number, 2, &address)));
    assert!(outputs.iter().all(|output| joined(output) == 1), "{outputs:?}");
    assert!(!folder.0.join(stale).exists());
}

/// A real launcher, if this machine has it.
fn installed(names: &[&'static str]) -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        names.iter().find(|name| std::env::split_paths(&path).any(|folder| folder.join(name).exists()));
    if found.is_none() {
        skip(format_args!("none of {names:?} is installed"));
    }
    found.copied()
}

/// Ranks of a real mpirun, twice in a row in each of its processes: the second job must not take
/// the first for its own.
fn under_mpirun(program: &str, options: &[&str]) {
    let rank =
        rank_command().iter().map(|part| format!("'{}'", part.display())).collect::<Vec<_>>().join(" ");
    let mut command = Command::new(program);
    command.args(options).args(["-n", "3", "sh", "-c", &format!("{rank} && {rank}")]);
    let output = finish(command);
    assert!(output.status.success() && joined(&output) == 6, "{program}: {output:?}");
}

#[test]
fn the_ranks_of_open_mpi_join() {
    if let Some(program) = installed(&["mpirun.openmpi"]) {
        under_mpirun(program, &["--allow-run-as-root", "--oversubscribe"]);
    }
}

#[test]
fn the_ranks_of_mpich_join() {
    if let Some(program) = installed(&["mpirun.mpich", "mpiexec.hydra"]) {
        under_mpirun(program, &[]);
    }
}

#[test]
fn the_folders_of_launchers_are_removed_with_their_jobs() {
    let Some(program) = installed(&["mpirun.mpich", "mpiexec.hydra"]) else { return };
    let folder = Folder::new("temporary");
    let rank = rank_command();
    let mut command = Command::new(program);
    command.env("TMPDIR", &folder.0).args(["-n", "2"]).args(&rank);
    let output = finish(command);
    assert!(output.status.success(), "{output:?}");
    let user = folder.0.join(format!("pleach-{}", rustix::process::geteuid().as_raw()));
    assert_eq!(entries(&user), Vec::<PathBuf>::new());
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).expect("is there").map(|entry| entry.expect("is readable").path()).collect()
}
