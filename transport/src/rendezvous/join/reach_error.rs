//! Why a rank did not connect to its peers: ranks, addresses and times.

use std::time::Duration;

use crate::Rank;
use crate::device::{ConnectError, LossCause, LossKind};
use crate::rendezvous::error::ranks_shown;

/// The number of peers whose addresses the message names.
const ADDRESSES_SHOWN: usize = 4;

/// Why a rank did not connect to its peers.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReachError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("rank {peer} was not reached at {address}{}", cause_shown(.cause))]
    Lost { peer: Rank, address: String, cause: LossCause },
    #[error(
        "{} not connected within {} ms ({}): a firewall? 'pleach doctor --peer' looks",
        ranks_shown(.ranks), .waited.as_millis(), addresses_shown(.addresses)
    )]
    Late { ranks: Vec<Rank>, addresses: Vec<(Rank, String)>, waited: Duration },
    #[error("{0}")]
    Ended(String),
}

/// The address for other hosts, which is the last of a device's addresses.
fn across(address: &str) -> String {
    address.rsplit(' ').next().unwrap_or(address).to_owned()
}

/// The text after an address that was not reached.
fn cause_shown(cause: &LossCause) -> String {
    match cause {
        LossCause::NotReached(waited) => format!(" within {} ms", waited.as_millis()),
        cause => format!(": {cause}"),
    }
}

fn addresses_shown(addresses: &[(Rank, String)]) -> String {
    let shown: Vec<_> = addresses.iter().map(|(rank, address)| format!("rank {rank}: {address}")).collect();
    shown.join(", ")
}

impl ReachError {
    /// `address` is the peer's line.
    pub(super) fn lost(peer: Rank, address: &str, cause: LossCause) -> Self {
        Self::Lost { peer, address: across(address), cause }
    }

    /// `address_of` returns a rank's address.
    pub(super) fn late<'a>(
        ranks: Vec<Rank>,
        own: Rank,
        waited: Duration,
        address_of: impl Fn(Rank) -> &'a str,
    ) -> Self {
        let shown = ranks.iter().copied().take(ADDRESSES_SHOWN).chain([own]);
        let addresses = shown.map(|rank| (rank, across(address_of(rank)))).collect();
        Self::Late { ranks, addresses, waited }
    }

    /// Whether it only says that a peer is missing; that peer may know the cause.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::Connect(_) => false,
            Self::Late { .. } | Self::Ended(_) => true,
            Self::Lost { cause, .. } => matches!(
                cause,
                LossCause::ProcessEnded
                    | LossCause::ConnectionClosed
                    | LossCause::ConnectionBroke(_)
                    | LossCause::HostSilent(_)
                    | LossCause::NotReached(_)
                    | LossCause::Fabric { kind: LossKind::Refused, .. }
            ),
        }
    }
}
