//! Who was the first to fail, and how to say it.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// A rank that did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) rank: u32,
    pub(super) process: u32,
    pub(super) status: ExitStatus,
    /// The error it printed last, in the form of this command.
    pub(super) error: Option<String>,
}

impl Failure {
    /// Of failures that were seen at the same time, the one that the others follow from: rather one
    /// that was killed than one that gave up, rather one that does not name another of them.
    pub(super) fn root(failures: &[Self]) -> Option<&Self> {
        failures.iter().min_by_key(|failure| {
            let echoes = failures.iter().any(|other| other.rank != failure.rank && failure.names(other.rank));
            (failure.status.signal().is_none(), echoes, failure.rank)
        })
    }

    fn names(&self, rank: u32) -> bool {
        let Some(error) = &self.error else { return false };
        let mut words = error.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let mut last = "";
        words.any(|word| {
            let named = (last == "rank" || last == "ranks") && word.parse() == Ok(rank);
            last = word;
            named
        })
    }

    /// Whether it was a matter of what was typed.
    pub(super) fn is_usage(&self) -> bool {
        self.status.code() == Some(2) && self.error.is_some()
    }

    /// What to tell the person.
    pub(super) fn text(&self) -> String {
        let Self { rank, process, status, error } = self;
        if let Some(number) = status.signal() {
            let (name, core) =
                (signal_name(number), if status.core_dumped() { " (core dumped)" } else { "" });
            let advice = match number {
                9 => "if nobody did that, look for 'out of memory' in dmesg",
                _ => "look at its output above",
            };
            return format!(
                "rank died: rank {rank} (process {process}) was killed by {name}{core}; {advice}"
            );
        }
        match error {
            Some(error) => format!("rank {rank} failed: {error}"),
            None => {
                let code = status.code().unwrap_or_default();
                format!(
                    "rank failed: rank {rank} (process {process}) exited with status {code}; look at its output above"
                )
            }
        }
    }
}

/// A signal's name.
pub(super) fn signal_name(number: i32) -> String {
    let names = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM",
    ];
    match usize::try_from(number - 1).ok().and_then(|place| names.get(place)) {
        Some(name) => format!("SIG{name}"),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: u32, raw: i32, error: Option<&str>) -> Failure {
        Failure {
            rank,
            process: 70 + rank,
            status: ExitStatus::from_raw(raw),
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn a_killed_rank_is_the_cause_before_those_that_gave_up() {
        let failures =
            [failure(0, 1 << 8, Some("rank 2 is lost")), failure(2, 9, None), failure(3, 1 << 8, None)];
        assert_eq!(Failure::root(&failures).expect("there is one").rank, 2);
        let text = failures[1].text();
        assert!(text.starts_with("rank died: rank 2 (process 72) was killed by SIGKILL;"), "{text}");
    }

    #[test]
    fn a_rank_that_names_another_failed_one_is_its_echo() {
        let failures = [failure(0, 1 << 8, Some("peer lost: rank 1; x")), failure(1, 3 << 8, None)];
        let root = Failure::root(&failures).expect("there is one");
        assert_eq!(root.rank, 1);
        assert!(root.text().contains("rank 1 (process 71) exited with status 3"), "{}", root.text());
        let failures = [failure(0, 1 << 8, Some("rank 11 is lost")), failure(1, 3 << 8, None)];
        assert_eq!(Failure::root(&failures).expect("there is one").rank, 0, "11 is not 1");
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((signal_name(15).as_str(), signal_name(11).as_str()), ("SIGTERM", "SIGSEGV"));
        assert_eq!((signal_name(0).as_str(), signal_name(34).as_str()), ("signal 0", "signal 34"));
    }
}
