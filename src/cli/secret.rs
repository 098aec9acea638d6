//! `pleach secret`: writes a fresh secret that only its owner can read.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pleach::transport::auth::challenge;

use super::CommandError;

/// Arguments of `pleach secret`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  pleach secret ~/.pleach-secret\n  export PLEACH_SECRET_FILE=~/.pleach-secret"
)]
pub(crate) struct Arguments {
    /// The file to write; it must not exist yet
    path: PathBuf,
}

/// Runs `pleach secret`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    write(&arguments.path)
}

/// Writes a fresh secret to a file that must not exist yet, not even as a link.
pub(crate) fn write(file: &Path) -> Result<(), CommandError> {
    let path = file.display();
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).map_err(|error| {
            match error.kind() {
                std::io::ErrorKind::AlreadyExists => CommandError::usage(format!(
                    "secret file exists: {path}; name another, or remove it first"
                )),
                _ => CommandError::usage(format!("secret file not written: {path} ({error}); name another")),
            }
        })?;
    let mut text: String = challenge().iter().map(|byte| format!("{byte:02x}")).collect();
    text.push('\n');
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(|error| {
        CommandError::failed(format!("secret file not written: {path} ({error}); free some space"))
    })
}
