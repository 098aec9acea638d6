//! Whose turn it is, where ranks exchange with the centre one after the other.
//!
//! Turn t is that of rank t mod p. Each owner of a share tells the rank of the next turn when it
//! has added the change of this one.

use pleach_collectives::Rank;

use crate::policy::Actions;
use crate::scheme::finish::Word;
use crate::state::{Remembered, State};

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    rank: Rank,
    /// Turns whose change this rank has added to its share.
    added: u64,
    /// By rank: whether it has added the change before this rank's next turn.
    ready: Vec<bool>,
}

impl Turns {
    pub(crate) fn new(rank: Rank, ranks: u32) -> Self {
        // Nothing comes before the first turn.
        Self { rank, added: 0, ready: vec![rank == 0; ranks as usize] }
    }

    /// A peer for whom this rank waits: an owner that has to add a change before this rank's turn,
    /// or who has to send it. `None` when the turn has come.
    pub(crate) fn missing(&self) -> Option<Rank> {
        let ranks = self.ready.len() as u32;
        let own_last = (1..=ranks).map(|distance| (self.rank + distance) % ranks);
        let missing = own_last.into_iter().find(|owner| !self.ready[*owner as usize])?;
        Some(if missing == self.rank { (self.rank + ranks - 1) % ranks } else { missing })
    }

    /// This rank takes its turn.
    pub(crate) fn take(&mut self) {
        self.ready.fill(false);
    }

    /// An owner has added the change before this rank's turn; returns whether that was not known.
    pub(crate) fn owner_is_ready(&mut self, owner: Rank) -> bool {
        !std::mem::replace(&mut self.ready[owner as usize], true)
    }

    /// Whether the next change that this rank adds is that of a rank.
    pub(crate) fn is_next(&self, rank: Rank) -> bool {
        self.added % self.ready.len() as u64 == u64::from(rank)
    }

    /// The change of a turn was added to this rank's share.
    pub(crate) fn added(&mut self, actions: &mut Actions) {
        self.added += 1;
        let next = (self.added % self.ready.len() as u64) as Rank;
        if next == self.rank {
            let _ = self.owner_is_ready(next);
        } else {
            Word::Round(self.added).tell(next, actions);
        }
    }
}

impl Remembered for Turns {
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.added);
        state.field(&mut self.ready);
    }
}
