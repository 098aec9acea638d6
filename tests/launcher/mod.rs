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

/// What a command wrote.
pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("is text")
}

/// The value of a field in a flat JSON object.
pub(crate) fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, rest) = line.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name}: {line}"));
    rest.split([',', '}']).next().expect("has a value")
}

/// The value of a field that is a number.
pub(crate) fn number(line: &str, name: &str) -> f64 {
    field(line, name).parse().unwrap_or_else(|error| panic!("{name}: {error}: {line}"))
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
