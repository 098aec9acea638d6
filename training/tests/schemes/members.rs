//! Members of a session without a session: policies, and a model of what a session promises, in
//! which everything that may happen does so at any moment. Operations end on one member before
//! another, members end, join or fail between any two events, and the others hear of it late.

use pleach_collectives::{Rank, RankSpace};
use pleach_training::interpreter::{Interpreter, Request, Vectors};
use pleach_training::policy::{Event, Outcome, Vector};
use pleach_training::{Layout, Scheme};
use pleach_transport::clock::Nanos;
use pleach_vocabulary::random::Random;

use super::model::{Plain, scheme};

const MEMBERS: u32 = 5;
/// More than there are members at a time.
const SEATS: u32 = 40;
const PARAMETERS: usize = 7;
const STEPS: u64 = 20;
/// Trainings of each scheme.
const SEEDS: u64 = 100;
/// No training takes so many events.
const EVENTS_MAX: u32 = 200_000;

/// What came of an operation.
#[derive(Clone, Debug)]
enum Found {
    Elements(Vec<f32>, Outcome),
    Sums(Vec<u64>),
}

struct Member {
    seat: u32,
    interpreter: Interpreter,
    vectors: Plain,
    /// The epoch that it has entered, and whether its policy knows.
    epoch: u64,
    is_told: bool,
    /// Operations in their order, with what came of them.
    asked: Vec<(Request, Option<Found>)>,
    requested: Option<u64>,
    /// Its parameters after the last commit of which it has heard.
    model: Vec<f32>,
    /// The exchange whose verdict it waits for.
    commits: Option<u64>,
    is_committed: bool,
    /// The commits before it came.
    earlier: u64,
    /// The step with which it has begun, and the steps that it has made.
    first: u64,
    made: Vec<u64>,
    now: u64,
}

/// What all members have in shared after a commit.
#[derive(Clone, Debug, PartialEq)]
struct SharedState {
    vectors: Vec<Vec<f32>>,
    places: u64,
    digest: u64,
    next: u64,
    is_over: bool,
}

/// By scheme: the vectors that all members have in shared after a commit, each with those that are
/// copies of it on a member that joins.
fn shared_vectors(text: &str) -> &'static [&'static [Vector]] {
    match text.split(':').next() {
        Some("local-sgd" | "elastic-bsp") => &[&[Vector::Parameters]],
        Some("diloco") => &[&[Vector::Anchor, Vector::Parameters], &[Vector::Velocity]],
        Some("easgd" | "eamsgd") => &[&[Vector::Centre, Vector::Parameters]],
        // Each has a model of its own.
        Some("bidmach") => &[],
        _ => panic!("{text} has no members"),
    }
}

impl Member {
    fn tell(&mut self, event: Event) {
        let (mut requests, made, requested) = (Vec::new(), &mut self.made, self.requested);
        self.now += 1;
        let mut optimizer = |parameters: &mut [f32], gradient: &[f32]| {
            parameters.iter_mut().zip(gradient).for_each(|(x, slope)| *x -= 0.1 * slope);
            made.push(requested.expect("a step was computed"));
        };
        let (vectors, now) = (&mut self.vectors, Nanos(self.now));
        let told = self.interpreter.deliver(event, now, vectors, &mut optimizer, &mut requests);
        told.unwrap_or_else(|error| panic!("seat {}, {event:?}: {error}", self.seat));
        if matches!(event, Event::Computed { .. } | Event::Stop) {
            self.requested = None;
        }
        for request in requests {
            match request {
                Request::Compute { step } => self.requested = Some(step),
                Request::Commit { step } => self.commits = Some(step),
                request => self.asked.push((request, None)),
            }
        }
    }

    /// What it has in shared with the others, when it has heard of a commit.
    fn shared(&mut self, vectors: &[&[Vector]]) -> SharedState {
        let vectors = vectors.iter().map(|same| self.vectors.vector(same[0]).to_vec()).collect();
        let (agreement, next) = (self.interpreter.agreement(), self.interpreter.joins_at());
        let is_over = self.interpreter.has_ended();
        SharedState { vectors, places: agreement.places, digest: agreement.digest, next, is_over }
    }

    fn take_over(&mut self, shared: &SharedState, vectors: &[&[Vector]]) {
        for (elements, same) in shared.vectors.iter().zip(vectors) {
            for vector in *same {
                let [into] = self.vectors.pieces([*vector], &(0..PARAMETERS));
                into.copy_from_slice(elements);
            }
        }
        self.first = shared.next;
        self.interpreter.take_over(shared.places, shared.digest, shared.next);
    }

    fn compute(&mut self, step: u64) {
        let own = (u64::from(self.seat) * 31 + step) as f32;
        let [parameters, gradient] =
            self.vectors.pieces([Vector::Parameters, Vector::Gradient], &(0..PARAMETERS));
        for (place, (slope, x)) in gradient.iter_mut().zip(parameters).enumerate() {
            *slope = *x - (own + place as f32).sin();
        }
        (0..self.interpreter.buckets().len()).for_each(|bucket| self.tell(Event::Ready(bucket)));
        self.tell(Event::Computed { step });
    }

    /// An operation has ended.
    fn hears(&mut self, found: Found, request: &Request) {
        match (found, request) {
            (Found::Elements(elements, outcome), Request::Average { id, vector, piece, .. }) => {
                let [into] = self.vectors.pieces([*vector], piece);
                into.copy_from_slice(&elements);
                self.tell(Event::Done(*id, outcome));
            }
            (Found::Elements(elements, outcome), Request::Contribute { id, vector, .. }) => {
                let [into] = self.vectors.pieces([*vector], &(0..PARAMETERS));
                into.copy_from_slice(&elements);
                self.tell(Event::Done(*id, outcome));
            }
            (Found::Sums(sums), Request::Total { id, .. }) => {
                for (place, total) in (0..).zip(sums) {
                    self.tell(Event::Totalled { place, total });
                }
                self.tell(Event::Done(*id, Outcome::Totalled));
            }
            (_, request) => panic!("{request:?}"),
        }
    }
}

struct Session {
    scheme: Scheme,
    members: Vec<Member>,
    epoch: u64,
    committed: u64,
    random: Random,
    shared_vectors: &'static [&'static [Vector]],
    /// After the last commit of which a member has heard, with its number.
    shared: Option<(u64, SharedState)>,
    ended: u32,
    failed: u32,
    joined: u32,
}

impl Session {
    fn new(text: &str, seed: u64) -> Self {
        let scheme = scheme(text);
        let members = (0..MEMBERS).map(|seat| Self::member(&scheme, seat)).collect();
        Self {
            scheme,
            members,
            epoch: 0,
            committed: 0,
            random: Random::new(seed),
            shared_vectors: shared_vectors(text),
            shared: None,
            ended: 0,
            failed: 0,
            joined: 0,
        }
    }

    fn member(scheme: &Scheme, seat: u32) -> Member {
        let plan = scheme.plan_in_session(&Layout::of(&[PARAMETERS]), seat, SEATS).expect("it trains");
        Member {
            seat,
            interpreter: Interpreter::new(plan, true),
            vectors: Plain::of(1.0, PARAMETERS),
            epoch: 0,
            is_told: false,
            asked: Vec::new(),
            requested: None,
            model: vec![1.0; PARAMETERS],
            commits: None,
            is_committed: false,
            earlier: 0,
            first: 0,
            made: Vec::new(),
            now: 0,
        }
    }

    /// A member has heard of a commit: it has what the others have.
    fn heard(&mut self, at: usize) {
        let member = &mut self.members[at];
        member.model = member.vectors.vector(Vector::Parameters).to_vec();
        let own = member.shared(self.shared_vectors);
        match &self.shared {
            Some((number, shared)) if *number == self.committed => {
                assert_eq!(own, *shared, "commit {number} on {at}");
            }
            _ => self.shared = Some((self.committed, own)),
        }
    }

    /// One more member has what the others have in shared, if all know of the last commit, or the
    /// model of one of them.
    fn join(&mut self) -> bool {
        let all_know = self.members.iter().all(|member| !member.is_committed);
        let Some((number, shared)) = &self.shared else { return false };
        if !all_know || *number != self.committed || shared.is_over {
            return false;
        }
        self.joined += 1;
        let is_free = |seat: &u32| self.members.iter().all(|member| member.seat != *seat);
        let seat = (0..SEATS).find(is_free).expect("there are seats");
        let mut member = Self::member(&self.scheme, seat);
        member.take_over(shared, self.shared_vectors);
        if self.shared_vectors.is_empty() {
            let model = &self.members[self.random.index(self.members.len())].model;
            member.vectors.vector(Vector::Parameters).copy_from_slice(model);
            member.model.clone_from(model);
        }
        (member.epoch, member.earlier) = (self.epoch + 1, self.committed);
        self.members.push(member);
        true
    }

    /// Something happens to a member, if anything can. Returns whether it did.
    fn happens_to(&mut self, at: usize) -> bool {
        let (ranks, newest) = (self.members.len() as u32, self.epoch);
        let member = &mut self.members[at];
        if std::mem::take(&mut member.is_committed) {
            // The verdict of an epoch comes before the next one.
            member.commits = None;
            member.tell(Event::Committed);
            self.heard(at);
            return true;
        }
        let enters = member.epoch < newest && self.random.index(3) == 0;
        if enters || !member.is_told {
            member.asked.clear();
            (member.epoch, member.is_told, member.commits) = (newest, true, None);
            let step = member.interpreter.unfinished_step();
            member.requested = None;
            member.tell(Event::Membership { ranks, step, committed: self.committed });
            return true;
        }
        if let Some((Request::Leave { id, .. }, _)) = member.asked.first() {
            let id = *id;
            member.asked.remove(0);
            member.tell(Event::Done(id, Outcome::Left { carries: false }));
            return true;
        }
        if matches!(member.asked.first(), Some((_, Some(_)))) && self.random.index(2) == 0 {
            let (request, found) = member.asked.remove(0);
            member.hears(found.expect("it was looked at"), &request);
            return true;
        }
        match member.requested {
            Some(step) if step < STEPS => member.compute(step),
            Some(_) => member.tell(Event::Stop),
            None => return self.exchange(at) || self.commit(),
        }
        true
    }

    /// Carries the oldest operation of a member out, if all that it is among have come to it.
    fn exchange(&mut self, at: usize) -> bool {
        let among = match &self.members[at].asked.first() {
            Some((Request::Contribute { line, .. }, None)) => self.line(at, *line),
            Some((_, None)) => (0..self.members.len()).collect(),
            _ => return false,
        };
        let is_there = |place: &usize| {
            let member = &self.members[*place];
            let next = member.asked.first();
            let is_next = matches!(next, Some((request, None)) if !matches!(request, Request::Leave { .. }));
            is_next && member.epoch == self.epoch && member.is_told
        };
        if !among.iter().all(is_there) {
            return false;
        }
        let found = self.result(&among);
        for place in among {
            self.members[place].asked[0].1 = Some(found.clone());
        }
        true
    }

    /// The places of the members of a line.
    fn line(&self, at: usize, line: usize) -> Vec<usize> {
        let Scheme::Bidmach { dimensions, .. } = self.scheme else { panic!("it has no lines") };
        let grid = RankSpace::balanced(self.members.len() as u32, dimensions);
        let dimension = grid.extents().len() - 1 - line;
        grid.line(at as Rank, dimension).map(|rank| rank as usize).collect()
    }

    fn result(&mut self, among: &[usize]) -> Found {
        let mut sum: Option<Vec<f32>> = None;
        let mut totals: Option<Vec<u64>> = None;
        let (mut outcome, mut same) = (Outcome::Averaged, None);
        for place in among {
            let member = &mut self.members[*place];
            let (vector, piece) = match &member.asked[0].0 {
                Request::Average { vector, piece, .. } => (*vector, piece.clone()),
                Request::Contribute { vector, .. } => {
                    let alone = among.len() == 1;
                    outcome = Outcome::Combined { contributors: if alone { 0 } else { among.len() as u32 } };
                    (*vector, 0..PARAMETERS)
                }
                Request::Total { numbers, .. } => {
                    let totals = totals.get_or_insert_with(|| vec![0; numbers.len()]);
                    totals.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
                    continue;
                }
                request => panic!("{request:?}"),
            };
            assert_eq!(*same.get_or_insert((vector, piece.clone())), (vector, piece.clone()));
            let [elements] = member.vectors.pieces([vector], &piece);
            match &mut sum {
                None => sum = Some(elements.to_vec()),
                Some(sum) => sum.iter_mut().zip(elements).for_each(|(sum, element)| *sum += *element),
            }
        }
        if let Some(totals) = totals {
            assert!(sum.is_none(), "all add numbers up");
            return Found::Sums(totals);
        }
        let mean = sum.expect("there are members").into_iter().map(|sum| sum / among.len() as f32);
        Found::Elements(mean.collect(), outcome)
    }

    /// All members hear that an exchange counts, if all have asked about it.
    fn commit(&mut self) -> bool {
        let (epoch, next) = (self.epoch, self.committed);
        let is_done = |member: &Member| {
            member.epoch == epoch && member.commits.map(|own| member.earlier + own) == Some(next)
        };
        if !self.members.iter().all(is_done) || self.members.iter().any(|member| member.is_committed) {
            return false;
        }
        self.committed += 1;
        self.members.iter_mut().for_each(|member| member.is_committed = true);
        true
    }

    fn strike(&mut self) {
        if self.random.index(3) == 0 && self.join() {
            // The others hear of it.
        } else if self.random.index(2) == 0 && self.members.len() > 1 {
            let at = self.random.index(self.members.len());
            self.members.remove(at);
            self.ended += 1;
        } else {
            self.failed += 1;
        }
        self.epoch += 1;
    }

    fn has_ended(&self) -> bool {
        self.members.iter().all(|member| {
            let waits = member.is_committed || member.epoch < self.epoch || member.commits.is_some();
            member.interpreter.has_ended() && member.asked.is_empty() && !waits
        })
    }

    fn run(&mut self) {
        let mut idle = 0;
        for event in 0.. {
            assert!(event < EVENTS_MAX, "it does not end");
            if self.has_ended() {
                return;
            }
            if self.random.index(150) == 0 && self.failed < 8 {
                self.strike();
            }
            let at = self.random.index(self.members.len());
            idle = if self.happens_to(at) { 0 } else { idle + 1 };
            assert!(idle < 5_000, "members wait for each other");
        }
    }
}

#[test]
fn whenever_members_end_join_or_fail_each_step_is_made_once_and_each_exchange_counts_on_all() {
    let (mut ended, mut failed, mut joined) = (0, 0, 0);
    for text in [
        "local-sgd:every=3",
        "diloco:every=4",
        "diloco:every=6,fragments=3,delay=2,mix=0.5",
        "diloco:every=5,fragments=5,delay=4",
        "diloco:every=5,fragments=layers,delay=4",
        "easgd:every=3,mode=sync",
        "easgd:every=1,mode=sync",
        "eamsgd:every=2,mode=sync,momentum=0.5",
        "bidmach",
        "bidmach:every=2,dimensions=3",
        "elastic-bsp:lookahead=4",
    ] {
        for seed in 0..SEEDS {
            let mut session = Session::new(text, seed);
            session.run();
            let first = session.members[0].interpreter.agreement();
            let parameters = session.members[0].vectors.vector(Vector::Parameters).to_vec();
            assert!(first.places > 0 && parameters.iter().all(|x| x.is_finite()), "{text}, seed {seed}");
            for member in &mut session.members {
                assert_eq!(member.made, (member.first..STEPS).collect::<Vec<_>>(), "{text}, seed {seed}");
                assert_eq!(member.interpreter.agreement(), first, "{text}, seed {seed}");
                assert!(!first.is_broken, "{text}, seed {seed}");
                assert_eq!(member.vectors.vector(Vector::Parameters), parameters, "{text}, seed {seed}");
            }
            ended += session.ended;
            failed += session.failed;
            joined += session.joined;
        }
    }
    assert!(ended > 300 && failed > 300 && joined > 100, "{ended} ended, {failed} failed, {joined} joined");
}
