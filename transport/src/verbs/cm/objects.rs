//! The objects of librdmacm, each owned by a value: the event channel, and connection ids
//! ([`ConnectionId`]).
//!
//! **Invariant:** an id holds its channel, so it is destroyed before the channel. Destroying an id
//! waits until all its events are acknowledged, so [`EventChannel::next`] copies and acknowledges
//! an event at once.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::library::Library;
use super::sys;
use crate::verbs::objects::checked;
use crate::verbs::sys::{ibv_qp_attr, ibv_qp_state};

/// The kind of an event of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmEventKind {
    AddressResolved,
    RouteResolved,
    /// A connect request; the event's id is new.
    ConnectRequest,
    ConnectResponse,
    Established,
    AddressError,
    RouteError,
    Unreachable,
    Rejected,
    ConnectError,
    /// A disconnect, or an event that this backend detects otherwise.
    Other,
}

/// A copy of one event.
pub(super) struct CmEvent {
    pub(super) kind: CmEventKind,
    /// The id of the event, see [`ConnectionId::address`].
    pub(super) id: usize,
    /// The new id of a connect request; this process owns it.
    pub(super) new_id: Option<ConnectionId>,
    /// A negative error number, or the reason of a reject.
    pub(super) status: i32,
    /// The peer's private data.
    pub(super) private_data: Vec<u8>,
    /// The peer's queue pair.
    pub(super) queue_pair: u32,
}

/// The channel of events.
pub(super) struct EventChannel {
    raw: NonNull<sys::rdma_event_channel>,
    library: &'static Library,
}

// SAFETY: librdmacm is thread-safe.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    pub(super) fn new(library: &'static Library) -> io::Result<Arc<Self>> {
        // SAFETY: no arguments; null means that errno has the error.
        let raw = NonNull::new(unsafe { (library.create_event_channel)() });
        let channel = Arc::new(Self { raw: raw.ok_or_else(io::Error::last_os_error)?, library });
        rustix::io::ioctl_fionbio(channel.file(), true)?;
        Ok(channel)
    }

    /// Readable when an event has come.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel, whose file is open as long as the channel, which the borrow does
        // not outlive.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// The next event, if there is one; never waits.
    pub(super) fn next(self: &Arc<Self>) -> Option<CmEvent> {
        let mut event = ptr::null_mut();
        // SAFETY: a live channel that does not block; it writes one pointer.
        if unsafe { (self.library.get_cm_event)(self.raw.as_ptr(), &raw mut event) } != 0 {
            return None;
        }
        // SAFETY: an event that was not acknowledged; for events of a connection `conn` is valid,
        // with its pointer and length.
        let copy = unsafe {
            let event = &*event;
            let kind = event_kind(event.event);
            let has_private_data = matches!(
                kind,
                CmEventKind::ConnectRequest
                    | CmEventKind::ConnectResponse
                    | CmEventKind::Rejected
                    | CmEventKind::Established
            );
            let (mut private_data, mut queue_pair) = (Vec::new(), 0);
            if has_private_data {
                let conn = &event.param.conn;
                queue_pair = conn.qp_num;
                if !conn.private_data.is_null() {
                    let (bytes, length) =
                        (conn.private_data.cast::<u8>(), usize::from(conn.private_data_len));
                    private_data.extend_from_slice(std::slice::from_raw_parts(bytes, length));
                }
            }
            let raw_id = if kind == CmEventKind::ConnectRequest { NonNull::new(event.id) } else { None };
            let new_id = raw_id.map(|raw| ConnectionId { raw, channel: Arc::clone(self) });
            CmEvent { kind, id: event.id as usize, new_id, status: event.status, private_data, queue_pair }
        };
        // SAFETY: the event of above, which is not used afterwards.
        unsafe { (self.library.ack_cm_event)(event) };
        Some(copy)
    }
}

fn event_kind(event: sys::rdma_cm_event_type) -> CmEventKind {
    match event {
        sys::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
        sys::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
        sys::RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::ConnectRequest,
        sys::RDMA_CM_EVENT_CONNECT_RESPONSE => CmEventKind::ConnectResponse,
        sys::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
        sys::RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddressError,
        sys::RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError,
        sys::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable,
        sys::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
        sys::RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError,
        _ => CmEventKind::Other,
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: ids hold their channel, so no id exists.
        unsafe { (self.library.destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// The parameters of a connect or an accept.
pub(super) struct ConnectParameters<'a> {
    pub(super) private_data: &'a [u8],
    pub(super) queue_pair: u32,
    /// Reads and atomics at once, in each direction.
    pub(super) reads: u8,
    pub(super) retries: u8,
}

impl ConnectParameters<'_> {
    fn raw(&self) -> sys::rdma_conn_param {
        sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len() as u8,
            responder_resources: self.reads,
            initiator_depth: self.reads,
            flow_control: 1,
            retry_count: self.retries,
            rnr_retry_count: self.retries,
            // All queue pairs of this backend use a shared receive queue.
            srq: 1,
            qp_num: self.queue_pair,
        }
    }
}

/// A connection id: a connection, or a listener.
pub(super) struct ConnectionId {
    raw: NonNull<sys::rdma_cm_id>,
    channel: Arc<EventChannel>,
}

// SAFETY: as for `EventChannel`.
unsafe impl Send for ConnectionId {}

impl ConnectionId {
    fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a live channel; it writes one pointer.
        checked(unsafe {
            let create = channel.library.create_id;
            create(channel.raw.as_ptr(), &raw mut raw, ptr::null_mut(), sys::RDMA_PS_TCP)
        })?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Self { raw, channel: Arc::clone(channel) })
    }

    /// Listens at an address of a port, with a backlog of `backlog` requests; returns the port
    /// number, which the system chooses.
    pub(super) fn listen(
        channel: &Arc<EventChannel>,
        address: SocketAddr,
        backlog: c_int,
    ) -> io::Result<(Self, u16)> {
        let id = Self::new(channel)?;
        let (mut raw_address, library) = (RawSocketAddress::of(address), channel.library);
        // SAFETY: a live id, and an address that stays for the call.
        checked(unsafe { (library.bind_addr)(id.raw.as_ptr(), raw_address.as_mut_ptr()) })?;
        // SAFETY: as above.
        checked(unsafe { (library.listen)(id.raw.as_ptr(), backlog) })?;
        // SAFETY: as above.
        let port = u16::from_be(unsafe { (library.get_src_port)(id.raw.as_ptr()) });
        Ok((id, port))
    }

    /// Starts to resolve a peer's address, from an address of a port.
    pub(super) fn resolve(
        channel: &Arc<EventChannel>,
        from: SocketAddr,
        to: SocketAddr,
        limit_ms: c_int,
    ) -> io::Result<Self> {
        let id = Self::new(channel)?;
        let (mut from, mut to) = (RawSocketAddress::of(from), RawSocketAddress::of(to));
        // SAFETY: a live id, and addresses that stay for the call.
        checked(unsafe {
            let resolve = channel.library.resolve_addr;
            resolve(id.raw.as_ptr(), from.as_mut_ptr(), to.as_mut_ptr(), limit_ms)
        })?;
        Ok(id)
    }

    /// The number by which events name the id.
    pub(super) fn address(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    fn library(&self) -> &'static Library {
        self.channel.library
    }

    /// Starts to resolve the route.
    pub(super) fn resolve_route(&self, limit_ms: c_int) -> io::Result<()> {
        // SAFETY: a live id.
        checked(unsafe { (self.library().resolve_route)(self.raw.as_ptr(), limit_ms) })
    }

    /// Sends a connect request to the peer.
    pub(super) fn connect(&self, parameters: &ConnectParameters<'_>) -> io::Result<()> {
        let mut parameters = parameters.raw();
        // SAFETY: a live id, and parameters that stay for the call.
        checked(unsafe { (self.library().connect)(self.raw.as_ptr(), &raw mut parameters) })
    }

    /// Accepts the peer's connect request.
    pub(super) fn accept(&self, parameters: &ConnectParameters<'_>) -> io::Result<()> {
        let mut parameters = parameters.raw();
        // SAFETY: as above.
        checked(unsafe { (self.library().accept)(self.raw.as_ptr(), &raw mut parameters) })
    }

    /// Rejects the peer's connect request.
    pub(super) fn reject(self) {
        // SAFETY: a live id; no private data. After a failure the request expires.
        unsafe { (self.library().reject)(self.raw.as_ptr(), ptr::null(), 0) };
    }

    /// Completes the connection after the peer's response.
    pub(super) fn establish(&self) -> io::Result<()> {
        // SAFETY: a live id.
        checked(unsafe { (self.library().establish)(self.raw.as_ptr()) })
    }

    /// The attributes that bring the queue pair into a state, and their mask.
    pub(super) fn attributes(&self, state: ibv_qp_state) -> io::Result<(ibv_qp_attr, u32)> {
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask: c_int = 0;
        attributes.qp_state = state;
        // SAFETY: a live id; it writes into both.
        checked(unsafe {
            (self.library().init_qp_attr)(self.raw.as_ptr(), &raw mut attributes, &raw mut mask)
        })?;
        Ok((attributes, mask as u32))
    }
}

impl Drop for ConnectionId {
    fn drop(&mut self) {
        // SAFETY: a live id, whose events were all acknowledged. Its queue pair is not the
        // library's.
        unsafe { (self.channel.library.destroy_id)(self.raw.as_ptr()) };
    }
}

/// An address as the library takes it.
struct RawSocketAddress(libc::sockaddr_storage);

impl RawSocketAddress {
    fn of(address: SocketAddr) -> Self {
        // SAFETY: plain numbers, of which zero is one.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let place = &raw mut storage;
        match address {
            SocketAddr::V4(address) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: the storage has room for any address, and is aligned for it.
                unsafe { place.cast::<libc::sockaddr_in>().write(raw) };
            }
            SocketAddr::V6(address) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
                // SAFETY: as above.
                unsafe { place.cast::<libc::sockaddr_in6>().write(raw) };
            }
        }
        Self(storage)
    }

    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// A port's GID as a socket address; `scope` is the index of its interface.
pub(super) fn socket_address(gid: Ipv6Addr, port: u16, scope: u32) -> SocketAddr {
    match IpAddr::V6(gid).to_canonical() {
        IpAddr::V4(address) => SocketAddr::from((address, port)),
        IpAddr::V6(address) => {
            let scope = if address.is_unicast_link_local() { scope } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_ports_are_those_of_sockets_with_their_scope_where_it_counts() {
        let of = |gid: &str| socket_address(gid.parse().unwrap(), 7, 3).to_string();
        assert_eq!(of("::ffff:10.77.0.1"), "10.77.0.1:7");
        assert_eq!(of("fe80::1"), "[fe80::1%3]:7");
        assert_eq!(of("2001:db8::1"), "[2001:db8::1]:7");
    }

    #[test]
    fn addresses_are_given_to_the_library_in_the_order_of_the_network() {
        let mut four = RawSocketAddress::of("10.77.0.1:258".parse().unwrap());
        // SAFETY: the beginning of a storage that is longer.
        let bytes = unsafe { std::slice::from_raw_parts(four.as_mut_ptr().cast::<u8>(), 8) };
        assert_eq!(bytes[2..], [1, 2, 10, 77, 0, 1]);
        let mut six = RawSocketAddress::of("[fe80::1%5]:258".parse().unwrap());
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(six.as_mut_ptr().cast::<u8>(), 28) };
        assert_eq!((bytes[2..4].to_vec(), bytes[8], bytes[23]), (vec![1, 2], 0xfe, 1));
        assert_eq!(u32::from_ne_bytes(bytes[24..28].try_into().unwrap()), 5);
    }
}
