//! Policies of a program's own, by both drivers; and plans that are none.

use pleach_collectives::{Group, Options, Reproducible};
use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, OperationIds, Update, Vector};
use pleach_training::simulation::Simulation;
use pleach_training::state::State;
use pleach_training::{Layout, Learner, Policy, PolicyError, Sgd, TrainError, Trained, Trainer};
use pleach_transport::clock::Nanos;
use pleach_transport::rendezvous::{Fabric, World};

use super::model::{Linear, STEPS, price, settings};
use super::ranks;

const RANKS: u32 = 2;

/// Averages parameters after the steps 1, 2, 4, 8 and so on, which no scheme does.
struct Doubling {
    parameters: usize,
    /// Steps so far, and those after which the next average comes.
    steps: u64,
    next: u64,
    is_over: bool,
    ids: OperationIds,
}

impl Doubling {
    fn average(&mut self, actions: &mut Actions) {
        let (id, vector) = (self.ids.take(), Vector::Parameters);
        actions.push(Action::Average { id, vector, piece: 0..self.parameters });
    }
}

impl Policy for Doubling {
    fn on(&mut self, event: Event, _: Nanos, actions: &mut Actions) {
        match event {
            Event::Start | Event::Resume => actions.compute(self.steps),
            Event::Computed { .. } => {
                actions.update(Update::Step);
                self.steps += 1;
                if self.steps < self.next {
                    actions.compute(self.steps);
                } else {
                    self.next *= 2;
                    self.average(actions);
                }
            }
            Event::Done(..) => {
                actions.push(Action::Agreed(Vector::Parameters));
                if !self.is_over {
                    actions.compute(self.steps);
                }
            }
            Event::Stop => {
                self.is_over = true;
                self.average(actions);
            }
            _ => {}
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.steps);
        state.field(&mut self.next);
        state.field(&mut self.ids);
    }
}

fn doubling(layout: &Layout) -> Plan {
    let parameters = layout.parameters();
    let policy = Doubling { parameters, steps: 0, next: 1, is_over: false, ids: OperationIds::default() };
    Plan {
        policy: Box::new(policy),
        buckets: layout.buckets(usize::MAX),
        vectors: vec![Vector::Parameters, Vector::Gradient],
        parameters,
        window: None,
        lines: Vec::new(),
    }
}

/// The model on a rank; `saves_at`: the step before which its state goes to another trainer.
fn train(group: &Group, name: &str, saves_at: Option<u64>) -> Result<Trained, TrainError> {
    let (layout, settings) = (Linear.layout(), settings(RANKS));
    let begin = || Trainer::of_plan(group, name, doubling(&layout), &layout, STEPS).map(Trainer::checked);
    let mut trainer = begin()?;
    trainer.parameters_mut().copy_from_slice(&Linear.initial());
    let mut sgd = Sgd::new(layout.parameters(), settings.learning_rate, settings.momentum);
    loop {
        if saves_at == Some(trainer.next_step()) && trainer.progress().steps > 0 {
            let state = trainer.rank_state(&[])?;
            trainer = begin()?;
            trainer.restore_rank(Ok(state))?;
        }
        let Some(mut step) = trainer.step()? else { break };
        let number = step.number();
        let (parameters, gradient) = step.vectors()?;
        let loss = Linear.gradient(group.rank(), number, parameters, gradient);
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
    }
    trainer.finish()
}

fn with_group<T: Send>(fabric: Fabric, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, RANKS, |options| options.reproducible = Reproducible::PerWorldSize, body)
}

#[test]
fn a_policy_of_a_program_has_the_bits_of_its_simulation_on_real_ranks() {
    let layout = Linear.layout();
    let simulation = Simulation::of_plans(&Linear, &settings(RANKS), |_| doubling(&layout));
    let simulated = simulation.expect("there are ranks").run(&mut price, &mut |_| {}).expect("ends");
    assert!(simulated.guarantee_held && simulated.parameters_equal);
    for (fabric, saves_at) in [(Fabric::Shm, None), (Fabric::Tcp, None), (Fabric::Shm, Some(11))] {
        let all = with_group(fabric, |group| {
            let trained = train(&group, "doubling", saves_at).expect("trains");
            group.close().expect("all ranks close");
            trained
        });
        for trained in all {
            assert!(trained.guarantee_held && trained.parameters_equal, "{fabric:?}");
            // After 1, 2, 4, 8 and 16 steps, and at the end.
            assert_eq!(trained.progress.agreements, 6, "{fabric:?}, {saves_at:?}");
            let bits = |elements: &[f32]| elements.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&trained.parameters), bits(&simulated.parameters), "{fabric:?}, {saves_at:?}");
        }
    }
}

#[test]
fn ranks_whose_policies_have_different_names_are_told_so() {
    let all = with_group(Fabric::Shm, |group| {
        train(&group, ["doubling", "tripling"][group.rank() as usize], None).map(drop)
    });
    for (rank, ended) in all.into_iter().enumerate() {
        let Err(TrainError::Different { what: "the scheme", own, theirs, .. }) = ended else {
            panic!("rank {rank}: {ended:?}")
        };
        assert_eq!([own, theirs].map(|name| name.len()), [8; 2], "rank {rank}");
    }
}

/// What a rank alone gets that trains by this plan.
fn error_of(change: fn(Plan) -> Plan) -> TrainError {
    let group = Group::join(&Options::new(World::alone())).expect("is alone");
    let layout = Linear.layout();
    let train = || {
        let mut trainer = Trainer::of_plan(&group, "own", change(doubling(&layout)), &layout, 3)?;
        while let Some(step) = trainer.step()? {
            step.update(|_, _| {}, 0.0)?;
        }
        trainer.finish()
    };
    train().expect_err("it is no plan")
}

/// Adds an action behind each event.
struct Adding(Box<dyn Policy>, Action);

impl Policy for Adding {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.0.on(event, now, actions);
        actions.push(self.1.clone());
    }
}

fn adding(plan: Plan, action: Action) -> Plan {
    Plan { policy: Box::new(Adding(plan.policy, action)), ..plan }
}

#[test]
fn plans_that_no_rank_can_run_are_refused_in_the_beginning() {
    let changes: [fn(Plan) -> Plan; 4] = [
        |plan| Plan { parameters: 22, ..plan },
        |plan| Plan { buckets: vec![10..21, 0..9], ..plan },
        |plan| Plan { buckets: vec![10..21, 0..11], ..plan },
        |plan| Plan { vectors: vec![Vector::Parameters], ..plan },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let error = error_of(change);
        assert!(matches!(error, TrainError::Plan { .. }), "{number}: {error}");
    }
}

#[test]
fn what_a_plan_or_a_driver_does_not_have_is_named_when_it_is_asked_for() {
    let error = error_of(|plan| {
        let (from, into) = (Vector::Parameters, Vector::Anchor);
        adding(plan, Action::Update(Update::Copy { from, into, piece: 0..1 }))
    });
    assert!(matches!(error, TrainError::Policy(PolicyError::NoVector(Vector::Anchor))), "{error}");
    let error = error_of(|plan| adding(plan, Action::Commit { step: 0 }));
    assert!(matches!(error, TrainError::Policy(PolicyError::NoSession)), "{error}");
    let error = error_of(|mut plan| {
        struct InPieces;
        impl Policy for InPieces {
            fn on(&mut self, event: Event, _: Nanos, actions: &mut Actions) {
                match event {
                    Event::Start => actions.compute(0),
                    Event::Computed { .. } => actions.update(Update::StepPiece { piece: 0..1 }),
                    _ => {}
                }
            }
        }
        plan.policy = Box::new(InPieces);
        plan
    });
    assert!(matches!(error, TrainError::Policy(PolicyError::NoOptimizer)), "{error}");
    let group = Group::join(&Options::new(World::alone())).expect("is alone");
    let layout = Linear.layout();
    let trainer = Trainer::of_plan(&group, "own", doubling(&layout), &layout, 3).expect("is a plan");
    assert!(matches!(trainer.logged(&std::env::temp_dir()), Err(TrainError::NoScheme)));
}
