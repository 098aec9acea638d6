//! Registered memory of a device, and its names for peers.

use std::ffi::c_void;
use std::sync::Arc;

use pleach_transport::{Memory, Region, RegionKey, RemoteSlice, SharedMemory, Slice};

use super::{find, pleachDevice_t};
use crate::handles::Handles;
use crate::memory::{UserMemory, pleachRelease_t, register_error};
use crate::result::{Failed, guarded, out, pleachResult_t};

/// Registered memory. Its description is opaque to the caller.
pub struct pleachRegion(());

/// Memory that is registered with a device. NULL is no region.
pub type pleachRegion_t = *mut pleachRegion;

/// The name of a part of a region for other ranks. It consists of plain numbers, which may be sent
/// by any means between hosts of one byte order. A rank that has the name may read and write the
/// whole region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachRemoteSlice_t {
    /// The key of the region.
    pub key: u64,
    /// The offset of the part in the region, in bytes.
    pub offset: u64,
    /// The length of the part, in bytes.
    pub length: u64,
}

static REGIONS: Handles<Region> = Handles::new("region", "region");

pub(crate) fn remote_slice(slice: pleachRemoteSlice_t) -> RemoteSlice {
    RemoteSlice { key: RegionKey(slice.key), offset: slice.offset, len: slice.length }
}

/// A part of the region of a handle.
pub(crate) fn slice(region: pleachRegion_t, offset: usize, length: usize) -> Result<Slice, Failed> {
    let region = REGIONS.find(region)?;
    let end = offset.saturating_add(length);
    region.slice(offset..end).map_err(|error| Failed::argument(error.to_string()))
}

/// Allocates `size` zeroed bytes and registers them with a device. Every fabric can register them.
/// Stores the address and a handle.
///
/// Ownership: `address` is NULL or points to a pointer; `region` is NULL or points to a
/// pleachRegion_t. The caller releases the region with pleachRegionRelease, which frees the
/// memory. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if there are 65536 regions already, another thread closes the device, or
/// this process was forked from the one that opened the device; pleachSystemError if the system
/// refuses memory or registering; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachRegionAlloc(
    device: pleachDevice_t,
    size: usize,
    address: *mut *mut c_void,
    region: *mut pleachRegion_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (address, stored) = unsafe { (out(address, "address")?, out(region, "region")?) };
        (*address, *stored) = (std::ptr::null_mut(), std::ptr::null_mut());
        let open = find(device)?;
        if size == 0 {
            return Err(Failed::argument("size is 0"));
        }
        let memory = SharedMemory::new(size)
            .map_err(|error| Failed::system(format!("{size} bytes cannot be allocated: {error}")))?;
        let base = memory.base().as_ptr().cast();
        let made = open.lock().device()?.register(memory).map_err(|error| register_error(&error))?;
        *stored = REGIONS.keep(made)?;
        *address = base;
        Ok(())
    })
}

/// Registers memory of the user with a device.
///
/// Ownership: `address` is NULL or has `size` bytes until `release` is called. `release` is called
/// once, with `address` and `context`, when the region was released and no transfer uses the
/// memory. `release` is not called if this function fails. `region` is NULL or points to a
/// pleachRegion_t. Threads: any; any thread may call `release`. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right or `release` is
/// NULL; pleachInvalidUsage if the fabric needs memory of pleachRegionAlloc, as "shm" does,
/// there are 65536 regions already, another thread closes the device, or this process was forked
/// from the one that opened the device; pleachSystemError if the system refuses;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachRegionRegister(
    device: pleachDevice_t,
    address: *mut c_void,
    size: usize,
    release: pleachRelease_t,
    context: *mut c_void,
    region: *mut pleachRegion_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(region, "region") }?;
        *stored = std::ptr::null_mut();
        let open = find(device)?;
        if release.is_none() || size == 0 {
            return Err(Failed::argument("release is NULL or size is 0"));
        }
        // SAFETY: the caller's promise.
        let memory = unsafe { UserMemory::new(address, size) }?;
        let made = open.lock().device()?.register(Arc::clone(&memory) as Arc<dyn Memory>);
        *stored = REGIONS.keep(made.map_err(|error| register_error(&error))?)?;
        // SAFETY: the caller's promise.
        unsafe { memory.call_at_end(release, context) };
        Ok(())
    })
}

/// Releases a region. Peers that use its key from now on get an error.
///
/// Ownership: the handle goes back to the library and is invalid from now on. A transfer of this
/// rank that is under way holds the memory until the transfer ends. Threads: any, also after the
/// device was closed. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such region; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachRegionRelease(region: pleachRegion_t) -> pleachResult_t {
    guarded(|| REGIONS.take(region).map(drop))
}

/// Stores the name of a part of a region, for other ranks.
///
/// Ownership: `slice` is NULL or points to a pleachRemoteSlice_t. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such region, the part does not
/// lie inside of it, or `slice` is NULL; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachRegionExport(
    region: pleachRegion_t,
    offset: usize,
    length: usize,
    slice: *mut pleachRemoteSlice_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(slice, "slice") }?;
        let RemoteSlice { key, offset, len } = self::slice(region, offset, length)?.remote();
        *stored = pleachRemoteSlice_t { key: key.0, offset, length: len };
        Ok(())
    })
}
