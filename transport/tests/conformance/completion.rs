//! Line 3: every submitted transfer yields exactly one `Done`, whatever happens.

use pleach_transport::{
    AtomicOp, Event, Flush, Region, SubmitError, Submitted, Transfer, TransferError, TransferId,
};

use crate::world::{BackendKind, Submission, World, noise, put, signal};

const LEN: usize = 3000;

/// One transfer of each kind in turn, between regions of `LEN` bytes.
fn mixed(turn: usize, mine: &Region, theirs: &Region) -> Submission {
    let len = turn * 37 % LEN;
    let mine = mine.slice(0..len).expect("inside");
    let dst = theirs.slice(0..len).expect("inside").remote();
    match turn % 5 {
        0 => put(&mine, dst, None).into(),
        1 => put(&mine, dst, Some(1)).into(),
        2 => Transfer::Get { src: dst, dst: mine }.into(),
        3 => Submission::Signal(signal(2, b"payload")),
        _ => {
            let word = theirs.slice(0..8).expect("inside").remote();
            Transfer::Atomic { word, op: AtomicOp::Add(1) }.into()
        }
    }
}

/// Submits without polling until the queue is full or `most` were accepted.
fn submit_many(
    world: &mut World,
    from: u32,
    to: u32,
    most: usize,
    mine: &Region,
    theirs: &Region,
) -> Vec<TransferId> {
    let mut accepted = Vec::new();
    while accepted.len() < most {
        match world.try_submit(from, to, mixed(accepted.len(), mine, theirs)) {
            Ok(id) => accepted.push(id),
            Err(SubmitError::QueueFull { .. }) => break,
            Err(error) => panic!("{}: {error}", world.kind().name),
        }
    }
    assert!(!accepted.is_empty(), "{}: an idle queue takes a transfer", world.kind().name);
    accepted
}

pub(crate) fn every_transfer_is_done_once(backend: BackendKind) {
    const TRANSFERS: usize = 1500;
    let mut world = World::connected(backend, 2);
    let regions = [world.region_of(0, &noise(0, LEN)), world.region_of(1, &noise(1, LEN))];
    let mut ids = [Vec::new(), Vec::new()];
    for turn in 0..TRANSFERS {
        for from in 0..2_usize {
            let transfer = mixed(turn, &regions[from], &regions[1 - from]);
            ids[from].push(world.submit(from as u32, 1 - from as u32, transfer));
        }
    }
    for rank in 0..2_u32 {
        let endings = world.finish_all(rank, &ids[rank as usize]);
        assert!(endings.iter().all(Result::is_ok), "{}: nothing went wrong, so nothing fails", backend.name);
    }
}

pub(crate) fn the_submitter_chooses_names_that_need_not_differ(backend: BackendKind) {
    const TRANSFERS: usize = 5;
    let mut world = World::connected(backend, 2);
    let id = TransferId(u64::MAX);
    let (source, target) = (world.region(0, backend.long_bytes), world.region(1, backend.long_bytes));
    let mut ended = 0;
    for _ in 0..TRANSFERS {
        let submitted = |world: &mut World| match world.device(0).submit(
            1,
            put(&source.whole(), target.remote(), None),
            id,
        ) {
            Ok(submitted) => {
                ended += usize::from(submitted != Submitted::UnderWay);
                true
            }
            Err(_) => false,
        };
        world.until("room in the queue", submitted);
    }
    world.until("all ends", |world| world.endings(0, id).len() + ended >= TRANSFERS);
    world.watch(|world| assert_eq!(world.endings(0, id), vec![Ok(0); TRANSFERS - ended]));
}

pub(crate) fn every_transfer_is_done_once_also_after_a_loss(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (mine, theirs) = (world.region(0, LEN), world.region(1, LEN));
    let ids = submit_many(&mut world, 0, 1, 300, &mine, &theirs);
    world.kill(1);
    let cause = world.until_lost(0, 1);
    for (id, ending) in ids.iter().zip(world.finish_all(0, &ids)) {
        let lost = Err(TransferError::Lost { peer: 1, cause: cause.clone() });
        assert!(ending.is_ok() || ending == lost, "{}: {id:?} ended with {ending:?}", backend.name);
    }
    world.check_nothing_succeeds_after(0, &Event::PeerLost { peer: 1, cause });
}

pub(crate) fn every_transfer_is_done_once_also_after_severing(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let regions = [world.region(0, LEN), world.region(1, LEN)];
    let ids = submit_many(&mut world, 0, 1, 300, &regions[0], &regions[1]);
    let theirs = submit_many(&mut world, 1, 0, 300, &regions[1], &regions[0]);
    world.device(0).sever(1);
    world.until("the fence", |world| world.saw(0, &Event::Severed { peer: 1 }) == 1);
    for ending in world.finish_all(0, &ids) {
        let severed = Err(TransferError::Severed { peer: 1 });
        assert!(ending.is_ok() || ending == severed, "{}: ended with {ending:?}", backend.name);
    }
    world.check_nothing_succeeds_after(0, &Event::Severed { peer: 1 });
    // What the severed rank sees is a loss or nothing at all, but its transfers end too.
    world.finish_all(1, &theirs);
}

pub(crate) fn every_transfer_is_done_once_also_when_the_peer_leaves(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (mine, theirs) = (world.region(0, LEN), world.region(1, LEN));
    let ids = submit_many(&mut world, 0, 1, 300, &mine, &theirs);
    world.device(1).leave();
    world.until("the bye", |world| world.saw(0, &Event::Departed { peer: 1 }) == 1);
    world.until("the leaving rank to be flushed", |world| world.device(1).flush(Flush::All));
    drop(world.take(1));
    for ending in world.finish_all(0, &ids) {
        let left = Err(TransferError::Departed { peer: 1 });
        assert!(ending.is_ok() || ending == left, "{}: ended with {ending:?}", backend.name);
    }
    assert_eq!(world.losses(0, 1), [], "{}: a peer that left is not lost", backend.name);
}
