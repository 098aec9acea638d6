//! Whole groups in one process and in virtual time: the real engine over the simulated device.
//!
//! A [`Scenario`] is everything that one simulation does, drawn from a seed; [`run`](fn@run)
//! carries it out and checks it, with checkers that share no code with what they check (results
//! against an oracle, guard bytes, races by vector clocks, fence, liveness, causes of errors,
//! release). A scenario
//! runs on a [`Cluster`]. Where ranks are late, rounds of a partial all-reduce follow the calls,
//! with checkers of their own ([`crate::partial`]).
//!
//! **Invariant:** a run is a function of the code and the scenario, so a seed that fails fails
//! again.

pub mod calls;
mod cause;
mod cluster;
mod in_rounds;
pub(crate) mod in_window;
mod late;
pub mod many;
mod mutation;
mod run;
mod scenario;
mod time_bound;
mod trial;
mod watch;
pub mod wired;

pub use crate::compute::simulated::ComputeMutant;
pub use cluster::{Cluster, Member, NoProgress};
pub use run::run;
pub use scenario::{Abort, CALLS_MAX, DEPTH_MAX, Limits, Mismatch, RANKS_MAX, Scenario, TIMEOUT_FAR};
pub use trial::{ABORT_NOTICED_WITHIN, Checker, Failure, GRACE, MISMATCH_NOTICED_WITHIN, TrialReport};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use pleach_schedule::generate::{Access, Algorithm};
use pleach_transport::sim::{AccessKind, Random, World};
use pleach_transport::{Device, SharedMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Parts, Rank, ReduceOp};

use crate::call::{Counts, Paired};
use crate::compute::{F8E4M3, F8E5M2};
use crate::engine::{Address, Bytes};

// ---- One call of a scenario, and how its data lie in the memory of a rank.

/// One call, as all ranks make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The operation and its root.
    pub collective: Collective,
    /// Element type.
    pub data_type: DataType,
    /// Reduction.
    pub op: ReduceOp,
    /// Elements of one part.
    pub count: usize,
    /// By part, where they are not equally long.
    pub lengths: Option<Vec<usize>>,
    /// How; `None` leaves it to the planner.
    pub algorithm: Option<Algorithm>,
    /// In which form, if the algorithm is named.
    pub access: Access,
    /// Whether output and input are one memory, where they can be.
    pub in_place: bool,
    /// By rank: whether input and output are registered.
    pub registered: Vec<(bool, bool)>,
    /// A rank that enters the call so much later than it could.
    pub late: Option<(Rank, Duration)>,
}

impl CallPlan {
    /// The length of an input or output that holds these parts, in bytes.
    fn bytes_of(&self, parts: Parts) -> usize {
        let elements: usize = match &self.lengths {
            None => parts.len() * self.count,
            Some(lengths) => parts.iter().map(|part| lengths[part as usize]).sum(),
        };
        elements * self.data_type.bytes()
    }

    /// The length of all parts, in bytes.
    fn whole_bytes(&self, ranks: u32) -> usize {
        self.bytes_of(Parts::run(0, self.collective.parts(ranks)))
    }

    /// The counts that a rank gives for the call.
    fn counts(&self, rank: Rank, ranks: u32) -> Counts {
        let Some(lengths) = &self.lengths else { return Counts::Each(self.count) };
        let mut paired = Paired { given: vec![0; ranks as usize], taken: vec![0; ranks as usize] };
        for (part, &length) in (0..).zip(lengths) {
            let Some((from, to)) = self.collective.ends(part, ranks) else { return Counts::listed(lengths) };
            if from == rank {
                paired.given[to as usize] = length;
            }
            if to == rank {
                paired.taken[from as usize] = length;
            }
        }
        Counts::Paired(Arc::new(paired))
    }

    /// Where a part lies in an input or output that holds these parts, in bytes.
    fn range(&self, parts: Parts, part: u32) -> Range<usize> {
        let before = match &self.lengths {
            None => parts.position(part) as usize * self.count,
            Some(lengths) => {
                let earlier = parts.iter().take(parts.position(part) as usize);
                earlier.map(|part| lengths[part as usize]).sum()
            }
        };
        let start = before * self.data_type.bytes();
        start..start + self.bytes_of(Parts::one(part))
    }

    /// How input and output of a rank lie in one memory, if they are to and can.
    fn overlap(&self, rank: Rank, ranks: u32) -> Option<Overlap> {
        let inputs = self.collective.input_parts(rank, ranks);
        let outputs = self.collective.output_parts(rank, ranks);
        // The parts to a rank and from it would lie at the same place.
        let is_exchange = self.collective == Collective::AllToAll && ranks > 1;
        if !self.in_place || is_exchange || inputs.is_empty() || outputs.is_empty() {
            return None;
        }
        let first = |parts: Parts| parts.iter().next().unwrap_or_default();
        Some(if inputs.len() <= outputs.len() {
            let start = self.range(outputs, first(inputs)).start;
            Overlap::InputInOutput(start..start + self.bytes_of(inputs))
        } else {
            let start = self.range(inputs, first(outputs)).start;
            Overlap::OutputInInput(start..start + self.bytes_of(outputs))
        })
    }
}

/// Which of input and output lies in the other one, and where, in bytes.
enum Overlap {
    InputInOutput(Range<usize>),
    OutputInInput(Range<usize>),
}

impl fmt::Display for CallPlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, data_type, op, count, .. } = self;
        match &self.lengths {
            None => write!(formatter, "{collective} of {count} {data_type} ({op}) by ")?,
            Some(lengths) => {
                let (most, all) = (lengths.iter().max().unwrap_or(&0), lengths.iter().sum::<usize>());
                write!(formatter, "{collective} of {all} {data_type} in parts of up to {most} ({op}) by ")?;
            }
        }
        match &self.algorithm {
            Some(algorithm) => write!(formatter, "{algorithm} ({})", self.access)?,
            None => write!(formatter, "choice")?,
        }
        if self.in_place {
            write!(formatter, " in place")?;
        }
        if let Some((rank, by)) = self.late {
            write!(formatter, ", rank {rank} late by {by:?}")?;
        }
        Ok(())
    }
}

// ---- Memory of simulated callers, with guard bytes around the buffer of a call.

/// Bytes before and behind a buffer that no rank may touch.
const GUARD_BYTES: usize = 192;

/// The value of a guard byte, by its place.
fn guard(index: usize) -> u8 {
    0xa5 ^ (index as u8).wrapping_mul(29)
}

/// The value of a byte, by its place, after its owner used the memory for something else.
fn refilled(index: usize) -> u8 {
    0x3c ^ (index as u8).wrapping_mul(101)
}

enum Storage {
    Registered(Slice),
    Private(Vec<u8>),
}

/// A caller's slice in the middle of memory that stays as it is.
struct Guarded {
    storage: Storage,
    front: usize,
    len: usize,
}

impl Guarded {
    /// `content`, at `skew` bytes from where memory is aligned.
    ///
    /// # Panics
    ///
    /// When this machine has no memory left.
    fn new(device: &mut dyn Device, content: &[u8], is_registered: bool, skew: usize) -> Self {
        let (front, len) = (GUARD_BYTES + skew, content.len());
        let mut whole: Vec<u8> = (0..front + len + GUARD_BYTES).map(guard).collect();
        whole[front..front + len].copy_from_slice(content);
        let storage = if is_registered {
            let memory = SharedMemory::new(whole.len()).expect("memory for a simulated caller");
            let region = device.register(memory).expect("shared memory can be registered");
            region.whole().store(&whole);
            Storage::Registered(region.whole())
        } else {
            Storage::Private(whole)
        };
        Self { storage, front, len }
    }

    /// The buffer that the call gets.
    fn bytes(&mut self) -> Bytes {
        self.part(0, self.len)
    }

    /// A part of the buffer.
    fn part(&mut self, start: usize, len: usize) -> Bytes {
        let range = self.front + start..self.front + start + len;
        match &mut self.storage {
            Storage::Registered(slice) => Bytes::Registered(slice.slice(range).expect("inside of the slice")),
            Storage::Private(whole) => Bytes::Private { base: Address::of(&mut whole[range]), len },
        }
    }

    /// Everything, guards too.
    fn whole(&self) -> Vec<u8> {
        match &self.storage {
            Storage::Registered(slice) => slice.to_vec(),
            Storage::Private(whole) => whole.clone(),
        }
    }

    /// The content of the buffer.
    fn content(&self) -> Vec<u8> {
        self.whole()[self.front..self.front + self.len].to_vec()
    }

    /// The first guard byte that was touched, counted from the slice's first byte.
    fn broken_guard(&self) -> Option<isize> {
        let whole = self.whole();
        let content = self.front..self.front + self.len;
        let index = (0..whole.len()).find(|index| !content.contains(index) && whole[*index] != guard(*index));
        index.map(|index| index as isize - self.front as isize)
    }

    /// The call has ended, and the owner uses the buffer for something else.
    fn refill(&mut self) {
        let range = self.front..self.front + self.len;
        let fresh: Vec<u8> = range.clone().map(refilled).collect();
        match &mut self.storage {
            Storage::Registered(slice) => slice.slice(range).expect("inside of the slice").store(&fresh),
            Storage::Private(whole) => whole[range].copy_from_slice(&fresh),
        }
    }

    /// The first byte, counted from the slice's first one, that is not as [`Guarded::refill`] and
    /// guards left it.
    fn changed_since_refill(&self) -> Option<isize> {
        let whole = self.whole();
        let content = self.front..self.front + self.len;
        let expected = |index: usize| if content.contains(&index) { refilled(index) } else { guard(index) };
        let index = (0..whole.len()).find(|index| whole[*index] != expected(*index));
        index.map(|index| index as isize - self.front as isize)
    }

    /// Where it is, guards too.
    fn addresses(&self) -> std::ops::Range<usize> {
        let (base, len) = match &self.storage {
            Storage::Registered(slice) => (slice.as_ptr() as usize, slice.len()),
            Storage::Private(whole) => (whole.as_ptr() as usize, whole.len()),
        };
        base..base + len
    }

    /// Tells checkers that its owner touches all of the content.
    fn report(&self, world: &World, rank: Rank, kind: AccessKind) {
        let base = match &self.storage {
            Storage::Registered(slice) => slice.as_ptr().cast_const(),
            Storage::Private(whole) => whole.as_ptr(),
        };
        if self.len > 0 {
            world.accessed(rank, base.wrapping_add(self.front), self.len, kind, world.now());
        }
    }
}

// ---- The results of calls, computed from every rank's input alone and with none of the code under
// test.

/// Most ranks whose powers of two between 1/2 and 2 have a product that is exact in every type.
const EXACT_FACTORS_MAX: u32 = 8;

/// `rank`'s input of a call, drawn from the seed: any integers, floats small enough that nothing
/// overflows.
fn oracle_input(seed: u64, call: usize, rank: Rank, plan: &CallPlan, ranks: u32) -> Vec<u8> {
    let mut random = Random::new(seed).split("input").split_number(call as u64).split_number(u64::from(rank));
    let mut bytes = vec![0; plan.bytes_of(plan.collective.input_parts(rank, ranks))];
    if !plan.data_type.is_float() {
        random.fill(&mut bytes);
        return bytes;
    }
    let (low, width) = if plan.op == ReduceOp::Prod { (0.9, 0.2) } else { (-1.0, 2.0) };
    let coarse = matches!(plan.data_type, DataType::F8E4M3 | DataType::F8E5M2);
    for element in bytes.chunks_exact_mut(plan.data_type.bytes()) {
        if coarse && plan.op == ReduceOp::Prod {
            // Exact in any order: of other numbers so few bits hold no product of many to within a
            // known error.
            let scale = if ranks <= EXACT_FACTORS_MAX { random.below(3) as i32 - 1 } else { 0 };
            let sign = if random.coin() { -1.0 } else { 1.0 };
            write_float(plan.data_type, sign * 2f64.powi(scale), element);
            continue;
        }
        let unit = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
        write_float(plan.data_type, low + width * unit, element);
    }
    bytes
}

fn write_float(data_type: DataType, value: f64, element: &mut [u8]) {
    match data_type {
        DataType::F64 => element.copy_from_slice(&value.to_ne_bytes()),
        DataType::F32 => element.copy_from_slice(&(value as f32).to_ne_bytes()),
        DataType::F16 => element.copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DataType::F8E4M3 => element[0] = F8E4M3::from_f32(value as f32).to_bits(),
        DataType::F8E5M2 => element[0] = F8E5M2::from_f32(value as f32).to_bits(),
        _ => element.copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
    }
}

fn read_float(data_type: DataType, bytes: &[u8]) -> f64 {
    let four = |bytes: &[u8]| u32::from_ne_bytes(std::array::from_fn(|index| bytes[index]));
    let two = |bytes: &[u8]| u16::from_ne_bytes([bytes[0], bytes[1]]);
    match data_type {
        DataType::F64 => f64::from_ne_bytes(std::array::from_fn(|index| bytes[index])),
        DataType::F32 => f64::from(f32::from_bits(four(bytes))),
        DataType::F16 => f16::from_bits(two(bytes)).to_f64(),
        DataType::F8E4M3 => F8E4M3::from_bits(bytes[0]).to_f32().into(),
        DataType::F8E5M2 => F8E5M2::from_bits(bytes[0]).to_f32().into(),
        _ => bf16::from_bits(two(bytes)).to_f64(),
    }
}

fn read_integer(data_type: DataType, bytes: &[u8]) -> i128 {
    match data_type {
        DataType::I64 => i64::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I32 => i32::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U64 => u64::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U32 => u32::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U16 => u16::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I16 => i16::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I8 => (bytes[0] as i8).into(),
        _ => bytes[0].into(),
    }
}

fn wrapped(data_type: DataType, value: i128) -> i128 {
    match data_type {
        DataType::I64 => (value as i64).into(),
        DataType::I32 => (value as i32).into(),
        DataType::U64 => (value as u64).into(),
        DataType::U32 => (value as u32).into(),
        DataType::U16 => (value as u16).into(),
        DataType::I16 => (value as i16).into(),
        DataType::I8 => (value as i8).into(),
        _ => (value as u8).into(),
    }
}

/// Half of the distance between 1 and the next number, generously.
fn rounding(data_type: DataType) -> f64 {
    match data_type {
        DataType::F64 => f64::EPSILON,
        DataType::F32 => f64::from(f32::EPSILON),
        DataType::F16 => 2f64.powi(-10),
        DataType::F8E4M3 => 2f64.powi(-3),
        DataType::F8E5M2 => 2f64.powi(-2),
        _ => 2f64.powi(-7),
    }
}

/// A rank's input of a call, with the call that the rank made, which may differ from the others'.
struct RankInput<'a> {
    plan: &'a CallPlan,
    bytes: Vec<u8>,
}

/// The first wrong element of a rank's output, and how it differs. `inputs`: by rank.
fn oracle_difference(plan: &CallPlan, rank: Rank, inputs: &[RankInput<'_>], output: &[u8]) -> Option<String> {
    let ranks = inputs.len() as u32;
    let size = plan.data_type.bytes();
    let collective = plan.collective;
    let parts = collective.output_parts(rank, ranks);
    if output.len() != plan.bytes_of(parts) {
        return Some(format!("{} bytes instead of {}", output.len(), plan.bytes_of(parts)));
    }
    parts.iter().find_map(|part| {
        let contributors = (0..ranks).filter(|source| collective.contributes(*source, part, ranks));
        let contributions: Option<Vec<&[u8]>> = contributors
            .map(|source| {
                // Who was asked for something else may still have agreed with this rank on what is
                // between the two.
                let RankInput { plan: theirs, bytes } = &inputs[source as usize];
                let is_same_kind = theirs.collective == plan.collective && theirs.data_type == plan.data_type;
                if !is_same_kind {
                    return None;
                }
                bytes.get(theirs.range(collective.input_parts(source, ranks), part))
            })
            .collect();
        let length = plan.range(parts, part).len();
        let Some(contributions) = contributions.filter(|all| all.iter().all(|bytes| bytes.len() == length))
        else {
            return Some(format!("part {part} came although who gives it was asked for something else"));
        };
        output[plan.range(parts, part)].chunks_exact(size).enumerate().find_map(|(index, found)| {
            let at = index * size..(index + 1) * size;
            let sources: Vec<&[u8]> = contributions.iter().map(|bytes| &bytes[at.clone()]).collect();
            let how = wrong_element(plan, &sources, found)?;
            Some(format!("element {index} of part {part} is {how}"))
        })
    })
}

fn wrong_element(plan: &CallPlan, sources: &[&[u8]], found: &[u8]) -> Option<String> {
    let CallPlan { data_type, op, .. } = *plan;
    if !plan.collective.reduces() {
        return (found != sources[0]).then(|| format!("{found:?}, not {:?}", sources[0]));
    }
    let ranks = sources.len();
    if !data_type.is_float() {
        let values = sources.iter().map(|bytes| read_integer(data_type, bytes));
        let folded = values.reduce(|a, b| match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => wrapped(data_type, a + b),
            ReduceOp::Prod => wrapped(data_type, a.wrapping_mul(b)),
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::And => a & b,
            ReduceOp::Or => a | b,
            ReduceOp::Xor => a ^ b,
        });
        let divisor = if op == ReduceOp::Avg { ranks as i128 } else { 1 };
        let expected = folded.unwrap_or_default() / divisor;
        let found = read_integer(data_type, found);
        return (found != expected).then(|| format!("{found}, not {expected}"));
    }
    let values: Vec<f64> = sources.iter().map(|bytes| read_float(data_type, bytes)).collect();
    let found = read_float(data_type, found);
    let step = rounding(data_type) * ranks as f64;
    let magnitude: f64 = values.iter().map(|value| value.abs()).sum();
    let (expected, tolerance) = match op {
        ReduceOp::Sum | ReduceOp::PremulSum(_) => (values.iter().sum(), step * magnitude),
        ReduceOp::Avg => (
            values.iter().sum::<f64>() / ranks as f64,
            2.0 * step * magnitude / ranks as f64 + f64::MIN_POSITIVE,
        ),
        ReduceOp::Prod => {
            let product: f64 = values.iter().product();
            (product, 2.0 * step * product.abs())
        }
        ReduceOp::Min => (values.iter().copied().fold(f64::INFINITY, f64::min), 0.0),
        ReduceOp::Max => (values.iter().copied().fold(f64::NEG_INFINITY, f64::max), 0.0),
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => {
            return Some(format!("{op} of {data_type} has no meaning"));
        }
    };
    // Averages in few bits may be so small that their last bit is worth more than their value.
    let least = match data_type {
        DataType::F16 => 2f64.powi(-23),
        DataType::F8E4M3 => 2f64.powi(-8),
        DataType::F8E5M2 => 2f64.powi(-15),
        _ => 0.0,
    };
    let close = (found - expected).abs() <= tolerance + if op == ReduceOp::Avg { least } else { 0.0 };
    (!close).then(|| format!("{found}, not {expected} (within {tolerance})"))
}

/// Whether a rank's result depends on what other ranks give.
fn depends_on_others(collective: Collective, rank: Rank, ranks: u32) -> bool {
    match collective {
        _ if ranks == 1 => false,
        Collective::Barrier => true,
        Collective::Broadcast { root } | Collective::Scatter { root } => rank != root,
        _ => !collective.output_parts(rank, ranks).is_empty(),
    }
}
