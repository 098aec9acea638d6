//! States of a job: what is equal on all members.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use pleach_transport::Slice;

use crate::group::{Buffer, Element, session_buffer};

/// Elements that are equal on all members: each changes them alike, after a step was committed.
/// Derefs to a slice.
///
/// A process that joined finds them when its first step begins. A slice of them that was taken
/// before still shows zeros.
pub struct State<T: Element> {
    name: String,
    elements: Buffer<T>,
    /// What this process has read from the members, once it has.
    healed: Arc<OnceLock<Slice>>,
    /// The same, as elements.
    read: OnceLock<Buffer<T>>,
}

impl<T: Element> State<T> {
    pub(crate) fn new(name: &str, elements: Buffer<T>, healed: Arc<OnceLock<Slice>>) -> Self {
        Self { name: name.to_owned(), elements, healed, read: OnceLock::new() }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Changes it, as all members do after a step that was committed.
    pub fn update(&mut self, change: impl FnOnce(&mut [T])) {
        let _ = self.now();
        change(self.read.get_mut().unwrap_or(&mut self.elements));
    }

    /// The elements that count now.
    fn now(&self) -> &Buffer<T> {
        let Some(healed) = self.healed.get() else { return &self.elements };
        self.read.get_or_init(|| session_buffer(healed.clone(), self.elements.len(), 0))
    }
}

impl<T: Element> Deref for State<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.now()
    }
}

impl<T: Element> fmt::Debug for State<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "State({}, {} elements)", self.name, self.elements.len())
    }
}
