//! Kernel rows that are kept, and the samples that belong to them.
//!
//! **Invariant:** all ranks hold the rows of the same samples, since they ask for the same rows in
//! the same order and have room for as many. So a rank knows without a message whether the others
//! need a sample from its owner.

use super::samples::{Row, Samples};

/// No row of this sample is kept.
const ABSENT: u32 = u32::MAX;

/// Two rows are in use at a time.
const ROWS_MIN: usize = 2;

/// The rows of samples, by their number among the samples of all ranks.
#[derive(Debug)]
pub(crate) struct RowCache {
    /// The place of each sample's row.
    places: Vec<u32>,
    entries: Vec<Entry>,
    rows_max: usize,
    /// Whether a row is used more than once.
    keeps: bool,
    /// Counts uses.
    now: u64,
}

/// A row with its sample.
#[derive(Debug)]
pub(crate) struct Entry {
    number: u32,
    last_use: u64,
    /// Whether the row was made for some of the samples only.
    is_partial: bool,
    sample: Samples,
    /// The kernel values with this rank's samples.
    pub(crate) row: Vec<f32>,
}

impl RowCache {
    /// How many rows of so many values take at most these bytes.
    pub(crate) fn rows_in(bytes: usize, values: usize) -> u64 {
        (bytes / size_of::<f32>() / values.max(1)) as u64
    }

    /// For so many samples of all ranks, with at most `rows_max` rows.
    pub(crate) fn new(samples: usize, rows_max: u64) -> Self {
        let keeps = rows_max > 0;
        let rows_max = usize::try_from(rows_max).unwrap_or(usize::MAX).clamp(ROWS_MIN, samples.max(ROWS_MIN));
        Self { places: vec![ABSENT; samples], entries: Vec::new(), rows_max, keeps, now: 0 }
    }

    /// Where the row of a sample is, if it is kept.
    pub(crate) fn find(&mut self, number: u32) -> Option<usize> {
        let place = self.places[number as usize];
        if !self.keeps || place == ABSENT {
            return None;
        }
        self.now += 1;
        self.entries[place as usize].last_use = self.now;
        Some(place as usize)
    }

    /// A place for the row of a sample, in the place of the row that was not used for the longest
    /// time. The row used last stays. The values of the place are those of another row.
    pub(crate) fn place_for(&mut self, number: u32, values: usize, is_partial: bool) -> usize {
        self.now += 1;
        let place = if self.entries.len() < self.rows_max {
            self.entries.push(Entry {
                number,
                last_use: 0,
                is_partial,
                sample: Samples::new(0),
                row: vec![0.0; values],
            });
            self.entries.len() - 1
        } else {
            let oldest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.last_use);
            oldest.expect("there are at least two").0
        };
        let entry = &mut self.entries[place];
        if self.places[entry.number as usize] == place as u32 {
            self.places[entry.number as usize] = ABSENT;
        }
        (entry.number, entry.last_use, entry.is_partial) = (number, self.now, is_partial);
        self.places[number as usize] = place as u32;
        place
    }

    /// The entry of a place.
    pub(crate) fn entry(&mut self, place: usize) -> &mut Entry {
        &mut self.entries[place]
    }

    /// The rows of two places.
    pub(crate) fn rows(&self, up: usize, low: usize) -> (&[f32], &[f32]) {
        (&self.entries[up].row, &self.entries[low].row)
    }

    /// Forgets the rows that were made for some samples only, as the others are needed again.
    pub(crate) fn forget_partial(&mut self) {
        for (place, entry) in self.entries.iter_mut().enumerate() {
            if entry.is_partial {
                entry.last_use = 0;
                if self.places[entry.number as usize] == place as u32 {
                    self.places[entry.number as usize] = ABSENT;
                }
            }
        }
    }
}

impl Entry {
    /// Takes the sample that another rank sent. `None` when the words are no sample.
    pub(crate) fn take_sample(&mut self, words: &[u32], features: u32) -> Option<()> {
        let mut sample = Samples::new(features);
        sample.push_words(words)?;
        self.sample = sample;
        Some(())
    }

    pub(crate) fn sample(&self) -> Row<'_> {
        self.sample.row(0)
    }

    /// The sample and the row.
    pub(crate) fn parts(&mut self) -> (&Samples, &mut [f32]) {
        (&self.sample, &mut self.row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_unused_for_the_longest_time_makes_room() {
        let mut cache = RowCache::new(10, 3);
        for number in [4, 7, 9] {
            assert_eq!(cache.find(number), None);
            let place = cache.place_for(number, 2, false);
            cache.entry(place).row.fill(number as f32);
        }
        let seven = cache.find(7).expect("is kept");
        let four = cache.find(4).expect("is kept");
        let one = cache.place_for(1, 2, false);
        assert!(one != seven && one != four);
        assert_eq!(cache.find(9), None);
        assert_eq!((cache.find(7), cache.find(1)), (Some(seven), Some(one)));
        assert_eq!(cache.rows(seven, four), (&[7.0, 7.0][..], &[4.0, 4.0][..]));
    }

    #[test]
    fn without_room_two_places_serve_in_turn_and_nothing_is_found() {
        let mut cache = RowCache::new(10, 0);
        let first = cache.place_for(4, 1, false);
        let second = cache.place_for(5, 1, false);
        assert_ne!(first, second);
        assert_eq!((cache.find(4), cache.find(5)), (None, None));
        assert_eq!(cache.place_for(4, 1, false), first);
        assert_eq!(cache.place_for(4, 1, false), second);
    }

    #[test]
    fn partial_rows_are_forgotten() {
        let mut cache = RowCache::new(10, 4);
        cache.place_for(1, 1, false);
        cache.place_for(2, 1, true);
        cache.forget_partial();
        assert!(cache.find(1).is_some() && cache.find(2).is_none());
        cache.place_for(2, 1, false);
        assert!(cache.find(2).is_some());
    }
}
