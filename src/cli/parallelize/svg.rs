//! A picture of plans: the speed-up over ranks, and the time of each layer on most ranks.

use pleach_training::parallelize::{LayerPlan, Plan};

use super::Outlook;
use super::report::design_in_words;
use crate::cli::output::{escaped, put};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 70.0;
/// Width and height of the speed-up's chart.
const CHART: (f64, f64) = (660.0, 300.0);
const TOP: f64 = 84.0;
/// Height of a layer's bars.
const ROW: f64 = 16.0;
/// Where bars begin.
const BARS_LEFT: f64 = 180.0;
/// Most layers that are drawn: those that take longest.
const LAYERS_DRAWN_MAX: usize = 60;

const PREDICTED: &str = "#0969da";
const BOUND: &str = "#8250df";
const PAPER: &str = "#bc4c00";
const COMPUTING: &str = "#4ac26b";
const HIDDEN: &str = "#54aeff";
const LATE: &str = "#cf222e";

const STYLE: &str = "\
.paper{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#59636e}.rail{stroke:#d1d9e0;fill:none}\
text{font-family:Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;font-size:12px}\
.title{font-size:16px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}\
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}.rail{stroke:#3d444d}}";

/// The whole picture.
pub(crate) fn picture(outlook: &Outlook) -> String {
    let mut body = String::new();
    let title = format!(
        "{} on {}, {} images a minibatch",
        outlook.network.name(),
        outlook.machine.name(),
        outlook.batch
    );
    put!(body, "<text class=\"ink title\" x=\"24\" y=\"30\">{}</text>", escaped(&title));
    if let Some(words) = design_in_words(outlook) {
        put!(body, "<text class=\"soft\" x=\"24\" y=\"50\">{}</text>", escaped(&words));
    }
    chart(&mut body, outlook);
    let height = bars(&mut body, outlook, TOP + CHART.1 + 80.0) + 20.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
        escaped(&title)
    )
}

/// Speed-up over ranks, both by powers of two.
fn chart(out: &mut String, outlook: &Outlook) {
    let mut plans: Vec<&Plan> = outlook.plans.iter().collect();
    plans.sort_by_key(|plan| plan.ranks());
    let most = f64::from(outlook.largest().ranks()).max(2.0).log2();
    let place = |ranks: f64, speedup: f64| {
        let share = |value: f64| (value.log2() / most).clamp(0.0, 1.0);
        (LEFT + share(ranks) * CHART.0, TOP + (1.0 - share(speedup)) * CHART.1)
    };
    let (width, height) = CHART;
    put!(out, "<rect class=\"rail\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{width}\" height=\"{height}\"/>");
    for power in 0..=most as u32 {
        let ranks = f64::from(1_u32 << power);
        let (x, y) = place(ranks, ranks);
        put!(out, "<text class=\"soft mid\" x=\"{x:.1}\" y=\"{:.1}\">{ranks}</text>", TOP + height + 18.0);
        put!(out, "<text class=\"soft end\" x=\"{:.1}\" y=\"{:.1}\">{ranks}</text>", LEFT - 6.0, y + 4.0);
    }
    put!(
        out,
        "<text class=\"soft end\" x=\"{}\" y=\"{}\">speed-up over ranks</text>",
        LEFT + width,
        TOP + height + 36.0
    );
    let line = |out: &mut String, colour: &str, of: &dyn Fn(&Plan) -> f64| {
        let points: Vec<String> = plans
            .iter()
            .map(|plan| {
                let (x, y) = place(f64::from(plan.ranks()), of(plan));
                format!("{x:.1},{y:.1}")
            })
            .collect();
        let points = points.join(" ");
        put!(out, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
    };
    let (start, end) = (place(1.0, 1.0), place(most.exp2(), most.exp2()));
    put!(
        out,
        "<line class=\"rail\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke-dasharray=\"4 4\"/>",
        start.0,
        start.1,
        end.0,
        end.1
    );
    line(out, BOUND, &Plan::bound);
    line(out, PREDICTED, &Plan::speedup);
    let mut legend = vec![(PREDICTED, "predicted"), (BOUND, "bound: software costs nothing")];
    for plan in &plans {
        let Some(paper) = plan.paper() else { continue };
        let (x, y) = place(f64::from(plan.ranks()), paper);
        put!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"{PAPER}\"/>");
        put!(out, "<text class=\"ink end\" x=\"{:.1}\" y=\"{:.1}\">{paper}</text>", x - 8.0, y + 4.0);
        legend = vec![legend[0], legend[1], (PAPER, "paper")];
    }
    legend_row(out, TOP - 12.0, &legend);
}

fn legend_row(out: &mut String, y: f64, entries: &[(&str, &str)]) {
    let mut x = LEFT;
    for (colour, words) in entries {
        put!(out, "<rect x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>", y - 9.0);
        put!(out, "<text class=\"ink\" x=\"{}\" y=\"{y}\">{words}</text>", x + 15.0);
        x += 34.0 + 6.6 * words.len() as f64;
    }
}

/// The time of each layer on most ranks; returns where the bars end.
fn bars(out: &mut String, outlook: &Outlook, top: f64) -> f64 {
    let plan = outlook.largest();
    let time_s = |split: &LayerPlan| split.computing_s() + split.exposed_s() + split.overlapped_s();
    let mut drawn: Vec<usize> = (0..plan.layers().len()).collect();
    drawn.sort_by(|&one, &other| time_s(&plan.layers()[other]).total_cmp(&time_s(&plan.layers()[one])));
    drawn.truncate(LAYERS_DRAWN_MAX);
    drawn.sort_unstable();
    let longest = plan.layers().iter().map(time_s).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - BARS_LEFT - 30.0) / longest;
    put!(
        out,
        "<text class=\"ink\" x=\"{LEFT}\" y=\"{top}\">layers on {} ranks; the longest takes {:.3} ms</text>",
        plan.ranks(),
        longest * 1e3
    );
    legend_row(
        out,
        top + 20.0,
        &[
            (COMPUTING, "computing"),
            (PAPER, "activations"),
            (HIDDEN, "weights, hidden"),
            (LATE, "weights, late"),
        ],
    );
    let mut y = top + 30.0;
    for number in drawn {
        let (layer, split) = (&outlook.network.layers()[number], &plan.layers()[number]);
        let name: String = layer.name().chars().take(14).collect();
        let label = escaped(&format!("{name} {}", split.split()));
        put!(out, "<text class=\"soft end\" x=\"{}\" y=\"{:.1}\">{label}</text>", BARS_LEFT - 6.0, y + 12.0);
        let mut x = BARS_LEFT;
        let late_s = split.overlapped_s() - split.hidden_s();
        for (colour, part_s) in [
            (COMPUTING, split.computing_s()),
            (PAPER, split.exposed_s()),
            (HIDDEN, split.hidden_s()),
            (LATE, late_s),
        ] {
            let width = part_s * scale;
            if width > 0.0 {
                put!(
                    out,
                    "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{}\" fill=\"{colour}\"/>",
                    y + 2.0,
                    ROW - 4.0
                );
            }
            x += width;
        }
        y += ROW;
    }
    y
}
