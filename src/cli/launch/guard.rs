//! What keeps ranks from outliving their launcher, even one that is killed with SIGKILL.
//!
//! Each rank is started through [`rank`], which asks the kernel to kill it with its parent and to
//! keep it on its processors, and then becomes the command. That does not reach the command's own
//! children, so a second process, [`watch`], knows each rank's process group and kills them all
//! when the launcher's end of its pipe closes.

use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pleach::transport::processors::Processors;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};

use super::remove_secret;
use crate::cli::CommandError;

/// This very program, also when its file was replaced meanwhile.
pub(super) const OWN_PROGRAM: &str = "/proc/self/exe";

/// Arguments of the hidden `pleach rank-shim`.
#[derive(Debug, clap::Args)]
pub(crate) struct RankArguments {
    /// Process number of the launcher
    #[arg(long)]
    parent: i32,
    /// Processors to keep it on, as a list of the kernel's
    #[arg(long)]
    processors: Option<String>,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<OsString>,
}

/// Ties this process to its parent, then becomes the command.
pub(crate) fn rank(arguments: &RankArguments) -> Result<(), CommandError> {
    let tied = set_parent_process_death_signal(Some(Signal::KILL));
    tied.map_err(|error| CommandError::failed(format!("rank not started: prctl ({error}); report this")))?;
    // The parent may have died before the kernel was asked.
    if getppid().map(Pid::as_raw_pid) != Some(arguments.parent) {
        return Err(CommandError::failed("rank not started: its launcher is gone; start it again"));
    }
    if let Some(list) = &arguments.processors
        && let Err(error) = Processors::of_list(list).keep_this_thread()
    {
        tracing::warn!("this rank is not bound to processors {list}: {error}");
    }
    let (program, rest) = arguments.command.split_first().expect("clap requires one");
    let error = Command::new(program).args(rest).exec();
    let program = program.display();
    Err(CommandError::usage(format!(
        "command not started: {program} ({error}); check its name and permissions"
    )))
}

/// How a rank's command is started, and the processors that it is bound to, if any.
pub(super) fn rank_command(command: &[OsString], processors: Option<&Processors>) -> Command {
    let mut own = Command::new(OWN_PROGRAM);
    own.arg0("pleach").arg("rank-shim").arg("--parent").arg(std::process::id().to_string());
    if let Some(processors) = processors {
        own.arg("--processors").arg(processors.to_string());
    }
    own.arg("--").args(command);
    own
}

/// Arguments of the hidden `pleach guard`.
#[derive(Debug, clap::Args)]
pub(crate) struct GuardArguments {
    /// Folder of the job's secret, to be removed with it
    #[arg(long)]
    secret: Option<PathBuf>,
}

/// Kills the groups named on standard input that are still named when it ends.
pub(crate) fn watch(arguments: &GuardArguments) -> Result<(), CommandError> {
    let mut groups = std::collections::BTreeSet::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let Some((sign, Some(group))) =
            line.split_at_checked(1).map(|(sign, rest)| (sign, rest.parse().ok()))
        else {
            continue;
        };
        match sign {
            "+" => _ = groups.insert(group),
            _ => _ = groups.remove(&group),
        }
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        // It may be gone already.
        let _ = kill_process_group(group, Signal::KILL);
    }
    if let Some(folder) = &arguments.secret {
        remove_secret(folder);
    }
    Ok(())
}

/// The launcher's end of the second process.
pub(super) struct Guard(Child);

impl Guard {
    /// `secret`: the folder of the job's secret, which is removed also when the launcher was
    /// killed.
    pub(super) fn start(secret: Option<&Path>) -> std::io::Result<Self> {
        let mut own = Command::new(OWN_PROGRAM);
        own.arg0("pleach").arg("guard");
        if let Some(folder) = secret {
            own.arg("--secret").arg(folder);
        }
        own.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // In a group of its own, so that the terminal's signals do not end it before the launcher.
        own.process_group(0).spawn().map(Self)
    }

    pub(super) fn add(&mut self, group: Pid) {
        self.say("+", group);
    }

    /// To be called before the group's leader is reaped: afterwards the number may come to name
    /// others.
    pub(super) fn remove(&mut self, group: Pid) {
        self.say("-", group);
    }

    fn say(&mut self, sign: &str, group: Pid) {
        if let Some(pipe) = &mut self.0.stdin {
            // Should somebody have killed it, the ranks themselves are still tied to the launcher.
            let _ = pipe.write_all(format!("{sign}{}\n", group.as_raw_pid()).as_bytes());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}
