//! The buffers of a rank's contributions, by number.

use std::fmt;

/// The place of a contribution among a rank's buffers.
pub(crate) type Contribution = usize;

/// Some of a rank's contributions. Where sums are exact, a late contribution goes beside a newer
/// one, as adding the two would round.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Contributions(u8);

impl Contributions {
    /// One contribution.
    pub(crate) fn of(contribution: Contribution) -> Self {
        Self(1 << contribution)
    }

    /// Those of both.
    #[must_use]
    pub(crate) fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those but this one.
    #[must_use]
    pub(crate) fn without(self, contribution: Contribution) -> Self {
        Self(self.0 & !Self::of(contribution).0)
    }

    /// Whether a contribution is among them.
    pub(crate) fn contains(self, contribution: Contribution) -> bool {
        self.0 >> contribution & 1 == 1
    }

    /// In ascending order.
    pub(crate) fn iter(self) -> impl Iterator<Item = Contribution> {
        (0..u8::BITS as Contribution).filter(move |contribution| self.contains(*contribution))
    }
}

impl fmt::Debug for Contributions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.iter()).finish()
    }
}
