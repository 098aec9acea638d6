//! The handshake at the beginning of every connection: both ends identify themselves and prove that
//! they know the secret.
//!
//! Dialer: hello. Listener: hello. Dialer: answer. Listener: verdict, with its own answer. Every
//! message has a fixed length, and each answer covers both hellos. The listener sends nothing
//! before it has a whole hello, and proves nothing before the dialer has. A pure state machine:
//! bytes in, bytes out.
//!
//! If the hellos agree on TLS, its handshake comes after them. Answer and verdict go through TLS
//! then, and the answers also cover the key that the listener has shown. If the hellos do not
//! agree, both ends fail and say so: nobody falls back.

use std::net::IpAddr;

use crate::Rank;
use crate::auth::{Challenges, Secret, Side, TAG_BYTES, challenge};
use crate::device::{Incarnation, Protection, ProtocolViolation, TlsFault};
use crate::tls::{Session, Tls, TlsHandshake};
use crate::wire::{Reader, Writer};

/// Sealed bytes of the messages of one handshake at most: one or two of some 60 bytes, and what a
/// proof adds.
const SEALED_BYTES_OF_HANDSHAKE_MAX: usize = 512;

/// The beginning of every hello: the name and, as its last two bytes, the version of the protocol.
const MAGIC: [u8; 8] = *b"pleach\0\x03";
const NAME_BYTES: usize = 6;

/// Length of a hello, in bytes.
pub(crate) const HELLO_BYTES: usize = 96;

/// The shortest hello of any version, in bytes: that of version 1.
const HELLO_BYTES_MIN: usize = 88;

/// The number of ranks in the hello of a device that shares no world with the other end.
const NO_WORLD: u32 = 0;
const ANSWER_BYTES: usize = TAG_BYTES;
const VERDICT_BYTES: usize = 1 + TAG_BYTES;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The control stream.
    Control,
    /// Data from the dialer to the listener.
    ToListener,
    /// Data from the listener to the dialer.
    ToDialer,
}

/// What each end states about itself and the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    version: [u8; 8],
    pub(super) role: Role,
    /// The index of the data connection among those of its role.
    pub(super) index: u8,
    /// Data connections in each direction.
    data_connections: u8,
    /// How the sender protects the connection.
    protection: Protection,
    /// The sender's rank in the world of the receiver.
    pub(super) rank: Rank,
    /// The receiver's rank in the world of the sender.
    pub(crate) expected: Rank,
    /// The number of ranks; zero when the ends share no world.
    world_size: u32,
    /// Signal slots that the sender keeps for this peer.
    pub(super) signal_slots: u32,
    /// The sender's process number on its host.
    pub(super) process: u32,
    /// The same on all connections of one attempt.
    pub(super) session: u64,
    /// The sender's device.
    pub(crate) incarnation: Incarnation,
    /// The sender's host and process number space; zero: unknown.
    pub(super) host: [u8; 16],
    challenge: [u8; TAG_BYTES],
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let role = match self.role {
            Role::Control => 0,
            Role::ToListener => 1,
            Role::ToDialer => 2,
        };
        let protection = match self.protection {
            Protection::Clear => 0,
            Protection::Secret => 1,
            Protection::Certificates => 2,
        };
        let connection = [role, self.index, self.data_connections, protection];
        let writer = Writer::default().raw(&self.version).raw(&connection);
        let words = [self.rank, self.expected, self.world_size, self.signal_slots, self.process];
        let writer = words.into_iter().fold(writer, Writer::u32);
        let writer = writer.u64(self.session).u64(self.incarnation.0);
        writer.raw(&self.host).raw(&self.challenge).to_array()
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, ProtocolViolation> {
        let mut reader = Reader::new(bytes);
        let version = reader.array()?;
        if version != MAGIC {
            return Err(ProtocolViolation::Version);
        }
        let [role, index, data_connections, protection] = reader.array()?;
        let role = match role {
            0 => Role::Control,
            1 => Role::ToListener,
            2 => Role::ToDialer,
            _ => return Err(ProtocolViolation::MalformedFrame),
        };
        let protection = match protection {
            0 => Protection::Clear,
            1 => Protection::Secret,
            2 => Protection::Certificates,
            _ => return Err(ProtocolViolation::MalformedFrame),
        };
        Ok(Self {
            version,
            role,
            index,
            data_connections,
            protection,
            rank: reader.u32()?,
            expected: reader.u32()?,
            world_size: reader.u32()?,
            signal_slots: reader.u32()?,
            process: reader.u32()?,
            session: reader.u64()?,
            incarnation: Incarnation(reader.u64()?),
            host: reader.array()?,
            challenge: reader.array()?,
        })
    }

    /// Whether the two ends share no world.
    pub(crate) fn is_of_other_world(&self) -> bool {
        self.world_size == NO_WORLD
    }
}

/// The ends of a connection as the dialer names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndRanks {
    /// The dialer's rank in the world of the listener.
    pub(crate) dialer: Rank,
    /// The listener's rank in the world of the dialer.
    pub(crate) listener: Rank,
    /// Whether both are in one world.
    pub(crate) share_world: bool,
}

/// The identity of this process, which its hellos state.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) rank: Rank,
    pub(super) world_size: u32,
    /// Data connections in each direction.
    pub(super) data_connections: u8,
    pub(super) signal_slots: u32,
    pub(super) process: u32,
    pub(crate) incarnation: Incarnation,
    pub(super) host: [u8; 16],
    pub(super) secret: Option<Secret>,
}

impl Identity {
    /// Connections of one pair.
    pub(super) fn connections(&self) -> usize {
        1 + 2 * usize::from(self.data_connections)
    }

    /// How a dialer protects a connection to this address.
    pub(crate) fn asked(&self, address: IpAddr) -> Protection {
        self.tls().map_or(Protection::Clear, |tls| tls.asked(address))
    }

    /// What the device has set when it began.
    fn tls(&self) -> Option<Tls> {
        self.secret.as_ref()?.tls().ok()
    }

    /// The hello to a peer of this world.
    fn hello(&self, role: Role, index: u8, expected: Rank, session: u64) -> Hello {
        Hello {
            version: MAGIC,
            role,
            index,
            data_connections: self.data_connections,
            protection: Protection::Clear,
            rank: self.rank,
            expected,
            world_size: self.world_size,
            signal_slots: self.signal_slots,
            process: self.process,
            session,
            incarnation: self.incarnation,
            host: self.host,
            challenge: challenge(),
        }
    }
}

/// The state of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Bytes are to be sent or received.
    Pending,
    /// The dialer is authenticated, and the listener must decide on it with [`Handshake::admit`].
    AwaitsAdmission(Hello),
    /// Done as soon as the outgoing bytes are sent.
    Done(Hello),
    /// Failed: close as soon as the outgoing bytes are sent. With the rank that the peer claimed,
    /// if it sent a hello.
    Failed(ProtocolViolation, Option<Rank>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Hello,
    Tls,
    Answer,
    Verdict,
    Over,
}

/// One end of a handshake.
pub(super) struct Handshake {
    identity: Identity,
    side: Side,
    /// The address of the other end, for a listener over TCP.
    from: Option<IpAddr>,
    stage: Stage,
    own: Option<Hello>,
    theirs: Option<Hello>,
    incoming: [u8; HELLO_BYTES],
    filled: usize,
    outgoing: Vec<u8>,
    /// While the stage is [`Stage::Tls`].
    tls: Option<TlsHandshake>,
    /// The keys of the connection, after that stage.
    session: Option<Session>,
    /// Sealed bytes that came.
    sealed: usize,
}

impl Handshake {
    /// The end that dialed, and asks for this protection.
    pub(super) fn dial(
        identity: &Identity,
        (role, index): (Role, u8),
        ends: EndRanks,
        session: u64,
        protection: Protection,
    ) -> Self {
        let hello = Hello {
            protection,
            rank: ends.dialer,
            world_size: if ends.share_world { identity.world_size } else { NO_WORLD },
            ..identity.hello(role, index, ends.listener, session)
        };
        let mut handshake = Self::new(identity, Side::Dialer);
        handshake.outgoing.extend_from_slice(&hello.encode());
        handshake.own = Some(hello);
        handshake
    }

    /// The end that was dialed, over TCP from this address.
    pub(super) fn listen(identity: &Identity, from: IpAddr) -> Self {
        Self { from: Some(from), ..Self::new(identity, Side::Listener) }
    }

    fn new(identity: &Identity, side: Side) -> Self {
        Self {
            identity: identity.clone(),
            side,
            from: None,
            stage: Stage::Hello,
            own: None,
            theirs: None,
            incoming: [0; HELLO_BYTES],
            filled: 0,
            outgoing: Vec::new(),
            tls: None,
            session: None,
            sealed: 0,
        }
    }

    /// Bytes to send; the caller removes those that it sent.
    pub(super) fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outgoing
    }

    /// The keys of the connection after the handshake, if it speaks TLS.
    pub(crate) fn take_session(&mut self) -> Option<Session> {
        self.session.take()
    }

    /// The buffer to receive into, never longer than this message needs. Empty when nothing is
    /// expected.
    pub(super) fn room(&mut self) -> &mut [u8] {
        let message_end = self.message_bytes().max(self.filled);
        match (self.stage, &mut self.tls, &mut self.session) {
            (Stage::Tls, Some(tls), _) => tls.room(),
            (Stage::Answer | Stage::Verdict, _, Some(session)) => session.reader().room_of_record(),
            _ => &mut self.incoming[self.filled..message_end],
        }
    }

    /// Length of the message that is expected.
    fn message_bytes(&self) -> usize {
        match self.stage {
            Stage::Hello => HELLO_BYTES,
            Stage::Answer => ANSWER_BYTES,
            Stage::Verdict => VERDICT_BYTES,
            Stage::Tls | Stage::Over => 0,
        }
    }

    /// Whether a whole hello of the other end has come.
    pub(super) fn has_received_hello(&self) -> bool {
        self.theirs.is_some()
    }

    /// Handles `count` bytes that were received into [`Handshake::room`].
    pub(super) fn received(&mut self, count: usize) -> Progress {
        if self.stage == Stage::Tls {
            return self.tls_came(count);
        }
        match self.opened(count) {
            Ok(count) => self.filled += count,
            Err(violation) => return self.fail(violation),
        }
        if self.stage == Stage::Hello {
            // Other protocols are detected as early as possible. A peer of another version gets a
            // hello that tells it so.
            let have = self.filled.min(NAME_BYTES);
            if self.incoming[..have] != MAGIC[..have] {
                return self.fail(ProtocolViolation::Version);
            }
            // The hello of another version may be shorter.
            if self.filled >= HELLO_BYTES_MIN && self.incoming[..MAGIC.len()] != MAGIC {
                return self.other_version();
            }
        }
        if self.filled < self.message_bytes() {
            return Progress::Pending;
        }
        self.filled = 0;
        match (self.side, self.stage) {
            (Side::Listener, Stage::Hello) => self.hello_came_to_listener(),
            (Side::Dialer, Stage::Hello) => self.hello_came_to_dialer(),
            (_, Stage::Answer) => self.answer_came(),
            (_, Stage::Verdict) => self.verdict_came(),
            (_, Stage::Tls | Stage::Over) => Progress::Pending,
        }
    }

    /// How many of the `count` bytes that were received are plain bytes of the message. A sealed
    /// message comes whole: its bytes are opened into their place.
    fn opened(&mut self, count: usize) -> Result<usize, ProtocolViolation> {
        let expected = self.message_bytes();
        let Some(session) = self.session.as_mut().filter(|_| expected > 0) else { return Ok(count) };
        // Records without data are records too, and nobody is to be served them for ever.
        self.sealed += count;
        if self.sealed > SEALED_BYTES_OF_HANDSHAKE_MAX {
            return Err(ProtocolViolation::MalformedFrame);
        }
        session.reader().received(count);
        let plain = session.reader().plain()?;
        let len = plain.len();
        if len > 0 {
            if len != expected {
                return Err(ProtocolViolation::MalformedFrame);
            }
            self.incoming[..len].copy_from_slice(plain);
            session.reader().take(len);
        }
        Ok(len)
    }

    /// Sends a message, through TLS if the connection has keys.
    fn say(&mut self, message: &[u8]) {
        match &mut self.session {
            Some(session) => {
                session.writer().seal(message);
                self.outgoing.append(&mut session.writer().take_waiting());
            }
            None => self.outgoing.extend_from_slice(message),
        }
    }

    /// Begins the stage after the hellos, which both ends have.
    fn hellos_over(&mut self, own: &Hello, theirs: &Hello) -> Progress {
        if own.protection != theirs.protection {
            let (own, theirs) = (own.protection, theirs.protection);
            return self.fail(ProtocolViolation::Protection { own, theirs });
        }
        if own.protection == Protection::Clear {
            return self.protected(own, theirs);
        }
        let tls = self.identity.tls();
        let begun = tls.ok_or(TlsFault::Handshake).and_then(|tls| match self.side {
            Side::Dialer => tls.dial(),
            Side::Listener => tls.listen(),
        });
        match begun {
            Ok(mut tls) => {
                self.outgoing.append(&mut tls.take_outgoing());
                self.tls = Some(tls);
                self.stage = Stage::Tls;
                Progress::Pending
            }
            Err(fault) => self.fail(fault.into()),
        }
    }

    fn tls_came(&mut self, count: usize) -> Progress {
        let (Some(tls), Some(own), Some(theirs)) = (&mut self.tls, self.own, self.theirs) else {
            return self.fail(ProtocolViolation::MalformedFrame);
        };
        let received = tls.received(count);
        self.outgoing.append(&mut tls.take_outgoing());
        match received {
            Ok(false) => return Progress::Pending,
            Ok(true) => {}
            Err(fault) => return self.fail(fault.into()),
        }
        match self.tls.take().map(TlsHandshake::finish) {
            Some(Ok(session)) => self.session = Some(session),
            Some(Err(fault)) => return self.fail(fault.into()),
            None => return self.fail(ProtocolViolation::MalformedFrame),
        }
        self.protected(&own, &theirs)
    }

    /// Begins the proof, after TLS if the ends speak it.
    fn protected(&mut self, own: &Hello, theirs: &Hello) -> Progress {
        match self.side {
            Side::Dialer => {
                let claim = self.claim(own, theirs);
                let answer = self.challenges(own, theirs).answer(self.secret(), &claim);
                self.say(&answer);
                self.stage = Stage::Verdict;
            }
            Side::Listener => self.stage = Stage::Answer,
        }
        Progress::Pending
    }

    /// The bytes that both ends must agree on.
    fn claim(&self, dialer: &Hello, listener: &Hello) -> Vec<u8> {
        let binding = self.session.as_ref().map(|session| &session.binding()[..]);
        [&dialer.encode()[..], &listener.encode(), binding.unwrap_or_default()].concat()
    }

    fn fail(&mut self, violation: ProtocolViolation) -> Progress {
        self.stage = Stage::Over;
        Progress::Failed(violation, self.theirs.map(|hello| hello.rank))
    }

    /// Fails; a listener tells the dialer its own version.
    fn other_version(&mut self) -> Progress {
        if self.side == Side::Listener {
            let own = self.identity.hello(Role::Control, 0, self.identity.rank, 0);
            self.outgoing.extend_from_slice(&own.encode());
        }
        self.fail(ProtocolViolation::Version)
    }

    fn hello_came_to_listener(&mut self) -> Progress {
        let theirs = match Hello::decode(&self.incoming) {
            Ok(hello) => hello,
            Err(violation) => return self.fail(violation),
        };
        let mut own = self.identity.hello(theirs.role, theirs.index, theirs.rank, theirs.session);
        if theirs.is_of_other_world() {
            // The dialer alone knows its rank for this end.
            (own.rank, own.world_size) = (theirs.expected, NO_WORLD);
        }
        if let (Some(tls), Some(from)) = (self.identity.tls(), self.from) {
            own.protection = tls.answered(from, theirs.protection);
        }
        self.outgoing.extend_from_slice(&own.encode());
        (self.own, self.theirs) = (Some(own), Some(theirs));
        self.hellos_over(&own, &theirs)
    }

    fn hello_came_to_dialer(&mut self) -> Progress {
        let theirs = match Hello::decode(&self.incoming) {
            Ok(hello) => hello,
            Err(violation) => return self.fail(violation),
        };
        let Some(own) = self.own else { return self.fail(ProtocolViolation::MalformedFrame) };
        self.theirs = Some(theirs);
        if theirs.rank != own.expected || theirs.expected != own.rank || theirs.world_size != own.world_size {
            return self.fail(ProtocolViolation::WrongRank);
        }
        let connection = |hello: &Hello| (hello.role, hello.index, hello.data_connections, hello.session);
        if connection(&theirs) != connection(&own) {
            return self.fail(ProtocolViolation::Version);
        }
        self.hellos_over(&own, &theirs)
    }

    fn challenges(&self, own: &Hello, theirs: &Hello) -> Challenges {
        Challenges::new(self.side, own.challenge, theirs.challenge)
    }

    fn secret(&self) -> Option<&Secret> {
        self.identity.secret.as_ref()
    }

    fn answer_came(&mut self) -> Progress {
        let (Some(own), Some(theirs)) = (self.own, self.theirs) else {
            return self.fail(ProtocolViolation::MalformedFrame);
        };
        let answer: [u8; TAG_BYTES] = std::array::from_fn(|byte| self.incoming[byte]);
        let claim = self.claim(&theirs, &own);
        if !self.challenges(&own, &theirs).verify(self.secret(), &claim, &answer) {
            return self.refuse(ProtocolViolation::WrongSecret);
        }
        // In one world the rank with the higher number dials; no other process may dial this rank.
        let Identity { rank, world_size, .. } = self.identity;
        let may_dial = if theirs.is_of_other_world() { theirs.rank != rank } else { theirs.rank > rank };
        if theirs.expected != own.rank
            || theirs.world_size != own.world_size
            || theirs.rank >= world_size
            || !may_dial
        {
            return self.refuse(ProtocolViolation::WrongRank);
        }
        let is_known = theirs.role == Role::Control || theirs.index < theirs.data_connections;
        if theirs.data_connections != own.data_connections || !is_known {
            return self.refuse(ProtocolViolation::Version);
        }
        Progress::AwaitsAdmission(theirs)
    }

    fn refuse(&mut self, violation: ProtocolViolation) -> Progress {
        let mut verdict = [0; VERDICT_BYTES];
        verdict[0] = match violation {
            ProtocolViolation::WrongSecret => 1,
            ProtocolViolation::WrongRank => 2,
            ProtocolViolation::RankTaken => 4,
            ProtocolViolation::FormerProcess => 5,
            _ => 3,
        };
        self.say(&verdict);
        self.fail(violation)
    }

    /// The listener's decision after [`Progress::AwaitsAdmission`].
    pub(super) fn admit(&mut self, decision: Result<(), ProtocolViolation>) -> Progress {
        let (Some(own), Some(theirs)) = (self.own, self.theirs) else {
            return self.fail(ProtocolViolation::MalformedFrame);
        };
        if let Err(violation) = decision {
            return self.refuse(violation);
        }
        let claim = self.claim(&theirs, &own);
        let answer = self.challenges(&own, &theirs).answer(self.secret(), &claim);
        let mut verdict = [0; VERDICT_BYTES];
        verdict[1..].copy_from_slice(&answer);
        self.say(&verdict);
        self.stage = Stage::Over;
        Progress::Done(theirs)
    }

    fn verdict_came(&mut self) -> Progress {
        let (Some(own), Some(theirs)) = (self.own, self.theirs) else {
            return self.fail(ProtocolViolation::MalformedFrame);
        };
        match self.incoming[0] {
            0 => {}
            1 => return self.fail(ProtocolViolation::WrongSecret),
            2 => return self.fail(ProtocolViolation::WrongRank),
            4 => return self.fail(ProtocolViolation::RankTaken),
            5 => return self.fail(ProtocolViolation::FormerProcess),
            _ => return self.fail(ProtocolViolation::Version),
        }
        let answer: [u8; TAG_BYTES] = std::array::from_fn(|byte| self.incoming[1 + byte]);
        let claim = self.claim(&own, &theirs);
        if !self.challenges(&own, &theirs).verify(self.secret(), &claim, &answer) {
            return self.fail(ProtocolViolation::WrongSecret);
        }
        self.stage = Stage::Over;
        Progress::Done(theirs)
    }
}
