//! What the services of gRPC of this command have in common: their limits, a server of one method,
//! and where it listens.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::tokio_stream::{self, Stream, StreamExt};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{self, Endpoint, Server};
use tonic::{Code, Status};

/// The largest windows, frames and messages of HTTP/2.
const WINDOW: u32 = (1 << 31) - 1;
const FRAME: u32 = (1 << 24) - 1;
pub(crate) const MESSAGE: usize = usize::MAX;

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A server of gRPC, for a client.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, transport::Error> {
    let endpoint = Endpoint::from_shared(address.to_owned())?;
    let endpoint = endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    Ok(endpoint.max_frame_size(FRAME).tcp_nodelay(true))
}

/// A server without services.
pub(crate) fn server() -> Server {
    let server = Server::builder().initial_stream_window_size(WINDOW).max_frame_size(FRAME);
    server.initial_connection_window_size(WINDOW).tcp_nodelay(true)
}

/// Listens on a socket of loopback. It is called in a runtime.
pub(crate) fn listen() -> std::io::Result<(SocketAddr, TcpIncoming)> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((address, TcpIncoming::from(TcpListener::from_std(listener)?).with_nodelay(Some(true))))
}

/// A stream of bytes as all that comes in, without an end.
pub(crate) fn only<S>(stream: S) -> impl Stream<Item = std::io::Result<S>> {
    tokio_stream::once(Ok(stream)).chain(tokio_stream::pending())
}

/// A service of one method.
pub(crate) trait Method: Clone + Send + Sync + 'static {
    const SERVICE: &'static str;
    const PATH: &'static str;
    type Ask: Send + 'static;
    type Answer: Send + 'static;
    type Codec: tonic::codec::Codec<Encode = Self::Answer, Decode = Self::Ask> + Default + Send;

    fn answer(&self, ask: Self::Ask) -> BoxFuture<Result<Self::Answer, Status>>;
}

/// A [`Method`], for a server.
#[derive(Clone)]
pub(crate) struct Served<M>(pub(crate) M);

impl<M: Method> UnaryService<M::Ask> for Served<M> {
    type Response = M::Answer;
    type Future = BoxFuture<Result<tonic::Response<M::Answer>, Status>>;

    fn call(&mut self, request: tonic::Request<M::Ask>) -> Self::Future {
        let answer = self.0.answer(request.into_inner());
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

impl<M: Method> tonic::codegen::Service<Request<Body>> for Served<M> {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Result<Response<Body>, Self::Error>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != M::PATH {
                return Ok(Status::new(Code::Unimplemented, "there is one method").into_http());
            }
            let mut server = tonic::server::Grpc::new(M::Codec::default());
            Ok(server.unary(service, request).await)
        })
    }
}

impl<M: Method> NamedService for Served<M> {
    const NAME: &'static str = M::SERVICE;
}
