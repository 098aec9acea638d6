//! `pleach top`: a live job on a screen: what it does, how fast, who is late, who waits for whom.
//!
//! It asks every rank's metrics ([`scrape`]) and puts them together ([`view`]): each rank knows how
//! late the others are, none how late it is itself. Where standard output is no terminal it prints
//! one snapshot.

use std::io::IsTerminal;

use pleach::transport::clock;
use rustix::event::poll;
use rustix::time::Timespec;

use super::CommandError;
use super::metrics::MetricsAddress;
use super::output::{print, print_json};

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
    /// Where rank 0 of each host serves its metrics; the other ranks' ports follow
    /// [default: 127.0.0.1:9400]
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

/// Where a live screen ends: the screen before was so many lines long.
#[derive(Default)]
struct Screen {
    lines: usize,
}

impl Screen {
    /// What shows this text in the place of the one before, without a blank moment between. Each
    /// line goes to its own row, so that one too many scrolls nothing away, and what is too wide is
    /// cut off at the edge.
    fn show(&mut self, text: &str) -> String {
        const CLEAR: &str = "\x1b[2J";
        const CUT: &str = "\x1b[?7l";
        const WRAP: &str = "\x1b[?7h";
        const CLEAR_REST: &str = "\x1b[K";
        let row = |row: usize| format!("\x1b[{row};1H");
        let mut shown = String::from(if self.lines == 0 { CLEAR } else { "" });
        shown += CUT;
        let lines = text.lines().count();
        for (number, line) in (1..).zip(text.lines()) {
            shown += &format!("{}{line}{CLEAR_REST}", row(number));
        }
        for number in lines + 1..=self.lines {
            shown += &format!("{}{CLEAR_REST}", row(number));
        }
        self.lines = lines;
        shown + &row(lines + 1) + WRAP
    }
}

/// Runs `pleach top`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let default = [MetricsAddress::default()];
    let addresses = if arguments.addresses.is_empty() { &default[..] } else { &arguments.addresses };
    let is_live = !arguments.once && std::io::stdout().is_terminal();
    let mut before: Option<Snapshot> = None;
    let mut screen = Screen::default();
    loop {
        let snapshot = match Snapshot::take(addresses, clock::now()) {
            Ok(snapshot) => snapshot,
            Err(_) if before.is_some() => return print("view", "the job has ended\n"),
            Err(error) => return Err(CommandError::failed(error)),
        };
        let view = View::new(&snapshot, before.as_ref());
        if !is_live {
            return if arguments.json {
                print_json("view", &view.to_json())
            } else {
                print("view", &view.to_string())
            };
        }
        print("view", &screen.show(&view.to_string()))?;
        before = Some(snapshot);
        let interval = Timespec {
            tv_sec: i64::from(arguments.interval / 1000),
            tv_nsec: i64::from(arguments.interval % 1000) * 1_000_000,
        };
        // A signal of the terminal (its size has changed) only shows the next screen early.
        let _ = poll(&mut [], Some(&interval));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a terminal of so many rows and columns shows.
    fn shown(frames: &[String], rows: usize, columns: usize) -> Vec<String> {
        let mut screen = vec![String::new(); rows];
        for frame in frames {
            for piece in frame.split("\x1b[").filter(|piece| piece.contains(";1H")) {
                let (row, text) = piece.split_once(";1H").expect("a row");
                let row: usize = row.parse().expect("a number");
                // Rows that are not there are the last one.
                screen[row.min(rows) - 1] = text.chars().take(columns).collect();
            }
            assert!(!frame.contains('\n'), "nothing may scroll: {frame:?}");
        }
        screen
    }

    #[test]
    fn a_screen_takes_the_place_of_the_one_before_line_by_line() {
        let mut screen = Screen::default();
        let frames = [screen.show("one\ntwo\nthree\n"), screen.show("four\nfive\n")];
        assert_eq!(shown(&frames[..1], 4, 80), ["one", "two", "three", ""]);
        assert_eq!(shown(&frames, 4, 80), ["four", "five", "", ""]);
        assert!(frames[0].starts_with("\x1b[2J") && !frames[1].contains("[2J"), "it is cleared once");
        assert!(frames.iter().all(|frame| frame.ends_with("\x1b[?7h")), "lines wrap again afterwards");
    }

    #[test]
    fn what_is_too_long_for_the_terminal_keeps_its_head() {
        let text: String = (0..50).map(|number| format!("line {number} and more\n")).collect();
        let frame = Screen::default().show(&text);
        let screen = shown(&[frame], 10, 6);
        assert_eq!(screen[..3], ["line 0", "line 1", "line 2"]);
    }
}
