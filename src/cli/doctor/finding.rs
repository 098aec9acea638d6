//! What a check found, and how it is shown.

use std::fmt::Write;

use serde_json::{Value, json};

/// How good it is. **Invariant:** what could not be read is [`Level::Unknown`], never
/// [`Level::Ok`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// It could not be found out.
    Unknown,
    /// It works, but slower or less surely than it could.
    Warning,
    /// It does not work.
    Problem,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// What it is about.
    pub(super) section: &'static str,
    /// What was looked at.
    pub(super) subject: String,
    pub(super) level: Level,
    /// What is so.
    pub(super) text: String,
    /// The command that mends it, or that shows more.
    pub(super) command: Option<String>,
}

/// A section's findings, as they are made.
pub(super) struct Section {
    name: &'static str,
    findings: Vec<Finding>,
}

impl Section {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, findings: Vec::new() }
    }

    pub(super) fn ok(&mut self, subject: impl Into<String>, text: impl Into<String>) {
        self.push(Level::Ok, subject.into(), text.into(), None);
    }

    pub(super) fn unknown(&mut self, subject: impl Into<String>, text: impl Into<String>, command: &str) {
        let command = (!command.is_empty()).then(|| command.to_owned());
        self.push(Level::Unknown, subject.into(), text.into(), command);
    }

    pub(super) fn warning(
        &mut self,
        subject: impl Into<String>,
        text: impl Into<String>,
        command: impl Into<String>,
    ) {
        self.push(Level::Warning, subject.into(), text.into(), Some(command.into()));
    }

    pub(super) fn problem(
        &mut self,
        subject: impl Into<String>,
        text: impl Into<String>,
        command: impl Into<String>,
    ) {
        self.push(Level::Problem, subject.into(), text.into(), Some(command.into()));
    }

    pub(super) fn push(&mut self, level: Level, subject: String, text: String, command: Option<String>) {
        self.findings.push(Finding { section: self.name, subject, level, text, command });
    }

    pub(super) fn done(self) -> Vec<Finding> {
        self.findings
    }
}

/// So many of something.
pub(super) fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// Everything that was found.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    pub(super) host: String,
    /// What pleach will move bytes by here.
    pub(super) uses: String,
    pub(super) findings: Vec<Finding>,
}

impl Report {
    pub(super) fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        let mut out =
            format!("# pleach doctor {}: {}\n# {}\n", env!("CARGO_PKG_VERSION"), self.host, self.uses);
        let width = self.findings.iter().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
        let mut section = "";
        for finding in &self.findings {
            if finding.section != section {
                section = finding.section;
                let _ = write!(out, "\n{section}\n");
            }
            let Finding { subject, level, text, .. } = finding;
            let _ = writeln!(out, "  {:<8} {subject:<width$}  {text}", level.name());
            if let Some(command) = &finding.command {
                let _ = writeln!(out, "  {:<8} {:<width$}    {command}", "", "");
            }
        }
        let [problems, warnings, unknown, ok] =
            [Level::Problem, Level::Warning, Level::Unknown, Level::Ok].map(|level| self.count(level));
        let (problems, warnings) = (counted(problems, "problem"), counted(warnings, "warning"));
        let _ = writeln!(out, "\n{problems}, {warnings}, {unknown} unknown, {ok} ok");
        out
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        let finding = |finding: &Finding| {
            let Finding { section, subject, level, text, command } = finding;
            json!({
                "section": section, "subject": subject, "level": level.name(), "text": text, "command": command
            })
        };
        json!({
            "host": self.host,
            "version": env!("CARGO_PKG_VERSION"),
            "uses": self.uses,
            "problems": self.count(Level::Problem),
            "warnings": self.count(Level::Warning),
            "unknown": self.count(Level::Unknown),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>()
        })
    }
}
