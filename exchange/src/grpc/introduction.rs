//! How the two programs of a channel find each other's endpoints: a method of gRPC beside those of
//! the services.
//!
//! The client calls [`PATH`] twice. First it says where its endpoint is; the server connects to
//! it, and answers with the link on which the client may lend and with the server's own endpoint.
//! The client connects to that, and says on which link the server may lend. Each waits until it
//! may.
//!
//! Each program proves the secret on the links, as every endpoint does. What this method says is
//! not secret: the names of links, which only keep programs apart.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pleach_transport::clock;

use crate::endpoint::{Endpoint, LinkError, Peer};
use crate::reference::LinkId;

/// The path of the method.
pub const PATH: &str = "/pleach.Exchange/Introduce";

/// The header of a request: the link on which the server may lend, and the number of the RPC.
pub(crate) const RPC_HEADER: &str = "pleach-rpc";

/// How long an introduction may take at each end.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);

/// Between two looks whether a link has regions.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest text of another program that is shown, in bytes. A longer one is cut.
const TEXT_BYTES_MAX: usize = 1024;

/// The version of this protocol.
const VERSION: u32 = 1;

/// What each program says.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Introduction {
    /// Of this protocol.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Where its endpoint listens.
    #[prost(string, tag = "2")]
    pub address: String,
    /// Its incarnation.
    #[prost(fixed64, tag = "3")]
    pub incarnation: u64,
    /// The link on which the other program may lend to it; 0 where there is none.
    #[prost(fixed64, tag = "4")]
    pub link: u64,
    /// Why there is none, for people.
    #[prost(string, tag = "5")]
    pub reason: String,
}

impl Introduction {
    /// Of the program of this endpoint, without a link.
    pub(crate) fn of(endpoint: &Endpoint) -> Self {
        let (address, incarnation) = (endpoint.address().to_string(), endpoint.incarnation());
        Self { version: VERSION, address, incarnation, link: 0, reason: String::new() }
    }
}

/// A text of another program as errors and the log show it: one line of at most
/// [`TEXT_BYTES_MAX`] bytes.
pub(crate) fn one_line(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].replace(char::is_control, " ")
}

/// Connects to the endpoint of another program and waits for regions, so that the other program may
/// lend. `host`: its address as far as the channel knows it. Blocks.
pub(crate) fn link_to(
    endpoint: &Endpoint,
    theirs: &Introduction,
    host: Option<IpAddr>,
) -> Result<(Peer, LinkId), String> {
    if theirs.version != VERSION {
        return Err(format!("it speaks version {} of the introduction, and not {VERSION}", theirs.version));
    }
    link_to_endpoint(endpoint, &theirs.address, theirs.incarnation, host)
}

/// As [`link_to`], to the endpoint of this incarnation, which says to listen at this address.
pub(crate) fn link_to_endpoint(
    endpoint: &Endpoint,
    said: &str,
    incarnation: u64,
    host: Option<IpAddr>,
) -> Result<(Peer, LinkId), String> {
    let address = reachable(said, host)?;
    let told = |error: LinkError| error.to_string();
    let peer = endpoint.connect(&address.to_string()).map_err(told)?.within(LIMIT);
    peer.share_regions().map_err(told)?;
    if peer.incarnation() != Some(incarnation) {
        return Err(format!("another program listens at {address}"));
    }
    let link = peer.link_with_regions().ok_or("its connection closed")?;
    Ok((peer, link))
}

/// Where an endpoint is reached that says to listen here. A program of another host may name no
/// third one: nobody is made to connect anywhere.
fn reachable(text: &str, host: Option<IpAddr>) -> Result<SocketAddr, String> {
    let said: SocketAddr = text.parse().map_err(|_| format!("its endpoint has no address: {text:?}"))?;
    let said_ip = said.ip().to_canonical();
    let ip = match host.map(|host| host.to_canonical()) {
        Some(host) if said_ip.is_unspecified() || said_ip == host => host,
        Some(host) if host.is_loopback() && said_ip.is_loopback() => said_ip,
        // A channel of this host, and an endpoint on one of its interfaces; or one without sockets.
        None if said_ip.is_loopback() => said_ip,
        None if said_ip.is_unspecified() => IpAddr::from([127, 0, 0, 1]),
        _ if said_ip.is_loopback() => {
            return Err("its endpoint listens on loopback alone; set PLEACH_INTERFACE there".to_owned());
        }
        _ => return Err(format!("its endpoint is at {said}, and the channel goes elsewhere")),
    };
    Ok(SocketAddr::new(ip, said.port()))
}

/// Waits until the other program of a link can read this one's memory. False: it cannot yet.
pub(crate) async fn may_lend(endpoint: &Endpoint, link: LinkId) -> bool {
    let until = clock::now() + LIMIT;
    while !endpoint.may_lend(link) {
        if clock::now() >= until {
            return false;
        }
        tokio::time::sleep(PAUSE).await;
    }
    true
}

/// The value of [`RPC_HEADER`].
pub(crate) fn rpc_header(link: LinkId, rpc: u64) -> String {
    format!("{link}-{rpc:x}")
}

/// Reads the value of [`RPC_HEADER`].
pub(crate) fn read_rpc_header(text: &str) -> Option<(LinkId, u64)> {
    let (link, rpc) = text.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some((LinkId(number(link)?), number(rpc)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_reached_at_the_host_of_its_channel_alone() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        for (said, host, reached) in [
            ("0.0.0.0:7", Some("10.0.0.1"), Ok("10.0.0.1:7")),
            ("10.0.0.1:7", Some("10.0.0.1"), Ok("10.0.0.1:7")),
            ("127.0.0.1:7", Some("127.0.0.1"), Ok("127.0.0.1:7")),
            ("127.0.0.1:7", Some("::1"), Ok("127.0.0.1:7")),
            ("127.0.0.1:7", Some("::ffff:127.0.0.1"), Ok("127.0.0.1:7")),
            ("127.0.0.1:7", None, Ok("127.0.0.1:7")),
            ("[::]:7", None, Ok("127.0.0.1:7")),
            ("127.0.0.1:7", Some("10.0.0.1"), Err("PLEACH_INTERFACE")),
            ("10.0.0.2:7", Some("10.0.0.1"), Err("goes elsewhere")),
            ("10.0.0.2:7", None, Err("goes elsewhere")),
            ("somewhere", None, Err("no address")),
        ] {
            let found = reachable(said, host.map(ip));
            match reached {
                Ok(address) => assert_eq!(found, Ok(address.parse().expect("an address")), "{said} {host:?}"),
                Err(part) => assert!(found.expect_err(said).contains(part), "{said} {host:?}"),
            }
        }
    }

    #[test]
    fn a_text_of_another_program_is_one_line_and_is_cut_between_two_characters() {
        let text = format!("a\nb{}ü{}", "c".repeat(1020), "d".repeat(4000));
        assert_eq!(
            (text.is_char_boundary(1024), one_line(&text)),
            (false, format!("a b{}", "c".repeat(1020)))
        );
        assert_eq!(one_line("short"), "short");
    }

    #[test]
    fn the_header_of_an_rpc_survives_and_another_one_is_none() {
        let header = rpc_header(LinkId(0xab), 17);
        assert_eq!(
            (header.as_str(), read_rpc_header(&header)),
            ("00000000000000ab-11", Some((LinkId(0xab), 17)))
        );
        for wrong in ["", "1", "x-1", "1-", "-1", "00000000000000001-1x"] {
            assert_eq!(read_rpc_header(wrong), None, "{wrong}");
        }
    }
}
