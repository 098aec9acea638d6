//! The crate from outside: forms of graphs, shapes, placements, partitions and memory plans.

mod forms;
mod hostile;
mod light;
mod placements;
mod plans;
mod samples;
mod shapes;
#[path = "../../../tests/skipped/mod.rs"]
mod skipped;
mod transformer;
mod wheel;
