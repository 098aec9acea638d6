//! Handwritten digits: the built-in ones, or a folder with the files of MNIST.
//!
//! Both have the IDX form, gzipped or not: a magic number, the dimensions, then one byte for each
//! value. The reader does not trust the sizes in a file: it reads up to a limit and counts.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::{fs, io};

use flate2::read::GzDecoder;
use pleach_training::Sample;

/// The number of different digits.
pub(crate) const CLASSES: usize = 10;

/// Most bytes that a file may hold when unpacked; MNIST's largest has 47 million.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Images and the digits they show.
#[derive(Debug)]
pub(crate) struct Digits {
    /// From 0 (paper) to 1 (ink), image after image.
    pixels: Vec<f32>,
    labels: Vec<u8>,
    rows: usize,
    columns: usize,
}

impl Digits {
    /// Images of so many rows and columns, with a label each.
    ///
    /// # Panics
    ///
    /// There are more or fewer pixels, or a label is no digit.
    pub(crate) fn new(pixels: Vec<f32>, labels: Vec<u8>, [rows, columns]: [usize; 2]) -> Self {
        assert_eq!(pixels.len(), labels.len() * rows * columns, "an image for each label");
        assert!(labels.iter().all(|label| usize::from(*label) < CLASSES), "labels are digits");
        Self { pixels, labels, rows, columns }
    }

    /// Pixels of one image.
    pub(crate) fn image_pixels(&self) -> usize {
        self.rows * self.columns
    }

    /// The images with each square of `pool` times `pool` pixels averaged; `None` where an image is
    /// not made of such squares.
    pub(crate) fn pooled(&self, pool: usize) -> Option<Self> {
        if pool == 0 || !self.rows.is_multiple_of(pool) || !self.columns.is_multiple_of(pool) {
            return None;
        }
        let [rows, columns] = [self.rows / pool, self.columns / pool];
        let mut pixels = Vec::with_capacity(self.len() * rows * columns);
        for image in (0..self.len()).map(|index| self.image(index)) {
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let square = (0..pool).flat_map(|down| (0..pool).map(move |right| (down, right)));
                let sum: f32 = square
                    .map(|(down, right)| image[(row * pool + down) * self.columns + column * pool + right])
                    .sum();
                pixels.push(sum / (pool * pool) as f32);
            }
        }
        Some(Self { pixels, labels: self.labels.clone(), rows, columns })
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(crate) fn image(&self, index: usize) -> &[f32] {
        &self.pixels[index * self.image_pixels()..][..self.image_pixels()]
    }

    pub(crate) fn label(&self, index: usize) -> usize {
        self.labels[index].into()
    }

    /// The images with their labels.
    pub(crate) fn samples(&self) -> impl Iterator<Item = Sample<'_>> {
        (0..self.len()).map(|index| self.sample(index))
    }

    /// An image with its label.
    pub(crate) fn sample(&self, index: usize) -> Sample<'_> {
        (self.image(index), self.label(index))
    }

    /// Every fifth image apart from the others: those to learn from, and those to choose by.
    pub(crate) fn validation(&self) -> (Self, Self) {
        let (chosen_by, learned): (Vec<_>, Vec<_>) = (0..self.len()).partition(|index| index % 5 == 4);
        (self.pick(learned.into_iter()), self.pick(chosen_by.into_iter()))
    }

    fn pick(&self, which: impl Iterator<Item = usize>) -> Self {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for index in which {
            pixels.extend_from_slice(self.image(index));
            labels.push(self.labels[index]);
        }
        Self { pixels, labels, ..*self }
    }
}

/// The training set and the test set.
#[derive(Debug)]
pub(crate) struct DataSet {
    pub(crate) train: Digits,
    pub(crate) test: Digits,
}

/// Why there are no data.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("data not found: {} (or .gz of it); put the files of MNIST there, or leave --data away", .0.display())]
    Missing(PathBuf),
    #[error("data not readable: {} ({error}); fetch the file again, or check its permissions", .path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("not the IDX data expected: {} ({defect}); fetch the file again", .path.display())]
    Broken { path: PathBuf, defect: Defect },
    #[error("files do not belong together: {} ({left}, but {right}); fetch them again", .path.display())]
    Unequal { path: PathBuf, left: String, right: String },
    #[error(
        "no squares of {pool}×{pool} pixels: images of {rows}×{columns} are not made of them; give --pool a divisor of both"
    )]
    Squares { pool: usize, rows: usize, columns: usize },
}

/// An error in a file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Defect {
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
    pub(crate) fn built_in() -> Result<Self, DataError> {
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
    pub(crate) fn from_folder(folder: &Path) -> Result<Self, DataError> {
        let missing = || DataError::Missing(folder.join("t10k-images-idx3-ubyte"));
        let held_out = read_digits(folder, "t10k")?.ok_or_else(missing)?;
        let Some(train) = read_digits(folder, "train")? else {
            let cut = held_out.len() - held_out.len() / 5;
            return Ok(Self { train: held_out.pick(0..cut), test: held_out.pick(cut..held_out.len()) });
        };
        let [left, right] =
            [&train, &held_out].map(|digits| format!("images of {} pixels", digits.image_pixels()));
        if left != right {
            return Err(DataError::Unequal { path: folder.to_owned(), left, right });
        }
        Ok(Self { train, test: held_out })
    }

    /// All images with each square of `pool` times `pool` pixels averaged.
    pub(crate) fn pooled(&self, pool: usize) -> Result<Self, DataError> {
        let pooled = |digits: &Digits| {
            let Digits { rows, columns, .. } = *digits;
            digits.pooled(pool).ok_or(DataError::Squares { pool, rows, columns })
        };
        Ok(Self { train: pooled(&self.train)?, test: pooled(&self.test)? })
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
    Ok(Digits::new(pixels, labels, [rows, columns]))
}
