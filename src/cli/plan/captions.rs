//! The words in a picture.

use super::outcome::{Plan, number};
use super::words;

/// What it is.
pub(super) fn title(plan: &Plan) -> String {
    let rate = words::rate(number(plan.packing.rate));
    let how = if plan.packing.is_optimal() { "optimal" } else { plan.strategy.name() };
    format!("{} over {}: {rate}, {how}", plan.packing.collective, plan.source)
}

/// Why nothing is faster.
pub(super) fn sentence(plan: &Plan) -> String {
    let reason = words::reason(&plan.topology, &plan.packing);
    let sum = if reason.sum.is_empty() { String::new() } else { format!(": {}", reason.sum) };
    let verdict = words::verdict(&plan.packing);
    let verdict =
        if plan.packing.is_optimal() { "No forwarding schedule can be faster" } else { verdict.as_str() };
    format!("{verdict}: {}{sum}.", reason.sentence)
}

/// What nodes are called in the picture: without what all names begin with, where that leaves
/// something.
pub(super) fn labels(plan: &Plan) -> Vec<String> {
    let nodes = plan.topology.nodes();
    let longest = nodes.iter().map(|node| node.name.chars().count()).max().unwrap_or(0);
    let short = |name: &str| match name.rsplit_once(['.', '/', ':']) {
        Some((_, last)) if longest > 6 && !last.is_empty() => last.to_owned(),
        _ => name.to_owned(),
    };
    let cut = |name: String| {
        if name.chars().count() <= 14 {
            name
        } else {
            format!("{}…", name.chars().take(13).collect::<String>())
        }
    };
    nodes.iter().map(|node| cut(short(&node.name))).collect()
}

/// Words in lines of at most so many pixels.
pub(super) fn wrapped(text: &str, width: f64) -> Vec<String> {
    let letters = (width / 6.4) as usize;
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].chars().count() + 1 + word.chars().count() > letters {
            lines.push(word.to_owned());
        } else {
            let gap = if lines[last].is_empty() { "" } else { " " };
            lines[last].push_str(gap);
            lines[last].push_str(word);
        }
    }
    lines
}

/// As text of XML.
pub(super) fn escaped(text: &str) -> String {
    let visible = |character: char| if character.is_control() { ' ' } else { character };
    let text: String = text.chars().map(visible).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
