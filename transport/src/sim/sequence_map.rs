//! A map for values that are numbered in sequence and mostly end in sequence: a queue with gaps.

use std::collections::VecDeque;
use std::marker::PhantomData;

use crate::sim::flows::FlowId;
use crate::sim::observer::TransferNumber;

/// A key that is a number.
pub(super) trait Number: Copy {
    fn new(number: u64) -> Self;
    fn value(self) -> u64;
}

impl Number for FlowId {
    fn new(number: u64) -> Self {
        Self(number)
    }

    fn value(self) -> u64 {
        self.0
    }
}

impl Number for TransferNumber {
    fn new(number: u64) -> Self {
        Self(number)
    }

    fn value(self) -> u64 {
        self.0
    }
}

/// Values by their numbers, in ascending order. **Invariant:** the first entry is occupied, so
/// there are as many entries as numbers since that of the oldest value.
#[derive(Debug)]
pub(super) struct SequenceMap<K, V> {
    first: u64,
    places: VecDeque<Option<V>>,
    values: usize,
    key: PhantomData<K>,
}

impl<K: Number, V> SequenceMap<K, V> {
    pub(super) fn new() -> Self {
        Self { first: 0, places: VecDeque::new(), values: 0, key: PhantomData }
    }

    /// Inserts a value, whose number is larger than all earlier ones.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.places.is_empty() {
            self.first = key.value();
        }
        let place = (key.value() - self.first) as usize;
        debug_assert!(place >= self.places.len(), "numbers are given in turn");
        self.places.resize_with(place, || None);
        self.places.push_back(Some(value));
        self.values += 1;
    }

    fn place(&self, key: &K) -> Option<usize> {
        key.value().checked_sub(self.first).map(|place| place as usize)
    }

    pub(super) fn find(&self, key: &K) -> Option<&V> {
        self.places.get(self.place(key)?)?.as_ref()
    }

    pub(super) fn find_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = self.place(key)?;
        self.places.get_mut(place)?.as_mut()
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.place(key)?;
        let value = self.places.get_mut(place)?.take()?;
        self.values -= 1;
        while let Some(None) = self.places.front() {
            self.places.pop_front();
            self.first += 1;
        }
        Some(value)
    }

    /// The number of values.
    pub(super) fn len(&self) -> usize {
        self.values
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        let sequence_map = (self.first..).zip(&self.places);
        sequence_map.filter_map(|(number, value)| Some((K::new(number), value.as_ref()?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut V)> {
        let sequence_map = (self.first..).zip(&mut self.places);
        sequence_map.filter_map(|(number, value)| Some((K::new(number), value.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::sim::Random;

    #[test]
    fn values_are_found_by_their_numbers_whatever_goes_first() {
        let mut random = Random::new(7);
        let (mut sequence_map, mut oracle) = (SequenceMap::<FlowId, u64>::new(), BTreeMap::new());
        let mut next = 0;
        for _ in 0..5_000 {
            if oracle.len() < 40 && random.coin() {
                next += 1 + random.below(3);
                sequence_map.insert(FlowId(next), next * 7);
                oracle.insert(next, next * 7);
            } else {
                // An existing number, or any.
                let place = random.index(oracle.len().max(1));
                let known = oracle.keys().nth(place).copied().filter(|_| random.coin());
                let number = known.unwrap_or_else(|| random.below(next + 2));
                assert_eq!(sequence_map.remove(&FlowId(number)), oracle.remove(&number));
            }
            let number = random.below(next + 2);
            assert_eq!(sequence_map.find(&FlowId(number)), oracle.get(&number));
            assert_eq!(sequence_map.find_mut(&FlowId(number)), oracle.get_mut(&number));
            assert_eq!(sequence_map.len(), oracle.len());
            let (found, known) = (sequence_map.iter(), oracle.iter());
            assert!(found.map(|(key, value)| (key.0, *value)).eq(known.map(|(key, value)| (*key, *value))));
        }
        assert!(next > 1_000 && sequence_map.iter_mut().count() == oracle.len());
    }
}
