//! Values named by tokens: a token names its value until it is taken, and never another one.

/// Values in reused places; see [`super::frame::Token`].
pub(super) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

struct Entry<T> {
    /// Part of the token, so that a late or invented token misses.
    generation: u32,
    value: Option<T>,
}

/// Tokens of a slab have this bit clear, so others can be told apart.
pub(super) const UNTRACKED_TOKEN: u64 = 1 << 63;

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, value: T) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        entry.generation = (entry.generation + 1) & 0x7fff_ffff;
        entry.value = Some(value);
        u64::from(entry.generation) << 32 | u64::from(index)
    }

    pub(super) fn find(&mut self, token: u64) -> Option<&mut T> {
        let entry = self.entries.get_mut((token & 0xffff_ffff) as usize)?;
        if u64::from(entry.generation) == token >> 32 { entry.value.as_mut() } else { None }
    }

    pub(super) fn take(&mut self, token: u64) -> Option<T> {
        self.find(token)?;
        let index = (token & 0xffff_ffff) as u32;
        self.free.push(index);
        self.entries[index as usize].value.take()
    }

    pub(super) fn take_any(&mut self) -> Option<T> {
        let index = self.entries.iter().position(|entry| entry.value.is_some())?;
        self.free.push(index as u32);
        self.entries[index].value.take()
    }
}
