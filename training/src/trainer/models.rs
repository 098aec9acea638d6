//! Where each member of a session has a model of its own: the model with which a process begins
//! that joins.
//!
//! It is that of one member, as it was behind the last exchange that counts, of which each member
//! keeps a copy. Where members may have changed, all say whether they have a model. Who has none
//! gets that of the first member that has one in the lines of its grid, in the order of these
//! lines, or of the first one of all. So two ranks are in such a transfer, and it hands a model
//! over that one of them had: no model is outside of those between which elastic averages lie, and
//! the averages go on as before, over one more.
//!
//! **Invariants:** all members make these calls at the begin of the same attempts, and know from
//! whom to whom a model goes. A process whose transfer has failed asks again in the next attempt;
//! nothing of it was trained on.

use pleach_collectives::{Operation, Rank};

use super::in_session::InSession;
use super::{TrainError, Trainer};
use crate::interpreter::Vectors as _;
use crate::policy::Vector;

/// The model of this member.
#[derive(Debug)]
pub(crate) struct Models {
    /// Behind the last exchange that counts.
    kept: Vec<f32>,
    /// Whether this process has joined, and has no model yet.
    is_missing: bool,
}

impl Models {
    /// With so many parameters.
    pub(crate) fn new(parameters: usize) -> Self {
        Self { kept: vec![0.0; parameters], is_missing: false }
    }

    /// This process has joined.
    pub(crate) fn miss(&mut self) {
        self.is_missing = true;
    }

    /// An exchange counts, behind which these are the parameters.
    pub(crate) fn keep(&mut self, parameters: &[f32]) {
        self.kept.copy_from_slice(parameters);
    }
}

/// Has models handed to those that have none. `step`: that of the session.
pub(crate) fn hand_over(trainer: &mut Trainer, step: u64) -> Result<(), TrainError> {
    let all = 0..trainer.layout.parameters();
    let Trainer { group, scheme, vectors, in_session, .. } = trainer;
    let Some(models) = in_session.as_mut().and_then(InSession::models) else { return Ok(()) };
    let (own, ranks) = (group.rank(), group.world_size());
    let mut is_missing = vec![0_u8; ranks as usize];
    group.all_gather(&[u8::from(models.is_missing)], &mut is_missing)?;
    let [parameters] = vectors.pieces([Vector::Parameters], &all);
    let mut batch = group.batch();
    let mut destination = Some(parameters);
    for rank in (0..ranks).filter(|rank| is_missing[*rank as usize] != 0) {
        let lines = scheme.map_or_else(Vec::new, |scheme| scheme.lines_of(rank, ranks));
        let has_model = |rank: &Rank| is_missing[*rank as usize] == 0;
        let Some(source) = lines.into_iter().flatten().chain(0..ranks).find(has_model) else {
            return Err(TrainError::Late { step, reason: "all members that had a model have ended" });
        };
        if source == own {
            batch.add(Operation::send(&models.kept[..], rank))?;
        } else if rank == own
            && let Some(parameters) = destination.take()
        {
            batch.add(Operation::recv(parameters, source))?;
        }
    }
    batch.run()?;
    if std::mem::take(&mut models.is_missing) {
        let [parameters] = vectors.pieces([Vector::Parameters], &all);
        models.kept.copy_from_slice(parameters);
    }
    Ok(())
}
