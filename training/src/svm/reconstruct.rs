//! The errors of the samples that were left out, made anew.
//!
//! A rank has the kernel values with the support vectors whose rows it keeps, and makes those that
//! are missing there. The other support vectors of each rank travel around the ring of ranks. While
//! a rank computes with one block, it receives the next one and passes the present one on. As the
//! sum of a sample must not depend on which rows are kept, nor on where in the ring its rank is, it
//! is one that has the same bits in any order.

use pleach_collectives::{CollectiveError, Operation, Pending};

use super::error::SvmError;
use super::samples::Samples;
use super::solver::Solver;
use super::sum::{AnyOrderSum, Cuts};
use super::wide::Extreme;

/// Support vectors of a rank, with their factors times labels, whose rows are not kept.
struct Block {
    coefficients: Vec<f64>,
    vectors: Samples,
}

/// The samples of this rank whose errors are made anew.
struct Absent {
    places: Vec<u32>,
    samples: Vec<u32>,
    sums: Vec<AnyOrderSum>,
    /// Their kernel values with one support vector.
    values: Vec<f32>,
    is_finite: bool,
}

impl Solver<'_> {
    /// Makes the errors of all samples that were left out, lets all take part, and returns the
    /// extremes.
    pub(crate) fn reconstruct(&mut self) -> Result<[Extreme; 2], SvmError> {
        let mut is_active = vec![false; self.problem.members.len()];
        self.active.iter().for_each(|place| is_active[*place as usize] = true);
        let places: Vec<u32> =
            (0..self.problem.members.len() as u32).filter(|place| !is_active[*place as usize]).collect();
        let samples = places.iter().map(|place| self.problem.members[*place as usize]).collect();
        let (sums, values) = (vec![AnyOrderSum::default(); places.len()], vec![0.0; places.len()]);
        let mut absent = Absent { places, samples, sums, values, is_finite: true };
        self.add_kept_rows(&mut absent);
        // All ranks keep the same rows, so either all pass blocks or none.
        if (0..self.factors.len()).any(|number| self.travels(number)) {
            self.pass_blocks(&mut absent)?;
        }
        for (place, sum) in absent.places.iter().zip(&absent.sums) {
            let place = *place as usize;
            self.errors.error[place] = sum.value() - self.problem.signs[place];
        }
        if !absent.is_finite {
            self.note_not_finite((self.offset() + absent.places[0] as usize) as u32);
        }
        self.reconstructions += 1;
        self.activate_all();
        Ok(self.extremes())
    }

    /// Whether a sample is a support vector whose row is not kept.
    fn travels(&self, number: usize) -> bool {
        self.factors[number] != 0.0 && !self.cache.has(number as u32)
    }

    /// Adds the parts of the support vectors whose rows are kept.
    fn add_kept_rows(&mut self, absent: &mut Absent) {
        if absent.places.is_empty() {
            return;
        }
        let support: Vec<(usize, u32)> =
            self.cache.kept().filter(|(_, number)| self.factors[*number as usize] != 0.0).collect();
        for (place, number) in support {
            absent.is_finite &= self.make_values(place, absent.places.iter().copied());
            let row = &self.cache.entry(place).row;
            for (value, place) in absent.values.iter_mut().zip(&absent.places) {
                *value = row[*place as usize];
            }
            absent.add(self.coefficient(number as usize), self.cuts);
        }
    }

    /// Takes the blocks of all ranks, one after the other, beginning with its own.
    fn pass_blocks(&mut self, absent: &mut Absent) -> Result<(), SvmError> {
        let group = self.problem.group;
        let (rank, ranks) = (group.rank(), group.world_size());
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut words = self.own_block();
        let mut lengths = vec![0u64; ranks as usize];
        group.all_gather(&[words.len() as u64], &mut lengths)?;
        for step in 0..ranks {
            let source = (rank + ranks - step) % ranks;
            let block = Block::from_words(&words, self.problem.features)
                .ok_or(SvmError::Malformed { rank: source })?;
            let mut moving: Option<[Pending<Vec<u32>>; 2]> = None;
            if step + 1 < ranks {
                let length = lengths[((rank + ranks - step - 1) % ranks) as usize] as usize;
                let received = started(group.start(Operation::recv(vec![0; length], before)))?;
                let sent = started(group.start(Operation::send(std::mem::take(&mut words), next)))?;
                moving = Some([received, sent]);
            }
            self.add_block(&block, absent);
            if let Some([received, sent]) = moving {
                words = received.wait().map_err(|failed| failed.error)?;
                sent.wait().map_err(|failed| failed.error)?;
            }
        }
        Ok(())
    }

    /// This rank's support vectors that travel: their number, the factors, the rows.
    fn own_block(&self) -> Vec<u32> {
        let support: Vec<(f64, u32)> = (self.offset()..)
            .zip(self.problem.members.iter().copied())
            .filter(|(number, _)| self.travels(*number))
            .map(|(number, sample)| (self.coefficient(number), sample))
            .collect();
        let mut words = vec![support.len() as u32];
        for (coefficient, _) in &support {
            let bits = coefficient.to_bits();
            words.extend([bits as u32, (bits >> 32) as u32]);
        }
        for (_, sample) in support {
            self.problem.samples.row(sample as usize).put_words(&mut words);
        }
        words
    }

    fn add_block(&mut self, block: &Block, absent: &mut Absent) {
        if absent.places.is_empty() {
            return;
        }
        let (kernel, norms) = (self.problem.parameters.kernel, self.problem.norms);
        for (at, coefficient) in block.coefficients.iter().enumerate() {
            self.query.set(block.vectors.row(at));
            let Absent { samples, values, is_finite, .. } = &mut *absent;
            let norm = |at: usize| norms[samples[at] as usize];
            *is_finite &= self.query.fill(kernel, self.problem.samples, samples, norm, values);
            absent.add(*coefficient, self.cuts);
        }
        self.kernel_evaluations += block.coefficients.len() as u64 * absent.places.len() as u64;
    }
}

impl Absent {
    /// Adds the part of a support vector by its kernel values.
    fn add(&mut self, coefficient: f64, cuts: Cuts) {
        for (sum, value) in self.sums.iter_mut().zip(&self.values) {
            sum.add(coefficient * f64::from(*value), cuts);
        }
    }
}

fn started<D>(result: pleach_collectives::Started<D>) -> Result<Pending<D>, CollectiveError> {
    result.map_err(|refused| refused.error)
}

impl Block {
    fn from_words(words: &[u32], features: u32) -> Option<Self> {
        let (&count, rest) = words.split_first()?;
        let (bits, mut rest) = rest.split_at_checked((count as usize).checked_mul(2)?)?;
        let coefficient = |[low, high]: &[u32; 2]| f64::from_bits(u64::from(*low) | u64::from(*high) << 32);
        let coefficients = bits.as_chunks().0.iter().map(coefficient).collect();
        let mut vectors = Samples::new(features);
        for _ in 0..count {
            rest = vectors.push_words(rest)?;
        }
        Some(Self { coefficients, vectors })
    }
}
