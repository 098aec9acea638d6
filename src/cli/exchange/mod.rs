//! `pleach exchange`: tensors by name between programs.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach::exchange::{EndpointOptions, ExchangeFabric};

use crate::cli::CommandError;

mod bench;
mod bench_grpc;
mod bench_put;
mod fetch;
mod npy;
mod serve;

/// Arguments of `pleach exchange`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  pleach exchange serve model.safetensors --listen 127.0.0.1:50051\n  \
                  pleach exchange fetch 127.0.0.1:50051 weight -o weight.npy\n\n\
                  PLEACH_SECRET_FILE=FILE on both ends keeps other programs out.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: ExchangeCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ExchangeCommand {
    /// Offer the tensors of a file to other programs, until the command is ended
    Serve(serve::Arguments),
    /// Receive a tensor by its name, and write it to a file
    Fetch(fetch::Arguments),
    /// Measure how long a receive takes, and check every tensor
    Bench(bench::Arguments),
    /// Offer the tensors of a measurement until standard input ends
    #[command(hide = true)]
    BenchSender(bench::SenderArguments),
}

/// Runs `pleach exchange`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        ExchangeCommand::Serve(arguments) => serve::run(arguments),
        ExchangeCommand::Fetch(arguments) => fetch::run(arguments),
        ExchangeCommand::Bench(arguments) => bench::run(arguments),
        ExchangeCommand::BenchSender(arguments) => bench::run_sender(arguments),
    }
}

/// The step under which the tensors of a file are offered.
const STEP: u64 = 0;

/// What a receiver requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Requirement {
    /// Regions, mapped or read one-sided: tensors that would come inline are an error
    Regions,
}

/// By which fabric there are regions, and whether there have to be.
#[derive(Debug, clap::Args)]
struct FabricArguments {
    /// By which fabric tensors come: auto, shm, tcp, verbs, or none; otherwise PLEACH_FABRIC
    #[arg(long, value_name = "FABRIC")]
    fabric: Option<ExchangeFabric>,
    /// What is required; without regions tensors come inline
    #[arg(long, value_name = "WHAT")]
    require: Option<Requirement>,
}

impl FabricArguments {
    /// The options of the environment, with those of the command.
    fn options(&self) -> Result<EndpointOptions, CommandError> {
        let mut options = EndpointOptions::from_env().map_err(CommandError::usage)?;
        options.fabric = self.fabric.unwrap_or(options.fabric);
        options.requires_regions |= self.require == Some(Requirement::Regions);
        Ok(options)
    }
}

/// A time limit in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seconds(Duration);

/// Longest time limit, in seconds: a day.
const SECONDS_MAX: f64 = 86_400.0;

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= SECONDS_MAX);
        let limit = number.map(|number| Self(Duration::from_secs_f64(number)));
        limit.ok_or_else(|| "write a number of seconds up to 86400, such as 5 or 0.5".to_owned())
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_secs_f64().fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_is_positive_and_at_most_a_day() {
        assert_eq!("0.5".parse(), Ok(Seconds(Duration::from_millis(500))));
        for bad in ["0", "-1", "nan", "inf", "86401", "x", ""] {
            assert!(bad.parse::<Seconds>().is_err(), "{bad}");
        }
    }
}
