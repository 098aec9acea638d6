//! A picture of an outlook: time and part of the bound over ranks, for the largest size. Curves are
//! the cost model, discs are plans in virtual time.

use super::{Outlook, Point};
use crate::cli::bench::Size;
use crate::cli::chart::{self, Panel};

/// The name of the curve of what the bound allows.
const BOUND: &str = "bound";

/// The whole picture.
pub(crate) fn picture(outlook: &Outlook) -> String {
    let question = &outlook.question;
    let size = question.sizes.last().copied().unwrap_or(0);
    let points: Vec<&Point> = outlook.points.iter().filter(|point| point.size == size).collect();
    let mut names: Vec<&str> = Vec::new();
    for point in &points {
        if !names.contains(&point.family) {
            names.push(point.family);
        }
    }
    names.push(BOUND);
    let title = format!(
        "{} of {} on {}: curves by the cost model, discs by plans in virtual time",
        question.collective,
        Size(size),
        question.links
    );
    let (first, last) = ends(points.iter().map(|point| f64::from(point.ranks)));
    let x = |point: &Point| share(f64::from(point.ranks), first, last);
    let times = points.iter().flat_map(|point| {
        [Some(point.model.as_secs_f64()), Some(point.time().as_secs_f64()), point.bound_s()]
    });
    let (least, most) = ends(times.flatten().filter(|time| *time > 0.0));
    let y = |time: f64| 1.0 - share(time, least, most);
    let of_bound = |point: &Point, time: f64| point.bound_s().map(|bound| 1.0 - (bound / time).min(1.0));
    let model = |point: &Point| point.model.as_secs_f64();
    let simulated = |point: &Point| point.simulated.as_ref().ok().map(|(time, _)| time.as_secs_f64());
    let panels = [
        Panel {
            caption: format!("time over ranks, {first} to {last}, both by powers of two"),
            ends: (format!("{:.3} ms", most * 1e3), format!("{:.3} ms", least * 1e3)),
            last: last.to_string(),
            lines: curves(&names, &points, &|point| Some((x(point), y(model(point)))), &|point| {
                Some((x(point), y(point.bound_s()?)))
            }),
        },
        Panel {
            caption: "part of the bound that is reached over ranks".to_owned(),
            ends: ("100 %".to_owned(), "0 %".to_owned()),
            last: last.to_string(),
            lines: curves(
                &names,
                &points,
                &|point| Some((x(point), of_bound(point, model(point))?)),
                &|_| None,
            ),
        },
    ];
    let discs = [
        curves(&names, &points, &|point| Some((x(point), y(simulated(point)?))), &|_| None),
        curves(&names, &points, &|point| Some((x(point), of_bound(point, simulated(point)?)?)), &|_| None),
    ];
    chart::picture_with_discs(&title, &names, &panels, &discs)
}

/// Where a point is in a panel.
type Place<'a> = &'a dyn Fn(&Point) -> Option<(f64, f64)>;

/// By name: the places of its points, or of the bound. Of several algorithms of a name the quickest
/// counts.
fn curves(names: &[&str], points: &[&Point], of: Place<'_>, of_bound: Place<'_>) -> Vec<Vec<(f64, f64)>> {
    let of_name = |name: &&str| {
        let mut found: Vec<(u32, f64, (f64, f64))> = points
            .iter()
            .filter(|point| *name == BOUND || point.family == *name)
            .filter_map(|point| {
                let place = if *name == BOUND { of_bound(point) } else { of(point) };
                Some((point.ranks, point.model.as_secs_f64(), place?))
            })
            .collect();
        found.sort_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
        found.dedup_by_key(|(ranks, ..)| *ranks);
        found.into_iter().map(|(.., place)| place).collect()
    };
    names.iter().map(of_name).collect()
}

/// The least and the most of some values.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, most) =
        values.fold((f64::INFINITY, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
    if least.is_finite() { (least, most) } else { (1.0, 1.0) }
}

/// Where a value is between two others, by powers of two.
fn share(value: f64, least: f64, most: f64) -> f64 {
    if most > least { ((value / least).log2() / (most / least).log2()).clamp(0.0, 1.0) } else { 0.5 }
}
