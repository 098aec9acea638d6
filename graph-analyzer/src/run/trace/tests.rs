//! Runs of a simulated runtime, whose memory is numbers, and a checker that knows what is in use.

use proptest::prelude::*;

use super::{Assigned, COUNTED_BYTES, Mutant, Places, Site, Trace};

/// Where the arena begins: above the heap.
const ARENA: usize = 1 << 40;

/// What a program does: allocates so many bytes, or frees the oldest but so many.
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
    heap: usize,
    arena_bytes: u64,
    plans: u32,
}

impl Simulated {
    fn new(mutant: Option<Mutant>) -> Self {
        let mut trace = Trace::start(COUNTED_BYTES);
        trace.mutant = mutant;
        let places = Box::new(Places::new());
        Self { trace, places, live: Vec::new(), heap: 64, arena_bytes: 0, plans: 0 }
    }

    fn allocate(&mut self, bytes: usize) -> Result<(), String> {
        let site = self.trace.site(bytes).expect("there are few sizes");
        let start = self.trace.take(site, 8, &self.places).unwrap_or_else(|| {
            self.heap += bytes.next_multiple_of(64);
            self.heap - bytes.next_multiple_of(64)
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
        let (start, _) = self.live.remove(at);
        self.trace.freed(start);
        assert_eq!(self.places.give_back(start), start >= ARENA);
    }

    /// Runs the steps, frees all but `kept`, and plans. Returns the misses.
    fn run(&mut self, steps: &[Step], is_first: bool, kept: usize) -> Result<u64, String> {
        self.trace.begin(0, is_first);
        for step in steps {
            match *step {
                Allocate(bytes) => self.allocate(bytes)?,
                Free(_) if self.live.is_empty() => {}
                Free(number) => self.free(number % self.live.len()),
            }
        }
        while self.live.len() > kept {
            self.free(self.live.len() - 1);
        }
        let misses = self.trace.misses;
        if self.trace.is_stale() && self.places.are_idle() {
            let planned = self.trace.planned(|_| false);
            let place =
                |&(site, offset): &(Site, u64)| Assigned { site, starts: vec![ARENA + offset as usize] };
            let assigned: Vec<_> = planned.offsets.iter().map(place).collect();
            assert!(self.trace.assign(&assigned, &self.places), "there is room");
            (self.arena_bytes, self.plans) = (planned.bytes, self.plans + 1);
        }
        Ok(misses)
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

    /// Values that live on keep their bytes, and keep a plan from being made while they are places.
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
fn sites_of_slots_take_turns_and_more_places_than_there_is_room_for_are_none() {
    let mut simulated = Simulated::new(None);
    let site = Site { bytes: 2048, number: 0 };
    let slots = vec![ARENA, ARENA + 4096];
    assert!(simulated.trace.assign(&[Assigned { site, starts: slots.clone() }], &simulated.places));
    for slot in [0, 1, 0] {
        simulated.trace.begin(slot, false);
        let found = simulated.trace.site(2048).expect("there is room");
        assert_eq!((found, simulated.trace.take(found, 64, &simulated.places)), (site, Some(slots[slot])));
        assert!(simulated.places.give_back(slots[slot]));
    }
    simulated.trace.begin(0, false);
    assert_eq!(simulated.trace.take(site, 128, &simulated.places), None, "places are multiples of 64 bytes");
    let many = |number| Assigned {
        site: Site { bytes: 2048, number },
        starts: vec![ARENA + 4096 * number as usize],
    };
    let many: Vec<_> = (0..1 << 13).map(many).collect();
    assert!(!simulated.trace.assign(&many, &simulated.places));
    assert_eq!(simulated.trace.take(site, 64, &simulated.places), None);
    assert!(!simulated.places.has(ARENA));
}
