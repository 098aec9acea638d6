//! Line 17: when both ends have drained, all from before has landed or never will, and the pair
//! goes on.

use pleach_transport::{
    AtomicOp, DRAINS_MAX, Event, Inline, Rank, Region, RegionKey, RemoteSlice, Source, SubmitError, Transfer,
    TransferError, TransferId,
};

use crate::world::{BackendKind, Submission, World, assert_bytes, noise, pairs, put, signal};

const SIGNAL_SLOT: u16 = 2;

/// The slot of signals that come without bytes.
const BARE_SIGNAL_SLOT: u16 = 7;

/// Lengths of puts at which fabrics change their ways, in bytes.
const SIZES: [usize; 7] = [0, 5, 64, 4097, 70_000, 300_001, (2 << 20) + 3];

/// Bytes of an inline put.
const INLINE_BYTES: usize = 8;

/// How often ranks drain in a row.
const ROUNDS: u64 = 5;

fn drain(world: &mut World, rank: Rank, peer: Rank) {
    let started = world.device(rank).drain(peer);
    assert_eq!(started, Ok(()), "{}: {rank} drains {peer}", world.kind().name);
}

fn drained(world: &World, rank: Rank, peer: Rank) -> usize {
    world.saw(rank, &Event::Drained { peer })
}

/// Drains a pair from both ends, and waits until both are told so for the `times`-th time.
fn drain_both(world: &mut World, one: Rank, other: Rank, times: usize) {
    drain(world, one, other);
    drain(world, other, one);
    world.until("a drained pair", |world| {
        drained(world, one, other) == times && drained(world, other, one) == times
    });
}

/// What one rank submits to another, and what must have come of it.
struct Traffic {
    from: Rank,
    to: Rank,
    sources: Vec<Region>,
    /// Each with room for one put, and the last one for the inline put and a counter.
    targets: Vec<Region>,
    /// Where a get of all of `to`'s last region lands.
    fetched: Region,
    ids: Vec<TransferId>,
    seed: u64,
    sizes: Vec<usize>,
}

impl Traffic {
    fn new(world: &mut World, from: Rank, to: Rank) -> Self {
        let sizes: Vec<_> = SIZES.iter().map(|&len| world.longest(len)).collect();
        let sources = sizes.iter().map(|&len| world.region(from, len.max(1))).collect();
        let mut targets: Vec<_> = sizes.iter().map(|&len| world.region(to, len.max(1))).collect();
        targets.push(world.region(to, 2 * INLINE_BYTES));
        let fetched = world.region(from, sizes[4]);
        Self { from, to, sources, targets, fetched, ids: Vec::new(), seed: 0, sizes }
    }

    fn few(&self) -> &Region {
        &self.targets[SIZES.len()]
    }

    fn bytes(&self, number: usize) -> Vec<u8> {
        noise(self.seed * 1000 + number as u64 * 10 + u64::from(self.from), self.sizes[number])
    }

    /// Where the get reads; nobody writes there.
    fn origin(&self, world: &mut World) -> Region {
        world.region_of(self.to, &noise(self.seed + 77, self.sizes[4]))
    }

    /// Submits a put of every length, an inline put, a bare signal, an atomic and a get of
    /// `origin`.
    fn submit(&mut self, world: &mut World, seed: u64, origin: &Region) {
        self.seed = seed;
        self.ids.clear();
        let (from, to) = (self.from, self.to);
        for number in 0..SIZES.len() {
            let len = self.sizes[number];
            let src = self.sources[number].slice(0..len).expect("inside");
            src.store(&self.bytes(number));
            let dst = self.targets[number].slice(0..len).expect("inside").remote();
            // Every third one has no signal, and only a drain tells that it is there.
            let signal_slot = (number % 3 != 2).then_some(SIGNAL_SLOT);
            self.ids.push(world.submit(from, to, put(&src, dst, signal_slot)));
        }
        let inline = Source::Inline(Inline::new(&[seed as u8; INLINE_BYTES]).expect("few bytes"));
        let dst = self.few().slice(0..INLINE_BYTES).expect("inside").remote();
        let few = Transfer::Put { src: inline, dst, signal: None };
        self.ids.push(world.submit(from, to, few));
        self.ids.push(world.submit(from, to, Submission::Signal(signal(BARE_SIGNAL_SLOT, b"bare"))));
        let word = self.few().slice(INLINE_BYTES..2 * INLINE_BYTES).expect("inside").remote();
        self.ids.push(world.submit(from, to, Transfer::Atomic { word, op: AtomicOp::Add(1) }));
        let get = Transfer::Get { src: origin.remote(), dst: self.fetched.whole() };
        self.ids.push(world.submit(from, to, get));
    }

    /// Shows that all of it is there after `rounds` of it.
    fn check(&self, world: &mut World, rounds: u64) {
        let (from, to, name) = (self.from, self.to, world.kind().name);
        let with_signal = SIZES.iter().enumerate().filter(|(number, _)| number % 3 != 2).count() as u64;
        assert_eq!(world.count(to, from, SIGNAL_SLOT), rounds * with_signal, "{name}: {from} to {to}");
        assert_eq!(world.count(to, from, BARE_SIGNAL_SLOT), rounds, "{name}: {from} to {to}");
        for (number, target) in self.targets[..SIZES.len()].iter().enumerate() {
            let there = target.slice(0..self.sizes[number]).expect("inside").to_vec();
            assert_bytes(&there, &self.bytes(number), "a put from before the drain");
        }
        let few = self.few().whole().to_vec();
        assert_bytes(&few[..INLINE_BYTES], &[self.seed as u8; INLINE_BYTES], "an inline put");
        assert_bytes(&few[INLINE_BYTES..], &rounds.to_ne_bytes(), "the counter");
    }

    /// Shows that the submitter's transfers ended before it was told that the pair is drained, for
    /// the `times`-th time.
    fn check_ended(&self, world: &World, times: usize) {
        let drained = Event::Drained { peer: self.to };
        let told = world.log(self.from).iter().enumerate().filter(|(_, event)| **event == drained);
        let at = told.map(|(at, _)| at).nth(times - 1).expect("it was told");
        for id in &self.ids {
            let is_end = |event: &Event| matches!(event, Event::Done { id: done, .. } if done == id);
            let ended = world.log(self.from).iter().position(is_end);
            assert!(ended.is_some_and(|ended| ended < at), "{}: {id:?} did not end", world.kind().name);
            assert!(world.ending(self.from, *id).is_ok(), "{}", world.kind().name);
        }
    }
}

pub(crate) fn all_from_before_has_landed_when_a_pair_is_drained(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let mut traffic: Vec<_> = pairs(2).map(|(from, to)| Traffic::new(&mut world, from, to)).collect();
    for round in 1..=ROUNDS {
        let origins: Vec<_> = traffic.iter().map(|traffic| traffic.origin(&mut world)).collect();
        let before: Vec<_> = origins.iter().map(|origin| origin.whole().to_vec()).collect();
        for (traffic, origin) in traffic.iter_mut().zip(&origins) {
            traffic.submit(&mut world, round, origin);
        }
        // One end drains at once, the other some time later.
        drain(&mut world, round as Rank % 2, 1 - round as Rank % 2);
        for _ in 0..round * 3 {
            world.pump();
        }
        drain(&mut world, 1 - round as Rank % 2, round as Rank % 2);
        // What each is told, it is told of its own memory.
        let mut is_told = [false; 2];
        world.until("a drained pair", |world| {
            for traffic in &traffic {
                let to = traffic.to;
                if !is_told[to as usize] && drained(world, to, traffic.from) == round as usize {
                    is_told[to as usize] = true;
                    traffic.check(world, round);
                    // The peer's get reads it no more.
                    origins[traffic.from as usize].whole().store(&vec![0xEE; traffic.sizes[4]]);
                }
            }
            is_told == [true; 2]
        });
        for (traffic, before) in traffic.iter().zip(&before) {
            traffic.check_ended(&world, round as usize);
            assert_bytes(&traffic.fetched.whole().to_vec(), before, "a get from before the drain");
        }
        check_quiet(&mut world, &traffic, round);
    }
    world.check_pair(0, 1);
}

/// Shows that nothing comes late: each owner overwrites what came, and its own bytes stay.
fn check_quiet(world: &mut World, traffic: &[Traffic], round: u64) {
    let own = |number: usize, len: usize| noise(round * 31 + number as u64, len);
    for traffic in traffic {
        for (number, target) in traffic.targets[..SIZES.len()].iter().enumerate() {
            target.whole().store(&own(number, target.len()));
        }
    }
    let counts: Vec<_> =
        traffic.iter().map(|traffic| world.count(traffic.to, traffic.from, SIGNAL_SLOT)).collect();
    world.watch(|_| {});
    for (traffic, count) in traffic.iter().zip(counts) {
        assert_eq!(world.count(traffic.to, traffic.from, SIGNAL_SLOT), count, "a signal is late");
        for (number, target) in traffic.targets[..SIZES.len()].iter().enumerate() {
            assert_bytes(&target.whole().to_vec(), &own(number, target.len()), "a put is late");
        }
    }
}

pub(crate) fn nobody_is_told_before_both_ends_have_drained(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    drain(&mut world, 0, 1);
    let before = |world: &mut World| {
        assert_eq!([drained(world, 0, 1), drained(world, 1, 0)], [0, 0], "{}: told early", backend.name);
    };
    world.watch(before);
    world.check_pair(0, 1);
    before(&mut world);
    drain(&mut world, 1, 0);
    world.until("a drained pair", |world| drained(world, 0, 1) > 0 && drained(world, 1, 0) > 0);
    world.watch(|world| assert_eq!([drained(world, 0, 1), drained(world, 1, 0)], [1, 1], "told once"));
}

pub(crate) fn each_drain_is_told_in_turn(backend: BackendKind) {
    const LEN: usize = 20_000;
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, LEN), world.region(1, ROUNDS as usize * LEN));
    for round in 0..ROUNDS as usize {
        source.whole().store(&noise(round as u64, LEN));
        let dst = target.slice(round * LEN..(round + 1) * LEN).expect("inside").remote();
        let id = world.submit(0, 1, put(&source.whole(), dst, None));
        drain(&mut world, 0, 1);
        world.finish(0, id).expect("a good key");
    }
    for round in 0..ROUNDS as usize {
        drain(&mut world, 1, 0);
        world
            .until("a drain", |world| drained(world, 1, 0) == round + 1 && drained(world, 0, 1) == round + 1);
        let there = target.slice(round * LEN..(round + 1) * LEN).expect("inside").to_vec();
        assert_bytes(&there, &noise(round as u64, LEN), "a put from before the drain of its number");
        world.watch(|world| {
            assert_eq!([drained(world, 1, 0), drained(world, 0, 1)], [round + 1; 2], "one for one");
        });
    }
}

pub(crate) fn later_transfers_work_and_keep_no_drain_waiting(backend: BackendKind) {
    const LEN: usize = 50_000;
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(0, &noise(4, LEN)), world.region(1, LEN));
    drain(&mut world, 0, 1);
    drain(&mut world, 1, 0);
    // As many as the queue takes, again and again, until both are told.
    let mut ids = Vec::new();
    world.until("a drained pair", |world| {
        let later = put(&source.whole(), target.remote(), Some(SIGNAL_SLOT));
        match world.try_submit(0, 1, later) {
            Ok(id) => ids.push(id),
            Err(SubmitError::QueueFull { .. }) => {}
            Err(error) => panic!("{}: {error}", backend.name),
        }
        drained(world, 0, 1) == 1 && drained(world, 1, 0) == 1
    });
    assert!(world.finish_all(0, &ids).iter().all(Result::is_ok), "{}", backend.name);
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) == ids.len() as u64);
    assert_bytes(&target.whole().to_vec(), &noise(4, LEN), "a later put");
    drain_both(&mut world, 0, 1, 2);
}

pub(crate) fn a_pair_is_drained_whatever_others_have_under_way(backend: BackendKind) {
    const LEN: usize = 400_000;
    let mut world = World::connected(backend, 3);
    let len = world.longest(LEN);
    let (source, target) = (world.region_of(0, &noise(6, len)), world.region(2, len));
    world.set_polled(2, false);
    let busy: Vec<_> = (0..4)
        .filter_map(|_| world.try_submit(0, 2, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))).ok())
        .collect();
    drain(&mut world, 0, 2);
    drain_both(&mut world, 0, 1, 1);
    assert_eq!(drained(&world, 0, 2), 0, "{}: rank 2 has not drained", backend.name);
    world.set_polled(2, true);
    assert!(world.finish_all(0, &busy).iter().all(Result::is_ok), "{}", backend.name);
    drain(&mut world, 2, 0);
    world.until("the other pair", |world| drained(world, 0, 2) == 1 && drained(world, 2, 0) == 1);
    assert_eq!(world.count(2, 0, SIGNAL_SLOT), busy.len() as u64, "{}", backend.name);
}

pub(crate) fn a_refused_transfer_has_ended(backend: BackendKind) {
    const LEN: usize = 5000;
    let mut world = World::connected(backend, 2);
    if !world.checks_keys() {
        return crate::world::skip(backend, "loses the pair when a key is bad");
    }
    let (source, target) = (world.region_of(0, &noise(8, LEN)), world.region(1, LEN));
    let forged = RemoteSlice { key: RegionKey(target.key().0 ^ 1 << 40), ..target.remote() };
    let bad = world.submit(0, 1, put(&source.whole(), forged, Some(SIGNAL_SLOT)));
    let good = world.submit(0, 1, put(&source.whole(), target.remote(), None));
    drain_both(&mut world, 0, 1, 1);
    assert_eq!(world.ending(0, bad), Err(TransferError::Refused { peer: 1, key: forged.key }));
    assert_eq!(world.ending(0, good), Ok(0));
    assert_bytes(&target.whole().to_vec(), &noise(8, LEN), "a good put beside a bad one");
    assert_eq!(world.count(1, 0, SIGNAL_SLOT), 0, "{}: nothing came of the bad one", backend.name);
}

pub(crate) fn the_end_of_a_pair_comes_in_place_of_drained(backend: BackendKind) {
    const LEN: usize = 100_000;
    let mut world = World::connected(backend, 4);
    let targets: Vec<_> = (0..4).map(|rank| world.region(rank, LEN)).collect();
    for peer in 1..4 {
        let src = targets[0].whole();
        world.submit(0, peer, put(&src, targets[peer as usize].remote(), Some(SIGNAL_SLOT)));
        drain(&mut world, 0, peer);
    }
    world.kill(1);
    world.device(2).leave();
    world.device(0).sever(3);
    world.until_lost(0, 1);
    world.until("the bye", |world| world.saw(0, &Event::Departed { peer: 2 }) > 0);
    world.until("the fence", |world| world.saw(0, &Event::Severed { peer: 3 }) > 0);
    let refused = [1, 2, 3].map(|peer| world.device(0).drain(peer));
    assert!(matches!(refused[0], Err(SubmitError::Lost { peer: 1, .. })), "{}: {refused:?}", backend.name);
    let others = [Err(SubmitError::Departed { peer: 2 }), Err(SubmitError::Severed { peer: 3 })];
    assert_eq!(refused[1..], others, "{}", backend.name);
    world.watch(|world| {
        let told = [1, 2, 3].map(|peer| drained(world, 0, peer));
        assert_eq!(told, [0; 3], "{}: no peer has drained", backend.name);
    });
}

pub(crate) fn a_peer_that_dies_is_drained_or_lost(backend: BackendKind) {
    const LEN: usize = 300_000;
    for pumps in [0, 1, 3, 10, 30] {
        let mut world = World::connected(backend, 2);
        let len = world.longest(LEN);
        let (source, target) = (world.region_of(1, &noise(9, len)), world.region(0, len));
        let id = world.submit(1, 0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
        drain(&mut world, 1, 0);
        drain(&mut world, 0, 1);
        for _ in 0..pumps {
            world.pump();
        }
        let is_put_done = !world.endings(1, id).is_empty();
        world.kill(1);
        world.until_lost(0, 1);
        if drained(&world, 0, 1) > 0 {
            assert!(pumps > 0 || is_put_done, "{}: drained before anything was polled", backend.name);
            assert_eq!(world.count(0, 1, SIGNAL_SLOT), 1, "{}: what was drained is here", backend.name);
            assert_bytes(&target.whole().to_vec(), &noise(9, len), "a put from before the drain");
        }
        let drained_at = world.log(0).iter().position(|event| *event == Event::Drained { peer: 1 });
        let lost_at = world.log(0).iter().position(|event| matches!(event, Event::PeerLost { .. }));
        assert!(drained_at.is_none_or(|at| Some(at) < lost_at), "{}: drained after its loss", backend.name);
        let told = drained(&world, 0, 1);
        world.watch(|world| assert_eq!(drained(world, 0, 1), told, "no Drained after a loss"));
    }
}

pub(crate) fn a_peer_that_is_not_connected_is_not_drained(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    assert_eq!(world.device(0).drain(1), Err(SubmitError::NotConnected { peer: 1 }), "{}", backend.name);
    assert_eq!(world.device(0).drain(9), Err(SubmitError::NotConnected { peer: 9 }), "{}", backend.name);
    world.connect_all();
    drain_both(&mut world, 0, 1, 1);
}

pub(crate) fn too_many_drains_are_refused_until_the_peer_drains(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    for _ in 0..DRAINS_MAX {
        drain(&mut world, 0, 1);
    }
    for _ in 0..2 {
        assert_eq!(world.device(0).drain(1), Err(SubmitError::QueueFull { peer: 1 }), "{}", backend.name);
        world.pump();
    }
    drain(&mut world, 1, 0);
    world.until("a drain", |world| drained(world, 0, 1) == 1);
    drain(&mut world, 0, 1);
    for _ in 0..DRAINS_MAX {
        // The marks of rank 0 may be on their way still.
        world.until("room for a drain", |world| match world.device(1).drain(0) {
            Ok(()) => true,
            Err(SubmitError::QueueFull { .. }) => false,
            Err(error) => panic!("{}: {error}", backend.name),
        });
    }
    let all = DRAINS_MAX as usize + 1;
    world.until("all drains", |world| drained(world, 0, 1) == all && drained(world, 1, 0) == all);
    world.check_pair(0, 1);
}

/// Registrations and connections of each rank so far.
fn setup<const RANKS: usize>(world: &mut World) -> [[u64; 2]; RANKS] {
    std::array::from_fn(|rank| {
        let setup = &world.device(rank as Rank).info().setup;
        [setup.registered(), setup.connected()]
    })
}

pub(crate) fn survivors_of_a_severed_peer_set_nothing_up_anew(backend: BackendKind) {
    const LEN: usize = 60_000;
    const RANKS: u32 = 4;
    /// Rank 3 is out after the first epoch.
    const SURVIVORS: u32 = 3;
    const EPOCHS: u64 = 3;
    let mut world = World::connected(backend, RANKS);
    assert_eq!(setup(&mut world), [[0, 3]; RANKS as usize], "{}: three pairs a rank", backend.name);
    let sources: Vec<_> =
        (0..RANKS).map(|rank| world.region_of(rank, &noise(u64::from(rank), LEN))).collect();
    // Memory for one peer is taken from nobody else, also where peers map it.
    let targets: Vec<_> = pairs(RANKS).map(|(from, to)| world.region_for(to, from, &[0; LEN])).collect();
    let before = setup(&mut world);
    assert_eq!(before, [[4, 3]; RANKS as usize], "{}: four regions a rank", backend.name);
    for epoch in 1..=EPOCHS {
        let is_in = |rank: Rank| epoch == 1 || rank < SURVIVORS;
        for ((from, to), target) in pairs(RANKS).zip(&targets) {
            if !is_in(from) || !is_in(to) {
                continue;
            }
            let first = put(&sources[from as usize].whole(), target.remote(), Some(SIGNAL_SLOT));
            // Later ones need no source, which severing may have taken away.
            let inline = Source::Inline(Inline::new(&[epoch as u8; 8]).expect("few bytes"));
            let dst = target.slice(0..8).expect("inside").remote();
            let later = Transfer::Put { src: inline, dst, signal: Some(signal(SIGNAL_SLOT, b"")) };
            world.submit(from, to, if epoch == 1 { first } else { later });
        }
        // The next epoch: who is out is severed, and all others drain their pairs.
        if epoch == 1 {
            (0..SURVIVORS).for_each(|rank| world.device(rank).sever(SURVIVORS));
            world.until("the fences", |world| {
                (0..SURVIVORS).all(|rank| world.saw(rank, &Event::Severed { peer: SURVIVORS }) == 1)
            });
        }
        for (rank, peer) in pairs(SURVIVORS) {
            drain(&mut world, rank, peer);
        }
        world.until("drained pairs", |world| {
            pairs(SURVIVORS).all(|(rank, peer)| drained(world, rank, peer) == epoch as usize)
        });
        for ((from, to), target) in pairs(RANKS).zip(&targets) {
            if from >= SURVIVORS || to >= SURVIVORS {
                continue;
            }
            let name = format!("{}: {from} to {to}", backend.name);
            assert_eq!(world.count(to, from, SIGNAL_SLOT), epoch, "{name}");
            let mut want = noise(u64::from(from), LEN);
            if epoch > 1 {
                want[..8].copy_from_slice(&[epoch as u8; 8]);
            }
            assert_bytes(&target.whole().to_vec(), &want, &name);
        }
    }
    let after = setup::<{ RANKS as usize }>(&mut world);
    assert_eq!(after[..SURVIVORS as usize], before[..SURVIVORS as usize], "{}", backend.name);
}

pub(crate) fn a_successor_is_drained_anew(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    drain_both(&mut world, 0, 1, 1);
    // The successor must not be taken to have answered these.
    drain(&mut world, 0, 1);
    drain(&mut world, 0, 1);
    world.pump();
    world.kill(1);
    world.until_lost(0, 1);
    world.replace(1);
    world.connect_pair([0, 1], [2, 1]);
    drain(&mut world, 1, 0);
    world.watch(|world| assert_eq!([drained(world, 0, 1), drained(world, 1, 0)], [1, 0], "{}", backend.name));
    drain(&mut world, 0, 1);
    world.until("a drained pair", |world| [drained(world, 0, 1), drained(world, 1, 0)] == [2, 1]);
    world.check_pair(0, 1);
}
