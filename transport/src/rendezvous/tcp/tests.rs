use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::other_user::{NOBODY, as_nobody, can_act_as_nobody};
use crate::ports;
use crate::rendezvous::{Fabric, FabricChoice, JoinOptions, World, join_at};

/// A port nobody has.
fn free_address() -> String {
    format!("127.0.0.1:{}", ports::reserve(1))
}

fn soon() -> Nanos {
    now() + Duration::from_secs(1)
}

fn late() -> Nanos {
    now() + Duration::from_secs(60)
}

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes())
}

fn open(
    address: &str,
    rank: Rank,
    secret: Option<&Secret>,
    deadline: Nanos,
) -> Result<TcpStore, OpenStoreError> {
    TcpStore::open(address, rank, 3, secret, deadline)
}

fn error(opened: Result<TcpStore, OpenStoreError>) -> OpenStoreError {
    opened.err().expect("does not open")
}

#[test]
fn ranks_that_start_before_rank_0_wait_for_it_and_all_read_what_each_wrote() {
    let address = free_address();
    let keys = ["rank/0", "rank/1", "rank/2"].map(str::to_owned);
    thread::scope(|scope| {
        for rank in [2, 1, 0] {
            let (address, keys) = (&address, &keys);
            scope.spawn(move || {
                let mut store = open(address, rank, None, late()).expect("opens");
                store.set(&keys[rank as usize], &[rank as u8; 300], late()).expect("set");
                let values = store.wait(keys, late(), late()).expect("all come");
                assert_eq!(values, [[0; 300], [1; 300], [2; 300]]);
                store.set(&format!("end/{rank}"), b"", late()).expect("set");
                if rank == 0 {
                    store.wait(&["end/1".to_owned(), "end/2".to_owned()], late(), late()).expect("all end");
                }
            });
        }
    });
}

#[test]
fn of_several_claims_one_succeeds_and_the_others_learn_its_value() {
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    let mut one = open(&address, 1, None, late()).expect("opens");
    assert_eq!(one.claim("rank/1", b"a", late()).expect("claims"), Claim::Taken);
    assert_eq!(zero.claim("rank/1", b"b", late()).expect("claims"), Claim::Present(b"a".to_vec()));
}

#[test]
fn a_wait_ends_at_its_deadline_and_names_what_is_missing_and_who_was_refused() {
    let address = free_address();
    let mut zero = open(&address, 0, Some(&secret("right right right")), late()).expect("opens");
    let refused = error(open(&address, 1, Some(&secret("wrong wrong wrong")), late()));
    assert!(matches!(refused, OpenStoreError::WrongSecret { .. }), "{refused}");
    assert!(matches!(error(open(&address, 1, None, late())), OpenStoreError::WrongSecret { .. }));
    zero.set("rank/0", b"", late()).expect("set");
    let keys = ["rank/0", "rank/1"].map(str::to_owned);
    let Err(StoreError::Missing { keys, refused, .. }) = zero.wait(&keys, soon(), late()) else {
        panic!("rank 1 is missing")
    };
    assert_eq!(keys, ["rank/1"]);
    assert!(refused.expect("somebody was").contains("rank 1 from 127.0.0.1 has a wrong secret"));
}

/// A process that is stopped, or gets no processor, runs again behind the deadlines of its waits.
#[test]
fn what_was_answered_while_this_process_did_not_run_is_read_and_a_silent_store_is_given_up() {
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    zero.set("rank/0", b"here", late()).expect("set");
    let long_ago = Nanos(now().0 - 1_000_000_000);
    let key = |rank: Rank| [format!("rank/{rank}")];
    assert_eq!(zero.wait(&key(0), long_ago, long_ago).expect("is there"), [b"here"]);
    let missing = zero.wait(&key(1), long_ago, long_ago).expect_err("is not there");
    assert!(matches!(missing, StoreError::Missing { .. }), "{missing}");
    let (address, server) = mute();
    let mut one = open(&address, 1, Some(&secret("right right right")), late()).expect("is let in");
    let lost = one.wait(&key(0), long_ago, long_ago).expect_err("says nothing");
    assert!(matches!(&lost, StoreError::Lost { source, .. } if source.kind() == io::ErrorKind::TimedOut));
    drop(server.join());
}

#[test]
fn one_that_fails_ends_the_waiting_of_all() {
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    let mut one = open(&address, 1, None, late()).expect("opens");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| zero.wait(&["rank/2".to_owned()], late(), late()));
        one.fail("rank 1 has no luck", late());
        let error = waiting.join().expect("ends").expect_err("fails");
        assert!(matches!(&error, StoreError::Failed { reason } if reason == "rank 1 has no luck"), "{error}");
    });
}

/// As by one that was stopped until after its deadline.
#[test]
fn a_rank_0_that_is_late_still_tells_why_it_fails() {
    for _ in 0..20 {
        let address = free_address();
        let mut zero = open(&address, 0, None, late()).expect("opens");
        let mut one = open(&address, 1, None, late()).expect("opens");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || one.wait(&["a".to_owned()], late(), late()));
            zero.fail("rank 0 has no luck", Nanos::ZERO);
            drop(zero);
            let error = waiting.join().expect("ends").expect_err("fails");
            assert!(matches!(error, StoreError::Failed { .. }), "{error}");
        });
    }
}

#[test]
fn ranks_see_that_rank_0_is_gone() {
    let address = free_address();
    let zero = open(&address, 0, None, late()).expect("opens");
    let mut one = open(&address, 1, None, late()).expect("opens");
    drop(zero);
    assert!(matches!(one.wait(&["a".to_owned()], late(), late()), Err(StoreError::Lost { .. })));
    let unreachable = error(open(&address, 1, None, soon()));
    assert!(matches!(unreachable, OpenStoreError::Unreachable { .. }), "{unreachable}");
}

#[test]
fn after_the_seal_who_comes_is_told_that_the_world_is_complete() {
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    let mut one = open(&address, 1, None, late()).expect("opens");
    one.seal(late());
    drop(open(&address, 2, None, late()).expect("only rank 0 seals"));
    zero.seal(late());
    let complete = error(open(&address, 2, None, now() + Duration::from_secs(3)));
    assert!(matches!(complete, OpenStoreError::Complete { .. }), "{complete}");
    one.set("rank/1", b"", late()).expect("who is in stays in");
}

#[test]
fn a_port_that_somebody_has_is_an_error_of_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    let error = error(open(&address, 0, None, late())).to_string();
    assert!(error.starts_with(&format!("port in use: rank 0 cannot listen on {address}")), "{error}");
}

#[test]
fn a_server_that_is_no_store_is_recognised_by_what_it_says() {
    for said in
        [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"SSH-2.0-x\r\n", b"P", b"\0\0\0\0", b"PLEACH STORE\r\n!"]
    {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("is bound").to_string();
        thread::scope(|scope| {
            scope.spawn(move || {
                // Answers one caller and hangs up; a lone beginning that could be ours is tried
                // again.
                let (mut stream, _) = listener.accept().expect("somebody comes");
                stream.write_all(said).expect("said");
                let _ = stream.read(&mut [0; 100]);
            });
            // Whatever is no store is told from one at once.
            let limit = if said == b"P" { soon() } else { late() };
            let error = error(open(&address, 1, None, limit));
            if said == b"P" {
                assert!(matches!(error, OpenStoreError::Unreachable { .. }), "{error}");
            } else {
                assert!(matches!(error, OpenStoreError::Foreign { .. }), "{error}");
                assert!(error.to_string().contains(&address));
            }
        });
    }
}

#[test]
fn a_server_that_says_nothing_is_given_up_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    let error = error(open(&address, 1, None, soon())).to_string();
    assert!(error.contains("says nothing"), "{error}");
}

#[test]
fn an_address_that_is_not_loopback_needs_a_secret() {
    for rank in [0, 1] {
        let error = error(open("192.0.2.1:4000", rank, None, soon()));
        assert!(matches!(error, OpenStoreError::SecretRequired { .. }), "{error}");
    }
}

/// Connects and proves a secret by hand, as a program that is not this one would; whether the store
/// lets it in.
fn is_let_in(address: &str, key: Option<&Secret>) -> bool {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let own = StoreHello { version: VERSION, protection: Protection::Clear, challenge: challenge() };
    stream.write_all(&own.encode()).expect("said");
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).expect("it answers");
    let theirs = StoreHello::decode(&bytes).expect("it is a store");
    let claim = Proof::claim(1, 3);
    let answer = Challenges::new(Side::Dialer, own.challenge, theirs.challenge).answer(key, &claim);
    stream.write_all(&Proof { rank: 1, world_size: 3, answer }.encode()).expect("said");
    let mut bytes = [0; VERDICT_BYTES];
    stream.read_exact(&mut bytes).expect("it answers");
    matches!(Verdict::decode(&bytes), Ok(Verdict::Welcome(_)))
}

#[test]
fn without_a_secret_who_only_knows_the_address_does_not_get_in() {
    let address = free_address();
    let _zero = open(&address, 0, None, late()).expect("opens");
    assert!(!is_let_in(&address, None) && !is_let_in(&address, Some(&Secret::fresh())));
    drop(open(&address, 1, None, late()).expect("a process of this user does"));
}

#[test]
fn without_a_secret_another_user_is_refused_on_both_sides() {
    if !can_act_as_nobody() {
        return;
    }
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    let refused = as_nobody(|| open(&address, 1, None, late()).map(drop).map_err(|error| error.to_string()));
    let expected = format!(
        "rendezvous of another user: {address} belongs to user 0, this process is of user 65534; \
         start all ranks as one user, or give all the same PLEACH_SECRET_FILE and meet at tcp://HOST:PORT"
    );
    assert_eq!(refused, Err(expected));
    let Err(StoreError::Missing { refused, .. }) = zero.wait(&["rank/1".to_owned()], soon(), late()) else {
        panic!("rank 1 is missing")
    };
    assert_eq!(refused.as_deref(), Some("a process of user 65534, this job is of user 0"));
    // Whoever the store is of, its user is named to those of another one.
    drop(zero);
    let oldest = as_nobody(|| open(&address, 0, None, late()).expect("opens as another user"));
    let error = error(open(&address, 1, None, late()));
    assert!(matches!(error, OpenStoreError::Owner { owner: NOBODY, user: 0, .. }), "{error}");
    drop(oldest);
    let known = secret("known to both users");
    let _zero = open(&address, 0, Some(&known), late()).expect("opens");
    as_nobody(|| open(&address, 1, Some(&known), late()).map(drop)).expect("a secret joins users");
}

#[test]
fn unauthenticated_connections_do_no_harm() {
    let address = free_address();
    let mut zero = open(&address, 0, None, late()).expect("opens");
    // More than there is room for; silent ones, ones that talk nonsense, and ones that promise too
    // much.
    let mut unauthenticated_clients = Vec::new();
    for number in 0..100 {
        let mut stream = TcpStream::connect(&address).expect("connects");
        match number % 3 {
            0 => {}
            1 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("said"),
            _ => {
                let hello =
                    StoreHello { version: VERSION, protection: Protection::Clear, challenge: [0; 32] };
                stream.write_all(&hello.encode()).expect("said");
                stream.write_all(&[0xff; 60]).expect("said");
            }
        }
        unauthenticated_clients.push(stream);
    }
    let mut one = open(&address, 1, None, late()).expect("there is room for a rank");
    one.set("rank/1", b"here", late()).expect("set");
    assert_eq!(zero.wait(&["rank/1".to_owned()], late(), late()).expect("there"), [b"here"]);
}

#[test]
fn more_keys_than_fit_one_request_are_asked_for_in_several() {
    let address = free_address();
    let mut store = TcpStore::open(&address, 0, 600, None, late()).expect("opens");
    let keys: Vec<_> = (0..600).map(|rank| format!("rank/{rank}")).collect();
    for key in &keys {
        store.set(key, key.as_bytes(), late()).expect("set");
    }
    let values = store.wait(&keys, late(), late()).expect("there");
    assert!(values.iter().zip(&keys).all(|(value, key)| value == key.as_bytes()) && values.len() == 600);
}

/// Connects that many times from one address, and on until others have been served enough. It never
/// proves anything: it is silent, says a hello, or says it byte by byte. At most `held` are open at
/// a time.
fn flood(address: &str, connections: usize, held: usize, [is_enough, over]: [&AtomicBool; 2]) {
    let hello = StoreHello { version: VERSION, protection: Protection::Clear, challenge: [0; 32] }.encode();
    let mut unauthenticated_clients = std::collections::VecDeque::new();
    let until = late();
    // Acquire: pairs with the release of the thread that is served.
    let goes_on = |number| number < connections || !is_enough.load(Ordering::Acquire) && now() < until;
    for number in (0..).take_while(|number| goes_on(*number)) {
        // The store may have dropped any of them already.
        if let Ok(mut stream) = TcpStream::connect(address) {
            let said = [0, HELLO_BYTES, 1][number % 3];
            let _ = stream.write(&hello[..said]);
            unauthenticated_clients.push_back((stream, said));
        }
        if unauthenticated_clients.len() > held {
            unauthenticated_clients.pop_front();
        }
        for (stream, said) in
            unauthenticated_clients.iter_mut().rev().take(8).filter(|(_, said)| *said % HELLO_BYTES != 0)
        {
            let _ = stream.write(&hello[*said..=*said]);
            *said += 1;
        }
    }
    // Release: pairs with the load of the thread that waits for the end.
    over.store(true, Ordering::Release);
}

/// Requests that are served before a flood ends.
const REQUESTS_UNDER_FLOOD: u32 = 41;
/// Ranks that get in before a flood ends.
const JOINS_UNDER_FLOOD: u32 = 2;

/// Ranks are served while a flood comes, those that are in and those that come; says how long one
/// request took at most.
fn serve_under_flood(connections: usize, held: usize) {
    let (address, secret) = (free_address(), secret("right right right"));
    let mut zero = open(&address, 0, Some(&secret), late()).expect("opens");
    let [is_enough, over] = [(); 2].map(|()| AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| flood(&address, connections, held, [&is_enough, &over]));
        let (mut requests, mut slowest, mut joined, mut slowest_join) =
            (0_u32, Duration::ZERO, 0, Duration::ZERO);
        // Acquire: pairs with the store of the flood's end.
        while !over.load(Ordering::Acquire) {
            let began = now();
            zero.claim(&format!("key/{}", requests % 1000), b"value", late()).expect("rank 0 is served");
            requests += 1;
            slowest = slowest.max(now().since(began));
            if requests % 20 == 0 {
                let began = now();
                let mut one = open(&address, 1, Some(&secret), late()).expect("rank 1 gets in");
                one.claim(&format!("joined/{}", joined % 100), b"", late()).expect("and is served");
                joined += 1;
                slowest_join = slowest_join.max(now().since(began));
            }
            let has_enough = requests >= REQUESTS_UNDER_FLOOD && joined >= JOINS_UNDER_FLOOD;
            is_enough.store(has_enough, Ordering::Release); // Pairs with the acquire of the flood.
        }
        println!(
            "{connections} unauthenticated: {requests} requests, the slowest {slowest:?}; \
             {joined} came, the slowest in {slowest_join:?}"
        );
        assert!(is_enough.load(Ordering::Acquire), "{requests} requests, {joined} came");
    });
}

#[test]
fn ranks_are_served_and_get_in_while_unauthenticated_connections_flood_the_store() {
    serve_under_flood(1_000, 150);
}

#[test]
#[ignore = "10,000 connections take a minute: .ci/nightly runs it"]
fn ranks_are_served_and_get_in_while_ten_thousand_flood_the_store() {
    serve_under_flood(10_000, 400);
}

/// A store that lets one rank in and never says a word after that, as a rank 0 that is stopped.
fn mute() -> (String, thread::JoinHandle<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("is bound").to_string();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody comes");
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        let (theirs, own) = (StoreHello::decode(&hello).expect("ours"), challenge());
        stream
            .write_all(
                &StoreHello { version: VERSION, protection: Protection::Clear, challenge: own }.encode(),
            )
            .expect("there is room");
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof).expect("a proof");
        let proof = Proof::decode(&proof).expect("ours");
        let claim = Proof::claim(proof.rank, proof.world_size);
        let challenges = Challenges::new(Side::Listener, own, theirs.challenge);
        let answer = challenges.answer(Some(&secret("right right right")), &claim);
        stream.write_all(&Verdict::Welcome(answer).encode()).expect("there is room");
        stream
    });
    (address, server)
}

/// Joins at this store as a rank of three, and gives the error and how long it took, the end of the
/// store included.
fn joining(store: TcpStore, rank: Rank, timeout: Duration) -> (String, Duration) {
    struct Quiet;
    impl crate::Responder for Quiet {
        fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
            None
        }
        fn lost(&self, _peer: Rank, _cause: &crate::LossCause) {}
    }
    let world = World { rank, world_size: 3, ..World::alone() };
    let options =
        JoinOptions { fabric: FabricChoice::Only(Fabric::Tcp), knobs: Vec::new(), signal_slots: 1, timeout };
    let began = now();
    let joined = join_at(Box::new(store), &world, &options, std::sync::Arc::new(Quiet));
    (joined.expect_err("nobody else comes").to_string(), now().since(began))
}

/// How much later than its limit a join may end on a machine that is busy with other things. The
/// store alone would wait for a minute.
const BUSY: Duration = Duration::from_secs(10);

#[test]
fn a_join_ends_at_its_limit_also_when_rank_0_has_stopped() {
    let (address, server) = mute();
    let one = open(&address, 1, Some(&secret("right right right")), late()).expect("is let in");
    let limit = Duration::from_secs(1);
    let (error, took) = joining(one, 1, limit);
    assert!(error.starts_with("rendezvous lost") && error.contains(&address), "{error}");
    assert!(took < limit + BUSY, "{took:?}");
    drop(server.join());
}

#[test]
fn rank_0_ends_at_its_limit_also_while_a_rank_that_has_stopped_holds_its_connection() {
    let address = free_address();
    let zero = open(&address, 0, None, late()).expect("opens");
    let _stopped = open(&address, 1, None, late()).expect("opens");
    let limit = Duration::from_secs(1);
    let (error, took) = joining(zero, 0, limit);
    assert!(error.starts_with("missing ranks: ranks 1, 2 of 3"), "{error}");
    assert!(took < limit + BUSY, "{took:?}");
}

#[test]
fn rank_0_listens_on_every_address_where_its_name_has_several_or_only_loopback_and_there_is_a_secret() {
    let at = |texts: &[&str]| -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().expect("an address")).collect()
    };
    let everywhere = at(&["[::]:40", "0.0.0.0:40"]);
    let places = |name: &str, known: &[&str], has_secret| listen_addresses(name, &at(known), has_secret);
    assert_eq!(places("node0:40", &["127.0.1.1:40"], true), everywhere);
    assert_eq!(places("node0:40", &["127.0.1.1:40"], false), at(&["127.0.1.1:40"]));
    assert_eq!(places("node0:40", &["127.0.1.1:40", "10.0.0.1:40"], true), at(&["10.0.0.1:40"]));
    assert_eq!(places("node0:40", &["10.0.0.1:40", "10.1.0.1:40"], true), everywhere);
    for (own, known) in [
        ("localhost:40", "127.0.0.1:40"),
        ("ip6-localhost:40", "[::1]:40"),
        ("127.0.0.1:40", "127.0.0.1:40"),
        ("10.0.0.1:40", "10.0.0.1:40"),
        ("[fd00::1]:40", "[fd00::1]:40"),
    ] {
        assert_eq!(places(own, &[known], true), at(&[known]), "{own} is an address");
    }
}

fn protected(mode: crate::tls::TlsMode) -> Secret {
    let tls = Tls::new(mode, None).expect("needs no file");
    secret("known to both of them").with_tls(tls)
}

/// Carries the bytes of one connection to `to` and back, and keeps them.
fn carry_one(to: &str) -> (String, thread::JoinHandle<Vec<u8>>) {
    let own = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = own.local_addr().expect("bound").to_string();
    let to = to.to_owned();
    let carried = thread::spawn(move || {
        let (dialed, _) = own.accept().expect("somebody comes");
        let onward = TcpStream::connect(&to).expect("it listens");
        let copies = (dialed.try_clone().expect("a file"), onward.try_clone().expect("a file"));
        let copy = |mut from: TcpStream, mut to: TcpStream| {
            let (mut seen, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                seen.extend_from_slice(&buffer[..count]);
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
            seen
        };
        let there = thread::spawn(move || copy(dialed, onward));
        let mut seen = copy(copies.1, copies.0);
        seen.extend(there.join().expect("it copies"));
        seen
    });
    (address, carried)
}

/// All values of rank 0 that rank 1 gets through somebody in between, and what that one sees.
fn values_through(mode: crate::tls::TlsMode, value: &[u8]) -> (Vec<Vec<u8>>, Vec<u8>) {
    let address = free_address();
    let secret = protected(mode);
    let mut store = TcpStore::open(&address, 0, 2, Some(&secret), late()).expect("opens");
    let keys: Vec<_> = (0..100).map(|number| format!("value/{number}")).collect();
    for key in &keys {
        store.set(key, value, late()).expect("is set");
    }
    let (between, carried) = carry_one(&address);
    let mut other = TcpStore::open(&between, 1, 2, Some(&secret), late()).expect("connects");
    let values = other.wait(&keys, late(), late()).expect("all are set");
    drop(other);
    drop(store);
    (values, carried.join().expect("it carries"))
}

#[test]
fn values_go_through_tls_and_nobody_in_between_reads_them() {
    let value = vec![b'v'; crate::rendezvous::VALUE_BYTES_MAX];
    for (mode, is_seen) in [(crate::tls::TlsMode::On, false), (crate::tls::TlsMode::Off, true)] {
        let (values, seen) = values_through(mode, &value);
        assert!(values.len() == 100 && values.iter().all(|got| *got == value));
        assert!(seen.len() > 100 * value.len(), "all went through there");
        assert_eq!(seen.windows(8).any(|window| window == b"vvvvvvvv"), is_seen);
    }
}

#[test]
fn a_rank_without_tls_is_told_and_one_with_certificates_too() {
    use crate::tls::TlsMode;
    let address = free_address();
    let _store = TcpStore::open(&address, 0, 2, Some(&protected(TlsMode::On)), late()).expect("opens");
    let refused = TcpStore::open(&address, 1, 2, Some(&protected(TlsMode::Off)), late());
    let Err(error @ OpenStoreError::Protection { .. }) = refused else { panic!("it was let in") };
    let text = error.to_string();
    assert!(
        text.contains(&address) && text.contains("PLEACH_TLS") && text.contains("speaks no TLS"),
        "{text}"
    );
    let other = protected(TlsMode::On);
    TcpStore::open(&address, 1, 2, Some(&other), late()).expect("any key is taken with the secret");
    let tls = Tls::new(TlsMode::On, None).expect("needs no file");
    let wrong = secret("another secret than theirs").with_tls(tls);
    let refused = TcpStore::open(&address, 1, 2, Some(&wrong), late());
    assert!(matches!(refused, Err(OpenStoreError::WrongSecret { .. })));
}
