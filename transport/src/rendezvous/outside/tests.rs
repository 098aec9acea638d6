//! Tests with real stores: an etcd and a `TCPStore` of PyTorch; and with what is none.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use super::table::OutsideTable;
use super::*;
use crate::auth::Secret;
use crate::clock::now;
use crate::outside_stores::{Etcd, TorchStore};
use crate::ports::reserve;
use crate::rendezvous::{Claim, OpenStoreError, Registers, Store as _, StoreError, World};
use crate::skipped::skip;

const MINUTE: Duration = Duration::from_secs(60);

fn late() -> Nanos {
    now() + MINUTE
}

fn soon() -> Nanos {
    now() + Duration::from_millis(200)
}

fn rendezvous(address: &str) -> Rendezvous {
    address.parse().expect("an address")
}

fn store(address: &str) -> Box<dyn OutsideStore> {
    store_of(&rendezvous(address)).expect("is built").expect("is outside")
}

fn secret() -> Secret {
    Secret::new(&[7; 32])
}

fn put(expected: Option<&'static [u8]>, value: &'static [u8]) -> Change<'static> {
    Change { expected, value, lease: None }
}

fn a_key_is_written_once_and_exchanged(address: &str) {
    let (mut one, mut two) = (store(address), store(address));
    assert_eq!(one.read("key", late()).expect("is asked"), None);
    let present = one.exchange("key", put(Some(b"nothing"), b"a"), late()).expect("is asked");
    assert_eq!(present, Exchanged::Present(None));
    assert_eq!(one.exchange("key", put(None, b"a"), late()).expect("is asked"), Exchanged::Written);
    assert_eq!(one.exchange("key", put(None, b"a"), late()).expect("is asked again"), Exchanged::Written);
    let present = two.exchange("key", put(None, b"b"), late()).expect("is asked");
    assert_eq!(present, Exchanged::Present(Some(b"a".to_vec())));
    let present = two.exchange("key", put(Some(b"x"), b"b"), late()).expect("is asked");
    assert_eq!(present, Exchanged::Present(Some(b"a".to_vec())));
    assert_eq!(two.exchange("key", put(Some(b"a"), b"b"), late()).expect("is asked"), Exchanged::Written);
    assert_eq!(one.read("key", late()).expect("is asked"), Some(b"b".to_vec()));
}

/// A job at this address, with these numbers.
fn registers(address: &str, secret: u8, job: u8) -> Registers {
    let world = World { rendezvous: Some(rendezvous(address)), ..World::alone() };
    let opened = Registers::open(&world, &Secret::new(&[secret; 32]), &[job; 32], false);
    opened.expect("has a secret").expect("has registers")
}

fn of_many_writers_one_is_first(address: &str) {
    let found: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let write = |writer: u8| {
            let mut registers = registers(address, 7, 1);
            scope.spawn(move || registers.write_once(5, &[writer; 3000], late()).expect("is written"))
        };
        let writers: Vec<_> = (0..6).map(write).collect();
        writers.into_iter().map(|writer| writer.join().expect("does not panic")).collect()
    });
    assert!(found.iter().all(|value| value == &found[0]));
    assert_eq!(registers(address, 7, 1).read(5, late()).expect("is there"), Some(found[0].clone()));
    assert_eq!(registers(address, 7, 2).read(5, late()).expect("is asked"), None, "of another job");
    let error = registers(address, 8, 1).read(5, late()).expect_err("has another secret");
    assert!(matches!(error, OutsideError::Forged { .. }), "{error}");
    // A replay under another number.
    let mut raw = store(address);
    let job = "job-0101010101010101";
    let sealed = raw.read(&format!("{job}/record-5"), late()).expect("is asked").expect("is there");
    let change = Change { expected: None, value: &sealed, lease: None };
    raw.exchange(&format!("{job}/record-6"), change, late()).expect("is written");
    let error = registers(address, 7, 1).read(6, late()).expect_err("was written for record 5");
    assert!(matches!(error, OutsideError::Forged { .. }), "{error}");
}

fn table(address: &str, rank: u32, deadline: Nanos) -> Result<OutsideTable, OpenStoreError> {
    OutsideTable::open(store(address), rank, Some(&secret()), deadline)
}

fn ranks_meet_in_a_table(address: &str) {
    let error = table(address, 1, soon()).err().expect("rank 0 has not come");
    assert!(matches!(error, OpenStoreError::NobodyThere { .. }), "{error}");
    let mut zero = table(address, 0, late()).expect("rank 0 opens");
    let error = table(address, 0, late()).err().expect("there is one");
    assert!(matches!(error, OpenStoreError::InUse { .. }), "{error}");
    let mut one = table(address, 1, late()).expect("rank 1 finds it");
    assert_eq!(zero.claim("rank/7", b"a", late()).expect("is asked"), Claim::Taken);
    assert_eq!(one.claim("rank/7", b"b", late()).expect("is asked"), Claim::Present(b"a".to_vec()));
    one.set("rank/1", b"there", late()).expect("is new");
    let keys = ["rank/1", "rank/2"].map(str::to_owned);
    let error = zero.wait(&keys, soon(), late()).expect_err("one is missing");
    assert!(matches!(&error, StoreError::Missing { keys, .. } if *keys == ["rank/2"]), "{error}");
    assert_eq!(zero.wait(&keys[..1], late(), late()).expect("is there"), [b"there"]);
    zero.seal(late());
    let error = table(address, 2, soon()).err().expect("all ranks are there");
    assert!(matches!(error, OpenStoreError::NobodyThere { .. }), "{error}");
    let error = table(address, 0, late()).err().expect("the job runs");
    assert!(matches!(error, OpenStoreError::InUse { .. }), "{error}");
    one.fail("a reason", late());
    let error = zero.wait(&keys, late(), late()).expect_err("has failed");
    assert!(matches!(&error, StoreError::Failed { reason } if reason == "a reason"), "{error}");
    drop(zero);
    let zero = table(address, 0, late()).expect("the next job's rank 0 opens");
    let mut one = table(address, 1, late()).expect("rank 1 finds it");
    drop(zero);
    let error = one.wait(&keys, late(), late()).expect_err("rank 0 is gone");
    assert!(matches!(error, StoreError::Lost { .. }), "{error}");
}

/// The owner is not asked: its thread alone ends, as with its process.
fn a_table_of_a_dead_owner_is_over_soon(address: &str) {
    let mut raw = store(address);
    let lease = raw.lease("of-the-dead", late()).expect("is made");
    let mut pulse = Pulse::default();
    let mut backoff = Backoff::until(late());
    while raw.is_alive(&lease, &mut pulse, late()).expect("is asked") != Some(false) {
        assert!(backoff.again(), "it is never over");
    }
    assert!(!raw.is_inhabited(late()).expect("is asked"));
    let presence = raw.presence(late()).expect("is made");
    let beat = table::Beat::start(raw.again(), presence, true).expect("a thread starts");
    assert!(store(address).is_inhabited(late()).expect("is asked"));
    drop(beat);
    assert!(!store(address).is_inhabited(late()).expect("is asked"));
}

fn all(address: &dyn Fn(&str) -> String) {
    a_key_is_written_once_and_exchanged(&address("keys"));
    of_many_writers_one_is_first(&address("registers"));
    ranks_meet_in_a_table(&address("a/table"));
    a_table_of_a_dead_owner_is_over_soon(&address("leases"));
}

#[test]
fn an_etcd_of_one_node() {
    let Some(etcd) = Etcd::start(1, reserve(2), &[]) else {
        return skip("etcd is not installed (Debian's package etcd-server)");
    };
    all(&|prefix: &str| etcd.address(prefix));
}

#[test]
fn an_etcd_of_three_nodes_of_which_one_is_killed_and_then_another() {
    let Some(mut etcd) = Etcd::start(3, reserve(6), &[]) else {
        return skip("etcd is not installed (Debian's package etcd-server)");
    };
    let address = etcd.address("three");
    let mut one = registers(&address, 7, 1);
    one.write_once(0, b"first", late()).expect("three nodes run");
    etcd.kill(0);
    one.write_once(1, b"second", late()).expect("two nodes run");
    assert_eq!(registers(&address, 7, 1).read(0, late()).expect("is there"), Some(b"first".to_vec()));
    etcd.kill(1);
    let until = now() + Duration::from_secs(3);
    let error = one.write_once(2, b"third", until).expect_err("one node of three decides nothing");
    assert!(matches!(error, OutsideError::NotReady { .. } | OutsideError::Unreachable { .. }), "{error}");
    assert!(now() < until + Duration::from_secs(10), "a request ends at its deadline");
}

#[test]
fn a_tcp_store_of_torch() {
    let Some(server) = TorchStore::start() else { return skip("there is no python with torch") };
    all(&|_: &str| server.address());
}

/// A request of etcd's gateway, from outside of the code under test.
fn ask_etcd(port: u16, method: &str, body: &str) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let url = format!("http://127.0.0.1:{port}/v3/{method}");
    agent.post(url).send(body).expect("is answered");
}

#[test]
fn an_etcd_that_is_full_or_has_users_says_so() {
    let Some(etcd) = Etcd::start(1, reserve(2), &["--quota-backend-bytes", "200000"]) else {
        return skip("etcd is not installed (Debian's package etcd-server)");
    };
    let mut full = registers(&etcd.address("full"), 7, 1);
    let mut result = Ok(Vec::new());
    for number in 0..40 {
        result = full.write_once(number, &[7; 60_000], late());
        if result.is_err() {
            break;
        }
    }
    let error = result.expect_err("it has room for few");
    assert!(matches!(error, OutsideError::Full { .. }), "{error}");
    assert!(error.to_string().contains("alarm disarm"), "{error}");
    let Some(etcd) = Etcd::start(1, reserve(2), &[]) else { return };
    let mut denied = registers(&etcd.address("denied"), 7, 1);
    denied.write_once(0, b"before", late()).expect("it has no users yet");
    for (method, body) in [
        ("auth/user/add", r#"{"name":"root","password":"of-a-test"}"#),
        ("auth/role/add", r#"{"name":"root"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/enable", "{}"),
    ] {
        ask_etcd(etcd.port(0), method, body);
    }
    let error = denied.write_once(1, b"after", late()).expect_err("nobody may write");
    assert!(matches!(error, OutsideError::Refused { .. }), "{error}");
}

/// A server that answers each connection with these bytes, or with nothing.
fn foreign(answer: &'static [u8]) -> (std::thread::JoinHandle<()>, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = listener.local_addr().expect("is bound").port();
    let serve = move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let mut bytes = [0; 4096];
        let _ = stream.read(&mut bytes);
        let _ = stream.write_all(answer);
        // Until the other end has had enough.
        while stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
    };
    (std::thread::spawn(serve), port)
}

#[test]
fn what_is_no_store_is_named_and_nothing_hangs() {
    let page = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello";
    for address in ["etcd://127.0.0.1:PORT/a", "c10d://127.0.0.1:PORT"] {
        let (server, port) = foreign(page);
        let mut other = store(&address.replace("PORT", &port.to_string()));
        let error = other.read("key", late()).expect_err("is no store");
        assert!(matches!(error, OutsideError::Foreign { .. }), "{error}");
        drop(other);
        server.join().expect("ends");
        let (server, port) = foreign(b"");
        let mut silent = store(&address.replace("PORT", &port.to_string()));
        let error = silent.read("key", now() + Duration::from_millis(100)).expect_err("says nothing");
        assert!(matches!(error, OutsideError::Unreachable { .. }), "{error}");
        drop(silent);
        server.join().expect("ends");
        let mut nobody = store(&address.replace("PORT", &port.to_string()));
        let error = nobody.read("key", soon()).expect_err("nobody listens");
        assert!(error.to_string().contains("check the address"), "{error}");
        let error = OutsideTable::open(nobody, 0, None, late()).err().expect("has no secret");
        assert!(error.to_string().contains("PLEACH_SECRET_FILE"), "{error}");
    }
}
