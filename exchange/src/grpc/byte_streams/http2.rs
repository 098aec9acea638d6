//! HTTP/2 over a stream: its sizes, and how tonic gets the stream.

use std::future::Ready;
use std::io::{self, ErrorKind};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tonic::codegen::http::Uri;
use tonic::transport;

use super::ByteStream;

/// HTTP/2's largest frame, so that a tensor of 16 MB is one.
const FRAME_BYTES: u32 = (1 << 24) - 1;

/// A window of HTTP/2: the bytes that a reader may have in memory before it reads them. The sender
/// of a tensor of this length waits for no answer.
const WINDOW_BYTES: u32 = 64 << 20;

/// With what tonic is to connect over a stream ([`ByteStream::channel`]): frames of 16 MB and
/// windows of 64 MiB, so that a tensor waits for few answers of HTTP/2.
#[must_use]
pub fn client() -> transport::Endpoint {
    let client = transport::Endpoint::from_static("http://rank").max_frame_size(FRAME_BYTES);
    client.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES)
}

/// A server for streams, as [`client`].
#[must_use]
pub fn server() -> transport::Server {
    let server = transport::Server::builder().max_frame_size(FRAME_BYTES);
    server.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES)
}

/// Gives tonic the stream, once.
pub(crate) struct Connector(Option<ByteStream>);

impl Connector {
    pub(crate) fn of(stream: ByteStream) -> Self {
        Self(Some(stream))
    }
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<ByteStream>;
    type Error = io::Error;
    type Future = Ready<io::Result<TokioIo<ByteStream>>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _server: Uri) -> Self::Future {
        let stream = self.0.take().map(TokioIo::new);
        std::future::ready(
            stream.ok_or_else(|| io::Error::new(ErrorKind::ConnectionReset, "the stream has ended")),
        )
    }
}
