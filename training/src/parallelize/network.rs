//! Networks as the planner sees them: layers with their shapes.

use super::PlanError;

/// Most layers of a network.
pub const LAYERS_MAX: usize = 4_096;

/// Most inputs, outputs, kernel rows or output rows of a layer.
pub const DIMENSION_MAX: u64 = 1 << 24;

/// Most weights of a layer, and most multiply-adds that a layer needs for one image.
const OPERATIONS_MAX: u64 = 1 << 50;

/// The bytes of a weight, an activation or a gradient: 32-bit floating point.
pub const NUMBER_BYTES: u64 = 4;

/// The shape of a layer. Biases and normalization are left out: they are few numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Square kernels over square feature maps.
    Convolution {
        /// Feature maps that it reads (ifm in the paper).
        inputs: u64,
        /// Feature maps that it makes (ofm).
        outputs: u64,
        /// Rows of a kernel.
        kernel: u64,
        /// Rows of a feature map that it makes.
        side: u64,
    },
    /// A matrix.
    FullyConnected {
        /// Numbers that it reads.
        inputs: u64,
        /// Numbers that it makes.
        outputs: u64,
    },
}

/// A layer with weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    name: String,
    shape: Shape,
}

impl Layer {
    /// A layer.
    ///
    /// # Errors
    ///
    /// [`PlanError::Dimension`] for a dimension that is 0 or beyond [`DIMENSION_MAX`], and
    /// [`PlanError::LargeLayer`].
    pub fn new(name: impl Into<String>, shape: Shape) -> Result<Self, PlanError> {
        let layer = Self { name: name.into(), shape };
        let dimensions = match shape {
            Shape::Convolution { inputs, outputs, kernel, side } => {
                vec![("inputs", inputs), ("outputs", outputs), ("kernel", kernel), ("side", side)]
            }
            Shape::FullyConnected { inputs, outputs } => vec![("inputs", inputs), ("outputs", outputs)],
        };
        for (dimension, value) in dimensions {
            if !(1..=DIMENSION_MAX).contains(&value) {
                return Err(PlanError::Dimension { layer: layer.name, dimension, value });
            }
        }
        let operations = match shape {
            Shape::Convolution { inputs, outputs, kernel, side } => {
                [inputs, outputs, kernel, kernel, side, side]
                    .iter()
                    .try_fold(1, |product: u64, factor| product.checked_mul(*factor))
            }
            Shape::FullyConnected { inputs, outputs } => inputs.checked_mul(outputs),
        };
        match operations {
            Some(operations) if operations <= OPERATIONS_MAX => Ok(layer),
            _ => Err(PlanError::LargeLayer { layer: layer.name }),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many numbers it learns.
    #[must_use]
    pub fn weights(&self) -> u64 {
        match self.shape {
            Shape::Convolution { inputs, outputs, kernel, .. } => inputs * outputs * kernel * kernel,
            Shape::FullyConnected { inputs, outputs } => inputs * outputs,
        }
    }

    /// Multiply-adds of one pass over one image.
    #[must_use]
    pub fn multiply_adds(&self) -> u64 {
        match self.shape {
            Shape::Convolution { side, .. } => self.weights() * side * side,
            Shape::FullyConnected { .. } => self.weights(),
        }
    }

    /// Floating point operations of the three passes for each byte of weight gradients that are
    /// sent and of weights that come back: 0.75·ow·oh·images, whatever the kernel and the number of
    /// feature maps (Das et al., section 3.1). Sending and receiving at once would double it.
    #[must_use]
    pub fn flop_per_byte(&self, images_per_rank: f64) -> f64 {
        let pass = 2.0 * self.multiply_adds() as f64 * images_per_rank;
        3.0 * pass / (2 * NUMBER_BYTES * self.weights()) as f64
    }
}

/// A network: layers in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    name: String,
    layers: Vec<Layer>,
}

/// The names of the built-in networks.
pub const NETWORKS: [&str; 4] = ["vgg-a", "overfeat-fast", "dnn-7", "resnet-50"];

impl Network {
    /// A network of these layers.
    ///
    /// # Errors
    ///
    /// [`PlanError::Layers`] for none, or more than [`LAYERS_MAX`].
    pub fn new(name: impl Into<String>, layers: Vec<Layer>) -> Result<Self, PlanError> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(PlanError::Layers { layers: layers.len() });
        }
        Ok(Self { name: name.into(), layers })
    }

    /// A built-in network, by one of [`NETWORKS`].
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let layers = match name {
            "vgg-a" => vgg_a(),
            "overfeat-fast" => overfeat_fast(),
            "dnn-7" => dnn_7(),
            "resnet-50" => resnet_50(),
            _ => return None,
        };
        Some(Self { name: name.to_owned(), layers })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its layers, the first of the forward pass first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }
}

fn convolution(name: impl Into<String>, inputs: u64, outputs: u64, kernel: u64, side: u64) -> Layer {
    Layer { name: name.into(), shape: Shape::Convolution { inputs, outputs, kernel, side } }
}

fn fully_connected(name: impl Into<String>, inputs: u64, outputs: u64) -> Layer {
    Layer { name: name.into(), shape: Shape::FullyConnected { inputs, outputs } }
}

/// Configuration A of Simonyan and Zisserman (arXiv 1409.1556).
fn vgg_a() -> Vec<Layer> {
    vec![
        convolution("conv1", 3, 64, 3, 224),
        convolution("conv2", 64, 128, 3, 112),
        convolution("conv3", 128, 256, 3, 56),
        convolution("conv4", 256, 256, 3, 56),
        convolution("conv5", 256, 512, 3, 28),
        convolution("conv6", 512, 512, 3, 28),
        convolution("conv7", 512, 512, 3, 14),
        convolution("conv8", 512, 512, 3, 14),
        fully_connected("fc1", 25_088, 4_096),
        fully_connected("fc2", 4_096, 4_096),
        fully_connected("fc3", 4_096, 1_000),
    ]
}

/// The fast model of Sermanet et al. (arXiv 1312.6229).
fn overfeat_fast() -> Vec<Layer> {
    vec![
        convolution("conv1", 3, 96, 11, 56),
        convolution("conv2", 96, 256, 5, 24),
        convolution("conv3", 256, 512, 3, 12),
        convolution("conv4", 512, 1_024, 3, 12),
        convolution("conv5", 1_024, 1_024, 3, 12),
        fully_connected("fc1", 36_864, 3_072),
        fully_connected("fc2", 3_072, 4_096),
        fully_connected("fc3", 4_096, 1_000),
    ]
}

/// Seven hidden layers over frames of speech: an image is a frame.
fn dnn_7() -> Vec<Layer> {
    let hidden = (2..=7).map(|number| fully_connected(format!("fc{number}"), 2_048, 2_048));
    let first = fully_connected("fc1", 440, 2_048);
    std::iter::once(first).chain(hidden).chain([fully_connected("fc8", 2_048, 9_304)]).collect()
}

/// He et al. (arXiv 1512.03385), with the stride in the 3×3 convolutions. Each layer waits for the
/// layer before; a projection stands before the block that it bridges.
fn resnet_50() -> Vec<Layer> {
    /// Blocks, width, output rows of a stage.
    const STAGES: [(u64, u64, u64); 4] = [(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)];
    /// The last convolution of a block makes so many times the width.
    const EXPANSION: u64 = 4;
    let mut layers = vec![convolution("conv1", 3, 64, 7, 112)];
    let (mut inputs, mut input_side) = (64, 56);
    for (stage, (blocks, width, side)) in (2..).zip(STAGES) {
        for block in 1..=blocks {
            let name = |part: &str| format!("conv{stage}_{block}{part}");
            if block == 1 {
                layers.push(convolution(name("p"), inputs, width * EXPANSION, 1, side));
            }
            layers.push(convolution(name("a"), inputs, width, 1, input_side));
            layers.push(convolution(name("b"), width, width, 3, side));
            layers.push(convolution(name("c"), width, width * EXPANSION, 1, side));
            (inputs, input_side) = (width * EXPANSION, side);
        }
    }
    layers.push(fully_connected("fc", inputs, 1_000));
    layers
}
