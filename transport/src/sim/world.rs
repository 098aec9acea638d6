//! The handle of a simulated world: making, driving, and reading it.

use std::io::Write;
use std::sync::{Arc, Mutex};

use super::{Callback, State};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{DeviceConfig, PostError, Urgency};
use crate::mutex::lock;
use crate::sim::device::SimDevice;
use crate::sim::faults::{Fault, Faults};
use crate::sim::network::Network;
use crate::sim::observer::{AccessKind, Observer, Record};
use crate::sim::random::Random;
use crate::sim::trace::TraceHash;

/// A deliberate violation of the contract, which checkers must detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mutant {
    /// Signals are raised some time before the last bytes of their puts.
    SignalBeforeBytes,
    /// A severed peer's transfers under way still land.
    SeveredPeerWrites,
    /// Two puts to one peer that are under way at once exchange their signals.
    SignalsSwapped,
    /// A put's source is still read after its `Done`.
    SourceReadAfterDone,
    /// A put's signal is a separate transfer that is submitted after the put's `Done`, as if `Done`
    /// meant landed: it overtakes the put's bytes.
    SignalAfterDone,
    /// Urgent messages are accepted and never sent.
    UrgentLost,
    /// `Drained` is told when both ends have drained, whatever is still under way.
    DrainedBeforeLanding,
    /// Signals from before a drain are raised some time after their bytes have landed, and no
    /// `Drained` waits for them.
    SignalAfterDrained,
    /// Puts from before a drain land once more, some time later, as if a network had sent them
    /// twice.
    PutAgainAfterDrained,
}

/// A violation that [`Options::mutant`] takes: safe code cannot make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllowedMutant(pub(in crate::sim) Mutant);

impl Mutant {
    /// Lets a world violate the contract in this way.
    ///
    /// # Safety
    ///
    /// Safe code relies on the contract: after `Done` or `Severed` it makes references to memory
    /// that a mutant's world still reads or writes. So nobody may make references to memory that is
    /// registered with the devices of this world; slices access it without making any.
    #[must_use]
    #[allow(unsafe_code)]
    pub unsafe fn allow(self) -> AllowedMutant {
        AllowedMutant(self)
    }
}

/// The parameters of a world.
#[derive(Clone, Debug)]
pub struct Options {
    /// The network, with the number of ranks.
    pub network: Network,
    /// The seed of all random choices.
    pub seed: u64,
    /// The faults.
    pub faults: Faults,
    /// Whether ranks of one host map each other's memory; then, as on shared memory, only mappable
    /// memory is registered.
    pub maps: bool,
    /// Whether transfers inside a host need no polls: bytes land and sources are read while their
    /// ranks do nothing.
    pub passive: bool,
    /// Whether a put ends only after its signal, as between processes that share memory. The
    /// contract promises less: that its source may be used again.
    pub signals_before_ends: bool,
    /// By rank: the number of its host. Empty: all ranks are on one host.
    pub hosts: Vec<u32>,
    /// Transfers under way to one peer, unless the faults allow fewer.
    pub queue_depth: usize,
    /// Longest transfer, in bytes.
    pub transfer_bytes_max: u64,
    /// Whether payload is copied. Without, transfers take their time and signals come, but the
    /// memory is neither read nor written: for measuring times alone.
    pub moves_bytes: bool,
    /// The deliberate violation, if any.
    pub mutant: Option<AllowedMutant>,
}

/// Default of [`Options::queue_depth`].
const QUEUE_DEPTH: usize = 64;

/// Default of [`Options::transfer_bytes_max`], in bytes.
const TRANSFER_BYTES_MAX: u64 = 16 << 20;

impl Options {
    /// No faults, no mappings, one host, ranks must be polled, a put may end before its signal,
    /// bytes are copied.
    #[must_use]
    pub fn new(network: Network, seed: u64) -> Self {
        Self {
            network,
            seed,
            faults: Faults::none(),
            maps: false,
            passive: false,
            signals_before_ends: false,
            hosts: Vec::new(),
            queue_depth: QUEUE_DEPTH,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
            moves_bytes: true,
            mutant: None,
        }
    }
}

/// A simulated fabric. Clones are handles of the same world. See [`crate::sim`].
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "World(now {})", self.now())
    }
}

impl World {
    /// A world in which nothing has happened.
    ///
    /// # Panics
    ///
    /// When the queue depth is zero.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let hosts = options.hosts.len();
        assert!(hosts == 0 || hosts == options.network.ranks() as usize, "{hosts} ranks have a host");
        assert!(options.queue_depth > 0 && options.faults.queue_depth != Some(0), "queues hold at least 1");
        Self { state: Arc::new(Mutex::new(State::new(options))) }
    }

    /// A rank's device. Its address is `sim:RANK`.
    ///
    /// # Panics
    ///
    /// When the configuration has another number of ranks than the network, a rank outside of them,
    /// or a rank whose device was made before.
    #[must_use]
    pub fn device(&self, config: DeviceConfig) -> SimDevice {
        SimDevice::new(self.clone(), config)
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.with(|state| state.now)
    }

    /// A stream of random numbers of this world's seed, for a purpose of the caller.
    #[must_use]
    pub fn random(&self, purpose: &str) -> Random {
        self.with(|state| state.root.split("caller").split(purpose))
    }

    /// Goes to the next event and carries it out, or to `wakeup` if that is earlier: the time at
    /// which the first rank wants to be polled. False when there is neither: nothing will happen
    /// any more unless a rank submits.
    ///
    /// One event at a time, so that ranks can be polled between any two. Answers of
    /// [`crate::Responder`]s are requested in here, outside of the world's lock.
    pub fn advance(&self, wakeup: Option<Nanos>) -> bool {
        self.with(|state| state.advance(wakeup))
    }

    /// As [`World::advance`], but goes on to the first instant at which a rank is woken, and
    /// carries out all events of that instant. For callers that measure times alone, and need not
    /// poll ranks between any two events.
    pub fn advance_instant(&self, wakeup: Option<Nanos>) -> bool {
        self.with(|state| state.advance_instant(wakeup))
    }

    /// When the next event will happen.
    #[must_use]
    pub fn next_event(&self) -> Option<Nanos> {
        self.with(|state| state.next_event())
    }

    /// The ranks whose wake sources have woken since the last call: only these can find something
    /// new when polled. A frozen rank stays in the answers until it is polled again. A dead rank is
    /// never in them.
    #[must_use]
    pub fn take_woken(&self) -> Vec<Rank> {
        self.with(|state| state.take_woken())
    }

    /// Whether the rank must not be driven now (it would do nothing).
    #[must_use]
    pub fn is_frozen(&self, rank: Rank) -> bool {
        self.with(|state| state.is_frozen(rank))
    }

    /// The ranks of which [`World::is_frozen`] is true.
    #[must_use]
    pub fn frozen(&self) -> Vec<Rank> {
        self.with(|state| (0..state.ranks.len() as Rank).filter(|rank| state.is_frozen(*rank)).collect())
    }

    /// Whether the rank has died. Its device does nothing any more; drop the code that runs on it.
    #[must_use]
    pub fn is_dead(&self, rank: Rank) -> bool {
        self.with(|state| state.ranks[rank as usize].dead)
    }

    /// Lets something go wrong now.
    pub fn inject(&self, fault: Fault) {
        self.with(|state| state.inject(fault));
    }

    /// Installs a checker, which gets every event from now on.
    pub fn observe(&self, observer: Box<dyn Observer>) {
        self.with(|state| state.observer = Some(observer));
    }

    /// Writes a line for every event from now on: virtual nanoseconds, the name of the event, and
    /// numbers.
    pub fn trace_to(&self, lines: Box<dyn Write + Send>) {
        self.with(|state| state.trace.write_to(lines));
    }

    /// For code that runs a rank. The rank saw count `count` in the signal slot that it keeps for
    /// `from`, and goes on because of it.
    pub fn consumed(&self, rank: Rank, from: Rank, signal_slot: u16, count: u64) {
        self.with(|state| {
            state.event("consumed", &[u64::from(rank), u64::from(from), u64::from(signal_slot), count]);
            state.note(|| Record::Consumed { rank, from, signal_slot, count });
        });
    }

    /// For code that runs a rank. The rank has ended its work for `number` items of a sequence, and
    /// may now tell others in any way.
    pub fn released(&self, rank: Rank, sequence: u64, number: u64) {
        self.with(|state| state.note(|| Record::Released { rank, sequence, number }));
    }

    /// For code that runs a rank. The rank was told that `from` released `number` items of a
    /// sequence, and goes on because of it.
    pub fn acquired(&self, rank: Rank, from: Rank, sequence: u64, number: u64) {
        self.with(|state| state.note(|| Record::Acquired { rank, from, sequence, number }));
    }

    /// How many regions a rank has registered; none when it is dead.
    #[must_use]
    pub fn regions(&self, rank: Rank) -> usize {
        self.with(|state| state.ranks[rank as usize].table.len())
    }

    /// For a simulated processor: `rank` touches these bytes, own or mapped, at some time from
    /// `start` to now.
    pub fn accessed(&self, rank: Rank, address: *const u8, len: usize, kind: AccessKind, start: Nanos) {
        self.with(|state| state.accessed_by_rank(rank, address as usize, len, kind, start));
    }

    /// For a simulated processor and for harnesses: folds something into the trace.
    pub fn mark(&self, name: &'static str, words: &[u64]) {
        self.with(|state| state.event(name, words));
    }

    /// How many transfers are under way, of all ranks: zero at the end of a run in which everything
    /// was released.
    #[must_use]
    pub fn transfers_under_way(&self) -> usize {
        self.with(|state| state.transfers.len())
    }

    /// How many events there have been.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.with(|state| state.trace.events())
    }

    /// Ends the trace, and returns the hash of the whole run.
    pub fn finish(&self) -> TraceHash {
        self.with(|state| {
            state.trace.flush();
            state.trace.hash()
        })
    }

    /// Appends the signal slots of a rank that were signalled since the last call, each with the
    /// peer that it is kept for. Returns true if all of them are named; the first answer names
    /// none.
    pub fn take_signalled(&self, rank: Rank, signal_slots: &mut Vec<(Rank, u16)>) -> bool {
        self.with(|state| {
            let signalled = &mut state.ranks[rank as usize].signalled;
            let is_first = signalled.is_none();
            signal_slots.append(signalled.get_or_insert_default());
            !is_first
        })
    }

    /// Changes the state, then makes the calls that the change left to be made, without holding the
    /// lock.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let (result, mut callbacks) = {
            let mut state = self.lock();
            let result = act(&mut state);
            (result, std::mem::take(&mut state.callbacks))
        };
        while !callbacks.is_empty() {
            for callback in callbacks.drain(..) {
                match callback {
                    Callback::Lost { responder, rank, peer, cause } => {
                        responder.lost_relaying(peer, &cause, &mut self.relay_of(rank));
                    }
                    Callback::Message { responder, from, to, message } => {
                        let answer = responder.message_relaying(from, &message, &mut self.relay_of(to));
                        if let Some(answer) = answer {
                            // The rank that asked may be gone by now; then nobody waits for the
                            // answer.
                            let _ = self.lock().post(to, from, answer, false);
                        }
                    }
                }
            }
            callbacks = std::mem::take(&mut self.lock().callbacks);
        }
        result
    }

    /// Sends the messages that a responder of `rank` has for other peers.
    fn relay_of(&self, rank: Rank) -> impl FnMut(Rank, &[u8], Urgency) -> Result<(), PostError> + '_ {
        move |to, message, urgency| self.lock().post(rank, to, message.to_vec(), urgency.is_urgent())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic of a checker inside of the world ends the test anyway; let others still drop
        // their devices.
        lock(&self.state)
    }
}
