//! What the ranks of a partial all-reduce agree on before its first round.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach_vocabulary::{DataType, Factor, Rank, ReduceOp};

/// What becomes of a contribution that comes after its rank was bound without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Late {
    /// It is added to the rank's next contribution, or given alone if the next round opens before
    /// that.
    #[default]
    Carry,
    /// It counts in no round.
    Drop,
    /// The next round reduces it apart, beside the round's own contributions.
    Correct,
}

/// By what a sum is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Divisor {
    /// By nothing.
    #[default]
    None,
    /// By the number of ranks of the group.
    World,
    /// By the number of ranks whose contributions are in it.
    Contributors,
}

/// Whose readiness opens a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opener {
    /// So many ranks.
    Quorum(u32),
    /// A rank that is drawn for each round from this seed, alike on all ranks.
    Drawn { seed: u64 },
    /// All ranks but so many.
    AllBut(u32),
}

/// How long a round stays closed after its opener was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grace {
    /// So long.
    Fixed(Duration),
    /// As long as this many in a thousand of the contributions took that came in time.
    Learned { permille: u32 },
}

/// When a round opens, what becomes of late contributions, and by what sums are divided; the same
/// on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// As it was asked for.
    op: ReduceOp,
    opener: Opener,
    grace: Grace,
    late: Late,
    divisor: Divisor,
    staleness_max: u32,
}

/// How many rounds in a row a rank may be left out, unless the activation says otherwise.
const STALENESS_MAX: u32 = 8;

impl Activation {
    /// [`Activation::eager_majority`] by seed 0.
    pub const MAJORITY: Self = Self { divisor: Divisor::World, ..Self::of(Opener::Drawn { seed: 0 }) };

    const fn of(opener: Opener) -> Self {
        Self {
            op: ReduceOp::Sum,
            opener,
            grace: Grace::Fixed(Duration::ZERO),
            late: Late::Carry,
            divisor: Divisor::None,
            staleness_max: STALENESS_MAX,
        }
    }

    /// Opens a round when all ranks are ready that have not abstained, as an all-reduce does.
    #[must_use]
    pub fn all() -> Self {
        Self::of(Opener::AllBut(0))
    }

    /// Opens a round when `ranks` ranks are ready, so at least as many contributions are in it: or
    /// those of all ranks that have not abstained, if these are fewer.
    #[must_use]
    pub fn quorum(ranks: u32) -> Self {
        Self::of(Opener::Quorum(ranks))
    }

    /// Eager-SGD's solo: the first rank that is ready opens the round; late contributions are
    /// carried, and sums divided by the number of ranks. Staleness is bounded, other than in the
    /// paper.
    #[must_use]
    pub fn eager_solo() -> Self {
        Self::quorum(1).divisor(Divisor::World)
    }

    /// Eager-SGD's majority: a rank that is drawn anew for each round, alike on all ranks, opens
    /// the round. Half of the ranks are in it in expectation only, as in the paper;
    /// [`Activation::quorum`] guarantees a number.
    #[must_use]
    pub fn eager_majority(seed: u64) -> Self {
        Self::of(Opener::Drawn { seed }).divisor(Divisor::World)
    }

    /// Chen's backup workers: a round opens when all but `backups` ranks are ready. Late
    /// contributions are dropped, and sums divided by the number of contributors.
    #[must_use]
    pub fn backup_workers(backups: u32) -> Self {
        Self::of(Opener::AllBut(backups)).late(Late::Drop).divisor(Divisor::Contributors)
    }

    /// BIDMach's laggard-resistant all-reduce: a round opens when the share `threshold` (0 to 1) of
    /// `ranks` ranks is ready, rounded up. Late contributions are dropped. In BIDMach ranks may end
    /// with different bits; here they do not.
    #[must_use]
    pub fn laggard_resistant(threshold: f64, ranks: u32) -> Self {
        // A product that is a whole number must not be rounded up.
        let quorum = (threshold * f64::from(ranks) - 1e-9).ceil();
        let quorum = if quorum > 0.0 { quorum as u32 } else { 0 };
        Self::quorum(quorum).late(Late::Drop)
    }

    /// Opens a round `after` the first rank was ready, or when all are. Late contributions are
    /// dropped whole, and sums divided by the number of contributors.
    #[must_use]
    pub fn deadline(after: Duration) -> Self {
        let quorum = Self::quorum(if after.is_zero() { 0 } else { 1 });
        quorum.grace(after).late(Late::Drop).divisor(Divisor::Contributors)
    }

    /// As [`Activation::deadline`], after a time that is learned: the percentile (above 0, at most
    /// 100, to a tenth) of the times by which contributions came after the first of their round. It
    /// is that of the newest 20 rounds in which no rank was late, and the first 20 rounds wait for
    /// all ranks. The first rank learns it and opens the rounds, so all ranks have one deadline.
    ///
    /// OptiReduce (NSDI 2025) learns its timeout as a tail percentile of its first rounds. Other
    /// than there, the deadline is learned anew while rounds go on: a rank that was left out
    /// [too often](Activation::staleness_max) is waited for, and then the round counts.
    #[must_use]
    pub fn learned_deadline(percentile: f64) -> Self {
        let permille = (percentile * 10.0).round();
        // A number that is none becomes 0, which is refused.
        let grace = Grace::Learned { permille: permille as u32 };
        Self { grace, ..Self::quorum(1).late(Late::Drop).divisor(Divisor::Contributors) }
    }

    /// Combines contributions by this operation: by a sum unless changed. There are sum, avg, prod,
    /// min, max, and, or, xor, and premultiplied sums.
    ///
    /// An average is a sum that is divided by the number of contributors, or as the activation
    /// [says](Activation::divisor). The factor of a premultiplied sum is this rank's own: each rank
    /// multiplies its contribution when it hands that over, and rounds once.
    #[must_use]
    pub fn combined_by(self, op: ReduceOp) -> Self {
        Self { op, ..self }
    }

    /// Has a round stay closed for this long after its opener was there, unless all ranks are
    /// ready before.
    #[must_use]
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace: Grace::Fixed(grace), ..self }
    }

    /// What becomes of late contributions: they are carried unless changed.
    #[must_use]
    pub fn late(self, late: Late) -> Self {
        Self { late, ..self }
    }

    /// By what sums are divided: by nothing unless changed, averages by the number of contributors.
    /// Other operations are not divided.
    #[must_use]
    pub fn divisor(self, divisor: Divisor) -> Self {
        Self { divisor, ..self }
    }

    /// How many rounds in a row a rank may be left out: the next round waits for it. 8 unless
    /// changed; 0 has every round wait for all.
    #[must_use]
    pub fn staleness_max(self, rounds: u32) -> Self {
        Self { staleness_max: rounds, ..self }
    }

    /// Whether rounds of so many ranks can open by it.
    ///
    /// # Errors
    ///
    /// See [`ActivationError`].
    pub fn expect_ranks(&self, ranks: u32) -> Result<(), ActivationError> {
        if let Grace::Learned { permille } = self.grace
            && !(1..=1000).contains(&permille)
        {
            return Err(ActivationError::Percentile);
        }
        match self.opener {
            Opener::Quorum(quorum) if quorum == 0 || quorum > ranks => {
                Err(ActivationError::Quorum { quorum, ranks })
            }
            Opener::AllBut(backups) if backups >= ranks => Err(ActivationError::Quorum { quorum: 0, ranks }),
            _ => Ok(()),
        }
    }

    /// Whether each round of so many ranks waits for all that have not abstained.
    #[must_use]
    pub fn waits_for_all(&self, ranks: u32) -> bool {
        match self.opener {
            _ if self.staleness_max == 0 => true,
            Opener::Quorum(quorum) => quorum == ranks,
            Opener::AllBut(backups) => backups == 0,
            Opener::Drawn { .. } => ranks == 1,
        }
    }

    /// By what contributions are combined, before anything is divided.
    pub(crate) fn op(&self) -> ReduceOp {
        match self.op {
            ReduceOp::Avg | ReduceOp::PremulSum(_) => ReduceOp::Sum,
            op => op,
        }
    }

    /// By what this rank multiplies its contributions.
    pub(crate) fn factor(&self) -> Option<Factor> {
        self.op.parted().1
    }

    pub(crate) fn opener(&self) -> Opener {
        self.opener
    }

    pub(crate) fn grace_time(&self) -> Grace {
        self.grace
    }

    /// What becomes of late contributions.
    #[must_use]
    pub fn late_rule(&self) -> Late {
        self.late
    }

    /// By what sums are divided.
    #[must_use]
    pub fn division(&self) -> Divisor {
        match (self.op, self.divisor) {
            (ReduceOp::Avg, Divisor::None) => Divisor::Contributors,
            (_, divisor) => divisor,
        }
    }

    pub(crate) fn rounds_left_out_max(&self) -> u32 {
        self.staleness_max
    }
}

impl fmt::Display for Activation {
    /// When a round opens, as it is read where it can be read.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grace = match self.grace {
            Grace::Fixed(grace) => grace,
            Grace::Learned { permille } => {
                return write!(formatter, "deadline:p{}", f64::from(permille) / 10.0);
            }
        };
        match self.opener {
            Opener::Quorum(1) if !grace.is_zero() => return write!(formatter, "deadline:{grace:?}"),
            Opener::Quorum(1) => formatter.write_str("solo"),
            Opener::Quorum(ranks) => write!(formatter, "quorum:{ranks}"),
            Opener::Drawn { seed: 0 } => formatter.write_str("majority"),
            Opener::Drawn { seed } => write!(formatter, "majority by seed {seed}"),
            Opener::AllBut(0) => formatter.write_str("all"),
            Opener::AllBut(backups) => write!(formatter, "all but {backups}"),
        }?;
        if grace.is_zero() { Ok(()) } else { write!(formatter, "+{grace:?}") }
    }
}

/// The texts of [`Late`] and [`Divisor`].
macro_rules! named {
    ($type:ident, $what:literal, $($name:literal => $value:ident),*) => {
        impl fmt::Display for $type {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(match self { $(Self::$value => $name),* })
            }
        }

        impl FromStr for $type {
            type Err = ActivationError;

            fn from_str(text: &str) -> Result<Self, ActivationError> {
                match text {
                    $($name => Ok(Self::$value),)*
                    _ => Err(ActivationError::Unknown {
                        text: text.to_owned(),
                        what: $what,
                        known: concat!($($name, " "),*).trim_end(),
                    }),
                }
            }
        }
    };
}

named!(Late, "rule for late contributions", "carry" => Carry, "drop" => Drop, "correct" => Correct);
named!(Divisor, "divisor", "none" => None, "world" => World, "contributors" => Contributors);

impl FromStr for Activation {
    type Err = ActivationError;

    /// `all`, `solo`, `majority`, `quorum:K`, `quorum:K+GRACE`, `deadline:D` or `deadline:pN`, with
    /// times as `20ms` or `1.5s`, and a percentile as `p95`.
    fn from_str(text: &str) -> Result<Self, ActivationError> {
        let unknown = || ActivationError::Unknown {
            text: text.to_owned(),
            what: "activation",
            known: "all solo majority quorum:K quorum:K+GRACE deadline:D deadline:pN",
        };
        Ok(match text {
            "all" => Self::all(),
            "solo" => Self::eager_solo(),
            "majority" => Self::eager_majority(0),
            _ => {
                let (name, value) = text.split_once(':').ok_or_else(unknown)?;
                match name {
                    "quorum" => {
                        let (ranks, grace) = value.split_once('+').unwrap_or((value, "0s"));
                        let ranks = ranks.parse().map_err(|_| unknown())?;
                        Self::quorum(ranks).grace(duration(grace).ok_or_else(unknown)?)
                    }
                    "deadline" => match value.strip_prefix('p') {
                        Some(percentile) => {
                            Self::learned_deadline(percentile.parse().map_err(|_| unknown())?)
                        }
                        None => Self::deadline(duration(value).ok_or_else(unknown)?),
                    },
                    _ => return Err(unknown()),
                }
            }
        })
    }
}

/// A time with its unit: ns, us, ms or s.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    let start = text.find(char::is_alphabetic)?;
    let (number, unit) = text.split_at(start);
    let unit_s = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    let number: f64 = number.parse().ok().filter(|number: &f64| *number >= 0.0)?;
    Duration::try_from_secs_f64(number * unit_s).ok()
}

/// What makes two partial all-reduces the same: all ranks compare it before the first round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) len: usize,
    pub(crate) data_type: DataType,
    pub(crate) activation: Activation,
    /// Whether the rank has a thread that binds while its caller computes.
    pub(crate) has_thread: bool,
    /// Whether the rank can multiply elements of this type by its factor, if it has one.
    pub(crate) can_multiply: bool,
}

/// Words of [`Terms::to_words`].
pub(crate) const WORDS: usize = 12;

impl Terms {
    /// The words by which ranks tell each other their terms.
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let Activation { opener, grace, late, staleness_max, .. } = self.activation;
        let (op, divisor) = (self.activation.op(), self.activation.division());
        let (grace, permille) = match grace {
            Grace::Fixed(grace) => (grace, 0),
            Grace::Learned { permille } => (Duration::ZERO, u64::from(permille) + 1),
        };
        let (kind, value) = match opener {
            Opener::Quorum(ranks) => (0, ranks.into()),
            Opener::Drawn { seed } => (1, seed),
            Opener::AllBut(backups) => (2, backups.into()),
        };
        [
            self.len as u64,
            self.data_type as u64,
            op_word(op),
            kind,
            value,
            u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX),
            late as u64,
            divisor as u64,
            staleness_max.into(),
            self.has_thread.into(),
            self.can_multiply.into(),
            permille,
        ]
    }

    /// The first rank whose words are not this rank's, with its terms as text.
    pub(crate) fn find_difference(self, all: &[u64]) -> Option<(Rank, String)> {
        let own = self.to_words();
        let (words, rank) = all.as_chunks::<WORDS>().0.iter().zip(0..).find(|(words, _)| **words != own)?;
        Some((
            rank,
            Self::of_words(words).map_or_else(|| "something unknown".to_owned(), |it| it.to_string()),
        ))
    }

    /// The terms of a rank, from its words.
    fn of_words(words: &[u64; WORDS]) -> Option<Self> {
        let [len, data_type, op, kind, value, grace_ns, late, divisor, staleness_max, more @ ..] = *words;
        let [has_thread, can_multiply, permille] = more;
        let opener = match kind {
            0 => Opener::Quorum(value as u32),
            1 => Opener::Drawn { seed: value },
            _ => Opener::AllBut(value as u32),
        };
        let activation = Activation {
            op: OPS.into_iter().find(|it| op_word(*it) == op)?,
            opener,
            grace: match permille.checked_sub(1) {
                Some(permille) => Grace::Learned { permille: permille as u32 },
                None => Grace::Fixed(Duration::from_nanos(grace_ns)),
            },
            late: [Late::Carry, Late::Drop, Late::Correct].into_iter().find(|it| *it as u64 == late)?,
            divisor: [Divisor::None, Divisor::World, Divisor::Contributors]
                .into_iter()
                .find(|it| *it as u64 == divisor)?,
            staleness_max: staleness_max as u32,
        };
        Some(Self {
            len: len as usize,
            data_type: DataType::ALL.into_iter().find(|it| *it as u64 == data_type)?,
            activation,
            has_thread: has_thread == 1,
            can_multiply: can_multiply == 1,
        })
    }

    /// Whether a group of so many ranks can carry the terms out; the answer is the same on all
    /// ranks.
    pub(crate) fn check(self, ranks: u32) -> Result<(), ActivationError> {
        let Self { data_type, activation, .. } = self;
        let op = activation.op();
        if !self.has_thread {
            return Err(ActivationError::NoThread);
        }
        if !op.fits(data_type) {
            return Err(ActivationError::Operation { op, data_type });
        }
        if !self.can_multiply {
            return Err(ActivationError::Factor { data_type });
        }
        if activation.division() != Divisor::None && op != ReduceOp::Sum {
            return Err(ActivationError::Divisor { op, divisor: activation.division() });
        }
        activation.expect_ranks(ranks)
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, data_type, activation, has_thread, can_multiply } = self;
        let Activation { late, staleness_max, .. } = activation;
        let (op, divisor) = (activation.op(), activation.division());
        write!(formatter, "{len} {data_type} ({op}), {activation}, late: {late}, divisor: {divisor}")?;
        write!(formatter, ", left out at most {staleness_max} rounds")?;
        if !can_multiply {
            formatter.write_str(", times a factor that does not fit")?;
        }
        if *has_thread { Ok(()) } else { formatter.write_str(", without Progress::Thread") }
    }
}

/// The operations by which contributions are combined.
const OPS: [ReduceOp; 7] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::And, ReduceOp::Or, ReduceOp::Xor];

/// The number of an operation in [`Terms::to_words`].
fn op_word(op: ReduceOp) -> u64 {
    OPS.iter().position(|it| *it == op).map_or(u64::MAX, |position| position as u64)
}

/// Why a partial all-reduce cannot be carried out as it was asked for; the same on all ranks.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ActivationError {
    /// A text that names nothing.
    #[error("'{text}' is no {what}; there are {known}")]
    Unknown {
        /// The text.
        text: String,
        /// What it was to name.
        what: &'static str,
        /// The texts that name something.
        known: &'static str,
    },
    /// A round that would open at once or never.
    #[error(
        "a round that waits for {quorum} of {ranks} ranks opens {}; name 1 to {ranks} ranks, and a deadline above zero",
        if *quorum == 0 { "at once" } else { "never" }
    )]
    Quorum {
        /// How many ranks were named.
        quorum: u32,
        /// How many there are.
        ranks: u32,
    },
    /// An operation without a meaning for the elements.
    #[error("a partial all-reduce cannot combine {data_type} by {op}; take sum, avg, prod, min or max")]
    Operation {
        /// The operation.
        op: ReduceOp,
        /// The type of the elements.
        data_type: DataType,
    },
    /// A divisor for something that is not a sum.
    #[error("{op} is not divided by {divisor}; take the operation sum, or the divisor none")]
    Divisor {
        /// The operation.
        op: ReduceOp,
        /// The divisor.
        divisor: Divisor,
    },
    /// A factor that elements cannot be multiplied by.
    #[error(
        "{data_type} is not multiplied by this factor: floats by a float, integers by an integer, and in the memory of a \
         GPU nothing; scale contributions there, and take sum"
    )]
    Factor {
        /// The type of the elements.
        data_type: DataType,
    },
    /// A deadline that is the percentile of nothing, or of more than all.
    #[error("a learned deadline is a percentile above 0 and at most 100, to a tenth, as 'deadline:p95'")]
    Percentile,
    /// Nobody could bind while the caller computes.
    #[error(
        "a partial all-reduce needs a thread that goes on while the caller computes; join with Progress::Thread"
    )]
    NoThread,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(activation: Activation) -> Terms {
        Terms { len: 3, data_type: DataType::F32, activation, has_thread: true, can_multiply: true }
    }

    #[test]
    fn activations_are_read_from_their_texts_and_others_are_refused() {
        for (text, expected) in [
            ("all", Activation::all()),
            ("solo", Activation::eager_solo()),
            ("majority", Activation::eager_majority(0)),
            ("quorum:3", Activation::quorum(3)),
            ("quorum:3+20ms", Activation::quorum(3).grace(Duration::from_millis(20))),
            ("deadline:1.5s", Activation::deadline(Duration::from_millis(1500))),
            ("deadline:p95", Activation::learned_deadline(95.0)),
            ("deadline:p99.9", Activation::learned_deadline(99.9)),
        ] {
            assert_eq!(text.parse::<Activation>(), Ok(expected), "{text}");
            assert_eq!(expected.to_string().parse::<Activation>(), Ok(expected), "{text}");
        }
        for text in [
            "",
            "some",
            "quorum",
            "quorum:",
            "quorum:-1",
            "quorum:3+",
            "deadline:20",
            "deadline:-1s",
            "deadline:p",
        ] {
            let error = text.parse::<Activation>().expect_err(text);
            assert!(error.to_string().contains("there are all solo majority"), "{error}");
        }
        assert_eq!(("drop".parse(), "world".parse()), (Ok(Late::Drop), Ok(Divisor::World)));
        let error = "never".parse::<Late>().expect_err("no rule");
        assert!(error.to_string().ends_with("there are carry drop correct"), "{error}");
    }

    #[test]
    fn terms_that_cannot_be_carried_out_are_refused_and_say_what_to_do() {
        let refused = [
            (terms(Activation::quorum(0)), "at once"),
            (terms(Activation::quorum(5)), "name 1 to 4 ranks"),
            (terms(Activation::backup_workers(4)), "name 1 to 4 ranks"),
            (terms(Activation::deadline(Duration::ZERO)), "deadline above zero"),
            (Terms { has_thread: false, ..terms(Activation::all()) }, "Progress::Thread"),
            (terms(Activation::all().combined_by(ReduceOp::And)), "cannot combine f32 by and"),
            (Terms { can_multiply: false, ..terms(Activation::all()) }, "scale contributions"),
            (terms(Activation::learned_deadline(0.0)), "above 0 and at most 100"),
            (terms(Activation::learned_deadline(f64::NAN)), "above 0 and at most 100"),
            (terms(Activation::learned_deadline(100.1)), "above 0 and at most 100"),
            (terms(Activation::eager_solo().combined_by(ReduceOp::Prod)), "take the operation sum"),
            (terms(Activation::eager_solo().combined_by(ReduceOp::Max)), "not divided by world"),
        ];
        for (terms, text) in refused {
            let error = terms.check(4).expect_err(text);
            assert!(error.to_string().contains(text), "{error}");
        }
        for activation in [
            Activation::all(),
            Activation::quorum(4),
            Activation::backup_workers(3),
            Activation::laggard_resistant(0.6, 4),
            Activation::deadline(Duration::from_nanos(1)),
            Activation::learned_deadline(100.0),
            Activation::all().combined_by(ReduceOp::Avg),
            Activation::eager_solo().combined_by(ReduceOp::Avg),
            Activation::all().combined_by(ReduceOp::premul_sum(2.5)),
        ] {
            assert_eq!(terms(activation).check(4), Ok(()), "{activation}");
        }
        assert_eq!(Activation::laggard_resistant(0.6, 4), Activation::quorum(3).late(Late::Drop));
        assert_eq!(Activation::laggard_resistant(0.55, 100), Activation::quorum(55).late(Late::Drop));
    }

    #[test]
    fn averages_and_products_are_sums_that_are_divided_or_of_other_contributions() {
        let avg = Activation::all().combined_by(ReduceOp::Avg);
        assert_eq!((avg.op(), avg.division()), (ReduceOp::Sum, Divisor::Contributors));
        assert_eq!(avg.divisor(Divisor::World).division(), Divisor::World);
        assert_eq!(
            Activation::all().divisor(Divisor::World).combined_by(ReduceOp::Avg).division(),
            Divisor::World
        );
        let scaled = |factor: f64| Activation::all().combined_by(ReduceOp::premul_sum(factor));
        assert_eq!((scaled(2.0).op(), scaled(2.0).division()), (ReduceOp::Sum, Divisor::None));
        // Each rank has a factor of its own.
        assert_eq!(terms(scaled(2.0)).find_difference(&terms(scaled(3.0)).to_words()), None);
        assert_eq!(terms(scaled(2.0)).find_difference(&terms(Activation::all()).to_words()), None);
    }

    #[test]
    fn the_first_rank_with_other_terms_is_found_and_its_terms_are_named() {
        let own = terms(Activation::quorum(2));
        let other = Terms { len: 4, ..terms(Activation::backup_workers(1)) };
        let all = [own.to_words(), own.to_words(), other.to_words()].concat();
        let (rank, text) = own.find_difference(&all).expect("rank 2 differs");
        assert_eq!(rank, 2);
        assert!(text.starts_with("4 f32 (sum), all but 1, late: drop, divisor: contributors"), "{text}");
        assert_eq!(own.find_difference(&all[..2 * WORDS]), None);
    }
}
