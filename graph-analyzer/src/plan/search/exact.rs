//! Decides whether buffers fit under a height, by depth-first search over plans that rest.
//!
//! In a plan that *rests*, each buffer lies at the bottom or directly on a buffer that lives at the
//! same moment. Every plan can be pushed down until it rests, so only these are searched. A step
//! takes a buffer under which nothing can lie any more and branches: the buffer lies at its lowest
//! place, or it is *lifted*: it lies on a buffer that is still to be placed. Equal buffers are
//! lifted together. A branch ends when
//!
//! * in some section of time, the lowest place of any open buffer plus all open bytes exceed the
//!   height (the idea of MiniMalloc, Moffitt 2023), or
//! * the gap under a lifted buffer holds it and no open buffer can lie in this gap: pushed down,
//!   such a plan is one of the other branch.
//!
//! Which buffer a step takes is up to the [`Strategy`]: the lowest one, or one for the section with
//! the fewest candidates, where sections without room to spare come first. After each placement the
//! open buffers fall apart into parts that share no section. The parts are solved one after the
//! other, and the first that is impossible ends the branch.

use std::cmp::Reverse;

use pleach_vocabulary::digest::hash_of_pair;

use super::group::{Group, Item};

/// What a solver found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A plan of the height.
    Found,
    /// There is no plan of the height.
    Impossible,
    /// The steps were spent.
    Unknown,
    /// The effort was spent.
    Stopped,
}

/// What a step takes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strategy {
    /// The number of an attempt: later attempts draw other orders.
    round: usize,
}

/// Orders in which buffers that can lie equally low are tried: this many.
const ORDERS: usize = 4;

/// From the second turn on, lengths in the orders are drawn up to this share larger, in percent.
const NOISE_PERCENT: u64 = 100;

impl Strategy {
    pub(super) fn of(round: usize) -> Self {
        Self { round }
    }

    /// Whether steps take the lowest buffer, and not the section with the fewest candidates.
    fn is_lowest_first(self) -> bool {
        self.round % 2 == 1
    }

    /// What room to spare counts for in a section, in quarters of a candidate.
    fn slack_quarters(self) -> u32 {
        [5, 0, 1000, 12][self.round / (2 * ORDERS) % 4]
    }

    /// By item: its place in the order of preference.
    fn preferences(self, group: &Group) -> Vec<u32> {
        let (order, turn) = (self.round / 2 % ORDERS, self.round / (2 * ORDERS));
        let key = |&number: &usize| {
            let item = &group.items()[number];
            let length = (item.end - item.first) as u64;
            let total = group.totals()[item.first..item.end].iter().copied().max().unwrap_or(0);
            let area = length * item.size;
            let [first, second, third] = match order {
                0 => [length, total, area],
                1 => [total, area, length],
                2 => [area, total, length],
                _ => [item.size, length, total],
            };
            let noise = if turn == 0 {
                0
            } else {
                hash_of_pair(0, ((turn as u64) << 32) + number as u64) % NOISE_PERCENT
            };
            (Reverse([first * (100 + noise), second, third]), number)
        };
        let mut order: Vec<usize> = (0..group.items().len()).collect();
        order.sort_by_key(key);
        let mut preferences = vec![0; order.len()];
        for (place, &number) in order.iter().enumerate() {
            preferences[number] = place as u32;
        }
        preferences
    }
}

/// What an evaluation knows of an open item.
#[derive(Clone, Copy, Default)]
struct Open {
    /// The highest floor in its sections: its lowest place if it is not lifted.
    rest: u64,
    /// A lower bound of its offset.
    place: u64,
    /// It was refused its lowest place and lies at least here; 0 if it was not.
    lifted: u64,
}

impl Open {
    fn is_candidate(&self) -> bool {
        self.rest >= self.lifted
    }
}

/// What an evaluation knows of a section.
#[derive(Clone, Copy, Default)]
struct Section {
    /// The end of what is placed.
    floor: u64,
    /// Bytes that are still to be placed.
    open: u64,
    /// The lowest place of an open item.
    lowest: u64,
    /// Items that can lie at `lowest` now, and under which nothing else can.
    candidates: u32,
    /// Items at `lowest` that are lifted.
    lifted: u32,
    /// Items at `lowest` under which something else can lie.
    uneven: u32,
}

/// A search for a plan of one height.
pub(super) struct Solver<'a> {
    items: &'a [Item],
    height: u64,
    strategy: Strategy,
    preference: Vec<u32>,
    open: Vec<Open>,
    sections: Vec<Section>,
    /// Where the items lie that are placed.
    offsets: Vec<u64>,
    /// What is placed, in order, and the floors that it covered.
    trail: Vec<u32>,
    covered: Vec<u64>,
    steps_left: u64,
}

impl<'a> Solver<'a> {
    pub(super) fn new(group: &'a Group, height: u64, strategy: Strategy) -> Self {
        let items = group.items();
        let section = |&open: &u64| Section { open, ..Section::default() };
        Self {
            items,
            height,
            strategy,
            preference: strategy.preferences(group),
            open: vec![Open::default(); items.len()],
            sections: group.totals().iter().map(section).collect(),
            offsets: vec![0; items.len()],
            trail: Vec::new(),
            covered: Vec::new(),
            steps_left: 0,
        }
    }

    /// Searches for at most so many steps, as long as `goes_on` says so.
    pub(super) fn solve(&mut self, steps: u64, goes_on: &mut dyn FnMut() -> bool) -> Answer {
        self.steps_left = steps;
        let all: Vec<u32> = (0..self.items.len() as u32).collect();
        self.descend(&all, goes_on)
    }

    /// Where the items lie; after [`Answer::Found`].
    pub(super) fn into_offsets(self) -> Vec<u64> {
        self.offsets
    }

    /// Places all of `members`, which are open, connected, and in the order of their first
    /// sections.
    fn descend(&mut self, members: &[u32], goes_on: &mut dyn FnMut() -> bool) -> Answer {
        let mark = self.trail.len();
        let mut refused: Vec<(u32, u64)> = Vec::new();
        let answer = loop {
            if self.steps_left == 0 {
                break Answer::Unknown;
            }
            self.steps_left -= 1;
            if !goes_on() {
                break Answer::Stopped;
            }
            let Some(next) = self.evaluate(members) else { break Answer::Impossible };
            let answer = if self.put(next) {
                self.descend_into_parts(members, next, goes_on)
            } else {
                Answer::Impossible
            };
            if answer != Answer::Impossible {
                break answer;
            }
            self.take_back(mark);
            self.lift(members, next, &mut refused);
        };
        for (item, before) in refused.into_iter().rev() {
            self.open[item as usize].lifted = before;
        }
        answer
    }

    /// Places what remains of `members` without `placed`, part by part.
    fn descend_into_parts(
        &mut self,
        members: &[u32],
        placed: u32,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Answer {
        let (mut part, mut end) = (Vec::with_capacity(members.len()), 0);
        for &member in members.iter().filter(|&&member| member != placed) {
            let item = &self.items[member as usize];
            if item.first >= end && !part.is_empty() {
                let answer = self.descend(&part, goes_on);
                if answer != Answer::Found {
                    return answer;
                }
                part.clear();
            }
            end = end.max(item.end);
            part.push(member);
        }
        if part.is_empty() { Answer::Found } else { self.descend(&part, goes_on) }
    }

    /// Returns the member to place next, or nothing if the members do not fit.
    fn evaluate(&mut self, members: &[u32]) -> Option<u32> {
        let level = self.evaluate_rests(members)?;
        self.evaluate_lifted(members, level)?;
        self.evaluate_sections(members);
        self.check_sections(members)?;
        let lowest = || {
            let candidates = members.iter().filter(|&&member| self.open[member as usize].is_candidate());
            let key = |&&member: &&u32| (self.open[member as usize].rest, self.preference[member as usize]);
            candidates.min_by_key(key).copied()
        };
        if self.strategy.is_lowest_first() {
            return lowest();
        }
        self.scarcest_section(members).and_then(|section| self.preferred_in(members, section)).or_else(lowest)
    }

    /// The places of members that are not lifted. Returns the lowest; nothing if there is none, or
    /// if some member does not fit.
    fn evaluate_rests(&mut self, members: &[u32]) -> Option<u64> {
        let mut level = None;
        for &member in members {
            let item = &self.items[member as usize];
            let mut rest = 0;
            for section in &mut self.sections[item.first..item.end] {
                rest = rest.max(section.floor);
                *section = Section {
                    floor: section.floor,
                    open: section.open,
                    lowest: u64::MAX,
                    ..Section::default()
                };
            }
            if rest + item.size > self.height {
                return None;
            }
            let open = &mut self.open[member as usize];
            (open.rest, open.place) = (rest, rest.max(open.lifted));
            if open.is_candidate() {
                level = Some(level.map_or(rest, |level: u64| level.min(rest)));
            }
        }
        level
    }

    /// Raises the places of lifted members: each lies on an open member beside it. Returns nothing
    /// if one does not fit.
    fn evaluate_lifted(&mut self, members: &[u32], level: u64) -> Option<()> {
        for &member in members {
            if !self.open[member as usize].is_candidate() {
                let below = self.beside(members, member);
                let ends = below.map(|other| self.open[other].place.max(level) + self.items[other].size);
                let place = self.open[member as usize].place.max(ends.min()?);
                if place + self.items[member as usize].size > self.height {
                    return None;
                }
                self.open[member as usize].place = place;
            }
        }
        Some(())
    }

    /// The lowest places in all sections, and how many members can lie there.
    fn evaluate_sections(&mut self, members: &[u32]) {
        for &member in members {
            let (item, place) = (&self.items[member as usize], self.open[member as usize].place);
            for section in &mut self.sections[item.first..item.end] {
                section.lowest = section.lowest.min(place);
            }
        }
        for &member in members {
            let (item, open) = (&self.items[member as usize], self.open[member as usize]);
            let sections = &mut self.sections[item.first..item.end];
            let is_even = sections.iter().all(|section| section.lowest == open.place);
            for section in sections.iter_mut().filter(|section| section.lowest == open.place) {
                match (open.is_candidate(), is_even) {
                    (false, _) => section.lifted += 1,
                    (true, false) => section.uneven += 1,
                    (true, true) => section.candidates += 1,
                }
            }
        }
    }

    /// Returns nothing if a section is too full, or if the gap under a lifted member stays open.
    fn check_sections(&self, members: &[u32]) -> Option<()> {
        for &member in members {
            let (item, open) = (&self.items[member as usize], self.open[member as usize]);
            if self.sections[item.first..item.end]
                .iter()
                .any(|section| section.lowest + section.open > self.height)
            {
                return None;
            }
            let end = open.rest + item.size;
            if !open.is_candidate() && !self.beside(members, member).any(|other| self.open[other].place < end)
            {
                return None;
            }
        }
        Some(())
    }

    /// The section with the fewest candidates.
    fn scarcest_section(&self, members: &[u32]) -> Option<usize> {
        let first = self.items[*members.first()? as usize].first;
        let end = members.iter().map(|&member| self.items[member as usize].end).max()?;
        let usable = (first..end).filter(|&at| {
            let section = &self.sections[at];
            section.open > 0 && section.candidates > 0 && section.uneven == 0
        });
        usable.min_by_key(|&at| {
            let section = &self.sections[at];
            let is_tight = section.lowest + section.open == self.height && section.lifted == 0;
            let slack = if is_tight { 0 } else { self.strategy.slack_quarters() };
            (section.candidates * 4 + slack, section.lowest)
        })
    }

    /// The candidate that is preferred at the lowest place of a section.
    fn preferred_in(&self, members: &[u32], at: usize) -> Option<u32> {
        let lies_there = |&&member: &&u32| {
            let (item, open) = (&self.items[member as usize], &self.open[member as usize]);
            (item.first..item.end).contains(&at)
                && open.is_candidate()
                && open.rest == self.sections[at].lowest
        };
        members.iter().filter(lies_there).min_by_key(|&&member| self.preference[member as usize]).copied()
    }

    /// The other members that live in a section of this one.
    fn beside<'b>(&'b self, members: &'b [u32], member: u32) -> impl Iterator<Item = usize> + 'b {
        let item = &self.items[member as usize];
        let others = members.iter().take_while(|&&other| self.items[other as usize].first < item.end);
        let others = others.filter(move |&&other| other != member).map(|&other| other as usize);
        others.filter(|&other| item.first < self.items[other].end)
    }

    /// Places an item at its floor. Returns whether its sections can still be filled.
    fn put(&mut self, member: u32) -> bool {
        let (item, offset) = (&self.items[member as usize], self.open[member as usize].rest);
        self.offsets[member as usize] = offset;
        self.trail.push(member);
        let mut fits = true;
        for section in &mut self.sections[item.first..item.end] {
            self.covered.push(section.floor);
            section.floor = offset + item.size;
            section.open -= item.size;
            fits &= section.floor + section.open <= self.height;
        }
        fits
    }

    /// Takes back all placements but the first `mark`.
    fn take_back(&mut self, mark: usize) {
        for member in self.trail.drain(mark..).rev() {
            let item = &self.items[member as usize];
            let start = self.covered.len() - (item.end - item.first);
            for (section, floor) in
                self.sections[item.first..item.end].iter_mut().zip(self.covered.drain(start..))
            {
                section.floor = floor;
                section.open += item.size;
            }
        }
    }

    /// Refuses an item its lowest place, and with it the items that are equal to it.
    fn lift(&mut self, members: &[u32], member: u32, refused: &mut Vec<(u32, u64)>) {
        let item = self.items[member as usize].clone();
        let floors = self.sections[item.first..item.end].iter().map(|section| section.floor);
        let lifted = floors.max().unwrap_or(0) + 1;
        for &other in members {
            let twin = &self.items[other as usize];
            if twin.first == item.first && twin.end == item.end && twin.size == item.size {
                let open = &mut self.open[other as usize];
                refused.push((other, open.lifted));
                open.lifted = open.lifted.max(lifted);
            }
        }
    }
}
