//! States of a job: what is equal on all members.

use std::fmt;
use std::ops::Deref;

use crate::group::{Buffer, Element};

/// Elements that are equal on all members: each changes them alike, after a step was committed.
/// Derefs to a slice.
pub struct State<T: Element> {
    name: String,
    elements: Buffer<T>,
}

impl<T: Element> State<T> {
    pub(crate) fn new(name: &str, elements: Buffer<T>) -> Self {
        Self { name: name.to_owned(), elements }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Changes it, as all members do after a step that was committed.
    pub fn update(&mut self, change: impl FnOnce(&mut [T])) {
        change(&mut self.elements);
    }
}

impl<T: Element> Deref for State<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.elements
    }
}

impl<T: Element> fmt::Debug for State<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "State({}, {} elements)", self.name, self.elements.len())
    }
}
