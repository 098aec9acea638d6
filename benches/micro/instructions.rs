//! How many instructions the 8-byte path takes, counted one by one and held against the counts in
//! `instructions.txt`.
//!
//! Times of some hundred nanoseconds say little on a machine that does anything else; instructions
//! are the same each time. Both ends are driven by one thread, so that nobody waits and nothing
//! depends on chance: what is counted is what the rank does that comes last to an all-reduce, from
//! the call to its result, and both ends of a put and of a signal. A rank that is alone shows the
//! cost of the C ABI over the Rust call: the difference of both. Of an allocation only what the
//! allocator of programs that run graphs adds to the system's is told, as systems differ.
//!
//! The processor counts: while its trap flag is set it raises a signal after each instruction. So
//! what is counted is the program as it runs, with the instructions that this processor has.
//! callgrind, which is made for this, knows neither `pidfd_open`, without which no shared memory is
//! opened, nor AVX-512 (3.19).
//!
//! `cargo run --release -p pleach-micro` fails when a count is more than
//! [`TOLERANCE_PERCENT`] above the one in the file, and says when it is as much below, so that the
//! file can follow. Counts depend a little on the compiler; with `PLEACH_ACCEPT=1` the file is
//! written anew. On another architecture it says so and ends well.
#![allow(unsafe_code)] // the trap flag

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_void;
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pleach_collectives::{Buffer, Group, Operation, Options, Pending};
use pleach_ffi::calls::pleachAllReduce;
use pleach_ffi::comm::{pleachComm_t, pleachCommDestroy, pleachCommInitRank};
use pleach_ffi::pleachResult_t::pleachSuccess;
use pleach_ffi::types::{pleachFloat64, pleachSum};
use pleach_ffi::unique_id::{PLEACH_UNIQUE_ID_BYTES, pleachGetUniqueId, pleachUniqueId};
use pleach_graph_analyzer::run::TracingAllocator;
use pleach_transport::device::{Device, LossCause, Responder, Source, Submitted, Transfer, TransferId};
use pleach_transport::rendezvous::{
    Fabric, FabricChoice, JoinOptions, Joined, Launcher, Rendezvous, World, join,
};
use pleach_transport::{Inline, Nanos, SharedMemory, Signal, Signals};
use pleach_vocabulary::{Rank, ReduceOp};

/// Counts that differ by less are the same.
const TOLERANCE_PERCENT: u64 = 4;

/// Calls that are counted; the middle of them is what is told.
const CALLS: u64 = 101;

/// Calls before that: plans are made, memory is touched.
const WARM_UP: u64 = 50;

/// Longest time the ranks may take to meet on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a rank is polled for something that has happened already.
const POLLS_MAX: u32 = 1000;

/// Write the file instead of holding counts against it.
const ACCEPT_VARIABLE: &str = "PLEACH_ACCEPT";

const SIGNAL_SLOT: u16 = 0;

fn main() -> ExitCode {
    if !steps::ARE_COUNTED {
        println!("skipped: instructions are counted on x86-64 alone");
        return ExitCode::SUCCESS;
    }
    let mut found = vec![("all-reduce, last to come", median(all_reduce()))];
    let [system, tracing] = allocations().map(median);
    found.push(("allocation, without a tracer", tracing.saturating_sub(system)));
    for (path, counts) in alone().into_iter().chain(signals()).chain(puts()) {
        found.push((path, median(counts)));
    }
    judge(&found)
}

fn median(mut counts: Vec<u64>) -> u64 {
    counts.sort_unstable();
    counts[counts.len() / 2]
}

/// Counting by the processor's trap flag.
#[cfg(target_arch = "x86_64")]
mod steps {
    use std::arch::asm;
    use std::sync::atomic::{AtomicU64, Ordering};

    pub(super) const ARE_COUNTED: bool = true;

    /// Relaxed: written by the signal handler of the thread that reads it.
    static STEPS: AtomicU64 = AtomicU64::new(0);

    const TRAP_FLAG: i32 = 0x100;

    extern "C" fn stepped(_signal: libc::c_int) {
        STEPS.fetch_add(1, Ordering::Relaxed);
    }

    /// What the body gives, and how many instructions it took on this thread.
    pub(super) fn counted<T>(body: impl FnOnce() -> T) -> (T, u64) {
        let handler = stepped as extern "C" fn(libc::c_int);
        // SAFETY: the handler only adds to an atomic.
        unsafe { libc::signal(libc::SIGTRAP, handler as libc::sighandler_t) };
        let nothing = between(|| ()).1;
        let (value, steps) = between(body);
        (value, steps - nothing)
    }

    #[inline(never)]
    fn between<T>(body: impl FnOnce() -> T) -> (T, u64) {
        STEPS.store(0, Ordering::Relaxed);
        // SAFETY: sets a flag of this thread and puts everything else back; each instruction then
        // raises the signal whose handler is there.
        unsafe { asm!("pushfq", "or qword ptr [rsp], {flag}", "popfq", flag = const TRAP_FLAG) };
        let value = body();
        // SAFETY: takes the flag away.
        unsafe { asm!("pushfq", "and qword ptr [rsp], {mask}", "popfq", mask = const !TRAP_FLAG) };
        (value, STEPS.load(Ordering::Relaxed))
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod steps {
    pub(super) const ARE_COUNTED: bool = false;

    pub(super) fn counted<T>(body: impl FnOnce() -> T) -> (T, u64) {
        (body(), 0)
    }
}

/// Prints the counts beside those in the file.
fn judge(found: &[(&str, u64)]) -> ExitCode {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.txt");
    if std::env::var_os(ACCEPT_VARIABLE).is_some() {
        let mut text = String::from(
            "# Instructions a call, by 'PLEACH_ACCEPT=1 cargo run --release -p pleach-micro'.\n",
        );
        for (path, instructions) in found {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{path}: {instructions}");
        }
        std::fs::write(&file, text).expect("the file can be written");
    }
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let mut is_good = true;
    println!("instructions a call{:>22}{:>10}", "now", "file");
    for (path, now) in found {
        let known: Option<u64> =
            text.lines().find_map(|line| line.strip_prefix(path)?.strip_prefix(": ")?.parse().ok());
        let Some(known) = known else {
            println!("{path:<30}{now:>11}{:>10}  not in {}", "-", file.display());
            is_good = false;
            continue;
        };
        let verdict = if now * 100 > known * (100 + TOLERANCE_PERCENT) {
            is_good = false;
            "too many: make it shorter, or accept it with its reason"
        } else if now * 100 < known * (100 - TOLERANCE_PERCENT) {
            "fewer: accept them"
        } else {
            "as before"
        };
        println!("{path:<30}{now:>11}{known:>10}  {verdict}");
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Rank 0 has begun each call when rank 1 makes it, which therefore waits for nothing.
fn all_reduce() -> Vec<u64> {
    let folder = Folder::new();
    let [first, last] = both(|rank| {
        let mut options = Options::new(world(rank, &folder.0));
        options.fabric = FabricChoice::Only(Fabric::Shm);
        Group::join(&options).expect("both are there")
    });
    let mut ours = last.buffer::<f32>(2).expect("eight bytes");
    let mut theirs = first.buffer::<f32>(2).expect("eight bytes");
    let mut counts = Vec::new();
    for call in 0..WARM_UP + CALLS {
        theirs.copy_from_slice(&[1.0, 2.0]);
        ours.copy_from_slice(&[3.0, 4.0]);
        let mut pending: Pending<_> =
            first.start(Operation::all_reduce(theirs, ReduceOp::Sum)).expect("it can be started");
        for _ in 0..3 {
            assert!(!pending.test(), "rank 1 has not come");
        }
        if call < WARM_UP {
            last.all_reduce(&mut ours, ReduceOp::Sum).expect("rank 0 is there");
        } else {
            counts.push(steps::counted(|| last_to_come(&last, &mut ours)).1);
        }
        assert_eq!(ours[..], [4.0, 6.0]);
        assert!((0..POLLS_MAX).any(|_| pending.test()), "rank 1 has come");
        theirs = pending.wait().expect("it has ended");
        assert_eq!(theirs[..], [4.0, 6.0]);
    }
    drop((ours, theirs));
    both_of([first, last], |group| group.close().expect("both close"));
    counts
}

#[inline(never)]
fn last_to_come(group: &Group, data: &mut Buffer<f32>) {
    black_box(group).all_reduce(black_box(data), ReduceOp::Sum).expect("rank 0 is there");
}

/// The same call of a rank that is alone, by Rust and by C.
fn alone() -> [(&'static str, Vec<u64>); 2] {
    let group = Group::join(&Options::new(World::alone())).expect("nobody else is needed");
    let (mut id, mut comm) = (pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] }, ptr::null_mut());
    // SAFETY: a place for an id, and one for a communicator.
    unsafe {
        assert_eq!(pleachGetUniqueId(&raw mut id), pleachSuccess);
        assert_eq!(pleachCommInitRank(&raw mut comm, 1, id, 0), pleachSuccess);
    }
    let mut data = [1.0_f64];
    let (mut by_rust, mut by_c) = (Vec::new(), Vec::new());
    for _ in 0..WARM_UP {
        rust_call(&group, &mut data);
        c_call(comm, &mut data);
    }
    for _ in 0..CALLS {
        by_rust.push(steps::counted(|| rust_call(&group, &mut data)).1);
        by_c.push(steps::counted(|| c_call(comm, &mut data)).1);
    }
    assert_eq!(data, [1.0], "nobody adds anything");
    assert_eq!(pleachCommDestroy(comm), pleachSuccess);
    group.close().expect("it is closed");
    [("all-reduce, alone", by_rust), ("all-reduce by C, alone", by_c)]
}

#[inline(never)]
fn rust_call(group: &Group, data: &mut [f64]) {
    black_box(group).all_reduce(black_box(data), ReduceOp::Sum).expect("nobody else is needed");
}

#[inline(never)]
fn c_call(comm: pleachComm_t, data: &mut [f64]) {
    let (comm, data): (_, *mut c_void) = (black_box(comm), black_box(data.as_mut_ptr().cast()));
    // SAFETY: one element, which nobody else uses.
    let result = unsafe { pleachAllReduce(data, data, 1, pleachFloat64, pleachSum, comm, ptr::null_mut()) };
    assert_eq!(result, pleachSuccess);
}

/// An allocation and its end by the system's allocator, and by the one of programs that run graphs
/// while it traces nothing.
fn allocations() -> [Vec<u64>; 2] {
    let (mut system, mut tracing) = (Vec::new(), Vec::new());
    for _ in 0..WARM_UP + CALLS {
        system.push(steps::counted(|| allocate(&System)).1);
        tracing.push(steps::counted(|| allocate(&TracingAllocator)).1);
    }
    [system, tracing]
}

#[inline(never)]
fn allocate<A: GlobalAlloc>(allocator: &A) {
    let layout = black_box(Layout::new::<[u64; 8]>());
    // SAFETY: the layout is not empty, and the memory is given back once.
    unsafe {
        let address = black_box(allocator.alloc(layout));
        assert!(!address.is_null(), "64 bytes");
        allocator.dealloc(address, layout);
    }
}

fn signals() -> [(&'static str, Vec<u64>); 2] {
    let folder = Folder::new();
    let [mut from, to] = devices(&folder.0);
    let signal_slots = to.device.signal_slots(0);
    let (mut given, mut taken) = (Vec::new(), Vec::new());
    for call in 1..=WARM_UP + CALLS {
        let signal = Signal {
            signal_slot: SIGNAL_SLOT,
            payload: Inline::new(&call.to_ne_bytes()).expect("eight bytes fit"),
        };
        if call <= WARM_UP {
            from.device.signal(1, &signal, TransferId(0)).expect("it is connected");
        } else {
            let (submitted, count) = steps::counted(|| give_signal(&mut *from.device, &signal));
            assert!(matches!(submitted, Submitted::Ended(_)));
            given.push(count);
            let (found, count) = steps::counted(|| take_signal(&signal_slots, call));
            assert_eq!(found, Some(call));
            taken.push(count);
        }
        poll(&mut from);
    }
    [("signal, given", given), ("signal, taken", taken)]
}

#[inline(never)]
fn give_signal(device: &mut dyn Device, signal: &Signal) -> Submitted {
    black_box(device).signal(1, black_box(signal), TransferId(0)).expect("it is connected")
}

#[inline(never)]
fn take_signal(signal_slots: &Signals, count: u64) -> Option<u64> {
    let signal_slots = black_box(signal_slots);
    (signal_slots.count(SIGNAL_SLOT) == count)
        .then(|| u64::from_ne_bytes(std::array::from_fn(|place| signal_slots.payload(SIGNAL_SLOT)[place])))
}

fn puts() -> [(&'static str, Vec<u64>); 2] {
    let folder = Folder::new();
    let [mut from, mut to] = devices(&folder.0);
    let memory = SharedMemory::new(4096).expect("a page");
    let region = to.device.register(memory).expect("it can be shared");
    let (signal_slots, dst) =
        (to.device.signal_slots(0), region.whole().slice(0..8).expect("inside").remote());
    let (mut given, mut taken) = (Vec::new(), Vec::new());
    for call in 1..=WARM_UP + CALLS {
        let bytes = Inline::new(&call.to_ne_bytes()).expect("eight bytes fit");
        let signal = Some(Signal { signal_slot: SIGNAL_SLOT, payload: Inline::EMPTY });
        let transfer = Transfer::Put { src: Source::Inline(bytes), dst, signal };
        if call <= WARM_UP {
            from.device.submit(1, transfer, TransferId(0)).expect("it is connected");
        } else {
            given.push(steps::counted(|| give_put(&mut *from.device, transfer)).1);
        }
        for _ in 0..POLLS_MAX {
            if signal_slots.count(SIGNAL_SLOT) == call {
                break;
            }
            poll(&mut from);
            poll(&mut to);
        }
        if call > WARM_UP {
            let (has_come, count) = steps::counted(|| take_put(&signal_slots, call));
            assert!(has_come, "it has come");
            taken.push(count);
        }
        poll(&mut from);
    }
    [("put with signal, given", given), ("put with signal, taken", taken)]
}

#[inline(never)]
fn give_put(device: &mut dyn Device, transfer: Transfer) {
    black_box(device).submit(1, black_box(transfer), TransferId(0)).expect("it is connected");
}

#[inline(never)]
fn take_put(signal_slots: &Signals, count: u64) -> bool {
    black_box(signal_slots).count(SIGNAL_SLOT) == black_box(count)
}

fn poll(joined: &mut Joined) {
    joined.device.poll(Nanos::ZERO, &mut joined.events);
    joined.events.clear();
}

struct Quiet;

impl Responder for Quiet {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

fn devices(folder: &Path) -> [Joined; 2] {
    both(|rank| {
        let options = JoinOptions {
            fabric: FabricChoice::Only(Fabric::Shm),
            knobs: Vec::new(),
            signal_slots: 8,
            timeout: PATIENCE,
        };
        let mut joined = join(&world(rank, folder), &options, Arc::new(Quiet)).expect("both are there");
        joined.events.reserve(64);
        joined
    })
}

/// What each rank gives, made at the same time.
fn both<T: Send>(make: impl Fn(Rank) -> T + Sync) -> [T; 2] {
    both_of([0, 1], make)
}

fn both_of<I: Send, T: Send>(inputs: [I; 2], make: impl Fn(I) -> T + Sync) -> [T; 2] {
    thread::scope(|scope| {
        let threads = inputs.map(|input| scope.spawn(|| make(input)));
        threads.map(|thread| thread.join().expect("it ends well"))
    })
}

fn world(rank: Rank, folder: &Path) -> World {
    World {
        rank,
        world_size: 2,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        join_timeout: Some(PATIENCE),
        launcher: Launcher::Arguments,
        ..World::alone()
    }
}

/// A folder of this process's own, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("pleach-instructions-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder can be made");
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is a temporary file.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
