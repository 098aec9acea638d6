//! What becomes of a rank that has died, in a job whose processes come and go.
//!
//! It is started anew and joins the job, while restarts are left and somebody is there to join.
//! **Invariant:** no rank is started anew once a rank has ended well, as the job may be over then:
//! a process that found none would begin another one.

use std::process::Command;

use crate::cli::bounds::Bounds;

/// How a job outlives its processes, as it was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outliving {
    bounds: Bounds,
    /// How many times a rank is started anew, all ranks together.
    restarts: u32,
}

impl Outliving {
    /// With so many ranks, of which one is started anew so many times, all together.
    pub(crate) fn new(bounds: Bounds, restarts: u32) -> Self {
        Self { bounds, restarts }
    }

    pub(crate) fn bounds(self) -> Bounds {
        self.bounds
    }

    pub(crate) fn restarts(self) -> u32 {
        self.restarts
    }
}

/// See the module.
pub(crate) struct Restarts<'a> {
    outliving: Outliving,
    used: u32,
    /// Whether there are ranks that other launchers have started.
    has_others: bool,
    /// How a rank is started anew.
    command: &'a dyn Fn(u32) -> Command,
}

/// What becomes of a rank that has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is started anew, so many times with this one.
    Again(u32),
    /// The others go on without it.
    Without,
    /// The job ends.
    End,
}

impl<'a> Restarts<'a> {
    /// None yet.
    pub(crate) fn new(outliving: Outliving, has_others: bool, command: &'a dyn Fn(u32) -> Command) -> Self {
        Self { outliving, used: 0, has_others, command }
    }

    /// What becomes of one that has died while so many run here. `any_done`: whether one has ended
    /// well.
    pub(crate) fn after_death(&mut self, running: u32, any_done: bool) -> Fate {
        let Outliving { bounds, restarts } = self.outliving;
        if any_done {
            return Fate::Without;
        }
        if running == 0 && !self.has_others {
            // Nobody has what it would read.
            return Fate::End;
        }
        if self.used < restarts {
            self.used += 1;
            return Fate::Again(self.used);
        }
        if running < bounds.fewest() && !self.has_others { Fate::End } else { Fate::Without }
    }

    /// The command of a rank that is started anew.
    pub(crate) fn command(&self, rank: u32) -> Command {
        (self.command)(rank)
    }

    /// How many times a rank was started anew.
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    pub(crate) fn outliving(&self) -> Outliving {
        self.outliving
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restarts(has_others: bool) -> Restarts<'static> {
        let outliving = Outliving { bounds: "2:4".parse().expect("are bounds"), restarts: 1 };
        Restarts::new(outliving, has_others, &|_| Command::new("true"))
    }

    #[test]
    fn ranks_are_started_anew_as_often_as_they_may_be_and_then_the_others_go_on() {
        let mut restarts = restarts(false);
        assert_eq!(restarts.after_death(3, false), Fate::Again(1));
        assert_eq!(restarts.after_death(3, false), Fate::Without);
        assert_eq!(restarts.after_death(2, false), Fate::Without);
        assert_eq!(restarts.after_death(1, false), Fate::End, "fewer than two");
    }

    #[test]
    fn nobody_joins_a_job_that_may_be_over_or_has_no_rank() {
        assert_eq!(restarts(false).after_death(3, true), Fate::Without);
        assert_eq!(restarts(false).after_death(0, true), Fate::Without);
        assert_eq!(restarts(false).after_death(0, false), Fate::End);
        assert_eq!(restarts(true).after_death(0, false), Fate::Again(1), "others run elsewhere");
    }
}
