//! Sparse copies of a table: of the share that a peer has published, a rank reads the rows that
//! have changed since it read that share last.
//!
//! An owner of rows publishes, behind its share, a *stamp* for each row: the number of the
//! publication that has changed the row last. A reader keeps each share as it has read it, with its
//! stamps. It reads the new stamps, and then the rows whose stamps differ. A read of a window takes
//! three round trips, so rows that are less than [`GAP_BYTES`] apart are read together.
//!
//! A publication between two of these reads would mix two versions. Then the rows are read again,
//! and after [`TRIES`] the whole share, at once.
//!
//! **Invariant:** a copy that was renewed has the bits of one published version.

use std::ops::Range;

/// Most bytes between two rows that are read together: they take less time than one more read.
const GAP_BYTES: usize = 1 << 10;

/// How often rows are read until the share is read as a whole.
const TRIES: usize = 2;

/// Stamps travel as elements, by their bits. No row is stamped with this one.
const UNKNOWN: f32 = 0.0;

/// Which publication of this rank has changed each row of its share last.
#[derive(Debug, Default)]
pub(crate) struct Stamps {
    /// The share as it was published last.
    published: Vec<f32>,
    stamps: Vec<f32>,
    publications: u32,
}

impl Stamps {
    /// The stamps of a share of rows of so many elements, which is published now.
    pub(crate) fn publish(&mut self, share: &[f32], row: usize) -> &[f32] {
        self.publications = self.publications.checked_add(1).unwrap_or(1);
        let stamp = f32::from_bits(self.publications);
        if self.published.len() != share.len() {
            share.clone_into(&mut self.published);
            self.stamps.clear();
            self.stamps.resize(share.len() / row, stamp);
            return &self.stamps;
        }
        let rows = self.published.chunks_exact_mut(row).zip(share.chunks_exact(row));
        for ((published, row), place) in rows.zip(&mut self.stamps) {
            if published.iter().zip(row).any(|(one, other)| one.to_bits() != other.to_bits()) {
                published.copy_from_slice(row);
                *place = stamp;
            }
        }
        &self.stamps
    }
}

/// The elements to be read of rows of so many elements, of which these stamps are known and these
/// were found.
pub(crate) fn changed<'a>(
    known: &'a [f32],
    found: &'a [f32],
    row: usize,
) -> impl Iterator<Item = Range<usize>> + 'a {
    let gap = GAP_BYTES / size_of::<f32>() / row;
    let differs = move |place: &usize| known[*place].to_bits() != found[*place].to_bits();
    let mut rows = (0..known.len().min(found.len())).filter(differs).peekable();
    std::iter::from_fn(move || {
        let begin = rows.next()?;
        let mut end = begin + 1;
        while let Some(next) = rows.next_if(|next| next - end <= gap) {
            end = next + 1;
        }
        Some(begin * row..end * row)
    })
}

/// A share of a peer, as it was read last.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerCopy {
    /// The elements, and behind them the stamps; nothing before the first read.
    memory: Vec<f32>,
    /// The stamps that were found, and the elements to be read.
    found: Vec<f32>,
    changed: Vec<Range<usize>>,
}

impl PeerCopy {
    /// Reads a share of so many elements, in rows of `row`, into this copy. `read` stores elements
    /// that the peer has published, and returns their version and its word. Returns those of the
    /// copy.
    pub(crate) fn renew<W, E>(
        &mut self,
        len: usize,
        row: usize,
        mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<(u64, W), E>,
    ) -> Result<(u64, W), E> {
        let all = len + len / row;
        if self.memory.len() == all {
            for _ in 0..TRIES {
                if let Some(renewed) = self.renew_rows(len, row, &mut read)? {
                    return Ok(renewed);
                }
            }
        }
        let mut memory = std::mem::take(&mut self.memory);
        memory.clear();
        memory.resize(all, UNKNOWN);
        let renewed = read(0..all, &mut memory)?;
        self.memory = memory;
        Ok(renewed)
    }

    /// The elements of the share, once they were read.
    pub(crate) fn elements(&self, len: usize) -> &[f32] {
        &self.memory[..len]
    }

    /// Reads the rows that have changed; returns nothing if they are not of one version.
    fn renew_rows<W, E>(
        &mut self,
        len: usize,
        row: usize,
        read: &mut impl FnMut(Range<usize>, &mut [f32]) -> Result<(u64, W), E>,
    ) -> Result<Option<(u64, W)>, E> {
        let (elements, known) = self.memory.split_at_mut(len);
        self.found.resize(known.len(), UNKNOWN);
        let (version, word) = read(len..len + known.len(), &mut self.found)?;
        self.changed.clear();
        self.changed.extend(changed(known, &self.found, row));
        for run in &self.changed {
            // Until all rows of the version are here, these are of none.
            known[run.start / row..run.end / row].fill(UNKNOWN);
            let (of_rows, _) = read(run.clone(), &mut elements[run.clone()])?;
            if of_rows != version {
                return Ok(None);
            }
        }
        known.copy_from_slice(&self.found);
        Ok(Some((version, word)))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use pleach_vocabulary::random::Random;

    use super::*;

    const ROW: usize = 3;
    const ROWS: usize = 7;
    const LEN: usize = ROW * ROWS;

    /// What an owner has published, all versions of it.
    #[derive(Default)]
    struct Owner {
        stamps: Stamps,
        versions: Vec<Vec<f32>>,
    }

    impl Owner {
        fn publish(&mut self, share: &[f32]) {
            let stamps = self.stamps.publish(share, ROW);
            self.versions.push([share, stamps].concat());
        }

        /// Changes rows of what it published last, and publishes that.
        fn change(&mut self, rows: &[usize]) {
            let mut share = self.versions.last().expect("has published")[..LEN].to_vec();
            rows.iter().for_each(|row| share[row * ROW + 1] += 1.0);
            self.publish(&share);
        }

        fn newest(&self) -> u64 {
            self.versions.len() as u64
        }
    }

    #[test]
    fn a_copy_has_the_bits_of_one_version_whatever_is_published_meanwhile() {
        for seed in 0..200 {
            let (mut random, mut owner, mut copy) =
                (Random::new(seed), Owner::default(), PeerCopy::default());
            owner.publish(&[1.0; LEN]);
            for _ in 0..12 {
                let busy = random.index(3) == 0;
                let drawn = |random: &mut Random| -> Vec<usize> {
                    (0..random.index(4)).map(|_| random.index(ROWS)).collect()
                };
                owner.change(&drawn(&mut random));
                let before = owner.newest();
                let renewed = copy.renew(LEN, ROW, |range, into| {
                    let newest = owner.versions.last().expect("has published");
                    into.copy_from_slice(&newest[range]);
                    let version = owner.newest();
                    if busy {
                        owner.change(&drawn(&mut random));
                    }
                    Ok::<_, Infallible>((version, ()))
                });
                let Ok((version, ())) = renewed;
                assert!(version >= before && version <= owner.newest());
                let expected = &owner.versions[version as usize - 1];
                assert_eq!(copy.elements(LEN), &expected[..LEN], "seed {seed}, version {version}");
            }
        }
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "one range was read")]
    fn rows_that_have_not_changed_are_not_read() {
        const ROW: usize = 400;
        let (mut stamps, mut copy) = (Stamps::default(), PeerCopy::default());
        let mut share = vec![0.5; 5 * ROW];
        let mut read_ranges = |share: &[f32]| {
            let published = [share, stamps.publish(share, ROW)].concat();
            let mut ranges = Vec::new();
            let renewed = copy.renew(share.len(), ROW, |range, into| {
                into.copy_from_slice(&published[range.clone()]);
                ranges.push(range);
                Ok::<_, Infallible>((1, ()))
            });
            assert_eq!(renewed, Ok((1, ())));
            let bits =
                |elements: &[f32]| elements.iter().map(|element| element.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(copy.elements(share.len())), bits(share));
            ranges
        };
        assert_eq!(read_ranges(&share), [0..5 * ROW + 5], "all of it at first");
        assert_eq!(read_ranges(&share), [5 * ROW..5 * ROW + 5], "its stamps alone");
        // A sign of 0 is a change.
        share[0] = -0.0;
        share[2 * ROW] = f32::NAN;
        share[3 * ROW] = 7.0;
        assert_eq!(read_ranges(&share), [5 * ROW..5 * ROW + 5, 0..ROW, 2 * ROW..4 * ROW]);
        assert_eq!(read_ranges(&share), [5 * ROW..5 * ROW + 5], "not a number stays what it is");
    }

    #[test]
    fn rows_with_few_bytes_between_them_are_read_together() {
        let (known, mut found) = ([UNKNOWN; 1000], [UNKNOWN; 1000]);
        [3, 3 + 1 + GAP_BYTES / 8, 900].iter().for_each(|row| found[*row] = 1.0);
        let runs: Vec<_> = changed(&known, &found, 2).collect();
        assert_eq!(runs, [6..2 * (5 + GAP_BYTES / 8), 1800..1802]);
    }
}
