//! Topologies known by name: boxes that people rent, and regular networks.
//!
//! A name is that of a family, then its numbers: `dgx-a100:2`, `torus:4x4@50`. [`PRESETS`] lists
//! the families, and each builder's doc says where its numbers come from. All links are duplex, so
//! every preset is symmetric.
//!
//! **Invariant:** sizes are checked against [`PRESET_RANKS_MAX`] and the limits of a topology
//! before anything is built.

use crate::topology::decimal::{NumberFault, bytes_per_s};
use crate::topology::{Builder, LINKS_MAX, NODES_MAX, NodeId, Topology, TopologyError};

mod boxes;
mod regular;

#[cfg(test)]
mod tests;

/// Most ranks of a preset.
pub const PRESET_RANKS_MAX: u64 = 4_096;

/// Bytes a second of 1 GB/s.
const GB_PER_S: u64 = 1_000_000_000;

/// What a link of a regular network carries in each direction where nothing else is asked for: an
/// NVLink of the second generation, or a port of 200 Gb/s.
const REGULAR_BYTES_PER_S: u64 = 25 * GB_PER_S;

/// A family of presets, for help texts.
#[derive(Clone, Copy, Debug)]
pub struct PresetForm {
    /// How it is asked for, as in `torus:AxB[xC][@GB/s]`.
    pub form: &'static str,
    /// What it is.
    pub about: &'static str,
    family: &'static str,
    numbers: Numbers,
    build: fn(&Asked) -> Result<Topology, PresetError>,
}

impl PresetForm {
    /// What stands before the numbers, as `torus`.
    #[must_use]
    pub fn family(&self) -> &'static str {
        self.family
    }
}

/// How the numbers of a family are written.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    /// There are none, and bandwidths are fixed.
    None,
    /// How many boxes, 1 where nothing is said; bandwidths are fixed.
    Boxes,
    /// So few to so many numbers with this between them; a bandwidth may follow.
    List(usize, usize, char),
}

/// What was asked for.
#[derive(Debug)]
struct Asked {
    form: &'static str,
    numbers: Vec<u64>,
    bytes_per_s: u64,
}

/// All families of presets.
pub const PRESETS: &[PresetForm] = &[
    PresetForm {
        form: "dgx-1p",
        about: "8 GPUs, hybrid cube mesh of single NVLinks, 20 GB/s each",
        family: "dgx-1p",
        numbers: Numbers::None,
        build: boxes::dgx_1p,
    },
    PresetForm {
        form: "dgx-1v",
        about: "8 GPUs, hybrid cube mesh of single and double NVLinks, 25 GB/s each",
        family: "dgx-1v",
        numbers: Numbers::None,
        build: boxes::dgx_1v,
    },
    PresetForm {
        form: "ndv2",
        about: "dgx-1v with the GPUs in the order of Azure NDv2",
        family: "ndv2",
        numbers: Numbers::None,
        build: boxes::ndv2,
    },
    PresetForm {
        form: "dgx-2",
        about: "16 GPUs on NVSwitch, 150 GB/s each",
        family: "dgx-2",
        numbers: Numbers::None,
        build: boxes::dgx_2,
    },
    PresetForm {
        form: "dgx-a100:N",
        about: "N boxes of 8 GPUs on NVSwitch, 300 GB/s each; across boxes 25 GB/s each in two planes",
        family: "dgx-a100",
        numbers: Numbers::Boxes,
        build: boxes::dgx_a100,
    },
    PresetForm {
        form: "dgx-h100:N",
        about: "N boxes of 8 GPUs on NVSwitch, 450 GB/s each; across boxes 50 GB/s each in eight rails",
        family: "dgx-h100",
        numbers: Numbers::Boxes,
        build: boxes::dgx_h100,
    },
    PresetForm {
        form: "mi250:N",
        about: "N boxes of 16 dies joined by links of 50 to 200 GB/s; across boxes 16 GB/s each",
        family: "mi250",
        numbers: Numbers::Boxes,
        build: boxes::mi250,
    },
    PresetForm {
        form: "ring:N[@GB/s]",
        about: "N ranks, each joined to the next, the last to the first",
        family: "ring",
        numbers: Numbers::List(1, 1, ','),
        build: regular::ring,
    },
    PresetForm {
        form: "mesh:N[@GB/s]",
        about: "N ranks, each joined to each",
        family: "mesh",
        numbers: Numbers::List(1, 1, ','),
        build: regular::mesh,
    },
    PresetForm {
        form: "torus:AxB[xC][@GB/s]",
        about: "a grid of ranks whose rows, columns and piles are rings",
        family: "torus",
        numbers: Numbers::List(2, 3, 'x'),
        build: regular::torus,
    },
    PresetForm {
        form: "fat-tree:K[@GB/s]",
        about: "K*K*K/4 ranks under three levels of switches of K ports",
        family: "fat-tree",
        numbers: Numbers::List(1, 1, ','),
        build: regular::fat_tree,
    },
    PresetForm {
        form: "dragonfly:G,A,P[@GB/s]",
        about: "G groups of A routers of P ranks; routers of a group and groups each joined to each",
        family: "dragonfly",
        numbers: Numbers::List(3, 3, ','),
        build: regular::dragonfly,
    },
    PresetForm {
        form: "star:N[@GB/s]",
        about: "N ranks on one switch",
        family: "star",
        numbers: Numbers::List(1, 1, ','),
        build: regular::star,
    },
];

/// Why a preset was not made.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PresetError {
    /// No family has this name.
    #[error("there is no preset '{name}'; there are {}", forms())]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// Not the numbers that the family has.
    #[error("'{name}' is not of the form {form}")]
    Form {
        /// What was asked for.
        name: String,
        /// What could have been.
        form: &'static str,
    },
    /// A number that is too small or too large, or odd where halves are needed.
    #[error("{form} does not go with {number}; take {allowed}")]
    Number {
        /// The family.
        form: &'static str,
        /// The number that was given.
        number: u64,
        /// What may be given.
        allowed: &'static str,
    },
    /// More ranks, nodes or links than can be worked with.
    #[error("'{form}' would have more than {limit} {what}; take a smaller one")]
    TooLarge {
        /// The family.
        form: &'static str,
        /// Of what.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// A bandwidth that is none.
    #[error("the bandwidth of '{name}' {fault}; write GB/s after '@', as in ring:8@12.5")]
    Bandwidth {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        fault: NumberFault,
    },
    /// All links together carry too much.
    #[error("'{name}': {error}")]
    Topology {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        error: TopologyError,
    },
}

pub(super) fn forms() -> String {
    PRESETS.iter().map(|preset| preset.form).collect::<Vec<_>>().join(", ")
}

/// The topology of a name such as `dgx-1v`, `dgx-a100:2`, `torus:4x4@50`.
///
/// # Errors
///
/// [`PresetError`], with the forms that there are.
pub fn preset(name: &str) -> Result<Topology, PresetError> {
    let (shape, bandwidth) = match name.split_once('@') {
        Some((shape, bandwidth)) => (shape, Some(bandwidth)),
        None => (name, None),
    };
    let (family, numbers) = match shape.split_once(':') {
        Some((family, numbers)) => (family, Some(numbers)),
        None => (shape, None),
    };
    let known = PRESETS.iter().find(|preset| preset.family == family);
    let known = known.ok_or_else(|| PresetError::Unknown { name: name.to_owned() })?;
    let asked = asked(known, name, numbers, bandwidth)?;
    (known.build)(&asked).map_err(|error| match error {
        PresetError::Topology { error, .. } => PresetError::Topology { name: name.to_owned(), error },
        error => error,
    })
}

fn asked(
    preset: &PresetForm,
    name: &str,
    numbers: Option<&str>,
    bandwidth: Option<&str>,
) -> Result<Asked, PresetError> {
    let form = preset.form;
    let wrong = || PresetError::Form { name: name.to_owned(), form };
    let (least, most, between) = match preset.numbers {
        Numbers::None => (0, 0, ','),
        Numbers::Boxes => (0, 1, ','),
        Numbers::List(least, most, between) => (least, most, between),
    };
    let is_digits = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = |text: &str| Some(text).filter(is_digits).and_then(|text| text.parse::<u64>().ok());
    let numbers = match numbers {
        None => Vec::new(),
        Some(text) => text.split(between).map(number).collect::<Option<Vec<_>>>().ok_or_else(wrong)?,
    };
    if !(least..=most).contains(&numbers.len()) {
        return Err(wrong());
    }
    let bytes_per_s = match (bandwidth, preset.numbers) {
        (None, _) => REGULAR_BYTES_PER_S,
        (Some(_), Numbers::None | Numbers::Boxes) => return Err(wrong()),
        (Some(text), Numbers::List(..)) => {
            bytes_per_s(text).map_err(|fault| PresetError::Bandwidth { name: name.to_owned(), fault })?
        }
    };
    Ok(Asked { form, numbers, bytes_per_s })
}

impl Asked {
    /// How many boxes.
    fn boxes(&self) -> Result<u64, PresetError> {
        let boxes = self.numbers.first().copied().unwrap_or(1);
        if boxes == 0 { Err(self.refused(0, "1 or more boxes")) } else { Ok(boxes) }
    }

    fn refused(&self, number: u64, allowed: &'static str) -> PresetError {
        PresetError::Number { form: self.form, number, allowed }
    }

    /// Refuses what is too large, before it is built. Links are counted in each direction.
    fn check_size(
        &self,
        ranks: Option<u64>,
        switches: Option<u64>,
        links: Option<u64>,
    ) -> Result<(), PresetError> {
        let nodes = ranks.zip(switches).and_then(|(ranks, switches)| ranks.checked_add(switches));
        for (what, count, limit) in [
            ("ranks", ranks, PRESET_RANKS_MAX),
            ("nodes", nodes, NODES_MAX as u64),
            ("links", links, LINKS_MAX as u64),
        ] {
            if count.is_none_or(|count| count > limit) {
                return Err(PresetError::TooLarge { form: self.form, what, limit });
            }
        }
        Ok(())
    }
}

/// The product, where it fits.
fn product(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1_u64, |product, &factor| product.checked_mul(factor))
}

fn build(builder: Builder) -> Result<Topology, PresetError> {
    // Whoever asked fills in the name.
    builder.build().map_err(|error| PresetError::Topology { name: String::new(), error })
}

/// Joins nodes by a link in each direction with the usual latency.
fn join(builder: &mut Builder, one: NodeId, other: NodeId, bytes_per_s: u64) {
    builder.duplex(one, other, bytes_per_s, crate::topology::LATENCY_NS);
}
