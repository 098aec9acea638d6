//! Groups of some members that come back in each epoch.

use std::sync::{Arc, Mutex};

use pleach_membership::{Process, Record};
use pleach_transport::mutex::lock;

use super::member::{Member, commit};
use crate::group::{Group, SplitError};

/// The group of this process's colour in each epoch: see
/// [`Session::split`](super::Session::split).
#[derive(Clone, Default)]
pub struct Split(Arc<Mutex<Option<Group>>>);

impl Split {
    /// The group in the epoch of the step that has begun. `None`: this process has no colour, no
    /// step has begun since the epoch before, or a process reads the states behind this step
    /// ([`Heal::Hidden`](super::Heal)).
    #[must_use]
    pub fn group(&self) -> Option<Group> {
        lock(&self.0).clone()
    }
}

type Colour = dyn Fn(Process) -> Option<u32> + Send + Sync;

/// The splits of a session. **Invariant:** the members have made the same ones in an epoch, in the
/// same order.
#[derive(Default)]
pub(crate) struct Splits {
    all: Vec<(Box<Colour>, Split)>,
    /// How many of them are made in this epoch.
    made: usize,
}

impl Splits {
    pub(crate) fn add(&mut self, colour: Box<Colour>) -> Split {
        let split = Split::default();
        self.all.push((colour, split.clone()));
        split
    }

    /// Makes those that are missing in the epoch of this record, in which this is the group.
    pub(crate) fn make(
        &mut self,
        record: &Record,
        group: &Group,
        member: &Arc<Member>,
    ) -> Result<(), SplitError> {
        while let Some((colour, split)) = self.all.get(self.made) {
            let own = record.members()[group.rank() as usize];
            let part =
                commit::while_asking(member, group.clone(), |group| group.split(colour(own), group.rank()))?;
            *lock(&split.0) = part;
            self.made += 1;
        }
        Ok(())
    }

    /// The epoch is over.
    pub(crate) fn end(&mut self) {
        self.made = 0;
        self.all.iter().for_each(|(_, split)| drop(lock(&split.0).take()));
    }
}
