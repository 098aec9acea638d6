//! Networks and machines as TOML files that people write.
//!
//! ```toml
//! name = "lenet"
//! [[layer]]
//! kind = "convolution"      # square kernels over square feature maps
//! inputs = 1                # feature maps that it reads
//! outputs = 6               # feature maps that it makes
//! kernel = 5                # rows of a kernel
//! side = 28                 # rows of a feature map that it makes
//! [[layer]]
//! name = "classes"          # by default layer2
//! kind = "fully-connected"
//! inputs = 1176
//! outputs = 10
//! ```
//!
//! ```toml
//! name = "my-cluster"
//! tflop_per_s = 1.3         # that training reaches on one node
//! gb_per_s = 6              # that a node sends while it receives as many
//! latency_us = 2            # of a message on the wire
//! message_us = 30           # with all that software adds; by default the latency
//! communication_share = 0.1 # of the cores; by default 0
//! ```

use serde::Deserialize;

use super::{Layer, Machine, Network, PlanError, Rates, Shape};

/// Longest text that is read, in bytes.
pub const FILE_BYTES_MAX: usize = 1 << 20;

/// Why a text is no network or no machine.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// More than [`FILE_BYTES_MAX`].
    #[error("longer than {FILE_BYTES_MAX} bytes; a network or machine is a short text")]
    TooLong,
    /// No TOML, or other keys than those that are read.
    #[error("{line}:{column}: {message}")]
    Toml {
        /// Which line, from 1.
        line: usize,
        /// Which character of the line, from 1.
        column: usize,
        /// As the TOML reader says it, in one line.
        message: String,
    },
    /// A layer without a key that its kind needs.
    #[error("layer '{}' has no {key}; a convolution needs kernel and side", .layer.escape_debug())]
    Missing {
        /// The name of the layer.
        layer: String,
        /// The key.
        key: &'static str,
    },
    /// A layer with a key that its kind has not.
    #[error("layer '{}' has a {key}; leave it out of a fully connected layer", .layer.escape_debug())]
    Needless {
        /// The name of the layer.
        layer: String,
        /// The key.
        key: &'static str,
    },
    /// Numbers outside of their ranges.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkTable {
    name: String,
    #[serde(default)]
    layer: Vec<LayerTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerTable {
    name: Option<String>,
    kind: Kind,
    inputs: u64,
    outputs: u64,
    kernel: Option<u64>,
    side: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Convolution,
    FullyConnected,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineTable {
    name: String,
    tflop_per_s: f64,
    gb_per_s: f64,
    latency_us: f64,
    message_us: Option<f64>,
    #[serde(default)]
    communication_share: f64,
}

/// The network of a text.
///
/// # Errors
///
/// The first fault; one of TOML with its line and column.
pub fn network_from_toml(text: &str) -> Result<Network, FileError> {
    let table: NetworkTable = parsed(text)?;
    let layers = (1..).zip(table.layer).map(|(number, layer)| layer.read(number));
    Ok(Network::new(table.name, layers.collect::<Result<_, _>>()?)?)
}

/// The machine of a text.
///
/// # Errors
///
/// The first fault; one of TOML with its line and column.
pub fn machine_from_toml(text: &str) -> Result<Machine, FileError> {
    let table: MachineTable = parsed(text)?;
    let rates = Rates {
        flop_per_s: table.tflop_per_s * 1e12,
        bytes_per_s: table.gb_per_s * 1e9,
        latency_s: table.latency_us / 1e6,
        message_s: table.message_us.unwrap_or(table.latency_us) / 1e6,
        communication_share: table.communication_share,
    };
    Ok(Machine::new(table.name, rates)?)
}

impl LayerTable {
    fn read(self, number: usize) -> Result<Layer, FileError> {
        let name = self.name.unwrap_or_else(|| format!("layer{number}"));
        let (inputs, outputs) = (self.inputs, self.outputs);
        let shape = match self.kind {
            Kind::Convolution => {
                let missing = |key| FileError::Missing { layer: name.clone(), key };
                let kernel = self.kernel.ok_or_else(|| missing("kernel"))?;
                let side = self.side.ok_or_else(|| missing("side"))?;
                Shape::Convolution { inputs, outputs, kernel, side }
            }
            Kind::FullyConnected => {
                for (key, value) in [("kernel", self.kernel), ("side", self.side)] {
                    if value.is_some() {
                        return Err(FileError::Needless { layer: name, key });
                    }
                }
                Shape::FullyConnected { inputs, outputs }
            }
        };
        Ok(Layer::new(name, shape)?)
    }
}

fn parsed<'de, T: Deserialize<'de>>(text: &'de str) -> Result<T, FileError> {
    if text.len() > FILE_BYTES_MAX {
        return Err(FileError::TooLong);
    }
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let before = text.get(..at).unwrap_or_default();
        let (line, start) = before.char_indices().fold((1, 0), |(line, start), (at, character)| {
            if character == '\n' { (line + 1, at + 1) } else { (line, start) }
        });
        let message: String = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let message = message.escape_debug().to_string();
        FileError::Toml { line, column: before[start..].chars().count() + 1, message }
    })
}
