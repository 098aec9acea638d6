//! Started reads of mapped memory whose owner publishes faster than they go on, in virtual time.

use std::time::Duration;

use pleach_transport::sim;

use super::{Layout, OneSided, ReadId, Request, Target, Word};
use crate::engine::{Address, Engine, FaultKind};
use crate::simulate::Cluster;
use crate::simulate::in_window::open;

/// Far more than a poll copies.
const BYTES: usize = 5 << 20;
const TIMEOUT: Duration = Duration::from_millis(300);

/// Two ranks that map each other's memory.
fn cluster() -> Cluster {
    let network = sim::Network::full_mesh(2, 1_000_000_000, Duration::from_micros(5));
    let options = sim::Options { maps: true, ..sim::Options::new(network, 1) };
    let mut cluster = Cluster::with_signal_slots(options, 1);
    let are_ready = |cluster: &mut Cluster| cluster.members.iter().flatten().all(|it| it.engine.is_ready());
    cluster.run(are_ready).expect("they connect");
    open(&mut cluster, Layout::new(BYTES, 0, 2).expect("a few bytes"), |_| ());
    cluster
}

fn window_of(cluster: &mut Cluster, rank: usize) -> (&mut OneSided, &mut Engine) {
    let member = cluster.members[rank].as_mut().expect("no rank has died");
    (member.window.as_mut().expect("installed before"), &mut member.engine)
}

/// Rank 1 reads all that rank 0 publishes.
fn start(cluster: &mut Cluster, into: &mut [u64]) -> ReadId {
    let target = Target::Private(Address::of(bytemuck::cast_slice_mut(into)));
    let request = Request { peer: 0, range: 0..BYTES, target, is_torn: false, timeout: TIMEOUT };
    window_of(cluster, 1).0.start_read(request).expect("one at a time")
}

#[test]
fn a_poll_copies_a_part_so_that_other_threads_have_their_turn() {
    let mut cluster = cluster();
    let now = cluster.world.now();
    let mut into = vec![vec![9; BYTES / 8]; 2];
    let ids: Vec<_> = into.iter_mut().map(|into| start(&mut cluster, into)).collect();
    let (window, engine) = window_of(&mut cluster, 1);
    let mut polls = 0;
    while window.reads.are_under_way() {
        assert!(window.poll(engine, now), "they go on");
        polls += 1;
    }
    assert!(polls >= (2 * BYTES) >> 20, "{polls} polls");
    for id in ids {
        assert_eq!(window.reads.take(id), Some((0, Word::EMPTY)));
    }
    assert!(into.iter().flatten().all(|element| *element == 0));
}

#[test]
fn a_read_that_is_overwritten_again_and_again_ends_at_its_deadline() {
    let mut cluster = cluster();
    let mut into = vec![9; BYTES / 8];
    start(&mut cluster, &mut into);
    let begun_at = cluster.world.now();
    let mut now = begun_at;
    loop {
        let (owner, _) = window_of(&mut cluster, 0);
        for _ in 0..2 {
            owner.publisher.begin();
            owner.publisher.finish(Word::EMPTY);
        }
        let (window, engine) = window_of(&mut cluster, 1);
        window.poll(engine, now);
        if !engine.works() {
            break;
        }
        assert!(window.reads.are_under_way(), "it holds no version");
        assert!(now < begun_at + TIMEOUT, "its time is up");
        now += Duration::from_millis(1);
    }
    assert_eq!(now, begun_at + TIMEOUT);
    let failed =
        |cluster: &mut Cluster| cluster.members.iter().flatten().all(|it| it.engine.failure().is_some());
    cluster.run(failed).expect("all ranks are told");
    for member in cluster.members.iter().flatten() {
        let fault = member.engine.failure().expect("looked at before");
        assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 0));
        assert!(fault.detail.contains("whose elements were overwritten"), "{}", fault.detail);
    }
}
