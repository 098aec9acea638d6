//! The members of one job as a test sees them, and the checkers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use pleach_transport::clock;
use rustix::process::{Pid, Signal, kill_process};

use super::member::{ENOUGH, MARK, VARIABLE};

/// How long anything may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a member says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// A step was committed with these contributors; what was applied so far.
    Committed { step: u64, bits: u64, applied: u64 },
    /// A step is repeated in this epoch, for this change.
    Retry { step: u64, epoch: u64, change: String },
    /// The session ended with an error.
    End(String),
    /// Registrations, connections, and the number of the last epoch.
    SetUp(u64, u64, u64),
    /// Anything else.
    Other(String),
}

impl Told {
    fn of(line: &str) -> Self {
        let mut words = line.splitn(4, ' ');
        let name = words.next().unwrap_or_default();
        let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
        match name {
            "committed" => Self::Committed { step: number(), bits: number(), applied: number() },
            "retry" => {
                let (step, epoch) = (number(), number());
                Self::Retry { step, epoch, change: words.next().unwrap_or_default().to_owned() }
            }
            "setup" => Self::SetUp(number(), number(), number()),
            "end" => Self::End(words.next().unwrap_or_default().to_owned()),
            _ => Self::Other(line.to_owned()),
        }
    }
}

/// See the module.
pub(crate) struct Job {
    members: Vec<Child>,
    lines: Receiver<(u32, String)>,
    told: Vec<Vec<Told>>,
    /// Members that may not end well.
    struck: Vec<bool>,
    folder: PathBuf,
}

/// From where random moments come; printed when a check fails.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("PLEACH_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| clock::now().0)
}

impl Job {
    pub(crate) fn start(fabric: &str, size: u32, settings: &[&str]) -> Self {
        // Relaxed: only uniqueness matters.
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pleach-session-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).expect("the folder is new");
        let (sender, lines) = channel();
        let mut members = Vec::new();
        for seat in 0..size {
            let words = format!("{seat} {size} {fabric} {} {}", folder.display(), settings.join(" "));
            let mut child = Command::new(std::env::current_exe().expect("a path"))
                .args(["--exact", "member_process", "--ignored", "--nocapture", "--test-threads=1"])
                .env(VARIABLE, words)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("starts");
            let output = BufReader::new(child.stdout.take().expect("is piped"));
            let sender = sender.clone();
            thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    if let Some((_, line)) = line.split_once(MARK) {
                        let _ = sender.send((seat, line.to_owned()));
                    }
                }
            });
            members.push(child);
        }
        let (told, struck) = (vec![Vec::new(); size as usize], vec![false; size as usize]);
        Self { members, lines, told, struck, folder }
    }

    /// Waits until a member says such a thing.
    pub(crate) fn await_told(&mut self, seat: u32, wanted: impl Fn(&Told) -> bool) {
        let until = clock::now() + PATIENCE;
        while !self.told[seat as usize].iter().any(&wanted) {
            let left = until.since(clock::now());
            match self.lines.recv_timeout(left) {
                Ok((seat, line)) => self.told[seat as usize].push(Told::of(&line)),
                Err(_) => panic!("seat {seat} did not say it: {:#?}", self.last()),
            }
        }
    }

    /// Listens for so long.
    pub(crate) fn listen(&mut self, time: Duration) {
        let until = clock::now() + time;
        while let Ok((seat, line)) = self.lines.recv_timeout(until.since(clock::now())) {
            self.told[seat as usize].push(Told::of(&line));
        }
    }

    pub(crate) fn await_step(&mut self, seat: u32, step: u64) {
        self.await_told(seat, |told| matches!(told, Told::Committed { step: of, .. } if *of >= step));
    }

    pub(crate) fn signal(&mut self, seat: u32, signal: Signal) {
        self.struck[seat as usize] = true;
        let id = Pid::from_child(&self.members[seat as usize]);
        // A process that was killed before is there until it is waited for.
        kill_process(id, signal).expect("it is this test's own");
    }

    /// Waits until these members have committed a step together.
    pub(crate) fn await_all_of(&mut self, seats: &[u32]) {
        let wanted = seats.iter().fold(0, |bits, seat| bits | 1_u64 << seat);
        let is_wanted = |told: &Told| matches!(told, Told::Committed { bits, .. } if *bits == wanted);
        for &seat in seats {
            self.await_told(seat, is_wanted);
        }
    }

    /// Says that it is enough, and waits until all have ended: well, but for those that were
    /// struck.
    pub(crate) fn finish(&mut self) {
        std::fs::write(self.folder.join(ENOUGH), []).expect("the folder is there");
        let until = clock::now() + PATIENCE;
        loop {
            let ended = self.members.iter_mut().all(|child| child.try_wait().expect("its own").is_some());
            match self.lines.recv_timeout(Duration::from_millis(20)) {
                Ok((seat, line)) => self.told[seat as usize].push(Told::of(&line)),
                Err(_) if ended => break,
                Err(_) => {}
            }
            assert!(clock::now() < until, "not all have ended: {:#?}", self.last());
        }
        for seat in 0..self.members.len() {
            let status = self.members[seat].wait().expect("its own");
            assert!(status.success() || self.struck[seat], "seat {seat}: {status}, {:#?}", self.last());
        }
    }

    /// What each said last.
    fn last(&self) -> Vec<&[Told]> {
        self.told.iter().map(|told| &told[told.len().saturating_sub(4)..]).collect()
    }

    pub(crate) fn told(&self, seat: u32) -> &[Told] {
        &self.told[seat as usize]
    }

    /// The steps that a member was told are committed, each with its contributors.
    pub(crate) fn committed(&self, seat: u32) -> Vec<(u64, u64)> {
        let committed = |told: &Told| match told {
            Told::Committed { step, bits, .. } => Some((*step, *bits)),
            _ => None,
        };
        self.told(seat).iter().filter_map(committed).collect()
    }

    pub(crate) fn retries(&self, seat: u32) -> usize {
        self.told(seat).iter().filter(|told| matches!(told, Told::Retry { .. })).count()
    }

    pub(crate) fn ends<'a>(&'a self, seat: u32) -> Vec<&'a str> {
        let end = |told: &'a Told| match told {
            Told::End(name) => Some(name.as_str()),
            _ => None,
        };
        self.told(seat).iter().filter_map(end).collect()
    }

    pub(crate) fn set_up(&self, seat: u32) -> (u64, u64, u64) {
        let set_up = self.told(seat).iter().find_map(|told| match told {
            Told::SetUp(registered, connected, epoch) => Some((*registered, *connected, *epoch)),
            _ => None,
        });
        set_up.expect("was said at the end")
    }

    pub(crate) fn check(&self) {
        self.check_or("");
    }

    /// Whatever happened: each member applied steps one after the other, each once; two members
    /// applied the same; what anybody was told is committed, the dead included, is committed by all
    /// that came so far; and a change is the same on all that tell of it.
    pub(crate) fn check_or(&self, context: &str) {
        let mut steps: BTreeMap<u64, (u32, u64, u64)> = BTreeMap::new();
        let mut changes: BTreeMap<u64, (u32, &str)> = BTreeMap::new();
        for (seat, told) in (0..).zip(&self.told) {
            let mut next = 0;
            for told in told {
                match told {
                    Told::Committed { step, bits, applied } => {
                        assert_eq!(*step, next, "seat {seat} {context}");
                        next += 1;
                        let (by, other, before) = *steps.entry(*step).or_insert((seat, *bits, *applied));
                        assert_eq!(
                            (*bits, *applied),
                            (other, before),
                            "step {step} by seats {seat} and {by} {context}"
                        );
                        assert_eq!(bits >> seat & 1, 1, "seat {seat} has part in step {step} {context}");
                    }
                    Told::Retry { step, epoch, change } => {
                        assert_eq!(*step, next, "seat {seat} repeats another step {context}");
                        let (by, other) = *changes.entry(*epoch).or_insert((seat, change.as_str()));
                        assert_eq!(change, other, "epoch {epoch} by seats {seat} and {by} {context}");
                    }
                    _ => {}
                }
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.members {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
