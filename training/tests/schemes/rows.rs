//! Tables of rows: of an update the rows that it changes are sent and kept, of a share the rows
//! that have changed are read, and nothing else changes.

use pleach_collectives::Rank;
use pleach_training::simulation::Settings;
use pleach_training::{Layout, Learner, Sgd, Simulation, TrainError, Trainer};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::model::{STEPS, price, scheme, settings};
use super::real::{RANKS, with_group};

const ROWS: usize = 26;
const LENGTH: usize = 3;

/// Pulls the rows that a rank draws in a step to numbers of their own.
struct Sparse {
    /// Whether the model is a table.
    is_table: bool,
    /// Rows of a step.
    drawn: usize,
    /// Elements of a row.
    length: usize,
}

/// The rows that a rank draws in a step, and what each asks for.
fn drawn(rank: Rank, step: u64, count: usize) -> Vec<(usize, f32)> {
    let mut random = Random::new(chain(hash_of_pair(11, rank.into()), step));
    (0..count).map(|_| (random.index(ROWS), random.index(9) as f32 / 4.0 + 0.5)).collect()
}

impl Learner for Sparse {
    fn layout(&self) -> Layout {
        if self.is_table { Layout::table(ROWS, self.length) } else { Layout::of(&[ROWS * self.length]) }
    }

    fn initial(&self) -> Vec<f32> {
        (0..ROWS * self.length).map(|at| 1.0 + at as f32 / 7.0).collect()
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        gradient.fill(0.0);
        for (row, wanted) in drawn(rank, step, self.drawn) {
            let place = row * self.length..(row + 1) * self.length;
            for (gradient, x) in gradient[place.clone()].iter_mut().zip(&parameters[place]) {
                *gradient += x - wanted;
            }
        }
        1.0
    }
}

fn simulated(text: &str, ranks: u32, is_table: bool, drawn: usize) -> (Vec<f32>, u64) {
    simulated_of(text, ranks, &Sparse { is_table, drawn, length: LENGTH })
}

fn simulated_of(text: &str, ranks: u32, learner: &Sparse) -> (Vec<f32>, u64) {
    let settings = Settings { learning_rate: 0.1, ..settings(ranks) };
    let simulation = Simulation::new(learner, &scheme(text), &settings).expect("is not refused");
    let trained = simulation.run(&mut price, &mut |_| {}).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert!(trained.guarantee_held && trained.parameters_equal, "{text} on {ranks} ranks");
    (trained.parameters, trained.bytes_per_rank)
}

#[test]
fn rows_change_no_bit_where_results_do_not_depend_on_times_and_send_fewer_bytes() {
    for text in
        ["bsp", "ssp:staleness=0", "easgd:every=2,mode=round-robin", "gossip:direction=push,peer=ring"]
    {
        for ranks in [1, 2, 4, 7] {
            let (dense, all_bytes) = simulated(text, ranks, false, 2);
            let (sparse, bytes) = simulated(text, ranks, true, 2);
            assert_eq!(sparse, dense, "{text} on {ranks} ranks");
            if text.contains("sp") && ranks > 1 {
                assert!(bytes < all_bytes, "{text} on {ranks} ranks: {bytes} of {all_bytes}");
            }
        }
    }
    // Where all rows are changed, all are sent.
    let (dense, all_bytes) = simulated("bsp", 4, false, 400);
    assert_eq!(simulated("bsp", 4, true, 400).0, dense);
    assert!(simulated("bsp", 4, true, 400).1 <= all_bytes + 4 * STEPS * (LENGTH as u64 * 2 * 4));
}

/// Elements of a row so long that two rows with one between them are not read together.
const LONG: usize = 300;

/// Bytes that rank 0 reads and writes with `bsp`, if it reads the rows that any rank has changed in
/// a step, and writes those that it has changed itself.
fn bytes_of_changed_rows() -> u64 {
    let per_share = ROWS.div_ceil(RANKS as usize);
    let shares: Vec<_> =
        (1..RANKS as usize).map(|owner| owner * per_share..ROWS.min((owner + 1) * per_share)).collect();
    let changed = |ranks: std::ops::Range<Rank>, step: u64, share: &std::ops::Range<usize>| {
        let rows = ranks.flat_map(|rank| drawn(rank, step, 2)).map(|(row, _)| row);
        rows.filter(|row| share.contains(row)).collect::<std::collections::BTreeSet<_>>().len()
    };
    let mut elements = 0;
    for (step, share) in (0..STEPS).flat_map(|step| shares.iter().map(move |share| (step, share))) {
        // A row that is written has its number with it, and all rows that are read have stamps.
        elements += (LONG + 1) * changed(0..1, step, share);
        let rows_read = if step == 0 { share.len() } else { changed(0..RANKS, step, share) };
        elements += share.len() + LONG * rows_read;
    }
    (size_of::<f32>() * elements) as u64
}

/// Trains a table of long rows by `bsp` on real ranks.
fn trained_long(fabric: Fabric) -> Vec<(Vec<f32>, u64)> {
    with_group(fabric, |group| {
        let learner = Sparse { is_table: true, drawn: 2, length: LONG };
        let layout = learner.layout();
        let mut trainer = Trainer::new(&group, &scheme("bsp"), &layout, STEPS).expect("has memory");
        trainer.parameters_mut().copy_from_slice(&learner.initial());
        let mut sgd = Sgd::new(layout.parameters(), 0.1, 0.0);
        while let Some(mut step) = trainer.step().expect("goes on") {
            let number = step.number();
            let (parameters, gradient) = step.vectors().expect("nothing is ready");
            let loss = learner.gradient(group.rank(), number, parameters, gradient);
            step.update(|table, gradient| sgd.step(table, gradient), loss).expect("goes on");
        }
        let trained = trainer.finish().expect("ends");
        group.close().expect("all ranks close");
        (trained.parameters.to_vec(), trained.progress.bytes)
    })
}

#[test]
fn rows_that_no_rank_has_changed_are_not_read_again() {
    let learner = |is_table| Sparse { is_table, drawn: 2, length: LONG };
    let (dense, all_bytes) = simulated_of("bsp", RANKS, &learner(false));
    let (sparse, bytes) = simulated_of("bsp", RANKS, &learner(true));
    assert_eq!(sparse, dense);
    assert_eq!(bytes, bytes_of_changed_rows());
    assert!(bytes < all_bytes / 3, "{bytes} of {all_bytes}");
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let ranks = trained_long(fabric);
        assert!(ranks.iter().all(|(parameters, _)| *parameters == dense), "{fabric:?}");
        // An owner that publishes between two reads of a rank makes it read again.
        let counted = ranks[0].1;
        assert!(counted >= bytes && counted < all_bytes / 3, "{fabric:?}: {counted} of {bytes}");
    }
}

#[test]
fn each_scheme_trains_a_table() {
    for text in ["ssp", "dssp:low=1,high=4", "bap:distance=9", "asp", "gossip", "downpour:every=3", "sync"] {
        for ranks in [1, 3, 4] {
            simulated(text, ranks, true, 2);
        }
    }
}

#[test]
fn real_ranks_that_read_and_add_rows_have_the_bits_of_the_simulation() {
    let (expected, _) = simulated("bsp", RANKS, true, 2);
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for text in ["bsp", "ssp:staleness=2", "asp"] {
            let all = with_group(fabric, |group| {
                let layout = Layout::table(ROWS, LENGTH);
                let trainer = Trainer::new(&group, &scheme(text), &layout, STEPS).expect("has memory");
                let mut trainer = trainer.checked();
                let learner = Sparse { is_table: true, drawn: 2, length: LENGTH };
                trainer.parameters_mut().copy_from_slice(&learner.initial());
                let mut sgd = Sgd::new(layout.parameters(), 0.1, 0.0);
                let mut run = || -> Result<(), TrainError> {
                    while let Some(mut step) = trainer.step()? {
                        let number = step.number();
                        let mut rows = step.rows()?;
                        assert_eq!(rows.count(), ROWS);
                        for (row, wanted) in drawn(group.rank(), number, 2) {
                            let slope: Vec<f32> = rows.read_row(row)?.iter().map(|x| x - wanted).collect();
                            rows.add(row, &slope)?;
                        }
                        step.update(|table, gradient| sgd.step(table, gradient), 1.0)?;
                    }
                    Ok(())
                };
                run().unwrap_or_else(|error| panic!("{text}: {error}"));
                let trained = trainer.finish().expect("ends");
                group.close().expect("all ranks close");
                trained
            });
            for trained in all {
                assert!(trained.guarantee_held && trained.parameters_equal, "{text}, {fabric:?}");
                if text == "bsp" {
                    assert_eq!(trained.parameters[..], expected, "{fabric:?}");
                }
            }
        }
    }
}

#[test]
fn rows_that_there_are_not_are_refused() {
    let errors = with_group(Fabric::Shm, |group| {
        let mut trainer = Trainer::new(&group, &scheme("bsp"), &Layout::of(&[6]), 1).expect("has memory");
        let mut step = trainer.step().expect("begins").expect("there is one");
        let no_table = step.rows().err().expect("is no table").to_string();
        trainer.finish().expect("ends after no step");
        let mut trainer = Trainer::new(&group, &scheme("sync"), &Layout::table(3, 2), 1).expect("has memory");
        let mut step = trainer.step().expect("begins").expect("there is one");
        let mut rows = step.rows().expect("is a table");
        let beyond = rows.read_row(3).expect_err("there are three").to_string();
        let longer = rows.add(2, &[0.0; 3]).expect_err("a row has two").to_string();
        assert!(rows.add(2, &[0.0; 2]).is_ok());
        trainer.finish().expect("ends after no step");
        group.close().expect("all ranks close");
        [no_table, beyond, longer]
    });
    for [no_table, beyond, longer] in errors {
        assert!(no_table.contains("Layout::table"), "{no_table}");
        assert!(beyond.contains("row 3") && beyond.contains("3 rows of 2"), "{beyond}");
        assert!(longer.contains("row 2 with 3 elements"), "{longer}");
    }
}
