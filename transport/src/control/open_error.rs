//! Why a device was not made.

use std::io;

/// Why a device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A listener beyond loopback needs a secret.
    #[error(
        "listening on {address} needs a shared secret, since it is not loopback; write one with 'pleach secret FILE', copy it to all hosts and set PLEACH_SECRET_FILE=FILE"
    )]
    SecretRequired {
        /// The address to listen on.
        address: std::net::IpAddr,
    },
    /// No secret was given.
    #[error("a device over TCP takes a shared secret: every user of this host can connect to it")]
    NoSecret,
    /// TLS cannot be used as it was asked for.
    #[error(transparent)]
    Tls(#[from] crate::tls::TlsError),
    /// There is no such interface on this host.
    #[error(
        "there is no network interface '{interface}' here; name one of 'ip link' or an IP address of this host"
    )]
    NoSuchInterface {
        /// The configured interface.
        interface: String,
    },
    /// The interface has no address.
    #[error("network interface '{interface}' has no address; give it one or name another")]
    NoAddress {
        /// The configured interface.
        interface: String,
    },
    /// Peers cannot connect to "any address".
    #[error(
        "'{interface}' is no address that peers can connect to; name an interface or one address of this host"
    )]
    Unspecified {
        /// The configured interface.
        interface: String,
    },
    /// The interface's addresses could not be read.
    #[error("the addresses of network interface '{interface}' could not be read; name an IP address instead")]
    Interface {
        /// The configured interface.
        interface: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Listening failed.
    #[error("listening on {address} failed; is it an address of this host?")]
    Listen {
        /// The address to listen on.
        address: std::net::IpAddr,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The operating system refused a descriptor or the thread.
    #[error("the operating system refused the device its {resource}")]
    System {
        /// The resource that was asked for.
        resource: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}
