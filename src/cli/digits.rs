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
    image_pixels: usize,
}

impl Digits {
    /// Pixels of one image.
    pub(crate) fn image_pixels(&self) -> usize {
        self.image_pixels
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(crate) fn image(&self, index: usize) -> &[f32] {
        &self.pixels[index * self.image_pixels..][..self.image_pixels]
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
        Self { pixels, labels, image_pixels: self.image_pixels }
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
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_built_in_digits_are_all_there_and_a_fifth_is_held_out() {
        let data = DataSet::built_in().expect("is whole");
        assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels()), (1438, 359, 64));
        for digits in [&data.train, &data.test] {
            assert!((0..10).all(|digit| (0..digits.len()).any(|index| digits.label(index) == digit)));
            assert!(
                (0..digits.len())
                    .all(|index| digits.image(index).iter().all(|pixel| (0.0..=1.0).contains(pixel)))
            );
        }
    }

    /// A folder of its own that goes when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pleach-digits-{name}-{}", std::process::id()));
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
        assert_eq!((data.train.len(), data.test.len(), data.train.image_pixels()), (40, 10, 4));
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
