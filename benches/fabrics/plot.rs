//! Times over sizes as a picture: one panel a row, both axes logarithmic.

use std::fmt::Write as _;

use crate::results::Results;
use crate::rows::{Mpi, Row, Runner};
use crate::table::size;

const PANEL_WIDTH: f64 = 440.0;
const PANEL_HEIGHT: f64 = 340.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 56.0;
const BELOW: f64 = 48.0;
/// Between the end of a line and its name.
const NAME_GAP: f64 = 6.0;
/// Room for names beside a panel, and between two names.
const NAME_WIDTH: f64 = 84.0;
const NAME_HEIGHT: f64 = 14.0;

/// The whole picture.
pub(crate) fn svg(rows: &[&Row], results: &Results) -> String {
    let panel = LEFT + PANEL_WIDTH + NAME_WIDTH;
    let (width, height) = (panel * rows.len() as f64, TOP + PANEL_HEIGHT + BELOW);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (row, place) in rows.iter().zip(0..) {
        let left = LEFT + panel * f64::from(place);
        let _ = writeln!(text, "<g transform=\"translate({left} {TOP})\">");
        Panel::new(row, results).draw(&mut text);
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

/// A row's picture; places are in its own units, from its upper left corner.
struct Panel<'a> {
    row: &'a Row,
    results: &'a Results,
    /// Powers of two of bytes, of ten of us.
    bytes: (f64, f64),
    time: (f64, f64),
}

impl<'a> Panel<'a> {
    fn new(row: &'a Row, results: &'a Results) -> Self {
        let sizes = row.sizes.iter().map(|bytes| (*bytes as f64).log2());
        let bytes = sizes.fold((f64::MAX, f64::MIN), |(least, most), one| (least.min(one), most.max(one)));
        let mut time = (f64::MAX, f64::MIN);
        for (_, points) in lines(row, results) {
            for (_, median) in points {
                time = (time.0.min(median.log10().floor()), time.1.max(median.log10().ceil()));
            }
        }
        Self { row, results, bytes, time }
    }

    fn x(&self, bytes: u64) -> f64 {
        ((bytes as f64).log2() - self.bytes.0) / (self.bytes.1 - self.bytes.0).max(1.0) * PANEL_WIDTH
    }

    fn y(&self, time: f64) -> f64 {
        (self.time.1 - time.log10()) / (self.time.1 - self.time.0).max(1.0) * PANEL_HEIGHT
    }

    fn draw(&self, text: &mut String) {
        let title = self.row.title.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(text, "<text x=\"0\" y=\"-34\" font-weight=\"bold\">{title}</text>");
        let _ = writeln!(
            text,
            "<text x=\"0\" y=\"-14\" fill=\"#555555\">time of one, in us; lower is better</text>"
        );
        self.draw_axes(text);
        let mut names: Vec<(f64, Runner)> = Vec::new();
        for (runner, points) in lines(self.row, self.results) {
            let (color, width) =
                (color(runner), if matches!(runner, Runner::Pleach { .. }) { 3.0 } else { 1.5 });
            let dashes = if matches!(runner, Runner::ByHand | Runner::SliceByHand) {
                " stroke-dasharray=\"5 4\""
            } else {
                ""
            };
            let places =
                points.iter().map(|(bytes, time)| format!("{:.1},{:.1}", self.x(*bytes), self.y(*time)));
            let places: Vec<_> = places.collect();
            let _ = writeln!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\"{dashes}/>",
                places.join(" ")
            );
            for (bytes, time) in &points {
                let (x, y) = (self.x(*bytes), self.y(*time));
                let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
            }
            names.extend(points.last().map(|(_, time)| (self.y(*time), runner)));
        }
        self.draw_names(text, names);
    }

    /// Each at the end of its line, as far as they do not cover each other.
    fn draw_names(&self, text: &mut String, mut names: Vec<(f64, Runner)>) {
        names.sort_by(|left, right| left.0.total_cmp(&right.0));
        let mut free = f64::MIN;
        for (y, runner) in names {
            let y = y.max(free);
            free = y + NAME_HEIGHT;
            let (x, y, color, name) = (PANEL_WIDTH + NAME_GAP, y + 4.0, color(runner), runner.name());
            let _ = writeln!(text, "<text x=\"{x}\" y=\"{y:.1}\" fill=\"{color}\">{name}</text>");
        }
    }

    fn draw_axes(&self, text: &mut String) {
        for exponent in self.time.0 as i32..=self.time.1 as i32 {
            let time = 10_f64.powi(exponent);
            let y = self.y(time);
            let _ = writeln!(
                text,
                "<line x1=\"0\" y1=\"{y:.1}\" x2=\"{PANEL_WIDTH}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
                 <text x=\"-8\" y=\"{:.1}\" text-anchor=\"end\">{time}</text>",
                y + 4.0
            );
        }
        for bytes in &self.row.sizes {
            let x = self.x(*bytes);
            let _ = writeln!(
                text,
                "<line x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{PANEL_HEIGHT}\" stroke=\"#eeeeee\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" font-size=\"10\">{}</text>",
                PANEL_HEIGHT + 18.0,
                size(*bytes)
            );
        }
    }
}

/// What each runner reached.
fn lines(row: &Row, results: &Results) -> Vec<(Runner, Vec<(u64, f64)>)> {
    let point = |runner, bytes: u64| Some((bytes, results.median_us(row, runner, bytes)?));
    let line =
        |runner: &Runner| (*runner, row.sizes.iter().filter_map(|bytes| point(*runner, *bytes)).collect());
    row.runners.iter().map(line).collect()
}

fn color(runner: Runner) -> &'static str {
    match runner {
        Runner::Pleach { .. } | Runner::Signal => "#0b7a3b",
        Runner::Mpi(Mpi::Open) => "#c0392b",
        Runner::Mpi(Mpi::Open5) => "#e08283",
        Runner::Mpi(Mpi::Mpich) => "#d98200",
        Runner::Mpi(Mpi::Mpich5) => "#e6b35a",
        Runner::Mpi(Mpi::Intel) => "#2471a3",
        Runner::Gloo => "#7d3cad",
        Runner::ByHand | Runner::SliceByHand => "#555555",
    }
}
