//! A trace of every call of a group in Chrome's trace form, which Perfetto reads. Each rank has a
//! track.
//!
//! Ranks that share a file add to it one after the other, under a lock of the file, and each rank
//! leaves a complete file. Rank 0 begins the file before it takes part in any call. The other ranks
//! write when they leave. Times are those of the host's monotonic clock.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::Hasher64;

use super::settings::Part;
use super::{Quoted, Shape, TimedCall};

/// Most calls that are kept. Later calls are left out, and the file says how many.
const EVENTS_MAX: usize = 1 << 20;

const BEGIN: &str = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
const END: &str = "\n]}\n";

/// Files that this process has begun. Several groups may write to one file.
static BEGUN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    part: Option<Part>,
    events: Mutex<(Vec<TimedCall>, u64)>,
}

impl Trace {
    /// A trace that is written to `path`. Rank 0 begins a new file, except for a part of a group,
    /// because the file may have events of other groups.
    pub(crate) fn new(path: &Path, rank: Rank, part: Option<&Part>) -> io::Result<Self> {
        let mut begun = lock(&BEGUN);
        if rank == 0 && part.is_none() && begun.insert(path.to_owned()) {
            File::create(path)?;
        }
        Ok(Self { path: path.to_owned(), part: part.cloned(), events: Mutex::default() })
    }

    pub(super) fn add(&self, timed: TimedCall) {
        let mut events = lock(&self.events);
        if events.0.len() < EVENTS_MAX {
            events.0.push(timed);
        } else {
            events.1 += 1;
        }
    }

    pub(super) fn write<'a>(&self, rank: Rank, shape: impl Fn(&TimedCall) -> Option<&'a Shape>) {
        let (events, left_out) = std::mem::take(&mut *lock(&self.events));
        let path = self.path.display();
        match append(&self.path, &lines(rank, self.part.as_ref(), &events, left_out, shape)) {
            Ok(()) => tracing::info!(rank, "trace of {} calls added to {path}", events.len()),
            Err(error) => tracing::warn!(rank, "no trace: {path} ({error}); name a file that can be written"),
        }
    }
}

fn lines<'a>(
    rank: Rank,
    part: Option<&Part>,
    events: &[TimedCall],
    left_out: u64,
    shape: impl Fn(&TimedCall) -> Option<&'a Shape>,
) -> String {
    let mut text = String::new();
    let group = part.map_or(0, group_number);
    let mut name = format!("rank {rank}");
    // Writing to a string cannot fail.
    if let Some(Part { name: part, joined_rank }) = part {
        let _ = write!(name, " (rank {joined_rank} of all)");
        let _ = write!(
            text,
            "\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{group},\"args\":{{\"name\":\"part {part}\"}}}},"
        );
    }
    let _ = write!(
        text,
        "\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{group},\"tid\":{rank},\"args\":{{\"name\":\"{name}\",\
         \"calls_left_out\":{left_out}}}}}"
    );
    for timed in events {
        let TimedCall { run, call, begun, ended, latest, .. } = timed;
        let (begun_us, took_us) = (begun.0 as f64 / 1e3, ended.0.saturating_sub(begun.0) as f64 / 1e3);
        let algorithm = shape(timed).map_or("", |shape| &shape.algorithm);
        let _ = write!(
            text,
            ",\n{{\"name\":{},\"cat\":\"{}\",\"ph\":\"X\",\"pid\":{group},\"tid\":{rank},\"ts\":{begun_us:.3},\
             \"dur\":{took_us:.3},\"args\":{{\"run\":{run},\"algorithm\":{}",
            Quoted(&call.to_string()),
            call.collective.name(),
            Quoted(algorithm)
        );
        if let Some((peer, skew_ns)) = latest {
            let _ = write!(text, ",\"last\":{peer},\"arrival_skew_us\":{:.3}", *skew_ns as f64 / 1e3);
        }
        text.push_str("}}");
    }
    text
}

/// The number of a part's tracks in the file: a hash of the part's name, which is the same on all
/// ranks of the part. The number is not 0, which stands for the group that was joined.
fn group_number(part: &Part) -> u32 {
    let mut hasher = Hasher64::default();
    part.name.hash(&mut hasher);
    // Some readers treat numbers above `i32::MAX` as negative.
    ((hasher.finish() >> 33) as u32).max(1)
}

/// Adds events to the list in the file, under a lock of the file.
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
    // A single write, so that a process that is killed meanwhile rarely leaves half of the text.
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_adds_to_what_others_have_written_and_a_new_job_begins_anew() {
        let path = std::env::temp_dir().join(format!("pleach-trace-{}.json", std::process::id()));
        std::fs::write(&path, "of a job before").unwrap();
        let part = |name: &str| Part { name: name.to_owned(), joined_rank: 2 };
        // Rank 0 of the part is another rank in the group that was joined.
        Trace::new(&path, 0, Some(&part("s0-1"))).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "of a job before");
        Trace::new(&path, 0, None).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        std::fs::remove_file(&path).unwrap();
        assert_ne!(group_number(&part("s0-1")), group_number(&part("s1-1")));
    }
}
