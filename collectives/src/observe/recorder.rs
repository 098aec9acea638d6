//! The flight recorder: writes a rank's last operations to a file when its group has failed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;

use super::{FailureRecord, Observations, Quoted, TimedCall};
use crate::call::Descriptor;

/// By folder and rank: the number of records that this process has written. Several groups of a
/// process may fail when a rank dies.
static WRITTEN: Mutex<BTreeMap<(PathBuf, Rank), u32>> = Mutex::new(BTreeMap::new());

/// Writes one file for a group.
#[derive(Debug)]
pub(crate) struct Recorder {
    folder: Option<PathBuf>,
    /// Whether the record was written, which prevents a second write. Relaxed: the written values
    /// have locks of their own.
    is_done: AtomicBool,
}

impl Recorder {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, is_done: AtomicBool::new(false) }
    }

    /// Writes the record after a failure of the group, once. `last_calls` are the last calls that
    /// have begun, the oldest call first.
    pub(crate) fn write(
        &self,
        rank: Rank,
        observations: &Observations,
        last_calls: impl FnOnce() -> Vec<(u64, Descriptor)>,
    ) {
        let (Some(folder), Some(failure)) = (&self.folder, observations.failure()) else { return };
        if self.is_done.swap(true, Ordering::Relaxed) {
            return;
        }
        let path = path(folder, rank);
        let text = text(rank, failure, &observations.last_timed_calls(), &last_calls());
        match std::fs::write(&path, text) {
            Ok(()) => tracing::warn!(
                rank,
                "the group failed; this rank's last operations are in {}",
                path.display()
            ),
            Err(error) => {
                let path = path.display();
                tracing::warn!(rank, "no flight record: {path} ({error}); name a folder that can be written");
            }
        }
    }
}

/// The file of this process's next record. The first file has the plain name; later files have a
/// number after the name.
fn path(folder: &Path, rank: Rank) -> PathBuf {
    let mut written = lock(&WRITTEN);
    let number = written.entry((folder.to_owned(), rank)).or_default();
    *number += 1;
    let process = std::process::id();
    let name = match *number {
        1 => format!("pleach-flight-rank{rank}-{process}.json"),
        number => format!("pleach-flight-rank{rank}-{process}-{number}.json"),
    };
    folder.join(name)
}

/// The text of a record: one line for each operation, with times in microseconds of the host's
/// monotonic clock.
fn text(
    rank: Rank,
    failure: &FailureRecord,
    timed_calls: &[(TimedCall, String)],
    calls: &[(u64, Descriptor)],
) -> String {
    let us = |nanos: u64| nanos as f64 / 1e3;
    let mut text = format!(
        "{{\n\"rank\":{rank},\n\"failure\":{},\n\"failed_at_us\":{:.3},\n\"unfinished\":[",
        Quoted(&failure.text),
        us(failure.at.0)
    );
    // Writing to a string cannot fail.
    for (number, unfinished) in failure.unfinished.iter().enumerate() {
        let _ = write!(
            text,
            "{}\n{{\"run\":{},\"call\":{},\"algorithm\":{}",
            comma(number),
            unfinished.run,
            Quoted(&unfinished.call.to_string()),
            Quoted(&unfinished.algorithm)
        );
        if let Some(begun) = unfinished.begun {
            let waited_us = us(failure.at.0.saturating_sub(begun.0));
            let _ = write!(text, ",\"begun_us\":{:.3},\"waited_us\":{waited_us:.3}", us(begun.0));
        }
        text.push_str(",\"waits_for\":[");
        for (number, (peer, step)) in unfinished.waits_for.iter().enumerate() {
            let _ = write!(text, "{}{{\"rank\":{peer},\"step\":{}}}", comma(number), Quoted(step));
        }
        text.push_str("]}");
    }
    text.push_str("\n],\n\"timed\":[");
    for (number, (timed, algorithm)) in timed_calls.iter().enumerate() {
        let TimedCall { run, call, begun, ended, latest, .. } = timed;
        let _ = write!(
            text,
            "{}\n{{\"run\":{run},\"call\":{},\"algorithm\":{},\"begun_us\":{:.3},\"ended_us\":{:.3}",
            comma(number),
            Quoted(&call.to_string()),
            Quoted(algorithm),
            us(begun.0),
            us(ended.0)
        );
        if let Some((peer, skew_ns)) = latest {
            let _ = write!(text, ",\"last\":{peer},\"arrival_skew_us\":{:.3}", us(*skew_ns));
        }
        text.push('}');
    }
    text.push_str("\n],\n\"begun\":[");
    for (number, (run, call)) in calls.iter().enumerate() {
        let _ = write!(text, "{}\n{{\"run\":{run},\"call\":{}}}", comma(number), Quoted(&call.to_string()));
    }
    text.push_str("\n]\n}\n");
    text
}

fn comma(number: usize) -> &'static str {
    if number == 0 { "" } else { "," }
}
