//! Errors of tuning files.

use std::path::PathBuf;
use std::sync::Arc;

use pleach_vocabulary::{Collective, Fabric, UnknownName};

use super::text::{HEADER, ROWS_MAX};
use crate::hosts::HostMap;
use crate::select::SelectError;

/// Why a tuning file cannot be used.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// The file cannot be read.
    #[error("no tuning: {} ({source}); write them with 'pleach tune -o FILE', or name no file", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The error of the system.
        source: Arc<std::io::Error>,
    },
    /// The file is something else.
    #[error("no tuning: {} has {bytes} bytes, more than {most}; name a file of 'pleach tune'", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// How long it is.
        bytes: u64,
        /// How long it may be.
        most: u64,
    },
    /// A line is wrong.
    #[error("bad tuning file: {} {misplaced}", path.display())]
    Line {
        /// The path.
        path: PathBuf,
        /// Which line, and what is wrong with it.
        misplaced: TuningParseError,
    },
}

/// A mistake and where it is.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {error}")]
pub struct TuningParseError {
    /// Which line, from 1.
    pub line: usize,
    /// The error.
    pub error: Box<TuningFault>,
}

/// An error in a line.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningFault {
    /// The file does not begin as it must.
    #[error("the first line is '{HEADER}', not '{found}'; name a file of 'pleach tune'")]
    Header {
        /// The text that was found.
        found: String,
    },
    /// A row or a model before any world.
    #[error("which world? begin with a line such as 'world shm 1x4'")]
    NoWorld,
    /// A line begins with an unknown word.
    #[error(
        "'{found}' begins no line; there are world, near, far and {}",
        Collective::NAMES.join(", ")
    )]
    Keyword {
        /// The text that was found.
        found: String,
    },
    /// More or fewer words than there must be.
    #[error("{found} words; write {form}")]
    Words {
        /// The value that was found.
        found: usize,
        /// The form.
        form: &'static str,
    },
    /// No name.
    #[error("{0}")]
    Name(UnknownName),
    /// The second table for a world.
    #[error("world {fabric} {hosts} has been; leave one of them away")]
    DuplicateWorld {
        /// Over which fabric.
        fabric: Fabric,
        /// The ranks.
        hosts: HostMap,
    },
    /// No size.
    #[error("'{found}' is no size; write bytes, such as 0, 8, 64K or 16M")]
    Size {
        /// The text that was found.
        found: String,
    },
    /// No number where one must be.
    #[error("{name} '{found}' is no number above 0")]
    Number {
        /// The name.
        name: &'static str,
        /// The text that was found.
        found: String,
    },
    /// A number of a model that has another name there.
    #[error("'{found}' stands where {expected} must be")]
    Model {
        /// The text that was found.
        found: String,
        /// The text that was expected.
        expected: &'static str,
    },
    /// The rows of a collective do not rise from 0.
    #[error("{collective} from {found}: rows of a collective begin at 0 and rise; the last was {last}")]
    Order {
        /// The collective.
        collective: &'static str,
        /// The text that was found.
        found: String,
        /// The value of the row before.
        last: String,
    },
    /// It cannot be done in this world.
    #[error("{collective} by {variant}: {error}")]
    Unfit {
        /// The collective.
        collective: &'static str,
        /// The variant that is not possible.
        variant: String,
        /// The error.
        error: Box<SelectError>,
    },
    /// More rows than any table has.
    #[error("more than {ROWS_MAX} rows; leave some away")]
    TooMany,
}
