//! From one epoch to the next: sever, drain, enter.
//!
//! **Invariant:** an epoch is entered only after every process that is out was severed and every
//! pair with another member was drained: also one with a joiner, as the drain says that the other
//! end knows of the epoch too. A verdict that came with the record is told only then.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::output::Output;
use crate::{Cause, Message, Process, Reason, Record, Verdict};

/// Where a process is on its way into an epoch.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    record: Option<Arc<Record>>,
    undrained: BTreeSet<Process>,
    is_entered: bool,
    held: Option<(u64, Verdict)>,
}

impl Entry {
    /// In the first epoch there is nothing to drain.
    pub(crate) fn of_first(record: Option<Arc<Record>>) -> Self {
        let is_entered = record.is_some();
        Self { record, undrained: BTreeSet::new(), is_entered, held: None }
    }

    pub(crate) fn entered(&self) -> Option<&Arc<Record>> {
        self.record.as_ref().filter(|_| self.is_entered)
    }

    pub(crate) fn undrained(&self) -> BTreeSet<Process> {
        self.undrained.clone()
    }

    pub(crate) fn hold(&mut self, step: u64, verdict: Verdict) {
        self.held = Some((step, verdict));
    }

    /// The verdict that is told with the entry.
    pub(crate) fn held(&self) -> Option<(u64, Verdict)> {
        self.held
    }

    /// Another record stands.
    pub(crate) fn change(
        &mut self,
        process: Process,
        record: &Arc<Record>,
        is_out: bool,
        outputs: &mut Vec<Output>,
    ) {
        let before = self.record.replace(Arc::clone(record));
        self.is_entered = false;
        self.undrained.clear();
        let before = before.as_ref().map_or(&[][..], |before| before.members());
        if is_out {
            let all: BTreeSet<Process> = before.iter().chain(record.members()).copied().collect();
            outputs.extend(all.into_iter().filter(|peer| *peer != process).map(Output::Sever));
            self.tell(outputs);
            outputs.push(Output::Expelled(Arc::clone(record)));
            return;
        }
        for peer in before.iter().copied().filter(|peer| !record.contains(*peer)) {
            let is_dead = |cause: &Cause| cause.process == peer && cause.reason == Reason::Died;
            if !record.causes().iter().any(is_dead) {
                // Whoever made the record may not reach it.
                outputs.push(Output::Send { to: peer, message: Message::Decided(Arc::clone(record)) });
            }
            outputs.push(Output::Sever(peer));
        }
        for peer in record.members().iter().copied().filter(|peer| *peer != process) {
            if !before.contains(&peer) {
                outputs.push(Output::Connect(peer));
            }
            self.undrained.insert(peer);
            outputs.push(Output::Drain { peer, epoch: record.number() });
        }
        self.enter_where_drained(outputs);
    }

    pub(crate) fn drained(&mut self, peer: Process, epoch: u64, outputs: &mut Vec<Output>) {
        if self.record.as_ref().is_some_and(|record| record.number() == epoch) && self.undrained.remove(&peer)
        {
            self.enter_where_drained(outputs);
        }
    }

    fn enter_where_drained(&mut self, outputs: &mut Vec<Output>) {
        if let Some(record) = &self.record
            && self.undrained.is_empty()
        {
            let record = Arc::clone(record);
            self.is_entered = true;
            self.tell(outputs);
            outputs.push(Output::Enter(record));
        }
    }

    fn tell(&mut self, outputs: &mut Vec<Output>) {
        outputs.extend(self.held.take().map(|(step, verdict)| Output::Verdict { step, verdict }));
    }
}
