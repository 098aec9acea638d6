//! The packets between two hosts, as a third party captures them: with a secret no byte of what
//! ranks and programs exchange goes in clear, without anything else being set.
//!
//! Hosts are network namespaces, and the packets are read from the wire's end in one of them. It
//! takes root and `ip`; without them the tests are skipped.

#[allow(dead_code)] // Nothing is measured on wires of a bandwidth here.
mod links;
mod skipped;

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use links::{Hosts, Wire, ended};
use pleach::exchange::{Endpoint, EndpointOptions, ExchangeFabric, Key, SharedTensor, TensorWay};
use pleach::{Group, Options};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, recv, socket_with, sockopt};
use skipped::skip;

/// Tells a child of this test its part.
const PART: &str = "PLEACH_TEST_PART";

/// Known bytes, repeated, of which nobody may see eight in a row.
const KNOWN: &[u8; 64] = b"0: known bytes; 1: that nobody; 2: between two hosts may see....";

/// A name in the store of the rendezvous.
const STORE_KEY: &[u8] = b"neighbours/0";

/// Bytes that are exchanged: many packets and many records.
const BYTES: usize = 2 << 20;

/// The longest packet that the kernel gives, in bytes: several at once.
const PACKET_BYTES_MAX: usize = 1 << 18;

/// What may wait in the kernel for the capture, in bytes: all of it, on a busy machine.
const CAPTURE_BYTES: usize = 64 << 20;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn known(bytes: usize) -> Vec<u8> {
    KNOWN.iter().copied().cycle().take(bytes).collect()
}

/// What a child does; nothing in the process of the tests.
#[test]
fn part_of_a_child() {
    let Ok(part) = std::env::var(PART) else { return };
    match part.split_once(' ') {
        None if part == "capture" => capture(),
        None if part == "rank" => broadcast(),
        Some(("send", fabric)) => send(fabric.parse().expect("a fabric")),
        Some(("receive", rest)) => {
            let (fabric, address) = rest.split_once(' ').expect("two words");
            receive(fabric.parse().expect("a fabric"), address);
        }
        _ => panic!("no part: {part}"),
    }
}

/// Reads all packets of its host until its input ends, then says what it has seen.
fn capture() {
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(eth::ALL));
    let socket = socket.expect("root may");
    sockopt::set_socket_recv_buffer_size_force(&socket, CAPTURE_BYTES).expect("root may");
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(Duration::from_millis(20)))
        .expect("a short time");
    println!("ready");
    let is_over = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let known = known(2 * KNOWN.len());
    let known: HashSet<&[u8]> = known.windows(8).collect();
    let (mut bytes, mut payload, mut names) = (0, 0, 0);
    let mut packet = vec![0; PACKET_BYTES_MAX];
    loop {
        // Asked before: what came until then is read.
        let was_over = is_over.is_finished();
        match recv(&socket, &mut packet[..], RecvFlags::empty()) {
            Ok((_, count)) => {
                let seen = &packet[..count.min(PACKET_BYTES_MAX)];
                bytes += count;
                payload += seen.windows(8).filter(|window| known.contains(window)).count();
                names += seen.windows(STORE_KEY.len()).filter(|window| *window == STORE_KEY).count();
            }
            Err(Errno::AGAIN) if was_over => break,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
    println!("seen {bytes} {payload} {names}");
}

/// A rank that takes part in a broadcast of known bytes.
fn broadcast() {
    let group = Group::join(&Options::from_env().expect("they are right")).expect("the others come");
    let mut data = if group.rank() == 0 { known(BYTES) } else { vec![0; BYTES] };
    group.broadcast(&mut data[..], 0).expect("the others do the same");
    assert!(data == known(BYTES));
    group.close().expect("the others close too");
    println!("done");
}

fn endpoint(fabric: ExchangeFabric) -> Endpoint {
    let mut options = EndpointOptions::from_env().expect("they are right");
    options.fabric = fabric;
    Endpoint::open(&options).expect("a free port")
}

fn key() -> Key {
    Key::new(1, "known").expect("a good name")
}

/// A program that gives a tensor of known bytes.
fn send(fabric: ExchangeFabric) {
    let endpoint = endpoint(fabric);
    let mut tensor = endpoint.tensor::<u8>(&[BYTES]).expect("there is memory");
    tensor.copy_from_slice(&known(BYTES));
    let tensor: SharedTensor = tensor.share();
    endpoint.send(&key(), tensor).expect("there is room");
    println!("ready {}", endpoint.address());
    // Until it is killed, or its receiver is done.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    println!("done");
}

fn receive(fabric: ExchangeFabric, address: &str) {
    let endpoint = endpoint(fabric);
    let peer = endpoint.connect(address).expect("an address").within(PATIENCE);
    if fabric != ExchangeFabric::None {
        peer.share_regions().expect("it is reached");
    }
    let received = peer.receive(&key()).expect("it was sent");
    let way = if fabric == ExchangeFabric::None { TensorWay::Inline } else { TensorWay::Copied };
    assert_eq!(received.way(), way);
    assert!(received.as_slice::<u8>() == Ok(&known(BYTES)[..]));
    println!("done");
}

/// A child of this test on a host, which reads what this process keeps open.
fn part(hosts: &Hosts, host: usize, part: &str) -> Command {
    let program = std::env::current_exe().expect("this test");
    let line = format!("exec {} --exact part_of_a_child --nocapture", program.display());
    let mut command = hosts.shell(host, &line);
    command.env(PART, part).env("PLEACH_SECRET_FILE", hosts.secret()).stdin(Stdio::piped());
    command
}

/// The rest of the line of a child that has this word.
fn heard(child: &mut Child, word: &str) -> String {
    let mut lines = BufReader::new(child.stdout.as_mut().expect("is piped")).lines();
    // The harness may have begun the line.
    let mut found = lines.by_ref().map_while(Result::ok);
    let rest = found.find_map(|line| line.find(word).map(|at| line[at + word.len()..].trim().to_owned()));
    rest.unwrap_or_else(|| panic!("it ended without '{word}'"))
}

/// What a third party saw.
#[derive(Debug)]
struct Captured {
    bytes: usize,
    payload: usize,
    names: usize,
}

/// What goes over the wire while something happens.
fn captured(hosts: &Hosts, happens: impl FnOnce()) -> Captured {
    let mut child = part(hosts, 1, "capture").spawn().expect("ip starts");
    heard(&mut child, "ready");
    happens();
    drop(child.stdin.take());
    let said = heard(&mut child, "seen");
    drop(ended(vec![child]));
    let mut numbers = said.split(' ').map(|number| number.parse().expect("a number"));
    let mut next = || numbers.next().expect("three of them");
    Captured { bytes: next(), payload: next(), names: next() }
}

fn hosts() -> Option<Hosts> {
    let wire = Wire { ends: [0, 1], megabits_per_s: None };
    let hosts = Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), 2, &[wire]);
    hosts.map_err(|reason| skip(format_args!("no network namespaces here: {reason}"))).ok()
}

/// By default, and with TLS switched off: the same capture sees all then, so it would see it.
const MODES: [(Option<&str>, bool); 2] = [(None, false), (Some("off"), true)];

fn check(seen: &Captured, is_seen: bool) {
    assert!(seen.bytes > BYTES, "all went by: {seen:?}");
    assert_eq!(seen.payload > 0, is_seen, "{seen:?}");
}

#[test]
fn ranks_of_two_hosts_with_a_secret_show_no_byte_of_their_data_and_none_of_the_rendezvous() {
    let Some(hosts) = hosts() else { return };
    for (mode, is_seen) in MODES {
        let seen = captured(&hosts, || {
            let ranks = [0, 1].map(|rank| {
                let mut command = part(&hosts, rank, "rank");
                command
                    .env("PLEACH_RANK", rank.to_string())
                    .env("PLEACH_WORLD_SIZE", "2")
                    .env("PLEACH_RENDEZVOUS", format!("tcp://{}:4030", hosts.address(0)));
                if let Some(mode) = mode {
                    command.env("PLEACH_TLS", mode);
                }
                command.spawn().expect("ip starts")
            });
            for output in ended(ranks.into()) {
                assert!(output.status.success(), "{output:?}");
            }
        });
        check(&seen, is_seen);
        assert_eq!(seen.names > 0, is_seen, "{seen:?}");
    }
}

#[test]
fn programs_of_two_hosts_with_a_secret_show_no_byte_of_their_tensors() {
    let Some(hosts) = hosts() else { return };
    for (fabric, (mode, is_seen)) in
        ["none", "tcp"].into_iter().flat_map(|fabric| MODES.map(|mode| (fabric, mode)))
    {
        let start = |host: usize, what: &str| {
            let mut command = part(&hosts, host, what);
            command.env("PLEACH_INTERFACE", hosts.address(host).to_string());
            if let Some(mode) = mode {
                command.env("PLEACH_TLS", mode);
            }
            command.spawn().expect("ip starts")
        };
        let seen = captured(&hosts, || {
            let mut sender = start(0, &format!("send {fabric}"));
            let address = heard(&mut sender, "ready");
            let receiver = start(1, &format!("receive {fabric} {address}"));
            for output in ended(vec![receiver]) {
                assert!(output.status.success(), "{output:?}");
            }
            drop(sender.stdin.take());
            drop(ended(vec![sender]));
        });
        check(&seen, is_seen);
    }
}
