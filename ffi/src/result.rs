//! Results of functions, and the text of the last failure of a thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pleach_collectives::engine::FaultKind;
use pleach_collectives::{CollectiveError, JoinGroupError, SplitError};

use crate::comm::pleachComm_t;

/// Version of the library: 10000 times the major, 100 times the minor, plus the patch number.
const VERSION: c_int = 100;

/// The result of a function. The numbers are those of NCCL.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum pleachResult_t {
    /// The function has done its work.
    pleachSuccess = 0,
    /// The CUDA driver has failed.
    pleachUnhandledCudaError = 1,
    /// The operating system has refused memory, a thread, a socket or a device, or ranks have not
    /// met. A function that makes ranks meet returns this for all that the system refuses.
    pleachSystemError = 2,
    /// A mistake of the library: please report the text of pleachGetLastError.
    pleachInternalError = 3,
    /// An argument cannot be right.
    pleachInvalidArgument = 4,
    /// The call cannot be made now, or the ranks make different calls.
    pleachInvalidUsage = 5,
    /// Another rank is lost, has left, has aborted or has broken the protocol.
    pleachRemoteError = 6,
    /// The awaited operation is not finished: call the function again.
    pleachInProgress = 7,
    /// A deadline has passed.
    pleachTimeout = 8,
    /// The other members of the session go on without this process; NCCL has no sessions.
    pleachExpelled = 9,
    /// Too few members of the session answer to agree on who goes on.
    pleachNoQuorum = 10,
    /// The session has fewer members than it needs for a step.
    pleachTooFew = 11,
    /// The step of the session failed again and again.
    pleachStepFailed = 12,
    /// This process has left the session, as it was told to.
    pleachLeft = 13,
    /// A state of the session is not the same on all members.
    pleachDiverged = 14,
}
use pleachResult_t::*;

/// The failure of a function: its result and its text.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) result: pleachResult_t,
    pub(crate) text: String,
}

impl Failed {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { result: pleachInvalidArgument, text: text.into() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { result: pleachInvalidUsage, text: text.into() }
    }

    pub(crate) fn system(text: impl Into<String>) -> Self {
        Self { result: pleachSystemError, text: text.into() }
    }
}

impl From<CollectiveError> for Failed {
    fn from(error: CollectiveError) -> Self {
        Self { result: result_of(&error), text: error.to_string() }
    }
}

impl From<JoinGroupError> for Failed {
    fn from(error: JoinGroupError) -> Self {
        Self { result: pleachSystemError, text: error.to_string() }
    }
}

impl From<SplitError> for Failed {
    fn from(error: SplitError) -> Self {
        let result = match &error {
            SplitError::Collective(error) => result_of(error),
            _ => pleachSystemError,
        };
        Self { result, text: error.to_string() }
    }
}

fn result_of(error: &CollectiveError) -> pleachResult_t {
    match error {
        CollectiveError::Failed(fault) => match fault.kind {
            FaultKind::TimedOut => pleachTimeout,
            FaultKind::Mismatch => pleachInvalidUsage,
            FaultKind::Compute => pleachUnhandledCudaError,
            _ => pleachRemoteError,
        },
        CollectiveError::Closed
        | CollectiveError::Forked { .. }
        | CollectiveError::MixedGroups { .. }
        | CollectiveError::TooMany => pleachInvalidUsage,
        CollectiveError::Gpu(_) => pleachUnhandledCudaError,
        CollectiveError::Thread(_) | CollectiveError::Register(_) | CollectiveError::Memory { .. } => {
            pleachSystemError
        }
        CollectiveError::Violation(_) => pleachInternalError,
        _ => pleachInvalidArgument,
    }
}

thread_local! {
    /// The text always ends with a zero byte. pleachGetLastError returns its address.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function. A failure or a panic becomes a result and a text.
#[inline]
pub(crate) fn guarded(body: impl FnOnce() -> Result<(), Failed>) -> pleachResult_t {
    // Locks that recover from a panic guard the data that the body shares with other threads.
    let failed = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return pleachSuccess,
        Ok(Err(failed)) => failed,
        Err(panic) => Failed { result: pleachInternalError, text: text_of(panic.as_ref()) },
    };
    keep_text(failed)
}

/// Keeps the text of a failure for pleachGetLastError.
#[cold]
pub(crate) fn keep_text(failed: Failed) -> pleachResult_t {
    let text = CString::new(failed.text.replace('\0', " ")).unwrap_or_default();
    LAST_ERROR.with_borrow_mut(|last| *last = text);
    failed.result
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("a mistake of pleach: {}", text.unwrap_or_default())
}

/// Makes a reference from a pointer of the caller.
///
/// # Safety
///
/// `pointer` is null, or aligned and valid for reads and writes until the function returns.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T, name: &str) -> Result<&'a mut T, Failed> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_mut() }.ok_or_else(|| Failed::argument(format!("{name} is NULL")))
}

/// Copies the value to which a pointer of the caller points.
///
/// # Safety
///
/// `pointer` is null, or aligned and valid for reads until the function returns.
pub(crate) unsafe fn input<T: Copy>(pointer: *const T, name: &str) -> Result<T, Failed> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.copied().ok_or_else(|| Failed::argument(format!("{name} is NULL")))
}

/// The size in the first field of a caller's struct. It is at least the size of the struct here.
///
/// # Safety
///
/// `given` is null, or points to a struct that begins with its size, and the size is right.
pub(crate) unsafe fn struct_size<T>(given: *const T, name: &str, initializer: &str) -> Result<usize, Failed> {
    // SAFETY: the caller's promise. Only the size is read before the size is known.
    let size = unsafe { input(given.cast::<usize>(), name) }?;
    if size < size_of::<T>() {
        return Err(Failed::argument(format!(
            "{name}->size is {size}, not {}; begin with {initializer}",
            size_of::<T>()
        )));
    }
    Ok(size)
}

/// Stores the version of the library: 10000 * major + 100 * minor + patch.
///
/// Ownership: `version` is NULL or points to an int. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `version` is NULL; pleachInternalError after
/// a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGetVersion(version: *mut c_int) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        *unsafe { out(version, "version") }? = VERSION;
        Ok(())
    })
}

/// Returns a short text for a result. A number that is not a result has a text too.
///
/// Ownership: the text is the library's and static. Threads: any. Blocks: no.
///
/// Returns: the text.
#[unsafe(no_mangle)]
pub extern "C" fn pleachGetErrorString(result: c_int) -> *const c_char {
    let text = match result {
        0 => c"success",
        1 => c"the CUDA driver has failed",
        2 => c"the operating system has refused something",
        3 => c"a mistake of pleach",
        4 => c"an argument cannot be right",
        5 => c"the call cannot be made now, or the ranks make different calls",
        6 => c"another rank is lost, has left, has aborted or has broken the protocol",
        7 => c"not finished",
        8 => c"a deadline has passed",
        9 => c"the other members of the session go on without this process",
        10 => c"too few members of the session answer",
        11 => c"the session has too few members for a step",
        12 => c"the step of the session failed again and again",
        13 => c"this process has left the session",
        14 => c"a state of the session is not the same on all members",
        _ => c"no result of pleach",
    };
    text.as_ptr()
}

/// Returns the text of the last failure of the calling thread: what happened, to which rank, and
/// what to do. The text is empty if no call of this thread has failed. It is never NULL. As in
/// NCCL, `comm` makes no difference; it may be NULL or destroyed.
///
/// Ownership: the text is the library's and stays until the next call of this thread fails.
/// Threads: any; each thread has a text of its own. Blocks: no.
///
/// Returns: the text.
#[unsafe(no_mangle)]
pub extern "C" fn pleachGetLastError(comm: pleachComm_t) -> *const c_char {
    let _ = comm;
    LAST_ERROR.with_borrow(|last| last.as_ptr())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_panic_is_a_result_with_its_text_and_success_keeps_the_text() {
        assert_eq!(guarded(|| panic!("a {} thing", "bad")), pleachInternalError);
        assert_eq!(guarded(|| Ok(())), pleachSuccess);
        // SAFETY: the text stays until the next failure of this thread.
        let text = unsafe { CStr::from_ptr(pleachGetLastError(std::ptr::null_mut())) };
        assert_eq!(text.to_str(), Ok("a mistake of pleach: a bad thing"));
        assert_eq!(guarded(|| Err(Failed::argument("with a \0 inside"))), pleachInvalidArgument);
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(pleachGetLastError(std::ptr::null_mut())) };
        assert_eq!(text.to_str(), Ok("with a   inside"));
    }

    #[test]
    fn every_number_has_a_text() {
        for number in -3..18 {
            // SAFETY: the texts are static.
            let text = unsafe { CStr::from_ptr(pleachGetErrorString(number)) };
            assert!(!text.is_empty(), "{number}");
        }
    }
}
