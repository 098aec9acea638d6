//! Handshakes and records between two ends in memory, and rustls' own records as the measure.

use std::io::Read;

use super::record::RECORD_OVERHEAD_BYTES;
use super::*;

fn fresh() -> Tls {
    Tls::new(TlsMode::On, None).expect("needs no file")
}

fn certified(name: &str, authority: &str) -> Tls {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
    let file = |name: String| folder.join(name);
    let files = CertificateFiles {
        certificate: file(format!("{name}.pem")),
        key: file(format!("{name}.key")),
        authority: file(format!("{authority}.pem")),
    };
    Tls::new(TlsMode::On, Some(&files)).expect("the files fit each other")
}

/// Gives bytes to an end as a socket does; whether its handshake is done.
fn feed(end: &mut TlsHandshake, mut bytes: &[u8]) -> Result<bool, TlsFault> {
    let mut is_done = false;
    while !bytes.is_empty() && !is_done {
        let room = end.room();
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        bytes = &bytes[count..];
        is_done = end.received(count)?;
    }
    assert!(bytes.is_empty(), "nothing is sent before the keys are there");
    Ok(is_done)
}

/// A handshake; what each end comes to, and the last bytes of the listener.
fn shake(dialer: &Tls, listener: &Tls) -> ([Result<Session, TlsFault>; 2], Vec<u8>) {
    let (mut low, mut high) = (dialer.dial().expect("has keys"), listener.listen().expect("has keys"));
    assert_eq!(feed(&mut high, &low.take_outgoing()), Ok(false));
    let seen = feed(&mut low, &high.take_outgoing());
    let last = low.take_outgoing();
    let answered = feed(&mut high, &last);
    let end = |seen: Result<bool, _>, end: TlsHandshake| match seen {
        Ok(is_done) => {
            assert!(is_done, "one round trip is enough");
            end.finish()
        }
        Err(violation) => Err(violation),
    };
    let alert = high.take_outgoing();
    ([end(seen, low), end(answered, high)], alert)
}

pub(crate) fn sessions() -> [Session; 2] {
    let (ends, _) = shake(&fresh(), &fresh());
    ends.map(|end| end.expect("both are as they should be"))
}

/// Gives records to a reader; all that it opens.
fn open(reader: &mut TlsReader, mut sealed: &[u8]) -> Result<Vec<u8>, TlsFault> {
    let mut opened = Vec::new();
    loop {
        let plain = reader.plain()?;
        let count = plain.len();
        opened.extend_from_slice(plain);
        reader.take(count);
        if count > 0 {
            continue;
        }
        if sealed.is_empty() {
            return Ok(opened);
        }
        let room = reader.room(1);
        let count = room.len().min(sealed.len());
        room[..count].copy_from_slice(&sealed[..count]);
        reader.received(count);
        sealed = &sealed[count..];
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 256) as u8).collect()
}

#[test]
fn what_one_end_seals_the_other_opens_and_nobody_else_reads() {
    let [low, high] = sessions();
    assert_eq!(low.binding(), high.binding());
    let ((mut low_writer, mut low_reader), (mut high_writer, mut high_reader)) = (low.split(), high.split());
    for len in [1, 8, 16 << 10, (16 << 10) + 1, 100_000] {
        let sent = pattern(len);
        for (from, to) in [(&mut low_writer, &mut high_reader), (&mut high_writer, &mut low_reader)] {
            from.seal(&sent);
            let sealed = from.take_waiting();
            assert_eq!(sealed.len(), len + len.div_ceil(PLAIN_BYTES_MAX) * RECORD_OVERHEAD_BYTES);
            assert!(len < 8 || !sealed.windows(8).any(|window| window == &sent[..8]));
            assert_eq!(open(to, &sealed), Ok(sent.clone()));
        }
    }
}

#[test]
fn records_that_were_changed_left_out_repeated_or_moved_are_found_out() {
    let tampered = Err(TlsFault::Tampered);
    let seal = |session: &mut Session, bytes: &[u8]| {
        session.writer().seal(bytes);
        session.writer().take_waiting()
    };
    for bit in 0..8 * (RECORD_OVERHEAD_BYTES + 6) {
        let [mut low, mut high] = sessions();
        let mut sealed = seal(&mut low, b"signal");
        sealed[bit / 8] ^= 1 << (bit % 8);
        // A length that has grown waits for bytes that do not come, and gives none out.
        let opened = open(high.reader(), &sealed);
        assert!(opened == tampered || opened == Ok(Vec::new()), "bit {bit}: {opened:?}");
    }
    let [mut low, mut high] = sessions();
    let (first, second) = (seal(&mut low, b"first"), seal(&mut low, b"second"));
    assert_eq!(open(high.reader(), &first[..first.len() - 1]), Ok(Vec::new()), "a part gives nothing");
    assert_eq!(open(high.reader(), &first[first.len() - 1..]), Ok(b"first".to_vec()));
    assert_eq!(open(high.reader(), &first), tampered, "a record comes once");
    let [mut low, mut high] = sessions();
    let _ = seal(&mut low, b"first");
    assert_eq!(open(high.reader(), &second), tampered, "another connection has other keys");
    let second = seal(&mut low, b"second");
    assert_eq!(open(high.reader(), &second), tampered, "the first was left out");
    let [mut low, _] = sessions();
    let sealed = seal(&mut low, b"own");
    assert_eq!(open(low.reader(), &sealed), tampered, "an end does not take its own records");
}

/// Whoever reads as long as bytes come reads nothing without end.
#[test]
fn records_that_give_nothing_end_the_connection() {
    let no_data = Err(TlsFault::NoData);
    let [mut low, mut high] = sessions();
    low.writer().seal(b"first");
    low.writer().seal_record(0, |_| {});
    let sealed = low.writer().take_waiting();
    let (first, empty) = sealed.split_at(b"first".len() + RECORD_OVERHEAD_BYTES);
    assert_eq!(empty.len(), RECORD_OVERHEAD_BYTES);
    assert_eq!(open(high.reader(), first), Ok(b"first".to_vec()));
    assert_eq!(open(high.reader(), empty), no_data);
    // A key that has opened nothing is not changed.
    let [mut low, mut high] = sessions();
    low.writer().set_records_a_key(0);
    low.writer().seal(b"first");
    assert_eq!(open(high.reader(), &low.writer().take_waiting()), no_data);
    // With each record it may be, as then something comes with each.
    let [mut low, mut high] = sessions();
    low.writer().seal(b"one ");
    low.writer().set_records_a_key(0);
    low.writer().seal(b"two ");
    low.writer().seal(b"three");
    assert_eq!(open(high.reader(), &low.writer().take_waiting()), Ok(b"one two three".to_vec()));
}

#[test]
fn keys_have_successors_in_both_directions_and_rustls_reads_them() {
    let listener = fresh();
    let server = listener.ends.as_ref().expect("is on").server();
    let mut theirs = rustls::ServerConnection::new(server).expect("a configuration");
    let mut ours = fresh().dial().expect("has keys");
    let mut is_done = false;
    while !is_done {
        theirs.read_tls(&mut &ours.take_outgoing()[..]).expect("bytes");
        theirs.process_new_packets().expect("a handshake");
        let mut answer = Vec::new();
        while theirs.wants_write() {
            theirs.write_tls(&mut answer).expect("room");
        }
        is_done = feed(&mut ours, &answer).expect("a handshake");
    }
    theirs.read_tls(&mut &ours.take_outgoing()[..]).expect("bytes");
    theirs.process_new_packets().expect("the end of the handshake");
    assert!(!theirs.is_handshaking());
    let mut ours = ours.finish().expect("keys");
    ours.writer().set_records_a_key(3);
    let sent = pattern(300_000);
    ours.writer().seal(&sent);
    let sealed = ours.writer().take_waiting();
    let (mut rest, mut got) = (&sealed[..], Vec::new());
    while !rest.is_empty() {
        theirs.read_tls(&mut rest).expect("room");
        theirs.process_new_packets().expect("records");
        let mut buffer = vec![0; 1 << 20];
        if let Ok(count) = theirs.reader().read(&mut buffer) {
            got.extend_from_slice(&buffer[..count]);
        }
    }
    assert!(got == sent, "rustls opens what was sealed here, under {} keys", 300_000_usize.div_ceil(3 << 14));
    // rustls asks for keys in return, which no end here does: these read each other's.
    let ((mut low_writer, mut low_reader), (mut high_writer, mut high_reader)) = {
        let [low, high] = sessions();
        (low.split(), high.split())
    };
    for (from, to) in [(&mut low_writer, &mut high_reader), (&mut high_writer, &mut low_reader)] {
        from.set_records_a_key(3);
        from.seal(&sent);
        assert!(open(to, &from.take_waiting()).as_ref() == Ok(&sent));
    }
}

#[test]
fn certificates_are_those_of_the_authority_and_not_expired() {
    let rank = || certified("rank", "authority");
    let fault = |fault| Err::<(), _>(fault);
    let (ends, _) = shake(&rank(), &rank());
    let [low, high] = ends.map(|end| end.expect("both are as they should be"));
    assert_eq!(low.binding(), high.binding());
    for (bad, at_other, at_own) in [
        (certified("expired", "authority"), TlsFault::Expired, TlsFault::OwnExpired),
        (certified("foreign", "authority"), TlsFault::Foreign, TlsFault::OwnRefused),
    ] {
        // As a listener: the dialer turns it away, and tells it why.
        let ([low, high], _) = shake(&rank(), &bad);
        assert_eq!((low.map(drop), high.map(drop)), (fault(at_other), fault(at_own)));
        // As a dialer, which has its keys before the listener has looked at its certificate.
        let ([low, high], alert) = shake(&bad, &rank());
        assert_eq!(high.map(drop), fault(at_other));
        let mut low = low.expect("the listener is as it should be");
        assert_eq!(open(low.reader(), &alert).map(drop), fault(at_own));
    }
}

#[test]
fn files_that_do_not_fit_are_refused_with_their_names() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
    let tls = |certificate: &str, key: &str, authority: &str| {
        let [certificate, key, authority] = [certificate, key, authority].map(|name| folder.join(name));
        let files = CertificateFiles { certificate, key, authority };
        Tls::new(TlsMode::On, Some(&files)).expect_err("one is wrong").to_string()
    };
    for (error, names) in [
        (tls("absent.pem", "rank.key", "authority.pem"), ["PLEACH_TLS_CERT", "absent.pem"]),
        (tls("rank.key", "rank.key", "authority.pem"), ["PLEACH_TLS_CERT", "no certificate"]),
        (tls("rank.pem", "rank.pem", "authority.pem"), ["PLEACH_TLS_KEY", "rank.pem"]),
        (tls("rank.pem", "foreign.key", "authority.pem"), ["PLEACH_TLS_KEY", "foreign.key"]),
        (tls("rank.pem", "rank.key", "rank.key"), ["PLEACH_TLS_CA", "rank.key"]),
    ] {
        assert!(names.iter().all(|name| error.contains(name)), "{error}: {names:?}");
    }
}

#[test]
fn variables_say_when_and_with_which_keys() {
    let told = |pairs: &[(&'static str, &str)]| {
        parse(|name| pairs.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned()))
    };
    assert_eq!(told(&[]), Ok((TlsMode::Auto, None)));
    for (text, mode) in
        [("off", TlsMode::Off), ("on", TlsMode::On), ("require", TlsMode::Require), ("", TlsMode::Auto)]
    {
        assert_eq!(told(&[("PLEACH_TLS", text)]), Ok((mode, None)));
    }
    let bad = told(&[("PLEACH_TLS", "yes")]).expect_err("no mode").to_string();
    assert!(bad.contains("PLEACH_TLS='yes'") && bad.contains("off, on or require"), "{bad}");
    let half = told(&[("PLEACH_TLS_CERT", "c"), ("PLEACH_TLS_CA", "a")]);
    assert_eq!(half, Err(TlsError::Incomplete { present: "PLEACH_TLS_CERT", absent: "PLEACH_TLS_KEY" }));
    let all = told(&[("PLEACH_TLS_CERT", "c"), ("PLEACH_TLS_KEY", "k"), ("PLEACH_TLS_CA", "a")]);
    let files = CertificateFiles { certificate: "c".into(), key: "k".into(), authority: "a".into() };
    assert_eq!(all, Ok((TlsMode::Auto, Some(files))));
}

#[test]
fn tls_is_on_off_loopback_and_a_dialer_on_loopback_may_choose_it() {
    let [near, far]: [IpAddr; 2] = ["127.0.0.1", "10.1.2.3"].map(|text| text.parse().expect("an address"));
    let mapped: IpAddr = "::ffff:127.0.0.1".parse().expect("an address");
    let (clear, secret) = (Protection::Clear, Protection::Secret);
    let of = |mode| Tls::new(mode, None).expect("needs no file");
    for (mode, asked_near, asked_far) in [
        (TlsMode::Auto, clear, secret),
        (TlsMode::Off, clear, clear),
        (TlsMode::On, secret, secret),
        (TlsMode::Require, secret, secret),
    ] {
        let tls = of(mode);
        assert_eq!([tls.asked(near), tls.asked(mapped), tls.asked(far)], [asked_near, asked_near, asked_far]);
        assert_eq!(tls.answered(near, clear), asked_near);
        assert_eq!(tls.answered(far, clear), asked_far);
        assert_eq!(tls.answered(near, secret), if mode == TlsMode::Off { clear } else { secret });
    }
}

#[test]
fn bytes_that_are_no_handshake_fail_it_and_nothing_else() {
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[22, 3, 3, 0, 5, 1, 2, 3, 4, 5],
        &[22, 3, 1, 0, 0],
        &[23, 3, 3, 0, 1, 0],
        &[21, 3, 3, 0, 2, 2, 40],
        &[20, 3, 3, 0, 1, 1],
        &[22, 3, 3, 0, 4, 99, 0, 0, 0],
        &[0; 64],
    ] {
        let mut ends = [fresh().dial().expect("has keys"), fresh().listen().expect("has keys")];
        for end in &mut ends {
            let mut rest = garbage;
            while !rest.is_empty() {
                let room = end.room();
                let count = room.len().min(rest.len());
                room[..count].copy_from_slice(&rest[..count]);
                rest = &rest[count..];
                match end.received(count) {
                    Ok(is_done) => assert!(!is_done, "{garbage:?}"),
                    Err(_) => break,
                }
            }
        }
    }
    // Each byte of a hello changed: the listener fails or goes on, and never panics.
    let hello = fresh().dial().expect("has keys").take_outgoing();
    let listener = fresh();
    for at in 0..hello.len() {
        let mut changed = hello.clone();
        changed[at] ^= 0x41;
        let mut end = listener.listen().expect("has keys");
        let mut rest = &changed[..];
        while !rest.is_empty() {
            let room = end.room();
            let count = room.len().min(rest.len());
            if count == 0 {
                break;
            }
            room[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            if end.received(count).is_err() {
                break;
            }
        }
    }
}
