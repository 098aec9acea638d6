//! One rank of a run: in each iteration it receives, computes and sends.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use pleach_transport::{Nanos, Rank, Slice, clock};

use super::allocator::{COUNTED_BYTES, Site, Tracer};
use super::bytes::{of_received, of_slice, of_slice_mut};
use super::channels::{Received, TensorForm};
use super::inputs::Tensor;
use super::plan::{Copies, Job, JobError, Part, RankPlan};
use super::runtime::{Output, Place, Program, RuntimeError, TensorRef};
use super::states::States;
use super::transport::{TensorTransport, TransportError};
use crate::element::ElementType;
use crate::graph::ValueId;

/// What a rank is to do.
#[derive(Clone, Copy, Debug)]
pub struct RankOptions {
    /// The number of iterations.
    pub iterations: u64,
    /// The number of iterations that can be under way.
    pub depth: u32,
    /// Whether tensors are copied.
    pub copies: Copies,
}

/// What a rank did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankReport {
    /// The rank.
    pub rank: Rank,
    /// The iterations.
    pub iterations: u64,
    /// Copies of tensors in the first iteration,
    pub copies_first: u64,
    /// and in all later ones.
    pub copies_later: u64,
    /// The bytes of all copies.
    pub copied_bytes: u64,
    /// The bytes of tensors that came from other ranks,
    pub bytes_in: u64,
    /// and that went there, once for each receiver.
    pub bytes_out: u64,
    /// Allocations of at least [`super::allocator::COUNTED_BYTES`] that the runtime made on the
    /// heap after its first run. The plan had no place for them, or the place was in use. Nothing
    /// if there is no tracing allocator, or if the runtime has memory of its own.
    pub heap_allocations_later: Option<u64>,
    /// The bytes of all registered memory, inputs included, and of the arena of the memory plan.
    pub arena_bytes: u64,
    /// By iteration: when this rank began to wait, began to compute, and ended.
    pub moments: Vec<[Nanos; 3]>,
}

/// Why a rank ended early.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// The job is not one that can run.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A tensor did not travel.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The part did not run.
    #[error("iteration {iteration} failed: {error}")]
    Runtime {
        /// The iteration.
        iteration: u64,
        /// The reason.
        #[source]
        error: RuntimeError,
    },
    /// A result is not as the graph says.
    #[error(
        "the tensor '{tensor}' has {found} at run, and the graph says {expected}; correct the model's shapes"
    )]
    Shape {
        /// The tensor.
        tensor: String,
        /// As the graph says.
        expected: String,
        /// As it is.
        found: String,
    },
}

/// Gets the outputs of an iteration, in the order of the graph's outputs.
pub type OnOutputs<'a> = dyn FnMut(u64, &[TensorRef<'_>]) + Send + 'a;

/// Runs the part of a rank. `inputs` has the inputs of each iteration by turns; they are needed on
/// the first rank, and on a rank that gives an input back as an output. `on_outputs` is called on
/// the last.
///
/// # Errors
///
/// [`RankError`]: the rank ended early.
pub fn run_rank(
    job: &Job<'_>,
    part: Part,
    transport: &mut dyn TensorTransport,
    inputs: &[Vec<Tensor>],
    options: RankOptions,
    on_outputs: &mut OnOutputs<'_>,
) -> Result<RankReport, RankError> {
    let mut runner = Runner::new(job, part, transport, inputs, options)?;
    let mut result = Ok(());
    job.runtime.within(&mut || result = runner.run(on_outputs));
    result?;
    runner.transport.finish()?;
    runner.report.arena_bytes += runner.transport.registered_bytes();
    Ok(runner.report)
}

/// Runs the part of a rank for a caller ([`crate::Partition::with_caller`]), iteration after
/// iteration, until something ends it, such as the end of the caller. Waits for an iteration as
/// long as the transport does. A part that does not run with the data of an iteration ends nothing:
/// the caller is told.
pub fn serve_rank(
    job: &Job<'_>,
    part: Part,
    transport: &mut dyn TensorTransport,
    depth: u32,
    copies: Copies,
) -> RankError {
    let options = RankOptions { iterations: u64::MAX, depth, copies };
    let mut runner = match Runner::new(job, part, transport, &[], options) {
        Ok(runner) => runner,
        Err(error) => return error,
    };
    let mut result = Ok(());
    job.runtime.within(&mut || result = runner.run(&mut |_, _| {}));
    result.expect_err("nobody runs so many iterations")
}

/// A value that crosses, and the memory from which it is sent.
struct Source {
    value: ValueId,
    crossings: Vec<usize>,
    /// The place of the value among the outputs of the program; nothing for inputs.
    output: Option<usize>,
    /// By slot: memory that a runtime writes, or into which values are copied.
    staging: Vec<Option<Slice>>,
    /// The sites that allocate the value, each with memory by slot, which the allocator gives it.
    direct: Vec<(Site, Vec<Slice>)>,
}

/// The most sites of a value that get memory: a value whose size changes has a site for each size.
const SITES_MAX: usize = 8;

struct Runner<'a> {
    job: &'a Job<'a>,
    plan: RankPlan,
    transport: &'a mut dyn TensorTransport,
    program: Option<Box<dyn Program>>,
    options: RankOptions,
    /// By set and input: on the first rank.
    inputs: Vec<Vec<(TensorForm, Slice)>>,
    /// Types and dimensions of the values that come without them.
    fixed: HashMap<ValueId, TensorForm>,
    sources: Vec<Source>,
    /// On a rank that computes for a caller.
    states: Option<States>,
    /// Whether the part ran once.
    has_run: bool,
    report: RankReport,
}

impl<'a> Runner<'a> {
    fn new(
        job: &'a Job<'a>,
        Part { rank, plan, program }: Part,
        transport: &'a mut dyn TensorTransport,
        inputs: &[Vec<Tensor>],
        options: RankOptions,
    ) -> Result<Self, RankError> {
        let mut sets = Vec::with_capacity(inputs.len());
        for set in inputs.iter().filter(|_| rank == 0) {
            let mut own = Vec::with_capacity(set.len());
            for tensor in set {
                let mut slice = transport.memory(tensor.bytes.len())?;
                of_slice_mut(&mut slice).copy_from_slice(&tensor.bytes);
                own.push((tensor.form.clone(), slice));
            }
            sets.push(own);
        }
        let source = |(value, crossings): &(ValueId, Vec<usize>)| Source {
            value: *value,
            crossings: crossings.clone(),
            output: plan.computes.binary_search(value).ok(),
            staging: vec![None; options.depth as usize],
            direct: Vec::new(),
        };
        let sources = plan.outgoing.iter().map(source).collect();
        let crossing = job.partition.crossings().iter().map(|crossing| crossing.value);
        let fixed = crossing.filter_map(|value| Some((value, job.form(value)?))).collect();
        let states = States::of(job, rank, options.depth);
        let report = RankReport { rank, iterations: options.iterations, ..RankReport::default() };
        Ok(Self {
            job,
            plan,
            transport,
            program,
            options,
            inputs: sets,
            fixed,
            sources,
            states,
            has_run: false,
            report,
        })
    }

    fn run(&mut self, on_outputs: &mut OnOutputs<'_>) -> Result<(), RankError> {
        let computed = self.sources.iter().filter(|source| source.output.is_some());
        let sizes =
            computed.map(|source| self.job.form(source.value).and_then(|form| form.bytes()).unwrap_or(1));
        let shortest = sizes.min().map_or(COUNTED_BYTES, |bytes| bytes as usize);
        let is_traced = self.program.is_some() && !self.job.runtime.writes_places();
        let mut tracer = is_traced.then(|| Tracer::start(shortest)).flatten();
        for iteration in 0..self.options.iterations {
            self.iterate(iteration, &mut tracer, on_outputs)?;
            tracer.iter_mut().for_each(Tracer::plan);
        }
        self.report.heap_allocations_later = tracer.as_mut().map(Tracer::heap_allocations);
        self.report.arena_bytes = tracer.as_ref().map_or(0, Tracer::arena_bytes);
        Ok(())
    }

    fn iterate(
        &mut self,
        iteration: u64,
        tracer: &mut Option<Tracer>,
        on_outputs: &mut OnOutputs<'_>,
    ) -> Result<(), RankError> {
        let waits = clock::now();
        self.send_inputs(iteration)?;
        let mut received: Vec<(usize, Received)> = Vec::new();
        for number in self.plan.incoming.clone() {
            received.push((number, self.receive(number, iteration)?));
        }
        for number in 0..self.sources.len() {
            if self.sources[number].output.is_some() {
                self.wait_free(number, iteration)?;
            }
        }
        let computes = clock::now();
        let Some(outputs) = self.compute_or_tell(iteration, &received, tracer)? else {
            return self.release(iteration, &received);
        };
        let ended = clock::now();
        self.send_outputs(iteration, &outputs, tracer)?;
        if self.states.is_some() {
            return self.release(iteration, &received);
        }
        self.report.moments.push([waits, computes, ended]);
        let is_last = self.report.rank + 1 == self.job.ranks();
        if is_last {
            for number in self.plan.incoming_outputs.clone() {
                received.push((number, self.receive(number, iteration)?));
            }
            let refs = self.graph_outputs(iteration, &received, &outputs);
            on_outputs(iteration, &refs);
        }
        self.release(iteration, &received)
    }

    fn release(&mut self, iteration: u64, received: &[(usize, Received)]) -> Result<(), RankError> {
        for (number, _) in received {
            self.transport.release(*number, iteration)?;
        }
        Ok(())
    }

    /// Computes; nothing if a part before did not run or this one does not, and a caller was told.
    fn compute_or_tell(
        &mut self,
        iteration: u64,
        received: &[(usize, Received)],
        tracer: &mut Option<Tracer>,
    ) -> Result<Option<Vec<Output>>, RankError> {
        let text = match &self.states {
            None => return self.compute(iteration, received, tracer).map(Some),
            Some(states) => states.hear(self.transport, iteration)?,
        };
        let text = match text {
            Some(text) => text,
            None => match self.compute(iteration, received, tracer) {
                Ok(outputs) => return Ok(Some(outputs)),
                Err(RankError::Runtime { error, .. }) => format!("rank {}: {error}", self.report.rank),
                Err(error @ RankError::Shape { .. }) => format!("rank {}: {error}", self.report.rank),
                Err(error) => return Err(error),
            },
        };
        for number in 0..self.sources.len() {
            self.send_stand_in(number, iteration)?;
        }
        self.tell(iteration, &text)?;
        self.transport.flush()?;
        Ok(None)
    }

    /// Sends a tensor without meaning in the place of one that was not computed.
    fn send_stand_in(&mut self, number: usize, iteration: u64) -> Result<(), RankError> {
        let (value, slot) = (self.sources[number].value, self.slot(iteration));
        let form = self.job.form(value).unwrap_or_else(|| {
            let dimensions = self.job.graph.value(value).tensor.shape.as_ref().map_or(0, Vec::len);
            let element = self.job.element(value).unwrap_or(ElementType::F32);
            TensorForm { element, dims: vec![0; dimensions] }
        });
        let slice = self.staging(number, slot, form.bytes().unwrap_or(0) as usize)?;
        self.send(number, iteration, &slice, &form)
    }

    fn slot(&self, iteration: u64) -> usize {
        (iteration % u64::from(self.options.depth)) as usize
    }

    /// Inputs are sent from where they are.
    fn send_inputs(&mut self, iteration: u64) -> Result<(), RankError> {
        for number in 0..self.sources.len() {
            if self.sources[number].output.is_some() {
                continue;
            }
            self.wait_free(number, iteration)?;
            if let Some((form, slice)) = self.input(iteration, self.sources[number].value).cloned() {
                self.send(number, iteration, &slice, &form)?;
            }
        }
        Ok(())
    }

    /// An input of the graph in this iteration; nothing on ranks that do not have the inputs.
    fn input(&self, iteration: u64, value: ValueId) -> Option<&(TensorForm, Slice)> {
        let input = self.job.graph.inputs().iter().position(|&input| input == value)?;
        let set = iteration % self.inputs.len().max(1) as u64;
        self.inputs.get(set as usize)?.get(input)
    }

    fn wait_free(&mut self, source: usize, iteration: u64) -> Result<(), RankError> {
        for &crossing in &self.sources[source].crossings {
            self.transport.wait_free(crossing, iteration)?;
        }
        Ok(())
    }

    fn send(
        &mut self,
        source: usize,
        iteration: u64,
        slice: &Slice,
        form: &TensorForm,
    ) -> Result<(), RankError> {
        for &crossing in &self.sources[source].crossings {
            self.transport.send(crossing, iteration, slice.clone(), form)?;
            self.report.bytes_out += slice.len() as u64;
        }
        Ok(())
    }

    fn receive(&mut self, crossing: usize, iteration: u64) -> Result<Received, RankError> {
        let received = self.transport.receive(crossing, iteration)?;
        self.report.bytes_in += of_received(&received).len() as u64;
        Ok(received)
    }

    /// The type and dimensions of a tensor that was received.
    fn received_form<'b>(&'b self, crossing: usize, received: &'b Received) -> &'b TensorForm {
        let value = self.job.partition.crossings()[crossing].value;
        let fixed = || self.fixed.get(&value).expect("dimensions that are not fixed are sent");
        received.form.as_ref().unwrap_or_else(fixed)
    }

    /// A value that was received, or that is an input of the graph.
    fn given<'b>(
        &'b self,
        iteration: u64,
        received: &'b [(usize, Received)],
        value: ValueId,
    ) -> Option<TensorRef<'b>> {
        let is_it = |(number, _): &&(usize, Received)| self.job.partition.crossings()[*number].value == value;
        if let Some((number, received)) = received.iter().find(is_it) {
            let form = self.received_form(*number, received);
            return Some(TensorRef { form, bytes: of_received(received) });
        }
        let (form, slice) = self.input(iteration, value)?;
        Some(TensorRef { form, bytes: of_slice(slice) })
    }

    fn compute(
        &mut self,
        iteration: u64,
        received: &[(usize, Received)],
        tracer: &mut Option<Tracer>,
    ) -> Result<Vec<Output>, RankError> {
        let Some(mut program) = self.program.take() else { return Ok(Vec::new()) };
        let outputs = self.run_program(&mut *program, iteration, received, tracer);
        self.program = Some(program);
        let outputs = outputs?;
        for source in &self.sources {
            if let Some(output) = source.output {
                self.check_form(source.value, &outputs[output].form)?;
            }
        }
        Ok(outputs)
    }

    fn run_program(
        &mut self,
        program: &mut dyn Program,
        iteration: u64,
        received: &[(usize, Received)],
        tracer: &mut Option<Tracer>,
    ) -> Result<Vec<Output>, RankError> {
        let slot = self.slot(iteration);
        let mut places = self.places(slot)?;
        let mut inputs = Vec::with_capacity(self.plan.needs.len());
        for &needed in &self.plan.needs {
            let input = self.given(iteration, received, needed);
            inputs.push(input.expect("it was received, or is an input of the graph"));
        }
        let mut written: Vec<Option<Place<'_>>> = Vec::with_capacity(places.len());
        for place in &mut places {
            written.push(place.as_mut().map(|(form, slice)| Place { form, bytes: of_slice_mut(slice) }));
        }
        if let Some(tracer) = tracer {
            if !self.has_run {
                // The first run of a program also allocates what it keeps, so that the numbers of
                // its allocations are not those of later runs.
                let warmed = self.run_once(program, &inputs, &mut written);
                warmed.map_err(|error| RankError::Runtime { iteration, error })?;
            }
            tracer.begin(slot, !self.has_run);
        }
        let outputs = self.run_once(program, &inputs, &mut written);
        if let Some(tracer) = tracer {
            tracer.end(outputs.is_ok());
        }
        self.has_run |= outputs.is_ok();
        outputs.map_err(|error| RankError::Runtime { iteration, error })
    }

    /// Runs the part. A caller's data may be such that a runtime panics: that is an error of the
    /// iteration alone, as no state of a program is left between runs.
    fn run_once(
        &self,
        program: &mut dyn Program,
        inputs: &[TensorRef<'_>],
        places: &mut [Option<Place<'_>>],
    ) -> Result<Vec<Output>, RuntimeError> {
        if self.states.is_none() {
            return program.run(inputs, places);
        }
        let ran = catch_unwind(AssertUnwindSafe(|| program.run(inputs, places)));
        let reason = "it panicked, as standard error shows".to_owned();
        ran.unwrap_or(Err(RuntimeError::Run { runtime: self.job.runtime.name(), reason }))
    }

    /// Memory for the outputs that cross and whose size is known, by output.
    fn places(&mut self, slot: usize) -> Result<Vec<Option<(TensorForm, Slice)>>, RankError> {
        let mut places: Vec<Option<(TensorForm, Slice)>> = self.plan.computes.iter().map(|_| None).collect();
        if !self.job.runtime.writes_places() || self.options.copies == Copies::Sender {
            return Ok(places);
        }
        for source in &mut self.sources {
            let (Some(output), Some(form)) = (source.output, self.job.form(source.value)) else { continue };
            let bytes = form.bytes().unwrap_or(0) as usize;
            if source.staging[slot].is_none() {
                source.staging[slot] = Some(self.transport.memory(bytes)?);
            }
            places[output] = source.staging[slot].clone().map(|slice| (form, slice));
        }
        Ok(places)
    }

    fn send_outputs(
        &mut self,
        iteration: u64,
        outputs: &[Output],
        tracer: &mut Option<Tracer>,
    ) -> Result<(), RankError> {
        let slot = self.slot(iteration);
        for number in 0..self.sources.len() {
            let Some(output) = self.sources[number].output.map(|output| &outputs[output]) else { continue };
            let slice = match &output.bytes {
                None => self.sources[number].staging[slot].clone().expect("the runtime wrote there"),
                Some(values) => match self.direct(slot, values.bytes()) {
                    Some(slice) => slice,
                    None => {
                        let slice = self.copy(number, iteration, values.bytes())?;
                        self.trace(number, values.bytes(), tracer)?;
                        slice
                    }
                },
            };
            self.send(number, iteration, &slice, &output.form)?;
        }
        self.tell(iteration, "")?;
        Ok(self.transport.flush()?)
    }

    fn tell(&mut self, iteration: u64, text: &str) -> Result<(), RankError> {
        match &mut self.states {
            Some(states) => Ok(states.tell(self.transport, iteration, text)?),
            None => Ok(()),
        }
    }

    fn check_form(&self, value: ValueId, found: &TensorForm) -> Result<(), RankError> {
        match self.job.form(value) {
            Some(form) if form != *found => {
                let shown = |form: &TensorForm| format!("{} {:?}", form.element, form.dims);
                let tensor = self.job.graph.value(value).name.clone();
                Err(RankError::Shape { tensor, expected: shown(&form), found: shown(found) })
            }
            _ => Ok(()),
        }
    }

    /// The memory of a slot, if the bytes are there. It is free again when the slot is, whatever
    /// value has its site in this iteration.
    fn direct(&self, slot: usize, bytes: &[u8]) -> Option<Slice> {
        let mut places = self.sources.iter().flat_map(|source| &source.direct).map(|(_, slots)| &slots[slot]);
        let place = places.find(|place| place.as_ptr().cast_const() == bytes.as_ptr())?;
        // What is longer than its place is not there alone.
        place.slice(0..bytes.len()).ok()
    }

    fn copy(&mut self, source: usize, iteration: u64, bytes: &[u8]) -> Result<Slice, RankError> {
        let mut slice = self.staging(source, self.slot(iteration), bytes.len())?;
        of_slice_mut(&mut slice).copy_from_slice(bytes);
        let copies =
            if iteration == 0 { &mut self.report.copies_first } else { &mut self.report.copies_later };
        *copies += 1;
        self.report.copied_bytes += bytes.len() as u64;
        Ok(slice)
    }

    /// So much memory of a slot, which is free.
    fn staging(&mut self, source: usize, slot: usize, bytes: usize) -> Result<Slice, RankError> {
        let staging = &mut self.sources[source].staging[slot];
        if staging.as_ref().is_none_or(|slice| slice.len() < bytes) {
            *staging = Some(self.transport.memory(bytes.max(1))?);
        }
        Ok(staging.as_ref().and_then(|slice| slice.slice(0..bytes).ok()).expect("it is long enough"))
    }

    /// Has the site that allocated these bytes allocate in registered memory from now on.
    fn trace(&mut self, source: usize, bytes: &[u8], tracer: &mut Option<Tracer>) -> Result<(), RankError> {
        let Some(tracer) = tracer.as_mut().filter(|_| self.options.copies == Copies::None) else {
            return Ok(());
        };
        let Some(site) = tracer.site_of(bytes.as_ptr()) else { return Ok(()) };
        let mut known = self.sources.iter().flat_map(|source| &source.direct);
        // A known site allocates there already, but this time the value was elsewhere.
        if known.any(|(known, _)| *known == site) || self.sources[source].direct.len() >= SITES_MAX {
            return Ok(());
        }
        let mut slots = Vec::new();
        for _ in 0..self.options.depth {
            slots.push(self.transport.memory(site.bytes)?);
        }
        tracer.direct(site, &slots);
        self.sources[source].direct.push((site, slots));
        Ok(())
    }

    fn graph_outputs<'b>(
        &'b self,
        iteration: u64,
        received: &'b [(usize, Received)],
        outputs: &'b [Output],
    ) -> Vec<TensorRef<'b>> {
        let mut refs = Vec::new();
        for &value in self.job.graph.outputs() {
            if let Some(given) = self.given(iteration, received, value) {
                refs.push(given);
            } else if let Ok(place) = self.plan.computes.binary_search(&value) {
                let output = &outputs[place];
                let staging = || self.sources.iter().find(|source| source.output == Some(place));
                let bytes = match &output.bytes {
                    Some(values) => Some(values.bytes()),
                    None => staging()
                        .and_then(|source| source.staging[self.slot(iteration)].as_ref())
                        .map(of_slice),
                };
                refs.push(TensorRef { form: &output.form, bytes: bytes.unwrap_or(&[]) });
            }
        }
        refs
    }
}

/// The median of durations.
#[must_use]
pub fn median(mut durations: Vec<Duration>) -> Duration {
    durations.sort_unstable();
    durations.get(durations.len() / 2).copied().unwrap_or_default()
}
