//! Faults that befall ranks which this command has started.

use std::fmt;
use std::str::FromStr;

/// What happens to a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It ends by SIGKILL.
    Kill,
    /// It stands still by SIGSTOP, and goes on when the others do without it.
    Stop,
}

/// Faults by name, for which there are no means yet.
const NOT_YET: [&str; 6] = ["join", "leave", "cut", "slow", "rendezvous", "store"];

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "kill" => Ok(Self::Kill),
            "stop" => Ok(Self::Stop),
            name if NOT_YET.contains(&name) => Err(format!("there is no {name} yet; there are kill stop")),
            _ => Err("there are kill stop".to_owned()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
        })
    }
}
