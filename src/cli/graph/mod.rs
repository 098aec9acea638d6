//! `pleach graph`: data-flow graphs over several ranks.

use crate::cli::CommandError;

mod analyze;
mod json;
mod rates;
mod report;
mod source;
mod svg;

/// Arguments of `pleach graph`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  pleach graph analyze model.onnx --ranks 2 --dim batch=8")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Debug, clap::Subcommand)]
enum GraphCommand {
    /// Place a model on ranks, and show what crosses between them and where every buffer lies
    Analyze(analyze::Arguments),
}

/// Runs `pleach graph`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    match &arguments.command {
        GraphCommand::Analyze(arguments) => analyze::run(arguments),
    }
}
