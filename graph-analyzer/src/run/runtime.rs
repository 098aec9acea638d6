//! What runs the nodes of a part.

use std::fmt;

use crate::element::ElementType;
use crate::onnx::CutError;
use crate::run::channels::TensorForm;

/// A tensor that is borrowed.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    /// Type and dimensions.
    pub form: &'a TensorForm,
    /// The values, in the bytes of the processor.
    pub bytes: &'a [u8],
}

/// A result of a part.
pub struct Output {
    /// Type and dimensions.
    pub form: TensorForm,
    /// The values; nothing if they were written to the place that was given.
    pub bytes: Option<Box<dyn Values>>,
}

impl fmt::Debug for Output {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Output({:?})", self.form)
    }
}

/// Values in the memory of a runtime.
pub trait Values {
    /// The values, in the bytes of the processor.
    fn bytes(&self) -> &[u8];
}

/// Loads and runs models.
pub trait Runtime: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// The type in which it holds elements of this type; nothing if it cannot.
    fn element(&self, element: ElementType) -> Option<ElementType>;

    /// Whether some operators have to be expressed by others ([`crate::onnx::Cut::rewrites`]).
    fn needs_rewrites(&self) -> bool;

    /// Whether it writes results where it is told.
    fn writes_places(&self) -> bool;

    /// Loads a model. Its inputs and outputs are in the order of the names.
    ///
    /// # Errors
    ///
    /// [`RuntimeError`]: the model is not one for this runtime.
    fn load(
        &self,
        model: Vec<u8>,
        inputs: &[&str],
        outputs: &[&str],
    ) -> Result<Box<dyn Program>, RuntimeError>;

    /// Does the work on the thread on which models run, so that no other thread has to be woken.
    fn within(&self, work: &mut (dyn FnMut() + Send));
}

/// A model that was loaded.
pub trait Program: Send {
    /// Runs it. `places` has memory for each output whose size is known; a runtime that cannot
    /// write there returns values of its own.
    ///
    /// # Errors
    ///
    /// [`RuntimeError`]: an operator failed.
    fn run(
        &mut self,
        inputs: &[TensorRef<'_>],
        places: &mut [Option<Place<'_>>],
    ) -> Result<Vec<Output>, RuntimeError>;
}

/// Memory for an output.
pub struct Place<'a> {
    /// Type and dimensions.
    pub form: &'a TensorForm,
    /// The memory.
    pub bytes: &'a mut [u8],
}

impl fmt::Debug for Place<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Place({:?})", self.form)
    }
}

/// Why a part does not run.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The part is no model.
    #[error(transparent)]
    Cut(#[from] CutError),
    /// The runtime does not have an operator.
    #[error("{runtime} has no operator {operator}; {remedy}")]
    Operator {
        /// The runtime.
        runtime: &'static str,
        /// The operator.
        operator: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The runtime does not have a type.
    #[error("{runtime} has no tensors of {element}, which '{tensor}' is; {remedy}")]
    Element {
        /// The runtime.
        runtime: &'static str,
        /// The tensor.
        tensor: String,
        /// The type.
        element: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The runtime does not take the model.
    #[error("{runtime} does not load the part ({reason}); try the other --runtime")]
    Load {
        /// The runtime.
        runtime: &'static str,
        /// Its reason.
        reason: String,
    },
    /// An operator failed.
    #[error("{runtime} does not run the part ({reason}); check the inputs, or try the other --runtime")]
    Run {
        /// The runtime.
        runtime: &'static str,
        /// Its reason.
        reason: String,
    },
    /// The library of the runtime was not opened.
    #[error("no library of {runtime}: {reason}; name it with --library FILE or ORT_DYLIB_PATH")]
    Library {
        /// The runtime.
        runtime: &'static str,
        /// The reason.
        reason: String,
    },
}
