//! Line 8: a bad remote slice changes no byte and harms no other pair; what can be seen to be wrong
//! is not accepted.

use pleach_transport::{
    AtomicOp, Region, RegionKey, RemoteSlice, Slice, SubmitError, Transfer, TransferError, TransferId,
};

use crate::world::{
    BackendKind, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, put, signal, skip, watch_all,
};

const SIGNAL_SLOT: u16 = 4;
const LEN: usize = 4096;

/// Longest buffer that is allocated to be too long, in bytes.
const TOO_LONG_TRIED_MAX: u64 = 64 << 20;

/// Every way to write or read `remote`: a put, a put with signal, a get and atomics (on its last
/// word).
pub(crate) fn accesses(remote: RemoteSlice, mine: &Slice) -> Vec<Transfer> {
    let offset = remote.offset.checked_add(remote.len).map_or(remote.offset, |end| end.saturating_sub(8));
    let word = RemoteSlice { key: remote.key, offset, len: 8 };
    let mut accesses = vec![
        put(mine, remote, None),
        put(mine, remote, Some(SIGNAL_SLOT)),
        Transfer::Get { src: remote, dst: mine.clone() },
    ];
    if offset.is_multiple_of(8) {
        accesses.push(Transfer::Atomic { word, op: AtomicOp::Add(1) });
        accesses.push(Transfer::Atomic { word, op: AtomicOp::CompareSwap { expected: 0, new: 1 } });
    }
    accesses
}

/// An access that a world has tried, and the memory on both sides of it.
struct Tried {
    what: String,
    owned: Region,
    before: Vec<u8>,
    mine: Region,
}

/// Tries an access of a kind to a remote slice of `len` bytes that rank 1 does not have, from rank
/// 0, in a fresh world: where keys are not checked an access may cost the pair. `None`: the slice
/// has no access of this kind.
fn tried(
    backend: BackendKind,
    kind: usize,
    len: usize,
    bad: &impl Fn(&mut World, &Region) -> RemoteSlice,
) -> Option<(World, Tried)> {
    let mut world = World::connected(backend, 3);
    let before = noise(kind as u64, LEN);
    let owned = world.region_of(1, &before);
    let mine = world.region_of(0, &noise(99, len));
    let remote = bad(&mut world, &owned);
    let access = accesses(remote, &mine.whole()).into_iter().nth(kind)?;
    let what = format!("{}: {access:?}", backend.name);
    let ending = world.carry_out(0, 1, access);
    if world.checks_keys() {
        assert_eq!(ending, Err(TransferError::Refused { peer: 1, key: remote.key }), "{what}");
    }
    Some((world, Tried { what, owned, before, mine }))
}

/// Tries every access to a remote slice of `len` bytes that rank 1 does not have, and shows that
/// nothing happened. The worlds are watched at the same time, since watching takes the most time.
fn check_refused(backend: BackendKind, len: usize, bad: impl Fn(&mut World, &Region) -> RemoteSlice) {
    const KINDS: usize = 5;
    let (mut worlds, all): (Vec<_>, Vec<_>) =
        (0..KINDS).filter_map(|kind| tried(backend, kind, len, &bad)).unzip();
    watch_all(&mut worlds, |number, world| {
        let Tried { what, .. } = &all[number];
        assert_eq!(world.count(1, 0, SIGNAL_SLOT), 0, "{what}: refused bytes give no signal");
    });
    for (world, Tried { what, owned, before, mine }) in worlds.iter_mut().zip(&all) {
        assert_bytes(&owned.whole().to_vec(), before, what);
        if world.checks_keys() {
            assert_bytes(&mine.whole().to_vec(), &noise(99, len), "a refused get changes nothing here");
            world.check_pair(0, 1);
            let good = owned.slice(0..len).expect("inside").remote();
            let ending = world.carry_out(0, 1, put(&mine.whole(), good, None));
            assert_eq!(ending, Ok(0), "{what}: the pair still works");
        }
        world.check_pair(0, 2);
        world.check_pair(1, 2);
    }
}

pub(crate) fn a_forged_key_reaches_nothing(backend: BackendKind) {
    check_refused(backend, 64, |_, owned| {
        let key = RegionKey(owned.key().0 ^ 0x0123_4567_89AB_CDEF);
        RemoteSlice { key, offset: 0, len: 64 }
    });
}

pub(crate) fn the_key_of_no_region_reaches_nothing(backend: BackendKind) {
    check_refused(backend, 64, |_, _| RemoteSlice { key: RegionKey::NONE, offset: 0, len: 64 });
}

pub(crate) fn a_key_next_to_a_real_one_reaches_nothing(backend: BackendKind) {
    check_refused(backend, 64, |_, owned| RemoteSlice {
        key: RegionKey(owned.key().0.wrapping_add(1)),
        offset: 0,
        len: 64,
    });
}

pub(crate) fn the_key_of_a_dropped_region_reaches_nothing(backend: BackendKind) {
    check_refused(backend, 64, |world, _| {
        let dropped = world.region(1, LEN);
        let stale = RemoteSlice { len: 64, ..dropped.remote() };
        drop(dropped);
        // A new region of the same size invites an implementation to give it the place of the old
        // one.
        let fresh = world.region(1, LEN);
        assert_ne!(fresh.key(), stale.key);
        stale
    });
}

pub(crate) fn a_key_of_another_rank_reaches_nothing(backend: BackendKind) {
    check_refused(backend, 64, |world, _| {
        let of_another = world.region(2, LEN);
        let remote = RemoteSlice { len: 64, ..of_another.remote() };
        // Kept alive to the end of the test process: the key stays valid at rank 2.
        std::mem::forget(of_another);
        remote
    });
}

pub(crate) fn a_range_beyond_the_region_reaches_nothing(backend: BackendKind) {
    for (offset, len) in [(LEN as u64 - 56, 64), (LEN as u64, 1), (LEN as u64 + 4096, 64), (1 << 40, 8)] {
        check_refused(backend, len, |_, owned| RemoteSlice { key: owned.key(), offset, len: len as u64 });
    }
}

pub(crate) fn a_range_whose_end_overflows_reaches_nothing(backend: BackendKind) {
    for offset in [u64::MAX - 7, u64::MAX - 63, u64::MAX, 1 << 63] {
        check_refused(backend, 64, |_, owned| RemoteSlice { key: owned.key(), offset, len: 64 });
    }
}

/// Submits what must not be accepted and shows that nothing has happened.
fn check_not_accepted(world: &mut World, submission: impl Into<Submission>, expected: &SubmitError) {
    let (name, submission) = (TransferId(1 << 60), submission.into());
    let what = format!("{}: {submission:?}", world.kind().name);
    assert_eq!(submission.submit(world.device(0), 1, name).as_ref(), Err(expected), "{what}");
    world.watch(|_| {});
    assert_eq!(world.endings(0, name), [], "{what}: what was not accepted does not end");
}

pub(crate) fn different_lengths_are_not_accepted(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (mine, theirs) = (world.region(0, LEN), world.region(1, LEN));
    let short = mine.slice(0..LEN - 1).expect("inside");
    let error = SubmitError::Lengths { source_bytes: LEN as u64 - 1, destination_bytes: LEN as u64 };
    check_not_accepted(&mut world, put(&short, theirs.remote(), Some(SIGNAL_SLOT)), &error);
    let error = SubmitError::Lengths { source_bytes: LEN as u64, destination_bytes: LEN as u64 - 1 };
    check_not_accepted(&mut world, Transfer::Get { src: theirs.remote(), dst: short }, &error);
    assert_eq!(world.count(1, 0, SIGNAL_SLOT), 0);
    world.check_pair(0, 1);
}

pub(crate) fn a_region_of_another_device_is_not_accepted(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let (foreign, theirs) = (world.region(2, LEN), world.region(1, LEN));
    check_not_accepted(&mut world, put(&foreign.whole(), theirs.remote(), None), &SubmitError::ForeignRegion);
    let get = Transfer::Get { src: theirs.remote(), dst: foreign.whole() };
    check_not_accepted(&mut world, get, &SubmitError::ForeignRegion);
    world.check_pair(0, 1);
}

pub(crate) fn a_signal_slot_that_does_not_exist_is_not_accepted(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (mine, theirs) = (world.region(0, 64), world.region(1, 64));
    assert_eq!(
        world.device(0).info().signal_slots,
        SIGNAL_SLOTS,
        "caps tell the signal slots that were configured"
    );
    assert_eq!(world.signal_slots(1, 0).len(), SIGNAL_SLOTS);
    for signal_slot in [SIGNAL_SLOTS as u16, u16::MAX] {
        let error = SubmitError::NoSuchSignalSlot { signal_slot, signal_slots: SIGNAL_SLOTS };
        check_not_accepted(&mut world, Submission::Signal(signal(signal_slot, b"")), &error);
        check_not_accepted(&mut world, put(&mine.whole(), theirs.remote(), Some(signal_slot)), &error);
    }
    world.check_pair(0, 1);
}

pub(crate) fn a_misaligned_word_is_not_accepted(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let theirs = world.region(1, 64);
    for range in [4..12, 1..9, 0..4, 0..16, 0..0] {
        let word = theirs.slice(range).expect("inside").remote();
        let atomic = Transfer::Atomic { word, op: AtomicOp::Add(1) };
        check_not_accepted(&mut world, atomic, &SubmitError::MisalignedWord);
    }
    assert_bytes(&theirs.whole().to_vec(), &[0; 64], "a word that was not accepted");
    world.check_pair(0, 1);
}

pub(crate) fn more_than_the_maximum_is_not_accepted(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let max = world.device(0).info().transfer_bytes_max;
    if max >= TOO_LONG_TRIED_MAX {
        return skip(backend, &format!("allows {max} bytes a transfer, more than the suite allocates"));
    }
    let bytes = max + 1;
    let (mine, theirs) = (world.region(0, bytes as usize), world.region(1, bytes as usize));
    let error = SubmitError::TooLong { bytes, max };
    check_not_accepted(&mut world, put(&mine.whole(), theirs.remote(), Some(SIGNAL_SLOT)), &error);
    check_not_accepted(&mut world, Transfer::Get { src: theirs.remote(), dst: mine.whole() }, &error);
    world.check_pair(0, 1);
}

pub(crate) fn a_peer_that_is_not_connected_is_not_accepted(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    let error = SubmitError::NotConnected { peer: 1 };
    check_not_accepted(&mut world, Submission::Signal(signal(SIGNAL_SLOT, b"")), &error);
}
