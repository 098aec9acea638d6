//! What must hold, held by code that shares nothing with the protocol.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use pleach_membership::{Process, Record, Verdict};
use pleach_transport::Nanos;

#[derive(Debug)]
pub(crate) struct Checkers {
    unit: NonZeroU32,
    most: usize,
    pub(crate) records: BTreeMap<u64, Arc<Record>>,
    pub(crate) no_quorums: u64,
    pub(crate) retries: u64,
    /// When a process last entered an epoch or was expelled.
    pub(crate) last_change: Nanos,
    /// By process: the first step whose result it has not applied.
    applied: BTreeMap<Process, u64>,
    /// By process: the step under way, and the epoch in which it was begun.
    begun: BTreeMap<Process, (u64, u64)>,
    /// By step: the epoch in which its applied result was computed.
    committed: BTreeMap<u64, u64>,
    /// By epoch: the last step of which anybody was told in it.
    told: BTreeMap<u64, u64>,
    entered: BTreeMap<u64, BTreeSet<Process>>,
}

impl Checkers {
    pub(crate) fn new(first: &Arc<Record>, unit: NonZeroU32, most: usize) -> Self {
        Self {
            unit,
            most,
            records: BTreeMap::from([(0, Arc::clone(first))]),
            no_quorums: 0,
            retries: 0,
            last_change: Nanos::ZERO,
            applied: first.members().iter().map(|member| (*member, 0)).collect(),
            begun: BTreeMap::new(),
            committed: BTreeMap::new(),
            told: BTreeMap::new(),
            entered: BTreeMap::new(),
        }
    }

    /// One record a number, the dead included; and its members are whole units, and not too many.
    pub(crate) fn learned(&mut self, process: Process, record: &Arc<Record>, now: Nanos) {
        let mut members = BTreeMap::<u32, u32>::new();
        for member in record.members() {
            *members.entry(member.seat.0 / self.unit).or_default() += 1;
        }
        assert!(record.members().len() <= self.most, "{record:?} has more than {} members", self.most);
        assert!(members.values().all(|count| *count == self.unit.get()), "{record:?} has a part of a unit");
        let first = self.records.entry(record.number()).or_insert_with(|| Arc::clone(record));
        assert_eq!(first.digest(), record.digest(), "{process} learned another {record:?} at {now}");
        self.check_told();
    }

    /// Told means committed in every later record.
    fn check_told(&self) {
        for (epoch, step) in &self.told {
            for record in self.records.range(epoch + 1..).map(|(_, record)| record) {
                assert!(record.step() > *step, "step {step} was told in epoch {epoch}, but {record:?}");
            }
        }
    }

    pub(crate) fn begun(&mut self, process: Process, step: u64, epoch: u64) {
        assert!(!self.begun.contains_key(&process), "{process} begins a step in a step");
        assert_eq!(self.applied.get(&process), Some(&step), "{process} skips or repeats a step");
        self.begun.insert(process, (step, epoch));
    }

    /// Each step is applied once by each, and all apply the result of one epoch.
    pub(crate) fn verdict(&mut self, process: Process, step: u64, verdict: Verdict, latest: Option<u64>) {
        let (begun, epoch) = self.begun.remove(&process).expect("a verdict is of a step that was begun");
        assert_eq!(begun, step, "{process}");
        if verdict == Verdict::Retry {
            self.retries += 1;
            return;
        }
        self.applied.insert(process, step + 1);
        let first = *self.committed.entry(step).or_insert(epoch);
        assert_eq!(first, epoch, "{process} applies step {step} of another epoch");
        if latest == Some(epoch) {
            let told = self.told.entry(epoch).or_insert(step);
            *told = step.max(*told);
            self.check_told();
        }
    }

    pub(crate) fn entered(&mut self, process: Process, record: &Arc<Record>, now: Nanos) {
        self.last_change = now;
        assert!(record.contains(process), "{process} enters an epoch that it is not in");
        // Who joins reads the states of this step.
        let applied = *self.applied.entry(process).or_insert(record.step());
        assert_eq!(applied, record.step(), "{process} enters {record:?} with another state");
        self.entered.entry(record.number()).or_default().insert(process);
    }

    /// Who is out changes no byte of a member that has entered.
    pub(crate) fn written(&self, from: Process, to: Process, epoch: u64, entered: Option<u64>) {
        if let Some(entered) = entered {
            assert_eq!(epoch, entered, "{from} writes into {to}, which is in another epoch");
        }
    }

    pub(crate) fn steps(&self) -> usize {
        self.committed.len()
    }
}
