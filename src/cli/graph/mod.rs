//! `pleach graph`: data-flow graphs over several ranks.

use crate::cli::CommandError;

mod analyze;
mod job;
mod json;
mod over_grpc;
mod placing;
mod rates;
mod report;
mod run;
mod run_report;
mod serve;
mod source;
mod svg;

/// Arguments of `pleach graph`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  pleach graph analyze model.onnx --ranks 2 --dim batch=8\n  \
    pleach graph run model.onnx --ranks 2 --dim batch=8 --check\n  \
    pleach graph serve model.onnx --ranks 2 --listen 127.0.0.1:8001")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Debug, clap::Subcommand)]
enum GraphCommand {
    /// Place a model on ranks, and show what crosses between them and where every buffer lies
    Analyze(analyze::Arguments),
    /// Run a model on ranks: tensors cross by one-sided transfers, without a copy
    Run(run::Arguments),
    /// Answer requests of tritonclient and others with a model on ranks
    Serve(serve::Arguments),
}

/// Runs `pleach graph`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        GraphCommand::Analyze(arguments) => analyze::run(arguments),
        GraphCommand::Run(arguments) => run::run(arguments),
        GraphCommand::Serve(arguments) => serve::run(arguments),
    }
}
