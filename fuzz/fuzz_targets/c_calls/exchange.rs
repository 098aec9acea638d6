//! Calls on the tensor exchange, among endpoints of this process.

use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};

use pleach_ffi::exchange::failure::*;
use pleach_ffi::exchange::memory::*;
use pleach_ffi::exchange::receive::*;
use pleach_ffi::exchange::send::*;
use pleach_ffi::exchange::tensor::*;
use pleach_ffi::exchange::*;
use pleach_ffi::pleachResult_t::{self, pleachInternalError, pleachSuccess};

use crate::{HANDLES_MAX, Input, context, released};

/// Most endpoints of a process, each of which takes threads.
const ENDPOINTS_MAX: usize = 24;
/// How long calls wait, in milliseconds.
const WAIT_MS: u64 = 1;
/// Longest dimension of a tensor.
const DIM_MAX: usize = 40;

/// As [`crate::Handles`], of the tensor exchange.
#[derive(Default)]
pub struct Handles {
    endpoints: Vec<pleachEndpoint_t>,
    peers: Vec<pleachPeer_t>,
    tensors: Vec<pleachTensor_t>,
    receives: Vec<pleachReceive_t>,
    memory: Vec<*mut c_void>,
}

/// Is told the end of a receive, once.
unsafe extern "C" fn told(told_once: *mut c_void, result: pleachResult_t, tensor: pleachTensor_t) {
    assert_ne!(result, pleachInternalError);
    assert_eq!(result == pleachSuccess, !tensor.is_null());
    // SAFETY: a context of `context`.
    unsafe { released(null_mut(), told_once) };
    if !tensor.is_null() {
        assert_eq!(pleachTensorRelease(tensor), pleachSuccess);
    }
}

/// A name, right or wrong.
fn name(input: &mut Input<'_>) -> *const c_char {
    const NAMES: [&std::ffi::CStr; 4] = [c"w", c"/job:a;1;/job:b;x;0:0", c"", c"\xff"];
    NAMES.get(usize::from(input.byte() % 8)).map_or(c"v".as_ptr(), |name| name.as_ptr())
}

/// One call.
///
/// # Safety
///
/// Handles are used as handles only.
pub unsafe fn call(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    let live = |list: usize| list < HANDLES_MAX;
    let step = u64::from(input.byte() % 4);
    unsafe {
        match input.byte() % 24 {
            0 | 1 if handles.endpoints.len() < ENDPOINTS_MAX => opened(input, handles),
            2 if input.byte() % 4 == 0 => pleachEndpointClose(input.handle(&handles.endpoints)),
            3 => {
                let mut address = [0; PLEACH_ADDRESS_BYTES];
                let bytes = usize::from(input.byte()).min(PLEACH_ADDRESS_BYTES);
                pleachEndpointAddress(input.handle(&handles.endpoints), address.as_mut_ptr(), bytes)
            }
            4 if input.byte() % 2 == 0 => {
                let mut incarnation = 0;
                pleachEndpointIncarnation(input.handle(&handles.endpoints), &mut incarnation)
            }
            4 => {
                let mut counts = std::mem::zeroed::<pleachEndpointCounts_t>();
                counts.size = size_of::<pleachEndpointCounts_t>() - usize::from(input.byte() % 2);
                pleachEndpointGetCounts(input.handle(&handles.endpoints), &mut counts)
            }
            5 | 6 if live(handles.tensors.len()) => {
                let (mut made, mut data) = (null_mut(), null_mut());
                let dims = [usize::from(input.byte()) % DIM_MAX, 3];
                let (kind, count) = (input.byte() % 40, usize::from(input.byte() % 3));
                let endpoint = input.handle(&handles.endpoints);
                let result =
                    pleachTensorAlloc(endpoint, kind.into(), count, dims.as_ptr(), &mut data, &mut made);
                handles.tensors.push(made);
                result
            }
            7 => pleachTensorRelease(input.handle(&handles.tensors)),
            8 => {
                let mut info = std::mem::zeroed::<pleachTensorInfo_t>();
                info.size = size_of::<pleachTensorInfo_t>() - usize::from(input.byte() % 8 == 1);
                pleachTensorGetInfo(input.handle(&handles.tensors), &mut info)
            }
            9 | 10 => {
                let (endpoint, name) = (input.handle(&handles.endpoints), name(input));
                pleachEndpointSend(endpoint, step, name, input.handle(&handles.tensors), WAIT_MS)
            }
            11 => {
                let (names, tensors) =
                    ([name(input), name(input)], [(); 2].map(|()| input.handle(&handles.tensors)));
                let endpoint = input.handle(&handles.endpoints);
                let count = usize::from(input.byte() % 3);
                pleachEndpointPublish(endpoint, step, count, names.as_ptr(), tensors.as_ptr())
            }
            12 => {
                let reason = if input.byte() % 2 == 0 { null() } else { name(input) };
                pleachEndpointAbort(input.handle(&handles.endpoints), step, reason)
            }
            13 => pleachEndpointCleanUp(input.handle(&handles.endpoints), step),
            14 => {
                let mut failure = std::mem::zeroed::<pleachExchangeFailure_t>();
                failure.size = size_of::<pleachExchangeFailure_t>() - usize::from(input.byte() % 8 == 1);
                pleachGetLastExchangeFailure(&mut failure)
            }
            15 | 16 => memory_call(input, handles, step),
            _ => receive_call(input, handles, step),
        }
    }
}

/// An endpoint that is opened, on loopback.
///
/// # Safety
///
/// As [`call`].
unsafe fn opened(input: &mut Input<'_>, handles: &mut Handles) -> pleachResult_t {
    const FABRICS: [&std::ffi::CStr; 3] = [c"none", c"pigeon", c"shm"];
    let mut made = null_mut();
    let wrong = input.byte();
    let options = pleachEndpointOptions_t {
        size: size_of::<pleachEndpointOptions_t>() - usize::from(wrong == 1),
        listen: if wrong == 2 { c"nowhere".as_ptr() } else { null() },
        fabric: FABRICS.get(usize::from(input.byte() % 4)).map_or(null(), |fabric| fabric.as_ptr()),
        secretFile: if wrong == 3 { c"/nowhere".as_ptr() } else { null() },
        timeoutMs: WAIT_MS,
        bytesHeldMax: u64::from(input.byte()) << 4,
        bytesLentMax: u64::from(input.byte()) << 4,
        bytesLendableMax: 1 << 20,
        requireRegions: i32::from(wrong % 64 == 4),
        reserved: i32::from(wrong == 5),
    };
    let options = if wrong == 6 { null() } else { &raw const options };
    let result = unsafe { pleachEndpointOpen(&mut made, options) };
    handles.endpoints.push(made);
    result
}

/// A call on lendable memory.
///
/// # Safety
///
/// As [`call`].
unsafe fn memory_call(input: &mut Input<'_>, handles: &mut Handles, step: u64) -> pleachResult_t {
    unsafe {
        match input.byte() % 3 {
            0 if handles.memory.len() < HANDLES_MAX => {
                let mut made = null_mut();
                let endpoint = input.handle(&handles.endpoints);
                let result = pleachLendableAlloc(endpoint, usize::from(input.byte()) << 3, &mut made);
                if !made.is_null() {
                    handles.memory.push(made);
                }
                result
            }
            1 => {
                // Its address may be given out anew, so it is forgotten.
                let at = usize::from(input.byte()) % handles.memory.len().max(1);
                let memory =
                    if at < handles.memory.len() { handles.memory.swap_remove(at) } else { null_mut() };
                pleachLendableFree(memory)
            }
            _ => {
                // What may be freed while it is copied would be a mistake of the program.
                let bytes = [0_u8; 8];
                let elsewhere = bytes.as_ptr().cast_mut().cast();
                let at = usize::from(input.byte());
                let known = handles.memory.get(at).copied();
                let (data, dims) = (known.unwrap_or(elsewhere), [8_usize]);
                let release = if at % 2 == 0 { None } else { Some(released as _) };
                let (endpoint, name) = (input.handle(&handles.endpoints), name(input));
                let kind = u32::from(input.byte() % 2);
                pleachEndpointSendMemory(
                    endpoint,
                    step,
                    name,
                    data,
                    kind,
                    1,
                    dims.as_ptr(),
                    release,
                    context(),
                    WAIT_MS,
                )
            }
        }
    }
}

/// A call on a peer or on a receive.
///
/// # Safety
///
/// As [`call`].
unsafe fn receive_call(input: &mut Input<'_>, handles: &mut Handles, step: u64) -> pleachResult_t {
    let (mut tensor, mut ready) = (null_mut(), 0);
    unsafe {
        let result = match input.byte() % 10 {
            0 if handles.peers.len() < HANDLES_MAX => {
                let mut address = [0; PLEACH_ADDRESS_BYTES];
                let other = input.handle(&handles.endpoints);
                let _ = pleachEndpointAddress(other, address.as_mut_ptr(), PLEACH_ADDRESS_BYTES);
                let mut made = null_mut();
                let address = CString::new(
                    address.map(c_char::cast_unsigned).split(|byte| *byte == 0).next().unwrap_or_default(),
                );
                let address = address.expect("its zeros were cut off");
                let result =
                    pleachEndpointConnect(input.handle(&handles.endpoints), address.as_ptr(), &mut made);
                handles.peers.push(made);
                result
            }
            1 => pleachPeerClose(input.handle(&handles.peers)),
            2 if input.byte() % 2 == 0 => {
                let mut incarnation = 0;
                pleachPeerIncarnation(input.handle(&handles.peers), &mut incarnation)
            }
            2 => pleachPeerShareRegions(input.handle(&handles.peers), WAIT_MS),
            3 | 4 => {
                let peer = input.handle(&handles.peers);
                pleachPeerReceive(peer, step, name(input), WAIT_MS, &mut tensor)
            }
            5 => {
                let endpoint = input.handle(&handles.endpoints);
                pleachEndpointReceive(endpoint, step, name(input), WAIT_MS, &mut tensor)
            }
            6 if handles.receives.len() < HANDLES_MAX => {
                let mut made = null_mut();
                let (peer, name) = (input.handle(&handles.peers), name(input));
                let callback: pleachReceived_t = if input.byte() % 2 == 0 { None } else { Some(told) };
                let result =
                    pleachPeerStartReceive(peer, step, name, WAIT_MS, callback, context(), &mut made);
                handles.receives.push(made);
                result
            }
            7 => pleachReceiveTest(input.handle(&handles.receives), &mut ready),
            8 => {
                let receive = input.handle(&handles.receives);
                pleachReceiveWait(receive, u64::from(input.byte() % 2), &mut tensor)
            }
            _ => pleachReceiveCancel(input.handle(&handles.receives)),
        };
        if !tensor.is_null() {
            assert_eq!(result, pleachSuccess);
            handles.tensors.push(tensor);
        }
        result
    }
}
