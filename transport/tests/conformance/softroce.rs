//! What only devices made of software show: their packets can be seen, and their links be changed.
//!
//! The machine has interfaces `h1` to `hN` with addresses 10.77.0.I, joined by a bridge, and on
//! each the device `rxeI` (Soft-RoCE); tests run as root, one after the other, and put back what
//! they change. They look for `RDMA_VM=1`, so that they change no other machine.

mod changed;
mod links;
mod rdma_cm;
mod wire;
