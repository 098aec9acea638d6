//! Sparse updates: of a table of rows, the rows that a rank has changed.
//!
//! A training whose [layout](crate::Layout::table) is a table of rows sends, with each write, the
//! rows that hold anything but 0. In that form a row is its number in the share, as an `f32`, and
//! then its elements. A write with so many rows that this is no shorter has all elements.
//!
//! **Invariant:** what is decoded is what was encoded, but that −0 may become 0.

use std::ops::Range;

use crate::trainer::TrainError;

/// Most rows of a share that are numbered: an `f32` holds such numbers exactly.
const ROWS_MAX: usize = 1 << 24;

/// Whether anything in a row is other than 0.
pub(crate) fn is_changed(row: &[f32]) -> bool {
    row.iter().any(|element| *element != 0.0)
}

/// What is sent of these elements, which are rows of so many each: the rows in `memory`, or all.
pub(crate) fn encode<'a>(elements: &'a [f32], row: Option<usize>, memory: &'a mut Vec<f32>) -> &'a [f32] {
    let Some(length) = row.filter(|length| elements.len() / length < ROWS_MAX) else { return elements };
    memory.clear();
    for (number, row) in elements.chunks(length).enumerate().filter(|(_, row)| is_changed(row)) {
        if memory.len() + 1 + row.len() >= elements.len() {
            return elements;
        }
        memory.push(number as f32);
        memory.extend_from_slice(row);
    }
    memory
}

/// Stores what was sent in as many elements as were encoded. Rows that there are not are left out,
/// and elements that were not sent are 0.
pub(crate) fn decode(sent: &[f32], row: Option<usize>, into: &mut [f32]) {
    let Some(length) = row.filter(|_| sent.len() < into.len()) else {
        let common = sent.len().min(into.len());
        into[..common].copy_from_slice(&sent[..common]);
        into[common..].fill(0.0);
        return;
    };
    into.fill(0.0);
    for sent in sent.chunks_exact(length + 1) {
        let begin = (sent[0] as usize).saturating_mul(length);
        if let Some(row) = into.get_mut(begin..begin.saturating_add(length)) {
            row.copy_from_slice(&sent[1..]);
        }
    }
}

/// The rows of a table in a step: those of this rank's copy, and the gradient, in which each row is
/// 0 that nothing was added to. See [`Step::rows`](crate::Step::rows).
pub struct Rows<'a> {
    length: usize,
    parameters: &'a [f32],
    gradient: &'a mut [f32],
}

impl<'a> Rows<'a> {
    pub(crate) fn new(length: usize, parameters: &'a [f32], gradient: &'a mut [f32]) -> Self {
        gradient.fill(0.0);
        Self { length, parameters, gradient }
    }

    /// The number of rows.
    #[must_use]
    pub fn count(&self) -> usize {
        self.parameters.len() / self.length
    }

    fn place(&self, row: usize) -> Result<Range<usize>, TrainError> {
        let rows = self.count();
        if row < rows {
            Ok(row * self.length..(row + 1) * self.length)
        } else {
            Err(TrainError::Row { row, rows, elements: self.length, length: self.length })
        }
    }

    /// A row of this rank's copy.
    ///
    /// # Errors
    ///
    /// [`TrainError::Row`]: there is none of this number.
    pub fn read_row(&self, row: usize) -> Result<&[f32], TrainError> {
        Ok(&self.parameters[self.place(row)?])
    }

    /// Adds to a row of the gradient, by which the optimizer changes the table.
    ///
    /// # Errors
    ///
    /// [`TrainError::Row`]: there is none of this number, or it has another length.
    pub fn add(&mut self, row: usize, elements: &[f32]) -> Result<(), TrainError> {
        let place = self.place(row)?;
        if elements.len() != self.length {
            let (rows, elements) = (self.count(), elements.len());
            return Err(TrainError::Row { row, rows, elements, length: self.length });
        }
        self.gradient[place].iter_mut().zip(elements).for_each(|(sum, element)| *sum += element);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_come_back_and_are_sent_where_that_is_shorter(
            length in 1_usize..5,
            rows in prop::collection::vec(prop::option::weighted(0.3, -3_i8..4), 0..12),
        ) {
            let row = |element: &Option<i8>| vec![f32::from(element.unwrap_or(0)); length];
            let elements: Vec<f32> = rows.iter().flat_map(row).collect();
            let changed = rows.iter().filter(|element| element.is_some_and(|element| element != 0)).count();
            let mut memory = Vec::new();
            let sent = encode(&elements, Some(length), &mut memory);
            prop_assert_eq!(sent.len(), elements.len().min(changed * (length + 1)));
            let mut again = vec![7.0; elements.len()];
            decode(sent, Some(length), &mut again);
            prop_assert_eq!(&again, &elements);
            let mut memory = Vec::new();
            let sent = encode(&elements, None, &mut memory);
            prop_assert_eq!(sent, &elements[..]);
        }
    }

    #[test]
    fn what_no_rank_sends_is_left_out() {
        let mut into = [9.0; 6];
        decode(&[f32::NAN, 1.0, 2.0], Some(2), &mut into);
        // Not a number is 0 as a number of a row.
        assert_eq!(into, [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
        decode(&[3.0, 1.0, 2.0], Some(2), &mut into);
        assert_eq!(into, [0.0; 6]);
        decode(&[1e30, 1.0, 2.0], Some(2), &mut into);
        assert_eq!(into, [0.0; 6]);
        into.fill(9.0);
        decode(&[1.0, 2.0], None, &mut into);
        assert_eq!(into, [1.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
