//! `pleach verify`: proves a schedule file, or an MSCCL algorithm, or refutes it, and says whether
//! it admits partial rounds.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;

use pleach::Collective;
use pleach::schedule::Schedule;
use pleach::schedule::msccl;
use pleach::schedule::text::MAX_TEXT_BYTES;
use pleach::schedule::verify::{expect_partial_rounds, verify};

use super::CommandError;
use super::schedule::collective;

/// Arguments of `pleach verify`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  pleach schedule all-reduce --algorithm ring --ranks 4 > ring.schedule\n  \
    pleach verify ring.schedule --collective all-reduce\n  pleach verify allreduce.xml\n  \
    pleach schedule all-reduce --algorithm ring --ranks 4 | pleach verify -"
)]
pub(crate) struct Arguments {
    /// A schedule as 'pleach schedule' prints it, or an MSCCL algorithm in XML; - is standard input
    file: PathBuf,
    /// The collective that the schedule must carry out: all-reduce, reduce, broadcast, all-gather,
    /// reduce-scatter, gather, scatter, all-to-all, barrier or send-recv
    #[arg(long, value_name = "COLLECTIVE", value_parser = collective)]
    collective: Option<Collective>,
}

/// In place of the name of a file.
const STANDARD_INPUT: &str = "-";

/// Runs `pleach verify`. What the file says wrongly is a usage error; that it does not hold is
/// none.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let path = arguments.file.display();
    let text = read(arguments)?;
    let is_xml = text.trim_start().starts_with('<');
    let wrong = |error: &dyn std::fmt::Display| {
        CommandError::usage(format!("no schedule: {path}, {error}; correct it there"))
    };
    let schedule = if is_xml {
        msccl::import(&text).map_err(|error| wrong(&error))?
    } else {
        Schedule::parse(&text).map_err(|error| wrong(&error))?
    };
    let found = schedule.collective;
    if let Some(asked) = arguments.collective.filter(|asked| asked.name() != found.name()) {
        return Err(CommandError::usage(format!(
            "other collective: {path} is for {found}, not {}; give --collective {}",
            asked.name(),
            found.name()
        )));
    }
    let ranks = schedule.ranks();
    let proof = verify(schedule).map_err(|violation| {
        CommandError::failed(format!(
            "refuted: {path}, {violation}; it must not be run, correct the schedule"
        ))
    })?;
    let article = if found.name().starts_with('a') { "an" } else { "a" };
    // A file in XML says itself for which calls it is.
    let calls = if is_xml { "as MSCCL orders its steps" } else { "in and out of place" };
    let rounds = match expect_partial_rounds(proof.schedule()) {
        Ok(()) => "admitted, an absent rank changes nothing but its own contribution".to_owned(),
        Err(reason) => format!("not admitted, {reason}"),
    };
    let line =
        format!("proved: {path} is {article} {found} of {ranks} ranks, {calls}\npartial rounds: {rounds}\n");
    // Nobody is left to tell when standard output is closed; the exit status still says it.
    let _ = std::io::stdout().write_all(line.as_bytes());
    Ok(())
}

fn read(arguments: &Arguments) -> Result<String, CommandError> {
    let path = arguments.file.display();
    let unread = |error: std::io::Error| {
        CommandError::usage(format!(
            "schedule not read: {path} ({error}); name a file that 'pleach schedule' wrote"
        ))
    };
    let mut bytes = Vec::new();
    // One byte more than may be, so that the parser sees that it is too long.
    let limit = MAX_TEXT_BYTES as u64 + 1;
    let read = if arguments.file.as_os_str() == STANDARD_INPUT {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        File::open(&arguments.file).and_then(|file| file.take(limit).read_to_end(&mut bytes))
    };
    read.map_err(unread)?;
    String::from_utf8(bytes).map_err(|error| {
        let good = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        let line = good.matches('\n').count() + 1;
        let column = good.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        CommandError::usage(format!(
            "no schedule: {path}, line {line}, column {column}: expected text, found a byte that is none; name a file that 'pleach schedule' wrote"
        ))
    })
}
