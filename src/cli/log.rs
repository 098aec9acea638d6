//! `PLEACH_LOG`: the choices of the command and their reasons, on standard error. Without the
//! variable there are warnings alone, for example of a trace that cannot be written.

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::CommandError;

/// The variable with the level of the log: `info`, `debug`, or `pleach_transport=debug,info`.
const LOG_VARIABLE: &str = "PLEACH_LOG";

/// The level of the log, if the variable is set and not empty.
pub(crate) fn level() -> Option<String> {
    std::env::var(LOG_VARIABLE).ok().filter(|text| !text.is_empty())
}

/// Starts the log. Without a level only warnings are shown, for people: without times and modules.
pub(crate) fn start() -> Result<(), CommandError> {
    let format = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    let Some(text) = level() else {
        let warnings = Targets::new().with_default(LevelFilter::WARN);
        // Only a subscriber that is already there makes this fail, and then there is one.
        let _ = tracing_subscriber::registry()
            .with(format.without_time().with_target(false))
            .with(warnings)
            .try_init();
        return Ok(());
    };
    let targets: Targets = text.parse().map_err(|_| {
        CommandError::usage(format!("bad log level: {LOG_VARIABLE}='{text}'; use info, debug or trace"))
    })?;
    // As above.
    let _ = tracing_subscriber::registry().with(format).with(targets).try_init();
    Ok(())
}
