//! Starting `pleach` in tests, and looking at processes.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pleach_transport::clock::now;

/// How long anything may take on a machine that is busy with other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The command, without what this process's own environment says about ranks.
pub(crate) fn pleach() -> Command {
    program(env!("CARGO_BIN_EXE_pleach"))
}

/// A program, without what this process's own environment says about ranks.
pub(crate) fn program(path: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(path);
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

/// One line on standard error with all of these, nothing on standard output, exit status 2.
pub(crate) fn expect_refused(output: &Output, arguments: &[&str], parts: &[&str]) {
    let stderr = text(&output.stderr);
    let nothing: &[u8] = b"";
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(2), nothing),
        "{arguments:?}: {stderr}"
    );
    assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} is not in {stderr}");
    }
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

/// The process of a rank that this launcher has started.
pub(crate) fn rank_process(launcher: u32, rank: u32) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").expect("there is /proc");
    let mut numbers = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    numbers.find(|number| {
        let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
        let variable = format!("PLEACH_RANK={rank}");
        status_of(*number).contains(&format!("PPid:\t{launcher}\n"))
            && environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    })
}

/// What the kernel says of a process; nothing when it has ended.
pub(crate) fn status_of(process: u32) -> String {
    let status = std::fs::read(format!("/proc/{process}/status")).unwrap_or_default();
    String::from_utf8_lossy(&status).into_owned()
}

/// Sends a process a signal.
pub(crate) fn signal(process: u32, signal: rustix::process::Signal) {
    let process = rustix::process::Pid::from_raw(process.cast_signed()).expect("is no 0");
    rustix::process::kill_process(process, signal).expect("it runs");
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

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }

    /// A new file in it with this text.
    pub(crate) fn file(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).expect("a temporary file");
        path
    }

    /// What a file in it holds.
    pub(crate) fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).expect("was written")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
