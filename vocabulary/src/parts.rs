//! Which parts of the data a slice holds.

/// The parts that an input or output holds, in the order in which they lie in it: `count` of them,
/// from `first` on, each `stride` after the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    first: u32,
    count: u32,
    stride: u32,
}

impl Parts {
    /// No parts.
    pub const NONE: Self = Self { first: 0, count: 0, stride: 1 };

    /// One part.
    #[must_use]
    pub const fn one(part: u32) -> Self {
        Self { first: part, count: 1, stride: 1 }
    }

    /// That number of parts, one after the other.
    #[must_use]
    pub const fn run(first: u32, count: u32) -> Self {
        Self { first, count, stride: 1 }
    }

    /// Every `stride`-th part (at least 1).
    #[must_use]
    pub const fn every(first: u32, count: u32, stride: u32) -> Self {
        Self { first, count, stride }
    }

    /// The one part if the condition holds, else none.
    #[must_use]
    pub const fn one_if(holds: bool, part: u32) -> Self {
        if holds { Self::one(part) } else { Self::NONE }
    }

    /// The number of parts.
    #[must_use]
    pub const fn len(self) -> usize {
        self.count as usize
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether the part is among them.
    #[must_use]
    pub const fn contains(self, part: u32) -> bool {
        part >= self.first
            && (part - self.first).is_multiple_of(self.stride)
            && (part - self.first) / self.stride < self.count
    }

    /// Whether they are one after the other.
    #[must_use]
    pub const fn is_run(self) -> bool {
        self.stride == 1 || self.count < 2
    }

    /// How many of them lie before `part`, which must be one of them.
    #[must_use]
    pub const fn position(self, part: u32) -> u32 {
        debug_assert!(self.contains(part));
        if self.stride == 1 { part - self.first } else { (part - self.first) / self.stride }
    }

    /// In the order in which they lie.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> + DoubleEndedIterator {
        (0..self.count).map(move |position| self.first + position * self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_what_lies_before_and_only_members_are_contained() {
        for parts in [Parts::NONE, Parts::one(3), Parts::run(2, 3), Parts::every(1, 4, 4)] {
            let members: Vec<u32> = parts.iter().collect();
            assert_eq!(members.len(), parts.len());
            assert_eq!(parts.is_empty(), members.is_empty());
            for part in 0..20 {
                let position = members.iter().position(|member| *member == part);
                assert_eq!(parts.contains(part), position.is_some(), "{parts:?} {part}");
                if let Some(position) = position {
                    assert_eq!(parts.position(part) as usize, position);
                }
            }
        }
        assert_eq!(Parts::every(1, 4, 4).iter().collect::<Vec<_>>(), [1, 5, 9, 13]);
    }
}
