//! The peers of this machine: found, compiled, and how to start them.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::rows::{Fabric, Row, Runner};

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
    launcher: Option<&'static str>,
    version: String,
}

/// How an MPI is called: compiler, launcher, what the launcher's version says.
struct Mpi {
    runner: Runner,
    names: &'static [(&'static str, &'static str)],
    version_says: &'static str,
}

const MPIS: [Mpi; 2] = [
    Mpi {
        runner: Runner::OpenMpi,
        names: &[("mpicc.openmpi", "mpirun.openmpi"), ("mpicc", "mpirun")],
        version_says: "Open",
    },
    Mpi {
        runner: Runner::Mpich,
        names: &[("mpicc.mpich", "mpiexec.hydra"), ("mpicc", "mpiexec.hydra")],
        version_says: "HYDRA",
    },
];

impl Peers {
    /// Compiles what can be compiled.
    pub(crate) fn build(folder: &Path) -> Result<Self, String> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let limits = compile("cc", "limits.c", &folder.join("limits"), &[])?;
        let mut found: Vec<_> = MPIS.iter().map(|mpi| (mpi.runner, mpi.find(folder))).collect();
        found.push((Runner::Gloo, gloo(folder)));
        let by_hand = compile("cc", "by_hand.c", &folder.join("by_hand"), &[])?;
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
        let mut variables = Vec::new();
        if let Some(launcher) = found.launcher {
            words.push(launcher.into());
            if runner == Runner::OpenMpi {
                words.extend(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"].map(Into::into));
                if row.fabric == Fabric::Tcp {
                    let tcp = [
                        "--mca",
                        "pml",
                        "ob1",
                        "--mca",
                        "btl",
                        "tcp,self",
                        "--mca",
                        "btl_tcp_if_include",
                        "lo",
                    ];
                    words.extend(tcp.map(Into::into));
                }
            } else if row.fabric == Fabric::Tcp {
                // MPICH over UCX and over libfabric, whichever it was built with.
                variables.extend([
                    ("UCX_TLS", "tcp,self"),
                    ("UCX_NET_DEVICES", "lo"),
                    ("FI_PROVIDER", "tcp"),
                ]);
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

impl Mpi {
    fn find(&self, folder: &Path) -> Result<Found, String> {
        for (compiler, launcher) in self.names {
            let Some(version) = first_lines(launcher) else { continue };
            if !version.contains(self.version_says) {
                continue;
            }
            let number = version
                .split_whitespace()
                .find(|word| word.starts_with(|letter: char| letter.is_ascii_digit()));
            let program = compile(compiler, "mpi.c", &folder.join(compiler.replace("mpicc", "mpi")), &[])?;
            let version = number.unwrap_or_default().to_owned();
            return Ok(Found { program, launcher: Some(launcher), version });
        }
        Err(format!("no {}; {INSTALL}", self.names[0].1))
    }
}

fn gloo(folder: &Path) -> Result<Found, String> {
    let program = compile("c++", "gloo.cc", &folder.join("gloo"), &["-lgloo", "-lpthread"])?;
    Ok(Found { program, launcher: None, version: "(libgloo-dev)".to_owned() })
}

/// What a program says about its version, or `None` where it cannot be started.
fn first_lines(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().take(2).collect::<Vec<_>>().join(" "))
}

/// Compiles a file of `benches/peers/`.
fn compile(compiler: &str, source: &str, program: &Path, libraries: &[&str]) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(source);
    let output =
        Command::new(compiler).args(FLAGS).arg("-o").arg(program).arg(&source).args(libraries).output();
    let output = output.map_err(|error| format!("no compiler: {compiler} ({error}); {INSTALL}"))?;
    if output.status.success() {
        return Ok(program.to_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let first = errors.lines().find(|line| line.contains("error")).unwrap_or("without a word").to_owned();
    Err(format!("{compiler} fails: {first}; {INSTALL}"))
}
