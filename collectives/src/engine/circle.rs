//! Ranks that wait for each other's calls in a circle: a receive against a collective, two
//! receives.
//!
//! A rank that is blocked in a call makes no other one before that ends, if one thread makes its
//! calls. So when its call needs a rank that has not made it, which is blocked in another call that
//! needs ... the first rank, which has not made that one, none of these calls ever ends. Whoever is
//! blocked looks for such a [`Wave`] of links from itself to itself: it asks the ranks that its
//! call needs, then those that they name, each only when the one before has answered.
//!
//! **Invariant:** a circle that closed is there as a whole at that instant. A link holds until the
//! missing call is made; a rank that has answered is blocked until then; and each link was seen to
//! be missing after the one before. Who makes calls from several threads says so, and then none of
//! its ranks' calls counts as blocked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use pleach_transport::{Nanos, Urgency};
use pleach_vocabulary::{Collective, Rank};

use super::fault::{Fault, FaultKind};
use super::message::{Blocked, Message, Standing};
use super::stream::Stream;
use super::{Engine, Phase, RunId, State};
use crate::call::Descriptor;

/// How long a circle has to last until it is an error.
pub const CIRCLE_AFTER: Duration = Duration::from_millis(30);
/// Longest time between two looks while there is a circle.
pub(super) const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(8);
/// Looks whose answers are waited for at once; older ones are given up.
const WAVES_MAX: usize = 8;

type RunOf = (Stream, u64);

/// A rank that was asked whether it has entered a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    rank: Rank,
    run: RunOf,
    /// The link whose rank is blocked in that run; `None` where it is this rank's own.
    before: Option<usize>,
    /// What the rank is blocked in instead, once it has said so.
    instead: Option<Blocked>,
}

/// One look: the links that were followed from this rank's own call.
struct Wave {
    number: u64,
    begun_at: Nanos,
    links: Vec<Link>,
}

/// A circle that closed: its ranks and runs.
struct Suspect {
    circle: Vec<(Rank, RunOf)>,
    since: Nanos,
}

/// What a blocked rank knows of who waits for whom; see the module.
#[derive(Default)]
pub(super) struct Circles {
    /// The call that this rank's thread waits for without a limit of its own.
    awaited: Option<RunId>,
    /// Several threads make calls, so a rank that is blocked in one may make another.
    is_concurrent: bool,
    /// The board says that this rank is blocked in the run of this slot.
    told: Option<u8>,
    waves: VecDeque<Wave>,
    next_wave: u64,
    suspects: Vec<Suspect>,
    /// By rank: how many probes it has not answered.
    unanswered: BTreeMap<Rank, usize>,
    /// Ranks that others of the same call wait for, which this rank's own share needs too.
    named: BTreeSet<Rank>,
    /// Ranks that have not entered the call and are blocked in another.
    elsewhere: BTreeSet<Rank>,
}

/// Whether `rank`'s share of the call needs `peer`'s by what the call means, whatever the schedule.
fn needs(collective: Collective, rank: Rank, peer: Rank) -> bool {
    match collective {
        Collective::Broadcast { root } | Collective::Scatter { root } => rank != root && peer == root,
        Collective::Reduce { root } | Collective::Gather { root } => rank == root,
        Collective::SendRecv { .. } => false,
        _ => true,
    }
}

impl Circles {
    fn forget(&mut self) {
        self.waves.clear();
        self.suspects.clear();
        self.named.clear();
        self.elsewhere.clear();
    }

    /// One of the ranks that the blocked call needs: one that is blocked elsewhere, where there is
    /// one; in turn, as any of them may be part of a circle.
    fn one_of(&self, needed: &BTreeSet<Rank>) -> Option<Rank> {
        let ranks = if self.elsewhere.is_empty() { needed } else { &self.elsewhere };
        let turn = (self.next_wave as usize).checked_rem(ranks.len())?;
        ranks.iter().nth(turn).copied()
    }

    fn begin(&mut self, needed: &BTreeSet<Rank>, run: RunOf, now: Nanos) -> u64 {
        if self.waves.len() == WAVES_MAX {
            self.waves.pop_front();
        }
        let number = self.next_wave;
        self.next_wave += 1;
        let links = needed.iter().map(|rank| Link { rank: *rank, run, before: None, instead: None });
        self.waves.push_back(Wave { number, begun_at: now, links: links.collect() });
        number
    }

    /// The links from this rank's own call to `last`, and since when they are known; the first time
    /// it is now.
    fn close(&mut self, number: u64, last: usize, now: Nanos) -> Option<(Vec<Link>, Nanos, Nanos)> {
        let wave = self.waves.iter().find(|wave| wave.number == number)?;
        let mut links = Vec::new();
        let mut at = Some(last);
        while let Some(link) = at.and_then(|at| wave.links.get(at)) {
            links.push(*link);
            at = link.before;
        }
        links.reverse();
        let circle: Vec<_> = links.iter().map(|link| (link.rank, link.run)).collect();
        let begun_at = wave.begun_at;
        let since = match self.suspects.iter().find(|suspect| suspect.circle == circle) {
            Some(suspect) => suspect.since,
            None => {
                self.suspects.push(Suspect { circle, since: now });
                now
            }
        };
        Some((links, since, begun_at))
    }
}

impl Engine {
    /// Whether several threads of this rank make calls, so that one which is blocked may depend on
    /// another that is still to be made. Otherwise ranks whose calls wait for each other in a
    /// circle are told so.
    pub fn allow_concurrent_calls(&mut self, is_concurrent: bool) {
        self.circles.is_concurrent = is_concurrent;
        if is_concurrent {
            self.unblock();
        }
    }

    /// The thread that makes this rank's calls makes no other one before this one has ended.
    pub fn await_run(&mut self, run: RunId) {
        self.circles.awaited = Some(run);
    }

    /// The run has moved: what is known of whom it waits for is out of date.
    pub(super) fn note_moved(&mut self, slot: u8) {
        if self.circles.told == Some(slot) {
            self.unblock();
        }
    }

    fn unblock(&mut self) {
        if self.circles.told.take().is_some() {
            self.board.stand(None);
        }
        self.circles.forget();
    }

    /// Whether a circle was seen, so that it is worth looking more often.
    pub(super) fn suspects_circle(&self, slot: u8) -> bool {
        self.circles.told == Some(slot) && !self.circles.suspects.is_empty()
    }

    /// The run that has to end before this rank's thread goes on; of its stream, those before it do
    /// too.
    fn blocked_slot(&self) -> Option<u8> {
        let awaited = self.circles.awaited.filter(|_| !self.circles.is_concurrent)?;
        let entry = self.slots.get(usize::from(awaited.slot)).filter(|entry| entry.issue == awaited.issue)?;
        let stream = entry.run.as_ref()?.stream();
        match entry.state {
            State::Active => Some(awaited.slot),
            State::Queued => self.order.iter().copied().find(|slot| {
                let entry = &self.slots[usize::from(*slot)];
                entry.state == State::Active && entry.run.as_ref().is_some_and(|run| run.stream() == stream)
            }),
            State::Free | State::Finished => None,
        }
    }

    /// Asks the ranks that the blocked call needs where they stand, and lets others know that it is
    /// blocked.
    pub(super) fn look_for_circle(&mut self, slot: u8, now: Nanos) {
        if self.blocked_slot() != Some(slot) {
            return;
        }
        let Some(run) = self.slots[usize::from(slot)].run.as_ref() else { return };
        let at = (run.stream(), run.parameters.number);
        let descriptor = run.plan().descriptor.to_words();
        let mut needed = self.circles.named.clone();
        run.needs_signal(&mut |peer| {
            needed.insert(peer);
        });
        if self.circles.told.replace(slot).is_some_and(|told| told != slot) {
            self.circles.forget();
        }
        let on = self.circles.one_of(&needed);
        self.board.stand(on.map(|on| Blocked { stream: at.0, run: at.1, descriptor, on }));
        let wave = self.circles.begin(&needed, at, now);
        for peer in needed {
            self.probe(peer, wave, at);
        }
    }

    fn probe(&mut self, peer: Rank, wave: u64, (stream, run): RunOf) {
        let unanswered = self.circles.unanswered.entry(peer).or_default();
        // A peer that is stopped is not sent more than it can be asked for at once. Gone or full:
        // then there is no answer.
        if *unanswered < WAVES_MAX
            && self
                .device
                .post(peer, &Message::Probe { wave, stream, run }.encode(), Urgency::Ordinary)
                .is_ok()
        {
            *unanswered += 1;
        }
    }

    /// A rank has said where it stands; the fault, if that closes a circle which has lasted.
    pub(super) fn read_standing(&mut self, peer: Rank, standing: &Standing, now: Nanos) -> Option<Fault> {
        let Standing { wave: number, stream, run, has_entered, blocked } = *standing;
        if let Some(unanswered) = self.circles.unanswered.get_mut(&peer) {
            *unanswered = unanswered.saturating_sub(1);
        }
        let slot = self.circles.told.filter(|slot| self.blocked_slot() == Some(*slot))?;
        let own = self.slots[usize::from(slot)].run.as_ref()?;
        let own_run = (own.stream(), own.parameters.number);
        let collective = own.plan().descriptor.collective;
        let wave = self.circles.waves.iter_mut().find(|wave| wave.number == number)?;
        let index = wave.links.iter().position(|link| link.rank == peer && link.run == (stream, run))?;
        let blocked = blocked.filter(|blocked| blocked.on < self.ranks)?;
        let instead = (blocked.stream, blocked.run);
        if has_entered {
            let is_same = instead == own_run && wave.links[index].before.is_none();
            if is_same && blocked.on != self.rank && needs(collective, self.rank, blocked.on) {
                self.circles.named.insert(blocked.on);
            }
            return None;
        }
        wave.links[index].instead = Some(blocked);
        if wave.links[index].before.is_none() {
            self.circles.elsewhere.insert(peer);
        }
        if blocked.on != self.rank {
            let is_known = wave.links.iter().any(|link| link.rank == blocked.on && link.run == instead);
            // Every rank once: a longer way is a circle without this rank.
            if !is_known && wave.links.len() < self.ranks as usize * 2 {
                wave.links.push(Link { rank: blocked.on, run: instead, before: Some(index), instead: None });
                self.probe(blocked.on, number, instead);
            }
            return None;
        }
        if self.board.has_entered(blocked.stream, blocked.run) {
            return None;
        }
        let (links, since, begun_at) = self.circles.close(number, index, now)?;
        let has_lasted = begun_at.since(since) >= CIRCLE_AFTER && matches!(self.phase, Phase::Active);
        has_lasted.then(|| self.circle_fault(slot, &links, now))
    }

    fn circle_fault(&self, slot: u8, links: &[Link], now: Nanos) -> Fault {
        let subject = links.first().map_or(self.rank, |link| link.rank);
        let theirs = links.first().and_then(|link| Descriptor::from_words(link.instead?.descriptor));
        let ring: Vec<String> =
            links.iter().map(|link| link.rank).chain([self.rank]).map(|rank| rank.to_string()).collect();
        let detail = format!("rank {} waits for rank {}", self.rank, ring.join(", which waits for rank "));
        let fault = self.fault(FaultKind::Mismatch, subject, detail, Some(slot), now);
        Fault { theirs, ..fault }
    }
}
