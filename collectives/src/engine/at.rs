//! Names of steps, as transfers carry them.

use pleach_transport::TransferId;

/// Names a step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) lane: u32,
    pub(super) slot: u32,
    pub(super) step: u32,
}

/// Of transfers whose end nobody waits for.
pub(super) const NOBODY: TransferId = TransferId(u64::MAX);

/// Most runs of an engine at a time, chunks under way of a lane, lanes of a rank and steps of a
/// lane that a transfer's id can name.
pub(super) const RUNS_MAX: usize = 255;
pub(super) const WINDOW_MAX: u32 = 255;
pub(super) const LANES_MAX: usize = 1 << 24;
pub(super) const STEPS_MAX: u32 = 1 << 24;

impl At {
    pub(super) fn id(self, run: u8) -> TransferId {
        TransferId(
            u64::from(run)
                | u64::from(self.slot) << 8
                | u64::from(self.lane) << 16
                | u64::from(self.step) << 40,
        )
    }

    pub(super) fn of(id: TransferId) -> Self {
        Self {
            slot: (id.0 >> 8) as u32 & 0xff,
            lane: (id.0 >> 16) as u32 & 0xff_ffff,
            step: (id.0 >> 40) as u32,
        }
    }
}

/// Which of the engine's runs a transfer belongs to.
pub(super) fn run_of(id: TransferId) -> usize {
    (id.0 & 0xff) as usize
}
