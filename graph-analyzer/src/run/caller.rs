//! The rank of a caller: it feeds a graph with inputs, and drains the outputs.
//!
//! A [`Caller`] computes nothing and never waits: the program asks it whether another iteration can
//! be fed and whether the oldest one has ended, and sleeps by [`Caller::sleep`] in between. Up to
//! `depth` iterations are under way, and they end in order.
//!
//! **Invariant:** an iteration that was fed ends once, with its outputs or with the text of a rank
//! whose part did not run ([`super::states`]), or an error ends them all. A rank that is gone is
//! such an error, also while nothing is under way.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use pleach_transport::device::{Armed, Wake};
use pleach_transport::{Nanos, Slice, clock, sleep};

use super::bytes::{of_received, of_slice, of_slice_mut};
use super::channels::{Received, TensorForm};
use super::inputs::{Tensor, convert};
use super::plan::{Job, JobError, Part};
use super::rank::RankError;
use super::runtime::TensorRef;
use super::states::text_of;
use super::transport::{Regions, SLEEP_MAX, TensorTransport as _};
use crate::graph::ValueId;

/// See the module.
pub struct Caller<'a> {
    job: &'a Job<'a>,
    transport: Regions,
    depth: u64,
    inputs: Vec<Input>,
    /// Outputs that are computed from weights alone.
    constants: HashMap<ValueId, Tensor>,
    /// The next iteration to feed.
    fed: u64,
    /// When each iteration that is under way was fed.
    fed_at: VecDeque<Nanos>,
    /// Since when the next iteration could not be fed though there is room for it.
    blocked_since: Option<Nanos>,
    /// The oldest iteration that is under way.
    oldest: u64,
    /// Channels that bring something in each iteration: states, then outputs.
    channels: Vec<usize>,
    /// Those of the oldest iteration that have brought nothing yet, and what the others brought.
    missing: Vec<usize>,
    received: Vec<(usize, Received)>,
    /// Found while it was about to sleep.
    error: Option<RankError>,
}

/// An input of the graph.
struct Input {
    value: ValueId,
    crossings: Vec<usize>,
    /// By slot: the values of the last iteration there.
    slots: Vec<Option<(TensorForm, Slice)>>,
}

/// An iteration that has ended.
#[derive(Debug)]
pub struct Drained {
    /// Its number.
    pub iteration: u64,
    /// The outputs in the order of the graph's, in its types; or why a part did not run.
    pub outputs: Result<Vec<Tensor>, String>,
}

/// Why an iteration was not fed.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
pub enum FeedError {
    /// An input does not fit. Nothing was fed.
    #[error(transparent)]
    Input(#[from] JobError),
    /// A rank is gone, or late: nothing can be fed any more.
    #[error(transparent)]
    Rank(#[from] RankError),
}

impl std::fmt::Debug for Caller<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Caller({:?}, iterations {} to {})", self.job, self.oldest, self.fed)
    }
}

impl<'a> Caller<'a> {
    /// The caller of a job whose partition has one; `part` is its part.
    ///
    /// # Errors
    ///
    /// [`RankError`]: an output that does not depend on inputs is not computed.
    pub fn new(job: &'a Job<'a>, part: Part, transport: Regions, depth: u32) -> Result<Self, RankError> {
        let mut channels = job.states_to(part.rank);
        channels.extend(&part.plan.incoming_outputs);
        let mut constants = HashMap::new();
        if let Some(mut program) = part.program {
            let mut places: Vec<_> = part.plan.computes.iter().map(|_| None).collect();
            let failed = |error| JobError::Runtime { rank: part.rank, error };
            let outputs = program.run(&[], &mut places).map_err(failed)?;
            for (&value, output) in part.plan.computes.iter().zip(outputs) {
                let bytes = output.bytes.map(|values| values.bytes().to_vec()).unwrap_or_default();
                let tensor = Tensor { form: output.form, bytes };
                constants.insert(
                    value,
                    restored(job, value, TensorRef { form: &tensor.form, bytes: &tensor.bytes }),
                );
            }
        }
        let input = |&value: &ValueId| {
            let crossings = part.plan.outgoing.iter().find(|(crossing, _)| *crossing == value);
            let crossings = crossings.map(|(_, crossings)| crossings.clone()).unwrap_or_default();
            Input { value, crossings, slots: vec![None; depth as usize] }
        };
        Ok(Self {
            job,
            transport,
            depth: depth.into(),
            inputs: job.graph.inputs().iter().map(input).collect(),
            constants,
            fed: 0,
            fed_at: VecDeque::new(),
            blocked_since: None,
            oldest: 0,
            missing: channels.clone(),
            channels,
            received: Vec::new(),
            error: None,
        })
    }

    /// What wakes [`Caller::sleep`], from any thread.
    #[must_use]
    pub fn waker(&self) -> Arc<dyn Wake> {
        self.transport.waker()
    }

    /// Whether an iteration can be fed now.
    ///
    /// # Errors
    ///
    /// [`RankError`]: a rank is gone, or did not release an input in time.
    pub fn can_feed(&mut self) -> Result<bool, RankError> {
        if self.fed - self.oldest >= self.depth {
            return Ok(false);
        }
        let blocked_since = *self.blocked_since.get_or_insert_with(clock::now);
        let deadline = blocked_since + self.transport.patience();
        for input in &self.inputs {
            for &crossing in &input.crossings {
                if !self.transport.is_free(crossing, self.fed, deadline)? {
                    return Ok(false);
                }
            }
        }
        self.blocked_since = None;
        Ok(true)
    }

    /// Feeds the next iteration, after [`Caller::can_feed`]. The inputs are in the order and the
    /// types of the graph's, little endian. Returns its number.
    ///
    /// # Errors
    ///
    /// [`FeedError`].
    ///
    /// # Panics
    ///
    /// If nothing can be fed now, or there are more or fewer inputs.
    pub fn feed(&mut self, inputs: &[TensorRef<'_>]) -> Result<u64, FeedError> {
        assert_eq!(inputs.len(), self.inputs.len(), "all inputs are given");
        let slot = (self.fed % self.depth) as usize;
        for (number, given) in inputs.iter().enumerate() {
            let kept = self.keep(number, slot, *given)?;
            self.inputs[number].slots[slot] = Some(kept);
        }
        for input in &self.inputs {
            let Some((form, slice)) = &input.slots[slot] else { continue };
            for &crossing in &input.crossings {
                let sent = self.transport.send(crossing, self.fed, slice.clone(), form);
                sent.map_err(RankError::from)?;
            }
        }
        self.fed += 1;
        self.fed_at.push_back(clock::now());
        Ok(self.fed - 1)
    }

    /// Copies an input into memory from which it is sent, as the runtime holds it.
    fn keep(
        &mut self,
        number: usize,
        slot: usize,
        given: TensorRef<'_>,
    ) -> Result<(TensorForm, Slice), FeedError> {
        let value = self.inputs[number].value;
        let element = self.job.runtime.element(given.form.element).unwrap_or(given.form.element);
        let form = TensorForm { element, dims: given.form.dims.clone() };
        let of_graph = &self.job.graph.value(value).tensor;
        let is_other = of_graph.element.is_some_and(|element| element != given.form.element)
            || self.job.form(value).is_some_and(|fixed| fixed != form);
        let bytes = form.bytes().filter(|_| given.form.bytes() == Some(given.bytes.len() as u64));
        let Some(bytes) = bytes.filter(|_| !is_other) else {
            let found =
                format!("{} {:?} in {} bytes", given.form.element, given.form.dims, given.bytes.len());
            let input = self.job.graph.value(value).name.clone();
            return Err(JobError::OtherInput { input, expected: of_graph.to_string(), found }.into());
        };
        let have = self.inputs[number].slots[slot].take().map(|(_, slice)| slice.region().whole());
        let whole = match have.filter(|whole| whole.len() as u64 >= bytes) {
            Some(whole) => whole,
            None => self.transport.memory(bytes.max(1) as usize).map_err(RankError::from)?.region().whole(),
        };
        let mut slice = whole.slice(0..bytes as usize).expect("it is long enough");
        convert(given.form.element, element, given.bytes, of_slice_mut(&mut slice))
            .map_err(|number| self.job.out_of_range(value, number, element))?;
        Ok((form, slice))
    }

    /// The oldest iteration, if it has ended.
    ///
    /// # Errors
    ///
    /// [`RankError`]: a rank is gone, or late.
    pub fn drain(&mut self) -> Result<Option<Drained>, RankError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        self.transport.poll()?;
        self.receive()?;
        if self.fed == self.oldest || !self.missing.is_empty() {
            return Ok(None);
        }
        let iteration = self.oldest;
        let of_tensors = self.job.partition.crossings().len();
        let mut states = self.received.iter().filter(|(channel, _)| *channel >= of_tensors);
        let outputs = match states.find_map(|(_, received)| text_of(received)) {
            Some(text) => Err(text),
            None => Ok(self.job.graph.outputs().iter().map(|&value| self.output(value)).collect()),
        };
        for (channel, _) in std::mem::take(&mut self.received) {
            self.transport.release(channel, iteration)?;
        }
        self.missing.clone_from(&self.channels);
        self.oldest += 1;
        self.fed_at.pop_front();
        Ok(Some(Drained { iteration, outputs }))
    }

    /// Takes what has come of the oldest iteration; whether something has.
    fn receive(&mut self) -> Result<bool, RankError> {
        let since = self.fed_at.front().copied().unwrap_or_else(clock::now);
        let deadline = since + self.transport.patience();
        let before = self.missing.len();
        let mut missing = Vec::with_capacity(before);
        for &channel in &self.missing {
            match self.transport.try_receive(channel, self.oldest, deadline)? {
                Some(received) => self.received.push((channel, received)),
                None => missing.push(channel),
            }
        }
        self.missing = missing;
        Ok(self.missing.len() < before)
    }

    /// An output of the oldest iteration.
    fn output(&self, value: ValueId) -> Tensor {
        let crossings = self.job.partition.crossings();
        let is_it =
            |(channel, _): &&(usize, Received)| crossings.get(*channel).is_some_and(|one| one.value == value);
        if let Some((_, received)) = self.received.iter().find(is_it) {
            let fixed = || self.job.form(value).expect("dimensions that are not fixed are sent");
            let form = received.form.clone().unwrap_or_else(fixed);
            return restored(self.job, value, TensorRef { form: &form, bytes: of_received(received) });
        }
        if let Some(constant) = self.constants.get(&value) {
            return constant.clone();
        }
        let input = self.inputs.iter().find(|input| input.value == value);
        let slot = (self.oldest % self.depth) as usize;
        let given = input.and_then(|input| input.slots[slot].as_ref());
        let (form, slice) = given.expect("an output is computed, constant, or an input");
        restored(self.job, value, TensorRef { form, bytes: of_slice(slice) })
    }

    /// Sleeps for a short time, until something has come or [`Caller::waker`] wakes it.
    /// `has_inputs` says whether there is something to feed.
    pub fn sleep(&mut self, has_inputs: &mut dyn FnMut() -> bool) {
        let mut looks = |own: &mut Self| -> Result<bool, RankError> {
            Ok(own.receive()? || has_inputs() && own.can_feed()?)
        };
        let check = |own: &mut Self| {
            looks(own).unwrap_or_else(|error| {
                own.error = Some(error);
                true
            })
        };
        let wait = |_: &mut Self, armed: Armed| armed.wait(clock::now(), SLEEP_MAX);
        sleep::unless_ready(self, |own| own.transport.arm(), check, wait);
    }
}

/// A tensor in the type of the graph.
fn restored(job: &Job<'_>, value: ValueId, held: TensorRef<'_>) -> Tensor {
    let is_held = |element| job.runtime.element(element) == Some(held.form.element);
    let element = job.graph.value(value).tensor.element.filter(|&element| is_held(element));
    let form = TensorForm { element: element.unwrap_or(held.form.element), dims: held.form.dims.clone() };
    let mut bytes = vec![0; form.bytes().unwrap_or(0) as usize];
    let converted = convert(held.form.element, form.element, held.bytes, &mut bytes);
    converted.expect("a type has the numbers of the one that is held in its place");
    Tensor { form, bytes }
}
