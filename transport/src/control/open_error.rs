//! Why a device was not made.

use std::io;

/// Why a device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Listening where strangers are needs a secret.
    #[error(
        "listening on {address} needs a shared secret, since it is not loopback; write one with 'pleach secret FILE', copy it to all hosts and set PLEACH_SECRET_FILE=FILE"
    )]
    SecretRequired {
        /// Where.
        address: std::net::IpAddr,
    },
    /// No secret was given.
    #[error("a device over TCP takes a shared secret: every user of this host can connect to it")]
    NoSecret,
    /// There is no such interface on this host.
    #[error(
        "there is no network interface '{interface}' here; name one of 'ip link' or an IP address of this host"
    )]
    NoSuchInterface {
        /// What was given.
        interface: String,
    },
    /// The interface has no address.
    #[error("network interface '{interface}' has no address; give it one or name another")]
    NoAddress {
        /// What was given.
        interface: String,
    },
    /// Peers cannot connect to "any address".
    #[error(
        "'{interface}' is no address that peers can connect to; name an interface or one address of this host"
    )]
    Unspecified {
        /// What was given.
        interface: String,
    },
    /// The interface's addresses could not be found out.
    #[error("the addresses of network interface '{interface}' could not be read; name an IP address instead")]
    Interface {
        /// What was given.
        interface: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Listening failed.
    #[error("listening on {address} failed; is it an address of this host?")]
    Listen {
        /// Where.
        address: std::net::IpAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The operating system refused a descriptor or the thread.
    #[error("the operating system refused the device its {what}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}
