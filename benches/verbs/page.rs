//! The best of each, as a table and as `docs/verbs.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::contender::{Contender, Measured, Task};
use crate::report::write_between;

/// Around what is measured.
const MARKS: [&str; 2] = [
    "<!-- measured: written by cargo bench --bench verbs -- --write-docs -->",
    "<!-- end of what is measured -->",
];

/// What was found of each, or why nothing was.
#[derive(Default)]
pub(crate) struct Best(BTreeMap<(Task, Contender), Result<Measured, String>>);

impl Best {
    pub(crate) fn add(&mut self, task: &Task, contender: &Contender, measured: Result<Measured, String>) {
        let key = (*task, *contender);
        let better = match (self.0.remove(&key), measured) {
            (Some(Ok(one)), Ok(other)) => {
                let is_better = (other.value > one.value) == task.is_bandwidth();
                Ok(if is_better { other } else { one })
            }
            (Some(Ok(one)), Err(_)) => Ok(one),
            (_, other) => other,
        };
        self.0.insert(key, better);
    }

    /// How pleach does beside another: the part of its bandwidth, or how many times its time.
    fn ratio(&self, task: &Task, other: Contender) -> Option<f64> {
        let value = |contender| Some(self.0.get(&(*task, contender))?.as_ref().ok()?.value);
        Some(value(Contender::Pleach)? / value(other)?)
    }

    /// A row for each that was measured, in Markdown.
    pub(crate) fn table(&self) -> String {
        let mut text = String::from("| what | who | best | pleach beside it |\n| --- | --- | --- | --- |\n");
        for ((task, contender), value) in &self.0 {
            let value = match value {
                Ok(measured) => format!("{:.1} {}", measured.value, task.unit()),
                Err(reason) => format!("skipped: {}", reason.replace('|', "/")),
            };
            let ratio = match (contender, self.ratio(task, *contender)) {
                (Contender::Pleach, _) | (_, None) => String::new(),
                (_, Some(ratio)) if task.is_bandwidth() => format!("{ratio:.2} of its bandwidth"),
                (_, Some(ratio)) => format!("{ratio:.2} times its time"),
            };
            let _ = writeln!(text, "| {task} | {contender} | {value} | {ratio} |");
        }
        text
    }

    /// What pleach asked of its NIC for each MiB or signal.
    fn asked(&self) -> String {
        let mut text = String::from(
            "| what | for each | requests | doorbells | completions | looks that found some |\n| --- | --- | --- | --- | --- | --- |\n",
        );
        for ((task, _), measured) in &self.0 {
            let Ok(Measured { asked: Some(asked), .. }) = measured else { continue };
            let [requests, doorbells, completions, looks] = asked;
            let each = if task.is_bandwidth() { "MiB" } else { "signal there and back" };
            let _ = writeln!(
                text,
                "| {task} | {each} | {requests:.2} | {doorbells:.2} | {completions:.2} | {looks:.2} |"
            );
        }
        text
    }
}

/// Writes the measured part of the page.
pub(crate) fn write(best: &Best, rounds: u32) -> Result<(), String> {
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let machine = match std::env::var_os("RDMA_VM") {
        Some(_) => "Soft-RoCE in an emulated machine, whose times are not those of any real one",
        None => "RDMA devices of this machine",
    };
    let (table, asked) = (best.table(), best.asked());
    let measured = format!(
        "\n{machine}, {processors} processors;\nbest of {rounds} rounds.\n\n{table}\nWhat rank 0 asked of its NIC:\n\n{asked}\n"
    );
    write_between(MARKS, &measured, concat!(env!("CARGO_MANIFEST_DIR"), "/docs/verbs.md"))
}
