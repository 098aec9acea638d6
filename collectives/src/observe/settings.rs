//! Settings: the observations of a group that are written besides its counters, and their places.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use pleach_vocabulary::Rank;

/// The variable with the folder of [`Observe::flight_recorder`].
const FLIGHT_RECORDER_VARIABLE: &str = "PLEACH_FLIGHT_RECORDER";
/// The variable with the file of [`Observe::trace`].
const TRACE_VARIABLE: &str = "PLEACH_TRACE";
/// The variable with the address of [`Observe::metrics`].
pub const METRICS_VARIABLE: &str = "PLEACH_METRICS";

/// The form of an address of metrics.
pub const METRICS_FORM: &str = "PORT or IP:PORT, as 9400 or [::1]:9400";

/// Parses an address of [`Observe::metrics`]: `PORT` on loopback, or `IP:PORT`.
#[must_use]
pub fn metrics_address(text: &str) -> Option<SocketAddr> {
    let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    text.parse().map(loopback).or_else(|_| text.parse()).ok()
}

/// The observations of a group that are written besides the counters behind `Group::report`. All
/// are off by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Observe {
    /// An existing folder for the flight recorder. When the group fails, each rank that is in a
    /// call or makes a later call writes its last operations to
    /// `pleach-flight-rank<R>-<process>.json` in this folder. If further groups of the process fail
    /// on the same rank, the names of their files have `-2`, `-3` and so on at the end. From
    /// `PLEACH_FLIGHT_RECORDER`.
    pub flight_recorder: Option<PathBuf>,
    /// A file for a trace of every call, with one track for each rank, in the form that Perfetto
    /// and `chrome://tracing` read. Ranks that share the file system share the file. Groups that
    /// are split from this group have tracks of their own in it. The file is written when the
    /// group's last handle is dropped. With a trace every call reads the clock twice. From
    /// `PLEACH_TRACE`.
    pub trace: Option<PathBuf>,
    /// The address of a server that answers `GET /metrics` in Prometheus' text form; `pleach top`
    /// reads it. Rank `r` of a host listens on this port plus `r`, or on any free port for port 0.
    /// Groups that are split from this group listen on a free port or not at all. A process of a
    /// session listens at one port in all epochs, that of its seat where its launcher does not
    /// number the ranks of a host, and serves the metrics of the newest epoch. Everyone who reaches
    /// the address may read the metrics, so use a loopback address or a network that you trust.
    /// From `PLEACH_METRICS`, as `PORT` (on loopback) or `IP:PORT`.
    pub metrics: Option<SocketAddr>,
    /// The part, if this group was split from another group.
    pub(crate) part: Option<Part>,
}

/// A group that was split from another group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// A name that is the same on all ranks of the part and that no other group has.
    pub(crate) name: String,
    /// The number of this rank in the group that was joined.
    pub(crate) joined_rank: Rank,
}

impl Observe {
    /// The settings from the environment. An empty or absent variable sets nothing. A value that is
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
