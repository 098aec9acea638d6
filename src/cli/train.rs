//! `pleach train`: ranks that learn to read handwritten digits together.
//!
//! Every rank computes the gradients of its shard of each batch, and `all_reduce` averages them. So
//! all ranks take the same step. The end checks two things: all ranks have the same bits in their
//! parameters, and these are the parameters of one rank that trained on the same batches, up to
//! rounding.

use std::convert::Infallible;
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{Read, Write};
use std::ops::DerefMut;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use flate2::read::GzDecoder;
use pleach::transport::clock;
use pleach::transport::rendezvous::FabricChoice;
use pleach::{CollectiveError, Group, Options, ReduceOp};
use pleach_vocabulary::digest::Hasher64;
use pleach_vocabulary::random::Random;
use serde_json::json;

use crate::cli::launch::{Bind, WorldArguments, rank_or_launch};
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::rounded;

use crate::cli::{CommandError, progress};
use network::Network;

mod network;

/// Ranks that are started where nothing says how many.
const DEFAULT_RANKS: u32 = 4;

/// Enough for the built-in digits.
const DEFAULT_EPOCHS: u32 = 30;

/// Images in a batch, of all ranks together.
const BATCH: usize = 64;

/// All ranks begin with the same weights and shuffle alike.
const SEED: u64 = 42;

/// How far parameters may be from those of one rank, which adds the same numbers in another order,
/// as a share of the largest.
const ROUNDING: f32 = 2e-5;

/// Arguments of `pleach train`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach train\n  pleach train --ranks 2 --fabric tcp --data ~/mnist --epochs 5"
)]
pub(crate) struct Arguments {
    /// How many ranks to start here [default: 4]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// A folder with the files of MNIST, instead of the built-in digits
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// How many times the training passes over all images
    #[arg(long, value_name = "E", default_value_t = DEFAULT_EPOCHS, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Processors that each rank started here is bound to [default: core, if there are enough
    /// cores]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Serve metrics for Prometheus and 'pleach top'; rank r of a host listens on PORT + r;
    /// without IP the address is loopback
    #[arg(long, value_name = "[IP:]PORT")]
    metrics: Option<MetricsAddress>,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    world: WorldArguments,
}

/// Runs `pleach train`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let data = match &arguments.data {
        Some(folder) => DataSet::from_folder(folder).map_err(CommandError::usage)?,
        None => DataSet::built_in().map_err(CommandError::failed)?,
    };
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let group = Group::join(&options).map_err(CommandError::joining)?;
    let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);

    let bar = progress::bar("training", steps(&data.train, arguments.epochs), rank == 0);
    let mut gradients =
        group.buffer(Network::parameters_for(data.train.image_pixels)).map_err(CommandError::failed)?;
    let average = |gradients: &mut _| group.all_reduce(gradients, ReduceOp::Avg);
    let shard = Shard { rank, ranks };
    let trained = train(&data.train, arguments.epochs, shard, &mut gradients, average, || bar.inc(1))
        .map_err(CommandError::failed);
    bar.finish_and_clear();
    let trained = trained?;
    let summary = Summary::gather(&group, &trained).map_err(CommandError::failed)?;
    group.close().map_err(CommandError::failed)?;
    if rank != 0 {
        return Ok(());
    }

    let alone = Shard { rank: 0, ranks: 1 };
    let mut gradients = vec![0.0; trained.network.parameters().len()];
    let nobody = |_: &mut _| Ok::<_, Infallible>(());
    let Ok(one_rank) = train(&data.train, arguments.epochs, alone, &mut gradients, nobody, || ());
    let difference = difference(trained.network.parameters(), one_rank.network.parameters());
    let verdict = Verdict {
        accuracy: trained.network.accuracy(&data.test),
        examined: data.test.len(),
        parameters_equal: summary.parameters_equal,
        difference,
    };
    summary.print(&verdict, arguments.json).map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })?;
    verdict.check()
}

/// Which part of each batch is whose: every `ranks`-th image from `rank` on.
#[derive(Clone, Copy, Debug)]
struct Shard {
    rank: usize,
    ranks: usize,
}

/// The result of training on a rank.
#[derive(Debug)]
struct Trained {
    network: Network,
    steps: u64,
    time: Duration,
    communicating: Duration,
}

fn steps(digits: &Digits, epochs: u32) -> u64 {
    digits.len().div_ceil(BATCH) as u64 * u64::from(epochs)
}

/// The loop. `average` replaces the gradients by their average over all ranks.
fn train<G: DerefMut<Target = [f32]>, E>(
    digits: &Digits,
    epochs: u32,
    shard: Shard,
    gradients: &mut G,
    mut average: impl FnMut(&mut G) -> Result<(), E>,
    mut stepped: impl FnMut(),
) -> Result<Trained, E> {
    let mut network = Network::new(digits.image_pixels, SEED);
    // The ranks meet once before the clock starts: waiting for the last to come is not
    // communicating.
    average(gradients)?;
    let begin = clock::now();
    let mut communicating = Duration::ZERO;
    let mut random = Random::new(SEED);
    let mut order: Vec<usize> = (0..digits.len()).collect();
    for _ in 0..epochs {
        random.shuffle(&mut order);
        for batch in order.chunks(BATCH) {
            // Shares differ by an image where the batch cannot be divided, so each sums over its
            // own and divides by the average share: the average of these sums is the average over
            // the batch.
            let scale = shard.ranks as f32 / batch.len() as f32;
            let mine = batch.iter().copied().skip(shard.rank).step_by(shard.ranks);
            network.gradients(digits, mine, scale, gradients);
            let computed = clock::now();
            average(gradients)?;
            communicating += clock::now() - computed;
            network.step(gradients);
            stepped();
        }
    }
    Ok(Trained { network, steps: steps(digits, epochs), time: clock::now() - begin, communicating })
}

/// The largest difference between two sets of parameters, as a share of the largest parameter.
fn difference(left: &[f32], right: &[f32]) -> f32 {
    let largest = left.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    // The maximum must not swallow what is not a number.
    let differences = left.iter().zip(right).map(|(left, right)| (left - right).abs());
    let worst =
        differences.fold(0.0, |worst: f32, next| if next > worst || next.is_nan() { next } else { worst });
    worst / largest.max(f32::MIN_POSITIVE)
}

/// The combined result of all ranks.
#[derive(Debug)]
struct Summary {
    /// Steps a second and the share of time in communication, of each rank.
    ranks: Vec<[f64; 2]>,
    parameters_equal: bool,
}

impl Summary {
    fn gather(group: &Group, trained: &Trained) -> Result<Self, CollectiveError> {
        let seconds = trained.time.as_secs_f64();
        let own = [trained.steps as f64 / seconds, trained.communicating.as_secs_f64() / seconds];
        let mut all = vec![0.0; own.len() * group.world_size() as usize];
        group.all_gather(&own, &mut all)?;
        // The largest hash and the complement of the smallest in one go; equal if they are
        // complements.
        let hash = hash(trained.network.parameters());
        let mut extremes = [hash, !hash];
        group.all_reduce(&mut extremes, ReduceOp::Max)?;
        let parameters_equal = extremes[0] == !extremes[1];
        Ok(Self { ranks: all.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(), parameters_equal })
    }

    fn print(&self, verdict: &Verdict, as_json: bool) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if !as_json {
            writeln!(out, "rank    steps/s  communicating")?;
        }
        for (rank, [steps_per_s, shard]) in self.ranks.iter().enumerate() {
            if as_json {
                let (steps_per_s, shard) = (rounded(*steps_per_s, 1), rounded(*shard, 4));
                let row = json!({ "rank": rank, "steps_per_s": steps_per_s, "communication_share": shard });
                writeln!(out, "{row}")?;
            } else {
                writeln!(out, "{rank:>4} {steps_per_s:>10.1} {:>12.1} %", shard * 100.0)?;
            }
        }
        let Verdict { accuracy, examined, parameters_equal, difference } = verdict;
        let (ranks, matches) = (self.ranks.len(), verdict.matches_one_rank());
        if as_json {
            let row = json!({
                "test_accuracy": rounded(*accuracy, 4), "ranks": ranks, "parameters_equal": parameters_equal,
                "matches_one_rank": matches
            });
            writeln!(out, "{row}")
        } else {
            let [equal, matches] = [*parameters_equal, matches].map(|holds| if holds { "yes" } else { "NO" });
            writeln!(out, "all ranks have the same parameters, bit for bit: {equal}")?;
            writeln!(
                out,
                "they are those of one rank up to rounding: {matches} (largest difference {difference:.1e})"
            )?;
            writeln!(out, "test accuracy {accuracy:.4} on {examined} images never seen before")
        }
    }
}

/// A hash over the bits.
fn hash(parameters: &[f32]) -> i64 {
    let mut hasher = Hasher64::default();
    parameters.iter().for_each(|value| hasher.write(&value.to_bits().to_le_bytes()));
    hasher.finish().cast_signed()
}

/// Whether it went well.
#[derive(Debug)]
struct Verdict {
    accuracy: f64,
    examined: usize,
    parameters_equal: bool,
    /// From one rank's parameters; see [`difference`].
    difference: f32,
}

impl Verdict {
    fn matches_one_rank(&self) -> bool {
        self.difference <= ROUNDING
    }

    fn check(&self) -> Result<(), CommandError> {
        if !self.parameters_equal {
            return Err(CommandError::failed(
                "ranks differ: parameters do not have the same bits on all ranks; report this with PLEACH_LOG=debug",
            ));
        }
        if !self.matches_one_rank() {
            return Err(CommandError::failed(format!(
                "wrong parameters: they differ from one rank's by {:.1e} of the largest; report this with PLEACH_LOG=debug",
                self.difference
            )));
        }
        Ok(())
    }
}

// Handwritten digits: the built-in ones, or a folder with the files of MNIST.
//
// Both have the IDX form, gzipped or not: a magic number, the dimensions, then one byte for each
// value. The reader does not trust the sizes in a file: it reads up to a limit and counts.

/// The number of different digits.
const CLASSES: usize = 10;

/// Most bytes that a file may hold when unpacked; MNIST's largest has 47 million.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Images and the digits they show.
#[derive(Debug)]
struct Digits {
    /// From 0 (paper) to 1 (ink), image after image.
    pixels: Vec<f32>,
    labels: Vec<u8>,
    /// Pixels of one image.
    image_pixels: usize,
}

impl Digits {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn image(&self, index: usize) -> &[f32] {
        &self.pixels[index * self.image_pixels..][..self.image_pixels]
    }

    fn label(&self, index: usize) -> usize {
        self.labels[index].into()
    }

    fn pick(&self, which: impl Iterator<Item = usize>) -> Self {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for index in which {
            pixels.extend_from_slice(self.image(index));
            labels.push(self.labels[index]);
        }
        Self { pixels, labels, image_pixels: self.image_pixels }
    }
}

/// The training set and the test set.
#[derive(Debug)]
struct DataSet {
    train: Digits,
    test: Digits,
}

/// Why there are no data.
#[derive(Debug, thiserror::Error)]
enum DataError {
    #[error("data not found: {} (or .gz of it); put the files of MNIST there, or leave --data away", .0.display())]
    Missing(PathBuf),
    #[error("data not readable: {} ({error}); fetch the file again, or check its permissions", .path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("not the IDX data expected: {} ({defect}); fetch the file again", .path.display())]
    Broken { path: PathBuf, defect: Defect },
    #[error("files do not belong together: {} ({left}, but {right}); fetch them again", .path.display())]
    Unequal { path: PathBuf, left: String, right: String },
}

/// An error in a file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Defect {
    #[error("it begins with {0:#010x}, not {1:#010x}")]
    Magic(u32, u32),
    #[error("it promises {0} bytes, more than {FILE_BYTES_MAX}")]
    Large(u64),
    #[error("it promises {promised} bytes of values and has {present}")]
    Length { promised: u64, present: u64 },
    #[error("label {0} is no digit")]
    Label(u8),
    #[error("it holds nothing")]
    Empty,
}

impl DataSet {
    /// The 1,797 optical digits of UCI; every fifth is held out.
    fn built_in() -> Result<Self, DataError> {
        let images: &[u8] = include_bytes!("train/digits/images-idx3-ubyte.gz");
        let labels: &[u8] = include_bytes!("train/digits/labels-idx1-ubyte.gz");
        let (images_path, labels_path) = (Path::new("built-in images"), Path::new("built-in labels"));
        let images = idx(images_path, GzDecoder::new(images))?;
        let labels = idx(labels_path, GzDecoder::new(labels))?;
        let all = digits(images_path, images, labels_path, labels)?;
        let (test, train): (Vec<_>, Vec<_>) = (0..all.len()).partition(|index| index % 5 == 4);
        Ok(Self { train: all.pick(train.into_iter()), test: all.pick(test.into_iter()) })
    }

    /// MNIST from a folder. With the test files only, their last fifth is held out and the rest
    /// learnt from.
    fn from_folder(folder: &Path) -> Result<Self, DataError> {
        let missing = || DataError::Missing(folder.join("t10k-images-idx3-ubyte"));
        let held_out = read_digits(folder, "t10k")?.ok_or_else(missing)?;
        let Some(train) = read_digits(folder, "train")? else {
            let cut = held_out.len() - held_out.len() / 5;
            return Ok(Self { train: held_out.pick(0..cut), test: held_out.pick(cut..held_out.len()) });
        };
        let [left, right] =
            [&train, &held_out].map(|digits| format!("images of {} pixels", digits.image_pixels));
        if left != right {
            return Err(DataError::Unequal { path: folder.to_owned(), left, right });
        }
        Ok(Self { train, test: held_out })
    }
}

/// A pair of files; `None` where neither is there.
fn read_digits(folder: &Path, part: &str) -> Result<Option<Digits>, DataError> {
    let names = ["images-idx3", "labels-idx1"].map(|kind| folder.join(format!("{part}-{kind}-ubyte")));
    let [images, labels] = names.each_ref().map(|path| {
        let packed = PathBuf::from(format!("{}.gz", path.display()));
        [path, &packed].into_iter().find(|path| path.exists()).cloned()
    });
    match (images, labels) {
        (Some(images), Some(labels)) => {
            Ok(Some(digits(&images, read_idx(&images)?, &labels, read_idx(&labels)?)?))
        }
        (None, None) => Ok(None),
        (None, Some(_)) => Err(DataError::Missing(names[0].clone())),
        (Some(_), None) => Err(DataError::Missing(names[1].clone())),
    }
}

fn read_idx<const DIMENSIONS: usize>(path: &Path) -> Result<Idx<DIMENSIONS>, DataError> {
    let unreadable = |error| DataError::Unreadable { path: path.to_owned(), error };
    // Opening a pipe would wait for its other end.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(unreadable(io::Error::other("it is not a regular file")));
    }
    let file = io::BufReader::new(File::open(path).map_err(unreadable)?);
    if path.extension().is_some_and(|extension| extension == "gz") {
        idx(path, GzDecoder::new(file))
    } else {
        idx(path, file)
    }
}

/// The size of each dimension, and the values.
type Idx<const DIMENSIONS: usize> = ([usize; DIMENSIONS], Vec<u8>);

fn idx<const DIMENSIONS: usize>(path: &Path, mut reader: impl Read) -> Result<Idx<DIMENSIONS>, DataError> {
    let unreadable = |error| DataError::Unreadable { path: path.to_owned(), error };
    let broken = |defect| DataError::Broken { path: path.to_owned(), defect };
    let mut number = || -> Result<u32, DataError> {
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).map_err(unreadable)?;
        Ok(u32::from_be_bytes(bytes))
    };
    // Two zero bytes, 8 for "unsigned bytes", the number of dimensions.
    let (magic, expected) = (number()?, 0x0800 | DIMENSIONS as u32);
    if magic != expected {
        return Err(broken(Defect::Magic(magic, expected)));
    }
    let mut shape = [0; DIMENSIONS];
    for length in &mut shape {
        *length = number()? as usize;
    }
    let promised = shape.iter().fold(1, |product: u64, &length| product.saturating_mul(length as u64));
    if promised == 0 {
        return Err(broken(Defect::Empty));
    }
    if promised > FILE_BYTES_MAX {
        return Err(broken(Defect::Large(promised)));
    }
    // Memory grows with what is really there, and by no more than one byte too many.
    let mut values = Vec::new();
    reader.take(promised + 1).read_to_end(&mut values).map_err(unreadable)?;
    let present = values.len() as u64;
    if present != promised {
        return Err(broken(Defect::Length { promised, present }));
    }
    Ok((shape, values))
}

fn digits(
    images_path: &Path,
    ([count, rows, columns], pixels): Idx<3>,
    labels_path: &Path,
    (_, labels): Idx<1>,
) -> Result<Digits, DataError> {
    if let Some(&label) = labels.iter().find(|&&label| usize::from(label) >= CLASSES) {
        return Err(DataError::Broken { path: labels_path.to_owned(), defect: Defect::Label(label) });
    }
    if count != labels.len() {
        let (left, right) = (format!("{count} images"), format!("{} labels", labels.len()));
        return Err(DataError::Unequal { path: images_path.to_owned(), left, right });
    }
    // 16 or 255, whatever the blackest is.
    let ink = f32::from(pixels.iter().copied().max().unwrap_or(0).max(1));
    let pixels = pixels.iter().map(|&value| f32::from(value) / ink).collect();
    Ok(Digits { pixels, labels, image_pixels: rows * columns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use super::{DataError, Defect};

    #[test]
    fn the_built_in_digits_are_all_there_and_a_fifth_is_held_out() {
        let data = DataSet::built_in().expect("is whole");
        assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels), (1438, 359, 64));
        for digits in [&data.train, &data.test] {
            assert!((0..10).all(|digit| (0..digits.len()).any(|index| digits.label(index) == digit)));
            assert!(
                (0..digits.len())
                    .all(|index| digits.image(index).iter().all(|pixel| (0.0..=1.0).contains(pixel)))
            );
        }
    }

    /// All ranks in one thread: each computes its share, then all get the average. In one step a
    /// share may be lost.
    fn train_in_turn(digits: &Digits, epochs: u32, ranks: usize, lost_in_step: Option<u64>) -> Network {
        let mut network = Network::new(digits.image_pixels, SEED);
        let (mut random, mut order) = (Random::new(SEED), (0..digits.len()).collect::<Vec<_>>());
        let mut gradients = vec![0.0; network.parameters().len()];
        let mut step = 0;
        for _ in 0..epochs {
            random.shuffle(&mut order);
            for batch in order.chunks(BATCH) {
                let mut sum = vec![0.0; gradients.len()];
                step += 1;
                for rank in usize::from(lost_in_step == Some(step))..ranks {
                    let mine = batch.iter().copied().skip(rank).step_by(ranks);
                    network.gradients(digits, mine, ranks as f32 / batch.len() as f32, &mut gradients);
                    sum.iter_mut().zip(&gradients).for_each(|(sum, gradient)| *sum += gradient);
                }
                sum.iter_mut().for_each(|sum| *sum /= ranks as f32);
                network.step(&sum);
            }
        }
        network
    }

    fn train_alone(digits: &Digits, epochs: u32) -> Network {
        let mut gradients = vec![0.0; Network::parameters_for(digits.image_pixels)];
        let alone = Shard { rank: 0, ranks: 1 };
        let Ok(trained) = train(digits, epochs, alone, &mut gradients, |_| Ok::<_, Infallible>(()), || ());
        assert_eq!(trained.steps, steps(digits, epochs));
        trained.network
    }

    #[test]
    fn one_rank_learns_to_read_digits_it_never_saw() {
        let data = DataSet::built_in().expect("is whole");
        let accuracy = train_alone(&data.train, 12).accuracy(&data.test);
        assert!(accuracy >= 0.95, "{accuracy}");
    }

    #[test]
    fn any_number_of_ranks_learns_the_same_up_to_rounding() {
        let data = DataSet::built_in().expect("is whole");
        let epochs = 3;
        let alone = train_alone(&data.train, epochs);
        let from_alone = |ranks, lost_in_step| {
            let together = train_in_turn(&data.train, epochs, ranks, lost_in_step);
            difference(together.parameters(), alone.parameters())
        };
        for ranks in [2, 4, 7, 100] {
            let difference = from_alone(ranks, None);
            assert!(difference <= ROUNDING, "{ranks} ranks differ from one by {difference:e}");
        }
        let difference = from_alone(4, Some(steps(&data.train, epochs) / 2));
        assert!(difference > 10.0 * ROUNDING, "a share that is lost once must show: {difference:e}");
    }

    #[test]
    fn one_bit_makes_another_hash() {
        assert_eq!(hash(&[0.0, 1.0]), hash(&[0.0, 1.0]));
        assert_ne!(hash(&[0.0, 1.0]), hash(&[-0.0, 1.0]));
        assert_ne!(hash(&[0.0, 1.0]), hash(&[1.0, 0.0]));
    }

    #[test]
    fn a_wrong_number_is_never_close_to_a_right_one() {
        assert!(difference(&[1.0, 2.0], &[1.0, 2.0]) == 0.0);
        assert!(difference(&[1.0, 2.0], &[1.0, 1.5]) == 0.25);
        let not_a_number = Verdict {
            accuracy: 1.0,
            examined: 1,
            parameters_equal: true,
            difference: difference(&[1.0, f32::NAN], &[1.0, 0.0]),
        };
        assert!(!not_a_number.matches_one_rank() && not_a_number.check().is_err());
    }

    /// A folder of its own that goes when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pleach-train-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir_all(&path).expect("can be made");
            Self(path)
        }

        fn write(&self, name: &str, bytes: &[u8]) {
            std::fs::write(self.0.join(name), bytes).expect("can be written");
        }

        /// `count` images of 2×2 with labels in turn.
        fn write_part(&self, part: &str, count: u32) {
            let pixels: Vec<u8> = (0..count * 4).map(|at| at as u8).collect();
            self.write(&format!("{part}-images-idx3-ubyte"), &file(0x803, &[count, 2, 2], &pixels));
            let labels: Vec<u8> = (0..count).map(|at| (at % 10) as u8).collect();
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            packed.write_all(&file(0x801, &[count], &labels)).expect("fits memory");
            self.write(&format!("{part}-labels-idx1-ubyte.gz"), &packed.finish().expect("fits memory"));
        }

        fn defect(&self) -> Defect {
            match DataSet::from_folder(&self.0) {
                Err(DataError::Broken { defect, .. }) => defect,
                other => panic!("not broken: {other:?}"),
            }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn file(magic: u32, shape: &[u32], values: &[u8]) -> Vec<u8> {
        let head = std::iter::once(&magic).chain(shape).flat_map(|number| number.to_be_bytes());
        head.chain(values.iter().copied()).collect()
    }

    #[test]
    fn a_folder_with_the_test_files_only_is_split_and_with_all_four_is_not() {
        let folder = Folder::new("split");
        folder.write_part("t10k", 50);
        let data = DataSet::from_folder(&folder.0).expect("is whole");
        assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels), (40, 10, 4));
        assert_eq!((data.test.label(0), data.test.image(0)[3]), (0, 163.0 / 199.0));
        folder.write_part("train", 20);
        let data = DataSet::from_folder(&folder.0).expect("is whole");
        assert_eq!((data.train.len(), data.test.len()), (20, 50));
    }

    #[test]
    fn missing_files_are_named() {
        let folder = Folder::new("missing");
        let message = DataSet::from_folder(&folder.0).expect_err("is empty").to_string();
        assert!(
            message.contains("t10k-images-idx3-ubyte") && message.contains("leave --data away"),
            "{message}"
        );
        folder.write_part("t10k", 10);
        folder.write("train-labels-idx1-ubyte", &file(0x801, &[1], &[1]));
        let message = DataSet::from_folder(&folder.0).expect_err("is incomplete").to_string();
        assert!(message.contains("train-images-idx3-ubyte"), "{message}");
        let folder = Folder::new("folder-for-file");
        folder.write("t10k-labels-idx1-ubyte", &file(0x801, &[1], &[1]));
        std::fs::create_dir(folder.0.join("t10k-images-idx3-ubyte")).expect("can be made");
        assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
    }

    #[test]
    fn files_that_lie_are_refused_without_believing_their_sizes() {
        let folder = Folder::new("broken");
        folder.write_part("t10k", 10);
        let images = "t10k-images-idx3-ubyte";
        folder.write(images, &file(0x801, &[10, 2, 2], &[0; 40]));
        assert_eq!(folder.defect(), Defect::Magic(0x801, 0x803));
        folder.write(images, &file(0x803, &[u32::MAX, u32::MAX, u32::MAX], &[0; 40]));
        assert_eq!(folder.defect(), Defect::Large(u64::MAX));
        folder.write(images, &file(0x803, &[10, 2, 2], &[0; 39]));
        assert_eq!(folder.defect(), Defect::Length { promised: 40, present: 39 });
        folder.write(images, &file(0x803, &[10, 2, 2], &[0; 50]));
        assert_eq!(folder.defect(), Defect::Length { promised: 40, present: 41 });
        folder.write(images, &file(0x803, &[10, 0, 2], &[]));
        assert_eq!(folder.defect(), Defect::Empty);
        folder.write(images, &file(0x803, &[9, 2, 2], &[0; 36]));
        let message = DataSet::from_folder(&folder.0).expect_err("counts differ").to_string();
        assert!(message.contains("9 images") && message.contains("10 labels"), "{message}");
        folder.write(images, &[0, 0, 8]);
        assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
        folder.write_part("t10k", 10);
        folder.write("t10k-labels-idx1-ubyte", &file(0x801, &[10], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
        assert_eq!(folder.defect(), Defect::Label(10));
        std::fs::remove_file(folder.0.join("t10k-labels-idx1-ubyte")).expect("is there");
        folder.write("t10k-labels-idx1-ubyte.gz", b"not gzipped at all");
        assert!(matches!(DataSet::from_folder(&folder.0), Err(DataError::Unreadable { .. })));
    }
}
