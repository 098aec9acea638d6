//! The handshake of TLS 1.3, by rustls. Bytes in, bytes out: it knows no socket.
//!
//! **Invariant:** no byte behind the handshake is read: [`TlsHandshake::room`] ends with the record
//! that is coming, so what follows stays in the socket for whoever has the keys then.

use std::sync::{Arc, Mutex};

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{AlertDescription, CertificateError, ConnectionTrafficSecrets, Error};

use super::ends::{Ends, identity};
use super::record::{HEADER_BYTES, SEALED_BYTES_MAX, TlsReader, TlsWriter};
use super::{Session, TlsFault};

/// Bytes that the other end may send before it is authenticated: a long chain of certificates.
const HANDSHAKE_BYTES_MAX: usize = 64 << 10;

/// Makes the keys that follow those of a connection.
pub(crate) enum KeySchedule {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl KeySchedule {
    pub(crate) fn next_to_send(&mut self) -> Option<(u64, ConnectionTrafficSecrets)> {
        match self {
            Self::Client(connection) => connection.update_tx_secret().ok(),
            Self::Server(connection) => connection.update_tx_secret().ok(),
        }
    }

    pub(crate) fn next_to_receive(&mut self) -> Option<(u64, ConnectionTrafficSecrets)> {
        match self {
            Self::Client(connection) => connection.update_rx_secret().ok(),
            Self::Server(connection) => connection.update_rx_secret().ok(),
        }
    }
}

enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// One end of a handshake.
pub struct TlsHandshake {
    end: End,
    /// The key that the listener shows, at the listener.
    own_identity: [u8; 32],
    incoming: Vec<u8>,
    /// Bytes of `incoming` that have come.
    filled: usize,
    /// Where the record begins that is coming.
    record: usize,
    received: usize,
    outgoing: Vec<u8>,
}

/// What a call of rustls led to.
enum Step {
    Again,
    Blocked,
    Done,
    Failed(Error),
}

impl TlsHandshake {
    pub(crate) fn dial(ends: &Ends) -> Result<Self, TlsFault> {
        let end = ends.dial().map_err(|error| violation(&error))?;
        let mut handshake = Self::new(End::Client(end), [0; 32]);
        handshake.advance()?;
        Ok(handshake)
    }

    pub(crate) fn listen(ends: &Ends) -> Result<Self, TlsFault> {
        let (end, identity) = ends.listen().map_err(|error| violation(&error))?;
        Ok(Self::new(End::Server(end), identity))
    }

    fn new(end: End, own_identity: [u8; 32]) -> Self {
        let (incoming, outgoing) = (Vec::new(), Vec::new());
        Self { end, own_identity, incoming, filled: 0, record: 0, received: 0, outgoing }
    }

    /// The bytes to send since the last call.
    #[must_use]
    pub fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// The buffer to receive into, no longer than the record that is coming.
    pub fn room(&mut self) -> &mut [u8] {
        let end = self.record_end();
        self.incoming.resize(end, 0);
        &mut self.incoming[self.filled..]
    }

    /// Where the record ends that is coming, or its header.
    fn record_end(&self) -> usize {
        match self.incoming[self.record..self.filled].first_chunk::<HEADER_BYTES>() {
            Some(header) => {
                let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
                self.record + HEADER_BYTES + len.min(SEALED_BYTES_MAX)
            }
            None => self.record + HEADER_BYTES,
        }
    }

    /// Handles `count` bytes that were received into the room; whether the handshake is done. Also
    /// after an error there may be bytes to send, which tell the other end.
    ///
    /// # Errors
    ///
    /// When the other end is not as it should be.
    pub fn received(&mut self, count: usize) -> Result<bool, TlsFault> {
        self.filled += count;
        self.received += count;
        if self.received > HANDSHAKE_BYTES_MAX {
            return Err(TlsFault::Handshake);
        }
        let is_whole = self.filled >= self.record + HEADER_BYTES && self.filled == self.record_end();
        if is_whole { self.advance() } else { Ok(false) }
    }

    fn advance(&mut self) -> Result<bool, TlsFault> {
        loop {
            match self.turn() {
                Step::Again => {}
                Step::Blocked => return Ok(false),
                Step::Done => return Ok(true),
                Step::Failed(error) => {
                    // One more call gives the alert for the other end, if there is one. Any other
                    // call would have rustls look at the same bytes again, where it panics.
                    let has_alert = match &self.end {
                        End::Client(end) => end.wants_write(),
                        End::Server(end) => end.wants_write(),
                    };
                    if has_alert {
                        self.turn();
                    }
                    return Err(violation(&error));
                }
            }
        }
    }

    /// Calls rustls once.
    fn turn(&mut self) -> Step {
        let incoming = &mut self.incoming[..self.filled];
        let (used, step) = match &mut self.end {
            End::Client(end) => step(end.process_tls_records(incoming), &mut self.outgoing),
            End::Server(end) => step(end.process_tls_records(incoming), &mut self.outgoing),
        };
        self.incoming.drain(..used);
        self.filled -= used;
        self.record = self.filled;
        step
    }

    /// The keys, after the handshake.
    ///
    /// # Errors
    ///
    /// When there are none, which cannot be after a handshake of TLS 1.3.
    pub fn finish(self) -> Result<Session, TlsFault> {
        let failed = TlsFault::Handshake;
        let (binding, secrets, schedule) = match self.end {
            End::Client(end) => {
                let shown = end.peer_certificates().and_then(|shown| shown.first());
                let theirs = shown.map(|key| identity(key));
                let (secrets, connection) =
                    end.dangerous_into_kernel_connection().map_err(|error| violation(&error))?;
                (theirs.ok_or(failed)?, secrets, KeySchedule::Client(connection))
            }
            End::Server(end) => {
                let (secrets, connection) =
                    end.dangerous_into_kernel_connection().map_err(|error| violation(&error))?;
                (self.own_identity, secrets, KeySchedule::Server(connection))
            }
        };
        let schedule = Arc::new(Mutex::new(schedule));
        let writer = TlsWriter::new(&secrets.tx, Arc::clone(&schedule)).ok_or(failed)?;
        let reader = TlsReader::new(&secrets.rx, schedule).ok_or(failed)?;
        Ok(Session { writer, reader, binding })
    }
}

fn step<Data>(status: UnbufferedStatus<'_, '_, Data>, outgoing: &mut Vec<u8>) -> (usize, Step) {
    let step = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let start = outgoing.len();
            if let Err(EncodeError::InsufficientSize(error)) = data.encode(&mut []) {
                outgoing.resize(start + error.required_size, 0);
                // There is room, so it cannot fail.
                let _ = data.encode(&mut outgoing[start..]);
            }
            Step::Again
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Step::Again
        }
        Ok(ConnectionState::BlockedHandshake) => Step::Blocked,
        Ok(ConnectionState::WriteTraffic(_)) => Step::Done,
        // Data, or an end, where a handshake is due.
        Ok(_) => Step::Failed(Error::HandshakeNotComplete),
        Err(error) => Step::Failed(error),
    };
    (status.discard, step)
}

/// What an error of rustls says about the other end.
fn violation(error: &Error) -> TlsFault {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext, UnknownIssuer};
    match error {
        Error::InvalidCertificate(Expired | ExpiredContext { .. }) => TlsFault::Expired,
        Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => TlsFault::NotValidYet,
        Error::InvalidCertificate(UnknownIssuer) | Error::NoCertificatesPresented => TlsFault::Foreign,
        Error::InvalidCertificate(_) => TlsFault::Certificate,
        Error::DecryptError => TlsFault::Tampered,
        Error::AlertReceived(alert) => refusal(u8::from(*alert)),
        _ => TlsFault::Handshake,
    }
}

/// What an alert of the other end says.
pub(crate) fn refusal(alert: u8) -> TlsFault {
    match AlertDescription::from(alert) {
        AlertDescription::CertificateExpired => TlsFault::OwnExpired,
        AlertDescription::UnknownCA
        | AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::CertificateRequired
        | AlertDescription::AccessDenied => TlsFault::OwnRefused,
        AlertDescription::BadRecordMac | AlertDescription::DecryptError => TlsFault::Tampered,
        _ => TlsFault::Handshake,
    }
}
