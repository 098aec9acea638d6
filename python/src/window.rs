//! One-sided memory of a group as a Python class. What is published and written is copied out of
//! the caller's array during the call, and what is read into one: the caller's or a new one.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use pleach_collectives::{Arrival as RustArrival, CollectiveError, Window as RustWindow, WindowError, Word};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{self, argument};
use crate::group::{Group, Inner, limit};
use crate::memory::Memory;
use crate::types::ElementType;

/// Memory that the ranks of a group read and write without each other's calls: see
/// ``Group.window``. One thread uses it at a time.
#[pyclass(frozen, module = "pleach._native", name = "Window")]
pub(crate) struct Window {
    /// `None` when it is closed. In bytes.
    raw: Mutex<Option<RustWindow<u8>>>,
    group: Arc<Inner>,
    shape: Vec<usize>,
    element: ElementType,
    slots: u16,
}

/// A write of a peer that has come.
#[pyclass(frozen, get_all, module = "pleach._native", name = "Arrival")]
pub(crate) struct Arrival {
    /// The rank that wrote.
    source: u32,
    /// Its slot.
    slot: u16,
    /// The 48 bytes of the word that it gave.
    word: Py<PyBytes>,
    /// The elements that it wrote, as many as it gave, in a new array of one dimension.
    data: Py<PyAny>,
}

/// A write that was taken out of the window.
struct Taken {
    source: u32,
    slot: u16,
    word: Word,
    data: Vec<u8>,
}

/// An error of making a window as an exception.
fn exception(py: Python<'_>, group: &Inner, error: WindowError) -> PyErr {
    match error {
        WindowError::Collective(error) => error::collective(py, group.info(), &error),
        WindowError::Split(error) => error::split(py, group.info(), error),
        WindowError::Differs { rank, .. } => error::about_rank(py, "mismatch", &error.to_string(), rank),
        other => argument(py, other.to_string()),
    }
}

/// Longest name of an element type, in bytes.
const NAME_BYTES: usize = 16;

/// A word: up to 48 bytes, or a number that goes into the first 8 of them.
fn word_of(word: Option<&Bound<'_, PyAny>>) -> PyResult<Word> {
    let Some(word) = word else { return Ok(Word::EMPTY) };
    if let Ok(number) = word.extract::<u64>() {
        return Ok(Word::from(number));
    }
    let bytes: Option<Vec<u8>> = word.extract().ok();
    let found = bytes.as_deref().and_then(Word::new);
    found.ok_or_else(|| argument(word.py(), "word is neither up to 48 bytes nor a number of 64 bits"))
}

impl Window {
    /// Makes the window of a group; all its ranks do.
    pub(crate) fn make(
        py: Python<'_>,
        group: &pleach_collectives::Group,
        inner: Arc<Inner>,
        (shape, element): (Vec<usize>, ElementType),
        slots: u16,
    ) -> PyResult<Self> {
        let bytes = shape.iter().try_fold(element.bytes(), |len, length| len.checked_mul(*length));
        let Some(bytes) = bytes else { return Err(argument(py, "the shape is too large")) };
        let name = element.name();
        let mut own = [0u8; NAME_BYTES];
        own[..name.len()].copy_from_slice(name.as_bytes());
        let mut all = vec![0u8; NAME_BYTES * group.world_size() as usize];
        let made = py.detach(|| {
            let window = group.window::<u8>(bytes, slots)?;
            // The window compares lengths in bytes, and knows of no other elements.
            group.all_gather(&own[..], &mut all)?;
            Ok::<_, WindowError>(window)
        });
        let raw = made.map_err(|error| exception(py, &inner, error))?;
        let differs = (0..).zip(all.chunks_exact(NAME_BYTES)).find(|(_, theirs)| **theirs != own[..]);
        if let Some((rank, theirs)) = differs {
            let theirs = String::from_utf8_lossy(theirs);
            let text = format!(
                "rank {rank} asks for a window of {}, rank {} of {name}; ask for the same on all",
                theirs.trim_end_matches('\0'),
                group.rank()
            );
            return Err(error::about_rank(py, "mismatch", &text, rank));
        }
        Ok(Self { raw: Mutex::new(Some(raw)), group: inner, shape, element, slots })
    }

    /// Makes a call without the GIL, if no other thread makes one.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut Option<RustWindow<u8>>) -> Option<Result<T, CollectiveError>> + Send,
    ) -> PyResult<T> {
        let made = py.detach(|| match self.raw.try_lock() {
            Ok(mut raw) => Ok(make(&mut raw)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(make(&mut poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => Err(()),
        });
        match made {
            Ok(Some(result)) => result.map_err(|error| error::collective(py, self.group.info(), &error)),
            Ok(None) => Err(error::named(py, "closed", "the window is closed; make a new one")),
            Err(()) => {
                Err(argument(py, "another thread is in a call of this window; make one call at a time"))
            }
        }
    }

    /// The memory of an argument whose elements are of the window's type.
    fn memory_of(&self, data: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Memory> {
        let memory = Memory::of(data, what, what == "out")?;
        if memory.element == self.element {
            return Ok(memory);
        }
        let (found, own) = (memory.element.name(), self.element.name());
        Err(argument(data.py(), format!("{what} has type {found}, not {own} as the window")))
    }

    fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The bytes of an argument.
fn bytes_of(memory: &Memory) -> &[u8] {
    let address = std::ptr::with_exposed_provenance::<u8>(memory.address);
    let length = memory.count * memory.element.bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: `memory` keeps the array, which is as long. As with each call, the program leaves it
    // alone until the call has returned.
    unsafe { std::slice::from_raw_parts(address, length) }
}

/// The bytes of an output.
fn bytes_of_mut(memory: &mut Memory) -> &mut [u8] {
    let address = std::ptr::with_exposed_provenance_mut::<u8>(memory.address);
    let length = memory.count * memory.element.bytes();
    if length == 0 {
        return &mut [];
    }
    // SAFETY: as above, and the array is writable: `Memory::of` has looked.
    unsafe { std::slice::from_raw_parts_mut(address, length) }
}

#[pymethods]
impl Window {
    /// The lengths of the dimensions of what a rank publishes.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    /// The slots that each rank has at each peer.
    #[getter]
    fn slots(&self) -> u16 {
        self.slots
    }

    /// Publishes all of this rank's elements with a word, which is up to 48 bytes or a number.
    /// Returns the number of this version, from 1. It waits for nobody.
    #[pyo3(signature = (data, word=None))]
    fn publish(&self, data: &Bound<'_, PyAny>, word: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let (memory, word) = (self.memory_of(data, "data")?, word_of(word)?);
        if memory.shape() != self.shape {
            let text = format!("data has shape {:?}, not {:?} as the window", memory.shape(), self.shape);
            return Err(argument(data.py(), text));
        }
        let bytes = bytes_of(&memory);
        self.call(data.py(), |raw| raw.as_mut().map(|window| window.publish(bytes, word)))
    }

    /// Reads the elements from ``begin`` to ``end`` (the last by default) of what a rank has
    /// published, counted without dimensions: all of one version. Returns them (``out``, or a new
    /// array of one dimension), their version (0: zeros, as nothing was published) and its word.
    /// ``torn``: any bytes of this version and of newer ones; the word is zeros then. The owner
    /// need not call anything.
    #[pyo3(signature = (peer, begin=0, end=None, *, out=None, torn=false))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        peer: u32,
        begin: usize,
        end: Option<usize>,
        out: Option<Bound<'py, PyAny>>,
        torn: bool,
    ) -> PyResult<(Bound<'py, PyAny>, u64, Bound<'py, PyBytes>)> {
        let end = end.unwrap_or_else(|| self.count());
        if begin > end || end > self.count() {
            let text = format!("elements {begin} to {end} of a window of {} elements", self.count());
            return Err(argument(py, text));
        }
        let (array, mut memory) = match out {
            None => Group::new_array(py, &[end - begin], self.element)?,
            Some(out) => {
                let memory = self.memory_of(&out, "out")?;
                (out, memory)
            }
        };
        let (into, bytes) = (bytes_of_mut(&mut memory), self.element.bytes());
        let range = begin * bytes..end * bytes;
        let read = self.call(py, |raw| {
            raw.as_mut().map(|window| match torn {
                true => window.read_torn(peer, range, into).map(|version| (version, Word::EMPTY)),
                false => window.read(peer, range, into),
            })
        });
        let (version, word) = read?;
        Ok((array, version, PyBytes::new(py, word.as_bytes())))
    }

    /// Whether this rank's slot at a peer is free, so that a write into it waits for nothing.
    fn is_free(&self, py: Python<'_>, peer: u32, slot: u16) -> PyResult<bool> {
        self.call(py, |raw| raw.as_mut().map(|window| window.is_free(peer, slot)))
    }

    /// Writes elements, at most as many as the window has, into this rank's slot at a peer, with a
    /// word. Waits until the peer has polled the slot's last write.
    #[pyo3(signature = (peer, slot, data, word=None))]
    fn write(
        &self,
        peer: u32,
        slot: u16,
        data: &Bound<'_, PyAny>,
        word: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (memory, word) = (self.memory_of(data, "data")?, word_of(word)?);
        let bytes = bytes_of(&memory);
        self.call(data.py(), |raw| raw.as_mut().map(|window| window.write(peer, slot, bytes, word)))
    }

    /// The writes of peers that have come, each once; those of one peer in the order in which they
    /// were written. If none has come, waits for one up to ``timeout`` seconds.
    #[pyo3(signature = (timeout=0.0))]
    fn poll(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Arrival>> {
        let limit = limit(py, "timeout", Some(timeout))?.unwrap_or(Duration::ZERO);
        let mut taken = Vec::new();
        let mut take = |arrival: RustArrival<'_, u8>| {
            let (source, slot, word) = (arrival.from, arrival.slot, arrival.word);
            taken.push(Taken { source, slot, word, data: arrival.data().to_vec() });
        };
        self.call(py, |raw| {
            raw.as_mut().map(|window| match limit.is_zero() {
                true => window.poll(&mut take),
                false => window.wait(limit, &mut take),
            })
        })?;
        let arrival = |taken: Taken| {
            let (array, mut memory) =
                Group::new_array(py, &[taken.data.len() / self.element.bytes()], self.element)?;
            bytes_of_mut(&mut memory).copy_from_slice(&taken.data);
            let word = PyBytes::new(py, taken.word.as_bytes()).unbind();
            Ok(Arrival { source: taken.source, slot: taken.slot, word, data: array.unbind() })
        };
        taken.into_iter().map(arrival).collect()
    }

    /// Ends the window on all ranks: their calls raise AbortedError. The group goes on.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |raw| {
            raw.as_ref()?.abort();
            Some(Ok(()))
        })
    }

    /// Meets all ranks once more and leaves the window. Does nothing when it is closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if py.detach(|| self.raw.lock().unwrap_or_else(PoisonError::into_inner).is_none()) {
            return Ok(());
        }
        self.call(py, |raw| raw.take().map(RustWindow::close))
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Closes the window; after an exception it ends the window on all ranks.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() { self.close(py) } else { self.abort(py) }
    }

    fn __repr__(&self) -> String {
        format!("<pleach.Window: {:?} of {}, {} slots>", self.shape, self.element.name(), self.slots)
    }
}
