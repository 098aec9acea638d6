//! Starting `pleach` in tests, and looking at processes.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pleach_transport::clock::now;

/// How long anything may take on a machine that is busy with other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The command, without what this process's own environment says about ranks.
pub(crate) fn pleach() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if ["PLEACH_", "OMPI_", "PMI_", "SLURM_"].iter().any(|prefix| name_text.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub(crate) fn finish(mut command: Command) -> Output {
    command.output().expect("the command starts")
}

/// Looks again and again until it holds.
pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = now() + PATIENCE;
    while !holds() {
        assert!(now() < deadline, "{what}: not within {PATIENCE:?}");
        let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let _ = rustix::event::poll(&mut [], Some(&pause));
    }
}

/// A folder that goes away with the test, however it ends.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    /// `name`: of its own among those of the process.
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
