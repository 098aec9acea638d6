//! `PLEACH_LOG`: what was chosen and why, on standard error.

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::CommandError;

/// The variable that says what is logged: `info`, `debug`, or `pleach_transport=debug,info`.
pub(crate) const LOG_VARIABLE: &str = "PLEACH_LOG";

/// Starts logging as `PLEACH_LOG` says; without it nothing is logged.
pub(crate) fn start() -> Result<(), CommandError> {
    let Ok(text) = std::env::var(LOG_VARIABLE) else { return Ok(()) };
    let targets: Targets = text.parse().map_err(|_| {
        CommandError::usage(format!("bad log level: {LOG_VARIABLE}='{text}'; use info, debug or trace"))
    })?;
    let format = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    // Only a subscriber that is already there makes this fail, and then there is one.
    let _ = tracing_subscriber::registry().with(format).with(targets).try_init();
    Ok(())
}
