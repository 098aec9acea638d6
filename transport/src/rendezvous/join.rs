//! Joining: ranks claim their numbers, compare settings, agree on a fabric and connect.
//!
//! The protocol runs through the store, in rounds: each rank writes its line, then reads the lines
//! of all. **Invariants:** all ranks take the same fabric and agree on the ranks of each host,
//! because each decides from the same lines. No rank returns before every rank is connected to all
//! others, so the first message of a caller reaches a peer that is ready for it. Devices always
//! have a secret: the user's, or one that rank 0 makes and puts into the store, which admits only
//! ranks that may join.

mod protocol;
mod reach_error;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::device_factory::{DeviceFactory, Fabric, FabricChoice};
use super::error::JoinError;
use super::{Store, World};
use crate::Rank;
use crate::auth::Secret;
use crate::clock::{Nanos, now};
use crate::device::{Device, DeviceConfig, Event, Responder};
use crate::hybrid::PeerFabric;
use protocol::{Connected, JoinOutcome, JoinProtocol};

/// Default of [`JoinOptions::timeout`].
pub const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How to join.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The fabric to use.
    pub fabric: FabricChoice,
    /// Settings that must be equal on all ranks, by name; their values are compared as text.
    pub knobs: Vec<(String, String)>,
    /// Signal slots for each peer.
    pub signal_slots: usize,
    /// How long ranks wait for each other.
    pub timeout: Duration,
}

/// A rank that has joined: it is connected to all its peers.
pub struct Joined {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: u32,
    /// This rank's number on its host, if known.
    pub local_rank: Option<u32>,
    /// How many of the ranks, this one included, are on this host and share its processors.
    pub ranks_here: u32,
    /// Whether these are more than the processors that they may run on: of those that have no
    /// others than this rank has.
    pub is_crowded: bool,
    /// The fabric that the ranks agreed on.
    pub fabric: Fabric,
    /// By rank: the number of its host, the same on all ranks. Ranks of one number share memory, if
    /// the fabric does.
    pub hosts: Vec<u32>,
    /// The device, connected to all peers.
    pub device: Box<dyn Device>,
    /// Events that came after `Connected`, for the caller's first poll.
    pub events: Vec<Event>,
    /// Where the ranks met; `None` for a rank that is alone. Rank 0 should keep it until the job
    /// ends: it tells processes that come too often that all ranks are there.
    pub store: Option<Box<dyn Store>>,
    /// The end of [`JoinOptions::timeout`]: for later rounds of the ranks in the store.
    pub deadline: Nanos,
}

impl fmt::Debug for Joined {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Joined(rank {} of {}, {})", self.rank, self.world_size, self.fabric)
    }
}

/// Joins all ranks of `world`, over the fabrics of this machine.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join(
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
) -> Result<Joined, JoinError> {
    join_over(world, options, responder, &mut super::SystemDevices)
}

/// As [`join`], over devices made by `factory`.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join_over(
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
    fabrics: &mut dyn DeviceFactory,
) -> Result<Joined, JoinError> {
    let started = now();
    if world.world_size == 1 {
        return alone(world, options, responder, fabrics);
    }
    let store = world.open_store(started + options.timeout)?;
    let store = store.ok_or(JoinError::NoRendezvous { world_size: world.world_size })?;
    run(JoinProtocol::new(world, options, started, store, responder, fabrics))
}

/// As [`join`], with this store, which only the ranks of `world` use.
///
/// # Errors
///
/// See [`JoinError`]; at the latest when `options.timeout` has passed.
pub fn join_at(
    store: Box<dyn Store>,
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
) -> Result<Joined, JoinError> {
    run(JoinProtocol::new(world, options, now(), store, responder, &mut super::SystemDevices))
}

fn run(mut protocol: JoinProtocol<'_>) -> Result<Joined, JoinError> {
    let world = protocol.world;
    let result = protocol.run();
    if let Err(error) = &result
        && protocol.concerns_all(error)
    {
        protocol.store.fail(&error.to_string(), protocol.limit);
    }
    let JoinOutcome { fabric, ranks_here, is_crowded, hosts, connected: Connected { device, events, .. } } =
        result?;
    let (rank, world_size, local_rank) = (world.rank, world.world_size, world.local_rank);
    Ok(Joined {
        rank,
        world_size,
        local_rank,
        ranks_here,
        is_crowded,
        fabric,
        hosts: hosts.of,
        device,
        events,
        store: Some(protocol.store),
        deadline: protocol.limit,
    })
}

/// A world of one: any device suffices.
fn alone(
    world: &World,
    options: &JoinOptions,
    responder: Arc<dyn Responder>,
    fabrics: &mut dyn DeviceFactory,
) -> Result<Joined, JoinError> {
    let candidates: &[Fabric] = match &options.fabric {
        FabricChoice::Auto => &[Fabric::Shm, Fabric::Tcp],
        FabricChoice::Only(fabric) => std::slice::from_ref(fabric),
    };
    let mut last = None;
    for &fabric in candidates {
        let secret = world.secret.clone().unwrap_or_else(Secret::fresh);
        match fabrics.make(
            fabric,
            &[PeerFabric::Shm],
            config(world, options, (secret, None), options.timeout, Arc::clone(&responder)),
        ) {
            Ok(device) => {
                let (events, store) = (Vec::new(), None);
                let local_rank = Some(0);
                let (rank, world_size, ranks_here) = (0, 1, 1);
                return Ok(Joined {
                    rank,
                    world_size,
                    local_rank,
                    ranks_here,
                    is_crowded: false,
                    fabric,
                    hosts: vec![0],
                    device,
                    events,
                    store,
                    deadline: now() + options.timeout,
                });
            }
            Err(error) => last = Some(JoinError::Fabric { fabric, rank: 0, reason: error.to_string() }),
        }
    }
    Err(last.expect("there is a candidate"))
}

fn config(
    world: &World,
    options: &JoinOptions,
    (secret, address): (Secret, Option<IpAddr>),
    connect_timeout: Duration,
    responder: Arc<dyn Responder>,
) -> DeviceConfig {
    DeviceConfig {
        rank: world.rank,
        world_size: world.world_size,
        secret: Some(secret),
        signal_slots: options.signal_slots,
        connect_timeout,
        interface: world.interface.clone(),
        address,
        responder,
    }
}

#[cfg(test)]
mod tests;
