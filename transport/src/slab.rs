//! A generational slab: values named by tokens. A token names its value until it is removed, and
//! never a later value of its slot. So a late or invented token finds nothing. Late tokens come
//! with events of descriptors that were closed in the same batch. Invented tokens come from peers.

/// A bit that no token has set. No token is zero either.
pub(crate) const NO_TOKEN_BIT: u64 = 1 << 63;

/// See the module.
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    /// The upper half of the token; the lower half is the slot.
    generation: u32,
    value: Option<T>,
}

const GENERATION_MAX: u32 = ((NO_TOKEN_BIT - 1) >> 32) as u32;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Inserts a value; returns its token.
    pub(crate) fn insert(&mut self, value: T) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, value: None });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation % GENERATION_MAX + 1;
        slot.value = Some(value);
        token(slot.generation, index as usize)
    }

    pub(crate) fn find(&self, token: u64) -> Option<&T> {
        let slot = self.slots.get(index(token))?;
        if slot.generation == generation(token) { slot.value.as_ref() } else { None }
    }

    pub(crate) fn find_mut(&mut self, token: u64) -> Option<&mut T> {
        let slot = self.slots.get_mut(index(token))?;
        if slot.generation == generation(token) { slot.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, token: u64) -> Option<T> {
        self.find(token)?;
        self.free.push(index(token) as u32);
        self.slots[index(token)].value.take()
    }

    /// Removes all values.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        let tokens: Vec<u64> = self.iter().map(|(token, _)| token).collect();
        tokens.into_iter().filter_map(|token| self.remove(token)).collect()
    }

    /// All values with their tokens.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(index, slot)| Some((token(slot.generation, index), slot.value.as_ref()?)))
    }
}

fn token(generation: u32, index: usize) -> u64 {
    u64::from(generation) << 32 | index as u64
}

fn generation(token: u64) -> u32 {
    (token >> 32) as u32
}

fn index(token: u64) -> usize {
    token as u32 as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_finds_its_value_and_no_later_one_of_the_slot() {
        let mut slab = Slab::default();
        let (first, second) = (slab.insert('a'), slab.insert('b'));
        assert_ne!(first, second);
        assert_eq!((slab.find(first), slab.find(second), slab.len()), (Some(&'a'), Some(&'b'), 2));
        assert_eq!(slab.remove(first), Some('a'));
        assert_eq!((slab.remove(first), slab.len()), (None, 1));
        let third = slab.insert('c');
        assert_eq!(index(third), index(first), "slots are used again");
        assert_eq!((slab.find(first), slab.find(third)), (None, Some(&'c')));
        assert_eq!(slab.find_mut(first), None);
        assert_eq!(slab.find_mut(third), Some(&mut 'c'));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(third, &'c'), (second, &'b')]);
        assert_eq!((slab.drain(), slab.len()), (vec!['c', 'b'], 0));
        let third = slab.insert('d');
        for invented in [0, 1, third | NO_TOKEN_BIT, u64::MAX, u64::MAX - 1] {
            assert_eq!(slab.find(invented), None);
            assert_eq!(slab.remove(invented), None);
        }
    }

    #[test]
    fn generations_begin_again_after_the_last_one() {
        let mut slab = Slab::default();
        let token = slab.insert('a');
        slab.slots[0].generation = GENERATION_MAX;
        slab.free.push(0);
        assert_eq!(slab.insert('b'), token);
    }
}
