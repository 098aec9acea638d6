//! Partial all-reduce as a Python class. Contributions are copied in and results out, into a new
//! array or the caller's: a result stays what it is when later rounds end.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use pleach_collectives::partial::{Activation, ActivationError, Divisor, Late, Own, RankSet};
use pleach_collectives::{PartialError, RawPartial, RawRound};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{self, argument};
use crate::group::{Group, Inner};
use crate::memory::Memory;
use crate::types::ElementType;

/// Rounds of a partial all-reduce: see ``Group.partial``.
#[pyclass(frozen, module = "pleach._native", name = "Partial")]
pub(crate) struct Partial {
    raw: Mutex<RawPartial>,
    group: Arc<Inner>,
    shape: Vec<usize>,
    element: ElementType,
}

/// A round that has ended.
#[pyclass(frozen, get_all, module = "pleach._native", name = "Round")]
pub(crate) struct Round {
    /// The combined contributions, with the same bits on all ranks: ``out``, or a new array.
    result: Py<PyAny>,
    /// The ranks whose contributions are in the result: the same on all ranks.
    contributors: Vec<u32>,
    /// What became of this rank's contribution: counted, carried, dropped, corrected or abstained.
    own: &'static str,
    /// The round's number, from 0.
    number: u64,
    /// How many results this rank has missed since the round before.
    missed: u64,
    /// With late="correct": the ranks whose late contributions are reduced apart, and the sum: the
    /// array that was given for it, or a new one.
    correction: Option<(Vec<u32>, Py<PyAny>)>,
}

/// How rounds are to go, as Python says it.
pub(crate) fn activation(
    py: Python<'_>,
    text: &str,
    late: Option<&str>,
    divisor: Option<&str>,
    staleness_max: Option<u32>,
) -> PyResult<Activation> {
    let refused = |error: ActivationError| argument(py, error.to_string());
    let mut activation: Activation = text.parse().map_err(refused)?;
    if let Some(late) = late {
        activation = activation.late(late.parse::<Late>().map_err(refused)?);
    }
    if let Some(divisor) = divisor {
        activation = activation.divisor(divisor.parse::<Divisor>().map_err(refused)?);
    }
    Ok(staleness_max.map_or(activation, |rounds| activation.staleness_max(rounds)))
}

/// An error as an exception.
pub(crate) fn exception(py: Python<'_>, group: &Inner, error: PartialError) -> PyErr {
    match error {
        PartialError::Collective(error) => error::collective(py, group.info(), &error),
        PartialError::Split(error) => error::split(py, group.info(), error),
        PartialError::NothingGiven { .. } => error::nothing_given(py, &error.to_string()),
        other => argument(py, other.to_string()),
    }
}

/// What is taken out of a round while the rounds are borrowed.
struct Taken {
    result: Vec<u8>,
    correction: Option<(RankSet, Vec<u8>)>,
    contributors: RankSet,
    own: Own,
    number: u64,
    missed: u64,
}

impl Taken {
    fn of(round: &RawRound<'_>) -> Self {
        Self {
            result: round.result().to_vec(),
            correction: round.correction().map(|(set, sum)| (set.clone(), sum.to_vec())),
            contributors: round.contributors().clone(),
            own: round.own(),
            number: round.number(),
            missed: round.missed(),
        }
    }
}

/// An array of the caller, and its memory.
type Place = (Memory, Py<PyAny>);

impl Partial {
    pub(crate) fn new(raw: RawPartial, group: Arc<Inner>, shape: Vec<usize>, element: ElementType) -> Self {
        Self { raw: Mutex::new(raw), group, shape, element }
    }

    /// Makes a call without the GIL, if no other thread makes one.
    fn alone<R: Send>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&mut RawPartial) -> Result<R, PartialError> + Send,
    ) -> PyResult<R> {
        let made = py.detach(|| match self.raw.try_lock() {
            Ok(mut raw) => Some(make(&mut raw)),
            Err(TryLockError::Poisoned(poisoned)) => Some(make(&mut poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        });
        let Some(made) = made else {
            return Err(argument(py, "another thread is in a call of these rounds; make one call at a time"));
        };
        made.map_err(|error| exception(py, &self.group, error))
    }

    /// Makes a call that gives a round, as [`Partial::alone`]. The result and the correction go to
    /// `into`, where something is there for them.
    fn call(
        &self,
        py: Python<'_>,
        into: [Option<Bound<'_, PyAny>>; 2],
        make: impl FnOnce(&mut RawPartial) -> Result<Taken, PartialError> + Send,
    ) -> PyResult<Round> {
        let [out, late] = into;
        let (out, late) = (self.place_of(out, "out")?, self.place_of(late, "correction")?);
        let taken = self.alone(py, make)?;
        let own = match taken.own {
            Own::Counted => "counted",
            Own::Carried => "carried",
            Own::Dropped => "dropped",
            Own::Corrected => "corrected",
            _ => "abstained",
        };
        let correction = match taken.correction {
            Some((set, sum)) => Some((set.iter().collect(), self.put(py, late, &sum)?)),
            None => None,
        };
        Ok(Round {
            result: self.put(py, out, &taken.result)?,
            contributors: taken.contributors.iter().collect(),
            own,
            number: taken.number,
            missed: taken.missed,
            correction,
        })
    }

    /// Where the caller wants something to be put.
    fn place_of(&self, place: Option<Bound<'_, PyAny>>, what: &'static str) -> PyResult<Option<Place>> {
        place.map(|place| Ok((self.memory_of(&place, what)?, place.unbind()))).transpose()
    }

    /// The caller's array with these bytes, or a new one.
    fn put(&self, py: Python<'_>, place: Option<Place>, bytes: &[u8]) -> PyResult<Py<PyAny>> {
        if let Some((memory, array)) = place {
            copy_into(&memory, bytes);
            return Ok(array);
        }
        let (array, memory) = Group::new_array(py, &self.shape, self.element)?;
        assert_eq!(memory.count * self.element.bytes(), bytes.len(), "the array has the shape of the rounds");
        copy_into(&memory, bytes);
        Ok(array.unbind())
    }

    /// The memory of an array with the shape and type of the rounds.
    fn memory_of(&self, data: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Memory> {
        let memory = Memory::of(data, what, what != "data")?;
        if memory.shape() == self.shape && memory.element == self.element {
            return Ok(memory);
        }
        let text = format!(
            "{what} has shape {:?} and type {}, not {:?} and {} as the rounds",
            memory.shape(),
            memory.element.name(),
            self.shape,
            self.element.name()
        );
        Err(argument(data.py(), text))
    }
}

/// Copies an array into the next contribution.
///
/// # Safety
///
/// At `address` is an array as long as the contribution.
unsafe fn fill(raw: &mut RawPartial, address: usize) {
    let into = raw.contribution();
    let from = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: the caller's promise; a contribution is memory of the rounds' own.
    unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
}

/// Copies bytes into an array, which is as long.
fn copy_into(memory: &Memory, bytes: &[u8]) {
    let into = std::ptr::with_exposed_provenance_mut::<u8>(memory.address);
    // SAFETY: `memory` keeps the array, which is writable and as long as the bytes: the rounds'
    // shape and type were compared, or the array was made for them. With the GIL no other code
    // touches it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
}

#[pymethods]
impl Partial {
    /// Contributes ``data``, which must have the shape and type of the rounds and is copied.
    /// Returns the round that counts the contribution. If the contribution came too late, returns
    /// the newest round that was made without it. The result is copied to ``out``, which may be
    /// ``data``, or to a new array, and so is a correction to ``correction``.
    #[pyo3(signature = (data, *, out=None, correction=None))]
    fn contribute(
        &self,
        data: &Bound<'_, PyAny>,
        out: Option<Bound<'_, PyAny>>,
        correction: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Round> {
        let memory = self.memory_of(data, "data")?;
        let address = memory.address;
        self.call(data.py(), [out, correction], move |raw| {
            // SAFETY: `memory` keeps the array, whose length was looked at.
            unsafe { fill(raw, address) };
            raw.contribute().map(|round| Taken::of(&round))
        })
    }

    /// Contributes ``data``, as ``contribute`` does, and does not wait for the round: ``wait``
    /// does. The array may be changed at once, so the next contribution can be computed meanwhile.
    fn start_contribute(&self, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let memory = self.memory_of(data, "data")?;
        let address = memory.address;
        self.alone(data.py(), move |raw| {
            // SAFETY: `memory` keeps the array, whose length was looked at.
            unsafe { fill(raw, address) };
            raw.start_contribute()
        })
    }

    /// Returns the round of the contribution that was started, as ``contribute`` does.
    #[pyo3(signature = (*, out=None, correction=None))]
    fn wait(
        &self,
        py: Python<'_>,
        out: Option<Bound<'_, PyAny>>,
        correction: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Round> {
        self.call(py, [out, correction], |raw| raw.wait().map(|round| Taken::of(&round)))
    }

    /// Abstains from the next round. No rank waits for this rank until it contributes again.
    /// Returns a round as ``contribute`` does.
    #[pyo3(signature = (*, out=None, correction=None))]
    fn abstain(
        &self,
        py: Python<'_>,
        out: Option<Bound<'_, PyAny>>,
        correction: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Round> {
        self.call(py, [out, correction], |raw| raw.abstain().map(|round| Taken::of(&round)))
    }

    /// Makes no further contribution, and takes part in rounds until all ranks have finished.
    /// Returns the last round, whose result has the late contributions that were still carried.
    #[pyo3(signature = (*, out=None, correction=None))]
    fn finish(
        &self,
        py: Python<'_>,
        out: Option<Bound<'_, PyAny>>,
        correction: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Round> {
        self.call(py, [out, correction], |raw| raw.finish().map(|round| Taken::of(&round)))
    }

    /// How the rounds went so far: a dictionary with rounds, counted (by rank), late (the sum of
    /// carried, dropped and corrected), and missed.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| self.raw.lock().unwrap_or_else(PoisonError::into_inner).report());
        let report = report.map_err(|error| exception(py, &self.group, error))?;
        let fields = PyDict::new(py);
        fields.set_item("rounds", report.rounds)?;
        fields.set_item("counted", report.counted)?;
        fields.set_item("late", report.late)?;
        fields.set_item("carried", report.carried)?;
        fields.set_item("dropped", report.dropped)?;
        fields.set_item("corrected", report.corrected)?;
        fields.set_item("missed", report.missed)?;
        Ok(fields)
    }
}
