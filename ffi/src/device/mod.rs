//! The transport below the collectives: a device that is connected to all ranks, registered memory,
//! one-sided transfers, and signals.
//!
//! **Invariants.** One thread at a time polls the device, under a lock and only while the thread is
//! in a function of this module. One thread may sleep on the device's wake source; when it wakes,
//! it wakes all threads that wait on the device. A thread that submits wakes the sleeping thread.
//! Every wait has a limit.

mod inbox;
pub mod region;
pub mod transfer;

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_collectives::Options;
use pleach_transport::clock::now;
use pleach_transport::fork::Process;
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::{JoinOptions, Joined, Store, World, join};
use pleach_transport::{
    Device, Event, Flush, MESSAGE_BYTES_MAX, Nanos, PostError, Rank, Signals, TransferError, Urgency, Wake,
    sleep,
};

use self::inbox::Inbox;
use crate::batch::expect_no_batch;
use crate::comm::{configured, pleachConfig_t};
use crate::handles::{Handles, Held};
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};
use crate::unique_id::{pleachUniqueId, release};

/// A device. Its contents are opaque to the caller.
pub struct pleachDevice(());

/// A device: this rank's end of the fabric between the ranks that have opened the device together.
/// NULL is no device.
pub type pleachDevice_t = *mut pleachDevice;

/// The number of signal slots of a rank for each of its peers. They are numbered 0 to 63.
pub const PLEACH_SIGNAL_SLOTS: c_int = 64;
/// The most bytes that each rank gives to pleachDeviceExchange.
pub const PLEACH_EXCHANGE_BYTES: usize = 4096;
const _: () = assert!(PLEACH_EXCHANGE_BYTES <= MESSAGE_BYTES_MAX);
/// Room for the name of a fabric, in bytes.
pub const PLEACH_FABRIC_BYTES: usize = 16;

/// How long a waiting thread polls before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// How long pleachDeviceClose waits for submitted transfers and messages.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How much later than the end of a peer a message of the peer may arrive. The end and the message
/// are reported by different paths.
const MESSAGE_GRACE: Duration = Duration::from_secs(1);

/// Number of events that are taken from the device at a time.
const EVENTS: usize = 64;

/// The properties of a device. Begin with PLEACH_DEVICE_INFO_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachDeviceInfo_t {
    /// sizeof(pleachDeviceInfo_t).
    pub size: usize,
    /// The rank of the caller.
    pub rank: c_int,
    /// The number of ranks.
    pub nranks: c_int,
    /// The longest transfer, in bytes.
    pub transferBytesMax: u64,
    /// The name of the fabric, as "shm" or "tcp".
    pub fabric: [c_char; PLEACH_FABRIC_BYTES],
}

/// The end of a peer: the error text for calls that need the peer.
type PeerEnd = Option<String>;

/// The device behind a handle.
pub(crate) struct OpenDevice {
    rank: Rank,
    world_size: u32,
    transfer_bytes_max: u64,
    fabric: &'static str,
    /// How long a function waits for room in a queue and for other ranks.
    timeout: Duration,
    process: Process,
    waker: Arc<dyn Wake>,
    /// By peer: its signals; `None` for this rank.
    signals: Vec<Option<Signals>>,
    inbox: Arc<Inbox>,
    state: Mutex<State>,
    polled: Condvar,
    /// Held during an exchange, so that the exchanges of two threads do not mix.
    exchanging: Mutex<()>,
}

/// A transfer whose end can be queried.
enum Transfer {
    UnderWay,
    Ended(Result<u64, TransferError>),
}

struct State {
    /// `None` after the device was closed.
    device: Option<Box<dyn Device>>,
    /// Whether a thread closes the device. Then no other thread waits on it any longer.
    is_closing: bool,
    /// The store through which the ranks have met.
    store: Option<Box<dyn Store>>,
    events: Vec<Event>,
    /// Whether a thread sleeps on the device's wake source.
    has_sleeper: bool,
    peers: Vec<PeerEnd>,
    transfers: HashMap<u64, Transfer>,
    last_transfer: u64,
}

static DEVICES: Handles<OpenDevice> = Handles::new("device", "device");

/// The device of a handle.
pub(crate) fn find(device: pleachDevice_t) -> Result<Held<OpenDevice>, Failed> {
    let found = DEVICES.find(device)?;
    match found.process.is_current() {
        true => Ok(found),
        false => Err(Failed::usage(format!(
            "this device belongs to process {}; a forked child opens a device of its own",
            found.process.id()
        ))),
    }
}

fn remote(text: impl Into<String>) -> Failed {
    Failed { result: pleachResult_t::pleachRemoteError, text: text.into() }
}

fn late(text: impl Into<String>) -> Failed {
    Failed { result: pleachResult_t::pleachTimeout, text: text.into() }
}

fn closed() -> Failed {
    Failed::usage("the device was closed by another thread")
}

impl State {
    fn device(&mut self) -> Result<&mut dyn Device, Failed> {
        match &mut self.device {
            Some(device) => Ok(&mut **device),
            None => Err(closed()),
        }
    }

    /// Makes progress.
    fn poll(&mut self) -> Result<(), Failed> {
        let mut events = std::mem::take(&mut self.events);
        let polled = self.device().map(|device| device.poll(now(), &mut events));
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        polled
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Done { id, result } => {
                if let Some(transfer) = self.transfers.get_mut(&id.0) {
                    *transfer = Transfer::Ended(result);
                }
            }
            Event::PeerLost { peer, cause } => {
                self.peers[peer as usize].get_or_insert(format!("rank {peer} is lost: {cause}"));
            }
            Event::Departed { peer } => {
                self.peers[peer as usize].get_or_insert(format!("rank {peer} has closed its device"));
            }
            Event::Connected { .. } | Event::Severed { .. } | Event::Drained { .. } => {}
        }
    }

    fn expect(&self, peer: Rank) -> Result<(), Failed> {
        self.peers[peer as usize].as_ref().map_or(Ok(()), |text| Err(remote(text.clone())))
    }
}

impl OpenDevice {
    fn open(options: &Options) -> Result<Self, Failed> {
        let inbox = Arc::new(Inbox::new(options.world.world_size));
        let settings = JoinOptions {
            fabric: options.fabric,
            // Ranks that open a communicator must not meet ranks that open a device.
            knobs: vec![("opened as".to_owned(), "device".to_owned())],
            signal_slots: PLEACH_SIGNAL_SLOTS as usize,
            timeout: options.join_timeout,
        };
        let joined = join(&options.world, &settings, inbox.clone())
            .map_err(|error| Failed::system(error.to_string()))?;
        let Joined { rank, world_size, device, events, store, .. } = joined;
        let info = device.info();
        let signals = (0..world_size).map(|peer| (peer != rank).then(|| device.signal_slots(peer))).collect();
        let mut state = State {
            events: Vec::with_capacity(EVENTS),
            has_sleeper: false,
            peers: vec![None; world_size as usize],
            transfers: HashMap::new(),
            last_transfer: 0,
            store,
            device: None,
            is_closing: false,
        };
        events.into_iter().for_each(|event| state.handle(event));
        let (transfer_bytes_max, fabric) = (info.transfer_bytes_max, info.fabric);
        let waker = Arc::clone(&info.waker);
        state.device = Some(device);
        Ok(Self {
            rank,
            world_size,
            transfer_bytes_max,
            fabric,
            timeout: options.timeout,
            process: Process::current(),
            waker,
            signals,
            inbox,
            state: Mutex::new(state),
            polled: Condvar::new(),
            exchanging: Mutex::new(()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Another rank of the device.
    fn peer(&self, peer: c_int) -> Result<Rank, Failed> {
        let rank = Rank::try_from(peer).ok().filter(|rank| *rank < self.world_size && *rank != self.rank);
        rank.ok_or_else(|| {
            let (own, ranks) = (self.rank, self.world_size);
            Failed::argument(format!("peer is {peer}; take another rank than {own} below {ranks}"))
        })
    }

    /// Makes progress until `check` has a result. Returns `None` after `limit`, and an error if the
    /// device is closed.
    fn wait<T>(
        &self,
        limit: Duration,
        mut check: impl FnMut(&mut State) -> Result<Option<T>, Failed>,
    ) -> Result<Option<T>, Failed> {
        self.drive(limit, |state| match state.is_closing {
            true => Err(closed()),
            false => check(state),
        })
    }

    /// As [`OpenDevice::wait`], but also goes on while the device is being closed.
    fn drive<T>(
        &self,
        limit: Duration,
        mut check: impl FnMut(&mut State) -> Result<Option<T>, Failed>,
    ) -> Result<Option<T>, Failed> {
        let begun = now();
        let (spin_until, until) = (begun + SPIN, begun + limit);
        let mut state = self.lock();
        loop {
            if !state.has_sleeper {
                state.poll()?;
            }
            if let Some(result) = check(&mut state)? {
                return Ok(Some(result));
            }
            let at = now();
            if at >= until {
                return Ok(None);
            }
            state = if at < spin_until {
                drop(state);
                std::thread::yield_now();
                self.lock()
            } else if state.has_sleeper {
                let woken = self.polled.wait_timeout(state, until.since(at));
                woken.unwrap_or_else(PoisonError::into_inner).0
            } else {
                match self.sleep(state, at, until, &mut check)? {
                    (state, None) => state,
                    (_, Some(result)) => return Ok(Some(result)),
                }
            };
        }
    }

    /// Sleeps on the device's wake source for all waiting threads, and wakes them afterwards.
    fn sleep<'a, T>(
        &'a self,
        state: MutexGuard<'a, State>,
        at: Nanos,
        until: Nanos,
        check: &mut impl FnMut(&mut State) -> Result<Option<T>, Failed>,
    ) -> Result<(MutexGuard<'a, State>, Option<T>), Failed> {
        struct Sleeper<'a, T> {
            state: Option<MutexGuard<'a, State>>,
            found: Result<Option<T>, Failed>,
        }
        let mut sleeper = Sleeper { state: Some(state), found: Ok(None) };
        sleep::unless_ready(
            &mut sleeper,
            |sleeper| sleeper.state.as_mut()?.device.as_mut()?.arm(),
            |sleeper| {
                let state = sleeper.state.as_mut().expect("held until the sleep");
                sleeper.found = check(state);
                !matches!(sleeper.found, Ok(None))
            },
            |sleeper, armed| {
                let mut state = sleeper.state.take().expect("held until the sleep");
                state.has_sleeper = true;
                drop(state);
                armed.wait(at, until.since(at));
                let mut state = self.lock();
                state.has_sleeper = false;
                self.polled.notify_all();
                sleeper.state = Some(state);
            },
        );
        let state = sleeper.state.take().expect("locked again after the sleep");
        sleeper.found.map(|found| (state, found))
    }

    /// Sends what was submitted or posted: wakes the sleeping thread to do so, or flushes the
    /// device if no thread sleeps.
    fn carry_on(&self, state: &mut State) {
        if state.has_sleeper {
            self.waker.wake();
        } else if let Ok(device) = state.device() {
            device.flush(Flush::All);
        }
    }

    fn post(&self, peer: Rank, message: &[u8], until: Nanos) -> Result<(), Failed> {
        let posted = self.wait(until.since(now()), |state| {
            state.expect(peer)?;
            match state.device()?.post(peer, message, Urgency::Ordinary) {
                Ok(()) => {
                    self.carry_on(state);
                    Ok(Some(()))
                }
                Err(PostError::QueueFull { .. }) => Ok(None),
                Err(PostError::NotConnected { .. }) => state.poll().and_then(|()| {
                    state.expect(peer)?;
                    Err(remote(format!("rank {peer} is not connected")))
                }),
                Err(error) => Err(Failed::argument(error.to_string())),
            }
        })?;
        posted.ok_or_else(|| late(format!("rank {peer} has not taken a message in time")))
    }

    /// The next message of a peer.
    fn message(&self, peer: Rank, until: Nanos) -> Result<Vec<u8>, Failed> {
        let come = self.wait(until.since(now()), |state| match self.inbox.take(peer) {
            Some(message) => Ok(Some(Ok(message))),
            None => Ok(state.expect(peer).err().map(Err)),
        })?;
        match come {
            Some(Ok(message)) => Ok(message),
            Some(Err(gone)) => self.wait(MESSAGE_GRACE, |_| Ok(self.inbox.take(peer)))?.ok_or(gone),
            None => Err(late(format!(
                "rank {peer} has not called pleachDeviceExchange within {:?}",
                self.timeout
            ))),
        }
    }

    /// The bytes of all ranks, in rank order.
    fn exchange(&self, own: &[u8]) -> Result<Vec<u8>, Failed> {
        let _exclusive = lock(&self.exchanging);
        let until = now() + self.timeout;
        let peers = || (0..self.world_size).filter(|peer| *peer != self.rank);
        peers().try_for_each(|peer| self.post(peer, own, until))?;
        let mut all = vec![0; own.len() * self.world_size as usize];
        let mut store = |rank: Rank, bytes: &[u8]| {
            let from = rank as usize * own.len();
            all[from..from + own.len()].copy_from_slice(bytes);
        };
        store(self.rank, own);
        for peer in peers() {
            let message = self.message(peer, until)?;
            if message.len() != own.len() {
                let (theirs, own) = (message.len(), own.len());
                return Err(Failed::usage(format!("rank {peer} exchanges {theirs} bytes, this rank {own}")));
            }
            store(peer, &message);
        }
        Ok(all)
    }

    fn close(&self) -> Result<(), Failed> {
        let mut state = self.lock();
        state.is_closing = true;
        state.device()?.leave();
        drop(state);
        self.waker.wake();
        let left = self.drive(CLOSE_TIMEOUT, |state| Ok(state.device()?.flush(Flush::All).then_some(())));
        let mut state = self.lock();
        state.store = None;
        let device = state.device.take();
        self.polled.notify_all();
        drop(state);
        drop(device);
        left?.ok_or_else(|| late("the peers did not take what this rank has submitted within 5 s"))
    }
}

fn kept(device: *mut pleachDevice_t, options: &Options) -> Result<(), Failed> {
    // SAFETY: the callers have checked the pointer.
    let stored = unsafe { out(device, "device") }?;
    *stored = DEVICES.keep(OpenDevice::open(options)?)?;
    Ok(())
}

/// Opens a device as rank `rank` of the `nranks` ranks that share the unique id, and connects the
/// device to the devices of all other ranks. All ranks call the function. The field `reproducible`
/// of `config` has no effect. The field `timeoutMs` is the longest time that functions on the
/// device wait. An id is for one device or one communicator.
///
/// Ownership: `device` is NULL or points to a pleachDevice_t. The caller closes the device with
/// pleachDeviceClose. `config` is NULL or points to a configuration that began with
/// PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; it is read before the function
/// returns. Threads: any. Blocks: until all ranks are there, at most joinTimeoutMs, which is a
/// minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// between pleachGroupStart and pleachGroupEnd, or if 65536 devices exist already;
/// pleachSystemError if the ranks do not meet in time; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachDeviceOpen(
    device: *mut pleachDevice_t,
    nranks: c_int,
    id: pleachUniqueId,
    rank: c_int,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        *unsafe { out(device, "device") }? = std::ptr::null_mut();
        expect_no_batch()?;
        let (Ok(world_size @ 1..), Ok(own)) = (u32::try_from(nranks), u32::try_from(rank)) else {
            return Err(Failed::argument(format!("rank {rank} of {nranks} ranks cannot be")));
        };
        if own >= world_size {
            return Err(Failed::argument(format!("rank {rank} is not below nranks, {nranks}")));
        }
        let world = id.world(own, world_size)?;
        // SAFETY: the caller's promise.
        let options = unsafe { configured(Options::new(world), config) }?;
        if own == 0 {
            release(&id);
        }
        kept(device, &options)
    })
}

/// As pleachDeviceOpen, among the ranks that the launcher of this process describes; see
/// pleachCommInitFromEnv. A process may open one device or one communicator in this way.
///
/// Ownership: `device` is NULL or points to a pleachDevice_t. The caller closes the device with
/// pleachDeviceClose. `config` is NULL or points to a configuration that began with
/// PLEACH_CONFIG_INITIALIZER, whose texts end with a zero byte; it is read before the function
/// returns. Threads: any. Blocks: until all ranks are there, at most joinTimeoutMs, which is a
/// minute by default.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right, or the environment
/// says nothing clear; pleachInvalidUsage between pleachGroupStart and pleachGroupEnd, or if 65536
/// devices exist already; pleachSystemError if the ranks do not meet in time; pleachInternalError
/// after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachDeviceOpenFromEnv(
    device: *mut pleachDevice_t,
    config: *const pleachConfig_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        *unsafe { out(device, "device") }? = std::ptr::null_mut();
        expect_no_batch()?;
        let world = World::from_env().map_err(|error| Failed::argument(error.to_string()))?;
        // SAFETY: the caller's promise.
        let options = unsafe { configured(Options::new(world), config) }?;
        kept(device, &options)
    })
}

/// Closes a device and tells the peers. Peers that still need this rank's memory get errors. To
/// avoid this, all ranks call pleachDeviceExchange before they close.
///
/// Ownership: the handle goes back to the library and is invalid from now on. Regions stay until
/// they are released. Threads: any, also while other threads wait for the device; these return
/// pleachInvalidUsage. Blocks: until the peers have received what this rank has submitted, at most
/// 5 s.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such device; pleachInvalidUsage if
/// this process was forked from the one that opened the device; pleachTimeout if a peer does not
/// take what was submitted (the device is closed in this case too); pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachDeviceClose(device: pleachDevice_t) -> pleachResult_t {
    guarded(|| {
        find(device)?;
        DEVICES.take(device)?.close()
    })
}

/// Stores the properties of a device.
///
/// Ownership: `info` is NULL or points to a struct that began with
/// PLEACH_DEVICE_INFO_INITIALIZER. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such device, or `info` is NULL
/// or its size is not that of the struct; pleachInvalidUsage if this process was forked from the
/// one that opened the device; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachDeviceGetInfo(
    device: pleachDevice_t,
    info: *mut pleachDeviceInfo_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(info, "info", "PLEACH_DEVICE_INFO_INITIALIZER") }?;
        let open = find(device)?;
        let mut found = pleachDeviceInfo_t {
            size,
            rank: open.rank as c_int,
            nranks: open.world_size as c_int,
            transferBytesMax: open.transfer_bytes_max,
            fabric: [0; PLEACH_FABRIC_BYTES],
        };
        let name = CString::new(open.fabric).unwrap_or_default();
        for (place, byte) in found.fabric[..PLEACH_FABRIC_BYTES - 1].iter_mut().zip(name.as_bytes()) {
            *place = byte.cast_signed();
        }
        // SAFETY: it is as long as its size says.
        unsafe { *info = found };
        Ok(())
    })
}

/// Gives `bytes` bytes of this rank to all ranks, and stores the bytes of all ranks in rank order.
/// It serves to tell peers the keys of regions, and is not for data. All ranks call the function
/// with the same number of bytes, at most PLEACH_EXCHANGE_BYTES. No rank returns before all ranks
/// have called the function, so it is a barrier too.
///
/// Ownership: both buffers stay the caller's. `own` has `bytes` bytes, and `all` has `bytes` bytes
/// for each rank; both may be NULL where `bytes` is 0. Threads: any; exchanges of several threads
/// are made one after the other. Blocks: until all ranks have called the function, at most the
/// timeout of the device.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right; pleachInvalidUsage
/// if the ranks give different numbers of bytes, another thread closes the device, or this process
/// was forked from the one that opened the device; pleachRemoteError if a rank is lost or has
/// closed its device; pleachTimeout if a rank does not call the function in time;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachDeviceExchange(
    device: pleachDevice_t,
    own: *const c_void,
    all: *mut c_void,
    bytes: usize,
) -> pleachResult_t {
    guarded(|| {
        let open = find(device)?;
        if bytes > PLEACH_EXCHANGE_BYTES {
            return Err(Failed::argument(format!("{bytes} bytes are more than {PLEACH_EXCHANGE_BYTES}")));
        }
        if bytes > 0 && (own.is_null() || all.is_null()) {
            return Err(Failed::argument("own or all is NULL"));
        }
        let given = match bytes {
            0 => &[],
            // SAFETY: the caller's promise.
            _ => unsafe { std::slice::from_raw_parts(own.cast::<u8>(), bytes) },
        };
        let received = open.exchange(given)?;
        // SAFETY: the caller's promise. `given` is not used any more.
        unsafe { std::ptr::copy_nonoverlapping(received.as_ptr(), all.cast::<u8>(), received.len()) };
        Ok(())
    })
}
