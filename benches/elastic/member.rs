//! A rank of an experiment: a process of this program, which says what it finds in lines.

use std::io::Write as _;
use std::time::Duration;

use pleach::session::{Elastic, Heal, Session, Verdict};
use pleach::transport::clock;
use pleach::{Fabric, FabricChoice, Group, Options, ReduceOp};

use super::get;
use super::report::median;

type Failure = Box<dyn std::error::Error>;

/// What a step computes.
pub(crate) const STEP: Duration = Duration::from_millis(2);

/// Elements that a step sums.
const ELEMENTS: usize = 1024;

/// Results before a member says that it is ready.
const WARMUP: u64 = 20;

/// Steps in a row on the group, and on the session, and how often in turn.
const STEPS_IN_TURN: u32 = 50;
const TURNS: u32 = 10;

/// Says one word and numbers.
pub(crate) fn say(word: &str, numbers: &[u64]) {
    let mut line = word.to_owned();
    numbers.iter().for_each(|number| line.push_str(&format!(" {number}")));
    let mut out = std::io::stdout().lock();
    // Without the bench nobody wants to know.
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// `EXPERIMENT FABRIC NAME=VALUE…`
pub(crate) fn run(told: &str) -> Result<(), String> {
    // The bench holds the other end, also when it is killed.
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        std::process::exit(1);
    });
    let mut words = told.split(' ');
    let (experiment, fabric) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let fabric: Fabric = fabric.parse().map_err(|_| format!("{told}: no fabric"))?;
    let mut elastic = Elastic::between(1, 8);
    let (mut compute, mut state) = (Duration::ZERO, 0);
    for (name, value) in words.filter_map(|word| word.split_once('=')) {
        let number = || value.parse::<u64>().map_err(|error| format!("{told}: {error}"));
        match name {
            "compute" => compute = Duration::from_micros(number()?),
            "suspect" => elastic.suspect_after = Duration::from_millis(number()?),
            "state" => state = number()? as usize,
            "heal" => elastic.heal = if value == "hidden" { Heal::Hidden } else { Heal::Boundary },
            _ => return Err(format!("{told}: no setting '{name}'")),
        }
    }
    let outcome = match experiment {
        "steps" => steps(fabric, &elastic, compute, state << 20),
        "overhead" => overhead(fabric, &elastic),
        _ => get::run(fabric, state << 20),
    };
    outcome.map_err(|error| error.to_string())
}

fn options(fabric: Fabric) -> Result<Options, Failure> {
    let mut options = Options::from_env()?;
    options.fabric = FabricChoice::Only(fabric);
    Ok(options)
}

/// Computes for so long.
fn work(time: Duration) {
    let until = clock::now() + time;
    while clock::now() < until {
        std::hint::spin_loop();
    }
}

/// Makes steps for ever, and says when it has the first result among other members than before.
fn steps(fabric: Fabric, elastic: &Elastic, compute: Duration, state: usize) -> Result<(), Failure> {
    let options = options(fabric)?;
    say("joins", &[clock::now().0]);
    let mut session = Session::join(&options, elastic)?;
    let mut weights = session.state::<u8>("weights", state)?;
    if session.step() == 0 {
        // Its pages are there.
        weights.update(|weights| weights.fill(7));
    }
    let mut data = session.buffer::<f32>(ELEMENTS)?;
    let (mut made, mut before, mut last) = (0, 0, clock::now());
    loop {
        let began = clock::now();
        session.next()?;
        if made == 0 {
            say("healed", &[clock::now().since(began).as_nanos() as u64]);
        }
        let group = session.group()?;
        let (ranks, contributors) = (group.world_size(), group.contributors());
        work(compute);
        data.fill(1.0);
        let outcome = group.all_reduce(&mut data, ReduceOp::Sum);
        let result = clock::now();
        if session.commit(outcome)? != Verdict::Committed {
            continue;
        }
        if data.iter().any(|sum| *sum != contributors as f32) {
            return Err("a sum of ones is not the number of ranks".into());
        }
        weights.update(|weights| {
            if let Some(first) = weights.first_mut() {
                *first = first.wrapping_add(1);
            }
        });
        if before != ranks {
            before = ranks;
            say("change", &[u64::from(ranks), result.0, result.since(last).as_nanos() as u64]);
        }
        made += 1;
        if made == WARMUP {
            say("ready", &[]);
        }
        last = result;
    }
}

/// Medians of a step of a loop on a group, and of the same loop in a session.
fn overhead(fabric: Fabric, elastic: &Elastic) -> Result<(), Failure> {
    let mut session = Session::join(&options(fabric)?, elastic)?;
    // The group is one of the same processes, which meet beside.
    let mut beside = options(fabric)?;
    beside.world.rendezvous = beside.world.rendezvous.map(get::beside).transpose()?;
    let group = Group::join(&beside)?;
    let (mut of_session, mut of_group) = (session.buffer::<f32>(ELEMENTS)?, group.buffer::<f32>(ELEMENTS)?);
    let [mut session_times, mut group_times] = [const { Vec::new() }; 2];
    for turn in 0..=TURNS {
        group.barrier()?;
        for _ in 0..STEPS_IN_TURN {
            let began = clock::now();
            work(STEP);
            of_group.fill(1.0);
            group.all_reduce(&mut of_group, ReduceOp::Sum)?;
            group_times.push(clock::now().since(began).as_nanos() as f64);
        }
        group.barrier()?;
        for _ in 0..STEPS_IN_TURN {
            let began = clock::now();
            let verdict = session.attempt(|group, _| {
                work(STEP);
                of_session.fill(1.0);
                group.all_reduce(&mut of_session, ReduceOp::Sum)
            })?;
            if verdict != Verdict::Committed {
                return Err("a member was lost".into());
            }
            session_times.push(clock::now().since(began).as_nanos() as f64);
        }
        if turn == 0 {
            session_times.clear();
            group_times.clear();
        }
    }
    say("group", &[median(group_times) as u64]);
    say("session", &[median(session_times) as u64]);
    group.close()?;
    Ok(session.leave()?)
}
