//! Windows: memory that the ranks of a communicator read and write without each other's calls.
//!
//! **Invariant:** one call at a time is made on a window. A second thread is refused at once, and
//! so is a call of the function that pleachWindowPoll calls. So the elements that this function
//! sees stay until it has returned: see [`pleach_collectives::Window::poll`].

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use pleach_collectives::{Arrival, CollectiveError, DataType, Group, SplitError, Window, WindowError, Word};

use crate::batch::expect_no_batch;
use crate::calls::rank_of;
use crate::comm::{Comm, find, pleachComm_t};
use crate::handles::Handles;
use crate::result::{Failed, guarded, out, pleachResult_t};
use crate::types::{data_type, pleachDataType_t};

/// A window. Its contents are opaque to the caller.
pub struct pleachWindow(());

/// A window: elements that each rank publishes and its peers read, and slots into which its peers
/// write. NULL is no window.
pub type pleachWindow_t = *mut pleachWindow;

/// Length of a word, in bytes.
pub const PLEACH_WORD_BYTES: usize = 48;

/// A word: bytes for the caller's own use, which go with a version or a write.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachWord_t {
    /// The bytes.
    pub bytes: [u8; PLEACH_WORD_BYTES],
}

/// A write of a peer that has come.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachArrival_t {
    /// The rank that has written.
    pub source: c_int,
    /// The slot of that rank.
    pub slot: c_int,
    /// The number of elements.
    pub count: usize,
    /// The elements, which stay until the function that got this struct has returned.
    pub data: *const c_void,
    /// The word of the write.
    pub word: pleachWord_t,
}

/// A function that pleachWindowPoll calls with each write that has come, and with the context that
/// was given. It must return, and must make no call on the window.
pub type pleachArrived_t =
    Option<unsafe extern "C" fn(arrival: *const pleachArrival_t, context: *mut c_void)>;

/// The window behind a handle. Its elements are bytes: `element` of them are one of the caller's.
struct Opened {
    /// `None` after pleachWindowFinalize.
    window: Mutex<Option<Window<u8>>>,
    count: usize,
    element: usize,
}

static WINDOWS: Handles<Opened> = Handles::new("window", "window");

impl Opened {
    /// Locks the window for one call.
    fn lock(&self) -> Result<MutexGuard<'_, Option<Window<u8>>>, Failed> {
        match self.window.try_lock() {
            Ok(window) => Ok(window),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(Failed::usage("another call on this window is under way; make one call at a time"))
            }
        }
    }

    /// The bytes of `count` elements from `first` on.
    fn bytes(&self, first: usize, count: usize) -> Result<std::ops::Range<usize>, Failed> {
        match first.checked_add(count).filter(|end| *end <= self.count) {
            Some(end) => Ok(first * self.element..end * self.element),
            None => Err(Failed::argument(format!(
                "{count} elements from element {first} on are not inside of a window of {}",
                self.count
            ))),
        }
    }
}

/// What the ranks compare before they make a window.
#[derive(Clone, Copy)]
struct Terms {
    count: usize,
    data_type: DataType,
    slots: u16,
}

impl Terms {
    fn words(self) -> [u64; 3] {
        [self.count as u64, self.data_type as u64, self.slots.into()]
    }

    /// Refuses terms that are not the same on all ranks, on all ranks.
    fn compare(self, comm: &Comm, group: &Group) -> Result<(), Failed> {
        let own = self.words();
        let mut all = vec![0; own.len() * group.world_size() as usize];
        comm.note(group.all_gather(&own[..], &mut all))?;
        let other = all.as_chunks::<3>().0.iter().zip(0..).find(|(words, _)| **words != own);
        let Some((words, rank)) = other else { return Ok(()) };
        let described = |[count, data_type, slots]: [u64; 3]| {
            let known = DataType::ALL.into_iter().find(|known| *known as u64 == data_type);
            let name = known.map_or_else(|| "unknown elements".to_owned(), |known| known.to_string());
            format!("{count} {name} with {slots} slots")
        };
        Err(Failed::usage(format!(
            "rank {rank} asks for a window of {}, rank {} of {}; ask for the same on all",
            described(*words),
            group.rank(),
            described(own)
        )))
    }
}

/// Why there is no window.
fn not_opened(comm: &Comm, error: WindowError, element: usize) -> Failed {
    match error {
        WindowError::Collective(error) | WindowError::Split(SplitError::Collective(error)) => {
            comm.noted(error)
        }
        WindowError::Split(error @ SplitError::NoStore) => Failed::usage(error.to_string()),
        WindowError::Split(error) => error.into(),
        WindowError::TooLong { len, max } => {
            let (len, max) = (len / element, max / element);
            Failed::argument(WindowError::TooLong { len, max }.to_string())
        }
        error @ WindowError::TooManySlots { .. } => Failed::argument(error.to_string()),
        error => Failed::usage(error.to_string()),
    }
}

/// Makes a call on a window.
fn call<T>(
    window: pleachWindow_t,
    make: impl FnOnce(&mut Window<u8>, &Opened) -> Result<T, Failed>,
) -> Result<T, Failed> {
    expect_no_batch()?;
    let opened = WINDOWS.find(window)?;
    let mut locked = opened.lock()?;
    let window = locked.as_mut().ok_or_else(|| Failed::usage("the window was finalized; make a new one"))?;
    make(window, &opened)
}

/// The word of a caller; zeros for NULL.
///
/// # Safety
///
/// `word` is null or points to a word.
unsafe fn word_of(word: *const pleachWord_t) -> Word {
    // SAFETY: the caller's promise.
    let given = unsafe { word.as_ref() };
    given.and_then(|word| Word::new(&word.bytes)).unwrap_or(Word::EMPTY)
}

/// Stores a value where the caller has asked for it.
///
/// # Safety
///
/// `pointer` is null, or aligned and valid for writes.
unsafe fn store<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: the caller's promise.
        unsafe { pointer.write(value) }
    }
}

/// Refuses memory that is not there.
fn expect_memory(data: *const c_void, bytes: usize) -> Result<(), Failed> {
    match data.is_null() && bytes > 0 {
        false => Ok(()),
        true => Err(Failed::argument("data is NULL")),
    }
}

/// The bytes that a call reads.
///
/// # Safety
///
/// `data` has so many bytes, which nobody writes meanwhile.
unsafe fn read_bytes<'a>(data: *const c_void, bytes: usize) -> Result<&'a [u8], Failed> {
    expect_memory(data, bytes)?;
    match bytes {
        0 => Ok(&[]),
        // SAFETY: the caller's promise; bytes may lie at any address.
        _ => Ok(unsafe { std::slice::from_raw_parts(data.cast(), bytes) }),
    }
}

/// The bytes that a call writes.
///
/// # Safety
///
/// `data` has so many bytes, which nobody else reads or writes meanwhile.
unsafe fn written_bytes<'a>(data: *mut c_void, bytes: usize) -> Result<&'a mut [u8], Failed> {
    expect_memory(data, bytes)?;
    match bytes {
        0 => Ok(&mut []),
        // SAFETY: the caller's promise; bytes may lie at any address.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), bytes) }),
    }
}

fn slot_of(slot: c_int) -> Result<u16, Failed> {
    u16::try_from(slot).map_err(|_| Failed::argument(format!("slot is {slot}; slots are counted from 0")))
}

/// Makes a window of `count` elements. Each rank publishes so many elements, and has `slots` slots
/// at each peer, into which it writes. All ranks make the same call. The window has a group of its
/// own: other calls on the communicator may run at the same time, pleachCommAbort does not end the
/// window, and the communicator may be destroyed before the window.
///
/// A window takes the memory of two copies of the elements, and of `slots` slots for each rank, of
/// as many elements. The system gives pages of this memory when they are touched.
///
/// Ownership: `window` is NULL or points to a pleachWindow_t. The caller ends it with
/// pleachWindowDestroy. Threads: any; calls of several threads on one communicator need one order
/// on all ranks. Blocks: until all ranks have made the call. It waits at most the timeout of the
/// communicator for the ranks to make the call, then at most joinTimeoutMs while their group is
/// made.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the
/// communicator works on memory of GPUs; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if there are 65536 windows already, the ranks ask for different windows or make
/// different calls, the communicator was finalized, or this process is a forked child;
/// pleachTimeout if another rank is late; pleachRemoteError if a rank is lost, has left, has
/// aborted or has broken the protocol, or the members of a session have changed; pleachSystemError
/// if the ranks do not meet; pleachUnhandledCudaError if a GPU fails; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowInit(
    window: *mut pleachWindow_t,
    count: usize,
    datatype: pleachDataType_t,
    slots: c_int,
    comm: pleachComm_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let window = unsafe { out(window, "window") }?;
        *window = std::ptr::null_mut();
        expect_no_batch()?;
        let held = find(comm)?;
        let data_type = data_type(datatype)?;
        let element = data_type.bytes();
        let Ok(slots) = u16::try_from(slots) else {
            return Err(Failed::argument(format!("slots is {slots}; take 0 to {}", u16::MAX)));
        };
        let Some(bytes) = count.checked_mul(element).filter(|bytes| *bytes <= isize::MAX as usize) else {
            return Err(Failed::argument(format!("{count} elements are more than a process can address")));
        };
        let made = held.with_group(std::ptr::null_mut(), |group| {
            Terms { count, data_type, slots }.compare(&held, group)?;
            group.window::<u8>(bytes, slots).map_err(|error| not_opened(&held, error, element))
        });
        *window = WINDOWS.keep(Opened { window: Mutex::new(Some(made?)), count, element })?;
        Ok(())
    })
}

/// Publishes all elements of this rank as its next version, with a word. It waits for nobody. Reads
/// of peers that are under way return this version or the version before.
///
/// Ownership: `data` is NULL or has as many elements as the window, which are read before the
/// function returns; it may be NULL if the window has no elements. `word` is NULL, for zeros, or
/// points to a word. `version` is NULL, or points to a uint64_t in which the number of the version
/// is stored; the first is 1. Threads: any; a call of a second thread at the same time is refused.
/// Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window or `data` is NULL;
/// pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another call on the window is
/// under way, the window was finalized, or this process is a forked child; pleachTimeout if the
/// window has ended because a rank was late; pleachRemoteError if a rank is lost, has left, has
/// aborted or has broken the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowPublish(
    window: pleachWindow_t,
    data: *const c_void,
    word: *const pleachWord_t,
    version: *mut u64,
) -> pleachResult_t {
    guarded(|| {
        call(window, |window, opened| {
            let bytes = opened.bytes(0, opened.count)?;
            // SAFETY: the caller's promise.
            let (elements, word) = unsafe { (read_bytes(data, bytes.len())?, word_of(word)) };
            let published = window.publish(elements, word)?;
            // SAFETY: the caller's promise.
            unsafe { store(version, published) };
            Ok(())
        })
    })
}

/// Reads `count` elements of a rank, from element `first` on. All are of one version, also while
/// their owner publishes: the newest version at some time during the call, or the version before.
/// Version 0 is zeros: nothing was published yet. The owner need not make a call. A read begins
/// again if its owner publishes twice meanwhile.
///
/// Ownership: `data` is NULL or has room for `count` elements; it may be NULL for 0. `version` and
/// `word` are NULL, or point to where the version and its word are stored. Threads: any; a call of
/// a second thread at the same time is refused. Blocks: until the elements are here, at most the
/// timeout that the communicator had at pleachWindowInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window, rank or element, or
/// `data` is NULL; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another call
/// on the window is under way, the window was finalized, or this process is a forked child;
/// pleachTimeout if the rank is late; pleachRemoteError if a rank is lost, has left, has aborted or
/// has broken the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowRead(
    window: pleachWindow_t,
    peer: c_int,
    first: usize,
    count: usize,
    data: *mut c_void,
    version: *mut u64,
    word: *mut pleachWord_t,
) -> pleachResult_t {
    let read = |window: &mut Window<u8>, peer, range, into: &mut [u8]| -> Result<u64, CollectiveError> {
        let (found, its_word) = window.read(peer, range, into)?;
        // SAFETY: the caller's promise.
        unsafe { store(word, pleachWord_t { bytes: *its_word.as_bytes() }) };
        Ok(found)
    };
    // SAFETY: the caller's promise.
    unsafe { read_elements(window, (peer, first, count), data, version, read) }
}

/// As pleachWindowRead, but takes the bytes as they are while their owner publishes: elements may
/// be of the stored version, of newer versions, and mixed in their bytes. It takes one step less,
/// and never begins again. There is no word.
///
/// Ownership: `data` is NULL or has room for `count` elements; it may be NULL for 0. `version` is
/// NULL, or points to where the version is stored. Threads: any; a call of a second thread at the
/// same time is refused. Blocks: until the elements are here, at most the timeout that the
/// communicator had at pleachWindowInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window, rank or element, or
/// `data` is NULL; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if another call
/// on the window is under way, the window was finalized, or this process is a forked child;
/// pleachTimeout if the rank is late; pleachRemoteError if a rank is lost, has left, has aborted or
/// has broken the protocol; pleachSystemError if the system refuses memory or a thread;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowReadTorn(
    window: pleachWindow_t,
    peer: c_int,
    first: usize,
    count: usize,
    data: *mut c_void,
    version: *mut u64,
) -> pleachResult_t {
    let read = |window: &mut Window<u8>, peer, range, into: &mut [u8]| window.read_torn(peer, range, into);
    // SAFETY: the caller's promise.
    unsafe { read_elements(window, (peer, first, count), data, version, read) }
}

/// Reads `count` elements of a peer from element `first` on.
///
/// # Safety
///
/// `data` is null or has room for the elements; `version` is null or valid for writes.
unsafe fn read_elements(
    window: pleachWindow_t,
    (peer, first, count): (c_int, usize, usize),
    data: *mut c_void,
    version: *mut u64,
    read: impl FnOnce(&mut Window<u8>, u32, std::ops::Range<usize>, &mut [u8]) -> Result<u64, CollectiveError>,
) -> pleachResult_t {
    guarded(|| {
        call(window, |window, opened| {
            let (peer, range) = (rank_of(peer, "peer")?, opened.bytes(first, count)?);
            // SAFETY: the caller's promise.
            let into = unsafe { written_bytes(data, range.len()) }?;
            let found = read(window, peer, range, into)?;
            // SAFETY: the caller's promise.
            unsafe { store(version, found) };
            Ok(())
        })
    })
}

/// Stores 1 if this rank's slot at a peer is free, so that a write into it waits for nothing, and 0
/// if the peer has not polled the slot's last write.
///
/// Ownership: `isFree` is NULL or points to an int. Threads: any; a call of a second thread at the
/// same time is refused. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window, rank or slot, `peer`
/// is this rank, or `isFree` is NULL; pleachInvalidUsage between pleachGroupStart and
/// pleachGroupEnd, if another call on the window is under way, the window was finalized, or this
/// process is a forked child; pleachTimeout if the window has ended because a rank was late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachInternalError after a mistake
/// of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowIsFree(
    window: pleachWindow_t,
    peer: c_int,
    slot: c_int,
    isFree: *mut c_int,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let is_free = unsafe { out(isFree, "isFree") }?;
        let found = call(window, |window, _| {
            window.is_free(rank_of(peer, "peer")?, slot_of(slot)?).map_err(Failed::from)
        });
        *is_free = c_int::from(found?);
        Ok(())
    })
}

/// Writes `count` elements with a word into this rank's slot at a peer. It waits until the peer has
/// polled the slot's last write. The peer polls the writes of this rank in the order in which they
/// were made.
///
/// Ownership: `data` is NULL or has `count` elements, which are read before the function returns;
/// it may be NULL for 0. `word` is NULL, for zeros, or points to a word. Threads: any; a call of a
/// second thread at the same time is refused. Blocks: until the slot is free, at most the timeout
/// that the communicator had at pleachWindowInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window, rank or slot, `peer`
/// is this rank, `data` is NULL, or there are more elements than the window has; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if another call on the window is under way, the
/// window was finalized, or this process is a forked child; pleachTimeout if the peer has not
/// polled in time; pleachRemoteError if a rank is lost, has left, has aborted or has broken the
/// protocol; pleachSystemError if the system refuses memory or a thread; pleachInternalError after
/// a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowWrite(
    window: pleachWindow_t,
    peer: c_int,
    slot: c_int,
    data: *const c_void,
    count: usize,
    word: *const pleachWord_t,
) -> pleachResult_t {
    guarded(|| {
        call(window, |window, opened| {
            let (peer, slot) = (rank_of(peer, "peer")?, slot_of(slot)?);
            let bytes = opened.bytes(0, count)?.len();
            // SAFETY: the caller's promise.
            let (elements, word) = unsafe { (read_bytes(data, bytes)?, word_of(word)) };
            Ok(window.write(peer, slot, elements, word)?)
        })
    })
}

/// Calls a function with each write that has come, on this thread: each write once, and the writes
/// of one rank in the order in which they were made. A slot is free again when the function has
/// returned. If no write has come, waits for one up to `timeoutMs` milliseconds; 0 does not wait.
///
/// Ownership: `arrived` is NULL or a function that is called with `context`; what it is given stays
/// until it has returned. `count` is NULL, or points to a size_t in which the number of the writes
/// is stored. Threads: any; a call of a second thread at the same time is refused, and so is a call
/// on the window from `arrived`. Blocks: at most `timeoutMs`, and as long as `arrived` takes.
///
/// Returns: pleachSuccess, also if no write has come; pleachInvalidArgument if there is no such
/// window, or `arrived` is NULL; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, if
/// another call on the window is under way, the window was finalized, or this process is a forked
/// child; pleachTimeout if the window has ended because a rank was late; pleachRemoteError if a
/// rank is lost, has left, has aborted or has broken the protocol; pleachSystemError if the system
/// refuses memory or a thread; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachWindowPoll(
    window: pleachWindow_t,
    timeoutMs: u64,
    arrived: pleachArrived_t,
    context: *mut c_void,
    count: *mut usize,
) -> pleachResult_t {
    guarded(|| {
        let arrived = arrived.ok_or_else(|| Failed::argument("arrived is NULL"))?;
        call(window, |window, opened| {
            let show = |arrival: Arrival<'_, u8>| {
                let shown = pleachArrival_t {
                    source: arrival.from as c_int,
                    slot: c_int::from(arrival.slot),
                    count: arrival.data().len() / opened.element,
                    data: arrival.data().as_ptr().cast(),
                    word: pleachWord_t { bytes: *arrival.word.as_bytes() },
                };
                // SAFETY: the caller promises a function that may be called so.
                unsafe { arrived(&shown, context) }
            };
            let found = match timeoutMs {
                0 => window.poll(show),
                limit => window.wait(Duration::from_millis(limit), show),
            }?;
            // SAFETY: the caller's promise.
            unsafe { store(count, found) };
            Ok(())
        })
    })
}

/// Ends a window in order, when this rank neither reads nor writes any more. All ranks call the
/// function. Every later call on the window returns pleachInvalidUsage, except for
/// pleachWindowDestroy.
///
/// Ownership: the window stays the caller's. The caller ends it with pleachWindowDestroy. Threads:
/// any; a call of a second thread at the same time is refused. Blocks: until all ranks have called
/// the function, at most the timeout that the communicator had at pleachWindowInit.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, if another call on the window is under way, the
/// window was finalized, or this process is a forked child; pleachTimeout if another rank is late;
/// pleachRemoteError if a rank is lost, has left, has aborted or has broken the protocol;
/// pleachSystemError if the system refuses memory or a thread; pleachInternalError after a mistake
/// of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachWindowFinalize(window: pleachWindow_t) -> pleachResult_t {
    guarded(|| {
        expect_no_batch()?;
        let opened = WINDOWS.find(window)?;
        let taken = opened.lock()?.take();
        let window = taken.ok_or_else(|| Failed::usage("the window was finalized"))?;
        Ok(window.close()?)
    })
}

/// Frees a window. If it was not finalized, this rank leaves now, which ends the window for ranks
/// that still need this rank.
///
/// Ownership: the handle goes back to the library and is invalid from now on. A call of another
/// thread that is under way keeps the window until the call has ended. Threads: any, also while
/// another thread is in a call. Blocks: while peers take the data that this rank has sent, at most
/// 5 s. It does not wait for calls of other threads.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such window; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachWindowDestroy(window: pleachWindow_t) -> pleachResult_t {
    guarded(|| WINDOWS.take(window).map(drop))
}
