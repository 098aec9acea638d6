//! The processors that each rank started here is bound to.
//!
//! [`Cores`] are the cores that the launcher may use itself (Slurm, mpirun, `taskset` or a control
//! group may have limited them), with their siblings and NUMA nodes from `/sys`. [`Cores::divide`]
//! gives each rank its share. `pleach rank-shim` binds the rank before the command begins, so the
//! binding covers all threads of the command. Memory needs no binding: the kernel takes a page from
//! the node of the thread that touches it first, and shared memory asks for the node of its owner.
//!
//! **Two jobs on a host are not bound to the same processors.** A launcher holds an abstract socket
//! that is named after each core of its ranks ([`CoreClaims`]). Another launcher leaves out a core
//! whose name is taken, and a job that finds too few cores is not bound. The kernel releases the
//! names when the process ends. A process that takes names without need costs other jobs their
//! binding and nothing else. Other network namespaces have other names.

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

use pleach::transport::processors::Processors;

/// What each rank gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Bind {
    /// An equal share of all cores, near the same memory if possible
    Share,
    /// One core for each rank
    Core,
    /// All processors of one NUMA node, shared with the other ranks there
    Numa,
    /// All processors
    None,
}

/// One core, or one processor of a core that several ranks share.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Core {
    node: u32,
    /// The lowest processor of it, also where that is not to be used.
    number: u32,
    processors: Processors,
}

/// Cores that ranks can be bound to, those near one memory together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cores(Vec<Core>);

impl Cores {
    /// The cores of the machine under `root` that have one of the processors `allowed`, with those
    /// of them alone.
    fn find(root: &Path, allowed: &Processors) -> Self {
        let text = |path: String| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let nodes = Processors::of_list(&text("sys/devices/system/node/online".to_owned()));
        let node_of: BTreeMap<u32, u32> = nodes
            .iter()
            .flat_map(|node| {
                let list = text(format!("sys/devices/system/node/node{node}/cpulist"));
                let near: Vec<u32> = Processors::of_list(&list).iter().collect();
                near.into_iter().map(move |processor| (processor, node))
            })
            .collect();
        let mut cores = BTreeMap::new();
        for processor in allowed.iter() {
            let list = text(format!("sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"));
            let siblings = Processors::of_list(&list);
            // The kernel says nothing of processors that are off, nor everywhere of the others.
            let first = siblings.iter().next().filter(|_| siblings.contains(processor)).unwrap_or(processor);
            let node = node_of.get(&processor).copied().unwrap_or_default();
            cores.entry((node, first)).or_insert_with(Vec::new).push(processor);
        }
        let core =
            |((node, number), processors)| Core { node, number, processors: Processors::new(processors) };
        Self(cores.into_iter().map(core).collect())
    }

    /// Each processor as a core of its own: those of a core together, or the first ones of all
    /// cores before the second ones.
    fn by_processor(&self, spread: bool) -> Self {
        let of = |core: &Core| {
            let one = |processor| Core { processors: Processors::new([processor]), ..core.clone() };
            core.processors.iter().map(one).enumerate().collect::<Vec<_>>()
        };
        let mut by_processor: Vec<_> = self.0.iter().flat_map(of).collect();
        if spread {
            by_processor.sort_by_key(|(place, _)| *place);
        }
        Self(by_processor.into_iter().map(|(_, core)| core).collect())
    }

    /// The processors of each rank; `None` where there are not enough for all.
    fn divide(&self, bind: Bind, ranks: usize) -> Option<Vec<Processors>> {
        if bind == Bind::None || ranks == 0 {
            return None;
        }
        if ranks > self.0.len() {
            let by_processor = self.by_processor(bind == Bind::Core);
            return if ranks > by_processor.0.len() { None } else { by_processor.divide(bind, ranks) };
        }
        let merged = |cores: &[Core]| Processors::new(cores.iter().flat_map(|core| core.processors.iter()));
        if bind == Bind::Core {
            return Some(self.0[..ranks].iter().map(|core| merged(std::slice::from_ref(core))).collect());
        }
        let nodes: Vec<&[Core]> = self.0.chunk_by(|core, next| core.node == next.node).collect();
        if bind == Bind::Share && ranks < nodes.len() {
            let all: Vec<Vec<Core>> = parts(&nodes, ranks).map(<[&[Core]]>::concat).collect();
            return Some(all.iter().map(|cores| merged(cores)).collect());
        }
        let of = |(cores, ranks): (&&[Core], usize)| match bind {
            Bind::Share => parts(cores, ranks).map(merged).collect(),
            _ => vec![merged(cores); ranks],
        };
        Some(nodes.iter().zip(ranks_of_nodes(&nodes, ranks)).flat_map(of).collect::<Vec<_>>())
    }
}

/// `all` in `count` parts, whose lengths differ by one at most.
fn parts<T>(all: &[T], count: usize) -> impl Iterator<Item = &[T]> {
    (0..count).map(move |part| &all[part * all.len() / count..(part + 1) * all.len() / count])
}

/// The number of ranks of each node: each next rank goes where most cores are left for a rank.
fn ranks_of_nodes(nodes: &[&[Core]], ranks: usize) -> Vec<usize> {
    let mut counts = vec![0; nodes.len()];
    for _ in 0..ranks {
        // Compared as fractions; of several the first.
        let better = |one: usize, other: usize| {
            nodes[one].len() * (counts[other] + 1) > nodes[other].len() * (counts[one] + 1)
        };
        let best = (0..nodes.len()).fold(0, |best, node| if better(node, best) { node } else { best });
        counts[best] += 1;
    }
    counts
}

/// Cores that no other job on this host has, as long as this lives.
struct CoreClaims(Vec<(Core, UnixDatagram)>);

impl CoreClaims {
    /// Takes those of `cores` that are free.
    fn take(cores: &Cores) -> Self {
        let claim = |core: &Core| {
            let address = SocketAddr::from_abstract_name(format!("pleach-core-{}", core.number)).ok()?;
            Some((core.clone(), UnixDatagram::bind_addr(&address).ok()?))
        };
        Self(cores.0.iter().filter_map(claim).collect())
    }

    /// Gives back those that are not among `used`.
    fn keep(&mut self, used: &[Processors]) {
        let is_used = |core: &Core| {
            core.processors.iter().any(|processor| used.iter().any(|set| set.contains(processor)))
        };
        self.0.retain(|(core, _)| is_used(core));
    }
}

/// The processors that the ranks of a job are bound to.
pub(super) struct Placement {
    /// By rank of this host; `None` if they are not bound.
    processors: Vec<Processors>,
    /// Held until the job ends.
    _claims: Option<CoreClaims>,
}

impl Placement {
    /// The binding of `ranks` ranks: the one asked for, or else the usual one.
    pub(super) fn of(ranks: u32, asked: Option<Bind>, usual: Bind) -> Self {
        let nowhere = Self { processors: Vec::new(), _claims: None };
        let bind = asked.unwrap_or(usual);
        if bind == Bind::None {
            return nowhere;
        }
        let told = |why: String| match asked {
            Some(_) => tracing::warn!("ranks are not bound to processors of their own: {why}"),
            None => tracing::info!("ranks are not bound to processors of their own: {why}"),
        };
        let Some(allowed) = Processors::allowed() else {
            told("the kernel does not say where this process may run".to_owned());
            return nowhere;
        };
        let cores = Cores::find(Path::new("/"), &allowed);
        let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
        if ranks as usize > parallelism.min(allowed.len()) {
            told(format!("{ranks} ranks and {} processors", parallelism.min(allowed.len())));
            return nowhere;
        }
        let mut claims = CoreClaims::take(&cores);
        let free = Cores(claims.0.iter().map(|(core, _)| core.clone()).collect());
        let Some(processors) = free.divide(bind, ranks as usize) else {
            told(format!("other jobs have {} of {} cores", cores.0.len() - free.0.len(), cores.0.len()));
            return nowhere;
        };
        claims.keep(&processors);
        Self { processors, _claims: Some(claims) }
    }

    /// The processors that this rank of this host is bound to, if it is bound.
    pub(super) fn of_rank(&self, local_rank: u32) -> Option<&Processors> {
        self.processors.get(local_rank as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// A machine's files under `/sys`, of processors that share cores and nodes as these lists say.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str, cores: &[&str], nodes: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("pleach-cores-{name}-{}", std::process::id()));
            let write = |path: String, text: &str| {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a folder")).expect("a temporary folder");
                fs::write(path, format!("{text}\n")).expect("a file");
            };
            for core in cores {
                for processor in Processors::of_list(core).iter() {
                    let folder = format!("sys/devices/system/cpu/cpu{processor}/topology");
                    write(format!("{folder}/thread_siblings_list"), core);
                }
            }
            if let Some(last) = nodes.len().checked_sub(1) {
                write("sys/devices/system/node/online".to_owned(), &format!("0-{last}"));
            }
            for (node, list) in nodes.iter().enumerate() {
                write(format!("sys/devices/system/node/node{node}/cpulist"), list);
            }
            Self(root)
        }

        /// The processor sets of `ranks` ranks, in the kernel's notation.
        fn divide(&self, allowed: &str, bind: Bind, ranks: usize) -> Option<Vec<String>> {
            let cores = Cores::find(&self.0, &Processors::of_list(allowed));
            Some(cores.divide(bind, ranks)?.iter().map(ToString::to_string).collect())
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn lists(lists: &[&str]) -> Option<Vec<String>> {
        Some(lists.iter().map(|&list| list.to_owned()).collect())
    }

    #[test]
    fn ranks_of_one_socket_get_cores_of_their_own_until_there_are_too_many() {
        // As the kernel numbers a desktop: the second threads of all cores come last.
        let machine = Machine::new("one", &["0,4", "1,5", "2,6", "3,7"], &["0-7"]);
        assert_eq!(machine.divide("0-7", Bind::Core, 2), lists(&["0,4", "1,5"]));
        assert_eq!(machine.divide("0-7", Bind::Share, 1), lists(&["0-7"]));
        assert_eq!(machine.divide("0-7", Bind::Share, 2), lists(&["0-1,4-5", "2-3,6-7"]));
        assert_eq!(machine.divide("0-7", Bind::Share, 3), lists(&["0,4", "1,5", "2-3,6-7"]));
        assert_eq!(machine.divide("0-7", Bind::Numa, 2), lists(&["0-7", "0-7"]));
        // More ranks than cores: one thread of a core each, and as few on one core as possible.
        assert_eq!(machine.divide("0-7", Bind::Core, 5), lists(&["0", "1", "2", "3", "4"]));
        assert_eq!(machine.divide("0-7", Bind::Share, 8).map(|sets| sets.len()), Some(8));
        for bind in [Bind::Core, Bind::Share, Bind::Numa] {
            assert_eq!(machine.divide("0-7", bind, 9), None);
        }
        assert_eq!(machine.divide("0-7", Bind::None, 2), None);
    }

    #[test]
    fn neighbouring_threads_of_a_virtual_machine_are_one_core() {
        let machine = Machine::new("pairs", &["0-1", "2-3"], &["0-3"]);
        assert_eq!(machine.divide("0-3", Bind::Core, 2), lists(&["0-1", "2-3"]));
    }

    #[test]
    fn ranks_of_two_sockets_stay_on_one_each() {
        let cores: Vec<String> = (0..8).map(|core| format!("{core},{}", core + 8)).collect();
        let cores: Vec<&str> = cores.iter().map(String::as_str).collect();
        let machine = Machine::new("two", &cores, &["0-3,8-11", "4-7,12-15"]);
        assert_eq!(machine.divide("0-15", Bind::Share, 2), lists(&["0-3,8-11", "4-7,12-15"]));
        assert_eq!(machine.divide("0-15", Bind::Share, 3), lists(&["0-1,8-9", "2-3,10-11", "4-7,12-15"]));
        assert_eq!(machine.divide("0-15", Bind::Numa, 3), lists(&["0-3,8-11", "0-3,8-11", "4-7,12-15"]));
        assert_eq!(machine.divide("0-15", Bind::Core, 5), lists(&["0,8", "1,9", "2,10", "3,11", "4,12"]));
        // One rank, who has both.
        assert_eq!(machine.divide("0-15", Bind::Share, 1), lists(&["0-15"]));
        // Nodes whose processors alternate.
        let machine = Machine::new("alternate", &["0", "1", "2", "3"], &["0,2", "1,3"]);
        assert_eq!(machine.divide("0-3", Bind::Share, 2), lists(&["0,2", "1,3"]));
        assert_eq!(machine.divide("0-3", Bind::Core, 2), lists(&["0", "2"]));
    }

    #[test]
    fn processors_that_are_off_or_not_allowed_are_nobody_s() {
        // 1 and 6 are off: the kernel has no folder for their cores, and no list names them.
        let machine = Machine::new("off", &["0,4", "5", "2", "3,7"], &["0,2-5,7"]);
        assert_eq!(machine.divide("0,2-5,7", Bind::Core, 4), lists(&["0,4", "2", "3,7", "5"]));
        // What a control group, Slurm or taskset left.
        assert_eq!(machine.divide("4-7", Bind::Core, 2), lists(&["4", "7"]));
        assert_eq!(machine.divide("3", Bind::Core, 2), None);
        assert_eq!(machine.divide("3", Bind::Share, 1), lists(&["3"]));
    }

    #[test]
    fn a_machine_that_says_nothing_has_one_processor_a_core() {
        let machine = Machine::new("silent", &[], &[]);
        assert_eq!(machine.divide("0-3", Bind::Share, 2), lists(&["0-1", "2-3"]));
        assert_eq!(machine.divide("0-3", Bind::Core, 4), lists(&["0", "1", "2", "3"]));
    }

    #[test]
    fn a_core_that_another_job_has_is_left_to_it_until_it_ends() {
        // Numbers that no machine of this test has: others may be at work here.
        let core = |number| Core { node: 0, number, processors: Processors::new([number]) };
        let number = 900 + std::process::id() % 100;
        let cores = Cores(vec![core(number), core(number + 1)]);
        let mut first = CoreClaims::take(&cores);
        assert_eq!(first.0.len(), 2);
        assert_eq!(CoreClaims::take(&cores).0.len(), 0);
        first.keep(&[Processors::new([number + 1])]);
        let second = CoreClaims::take(&cores);
        assert_eq!(second.0.iter().map(|(core, _)| core.clone()).collect::<Vec<_>>(), [core(number)]);
        drop((first, second));
        assert_eq!(CoreClaims::take(&cores).0.len(), 2);
    }
}
