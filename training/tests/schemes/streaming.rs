//! Streaming DiLoCo: which fragment is exchanged after which steps, and when that is applied, in
//! virtual time and on real ranks.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_training::interpreter::Plan;
use pleach_training::policy::{Action, Actions, Event, Update};
use pleach_training::simulation::{Settings, Simulated};
use pleach_training::{Learner, Policy, Sgd, Simulation, Trainer};
use pleach_transport::clock::Nanos;
use pleach_transport::rendezvous::Fabric;

use super::checkpoints::Folder;
use super::model::{Linear, STEPS, price, scheme, settings, simulate};
use super::real::{RANKS, with_group};

const EVERY: u64 = 6;
const FRAGMENTS: u64 = 3;
const DELAY: u64 = 2;

/// Elements of a fragment, of 21.
const LENGTH: usize = 7;

fn text(delay: u64) -> String {
    format!("diloco:every={EVERY},fragments={FRAGMENTS},delay={delay},mix=0.5")
}

/// What happens to elements after so many steps.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Turn {
    Begun(Range<usize>),
    Applied(Range<usize>),
}

/// By the definition: fragment f is exchanged after (f + 1)·every/fragments steps of each period,
/// and the outer step is taken `DELAY` steps later, or at the end.
fn expected() -> Vec<(u64, Turn)> {
    let mut turns = Vec::new();
    for fragment in 0..FRAGMENTS {
        let begin = fragment as usize * LENGTH;
        let piece = begin..begin + LENGTH;
        let first = (fragment + 1) * EVERY / FRAGMENTS;
        for steps in (first..=STEPS).step_by(EVERY as usize) {
            turns.push((steps, Turn::Begun(piece.clone())));
            turns.push(((steps + DELAY).min(STEPS), Turn::Applied(piece.clone())));
        }
    }
    // All of them once more, after the last step.
    let all = 0..FRAGMENTS as usize * LENGTH;
    turns.extend([(STEPS, Turn::Begun(all.clone())), (STEPS, Turn::Applied(all))]);
    turns
}

/// In the order of steps, and in a step in that of the elements: in which order fragments are begun
/// and applied after one step does not matter.
fn in_order(mut turns: Vec<(u64, Turn)>) -> Vec<(u64, Turn)> {
    turns.sort_by_key(|(steps, turn)| {
        let (is_applied, piece) = match turn {
            Turn::Begun(piece) => (false, piece),
            Turn::Applied(piece) => (true, piece),
        };
        (*steps, piece.end, piece.start, is_applied)
    });
    turns
}

/// Keeps what a policy does after how many steps.
struct Watched {
    inner: Box<dyn Policy>,
    steps: u64,
    turns: Arc<Mutex<Vec<(u64, Turn)>>>,
}

impl Policy for Watched {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.inner.on(event, now, actions);
        if let Event::Computed { step } = event {
            self.steps = step + 1;
        }
        for action in actions.as_slice() {
            let turn = match action {
                Action::Average { piece, .. } => Turn::Begun(piece.clone()),
                Action::Update(Update::Outer { piece, .. }) => Turn::Applied(piece.clone()),
                _ => continue,
            };
            self.turns.lock().expect("nobody panics").push((self.steps, turn));
        }
    }
}

#[test]
fn simulated_ranks_exchange_each_fragment_once_in_a_period_and_apply_it_after_the_delay() {
    let all: Vec<_> = (0..4).map(|_| Arc::new(Mutex::new(Vec::new()))).collect();
    let plan = |rank: u32| {
        let plan = scheme(&text(DELAY)).plan(&Linear.layout(), rank, 4).expect("trains on four ranks");
        let turns = all[rank as usize].clone();
        Plan { policy: Box::new(Watched { inner: plan.policy, steps: 0, turns }), ..plan }
    };
    let simulation = Simulation::of_plans(&Linear, &settings(4), plan).expect("there are ranks");
    let trained = simulation.run(&mut price, &mut |_| {}).expect("trains");
    for turns in all {
        let turns = turns.lock().expect("nobody panics").clone();
        assert_eq!(in_order(turns), in_order(expected()));
    }
    // Three fragments a period are all elements, and the end is once more.
    let begun = STEPS / (EVERY / FRAGMENTS);
    assert_eq!(trained.bytes_per_rank, (begun + FRAGMENTS) * (size_of::<f32>() * LENGTH) as u64);
}

/// The turns in a log: of each line the event, and behind a tab the actions.
fn logged(log: &str) -> Vec<(u64, Turn)> {
    let (mut turns, mut steps) = (Vec::new(), 0);
    for (line, actions) in log.lines().filter_map(|line| line.split_once('\t')) {
        let event: serde_json::Value = serde_json::from_str(line).expect("is JSON");
        if let Some(step) = event.pointer("/event/event/Computed/step").and_then(serde_json::Value::as_u64) {
            steps = step + 1;
        }
        let actions: Vec<serde_json::Value> = serde_json::from_str(actions).expect("is JSON");
        for action in actions {
            let piece = |of: &str| {
                let end = |name: &str| action.pointer(&format!("{of}/piece/{name}"))?.as_u64();
                Some(end("start")? as usize..end("end")? as usize)
            };
            let begun = piece("/Average").map(Turn::Begun);
            turns.extend(begun.or(piece("/Update/Outer").map(Turn::Applied)).map(|turn| (steps, turn)));
        }
    }
    turns
}

#[test]
fn real_ranks_exchange_the_same_fragments_after_the_same_steps_with_the_bits_of_the_simulation() {
    let alike = simulate(&text(DELAY), &settings(RANKS)).parameters;
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let logs = Folder::new("streaming-logs");
        let all = with_group(fabric, |group| {
            let layout = Linear.layout();
            let trainer = Trainer::new(&group, &scheme(&text(DELAY)), &layout, STEPS).expect("has memory");
            let mut trainer = trainer.logged(logs.path()).expect("there is space");
            trainer.parameters_mut().copy_from_slice(&Linear.initial());
            let Settings { learning_rate, momentum, .. } = settings(RANKS);
            let mut sgd = Sgd::new(layout.parameters(), learning_rate, momentum);
            while let Some(mut step) = trainer.step().expect("goes on") {
                let number = step.number();
                let (parameters, gradient) = step.vectors().expect("nothing is ready");
                let loss = Linear.gradient(group.rank(), number, parameters, gradient);
                step.update(|parameters, gradient| sgd.step(parameters, gradient), loss).expect("goes on");
            }
            trainer.finish().expect("ends").parameters.to_vec()
        });
        for (rank, parameters) in all.iter().enumerate() {
            assert_eq!(*parameters, alike, "rank {rank}, {fabric:?}");
            let log = std::fs::read_to_string(logs.path().join(format!("rank-{rank}.log")));
            let turns = logged(&log.expect("was written"));
            assert_eq!(in_order(turns), in_order(expected()), "rank {rank}, {fabric:?}");
        }
    }
}

#[test]
fn an_exchange_that_is_applied_later_holds_nobody_up() {
    const COMPUTING: Duration = Duration::from_millis(10);
    const EXCHANGE: Duration = Duration::from_millis(15);
    let took = |delay: u64| -> Simulated {
        let settings = Settings { computing: "10ms,cv=0".parse().expect("is a text"), ..settings(4) };
        let simulation = Simulation::new(&Linear, &scheme(&text(delay)), &settings).expect("is not refused");
        simulation.run(&mut |_: u64| EXCHANGE, &mut |_| {}).expect("trains")
    };
    let exchanges = (STEPS / (EVERY / FRAGMENTS)) as u32;
    // At once: ranks wait for each exchange, and for the last one.
    assert_eq!(took(0).time, COMPUTING * STEPS as u32 + EXCHANGE * (exchanges + 1));
    // Two steps later: the exchange after step 24 ends behind step 25, and the last one follows.
    assert_eq!(took(2).time, COMPUTING * (STEPS as u32 - 1) + EXCHANGE * 2);
}
