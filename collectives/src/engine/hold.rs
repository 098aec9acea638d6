//! Which lanes of a run need to be looked at.
//!
//! A rank in a packed collective has hundreds of lanes with several chunks under way each, and
//! every event concerns one of them. **Invariant:** a lane that is settled goes on only by what is
//! known here: a signal in a signal slot that one of its chunks waits for, or the end of one of its
//! own steps, with which it is settled no more. So is a lane that was ahead of the others when
//! these have caught up.

use pleach_vocabulary::Rank;

use super::ground::Ground;
use super::plan::Plan;
use super::run::Run;

/// What a chunk under way waits for, as far as that was seen when it was looked at last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Hold {
    /// It has not been looked at, or may go on at any time: room at a peer, memory within reach.
    #[default]
    Anything,
    /// Steps of its lane, whose ends are heard of.
    Steps,
    /// The next signal in a signal slot that is kept for a peer.
    Signal { from: Rank, signal_slot: u16 },
}

impl Run {
    /// Whether the lane may go on: where it cannot, that is seen at little cost, also with many
    /// chunks under way.
    pub(super) fn may_advance(&self, window: u32, ground: &mut Ground<'_>, lane: u32) -> bool {
        let state = self.lanes[lane as usize];
        if !state.is_settled {
            return true;
        }
        !ground.hears_all
            && (state.first..state.next).any(|chunk| {
                match self.instances[(lane * window + chunk % window) as usize].hold {
                    Hold::Signal { from, signal_slot } => ground.has_come(from, signal_slot),
                    Hold::Anything | Hold::Steps => false,
                }
            })
    }

    /// The lane was looked at, `wholly` or until its turn was over.
    pub(super) fn settle(&mut self, window: u32, lane: u32, wholly: bool) {
        let state = &mut self.lanes[lane as usize];
        let mut under_way = (state.first..state.next)
            .map(|chunk| self.instances[(lane * window + chunk % window) as usize].hold);
        state.is_settled = wholly && under_way.all(|hold| !matches!(hold, Hold::Anything));
    }

    /// Where links say how far lanes may be ahead of the slowest one: lets those go on that it has
    /// come near enough to. True when there were any.
    pub(super) fn catch_up(&mut self, plan: &Plan) -> bool {
        if !plan.is_paced() {
            return false;
        }
        let unfinished = self.lanes.iter().zip(&plan.lanes).filter(|(state, lane)| state.first < lane.chunks);
        let slowest = unfinished.map(|(state, _)| state.first).min();
        let horizon = slowest.map_or(u32::MAX, |first| first.saturating_add(plan.lead));
        if horizon <= self.horizon {
            return false;
        }
        self.horizon = horizon;
        let mut were_any = false;
        for state in self.lanes.iter_mut().filter(|state| state.is_ahead) {
            state.is_settled = false;
            were_any = true;
        }
        were_any
    }

    /// Something has come in a signal slot that is kept for this peer; the lane that waits on it,
    /// if one does, is to be looked at.
    pub(super) fn stir(&mut self, from: Rank, signal_slot: u16) {
        let Some(number) = u32::from(signal_slot).checked_sub(self.parameters.bank.wait_base) else { return };
        let plan = self.plan();
        let number = number / plan.program.window;
        let waits = &plan.program.waits;
        let place = waits.partition_point(|&(peer, signal_slot, _)| (peer, signal_slot) < (from, number));
        if let Some(&(peer, signal_slot, lane)) = waits.get(place)
            && (peer, signal_slot) == (from, number)
        {
            self.lanes[lane as usize].is_settled = false;
        }
    }
}
