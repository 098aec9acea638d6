//! A progress bar on standard error. A rank also shows it if its launcher passes its lines on to a
//! terminal.

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use super::launch::TERMINAL_VARIABLE;

/// Columns that the bar may take: those of a terminal behind the launcher are not known here.
const COLUMNS: u16 = 79;

/// Draws a second: each draw is a line for the launcher.
const DRAWS_PER_S: u8 = 10;

/// A progress bar of `steps`. Only rank 0 (`is_first`) shows one, and only on a terminal.
pub(crate) fn bar(what: &'static str, steps: u64, is_first: bool) -> ProgressBar {
    let target = if !is_first {
        ProgressDrawTarget::hidden()
    } else if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(DRAWS_PER_S)
    } else if std::env::var_os(TERMINAL_VARIABLE).is_some() {
        ProgressDrawTarget::term_like_with_hz(Box::new(PipedTerminal), DRAWS_PER_S)
    } else {
        ProgressDrawTarget::hidden()
    };
    let style =
        ProgressStyle::with_template("{prefix} [{bar:40}] {pos}/{len} {msg} {eta}").expect("is a template");
    ProgressBar::with_draw_target(Some(steps), target)
        .with_prefix(what)
        .with_style(style.progress_chars("=> "))
}

/// A terminal of one line behind a pipe. The launcher at the other end passes on text up to each
/// carriage return.
#[derive(Debug)]
struct PipedTerminal;

impl PipedTerminal {
    fn write(text: &str) -> io::Result<()> {
        io::stderr().write_all(text.as_bytes())
    }
}

impl TermLike for PipedTerminal {
    fn width(&self) -> u16 {
        COLUMNS
    }

    fn move_cursor_up(&self, _lines: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _lines: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _columns: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _columns: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        Self::write(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        Self::write(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        Self::write("\x1b[2K\r")
    }

    fn flush(&self) -> io::Result<()> {
        Self::write("\r")
    }
}
