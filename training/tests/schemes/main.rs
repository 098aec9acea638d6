//! Training schemes: what each guarantees, simulated and on real ranks; and mutants of policies
//! that the drivers must catch.

mod invariants;
mod model;
mod mutants;
mod real;
mod virtual_time;
