//! Faults that befall ranks which this command has started.

use std::fmt;
use std::str::FromStr;

use rustix::process::Signal;

/// What happens to a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It ends by SIGKILL.
    Kill,
    /// It stands still by SIGSTOP, and goes on when the others do without it.
    Stop,
    /// Another one is started, and comes to the job.
    Join,
    /// It leaves by SIGTERM, at the end of a step.
    Leave,
    /// It stands still for most of a while, in short turns, by SIGSTOP and SIGCONT.
    Slow,
    /// All connections of it and another one are shut down, once.
    Cut,
    /// The one that holds the rendezvous ends by SIGKILL.
    Rendezvous,
    /// It ends by SIGKILL while the store of records is out of reach for a while.
    Store,
}

/// All faults, in the order in which people are told of them.
const ALL: [Fault; 8] = [
    Fault::Kill,
    Fault::Stop,
    Fault::Join,
    Fault::Leave,
    Fault::Slow,
    Fault::Cut,
    Fault::Rendezvous,
    Fault::Store,
];

/// How many of them, the first ones, need nothing but the process that they befall.
const SIMPLE: usize = 4;

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Join => "join",
            Self::Leave => "leave",
            Self::Slow => "slow",
            Self::Cut => "cut",
            Self::Rendezvous => "rendezvous",
            Self::Store => "store",
        }
    }

    /// What is sent to the process that it befalls, once; a join befalls none that there is.
    pub(crate) fn signal(self) -> Option<Signal> {
        match self {
            Self::Kill | Self::Rendezvous | Self::Store => Some(Signal::KILL),
            Self::Stop => Some(Signal::STOP),
            Self::Join | Self::Slow | Self::Cut => None,
            Self::Leave => Some(Signal::TERM),
        }
    }

    /// The number of ranks after the fault.
    pub(crate) fn ranks_after(self, ranks: u32) -> u32 {
        match self {
            Self::Join => ranks + 1,
            Self::Slow => ranks,
            Self::Kill | Self::Stop | Self::Leave | Self::Cut | Self::Rendezvous | Self::Store => {
                ranks.saturating_sub(1)
            }
        }
    }

    /// The fault of this name, of those that befall one process and need nothing else.
    pub(crate) fn simple(name: &str) -> Result<Self, String> {
        let simple = &ALL[..SIMPLE];
        let fault = simple.iter().copied().find(|fault| fault.name() == name);
        let known = simple.iter().map(|fault| fault.name()).collect::<Vec<_>>().join(" ");
        fault.ok_or_else(|| format!("there are {known} here; pleach chaos has more"))
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || format!("there are {}", ALL.map(Self::name).join(" "));
        ALL.into_iter().find(|fault| fault.name() == name).ok_or_else(known)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
