//! LIBSVM's model file: a header of lines, then a line for each support vector.

use std::io::{self, BufRead, Read as _, Write};
use std::str::FromStr;

use super::super::kernel::Kernel;
use super::super::model::Model;
use super::super::samples::Samples;
use super::{Defect, LINE_BYTES_MAX, features, number, shown, words};

/// Most classes of a model that is read.
const CLASSES_MAX: usize = 1 << 12;

/// Why there is no model.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be read.
    #[error("it cannot be read ({0}); check the file and its permissions")]
    Unreadable(#[from] io::Error),
    /// A line of the header is wrong.
    #[error("line {line}: '{text}' does not belong to a model; give a file that pleach or svm-train wrote")]
    Header {
        /// From 1.
        line: usize,
        /// Its beginning.
        text: String,
    },
    /// The model is of a kind that is not supported.
    #[error("line {line}: {what} '{kind}' is not supported; train a c_svc with a kernel of features")]
    Kind {
        /// From 1.
        line: usize,
        /// Of what.
        what: &'static str,
        /// The kind.
        kind: String,
    },
    /// A line of the header is not there, or contradicts another one.
    #[error("the header's {0} is missing or has another length than the others; the file is damaged")]
    Incomplete(&'static str),
    /// A support vector is wrong.
    #[error("line {line}, column {column}: {defect}")]
    Vector {
        /// From 1.
        line: usize,
        /// In bytes, from 1.
        column: usize,
        /// What is wrong.
        defect: Defect,
    },
    /// There are fewer or more support vectors than the header says.
    #[error(
        "the file ends after {found} of {expected} support vectors, or goes on behind them; it was cut or damaged"
    )]
    Cut {
        /// How many there are.
        found: usize,
        /// How many the header promises.
        expected: usize,
    },
}

/// Writes a model as LIBSVM does. Numbers are written with as many digits as it takes to read the
/// same ones again.
///
/// # Errors
///
/// Of the writer.
pub fn write_model(model: &Model, mut to: impl Write) -> io::Result<()> {
    writeln!(to, "svm_type c_svc")?;
    match model.kernel {
        Kernel::Linear => writeln!(to, "kernel_type linear")?,
        Kernel::Polynomial { degree, gamma, offset } => {
            writeln!(to, "kernel_type polynomial\ndegree {degree}\ngamma {gamma}\ncoef0 {offset}")?;
        }
        Kernel::Rbf { gamma } => writeln!(to, "kernel_type rbf\ngamma {gamma}")?,
        Kernel::Sigmoid { gamma, offset } => {
            writeln!(to, "kernel_type sigmoid\ngamma {gamma}\ncoef0 {offset}")?;
        }
    }
    writeln!(to, "nr_class {}\ntotal_sv {}", model.classes.len(), model.vectors.len())?;
    writeln!(to, "rho {}", joined(&model.rhos))?;
    writeln!(to, "label {}\nnr_sv {}\nSV", joined(&model.classes), joined(&model.class_counts))?;
    for vector in 0..model.vectors.len() {
        for coefficient in model.coefficients(vector) {
            write!(to, "{coefficient} ")?;
        }
        for (index, value) in model.vectors.nonzero(vector) {
            write!(to, "{index}:{value} ")?;
        }
        writeln!(to)?;
    }
    to.flush()
}

fn joined<T: ToString>(values: &[T]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// The header of a file.
#[derive(Default)]
struct Header {
    kernel: Option<String>,
    degree: Option<u32>,
    gamma: Option<f64>,
    offset: Option<f64>,
    classes: Option<usize>,
    vectors: Option<usize>,
    rhos: Vec<f64>,
    labels: Vec<i32>,
    class_counts: Vec<usize>,
}

/// Reads a model that [`write_model`] or LIBSVM wrote: a classifier (`c_svc` or `nu_svc`).
///
/// # Errors
///
/// See [`ModelError`].
pub fn read_model(mut from: impl BufRead) -> Result<Model, ModelError> {
    let (mut header, mut line, mut number) = (Header::default(), Vec::new(), 0);
    let mut next = |line: &mut Vec<u8>| -> Result<Option<usize>, ModelError> {
        line.clear();
        number += 1;
        let length = from.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', line)?;
        if length as u64 > LINE_BYTES_MAX {
            return Err(ModelError::Vector { line: number, column: length, defect: Defect::Long });
        }
        Ok((length > 0).then_some(number))
    };
    loop {
        let Some(number) = next(&mut line)? else { return Err(ModelError::Incomplete("line 'SV'")) };
        let text = String::from_utf8_lossy(&line);
        if text.trim() == "SV" {
            break;
        }
        header.take(text.trim(), number)?;
    }
    let (kernel, classes, vectors) = header.complete()?;
    let (mut found, mut coefficients) = (Samples::new(0), Vec::new());
    let mut pairs = Vec::new();
    while let Some(line_number) = next(&mut line)? {
        let mut words = words(&line).peekable();
        if words.peek().is_none() {
            continue;
        }
        if found.len() == vectors {
            return Err(ModelError::Cut { found: vectors + 1, expected: vectors });
        }
        let bad = |(column, defect)| ModelError::Vector { line: line_number, column, defect };
        for _ in 1..classes {
            let (column, word) = words.next().unwrap_or((line.len().max(1), b""));
            let value = super::number(word).filter(|value| value.is_finite());
            coefficients.push(value.ok_or_else(|| bad((column, Defect::Value(shown(word)))))?);
        }
        pairs.clear();
        features(words, &mut pairs).map_err(bad)?;
        found.push(pairs.iter().copied()).map_err(|error| bad((1, error.into())))?;
        if !line.ends_with(b"\n") {
            return Err(ModelError::Cut { found: found.len() - 1, expected: vectors });
        }
    }
    if found.len() != vectors {
        return Err(ModelError::Cut { found: found.len(), expected: vectors });
    }
    Ok(Model {
        kernel,
        classes: header.labels,
        rhos: header.rhos,
        class_counts: header.class_counts,
        vectors: found,
        coefficients,
        numbers: Vec::new(),
        features: None,
        training: None,
    })
}

impl Header {
    /// Takes a line.
    fn take(&mut self, text: &str, line: usize) -> Result<(), ModelError> {
        let wrong = || ModelError::Header { line, text: shown(text.as_bytes()) };
        let (name, values) = text.split_once(' ').ok_or_else(wrong)?;
        let unsupported = |what| ModelError::Kind { line, what, kind: shown(values.as_bytes()) };
        match name {
            "svm_type" if ["c_svc", "nu_svc"].contains(&values) => {}
            "svm_type" => return Err(unsupported("the type")),
            "kernel_type" if ["linear", "polynomial", "rbf", "sigmoid"].contains(&values) => {
                self.kernel = Some(values.to_owned());
            }
            "kernel_type" => return Err(unsupported("the kernel")),
            "degree" => self.degree = Some(values.parse().map_err(|_| wrong())?),
            "gamma" => self.gamma = Some(finite(values).ok_or_else(wrong)?),
            "coef0" => self.offset = Some(finite(values).ok_or_else(wrong)?),
            "nr_class" => self.classes = Some(values.parse().map_err(|_| wrong())?),
            "total_sv" => self.vectors = Some(values.parse().map_err(|_| wrong())?),
            "rho" => self.rhos = list(values, finite).ok_or_else(wrong)?,
            "label" => self.labels = list(values, parsed).ok_or_else(wrong)?,
            "nr_sv" => self.class_counts = list(values, parsed).ok_or_else(wrong)?,
            // Of estimates of probabilities.
            "probA" | "probB" | "prob_density_marks" => {}
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// The kernel, the number of classes and that of support vectors, if all belongs together.
    fn complete(&self) -> Result<(Kernel, usize, usize), ModelError> {
        let missing = ModelError::Incomplete;
        let gamma = self.gamma.ok_or(missing("gamma"));
        let offset = self.offset.ok_or(missing("coef0"));
        let kernel = match self.kernel.as_deref() {
            Some("linear") => Kernel::Linear,
            Some("rbf") => Kernel::Rbf { gamma: gamma? },
            Some("sigmoid") => Kernel::Sigmoid { gamma: gamma?, offset: offset? },
            Some(_) => Kernel::Polynomial {
                degree: self.degree.ok_or(missing("degree"))?,
                gamma: gamma?,
                offset: offset?,
            },
            None => return Err(missing("kernel_type")),
        };
        let classes = self.classes.filter(|classes| (2..=CLASSES_MAX).contains(classes));
        let classes = classes.ok_or(missing("nr_class"))?;
        let vectors = self.vectors.ok_or(missing("total_sv"))?;
        if self.rhos.len() != classes * (classes - 1) / 2 {
            return Err(missing("rho"));
        }
        if self.labels.len() != classes {
            return Err(missing("label"));
        }
        let sum = self.class_counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if self.class_counts.len() != classes || sum != Some(vectors) {
            return Err(missing("nr_sv"));
        }
        Ok((kernel, classes, vectors))
    }
}

fn finite(text: &str) -> Option<f64> {
    number(text.as_bytes()).filter(|number| number.is_finite())
}

fn parsed<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn list<T>(text: &str, value: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
    text.split_ascii_whitespace().map(value).collect()
}
