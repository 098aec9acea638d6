//! Rounds of a simulated rank in its lines, carried out by engines.
//!
//! As a [`Trainer`](crate::Trainer) does it, a rank carries out one thing after the other, and
//! waits for the round of its contribution before the next; only lines that it leaves it leaves
//! together.

use std::collections::VecDeque;

use pleach_collectives::Rank;

use super::engines::{Engines, LineWord, RoundEnded};
use super::rank::SimulatedRank;
use crate::interpreter::Request;
use crate::policy::{Event, OperationId, Outcome, Vector};

/// What a rank waits for.
enum Waiting {
    /// A round of a line, whose result goes into a vector.
    Round(OperationId, usize, Vector),
    /// The last rounds of these lines. Late contributions go into a vector, if it is named.
    Leaving { id: OperationId, into: Option<Vector>, lines: Vec<usize>, carries: bool },
}

/// The rounds of one rank; see the module.
pub(crate) struct InLines {
    /// Which of the lines that the engines know are this rank's.
    lines: Vec<usize>,
    asked: VecDeque<Request>,
    waiting: Option<Waiting>,
}

impl InLines {
    pub(crate) fn new(lines: Vec<usize>) -> Self {
        Self { lines, asked: VecDeque::new(), waiting: None }
    }

    /// Takes a request, to be carried out after those before.
    pub(crate) fn ask(&mut self, request: Request) {
        self.asked.push_back(request);
    }

    /// Carries out nothing of what was asked for.
    pub(crate) fn forget(&mut self) {
        self.asked.clear();
        self.waiting = None;
    }

    /// Whether nothing that was asked for is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.asked.is_empty() && self.waiting.is_none()
    }

    /// Goes on as far as to the end of one operation, of which the rank is to be told then; true
    /// when anything moved.
    pub(crate) fn go_on(
        &mut self,
        rank: &mut SimulatedRank,
        engines: &mut dyn Engines,
        events: &mut Vec<(Rank, Event)>,
    ) -> Result<bool, String> {
        let number = rank.number();
        if self.waiting.is_some() {
            let event = self.await_rounds(rank, engines)?;
            events.extend(event.map(|event| (number, event)));
            return Ok(event.is_some());
        }
        let Some(request) = self.asked.pop_front() else { return Ok(false) };
        match request {
            Request::Contribute { id, line, vector, limit } => {
                let line = self.lines[line];
                if engines.next_round(number, line)?.is_some_and(|next| next > limit) {
                    events.push((number, Event::Done(id, Outcome::Combined { contributors: 0 })));
                    return Ok(true);
                }
                let elements = rank.whole(vector);
                let bytes = size_of_val(elements) as u64;
                engines.contribute(number, line, elements)?;
                rank.count(bytes);
                self.waiting = Some(Waiting::Round(id, line, vector));
            }
            Request::StepAside { line } => engines.say(number, self.lines[line], LineWord::StepAside)?,
            Request::ComeBack { line } => engines.say(number, self.lines[line], LineWord::ComeBack)?,
            Request::Leave { id, into } => {
                let lines = self.lines.clone();
                for line in &lines {
                    engines.say(number, *line, LineWord::Finish)?;
                }
                self.waiting = Some(Waiting::Leaving { id, into, lines, carries: false });
            }
            _ => unreachable!("these go another way"),
        }
        Ok(true)
    }

    /// Stores what has come of the rounds that are waited for. Returns what the rank is to be told
    /// when all have ended.
    fn await_rounds(
        &mut self,
        rank: &mut SimulatedRank,
        engines: &mut dyn Engines,
    ) -> Result<Option<Event>, String> {
        let number = rank.number();
        let ended = match &mut self.waiting {
            Some(Waiting::Round(id, line, vector)) => {
                let Some(round) = engines.take_round(number, *line)? else { return Ok(None) };
                let RoundEnded { contributors, result, late } = round;
                let elements = rank.whole(*vector);
                elements.copy_from_slice(&result);
                if let Some(late) = late {
                    elements.iter_mut().zip(late).for_each(|(element, late)| *element += late);
                }
                Event::Done(*id, Outcome::Combined { contributors })
            }
            Some(Waiting::Leaving { id, into, lines, carries }) => {
                let mut left = Vec::new();
                for line in lines.drain(..) {
                    let Some(round) = engines.take_round(number, line)? else {
                        left.push(line);
                        continue;
                    };
                    let carried = (round.contributors > 0).then_some(round.result).or(round.late);
                    if let Some((vector, carried)) = into.zip(carried) {
                        rank.whole(vector).copy_from_slice(&carried);
                        *carries = true;
                    }
                }
                *lines = left;
                if !lines.is_empty() {
                    return Ok(None);
                }
                Event::Done(*id, Outcome::Left { carries: *carries })
            }
            None => return Ok(None),
        };
        self.waiting = None;
        Ok(Some(ended))
    }
}
