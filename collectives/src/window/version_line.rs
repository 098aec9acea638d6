//! The version line: the two numbers by which a reader finds out whether what it has read is one
//! version.
//!
//! **Invariant:** a thread that has read a byte of version `v`, and then finds with
//! [`VersionLine::is_whole`] that an older version is whole, has read no byte of `v` in the place
//! of one of that version.

use pleach_vocabulary::digest::mixed;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Its words as a transfer brings them: the numbers, each followed by its hash.
pub(crate) type VersionWords = [u64; 4];

/// Where the number of the version stands of which a byte may be written.
pub(crate) const BEGUN: usize = 0;
/// Where the number of the newest version stands that is whole.
pub(crate) const PUBLISHED: usize = 2;

/// A number with its hash, by which a mixture of two numbers is found.
fn sealed(number: u64) -> [u64; 2] {
    [number, mixed(number)]
}

/// One of the numbers of a version line. `None`: it was read while it changed.
pub(crate) fn unsealed(words: &VersionWords, at: usize) -> Option<u64> {
    let number = words[at];
    (sealed(number) == [number, words[at + 1]]).then_some(number)
}

/// Whether what was read of a version is of that version, if `begun` was read afterwards: a version
/// is overwritten by the second one after it.
pub(crate) fn is_whole(version: u64, begun: u64) -> bool {
    begun.checked_sub(version).is_some_and(|newer| newer <= 1)
}

/// The line in the memory of its owner, or mapped. Zeros are version 0.
#[repr(C, align(64))]
pub(crate) struct VersionLine {
    words: [AtomicU64; 4],
}

impl VersionLine {
    fn store(&self, at: usize, number: u64, ordering: Ordering) {
        let [number, hash] = sealed(number);
        self.words[at + 1].store(hash, Ordering::Relaxed);
        self.words[at].store(number, ordering);
    }

    /// The owner writes bytes of this version from now on.
    pub(crate) fn begin(&self, version: u64) {
        self.store(BEGUN, version, Ordering::Relaxed);
        // Pairs with the acquire fence in `is_whole`: bytes of this version are written after its
        // number.
        fence(Ordering::Release);
    }

    /// The owner has written all bytes of this version.
    pub(crate) fn publish(&self, version: u64) {
        // Release: pairs with the acquire fence in `load`.
        self.store(PUBLISHED, version, Ordering::Release);
    }

    fn load(&self, at: usize) -> Option<u64> {
        let mut words = VersionWords::default();
        // Relaxed: the line may lie in pages that are read-only here, which other loads may not
        // read.
        words[at] = self.words[at].load(Ordering::Relaxed);
        // Pairs with the release in `publish`: bytes that are read from now on are of this version
        // or a newer one.
        fence(Ordering::Acquire);
        words[at + 1] = self.words[at + 1].load(Ordering::Relaxed);
        unsealed(&words, at)
    }

    /// The newest version that is whole. `None`: the number changes just now.
    pub(crate) fn published(&self) -> Option<u64> {
        self.load(PUBLISHED)
    }

    /// Whether all that this thread has read of a version is of that version.
    pub(crate) fn is_whole(&self, version: u64) -> bool {
        // Pairs with the release fence in `begin`: whoever has read a byte of a newer version reads
        // its number, or the number of one after it.
        fence(Ordering::Acquire);
        self.load(BEGUN).is_some_and(|begun| is_whole(version, begun))
    }

    #[cfg(loom)]
    fn new() -> Self {
        Self { words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_of_two_numbers_is_found_and_a_whole_one_is_read() {
        for version in [0, 1, 254, 255, 256, 511, 65_535, u64::from(u32::MAX), u64::MAX - 1] {
            let pair = [version, version + 1];
            let bytes = pair.map(|version| -> [u8; 16] { bytemuck::cast(sealed(version)) });
            // Every mixture of the two states in their bytes.
            for mixture in 0..1u32 << 16 {
                let mixed: [u8; 16] =
                    std::array::from_fn(|index| bytes[(mixture >> index & 1) as usize][index]);
                let [number, hash]: [u64; 2] = bytemuck::cast(mixed);
                let read = unsealed(&[number, hash, 0, 0], BEGUN);
                assert!(read.is_none_or(|read| pair.contains(&read)), "{pair:?} as {read:?}");
                assert_eq!(read.is_some(), bytes.contains(&mixed), "{pair:?}, {mixture:#x}");
            }
        }
    }

    #[test]
    fn a_version_is_overwritten_by_the_second_one_after_it() {
        let seen = [(5, 4), (5, 5), (5, 6), (5, 7), (u64::MAX, u64::MAX), (0, u64::MAX)];
        let whole = seen.map(|(version, begun)| is_whole(version, begun));
        assert_eq!(whole, [false, true, true, false, true, false]);
    }
}

/// All interleavings: `RUSTFLAGS="--cfg loom" cargo test -p pleach-collectives --lib --release
/// loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Elements of a copy.
    const LEN: usize = 2;

    struct Published {
        line: VersionLine,
        copies: [[AtomicU64; LEN]; 2],
    }

    impl Published {
        fn write(&self, version: u64) {
            self.line.begin(version);
            // Bytes have no order among themselves.
            for element in &self.copies[(version % 2) as usize] {
                element.store(version, Ordering::Relaxed);
            }
            self.line.publish(version);
        }

        /// One try.
        fn read(&self) -> Option<u64> {
            let version = self.line.published()?;
            let copy = &self.copies[(version % 2) as usize];
            let elements = [&copy[0], &copy[1]].map(|element| element.load(Ordering::Relaxed));
            if !self.line.is_whole(version) {
                return None;
            }
            assert_eq!(elements, [version; LEN], "one version");
            Some(version)
        }
    }

    #[test]
    fn loom_a_read_that_finds_its_version_whole_holds_it() {
        loom::model(|| {
            let copies = || [AtomicU64::new(0), AtomicU64::new(0)];
            let published = Arc::new(Published { line: VersionLine::new(), copies: [copies(), copies()] });
            let owner = thread::spawn({
                let published = published.clone();
                move || (1..=2).for_each(|version| published.write(version))
            });
            let seen = published.read();
            assert!(seen.is_none_or(|version| version <= 2));
            owner.join().expect("only writes");
            assert_eq!(published.read(), Some(2), "the last version stays");
        });
    }
}
