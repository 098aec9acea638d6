//! The solver of one problem of two classes.
//!
//! The samples of a problem are numbered through all ranks, in rank order. A rank keeps the errors
//! and the kernel rows of its own samples; factors, labels and what else is one number a sample it
//! keeps of all, so that an exchange carries no more than numbers and values.

use std::ops::ControlFlow;

use pleach_collectives::{CollectiveError, Group};

use super::cache::RowCache;
use super::error::SvmError;
use super::exchange::{Candidate, Exchange, Gathered, Pair, Partner, gather, note};
use super::kernel::{Kernel, Query};
use super::samples::{Row, Samples};
use super::sum::Cuts;
use super::wide::{self, CURVATURE_MIN, Errors, Extreme};
use super::{FirstCheck, Parameters, Reconstruction, Selection, Shrinking};

/// The multiple of the tolerance at which [`Reconstruction::Multi`] brings samples back early.
const EARLY: f64 = 10.0;

/// The usual limit of iterations, that of LIBSVM: so many for each sample, and at least so many.
const ITERATIONS_A_SAMPLE: u64 = 100;
const ITERATIONS_MIN: u64 = 10_000_000;

/// What this rank knows of a problem.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) group: &'a Group,
    pub(crate) parameters: &'a Parameters,
    /// All samples of this rank, and their squared lengths.
    pub(crate) samples: &'a Samples,
    pub(crate) norms: &'a [f64],
    /// The largest squared length on any rank.
    pub(crate) norm_max: f64,
    /// The features of the samples of all ranks.
    pub(crate) features: u32,
    /// Those of this rank's samples that belong to the problem.
    pub(crate) members: Vec<u32>,
    /// 1 or -1 for each of them.
    pub(crate) signs: Vec<f64>,
}

/// How training ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The conditions of optimality hold to the tolerance, for all samples.
    #[default]
    Converged,
    /// The observer stopped it.
    Stopped,
    /// The limit of iterations was reached.
    IterationsMax,
}

/// Where the solver is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    pub(crate) iterations: u64,
    pub(crate) gap: f64,
    /// Of all ranks.
    pub(crate) active: usize,
    pub(crate) samples: usize,
}

/// A solution, the same on all ranks but for the counts of this rank.
#[derive(Debug)]
pub(crate) struct Solution {
    /// The factor of each sample of the problem, times its label.
    pub(crate) coefficients: Vec<f64>,
    /// The number of this rank's first sample.
    pub(crate) offset: usize,
    pub(crate) bounded: u64,
    pub(crate) rho: f64,
    pub(crate) objective: f64,
    pub(crate) gap: f64,
    pub(crate) outcome: Outcome,
    pub(crate) iterations: u64,
    pub(crate) reconstructions: u64,
    /// Pairs along which the kernel is not positive.
    pub(crate) negative_curvatures: u64,
    /// Of this rank.
    pub(crate) kernel_evaluations: u64,
}

/// One rank's part of the solver.
pub(crate) struct Solver<'a> {
    pub(crate) problem: Problem<'a>,
    exchange: Exchange,
    pub(crate) cache: RowCache,
    pub(crate) query: Query,
    /// The number of the first sample of each rank, and the number of all samples.
    starts: Vec<usize>,
    /// By number: the factor, the label, the kernel value of the sample with itself, its blocks.
    pub(crate) factors: Vec<f64>,
    signs: Vec<f64>,
    diagonal: Vec<f64>,
    blocks: Vec<u32>,
    pub(crate) errors: Errors,
    /// The places of this rank's samples that take part, in order.
    pub(crate) active: Vec<u32>,
    /// Of all ranks.
    active_of_all: usize,
    pub(crate) cuts: Cuts,
    /// By how much the objective has fallen, by the kernel values of the pairs.
    gained: f64,
    /// By how much it can fall: beyond that, kernel values are nothing but rounding.
    gain_max: f64,
    words: Vec<u32>,
    notes: u32,
    /// A sample whose kernel values are not finite.
    not_finite: u32,
    iterations: u64,
    pub(crate) reconstructions: u64,
    negative_curvatures: u64,
    pub(crate) kernel_evaluations: u64,
    /// Mutant: convergence is declared on the active samples alone.
    #[cfg(test)]
    pub(crate) trusts_active_samples: bool,
}

impl<'a> Solver<'a> {
    pub(crate) fn new(problem: Problem<'a>) -> Result<Self, SvmError> {
        let (group, parameters) = (problem.group, problem.parameters);
        let member_rows = || problem.members.iter().map(|sample| problem.samples.row(*sample as usize));
        let own_blocks: Vec<u32> = member_rows().map(|row| row.blocks.len() as u32).collect();
        let norm = |sample: &u32| problem.norms[*sample as usize];
        let own_diagonal: Vec<f64> =
            problem.members.iter().map(|sample| parameters.kernel.diagonal(norm(sample))).collect();
        let Gathered { items: signs, counts } = gather(group, &problem.signs)?;
        let diagonal = gather(group, &own_diagonal)?.items;
        let blocks = gather(group, &own_blocks)?.items;
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        let (samples, most) = (signs.len(), counts.iter().copied().max().unwrap_or(0));
        let largest = parameters.c * parameters.kernel.largest(problem.norm_max);
        let cuts = Cuts::new(largest, samples).ok_or(SvmError::NotFinite { sample: 0 })?;
        let rows_max = RowCache::rows_in(parameters.cache_bytes, most);
        let own = problem.members.len();
        let mut solver = Self {
            exchange: Exchange::new(group)?,
            cache: RowCache::new(samples, rows_max),
            query: Query::new(problem.features),
            starts,
            factors: vec![0.0; samples],
            signs,
            diagonal,
            blocks,
            errors: Errors {
                error: problem.signs.iter().map(|sign| -sign).collect(),
                up: vec![0.0; own],
                low: vec![0.0; own],
            },
            active: Vec::new(),
            active_of_all: samples,
            cuts,
            gained: 0.0,
            gain_max: gain_max(parameters, samples, problem.norm_max),
            words: Vec::new(),
            notes: 0,
            not_finite: 0,
            iterations: 0,
            reconstructions: 0,
            negative_curvatures: 0,
            kernel_evaluations: 0,
            #[cfg(test)]
            trusts_active_samples: false,
            problem,
        };
        solver.activate_all();
        Ok(solver)
    }

    /// The number of this rank's first sample.
    pub(crate) fn offset(&self) -> usize {
        self.starts[self.problem.group.rank() as usize]
    }

    /// The place of a sample here, if it is one of this rank.
    fn place(&self, number: u32) -> Option<usize> {
        let place = (number as usize).checked_sub(self.offset())?;
        (place < self.problem.members.len()).then_some(place)
    }

    /// Iterates until the conditions of optimality hold for all samples.
    pub(crate) fn solve(
        &mut self,
        observe: &mut dyn FnMut(&State) -> ControlFlow<()>,
    ) -> Result<Solution, SvmError> {
        let (tolerance, shrinking) = (self.problem.parameters.tolerance, self.problem.parameters.shrinking);
        let samples = self.factors.len();
        let usual_max = ITERATIONS_MIN.max(ITERATIONS_A_SAMPLE * samples as u64);
        let iterations_max = self.problem.parameters.iterations_max.unwrap_or(usual_max);
        let (mut early, checks) = match shrinking {
            Shrinking::Never => (false, None),
            Shrinking::Every { first, reconstruction } => {
                (reconstruction == Reconstruction::Multi, Some(iterations_before(first, samples)))
            }
        };
        let mut until_check = checks;
        let mut extremes = self.extremes();
        let (outcome, gap) = loop {
            let Pair { up, low, notes, .. } = self.exchange_pair(extremes)?;
            let gap = up.zip(low).map_or(0.0, |(up, low)| low.value - up.value);
            let state = State { iterations: self.iterations, gap, active: self.active_of_all, samples };
            if observe(&state).is_break() {
                self.notes |= note::STOP;
            }
            let stop = if notes & note::STOP != 0 {
                Some(Outcome::Stopped)
            } else if self.iterations >= iterations_max {
                Some(Outcome::IterationsMax)
            } else {
                None
            };
            let is_near = early && gap < EARLY * tolerance;
            if gap < tolerance || stop.is_some() || is_near {
                early &= !is_near;
                if self.active_of_all < samples && !self.trusts_active() {
                    extremes = self.reconstruct()?;
                    until_check = checks;
                    continue;
                }
                if gap < tolerance || stop.is_some() {
                    let outcome =
                        if gap < tolerance { Outcome::Converged } else { stop.unwrap_or(Outcome::Stopped) };
                    break (outcome, gap);
                }
            }
            let (Some(up), Some(low)) = (up, low) else { unreachable!("a pair with a gap has two samples") };
            if let Some(left) = &mut until_check {
                *left -= 1;
                if *left == 0 {
                    self.shrink(up.value, low.value)?;
                    until_check = checks.map(|checks| checks.min(self.active_of_all as u64));
                }
            }
            extremes = self.step(up, low)?;
            self.iterations += 1;
        };
        self.solution(outcome, gap)
    }

    #[cfg(test)]
    fn trusts_active(&self) -> bool {
        self.trusts_active_samples
    }

    #[cfg(not(test))]
    fn trusts_active(&self) -> bool {
        false
    }

    /// The extremes of this rank's active samples.
    pub(crate) fn extremes(&mut self) -> [Extreme; 2] {
        let zeros = vec![0.0; self.errors.error.len()];
        wide::update(&mut self.errors, 0.0, &zeros, &zeros)
    }

    fn exchange_pair(&mut self, extremes: [Extreme; 2]) -> Result<Pair, SvmError> {
        let pair = self.exchange.pair(extremes, self.offset() as u32, (self.notes, self.not_finite))?;
        if pair.notes & note::NOT_FINITE != 0 {
            return Err(SvmError::NotFinite { sample: pair.not_finite });
        }
        Ok(pair)
    }

    /// Changes the factors of the sample that violates most and of its partner, and returns the
    /// extremes after that.
    fn step(&mut self, up: Candidate, low: Candidate) -> Result<[Extreme; 2], SvmError> {
        let up_place = self.row(up.number)?;
        let (partner, low_place) = match self.problem.parameters.selection {
            Selection::First => {
                let place = self.row(low.number)?;
                let value = self.value_of(up_place, place);
                (Partner { gain: 0.0, number: low.number, error: low.value, value }, place)
            }
            Selection::Second => {
                let best = self.own_partner(up, up_place);
                // None gains where values are not finite, which the next exchange tells.
                let known = Partner { gain: 0.0, number: low.number, error: low.value, value: 0.0 };
                let partner = self.exchange.partner(best)?.unwrap_or(known);
                (partner, self.row(partner.number)?)
            }
        };
        let (first, second) = (up.number as usize, partner.number as usize);
        let curvature = self.diagonal[first] + self.diagonal[second] - 2.0 * f64::from(partner.value);
        // The sample with itself is no pair along which a kernel could be negative, and a kernel
        // that is positive for any samples is so but for rounding.
        let is_negative = curvature < 0.0 && !is_positive(self.problem.parameters.kernel);
        self.negative_curvatures += u64::from(is_negative);
        let wanted = (partner.error - up.value) / if curvature > 0.0 { curvature } else { CURVATURE_MIN };
        let (up_room, low_room) = (self.room(first, 1.0), self.room(second, -1.0));
        let step = wanted.min(up_room).min(low_room);
        let changed =
            [self.change(first, step, step == up_room), self.change(second, -step, step == low_room)];
        let gap = partner.error - up.value;
        let up_after = up.value + step * (self.diagonal[first] - f64::from(partner.value));
        let low_after = partner.error + step * (f64::from(partner.value) - self.diagonal[second]);
        // Where the kernel is positive a step brings the two together, unless rounding hides it. A
        // step to a bound may be that small, and still the pair is not chosen again.
        let is_to_bound = step == up_room || step == low_room;
        let is_lost = curvature > 0.0 && !is_to_bound && low_after - up_after >= gap;
        self.gained += step * (gap - 0.5 * curvature * step);
        if changed == [false; 2] || is_lost || self.gained > self.gain_max {
            if self.notes & note::NOT_FINITE != 0 {
                return Err(SvmError::NotFinite { sample: self.not_finite });
            }
            return Err(SvmError::NoProgress { up: up.number, low: partner.number, gap });
        }
        for number in [up.number, partner.number] {
            if let Some(place) = self.place(number) {
                self.allow(place);
            }
        }
        let (up_row, low_row) = self.cache.rows(up_place, low_place);
        Ok(wide::update(&mut self.errors, step, up_row, low_row))
    }

    /// How far a factor can go along its label (`direction` 1) or against it (-1).
    fn room(&self, number: usize, direction: f64) -> f64 {
        let factor = self.factors[number];
        if self.signs[number] == direction { self.problem.parameters.c - factor } else { factor }
    }

    /// Moves a factor; returns whether it is another one.
    fn change(&mut self, number: usize, step: f64, is_whole_room: bool) -> bool {
        let c = self.problem.parameters.c;
        let rises = (step > 0.0) == (self.signs[number] > 0.0);
        let bound = if rises { c } else { 0.0 };
        let before = self.factors[number];
        let moved = (before + step * self.signs[number]).clamp(0.0, c);
        self.factors[number] = if is_whole_room { bound } else { moved };
        self.factors[number] != before
    }

    /// Notes in which directions a sample of this rank may go.
    fn allow(&mut self, place: usize) {
        let number = self.offset() + place;
        self.errors.up[place] = if self.room(number, 1.0) > 0.0 { 0.0 } else { f64::INFINITY };
        self.errors.low[place] = if self.room(number, -1.0) > 0.0 { 0.0 } else { f64::NEG_INFINITY };
    }

    /// The sample of this rank that gains most with the one that goes up.
    fn own_partner(&mut self, up: Candidate, up_place: usize) -> Option<Partner> {
        let offset = self.offset();
        let diagonal = &self.diagonal[offset..offset + self.problem.members.len()];
        let row = &self.cache.entry(up_place).row;
        let best = wide::best_gain(&self.errors, diagonal, row, up.value, self.diagonal[up.number as usize]);
        best.place.map(|place| Partner {
            gain: best.value,
            number: (offset + place) as u32,
            error: self.errors.error[place],
            value: row[place],
        })
    }

    /// The kernel value of two samples whose rows are here, as the owner of the second has it.
    fn value_of(&mut self, up_place: usize, low_place: usize) -> f32 {
        let mut value = [0.0];
        self.query.set(self.cache.entry(up_place).sample());
        let (low, _) = self.cache.entry(low_place).parts();
        let norm = low.row(0).norm();
        self.query.fill(self.problem.parameters.kernel, low, &[0], |_| norm, &mut value);
        value[0]
    }

    /// Where a sample's row is, after its values for the active samples were made as far as they
    /// were not kept.
    ///
    /// While all rows fit the cache they are made whole: nearly all are those of support vectors,
    /// whose other values the reconstruction needs, and samples are read faster without gaps.
    fn row(&mut self, number: u32) -> Result<usize, SvmError> {
        let place = match self.cache.find(number) {
            Some(place) => place,
            None => {
                let owner = self.starts.partition_point(|start| *start <= number as usize) - 1;
                self.share_sample(number, owner)?;
                let place = self.cache.place_for(number, self.problem.members.len());
                let malformed = || SvmError::Malformed { rank: owner as u32 };
                let entry = self.cache.entry(place);
                entry.take_sample(&self.words, self.problem.features).ok_or_else(malformed)?;
                place
            }
        };
        if !self.cache.entry(place).is_complete_for(self.reconstructions) {
            let is_finite = if self.cache.keeps_all() {
                self.make_values(place, 0..self.problem.members.len() as u32)
            } else {
                let active = std::mem::take(&mut self.active);
                let is_finite = self.make_values(place, active.iter().copied());
                self.active = active;
                is_finite
            };
            self.cache.entry(place).note_complete_for(self.reconstructions);
            if !is_finite {
                self.note_not_finite(number);
            }
        }
        Ok(place)
    }

    /// Makes those of a row's values for these places that were not made yet. Returns whether all
    /// that it made are finite.
    ///
    /// A value has the same bits whenever it is made, and beside whichever others.
    pub(crate) fn make_values(&mut self, place: usize, wanted: impl ExactSizeIterator<Item = u32>) -> bool {
        let Self { cache, query, problem, kernel_evaluations, .. } = self;
        let (kernel, samples, members) = (problem.parameters.kernel, problem.samples, &problem.members);
        let entry = cache.entry(place);
        if entry.made_count() == 0 && wanted.len() == members.len() {
            *kernel_evaluations += members.len() as u64;
            entry.note_whole();
            query.set(entry.sample());
            let norm = |at: usize| problem.norms[members[at] as usize];
            return query.fill(kernel, samples, members, norm, &mut entry.row);
        }
        if entry.made_count() == members.len() {
            return true;
        }
        let missing: Vec<u32> = entry.missing(wanted).collect();
        *kernel_evaluations += missing.len() as u64;
        entry.note_made(&missing);
        query.set(entry.sample());
        let which: Vec<u32> = missing.iter().map(|place| members[*place as usize]).collect();
        let mut values = vec![0.0; which.len()];
        let norm = |at: usize| problem.norms[which[at] as usize];
        let is_finite = query.fill(kernel, samples, &which, norm, &mut values);
        for (place, value) in missing.into_iter().zip(values) {
            entry.row[place as usize] = value;
        }
        is_finite
    }

    /// Has the next exchange end the solver on all ranks.
    pub(crate) fn note_not_finite(&mut self, number: u32) {
        self.notes |= note::NOT_FINITE;
        self.not_finite = number;
    }

    /// Brings a sample's words to all ranks. Their number is rounded up, so that calls have few
    /// shapes.
    fn share_sample(&mut self, number: u32, owner: usize) -> Result<(), CollectiveError> {
        /// Words of the shortest message.
        const WORDS_MIN: usize = 16;
        let words = Row::words_of(self.blocks[number as usize] as usize);
        self.words.clear();
        if let Some(place) = self.place(number) {
            let sample = self.problem.members[place];
            self.problem.samples.row(sample as usize).put_words(&mut self.words);
        }
        self.words.resize(words.next_power_of_two().max(WORDS_MIN), 0);
        if self.problem.group.world_size() > 1 {
            self.problem.group.broadcast(&mut self.words[..], owner as u32)?;
        }
        Ok(())
    }

    /// Leaves out the samples that are at a bound and could only leave it with a partner beyond the
    /// extremes.
    fn shrink(&mut self, up: f64, low: f64) -> Result<(), CollectiveError> {
        let Errors { error, up: may_up, low: may_low } = &mut self.errors;
        self.active.retain(|place| {
            let place = *place as usize;
            let only_low = may_up[place] != 0.0 && error[place] < up;
            let only_up = may_low[place] != 0.0 && error[place] > low;
            if only_low || only_up {
                (may_up[place], may_low[place]) = (f64::INFINITY, f64::NEG_INFINITY);
            }
            !(only_low || only_up)
        });
        let mut active = [self.active.len() as u64];
        self.problem.group.all_reduce(&mut active, pleach_collectives::ReduceOp::Sum)?;
        self.active_of_all = active[0] as usize;
        Ok(())
    }

    /// Lets all samples take part. Errors of those that were left out must be right.
    pub(crate) fn activate_all(&mut self) {
        self.active = (0..self.problem.members.len() as u32).collect();
        self.active_of_all = self.factors.len();
        for place in 0..self.active.len() {
            self.allow(place);
        }
    }

    /// The factor of a sample, times its label.
    pub(crate) fn coefficient(&self, number: usize) -> f64 {
        self.factors[number] * self.signs[number]
    }

    /// What the factors mean. Sums are made over all samples in their order.
    fn solution(&mut self, outcome: Outcome, gap: f64) -> Result<Solution, SvmError> {
        let errors = gather(self.problem.group, &self.errors.error)?.items;
        let c = self.problem.parameters.c;
        let (mut objective, mut bounded) = (0.0, 0);
        let (mut free_sum, mut free) = (0.0, 0u64);
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for (number, error) in errors.iter().copied().enumerate() {
            let (factor, sign) = (self.factors[number], self.signs[number]);
            objective += factor * (sign * error - 1.0);
            bounded += u64::from(factor >= c);
            if factor > 0.0 && factor < c {
                (free_sum, free) = (free_sum + error, free + 1);
            } else if self.room(number, 1.0) > 0.0 {
                least = least.min(error);
            } else {
                most = most.max(error);
            }
        }
        let rho = if free > 0 { free_sum / free as f64 } else { (least + most) / 2.0 };
        Ok(Solution {
            coefficients: (0..self.factors.len()).map(|number| self.coefficient(number)).collect(),
            offset: self.offset(),
            bounded,
            rho,
            objective: objective / 2.0,
            gap,
            outcome,
            iterations: self.iterations,
            reconstructions: self.reconstructions,
            negative_curvatures: self.negative_curvatures,
            kernel_evaluations: self.kernel_evaluations,
        })
    }
}

/// The most by which the objective can fall from 0, doubled: all factors at C, and the quadratic
/// part at its least, which is 0 for kernels that are positive.
fn gain_max(parameters: &Parameters, samples: usize, norm_max: f64) -> f64 {
    let all = parameters.c * samples as f64;
    let largest = || all * all * parameters.kernel.largest(norm_max);
    2.0 * all + if is_positive(parameters.kernel) { 0.0 } else { largest() }
}

/// Whether a kernel is positive for any samples.
fn is_positive(kernel: Kernel) -> bool {
    match kernel {
        Kernel::Linear | Kernel::Rbf { .. } => true,
        Kernel::Polynomial { offset, .. } => offset >= 0.0,
        Kernel::Sigmoid { .. } => false,
    }
}

/// The number of iterations between two checks.
fn iterations_before(first: FirstCheck, samples: usize) -> u64 {
    let iterations = match first {
        FirstCheck::Iterations(iterations) => iterations,
        FirstCheck::Share(share) => (share * samples as f64) as u64,
    };
    iterations.max(1)
}
