//! The ranks of a served model, and the server in front of them.

use std::fmt::Display;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _};
use std::time::Duration;

use pleach::exchange::grpc::Layer;
use pleach::exchange::grpc::inference::{self, InferenceService};
use pleach::exchange::{Endpoint, EndpointOptions};
use pleach::graph::run::{Caller, Job, Part, Regions, serve_rank};
use pleach::transport::Rank;
use pleach::transport::rendezvous::Joined;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::super::job::{
    JobArguments, Loaded, PATIENCE, TransferChoice, join_ranks, open_regions, slots, wrong,
};
use super::Arguments;
use super::model::{Served, interface, requests};
use crate::cli::CommandError;
use crate::cli::launch::{has_secret_of_job, rank_or_launch};
use crate::cli::output::{print, visible};

/// How long a rank waits for a request. The caller's own patience bounds an iteration, and a rank
/// learns at once that the caller has ended.
const IDLE: Duration = Duration::from_secs(u32::MAX as u64);

/// How long a rank that failed stays, so that the caller sees the rank that was the first.
const LINGER: Duration = Duration::from_secs(2);

/// How long the last answers may take when a rank is gone.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Threads for clients.
const THREADS: usize = 2;

/// Bytes that a client may send before they are read: of a request, and of a connection.
const STREAM_WINDOW: u32 = 16 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// The most calls of a connection at a time; a client waits with further ones.
const CALLS_MAX: u32 = 256;

/// Runs `pleach graph serve`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let of_job = &arguments.job;
    if matches!(of_job.transfer, TransferChoice::Grpc | TransferChoice::GrpcFabric) {
        let text =
            "nothing is served: --transfer grpc and grpc-fabric are for 'graph run'; take zero-copy or copy";
        return Err(CommandError::typed(text));
    }
    let addresses = addresses(&arguments.listen)?;
    let loaded = Loaded::read(of_job, true)?;
    let job = loaded.job(of_job);
    job.check().map_err(|error| wrong(of_job, &error))?;
    let stem = of_job.model.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = arguments.name.clone().or(stem).unwrap_or_default();
    let interface = interface(job.graph, name, job.runtime.name()).map_err(|error| wrong(of_job, &error))?;
    let ranks = job.ranks();
    let Some(world) = rank_or_launch(&of_job.world, Some(ranks), ranks, None)? else { return Ok(()) };
    let rank = world.rank;
    let caller = ranks - 1;
    // What is taken or refused is said before ranks wait for each other.
    let listener = (rank == caller).then(|| listen(arguments, &addresses)).transpose()?;
    let endpoint = (rank == caller).then(|| endpoint(arguments)).transpose()?;
    let part = job.load_part(rank).map_err(|error| wrong(of_job, &error))?;
    let joined = join_ranks(of_job, &job, &world, slots(of_job, &job), &[])?;
    // The store is rank 0's, and others may still ask it.
    let Joined { device, events, ranks_a_processor, store: _store, .. } = joined;
    let patience = if rank == caller { PATIENCE } else { IDLE };
    let regions =
        open_regions(of_job, &job, (device, events), patience, ranks_a_processor[rank as usize] > 1);
    let regions = regions.map_err(|error| ended(rank, &error))?;
    let (Some(listener), Some(endpoint)) = (listener, endpoint) else {
        return Err(compute(of_job, &job, part, regions, rank));
    };
    let mut caller = Caller::new(&job, part, regions, of_job.depth).map_err(|error| ended(rank, &error))?;
    let (served, requests) = requests(job.graph, interface, caller.waker());
    let service = InferenceService::new(served, arguments.allow_client_shm);
    let front = Front::open(listener, &endpoint, service);
    let front = front.map_err(|error| CommandError::failed(format!("nothing is served: {error}")))?;
    print("address", &format!("listening on {}\n", front.address))?;
    let text = requests.carry(&mut caller);
    front.end();
    Err(CommandError::failed(format!("serving ended: {}", visible(&text))))
}

/// Computes until the caller or another rank is gone.
fn compute(
    arguments: &JobArguments,
    job: &Job<'_>,
    part: Part,
    mut regions: Regions,
    rank: Rank,
) -> CommandError {
    let caller = job.ranks() - 1;
    let error = serve_rank(job, part, &mut regions, arguments.depth, arguments.transfer.copies());
    regions.stay_until_gone(caller, LINGER);
    ended(rank, &error)
}

fn ended(rank: Rank, error: &dyn Display) -> CommandError {
    CommandError::failed(format!("serving ended: rank {rank}, {}", visible(&error.to_string())))
}

fn addresses(listen: &str) -> Result<Vec<SocketAddr>, CommandError> {
    let wrong = |reason: &dyn Display| {
        let shown = visible(listen);
        CommandError::typed(format!(
            "no address: --listen {shown} ({reason}); write HOST:PORT, such as 127.0.0.1:8001"
        ))
    };
    let found: Vec<SocketAddr> = listen.to_socket_addrs().map_err(|error| wrong(&error))?.collect();
    if found.is_empty() { Err(wrong(&"it has no address")) } else { Ok(found) }
}

fn listen(arguments: &Arguments, addresses: &[SocketAddr]) -> Result<TcpListener, CommandError> {
    let listener = TcpListener::bind(addresses);
    let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listener.map_err(|error| {
        let listen = &arguments.listen;
        CommandError::failed(format!(
            "not listening: {listen} ({error}); end what listens there, or take port 0"
        ))
    })
}

/// The end of the exchange: by it, inputs and outputs go by reference to clients of pleach.
fn endpoint(arguments: &Arguments) -> Result<Endpoint, CommandError> {
    let mut options = EndpointOptions::from_env().map_err(CommandError::usage)?;
    if has_secret_of_job() {
        options.secret = None;
    }
    if let Some(address) = arguments.metrics {
        options.metrics = Some(address.0);
    }
    Endpoint::open(&options).map_err(CommandError::usage)
}

/// The server, and its threads.
struct Front {
    runtime: Runtime,
    address: SocketAddr,
    health: HealthReporter,
    end: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Front {
    fn open(
        listener: TcpListener,
        endpoint: &Endpoint,
        service: InferenceService<Served>,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
        let listener = {
            let _in_runtime = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (end, ended) = oneshot::channel::<()>();
        let (health, health_service) = tonic_health::server::health_reporter();
        runtime.block_on(health.set_serving::<InferenceService<Served>>());
        let server = Server::builder()
            .layer(Layer::new(endpoint))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(CALLS_MAX)
            .add_service(health_service)
            .add_service(service);
        let ended = async { drop(ended.await) };
        let serving = runtime.spawn(server.serve_with_incoming_shutdown(incoming, ended));
        Ok(Self { runtime, address, health, end, serving })
    }

    /// Ends once the last answers are sent.
    fn end(self) {
        self.runtime.block_on(async {
            for service in ["", inference::SERVICE] {
                self.health.set_service_status(service, ServingStatus::NotServing).await;
            }
        });
        drop(self.end);
        let serving = self.serving;
        // A client that does not take its answer in time loses it.
        let _ = self.runtime.block_on(async { tokio::time::timeout(LAST_ANSWERS, serving).await });
        self.runtime.shutdown_background();
    }
}
