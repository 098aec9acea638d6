//! The members of one job as a test sees them, and the checkers.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pleach_transport::clock;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::links::Hosts;
use super::member::{ENOUGH, GO_ON, MARK, VARIABLE};
use super::rdma_devices::rdma_device;
use super::{fake_cuda, on_gpu, softroce};

/// How long anything may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a member says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// A step was committed with these contributors; what was applied so far.
    Committed { step: u64, bits: u64, applied: u64 },
    /// A step is repeated after the change from one epoch to another: the seats that left, and
    /// those of the members that go on, as bits.
    Retry { step: u64, epochs: (u64, u64), left: u64, members: u64, change: String },
    /// The session ended with an error.
    End(String),
    /// Registrations, connections, and the number of the last epoch.
    SetUp(u64, u64, u64),
    /// It is a member, on this seat.
    Joined(u32),
    /// It takes part in this step with the neutral element.
    Neutral(u64),
    /// A step was committed, and it has not read the states yet.
    Unread(u64),
    /// Anything else.
    Other(String),
}

impl Told {
    fn of(line: &str) -> Self {
        let mut words = line.splitn(7, ' ');
        let name = words.next().unwrap_or_default();
        let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or(u64::MAX);
        match name {
            "committed" => Self::Committed { step: number(), bits: number(), applied: number() },
            "retry" => {
                let (step, epochs, left, members) = (number(), (number(), number()), number(), number());
                let change = words.next().unwrap_or_default().to_owned();
                Self::Retry { step, epochs, left, members, change }
            }
            "setup" => Self::SetUp(number(), number(), number()),
            "joined" => Self::Joined(number() as u32),
            "neutral" => Self::Neutral(number()),
            "unread" => Self::Unread(number()),
            "end" => Self::End(words.next().unwrap_or_default().to_owned()),
            _ => Self::Other(line.to_owned()),
        }
    }
}

/// See the module.
pub(crate) struct Job {
    fabric: String,
    /// Ranks of the world.
    size: u32,
    /// Those of them that are not there when the job begins.
    absent: Vec<u32>,
    /// With so many it began; those after them came later. Below, members are named by their place
    /// in this list; those that began have their ranks as seats.
    founders: u32,
    settings: String,
    members: Vec<Child>,
    /// What the members say is read by these.
    readers: Vec<JoinHandle<()>>,
    seats: Vec<u32>,
    sender: Sender<(u32, String)>,
    lines: Receiver<(u32, String)>,
    told: Vec<Vec<Told>>,
    /// Members that may not end well.
    struck: Vec<bool>,
    /// Of those that began, these are a process group, to which one signal goes.
    together: Vec<u32>,
    folder: PathBuf,
    /// Those of its members, seats in a row on one, where they have hosts of their own.
    hosts: Option<Hosts>,
}

/// From where random moments come; printed when a check fails.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("PLEACH_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| clock::now().0)
}

impl Job {
    pub(crate) fn start(fabric: &str, size: u32, settings: &[&str]) -> Self {
        Self::start_together(fabric, size, settings, &[])
    }

    /// The same; some of the members get the signals of [`Job::signal_together`].
    pub(crate) fn start_together(fabric: &str, size: u32, settings: &[&str], together: &[u32]) -> Self {
        Self::start_some(fabric, size, &[], settings, together, None)
    }

    /// Starts a world on these hosts.
    pub(crate) fn start_on(hosts: Hosts, fabric: &str, size: u32, settings: &[&str]) -> Self {
        Self::start_some(fabric, size, &[], settings, &[], Some(hosts))
    }

    /// Starts a world but for these ranks.
    pub(crate) fn start_without(fabric: &str, size: u32, absent: &[u32], settings: &[&str]) -> Self {
        Self::start_some(fabric, size, absent, settings, &[], None)
    }

    fn start_some(
        fabric: &str,
        size: u32,
        absent: &[u32],
        settings: &[&str],
        together: &[u32],
        hosts: Option<Hosts>,
    ) -> Self {
        // Relaxed: only uniqueness matters.
        static FOLDERS: AtomicU32 = AtomicU32::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pleach-session-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&folder).expect("the folder is new");
        let (sender, lines) = channel();
        let (fabric, settings, members) = (fabric.to_owned(), settings.join(" "), Vec::new());
        let (seats, told, struck) = (Vec::new(), Vec::new(), Vec::new());
        let (absent, together) = (absent.to_vec(), together.to_vec());
        let founders = size - absent.len() as u32;
        let mut job = Self {
            fabric,
            size,
            absent,
            founders,
            settings,
            members,
            readers: Vec::new(),
            seats,
            sender,
            lines,
            told,
            struck,
            together,
            folder,
            hosts,
        };
        for seat in (0..size).filter(|seat| !job.absent.contains(seat)).collect::<Vec<_>>() {
            job.spawn(seat, &[]);
        }
        job
    }

    /// Starts a process that comes to the running job, with further settings; `tls=MODE` is its
    /// `PLEACH_TLS`. Over RDMA it has the device of its seat. Returns its number.
    pub(crate) fn spawn(&mut self, seat: u32, settings: &[&str]) -> u32 {
        let number = self.members.len() as u32;
        let (size, fabric, folder) = (self.size, &self.fabric, self.folder.display());
        let (tls, settings): (Vec<&str>, Vec<&str>) =
            settings.iter().copied().partition(|setting| setting.starts_with("tls="));
        let tls = tls.iter().filter_map(|setting| Some(("PLEACH_TLS", setting.strip_prefix("tls=")?)));
        let words = format!("{seat} {size} {fabric} {folder} {} {}", self.settings, settings.join(" "));
        {
            let program = std::env::current_exe().expect("a path");
            let mut command = match &self.hosts {
                Some(hosts) => {
                    let mut command = hosts.command((seat as usize * hosts.count()) / size as usize);
                    command.arg(program).stderr(Stdio::inherit());
                    command
                }
                None => Command::new(program),
            };
            command
                .args(["--exact", "member_process", "--ignored", "--nocapture", "--test-threads=1"])
                .env(VARIABLE, words)
                .envs(tls)
                .stdin(Stdio::null())
                .stdout(Stdio::piped());
            if self.fabric == "verbs" {
                command.env("PLEACH_VERBS_DEVICE", rdma_device(seat));
            }
            if self.settings.contains(softroce::ON_LINKS) {
                command.env("PLEACH_INTERFACE", softroce::address(seat));
            }
            if self.settings.contains(on_gpu::SETTING) {
                command.env("LD_LIBRARY_PATH", fake_cuda::folder());
            }
            if number < self.founders && self.together.contains(&number) {
                let first = self.members.get(self.together[0] as usize);
                command.process_group(first.map_or(0, |first| first.id() as i32));
            }
            let mut child = command.spawn().expect("starts");
            let output = BufReader::new(child.stdout.take().expect("is piped"));
            let sender = self.sender.clone();
            self.readers.push(thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    if let Some((_, line)) = line.split_once(MARK) {
                        let _ = sender.send((number, line.to_owned()));
                    }
                }
            }));
            self.members.push(child);
        }
        self.seats.push(seat);
        self.told.push(Vec::new());
        self.struck.push(false);
        number
    }

    fn hear(&mut self, member: u32, line: &str) {
        let told = Told::of(line);
        if let Told::Joined(seat) = told {
            self.seats[member as usize] = seat;
        }
        self.told[member as usize].push(told);
    }

    /// Waits until a member says such a thing.
    pub(crate) fn await_told(&mut self, member: u32, wanted: impl Fn(&Told) -> bool) {
        self.await_one(&[member], wanted);
    }

    /// Waits until one of these members says such a thing. Returns which.
    pub(crate) fn await_one(&mut self, members: &[u32], wanted: impl Fn(&Told) -> bool) -> u32 {
        let until = clock::now() + PATIENCE;
        loop {
            let says = |member: &&u32| self.told[**member as usize].iter().any(&wanted);
            if let Some(member) = members.iter().find(says) {
                return *member;
            }
            let left = until.since(clock::now());
            match self.lines.recv_timeout(left) {
                Ok((member, line)) => self.hear(member, &line),
                Err(_) => panic!("members {members:?} did not say it: {}", self.last()),
            }
        }
    }

    /// Listens for so long.
    pub(crate) fn listen(&mut self, time: Duration) {
        let until = clock::now() + time;
        while let Ok((seat, line)) = self.lines.recv_timeout(until.since(clock::now())) {
            self.hear(seat, &line);
        }
    }

    /// Waits until the first member has made some more steps.
    pub(crate) fn await_further_steps(&mut self) {
        let so_far = self.committed(0).last().map_or(0, |(step, _)| *step);
        self.await_step(0, so_far + 5);
    }

    pub(crate) fn await_step(&mut self, seat: u32, step: u64) {
        self.await_told(seat, |told| matches!(told, Told::Committed { step: of, .. } if *of >= step));
    }

    /// The seats with which the job began, as bits.
    fn founders(&self) -> u64 {
        self.absent.iter().fold((1 << self.size) - 1, |bits, seat| bits & !(1 << seat))
    }

    pub(crate) fn signal(&mut self, seat: u32, signal: Signal) {
        self.struck[seat as usize] = true;
        let id = Pid::from_child(&self.members[seat as usize]);
        // A process that was killed before is there until it is waited for.
        kill_process(id, signal).expect("it is this test's own");
    }

    /// Sends a signal to those that were started together, at once: none of them runs on when
    /// another one has stopped.
    pub(crate) fn signal_together(&mut self, signal: Signal) {
        for seat in &self.together {
            self.struck[*seat as usize] = true;
        }
        let first = Pid::from_child(&self.members[self.together[0] as usize]);
        kill_process_group(first, signal).expect("it is this test's own");
    }

    /// Sends a signal that a member is to end well after.
    pub(crate) fn tell(&mut self, seat: u32, signal: Signal) {
        let id = Pid::from_child(&self.members[seat as usize]);
        kill_process(id, signal).expect("it is this test's own");
    }

    /// Waits until these members have committed a step together.
    pub(crate) fn await_all_of(&mut self, seats: &[u32]) {
        let wanted = seats.iter().fold(0, |bits, seat| bits | 1_u64 << self.seats[*seat as usize]);
        let is_wanted = |told: &Told| matches!(told, Told::Committed { bits, .. } if *bits == wanted);
        for &seat in seats {
            self.await_told(seat, is_wanted);
        }
    }

    /// Waits until these members have committed a step together after all steps of one that has
    /// ended, which was with them before.
    pub(crate) fn await_all_after(&mut self, ended: u32, seats: &[u32]) {
        let wanted = seats.iter().fold(0, |bits, seat| bits | 1_u64 << self.seats[*seat as usize]);
        let last = self.committed(ended).last().map_or(0, |(step, _)| *step);
        let is_wanted = |told: &Told| matches!(told, Told::Committed { step, bits, .. } if *bits == wanted && *step > last);
        for &seat in seats {
            self.await_told(seat, is_wanted);
        }
    }

    /// The hosts of the members.
    pub(crate) fn hosts(&self) -> &Hosts {
        self.hosts.as_ref().expect("it was started on hosts")
    }

    /// Lets those begin that hold on before their first step.
    pub(crate) fn let_go_on(&self) {
        std::fs::write(self.folder.join(GO_ON), []).expect("the folder is there");
    }

    /// Says that it is enough, and waits until all have ended: well, but for those that were
    /// struck.
    pub(crate) fn finish(&mut self) {
        std::fs::write(self.folder.join(ENOUGH), []).expect("the folder is there");
        let until = clock::now() + PATIENCE;
        loop {
            let ended = self.members.iter_mut().all(|child| child.try_wait().expect("its own").is_some());
            match self.lines.recv_timeout(Duration::from_millis(20)) {
                Ok((seat, line)) => self.hear(seat, &line),
                Err(_) if ended => break,
                Err(_) => {}
            }
            assert!(clock::now() < until, "not all have ended: {}", self.last());
        }
        // A process may have ended before its last line was read.
        self.readers.drain(..).for_each(|reader| reader.join().expect("reads"));
        while let Ok((seat, line)) = self.lines.try_recv() {
            self.hear(seat, &line);
        }
        for seat in 0..self.members.len() {
            let status = self.members[seat].wait().expect("its own");
            assert!(status.success() || self.struck[seat], "seat {seat}: {status}, {}", self.last());
        }
    }

    /// What each said last, a line a member.
    pub(crate) fn last(&self) -> String {
        let last = |told: &Vec<Told>| format!("\n{:?}", &told[told.len().saturating_sub(4)..]);
        self.told.iter().map(last).collect()
    }

    /// The seat of each member.
    pub(crate) fn seats(&self) -> &[u32] {
        &self.seats
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
    /// that came so far; and a change is the same on all that tell of it, and names all that left.
    pub(crate) fn check_or(&self, context: &str) {
        let mut steps: BTreeMap<u64, (u32, u64, u64)> = BTreeMap::new();
        let mut changes: BTreeMap<(u64, u64), (u32, &str)> = BTreeMap::new();
        let all = self.told.iter().flatten();
        let members: BTreeMap<u64, u64> = all
            .filter_map(|told| match told {
                Told::Retry { epochs: (_, to), members, .. } => Some((*to, *members)),
                _ => None,
            })
            .chain([(0, self.founders())])
            .collect();
        for (seat, told) in (0..).zip(&self.told) {
            let mut next = if seat < self.founders { Some(0) } else { None };
            // In which it contributes nothing.
            let mut neutral = None;
            for told in told {
                match told {
                    Told::Neutral(step) => neutral = Some(*step),
                    Told::Unread(step) => {
                        assert_eq!((neutral, next), (Some(*step), None), "seat {seat} {context}");
                    }
                    Told::Committed { step, bits, applied } => {
                        // Who came begins with the step that the others are at.
                        assert_eq!(*step, next.unwrap_or(*step), "seat {seat} {context}");
                        next = Some(step + 1);
                        let (by, other, before) = *steps.entry(*step).or_insert((seat, *bits, *applied));
                        assert_eq!(
                            (*bits, *applied),
                            (other, before),
                            "step {step} by seats {seat} and {by} {context}"
                        );
                        let own = self.seats[seat as usize];
                        let contributes = neutral.take() != Some(*step);
                        let has_part = bits >> own & 1 == 1;
                        assert_eq!(has_part, contributes, "seat {seat} in step {step} {context}");
                    }
                    Told::Retry { step, epochs, left, members: after, change } => {
                        neutral = None;
                        assert_eq!(
                            *step,
                            next.unwrap_or(*step),
                            "seat {seat} repeats another step {context}"
                        );
                        let (by, other) = *changes.entry(*epochs).or_insert((seat, change.as_str()));
                        assert_eq!(change, other, "epochs {epochs:?} by seats {seat} and {by} {context}");
                        if let Some(before) = members.get(&epochs.0) {
                            assert_eq!(*left, before & !after, "epochs {epochs:?} by seat {seat} {context}");
                        }
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
