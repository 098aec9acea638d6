//! Logs of real ranks, and what a policy does when it is told them again.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use pleach_training::replay::{LogError, replay, replay_all};
use pleach_training::{Learner, Sgd, TrainError, Trainer};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::Rank;
use pleach_vocabulary::random::Random;

use super::checkpoints::Folder;
use super::model::{Linear, STEPS, scheme};
use super::real::{ASYNCHRONOUS, DETERMINISTIC, with_group};

/// The step of the checkpoint.
const HALF: u64 = 11;

/// The rank whose loss is none where a training fails.
const FAILING_RANK: Rank = 2;

/// Trains with a log, from a checkpoint if there is one, to a loss that is none or to the end.
fn train_logged(text: &str, logs: &Path, checkpoints: &Path, fails_in: Option<u64>) {
    let is_resumed = checkpoints.exists();
    with_group(Fabric::Shm, |group| {
        let layout = Linear.layout();
        let trainer = Trainer::new(&group, &scheme(text), &layout, STEPS).expect("has memory");
        let mut trainer = trainer.logged(logs).expect("there is space");
        let mut sgd = Sgd::new(layout.parameters(), 0.005, 0.0);
        if is_resumed {
            trainer.restore(checkpoints).expect("is of this training");
        }
        let mut run = || -> Result<(), TrainError> {
            while let Some(mut step) = trainer.step()? {
                let number = step.number();
                let (parameters, gradient) = step.vectors()?;
                let loss = Linear.gradient(group.rank(), number, parameters, gradient);
                let fails = fails_in == Some(number) && group.rank() == FAILING_RANK;
                let loss = if fails { f32::NAN } else { loss };
                step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
                if trainer.next_step() == HALF && !is_resumed && fails_in.is_none() {
                    trainer.save(checkpoints, &[])?;
                }
            }
            Ok(())
        };
        assert_eq!(run().is_ok(), fails_in.is_none(), "{text}");
        if fails_in.is_none() {
            trainer.finish().expect("ends");
            group.close().expect("all ranks close");
        }
    });
}

#[test]
fn a_policy_that_is_told_a_log_does_the_same_again() {
    for text in DETERMINISTIC.into_iter().chain(ASYNCHRONOUS).chain(["elastic-bsp:lookahead=7"]) {
        let (logs, checkpoints) = (Folder::new("logs"), Folder::new("logged"));
        // The first log has a checkpoint on the way, and the second begins with it.
        for begins_with in ["\"Start\"", "\"Resume\""] {
            train_logged(text, logs.path(), checkpoints.path(), None);
            let all = replay_all(logs.path()).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(all.len(), 4, "{text}");
            for (rank, replayed) in (0..).zip(&all) {
                assert!(replayed.is_complete && replayed.rank == rank, "{text}");
                assert_eq!(replayed.scheme, scheme(text).to_string());
                assert!(replayed.events > STEPS - HALF && replayed.actions > STEPS - HALF, "{text}");
            }
            let log = fs::read_to_string(logs.path().join("rank-1.log")).expect("was written");
            let first = log.lines().find(|line| line.contains("\"at\"")).expect("has events");
            assert!(first.contains(begins_with), "{text}: {first}");
        }
    }
}

#[test]
fn the_log_of_a_training_that_failed_is_replayed_until_there() {
    let (logs, none) = (Folder::new("failed-logs"), Folder::new("none"));
    train_logged("gossip:direction=push", logs.path(), none.path(), Some(7));
    for replayed in replay_all(logs.path()).expect("is whole until there") {
        // The others may hear of it before they have made so many steps.
        let least = if replayed.rank == FAILING_RANK { 7 } else { 1 };
        assert!(!replayed.is_complete && replayed.events >= least, "{replayed:?}");
    }
}

#[test]
fn an_action_that_differs_is_shown_with_its_line_and_logs_that_are_none_are_refused() {
    let (logs, none) = (Folder::new("changed-logs"), Folder::new("none"));
    train_logged("diloco:every=4", logs.path(), none.path(), None);
    let file = logs.path().join("rank-3.log");
    let log = fs::read_to_string(&file).expect("was written");
    let changed = |change: &dyn Fn(&str) -> String| {
        let text = change(&log);
        assert_ne!(text, log, "the change finds its place");
        fs::write(&file, text).expect("there is space");
        replay_all(logs.path()).expect_err("it was changed")
    };
    let error = changed(&|log| log.replacen("\"learning_rate\":0.7", "\"learning_rate\":0.5", 1));
    let LogError::Different { line, event, logged, replayed, .. } = &error else { panic!("{error}") };
    let outer = log.lines().position(|line| line.contains("learning_rate")).expect("has an outer step");
    assert_eq!(*line, outer as u64 + 1);
    assert!(event.contains("Averaged") && logged.contains("0.5") && replayed.contains("0.7"), "{error}");
    let error = changed(&|log| log.replacen("{\"Ready\":0}", "{\"Ready\":9}", 1));
    assert!(matches!(&error, LogError::Form { reason, .. } if reason.contains("Ready(9)")), "{error}");
    let error = changed(&|log| log.replacen("[\"Computed\"", "[\"Computes\"", 1).replacen("at", "it", 1));
    assert!(matches!(&error, LogError::Form { .. }), "{error}");
    let error = changed(&|log| log.replacen("\"ranks\":4", "\"ranks\":5", 1));
    assert!(matches!(&error, LogError::Folder { .. } | LogError::Different { .. }), "{error}");
    fs::remove_file(&file).expect("is there");
    let error = replay_all(logs.path()).expect_err("a log is missing");
    assert!(matches!(&error, LogError::Folder { .. }), "{error}");
    let error = replay(none.path()).expect_err("is none");
    assert!(matches!(error, LogError::Io { .. }), "{error}");
}

/// A log with a change that a person, a disk or another program might make.
fn with_a_change(log: &[u8], random: &mut Random) -> Vec<u8> {
    /// Numbers at the ends of their types, and one that is none.
    const NUMBERS: [&str; 7] = ["0", "1", "7", "4294967295", "18446744073709551615", "-1", "1e300"];
    let mut bytes = log.to_vec();
    let mut lines: Vec<&[u8]> = log.split_inclusive(|byte| *byte == b'\n').collect();
    let (one, other) = (random.index(lines.len()), random.index(lines.len()));
    match random.index(7) {
        0 => {
            let place = random.index(bytes.len());
            bytes[place] ^= 1 << random.index(8);
            return bytes;
        }
        1 => {
            bytes.truncate(random.index(bytes.len()));
            return bytes;
        }
        2 | 3 => {
            let digits: Vec<usize> = (0..log.len()).filter(|place| log[*place].is_ascii_digit()).collect();
            let begin = digits[random.index(digits.len())];
            let end = (begin..log.len()).find(|place| !log[*place].is_ascii_digit()).unwrap_or(log.len());
            bytes.splice(begin..end, NUMBERS[random.index(NUMBERS.len())].bytes());
            return bytes;
        }
        4 => lines.swap(one, other),
        5 => lines.insert(one, lines[other]),
        _ => drop(lines.remove(one)),
    }
    lines.concat()
}

#[test]
fn a_log_that_was_changed_is_refused_or_replayed_and_panics_nowhere() {
    /// Changes of each log.
    const CHANGES: u64 = 150;
    for text in [
        "sync:bucket=16",
        "local-sgd:every=3,warmup=4",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "gossip",
        "gossip:direction=push",
        "gossip:direction=push-sum",
        "gossip:direction=push-sum,peer=ring",
        "easgd:every=3",
        "easgd:every=3,mode=sync",
        "easgd:every=3,mode=round-robin",
        "downpour:every=3",
        "ssp:staleness=1",
        "dssp:low=1,high=4",
        "bap:distance=9",
        "asp",
        "eager",
        "bidmach:threshold=0.5",
        "elastic-bsp:lookahead=7",
    ] {
        let (logs, checkpoints) = (Folder::new("whole-logs"), Folder::new("whole-logged"));
        train_logged(text, logs.path(), checkpoints.path(), None);
        let mut whole = vec![fs::read(logs.path().join("rank-0.log")).expect("was written")];
        // This one begins with what the policy remembered.
        train_logged(text, logs.path(), checkpoints.path(), None);
        whole.push(fs::read(logs.path().join("rank-1.log")).expect("was written"));
        let file = logs.path().join("changed.log");
        for log in &whole {
            let mut refused = 0;
            for seed in 0..CHANGES {
                let changed = with_a_change(log, &mut Random::new(seed));
                fs::write(&file, &changed).expect("there is space");
                let replayed = catch_unwind(|| replay(&file));
                let line = || String::from_utf8_lossy(&changed[..changed.len().min(200)]).into_owned();
                let replayed = replayed.unwrap_or_else(|_| panic!("{text}, seed {seed}: {}", line()));
                refused += u64::from(replayed.is_err());
            }
            assert!(refused > CHANGES / 3, "{text}: only {refused} changes of {CHANGES} were found");
        }
    }
}
