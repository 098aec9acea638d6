//! Line 14: peers read lent memory and do nothing else with it, and severing takes it from nobody.

use pleach_transport::{
    Event, Inline, MapError, Rank, ReadOnlyMapped, RegionKey, RemoteSlice, Source, Transfer, TransferError,
};

use crate::keys::accesses;
use crate::mappings::maps;
use crate::world::{BackendKind, Submission, World, assert_bytes, noise, put, signal};

const SIGNAL_SLOT: u16 = 4;
const LEN: usize = 50_000;

fn map(world: &mut World, rank: Rank, peer: Rank, slice: &RemoteSlice) -> ReadOnlyMapped {
    let mut mapped = None;
    world.until("a region that was announced to be mapped", |world| {
        match world.device(rank).map_read_only(peer, slice) {
            Ok(mapping) => mapped = Some(mapping),
            Err(MapError::Unknown { .. }) => {}
            Err(error) => panic!("{}: {error}", world.kind().name),
        }
        mapped.is_some()
    });
    mapped.expect("`until` has returned")
}

fn loaded(mapped: &ReadOnlyMapped) -> Vec<u8> {
    let mut bytes = vec![0; mapped.len()];
    mapped.load(0, &mut bytes);
    bytes
}

/// Lets the owner signal a reader, who then sees all that the owner wrote before.
fn publish(world: &mut World, owner: Rank, reader: Rank) {
    let before = world.count(reader, owner, SIGNAL_SLOT);
    assert_eq!(world.carry_out(owner, reader, Submission::Signal(signal(SIGNAL_SLOT, b""))), Ok(0));
    world.until("the owner's signal", |world| world.count(reader, owner, SIGNAL_SLOT) > before);
}

pub(crate) fn lent_memory_is_read_by_gets(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (lent, here) = (world.lent_region_of(1, &noise(1, LEN)), world.region(0, LEN));
    for (seed, range) in [(1, 0..LEN), (1, 4095..4097), (2, 1..LEN), (2, LEN..LEN)] {
        lent.whole().store(&noise(seed, LEN));
        publish(&mut world, 1, 0);
        let dst = here.slice(range.clone()).expect("inside");
        let src = lent.slice(range.clone()).expect("inside").remote();
        assert_eq!(world.carry_out(0, 1, Transfer::Get { src, dst: dst.clone() }), Ok(0));
        assert_bytes(&dst.to_vec(), &noise(seed, LEN)[range], "what a get read");
    }
}

pub(crate) fn lent_memory_is_its_owners_source_and_destination(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (lent, theirs) = (world.lent_region_of(0, &noise(3, LEN)), world.region(1, LEN));
    assert_eq!(world.carry_out(0, 1, put(&lent.whole(), theirs.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    assert_bytes(&theirs.whole().to_vec(), &noise(3, LEN), "a put out of lent memory");
    theirs.whole().store(&noise(4, LEN));
    publish(&mut world, 1, 0);
    assert_eq!(world.carry_out(0, 1, Transfer::Get { src: theirs.remote(), dst: lent.whole() }), Ok(0));
    assert_bytes(&lent.whole().to_vec(), &noise(4, LEN), "its owner's get into it");
}

pub(crate) fn nothing_is_written_into_lent_memory(backend: BackendKind) {
    // Short ones, one that submit or one send carries out, and one that several do.
    for len in [0, 8, 64, backend.long_bytes] {
        let mut kind = 0;
        loop {
            let mut world = World::connected(backend, 3);
            let checks_keys = world.checks_keys();
            let bytes = noise(5, len.max(8));
            let lent = world.lent_region_of(1, &bytes);
            let mine = world.region_of(0, &noise(6, len));
            let remote = lent.slice(0..len).expect("inside").remote();
            let inline = Inline::new(&mine.whole().to_vec()).into_iter().map(|inline| Transfer::Put {
                src: Source::Inline(inline),
                dst: remote,
                signal: Some(signal(SIGNAL_SLOT, b"")),
            });
            let writes = accesses(remote, &mine.whole()).into_iter().chain(inline);
            let mut writes = writes.filter(|access| !matches!(access, Transfer::Get { .. }));
            let Some(write) = writes.nth(kind) else { break };
            kind += 1;
            let is_empty = len == 0 && !matches!(write, Transfer::Atomic { .. });
            if is_empty && !checks_keys {
                continue;
            }
            let what = format!("{}: {write:?}", backend.name);
            let ending = world.carry_out(0, 1, write);
            if checks_keys {
                assert_eq!(ending, Err(TransferError::Refused { peer: 1, key: lent.key() }), "{what}");
            }
            world.watch(|world| {
                assert_eq!(world.count(1, 0, SIGNAL_SLOT), 0, "{what}: refused bytes give no signal");
            });
            assert_bytes(&lent.whole().to_vec(), &bytes, &what);
            if checks_keys {
                world.check_pair(0, 1);
                let get = Transfer::Get { src: remote, dst: mine.whole() };
                assert_eq!(world.carry_out(0, 1, get), Ok(0), "{what}: it is read as before");
            }
            world.check_pair(0, 2);
            world.check_pair(1, 2);
        }
        assert!(kind >= 3, "{}: {kind} ways to write", backend.name);
    }
}

pub(crate) fn lent_memory_is_mapped_to_be_read(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let lent = world.lent_region_of(1, &noise(7, LEN));
    if !maps(&mut world) {
        let refused = world.device(0).map_read_only(1, &lent.remote());
        assert!(matches!(refused, Err(MapError::Unsupported { .. })), "{}: {refused:?}", backend.name);
        return;
    }
    let mapped = map(&mut world, 0, 1, &lent.remote());
    assert_bytes(&loaded(&mapped), &noise(7, LEN), "the whole region");
    lent.whole().store(&noise(8, LEN));
    publish(&mut world, 1, 0);
    assert_bytes(&loaded(&mapped), &noise(8, LEN), "what the owner wrote later");
    for (start, end) in [(1, 2), (4095, 4097), (333, LEN), (LEN, LEN)] {
        let part = lent.slice(start..end).expect("inside").remote();
        let part = map(&mut world, 0, 1, &part);
        assert_bytes(&loaded(&part), &noise(8, LEN)[start..end], "a part of the region");
    }

    let key = lent.key();
    let refused = world.device(0).map(1, &lent.remote());
    assert!(matches!(refused, Err(MapError::ReadOnly { peer: 1, key: of }) if of == key), "{refused:?}");
    let refused = world.device(0).map_read_only(1, &RemoteSlice { len: LEN as u64 + 1, ..lent.remote() });
    assert!(matches!(refused, Err(MapError::OutOfBounds { peer: 1, .. })), "{refused:?}");
    let unknown = RemoteSlice { key: RegionKey(key.0 ^ 0xFFFF), ..lent.remote() };
    let refused = world.device(0).map_read_only(1, &unknown);
    assert!(matches!(refused, Err(MapError::Unknown { .. })), "{refused:?}");

    // What was mapped stays readable, whatever becomes of its owner.
    let remote = lent.remote();
    drop(lent);
    world.announce(1);
    assert_bytes(&loaded(&mapped), &noise(8, LEN), "the region was dropped");
    world.kill(1);
    world.until_lost(0, 1);
    assert_bytes(&loaded(&mapped), &noise(8, LEN), "its owner was lost");
    let refused = world.device(0).map_read_only(1, &remote);
    assert!(matches!(refused, Err(MapError::Disconnected { peer: 1 })), "{}: {refused:?}", backend.name);
}

pub(crate) fn a_mapping_to_be_read_shows_any_memory(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region_of(1, &noise(9, LEN));
    let mapped = map(&mut world, 0, 1, &theirs.remote());
    let source = world.region_of(0, &noise(10, LEN));
    assert_bytes(&loaded(&mapped), &noise(9, LEN), "what its owner wrote");
    assert_eq!(world.carry_out(0, 1, put(&source.whole(), theirs.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    publish(&mut world, 1, 0);
    assert_bytes(&loaded(&mapped), &noise(10, LEN), "what a peer put");
}

pub(crate) fn severing_takes_lent_memory_from_nobody(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let lent = world.lent_region_of(0, &noise(11, LEN));
    let here = world.region(2, LEN);
    let maps = world.device(2).info().reach[0].maps;
    let mapped = maps.then(|| map(&mut world, 2, 0, &lent.remote()));
    world.device(0).sever(1);
    world.until("the fence", |world| world.saw(0, &Event::Severed { peer: 1 }) > 0);
    for seed in [11, 12] {
        lent.whole().store(&noise(seed, LEN));
        publish(&mut world, 0, 2);
        let get = Transfer::Get { src: lent.remote(), dst: here.whole() };
        assert_eq!(world.carry_out(2, 0, get), Ok(0), "{}: another peer still reads it", backend.name);
        assert_bytes(&here.whole().to_vec(), &noise(seed, LEN), "what another peer got");
        if let Some(mapped) = &mapped {
            assert_bytes(&loaded(mapped), &noise(seed, LEN), "what another peer has mapped");
            assert!(mapped.is_shared(), "{}: it is shared as before", backend.name);
        }
    }
    let again = world.register(0, lent.memory().clone());
    let get = Transfer::Get { src: again.remote(), dst: here.whole() };
    assert_eq!(world.carry_out(2, 0, get), Ok(0), "{}: it may be registered again", backend.name);
}
