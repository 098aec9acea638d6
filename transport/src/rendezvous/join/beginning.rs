//! Which ranks begin a job to which others come later.
//!
//! Rank 0 waits for enough of its world, then some time for the rest, and writes down which ranks
//! are there, in whole units. All others read that. **Invariant:** the list is written once, so all
//! that begin know of the same ranks, and a rank that is not in it has met nobody.

use super::{JoinError, JoinProtocol, POLL_INTERVAL, ranks_of, unusable};
use crate::clock::now;
use crate::rendezvous::StoreError;
use crate::rendezvous::error::ranks_shown;
use crate::rendezvous::seats::Founding;
use crate::{Nanos, Rank};

/// Under this key rank 0 says which ranks begin a job: a bit for each rank of the world.
const BEGIN: &str = "begin/0";

impl JoinProtocol<'_> {
    /// Which ranks begin the job, where fewer than all may; false: this rank is none of them.
    pub(crate) fn agree_on_ranks(&mut self) -> Result<bool, JoinError> {
        let Some(founding) = self.founding.filter(|it| it.fewest() < self.world.world_size) else {
            return Ok(true);
        };
        if self.world.rank == 0 {
            self.ranks = self.await_enough(&founding)?;
            let mut here = vec![0_u8; self.world.world_size.div_ceil(u8::BITS) as usize];
            self.ranks.iter().for_each(|rank| here[(rank / u8::BITS) as usize] |= 1 << (rank % u8::BITS));
            self.store.set(BEGIN, &here, self.deadline).map_err(JoinError::Store)?;
            return Ok(true);
        }
        let begin = match self.store.wait(&[BEGIN.to_owned()], self.deadline, self.limit) {
            Ok(values) => values.into_iter().next().unwrap_or_default(),
            Err(StoreError::Missing { .. }) => return Err(self.missing_of(&founding)?),
            Err(error) => return Err(unusable(error)),
        };
        self.ranks.retain(|rank| begins(&begin, *rank));
        Ok(begins(&begin, self.world.rank))
    }

    /// Whether the others have begun a job without this rank: why it does not join is its own
    /// matter.
    pub(crate) fn have_begun_without_it(&mut self) -> bool {
        if self.founding.is_none() || self.world.rank == 0 {
            return false;
        }
        let begin = self.store.wait(&[BEGIN.to_owned()], now(), self.limit);
        begin.is_ok_and(|values| values.iter().all(|begin| !begins(begin, self.world.rank)))
    }

    /// The ranks that are there when all are, or when enough are and the others have had their
    /// time.
    fn await_enough(&mut self, founding: &Founding) -> Result<Vec<Rank>, JoinError> {
        let mut enough_until: Option<Nanos> = None;
        loop {
            let until = enough_until.unwrap_or_else(|| self.deadline.min(now() + POLL_INTERVAL));
            let (missing, refused) = self.come(until)?;
            let time = now();
            let Some(whole) = self.suffices(founding, &missing) else {
                if time >= self.deadline {
                    return Err(self.missing(missing, founding.fewest(), refused));
                }
                continue;
            };
            if missing.is_empty() {
                return Ok(whole);
            }
            if enough_until.is_none() {
                // Of the time that is left, some is for the rounds that follow.
                let left = self.deadline.since(time) / 2;
                enough_until = Some(time + founding.wait().min(left));
            } else if time >= until {
                let without: Vec<Rank> =
                    self.ranks.iter().copied().filter(|rank| !whole.contains(rank)).collect();
                tracing::info!("the job begins without {}", ranks_shown(&without));
                return Ok(whole);
            }
        }
    }

    /// The ranks that can begin without those that are missing, in whole units: enough, and rank 0
    /// among them.
    fn suffices(&self, founding: &Founding, missing: &[Rank]) -> Option<Vec<Rank>> {
        let here: Vec<Rank> = self.ranks.iter().copied().filter(|rank| !missing.contains(rank)).collect();
        let whole = founding.whole_units(&here);
        (whole.len() as u32 >= founding.fewest() && whole.first() == Some(&0)).then_some(whole)
    }

    /// The ranks of the world that have not come until then, and which process was refused.
    fn come(&mut self, until: Nanos) -> Result<(Vec<Rank>, Option<String>), JoinError> {
        let keys: Vec<_> = self.ranks.iter().map(|rank| format!("rank/{rank}")).collect();
        match self.store.wait(&keys, until, self.limit) {
            Ok(_) => Ok((Vec::new(), None)),
            Err(StoreError::Missing { keys, refused, .. }) => Ok((ranks_of(&keys), refused)),
            Err(error) => Err(unusable(error)),
        }
    }

    /// Rank 0 has not begun in time: too few ranks have come, or it is gone.
    fn missing_of(&mut self, founding: &Founding) -> Result<JoinError, JoinError> {
        let (missing, refused) = self.come(now())?;
        let missing = if self.suffices(founding, &missing).is_none() { missing } else { vec![0] };
        Ok(self.missing(missing, founding.fewest(), refused))
    }
}

/// Whether rank 0 says that this rank is among those that begin.
fn begins(begin: &[u8], rank: Rank) -> bool {
    begin.get((rank / u8::BITS) as usize).is_some_and(|bits| bits >> (rank % u8::BITS) & 1 == 1)
}
