//! Owner and holders of several links beside a list of all leases, by random steps: references are
//! lost, come twice, late, on another link or forged, links are severed. The same steps find the
//! mutants of a holder. Then single cases.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pleach_transport::{RegionKey, RemoteSlice};
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use super::*;
use crate::reference::{LinkId, Reference};

const SMALL: LeaseLimits = LeaseLimits { bytes_lent: 100, leases_per_link: 3, links: 3 };

const REGION: RegionKey = RegionKey(0xabc);
const REGION_BYTES: u64 = 200;

/// Buffers of the owner's region, by offset and length.
const BUFFERS: [(u64, u64); 4] = [(0, 40), (40, 60), (100, 50), (150, 0)];

/// What a holder could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// The first drop of a handle returns the lease, and not the last one.
    ReturnedByFirstDrop,
    /// The last drop counts the lease twice.
    ReturnedTwice,
    /// A recall returns a lease that is held.
    RecallReturnsHeld,
    /// A lease that nobody read is returned as one that was read.
    DeclinesInVain,
    /// The holder forgets the leases that it has accepted.
    Forgets,
}

#[derive(Clone, Copy, Debug)]
enum Forgery {
    Link,
    Slot,
    Generation(u64),
    Region,
    Length,
    Offset,
}

#[derive(Clone, Debug)]
enum Step {
    Open,
    Lend { link: usize, buffer: usize, start: u64, end: u64 },
    Deliver { lease: usize },
    DeliverElsewhere { lease: usize, link: usize },
    Forge { lease: usize, forgery: Forgery },
    Clone { lease: usize },
    Drop { lease: usize },
    Decline { lease: usize },
    Recall { lease: usize },
    Collect { link: usize },
    Sever { link: usize },
    Violate { lease: usize, more: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lease = any::<usize>();
    let link = 0_usize..4;
    let forgery = prop_oneof![
        Just(Forgery::Link),
        Just(Forgery::Slot),
        (1_u64..3).prop_map(Forgery::Generation),
        Just(Forgery::Region),
        Just(Forgery::Length),
        Just(Forgery::Offset),
    ];
    let step = prop_oneof![
        2 => Just(Step::Open),
        12 => (link.clone(), 0..BUFFERS.len(), 0_u64..50, 0_u64..62)
            .prop_map(|(link, buffer, start, end)| Step::Lend { link, buffer, start, end }),
        12 => lease.prop_map(|lease| Step::Deliver { lease }),
        1 => (lease, link.clone()).prop_map(|(lease, link)| Step::DeliverElsewhere { lease, link }),
        2 => (lease, forgery).prop_map(|(lease, forgery)| Step::Forge { lease, forgery }),
        3 => lease.prop_map(|lease| Step::Clone { lease }),
        10 => lease.prop_map(|lease| Step::Drop { lease }),
        3 => lease.prop_map(|lease| Step::Decline { lease }),
        2 => lease.prop_map(|lease| Step::Recall { lease }),
        6 => link.clone().prop_map(|link| Step::Collect { link }),
        1 => link.prop_map(|link| Step::Sever { link }),
        1 => (lease, 1_u64..4).prop_map(|(lease, more)| Step::Violate { lease, more }),
    ];
    prop::collection::vec(step, 0..120)
}

/// Counters in the memory of both ends.
struct Counters([AtomicU64; 4]);

impl Counters {
    fn zero() -> Arc<Self> {
        Arc::new(Self([const { AtomicU64::new(0) }; 4]))
    }
}

impl ReturnCounters for Counters {
    fn store(&self, slot: u32, count: u64) {
        // Release: pairs with the acquire in `load`. One thread runs these tests.
        self.0[slot as usize].store(count, Ordering::Release);
    }

    fn load(&self, slot: u32) -> u64 {
        self.0[slot as usize].load(Ordering::Acquire)
    }
}

struct Link {
    id: LinkId,
    holder: LeaseHolder,
    counters: Arc<Counters>,
    is_open: bool,
}

#[derive(Debug)]
enum State {
    /// The reference has not come.
    Sent,
    Held(Vec<Lease>),
    Returned {
        is_untouched: bool,
    },
    /// The owner has its handle.
    Ended,
}

/// A lease as it should be.
struct Record {
    link: usize,
    buffer: usize,
    reference: Reference,
    state: State,
}

struct World {
    owner: LeaseOwner<Arc<()>>,
    buffers: Vec<(RemoteSlice, Arc<()>)>,
    links: Vec<Link>,
    records: Vec<Record>,
    mutant: Option<Mutant>,
}

fn check(holds: bool, what: &str) -> Result<(), TestCaseError> {
    if holds { Ok(()) } else { Err(TestCaseError::fail(what.to_owned())) }
}

fn holder(id: LinkId, counters: &Arc<Counters>) -> LeaseHolder {
    let mut holder = LeaseHolder::new(id, SMALL.leases_per_link, counters.clone());
    holder.add_region(REGION, REGION_BYTES).expect("is the first");
    holder
}

impl World {
    fn new(mutant: Option<Mutant>) -> Self {
        let buffers = BUFFERS.map(|(offset, len)| (RemoteSlice { key: REGION, offset, len }, Arc::new(())));
        let owner = LeaseOwner::new(SMALL);
        Self { owner, buffers: buffers.into(), links: Vec::new(), records: Vec::new(), mutant }
    }

    fn run(&mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            self.step(step)?;
            self.compare()?;
        }
        for link in 0..self.links.len() {
            self.sever(link)?;
        }
        self.compare()?;
        check(self.owner.bytes_lent() == 0 && self.owner.links() == 0, "something is still lent")
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Open => self.open(),
            Step::Lend { link, buffer, start, end } if link < self.links.len() => {
                self.lend(link, buffer, start, end)
            }
            Step::Collect { link } if link < self.links.len() => self.collect(link),
            Step::Sever { link } if link < self.links.len() => self.sever(link),
            Step::Deliver { lease } if !self.records.is_empty() => self.deliver(lease % self.records.len()),
            Step::DeliverElsewhere { lease, link } if !self.records.is_empty() && link < self.links.len() => {
                let record = &self.records[lease % self.records.len()];
                let refused = self.links[link].holder.accept(&record.reference);
                check(
                    record.link == link || matches!(refused, Err(ReferenceError::WrongLink { .. })),
                    "link",
                )?;
                if record.link == link {
                    // It came to its own link.
                    drop(refused);
                    return self.came(lease % self.records.len());
                }
                Ok(())
            }
            Step::Forge { lease, forgery } if !self.records.is_empty() => {
                self.forge(lease % self.records.len(), forgery)
            }
            Step::Clone { lease } if !self.records.is_empty() => {
                let at = lease % self.records.len();
                if let State::Held(leases) = &mut self.records[at].state {
                    leases.push(leases[0].clone());
                }
                Ok(())
            }
            Step::Drop { lease } if !self.records.is_empty() => {
                self.drop_one(lease % self.records.len());
                Ok(())
            }
            Step::Decline { lease } if !self.records.is_empty() => {
                self.decline(lease % self.records.len());
                Ok(())
            }
            Step::Recall { lease } if !self.records.is_empty() => self.recall(lease % self.records.len()),
            Step::Violate { lease, more } if !self.records.is_empty() => {
                self.violate(lease % self.records.len(), more)
            }
            _ => Ok(()),
        }
    }

    fn open(&mut self) -> Result<(), TestCaseError> {
        let id = LinkId(self.links.len() as u64 + 1);
        let is_full = self.owner.links() == SMALL.links;
        check(self.owner.open_link(id).is_err() == is_full, "links have a limit")?;
        if !is_full {
            check(self.owner.open_link(id).is_err(), "a link is opened once")?;
            let counters = Counters::zero();
            self.links.push(Link { id, holder: holder(id, &counters), counters, is_open: true });
        }
        Ok(())
    }

    fn open_records(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| !matches!(record.state, State::Ended))
    }

    /// The bytes of all buffers that are lent, this one too.
    fn bytes_with(&self, buffer: Option<usize>) -> u64 {
        let is_lent =
            |at: &usize| Some(*at) == buffer || self.open_records().any(|record| record.buffer == *at);
        (0..BUFFERS.len()).filter(is_lent).map(|at| BUFFERS[at].1).sum()
    }

    fn lend(&mut self, link: usize, buffer: usize, start: u64, end: u64) -> Result<(), TestCaseError> {
        let id = self.links[link].id;
        let (slice, handle) = self.buffers[buffer].clone();
        let lent = self.owner.lend(id, slice, start..end, handle);
        let of_link = self.open_records().filter(|record| record.link == link).count();
        let is_allowed = self.links[link].is_open
            && start <= end
            && end <= slice.len
            && self.bytes_with(Some(buffer)) <= SMALL.bytes_lent
            && of_link < SMALL.leases_per_link as usize;
        check(lent.is_ok() == is_allowed, &format!("{lent:?}, allowed: {is_allowed}"))?;
        let Ok(reference) = lent else { return Ok(()) };
        check(reference.link == id && Ok(reference.slice) == slice.slice(start..end), "names other bytes")?;
        let number = reference.lease;
        let same = |record: &&Record| record.link == link && record.reference.lease.slot == number.slot;
        let (before, are_open) =
            (self.records.iter().filter(same), self.open_records().any(|one| same(&one)));
        check(number.slot < SMALL.leases_per_link && !are_open, "a slot is lent twice")?;
        check(number.generation == before.count() as u64 + 1, "leases of a slot are counted")?;
        self.records.push(Record { link, buffer, reference, state: State::Sent });
        Ok(())
    }

    fn deliver(&mut self, at: usize) -> Result<(), TestCaseError> {
        let record = &mut self.records[at];
        let link = &mut self.links[record.link];
        if self.mutant == Some(Mutant::Forgets) {
            link.holder = holder(link.id, &link.counters);
        }
        let accepted = link.holder.accept(&record.reference);
        match (accepted, &record.state) {
            (Ok(lease), State::Sent) => {
                check(lease.slice() == record.reference.slice && lease.link() == link.id, "another lease")?;
                record.state = State::Held(vec![lease]);
                Ok(())
            }
            // The link was severed meanwhile: the holder does not know it yet.
            (Ok(_), State::Ended) if !link.is_open => Ok(()),
            (Err(ReferenceError::Stale { .. }), State::Held(_) | State::Returned { .. } | State::Ended) => {
                Ok(())
            }
            (Err(_), State::Ended) if !link.is_open => Ok(()),
            (accepted, state) => check(false, &format!("{accepted:?} while {state:?}")),
        }
    }

    /// A reference came to its link, and the lease was dropped at once.
    fn came(&mut self, at: usize) -> Result<(), TestCaseError> {
        if matches!(self.records[at].state, State::Sent) {
            self.records[at].state = State::Returned { is_untouched: false };
        }
        Ok(())
    }

    fn forge(&mut self, at: usize, forgery: Forgery) -> Result<(), TestCaseError> {
        let record = &self.records[at];
        if !self.links[record.link].is_open {
            return Ok(());
        }
        let mut forged = record.reference;
        match forgery {
            Forgery::Link => forged.link = LinkId(!forged.link.0),
            Forgery::Slot => forged.lease.slot += SMALL.leases_per_link,
            Forgery::Generation(more) => forged.lease.generation += more,
            Forgery::Region => forged.slice.key = RegionKey(1),
            Forgery::Length => forged.slice.len += REGION_BYTES + 1 - forged.slice.offset - forged.slice.len,
            Forgery::Offset => forged.slice.offset = u64::MAX - forged.slice.len / 2,
        }
        // Of a lease that is back the next one may be under way, of which this is the number.
        let is_next = |other: &Record| {
            other.link == record.link && other.reference.lease == forged.lease && at_most_sent(other)
        };
        if self.records.iter().any(is_next) && matches!(forgery, Forgery::Generation(_)) {
            return Ok(());
        }
        if forged.slice.len == 0 && matches!(forgery, Forgery::Offset) {
            forged.slice.len = 1;
        }
        let accepted = self.links[record.link].holder.accept(&forged);
        // A slot whose lease is back takes the next lease, of whatever bytes: the owner lends it.
        let mut of_slot = self.records.iter().filter(|other| {
            other.link == record.link && other.reference.lease.slot == record.reference.lease.slot
        });
        let is_owners_choice = of_slot.next_back().is_some_and(|newest| {
            !at_most_sent(newest) && forged.lease.generation == newest.reference.lease.generation + 1
        });
        check(accepted.is_err() || is_owners_choice, &format!("{forgery:?} is accepted: {accepted:?}"))?;
        if accepted.is_ok() {
            // The owner did not lend it: its counter is wrong from now on, so the link ends.
            drop(accepted);
            return self.sever(self.records[at].link);
        }
        Ok(())
    }

    fn drop_one(&mut self, at: usize) {
        let record = &mut self.records[at];
        let (counters, number) = (&self.links[record.link].counters, record.reference.lease);
        let State::Held(leases) = &mut record.state else { return };
        leases.pop();
        if leases.is_empty() {
            record.state = State::Returned { is_untouched: false };
            if self.mutant == Some(Mutant::ReturnedTwice) {
                counters.store(number.slot, number.generation + 1);
            }
        } else if self.mutant == Some(Mutant::ReturnedByFirstDrop) {
            counters.store(number.slot, number.generation);
        }
    }

    /// A handle without clones says that nobody read it.
    fn decline(&mut self, at: usize) {
        let record = &mut self.records[at];
        let State::Held(leases) = &mut record.state else { return };
        let lease = leases.pop().expect("it is held");
        if self.mutant == Some(Mutant::DeclinesInVain) {
            drop(lease);
        } else {
            lease.decline();
        }
        if leases.is_empty() {
            record.state = State::Returned { is_untouched: true };
        }
    }

    fn recall(&mut self, at: usize) -> Result<(), TestCaseError> {
        let record = &mut self.records[at];
        let link = &mut self.links[record.link];
        let number = record.reference.lease;
        let recalled = link.holder.recall(number);
        check(recalled.is_ok() || !link.is_open, "a lease is recalled")?;
        if matches!(record.state, State::Held(_)) && self.mutant == Some(Mutant::RecallReturnsHeld) {
            link.counters.store(number.slot, number.generation);
        }
        if matches!(record.state, State::Sent) {
            record.state = State::Returned { is_untouched: true };
        }
        Ok(())
    }

    /// The buffers of handles that came back are those of the leases that `ends` names.
    fn end(&mut self, handles: &[Arc<()>], ends: impl Fn(&Record) -> bool) -> Result<(), TestCaseError> {
        let mut expected = vec![0; BUFFERS.len()];
        for record in self.records.iter_mut().filter(|record| ends(record)) {
            expected[record.buffer] += 1;
            // The leases of a severed link live on where they are; what they read is not promised.
            record.state = State::Ended;
        }
        let came = |(_, buffer): &(_, Arc<()>)| handles.iter().filter(|one| Arc::ptr_eq(one, buffer)).count();
        let came: Vec<usize> = self.buffers.iter().map(came).collect();
        check(came == expected, &format!("handles {came:?}, expected {expected:?}"))
    }

    fn collect(&mut self, link: usize) -> Result<(), TestCaseError> {
        let Link { id, counters, is_open, .. } = &self.links[link];
        match self.owner.collect(*id, |slot| counters.load(slot)) {
            Ok(leases) => {
                check(*is_open, "a link that is closed")?;
                let untouched = leases.iter().filter(|lease| lease.is_untouched).count();
                let is_untouched = |record: &&Record| {
                    record.link == link && matches!(record.state, State::Returned { is_untouched: true })
                };
                let expected = self.records.iter().filter(is_untouched).count();
                check(untouched == expected, "a lease that nobody read, or one that was read")?;
                let handles: Vec<_> = leases.into_iter().map(|lease| lease.handle).collect();
                let is_back = |record: &Record| matches!(record.state, State::Returned { .. });
                self.end(&handles, |record| record.link == link && is_back(record))
            }
            Err(error) => check(!is_open && matches!(error, ReturnError::UnknownLink { .. }), "a violation"),
        }
    }

    fn sever(&mut self, link: usize) -> Result<(), TestCaseError> {
        self.links[link].is_open = false;
        let handles = self.owner.sever(self.links[link].id);
        self.end(&handles, |record| record.link == link && !matches!(record.state, State::Ended))
    }

    /// The holder writes another number than it may.
    fn violate(&mut self, at: usize, more: u64) -> Result<(), TestCaseError> {
        let Record { link, reference, state, .. } = &self.records[at];
        let (link, number) = (*link, reference.lease);
        if matches!(state, State::Ended) {
            return Ok(());
        }
        let (id, count) = (self.links[link].id, number.generation + more);
        let refused = self.owner.returned(id, number.slot, count);
        check(matches!(refused, Err(ReturnError::WrongCount { .. })), "a wrong count")?;
        let before = number.generation.wrapping_sub(1 + more) & !UNTOUCHED;
        let refused = self.owner.returned(id, number.slot, before);
        check(matches!(refused, Err(ReturnError::WrongCount { .. })), "a count that went back")?;
        let refused = self.owner.returned(id, SMALL.leases_per_link, 0);
        check(matches!(refused, Err(ReturnError::UnknownSlot { .. })), "a slot")?;
        self.sever(link)
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        for (at, (_, buffer)) in self.buffers.iter().enumerate() {
            let leases = self.open_records().filter(|record| record.buffer == at).count();
            check(
                Arc::strong_count(buffer) == 1 + leases,
                "a buffer is kept by its leases, and by no other",
            )?;
        }
        for (at, link) in self.links.iter().enumerate() {
            let leases = self.open_records().filter(|record| record.link == at).count();
            check(self.owner.leases(link.id) == leases, "the leases of a link")?;
        }
        check(self.owner.bytes_lent() == self.bytes_with(None), "the bytes that are lent")
    }
}

/// Whether a lease is on its way to its holder or with it.
fn at_most_sent(record: &Record) -> bool {
    matches!(record.state, State::Sent | State::Held(_))
}

proptest! {
    #![proptest_config(Config { cases: 4096, failure_persistence: None, ..Config::default() })]

    #[test]
    fn a_buffer_is_kept_until_each_lease_is_back_or_its_holder_severed(steps in steps()) {
        World::new(None).run(&steps)?;
    }
}

#[test]
fn the_comparison_finds_each_mutant() {
    let mutants = [
        Mutant::ReturnedByFirstDrop,
        Mutant::ReturnedTwice,
        Mutant::RecallReturnsHeld,
        Mutant::DeclinesInVain,
        Mutant::Forgets,
    ];
    for mutant in mutants {
        let config =
            Config { cases: 512, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let found =
            TestRunner::new_with_rng(config, rng).run(&steps(), |steps| World::new(Some(mutant)).run(&steps));
        assert!(found.is_err(), "{mutant:?} is not found");
    }
}

const LINK: LinkId = LinkId(9);

fn slice(offset: u64, len: u64) -> RemoteSlice {
    RemoteSlice { key: REGION, offset, len }
}

#[test]
fn one_buffer_lent_to_several_links_counts_once() {
    let mut owner = LeaseOwner::new(SMALL);
    for link in 1..4 {
        owner.open_link(LinkId(link)).expect("is new");
        owner.lend(LinkId(link), slice(0, 100), 0..100, ()).expect("is at the limit");
    }
    assert_eq!(owner.bytes_lent(), 100);
    let error = owner.lend(LinkId(1), slice(100, 1), 0..1, ()).expect_err("is beyond the limit");
    assert_eq!(
        error.error.to_string(),
        "1 bytes are not lent: 100 bytes of at most 100 are; drop tensors where they were received, or \
         raise the limit"
    );
    assert_eq!((owner.sever(LinkId(1)).len(), owner.bytes_lent()), (1, 100));
    assert_eq!((owner.sever(LinkId(2)).len(), owner.sever(LinkId(3)).len(), owner.bytes_lent()), (1, 1, 0));
}

#[test]
fn a_reference_that_comes_after_its_recall_is_refused() {
    let (mut owner, counters) = (LeaseOwner::new(SMALL), Counters::zero());
    owner.open_link(LINK).expect("is new");
    let mut holder = holder(LINK, &counters);
    let reference = owner.lend(LINK, slice(0, 8), 0..8, "buffer").expect("is allowed");
    holder.recall(reference.lease).expect("was lent");
    let back = Returned { handle: "buffer", is_untouched: true };
    assert_eq!(owner.collect(LINK, |slot| counters.load(slot)), Ok(vec![back]));
    let error = holder.accept(&reference).expect_err("was recalled");
    assert_eq!(
        error.to_string(),
        "lease 1 of slot 0 came on link 0000000000000009 again, after lease 1; ask for the tensor anew"
    );
    let next = owner.lend(LINK, slice(0, 8), 0..8, "again").expect("the slot is free");
    assert_eq!((next.lease.slot, next.lease.generation), (0, 2));
    drop(holder.accept(&next).expect("is the next"));
    let back = Returned { handle: "again", is_untouched: false };
    assert_eq!(owner.collect(LINK, |slot| counters.load(slot)), Ok(vec![back]));
}

#[test]
fn a_holder_has_bounded_memory_whatever_is_announced() {
    let mut holder = LeaseHolder::new(LINK, u32::MAX, Counters::zero());
    assert_eq!(holder.add_region(RegionKey::NONE, 1), Err(RegionAnnounceError::NoKey { link: LINK }));
    for key in 1..=REGIONS_MAX as u64 {
        holder.add_region(RegionKey(key), u64::MAX).expect("is below the limit");
    }
    let again = RegionAnnounceError::Again { link: LINK, key: RegionKey(1) };
    assert_eq!(holder.add_region(RegionKey(1), 1), Err(again));
    let error = holder.add_region(REGION, 1).expect_err("is beyond the limit");
    assert_eq!(error.to_string(), "link 0000000000000009 announces more than 1024 regions");
    let lease = crate::reference::LeaseNumber { slot: SLOTS_MAX, generation: 1 };
    let slots = SLOTS_MAX;
    assert_eq!(holder.recall(lease), Err(ReferenceError::UnknownSlot { link: LINK, slot: slots, slots }));
}
