//! The cost of the C ABI over the Rust call: a tensor that another process publishes is received in
//! place, looked at and released, by both in one run.
//!
//! `cargo bench -p pleach-ffi --bench exchange_over_rust`
//!
//! The program starts itself once more as the sender. A turn is many receives by Rust, and as many
//! by C, each of an endpoint of its own; the turns alternate. Printed are the medians of all
//! receives, and the median over the turns of the difference of their medians.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::ptr::null;
use std::time::Duration;

use pleach_exchange::{Endpoint, EndpointOptions, Key};
use pleach_ffi::exchange::receive::{
    pleachEndpointConnect, pleachPeer_t, pleachPeerReceive, pleachPeerShareRegions,
};
use pleach_ffi::exchange::tensor::{
    pleachTensor_t, pleachTensorGetInfo, pleachTensorInfo_t, pleachTensorRelease,
};
use pleach_ffi::exchange::{pleachEndpointOpen, pleachEndpointOptions_t};
use pleach_ffi::pleachResult_t::pleachSuccess;
use pleach_transport::clock::now;

#[path = "../../benches/report/mod.rs"]
mod report;

use report::median;

const PART: &str = "PLEACH_BENCH_PART";
const STEP: u64 = 1;
const SIZES: [usize; 4] = [256, 64 << 10, 4 << 20, 64 << 20];
const TURNS: usize = 41;
const RECEIVES: usize = 500;
const LIMIT: Duration = Duration::from_secs(30);

fn options() -> EndpointOptions {
    EndpointOptions::from_env().expect("the environment is right")
}

fn main() {
    if std::env::var_os(PART).is_some() {
        return send();
    }
    let program = std::env::current_exe().expect("this program has a path");
    let mut sender = Command::new(program)
        .env(PART, "send")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let mut address = String::new();
    let output = sender.stdout.take().expect("is piped");
    BufReader::new(output).read_line(&mut address).expect("the sender prints its address");
    receive(address.trim());
    drop(sender.stdin.take());
    sender.wait().expect("the sender ends with its input");
}

/// Publishes a tensor of each size until the input ends.
fn send() {
    let endpoint = Endpoint::open(&options()).expect("a free port");
    let mut tensors = BTreeMap::new();
    for size in SIZES {
        let mut tensor = endpoint.tensor::<u8>(&[size]).expect("there is memory");
        tensor.fill(size as u8 | 1);
        tensors.insert(size.to_string(), tensor.share());
    }
    endpoint.publish(STEP, tensors);
    println!("{}", endpoint.address());
    let _ = std::io::stdin().read(&mut [0]);
}

/// A peer by the C ABI.
fn peer_of_c(address: &str) -> pleachPeer_t {
    let (mut endpoint, mut peer) = (std::ptr::null_mut(), std::ptr::null_mut());
    let address = CString::new(address).expect("an address has no zero byte");
    let options: *const pleachEndpointOptions_t = null();
    // SAFETY: places for handles, and a text that ends.
    unsafe {
        assert_eq!(pleachEndpointOpen(&raw mut endpoint, options), pleachSuccess);
        assert_eq!(pleachEndpointConnect(endpoint, address.as_ptr(), &raw mut peer), pleachSuccess);
    }
    assert_eq!(pleachPeerShareRegions(peer, 0), pleachSuccess);
    peer
}

/// Receives by C, and returns the last byte.
fn receive_by_c(peer: pleachPeer_t, name: &CString, size: usize) -> u8 {
    let mut tensor: pleachTensor_t = std::ptr::null_mut();
    // SAFETY: a struct of numbers and a pointer.
    let mut info: pleachTensorInfo_t = unsafe { std::mem::zeroed() };
    info.size = size_of::<pleachTensorInfo_t>();
    // SAFETY: places for a handle and for the properties; a text that ends; a tensor of this
    // length, which is read before its release.
    let last = unsafe {
        assert_eq!(pleachPeerReceive(peer, STEP, name.as_ptr(), 30_000, &raw mut tensor), pleachSuccess);
        assert_eq!(pleachTensorGetInfo(tensor, &raw mut info), pleachSuccess);
        assert_eq!(info.bytes, size);
        let data: *const c_void = info.data;
        data.cast::<u8>().add(size - 1).read()
    };
    assert_eq!(pleachTensorRelease(tensor), pleachSuccess);
    last
}

/// Times of many receives, in microseconds.
fn timed(mut receive: impl FnMut() -> u8, expected: u8) -> Vec<f64> {
    let one = |_| {
        let begun = now();
        let last = receive();
        let time = now().since(begun).as_nanos() as f64 / 1e3;
        assert_eq!(last, expected, "a wrong tensor");
        time
    };
    (0..RECEIVES).map(one).collect()
}

fn receive(address: &str) {
    let endpoint = Endpoint::open(&options()).expect("a free port");
    let by_rust = endpoint.connect(address).expect("an address").within(LIMIT);
    by_rust.share_regions().expect("is on this host");
    let by_c = peer_of_c(address);
    println!(
        "{:>10} {:>10} {:>10} {:>10} {:>10} {:>12}",
        "bytes", "Rust p50", "Rust p99", "C p50", "C p99", "C over Rust"
    );
    for size in SIZES {
        let (name, text) = (size.to_string(), CString::new(size.to_string()).expect("has no zero byte"));
        let expected = size as u8 | 1;
        let (mut all, mut differences) = ([Vec::new(), Vec::new()], Vec::new());
        for turn in 0..TURNS {
            let mut medians = [0.0; 2];
            for next in 0..2 {
                let which = (turn + next) % 2;
                let mut times = match which {
                    0 => {
                        let receive = || {
                            // As C has it, the key is made for each call.
                            let key = Key::new(STEP, &name).expect("a good name");
                            let tensor = by_rust.receive(&key).expect("is published");
                            tensor.as_bytes()[size - 1]
                        };
                        timed(receive, expected)
                    }
                    _ => timed(|| receive_by_c(by_c, &text, size), expected),
                };
                medians[which] = median(&mut times);
                all[which].append(&mut times);
            }
            differences.push(medians[1] - medians[0]);
        }
        let [rust, c] = all.map(|mut times| {
            let middle = median(&mut times);
            (middle, times[times.len() * 99 / 100])
        });
        println!(
            "{size:>10} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>12.2}",
            rust.0,
            rust.1,
            c.0,
            c.1,
            median(&mut differences)
        );
    }
}
