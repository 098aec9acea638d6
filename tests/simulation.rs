//! Whole groups in virtual time: seeds that failed once, fresh ones, and mutants that checkers
//! must catch.

use std::process::Command;

use pleach::collectives::engine::DEADLOCK_AFTER;
use pleach::collectives::simulate::{
    ABORT_NOTICED_WITHIN, Abort, CallPlan, Checker, ComputeMutant, Limits, Mismatch, Scenario, TIMEOUT_FAR,
    TrialReport, run,
};
use pleach::schedule::generate::{Access, Algorithm};
use pleach::transport::Nanos;
use pleach::transport::sim::{Fault, FaultKinds, Faults, Mutant, Network, Random};
use pleach::{Collective, DataType};

/// Fresh seeds in every test run.
const FRESH_SEEDS: u64 = 150;
/// Where they begin; each release may move it on.
const FRESH_FROM: u64 = 1_000_000;
/// Seeds within which a mutant must be caught.
const MUTANT_SEEDS: u64 = 60;
/// Scenarios that are looked at for each mutant: where a rank's caller is the first to read what
/// came, the wrong result is seen before the race.
const CAUGHT: usize = 8;
/// Scenarios at least that a lost dependency shows in.
const CAUGHT_MIN: usize = 3;
/// Scenarios of a rank that aborts, loses its peer and refuses it.
const REFUSAL_SEEDS: u64 = 60;
/// Scenarios of a rank that aborts, and nothing else that ends a group.
const ABORT_SEEDS: u64 = 60;
/// Scenarios of messages of all forms.
const MESSAGE_SEEDS: u64 = 60;
/// Scenarios in which ranks may be late.
const LATE_SEEDS: u64 = 40;
/// Scenarios of ranks that wait for each other.
const CYCLE_SEEDS: u64 = 40;

fn holds(seed: u64, limits: &Limits) -> TrialReport {
    let scenario = Scenario::draw(seed, limits);
    match run(&scenario, None) {
        Ok(report) => report,
        Err(failure) => panic!(
            "{failure}\n{scenario}\nrun it again by 'pleach sim --seed {seed}{} --faults {}'",
            limits.ranks.map_or(String::new(), |ranks| format!(" --ranks {ranks}")),
            limits.faults
        ),
    }
}

fn any() -> Limits {
    Limits { ranks: None, faults: FaultKinds::all() }
}

#[test]
fn seeds_that_failed_once_hold() {
    for line in include_str!("seeds.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let seed = words.next().and_then(|word| word.parse().ok()).expect("a seed");
        let mut limits = any();
        for word in words {
            match word.split_once('=') {
                Some(("ranks", ranks)) => limits.ranks = Some(ranks.parse().expect("a number of ranks")),
                Some(("faults", list)) => limits.faults = list.parse().expect("faults"),
                _ => panic!("'{word}' in seeds.txt"),
            }
        }
        holds(seed, &limits);
    }
}

#[test]
fn fresh_seeds_hold() {
    let reports: Vec<TrialReport> =
        (FRESH_FROM..FRESH_FROM + FRESH_SEEDS).map(|seed| holds(seed, &any())).collect();
    let succeeded: u64 = reports.iter().map(|report| report.succeeded).sum();
    let failed: u64 = reports.iter().map(|report| report.failed).sum();
    assert!(succeeded > 10 * FRESH_SEEDS && failed > FRESH_SEEDS, "{succeeded} succeeded, {failed} failed");
}

#[test]
fn rounds_with_late_ranks_hold_and_leave_the_calls_of_a_seed_as_they_were() {
    let limits = |faults: &str| Limits { ranks: None, faults: faults.parse().expect("faults") };
    let [with, without] = ["delay,reorder,freeze,late", "delay,reorder,freeze"].map(limits);
    let mut late = 0;
    for seed in 0..LATE_SEEDS {
        let [found, of_calls] = [&with, &without].map(|limits| holds(seed, limits));
        if Scenario::draw(seed, &with).is_late {
            late += 1;
            assert!(found.succeeded > of_calls.succeeded && found.events > of_calls.events, "seed {seed}");
            assert_eq!(found.failed, of_calls.failed, "seed {seed}");
        } else {
            assert_eq!(found, of_calls, "seed {seed}");
        }
    }
    assert!(late > LATE_SEEDS / 4, "{late} of {LATE_SEEDS} seeds");
    let arguments = ["sim", "--seed", "7", "--seeds", "12", "--ranks", "3", "--faults", "late"];
    let ran = Command::new(env!("CARGO_BIN_EXE_pleach")).args(arguments).output().expect("pleach starts");
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && text.contains("everything held"), "{text}");
}

#[test]
fn a_seed_gives_the_same_trace_twice() {
    for seed in 0..10 {
        assert_eq!(holds(seed, &any()), holds(seed, &any()), "seed {seed}");
    }
}

/// What catches this in the first scenarios that it shows in; red when nothing does.
fn caught_by(change: impl Fn(&mut Scenario)) -> Vec<Checker> {
    let limits = Limits { ranks: None, faults: FaultKinds::harmless() };
    let found = (0..MUTANT_SEEDS).filter_map(|seed| {
        let mut scenario = Scenario::draw(seed, &limits);
        (scenario.mismatch, scenario.abort) = (None, None);
        change(&mut scenario);
        run(&scenario, None).err().map(|failure| failure.checker)
    });
    found.take(CAUGHT).collect()
}

#[test]
fn a_signal_before_its_bytes_is_caught_as_a_race() {
    let checkers = caught_by(|scenario| scenario.world_mutant = Some(Mutant::SignalBeforeBytes));
    assert!(checkers.contains(&Checker::Race), "{checkers:?}");
}

#[test]
fn swapped_signals_are_caught_as_a_race() {
    let checkers = caught_by(|scenario| scenario.world_mutant = Some(Mutant::SignalsSwapped));
    assert!(checkers.contains(&Checker::Race), "{checkers:?}");
}

#[test]
fn a_source_that_is_read_after_done_is_caught_as_a_race() {
    let checkers = caught_by(|scenario| scenario.world_mutant = Some(Mutant::SourceReadAfterDone));
    assert!(checkers.contains(&Checker::Race), "{checkers:?}");
}

#[test]
fn a_signal_that_is_submitted_after_done_and_overtakes_is_caught_as_a_race() {
    let checkers = caught_by(|scenario| scenario.world_mutant = Some(Mutant::SignalAfterDone));
    assert!(checkers.contains(&Checker::Race), "{checkers:?}");
}

#[test]
fn a_schedule_that_lost_a_dependency_after_its_proof_is_caught() {
    let checkers = caught_by(|scenario| {
        scenario.lost_dependency = Some((0, scenario.seed.wrapping_mul(0x9e37_79b9)));
        // What takes no time is never waited for.
        scenario.is_immediate = false;
    });
    let is_meant = |checker: &Checker| matches!(checker, Checker::Race | Checker::Result | Checker::Equality);
    assert!(checkers.len() >= CAUGHT_MIN && checkers.iter().all(is_meant), "{checkers:?}");
}

#[test]
fn a_severed_peer_that_writes_is_caught_by_the_silence_checker() {
    let checkers = caught_by(|scenario| {
        scenario.world_mutant = Some(Mutant::SeveredPeerWrites);
        // So slow that much is still on the wire when everybody has been severed.
        let wire = std::time::Duration::from_millis(3);
        scenario.network = Network::full_mesh(scenario.ranks, 1_000_000, wire);
        scenario.passive = true;
        scenario.abort = Some(Abort { rank: 0, after: 4 * wire });
    });
    assert!(checkers.contains(&Checker::Fence), "{checkers:?}");
}

#[test]
fn a_reduction_that_is_applied_twice_is_caught_by_the_oracle() {
    let checkers = caught_by(|scenario| scenario.compute_mutant = Some(ComputeMutant::Twice));
    assert!(checkers.contains(&Checker::Result), "{checkers:?}");
}

#[test]
fn a_reduction_that_is_called_complete_too_early_is_caught_by_the_oracle() {
    let checkers = caught_by(|scenario| scenario.compute_mutant = Some(ComputeMutant::Unfinished));
    assert!(checkers.contains(&Checker::Result), "{checkers:?}");
}

/// Without the words of the others each survivor has the fault that it has found itself.
#[test]
fn survivors_that_do_not_hear_each_other_are_caught_by_the_agreement_checker() {
    let checkers = caught_by(|scenario| {
        scenario.world_mutant = Some(Mutant::UrgentLost);
        scenario.faults.timed.push((Nanos(1), Fault::RankDeath { rank: 0 }));
    });
    assert!(checkers.contains(&Checker::Agreement), "{checkers:?}");
}

#[test]
fn a_rank_that_enters_late_is_waited_for() {
    let limits = Limits { ranks: Some(4), faults: FaultKinds::default() };
    for seed in 0..20 {
        let mut scenario = Scenario::draw(seed, &limits);
        (scenario.mismatch, scenario.abort, scenario.timeout) = (None, None, TIMEOUT_FAR);
        scenario.faults = Faults::none();
        for (number, call) in scenario.calls.iter_mut().enumerate() {
            call.late = Some((number as u32 % 4, std::time::Duration::from_millis(200)));
        }
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        assert_eq!(report.failed, 0);
    }
}

/// A harmless scenario in which rank 1 receives from, or sends to, rank 0 while the others are in
/// the last barrier, and every rank makes one call after the other.
fn with_cycle(seed: u64) -> Scenario {
    let limits = Limits { ranks: Some(2 + seed as u32 % 5), faults: FaultKinds::harmless() };
    let mut scenario = Scenario::draw(seed, &limits);
    (scenario.abort, scenario.timeout) = (None, TIMEOUT_FAR);
    scenario.depth.fill(1);
    let call = scenario.calls.len() - 1;
    let (from, to) = if seed.is_multiple_of(3) { (1, 0) } else { (0, 1) };
    // Few bytes would be sent without waiting for anybody.
    let least = if from == 1 { 1 << 12 } else { 1 };
    let (data_type, count) = (DataType::F32, least + seed as usize * 777);
    let barrier = scenario.calls[call].clone();
    let instead = CallPlan { collective: Collective::SendRecv { from, to }, data_type, count, ..barrier };
    scenario.mismatch = Some(Mismatch { call, rank: 1, instead });
    scenario
}

#[test]
fn a_message_against_a_collective_is_a_mismatch_within_a_tenth_of_a_second() {
    for seed in 0..CYCLE_SEEDS {
        let scenario = with_cycle(seed);
        // It checks that every rank learns of it, and how late.
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        assert_eq!(report.failed, u64::from(scenario.ranks), "{scenario}");
    }
}

/// Messages that come unasked, that are asked for and that are read in place, in both directions
/// and one after the other, as many under way as ranks like.
#[test]
fn messages_of_all_forms_keep_out_of_each_others_way() {
    for seed in 0..MESSAGE_SEEDS {
        let limits = Limits { ranks: Some(2), faults: FaultKinds::harmless() };
        let mut scenario = Scenario::draw(seed, &limits);
        (scenario.mismatch, scenario.abort, scenario.timeout) = (None, None, TIMEOUT_FAR);
        let barrier = scenario.calls.pop().expect("ends with a barrier");
        let mut random = Random::new(seed).split("messages");
        // Bursts in one direction: that is when a sender is ahead.
        scenario.calls = (0..60)
            .map(|number| {
                let from = u32::from(number / 15 % 2 == 1);
                let form = random.below(if scenario.maps { 5 } else { 4 });
                let is_eager = form < 3;
                let most = if is_eager { 8 << 10 } else { 200 << 10 };
                CallPlan {
                    collective: Collective::SendRecv { from, to: 1 - from },
                    count: random.below(most) as usize,
                    algorithm: Some(if is_eager { Algorithm::Eager } else { Algorithm::Direct }),
                    access: if form == 4 { Access::Mapped } else { Access::Put },
                    registered: vec![(random.coin(), random.coin()); 2],
                    ..barrier.clone()
                }
            })
            .chain([barrier.clone()])
            .collect();
        scenario.depth.fill(1 + seed as usize % 12);
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        assert_eq!(report.failed, 0, "{scenario}");
    }
}

/// A rank whose group has failed lets go of its memory, and why it failed may come later than that,
/// or not at all.
#[test]
fn a_rank_that_aborted_and_refuses_is_not_blamed_for_the_refusal() {
    let faults: FaultKinds = "delay,reorder,queue-full,one-sided-loss".parse().expect("faults");
    let limits = Limits { ranks: Some(2), faults };
    for seed in 0..REFUSAL_SEEDS {
        let mut scenario = Scenario::draw(seed, &limits);
        (scenario.mismatch, scenario.timeout, scenario.maps) = (None, TIMEOUT_FAR, false);
        let after = std::time::Duration::from_micros(100 + 5 * seed);
        scenario.abort = Some(Abort { rank: 1, after });
        let lost_at = after + std::time::Duration::from_micros(seed % 20);
        scenario.faults.timed.clear();
        scenario.faults.timed.push((Nanos::ZERO + lost_at, Fault::OneSidedLoss { rank: 1, peer: 0 }));
        // It checks that only what was injected is named as the cause.
        run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
    }
}

/// The checkers hold each of these to [`ABORT_NOTICED_WITHIN`].
#[test]
fn an_abort_ends_the_calls_of_all_ranks_in_time() {
    let limits = Limits { ranks: None, faults: FaultKinds::harmless() };
    let mut failed = 0;
    for seed in 0..ABORT_SEEDS {
        let mut scenario = Scenario::draw(seed, &limits);
        (scenario.mismatch, scenario.timeout) = (None, TIMEOUT_FAR);
        let after = std::time::Duration::from_micros(20 * (seed + 1));
        scenario.abort = Some(Abort { rank: seed as u32 % scenario.ranks, after });
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        failed += u64::from(report.failed > 0);
    }
    assert!(failed > ABORT_SEEDS / 2, "of {ABORT_SEEDS} aborts {failed} came while a rank was in a call");
}

#[test]
fn an_abort_that_is_told_late_is_caught_by_the_liveness_checker() {
    let checkers = caught_by(|scenario| {
        scenario.timeout = TIMEOUT_FAR;
        scenario.network = Network::full_mesh(scenario.ranks, 1_000_000_000, 2 * ABORT_NOTICED_WITHIN);
        scenario.abort = Some(Abort { rank: 0, after: std::time::Duration::from_millis(1) });
    });
    assert!(checkers.contains(&Checker::Liveness), "{checkers:?}");
}

#[test]
fn ranks_that_are_slow_in_no_call_are_no_mismatch() {
    for seed in 0..CYCLE_SEEDS {
        let mut scenario = with_cycle(seed);
        scenario.mismatch = None;
        // Every rank makes every call at its own time, messages too.
        for (number, call) in scenario.calls.iter_mut().enumerate() {
            call.late = Some((number as u32 % scenario.ranks, 4 * DEADLOCK_AFTER));
        }
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        assert_eq!(report.failed, 0, "{scenario}");
    }
}

#[test]
fn the_command_tells_what_it_ran_and_refuses_unknown_faults_with_the_list() {
    let pleach = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_pleach")).args(arguments).output().expect("pleach starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, stdout, stderr) = pleach(&["sim", "--seed", "3", "--seeds", "4", "--faults", "none"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.starts_with("4 seeds from 3: ") && stdout.contains("hash"), "{stdout}");
    assert_eq!(pleach(&["sim", "--seed", "3", "--seeds", "4", "--faults", "none"]).1, stdout);
    let (code, stdout, stderr) = pleach(&["sim", "--faults", "gremlin"]);
    assert_eq!((code, stdout.as_str()), (Some(2), ""));
    assert!(stderr.contains("'gremlin'") && stderr.contains("rank-death"), "{stderr}");
}

#[test]
fn a_trace_that_cannot_be_written_whole_is_no_success() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    let output =
        command.args(["sim", "--ranks", "3", "--trace", "/dev/full"]).output().expect("pleach starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.starts_with("error: trace not whole: /dev/full") && errors.lines().count() == 1,
        "{errors}"
    );
}
