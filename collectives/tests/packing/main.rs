//! Packings against what is known of them without packing: the checker and brute force.

mod good;
mod refused;
