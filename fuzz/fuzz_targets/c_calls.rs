//! Whatever calls a C program makes, in whatever order: a result, and no crash. A world of one
//! rank, whose buffers are as long as the calls say.
#![no_main]
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use libfuzzer_sys::fuzz_target;
use pleach_ffi::batch::{pleachGroupEnd, pleachGroupStart};
use pleach_ffi::calls::*;
use pleach_ffi::comm::*;
use pleach_ffi::device::region::*;
use pleach_ffi::device::transfer::*;
use pleach_ffi::device::*;
use pleach_ffi::failure::*;
use pleach_ffi::memory::*;
use pleach_ffi::partial::*;
use pleach_ffi::pleachResult_t::{self, pleachInternalError, pleachSuccess};
use pleach_ffi::result::{pleachGetErrorString, pleachGetLastError, pleachGetVersion};
use pleach_ffi::skew::*;
use pleach_ffi::types::pleachRedOp_t;
use pleach_ffi::unique_id::*;

#[path = "c_calls/exchange.rs"]
mod exchange;
#[path = "c_calls/session.rs"]
mod session;

/// Most calls of an input.
const CALLS: usize = 48;
/// Most handles of a kind that a process makes and remembers: beyond, only what is there is used.
const HANDLES_MAX: usize = 256;
/// Longest buffer of a call, in elements of at most 8 bytes.
const COUNT_MAX: usize = 256;

/// Handles that functions have stored, in the order of their making; destroyed ones stay. Joining
/// starts threads, so they outlive an input.
#[derive(Default)]
struct Handles {
    comms: Vec<pleachComm_t>,
    devices: Vec<pleachDevice_t>,
    regions: Vec<pleachRegion_t>,
    memory: Vec<*mut c_void>,
    /// Those that were not freed.
    live_memory: Vec<*mut c_void>,
    registrations: Vec<*mut c_void>,
    /// Numbers of premultiplied sums, as handles are.
    ops: Vec<pleachRedOp_t>,
    transfers: Vec<pleachTransfer_t>,
    partials: Vec<pleachPartial_t>,
    exchange: exchange::Handles,
    session: session::Handles,
}

/// Is called once for each registration of memory of the user, whose context says whether it was.
unsafe extern "C" fn released(_address: *mut c_void, context: *mut c_void) {
    let is_released: *const AtomicBool = context.cast_const().cast();
    // SAFETY: the context is one of `context`, which are never freed. One thread looks at it.
    assert!(!unsafe { &*is_released }.swap(true, Ordering::Relaxed), "released twice");
}

/// A context for [`released`], never freed.
fn context() -> *mut c_void {
    // Where a search for leaks finds them, also when the process ends.
    static CONTEXTS: Mutex<Vec<&AtomicBool>> = Mutex::new(Vec::new());
    let context: &AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    CONTEXTS.lock().unwrap().push(context);
    std::ptr::from_ref(context).cast::<c_void>().cast_mut()
}

thread_local! {
    static HANDLES: RefCell<Handles> = RefCell::default();
}

/// The bytes of an input; zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().map_or((0, self.0), |(first, rest)| (*first, rest));
        self.0 = rest;
        first
    }

    /// A reduction: a constant, a number that was stored, or none.
    fn op(&mut self, known: &[pleachRedOp_t]) -> pleachRedOp_t {
        match self.byte() {
            byte @ 0..128 => byte.into(),
            byte => known.iter().rev().nth(usize::from(byte - 128)).copied().unwrap_or(u32::MAX),
        }
    }

    fn number(&mut self) -> i32 {
        i32::from(self.byte().cast_signed())
    }

    /// A handle that was made, NULL, or a number that may be none.
    fn handle<T>(&mut self, known: &[*mut T]) -> *mut T {
        let byte = usize::from(self.byte());
        match byte {
            0 => null_mut(),
            1..=32 => without_provenance_mut(byte * 0x10_0001),
            _ => known.iter().rev().nth((byte - 33) % known.len().max(1)).copied().unwrap_or(null_mut()),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    HANDLES.with_borrow_mut(|handles| {
        for _ in 0..CALLS {
            if input.0.is_empty() {
                break;
            }
            // SAFETY: see `call`.
            let result = unsafe { call(&mut input, handles) };
            assert_ne!(result, pleachInternalError);
        }
        // A group that is left open would keep addresses of buffers that are gone.
        while pleachGroupEnd() != pleachResult_t::pleachInvalidUsage {}
    });
});

/// A buffer of a call. Leaked, as calls between pleachGroupStart and pleachGroupEnd hold it; small,
/// and reused.
fn buffer(input: &mut Input<'_>) -> *mut c_void {
    thread_local! {
        static BUFFERS: [*mut u64; 2] =
            [(); 2].map(|()| Box::leak(Box::new([0u64; 2 * COUNT_MAX])).as_mut_ptr());
    }
    let buffers = BUFFERS.with(|buffers| *buffers);
    match input.byte() % 8 {
        0 => null_mut(),
        at => {
            buffers[usize::from(at % 2)].cast::<u8>().wrapping_add(usize::from(at / 2) * 4).cast::<c_void>()
        }
    }
}

/// One call.
///
/// # Safety
///
/// The buffers are longer than every call says, and outlive the group of calls.
unsafe fn call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 32 {
            0 if live(handles.comms.len()) => made(input, handles),
            1 => pleachCommDestroy(input.handle(&handles.comms)),
            2 => pleachCommAbort(input.handle(&handles.comms)),
            3 => pleachCommFinalize(input.handle(&handles.comms)),
            4..=8 | 12..=18 => collective(input, handles),
            9 => pleachGroupStart(),
            10 => pleachGroupEnd(),
            11 if live(handles.comms.len()) => {
                let mut part = null_mut();
                let (color, key) = (input.number(), input.number());
                let given = config(input);
                let given = if input.byte() % 2 == 0 { null() } else { &raw const given };
                let result = pleachCommSplit(input.handle(&handles.comms), color, key, &mut part, given);
                handles.comms.push(part);
                result
            }
            19 => partial_call(input, handles),
            20 if live(handles.ops.len()) => {
                let (mut op, scalar) = (0, 3u64);
                let (kind, residence) = (input.byte() % 40, input.byte() % 3);
                let comm = input.handle(&handles.comms);
                let scalar = (&raw const scalar).cast();
                let result = pleachRedOpCreatePreMulSum(&mut op, scalar, kind.into(), residence.into(), comm);
                if result == pleachSuccess {
                    handles.ops.push(op);
                }
                result
            }
            21 => {
                let op = input.op(&handles.ops);
                pleachRedOpDestroy(op, input.handle(&handles.comms))
            }
            22..=24 => question(input, handles),
            25 => {
                let mut failure = std::mem::zeroed::<pleachFailure_t>();
                failure.size = size_of::<pleachFailure_t>() - usize::from(input.byte() % 2);
                pleachCommGetFailure(input.handle(&handles.comms), &mut failure)
            }
            26 => pleachCommSetTimeout(input.handle(&handles.comms), input.byte().into()),
            27 => memory_call(input, handles),
            28 => session::window_call(input, &mut handles.session, &handles.comms),
            29 => device_call(input, handles),
            30 => session::session_call(input, &mut handles.session, &mut handles.comms),
            31 => exchange::call(input, &mut handles.exchange),
            _ => pleachSuccess,
        }
    }
}

/// A configuration, right or wrong.
fn config(input: &mut Input<'_>) -> pleachConfig_t {
    pleachConfig_t {
        size: size_of::<pleachConfig_t>() - usize::from(input.byte() % 8 == 1),
        timeoutMs: input.byte().into(),
        joinTimeoutMs: input.byte().into(),
        fabric: if input.byte() % 4 == 1 { c"pigeon".as_ptr() } else { null() },
        reproducible: i32::from(input.byte() % 4),
        reserved: 0,
    }
}

/// A communicator that is made, of one rank: more would wait for each other.
///
/// # Safety
///
/// As [`call`].
unsafe fn made(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let mut comm = null_mut();
    let mut id = pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] };
    let result = unsafe {
        match input.byte() % 4 {
            0 => pleachCommInitFromEnv(&mut comm, null()),
            1 => {
                let given = config(input);
                pleachCommInitFromEnv(&mut comm, &given)
            }
            way => {
                let told = pleachGetUniqueId(&mut id);
                if told != pleachSuccess {
                    return told;
                }
                if input.byte() % 4 == 1 {
                    id.internal[usize::from(input.byte()) % PLEACH_UNIQUE_ID_BYTES] ^= 1;
                }
                let (ranks, rank) = (i32::from(input.byte() % 2) + input.number().min(0), input.number());
                let given = config(input);
                match way {
                    2 => pleachCommInitRank(&mut comm, ranks, id, rank.min(1)),
                    _ => pleachCommInitRankConfig(&mut comm, ranks, id, rank.min(1), &given),
                }
            }
        }
    };
    handles.comms.push(comm);
    result
}

/// A collective, a message or a barrier.
///
/// # Safety
///
/// As [`call`].
unsafe fn collective(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let which = input.byte() % 18;
    let (from, into) = (buffer(input), buffer(input));
    let (count, kind) = (usize::from(input.byte()), input.byte() % 40);
    let (kind, op, peer) = (kind.into(), input.op(&handles.ops), input.number());
    let counts = [[count, usize::MAX, 1, 0][usize::from(input.byte() % 4)]];
    let list = if input.byte() % 8 == 1 { null() } else { counts.as_ptr() };
    let comm = input.handle(&handles.comms);
    // A stream is an error of a communicator on host memory.
    let stream = if input.byte() == 255 { from } else { null_mut() };
    unsafe {
        match which {
            0 => pleachAllReduce(from, into, count, kind, op, comm, stream),
            1 => pleachBroadcast(from, into, count, kind, peer, comm, stream),
            2 => pleachBcast(into, count, kind, peer, comm, stream),
            3 => pleachReduce(from, into, count, kind, op, peer, comm, stream),
            4 => pleachReduceScatter(from, into, count, kind, op, comm, stream),
            5 => pleachAllGather(from, into, count, kind, comm, stream),
            6 => pleachAlltoAll(from, into, count, kind, comm, stream),
            7 => pleachGather(from, into, count, kind, peer, comm, stream),
            8 => pleachScatter(from, into, count, kind, peer, comm, stream),
            9 => pleachAllGatherV(from, into, list, kind, comm, stream),
            10 => pleachReduceScatterV(from, into, list, kind, op, comm, stream),
            11 => pleachAlltoAllV(from, list, into, list, kind, comm, stream),
            12 => pleachGatherV(from, into, list, kind, peer, comm, stream),
            13 => pleachScatterV(from, into, list, kind, peer, comm, stream),
            14 => pleachSend(from, count, kind, peer, comm, stream),
            15 => pleachRecv(into, count, kind, peer, comm, stream),
            _ => pleachBarrier(comm, stream),
        }
    }
}

/// A call that asks.
///
/// # Safety
///
/// As [`call`].
unsafe fn question(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let which = input.byte() % 8;
    let (comm, mut number) = (input.handle(&handles.comms), 0);
    unsafe {
        match which {
            0 => pleachCommCount(comm, &mut number),
            1 => pleachCommUserRank(comm, &mut number),
            2 => {
                let mut error = pleachSuccess;
                let result = pleachCommGetAsyncError(comm, &mut error);
                assert_ne!(error, pleachInternalError);
                result
            }
            3 => {
                let mut skew = std::mem::zeroed::<pleachArrivalSkew_t>();
                skew.size = size_of::<pleachArrivalSkew_t>() - usize::from(input.byte() % 2);
                pleachCommGetArrivalSkew(comm, input.number(), &mut skew)
            }
            4 => pleachCommGetWaitsFor(comm, &mut number),
            5 => pleachGetVersion(&mut number),
            _ => {
                assert!(!pleachGetLastError(comm).is_null());
                assert!(!pleachGetErrorString(input.number()).is_null());
                pleachSuccess
            }
        }
    }
}

/// A call on a partial all-reduce.
///
/// # Safety
///
/// As [`call`].
unsafe fn partial_call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let mut round = unsafe { std::mem::zeroed::<pleachRound_t>() };
    round.size = size_of::<pleachRound_t>() - usize::from(input.byte() % 8 == 1);
    let mut report = unsafe { std::mem::zeroed::<pleachPartialReport_t>() };
    report.size = size_of::<pleachPartialReport_t>() - usize::from(input.byte() % 8 == 1);
    let (mut ranks, mut count, mut counted) = ([0; 2], 0, [0; 2]);
    let result = unsafe {
        match input.byte() % 11 {
            0 if handles.partials.len() < HANDLES_MAX => {
                let texts =
                    [c"all", c"solo", c"majority", c"quorum:1+1us", c"deadline:1us", c"quorum:0", c"never"];
                let given = pleachPartialConfig_t {
                    size: size_of::<pleachPartialConfig_t>() - usize::from(input.byte() % 8 == 1),
                    activation: texts.get(usize::from(input.byte() % 8)).map_or(null(), |text| text.as_ptr()),
                    late: input.number() % 5,
                    divisor: input.number() % 5,
                    stalenessMax: input.byte().into(),
                    reserved: u32::from(input.byte() % 8 == 1),
                };
                let given = if input.byte() % 4 == 1 { null() } else { &raw const given };
                let (elements, kind) = (usize::from(input.byte()), input.byte() % 40);
                let (op, mut made) = (input.op(&handles.ops), null_mut());
                let comm = input.handle(&handles.comms);
                let result = pleachPartialInit(&mut made, elements, kind.into(), op, given, comm);
                handles.partials.push(made);
                result
            }
            1 => pleachPartialDestroy(input.handle(&handles.partials)),
            2 => {
                let mut data = null_mut();
                pleachPartialContribution(input.handle(&handles.partials), &mut data)
            }
            3 => pleachPartialContribute(input.handle(&handles.partials), &mut round),
            4 => pleachPartialAbstain(input.handle(&handles.partials), &mut round),
            5 => pleachPartialFinish(input.handle(&handles.partials), &mut round),
            6 => {
                let partial = input.handle(&handles.partials);
                pleachPartialContributors(
                    partial,
                    ranks.as_mut_ptr(),
                    usize::from(input.byte() % 3),
                    &mut count,
                )
            }
            7 => pleachPartialStartContribute(input.handle(&handles.partials)),
            8 => pleachPartialWait(input.handle(&handles.partials), &mut round),
            9 => {
                let partial = input.handle(&handles.partials);
                let capacity = usize::from(input.byte() % 3);
                pleachPartialGetReport(partial, &mut report, counted.as_mut_ptr(), capacity)
            }
            _ => {
                let partial = input.handle(&handles.partials);
                pleachPartialCorrected(partial, ranks.as_mut_ptr(), usize::from(input.byte() % 3), &mut count)
            }
        }
    };
    assert!(ranks == [0; 2] && count <= 1 && counted[1] == 0, "a world of one rank");
    result
}

/// A call on registered memory.
///
/// # Safety
///
/// As [`call`].
unsafe fn memory_call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 5 {
            0 if live(handles.memory.len()) => {
                let mut memory = null_mut();
                let result = pleachMemAlloc(&mut memory, usize::from(input.byte()) << 4);
                handles.memory.push(memory);
                if !memory.is_null() {
                    handles.live_memory.push(memory);
                }
                result
            }
            1 => {
                let memory = input.handle(&handles.memory);
                handles.live_memory.retain(|live| *live != memory);
                pleachMemFree(memory)
            }
            2 if live(handles.registrations.len()) => {
                let mut made = null_mut();
                let comm = input.handle(&handles.comms);
                let memory = input.handle(&handles.memory);
                let size = usize::from(input.byte());
                // Freed memory would be memory of the user, which is not there.
                let is_there = handles.live_memory.contains(&memory) && size <= 16;
                let memory = if is_there { memory } else { null_mut() };
                let result = pleachCommRegister(comm, memory, size, &mut made);
                handles.registrations.push(made);
                result
            }
            3 => {
                let comm = input.handle(&handles.comms);
                pleachCommDeregister(comm, input.handle(&handles.registrations))
            }
            4 if live(handles.registrations.len()) => {
                let mut made = null_mut();
                let (comm, memory) = (input.handle(&handles.comms), buffer(input));
                let size = usize::from(input.byte());
                let result =
                    pleachCommRegisterWithRelease(comm, memory, size, Some(released), context(), &mut made);
                handles.registrations.push(made);
                result
            }
            _ => pleachSuccess,
        }
    }
}

/// A call on a device.
///
/// # Safety
///
/// As [`call`].
unsafe fn device_call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 16 {
            0 if live(handles.devices.len()) => {
                let mut device = null_mut();
                let result = pleachDeviceOpenFromEnv(&mut device, null());
                handles.devices.push(device);
                result
            }
            1 if live(handles.devices.len()) => {
                let mut device = null_mut();
                let mut id = pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] };
                assert_eq!(pleachGetUniqueId(&mut id), pleachSuccess);
                let (ranks, rank, given) =
                    (i32::from(input.byte() % 2), input.number().min(1), config(input));
                let result = pleachDeviceOpen(&mut device, ranks, id, rank, &given);
                handles.devices.push(device);
                result
            }
            2 => pleachDeviceClose(input.handle(&handles.devices)),
            3 if live(handles.regions.len()) => {
                let (mut address, mut region) = (null_mut(), null_mut());
                let device = input.handle(&handles.devices);
                let result = pleachRegionAlloc(device, usize::from(input.byte()), &mut address, &mut region);
                handles.regions.push(region);
                result
            }
            4 if live(handles.regions.len()) => {
                let mut region = null_mut();
                let (device, memory) = (input.handle(&handles.devices), buffer(input));
                let size = usize::from(input.byte());
                let release: pleachRelease_t = if input.byte() % 8 == 1 { None } else { Some(released) };
                let result = pleachRegionRegister(device, memory, size, release, context(), &mut region);
                handles.regions.push(region);
                result
            }
            5 => pleachRegionRelease(input.handle(&handles.regions)),
            6 => {
                let mut slice = pleachRemoteSlice_t { key: 0, offset: 0, length: 0 };
                let (offset, length) = (usize::from(input.byte()), usize::from(input.byte()));
                pleachRegionExport(input.handle(&handles.regions), offset, length, &mut slice)
            }
            7..=10 => transfer_call(input, handles),
            11 => {
                let device = input.handle(&handles.devices);
                let transfer = match input.byte() {
                    byte @ 0..64 => byte.into(),
                    byte => handles.transfers.iter().rev().nth(usize::from(byte - 64)).copied().unwrap_or(0),
                };
                let mut value = 0;
                pleachTransferWait(device, transfer, 0, &mut value)
            }
            12 => {
                let (device, peer, slot) = (input.handle(&handles.devices), input.number(), input.number());
                pleachSignalWait(device, peer, slot, input.byte().into(), 0, null_mut())
            }
            13 => {
                let (device, peer, slot) = (input.handle(&handles.devices), input.number(), input.number());
                let mut count = 0;
                pleachSignalCount(device, peer, slot, &mut count)
            }
            14 => {
                let (own, all) = ([0u8; 256], &mut [0u8; 256]);
                let bytes = usize::from(input.byte());
                let device = input.handle(&handles.devices);
                pleachDeviceExchange(device, own.as_ptr().cast(), all.as_mut_ptr().cast(), bytes)
            }
            15 => {
                let mut info = std::mem::zeroed::<pleachDeviceInfo_t>();
                info.size = size_of::<pleachDeviceInfo_t>() - usize::from(input.byte() % 2);
                pleachDeviceGetInfo(input.handle(&handles.devices), &mut info)
            }
            _ => pleachSuccess,
        }
    }
}

/// A transfer to or from a peer, or a signal.
///
/// # Safety
///
/// As [`call`].
unsafe fn transfer_call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let slice = pleachRemoteSlice_t {
        key: input.byte().into(),
        offset: input.byte().into(),
        length: input.byte().into(),
    };
    let (device, region) = (input.handle(&handles.devices), input.handle(&handles.regions));
    let (peer, offset, slot) = (input.number(), usize::from(input.byte()), input.number());
    let (length, payload) = (usize::from(input.byte()), [0u8; 256]);
    let (bytes, mut transfer) = (usize::from(input.byte()), 0);
    let (payload, slice) = (payload.as_ptr().cast(), &raw const slice);
    let result = unsafe {
        match input.byte() % 5 {
            0 => pleachPut(device, peer, region, offset, length, slice, slot, payload, bytes, &mut transfer),
            1 => pleachGet(device, peer, slice, region, offset, length, &mut transfer),
            2 => pleachAtomicAdd(device, peer, slice, 1, &mut transfer),
            3 => pleachAtomicCompareSwap(device, peer, slice, 1, 2, &mut transfer),
            _ => pleachSignal(device, peer, slot, payload, bytes, &mut transfer),
        }
    };
    if handles.transfers.len() < HANDLES_MAX {
        handles.transfers.push(transfer);
    }
    result
}
