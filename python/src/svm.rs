//! Support vector machines for `pleach.SVC`: samples come as bytes of f32, row by row.

use std::ops::ControlFlow;

use pleach_collectives::{Group as RustGroup, Options};
use pleach_training::svm::{
    Kernel, Model, Outcome, Parameters, Samples, Selection, Shrinking, Svm, SvmError, libsvm,
};
use pleach_transport::rendezvous::World;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error;
use crate::group::Group;

/// Iterations between two looks for signals, such as Ctrl-C.
const SIGNAL_ITERATIONS: u64 = 4_096;

/// A trained machine.
#[pyclass(frozen)]
pub(crate) struct SvmModel {
    model: Model,
    features: u32,
}

/// The kernel of this name.
fn kernel(py: Python<'_>, name: &str, degree: u32, gamma: f64, offset: f64) -> PyResult<Kernel> {
    match name {
        "linear" => Ok(Kernel::Linear),
        "poly" => Ok(Kernel::Polynomial { degree, gamma, offset }),
        "rbf" => Ok(Kernel::Rbf { gamma }),
        "sigmoid" => Ok(Kernel::Sigmoid { gamma, offset }),
        _ => Err(error::argument(py, format!("kernel is {name:?}; there are linear, poly, rbf, sigmoid"))),
    }
}

/// Samples of bytes of f32.
fn samples(py: Python<'_>, data: &[u8], features: u32) -> PyResult<Samples> {
    let (numbers, rest) = data.as_chunks::<4>();
    if features == 0 || !rest.is_empty() || !numbers.len().is_multiple_of(features as usize) {
        return Err(error::argument(py, format!("{} bytes are no rows of {features} f32", data.len())));
    }
    let numbers: Vec<f32> = numbers.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
    let mut samples = Samples::new(features);
    samples.push_dense(&numbers, features).map_err(|bad| error::argument(py, bad.to_string()))?;
    Ok(samples)
}

/// Trains a machine; see ``pleach.SVC``.
#[pyfunction]
#[pyo3(signature = (group, data, features, labels, *, kernel_name, degree, gamma, coef0, c, tolerance,
                    shrink, first_order, cache_bytes, iterations_max))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn svm_train(
    py: Python<'_>,
    group: Option<&Group>,
    data: &[u8],
    features: u32,
    labels: Vec<i32>,
    kernel_name: &str,
    degree: u32,
    gamma: f64,
    coef0: f64,
    c: f64,
    tolerance: f64,
    shrink: &str,
    first_order: bool,
    cache_bytes: usize,
    iterations_max: Option<u64>,
) -> PyResult<SvmModel> {
    let samples = samples(py, data, features)?;
    let shrinking = shrink.parse::<Shrinking>().map_err(|_| {
        let text = format!("shrink is {shrink:?}; give none, N or P%, then :single or :multi");
        error::argument(py, text)
    })?;
    let parameters = Parameters {
        c,
        tolerance,
        shrinking,
        selection: if first_order { Selection::First } else { Selection::Second },
        cache_bytes,
        iterations_max,
        ..Parameters::new(kernel(py, kernel_name, degree, gamma, coef0)?)
    };
    let group = match group {
        Some(group) => group.handle(py)?,
        None => {
            let options = Options::new(World::alone());
            py.detach(|| RustGroup::join(&options)).map_err(|error| error::join(py, &error))?
        }
    };
    let mut signal = None;
    let trained = py.detach(|| {
        Svm::train_observed(&group, &samples, &labels, &parameters, |progress| {
            if progress.iterations % SIGNAL_ITERATIONS == SIGNAL_ITERATIONS - 1 {
                signal = Python::attach(|py| py.check_signals()).err();
            }
            if signal.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    match (signal, trained) {
        (Some(signal), _) => Err(signal),
        (None, Ok(model)) => SvmModel::new(py, model, features),
        (None, Err(SvmError::Collective(error))) => Err(error::collective(py, &group.info(), &error)),
        (None, Err(other)) => Err(error::argument(py, other.to_string())),
    }
}

/// The machine that ``SvmModel.text`` wrote, of samples of so many features.
#[pyfunction]
pub(crate) fn svm_model(py: Python<'_>, text: &[u8], features: u32) -> PyResult<SvmModel> {
    let model = libsvm::read_model(text).map_err(|bad| error::argument(py, bad.to_string()))?;
    SvmModel::new(py, model, features)
}

impl SvmModel {
    /// A model for samples of so many features. Its vectors may have no others: some of them may be
    /// another rank's.
    fn new(py: Python<'_>, model: Model, features: u32) -> PyResult<Self> {
        let most = model.vectors().features();
        if most > features {
            let text = format!(
                "the support vectors have {most} features, and samples here have {features}; give all ranks samples of the same features"
            );
            return Err(error::argument(py, text));
        }
        Ok(Self { model, features })
    }
}

#[pymethods]
impl SvmModel {
    /// The machine as LIBSVM's model file.
    fn text<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut text = Vec::new();
        libsvm::write_model(&self.model, &mut text)?;
        Ok(PyBytes::new(py, &text))
    }

    /// The decisions of all pairs of classes, as bytes of f64, row by row.
    fn decisions<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let samples = samples(py, data, self.features)?;
        let decisions = py.detach(|| self.model.decisions(&samples));
        let decisions = decisions.map_err(|refused| error::argument(py, refused.to_string()))?;
        Ok(PyBytes::new(py, &decisions.iter().flat_map(|one| one.to_ne_bytes()).collect::<Vec<u8>>()))
    }

    /// The labels that are predicted.
    fn predict(&self, py: Python<'_>, data: &[u8]) -> PyResult<Vec<i32>> {
        let samples = samples(py, data, self.features)?;
        let labels = py.detach(|| self.model.predict(&samples));
        labels.map_err(|refused| error::argument(py, refused.to_string()))
    }

    /// The labels in the order of the classes of this model.
    fn labels(&self) -> Vec<i32> {
        self.model.labels().to_vec()
    }

    /// The numbers of the support vectors among the samples of all ranks.
    fn support(&self) -> Vec<u32> {
        self.model.support().to_vec()
    }

    /// How many support vectors each class has.
    fn class_counts(&self) -> Vec<usize> {
        self.model.class_counts().to_vec()
    }

    /// The coefficients of each support vector against each other class.
    fn coefficients(&self) -> Vec<Vec<f64>> {
        (0..self.model.support_vectors()).map(|vector| self.model.coefficients(vector).to_vec()).collect()
    }

    /// The support vectors, as bytes of f32, row by row.
    fn vectors<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let features = self.features as usize;
        let mut values = vec![0f32; self.model.support_vectors() * features];
        for (vector, row) in values.chunks_exact_mut(features).enumerate() {
            self.model.vectors().nonzero(vector).for_each(|(index, value)| row[index as usize] = value);
        }
        PyBytes::new(py, &values.iter().flat_map(|one| one.to_ne_bytes()).collect::<Vec<u8>>())
    }

    /// What is added to the decisions.
    fn intercepts(&self) -> Vec<f64> {
        self.model.intercepts()
    }

    /// The iterations, the dual objective, whether training has converged, and how many steps the
    /// kernel was not positive along.
    fn training(&self) -> (u64, f64, bool, u64) {
        let training = self.model.training().copied().unwrap_or_default();
        let converged = training.outcome == Outcome::Converged;
        (training.iterations, training.objective, converged, training.negative_curvatures)
    }
}
