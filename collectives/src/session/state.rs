//! States of a job: what is equal on all members, or on those of one place in their units.
//!
//! A [`State`] is in the host's memory, a [`GpuState`] in a GPU's. Members read each other's states
//! in the host's memory in any case ([`heal`](super::heal)).

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, MutexGuard, OnceLock};

use pleach_transport::Slice;
use pleach_transport::cuda::{CudaError, CudaEvent, Stream};
use pleach_transport::mutex::lock;

use super::heal::{Entry, InUse};
use super::hidden::Gate;
use crate::group::{Buffer, CollectiveError, Element, GpuBuffer, session_buffer};

/// What a state has of its session.
pub(crate) struct Declaration {
    name: String,
    /// What this process has read from the members, once it has.
    healed: Arc<OnceLock<Slice>>,
    /// This process has begun the job.
    is_first: bool,
    /// Locked while the state changes, or the session reads it.
    in_use: InUse,
}

impl Declaration {
    pub(crate) fn new(name: &str, entry: &Entry, is_first: bool) -> Self {
        let (name, healed, in_use) = (name.to_owned(), entry.healed(), entry.in_use());
        Self { name, healed, is_first, in_use }
    }

    fn is_here(&self) -> bool {
        self.is_first || self.healed.get().is_some()
    }
}

/// Elements that are equal on all members, or on those with one place in their units
/// ([`Elastic::unit`](super::Elastic)): each changes them alike, after a step was committed. Derefs
/// to a slice.
///
/// A process that joined finds them when its first step begins, or, with
/// [`Heal::Hidden`](super::Heal), after that step at the latest ([`State::update`] waits for them).
/// A slice of them that was taken before still shows zeros.
pub struct State<T: Element> {
    declaration: Declaration,
    elements: Buffer<T>,
    /// What was read from the members, as elements.
    read: OnceLock<Buffer<T>>,
    gate: Arc<Gate>,
}

impl<T: Element> State<T> {
    pub(crate) fn new(declaration: Declaration, elements: Buffer<T>, gate: Arc<Gate>) -> Self {
        Self { declaration, elements, read: OnceLock::new(), gate }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.declaration.name
    }

    /// Whether it is here. In a process that joined it is not before it was read from the members.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.declaration.is_here()
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
        let _changes = lock(&self.declaration.in_use);
        change(self.read.get_mut().unwrap_or(&mut self.elements));
    }

    /// The elements that count now.
    fn now(&self) -> &Buffer<T> {
        let Some(healed) = self.declaration.healed.get() else { return &self.elements };
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
        write!(formatter, "State({}, {} elements)", self.name(), self.elements.len())
    }
}

/// A state in a GPU's memory: elements that are equal on all members, at one address as long as it
/// lives. Derefs to a [`GpuBuffer`], to be read.
///
/// A process that joined finds them when its first step begins.
pub struct GpuState<T: Element> {
    declaration: Declaration,
    elements: GpuBuffer<T>,
}

impl<T: Element> GpuState<T> {
    pub(crate) fn new(declaration: Declaration, elements: GpuBuffer<T>) -> Self {
        Self { declaration, elements }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.declaration.name
    }

    /// Whether it is here. In a process that joined it is not before it was read from the members.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.declaration.is_here()
    }

    /// Changes it, as all members do after a step that was committed. `change` copies to the
    /// buffer, or puts kernels and copies that write to its address into `stream`, where they come
    /// after those of the update before, in whatever stream. It need not wait for them: the session
    /// does, before it reads the state. They must have ended when session and state are dropped. A
    /// buffer that `change` puts in the place of the one that it is given is not the state.
    ///
    /// `change` calls nothing of the session: a call that reads the states then, here or on another
    /// thread, fails with [`SessionError::StateInUse`](super::SessionError).
    ///
    /// # Errors
    ///
    /// What `change` returns, or the driver's error.
    pub fn update(
        &mut self,
        stream: &Stream,
        change: impl FnOnce(&mut GpuBuffer<T>) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let last_change = lock(&self.declaration.in_use);
        // So the mark of this change is behind all of them.
        last_change.as_ref().map_or(Ok(()), |change| stream.wait_event(change))?;
        let mut mark = ChangeMark { stream, last_change, is_set: false };
        let outcome = change(&mut self.elements.share());
        let marked = mark.set();
        outcome.and(marked.map_err(CollectiveError::from))
    }
}

/// Marks the end of a change in its stream: also where the change has failed or panicked, as what
/// it has put into the stream is done all the same.
struct ChangeMark<'a> {
    stream: &'a Stream,
    last_change: MutexGuard<'a, Option<CudaEvent>>,
    is_set: bool,
}

impl ChangeMark<'_> {
    fn set(&mut self) -> Result<(), CudaError> {
        self.is_set = true;
        *self.last_change = Some(self.stream.record_event()?);
        Ok(())
    }
}

impl Drop for ChangeMark<'_> {
    fn drop(&mut self) {
        if !self.is_set {
            // A GPU that takes no event any more fails the next use of the state, too.
            let _ = self.set();
        }
    }
}

impl<T: Element> Deref for GpuState<T> {
    type Target = GpuBuffer<T>;

    fn deref(&self) -> &GpuBuffer<T> {
        &self.elements
    }
}

impl<T: Element> fmt::Debug for GpuState<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GpuState({}, {:?})", self.name(), self.elements)
    }
}
