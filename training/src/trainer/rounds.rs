//! The rounds of a trainer's lines: partial all-reduces of the group, or of groups split from it.
//!
//! A contribution is copied into memory of the rounds, and their result back, as late contributions
//! stay with the rounds. Rounds that were aborted stay, and give the error that ended them.

use std::collections::VecDeque;
use std::ops::Range;

use pleach_collectives::{Group, Partial, PartialError, Rank};
use pleach_transport::clock;

use super::line::average;
use super::{TrainError, Trainer};
use crate::interpreter::{Request, Vectors};
use crate::policy::{Event, Outcome, Vector};

/// The rounds of one line.
struct LineRounds {
    ranks: Vec<Rank>,
    /// No round opens before all ranks have contributed.
    waits_for_all: bool,
    partial: Partial<f32>,
    /// Where the line is not the whole group. It stays as long as its rounds.
    group: Option<Group>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Lines {
    lines: Vec<LineRounds>,
    asked: VecDeque<Request>,
    /// What has come from the ranks of a line in a session.
    come: Vec<f32>,
}

impl Lines {
    /// Takes a request, to be carried out after those before.
    pub(crate) fn ask(&mut self, request: Request) {
        self.asked.push_back(request);
    }

    /// Carries out nothing of what was asked for.
    pub(crate) fn forget(&mut self) {
        self.asked.clear();
    }

    /// Ends the rounds on all ranks of the lines.
    pub(crate) fn abort(&self) {
        for LineRounds { partial, group, .. } in &self.lines {
            partial.abort();
            group.iter().for_each(Group::abort);
        }
    }
}

impl LineRounds {
    /// Ends the rounds when all ranks of the line do. `into` gets the late contributions that the
    /// last one combines; returns whether there are any.
    fn finish(&mut self, into: Option<&mut [f32]>) -> Result<bool, PartialError> {
        let round = self.partial.finish()?;
        let carried = (!round.contributors().is_empty()).then(|| round.result());
        let corrected = round.correction().filter(|(ranks, _)| !ranks.is_empty());
        match (into, carried.or(corrected.map(|(_, late)| late))) {
            (Some(into), Some(late)) => {
                into.copy_from_slice(late);
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

impl Trainer {
    /// Makes the rounds of all lines of the scheme's plan, in place of those that all ranks have
    /// left.
    pub(crate) fn open_lines(&mut self) -> Result<(), TrainError> {
        self.lines.lines.clear();
        for line in self.interpreter.lines().to_vec() {
            let is_whole = line.ranks.len() == self.group.world_size() as usize;
            let own = self.group.rank();
            let place = line.ranks.iter().position(|rank| *rank == own).unwrap_or_default();
            let group = if is_whole {
                None
            } else {
                // The line's first rank names it.
                let split = self.group.split(line.ranks.first().copied(), place as u32);
                split.map_err(|error| TrainError::Partial(error.into()))?
            };
            let members = group.as_ref().unwrap_or(&self.group);
            let partial = members.partial(self.layout.parameters(), line.activation);
            let partial = partial.map_err(|error| of_line(&line.ranks, is_whole, error))?;
            let waits_for_all = line.activation.waits_for_all(members.world_size());
            self.lines.lines.push(LineRounds { ranks: line.ranks, waits_for_all, partial, group });
        }
        Ok(())
    }

    /// Carries the next contribution, or the word that there is none, out.
    pub(crate) fn give_next(
        &mut self,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<bool, TrainError> {
        let Some(request) = self.lines.asked.pop_front() else { return Ok(false) };
        let before = clock::now();
        let done = match request {
            Request::Contribute { id, line, vector, .. } if self.in_session.is_some() => {
                let (rank, ranks) = (self.group.rank(), self.group.world_size());
                let lines = self.scheme.map_or_else(Vec::new, |scheme| scheme.lines_of(rank, ranks));
                let ranks = &lines[line];
                let [elements] = self.vectors.pieces([vector], &(0..self.layout.parameters()));
                // A rank alone goes on without.
                let contributors = if ranks.len() > 1 { ranks.len() as u32 } else { 0 };
                let averaged = if contributors > 0 {
                    self.times.bytes += size_of_val(elements) as u64;
                    let averaged = average(&self.group, ranks, elements, &mut self.lines.come);
                    self.note_exchange(contributors);
                    averaged
                } else {
                    Ok(())
                };
                averaged.map(|()| (id, Outcome::Combined { contributors })).map_err(TrainError::from)
            }
            Request::Contribute { id, line, vector, limit } => {
                let all = 0..self.layout.parameters();
                let [elements] = self.vectors.pieces([vector], &all);
                let outcome = contribute(&mut self.lines.lines[line].partial, elements, &all, limit);
                if !matches!(outcome, Ok(Outcome::Combined { contributors: 0 })) {
                    self.times.bytes += (size_of::<f32>() * all.len()) as u64;
                    let ranks = self.lines.lines[line].group.as_ref().unwrap_or(&self.group).world_size();
                    self.note_exchange(ranks);
                }
                outcome.map_err(|error| self.error_of_line(line, error)).map(|outcome| (id, outcome))
            }
            Request::StepAside { line } => {
                let stepped = self.lines.lines[line].partial.step_aside();
                return stepped.map(|()| true).map_err(|error| self.error_of_line(line, error));
            }
            Request::ComeBack { line } => {
                let back = self.lines.lines[line].partial.come_back();
                return back.map(|()| true).map_err(|error| self.error_of_line(line, error));
            }
            Request::Leave { id, into } => {
                self.leave_lines(into).map(|carries| (id, Outcome::Left { carries }))
            }
            _ => unreachable!("these go another way"),
        };
        let time = clock::now().since(before);
        self.times.waiting += time;
        self.times.communicating += time;
        let (id, outcome) = done?;
        self.deliver(Event::Done(id, outcome), optimizer)?;
        Ok(true)
    }

    /// Lets rounds go on without this rank while all ranks do something else together, where they
    /// would wait for it: a rank whose contribution came late may still be in a round.
    pub(crate) fn step_aside(&mut self) -> Result<(), TrainError> {
        self.tell_lines(Partial::step_aside)
    }

    /// Takes part in rounds again after [`Trainer::step_aside`].
    pub(crate) fn come_back(&mut self) -> Result<(), TrainError> {
        self.tell_lines(Partial::come_back)
    }

    /// Tells something to all lines whose rounds do not wait for all ranks.
    fn tell_lines(
        &mut self,
        tell: fn(&mut Partial<f32>) -> Result<(), PartialError>,
    ) -> Result<(), TrainError> {
        for number in 0..self.lines.lines.len() {
            let line = &mut self.lines.lines[number];
            if line.waits_for_all {
                continue;
            }
            tell(&mut line.partial).map_err(|error| self.error_of_line(number, error))?;
        }
        Ok(())
    }

    /// Leaves all lines at once: ranks of one line may still wait in another. Returns whether late
    /// contributions are in the vector that is named for those of a line alone.
    fn leave_lines(&mut self, into: Option<Vector>) -> Result<bool, TrainError> {
        let all = 0..self.layout.parameters();
        let left: Vec<Result<bool, PartialError>> = if let [line] = &mut self.lines.lines[..] {
            let into = into.map(|vector| self.vectors.pieces([vector], &all)).map(|[into]| into);
            vec![line.finish(into)]
        } else {
            std::thread::scope(|scope| {
                let leaving: Vec<_> =
                    self.lines.lines.iter_mut().map(|line| scope.spawn(|| line.finish(None))).collect();
                leaving.into_iter().map(|line| line.join().expect("it does not panic")).collect()
            })
        };
        let mut carries = false;
        for (line, left) in left.into_iter().enumerate() {
            carries |= left.map_err(|error| self.error_of_line(line, error))?;
        }
        Ok(carries)
    }

    fn error_of_line(&self, line: usize, error: PartialError) -> TrainError {
        let ranks = &self.lines.lines[line].ranks;
        of_line(ranks, ranks.len() == self.group.world_size() as usize, error)
    }
}

/// Gives these elements to the next round, and takes its result. Waits for no round above the
/// limit.
fn contribute(
    partial: &mut Partial<f32>,
    elements: &mut [f32],
    all: &Range<usize>,
    limit: u64,
) -> Result<Outcome, PartialError> {
    // A round that is bound meanwhile does not wait for this rank.
    if partial.next_round()?.is_some_and(|next| next > limit) {
        return Ok(Outcome::Combined { contributors: 0 });
    }
    partial.contribution()[all.clone()].copy_from_slice(elements);
    let round = partial.contribute()?;
    elements.copy_from_slice(round.result());
    if let Some((_, late)) = round.correction() {
        elements.iter_mut().zip(late).for_each(|(element, late)| *element += late);
    }
    Ok(Outcome::Combined { contributors: round.contributors().len() })
}

/// The error of a line, whose group numbers its ranks from 0.
fn of_line(ranks: &[Rank], is_whole: bool, error: PartialError) -> TrainError {
    match error {
        PartialError::Collective(error) if is_whole => TrainError::Collective(error),
        PartialError::Collective(error) => TrainError::Line { ranks: named(ranks), error },
        error => TrainError::Partial(error),
    }
}

fn named(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(" ")
}
