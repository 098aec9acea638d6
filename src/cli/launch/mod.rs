//! Starts ranks on this host, and stays until the last of their processes is gone.
//!
//! [`Launch`] is one job. Subcommands that run as several ranks call [`rank_or_launch`]. Inside a
//! world (`pleach run`, torchrun, mpirun, srun) it returns this process's place. Outside, it starts
//! this same command as N ranks.

use std::ffi::OsString;
use std::fs;
use std::fs::DirBuilder;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pleach::transport::auth::challenge;
use pleach::transport::rendezvous::{ExplicitWorld, Rendezvous, WORLD_SIZE_MAX, World};
use pleach::transport::tls::{Tls, TlsMode};
use rustix::fs::{Access, access};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

use crate::cli::launch::bind::Placement;
use crate::cli::launch::certifier::Certifier;
use crate::cli::launch::job::{Job, JobEnd};
use crate::cli::launch::restarts::Restarts;
use crate::cli::log;
use crate::cli::members::asker;
use crate::cli::{CommandError, secret};

pub(crate) use crate::cli::launch::bind::Bind;
pub(crate) use job::Output;
pub(crate) use restarts::Outliving;

mod bind;
mod certifier;
pub(crate) mod guard;
mod job;
pub(crate) mod members;
mod restarts;
mod sockets;
pub(crate) mod store;

/// Set to 1 for ranks whose plain output goes to a terminal, so that they may draw there.
pub(crate) const TERMINAL_VARIABLE: &str = "PLEACH_TERMINAL";

/// Ranks to start here.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// The number of ranks.
    pub(crate) ranks: u32,
    /// The number of the first rank.
    pub(crate) first_rank: u32,
    /// The number of ranks on all hosts together.
    pub(crate) world_size: u32,
    /// The rendezvous of the ranks; `None` takes a port of this host.
    pub(crate) rendezvous: Option<Rendezvous>,
    /// The command and its arguments.
    pub(crate) command: Vec<OsString>,
    /// How the lines of the ranks are passed on.
    pub(crate) output: Output,
    /// The binding to processors that the user asked for.
    pub(crate) bind: Option<Bind>,
    /// The binding if the user asked for none.
    pub(crate) usual_bind: Bind,
    /// The mode of TLS that the user asked for.
    pub(crate) tls: Option<String>,
    /// Whether the job outlives its processes.
    pub(crate) outliving: Option<Outliving>,
}

impl Launch {
    /// Starts the ranks and waits for their end. `Usage` only if the first rank that failed
    /// reported a usage error.
    pub(crate) fn run(&self) -> Result<(), CommandError> {
        let (rendezvous, reserved) = match &self.rendezvous {
            Some(rendezvous) => (rendezvous.clone(), None),
            None => {
                let (port, socket) = reserve_port().map_err(|error| {
                    CommandError::failed(format!("no free port: 127.0.0.1 ({error}); end what uses them all"))
                })?;
                (Rendezvous::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port }, Some(socket))
            }
        };
        // Ranks of other launchers would not know it.
        let has_all = self.world_size == self.ranks;
        let secret = (has_all && needs_secret()).then(JobSecret::new);
        let echoes = log::level().is_some();
        let certifier = self.outliving.and_then(|_| self.certifier());
        let mut job = Job::new(echoes, secret.as_ref().map(JobSecret::folder), certifier)
            .map_err(|end_cause| self.error(end_cause))?;
        if let Some(secret) = &secret {
            secret.write()?;
        }
        let placement = Placement::of(self.ranks, self.bind, self.usual_bind);
        let command = |rank: u32, told_rank: u32| {
            let local_rank = rank - self.first_rank;
            let processors = placement.of_rank(local_rank);
            if let Some(processors) = processors {
                tracing::info!("rank {rank} is bound to processors {processors}");
            }
            let mut command = guard::rank_command(&self.command, processors);
            command
                .env("PLEACH_RANK", told_rank.to_string())
                .env("PLEACH_WORLD_SIZE", self.world_size.to_string())
                .env("PLEACH_LOCAL_RANK", local_rank.to_string())
                .env("PLEACH_RENDEZVOUS", rendezvous.to_string());
            if let Some(secret) = &secret {
                command.env(SECRET_VARIABLE, secret.file());
            }
            if let Some(tls) = &self.tls {
                command.env("PLEACH_TLS", tls);
            }
            if self.output == Output::Plain && std::io::IsTerminal::is_terminal(&std::io::stderr()) {
                command.env(TERMINAL_VARIABLE, "1");
            }
            command
        };
        for rank in self.first_rank..self.first_rank + self.ranks {
            job.start(rank, command(rank, rank), self.output);
        }
        // One that comes again as rank 0 would begin a job where nobody holds the address just
        // then.
        let again = |rank: u32| command(rank, rank.max(1).min(self.world_size - 1));
        let restarts = self.outliving.map(|outliving| Restarts::new(outliving, !has_all, &again));
        let result = job.run(restarts).map_err(|end_cause| self.error(end_cause));
        drop((reserved, placement));
        result
    }

    /// Certifies deaths here to the ranks of other launchers, which come only to an address that
    /// was given. `None` without one, and without the job's secret, which ranks alone may have.
    fn certifier(&self) -> Option<Certifier> {
        let asker = asker(self.rendezvous.as_ref()?).and_then(|mut asker| {
            self.tls.as_deref().map_or(Ok(()), |mode| speak_tls(&mut asker, mode))?;
            Ok(asker)
        });
        match asker {
            Ok(asker) => Some(Certifier::new(asker)),
            Err(error) => {
                let text = error.into_text();
                tracing::warn!("ranks of other launchers are not told when a rank has died here: {text}");
                None
            }
        }
    }

    fn error(&self, end_cause: JobEnd) -> CommandError {
        match end_cause {
            JobEnd::Failed(failure) if failure.is_usage() => CommandError::usage(failure.text()),
            JobEnd::Failed(failure) => CommandError::failed(failure.text()),
            JobEnd::TooFew { failure, running, outliving, used } => CommandError::failed(format!(
                "too few ranks: {running} ranks run and at least {} must; ranks were started anew {used} of {} times; the last end: {}",
                outliving.bounds().fewest(),
                outliving.restarts(),
                failure.text()
            )),
            JobEnd::Signal(name) => CommandError::failed(format!(
                "job ended: {name} came, {} ranks were ended; start it again",
                self.ranks
            )),
            JobEnd::OutputClosed(error) => CommandError::failed(format!(
                "output closed: nobody reads standard output or error ({error}); the ranks were ended"
            )),
            JobEnd::System(what, error) => CommandError::failed(format!(
                "{what}: {error}; look at the limits of this host ('ulimit -a')"
            )),
        }
    }
}

/// Values with which a rank can be told by hand who it is.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct WorldArguments {
    /// The rank of this process, if no launcher sets it
    #[arg(long, value_name = "R", requires = "world_size")]
    rank: Option<u32>,
    /// Number of ranks on all hosts
    #[arg(long, value_name = "W", requires = "rank")]
    world_size: Option<u32>,
    /// Rendezvous: tcp://HOST:PORT, file:///DIR, etcd[s]://HOST:PORT/PREFIX or c10d://HOST:PORT
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Option<Rendezvous>,
    /// When ranks speak TLS over TCP [default: PLEACH_TLS, or where an address is not loopback]
    #[arg(long, value_name = "MODE", value_parser = ["off", "on", "require"])]
    tls: Option<String>,
}

/// The world in which this process was started. `ranks`, and `beside` more that a person does not
/// count with `--ranks`, must not contradict it.
fn find_world(
    arguments: &WorldArguments,
    ranks: Option<u32>,
    beside: u32,
) -> Result<Option<World>, CommandError> {
    let WorldArguments { rank, world_size, rendezvous, tls } = arguments.clone();
    let mut world =
        World::find(&ExplicitWorld { rank, world_size, rendezvous }).map_err(CommandError::usage)?;
    if let (Some(world), Some(mode)) = (&mut world, &tls) {
        speak_tls(world, mode)?;
    }
    match (&world, ranks) {
        (Some(World { world_size, launcher, .. }), Some(ranks))
            if world_size.checked_sub(beside) != Some(ranks) =>
        {
            let more = if beside == 0 { String::new() } else { format!(" and {beside} more that listens") };
            Err(CommandError::typed(format!(
                "ranks contradict: --ranks {ranks}{more}, but {launcher} says {world_size}; leave --ranks away"
            )))
        }
        _ => Ok(world),
    }
}

/// Has processes of the world speak TLS as a person has asked for.
fn speak_tls(world: &mut World, mode: &str) -> Result<(), CommandError> {
    let parsed = mode.parse::<TlsMode>().and_then(|mode| Tls::from_env_but(Some(mode)));
    let tls = parsed.map_err(CommandError::usage)?;
    let secret = world.secret.take().ok_or_else(|| {
        CommandError::usage(format!(
            "--tls {mode} without a secret; write one with 'pleach secret FILE' and set PLEACH_SECRET_FILE=FILE on all hosts"
        ))
    })?;
    world.secret = Some(secret.with_tls(tls));
    Ok(())
}

/// Whether this process was started as one of several ranks.
pub(crate) fn is_one_of_several(arguments: &WorldArguments) -> Result<bool, CommandError> {
    Ok(find_world(arguments, None, 0)?.is_some_and(|world| world.world_size > 1))
}

/// The number of ranks of a later [`rank_or_launch`], so that arguments can be checked before any
/// rank is started. There are `beside` more than `ranks` says.
pub(crate) fn rank_count(
    arguments: &WorldArguments,
    ranks: Option<u32>,
    default_ranks: u32,
    beside: u32,
) -> Result<u32, CommandError> {
    if let Some(world) = find_world(arguments, ranks, beside)? {
        return Ok(world.world_size);
    }
    let (ranks, most) = (ranks.unwrap_or(default_ranks), WORLD_SIZE_MAX - beside);
    if (1..=most).contains(&ranks) {
        return Ok(ranks + beside);
    }
    Err(CommandError::typed(format!("bad number of ranks: --ranks {ranks}; give 1 to {most}")))
}

/// This process's place in the world in which it was started. Outside a world: starts this same
/// command as `ranks` (or else `default_ranks`) ranks, bound as `bind` asks, and returns `None`
/// after they have ended. A single rank is not launched.
pub(crate) fn rank_or_launch(
    arguments: &WorldArguments,
    ranks: Option<u32>,
    default_ranks: u32,
    bind: Option<Bind>,
) -> Result<Option<World>, CommandError> {
    if let Some(world) = find_world(arguments, ranks, 0)? {
        return Ok(Some(world));
    }
    let ranks = rank_count(arguments, ranks, default_ranks, 0)?;
    if ranks == 1 {
        return Ok(Some(World::alone()));
    }
    let mut command = vec![OsString::from(guard::OWN_PROGRAM)];
    command.extend(std::env::args_os().skip(1));
    let rendezvous = arguments.rendezvous.clone();
    let (first_rank, world_size, output) = (0, ranks, Output::Plain);
    // Each rank of such a command works in one thread.
    let usual_bind = Bind::Core;
    let tls = arguments.tls.clone();
    let outliving = None;
    let launch = Launch {
        ranks,
        first_rank,
        world_size,
        rendezvous,
        command,
        output,
        bind,
        usual_bind,
        tls,
        outliving,
    };
    launch.run().map(|()| None)
}

/// Why a command's program cannot be started, if so.
pub(crate) fn not_found(program: &OsString) -> Option<String> {
    (!is_executable(program)).then(|| {
        let program = program.display();
        format!(
            "command not found: {program}; check its name and permissions, after -- give the command itself"
        )
    })
}

/// Whether a program can be started, as the shell would find it.
fn is_executable(program: &OsString) -> bool {
    let can = |path: &Path| path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    if program.as_encoded_bytes().contains(&b'/') {
        return can(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| can(&folder.join(program)))
}

/// A port of this host, reserved as long as the socket lives; rank 0 can listen on it.
///
/// The socket is bound and does not listen, and both ends set SO_REUSEADDR. Such sockets may share
/// a port as long as only one listens. But the kernel does not give the port to a process that asks
/// for any port.
fn reserve_port() -> std::io::Result<(u16, OwnedFd)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok((address.port(), socket))
}

// The secret of one job: a file that only this user can read, in a folder that exists as long as
// the job.
//
// Ranks get the path of the file (`PLEACH_SECRET_FILE`). The secret itself is in no argument and
// no variable, which other users could see.

/// Where ranks look for the secret.
const SECRET_VARIABLE: &str = "PLEACH_SECRET_FILE";

/// The file's name in its folder.
const FILE: &str = "secret";

/// Whether to make a secret for the job: the user gave none.
fn needs_secret() -> bool {
    std::env::var_os(SECRET_VARIABLE).is_none_or(|file| file.is_empty())
}

/// How the folder's name begins.
const FOLDER: &str = "pleach-job-";

/// Whether the secret of this rank is one that the launcher drew for the job, so that no program
/// beside the job can know it.
pub(crate) fn has_secret_of_job() -> bool {
    let file = std::env::var_os(SECRET_VARIABLE).map(PathBuf::from);
    let folder = file.as_deref().and_then(Path::parent).and_then(Path::file_name);
    folder.is_some_and(|name| name.as_encoded_bytes().starts_with(FOLDER.as_bytes()))
}

/// A folder with a secret, removed when dropped.
struct JobSecret {
    folder: PathBuf,
}

impl JobSecret {
    /// Its later path: in the user's folder for such files, or else in the folder for temporary
    /// files.
    fn new() -> Self {
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let own =
            own.filter(|path| path.is_absolute() && access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok());
        let random: String = challenge()[..12].iter().map(|byte| format!("{byte:02x}")).collect();
        let place = own.unwrap_or_else(std::env::temp_dir);
        Self { folder: place.join(format!("{FOLDER}{random}")) }
    }

    /// Makes the folder and writes a fresh secret. The caller has ensured before that signals do
    /// not end this process.
    fn write(&self) -> Result<(), CommandError> {
        // An error if anything is there already, also a link.
        DirBuilder::new().mode(0o700).create(&self.folder).map_err(|error| {
            let folder = self.folder.display();
            CommandError::failed(format!(
                "no secret for the job: {folder} ({error}); set TMPDIR to a folder that you can write"
            ))
        })?;
        secret::write(&self.file())
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }
}

impl Drop for JobSecret {
    fn drop(&mut self) {
        remove_secret(&self.folder);
    }
}

/// Removes a job's secret; it may be gone already.
fn remove_secret(folder: &Path) {
    let _ = fs::remove_file(folder.join(FILE));
    let _ = fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_reserved_port_can_be_listened_on_by_rank_0_and_is_given_to_nobody_else() {
        let (port, _socket) = reserve_port().expect("a port is free");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).expect("rank 0 listens");
        assert_eq!(listener.local_addr().expect("is bound").port(), port);
        drop(listener);
        for _ in 0..100 {
            let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
            assert_ne!(other.local_addr().expect("is bound").port(), port);
        }
    }
}
