//! A group's counters, and what is written down of them on request: see [`crate::observe`].

use std::sync::{Arc, Mutex};

use pleach_transport::clock;
use pleach_transport::metrics_server::MetricsServer;
use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;

use super::{Group, GroupError, Options};
use crate::engine::StatusBoard;
use crate::observe::{HistogramMetric, Metric, MetricKind, Observations, Observe, Recorder, Report, Trace};

/// What a driver keeps of it.
pub(super) struct Observed {
    served: ServedMetrics,
    recorder: Recorder,
    /// Here and not in the group: a forked child leaves its driver alone, and the server's thread
    /// is not there to be joined.
    _server: Option<MetricsServer>,
}

fn report(observations: &Observations, board: &StatusBoard) -> Report {
    observations.report(board.under_way(), board.waits_for(), clock::now())
}

/// Serves a text where the options say, if they do. The process is this rank of those of its host,
/// unless its launcher says another one.
fn serve(
    options: &Options,
    rank: Rank,
    text: impl Fn() -> String + Send + 'static,
) -> Result<Option<MetricsServer>, GroupError> {
    let Some(mut address) = options.observe.metrics else { return Ok(None) };
    if address.port() > 0 {
        let offset = options.world.local_rank.unwrap_or(rank);
        let port = u32::from(address.port()).saturating_add(offset);
        address.set_port(u16::try_from(port).map_err(|_| GroupError::Port { port })?);
    }
    let server = MetricsServer::start(address, text);
    let server = server.map_err(|source| GroupError::Metrics { address, source })?;
    tracing::info!(rank, "metrics at http://{}/metrics", server.address());
    Ok(Some(server))
}

/// What is served of a group.
#[derive(Clone)]
struct ServedMetrics {
    rank: Rank,
    observations: Arc<Observations>,
    board: Arc<StatusBoard>,
}

impl ServedMetrics {
    fn text(&self) -> String {
        let Self { rank, observations, board } = self;
        report(observations, board).to_prometheus() + &observations.program().to_prometheus(*rank)
    }
}

/// The metrics of a session: those of the group of its newest epoch, at one address in all epochs.
/// A group that the program still has would keep the port from the next one.
pub(super) struct SessionMetrics {
    newest: Arc<Mutex<Option<ServedMetrics>>>,
    _server: MetricsServer,
}

impl SessionMetrics {
    /// Serves where the options say, if they do; no metrics before the first epoch.
    pub(super) fn start(options: &Options) -> Result<Option<Self>, GroupError> {
        let newest = Arc::new(Mutex::new(None));
        let shown = newest.clone();
        let text = move || lock(&shown).as_ref().map_or_else(String::new, ServedMetrics::text);
        let server = serve(options, options.world.rank, text)?;
        Ok(server.map(|server| Self { newest, _server: server }))
    }

    /// This group is of a new epoch.
    pub(super) fn show(&self, group: &Group) {
        *lock(&self.newest) = Some(group.shared.driver.observed().served.clone());
    }
}

impl Observed {
    pub(super) fn new(
        options: &Options,
        board: &Arc<StatusBoard>,
        rank: Rank,
        ranks: u32,
    ) -> Result<Self, GroupError> {
        let Observe { flight_recorder, trace, part, .. } = &options.observe;
        let trace = match trace {
            Some(path) => Some(
                Trace::new(path, rank, part.as_ref())
                    .map_err(|source| GroupError::Trace { path: path.clone(), source })?,
            ),
            None => None,
        };
        let observations = Arc::new(Observations::new(rank, ranks, clock::now(), trace));
        let served = ServedMetrics { rank, observations, board: board.clone() };
        let text = served.clone();
        let server = serve(options, rank, move || text.text())?;
        Ok(Self { served, recorder: Recorder::new(flight_recorder.clone()), _server: server })
    }

    pub(super) fn observations(&self) -> &Arc<Observations> {
        &self.served.observations
    }

    /// A call has returned that the group has failed.
    pub(super) fn failed(&self) {
        let ServedMetrics { rank, observations, board } = &self.served;
        self.recorder.write(*rank, observations, || board.last_calls());
    }

    fn report(&self) -> Report {
        report(&self.served.observations, &self.served.board)
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.served.observations.write_trace();
    }
}

impl Group {
    /// What this rank knows of its group: calls, times, who is late and by how much, who is waited
    /// for now. Local, and from any thread: it waits for nobody, also while calls are under way.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.driver.observed().report()
    }

    /// A number of the program that is served among the group's metrics, as `pleach_` and its name,
    /// once it was set. A name has one number, which each call with that name returns. `name` has
    /// letters, digits and underscores, and is none of the group's own; `help` is one line.
    #[must_use]
    pub fn metric(&self, name: &'static str, kind: MetricKind, help: &'static str) -> Metric {
        self.shared.driver.observed().observations().program().metric(name, kind, help)
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
        self.shared.driver.observed().observations().program().histogram(name, bounds, help)
    }
}
