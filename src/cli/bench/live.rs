//! Measures real ranks: each process runs this with its own rank.
//!
//! All decisions (iterations of a sample, whether to measure again) come from numbers that all
//! ranks share, so that all make the same calls.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach::collectives::{GpuBuffer, SplitError};
use pleach::transport::clock;
use pleach::transport::cuda::{CudaError, Gpu, gpus};
use pleach::{
    Buffer, Collective, CollectiveError, DataMut, DataType, Element, F8E4M3, F8E5M2, Group, Rank, ReduceOp,
    Reproducible, Stream, bf16, f16, transport,
};

use crate::cli::bench::pattern::{Pattern, repetitions_max};
use crate::cli::bench::{Measurement, SAMPLE_ITERATIONS_MAX, SAMPLE_MIN, Task, lengths};

/// Up to this many bytes of the whole a size gets all iterations; larger ones get fewer.
const SMALL_BYTES: u64 = 32 << 10;
const ITERATIONS: u64 = 2000;
const ITERATIONS_MIN: u64 = 10;
const WARMUP: u64 = 20;
const WARMUP_MIN: u64 = 2;

/// How long the measured iterations of a size may take, about: a machine that is busy with other
/// things gives fewer.
const SIZE_TIME_MAX: Duration = Duration::from_secs(1);

/// How much longer a sample is planned than it must be: the median iteration of a warm-up is not
/// the quickest.
const MARGIN: u64 = 2;

/// How often samples that came out too short are taken again with more iterations.
const ATTEMPTS: u32 = 4;

/// Least and most iterations on the same memory where memory is reused. The most applies up to the
/// third number of bytes for all iterations together.
const REUSE_MIN: u64 = 4;
const REUSE_MAX: u64 = 16;
const REUSE_BYTES: u64 = 64 << 20;

/// Least and most samples in a given time.
const SAMPLES_MIN: u64 = 5;
const SAMPLES_MAX: u64 = 1000;

/// How many times the given time a size may take with filling and checking, and after how many
/// samples that is looked at.
const SIZE_TIME_FACTOR: u32 = 20;
const SIZE_TIME_SAMPLES: u64 = 16;

/// Whether one clock ticks for all ranks: whether they run under one boot of one kernel.
pub(super) fn share_a_clock(group: &Group) -> Result<bool, CollectiveError> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    std::fs::read("/proc/sys/kernel/random/boot_id").ok().hash(&mut hasher);
    let boot = hasher.finish() as i64;
    let mut extremes = [boot, !boot];
    group.all_reduce(&mut extremes, ReduceOp::Max)?;
    Ok(extremes[0] == !extremes[1])
}

/// Measures one size, of calls of the group `measured`. `one_clock`: whether the ranks' clocks can
/// be compared.
pub(super) fn measure(
    group: &Group,
    measured: &Group,
    task: &Task,
    bytes: u64,
    one_clock: bool,
) -> Result<Measurement, CollectiveError> {
    match task.data_type {
        DataType::F32 => LiveBench::<f32>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::F64 => LiveBench::<f64>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::F16 => LiveBench::<f16>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::Bf16 => LiveBench::<bf16>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::I32 => LiveBench::<i32>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::I64 => LiveBench::<i64>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::U32 => LiveBench::<u32>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::U64 => LiveBench::<u64>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::I16 => LiveBench::<i16>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::U16 => LiveBench::<u16>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::I8 => LiveBench::<i8>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::F8E4M3 => LiveBench::<F8E4M3>::new((group, measured), task, bytes, one_clock)?.measure(),
        DataType::F8E5M2 => LiveBench::<F8E5M2>::new((group, measured), task, bytes, one_clock)?.measure(),
        _ => LiveBench::<u8>::new((group, measured), task, bytes, one_clock)?.measure(),
    }
}

/// Memory of one iteration, or of several in a row.
struct IterationMemory<T: Element> {
    /// The input; also the output, where that has as many elements.
    data: ElementBuffer<T>,
    output: Option<ElementBuffer<T>>,
}

struct LiveBench<'a, T: Element> {
    /// For what is not measured.
    group: &'a Group,
    /// With the algorithm that was asked for.
    measured: Group,
    /// In which calls take their place, where they work on a GPU's memory.
    stream: Option<Stream>,
    task: &'a Task,
    pattern: Pattern,
    count: usize,
    slots: Vec<IterationMemory<T>>,
    /// Iterations on each slot.
    times: usize,
    /// When each iteration of the sample began and the last ended; for barriers.
    stamps: Vec<i64>,
    one_clock: bool,
    /// Iterations that have been run.
    iteration: usize,
    errors: u64,
}

impl<'a, T: Element> LiveBench<'a, T> {
    fn new(
        (group, measured): (&'a Group, &Group),
        task: &'a Task,
        bytes: u64,
        one_clock: bool,
    ) -> Result<Self, CollectiveError> {
        let measured = match &task.variant {
            Some(variant) => measured.with_variant(variant.clone()),
            None => measured.clone(),
        };
        let stream = measured.info().gpu.as_ref().map(Stream::new).transpose()?;
        Ok(Self {
            group,
            measured,
            stream,
            task,
            pattern: Pattern::new(task),
            count: task.count(bytes),
            slots: Vec::new(),
            times: 1,
            stamps: Vec::new(),
            one_clock,
            iteration: 0,
            errors: 0,
        })
    }

    fn measure(mut self) -> Result<Measurement, CollectiveError> {
        let bytes = self.task.whole_bytes(self.count);
        let scaled = |most: u64, least: u64| (most * SMALL_BYTES / bytes.max(SMALL_BYTES)).max(least);
        let warmup = self.task.warmup.map_or_else(|| scaled(WARMUP, WARMUP_MIN), u64::from);
        self.grow(1)?;
        let warm: Result<Vec<_>, _> = (0..warmup).map(|_| self.sample()).collect();
        let mut warm = self.slowest(&warm?)?;
        warm.sort_unstable();
        let usual = warm[warm.len() / 2];
        let iterations = self
            .task
            .iterations
            .map_or_else(|| in_time(scaled(ITERATIONS, ITERATIONS_MIN), usual), u64::from);
        let mut wanted = SAMPLE_MIN.as_nanos() as u64 * MARGIN / (usual.as_nanos() as u64).max(1) + 1;
        let mut samples = Vec::new();
        for _ in 0..ATTEMPTS {
            let in_sample = self.shape(wanted, bytes)?;
            // Whatever is done at first use only, on every rank.
            self.sample()?;
            samples = match self.task.time {
                Some(time) => self.samples_for(time)?,
                None => {
                    let own: Result<Vec<_>, _> =
                        (0..iterations.div_ceil(in_sample as u64)).map(|_| self.sample()).collect();
                    self.slowest(&own?)?
                }
            };
            let shortest = samples.iter().min().copied().unwrap_or_default();
            if shortest >= SAMPLE_MIN || in_sample >= SAMPLE_ITERATIONS_MAX {
                break;
            }
            wanted = in_sample as u64 * MARGIN;
        }
        let mut errors = [self.errors as i64];
        self.group.all_reduce(&mut errors, ReduceOp::Sum)?;
        let in_sample = (self.slots.len() * self.times) as u32;
        let part_bytes = self.count * self.task.data_type.bytes();
        Ok(Measurement {
            algorithm: match self.task.is_exact() {
                true => Reproducible::Exact.to_string(),
                false => self.measured.algorithm_for(self.task.collective, part_bytes)?,
            },
            count: self.count,
            samples: samples.into_iter().map(|time| time / in_sample).collect(),
            errors: errors[0] as u64,
            over_links: None,
        })
    }

    /// Each sample's time on the rank that took longest.
    fn slowest(&self, own: &[Duration]) -> Result<Vec<Duration>, CollectiveError> {
        let mut times: Vec<i64> = own.iter().map(|time| time.as_nanos() as i64).collect();
        self.group.all_reduce(&mut times, ReduceOp::Max)?;
        Ok(times.into_iter().map(|time| Duration::from_nanos(time as u64)).collect())
    }

    /// Sets slots and iterations a slot for a sample of about `wanted` iterations; returns their
    /// number.
    fn shape(&mut self, wanted: u64, bytes: u64) -> Result<usize, CollectiveError> {
        let most = SAMPLE_ITERATIONS_MAX as u64;
        let wanted = match self.task.reuse {
            true => wanted.max((REUSE_BYTES / bytes.max(1)).clamp(REUSE_MIN, REUSE_MAX)).min(most),
            false => wanted.min(most),
        } as usize;
        let times = if self.task.reuse { repetitions_max(self.task) } else { 1 };
        let slots = wanted.div_ceil(times);
        self.times = wanted.div_ceil(slots);
        self.grow(slots)?;
        Ok(self.slots.len() * self.times)
    }

    /// As many samples as fit into a time.
    fn samples_for(&mut self, time: Duration) -> Result<Vec<Duration>, CollectiveError> {
        let own = [self.sample()?];
        let usual = self.slowest(&own)?[0].as_nanos().max(1);
        let count = ((time.as_nanos() / usual) as u64).clamp(SAMPLES_MIN, SAMPLES_MAX);
        let began = clock::now();
        let mut own = Vec::new();
        while (own.len() as u64) < count {
            let batch = SIZE_TIME_SAMPLES.min(count - own.len() as u64);
            for _ in 0..batch {
                own.push(self.sample()?);
            }
            // All ranks come to the same end.
            if self.slowest(&[clock::now() - began])?[0] > time * SIZE_TIME_FACTOR {
                break;
            }
        }
        self.slowest(&own)
    }

    /// Allocates memory for `iterations`.
    fn grow(&mut self, iterations: usize) -> Result<(), CollectiveError> {
        let (data, output) = lengths(self.task, self.group.rank(), self.count);
        while self.slots.len() < iterations {
            let space = |len| ElementBuffer::new(&self.measured, self.task.memory, len);
            self.slots.push(IterationMemory { data: space(data)?, output: output.map(space).transpose()? });
        }
        Ok(())
    }

    /// Fills, meets, runs the iterations of each slot, and checks; how long the runs took on this
    /// rank.
    fn sample(&mut self) -> Result<Duration, CollectiveError> {
        let (rank, first) = (self.group.rank(), self.iteration);
        for (slot, iteration) in self.slots.iter_mut().zip(first..) {
            self.pattern.fill(rank, iteration, bytemuck::cast_slice_mut(slot.data.elements_mut()));
            slot.data.upload()?;
        }
        self.stamps.clear();
        self.group.barrier()?;
        let begin = clock::now();
        if matches!(self.task.collective, Collective::Barrier) {
            for _ in 0..self.slots.len() * self.times {
                self.stamps.push(clock::now().0 as i64);
                self.measured.barrier()?;
            }
        } else {
            for slot in &mut self.slots {
                for _ in 0..self.times {
                    match &self.stream {
                        Some(stream) => run(&self.measured.on(stream), self.task, slot)?,
                        None => run(&self.measured, self.task, slot)?,
                    }
                }
            }
        }
        let end = clock::now();
        self.stamps.push(end.0 as i64);
        for (slot, iteration) in self.slots.iter_mut().zip(first..) {
            let output = slot.output.as_mut().unwrap_or(&mut slot.data);
            output.download()?;
            self.errors += self.pattern.count_errors(
                rank,
                iteration,
                self.times,
                bytemuck::cast_slice(output.elements()),
            );
        }
        self.iteration += self.slots.len();
        if matches!(self.task.collective, Collective::Barrier) && self.one_clock {
            self.check_barriers()?;
        }
        Ok(end - begin)
    }

    /// Nobody may have gone on to the next barrier before the last had come to this one.
    fn check_barriers(&mut self) -> Result<(), CollectiveError> {
        let mut latest = self.stamps.clone();
        self.group.all_reduce(&mut latest, ReduceOp::Max)?;
        let left = &self.stamps[1..];
        self.errors += left.iter().zip(&latest).filter(|(left, came)| left < came).count() as u64;
        Ok(())
    }
}

/// `wanted` iterations, or fewer if the time limit allows only fewer of length `usual`.
fn in_time(wanted: u64, usual: Duration) -> u64 {
    let possible = SIZE_TIME_MAX.as_nanos() / usual.as_nanos().max(1);
    wanted.min(u64::try_from(possible).unwrap_or(u64::MAX)).max(ITERATIONS_MIN)
}

fn run<T: Element>(group: &Group, task: &Task, slot: &mut IterationMemory<T>) -> Result<(), CollectiveError> {
    let IterationMemory { data, output } = slot;
    match (data, output) {
        (ElementBuffer::Gpu(data, _), None) => run_on(group, task, data, None),
        (ElementBuffer::Gpu(data, _), Some(ElementBuffer::Gpu(output, _))) => {
            run_on(group, task, data, Some(output))
        }
        (ElementBuffer::Registered(data), None) => run_on(group, task, data, None),
        (ElementBuffer::Registered(data), Some(ElementBuffer::Registered(output))) => {
            run_on(group, task, data, Some(output))
        }
        (ElementBuffer::Slice(data), None) => run_on(group, task, data, None),
        (ElementBuffer::Slice(data), Some(ElementBuffer::Slice(output))) => {
            run_on(group, task, data, Some(output))
        }
        _ => unreachable!("all memory of a task is of its kind"),
    }
}

/// The same on memory of one kind, whichever: what depends on the kind is compiled in the library
/// once, and not here for each collective.
fn run_on<T: Element>(
    group: &Group,
    task: &Task,
    data: &mut dyn DataMut<Element = T>,
    output: Option<&mut dyn DataMut<Element = T>>,
) -> Result<(), CollectiveError> {
    match (task.collective, output) {
        (Collective::AllReduce, _) => group.all_reduce(data, task.op),
        (Collective::Reduce { root }, _) => group.reduce(data, task.op, root),
        (Collective::Broadcast { root }, _) => group.broadcast(data, root),
        (Collective::AllGather, Some(output)) => group.all_gather(data, output),
        (Collective::ReduceScatter, Some(output)) => group.reduce_scatter(data, output, task.op),
        (Collective::Gather { root }, Some(output)) => group.gather(data, output, root),
        (Collective::Gather { root }, None) => group.gather(data, &mut Vec::<T>::new(), root),
        (Collective::Scatter { root }, Some(output)) => group.scatter(data, output, root),
        (Collective::AllToAll, Some(output)) => group.all_to_all(data, output),
        (Collective::SendRecv { from, to }, _) if group.rank() == from => group.send(data, to),
        (Collective::SendRecv { from, to }, _) if group.rank() == to => group.recv(data, from),
        // The other ranks of a message have no part in it.
        _ => Ok(()),
    }
}

// The memory of a measurement: registered memory, any memory of the process, or memory of a GPU.

/// Where the data of a collective is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    /// Registered with the group: peers reach it.
    Registered,
    /// Any memory of the process.
    Slice,
    /// A GPU's: of this number on every rank, or of the one that is a rank's turn on its host.
    Cuda(Option<u32>),
}

const KNOWN: &str = "there are registered (or host) slice cuda cuda:N";

impl FromStr for MemoryKind {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "registered" | "host" => Ok(Self::Registered),
            "slice" => Ok(Self::Slice),
            "cuda" => Ok(Self::Cuda(None)),
            _ => match name.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(ordinal)) => Ok(Self::Cuda(Some(ordinal))),
                _ => Err(KNOWN),
            },
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered => formatter.write_str("registered"),
            Self::Slice => formatter.write_str("slice"),
            Self::Cuda(None) => formatter.write_str("cuda"),
            Self::Cuda(Some(ordinal)) => write!(formatter, "cuda:{ordinal}"),
        }
    }
}

/// Why there is no group for a GPU's memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoGpuGroup {
    #[error("no GPU memory: {0}")]
    Driver(#[from] CudaError),
    #[error("no GPU memory: {0}")]
    Split(#[from] SplitError),
}

impl MemoryKind {
    /// Whether this process has such memory at all.
    pub(super) fn expect_there(self) -> Result<(), NoGpuGroup> {
        if let Self::Cuda(ordinal) = self {
            Gpu::open(ordinal.unwrap_or(0))?;
        }
        Ok(())
    }

    /// The group that works on this memory: the same one for the host's. Of several GPUs each rank
    /// of a host has its turn.
    pub(super) fn group(self, group: &Group, local_rank: Option<Rank>) -> Result<Group, NoGpuGroup> {
        let Self::Cuda(ordinal) = self else { return Ok(group.clone()) };
        let ordinal = match ordinal {
            Some(ordinal) => ordinal,
            // Where there is none, the one that is asked for is told to be missing.
            None => local_rank.unwrap_or(group.rank()) % gpus()?.max(1),
        };
        Ok(group.in_memory(transport::Space::Gpu { ordinal })?)
    }
}

/// Elements in memory of either kind.
enum ElementBuffer<T: Element> {
    Registered(Buffer<T>),
    Slice(Vec<T>),
    /// On a GPU, with the host's copy, which is filled and looked at.
    Gpu(GpuBuffer<T>, Vec<T>),
}

impl<T: Element> ElementBuffer<T> {
    /// Memory of `len` elements, all zero.
    fn new(group: &Group, kind: MemoryKind, len: usize) -> Result<Self, CollectiveError> {
        Ok(match kind {
            MemoryKind::Registered => Self::Registered(group.buffer(len)?),
            MemoryKind::Slice => Self::Slice(vec![T::zeroed(); len]),
            MemoryKind::Cuda(_) => Self::Gpu(group.gpu_buffer(len)?, vec![T::zeroed(); len]),
        })
    }

    /// Brings what was filled in to where the collective works on it.
    fn upload(&mut self) -> Result<(), CollectiveError> {
        match self {
            Self::Gpu(buffer, elements) => buffer.store(elements),
            _ => Ok(()),
        }
    }

    /// Brings what the collective left to where it is looked at.
    fn download(&mut self) -> Result<(), CollectiveError> {
        match self {
            Self::Gpu(buffer, elements) => buffer.load(elements),
            _ => Ok(()),
        }
    }

    /// The elements, or the host's copy of them.
    fn elements(&self) -> &[T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) | Self::Gpu(_, elements) => elements,
        }
    }

    /// The same elements, mutable.
    fn elements_mut(&mut self) -> &mut [T] {
        match self {
            Self::Registered(buffer) => buffer,
            Self::Slice(elements) | Self::Gpu(_, elements) => elements,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_takes_its_iterations_or_its_time() {
        assert_eq!(in_time(2000, Duration::from_micros(1)), 2000);
        assert_eq!(in_time(2000, Duration::ZERO), 2000);
        assert_eq!(in_time(2000, Duration::from_millis(20)), 50);
        assert_eq!(in_time(2000, Duration::from_secs(3)), ITERATIONS_MIN);
    }
}

#[cfg(test)]
mod memory_tests {
    use super::*;

    #[test]
    fn kinds_of_memory_are_read_as_they_are_written() {
        for kind in
            [MemoryKind::Registered, MemoryKind::Slice, MemoryKind::Cuda(None), MemoryKind::Cuda(Some(3))]
        {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("host".parse(), Ok(MemoryKind::Registered));
        for broken in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:99999999999"] {
            assert_eq!(broken.parse::<MemoryKind>(), Err(KNOWN), "{broken}");
        }
    }
}
