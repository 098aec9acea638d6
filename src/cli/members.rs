//! `pleach members`: who is in a job whose processes come and go, and what a person tells it.
//!
//! The member that gives seats answers at the rendezvous address of the job.

use std::time::Duration;

use pleach::session::asks::{AskError, MemberRow, MemberState, certify, drain, members};
use pleach::session::{Process, Seat};
use pleach::transport::auth::Secret;
use pleach::transport::rendezvous::{Rendezvous, World};
use serde_json::{Value, json};

use super::CommandError;
use super::output::{print, print_json, put, visible};

/// How long the job may take to answer.
const LIMIT: Duration = Duration::from_secs(15);

/// Arguments of `pleach members`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach members tcp://10.0.0.1:4000\n  pleach members etcd://10.0.0.9:2379/jobs/one --drain 3\n  \
    pleach members file:///shared/job --certify 10.0.0.2\n\n\
    The job's secret is that of PLEACH_SECRET_FILE. 'epoch' and 'step' are those of the member that answers.\n\
    'healing 40 %' is a member that has read so much of the states of the job. 'out' is the last process on a seat that is\n\
    free: it has ended, left or was not reached, and 'epoch' is the first one without it.\n\
    --certify says that processes have ended: their host is lost for good, or you have ended them. Then the others go on\n\
    without them even where they are half or fewer. If such a process lives after all, its job and this one go on apart."
)]
pub(crate) struct Arguments {
    /// The rendezvous address of the job
    address: Rendezvous,
    /// Ask the member on this seat to leave at the end of a step
    #[arg(long, value_name = "SEAT", conflicts_with = "certify")]
    drain: Option<u32>,
    /// Certify that the process on this seat, or all suspected ones on this host, have ended
    #[arg(long, value_name = "SEAT|HOST")]
    certify: Option<String>,
    /// Print the members as JSON, on one line
    #[arg(long)]
    json: bool,
}

/// Runs `pleach members`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let world = asker(&arguments.address)?;
    if let Some(seat) = arguments.drain {
        drain(&world, Seat(seat), LIMIT).map_err(failed)?;
    }
    let rows = members_of(&world).map_err(failed)?;
    let mut certified = Vec::new();
    if let Some(named) = &arguments.certify {
        certified = chosen(&rows, named)?;
        for process in &certified {
            certify(&world, *process, LIMIT).map_err(failed)?;
        }
    }
    if arguments.json {
        return print_json("members", &to_json(&rows, arguments.drain, &certified));
    }
    print("members", &to_text(&rows, arguments.drain, &certified))
}

/// Whoever asks the job at this address, with the secret of the environment.
pub(crate) fn asker(address: &Rendezvous) -> Result<World, CommandError> {
    let secret = std::env::var_os("PLEACH_SECRET_FILE").filter(|path| !path.is_empty());
    let secret = secret.map(|path| Secret::from_file(path.as_ref())).transpose();
    let secret = secret.map_err(CommandError::usage)?;
    Ok(World { rendezvous: Some(address.clone()), secret, ..World::alone() })
}

/// The processes of the job, by seats.
pub(crate) fn members_of(asker: &World) -> Result<Vec<MemberRow>, AskError> {
    members(asker, LIMIT)
}

fn failed(error: AskError) -> CommandError {
    CommandError::failed(error)
}

/// The processes on a seat or, of those that are suspected, on a host.
fn chosen(rows: &[MemberRow], named: &str) -> Result<Vec<Process>, CommandError> {
    let seat = named.parse().ok().map(Seat);
    let is_named = |row: &&MemberRow| match seat {
        Some(seat) => row.process.seat == seat && row.state != MemberState::Out,
        None => row.host == named && row.state == MemberState::Suspected,
    };
    let processes: Vec<Process> = rows.iter().filter(is_named).map(|row| row.process).collect();
    if processes.is_empty() {
        return Err(CommandError::usage(format!(
            "no such seat, or no suspected process on such a host: '{}'; 'pleach members' lists them",
            visible(named)
        )));
    }
    Ok(processes)
}

fn to_json(rows: &[MemberRow], drained: Option<u32>, certified: &[Process]) -> Value {
    let rows: Vec<Value> = rows.iter().map(row_to_json).collect();
    let certified: Vec<u32> = certified.iter().map(|process| process.seat.0).collect();
    json!({ "members": rows, "drained": drained, "certified": certified })
}

pub(crate) fn row_to_json(row: &MemberRow) -> Value {
    json!({
        "seat": row.process.seat.0,
        "host": row.host,
        "incarnation": format!("{:016x}", row.process.incarnation.0),
        "epoch": row.epoch,
        "step": row.step,
        "state": row.state.to_string(),
    })
}

/// The table of the processes, a line each.
pub(crate) fn table(rows: &[MemberRow]) -> String {
    let width = rows.iter().map(|row| row.host.len()).max().unwrap_or(0).max(4);
    let mut text = String::new();
    put!(text, "seat  {:width$}  incarnation       epoch  step      state", "host");
    for row in rows {
        let MemberRow { process, host, epoch, step, state } = row;
        let epoch = epoch.map_or_else(|| "-".to_owned(), |epoch| epoch.to_string());
        let (seat, incarnation) = (process.seat.0, process.incarnation.0);
        let host = visible(host);
        put!(text, "{seat:4}  {host:width$}  {incarnation:016x}  {epoch:>5}  {step:<8}  {state}");
    }
    text
}

fn to_text(rows: &[MemberRow], drained: Option<u32>, certified: &[Process]) -> String {
    let mut text = table(rows);
    if let Some(seat) = drained {
        put!(text, "seat {seat} was asked to leave");
    }
    for process in certified {
        put!(text, "{process} is certified to have ended");
    }
    text
}
