//! The beginning of a control connection: both ends introduce themselves and prove that they know
//! the secret. A pure state machine: frames in, frames out.
//!
//! Dialer: introduction. Listener: introduction. Dialer: proof. Listener: verdict, with its own
//! proof and the name of the link. Each proof covers both introductions. The listener proves
//! nothing before the dialer has. Without a secret both ends share the empty one, so a program with
//! a secret takes nobody who has none.
//!
//! If the introductions agree on TLS, its handshake follows them, and the rest goes through it. The
//! proofs then also cover the key that the listener has shown. If they do not agree, both ends fail
//! and say so: nobody falls back.

use std::net::IpAddr;

use pleach_transport::Address;
use pleach_transport::auth::{Challenges, Secret, Side, TAG_BYTES, challenge};
use pleach_transport::device::{Protection, TlsFault};
use pleach_transport::tls::{Tls, TlsMode};

use super::frame::{self, FrameKind};
use crate::introduction::{Fabrics, Introduction, IntroductionError};
use crate::reference::LinkId;

/// A verdict: code, proof, link.
const VERDICT_BYTES: usize = 1 + TAG_BYTES + 8;

/// The verdicts of a listener.
const ACCEPTED: u8 = 0;
const WRONG_SECRET: u8 = 1;
const FULL: u8 = 2;

/// Why two programs have no link.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other end's introduction is wrong.
    #[error(transparent)]
    Introduction(#[from] IntroductionError),
    /// The other end does not know the secret, or knows one that this program does not.
    #[error("it has another secret than this program; give both the same PLEACH_SECRET_FILE")]
    WrongSecret,
    /// One end wants TLS and the other none, or one certificates and the other none.
    #[error(
        "it {theirs} on this link and this program {own}; set PLEACH_TLS, PLEACH_TLS_CERT, PLEACH_TLS_KEY and \
         PLEACH_TLS_CA alike for both, and give both a PLEACH_SECRET_FILE"
    )]
    Protection {
        /// How this program protects the link.
        own: Protection,
        /// How the other one does.
        theirs: Protection,
    },
    /// TLS with it failed.
    #[error("{0}")]
    Tls(#[from] TlsFault),
    /// The listener has too many links.
    #[error("it has no room for one more link; close links there, or raise its limit")]
    Full,
    /// The other end breaks the protocol.
    #[error("it does not speak the protocol of the exchange; look at the port")]
    Protocol,
}

/// What a frame leads to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HandshakeStep {
    /// Send these bytes and wait for the next frame.
    Continue(Vec<u8>),
    /// Send these bytes and begin TLS; [`Handshake::secured`] goes on.
    Secure(Vec<u8>),
    /// Send these bytes; the link begins.
    Done { send: Vec<u8>, link: LinkId },
    /// Send these bytes and close.
    Refused { send: Vec<u8>, error: HandshakeError },
}

/// One end of a handshake.
pub(crate) struct Handshake {
    side: Side,
    secret: Option<Secret>,
    tls: Tls,
    /// The address of the other end.
    from: IpAddr,
    own: Introduction,
    own_bytes: Vec<u8>,
    theirs: Option<(Introduction, Vec<u8>)>,
    /// Of the connection, if it speaks TLS.
    binding: Option<[u8; 32]>,
    /// The name of the link, drawn by the listener.
    link: LinkId,
    has_room: bool,
}

impl Handshake {
    /// The end that dialed this address. Returns the first frame.
    pub(crate) fn dial(
        own: Introduction,
        secret: Option<Secret>,
        tls: Tls,
        to: IpAddr,
    ) -> Result<(Self, Vec<u8>), IntroductionError> {
        let own = Introduction { protection: tls.asked(to), ..own };
        let handshake = Self::new(Side::Dialer, own, secret, (tls, to), LinkId(0))?;
        let first = frame::encode(FrameKind::Introduction, &handshake.own_bytes);
        Ok((handshake, first))
    }

    /// The end that listens, with the name of a new link; this address dialed.
    pub(crate) fn listen(
        own: Introduction,
        secret: Option<Secret>,
        tls: Tls,
        from: IpAddr,
        link: LinkId,
    ) -> Result<Self, IntroductionError> {
        Self::new(Side::Listener, own, secret, (tls, from), link)
    }

    fn new(
        side: Side,
        own: Introduction,
        secret: Option<Secret>,
        (tls, from): (Tls, IpAddr),
        link: LinkId,
    ) -> Result<Self, IntroductionError> {
        let own_bytes = own.encode()?;
        let (theirs, binding, has_room) = (None, None, true);
        Ok(Self { side, secret, tls, from, own, own_bytes, theirs, binding, link, has_room })
    }

    /// The introduction of the other end, when it has come.
    pub(crate) fn theirs(&self) -> Option<&Introduction> {
        self.theirs.as_ref().map(|(introduction, _)| introduction)
    }

    /// Whether there is room for the link at this moment.
    pub(crate) fn set_has_room(&mut self, has_room: bool) {
        self.has_room = has_room;
    }

    /// A frame came.
    pub(crate) fn received(&mut self, kind: FrameKind, content: &[u8]) -> HandshakeStep {
        let step = match (self.side, kind, &self.theirs) {
            (_, FrameKind::Introduction, None) => self.introduced(content),
            (Side::Listener, FrameKind::Proof, Some(_)) => self.proved(content),
            (Side::Dialer, FrameKind::Verdict, Some(_)) => self.judged(content),
            _ => Err(HandshakeError::Protocol),
        };
        step.unwrap_or_else(|error| HandshakeStep::Refused { send: Vec::new(), error })
    }

    fn introduced(&mut self, content: &[u8]) -> Result<HandshakeStep, HandshakeError> {
        let introduction = |bytes: &[u8]| frame::encode(FrameKind::Introduction, bytes);
        let (_, theirs) = match (Introduction::decode(content), self.side) {
            (Ok(theirs), _) => theirs,
            // A program of another version learns of this one's.
            (Err(error @ IntroductionError::NoSharedVersion { .. }), Side::Listener) => {
                let send = introduction(&self.own_bytes);
                return Ok(HandshakeStep::Refused { send, error: error.into() });
            }
            (Err(error), _) => return Err(error.into()),
        };
        let mut send = Vec::new();
        if self.side == Side::Listener {
            self.own.protection = self.tls.answered(self.from, theirs.protection);
            self.own_bytes = self.own.encode()?;
            send = introduction(&self.own_bytes);
        }
        let (own, theirs_too) = (self.own.protection, theirs.protection);
        self.theirs = Some((theirs, content.to_vec()));
        if own != theirs_too {
            let error = HandshakeError::Protection { own, theirs: theirs_too };
            return Ok(HandshakeStep::Refused { send, error });
        }
        if own != Protection::Clear {
            return Ok(HandshakeStep::Secure(send));
        }
        send.append(&mut self.protected()?);
        Ok(HandshakeStep::Continue(send))
    }

    /// TLS has begun, with this [binding](pleach_transport::tls::Session::binding).
    pub(crate) fn secured(&mut self, binding: [u8; 32]) -> HandshakeStep {
        self.binding = Some(binding);
        let send = self.protected().map(HandshakeStep::Continue);
        send.unwrap_or_else(|error| HandshakeStep::Refused { send: Vec::new(), error })
    }

    /// What an end sends when the connection is as both want it.
    fn protected(&self) -> Result<Vec<u8>, HandshakeError> {
        if self.side == Side::Listener {
            return Ok(Vec::new());
        }
        let (challenges, claim) = self.claim()?;
        let proof = challenges.answer(self.secret.as_ref(), &claim);
        Ok(frame::encode(FrameKind::Proof, &proof))
    }

    fn proved(&mut self, content: &[u8]) -> Result<HandshakeStep, HandshakeError> {
        if self.own.protection != Protection::Clear && self.binding.is_none() {
            return Err(HandshakeError::Protocol);
        }
        let proof: &[u8; TAG_BYTES] = content.try_into().map_err(|_| HandshakeError::Protocol)?;
        let (challenges, mut claim) = self.claim()?;
        let (code, error) = if !challenges.verify(self.secret.as_ref(), &claim, proof) {
            (WRONG_SECRET, HandshakeError::WrongSecret)
        } else if !self.has_room {
            (FULL, HandshakeError::Full)
        } else {
            claim.extend(self.link.0.to_le_bytes());
            let proof = challenges.answer(self.secret.as_ref(), &claim);
            let verdict = [&[ACCEPTED][..], &proof, &self.link.0.to_le_bytes()].concat();
            return Ok(HandshakeStep::Done {
                send: frame::encode(FrameKind::Verdict, &verdict),
                link: self.link,
            });
        };
        let mut verdict = [0; VERDICT_BYTES];
        verdict[0] = code;
        Ok(HandshakeStep::Refused { send: frame::encode(FrameKind::Verdict, &verdict), error })
    }

    fn judged(&mut self, content: &[u8]) -> Result<HandshakeStep, HandshakeError> {
        let (&[code], rest) = content.split_first_chunk().ok_or(HandshakeError::Protocol)?;
        let (proof, link) = rest.split_first_chunk::<TAG_BYTES>().ok_or(HandshakeError::Protocol)?;
        let link: [u8; 8] = link.try_into().map_err(|_| HandshakeError::Protocol)?;
        match code {
            ACCEPTED => {}
            WRONG_SECRET => return Err(HandshakeError::WrongSecret),
            FULL => return Err(HandshakeError::Full),
            _ => return Err(HandshakeError::Protocol),
        }
        let (challenges, mut claim) = self.claim()?;
        claim.extend(link);
        if !challenges.verify(self.secret.as_ref(), &claim, proof) {
            return Err(HandshakeError::WrongSecret);
        }
        Ok(HandshakeStep::Done { send: Vec::new(), link: LinkId(u64::from_le_bytes(link)) })
    }

    /// The challenges of both ends; both introductions, the dialer's first, and what binds them to
    /// the connection.
    fn claim(&self) -> Result<(Challenges, Vec<u8>), HandshakeError> {
        let (theirs, their_bytes) = self.theirs.as_ref().ok_or(HandshakeError::Protocol)?;
        let challenges = Challenges::new(self.side, self.own.challenge, theirs.challenge);
        let (first, second) = match self.side {
            Side::Dialer => (&self.own_bytes, their_bytes),
            Side::Listener => (their_bytes, &self.own_bytes),
        };
        let binding = self.binding.as_ref().map_or(&[][..], |binding| binding);
        Ok((challenges, [&first[..], second, binding].concat()))
    }
}

/// No TLS.
fn off() -> Tls {
    Tls::new(TlsMode::Off, None).expect("takes no file")
}

/// Gives bytes to both ends as frames, for fuzzing: no panic, and no link.
pub(crate) fn check(bytes: &[u8]) {
    let own = Introduction {
        host: [1; 16],
        incarnation: 7,
        fabrics: Fabrics::default(),
        address: Address("127.0.0.1:1".to_owned()),
        challenge: challenge(),
        protection: Protection::Clear,
    };
    let (tls, from) = (off(), IpAddr::from([127, 0, 0, 1]));
    let listener = Handshake::listen(own.clone(), None, tls.clone(), from, LinkId(9));
    let dialer = Handshake::dial(own, None, tls, from).map(|(dialer, _)| dialer);
    for mut end in [listener, dialer].into_iter().flatten() {
        let mut rest = bytes;
        while let Some((header, behind)) = rest.split_first_chunk::<{ frame::HEADER_BYTES }>()
            && let Ok((kind, length)) = frame::decode(*header)
            && let Some((content, others)) = behind.split_at_checked(length)
        {
            rest = others;
            match end.received(kind, content) {
                HandshakeStep::Continue(_) => {}
                HandshakeStep::Secure(_) => panic!("this end speaks no TLS"),
                HandshakeStep::Refused { .. } => break,
                HandshakeStep::Done { .. } => panic!("a proof over random bytes was guessed"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            host: [1; 16],
            incarnation: 7,
            fabrics: Fabrics::default(),
            address: Address("127.0.0.1:1".to_owned()),
            challenge: challenge(),
            protection: Protection::Clear,
        }
    }

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn secret(text: &str) -> Option<Secret> {
        (!text.is_empty()).then(|| Secret::new(text.as_bytes()))
    }

    /// Both ends' results.
    fn shake(dialers: &str, listeners: &str, has_room: bool) -> [Result<LinkId, HandshakeError>; 2] {
        shake_over([off(), off()], [[0; 32]; 2], [dialers, listeners], has_room)
    }

    /// Of the dialer and of the listener, where the key that the listener shows comes to each end
    /// as such a binding.
    fn shake_over(
        [dialers, listeners]: [Tls; 2],
        bindings: [[u8; 32]; 2],
        secrets: [&str; 2],
        has_room: bool,
    ) -> [Result<LinkId, HandshakeError>; 2] {
        let [own, other] = secrets.map(secret);
        let (dialer, first) = Handshake::dial(introduction(), own, dialers, HERE).expect("a good address");
        let listener = Handshake::listen(introduction(), other, listeners, HERE, LinkId(9));
        let mut ends = [dialer, listener.expect("a good address")];
        ends[1].set_has_room(has_room);
        let mut results = [None, None];
        let (mut bytes, mut at) = (first, 1);
        while !bytes.is_empty() {
            let (header, content) = bytes.split_first_chunk().expect("a frame");
            let (kind, length) = frame::decode(*header).expect("a good header");
            assert_eq!(content.len(), length);
            let step = match ends[at].received(kind, content) {
                // The listener sends its introduction, and the dialer begins.
                HandshakeStep::Secure(send) if at == 1 => {
                    assert_eq!(ends[1].secured(bindings[1]), HandshakeStep::Continue(Vec::new()));
                    HandshakeStep::Continue(send)
                }
                HandshakeStep::Secure(send) => {
                    assert!(send.is_empty());
                    ends[0].secured(bindings[0])
                }
                step => step,
            };
            (bytes, results[at]) = match step {
                HandshakeStep::Secure(_) => panic!("it is over"),
                HandshakeStep::Continue(send) => (send, None),
                HandshakeStep::Done { send, link } => (send, Some(Ok(link))),
                HandshakeStep::Refused { send, error } => (send, Some(Err(error))),
            };
            at = 1 - at;
        }
        results.map(|result| result.unwrap_or(Err(HandshakeError::Protocol)))
    }

    #[test]
    fn both_ends_have_the_link_when_both_have_the_secret_or_none() {
        for secret in ["", "0123456789abcdef"] {
            assert_eq!(shake(secret, secret, true), [Ok(LinkId(9)); 2]);
        }
    }

    #[test]
    fn a_program_with_another_secret_or_none_is_refused_and_told() {
        for (one, other) in [("", "0123456789abcdef"), ("0123456789abcdef", ""), ("0123456789abcdef", "f")] {
            assert_eq!(shake(one, other, true), [Err(HandshakeError::WrongSecret); 2]);
        }
        assert_eq!(shake("", "", false), [Err(HandshakeError::Full); 2]);
    }

    #[test]
    fn a_proof_holds_on_its_connection_alone() {
        let on = || Tls::new(TlsMode::On, None).expect("needs no file");
        let known = "0123456789abcdef";
        assert_eq!(shake_over([on(), on()], [[7; 32]; 2], [known; 2], true), [Ok(LinkId(9)); 2]);
        // Somebody between two handshakes has to show another key than the listener's.
        let caught = shake_over([on(), on()], [[7; 32], [8; 32]], [known; 2], true);
        assert_eq!(caught, [Err(HandshakeError::WrongSecret); 2]);
        // A listener on loopback that asks for nothing takes a dialer that does.
        let auto = || Tls::new(TlsMode::Auto, None).expect("needs no file");
        assert_eq!(shake_over([on(), auto()], [[7; 32]; 2], [known; 2], true), [Ok(LinkId(9)); 2]);
    }

    #[test]
    fn programs_of_which_one_wants_no_tls_are_both_told() {
        let on = Tls::new(TlsMode::On, None).expect("needs no file");
        let differ = |own, theirs| Err(HandshakeError::Protection { own, theirs });
        let (clear, secret) = (Protection::Clear, Protection::Secret);
        for (ends, seen) in [
            ([off(), on.clone()], [differ(clear, secret), differ(secret, clear)]),
            ([on, off()], [differ(secret, clear), differ(clear, secret)]),
        ] {
            assert_eq!(shake_over(ends, [[7; 32]; 2], ["0123456789abcdef"; 2], true), seen);
        }
        let text = HandshakeError::Protection { own: secret, theirs: clear }.to_string();
        assert!(text.starts_with("it speaks no TLS on this link and this program speaks TLS"), "{text}");
        assert!(text.contains("PLEACH_TLS") && text.contains("PLEACH_SECRET_FILE"), "{text}");
    }

    #[test]
    fn frames_out_of_turn_and_other_bytes_end_the_handshake() {
        let refused = |error| HandshakeStep::Refused { send: Vec::new(), error };
        let listener = Handshake::listen(introduction(), None, off(), HERE, LinkId(9));
        let mut listener = listener.expect("a good address");
        assert_eq!(listener.received(FrameKind::Proof, &[0; 32]), refused(HandshakeError::Protocol));
        let unknown = refused(HandshakeError::Introduction(IntroductionError::Unknown));
        assert_eq!(listener.received(FrameKind::Introduction, b"GET / HTTP/1.1"), unknown);
        let (mut dialer, _) = Handshake::dial(introduction(), None, off(), HERE).expect("a good address");
        let own = introduction().encode().expect("a good address");
        assert!(matches!(dialer.received(FrameKind::Introduction, &own), HandshakeStep::Continue(_)));
        for verdict in [&[][..], &[0; 40], &[9; 41]] {
            assert_eq!(dialer.received(FrameKind::Verdict, verdict), refused(HandshakeError::Protocol));
        }
        let forged = dialer.received(FrameKind::Verdict, &[0; 41]);
        assert_eq!(forged, refused(HandshakeError::WrongSecret));
    }
}
