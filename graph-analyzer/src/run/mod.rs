//! Runs the parts of a graph, each on a rank of its own.

pub mod channels;
