//! How many members a job has, and how patient they are.

use std::fmt;
use std::time::Duration;

use pleach_membership::MEMBERS_MAX;
use pleach_transport::Space;

use super::SessionError;
use crate::group::{Connect, Options};

/// When a process that joined reads the states of the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Heal {
    /// Before its first step. The members stand still meanwhile, for [`Elastic::heal_wait`] at
    /// most.
    #[default]
    Boundary,
    /// During its first step, in which it contributes nothing: the neutral element stands for its
    /// input, and averages are of the others alone ([`Group::contributors`]). What that step does
    /// not hide, [`State::update`] waits for on all members, for [`Elastic::heal_wait`] at most.
    ///
    /// For steps that only reduce. In a step in which a process heals, other calls of the group
    /// fail with [`CollectiveError::Healing`] on all members. The step is repeated then, and the
    /// process is healed before.
    ///
    /// [`Group::contributors`]: crate::Group::contributors
    /// [`State::update`]: super::State::update
    /// [`CollectiveError::Healing`]: crate::CollectiveError::Healing
    ///
    /// Before the first step of a job is committed, processes read as with `Boundary`.
    Hidden,
}

impl fmt::Display for Heal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Boundary => "before a step",
            Self::Hidden => "during a step",
        })
    }
}

/// How many members a job has, and how patient they are; the same on all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Elastic {
    /// Steps are made by so many members or more.
    pub fewest: u32,
    /// Members at most.
    pub most: u32,
    /// So many processes more may wait until there is room, none unless changed. Such a **spare**
    /// is connected to all members and has its memory registered. It becomes a member in the change
    /// that removes one that ended or is not reached; after one that leaves, at the end of the next
    /// step.
    ///
    /// [`Session::join`](super::Session::join) returns to a spare when it is connected. So it names
    /// its states and takes its buffers then, and waits for its place in
    /// [`Session::next`](super::Session::next), without a limit while the job runs. When its place
    /// comes, the members wait for that call. One that stands still is passed over.
    pub spares: u32,
    /// So many seats make a unit, such as a replica of a model that is spread over that many ranks:
    /// seats 0 to `unit - 1`, and so on. Members come and go in whole units. When one of a unit
    /// ends, leaves or cannot be reached, the others of its unit are
    /// [`Expelled`](super::SessionError::Expelled). A process that joins is admitted together with
    /// the others of its unit. `fewest`, `most` and `spares` are multiples of it. 1 unless changed.
    ///
    /// Members with the same place in their units have the same states, and read them from each
    /// other; members with different places may have different ones, such as the parts of a model.
    /// A member's unit is its seat divided by this number, so
    /// [`Session::split`](super::Session::split) by that number makes a group of each unit.
    pub unit: u32,
    /// How long `fewest` ranks of a world that are there, rank 0 among them, wait for the others
    /// before they begin the job: 10 s unless changed, and half of what is left of
    /// [`Options::join_timeout`] at most. They begin at once when all are there.
    /// Those that come later join, as any process does.
    pub begin_wait: Duration,
    /// After what silence a member is suspected: 2 s unless changed. It does not count while the
    /// observer itself did not run.
    pub suspect_after: Duration,
    /// How long members that are too few to make a step wait for others: 60 s unless changed.
    pub fewest_wait: Duration,
    /// How long members that are too few to agree on the next epoch wait for others, and how long
    /// they try where the store of records is away or takes no record: 20 s unless changed.
    pub quorum_wait: Duration,
    /// How often a step that cannot be ended is repeated by the same members: 3 times unless
    /// changed.
    pub retries_max: u32,
    /// When a process that joined reads the states: before its first step unless changed.
    pub heal: Heal,
    /// How long members stand still for one that reads the states: 60 s unless changed.
    pub heal_wait: Duration,
    /// A name of the program, with all that has to be equal on all members for the same step to be
    /// the same work. A process with another one does not join. The name of the executable unless
    /// changed.
    pub program: String,
}

impl Elastic {
    /// Between `fewest` and `most` members.
    #[must_use]
    pub fn between(fewest: u32, most: u32) -> Self {
        let program = std::env::current_exe().ok();
        let program = program.as_ref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy());
        Self {
            program: program.unwrap_or_default().into_owned(),
            fewest,
            most,
            spares: 0,
            unit: 1,
            begin_wait: Duration::from_secs(10),
            suspect_after: Duration::from_secs(2),
            fewest_wait: Duration::from_secs(60),
            quorum_wait: Duration::from_secs(20),
            retries_max: 3,
            heal: Heal::default(),
            heal_wait: Duration::from_secs(60),
        }
    }

    /// Seats of the job: places for members, and for spares.
    pub(crate) fn seats(&self) -> u32 {
        self.most.saturating_add(self.spares)
    }

    /// Refuses what groups of epochs cannot do, rather than to do without it.
    pub(crate) fn expect_supported(&self, options: &Options) -> Result<(), SessionError> {
        let unsupported = |option, remedy| Err(SessionError::Unsupported { option, remedy });
        let unit = self.unit;
        if unit == 0 || [self.fewest, self.most, self.spares].iter().any(|seats| seats % unit != 0) {
            return unsupported(
                "limits of members that are not multiples of Elastic::unit",
                "give multiples of it, and a unit of 1 seat or more",
            );
        }
        if self.seats() as usize > MEMBERS_MAX {
            return unsupported("more seats than 4,096, for members and spares", "give fewer");
        }
        if options.connect == Some(Connect::OnUse) {
            return unsupported("Options::connect other than at join", "leave it as it is");
        }
        if options.space != Space::Host && self.heal == Heal::Hidden {
            return unsupported(
                "Heal::Hidden on a GPU's memory, where nothing stands for the input of who reads",
                "take Heal::Boundary",
            );
        }
        if options.topology.as_ref().is_some_and(|topology| topology.ranks() < self.seats()) {
            return unsupported(
                "a topology of fewer ranks than seats",
                "give that of all seats, or leave it out",
            );
        }
        Ok(())
    }

    /// What has to be equal on all members, as they compare it.
    pub(crate) fn knobs(&self) -> Vec<(String, String)> {
        let Self { fewest, most, suspect_after, fewest_wait, quorum_wait, retries_max, .. } = self;
        let Self { heal, heal_wait, begin_wait, unit, spares, .. } = self;
        let knob = |name: &str, value: String| (name.to_owned(), value);
        vec![
            knob("program", self.program.clone()),
            knob("members", format!("{fewest} to {most}")),
            knob(
                "patience in ms",
                format!(
                    "{} {} {}",
                    suspect_after.as_millis(),
                    fewest_wait.as_millis(),
                    quorum_wait.as_millis()
                ),
            ),
            knob("Elastic::begin_wait in ms", begin_wait.as_millis().to_string()),
            knob("Elastic::spares", spares.to_string()),
            knob("Elastic::unit", unit.to_string()),
            knob("retries", retries_max.to_string()),
            knob("Elastic::heal", heal.to_string()),
            knob("Elastic::heal_wait in ms", heal_wait.as_millis().to_string()),
        ]
    }
}
