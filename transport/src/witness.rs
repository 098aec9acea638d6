//! The word of a process that outlives it, and who reads it.
//!
//! A process that is to be outlived by what it knew writes that to its [`LastWord`], a file in
//! memory without a name. Other processes of its host open the file while the process lives
//! ([`Witness::open`]). When the kernel says that the process has ended, they read what it wrote
//! last. Who starts a process may have made the file for it ([`WordFile`]), and reads it then.
//!
//! **Invariants:** a word is read whole, or the one before it is: the file has two places, and the
//! place of the newest word is never written to. A word is given out only after the kernel has said
//! that the process has ended ([`Witness::last_word`]), or nobody holds the lock of the file
//! ([`WordFile::last_word`]), so nothing is written afterwards. A file has one writer at a time,
//! which holds its lock. A process with the number of an ended one is not taken for it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, MemfdFlags, OFlags, flock, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use sha2::{Digest, Sha256};

use crate::control::host_identity;
use crate::mutex::lock;
use crate::wire::{Malformed, Reader, Writer};

/// Longest word, in bytes.
pub const WORD_BYTES_MAX: usize = 1 << 20;

/// The name of the file. People see it at a process, and a file of another name is no word.
const NAME: &str = "pleach-last-word";

/// Bytes before a word: its number, from 1, and its length.
const HEADER_BYTES: usize = 16;
/// From the beginning of one place to the next. Only what is written takes memory.
const PLACE_BYTES: u64 = (HEADER_BYTES + WORD_BYTES_MAX) as u64;

/// This process's own word.
#[derive(Debug)]
pub struct LastWord {
    file: File,
    /// How many words were written.
    written: Mutex<u64>,
}

impl LastWord {
    /// No word yet.
    ///
    /// # Errors
    ///
    /// The system has no room for another file in memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self { file: unnamed()?, written: Mutex::new(0) })
    }

    /// As [`LastWord::new`], in the file that was made for this process ([`WordFile::path`]), if
    /// there is one, and no other process writes to it.
    ///
    /// # Errors
    ///
    /// The system has no room for another file in memory.
    pub fn at(path: Option<&Path>) -> io::Result<Self> {
        let Some(path) = path else { return Self::new() };
        Self::given(path).or_else(|error| {
            // A program that this one started has the variables of this one.
            tracing::info!("the file {} for the last word is not taken: {error}", path.display());
            Self::new()
        })
    }

    fn given(path: &Path) -> io::Result<Self> {
        let file = open(path, true)?;
        // Behind the end of the launcher the path may be that of any file of another process.
        let named = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        if !named.as_os_str().as_encoded_bytes().starts_with(format!("/memfd:{NAME}").as_bytes()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let written = newest(&file)?.map_or(0, |(number, _)| number);
        Ok(Self { file, written: Mutex::new(written) })
    }

    /// Replaces the word. It outlives this process from the return on.
    ///
    /// # Errors
    ///
    /// More than [`WORD_BYTES_MAX`] bytes, or the system refused; the word before it still stands.
    pub fn write(&self, word: &[u8]) -> io::Result<()> {
        if word.len() > WORD_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut written = lock(&self.written);
        let number = *written + 1;
        let place = number % 2 * PLACE_BYTES;
        self.file.write_all_at(word, place + HEADER_BYTES as u64)?;
        // One write inside of a page: a process that is killed has made it or has not.
        let header: [u8; HEADER_BYTES] = Writer::default().u64(number).u64(word.len() as u64).to_array();
        self.file.write_all_at(&header, place)?;
        *written = number;
        Ok(())
    }

    /// Where other processes of this host find it; `None` where they cannot know this process.
    #[must_use]
    pub fn place(&self) -> Option<WordPlace> {
        self.place_on(None)
    }

    /// As [`LastWord::place`], on a host of this name (`PLEACH_HOST`): processes of a host with
    /// another name are no witnesses.
    #[must_use]
    pub fn place_on(&self, name: Option<&str>) -> Option<WordPlace> {
        let process = std::process::id();
        let file = u32::try_from(self.file.as_raw_fd()).ok()?;
        let host = host_identity();
        let is_known = host != [0; 16];
        let host = named(host, name);
        is_known.then_some(WordPlace { host, process, started: started(process)?, file })
    }
}

/// The file of the word of a process, made by who starts it.
#[derive(Debug)]
pub struct WordFile(File);

impl WordFile {
    /// Without a word.
    ///
    /// # Errors
    ///
    /// The system has no room for another file in memory.
    pub fn new() -> io::Result<Self> {
        unnamed().map(Self)
    }

    /// Where processes of this user find it, as long as this process has it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// What was written last, if anything; nothing is written any more.
    ///
    /// # Errors
    ///
    /// A process that writes to it has not ended ([`io::ErrorKind::WouldBlock`]), or what was
    /// written is no word.
    pub fn last_word(&self) -> io::Result<Option<Vec<u8>>> {
        // The kernel gives the lock up with the files of a process, when none of its threads is
        // left.
        flock(&self.0, FlockOperation::NonBlockingLockExclusive)?;
        Ok(newest(&self.0)?.map(|(_, word)| word))
    }
}

fn unnamed() -> io::Result<File> {
    Ok(File::from(memfd_create(NAME, MemfdFlags::CLOEXEC)?))
}

/// Opens a file that another process has made. Whatever that has named, to open it must not wait.
fn open(path: &Path, writes: bool) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = File::options().read(true).write(writes).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// The newest word of a file, with its number.
fn newest(file: &File) -> io::Result<Option<(u64, Vec<u8>)>> {
    let mut newest: Option<(u64, u64, u64)> = None;
    for place in [0, PLACE_BYTES] {
        let mut header = [0; HEADER_BYTES];
        if file.read_exact_at(&mut header, place).is_err() {
            continue; // The file ends before it.
        }
        let mut reader = Reader::new(&header);
        let (Ok(number), Ok(bytes)) = (reader.u64(), reader.u64()) else { continue };
        if number > newest.map_or(0, |(number, ..)| number) {
            newest = Some((number, bytes, place + HEADER_BYTES as u64));
        }
    }
    let Some((number, bytes, from)) = newest else { return Ok(None) };
    let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= WORD_BYTES_MAX);
    let mut word = vec![0; bytes.ok_or(io::ErrorKind::InvalidData)?];
    file.read_exact_at(&mut word, from)?;
    Ok(Some((number, word)))
}

/// The identity of a host that goes by a name of its own.
fn named(host: [u8; 16], name: Option<&str>) -> [u8; 16] {
    let Some(name) = name else { return host };
    let digest = Sha256::new().chain_update(host).chain_update(name.as_bytes()).finalize();
    std::array::from_fn(|at| digest[at])
}

/// Where the word of a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordPlace {
    /// The host and its numbers of processes.
    host: [u8; 16],
    process: u32,
    /// When the process was started, in ticks since the host was.
    started: u64,
    /// The number of the file there.
    file: u32,
}

impl WordPlace {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Self { host, process, started, file } = self;
        Writer::default().raw(host).u32(*process).u64(*started).u32(*file).finish()
    }

    /// The place of these bytes.
    ///
    /// # Errors
    ///
    /// When the bytes are none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (host, process) = (reader.array()?, reader.u32()?);
        let (started, file) = (reader.u64()?, reader.u32()?);
        reader.end()?;
        Ok(Self { host, process, started, file })
    }
}

/// Who sees that another process of this host has ended.
#[derive(Debug)]
pub struct Witness {
    process: OwnedFd,
    word: File,
}

impl Witness {
    /// Opens process and word; `None`: the process is on another host, has ended, or may not be
    /// looked at, and nobody here can say that it has ended.
    #[must_use]
    pub fn open(place: &WordPlace) -> Option<Self> {
        Self::open_on(place, None)
    }

    /// As [`Witness::open`], by a process on a host of this name.
    #[must_use]
    pub fn open_on(place: &WordPlace, name: Option<&str>) -> Option<Self> {
        if place.host != named(host_identity(), name) {
            return None;
        }
        let number = Pid::from_raw(i32::try_from(place.process).ok()?)?;
        let process = pidfd_open(number, PidfdFlags::empty()).ok()?;
        // The descriptor names one process for good. It is the right one if it was started then.
        if started(place.process) != Some(place.started) {
            return None;
        }
        let path = format!("/proc/{}/fd/{}", place.process, place.file);
        let word = open(path.as_ref(), false).ok()?;
        let witness = Self { process, word };
        // Between the two looks the number could have come to be another process's.
        (!witness.has_ended()).then_some(witness)
    }

    /// Whether the process has ended, by the kernel's word.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut process = [PollFd::from_borrowed_fd(self.process.as_fd(), PollFlags::IN)];
        poll(&mut process, Some(&Timespec::default())) == Ok(1)
            && process[0].revents().contains(PollFlags::IN)
    }

    /// What the process has written last, if anything.
    ///
    /// # Errors
    ///
    /// The process has not ended ([`io::ErrorKind::WouldBlock`]), or the file is no word of one.
    pub fn last_word(&self) -> io::Result<Option<Vec<u8>>> {
        if !self.has_ended() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(newest(&self.word)?.map(|(_, word)| word))
    }
}

/// When a process was started, by the 22nd field of its line.
fn started(process: u32) -> Option<u64> {
    let line = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name stands in parentheses and may hold anything.
    let (_, fields) = line.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_the_wire_and_cut_ones_are_refused() {
        let place = LastWord::new().expect("there is memory").place().expect("the host is known");
        let bytes = place.encode();
        assert_eq!(WordPlace::decode(&bytes), Ok(place));
        for end in 0..bytes.len() {
            assert_eq!(WordPlace::decode(&bytes[..end]), Err(Malformed));
        }
    }

    #[test]
    fn a_word_is_not_given_out_while_its_process_lives() {
        let word = LastWord::new().expect("there is memory");
        word.write(b"alive").expect("there is room");
        let witness = Witness::open(&word.place().expect("the host is known")).expect("this process lives");
        assert!(!witness.has_ended());
        assert_eq!(witness.last_word().expect_err("it lives").kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn another_process_with_the_number_is_not_taken_for_it() {
        let place = LastWord::new().expect("there is memory").place().expect("the host is known");
        assert!(Witness::open(&WordPlace { started: place.started + 1, ..place }).is_none());
        assert!(Witness::open(&WordPlace { host: [7; 16], ..place }).is_none());
    }

    #[test]
    fn a_process_on_a_host_of_another_name_is_no_witness() {
        let word = LastWord::new().expect("there is memory");
        let place = word.place_on(Some("rack-1")).expect("the host is known");
        assert!(Witness::open_on(&place, Some("rack-1")).is_some());
        assert!(Witness::open_on(&place, Some("rack-2")).is_none());
        assert!(Witness::open(&place).is_none());
    }

    #[test]
    fn a_file_that_was_made_for_a_process_has_one_writer_and_is_read_behind_it() {
        let file = WordFile::new().expect("there is memory");
        assert_eq!(file.last_word().expect("nobody writes"), None);
        let file = WordFile::new().expect("there is memory");
        let (path, word) = (file.path(), LastWord::at(Some(&file.path())).expect("it is there"));
        word.write(b"first").expect("there is room");
        let other = LastWord::at(Some(&path)).expect("there is memory");
        other.write(b"of a program that it started").expect("there is room");
        assert_eq!(file.last_word().expect_err("it is written to").kind(), io::ErrorKind::WouldBlock);
        // A second one in turn goes on where the first one was.
        drop((word, other));
        let word = LastWord::at(Some(&path)).expect("it is there");
        word.write(b"second").expect("there is room");
        drop(word);
        assert_eq!(file.last_word().expect("nobody writes").as_deref(), Some(&b"second"[..]));
        // It is over.
        let late = LastWord::at(Some(&path)).expect("there is memory");
        late.write(b"late").expect("there is room");
        assert_eq!(file.last_word().expect("nobody writes").as_deref(), Some(&b"second"[..]));
    }

    #[test]
    fn a_place_that_is_no_file_is_passed_over() {
        let other = std::env::temp_dir().join(format!("pleach-no-word-{}", std::process::id()));
        std::fs::write(&other, "of another program").expect("there is room");
        for path in ["/proc/self/fd/123456", "/dev/null", "/", other.to_str().expect("is text")] {
            LastWord::at(Some(path.as_ref()))
                .expect("there is memory")
                .write(b"word")
                .expect("there is room");
        }
        assert_eq!(std::fs::read_to_string(&other).expect("it is there"), "of another program");
        std::fs::remove_file(other).expect("its own");
    }

    #[test]
    fn too_long_a_word_is_refused_and_the_one_before_it_stands() {
        let word = LastWord::new().expect("there is memory");
        word.write(b"short").expect("there is room");
        let long = vec![0; WORD_BYTES_MAX + 1];
        assert_eq!(word.write(&long).expect_err("too long").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(*lock(&word.written), 1);
    }
}
