//! PyTorch's `TCPStore`, by its own protocol: torchrun's server serves.
//!
//! Requests and answers are numbers in the order of the host's bytes, and bytes after their length
//! of 64 bits (torch/csrc/distributed/c10d/TCPStoreBackend.hpp). A change is `COMPARE_SET`: of a
//! key that is not there an empty value is expected, so no value is empty. A client of PyTorch puts
//! a slash before its keys, and so does this one: `store.get("pleach/…")` reads them.
//!
//! The server knows no leases. An owner counts up a key of its own instead, and an observer takes
//! it for alive when it has seen the count change.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::{
    Change, Exchanged, Lease, OutsideError, OutsideStore, Pulse, SEALED_BYTES_MAX, StorePath, path_to,
    retried,
};
use crate::Nanos;
use crate::auth::random_number;
use crate::clock::now;
use crate::rendezvous::backoff::Backoff;
use crate::rendezvous::world::Place;

const KIND: &str = "TCPStore";

/// By which a server knows a client.
const MAGIC: u32 = 0x3C85_F7CE;

const VALIDATE: u8 = 0;
const COMPARE_SET: u8 = 2;
const GET: u8 = 3;
const ADD: u8 = 4;
const CHECK: u8 = 5;
const DELETE_KEY: u8 = 8;

/// What `CHECK` says of keys that are there.
const READY: u8 = 0;

/// How often an owner counts up.
const BEAT: Duration = Duration::from_millis(250);

/// After how long without a change of its count an owner counts as gone.
const LEASE_TIME: Duration = Duration::from_secs(4);

/// How long one request may take before it is asked again.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct C10dStore {
    place: Place,
    address: String,
    stream: Option<TcpStream>,
}

impl C10dStore {
    pub(super) fn new(place: Place) -> Self {
        Self { address: format!("c10d://{place}"), place, stream: None }
    }

    /// One request, and its answer as `receive` reads it, on a connection that is made where there
    /// is none. After an error the next request has a new one.
    fn request<T>(
        &mut self,
        request: &[u8],
        deadline: Nanos,
        receive: impl Fn(&mut Answer<'_>) -> io::Result<T>,
    ) -> Result<T, OutsideError> {
        retried(deadline, || {
            let until = deadline.min(now() + ATTEMPT_LIMIT);
            let mut stream = match self.stream.take() {
                Some(stream) => stream,
                None => connect(&self.place, until).map_err(|error| self.failed(error))?,
            };
            let result = stream
                .set_write_timeout(Some(left(until)))
                .and_then(|()| stream.write_all(request))
                .and_then(|()| receive(&mut Answer { stream: &mut stream, until }));
            match result {
                Ok(answer) => {
                    self.stream = Some(stream);
                    Ok(answer)
                }
                Err(error) => Err(self.failed(error)),
            }
        })
    }

    fn failed(&self, source: io::Error) -> OutsideError {
        let address = self.address.clone();
        if source.kind() == io::ErrorKind::InvalidData {
            return OutsideError::Foreign { kind: KIND, address, answer: source.to_string().into_bytes() };
        }
        OutsideError::Unreachable { address, source }
    }

    fn check(&mut self, key: &str, deadline: Nanos) -> Result<bool, OutsideError> {
        let request = put_bytes(number(vec![CHECK], 1), full(key).as_bytes());
        self.request(&request, deadline, |answer| match answer.byte()? {
            READY => Ok(true),
            1 => Ok(false),
            other => Err(strange(&[other])),
        })
    }

    /// Adds to a count, and returns it.
    fn add(&mut self, key: &str, by: u64, deadline: Nanos) -> Result<u64, OutsideError> {
        let request = number(put_bytes(vec![ADD], full(key).as_bytes()), by);
        self.request(&request, deadline, |answer| answer.number())
    }

    fn delete(&mut self, key: &str, deadline: Nanos) -> Result<(), OutsideError> {
        let request = put_bytes(vec![DELETE_KEY], full(key).as_bytes());
        self.request(&request, deadline, |answer| answer.number()).map(drop)
    }

    fn count(&mut self, key: &str, deadline: Nanos) -> Result<Option<u64>, OutsideError> {
        let Some(text) = self.read(key, deadline)? else { return Ok(None) };
        // A count is a number in decimal digits there.
        Ok(String::from_utf8_lossy(&text).trim().parse().ok())
    }
}

fn lease_key(name: &str) -> String {
    format!("lease-{name}")
}

impl OutsideStore for C10dStore {
    fn address(&self) -> &str {
        &self.address
    }

    fn again(&self) -> Box<dyn OutsideStore> {
        Box::new(Self::new(self.place.clone()))
    }

    fn exchange(
        &mut self,
        key: &str,
        change: Change<'_>,
        deadline: Nanos,
    ) -> Result<Exchanged, OutsideError> {
        let request = put_bytes(vec![COMPARE_SET], full(key).as_bytes());
        let request = put_bytes(request, change.expected.unwrap_or_default());
        let request = put_bytes(request, change.value);
        let found = self.request(&request, deadline, |answer| answer.bytes())?;
        if found == change.value {
            return Ok(Exchanged::Written);
        }
        // Of a key that is not there the server says the expected value.
        let is_missing = change.expected == Some(&found[..]) && !self.check(key, deadline)?;
        Ok(Exchanged::Present(Some(found).filter(|_| !is_missing)))
    }

    fn read(&mut self, key: &str, deadline: Nanos) -> Result<Option<Vec<u8>>, OutsideError> {
        // Of a key that is not there some servers break the connection.
        if !self.check(key, deadline)? {
            return Ok(None);
        }
        let request = put_bytes(vec![GET], full(key).as_bytes());
        let value = self.request(&request, deadline, |answer| answer.bytes())?;
        Ok(Some(value).filter(|value| !value.is_empty()))
    }

    fn lease(&mut self, name: &str, deadline: Nanos) -> Result<Lease, OutsideError> {
        let number = random_number();
        let lease = Lease { name: lease_key(name), number };
        self.add(&lease.name, 1, deadline)?;
        Ok(lease)
    }

    fn presence(&mut self, deadline: Nanos) -> Result<Lease, OutsideError> {
        self.lease("members", deadline)
    }

    fn beat(&self) -> Duration {
        BEAT
    }

    fn renew(&mut self, lease: &Lease, deadline: Nanos) -> Result<bool, OutsideError> {
        self.add(&lease.name, 1, deadline).map(|_| true)
    }

    fn revoke(&mut self, lease: &Lease, deadline: Nanos) {
        // That of presence is of all members.
        if lease.name != lease_key("members") {
            let _ = self.delete(&lease.name, deadline);
        }
    }

    fn is_alive(
        &mut self,
        lease: &Lease,
        pulse: &mut Pulse,
        deadline: Nanos,
    ) -> Result<Option<bool>, OutsideError> {
        let Some(count) = self.count(&lease.name, deadline)? else { return Ok(Some(false)) };
        match pulse.count {
            Some((seen, since)) if seen == count => Ok((now().since(since) >= LEASE_TIME).then_some(false)),
            Some(_) => {
                pulse.count = Some((count, now()));
                Ok(Some(true))
            }
            None => {
                pulse.count = Some((count, now()));
                Ok(None)
            }
        }
    }

    fn is_inhabited(&mut self, deadline: Nanos) -> Result<bool, OutsideError> {
        let lease = Lease { name: lease_key("members"), number: 0 };
        let (mut pulse, mut backoff) = (Pulse::default(), Backoff::until(deadline));
        loop {
            let is_alive = self.is_alive(&lease, &mut pulse, deadline)?;
            if is_alive.is_some() || !backoff.again() {
                return Ok(is_alive == Some(true));
            }
        }
    }

    fn path(&self) -> Option<StorePath> {
        path_to(&self.place)
    }
}

/// The name of a key there.
fn full(key: &str) -> String {
    format!("/pleach/{key}")
}

fn number(mut request: Vec<u8>, number: u64) -> Vec<u8> {
    request.extend_from_slice(&number.to_ne_bytes());
    request
}

fn put_bytes(request: Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    let mut request = number(request, bytes.len() as u64);
    request.extend_from_slice(bytes);
    request
}

fn left(until: Nanos) -> Duration {
    until.since(now()).max(Duration::from_millis(1))
}

/// An answer that no `TCPStore` gives.
fn strange(bytes: &[u8]) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, bytes.escape_ascii().to_string())
}

fn connect(place: &Place, until: Nanos) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in (place.host.as_str(), place.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until)) {
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                // No listener, and the kernel chose the same port for this end.
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(left(until)))?;
                let mut hello = vec![VALIDATE];
                hello.extend_from_slice(&MAGIC.to_ne_bytes());
                stream.write_all(&hello)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// An answer as it comes.
struct Answer<'a> {
    stream: &'a mut TcpStream,
    until: Nanos,
}

impl Answer<'_> {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            if now() >= self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left(self.until)))?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.fill(&mut byte)?;
        Ok(byte[0])
    }

    fn number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn bytes(&mut self) -> io::Result<Vec<u8>> {
        let length = self.number()?;
        let length = usize::try_from(length).ok().filter(|length| *length <= SEALED_BYTES_MAX);
        let mut bytes = vec![0; length.ok_or_else(|| strange(b"too long"))?];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }
}
