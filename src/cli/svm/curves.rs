//! The active samples and the gap over the iterations, as a picture and as numbers.

use std::path::Path;
use std::{fs, io};

use pleach_training::svm::Progress;

use crate::cli::chart::{self, Panel};
use crate::cli::output::put;

/// Most points of a curve. When there are more, every second one goes.
const POINTS_MAX: usize = 2_000;

/// A curve in progress.
#[derive(Debug)]
pub(crate) struct Curve {
    name: String,
    /// Iterations of all pairs of classes, share of samples, gap.
    points: Vec<(u64, f64, f64)>,
    /// Iterations between two points.
    stride: u64,
    /// Iterations of the pairs that are done.
    before: u64,
    last: (usize, u64),
}

impl Curve {
    pub(crate) fn new(name: String) -> Self {
        Self { name, points: Vec::new(), stride: 1, before: 0, last: (0, 0) }
    }

    /// Notes where training is.
    pub(crate) fn add(&mut self, progress: &Progress) {
        if progress.problem != self.last.0 {
            self.before += self.last.1;
        }
        self.last = (progress.problem, progress.iterations);
        let at = self.before + progress.iterations;
        if !at.is_multiple_of(self.stride) {
            return;
        }
        self.points.push((at, progress.active as f64 / progress.samples as f64, progress.gap));
        if self.points.len() > POINTS_MAX {
            self.stride *= 2;
            self.points.retain(|(at, ..)| at.is_multiple_of(self.stride));
        }
    }
}

/// Writes `curves.svg` and `curves.csv` to a folder, which is made if it is not there.
pub(crate) fn write(folder: &Path, title: &str, curves: &[Curve]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("curves.svg"), picture(title, curves))?;
    let mut table = "shrink,iteration,active_share,gap\n".to_owned();
    for curve in curves {
        for (at, share, gap) in &curve.points {
            put!(table, "{},{at},{share:.4},{gap:e}", curve.name);
        }
    }
    fs::write(folder.join("curves.csv"), table)
}

fn picture(title: &str, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let last = points().map(|(at, ..)| *at).max().unwrap_or(1).max(1);
    let gaps = || points().map(|(.., gap)| *gap).filter(|gap| *gap > 0.0).map(f64::log10);
    let (low, high) = (gaps().fold(0.0, f64::min).floor(), gaps().fold(0.0, f64::max).ceil().max(1.0));
    let share = |point: &(u64, f64, f64)| Some(1.0 - point.1);
    let gap = |point: &(u64, f64, f64)| (point.2 > 0.0).then(|| (high - point.2.log10()) / (high - low));
    let panel = |name: &str, (upper, lower): (String, String), height_of: Height<'_>| Panel {
        caption: format!("{name} over iterations"),
        ends: (upper, lower),
        last: last.to_string(),
        lines: curves
            .iter()
            .map(|curve| {
                let place = |point: &(u64, f64, f64)| Some((point.0 as f64 / last as f64, height_of(point)?));
                curve.points.iter().filter_map(place).collect()
            })
            .collect(),
    };
    let panels = [
        panel("active samples", ("100 %".to_owned(), "0 %".to_owned()), &share),
        panel("gap", (format!("1e{high}"), format!("1e{low}")), &gap),
    ];
    let names: Vec<&str> = curves.iter().map(|curve| curve.name.as_str()).collect();
    chart::picture(title, &names, &panels)
}

/// Where a point is in a panel: 0 at the top, 1 at the bottom.
type Height<'a> = &'a dyn Fn(&(u64, f64, f64)) -> Option<f64>;
