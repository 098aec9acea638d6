//! Memory of a session: buffers, on which the communicators of all epochs work in place, and
//! states, which are equal on all members.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use pleach_collectives::session::State;
use pleach_collectives::{Buffer, DataType, Element, F8E4M3, F8E5M2, RawData, Session, SessionError};
use pleach_collectives::{bf16, f16};
use pleach_transport::mutex::lock;

use super::{call, pleachSession_t};
use crate::result::{Failed, guarded, out, pleachResult_t};
use crate::types::{data_type, pleachDataType_t};

/// What the caller has of a session.
#[derive(Default)]
pub(crate) struct Kept {
    buffers: Vec<SessionBuffer>,
    states: BTreeMap<String, Box<dyn Elements>>,
}

impl Kept {
    /// For the communicator of an epoch.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = SessionBuffer> + '_ {
        self.buffers.iter().cloned()
    }
}

/// A buffer of a session. Clones are the same buffer.
#[derive(Clone)]
pub(crate) struct SessionBuffer {
    /// The caller reaches the bytes by their address alone; the lock makes the type one that
    /// threads may share.
    memory: Arc<Mutex<Buffer<u8>>>,
    addresses: Range<usize>,
}

impl SessionBuffer {
    fn new(mut buffer: Buffer<u8>) -> Self {
        let start = buffer.as_mut_ptr().expose_provenance();
        let addresses = start..start + buffer.len();
        Self { memory: Arc::new(Mutex::new(buffer)), addresses }
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> usize {
        self.addresses.start
    }

    /// `count` elements, of `bytes` bytes in all, from an address on; `None`: they are not inside.
    pub(crate) fn within(&self, address: usize, count: usize, bytes: usize) -> Option<RawData> {
        let Range { start, end } = self.addresses;
        let is_inside = start <= address && address.checked_add(bytes).is_some_and(|last| last <= end);
        is_inside.then(|| RawData::within(&lock(&self.memory), address - start, count)).flatten()
    }
}

/// A state, whatever its elements are.
trait Elements: Send {
    /// Where the elements are now: elsewhere than before when this process has read them; null: it
    /// could not read them to the end.
    fn address(&mut self) -> *mut c_void;
}

impl<T: Element> Elements for State<T> {
    fn address(&mut self) -> *mut c_void {
        let mut address = std::ptr::null_mut();
        self.update(|elements| address = elements.as_mut_ptr().cast());
        address
    }
}

/// Declares a state of these elements.
fn declared(
    session: &mut Session,
    name: &str,
    count: usize,
    data_type: DataType,
) -> Result<Box<dyn Elements>, SessionError> {
    macro_rules! of {
        ($type:ty) => {{
            let state: Box<dyn Elements> = Box::new(session.state::<$type>(name, count)?);
            state
        }};
    }
    Ok(match data_type {
        DataType::F64 => of!(f64),
        DataType::F32 => of!(f32),
        DataType::F16 => of!(f16),
        DataType::Bf16 => of!(bf16),
        DataType::F8E4M3 => of!(F8E4M3),
        DataType::F8E5M2 => of!(F8E5M2),
        DataType::I64 => of!(i64),
        DataType::I32 => of!(i32),
        DataType::I16 => of!(i16),
        DataType::I8 => of!(i8),
        DataType::U64 => of!(u64),
        DataType::U32 => of!(u32),
        DataType::U16 => of!(u16),
        DataType::U8 => of!(u8),
    })
}

/// The name that a caller gives.
///
/// # Safety
///
/// `name` is null, or a text that ends with a zero byte.
unsafe fn named(name: *const c_char) -> Result<String, Failed> {
    if name.is_null() {
        return Err(Failed::argument("name is NULL"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// Declares a state of the job: `count` zeroed elements that are equal on all members. Stores their
/// address. Each member changes them alike, after a step that was committed. All members declare
/// the same states before their first step. A process that joins a running job reads them from the
/// others in its first pleachSessionNext. After that they are at another address, which
/// pleachSessionGetState stores.
///
/// Ownership: `name` is NULL or a text that ends with a zero byte; `data` is NULL or points to a
/// pointer. The memory is the library's; the caller may read it at any time, and write it after a
/// step that was committed and before the next pleachSessionNext, until pleachSessionDestroy.
/// Threads: any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or there is a
/// state of this name; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another
/// thread is in a call on the session, or this process has left it or is a forked child;
/// pleachSystemError if the system refuses memory; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionState(
    session: pleachSession_t,
    name: *const c_char,
    count: usize,
    datatype: pleachDataType_t,
    data: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (data, name) = unsafe { (out(data, "data")?, named(name)?) };
        *data = std::ptr::null_mut();
        let data_type = data_type(datatype)?;
        expect_addressable(count, data_type.bytes())?;
        call(session, |live| {
            let mut state = declared(live.session()?, &name, count, data_type)?;
            *data = state.address();
            live.kept.states.insert(name, state);
            Ok(())
        })
    })
}

/// Stores the address of the elements of a state: after the first pleachSessionNext has returned,
/// where they stay. With pleachHealHidden a program calls it after each step that was committed,
/// before it changes the state. It stores NULL where this process could not read the states to the
/// end, because the members have changed: it changes nothing, and reads what the others have
/// changed.
///
/// Ownership: `name` is NULL or a text that ends with a zero byte; `data` is NULL or points to a
/// pointer. The memory is the library's, as pleachSessionState says. Threads: any; a call of a
/// second thread at the same time is refused. Blocks: with pleachHealHidden while processes read
/// the states, at most healWaitMs.
///
/// Returns: pleachSuccess, also after pleachSessionLeave; pleachInvalidArgument if there is no such
/// session or state, or an argument is NULL; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if another thread is in a call on the session, or this process is a forked
/// child; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionGetState(
    session: pleachSession_t,
    name: *const c_char,
    data: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (data, name) = unsafe { (out(data, "data")?, named(name)?) };
        *data = std::ptr::null_mut();
        call(session, |live| {
            let state = live.kept.states.get_mut(&name);
            let state =
                state.ok_or_else(|| Failed::argument(format!("this session has no state '{name}'")))?;
            *data = state.address();
            Ok(())
        })
    })
}

/// Allocates `size` zeroed bytes that are registered for all epochs: the communicator of each epoch
/// works on them in place, without copies. Where a process that was stopped, and may have mapped
/// them, was left behind, later calls copy them; take a new buffer then.
///
/// Ownership: `data` is NULL or points to a pointer. The memory is the library's; the caller may
/// use it until pleachSessionFreeBuffer or pleachSessionDestroy. Threads: any; a call of a second
/// thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, `data` is NULL or
/// `size` is 0; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another thread
/// is in a call on the session, or this process has left it or is a forked child; pleachSystemError
/// if the system refuses memory; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachSessionBuffer(
    session: pleachSession_t,
    size: usize,
    data: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let data = unsafe { out(data, "data") }?;
        *data = std::ptr::null_mut();
        if size == 0 {
            return Err(Failed::argument("size is 0"));
        }
        expect_addressable(size, 1)?;
        call(session, |live| {
            let made = SessionBuffer::new(live.session()?.buffer::<u8>(size)?);
            *data = std::ptr::with_exposed_provenance_mut(made.address());
            live.kept.buffers.push(made.clone());
            if let Some(epoch) = &live.epoch
                && let Ok(comm) = crate::comm::find(epoch.handle())
            {
                comm.registrations.lend([made]);
            }
            Ok(())
        })
    })
}

/// Frees a buffer of pleachSessionBuffer.
///
/// Ownership: the memory goes back to the library, which keeps it as long as calls use it. Threads:
/// any; a call of a second thread at the same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such session, or `data` is no
/// buffer of it; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another thread
/// is in a call on the session, or this process is a forked child; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachSessionFreeBuffer(session: pleachSession_t, data: *mut c_void) -> pleachResult_t {
    guarded(|| {
        call(session, |live| {
            let buffers = &mut live.kept.buffers;
            let place = buffers.iter().position(|buffer| buffer.address() == data.addr());
            let place = place.ok_or_else(|| Failed::argument("data is no buffer of this session"))?;
            drop(buffers.swap_remove(place));
            if let Some(epoch) = &live.epoch
                && let Ok(comm) = crate::comm::find(epoch.handle())
            {
                comm.registrations.take_back(data.addr());
            }
            Ok(())
        })
    })
}

fn expect_addressable(count: usize, size: usize) -> Result<(), Failed> {
    match count.checked_mul(size).is_some_and(|bytes| bytes <= isize::MAX as usize) {
        true => Ok(()),
        false => Err(Failed::argument(format!("{count} elements are more than a process can address"))),
    }
}
