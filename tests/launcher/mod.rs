//! Starting `pleach` in tests, and looking at processes.

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

/// `pleach run` of a shell script.
pub(crate) fn shell(ranks: u32, options: &[&str], script: &str) -> Command {
    let mut command = pleach();
    command.arg("run").args(["-n", &ranks.to_string()]).args(options).args(["--", "sh", "-c", script]);
    command
}

/// Runs it to its end.
pub(crate) fn finish(mut command: Command) -> Output {
    command.output().expect("the command starts")
}

/// Whether a process has ended (it may wait to be reaped by somebody else).
pub(crate) fn is_gone(process: &str) -> bool {
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(status) => status.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('Z')),
        Err(_) => true,
    }
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
