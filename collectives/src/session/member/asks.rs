//! What a person or a launcher asks of the member that gives seats: who is there, and that a member
//! leaves or is known to be dead.

use pleach_membership::{Certificate, Input, Process, Seat};

use super::{Member, State};
use crate::session::asks::{Ask, MemberRow, MemberState, Reply};
use crate::session::envelope::of_leave;
use crate::session::roster::Neighbour;

impl Member {
    /// Answers a person.
    pub(crate) fn answer(&self, ask: Ask) -> Reply {
        let mut state = self.lock();
        match ask {
            Ask::Members => Reply::Members(self.rows(&state)),
            Ask::Drain(seat) => {
                let Some(member) = state.record.as_ref().and_then(|record| record.on_seat(seat)) else {
                    return Reply::Refused(format!("no member is on {seat}"));
                };
                if member == self.process {
                    self.announce_leave(&mut state);
                } else {
                    drop(state);
                    self.post(&[member.seat.0], &of_leave(member.incarnation));
                }
                Reply::Done
            }
            Ask::Certify(process) => {
                if !state.record.as_ref().is_some_and(|record| record.contains(process)) {
                    return Reply::Refused(format!("{process} is no member"));
                }
                if !self.is_suspected(&state, process) {
                    return Reply::Refused(format!(
                        "{process} is not suspected: it is reached; let it leave with --drain, or end it"
                    ));
                }
                // What the dead has learned nobody says; the person answers that it was no newer
                // record than this.
                let learned = state.record.clone();
                self.tell(&mut state, Input::Certificate(Certificate { process, learned }));
                Reply::Done
            }
            Ask::Ended(word) => match self.certificate(&word) {
                Ok(certificate) => {
                    let process = certificate.process;
                    tracing::info!("{process} has ended, its launcher says");
                    state.ended.insert(process);
                    self.tell(&mut state, Input::Certificate(certificate));
                    let is_member = state.record.as_ref().is_some_and(|record| record.contains(process));
                    if is_member { Reply::Begun } else { Reply::Done }
                }
                Err(error) => Reply::Refused(format!(
                    "the last word of the process {error}; is the address that of its job, and the launcher of this version of pleach?"
                )),
            },
        }
    }

    fn is_suspected(&self, state: &State, process: Process) -> bool {
        let own = state.membership.view_of(self.process);
        own.is_some_and(|own| own.unreached.contains(&process))
    }

    fn rows(&self, state: &State) -> Vec<MemberRow> {
        let record = state.record.as_ref();
        let step = state.membership.participant().step().unwrap_or(0);
        let row = |neighbour: &Neighbour| {
            let process = neighbour.process();
            let view = state.membership.view_of(process);
            let is_member = record.is_some_and(|record| record.contains(process));
            let since = record.and_then(|record| record.member_since(process));
            // Who came has none of the states until it has said more.
            let share = since.filter(|since| *since > 0);
            let share = share.map(|since| self.incoming.share(process.seat.0, since).unwrap_or(0));
            let standing = if !is_member {
                MemberState::Joining
            } else if self.is_suspected(state, process) {
                MemberState::Suspected
            } else if view.is_some_and(|view| view.leaves) {
                MemberState::Leaving
            } else if let Some(percent) = share.filter(|share| *share < 100) {
                MemberState::Healing { percent }
            } else {
                MemberState::Member
            };
            let epoch = if is_member { record.map(|record| record.number()) } else { None };
            MemberRow { process, host: neighbour.host_shown(), epoch, step, state: standing }
        };
        let mut rows: Vec<MemberRow> = state.roster.iter().map(row).collect();
        let is_taken = |seat: Seat| state.roster.iter().any(|neighbour| neighbour.process().seat == seat);
        for (process, (host, epoch)) in state.out.iter().filter(|(process, _)| !is_taken(process.seat)) {
            let (process, host, epoch) = (*process, host.clone(), Some(*epoch));
            rows.push(MemberRow { process, host, epoch, step, state: MemberState::Out });
        }
        rows.sort_by_key(|row| row.process);
        rows
    }

    /// Another member passes on that this one is to leave.
    pub(super) fn take_leave(&self, state: &mut State, leaver: u64) {
        if leaver == self.process.incarnation.0 {
            tracing::info!("{} was asked to leave", self.process);
            self.announce_leave(state);
        }
    }
}
