//! The plan beside memory in which each unit says who wrote it, by random steps. The same steps
//! find a caller that breaks its part. Then single cases.

use proptest::prelude::{Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use super::*;

const SMALL: ArenaLimits = ArenaLimits { bytes: 20 * ALIGNMENT, arenas: 2 };

/// A trust domain.
type Domain = u8;

const DOMAINS: Domain = 4;

#[derive(Clone, Debug)]
enum Step {
    Allocate { domain: Domain, bytes: u64 },
    Free(usize),
    Map(Domain),
    End(usize),
}

/// What a caller could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// It does not overwrite.
    KeepsBytes,
    /// It frees a buffer that is still read.
    FreesEarly,
    /// It does not say that an arena is mapped.
    HidesReader,
    /// It does not give a discarded arena back.
    KeepsArena,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let domain = 0..DOMAINS;
    let step = prop_oneof![
        6 => (domain.clone(), 0..12 * ALIGNMENT).prop_map(|(domain, bytes)| Step::Allocate { domain, bytes }),
        5 => any::<usize>().prop_map(Step::Free),
        1 => domain.prop_map(Step::Map),
        2 => any::<usize>().prop_map(Step::End),
    ];
    prop::collection::vec(step, 0..80)
}

/// A unit of memory: who wrote it, and the number of the buffer that holds it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Unit {
    writer: Option<Domain>,
    buffer: Option<u64>,
}

struct World {
    plan: ArenaPlan<Domain>,
    /// Of each arena what was touched.
    memory: BTreeMap<ArenaId, Vec<Unit>>,
    buffers: Vec<(u64, Domain, Block)>,
    /// A mapping and its domain.
    readers: Vec<(ArenaId, Domain)>,
    next: u64,
    mutant: Option<Mutant>,
}

fn check(holds: bool, what: &str) -> Result<(), TestCaseError> {
    if holds { Ok(()) } else { Err(TestCaseError::fail(what.to_owned())) }
}

fn units(range: &Range<u64>) -> Range<usize> {
    (range.start / ALIGNMENT) as usize..range.end.div_ceil(ALIGNMENT) as usize
}

impl World {
    fn new(mutant: Option<Mutant>) -> Self {
        let (memory, buffers, readers) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { plan: ArenaPlan::new(SMALL), memory, buffers, readers, next: 0, mutant }
    }

    fn run(&mut self, steps: &[Step]) -> Result<(), TestCaseError> {
        for step in steps {
            match *step {
                Step::Allocate { domain, bytes } => self.allocate(domain, bytes)?,
                Step::Free(at) if !self.buffers.is_empty() => {
                    let (number, _, block) = self.buffers.swap_remove(at % self.buffers.len());
                    let memory = self.memory.get_mut(&block.arena()).expect("it has a buffer");
                    if self.mutant != Some(Mutant::FreesEarly) {
                        let of_buffer = memory.iter_mut().filter(|unit| unit.buffer == Some(number));
                        of_buffer.for_each(|unit| unit.buffer = None);
                    }
                    self.plan.free(block);
                }
                Step::Map(domain) => {
                    if let Some(arena) = self.plan.arena(&domain) {
                        if self.mutant != Some(Mutant::HidesReader) {
                            self.plan.add_reader(&domain);
                        }
                        self.readers.push((arena, domain));
                    }
                }
                Step::End(at) if !self.readers.is_empty() => {
                    let (_, domain) = self.readers.swap_remove(at % self.readers.len());
                    self.plan.remove_reader(&domain);
                }
                _ => {}
            }
            self.compare()?;
        }
        Ok(())
    }

    fn allocate(&mut self, domain: Domain, bytes: u64) -> Result<(), TestCaseError> {
        let before = self.plan.touched();
        match self.plan.allocate(&domain, bytes) {
            Ok(Allocation { block, overwrite, discarded }) => {
                for arena in &discarded {
                    if self.mutant != Some(Mutant::KeepsArena) {
                        self.memory.remove(arena);
                    }
                }
                let memory = self.memory.entry(block.arena()).or_default();
                if self.mutant != Some(Mutant::KeepsBytes) {
                    check(units(&overwrite).end <= memory.len(), "bytes that were not touched")?;
                    memory[units(&overwrite)].iter_mut().for_each(|unit| unit.writer = None);
                }
                let range = block.range();
                check(range.start % ALIGNMENT == 0 && range.end - range.start >= bytes.max(1), "too short")?;
                let units = units(&range);
                memory.resize(memory.len().max(units.end), Unit::default());
                for unit in &mut memory[units] {
                    check(unit.buffer.is_none(), "two buffers overlap")?;
                    *unit = Unit { writer: Some(domain), buffer: Some(self.next) };
                }
                self.buffers.push((self.next, domain, block));
                self.next += 1;
            }
            Err(error) => {
                check(self.plan.touched() == before, "a refused allocation changes something")?;
                let is_right = match error {
                    AllocateError::Full { bytes: of, touched, limit } => {
                        let needed = bytes.max(1).next_multiple_of(ALIGNMENT);
                        (of, touched, limit) == (bytes, before, SMALL.bytes) && self.is_needed(domain, needed)
                    }
                    AllocateError::TooManyArenas { limit } => {
                        limit == SMALL.arenas
                            && self.memory.len() == limit
                            && self.plan.arena(&domain).is_none()
                    }
                };
                check(is_right, &format!("{error:?}"))?;
            }
        }
        Ok(())
    }

    /// Whether a buffer finds no room even when each arena without buffers and readers is gone.
    fn is_needed(&self, domain: Domain, bytes: u64) -> bool {
        let own = self.plan.arena(&domain);
        let is_idle = |id: &ArenaId| {
            self.buffers.iter().all(|(.., block)| block.arena() != *id)
                && self.readers.iter().all(|(arena, _)| arena != id)
        };
        let kept = self.memory.iter().filter(|(id, _)| Some(**id) == own || !is_idle(id));
        let kept: u64 = kept.map(|(_, memory)| memory.len() as u64 * ALIGNMENT).sum();
        let tail = own.and_then(|id| self.memory.get(&id)).map_or(0, |memory| {
            memory.iter().rev().take_while(|unit| unit.buffer.is_none()).count() as u64 * ALIGNMENT
        });
        kept + bytes - tail.min(bytes) > SMALL.bytes
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let touched: u64 = self.memory.values().map(|memory| memory.len() as u64 * ALIGNMENT).sum();
        check(touched == self.plan.touched() && touched <= SMALL.bytes, "the limit of bytes")?;
        check(self.memory.len() <= SMALL.arenas, "the limit of arenas")?;
        for (arena, domain) in &self.readers {
            let Some(memory) = self.memory.get(arena) else {
                return check(false, "an arena that is read was discarded");
            };
            let is_foreign = |unit: &Unit| unit.writer.is_some_and(|writer| writer != *domain);
            check(!memory.iter().any(is_foreign), "a reader sees another domain's bytes")?;
        }
        for (_, domain, block) in &self.buffers {
            let memory = &self.memory[&block.arena()];
            let is_own = |unit: &Unit| unit.writer == Some(*domain);
            check(memory[units(&block.range())].iter().all(is_own), "a buffer was overwritten")?;
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(Config { cases: 4096, failure_persistence: None, ..Config::default() })]

    #[test]
    fn no_reader_sees_bytes_of_another_domain_and_no_two_buffers_overlap(steps in steps()) {
        World::new(None).run(&steps)?;
    }
}

#[test]
fn a_caller_that_breaks_its_part_is_found() {
    for mutant in [Mutant::KeepsBytes, Mutant::FreesEarly, Mutant::HidesReader, Mutant::KeepsArena] {
        let config =
            Config { cases: 512, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let found =
            TestRunner::new_with_rng(config, rng).run(&steps(), |steps| World::new(Some(mutant)).run(&steps));
        assert!(found.is_err(), "{mutant:?} is not found");
    }
}

#[test]
fn a_freed_buffer_is_used_again_before_the_arena_grows() {
    let mut plan = ArenaPlan::new(SMALL);
    let place = |plan: &mut ArenaPlan<Domain>, bytes| plan.allocate(&0, bytes).expect("there is room").block;
    let (first, second, third) = (place(&mut plan, 200), place(&mut plan, 1), place(&mut plan, 64));
    assert_eq!((first.range(), second.range(), third.range()), (0..256, 256..320, 320..384));
    plan.free(first);
    plan.free(third);
    // The shortest run that is long enough, and not the first.
    let again = place(&mut plan, 64);
    assert_eq!((again.range(), plan.touched()), (320..384, 384));
    plan.free(again);
    plan.free(second);
    assert_eq!((place(&mut plan, 400).range(), plan.touched()), (0..448, 448), "free runs are joined");
}

#[test]
fn an_idle_arena_goes_to_another_domain_after_it_is_overwritten_or_is_discarded() {
    let mut plan = ArenaPlan::new(SMALL);
    let first = plan.allocate(&0, 300).expect("there is room");
    let arena = first.block.arena();
    plan.add_reader(&0);
    plan.free(first.block);
    let second = plan.allocate(&1, 64).expect("there is room");
    assert_ne!(second.block.arena(), arena, "an arena that is read stays with its domain");
    let error = plan.allocate(&2, 64).expect_err("there are two arenas");
    assert_eq!(error, AllocateError::TooManyArenas { limit: 2 });
    plan.remove_reader(&0);
    let third = plan.allocate(&2, 64).expect("there is an idle arena");
    assert_eq!((third.block.arena(), third.overwrite), (arena, 0..320));
    plan.free(third.block);
    let error = plan.allocate(&1, SMALL.bytes).expect_err("holds a buffer itself");
    assert_eq!(
        error.to_string(),
        "no room for a tensor of 1280 bytes in lendable memory: 384 bytes of at most 1280 are in arenas; drop \
         tensors, or raise the limit"
    );
    let large = plan.allocate(&1, SMALL.bytes - 64).expect("the idle arena makes room");
    assert_eq!((large.discarded, plan.touched()), (vec![arena], SMALL.bytes));
    assert!(matches!(plan.allocate(&1, u64::MAX), Err(AllocateError::Full { bytes: u64::MAX, .. })));
}
