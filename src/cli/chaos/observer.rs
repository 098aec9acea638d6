//! What is known of a program of the user's that chaos befalls: its members answer whoever asks for
//! them at the rendezvous of the job, as `pleach members` does.
//!
//! A process here has a number, in the order in which they were started; a member has a seat and an
//! incarnation. The seat of a process that begins the job is its number. One process joins at a
//! time, so a new incarnation is that of the process that was started last.
//! **Invariant:** members have gone on in an epoch when the one that answers has come to another
//! step there than the one with which it was first seen there.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use pleach::session::asks::{MemberRow, MemberState, members};
use pleach::transport::rendezvous::World;

use crate::cli::CommandError;
use crate::cli::strikes::Strikes;

/// How long after an answer the next question is asked.
const PAUSE: Duration = Duration::from_millis(100);

/// How long an answer may take: who would answer may be stopped, or have ended.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// See the module.
pub(crate) struct Observer {
    answers: Receiver<Vec<MemberRow>>,
    /// Ends the thread that asks when it is dropped.
    _ends: Sender<()>,
    /// Processes that begin the job.
    founders: u32,
    /// By incarnation: the number of the process.
    numbers: BTreeMap<u64, u32>,
    /// The newest epoch, with the step in which it was first seen.
    epoch: Option<(u64, u64)>,
    step: u64,
}

impl Observer {
    /// Of a job that so many processes begin.
    pub(crate) fn start(asker: World, founders: u32) -> Result<Self, CommandError> {
        let ((sender, answers), (ends, ended)) = (channel(), channel());
        let ask = move || {
            loop {
                // Nobody answers before the job has begun, and while the answering member changes.
                if let Ok(rows) = members(&asker, ANSWER_LIMIT)
                    && sender.send(rows).is_err()
                {
                    return;
                }
                if ended.recv_timeout(PAUSE) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        thread::Builder::new()
            .spawn(ask)
            .map_err(|error| CommandError::failed(format!("no thread: {error}; see 'ulimit -u'")))?;
        Ok(Self { answers, _ends: ends, founders, numbers: BTreeMap::new(), epoch: None, step: 0 })
    }

    /// Tells which processes have gone on.
    pub(crate) fn look(&mut self, strikes: &mut Strikes) {
        while let Ok(rows) = self.answers.try_recv() {
            self.take(&rows, strikes);
        }
    }

    /// The newest epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.map_or(0, |(epoch, _)| epoch)
    }

    /// The newest step.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    fn take(&mut self, rows: &[MemberRow], strikes: &mut Strikes) {
        let is_member = |row: &&MemberRow| !matches!(row.state, MemberState::Joining | MemberState::Out);
        let members: Vec<&MemberRow> = rows.iter().filter(is_member).collect();
        let Some(epoch) = members.iter().filter_map(|row| row.epoch).max() else { return };
        let step = members.iter().map(|row| row.step).max().unwrap_or_default();
        match self.epoch {
            // Of a member that is out.
            Some((newest, _)) if newest > epoch => return,
            Some((newest, first)) if newest == epoch && step > first => {}
            Some((newest, _)) if newest == epoch => return,
            _ => {
                self.epoch = Some((epoch, step));
                return;
            }
        }
        self.step = self.step.max(step);
        for (incarnation, number) in &self.numbers {
            if members.iter().all(|row| row.process.incarnation.0 != *incarnation) {
                strikes.is_out(*number);
            }
        }
        for row in &members {
            if let Some(number) = self.number(row, strikes) {
                strikes.works(number, row.process.seat.0, members.len() as u32);
                // Steps of two members differ by one at most.
                strikes.committed(number, step.saturating_sub(2));
            }
        }
    }

    /// The process that is this member.
    fn number(&mut self, row: &MemberRow, strikes: &mut Strikes) -> Option<u32> {
        let (seat, incarnation) = (row.process.seat.0, row.process.incarnation.0);
        if let Some(number) = self.numbers.get(&incarnation) {
            return Some(*number);
        }
        let begins = seat < self.founders && self.numbers.values().all(|number| *number != seat);
        let number = if begins { seat } else { strikes.newcomer()? };
        self.numbers.insert(incarnation, number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use pleach::session::Process;

    use super::*;
    use crate::cli::faults::Fault;
    use crate::cli::strikes::Strikes;

    fn observer() -> Observer {
        let ((_, answers), (ends, _)) = (channel(), channel());
        Observer { answers, _ends: ends, founders: 3, numbers: BTreeMap::new(), epoch: None, step: 0 }
    }

    fn rows(epoch: u64, step: u64, members: &[(u32, u64)]) -> Vec<MemberRow> {
        let row = |&(seat, incarnation): &(u32, u64)| MemberRow {
            process: Process::new(seat, incarnation),
            host: "0".to_owned(),
            epoch: Some(epoch),
            step,
            state: MemberState::Member,
        };
        members.iter().map(row).collect()
    }

    #[test]
    fn members_have_gone_on_when_they_are_a_step_further_in_an_epoch() {
        let bounds = "1:3".parse().expect("are bounds");
        let mut strikes = Strikes::new(3, bounds, vec![Fault::Kill], Duration::ZERO, 1);
        let mut observer = observer();
        let all = [(0, 7), (1, 8), (2, 9)];
        observer.take(&rows(0, 0, &all), &mut strikes);
        assert_eq!(strikes.working(), 0, "no step was made");
        observer.take(&rows(0, 1, &all), &mut strikes);
        assert_eq!((strikes.working(), observer.epoch(), observer.step()), (3, 0, 1));
        strikes.ended(1, false);
        observer.take(&rows(1, 4, &[(0, 7), (2, 9)]), &mut strikes);
        observer.take(&rows(0, 9, &all), &mut strikes);
        assert_eq!(
            (strikes.working(), observer.epoch(), observer.step()),
            (2, 1, 1),
            "one is out, and answered"
        );
    }

    #[test]
    fn a_new_incarnation_is_the_process_that_joins_whatever_its_seat_is() {
        let bounds = "1:4".parse().expect("are bounds");
        let mut strikes = Strikes::new(3, bounds, Vec::new(), Duration::ZERO, 1);
        let mut observer = observer();
        for step in 0..2 {
            observer.take(&rows(0, step, &[(0, 7), (1, 8), (2, 9)]), &mut strikes);
        }
        strikes.ended(1, false);
        assert_eq!(strikes.joins(), 3);
        for step in 2..4 {
            observer.take(&rows(1, step, &[(0, 7), (1, 5), (2, 9)]), &mut strikes);
        }
        assert!(!strikes.is_joining(3));
        assert_eq!((strikes.working(), strikes.newcomer()), (3, None));
    }
}
