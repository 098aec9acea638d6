//! States of a job: what is equal on all members.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use pleach_transport::Slice;
use pleach_transport::mutex::lock;

use super::heal::Entry;
use super::hidden::Gate;
use crate::group::{Buffer, Element, session_buffer};

/// Elements that are equal on all members: each changes them alike, after a step was committed.
/// Derefs to a slice.
///
/// A process that joined finds them when its first step begins, or, with
/// [`Heal::Hidden`](super::Heal), after that step at the latest ([`State::update`] waits for them).
/// A slice of them that was taken before still shows zeros.
pub struct State<T: Element> {
    name: String,
    elements: Buffer<T>,
    /// What this process has read from the members, once it has.
    healed: Arc<OnceLock<Slice>>,
    /// The same, as elements.
    read: OnceLock<Buffer<T>>,
    /// This process has begun the job.
    is_first: bool,
    gate: Arc<Gate>,
    /// Locked while the state changes, or the session reads it.
    in_use: Arc<Mutex<()>>,
}

impl<T: Element> State<T> {
    pub(crate) fn new(
        name: &str,
        elements: Buffer<T>,
        entry: &Entry,
        is_first: bool,
        gate: Arc<Gate>,
    ) -> Self {
        let (name, healed, in_use) = (name.to_owned(), entry.healed(), entry.in_use());
        Self { name, elements, healed, read: OnceLock::new(), is_first, gate, in_use }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it is here. In a process that joined it is not before it was read from the members.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.is_first || self.healed.get().is_some()
    }

    /// Changes it, as all members do after a step that was committed.
    ///
    /// With [`Heal::Hidden`](super::Heal) it waits until each process that has joined with that
    /// step has read the states, [`Elastic::heal_wait`](super::Elastic) at most. In a process that
    /// has joined and could not read them to the end, because the epoch was over before, `change`
    /// is not called: it will read what the others have changed.
    ///
    /// `change` calls nothing of the session: a call that reads the states then, here or on another
    /// thread, fails with [`SessionError::StateInUse`](super::SessionError).
    pub fn update(&mut self, change: impl FnOnce(&mut [T])) {
        if !self.gate.pass() {
            return;
        }
        let _ = self.now();
        let _changes = lock(&self.in_use);
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
