//! Why a rank did not reach its peers, in words for people: who, where, for how long.

use std::time::Duration;

use crate::Rank;
use crate::device::{ConnectError, LossCause, LossKind};
use crate::rendezvous::error::ranks_shown;

/// Of the peers that were not reached, so many are named with their addresses.
const ADDRESSES_SHOWN: usize = 4;

/// Why a rank did not reach its peers.
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
}

/// Of the addresses that a device has, separated by blanks, the one for other hosts, which is the
/// last.
fn across(address: &str) -> String {
    address.rsplit(' ').next().unwrap_or(address).to_owned()
}

/// What goes after an address that was not reached.
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
    /// `address`: what the peer told as its address.
    pub(super) fn lost(peer: Rank, address: &str, cause: LossCause) -> Self {
        Self::Lost { peer, address: across(address), cause }
    }

    /// `told`: what a rank told as its address.
    pub(super) fn late<'a>(
        ranks: Vec<Rank>,
        own: Rank,
        waited: Duration,
        told: impl Fn(Rank) -> &'a str,
    ) -> Self {
        let shown = ranks.iter().copied().take(ADDRESSES_SHOWN).chain([own]);
        let addresses = shown.map(|rank| (rank, across(told(rank)))).collect();
        Self::Late { ranks, addresses, waited }
    }

    /// Whether it says only that a peer is not there; why that is, the peer may know.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::Connect(_) => false,
            Self::Late { .. } => true,
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
