//! Handshakes of connections that speak TLS, between two ends in memory.

use std::net::{IpAddr, Ipv4Addr};

use super::handshake::{EndRanks, Handshake, Identity, Progress, Role};
use crate::auth::Secret;
use crate::device::{Incarnation, Protection, ProtocolViolation};
use crate::tls::{Session, Tls, TlsHandshake, TlsMode};

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Where a hello says how its sender protects the connection.
const PROTECTION_AT: usize = 11;

fn identity(rank: u32, mode: TlsMode) -> Identity {
    let tls = Tls::new(mode, None).expect("needs no file");
    Identity {
        rank,
        world_size: 2,
        data_connections: 0,
        signal_slots: 1,
        process: 7,
        incarnation: Incarnation::fresh(),
        host: [0; 16],
        secret: Some(Secret::new(b"known to both ends").with_tls(tls)),
    }
}

fn ends(modes: [TlsMode; 2]) -> [Handshake; 2] {
    let [high, low] = [(1, modes[0]), (0, modes[1])].map(|(rank, mode)| identity(rank, mode));
    let ranks = EndRanks { dialer: 1, listener: 0, share_world: true };
    let asked = high.asked(NEAR);
    [Handshake::dial(&high, (Role::Control, 0), ranks, 5, asked), Handshake::listen(&low, NEAR)]
}

/// Gives bytes to an end as a socket does, until it comes to a result.
fn feed(end: &mut Handshake, mut bytes: &[u8]) -> Progress {
    while !bytes.is_empty() {
        let room = end.room();
        let count = room.len().min(bytes.len());
        assert!(count > 0, "bytes came that no message needs");
        room[..count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
        match end.received(count) {
            Progress::Pending => {}
            Progress::AwaitsAdmission(_) => return end.admit(Ok(())),
            progress => return progress,
        }
    }
    Progress::Pending
}

fn said(end: &mut Handshake) -> Vec<u8> {
    std::mem::take(end.outgoing())
}

/// What two ends come to; `change` may change the hellos on their way.
fn shake([dialer, listener]: &mut [Handshake; 2], change: impl Fn(&mut Vec<u8>)) -> [Progress; 2] {
    let mut results = [Progress::Pending; 2];
    for turn in 0.. {
        let mut to_listener = said(dialer);
        if turn == 0 {
            change(&mut to_listener);
        }
        if results[1] == Progress::Pending {
            results[1] = feed(listener, &to_listener);
        }
        let mut to_dialer = said(listener);
        if turn == 0 {
            change(&mut to_dialer);
        }
        if to_listener.is_empty() && to_dialer.is_empty() {
            return results;
        }
        if results[0] == Progress::Pending {
            results[0] = feed(dialer, &to_dialer);
        }
    }
    unreachable!("no handshake goes on for ever")
}

fn open(session: &mut Session, sealed: &[u8]) -> Vec<u8> {
    let room = session.reader().room(1);
    room[..sealed.len()].copy_from_slice(sealed);
    session.reader().received(sealed.len());
    session.reader().plain().expect("what the other end has sealed").to_vec()
}

#[test]
fn ends_that_both_want_tls_have_keys_of_one_connection() {
    let mut ends = ends([TlsMode::On, TlsMode::Auto]);
    let results = shake(&mut ends, |_| {});
    assert!(results.iter().all(|result| matches!(result, Progress::Done(_))), "{results:?}");
    let [mut high, mut low] = ends.map(|mut end| end.take_session().expect("keys"));
    high.writer().seal(b"a frame");
    assert_eq!(open(&mut low, &high.writer().take_waiting()), b"a frame");
}

#[test]
fn ends_in_clear_have_no_keys() {
    for modes in [[TlsMode::Off; 2], [TlsMode::Auto; 2]] {
        let mut ends = ends(modes);
        let results = shake(&mut ends, |_| {});
        assert!(results.iter().all(|result| matches!(result, Progress::Done(_))), "{results:?}");
        assert!(ends.iter_mut().all(|end| end.take_session().is_none()));
    }
}

/// The failure at both ends: what this one wants, and what it sees of the other.
fn differ(results: [Progress; 2], protections: [[Protection; 2]; 2]) {
    for (result, [own, theirs]) in results.into_iter().zip(protections) {
        let violation = ProtocolViolation::Protection { own, theirs };
        assert!(matches!(result, Progress::Failed(of, Some(_)) if of == violation), "{result:?}");
        let text = violation.to_string();
        assert!(text.contains("speaks no TLS") && text.contains("PLEACH_TLS"), "{text}");
    }
}

#[test]
fn ends_that_want_different_things_both_say_so() {
    let (clear, secret) = (Protection::Clear, Protection::Secret);
    let results = shake(&mut ends([TlsMode::On, TlsMode::Off]), |_| {});
    differ(results, [[secret, clear], [clear, secret]]);
    let results = shake(&mut ends([TlsMode::Off, TlsMode::Require]), |_| {});
    differ(results, [[clear, secret], [secret, clear]]);
}

#[test]
fn nobody_in_between_takes_tls_away() {
    let (clear, secret) = (Protection::Clear, Protection::Secret);
    let change = |hello: &mut Vec<u8>| hello[PROTECTION_AT] = 0;
    let results = shake(&mut ends([TlsMode::On, TlsMode::On]), change);
    differ(results, [[secret, clear], [secret, clear]]);
    // The listener would do without, and nothing tells it; the dialer goes no further.
    let [dialer, listener] = shake(&mut ends([TlsMode::On, TlsMode::Auto]), change);
    let violation = ProtocolViolation::Protection { own: secret, theirs: clear };
    assert!(matches!(dialer, Progress::Failed(of, Some(0)) if of == violation), "{dialer:?}");
    assert_eq!(listener, Progress::Pending, "nothing was proved to it");
}

/// Carries a handshake of TLS between an end and somebody in between; returns the latter's keys.
fn stand_in(mut own: TlsHandshake, end: &mut Handshake, mut heard: Vec<u8>) -> (Session, Vec<u8>) {
    loop {
        let mut is_done = false;
        let mut bytes = &heard[..];
        while !bytes.is_empty() && !is_done {
            let room = own.room();
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            is_done = own.received(count).expect("any key is taken");
        }
        let rest = bytes.to_vec();
        let outgoing = own.take_outgoing();
        assert_eq!(feed(end, &outgoing), Progress::Pending);
        if is_done {
            return (own.finish().expect("keys"), rest);
        }
        heard = said(end);
    }
}

#[test]
fn nobody_in_between_stands_between_two_handshakes_of_tls() {
    let own = Tls::new(TlsMode::On, None).expect("needs no file");
    let [mut dialer, mut listener] = ends([TlsMode::On, TlsMode::On]);
    // The hellos pass unchanged; then each end speaks TLS with whoever is in between.
    assert_eq!(feed(&mut listener, &said(&mut dialer)), Progress::Pending);
    assert_eq!(feed(&mut dialer, &said(&mut listener)), Progress::Pending);
    let hello = said(&mut dialer);
    let (mut to_dialer, rest) = stand_in(own.listen().expect("keys"), &mut dialer, hello);
    let (mut to_listener, _) = stand_in(own.dial().expect("keys"), &mut listener, Vec::new());
    let sealed = if rest.is_empty() { said(&mut dialer) } else { rest };
    let answer = open(&mut to_dialer, &sealed);
    to_listener.writer().seal(&answer);
    let refused = feed(&mut listener, &to_listener.writer().take_waiting());
    assert_eq!(refused, Progress::Failed(ProtocolViolation::WrongSecret, Some(1)));
    let verdict = open(&mut to_listener, &said(&mut listener));
    to_dialer.writer().seal(&verdict);
    let refused = feed(&mut dialer, &to_dialer.writer().take_waiting());
    assert_eq!(refused, Progress::Failed(ProtocolViolation::WrongSecret, Some(0)));
}
