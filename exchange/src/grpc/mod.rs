//! Services of gRPC by [tonic](https://docs.rs/tonic) whose long `bytes` fields go by reference.
//!
//! A program changes three lines:
//!
//! ```text
//! // build.rs
//! tonic_prost_build::configure().bytes(".").codec_path("pleach_exchange::grpc::Codec")
//! // client
//! let channel = pleach_exchange::grpc::connect("http://host:50051").await?;
//! // server
//! Server::builder().layer(pleach_exchange::grpc::Layer::new(&endpoint)).add_service(service)
//! ```
//!
//! A `bytes` field that lies in lendable memory ([`SharedTensor::into_bytes`]) is not copied into
//! the message. A reference is in its place ([`crate::gathered`]), and the other program reads the
//! field where it lies, or gets it into its own memory where nothing can be mapped. All other
//! fields, and all fields for a program without pleach, are ordinary protobuf.
//!
//! * The channel and the layer introduce the two programs to each other by a method of their own on
//!   the same connection ([`introduction`]). Each program then connects its endpoint to that of the
//!   other one. A server that does not know the method is an ordinary one.
//! * The codec learns from the body that it fills for which program it encodes (`LendingBody`).
//! * The body that is read accepts the references before the decoder sees the message
//!   (`AcceptingBody`), and waits for bytes that have to be got.
//! * HTTP/2 itself runs over any fabric by [`byte_streams`], also without the rest.
//! * [`inference`] is the service by which programs ask models for inference today.
//! * [`tensorflow`] sends to tasks of TensorFlow and receives from them.
//! * Streams, deadlines, cancellation and interceptors are tonic's. A compressed message has no
//!   references.
//!
//! **Invariant:** what was lent for an RPC comes back, however the RPC ends: see
//! [`crate::lease`]. A reference that is wrong fails its RPC alone.
//!
//! **Limits:** a message by reference is as short as its references, so tonic's limits of message
//! lengths count these. A program that holds a field keeps the sender's memory.

mod body;
pub mod byte_streams;
mod channel;
mod codec;
mod fields;
pub mod inference;
pub mod introduction;
mod layer;
pub mod tensorflow;

use std::sync::{Arc, OnceLock};

use tonic::body::Body;
use tonic::codec::Codec as MessageCodec;
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, UnaryService};

pub use self::channel::{Channel, ConnectError, connect};
pub use self::codec::{Codec, Decoder, Encoder};
pub use self::layer::{Layer, Service};
#[cfg(doc)]
use crate::SharedTensor;
use crate::endpoint::{Endpoint, EndpointOptions, OpenEndpointError};

/// Answers a request of at most so many bytes by a method.
async fn answered<C, M>(
    codec: C,
    request_bytes_max: usize,
    method: M,
    request: Request<Body>,
) -> Response<Body>
where
    C: MessageCodec,
    M: UnaryService<C::Decode, Response = C::Encode>,
{
    let mut grpc = Grpc::new(codec).apply_max_message_size_config(Some(request_bytes_max), None);
    grpc.unary(method, request).await
}

/// The endpoint of this program for its channels, which [`connect`] uses. The first call opens it
/// with [`EndpointOptions::from_env`].
///
/// # Errors
///
/// See [`OpenEndpointError`]; each call has that of the first one.
pub fn endpoint() -> Result<Endpoint, Arc<OpenEndpointError>> {
    static ENDPOINT: OnceLock<Result<Endpoint, Arc<OpenEndpointError>>> = OnceLock::new();
    let open = || EndpointOptions::from_env().and_then(|options| Endpoint::open(&options)).map_err(Arc::new);
    ENDPOINT.get_or_init(open).clone()
}
