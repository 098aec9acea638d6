//! The engine: one rank's runs, from call to outcome. Pure: it takes `now`, polls a [`Device`] and
//! never blocks.
//!
//! [`Engine`] composes these parts, each of which keeps one invariant:
//!
//! | part | invariant |
//! | --- | --- |
//! | `connector`, `overlay` | A pair is asked for once. What ranks say without a connection comes nearer with every hop |
//! | `admission` | Runs are numbered in the order of their calls. A run begins only when its bank is free, and its gate open |
//! | `run` | No byte of a peer is used before a signal of the peer in this run was compared with this rank's call |
//! | `fast_path` | A short call leaves the fast path between two steps only, and goes on as an ordinary run at the same step |
//! | `signals` | A signal is consumed once. A credit is never more than the peer has completed |
//! | banks, below | All ranks assign the same banks of signal slots and scratch, because the calls alone decide |
//! | `transfers` | A transfer that belongs to no run is known by its number, which comes back once |
//! | `status_board` | What a rank does can be asked at any time, also while its engine is busy elsewhere |
//! | `queries` | A peer has at most one unanswered query of this rank |
//! | `deadlock` | A cycle that was found was there as a whole at one instant |
//! | `failure`, `agreement` | The first fault ends the group; outcomes are given out when the ranks agree on the fault and no peer can touch local memory |
//!
//! A [`Program`] is what was proved, made ready for one rank; a [`Plan`] is what the calls of one
//! shape share. A rank that waits longer than [`QUERY_AFTER`] asks the ranks that it waits for what
//! they are doing: so a rank that was asked for something else is found although neither rank does
//! anything wrong by itself.
//!
//! Runs read and write memory by its address. So other crates neither make addresses nor start runs
//! on memory that a run does not hold. Groups do, which hold or borrow the memory, and simulated
//! ranks ([`Member::start`](crate::simulate::Member::start)).
//!
//! ```compile_fail,E0624
//! pleach_collectives::engine::Address::of(&mut [0; 8]);
//! ```
//! ```compile_fail,E0624
//! # use pleach_collectives::{engine::{Bytes, Engine, Plan}};
//! # use std::{sync::Arc, time::Duration};
//! fn start(engine: &mut Engine, plan: &Arc<Plan>) {
//!     let _ = engine.start(plan, Bytes::None, Bytes::None, Duration::ZERO);
//! }
//! ```

mod address;
mod admission;
mod agreement;
mod connector;
mod deadlock;
mod epoch;
mod failure;
mod fast_path;
mod fault;
#[cfg(test)]
mod hostile;
mod message;
mod observer;
mod overlay;
mod plan;
mod poll;
mod queries;
mod run;
mod signals;
mod status_board;
mod transfers;

use std::sync::Arc;

use pleach_schedule::generate::eager::{MESSAGE_BYTES_MAX, SCRATCH_BYTES};
use pleach_schedule::generate::packed::signal_slots_of_pair_max;
use pleach_transport::{
    Device, Event, Nanos, PostError, RegionKey, RegisterError, RemoteSlice, Slice, TransferId, Urgency,
};
use pleach_vocabulary::{Collective, Rank};

pub use address::{Address, Bytes};
pub use admission::Gate;
pub use deadlock::DEADLOCK_AFTER;
pub(crate) use epoch::{Carried, EpochEnd};
pub(crate) use fast_path::RoundRun;
pub use fault::{Fault, FaultKind};
pub(crate) use overlay::neighbours;
pub use plan::{Plan, PlanError, Program};
pub(crate) use poll::memory_for_peers;
pub use queries::QUERY_AFTER;
pub(crate) use run::{CONTRIBUTORS_MAX, Contributors, RoundDivisor, RoundInput};
pub(crate) use signals::RoundWord;
pub use signals::Witness;
pub use status_board::StatusBoard;

use crate::call::CountsError;
use crate::compute::{Compute, ComputeError};
use admission::Admission;
use connector::Connector;
use deadlock::DeadlockDetector;
use failure::FailureState;
use fast_path::FastPath;
use message::Message;
use observer::Observer;
use queries::Queries;
use signals::PeerSignals;

/// Names a run of an engine until its outcome was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId {
    slot: u8,
    issue: u64,
}

/// Why a call was not accepted.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The group has failed before.
    #[error("the group has failed: {0}")]
    Failed(Arc<Fault>),
    /// Too many operations are under way.
    #[error("more than {RUNS_MAX} operations are under way; wait for some")]
    TooManyRuns,
    /// Input or output is not as long as the counts say.
    #[error(transparent)]
    Counts(#[from] CountsError),
}

/// Why an engine could not be made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No scratch memory.
    #[error(
        "{bytes} bytes of scratch memory cannot be had: {source}; {}",
        pleach_transport::memory::remedy(source)
    )]
    Scratch {
        /// The number of bytes.
        bytes: u64,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The processor that computes cannot reach scratch memory.
    #[error("scratch memory: {0}")]
    Compute(#[from] ComputeError),
    /// The device refuses scratch memory.
    #[error("scratch memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// A peer is not connected.
    #[error("peers cannot be told of scratch memory: {0}")]
    Post(#[from] PostError),
}

/// A sequence of runs, numbered from 0: the collectives of the group, or the messages from one rank
/// to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Stream {
    Collectives,
    Messages { from: Rank, to: Rank },
}

impl Stream {
    fn of(collective: Collective) -> Self {
        match collective {
            Collective::SendRecv { from, to } => Self::Messages { from, to },
            _ => Self::Collectives,
        }
    }

    fn to_word(self) -> u64 {
        match self {
            Self::Collectives => u64::MAX,
            Self::Messages { from, to } => u64::from(from) | u64::from(to) << 32,
        }
    }

    fn from_word(word: u64) -> Self {
        if word == u64::MAX {
            Self::Collectives
        } else {
            Self::Messages { from: word as u32, to: (word >> 32) as u32 }
        }
    }
}

/// The values that a run has from its place in its stream.
#[derive(Clone, Copy, Debug)]
struct RunNumber {
    number: u64,
    /// Signature of the run's call and of all calls before it.
    history: u64,
    bank: Bank,
}

/// Names a step of a run; transfers carry it as their id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepAddress {
    lane: u32,
    slot: u32,
    step: u32,
}

/// The id of transfers whose end no run waits for.
const NO_TRANSFER: TransferId = TransferId(u64::MAX);

/// Most runs of an engine at a time, chunks under way of a lane, lanes of a rank and steps of a
/// lane that a transfer's id can name.
const RUNS_MAX: usize = 255;
const WINDOW_MAX: u32 = 255;
const LANES_MAX: usize = 1 << 24;
const STEPS_MAX: u32 = 1 << 24;

impl StepAddress {
    fn id(self, run: u8) -> TransferId {
        TransferId(
            u64::from(run)
                | u64::from(self.slot) << 8
                | u64::from(self.lane) << 16
                | u64::from(self.step) << 40,
        )
    }

    fn of(id: TransferId) -> Self {
        Self {
            slot: (id.0 >> 8) as u32 & 0xff,
            lane: (id.0 >> 16) as u32 & 0xff_ffff,
            step: (id.0 >> 40) as u32,
        }
    }

    /// The run that a transfer belongs to.
    fn run_of(id: TransferId) -> u8 {
        (id.0 & 0xff) as u8
    }
}

/// This rank's scratch, and where its peers' is. A peer is *ready* when it is connected and has
/// said where its scratch is. **Invariant:** no run begins before the peers of its plan are ready,
/// nor before those are that are connected from the beginning.
struct Scratch {
    layout: ScratchLayout,
    /// `None` when the group has failed: nobody reads it any more.
    own: Option<Slice>,
    /// By rank.
    announced: Vec<Option<RemoteSlice>>,
    connected: Vec<bool>,
    /// As `announced`, of ranks that have said it.
    peers: Vec<RemoteSlice>,
    /// The peers that are connected from the beginning.
    first: Vec<Rank>,
    /// How many of those are not ready, and how many of all peers.
    first_missing: usize,
    missing: usize,
}

impl Scratch {
    /// `first`: the peers that are connected from the beginning.
    fn new(own: Slice, rank: Rank, layout: ScratchLayout, first: Vec<Rank>) -> Self {
        let ranks = layout.ranks as usize;
        let nowhere = RemoteSlice { key: RegionKey::NONE, offset: 0, len: 0 };
        let mut scratch = Self {
            layout,
            announced: vec![None; ranks],
            connected: (0..layout.ranks).map(|peer| peer == rank).collect(),
            peers: vec![nowhere; ranks],
            first_missing: first.len(),
            first,
            missing: ranks - 1,
            own: None,
        };
        (scratch.announced[rank as usize], scratch.peers[rank as usize]) = (Some(own.remote()), own.remote());
        scratch.own = Some(own);
        scratch
    }

    /// This rank's scratch.
    #[inline]
    fn own(&self) -> &Slice {
        let Some(own) = &self.own else { unreachable!("a group that works has scratch") };
        own
    }

    /// Whether the peers are ready that are connected from the beginning.
    #[inline]
    fn is_ready(&self) -> bool {
        self.first_missing == 0
    }

    /// Whether a peer is ready.
    #[inline]
    fn has(&self, peer: Rank) -> bool {
        self.connected[peer as usize] && self.announced[peer as usize].is_some()
    }

    /// Whether these peers are ready, and those that are connected from the beginning.
    #[inline]
    fn has_all(&self, peers: &[Rank]) -> bool {
        self.missing == 0 || (self.is_ready() && peers.iter().all(|peer| self.has(*peer)))
    }

    /// Whether the peer is connected, or was.
    fn is_connected(&self, peer: Rank) -> bool {
        self.connected[peer as usize]
    }

    /// Of the peers that are connected from the beginning, those that are not ready.
    fn not_ready(&self) -> impl Iterator<Item = Rank> + '_ {
        self.first.iter().copied().filter(|peer| !self.has(*peer))
    }

    /// Of these peers, those whose connection is still on its way.
    fn unconnected(&self) -> impl Iterator<Item = Rank> + '_ {
        self.first.iter().copied().filter(|peer| !self.is_connected(*peer))
    }

    fn connected(&mut self, peer: Rank) {
        let before = self.has(peer);
        self.connected[peer as usize] = true;
        self.count(peer, before);
    }

    /// A peer has said where its scratch is; only the first time counts.
    fn announced(&mut self, peer: Rank, slice: RemoteSlice) {
        if slice.len == self.layout.bytes() && (peer as usize) < self.announced.len() {
            let before = self.has(peer);
            self.peers[peer as usize] = *self.announced[peer as usize].get_or_insert(slice);
            self.count(peer, before);
        }
    }

    /// Counts a peer that has become ready.
    fn count(&mut self, peer: Rank, was_ready: bool) {
        if !was_ready && self.has(peer) {
            self.missing -= 1;
            self.first_missing -= usize::from(self.first.binary_search(&peer).is_ok());
        }
    }
}

/// The device, memory and signals that runs act on.
struct Context {
    rank: Rank,
    ranks: u32,
    device: Box<dyn Device>,
    compute: Box<dyn Compute>,
    signals: PeerSignals,
    scratch: Scratch,
    connector: Connector,
    /// How many collectives this rank has completed, without a gap.
    completed: u64,
    /// Every signal that comes is told by [`Run::mark_signalled`](run::Run::mark_signalled), so
    /// that signal slots need not be looked at.
    hears_all: bool,
    now: Nanos,
    /// How long this rank has been in the call, in nanoseconds; zero where nobody has read the
    /// clock.
    elapsed_ns: u64,
    #[cfg(test)]
    traffic: Traffic,
}

/// Bytes that runs have read and put.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Of this rank's own memory, by steps that combine or copy.
    pub(crate) own: u64,
    /// Of peers' memory.
    pub(crate) peers: u64,
    pub(crate) put: u64,
}

#[cfg(test)]
impl Traffic {
    /// What was read and put since then.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { own: self.own - before.own, peers: self.peers - before.peers, put: self.put - before.put }
    }

    fn read(&mut self, bytes: usize, is_own: bool) {
        *(if is_own { &mut self.own } else { &mut self.peers }) += bytes as u64;
    }

    fn put(&mut self, bytes: usize) {
        self.put += bytes as u64;
    }
}

#[cfg(test)]
impl Engine {
    /// What runs have read and put so far, but for those on the fast path.
    pub(crate) fn traffic(&self) -> Traffic {
        self.context.traffic
    }
}

impl Context {
    /// All ranks but this one.
    fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let own = self.rank;
        (0..self.ranks).filter(move |peer| *peer != own)
    }

    /// Tells a peer where this rank's scratch is.
    fn announce_scratch(&mut self, peer: Rank) -> Result<(), PostError> {
        let scratch = self.scratch.announced[self.rank as usize].expect("known since this engine was made");
        self.device.post(peer, &Message::Scratch(scratch).encode(), Urgency::Ordinary)
    }
}

/// One rank's engine; see the module.
pub struct Engine {
    context: Context,
    admission: Admission,
    fast_path: FastPath,
    board: Arc<StatusBoard>,
    queries: Queries,
    deadlocks: DeadlockDetector,
    failure: FailureState,
    observer: Observer,
    /// Kept for their memory.
    events: Vec<Event>,
    signalled: Vec<(Rank, u16)>,
    /// The numbers of transfers that belong to no run and have ended well.
    ended_transfers: Vec<u64>,
}

// ---- Banks: which signal slots and which scratch a run uses, and when they may be used again.
//
// Runs of collectives are numbered; each takes the next *bank* of its class. A bank is free again
// for a rank's peers when that rank has completed the bank's previous run, which its peers know
// from the `completed` of its headers, from credits, or by asking. **Invariant:** all ranks assign
// the same banks, because assignment depends on the sequence of calls alone (and where the
// sequences differ, signatures differ before anything is used).

/// Signal slots before this one tell credits, and words about rounds: see [`signals`].
const FIRST_SIGNAL_SLOT: u32 = 4;

/// Messages of one rank to another that go straight to scratch and may be under way at once.
const EAGER_BANKS: u64 = 8;
const EAGER_SIGNAL_SLOTS_BASE: u32 = FIRST_SIGNAL_SLOT;
/// Scratch of such a message, in bytes.
const EAGER_SCRATCH_BYTES: u64 = 8 << 10;
const _: () = assert!(MESSAGE_BYTES_MAX <= EAGER_SCRATCH_BYTES);

/// First signal slot of the other messages between two ranks.
const MESSAGE_SIGNAL_SLOTS_BASE: u32 = 16;
const _: () = assert!(EAGER_SIGNAL_SLOTS_BASE + EAGER_BANKS as u32 <= MESSAGE_SIGNAL_SLOTS_BASE);
/// Signal slots of a message in each direction.
const MESSAGE_SIGNAL_SLOTS: u32 = 6;
/// Scratch of messages for each peer and direction, in bytes: two of the largest chunks of a
/// message.
const MESSAGE_SCRATCH_BYTES: u64 = 128 << 10;
/// The same where GPUs copy: a copy takes ten microseconds whatever its length.
const GPU_MESSAGE_SCRATCH_BYTES: u64 = 8 << 20;

const SMALL_BANKS: usize = 8;
const SMALL_SIGNAL_SLOTS_BASE: u32 = 64;
const SMALL_SIGNAL_SLOTS: u32 = 32;
const _: () = assert!(MESSAGE_SIGNAL_SLOTS_BASE + 8 * MESSAGE_SIGNAL_SLOTS <= SMALL_SIGNAL_SLOTS_BASE);
/// Scratch of a small bank, in bytes.
const SMALL_SCRATCH_BYTES: u64 = 64 << 10;
const _: () = assert!(SCRATCH_BYTES <= SMALL_SCRATCH_BYTES);

const LARGE_BANKS: usize = 2;
const LARGE_SIGNAL_SLOTS_BASE: u32 = SMALL_SIGNAL_SLOTS_BASE + SMALL_BANKS as u32 * SMALL_SIGNAL_SLOTS;
/// Scratch of a large bank, in bytes: room for the chunks under way along a hundred trees that are
/// ten deep, up and down.
const LARGE_SCRATCH_BYTES: u64 = 32 << 20;
/// Largest chunk of a block that is put, in bytes: fits the second-level cache several times over,
/// and is long beside a signal.
const CHUNK_BYTES_MAX: usize = 256 << 10;
/// The same where peers' memory is mapped: chunks staged for peers stay in the cache from which the
/// peers read them.
const MAPPED_CHUNK_BYTES_MAX: usize = 128 << 10;

/// Signal slots that a rank keeps for each peer, in a group of that many ranks.
#[must_use]
pub const fn signal_slots(ranks: u32) -> usize {
    (LARGE_SIGNAL_SLOTS_BASE + LARGE_BANKS as u32 * signal_slots_of_pair_max(ranks)) as usize
}

/// How a run uses banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// A message that the receiver says it is ready for.
    Message,
    /// A message that the receiver reads in place.
    MappedMessage,
    /// A message that the sender puts without asking.
    EagerMessage,
    Small,
    Large,
}

impl Class {
    /// What fits a bank of this class: signal slots for each peer, bytes of scratch, and bytes of a
    /// chunk. `maps`: ranks touch each other's memory through mappings. `gpus_copy`: as in
    /// [`ScratchLayout`].
    fn capacity(self, ranks: u32, maps: bool, gpus_copy: bool) -> (u32, u64, usize) {
        match self {
            Self::EagerMessage => (1, EAGER_SCRATCH_BYTES, usize::MAX),
            Self::Message | Self::MappedMessage => {
                let scratch_bytes = message_scratch_bytes(gpus_copy);
                (MESSAGE_SIGNAL_SLOTS, scratch_bytes, scratch_bytes as usize / 2)
            }
            Self::Small => (SMALL_SIGNAL_SLOTS, SMALL_SCRATCH_BYTES, usize::MAX),
            Self::Large => {
                let chunk_bytes = if maps { MAPPED_CHUNK_BYTES_MAX } else { CHUNK_BYTES_MAX };
                (signal_slots_of_pair_max(ranks), LARGE_SCRATCH_BYTES, chunk_bytes)
            }
        }
    }
}

/// A schedule that does not fit the signal slots or the scratch.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the schedule needs {signal_slots} signal slots a peer and {slots} scratch slots a rank; there is room for {signal_slots_max} and {slots_max}"
)]
pub struct TooLarge {
    /// Signal slots that it needs for a peer.
    pub signal_slots: u32,
    /// Slots that it needs.
    pub slots: u32,
    /// Signal slots there are.
    pub signal_slots_max: u32,
    /// Slots there is room for.
    pub slots_max: u32,
}

/// Which signal slots and which scratch a run uses: the same on all ranks but for the messages
/// between two.
#[derive(Clone, Copy, Debug, Default)]
struct Bank {
    /// First signal slot that this rank signals at its peers.
    signal_base: u32,
    /// First signal slot that this rank waits on.
    wait_base: u32,
    /// Where its slots begin in this rank's scratch, in bytes.
    scratch_base: u64,
    /// Where they begin in a peer's scratch, in bytes.
    peer_scratch_base: u64,
    needed: u64,
}

impl Bank {
    /// How many runs a peer must have completed before it may be written to: then it does not use
    /// this bank any more.
    #[inline]
    fn needed(&self) -> u64 {
        self.needed
    }

    /// A signal slot that this rank signals at its peers.
    #[inline]
    fn outgoing(&self, offset: u32) -> u16 {
        // The bank has room for all signal slots of its runs, and banks end below 65,536.
        (self.signal_base + offset) as u16
    }

    /// A signal slot that this rank waits on.
    #[inline]
    fn incoming(&self, offset: u32) -> u16 {
        (self.wait_base + offset) as u16
    }

    /// The opposite of [`Bank::incoming`]; `None`: a signal slot of another bank.
    fn incoming_offset(&self, signal_slot: u16) -> Option<u32> {
        u32::from(signal_slot).checked_sub(self.wait_base)
    }

    /// A byte of the bank in this rank's scratch.
    #[inline]
    fn scratch(&self, offset: u64) -> usize {
        (self.scratch_base + offset) as usize
    }

    /// A byte of the bank in a peer's scratch.
    #[inline]
    fn peer_scratch(&self, offset: u64) -> u64 {
        self.peer_scratch_base + offset
    }
}

/// How scratch is divided: the same on all ranks of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScratchLayout {
    pub ranks: u32,
    /// All ranks are on one host, and their GPUs copy between each other's memory.
    pub gpus_copy: bool,
}

impl ScratchLayout {
    /// Bytes of scratch that a rank needs.
    pub(crate) fn bytes(self) -> u64 {
        self.eager_base() + u64::from(self.ranks) * 2 * EAGER_BANKS * EAGER_SCRATCH_BYTES
    }

    fn eager_base(self) -> u64 {
        message_base() + u64::from(self.ranks) * 2 * message_scratch_bytes(self.gpus_copy)
    }
}

const fn message_scratch_bytes(gpus_copy: bool) -> u64 {
    if gpus_copy { GPU_MESSAGE_SCRATCH_BYTES } else { MESSAGE_SCRATCH_BYTES }
}

const fn message_base() -> u64 {
    SMALL_BANKS as u64 * SMALL_SCRATCH_BYTES + LARGE_BANKS as u64 * LARGE_SCRATCH_BYTES
}

/// The banks of the collectives of one group.
#[derive(Debug, Default)]
struct Banks {
    /// By bank: one more than the number of the last run that used it.
    small: [u64; SMALL_BANKS],
    large: [u64; LARGE_BANKS],
    small_runs: usize,
    large_runs: usize,
}

impl Banks {
    /// The bank of run `run`, which is the next one, in a group of `ranks`.
    fn take(&mut self, class: Class, run: u64, ranks: u32) -> Bank {
        let (index, used, signal_slots, scratch) = match class {
            Class::Large => {
                let index = self.large_runs % LARGE_BANKS;
                self.large_runs += 1;
                let signal_slots = LARGE_SIGNAL_SLOTS_BASE + index as u32 * signal_slots_of_pair_max(ranks);
                let scratch = SMALL_BANKS as u64 * SMALL_SCRATCH_BYTES + index as u64 * LARGE_SCRATCH_BYTES;
                (index, &mut self.large[..], signal_slots, scratch)
            }
            _ => {
                let index = self.small_runs % SMALL_BANKS;
                self.small_runs += 1;
                let signal_slots = SMALL_SIGNAL_SLOTS_BASE + index as u32 * SMALL_SIGNAL_SLOTS;
                (index, &mut self.small[..], signal_slots, index as u64 * SMALL_SCRATCH_BYTES)
            }
        };
        let needed = std::mem::replace(&mut used[index], run + 1);
        Bank {
            signal_base: signal_slots,
            wait_base: signal_slots,
            scratch_base: scratch,
            peer_scratch_base: scratch,
            needed,
        }
    }
}

/// The bank of a message from one rank to another, as `rank` (one of them) sees it.
#[derive(Clone, Copy, Debug)]
struct MessageBanks {
    rank: Rank,
    layout: ScratchLayout,
    from: Rank,
    to: Rank,
}

impl MessageBanks {
    fn new(rank: Rank, layout: ScratchLayout, from: Rank, to: Rank) -> Self {
        Self { rank, layout, from, to }
    }

    /// The bank of message `number`, a message of this class.
    ///
    /// Eager messages use some banks in turn. The sender writes to a bank when it knows that the
    /// receiver has ended the message before in the same bank.
    ///
    /// The other classes have two sets of signal slots each, used in turn. The message before in a
    /// set is the last message of the same class whose number has the same parity. The set is free
    /// when both ranks have ended that message, whatever came between. They have:
    ///
    /// * `Message`: the receiver signals that it is ready, and does so only after it has ended the
    ///   message before. The sender has also ended the message before, and has seen its ready
    ///   signal. The sender writes only after the new ready signal.
    /// * `MappedMessage`: the sender begins when it has ended the message before, so the receiver
    ///   has read that message. The receiver signals only after a signal of the sender. By then the
    ///   sender has seen the receiver's last signal in the set.
    ///
    /// The scratch of these classes is written only after a signal of the peer in the same message,
    /// or it belongs to the sender.
    fn of(self, class: Class, number: u64) -> Bank {
        let Self { rank, layout, from, to } = self;
        let (peer, role) = if rank == from { (to, 0) } else { (from, 1) };
        let base =
            |base: u64, bytes: u64, owner: Rank, role: u64| base + (u64::from(owner) * 2 + role) * bytes;
        if class == Class::EagerMessage {
            let bank = number % EAGER_BANKS;
            let signal_slots = EAGER_SIGNAL_SLOTS_BASE + bank as u32;
            let scratch = |peer, role| {
                let bytes = EAGER_BANKS * EAGER_SCRATCH_BYTES;
                base(layout.eager_base(), bytes, peer, role) + bank * EAGER_SCRATCH_BYTES
            };
            return Bank {
                signal_base: signal_slots,
                wait_base: signal_slots,
                scratch_base: scratch(peer, role),
                peer_scratch_base: scratch(rank, 1 - role),
                needed: if role == 0 { (number + 1).saturating_sub(EAGER_BANKS) } else { 0 },
            };
        }
        let bytes = message_scratch_bytes(layout.gpus_copy);
        let scratch = |peer, role| base(message_base(), bytes, peer, role);
        // The signal slots that the sender signals lie below those that the receiver signals.
        let form = u32::from(class == Class::MappedMessage);
        let data = MESSAGE_SIGNAL_SLOTS_BASE + ((number % 2) as u32 * 2 + form) * 2 * MESSAGE_SIGNAL_SLOTS;
        let ready = data + MESSAGE_SIGNAL_SLOTS;
        let (signal_base, wait_base) = if role == 0 { (data, ready) } else { (ready, data) };
        Bank {
            signal_base,
            wait_base,
            scratch_base: scratch(peer, role),
            peer_scratch_base: scratch(rank, 1 - role),
            needed: 0,
        }
    }
}

/// Whether the receiver of message `number` sends a credit: often enough that a sender never runs
/// out of free banks while the receiver keeps up.
fn message_credit_is_due(number: u64) -> bool {
    (number + 1).is_multiple_of(EAGER_BANKS / 2)
}

/// Whether a rank sends a credit after run `run` to the peers that it does not signal: often enough
/// that a writer never runs out of free banks while all ranks keep up.
fn credit_is_due(class: Class, run: u64) -> bool {
    class == Class::Large || run.is_multiple_of(SMALL_BANKS as u64 / 2)
}
