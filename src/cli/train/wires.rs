//! Links between simulated ranks: what exchanges cost over them, and the engines that make them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pleach::collectives::simulate::calls::Calls;
use pleach::collectives::simulate::wired::{choose, price_in_rank_order};
use pleach::schedule::wiring::Wiring;
use pleach::transport::Nanos;
use pleach::transport::sim::Faults;
use pleach::{Collective, CollectiveError, DataType, Rank, ReduceOp};
use pleach_training::simulation::{Delays, EngineCall, Engines, Network, TransferTime};

/// How long all-reduces take, by bytes, and transfers, by their links.
pub(crate) struct Prices {
    /// None for one rank, which has no links.
    wiring: Option<Arc<Wiring>>,
    known: HashMap<u64, Duration>,
    failed: Option<CollectiveError>,
}

impl Prices {
    pub(crate) fn new(wiring: Option<Arc<Wiring>>) -> Self {
        Self { wiring, known: HashMap::new(), failed: None }
    }

    /// Whether each price was found.
    pub(crate) fn verdict(&mut self) -> Result<(), CollectiveError> {
        self.failed.take().map_or(Ok(()), Err)
    }
}

impl Network for Prices {
    /// The time of the schedule that reproducible groups take over these links; of the cheapest
    /// one, where none adds in the order of ranks.
    fn all_reduce(&mut self, bytes: u64) -> Duration {
        let Some(wiring) = &self.wiring else { return Duration::ZERO };
        if let Some(price) = self.known.get(&bytes) {
            return *price;
        }
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let price = price_in_rank_order(wiring, length).or_else(|error| match error {
            CollectiveError::NotReproducible { .. } => {
                let chosen = choose(wiring, Collective::AllReduce, length, None)?;
                Ok(Duration::from_secs_f64(chosen.predicted_s().unwrap_or(0.0)))
            }
            error => Err(error),
        });
        let price = price.unwrap_or_else(|error| {
            self.failed = Some(error);
            Duration::ZERO
        });
        self.known.insert(bytes, price);
        price
    }

    /// The bytes take all routes between two ranks, each its share, and a route is as quick as its
    /// slowest link.
    fn transfer(&mut self, from: Rank, to: Rank, bytes: u64) -> TransferTime {
        let Some(wiring) = &self.wiring else { return TransferTime::default() };
        let routes = wiring.routes();
        let between = routes.between(from, to);
        let all: f64 = between.iter().map(|route| route.weight as f64).sum();
        let sending = between.iter().map(|route| {
            let slowest = route.links.iter().map(|link| routes.links()[*link].bytes_per_s).min();
            let share = route.weight as f64 / all;
            share * bytes as f64 / slowest.map_or(f64::INFINITY, |rate| rate as f64)
        });
        let latency = Duration::from_nanos(routes.latency_ns(from, to));
        TransferTime { latency, sending: Duration::from_secs_f64(sending.fold(0.0, f64::max)) }
    }
}

/// Real engines over simulated wires.
struct OverWires(Calls);

/// Engines over these links, whose messages are delayed.
pub(crate) fn engines(wiring: &Arc<Wiring>, seed: u64, delays: Delays) -> Result<Box<dyn Engines>, String> {
    let Delays { per_million: delay_per_million, most: delay, reorder } = delays;
    let faults = Faults { delay_per_million, delay, reorder, ..Faults::none() };
    let calls = Calls::new(wiring, seed, faults).map_err(|error| error.to_string())?;
    Ok(Box::new(OverWires(calls)))
}

impl Engines for OverWires {
    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn start(&mut self, rank: Rank, call: EngineCall, input: &[u8]) -> Result<(), String> {
        let (collective, data_type, op, count) = match call {
            EngineCall::Average(count) => (Collective::AllReduce, DataType::F32, ReduceOp::Avg, count),
            EngineCall::Total(count) => (Collective::AllReduce, DataType::U64, ReduceOp::Sum, count),
            EngineCall::AllToAll(bytes) => (Collective::AllToAll, DataType::U8, ReduceOp::Sum, bytes),
            EngineCall::AllGather(bytes) => (Collective::AllGather, DataType::U8, ReduceOp::Sum, bytes),
        };
        let started = self.0.start(rank, (collective, data_type, op), count, input);
        started.map_err(|error| error.to_string())
    }

    fn settle(&mut self) -> Result<(), String> {
        self.0.settle().map_err(|error| error.to_string())
    }

    fn take_output(&mut self, rank: Rank) -> Result<Option<Vec<u8>>, String> {
        self.0.take_output(rank).map_err(|error| error.to_string())
    }

    fn advance(&mut self, until: Option<Nanos>) -> bool {
        self.0.advance(until)
    }

    fn freeze(&mut self, rank: Rank, duration: Duration) {
        self.0.freeze(rank, duration);
    }

    fn end(&mut self, rank: Rank) {
        self.0.end(rank);
    }
}
