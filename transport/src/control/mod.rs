//! The control plane: what ranks say to each other beside data, on a stream for each pair, and how
//! they find out that one is gone. `tcp` is this and data connections, `verbs` is this and queue
//! pairs. `shm` has streams of its own, as what it says comes with descriptors, but is made of the
//! same parts.
//!
//! | type | what it is | in `shm` |
//! | --- | --- | --- |
//! | [`Control`] | the device's end, one for a device: commands out, events in | |
//! | [`FabricMessage`] | what the fabric says on the streams beside what its users post | |
//! | [`watcher`] | reads the streams, whether or not anybody polls the device | |
//! | [`handshake`] | who is at the other end: both prove the secret ([`auth`](crate::auth)) | |
//! | [`link`] | the stream of one pair as it is written | |
//! | [`Outgoing`] | what waits to be sent, with limits: posts, urgent ones, replies | yes |
//! | [`Commands`] | what a device asks of its watcher, and what wakes it then | yes |
//! | [`Slots`] | what the watcher waits for, by tokens that go stale with what they name | yes |
//! | [`WatcherThread`] | its thread, which ends in bounded time, and not in a forked child | yes |
//! | [`Releases`] | regions that are gone, to be told to peers | |
//! | [`packet`] | packets with descriptors, and whose process is at the other end | yes |
//!
//! A pair has one stream, and as many data connections each way as the fabric asks for: those are
//! dialed and proved with the stream and belong to the fabric from then on. Of two ranks the higher
//! one dials, again after a pause while nobody listens. The listener says "ready" when it wants the
//! pair and has all of its connections; whoever dials takes that as the beginning. After that
//! [`frame`] says what there is: messages for the responder, messages of the fabric, goodbye.
//!
//! **Invariants:**
//!
//! * *Proved first.* No byte of a connection is used before both ends have proved the secret, and
//!   what is not proved costs bounded memory and time.
//! * *In order.* The events of one peer come in the order of what it did: [`ControlEvent::Opened`]
//!   first, [`ControlEvent::Departed`] where it said goodbye, [`ControlEvent::Lost`] last and once
//!   at most. The responder hears of a loss before the device does.
//! * *The first cause counts.* A loss that is seen elsewhere, on a data connection or a queue pair,
//!   is a command ([`Control::lose`]): the watcher reads the stream to its end before, so what the
//!   peer said still counts, a goodbye above all. Whatever the end of the stream then looks like,
//!   the cause is the one that was seen first. Why a pair was refused tells more than either.
//! * *Bounded.* Posts wait up to a number of bytes, then the caller hears so; a peer that makes
//!   more replies than it reads is lost. An urgent message has a place of its own.
//! * *Pairs are by themselves.* Each is connected when its device says so, at any time or never;
//!   nothing waits for a pair to be there, and a peer that dials before it is wanted is proved and
//!   waits.

mod event_flag;
mod frame;
mod handshake;
mod interfaces;
mod link;
mod open_error;
mod outgoing;
// Under loom there is nobody who uses them.
#[cfg(not(loom))]
#[allow(unsafe_code)]
pub(crate) mod packet;
mod releases;
mod shared;
mod slots;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
mod thread;
mod watcher;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::event_flag::EventFlag;
use self::frame::Frame;
use self::handshake::Identity;
pub use self::interfaces::interface_addresses;
pub(crate) use self::interfaces::listening_ip;
use self::link::State;
pub use self::open_error::OpenError;
pub(crate) use self::outgoing::{Full, Kind, Outgoing};
pub(crate) use self::releases::Releases;
use self::shared::{Command, Shared};
pub(crate) use self::shared::{Commands, ControlEvent};
pub(crate) use self::slots::{SECOND, Slots};
pub(crate) use self::thread::WatcherThread;
use self::watcher::Watcher;
use crate::Rank;
use crate::clock;
use crate::device::{Address, ConnectError, DeviceConfig, LossCause, PostError};

/// How long dropping a device that has left waits for its peers to read the goodbye.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// How much longer the watcher may take to end; longer only when a responder blocks.
pub(crate) const WATCHER_END_LIMIT: Duration = Duration::from_secs(1);

/// A message of a fabric to itself at another rank.
pub(crate) trait FabricMessage: Sized + Send + 'static {
    /// Reads what a peer sent; `None`: it is no such message, and costs the pair.
    fn decode(bytes: &[u8]) -> Option<Self>;

    /// Why the peer that says this makes no connection and will hang up, if it says that.
    fn refusal(&self) -> Option<LossCause> {
        None
    }
}

/// Gives bytes to the decoders of what peers say: for fuzzing.
///
/// # Panics
///
/// When what was decoded does not survive being encoded and decoded again.
pub(crate) fn check_decoders(bytes: &[u8]) {
    use self::handshake::{HELLO_BYTES, Hello};
    if let Some(bytes) = bytes.first_chunk::<HELLO_BYTES>()
        && let Ok(hello) = Hello::decode(bytes)
    {
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
    }
    if let Ok(Some((frame, used))) = Frame::decode(bytes) {
        assert_eq!(frame.to_bytes(), &bytes[..used]);
    }
}

/// One rank's control plane. See the module. Dropping it ends the watcher; peers that were told
/// goodbye have a second to read it.
pub(crate) struct Control<M> {
    rank: Rank,
    world_size: u32,
    signal_slots: usize,
    address: Address,
    fabric: &'static str,
    connect_timeout: Duration,
    /// Whether the secret may be used beyond this host.
    has_secret: bool,
    /// That of `shared`, one step nearer for polls.
    wake_source: Arc<EventFlag>,
    shared: Arc<Shared<M>>,
    thread: WatcherThread,
    has_said_bye: bool,
}

impl<M: FabricMessage> Control<M> {
    /// Listens, on loopback or where the configuration says, and starts the watcher. Each pair of
    /// this fabric gets so many data connections in each direction.
    pub(crate) fn new(
        config: DeviceConfig,
        fabric: &'static str,
        data_connections: u8,
    ) -> Result<Self, OpenError> {
        let ip = listening_ip(config.interface.as_deref(), config.address)?;
        let has_secret = config.secret.as_ref().is_some_and(|secret| !secret.is_of_this_host());
        if !ip.is_loopback() && !has_secret {
            return Err(OpenError::SecretRequired { address: ip });
        }
        if config.secret.is_none() {
            return Err(OpenError::NoSecret);
        }
        let (listener, bound) =
            socket::listen_on(ip).map_err(|source| OpenError::Listen { address: ip, source })?;
        let system = |what| move |source: io::Error| OpenError::System { what, source };
        let signal_slots = config.signal_slots.min(usize::from(u16::MAX) + 1);
        let identity = Identity {
            rank: config.rank,
            world_size: config.world_size,
            data_connections,
            signal_slots: signal_slots as u32,
            process: std::process::id(),
            host: socket::host_identity(),
            secret: config.secret,
        };
        let shared = Shared::new(config.responder, config.world_size);
        let shared = Arc::new(shared.map_err(system("event descriptors"))?);
        let watcher =
            Watcher::new(Arc::clone(&shared), identity, listener).map_err(system("epoll descriptor"))?;
        let name = format!("pleach-{fabric}-{}", config.rank);
        let thread = WatcherThread::spawn(name, || watcher.run()).map_err(system("watcher thread"))?;
        Ok(Self {
            rank: config.rank,
            world_size: config.world_size,
            signal_slots,
            address: socket::to_text(bound),
            fabric,
            connect_timeout: config.connect_timeout,
            has_secret,
            wake_source: Arc::clone(&shared.wake_source),
            shared,
            thread,
            has_said_bye: false,
        })
    }

    /// As [`Device::connect`](crate::device::Device::connect); ends with
    /// [`ControlEvent::Opened`] or [`ControlEvent::Lost`]. Further calls for a peer do nothing.
    pub(crate) fn connect(&self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        if peer >= self.world_size || peer == self.rank {
            return Err(ConnectError::Peer { peer, own: self.rank, world_size: self.world_size });
        }
        let target = socket::from_text(address)
            .ok_or_else(|| ConnectError::Address { fabric: self.fabric, address: address.clone() })?;
        if !target.ip().is_loopback() && !self.has_secret {
            let source = io::Error::new(
                io::ErrorKind::PermissionDenied,
                "a shared secret is required, since the address is not loopback; write one with 'pleach secret FILE' and set PLEACH_SECRET_FILE=FILE",
            );
            return Err(ConnectError::System { peer, address: address.clone(), source });
        }
        if self.shared.link(peer).want() {
            // Of two ranks the higher one dials, so that they never dial each other at once.
            let dial = (self.rank > peer).then_some(target);
            let deadline = clock::now() + self.connect_timeout;
            self.shared.commands.send(Command::Connect { peer, dial, deadline });
        }
        Ok(())
    }

    /// Says something of the fabric's own to a peer; false when the peer does not hear it, as it is
    /// not connected or reads nothing.
    pub(crate) fn say(&self, peer: Rank, message: &[u8]) -> bool {
        self.shared.say(peer, &Frame::Fabric(message))
    }
}

impl<M> Control<M> {
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Signal slots that peers are told to be kept for them.
    pub(crate) fn signal_slots(&self) -> usize {
        self.signal_slots
    }

    /// Set when there are events, or something else made the device's sleep end.
    pub(crate) fn wake_source(&self) -> &Arc<EventFlag> {
        &self.wake_source
    }

    /// A list of released regions that wakes the device.
    pub(crate) fn releases(&self) -> Releases {
        Releases::new(Arc::downgrade(&self.wake_source))
    }

    /// Whether [`Control::take_events`] would give something. One load: for polls.
    pub(crate) fn has_events(&self) -> bool {
        self.shared.has_events()
    }

    /// What has happened since the last call.
    pub(crate) fn take_events(&self) -> Vec<ControlEvent<M>> {
        self.shared.take_events()
    }

    /// As [`Device::post`](crate::device::Device::post); an urgent message is one of
    /// [`Urgency::Urgent`](crate::device::Urgency::Urgent).
    pub(crate) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<(), PostError> {
        let link = self.shared.links.get(peer as usize).ok_or(PostError::NotConnected { peer })?;
        if link.post(peer, message, is_urgent)? {
            self.shared.commands.send(Command::Flush { peer });
        }
        Ok(())
    }

    /// Says goodbye to a peer, if it is connected: the end of the stream is no loss then.
    pub(crate) fn say_bye(&mut self, peer: Rank) {
        self.has_said_bye = true;
        self.shared.say(peer, &Frame::Bye);
    }

    /// Whether something waits to be sent to a peer.
    pub(crate) fn has_output(&self, peer: Rank) -> bool {
        self.shared.link(peer).has_output()
    }

    /// Ends a pair, as something else than its stream shows, once all has been read that the peer
    /// said: it is lost for this cause then, unless it said goodbye.
    pub(crate) fn lose(&self, peer: Rank, cause: LossCause) {
        // Its stream may end meanwhile, as a consequence.
        self.shared.link(peer).suspect(cause.clone());
        self.shared.commands.send(Command::Lose { peer, cause });
    }

    /// Ends a pair whatever else its peer has said.
    pub(crate) fn lose_at_once(&self, peer: Rank, cause: LossCause) {
        self.shared.lose(peer, cause);
    }

    /// One of the two makes no connection, for this cause.
    pub(crate) fn refuse(&self, peer: Rank, cause: LossCause) {
        self.shared.link(peer).refuse(cause);
    }

    /// Why a peer is lost of which this was seen.
    pub(crate) fn cause(&self, peer: Rank, seen: LossCause) -> LossCause {
        self.shared.link(peer).cause(seen)
    }

    /// Nothing more of a peer, from now on.
    pub(crate) fn sever(&self, peer: Rank) {
        self.shared.link(peer).end(State::Severed);
        self.shared.commands.send(Command::Sever { peer });
    }
}

impl<M> Drop for Control<M> {
    fn drop(&mut self) {
        // A forked child has no watcher thread to wait for, and its parent's streams are not its to
        // close.
        if self.thread.is_forked() {
            return;
        }
        let linger = if self.has_said_bye { LINGER_LIMIT } else { Duration::ZERO };
        self.shared.commands.send(Command::Stop { linger_until: clock::now() + linger });
        self.thread.join(linger + WATCHER_END_LIMIT);
        for link in &self.shared.links {
            link.close();
        }
    }
}
