//! Links between simulated ranks: what exchanges cost over them, and the engines that make them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach::collectives::simulate::calls::{Calls, RoundSeen, WriteSeen};
use pleach::collectives::simulate::wired::{choose, price_in_rank_order};
use pleach::schedule::wiring::Wiring;
use pleach::transport::Nanos;
use pleach::transport::sim::Faults;
use pleach::{Collective, CollectiveError, DataType, Rank, ReduceOp};
use pleach_training::lines::Line;
use pleach_training::policy::Reads;
use pleach_training::simulation::{
    Arrived, Delays, EngineCall, Engines, Exchanges, LineWord, Network, ReadEnded, RoundEnded, TransferTime,
};
use pleach_vocabulary::digest::chain;

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

/// The engines of a line, which is a group of its own.
struct OverLine {
    line: Line,
    calls: Calls,
    /// When they were connected.
    since: Nanos,
}

impl OverLine {
    /// The place of a rank in the line.
    fn place(&self, rank: Rank) -> Option<Rank> {
        self.line.ranks.iter().zip(0..).find(|(other, _)| **other == rank).map(|(_, place)| place)
    }

    fn next_at(&mut self) -> Option<Nanos> {
        let since = self.since;
        self.calls.next_at().map(|at| Nanos(since.0 + at.0))
    }
}

/// Goes to a time before which nothing moves, and lets happen what happens then.
fn go_to(calls: &mut Calls, time: Nanos) {
    if calls.now() < time || calls.next_at() == Some(time) {
        calls.advance(Some(time));
    }
}

/// Real engines over simulated wires. Each line has wires of its own beside those of all ranks.
///
/// **Invariant:** the wires of all are at one time.
struct OverWires {
    calls: Calls,
    lines: Vec<OverLine>,
    wiring: Arc<Wiring>,
    seed: u64,
    faults: Faults,
    contribution: usize,
}

/// Engines over these links for these exchanges.
pub(crate) fn engines(
    wiring: &Arc<Wiring>,
    seed: u64,
    exchanges: &Exchanges,
) -> Result<Box<dyn Engines>, String> {
    let Delays { per_million: delay_per_million, most: delay, reorder } = exchanges.delays;
    let faults = Faults { delay_per_million, delay, reorder, ..Faults::none() };
    let calls = match exchanges.window {
        Some(window) => Calls::with_window(wiring, seed, faults.clone(), window).map_err(text)?,
        None => Calls::new(wiring, seed, faults.clone()).map_err(text)?,
    };
    let (wiring, contribution) = (wiring.clone(), exchanges.contribution);
    let mut wires = OverWires { calls, lines: Vec::new(), wiring, seed, faults, contribution };
    wires.lines = wires.connected(exchanges.lines.clone())?;
    Ok(Box::new(wires))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl OverWires {
    /// The engines of these lines, from now on.
    fn connected(&self, lines: Vec<Line>) -> Result<Vec<OverLine>, String> {
        let line = |(line, number): (Line, u64)| {
            let topology = self.wiring.topology();
            let wiring = if line.ranks.len() == topology.ranks() as usize {
                self.wiring.clone()
            } else {
                let only = topology.only(&line.ranks);
                let alone = |error| format!("a line of ranks has links of its own, and here: {error}");
                Arc::new(Wiring::new(only.map_err(alone)?))
            };
            let (seed, rounds) = (chain(self.seed, number), (self.contribution, line.activation));
            let calls = Calls::with_rounds(&wiring, seed, self.faults.clone(), rounds).map_err(text)?;
            Ok(OverLine { line, calls, since: self.calls.now() })
        };
        lines.into_iter().zip(1..).map(line).collect()
    }

    /// The engines of a line, and the place of a rank in it.
    fn in_line(&mut self, rank: Rank, line: usize) -> Result<(&mut Calls, Rank), String> {
        let line = &mut self.lines[line];
        let place = line.place(rank).ok_or_else(|| format!("rank {rank} is in another line"))?;
        Ok((&mut line.calls, place))
    }
}

impl Engines for OverWires {
    fn now(&self) -> Nanos {
        self.calls.now()
    }

    fn start(&mut self, rank: Rank, call: EngineCall, input: &[u8]) -> Result<(), String> {
        let (collective, data_type, op, count) = match call {
            EngineCall::Average(count) => (Collective::AllReduce, DataType::F32, ReduceOp::Avg, count),
            EngineCall::Total(count) => (Collective::AllReduce, DataType::U64, ReduceOp::Sum, count),
            EngineCall::AllToAll(bytes) => (Collective::AllToAll, DataType::U8, ReduceOp::Sum, bytes),
            EngineCall::AllGather(bytes) => (Collective::AllGather, DataType::U8, ReduceOp::Sum, bytes),
        };
        self.calls.start(rank, (collective, data_type, op), count, input).map_err(text)
    }

    fn settle(&mut self) -> Result<(), String> {
        let lines = self.lines.iter_mut().map(|line| &mut line.calls);
        [&mut self.calls].into_iter().chain(lines).try_for_each(Calls::settle).map_err(text)
    }

    fn take_output(&mut self, rank: Rank) -> Result<Option<Vec<u8>>, String> {
        self.calls.take_output(rank).map_err(text)
    }

    fn advance(&mut self, until: Option<Nanos>) -> bool {
        if self.lines.is_empty() {
            return self.calls.advance(until);
        }
        let of_lines = self.lines.iter_mut().filter_map(OverLine::next_at).min();
        let Some(next) = self.calls.next_at().into_iter().chain(of_lines).chain(until).min() else {
            return false;
        };
        go_to(&mut self.calls, next);
        self.lines.iter_mut().for_each(|line| go_to(&mut line.calls, Nanos(next.0 - line.since.0)));
        true
    }

    fn freeze(&mut self, rank: Rank, duration: Duration) {
        self.calls.freeze(rank, duration);
        for line in &mut self.lines {
            if let Some(place) = line.place(rank) {
                line.calls.freeze(place, duration);
            }
        }
    }

    fn end(&mut self, rank: Rank) {
        self.calls.end(rank);
        for line in &mut self.lines {
            if let Some(place) = line.place(rank) {
                line.calls.end(place);
            }
        }
    }

    fn publish(&mut self, rank: Rank, elements: &[f32], word: u64) -> Result<(), String> {
        self.calls.publish(rank, elements, word).map_err(text)
    }

    fn read(&mut self, rank: Rank, from: Rank, range: Range<usize>, reads: Reads) -> Result<(), String> {
        self.calls.read(rank, (from, range), reads == Reads::Torn).map_err(text)
    }

    fn take_read(&mut self, rank: Rank) -> Result<Option<ReadEnded>, String> {
        let read = self.calls.take_read(rank).map_err(text)?;
        Ok(read.map(|(version, word, elements)| ReadEnded { version, word, elements }))
    }

    fn has_credit(&mut self, rank: Rank, target: (Rank, u16)) -> Result<bool, String> {
        self.calls.has_credit(rank, target).map_err(text)
    }

    fn write(
        &mut self,
        rank: Rank,
        target: (Rank, u16),
        elements: &[f32],
        word: u64,
    ) -> Result<bool, String> {
        self.calls.write(rank, target, elements, word).map_err(text)
    }

    fn take_write(&mut self, rank: Rank) -> Result<Option<Arrived>, String> {
        let write = self.calls.take_write(rank).map_err(text)?;
        Ok(write.map(|WriteSeen { from, slot, word, elements }| Arrived { from, slot, word, elements }))
    }

    fn next_round(&mut self, rank: Rank, line: usize) -> Result<Option<u64>, String> {
        let (calls, place) = self.in_line(rank, line)?;
        calls.next_round(place).map_err(text)
    }

    fn contribute(&mut self, rank: Rank, line: usize, contribution: &[f32]) -> Result<(), String> {
        let (calls, place) = self.in_line(rank, line)?;
        calls.contribute(place, contribution).map_err(text)
    }

    fn say(&mut self, rank: Rank, line: usize, word: LineWord) -> Result<(), String> {
        let (calls, place) = self.in_line(rank, line)?;
        let said = match word {
            LineWord::StepAside => calls.step_aside(place),
            LineWord::ComeBack => calls.come_back(place),
            LineWord::Finish => calls.finish(place),
        };
        said.map_err(text)
    }

    fn take_round(&mut self, rank: Rank, line: usize) -> Result<Option<RoundEnded>, String> {
        let (calls, place) = self.in_line(rank, line)?;
        let round = calls.take_round(place).map_err(text)?;
        Ok(round.map(|RoundSeen { contributors, result, correction }| RoundEnded {
            contributors,
            result,
            late: correction,
        }))
    }

    fn reopen(&mut self) -> Result<(), String> {
        let lines = self.lines.drain(..).map(|line| line.line).collect();
        self.lines = self.connected(lines)?;
        Ok(())
    }
}
