//! What the ranks of a job say of themselves, read from their metrics.
//!
//! Whoever answers may be anybody: answers are limited in time and length, and what is not
//! understood is left out.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use pleach::Rank;
use pleach::collectives::observe::METRICS_VARIABLE;
use pleach::transport::{Nanos, clock};

use crate::cli::metrics::MetricsAddress;

/// Longest time for one rank's answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Most ports that are tried from an address on.
const PORTS_MAX: u32 = 1024;

/// Collective, algorithm, and the largest size in bytes.
pub(super) type ShapeKey = (String, String, u64);

/// Counters of calls of a shape.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Calls {
    pub(super) calls: f64,
    pub(super) bytes: f64,
    pub(super) seconds: f64,
}

/// What a rank says of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ArrivalSkew {
    pub(super) last: f64,
    pub(super) heard: f64,
    pub(super) sum_s: f64,
    pub(super) longest_s: f64,
}

/// What one rank says.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankState {
    pub(super) world_size: u32,
    pub(super) age_s: f64,
    pub(super) has_failed: bool,
    pub(super) under_way: f64,
    pub(super) waits_for: Option<Rank>,
    pub(super) shapes: BTreeMap<ShapeKey, Calls>,
    pub(super) peers: BTreeMap<Rank, ArrivalSkew>,
}

/// What all ranks that answered say.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) at: Nanos,
    pub(super) ranks: BTreeMap<Rank, RankState>,
}

impl Snapshot {
    /// Asks the ranks from each address on, as many as the first says there are.
    pub(super) fn take(addresses: &[MetricsAddress], now: Nanos) -> Result<Self, String> {
        let mut snapshot = Self { at: now, ranks: BTreeMap::new() };
        let mut failure = None;
        for MetricsAddress(first) in addresses {
            let mut ports = 1;
            let mut offset = 0;
            while offset < ports {
                let Some(port) = u16::try_from(u32::from(first.port()) + offset).ok() else { break };
                let address = SocketAddr::new(first.ip(), port);
                let answer = ask(address).map(|text| read(&text));
                match answer {
                    Ok(Some((rank, state))) => {
                        ports = ports.max(state.world_size.min(PORTS_MAX));
                        snapshot.ranks.insert(rank, state);
                    }
                    Ok(None) => {
                        failure.get_or_insert_with(|| {
                            format!("no job: {address} (it serves other things); see {METRICS_VARIABLE}")
                        });
                    }
                    Err(error) => {
                        failure.get_or_insert_with(|| {
                            format!(
                                "no job: {address} ({error}); start it with {METRICS_VARIABLE}={port}, or a subcommand with \
                                 '--metrics {port}'",
                                port = first.port()
                            )
                        });
                        // Ranks of other hosts listen there.
                        if offset == 0 {
                            break;
                        }
                    }
                }
                offset += 1;
            }
        }
        match failure {
            Some(failure) if snapshot.ranks.is_empty() => Err(failure),
            _ => Ok(snapshot),
        }
    }
}

/// The metrics served at an address.
fn ask(address: SocketAddr) -> std::io::Result<String> {
    let until = clock::now() + PATIENCE;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(
        format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let left = until.since(clock::now());
        if left.is_zero() || answer.len() as u64 > ANSWER_BYTES_MAX {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let read = stream.read(&mut piece)?;
        if read == 0 {
            break;
        }
        answer.extend_from_slice(&piece[..read]);
    }
    let text = String::from_utf8_lossy(&answer);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok(body.to_owned())
}

/// Whose metrics they are, and what they say; `None` if they are something else's.
fn read(text: &str) -> Option<(Rank, RankState)> {
    let mut found = None;
    let mut state = RankState::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels, value)) = sample(line) else { continue };
        let label = |key: &str| labels.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let rank = label("rank").and_then(|rank| rank.parse::<Rank>().ok());
        found = found.or(rank);
        if rank != found || !value.is_finite() {
            continue;
        }
        let peer = label("peer").and_then(|peer| peer.parse::<Rank>().ok());
        match (name, peer) {
            ("world_size", _) => state.world_size = value as u32,
            ("age_seconds", _) => state.age_s = value,
            ("failed", _) => state.has_failed = value > 0.0,
            ("under_way", _) => state.under_way = value,
            ("waits_for", Some(peer)) => state.waits_for = Some(peer),
            ("last_total", Some(peer)) => state.peers.entry(peer).or_default().last = value,
            ("arrival_skew_seconds_sum", Some(peer)) => state.peers.entry(peer).or_default().sum_s = value,
            ("arrival_skew_seconds_count", Some(peer)) => state.peers.entry(peer).or_default().heard = value,
            ("longest_arrival_skew_seconds", Some(peer)) => {
                state.peers.entry(peer).or_default().longest_s = value
            }
            ("calls_total" | "bytes_total" | "call_seconds_total", _) => {
                let text = |key| label(key).unwrap_or_default().to_owned();
                let bytes_max = label("bytes_max").and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
                let calls =
                    state.shapes.entry((text("collective"), text("algorithm"), bytes_max)).or_default();
                match name {
                    "calls_total" => calls.calls = value,
                    "bytes_total" => calls.bytes = value,
                    _ => calls.seconds = value,
                }
            }
            _ => {}
        }
    }
    found.filter(|_| state.world_size > 0).map(|rank| (rank, state))
}

/// Name, labels, value.
type Sample<'a> = (&'a str, Vec<(&'a str, &'a str)>, f64);

/// Name without `pleach_`, labels and value of a line. Values of our labels hold neither commas nor
/// quotes.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (series, value) = line.strip_prefix("pleach_")?.rsplit_once(' ')?;
    let (name, labels) = series.split_once('{')?;
    let labels = labels.strip_suffix('}')?.split(',').filter_map(|label| {
        let (key, value) = label.split_once('=')?;
        Some((key, value.trim_matches('"')))
    });
    Some((name, labels.collect(), value.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_serves_is_understood_and_nonsense_left_out() {
        let text = "# TYPE pleach_world_size gauge\npleach_world_size{rank=\"1\"} 4\nnonsense\npleach_x{ 3\n\
            pleach_waits_for{rank=\"1\",peer=\"3\"} 1\npleach_waits_for{rank=\"2\",peer=\"0\"} 1\n\
            pleach_calls_total{rank=\"1\",collective=\"all-reduce\",algorithm=\"ring\",bytes_max=\"64\"} 7\n\
            pleach_bytes_total{rank=\"1\",collective=\"all-reduce\",algorithm=\"ring\",bytes_max=\"64\"} NaN\n\
            pleach_arrival_skew_seconds_sum{rank=\"1\",peer=\"3\"} 0.5\n";
        let (rank, state) = read(text).unwrap();
        assert_eq!((rank, state.world_size, state.waits_for), (1, 4, Some(3)));
        let calls = state.shapes[&("all-reduce".to_owned(), "ring".to_owned(), 64)];
        assert_eq!((calls.calls, calls.bytes), (7.0, 0.0));
        assert_eq!(state.peers[&3].sum_s, 0.5);
        for foreign in ["", "go_goroutines 3\n", "<html>", "pleach_failed{rank=\"0\"} 0\n"] {
            assert_eq!(read(foreign), None, "{foreign}");
        }
    }
}
