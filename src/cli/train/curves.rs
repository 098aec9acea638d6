//! Trainings in virtual time as pictures and as numbers.

use std::path::Path;
use std::{fs, io};

use pleach_training::Reading;
use pleach_training::simulation::Observation;

use crate::cli::chart::{self, Panel};
use crate::cli::output::put;

/// One training at an instant.
#[derive(Clone, Copy, Debug)]
struct Point {
    time_s: f64,
    step: u64,
    reading: Reading,
    staleness: f64,
    wait_share: f64,
}

/// A training.
#[derive(Debug)]
pub(crate) struct Curve {
    name: String,
    points: Vec<Point>,
}

/// A quantity of the curves: its file, its name, and its value at a point.
type Quantity = (&'static str, &'static str, fn(&Point) -> f64);

const QUANTITIES: [Quantity; 4] = [
    ("loss.svg", "test loss", |point| point.reading.loss),
    ("accuracy.svg", "test accuracy", |point| point.reading.accuracy),
    ("staleness.svg", "mean staleness in steps", |point| point.staleness),
    ("wait.svg", "share of time with nothing to compute", |point| point.wait_share),
];

impl Curve {
    pub(crate) fn new(name: String) -> Self {
        Self { name, points: Vec::new() }
    }

    /// Notes where a training is.
    pub(crate) fn add(&mut self, observed: &Observation<'_>, reading: Reading) {
        let (time_s, step) = (observed.time.as_secs_f64(), observed.step);
        let (staleness, wait_share) = (observed.staleness, observed.wait_share);
        self.points.push(Point { time_s, step, reading, staleness, wait_share });
    }
}

/// Writes a picture for each quantity, and `curves.csv`, to a folder, which is made if it is not
/// there.
pub(crate) fn write(folder: &Path, title: &str, curves: &[Curve]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for (file, name, value_of) in QUANTITIES {
        fs::write(folder.join(file), picture(title, name, value_of, curves))?;
    }
    let mut table = "scheme,virtual_s,step,test_loss,test_accuracy,staleness_mean,wait_share\n".to_owned();
    for curve in curves {
        // A scheme's own commas would begin new columns.
        let name = curve.name.replace(',', ";");
        for Point { time_s, step, reading: Reading { loss, accuracy }, staleness, wait_share } in
            &curve.points
        {
            put!(table, "{name},{time_s:.6},{step},{loss:.6},{accuracy:.6},{staleness:.4},{wait_share:.6}");
        }
    }
    fs::write(folder.join("curves.csv"), table)
}

fn picture(title: &str, name: &str, value_of: fn(&Point) -> f64, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let largest =
        |of: &dyn Fn(&Point) -> f64| points().map(of).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let (last, top) = (largest(&|point| point.time_s), largest(&value_of));
    let share = |value: f64, most: f64| if most > 0.0 { value / most } else { 0.0 };
    let place = |point: &Point| {
        let value = value_of(point);
        value.is_finite().then(|| (share(point.time_s, last), 1.0 - share(value, top)))
    };
    let panel = Panel {
        caption: format!("{name} over virtual time"),
        ends: (format!("{top:.3}"), "0".to_owned()),
        last: format!("{last:.2} s"),
        lines: curves.iter().map(|curve| curve.points.iter().filter_map(place).collect()).collect(),
    };
    let names: Vec<&str> = curves.iter().map(|curve| curve.name.as_str()).collect();
    chart::picture(title, &names, &[panel])
}
