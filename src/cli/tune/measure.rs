//! Times ways against each other. All decisions come from numbers that all ranks share, so that all
//! make the same calls.

use std::time::Duration;

use pleach::schedule::Variant;
use pleach::schedule::tuning::tune::{self, Measured, VariantTime};
use pleach::transport::clock;
use pleach::{Buffer, Collective, CollectiveError, Group, ReduceOp};

/// Shortest sample: what is shorter is mostly the clock's and the barrier's time.
const SAMPLE_MIN: Duration = Duration::from_micros(200);

/// Most calls of a sample.
const CALLS_MAX: usize = 200;

/// Calls of a way before its first sample: plans are made, memory is touched.
const WARMUP: usize = 2;

/// A way whose first sample took so many times as long as the best one's is not looked at again.
const DROPPED: f64 = 2.5;

/// Least and most rounds in which all ways take turns.
const ROUNDS_MIN: u128 = 5;
const ROUNDS_MAX: u128 = 41;

/// See the module.
pub(super) struct Measuring<'a> {
    group: &'a Group,
    /// For each size, about.
    time: Duration,
}

/// The memory of a call, and what is called.
struct Call {
    collective: Collective,
    input: Buffer<f32>,
    output: Option<Buffer<f32>>,
}

impl<'a> Measuring<'a> {
    pub(super) fn new(group: &'a Group, time: Duration) -> Self {
        Self { group, time }
    }

    /// Times all ways for a size, in turns; the quickest comes first. Ways for which there is not
    /// enough scratch are left out.
    pub(super) fn measure(
        &mut self,
        collective: Collective,
        bytes: u64,
        variants: Vec<Variant>,
    ) -> Result<Measured, CollectiveError> {
        let mut call = Call::new(self.group, collective, bytes)?;
        let mut contestants = Vec::new();
        let mut refused = Vec::new();
        for variant in variants {
            let group = self.group.with_variant(variant.clone());
            // Before anything has begun.
            refused.push(match call.repeat(&group, WARMUP) {
                Ok(()) => 0,
                Err(CollectiveError::TooLarge(_)) => 1,
                Err(error) => return Err(error),
            });
            contestants.push((variant, group));
        }
        // Ranks that have no part in a message are refused nothing.
        self.group.all_reduce(&mut refused[..], ReduceOp::Max)?;
        let mut refused = refused.into_iter();
        contestants.retain(|_| refused.next() == Some(0u32));
        let first: Result<Vec<_>, _> =
            contestants.iter().map(|(_, group)| self.sample(&mut call, group, 1)).collect();
        let first = self.slowest(&first?)?;
        let best = first.iter().min().copied().unwrap_or_default().as_secs_f64();
        let is_hopeful = |time: &Duration| time.as_secs_f64() <= best * DROPPED;
        let mut hopeful: Vec<_> =
            contestants.into_iter().zip(first).filter(|(_, time)| is_hopeful(time)).collect();
        let calls: Vec<usize> = hopeful
            .iter()
            .map(|(_, time)| (SAMPLE_MIN.as_nanos() / time.as_nanos().max(1)) as usize + 1)
            .map(|calls| calls.min(CALLS_MAX))
            .collect();
        let round: u128 =
            hopeful.iter().zip(&calls).map(|((_, time), calls)| time.as_nanos() * *calls as u128).sum();
        let rounds = (self.time.as_nanos() / round.max(1)).clamp(ROUNDS_MIN, ROUNDS_MAX) as usize;
        let mut own = Vec::with_capacity(rounds * hopeful.len());
        for turn in 0..rounds {
            for place in 0..hopeful.len() {
                // Beginning with another one each time.
                let place = (place + turn) % hopeful.len();
                own.push((place, self.sample(&mut call, &hopeful[place].0.1, calls[place])?));
            }
        }
        own.sort_by_key(|(place, _)| *place);
        let own: Vec<Duration> = own.into_iter().map(|(_, time)| time).collect();
        let all = self.slowest(&own)?;
        let mut timed: Vec<VariantTime> = hopeful
            .drain(..)
            .zip(all.chunks_exact(rounds))
            .map(|(((variant, _), _), samples)| VariantTime {
                variant,
                seconds: median(samples).as_secs_f64(),
            })
            .collect();
        timed.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        Ok(Measured { collective, bytes, timed })
    }

    /// Looks for the chunks by which the best way takes least, and measures the two against each
    /// other. Nothing changes where calls are not cut.
    pub(super) fn with_best_chunks(&mut self, measured: Measured) -> Result<Measured, CollectiveError> {
        let Measured { collective, bytes, mut timed } = measured;
        let best = timed.first().map(|timed| timed.variant.clone());
        let Some((variant, mut search)) =
            best.and_then(|variant| Some((variant.clone(), tune::chunk_search(&variant, bytes)?)))
        else {
            return Ok(Measured { collective, bytes, timed });
        };
        let with = |chunk_bytes: u64| Variant { chunk_bytes: Some(chunk_bytes), ..variant.clone() };
        let mut call = Call::new(self.group, collective, bytes)?;
        while !search.is_settled() {
            let group = self.group.with_variant(with(search.chunk_bytes()));
            call.repeat(&group, 1)?;
            let own: Result<Vec<_>, _> = (0..ROUNDS_MIN).map(|_| self.sample(&mut call, &group, 1)).collect();
            let taken = median(&self.slowest(&own?)?);
            search.measured((u128::from(bytes) * 1_000_000_000 / taken.as_nanos().max(1)) as u64);
        }
        let variants = vec![variant.clone(), with(search.chunk_bytes())];
        timed.retain(|timed| timed.variant != variant);
        timed.extend(self.measure(collective, bytes, variants)?.timed);
        timed.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        Ok(Measured { collective, bytes, timed })
    }

    /// How long a call took on this rank, of so many in a row.
    fn sample(&self, call: &mut Call, variant: &Group, calls: usize) -> Result<Duration, CollectiveError> {
        self.group.barrier()?;
        let begin = clock::now();
        call.repeat(variant, calls)?;
        Ok((clock::now() - begin) / calls as u32)
    }

    /// Each sample's time on the rank that took longest.
    fn slowest(&self, own: &[Duration]) -> Result<Vec<Duration>, CollectiveError> {
        let mut times: Vec<u64> = own.iter().map(|time| time.as_nanos() as u64).collect();
        self.group.all_reduce(&mut times, ReduceOp::Max)?;
        Ok(times.into_iter().map(Duration::from_nanos).collect())
    }
}

fn median(samples: &[Duration]) -> Duration {
    let mut samples = samples.to_vec();
    samples.sort_unstable();
    samples[samples.len() / 2]
}

impl Call {
    /// For a size as `pleach bench` counts it: of one rank's vector, or of the blocks of all ranks
    /// together.
    fn new(group: &Group, collective: Collective, bytes: u64) -> Result<Self, CollectiveError> {
        let ranks = group.world_size() as usize;
        let elements = (bytes as usize / size_of::<f32>()).max(1);
        let block = (elements / ranks).max(1);
        let (input, output) = match collective {
            Collective::AllGather => (block, Some(block * ranks)),
            Collective::ReduceScatter => (block * ranks, Some(block)),
            Collective::Gather { .. } => (block, Some(block * ranks)),
            Collective::Scatter { .. } => (block * ranks, Some(block)),
            Collective::AllToAll => (block * ranks, Some(block * ranks)),
            _ => (elements, None),
        };
        let output = output.map(|elements| group.buffer(elements)).transpose()?;
        Ok(Self { collective, input: group.buffer(input)?, output })
    }

    /// So many calls in a row; of zeros, whose sums are zeros.
    fn repeat(&mut self, group: &Group, calls: usize) -> Result<(), CollectiveError> {
        (0..calls).try_for_each(|_| self.once(group))
    }

    fn once(&mut self, group: &Group) -> Result<(), CollectiveError> {
        let Self { collective, input, output } = self;
        match (*collective, output) {
            (Collective::AllReduce, _) => group.all_reduce(input, ReduceOp::Sum),
            (Collective::Reduce { root }, _) => group.reduce(input, ReduceOp::Sum, root),
            (Collective::Broadcast { root }, _) => group.broadcast(input, root),
            (Collective::AllGather, Some(output)) => group.all_gather(input, output),
            (Collective::ReduceScatter, Some(output)) => group.reduce_scatter(input, output, ReduceOp::Sum),
            (Collective::Gather { root }, Some(output)) => group.gather(input, output, root),
            (Collective::Scatter { root }, Some(output)) => group.scatter(input, output, root),
            (Collective::AllToAll, Some(output)) => group.all_to_all(input, output),
            (Collective::SendRecv { from, to }, _) if group.rank() == from => group.send(input, to),
            (Collective::SendRecv { from, to }, _) if group.rank() == to => group.recv(input, from),
            (Collective::Barrier, _) => group.barrier(),
            // The other ranks of a message have no part in it.
            _ => Ok(()),
        }
    }
}
