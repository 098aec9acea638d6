//! The environment variables that pleach reads.
//!
//! This is the list, not the reader. Each variable is read where its value is used:
//!
//! | variables | read in |
//! | --- | --- |
//! | rank, world, rendezvous, secret, host, interface | `transport/src/rendezvous/environment.rs` |
//! | `PLEACH_TLS`, `PLEACH_TLS_*` | `transport/src/tls/mod.rs` |
//! | `PLEACH_VERBS_*` | `transport/src/verbs/port.rs` |
//! | `PLEACH_TUNING` | `schedule/src/tuning/mod.rs` |
//! | flight recorder, trace, metrics | `collectives/src/observe/settings.rs` |
//! | those of the tensor exchange | `exchange/src/endpoint/options.rs` |
//! | `PLEACH_LOG` | `src/cli/log.rs` |
//!
//! To add a variable, read it there, add a row to [`VARIABLES`] and the same row to
//! `docs/environment.md`. `tests/tidy` compares the table, the page and the names in the code. A
//! default that the code names has a test below.

use std::fmt;

/// An environment variable that pleach reads. An empty variable counts as one that is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Variable {
    /// The name.
    pub name: &'static str,
    /// The value if it is not set.
    pub default: &'static str,
    /// Its form and its effect.
    pub meaning: &'static str,
}

/// One row of the table in `docs/environment.md`.
impl fmt::Display for Variable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "| `{}` | {} | {} |", self.name, self.default, self.meaning)
    }
}

const fn variable(name: &'static str, default: &'static str, meaning: &'static str) -> Variable {
    Variable { name, default, meaning }
}

/// All of them. `docs/environment.md` is this table.
pub const VARIABLES: &[Variable] = &[
    variable(
        "PLEACH_RANK",
        "what the launcher says",
        "the number of this rank, from 0; with `PLEACH_WORLD_SIZE` before the variables of torchrun, Open MPI, MPICH and srun",
    ),
    variable("PLEACH_WORLD_SIZE", "what the launcher says", "how many ranks the job has"),
    variable(
        "PLEACH_LOCAL_RANK",
        "what the launcher says",
        "the number of this rank among those of its host, from 0",
    ),
    variable(
        "PLEACH_RENDEZVOUS",
        "what the launcher says",
        "where ranks meet: `tcp://HOST:PORT`, an address of rank 0's host (or several, with commas), `file:///DIR`, a folder that all hosts see, `etcd://HOST:PORT[,…]/PREFIX` (`etcds://` with TLS), or `c10d://HOST:PORT`, a TCPStore of PyTorch",
    ),
    variable(
        "PLEACH_SECRET_FILE",
        "no secret",
        "a file that holds the job's secret, the same on every host; nobody else may read it (`chmod 600`). Ranks on several hosts need one",
    ),
    variable(
        "PLEACH_TLS",
        "between addresses that are not loopback",
        "when connections over TCP speak TLS 1.3: `off`, `on` (also on loopback), or `require` (as `on`, and RDMA between hosts is refused); the same on all ranks, and at both ends of a link of the tensor exchange",
    ),
    variable(
        "PLEACH_TLS_CERT",
        "a key that each rank makes",
        "a file in PEM with this rank's certificate and those between it and the authority; with `PLEACH_TLS_KEY` and `PLEACH_TLS_CA`, on all ranks or none",
    ),
    variable("PLEACH_TLS_KEY", "none", "the file in PEM with the private key of `PLEACH_TLS_CERT`"),
    variable(
        "PLEACH_TLS_CA",
        "none",
        "a file in PEM with the authorities that may have signed the certificates of ranks",
    ),
    variable(
        "PLEACH_TLS_KERNEL",
        "off",
        "`on`: the kernel opens records of data into their places, where it has TLS and replaces keys (Linux 6.14 or later, module `tls`)",
    ),
    variable(
        "PLEACH_JOIN_TIMEOUT",
        "60",
        "how many seconds ranks wait for each other when they join, 1 to 86400",
    ),
    variable(
        "PLEACH_CONNECT",
        "`on-use` from 16 ranks on",
        "when pairs of ranks connect: `on-use`, when a call first needs them, or `at-join`, all of them; the same on all ranks",
    ),
    variable(
        "PLEACH_INTERFACE",
        "the interface towards the rendezvous",
        "the network interface (`eth2`) or the address (`10.0.0.5`) that other hosts reach this rank by",
    ),
    variable(
        "PLEACH_HOST",
        "the identity of the running system",
        "the name of this host; ranks of equal names share memory",
    ),
    variable(
        "PLEACH_LAST_WORD",
        "none",
        "set by `pleach run --elastic --rendezvous`: the file in which a session keeps what the launcher tells the job when the rank has died",
    ),
    variable(
        "PLEACH_VERBS_DEVICE",
        "the first active port",
        "the RDMA device (`mlx5_0`), perhaps with a port (`mlx5_0:2`), or up to four with commas between",
    ),
    variable(
        "PLEACH_VERBS_GID_INDEX",
        "the best RoCE v2 address",
        "the number of the GID in the table of the port",
    ),
    variable(
        "PLEACH_VERBS_QUEUE_PAIRS",
        "1",
        "queue pairs to each peer on each device; of two ranks the smaller number counts",
    ),
    variable(
        "PLEACH_VERBS_STRIPE_BYTES",
        "262144",
        "a transfer of so many bytes or more goes over all queue pairs to its peer",
    ),
    variable(
        "PLEACH_VERBS_CONNECT",
        "rendezvous",
        "how queue pairs are connected: `rendezvous`, or `cm` for librdmacm; the same on all ranks",
    ),
    variable(
        "PLEACH_VERBS_TRAFFIC_CLASS",
        "0",
        "traffic class of RoCE packets, 0 to 255 (DSCP times four), by which a lossless network sorts them",
    ),
    variable("PLEACH_VERBS_SERVICE_LEVEL", "0", "service level of queue pairs, 0 to 15"),
    variable(
        "PLEACH_FABRIC",
        "auto",
        "by which fabric programs that exchange tensors have regions: `auto`, `shm`, `tcp`, `verbs`, or `none`: tensors then go inline",
    ),
    variable(
        "PLEACH_REQUIRE",
        "nothing",
        "`regions`: a peer with which a program that exchanges tensors has no regions is an error",
    ),
    variable(
        "PLEACH_TUNING",
        "built-in selection",
        "a file of measured algorithms, which `pleach tune -o FILE` writes",
    ),
    variable(
        "PLEACH_FLIGHT_RECORDER",
        "none",
        "a folder: when a group fails, each rank writes its last operations there",
    ),
    variable("PLEACH_TRACE", "none", "a file that gets every call, for Perfetto and `chrome://tracing`"),
    variable(
        "PLEACH_METRICS",
        "none",
        "where to serve metrics: `PORT` of loopback or `IP:PORT`; rank `r` of a host adds `r` to the port. `pleach top` reads them",
    ),
    variable(
        "PLEACH_LOG",
        "warnings",
        "what the command logs on standard error, also as a rank (`bench`, `train`): `info`, `debug`, or `pleach_transport=debug,info`. Other programs need a subscriber of `tracing`",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::rendezvous::{CONNECT_ON_USE_FROM, DEFAULT_JOIN_TIMEOUT};
    use crate::transport::verbs::STRIPE_BYTES;

    fn default_of(name: &str) -> &'static str {
        VARIABLES.iter().find(|variable| variable.name == name).expect("the table has it").default
    }

    #[test]
    fn defaults_are_those_of_the_code() {
        assert_eq!(default_of("PLEACH_JOIN_TIMEOUT"), DEFAULT_JOIN_TIMEOUT.as_secs().to_string());
        let on_use = format!("`on-use` from {CONNECT_ON_USE_FROM} ranks on");
        assert_eq!(default_of("PLEACH_CONNECT"), on_use);
        assert_eq!(default_of("PLEACH_VERBS_STRIPE_BYTES"), STRIPE_BYTES.to_string());
    }

    #[test]
    fn each_has_one_row() {
        for (index, variable) in VARIABLES.iter().enumerate() {
            assert!(VARIABLES[..index].iter().all(|before| before.name != variable.name), "{variable}");
        }
    }
}
