//! How the ranks of a group that fails come to one verdict.
//!
//! Ranks find different faults at once: two ranks die, or one death is found by each survivor.
//! A *claim* of a rank is the lowest fault that it knows ([`Fault::compare`]) and the set of
//! ranks that are *gone*: lost, left, or silent for [`ANSWER_TIME`]. Claims only grow: two of
//! them join to the lower fault and to the union of the sets.
//!
//! 1. A rank that finds a fault and has no claim yet takes the fault as its claim. From then on the
//!    rank continues no run.
//! 2. A rank tells its claim to every peer, and again whenever the claim changes. A peer joins it
//!    to its own claim and answers with the result. The status board answers
//!    ([`super::status_board`]), so a rank that is in no call answers too.
//! 3. A rank does not listen to those that it calls gone. A rank that hears that it is gone itself
//!    is *expelled*: it waits for the verdict of those that expelled it.
//! 4. A rank **decides** its claim when every peer that is not gone has said exactly this claim. It
//!    tells that the claim is final. Whoever hears a final claim decides the same.
//! 5. Only then is the rank fenced from its peers, and only then are outcomes given out
//!    ([`super::failure`]).
//!
//! **Invariant:** when a rank has decided fault F without the gone ranks E, no other rank outside
//! of E ever decides another fault. Each of them has said (F, E), so since then it has listened to
//! nobody in E, and it finds no new fault as it has a claim. Suppose some of
//! these ranks took a fault lower than F. The first such rank must have heard the lower fault from
//! another of these ranks, which would have taken it before: a contradiction.
//! Ranks in E are told the final claim while there is a way to them.
//!
//! A claim is told and kept whole, so [`Fault::compare`] orders by every byte of a fault: two that
//! differ in any byte are not the same claim. The kind of a loss ([`Fault::loss`]) is such a byte.
//! The kind is no part of the equality of faults, and neither is the finder: one finder may see a
//! process end and another one may see its connection break, and these are two reports of one
//! event.
//!
//! This needs one rank that runs, reaches all other survivors, and answers in time. Then all
//! survivors have the same verdict, byte for byte. Two survivors whose link is down also get this
//! verdict. A rank that was stopped and continues later gets it too. Where no rank reaches all
//! others (a partition), each part has a verdict of its own. Where every rank is silent for longer
//! than [`ANSWER_TIME`], each may call the others gone. No protocol can promise more.
//!
//! Where only some pairs are connected ([`super::overlay`]), a rank tells its claim to its
//! neighbours alone. A claim then carries the ranks that have said exactly this claim, as far as
//! the teller knows; a rank that hears it from a neighbour adds these to those that it knows, and
//! tells its neighbours whenever its claim or that set has grown. It decides when the set holds
//! every rank that is not gone, so by the same rule and for the same reason. This needs an overlay
//! that holds the survivors together. A neighbour is called gone when it is silent; of other ranks
//! their neighbours say so.
//!
//! Time is counted from poll to poll, at most [`STEP_MAX`] each: a rank that was stopped has not
//! waited meanwhile, and reads its peers' claims before it calls the peers gone.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pleach_schedule::generate::RANKS_MAX;
use pleach_transport::Nanos;
use pleach_vocabulary::Rank;

use super::fault::Fault;
use super::message::{put_words, take_words};
use super::overlay::Overlay;

/// How long a told peer may say nothing until it counts as gone.
const ANSWER_TIME: Duration = Duration::from_millis(100);
/// How long ranks try to agree at most; then each takes the lowest fault that it knows.
const AGREE_TIME_MAX: Duration = Duration::from_millis(300);
/// As how much waiting the time between two polls counts at most.
const STEP_MAX: Duration = Duration::from_millis(10);

/// Words of a set of ranks.
const RANK_WORDS_MAX: usize = RANKS_MAX.div_ceil(u64::BITS) as usize;

/// What a rank knows of the end of the group; see the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    fault: Fault,
    gone: BTreeSet<Rank>,
    /// The ranks that have said this claim, as far as its teller knows; empty where every rank
    /// tells every rank.
    said_by: BTreeSet<Rank>,
    is_final: bool,
}

fn write_ranks(ranks: &BTreeSet<Rank>, message: &mut Vec<u8>) {
    let mut words = Vec::new();
    for rank in ranks.iter().filter(|rank| **rank < RANKS_MAX) {
        let word = (rank / u64::BITS) as usize;
        words.resize(words.len().max(word + 1), 0);
        words[word] |= 1 << (rank % u64::BITS);
    }
    put_words(message, [words.len() as u64]);
    put_words(message, words);
}

fn read_ranks(message: &mut &[u8]) -> Option<BTreeSet<Rank>> {
    let [words] = take_words(message)?;
    let words = usize::try_from(words).ok().filter(|words| *words <= RANK_WORDS_MAX)?;
    let mut ranks = BTreeSet::new();
    for at in 0..words as u32 {
        let [word] = take_words(message)?;
        ranks.extend((0..u64::BITS).filter(|bit| word >> bit & 1 == 1).map(|bit| at * u64::BITS + bit));
    }
    Some(ranks)
}

impl Claim {
    /// Whether the ranks have agreed on it.
    pub(super) fn is_final(&self) -> bool {
        self.is_final
    }

    /// Whether both claims are equal byte for byte, as the ranks also agree on the verdict's
    /// details.
    fn is_as(&self, other: &Self) -> bool {
        self.fault.compare(&other.fault) == Ordering::Equal && self.gone == other.gone
    }

    /// Joins another claim to this one; true when this one has changed.
    fn join(&mut self, other: &Self) -> bool {
        let is_lower = other.fault.compare(&self.fault) == Ordering::Less;
        if is_lower {
            self.fault = other.fault.clone();
        }
        let before = self.gone.len();
        self.gone.extend(&other.gone);
        is_lower || self.gone.len() > before
    }

    pub(super) fn write(&self, message: &mut Vec<u8>) {
        put_words(message, [u64::from(self.is_final)]);
        write_ranks(&self.gone, message);
        write_ranks(&self.said_by, message);
        self.fault.write(message);
    }

    pub(super) fn read(message: &mut &[u8]) -> Option<Self> {
        let [is_final] = take_words(message)?;
        let (gone, said_by) = (read_ranks(message)?, read_ranks(message)?);
        Some(Self { fault: Fault::read(message)?, gone, said_by, is_final: is_final & 1 == 1 })
    }
}

/// The join of a peer's claims so far.
struct PeerClaim {
    claim: Claim,
    /// How many claims the peer has told.
    times: u64,
}

/// This rank's knowledge of how its group ends; see the module.
#[derive(Default)]
pub(super) struct Agreement {
    rank: Rank,
    /// Where only some pairs are connected: this rank's place among the ranks.
    overlay: Option<Overlay>,
    claim: Option<Claim>,
    /// Grows whenever the claim changes.
    version: u64,
    /// The version that was told last.
    told_version: u64,
    /// Peers that this rank itself has found to be gone.
    lost: BTreeSet<Rank>,
    said: BTreeMap<Rank, PeerClaim>,
    /// The lowest fault of the peers that call this rank gone.
    expelled: Option<Fault>,
    /// The verdict of ranks that this rank calls gone.
    overheard: Option<Fault>,
}

fn keep_lower(kept: &mut Option<Fault>, fault: Fault) {
    if kept.as_ref().is_none_or(|kept| fault.compare(kept) == Ordering::Less) {
        *kept = Some(fault);
    }
}

impl Agreement {
    pub(super) fn new(rank: Rank) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Where only some pairs are connected.
    pub(crate) fn over(rank: Rank, overlay: Overlay) -> Self {
        Self { rank, overlay: Some(overlay), ..Self::default() }
    }

    /// This rank's claim, once a fault is known.
    pub(super) fn claim(&self) -> Option<&Claim> {
        self.claim.as_ref()
    }

    /// The fault on which the group has agreed.
    fn verdict(&self) -> Option<&Fault> {
        self.claim.as_ref().filter(|claim| claim.is_final).map(|claim| &claim.fault)
    }

    fn set(&mut self, fault: Fault, gone: BTreeSet<Rank>, is_final: bool) {
        let said_by = self.said_by_self();
        self.claim = Some(Claim { fault, gone, said_by, is_final });
        self.version += 1;
    }

    /// Who has said a claim that this rank has taken just now.
    fn said_by_self(&self) -> BTreeSet<Rank> {
        self.overlay.iter().map(|_| self.rank).collect()
    }

    fn decide_as(&mut self, fault: Fault) {
        let gone = self.claim.take().map_or_else(|| self.lost.clone(), |claim| claim.gone);
        self.set(fault, gone, true);
    }

    /// Whether this rank calls a peer gone that it has not lost itself.
    pub(super) fn has_expelled(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| !claim.gone.is_subset(&self.lost))
    }

    /// Whether this rank has lost the peer itself.
    pub(super) fn has_lost(&self, peer: Rank) -> bool {
        self.lost.contains(&peer)
    }

    /// This rank has found a fault. Only the first one counts.
    pub(super) fn propose(&mut self, fault: Fault) {
        if self.claim.is_none() {
            self.set(fault.as_told(), self.lost.clone(), false);
        }
    }

    /// A peer is lost, has left, or is silent.
    pub(super) fn lose(&mut self, peer: Rank) {
        self.lost.insert(peer);
        let said_by = self.said_by_self();
        if let Some(claim) = &mut self.claim
            && !claim.is_final
            && claim.gone.insert(peer)
        {
            claim.said_by = said_by;
            self.version += 1;
        }
    }

    /// A peer has told its claim, or answered.
    pub(super) fn hear(&mut self, from: Rank, theirs: Claim) {
        if self.verdict().is_some() {
            return;
        }
        let is_gone = self.claim.as_ref().map_or(&self.lost, |claim| &claim.gone).contains(&from);
        if is_gone {
            if theirs.is_final {
                keep_lower(&mut self.overheard, theirs.fault);
            }
        } else if theirs.is_final {
            self.decide_as(theirs.fault);
        } else if theirs.gone.contains(&self.rank) {
            if self.claim.is_none() {
                self.set(theirs.fault.clone(), self.lost.clone(), false);
            }
            keep_lower(&mut self.expelled, theirs.fault);
        } else {
            self.join(from, theirs);
        }
    }

    fn join(&mut self, from: Rank, theirs: Claim) {
        let said_by = self.said_by_self();
        match &mut self.claim {
            Some(claim) => {
                if claim.join(&theirs) {
                    claim.said_by = said_by;
                    self.version += 1;
                }
            }
            None => {
                let gone = self.lost.union(&theirs.gone).copied().collect();
                self.set(theirs.fault.clone(), gone, false);
            }
        }
        if let Some(claim) = &mut self.claim
            && claim.is_as(&theirs)
        {
            let before = claim.said_by.len();
            claim.said_by.extend(&theirs.said_by);
            self.version += u64::from(claim.said_by.len() > before);
        }
        match self.said.get_mut(&from) {
            Some(said) => {
                said.claim.join(&theirs);
                said.times += 1;
            }
            None => drop(self.said.insert(from, PeerClaim { claim: theirs, times: 1 })),
        }
    }

    /// The peers that this rank tells its claims.
    pub(crate) fn told(&self, ranks: u32) -> Vec<Rank> {
        match &self.overlay {
            Some(overlay) => overlay.neighbours().to_vec(),
            None => (0..ranks).filter(|peer| *peer != self.rank).collect(),
        }
    }

    /// The claim, if some peer was not told it yet.
    pub(crate) fn untold(&mut self) -> Option<Claim> {
        let is_told = std::mem::replace(&mut self.told_version, self.version) == self.version;
        self.claim.clone().filter(|_| !is_told)
    }

    /// A peer has come that was not told yet.
    pub(super) fn tell_again(&mut self) {
        self.told_version = 0;
    }

    /// This claim has been handed to the device. The engine and the status board both tell claims,
    /// and of two that wait for a peer's stream the device keeps the one that came last. So a claim
    /// that has changed meanwhile is told again: it may have been handed over before this one.
    pub(super) fn has_told(&mut self, claim: &Claim) {
        if self.claim.as_ref() != Some(claim) {
            self.tell_again();
        }
    }

    /// Whether every rank that is not gone has said this claim, where ranks tell that of each
    /// other.
    fn is_said_by_all(&self, claim: &Claim, ranks: u32) -> bool {
        (0..ranks).all(|rank| claim.gone.contains(&rank) || claim.said_by.contains(&rank))
    }

    /// Peers whose claims this rank awaits before it decides.
    fn awaited(&self, ranks: u32) -> Vec<Rank> {
        let Some(claim) = self.claim.as_ref().filter(|claim| !claim.is_final) else { return Vec::new() };
        let gone = if self.expelled.is_some() { &self.lost } else { &claim.gone };
        let agrees = |peer: &Rank| self.said.get(peer).is_some_and(|said| said.claim.is_as(claim));
        let is_awaited = |peer: &Rank| !gone.contains(peer) && (self.expelled.is_some() || !agrees(peer));
        self.told(ranks).into_iter().filter(is_awaited).collect()
    }

    /// Decides, if no claim is awaited any more.
    fn decide(&mut self, ranks: u32) {
        let Some(claim) = self.claim.as_ref().filter(|claim| !claim.is_final) else { return };
        let is_alone = self.told(ranks).iter().all(|peer| claim.gone.contains(peer));
        let is_complete = match &self.overlay {
            Some(_) if self.expelled.is_none() => is_alone || self.is_said_by_all(claim, ranks),
            _ => self.awaited(ranks).is_empty(),
        };
        if !is_complete {
            return;
        }
        // All peers are gone, so no verdict can differ from this rank's: it takes the verdict of
        // the peers that ended without it, where it has heard one.
        let overheard = self.overheard.clone().filter(|_| is_alone);
        let fault = self.expelled.clone().or(overheard).unwrap_or_else(|| claim.fault.clone());
        self.decide_as(fault);
    }

    /// Takes the lowest fault that is known.
    fn give_up(&mut self) {
        if let Some(claim) = self.claim.as_ref().filter(|claim| !claim.is_final) {
            let fault = self.expelled.clone().unwrap_or_else(|| claim.fault.clone());
            tracing::warn!(rank = self.rank, "the ranks did not agree in time on why the group has failed");
            self.decide_as(fault);
        }
    }
}

/// How this rank and its peers come to a verdict: the claim that was told, and how long each peer
/// has been silent.
pub(super) struct Negotiation {
    looked_at: Nanos,
    waited: Duration,
    /// By awaited peer: the number of its claims, and how long ago the last one came.
    silent: BTreeMap<Rank, (u64, Duration)>,
}

impl Negotiation {
    pub(super) fn new(now: Nanos) -> Self {
        Self { looked_at: now, waited: Duration::ZERO, silent: BTreeMap::new() }
    }

    /// When to go on if nothing comes.
    pub(super) fn wakeup(&self) -> Nanos {
        self.looked_at + STEP_MAX
    }

    /// Others come to the verdict.
    pub(crate) fn rest(&mut self, now: Nanos) {
        self.looked_at = now;
    }

    /// Counts the time, calls silent peers gone, and decides where that can be done. Returns what
    /// is to be told to all peers, and the verdict.
    pub(super) fn advance(
        &mut self,
        agreement: &mut Agreement,
        ranks: u32,
        now: Nanos,
    ) -> (Option<Claim>, Option<Fault>) {
        let step = now.since(self.looked_at).min(STEP_MAX);
        self.looked_at = now;
        self.waited += step;
        let awaited = agreement.awaited(ranks);
        self.silent.retain(|peer, _| awaited.contains(peer));
        for peer in awaited {
            let times = agreement.said.get(&peer).map_or(0, |said| said.times);
            let silent = self.silent.entry(peer).or_insert((times, Duration::ZERO));
            *silent = if silent.0 == times { (times, silent.1 + step) } else { (times, Duration::ZERO) };
            if silent.1 >= ANSWER_TIME {
                agreement.lose(peer);
            }
        }
        agreement.decide(ranks);
        if self.waited >= AGREE_TIME_MAX {
            agreement.give_up();
        }
        (agreement.untold(), agreement.verdict().cloned())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use pleach_transport::sim::Random;

    use super::super::fault::FaultKind;
    use super::*;

    fn fault(kind: FaultKind, found_by: Rank, subject: Rank, run: u64) -> Fault {
        Fault {
            kind,
            found_by,
            subject,
            loss: None,
            run,
            during: None,
            theirs: None,
            detail: format!("as rank {found_by} saw it"),
            waited: Duration::ZERO,
            told_during: None,
        }
    }

    fn claim(fault: Fault, gone: &[Rank], is_final: bool) -> Claim {
        Claim { fault, gone: gone.iter().copied().collect(), said_by: BTreeSet::new(), is_final }
    }

    #[test]
    fn the_lowest_fault_goes_first_whoever_found_it() {
        let lost = fault(FaultKind::Lost, 3, 2, 7);
        for lower in [
            fault(FaultKind::TimedOut, 3, 4, 6),
            fault(FaultKind::Aborted, 3, 4, 7),
            fault(FaultKind::Lost, 4, 1, 7),
            fault(FaultKind::Lost, 1, 2, 7),
        ] {
            assert_eq!(lower.compare(&lost), Ordering::Less, "{lower}");
        }
        assert_eq!(lost, fault(FaultKind::Lost, 1, 2, 7), "who found it is a detail");
    }

    #[test]
    fn claims_survive_the_wire_and_cut_ones_are_refused() {
        let sent = claim(fault(FaultKind::Lost, 3, 2, 7), &[0, 63, 64, RANKS_MAX - 1], true);
        let mut bytes = Vec::new();
        sent.write(&mut bytes);
        let read = Claim::read(&mut &*bytes).expect("it is whole");
        assert!(read.is_as(&sent) && read.is_final);
        for end in 0..bytes.len() {
            assert_eq!(Claim::read(&mut &bytes[..end]), None);
        }
        let too_many = (RANK_WORDS_MAX as u64 + 1).to_le_bytes();
        assert_eq!(Claim::read(&mut &*[&[0; 8], &too_many[..], &[0; 4000]].concat()), None);
    }

    #[test]
    fn a_claim_that_changes_while_an_older_one_is_handed_over_is_told_after_it() {
        let mut agreement = Agreement::new(2);
        agreement.propose(fault(FaultKind::Lost, 2, 0, 7));
        let older = agreement.untold().expect("nobody knows it");
        agreement.hear(1, claim(fault(FaultKind::Lost, 1, 0, 6), &[], false));
        let newer = agreement.untold().expect("it has changed");
        assert!(!older.is_as(&newer));
        // Another thread told the newer one first, and the device may have replaced it.
        agreement.has_told(&newer);
        assert_eq!(agreement.untold(), None);
        agreement.has_told(&older);
        assert_eq!(agreement.untold(), Some(newer.clone()));
        agreement.has_told(&newer);
        assert_eq!(agreement.untold(), None);
    }

    #[test]
    fn a_rank_that_was_called_gone_waits_for_the_verdict_of_the_others() {
        let mut agreement = Agreement::new(2);
        agreement.propose(fault(FaultKind::Lost, 2, 0, 1));
        let theirs = fault(FaultKind::TimedOut, 1, 2, 5);
        agreement.hear(0, claim(theirs.clone(), &[2], false));
        agreement.decide(3);
        assert_eq!(agreement.verdict(), None);
        agreement.hear(1, claim(theirs.clone(), &[2], true));
        assert_eq!(agreement.verdict(), Some(&theirs));
    }

    #[test]
    fn time_in_which_a_rank_was_stopped_is_no_silence_of_its_peers() {
        let mut agreement = Agreement::new(0);
        agreement.propose(fault(FaultKind::TimedOut, 0, 1, 1));
        let mut negotiation = Negotiation::new(Nanos(0));
        let hour = Nanos(3_600_000_000_000);
        assert!(negotiation.advance(&mut agreement, 2, hour).1.is_none());
        let steps = ANSWER_TIME.as_nanos().div_ceil(STEP_MAX.as_nanos()) as u32;
        let mut looks =
            (2..=steps).map(|step| negotiation.advance(&mut agreement, 2, hour + STEP_MAX * step).1);
        assert!(looks.by_ref().take(steps as usize - 2).all(|verdict| verdict.is_none()), "too early");
        assert!(looks.next().is_some_and(|verdict| verdict.is_some()), "the peer never answers");
    }

    /// A claim, and whether it asks. `None`: the end of the stream.
    type Word = Option<(Claim, bool)>;

    /// Ranks and the words between them, in any order that keeps the order between two.
    struct Model {
        ranks: u32,
        /// Whether only the pairs of the overlay are connected.
        is_sparse: bool,
        agreements: Vec<Agreement>,
        /// By sender and receiver.
        wires: BTreeMap<(Rank, Rank), VecDeque<Word>>,
        dead: BTreeSet<Rank>,
        apart: BTreeSet<(Rank, Rank)>,
        /// A rank that does not run for some time.
        stopped: Option<Rank>,
        decided: Vec<Option<Fault>>,
    }

    impl Model {
        fn new(ranks: u32, is_sparse: bool) -> Self {
            let over = |rank| match is_sparse {
                true => Agreement::over(rank, Overlay::new(rank, ranks)),
                false => Agreement::new(rank),
            };
            Self {
                ranks,
                is_sparse,
                agreements: (0..ranks).map(over).collect(),
                wires: BTreeMap::new(),
                dead: BTreeSet::new(),
                apart: BTreeSet::new(),
                stopped: None,
                decided: vec![None; ranks as usize],
            }
        }

        fn post(&mut self, from: Rank, to: Rank, word: Word) {
            if !self.apart.contains(&(from, to)) {
                self.wires.entry((from, to)).or_default().push_back(word);
            }
        }

        /// What a rank does whenever it is polled.
        fn poll(&mut self, rank: Rank) {
            let own = &mut self.agreements[rank as usize];
            own.decide(self.ranks);
            self.tell(rank);
            let verdict = self.agreements[rank as usize].verdict().cloned();
            if verdict.is_some() && self.decided[rank as usize].is_none() {
                self.decided[rank as usize] = verdict;
                for peer in (0..self.ranks).filter(|peer| *peer != rank) {
                    // It is fenced now.
                    self.post(rank, peer, None);
                }
            }
        }

        fn tell(&mut self, rank: Rank) {
            let own = &mut self.agreements[rank as usize];
            let (told, claim) = (own.told(self.ranks), own.untold());
            let Some(claim) = claim else { return };
            for peer in told {
                self.post(rank, peer, Some((claim.clone(), !claim.is_final && !self.is_sparse)));
            }
        }

        fn deliver(&mut self, from: Rank, to: Rank) {
            let Some(word) = self.wires.get_mut(&(from, to)).and_then(VecDeque::pop_front) else { return };
            if self.dead.contains(&to) {
                return;
            }
            let own = &mut self.agreements[to as usize];
            match word {
                Some((claim, asks)) => {
                    own.hear(from, claim);
                    let answer = own.claim.clone().filter(|_| asks);
                    if let Some(answer) = answer {
                        self.post(to, from, Some((answer, false)));
                    }
                }
                None => {
                    own.lose(from);
                    own.propose(fault(FaultKind::Lost, to, from, u64::from(to) % 3));
                }
            }
            if self.is_sparse {
                self.tell(to);
            }
        }

        fn cut(&mut self, one: Rank, other: Rank) {
            for pair in [(one, other), (other, one)] {
                self.wires.entry(pair).or_default().push_back(None);
                self.apart.insert(pair);
            }
        }

        fn kill(&mut self, rank: Rank) {
            self.dead.insert(rank);
            for peer in (0..self.ranks).filter(|peer| *peer != rank) {
                let wire = self.wires.entry((rank, peer)).or_default();
                // What it said last may be lost with it.
                wire.pop_back();
                wire.push_back(None);
                self.apart.extend([(rank, peer), (peer, rank)]);
            }
        }

        /// One step of a random schedule; false when nothing is left to happen.
        fn step(&mut self, random: &mut Random) -> bool {
            let is_stopped = |rank: &Rank| self.stopped == Some(*rank);
            let ready: Vec<(Rank, Rank)> = self
                .wires
                .iter()
                .filter(|((_, to), words)| !words.is_empty() && !is_stopped(to))
                .map(|(pair, _)| *pair)
                .collect();
            if ready.is_empty() {
                // The others have waited long enough for one that is stopped; then it is continued.
                let Some(stopped) = self.stopped.take() else { return false };
                for rank in (0..self.ranks).filter(|rank| *rank != stopped && !self.dead.contains(rank)) {
                    let own = &mut self.agreements[rank as usize];
                    if own.awaited(self.ranks).contains(&stopped) {
                        own.lose(stopped);
                    }
                }
                return true;
            }
            let (from, to) = ready[random.index(ready.len())];
            self.deliver(from, to);
            true
        }

        fn poll_some(&mut self, random: &mut Random, all: bool) {
            for rank in 0..self.ranks {
                let runs = !self.dead.contains(&rank) && self.stopped != Some(rank);
                if runs && (all || random.coin()) {
                    self.poll(rank);
                }
            }
        }
    }

    /// Several faults at once, deaths, one link that is cut and one rank that is stopped and
    /// continued, in many orders.
    #[test]
    fn survivors_that_one_of_them_reaches_agree_in_every_order() {
        for seed in 0..3_000 {
            agree_in_some_order(seed, false);
        }
    }

    /// The same where only the pairs of the overlay tell each other their claims, and some ranks
    /// die at most.
    #[test]
    fn survivors_agree_over_the_overlay_in_every_order() {
        for seed in 0..300 {
            agree_in_some_order(seed, true);
        }
    }

    fn agree_in_some_order(seed: u64, is_sparse: bool) {
        let random = &mut Random::new(seed);
        let ranks = if is_sparse { random.between(12, 20) } else { random.between(2, 6) } as u32;
        let mut model = Model::new(ranks, is_sparse);
        // A rank that neither dies, nor is cut off, nor is stopped.
        let hub = random.below(u64::from(ranks)) as Rank;
        let other = |random: &mut Random| (hub + 1 + random.below(u64::from(ranks) - 1) as Rank) % ranks;
        for _ in 0..random.between(1, 3) {
            let (rank, subject) = (random.below(u64::from(ranks)) as Rank, other(random));
            let kind = if random.coin() { FaultKind::TimedOut } else { FaultKind::Aborted };
            model.agreements[rank as usize].propose(fault(kind, rank, subject, random.below(3)));
        }
        if random.coin() {
            model.stopped = Some(other(random));
        }
        let deaths_max = if is_sparse { 4 } else { u64::from(ranks) };
        let (mut deaths, mut extents) = (random.below(deaths_max), u64::from(ranks > 2 && random.coin()));
        loop {
            model.poll_some(random, false);
            if deaths > 0 && random.chance(100_000) {
                deaths -= 1;
                let victim = other(random);
                if !model.dead.contains(&victim) {
                    model.kill(victim);
                }
            }
            if extents > 0 && random.chance(200_000) {
                extents -= 1;
                let (one, two) = (other(random), other(random));
                if one != two && !model.dead.contains(&one) && !model.dead.contains(&two) {
                    model.cut(one, two);
                }
            }
            if !model.step(random) {
                model.poll_some(random, true);
                if model.wires.values().all(VecDeque::is_empty) {
                    break;
                }
            }
        }
        let verdict = model.decided[hub as usize].clone();
        assert!(verdict.is_some(), "seed {seed}: nothing moves and rank {hub} has not decided");
        for rank in (0..ranks).filter(|rank| !model.dead.contains(rank)) {
            let own = &model.decided[rank as usize];
            let is_same = own
                .as_ref()
                .zip(verdict.as_ref())
                .is_some_and(|(own, verdict)| own.compare(verdict) == Ordering::Equal);
            assert!(is_same, "seed {seed}: rank {rank} ends with {own:?}, rank {hub} with {verdict:?}");
        }
    }
}
