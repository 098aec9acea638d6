//! The client's end: a channel of tonic that lends and accepts.

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock};
use tonic::body::Body;
use tonic::codegen::http::header::HeaderValue;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request, Response, Uri};
use tonic::{Code, Status, transport};
use tower_service::Service;

use super::body::{AcceptingBody, LendingBody, RpcEnd, failed};
use super::fields::Lender;
use super::introduction::{self, Introduction, PATH, RPC_HEADER, rpc_header};
use crate::endpoint::{Endpoint, InlineReason, OpenEndpointError, Peer};
use crate::reference::LinkId;

/// Between two introductions to a server with which there are no links.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// RPCs of this program, so that no two have one number on a link.
static LAST_RPC: AtomicU64 = AtomicU64::new(0);

/// Why there is no channel.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is no endpoint in this program.
    #[error(transparent)]
    Endpoint(#[from] Arc<OpenEndpointError>),
    /// The server is not reached.
    #[error("the server is not reached: {0}")]
    Transport(Arc<str>),
    /// No regions are shared with the server, and `PLEACH_REQUIRE=regions` asks for them.
    #[error("no regions are shared with the server ({0}), and PLEACH_REQUIRE=regions asks for them")]
    NoRegions(Arc<str>),
}

/// Opens a channel to a server of gRPC, for a generated client. Fields go by reference where the
/// server has a [`super::Layer`] and memory can be read; otherwise it is a channel of tonic, and
/// one line of the log says why.
///
/// The endpoint is [`super::endpoint`].
///
/// # Errors
///
/// See [`ConnectError`].
pub async fn connect<A>(address: A) -> Result<Channel, ConnectError>
where
    A: TryInto<transport::Endpoint>,
    A::Error: std::fmt::Display,
{
    let endpoint = super::endpoint()?;
    let told = |error: &dyn std::fmt::Display| ConnectError::Transport(error.to_string().into());
    let server: transport::Endpoint = address.try_into().map_err(|error| told(&error))?;
    let host = server.uri().host().map(str::to_owned);
    let channel = server.connect().await.map_err(|error| {
        // tonic says "transport error", and its sources say which.
        let source = std::error::Error::source(&error).map(ToString::to_string);
        told(&format!("{}: {}", server.uri(), source.unwrap_or_else(|| error.to_string())))
    })?;
    Channel::over(&endpoint, channel, host.as_deref()).await
}

/// A channel of tonic whose messages may hold references. Clones share the connection.
#[derive(Clone)]
pub struct Channel {
    inner: transport::Channel,
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    host: Option<IpAddr>,
    state: Mutex<State>,
}

enum State {
    /// Fields go inline. The first call after `until` tries again: the server may be another one.
    Ordinary { until: Nanos, reason: Arc<str> },
    /// A task introduces the programs to each other; fields go inline meanwhile. `before`: why
    /// there were no links, which was told.
    Introducing { before: Option<Arc<str>> },
    /// Fields go by reference.
    Linked(Links),
}

/// The links of two programs.
struct Links {
    /// The server, which may lend on the link to it.
    server: Peer,
    accepts: LinkId,
    /// The link on which this program may lend.
    lends: Option<LinkId>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Channel({:?})", self.shared.endpoint)
    }
}

impl Channel {
    /// A channel over one of tonic, for an endpoint of one's own. `host`: the address of the
    /// server, where it is known and is not this host.
    ///
    /// # Errors
    ///
    /// [`ConnectError::NoRegions`] where the endpoint requires regions and there are none.
    pub async fn over(
        endpoint: &Endpoint,
        inner: transport::Channel,
        host: Option<&str>,
    ) -> Result<Self, ConnectError> {
        // A name is resolved by tonic, and its address is not known here: the endpoint's counts.
        let host = host.and_then(|host| host.trim_matches(['[', ']']).parse().ok());
        let state = Mutex::new(State::Introducing { before: None });
        let shared = Shared { endpoint: endpoint.clone(), host, state };
        let channel = Self { inner, shared: Arc::new(shared) };
        match channel.introduce().await {
            Err(reason) if channel.shared.endpoint.requires_regions() => {
                Err(ConnectError::NoRegions(reason.into()))
            }
            _ => Ok(channel),
        }
    }

    /// Whether fields of requests go by reference.
    #[must_use]
    pub fn requests_by_reference(&self) -> bool {
        match &*lock(&self.shared.state) {
            State::Linked(links) => links.lends.is_some_and(|link| self.shared.endpoint.may_lend(link)),
            State::Ordinary { .. } | State::Introducing { .. } => false,
        }
    }

    /// Whether fields of answers come by reference.
    #[must_use]
    pub fn answers_by_reference(&self) -> bool {
        match &*lock(&self.shared.state) {
            State::Linked(links) => links.server.link_with_regions().is_some(),
            State::Ordinary { .. } | State::Introducing { .. } => false,
        }
    }

    /// Makes the links, or says why fields go inline.
    async fn introduce(&self) -> Result<(), String> {
        // The server may say as much as it likes.
        let links = self.make_links().await.map_err(|reason| introduction::one_line(&reason));
        let mut state = lock(&self.shared.state);
        match links {
            Ok(links) => {
                *state = State::Linked(links);
                Ok(())
            }
            Err(reason) => {
                let is_told =
                    matches!(&*state, State::Introducing { before } if before.as_deref() == Some(&reason));
                if !is_told {
                    tracing::info!("fields of messages go inline: {reason}");
                }
                *state =
                    State::Ordinary { until: clock::now() + RETRY_PAUSE, reason: reason.as_str().into() };
                Err(reason)
            }
        }
    }

    async fn make_links(&self) -> Result<Links, String> {
        let endpoint = &self.shared.endpoint;
        let mut own = Introduction::of(endpoint);
        let theirs = self.call_introduce(own.clone()).await?;
        let (host, of) = (self.shared.host, endpoint.clone());
        let said = theirs.clone();
        // A name of the server is resolved by tonic alone: what the server says counts then.
        let host = host.or_else(|| said.address.parse().ok().map(|said: std::net::SocketAddr| said.ip()));
        let linked = tokio::task::spawn_blocking(move || introduction::link_to(&of, &said, host)).await;
        let (server, accepts) = linked.map_err(|error| error.to_string())??;
        own.link = accepts.0;
        self.call_introduce(own).await?;
        let lends = match LinkId(theirs.link) {
            LinkId(0) => {
                tracing::info!("fields of requests go inline: {}", introduction::one_line(&theirs.reason));
                None
            }
            link => introduction::may_lend(endpoint, link).await.then_some(link),
        };
        if lends.is_none() && endpoint.requires_regions() {
            return Err(format!("the server cannot read this program's memory: {}", theirs.reason));
        }
        Ok(Links { server, accepts, lends })
    }

    async fn call_introduce(&self, own: Introduction) -> Result<Introduction, String> {
        let mut client = tonic::client::Grpc::new(self.inner.clone());
        client.ready().await.map_err(|error| error.to_string())?;
        let codec = tonic_prost::ProstCodec::<Introduction, Introduction>::default();
        let mut request = tonic::Request::new(own);
        // The server may take as long at its own end, and this one waits for no more.
        request.set_timeout(2 * introduction::LIMIT);
        let answer = client.unary(request, PathAndQuery::from_static(PATH), codec).await;
        answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            Code::Unimplemented => "the server has no pleach".to_owned(),
            _ => status.to_string(),
        })
    }

    /// The links of an RPC that begins. Where they are lost, they are made anew for later ones.
    fn links(&self) -> Option<(LinkId, Option<LinkId>)> {
        let mut state = lock(&self.shared.state);
        let before = match &*state {
            State::Linked(links) if links.server.link_with_regions() == Some(links.accepts) => {
                return Some((links.accepts, links.lends));
            }
            State::Linked(_) => None,
            State::Ordinary { until, reason } if *until <= clock::now() => Some(reason.clone()),
            State::Ordinary { .. } | State::Introducing { .. } => return None,
        };
        *state = State::Introducing { before };
        drop(state);
        let again = self.clone();
        tokio::spawn(async move { again.introduce().await });
        None
    }
}

/// The answer of a call, whose body is made into another one. An error of the call, or of that
/// body, is one of [`failed`].
async fn answered(
    uri: Uri,
    answer: transport::channel::ResponseFuture,
    accepting: impl FnOnce(Body) -> Body,
) -> Result<Response<Body>, Status> {
    match answer.await {
        Ok(answer) => {
            let named = move |error| failed(uri.path(), error);
            Ok(answer.map(|body| Body::new(accepting(body).map_err(named))))
        }
        Err(error) => Err(failed(uri.path(), Status::from_error(error.into()))),
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    /// See [`failed`].
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(context).map_err(|error| failed("a call", Status::from_error(error.into())))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let (endpoint, uri) = (self.shared.endpoint.clone(), request.uri().clone());
        let Some((accepts, lends)) = self.links() else {
            let lender = Lender::new(&endpoint, Err(InlineReason::NoRegions), 0);
            let request = request.map(|body| Body::new(LendingBody::new(body, lender, None)));
            let answer = self.inner.call(request);
            return Box::pin(answered(uri, answer, |body| body));
        };
        // Relaxed: only that no two numbers are equal counts.
        let rpc = LAST_RPC.fetch_add(1, Ordering::Relaxed) + 1;
        if let Ok(mut value) = HeaderValue::from_str(&rpc_header(accepts, rpc)) {
            // No two are equal, so none is worth a place in the tables of HTTP/2.
            value.set_sensitive(true);
            request.headers_mut().insert(RPC_HEADER, value);
        }
        let is_compressed = request.headers().contains_key("grpc-encoding");
        let link = match lends {
            None => Err(InlineReason::NoRegions),
            Some(_) if is_compressed => Err(InlineReason::Compressed),
            Some(link) => Ok(link),
        };
        let lender = Lender::new(&endpoint, link, rpc);
        let request = request.map(|body| Body::new(LendingBody::new(body, lender.clone(), None)));
        // Dropped with the future, or with the body of the answer.
        let (lender, misses) = (Some(lender), Some(accepts));
        let end = RpcEnd { endpoint: endpoint.clone(), rpc, lender, recalls: true, misses };
        let answer = self.inner.call(request);
        let accepting = |body| Body::new(AcceptingBody::new(body, endpoint, Some(end)));
        Box::pin(answered(uri, answer, accepting))
    }
}
