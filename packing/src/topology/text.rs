//! Errors in the text of a topology, with their positions.

use crate::topology::TopologyError;
use crate::topology::decimal::NumberFault;
use crate::topology::nccl::NcclFault;
use crate::topology::smi::SmiFault;

/// A fault of a text, with its position.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {}", one_line(.fault))]
pub struct TextError {
    /// The line, from 1.
    pub line: usize,
    /// The character of the line, from 1.
    pub column: usize,
    /// The error there.
    pub fault: TextFault,
}

/// The fault in one line. Names and values come from outside and may hold line breaks or control
/// characters of terminals.
fn one_line(fault: &TextFault) -> String {
    let mut line = String::new();
    for character in fault.to_string().chars() {
        if character.is_control() { line.extend(character.escape_default()) } else { line.push(character) }
    }
    line
}

/// An error in a text.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextFault {
    /// The text has none of the forms that can be read.
    #[error(
        "no topology: neither a TOML file with [[node]] and [[link]], nor an NCCL topology XML file, nor the text of nvidia-smi topo -m"
    )]
    Unrecognised,
    /// The bytes are no UTF-8.
    #[error("no text: a topology file is UTF-8")]
    NotText,
    /// The text is no TOML, or has an unknown key.
    #[error("{message}")]
    Toml {
        /// The message of the TOML reader, in one line.
        message: String,
    },
    /// The key does not allow this number.
    #[error("{key} {text} {fault}")]
    Number {
        /// The key.
        key: &'static str,
        /// The text that was found.
        text: String,
        /// The reason.
        fault: NumberFault,
    },
    /// The text has the right form, but its topology is not valid.
    #[error(transparent)]
    Topology(TopologyError),
    /// The text is no NCCL topology.
    #[error(transparent)]
    Nccl(NcclFault),
    /// The text is no matrix of `nvidia-smi topo -m`.
    #[error(transparent)]
    Smi(SmiFault),
}

/// A text, to compute positions in it.
#[derive(Clone, Copy)]
pub(super) struct Texts<'text>(pub(super) &'text str);

impl Texts<'_> {
    /// A fault at this byte.
    pub(super) fn error(self, at: usize, fault: TextFault) -> TextError {
        let mut at = at.min(self.0.len());
        while !self.0.is_char_boundary(at) {
            at -= 1;
        }
        let before = &self.0[..at];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
        TextError { line, column: before[line_start..].chars().count() + 1, fault }
    }
}
