//! Ranks are threads; their devices are made of a table that says who wants to connect to whom.

use std::collections::BTreeSet;
use std::sync::{Mutex, mpsc};
use std::thread;

use super::*;
use crate::Nanos;
use crate::device::{
    Address, Armed, ConnectError, DeviceInfo, Flush, Incarnation, LossCause, MapError, Meeting, PostError,
    Reach, RegisterError, SubmitError, Submitted, Transfer, TransferId, Urgency, Wake,
};
use crate::memory::Memory;
use crate::other_user::{as_nobody, can_act_as_nobody};
use crate::ports;
use crate::region::{Mapped, ReadOnlyMapped, Region, RemoteSlice};
use crate::rendezvous::{ExplicitWorld, FabricError, Launcher, Rendezvous, TcpStore};
use crate::signals::{Signal, Signals};

type Wants = Arc<Mutex<BTreeSet<(String, Rank, Rank)>>>;

/// The devices that have gone, by fabric and rank.
type Gone = Arc<Mutex<BTreeSet<(String, Rank)>>>;

/// What goes wrong with a fabric at a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Make,
    Reach,
    /// It sees its peers go.
    Lose,
    /// It may open no files for them.
    Files,
    /// As `Files`, and its peers see its device go long before the device has gone.
    FilesAndSlow,
}

/// How long a slow device takes to go: many times the interval at which peers look.
const SLOW: Duration = Duration::from_millis(300);

/// One rank's fabrics: pairs are connected when both want it.
struct Paper {
    wants: Wants,
    gone: Gone,
    rank: Rank,
    troubles: Vec<(Fabric, Trouble)>,
    made: Vec<Fabric>,
}

impl DeviceFactory for Paper {
    fn make(
        &mut self,
        fabric: Fabric,
        host: HostId,
        hosts: &[HostId],
        config: DeviceConfig,
    ) -> Result<Box<dyn Device>, FabricError> {
        assert_eq!(hosts[config.rank as usize], host);
        self.made.push(fabric);
        if self.troubles.contains(&(fabric, Trouble::Make)) {
            return Err(FabricError { source: "out of paper".into() });
        }
        let info = paper_info(self.rank, fabric, config.world_size);
        let mute = self.troubles.contains(&(fabric, Trouble::Reach));
        let losses = [
            (Trouble::Lose, LossCause::ConnectionClosed),
            (Trouble::Files, LossCause::Files { most: 7 }),
            (Trouble::FilesAndSlow, LossCause::Files { most: 7 }),
        ];
        let loss = losses.into_iter().find(|(trouble, _)| self.troubles.contains(&(fabric, *trouble)));
        let loses = loss.map(|(_, cause)| cause);
        let (wants, gone, rank) = (Arc::clone(&self.wants), Arc::clone(&self.gone), self.rank);
        let is_slow = self.troubles.contains(&(fabric, Trouble::FilesAndSlow));
        let responder = Arc::clone(&config.responder);
        let (waiting, connected) = (Vec::new(), Vec::new());
        Ok(Box::new(PaperDevice {
            info,
            fabric,
            rank,
            wants,
            gone,
            waiting,
            connected,
            mute,
            loses,
            is_slow,
            responder,
        }))
    }
}

fn paper_info(rank: Rank, fabric: Fabric, world_size: u32) -> DeviceInfo {
    let reach = Reach { fabric: "paper", maps: false, passive: false, queue_depth: 1 };
    DeviceInfo {
        rank,
        incarnation: Incarnation(u64::from(rank)),
        address: Address(format!("{fabric}:{rank}")),
        fabric: "paper",
        registers_freely: true,
        signal_slots: 1,
        transfer_bytes_max: 0,
        reach: vec![reach; world_size as usize],
        waker: Arc::new(Silent),
        setup: Arc::default(),
    }
}

struct PaperDevice {
    info: DeviceInfo,
    fabric: Fabric,
    rank: Rank,
    wants: Wants,
    gone: Gone,
    waiting: Vec<Rank>,
    connected: Vec<Rank>,
    mute: bool,
    /// How it loses whom it is to connect to.
    loses: Option<LossCause>,
    is_slow: bool,
    responder: Arc<dyn Responder>,
}

impl Drop for PaperDevice {
    fn drop(&mut self) {
        self.gone.lock().expect("whole").insert((self.fabric.to_string(), self.rank));
        if self.is_slow {
            let (_sender, never) = mpsc::channel::<()>();
            let _ = never.recv_timeout(SLOW);
        }
    }
}

struct Silent;

impl Wake for Silent {
    fn wake(&self) {}
}

// SAFETY: it registers, maps and carries nothing.
#[allow(unsafe_code)]
unsafe impl Device for PaperDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn register(&mut self, _memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        Err(RegisterError::NotShareable { fabric: "paper" })
    }
    fn register_for(&mut self, _peer: Rank, _memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        Err(RegisterError::NotShareable { fabric: "paper" })
    }
    fn map(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: "paper" })
    }
    fn map_read_only(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        Err(MapError::Unsupported { fabric: "paper" })
    }
    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        assert_eq!(address.0, format!("{}:{peer}", self.fabric), "each peer's own address");
        if !self.mute {
            self.wants.lock().expect("whole").insert((self.fabric.to_string(), self.rank, peer));
        }
        self.waiting.push(peer);
        Ok(())
    }
    fn meet(&mut self, _peer: Rank, _meeting: Meeting<'_>) -> Result<(), ConnectError> {
        Err(ConnectError::OtherWorld { fabric: "paper" })
    }
    fn incarnation(&self, _peer: Rank) -> Option<Incarnation> {
        None
    }
    fn sever(&mut self, _peer: Rank) {}
    fn submit(&mut self, peer: Rank, _transfer: Transfer, _id: TransferId) -> Result<Submitted, SubmitError> {
        Err(SubmitError::NotConnected { peer })
    }
    fn signal(&mut self, peer: Rank, _: &Signal, _: TransferId) -> Result<Submitted, SubmitError> {
        Err(SubmitError::NotConnected { peer })
    }
    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        Err(SubmitError::NotConnected { peer })
    }
    fn signal_slots(&self, _peer: Rank) -> Signals {
        unreachable!("nothing is sent")
    }
    fn post(&mut self, peer: Rank, _: &[u8], _: Urgency) -> Result<(), PostError> {
        Err(PostError::NotConnected { peer })
    }
    fn poll(&mut self, _now: Nanos, events: &mut Vec<Event>) {
        if let Some(cause) = &self.loses {
            events.extend(self.waiting.drain(..).map(|peer| Event::PeerLost { peer, cause: cause.clone() }));
            return;
        }
        let gone = self.gone.lock().expect("whole");
        self.connected.retain(|&peer| {
            let has_gone = gone.contains(&(self.fabric.to_string(), peer));
            if has_gone {
                events.push(Event::PeerLost { peer, cause: LossCause::ConnectionClosed });
            }
            !has_gone
        });
        let wants = self.wants.lock().expect("whole");
        self.waiting.retain(|&peer| {
            let both = !self.mute && wants.contains(&(self.fabric.to_string(), peer, self.rank));
            if both {
                self.connected.push(peer);
                events.push(Event::Connected { peer });
                self.responder.message(peer, b"early");
            }
            !both
        });
    }
    fn arm(&mut self) -> Option<Armed> {
        None
    }
    fn leave(&mut self) {}
    fn flush(&mut self, _: Flush) -> bool {
        true
    }
}

/// Counts what comes through the gate.
#[derive(Default)]
struct Counter(Mutex<Vec<Rank>>);

impl Responder for Counter {
    fn message(&self, from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        self.0.lock().expect("whole").push(from);
        None
    }
    fn lost(&self, peer: Rank, cause: &LossCause) {
        panic!("rank {peer} is address_of lost: {cause}");
    }
}

/// A job under test: what each process says it is.
struct Job {
    rendezvous: Rendezvous,
    processes: Vec<Process>,
    timeout: Duration,
    /// So many ranks are enough to begin, where it is said.
    founding: Option<Founding>,
}

#[derive(Clone)]
struct Process {
    rank: Rank,
    world_size: u32,
    host: Option<&'static str>,
    fabric: FabricChoice,
    knob: &'static str,
    troubles: Vec<(Fabric, Trouble)>,
}

impl Job {
    fn of(world_size: u32) -> Self {
        let port = ports::reserve(1);
        let process = |rank| Process {
            rank,
            world_size,
            host: None,
            fabric: FabricChoice::Auto,
            knob: "1",
            troubles: Vec::new(),
        };
        Self {
            rendezvous: Rendezvous::Tcp { host: "127.0.0.1".to_owned(), port },
            processes: (0..world_size).map(process).collect(),
            timeout: Duration::from_secs(60),
            founding: None,
        }
    }

    /// Of so many ranks these are there, and `fewest` are enough.
    fn with_some(world_size: u32, fewest: u32, ranks: &[Rank]) -> Self {
        let mut job = Self::of(world_size);
        job.processes.retain(|process| ranks.contains(&process.rank));
        job.founding = Some(Founding::new(world_size, fewest, Duration::from_millis(50)));
        job
    }

    /// How each process's joining ends: the fabric and what came early, or the error's text.
    fn run(&self) -> Vec<Result<(Fabric, usize), String>> {
        let (wants, gone) = (Wants::default(), Gone::default());
        thread::scope(|scope| {
            let run = |process: Process| -> Result<_, JoinError> {
                let (wants, gone) = (Arc::clone(&wants), Arc::clone(&gone));
                let rendezvous = self.rendezvous.clone();
                let Process { rank, world_size, troubles, .. } = process;
                let world = World {
                    rank,
                    world_size,
                    rendezvous: Some(rendezvous),
                    host: process.host.map(str::to_owned),
                    launcher: Launcher::Arguments,
                    ..World::alone()
                };
                let options = JoinOptions {
                    fabric: process.fabric,
                    knobs: vec![("chunk-bytes".to_owned(), process.knob.to_owned())],
                    signal_slots: 1,
                    timeout: self.timeout,
                };
                let counter = Arc::new(Counter::default());
                let mut fabrics = Paper { wants, gone, rank, troubles, made: Vec::new() };
                let responder = Arc::<Counter>::clone(&counter);
                let joined = match self.founding {
                    None => join_over(&world, &options, responder, &mut fabrics),
                    Some(_) => {
                        let store = world.open_store(now() + self.timeout)?.expect("has an address");
                        let protocol =
                            JoinProtocol::new(&world, &options, now(), store, responder, &mut fabrics);
                        run_with_all(JoinProtocol { founding: self.founding, ..protocol })
                    }
                };
                let joined = joined?;
                assert_eq!((joined.rank, joined.world_size), (rank, world_size));
                let met = self.founding.map_or(world_size as usize, |_| self.processes.len());
                assert_eq!(joined.hosts.len(), met);
                Ok((joined.fabric, counter.0.lock().expect("whole").len()))
            };
            let handles: Vec<_> =
                self.processes.iter().cloned().map(|process| scope.spawn(move || run(process))).collect();
            let joined = handles.into_iter().map(|handle| handle.join().expect("no rank panics"));
            joined.map(|joined| joined.map_err(|error| error.to_string())).collect()
        })
    }
}

#[test]
fn all_ranks_meet_and_share_memory_where_they_can() {
    for world_size in [1, 2, 5] {
        let results = Job::of(world_size).run();
        // What peers said early came through, once each.
        let expected = Ok((Fabric::Shm, world_size as usize - 1));
        assert!(results.iter().all(|result| *result == expected), "{results:?}");
    }
}

#[test]
fn enough_ranks_meet_without_the_others_and_are_named_by_their_ranks() {
    let ranks = [0, 2, 4];
    let results = Job::with_some(5, 2, &ranks).run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::Shm, 2))), "{results:?}");
    assert_eq!(Job::with_some(3, 1, &[0]).run(), [Ok((Fabric::Shm, 0))], "alone");
    let mut job = Job::with_some(5, 2, &ranks);
    job.processes[1].host = Some("elsewhere");
    job.processes[2].host = Some("elsewhere");
    let results = job.run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::HybridVerbs, 2))), "{results:?}");
    job.processes.iter_mut().for_each(|process| process.fabric = FabricChoice::Only(Fabric::Shm));
    for error in job.run().into_iter().map(|result| result.expect_err("two hosts")) {
        assert!(error.contains("rank 0 on ") && error.contains("rank 2 on elsewhere"), "{error}");
    }
    let mut job = Job::with_some(5, 2, &ranks);
    job.processes[2].troubles = vec![(Fabric::Shm, Trouble::Make), (Fabric::Tcp, Trouble::Make)];
    for error in job.run().into_iter().map(|result| result.expect_err("no fabric is left")) {
        assert!(error.contains("fabric tcp not usable: rank 4: out of paper"), "{error}");
    }
}

#[test]
fn where_too_few_ranks_come_the_missing_ones_are_named() {
    let mut job = Job::with_some(5, 4, &[0, 2, 4]);
    job.timeout = Duration::from_millis(600);
    for result in job.run() {
        let error = result.expect_err("four are enough");
        assert!(error.contains("missing ranks: ranks 1, 3 of 5 did not come within"), "{error}");
        assert!(error.contains("and 4 are enough to begin"), "{error}");
    }
}

#[test]
fn all_ranks_take_sockets_when_one_cannot_share_memory_and_nobody_hears_of_the_attempt() {
    for trouble in [Trouble::Make, Trouble::Lose] {
        let mut job = Job::of(3);
        job.processes[1].troubles = vec![(Fabric::Shm, trouble)];
        let results = job.run();
        assert!(results.iter().all(|result| *result == Ok((Fabric::Tcp, 2))), "{trouble:?}: {results:?}");
    }
}

#[test]
fn ranks_share_memory_inside_hosts_and_take_rdma_across_where_all_have_it_else_sockets() {
    let mut job = Job::of(4);
    job.processes[1].host = Some("elsewhere");
    job.processes[3].host = Some("elsewhere");
    let results = job.run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::HybridVerbs, 3))), "{results:?}");
    job.processes[2].troubles = vec![(Fabric::HybridVerbs, Trouble::Make), (Fabric::Verbs, Trouble::Lose)];
    let results = job.run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::Hybrid, 3))), "no RDMA: {results:?}");
    for (rank, host) in ["a", "b", "c", "d"].into_iter().enumerate() {
        job.processes[rank].host = Some(host);
    }
    let results = job.run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::Tcp, 3))), "nobody is near: {results:?}");
    let mut job = Job::of(3);
    job.processes[2].host = Some("elsewhere");
    job.processes[0].troubles = vec![(Fabric::HybridVerbs, Trouble::Make), (Fabric::Hybrid, Trouble::Make)];
    let results = job.run();
    assert!(results.iter().all(|result| *result == Ok((Fabric::Tcp, 2))), "a way is left: {results:?}");
    job.processes.iter_mut().for_each(|process| process.fabric = FabricChoice::Only(Fabric::Hybrid));
    for result in job.run() {
        let error = result.expect_err("it was asked for");
        assert!(error.contains("fabric shm+tcp not usable: rank 0: out of paper"), "{error}");
    }
}

#[test]
fn a_fabric_that_was_asked_for_is_never_replaced() {
    let shm = FabricChoice::Only(Fabric::Shm);
    let mut job = Job::of(3);
    job.processes.iter_mut().for_each(|process| process.fabric = shm);
    job.processes[2].troubles = vec![(Fabric::Shm, Trouble::Make)];
    for result in job.run() {
        let error = result.expect_err("shm does not do");
        assert!(error.contains("fabric shm not usable: rank 2: out of paper"), "{error}");
    }
    let mut job = Job::of(2);
    job.processes.iter_mut().for_each(|process| process.fabric = shm);
    job.processes[1].host = Some("elsewhere");
    for result in job.run() {
        let error = result.expect_err("not one host");
        assert!(error.contains("no shared memory") && error.contains("rank 1 on elsewhere"), "{error}");
        assert!(error.contains("PLEACH_HOST differs"), "{error}");
    }
}

#[test]
fn ranks_that_disagree_learn_both_values_and_both_ranks() {
    let mut job = Job::of(3);
    job.processes[1].knob = "2";
    job.timeout = Duration::from_secs(5);
    for (process, result) in job.run().into_iter().enumerate() {
        let error = result.expect_err("they disagree");
        let is_told = error.contains("ranks disagree: chunk-bytes is ") && error.contains("2 at rank 1");
        // Rank 2 may come when the others have ended, and finds nobody then.
        assert!(is_told || process == 2 && error.contains("rank 0 is missing"), "{error}");
    }
    let mut job = Job::of(2);
    job.processes[1].fabric = FabricChoice::Only(Fabric::Tcp);
    for result in job.run() {
        let error = result.expect_err("they disagree");
        assert!(error.contains("fabric is auto at rank 0 and tcp at rank 1"), "{error}");
    }
}

#[test]
fn two_processes_that_claim_one_rank_are_told_so() {
    let mut job = Job::of(4);
    job.processes[3].rank = 1;
    job.timeout = Duration::from_secs(5);
    for (process, result) in job.run().into_iter().enumerate() {
        let error = result.expect_err("rank 3 is missing");
        let is_told = error.contains("both claim to be rank 1");
        // Rank 2 may come when the others have ended, and finds nobody then.
        assert!(is_told || process == 2 && error.contains("rank 0 is missing"), "{error}");
    }
}

#[test]
fn a_fifth_rank_does_not_stop_a_world_of_four() {
    let mut job = Job::of(4);
    job.processes.push(Process { rank: 4, world_size: 5, ..job.processes[0].clone() });
    job.timeout = Duration::from_secs(5);
    let results = job.run();
    let error = results[4].as_ref().expect_err("there is no rank 4");
    let address_of = error.contains("the world size is 4 at rank 0 and 5 at rank 4");
    // It may come when the four are through, or find nobody any more.
    assert!(
        address_of || error.starts_with("world complete") || error.starts_with("rank 0 is missing"),
        "{error}"
    );
    assert!(results[..4].iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_rank_that_never_comes_is_named_by_all_others() {
    let mut job = Job::of(4);
    job.processes.remove(2);
    job.timeout = Duration::from_secs(6);
    for result in job.run() {
        let error = result.expect_err("rank 2 is missing");
        assert!(error.contains("missing ranks: rank 2 of 4"), "{error}");
    }
}

#[test]
fn a_rank_that_is_not_reached_is_named() {
    let mut job = Job::of(3);
    job.processes.iter_mut().for_each(|process| process.fabric = FabricChoice::Only(Fabric::Tcp));
    job.processes[2].troubles = vec![(Fabric::Tcp, Trouble::Lose)];
    for result in job.run() {
        let error = result.expect_err("not connected");
        assert!(error.contains("fabric tcp not usable: rank "), "{error}");
    }
}

#[test]
fn ranks_that_reach_nobody_until_the_time_is_up_still_tell_each_other_that() {
    let mut job = Job::of(3);
    job.timeout = Duration::from_secs(6);
    for process in &mut job.processes {
        process.fabric = FabricChoice::Only(Fabric::Tcp);
        process.troubles = vec![(Fabric::Tcp, Trouble::Reach)];
    }
    for result in job.run() {
        let error = result.expect_err("not connected");
        assert!(error.contains("fabric tcp not usable: rank 0: ranks 1, 2 not connected within "), "{error}");
    }
}

#[test]
fn the_rank_that_knows_the_cause_is_named_and_not_one_that_only_saw_it_go() {
    let mut job = Job::of(4);
    job.processes.iter_mut().for_each(|process| process.fabric = FabricChoice::Only(Fabric::Verbs));
    job.processes[2].troubles = vec![(Fabric::Verbs, Trouble::Files)];
    for rank in [0, 1, 3] {
        job.processes[rank].troubles = vec![(Fabric::Verbs, Trouble::Lose)];
    }
    for result in job.run() {
        let error = result.expect_err("not connected");
        assert!(
            error.contains("fabric verbs not usable: rank 2: ") && error.contains("no more than 7 files"),
            "{error}"
        );
    }
}

#[test]
fn the_line_of_a_rank_whose_device_is_seen_to_go_is_waited_for() {
    let mut job = Job::of(3);
    job.processes.iter_mut().for_each(|process| process.fabric = FabricChoice::Only(Fabric::Tcp));
    job.processes[2].troubles = vec![(Fabric::Tcp, Trouble::FilesAndSlow)];
    for result in job.run() {
        let error = result.expect_err("not connected");
        assert!(
            error.contains("fabric tcp not usable: rank 2: ") && error.contains("no more than 7 files"),
            "{error}"
        );
    }
}

#[test]
fn without_a_place_several_ranks_cannot_meet() {
    let world = World { world_size: 2, ..World::alone() };
    let options = JoinOptions {
        fabric: FabricChoice::Auto,
        knobs: Vec::new(),
        signal_slots: 1,
        timeout: Duration::from_secs(1),
    };
    let (wants, gone) = (Wants::default(), Gone::default());
    let mut fabrics = Paper { wants, gone, rank: 0, troubles: Vec::new(), made: Vec::new() };
    let error =
        join_over(&world, &options, Arc::new(Counter::default()), &mut fabrics).expect_err("no place");
    assert!(error.to_string().contains("PLEACH_RENDEZVOUS"), "{error}");
    assert!(fabrics.made.is_empty());
    assert!(ExplicitWorld::default().rendezvous.is_none());
}

/// Makes no device, and notes whether the secret may be used beyond this host.
struct Noting(Vec<bool>);

impl DeviceFactory for Noting {
    fn make(
        &mut self,
        _fabric: Fabric,
        _host: HostId,
        _hosts: &[HostId],
        config: DeviceConfig,
    ) -> Result<Box<dyn Device>, FabricError> {
        let secret = config.secret.expect("devices always have one");
        self.0.push(!secret.is_of_this_host());
        Err(FabricError { source: "only looking".into() })
    }
}

#[test]
fn a_rank_that_is_alone_has_its_users_secret_or_one_of_its_own() {
    let timeout = Duration::from_secs(60);
    let fabric = FabricChoice::Only(Fabric::Tcp);
    let options = JoinOptions { fabric, knobs: Vec::new(), signal_slots: 1, timeout };
    let mut noting = Noting(Vec::new());
    for secret in [None, Some(Secret::new(b"given by the user"))] {
        let world = World { secret, ..World::alone() };
        let _ = join_over(&world, &options, Arc::new(Quiet), &mut noting).expect_err("only looking");
    }
    assert_eq!(noting.0, [false, true]);
}

struct Quiet;

impl Responder for Quiet {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// How rank 0 of root and rank 1 of another user join at a store that lets in both.
fn join_as_two_users(secret: Option<&Secret>) -> [Result<Fabric, String>; 2] {
    let address = format!("127.0.0.1:{}", ports::reserve(1));
    let (deferred_responder, timeout) = (Secret::new(b"what the store lets in by"), Duration::from_secs(60));
    let join = |rank| {
        let store =
            TcpStore::open(&address, rank, 2, Some(&deferred_responder), now() + timeout).expect("opens");
        let secret = secret.cloned();
        let world = World { rank, world_size: 2, secret, launcher: Launcher::Arguments, ..World::alone() };
        let options = JoinOptions { fabric: FabricChoice::Auto, knobs: Vec::new(), signal_slots: 1, timeout };
        let joined = join_at(Box::new(store), &world, &options, Arc::new(Quiet));
        joined.map(|joined| joined.fabric).map_err(|error| error.to_string())
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| as_nobody(|| join(1)));
        [join(0), other.join().expect("it does not panic")]
    })
}

#[test]
fn two_users_are_both_refused_without_a_secret_instead_of_taking_sockets() {
    if !can_act_as_nobody() {
        return;
    }
    for refused in join_as_two_users(None) {
        let text = refused.expect_err("they are two users");
        assert!(
            text.starts_with("several users: rank 0 on ") && text.contains("PLEACH_SECRET_FILE"),
            "{text}"
        );
    }
    let secret = Secret::new(b"known to both users");
    assert_eq!(join_as_two_users(Some(&secret)), [Ok(Fabric::Tcp), Ok(Fabric::Tcp)]);
}
