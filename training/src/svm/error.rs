//! Why a machine is not trained.

use pleach_collectives::CollectiveError;

/// Why a machine is not trained.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum SvmError {
    /// A parameter is outside of its range.
    #[error("{name} is {value}; give {range}")]
    Parameter {
        /// Of the parameter.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        range: &'static str,
    },
    /// Labels and samples are not as many.
    #[error("there are {labels} labels for {samples} samples; give one label for each sample")]
    Labels {
        /// How many labels there are.
        labels: usize,
        /// How many samples there are.
        samples: usize,
    },
    /// There are fewer samples than ranks.
    #[error("{samples} samples for {ranks} ranks; start at most as many ranks as there are samples")]
    FewSamples {
        /// Of all ranks.
        samples: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// There are more samples than numbers for them.
    #[error("{samples} samples; a machine is trained on at most {}", u32::MAX - 1)]
    ManySamples {
        /// Of all ranks.
        samples: u64,
    },
    /// All samples have one label.
    #[error("all samples have the label {label}; a support vector machine separates at least two labels")]
    OneLabel {
        /// The label.
        label: i32,
    },
    /// There are more classes than pairs of classes can be trained.
    #[error("{classes} different labels; at most {max} classes are trained one against one")]
    ManyLabels {
        /// How many there are.
        classes: usize,
        /// How many there may be.
        max: usize,
    },
    /// A rank passed other parameters than rank 0.
    #[error("rank {rank} has other parameters than rank 0; pass the same on all ranks")]
    ParametersDiffer {
        /// The rank.
        rank: u32,
    },
    /// Another rank has bad input.
    #[error("rank {rank} has bad input, which its own error names; all ranks end")]
    OtherRank {
        /// The rank.
        rank: u32,
    },
    /// Kernel values are beyond the range of `f32`.
    #[error(
        "the kernel values of sample {sample} are beyond the range of numbers; scale the features or lower gamma, offset and degree"
    )]
    NotFinite {
        /// Its number among the samples of all ranks.
        sample: u32,
    },
    /// A pair of samples violates the conditions and no step changes its factors.
    #[error(
        "samples {up} and {low} violate the conditions by {gap:e} and no step makes progress; scale the features, or raise the tolerance"
    )]
    NoProgress {
        /// The number of one sample in the order of all ranks.
        up: u32,
        /// That of the other one.
        low: u32,
        /// By how much.
        gap: f64,
    },
    /// A rank sent bytes that are no samples.
    #[error("rank {rank} sent bytes that are no samples; start all ranks from the same version of pleach")]
    Malformed {
        /// The rank.
        rank: u32,
    },
    /// A collective failed: a rank was lost, or the deadline passed.
    #[error("{0}")]
    Collective(#[from] CollectiveError),
}
