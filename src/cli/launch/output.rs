//! Whole lines out of pieces: what ranks print is passed on line by line, each line in one piece.

/// Longest line that is kept together, in bytes.
pub(super) const LINE_BYTES_MAX: usize = 64 * 1024;

/// What precedes errors in the form of this command.
const ERROR: &[u8] = b"error: ";

/// How lines are passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// With the rank in front: `[3] line`.
    Prefixed,
    /// As they are; a carriage return (a progress bar) ends a line too.
    Plain,
}

/// One rank's stream, cut into lines.
#[derive(Debug)]
pub(super) struct Lines {
    prefix: Vec<u8>,
    output: Output,
    /// Whether a line in the form of an error is kept back while it is the last one.
    keeps_errors: bool,
    partial: Vec<u8>,
    kept: Option<Vec<u8>>,
}

impl Lines {
    pub(super) fn new(rank: u32, output: Output, keeps_errors: bool) -> Self {
        let prefix = match output {
            Output::Prefixed => format!("[{rank}] ").into_bytes(),
            Output::Plain => Vec::new(),
        };
        Self { prefix, output, keeps_errors, partial: Vec::new(), kept: None }
    }

    /// Takes what the rank wrote; appends the lines that are whole now to `out`.
    pub(super) fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let room = LINE_BYTES_MAX - self.partial.len();
            let piece = &bytes[..bytes.len().min(room)];
            let end = piece.iter().position(|&byte| self.ends_line(byte));
            let taken = end.map_or(piece.len(), |end| end + 1);
            self.partial.extend_from_slice(&piece[..taken]);
            bytes = &bytes[taken..];
            if end.is_some() || self.partial.len() == LINE_BYTES_MAX {
                self.emit(out);
            }
        }
    }

    /// The stream has ended: what is left is a line too.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.partial.is_empty() {
            self.emit(out);
        }
    }

    /// Passes on the error that was kept back.
    pub(super) fn release(&mut self, out: &mut Vec<u8>) {
        if let Some(line) = self.kept.take() {
            out.extend_from_slice(&self.prefix);
            out.extend_from_slice(&line);
        }
    }

    /// Whether an error is kept back.
    pub(super) fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// Takes the error that was kept back, without what precedes it.
    pub(super) fn take_error(&mut self) -> Option<String> {
        let line = self.kept.take()?;
        Some(String::from_utf8_lossy(line[ERROR.len()..].trim_ascii()).into_owned())
    }

    fn ends_line(&self, byte: u8) -> bool {
        byte == b'\n' || (byte == b'\r' && self.output == Output::Plain)
    }

    fn emit(&mut self, out: &mut Vec<u8>) {
        let mut line = std::mem::take(&mut self.partial);
        if !line.last().is_some_and(|&byte| self.ends_line(byte)) {
            line.push(b'\n');
        }
        self.release(out);
        if self.keeps_errors && line.starts_with(ERROR) {
            self.kept = Some(line);
        } else {
            out.extend_from_slice(&self.prefix);
            out.append(&mut line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lines: &mut Lines, pieces: &[&str]) -> String {
        let mut out = Vec::new();
        for piece in pieces {
            lines.push(piece.as_bytes(), &mut out);
        }
        String::from_utf8(out).expect("is text")
    }

    #[test]
    fn pieces_become_whole_lines_with_the_rank_in_front() {
        let mut lines = Lines::new(3, Output::Prefixed, false);
        assert_eq!(shown(&mut lines, &["a", "b\nc\n\nd"]), "[3] ab\n[3] c\n[3] \n");
        let mut out = Vec::new();
        lines.finish(&mut out);
        lines.finish(&mut out);
        assert_eq!(out, b"[3] d\n");
    }

    #[test]
    fn a_line_without_end_is_cut_at_the_limit() {
        let mut lines = Lines::new(0, Output::Prefixed, false);
        let text = shown(&mut lines, &["x".repeat(LINE_BYTES_MAX + 5).as_str(), "\n"]);
        let lengths: Vec<_> = text.lines().map(str::len).collect();
        assert_eq!(lengths, [LINE_BYTES_MAX + 4, 9]);
    }

    #[test]
    fn an_error_is_kept_back_only_while_it_is_the_last_line() {
        let mut lines = Lines::new(1, Output::Prefixed, true);
        assert_eq!(shown(&mut lines, &["hello\nerror: no luck: here; try again\n"]), "[1] hello\n");
        assert_eq!(shown(&mut lines, &["more\n"]), "[1] error: no luck: here; try again\n[1] more\n");
        assert_eq!(shown(&mut lines, &["error: the last\n"]), "");
        assert!(lines.keeps());
        assert_eq!(lines.take_error().as_deref(), Some("the last"));
        assert!(!lines.keeps());
    }

    #[test]
    fn plain_lines_are_as_they_were_and_a_progress_bar_moves() {
        let mut lines = Lines::new(1, Output::Plain, false);
        assert_eq!(shown(&mut lines, &["10%\r20", "%\rdone\n"]), "10%\r20%\rdone\n");
    }
}
