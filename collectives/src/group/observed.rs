//! A group's counters, and what is written down of them on request: see [`crate::observe`].

use std::sync::Arc;

use pleach_transport::clock;
use pleach_transport::metrics_server::MetricsServer;
use pleach_vocabulary::Rank;

use super::{Group, GroupError, Options};
use crate::engine::StatusBoard;
use crate::observe::{HistogramMetric, Metric, MetricKind, Observations, Observe, Recorder, Report, Trace};

/// What a driver keeps of it.
pub(super) struct Observed {
    rank: Rank,
    observations: Arc<Observations>,
    board: Arc<StatusBoard>,
    recorder: Recorder,
    /// Here and not in the group: a forked child leaves its driver alone, and the server's thread
    /// is not there to be joined.
    _server: Option<MetricsServer>,
}

fn report(observations: &Observations, board: &StatusBoard) -> Report {
    observations.report(board.under_way(), board.waits_for(), clock::now())
}

impl Observed {
    pub(super) fn new(
        options: &Options,
        board: &Arc<StatusBoard>,
        rank: Rank,
        ranks: u32,
    ) -> Result<Self, GroupError> {
        let Observe { flight_recorder, trace, metrics, part } = &options.observe;
        let trace = match trace {
            Some(path) => Some(
                Trace::new(path, rank, part.as_ref())
                    .map_err(|source| GroupError::Trace { path: path.clone(), source })?,
            ),
            None => None,
        };
        let observations = Arc::new(Observations::new(rank, ranks, clock::now(), trace));
        let server = match *metrics {
            Some(mut address) => {
                let offset = options.world.local_rank.unwrap_or(rank);
                if address.port() > 0 {
                    let port = u32::from(address.port()).saturating_add(offset);
                    address.set_port(u16::try_from(port).map_err(|_| GroupError::Port { port })?);
                }
                let (seen, of) = (observations.clone(), board.clone());
                let text = move || report(&seen, &of).to_prometheus() + &seen.program().to_prometheus(rank);
                let server = MetricsServer::start(address, text)
                    .map_err(|source| GroupError::Metrics { address, source })?;
                tracing::info!(rank, "metrics at http://{}/metrics", server.address());
                Some(server)
            }
            None => None,
        };
        Ok(Self {
            rank,
            observations,
            board: board.clone(),
            recorder: Recorder::new(flight_recorder.clone()),
            _server: server,
        })
    }

    pub(super) fn observations(&self) -> &Arc<Observations> {
        &self.observations
    }

    /// A call has returned that the group has failed.
    pub(super) fn failed(&self) {
        self.recorder.write(self.rank, &self.observations, || self.board.last_calls());
    }

    pub(super) fn report(&self) -> Report {
        report(&self.observations, &self.board)
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.observations.write_trace();
    }
}

impl Group {
    /// What this rank knows of its group: calls, times, who is late and by how much, who is waited
    /// for now. Local, and from any thread: it waits for nobody, also while calls are under way.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.driver.report()
    }

    /// A number of the program that is served among the group's metrics, as `pleach_` and its name,
    /// once it was set. A name has one number, which each call with that name returns. `name` has
    /// letters, digits and underscores, and is none of the group's own; `help` is one line.
    #[must_use]
    pub fn metric(&self, name: &'static str, kind: MetricKind, help: &'static str) -> Metric {
        self.shared.driver.observations().program().metric(name, kind, help)
    }

    /// A histogram of the program that is served as [`Group::metric`] says, once a bin was set. A
    /// bin holds what is more than the bound before and at most its own; one more bin holds the
    /// rest. `bounds` grow, and are the same in each call with a name.
    #[must_use]
    pub fn histogram_metric(
        &self,
        name: &'static str,
        bounds: &'static [u64],
        help: &'static str,
    ) -> HistogramMetric {
        self.shared.driver.observations().program().histogram(name, bounds, help)
    }
}
