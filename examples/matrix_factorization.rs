//! Matrix factorization with bounded staleness: ranks have ratings of different users, and change
//! one table of user and item factors, of which each rank owns a shard. A step is one batch of
//! ratings, and changes the rows of their users and items: only these are sent, and kept by the
//! owners.
//!
//! `pleach run -n 4 -- cargo run --release --example matrix_factorization [SCHEME]`
//!
//! With `ssp:staleness=3` no rank is more than three steps ahead of the slowest. A rank waits only
//! where its copy lacks a step that old. SCHEME is another bound, as `bsp` or `bap:distance=32`.
//! The end checks ratings that no rank has seen.

use pleach::{Group, Options};
use pleach_training::{Layout, Rows, Sgd, TrainError, Trainer};
use pleach_vocabulary::random::Random;

type Failure = Box<dyn std::error::Error>;

const USERS: usize = 64;
const ITEMS: usize = 48;
/// Factors of a user or an item.
const FACTORS: usize = 4;
/// Ratings of a step.
const BATCH: usize = 32;
const STEPS: u64 = 4_000;
const LEARNING_RATE: f32 = 0.1;
/// The root of the mean square error that is asked for, where ratings are from -4 to 4.
const ERROR_MAX: f32 = 0.1;

/// A user, an item, and the rating.
type Rating = (usize, usize, f32);

fn main() -> Result<(), Failure> {
    let scheme = std::env::args().nth(1).unwrap_or_else(|| "ssp:staleness=3".to_owned());
    let group = Group::join(&Options::from_env()?)?;
    let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);
    let (seen, unseen): (Vec<Rating>, Vec<Rating>) =
        ratings().into_iter().partition(|(user, item, _)| (31 * user + 17 * item) % 5 < 3);
    let own: Vec<Rating> = seen.into_iter().filter(|(user, ..)| user % ranks == rank).collect();

    // Rows of the table: users, then items.
    let layout = Layout::table(USERS + ITEMS, FACTORS);
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, 0.0);
    let mut trainer = Trainer::new(&group, &scheme.parse()?, &layout, STEPS)?;
    let mut random = Random::new(5);
    trainer.parameters_mut().fill_with(|| uniform(&mut random) / 2.0);
    while let Some(mut step) = trainer.step()? {
        let batch = own.iter().cycle().skip(step.number() as usize * BATCH).take(BATCH);
        let loss = add_slopes(&mut step.rows()?, batch)?;
        step.update(|table, gradient| sgd.step(table, gradient), loss)?;
    }
    let trained = trainer.finish()?;

    let error = root_mean_square(&trained.parameters, &unseen);
    assert!(trained.guarantee_held && trained.parameters_equal, "{scheme} keeps what it guarantees");
    assert!(error < ERROR_MAX, "ratings that no rank has seen are wrong by {error}");
    if rank == 0 {
        println!("{ranks} ranks by {scheme}: ratings that no rank has seen are wrong by {error:.4}");
    }
    Ok(group.close()?)
}

/// Adds what each rating of a batch asks of the factors of its user and its item. Returns the root
/// of the mean square error before.
fn add_slopes<'a>(table: &mut Rows<'_>, batch: impl Iterator<Item = &'a Rating>) -> Result<f32, TrainError> {
    let mut sum = 0.0;
    for (user, item, rating) in batch {
        let (user, item) = (*user, USERS + item);
        let [of_user, of_item] = [table.read_row(user)?.to_vec(), table.read_row(item)?.to_vec()];
        let error = product(&of_user, &of_item) - rating;
        sum += error * error;
        let times_error = |factors: Vec<f32>| factors.iter().map(|x| error * x).collect::<Vec<_>>();
        table.add(user, &times_error(of_item))?;
        table.add(item, &times_error(of_user))?;
    }
    Ok((sum / BATCH as f32).sqrt())
}

fn uniform(random: &mut Random) -> f32 {
    random.index(1 << 16) as f32 / 32768.0 - 1.0
}

/// All ratings: products of factors that are drawn.
fn ratings() -> Vec<Rating> {
    let mut random = Random::new(3);
    let factors: Vec<f32> = (0..(USERS + ITEMS) * FACTORS).map(|_| uniform(&mut random)).collect();
    let pairs = (0..USERS).flat_map(|user| (0..ITEMS).map(move |item| (user, item)));
    pairs
        .map(|(user, item)| (user, item, product(&factors[row(user)], &factors[row(USERS + item)])))
        .collect()
}

fn row(number: usize) -> std::ops::Range<usize> {
    number * FACTORS..(number + 1) * FACTORS
}

fn product(left: &[f32], right: &[f32]) -> f32 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// How much ratings are wrong by.
fn root_mean_square(table: &[f32], ratings: &[Rating]) -> f32 {
    let error =
        |(user, item, rating): &Rating| product(&table[row(*user)], &table[row(USERS + item)]) - rating;
    let sum: f32 = ratings.iter().map(|rating| error(rating) * error(rating)).sum();
    (sum / ratings.len() as f32).sqrt()
}
