//! Planners that place one buffer after the other, each in the tightest gap.
//!
//! They differ in the order of the buffers. A buffer that fits between the buffers that were placed
//! and live with it takes the smallest such gap; otherwise it lies above all of them.

use std::cmp::Reverse;

use super::{Buffer, MemoryPlan, aligned};

/// By decreasing size; of equal sizes the one that begins first.
pub(super) fn by_size(buffers: &[Buffer]) -> MemoryPlan {
    in_order(buffers, &sorted(buffers, |buffer| (Reverse(buffer.bytes), buffer.lifetime.start)))
}

/// What lives throughout lies at the bottom; the others by decreasing size.
pub(super) fn whole_lives_first(buffers: &[Buffer]) -> MemoryPlan {
    let first = buffers.iter().map(|buffer| buffer.lifetime.start).min().unwrap_or(0);
    let last = buffers.iter().map(|buffer| buffer.lifetime.end).max().unwrap_or(0);
    let order = sorted(buffers, |buffer| {
        let is_whole = buffer.lifetime == (first..last);
        (!is_whole, Reverse(if is_whole { 0 } else { buffer.bytes }), buffer.lifetime.start)
    });
    in_order(buffers, &order)
}

/// Once by decreasing size, once by decreasing length of life.
pub(super) fn better_of_space_and_time(buffers: &[Buffer]) -> MemoryPlan {
    let space =
        in_order(buffers, &sorted(buffers, |buffer| (Reverse(buffer.bytes), Reverse(length(buffer)))));
    let time = in_order(buffers, &sorted(buffers, |buffer| (Reverse(length(buffer)), Reverse(buffer.bytes))));
    if time.bytes < space.bytes { time } else { space }
}

/// The numbers of the buffers, in the order of a key and then of their numbers.
fn sorted<Key: Ord>(buffers: &[Buffer], key: impl Fn(&Buffer) -> Key) -> Vec<usize> {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&number| (key(&buffers[number]), number));
    order
}

fn length(buffer: &Buffer) -> u64 {
    buffer.lifetime.end.saturating_sub(buffer.lifetime.start)
}

/// Places buffers in this order.
fn in_order(buffers: &[Buffer], order: &[usize]) -> MemoryPlan {
    let mut offsets = vec![0; buffers.len()];
    // What was placed, in order of offset.
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len());
    let mut arena = 0;
    for &number in order {
        let buffer = &buffers[number];
        let bytes = aligned(buffer.bytes);
        if buffer.lifetime.is_empty() || bytes == 0 {
            arena = arena.max(bytes);
            continue;
        }
        let (mut above, mut tightest) = (0, None::<(u64, u64)>);
        for &other in &placed {
            let lives = &buffers[other].lifetime;
            if lives.start >= buffer.lifetime.end || buffer.lifetime.start >= lives.end {
                continue;
            }
            let start = offsets[other];
            if start >= above + bytes && tightest.is_none_or(|(gap, _)| start - above < gap) {
                tightest = Some((start - above, above));
            }
            above = above.max(start + aligned(buffers[other].bytes));
        }
        let offset = tightest.map_or(above, |(_, offset)| offset);
        offsets[number] = offset;
        let at = placed.partition_point(|&other| offsets[other] <= offset);
        placed.insert(at, number);
        arena = arena.max(offset + bytes);
    }
    MemoryPlan { offsets, bytes: arena }
}
