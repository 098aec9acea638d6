//! Reads the world of this process from arguments and from the variables that launchers set.
//!
//! [`parse`] is a pure function of the explicit values, a map of variables and facts about the
//! process. Rank and world size come together from the first of: arguments, `PLEACH_*`, torchrun,
//! Open MPI, Hydra, srun. Rendezvous, secret, host name and interface come from arguments or
//! `PLEACH_*` whatever the source of the rank, and only without those from the launcher.
//! `PLEACH_JOIN_TIMEOUT` is the number of seconds that ranks wait for each other, `PLEACH_CONNECT`
//! when their pairs connect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::world::{Connect, Launcher, Rendezvous, RendezvousError, World};
use crate::auth::{Secret, SecretError};

/// Largest world.
pub const WORLD_SIZE_MAX: u32 = 65_536;

/// The first of the ports for srun steps.
const SRUN_PORT_FIRST: u64 = 20_000;

/// The number of these ports.
const SRUN_PORTS: u64 = 10_000;

/// Largest `PLEACH_JOIN_TIMEOUT`: a day, in seconds.
const JOIN_TIMEOUT_MAX_S: u32 = 86_400;

/// How many ancestors are searched for the launcher.
const ANCESTORS_MAX: usize = 16;

/// Values that were given explicitly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExplicitWorld {
    /// `--rank`.
    pub rank: Option<u32>,
    /// `--world-size`.
    pub world_size: Option<u32>,
    /// `--rendezvous`.
    pub rendezvous: Option<Rendezvous>,
}

/// Facts about this process apart from its variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessInfo {
    /// The folder of temporary files.
    pub temporary: PathBuf,
    /// The user's number.
    pub user: u32,
    /// Hydra's proxy among the ancestors: its process id and start time. The same for all local
    /// ranks.
    pub hydra_proxy: Option<(u32, u64)>,
}

impl ProcessInfo {
    /// The facts of the current process.
    #[must_use]
    pub fn current() -> Self {
        Self {
            temporary: std::env::temp_dir(),
            user: rustix::process::geteuid().as_raw(),
            hydra_proxy: hydra_proxy(),
        }
    }
}

/// Why the world of this process is unknown.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// A variable that is not a number.
    #[error("bad value: {variable}='{value}'; set a number from {min} to {max}")]
    Number {
        /// The variable or argument.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Least value.
        min: u32,
        /// Greatest value.
        max: u32,
    },
    /// One variable without the other.
    #[error("incomplete: {present} is given without {absent}; give both or neither")]
    Incomplete {
        /// The one that is set.
        present: &'static str,
        /// The one that is missing.
        absent: &'static str,
    },
    /// A rank outside the world.
    #[error("rank outside the world: {variable}={rank} in a world of {world_size}; ranks count from 0 to {}", .world_size - 1)]
    RankOutside {
        /// The variable or argument.
        variable: &'static str,
        /// Its value.
        rank: u32,
        /// The number of ranks.
        world_size: u32,
    },
    /// A word that is not one of two.
    #[error("bad value: {variable}='{value}'; set {first} or {second}")]
    Word {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// One of the values that it takes.
        first: Connect,
        /// The other one.
        second: Connect,
    },
    /// A malformed rendezvous address.
    #[error("{source} ({variable})")]
    Rendezvous {
        /// The variable.
        variable: &'static str,
        /// The error.
        #[source]
        source: RendezvousError,
    },
    /// No rendezvous address.
    #[error(
        "no rendezvous: {launcher} gives {world_size} ranks no address to meet; set {variable}=tcp://HOST:PORT or file:///DIR for all of them"
    )]
    NoRendezvous {
        /// The source of the rank.
        launcher: Launcher,
        /// The number of ranks.
        world_size: u32,
        /// The variable to set.
        variable: &'static str,
    },
    /// The secret file is not usable.
    #[error(transparent)]
    Secret(#[from] SecretError),
}

/// A world whose secret file has not been read yet.
#[derive(Clone, Debug)]
pub struct ParsedWorld {
    /// The world without its secret.
    pub world: World,
    /// The secret file.
    pub secret_file: Option<PathBuf>,
}

impl ParsedWorld {
    /// Reads the secret.
    pub(super) fn open(self) -> Result<World, WorldError> {
        let secret = self.secret_file.as_deref().map(Secret::from_file).transpose()?;
        Ok(World { secret, ..self.world })
    }
}

/// Variables by name.
pub type Variables = BTreeMap<String, String>;

/// The world of this process; `None` without any source.
///
/// # Errors
///
/// See [`WorldError`].
pub fn parse(
    arguments: &ExplicitWorld,
    variables: &Variables,
    process_info: &ProcessInfo,
) -> Result<Option<ParsedWorld>, WorldError> {
    let reader = Reader { variables };
    let Some((launcher, identity)) = identity(arguments, &reader)? else { return Ok(None) };
    let Identity { rank, world_size, local_rank } = identity;
    let rendezvous = match (&arguments.rendezvous, reader.text("PLEACH_RENDEZVOUS")) {
        (Some(rendezvous), _) => Some(rendezvous.clone()),
        (None, Some(text)) => {
            let parsed = text.parse();
            Some(parsed.map_err(|source| WorldError::Rendezvous { variable: "PLEACH_RENDEZVOUS", source })?)
        }
        (None, None) if world_size == 1 => None,
        (None, None) => Some(launcher_rendezvous(launcher, world_size, &reader, process_info)?),
    };
    let text = |name| reader.text(name).map(str::to_owned);
    let (host, interface) = (text("PLEACH_HOST"), text("PLEACH_INTERFACE"));
    let join_timeout = reader.number("PLEACH_JOIN_TIMEOUT", 1, JOIN_TIMEOUT_MAX_S)?;
    let join_timeout = join_timeout.map(|seconds| Duration::from_secs(seconds.into()));
    let world = World {
        rank,
        world_size,
        local_rank,
        rendezvous,
        secret: None,
        host,
        interface,
        join_timeout,
        connect: reader.connect("PLEACH_CONNECT")?,
        last_word: reader.text("PLEACH_LAST_WORD").map(PathBuf::from),
        launcher,
    };
    Ok(Some(ParsedWorld { world, secret_file: reader.text("PLEACH_SECRET_FILE").map(PathBuf::from) }))
}

struct Identity {
    rank: u32,
    world_size: u32,
    local_rank: Option<u32>,
}

/// The variables of a launcher.
struct LauncherVariables {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    /// The launcher's other variables are ignored without this one.
    marker: Option<&'static str>,
}

const LAUNCHERS: [LauncherVariables; 5] = [
    LauncherVariables {
        launcher: Launcher::Pleach,
        rank: "PLEACH_RANK",
        world_size: "PLEACH_WORLD_SIZE",
        local_rank: "PLEACH_LOCAL_RANK",
        marker: None,
    },
    LauncherVariables {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        marker: Some("MASTER_ADDR"),
    },
    LauncherVariables {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        marker: None,
    },
    LauncherVariables {
        launcher: Launcher::Hydra,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        marker: None,
    },
    LauncherVariables {
        // A batch script has SLURM_PROCID=0 without being a rank; only a step has its own node
        // list.
        launcher: Launcher::Srun,
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        marker: Some("SLURM_STEP_NODELIST"),
    },
];

fn identity(
    arguments: &ExplicitWorld,
    reader: &Reader<'_>,
) -> Result<Option<(Launcher, Identity)>, WorldError> {
    match (arguments.rank, arguments.world_size) {
        (Some(rank), Some(world_size)) => {
            if !(1..=WORLD_SIZE_MAX).contains(&world_size) {
                let value = world_size.to_string();
                return Err(WorldError::Number {
                    variable: "--world-size",
                    value,
                    min: 1,
                    max: WORLD_SIZE_MAX,
                });
            }
            inside("--rank", rank, world_size)?;
            return Ok(Some((Launcher::Arguments, Identity { rank, world_size, local_rank: None })));
        }
        (Some(_), None) => return Err(WorldError::Incomplete { present: "--rank", absent: "--world-size" }),
        (None, Some(_)) => return Err(WorldError::Incomplete { present: "--world-size", absent: "--rank" }),
        (None, None) => {}
    }
    for names in &LAUNCHERS {
        let (rank, world_size) = (reader.text(names.rank), reader.text(names.world_size));
        let is_marked = names.marker.is_none_or(|marker| reader.text(marker).is_some());
        match (rank, world_size) {
            (Some(_), Some(_)) if is_marked || names.launcher == Launcher::Torchrun => {}
            (Some(_), None) if is_marked => {
                return Err(WorldError::Incomplete { present: names.rank, absent: names.world_size });
            }
            (None, Some(_)) if is_marked => {
                return Err(WorldError::Incomplete { present: names.world_size, absent: names.rank });
            }
            _ => continue,
        }
        // Both were seen to be set.
        let world_size = reader.number(names.world_size, 1, WORLD_SIZE_MAX)?.unwrap_or(1);
        let rank = reader.number(names.rank, 0, WORLD_SIZE_MAX - 1)?.unwrap_or(0);
        inside(names.rank, rank, world_size)?;
        let local_rank = reader.number(names.local_rank, 0, WORLD_SIZE_MAX - 1)?;
        if let Some(local_rank) = local_rank {
            inside(names.local_rank, local_rank, world_size)?;
        }
        return Ok(Some((names.launcher, Identity { rank, world_size, local_rank })));
    }
    Ok(None)
}

fn inside(variable: &'static str, rank: u32, world_size: u32) -> Result<(), WorldError> {
    if rank < world_size { Ok(()) } else { Err(WorldError::RankOutside { variable, rank, world_size }) }
}

/// The rendezvous address of ranks without an explicit one.
fn launcher_rendezvous(
    launcher: Launcher,
    world_size: u32,
    reader: &Reader<'_>,
    process_info: &ProcessInfo,
) -> Result<Rendezvous, WorldError> {
    let none = |variable| WorldError::NoRendezvous { launcher, world_size, variable };
    let all_local =
        |variable| Ok::<_, WorldError>(reader.number(variable, 1, WORLD_SIZE_MAX)? == Some(world_size));
    let job = match launcher {
        Launcher::Arguments | Launcher::Pleach | Launcher::Alone => None,
        Launcher::Torchrun => {
            let host = reader
                .text("MASTER_ADDR")
                .ok_or_else(|| none("MASTER_ADDR and MASTER_PORT, or PLEACH_RENDEZVOUS"))?;
            let port = reader
                .number("MASTER_PORT", 1, u32::from(u16::MAX) - 1)?
                .ok_or(WorldError::Incomplete { present: "MASTER_ADDR", absent: "MASTER_PORT" })?;
            // torchrun's own store listens on MASTER_PORT.
            return tcp(host, u64::from(port) + 1, "MASTER_ADDR");
        }
        Launcher::OpenMpi if all_local("OMPI_COMM_WORLD_LOCAL_SIZE")? => {
            // The first is the job's number, the others have random parts: together they are
            // unique.
            let parts = [
                "PMIX_NAMESPACE",
                "OMPI_MCA_orte_precondition_transports",
                "PMIX_SERVER_URI41",
                "PMIX_SERVER_URI4",
                "PMIX_SERVER_URI3",
                "PMIX_SERVER_URI2",
            ];
            let parts: Vec<_> = parts.iter().filter_map(|name| reader.text(name)).collect();
            (!parts.is_empty()).then(|| format!("openmpi-{}", digest(&parts.join("\n"))))
        }
        Launcher::Hydra if all_local("MPI_LOCALNRANKS")? => {
            process_info.hydra_proxy.map(|(process, started)| format!("hydra-{process}-{started}"))
        }
        Launcher::Srun => match srun_step(reader) {
            Some((_, _, step)) if reader.text("SLURM_STEP_NUM_NODES") == Some("1") => {
                Some(format!("srun-{step}"))
            }
            Some((host, port, _)) => return tcp(&host, port, "SLURM_STEP_NODELIST"),
            None => None,
        },
        Launcher::OpenMpi | Launcher::Hydra => None,
    };
    let job = job.ok_or_else(|| none("PLEACH_RENDEZVOUS"))?;
    Ok(Rendezvous::JobFolder { folder: job_folder(process_info, &job) })
}

fn tcp(host: &str, port: u64, variable: &'static str) -> Result<Rendezvous, WorldError> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let text = format!("tcp://{host}:{port}");
    text.parse().map_err(|source| WorldError::Rendezvous { variable, source })
}

fn job_folder(process_info: &ProcessInfo, job: &str) -> PathBuf {
    process_info.temporary.join(format!("pleach-{}", process_info.user)).join(job)
}

/// First host, port and name of an srun step.
fn srun_step(reader: &Reader<'_>) -> Option<(String, u64, String)> {
    let host = first_host(reader.text("SLURM_STEP_NODELIST")?)?;
    let job = reader.text("SLURM_JOB_ID").or_else(|| reader.text("SLURM_JOBID"))?;
    let step = reader.text("SLURM_STEP_ID").or_else(|| reader.text("SLURM_STEPID")).unwrap_or("0");
    let (job, step): (u64, u64) = (job.parse().ok()?, step.parse().ok()?);
    let port = SRUN_PORT_FIRST + (job.wrapping_mul(31).wrapping_add(step)) % SRUN_PORTS;
    Some((host, port, format!("{job}-{step}")))
}

/// The first host of a list such as `rack[03-07,9]-node,other`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let prefix = &list[..end];
    let Some(rest) = list[end..].strip_prefix('[') else {
        return Some(prefix.to_owned()).filter(|host| !host.is_empty());
    };
    let (range, rest) = rest.split_once(']')?;
    let first = range.split([',', '-']).next().filter(|first| !first.is_empty())?;
    let suffix = &rest[..rest.find(',').unwrap_or(rest.len())];
    if suffix.contains('[') {
        return first_host(suffix).map(|suffix| format!("{prefix}{first}{suffix}"));
    }
    Some(format!("{prefix}{first}{suffix}"))
}

fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes())[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Reader<'a> {
    variables: &'a Variables,
}

impl<'a> Reader<'a> {
    /// The value of a variable that is not empty.
    fn text(&self, name: &str) -> Option<&'a str> {
        self.variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    fn connect(&self, variable: &'static str) -> Result<Option<Connect>, WorldError> {
        let Some(text) = self.text(variable) else { return Ok(None) };
        let [first, second] = [Connect::OnUse, Connect::AtJoin];
        match [first, second].into_iter().find(|connect| text == connect.to_string()) {
            None => Err(WorldError::Word { variable, value: text.to_owned(), first, second }),
            connect => Ok(connect),
        }
    }

    fn number(&self, variable: &'static str, min: u32, max: u32) -> Result<Option<u32>, WorldError> {
        let Some(text) = self.text(variable) else { return Ok(None) };
        match text.parse() {
            Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
            _ => Err(WorldError::Number { variable, value: text.to_owned(), min, max }),
        }
    }
}

/// Hydra's proxy on this host: the nearest ancestor process with the proxy's name. All ancestors
/// are checked, because a script between the proxy and the rank may have started the rank.
fn hydra_proxy() -> Option<(u32, u64)> {
    let mut process = std::process::id();
    for _ in 0..ANCESTORS_MAX {
        let status =
            std::fs::read_to_string(Path::new("/proc").join(process.to_string()).join("stat")).ok()?;
        // `pid (name) state parent ... start`: the name may contain anything, so the fields count
        // from its last bracket.
        let (head, fields) = status.rsplit_once(") ")?;
        let fields: Vec<_> = fields.split(' ').collect();
        if head.split_once('(').is_some_and(|(_, name)| name.starts_with("hydra_pmi_proxy")) {
            return Some((process, fields.get(19)?.parse().ok()?));
        }
        process = fields.get(1)?.parse().ok()?;
    }
    None
}

#[cfg(test)]
mod tests;
