//! The peers of this machine: found, compiled, and how to start them.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::rows::{Fabric, Mpi, Row, Runner};

/// What to do about an absent peer.
const INSTALL: &str = "run benches/install-peers";

/// For programs of ours and of peers alike.
const FLAGS: [&str; 4] = ["-O3", "-march=native", "-Wall", "-Wextra"];

/// Peers and the loop by hand, each ready or with the reason why not.
pub(crate) struct Peers {
    found: Vec<(Runner, Result<Found, String>)>,
    limits: PathBuf,
    folder: PathBuf,
}

/// A peer that can be started.
struct Found {
    program: PathBuf,
    /// Starts its ranks, where it does not start them itself.
    launcher: Option<PathBuf>,
    version: String,
}

/// Where an MPI's compiler and launcher are.
struct Place {
    mpi: Mpi,
    /// As the system's packages call them, or within the folder to which `benches/install-peers`
    /// writes those of the Python index.
    names: &'static [(&'static str, &'static str)],
    /// A word of the launcher's version, as several MPIs call their launchers alike.
    version_says: &'static str,
}

/// Environments of Python with a wheel of an MPI each.
const WHEELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/mpi");

const PLACES: [Place; 5] = [
    Place {
        mpi: Mpi::Open,
        names: &[("mpicc.openmpi", "mpirun.openmpi"), ("mpicc", "mpirun")],
        version_says: "Open",
    },
    Place {
        mpi: Mpi::Mpich,
        names: &[("mpicc.mpich", "mpiexec.hydra"), ("mpicc", "mpiexec.hydra")],
        version_says: "HYDRA",
    },
    Place { mpi: Mpi::Open5, names: &[("openmpi/bin/mpicc", "openmpi/bin/mpirun")], version_says: "Open" },
    Place {
        mpi: Mpi::Mpich5,
        names: &[("mpich/bin/mpicc", "mpich/bin/mpiexec.hydra")],
        version_says: "HYDRA",
    },
    Place {
        mpi: Mpi::Intel,
        names: &[("intel/bin/mpicc", "intel/bin/mpiexec.hydra")],
        version_says: "Intel",
    },
];

impl Peers {
    /// Compiles what can be compiled.
    pub(crate) fn build(folder: &Path) -> Result<Self, String> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let limits = compile(&mut Command::new("cc"), "limits.c", &folder.join("limits"), &[])?;
        let mut found: Vec<_> =
            PLACES.iter().map(|place| (Runner::Mpi(place.mpi), place.find(folder))).collect();
        found.push((Runner::Gloo, gloo(folder)));
        let by_hand = compile(&mut Command::new("cc"), "by_hand.c", &folder.join("by_hand"), &[])?;
        found.push((Runner::ByHand, Ok(Found { program: by_hand, launcher: None, version: String::new() })));
        Ok(Self { found, limits, folder: folder.to_owned() })
    }

    /// Who is not here, and why.
    pub(crate) fn absent(&self) -> impl Iterator<Item = (Runner, &str)> {
        self.found.iter().filter_map(|(runner, found)| Some((*runner, found.as_ref().err()?.as_str())))
    }

    /// Who is here, in words.
    pub(crate) fn versions(&self) -> Vec<String> {
        let versions = self.found.iter().filter_map(|(runner, found)| Some((runner, found.as_ref().ok()?)));
        let named = versions.filter(|(_, found)| !found.version.is_empty());
        named.map(|(runner, found)| format!("{} {}", runner.name(), found.version)).collect()
    }

    /// Measures what this machine can do.
    pub(crate) fn limits(&self) -> &Path {
        &self.limits
    }

    /// The command by which a peer measures a row, or why there is none.
    pub(crate) fn command(&self, row: &Row, runner: Runner, time_ms: u32) -> Result<Command, String> {
        let program = if runner == Runner::SliceByHand { Runner::ByHand } else { runner };
        let (_, found) =
            self.found.iter().find(|(one, _)| *one == program).expect("runners are found or not");
        let found = found.as_ref().map_err(Clone::clone)?;
        let mut words: Vec<OsString> = Vec::new();
        let mut variables: Vec<(&str, OsString)> = Vec::new();
        if let Some(launcher) = &found.launcher {
            words.push(launcher.into());
            let is_tcp = row.fabric == Fabric::Tcp;
            if matches!(runner, Runner::Mpi(Mpi::Open | Mpi::Open5)) {
                words.extend(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"].map(Into::into));
                if is_tcp {
                    let tcp = ["pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"];
                    words.push("--mca".into());
                    words.extend(tcp.map(Into::into));
                }
            } else {
                variables.extend(variables_of(runner, launcher, is_tcp));
            }
            words.extend(["-n".into(), row.ranks.to_string().into()]);
        }
        words.push(found.program.clone().into());
        if runner == Runner::Gloo {
            let meeting = self.folder.join("gloo-ranks-meet-here");
            let _ = fs::remove_dir_all(&meeting);
            fs::create_dir_all(&meeting).map_err(|error| format!("{}: {error}", meeting.display()))?;
            words.extend([meeting.into(), row.ranks.to_string().into()]);
        }
        if runner == Runner::SliceByHand {
            words.push("slice".into());
        }
        words.extend([row.collective.into(), time_ms.to_string().into()]);
        words.push(if row.fresh { "fresh" } else { "same" }.into());
        // As `pleach bench` keeps its ranks.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let is_kept = row.fabric == Fabric::Shm && row.ranks as usize <= processors;
        words.push(if is_kept { "pinned" } else { "free" }.into());
        words.extend(row.sizes.iter().map(|bytes| bytes.to_string().into()));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).envs(variables);
        Ok(command)
    }
}

impl Place {
    fn find(&self, folder: &Path) -> Result<Found, String> {
        for (compiler, launcher) in self.names {
            let whole =
                |name: &str| if name.contains('/') { Path::new(WHEELS).join(name) } else { name.into() };
            let (compiler, launcher) = (whole(compiler), whole(launcher));
            let variables = if self.mpi == Mpi::Intel { intel(&launcher) } else { Vec::new() };
            let Some(version) = first_lines(Command::new(&launcher).envs(variables.clone())) else {
                continue;
            };
            if !version.contains(self.version_says) {
                continue;
            }
            let number = version
                .split_whitespace()
                .find(|word| word.starts_with(|letter: char| letter.is_ascii_digit()));
            let program = folder.join(format!("{:?}", self.mpi).to_lowercase());
            let program = compile(Command::new(compiler).envs(variables), "mpi.c", &program, &[])?;
            let version = number.unwrap_or_default().to_owned();
            return Ok(Found { program, launcher: Some(launcher), version });
        }
        Err(format!("no {}; {INSTALL}", self.names[0].1))
    }
}

/// What makes MPICH and Intel MPI use one host's memory, or sockets for all messages.
fn variables_of(runner: Runner, launcher: &Path, is_tcp: bool) -> Vec<(&'static str, OsString)> {
    let plain: &[(&str, &str)] = match (runner, is_tcp) {
        // Ranks bind themselves, as those of all peers.
        (Runner::Mpi(Mpi::Intel), false) => &[("I_MPI_PIN", "0"), ("I_MPI_FABRICS", "shm")],
        (Runner::Mpi(Mpi::Intel), true) => &[
            ("I_MPI_PIN", "0"),
            ("I_MPI_FABRICS", "ofi"),
            ("FI_PROVIDER", "tcp"),
            // Its collectives of few bytes would go through memory all the same.
            ("I_MPI_COLL_INTRANODE", "pt2pt"),
        ],
        // Its UCX finds no way to the device `lo` by name.
        (Runner::Mpi(Mpi::Mpich5), true) => &[("MPIR_CVAR_NOLOCAL", "1"), ("UCX_TLS", "tcp,self")],
        // Over UCX or over libfabric, whichever it was built with.
        (_, true) => &[("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "lo"), ("FI_PROVIDER", "tcp")],
        (_, false) => &[],
    };
    let mut variables: Vec<_> = plain.iter().map(|(name, value)| (*name, value.into())).collect();
    if runner == Runner::Mpi(Mpi::Intel) {
        variables.extend(intel(launcher));
    }
    variables
}

/// Without its script of variables, Intel MPI asks where it is.
fn intel(launcher: &Path) -> Vec<(&'static str, OsString)> {
    let root = launcher.ancestors().nth(2).unwrap_or(launcher);
    vec![("I_MPI_ROOT", root.into()), ("LIBRARY_PATH", root.join("lib").into())]
}

fn gloo(folder: &Path) -> Result<Found, String> {
    let program =
        compile(&mut Command::new("c++"), "gloo.cc", &folder.join("gloo"), &["-lgloo", "-lpthread"])?;
    Ok(Found { program, launcher: None, version: "(libgloo-dev)".to_owned() })
}

/// What a program says about its version, or `None` where it cannot be started.
fn first_lines(program: &mut Command) -> Option<String> {
    let output = program.arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().take(2).collect::<Vec<_>>().join(" "))
}

/// Compiles a file of `benches/peers/`.
fn compile(
    compiler: &mut Command,
    source: &str,
    program: &Path,
    libraries: &[&str],
) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(source);
    let name = compiler.get_program().to_string_lossy().into_owned();
    let output = compiler.args(FLAGS).arg("-o").arg(program).arg(&source).args(libraries).output();
    let output = output.map_err(|error| format!("no compiler: {name} ({error}); {INSTALL}"))?;
    if output.status.success() {
        return Ok(program.to_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let first = errors.lines().find(|line| line.contains("error")).unwrap_or("without a word").to_owned();
    Err(format!("{name} fails: {first}; {INSTALL}"))
}
