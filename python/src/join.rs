//! Joining: from the environment, from arguments, or in a store of the caller's.

use std::path::{Path, PathBuf};

use pleach_collectives::{Options, Reproducible};
use pleach_transport::Secret;
use pleach_transport::rendezvous::{ExplicitWorld, FabricChoice, JoinError, Launcher, Rendezvous, World};
use pyo3::prelude::*;

use crate::error;
use crate::group::{Group, limit};
use crate::store::PythonStore;

/// What keyword arguments change of the options of a group.
pub(crate) struct Settings {
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) timeout: Option<f64>,
    pub(crate) join_timeout: Option<f64>,
    pub(crate) fabric: Option<String>,
    pub(crate) reproducible: Option<String>,
}

impl Settings {
    pub(crate) fn options(self, py: Python<'_>, mut world: World) -> PyResult<Options> {
        if let Some(path) = &self.secret_file {
            let secret = Secret::from_file(Path::new(path));
            world.secret = Some(secret.map_err(|error| error::world(py, &error.to_string()))?);
        }
        let mut options = Options::from_env_in(world);
        if let Some(limit) = limit(py, "timeout", self.timeout)? {
            options.timeout = limit;
        }
        if let Some(limit) = limit(py, "join_timeout", self.join_timeout)? {
            options.join_timeout = limit;
        }
        if let Some(name) = &self.fabric {
            options.fabric =
                name.parse::<FabricChoice>().map_err(|error| error::argument(py, error.to_string()))?;
        }
        options.reproducible = match self.reproducible.as_deref() {
            None | Some("no") => Reproducible::No,
            Some("per-world-size") => Reproducible::PerWorldSize,
            Some("exact") => Reproducible::Exact,
            Some(other) => {
                let text = format!("reproducible is {other:?}; there are no, per-world-size and exact");
                return Err(error::argument(py, text));
            }
        };
        Ok(options)
    }
}

/// The world of the arguments, or of the launcher of this process.
pub(crate) fn world(
    py: Python<'_>,
    rank: Option<u32>,
    world_size: Option<u32>,
    rendezvous: Option<&str>,
) -> PyResult<World> {
    let parsed = rendezvous.map(str::parse::<Rendezvous>).transpose();
    let rendezvous = parsed.map_err(|error| error::world(py, &error.to_string()))?;
    let found = World::find(&ExplicitWorld { rank, world_size, rendezvous });
    // It names the arguments as options of a command.
    let named = |text: String| text.replace("--world-size", "world_size").replace("--rank", "rank");
    Ok(found.map_err(|error| error::world(py, &named(error.to_string())))?.unwrap_or_else(World::alone))
}

/// Joins the ranks of this job and returns the group; see ``pleach.join``.
#[pyfunction]
#[pyo3(signature = (*, rank=None, world_size=None, rendezvous=None, secret_file=None, timeout=None,
                    join_timeout=None, fabric=None, reproducible=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn join(
    py: Python<'_>,
    rank: Option<u32>,
    world_size: Option<u32>,
    rendezvous: Option<&str>,
    secret_file: Option<PathBuf>,
    timeout: Option<f64>,
    join_timeout: Option<f64>,
    fabric: Option<String>,
    reproducible: Option<String>,
) -> PyResult<Group> {
    let world = world(py, rank, world_size, rendezvous)?;
    let settings = Settings { secret_file, timeout, join_timeout, fabric, reproducible };
    let options = settings.options(py, world)?;
    let joined = py.detach(|| pleach_collectives::Group::join(&options));
    Ok(Group::new(joined.map_err(|error| error::join(py, &error))?))
}

/// Joins the ranks that use the same keys of a store: an object with the methods ``set(key,
/// bytes)``, ``get(key) -> bytes``, ``check([key, ...]) -> bool`` and ``add(key, 1) -> int``, as
/// ``torch.distributed.Store`` has. The group keeps the store and asks it again when it is split.
///
/// prefix: begins every key; no other group of the store has it. The other arguments: see
/// ``pleach.join``.
#[pyfunction]
#[pyo3(signature = (store, rank, world_size, *, prefix="pleach/", secret_file=None, timeout=None,
                    join_timeout=None, fabric=None, reproducible=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn join_in_store(
    py: Python<'_>,
    store: Py<PyAny>,
    rank: u32,
    world_size: u32,
    prefix: &str,
    secret_file: Option<PathBuf>,
    timeout: Option<f64>,
    join_timeout: Option<f64>,
    fabric: Option<String>,
    reproducible: Option<String>,
) -> PyResult<Group> {
    if rank >= world_size {
        return Err(error::argument(py, format!("rank {rank} is not below world_size, {world_size}")));
    }
    // The variables say what the store does not: the secret, the host, the interface.
    let alone = ExplicitWorld { rank: Some(0), world_size: Some(1), rendezvous: None };
    let found = World::find(&alone).map_err(|error| error::world(py, &error.to_string()))?;
    let found = found.unwrap_or_else(World::alone);
    let world = World { rank, world_size, local_rank: None, launcher: Launcher::Arguments, ..found };
    let settings = Settings { secret_file, timeout, join_timeout, fabric, reproducible };
    let options = settings.options(py, world)?;
    let joined = if world_size == 1 {
        py.detach(|| pleach_collectives::Group::join(&options))
    } else {
        let store = PythonStore::new(store, prefix.to_owned(), rank, world_size);
        let store = Box::new(store.map_err(|error| error::join(py, &JoinError::Store(error).into()))?);
        py.detach(|| pleach_collectives::Group::join_in(store, &options))
    };
    Ok(Group::new(joined.map_err(|error| error::join(py, &error))?))
}
