//! The active samples and the gap over the iterations, as a picture and as numbers.

use std::path::Path;
use std::{fs, io};

use pleach_training::svm::Progress;

use crate::cli::output::{escaped, put};

/// Most points of a curve. When there are more, every second one goes.
const POINTS_MAX: usize = 2_000;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 70.0;
/// Between the pictures, and below the second.
const BELOW: f64 = 56.0;
const COLOURS: [&str; 6] = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#4d2d00"];
const STYLE: &str = "\
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.rail{stroke:#d1d9e0;fill:none}\
text{font-family:Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}\
.title{font-size:16px;font-weight:600}.end{text-anchor:end}\
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}.rail{stroke:#3d444d}}";

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
    let (width, height) = (LEFT + WIDTH + 24.0, TOP + 2.0 * (HEIGHT + BELOW));
    let mut out = String::new();
    put!(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\">");
    put!(out, "<style>{STYLE}</style><rect class=\"paper\" width=\"100%\" height=\"100%\"/>");
    put!(out, "<text class=\"ink title\" x=\"{LEFT}\" y=\"26\">{}</text>", escaped(title));
    for (number, (curve, colour)) in curves.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let x = LEFT + 130.0 * number as f64;
        put!(out, "<text x=\"{x}\" y=\"48\" fill=\"{colour}\">{}</text>", escaped(&curve.name));
    }
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let last = points().map(|(at, ..)| *at).max().unwrap_or(1).max(1) as f64;
    let gaps = || points().map(|(.., gap)| *gap).filter(|gap| *gap > 0.0).map(f64::log10);
    let (low, high) = (gaps().fold(0.0, f64::min).floor(), gaps().fold(0.0, f64::max).ceil().max(1.0));
    let share = |point: &(u64, f64, f64)| Some(1.0 - point.1);
    let gap = |point: &(u64, f64, f64)| (point.2 > 0.0).then(|| (high - point.2.log10()) / (high - low));
    panel(&mut out, TOP, "active samples", ("100 %", "0 %"), (last, curves), share);
    let ends = (format!("1e{high}"), format!("1e{low}"));
    panel(&mut out, TOP + HEIGHT + BELOW, "gap", (&ends.0, &ends.1), (last, curves), gap);
    put!(out, "</svg>");
    out
}

/// One quantity of all curves; `height_of` is 0 at the top and 1 at the bottom.
fn panel(
    out: &mut String,
    top: f64,
    name: &str,
    (upper, lower): (&str, &str),
    (last, curves): (f64, &[Curve]),
    height_of: impl Fn(&(u64, f64, f64)) -> Option<f64>,
) {
    let bottom = top + HEIGHT;
    put!(out, "<rect class=\"rail\" x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>");
    put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{}\">{upper}</text>", LEFT - 6.0, top + 10.0);
    put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{bottom}\">{lower}</text>", LEFT - 6.0);
    put!(out, "<text class=\"soft\" x=\"{LEFT}\" y=\"{}\">{name} over iterations</text>", bottom + 18.0);
    put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{}\">{last}</text>", LEFT + WIDTH, bottom + 18.0);
    for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let points: Vec<String> = curve
            .points
            .iter()
            .filter_map(|point| {
                let (x, y) = (LEFT + point.0 as f64 / last * WIDTH, top + height_of(point)? * HEIGHT);
                Some(format!("{x:.1},{y:.1}"))
            })
            .collect();
        put!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            points.join(" ")
        );
    }
}
