//! Every call of a group as Chrome's trace form has it, which Perfetto reads: one track a rank.
//!
//! Ranks that share a file add to it one after the other, under a lock of the file, and each leaves it whole. Rank 0 begins
//! it before it takes part in any call, and the others write when they leave. Times are those of the host's monotonic clock.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::Flight;
use super::json::Quoted;
use super::shape::Shape;
use crate::Rank;

/// Calls kept; later ones are left out, and the file says how many.
const EVENTS_MAX: usize = 1 << 20;

const BEGIN: &str = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
const END: &str = "\n]}\n";

/// Files that this process has begun: several groups write to one.
static BEGUN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    events: Mutex<(Vec<Flight>, u64)>,
}

impl Trace {
    /// To be written to `path`; rank 0 begins the file anew.
    pub(crate) fn new(path: &Path, rank: Rank) -> io::Result<Self> {
        let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
        if rank == 0 && begun.insert(path.to_owned()) {
            File::create(path)?;
        }
        Ok(Self { path: path.to_owned(), events: Mutex::default() })
    }

    pub(super) fn add(&self, flight: Flight) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.0.len() < EVENTS_MAX {
            events.0.push(flight);
        } else {
            events.1 += 1;
        }
    }

    pub(super) fn write<'a>(&self, rank: Rank, shape: impl Fn(&Flight) -> Option<&'a Shape>) {
        let (events, left_out) =
            std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        let path = self.path.display();
        match append(&self.path, &lines(rank, &events, left_out, shape)) {
            Ok(()) => tracing::info!(rank, "trace of {} calls added to {path}", events.len()),
            Err(error) => tracing::warn!(rank, "no trace: {path} ({error}); name a file that can be written"),
        }
    }
}

fn lines<'a>(
    rank: Rank,
    events: &[Flight],
    left_out: u64,
    shape: impl Fn(&Flight) -> Option<&'a Shape>,
) -> String {
    let mut text = format!(
        "\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":{rank},\"args\":{{\"name\":\"rank {rank}\",\
         \"calls_left_out\":{left_out}}}}}"
    );
    for flight in events {
        let Flight { run, call, begun, ended, latest, .. } = flight;
        let (begun_us, took_us) = (begun.0 as f64 / 1e3, ended.0.saturating_sub(begun.0) as f64 / 1e3);
        let algorithm = shape(flight).map_or("", |shape| &shape.algorithm);
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            ",\n{{\"name\":{},\"cat\":\"{}\",\"ph\":\"X\",\"pid\":0,\"tid\":{rank},\"ts\":{begun_us:.3},\
             \"dur\":{took_us:.3},\"args\":{{\"run\":{run},\"algorithm\":{}",
            Quoted(&call.to_string()),
            call.collective.name(),
            Quoted(algorithm)
        );
        if let Some((peer, lateness_ns)) = latest {
            let _ = write!(text, ",\"last\":{peer},\"late_us\":{:.3}", *lateness_ns as f64 / 1e3);
        }
        text.push_str("}}");
    }
    text
}

/// Adds events to the file's list, under its lock.
fn append(path: &Path, lines: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    file.lock()?;
    let length = file.seek(SeekFrom::End(0))?;
    let mut text = String::new();
    match length.checked_sub(END.len() as u64) {
        None if length == 0 => text.push_str(BEGIN),
        None => return Err(io::Error::other("it is no trace")),
        Some(end) => {
            file.seek(SeekFrom::Start(end))?;
            let mut found = Vec::new();
            file.read_to_end(&mut found)?;
            if found != END.as_bytes() {
                return Err(io::Error::other("it is no trace"));
            }
            file.seek(SeekFrom::Start(end))?;
            text.push(',');
        }
    }
    text.push_str(lines);
    text.push_str(END);
    // One call, so that a process that is killed meanwhile rarely leaves half of it.
    file.write_all(text.as_bytes())
}
