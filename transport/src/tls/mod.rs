//! TLS 1.3 on TCP connections, so that nobody on the way reads or changes what ranks send.
//!
//! | type | purpose |
//! | --- | --- |
//! | [`Tls`] | whether an end asks for TLS, and with which keys |
//! | [`TlsHandshake`] | a handshake, by rustls: bytes in, bytes out |
//! | [`TlsWriter`], [`TlsReader`] | what follows, one direction each, so that two threads share no lock |
//! | `KernelReader` | a direction whose records the kernel opens |
//!
//! A connection begins in clear with the hellos of its protocol. Each says how its end wants the
//! connection protected, and both must want the same. TLS follows, and in it the proof of the
//! secret, which covers both hellos and the key that the listener has shown ([`Session::binding`]).
//! So nobody in between can take TLS away, or stand between two handshakes.
//!
//! The end of a stream is no message of TLS here: each protocol has a last message of its own, and
//! a stream that ends without it was cut.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

#[cfg(not(feature = "tls"))]
mod absent;
#[cfg(feature = "tls")]
mod ends;
#[cfg(feature = "tls")]
mod handshake;
#[cfg(feature = "tls")]
#[allow(unsafe_code)]
mod kernel;
#[cfg(feature = "tls")]
mod record;
#[cfg(all(test, feature = "tls"))]
mod tests;

#[cfg(not(feature = "tls"))]
use self::absent::Ends;
#[cfg(not(feature = "tls"))]
pub(crate) use self::absent::KernelReader;
#[cfg(not(feature = "tls"))]
pub use self::absent::{PLAIN_BYTES_MAX, RECORDS_AT_ONCE, TlsHandshake, TlsReader, TlsWriter};
#[cfg(feature = "tls")]
use self::ends::Ends;
#[cfg(all(feature = "etcd", feature = "tls"))]
pub(crate) use self::ends::{certificates_of, provider};
#[cfg(feature = "tls")]
pub use self::handshake::TlsHandshake;
#[cfg(feature = "tls")]
pub(crate) use self::kernel::KernelReader;
#[cfg(feature = "tls")]
pub use self::record::{PLAIN_BYTES_MAX, RECORDS_AT_ONCE, TlsReader, TlsWriter};

/// When TCP connections speak TLS: `PLEACH_TLS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// Between addresses that are not loopback; the default.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always, also on loopback.
    On,
    /// As [`TlsMode::On`]; and fabrics whose data cannot be protected are refused.
    Require,
}

impl FromStr for TlsMode {
    type Err = TlsError;

    fn from_str(text: &str) -> Result<Self, TlsError> {
        match text {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "require" => Ok(Self::Require),
            _ => Err(TlsError::Mode { value: text.to_owned() }),
        }
    }
}

impl fmt::Display for TlsMode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Auto => "not set",
            Self::Off => "off",
            Self::On => "on",
            Self::Require => "require",
        })
    }
}

/// How an end of a TCP connection protects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Not at all.
    Clear,
    /// By TLS, with keys that the proof of the job's secret covers.
    Secret,
    /// By TLS, with the user's certificates.
    Certificates,
}

impl fmt::Display for Protection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Clear => "speaks no TLS",
            Self::Secret => "speaks TLS with the job's secret",
            Self::Certificates => "speaks TLS with certificates",
        })
    }
}

/// How TLS with the other end failed.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsFault {
    /// Its certificate has expired.
    #[error("its certificate has expired; renew PLEACH_TLS_CERT there")]
    Expired,
    /// Its certificate is not valid yet.
    #[error("its certificate is not valid yet; set the clocks of both hosts")]
    NotValidYet,
    /// Another authority has signed its certificate.
    #[error(
        "its certificate is not signed by the authority of PLEACH_TLS_CA; give all ranks the same authority"
    )]
    Foreign,
    /// Its certificate is wrong in another way.
    #[error("its certificate is not one for a rank; look at PLEACH_TLS_CERT there")]
    Certificate,
    /// It says that this rank's certificate has expired.
    #[error("it says that this rank's certificate has expired; renew PLEACH_TLS_CERT here")]
    OwnExpired,
    /// It does not take this rank's certificate.
    #[error("it does not take this rank's certificate; give all ranks the same PLEACH_TLS_CA")]
    OwnRefused,
    /// Bytes are not those that it has sealed: changed, left out or repeated on the way.
    #[error(
        "somebody has changed, left out or repeated bytes on the way from it; look who is between the two hosts"
    )]
    Tampered,
    /// It sends records that hold nothing, or keys without end.
    #[error("it sends records without data; run one version on all ranks, and look what program it is")]
    NoData,
    /// The handshake failed: another version, another protocol, or bytes that were changed.
    #[error(
        "the TLS handshake with it failed; run one version on all ranks, and look who is between the two hosts"
    )]
    Handshake,
}

/// Why nothing more is received from a connection whose records the kernel opens.
#[derive(Debug)]
pub(crate) enum ReadFailure {
    /// The other end is at fault, or somebody in between.
    Fault(TlsFault),
    /// An error of the socket.
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "no kernel has keys then"))]
    System(std::io::Error),
}

impl From<TlsFault> for ReadFailure {
    fn from(fault: TlsFault) -> Self {
        Self::Fault(fault)
    }
}

/// The files of a user's own certificates, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// `PLEACH_TLS_CERT`: this rank's certificate, then those between it and the authority.
    pub certificate: PathBuf,
    /// `PLEACH_TLS_KEY`: its private key.
    pub key: PathBuf,
    /// `PLEACH_TLS_CA`: the authorities that may have signed the certificates of ranks.
    pub authority: PathBuf,
}

/// Why TLS cannot be used as it was asked for.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// An unknown mode.
    #[error("bad value: PLEACH_TLS='{value}'; set off, on or require, or nothing")]
    Mode {
        /// The value.
        value: String,
    },
    /// Some of the three files of certificates.
    #[error(
        "incomplete: {present} is given without {absent}; give PLEACH_TLS_CERT, PLEACH_TLS_KEY and PLEACH_TLS_CA, or none"
    )]
    Incomplete {
        /// One that is set.
        present: &'static str,
        /// One that is not.
        absent: &'static str,
    },
    /// A file that cannot be used.
    #[error("unusable certificates: {variable}={} ({reason}); name a file in PEM that fits the others", .path.display())]
    File {
        /// The variable.
        variable: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// This program was built without TLS.
    #[error(
        "no TLS here: PLEACH_TLS or PLEACH_TLS_CERT asks for it, and this program was built without the feature 'tls'"
    )]
    NotBuilt,
    /// A fabric whose data nobody encrypts.
    #[error(
        "PLEACH_TLS=require asks for encryption, which data over RDMA do not have; take another fabric (--fabric shm+tcp), or set PLEACH_TLS=on and keep the RDMA network to the job"
    )]
    Unprotected,
    /// The library of TLS refused its configuration.
    #[error(
        "TLS cannot be used on this host ({reason}); set PLEACH_TLS=off on all ranks, or repair the host"
    )]
    Library {
        /// The reason.
        reason: String,
    },
}

/// The keys of a connection, and whose they are. For the protocols of this workspace: see the
/// module for what a protocol adds to TLS.
pub struct Session {
    writer: TlsWriter,
    reader: TlsReader,
    binding: [u8; 32],
}

impl Session {
    /// What seals.
    pub fn writer(&mut self) -> &mut TlsWriter {
        &mut self.writer
    }

    /// What opens.
    pub fn reader(&mut self) -> &mut TlsReader {
        &mut self.reader
    }

    /// The listener's key: a proof that covers it holds on this connection alone.
    #[must_use]
    pub fn binding(&self) -> &[u8; 32] {
        &self.binding
    }

    /// The two directions, each for a thread of its own.
    #[must_use]
    pub fn split(self) -> (TlsWriter, TlsReader) {
        (self.writer, self.reader)
    }
}

/// Whether an end asks for TLS, and with which keys. Copies share the keys.
#[derive(Clone)]
pub struct Tls {
    mode: TlsMode,
    has_certificates: bool,
    /// `None` where TLS is never used.
    ends: Option<Arc<Ends>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Session(..)")
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Tls").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl fmt::Display for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = if self.has_certificates { " with certificates" } else { "" };
        write!(formatter, "{}{keys}", self.mode)
    }
}

impl Tls {
    /// With the user's certificates, or else with a key that is made here.
    ///
    /// # Errors
    ///
    /// See [`TlsError`].
    pub fn new(mode: TlsMode, certificates: Option<&CertificateFiles>) -> Result<Self, TlsError> {
        let is_asked_for = mode != TlsMode::Auto || certificates.is_some();
        let is_wanted = mode != TlsMode::Off && (is_asked_for || cfg!(feature = "tls"));
        let ends = if is_wanted { Some(Arc::new(Ends::new(certificates)?)) } else { None };
        Ok(Self { mode, has_certificates: certificates.is_some(), ends })
    }

    /// As `PLEACH_TLS`, `PLEACH_TLS_CERT`, `PLEACH_TLS_KEY` and `PLEACH_TLS_CA` say.
    ///
    /// # Errors
    ///
    /// See [`TlsError`].
    pub fn from_env() -> Result<Self, TlsError> {
        Self::from_env_but(None)
    }

    /// As [`Tls::from_env`], but in this mode if there is one.
    ///
    /// # Errors
    ///
    /// See [`TlsError`].
    pub fn from_env_but(mode: Option<TlsMode>) -> Result<Self, TlsError> {
        let (named, certificates) =
            parse(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))?;
        Self::new(mode.unwrap_or(named), certificates.as_ref())
    }

    /// Whether the ends show certificates.
    #[must_use]
    pub fn has_certificates(&self) -> bool {
        self.has_certificates
    }

    /// When it is used.
    #[must_use]
    pub fn mode(&self) -> TlsMode {
        self.mode
    }

    /// The protection with which TLS comes here.
    fn own(&self) -> Protection {
        match (&self.ends, self.has_certificates) {
            (None, _) => Protection::Clear,
            (Some(_), false) => Protection::Secret,
            (Some(_), true) => Protection::Certificates,
        }
    }

    /// What a dialer asks for on a connection to this address.
    #[must_use]
    pub fn asked(&self, address: IpAddr) -> Protection {
        match self.mode {
            TlsMode::Auto if address.to_canonical().is_loopback() => Protection::Clear,
            _ => self.own(),
        }
    }

    /// What a listener answers to a dialer at this address which asks for `theirs`. On loopback
    /// the dialer may choose: it may have come through a tunnel.
    #[must_use]
    pub fn answered(&self, address: IpAddr, theirs: Protection) -> Protection {
        if theirs == Protection::Clear { self.asked(address) } else { self.own() }
    }

    /// The dialer's end of a handshake.
    ///
    /// # Errors
    ///
    /// [`TlsFault::Handshake`] where TLS is never used, or the library fails.
    pub fn dial(&self) -> Result<TlsHandshake, TlsFault> {
        TlsHandshake::dial(self.ends()?)
    }

    /// The listener's end of a handshake.
    ///
    /// # Errors
    ///
    /// As of [`Tls::dial`].
    pub fn listen(&self) -> Result<TlsHandshake, TlsFault> {
        TlsHandshake::listen(self.ends()?)
    }

    fn ends(&self) -> Result<&Ends, TlsFault> {
        self.ends.as_deref().ok_or(TlsFault::Handshake)
    }
}

/// The mode and the files that these variables give.
fn parse(
    variable: impl Fn(&'static str) -> Option<String>,
) -> Result<(TlsMode, Option<CertificateFiles>), TlsError> {
    let text = |name| variable(name).filter(|text| !text.is_empty());
    let mode = text("PLEACH_TLS").map_or(Ok(TlsMode::Auto), |text| text.parse())?;
    const FILES: [&str; 3] = ["PLEACH_TLS_CERT", "PLEACH_TLS_KEY", "PLEACH_TLS_CA"];
    let files = FILES.map(|name| text(name).map(PathBuf::from));
    let present = FILES.into_iter().zip(&files).find(|(_, file)| file.is_some());
    let absent = FILES.into_iter().zip(&files).find(|(_, file)| file.is_none());
    let certificates = match (present, absent) {
        (Some((present, _)), Some((absent, _))) => return Err(TlsError::Incomplete { present, absent }),
        (None, _) => None,
        (Some(_), None) => {
            let [certificate, key, authority] = files.map(Option::unwrap_or_default);
            Some(CertificateFiles { certificate, key, authority })
        }
    };
    Ok((mode, certificates))
}
