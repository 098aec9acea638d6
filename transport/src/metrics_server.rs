//! Answers `GET /metrics`, and nothing else, from a thread of its own.
//!
//! Clients are not trusted. There is one connection at a time. It may take [`PATIENCE`] from its
//! first byte to the last byte of the answer, and at most [`HEAD_BYTES_MAX`] of its request are
//! read. The answer depends on the method and the path alone.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::{Nanos, clock};

/// Longest time for one connection.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest head of a request, in bytes.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Errors in a row after which a listener is given up.
const ERRORS_MAX: u32 = 100;

/// Listens until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    /// Release store pairs with the acquire load after each connection.
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Listens at `address`; `metrics` is asked for each answer.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn start(
        address: SocketAddr,
        metrics: impl Fn() -> String + Send + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        let thread = std::thread::Builder::new()
            .name("pleach-metrics".to_owned())
            .spawn(move || serve(&listener, &ends, &metrics))?;
        Ok(Self { address, is_over, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Wakes the thread. If it cannot, the thread ends with the process.
        if TcpStream::connect_timeout(&address, PATIENCE).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, is_over: &AtomicBool, metrics: &dyn Fn() -> String) {
    let mut errors = 0;
    while errors < ERRORS_MAX {
        let accepted = listener.accept();
        if is_over.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((stream, _)) => {
                errors = 0;
                // Whatever goes wrong is the client's loss.
                let _ = answer(stream, metrics);
            }
            // It left again, or files have run out: others may come.
            Err(_) => errors += 1,
        }
    }
    tracing::warn!(
        "metrics are served no more: the listener fails; look at the limit of open files ('ulimit -n')"
    );
}

fn answer(mut stream: TcpStream, metrics: &dyn Fn() -> String) -> std::io::Result<()> {
    let until = clock::now() + PATIENCE;
    let Some(head) = read_head(&mut stream, until)? else {
        return send(&mut stream, "431 Request Header Fields Too Large", "", until);
    };
    let line = head.split(|byte| *byte == b'\r' || *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    match (method, path) {
        (b"GET", b"/metrics") => send(&mut stream, "200 OK", &metrics(), until),
        (b"GET", _) => send(&mut stream, "404 Not Found", "there is /metrics\n", until),
        _ => send(&mut stream, "405 Method Not Allowed", "there is GET\n", until),
    }
}

/// Up to the empty line that ends it, or the end of what is sent; `None` when it is too long.
fn read_head(stream: &mut TcpStream, until: Nanos) -> std::io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    loop {
        stream.set_read_timeout(Some(left(until)?))?;
        let read = match stream.read(&mut piece) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read?,
        };
        head.extend_from_slice(&piece[..read]);
        let is_whole = head.windows(4).any(|bytes| bytes == b"\r\n\r\n")
            || head.windows(2).any(|bytes| bytes == b"\n\n");
        if is_whole || read == 0 {
            return Ok(Some(head));
        }
        if head.len() > HEAD_BYTES_MAX {
            return Ok(None);
        }
    }
}

fn send(stream: &mut TcpStream, status: &str, body: &str, until: Nanos) -> std::io::Result<()> {
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        match stream.write(rest) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            written => rest = &rest[written?..],
        }
    }
    Ok(())
}

/// Time left; never zero, which would be without a limit.
fn left(until: Nanos) -> std::io::Result<Duration> {
    let left = until.since(clock::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    fn ask(server: &MetricsServer, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // Refused early, it may be closed before all is written.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn only_metrics_are_answered_and_other_requests_end_nothing() {
        let server = MetricsServer::start(ANY, || "pleach_x 1\n".to_owned()).unwrap();
        let good = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        let expect_good = || {
            let answer = ask(&server, good);
            assert!(
                answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\npleach_x 1\n"),
                "{answer}"
            );
        };
        expect_good();
        assert!(ask(&server, b"GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(&server, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(ask(&server, b"\xff\x00\x01\n\n").starts_with("HTTP/1.1 405 "));
        let endless = [b"GET /metrics HTTP/1.1\r\n".to_vec(), vec![b'x'; 3 * HEAD_BYTES_MAX]].concat();
        let answer = ask(&server, &endless);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
        // Says nothing, and leaves; says nothing, and stays.
        drop(TcpStream::connect(server.address()).unwrap());
        let silent = TcpStream::connect(server.address()).unwrap();
        expect_good();
        drop(silent);
        expect_good();
    }

    #[test]
    fn a_server_that_is_dropped_gives_its_port_back() {
        let server = MetricsServer::start(ANY, String::new).unwrap();
        let address = server.address();
        drop(server);
        MetricsServer::start(address, String::new).unwrap();
    }
}
