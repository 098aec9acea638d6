//! A topology as NCCL writes it to `NCCL_TOPO_DUMP_FILE` and reads it from `NCCL_TOPO_FILE`, and
//! RCCL alike.
//!
//! Elements are nested as PCI is: `system`, `cpu` (a NUMA node), `pci` (a bridge or a device), and
//! in the devices `gpu` with its `nvlink`, `xgmi` and `c2c`, or `nic` with its `net`. GPUs become
//! the ranks, in the order of the file; PCI bridges, CPUs, NICs and all NVSwitches together become
//! switches. A file for `NCCL_TOPO_FILE` may lack the `gpu` elements, which NCCL then adds itself;
//! the ranks are then the devices of a display controller's class, joined by PCI alone.
//!
//! Bandwidths are nominal ones, as in the presets: see `rates`. What joins no two ranks is left
//! out: bridges that lead to nothing and, where all ranks are on one host, NICs. Ranks of several
//! hosts (`host_hash`) are joined by their NICs over one switch, `network`. As in NCCL, a link to a
//! GPU that is not in the file is none, for the job does not have that GPU.
//!
//! **Invariant:** no recursion, so no depth of nesting matters; elements are limited to
//! [`ELEMENTS_MAX`] as they are read.

use roxmltree::{Document, ParsingOptions};

use crate::topology::Topology;
use crate::topology::text::{TextError, TextFault, Texts};

pub(super) mod rates;
mod reader;

#[cfg(test)]
mod tests;

/// Most elements, texts and comments of a file.
pub const ELEMENTS_MAX: u32 = 1 << 19;

/// Most attributes of an element.
const ATTRIBUTES_MAX: usize = 1 << 10;

/// Why a text is no NCCL topology.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclFault {
    /// No XML.
    #[error("no XML: {message}")]
    Xml {
        /// As the XML reader says it, in one line.
        message: String,
    },
    /// XML of something else.
    #[error("no NCCL topology: its outermost element is <{found}> and not <system>")]
    NoSystem {
        /// What is outermost.
        found: String,
    },
    /// Nothing that could be a rank.
    #[error("no GPU: there is neither a <gpu> nor a <pci> of class 0x03")]
    NoGpus,
    /// An element elsewhere than NCCL writes it.
    #[error("<{element}> stands outside of {parent}")]
    Misplaced {
        /// Which.
        element: &'static str,
        /// Where it belongs.
        parent: &'static str,
    },
    /// An attribute that is needed.
    #[error("<{element}> has no {attribute}")]
    Missing {
        /// Of which element.
        element: &'static str,
        /// Which.
        attribute: &'static str,
    },
    /// An attribute that cannot be what it should be.
    #[error("{attribute} \"{value}\" is not {expected}")]
    Attribute {
        /// Which.
        attribute: &'static str,
        /// What was written.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// The topology that an NCCL topology XML file describes.
///
/// # Errors
///
/// The first fault with its line and column.
pub fn parse(text: &str) -> Result<Topology, TextError> {
    if let Some(at) = crowded(text) {
        let message = format!("more than {ATTRIBUTES_MAX} attributes in one element");
        return Err(Texts(text).error(at, TextFault::Nccl(NcclFault::Xml { message })));
    }
    let options = ParsingOptions { nodes_limit: ELEMENTS_MAX, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        let (line, column) = (error.pos().row as usize, error.pos().col as usize);
        let message = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        TextError { line, column, fault: TextFault::Nccl(NcclFault::Xml { message }) }
    })?;
    reader::read(text, document.root_element())
}

/// Where an element begins that has too many attributes: the reader compares each with those before
/// it.
fn crowded(text: &str) -> Option<usize> {
    let mut at = 0;
    for tag in text.split_inclusive('<') {
        if tag.bytes().filter(|&byte| byte == b'=').count() > ATTRIBUTES_MAX {
            return Some(at);
        }
        at += tag.len();
    }
    None
}
