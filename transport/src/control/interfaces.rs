//! The addresses of this machine's network interfaces, and the choice of one to listen on.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::OpenError;

/// The address to listen on: the preferred one if the named interface has it.
pub(crate) fn listening_ip(interface: Option<&str>, preferred: Option<IpAddr>) -> Result<IpAddr, OpenError> {
    let Some(text) = interface else { return Ok(preferred.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))) };
    let ip = match text.trim_start_matches('[').trim_end_matches(']').parse() {
        Ok(ip) => ip,
        Err(_) => interface_ip(text, preferred)?,
    };
    if ip.is_unspecified() {
        return Err(OpenError::Unspecified { interface: text.to_owned() });
    }
    Ok(ip)
}

/// The address of a network interface, or the address itself.
///
/// # Errors
///
/// See [`OpenError`].
pub fn listening_address(interface: &str) -> Result<IpAddr, OpenError> {
    listening_ip(Some(interface), None)
}

/// The address of a network interface to listen on: the preferred address if the interface has it,
/// else its first address of the same family, else its first address. Without a preferred address
/// IPv4 comes first. The kernel lists the addresses (rtnetlink).
fn interface_ip(name: &str, preferred: Option<IpAddr>) -> Result<IpAddr, OpenError> {
    let unknown = || OpenError::NoSuchInterface { interface: name.to_owned() };
    let system = |source: io::Error| OpenError::Interface { interface: name.to_owned(), source };
    let index = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).map_err(|_| unknown())?;
    let index: u32 = index.trim().parse().map_err(|_| unknown())?;
    let addresses = interface_addresses().map_err(system)?;
    let mut found: Vec<IpAddr> =
        addresses.into_iter().filter(|(owner, _)| *owner == index).map(|(_, ip)| ip).collect();
    let prefers_ipv6 = preferred.is_some_and(|ip| ip.is_ipv6());
    found.sort_by_key(|ip| (Some(*ip) != preferred, ip.is_ipv6() != prefers_ipv6));
    found.first().copied().ok_or_else(|| OpenError::NoAddress { interface: name.to_owned() })
}

const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLMSG_HEADER_BYTES: usize = 16;
const IFADDRMSG_BYTES: usize = 8;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Link-local addresses are left out: they need a scope, which an address text does not carry well.
const SCOPE_LINK: u8 = 253;
/// The kernel's dump messages are at most this long.
const DUMP_BYTES_MAX: usize = 32 << 10;

/// The addresses of this machine's network interfaces, each with the number of its interface
/// (`ifindex`), but for link-local ones. Never blocks.
///
/// # Errors
///
/// The kernel's error.
pub fn interface_addresses() -> io::Result<Vec<(u32, IpAddr)>> {
    // Protocol 0 of netlink is the routing table's.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let mut request = Vec::new();
    request.extend(((NLMSG_HEADER_BYTES + IFADDRMSG_BYTES) as u32).to_ne_bytes());
    request.extend(RTM_GETADDR.to_ne_bytes());
    request.extend(NLM_F_REQUEST_DUMP.to_ne_bytes());
    request.extend([0; 8 + IFADDRMSG_BYTES]);
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut found = Vec::new();
    let mut buffer = vec![0; DUMP_BYTES_MAX];
    loop {
        let (count, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..count];
        if rest.is_empty() {
            return Ok(found);
        }
        while rest.len() >= NLMSG_HEADER_BYTES {
            let len = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            let kind = u16::from_ne_bytes([rest[4], rest[5]]);
            if kind != RTM_NEWADDR || len < NLMSG_HEADER_BYTES + IFADDRMSG_BYTES || len > rest.len() {
                // The end of the dump, or an error: return what was found.
                return Ok(found);
            }
            found.extend(parse_address(&rest[NLMSG_HEADER_BYTES..len]));
            rest = &rest[len.next_multiple_of(4).min(rest.len())..];
        }
    }
}

fn parse_address(message: &[u8]) -> Option<(u32, IpAddr)> {
    if message.get(3) == Some(&SCOPE_LINK) {
        return None;
    }
    let index = u32::from_ne_bytes(message.get(4..8)?.try_into().ok()?);
    let mut attributes = message.get(IFADDRMSG_BYTES..)?;
    let mut address = None;
    while attributes.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([attributes[0], attributes[1]]));
        let kind = u16::from_ne_bytes([attributes[2], attributes[3]]);
        let value = attributes.get(4..len)?;
        let ip = match value.len() {
            4 => <[u8; 4]>::try_from(value).ok().map(|bytes| IpAddr::V4(Ipv4Addr::from(bytes))),
            16 => <[u8; 16]>::try_from(value).ok().map(|bytes| IpAddr::V6(Ipv6Addr::from(bytes))),
            _ => None,
        };
        // On a point-to-point link IFA_ADDRESS is the address of the other end.
        if kind == IFA_LOCAL || (kind == IFA_ADDRESS && address.is_none()) {
            address = ip.or(address);
        }
        attributes = &attributes[len.next_multiple_of(4).min(attributes.len())..];
    }
    Some((index, address?))
}
