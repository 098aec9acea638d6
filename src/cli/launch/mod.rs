//! Starts ranks on this host, and stays until the last of their processes is gone.
//!
//! [`Launch`] is one job; [`rank_or_launch`] is what subcommands call that run as several ranks:
//! inside a world (`pleach run`, torchrun, mpirun, srun) it gives this process's place, outside it
//! starts this same command as N ranks.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::Path;

use pleach::transport::rendezvous::{ExplicitWorld, Rendezvous, WORLD_SIZE_MAX, World};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};

use super::CommandError;
use super::log::LOG_VARIABLE;

mod bind;
mod cause;
pub(crate) mod guard;
mod job;
mod job_secret;
mod output;

pub(crate) use bind::Bind;
use bind::Placement;
use job::{Ended, Job};
use job_secret::{JobSecret, SECRET_VARIABLE};
pub(crate) use output::Output;

/// Set to 1 for ranks whose plain output goes to a terminal, so that they may draw there.
pub(crate) const TERMINAL_VARIABLE: &str = "PLEACH_TERMINAL";

/// Ranks to start here.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// How many.
    pub(crate) ranks: u32,
    /// The first one's number.
    pub(crate) first_rank: u32,
    /// How many there are on all hosts together.
    pub(crate) world_size: u32,
    /// Where they meet; a port of this host where absent.
    pub(crate) rendezvous: Option<Rendezvous>,
    /// The command and its arguments.
    pub(crate) command: Vec<OsString>,
    /// How their lines are passed on.
    pub(crate) output: Output,
    /// What was asked for of the processors that they are kept on.
    pub(crate) bind: Option<Bind>,
    /// What is done where nothing was.
    pub(crate) usual_bind: Bind,
}

impl Launch {
    /// Starts the ranks and waits for their end. `Usage` only where the first to fail said so.
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
        let secret = self.needs_secret().then(JobSecret::new);
        let echoes = std::env::var_os(LOG_VARIABLE).is_some();
        let mut job =
            Job::new(echoes, secret.as_ref().map(JobSecret::folder)).map_err(|ended| self.error(ended))?;
        if let Some(secret) = &secret {
            secret.write()?;
        }
        let placement = Placement::of(self.ranks, self.bind, self.usual_bind);
        for local_rank in 0..self.ranks {
            let rank = self.first_rank + local_rank;
            let processors = placement.of_rank(local_rank);
            if let Some(processors) = processors {
                tracing::info!("rank {rank} is kept on processors {processors}");
            }
            let mut command = guard::rank_command(&self.command, processors);
            command
                .env("PLEACH_RANK", rank.to_string())
                .env("PLEACH_WORLD_SIZE", self.world_size.to_string())
                .env("PLEACH_LOCAL_RANK", local_rank.to_string())
                .env("PLEACH_RENDEZVOUS", rendezvous.to_string());
            if let Some(secret) = &secret {
                command.env(SECRET_VARIABLE, secret.file());
            }
            if self.output == Output::Plain && std::io::IsTerminal::is_terminal(&std::io::stderr()) {
                command.env(TERMINAL_VARIABLE, "1");
            }
            job.start(rank, command, self.output);
        }
        let result = job.run().map_err(|ended| self.error(ended));
        drop((reserved, placement));
        result
    }

    /// Whether to make a secret for the job: nobody gave one, and all ranks are started here. Ranks
    /// of other launchers would not know it.
    fn needs_secret(&self) -> bool {
        self.world_size == self.ranks && std::env::var_os(SECRET_VARIABLE).is_none_or(|file| file.is_empty())
    }

    fn error(&self, ended: Ended) -> CommandError {
        match ended {
            Ended::Failed(failure) if failure.is_usage() => CommandError::usage(failure.text()),
            Ended::Failed(failure) => CommandError::failed(failure.text()),
            Ended::Signal(name) => CommandError::failed(format!(
                "job ended: {name} came, {} ranks were ended; start it again",
                self.ranks
            )),
            Ended::OutputClosed(error) => CommandError::failed(format!(
                "output closed: nobody reads standard output or error ({error}); the ranks were ended"
            )),
            Ended::System(what, error) => CommandError::failed(format!(
                "{what}: {error}; look at the limits of this host ('ulimit -a')"
            )),
        }
    }
}

/// Values with which a rank can be told by hand who it is.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct WorldArguments {
    /// This process's rank, where no launcher says it
    #[arg(long, value_name = "R", requires = "world_size")]
    rank: Option<u32>,
    /// How many ranks there are on all hosts
    #[arg(long, value_name = "W", requires = "rank")]
    world_size: Option<u32>,
    /// Where ranks meet: tcp://HOST:PORT or file:///DIR
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Option<Rendezvous>,
}

/// The world this process was started in, which `ranks` must not contradict.
fn find_world(arguments: &WorldArguments, ranks: Option<u32>) -> Result<Option<World>, CommandError> {
    let WorldArguments { rank, world_size, rendezvous } = arguments.clone();
    let world = World::find(&ExplicitWorld { rank, world_size, rendezvous }).map_err(CommandError::usage)?;
    match (&world, ranks) {
        (Some(World { world_size, launcher, .. }), Some(ranks)) if ranks != *world_size => {
            Err(CommandError::typed(format!(
                "ranks contradict: --ranks {ranks}, but {launcher} says {world_size}; leave --ranks away"
            )))
        }
        _ => Ok(world),
    }
}

/// Whether this process was started as one of several ranks.
pub(crate) fn is_one_of_several(arguments: &WorldArguments) -> Result<bool, CommandError> {
    Ok(find_world(arguments, None)?.is_some_and(|world| world.world_size > 1))
}

/// How many ranks [`rank_or_launch`] will have, so that what was typed can be checked before any is
/// started.
pub(crate) fn rank_count(
    arguments: &WorldArguments,
    ranks: Option<u32>,
    default_ranks: u32,
) -> Result<u32, CommandError> {
    if let Some(world) = find_world(arguments, ranks)? {
        return Ok(world.world_size);
    }
    let ranks = ranks.unwrap_or(default_ranks);
    if (1..=WORLD_SIZE_MAX).contains(&ranks) {
        return Ok(ranks);
    }
    Err(CommandError::typed(format!("bad number of ranks: --ranks {ranks}; give 1 to {WORLD_SIZE_MAX}")))
}

/// This process's place in the world it was started in; or, outside any, `None` after this same
/// command has run as `ranks` (or else `default_ranks`) ranks, kept on processors as `bind` asks.
/// One rank needs no launching.
pub(crate) fn rank_or_launch(
    arguments: &WorldArguments,
    ranks: Option<u32>,
    default_ranks: u32,
    bind: Option<Bind>,
) -> Result<Option<World>, CommandError> {
    if let Some(world) = find_world(arguments, ranks)? {
        return Ok(Some(world));
    }
    let ranks = rank_count(arguments, ranks, default_ranks)?;
    if ranks == 1 {
        return Ok(Some(World::alone()));
    }
    let mut command = vec![OsString::from(guard::OWN_PROGRAM)];
    command.extend(std::env::args_os().skip(1));
    let rendezvous = arguments.rendezvous.clone();
    let (first_rank, world_size, output) = (0, ranks, Output::Plain);
    // Its ranks work in one thread.
    let usual_bind = Bind::Core;
    let launch = Launch { ranks, first_rank, world_size, rendezvous, command, output, bind, usual_bind };
    launch.run().map(|()| None)
}

/// Whether a command's program can be started, as the shell would find it.
pub(crate) fn is_executable(program: &OsString) -> bool {
    let can = |path: &Path| path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    if program.as_encoded_bytes().contains(&b'/') {
        return can(Path::new(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| can(&folder.join(program)))
}

/// A port of this host that nobody else gets while the socket lives; rank 0 can listen on it.
///
/// The socket is bound and does not listen, and both ends set SO_REUSEADDR: such sockets may share
/// a port as long as only one listens, but the kernel gives it to nobody who asks for any port.
fn reserve_port() -> std::io::Result<(u16, OwnedFd)> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address = SocketAddr::try_from(getsockname(&socket)?)?;
    Ok((address.port(), socket))
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
