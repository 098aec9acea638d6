//! How the ranks of a group make a window: they compare what they ask for, meet in a group of its
//! own, register memory, and map each other's.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{Memory, RegionKey, RemoteSlice, SharedMemory, clock};
use pleach_vocabulary::Rank;

use super::Window;
use crate::engine::{FaultKind, memory_for_peers, signal_slots};
use crate::group::data::Element;
use crate::group::driver::Served;
use crate::group::error::CollectiveError;
use crate::group::split::SplitError;
use crate::group::{Group, Progress};
use crate::window::{Layout, OneSided, OwnMemory, Terms, WORDS, staging_bytes};

/// Sets the comparison of terms apart from a caller's own all-gather.
const WINDOW_MARK: u32 = 0x5749_4e44;
/// Most signal slots of a device for a peer.
const SIGNAL_SLOTS_MAX: usize = 1 << 16;

/// Why there is no window.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// The group does not work, or memory cannot be had.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Ranks asked for different windows.
    #[error("rank {rank} asks for a window of {theirs}, rank {own_rank} of {own}; ask for the same on all")]
    Differs {
        /// The first rank that asks for something else than this one.
        rank: Rank,
        /// What it asks for.
        theirs: String,
        /// This rank.
        own_rank: Rank,
        /// What this rank asks for.
        own: String,
    },
    /// The ranks did not meet for the window.
    #[error("a window has no group of its own: {0}")]
    Split(#[from] SplitError),
    /// A rank would have to poll while its caller computes, and has no thread for that.
    #[error(
        "on this fabric a rank answers its peers while its caller computes, by a thread of the group; set \
         Options::progress to Progress::Thread on all ranks, or take fabric shm"
    )]
    NoThread,
    /// More slots than signal slots.
    #[error("a window in a group of {ranks} has at most {max} slots, not {slots}")]
    TooManySlots {
        /// What was asked for.
        slots: u16,
        /// How many there can be.
        max: usize,
        /// The number of ranks.
        ranks: u32,
    },
    /// More elements than a write can carry.
    #[error("a window has at most {max} elements of this type on this fabric, not {len}")]
    TooLong {
        /// What was asked for.
        len: usize,
        /// How many there can be.
        max: usize,
    },
}

impl From<WindowError> for CollectiveError {
    fn from(error: WindowError) -> Self {
        match error {
            WindowError::Collective(error) => error,
            WindowError::Split(error) => error.into(),
            error => Self::NotMade(Arc::new(error)),
        }
    }
}

impl Group {
    /// One-sided memory of `len` elements a rank. Each rank [publishes](Window::publish) elements
    /// that its peers [read](Window::read), and has `slots` slots at each peer into which it
    /// [writes](Window::write). All ranks call it with the same length and number of slots, and it
    /// returns when all have.
    ///
    /// ```
    /// # use pleach_collectives::{Group, Options, Word};
    /// # use pleach_transport::rendezvous::World;
    /// # let group = Group::join(&Options::new(World::alone()))?;
    /// let mut window = group.window::<f32>(4, 1)?;
    /// window.publish(&[1.0, 2.0, 3.0, 4.0], Word::from(7))?;
    /// let mut some = [0.0; 2];
    /// let (version, word) = window.read(group.rank(), 1..3, &mut some)?;
    /// assert_eq!((version, word.number(), some), (1, 7, [2.0, 3.0]));
    /// window.close()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// See [`WindowError`]; the same on all ranks.
    pub fn window<T: Element>(&self, len: usize, slots: u16) -> Result<Window<T>, WindowError> {
        self.expect_open()?;
        let all = self.compare_windows::<T>(len, slots)?;
        let ranks = self.world_size();
        let slots_max = SIGNAL_SLOTS_MAX - signal_slots(ranks) - 1;
        if usize::from(slots) > slots_max {
            return Err(WindowError::TooManySlots { slots, max: slots_max, ranks });
        }
        let element = size_of::<T>();
        let transfer_bytes_max = Terms::transfer_bytes_max(&all);
        let layout = len.checked_mul(element).and_then(|bytes| Layout::new(bytes, slots, ranks));
        let fits =
            |layout: &Layout| layout.slot(0, 0, layout.data_bytes()).len() as u64 <= transfer_bytes_max;
        let Some(layout) = layout.filter(fits) else {
            let header = Layout::new(0, 1, 1).map_or(0, |layout| layout.slot(0, 0, 0).len());
            let bytes = usize::try_from(transfer_bytes_max).unwrap_or(usize::MAX).min(isize::MAX as usize);
            return Err(WindowError::TooLong { len, max: bytes.saturating_sub(header) / element });
        };
        self.expect_host()?;
        let own = self.with_signal_slots(1 + usize::from(slots))?;
        let own = Self { interrupted: self.interrupted, ..own };
        Ok(own.into_window(len, layout)?)
    }

    /// Compares what the ranks ask for; returns the words of all.
    fn compare_windows<T: Element>(&self, len: usize, slots: u16) -> Result<Vec<u64>, WindowError> {
        let rank = self.rank();
        let (is_passive, transfer_bytes_max) = {
            let mut core = self.shared.driver.lock();
            let info = core.engine.device().info();
            let is_passive =
                (0..self.world_size()).all(|peer| peer == rank || info.reach[peer as usize].passive);
            (is_passive, info.transfer_bytes_max)
        };
        let has_thread = self.shared.options.progress == Progress::Thread;
        let data_type = T::DATA_TYPE;
        let terms = Terms { len, data_type, slots, has_thread, is_passive, transfer_bytes_max };
        let mut all = vec![0; WORDS * self.world_size() as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(WINDOW_MARK) };
        plain.gather_words(&terms.to_words(), &mut all)?;
        if let Some((rank, theirs)) = terms.find_difference(&all) {
            let own = terms.to_string();
            return Err(WindowError::Differs { rank, theirs, own_rank: self.rank(), own });
        }
        if Terms::lack_thread(&all) { Err(WindowError::NoThread) } else { Ok(all) }
    }

    /// Makes the window of this group, which nothing else uses.
    fn into_window<T: Element>(self, len: usize, layout: Layout) -> Result<Window<T>, CollectiveError> {
        let published = self.registered(lendable(layout.published_bytes())?)?;
        let written = self.new_registered(layout.slots_bytes())?;
        // Its pages cost nothing until they are touched, so it is there also where all memory is
        // mapped: a mapping may be refused.
        let staging = match self.world_size() {
            1 => None,
            _ => Some(self.new_registered(staging_bytes(&layout))?),
        };
        let own = [published.remote(), written.remote()];
        let words = own.map(|slice| [slice.key.0, slice.offset, slice.len]);
        let mut all = vec![0; words.as_flattened().len() * self.world_size() as usize];
        self.all_gather(words.as_flattened(), &mut all)?;
        let place =
            |words: &[u64; 3]| RemoteSlice { key: RegionKey(words[0]), offset: words[1], len: words[2] };
        let places: Vec<[RemoteSlice; 2]> =
            all.as_chunks::<3>().0.as_chunks::<2>().0.iter().map(|pair| pair.each_ref().map(place)).collect();
        self.expect_places(&layout, &places)?;
        let mut core = self.shared.driver.lock();
        let own = OwnMemory { published, written, staging };
        let window = OneSided::new(&mut core.engine, layout, own, &places);
        core.served = Some(Served::Window(Box::new(window)));
        let until = clock::now() + self.timeout;
        self.drive_window(core, until, |core| core.expect_window().0.has_mapped().then_some(()))?;
        let all_mapped = self.shared.driver.lock().expect_window().0.are_all_mapped();
        if !all_mapped {
            self.shared.begin_progress()?;
            self.shared.wake_progress();
        }
        // Nobody needs a rank that has not come so far.
        self.barrier()?;
        Ok(Window { group: self, layout, len, all_mapped, departures: 0, _element: PhantomData })
    }

    /// Ends the group where a peer's memory is none of this layout.
    fn expect_places(&self, layout: &Layout, places: &[[RemoteSlice; 2]]) -> Result<(), CollectiveError> {
        let Some(peer) = layout.find_misfit(places) else { return Ok(()) };
        let detail = "its memory of a window has another length or place".to_owned();
        Err(self.give_up(FaultKind::Protocol, peer, detail, Duration::ZERO))
    }
}

/// Zeroed memory that peers only read. Miri has no anonymous files.
fn lendable(bytes: usize) -> Result<Arc<dyn Memory>, CollectiveError> {
    let memory: std::io::Result<Arc<dyn Memory>> = if cfg!(miri) {
        memory_for_peers(bytes)
    } else {
        SharedMemory::lendable(bytes).map(|memory| -> Arc<dyn Memory> { memory })
    };
    memory.map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })
}
