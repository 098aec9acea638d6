//! The runtime rten, in Rust, on one thread.
//!
//! Its tensors have elements of four types; it holds truth values and 64-bit integers as 32-bit
//! ones. It takes inputs where they are, and allocates its outputs: the
//! [tracing allocator](super::allocator) decides where.

use std::sync::Arc;

use rten::{Model, NodeId, RunOptions, ThreadPool, Value, ValueOrView, ValueView};
use rten_tensor::{AsView, Layout, Tensor, TensorView};

use super::channels::TensorForm;
use super::runtime::{Output, Place, Program, Runtime, RuntimeError, TensorRef, Values};
use crate::element::ElementType;

const NAME: &str = "rten";

const REMEDY: &str = "run with --runtime onnxruntime";

/// The runtime rten.
#[derive(Clone, Debug)]
pub struct Rten {
    /// One thread: then the allocations of a run have an order.
    threads: Arc<ThreadPool>,
}

impl Rten {
    /// A runtime with a thread of its own.
    #[must_use]
    pub fn new() -> Self {
        Self { threads: Arc::new(ThreadPool::with_num_threads(1)) }
    }
}

impl Default for Rten {
    fn default() -> Self {
        Self::new()
    }
}

impl Runtime for Rten {
    fn name(&self) -> &'static str {
        NAME
    }

    fn element(&self, element: ElementType) -> Option<ElementType> {
        match element {
            ElementType::F32 | ElementType::I32 | ElementType::I8 | ElementType::U8 => Some(element),
            ElementType::I64 | ElementType::Bool => Some(ElementType::I32),
            _ => None,
        }
    }

    fn needs_rewrites(&self) -> bool {
        true
    }

    fn writes_places(&self) -> bool {
        false
    }

    fn load(
        &self,
        model: Vec<u8>,
        inputs: &[&str],
        outputs: &[&str],
    ) -> Result<Box<dyn Program>, RuntimeError> {
        let model = Model::load(model).map_err(|error| load_error(&error.to_string()))?;
        let find = |names: &[&str]| {
            let ids = names.iter().map(|name| model.node_id(name));
            ids.collect::<Result<Vec<_>, _>>().map_err(|error| load_error(&error.to_string()))
        };
        let (inputs, outputs) = (find(inputs)?, find(outputs)?);
        let options = RunOptions::default().with_thread_pool(Some(Arc::clone(&self.threads)));
        Ok(Box::new(RtenProgram { model, inputs, outputs, options }))
    }

    fn within(&self, work: &mut (dyn FnMut() + Send)) {
        self.threads.run(work);
    }
}

/// Its text for an operator that it lacks ends with these words.
const UNSUPPORTED: &str = " operator not supported or not enabled";

fn load_error(text: &str) -> RuntimeError {
    let before = text.split(UNSUPPORTED).next().filter(|before| before.len() < text.len());
    match before.and_then(|before| before.rsplit([' ', ':']).next()) {
        Some(operator) => {
            RuntimeError::Operator { runtime: NAME, operator: operator.to_owned(), remedy: REMEDY }
        }
        None => RuntimeError::Load { runtime: NAME, reason: text.to_owned() },
    }
}

struct RtenProgram {
    model: Model,
    inputs: Vec<NodeId>,
    outputs: Vec<NodeId>,
    options: RunOptions,
}

impl Program for RtenProgram {
    fn run(
        &mut self,
        inputs: &[TensorRef<'_>],
        _places: &mut [Option<Place<'_>>],
    ) -> Result<Vec<Output>, RuntimeError> {
        let failed = |reason: String| RuntimeError::Run { runtime: NAME, reason };
        let views =
            self.inputs.iter().zip(inputs).map(|(&id, tensor)| Ok((id, ValueOrView::View(view(tensor)?))));
        let views = views.collect::<Result<Vec<_>, String>>().map_err(failed)?;
        let values = self.model.run(views, &self.outputs, Some(self.options.clone()));
        let values = values.map_err(|error| failed(error.to_string()))?;
        values.into_iter().map(|value| output(value).map_err(failed)).collect()
    }
}

fn view<'a>(tensor: &TensorRef<'a>) -> Result<ValueView<'a>, String> {
    fn of<'a, T: bytemuck::AnyBitPattern>(tensor: &TensorRef<'a>) -> Result<TensorView<'a, T>, String> {
        let dims: Vec<usize> = tensor.form.dims.iter().map(|&dim| dim as usize).collect();
        let values = bytemuck::try_cast_slice(tensor.bytes).map_err(|error| error.to_string())?;
        TensorView::try_from_data(&dims[..], values).map_err(|error| error.to_string())
    }
    match tensor.form.element {
        ElementType::F32 => Ok(ValueView::FloatTensor(of(tensor)?)),
        ElementType::I32 => Ok(ValueView::Int32Tensor(of(tensor)?)),
        ElementType::I8 => Ok(ValueView::Int8Tensor(of(tensor)?)),
        ElementType::U8 => Ok(ValueView::UInt8Tensor(of(tensor)?)),
        element => Err(format!("it has no tensors of {element}")),
    }
}

fn output(value: Value) -> Result<Output, String> {
    fn of<T: bytemuck::NoUninit + 'static>(element: ElementType, mut tensor: Tensor<T>) -> Output {
        tensor.make_contiguous();
        let dims = tensor.shape().iter().map(|&dim| dim as u64).collect();
        Output { form: TensorForm { element, dims }, bytes: Some(Box::new(TensorValues(tensor))) }
    }
    match value {
        Value::FloatTensor(tensor) => Ok(of(ElementType::F32, tensor)),
        Value::Int32Tensor(tensor) => Ok(of(ElementType::I32, tensor)),
        Value::Int8Tensor(tensor) => Ok(of(ElementType::I8, tensor)),
        Value::UInt8Tensor(tensor) => Ok(of(ElementType::U8, tensor)),
        _ => Err("a sequence cannot leave a part".to_owned()),
    }
}

struct TensorValues<T>(Tensor<T>);

impl<T: bytemuck::NoUninit> Values for TensorValues<T> {
    fn bytes(&self) -> &[u8] {
        self.0.data().map_or(&[], bytemuck::cast_slice)
    }
}
