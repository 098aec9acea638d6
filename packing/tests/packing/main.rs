//! Packings against what is known of them without packing: the checker and brute force.

mod by_hand;
mod graphs;
mod optima;
mod oracle;
mod refused;
mod rings;
mod strategies;
