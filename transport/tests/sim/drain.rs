//! Drains under random traffic and faults, by a checker that knows only what the world records.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::sim::{
    Actor, Fault, FaultKinds, Faults, Mutant, Observer, Options, Random, Record, TransferNumber,
};
use pleach_transport::{AtomicOp, Device, Event, Nanos, Rank, Transfer};

use crate::ranks::{Ranks, Submission, harsh, mutated, put, signal};

/// Contract line 17: what must not happen after a `Drained`.
#[derive(Default)]
struct DrainChecker {
    /// By transfer: submitter, peer, and the submitter's drains before it.
    transfers: BTreeMap<TransferNumber, (Rank, Rank, u64)>,
    /// By rank and peer: its drains.
    drains: BTreeMap<(Rank, Rank), u64>,
    /// By rank and peer: how many `Drained` it has polled.
    drained: BTreeMap<(Rank, Rank), u64>,
    wrong: Vec<String>,
}

impl DrainChecker {
    /// The transfer does something to the memory or a signal slot of `owner`, at its peer or at its
    /// submitter.
    fn acts(&mut self, now: Nanos, transfer: TransferNumber, owner: Rank) {
        let Some(&(submitter, peer, before)) = self.transfers.get(&transfer) else { return };
        let other = if owner == submitter { peer } else { submitter };
        let told = self.drained.get(&(owner, other)).copied().unwrap_or_default();
        if before < told {
            let what = format!("{now}: {transfer:?} of {submitter} acts at {owner} after {told} drains");
            self.wrong.push(what);
        }
    }
}

impl Observer for DrainChecker {
    fn observe(&mut self, now: Nanos, record: &Record) {
        match *record {
            Record::Submitted { rank, peer, transfer } => {
                let before = self.drains.get(&(rank, peer)).copied().unwrap_or_default();
                self.transfers.insert(transfer, (rank, peer, before));
            }
            Record::Drains { rank, peer } => *self.drains.entry((rank, peer)).or_default() += 1,
            Record::Drained { rank, peer } => {
                let told = self.drained.entry((rank, peer)).or_default();
                *told += 1;
                let ends = [(rank, peer), (peer, rank)];
                if ends.iter().any(|end| self.drains.get(end).copied().unwrap_or_default() < *told) {
                    self.wrong.push(format!("{now}: {rank} is told before both ends have drained"));
                }
            }
            Record::Access(ref access) => {
                if let Actor::Transfer(transfer, _) = access.by {
                    self.acts(now, transfer, access.owner);
                }
            }
            Record::Signalled { to, transfer, .. } => self.acts(now, transfer, to),
            Record::Completed { rank, transfer, .. } => self.acts(now, transfer, rank),
            _ => {}
        }
    }
}

/// Random transfers and drains between random ranks.
fn traffic(options: Options) -> (Ranks, DrainChecker) {
    let (count, seed) = (options.network.ranks(), options.seed);
    let mut random = Random::new(seed).split("traffic");
    let mut ranks = Ranks::connecting(options);
    let checker: Arc<Mutex<DrainChecker>> = Arc::default();
    ranks.world.observe(Box::new(Arc::clone(&checker)));
    let regions: Vec<_> = (0..count).map(|rank| ranks.register(rank, 4_096)).collect();
    for _ in 0..400 {
        let rank = random.below(u64::from(count)) as Rank;
        let peer = (rank + 1 + random.below(u64::from(count) - 1) as Rank) % count;
        let (here, there) = (&regions[rank as usize], &regions[peer as usize]);
        let submission = match random.below(6) {
            0 => Submission::Signal(signal(2)),
            1 => Transfer::Get { src: there.remote(), dst: here.whole() }.into(),
            2 => {
                let word = there.slice(8..16).unwrap().remote();
                Transfer::Atomic { word, op: AtomicOp::Add(1) }.into()
            }
            _ => put(&here.whole(), there.remote(), 1).into(),
        };
        // Refused while it connects, when the queue is full, and after a loss.
        let _ = ranks.try_submit(rank, peer, submission);
        if random.below(4) == 0 {
            let _ = ranks.device(rank).drain(peer);
            if random.coin() {
                let _ = ranks.device(peer).drain(rank);
            }
        }
        for _ in 0..random.below(8) {
            ranks.step();
        }
    }
    ranks.drain();
    let checker = std::mem::take(&mut *checker.lock().unwrap());
    (ranks, checker)
}

/// Where the world still stands, each end has been told of every drain that both ends made.
fn missing(ranks: &Ranks, checker: &DrainChecker) -> Vec<String> {
    let mut missing = Vec::new();
    for (&(rank, peer), &drains) in &checker.drains {
        let is_up = |rank: Rank, peer: Rank| {
            !ranks.world.is_dead(rank) && !ranks.events[rank as usize].iter().any(|event| is_end(event, peer))
        };
        if !is_up(rank, peer) || !is_up(peer, rank) {
            continue;
        }
        let both = drains.min(checker.drains.get(&(peer, rank)).copied().unwrap_or_default());
        let told = checker.drained.get(&(rank, peer)).copied().unwrap_or_default();
        if told != both {
            missing.push(format!("{rank} was told {told} of {both} drains with {peer}"));
        }
    }
    missing
}

fn is_end(event: &Event, of: Rank) -> bool {
    matches!(event, Event::PeerLost { peer, .. } | Event::Departed { peer } | Event::Severed { peer } if *peer == of)
}

#[test]
fn nothing_from_before_a_drain_acts_after_it_and_every_drain_is_told_under_any_faults() {
    let mut told = 0;
    for seed in 0..120 {
        let mut options = harsh(4, seed);
        if seed % 3 != 0 {
            let kinds = FaultKinds::all().swarm(&mut Random::new(seed));
            options.faults = Faults::draw(&kinds, seed, &options.network, Duration::from_millis(1));
        }
        options.maps = seed % 5 == 0;
        let (ranks, checker) = traffic(options);
        assert_eq!(checker.wrong, [""; 0], "seed {seed}");
        assert_eq!(missing(&ranks, &checker), [""; 0], "seed {seed}");
        told += checker.drained.values().sum::<u64>();
    }
    assert!(told > 1_000, "only {told} drains were told");
}

#[test]
fn the_checker_sees_what_comes_after_a_drain() {
    let mut seen = 0;
    for seed in 0..10 {
        let mutant = Some(Mutant::DrainedBeforeLanding);
        let (_, checker) = traffic(mutated(mutant, harsh(4, seed)));
        seen += usize::from(!checker.wrong.is_empty());
    }
    assert_eq!(seen, 10, "a world that tells too early");
}

#[test]
fn a_drain_without_transfers_takes_the_latency_of_a_message() {
    let mut ranks = Ranks::connected(crate::ranks::options(2, 1));
    let start = ranks.world.now();
    ranks.device(0).drain(1).expect("connected");
    ranks.device(1).drain(0).expect("connected");
    ranks.until(|ranks| {
        ranks.saw(0, &Event::Drained { peer: 1 }) && ranks.saw(1, &Event::Drained { peer: 0 })
    });
    assert_eq!(ranks.world.now() - start, crate::ranks::LATENCY);
}

#[test]
fn a_cut_wire_gives_no_drained_but_a_loss() {
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
        ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        let link = ranks.world.random("link").below(2) as u32;
        ranks.world.inject(Fault::LinkDown { link: pleach_transport::sim::LinkId(link) });
        ranks.device(0).drain(1).expect("not found out yet");
        ranks.device(1).drain(0).expect("not found out yet");
        ranks.drain();
        for (rank, peer) in [(0, 1), (1, 0)] {
            assert!(!ranks.saw(rank, &Event::Drained { peer }), "seed {seed}: {rank}");
            assert!(ranks.lost(rank, peer).is_some(), "seed {seed}: {rank}");
        }
    }
}
