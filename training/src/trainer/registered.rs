//! The vectors of a rank in registered memory, of which operations own pieces while they are under
//! way; and its window, if the scheme has one-sided exchanges.
//!
//! **Invariant:** a piece is either here or owned by one operation, and pieces that touch are one.

use std::ops::Range;
use std::sync::Arc;

use pleach_collectives::{Buffer, CollectiveError, Window};

use crate::copies::Stamps;
use crate::interpreter::{Plan, Vectors};
use crate::ledger::PolicyError;
use crate::policy::Vector;
use crate::rows::decode;

/// One vector: its pieces that are here, each with the place where it begins, in order.
#[derive(Debug, Default)]
struct Pieces(Vec<(usize, Buffer<f32>)>);

impl Pieces {
    /// The piece that holds these elements.
    fn holder(&self, piece: &Range<usize>) -> Option<usize> {
        self.0.iter().position(|(begin, part)| *begin <= piece.start && piece.end <= begin + part.len())
    }

    /// Takes a piece out; `None` if it is not here as a whole.
    fn take(&mut self, piece: &Range<usize>) -> Option<Buffer<f32>> {
        let place = self.holder(piece)?;
        let (begin, part) = self.0.remove(place);
        let (before, after) = (piece.start - begin, begin + part.len() - piece.end);
        let lengths: Vec<usize> =
            [before, piece.len(), after].into_iter().filter(|length| *length > 0).collect();
        let parts = part.split(&lengths).expect("the lengths are together that of the piece");
        let (mut from, mut taken) = (begin, None);
        for part in parts {
            let length = part.len();
            if from == piece.start && length == piece.len() {
                taken = Some(part);
            } else {
                self.put(from, part);
            }
            from += length;
        }
        taken
    }

    /// Puts a piece back.
    fn put(&mut self, begin: usize, part: Buffer<f32>) {
        let place = self.0.partition_point(|(other, _)| *other < begin);
        self.0.insert(place, (begin, part));
        for left in [place, place.wrapping_sub(1)] {
            self.join(left);
        }
    }

    /// Makes one of two pieces that touch: the one at this place and the next.
    fn join(&mut self, left: usize) {
        let Some([(begin, one), (next, _)]) = self.0.get(left..left.saturating_add(2)) else { return };
        if begin + one.len() != *next {
            return;
        }
        let ((_, other), (begin, one)) = (self.0.remove(left + 1), self.0.remove(left));
        let joined = Buffer::join(vec![one, other]).expect("they were cut from one buffer");
        self.0.insert(left, (begin, joined));
    }

    fn slice(&mut self, piece: &Range<usize>) -> Option<&mut [f32]> {
        if piece.is_empty() {
            return Some(&mut []);
        }
        let (begin, part) = self.holder(piece).map(|place| &mut self.0[place])?;
        Some(&mut part[piece.start - *begin..piece.end - *begin])
    }
}

/// The memory of a vector, for programs in other languages ([`Trainer::memory`]). It stays where it
/// is as long as this.
///
/// [`Trainer::memory`]: crate::Trainer::memory
#[derive(Clone)]
pub struct VectorMemory {
    address: usize,
    count: usize,
    _owner: Arc<dyn Send + Sync>,
}

impl VectorMemory {
    /// That of a buffer, for example of [`Trainer::averaged`](crate::Trainer::averaged).
    pub fn of(buffer: &mut Buffer<f32>) -> Self {
        let address = buffer.as_mut_ptr().expose_provenance();
        Self { address, count: buffer.len(), _owner: buffer.owner() }
    }

    /// Where it begins. The provenance of the pointer is exposed.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// How many elements of four bytes it has.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }
}

/// Makes a step of some elements by their gradient.
pub(crate) type Optimizer = Box<dyn FnMut(Range<usize>, &mut [f32], &[f32]) + Send>;

/// The vectors of a rank.
pub(crate) struct RegisteredVectors {
    /// If the program has given it to the trainer.
    pub(crate) optimizer: Option<Optimizer>,
    vectors: [Pieces; Vector::COUNT],
    /// Peers reach what this rank publishes by it.
    pub(crate) window: Option<Window<f32>>,
    /// What is published of a share that is not all of it: its stamps behind it, and zeros.
    padded: Vec<f32>,
    /// Of a table: the elements of a row, and which rows were published when.
    stamps: Option<(usize, Stamps)>,
    /// Why something was not published.
    failed: Option<CollectiveError>,
}

impl RegisteredVectors {
    /// The vectors of a plan, zeroed, in registered buffers of these lengths. Without a window.
    pub(crate) fn new<E>(
        plan: &Plan,
        mut buffer: impl FnMut(usize) -> Result<Buffer<f32>, E>,
    ) -> Result<Self, E> {
        let mut vectors: [Pieces; Vector::COUNT] = Default::default();
        for vector in &plan.vectors {
            // Nothing but this rank's share comes.
            let piece = match (vector, &plan.window) {
                (Vector::Arrival, Some(window)) => window.share(window.rank, plan.parameters),
                _ => 0..plan.parameters,
            };
            vectors[vector.index()].0.push((piece.start, buffer(piece.len())?));
        }
        let row = plan.window.and_then(|window| window.row);
        let stamps = row.map(|row| (row, Stamps::default()));
        Ok(Self { optimizer: None, vectors, window: None, padded: Vec::new(), stamps, failed: None })
    }

    /// The error of a publication that has failed.
    pub(crate) fn take_error(&mut self) -> Result<(), CollectiveError> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Stores the elements of a write that has come, which are rows of so many each.
    pub(crate) fn store_arrival(&mut self, elements: &[f32], row: Option<usize>) {
        if let Some((_, part)) = self.vectors[Vector::Arrival.index()].0.first_mut() {
            decode(elements, row, part);
        }
    }

    /// Takes a piece out for an operation; `None` if another has it.
    pub(crate) fn take(&mut self, vector: Vector, piece: &Range<usize>) -> Option<Buffer<f32>> {
        self.vectors[vector.index()].take(piece)
    }

    /// The memory of a whole vector of so many elements; `None` if an operation has a part of it.
    pub(crate) fn memory(&mut self, vector: Vector, len: usize) -> Option<VectorMemory> {
        match &mut self.vectors[vector.index()].0[..] {
            [(0, all)] if all.len() == len => Some(VectorMemory::of(all)),
            _ => None,
        }
    }

    /// Puts the piece of an operation back.
    pub(crate) fn put(&mut self, vector: Vector, begin: usize, part: Buffer<f32>) {
        self.vectors[vector.index()].put(begin, part);
    }

    /// The parameters and a piece of the gradient; `None` if an operation has a part of it.
    pub(crate) fn for_computing(
        &mut self,
        parameters: usize,
        piece: &Range<usize>,
    ) -> Option<(&[f32], &mut [f32])> {
        let places = [Vector::Parameters, Vector::Gradient].map(Vector::index);
        let [all, gradient] = self.vectors.get_disjoint_mut(places).expect("two vectors are two places");
        Some((all.slice(&(0..parameters))?, gradient.slice(piece)?))
    }
}

impl Vectors for RegisteredVectors {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        let vectors = self.vectors.get_disjoint_mut(names.map(Vector::index)).expect("different vectors");
        vectors
            .map(|vector| vector.slice(piece).expect("the ledger lets only pieces be touched that are here"))
    }

    fn step(&mut self, piece: &Range<usize>) -> Result<(), PolicyError> {
        let mut optimizer = self.optimizer.take().ok_or(PolicyError::NoOptimizer)?;
        let [parameters, gradient] = self.pieces([Vector::Parameters, Vector::Gradient], piece);
        optimizer(piece.clone(), parameters, gradient);
        self.optimizer = Some(optimizer);
        Ok(())
    }

    fn has_optimizer(&self) -> bool {
        self.optimizer.is_some()
    }

    fn publish(&mut self, vector: Vector, piece: &Range<usize>, word: u64) {
        let Some(window) = &mut self.window else { return };
        let share = self.vectors[vector.index()].slice(piece).expect("the ledger found it free");
        let published = if share.len() == window.len() {
            window.publish(share, word.into())
        } else {
            self.padded.clear();
            self.padded.extend_from_slice(share);
            if let Some((row, stamps)) = &mut self.stamps {
                self.padded.extend_from_slice(stamps.publish(share, *row));
            }
            self.padded.resize(window.len(), 0.0);
            window.publish(&self.padded, word.into())
        };
        if let Err(error) = published {
            self.failed.get_or_insert(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use pleach_collectives::{Group, Options};
    use pleach_transport::rendezvous::World;

    use super::*;
    use crate::{Layout, Scheme};

    #[test]
    fn pieces_are_taken_in_any_order_and_are_one_again_when_all_are_back() {
        let group = Group::join(&Options::new(World::alone())).expect("a rank alone joins");
        let scheme: Scheme = "sync".parse().expect("is a scheme");
        let plan = scheme.plan(&Layout::of(&[10]), 0, 1).expect("one rank trains");
        let mut vectors = RegisteredVectors::new(&plan, |len| group.buffer(len)).expect("there is memory");
        let [all] = vectors.pieces([Vector::Gradient], &(0..10));
        all.iter_mut().zip(0_u8..).for_each(|(element, number)| *element = f32::from(number));
        let pieces = [6..10, 2..4, 0..2, 4..6];
        let mut taken = Vec::new();
        for piece in &pieces {
            let part = vectors.take(Vector::Gradient, piece).expect("it is here");
            assert_eq!(part[0], piece.start as f32);
            assert!(vectors.take(Vector::Gradient, piece).is_none(), "it is taken");
            taken.push((piece.start, part));
        }
        for (begin, mut part) in taken {
            part.iter_mut().for_each(|element| *element += 100.0);
            vectors.put(Vector::Gradient, begin, part);
        }
        let [all] = vectors.pieces([Vector::Gradient], &(0..10));
        assert!(all.iter().zip(0_u8..).all(|(element, number)| *element == 100.0 + f32::from(number)));
    }
}
