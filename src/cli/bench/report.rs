//! Rows as people read them (the columns of nccl-tests) and as programs do.

use std::io::Write;
use std::time::Duration;

use pleach::Collective;
use serde_json::json;

use super::{CommandError, Measured, Task};
use crate::cli::output::rounded;

/// Prints rows of one fabric as they come.
pub(super) struct Report<'a> {
    task: &'a Task,
    fabric: &'a str,
    as_json: bool,
    note: String,
    topology: Option<&'a str>,
}

impl<'a> Report<'a> {
    pub(super) fn new(task: &'a Task, fabric: &'a str, as_json: bool) -> Self {
        Self { task, fabric, as_json, note: String::new(), topology: None }
    }

    /// With more said about the fabric.
    pub(super) fn noting(self, note: impl Into<String>) -> Self {
        Self { note: note.into(), ..self }
    }

    /// Over the links of this topology: rows say how near they come to the bound.
    pub(super) fn over(self, topology: &'a str) -> Self {
        Self { topology: Some(topology), ..self }
    }

    /// What all rows have in common, and the names of the columns.
    pub(super) fn head(&mut self) -> Result<(), CommandError> {
        if self.as_json {
            return Ok(());
        }
        let (collective, fabric, ranks) = (self.task.collective, self.fabric, self.task.ranks);
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let note = &self.note;
        let more = if self.topology.is_some() { ["of bound", "predicted", "(%)", "(us)"] } else { [""; 4] };
        let more = |one: usize| match more[one] {
            "" => String::new(),
            _ => format!(" {:>9} {:>12}", more[one], more[one + 1]),
        };
        let (names, units) = (more(0), more(2));
        print(&format!(
            "# pleach bench {collective}: fabric {fabric}{note}, {ranks} ranks, host {host}\n\
             #{:>11} {:>11} {:>5} {:>4} {:>20} {:>12} {:>12} {:>9} {:>9} {:>7}{names}\n\
             #{:>11} {:>11} {:>5} {:>4} {:>20} {:>12} {:>12} {:>9} {:>9} {:>7}{units}\n",
            "bytes",
            "count",
            "dtype",
            "op",
            "algorithm",
            "time p50",
            "time p99",
            "algbw",
            "busbw",
            "errors",
            "(B)",
            "(elements)",
            "",
            "",
            "",
            "(us)",
            "(us)",
            "(GB/s)",
            "(GB/s)",
            "",
        ))
    }

    pub(super) fn row(&mut self, measured: &Measured) -> Result<(), CommandError> {
        let Task { collective, data_type, op, ranks, .. } = self.task;
        let Measured { algorithm, count, samples, errors, over_links } = measured;
        let op = if collective.reduces() { op.name() } else { "none" };
        let bytes = self.task.whole_bytes(*count);
        let mut sorted = samples.clone();
        sorted.sort_unstable();
        let (median, late) = (percentile(&sorted, 50), percentile(&sorted, 99));
        let algorithm_bandwidth = if bytes == 0 { 0.0 } else { bytes as f64 / median.as_secs_f64() / 1e9 };
        let bus_bandwidth = algorithm_bandwidth * bus_factor(*collective, *ranks);
        let (median, late) = (micros(median), micros(late));
        let bound = over_links.and_then(|over| over.bound_bytes_per_s).filter(|_| bytes > 0);
        let of_bound = bound.map(|bound| algorithm_bandwidth * 1e9 / bound);
        if self.as_json {
            let collective = collective.name();
            let mut row = json!({
                "collective": collective,
                "fabric": self.fabric,
                "algorithm": algorithm,
                "dtype": data_type.name(),
                "op": op,
                "ranks": ranks,
                "bytes": bytes,
                "time_us_p50": rounded(median, 3),
                "time_us_p99": rounded(late, 3),
                "algbw_gb_s": rounded(algorithm_bandwidth, 6),
                "busbw_gb_s": rounded(bus_bandwidth, 6),
                "errors": errors
            });
            if let (Some(topology), Some(over)) = (self.topology, over_links) {
                row["topology"] = topology.into();
                row["bound_gb_s"] = bound.map(|bound| rounded(bound / 1e9, 6)).into();
                row["of_bound"] = of_bound.map(|part| rounded(part, 6)).into();
                row["predicted_us"] = rounded(over.predicted_s * 1e6, 3).into();
            }
            return print(&format!("{row}\n"));
        }
        let more = over_links.map_or(String::new(), |over| {
            let part = of_bound.map_or("-".to_owned(), |part| format!("{:.2}", part * 100.0));
            format!(" {part:>9} {:>12.2}", over.predicted_s * 1e6)
        });
        print(&format!(
            " {bytes:>11} {count:>11} {:>5} {op:>4} {algorithm:>20} {median:>12.2} {late:>12.2} \
             {algorithm_bandwidth:>9.3} {bus_bandwidth:>9.3} {errors:>7}{more}\n",
            data_type.name()
        ))
    }
}

/// Bytes over the busiest link for each byte of the size, as nccl-tests has it.
fn bus_factor(collective: Collective, ranks: u32) -> f64 {
    let ranks = f64::from(ranks);
    match collective {
        Collective::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Gather { .. }
        | Collective::Scatter { .. }
        | Collective::AllToAll => (ranks - 1.0) / ranks,
        _ => 1.0,
    }
}

/// The smallest sample that so many per cent are not above.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let place = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(place).copied().unwrap_or_default()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn print(text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_and_one_sample_is_all_of_them() {
        let sorted: Vec<_> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!(percentile(&sorted, 50), Duration::from_micros(100));
        assert_eq!(percentile(&sorted, 99), Duration::from_micros(198));
        assert_eq!(percentile(&sorted[..1], 50), percentile(&sorted[..1], 99));
    }

    #[test]
    fn bus_bandwidth_has_the_factors_of_nccl_tests() {
        assert_eq!(bus_factor(Collective::AllReduce, 4), 1.5);
        assert_eq!(bus_factor(Collective::AllGather, 4), 0.75);
        assert_eq!(bus_factor(Collective::ReduceScatter, 2), 0.5);
        assert_eq!(bus_factor(Collective::Gather { root: 0 }, 4), 0.75);
        assert_eq!(bus_factor(Collective::Scatter { root: 0 }, 4), 0.75);
        assert_eq!(bus_factor(Collective::AllToAll, 4), 0.75);
        assert_eq!(bus_factor(Collective::Broadcast { root: 0 }, 4), 1.0);
        assert_eq!(bus_factor(Collective::AllReduce, 1), 0.0);
    }
}
