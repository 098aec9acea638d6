//! Curves as a picture: panels one below the other, with the same curves in each.

use crate::cli::output::{escaped, put};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 200.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 70.0;
/// Between two panels, and below the last.
const BELOW: f64 = 56.0;
/// Names of curves in a row.
const NAMES_A_ROW: usize = 5;
const COLOURS: [&str; 9] =
    ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#4d2d00", "#57606a", "#1b7c83", "#cf222e"];
const STYLE: &str = "\
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.rail{stroke:#d1d9e0;fill:none}\
text{font-family:Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}\
.title{font-size:16px;font-weight:600}.end{text-anchor:end}\
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}.rail{stroke:#3d444d}}";

/// One quantity of all curves.
#[derive(Debug)]
pub(crate) struct Panel {
    /// The quantity, and what it is drawn over.
    pub(crate) caption: String,
    /// The values at the top and at the bottom.
    pub(crate) ends: (String, String),
    /// The value at the right.
    pub(crate) last: String,
    /// By curve: points from 0 to 1, to the right and downwards.
    pub(crate) lines: Vec<Vec<(f64, f64)>>,
}

/// The whole picture, of curves with these names.
pub(crate) fn picture(title: &str, names: &[&str], panels: &[Panel]) -> String {
    picture_with_discs(title, names, panels, &[])
}

/// By curve: points of a panel that are drawn as discs.
pub(crate) type Discs = Vec<Vec<(f64, f64)>>;

/// The same with discs in each panel.
pub(crate) fn picture_with_discs(title: &str, names: &[&str], panels: &[Panel], discs: &[Discs]) -> String {
    let (width, height) = (LEFT + WIDTH + 24.0, TOP + panels.len() as f64 * (HEIGHT + BELOW));
    let mut out = String::new();
    put!(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\">");
    put!(out, "<style>{STYLE}</style><rect class=\"paper\" width=\"100%\" height=\"100%\"/>");
    put!(out, "<text class=\"ink title\" x=\"{LEFT}\" y=\"26\">{}</text>", escaped(title));
    for (number, (name, colour)) in names.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let (row, place) = (number / NAMES_A_ROW, number % NAMES_A_ROW);
        let (x, y) = (LEFT + 130.0 * place as f64, 46.0 + 16.0 * row as f64);
        put!(out, "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{}</text>", escaped(name));
    }
    for (number, panel) in panels.iter().enumerate() {
        let discs = discs.get(number).map_or(&[][..], Vec::as_slice);
        panel.draw(&mut out, TOP + number as f64 * (HEIGHT + BELOW), discs);
    }
    put!(out, "</svg>");
    out
}

impl Panel {
    fn draw(&self, out: &mut String, top: f64, discs: &[Vec<(f64, f64)>]) {
        let Self { caption, ends: (upper, lower), last, lines } = self;
        let bottom = top + HEIGHT;
        put!(out, "<rect class=\"rail\" x=\"{LEFT}\" y=\"{top}\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>");
        put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{}\">{upper}</text>", LEFT - 6.0, top + 10.0);
        put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{bottom}\">{lower}</text>", LEFT - 6.0);
        put!(out, "<text class=\"soft\" x=\"{LEFT}\" y=\"{}\">{}</text>", bottom + 18.0, escaped(caption));
        put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{}\">{last}</text>", LEFT + WIDTH, bottom + 18.0);
        for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
            let point = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", LEFT + x * WIDTH, top + y * HEIGHT);
            let points: Vec<String> = line.iter().map(point).collect();
            put!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                points.join(" ")
            );
        }
        for (points, colour) in discs.iter().zip(COLOURS.iter().cycle()) {
            for (x, y) in points {
                let (x, y) = (LEFT + x * WIDTH, top + y * HEIGHT);
                put!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
        }
    }
}
