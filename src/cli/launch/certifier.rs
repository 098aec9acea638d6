//! What a launcher tells the ranks of other launchers: that a rank has ended, and what it had
//! learned last.
//!
//! Members of a job on the same host see by themselves that a rank has ended. Those of other hosts
//! do not, and half of a job goes on alone only if it knows that the other half has ended.
//! **Invariant:** the end of a rank is told only after no thread of its session is left, so the
//! word that goes with it is its last one ([`WordFile::last_word`]).

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pleach::session::asks::certify_end;
use pleach::transport::clock::now;
use pleach::transport::rendezvous::World;
use pleach::transport::witness::WordFile;

/// The variable by which a rank finds the file of its last word.
const VARIABLE: &str = "PLEACH_LAST_WORD";

/// How long the others may take to hear of the end of a rank. When nobody is left who could, the
/// launcher ends so much later, unless a signal comes.
const LIMIT: Duration = Duration::from_secs(5);

/// How often the launcher looks whether the last thread of a session has ended, and whether all was
/// told.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// Certifies to the ranks of other launchers that a rank of this one has ended.
pub(crate) struct Certifier {
    /// Who asks the job.
    asker: Arc<World>,
    under_way: Vec<JoinHandle<()>>,
}

impl Certifier {
    /// Of the job that `asker` asks.
    pub(crate) fn new(asker: World) -> Self {
        Self { asker: Arc::new(asker), under_way: Vec::new() }
    }

    /// The file for the last word of a rank that is started by this command. Without a certifier
    /// the rank has none, also where a launcher that has started this one has given one to it.
    pub(crate) fn word_file(certifier: Option<&Self>, command: &mut Command) -> Option<WordFile> {
        command.env_remove(VARIABLE);
        certifier?;
        let file = WordFile::new();
        let file = file.inspect_err(|error| tracing::warn!("nobody will hear how a rank ended: {error}"));
        let file = file.ok()?;
        command.env(VARIABLE, file.path());
        Some(file)
    }

    /// Certifies the end of the rank with this file, which was reaped.
    pub(crate) fn certify(&mut self, rank: u32, file: WordFile) {
        let asker = Arc::clone(&self.asker);
        let tells = thread::Builder::new().name(format!("pleach-end-{rank}"));
        match tells.spawn(move || tell(&asker, rank, &file)) {
            Ok(thread) => self.under_way.push(thread),
            Err(error) => tracing::warn!("nobody is told that rank {rank} has ended: {error}"),
        }
    }

    /// Whether each certificate is given, or its time is up.
    pub(crate) fn is_done(&self) -> bool {
        self.under_way.iter().all(JoinHandle::is_finished)
    }
}

fn tell(asker: &World, rank: u32, file: &WordFile) {
    let deadline = now() + LIMIT;
    let word = loop {
        match file.last_word() {
            // What the rank had started was killed with it, and ends now.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if now() >= deadline {
                    return tracing::warn!(
                        "nobody is told that rank {rank} has ended: a process that it started still runs"
                    );
                }
                thread::park_timeout(LOOK);
            }
            word => break word,
        }
    };
    let told = match word {
        // It had no session.
        Ok(None) => return,
        Ok(Some(word)) => certify_end(asker, &word, deadline.since(now())).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match told {
        Ok(()) => tracing::info!("the others were told that rank {rank} has ended"),
        // Where the job is over nobody is there to hear it.
        Err(error) => tracing::info!("nobody was told that rank {rank} has ended: {error}"),
    }
}
