//! The address on which a rank listens for its peers.
//!
//! Ranks of one host listen on loopback. Ranks of several hosts listen on the address of their
//! connection to the store. Rank 0, whose connection may be loopback, listens on the address at
//! which the others reached the store. Ranks with a store in a folder take the address of the
//! default route, or the only address of their host. `PLEACH_INTERFACE` takes precedence.
//!
//! A job that takes processes later may begin on one host, and processes of others come. So its
//! ranks listen for other hosts from the beginning, where these can find the job and prove a
//! secret.
//!
//! **Invariant:** ranks of several hosts do not listen on loopback addresses. No rank listens for
//! other hosts without a secret.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use super::error::JoinError;
use super::record::RankRecord;
use super::{Rendezvous, StorePath, World};
use crate::Rank;
use crate::control;
use crate::tcp::interface_addresses;

/// Addresses reserved for documentation: the route to them is the default route.
const DEFAULT_ROUTE_TARGETS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];

/// Why a rank has no address that other hosts reach.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoAddress {
    /// It is configured to listen on an address of its own host alone.
    Loopback {
        /// `PLEACH_INTERFACE`.
        interface: String,
        /// The address.
        address: IpAddr,
    },
    /// Its host has only loopback.
    None,
    /// Its host has several addresses and no default route.
    Several {
        /// All of them.
        addresses: Vec<IpAddr>,
    },
    /// The configured interface or address does not exist.
    Interface {
        /// The reason.
        reason: String,
    },
}

impl fmt::Display for NoAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback { interface, address } => write!(
                formatter,
                "would listen on {address} (PLEACH_INTERFACE={interface}), which no other host reaches"
            ),
            Self::None => formatter.write_str("has no address but loopback"),
            Self::Several { addresses } => {
                let shown: Vec<_> = addresses.iter().map(ToString::to_string).collect();
                write!(formatter, "has several addresses and no default route ({})", shown.join(", "))
            }
            Self::Interface { reason } => write!(formatter, "cannot listen: {reason}"),
        }
    }
}

/// The address on which the rank of `world` listens for the ranks of these records; `None`:
/// loopback. `others_come`: processes may come later, from other hosts too. That this host has no
/// address for these is no error if `PLEACH_INTERFACE` names none: then processes of this host can
/// join, and no others.
///
/// # Errors
///
/// [`JoinError::NoAddress`] and [`JoinError::SecretRequired`], if there are several hosts;
/// [`JoinError::NoAddress`], if `PLEACH_INTERFACE` names no interface.
pub(super) fn listening_address(
    world: &World,
    records: &[RankRecord],
    others_come: bool,
) -> Result<Option<IpAddr>, JoinError> {
    let several = two_hosts(records);
    let is_found = || world.rendezvous.as_ref().is_some_and(is_found_from_other_hosts);
    if several.is_none() && !(others_come && world.secret.is_some() && is_found()) {
        return Ok(None);
    }
    let host = |rank: Rank| records[rank as usize].host_shown().to_owned();
    let address = match find(world.interface.as_deref(), world.rank, records, &KernelAddresses) {
        Ok(address) => address,
        Err(reason) if several.is_none() && !matches!(reason, NoAddress::Interface { .. }) => {
            tracing::info!("rank {} {reason}: no process of another host can join", world.rank);
            return Ok(None);
        }
        Err(reason) => {
            return Err(JoinError::NoAddress { rank: world.rank, host: host(world.rank), reason });
        }
    };
    match several.filter(|_| world.secret.is_none()) {
        Some((rank, other)) => {
            Err(JoinError::SecretRequired { rank, host: host(rank), other, other_host: host(other) })
        }
        None => Ok(Some(address)),
    }
}

/// Whether processes of other hosts may find a job there. A folder may be one that hosts share.
fn is_found_from_other_hosts(rendezvous: &Rendezvous) -> bool {
    let is_outside = |host: &str| {
        host != "localhost" && host.parse::<IpAddr>().map_or(true, |address| !address.is_loopback())
    };
    match rendezvous {
        Rendezvous::JobFolder { .. } => false,
        Rendezvous::File { .. } => true,
        Rendezvous::Tcp { host, .. } => is_outside(host),
        Rendezvous::C10d { place } => is_outside(&place.host),
        Rendezvous::TcpList { places } | Rendezvous::Etcd { places, .. } => {
            places.iter().any(|place| is_outside(&place.host))
        }
    }
}

/// Two ranks that do not reach each other over loopback, if there are such.
fn two_hosts(records: &[RankRecord]) -> Option<(Rank, Rank)> {
    let first = &records[0];
    let other = records.iter().position(|record| !is_one_network(first, record))?;
    Some((0, other as Rank))
}

/// Whether both are on one host, with one loopback. Machine identities may be copied with the
/// machine; then the addresses of their connections to the store distinguish them.
fn is_one_network(one: &RankRecord, other: &RankRecord) -> bool {
    let is_one_address = match (one.path, other.path) {
        (Some(one), Some(other)) => {
            one.local == other.local || (one.local.is_loopback() && other.local.is_loopback())
        }
        _ => true,
    };
    one.same_machine(other) && one.network == other.network && is_one_address
}

/// The kernel's knowledge of this host's addresses.
trait AddressSource {
    /// All addresses of this host, loopback left out.
    fn own(&self) -> Vec<IpAddr>;
    /// The source address of this host for `target`.
    fn route_source(&self, target: IpAddr) -> Option<IpAddr>;
    /// The address that `PLEACH_INTERFACE` means; the preferred one if the interface has it.
    fn named(&self, interface: &str, preferred: Option<IpAddr>) -> Result<IpAddr, String>;
}

struct KernelAddresses;

impl AddressSource for KernelAddresses {
    fn own(&self) -> Vec<IpAddr> {
        let all = interface_addresses().unwrap_or_default();
        let mut own: Vec<_> =
            all.into_iter().map(|(_, address)| address).filter(|address| !address.is_loopback()).collect();
        own.sort_by_key(IpAddr::is_ipv6);
        own.dedup();
        own
    }

    fn route_source(&self, target: IpAddr) -> Option<IpAddr> {
        let any: IpAddr = match target {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a datagram socket sends nothing: it only looks up the route. Port 9 is the
        // discard port.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((target, 9)).ok()?;
        socket.local_addr().ok().map(|address: SocketAddr| address.ip())
    }

    fn named(&self, interface: &str, preferred: Option<IpAddr>) -> Result<IpAddr, String> {
        control::listening_ip(Some(interface), preferred).map_err(|error| error.to_string())
    }
}

/// The listening address of a rank of several hosts.
fn find(
    interface: Option<&str>,
    rank: Rank,
    records: &[RankRecord],
    kernel: &dyn AddressSource,
) -> Result<IpAddr, NoAddress> {
    let own = &records[rank as usize];
    let local = own.path.map(|path| path.local).filter(is_reachable);
    if let Some(interface) = interface {
        let address = kernel.named(interface, local).map_err(|reason| NoAddress::Interface { reason })?;
        if address.is_loopback() {
            return Err(NoAddress::Loopback { interface: interface.to_owned(), address });
        }
        return Ok(address);
    }
    if let Some(local) = local {
        return Ok(local);
    }
    let addresses = kernel.own();
    let outside = records.iter().filter(|record| !is_one_network(own, record));
    let mut found_at = outside.filter_map(|record| record.path).map(|path: StorePath| path.remote);
    if let Some(address) = found_at.find(|address| addresses.contains(address)) {
        return Ok(address);
    }
    if let Some(address) =
        DEFAULT_ROUTE_TARGETS.iter().find_map(|&target| kernel.route_source(target).filter(is_reachable))
    {
        return Ok(address);
    }
    match &addresses[..] {
        [] => Err(NoAddress::None),
        [one] => Ok(*one),
        _ => Err(NoAddress::Several { addresses }),
    }
}

/// Whether ranks of other hosts may reach it; a link-local address needs its interface.
fn is_reachable(address: &IpAddr) -> bool {
    let is_link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    !address.is_loopback() && !address.is_unspecified() && !is_link_local
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with these addresses; the first is that of its default route, if it has one.
    struct Host {
        own: &'static [&'static str],
        has_default: bool,
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    impl AddressSource for Host {
        fn own(&self) -> Vec<IpAddr> {
            self.own.iter().map(|text| ip(text)).collect()
        }
        fn route_source(&self, target: IpAddr) -> Option<IpAddr> {
            let first = self.own().into_iter().find(|own| own.is_ipv4() == target.is_ipv4());
            first.filter(|_| self.has_default)
        }
        fn named(&self, interface: &str, _preferred: Option<IpAddr>) -> Result<IpAddr, String> {
            interface.parse().map_err(|_| "no such interface".to_owned())
        }
    }

    /// The record of a rank on a host, with the ends of its connection to the store.
    fn record(host: &str, path: Option<[&str; 2]>) -> RankRecord {
        let path = path.map(|[local, remote]| StorePath { local: ip(local), remote: ip(remote) });
        let mut record = RankRecord::own(2, None, None, path, &[]);
        record.network = host.to_owned();
        record
    }

    const TWO: Host = Host { own: &["10.1.0.1", "10.2.0.1"], has_default: false };

    #[test]
    fn ranks_of_one_host_listen_on_loopback_whatever_the_rendezvous_address() {
        for path in [None, Some(["127.0.0.1", "127.0.0.1"]), Some(["10.1.0.1", "10.1.0.1"])] {
            let records = [record("a", path), record("a", path)];
            assert_eq!(two_hosts(&records), None);
            assert!(matches!(listening_address(&World::alone(), &records, false), Ok(None)));
        }
        // 127.0.1.1 is reached from 127.0.0.1, and a name may be both.
        let mixed =
            [record("a", Some(["127.0.0.1", "127.0.1.1"])), record("a", Some(["127.0.0.1", "127.0.0.1"]))];
        assert_eq!(two_hosts(&mixed), None);
    }

    #[test]
    fn a_job_that_begins_on_one_host_listens_for_others_that_can_find_it_and_prove_a_secret() {
        let records = [record("a", Some(["10.1.0.1", "10.1.0.1"]))];
        let tcp = |host: &str| Some(Rendezvous::Tcp { host: host.to_owned(), port: 1 });
        let secret = Some(crate::auth::Secret::new(&[1; 32]));
        let world = World { rendezvous: tcp("10.1.0.1"), secret, ..World::alone() };
        let listens = |world: &World| listening_address(world, &records, true);
        assert!(matches!(listens(&world), Ok(Some(address)) if address == ip("10.1.0.1")));
        for host in ["127.0.0.1", "localhost", "::1"] {
            let here = World { rendezvous: tcp(host), ..world.clone() };
            assert!(matches!(listens(&here), Ok(None)), "{host}");
        }
        assert!(matches!(listens(&World { secret: None, ..world.clone() }), Ok(None)));
        let here = World { interface: Some("127.0.0.1".to_owned()), ..world.clone() };
        assert!(matches!(listens(&here), Ok(None)), "as it was told");
        let wrong = World { interface: Some("no-such-interface".to_owned()), ..world };
        let error = listens(&wrong).expect_err("there is no such interface").to_string();
        assert!(error.contains("PLEACH_INTERFACE"), "{error}");
    }

    #[test]
    fn machines_that_are_copies_are_told_apart_by_their_addresses() {
        let records =
            [record("a", Some(["10.1.0.1", "10.1.0.1"])), record("a", Some(["10.1.0.2", "10.1.0.1"]))];
        assert_eq!(two_hosts(&records), Some((0, 1)));
    }

    #[test]
    fn each_rank_listens_where_the_store_is_reached_from() {
        let records =
            [record("a", Some(["10.1.0.1", "10.1.0.1"])), record("b", Some(["10.1.0.2", "10.1.0.1"]))];
        assert_eq!(find(None, 0, &records, &TWO), Ok(ip("10.1.0.1")));
        assert_eq!(find(None, 1, &records, &TWO), Ok(ip("10.1.0.2")));
        let records = [record("a", Some(["fd00::1", "fd00::1"])), record("b", Some(["fd00::2", "fd00::1"]))];
        assert_eq!(find(None, 1, &records, &TWO), Ok(ip("fd00::2")));
    }

    #[test]
    fn rank_0_listens_where_the_others_found_the_store_if_its_own_way_there_is_loopback() {
        let records = [
            record("a", Some(["127.0.0.1", "127.0.1.1"])),
            record("a", Some(["127.0.0.1", "127.0.1.1"])),
            record("b", Some(["10.2.0.2", "10.2.0.1"])),
        ];
        assert_eq!(find(None, 0, &records, &TWO), Ok(ip("10.2.0.1")));
        assert_eq!(find(None, 1, &records, &TWO), Ok(ip("10.2.0.1")), "and its neighbour");
        // Translated on the way: the others know an address that this host does not have.
        let records =
            [record("a", Some(["127.0.0.1", "127.0.1.1"])), record("b", Some(["10.9.0.2", "203.0.113.5"]))];
        let host = Host { has_default: true, ..TWO };
        assert_eq!(find(None, 0, &records, &host), Ok(ip("10.1.0.1")));
    }

    #[test]
    fn ranks_that_meet_in_a_folder_take_the_default_route_or_the_only_address() {
        let records = [record("a", None), record("b", None)];
        assert_eq!(find(None, 0, &records, &Host { has_default: true, ..TWO }), Ok(ip("10.1.0.1")));
        let only = Host { own: &["fd00::7"], has_default: false };
        assert_eq!(find(None, 0, &records, &only), Ok(ip("fd00::7")));
        let reason = find(None, 0, &records, &TWO).expect_err("which?");
        assert_eq!(reason.to_string(), "has several addresses and no default route (10.1.0.1, 10.2.0.1)");
        assert_eq!(find(Some("10.2.0.1"), 0, &records, &TWO), Ok(ip("10.2.0.1")), "as it was told");
        let none = Host { own: &[], has_default: false };
        assert_eq!(find(None, 0, &records, &none), Err(NoAddress::None));
    }

    #[test]
    fn loopback_that_was_asked_for_is_an_error_between_hosts_that_names_the_variable_and_the_rank() {
        let records = [record("a", None), record("b", None)];
        let world =
            World { rank: 1, world_size: 2, interface: Some("127.0.0.1".to_owned()), ..World::alone() };
        let error = listening_address(&world, &records, false).expect_err("nobody reaches it").to_string();
        assert!(
            error.contains("rank 1 on ") && error.contains("127.0.0.1 (PLEACH_INTERFACE=127.0.0.1)"),
            "{error}"
        );
        assert!(error.contains("set PLEACH_INTERFACE there"), "{error}");
    }

    #[test]
    fn several_hosts_need_a_secret() {
        let records = [record("a", None), record("a", None), record("b", None)];
        let world = World { world_size: 3, interface: Some("10.1.0.1".to_owned()), ..World::alone() };
        let error = listening_address(&world, &records, false).expect_err("no secret").to_string();
        assert!(error.contains("rank 0 on ") && error.contains("rank 2 on "), "{error}");
        assert!(error.contains("PLEACH_SECRET_FILE"), "{error}");
        let world = World { secret: Some(crate::auth::Secret::new(&[1; 32])), ..world };
        assert!(matches!(listening_address(&world, &records, false), Ok(Some(_))));
    }
}
