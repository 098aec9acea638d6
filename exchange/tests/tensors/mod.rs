//! The service of `proto/tensors.proto`, for the example, the tests and the benches.

use std::pin::Pin;

use bytes::Bytes;
use tonic::codegen::tokio_stream::{self as stream, Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
mod generated;

pub(crate) use generated::tensors_client::TensorsClient;
pub(crate) use generated::tensors_server::{Tensors, TensorsServer};
pub(crate) use generated::{Ask, Tensor, Total};

/// Serves slices of these bytes.
#[derive(Clone)]
pub(crate) struct Serve(pub(crate) Bytes);

impl Serve {
    fn tensor(&self, ask: Ask) -> Result<Tensor, Status> {
        let length = usize::try_from(ask.bytes).ok().filter(|length| *length <= self.0.len());
        let length =
            length.ok_or_else(|| Status::out_of_range(format!("{} bytes are served", self.0.len())))?;
        let data = self.0.slice(..length);
        Ok(Tensor { name: "w".to_owned(), dimensions: vec![ask.bytes], data, parts: Vec::new() })
    }
}

/// The sum of all bytes of a tensor.
pub(crate) fn sum(tensor: &Tensor) -> u64 {
    let of = |bytes: &Bytes| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    of(&tensor.data) + tensor.parts.iter().map(of).sum::<u64>()
}

#[tonic::async_trait]
impl Tensors for Serve {
    async fn get(&self, request: Request<Ask>) -> Result<Response<Tensor>, Status> {
        Ok(Response::new(self.tensor(request.into_inner())?))
    }

    async fn sum(&self, request: Request<Tensor>) -> Result<Response<Total>, Status> {
        Ok(Response::new(Total { sum: sum(&request.into_inner()) }))
    }

    type RepeatStream = Pin<Box<dyn Stream<Item = Result<Tensor, Status>> + Send>>;

    async fn repeat(&self, request: Request<Ask>) -> Result<Response<Self::RepeatStream>, Status> {
        let ask = request.into_inner();
        let tensor = self.tensor(ask)?;
        let tensors =
            (0..ask.tensors).map(move |number| Ok(Tensor { name: number.to_string(), ..tensor.clone() }));
        Ok(Response::new(Box::pin(stream::iter(tensors))))
    }

    async fn sum_all(&self, request: Request<Streaming<Tensor>>) -> Result<Response<Total>, Status> {
        let (mut tensors, mut total) = (request.into_inner(), 0);
        while let Some(tensor) = tensors.next().await {
            total += sum(&tensor?);
        }
        Ok(Response::new(Total { sum: total }))
    }
}
