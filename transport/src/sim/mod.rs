//! A whole fabric in one process: one thread, one seed, virtual time. The harshest backend.
//!
//! A [`World`] holds a clock, a [`Network`] and everything under way on it; [`World::device`] gives
//! each rank its [`SimDevice`]. Bytes are real. Time does not pass by itself: the driver of the
//! ranks calls [`World::advance`], which goes to the next event, and polls the ranks in between.
//! [`Faults`] are the plan of faults; checkers are [`Observer`]s.
//!
//! **Invariant:** a run is a function of the code and the seed. One [`Random`] is split by purpose
//! and orders equal instants; every iteration is ordered; no address, clock or hash order has any
//! effect. Every event is folded into a [`TraceHash`], so two runs of one seed can be compared by
//! one number.
//!
//! The device is nasty but never impossible: it uses all freedom of the contract. The source of a
//! put is read as late as `Done` allows. With the matching [`FaultKind`]s the bytes of a put become
//! visible in random pieces at random times up to the instant of its signal; transfers, signals and
//! completions overtake each other; queues hold one transfer; ranks freeze and die; links fail; and
//! the two ends of a pair detect it at different times. Without faults and shared links a put of
//! `n` bytes is visible exactly `latency + n / bandwidth` after the submit.
//!
//! With [`Options::moves_bytes`] off only times are simulated: no byte of a transfer's payload is
//! copied, so memory of any size can take part without being touched.
//!
//! Driving `n` ranks:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use pleach_transport::sim::{Network, Options, World};
//! use pleach_transport::{Device, DeviceConfig, Event, Nanos, Rank, Responder, LossCause};
//!
//! struct Silent;
//! impl Responder for Silent {
//!     fn message(&self, _: Rank, _: &[u8]) -> Option<Vec<u8>> { None }
//!     fn lost(&self, _: Rank, _: &LossCause) {}
//! }
//!
//! let world = World::new(Options::new(Network::full_mesh(3, 1_000_000_000, Duration::from_micros(2)), 42));
//! let mut devices: Vec<_> = (0..3).map(|rank| world.device(DeviceConfig {
//!     rank, world_size: 3, secret: None, signal slots: 8, connect_timeout: Duration::from_secs(1), interface: None, address: None,
//!     responder: Arc::new(Silent),
//! })).collect();
//! let addresses: Vec<_> = devices.iter().map(|device| device.info().address.clone()).collect();
//! for device in &mut devices {
//!     let rank = device.info().rank;
//!     for peer in (0..3).filter(|&peer| peer != rank) {
//!         device.connect(peer, &addresses[peer as usize]).unwrap();
//!     }
//! }
//! let mut connected = 0;
//! let mut events = Vec::with_capacity(16);
//! while connected < 6 {
//!     assert!(world.advance(None), "nothing will ever happen any more");
//!     for rank in world.take_woken() {
//!         devices[rank as usize].poll(world.now(), &mut events);
//!         connected += events.drain(..).filter(|event| matches!(event, Event::Connected { .. })).count();
//!     }
//! }
//! assert_eq!(world.now(), Nanos(2_000));
//! ```

mod device;
mod faults;
mod flows;
mod network;
mod observer;
mod pair;
mod queues;
mod random;
mod regions;
mod sequence_map;
mod state;
mod trace;
mod transfers;
mod world;

pub use device::SimDevice;
pub use faults::{DELAY_MAX, DETECTION, FREEZE_MAX, Fault, FaultKind, FaultKinds, Faults, UnknownFault};
pub use flows::{FlowId, Flows};
pub use network::{Link, LinkId, LinkSharing, Network, NetworkBuilder, NetworkError, NodeId, Route};
pub use observer::{Access, AccessKind, Actor, Observer, Record, TransferNumber};
pub use random::{MILLION, Random};
pub use trace::TraceHash;
pub use world::{Mutant, Options, World};
