//! `pleach exchange serve`: the tensors of a file, for whoever asks.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pleach::DataType;
use pleach::exchange::{
    Endpoint, EndpointOptions, Key, SharedTensor, TensorMemoryError, TensorShape, endpoint::DEFAULT_LISTEN,
};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::{FabricArguments, STEP};
use crate::cli::CommandError;
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::{print, visible};

/// Longest header of a file, in bytes.
const HEADER_BYTES_MAX: u64 = 100 << 20;

/// Room beside the tensors of the file, for their alignment, in bytes a tensor.
const ALIGNMENT_BYTES: u64 = 64;

/// Arguments of `pleach exchange serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The file, in the format of safetensors
    file: PathBuf,
    /// Where to listen; port 0 is any free one
    #[arg(long, value_name = "HOST:PORT", default_value = DEFAULT_LISTEN)]
    listen: String,
    #[command(flatten)]
    fabric: FabricArguments,
    /// Serve metrics at PORT of loopback, or at IP:PORT
    #[arg(long, value_name = "ADDR")]
    metrics: Option<MetricsAddress>,
}

/// Runs `pleach exchange serve`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let mut options = arguments.fabric.options()?;
    options.listen.clone_from(&arguments.listen);
    if let Some(address) = arguments.metrics {
        options.metrics = Some(address.0);
    }
    let path = visible(&arguments.file.to_string_lossy()).into_owned();
    let wrong = |error: FileError| CommandError::usage(format!("no tensors are served: {path}: {error}"));
    let source = Source::open(&arguments.file).map_err(wrong)?;
    source.raise_limits(&mut options);
    let endpoint = Endpoint::open(&options).map_err(CommandError::usage)?;
    endpoint.publish(STEP, source.read(&endpoint).map_err(wrong)?);
    print("address", &format!("listening on {}\n", endpoint.address()))?;
    loop {
        // Until a signal ends the command.
        std::thread::park();
    }
}

/// Why the tensors of a file are not served.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("{0}; look at the path")]
    System(#[from] io::Error),
    #[error("this is no file of safetensors ({0})")]
    Format(String),
    #[error("tensor '{name}' has elements of type {element:?}, which is not served")]
    Element { name: String, element: Dtype },
    #[error(transparent)]
    Key(#[from] pleach::exchange::key::KeyError),
    #[error(transparent)]
    Memory(#[from] TensorMemoryError),
}

/// A file whose header was checked.
struct Source {
    file: File,
    /// The offset of the first tensor's bytes.
    data: u64,
    tensors: Vec<(String, TensorShape, TensorInfo)>,
}

impl Source {
    fn open(path: &Path) -> Result<Self, FileError> {
        let format = |text: &str| FileError::Format(text.to_owned());
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 0).map_err(|_| format("it is too short"))?;
        let header_bytes = u64::from_le_bytes(word);
        if header_bytes > HEADER_BYTES_MAX || header_bytes > length.saturating_sub(8) {
            return Err(format("its header is longer than the file"));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(|_| format("it is too short"))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| FileError::Format(error.to_string()))?;
        let data = 8 + header_bytes;
        if data + metadata.data_len() as u64 != length {
            return Err(format("its length is not that of its tensors"));
        }
        let mut tensors = Vec::new();
        for (name, info) in metadata.tensors() {
            Key::new(STEP, &name)?;
            let Some(data_type) = data_type(info.dtype) else {
                return Err(FileError::Element { name: visible(&name).into_owned(), element: info.dtype });
            };
            let shape = TensorShape::new(data_type, &info.shape)?;
            tensors.push((name, shape, info.clone()));
        }
        // In the order of the file.
        tensors.sort_by_key(|(_, _, info)| info.data_offsets);
        Ok(Self { file, data, tensors })
    }

    /// All tensors of the file may be held and lent at once.
    fn raise_limits(&self, options: &mut EndpointOptions) {
        let bytes = self.tensors.iter().map(|(_, shape, _)| shape.bytes() as u64 + ALIGNMENT_BYTES).sum();
        let limits = &mut options.limits;
        limits.arenas.bytes = limits.arenas.bytes.max(bytes);
        limits.server.leases.bytes_lent = limits.server.leases.bytes_lent.max(bytes);
    }

    /// Reads the tensors into lendable memory, each once.
    fn read(&self, endpoint: &Endpoint) -> Result<BTreeMap<String, SharedTensor>, FileError> {
        let read = |(name, shape, info): &(String, TensorShape, TensorInfo)| {
            let offset = self.data + info.data_offsets.0 as u64;
            let tensor = endpoint.tensor_of_bytes(shape, |bytes| {
                self.file.read_exact_at(bytes, offset).map_err(FileError::from)
            });
            tensor.map(|tensor| (name.clone(), tensor))
        };
        self.tensors.iter().map(read).collect()
    }
}

/// The element type of a type of safetensors.
fn data_type(dtype: Dtype) -> Option<DataType> {
    Some(match dtype {
        Dtype::U8 => DataType::U8,
        Dtype::I8 => DataType::I8,
        Dtype::F8_E5M2 => DataType::F8E5M2,
        Dtype::F8_E4M3 => DataType::F8E4M3,
        Dtype::I16 => DataType::I16,
        Dtype::U16 => DataType::U16,
        Dtype::F16 => DataType::F16,
        Dtype::BF16 => DataType::Bf16,
        Dtype::I32 => DataType::I32,
        Dtype::U32 => DataType::U32,
        Dtype::F32 => DataType::F32,
        Dtype::F64 => DataType::F64,
        Dtype::I64 => DataType::I64,
        Dtype::U64 => DataType::U64,
        _ => return None,
    })
}
