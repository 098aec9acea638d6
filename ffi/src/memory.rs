//! Registered memory, which belongs to the library or to the user.
//!
//! **Invariant:** memory of pleachMemAlloc stays at its address until it was freed and no
//! communicator or device that has registered it holds it any more. The user promises how long
//! memory of the user stays: see each function.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use pleach_collectives::{CollectiveError, RawData, Registered};
use pleach_transport::mutex::lock;
use pleach_transport::{Memory, RegisterError, Share, SharedMemory, Space};

use crate::batch::expect_no_batch;
use crate::comm::{find, pleachComm_t};
use crate::result::{Failed, guarded, out, pleachResult_t};
use crate::session::memory::SessionBuffer;

/// A callback that is called once when neither the library nor a peer uses memory of the user any
/// more. Its arguments are the address of the memory and the context that was given. Any thread of
/// the process may call it, inside a function of this library or outside. The callback must not
/// call this library. NULL is no callback.
pub type pleachRelease_t = Option<unsafe extern "C" fn(address: *mut c_void, context: *mut c_void)>;

/// How long pleachCommDeregister waits until the fabric gives memory back.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// By address: memory that pleachMemAlloc has given out.
static ALLOCATED: Mutex<BTreeMap<usize, Arc<SharedMemory>>> = Mutex::new(BTreeMap::new());

fn allocated() -> MutexGuard<'static, BTreeMap<usize, Arc<SharedMemory>>> {
    lock(&ALLOCATED)
}

/// Memory of the user.
pub(crate) struct UserMemory {
    base: NonNull<u8>,
    len: usize,
    /// The callback, set after the memory was registered.
    release: OnceLock<Release>,
}

struct Release {
    function: unsafe extern "C" fn(address: *mut c_void, context: *mut c_void),
    context: *mut c_void,
}

impl UserMemory {
    /// # Safety
    ///
    /// `len` bytes at the address are readable and writable until nothing holds the memory.
    pub(crate) unsafe fn new(address: *mut c_void, len: usize) -> Result<Arc<Self>, Failed> {
        let base = NonNull::new(address.cast()).ok_or_else(|| Failed::argument("the address is NULL"))?;
        if len > isize::MAX as usize || (address as usize).checked_add(len).is_none() {
            return Err(Failed::argument(format!("{len} bytes are more than a process can address")));
        }
        Ok(Arc::new(Self { base, len, release: OnceLock::new() }))
    }

    /// Has `release` called when nothing holds the memory any more.
    ///
    /// # Safety
    ///
    /// Any thread may call `release`.
    pub(crate) unsafe fn call_at_end(&self, release: pleachRelease_t, context: *mut c_void) {
        if let Some(function) = release {
            let _ = self.release.set(Release { function, context });
        }
    }
}

impl Drop for UserMemory {
    fn drop(&mut self) {
        if let Some(Release { function, context }) = self.release.get() {
            // SAFETY: the caller's promise (`call_at_end`); this is the only call.
            unsafe { function(self.base.as_ptr().cast(), *context) }
        }
    }
}

// SAFETY: the caller's promise (`new`).
unsafe impl Memory for UserMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }
    fn len(&self) -> usize {
        self.len
    }
    fn space(&self) -> Space {
        Space::Host
    }
    fn share(&self) -> Share<'_> {
        Share::Private
    }
}

// SAFETY: an address and a function that any thread may call (`call_at_end`).
unsafe impl Send for UserMemory {}
// SAFETY: as above.
unsafe impl Sync for UserMemory {}

/// The allocated memory that holds these bytes.
fn allocation_of(address: *mut c_void, len: usize) -> Option<Arc<SharedMemory>> {
    let start = address as usize;
    let end = start.checked_add(len)?;
    let known = allocated();
    let (base, memory) = known.range(..=start).next_back()?;
    (end <= base + memory.len()).then(|| Arc::clone(memory))
}

/// The failure of a C function for a refused registration.
pub(crate) fn register_error(error: &RegisterError) -> Failed {
    match error {
        RegisterError::NotShareable { fabric } => Failed::usage(format!(
            "{fabric} moves only memory that other processes can map; allocate it with pleachMemAlloc or \
             pleachRegionAlloc"
        )),
        other => Failed::system(other.to_string()),
    }
}

/// The memory that a communicator has registered.
#[derive(Default)]
pub(crate) struct Registrations {
    /// The number of registrations. Calls on a communicator without registrations take no lock.
    /// Relaxed: a call that does not see a registration of another thread makes copies.
    count: AtomicUsize,
    list: Mutex<Vec<Registration>>,
    /// Buffers of the session whose epoch this is.
    lent: Mutex<Vec<SessionBuffer>>,
}

struct Registration {
    number: usize,
    registered: Registered,
    /// Whether it is memory of pleachMemAlloc.
    is_allocated: bool,
}

/// The next number of a registration. No number is given twice in a process.
static NUMBERS: AtomicUsize = AtomicUsize::new(1);

impl Registrations {
    fn lock(&self) -> MutexGuard<'_, Vec<Registration>> {
        lock(&self.list)
    }

    fn add(&self, registered: Registered, is_allocated: bool) -> usize {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut list = self.lock();
        list.push(Registration { number, registered, is_allocated });
        self.count.fetch_add(1, Ordering::Relaxed);
        number
    }

    fn take(&self, number: usize) -> Option<Registration> {
        let mut list = self.lock();
        let place = list.iter().position(|one| one.number == number)?;
        let taken = list.swap_remove(place);
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(taken)
    }

    /// Calls on elements of these buffers are carried out in place from now on.
    pub(crate) fn lend(&self, buffers: impl IntoIterator<Item = SessionBuffer>) {
        let mut lent = lock(&self.lent);
        let before = lent.len();
        lent.extend(buffers);
        self.count.fetch_add(lent.len() - before, Ordering::Relaxed);
    }

    /// Calls on elements of the buffer at this address make copies from now on.
    pub(crate) fn take_back(&self, address: usize) {
        let mut lent = lock(&self.lent);
        let before = lent.len();
        lent.retain(|buffer| buffer.address() != address);
        self.count.fetch_sub(before - lent.len(), Ordering::Relaxed);
    }

    fn registered(&self, address: usize, count: usize, size: usize) -> Option<RawData> {
        let bytes = count.checked_mul(size).filter(|bytes| *bytes > 0)?;
        let end = address.checked_add(bytes)?;
        let registered = self.lock().iter().find_map(|Registration { registered, .. }| {
            let held = registered.addresses();
            let is_inside = held.start <= address && end <= held.end;
            is_inside.then(|| RawData::registered(registered, address - held.start, count)).flatten()
        });
        registered.or_else(|| lock(&self.lent).iter().find_map(|lent| lent.within(address, count, bytes)))
    }

    /// The input and the output of a call. Each operand is an address and a number of elements of
    /// `size` bytes. The result names registered memory for each operand that lies in registered
    /// memory. Both stay plain addresses if they share bytes and only one of them is registered.
    #[inline]
    pub(crate) fn name(
        &self,
        operands: [Option<(*mut c_void, usize)>; 2],
        size: usize,
    ) -> [Option<RawData>; 2] {
        match self.count.load(Ordering::Relaxed) {
            0 => operands.map(|data| data.map(|(address, count)| RawData::at(address, count))),
            _ => self.name_registered(operands, size),
        }
    }

    /// As [`Self::name`], for a call with one operand.
    #[inline(always)]
    pub(crate) fn name_one(&self, address: *mut c_void, count: usize, size: usize) -> RawData {
        let registered = match self.count.load(Ordering::Relaxed) {
            0 => None,
            _ => self.registered(address as usize, count, size),
        };
        registered.unwrap_or_else(|| RawData::at(address, count))
    }

    fn name_registered(
        &self,
        operands: [Option<(*mut c_void, usize)>; 2],
        size: usize,
    ) -> [Option<RawData>; 2] {
        let found = operands
            .map(|data| data.and_then(|(address, count)| self.registered(address as usize, count, size)));
        let is_partly = found.iter().zip(&operands).any(|(found, data)| found.is_none() && data.is_some());
        let is_plain = is_partly && share_bytes(&operands, size);
        let mut found = found.into_iter();
        operands.map(|data| {
            let found = found.next().flatten().filter(|_| !is_plain);
            data.map(|(address, count)| found.unwrap_or_else(|| RawData::at(address, count)))
        })
    }
}

fn share_bytes(operands: &[Option<(*mut c_void, usize)>; 2], size: usize) -> bool {
    let range = |data: &(*mut c_void, usize)| {
        let start = data.0 as usize;
        start..start.saturating_add(data.1.saturating_mul(size))
    };
    let [Some(first), Some(second)] = operands else { return false };
    let (first, second) = (range(first), range(second));
    first.start < second.end && second.start < first.end
}

/// Allocates `size` zeroed bytes of host memory, aligned to a page. Every fabric can register this
/// memory.
///
/// Ownership: `ptr` is NULL or points to a pointer. The caller frees the memory with
/// pleachMemFree. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `ptr` is NULL or `size` is 0;
/// pleachSystemError if the system has no memory; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachMemAlloc(ptr: *mut *mut c_void, size: usize) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let ptr = unsafe { out(ptr, "ptr") }?;
        *ptr = std::ptr::null_mut();
        if size == 0 {
            return Err(Failed::argument("size is 0"));
        }
        let memory = SharedMemory::new(size)
            .map_err(|error| Failed::system(format!("{size} bytes cannot be allocated: {error}")))?;
        let base = memory.base().as_ptr();
        allocated().insert(base as usize, memory);
        *ptr = base.cast();
        Ok(())
    })
}

/// Frees memory of pleachMemAlloc.
///
/// Ownership: the memory goes back to the library. Registered memory stays readable and writable
/// until it is deregistered or its communicator is destroyed. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `ptr` is not an address that pleachMemAlloc has
/// stored, or was freed already (for NULL the function succeeds); pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachMemFree(ptr: *mut c_void) -> pleachResult_t {
    guarded(|| {
        if ptr.is_null() {
            return Ok(());
        }
        let taken = allocated().remove(&(ptr as usize));
        taken.map(drop).ok_or_else(|| Failed::argument("ptr is no memory of pleachMemAlloc, or was freed"))
    })
}

/// Registers memory with a communicator. Calls on elements inside this memory are carried out in
/// place, without copies. Stores a handle for pleachCommDeregister. Memory of pleachMemAlloc is
/// registered as a whole, over every fabric. Other memory can be registered only over "tcp" and
/// "verbs".
///
/// Ownership: `buff` is NULL or has `size` bytes; `handle` is NULL or points to a pointer. Memory
/// that is not of pleachMemAlloc must stay readable and writable until its registration has ended.
/// It has ended when pleachCommDeregister has returned with success. It has also ended when
/// pleachCommDestroy or pleachCommAbort has returned and no other thread is in a call on the
/// communicator. Threads: any. Blocks: no. The function is local: other ranks need not call it.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if this process is a forked child, or the fabric
/// needs memory of pleachMemAlloc; pleachSystemError if the system refuses to register;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommRegister(
    comm: pleachComm_t,
    buff: *mut c_void,
    size: usize,
    handle: *mut *mut c_void,
) -> pleachResult_t {
    // SAFETY: the caller's promise.
    unsafe { pleachCommRegisterWithRelease(comm, buff, size, None, std::ptr::null_mut(), handle) }
}

/// As pleachCommRegister, for memory of the user with a release callback. The memory must stay
/// until `release` is called. `release` is called once, with `buff` and `context`: during
/// pleachCommDeregister, pleachCommDestroy or pleachCommAbort, or later when the last call that
/// uses the memory ends. It is not called if this function fails. It is not called for memory of
/// pleachMemAlloc, for which `release` must be NULL.
///
/// Ownership: `buff` is NULL or has `size` bytes until `release` is called; `handle` is NULL or
/// points to a pointer. Threads: any; any thread may call `release`. Blocks: no. The function is
/// local: other ranks need not call it.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if this process is a forked child, or the fabric
/// needs memory of pleachMemAlloc; pleachSystemError if the system refuses to register;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachCommRegisterWithRelease(
    comm: pleachComm_t,
    buff: *mut c_void,
    size: usize,
    release: pleachRelease_t,
    context: *mut c_void,
    handle: *mut *mut c_void,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let handle = unsafe { out(handle, "handle") }?;
        *handle = std::ptr::null_mut();
        expect_no_batch()?;
        let held = find(comm)?;
        if buff.is_null() || size == 0 {
            return Err(Failed::argument("buff is NULL or size is 0"));
        }
        let register = |memory| {
            held.group.register(memory).map_err(|error| match &error {
                CollectiveError::Register(error) => register_error(error),
                _ => Failed::from(error),
            })
        };
        let (registered, is_allocated) = match allocation_of(buff, size) {
            Some(_) if release.is_some() => {
                return Err(Failed::argument("memory of pleachMemAlloc takes no release callback"));
            }
            Some(memory) => (register(memory)?, true),
            None => {
                // SAFETY: the caller's promise.
                let memory = unsafe { UserMemory::new(buff, size) }?;
                let registered = register(Arc::clone(&memory) as Arc<dyn Memory>)?;
                // SAFETY: the caller's promise.
                unsafe { memory.call_at_end(release, context) };
                (registered, false)
            }
        };
        let number = held.registrations.add(registered, is_allocated);
        *handle = std::ptr::without_provenance_mut(number);
        Ok(())
    })
}

/// Ends a registration.
///
/// Ownership: the handle goes back to the library and is invalid from now on; after success the
/// memory is the caller's again. After pleachTimeout the memory must stay until the communicator is
/// destroyed. Threads: any; no call on the memory may be under way. Blocks: until the fabric does
/// not hold the memory any more, at most 5 s.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such communicator or
/// registration; pleachTimeout if a call still uses the memory after 5 s; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachCommDeregister(comm: pleachComm_t, handle: *mut c_void) -> pleachResult_t {
    guarded(|| {
        let held = find(comm)?;
        let taken = held.registrations.take(handle.addr());
        let Some(Registration { registered, is_allocated, .. }) = taken else {
            return Err(Failed::argument("handle is no registration of this communicator, or was ended"));
        };
        if is_allocated {
            // The library owns the memory, and keeps it as long as it is needed.
            drop(registered);
            return Ok(());
        }
        match held.group.deregister(registered, DEREGISTER_TIMEOUT) {
            true => Ok(()),
            false => Err(Failed {
                result: pleachResult_t::pleachTimeout,
                text: "a call still uses the memory; keep it until the communicator is destroyed".to_owned(),
            }),
        }
    })
}
