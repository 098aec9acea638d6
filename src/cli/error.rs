//! The one form in which things go wrong on the command line.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use pleach::JoinGroupError;
use pleach::transport::rendezvous::{ExplicitWorld, Launcher, World};
use pleach_vocabulary::nearest;
use rustix::event::poll;
use rustix::time::Timespec;

/// How long a rank that leaves the word to rank 0 stays: other launchers end all ranks with the
/// first that fails.
const FIRST_WORD: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The error of a subcommand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommandError {
    /// The user's arguments, files or variables are wrong: exit status 2.
    Usage(String),
    /// The same, for what is wrong on every rank alike (arguments): under a launcher rank 0 alone
    /// says it.
    Typed(String),
    /// Something happened or did not hold: exit status 1.
    Failed(String),
}

impl CommandError {
    /// From any error whose text has the form `<what>: <who or where>; <what to do>`.
    pub(crate) fn usage(error: impl Display) -> Self {
        Self::Usage(error.to_string())
    }

    /// As [`CommandError::usage`], for what is wrong on every rank alike.
    pub(crate) fn typed(error: impl Display) -> Self {
        Self::Typed(error.to_string())
    }

    /// As [`CommandError::usage`], for what is not the person's doing.
    pub(crate) fn failed(error: impl Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// From a group that was not joined: the tuning is a file that a person named.
    pub(crate) fn joining(error: JoinGroupError) -> Self {
        match error {
            JoinGroupError::Tuning(error) => Self::typed(error),
            error => Self::failed(error),
        }
    }

    /// Folds clap's paragraphs into one line and says where to read on. `arguments` are those of
    /// the process.
    pub(crate) fn from_clap(error: &clap::Error, arguments: impl IntoIterator<Item = OsString>) -> Self {
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            return Self::typed("no command: pleach; see 'pleach --help'");
        }
        let known = super::CommandLine::command();
        if error.kind() == ErrorKind::InvalidSubcommand
            && let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        {
            let visible = known.get_subcommands().filter(|command| !command.is_hide_set());
            let near = did_you_mean(visible.map(clap::Command::get_name), name);
            return Self::Typed(format!("no such command: '{name}'{near}; see 'pleach --help'"));
        }
        let subcommand = arguments.into_iter().nth(1).and_then(|name| name.into_string().ok());
        let subcommand = subcommand.filter(|name| known.find_subcommand(name).is_some());
        let help = subcommand.map_or_else(|| "pleach".to_owned(), |name| format!("pleach {name}"));
        let rendered = error.render().to_string();
        let lines = rendered.lines().map(str::trim).take_while(|line| !line.starts_with("Usage: "));
        let parts: Vec<_> = lines
            .filter(|line| !line.is_empty() && !line.starts_with("For more information"))
            .map(|line| line.strip_prefix("error: ").unwrap_or(line))
            .collect();
        Self::Typed(format!("{}; see '{help} --help'", parts.join(" ").replace(" tip: ", "; ")))
    }

    /// The exit status.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Typed(_) => 2,
            Self::Failed(_) => 1,
        }
    }

    /// Its line.
    pub(crate) fn into_text(self) -> String {
        let (Self::Usage(text) | Self::Typed(text) | Self::Failed(text)) = self;
        text
    }

    /// Prints the line and gives the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        let (Self::Usage(text) | Self::Typed(text) | Self::Failed(text)) = self;
        if matches!(self, Self::Typed(_)) && is_said_by_rank_0() {
            // A signal of the launcher ends it early.
            let _ = poll(&mut [], Some(&FIRST_WORD));
            return ExitCode::from(self.status());
        }
        // One write, so that lines of several processes do not mix; nobody is left to tell if it
        // fails.
        let line = format!("error: {}\n", text.trim().replace('\n', " "));
        let _ = std::io::stderr().write_all(line.as_bytes());
        ExitCode::from(self.status())
    }
}

/// `, did you mean 'NAME'?` with the name of the list that was probably meant. Nothing if there is
/// none.
pub(crate) fn did_you_mean<'a>(known: impl IntoIterator<Item = &'a str>, name: &str) -> String {
    nearest(name, known.into_iter()).map_or_else(String::new, |near| format!(", did you mean '{near}'?"))
}

/// Whether this is a further rank of a launcher that passes on what every rank says. `pleach run`
/// chooses by itself.
fn is_said_by_rank_0() -> bool {
    let world = World::find(&ExplicitWorld::default()).ok().flatten();
    world.is_some_and(|world| world.rank > 0 && world.launcher != Launcher::Pleach)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::CommandLine;

    fn parse_error(arguments: &[&str]) -> CommandError {
        let error = CommandLine::try_parse_from(arguments).expect_err("does not parse");
        CommandError::from_clap(&error, arguments.iter().map(OsString::from))
    }

    #[test]
    fn a_usage_error_is_one_line_that_names_the_help_of_its_subcommand() {
        let CommandError::Typed(text) = parse_error(&["pleach", "run", "-n", "many", "true"]) else {
            panic!("a usage error")
        };
        assert!(text.contains("many") && !text.contains('\n'), "{text}");
        assert!(text.ends_with("; see 'pleach run --help'"), "{text}");
    }

    #[test]
    fn a_missing_or_unknown_command_is_a_usage_error() {
        assert_eq!(parse_error(&["pleach"]).status(), 2);
        let CommandError::Typed(text) = parse_error(&["pleach", "secrat"]) else { panic!("a usage error") };
        assert!(text.contains("'secrat'") && text.contains("'secret'"), "{text}");
    }

    #[test]
    fn only_commands_that_help_shows_are_suggested_and_only_near_ones() {
        let text = |name: &str| match parse_error(&["pleach", name]) {
            CommandError::Typed(text) => text,
            other => panic!("a usage error, not {other:?}"),
        };
        assert_eq!(text("rn"), "no such command: 'rn', did you mean 'run'?; see 'pleach --help'");
        assert_eq!(text("benhc"), "no such command: 'benhc', did you mean 'bench'?; see 'pleach --help'");
        for unlike in ["nosuch", "gard", "rank-shi"] {
            assert_eq!(text(unlike), format!("no such command: '{unlike}'; see 'pleach --help'"));
        }
    }
}
