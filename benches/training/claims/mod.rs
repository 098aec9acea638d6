//! The claims of the papers whose training schemes are here, each as an experiment.
//!
//! An experiment plans, trains simulated ranks with real gradients in virtual time, or counts the
//! bytes of real ranks, and says whether it found the claim. All of that is the same on any
//! machine. Experiments of several seeds take medians; the learning rate of a scheme is the one of
//! the least loss on a fifth of the images to learn from.
//!
//! **Invariant:** a verdict follows from the numbers that are printed beside it.

#![allow(dead_code)] // Tests run the short ones, the bench all.

pub(crate) mod barriers;
pub(crate) mod blink;
pub(crate) mod das;
#[path = "../../../src/cli/digits.rs"]
mod digits;
pub(crate) mod hybrid;
pub(crate) mod images;
pub(crate) mod jin;
#[path = "../../../training/tests/quadratic/mod.rs"]
mod quadratic;
pub(crate) mod quality;
#[path = "../../../collectives/tests/ranks/mod.rs"]
pub(crate) mod ranks;
#[path = "../../report/mod.rs"]
pub(crate) mod report;
pub(crate) mod staleness;
pub(crate) mod world;
pub(crate) mod zhang;

use std::fmt::Write as _;
use std::ops::Range;

use images::Data;

/// What experiments have: images, and how often they are repeated.
pub(crate) struct Material {
    digits: Data,
    /// Pooled to 14×14 pixels.
    mnist: Result<Data, String>,
    seeds: Vec<u64>,
    is_short: bool,
}

impl Material {
    /// Whole experiments, with all that the acceptance names. `mnist` is the reason where there is
    /// no MNIST.
    pub(crate) fn new(digits: Data, mnist: Result<Data, String>, seeds: Vec<u64>) -> Self {
        Self { digits, mnist, seeds, is_short: false }
    }

    /// The built-in digits.
    pub(crate) fn digits(&self) -> &Data {
        &self.digits
    }

    /// MNIST, or why it is not there.
    pub(crate) fn mnist(&self) -> Result<&Data, &str> {
        self.mnist.as_ref().map_err(String::as_str)
    }

    /// Each of them makes a training.
    pub(crate) fn seeds(&self) -> &[u64] {
        &self.seeds
    }

    /// A part of each experiment, with the digits in the place of MNIST: for tests.
    pub(crate) fn short(self) -> Self {
        Self { is_short: true, ..self }
    }

    pub(crate) fn is_short(&self) -> bool {
        self.is_short
    }

    /// The values that an experiment compares; in the short form those at these places.
    pub(crate) fn some<'a, T>(&self, all: &'a [T], short: Range<usize>) -> &'a [T] {
        if self.is_short { &all[short] } else { all }
    }

    /// Steps of an experiment, or of its short form.
    pub(crate) fn steps(&self, whole: u64, short: u64) -> u64 {
        if self.is_short { short } else { whole }
    }

    /// The images of an experiment on MNIST; or why they are not there.
    pub(crate) fn images(&self) -> Result<&Data, &str> {
        if self.is_short { Ok(&self.digits) } else { self.mnist() }
    }
}

/// What an experiment found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The claim.
    Found,
    /// Not the claim.
    NotFound {
        /// Why not.
        because: String,
    },
    /// Nothing.
    NotMeasured {
        /// Why not.
        because: String,
    },
}

impl Verdict {
    /// The claim if it holds; `because` says why it does not.
    pub(crate) fn of(holds: bool, because: &str) -> Self {
        if holds { Self::Found } else { Self::NotFound { because: because.to_owned() } }
    }
}

/// A claim and what came of it.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    /// The paper's first author or the scheme, and a word.
    pub(crate) name: &'static str,
    /// As the paper says it.
    pub(crate) claim: &'static str,
    pub(crate) experiment: String,
    pub(crate) acceptance: &'static str,
    /// The numbers that the acceptance speaks of.
    pub(crate) found: String,
    pub(crate) verdict: Verdict,
    /// All numbers, as a table in Markdown; empty if `found` has them.
    pub(crate) table: String,
}

impl Claim {
    /// A claim that nothing was measured for.
    pub(crate) fn not_measured(
        name: &'static str,
        claim: &'static str,
        acceptance: &'static str,
        because: &str,
    ) -> Self {
        let verdict = Verdict::NotMeasured { because: because.to_owned() };
        let (experiment, found, table) = ("none".to_owned(), "nothing".to_owned(), String::new());
        Self { name, claim, experiment, acceptance, found, verdict, table }
    }

    /// The verdict in words.
    pub(crate) fn verdict_text(&self) -> String {
        match &self.verdict {
            Verdict::Found => "found".to_owned(),
            Verdict::NotFound { because } => format!("**not found**, because {because}"),
            Verdict::NotMeasured { because } => format!("not measured: {because}"),
        }
    }

    /// A row of a table in Markdown.
    pub(crate) fn row(&self) -> String {
        let Self { name, claim, experiment, acceptance, found, .. } = self;
        format!("| {name} | {claim} | {experiment} | {acceptance} | {found} | {} |\n", self.verdict_text())
    }

    /// For a terminal.
    pub(crate) fn text(&self) -> String {
        let Self { name, claim, experiment, acceptance, found, table, .. } = self;
        let mut out = format!("\n## {name}\n\n");
        for (what, text) in
            [("claim", *claim), ("experiment", experiment), ("acceptance", acceptance), ("found", found)]
        {
            let _ = writeln!(out, "{what:<11}{text}");
        }
        let _ = writeln!(out, "{:<11}{}", "verdict", self.verdict_text());
        if !table.is_empty() {
            let _ = write!(out, "\n{table}");
        }
        out
    }
}

/// An experiment: its name, and what it does.
pub(crate) type Experiment = (&'static str, fn(&Material) -> Result<Claim, String>);

/// All experiments, in the order of the page.
pub(crate) const EXPERIMENTS: [Experiment; 19] = [
    (das::SPEEDUPS, das::speedups),
    (das::ORDER, das::first_layers_first),
    (hybrid::HYBRID, hybrid::fewest_bytes),
    (zhang::STABILITY, zhang::stability),
    (zhang::DOWNPOUR, zhang::beside_downpour),
    (quality::PENG, quality::grid_keeps_quality),
    (jin::CROSSING, jin::crossing),
    (jin::LOST, jin::lost_rank),
    (barriers::OPTIMAL, barriers::zipline_is_optimal),
    (barriers::WAITING, barriers::waiting),
    (barriers::LOSS, barriers::final_loss),
    (barriers::CREDITS, barriers::credits),
    (staleness::THROUGHPUT, staleness::throughput),
    (staleness::REGRET, staleness::regret),
    (staleness::SWEEP, staleness::sweep),
    (quality::DILOCO_BYTES, quality::outer_steps_save_bytes),
    (quality::DILOCO, quality::outer_steps_keep_quality),
    (quality::EAGER, quality::majority_keeps_accuracy),
    (blink::SHORTER, blink::shorter_steps),
];

/// The middle of the values, of which there is one at least.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    report::median(values.into_iter().collect::<Vec<_>>())
}

/// A head of a table in Markdown: the columns, all but the first with numbers.
pub(crate) fn head(columns: &[&str]) -> String {
    format!("| {} |\n|--|{}\n", columns.join(" | "), "--:|".repeat(columns.len() - 1))
}
