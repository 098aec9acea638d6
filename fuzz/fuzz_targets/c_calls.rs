//! Whatever calls a C program makes, in whatever order: a result, and no crash. A world of one
//! rank, whose buffers are as long as the calls say.
#![no_main]
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::{null, null_mut, without_provenance_mut};

use libfuzzer_sys::fuzz_target;
use pleach_ffi::batch::{pleachGroupEnd, pleachGroupStart};
use pleach_ffi::calls::*;
use pleach_ffi::comm::*;
use pleach_ffi::device::region::*;
use pleach_ffi::device::transfer::*;
use pleach_ffi::device::*;
use pleach_ffi::failure::*;
use pleach_ffi::memory::*;
use pleach_ffi::pleachResult_t::pleachInternalError;

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
        while pleachGroupEnd() != pleach_ffi::pleachResult_t::pleachInvalidUsage {}
    });
});

/// One call.
///
/// # Safety
///
/// The buffers are longer than every call says, and outlive the group of calls.
unsafe fn call(input: &mut Input<'_>, handles: &mut Handles) -> pleach_ffi::pleachResult_t {
    // Leaked, as calls between pleachGroupStart and pleachGroupEnd hold it; small, and reused.
    thread_local! {
        static BUFFERS: [*mut u64; 2] =
            [(); 2].map(|()| Box::leak(Box::new([0u64; 2 * COUNT_MAX])).as_mut_ptr());
    }
    let buffers = BUFFERS.with(|buffers| *buffers);
    let buffer = |input: &mut Input<'_>| -> *mut c_void {
        match input.byte() % 8 {
            0 => null_mut(),
            at => buffers[usize::from(at % 2)]
                .cast::<u8>()
                .wrapping_add(usize::from(at / 2) * 4)
                .cast::<c_void>(),
        }
    };
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 32 {
            0 if live(handles.comms.len()) => {
                let mut comm = null_mut();
                let result = pleachCommInitFromEnv(&mut comm, null());
                handles.comms.push(comm);
                result
            }
            1 => pleachCommDestroy(input.handle(&handles.comms)),
            2 => pleachCommAbort(input.handle(&handles.comms)),
            3 => pleachCommFinalize(input.handle(&handles.comms)),
            4 => {
                let (from, into) = (buffer(input), buffer(input));
                let (count, kind, op) = (usize::from(input.byte()), input.byte(), input.byte());
                let comm = input.handle(&handles.comms);
                pleachAllReduce(from, into, count, kind.into(), op.into(), comm, null_mut())
            }
            5 => {
                let (from, into, root) = (buffer(input), buffer(input), input.number());
                let (count, kind) = (usize::from(input.byte()), input.byte());
                pleachBroadcast(
                    from,
                    into,
                    count,
                    kind.into(),
                    root,
                    input.handle(&handles.comms),
                    null_mut(),
                )
            }
            6 => {
                let (from, into) = (buffer(input), buffer(input));
                let (count, kind) = (usize::from(input.byte()), input.byte());
                pleachAllGather(from, into, count, kind.into(), input.handle(&handles.comms), null_mut())
            }
            7 => {
                let (from, peer) = (buffer(input), input.number());
                let (count, kind) = (usize::from(input.byte()), input.byte());
                pleachSend(from, count, kind.into(), peer, input.handle(&handles.comms), null_mut())
            }
            8 => pleachBarrier(input.handle(&handles.comms), null_mut()),
            9 => pleachGroupStart(),
            10 => pleachGroupEnd(),
            11 if live(handles.comms.len()) => {
                let mut part = null_mut();
                let (color, key) = (input.number(), input.number());
                let result = pleachCommSplit(input.handle(&handles.comms), color, key, &mut part);
                handles.comms.push(part);
                result
            }
            25 => {
                let mut failure = std::mem::zeroed::<pleachFailure_t>();
                failure.size = size_of::<pleachFailure_t>() - usize::from(input.byte() % 2);
                pleachCommGetFailure(input.handle(&handles.comms), &mut failure)
            }
            26 => pleachCommSetTimeout(input.handle(&handles.comms), input.byte().into()),
            27..=29 => memory_call(input, handles),
            30.. => device_call(input, handles),
            _ => pleach_ffi::pleachResult_t::pleachSuccess,
        }
    }
}

/// A call on registered memory.
///
/// # Safety
///
/// As [`call`].
unsafe fn memory_call(input: &mut Input<'_>, handles: &mut Handles) -> pleach_ffi::pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 4 {
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
            _ => pleach_ffi::pleachResult_t::pleachSuccess,
        }
    }
}

/// A call on a device.
///
/// # Safety
///
/// As [`call`].
unsafe fn device_call(input: &mut Input<'_>, handles: &mut Handles) -> pleach_ffi::pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    unsafe {
        match input.byte() % 9 {
            0 if live(handles.devices.len()) => {
                let mut device = null_mut();
                let result = pleachDeviceOpenFromEnv(&mut device, null());
                handles.devices.push(device);
                result
            }
            1 => pleachDeviceClose(input.handle(&handles.devices)),
            2 if live(handles.regions.len()) => {
                let (mut address, mut region) = (null_mut(), null_mut());
                let device = input.handle(&handles.devices);
                let result = pleachRegionAlloc(device, usize::from(input.byte()), &mut address, &mut region);
                handles.regions.push(region);
                result
            }
            3 => pleachRegionRelease(input.handle(&handles.regions)),
            4 => {
                let mut slice = pleachRemoteSlice_t { key: 0, offset: 0, length: 0 };
                let (offset, length) = (usize::from(input.byte()), usize::from(input.byte()));
                pleachRegionExport(input.handle(&handles.regions), offset, length, &mut slice)
            }
            5 => {
                let slice =
                    pleachRemoteSlice_t { key: input.byte().into(), offset: 0, length: input.byte().into() };
                let (device, region) = (input.handle(&handles.devices), input.handle(&handles.regions));
                let (peer, offset, slot) = (input.number(), usize::from(input.byte()), input.number());
                let length = usize::from(input.byte());
                pleachPut(device, peer, region, offset, length, &slice, slot, null(), 0, null_mut())
            }
            6 => {
                let device = input.handle(&handles.devices);
                pleachTransferWait(device, input.byte().into(), 0, null_mut())
            }
            7 => {
                let (device, peer, slot) = (input.handle(&handles.devices), input.number(), input.number());
                pleachSignalWait(device, peer, slot, input.byte().into(), 0, null_mut())
            }
            8 => {
                let (own, all) = ([0u8; 256], &mut [0u8; 256]);
                let bytes = usize::from(input.byte());
                let device = input.handle(&handles.devices);
                pleachDeviceExchange(device, own.as_ptr().cast(), all.as_mut_ptr().cast(), bytes)
            }
            _ => pleach_ffi::pleachResult_t::pleachSuccess,
        }
    }
}
