//! Machines as the planner sees them: the rate of a rank and the cost of its network.

use super::PlanError;

/// A cluster of equal nodes, one rank each.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    name: String,
    rates: Rates,
}

/// What a node does in a second, and what its messages cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Floating point operations a second that training reaches on one node: 10⁶ to 10¹⁸.
    pub flop_per_s: f64,
    /// Bytes a second that a node sends, and receives at the same time: 10³ to 10¹⁵.
    pub bytes_per_s: f64,
    /// The time of a message without bytes on the wire alone, in seconds: at most 1.
    pub latency_s: f64,
    /// The same with all that software adds, in seconds: `latency_s` to 1.
    pub message_s: f64,
    /// The share of a node's cores that does nothing but communicate when there are several nodes:
    /// 0 to 0.9.
    pub communication_share: f64,
}

/// The names of the built-in machines.
pub const MACHINES: [&str; 3] = ["haswell-aries", "haswell-fdr", "aws-10g"];

/// Of all built-in machines: 2 µs are the wires, 30 µs and a tenth of the cores are the fit.
const FITTED: Rates = Rates {
    flop_per_s: 1.3e12,
    bytes_per_s: 6e9,
    latency_s: 2e-6,
    message_s: 30e-6,
    communication_share: 0.1,
};

impl Machine {
    /// A machine of these rates.
    ///
    /// # Errors
    ///
    /// [`PlanError::Rate`] for a rate outside of its range.
    pub fn new(name: impl Into<String>, rates: Rates) -> Result<Self, PlanError> {
        let Rates { flop_per_s, bytes_per_s, latency_s, message_s, communication_share } = rates;
        let ranges = [
            ("rate of computing in flop/s", flop_per_s, 1e6, 1e18),
            ("bandwidth in bytes/s", bytes_per_s, 1e3, 1e15),
            ("latency in seconds", latency_s, 0.0, 1.0),
            ("time of a message in seconds", message_s, latency_s, 1.0),
            ("share of cores for communication", communication_share, 0.0, 0.9),
        ];
        for (rate, value, least, most) in ranges {
            // Not a number is in no range.
            if !(least..=most).contains(&value) {
                return Err(PlanError::Rate { rate, value, least, most });
            }
        }
        Ok(Self { name: name.into(), rates })
    }

    /// A built-in machine, by one of [`MACHINES`]. Nodes of two processors of 16 Haswell cores
    /// each, joined by Cray Aries or FDR InfiniBand; and nodes of AWS on Ethernet of 10 Gb/s. The
    /// paper gives neither rates nor message times: the constants are fitted to its five speed-ups,
    /// the same for all but the rates of AWS.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let rates = match name {
            "haswell-aries" | "haswell-fdr" => FITTED,
            "aws-10g" => Rates { flop_per_s: 1.04e12, bytes_per_s: 1.1e9, ..FITTED },
            _ => return None,
        };
        Some(Self { name: name.to_owned(), rates })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its rates.
    #[must_use]
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// The same machine if software cost nothing: messages take the time of the wire, and all cores
    /// compute.
    #[must_use]
    pub fn wires_alone(&self) -> Self {
        let rates = Rates { message_s: self.rates.latency_s, communication_share: 0.0, ..self.rates };
        Self { name: self.name.clone(), rates }
    }
}
