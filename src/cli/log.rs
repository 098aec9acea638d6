//! `PLEACH_LOG`: what was chosen and why, on standard error. Without it there are warnings: what
//! was asked for and is not there, as a trace that cannot be written.

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::CommandError;

/// The variable that says what is logged: `info`, `debug`, or `pleach_transport=debug,info`.
pub(crate) const LOG_VARIABLE: &str = "PLEACH_LOG";

/// Starts logging as `PLEACH_LOG` says; without it warnings alone are shown, for people: without
/// times and modules.
pub(crate) fn start() -> Result<(), CommandError> {
    let format = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    let Ok(text) = std::env::var(LOG_VARIABLE) else {
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
