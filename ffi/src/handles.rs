//! Handles: numbers in the clothes of pointers.
//!
//! **Invariant:** a handle names an entry of its table by its place and by how often the place was
//! used, and a place counts up when its value is taken. So a handle that was taken, damaged or
//! never given names nothing. A function that runs holds the value, so taking the value in another
//! thread takes effect when the function returns.

use std::sync::{Arc, PoisonError, RwLock};

use crate::result::Failed;

/// Most values at a time in a table.
const VALUES_MAX: usize = 1 << 16;

/// The low bits of a handle say the place, counted from 1; the others how often it was used before.
const PLACE_BITS: u32 = 20;

/// A place of a table, and how often it was used before.
struct Entry<T> {
    uses: u32,
    value: Option<Arc<T>>,
}

/// The table of one kind of handles.
pub(crate) struct Handles<T> {
    /// The name of the kind in errors: "communicator".
    kind: &'static str,
    /// The name of the argument in errors: "comm".
    argument: &'static str,
    entries: RwLock<Vec<Entry<T>>>,
}

fn place_of(number: usize) -> Option<(usize, u32)> {
    let place = (number & ((1 << PLACE_BITS) - 1)).checked_sub(1)?;
    Some((place, u32::try_from(number >> PLACE_BITS).ok()?))
}

fn number(place: usize, uses: u32) -> usize {
    (place + 1) | (uses as usize) << PLACE_BITS
}

impl<T> Handles<T> {
    pub(crate) const fn new(kind: &'static str, argument: &'static str) -> Self {
        Self { kind, argument, entries: RwLock::new(Vec::new()) }
    }

    fn unknown(&self, number: usize) -> Failed {
        let Self { kind, argument, .. } = self;
        match number {
            0 => Failed::argument(format!("{argument} is NULL")),
            _ => Failed::argument(format!("{argument} is no {kind}: it was destroyed, or never made")),
        }
    }

    /// The value of a handle.
    pub(crate) fn find<H>(&self, handle: *mut H) -> Result<Arc<T>, Failed> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let found = place_of(handle.addr()).and_then(|(place, uses)| {
            entries.get(place).filter(|entry| entry.uses == uses).and_then(|entry| entry.value.clone())
        });
        found.ok_or_else(|| self.unknown(handle.addr()))
    }

    /// Stores a value; returns its handle.
    pub(crate) fn keep<H>(&self, value: T) -> Result<*mut H, Failed> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let free = entries.iter().position(|entry| entry.value.is_none());
        if free.is_none() && entries.len() == VALUES_MAX {
            let kind = self.kind;
            return Err(Failed::usage(format!("there are {VALUES_MAX} handles of a {kind}; destroy some")));
        }
        let place = free.unwrap_or(entries.len());
        if place == entries.len() {
            entries.push(Entry { uses: 0, value: None });
        }
        entries[place].value = Some(Arc::new(value));
        Ok(std::ptr::without_provenance_mut(number(place, entries[place].uses)))
    }

    /// Takes the value out of the table: its handle names nothing from now on.
    pub(crate) fn take<H>(&self, handle: *mut H) -> Result<Arc<T>, Failed> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let entry = place_of(handle.addr())
            .and_then(|(place, uses)| entries.get_mut(place).filter(|entry| entry.uses == uses));
        let taken = entry.and_then(|entry| {
            let value = entry.value.take()?;
            entry.uses = entry.uses.wrapping_add(1);
            Some(value)
        });
        taken.ok_or_else(|| self.unknown(handle.addr()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_names_its_value_until_it_is_taken_and_nothing_after() {
        let table = Handles::new("thing", "it");
        let first: *mut u8 = table.keep(7).expect("room");
        assert_eq!(table.find(first).map(|value| *value).ok(), Some(7));
        assert_eq!(table.take(first).map(|value| *value).ok(), Some(7));
        let second: *mut u8 = table.keep(8).expect("room");
        assert!(table.find(first).is_err() && table.take(first).is_err());
        assert_eq!(table.find(second).map(|value| *value).ok(), Some(8));
        for number in [0, 2, 1 << 19, usize::MAX] {
            assert!(table.find::<u8>(std::ptr::without_provenance_mut(number)).is_err(), "{number}");
        }
    }
}
