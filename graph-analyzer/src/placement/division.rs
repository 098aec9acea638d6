//! Divides an order of nodes into contiguous parts, by dynamic programming.
//!
//! What a part costs depends on its two ends alone: it computes its nodes, and receives each tensor
//! once that comes from before it. With the first node of a part fixed, no [`PartCost`] falls as
//! the part grows, so a part that is too large ends the sweep.

use pleach_vocabulary::Rank;

use super::dataflow::Dataflow;
use crate::plan::ALIGNMENT_BYTES;
use crate::transfer::SLOTS;

/// Most positions at which an order is cut.
const POSITIONS_MAX: usize = 4096;

/// Most nodes that all sweeps visit: longer orders are cut at fewer positions.
const SWEPT_MAX: usize = 1 << 29;

/// What a part costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PartCost {
    /// The time of its nodes.
    pub(super) compute_ns: u64,
    /// The bytes that it receives.
    pub(super) received_bytes: u64,
    /// Weights, slots, and the largest sum of live bytes.
    pub(super) memory_bytes: u64,
}

/// The least largest value of a measure over the parts, if there are parts that fit.
pub(super) fn least_largest(
    dataflow: &Dataflow,
    ranks: u32,
    measure: &dyn Fn(&PartCost) -> u64,
    fits: &dyn Fn(&PartCost) -> bool,
) -> Option<u64> {
    divide(dataflow, ranks, fits, &|before, cost| before.max(measure(cost))).map(|(value, _)| value)
}

/// The ends of the parts with the least sum of received bytes, if there are parts that fit.
pub(super) fn least_received(
    dataflow: &Dataflow,
    ranks: u32,
    fits: &dyn Fn(&PartCost) -> bool,
) -> Option<Vec<usize>> {
    divide(dataflow, ranks, fits, &|before, cost| before + cost.received_bytes).map(|(_, ends)| ends)
}

/// The least value over all divisions into as many parts as ranks, and the ends of the parts. A
/// value grows with each part, by `extended`.
fn divide(
    dataflow: &Dataflow,
    ranks: u32,
    fits: &dyn Fn(&PartCost) -> bool,
    extended: &dyn Fn(u64, &PartCost) -> u64,
) -> Option<(u64, Vec<usize>)> {
    let (count, ranks) = (dataflow.len(), ranks as usize);
    let positions = POSITIONS_MAX.min(SWEPT_MAX / count.max(1)).max(1);
    let step = count.div_ceil(positions).min(count / ranks.max(1)).max(1);
    // Positions are numbered; the last one is the end of the order.
    let last = count.div_ceil(step);
    let mut sweep = Sweep::new(dataflow);
    // By number of parts and position: the least value, and where the last part begins.
    let mut best: Vec<Vec<Option<(u64, u32)>>> = vec![vec![None; last + 1]; ranks + 1];
    best[0][0] = Some((0, 0));
    for start in 0..last.max(1) {
        let reached = |parts: usize| Some((parts, best[parts][start]?.0));
        let reached: Vec<(usize, u64)> = (0..ranks).filter_map(reached).collect();
        if reached.is_empty() {
            continue;
        }
        sweep.from(start * step, &mut |end, cost| {
            if !fits(cost) {
                return false;
            }
            if end != count && end % step != 0 {
                return true;
            }
            let (place, bound) = (end.div_ceil(step), best[ranks][last].map_or(u64::MAX, |(value, _)| value));
            let mut goes_on = false;
            for &(parts, before) in &reached {
                let value = extended(before, cost);
                if value > bound {
                    continue;
                }
                goes_on = true;
                let is_end = (end == count) == (parts + 1 == ranks);
                if is_end && best[parts + 1][place].is_none_or(|(known, _)| value < known) {
                    best[parts + 1][place] = Some((value, start as u32));
                }
            }
            goes_on
        });
    }
    let (value, _) = best[ranks][last]?;
    let (mut ends, mut place) = (vec![count], last);
    for parts in (1..ranks).rev() {
        let (_, start) = best[parts + 1][place]?;
        place = start as usize;
        ends.push(place * step);
    }
    ends.reverse();
    Some((value, ends))
}

/// The rank of each place, from the ends of the parts.
pub(super) fn ranks_of(ends: &[usize]) -> Vec<Rank> {
    let mut ranks = Vec::with_capacity(ends.last().copied().unwrap_or(0));
    for (rank, &end) in ends.iter().enumerate() {
        ranks.resize(end, rank as Rank);
    }
    ranks
}

/// Computes the costs of all parts that begin at a place.
struct Sweep<'a> {
    dataflow: &'a Dataflow,
    /// By tensor: the last place that uses it; outputs live to the end.
    last_use: Vec<usize>,
    /// The tensors that the caller gets.
    outputs: Vec<usize>,
    /// By tensor: the number of the sweep that received it last.
    received_in: Vec<u64>,
    /// By number of a value: the sweep that counted this constant last.
    counted_in: Vec<u64>,
    /// The number of this sweep, from 1.
    number: u64,
}

impl<'a> Sweep<'a> {
    fn new(dataflow: &'a Dataflow) -> Self {
        let last_use = |tensor: &super::dataflow::Tensor| {
            let last = tensor.consumers.iter().max().copied().or(tensor.producer).unwrap_or(0);
            if tensor.is_output { dataflow.len() } else { last }
        };
        let last_use = dataflow.tensors.iter().map(last_use).collect();
        let constants = dataflow.constants.iter().flatten().map(|(constant, _)| constant.index() + 1);
        let counted_in = vec![0; constants.max().unwrap_or(0)];
        let is_output = |&tensor: &usize| dataflow.tensors[tensor].is_output;
        let outputs = (0..dataflow.tensors.len()).filter(is_output).collect();
        Self {
            dataflow,
            last_use,
            outputs,
            received_in: vec![0; dataflow.tensors.len()],
            counted_in,
            number: 0,
        }
    }

    /// Gives the end and cost of each part that begins at `start`, until `visit` says to stop.
    fn from(&mut self, start: usize, visit: &mut dyn FnMut(usize, &PartCost) -> bool) {
        self.number += 1;
        let dataflow = self.dataflow;
        let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT_BYTES);
        let mut cost = PartCost::default();
        let (mut weight_bytes, mut slot_bytes, mut live, mut peak) = (0, 0, 0, 0);
        if start == 0 {
            // The caller's inputs lie with the first part from the start.
            let given = dataflow.tensors.iter().filter(|tensor| tensor.producer.is_none());
            live += given.map(|tensor| aligned(tensor.bytes)).sum::<u64>();
        }
        for place in start..dataflow.len() {
            cost.compute_ns += dataflow.node_ns[place];
            for &tensor in &dataflow.uses[place] {
                let comes_from_before =
                    dataflow.tensors[tensor].producer.map_or(start > 0, |producer| producer < start);
                if comes_from_before && self.received_in[tensor] != self.number {
                    self.received_in[tensor] = self.number;
                    cost.received_bytes += dataflow.tensors[tensor].bytes;
                    slot_bytes += SLOTS * aligned(dataflow.tensors[tensor].bytes);
                }
            }
            for (constant, bytes) in &dataflow.constants[place] {
                let last = std::mem::replace(&mut self.counted_in[constant.index()], self.number);
                weight_bytes += if last == self.number { 0 } else { *bytes };
            }
            live += dataflow.results[place]
                .iter()
                .map(|&tensor| aligned(dataflow.tensors[tensor].bytes))
                .sum::<u64>();
            peak = peak.max(live);
            let used = dataflow.uses[place].iter().filter(|&&tensor| self.received_in[tensor] != self.number);
            let ended =
                used.chain(&dataflow.results[place]).filter(|&&tensor| self.last_use[tensor] == place);
            live -= ended.map(|&tensor| aligned(dataflow.tensors[tensor].bytes)).sum::<u64>();
            if place + 1 == dataflow.len() {
                let outputs = self.outputs_from_before(start);
                cost.received_bytes += outputs;
                slot_bytes += SLOTS * outputs;
            }
            cost.memory_bytes = weight_bytes + slot_bytes + peak;
            if !visit(place + 1, &cost) {
                return;
            }
        }
        // A graph of constants alone is one part without nodes.
        if dataflow.len() == 0 {
            visit(0, &cost);
        }
    }

    /// Bytes of the caller's outputs that come from before the last part and that it does not use.
    fn outputs_from_before(&self, start: usize) -> u64 {
        let unreceived = self.outputs.iter().filter(|&&tensor| self.received_in[tensor] != self.number);
        let tensors = unreceived.map(|&tensor| &self.dataflow.tensors[tensor]);
        tensors
            .filter(|tensor| tensor.producer.map_or(start > 0, |producer| producer < start))
            .map(|tensor| tensor.bytes)
            .sum()
    }
}
