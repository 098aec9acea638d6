//! Trainings in sessions: what a step needs to count, and how often it does.

use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use pleach_collectives::session::{Elastic, Session};
use pleach_collectives::{Options, Reproducible};
use pleach_training::interpreter::{Interpreter, Request, Vectors};
use pleach_training::policy::{Event, Outcome, Vector};
use pleach_training::{Layout, Learner, Refusal, Scheme, Sgd, TrainError, Trained, Trainer};
use pleach_transport::clock::Nanos;
use pleach_transport::rendezvous::{Fabric, FabricChoice};

use super::model::{Linear, STEPS, scheme};
use super::ranks;

const RANKS: u32 = 3;

/// Runs `body` as every member of a session that adds in the order of ranks.
fn with_session<T: Send>(fabric: Fabric, body: impl Fn(Session) -> T + Sync) -> Vec<T> {
    let folder = ranks::Folder::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (folder, body) = (&folder, &body);
                scope.spawn(move || {
                    let mut options = Options::new(ranks::world(rank, RANKS, &folder.0));
                    options.fabric = FabricChoice::Only(fabric);
                    options.reproducible = Reproducible::PerWorldSize;
                    let session = Session::join(&options, &Elastic::between(1, RANKS));
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
    let mut sgd = Sgd::new(layout.parameters(), 0.02, 0.9);
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
        let mut sgd = Sgd::new(layout.parameters(), 0.02, 0.9);
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
    for (fabric, text) in [
        (Fabric::Shm, "sync"),
        (Fabric::Tcp, "sync"),
        (Fabric::Shm, "sync:bucket=16"),
        (Fabric::Tcp, "sync:bucket=16"),
    ] {
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
    for (fabric, text) in [(Fabric::Shm, "sync:bucket=16"), (Fabric::Tcp, "sync")] {
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
        assert!(matches!(refused, Err(TrainError::Late { step: 1 })), "{refused:?}");
    }
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
            options.fabric = FabricChoice::Only(fabric);
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

#[test]
fn schemes_whose_ranks_have_something_of_their_own_are_refused_with_the_reason() {
    let layout = Layout::of(&[8, 8]);
    for scheme in Scheme::ALL.into_iter().filter(|scheme| !matches!(scheme, Scheme::Sync { .. })) {
        expect_refused(&scheme, &layout);
    }
    expect_refused(&scheme("sync:compress=f8"), &layout);
    assert!(scheme("sync:bucket=16").plan_in_session(&layout, 3).is_ok());
}

fn expect_refused(scheme: &Scheme, layout: &Layout) {
    let Err(error @ Refusal::Members { .. }) = scheme.plan_in_session(layout, 3) else {
        panic!("{scheme} is not refused")
    };
    let text = error.to_string();
    assert!(text.starts_with(&format!("{scheme} does not train in a session: ")), "{text}");
}

/// Vectors of a rank without a group.
struct Plain(Vec<Vec<f32>>);

impl Vectors for Plain {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        let vectors = self.0.get_disjoint_mut(names.map(Vector::index)).expect("different vectors");
        vectors.map(|vector| &mut vector[piece.clone()])
    }

    fn step(&mut self, _: &Range<usize>) {
        panic!("the optimizer is the program's")
    }

    fn publish(&mut self, _: Vector, _: &Range<usize>, _: u64) {
        panic!("there is no window")
    }
}

/// An interpreter, and how often the optimizer made a step.
struct Told {
    interpreter: Interpreter,
    vectors: Plain,
    applied: u32,
}

impl Told {
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
    let plan = scheme("sync:bucket=16").plan_in_session(&layout, 3).expect("it trains");
    let vectors = Plain(vec![vec![0.0; layout.parameters()]; Vector::COUNT]);
    let mut told = Told { interpreter: Interpreter::new(plan, false), vectors, applied: 0 };
    assert_eq!(told.tell(Event::Membership { ranks: 3, step: 0 }), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(averages.len(), 3);
    // Two of three are there when a member ends.
    assert!(told.end(&averages[..2]).is_empty());
    assert_eq!(told.tell(Event::Membership { ranks: 2, step: 0 }), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(told.end(&averages), [Request::Commit { step: 0 }]);
    assert_eq!(told.applied, 0, "the others may not be done");
    // One that is not done ends.
    assert_eq!(told.tell(Event::Membership { ranks: 1, step: 0 }), [Request::Compute { step: 0 }]);
    let averages = told.compute(0);
    assert_eq!(told.end(&averages), [Request::Commit { step: 0 }]);
    assert_eq!(told.applied, 0);
    assert_eq!(told.tell(Event::Committed), [Request::Compute { step: 1 }]);
    assert_eq!((told.applied, told.interpreter.agreement().places), (1, 1));
    // Members change while it computes.
    assert_eq!(told.tell(Event::Membership { ranks: 2, step: 1 }), [Request::Compute { step: 1 }]);
    let averages = told.compute(1);
    assert_eq!(told.end(&averages), [Request::Commit { step: 1 }]);
    assert_eq!(told.tell(Event::Committed), [Request::Compute { step: 2 }]);
    assert_eq!(told.applied, 2);
}
