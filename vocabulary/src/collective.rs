//! What is asked for: collectives, element types, reduction operations.

use std::fmt;
use std::str::FromStr;

use crate::name::{UnknownName, named};
use crate::{Parts, Rank};

/// A collective operation, with its root where it has one.
///
/// Data are described by *parts*. All-reduce, reduce, broadcast and send-recv have one part: the
/// vector. All-gather, reduce-scatter, gather and scatter have one part a rank: part `r` is what
/// rank `r` gives (all-gather, gather) or gets (reduce-scatter, scatter). All-to-all has one for
/// every two ranks: of `p` ranks part `s·p + d` is what rank `s` gives to rank `d`. The parts of
/// one call need not be equally long, but each is as long on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Every rank ends with the reduction of all inputs.
    AllReduce,
    /// The root ends with the reduction of all inputs.
    Reduce {
        /// The root.
        root: Rank,
    },
    /// Every rank ends with the root's input.
    Broadcast {
        /// The root.
        root: Rank,
    },
    /// Every rank ends with all inputs, in rank order.
    AllGather,
    /// Rank `r` ends with part `r` of the reduction of all inputs.
    ReduceScatter,
    /// The root ends with all inputs, in rank order.
    Gather {
        /// The root.
        root: Rank,
    },
    /// Rank `r` ends with part `r` of the root's input.
    Scatter {
        /// The root.
        root: Rank,
    },
    /// Rank `r` ends with part `r` of every rank's input, in rank order.
    AllToAll,
    /// Nobody ends before all have begun. No data.
    Barrier,
    /// `to` ends with `from`'s input; the other ranks have no part in it.
    SendRecv {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
    },
}

impl Collective {
    /// How many parts the whole of the data has.
    #[must_use]
    pub fn parts(self, ranks: u32) -> u32 {
        match self {
            Self::AllGather | Self::ReduceScatter | Self::Gather { .. } | Self::Scatter { .. } => ranks,
            Self::AllToAll => ranks.saturating_mul(ranks),
            _ => 1,
        }
    }

    /// The parts that `rank`'s input holds, in order; empty when it has no input.
    #[must_use]
    pub fn input_parts(self, rank: Rank, ranks: u32) -> Parts {
        match self {
            Self::AllReduce | Self::Reduce { .. } => Parts::one(0),
            Self::Broadcast { root: from } | Self::SendRecv { from, .. } => Parts::one_if(rank == from, 0),
            Self::AllGather | Self::Gather { .. } => Parts::one(rank),
            Self::ReduceScatter => Parts::run(0, ranks),
            Self::Scatter { root } if rank == root => Parts::run(0, ranks),
            Self::AllToAll => Parts::run(rank * ranks, ranks),
            Self::Scatter { .. } | Self::Barrier => Parts::NONE,
        }
    }

    /// The parts that `rank`'s output holds, in order; empty when it has no output.
    #[must_use]
    pub fn output_parts(self, rank: Rank, ranks: u32) -> Parts {
        match self {
            Self::AllReduce | Self::Broadcast { .. } => Parts::one(0),
            Self::Reduce { root: to } | Self::SendRecv { to, .. } => Parts::one_if(rank == to, 0),
            Self::AllGather => Parts::run(0, ranks),
            Self::Gather { root } if rank == root => Parts::run(0, ranks),
            Self::ReduceScatter | Self::Scatter { .. } => Parts::one(rank),
            Self::AllToAll => Parts::every(rank, ranks, ranks),
            Self::Gather { .. } | Self::Barrier => Parts::NONE,
        }
    }

    /// Whether `contributor`'s input must be in part `part` of `rank`'s output (exactly once), for
    /// every rank and part that has an output.
    #[must_use]
    pub fn contributes(self, contributor: Rank, part: u32, ranks: u32) -> bool {
        match self {
            Self::AllReduce | Self::Reduce { .. } | Self::ReduceScatter => true,
            Self::Broadcast { root: from } | Self::SendRecv { from, .. } | Self::Scatter { root: from } => {
                contributor == from
            }
            Self::AllGather | Self::Gather { .. } => contributor == part,
            Self::AllToAll => contributor == part / ranks,
            Self::Barrier => false,
        }
    }

    /// Who gives a part and who gets it, where each part has one of either.
    #[must_use]
    pub fn ends(self, part: u32, ranks: u32) -> Option<(Rank, Rank)> {
        match self {
            Self::Gather { root } => Some((part, root)),
            Self::Scatter { root } => Some((root, part)),
            Self::AllToAll => Some((part / ranks, part % ranks)),
            Self::SendRecv { from, to } => Some((from, to)),
            _ => None,
        }
    }

    /// Whether inputs are combined by an operation.
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce { .. } | Self::ReduceScatter)
    }

    /// The root, if it has one.
    #[must_use]
    pub fn root(self) -> Option<Rank> {
        match self {
            Self::Reduce { root }
            | Self::Broadcast { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// The same with another root; itself when it has none.
    #[must_use]
    pub fn with_root(self, root: Rank) -> Self {
        match self {
            Self::Reduce { .. } => Self::Reduce { root },
            Self::Broadcast { .. } => Self::Broadcast { root },
            Self::Gather { .. } => Self::Gather { root },
            Self::Scatter { .. } => Self::Scatter { root },
            other => other,
        }
    }

    /// Its name on the command line, without the root.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::Reduce { .. } => "reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
            Self::SendRecv { .. } => "send-recv",
        }
    }

    /// One of each, in the order of [`Collective::NAMES`]; roots are rank 0, send-recv goes from
    /// rank 0 to rank 1.
    pub const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::Reduce { root: 0 },
        Self::Broadcast { root: 0 },
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather { root: 0 },
        Self::Scatter { root: 0 },
        Self::AllToAll,
        Self::Barrier,
        Self::SendRecv { from: 0, to: 1 },
    ];

    /// The collective of this name; roots are rank 0, send-recv goes from rank 0 to rank 1.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| collective.name() == name)
    }

    /// All names, as the command line spells them.
    pub const NAMES: [&'static str; 10] = [
        "all-reduce",
        "reduce",
        "broadcast",
        "all-gather",
        "reduce-scatter",
        "gather",
        "scatter",
        "all-to-all",
        "barrier",
        "send-recv",
    ];
}

impl fmt::Display for Collective {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())?;
        match self {
            Self::SendRecv { from, to } => write!(formatter, " from {from} to {to}"),
            other => other.root().map_or(Ok(()), |root| write!(formatter, " root {root}")),
        }
    }
}

/// Type of an element.
///
/// How each is summed (and multiplied, and averaged) in one step of a schedule, whatever the number
/// of its sources, and what happens to what is too large:
///
/// | type | combined in | rounded | too large becomes |
/// | --- | --- | --- | --- |
/// | `f64`, `f32` | itself, left to right | at each operation, to nearest even | infinity |
/// | `f16`, `bf16` | `f32`, left to right | once, at the end of the step, to nearest even | infinity |
/// | `f8e4m3` | `f32`, left to right | once, at the end of the step, to nearest even | NaN, as it has no infinity |
/// | `f8e5m2` | `f32`, left to right | once, at the end of the step, to nearest even | infinity |
/// | integers | itself | average: towards zero | its remainder: wraps |
///
/// Averages are divided before the one rounding, in the step that completes the sum. The 8-bit
/// floats do not saturate, as in ml_dtypes and PyTorch and unlike CUDA's own conversions: an
/// overflow stays visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DataType {
    /// IEEE binary32.
    F32 = 1,
    /// IEEE binary64.
    F64 = 2,
    /// IEEE binary16; reduced in f32 with one rounding a step.
    F16 = 3,
    /// bfloat16; reduced in f32 with one rounding a step.
    Bf16 = 4,
    /// 32-bit signed integer, wrapping.
    I32 = 5,
    /// 64-bit signed integer, wrapping.
    I64 = 6,
    /// 8-bit unsigned integer, wrapping.
    U8 = 7,
    /// 8-bit signed integer, wrapping.
    I8 = 8,
    /// 32-bit unsigned integer, wrapping.
    U32 = 9,
    /// 64-bit unsigned integer, wrapping.
    U64 = 10,
    /// `F8E4M3`; reduced in f32 with one rounding a step.
    F8E4M3 = 11,
    /// `F8E5M2`; reduced in f32 with one rounding a step.
    F8E5M2 = 12,
    /// 16-bit signed integer, wrapping.
    I16 = 13,
    /// 16-bit unsigned integer, wrapping.
    U16 = 14,
}

impl DataType {
    /// Every element type.
    pub const ALL: [Self; 14] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I32,
        Self::I64,
        Self::I16,
        Self::I8,
        Self::U32,
        Self::U64,
        Self::U16,
        Self::U8,
    ];

    /// Size of an element in bytes.
    #[must_use]
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Whether it is one of the floats; otherwise it is an integer.
    #[must_use]
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How inputs are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)] // Of a byte's alignment, as it is a part of what calls are compared by.
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Prod,
    /// Minimum; NaN if any input is NaN.
    Min,
    /// Maximum; NaN if any input is NaN.
    Max,
    /// Sum divided by the number of ranks, once at the end; integers round towards zero.
    Avg,
    /// Bits set in all inputs; integers only.
    And,
    /// Bits set in any input; integers only.
    Or,
    /// Bits set in an odd number of inputs; integers only.
    Xor,
    /// Sum of products: every rank's input is multiplied by its own factor first, each product
    /// rounded once to its type. Factors may differ from rank to rank and are no part of what must
    /// match: to the other ranks it is [`ReduceOp::Sum`]. See [`ReduceOp::premul_sum`].
    PremulSum(Factor),
}

/// The factor of a rank's input: a float for floats, an integer for integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Factor {
    is_float: bool,
    /// Of an `f64`, or an integer modulo 2^64, as products wrap.
    bits: [u8; 8],
}

impl Factor {
    /// The float, if it is one.
    #[must_use]
    pub const fn float(self) -> Option<f64> {
        if self.is_float { Some(f64::from_bits(u64::from_ne_bytes(self.bits))) } else { None }
    }

    /// The integer modulo 2^64, if it is one.
    #[must_use]
    pub const fn integer(self) -> Option<u64> {
        if self.is_float { None } else { Some(u64::from_ne_bytes(self.bits)) }
    }
}

impl From<f64> for Factor {
    fn from(factor: f64) -> Self {
        Self { is_float: true, bits: factor.to_bits().to_ne_bytes() }
    }
}

impl From<f32> for Factor {
    fn from(factor: f32) -> Self {
        f64::from(factor).into()
    }
}

impl From<i64> for Factor {
    fn from(factor: i64) -> Self {
        (factor as u64).into()
    }
}

impl From<u64> for Factor {
    fn from(factor: u64) -> Self {
        Self { is_float: false, bits: factor.to_ne_bytes() }
    }
}

impl From<i32> for Factor {
    fn from(factor: i32) -> Self {
        i64::from(factor).into()
    }
}

impl ReduceOp {
    /// Sum of every rank's input times that rank's factor. Floats of at most 32 bits are multiplied
    /// by the factor as an `f32`; integers wrap.
    #[must_use]
    pub fn premul_sum(factor: impl Into<Factor>) -> Self {
        Self::PremulSum(factor.into())
    }

    /// Whether this rank's input is multiplied first.
    #[inline]
    pub const fn has_factor(self) -> bool {
        matches!(self, Self::PremulSum(_))
    }

    /// The part that ranks agree about, and the factor of this rank's input.
    #[inline]
    pub const fn parted(self) -> (Self, Option<Factor>) {
        if let Self::PremulSum(factor) = self { (Self::Sum, Some(factor)) } else { (self, None) }
    }

    /// Its number on the wire.
    #[inline]
    pub const fn code(self) -> u64 {
        match self {
            Self::Sum | Self::PremulSum(_) => 1,
            Self::Prod => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::Avg => 5,
            Self::And => 6,
            Self::Or => 7,
            Self::Xor => 8,
        }
    }

    /// Every operation without a factor.
    pub const ALL: [Self; 8] =
        [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::And, Self::Or, Self::Xor];

    /// Whether it combines bits and not numbers.
    #[must_use]
    #[inline]
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }

    /// Whether it has a meaning for elements of this type: bitwise operations have none for floats,
    /// nor have factors that are floats for integers, and the other way round.
    #[must_use]
    #[inline]
    pub const fn fits(self, data_type: DataType) -> bool {
        match self {
            Self::PremulSum(factor) => factor.float().is_some() == data_type.is_float(),
            _ => !(self.is_bitwise() && data_type.is_float()),
        }
    }

    /// The names of the operations that fit a type, separated by spaces.
    #[must_use]
    pub fn fitting(data_type: DataType) -> String {
        let names: Vec<_> = Self::ALL.iter().filter(|op| op.fits(data_type)).map(|op| op.name()).collect();
        names.join(" ")
    }

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::PremulSum(_) => "premul-sum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How other libraries name element types.
const DATA_TYPE_ALIASES: [(&str, DataType); 23] = [
    ("float32", DataType::F32),
    ("float", DataType::F32),
    ("fp32", DataType::F32),
    ("float64", DataType::F64),
    ("double", DataType::F64),
    ("fp64", DataType::F64),
    ("float16", DataType::F16),
    ("half", DataType::F16),
    ("fp16", DataType::F16),
    ("bfloat16", DataType::Bf16),
    ("fp8_e4m3", DataType::F8E4M3),
    ("float8_e4m3fn", DataType::F8E4M3),
    ("fp8_e5m2", DataType::F8E5M2),
    ("float8_e5m2", DataType::F8E5M2),
    ("int32", DataType::I32),
    ("int", DataType::I32),
    ("int64", DataType::I64),
    ("int16", DataType::I16),
    ("int8", DataType::I8),
    ("uint32", DataType::U32),
    ("uint64", DataType::U64),
    ("uint16", DataType::U16),
    ("uint8", DataType::U8),
];

/// Its own name, or one that NCCL or PyTorch has for it, as `fp16` or `bfloat16`.
impl FromStr for DataType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        if let Some((_, data_type)) = DATA_TYPE_ALIASES.iter().find(|(alias, _)| *alias == name) {
            return Ok(*data_type);
        }
        named("element type", &Self::ALL, Self::name, name)
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named("reduction", &Self::ALL, Self::name, name)
    }
}
