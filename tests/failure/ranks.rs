//! Processes that are ranks, as a test sees them: told what to do and heard line by line, with a
//! deadline for every wait, and gone with the test whatever happens.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use pleach::Rank;
use pleach::transport::Nanos;
use pleach::transport::clock::now;
use pleach::transport::rendezvous::Fabric;
use rustix::process::{Pid, Signal, kill_process};

/// How long anything may take on a machine that is busy with other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How many times longer things may take over RDMA than over other fabrics: its tests also run on
/// devices that are software, on processors that are software too.
const SOFTWARE: u32 = 40;

/// A limit for what takes so long at most on other fabrics.
pub(crate) fn allowed(fabric: Fabric, limit: Duration) -> Duration {
    if fabric == Fabric::Verbs { limit * SOFTWARE } else { limit }
}

/// Elements of a long call on a fabric: this number where processors move memory, and as
/// many as 30 MB/s move in a moment over devices that may be software.
pub(crate) fn many(fabric: Fabric, elements: u32) -> u32 {
    if fabric == Fabric::Verbs { elements.min(1 << 16) } else { elements }
}

/// What a rank is told about itself: rank, world size, fabric, folder.
pub(crate) const VARIABLE: &str = "PLEACH_TEST_RANK_PROCESS";

/// What distinguishes a rank's own lines from those of the test harness in it.
pub(crate) const MARK: &str = "@";

/// What stands between the two texts of a fault.
pub(crate) const TOLD: char = '\t';

/// Numbers folders of this process. Relaxed: only uniqueness matters.
static FOLDERS: AtomicU32 = AtomicU32::new(0);

struct Member {
    process: Child,
    lines: Receiver<String>,
    errors: Option<thread::JoinHandle<String>>,
}

/// The ranks of one job.
pub(crate) struct Ranks {
    members: Vec<Member>,
    folder: PathBuf,
    /// What others had left before: process numbers come round.
    earlier: Vec<PathBuf>,
    /// How long a rank may say nothing.
    patience: Duration,
}

/// Everything where a rank could leave something.
fn left_about() -> impl Iterator<Item = PathBuf> {
    let folders = [Path::new("/dev/shm").to_owned(), std::env::temp_dir()];
    folders
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
        .map(|entry| entry.path())
}

impl Ranks {
    /// Starts a job of which all ranks have joined.
    pub(crate) fn join(fabric: Fabric, count: Rank) -> Self {
        let mut ranks = Self::start(fabric, count);
        ranks.tell_all("join");
        ranks.expect_all("joined");
        ranks
    }

    /// Starts processes that have not joined yet.
    pub(crate) fn start(fabric: Fabric, count: Rank) -> Self {
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pleach-failure-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("the folder is new");
        let earlier = left_about().collect();
        let members = (0..count).map(|rank| Member::start(rank, count, fabric, &folder)).collect();
        let patience = if fabric == Fabric::Verbs { 4 * PATIENCE } else { PATIENCE };
        Self { members, folder, earlier, patience }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn id(&self, rank: Rank) -> u32 {
        self.members[rank as usize].process.id()
    }

    pub(crate) fn tell(&mut self, rank: Rank, line: &str) {
        let input = self.members[rank as usize].process.stdin.as_mut().expect("is piped");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("the rank listens");
    }

    pub(crate) fn tell_all(&mut self, line: &str) {
        (0..self.members.len() as Rank).for_each(|rank| self.tell(rank, line));
    }

    /// The next line of a rank.
    pub(crate) fn hear(&mut self, rank: Rank) -> String {
        let patience = self.patience;
        let member = &mut self.members[rank as usize];
        match member.lines.recv_timeout(patience) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("rank {rank} says nothing for {patience:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                let status = member.process.wait();
                let errors = member.errors.take().map(|errors| errors.join().expect("only reads"));
                panic!("rank {rank} has ended ({status:?}):\n{}", errors.unwrap_or_default());
            }
        }
    }

    pub(crate) fn expect(&mut self, rank: Rank, line: &str) {
        let heard = self.hear(rank);
        assert_eq!(heard, line, "of rank {rank}");
    }

    pub(crate) fn expect_all(&mut self, line: &str) {
        (0..self.members.len() as Rank).for_each(|rank| self.expect(rank, line));
    }

    /// How a call of a rank ended.
    pub(crate) fn outcome(&mut self, rank: Rank) -> Outcome {
        Outcome::parse(&self.hear(rank))
    }

    /// The outcome of a call that has to fail.
    pub(crate) fn failure(&mut self, rank: Rank) -> Failure {
        match self.outcome(rank) {
            Outcome::Failed(failure) => failure,
            Outcome::Done { .. } => panic!("the call of rank {rank} ended well"),
        }
    }

    pub(crate) fn signal(&self, rank: Rank, signal: Signal) {
        kill_process(Pid::from_child(&self.members[rank as usize].process), signal).expect("is not reaped");
    }

    /// Stops a rank, and returns when it is stopped.
    pub(crate) fn stop(&self, rank: Rank) {
        self.signal(rank, Signal::STOP);
        let status = format!("/proc/{}/stat", self.id(rank));
        wait_until("it is stopped", || {
            let status = std::fs::read_to_string(&status).expect("is not reaped");
            status.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
        });
    }

    /// Waits for a rank that a test has killed or told to end.
    pub(crate) fn reap(&mut self, rank: Rank) -> std::process::ExitStatus {
        let process = &mut self.members[rank as usize].process;
        let deadline = now() + PATIENCE;
        loop {
            if let Some(status) = process.try_wait().expect("is a child") {
                return status;
            }
            assert!(now() < deadline, "rank {rank} does not end");
            pause();
        }
    }

    /// Tells these ranks to end and sees that they do, well, and that nothing of theirs is left.
    pub(crate) fn end(mut self, ranks: impl IntoIterator<Item = Rank>) {
        for rank in ranks {
            self.tell(rank, "quit");
            let status = self.reap(rank);
            assert!(status.success(), "rank {rank}: {status}\n{}", self.said(rank));
        }
        let mut ids = BTreeMap::new();
        for rank in 0..self.members.len() as Rank {
            let _ = self.members[rank as usize].process.kill();
            self.reap(rank);
            ids.insert(rank, self.id(rank));
        }
        for path in left_about().filter(|path| !self.earlier.contains(path)) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_theirs = |id: &u32| {
                name.split(|letter: char| !letter.is_ascii_digit()).any(|part| part == id.to_string())
            };
            let is_left = name.contains("pleach") && ids.values().any(is_theirs);
            assert!(!is_left, "{} is left", path.display());
        }
    }

    fn said(&mut self, rank: Rank) -> String {
        let errors = self.members[rank as usize].errors.take();
        errors.map(|errors| errors.join().expect("only reads")).unwrap_or_default()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.process.kill();
            let _ = member.process.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Member {
    fn start(rank: Rank, count: Rank, fabric: Fabric, folder: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("has a path"));
        if fabric == Fabric::Verbs {
            command.env("PLEACH_VERBS_DEVICE", crate::rdma_devices::rdma_device(rank));
        }
        let mut process = command
            .args(["rank_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, format!("{rank} {count} {fabric} {}", folder.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this binary starts");
        let output = BufReader::new(process.stdout.take().expect("is piped"));
        let mut errors = process.stderr.take().expect("is piped");
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness writes the name of the test without ending the line.
                if let Some((_, line)) = line.split_once(MARK)
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let errors = thread::spawn(move || {
            let mut text = Vec::new();
            let _ = errors.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Self { process, lines, errors: Some(errors) }
    }
}

/// How a call ended, by the rank's own words.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Well, with the right result.
    Done {
        /// When it returned.
        at: Nanos,
        /// How long the call took.
        after: Duration,
    },
    Failed(Failure),
}

/// A call that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// When it returned.
    pub(crate) at: Nanos,
    /// How long the call took.
    pub(crate) after: Duration,
    /// Kind of the fault, or of the error where there was none.
    pub(crate) kind: String,
    pub(crate) subject: Option<Rank>,
    /// The text of the error, on which survivors agree.
    pub(crate) text: String,
    /// The same with the call of this rank that was told.
    told: String,
}

impl Outcome {
    fn parse(line: &str) -> Self {
        let words: Vec<_> = line.splitn(6, ' ').collect();
        let nanos = |index: usize| words[index].parse().unwrap_or_else(|_| panic!("{line}"));
        match words[0] {
            "done" => Self::Done { at: Nanos(nanos(1)), after: Duration::from_nanos(nanos(2)) },
            "failed" => {
                let (text, told) = words[5].split_once(TOLD).unwrap_or((words[5], words[5]));
                Self::Failed(Failure {
                    at: Nanos(nanos(1)),
                    after: Duration::from_nanos(nanos(2)),
                    kind: words[3].to_owned(),
                    subject: words[4].parse().ok(),
                    text: text.to_owned(),
                    told: told.to_owned(),
                })
            }
            _ => panic!("{line}"),
        }
    }

    /// When the rank entered the call.
    pub(crate) fn entered(&self) -> Nanos {
        let (Self::Done { at, after } | Self::Failed(Failure { at, after, .. })) = self;
        Nanos(at.0 - after.as_nanos() as u64)
    }
}

impl Failure {
    /// Sees that the failure is about `subject`, and that the finder or this rank was in an
    /// operation that is described so. A loss that is seen between two calls names only the call of
    /// this rank.
    pub(crate) fn expect(&self, kind: &str, subject: Rank, during: &str) {
        assert_eq!((self.kind.as_str(), self.subject), (kind, Some(subject)), "{}", self.text);
        assert!(self.told.contains(during), "'{during}' is not in: {}", self.told);
    }
}

/// Looks again and again until it holds.
pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = now() + PATIENCE;
    while !holds() {
        assert!(now() < deadline, "{what}: not within {PATIENCE:?}");
        pause();
    }
}

/// Lets this time pass.
pub(crate) fn wait(time: Duration) {
    let until = now() + time;
    while now() < until {
        pause();
    }
}

/// Some time between two looks.
pub(crate) fn pause() {
    let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let _ = rustix::event::poll(&mut [], Some(&pause));
}

/// Prints how long something took, for people: the bounds that tests insist on are generous.
pub(crate) fn report(what: &str, fabric: Fabric, took: Duration) {
    println!("{fabric}: {what}: {:.1} ms", took.as_secs_f64() * 1e3);
}
