//! What an 8-byte all-reduce over shared memory may not do while the peer is awake: call the
//! system, but to give way.
//!
//! Each of two ranks is a thread on a processor of its own. A filter in the kernel turns every
//! system call of it into a signal, whose handler counts it and makes the call from the one place
//! that the filter knows; `sched_yield` is counted where the C library would make it.

#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, reason = "counts system calls")]

#[allow(dead_code)] // Not every test says where its ranks meet.
mod ranks;
#[path = "../../tests/skipped/mod.rs"]
mod skipped;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pleach_collectives::Group;
use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Rank, ReduceOp};

use ranks::with_group;
use skipped::skip;

const RANKS: u32 = 2;
/// Measured calls of each rank.
const CALLS: u32 = 100_000;
/// Calls before that.
const WARM_UP: u32 = 1_000;
/// From the end of the call before to that of a call: longer only when a rank was not running, and
/// from 1 ms on a rank that waits asks what its peer does.
const AWAKE: Duration = Duration::from_micros(500);
/// Longer than a peer is not running on a loaded machine: a rank waits awake for it, to be awake
/// when that one goes on.
const SPIN: Duration = Duration::from_secs(60);

/// System calls of the ranks' threads since the filter was put in. Relaxed: each thread reads its
/// own.
static GIVEN_WAY: [AtomicU64; RANKS as usize] = [const { AtomicU64::new(0) }; RANKS as usize];
static OTHERS: [AtomicU64; RANKS as usize] = [const { AtomicU64::new(0) }; RANKS as usize];
/// Their last ones but for giving way.
static LAST_OTHER: [AtomicU64; RANKS as usize] = [const { AtomicU64::new(u64::MAX) }; RANKS as usize];

thread_local! {
    static RANK: std::cell::Cell<usize> = const { std::cell::Cell::new(usize::MAX) };
}

/// Stands in for the C library's function of this name, which `std::thread::yield_now` calls.
// SAFETY: the same signature and meaning.
#[unsafe(no_mangle)]
extern "C" fn sched_yield() -> libc::c_int {
    if let Some(count) = GIVEN_WAY.get(RANK.get()) {
        count.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_sched_yield) as libc::c_int }
}

// The number of a system call and its six arguments in, its result out. The kernel sees the address
// behind `syscall`.
std::arch::global_asm!(
    ".globl pleach_test_system_call",
    "pleach_test_system_call:",
    "mov rax, rdi",
    "mov rcx, rsi",
    "mov rdi, [rcx]",
    "mov rsi, [rcx + 8]",
    "mov rdx, [rcx + 16]",
    "mov r10, [rcx + 24]",
    "mov r8, [rcx + 32]",
    "mov r9, [rcx + 40]",
    "syscall",
    ".globl pleach_test_system_call_made",
    "pleach_test_system_call_made:",
    "ret",
);

// SAFETY: as the assembly above says.
unsafe extern "C" {
    fn pleach_test_system_call(number: i64, arguments: *const [i64; 6]) -> i64;
    fn pleach_test_system_call_made();
}

/// Counts a system call that the filter caught, and makes it.
extern "C" fn caught(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the registers with this signal, as they were before the call, and
    // takes them back: with the same number and arguments the call is what the thread wanted, and
    // its result is where calls return it.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let of = |register: libc::c_int| registers[register as usize];
        let number = of(libc::REG_RAX);
        let arguments =
            [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9].map(of);
        if let (Some(count), Some(last)) = (OTHERS.get(RANK.get()), LAST_OTHER.get(RANK.get())) {
            count.fetch_add(1, Ordering::Relaxed);
            last.store(number as u64, Ordering::Relaxed);
        }
        registers[libc::REG_RAX as usize] = pleach_test_system_call(number, &raw const arguments);
    }
}

/// From here on system calls of this thread are caught, but those that give way, come back from the
/// handler, or are made by it.
fn count_system_calls(rank: Rank) {
    let (load, jump, give) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    let line = |code: u32, equal, other, k| libc::sock_filter { code: code as u16, jt: equal, jf: other, k };
    // What a filter sees: the call's number, the architecture, and the address in two halves.
    let made_at = pleach_test_system_call_made as *const () as u64;
    let mut program = [
        line(load, 0, 0, 0),
        line(jump, 6, 0, libc::SYS_sched_yield as u32),
        line(jump, 5, 0, libc::SYS_rt_sigreturn as u32),
        line(load, 0, 0, 8),
        line(jump, 0, 2, made_at as u32),
        line(load, 0, 0, 12),
        line(jump, 1, 0, (made_at >> 32) as u32),
        line(give, 0, 0, libc::SECCOMP_RET_TRAP),
        line(give, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    RANK.set(rank as usize);
    // SAFETY: the handler is of the kind that the flag names, and both structures are whole; the
    // kernel copies them.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = caught as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
    };
    assert_eq!(installed, 0, "the kernel has no filters: {}", std::io::Error::last_os_error());
}

/// The processors that this process may use.
fn processors() -> Vec<usize> {
    // SAFETY: a set of bits, filled by the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), 0);
        (0..libc::CPU_SETSIZE as usize).filter(|number| libc::CPU_ISSET(*number, &set)).collect()
    }
}

/// Puts this thread on one processor.
fn stay_on(processor: usize) {
    // SAFETY: a set of bits, read by the call.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
    }
}

/// What a rank's thread saw of one call.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Since the end of the call before.
    took: Duration,
    /// Times that it gave way.
    gave_way: u64,
    /// Other system calls.
    others: u64,
    /// The number of the last of them.
    #[allow(dead_code, reason = "for whoever reads a failure")]
    last_other: u64,
    is_right: bool,
}

fn call_again_and_again(rank: Rank, group: &Group) -> Vec<Seen> {
    let mut buffer = group.buffer::<f32>(2).unwrap();
    let mut call = |round: u32| {
        buffer.fill((round + rank) as f32);
        let result = group.all_reduce(&mut buffer, ReduceOp::Max);
        result.is_ok() && buffer.iter().all(|element| *element == (round + 1) as f32)
    };
    let mut seen = vec![Seen::default(); CALLS as usize];
    assert!((0..WARM_UP).all(&mut call));
    count_system_calls(rank);
    let count = |counts: &[AtomicU64]| counts[rank as usize].load(Ordering::Relaxed);
    let mut before = clock::now();
    for (round, seen) in (0..CALLS).zip(&mut seen) {
        let (gave_way, others) = (count(&GIVEN_WAY), count(&OTHERS));
        let is_right = call(round);
        let now = clock::now();
        *seen = Seen {
            took: now.since(before),
            gave_way: count(&GIVEN_WAY) - gave_way,
            others: count(&OTHERS) - others,
            last_other: count(&LAST_OTHER),
            is_right,
        };
        before = now;
    }
    seen
}

#[test]
fn small_all_reduces_over_shared_memory_call_no_system_while_the_peer_is_awake() {
    let processors = processors();
    if processors.len() < RANKS as usize {
        let processors = processors.len();
        return skip(format_args!("{RANKS} ranks are not awake at once on {processors} processor"));
    }
    let seen = with_group(
        Fabric::Shm,
        RANKS,
        |options| options.spin = SPIN,
        |group| {
            stay_on(processors[group.rank() as usize]);
            let seen = call_again_and_again(group.rank(), &group);
            // To close the group the ranks would have to meet once more.
            std::mem::forget(group);
            seen
        },
    );
    let [zero, one] = seen.try_into().expect("two ranks");
    assert!(zero.iter().chain(&one).all(|seen| seen.is_right), "wrong results");

    // Both ranks were awake in a call and just before and after it.
    let is_quick = |call: usize| [&zero, &one].iter().all(|seen| seen[call].took < AWAKE);
    let awake: Vec<usize> = (1..zero.len() - 1).filter(|call| (call - 1..=call + 1).all(is_quick)).collect();
    let slow = (0..zero.len()).filter(|call| !is_quick(*call)).count();
    for (rank, seen) in [&zero, &one].into_iter().enumerate() {
        let silent = awake.iter().filter(|call| seen[**call].gave_way == 0).count();
        println!(
            "rank {rank}: {} of {CALLS} calls with both ranks awake, {silent} of them without any system call",
            awake.len()
        );
        // A slow moment leaves something behind: the device's own thread still answers a question
        // of it, and a call may meet that at a lock.
        let others: Vec<&Seen> =
            awake.iter().map(|call| &seen[*call]).filter(|seen| seen.others > 0).collect();
        assert!(others.len() <= slow, "rank {rank} called the system after {slow} slow moments: {others:?}");
        assert!(silent > awake.len() / 2, "rank {rank} gave way in most calls");
    }
    assert!(awake.len() > CALLS as usize / 2, "the ranks were hardly ever awake at once: {}", awake.len());
}
