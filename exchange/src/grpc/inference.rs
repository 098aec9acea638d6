//! The service `inference.GRPCInferenceService` of KServe's open protocol, with Triton's metadata,
//! configurations and system shared memory, for one model.
//!
//! Answered are ServerLive, ServerReady, ModelReady, ServerMetadata, ModelMetadata, ModelConfig,
//! ModelInfer, and SystemSharedMemoryStatus, -Register and -Unregister. Anything else is
//! UNIMPLEMENTED. All texts of errors are one line and say what was expected.
//!
//! Behind a [`super::Layer`], long inputs and outputs go by reference to and from programs whose
//! channel is one of pleach: their messages have the codec [`super::Codec`].
//!
//! A call that is cancelled, or whose deadline is over, drops the future of
//! [`InferenceModel::infer`]; nothing waits for its result any more.
//!
//! **Limits:** the longest request is what the model's inputs can take
//! ([`ModelInterface::request_bytes_max`]); other messages have 64 KiB at most.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf as _, Bytes};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::{Request, Response};
use tonic::server::{NamedService, UnaryService};
use tonic_prost::ProstCodec;

use super::codec::{FIELD_BYTES_MIN, Pieces};
use super::{answered, fields};
use crate::inference::messages::infer_parameter::ParameterChoice;
use crate::inference::messages::model_infer_response::InferOutputTensor;
use crate::inference::messages::model_metadata_response::TensorMetadata;
use crate::inference::messages::{
    InferParameter, ModelConfig, ModelConfigRequest, ModelConfigResponse, ModelInferRequest,
    ModelInferResponse, ModelInput, ModelMetadataRequest, ModelMetadataResponse, ModelOutput,
    ModelReadyRequest, ModelReadyResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse, SystemSharedMemoryRegisterRequest,
    SystemSharedMemoryRegisterResponse, SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse,
    SystemSharedMemoryUnregisterRequest, SystemSharedMemoryUnregisterResponse,
};
use crate::inference::{
    Datatype, InferenceError, InputSource, ModelInterface, RegionSlice, SharedRegions, TensorSpec, decode,
};

/// The name of the service.
pub const SERVICE: &str = "inference.GRPCInferenceService";

/// The longest message of all methods but ModelInfer, in bytes.
const SMALL_BYTES: usize = 64 << 10;

/// An input of a request: as many elements as its shape says, little endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputTensor {
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its elements.
    pub bytes: Bytes,
}

/// An output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its elements, little endian.
    pub bytes: Bytes,
}

/// A model that infers. Many requests are under way at a time.
pub trait InferenceModel: Send + Sync + 'static {
    /// What it takes and gives.
    fn interface(&self) -> &ModelInterface;

    /// Whether it answers requests now.
    fn is_ready(&self) -> bool;

    /// The outputs for these inputs, both in the order of the interface. A future that is dropped
    /// was cancelled.
    fn infer(
        &self,
        inputs: Vec<InputTensor>,
    ) -> impl Future<Output = Result<Vec<OutputTensor>, InferenceError>> + Send;
}

/// The service of one model, for `Server::builder().add_service(…)`.
pub struct InferenceService<M> {
    shared: Arc<Shared<M>>,
}

impl<M> Clone for InferenceService<M> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<M: InferenceModel> std::fmt::Debug for InferenceService<M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "InferenceService({})", self.shared.model.interface().name)
    }
}

struct Shared<M> {
    model: M,
    /// Nothing if clients may not use shared memory.
    regions: Option<SharedRegions>,
}

impl<M: InferenceModel> InferenceService<M> {
    /// A service of this model. With `allows_shared_memory` a client can name any object of POSIX
    /// shared memory that this process may open, have it read as an input, and have outputs written
    /// there.
    #[must_use]
    pub fn new(model: M, allows_shared_memory: bool) -> Self {
        let regions = allows_shared_memory.then(SharedRegions::default);
        Self { shared: Arc::new(Shared { model, regions }) }
    }
}

impl From<InferenceError> for Status {
    fn from(error: InferenceError) -> Self {
        let text = error.to_string();
        match error {
            InferenceError::Invalid(_) => Self::invalid_argument(text),
            InferenceError::NotFound(_) => Self::not_found(text),
            InferenceError::Exists(_) => Self::already_exists(text),
            InferenceError::Full(_) => Self::resource_exhausted(text),
            InferenceError::Unsupported(_) => Self::unimplemented(text),
            InferenceError::Unavailable(_) => Self::unavailable(text),
        }
    }
}

fn sizes(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect()
}

impl<M: InferenceModel> Shared<M> {
    fn regions(&self) -> Result<&SharedRegions, InferenceError> {
        let text = "clients may not use shared memory here; start the server with --allow-client-shm";
        self.regions.as_ref().ok_or_else(|| InferenceError::Unsupported(text.to_owned()))
    }

    fn server_live(&self, _: &ServerLiveRequest) -> Result<ServerLiveResponse, InferenceError> {
        Ok(ServerLiveResponse { live: true })
    }

    fn server_ready(&self, _: &ServerReadyRequest) -> Result<ServerReadyResponse, InferenceError> {
        Ok(ServerReadyResponse { ready: self.model.is_ready() })
    }

    fn server_metadata(&self, _: &ServerMetadataRequest) -> Result<ServerMetadataResponse, InferenceError> {
        let shared_memory = self.regions.as_ref().map(|_| "system_shared_memory");
        let extensions = ["model_configuration"].into_iter().chain(shared_memory);
        Ok(ServerMetadataResponse {
            name: "pleach".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: extensions.map(str::to_owned).collect(),
        })
    }

    /// As Triton has it, a model that is not here is not ready.
    fn model_ready(&self, asked: &ModelReadyRequest) -> Result<ModelReadyResponse, InferenceError> {
        let is_it = self.model.interface().check_name(&asked.name, &asked.version).is_ok();
        Ok(ModelReadyResponse { ready: is_it && self.model.is_ready() })
    }

    fn model_metadata(&self, asked: &ModelMetadataRequest) -> Result<ModelMetadataResponse, InferenceError> {
        let model = self.model.interface();
        model.check_name(&asked.name, &asked.version)?;
        let tensor = |spec: &TensorSpec| TensorMetadata {
            name: spec.name.clone(),
            datatype: spec.datatype.name().to_owned(),
            shape: spec.shape(),
        };
        Ok(ModelMetadataResponse {
            name: model.name.clone(),
            versions: vec![model.version.clone()],
            platform: model.platform.clone(),
            inputs: model.inputs.iter().map(tensor).collect(),
            outputs: model.outputs.iter().map(tensor).collect(),
        })
    }

    fn model_config(&self, asked: &ModelConfigRequest) -> Result<ModelConfigResponse, InferenceError> {
        let model = self.model.interface();
        model.check_name(&asked.name, &asked.version)?;
        let data_type = |spec: &TensorSpec| spec.datatype.in_config().into();
        let input = |spec: &TensorSpec| ModelInput {
            name: spec.name.clone(),
            data_type: data_type(spec),
            dims: spec.shape(),
        };
        let output = |spec: &TensorSpec| ModelOutput {
            name: spec.name.clone(),
            data_type: data_type(spec),
            dims: spec.shape(),
        };
        let config = ModelConfig {
            name: model.name.clone(),
            platform: model.platform.clone(),
            max_batch_size: 0,
            input: model.inputs.iter().map(input).collect(),
            output: model.outputs.iter().map(output).collect(),
            backend: "pleach".to_owned(),
        };
        Ok(ModelConfigResponse { config: Some(config) })
    }

    async fn infer(&self, request: ModelInferRequest) -> Result<ModelInferResponse, InferenceError> {
        let model = self.model.interface();
        let call = model.check(request)?;
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for input in call.inputs {
            let bytes = match input.source {
                InputSource::Message(bytes) => bytes,
                InputSource::Region(slice) => self.regions()?.read(&slice)?.into(),
            };
            inputs.push(InputTensor { shape: input.shape, bytes });
        }
        // What cannot be written is said before the model runs for it.
        for slice in call.outputs.iter().filter_map(|output| output.region.as_ref()) {
            self.regions()?.check(slice)?;
        }
        let given = self.model.infer(inputs).await?;
        let mut answer = ModelInferResponse {
            model_name: model.name.clone(),
            model_version: model.version.clone(),
            id: call.id,
            ..ModelInferResponse::default()
        };
        for wanted in call.outputs {
            let (spec, output) = (&model.outputs[wanted.number], &given[wanted.number]);
            let (parameters, raw) = match wanted.region {
                None => (HashMap::new(), output.bytes.clone()),
                Some(slice) => (self.write(&spec.name, slice, &output.bytes)?, Bytes::new()),
            };
            answer.outputs.push(InferOutputTensor {
                name: spec.name.clone(),
                datatype: output.datatype.name().to_owned(),
                shape: sizes(&output.shape),
                parameters,
                contents: None,
            });
            answer.raw_output_contents.push(raw);
        }
        Ok(answer)
    }

    /// Writes an output into shared memory. Returns the parameters that say where it is.
    fn write(
        &self,
        name: &str,
        slice: RegionSlice,
        bytes: &[u8],
    ) -> Result<HashMap<String, InferParameter>, InferenceError> {
        let (room, length) = (slice.bytes, bytes.len() as u64);
        if length > room {
            let text = format!(
                "the output '{name}' has {length} bytes, and {room} bytes of shared memory were given"
            );
            return Err(InferenceError::Invalid(text));
        }
        let slice = RegionSlice { bytes: length, ..slice };
        self.regions()?.write(&slice, bytes)?;
        let number = |value: u64| ParameterChoice::Int64Param(i64::try_from(value).unwrap_or(i64::MAX));
        let named = [
            ("shared_memory_region", ParameterChoice::StringParam(slice.region)),
            ("shared_memory_offset", number(slice.offset)),
            ("shared_memory_byte_size", number(length)),
        ];
        let parameter =
            |(name, value): (&str, _)| (name.to_owned(), InferParameter { parameter_choice: Some(value) });
        Ok(named.into_iter().map(parameter).collect())
    }

    fn register(
        &self,
        asked: &SystemSharedMemoryRegisterRequest,
    ) -> Result<SystemSharedMemoryRegisterResponse, InferenceError> {
        let SystemSharedMemoryRegisterRequest { name, key, offset, byte_size } = asked;
        self.regions()?.register(name, key, *offset, *byte_size)?;
        Ok(SystemSharedMemoryRegisterResponse {})
    }

    fn unregister(
        &self,
        asked: &SystemSharedMemoryUnregisterRequest,
    ) -> Result<SystemSharedMemoryUnregisterResponse, InferenceError> {
        self.regions()?.unregister(&asked.name);
        Ok(SystemSharedMemoryUnregisterResponse {})
    }

    fn status(
        &self,
        asked: &SystemSharedMemoryStatusRequest,
    ) -> Result<SystemSharedMemoryStatusResponse, InferenceError> {
        let regions = self.regions()?.status(&asked.name)?;
        let regions = regions.into_iter().map(|region| (region.name.clone(), region)).collect();
        Ok(SystemSharedMemoryStatusResponse { regions })
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A method whose answer is at hand.
struct AtOnce<M, Ask, Answer> {
    shared: Arc<Shared<M>>,
    answer: fn(&Shared<M>, &Ask) -> Result<Answer, InferenceError>,
}

impl<M, Ask, Answer> UnaryService<Ask> for AtOnce<M, Ask, Answer> {
    type Response = Answer;
    type Future = Ready<Result<tonic::Response<Answer>, Status>>;

    fn call(&mut self, request: tonic::Request<Ask>) -> Self::Future {
        let answer = (self.answer)(&self.shared, &request.into_inner());
        ready(answer.map(tonic::Response::new).map_err(Status::from))
    }
}

/// ModelInfer.
struct Infer<M>(Arc<Shared<M>>);

impl<M: InferenceModel> UnaryService<ModelInferRequest> for Infer<M> {
    type Response = ModelInferResponse;
    type Future = BoxFuture<Result<tonic::Response<ModelInferResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<ModelInferRequest>) -> Self::Future {
        let shared = self.0.clone();
        Box::pin(async move { Ok(tonic::Response::new(shared.infer(request.into_inner()).await?)) })
    }
}

impl<M: InferenceModel> InferenceService<M> {
    async fn at_once<Ask, Answer>(
        self,
        request: Request<Body>,
        answer: fn(&Shared<M>, &Ask) -> Result<Answer, InferenceError>,
    ) -> Response<Body>
    where
        Ask: Message + Default + Send + 'static,
        Answer: Message + Send + 'static,
    {
        let method = AtOnce { shared: self.shared, answer };
        answered(ProstCodec::<Answer, Ask>::default(), SMALL_BYTES, method, request).await
    }

    async fn answer(self, request: Request<Body>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        let method = path.rsplit('/').next().unwrap_or_default();
        match method {
            "ServerLive" => self.at_once(request, Shared::server_live).await,
            "ServerReady" => self.at_once(request, Shared::server_ready).await,
            "ModelReady" => self.at_once(request, Shared::model_ready).await,
            "ServerMetadata" => self.at_once(request, Shared::server_metadata).await,
            "ModelMetadata" => self.at_once(request, Shared::model_metadata).await,
            "ModelConfig" => self.at_once(request, Shared::model_config).await,
            "SystemSharedMemoryStatus" => self.at_once(request, Shared::status).await,
            "SystemSharedMemoryRegister" => self.at_once(request, Shared::register).await,
            "SystemSharedMemoryUnregister" => self.at_once(request, Shared::unregister).await,
            "ModelInfer" => {
                let most = self.shared.model.interface().request_bytes_max();
                answered(InferCodec, most, Infer(self.shared), request).await
            }
            _ => Status::unimplemented(format!("{method:?} is not served here")).into_http(),
        }
    }
}

impl<M: InferenceModel> tonic::codegen::Service<Request<Body>> for InferenceService<M> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(service.answer(request).await) })
    }
}

impl<M: InferenceModel> NamedService for InferenceService<M> {
    const NAME: &'static str = SERVICE;
}

/// The codec of ModelInfer: requests are decoded by [`decode`], and long inputs and outputs go by
/// reference where the server has a [`super::Layer`].
struct InferCodec;

struct InferDecoder;

struct InferEncoder;

impl Codec for InferCodec {
    type Encode = ModelInferResponse;
    type Decode = ModelInferRequest;
    type Encoder = InferEncoder;
    type Decoder = InferDecoder;

    fn encoder(&mut self) -> InferEncoder {
        InferEncoder
    }

    fn decoder(&mut self) -> InferDecoder {
        InferDecoder
    }
}

impl Encoder for InferEncoder {
    type Item = ModelInferResponse;
    type Error = Status;

    fn encode(&mut self, mut answer: ModelInferResponse, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // What a model gives lies anywhere, and a client that reads references is worth a copy.
        if let Some(lender) = fields::lender().filter(|lender| lender.refusal().is_none()) {
            let outputs = answer.raw_output_contents.iter_mut();
            for output in outputs.filter(|output| output.len() >= FIELD_BYTES_MIN) {
                *output = lender.lendable(std::mem::take(output));
            }
        }
        super::Codec::<ModelInferResponse, ModelInferRequest>::default().encoder().encode(answer, target)
    }
}

impl Decoder for InferDecoder {
    type Item = ModelInferRequest;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<ModelInferRequest>, Status> {
        let whole = source.copy_to_bytes(source.remaining());
        let request = if whole.first() == Some(&0) { decode(Pieces::of(&whole)?) } else { decode(whole) };
        Ok(Some(request?))
    }
}
