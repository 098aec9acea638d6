//! Runs of a simulated runtime, whose memory is numbers, and a checker that knows what is in use.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{LOG_ROOM, Mutant, PLACES_MAX, Places, Site, TABLES, Trace};

/// Where the arenas begin, one for each table of places: above the heap.
const ARENA: usize = 1 << 40;

/// What a program does: it allocates so many bytes, or it frees the value before which there are so
/// many older ones. Where there are not so many values, it counts from the oldest again.
#[derive(Clone, Copy, Debug)]
enum Step {
    Allocate(usize),
    Free(usize),
}
use Step::{Allocate, Free};

struct Simulated {
    trace: Trace,
    places: Box<Places>,
    /// Ranges in use.
    live: Vec<(usize, usize)>,
    /// The end of the heap, and by size what was freed there: the newest comes back first.
    heap: usize,
    freed: HashMap<usize, Vec<usize>>,
    arena_bytes: u64,
    plans: u32,
}

impl Simulated {
    fn new(mutant: Option<Mutant>) -> Self {
        let mut trace = Trace::start(1);
        trace.mutant = mutant;
        let (places, freed) = (Box::new(Places::new()), HashMap::new());
        Self { trace, places, live: Vec::new(), heap: 64, freed, arena_bytes: 0, plans: 0 }
    }

    fn allocate(&mut self, bytes: usize) -> Result<(), String> {
        let site = self.trace.site(bytes).expect("there are few sizes");
        let start = self.trace.take(site, 8, &self.places).unwrap_or_else(|| {
            self.freed.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
                self.heap += bytes.next_multiple_of(64);
                self.heap - bytes.next_multiple_of(64)
            })
        });
        self.trace.allocated(start, site);
        let shares = |&&(other, length): &&(usize, usize)| other < start + bytes && start < other + length;
        if let Some(other) = self.live.iter().find(shares) {
            return Err(format!("{bytes} bytes at {start} share some with {other:?}"));
        }
        self.live.push((start, bytes));
        Ok(())
    }

    fn free(&mut self, at: usize) {
        let (start, bytes) = self.live.remove(at);
        self.trace.freed(start, bytes);
        assert_eq!(self.places.give_back(start), start >= ARENA);
        if start < ARENA {
            self.freed.entry(bytes).or_default().push(start);
        }
    }

    /// Runs the steps, frees all but the oldest `kept`, and plans. Returns the misses.
    fn run(&mut self, steps: &[Step], is_first: bool, kept: usize) -> Result<u64, String> {
        self.run_until_end(steps, is_first, true)?;
        while self.live.len() > kept {
            self.free(self.live.len() - 1);
        }
        let misses = self.trace.misses;
        let is_stale = self.trace.outcome() == Some(true);
        if let Some(table) = self.places.idle_table().filter(|_| is_stale) {
            self.plan(table);
        }
        Ok(misses)
    }

    fn run_until_end(&mut self, steps: &[Step], is_first: bool, is_whole: bool) -> Result<(), String> {
        self.trace.begin(0, is_first);
        for step in steps {
            match *step {
                Allocate(bytes) => self.allocate(bytes)?,
                Free(_) if self.live.is_empty() => {}
                Free(number) => self.free(number % self.live.len()),
            }
        }
        self.trace.end(is_whole);
        Ok(())
    }

    fn plan(&mut self, table: usize) {
        let (bytes, offsets) = self.trace.planned(|_| false, PLACES_MAX);
        let arena = ARENA * (table + 1);
        let place = |&(site, offset): &(Site, u64)| (site, vec![arena + offset as usize]);
        let assigned: Vec<_> = offsets.iter().map(place).collect();
        self.trace.assign(&assigned, table, &self.places);
        (self.arena_bytes, self.plans) = (bytes, self.plans + 1);
    }
}

const SIZES: [usize; 6] = [1024, 1000, 1088, 4096, 5000, 65536];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => proptest::sample::select(&SIZES[..]).prop_map(Allocate),
        2 => (0..64_usize).prop_map(Free),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Programs take turns. Each has its plan after one run that deviates, whatever the other did.
    #[test]
    fn nothing_in_use_is_given_out_and_a_program_that_stays_allocates_as_planned(
        programs in proptest::collection::vec(steps(), 1..4),
        turns in proptest::collection::vec((0..4_usize, 1..3_u32), 1..6),
    ) {
        let mut simulated = Simulated::new(None);
        let mut is_first = true;
        for (program, times) in turns {
            let program = &programs[program % programs.len()];
            simulated.run(program, is_first, 0).map_err(TestCaseError::fail)?;
            for _ in 0..times {
                let misses = simulated.run(program, false, 0).map_err(TestCaseError::fail)?;
                prop_assert_eq!(misses, 0);
            }
            is_first = false;
        }
    }

    /// Values that live on keep their bytes, also when later plans are made.
    #[test]
    fn what_lives_on_keeps_its_bytes(
        programs in proptest::collection::vec((steps(), 0..4_usize), 1..8),
    ) {
        let mut simulated = Simulated::new(None);
        for (number, (program, kept)) in programs.iter().enumerate() {
            simulated.run(program, number == 0, *kept).map_err(TestCaseError::fail)?;
        }
    }
}

/// Three buffers, the third where the first was.
const CHAIN: [Step; 6] = [Allocate(4096), Allocate(5000), Free(0), Allocate(4096), Free(0), Free(0)];

/// The graph has changed: sizes and numbers are those of the chain, but all three live together.
const TOGETHER: [Step; 4] = [Allocate(4096), Allocate(4096), Allocate(5000), Free(0)];

/// Runs the chain until it has its plan, and then another program.
fn change(mutant: Option<Mutant>) -> Result<(), String> {
    let mut simulated = Simulated::new(mutant);
    simulated.run(&CHAIN, true, 0)?;
    assert_eq!(simulated.arena_bytes, 4096 + 5056, "the third buffer lies where the first was");
    let misses = simulated.run(&CHAIN, false, 0)?;
    assert_eq!((misses, simulated.trace.later_misses), (0, 0));
    let misses = simulated.run(&TOGETHER, false, 0)?;
    assert_eq!((misses, simulated.trace.later_misses), (1, 1), "one place is in use");
    let again = simulated.run(&TOGETHER, false, 0)?;
    if again > 0 || simulated.plans != 2 || simulated.arena_bytes != 4096 * 2 + 5056 {
        return Err(format!("{again} misses, {} plans", simulated.plans));
    }
    Ok(())
}

#[test]
fn a_trace_that_is_used_again_after_the_graph_changed_is_found_and_harmless() {
    change(None).expect("it is traced anew");
    let error = change(Some(Mutant::Trusted)).expect_err("a plan is no promise");
    assert!(error.contains("share some"), "{error}");
    let error = change(Some(Mutant::NeverStale)).expect_err("the next run deviates again");
    assert_eq!(error, "1 misses, 1 plans");
}

#[test]
fn sites_of_slots_take_turns_and_what_finds_no_room_has_no_place() {
    let mut simulated = Simulated::new(None);
    let site = Site { bytes: 2048, number: 0 };
    let slots = vec![ARENA, ARENA + 4096];
    simulated.trace.assign(&[(site, slots.clone())], 0, &simulated.places);
    for slot in [0, 1, 0] {
        simulated.trace.begin(slot, false);
        let found = simulated.trace.site(2048).expect("there is room");
        assert_eq!((found, simulated.trace.take(found, 64, &simulated.places)), (site, Some(slots[slot])));
        assert!(simulated.places.give_back(slots[slot]));
    }
    simulated.trace.begin(0, false);
    assert_eq!(simulated.trace.take(site, 128, &simulated.places), None, "places are multiples of 64 bytes");
    let many = |number| (Site { bytes: 2048, number }, vec![ARENA + 4096 * number as usize]);
    let many: Vec<_> = (0..1 << 13).map(many).collect();
    simulated.trace.assign(&many, 0, &simulated.places);
    assert_eq!(simulated.trace.take(site, 64, &simulated.places), Some(ARENA), "the first have theirs");
    let last = Site { bytes: 2048, number: PLACES_MAX as u32 };
    assert_eq!(simulated.trace.take(last, 64, &simulated.places), None);
}

#[test]
fn where_there_is_not_room_for_all_the_largest_buffers_are_planned() {
    let mut simulated = Simulated::new(None);
    let steps = [Allocate(2048), Allocate(9000), Allocate(5000), Free(0), Free(0), Free(0)];
    simulated.run_until_end(&steps, true, true).expect("nothing is planned");
    let (_, offsets) = simulated.trace.planned(|site| site.bytes == 9000, 1);
    assert_eq!(offsets, [(Site { bytes: 5000, number: 0 }, 0)]);
}

#[test]
fn a_run_that_failed_says_nothing_and_the_outcome_of_another_is_told_once() {
    let mut simulated = Simulated::new(None);
    simulated.run_until_end(&[Allocate(4096)], true, false).expect("nothing is planned");
    assert_eq!((simulated.trace.misses, simulated.trace.outcome()), (1, None));
    assert!(simulated.trace.lifetimes().is_empty());
    simulated.run_until_end(&[Free(0), Allocate(4096)], true, true).expect("nothing is planned");
    assert_eq!([simulated.trace.outcome(), simulated.trace.outcome()], [Some(true), None]);
}

#[test]
fn a_value_that_lives_on_keeps_its_place_and_the_next_plan_has_other_memory() {
    let mut simulated = Simulated::new(None);
    simulated.run(&CHAIN, true, 0).expect("it has a plan");
    for kept in 0..TABLES {
        let steps = [Allocate(4096), Allocate(10_000 * (kept + 1))];
        assert!(simulated.run(&steps, false, kept).expect("nothing is shared") > 0);
        assert_eq!(simulated.run(&steps[..1], false, kept + 1), Ok(0));
        assert_eq!(simulated.plans as usize, 2 + kept);
    }
    assert!(simulated.live.iter().all(|(start, _)| *start >= ARENA), "{:?}", simulated.live);
    // There is no table for another plan, until one of the values is freed.
    let steps = [Allocate(7000), Allocate(60_000)];
    for (freed, misses) in [(false, 2), (false, 2), (true, 2), (false, 0)] {
        if freed {
            simulated.free(1);
        }
        let kept = simulated.live.len();
        assert_eq!(simulated.run(&steps, false, kept), Ok(misses));
    }
    assert_eq!(simulated.plans as usize, 2 + TABLES);
}

#[test]
fn a_place_of_two_plans_is_not_given_out_twice() {
    let mut simulated = Simulated::new(None);
    let site = Site { bytes: 2048, number: 0 };
    let slots = [(site, vec![ARENA])];
    simulated.trace.assign(&slots, 0, &simulated.places);
    assert_eq!(simulated.trace.take(site, 64, &simulated.places), Some(ARENA));
    simulated.trace.assign(&slots, 1, &simulated.places);
    assert_eq!(simulated.trace.take(site, 64, &simulated.places), None, "the first plan has given it out");
    assert!(simulated.places.give_back(ARENA));
    assert!((0..TABLES).all(|table| simulated.places.is_idle(table)));
    assert_eq!(simulated.trace.take(site, 64, &simulated.places), Some(ARENA));
}

#[test]
fn small_allocations_take_no_room_of_a_plan_and_logs_are_enlarged_for_the_next_run() {
    let mut simulated = Simulated::new(None);
    let pair = [Allocate(8), Free(0)].repeat(LOG_ROOM);
    let whole = [&pair[..], &[Allocate(16), Allocate(4096)]].concat();
    // A result that is late and small is not found at first.
    simulated.run_until_end(&whole, true, true).expect("nothing is planned");
    let [small, large] = [0, 1].map(|number: usize| simulated.live[number].0);
    assert_eq!(simulated.trace.site_of(small), None);
    assert_eq!(simulated.trace.site_of(large), Some(Site { bytes: 4096, number: 0 }));
    simulated.free(1);
    assert_eq!(simulated.trace.lifetimes().len(), 1, "the plan is made all the same");
    let again = [&[Free(0)], &whole[..]].concat();
    simulated.run_until_end(&again, false, true).expect("nothing is planned");
    assert_eq!(simulated.trace.site_of(simulated.live[0].0), Some(Site { bytes: 16, number: 0 }));
}

#[test]
fn a_run_with_more_large_allocations_than_the_log_has_room_for_is_planned_the_next_time() {
    let mut simulated = Simulated::new(None);
    let steps = [Allocate(4096), Free(0)].repeat(LOG_ROOM / 2);
    // What is freed after the run finds no room, and the run is whole all the same.
    let freed_later = [&steps[2..], &[Allocate(5000), Allocate(6000)]].concat();
    simulated.run_until_end(&freed_later, true, true).expect("nothing is planned");
    simulated.free(0);
    simulated.free(0);
    assert_eq!(simulated.trace.lifetimes().len(), LOG_ROOM / 2 - 1, "two have no end");
    let too_many = [&steps[..], &[Allocate(5000)]].concat();
    let mut simulated = Simulated::new(None);
    for expected in [0, LOG_ROOM / 2 + 1] {
        simulated.run_until_end(&too_many, true, true).expect("nothing is planned");
        simulated.free(0);
        assert_eq!((simulated.trace.lifetimes().len(), simulated.trace.outcome()), (expected, Some(true)));
    }
}
