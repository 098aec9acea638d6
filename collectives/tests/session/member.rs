//! A member: makes steps, and says what became of each.

#[path = "gpu_member.rs"]
mod gpu_member;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use pleach_collectives::session::{Change, Heal, Process};
use pleach_collectives::{
    CollectiveError, Elastic, Group, JoinGroupError, Operation, Options, ReduceOp, Session, SessionError,
    Verdict,
};
use pleach_transport::Space;
use pleach_transport::auth::Secret;
use pleach_transport::rendezvous::{Fabric, FabricChoice, JoinError, Launcher, Rendezvous, World};
use rustix::process::Signal;

use super::parts::Parts;

/// What a member is told: seat, world size, fabric, folder, then its settings.
pub(crate) const VARIABLE: &str = "PLEACH_TEST_SESSION_MEMBER";

/// What distinguishes a member's lines from those of the test harness.
pub(crate) const MARK: &str = "@";

/// The file in the job's folder that says that it is enough.
pub(crate) const ENOUGH: &str = "enough";

/// The file in the job's folder that says that those may begin that hold on.
pub(crate) const GO_ON: &str = "go-on";

/// Elements that each step sums, besides the first two.
const ELEMENTS: usize = 50_000;

/// Elements of a watched buffer.
const WATCHED: usize = 100_000;

/// Whether a signal has said that calls are interrupted.
static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

struct Settings {
    /// Zero: until the test says that it is enough.
    steps: u64,
    fewest: u32,
    suspect: Duration,
    /// Whether memory that is left alone is compared at each step.
    watches: bool,
    /// Seat, step, how often.
    fails: Vec<(u32, u64, u32)>,
    /// Seat and step: leaves before that step, without a word before.
    quits: Option<(u32, u64)>,
    /// Members at most.
    most: u32,
    /// Processes that wait for room, at most.
    spares: u32,
    /// Seats of a unit. Of more than one the state has four elements or more.
    unit: u32,
    program: Option<String>,
    /// Elements of the state.
    state: usize,
    /// Seat and step: sends the next seat two messages in that step, which receives one.
    sends: Option<(u32, u64)>,
    /// Seat and step: changes the state as no other member does.
    errs: Option<(u32, u64)>,
    /// Whether states are compared after each step.
    audits: bool,
    heal: Heal,
    heal_wait: Duration,
    /// Whether a step gathers too, and does not only reduce.
    gathers: bool,
    /// Whether a step makes parts of the group too, and uses one that it has made before.
    parts: bool,
    /// Whether it leaves before its first step.
    leaves_unread: bool,
    /// Seat and step: stops itself when the calls of that step are done.
    stops: Option<(u32, u64)>,
    /// Whether steps make no calls.
    is_idle: bool,
    /// Whether its groups work on a GPU's memory.
    is_on_gpu: bool,
    /// Whether it waits before its first step until the test says that it may go on.
    holds: bool,
    /// Where ranks meet: an address, or `folder` for the job's folder with its registers. A folder
    /// without registers unless set.
    meet: Option<String>,
    secret: Option<u8>,
    /// How long too few members wait for others.
    quorum_wait: Duration,
    /// How long too few members for a step do so.
    fewest_wait: Duration,
    /// How long those that are enough wait for the rest of their world.
    begin_wait: Duration,
    join_timeout: Duration,
    /// So many seats in a row have a host of their own name.
    seats_a_host: Option<u32>,
    /// The name of its host, in place of that.
    host: Option<String>,
}

/// `SEAT:STEP`.
fn seat_and_step(value: &str) -> Option<(u32, u64)> {
    let (seat, step) = value.split_once(':').expect("SEAT:STEP");
    Some((seat.parse().expect("a seat"), step.parse().expect("a step")))
}

impl Settings {
    fn read<'a>(words: impl Iterator<Item = &'a str>) -> Self {
        // A process that runs may be kept from running for seconds.
        let suspect = Duration::from_secs(10);
        let (fails, quits) = (Vec::new(), None);
        let mut settings = Self {
            steps: 0,
            fewest: 1,
            suspect,
            watches: false,
            fails,
            quits,
            most: 8,
            spares: 0,
            unit: 1,
            program: None,
            state: 3,
            errs: None,
            sends: None,
            audits: false,
            heal: Heal::Boundary,
            heal_wait: Duration::from_secs(60),
            gathers: false,
            parts: false,
            leaves_unread: false,
            stops: None,
            is_idle: false,
            is_on_gpu: false,
            holds: false,
            meet: None,
            secret: None,
            quorum_wait: Duration::from_secs(5),
            fewest_wait: Duration::from_millis(300),
            begin_wait: Duration::from_secs(45),
            join_timeout: Duration::from_secs(45),
            seats_a_host: None,
            host: None,
        };
        for word in words {
            let (name, value) = word.split_once('=').expect("NAME=VALUE");
            let number = || value.parse::<u64>().expect("a number");
            match name {
                "steps" => settings.steps = number(),
                "fewest" => settings.fewest = number() as u32,
                "suspect" => settings.suspect = Duration::from_millis(number()),
                "watch" => settings.watches = true,
                "quits" => settings.quits = seat_and_step(value),
                "errs" => settings.errs = seat_and_step(value),
                "sends" => settings.sends = seat_and_step(value),
                "most" => settings.most = number() as u32,
                "spares" => settings.spares = number() as u32,
                "unit" => settings.unit = number() as u32,
                "program" => settings.program = Some(value.to_owned()),
                "state" => settings.state = number() as usize,
                "audit" => settings.audits = true,
                "heal" => settings.heal = if value == "hidden" { Heal::Hidden } else { Heal::Boundary },
                "heal-wait" => settings.heal_wait = Duration::from_millis(number()),
                "gathers" => settings.gathers = true,
                "parts" => settings.parts = true,
                "unread" => settings.leaves_unread = true,
                "stops" => settings.stops = seat_and_step(value),
                "idle" => settings.is_idle = true,
                "gpu" => settings.is_on_gpu = true,
                "holds" => settings.holds = true,
                "meet" => settings.meet = Some(value.to_owned()),
                "secret" => settings.secret = Some(number() as u8),
                "begin" => settings.begin_wait = Duration::from_millis(number()),
                "join" => settings.join_timeout = Duration::from_millis(number()),
                "quorum" => settings.quorum_wait = Duration::from_millis(number()),
                "too-few" => settings.fewest_wait = Duration::from_millis(number()),
                "hosts" => settings.seats_a_host = Some(number() as u32),
                "on-links" => {} // Its environment says it.
                "host" => settings.host = Some(value.to_owned()),
                "fails" => {
                    for item in value.split(',') {
                        let parts: Vec<u64> =
                            item.split(':').map(|part| part.parse().expect("a number")).collect();
                        settings.fails.push((parts[0] as u32, parts[1], parts[2] as u32));
                    }
                }
                _ => panic!("no setting '{name}'"),
            }
        }
        settings
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").and_then(|()| out.flush()).expect("the test listens");
}

/// Does what the environment says.
pub(crate) fn make_steps() {
    let told = std::env::var(VARIABLE).expect("is started by a test");
    let mut words = told.split_whitespace();
    let mut word = || words.next().expect("four words");
    let (seat, size) = (word().parse().expect("a seat"), word().parse().expect("a number"));
    let fabric: Fabric = word().parse().expect("a fabric");
    let folder = PathBuf::from(word());
    let settings = Settings::read(words);
    let rendezvous = match settings.meet.as_deref() {
        None => Rendezvous::JobFolder { folder: folder.join("meeting") },
        Some("folder") => Rendezvous::File { folder: folder.clone() },
        Some(address) => address.parse().expect("an address"),
    };
    let world = World {
        rank: seat,
        world_size: size,
        local_rank: Some(seat),
        rendezvous: Some(rendezvous),
        secret: settings.secret.map(|byte| Secret::new(&[byte; 32])),
        host: settings.host.clone().or(settings.seats_a_host.map(|seats| format!("host-{}", seat / seats))),
        launcher: Launcher::Arguments,
        ..World::alone()
    };
    let mut options = Options::new(world);
    options.fabric = FabricChoice::Only(fabric);
    if settings.is_on_gpu {
        options.space = Space::Gpu { ordinal: 0 };
    }
    let mut elastic = Elastic::between(settings.fewest, settings.most);
    if let Some(program) = &settings.program {
        elastic.program.clone_from(program);
    }
    (elastic.suspect_after, elastic.unit) = (settings.suspect, settings.unit);
    elastic.spares = settings.spares;
    (elastic.heal, elastic.heal_wait) = (settings.heal, settings.heal_wait);
    elastic.fewest_wait = settings.fewest_wait;
    elastic.quorum_wait = settings.quorum_wait;
    elastic.begin_wait = settings.begin_wait;
    options.join_timeout = settings.join_timeout;
    let session = match Session::join(&options, &elastic) {
        Ok(session) => session,
        Err(error) => return end(&error),
    };
    let seat = session.seat().0;
    say(&format!("joined {seat}"));
    run(session, seat, settings, &folder.join(ENOUGH));
}

/// Says why it does not go on.
fn end(error: &SessionError) {
    let name = match error {
        SessionError::Expelled(_) => "Expelled",
        SessionError::NoQuorum { .. } => "NoQuorum",
        SessionError::UnitsLost { .. } => "UnitsLost",
        SessionError::Unsupported { .. } => "Unsupported",
        SessionError::Store { .. } => "Store",
        SessionError::TooFew { .. } => "TooFew",
        SessionError::NotNeeded { .. } => "NotNeeded",
        SessionError::Step { .. } => "Step",
        SessionError::Interrupted => "Interrupted",
        SessionError::Left => "Left",
        SessionError::StatesDiffer { .. } => "StatesDiffer",
        SessionError::StatesNotRead { .. } => "StatesNotRead",
        SessionError::Diverged { members, .. } => {
            let seats: Vec<String> = members.iter().map(|member| member.seat.0.to_string()).collect();
            return say(&format!("end Diverged:{} {error}", seats.join(",")));
        }
        SessionError::Join(JoinGroupError::Join(JoinError::Differs(_))) => "Differs",
        SessionError::Join(JoinGroupError::Join(JoinError::Closed { .. })) => "Closed",
        SessionError::Join(JoinGroupError::Join(JoinError::Ended { .. })) => "Ended",
        SessionError::Join(JoinGroupError::Join(JoinError::Missing { ranks, .. })) => {
            let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            return say(&format!("end Missing:{} {error}", ranks.join(",")));
        }
        _ => "other",
    };
    say(&format!("end {name} {error}"));
}

/// In a step behind which somebody may heal: who contributes, `bits`, counts in averages and in
/// batches too, and nobody else.
fn look_at_neutral(group: &Group, seat: u32, bits: u64, step: u64) -> Result<(), CollectiveError> {
    if !group.contributes() {
        say(&format!("neutral {step}"));
    }
    assert_eq!(bits >> seat & 1 == 1, group.contributes());
    let seats = || (0..64_u32).filter(|seat| bits >> seat & 1 == 1);
    let (sum, count) = (f64::from(seats().sum::<u32>()), f64::from(seats().count() as u32));
    let mut mean = [f64::from(seat)];
    group.all_reduce(&mut mean, ReduceOp::Avg)?;
    assert_eq!(mean, [sum / count], "of those that contribute");
    let (mut highest, mut sums) = ([i64::from(seat)], vec![f64::from(seat); 300]);
    let mut batch = group.batch();
    batch.add(Operation::all_reduce(&mut highest, ReduceOp::Max))?;
    batch.add(Operation::all_reduce(&mut sums[..100], ReduceOp::Sum))?;
    batch.run()?;
    assert_eq!(highest, [i64::from(seats().max().expect("somebody contributes"))]);
    assert!(sums[..100].iter().all(|it| *it == sum) && sums[100..].iter().all(|it| *it == f64::from(seat)));
    let (input, mut output) = ([f64::from(seat); 4], [0.0; 4]);
    group.run(Operation::all_reduce_into(&input, &mut output, ReduceOp::Avg))?;
    assert_eq!((input, output), ([f64::from(seat); 4], [sum / count; 4]), "the input stays");
    Ok(())
}

/// Steps that only their verdicts connect with those of others: so many, or (zero) until it is told
/// to leave.
fn make_idle_steps(mut session: Session, steps: u64) {
    while steps == 0 || session.step() < steps {
        match session.attempt(|_, _| Ok(())) {
            Ok(Verdict::Committed) => say(&format!("idle {}", session.step())),
            Ok(Verdict::Retry(change)) => say(&format!("again {change}")),
            Err(SessionError::Left) => {
                say("end Left");
                break;
            }
            Err(error) => return end(&error),
        }
    }
    session.leave().map_or_else(|error| end(&error), |()| say("left"));
}

/// Says that the calls of this step are done where that is told, and stops if this process is to.
fn stop_if_told(settings: &mut Settings, seat: u32, step: u64) {
    if let Some((of, _)) = settings.stops.filter(|(_, at)| *at == step) {
        say(&format!("calls of {step} are done"));
        if of == seat {
            settings.stops = None; // The step may be repeated.
            // To this thread: another one might be woken late, and this one go on.
            signal_hook::low_level::raise(Signal::STOP.as_raw()).expect("can be raised");
        }
    }
}

/// Sends messages in this step where that is told, once, and receives fewer.
fn send_if_told(settings: &mut Settings, group: &Group, seat: u32, step: u64) -> Result<(), CollectiveError> {
    let Some((from, _)) = settings.sends.filter(|(_, at)| *at == step) else { return Ok(()) };
    settings.sends = None;
    if seat == from {
        group.send(&[1_u64], from + 1)?;
        return group.send(&[2_u64], from + 1);
    }
    if seat == from + 1 {
        let mut message = [0_u64];
        group.recv(&mut message, from)?;
        assert_eq!(message, [1]);
    }
    Ok(())
}

/// Says the newest change of the session, where that was not said before.
fn say_newest_change(session: &Session, told: &mut Option<u64>) {
    let Some(change) = session.change().filter(|change| *told != Some(change.epoch)) else { return };
    *told = Some(change.epoch);
    let left: Vec<String> = change.left.iter().map(|(process, _)| process.seat.0.to_string()).collect();
    let came: Vec<String> = change.came.iter().map(|process| process.seat.0.to_string()).collect();
    let lost = change.unreceived.iter().map(|it| format!("{}:{}:{}", it.peer().seat.0, it.to(), it.from()));
    let lost: Vec<String> = lost.collect();
    say(&format!("changed -{} +{} {}", left.join(","), came.join(","), lost.join(",")));
}

/// Whether it is to fail this step now.
fn fails_in(fails: &mut [(u32, u64, u32)], seat: u32, step: u64) -> bool {
    let fail = fails.iter_mut().find(|(of, at, times)| (*of, *at) == (seat, step) && *times > 0);
    fail.map(|fail| fail.2 -= 1).is_some()
}

/// Has calls that wait end when the signal comes.
fn interrupt_if_told(session: &mut Session) {
    let usr1 = Signal::USR1.as_raw();
    signal_hook::flag::register(usr1, Arc::clone(&INTERRUPTED)).expect("can be caught");
    // Relaxed: nothing else is read because of it.
    session.interrupted_by(|| INTERRUPTED.load(Ordering::Relaxed));
}

/// A step is repeated.
fn say_change(step: u64, change: &Change) {
    let bits = |seats: &mut dyn Iterator<Item = &Process>| {
        seats.fold(0_u64, |bits, process| bits | 1 << process.seat.0)
    };
    let left = bits(&mut change.left.iter().map(|(process, _)| process));
    let members = bits(&mut change.members.iter());
    say(&format!("retry {step} {} {} {left} {members} {change}", change.from, change.epoch));
}

/// The update of a step that these seats have committed.
fn apply(applied: &mut [u64], settings: &Settings, seat: u32, step: u64, bits: u64) {
    let last = applied.len() - 1;
    assert_eq!(applied[0], applied[last], "all of the state is there");
    let next = applied[0].wrapping_mul(31).wrapping_add(step << 8 | bits);
    (applied[0], applied[last]) = (next, next);
    applied[last / 2] += u64::from(settings.errs == Some((seat, step)));
    if settings.unit > 1 {
        // Equal on those of one place in their units, who read it from each other.
        let place = u64::from(seat % settings.unit) + 1;
        assert!(step == 0 || applied[last - 1] == place, "the state of another place");
        applied[last - 1] = place;
    }
}

fn run(mut session: Session, seat: u32, mut settings: Settings, enough: &Path) {
    if settings.is_on_gpu {
        return gpu_member::make_steps(session, seat, settings, enough);
    }
    // The contributors, how many of them have had enough, and what differs from step to step.
    let mut sums = session.buffer::<u64>(2 + ELEMENTS).expect("there is memory");
    let mut watched = session.buffer::<u64>(WATCHED).expect("there is memory");
    watched.fill(0x5eed);
    let mut applied = session.state::<u64>("applied", settings.state).expect("there is memory");
    if settings.leaves_unread {
        return session.leave().map_or_else(|error| end(&error), |()| say("left"));
    }
    session.leave_on(Signal::TERM.as_raw()).expect("can be caught");
    interrupt_if_told(&mut session);
    while settings.holds && !enough.with_file_name(GO_ON).exists() {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    let mut parts = settings.parts.then(|| Parts::of(&mut session));
    let mut told = None;
    if settings.is_idle {
        return make_idle_steps(session, settings.steps);
    }
    loop {
        let mut step = session.step();
        if settings.quits == Some((seat, step)) {
            break;
        }
        let verdict = session.attempt(|group, begun| {
            step = begun; // Of a spare it is not known before.
            if fails_in(&mut settings.fails, seat, step) {
                return Err(CollectiveError::Own { rank: group.rank() });
            }
            sums[0] = 1 << seat;
            let is_last = if settings.steps > 0 { step + 1 == settings.steps } else { enough.exists() };
            sums[1] = u64::from(is_last);
            sums[2..].fill(step << 8 | 1);
            group.all_reduce(&mut sums, ReduceOp::Sum)?;
            let count = u64::from(sums[0].count_ones());
            assert_eq!(count, u64::from(group.contributors()), "each member contributes once");
            if settings.heal == Heal::Hidden {
                look_at_neutral(group, seat, sums[0], step)?;
            }
            if settings.gathers {
                let mut ranks = vec![0; group.world_size() as usize];
                group.all_gather(&[group.rank()], &mut ranks)?;
                assert!(ranks.into_iter().eq(0..group.world_size()));
            }
            assert!(sums[2..].iter().all(|sum| *sum == count * (step << 8 | 1)), "step {step}");
            if let Some(parts) = &mut parts {
                parts.use_in(group, seat, step)?;
            }
            stop_if_told(&mut settings, seat, step);
            send_if_told(&mut settings, group, seat, step)
        });
        say_newest_change(&session, &mut told);
        if let (Ok(Verdict::Retry(_)), Some(parts)) = (&verdict, &mut parts) {
            parts.expect_ended();
        }
        if settings.watches {
            assert!(watched.iter().all(|word| *word == 0x5eed), "nobody writes there");
        }
        match verdict {
            Ok(Verdict::Committed) => {
                applied.update(|applied| apply(applied, &settings, seat, step, sums[0]));
                if settings.audits
                    && let Err(error) = session.audit()
                {
                    return end(&error);
                }
                if applied.is_here() {
                    say(&format!("committed {step} {} {}", sums[0], applied[0]));
                } else {
                    say(&format!("unread {step}"));
                }
                if sums[1] > 0 {
                    break;
                }
            }
            Ok(Verdict::Retry(change)) => say_change(step, &change),
            Err(SessionError::Left) => {
                say("end Left");
                break;
            }
            Err(error) => return end(&error),
        }
    }
    let (registered, connected) = session.set_up();
    say(&format!("setup {registered} {connected} {}", session.epoch()));
    let line = session.timeline();
    say(&format!("timeline {:?} {:?} {:?}", line.agreement(), line.drain(), line.plan()));
    session.leave().expect("is always left");
    say("left");
}
