//! The order in which ranks exchange gradients.
//!
//! The backward pass makes the gradients of the last layers first. The next forward pass needs the
//! parameters of the first layers first. Exchanges share one network, and all ranks must issue
//! their collectives in one order. So the order is *planned*: each rank computes the same list of
//! pieces from the same profile, instead of deciding at run time.
//!
//! * [`Bucket`]: gradients that are ready together, with the time at which they are needed.
//! * [`Order`]: the pieces of all buckets in the order of their exchange.
//! * `sequence`: the scheduling problem below it, 1 | r_j | L_max.
//!
//! **Invariants:** the list is a function of the profile alone (integers, no random choice), holds
//! each byte once, and delays the next forward pass no longer than first come, first served does.
//!
//! ```
//! use pleach_training::order::{Bucket, Link, Order};
//!
//! // The last layer is ready first. The first layer is ready last, and needed first.
//! let last = Bucket { ready_ns: 0, needed_ns: 4_000, bytes: 3_000 };
//! let first = Bucket { ready_ns: 1_000, needed_ns: 2_000, bytes: 1_000 };
//! let link = Link { bytes_per_s: 1_000_000_000, piece_ns: 0 };
//! let planned = Order::planned(&[first, last], link, 1_000)?;
//! let buckets: Vec<usize> = planned.pieces().iter().map(|piece| piece.bucket).collect();
//! assert_eq!((buckets, planned.delay_ns()), (vec![1, 0, 1, 1], 0));
//! assert_eq!(Order::fifo(&[first, last], link, 1_000)?.delay_ns(), 2_000);
//! # Ok::<(), pleach_training::order::OrderError>(())
//! ```

use std::ops::Range;

use sequence::lateness;

mod sequence;
#[cfg(test)]
mod tests;

pub(crate) use sequence::{Job, by_ready, finish_times, planned};

/// Most pieces of a list.
pub const PIECES_MAX: usize = 1 << 20;

/// Latest time of a profile, and longest time of all pieces together: 13 days, in nanoseconds.
pub const TIME_MAX_NS: u64 = 1 << 50;

/// Gradients that are ready together and exchanged before the same part of the next forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// When the backward pass has made the gradients, in nanoseconds since the pass began.
    pub ready_ns: u64,
    /// When the next forward pass would use the parameters if it never waited, on the same clock.
    pub needed_ns: u64,
    /// How many bytes are exchanged.
    pub bytes: u64,
}

/// What the exchange of a piece costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Bytes of a bucket that are exchanged in a second: for an all-reduce about half of what the
    /// network carries.
    pub bytes_per_s: u64,
    /// The time of a piece without bytes: its messages.
    pub piece_ns: u64,
}

/// A part of a bucket that is exchanged by one collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The number of the bucket in the profile.
    pub bucket: usize,
    /// The bytes of the bucket.
    pub range: Range<u64>,
}

/// The pieces of all buckets in the order of their exchange. Ranks compare it by its hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Order {
    pieces: Vec<Piece>,
    delay_ns: u64,
    done_ns: Vec<u64>,
}

/// Why there is no order.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// Pieces of no byte.
    #[error("pieces of 0 bytes; give the largest number of bytes of a piece, as 1048576")]
    NoPiece,
    /// A link that carries nothing.
    #[error("a link of 0 bytes/s carries no gradients; measure the link and give its rate")]
    NoRate,
    /// More than [`PIECES_MAX`] pieces.
    #[error("{pieces} pieces, at most {PIECES_MAX}; take larger pieces")]
    TooMany {
        /// How many there would be.
        pieces: u64,
    },
    /// A time beyond [`TIME_MAX_NS`].
    #[error(
        "bucket {bucket} has a time beyond {TIME_MAX_NS} ns, or the buckets up to it take longer; measure the profile again"
    )]
    TooLong {
        /// The number of the bucket in the profile.
        bucket: usize,
    },
}

impl Order {
    /// The order that delays the next forward pass least. A piece has at most `piece_bytes` bytes.
    ///
    /// The order is optimal where [`sequence`] closes its search, as it does for a few pieces. It
    /// is that of [`Order::fifo`] where no other delays the pass less.
    ///
    /// # Errors
    ///
    /// Each variant of [`OrderError`].
    pub fn planned(buckets: &[Bucket], link: Link, piece_bytes: u64) -> Result<Self, OrderError> {
        let (pieces, jobs) = cut(buckets, link, piece_bytes)?;
        Ok(Self::of(&pieces, &jobs, &planned(&jobs), buckets.len()))
    }

    /// First come, first served: buckets in the order in which they are ready.
    ///
    /// # Errors
    ///
    /// Each variant of [`OrderError`].
    pub fn fifo(buckets: &[Bucket], link: Link, piece_bytes: u64) -> Result<Self, OrderError> {
        let (pieces, jobs) = cut(buckets, link, piece_bytes)?;
        Ok(Self::of(&pieces, &jobs, &by_ready(&jobs), buckets.len()))
    }

    fn of(pieces: &[Piece], jobs: &[Job], sequence: &[u32], buckets: usize) -> Self {
        let mut done_ns = vec![0; buckets];
        for (&job, done) in sequence.iter().zip(finish_times(jobs, sequence)) {
            // Pieces of a bucket end one after another.
            done_ns[pieces[job as usize].bucket] = done as u64;
        }
        Self {
            pieces: sequence.iter().map(|&job| pieces[job as usize].clone()).collect(),
            delay_ns: lateness(jobs, sequence).max(0) as u64,
            done_ns,
        }
    }

    /// The pieces, in the order in which ranks issue them.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// How much later the next forward pass ends than if it never waited, in nanoseconds.
    #[must_use]
    pub fn delay_ns(&self) -> u64 {
        self.delay_ns
    }

    /// When the exchange of each bucket ends, on the clock of the profile; 0 for buckets without
    /// bytes.
    #[must_use]
    pub fn done_ns(&self) -> &[u64] {
        &self.done_ns
    }
}

/// How much later the next forward pass ends than if it never waited, if pieces are exchanged in
/// this order. Pieces of buckets that there are not count as nothing.
#[must_use]
pub fn delay_ns(buckets: &[Bucket], link: Link, pieces: impl IntoIterator<Item = Piece>) -> u64 {
    let (mut now, mut delay) = (0_u128, 0);
    for Piece { bucket, range } in pieces {
        let Some(bucket) = buckets.get(bucket) else { continue };
        now = now.max(bucket.ready_ns.into()) + time_ns(link, range.end.saturating_sub(range.start));
        delay = now.saturating_sub(bucket.needed_ns.into()).max(delay);
    }
    u64::try_from(delay).unwrap_or(u64::MAX)
}

/// All pieces, bucket by bucket, and the job of each.
fn cut(buckets: &[Bucket], link: Link, piece_bytes: u64) -> Result<(Vec<Piece>, Vec<Job>), OrderError> {
    if piece_bytes == 0 {
        return Err(OrderError::NoPiece);
    }
    if link.bytes_per_s == 0 {
        return Err(OrderError::NoRate);
    }
    let count =
        buckets.iter().fold(0, |sum: u64, bucket| sum.saturating_add(bucket.bytes.div_ceil(piece_bytes)));
    if count > PIECES_MAX as u64 {
        return Err(OrderError::TooMany { pieces: count });
    }
    let (mut pieces, mut jobs) = (Vec::new(), Vec::new());
    let mut sum_ns = 0;
    for (number, bucket) in buckets.iter().enumerate() {
        let too_long = OrderError::TooLong { bucket: number };
        if bucket.ready_ns.max(bucket.needed_ns) > TIME_MAX_NS {
            return Err(too_long);
        }
        let mut start = 0;
        while start < bucket.bytes {
            let end = bucket.bytes.min(start.saturating_add(piece_bytes));
            let time_ns = time_ns(link, end - start);
            sum_ns = time_ns.saturating_add(sum_ns);
            if sum_ns > u128::from(TIME_MAX_NS) {
                return Err(too_long);
            }
            pieces.push(Piece { bucket: number, range: start..end });
            let (ready, due) = (bucket.ready_ns as i64, bucket.needed_ns as i64);
            jobs.push(Job { ready, due, time: time_ns as i64 });
            start = end;
        }
    }
    Ok((pieces, jobs))
}

fn time_ns(link: Link, bytes: u64) -> u128 {
    const NS_PER_S: u128 = 1_000_000_000;
    let transfer = (u128::from(bytes) * NS_PER_S).div_ceil(u128::from(link.bytes_per_s.max(1)));
    u128::from(link.piece_ns) + transfer
}
