//! Memory windows of type 2: revocable keys of a part of a region, for the peer of one queue pair.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{MemoryRegion, ProtectionDomain, made};
use crate::verbs::limits::{CreateError, LimitKind, LimitReservation};
use crate::verbs::sys;

/// A window, bound by a request on the queue pair whose peer may use it.
pub(in crate::verbs) struct MemoryWindow {
    raw: NonNull<sys::ibv_mw>,
    domain: Arc<ProtectionDomain>,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    /// Makes a window that is not bound; an error if the device supports none.
    pub(in crate::verbs) fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, CreateError> {
        let reservation = domain.limits.reserve(LimitKind::Windows)?;
        // SAFETY: a live domain; the context's own function for it.
        let raw = unsafe {
            let Some(allocate) = domain.context.raw.as_ref().ops.alloc_mw else {
                return Err(io::Error::from(io::ErrorKind::Unsupported).into());
            };
            made(allocate(domain.raw.as_ptr(), sys::IBV_MW_TYPE_2))?
        };
        Ok(Self { raw, domain: Arc::clone(domain), _reservation: reservation })
    }

    /// The binding of the window to bytes of a region, in the addresses that peers use, with the
    /// key that is valid when the request has completed. Once a window, because each binding has
    /// another key.
    pub(in crate::verbs) fn bind(
        &self,
        region: &MemoryRegion,
        address: u64,
        bytes: u64,
        access: u32,
    ) -> sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
        // SAFETY: a live window. Its key does not change before the binding: the request names the
        // window by it.
        let before = unsafe { self.raw.as_ref().rkey };
        sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: self.raw.as_ptr(),
            // The upper bits are the device's, the lower ones the binder's, and must change.
            rkey: before & !0xff | before.wrapping_add(1) & 0xff,
            bind_info: sys::ibv_mw_bind_info {
                mr: region.raw.as_ptr(),
                addr: address,
                length: bytes,
                mw_access_flags: access,
            },
        }
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: a live window; after this the device refuses its key.
        unsafe {
            if let Some(free) = self.domain.context.raw.as_ref().ops.dealloc_mw {
                free(self.raw.as_ptr());
            }
        }
    }
}
