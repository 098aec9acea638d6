//! When the last change happened.

use std::time::Duration;

use pleach_transport::Nanos;

/// When the last change of the members was found, agreed on, drained and planned, as this member
/// saw it. Each is `None` where that did not happen since the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    found: Option<Nanos>,
    agreed: Option<Nanos>,
    drained: Option<Nanos>,
    planned: Option<Nanos>,
}

impl Timeline {
    /// A member was found to be lost, or is suspected.
    pub(crate) fn found(&mut self, now: Nanos) {
        if self.planned.is_some() || self.found.is_none() {
            *self = Self { found: Some(now), ..Self::default() };
        }
    }

    /// The next record was learned.
    pub(crate) fn agreed(&mut self, now: Nanos) {
        if self.planned.is_some() {
            *self = Self::default();
        }
        self.agreed = Some(now);
    }

    /// The pairs are drained, and the epoch is entered.
    pub(crate) fn drained(&mut self, now: Nanos) {
        self.drained = Some(now);
    }

    /// A step begins in the group of the epoch.
    pub(crate) fn planned(&mut self, now: Nanos) {
        if self.agreed.is_some() {
            self.planned.get_or_insert(now);
        }
    }

    /// When a member was found to be lost, or all were asked for a sign of life: by the clock of
    /// the host (`CLOCK_MONOTONIC`), as all times here.
    #[must_use]
    pub fn found_at(&self) -> Option<Nanos> {
        self.found
    }

    /// When the next record was learned.
    #[must_use]
    pub fn agreed_at(&self) -> Option<Nanos> {
        self.agreed
    }

    /// When all pairs were drained, and the epoch was entered.
    #[must_use]
    pub fn drained_at(&self) -> Option<Nanos> {
        self.drained
    }

    /// When the first step in the group of the epoch began.
    #[must_use]
    pub fn planned_at(&self) -> Option<Nanos> {
        self.planned
    }

    /// From the loss of a member to the agreement on the next epoch.
    #[must_use]
    pub fn agreement(&self) -> Option<Duration> {
        Some(self.agreed?.since(self.found?))
    }

    /// From the agreement until the pairs were drained.
    #[must_use]
    pub fn drain(&self) -> Option<Duration> {
        Some(self.drained?.since(self.agreed?))
    }

    /// From then until a step began in the new epoch.
    #[must_use]
    pub fn plan(&self) -> Option<Duration> {
        Some(self.planned?.since(self.drained?))
    }
}
