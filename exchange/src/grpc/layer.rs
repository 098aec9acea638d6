//! The server's end: a layer around all services.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use pleach_transport::mutex::lock;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::UnaryService;
use tonic::transport::server::TcpConnectInfo;

use super::body::{AcceptingBody, LendingBody, RpcEnd};
use super::fields::Lender;
use super::introduction::{self, Introduction, PATH, RPC_HEADER, read_rpc_header};
use crate::endpoint::{Endpoint, InlineReason, Peer};
use crate::reference::LinkId;

/// Clients whose memory this program can read. A further one goes inline.
const CLIENTS_MAX: usize = 1 << 10;

/// A layer of tower around the services of a server: for `Server::builder().layer(…)`.
#[derive(Clone)]
pub struct Layer {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    /// By incarnation: clients that lend to this program.
    clients: Mutex<HashMap<u64, Peer>>,
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Layer({:?})", self.shared.endpoint)
    }
}

impl Layer {
    /// A layer that lends memory of this endpoint.
    #[must_use]
    pub fn new(endpoint: &Endpoint) -> Self {
        let clients = Mutex::default();
        Self { shared: Arc::new(Shared { endpoint: endpoint.clone(), clients }) }
    }
}

impl<S> tower_layer::Layer<S> for Layer {
    type Service = Service<S>;

    fn layer(&self, inner: S) -> Service<S> {
        Service { inner, shared: self.shared.clone() }
    }
}

/// The services of a server with a [`Layer`] around them.
#[derive(Clone)]
pub struct Service<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S: std::fmt::Debug> std::fmt::Debug for Service<S> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Service({:?})", self.inner)
    }
}

impl Shared {
    /// Connects to a client, so that it may lend. Blocks.
    fn link_to(&self, theirs: &Introduction, host: Option<IpAddr>) -> Result<LinkId, String> {
        let known = {
            let mut clients = lock(&self.clients);
            clients.retain(|_, peer| peer.is_linked());
            clients.get(&theirs.incarnation).and_then(Peer::link_with_regions)
        };
        if let Some(link) = known {
            return Ok(link);
        }
        let (peer, link) = introduction::link_to(&self.endpoint, theirs, host)?;
        let mut clients = lock(&self.clients);
        if clients.len() >= CLIENTS_MAX {
            return Err(format!("{CLIENTS_MAX} clients are linked, and no more may be"));
        }
        clients.insert(theirs.incarnation, peer);
        Ok(link)
    }

    async fn introduce(self: Arc<Self>, theirs: Introduction, host: Option<IpAddr>) -> Introduction {
        let mut own = Introduction::of(&self.endpoint);
        if theirs.link != 0 {
            // The client has connected, and waits until this program may lend.
            introduction::may_lend(&self.endpoint, LinkId(theirs.link)).await;
            return own;
        }
        let shared = self.clone();
        let linked = tokio::task::spawn_blocking(move || shared.link_to(&theirs, host)).await;
        match linked.map_err(|error| error.to_string()).and_then(|linked| linked) {
            Ok(link) => own.link = link.0,
            Err(reason) => own.reason = introduction::one_line(&reason),
        }
        own
    }
}

/// Answers [`PATH`].
struct Introducer {
    shared: Arc<Shared>,
    host: Option<IpAddr>,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl UnaryService<Introduction> for Introducer {
    type Response = Introduction;
    type Future = BoxFuture<Result<tonic::Response<Introduction>, tonic::Status>>;

    fn call(&mut self, request: tonic::Request<Introduction>) -> Self::Future {
        let (shared, host) = (self.shared.clone(), self.host);
        Box::pin(async move { Ok(tonic::Response::new(shared.introduce(request.into_inner(), host).await)) })
    }
}

impl<S, B> tower_service::Service<Request<Body>> for Service<S>
where
    S: tower_service::Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() == PATH {
            let connection = request.extensions().get::<TcpConnectInfo>();
            let host = connection.and_then(TcpConnectInfo::remote_addr).map(|remote| remote.ip());
            let introducer = Introducer { shared: self.shared.clone(), host };
            let codec = tonic_prost::ProstCodec::<Introduction, Introduction>::default();
            let mut server = tonic::server::Grpc::new(codec);
            return Box::pin(async move { Ok(server.unary(introducer, request).await) });
        }
        let endpoint = self.shared.endpoint.clone();
        let header = request.headers().get(RPC_HEADER).and_then(|value| value.to_str().ok());
        let rpc = header.and_then(read_rpc_header);
        let request = match rpc {
            Some(_) => {
                let of = endpoint.clone();
                request.map(|body| Body::new(AcceptingBody::new(body, of, None)))
            }
            None => request,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            let is_compressed = answer.headers().contains_key("grpc-encoding");
            let (link, rpc) = match rpc {
                None => (Err(InlineReason::NoRegions), 0),
                Some((_, rpc)) if is_compressed => (Err(InlineReason::Compressed), rpc),
                Some((link, rpc)) => (Ok(link), rpc),
            };
            let lender = Lender::new(&endpoint, link, rpc);
            let end = RpcEnd { endpoint, rpc, lender: Some(lender.clone()), recalls: false, misses: None };
            Ok(answer.map(|body| Body::new(LendingBody::new(Body::new(body), lender, Some(end)))))
        })
    }
}
