//! Losses, deaths, byes, severing.

use std::time::Duration;

use pleach_transport::sim::{Fault, LinkId, Mutant, Options, Random};
use pleach_transport::{
    Device, Event, Flush, LossCause, Nanos, PostError, SubmitError, TransferError, Urgency,
};

use crate::ranks::{CONNECT_TIMEOUT, Ranks, Submission, harsh, mutated, options, put, signal};

#[test]
fn a_rank_that_never_comes_is_not_reached_within_the_time_to_connect() {
    let mut ranks = Ranks::alone(options(2, 1));
    let address = ranks.device(1).info().address.clone();
    ranks.device(0).connect(1, &address).expect("started");
    ranks.drain();
    assert_eq!(ranks.lost(0, 1), Some(LossCause::NotReached(CONNECT_TIMEOUT)));
    assert_eq!(ranks.world.now(), Nanos::ZERO + CONNECT_TIMEOUT);
    assert_eq!(ranks.listeners[0].lost.lock().unwrap().len(), 1, "the responder was told too");
    let refused = ranks.try_submit(0, 1, Submission::Signal(signal(0)));
    assert!(matches!(refused, Err(SubmitError::Lost { peer: 1, .. })));
}

#[test]
fn after_a_death_all_transfers_to_it_fail_after_its_loss_was_told_and_others_go_on() {
    for seed in 0..30 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        let regions: Vec<_> = (0..3).map(|rank| ranks.register(rank, 1_000)).collect();
        let mut ids = Vec::new();
        for _ in 0..5 {
            ids.push(ranks.submit(0, 1, put(&regions[0].whole(), regions[1].remote(), 0)));
            ranks.submit(1, 0, put(&regions[1].whole(), regions[0].remote(), 0));
        }
        let steps = Random::new(seed).below(60);
        for _ in 0..steps {
            ranks.step();
        }
        let died_at = ranks.world.now();
        ranks.world.inject(Fault::RankDeath { rank: 1 });
        ranks.until(|ranks| ranks.lost(0, 1).is_some() && ranks.lost(2, 1).is_some());
        assert!(ranks.world.now() - died_at <= Duration::from_millis(1), "seed {seed}: found out late");
        assert_eq!(ranks.lost(0, 1), Some(LossCause::ProcessEnded));
        ranks.drain();
        let told = ranks.events[0].iter().position(|event| matches!(event, Event::PeerLost { .. }));
        for id in ids {
            let at = ranks.events[0]
                .iter()
                .position(|event| matches!(event, Event::Done { id: done, .. } if *done == id));
            match ranks.done(0, id) {
                Some(Ok(_)) => {}
                Some(Err(TransferError::Lost { peer: 1, .. })) => assert!(at > told, "seed {seed}"),
                other => panic!("seed {seed}: {other:?}"),
            }
        }
        let id = ranks.submit(0, 2, put(&regions[0].whole(), regions[2].remote(), 1));
        ranks.drain();
        assert_eq!(ranks.done(0, id), Some(Ok(0)));
        assert!(ranks.world.is_dead(1) && !ranks.world.is_dead(0));
        assert_eq!(ranks.world.transfers_under_way(), 0);
    }
}

#[test]
fn a_device_dropped_without_bye_is_a_loss_and_one_that_left_is_none() {
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        let (ours, theirs) = (ranks.register(0, 2_000), ranks.register(1, 2_000));
        ours.whole().store(&[4; 2_000]);
        let last = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        ranks.device(0).leave();
        assert!(!ranks.device(0).flush(Flush::All), "a put and two byes are still to be said");
        while !ranks.saw(1, &Event::Departed { peer: 0 }) {
            assert!(ranks.step());
        }
        assert_eq!(theirs.whole().to_vec(), [4; 2_000], "what was sent before the bye arrives first");
        assert_eq!(ranks.count(1, 0, 0), 1);
        ranks.until(|ranks| ranks.device(0).flush(Flush::All));
        assert_eq!(ranks.done(0, last), Some(Ok(0)));
        ranks.devices[0] = None;
        ranks.devices[2] = None;
        ranks.drain();
        assert_eq!(ranks.lost(1, 0), None, "seed {seed}: it said bye");
        assert_eq!(ranks.lost(1, 2), Some(LossCause::ConnectionClosed));
        assert_eq!(
            ranks.try_submit(1, 0, Submission::Signal(signal(0))),
            Err(SubmitError::Departed { peer: 0 })
        );
    }
}

/// Severs while puts and mapped writes of the peer are under way; how many bytes changed after
/// `Severed`.
fn writes_after_severed(options: Options) -> usize {
    let maps = options.maps;
    let seed = options.seed;
    let mut ranks = Ranks::connected(options);
    let (ours, theirs) = (ranks.register(0, 10_000), ranks.register(1, 10_000));
    theirs.whole().store(&[1; 10_000]);
    for signal_slot in 0..8 {
        ranks.submit(1, 0, put(&theirs.whole(), ours.remote(), signal_slot));
    }
    let mapped = maps.then(|| {
        let mut mapped = None;
        // The announcement of the region may be on its way.
        while mapped.is_none() {
            mapped = ranks.device(1).map(0, &ours.remote()).ok();
            ranks.step();
        }
        mapped.expect("just mapped")
    });
    let mine = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
    let steps = Random::new(seed).below(30);
    for _ in 0..steps {
        ranks.step();
    }
    ranks.device(0).sever(1);
    let refused = ranks.try_submit(0, 1, Submission::Signal(signal(0)));
    assert!(matches!(refused, Err(SubmitError::Severed { peer: 1 })), "seed {seed}: {refused:?}");
    ranks.until(|ranks| ranks.saw(0, &Event::Severed { peer: 1 }));
    ours.whole().store(&[9; 10_000]);
    if let Some(mapped) = &mapped {
        // A rank that was stopped in the middle of a mapped reduce and goes on.
        mapped.store(0, &[7; 10_000]);
    }
    ranks.drain();
    assert!(ranks.done(0, mine).is_some());
    assert!(ranks.lost(1, 0).is_some(), "the other end finds out");
    assert_eq!(ranks.lost(0, 1), None, "severed is not lost");
    ours.whole().to_vec().iter().filter(|&&byte| byte != 9).count()
}

#[test]
fn a_severed_peer_changes_no_byte_any_more_and_the_mutant_does() {
    let mut broken = 0;
    for seed in 0..40 {
        for maps in [false, true] {
            assert_eq!(writes_after_severed(Options { maps, ..harsh(2, seed) }), 0, "seed {seed}");
        }
        let options = mutated(Some(Mutant::SeveredPeerWrites), harsh(2, seed));
        broken += usize::from(writes_after_severed(options) > 0);
    }
    assert!(broken > 10, "the mutant wrote in {broken} of 40 runs");
}

#[test]
fn a_link_that_goes_down_is_found_at_both_ends_and_nothing_passes_it() {
    for seed in 0..10 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        let (ours, theirs) = (ranks.register(0, 1_000), ranks.register(1, 1_000));
        ours.whole().store(&[1; 1_000]);
        let id = ranks.submit(0, 1, put(&ours.whole(), theirs.remote(), 0));
        // The first wire of a full mesh joins ranks 0 and 1.
        ranks.world.inject(Fault::LinkDown { link: LinkId(0) });
        ranks.drain();
        assert_eq!(ranks.lost(0, 1), Some(LossCause::LinkDown));
        assert_eq!(ranks.lost(1, 0), Some(LossCause::LinkDown));
        assert_eq!((ranks.lost(0, 2), ranks.lost(2, 1)), (None, None));
        assert!(matches!(ranks.done(0, id), Some(Err(TransferError::Lost { .. }))));
        assert_eq!(theirs.whole().to_vec(), [0; 1_000]);
    }
}

#[test]
fn a_one_sided_loss_is_seen_at_one_end_at_once_and_at_the_other_within_the_bound() {
    let mut went_on = 0;
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(2, seed));
        let (ours, theirs) = (ranks.register(0, 100), ranks.register(1, 100));
        let start = ranks.world.now();
        ranks.world.inject(Fault::OneSidedLoss { rank: 0, peer: 1 });
        ranks.poll(0);
        assert!(ranks.lost(0, 1).is_some());
        // The other end knows nothing yet: what it sends is accepted, and may even land.
        theirs.whole().store(&[6; 100]);
        ranks.submit(1, 0, put(&theirs.whole(), ours.remote(), 0));
        ranks.until(|ranks| ranks.lost(1, 0).is_some());
        assert!(ranks.world.now() - start <= Duration::from_millis(1), "seed {seed}");
        went_on += usize::from(ours.whole().to_vec() == [6; 100]);
        ranks.drain();
    }
    assert!(went_on > 5, "{went_on}");
}

#[test]
fn a_frozen_rank_makes_no_progress_and_then_goes_on() {
    let mut ranks = Ranks::connected(options(2, 1));
    let freeze = Fault::Freeze { rank: 1, duration: Duration::from_millis(5), watcher: false };
    let start = ranks.world.now();
    ranks.world.inject(freeze);
    assert!(ranks.world.is_frozen(1) && !ranks.world.is_frozen(0));
    ranks.submit(0, 1, Submission::Signal(signal(0)));
    ranks.until(|ranks| {
        ranks.poll(1);
        ranks.count(1, 0, 0) == 1
    });
    assert_eq!(ranks.world.now() - start, Duration::from_millis(5));
    assert!(!ranks.world.is_frozen(1));
}

#[test]
fn a_busy_ranks_watcher_answers_and_a_stopped_ones_does_not() {
    for watcher in [false, true] {
        let mut ranks = Ranks::connected(options(2, 1));
        let duration = Duration::from_millis(5);
        let start = ranks.world.now();
        ranks.world.inject(Fault::Freeze { rank: 1, duration, watcher });
        ranks.device(0).post(1, b"?what are you doing", Urgency::Ordinary).expect("posted");
        ranks.until(|ranks| !ranks.listeners[0].heard.lock().unwrap().is_empty());
        assert_eq!(*ranks.listeners[0].heard.lock().unwrap(), [(1, b"!".to_vec())]);
        assert_eq!(ranks.world.now() - start > duration, watcher);
    }
}

#[test]
fn messages_of_one_peer_arrive_in_order_whatever_is_late() {
    for seed in 0..20 {
        let mut ranks = Ranks::connected(harsh(3, seed));
        for number in 0..50u8 {
            for rank in [0, 2] {
                ranks.device(rank).post(1, &[number], Urgency::Ordinary).expect("posted");
            }
        }
        ranks.drain();
        let heard = ranks.listeners[1].heard.lock().unwrap();
        for rank in [0, 2] {
            let numbers = heard.iter().filter(|(from, _)| *from == rank).map(|(_, message)| message[0]);
            assert!(numbers.eq(0..50), "seed {seed}");
        }
    }
}

#[test]
fn messages_that_cannot_be_sent_are_refused() {
    let mut ranks = Ranks::alone(options(2, 1));
    assert_eq!(ranks.device(0).post(1, b"x", Urgency::Ordinary), Err(PostError::NotConnected { peer: 1 }));
    let mut ranks = Ranks::connected(options(2, 1));
    assert_eq!(
        ranks.device(0).post(1, &[0; 5_000], Urgency::Ordinary),
        Err(PostError::TooLong { bytes: 5_000 })
    );
    let refused = (0..2_000).find_map(|_| ranks.device(0).post(1, b"x", Urgency::Ordinary).err());
    assert_eq!(refused, Some(PostError::QueueFull { peer: 1 }));
    ranks.drain();
    ranks.device(0).post(1, b"x", Urgency::Ordinary).expect("there is room again");
}
