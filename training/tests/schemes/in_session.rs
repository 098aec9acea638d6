//! Trainings in sessions: what a step needs to count, and how often it does.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use pleach_collectives::session::{Elastic, Heal, Session};
use pleach_collectives::{Options, Reproducible};
use pleach_training::interpreter::{Interpreter, Request};
use pleach_training::policy::{Event, OperationId, Outcome, Vector};
use pleach_training::{AfterLoss, Layout, Learner, Refusal, Scheme, Sgd, TrainError, Trained, Trainer};
use pleach_transport::clock::{self, Nanos};
use pleach_transport::rendezvous::{Fabric, FabricChoice};

use super::model::{Linear, Plain, STEPS, scheme};
use super::ranks;

const RANKS: u32 = 3;
/// So many that the others are a majority when two end, one after the other: nobody sees that a
/// thread has ended.
pub(crate) const MANY: u32 = 4;

/// How long a step takes until a process has joined.
const STEP_BEFORE: Duration = Duration::from_millis(3);

pub(crate) const LEARNING_RATE: f32 = 0.02;
pub(crate) const MOMENTUM: f32 = 0.5;

/// Schemes whose ranks make steps by themselves, and whose result does not depend on times.
const BY_THEMSELVES: [&str; 9] = [
    "local-sgd:every=3",
    "local-sgd:every=1,compress=bf16",
    "diloco:every=4",
    "diloco:every=6,fragments=3,delay=2,mix=0.5",
    "easgd:every=3,mode=sync",
    "eamsgd:every=2,mode=sync,momentum=0.5",
    "bidmach",
    "bidmach:every=2,rate=0.5,dimensions=1",
    "elastic-bsp:lookahead=1",
];

/// Runs `body` as every member of a session that adds in the order of ranks.
fn with_session<T: Send>(fabric: Fabric, body: impl Fn(Session) -> T + Sync) -> Vec<T> {
    with_session_of(RANKS, fabric, body)
}

fn with_session_of<T: Send>(size: u32, fabric: Fabric, body: impl Fn(Session) -> T + Sync) -> Vec<T> {
    let folder = ranks::Folder::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                let (folder, body) = (&folder, &body);
                scope.spawn(move || {
                    let mut options = Options::new(ranks::world(rank, size, &folder.0));
                    (options.fabric, options.spin) = (FabricChoice::Only(fabric), ranks::SPIN);
                    options.reproducible = Reproducible::PerWorldSize;
                    let session = Session::join(&options, &Elastic::between(1, size));
                    body(session.unwrap_or_else(|error| panic!("rank {rank}: {error}")))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Trains the model in a session. `leaves`: the steps that a member leaves without an update when
/// it comes to them for the first time.
fn train(session: Session, text: &str, leaves: &[u64]) -> Result<(Trained, Vec<u64>), TrainError> {
    let layout = Linear.layout();
    let mut trainer = Trainer::in_session(session, &scheme(text), &layout, STEPS)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
    let (mut left, mut computed) = (Vec::new(), Vec::new());
    while let Some(mut step) = trainer.step()? {
        let (number, (rank, ranks)) = (step.number(), step.members());
        assert_eq!(ranks, RANKS);
        computed.push(number);
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(rank, number, parameters, gradient);
        if leaves.contains(&number) && !left.contains(&number) {
            left.push(number);
            continue;
        }
        // Members report in different orders.
        let buckets = step.buckets().len();
        for bucket in 0..buckets {
            step.ready((bucket + rank as usize) % buckets)?;
        }
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    Ok((trainer.finish()?, computed))
}

/// The bits of a training in a group.
fn in_a_group(fabric: Fabric, text: &str) -> Vec<u32> {
    let by_rank = |options: &mut Options| options.reproducible = Reproducible::PerWorldSize;
    let trained = ranks::with_group(fabric, RANKS, by_rank, |group| {
        let layout = Linear.layout();
        let mut trainer = Trainer::new(&group, &scheme(text), &layout, STEPS)?.checked();
        trainer.parameters_mut().copy_from_slice(&Linear.initial());
        let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
        while let Some(mut step) = trainer.step()? {
            let number = step.number();
            let (parameters, gradient) = step.vectors()?;
            let loss = Linear.gradient(group.rank(), number, parameters, gradient);
            step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
        }
        trainer.finish()
    });
    let trained: Vec<Trained> = trained.into_iter().collect::<Result<_, _>>().expect("all train");
    bits(&trained[0])
}

fn bits(trained: &Trained) -> Vec<u32> {
    trained.parameters.iter().map(|parameter| parameter.to_bits()).collect()
}

#[test]
fn members_that_nobody_disturbs_train_as_the_ranks_of_a_group() {
    let by_themselves = BY_THEMSELVES.iter().flat_map(|text| [(Fabric::Shm, *text), (Fabric::Tcp, *text)]);
    let together = [
        (Fabric::Shm, "sync"),
        (Fabric::Tcp, "sync"),
        (Fabric::Shm, "sync:bucket=16"),
        (Fabric::Tcp, "sync:bucket=16"),
        (Fabric::Tcp, "sync:bucket=24,compress=bf16"),
    ];
    for (fabric, text) in together.into_iter().chain(by_themselves) {
        let expected = in_a_group(fabric, text);
        for result in with_session(fabric, |session| train(session, text, &[])) {
            let (trained, computed) = result.expect("it trains");
            assert_eq!(bits(&trained), expected, "{text} over {fabric}");
            assert_eq!(computed, (0..STEPS).collect::<Vec<_>>());
            assert!(trained.parameters_equal && trained.guarantee_held, "{text} over {fabric}");
            assert_eq!(trained.ranks, RANKS);
        }
    }
}

#[test]
fn a_step_that_a_member_leaves_is_computed_again_by_all_and_counts_once() {
    let by_themselves = BY_THEMSELVES.map(|text| (Fabric::Shm, text));
    let together = [(Fabric::Shm, "sync:bucket=16"), (Fabric::Tcp, "sync")];
    for (fabric, text) in together.into_iter().chain(by_themselves) {
        let expected = in_a_group(fabric, text);
        let results = with_session(fabric, |session| {
            // The first step of all, one that two members leave, and the last one.
            let leaves: &[u64] = match session.seat().0 {
                0 => &[0, 9],
                1 => &[9],
                _ => &[4, STEPS - 1],
            };
            train(session, text, leaves)
        });
        for result in results {
            let (trained, computed) = result.expect("it trains");
            assert_eq!(bits(&trained), expected, "{text} over {fabric}");
            for step in 0..STEPS {
                let times = computed.iter().filter(|number| **number == step).count();
                let is_left = [0, 4, 9, STEPS - 1].contains(&step);
                // Two that leave one step may do so one after the other; and who had not begun the
                // step when another one left it computes it once.
                assert!((1..=if is_left { 3 } else { 1 }).contains(&times), "step {step}: {times} times");
            }
            assert!(trained.parameters_equal && trained.guarantee_held, "{text} over {fabric}");
        }
    }
}

#[test]
fn what_a_session_has_not_is_refused_by_name() {
    for result in with_session(Fabric::Shm, |session| {
        let mut trainer = Trainer::in_session(session, &scheme("sync"), &Linear.layout(), STEPS)?;
        let folder = std::env::temp_dir();
        for refused in [
            trainer.averaged().map(drop),
            trainer.save(&folder, &[]).map(drop),
            trainer.restore(&folder).map(drop),
            trainer.restore_parameters(&folder).map(drop),
        ] {
            assert!(matches!(refused, Err(TrainError::InSession { .. })), "{refused:?}");
        }
        assert!(trainer.session().is_some());
        // All members have begun the first step: none ends before the others have.
        let trained = trainer.finish()?;
        assert!(trained.parameters_equal);
        Ok::<(), TrainError>(())
    }) {
        result.expect("it ends");
    }
}

#[test]
fn a_session_that_has_made_steps_trains_nobody_who_lacks_the_parameters() {
    for refused in with_session(Fabric::Tcp, |mut session| {
        session.attempt(|group, _| group.barrier()).expect("nobody ends");
        Trainer::in_session(session, &scheme("sync"), &Linear.layout(), STEPS).map(drop)
    }) {
        assert!(matches!(refused, Err(TrainError::Late { step: 1, .. })), "{refused:?}");
    }
}

#[test]
fn a_session_whose_newcomers_have_no_states_before_their_first_step_trains_nobody() {
    let folder = ranks::Folder::new();
    let mut options = Options::new(ranks::world(0, 1, &folder.0));
    options.fabric = FabricChoice::Only(Fabric::Tcp);
    let mut elastic = Elastic::between(1, 1);
    elastic.heal = Heal::Hidden;
    let session = Session::join(&options, &elastic).expect("joins");
    let refused = Trainer::in_session(session, &scheme("sync"), &Linear.layout(), STEPS).map(drop);
    assert!(matches!(refused, Err(TrainError::HealsInStep)), "{refused:?}");
}

/// Trains until some steps after all members have come. Says when it makes its first step.
fn train_until_all_are_there(
    mut session: Session,
    begins: &Sender<u64>,
) -> Result<(Trained, Vec<u64>), TrainError> {
    let layout = Linear.layout();
    let mut velocity = session.state::<f32>("velocity", layout.parameters())?;
    let mut trainer = Trainer::in_session(session, &scheme("sync"), &layout, u64::MAX >> 1)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), 1e-3, 0.9);
    sgd.velocity_mut().copy_from_slice(&velocity);
    let (mut until, mut computed) = (u64::MAX, Vec::new());
    while let Some(mut step) = trainer.step()? {
        let (number, (rank, ranks)) = (step.number(), step.members());
        if ranks == RANKS {
            until = until.min(number + 10);
        }
        if number >= until {
            break;
        }
        if computed.is_empty() {
            begins.send(number).expect("the test listens");
        }
        computed.push(number);
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(rank, number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
        velocity.update(|kept| kept.copy_from_slice(sgd.velocity()));
    }
    Ok((trainer.finish()?, computed))
}

#[test]
fn a_process_that_joins_trains_on_with_what_the_others_have() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let folder = ranks::Folder::new();
        let (begins, begun) = channel();
        let join = |rank| {
            let mut options = Options::new(ranks::world(rank, RANKS - 1, &folder.0));
            (options.fabric, options.spin) = (FabricChoice::Only(fabric), ranks::SPIN);
            Session::join(&options, &Elastic::between(1, RANKS)).expect("joins")
        };
        let results: Vec<_> = thread::scope(|scope| {
            let start = |rank| {
                let (join, begins) = (&join, begins.clone());
                scope.spawn(move || train_until_all_are_there(join(rank), &begins))
            };
            let mut threads: Vec<_> = (0..RANKS - 1).map(start).collect();
            // The founders have begun.
            (0..RANKS - 1).for_each(|_| assert_eq!(begun.recv(), Ok(0)));
            threads.push(start(1));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let results: Vec<_> = results.into_iter().map(|result| result.expect("it trains")).collect();
        let [(founder, all), .., (newcomer, its_own)] = &results[..] else { panic!("three have trained") };
        assert!(results.iter().all(|(trained, _)| trained.parameters_equal && trained.guarantee_held));
        assert_eq!(bits(founder), bits(newcomer), "{fabric}");
        assert!(its_own[0] > 0 && all.ends_with(&its_own[1..]), "{fabric}: {its_own:?}");
    }
}

/// The time of a step that takes long.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn pause() {
    thread::sleep(STEP_BEFORE);
}

/// Trains with the data of its seat, slowly until all members have come. Says when it makes its
/// second step. Returns the steps that it has made.
fn train_beside_a_newcomer(
    session: Session,
    text: &str,
    begins: &Sender<()>,
) -> Result<(Trained, Vec<u64>), TrainError> {
    /// More than are made until a process has joined.
    const ALL: u64 = 600;
    let (layout, seat) = (Linear.layout(), session.seat().0);
    let mut trainer = Trainer::in_session(session, &scheme(text), &layout, ALL)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
    let mut computed = Vec::new();
    while let Some(mut step) = trainer.step()? {
        let (number, (_, ranks)) = (step.number(), step.members());
        if ranks < RANKS {
            pause();
        }
        if computed.len() == 1 {
            begins.send(()).expect("the test listens");
        }
        computed.push(number);
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(seat, number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    assert_eq!(computed.last(), Some(&(ALL - 1)), "{text}");
    Ok((trainer.finish()?, computed))
}

#[test]
fn a_process_that_joins_local_steps_begins_behind_the_last_exchange() {
    let texts = [
        ("local-sgd:every=3", 3),
        ("local-sgd:every=4,compress=bf16", 4),
        ("diloco:every=5", 5),
        ("local-sgd:every=1", 1),
        ("easgd:every=3,mode=sync", 3),
        ("eamsgd:every=2,mode=sync,momentum=0.5", 2),
        ("diloco:every=6,fragments=3,delay=2,mix=0.5", 2),
        ("diloco:every=4,delay=3", 1),
        ("bidmach:every=2,rate=0.5,dimensions=1", 2),
        ("bidmach", 1),
        ("elastic-bsp:lookahead=4", 1),
    ];
    for (fabric, (text, every)) in [Fabric::Shm, Fabric::Tcp].into_iter().cycle().zip(texts) {
        let folder = ranks::Folder::new();
        let (begins, begun) = channel();
        let join = |rank| {
            let mut options = Options::new(ranks::world(rank, RANKS - 1, &folder.0));
            (options.fabric, options.spin) = (FabricChoice::Only(fabric), ranks::SPIN);
            options.reproducible = Reproducible::PerWorldSize;
            Session::join(&options, &Elastic::between(1, RANKS)).expect("joins")
        };
        let results: Vec<_> = thread::scope(|scope| {
            let start = |rank| {
                let (join, begins) = (&join, begins.clone());
                scope.spawn(move || train_beside_a_newcomer(join(rank), text, &begins))
            };
            let mut threads: Vec<_> = (0..RANKS - 1).map(start).collect();
            (0..RANKS - 1).for_each(|_| assert_eq!(begun.recv(), Ok(())));
            threads.push(start(1));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let results: Vec<_> = results.into_iter().map(|result| result.expect("it trains")).collect();
        let [(founder, all), .., (newcomer, its_own)] = &results[..] else { panic!("three have trained") };
        for (trained, _) in &results {
            assert!(trained.parameters_equal && trained.guarantee_held, "{text} over {fabric}");
            assert_eq!(bits(trained), bits(founder), "{text} over {fabric}");
        }
        assert_eq!(*all, (0..all.len() as u64).collect::<Vec<_>>(), "{text}: no step is made again");
        let first = its_own[0];
        assert!(first > 0 && first.is_multiple_of(every), "{text} over {fabric}: {first}");
        assert_eq!(all[first as usize..], its_own[..], "{text} over {fabric}");
        if text == "local-sgd:every=3" || text == "local-sgd:every=1" {
            let expected = local_sgd_of(all.len() as u64, every, RANKS - 1, &[], Some((RANKS - 1, first)));
            assert_eq!(newcomer.parameters[..], expected[..], "{text} over {fabric}, from step {first}");
        }
        if text == "bidmach:every=2,rate=0.5,dimensions=1" {
            let expected = one_line(all.len() as u64, every, 0.5, RANKS - 1, (RANKS - 1, first));
            assert_eq!(newcomer.parameters[..], expected[..], "{text} over {fabric}, from step {first}");
        }
    }
}

/// How long a founder waits for a process that joins.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a process tries to join beyond the time for which the founders wait. It may have come
/// too late.
const JOIN_TIMEOUT: Duration = Duration::from_secs(3);

/// The steps of trainings that a process joins; whole periods.
const JOINED_STEPS: u64 = 12;

/// When a process joins those that have begun the training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joins {
    /// When all have begun, and nobody has made a step.
    BeforeTheFirstStep,
    /// While the last step is made, behind which the last exchange is.
    WithTheLastStep,
}

/// Trains so many steps. Each founder waits where a process is to join until that has asked to.
fn train_while_one_joins(
    session: Session,
    (text, steps): (&str, u64),
    joins: Joins,
    founder: Option<(&Sender<()>, &OnceLock<()>)>,
) -> Result<(Trained, Vec<u64>), TrainError> {
    let (layout, seat) = (Linear.layout(), session.seat().0);
    let mut trainer = Trainer::in_session(session, &scheme(text), &layout, steps)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let await_newcomer = |now: Joins| {
        if let Some((begins, has_asked)) = founder.filter(|_| now == joins) {
            begins.send(()).expect("the test listens");
            let until = clock::now() + PATIENCE;
            while has_asked.get().is_none() && clock::now() < until {
                pause();
            }
        }
    };
    await_newcomer(Joins::BeforeTheFirstStep);
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
    let mut computed = Vec::new();
    while let Some(mut step) = trainer.step()? {
        let number = step.number();
        if number + 1 == steps {
            await_newcomer(Joins::WithTheLastStep);
        }
        computed.push(number);
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(seat, number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    Ok((trainer.finish()?, computed))
}

/// One training of two founders, whom a process has asked to take in for so long when they go on.
/// The steps that the process has made; `None`: they have ended without it.
fn join_once(fabric: Fabric, text: &str, joins: Joins, margin: Duration) -> Option<Vec<u64>> {
    let (folder, has_asked, (begins, begun)) = (ranks::Folder::new(), OnceLock::new(), channel());
    let options = |rank| {
        let mut options = Options::new(ranks::world(rank, RANKS - 1, &folder.0));
        (options.fabric, options.spin) = (FabricChoice::Only(fabric), ranks::SPIN);
        options
    };
    let elastic = Elastic::between(1, RANKS);
    let told = (text, JOINED_STEPS);
    thread::scope(|scope| {
        let founder = |rank| {
            let (options, elastic, begins, has_asked) = (options(rank), &elastic, begins.clone(), &has_asked);
            scope.spawn(move || {
                let session = Session::join(&options, elastic).expect("joins");
                train_while_one_joins(session, told, joins, Some((&begins, has_asked)))
            })
        };
        let founders: Vec<_> = (0..RANKS - 1).map(founder).collect();
        (0..RANKS - 1).for_each(|_| assert_eq!(begun.recv(), Ok(())));
        let mut options = options(1);
        options.join_timeout = margin + JOIN_TIMEOUT;
        let elastic = &elastic;
        let newcomer = scope.spawn(move || {
            let session = Session::join(&options, elastic).ok()?;
            Some(train_while_one_joins(session, told, joins, None))
        });
        let until = clock::now() + margin;
        while clock::now() < until {
            pause();
        }
        has_asked.set(()).expect("once");
        let founders: Vec<_> = founders.into_iter().map(|thread| thread.join().unwrap()).collect();
        let newcomer = newcomer.join().unwrap();
        let its_own = newcomer.as_ref().and_then(|trained| trained.as_ref().ok()).map(|(_, own)| own.clone());
        for result in founders.into_iter().chain(newcomer) {
            let (trained, computed) =
                result.unwrap_or_else(|error| panic!("{text}, {joins:?}, {fabric}: {error}"));
            assert!(trained.parameters_equal && trained.guarantee_held, "{text}, {joins:?}, {fabric}");
            let first = computed.first().copied().unwrap_or(JOINED_STEPS);
            assert_eq!(computed, (first..JOINED_STEPS).collect::<Vec<_>>(), "{text}, {joins:?}, {fabric}");
        }
        its_own
    })
}

#[test]
fn a_process_joins_before_the_first_step_and_behind_the_last_exchange() {
    let texts = [
        "local-sgd:every=3",
        "diloco:every=4",
        "local-sgd:every=1",
        "easgd:every=3,mode=sync",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "bidmach",
        "elastic-bsp:lookahead=4",
    ];
    let cases = [(Joins::BeforeTheFirstStep, JOINED_STEPS), (Joins::WithTheLastStep, 0)];
    let all =
        texts.into_iter().chain(["easgd:every=1,mode=sync"]).flat_map(|text| cases.map(|case| (text, case)));
    for (fabric, (text, (joins, count))) in
        [Fabric::Shm, Fabric::Tcp, Fabric::Tcp].into_iter().cycle().zip(all)
    {
        // How long it takes until all members know that a process has come, nobody tells.
        let mut margins = (0..9).map(|doubled| Duration::from_millis(50) * 2_u32.pow(doubled));
        let comes_there = |margin| {
            join_once(fabric, text, joins, margin).is_some_and(|its_own| its_own.len() as u64 == count)
        };
        assert!(margins.any(comes_there), "{text}, {joins:?}, {fabric}: the process never came there");
    }
}

/// Trains in a session until a member that ends comes to its last step: it says nothing then.
/// Members take the data of their seats.
fn train_until(
    session: Session,
    text: &str,
    ends: &[(u32, u64)],
) -> Result<Option<(Trained, Vec<u64>)>, TrainError> {
    let (layout, seat) = (Linear.layout(), session.seat().0);
    let mut trainer = Trainer::in_session(session, &scheme(text), &layout, STEPS)?.checked();
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), LEARNING_RATE, MOMENTUM);
    let mut computed = Vec::new();
    while let Some(mut step) = trainer.step()? {
        let number = step.number();
        if ends.contains(&(seat, number)) {
            // To the others a session that is dropped is a process that has ended.
            return Ok(None);
        }
        computed.push(number);
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(seat, number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    Ok(Some((trainer.finish()?, computed)))
}

/// Local SGD as a loop over all ranks, of which some end before a step.
pub(crate) fn local_sgd(every: u64, ends: &[(u32, u64)]) -> Vec<f32> {
    local_sgd_of(STEPS, every, MANY, ends, None)
}

/// The same of so many steps and ranks, to which one comes before a step, with what all have.
fn local_sgd_of(
    steps: u64,
    every: u64,
    ranks: u32,
    ends: &[(u32, u64)],
    comes: Option<(u32, u64)>,
) -> Vec<f32> {
    looped((steps, ranks), ends, comes, |step, models| {
        if step.is_multiple_of(every) || step == steps {
            let mean = mean_of(models);
            models.iter_mut().for_each(|model| model.copy_from_slice(&mean));
        }
    })
}

/// Elastic averaging by `bidmach`, where all ranks are in one line. One comes with the model of the
/// first.
fn one_line(steps: u64, every: u64, rate: f32, ranks: u32, comes: (u32, u64)) -> Vec<f32> {
    looped((steps, ranks), &[], Some(comes), |step, models| {
        if step.is_multiple_of(every) {
            let mean = mean_of(models);
            for (x, mean) in models.iter_mut().flat_map(|model| model.iter_mut().zip(&mean)) {
                *x = (1.0 - rate) * *x + rate * mean;
            }
        }
        if step == steps {
            let mean = mean_of(models);
            models.iter_mut().for_each(|model| model.copy_from_slice(&mean));
        }
    })
}

/// Ranks that make so many steps, and do something with their models after each. Some end before a
/// step, and one comes before one, with what the first one has.
fn looped(
    (steps, ranks): (u64, u32),
    ends: &[(u32, u64)],
    comes: Option<(u32, u64)>,
    mut exchange: impl FnMut(u64, &mut [&mut Vec<f32>]),
) -> Vec<f32> {
    let initial = Linear.initial();
    let begin = |rank, parameters: &[f32]| {
        (rank, parameters.to_vec(), Sgd::new(initial.len(), LEARNING_RATE, MOMENTUM))
    };
    let mut ranks: Vec<(u32, Vec<f32>, Sgd)> = (0..ranks).map(|rank| begin(rank, &initial)).collect();
    let mut gradient = vec![0.0; initial.len()];
    for step in 0..steps {
        ranks.retain(|(rank, ..)| !ends.contains(&(*rank, step)));
        if let Some((rank, _)) = comes.filter(|(_, comes)| *comes == step) {
            let parameters = ranks[0].1.clone();
            ranks.push(begin(rank, &parameters));
        }
        for (rank, parameters, sgd) in &mut ranks {
            Linear.gradient(*rank, step, parameters, &mut gradient);
            sgd.step(parameters, &gradient);
        }
        let mut models: Vec<_> = ranks.iter_mut().map(|(_, parameters, _)| parameters).collect();
        exchange(step + 1, &mut models);
    }
    ranks.swap_remove(0).1
}

/// The mean, added up in the order of ranks.
fn mean_of(models: &[&mut Vec<f32>]) -> Vec<f32> {
    let mut mean = models[0].clone();
    for model in &models[1..] {
        mean.iter_mut().zip(model.iter()).for_each(|(mean, element)| *mean += element);
    }
    mean.iter_mut().for_each(|mean| *mean /= models.len() as f32);
    mean
}

#[test]
fn members_go_on_without_those_that_end_and_keep_their_own_steps() {
    let texts = ["sync:bucket=16", "elastic-bsp:lookahead=4", "local-sgd:every=8"];
    for text in texts.into_iter().chain(BY_THEMSELVES) {
        for (fabric, ends) in
            [(Fabric::Shm, &[(2, 7)][..]), (Fabric::Tcp, &[(0, 10)]), (Fabric::Shm, &[(1, 5), (0, 16)])]
        {
            let left = MANY - ends.len() as u32;
            let results = with_session_of(MANY, fabric, |session| train_until(session, text, ends));
            let mut trained = Vec::new();
            for (seat, result) in (0..).zip(results) {
                let result = result.unwrap_or_else(|error| panic!("{text}, {fabric}, seat {seat}: {error}"));
                assert_eq!(result.is_none(), ends.iter().any(|(ended, _)| *ended == seat), "{text}");
                trained.extend(result);
            }
            for (own, computed) in &trained {
                assert_eq!(bits(own), bits(&trained[0].0), "{text} over {fabric}, {ends:?}");
                assert!(own.guarantee_held && own.parameters_equal, "{text} over {fabric}, {ends:?}");
                assert_eq!(own.ranks, left, "{text}");
                if !text.starts_with("sync") {
                    // A step by itself is never made again.
                    assert_eq!(*computed, (0..STEPS).collect::<Vec<_>>(), "{text}");
                }
            }
            if text == "local-sgd:every=3" || text == "local-sgd:every=8" {
                let every = text.rsplit('=').next().and_then(|every| every.parse().ok());
                let expected = local_sgd(every.expect("a number"), ends);
                assert_eq!(&trained[0].0.parameters[..], &expected[..], "{text} over {fabric}, {ends:?}");
            }
        }
    }
}

#[test]
fn each_scheme_goes_on_after_a_loss_or_is_refused_with_the_reason() {
    let layout = Layout::of(&[8, 8]);
    let more = [
        "sync:compress=f8",
        "sync:compress=bf16",
        "sync:bucket=16",
        "local-sgd:warmup=3",
        "local-sgd:compress=f8",
        "diloco:compress=f8",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "easgd:mode=sync",
        "eamsgd:mode=sync",
        "easgd:mode=round-robin",
        "bidmach:threshold=0.75",
        "eager:activation=all",
    ];
    let mut going_on = Vec::new();
    for scheme in Scheme::ALL.into_iter().chain(more.map(scheme)) {
        let plan = scheme.plan_in_session(&layout, 1, 3);
        match scheme.after_loss() {
            AfterLoss::GoesOn { lost } => {
                assert!(plan.is_ok() && !lost.is_empty(), "{scheme}");
                going_on.push(scheme.to_string());
            }
            AfterLoss::Refused { reason, instead } => {
                let Err(error @ Refusal::Members { .. }) = plan else { panic!("{scheme} is not refused") };
                let text = error.to_string();
                let begin = format!("{scheme} does not train in a session: {reason}; train by {instead}");
                assert!(text.starts_with(&begin), "{text}");
            }
        }
    }
    let expected = [
        "sync",
        "local-sgd",
        "diloco",
        "bidmach",
        "elastic-bsp",
        "sync:compress=bf16",
        "sync:bucket=16",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "easgd:mode=sync",
        "eamsgd:mode=sync",
    ];
    assert_eq!(going_on, expected);
    // One member may be left, which would go twice as far as the centre.
    let unstable = scheme("easgd:mode=sync,moving=1.4");
    assert!(unstable.plan(&layout, 0, 3).is_ok());
    assert!(matches!(unstable.plan_in_session(&layout, 0, 3), Err(Refusal::Unstable { ranks: 1, .. })));
}

/// So many members are told that this step comes next, and nothing counts yet.
fn members(ranks: u32, step: u64) -> Event {
    Event::Membership { ranks, step, committed: 0 }
}

/// An interpreter, and how often the optimizer made a step.
struct Told {
    interpreter: Interpreter,
    vectors: Plain,
    applied: u32,
}

impl Told {
    /// One of three members.
    fn of(text: &str, layout: &Layout) -> Self {
        let plan = scheme(text).plan_in_session(layout, 1, 3).expect("it trains");
        let vectors = Plain::of(0.0, layout.parameters());
        Self { interpreter: Interpreter::new(plan, false), vectors, applied: 0 }
    }

    fn vector(&mut self, name: Vector) -> &mut [f32] {
        self.vectors.vector(name)
    }

    fn tell(&mut self, event: Event) -> Vec<Request> {
        let mut requests = Vec::new();
        let applied = &mut self.applied;
        let told = self.interpreter.deliver(
            event,
            Nanos(0),
            &mut self.vectors,
            &mut |_, _| *applied += 1,
            &mut requests,
        );
        told.unwrap_or_else(|error| panic!("{event:?}: {error}"));
        requests
    }

    /// The gradient is there. Returns the averages that are asked for.
    fn compute(&mut self, step: u64) -> Vec<Request> {
        let mut requests = Vec::new();
        for bucket in 0..self.interpreter.buckets().len() {
            requests.extend(self.tell(Event::Ready(bucket)));
        }
        requests.extend(self.tell(Event::Computed { step }));
        requests
    }

    /// The averages are there.
    fn end(&mut self, averages: &[Request]) -> Vec<Request> {
        let mut requests = Vec::new();
        for request in averages {
            let Request::Average { id, .. } = request else { panic!("{request:?}") };
            requests.extend(self.tell(Event::Done(*id, Outcome::Averaged)));
        }
        requests
    }
}

#[test]
fn nothing_is_applied_before_the_word_of_the_session_and_members_begin_the_step_anew() {
    let layout = Layout::of(&[4, 4, 4]);
    let mut told = Told::of("sync:bucket=16", &layout);
    assert_eq!(told.tell(members(3, 0)), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(averages.len(), 3);
    // Two of three are there when a member ends.
    assert!(told.end(&averages[..2]).is_empty());
    assert_eq!(told.tell(members(2, 0)), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(told.end(&averages), [Request::Commit { step: 0 }]);
    assert_eq!(told.applied, 0, "the others may not be done");
    // One that is not done ends.
    assert_eq!(told.tell(members(1, 0)), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(told.end(&averages), [Request::Commit { step: 0 }]);
    assert_eq!(told.applied, 0);
    assert_eq!(told.tell(Event::Committed), [Request::Compute { step: 1 }]);
    assert_eq!((told.applied, told.interpreter.agreement().places), (1, 1));
    // Members change while it computes.
    assert_eq!(told.tell(members(2, 1)), [Request::Compute { step: 1 }]);
    let averages = told.compute(1);
    assert_eq!(told.end(&averages), [Request::Commit { step: 1 }]);
    assert_eq!(told.tell(Event::Committed), [Request::Compute { step: 2 }]);
    assert_eq!(told.applied, 2);
}

/// The operation of the only request, an average of what is exchanged.
fn average(requests: &[Request]) -> OperationId {
    let [Request::Average { id, vector: Vector::Sum, .. }] = requests else { panic!("{requests:?}") };
    *id
}

#[test]
fn an_exchange_is_made_again_with_the_elements_that_it_had_and_counts_once() {
    let mut told = Told::of("local-sgd:every=2", &Layout::of(&[4]));
    assert_eq!(told.tell(members(3, 0)), [Request::Compute { step: 0 }]);
    assert_eq!(told.compute(0), [Request::Compute { step: 1 }]);
    // Members change while it computes by itself: the step goes on, and the one before stays.
    assert_eq!(told.tell(members(2, 1)), [Request::Compute { step: 1 }]);
    told.vector(Vector::Parameters).fill(5.0);
    let requests = told.compute(1);
    average(&requests);
    assert_eq!(told.applied, 2);
    // Half of the average is there when a member ends, and then all of it, but not on all members.
    told.vector(Vector::Sum)[..2].fill(9.0);
    let requests = told.tell(members(1, 2));
    assert_eq!(told.vector(Vector::Sum), [5.0; 4]);
    let id = average(&requests);
    told.vector(Vector::Sum).fill(9.0);
    assert_eq!(told.tell(Event::Done(id, Outcome::Averaged)), [Request::Commit { step: 0 }]);
    assert_eq!(told.vector(Vector::Parameters), [5.0; 4]);
    let requests = told.tell(members(1, 2));
    assert_eq!(told.vector(Vector::Sum), [5.0; 4]);
    let id = average(&requests);
    told.vector(Vector::Sum).fill(6.0);
    assert_eq!(told.tell(Event::Done(id, Outcome::Averaged)), [Request::Commit { step: 0 }]);
    assert_eq!(told.tell(Event::Committed), [Request::Compute { step: 2 }]);
    assert_eq!(told.vector(Vector::Parameters), [6.0; 4]);
    assert_eq!((told.applied, told.interpreter.agreement().places), (2, 1));
}

#[test]
fn an_exchange_beside_which_a_member_computes_is_committed_when_it_waits_for_that() {
    let mut told = Told::of("easgd:every=1,mode=sync", &Layout::of(&[4]));
    told.vector(Vector::Parameters).fill(3.0);
    assert_eq!(told.tell(members(3, 0)), [Request::Compute { step: 0 }]);
    told.vector(Vector::Parameters).fill(4.0);
    let requests = told.compute(0);
    let [Request::Average { .. }, Request::Compute { step: 1 }] = requests[..] else {
        panic!("{requests:?}")
    };
    let pull = 0.9_f32 / 3.0;
    assert_eq!(told.vector(Vector::Sum), [pull; 4]);
    // Both go on, among two.
    let requests = told.tell(members(2, 1));
    let [Request::Average { id, .. }, Request::Compute { step: 1 }] = requests[..] else {
        panic!("{requests:?}")
    };
    assert_eq!(told.vector(Vector::Sum), [pull; 4]);
    told.vector(Vector::Sum).fill(0.5);
    assert!(told.tell(Event::Done(id, Outcome::Averaged)).is_empty(), "it computes");
    assert_eq!(told.compute(1), [Request::Commit { step: 0 }]);
    let requests = told.tell(Event::Committed);
    let [Request::Average { .. }, Request::Compute { step: 2 }] = requests[..] else {
        panic!("{requests:?}")
    };
    // Two have pulled the centre from 3, by half each, and this one by what is its own.
    assert_eq!(told.vector(Vector::Centre), [4.0; 4]);
    assert_eq!(told.vector(Vector::Parameters), [4.0 - pull; 4]);
}
