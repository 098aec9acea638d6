//! Reads under way. See the module for their three steps.
//!
//! **Invariant:** the version line is asked for only when all bytes of the elements are here, and
//! the elements only when the version is known. A read that goes on writes to nothing but its
//! target and its own staging; after it was taken or forgotten it writes nothing.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use pleach_transport::{Nanos, Slice, Transfer};
use pleach_vocabulary::Rank;

use super::layout::{LINE_BYTES, Layout};
use super::memory::{View, copy};
use super::one_sided::{PeerMemory, RETRIED_AFTER};
use super::version_line::{BEGUN, PUBLISHED, VersionWords, is_whole, unsealed};
use super::word::Word;
use crate::engine::{Address, Engine, FaultKind};

/// Most reads under way.
pub(crate) const READS_MAX: usize = 8;

/// Staged elements of a read arrive in chunks of so many bytes, and so many chunks at a time.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNKS: usize = 4;
/// Elements that need no staging arrive in pieces of so many bytes, unless the device's transfers
/// are shorter.
const PIECE_BYTES_MAX: u64 = 64 << 20;
/// Bytes that a poll copies out of mapped memory, for all reads: about 100 µs.
const POLL_BYTES: usize = 1 << 20;

/// Steps of a read of mapped memory that a poll makes: a copy, and the look at the version line
/// that may end the read. An owner that publishes again and again would keep one poll for ever
/// otherwise, with the group's lock and with the time at which the poll began.
const POLL_STEPS: usize = 2;

/// Bytes of staging of a read: the version line, the word's line, the chunks.
const STAGING_BYTES: usize = 2 * LINE_BYTES + CHUNKS * CHUNK_BYTES;

/// Bytes of staging that all reads of a window need.
pub(crate) const READS_STAGING_BYTES: usize = READS_MAX * STAGING_BYTES;

/// Names a read until it is taken or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadId {
    index: usize,
    issue: u64,
}

/// Where the elements of a read go. Nothing else touches these bytes until the read is taken or
/// forgotten.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Into registered memory.
    Registered(Slice),
    /// To this address, through staging.
    Private(Address),
}

/// What a read asks for.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) peer: Rank,
    /// Of the elements, in bytes.
    pub(crate) range: Range<usize>,
    pub(crate) target: Target,
    /// Any bytes will do.
    pub(crate) is_torn: bool,
    pub(crate) timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The version line is asked for.
    Line,
    /// Word and elements of this version.
    Elements {
        version: u64,
    },
    /// The version line once more.
    Check {
        version: u64,
    },
    Ended {
        version: u64,
        word: Word,
    },
}

/// What a get under way brings.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Line,
    Word,
    /// These bytes of the request's range, through a chunk of the staging where they are staged.
    Elements {
        range: Range<usize>,
        chunk: Option<usize>,
    },
}

struct Read {
    issue: u64,
    request: Request,
    /// The memory at an address of this process, where it is mapped.
    view: Option<View>,
    stage: Stage,
    /// Whether the word was asked for, and how many bytes of the range were, in this stage.
    has_word: bool,
    asked: usize,
    under_way: Vec<(u64, Piece)>,
    begun_at: Option<Nanos>,
    /// How often the owner published twice meanwhile.
    overwritten: u64,
}

impl Read {
    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        (self.has_word, self.asked) = (false, 0);
    }

    /// A chunk of the staging that no get under way uses.
    fn free_chunk(&self) -> Option<usize> {
        (0..CHUNKS).find(|chunk| {
            let uses =
                |piece: &Piece| matches!(piece, Piece::Elements { chunk: Some(used), .. } if used == chunk);
            !self.under_way.iter().any(|(_, piece)| uses(piece))
        })
    }

    /// All bytes of the stage were asked for and are here.
    fn has_all(&self) -> bool {
        self.has_word && self.asked == self.request.range.len() && self.under_way.is_empty()
    }
}

/// Something of a read that goes wrong on purpose.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMutant {
    /// The version is looked at before the elements only.
    CheckedBeforeOnly,
    /// The line that is read last is asked for together with the elements.
    CheckedTooEarly,
    /// Elements that two versions have overwritten are taken.
    OneVersionTooOld,
}

/// The reads of a window at one rank.
pub(crate) struct Reads {
    layout: Layout,
    /// Absent where all memory is reached by its address.
    staging: Option<Slice>,
    transfer_bytes_max: u64,
    reads: [Option<Read>; READS_MAX],
    issues: u64,
    transfers: u64,
    /// The read that copies first. One copies after the other, as the longer a read takes, the
    /// sooner it is overwritten.
    turn: usize,
    wakeup: Option<Nanos>,
    #[cfg(test)]
    pub(crate) mutant: Option<ReadMutant>,
}

impl Reads {
    pub(crate) fn new(layout: Layout, staging: Option<Slice>, transfer_bytes_max: u64) -> Self {
        assert!(staging.as_ref().is_none_or(|staging| staging.len() >= READS_STAGING_BYTES));
        Self {
            layout,
            staging,
            transfer_bytes_max,
            reads: Default::default(),
            issues: 0,
            transfers: 0,
            turn: 0,
            wakeup: None,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Accepts a read, which begins with the next poll. `None`: too many are under way.
    pub(crate) fn start(&mut self, request: Request, view: Option<View>) -> Option<ReadId> {
        let index = self.reads.iter().position(Option::is_none)?;
        self.issues += 1;
        let read = Read {
            issue: self.issues,
            request,
            view,
            stage: Stage::Line,
            has_word: false,
            asked: 0,
            under_way: Vec::new(),
            begun_at: None,
            overwritten: 0,
        };
        self.reads[index] = Some(read);
        Some(ReadId { index, issue: self.issues })
    }

    /// The version and the word of a read that has ended, once.
    pub(crate) fn take(&mut self, id: ReadId) -> Option<(u64, Word)> {
        let Some(Read { stage: Stage::Ended { version, word }, issue, .. }) = self.reads[id.index] else {
            return None;
        };
        (issue == id.issue).then(|| self.reads[id.index] = None)?;
        Some((version, word))
    }

    /// Forgets a read of a group that has failed.
    pub(crate) fn forget(&mut self, id: ReadId) {
        self.reads[id.index].take_if(|read| read.issue == id.issue);
    }

    /// Whether a read is under way that has not ended.
    pub(crate) fn are_under_way(&self) -> bool {
        self.reads.iter().flatten().any(|read| !matches!(read.stage, Stage::Ended { .. }))
    }

    /// When to poll at the latest, if nothing wakes this rank.
    pub(crate) fn next_wakeup(&self) -> Option<Nanos> {
        self.wakeup
    }

    /// A get has ended well. False: the number is not that of a get of a read.
    pub(crate) fn note_ended(&mut self, number: u64) {
        for index in 0..READS_MAX {
            let Some(read) = &mut self.reads[index] else { continue };
            let Some(at) = read.under_way.iter().position(|(other, _)| *other == number) else { continue };
            // The bytes were read before whatever is asked for next.
            fence(Ordering::Acquire);
            let (_, piece) = read.under_way.swap_remove(at);
            if let (Piece::Elements { range, chunk: Some(chunk) }, Target::Private(into)) =
                (piece, &read.request.target)
            {
                let into = into.add(range.start);
                let from = self.staged(index, 2 * LINE_BYTES + chunk * CHUNK_BYTES, range.len());
                copy(Address(from.as_ptr()), into, range.len());
            }
            return;
        }
    }

    /// Part of the staging of a read.
    fn staged(&self, index: usize, from: usize, bytes: usize) -> Slice {
        let from = index * STAGING_BYTES + from;
        let staging = self.staging.as_ref().expect("there is staging where memory is not mapped");
        staging.slice(from..from + bytes).expect("inside of the staging")
    }

    /// Goes as far as it can, but copies only some of the bytes of mapped memory; true when
    /// anything moved. Whoever polls again looks at the clock first, and at who wants the lock.
    pub(crate) fn poll(&mut self, peers: &[PeerMemory], engine: &mut Engine, now: Nanos) -> bool {
        self.wakeup = None;
        let (mut moved, mut left) = (false, POLL_BYTES);
        for index in (self.turn..READS_MAX).chain(0..self.turn) {
            let (mut steps, had) = (0, left);
            // A remote read moves only when a get has ended, which it is told before.
            while engine.works()
                && steps < POLL_STEPS
                && let Some(is_mapped) = self.advance(index, peers, engine, &mut left, now)
            {
                moved = true;
                steps += usize::from(is_mapped);
            }
            if had > 0 && left == 0 {
                // It copies first again until it has its bytes, then the next one does.
                let goes_on = |read: &Read| matches!(read.stage, Stage::Elements { .. });
                let next = index + usize::from(!self.reads[index].as_ref().is_some_and(goes_on));
                self.turn = next % READS_MAX;
            }
            self.look_at_time(index, engine, now);
        }
        moved
    }

    fn wake_by(&mut self, at: Nanos) {
        self.wakeup = Some(self.wakeup.map_or(at, |wakeup| wakeup.min(at)));
    }

    /// Gives up a read that takes too long.
    fn look_at_time(&mut self, index: usize, engine: &mut Engine, now: Nanos) {
        let Some(read) = &mut self.reads[index] else { return };
        if matches!(read.stage, Stage::Ended { .. }) || !engine.works() {
            return;
        }
        let peer = read.request.peer;
        engine.expect_present(peer, "a read of its window", now);
        let since = *read.begun_at.get_or_insert(now);
        let until = since + read.request.timeout;
        if now < until {
            return self.wake_by(until);
        }
        let detail = match read.overwritten {
            0 => "a read of its window".to_owned(),
            times => format!(
                "a read of its window, whose elements were overwritten {times} times while they were read; read \
                 fewer at a time, or publish less often"
            ),
        };
        engine.give_up_on(FaultKind::TimedOut, peer, detail, now.since(since), now);
    }

    /// The next step of a read: whether it is one of mapped memory, of which at most `left` bytes
    /// are copied. `None`: it does not move now.
    fn advance(
        &mut self,
        index: usize,
        peers: &[PeerMemory],
        engine: &mut Engine,
        left: &mut usize,
        now: Nanos,
    ) -> Option<bool> {
        let read = self.reads[index].as_ref()?;
        let peer = &peers[read.request.peer as usize];
        let is_mapped = read.view.is_some();
        let moves = if is_mapped {
            self.advance_mapped(index, left, now)
        } else {
            self.advance_remote(index, peer, engine, now)
        };
        moves.then_some(is_mapped)
    }

    fn advance_mapped(&mut self, index: usize, left: &mut usize, now: Nanos) -> bool {
        let layout = self.layout;
        let Some(read) = &mut self.reads[index] else { return false };
        let Some(view) = &read.view else { return false };
        if *left == 0 && matches!(read.stage, Stage::Line | Stage::Elements { .. }) {
            return false;
        }
        if read.stage == Stage::Line {
            // The copy begins at once: later the version would be an old one.
            let Some(version) = view.published() else {
                self.wake_by(now + RETRIED_AFTER);
                return false;
            };
            read.stage = Stage::Elements { version };
        }
        match read.stage {
            Stage::Elements { version } => {
                let Request { range, target, .. } = &read.request;
                let bytes = (range.len() - read.asked).min(*left);
                let from = range.start + read.asked;
                let into = match target {
                    Target::Registered(slice) => Address(slice.as_ptr()),
                    Target::Private(into) => *into,
                };
                view.copy(&layout, version, from..from + bytes, into.add(read.asked));
                read.asked += bytes;
                *left -= bytes;
                if read.asked == range.len() {
                    read.stage = Stage::Check { version };
                }
            }
            Stage::Check { version } => {
                let word = view.word(&layout, version);
                let is_good = view.is_whole(version) || read.request.is_torn;
                if is_good && view.is_shared() {
                    read.stage = Stage::Ended { version, word };
                } else if is_good {
                    // The owner has left, or the group is failing: an event says so.
                    return false;
                } else {
                    read.overwritten += 1;
                    read.enter(Stage::Line);
                }
            }
            Stage::Line | Stage::Ended { .. } => return false,
        }
        true
    }

    fn advance_remote(&mut self, index: usize, peer: &PeerMemory, engine: &mut Engine, now: Nanos) -> bool {
        let Some(read) = &self.reads[index] else { return false };
        match read.stage {
            Stage::Line | Stage::Check { .. } if read.under_way.is_empty() && read.has_word => {
                let mut line = VersionWords::default();
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut line);
                self.staged(index, 0, LINE_BYTES).load(bytes);
                self.take_line(index, &line);
                true
            }
            Stage::Line | Stage::Check { .. } => {
                !read.has_word && self.ask(index, peer, Piece::Line, engine, now)
            }
            Stage::Elements { version } if read.has_all() => {
                let word = self.staged_word(index);
                let Some(read) = &mut self.reads[index] else { return false };
                let is_over = read.request.is_torn;
                #[cfg(test)]
                let is_over = is_over || self.mutant == Some(ReadMutant::CheckedBeforeOnly);
                read.enter(if is_over { Stage::Ended { version, word } } else { Stage::Check { version } });
                #[cfg(test)]
                if self.mutant == Some(ReadMutant::CheckedTooEarly) {
                    // The line that came before the elements.
                    read.has_word = true;
                }
                true
            }
            Stage::Elements { .. } => self.ask_for_elements(index, peer, engine, now),
            Stage::Ended { .. } => false,
        }
    }

    /// A version line has come.
    fn take_line(&mut self, index: usize, line: &VersionWords) {
        let word = self.staged_word(index);
        let Some(read) = &mut self.reads[index] else { return };
        if let Stage::Check { version } = read.stage {
            let begun = unsealed(line, BEGUN);
            #[cfg(test)]
            let begun = match self.mutant {
                Some(ReadMutant::OneVersionTooOld) => begun.map(|begun| begun.saturating_sub(1).max(version)),
                _ => begun,
            };
            if begun.is_some_and(|begun| is_whole(version, begun)) {
                return read.enter(Stage::Ended { version, word });
            }
            read.overwritten += 1;
        }
        // Without a number the line changed while it was read: it is asked for again.
        read.enter(match unsealed(line, PUBLISHED) {
            Some(version) => Stage::Elements { version },
            None => Stage::Line,
        });
    }

    fn staged_word(&self, index: usize) -> Word {
        let mut words = [0; 6];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        self.staged(index, LINE_BYTES, LINE_BYTES).load(bytes);
        Word::of_payload(words)
    }

    /// Asks for the word, and for as many elements as there is room for.
    fn ask_for_elements(&mut self, index: usize, peer: &PeerMemory, engine: &mut Engine, now: Nanos) -> bool {
        let Some(read) = &self.reads[index] else { return false };
        if !read.has_word && !self.ask(index, peer, Piece::Word, engine, now) {
            return false;
        }
        let mut moved = false;
        while let Some(read) = &self.reads[index]
            && read.asked < read.request.range.len()
        {
            let left = read.request.range.len() - read.asked;
            let (chunk, bytes_max) = match read.request.target {
                Target::Registered(_) => (None, self.transfer_bytes_max.min(PIECE_BYTES_MAX) as usize),
                Target::Private(_) => match read.free_chunk() {
                    None => break,
                    chunk => (chunk, CHUNK_BYTES.min(self.transfer_bytes_max as usize)),
                },
            };
            let range = read.asked..read.asked + left.min(bytes_max);
            if !self.ask(index, peer, Piece::Elements { range, chunk }, engine, now) {
                break;
            }
            moved = true;
        }
        moved
    }

    /// Starts a get. False: not now.
    fn ask(
        &mut self,
        index: usize,
        peer: &PeerMemory,
        piece: Piece,
        engine: &mut Engine,
        now: Nanos,
    ) -> bool {
        let Some(read) = &self.reads[index] else { return false };
        let Request { peer: rank, range, target, .. } = &read.request;
        let (from, dst) = match (&piece, read.stage) {
            (Piece::Line, _) => (0..LINE_BYTES, self.staged(index, 0, LINE_BYTES)),
            (Piece::Word, Stage::Elements { version }) => {
                (self.layout.word(version), self.staged(index, LINE_BYTES, LINE_BYTES))
            }
            (Piece::Elements { range: part, chunk }, Stage::Elements { version }) => {
                let dst = match (target, chunk) {
                    (Target::Registered(slice), _) => {
                        slice.slice(part.clone()).expect("inside of the target")
                    }
                    (Target::Private(_), chunk) => {
                        let chunk = chunk.expect("what is staged has a chunk");
                        self.staged(index, 2 * LINE_BYTES + chunk * CHUNK_BYTES, part.len())
                    }
                };
                (self.layout.data(version, range.start + part.start..range.start + part.end), dst)
            }
            _ => unreachable!("word and elements are those of a version"),
        };
        let src = peer.published.slice(from.start as u64..from.end as u64);
        let Ok(src) = src else { unreachable!("a peer's memory was found to be long enough") };
        let number = self.transfers << 1;
        if !engine.submit(*rank, Transfer::Get { src, dst }, number, now) {
            self.wake_by(now + RETRIED_AFTER);
            return false;
        }
        self.transfers += 1;
        if let Some(read) = &mut self.reads[index] {
            match &piece {
                Piece::Line | Piece::Word => read.has_word = true,
                Piece::Elements { range, .. } => read.asked = range.end,
            }
            read.under_way.push((number, piece));
        }
        true
    }
}
