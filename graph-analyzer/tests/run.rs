//! Parts of models run on ranks that are threads, over each fabric that needs no hardware.

use std::collections::HashMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_graph_analyzer::graph::Graph;
use pleach_graph_analyzer::onnx::Model;
use pleach_graph_analyzer::placement::Table;
use pleach_graph_analyzer::run::allocator::Tracer;
use pleach_graph_analyzer::run::channels::{Channel, TensorForm, signal_slots};
use pleach_graph_analyzer::run::{
    Caller, Copies, Job, Onnxruntime, RankOptions, RankReport, Regions, Rten, Runtime, Tensor, TensorRef,
    TracingAllocator, run_rank, serve_rank,
};
use pleach_graph_analyzer::{Costs, ElementType, Machine, Partition, Placement};
use pleach_transport::shm::ShmDevice;
use pleach_transport::tcp::TcpDevice;
use pleach_transport::verbs::{VerbsDevice, VerbsOptions};
use pleach_transport::{Address, Device, DeviceConfig, Event, LossCause, Rank, Responder, Secret, clock};

#[path = "../../tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "../../tests/skipped/mod.rs"]
mod skipped;

use rdma_devices::rdma_device;

#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator;

/// A process has few tracers, so that one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

const PATIENCE: Duration = Duration::from_secs(60);

struct Silent;

impl Responder for Silent {
    fn message(&self, _: Rank, _: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _: Rank, _: &LossCause) {}
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn read(name: &str) -> (Model, Graph) {
    let model = Model::decode(std::fs::read(data(name)).expect("it is checked in")).expect("it is a model");
    let graph = model.graph().expect("it has a graph").with_dims(&[]).expect("its shapes fit");
    (model, graph)
}

/// The model of a graph in text form.
fn text(text: &str) -> (Model, Graph) {
    let graph = Graph::from_text(text).expect("it is a graph").with_dims(&[]).expect("its shapes fit");
    (Model::of_graph(&graph), graph)
}

fn pipeline(graph: &Graph, ranks: u32) -> Partition {
    let costs = Costs::estimated(graph, &Machine::TYPICAL);
    let placement = Placement::pipeline(graph, ranks, &costs, None).expect("it has enough nodes");
    Partition::new(graph, &placement).expect("a pipeline has no cycle")
}

fn table(graph: &Graph, table: &str) -> Partition {
    let table = Table::parse(table).expect("it is a table");
    let placement = Placement::table(graph, &table, None).expect("it fits the graph");
    Partition::new(graph, &placement).expect("it has no cycle")
}

#[derive(Clone, Copy, PartialEq)]
enum Fabric {
    Shm,
    Tcp,
    Verbs,
}

fn device(fabric: Fabric, config: DeviceConfig) -> Box<dyn Device> {
    match fabric {
        Fabric::Shm => Box::new(ShmDevice::new(config).expect("there is shared memory")),
        Fabric::Tcp => Box::new(TcpDevice::new(config).expect("there is a loopback interface")),
        Fabric::Verbs => {
            let options = VerbsOptions { device: Some(rdma_device(config.rank)), ..VerbsOptions::default() };
            Box::new(VerbsDevice::new(config, &options).expect("there is a NIC"))
        }
    }
}

/// Connects a device to all others of the job.
fn connect(device: &mut dyn Device, addresses: &[Address]) -> Vec<Event> {
    let rank = device.info().rank;
    for (peer, address) in addresses.iter().enumerate().filter(|(peer, _)| *peer != rank as usize) {
        device.connect(peer as Rank, address).expect("it is a peer");
    }
    let (mut connected, mut others, mut events) = (1, Vec::new(), Vec::with_capacity(16));
    let end = clock::now() + PATIENCE;
    while connected < addresses.len() {
        assert!(clock::now() < end, "rank {rank} is not connected");
        device.poll(clock::now(), &mut events);
        for event in events.drain(..) {
            if matches!(event, Event::Connected { .. }) { connected += 1 } else { others.push(event) }
        }
        std::thread::yield_now();
    }
    others
}

/// A job whose model has its external weights beside the light models.
fn job<'a>(
    (model, graph, partition): (&'a Model, &'a Graph, &'a Partition),
    runtime: &'a dyn Runtime,
    random_weights: Option<u64>,
) -> Job<'a> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/light"));
    Job { model, folder, graph, partition, runtime, random_weights }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().expect("four bytes"))).collect()
}

/// Each iteration has the bits of the reference, whose sets of inputs take turns.
fn assert_outputs(outputs: &[Vec<Tensor>], reference: &[Vec<Tensor>]) {
    for (iteration, output) in outputs.iter().enumerate() {
        assert!(*output == reference[iteration % reference.len()], "iteration {iteration}");
    }
}

/// The devices of all ranks of a job, not connected.
struct World {
    channels: Vec<Channel>,
    devices: Vec<Box<dyn Device>>,
    addresses: Vec<Address>,
}

fn world(job: &Job<'_>, fabric: Fabric, depth: u32, copies: Copies) -> World {
    let channels = job.channels(&|_, _| fabric == Fabric::Shm, copies);
    let secret = Secret::fresh();
    let config = |rank| DeviceConfig {
        rank,
        world_size: job.ranks(),
        secret: Some(secret.clone()),
        signal_slots: signal_slots(&channels, depth),
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    };
    let devices: Vec<_> = (0..job.ranks()).map(|rank| device(fabric, config(rank))).collect();
    let addresses = devices.iter().map(|device| device.info().address.clone()).collect();
    World { channels, devices, addresses }
}

/// Runs a job on threads. Returns the reports, and the outputs of each iteration.
fn run(
    job: &Job<'_>,
    fabric: Fabric,
    options: RankOptions,
    inputs: &[Vec<Tensor>],
) -> (Vec<RankReport>, Vec<Vec<Tensor>>) {
    let World { channels, devices, addresses } = world(job, fabric, options.depth, options.copies);
    let (sender, outputs) = mpsc::channel();
    let reports = std::thread::scope(|scope| {
        let rank = |(rank, mut device): (usize, Box<dyn Device>)| {
            let (addresses, channels, sender) = (&addresses, channels.clone(), sender.clone());
            scope.spawn(move || {
                // rten has one thread, on which a rank works.
                let rten = Rten::new();
                let runtime: &dyn Runtime = if job.runtime.name() == "rten" { &rten } else { job.runtime };
                let job = &Job { runtime, ..*job };
                let part = job.load_part(rank as Rank).expect("the runtime takes it");
                let events = connect(&mut *device, addresses);
                let mut transport = Regions::open(device, events, channels, options.depth, PATIENCE, true)
                    .expect("there is memory");
                let mut on_outputs = |_, outputs: &[TensorRef<'_>]| {
                    let tensor = |output: &TensorRef<'_>| Tensor {
                        form: output.form.clone(),
                        bytes: output.bytes.to_vec(),
                    };
                    sender.send(outputs.iter().map(tensor).collect()).expect("somebody listens");
                };
                run_rank(job, part, &mut transport, inputs, options, &mut on_outputs).expect("the rank runs")
            })
        };
        let threads: Vec<_> = devices.into_iter().enumerate().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    });
    drop(sender);
    (reports, outputs.into_iter().collect())
}

/// Runs a job, and checks all outputs bit by bit.
fn check(
    model: &Model,
    graph: &Graph,
    partition: &Partition,
    fabric: Fabric,
    copies: Copies,
) -> Vec<RankReport> {
    check_by(&Rten::new(), model, graph, partition, fabric, copies)
}

fn check_by(
    runtime: &dyn Runtime,
    model: &Model,
    graph: &Graph,
    partition: &Partition,
    fabric: Fabric,
    copies: Copies,
) -> Vec<RankReport> {
    let job = job((model, graph, partition), runtime, Some(7));
    job.check().expect("everything can be sent");
    let options = RankOptions { iterations: 6, depth: 2, copies };
    let inputs = job.random_inputs(3, 5).expect("the shapes are known");
    let reference = job.reference(&inputs).expect("the parts run");
    assert!(reference.largest_difference < 1e-4, "{}", reference.largest_difference);
    for pair in reference.outputs.windows(2) {
        assert!(pair[0] != pair[1], "inputs that differ give outputs that differ");
    }
    let (reports, outputs) = run(&job, fabric, options, &inputs);
    assert_eq!(outputs.len(), 6);
    assert_outputs(&outputs, &reference.outputs);
    reports
}

#[test]
fn two_ranks_compute_what_one_process_does_and_copy_nothing_from_the_second_iteration_on() {
    let _turn = TURN.lock();
    let (model, graph) = read("light/light_squeezenet.onnx");
    let reports = check(&model, &graph, &pipeline(&graph, 2), Fabric::Shm, Copies::None);
    assert_eq!(reports[0].copies_first, 2, "{reports:?}");
    assert!(reports.iter().all(|report| report.copies_later == 0), "{reports:?}");
    assert!(reports[0].bytes_out > 0 && reports[0].bytes_out == reports[1].bytes_in, "{reports:?}");
    let on_heap: Vec<_> = reports.iter().map(|report| report.heap_allocations_later).collect();
    assert_eq!(on_heap, [Some(0); 2], "every buffer lies where the plan has it");
    // The second rank sends nothing, so that all its memory is the arena of the plan.
    assert!(reports[1].arena_bytes > 100_000, "{reports:?}");
    let reports = check(&model, &graph, &pipeline(&graph, 2), Fabric::Shm, Copies::Sender);
    assert_eq!((reports[0].copies_first, reports[0].copies_later), (2, 10), "{reports:?}");
}

const RESIDUAL: &str = "pleach-graph 1
graph g
opset 17
input x f32 [4, 64]
const w f32 [64, 64]
node a MatMul(x, w) -> a ? ?
node b Relu(a) -> b ? ?
node c Add(b, a) -> c ? ?
node d Add(c, x) -> d ? ?
node e Softmax(d) -> e ? ?
output e
output b
";

#[test]
fn tensors_with_several_receivers_inputs_and_outputs_of_inner_ranks_cross_over_every_fabric() {
    [Fabric::Shm, Fabric::Tcp].into_iter().for_each(send_to_several);
}

#[test]
fn a_tensor_whose_shape_is_not_known_crosses_with_its_dimensions() {
    [Fabric::Shm, Fabric::Tcp].into_iter().for_each(send_without_shape);
}

mod verbs {
    use super::Fabric;

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn tensors_with_several_receivers_inputs_and_outputs_of_inner_ranks_cross() {
        super::send_to_several(Fabric::Verbs);
    }

    #[test]
    #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
    fn a_tensor_whose_shape_is_not_known_crosses_with_its_dimensions() {
        super::send_without_shape(Fabric::Verbs);
    }
}

fn send_to_several(fabric: Fabric) {
    let _turn = TURN.lock();
    let (model, graph) = text(RESIDUAL);
    let partition = table(&graph, "a 0\nb 1\nc 2\nd 3\ne 3\n");
    let reports = check(&model, &graph, &partition, fabric, Copies::None);
    let out: Vec<u64> = reports.iter().map(|report| report.bytes_out / 6 / 1024).collect();
    // x and a, each to others; b to two; c; nothing.
    assert_eq!(out, [3, 2, 1, 0], "{reports:?}");
}

fn send_without_shape(fabric: Fabric) {
    let _turn = TURN.lock();
    let (model, graph) = text(
        "pleach-graph 1
graph g
opset 17
input x f32 [3, 40]
node a Relu(x) -> a ? ?
node n NonZero(a) -> n ? ?
node t Transpose(n) -> t ? ?
output t
",
    );
    let partition = table(&graph, "a 0\nn 0\nt 1\n");
    let reports = check_dynamic(&model, &graph, &partition, fabric);
    assert!(reports[1].bytes_in > 0, "{reports:?}");
}

/// Inputs with many zeros, so that the number of the others changes.
fn check_dynamic(model: &Model, graph: &Graph, partition: &Partition, fabric: Fabric) -> Vec<RankReport> {
    let runtime = Rten::new();
    let job = job((model, graph, partition), &runtime, None);
    let mut inputs = job.random_inputs(3, 1).expect("the shapes are known");
    for (set, tensors) in inputs.iter_mut().enumerate() {
        let zeros = 4 * 17 * (set + 1);
        tensors[0].bytes[..zeros].fill(0);
    }
    let reference = job.reference(&inputs).expect("the parts run");
    let options = RankOptions { iterations: 6, depth: 2, copies: Copies::None };
    let (reports, outputs) = run(&job, fabric, options, &inputs);
    let sizes: HashMap<usize, usize> =
        outputs.iter().enumerate().map(|(at, output)| (at, output[0].bytes.len())).collect();
    assert!(sizes[&0] > sizes[&1] && sizes[&1] > sizes[&2], "{sizes:?}");
    assert_outputs(&outputs, &reference.outputs);
    reports
}

#[test]
fn an_lrn_as_a_pool_is_the_definition_of_lrn() {
    let _turn = TURN.lock();
    let (model, graph) = text(
        "pleach-graph 1
graph g
opset 13
input x f32 [2, 7, 3, 2]
node n LRN(x) -> n ? ? { alpha = 0.5, beta = 0.75, bias = 1.5, size = 4 }
output n
",
    );
    let runtime = Rten::new();
    let partition = pipeline(&graph, 1);
    let job = job((&model, &graph, &partition), &runtime, None);
    let inputs = job.random_inputs(1, 3).expect("the shapes are known");
    let reference = job.reference(&inputs).expect("the pool runs");
    let values = |tensor: &Tensor| floats(&tensor.bytes).into_iter().map(f64::from).collect::<Vec<_>>();
    let (x, y) = (values(&inputs[0][0]), values(&reference.outputs[0][0]));
    let at = |batch: usize, channel: usize, place: usize| x[(batch * 7 + channel) * 6 + place];
    for batch in 0..2 {
        for channel in 0..7_usize {
            for place in 0..6 {
                // Of a window of four, one channel comes before.
                let window = channel.saturating_sub(1)..=(channel + 2).min(6);
                let squares: f64 = window.map(|channel| at(batch, channel, place).powi(2)).sum();
                let expected = at(batch, channel, place) / (1.5 + 0.5 / 4.0 * squares).powf(0.75);
                let found = y[(batch * 7 + channel) * 6 + place];
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
    }
}

#[test]
fn onnxruntime_writes_its_results_where_they_are_sent_from() {
    let runtime = match Onnxruntime::open(None) {
        Ok(runtime) => runtime,
        Err(error) => return skipped::skip(error),
    };
    let _turn = TURN.lock();
    let (model, graph) = read("light/light_squeezenet.onnx");
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let reports = check_by(&runtime, &model, &graph, &pipeline(&graph, 2), fabric, Copies::None);
        assert!(reports.iter().all(|report| report.copied_bytes == 0), "{reports:?}");
    }
    let reports = check_by(&runtime, &model, &graph, &pipeline(&graph, 2), Fabric::Shm, Copies::Sender);
    assert_eq!((reports[0].copies_first, reports[0].copies_later), (2, 10), "{reports:?}");
    // LRN is its own here: the rewritten one of the other runtime must be the same.
    let (model, graph) = text(
        "pleach-graph 1
graph g
opset 12
input x f32 [2, 7, 3, 2]
node n LRN(x) -> n ? ? { alpha = 0.5, beta = 0.75, bias = 1.5, size = 5 }
node s Softmax(n) -> s ? ?
output s
",
    );
    let partition = pipeline(&graph, 1);
    let outputs = [&runtime as &dyn Runtime, &Rten::new()].map(|runtime| {
        let job = job((&model, &graph, &partition), runtime, None);
        let inputs = job.random_inputs(1, 3).expect("the shapes are known");
        job.reference(&inputs).expect("it runs").outputs[0][0].bytes.clone()
    });
    let floats = outputs.map(|bytes| floats(&bytes));
    assert_eq!(floats[0].len(), 84);
    for (one, other) in floats[0].iter().zip(&floats[1]) {
        assert!((one - other).abs() < 1e-6, "{one} {other}");
    }
}

#[test]
fn weights_in_a_file_are_those_of_the_part_and_a_file_that_is_too_short_is_an_error() {
    let folder = std::env::temp_dir().join(format!("pleach-run-weights-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("there is a folder for temporary files");
    let weights: Vec<u8> = (0..12).flat_map(|number| (number as f32).to_le_bytes()).collect();
    std::fs::write(folder.join("w.bin"), &weights).expect("the folder can be written");
    let lines = "input x f32 [4]\nconst w f32 [4] in \"w.bin\" at 32\nconst v f32 [4] in \"w.bin\" at 16\n";
    let nodes = "node a Add(x, w) -> a ? ?\nnode b Mul(a, v) -> b ? ?\noutput b\n";
    let (model, graph) = text(&format!("pleach-graph 1\ngraph g\nopset 17\n{lines}{nodes}"));
    let (runtime, partition) = (Rten::new(), pipeline(&graph, 2));
    let job = Job { folder: &folder, ..job((&model, &graph, &partition), &runtime, None) };
    let inputs = job.random_inputs(1, 3).expect("the shapes are known");
    let outputs = job.reference(&inputs).expect("the parts run").outputs;
    let expected = floats(&inputs[0][0].bytes)
        .into_iter()
        .zip(4_u8..)
        .map(|(x, v)| (x + f32::from(v + 4)) * f32::from(v));
    assert_eq!(floats(&outputs[0][0].bytes), expected.collect::<Vec<_>>());
    std::fs::write(folder.join("w.bin"), &weights[..47]).expect("the folder can be written");
    let error = job.load_part(0).expect_err("the weight ends behind the file").to_string();
    std::fs::remove_dir_all(&folder).expect("it is there");
    assert!(error.starts_with("rank 0: the weight 'w' was not read from "), "{error}");
    assert!(
        error.ends_with("it has 47 bytes, not 16 from byte 32 on); put the file beside the model"),
        "{error}"
    );
}

/// The positions of numbers that are not zero, whose count changes while the job runs.
const POSITIONS: &str = "pleach-graph 1
graph g
opset 17
input x f32 [64, 64]
node n NonZero(x) -> n ? ?
node t Transpose(n) -> t ? ?
output t
";

/// Copies after the first iteration of twelve, where inputs with many zeros are those that are
/// named, of so many.
fn copies_later(inputs: u64, with_zeros: &[usize]) -> u64 {
    let (model, graph) = text(POSITIONS);
    let partition = table(&graph, "n 0\nt 1\n");
    let runtime = Rten::new();
    let job = job((&model, &graph, &partition), &runtime, None);
    let mut inputs = job.random_inputs(inputs, 1).expect("the shapes are known");
    for &set in with_zeros {
        inputs[set][0].bytes[..4096].fill(0);
    }
    let reference = job.reference(&inputs).expect("the parts run");
    let options = RankOptions { iterations: 12, depth: 2, copies: Copies::None };
    let (reports, outputs) = run(&job, Fabric::Shm, options, &inputs);
    assert_outputs(&outputs, &reference.outputs);
    reports[0].copies_later
}

#[test]
fn a_site_that_no_longer_holds_the_value_is_found_and_each_site_costs_a_copy_once() {
    let _turn = TURN.lock();
    // The first site is known when the size changes.
    assert_eq!(copies_later(4, &[3]), 1);
    // Every iteration has another size than the one before.
    assert_eq!(copies_later(2, &[1]), 1);
}

/// Allocates buffers that are full of their number, and frees them in the order of the numbers.
/// Others free some of them, and some grow.
fn program(sizes: &[usize], is_freed_elsewhere: bool) {
    let mut buffers: Vec<Vec<u8>> = Vec::new();
    for (number, &bytes) in sizes.iter().enumerate() {
        let mut buffer = if number % 2 == 0 { Vec::with_capacity(bytes) } else { vec![0; bytes] };
        assert!(black_box(&buffer).iter().all(|&byte| byte == 0), "what is zeroed is zero");
        assert_eq!(buffer.len(), if number % 2 == 0 { 0 } else { bytes });
        buffer.resize(bytes, number as u8);
        buffer.fill(number as u8);
        if number % 3 == 0 {
            buffer.resize(bytes * 2, number as u8);
        }
        buffers.push(buffer);
        if number % 4 == 3 {
            check_and_free(buffers.remove(0));
        }
    }
    if is_freed_elsewhere {
        let freeing = std::thread::spawn(move || buffers.into_iter().for_each(check_and_free));
        freeing.join().expect("nothing was overwritten");
    } else {
        buffers.into_iter().for_each(check_and_free);
    }
}

fn check_and_free(buffer: Vec<u8>) {
    assert!(buffer.iter().all(|&byte| byte == buffer[0]), "buffer {} was overwritten", buffer[0]);
}

#[test]
fn buffers_keep_their_bytes_whatever_a_program_does_and_one_that_stays_has_no_buffer_on_the_heap() {
    let _turn = TURN.lock();
    let mut tracer = Tracer::start(1).expect("the program has the allocator");
    let one = [3000, 5000, 3000, 70_000, 3000, 1 << 20, 5000, 1024, 3000, 2_000_000];
    let other = [3000, 3000, 3000, 5000, 5000, 5000, 70_000, 1 << 20, 1 << 20, 1024, 1500];
    let mut on_heap = Vec::new();
    let elsewhere = [(&one[..], true), (&other, true), (&one, true)];
    let here = [(&one[..], false), (&one, false), (&other, false), (&other, false)];
    for (iteration, (sizes, is_freed_elsewhere)) in here.into_iter().chain(elsewhere).enumerate() {
        tracer.begin(0, iteration == 0);
        program(sizes, is_freed_elsewhere);
        tracer.end(true);
        tracer.plan();
        assert!(is_freed_elsewhere || tracer.arena_bytes() > 1 << 20, "{tracer:?}");
        on_heap.push(tracer.heap_allocations());
    }
    assert_eq!(on_heap[1], 0, "{on_heap:?}");
    assert!(on_heap[2] > 0, "the program changed: {on_heap:?}");
    assert_eq!(on_heap[3], on_heap[2], "and was traced anew: {on_heap:?}");
    assert!(on_heap[4] > on_heap[3], "it changed back: {on_heap:?}");
}

/// Runs a program. Returns what went to the heap.
fn traced(tracer: &mut Tracer, is_whole: bool, sizes: &[usize]) -> u64 {
    let before = tracer.heap_allocations();
    tracer.begin(0, false);
    program(sizes, false);
    tracer.end(is_whole);
    tracer.plan();
    tracer.heap_allocations() - before
}

#[test]
fn a_program_that_changes_often_or_fails_is_planned_again_when_it_stays() {
    let _turn = TURN.lock();
    let mut tracer = Tracer::start(1).expect("the program has the allocator");
    for number in 0..20 {
        traced(&mut tracer, true, &[4000 + number * 64, 70_000]);
        traced(&mut tracer, false, &[4000 + number * 64]);
    }
    // At most as many runs again are not as planned.
    let sizes = [3000, 5000, 3000];
    let stale = (0..40).filter(|_| traced(&mut tracer, true, &sizes) > 0).count();
    assert!((1..=20).contains(&stale), "{stale}");
    // What fails changes nothing.
    for _ in 0..20 {
        assert!(traced(&mut tracer, false, &[9000]) > 0);
    }
    assert_eq!(traced(&mut tracer, true, &sizes), 0);
}

#[test]
fn values_that_live_on_keep_their_bytes_while_plans_change_and_after_the_tracer() {
    let _turn = TURN.lock();
    let mut tracer = Tracer::start(1).expect("the program has the allocator");
    let (mut kept, sizes) = (Vec::new(), [50_000, 30_000]);
    let on_heap = traced(&mut tracer, true, &sizes);
    let arena = tracer.arena_bytes();
    tracer.begin(0, false);
    kept.push(vec![1_u8; 50_000]);
    tracer.end(true);
    tracer.plan();
    assert!(on_heap > 0 && tracer.heap_allocations() == on_heap, "the value is in a place");
    // The value lies in the first arena, and the changed program has one of its own.
    assert!(traced(&mut tracer, true, &[200_000, 1_000_000]) > 0);
    assert_eq!(traced(&mut tracer, true, &[200_000, 1_000_000]), 0);
    assert!(tracer.arena_bytes() > arena + 1_000_000, "{tracer:?}");
    std::thread::spawn(move || kept.into_iter().for_each(check_and_free)).join().expect("it is whole");
    // No value holds the first arena, so that it is gone when there is a plan again.
    assert!((0..4).any(|_| traced(&mut tracer, true, &[300_000, 30_000]) == 0), "{tracer:?}");
    assert!((600_000..1_000_000).contains(&tracer.arena_bytes()), "{tracer:?}");
    // A place is in use when the tracer ends.
    let on_heap = tracer.heap_allocations();
    tracer.begin(0, false);
    let value = vec![7_u8; 300_000];
    tracer.end(true);
    assert_eq!(tracer.heap_allocations(), on_heap, "the value is in a place");
    drop(tracer);
    let mut next = Tracer::start(1).expect("there is another desk");
    assert!(traced(&mut next, true, &sizes) > 0);
    assert_eq!(traced(&mut next, true, &sizes), 0);
    assert!(value.iter().all(|&byte| byte == 7), "the value is whole");
    drop(value);
}

#[test]
fn tracers_of_two_threads_have_places_of_their_own() {
    let _turn = TURN.lock();
    let work = || {
        let mut tracer = Tracer::start(1).expect("the program has the allocator");
        let sizes = [3000, 5000, 3000, 70_000, 1 << 20];
        assert!(traced(&mut tracer, true, &sizes) > 0);
        for _ in 0..50 {
            assert_eq!(traced(&mut tracer, true, &sizes), 0);
        }
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        threads.into_iter().for_each(|thread| thread.join().expect("nothing is shared"));
    });
}

/// The outputs of an iteration of a caller, or why there are none.
type Answer = Result<Vec<Tensor>, String>;

fn refs(tensors: &[Tensor]) -> Vec<TensorRef<'_>> {
    tensors.iter().map(|tensor| TensorRef { form: &tensor.form, bytes: &tensor.bytes }).collect()
}

/// Feeds a job with each of these inputs. Returns the answers, and the most iterations that were
/// under way.
fn serve(job: &Job<'_>, fabric: Fabric, depth: u32, requests: &[Vec<Tensor>]) -> (Vec<Answer>, usize) {
    let World { channels, devices, addresses } = world(job, fabric, depth, Copies::None);
    std::thread::scope(|scope| {
        let mut devices = devices.into_iter().enumerate();
        let caller = devices.next_back();
        for (rank, mut device) in devices {
            let (addresses, channels) = (&addresses, channels.clone());
            scope.spawn(move || {
                let runtime: &dyn Runtime = &Rten::new();
                let job = &Job { runtime, ..*job };
                let part = job.load_part(rank as Rank).expect("the runtime takes it");
                let events = connect(&mut *device, addresses);
                let opened = Regions::open(device, events, channels, depth, PATIENCE, true);
                let mut regions = opened.expect("there is memory");
                let error = serve_rank(job, part, &mut regions, depth, Copies::None).to_string();
                // The end of the caller ends it, or that of another rank.
                assert!(error.contains("did not cross: rank "), "{error}");
                regions.stay_until_gone(addresses.len() as Rank - 1, PATIENCE);
            });
        }
        let (rank, mut device) = caller.expect("there is a caller");
        let part = job.load_part(rank as Rank).expect("it has constants alone");
        let events = connect(&mut *device, &addresses);
        let regions = Regions::open(device, events, channels, depth, PATIENCE, true);
        let mut caller =
            Caller::new(job, part, regions.expect("there is memory"), depth).expect("it is ready");
        let (mut next, mut under_way, mut most, mut answers) = (requests.iter(), 0, 0, Vec::new());
        while answers.len() < requests.len() {
            // First of all as many are fed as there is room for, however quick the ranks are.
            if next.len() > 0 && caller.can_feed().expect("all ranks live") {
                caller.feed(&refs(next.next().expect("there is one"))).expect("it fits");
                under_way += 1;
                most = most.max(under_way);
            } else if let Some(drained) = caller.drain().expect("all ranks live") {
                under_way -= 1;
                answers.push(drained.outputs);
            } else {
                caller.sleep(&mut || next.len() > 0);
            }
        }
        (answers, most)
    })
}

#[test]
fn a_caller_gets_what_one_process_computes_while_iterations_are_under_way() {
    let _turn = TURN.lock();
    let (model, graph) = text(RESIDUAL);
    let ranks = Table::parse("a 0\nb 1\nc 2\nd 2\ne 2\n").expect("it is a table");
    let placement = Placement::table(&graph, &ranks, None).expect("it fits the graph");
    let partition = Partition::with_caller(&graph, &placement).expect("it has no cycle");
    assert_eq!((partition.parts().len(), partition.caller()), (4, Some(3)));
    let runtime = Rten::new();
    let job = job((&model, &graph, &partition), &runtime, Some(7));
    let inputs = job.random_inputs(7, 5).expect("the shapes are known");
    let reference = job.reference(&inputs).expect("the parts run");
    for (fabric, depth) in [(Fabric::Shm, 3), (Fabric::Tcp, 2), (Fabric::Shm, 1)] {
        let (answers, most) = serve(&job, fabric, depth, &inputs);
        let outputs: Vec<_> = answers.into_iter().map(|answer| answer.expect("the parts run")).collect();
        assert_outputs(&outputs, &reference.outputs);
        assert_eq!(most, depth as usize);
    }
}

#[test]
fn a_request_whose_data_do_not_run_is_told_alone_and_types_are_those_of_the_graph() {
    let _turn = TURN.lock();
    // The ids are an output too, the weights are another one, and one output is a truth value.
    let (model, graph) = text(
        "pleach-graph 1
graph g
opset 17
input ids i64 [2]
const w f32 [8, 4]
node r Gather(w, ids) -> r ? ?
node s Relu(r) -> s ? ?
node d Add(ids, ids) -> d ? ?
node e Equal(d, ids) -> e ? ?
output s
output d
output e
output ids
output w
",
    );
    let ranks = Table::parse("r 0\n* 1\n").expect("it is a table");
    let placement = Placement::table(&graph, &ranks, None).expect("it fits the graph");
    let partition = Partition::with_caller(&graph, &placement).expect("it has no cycle");
    let runtime = Rten::new();
    let job = job((&model, &graph, &partition), &runtime, Some(7));
    let request = |ids: [i64; 2]| {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        vec![Tensor { form: TensorForm { element: ElementType::I64, dims: vec![2] }, bytes }]
    };
    let requests: Vec<_> = [[99, 1], [1, 2], [1, 99], [7, 0], [3, 3]].map(request).into();
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        let (answers, _) = serve(&job, fabric, 2, &requests);
        for number in [0, 2] {
            let error = answers[number].as_ref().expect_err("there is no row 99");
            assert!(error.starts_with("rank 0: rten does not run the part"), "{error}");
        }
        for (answer, request) in answers.iter().zip(&requests).filter(|(answer, _)| answer.is_ok()) {
            let outputs = answer.as_ref().expect("it is one");
            let types: Vec<_> = outputs.iter().map(|output| output.form.element).collect();
            let [f32, i64, bool] = [ElementType::F32, ElementType::I64, ElementType::Bool];
            assert_eq!(types, [f32, i64, bool, i64, f32]);
            assert_eq!(outputs[3], request[0], "an input that is an output comes back");
            assert_eq!(
                (outputs[1].bytes.len(), outputs[2].bytes.len(), outputs[4].bytes.len()),
                (16, 2, 128)
            );
        }
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 3);
    }
}
