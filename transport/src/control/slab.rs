//! A generational slab: values in numbered slots. Each value has a token that no later value of its
//! slot has. Epoll returns the token with an event, so an event of a descriptor that was closed in
//! the same batch finds no value.

/// See the module. The two highest tokens are never given out: listeners and wake sources use them.
pub(crate) struct Slab<T> {
    slots: Vec<Option<Slot<T>>>,
    free: Vec<usize>,
    generation: u32,
}

struct Slot<T> {
    generation: u32,
    value: T,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), generation: 0 }
    }
}

impl<T> Slab<T> {
    /// Inserts a value; returns its slot.
    pub(crate) fn insert(&mut self, value: T) -> usize {
        self.generation = self.generation.wrapping_add(1);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(Slot { generation: self.generation, value });
        slot
    }

    /// The token of the value in this slot.
    pub(crate) fn token(&self, slot: usize) -> u64 {
        let generation = self.slots[slot].as_ref().map_or(0, |slot| slot.generation);
        u64::from(generation) << 32 | slot as u64
    }

    /// The slot of this token, if its value still exists.
    pub(crate) fn find(&self, token: u64) -> Option<usize> {
        let (generation, slot) = ((token >> 32) as u32, token as u32 as usize);
        let current = self.slots.get(slot)?.as_ref()?;
        (current.generation == generation).then_some(slot)
    }

    pub(crate) fn value(&self, slot: usize) -> Option<&T> {
        Some(&self.slots.get(slot)?.as_ref()?.value)
    }

    pub(crate) fn value_mut(&mut self, slot: usize) -> Option<&mut T> {
        Some(&mut self.slots.get_mut(slot)?.as_mut()?.value)
    }

    pub(crate) fn remove(&mut self, slot: usize) -> Option<T> {
        let removed = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(removed.value)
    }

    /// All values with their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        let values = self.slots.iter().enumerate();
        values.filter_map(|(slot, held)| Some((slot, &held.as_ref()?.value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_finds_its_value_and_no_later_one_of_the_slot() {
        let mut slots = Slab::default();
        let (first, second) = (slots.insert('a'), slots.insert('b'));
        let token = slots.token(first);
        assert_eq!(slots.find(token), Some(first));
        assert_ne!(token, slots.token(second));
        assert_eq!(slots.remove(first), Some('a'));
        assert_eq!((slots.find(token), slots.remove(first)), (None, None));
        assert_eq!(slots.insert('c'), first, "slots are used again");
        assert_eq!((slots.find(token), slots.value(first)), (None, Some(&'c')));
        assert_eq!(slots.find(slots.token(first)), Some(first));
        assert_eq!(slots.iter().collect::<Vec<_>>(), [(0, &'c'), (1, &'b')]);
        assert_eq!((slots.find(u64::MAX), slots.find(u64::MAX - 1)), (None, None));
    }
}
