//! Where samples come from: the built-in digits, a folder of IDX files, a text in LIBSVM's form.

use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use pleach_training::svm::libsvm::{self, Text};
use pleach_training::svm::{FeatureError, Samples};

use crate::cli::digits::{DataError, DataSet, Digits};

/// A file, a folder, or the built-in digits.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Digits,
    Path(PathBuf),
}

impl FromStr for Source {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(if text == "digits" { Self::Digits } else { Self::Path(text.into()) })
    }
}

/// Which labels become which classes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Labels {
    /// 1 for even labels, -1 for odd ones.
    Even,
    /// 1 for this label, -1 for all others.
    One(i32),
}

impl FromStr for Labels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "even" => Ok(Self::Even),
            Ok(label) => Ok(Self::One(label)),
            Err(_) => Err("give 'even' or the label of one class".to_owned()),
        }
    }
}

impl Labels {
    fn class(self, label: i32) -> i32 {
        let is_first = match self {
            Self::Even => label % 2 == 0,
            Self::One(one) => label == one,
        };
        if is_first { 1 } else { -1 }
    }
}

/// Samples with their classes.
#[derive(Debug, Default)]
pub(crate) struct Labelled {
    pub(crate) samples: Samples,
    pub(crate) labels: Vec<i32>,
}

/// A rank's part of the data.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) train: Labelled,
    /// The samples of all ranks.
    pub(crate) train_rows: usize,
    /// Samples held out of the training, if there are any.
    pub(crate) test: Option<Labelled>,
}

/// Why there are no samples.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    #[error(transparent)]
    Digits(#[from] DataError),
    #[error("samples not read: {} ({error}); check the name and its permissions", .path.display())]
    Unopened { path: PathBuf, error: std::io::Error },
    #[error("bad samples: {}: {error}", .path.display())]
    Text { path: PathBuf, error: libsvm::TextError },
    #[error("bad samples: {} ({error})", .path.display())]
    Feature { path: PathBuf, error: FeatureError },
}

impl Source {
    /// The part of one of several ranks. Everything is read and checked by each rank, so that all
    /// find the same errors.
    pub(crate) fn part(
        &self,
        test: Option<&Path>,
        labels: Option<Labels>,
        (rank, ranks): (usize, usize),
    ) -> Result<Part, SourceError> {
        let own = |rows: usize| rows * rank / ranks..rows * (rank + 1) / ranks;
        let mut part = match self {
            Self::Path(path) if !path.is_dir() => {
                let (train, train_rows) = read_text(path, own)?;
                Part { train, train_rows, test: None }
            }
            _ => {
                let data = match self {
                    Self::Digits => DataSet::built_in()?,
                    Self::Path(folder) => DataSet::from_folder(folder)?,
                };
                let train = digits(&data.train, own(data.train.len()));
                let test = digits(&data.test, own(data.test.len()));
                let path = || match self {
                    Self::Digits => PathBuf::from("built-in digits"),
                    Self::Path(folder) => folder.clone(),
                };
                let bad = |error| SourceError::Feature { path: path(), error };
                Part {
                    train: train.map_err(bad)?,
                    train_rows: data.train.len(),
                    test: Some(test.map_err(bad)?),
                }
            }
        };
        if let Some(path) = test {
            part.test = Some(read_text(path, own)?.0);
        }
        if let Some(classes) = labels {
            let all = part.test.iter_mut().chain([&mut part.train]);
            all.flat_map(|part| &mut part.labels).for_each(|label| *label = classes.class(*label));
        }
        Ok(part)
    }
}

/// The samples of a text in this range of its rows, and how many it has.
fn read_text(path: &Path, own: impl Fn(usize) -> Range<usize>) -> Result<(Labelled, usize), SourceError> {
    let open = || {
        let file =
            File::open(path).map_err(|error| SourceError::Unopened { path: path.to_owned(), error })?;
        Ok::<_, SourceError>(BufReader::new(file))
    };
    let bad = |error| SourceError::Text { path: path.to_owned(), error };
    // Twice, as the number of rows decides which are this rank's.
    let rows = libsvm::read(open()?, |_| false).map_err(bad)?.rows;
    let own = own(rows);
    let Text { samples, labels, .. } = libsvm::read(open()?, |row| own.contains(&row)).map_err(bad)?;
    Ok((Labelled { samples, labels }, rows))
}

fn digits(digits: &Digits, own: Range<usize>) -> Result<Labelled, FeatureError> {
    let mut part = Labelled::default();
    let pixels = digits.image_pixels() as u32;
    part.samples.widen(pixels);
    for image in own {
        part.samples.push_dense(digits.image(image), pixels)?;
        part.labels.push(digits.label(image) as i32);
    }
    Ok(part)
}
