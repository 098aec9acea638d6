//! Settings: which observations of a group are written down besides its counters, and where.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use pleach_vocabulary::Rank;

/// Names the folder of [`Observe::flight_recorder`].
const FLIGHT_RECORDER_VARIABLE: &str = "PLEACH_FLIGHT_RECORDER";
/// Names the file of [`Observe::trace`].
const TRACE_VARIABLE: &str = "PLEACH_TRACE";
/// Names the address of [`Observe::metrics`].
pub const METRICS_VARIABLE: &str = "PLEACH_METRICS";

/// How an address of metrics is written.
pub const METRICS_FORM: &str = "PORT or IP:PORT, as 9400 or [::1]:9400";

/// An address of metrics, as [`Observe::metrics`] has it: `PORT` on loopback, or `IP:PORT`.
#[must_use]
pub fn metrics_address(text: &str) -> Option<SocketAddr> {
    let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    text.parse().map(loopback).or_else(|_| text.parse()).ok()
}

/// The observations of a group that are written down besides the counters behind `Group::report`.
/// All are off by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Observe {
    /// A folder that is there. When the group fails, each rank that is in a call then or makes one
    /// later writes its last operations there, as `pleach-flight-rank<R>-<process>.json`; further
    /// groups of the process that fail as the same rank with `-2`, `-3` behind that. From
    /// `PLEACH_FLIGHT_RECORDER`.
    pub flight_recorder: Option<PathBuf>,
    /// A file for every call, one track a rank, in the form that Perfetto and `chrome://tracing`
    /// read; ranks that share the file system share the file. Groups that are split from it have
    /// tracks of their own there. Written when the group's last handle is dropped; then every call
    /// reads the clock twice. From `PLEACH_TRACE`.
    pub trace: Option<PathBuf>,
    /// Answers `GET /metrics` in Prometheus' text form; `pleach top` reads it. Rank `r` of a host
    /// listens on this port plus `r`, or on any free one for port 0; groups that are split from it
    /// on a free one or not at all. Whoever reaches the address may read it: use a loopback
    /// address, or a network that you trust. From `PLEACH_METRICS`, as `PORT` (on loopback) or
    /// `IP:PORT`.
    pub metrics: Option<SocketAddr>,
    /// Which group this is, if it was split from another.
    pub(crate) part: Option<Part>,
}

/// A group that was split from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The same on all of its ranks, and no other group's.
    pub(crate) name: String,
    /// This rank in the group that was joined.
    pub(crate) joined_rank: Rank,
}

impl Observe {
    /// The settings of the environment; an empty or absent variable sets nothing. A value that is
    /// no address is ignored with a warning.
    #[must_use]
    pub fn from_env() -> Self {
        let path = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            flight_recorder: path(FLIGHT_RECORDER_VARIABLE),
            trace: path(TRACE_VARIABLE),
            metrics: metrics_from_env(),
            part: None,
        }
    }
}

fn metrics_from_env() -> Option<SocketAddr> {
    let text = std::env::var(METRICS_VARIABLE).ok().filter(|text| !text.is_empty())?;
    let address = metrics_address(&text);
    if address.is_none() {
        tracing::warn!("no metrics: {METRICS_VARIABLE}='{text}'; write {METRICS_FORM}");
    }
    address
}
