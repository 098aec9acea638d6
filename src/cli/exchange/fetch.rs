//! `pleach exchange fetch`: one tensor by its name.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use pleach::exchange::{Endpoint, Key, LinkError, ReceiveTensorError, ReceivedTensor, message::FailureKind};
use pleach::transport::clock;
use serde_json::json;

use super::{FabricArguments, STEP, Seconds, npy};
use crate::cli::CommandError;
use crate::cli::output::{print, print_json, visible};

/// Arguments of `pleach exchange fetch`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The address of the program that offers the tensor
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// The name of the tensor
    name: String,
    /// The file to write, in the format of NumPy
    #[arg(short, value_name = "FILE.npy")]
    output: Option<PathBuf>,
    #[command(flatten)]
    fabric: FabricArguments,
    /// How long to wait for the tensor
    #[arg(long, value_name = "S", default_value = "60")]
    timeout: Seconds,
    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// Runs `pleach exchange fetch`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let options = arguments.fabric.options()?;
    let key = Key::new(STEP, &arguments.name).map_err(CommandError::usage)?;
    let endpoint = Endpoint::open(&options).map_err(CommandError::usage)?;
    let peer = endpoint.connect(&arguments.address).map_err(CommandError::usage)?;
    let peer = peer.within(arguments.timeout.0);
    let start = clock::now();
    // Without regions the tensor comes inline, unless they are required.
    match peer.share_regions() {
        Ok(()) | Err(LinkError::NoRegions { .. }) => {}
        Err(error) => return Err(CommandError::failed(format!("no tensor: {error}"))),
    }
    let left = arguments.timeout.0.saturating_sub(clock::now().since(start));
    let asked = clock::now();
    let tensor = peer.within(left).receive(&key).map_err(failed)?;
    let time_us = clock::now().since(asked).as_nanos() as f64 / 1e3;
    if let Some(path) = &arguments.output {
        write(path, &tensor)?;
    }
    let (shape, name) = (tensor.shape(), visible(&arguments.name));
    if arguments.json {
        return print_json(
            "tensor",
            &json!({
                "name": arguments.name, "type": shape.data_type().name(), "shape": shape.dimensions(),
                "bytes": shape.bytes(), "way": tensor.way().to_string(), "time_us": time_us,
            }),
        );
    }
    let line = format!("{name}: {shape}, {} bytes, {} in {time_us:.1} us\n", shape.bytes(), tensor.way());
    print("tensor", &line)
}

/// A name that is not offered is a mistake of the person; all else has happened.
fn failed(error: ReceiveTensorError) -> CommandError {
    if error.kind() == FailureKind::NotFound {
        CommandError::usage(error)
    } else {
        CommandError::failed(error)
    }
}

fn write(path: &Path, tensor: &ReceivedTensor) -> Result<(), CommandError> {
    let shown = path.display();
    let header = npy::header(tensor.shape())
        .map_err(|error| CommandError::usage(format!("file not written: {shown}: {error}; leave -o away")))?;
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let mut file = file
        .map_err(|error| CommandError::usage(format!("file not written: {shown} ({error}); name another")))?;
    npy::write(&mut file, &header, tensor.as_bytes()).map_err(|error| {
        CommandError::failed(format!("file not written: {shown} ({error}); free some space"))
    })
}
