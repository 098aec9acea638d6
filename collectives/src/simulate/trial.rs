//! A scenario carried out, and everything that is checked while it is.
#![allow(unsafe_code)] // mutants of the simulated world

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_schedule::generate::{Access, Algorithm, generate};
use pleach_schedule::verify::{Proof, verify};
use pleach_transport::Nanos;
use pleach_transport::mutex::lock;
use pleach_transport::sim::{self, AccessKind, FREEZE_MAX, Fault as Injected, TraceHash};
use pleach_vocabulary::{Collective, Rank};

use super::cause;
use super::cluster::Cluster;
use super::mutation::mutated;
use super::scenario::Scenario;
use super::time_bound::time_bound;
use super::watch::Watch;
use super::{CallPlan, Guarded, Overlap, RankInput, depends_on_others, oracle_difference, oracle_input};
use crate::call::Descriptor;
use crate::engine::{Bytes, Fault, FaultKind, Plan, Program, RunId, StartError};

/// How much later than its deadline a call of a surviving rank may end: the ranks agree on why (300
/// ms where peers do not answer), the last ones are told (100 ms) and fenced. Delays of severance
/// and the rank's own freezes come on top.
pub const GRACE: Duration = Duration::from_millis(405);
/// How long a mismatch may stay unnoticed after the last rank has entered its call.
pub const MISMATCH_NOTICED_WITHIN: Duration = Duration::from_millis(100);
/// How long calls may go on after a rank has aborted, or after they were entered.
pub const ABORT_NOTICED_WITHIN: Duration = Duration::from_millis(100);
/// How long the world goes on after everything has ended, to see whether anybody still writes.
const AFTERMATH: Duration = Duration::from_millis(150);
/// Events after which a run is called endless.
const EVENTS_MAX: u64 = 20_000_000;
/// Bytes of registered memory that no call names.
const IDLE_BYTES: usize = 4096;
/// How far slices are shifted at most from where memory is aligned, in elements.
const SKEW_ELEMENTS: usize = 9;

/// Which check did not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Checker {
    /// A result differs from the oracle's.
    Result,
    /// Ranks hold different bits.
    Equality,
    /// Bytes that no call names were touched, or an input was.
    Guard,
    /// Two accesses to the same bytes are not ordered.
    Race,
    /// A severed peer wrote.
    Fence,
    /// A caller's memory changed after its call had returned.
    AfterReturn,
    /// A call did not end in time, or nothing moved any more.
    Liveness,
    /// An error that nothing injected explains, or one that is missing.
    Cause,
    /// Survivors that reach each other have different errors.
    Agreement,
    /// Something was not released at the end.
    Release,
    /// A call was refused.
    Refused,
    /// In rounds of a partial all-reduce: sets, sums, what becomes of contributions, how often
    /// ranks are left out, and that every rank comes to an end.
    Rounds,
}

/// The first check that did not hold, and when.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq)]
pub struct Failure {
    /// The check.
    pub checker: Checker,
    /// In virtual time.
    pub at: Nanos,
    /// The rank and what it did, in words.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} at {}: {}", self.checker, self.at, self.what)
    }
}

impl std::error::Error for Failure {}

/// A run in which everything held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialReport {
    /// All that happened, as a number.
    pub hash: TraceHash,
    /// How many events there were.
    pub events: u64,
    /// When it ended.
    pub virtual_time: Nanos,
    /// Calls of ranks that ended well.
    pub succeeded: u64,
    /// Calls of ranks that ended with the error that they had to end with.
    pub failed: u64,
}

/// Carries out the calls of a scenario; `trace` gets a line for every event.
pub(crate) fn run_calls(
    scenario: &Scenario,
    trace: Option<Box<dyn Write + Send>>,
) -> Result<TrialReport, Failure> {
    let mut trial = Trial::new(scenario, trace);
    let outcome = trial.carry_out().and_then(|()| trial.end());
    let hash = trial.cluster.world.finish();
    // A race explains a wrong result, not the other way round, so the race is reported.
    if let Some((checker, at, what)) = lock(&trial.watch).found().cloned() {
        return Err(Failure { checker, at, what });
    }
    outcome?;
    let Trial { succeeded, failed, ended_at, .. } = trial;
    Ok(TrialReport { hash, events: trial.cluster.world.events(), virtual_time: ended_at, succeeded, failed })
}

/// A call of one rank.
struct CallUnderWay {
    call: usize,
    /// `None`: carried out already.
    run: Option<RunId>,
    memory: CallMemory,
    deadline: Nanos,
}

/// The buffers of a rank in a call.
struct CallMemory {
    input: Option<Guarded>,
    output: Option<Guarded>,
    overlap: Option<Overlap>,
    given: Vec<u8>,
}

struct RankTrial {
    next: usize,
    /// When it enters the next call, once it can.
    enters_at: Option<Nanos>,
    under_way: Vec<CallUnderWay>,
    /// Memory of ended calls, kept so that addresses stay its own.
    shelf: Vec<CallMemory>,
    fault: Option<(Arc<Fault>, Nanos)>,
    idle: Option<Guarded>,
    has_left: bool,
}

/// See the module.
struct Trial<'a> {
    scenario: &'a Scenario,
    cluster: Cluster,
    watch: Arc<Mutex<Watch>>,
    ranks: Vec<RankTrial>,
    proofs: HashMap<(Collective, Algorithm, Access), Arc<Proof>>,
    /// By call: every rank's input, as the oracle sees it.
    inputs: BTreeMap<usize, Vec<RankInput<'a>>>,
    /// By call: a result that was right, where all ranks must have the same.
    results: BTreeMap<usize, Vec<u8>>,
    /// By call and rank.
    entered: Vec<Vec<Option<Nanos>>>,
    /// By call and rank: whether it returned without an error.
    returned: Vec<Vec<bool>>,
    has_aborted: bool,
    succeeded: u64,
    failed: u64,
    ended_at: Nanos,
}

impl<'a> Trial<'a> {
    fn new(scenario: &'a Scenario, trace: Option<Box<dyn Write + Send>>) -> Self {
        let mut options = sim::Options::new(scenario.network.clone(), scenario.seed);
        options.faults = scenario.faults.clone();
        (options.maps, options.passive) = (scenario.maps, scenario.passive);
        options.hosts = scenario.hosts.by_rank().to_vec();
        options.queue_depth = scenario.queue_depth;
        // SAFETY: a trial touches the memory that it registers by slices alone, and keeps it until
        // its world has ended.
        options.mutant = scenario.world_mutant.map(|mutant| unsafe { mutant.allow() });
        let make = if scenario.connects_on_use { Cluster::connecting_on_use } else { Cluster::with };
        let mut cluster = make(options, scenario.compute_mutant, scenario.is_immediate);
        let watch = Arc::new(Mutex::new(Watch::new(scenario.ranks, scenario.mismatch.is_some())));
        cluster.world.observe(Box::new(watch.clone()));
        if let Some(lines) = trace {
            cluster.world.trace_to(lines);
        }
        let ranks = cluster.members.iter_mut().map(|member| {
            let engine = member.as_mut().map(|member| &mut member.engine);
            let idle = engine.map(|engine| {
                let mut idle = Guarded::new(engine.device(), &[0; IDLE_BYTES], true, 0);
                idle.refill();
                idle
            });
            RankTrial {
                next: 0,
                enters_at: None,
                under_way: Vec::new(),
                shelf: Vec::new(),
                fault: None,
                idle,
                has_left: false,
            }
        });
        let ranks = ranks.collect();
        let (calls, world_size) = (scenario.calls.len(), scenario.ranks as usize);
        Self {
            scenario,
            cluster,
            watch,
            ranks,
            proofs: HashMap::new(),
            inputs: BTreeMap::new(),
            results: BTreeMap::new(),
            entered: vec![vec![None; world_size]; calls],
            returned: vec![vec![false; world_size]; calls],
            has_aborted: false,
            succeeded: 0,
            failed: 0,
            ended_at: Nanos::ZERO,
        }
    }

    fn failure(&self, checker: Checker, what: String) -> Failure {
        Failure { checker, at: self.cluster.world.now(), what }
    }

    fn is_dead(&self, rank: Rank) -> bool {
        self.cluster.world.is_dead(rank)
    }

    /// Whether nothing will come from this rank's script any more.
    fn is_through(&self, rank: Rank) -> bool {
        let trial = &self.ranks[rank as usize];
        let over = trial.fault.is_some() || trial.next == self.scenario.calls.len();
        self.is_dead(rank) || (over && trial.under_way.is_empty())
    }

    /// Until every rank's script has ended, well or not.
    fn carry_out(&mut self) -> Result<(), Failure> {
        loop {
            self.settle()?;
            if (0..self.scenario.ranks).all(|rank| self.is_through(rank)) {
                self.ended_at = self.cluster.world.now();
                return Ok(());
            }
            let wakeup = self.next_wakeup();
            if !self.cluster.advance(wakeup) {
                return Err(self.failure(Checker::Liveness, "nothing will ever happen any more".to_owned()));
            }
            if self.cluster.world.events() > EVENTS_MAX {
                return Err(self.failure(Checker::Liveness, format!("more than {EVENTS_MAX} events")));
            }
        }
    }

    /// Lets ranks do all they can at this instant.
    fn settle(&mut self) -> Result<(), Failure> {
        loop {
            self.cluster.settle().map_err(|error| self.failure(Checker::Liveness, error.to_string()))?;
            let mut moved = self.abort_if_due();
            for rank in 0..self.scenario.ranks {
                if !self.is_dead(rank) {
                    self.take_outcomes(rank)?;
                    moved |= self.enter_calls(rank)?;
                    self.leave_if_through(rank);
                }
            }
            if lock(&self.watch).found().is_some() {
                return Err(self.failure(Checker::Race, String::new()));
            }
            if !moved {
                return Ok(());
            }
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let entries = (0..self.scenario.ranks).filter(|rank| !self.cluster.world.is_frozen(*rank));
        let entries = entries.filter(|rank| !self.is_dead(*rank));
        let entries = entries.filter_map(|rank| self.ranks[rank as usize].enters_at);
        let abort = self.scenario.abort.filter(|_| !self.has_aborted);
        entries.chain(abort.map(|abort| Nanos::ZERO + abort.after)).min()
    }

    fn abort_if_due(&mut self) -> bool {
        let now = self.cluster.world.now();
        let Some(abort) = self.scenario.abort.filter(|abort| now >= Nanos::ZERO + abort.after) else {
            return false;
        };
        if std::mem::replace(&mut self.has_aborted, true) || self.ranks[abort.rank as usize].has_left {
            return false;
        }
        if let Some(member) = &self.cluster.members[abort.rank as usize] {
            member.board.abort();
            self.cluster.wake(abort.rank);
        }
        true
    }

    /// A rank that is through says bye at once, while others may still be in the last barrier.
    fn leave_if_through(&mut self, rank: Rank) {
        let is_through = self.is_through(rank) && self.ranks[rank as usize].fault.is_none();
        if is_through && !self.cluster.world.is_frozen(rank) && !self.ranks[rank as usize].has_left {
            self.ranks[rank as usize].has_left = true;
            if let Some(member) = &mut self.cluster.members[rank as usize] {
                member.engine.leave();
            }
        }
    }

    fn enter_calls(&mut self, rank: Rank) -> Result<bool, Failure> {
        let mut moved = false;
        loop {
            let trial = &self.ranks[rank as usize];
            let now = self.cluster.world.now();
            let call = trial.next;
            let is_full = trial.under_way.len() >= self.scenario.depth[rank as usize];
            if trial.fault.is_some()
                || call == self.scenario.calls.len()
                || is_full
                || self.cluster.world.is_frozen(rank)
            {
                return Ok(moved);
            }
            let late = self.scenario.calls[call].late.filter(|(late, _)| *late == rank);
            let late = late.map_or(Duration::ZERO, |(_, by)| by);
            let enters_at = trial.enters_at.unwrap_or(now + late);
            if now < enters_at {
                self.ranks[rank as usize].enters_at = Some(enters_at);
                return Ok(moved);
            }
            let trial = &mut self.ranks[rank as usize];
            trial.enters_at = None;
            trial.next += 1;
            if let Some(plan) = self.scenario.plan(call, rank) {
                self.enter(rank, call, plan)?;
                self.cluster.wake(rank);
                moved = true;
            }
        }
    }

    fn enter(&mut self, rank: Rank, call: usize, plan: &CallPlan) -> Result<(), Failure> {
        let program = self.program(rank, plan)?;
        let counts = plan.counts(rank, self.scenario.ranks);
        let descriptor = Descriptor {
            collective: plan.collective,
            amount: counts.amount(),
            data_type: plan.data_type,
            op: plan.op,
            tag: 0,
        };
        let made = Plan::new(program, descriptor, counts)
            .map_err(|error| self.failure(Checker::Refused, format!("rank {rank}, {plan}: {error}")))?;
        let now = self.cluster.world.now();
        let Some(member) = &mut self.cluster.members[rank as usize] else { return Ok(()) };
        let mut memory = CallMemory::new(member.engine.device(), self.scenario, rank, call, plan);
        for slice in memory.slices() {
            lock(&self.watch).lend(rank, slice.addresses());
        }
        memory.report(&self.cluster.world, rank, AccessKind::Write);
        let (input, output) = memory.bytes();
        let deadline = now + self.scenario.timeout;
        self.entered[call][rank as usize] = Some(now);
        let (engine, made, timeout) = (&mut member.engine, Arc::new(made), self.scenario.timeout);
        // As a thread that makes one call after the other.
        let waits = self.scenario.depth[rank as usize] == 1;
        let started = if waits {
            if engine.is_ready() && !engine.is_passive() {
                engine.enable_fast_path(true);
            }
            engine.carry_out(&made, &input, &output, timeout)
        } else {
            engine.start(&made, input, output, timeout).map(Some)
        };
        match started {
            Ok(run) => {
                match run {
                    Some(run) if waits => engine.await_run(run),
                    Some(run) => engine.prioritize(run, self.scenario.priority(call, rank)),
                    None => {}
                }
                self.ranks[rank as usize].under_way.push(CallUnderWay { call, run, memory, deadline });
            }
            Err(StartError::Failed(fault)) => {
                self.failed += 1;
                memory.refill();
                self.ranks[rank as usize].shelf.push(memory);
                self.fail(rank, call, &fault)?;
            }
            Err(error) => return Err(self.failure(Checker::Refused, format!("rank {rank}, {plan}: {error}"))),
        }
        Ok(())
    }

    fn program(&mut self, rank: Rank, plan: &CallPlan) -> Result<Arc<Program>, Failure> {
        let refused = |error: String| Failure {
            checker: Checker::Refused,
            at: self.cluster.world.now(),
            what: format!("rank {rank}, {plan}: {error}"),
        };
        let Some(algorithm) = &plan.algorithm else {
            let Some(member) = &mut self.cluster.members[rank as usize] else {
                return Err(refused("it has died".to_owned()));
            };
            let bytes = plan.counts(rank, self.scenario.ranks).plan_bytes(plan.data_type.bytes());
            return member.planner.program(plan.collective, bytes, None).map_err(|error| {
                let what = format!("rank {rank}, {plan}: {error}");
                Failure { checker: Checker::Refused, at: self.cluster.world.now(), what }
            });
        };
        let key = (plan.collective, algorithm.clone(), plan.access);
        let proof = match self.proofs.get(&key) {
            Some(proof) => proof.clone(),
            None => {
                let schedule = generate(plan.collective, algorithm, self.scenario.ranks, plan.access)
                    .map_err(|error| refused(error.to_string()))?;
                let proof = Arc::new(verify(schedule).map_err(|error| refused(error.to_string()))?);
                self.proofs.insert(key, proof.clone());
                proof
            }
        };
        let name = algorithm.to_string();
        let lost = self.scenario.lost_dependency.filter(|(loser, _)| *loser == rank);
        let mutated = lost.and_then(|(_, number)| mutated(&proof, rank, &name, number));
        Ok(Arc::new(mutated.unwrap_or_else(|| Program::new(&proof, rank, &name))))
    }

    fn take_outcomes(&mut self, rank: Rank) -> Result<(), Failure> {
        let mut index = 0;
        while index < self.ranks[rank as usize].under_way.len() {
            let Some(member) = &mut self.cluster.members[rank as usize] else { return Ok(()) };
            let live = &self.ranks[rank as usize].under_way[index];
            let (call, deadline) = (live.call, live.deadline);
            let outcome = match live.run {
                Some(run) => member.engine.take_outcome(run),
                None => Some(Ok(())),
            };
            let now = self.cluster.world.now();
            if now > deadline + self.grace(rank) {
                let what = format!(
                    "rank {rank}'s call {call} did not end by its deadline and {:?}",
                    self.grace(rank)
                );
                return Err(self.failure(Checker::Liveness, what));
            }
            let Some(outcome) = outcome else {
                index += 1;
                continue;
            };
            let mut live = self.ranks[rank as usize].under_way.remove(index);
            let Some(plan) = self.scenario.plan(call, rank) else { continue };
            let checked = match outcome {
                Ok(()) => self.succeed(rank, call, plan, &live.memory),
                Err(fault) => {
                    self.failed += 1;
                    self.fail(rank, call, &fault)
                }
            };
            live.memory.refill();
            if self.ranks[rank as usize].fault.is_none() {
                live.memory.report(&self.cluster.world, rank, AccessKind::Write);
            }
            self.ranks[rank as usize].shelf.push(live.memory);
            checked?;
        }
        Ok(())
    }

    /// See [`GRACE`].
    fn grace(&self, rank: Rank) -> Duration {
        let faults = &self.scenario.faults;
        let freezes = faults
            .timed
            .iter()
            .filter(|(_, fault)| matches!(fault, Injected::Freeze { rank: frozen, .. } if *frozen == rank));
        GRACE + faults.severance + FREEZE_MAX * freezes.count() as u32
    }

    fn succeed(
        &mut self,
        rank: Rank,
        call: usize,
        plan: &CallPlan,
        memory: &CallMemory,
    ) -> Result<(), Failure> {
        self.succeeded += 1;
        self.returned[call][rank as usize] = true;
        memory.report(&self.cluster.world, rank, AccessKind::Read);
        let name = || format!("rank {rank}, call {call} ({plan})");
        if let Some(index) = memory.broken_guard() {
            return Err(self.failure(Checker::Guard, format!("{}: byte {index} was touched", name())));
        }
        if memory.has_changed_input() {
            return Err(self.failure(Checker::Guard, format!("{}: its input was written", name())));
        }
        self.check_result(rank, call, plan, memory)?;
        if self.scenario.is_harmless() {
            let entered = self.entered[call].iter().flatten().max().copied().unwrap_or(Nanos::ZERO);
            let took = self.cluster.world.now().since(entered);
            let time_bound = time_bound(self.scenario, call);
            if took > time_bound {
                let what =
                    format!("{}: took {took:?} after the last had entered, more than {time_bound:?}", name());
                return Err(self.failure(Checker::Liveness, what));
            }
        }
        Ok(())
    }

    fn check_result(
        &mut self,
        rank: Rank,
        call: usize,
        plan: &CallPlan,
        memory: &CallMemory,
    ) -> Result<(), Failure> {
        let ranks = self.scenario.ranks;
        let name = || format!("rank {rank}, call {call} ({plan})");
        let differs = self.scenario.mismatch.as_ref().is_some_and(|it| it.call == call && it.rank == rank);
        if differs && depends_on_others(plan.collective, rank, ranks) {
            let what = format!("{}: succeeded, although the others called something else", name());
            return Err(self.failure(Checker::Cause, what));
        }
        let Some(output) = memory.output() else { return Ok(()) };
        if differs {
            // Only its own input can be right.
            let inputs = plan.collective.input_parts(rank, ranks);
            let own = plan.collective.output_parts(rank, ranks).iter();
            let own: Vec<u8> =
                own.flat_map(|part| &memory.given[plan.range(inputs, part)]).copied().collect();
            let is_own = output == own;
            return if is_own { Ok(()) } else { Err(self.failure(Checker::Result, name())) };
        }
        if cause::may_overwrite_scratch(self.scenario, call) {
            return Ok(());
        }
        let alike = matches!(plan.collective, Collective::AllReduce);
        if alike && let Some(result) = self.results.get(&call) {
            return if *result == output {
                Ok(())
            } else {
                Err(self.failure(Checker::Equality, format!("{}: other bits than elsewhere", name())))
            };
        }
        let seed = self.scenario.seed;
        let inputs = self.inputs.entry(call).or_insert_with(|| {
            let given = |rank| {
                let plan = self.scenario.plan(call, rank).unwrap_or(&self.scenario.calls[call]);
                RankInput { plan, bytes: oracle_input(seed, call, rank, plan, ranks) }
            };
            (0..ranks).map(given).collect()
        });
        if let Some(difference) = oracle_difference(plan, rank, inputs, &output) {
            return Err(self.failure(Checker::Result, format!("{}: {difference}", name())));
        }
        if alike {
            self.results.insert(call, output);
        }
        Ok(())
    }

    /// A rank's group has failed, as this call tells first.
    fn fail(&mut self, rank: Rank, call: usize, fault: &Arc<Fault>) -> Result<(), Failure> {
        let now = self.cluster.world.now();
        if self.ranks[rank as usize].fault.is_some() {
            return Ok(());
        }
        self.ranks[rank as usize].enters_at = None;
        self.ranks[rank as usize].fault = Some((fault.clone(), now));
        if cause::explains(self.scenario, fault) {
            return self.check_abort(rank, call, fault);
        }
        let what = format!("rank {rank} ended with an error that nothing injected explains: {fault}");
        Err(self.failure(Checker::Cause, what))
    }

    /// An abort ends the calls of every rank in time.
    fn check_abort(&self, rank: Rank, call: usize, fault: &Fault) -> Result<(), Failure> {
        let is_alone = self.scenario.faults.is_harmless() && self.scenario.mismatch.is_none();
        let abort = self.scenario.abort.filter(|_| is_alone && fault.kind == FaultKind::Aborted);
        let Some(abort) = abort else { return Ok(()) };
        let entered = self.entered[call][rank as usize].unwrap_or(Nanos::ZERO);
        let since = entered.max(Nanos::ZERO + abort.after);
        let freezes = FREEZE_MAX * self.scenario.faults.timed.len() as u32;
        let took = self.cluster.world.now().since(since);
        if took <= ABORT_NOTICED_WITHIN + freezes {
            return Ok(());
        }
        Err(self.failure(Checker::Liveness, format!("rank {rank} learned only after {took:?}: {fault}")))
    }

    /// The checks at the end of a scenario.
    fn end(&mut self) -> Result<(), Failure> {
        self.check_mismatch()?;
        self.check_agreement()?;
        let until = self.cluster.world.now() + AFTERMATH;
        while self.cluster.world.now() < until && self.cluster.advance(Some(until)) {
            self.cluster.settle().map_err(|error| self.failure(Checker::Liveness, error.to_string()))?;
            for rank in 0..self.scenario.ranks {
                if !self.is_dead(rank) {
                    self.leave_if_through(rank);
                }
            }
        }
        for rank in (0..self.scenario.ranks).filter(|rank| !self.is_dead(*rank)) {
            let trial = &self.ranks[rank as usize];
            let lent = trial.shelf.iter().flat_map(CallMemory::slices).chain(&trial.idle);
            if let Some(index) = lent.filter_map(Guarded::changed_since_refill).next() {
                let what =
                    format!("byte {index} of a slice of rank {rank} changed after its call had returned");
                return Err(self.failure(Checker::AfterReturn, what));
            }
        }
        let under_way = self.cluster.world.transfers_under_way();
        if under_way > 0 {
            return Err(self.failure(Checker::Release, format!("{under_way} transfers are still under way")));
        }
        for rank in 0..self.scenario.ranks {
            if self.is_dead(rank) {
                continue;
            }
            let trial = &mut self.ranks[rank as usize];
            trial.shelf.clear();
            trial.idle = None;
            let regions = self.cluster.world.regions(rank);
            // The scratch, if the group has not failed.
            if regions > 1 {
                let what = format!("rank {rank} holds {regions} regions, not its scratch alone");
                return Err(self.failure(Checker::Release, what));
            }
        }
        Ok(())
    }

    /// Survivors have the same verdict, byte for byte.
    fn check_agreement(&self) -> Result<(), Failure> {
        let is_there = |rank: &Rank| !self.is_dead(*rank) && !self.ranks[*rank as usize].has_left;
        let survivors: Vec<Rank> = (0..self.scenario.ranks).filter(is_there).collect();
        for set in cause::must_agree(self.scenario, &survivors) {
            let faults =
                set.iter().filter_map(|rank| Some((rank, &self.ranks[*rank as usize].fault.as_ref()?.0)));
            let mut faults = faults.map(|(rank, fault)| (rank, fault, fault.to_bytes()));
            let Some((one, first, bytes)) = faults.next() else { continue };
            if let Some((other, second, _)) = faults.find(|(.., others)| *others != bytes) {
                let what = format!("rank {one} ended with '{first}', and rank {other} with '{second}'");
                return Err(self.failure(Checker::Agreement, what));
            }
        }
        Ok(())
    }

    /// A rank that called something else must be found by all ranks that needed it, and in time.
    fn check_mismatch(&self) -> Result<(), Failure> {
        let Some(mismatch) = &self.scenario.mismatch else { return Ok(()) };
        let call = mismatch.call;
        let has_entered = self.entered[call][mismatch.rank as usize].is_some();
        let is_alone = self.scenario.faults.is_harmless() && self.scenario.abort.is_none();
        let plan = &self.scenario.calls[call];
        for rank in (0..self.scenario.ranks).filter(|rank| has_entered && !self.is_dead(*rank)) {
            let is_between_two = matches!(plan.collective, Collective::SendRecv { .. })
                || cause::ends_that_differ(plan, mismatch, self.scenario.ranks).is_some();
            let must_fail = cause::must_fail(plan, mismatch, rank, self.scenario.ranks);
            if is_between_two && !must_fail {
                // Messages are numbered apart: a rank that only sends may have ended its call
                // before it hears of the mismatch. Where only two ranks know the lengths, other
                // ranks may end later calls that are under way at the same time.
                continue;
            }
            let Some((fault, at)) = &self.ranks[rank as usize].fault else {
                let what =
                    format!("rank {rank} never learned that rank {} called something else", mismatch.rank);
                return Err(self.failure(Checker::Cause, what));
            };
            if !must_fail {
                continue;
            }
            if self.returned[call][rank as usize] {
                let what = format!(
                    "rank {rank} returned from call {call}, in which rank {} differed",
                    mismatch.rank
                );
                return Err(self.failure(Checker::Cause, what));
            }
            let entries: Option<Vec<Nanos>> = (0..self.scenario.ranks)
                .filter(|rank| self.scenario.plan(call, *rank).is_some())
                .map(|rank| self.entered[call][rank as usize])
                .collect();
            let Some(last) = entries.and_then(|entries| entries.into_iter().max()) else { continue };
            let freezes = FREEZE_MAX * self.scenario.faults.timed.len() as u32;
            if is_alone && *at > last + MISMATCH_NOTICED_WITHIN + freezes {
                let what = format!("rank {rank} learned only after {:?}: {fault}", at.since(last));
                return Err(self.failure(Checker::Liveness, what));
            }
        }
        Ok(())
    }
}

impl CallMemory {
    fn new(
        device: &mut dyn pleach_transport::Device,
        scenario: &Scenario,
        rank: Rank,
        call: usize,
        plan: &CallPlan,
    ) -> Self {
        let ranks = scenario.ranks;
        let given = oracle_input(scenario.seed, call, rank, plan, ranks);
        let outputs = plan.collective.output_parts(rank, ranks);
        let has_input = !plan.collective.input_parts(rank, ranks).is_empty();
        let has_output = !outputs.is_empty();
        let (input_registered, output_registered) = plan.registered[rank as usize];
        let skew = (call * 3 + rank as usize) % SKEW_ELEMENTS * plan.data_type.bytes();
        let mut junk = vec![0xee; plan.bytes_of(outputs)];
        let overlap = plan.overlap(rank, ranks);
        let (input, output) = match &overlap {
            Some(Overlap::InputInOutput(range)) => {
                junk[range.clone()].copy_from_slice(&given);
                (None, Some(Guarded::new(device, &junk, output_registered, skew)))
            }
            Some(Overlap::OutputInInput(_)) => {
                (Some(Guarded::new(device, &given, input_registered, skew)), None)
            }
            None => (
                has_input.then(|| Guarded::new(device, &given, input_registered, skew)),
                has_output.then(|| Guarded::new(device, &junk, output_registered, skew)),
            ),
        };
        Self { input, output, overlap, given }
    }

    /// Input and output.
    fn bytes(&mut self) -> (Bytes, Bytes) {
        let input = self.input.as_mut().map_or(Bytes::None, Guarded::bytes);
        let output = self.output.as_mut().map_or(Bytes::None, Guarded::bytes);
        match (&self.overlap, &mut self.input, &mut self.output) {
            (Some(Overlap::InputInOutput(range)), _, Some(whole)) => {
                (whole.part(range.start, range.len()), output)
            }
            (Some(Overlap::OutputInInput(range)), Some(whole), _) => {
                (input, whole.part(range.start, range.len()))
            }
            _ => (input, output),
        }
    }

    fn slices(&self) -> impl Iterator<Item = &Guarded> {
        self.input.iter().chain(&self.output)
    }

    fn report(&self, world: &sim::World, rank: Rank, kind: AccessKind) {
        self.slices().for_each(|slice| slice.report(world, rank, kind));
    }

    fn refill(&mut self) {
        self.input.iter_mut().chain(&mut self.output).for_each(Guarded::refill);
    }

    fn broken_guard(&self) -> Option<isize> {
        self.slices().find_map(Guarded::broken_guard)
    }

    fn has_changed_input(&self) -> bool {
        let Some(content) = self.input.as_ref().map(Guarded::content) else { return false };
        match &self.overlap {
            Some(Overlap::OutputInInput(output)) => {
                content[..output.start] != self.given[..output.start]
                    || content[output.end..] != self.given[output.end..]
            }
            _ => content != self.given,
        }
    }

    fn output(&self) -> Option<Vec<u8>> {
        match (&self.overlap, &self.input) {
            (Some(Overlap::OutputInInput(range)), Some(input)) => {
                Some(input.content()[range.clone()].to_vec())
            }
            _ => self.output.as_ref().map(Guarded::content),
        }
    }
}
