//! `pleach doctor`: what is wrong with this machine, or between two, and the commands that mend it.
//!
//! A check is a function from a [`Machine`] to [`Finding`]s; one file a subject. All are run at
//! once, each on a thread of its own, so that one whose file does not answer holds nobody up.
//! [`peer`] meets the other machine of a pair, [`compare`] looks at both.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use pleach::transport::auth::Secret;
use pleach::transport::clock;
use pleach::transport::verbs::port;

use super::CommandError;
use super::output::{print, print_json};

mod compare;
mod counters;
mod finding;
mod gpu;
mod limits;
mod machine;
pub(crate) mod network;
mod pci;
mod peer;
mod processor;
mod rdma;
#[cfg(test)]
mod tests;

pub(crate) use machine::Machine;

use compare::Statement;
use finding::{Finding, Level, Report, Section, counted};
use peer::{ListenAddress, Met};

/// How long checks may take before they are given up.
const CHECKS_LIMIT: Duration = Duration::from_secs(15);

/// Arguments of `pleach doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach doctor\n  pleach doctor --json | jq '.findings[] | select(.level == \"problem\")'\n  \
    pleach doctor --listen              # on one host\n  pleach doctor --peer 10.0.0.5       # on another: both report on the pair\n\n\
    Each line is ok, unknown (it could not be found out), a warning (it works, but not as well as it could) or a problem;\n\
    below it stands the command that mends it, or shows more. The exit status is 1 where there is a problem.\n\
    PLEACH_INTERFACE, PLEACH_HOST and what begins with PLEACH_VERBS_ are heeded as by ranks.\n\
    Beyond loopback a pair needs the secret that its jobs need: PLEACH_SECRET_FILE."
)]
pub(crate) struct Arguments {
    /// Look also at the pair with this host, where 'pleach doctor --listen' waits
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "listen")]
    peer: Option<String>,
    /// Wait for the other host of a pair [default: 0.0.0.0:9401]
    #[arg(long, value_name = "[IP:]PORT", num_args = 0..=1, default_missing_value = "9401")]
    listen: Option<ListenAddress>,
    /// How long to wait for it
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "listen", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    wait: u64,
    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `pleach doctor`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let machine = Machine::here();
    let met = meet(arguments, &machine)?;
    let mut report = Report {
        host: machine.text("proc/sys/kernel/hostname").unwrap_or_else(|| "unknown host".to_owned()),
        uses: uses(&machine),
        findings: look(&machine, CHECKS),
    };
    if let Some(Met { own, theirs, reached, address }) = met {
        let there = theirs.value("host").unwrap_or("unknown host");
        report.host = format!("{} with {there} ({})", report.host, address.ip());
        report.findings.extend(compare::check(&own, &theirs, &reached));
    }
    if arguments.json {
        print_json("report", &report.json())?;
    } else {
        print("report", &report.text())?;
    }
    verdict(&report)
}

fn meet(arguments: &Arguments, machine: &Machine) -> Result<Option<Met>, CommandError> {
    if arguments.peer.is_none() && arguments.listen.is_none() {
        return Ok(None);
    }
    let file = std::env::var_os("PLEACH_SECRET_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
    let secret = file.as_deref().map(Secret::from_file).transpose().map_err(CommandError::usage)?;
    let statement = |local: IpAddr| Statement::of(machine, local);
    match (&arguments.peer, arguments.listen) {
        (Some(target), _) => peer::dial(target, source(machine)?, secret.as_ref(), &statement).map(Some),
        (None, Some(ListenAddress(address))) => {
            peer::listen(address, secret.as_ref(), Duration::from_secs(arguments.wait), &statement).map(Some)
        }
        (None, None) => Ok(None),
    }
}

/// The address that `PLEACH_INTERFACE` means.
fn source(machine: &Machine) -> Result<Option<IpAddr>, CommandError> {
    let Some(wanted) = machine.wish.as_ref().ok().and_then(|wish| wish.interface.as_deref()) else {
        return Ok(None);
    };
    if let Ok(address) = wanted.trim_matches(['[', ']']).parse() {
        return Ok(Some(address));
    }
    let index = machine.number(&format!("sys/class/net/{wanted}/ifindex"));
    let own = machine.addresses.iter().find(|(owner, _)| Some(u64::from(*owner)) == index);
    own.map(|(_, address)| Some(*address)).ok_or_else(|| {
        CommandError::usage(format!(
            "no such interface: PLEACH_INTERFACE='{wanted}'; name one that 'ip addr' shows, with an address"
        ))
    })
}

fn verdict(report: &Report) -> Result<(), CommandError> {
    match report.count(Level::Problem) {
        0 => Ok(()),
        problems => Err(CommandError::failed(format!(
            "{}: {}; run the commands below them, and pleach doctor again",
            counted(problems, "problem"),
            report.host
        ))),
    }
}

/// A subject and what looks into it.
type Check = (&'static str, fn(&Machine) -> Vec<Finding>);

const CHECKS: &[Check] = &[
    ("limits", limits::check),
    ("processors and memory", processor::check),
    ("sockets", network::check),
    ("RDMA", rdma::check),
    ("RDMA links", counters::check),
    ("PCI", pci::check),
    ("GPU memory", gpu::check),
];

/// Everything that checks find, in their order.
fn look(machine: &Machine, checks: &[Check]) -> Vec<Finding> {
    look_within(machine, checks, CHECKS_LIMIT)
}

fn look_within(machine: &Machine, checks: &[Check], limit: Duration) -> Vec<Finding> {
    let (sender, receiver) = mpsc::channel();
    for (number, (_, check)) in checks.iter().copied().enumerate() {
        let (sender, machine) = (sender.clone(), machine.clone());
        // Not joined: one that hangs in the kernel ends with the process.
        let started = std::thread::Builder::new().name("pleach-doctor".to_owned()).spawn(move || {
            // Nobody listens any more where it took too long.
            let _ = sender.send((number, check(&machine)));
        });
        drop(started);
    }
    drop(sender);
    let until = clock::now() + limit;
    let mut found: Vec<Option<Vec<Finding>>> = checks.iter().map(|_| None).collect();
    while let Ok((number, findings)) = receiver.recv_timeout(until.since(clock::now())) {
        found[number] = Some(findings);
    }
    let missing = |name: &'static str| {
        let mut section = Section::new(name);
        section.unknown(
            "all of it",
            format!("no answer within {} s: a file of the kernel hangs", limit.as_secs()),
            "dmesg | tail",
        );
        section.done()
    };
    found
        .into_iter()
        .zip(checks)
        .flat_map(|(findings, (name, _))| findings.unwrap_or_else(|| missing(name)))
        .collect()
}

/// What pleach will move bytes by.
fn uses(machine: &Machine) -> String {
    let up: Vec<String> = network::interfaces(machine)
        .into_iter()
        .filter(|interface| interface.is_up)
        .map(|interface| format!("{} ({})", interface.name, interface.speed()))
        .collect();
    let across = if up.is_empty() {
        "nothing to other hosts: no interface is up".to_owned()
    } else {
        format!("tcp over {} to other hosts", up.join(", "))
    };
    let ports = machine.rdma_ports().unwrap_or_default();
    let rdma = match rdma::choose(machine, ports) {
        _ if ports.is_empty() => "there is no RDMA device, so --fabric verbs is not possible".to_owned(),
        Ok(chosen) => format!("--fabric verbs takes {}", port::reason(&chosen)),
        Err(reason) => format!("--fabric verbs is not possible ({reason})"),
    };
    format!("ranks will use: shm inside this host, {across}; {rdma}")
}
