//! Kernel rows that are kept, and the samples that belong to them.
//!
//! **Invariant:** all ranks hold the rows of the same samples, since they ask for the same rows in
//! the same order and have room for as many. So a rank knows without a message whether the others
//! need a sample from its owner.
//!
//! A row may lack the values with samples that did not take part when it was made. It knows which,
//! so that they are made when they are wanted, and none is made twice.

use super::samples::{Row, Samples};

/// No row of this sample is kept.
const ABSENT: u32 = u32::MAX;

/// Two rows are in use at a time.
const ROWS_MIN: usize = 2;

/// Values of a row that a word tells of.
const WORD_BITS: usize = u64::BITS as usize;

/// The rows of samples, by their number among the samples of all ranks.
#[derive(Debug)]
pub(crate) struct RowCache {
    /// The place of each sample's row.
    places: Vec<u32>,
    entries: Vec<Entry>,
    rows_max: usize,
    /// Whether a row is used more than once.
    keeps: bool,
    /// Whether no row has yet made room for another.
    keeps_all: bool,
    /// Counts uses.
    now: u64,
}

/// A row with its sample.
#[derive(Debug)]
pub(crate) struct Entry {
    number: u32,
    last_use: u64,
    sample: Samples,
    /// The kernel values with this rank's samples.
    pub(crate) row: Vec<f32>,
    /// Which of them were made, a bit each. The others are what another row has left.
    made: Vec<u64>,
    /// How many were made.
    made_count: usize,
    /// What [`Entry::is_complete_for`] compares.
    complete_for: Option<u64>,
}

impl RowCache {
    /// How many rows of so many values take at most these bytes.
    pub(crate) fn rows_in(bytes: usize, values: usize) -> u64 {
        let row_bytes = values * size_of::<f32>() + values.div_ceil(WORD_BITS) * size_of::<u64>();
        (bytes / row_bytes.max(1)) as u64
    }

    /// For so many samples of all ranks, with at most `rows_max` rows.
    pub(crate) fn new(samples: usize, rows_max: u64) -> Self {
        let keeps = rows_max > 0;
        let rows_max = usize::try_from(rows_max).unwrap_or(usize::MAX).clamp(ROWS_MIN, samples.max(ROWS_MIN));
        Self { places: vec![ABSENT; samples], entries: Vec::new(), rows_max, keeps, now: 0, keeps_all: keeps }
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

    /// The places of the rows that are kept, with the numbers of their samples.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        let numbers = self.entries.iter().map(|entry| entry.number).enumerate();
        numbers.filter(|(place, number)| self.keeps && self.places[*number as usize] == *place as u32)
    }

    /// Whether the row of a sample is kept.
    pub(crate) fn has(&self, number: u32) -> bool {
        self.keeps && self.places[number as usize] != ABSENT
    }

    /// Whether all rows that were made so far are kept.
    pub(crate) fn keeps_all(&self) -> bool {
        self.keeps_all
    }

    /// A place for the row of a sample, in the place of the row that was not used for the longest
    /// time. The row used last stays. No value of the row was made.
    pub(crate) fn place_for(&mut self, number: u32, values: usize) -> usize {
        self.now += 1;
        let place = if self.entries.len() < self.rows_max {
            self.entries.push(Entry {
                number,
                last_use: 0,
                sample: Samples::new(0),
                row: vec![0.0; values],
                made: vec![0; values.div_ceil(WORD_BITS)],
                made_count: 0,
                complete_for: None,
            });
            self.entries.len() - 1
        } else {
            self.keeps_all = false;
            let oldest = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.last_use);
            oldest.expect("there are at least two").0
        };
        let entry = &mut self.entries[place];
        if self.places[entry.number as usize] == place as u32 {
            self.places[entry.number as usize] = ABSENT;
        }
        (entry.number, entry.last_use, entry.complete_for) = (number, self.now, None);
        entry.made.fill(0);
        entry.made_count = 0;
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

    /// Those of the wanted values that were not made.
    pub(crate) fn missing(&self, wanted: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
        let is_made = |at: usize| self.made[at / WORD_BITS] >> (at % WORD_BITS) & 1 == 1;
        wanted.filter(move |at| !is_made(*at as usize))
    }

    /// How many values were made.
    pub(crate) fn made_count(&self) -> usize {
        self.made_count
    }

    /// Notes that these values were made, which were missing.
    pub(crate) fn note_made(&mut self, missing: &[u32]) {
        for at in missing {
            self.made[*at as usize / WORD_BITS] |= 1 << (*at as usize % WORD_BITS);
        }
        self.made_count += missing.len();
    }

    /// Notes that all values were made.
    pub(crate) fn note_whole(&mut self) {
        self.made.fill(u64::MAX);
        self.made_count = self.row.len();
    }

    /// Whether the row has the values of all samples that take part. They become fewer until all
    /// come back, so what was complete stays so until then; `returns` counts how often they did.
    pub(crate) fn is_complete_for(&self, returns: u64) -> bool {
        self.made_count == self.row.len() || self.complete_for == Some(returns)
    }

    /// Notes that the row has these values.
    pub(crate) fn note_complete_for(&mut self, returns: u64) {
        self.complete_for = Some(returns);
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
            let place = cache.place_for(number, 2);
            cache.entry(place).row.fill(number as f32);
        }
        let seven = cache.find(7).expect("is kept");
        let four = cache.find(4).expect("is kept");
        let one = cache.place_for(1, 2);
        assert!(one != seven && one != four);
        assert_eq!(cache.find(9), None);
        assert_eq!((cache.find(7), cache.find(1)), (Some(seven), Some(one)));
        assert_eq!(cache.rows(seven, four), (&[7.0, 7.0][..], &[4.0, 4.0][..]));
    }

    #[test]
    fn without_room_two_places_serve_in_turn_and_nothing_is_found() {
        let mut cache = RowCache::new(10, 0);
        let first = cache.place_for(4, 1);
        let second = cache.place_for(5, 1);
        assert_ne!(first, second);
        assert_eq!((cache.find(4), cache.find(5)), (None, None));
        assert_eq!(cache.place_for(4, 1), first);
        assert_eq!(cache.place_for(4, 1), second);
    }

    #[test]
    fn a_row_knows_which_of_its_values_were_made() {
        let mut cache = RowCache::new(300, 2);
        let place = cache.place_for(7, 200);
        let entry = cache.entry(place);
        entry.note_made(&[0, 63, 64, 199]);
        entry.note_complete_for(3);
        let wanted = [0, 1, 63, 64, 65, 198, 199];
        assert_eq!(entry.missing(wanted.into_iter()).collect::<Vec<_>>(), [1, 65, 198]);
        assert!(entry.is_complete_for(3) && !entry.is_complete_for(4));
        assert_eq!(entry.made_count(), 4);
        let other = cache.place_for(8, 200);
        assert_eq!(cache.kept().collect::<Vec<_>>(), [(place, 7), (other, 8)]);
        // The third row takes the place of the first, and none of its values.
        assert_eq!(cache.place_for(9, 200), place);
        assert_eq!(cache.entry(place).missing(wanted.into_iter()).collect::<Vec<_>>(), wanted);
        assert!(!cache.entry(place).is_complete_for(3));
        assert_eq!(cache.kept().collect::<Vec<_>>(), [(place, 9), (other, 8)]);
        assert!(cache.has(9) && !cache.has(7));
        let entry = cache.entry(place);
        entry.note_whole();
        assert_eq!((entry.made_count(), entry.missing(wanted.into_iter()).count()), (200, 0));
        assert!(entry.is_complete_for(3) && entry.is_complete_for(4));
    }

    #[test]
    fn the_rows_of_a_cache_take_no_more_bytes_than_it_has() {
        // 800 bytes of values, 32 of bits.
        assert_eq!([831, 832, 1_664].map(|bytes| RowCache::rows_in(bytes, 200)), [0, 1, 2]);
        assert_eq!((RowCache::rows_in(0, 200), RowCache::rows_in(10, 0)), (0, 10));
    }
}
