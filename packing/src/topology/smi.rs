//! A topology as the matrix that `nvidia-smi topo -m` prints.
//!
//! The matrix says how many NVLinks join two GPUs (`NV2`), and does not say their generation. So
//! the bandwidth of one link is a parameter. Connections by PCIe (`PIX`, `PXB`, `PHB`, `NODE`,
//! `SYS`) have no bandwidth in the matrix and are no links. Ranks are the GPUs in the order of the
//! rows; NICs are not read.
//!
//! **NVSwitch.** Where NVSwitch joins GPUs, each pair of them shows all links of a GPU. Such a
//! matrix differs from that of direct links: a GPU seems to have more than [`NVLINKS_MAX`] links in
//! all, which is impossible. If all pairs of the GPUs have that many links, a switch joins them.
//! (Up to four V100 of a DGX-2 look like directly joined GPUs; write TOML for these.)

use std::collections::BTreeMap;

use crate::topology::text::{TextError, TextFault, Texts};
use crate::topology::{LATENCY_NS, NodeId, Topology, TopologyError};

#[cfg(test)]
mod tests;

/// The default bandwidth of one NVLink in each direction, in bytes a second: that of the second,
/// third and fourth generation (V100, A100, H100).
pub const NVLINK_BYTES_PER_S: u64 = 25_000_000_000;

/// Most NVLinks of a GPU (H100, B200).
pub const NVLINKS_MAX: u64 = 18;

/// Most GPUs of a matrix.
const GPUS_MAX: usize = 1 << 10;

/// The connections of two devices without NVLink.
const WITHOUT_NVLINK: [&str; 8] = ["PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "PSB", "DIS"];

/// Why a text is not a matrix.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SmiFault {
    /// No line names the columns.
    #[error("there is no line with the columns GPU0, GPU1, …")]
    NoHeader,
    /// A GPU has a column but no row, or its row does not follow the row of the GPU before it.
    #[error("there is no row of {gpu}, which has a column")]
    NoRow {
        /// The GPU.
        gpu: String,
    },
    /// A row ends before the last column.
    #[error("the row of {gpu} ends before the column of {column}")]
    ShortRow {
        /// The GPU.
        gpu: String,
        /// The column that is missing.
        column: String,
    },
    /// A cell has an unknown value.
    #[error("'{cell}' is none of X, NV and a number, PIX, PXB, PHB, NODE, SYS")]
    Cell {
        /// The cell that was found.
        cell: String,
    },
    /// Two cells for the same two GPUs differ.
    #[error("{one} has {forth} to {other}, which has {back} to {one}")]
    Asymmetric {
        /// One GPU.
        one: String,
        /// The other.
        other: String,
        /// The cell in the row of the first GPU.
        forth: String,
        /// The cell in the row of the second GPU.
        back: String,
    },
    /// A GPU seems to have more links than a GPU can have, and the GPUs are not joined pairwise.
    #[error(
        "{gpu} has {links} NVLinks, more than {NVLINKS_MAX}, and not the same GPUs as those it is joined to"
    )]
    TooManyLinks {
        /// The GPU.
        gpu: String,
        /// The number of links.
        links: u64,
    },
    /// The GPUs are joined by PCIe only.
    #[error(
        "no two GPUs are joined by NVLink, and of PCIe the matrix says no bandwidth; write the links as TOML"
    )]
    NoNvlink,
}

/// The GPUs and their links.
struct Matrix<'text> {
    text: Texts<'text>,
    gpus: Vec<&'text str>,
    /// The place in the text where the row of each GPU begins.
    starts: Vec<usize>,
    /// The number of NVLinks, by row and column.
    links: Vec<Vec<u64>>,
}

/// The topology of a matrix. One NVLink carries `nvlink_bytes_per_s` in each direction.
///
/// # Errors
///
/// The first fault with its line and column.
pub fn parse(text: &str, nvlink_bytes_per_s: u64) -> Result<Topology, TextError> {
    // Escape sequences, which underline the header, become blanks, so places in the text stay the
    // same.
    let plain = without_escapes(text);
    let matrix = Matrix::read(&plain)?;
    matrix.check_symmetric()?;
    matrix.topology(nvlink_bytes_per_s)
}

/// Whether a text may be such a matrix: a line begins with GPU0.
pub(super) fn is_matrix(text: &str) -> bool {
    without_escapes(text).lines().any(|line| line.split_whitespace().next() == Some("GPU0"))
}

/// The text with blanks in place of control sequences (ESC, `[`, parameters, a letter).
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '\u{1b}' {
            plain.push(character);
            continue;
        }
        plain.push(' ');
        if characters.next_if_eq(&'[').is_some() {
            plain.push(' ');
            while characters.next_if(|next| next.is_ascii_digit() || *next == ';').is_some() {
                plain.push(' ');
            }
            if characters.next_if(char::is_ascii_alphabetic).is_some() {
                plain.push(' ');
            }
        }
    }
    plain
}

/// The words of a line that begins at this byte of the text, each with its place.
fn words(line: &str, start: usize) -> impl Iterator<Item = (usize, &str)> {
    line.split_whitespace().map(move |word| (start + word.as_ptr() as usize - line.as_ptr() as usize, word))
}

fn is_gpu(word: &str) -> bool {
    word.strip_prefix("GPU")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

impl<'text> Matrix<'text> {
    fn read(plain: &'text str) -> Result<Self, TextError> {
        let text = Texts(plain);
        let fault = |at, fault| text.error(at, TextFault::Smi(fault));
        let starts = plain.split_inclusive('\n').scan(0, |at, line| {
            let start = *at;
            *at += line.len();
            Some((start, line))
        });
        let mut lines = starts.skip_while(|(_, line)| line.split_whitespace().next() != Some("GPU0"));
        let (at, header) = lines.next().ok_or_else(|| fault(0, SmiFault::NoHeader))?;
        let gpus: Vec<&str> =
            words(header, at).map(|(_, word)| word).take_while(|word| is_gpu(word)).collect();
        if gpus.len() > GPUS_MAX {
            let error = TopologyError::TooMany { what: "GPUs", limit: GPUS_MAX };
            return Err(text.error(at, TextFault::Topology(error)));
        }
        let mut matrix = Self { text, starts: Vec::new(), links: Vec::new(), gpus };
        for &gpu in &matrix.gpus {
            let row = lines.next().filter(|(_, line)| line.split_whitespace().next() == Some(gpu));
            let Some((start, line)) = row else {
                let missing = SmiFault::NoRow { gpu: gpu.to_owned() };
                return Err(fault(at, missing));
            };
            let mut cells = words(line, start).skip(1);
            let mut links = Vec::with_capacity(matrix.gpus.len());
            for &column in &matrix.gpus {
                let short = SmiFault::ShortRow { gpu: gpu.to_owned(), column: column.to_owned() };
                let (at, cell) = cells.next().ok_or_else(|| fault(start, short))?;
                let known = nvlinks(cell).filter(|_| (cell == "X") == (column == gpu));
                links.push(known.ok_or_else(|| fault(at, SmiFault::Cell { cell: cell.to_owned() }))?);
            }
            matrix.starts.push(start);
            matrix.links.push(links);
        }
        Ok(matrix)
    }

    fn check_symmetric(&self) -> Result<(), TextError> {
        for (one, row) in self.links.iter().enumerate() {
            for (other, &forth) in row.iter().enumerate() {
                let back = self.links[other][one];
                if forth != back {
                    let fault = SmiFault::Asymmetric {
                        one: self.gpus[one].to_owned(),
                        other: self.gpus[other].to_owned(),
                        forth: format!("NV{forth}"),
                        back: format!("NV{back}"),
                    };
                    return Err(self.text.error(self.starts[one], TextFault::Smi(fault)));
                }
            }
        }
        Ok(())
    }

    fn topology(&self, nvlink_bytes_per_s: u64) -> Result<Topology, TextError> {
        if self.gpus.len() > 1 && self.links.iter().flatten().all(|&links| links == 0) {
            return Err(self.text.error(self.starts[0], TextFault::Smi(SmiFault::NoNvlink)));
        }
        let mut builder = Topology::builder();
        let ranks: Vec<NodeId> = self.gpus.iter().map(|gpu| builder.rank(gpu.to_lowercase())).collect();
        for (number, members) in self.switched()?.values().enumerate() {
            let switch = builder.switch(format!("nvswitch{number}"));
            for &gpu in members {
                let links = self.links[gpu].iter().copied().max().unwrap_or(0);
                let bytes_per_s = links.saturating_mul(nvlink_bytes_per_s);
                builder.duplex(ranks[gpu], switch, bytes_per_s, LATENCY_NS);
            }
        }
        for (one, row) in self.links.iter().enumerate().filter(|(one, _)| !self.is_switched(*one)) {
            for (other, &links) in row.iter().enumerate().skip(one + 1) {
                for _ in 0..links {
                    builder.duplex(ranks[one], ranks[other], nvlink_bytes_per_s, LATENCY_NS);
                }
            }
        }
        builder.build().map_err(|error| {
            let part = match &error {
                TopologyError::Disconnected { parts } => parts.get(1).and_then(|part| part.first()),
                _ => None,
            };
            let gpu = part.and_then(|name| self.gpus.iter().position(|gpu| gpu.to_lowercase() == *name));
            self.text.error(self.starts[gpu.unwrap_or(0)], TextFault::Topology(error))
        })
    }

    /// Whether a GPU seems to have more links than a GPU can have.
    fn is_switched(&self, gpu: usize) -> bool {
        self.links[gpu].iter().sum::<u64>() > NVLINKS_MAX
    }

    /// The GPUs of each NVSwitch, by the first GPU.
    fn switched(&self) -> Result<BTreeMap<usize, Vec<usize>>, TextError> {
        let mut switches = BTreeMap::new();
        for gpu in (0..self.gpus.len()).filter(|&gpu| self.is_switched(gpu)) {
            let members = self.joined_to(gpu);
            if members.iter().any(|&member| self.joined_to(member) != members || !self.is_switched(member)) {
                let links = self.links[gpu].iter().sum();
                let fault = SmiFault::TooManyLinks { gpu: self.gpus[gpu].to_owned(), links };
                return Err(self.text.error(self.starts[gpu], TextFault::Smi(fault)));
            }
            switches.insert(members[0], members);
        }
        Ok(switches)
    }

    /// A GPU and the GPUs to which it has NVLinks.
    fn joined_to(&self, gpu: usize) -> Vec<usize> {
        let row = self.links[gpu].iter().enumerate();
        row.filter(|&(other, &links)| other == gpu || links > 0).map(|(other, _)| other).collect()
    }
}

/// The number of NVLinks that a cell gives; `None` for an unknown cell.
fn nvlinks(cell: &str) -> Option<u64> {
    if cell == "X" || WITHOUT_NVLINK.contains(&cell) {
        return Some(0);
    }
    cell.strip_prefix("NV")?.parse().ok().filter(|&links| links <= NVLINKS_MAX)
}
