//! A group that is told of its links, and told again.

use std::sync::Arc;

use pleach_collectives::{Group, JoinGroupError, Options, SetTopologyError};
use pleach_packing::topology::{LATENCY_NS, Topology, preset};
use pleach_schedule::Algorithm;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, ReduceOp};

use crate::ranks::{Folder, with_group, world};

const RANKS: u32 = 4;
/// Long enough for links to matter more than messages, in bytes.
const LONG: usize = 64 << 20;

fn ring() -> Topology {
    preset("ring:4").expect("a preset")
}

/// A line, whose ends no link joins.
fn line() -> Topology {
    let mut builder = Topology::builder();
    let nodes: Vec<_> = (0..RANKS).map(|rank| builder.rank(format!("r{rank}"))).collect();
    for pair in nodes.windows(2) {
        builder.duplex(pair[0], pair[1], 1_000_000_000, LATENCY_NS);
    }
    builder.build().expect("connected")
}

fn algorithm(group: &Group) -> String {
    group.algorithm_for(Collective::AllGather, LONG).expect("there is one")
}

/// Moves numbers along whatever is packed, and looks at all of them.
fn expect_right_results(group: &Group) {
    const LEN: usize = 50_000;
    let (group, rank) = (group.with_variant(Algorithm::Packed(None)), group.rank());
    let own = |rank: u32| (0..LEN).map(|index| index as u32 ^ rank << 20).collect::<Vec<u32>>();
    let mut all = vec![0; LEN * RANKS as usize];
    group.all_gather(&own(rank)[..], &mut all[..]).unwrap();
    assert_eq!(all, (0..RANKS).flat_map(own).collect::<Vec<_>>());
    let mut data = if rank == 2 { own(2) } else { vec![0; LEN] };
    group.broadcast(&mut data[..], 2).unwrap();
    assert_eq!(data, own(2));
    let mut part = vec![0u64; LEN];
    let whole: Vec<u64> = (0..LEN as u64 * u64::from(RANKS)).map(|index| index + u64::from(rank)).collect();
    group.reduce_scatter(&whole[..], &mut part[..], ReduceOp::Sum).unwrap();
    let first = LEN as u64 * u64::from(rank);
    assert!(part.iter().zip(first..).all(|(sum, index)| *sum == 4 * index + 6), "{:?}", &part[..8]);
    let mut sum = vec![u64::from(rank); LEN];
    group.reduce(&mut sum[..], ReduceOp::Sum, 1).unwrap();
    assert!(rank != 1 || sum.iter().all(|sum| *sum == 6));
    let mut gathered = vec![0; if rank == 3 { LEN * RANKS as usize } else { 0 }];
    group.gather(&own(rank)[..], &mut gathered[..], 3).unwrap();
    assert!(rank != 3 || gathered == (0..RANKS).flat_map(own).collect::<Vec<_>>());
    let mut scattered = vec![0; LEN];
    group.scatter(&gathered[..], &mut scattered[..], 3).unwrap();
    assert_eq!(scattered, own(rank));
}

fn a_group_packs_for_its_links_and_anew_when_it_is_told_of_others(fabric: Fabric) {
    with_group(
        fabric,
        RANKS,
        |_| (),
        |group| {
            assert!(!algorithm(&group).starts_with("packed"), "of no links it knows nothing");
            group.set_topology(Some(&ring())).unwrap();
            let before = algorithm(&group);
            assert!(before.starts_with("packed:"), "{before}");
            expect_right_results(&group);
            group.set_topology(Some(&line())).unwrap();
            assert_eq!(group.topology(), Some(line()));
            let after = algorithm(&group);
            assert!(after.starts_with("packed:") && after != before, "{before} {after}");
            expect_right_results(&group);
            group.set_topology(None).unwrap();
            assert!(!algorithm(&group).starts_with("packed"));
        },
    );
}

fn ranks_that_are_told_of_different_links_all_hear_of_it_and_go_on_as_before(fabric: Fabric) {
    with_group(
        fabric,
        RANKS,
        |_| (),
        |group| {
            let own = if group.rank() == 1 { line() } else { ring() };
            let error = group.set_topology(Some(&own)).unwrap_err();
            let SetTopologyError::Differs { rank, theirs, own } = error else { panic!("{error}") };
            assert_eq!(rank, u32::from(group.rank() != 1), "the first that was told something else");
            assert!(theirs != own && theirs.ranks == 4);
            assert_eq!(group.topology(), None);
            let error = group.set_topology(Some(&preset("ring:3").expect("a preset"))).unwrap_err();
            assert!(matches!(error, SetTopologyError::Ranks { nodes: 3, ranks: RANKS }), "{error}");
            let mut sum = [1u64];
            group.all_reduce(&mut sum[..], ReduceOp::Sum).unwrap();
            assert_eq!(sum, [4]);
        },
    );
}

fn a_part_of_a_group_has_the_links_between_its_ranks(fabric: Fabric) {
    with_group(
        fabric,
        RANKS,
        |options| options.topology = Some(Arc::new(line())),
        |group| {
            assert_eq!(group.topology(), Some(line()));
            let rank = group.rank();
            let pair = group.split(Some(rank / 2), 0).unwrap().expect("a colour");
            let named = pair.topology().map(|topology| topology.name(topology.node(0)).to_owned());
            assert_eq!(named, Some(format!("r{}", rank / 2 * 2)));
            let apart = group.split(Some(rank % 2), 0).unwrap().expect("a colour");
            assert_eq!(apart.topology(), None, "nothing joins r0 and r2 without r1");
        },
    );
}

crate::on_every_fabric!(
    a_group_packs_for_its_links_and_anew_when_it_is_told_of_others,
    ranks_that_are_told_of_different_links_all_hear_of_it_and_go_on_as_before,
    a_part_of_a_group_has_the_links_between_its_ranks,
);

/// Joins with this topology on one of two ranks, and another on the other.
#[test]
fn ranks_that_join_with_different_links_are_told_both() {
    let folder = Folder::new();
    let errors: Vec<JoinGroupError> = std::thread::scope(|scope| {
        let threads: Vec<_> = [("mesh:2", 0), ("mesh:2@7", 1)]
            .into_iter()
            .map(|(name, rank)| {
                let folder = &folder;
                scope.spawn(move || {
                    let mut options = Options::new(world(rank, 2, &folder.0));
                    options.topology = Some(Arc::new(preset(name).expect("a preset")));
                    Group::join(&options).expect_err("they differ")
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for error in errors {
        assert!(error.to_string().contains("topology"), "{error}");
    }
}
