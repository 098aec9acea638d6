//! A graph as a model that clients ask, and the requests on their way to its ranks.
//!
//! [`Served`] is the end of the service of gRPC, whose threads wait; [`Requests`] is the end of the
//! thread that feeds the ranks and never waits for a client.
//!
//! **Invariant:** a request is answered once: with outputs, or with an error. A request whose
//! client has gone is dropped before it is fed, or its outputs are dropped.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use pleach::exchange::grpc::inference::{InferenceModel, InputTensor, OutputTensor};
use pleach::exchange::inference::{Datatype, Dimension, InferenceError, ModelInterface, TensorSpec};
use pleach::graph::graph::ValueId;
use pleach::graph::run::channels::TensorForm;
use pleach::graph::run::{Caller, FeedError, RankError, Tensor, TensorRef};
use pleach::graph::{Dim, ElementType, Graph};
use pleach::transport::device::Wake;
use tokio::sync::{mpsc, oneshot};

/// The most requests that wait for the ranks; further ones wait for these.
const WAITING_MAX: usize = 128;

/// The only version of a model.
const VERSION: &str = "1";

/// What a graph takes and gives; an error names a tensor that no request can hold.
pub(crate) fn interface(graph: &Graph, name: String, runtime: &str) -> Result<ModelInterface, String> {
    let tensors = |values: &[ValueId], what: &str| -> Result<Vec<TensorSpec>, String> {
        values.iter().map(|&value| spec(graph, value, what)).collect()
    };
    Ok(ModelInterface {
        name,
        version: VERSION.to_owned(),
        platform: format!("{runtime}_onnx"),
        inputs: tensors(graph.inputs(), "input")?,
        outputs: tensors(graph.outputs(), "output")?,
    })
}

fn spec(graph: &Graph, value: ValueId, what: &str) -> Result<TensorSpec, String> {
    let value = graph.value(value);
    let (name, tensor) = (value.name.clone(), &value.tensor);
    let Some(element) = tensor.element else {
        return Err(format!("the type of the {what} '{name}' is unknown; declare it in the model"));
    };
    let datatype = datatype(element)
        .ok_or_else(|| format!("the {what} '{name}' is {element}, for which requests have no datatype"))?;
    let dimension = |dim: &Dim| match dim {
        Dim::Fixed(size) => Dimension::Fixed(*size),
        Dim::Symbol(symbol) => Dimension::Symbol(symbol.to_string()),
        Dim::Unknown => Dimension::Any,
    };
    let dimensions = tensor.shape.as_ref().map(|shape| shape.iter().map(dimension).collect());
    Ok(TensorSpec { name, datatype, dimensions })
}

fn datatype(element: ElementType) -> Option<Datatype> {
    Some(match element {
        ElementType::Bool => Datatype::Bool,
        ElementType::U8 => Datatype::Uint8,
        ElementType::U16 => Datatype::Uint16,
        ElementType::U32 => Datatype::Uint32,
        ElementType::U64 => Datatype::Uint64,
        ElementType::I8 => Datatype::Int8,
        ElementType::I16 => Datatype::Int16,
        ElementType::I32 => Datatype::Int32,
        ElementType::I64 => Datatype::Int64,
        ElementType::F16 => Datatype::Fp16,
        ElementType::F32 => Datatype::Fp32,
        ElementType::F64 => Datatype::Fp64,
        ElementType::Bf16 => Datatype::Bf16,
        _ => return None,
    })
}

type Answer = oneshot::Sender<Result<Vec<OutputTensor>, InferenceError>>;

struct Request {
    inputs: Vec<InputTensor>,
    answer: Answer,
}

/// The model for the service.
pub(crate) struct Served {
    interface: ModelInterface,
    requests: mpsc::Sender<Request>,
    waker: Arc<dyn Wake>,
    ended: Arc<OnceLock<String>>,
}

impl InferenceModel for Served {
    fn interface(&self) -> &ModelInterface {
        &self.interface
    }

    fn is_ready(&self) -> bool {
        self.ended.get().is_none()
    }

    async fn infer(&self, inputs: Vec<InputTensor>) -> Result<Vec<OutputTensor>, InferenceError> {
        let ended = || {
            let text = self.ended.get().map_or("the server has ended", String::as_str);
            InferenceError::Unavailable(text.to_owned())
        };
        let (answer, answered) = oneshot::channel();
        self.requests.send(Request { inputs, answer }).await.map_err(|_| ended())?;
        self.waker.wake();
        answered.await.unwrap_or_else(|_| Err(ended()))
    }
}

/// Requests for the ranks.
pub(crate) struct Requests {
    waiting: mpsc::Receiver<Request>,
    /// Of the iterations that are under way, in their order.
    under_way: VecDeque<Answer>,
    /// The types of the inputs.
    elements: Vec<ElementType>,
    ended: Arc<OnceLock<String>>,
}

/// Both ends of a model's requests.
pub(crate) fn requests(graph: &Graph, interface: ModelInterface, waker: Arc<dyn Wake>) -> (Served, Requests) {
    let (requests, waiting) = mpsc::channel(WAITING_MAX);
    let ended = Arc::new(OnceLock::new());
    let elements = graph.inputs().iter().filter_map(|&input| graph.value(input).tensor.element).collect();
    let served = Served { interface, requests, waker, ended: ended.clone() };
    (served, Requests { waiting, under_way: VecDeque::new(), elements, ended })
}

impl Requests {
    /// Feeds the ranks with requests and answers these, until a rank is gone. Returns why.
    pub(crate) fn carry(mut self, caller: &mut Caller<'_>) -> String {
        loop {
            let Err(error) = self.step(caller) else { continue };
            let text = error.to_string();
            // Set before the ends of the requests are dropped, whose waiters look there.
            self.ended.get_or_init(|| text.clone());
            return text;
        }
    }

    fn step(&mut self, caller: &mut Caller<'_>) -> Result<(), RankError> {
        while let Some(drained) = caller.drain()? {
            let outputs = drained.outputs.map_err(InferenceError::Invalid);
            let answer = outputs.and_then(|outputs| outputs.into_iter().map(output).collect());
            if let Some(asked) = self.under_way.pop_front() {
                // A client that has gone gets nothing.
                let _ = asked.send(answer);
            }
        }
        if !self.waiting.is_empty() && caller.can_feed()? {
            return self.feed(caller);
        }
        caller.sleep(&mut || !self.waiting.is_empty());
        Ok(())
    }

    fn feed(&mut self, caller: &mut Caller<'_>) -> Result<(), RankError> {
        let Ok(Request { inputs, answer }) = self.waiting.try_recv() else { return Ok(()) };
        if answer.is_closed() {
            return Ok(());
        }
        let form = |(input, &element): (&InputTensor, &ElementType)| TensorForm {
            element,
            dims: input.shape.clone(),
        };
        let forms: Vec<TensorForm> = inputs.iter().zip(&self.elements).map(form).collect();
        let refs = inputs.iter().zip(&forms).map(|(input, form)| TensorRef { form, bytes: &input.bytes });
        match caller.feed(&refs.collect::<Vec<_>>()) {
            Ok(_) => self.under_way.push_back(answer),
            Err(FeedError::Input(error)) => {
                let _ = answer.send(Err(InferenceError::Invalid(error.to_string())));
            }
            Err(FeedError::Rank(error)) => {
                self.under_way.push_back(answer);
                return Err(error);
            }
        }
        Ok(())
    }
}

fn output(tensor: Tensor) -> Result<OutputTensor, InferenceError> {
    let Tensor { form: TensorForm { element, dims }, bytes } = tensor;
    let datatype = datatype(element).ok_or_else(|| {
        InferenceError::Unsupported(format!("an output is {element}, for which answers have no datatype"))
    })?;
    Ok(OutputTensor { datatype, shape: dims, bytes: bytes.into() })
}
