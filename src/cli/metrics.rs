//! `--metrics ADDR`: where ranks serve what they know of their group.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use pleach::collectives::observe::{METRICS_FORM, metrics_address};

/// The default port of the metrics that `pleach top` reads.
pub(crate) const DEFAULT_PORT: u16 = 9400;

/// An address of metrics: `PORT` on loopback, or `IP:PORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MetricsAddress(pub(crate) SocketAddr);

impl Default for MetricsAddress {
    fn default() -> Self {
        Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_PORT))
    }
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        metrics_address(text).map(Self).ok_or_else(|| format!("it has the form {METRICS_FORM}"))
    }
}

impl std::fmt::Display for MetricsAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_host() {
        assert_eq!("9400".parse(), Ok(MetricsAddress::default()));
        assert_eq!("127.0.0.1:9400".parse(), Ok(MetricsAddress::default()));
        assert_eq!("[::1]:80".parse::<MetricsAddress>().unwrap().to_string(), "[::1]:80");
        for bad in ["", "x", "70000", "-1", "1.2.3.4", "localhost:1"] {
            assert!(bad.parse::<MetricsAddress>().is_err(), "{bad}");
        }
    }
}
