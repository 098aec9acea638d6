//! The simulator: that it is exact, reproducible, as free as the contract allows, and that its
//! mutants are what they claim.

mod drain;
mod failures;
mod ranks;
mod returning;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::sim::{
    AccessKind, Actor, FaultKinds, Faults, Mutant, Network, Observer, Options, Random, Record,
    TransferNumber, World,
};
use pleach_transport::{
    AtomicOp, Device, Event, Inline, Nanos, Rank, RegionKey, RemoteSlice, Signal, Source, SubmitError,
    Transfer, TransferError,
};
use ranks::{GB_PER_S, LATENCY, Ranks, Submission, harsh, mutated, options, put, signal};

#[test]
fn without_faults_a_put_is_seen_after_latency_plus_bytes_over_bandwidth() {
    for passive in [false, true] {
        let mut ranks = Ranks::connected(Options { passive, ..options(2, 1) });
        let (ours, theirs) = (ranks.register(0, 5_000), ranks.register(1, 5_000));
        ours.whole().store(&[7; 5_000]);
        let start = ranks.world.now();
        ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 3));
        ranks.until(|ranks| ranks.count(1, 0, 3) == 1);
        assert_eq!(ranks.world.now() - start, LATENCY + Duration::from_nanos(5_000));
        assert_eq!(theirs.whole().to_vec(), [7; 5_000]);
    }
}

#[test]
fn a_get_takes_the_way_there_and_back() {
    let mut ranks = Ranks::connected(options(2, 1));
    let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
    theirs.whole().store(&[9; 1_000]);
    let start = ranks.world.now();
    let id = ranks.submit(0, 1, Transfer::Get { src: theirs.remote(), dst: ours.whole() });
    ranks.until(|ranks| ranks.done(0, id) == Some(Ok(0)));
    assert_eq!(ranks.world.now() - start, 2 * LATENCY + Duration::from_nanos(1_000));
    assert_eq!(ours.whole().to_vec(), [9; 1_000]);
}

/// Puts of random spans between random ranks, each with a signal of its own signal slot, as fast as
/// queues allow.
fn traffic(options: Options, transfers: u64) -> (World, Vec<String>) {
    let (count, seed) = (options.network.ranks(), options.seed);
    let mut random = Random::new(seed).split("traffic");
    let mut ranks = Ranks::connecting(options);
    let regions: Vec<_> = (0..count).map(|rank| ranks.register(rank, 4_096)).collect();
    for _ in 0..transfers {
        let rank = random.below(u64::from(count)) as Rank;
        let peer = (rank + 1 + random.below(u64::from(count) - 1) as Rank) % count;
        let (start, len) = (random.index(2_048), random.index(2_048));
        let src = regions[rank as usize].slice(start..start + len).unwrap();
        let dst = regions[peer as usize].slice(start..start + len).unwrap().remote();
        let _ = ranks.try_submit(rank, peer, put(&src, dst, random.below(16) as u16));
        for _ in 0..random.below(8) {
            ranks.step();
        }
    }
    ranks.drain();
    (ranks.world.clone(), ranks.events.iter().map(|events| format!("{events:?}")).collect())
}

#[test]
fn the_same_seed_gives_the_same_hash_and_another_one_another() {
    let mut hashes = BTreeSet::new();
    for seed in 0..20 {
        let options = || {
            let mut options = harsh(4, seed);
            let within = Duration::from_millis(2);
            options.faults = Faults::draw(&FaultKinds::all(), seed, &options.network, within);
            options.maps = seed % 3 == 0;
            options
        };
        let (world, events) = traffic(options(), 200);
        let (again, same_events) = traffic(options(), 200);
        assert_eq!((world.finish(), world.now()), (again.finish(), again.now()), "seed {seed}");
        assert_eq!(events, same_events, "seed {seed}");
        hashes.insert(world.finish().0);
    }
    assert_eq!(hashes.len(), 20, "two seeds gave the same run");
}

#[test]
fn every_transfer_is_done_exactly_once_under_any_faults() {
    for seed in 0..60 {
        let mut options = harsh(4, seed);
        let kinds = FaultKinds::all().swarm(&mut Random::new(seed));
        options.faults = Faults::draw(&kinds, seed, &options.network, Duration::from_millis(1));
        let mut random = Random::new(seed).split("traffic");
        let mut ranks = Ranks::connecting(options);
        let regions: Vec<_> = (0..4).map(|rank| ranks.register(rank, 4_096)).collect();
        let mut accepted: Vec<(Rank, _)> = Vec::new();
        for _ in 0..300 {
            let rank = random.below(4) as Rank;
            let peer = (rank + 1 + random.below(3) as Rank) % 4;
            let (here, there) = (&regions[rank as usize], &regions[peer as usize]);
            let transfer = match random.below(4) {
                0 => put(&here.whole(), there.remote(), 1).into(),
                1 => Submission::Signal(signal(2)),
                2 => Transfer::Get { src: there.remote(), dst: here.whole() }.into(),
                _ => {
                    let word = there.slice(8..16).unwrap().remote();
                    Transfer::Atomic { word, op: AtomicOp::Add(1) }.into()
                }
            };
            if !ranks.world.is_dead(rank)
                && let Ok(id) = ranks.try_submit(rank, peer, transfer)
            {
                accepted.push((rank, id));
            }
            for _ in 0..random.below(6) {
                ranks.step();
            }
        }
        ranks.drain();
        assert!(!accepted.is_empty());
        for (rank, id) in accepted {
            if !ranks.world.is_dead(rank) {
                assert!(ranks.done(rank, id).is_some(), "seed {seed}: {id:?} of rank {rank} is not done");
            }
        }
        assert_eq!(ranks.world.transfers_under_way(), 0, "seed {seed}");
    }
}

#[test]
fn bytes_are_complete_at_their_signal_and_torn_reordered_and_early_before_it() {
    let (mut torn, mut done_first, mut done_last, mut overtaken) = (0, 0, 0, 0);
    for seed in 0..40 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 8_000));
        ours.whole().store(&[1; 1_000]);
        let ids: Vec<_> = (0..8usize)
            .map(|index| {
                let dst = theirs.slice(index * 1_000..(index + 1) * 1_000).unwrap().remote();
                ranks.submit(0, 1, put(&ours.whole(), dst, index as u16))
            })
            .collect();
        let mut seen = Vec::new();
        while seen.len() < 8 {
            ranks.step();
            for signal_slot in 0..8u16 {
                let start = usize::from(signal_slot) * 1_000;
                let bytes = theirs.slice(start..start + 1_000).unwrap().to_vec();
                let landed = bytes.iter().filter(|&&byte| byte == 1).count();
                if ranks.count(1, 0, signal_slot) == 1 {
                    assert_eq!(
                        landed, 1_000,
                        "seed {seed}: signal slot {signal_slot} shows before its bytes"
                    );
                    if !seen.contains(&signal_slot) {
                        match ranks.done(0, ids[usize::from(signal_slot)]) {
                            Some(_) => done_first += 1,
                            None => done_last += 1,
                        }
                        overtaken += usize::from(seen.iter().any(|&earlier| earlier > signal_slot));
                        seen.push(signal_slot);
                    }
                } else {
                    torn += usize::from((1..1_000).contains(&landed));
                }
            }
        }
        ranks.drain();
    }
    assert!(torn > 100 && done_first > 20 && done_last > 20 && overtaken > 20, "not nasty enough");
}

#[test]
fn a_source_is_read_as_late_as_done_and_not_later() {
    let (mut late, mut after) = (0, 0);
    for (mutant, seed) in
        (0..40).map(|seed| (None, seed)).chain((0..40).map(|seed| (Some(Mutant::SourceReadAfterDone), seed)))
    {
        let mut ranks = Ranks::connected(mutated(mutant, harsh(2, seed)));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
        let id = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        // A caller that breaks the rules changes the source while it is under way, one that keeps
        // them after `Done`.
        ours.whole().store(&[1; 1_000]);
        ranks.until(|ranks| ranks.done(0, id).is_some());
        ours.whole().store(&[2; 1_000]);
        ranks.until(|ranks| ranks.count(1, 0, 0) == 1);
        let bytes = theirs.whole().to_vec();
        late += usize::from(mutant.is_none() && bytes.contains(&1));
        assert!(mutant.is_some() || !bytes.contains(&2), "seed {seed}: read after Done");
        after += usize::from(bytes.contains(&2));
    }
    assert_eq!(late, 40);
    assert!(after > 5, "the mutant reads it after Done: {after}");
}

#[test]
fn the_mutants_do_what_they_say() {
    let mut early = 0;
    let mut swapped = 0;
    for seed in 0..20 {
        let mut ranks = Ranks::connected(mutated(Some(Mutant::SignalBeforeBytes), harsh(2, seed)));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
        ours.whole().store(&[1; 1_000]);
        ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        ranks.until(|ranks| ranks.count(1, 0, 0) == 1);
        early += usize::from(theirs.whole().to_vec().contains(&0));
        ranks.drain();
        assert_eq!(theirs.whole().to_vec(), [1; 1_000]);
        assert_eq!(ranks.count(1, 0, 0), 1, "one signal all the same");

        let mut ranks = Ranks::connected(mutated(Some(Mutant::SignalsSwapped), harsh(2, seed)));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 2_000));
        ours.whole().store(&[1; 1_000]);
        for half in 0..2usize {
            let dst = theirs.slice(half * 1_000..(half + 1) * 1_000).unwrap().remote();
            ranks.submit(0, 1, put(&ours.whole(), dst, half as u16));
        }
        ranks.until(|ranks| ranks.count(1, 0, 0) == 1);
        swapped += usize::from(theirs.slice(0..1_000).unwrap().to_vec().contains(&0));
    }
    assert!(early > 10, "{early}");
    assert!(swapped > 3, "{swapped}");
    let mut overtaken = 0;
    for seed in 0..100 {
        let mut ranks = Ranks::connected(mutated(Some(Mutant::SignalAfterDone), harsh(2, seed)));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
        ours.whole().store(&[1; 1_000]);
        let id = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        ranks.until(|ranks| ranks.count(1, 0, 0) == 1);
        assert!(ranks.done(0, id).is_some(), "the signal is submitted after Done");
        overtaken += usize::from(theirs.whole().to_vec().contains(&0));
        ranks.drain();
        assert_eq!(theirs.whole().to_vec(), [1; 1_000]);
        assert_eq!(ranks.count(1, 0, 0), 1, "one signal all the same");
        assert_eq!(ranks.world.transfers_under_way(), 0);
    }
    assert!(overtaken > 3, "{overtaken}");
}

#[test]
fn unknown_and_short_regions_are_refused_and_no_byte_changes() {
    for seed in 0..10 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let (ours, theirs) = (ranks.register(0, 64), ranks.register(1, 32));
        ours.whole().store(&[5; 64]);
        let dead = ranks.register(1, 64).remote();
        let beyond = RemoteSlice { len: 64, ..theirs.remote() };
        let wrapping = RemoteSlice { offset: u64::MAX, len: 64, ..theirs.remote() };
        let forged = RemoteSlice { key: RegionKey(12_345), offset: 0, len: 64 };
        for remote in [dead, beyond, wrapping, forged] {
            let write = ranks.submit(0, 1, put(&ours.whole(), remote, 0));
            let read = ranks.submit(0, 1, Transfer::Get { src: remote, dst: ours.whole() });
            ranks.until(|ranks| ranks.done(0, write).is_some() && ranks.done(0, read).is_some());
            let refused = Some(Err(TransferError::Refused { peer: 1, key: remote.key }));
            assert_eq!((ranks.done(0, write), ranks.done(0, read)), (refused.clone(), refused));
        }
        ranks.drain();
        assert_eq!(theirs.whole().to_vec(), [0; 32]);
        assert_eq!(ours.whole().to_vec(), [5; 64]);
        assert_eq!(ranks.count(1, 0, 0), 0, "a refused put shows no signal");
    }
}

#[test]
fn a_region_dropped_under_a_put_is_not_written_any_more() {
    let mut ranks = Ranks::connected(Options { passive: true, ..options(2, 3) });
    let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
    let memory = theirs.memory().clone();
    ours.whole().store(&[5; 1_000]);
    let id = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
    ranks.world.advance(None);
    drop(theirs);
    let again = ranks.device(1).register(memory).expect("registered anew, under another key");
    ranks.drain();
    assert!(ranks.done(0, id).is_some());
    assert_eq!(again.whole().to_vec(), [0; 1_000]);
    assert_eq!(ranks.count(1, 0, 0), 0);
}

#[test]
fn atomics_of_all_peers_count_every_one() {
    for seed in 0..10 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        let counter = ranks.register(2, 16);
        let word = counter.slice(8..16).unwrap().remote();
        let ids: Vec<_> = (0..20u32)
            .map(|index| {
                let rank = index % 2;
                (rank, ranks.submit(rank, 2, Transfer::Atomic { word, op: AtomicOp::Add(1) }))
            })
            .collect();
        ranks.drain();
        let old: BTreeSet<u64> =
            ids.iter().map(|&(rank, id)| ranks.done(rank, id).unwrap().unwrap()).collect();
        assert_eq!(old, (0..20).collect(), "every addition saw another value");
        let swap = AtomicOp::CompareSwap { expected: 19, new: 77 };
        let id = ranks.submit(0, 2, Transfer::Atomic { word, op: swap });
        ranks.drain();
        assert_eq!(ranks.done(0, id), Some(Ok(20)));
        assert_eq!(counter.slice(8..16).unwrap().to_vec(), 20u64.to_ne_bytes());
    }
}

#[test]
fn a_full_queue_refuses_without_a_trace_and_polling_makes_room() {
    let mut options = options(2, 1);
    options.faults.queue_depth = Some(1);
    let mut ranks = Ranks::connected(options);
    assert_eq!(ranks.device(0).info().reach[1].queue_depth, 1);
    let (ours, theirs) = (ranks.register(0, 100), ranks.register(1, 100));
    let first = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
    let refused = ranks.try_submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
    assert_eq!(refused, Err(SubmitError::QueueFull { peer: 1 }));
    ranks.until(|ranks| ranks.done(0, first).is_some());
    let second = ranks.submit(0, 1, Submission::Signal(signal(0)));
    ranks.drain();
    assert_eq!(ranks.done(0, second), Some(Ok(0)));
    assert_eq!(ranks.count(1, 0, 0), 2);
}

#[test]
fn mistakes_are_errors_of_submit() {
    let mut ranks = Ranks::connected(Options { transfer_bytes_max: 100, ..options(2, 1) });
    let (ours, theirs) = (ranks.register(0, 200), ranks.register(1, 200));
    let dst = theirs.slice(0..10).unwrap().remote();
    let src = ours.slice(0..11).unwrap();
    let lengths = SubmitError::Lengths { source_bytes: 11, destination_bytes: 10 };
    assert_eq!(ranks.try_submit(0, 1, put(&src, dst, 0)), Err(lengths));
    let long = ranks.try_submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
    assert_eq!(long, Err(SubmitError::TooLong { bytes: 200, max: 100 }));
    let foreign = put(&theirs.slice(0..10).unwrap(), dst, 0);
    assert_eq!(ranks.try_submit(0, 1, foreign), Err(SubmitError::ForeignRegion));
    let no_signal_slot = ranks.try_submit(0, 1, Submission::Signal(signal(16)));
    assert_eq!(no_signal_slot, Err(SubmitError::NoSuchSignalSlot { signal_slot: 16, signal_slots: 16 }));
    let word = theirs.slice(4..12).unwrap().remote();
    let atomic = ranks.try_submit(0, 1, Transfer::Atomic { word, op: AtomicOp::Add(1) });
    assert_eq!(atomic, Err(SubmitError::MisalignedWord));
    ranks.drain();
    assert_eq!(ranks.world.transfers_under_way(), 0);
}

#[test]
fn an_inline_put_and_a_signal_payload_arrive_as_they_were_at_submit() {
    for seed in 0..10 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let theirs = ranks.register(1, 5);
        let payload = Inline::new(b"landing at 7").unwrap();
        let src = Source::Inline(Inline::new(b"hello").unwrap());
        let signal = Some(Signal { signal_slot: 4, payload });
        ranks.submit(0, 1, Transfer::Put { src, dst: theirs.remote(), signal });
        ranks.until(|ranks| ranks.count(1, 0, 4) == 1);
        assert_eq!(theirs.whole().to_vec(), b"hello");
        assert_eq!(&ranks.device(1).signal_slots(0).payload(4)[..12], b"landing at 7");
    }
}

#[test]
fn the_world_names_all_signal_slots_in_which_signals_have_come_since_it_was_asked() {
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        let mut named = Vec::new();
        assert!(!ranks.world.take_signalled(0, &mut named), "what came before is not known");
        assert_eq!(named, []);
        for round in 0..4 {
            let signal_slots = [(1, 0), (1, 3), (2, 0), (2, 15)];
            for (from, signal_slot) in signal_slots {
                ranks.submit(from, 0, Submission::Signal(signal(signal_slot)));
                ranks.until(|ranks| ranks.count(0, from, signal_slot) > round);
            }
            assert!(ranks.world.take_signalled(0, &mut named), "seed {seed}");
            named.sort_unstable();
            assert_eq!(named, signal_slots, "seed {seed}: each once");
            named.clear();
        }
    }
}

#[test]
fn an_armed_wake_source_is_given_only_when_nothing_waits_and_wakes_before_anything_can_be_seen() {
    for seed in 0..10 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let (ours, theirs) = (ranks.register(0, 100), ranks.register(1, 100));
        ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        let mut armed = None;
        while ranks.count(1, 0, 0) == 0 {
            let count = ranks.count(1, 0, 0);
            armed = ranks.device(1).arm().map(|armed| (armed.wake_source, count));
            if armed.is_none() {
                ranks.poll(1);
            }
            ranks.poll(0);
            ranks.world.advance(None);
        }
        if let Some((pleach_transport::WakeSource::Word { word, seen }, _)) = armed {
            // Acquire: pairs with the release of the wake.
            let now = (*word).as_ref().load(std::sync::atomic::Ordering::Acquire);
            assert_ne!(now, seen, "seed {seed}: a signal came without the wake source");
        }
    }
}

/// Collects what an outside checker would be told.
#[derive(Default)]
struct Collector(Vec<(Nanos, Record)>);

impl Observer for Collector {
    fn observe(&mut self, now: Nanos, record: &Record) {
        self.0.push((now, record.clone()));
    }
}

#[test]
fn an_observer_is_told_every_byte_of_a_put_between_its_submit_and_its_signal() {
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let collector = Arc::new(Mutex::new(Collector::default()));
        ranks.world.observe(Box::new(collector.clone()));
        let (ours, theirs) = (ranks.register(0, 3_000), ranks.register(1, 3_000));
        ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 9));
        ranks.until(|ranks| ranks.count(1, 0, 9) == 1);
        ranks.drain();
        let records = collector.lock().unwrap();
        let transfer = TransferNumber(0);
        let position = |wanted: &dyn Fn(&Record) -> bool| {
            records.0.iter().position(|(_, record)| wanted(record)).expect("was told")
        };
        let submitted = position(&|record| matches!(record, Record::Submitted { .. }));
        let noticed =
            position(&|record| matches!(record, Record::Signalled { signal_slot: 9, count: 1, .. }));
        let completed = position(&|record| matches!(record, Record::Completed { .. }));
        for (kind, key, limit) in
            [(AccessKind::Read, ours.key(), completed), (AccessKind::Write, theirs.key(), noticed)]
        {
            let mut covered = vec![0u32; 3_000];
            for (index, (_, record)) in records.0.iter().enumerate() {
                let Record::Access(access) = record else { continue };
                if access.kind == kind {
                    assert_eq!((access.key, access.by), (key, Actor::Transfer(transfer, 0)));
                    assert!(submitted < index && index < limit, "seed {seed}: {access:?} is outside");
                    (access.range.start..access.range.end).for_each(|byte| covered[byte as usize] += 1);
                }
            }
            let most = if kind == AccessKind::Write { 1 } else { 2 };
            assert!(covered.iter().all(|&times| (1..=most).contains(&times)), "seed {seed}: {kind:?}");
        }
    }
}

#[test]
fn mapped_bytes_are_the_peers_own_and_the_observer_knows_whose() {
    let mut ranks = Ranks::connected(Options { maps: true, ..options(2, 1) });
    let collector = Arc::new(Mutex::new(Collector::default()));
    ranks.world.observe(Box::new(collector.clone()));
    let theirs = ranks.register(1, 100);
    theirs.whole().store(&[3; 100]);
    let part = theirs.slice(10..30).unwrap().remote();
    let mapped = ranks.device(0).map(1, &part).expect("mapped");
    assert_eq!(mapped.len(), 20);
    assert_ne!(mapped.as_ptr(), theirs.slice(10..30).unwrap().as_ptr(), "a view at other addresses");
    ranks.world.accessed(0, mapped.as_ptr(), 20, AccessKind::Write, ranks.world.now());
    let records = collector.lock().unwrap();
    let (_, Record::Access(access)) = records.0.last().expect("was told") else { panic!("no access") };
    assert_eq!((access.by, access.owner, access.key), (Actor::Rank(0), 1, theirs.key()));
    assert_eq!(access.range, 10..30);
    assert_eq!(access.addresses.start, theirs.slice(10..30).unwrap().as_ptr() as usize);
}

#[test]
fn flows_of_two_pairs_share_an_uplink() {
    let network = Network::star(3, GB_PER_S, LATENCY);
    let mut ranks = Ranks::connected(Options::new(network, 5));
    let ours = ranks.register(0, 10_000);
    let start = ranks.world.now();
    for peer in 1..3 {
        let theirs = ranks.register(peer, 10_000);
        ranks.submit(0, peer, put(&ours.whole(), theirs.remote(), 0));
        std::mem::forget(theirs);
    }
    ranks.until(|ranks| ranks.count(1, 0, 0) == 1 && ranks.count(2, 0, 0) == 1);
    assert_eq!(ranks.world.now() - start, 2 * LATENCY + Duration::from_nanos(20_000));
}

#[test]
fn time_stops_at_the_callers_wakeup_when_that_comes_first() {
    let ranks = Ranks::alone(options(2, 1));
    assert!(ranks.world.advance(Some(Nanos(500))));
    assert_eq!(ranks.world.now(), Nanos(500));
    assert!(!ranks.world.advance(None), "nothing is under way");
}

#[test]
fn events_are_traced_as_lines_when_asked_for() {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut ranks = Ranks::connected(options(2, 1));
    let lines = Lines::default();
    ranks.world.trace_to(Box::new(lines.clone()));
    let id = ranks.submit(0, 1, Submission::Signal(signal(5)));
    ranks.until(|ranks| ranks.done(0, id).is_some() && ranks.count(1, 0, 5) == 1);
    ranks.world.finish();
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains(" signal 0 5 1"), "{text}");
    assert!(!ranks.saw(0, &Event::Departed { peer: 1 }));
}
