//! Groups of threads over real fabrics, for tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use pleach_collectives::{Group, Options};
use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World};
use pleach_vocabulary::Rank;

/// Longest time a call may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a waiting call polls before it sleeps. Ranks of tests are more threads than there are
/// processors, so polling takes the time of the rank that is waited for.
pub(crate) const SPIN: Duration = Duration::from_micros(10);

/// Runs `body` as every rank of a group, whose options `adjust` has changed, and gives what each
/// returned.
pub(crate) fn with_group<T: Send>(
    fabric: Fabric,
    ranks: u32,
    adjust: impl Fn(&mut Options) + Sync,
    body: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let folder = Folder::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (folder, body, adjust) = (&folder, &body, &adjust);
                scope.spawn(move || {
                    let mut options = Options::new(world(rank, ranks, &folder.0));
                    options.fabric = FabricChoice::Only(fabric);
                    // Ranks of even and of odd numbers are on different hosts.
                    options.world.host = (fabric == Fabric::Hybrid).then(|| format!("host-{}", rank % 2));
                    (options.timeout, options.spin) = (PATIENCE, SPIN);
                    adjust(&mut options);
                    body(Group::join(&options).unwrap_or_else(|error| panic!("rank {rank}: {error}")))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A rank that meets the others in a folder.
pub(crate) fn world(rank: Rank, world_size: u32, folder: &Path) -> World {
    World {
        rank,
        world_size,
        local_rank: Some(rank),
        rendezvous: Some(Rendezvous::File { folder: folder.to_owned() }),
        launcher: Launcher::Arguments,
        ..World::alone()
    }
}

/// A new folder of this test's own, gone with it however it ends.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        // Relaxed: only uniqueness matters.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pleach-ranks-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}
