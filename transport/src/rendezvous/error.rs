//! Why a rank did not join.

use std::time::Duration;

use super::device_factory::Fabric;
use super::listening::NoAddress;
use super::record::Difference;
use super::{OpenStoreError, StoreError};
use crate::Rank;

/// Why a rank did not join.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The store could not be opened.
    #[error(transparent)]
    Open(#[from] OpenStoreError),
    /// The store stopped working.
    #[error(transparent)]
    Store(StoreError),
    /// Several ranks and no rendezvous address.
    #[error(
        "no rendezvous: {world_size} ranks have no address to meet; set PLEACH_RENDEZVOUS=tcp://HOST:PORT for all of them"
    )]
    NoRendezvous {
        /// The number of ranks.
        world_size: u32,
    },
    /// Not all ranks came in time.
    #[error(
        "missing ranks: {} of {world_size} did not come within {} ms{}{}; start all ranks, or look why these ended",
        ranks_shown(.ranks), .waited.as_millis(), enough_shown(*.fewest, *.world_size),
        refused_shown(.refused.as_deref())
    )]
    Missing {
        /// The missing ranks.
        ranks: Vec<Rank>,
        /// The number of ranks.
        world_size: u32,
        /// So many of them are enough to begin.
        fewest: u32,
        /// How long this rank waited.
        waited: Duration,
        /// A rank that was refused meanwhile, and why.
        refused: Option<String>,
    },
    /// Another process has this rank.
    #[error("rank taken: {own} and {other} both claim to be rank {rank}; give each process its own rank")]
    Duplicate {
        /// The rank.
        rank: Rank,
        /// This process.
        own: String,
        /// The process that came first.
        other: String,
    },
    /// Two ranks differ in a setting that must be equal.
    #[error(transparent)]
    Differs(#[from] Difference),
    /// A rank's record cannot be decoded.
    #[error("rank {rank} says what this version cannot read; install one version on all hosts")]
    Unreadable {
        /// The rank.
        rank: Rank,
    },
    /// Another rank ended the rendezvous.
    #[error("{reason}")]
    Ended {
        /// The reason.
        reason: String,
    },
    /// Shared memory was requested, but ranks are on different hosts.
    #[error(
        "no shared memory: {first} and {second} are not on one host ({reason}); use --fabric tcp or auto"
    )]
    DifferentHosts {
        /// A rank and its host.
        first: String,
        /// Another rank and its host.
        second: String,
        /// How this was detected.
        reason: &'static str,
    },
    /// Ranks of several users, and no configured secret.
    #[error(
        "several users: {first} and {second} are of different users; start all ranks as one user, or give all the same PLEACH_SECRET_FILE"
    )]
    OtherUser {
        /// A rank and its host.
        first: String,
        /// Another rank and its host.
        second: String,
    },
    /// Ranks are on several hosts, and no configured secret.
    #[error(
        "secret required: rank {rank} on {host} and rank {other} on {other_host} are on two hosts; write a secret with 'pleach secret FILE', give it to all hosts, and set PLEACH_SECRET_FILE=FILE"
    )]
    SecretRequired {
        /// A rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// A rank of another host, or network namespace.
        other: Rank,
        /// Its host.
        other_host: String,
    },
    /// Ranks are on several hosts, and this rank has no address that the others reach.
    #[error(
        "no address: rank {rank} on {host} {reason}, and other ranks are on other hosts; set PLEACH_INTERFACE there to a network interface or address that they reach ('ip addr' lists them)"
    )]
    NoAddress {
        /// The rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// The reason.
        reason: NoAddress,
    },
    /// The job runs, and this process was given no seat.
    #[error("no seat: the job runs, and {reason}; try again later, or start the process elsewhere")]
    Closed {
        /// The reason.
        reason: String,
        /// Whether the server that is opened next may have one.
        is_over: bool,
    },
    /// The fabric could not be set up.
    #[error("fabric {fabric} not usable: rank {rank}: {reason}; choose another fabric or repair this one")]
    Fabric {
        /// The fabric.
        fabric: Fabric,
        /// The first rank where it failed.
        rank: Rank,
        /// The reason.
        reason: String,
    },
}

pub(super) fn ranks_shown(ranks: &[Rank]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    format!("{word} {}", shown.join(", "))
}

fn enough_shown(fewest: u32, world_size: u32) -> String {
    if fewest < world_size { format!(", and {fewest} are enough to begin") } else { String::new() }
}

fn refused_shown(refused: Option<&str>) -> String {
    refused.map(|text| format!(" (turned away: {text})")).unwrap_or_default()
}
