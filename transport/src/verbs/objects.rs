//! The objects of libibverbs, each owned by a value that keeps alive the objects that it uses.
//!
//! **Invariant:** no object is destroyed before its users. A memory region and a queue pair hold
//! their protection domain, which holds the context; queues hold the context. So values may be
//! dropped in any order.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{io, ptr};

use super::library::Library;
use super::limits::{CreateError, LimitKind, LimitReservation, Limits};
use super::sys;
use crate::memory::Memory;

/// Converts the result of a function to an error.
pub(super) fn checked(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        // Some functions return the error number, some return -1 and set errno.
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

/// Converts a null pointer to an error.
fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// Names of all RDMA devices of this machine.
pub(super) fn device_names(library: &'static Library) -> io::Result<Vec<String>> {
    with_devices(library, |devices| Ok(devices.iter().map(|(_, name)| name.clone()).collect()))
}

fn with_devices<T>(
    library: &'static Library,
    use_them: impl FnOnce(&[(*mut sys::ibv_device, String)]) -> io::Result<T>,
) -> io::Result<T> {
    let mut count = 0;
    // SAFETY: it writes one number, and returns a list that ends with null, or null.
    let list = unsafe { (library.get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(io::Error::last_os_error());
    }
    let devices: Vec<_> = (0..count.max(0) as usize)
        .map(|index| {
            // SAFETY: `count` devices are listed, each with a name that stays as long as the list.
            unsafe {
                let device = *list.add(index);
                let name = CStr::from_ptr((library.get_device_name)(device));
                (device, name.to_string_lossy().into_owned())
            }
        })
        .collect();
    let used = use_them(&devices);
    // SAFETY: the list of above; devices that were opened stay valid.
    unsafe { (library.free_device_list)(list) };
    used
}

/// An open RDMA device.
pub(super) struct Context {
    raw: NonNull<sys::ibv_context>,
    library: &'static Library,
}

// SAFETY: libibverbs is thread-safe, but for calls on one object that the caller must serialise.
// Here `&mut` serialises these calls.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device of this name; `None` when there is none.
    pub(super) fn open(library: &'static Library, name: &str) -> io::Result<Option<Arc<Self>>> {
        with_devices(library, |devices| {
            let Some((device, _)) = devices.iter().find(|(_, known)| known == name) else { return Ok(None) };
            // SAFETY: a device of the list.
            let raw = made(unsafe { (library.open_device)(*device) });
            // The library tries several ways, and reports the error of the last.
            let raw = raw.map_err(|error| super::port::refusal(name).unwrap_or(error))?;
            Ok(Some(Arc::new(Self { raw, library })))
        })
    }

    /// The file of the device's provider library.
    pub(super) fn provider(&self) -> Option<PathBuf> {
        // SAFETY: a live context; the address of one of its provider's functions is looked up, and
        // nothing called.
        unsafe {
            let poll = self.raw.as_ref().ops.poll_cq?;
            let mut found: libc::Dl_info = std::mem::zeroed();
            if libc::dladdr(poll as *const c_void, &raw mut found) == 0 || found.dli_fname.is_null() {
                return None;
            }
            let path = CStr::from_ptr(found.dli_fname).to_string_lossy().into_owned();
            Some(PathBuf::from(path))
        }
    }

    pub(super) fn limits(&self) -> io::Result<sys::ibv_device_attr> {
        // SAFETY: plain numbers, of which zero is one; the function fills them.
        unsafe {
            let mut limits = std::mem::zeroed();
            checked((self.library.query_device)(self.raw.as_ptr(), &raw mut limits))?;
            Ok(limits)
        }
    }

    pub(super) fn port(&self, port: u8) -> io::Result<sys::ibv_port_attr> {
        // SAFETY: as above; the function fills the beginning, and fields that it does not know stay
        // zero.
        unsafe {
            let mut attributes = std::mem::zeroed();
            checked((self.library.query_port)(self.raw.as_ptr(), port, &raw mut attributes))?;
            Ok(attributes)
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object of the context holds the context, so no object is left.
        unsafe { (self.library.close_device)(self.raw.as_ptr()) };
    }
}

/// Completions that one poll takes.
pub(super) const COMPLETIONS_AT_ONCE: usize = 32;

/// The number of every receive; no request has it. The opcode of a failed completion is undefined.
const RECEIVE: u64 = u64::MAX;

/// The end of a work request or a receive. If it failed, only the first four fields are valid.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkCompletion {
    /// The number that the request was posted with.
    pub(super) number: u64,
    pub(super) queue_pair: u32,
    /// The status code of the verbs.
    pub(super) status: u32,
    pub(super) is_receive: bool,
    /// The immediate of a write.
    pub(super) immediate: u32,
    /// Length of the write, in bytes.
    pub(super) bytes: u32,
}

type PollQueue = unsafe extern "C" fn(*mut sys::ibv_cq, c_int, *mut sys::ibv_wc) -> c_int;

/// A completion queue with its completion channel.
pub(super) struct CompletionQueue {
    queue: NonNull<sys::ibv_cq>,
    /// The provider's function for it.
    poll: PollQueue,
    /// Filled by the library. Kept between polls, because clearing it would cost more than a poll.
    found: Box<[sys::ibv_wc; COMPLETIONS_AT_ONCE]>,
    channel: NonNull<sys::ibv_comp_channel>,
    context: Arc<Context>,
    unacknowledged: u32,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for CompletionQueue {}

/// Events that are acknowledged at once: each acknowledgement takes a lock.
const ACKNOWLEDGE_EVERY: u32 = 1024;

impl CompletionQueue {
    pub(super) fn new(context: &Arc<Context>, limits: &Limits, entries: u32) -> Result<Self, CreateError> {
        let reservation = limits.reserve(LimitKind::CompletionQueues)?;
        let library = context.library;
        // SAFETY: an open context; the queue keeps no address of ours.
        unsafe {
            let channel = made((library.create_comp_channel)(context.raw.as_ptr()))?;
            let queue = (library.create_cq)(
                context.raw.as_ptr(),
                entries as c_int,
                ptr::null_mut(),
                channel.as_ptr(),
                0,
            );
            let queue = match made(queue) {
                Ok(queue) => queue,
                Err(error) => {
                    (library.destroy_comp_channel)(channel.as_ptr());
                    return Err(error.into());
                }
            };
            // Plain numbers, of which zero is one.
            let found = Box::new(std::mem::zeroed());
            let context = Arc::clone(context);
            let poll = context.raw.as_ref().ops.poll_cq.expect("every provider polls");
            let made =
                Self { queue, poll, found, channel, context, unacknowledged: 0, _reservation: reservation };
            rustix::io::ioctl_fionbio(made.file(), true).map_err(io::Error::from)?;
            Ok(made)
        }
    }

    fn descriptor(&self) -> RawFd {
        // SAFETY: a live channel.
        unsafe { self.channel.as_ref().fd }
    }

    /// Readable when a completion has come since the queue was armed.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel, which the borrow does not outlive.
        unsafe { BorrowedFd::borrow_raw(self.descriptor()) }
    }

    /// Polls at most [`COMPLETIONS_AT_ONCE`] completions and returns their number.
    /// [`CompletionQueue::found`] returns each of them until the next poll.
    #[inline]
    pub(super) fn poll(&mut self) -> usize {
        // SAFETY: a live queue, and room for as many as it is told.
        let count = unsafe {
            (self.poll)(self.queue.as_ptr(), COMPLETIONS_AT_ONCE as c_int, self.found.as_mut_ptr())
        };
        // A device that fails completes nothing. Peers learn of the failure by the control streams.
        usize::try_from(count).unwrap_or(0)
    }

    /// A completion of the last poll.
    pub(super) fn found(&self, index: usize) -> WorkCompletion {
        let completion = &self.found[index];
        WorkCompletion {
            number: completion.wr_id,
            queue_pair: completion.qp_num,
            status: completion.status,
            is_receive: completion.wr_id == RECEIVE,
            // SAFETY: the field is a word, and every value of a word is valid.
            immediate: u32::from_be(unsafe { completion.__bindgen_anon_1.imm_data }),
            bytes: completion.byte_len,
        }
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&mut self) -> io::Result<()> {
        // SAFETY: as above.
        checked(unsafe {
            let signal = self.operations().req_notify_cq.expect("every provider has this call");
            signal(self.queue.as_ptr(), 0)
        })
    }

    /// Takes the events of the channel, so that its file is no longer readable.
    pub(super) fn ack_events(&mut self) {
        let library = self.context.library;
        let (mut queue, mut unused) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel does not block; it names our only queue.
        unsafe {
            while (library.get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut unused) == 0 {
                self.unacknowledged += 1;
            }
            if self.unacknowledged >= ACKNOWLEDGE_EVERY {
                (library.ack_cq_events)(self.queue.as_ptr(), std::mem::take(&mut self.unacknowledged));
            }
        }
    }

    fn operations(&self) -> &sys::ibv_context_ops {
        // SAFETY: a live context, whose table does not change after it was opened.
        unsafe { &self.context.raw.as_ref().ops }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let library = self.context.library;
        // SAFETY: queue pairs hold their completions; a queue is destroyed when all its events were
        // acknowledged.
        unsafe {
            (library.ack_cq_events)(self.queue.as_ptr(), self.unacknowledged);
            (library.destroy_cq)(self.queue.as_ptr());
            (library.destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// A receive queue that all queue pairs of a device share. Its receives hold no memory, because
/// they are only for signals.
pub(super) struct SharedReceiveQueue {
    raw: NonNull<sys::ibv_srq>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for SharedReceiveQueue {}

/// Receives that are posted at once.
const POST_AT_ONCE: usize = 64;

impl SharedReceiveQueue {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, entries: u32) -> io::Result<Self> {
        let attr = sys::ibv_srq_attr { max_wr: entries, max_sge: 1, srq_limit: 0 };
        let mut wanted = sys::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: a live domain.
        let raw = unsafe { (domain.context.library.create_srq)(domain.raw.as_ptr(), &raw mut wanted) };
        Ok(Self { raw: made(raw)?, domain: Arc::clone(domain) })
    }

    /// Posts `count` receives, or as many as there is room for.
    pub(crate) fn fill(&mut self, count: usize) -> io::Result<()> {
        match self.post(count) {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => Ok(()),
            posted => posted,
        }
    }

    /// Posts `count` receives.
    pub(super) fn post(&mut self, mut count: usize) -> io::Result<()> {
        while count > 0 {
            let batch = count.min(POST_AT_ONCE);
            let empty = sys::ibv_recv_wr {
                wr_id: RECEIVE,
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 0,
            };
            let mut requests = [empty; POST_AT_ONCE];
            let base = requests.as_mut_ptr();
            for (index, request) in requests[..batch - 1].iter_mut().enumerate() {
                request.next = base.wrapping_add(index + 1);
            }
            let mut bad = ptr::null_mut();
            // SAFETY: a list of requests that stays for the call; the context's own function for
            // its queue.
            checked(unsafe {
                let operations = &self.domain.context.raw.as_ref().ops;
                let post = operations.post_srq_recv.expect("every provider posts receives");
                post(self.raw.as_ptr(), base, &raw mut bad)
            })?;
            count -= batch;
        }
        Ok(())
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs are dropped before (see the device).
        unsafe { (self.domain.context.library.destroy_srq)(self.raw.as_ptr()) };
    }
}

/// A queue pair of type RC (reliable connection).
pub(super) struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    domain: Arc<ProtectionDomain>,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Makes a queue pair with room for `requests` under way, each with at most `inline` bytes of
    /// inline data.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &CompletionQueue,
        receives: &SharedReceiveQueue,
        requests: u32,
        inline: u32,
    ) -> Result<Self, CreateError> {
        let reservation = domain.limits.reserve(LimitKind::QueuePairs)?;
        let mut wanted = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.queue.as_ptr(),
            recv_cq: completions.queue.as_ptr(),
            srq: receives.raw.as_ptr(),
            cap: sys::ibv_qp_cap {
                max_send_wr: requests,
                max_recv_wr: 0,
                max_send_sge: 1,
                max_recv_sge: 0,
                max_inline_data: inline,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: live objects of one context.
        let raw = made(unsafe { (domain.context.library.create_qp)(domain.raw.as_ptr(), &raw mut wanted) })?;
        Ok(Self { raw, domain: Arc::clone(domain), _reservation: reservation })
    }

    /// The number by which completions and the peer name it.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a live queue pair, whose number does not change.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// Changes the attributes that `mask` names.
    pub(super) fn modify(&mut self, mut attributes: sys::ibv_qp_attr, mask: u32) -> io::Result<()> {
        // SAFETY: a live queue pair; the attributes are only read.
        checked(unsafe {
            (self.domain.context.library.modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask as c_int)
        })
    }

    /// Posts a list of work requests with one doorbell. When not all of it was taken, returns the
    /// error and the first request that was not taken.
    ///
    /// # Safety
    ///
    /// The list of work requests, and the scatter-gather lists that they name, are valid for the
    /// call. The local memory that the requests read or write is registered with this domain. It
    /// stays until the request has completed, or the queue pair was dropped.
    pub(super) unsafe fn post(
        &mut self,
        first: *mut sys::ibv_send_wr,
    ) -> Result<(), (io::Error, *mut sys::ibv_send_wr)> {
        let mut bad = ptr::null_mut();
        // SAFETY: the caller's promise; the context's own function for its queue pair.
        checked(unsafe {
            let post = self.domain.context.raw.as_ref().ops.post_send.expect("every provider posts");
            post(self.raw.as_ptr(), first, &raw mut bad)
        })
        .map_err(|error| (error, bad))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: a live queue pair. After this returns the device touches no memory on its behalf.
        unsafe { (self.domain.context.library.destroy_qp)(self.raw.as_ptr()) };
    }
}

/// A protection domain: memory regions and queue pairs of one domain can be used together. It
/// enforces the limits of the device, so that an error names the limit.
pub(super) struct ProtectionDomain {
    raw: NonNull<sys::ibv_pd>,
    context: Arc<Context>,
    limits: Limits,
    /// Regions registered so far. Relaxed, as the next field: only counted.
    registered: AtomicU64,
    deregistered: AtomicU64,
}

// SAFETY: as for `Context`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn new(context: &Arc<Context>, limits: Limits) -> io::Result<Arc<Self>> {
        // SAFETY: an open context.
        let raw = made(unsafe { (context.library.alloc_pd)(context.raw.as_ptr()) })?;
        let (registered, deregistered) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { raw, context: Arc::clone(context), limits, registered, deregistered }))
    }

    /// The numbers of regions registered and deregistered so far.
    pub(super) fn registrations(&self) -> (u64, u64) {
        // Relaxed: see the fields.
        (self.registered.load(Ordering::Relaxed), self.deregistered.load(Ordering::Relaxed))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold their domain.
        unsafe { (self.context.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that the device may access.
pub(super) struct MemoryRegion {
    raw: NonNull<sys::ibv_mr>,
    domain: Arc<ProtectionDomain>,
    /// Kept as long as it is registered.
    memory: Arc<dyn Memory>,
    takes_windows: bool,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory of at least one byte, which peers address from `iova` on; as a dma-buf if
    /// it is one.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        if memory.dma_buf().is_some() && domain.context.library.reg_dmabuf_mr.is_some() {
            return Self::by_dma_buf(domain, memory, iova, access);
        }
        Self::by_address(domain, memory, iova, access)
    }

    /// Registers a dma-buf.
    pub(super) fn by_dma_buf(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        let reservation = Self::expect_room(domain, memory.len())?;
        let without = || io::Error::new(io::ErrorKind::Unsupported, "libibverbs registers no dma-bufs");
        let register = domain.context.library.reg_dmabuf_mr.ok_or_else(without)?;
        let without = || io::Error::new(io::ErrorKind::Unsupported, "it is no dma-buf");
        let part = memory.dma_buf().ok_or_else(without)?;
        let (file, len) = (part.file.as_raw_fd(), memory.len());
        // SAFETY: the file is open, and the kernel holds it from then on. The memory behind the
        // file is kept longer than the registration.
        let raw =
            unsafe { register(domain.raw.as_ptr(), part.offset, len, iova, file, older(access) as c_int) };
        Self::registered(domain, memory, access, raw, reservation)
    }

    /// Registers memory by its address.
    pub(super) fn by_address(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: u32,
    ) -> Result<Self, CreateError> {
        let reservation = Self::expect_room(domain, memory.len())?;
        let library = domain.context.library;
        let (base, len) = (memory.base().as_ptr().cast(), memory.len());
        // SAFETY: the memory has `len` bytes at `base` and is kept longer than the registration.
        let raw = unsafe {
            match library.reg_mr_iova2 {
                Some(register) => register(domain.raw.as_ptr(), base, len, iova, access),
                None => (library.reg_mr_iova)(domain.raw.as_ptr(), base, len, iova, older(access) as c_int),
            }
        };
        Self::registered(domain, memory, access, raw, reservation)
    }

    fn expect_room(domain: &ProtectionDomain, bytes: usize) -> Result<LimitReservation, CreateError> {
        domain.limits.allow(LimitKind::RegionBytes, bytes as u64)?;
        Ok(domain.limits.reserve(LimitKind::Regions)?)
    }

    fn registered(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        access: u32,
        raw: *mut sys::ibv_mr,
        reservation: LimitReservation,
    ) -> Result<Self, CreateError> {
        let raw = made(raw)?;
        // Relaxed: see the field.
        domain.registered.fetch_add(1, Ordering::Relaxed);
        let takes_windows = access & sys::IBV_ACCESS_MW_BIND != 0;
        Ok(Self { raw, domain: Arc::clone(domain), memory, takes_windows, _reservation: reservation })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: a live region, whose keys do not change.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }

    pub(super) fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Whether windows may be bound to it.
    pub(crate) fn takes_windows(&self) -> bool {
        self.takes_windows
    }
}

/// Removes the flags that functions older than `ibv_reg_mr_iova2` do not know.
fn older(access: u32) -> u32 {
    access & !sys::IBV_ACCESS_RELAXED_ORDERING
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: a live region; peers that still use its key get an error.
        unsafe { (self.domain.context.library.dereg_mr)(self.raw.as_ptr()) };
        // Relaxed: see the field.
        self.domain.deregistered.fetch_add(1, Ordering::Relaxed);
    }
}

/// A window, bound by a request on the queue pair whose peer may use it.
pub(super) struct MemoryWindow {
    raw: NonNull<sys::ibv_mw>,
    domain: Arc<ProtectionDomain>,
    _reservation: LimitReservation,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    /// Makes a window without a binding; an error if the device supports no windows.
    pub(super) fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, CreateError> {
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

    /// The binding of the window to bytes of a region, in the addresses that peers use. It holds
    /// the key that is valid once the request has completed. A window is bound once, because each
    /// binding has another key.
    pub(super) fn bind(
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
