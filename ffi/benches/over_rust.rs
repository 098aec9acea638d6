//! The cost of the C ABI over the Rust call: an all-reduce of 8 bytes on two ranks, by both in one
//! run. A second Rust group shows how far two groups are apart that differ in nothing: by so much
//! the figure for C may be wrong. `cargo run --release -p pleach-micro` counts the
//! instructions of both, which depend on no chance.
//!
//! `cargo bench -p pleach-ffi --bench over_rust`
//!
//! The program starts itself once for each rank, rank r on processor r (by `taskset`). A turn is
//! many calls by Rust on each group, and as many by C, in an order that goes round; the figure of a
//! turn is the time of a call of rank 0. Printed are the medians over the turns, and those of the
//! differences within a turn. The limit is 50 ns.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::process::{Command, ExitCode};

use pleach_collectives::{Group, Options, ReduceOp};
use pleach_ffi::calls::pleachAllReduce;
use pleach_ffi::comm::{pleachComm_t, pleachCommDestroy, pleachCommInitRank};
use pleach_ffi::pleachResult_t::pleachSuccess;
use pleach_ffi::types::{pleachAvg, pleachFloat64};
use pleach_ffi::unique_id::{PLEACH_UNIQUE_ID_BYTES, pleachGetUniqueId, pleachUniqueId};
use pleach_transport::clock::now;

#[path = "../../benches/report/mod.rs"]
mod report;

use report::median;

const RANKS: u32 = 2;
const TURNS: usize = 201;
const CALLS: u32 = 2000;

fn main() -> ExitCode {
    if std::env::var_os("PLEACH_RANK").is_some() {
        measure();
        return ExitCode::SUCCESS;
    }
    let program = std::env::current_exe().expect("this program has a path");
    let folder = std::env::temp_dir().join(format!("pleach-over-rust-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder of its own");
    let start = |rank: u32| {
        Command::new("taskset")
            .args(["-c", &rank.to_string()])
            .arg(&program)
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", RANKS.to_string())
            .env("PLEACH_RENDEZVOUS", format!("file://{}/store", folder.display()))
            .env("PLEACH_INTERFACE", "127.0.0.1")
            .spawn()
            .expect("taskset starts")
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect();
    let is_ok = ranks.into_iter().all(|mut rank| rank.wait().is_ok_and(|status| status.success()));
    let _ = std::fs::remove_dir_all(&folder);
    if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A communicator of the same ranks, by the C ABI.
fn communicator(group: &Group) -> pleachComm_t {
    let mut id = pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] };
    if group.rank() == 0 {
        // SAFETY: a place for an id.
        assert_eq!(unsafe { pleachGetUniqueId(&raw mut id) }, pleachSuccess);
    }
    let mut bytes = id.internal.map(std::ffi::c_char::cast_unsigned);
    group.broadcast(&mut bytes[..], 0).expect("the id is told");
    id.internal = bytes.map(u8::cast_signed);
    let mut comm = std::ptr::null_mut();
    let rank = i32::try_from(group.rank()).expect("few ranks");
    // SAFETY: a place for a communicator.
    assert_eq!(unsafe { pleachCommInitRank(&raw mut comm, RANKS as i32, id, rank) }, pleachSuccess);
    comm
}

/// Nanoseconds of a call.
fn timed(mut call: impl FnMut()) -> f64 {
    let begun = now();
    (0..CALLS).for_each(|_| call());
    now().since(begun).as_nanos() as f64 / f64::from(CALLS)
}

fn measure() {
    let group = Group::join(&Options::from_env().expect("this program has set it")).expect("the ranks meet");
    let second = group.split(Some(0), group.rank()).expect("the ranks meet").expect("every rank");
    let comm = communicator(&group);
    // The average keeps the value, whatever the number of calls.
    let (mut of_first, mut of_second, mut of_c) = ([1.0_f64], [1.0_f64], [1.0_f64]);
    let by_rust = |group: &Group, data: &mut [f64]| {
        timed(|| group.all_reduce(&mut *data, ReduceOp::Avg).expect("both ranks call"))
    };
    let data: *mut c_void = of_c.as_mut_ptr().cast();
    let by_c = || {
        timed(|| {
            // SAFETY: one element, which nobody else uses.
            let result = unsafe {
                pleachAllReduce(data, data, 1, pleachFloat64, pleachAvg, comm, std::ptr::null_mut())
            };
            assert_eq!(result, pleachSuccess);
        })
    };
    // By turn: Rust, Rust on the second group, C.
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        let mut times = [0.0; 3];
        for next in 0..3 {
            let of = (turn + next) % 3;
            times[of] = match of {
                0 => by_rust(&group, &mut of_first),
                1 => by_rust(&second, &mut of_second),
                _ => by_c(),
            };
        }
        turns.push(times);
    }
    if group.rank() == 0 {
        let of = |time: fn(&[f64; 3]) -> f64| median(&mut turns.iter().map(time).collect::<Vec<_>>());
        let [rust, control, c] = [of(|turn| turn[0]), of(|turn| turn[1]), of(|turn| turn[2])];
        println!(
            "8-byte all-reduce, {RANKS} ranks, {TURNS} turns of {CALLS} calls: Rust {rust:.0} ns, Rust on a \
             second group {control:.0} ns, C {c:.0} ns"
        );
        println!(
            "medians of the turns' differences: C over Rust {:.0} ns (the limit is 50 ns), the second group \
             over the first {:.0} ns",
            of(|turn| turn[2] - (turn[0] + turn[1]) / 2.0),
            of(|turn| turn[1] - turn[0])
        );
    }
    assert_eq!(pleachCommDestroy(comm), pleachSuccess);
    second.close().expect("both ranks close");
    group.close().expect("both ranks close");
}
