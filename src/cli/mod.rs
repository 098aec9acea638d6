//! The command line: parsing, dispatch, errors.
//!
//! A subcommand is a file with `Arguments`, which clap fills, and
//! `run(Arguments) -> Result<(), CommandError>`. [`Command`] and `dispatch` name it. Results go to
//! standard output by `writeln!`, because `println!` panics if the pipe is closed.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod bounds;
mod chaos;
mod chart;
mod devices;
mod digits;
#[cfg(test)]
mod digits_tests;
mod doctor;
mod error;
mod exchange;
mod faults;
mod graph;
mod grpc;
mod launch;
mod log;
mod members;
mod metrics;
mod output;
mod parallelize;
mod plan;
mod probe;
mod progress;
mod recovered;
mod run;
mod scale;
mod schedule;
mod secret;
mod silent;
mod sim;
mod skew;
mod strikes;
mod svm;
mod top;
mod train;
mod tune;
mod verify;

pub(crate) use error::CommandError;

/// Tensor transport, and collectives that are proved before they run.
#[derive(Debug, Parser)]
#[command(name = "pleach", version, about, disable_help_subcommand = true, after_help = EXAMPLE)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLE: &str = "Example:\n  pleach run -n 4 -- ./my-training-program\n\n\
    PLEACH_LOG=info (or debug, or module=level) prints each choice with its reason on standard error.\n\
    PLEACH_TUNING=FILE takes the algorithms of a table that 'pleach tune' wrote.\n\
    PLEACH_JOIN_TIMEOUT=SECONDS limits how long a rank waits for the others to join (default 60).";

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure collectives, and check every result
    Bench(bench::Arguments),
    /// Measure the best algorithm for each size on this machine, and write a table
    Tune(tune::Arguments),
    /// Kill and stop ranks of a session for a while, and check every step of all of them
    Chaos(chaos::Arguments),
    /// Start N local ranks of a command, and end them all when one fails
    Run(run::Arguments),
    /// Train a small network on handwritten digits with several ranks
    Train(Box<train::Arguments>),
    /// Train a support vector machine with several ranks
    Svm(svm::Arguments),
    /// Plan how a network is split over ranks, and what that brings
    Parallelize(parallelize::Arguments),
    /// Measure the links between ranks, and save them as a topology
    Probe(probe::Arguments),
    /// Check this machine, or a pair of machines, and show the commands that repair it
    Doctor(doctor::Arguments),
    /// List the devices of this machine: shared memory, interfaces, RDMA ports, GPUs
    Devices(devices::Arguments),
    /// Watch a live job: rates, late ranks, which rank waits for which, and who is a member
    Top(top::Arguments),
    /// Show the members of a job whose processes come and go; ask one to leave, or certify its end
    Members(members::Arguments),
    /// Write a new secret for all ranks of a job to a file
    Secret(secret::Arguments),
    /// Compute the optimal trees for a collective on given links, and show the bound
    Plan(plan::Arguments),
    /// Predict how a collective scales: time over ranks by each algorithm, on links of one kind
    Scale(scale::Arguments),
    /// Print the schedule of an algorithm for a collective
    Schedule(schedule::Arguments),
    /// Prove or refute that a schedule carries out its collective
    Verify(verify::Arguments),
    /// Place a model's graph on ranks: what crosses between them, and where every buffer lies
    Graph(graph::Arguments),
    /// Send and receive tensors by name between programs
    Exchange(exchange::Arguments),
    /// Simulate groups with random faults, and check all results
    Sim(sim::Arguments),
    /// Become a rank's command, tied to the launcher
    #[command(hide = true)]
    RankShim(launch::guard::RankArguments),
    /// Kill the ranks of a launcher that was killed
    #[command(hide = true)]
    Guard(launch::guard::GuardArguments),
}

/// Parses, runs, reports.
pub(crate) fn main() -> ExitCode {
    match CommandLine::try_parse() {
        Ok(command_line) => match log::start().and_then(|()| dispatch(command_line.command)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => error.report(),
        },
        Err(error) if !error.use_stderr() => {
            // Help or version. A closed pipe is no error.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        Err(error) => CommandError::from_clap(&error, std::env::args_os()).report(),
    }
}

fn dispatch(command: Command) -> Result<(), CommandError> {
    match command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Chaos(arguments) => chaos::run(&arguments),
        Command::Run(arguments) => run::run(arguments),
        Command::Train(arguments) => train::run(&arguments),
        Command::Svm(arguments) => svm::run(&arguments),
        Command::Parallelize(arguments) => parallelize::run(&arguments),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Members(arguments) => members::run(&arguments),
        Command::Secret(arguments) => secret::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Scale(arguments) => scale::run(&arguments),
        Command::Schedule(arguments) => schedule::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Graph(arguments) => graph::run(&arguments),
        Command::Exchange(arguments) => exchange::run(&arguments),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::RankShim(arguments) => launch::guard::rank(&arguments),
        Command::Guard(arguments) => launch::guard::watch(&arguments),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_subcommand_shows_an_example() {
        let mut command = CommandLine::command();
        command.build();
        command.clone().debug_assert();
        for subcommand in command.get_subcommands_mut().filter(|subcommand| !subcommand.is_hide_set()) {
            let help = subcommand.render_long_help().to_string();
            assert!(help.contains("Example"), "{} shows no example", subcommand.get_name());
        }
    }
}
