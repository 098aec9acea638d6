//! Pairs that connect on first use, and messages between ranks that are not connected.
//!
//! A run asks for the connections of its plan's peers when it is accepted, and begins when these
//! peers are ready ([`super::admission`]). The peers ask for the same pairs when they make the same
//! call. A peer that is in another call learns from a query of the waiting rank that the pair is
//! wanted ([`super::status_board`]), and connects at its next poll. The status board has the thread
//! of a group poll, so a peer that is in no call connects too. Then calls are compared, and short
//! messages go out, as if all pairs were connected. A peer that does not answer is named at the
//! deadline of the call that waits for the connection.
//!
//! **Invariant:** a pair is asked for once, whoever asks first.

use std::collections::BTreeSet;

use pleach_transport::{Address, ConnectError, Device, Nanos, PostError, Urgency};
use pleach_vocabulary::Rank;

use super::fault::FaultKind;
use super::overlay::Overlay;
use super::{Context, Engine};

/// The addresses of the peers, and which of them this rank has asked for.
pub(crate) struct Connector {
    /// Where not all pairs are connected from the beginning.
    overlay: Option<Overlay>,
    /// By rank; empty where all pairs are connected from the beginning.
    addresses: Vec<Address>,
    /// By rank, as `addresses`.
    requested: Vec<bool>,
    /// Peers that wait for this rank and are not ready.
    awaiting: BTreeSet<Rank>,
}

impl Connector {
    /// `addresses`: by rank; used where there is an overlay.
    pub(crate) fn new(overlay: Option<&Overlay>, addresses: Vec<Address>) -> Self {
        let requested = vec![false; addresses.len()];
        Self { overlay: overlay.cloned(), addresses, requested, awaiting: BTreeSet::new() }
    }

    /// Asks for a pair, unless that was done before.
    fn connect(&mut self, device: &mut dyn Device, peer: Rank) -> Result<(), ConnectError> {
        let Some(address) = self.addresses.get(peer as usize) else { return Ok(()) };
        if std::mem::replace(&mut self.requested[peer as usize], true) {
            return Ok(());
        }
        device.connect(peer, address)
    }
}

impl Context {
    /// Sends a message to a peer; other ranks pass it on if the pair was never connected.
    pub(crate) fn post(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        let device = &mut *self.device;
        let result = device.post(peer, message, Urgency::Ordinary);
        match &self.connector.overlay {
            Some(overlay) if result.is_err() && !self.scratch.connected[peer as usize] => {
                overlay.route((self.rank, peer), message, &mut |hop, message, urgency| {
                    device.post(hop, message, urgency)
                })
            }
            _ => result,
        }
    }
}

impl Engine {
    /// Connects to the peers that have asked for this rank.
    pub(crate) fn connect_to_wanted(&mut self) {
        let wanted = self.board.take_wanted();
        self.context.connector.awaiting.extend(&wanted);
        self.connect_to(wanted);
    }

    /// Whether this rank has to poll though it is in no call: a peer waits for the connection to
    /// it. A peer that is lost ends the group.
    pub(crate) fn is_connecting(&mut self) -> bool {
        let (scratch, queries) = (&self.context.scratch, &self.queries);
        let awaiting = &mut self.context.connector.awaiting;
        awaiting.retain(|peer| !scratch.has(*peer) && !queries.has_departed(*peer));
        !awaiting.is_empty()
    }

    /// Whether this peer is ready.
    pub(crate) fn has_peer(&self, peer: Rank) -> bool {
        self.context.scratch.has(peer)
    }

    /// Whether all pairs are connected from the beginning.
    pub(crate) fn has_all_pairs(&self) -> bool {
        self.context.connector.overlay.is_none()
    }

    /// The first of these peers that is not ready.
    pub(crate) fn first_not_reached(&self, peers: &[Rank]) -> Option<Rank> {
        peers.iter().copied().find(|peer| !self.has_peer(*peer))
    }

    /// Asks for the connections to these peers that are not ready; whether all are. `asks`: these
    /// peers are asked too, whatever they do.
    pub(crate) fn reach(&mut self, peers: &[Rank], asks: bool, now: Nanos) -> bool {
        if self.context.scratch.has_all(peers) {
            return true;
        }
        self.connect_to(peers.iter().copied());
        for peer in peers.iter().copied() {
            if asks && !self.has_peer(peer) && self.works() {
                self.ask_for_life(peer, now);
                self.expect_present(peer, "connecting to it", now);
            }
        }
        false
    }

    /// Asks for the connections to these peers that are not ready. A connection that cannot be
    /// asked for ends the group.
    pub(crate) fn connect_to(&mut self, peers: impl IntoIterator<Item = Rank>) {
        for peer in peers {
            let context = &mut self.context;
            if peer >= context.ranks || context.scratch.connected[peer as usize] {
                continue;
            }
            if let Err(error) = context.connector.connect(&mut *context.device, peer) {
                let now = self.observer.seen_at();
                let fault = self.fault(FaultKind::OutOfReach, peer, error.to_string(), None, now);
                return self.fail(fault, now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use pleach_schedule::generate::{Access, Algorithm, check};
    use pleach_schedule::select::candidates;
    use pleach_transport::sim::{Fault as Injected, Network, Options};
    use pleach_transport::{Nanos, SharedMemory};
    use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

    use super::super::fault::Fault;
    use super::super::{Bytes, RunId, neighbours};
    use crate::call::{Counts, Descriptor};
    use crate::engine::{FaultKind, Plan};
    use crate::simulate::{Cluster, MISMATCH_NOTICED_WITHIN};

    const LATENCY: Duration = Duration::from_micros(20);
    const COUNT: usize = 16;
    const TIMEOUT: Duration = Duration::from_secs(10);

    fn cluster(ranks: u32, maps: bool, faults: &[(Nanos, Injected)]) -> Cluster {
        let network = Network::full_mesh(ranks, 1_000_000_000, LATENCY);
        let mut options = Options { maps, passive: maps, ..Options::new(network, 1) };
        options.faults.timed = faults.to_vec();
        Cluster::connecting_on_use(options, None, true)
    }

    /// A call of a rank on integers of its own number; the bytes that it fills.
    fn start(
        cluster: &mut Cluster,
        rank: Rank,
        collective: Collective,
        algorithm: Option<&Algorithm>,
    ) -> (RunId, Bytes) {
        let member = cluster.members[rank as usize].as_mut().expect("it is alive");
        let counts = Counts::Each(COUNT);
        let (data_type, op) = (DataType::I32, ReduceOp::Sum);
        let descriptor = Descriptor { collective, amount: counts.amount(), data_type, op, tag: 0 };
        let program = match algorithm {
            Some(algorithm) => member.planner.make(collective, algorithm.clone(), Access::Put),
            None => member.planner.program(collective, COUNT * 4, None),
        };
        let plan = Arc::new(Plan::new(program.expect("it fits"), descriptor, counts).expect("it fits"));
        let parts = collective.input_parts(rank, plan.place().1).len();
        let outputs = collective.output_parts(rank, plan.place().1).len();
        let mut bytes = |parts: usize| {
            if parts == 0 {
                return Bytes::None;
            }
            let memory = SharedMemory::new(parts * COUNT * 4).expect("memory");
            let slice = member.engine.device().register(memory).expect("registered").whole();
            let slice = slice.slice(0..parts * COUNT * 4).expect("inside");
            slice.store(&(rank as i32).to_ne_bytes().repeat(parts * COUNT));
            Bytes::Registered(slice)
        };
        let (input, output) = (bytes(parts), bytes(outputs));
        let run = member.start(&plan, input, output.clone(), TIMEOUT).expect("accepted");
        member.engine.await_run(run);
        cluster.wake(rank);
        (run, output)
    }

    fn value(bytes: &Bytes) -> i32 {
        let Bytes::Registered(slice) = bytes else { panic!("it fills no bytes") };
        let bytes = slice.to_vec();
        let (words, _) = bytes.as_chunks::<4>();
        assert!(words.iter().all(|word| word == &words[0]), "{words:?}");
        i32::from_ne_bytes(words[0])
    }

    /// Lets time pass until all these runs have ended.
    fn end(cluster: &mut Cluster, runs: &[(Rank, RunId)]) -> Vec<Result<(), Arc<Fault>>> {
        let mut outcomes = vec![None; runs.len()];
        let ended = cluster.run(|cluster| {
            for (outcome, (rank, run)) in outcomes.iter_mut().zip(runs).filter(|(it, _)| it.is_none()) {
                let engine = &mut cluster.members[*rank as usize].as_mut().expect("it is alive").engine;
                *outcome = engine.take_outcome(*run);
            }
            outcomes.iter().all(Option::is_some)
        });
        ended.unwrap_or_else(|error| panic!("{error}: {outcomes:?}"));
        outcomes.into_iter().flatten().collect()
    }

    fn send_recv(from: Rank, to: Rank) -> Collective {
        Collective::SendRecv { from, to }
    }

    fn connections(cluster: &mut Cluster, rank: Rank) -> usize {
        let member = cluster.members[rank as usize].as_mut().expect("it is alive");
        member.engine.device().info().setup.connected() as usize
    }

    #[test]
    fn a_rank_is_among_the_peers_of_each_of_its_peers() {
        for ranks in [2, 3, 4, 6, 7, 8, 9, 12, 16, 17] {
            let mut cluster =
                Cluster::new(Options::new(Network::full_mesh(ranks, 1_000_000_000, LATENCY), 1));
            let collectives = [
                Collective::AllReduce,
                Collective::AllGather,
                Collective::ReduceScatter,
                Collective::AllToAll,
                Collective::Barrier,
                Collective::Broadcast { root: ranks - 1 },
                Collective::Reduce { root: 0 },
                Collective::Gather { root: ranks / 2 },
                Collective::Scatter { root: 1 },
                send_recv(0, ranks - 1),
            ];
            for collective in collectives {
                for algorithm in candidates(collective, ranks) {
                    for access in [Access::Put, Access::Mapped] {
                        if check(collective, &algorithm, ranks).is_err() {
                            continue;
                        }
                        let make = |member: &mut Option<crate::simulate::Member>| {
                            let planner = &mut member.as_mut().expect("it is alive").planner;
                            planner.make(collective, algorithm.clone(), access).ok()
                        };
                        let programs: Option<Vec<_>> = cluster.members.iter_mut().map(make).collect();
                        let Some(programs) = programs else { continue };
                        for (rank, program) in (0..).zip(&programs) {
                            for peer in program.peers() {
                                let theirs = programs[*peer as usize].peers();
                                assert!(
                                    *peer != rank && theirs.contains(&rank),
                                    "{collective} by {algorithm} ({access}) on {ranks}: {rank} and {peer}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn calls_connect_the_peers_of_their_plans_alone() {
        for (ranks, maps) in [(2, false), (5, true), (21, false), (48, false)] {
            let mut cluster = cluster(ranks, maps, &[]);
            let calls = [
                (Collective::AllReduce, "ring"),
                (Collective::Gather { root: ranks - 1 }, "direct"),
                (Collective::AllReduce, "ring"),
            ];
            let mut peers: Vec<Vec<Rank>> = (0..ranks).map(|rank| neighbours(rank, ranks)).collect();
            for (collective, algorithm) in calls {
                let algorithm: Algorithm = algorithm.parse().expect("an algorithm");
                let runs: Vec<_> =
                    (0..ranks).map(|rank| start(&mut cluster, rank, collective, Some(&algorithm))).collect();
                let ids: Vec<_> = (0..ranks).zip(runs.iter().map(|(run, _)| *run)).collect();
                for outcome in end(&mut cluster, &ids) {
                    outcome.expect("nothing fails");
                }
                let sum = (0..ranks as i32).sum::<i32>();
                for (rank, (_, output)) in (0..).zip(&runs) {
                    if collective == Collective::AllReduce {
                        assert_eq!(value(output), sum, "rank {rank} of {ranks}");
                    }
                    let member = cluster.members[rank as usize].as_mut().expect("it is alive");
                    let program = member.planner.make(collective, algorithm.clone(), Access::Put);
                    peers[rank as usize].extend(program.expect("made before").peers());
                    peers[rank as usize].sort_unstable();
                    peers[rank as usize].dedup();
                    assert_eq!(connections(&mut cluster, rank), peers[rank as usize].len(), "rank {rank}");
                }
            }
            assert!(ranks < 48 || (connections(&mut cluster, 7) as u32) < ranks / 2);
        }
    }

    #[test]
    fn a_message_goes_out_although_its_receiver_first_waits_for_another_one() {
        // Ranks 0, 3 and 6 of 20 are no neighbours.
        let mut cluster = cluster(20, false, &[]);
        let started = [(0, send_recv(0, 3)), (6, send_recv(0, 6)), (3, send_recv(6, 3))];
        let mut first: Vec<_> =
            started.iter().map(|(rank, call)| (*rank, start(&mut cluster, *rank, *call, None).0)).collect();
        // Rank 0 goes on when its first message is sent, then rank 6, then rank 3.
        for (rank, next) in [(0, send_recv(0, 6)), (6, send_recv(6, 3)), (3, send_recv(0, 3))] {
            let before = first.remove(0);
            assert_eq!(before.0, rank);
            end(&mut cluster, &[before])[0].as_ref().expect("it ends");
            let run = start(&mut cluster, rank, next, None).0;
            first.push((rank, run));
        }
        for outcome in end(&mut cluster, &first) {
            outcome.expect("it ends");
        }
        let connected = [0, 3, 6].map(|rank| connections(&mut cluster, rank));
        assert_eq!(connected, [0, 3, 6].map(|rank| neighbours(rank, 20).len() + 2));
    }

    #[test]
    fn ranks_that_were_never_connected_learn_that_they_wait_for_each_other() {
        let mut cluster = cluster(20, false, &[]);
        let runs = [(0, send_recv(3, 0)), (3, send_recv(0, 3))]
            .map(|(rank, call)| (rank, start(&mut cluster, rank, call, None).0));
        for outcome in end(&mut cluster, &runs) {
            assert_eq!(outcome.expect_err("nobody sends").kind, FaultKind::Mismatch);
        }
        assert!(cluster.world.now() < Nanos::ZERO + MISMATCH_NOTICED_WITHIN, "{}", cluster.world.now());
    }

    #[test]
    fn the_verdict_on_two_different_calls_comes_to_all_ranks_also_those_in_no_call() {
        let ranks = 40;
        let mut cluster = cluster(ranks, false, &[]);
        let ring = "ring".parse::<Algorithm>().expect("an algorithm");
        // Rank 17 is in no call.
        let runs: Vec<_> = (0..ranks)
            .filter(|rank| *rank != 17)
            .map(|rank| {
                let call = if rank == 30 { Collective::AllGather } else { Collective::AllReduce };
                (rank, start(&mut cluster, rank, call, Some(&ring)).0)
            })
            .collect();
        let outcomes = end(&mut cluster, &runs);
        let first = outcomes[0].as_ref().expect_err("they differ").to_string();
        for outcome in &outcomes {
            assert_eq!(outcome.as_ref().expect_err("they differ").to_string(), first);
        }
        assert!(cluster.world.now() < Nanos::ZERO + MISMATCH_NOTICED_WITHIN, "{}", cluster.world.now());
        let board = &cluster.members[17].as_ref().expect("it is alive").board;
        assert!(board.has_failed(), "rank 17 was told while it was in no call");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_at_the_deadline_and_one_that_left_at_once() {
        for has_left in [false, true] {
            let mut cluster = cluster(20, false, &[]);
            cluster
                .run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))
                .expect("neighbours connect");
            if has_left {
                cluster.members[3].as_mut().expect("it is alive").engine.leave();
                cluster.wake(3);
            }
            cluster.settle().expect("it settles");
            let run = start(&mut cluster, 0, send_recv(3, 0), None).0;
            let fault = end(&mut cluster, &[(0, run)])[0].clone().expect_err("nobody sends");
            let kind = if has_left { FaultKind::Left } else { FaultKind::TimedOut };
            assert_eq!((fault.kind, fault.subject), (kind, 3), "{fault}");
            let limit = if has_left { Duration::from_millis(500) } else { TIMEOUT * 2 };
            assert!(cluster.world.now() < Nanos::ZERO + limit, "{}", cluster.world.now());
        }
    }

    #[test]
    fn a_rank_that_was_stopped_takes_part_in_the_verdict_if_it_goes_on_soon() {
        // It is silent for long when the deadline passes, and goes on 50 ms later.
        let (at, duration) = (Duration::from_millis(5), TIMEOUT + Duration::from_millis(45));
        let stopped = (Nanos::ZERO + at, Injected::Freeze { rank: 3, duration, watcher: true });
        let mut cluster = cluster(4, false, &[stopped]);
        let run = start(&mut cluster, 0, send_recv(3, 0), None).0;
        let fault = end(&mut cluster, &[(0, run)])[0].clone().expect_err("nobody sends");
        assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 3), "{fault}");
        let board = &cluster.members[0].as_ref().expect("it is alive").board;
        assert!(!board.agreement().has_lost(3), "it was called gone without having been asked");
    }

    #[test]
    fn a_rank_that_dies_while_it_connects_ends_the_group_on_all_ranks() {
        let ranks = 24;
        for at in [5, 30, 45, 60, 100, 5_000].map(Duration::from_micros) {
            let death = (Nanos::ZERO + at, Injected::RankDeath { rank: 9 });
            let mut cluster = cluster(ranks, false, &[death]);
            let direct = "direct".parse::<Algorithm>().expect("an algorithm");
            let call = Collective::Gather { root: 9 };
            for rank in 0..ranks {
                start(&mut cluster, rank, call, Some(&direct));
            }
            let later: Vec<_> = (0..ranks)
                .filter(|rank| *rank != 9)
                .map(|rank| (rank, start(&mut cluster, rank, Collective::Barrier, None).0))
                .collect();
            let outcomes = end(&mut cluster, &later);
            let first = outcomes[0].as_ref().expect_err("rank 9 is dead").to_string();
            for (outcome, (rank, _)) in outcomes.iter().zip(&later) {
                let fault = outcome.as_ref().expect_err("rank 9 is dead");
                assert_eq!((fault.kind, fault.subject), (FaultKind::Lost, 9), "rank {rank}: {fault}");
                assert_eq!(fault.to_string(), first, "rank {rank}, death at {at:?}");
            }
            assert!(cluster.world.now() < Nanos::ZERO + Duration::from_secs(1), "{}", cluster.world.now());
        }
    }
}
