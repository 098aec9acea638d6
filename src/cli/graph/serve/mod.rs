//! `pleach graph serve`: answers requests for inference with a model on several ranks.
//!
//! One rank more than the model's, the last one, listens: it is the caller of the others
//! ([`pleach::graph::run::Caller`]).

use super::job::JobArguments;
use crate::cli::CommandError;
use crate::cli::metrics::MetricsAddress;

mod model;
mod server;

/// Arguments of `pleach graph serve`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach graph serve model.onnx --listen 127.0.0.1:8001 --ranks 2\n  \
    pleach graph serve model.onnx --listen 0.0.0.0:8001 --name resnet --depth 4 --allow-client-shm\n  \
    mpirun -n 3 pleach graph serve model.onnx --listen 0.0.0.0:8001\n\n\
    Programs of tritonclient and of other clients of KServe's protocol work unchanged. One rank more than\n\
    --ranks says is started, which listens. docs/graph.md describes what is answered.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: JobArguments,
    /// Where to listen; port 0 is any free one
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// The name of the model for clients [default: that of the file, without its ending]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Let clients name shared memory of this host, from which inputs are read and into which
    /// outputs are written: any that this user may open
    #[arg(long)]
    allow_client_shm: bool,
    /// Serve metrics of tensors by way, at PORT of loopback, or at IP:PORT
    #[arg(long, value_name = "ADDR")]
    metrics: Option<MetricsAddress>,
}

/// Runs `pleach graph serve`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    server::run(arguments)
}
