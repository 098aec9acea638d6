//! What is refused before a training begins: a plan that this rank cannot run, and arguments that
//! are not the same on all ranks.

use std::ops::Range;

use pleach_collectives::Group;

use super::TrainError;
use crate::interpreter::Plan;
use crate::layout::Layout;
use crate::lines::Line;
use crate::policy::Vector;
use crate::shares::WindowPlan;

/// Longest text of a scheme that is compared, in bytes.
const TEXT_BYTES: usize = 256;

/// Refuses a plan that is none of this rank in its group, for a model of this layout.
pub(crate) fn check_plan(plan: &Plan, layout: &Layout, group: &Group) -> Result<(), TrainError> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut buckets = plan.buckets.clone();
    buckets.sort_by_key(|bucket| bucket.start);
    let follows =
        |end: usize, bucket: &Range<usize>| (bucket.start == end && bucket.end > end).then_some(bucket.end);
    let is_this = |window: &WindowPlan| {
        (window.rank, window.ranks, window.row) == (rank, ranks, layout.row()) && window.slots > 0
    };
    let is_line = |line: &Line| {
        line.ranks.contains(&rank)
            && line.ranks.is_sorted_by(|one, next| one < next)
            && line.ranks.iter().all(|rank| *rank < ranks)
    };
    let reason = if plan.parameters != layout.parameters() {
        "its vectors have another number of elements than the layout"
    } else if buckets.iter().try_fold(0, follows) != Some(plan.parameters) {
        "its buckets do not hold each parameter once"
    } else if [Vector::Parameters, Vector::Gradient].iter().any(|vector| !plan.vectors.contains(vector)) {
        "it has no vector of the parameters, or none of the gradient"
    } else if !plan.window.as_ref().is_none_or(is_this) {
        "its window is of another rank, number of ranks or length of rows, or has no slots"
    } else if !plan.lines.iter().all(is_line) {
        "a line lacks this rank, has ranks that there are not, or is not in ascending order"
    } else {
        return Ok(());
    };
    Err(TrainError::Plan { reason })
}

/// Compares the name of the scheme and these numbers, each with what it is, on all ranks.
pub(crate) fn compare(group: &Group, name: &str, numbers: &[(&'static str, u64)]) -> Result<(), TrainError> {
    let text = name.as_bytes();
    let mut own = text[..text.len().min(TEXT_BYTES)].to_vec();
    own.resize(TEXT_BYTES, 0);
    own.extend(numbers.iter().flat_map(|(_, value)| value.to_le_bytes()));
    let mut all = vec![0; own.len() * group.world_size() as usize];
    group.all_gather(&own, &mut all)?;
    let rank = group.rank();
    for (other, block) in (0..).zip(all.chunks_exact(own.len())) {
        let (text, values) = block.split_at(TEXT_BYTES);
        if text != &own[..TEXT_BYTES] {
            let theirs = String::from_utf8_lossy(text).trim_end_matches('\0').to_owned();
            return Err(TrainError::Different {
                what: "the scheme",
                rank,
                own: name.to_owned(),
                other,
                theirs,
            });
        }
        for ((what, own), theirs) in numbers.iter().zip(values.chunks_exact(size_of::<u64>())) {
            let theirs = u64::from_le_bytes(theirs.try_into().expect("eight bytes"));
            if *own != theirs {
                let (own, theirs) = (own.to_string(), theirs.to_string());
                return Err(TrainError::Different { what, rank, own, other, theirs });
            }
        }
    }
    Ok(())
}
