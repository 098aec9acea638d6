//! What members of a session tell of a fault that befell another one, or of one that joined, and
//! the last of them.

use std::time::Duration;

use pleach::session::Timeline;
use pleach::transport::Nanos;

/// What a session does from the fault to the next result.
pub(crate) const STAGES: [&str; 5] = ["found", "agreed", "drained", "planned", "next"];

/// How a process says when it has come to the job, by the clock of the host.
pub(crate) const JOINING: &str = "joining";

/// When one member has come to each stage, by the clock of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Survivor {
    times: [Option<Nanos>; STAGES.len()],
    /// Between the results before and after the fault.
    stop: Duration,
    /// Registrations and connections since the fault.
    set_up: (u64, u64),
}

impl Survivor {
    /// Of a change with this time line, and the next result after it.
    pub(crate) fn new(timeline: &Timeline, next: Nanos, stop: Duration, set_up: (u64, u64)) -> Self {
        let times = [
            timeline.found_at(),
            timeline.agreed_at(),
            timeline.drained_at(),
            timeline.planned_at(),
            Some(next),
        ];
        Self { times, stop, set_up }
    }

    /// What [`Survivor::to_text`] has written, and the number of ranks.
    pub(crate) fn read(text: &str) -> Option<(u32, Self)> {
        let mut words = text.split(' ');
        let ranks = words.next()?.parse().ok()?;
        let mut number = || words.next()?.parse::<u64>().ok();
        let mut times = [None; STAGES.len()];
        for time in &mut times {
            *time = Some(number()?).filter(|time| *time > 0).map(Nanos);
        }
        let stop = Duration::from_nanos(number()?);
        Some((ranks, Self { times, stop, set_up: (number()?, number()?) }))
    }

    /// In one line, with the number of ranks that go on.
    pub(crate) fn to_text(&self, ranks: u32) -> String {
        let times = self.times.map(|time| time.map_or(0, |time| time.0).to_string()).join(" ");
        let (registered, connected) = self.set_up;
        format!("{ranks} {times} {} {registered} {connected}", self.stop.as_nanos())
    }
}

/// When the last member has come to each stage, since the fault.
#[derive(Clone, Debug)]
pub(crate) struct Recovered {
    times: [Option<Duration>; STAGES.len()],
    stop: Duration,
    set_up: (u64, u64),
}

impl Recovered {
    /// The last of these, after a fault at this time.
    pub(crate) fn of(at: Nanos, survivors: impl Iterator<Item = Survivor>) -> Self {
        let mut last = Self { times: [None; STAGES.len()], stop: Duration::ZERO, set_up: (0, 0) };
        for survivor in survivors {
            for (last, time) in last.times.iter_mut().zip(survivor.times) {
                // A suspicion before the fault was another one.
                let since = time.filter(|time| *time >= at).map(|time| time.since(at));
                *last = since.max(*last);
            }
            last.stop = last.stop.max(survivor.stop);
            last.set_up.0 = last.set_up.0.max(survivor.set_up.0);
            last.set_up.1 = last.set_up.1.max(survivor.set_up.1);
        }
        last
    }

    /// By stage; `None` where no member knows.
    pub(crate) fn times(&self) -> [Option<Duration>; STAGES.len()] {
        self.times
    }

    /// The longest time between the results of a member before and after the fault.
    pub(crate) fn stop(&self) -> Duration {
        self.stop
    }

    /// The most registrations, and the most connections, of a member because of the fault.
    pub(crate) fn set_up(&self) -> (u64, u64) {
        self.set_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survivor(times: [u64; 5]) -> Survivor {
        let times = times.map(|time| Some(time).filter(|time| *time > 0).map(Nanos));
        Survivor { times, stop: Duration::from_nanos(7), set_up: (1, 2) }
    }

    #[test]
    fn a_survivor_is_read_as_it_was_told() {
        let told = survivor([0, 20, 30, 40, 50]);
        assert_eq!(Survivor::read(&told.to_text(3)), Some((3, told)));
        for broken in ["", "3", "3 1 2 3 4 5", "3 1 2 3 4 5 6 x 8", "x 1 2 3 4 5 6 7 8"] {
            assert_eq!(Survivor::read(broken), None, "{broken}");
        }
    }

    #[test]
    fn the_last_survivor_counts_and_nothing_from_before_the_fault() {
        let told = [[9, 20, 30, 45, 50], [0, 25, 31, 40, 60], [12, 20, 30, 40, 50]].map(survivor);
        let recovered = Recovered::of(Nanos(10), told.into_iter());
        let nanos = recovered.times().map(|time| time.map(|time| time.as_nanos()));
        assert_eq!(nanos, [Some(2), Some(15), Some(21), Some(35), Some(50)]);
        assert_eq!((recovered.stop().as_nanos(), recovered.set_up()), (7, (1, 2)));
    }
}
