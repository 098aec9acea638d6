//! The table beside a naive one, by random requests; the same comparison finds each mutant of the
//! naive one. Then single cases.

use std::collections::BTreeSet;

use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use super::naive::{Mutant, NaiveTable};
use super::*;

const OWN: u64 = 7;

/// Small, so that each limit is met.
const SMALL: TableLimits = TableLimits {
    bytes_held: 10,
    tensors_held: 4,
    waiting_sends: 3,
    waiting_receives: 4,
    recent_requests: 3,
    ended_steps: 2,
};

#[derive(Clone, Debug)]
enum Operation {
    Send { key: usize, bytes: u64, patience: u64 },
    Receive { key: usize, id: u64, incarnation: Option<u64>, patience: u64 },
    CancelReceive(usize),
    CancelSend(usize),
    Restore(usize),
    Abort(u64),
    CleanUp(u64),
    Pass(u64),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let (key, step, patience) = (0..KEYS.len(), 1_u64..4, 0_u64..20);
    let incarnation = prop_oneof![4 => Just(None), 2 => Just(Some(OWN)), 1 => Just(Some(OWN - 1))];
    let send = (key.clone(), 0_u64..12, patience.clone());
    let receive = (key, prop_oneof![Just(0), 1_u64..8], incarnation, patience);
    let operation = prop_oneof![
        8 => send.prop_map(|(key, bytes, patience)| Operation::Send { key, bytes, patience }),
        8 => receive.prop_map(|(key, id, incarnation, patience)| Operation::Receive {
            key, id, incarnation, patience
        }),
        2 => any::<usize>().prop_map(Operation::CancelReceive),
        2 => any::<usize>().prop_map(Operation::CancelSend),
        3 => any::<usize>().prop_map(Operation::Restore),
        1 => step.clone().prop_map(Operation::Abort),
        1 => step.prop_map(Operation::CleanUp),
        3 => (0_u64..8).prop_map(Operation::Pass),
    ];
    prop::collection::vec(operation, 0..80)
}

const KEYS: [(u64, &str); 5] = [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a")];

fn key(number: usize) -> Key {
    let (step, name) = KEYS[number];
    Key::new(step, name).expect("a good name")
}

/// Both tables with the tensors that each has given out, which are compared first.
struct Pair {
    table: TensorTable<u32>,
    naive: NaiveTable,
    now: Nanos,
    sends: Vec<SendId>,
    receives: Vec<ReceiveId>,
    delivered: Vec<(Delivered<u32>, Delivered<u32>)>,
    /// Tensors that the table was given and that have not left it.
    inside: BTreeSet<u32>,
    /// Requests that have not ended.
    open: BTreeSet<u64>,
    next: u32,
}

/// The same value of both tables.
fn same<V: std::fmt::Debug + PartialEq>(table: V, naive: &V) -> Result<V, TestCaseError> {
    if table == *naive {
        Ok(table)
    } else {
        Err(TestCaseError::fail(format!("{table:?}, and naive {naive:?}")))
    }
}

fn check(holds: bool, what: &str) -> Result<(), TestCaseError> {
    if holds { Ok(()) } else { Err(TestCaseError::fail(what.to_owned())) }
}

impl Pair {
    fn new(mutant: Option<Mutant>) -> Self {
        Self {
            table: TensorTable::new(OWN, SMALL),
            naive: NaiveTable::new(OWN, SMALL, mutant),
            now: Nanos(100),
            sends: Vec::new(),
            receives: Vec::new(),
            delivered: Vec::new(),
            inside: BTreeSet::new(),
            open: BTreeSet::new(),
            next: 0,
        }
    }

    fn run(&mut self, operations: &[Operation]) -> Result<(), TestCaseError> {
        for operation in operations {
            self.step(operation)?;
            self.compare()?;
        }
        // Nothing is lost: what no step holds has left the table.
        for step in 1..4 {
            self.step(&Operation::CleanUp(step))?;
            self.compare()?;
        }
        check(self.inside.is_empty() && self.open.is_empty(), "a tensor or a request was lost")?;
        check(self.table.bytes_held() == 0 && self.table.next_deadline().is_none(), "something is left")
    }

    fn step(&mut self, operation: &Operation) -> Result<(), TestCaseError> {
        let (table, naive, now) = (&mut self.table, &mut self.naive, self.now);
        match *operation {
            Operation::Send { key: number, bytes, patience } => {
                let (key, tensor, deadline) = (key(number), self.next, Nanos(now.0 + patience));
                self.next += 1;
                let sent = table.send(now, &key, bytes, tensor, deadline);
                if let Ok(id) = same(sent, &naive.send(now, &key, bytes, tensor, deadline))? {
                    self.sends.push(id);
                    self.inside.insert(tensor);
                    self.open.insert(id.0);
                }
            }
            Operation::Receive { key: number, id, incarnation, patience } => {
                let (key, deadline) = (key(number), Nanos(now.0 + patience));
                let request = Request { id, incarnation };
                let received = table.receive(now, &key, request, deadline);
                if let Ok(id) = same(received, &naive.receive(now, &key, request, deadline))? {
                    self.receives.push(id);
                    self.open.insert(id.0);
                }
            }
            Operation::CancelReceive(at) if !self.receives.is_empty() => {
                let id = self.receives[at % self.receives.len()];
                if same(table.cancel_receive(now, id), &naive.cancel_receive(now, id))? {
                    check(self.open.remove(&id.0), "a receive ended twice")?;
                }
            }
            Operation::CancelSend(at) if !self.sends.is_empty() => {
                let id = self.sends[at % self.sends.len()];
                if let Some(tensor) = same(table.cancel_send(now, id), &naive.cancel_send(now, id))? {
                    check(self.open.remove(&id.0) && self.inside.remove(&tensor), "a send ended twice")?;
                }
            }
            Operation::Restore(at) if !self.delivered.is_empty() => {
                let (one, other) = self.delivered.remove(at % self.delivered.len());
                self.inside.insert(one.tensor);
                if let Some(tensor) = same(table.restore(now, one), &naive.restore(now, other))? {
                    self.inside.remove(&tensor);
                }
            }
            Operation::Abort(step) => {
                let held = same(table.abort(now, step, "a test"), &naive.abort(now, step, "a test"))?;
                check(held.iter().all(|tensor| self.inside.remove(tensor)), "a tensor came back twice")?;
            }
            Operation::CleanUp(step) => {
                let held = same(table.clean_up(now, step), &naive.clean_up(now, step))?;
                check(held.iter().all(|tensor| self.inside.remove(tensor)), "a tensor came back twice")?;
            }
            Operation::Pass(time) => {
                // Deadlines pass also without a call of `expire`.
                self.now = Nanos(now.0 + time);
                if time % 2 == 0 {
                    table.expire(self.now);
                    naive.expire(self.now);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        let table = &mut self.table;
        let counts =
            (table.bytes_held(), table.tensors_held(), table.waiting_sends(), table.waiting_receives());
        same(counts, &self.naive.counts())?;
        same(table.next_deadline(), &self.naive.next_deadline())?;
        let outcomes = self.naive.take_outcomes();
        for (one, other) in same(table.take_outcomes(), &outcomes)?.into_iter().zip(outcomes) {
            let number = match one {
                Outcome::Sent { send } => send.0,
                Outcome::SendFailed { send, tensor, .. } => {
                    check(self.inside.remove(&tensor), "a tensor came back twice")?;
                    send.0
                }
                Outcome::ReceiveFailed { receive, .. } => receive.0,
                Outcome::Received { receive, delivered } => {
                    check(self.inside.remove(&delivered.tensor), "a tensor was received twice")?;
                    let Outcome::Received { delivered: other, .. } = other else { continue };
                    self.delivered.push((delivered, other));
                    receive.0
                }
            };
            check(self.open.remove(&number), "a request ended twice")?;
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(Config { cases: 4096, failure_persistence: None, ..Config::default() })]

    #[test]
    fn the_table_does_the_same_as_a_naive_one(operations in operations()) {
        Pair::new(None).run(&operations)?;
    }
}

#[test]
fn the_comparison_finds_each_mutant() {
    let mutants = [
        Mutant::TakenTwice,
        Mutant::LostAtCancel,
        Mutant::RestoredBehind,
        Mutant::RestoredAfterCleanUp,
        Mutant::OldIncarnation,
        Mutant::BytesKept,
        Mutant::Late,
        Mutant::DuplicateServed,
        Mutant::Overtakes,
        Mutant::WaitingUnseen,
        Mutant::AbortForgotten,
    ];
    for mutant in mutants {
        let config =
            Config { cases: 512, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let found = TestRunner::new_with_rng(config, rng)
            .run(&operations(), |operations| Pair::new(Some(mutant)).run(&operations));
        assert!(found.is_err(), "{mutant:?} is not found");
    }
}

const NOW: Nanos = Nanos(1_000);
const LATER: Nanos = Nanos(2_000);

fn table(bytes_held: u64) -> TensorTable<u32> {
    TensorTable::new(OWN, TableLimits { bytes_held, ..TableLimits::default() })
}

/// The tensors of all outcomes that are receptions.
fn received(table: &mut TensorTable<u32>) -> Vec<u32> {
    let outcomes = table.take_outcomes().into_iter();
    let tensor = |outcome| match outcome {
        Outcome::Received { delivered, .. } => Some(delivered.tensor),
        _ => None,
    };
    outcomes.filter_map(tensor).collect()
}

#[test]
fn sends_of_a_key_queue_up_and_each_receive_takes_one() {
    let (mut table, key) = (table(100), key(0));
    for tensor in 1..3 {
        table.send(NOW, &key, 10, tensor, LATER).expect("is accepted");
    }
    assert_eq!(table.bytes_held(), 20);
    for _ in 0..3 {
        table.receive(NOW, &key, Request::default(), LATER).expect("is accepted");
    }
    assert_eq!(received(&mut table), [1, 2]);
    assert_eq!((table.bytes_held(), table.waiting_receives()), (0, 1));
    table.send(NOW, &key, 10, 3, LATER).expect("is accepted");
    assert_eq!((received(&mut table), table.bytes_held()), (vec![3], 0));
}

#[test]
fn a_receive_takes_the_tensor_of_a_send_for_which_there_was_no_room() {
    let mut table = table(10);
    table.send(NOW, &key(0), 10, 1, LATER).expect("is accepted");
    table.send(NOW, &key(1), 10, 2, LATER).expect("is accepted");
    assert_eq!((table.waiting_sends(), table.bytes_held()), (1, 10));
    table.receive(NOW, &key(1), Request::default(), LATER).expect("is accepted");
    assert_eq!((received(&mut table), table.waiting_sends(), table.bytes_held()), (vec![2], 0, 10));
}

#[test]
fn a_send_that_found_no_room_says_so_at_its_deadline_and_gives_the_tensor_back() {
    let mut table = table(10);
    table.send(NOW, &key(0), 8, 1, LATER).expect("is accepted");
    let send = table.send(NOW, &key(0), 4, 2, LATER).expect("is accepted");
    table.take_outcomes();
    assert_eq!(table.next_deadline(), Some(LATER));
    table.expire(LATER);
    let [Outcome::SendFailed { send: failed, tensor: 2, error }] = &table.take_outcomes()[..] else {
        panic!("the send fails");
    };
    assert_eq!(*failed, send);
    assert_eq!(
        error.to_string(),
        "tensor 'a' of step 1 of 4 bytes was not sent within 1µs: 8 bytes of at most 10 are held here; \
         receive or clean up tensors, or raise the limit"
    );
}

#[test]
fn a_restarted_sender_refuses_receivers_of_its_last_incarnation() {
    let (mut table, key) = (table(10), key(0));
    table.send(NOW, &key, 1, 1, LATER).expect("is accepted");
    let request = Request { id: 1, incarnation: Some(OWN - 1) };
    let error = table.receive(NOW, &key, request, LATER).expect_err("is another incarnation");
    assert_eq!(error, ReceiveError::WrongIncarnation { key: key.clone(), asked: OWN - 1, own: OWN });
    // The id was not used up, as nothing was served.
    let request = Request { id: 1, incarnation: Some(OWN) };
    table.receive(NOW, &key, request, LATER).expect("is served");
    assert_eq!(received(&mut table), [1]);
    let error = table.receive(NOW, &key, request, LATER).expect_err("was served");
    assert_eq!(error, ReceiveError::DuplicateRequest { key, request: 1 });
}

#[test]
fn an_aborted_step_refuses_with_the_first_reason_until_it_is_cleaned_up() {
    let (mut table, key) = (table(10), key(0));
    table.send(NOW, &key, 1, 1, LATER).expect("is accepted");
    assert_eq!(table.abort(NOW, 1, "rank 3 died"), [1]);
    table.abort(NOW, 1, "and then all");
    let error = table.receive(NOW, &key, Request::default(), LATER).expect_err("is aborted");
    assert_eq!(error.to_string(), "tensor 'a' of step 1 was not received: the step was aborted: rank 3 died");
    assert_eq!(table.send(NOW, &key, 1, 2, LATER).expect_err("is aborted").tensor, 2);
    assert!(table.clean_up(NOW, 1).is_empty());
    table.send(NOW, &key, 1, 3, LATER).expect("begins anew");
    // A reason is cut between letters.
    table.abort(NOW, 2, &"ä".repeat(1_000));
    let error = table.send(NOW, &Key::new(2, "a").expect("is good"), 1, 4, LATER).expect_err("is aborted");
    let SendError::Aborted { reason, .. } = error.error else { panic!("is aborted") };
    assert_eq!(reason.len(), REASON_BYTES_MAX);
}

#[test]
fn the_last_step_of_all_ends_like_any_other() {
    let mut table = table(10);
    let last = Key::new(u64::MAX, "a").expect("is good");
    table.send(NOW, &last, 1, 1, LATER).expect("is accepted");
    table.send(NOW, &key(0), 1, 2, LATER).expect("is accepted");
    assert_eq!(table.abort(NOW, u64::MAX, "a test"), [1]);
    assert_eq!(table.bytes_held(), 1);
}
