//! Grids with holes: proved, carried out, and counted: peers, rounds and bytes.

use std::collections::BTreeSet;

use pleach_vocabulary::random::Random;
use pleach_vocabulary::{Collective, Rank};

use super::interpreter::{LAYOUTS, interpret};
use super::{Access, Algorithm, Cover, GridShape, generate, grid};
use crate::cost::Work;
use crate::rank_space::RankSpace;
use crate::verify::{expect_partial_rounds, verify};
use crate::{Op, Schedule};

const COLLECTIVES: [Collective; 3] =
    [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter];

/// What a schedule that has been made is for.
struct Made {
    what: String,
    schedule: Schedule,
}

/// Both algorithms in every form, for each collective.
fn all_by(shape: &GridShape, ranks: u32) -> Vec<Made> {
    let mut all = Vec::new();
    for collective in COLLECTIVES {
        for algorithm in [Algorithm::Grid(shape.clone()), Algorithm::GridStaged(shape.clone())] {
            for access in [Access::Put, Access::Mapped] {
                if algorithm.carries_out(collective) {
                    let what = format!("{collective} by {algorithm} of {ranks} ({access})");
                    let schedule = generate(collective, &algorithm, ranks, access);
                    all.push(Made {
                        schedule: schedule.unwrap_or_else(|error| panic!("{what}: {error}")),
                        what,
                    });
                }
            }
        }
    }
    all
}

/// The shapes of so many dimensions, of extents up to the number of ranks, that have holes; of
/// those that differ only in lines without a rank, one.
fn shapes(ranks: u32, dimensions: u32) -> BTreeSet<Vec<u32>> {
    let mut shapes = BTreeSet::new();
    for number in 0..ranks.pow(dimensions) {
        let extents: Vec<u32> = (0..dimensions).map(|place| number / ranks.pow(place) % ranks + 1).collect();
        let Ok(space) = RankSpace::new(&extents, ranks) else { continue };
        if space.places() > u64::from(ranks) {
            shapes.insert(space.extents().to_vec());
        }
    }
    shapes
}

/// Most ranks of which every schedule is carried out, and most of which one in eight is.
const INTERPRETED_RANKS_MAX: (u32, u32) = (12, 24);

/// Proves the schedule, and carries it out in a random order on one layout of memory.
fn check(made: Made, random: &mut Random) {
    let Made { what, schedule } = made;
    let layout = LAYOUTS[random.index(LAYOUTS.len())];
    let (all, some) = INTERPRETED_RANKS_MAX;
    let is_drawn = schedule.ranks() <= some && random.index(8) == 0;
    if (schedule.ranks() <= all || is_drawn)
        && let Err(error) = interpret(&schedule, layout, schedule.window + 1, random.bits())
    {
        panic!("{what}, {layout:?}: {error}");
    }
    let proof = verify(schedule).unwrap_or_else(|violation| panic!("{what}: {violation}"));
    if proof.schedule().collective.reduces() {
        assert_eq!(expect_partial_rounds(proof.schedule()), Ok(()), "{what}");
    }
}

fn check_all(ranks: impl Iterator<Item = u32>, dimensions: &[u32]) -> u32 {
    let mut checked = 0;
    for ranks in ranks {
        let random = &mut Random::new(u64::from(ranks));
        for &dimensions in dimensions {
            for extents in shapes(ranks, dimensions) {
                for made in all_by(&extents.into(), ranks) {
                    check(made, random);
                    checked += 1;
                }
            }
        }
    }
    checked
}

#[test]
fn every_grid_with_holes_of_a_few_ranks_is_proved_and_carried_out() {
    let checked = check_all(2..=9, &[2, 3]);
    assert!(checked > 400, "{checked}");
}

/// `cargo test --release -p pleach-schedule --lib -- --ignored up_to_24_ranks`
#[test]
#[ignore = "takes minutes; .ci/nightly runs it"]
fn every_grid_with_holes_of_up_to_24_ranks_is_proved() {
    let checked = check_all(2..=24, &[2, 3]);
    assert!(checked > 5000, "{checked}");
}

#[test]
fn random_grids_with_holes_of_up_to_64_ranks_are_proved() {
    let random = &mut Random::new(31);
    for _ in 0..12 {
        let (ranks, dimensions) = (10 + random.below(55) as u32, 2 + random.index(3));
        let extents = loop {
            let extents: Vec<u32> = (0..dimensions).map(|_| 1 + random.below(9) as u32).collect();
            if RankSpace::new(&extents, ranks).is_ok_and(|space| !space.is_full()) {
                break extents;
            }
        };
        let mut all = all_by(&extents.into(), ranks);
        check(all.swap_remove(random.index(all.len())), random);
    }
}

/// By rank: the peers that it sends to or gets something from, or whose memory it touches.
fn peers(schedule: &Schedule) -> Vec<BTreeSet<Rank>> {
    let mut peers = vec![BTreeSet::new(); schedule.programs.len()];
    let mut meet = |rank: Rank, peer: Rank| {
        if rank != peer {
            peers[rank as usize].insert(peer);
            peers[peer as usize].insert(rank);
        }
    };
    for (rank, lanes) in (0..).zip(&schedule.programs) {
        for step in lanes.iter().flat_map(|lane| &lane.steps) {
            match &step.op {
                Op::Put { to, .. } | Op::Signal { to, .. } => meet(rank, *to),
                Op::Wait { from, .. } => meet(rank, *from),
                Op::Reduce { from, into } => {
                    from.iter().chain(into).for_each(|place| meet(rank, place.rank));
                }
            }
        }
    }
    peers
}

#[test]
fn no_rank_of_up_to_64_has_peers_outside_of_its_lines() {
    for ranks in 2..=64 {
        for dimensions in [2, 3] {
            let shape = GridShape::Dimensions(dimensions);
            let space = shape.space(ranks).expect("it fits");
            let most = space.extents().iter().map(|extent| extent - 1).sum::<u32>() as usize;
            let is_line = |rank: Rank, peer: Rank| {
                (0..space.extents().len()).any(|dimension| space.line(rank, dimension).any(|it| it == peer))
            };
            for Made { what, schedule } in all_by(&shape, ranks) {
                for (rank, peers) in (0..).zip(peers(&schedule)) {
                    assert!(peers.len() <= most, "{what}: rank {rank} has {peers:?}");
                    assert!(
                        peers.iter().all(|&peer| is_line(rank, peer)),
                        "{what}: rank {rank} has {peers:?}"
                    );
                }
            }
        }
    }
}

/// By rank: the blocks that it puts.
fn sent(schedule: &Schedule) -> Vec<u32> {
    let put = |lanes: &Vec<crate::Lane>| {
        let steps = lanes.iter().flat_map(|lane| &lane.steps);
        steps.filter(|step| matches!(step.op, Op::Put { .. })).count() as u32
    };
    schedule.programs.iter().map(put).collect()
}

/// Grids of two and three dimensions with and without holes, balanced and not.
fn counted_spaces() -> Vec<RankSpace> {
    let balanced = (2..=64).flat_map(|ranks| [2, 3].map(|dimensions| RankSpace::balanced(ranks, dimensions)));
    let others = [[2, 7, 1], [7, 2, 1], [2, 2, 5], [5, 2, 2], [2, 5, 2], [3, 1, 6]];
    let others = others.into_iter().flat_map(|extents| {
        let places = extents.iter().product::<u32>();
        (places / 2 + 1..=places).map(move |ranks| RankSpace::new(&extents, ranks).expect("it fits"))
    });
    balanced.chain(others).collect()
}

#[test]
fn a_grid_sends_the_bytes_that_its_module_says() {
    for space in counted_spaces() {
        let (p, places) = (space.ranks(), space.places() as u32);
        let (extents, holes) = (space.extents(), places - p);
        let shape = GridShape::from(extents.to_vec());
        // The largest product of all extents but the last and one more.
        let (_, before) = extents.split_last().expect("two or three");
        let without = |dimension: usize| {
            let others = before.iter().enumerate().filter(|&(other, _)| other != dimension);
            others.map(|(_, extent)| extent).product::<u32>()
        };
        let children = places - 1 + holes * (0..before.len()).map(without).max().expect("one at least");
        for (collective, total, most) in [
            (Collective::AllReduce, 2 * p * (p - 1), p - 1 + children),
            (Collective::ReduceScatter, p * (p - 1), p - 1),
            (Collective::AllGather, p * (p - 1), children),
        ] {
            let made =
                generate(collective, &Algorithm::Grid(shape.clone()), p, Access::Put).expect("it fits");
            let sent = sent(&made);
            let what = format!("{collective} of {p} in {extents:?}: {sent:?}, not more than {most}");
            assert_eq!(sent.iter().sum::<u32>(), total, "{what}");
            assert!(sent.iter().all(|&sent| sent <= most), "{what}");
            if collective == Collective::AllReduce && (before.len() == 1 || holes == 0) {
                assert_eq!(sent.iter().max(), Some(&(2 * (places - 1))), "{what}");
            }
            let rounds = Work::of(&made).rounds;
            let depth = 2 * extents.len() as u32;
            assert!(rounds <= depth, "{what}: {rounds} rounds");
        }
    }
}

#[test]
fn a_staged_grid_sends_the_bytes_that_its_module_says() {
    for space in counted_spaces() {
        let (full, layered) = space.full_layers();
        let (blocks, layers) = (full.ranks(), full.extents()[layered]);
        let shape = GridShape::from(space.extents().to_vec());
        let algorithm = Algorithm::GridStaged(shape);
        let made = generate(Collective::AllReduce, &algorithm, space.ranks(), Access::Put).expect("it fits");
        assert_eq!(made.blocks.len() as u32, blocks);
        let of_lines: u32 = full.extents().iter().map(|extent| 2 * (extent - 1) * (blocks / extent)).sum();
        let represented = space.ranks() - blocks;
        let layer = blocks / layers;
        for (rank, sent) in (0..).zip(sent(&made)) {
            let what = format!("{algorithm} of {}: rank {rank}", space.ranks());
            let is_proxy = rank < blocks && rank % layer < represented;
            let expected = match rank < blocks {
                true => of_lines + if is_proxy { blocks / layers } else { 0 },
                false => blocks,
            };
            assert_eq!(sent, expected, "{what}");
            if is_proxy {
                // Along the layers, in shares of the whole: no more than a sixth above the grid
                // that has one full layer more.
                let (l, whole) = (f64::from(layers), f64::from(blocks));
                let along = f64::from(sent - of_lines + 2 * (layers - 1) * layer) / whole;
                let added = along - 2.0 * l / (l + 1.0);
                assert!((added - (l - 1.0) / (l * (l + 1.0))).abs() < 1e-9, "{what}: {added}");
                assert!(added <= 1.0 / 6.0 + 1e-9, "{what}: {added}");
            }
        }
        let stages = full.extents().iter().filter(|&&extent| extent > 1).count() as u32;
        let rounds = Work::of(&made).rounds;
        let more = if represented > 0 && layers == 1 { 2 } else { 0 };
        assert_eq!(rounds, 2 * stages + more, "{algorithm} of {}", space.ranks());
    }
}

/// The generator names the root itself where no line leads on.
#[test]
fn sums_are_right_whatever_the_holes() {
    let random = &mut Random::new(9);
    for number in 0..60 {
        let extents: &[u32] = if number % 2 == 0 { &[4, 4] } else { &[3, 2, 3] };
        let places = extents.iter().product();
        let mut seats: Vec<u32> = (0..places).collect();
        random.shuffle(&mut seats);
        seats.truncate(2 + random.index(places as usize - 3));
        let space = RankSpace::of_seats(extents, seats).expect("seats of the grid");
        for collective in COLLECTIVES {
            for access in [Access::Put, Access::Mapped] {
                let schedule = grid::schedule(collective, &space, access, Cover::All);
                check(Made { what: format!("{collective} of {space:?} ({access})"), schedule }, random);
            }
        }
    }
}
