//! `pleach top`: a live job on a screen: what it does, how fast, who is late, who waits for whom.
//!
//! It asks every rank's metrics ([`scrape`]) and puts them together ([`view`]): each rank knows how late the others are, none
//! how late it is itself. Where standard output is no terminal it prints one snapshot.

use std::io::{IsTerminal, Write};

use pleach::transport::clock;
use rustix::event::poll;
use rustix::time::Timespec;

use super::CommandError;
use super::metrics::MetricsAddress;

mod scrape;
mod view;

use scrape::Snapshot;
use view::View;

/// Arguments of `pleach top`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach train --ranks 4 --epochs 1000 --metrics 9400 &\n  pleach top\n  \
    pleach top --once --json 10.0.0.1:9400 10.0.0.2:9400\n\n\
    Rates of the first screen are since the group was made, later ones since the screen before. 'last' counts calls in\n\
    which a rank came last by 10 us or more, as seen by the rank that saw most of them; 'late by' is the mean of those\n\
    who waited. Without a terminal one snapshot is printed."
)]
pub(crate) struct Arguments {
    /// Where rank 0 of each host serves its metrics; the other ranks' ports follow [default: 127.0.0.1:9400]
    #[arg(value_name = "ADDR")]
    addresses: Vec<MetricsAddress>,
    /// Print one snapshot and end
    #[arg(long)]
    once: bool,
    /// Print it as JSON, on one line
    #[arg(long, requires = "once")]
    json: bool,
    /// Time between two screens
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(50..=3_600_000))]
    interval: u32,
}

/// Goes to the first line of the terminal, and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Runs `pleach top`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let default = [MetricsAddress::default()];
    let addresses = if arguments.addresses.is_empty() { &default[..] } else { &arguments.addresses };
    let is_live = !arguments.once && std::io::stdout().is_terminal();
    let mut before: Option<Snapshot> = None;
    loop {
        let snapshot = match Snapshot::take(addresses, clock::now()) {
            Ok(snapshot) => snapshot,
            Err(_) if before.is_some() => return print("the job has ended\n"),
            Err(error) => return Err(CommandError::failed(error)),
        };
        let view = View::new(&snapshot, before.as_ref());
        if !is_live {
            return print(&if arguments.json { view.to_json() } else { view.to_string() });
        }
        print(&format!("{CLEAR}{view}"))?;
        before = Some(snapshot);
        let interval = Timespec {
            tv_sec: i64::from(arguments.interval / 1000),
            tv_nsec: i64::from(arguments.interval % 1000) * 1_000_000,
        };
        // A signal of the terminal (its size has changed) only shows the next screen early.
        let _ = poll(&mut [], Some(&interval));
    }
}

fn print(text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Who closes the pipe early has seen enough.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CommandError::failed(format!("nothing shown: standard output ({error}); give it a reader")))
        }
        _ => Ok(()),
    }
}
