//! Work in closed form, for each algorithm that has a formula.

use pleach_vocabulary::Collective;

use super::{InterHost, Work};
use crate::generate::{Access, Algorithm};
use crate::rank_space::RankSpace;

impl Work {
    /// The closed form, where there is one: for puts, except in grids with holes; mapped, of the
    /// schedules that are long and are no families.
    #[must_use]
    pub fn formula(
        collective: Collective,
        algorithm: &Algorithm,
        ranks: u32,
        access: Access,
    ) -> Option<Self> {
        if !algorithm.carries_out(collective) || ranks == 0 {
            return None;
        }
        let alone = matches!(collective, Collective::SendRecv { from, to } if from == to);
        if ranks == 1 || alone {
            return Some(Self::puts(1, 0, 0, 0));
        }
        let p = ranks;
        if access == Access::Mapped {
            return Self::mapped(collective, algorithm, p);
        }
        match algorithm {
            Algorithm::Direct => Some(match collective {
                Collective::AllReduce => Self::puts(p, 2, 2 * (p - 1), 2 * (p - 1)).reducing(1, p - 1),
                Collective::ReduceScatter => Self::puts(p, 2, 2 * (p - 1), p - 1).reducing(1, p - 1),
                Collective::AllGather => Self::puts(p, 2, 2 * (p - 1), p - 1),
                Collective::Reduce { .. } => Self::puts(1, 2, p - 1, p - 1).reducing(1, p - 1),
                Collective::Broadcast { .. } => Self::puts(1, 2, p - 1, p - 1),
                Collective::Gather { .. } | Collective::Scatter { .. } => Self::puts(p, 2, p - 1, p - 1),
                Collective::AllToAll => Self::puts(p * p, 2, 2 * (p - 1), p - 1),
                _ => Self::puts(1, 2, 1, 1),
            }),
            Algorithm::Exchange => Some(Self::puts(1, 1, p - 1, p - 1).reducing(1, p - 1)),
            Algorithm::Eager => Some(Self::eager(collective, p)),
            Algorithm::EagerTree => Some(Self::eager_tree(collective, p)),
            Algorithm::Ring => Some(match collective {
                Collective::AllReduce => {
                    // Of more than two ranks the one before has to be told that results may come.
                    let messages = if p > 2 { 3 * (p - 1) } else { 2 * (p - 1) };
                    Self::puts(p, 2 * (p - 1), messages, 2 * (p - 1)).reducing(p - 1, p - 1)
                }
                Collective::ReduceScatter => Self::puts(p, p, 2 * (p - 1), p - 1).reducing(p - 1, p - 1),
                _ => Self::puts(p, p, 2 * (p - 1), p - 1),
            }),
            Algorithm::Chain => {
                let reduces = u32::from(collective.reduces());
                let work = Self::puts(1, p, if p > 2 { 2 } else { 1 }, 1).reducing(reduces, reduces);
                Some(work.along(p - 1, 3 * reduces * (p - 1)))
            }
            Algorithm::RecursiveDoubling => Some(Self::recursive_doubling(collective, p)),
            Algorithm::HalvingDoubling => Some(Self::halving_doubling(collective, p)),
            Algorithm::DoubleTree => Some(Self::double_tree(collective, p)),
            Algorithm::Grid(shape) => {
                let space = shape.space(p).ok().filter(RankSpace::is_full)?;
                Some(Self::grid(collective, p, space.extents()))
            }
            Algorithm::GridStaged(shape) => {
                let space = shape.space(p).ok().filter(RankSpace::is_full)?;
                let stages = space.extents().iter().filter(|&&extent| extent > 1);
                let (passes, reduced) = stages.clone().fold((0, 0), |(passes, reduced), &extent| {
                    (passes + p / extent, reduced + p / extent * (extent - 1))
                });
                let rounds = 2 * stages.count() as u32;
                Some(Self::puts(p, rounds, 2 * reduced, 2 * reduced).reducing(passes, reduced))
            }
            Algorithm::Hierarchical(_) | Algorithm::Packed(_) => None,
        }
    }

    fn eager(collective: Collective, ranks: u32) -> Self {
        let (p, others) = (ranks, ranks - 1);
        match collective {
            Collective::Reduce { .. } => Self::puts(1, 1, 1, others).reducing(1, others),
            Collective::ReduceScatter => Self::puts(p, 1, others, others).reducing(1, others),
            Collective::Broadcast { .. } => Self::puts(1, 1, others, others).copying(1),
            Collective::Scatter { .. } => Self::puts(p, 1, others, others).copying(1),
            Collective::Gather { .. } => Self::puts(p, 1, 1, others).copying(others),
            Collective::AllToAll => Self::puts(p * p, 1, others, others).copying(others),
            Collective::SendRecv { .. } => Self::puts(1, 1, 1, 1).copying(1),
            _ => Self::puts(p, 1, others, others).copying(others),
        }
    }

    fn eager_tree(collective: Collective, ranks: u32) -> Self {
        let (depth, most_children) = (ranks.ilog2(), ranks.next_power_of_two().ilog2());
        if !collective.reduces() {
            return Self::puts(1, depth, most_children, most_children).copying(1);
        }
        // On the longest way up; who has children passes over two places more than it has of them.
        // Children are those with one more bit below the lowest.
        let mut passed = vec![0; ranks as usize];
        for rank in (0..ranks).rev() {
            let lowest = if rank == 0 { most_children } else { rank.trailing_zeros() };
            let children = (0..lowest).map(|bit| rank | 1 << bit).take_while(|&child| child < ranks);
            let longest = children.clone().map(|child| passed[child as usize]).max();
            passed[rank as usize] = longest.map_or(0, |longest| longest + children.count() as u32 + 2);
        }
        let work = Self::puts(1, depth, 1, most_children).reducing(1, most_children);
        work.along(depth, passed[0])
    }

    fn recursive_doubling(collective: Collective, ranks: u32) -> Self {
        if collective == Collective::Barrier {
            let rounds = ranks.next_power_of_two().ilog2();
            return Self::puts(1, rounds, rounds, 0);
        }
        let (participants, exchanges) = (1 << ranks.ilog2(), ranks.ilog2());
        let others = ranks - participants;
        if others == 0 {
            return Self::puts(1, exchanges, exchanges, exchanges).reducing(exchanges, exchanges);
        }
        // A proxy is in all exchanges; only from one proxy to another is the path
        // two longer.
        let path = exchanges + 1 + u32::from(2 * others > participants);
        let work = Self::puts(1, path, exchanges + 1, exchanges + 1).reducing(exchanges + 1, exchanges + 1);
        work.along(path, 0)
    }

    fn halving_doubling(collective: Collective, ranks: u32) -> Self {
        let (participants, exchanges) = (1 << ranks.ilog2(), ranks.ilog2());
        let others = ranks - participants;
        let most = participants - 1;
        let reduces = u32::from(collective.reduces());
        match collective {
            Collective::AllReduce if others > 0 => {
                let moved = 2 * most + participants;
                let work = Self::puts(participants, 2 * exchanges + 2, moved, moved);
                work.reducing(participants, most + participants)
            }
            Collective::AllReduce => {
                let work = Self::puts(participants, 2 * exchanges, 2 * most, 2 * most);
                work.reducing(participants / 2, most)
            }
            _ if others > 0 => {
                // The others have blocks of their own. Only from one of them to another is the path
                // two longer.
                let rounds = exchanges + 2 + u32::from(2 * others > participants);
                let more = (1..others).map(|other| exchanges - other.ilog2()).sum::<u32>();
                let moved = 2 * participants + exchanges - 1 + more;
                let work = Self::puts(ranks, rounds, moved + ranks - 1, moved);
                work.reducing(reduces * ranks, reduces * moved)
            }
            _ => {
                let work = Self::puts(participants, exchanges + 1, 2 * most, most);
                work.reducing(reduces * participants / 2, reduces * most)
            }
        }
    }

    /// Mapped. Signals are those of puts, but nothing moves.
    fn mapped(collective: Collective, algorithm: &Algorithm, ranks: u32) -> Option<Self> {
        let (p, others) = (ranks, ranks - 1);
        let pairwise = matches!(
            collective,
            Collective::AllToAll
                | Collective::Gather { .. }
                | Collective::Scatter { .. }
                | Collective::SendRecv { .. }
        );
        let (passed, passed_on_path) = match algorithm {
            // Who wants a part reads it in place.
            Algorithm::Direct if pairwise => match collective {
                Collective::AllToAll | Collective::Gather { .. } => (2 * others, 2),
                _ => (2, 2),
            },
            Algorithm::Exchange => (2 * p + 1, 0),
            // A copy to scratch, and one out of it.
            Algorithm::Eager => match collective {
                Collective::Reduce { .. } => (p + 1, p + 3),
                Collective::ReduceScatter => (2 * others + p + 1, p + 3),
                Collective::Broadcast { .. } => (p, p + 2),
                Collective::AllGather => (p + 2 * others, p + 2),
                Collective::AllToAll => (4 * others, 4),
                Collective::SendRecv { .. } => (2, 4),
                _ => (2 * others, 4),
            },
            Algorithm::RecursiveDoubling if collective == Collective::Barrier => (0, 0),
            // Each sum goes to the peer in the pass that makes it.
            Algorithm::RecursiveDoubling if p.is_power_of_two() => (4 * p.ilog2() + 1, 0),
            Algorithm::RecursiveDoubling => (4 * p.ilog2() + 4, 4 * p.ilog2() + 6),
            Algorithm::HalvingDoubling if !p.is_power_of_two() => match collective {
                Collective::AllReduce => (7 * (1 << p.ilog2()) - 3, 0),
                Collective::AllGather => (2 * others, 0),
                _ => (Self::halving_doubling(collective, p).passed, 0),
            },
            _ => return None,
        };
        let by_puts = Self::formula(collective, algorithm, ranks, Access::Put)?;
        let still = Self { moved: 0, moved_on_path: 0, passed, passed_on_path: 0, ..by_puts };
        Some(still.along(0, passed_on_path))
    }

    fn grid(collective: Collective, ranks: u32, extents: &[u32]) -> Self {
        let stages = extents.iter().filter(|&&extent| extent > 1).count() as u32;
        // A block is combined where the coordinate that is corrected first is right already.
        let first = extents.iter().rev().find(|&&extent| extent > 1).copied().unwrap_or(1);
        let (passes, others) = (ranks / first, ranks - 1);
        match collective {
            Collective::AllReduce => {
                Self::puts(ranks, 2 * stages, 2 * others, 2 * others).reducing(passes, others)
            }
            Collective::ReduceScatter => {
                Self::puts(ranks, stages + 1, 2 * others, others).reducing(passes, others)
            }
            _ => Self::puts(ranks, stages + 1, 2 * others, others),
        }
    }

    fn double_tree(collective: Collective, ranks: u32) -> Self {
        // The trees are made of all ranks, or of all but the root.
        let members = if collective.root().is_some() { ranks - 1 } else { ranks };
        let depth = members.ilog2();
        // On the way up each rank with children has two, but perhaps the top; it passes over two
        // more places.
        let top_children = if depth == 0 { 0 } else { 1 + u32::from(!members.is_power_of_two()) };
        let passed_upwards = top_children + 2 * depth.saturating_sub(1) + 2 * depth;
        let most_children = members.saturating_sub(1).min(2);
        match collective {
            Collective::AllReduce => {
                // Up and down in one tree, up in the other.
                let sent = members.min(4);
                let work = Self::puts(2, 2 * depth, sent, sent).reducing(1, most_children);
                work.along(2 * depth, passed_upwards)
            }
            Collective::Reduce { .. } => {
                // The root combines its own with the top of either tree.
                let work = Self::puts(2, depth + 2, most_children + 2, 2).reducing(2, 2);
                work.along(depth + 1, passed_upwards + 3)
            }
            _ => Self::puts(2, depth + 2, most_children + 2, 2).along(depth + 1, 0),
        }
    }

    fn puts(blocks: u32, rounds: u32, messages: u32, moved: u32) -> Self {
        Self {
            blocks,
            rounds,
            messages,
            moved,
            reduced: 0,
            passed: 0,
            moved_on_path: moved,
            passed_on_path: 0,
            inter_host: InterHost::default(),
        }
    }

    /// With `passes` that combine `reduced` chunks with the first of their sources.
    fn reducing(mut self, passes: u32, reduced: u32) -> Self {
        self.reduced = reduced;
        // The first source and the one result are not among them.
        self.passed = reduced + 2 * passes;
        self.passed_on_path = self.passed;
        self
    }

    /// With `copies` passes that copy a chunk.
    fn copying(self, copies: u32) -> Self {
        Self { passed: 2 * copies, passed_on_path: 2 * copies, ..self }
    }

    /// The path has so many blocks, or as many as the busiest rank where that is more.
    fn along(mut self, moved: u32, passed: u32) -> Self {
        self.moved_on_path = self.moved.max(moved);
        self.passed_on_path = self.passed.max(passed);
        self
    }
}
