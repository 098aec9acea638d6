//! A member whose groups work on a GPU's memory.

use std::path::Path;

use pleach_collectives::{CollectiveError, GpuBuffer, Group, ReduceOp, Session, Verdict};
use pleach_transport::Space;
use pleach_transport::cuda::Stream;
use rustix::process::Signal;

use super::{ELEMENTS, Settings, WATCHED, end, fails_in, say, say_change};

/// Sums on the GPU, and looks at them.
fn sum(
    group: &Group,
    stream: &Stream,
    sums: &mut GpuBuffer<u64>,
    own: &[u64],
) -> Result<Vec<u64>, CollectiveError> {
    sums.store(own)?;
    group.on(stream).all_reduce(sums, ReduceOp::Sum)?;
    let all = sums.to_vec()?;
    let count = u64::from(all[0].count_ones());
    assert_eq!(count, u64::from(group.world_size()), "each member contributes once");
    assert!(all[2..].iter().all(|sum| *sum == count * own[2]), "each element");
    Ok(all)
}

/// Makes parts of the group, of which GPUs may map each other's memory, and one on the host.
fn use_parts(group: &Group, stream: &Stream, seat: u32) -> Result<(), CollectiveError> {
    let half = group.split(Some(seat % 2), seat)?.expect("each has a colour");
    let mut ones = half.gpu_buffer::<u64>(1000)?;
    ones.store(&[1; 1000])?;
    half.on(stream).all_reduce(&mut ones, ReduceOp::Sum)?;
    assert_eq!(ones.to_vec()?, [u64::from(half.world_size()); 1000]);
    let host = group.in_memory(Space::Host)?;
    let mut ranks = vec![0; host.world_size() as usize];
    host.all_gather(&[host.rank()], &mut ranks)?;
    assert!(ranks.into_iter().eq(0..host.world_size()));
    // Nobody drops a part that others still need.
    group.barrier()
}

/// Makes steps, as members on the host do.
pub(super) fn make_steps(mut session: Session, seat: u32, mut settings: Settings, enough: &Path) {
    let gpu = session.gpu().expect("the groups work on one").clone();
    let stream = Stream::new(&gpu).expect("a stream");
    let mut sums = session.gpu_buffer::<u64>(2 + ELEMENTS).expect("there is room");
    let mut watched = session.gpu_buffer::<u64>(WATCHED).expect("there is room");
    watched.store(&[0x5eed; WATCHED]).expect("stored");
    let mut applied = session.gpu_state::<u64>("applied", settings.state).expect("there is room");
    loop {
        let step = session.step();
        let mut all = Vec::new();
        let verdict = session.attempt(|group, step| {
            if fails_in(&mut settings.fails, seat, step) {
                return Err(CollectiveError::Own { rank: group.rank() });
            }
            if settings.stops.is_some_and(|(_, at)| at == step) {
                say(&format!("begins {step}"));
            }
            if settings.stops == Some((seat, step)) {
                signal_hook::low_level::raise(Signal::STOP.as_raw()).expect("can be raised");
            }
            let is_last = if settings.steps > 0 { step + 1 == settings.steps } else { enough.exists() };
            let mut own = vec![step << 8 | 1; 2 + ELEMENTS];
            (own[0], own[1]) = (1 << seat, u64::from(is_last));
            all = sum(group, &stream, &mut sums, &own)?;
            if settings.parts { use_parts(group, &stream, seat) } else { Ok(()) }
        });
        assert!(watched.to_vec().expect("it is there").iter().all(|word| *word == 0x5eed));
        match verdict {
            Ok(Verdict::Committed) => {
                let mut next = applied.to_vec().expect("it is there");
                let last = next.len() - 1;
                assert_eq!(next[0], next[last], "all of the state is there");
                next[0] = next[0].wrapping_mul(31).wrapping_add(step << 8 | all[0]);
                next[last] = next[0];
                next[last / 2] += u64::from(settings.errs == Some((seat, step)));
                applied.update(&stream, |applied| applied.store(&next)).expect("is stored");
                if settings.audits
                    && let Err(error) = session.audit()
                {
                    return end(&error);
                }
                say(&format!("committed {step} {} {}", all[0], next[0]));
                if all[1] > 0 {
                    break;
                }
            }
            Ok(Verdict::Retry(change)) => say_change(step, &change),
            Err(error) => return end(&error),
        }
    }
    let (registered, connected) = session.set_up();
    say(&format!("setup {registered} {connected} {}", session.epoch()));
    session.leave().expect("is always left");
}
