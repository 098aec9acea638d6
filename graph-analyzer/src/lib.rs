//! Data-flow graphs: which tensors cross between ranks, how, and where every buffer lies.
//!
//! Each value here follows from the one before. A [`Graph`] comes from [ONNX](onnx), a
//! [text form](text) or a builder, and [`Graph::with_dims`] infers its shapes. A [`Placement`]
//! gives each node a rank, by a table or by a search over the estimated [`Costs`]. A [`Partition`]
//! has the parts and the tensors that cross, and a [`MemoryPlan`] gives each buffer of a part its
//! place in one arena.
//!
//! **Invariant:** but for [`run`], nothing here uses a device, reads a clock or depends on anything
//! but its arguments. [`onnx::check_weight_files`] and [`onnx::Model::cut`] alone ask the file
//! system, for weights. Files are hostile until they are checked: limits come before allocation,
//! and nothing in a file can panic.

pub mod costs;
mod element;
pub mod graph;
pub mod json;
mod names;
pub mod onnx;
mod order;
pub mod partition;
pub mod placement;
pub mod plan;
pub mod run;
mod shapes;
pub mod text;
pub mod transfer;

pub use costs::{Costs, Machine};
pub use element::ElementType;
pub use graph::{Dim, Graph, GraphBuilder, TensorType};
pub use partition::Partition;
pub use placement::Placement;
pub use plan::MemoryPlan;
pub use shapes::ShapeError;
