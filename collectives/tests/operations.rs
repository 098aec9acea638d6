//! No holes: every collective, in every way, memory, form and level of reproducibility, gives what
//! the oracle says, or the one error that says why it cannot. What cannot even be written down is a
//! compile error: an all-to-all in place has no constructor, and a call that borrows cannot be
//! started (see the documentation of `Operation` and `Group::start`).
//!
//! GPU memory is that of the fake driver, as in `gpu_memory`.

#[path = "../../transport/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "operations/oracle.rs"]
mod oracle;
mod ranks;
#[path = "operations/raw.rs"]
mod raw;

use std::sync::Arc;

use pleach_collectives::{
    Buffer, CollectiveError, Data, DataMut, GpuBuffer, Group, NotExact, Operation, OwnedData, Pending,
    Reproducible,
};
use pleach_transport::Space;
use pleach_transport::cuda::{Gpu, Stream};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::{Collective, ReduceOp};

use oracle::{Expected, FACTORS, RANKS, ROOT, check, counts, expected};
use ranks::with_group;

const GPU: Space = Space::Gpu { ordinal: 0 };

/// Where a call's data are, and how the result comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    InPlace,
    Apart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Run,
    Start,
    Prepare,
    PrepareAndStart,
    Batch,
    StartBatch,
}

const WAYS: [Way; 6] =
    [Way::Run, Way::Start, Way::Prepare, Way::PrepareAndStart, Way::Batch, Way::StartBatch];

/// A row of the table.
#[derive(Clone, Debug)]
struct Case {
    collective: Collective,
    op: ReduceOp,
    form: Form,
    /// Elements of every rank's block, or of the vector.
    counts: Vec<usize>,
    is_uneven: bool,
}

/// All that can be written down.
fn cases(rank: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for collective in Collective::ALL.map(|collective| collective.with_root(ROOT)) {
        let ops = match collective {
            Collective::AllReduce | Collective::Reduce { .. } | Collective::ReduceScatter => {
                vec![
                    ReduceOp::Sum,
                    ReduceOp::Avg,
                    ReduceOp::Max,
                    ReduceOp::premul_sum(FACTORS[rank as usize]),
                ]
            }
            _ => vec![ReduceOp::Sum],
        };
        let is_of_blocks = collective.parts(RANKS) > 1;
        for op in ops {
            for form in [Form::InPlace, Form::Apart] {
                // There is no such constructor: what goes to a rank and what comes from it would
                // lie at the same place. A message has one memory.
                let is_none = match collective {
                    Collective::AllToAll => form == Form::InPlace,
                    Collective::SendRecv { .. } | Collective::Barrier => form == Form::Apart,
                    _ => false,
                };
                for (count, is_uneven) in [(7, false), (3000, false), (7, true), (3000, true)] {
                    if !is_none && (is_of_blocks || !is_uneven) {
                        let counts = counts(count, is_uneven);
                        cases.push(Case { collective, op, form, counts, is_uneven });
                    }
                }
            }
        }
    }
    cases
}

impl Case {
    /// The call on one memory; a message goes from rank 0 to rank 1.
    fn in_place<D: DataMut<Element = f32>>(&self, group: &Group, data: D) -> Operation<D> {
        let (op, root) = (self.op, ROOT);
        let operation = match self.collective {
            Collective::AllReduce => Operation::all_reduce(data, op),
            Collective::Reduce { .. } => Operation::reduce(data, op, root),
            Collective::Broadcast { .. } => Operation::broadcast(data, root),
            Collective::AllGather => Operation::all_gather_in_place(data),
            Collective::ReduceScatter => Operation::reduce_scatter_in_place(data, op),
            Collective::Gather { .. } => Operation::gather_in_place(data, root),
            Collective::Scatter { .. } => Operation::scatter_in_place(data, root),
            Collective::SendRecv { to, .. } if group.rank() == 0 => Operation::send(data, to),
            Collective::SendRecv { from, .. } => Operation::recv(data, from),
            other => panic!("{other} has no such form"),
        };
        if self.is_uneven { operation.with_counts(&self.counts) } else { operation }
    }

    /// The call on two.
    fn apart<I, O>(&self, group: &Group, input: I, output: O) -> Operation<(I, O)>
    where
        I: Data<Element = f32>,
        O: DataMut<Element = f32>,
    {
        let (op, root) = (self.op, ROOT);
        let operation = match self.collective {
            Collective::AllReduce => Operation::all_reduce_into(input, output, op),
            Collective::Reduce { .. } => Operation::reduce_into(input, output, op, root),
            Collective::Broadcast { .. } => Operation::broadcast_into(input, output, root),
            Collective::AllGather => Operation::all_gather(input, output),
            Collective::ReduceScatter => Operation::reduce_scatter(input, output, op),
            Collective::Gather { .. } => Operation::gather(input, output, root),
            Collective::Scatter { .. } => Operation::scatter(input, output, root),
            Collective::AllToAll => Operation::all_to_all(input, output),
            other => panic!("{other} has no such form"),
        };
        match self.collective {
            _ if !self.is_uneven => operation,
            Collective::AllToAll => {
                let received = oracle::received(group.rank(), &self.counts);
                operation.with_send_and_receive_counts(&self.counts, &received)
            }
            _ => operation.with_counts(&self.counts),
        }
    }

    /// Why it cannot be done, if it cannot.
    fn refusal(&self, way: Way, space: Space, level: Reproducible) -> Option<fn(&CollectiveError) -> bool> {
        if !self.collective.reduces() {
            return None;
        }
        let is_sum = self.op != ReduceOp::Max;
        let is_started = matches!(way, Way::Start | Way::PrepareAndStart | Way::StartBatch);
        if matches!(self.op, ReduceOp::PremulSum(_)) && space != Space::Host {
            return Some(|error| matches!(error, CollectiveError::NoKernel { .. }));
        }
        match level {
            Reproducible::Exact if is_sum && space != Space::Host => {
                Some(|error| matches!(error, CollectiveError::NotExact { reason: NotExact::OnGpu, .. }))
            }
            Reproducible::Exact if is_sum && is_started => {
                Some(|error| matches!(error, CollectiveError::NotExact { reason: NotExact::Started, .. }))
            }
            _ => None,
        }
    }
}

/// A kind of memory.
trait Memory: DataMut<Element = f32> + OwnedData + Sized {
    fn of(group: &Group, elements: &[f32]) -> Self;
    fn elements(&self) -> Vec<f32>;
}

impl Memory for Vec<f32> {
    fn of(_: &Group, elements: &[f32]) -> Self {
        elements.to_vec()
    }
    fn elements(&self) -> Vec<f32> {
        self.clone()
    }
}

impl Memory for Buffer<f32> {
    fn of(group: &Group, elements: &[f32]) -> Self {
        let mut buffer = group.buffer(elements.len()).expect("room");
        buffer.copy_from_slice(elements);
        buffer
    }
    fn elements(&self) -> Vec<f32> {
        self.to_vec()
    }
}

impl Memory for GpuBuffer<f32> {
    fn of(group: &Group, elements: &[f32]) -> Self {
        let mut buffer = group.gpu_buffer(elements.len()).expect("room");
        buffer.store(elements).expect("stored");
        buffer
    }
    fn elements(&self) -> Vec<f32> {
        self.to_vec().expect("loaded")
    }
}

/// Carries the operation out on owned memory; that memory, or why not.
macro_rules! carry_out {
    ($group:ident, $way:expr, $data:expr, |$memory:ident| $operation:expr, |$borrowed:ident| $of_borrowed:expr) => {{
        let mut data = $data;
        match $way {
            Way::Run => {
                let $borrowed = &mut data;
                $group.run($of_borrowed).map(|()| data)
            }
            Way::Start => {
                let $memory = data;
                $group.start($operation).and_then(Pending::wait).map_err(|refused| refused.error)
            }
            Way::Prepare => {
                let $memory = data;
                let prepared = $group.prepare($operation).map_err(|refused| refused.error);
                prepared.and_then(|mut call| call.run().map(|()| call.into_data()))
            }
            Way::PrepareAndStart => {
                let $memory = data;
                let prepared = $group.prepare($operation).map_err(|refused| refused.error);
                prepared.and_then(|call| match call.start().and_then(Pending::wait) {
                    Ok(call) => Ok(call.into_data()),
                    Err(refused) => Err(refused.error),
                })
            }
            Way::Batch => {
                let $borrowed = &mut data;
                let mut batch = $group.batch();
                let added = batch.add($of_borrowed).map(drop);
                added.and_then(|()| batch.run()).map(|()| data)
            }
            Way::StartBatch => {
                let started =
                    $group.batch().start(data, |batch, $borrowed| batch.add($of_borrowed).map(drop));
                started.and_then(Pending::wait).map_err(|refused| refused.error)
            }
        }
    }};
}

/// What a call left: the input, where that is apart, and the output.
type Left = (Option<Vec<f32>>, Vec<f32>);

fn on_owned<M: Memory>(group: &Group, case: &Case, way: Way) -> Result<Left, CollectiveError> {
    let Expected { input, output, whole, .. } =
        expected(group.rank(), case.collective, case.op, &case.counts);
    match case.form {
        Form::InPlace => {
            let data = M::of(group, &whole);
            let data = carry_out!(group, way, data, |data| case.in_place(group, data), |data| {
                case.in_place(group, data)
            });
            Ok((None, data?.elements()))
        }
        Form::Apart => {
            let data = (M::of(group, &input), M::of(group, &vec![-1.0; output.len()]));
            let data: Result<(M, M), _> =
                carry_out!(group, way, data, |data| case.apart(group, data.0, data.1), |data| {
                    let (input, output) = data;
                    case.apart(group, &*input, output)
                });
            let (input, output) = data?;
            Ok((Some(input.elements()), output.elements()))
        }
    }
}

/// The same on slices, which are borrowed in any way.
fn on_slices(group: &Group, case: &Case, way: Way) -> Option<Result<Left, CollectiveError>> {
    let Expected { input, output, mut whole, .. } =
        expected(group.rank(), case.collective, case.op, &case.counts);
    let mut result = vec![-1.0; output.len()];
    /// Carries the operation out, if a borrow can be.
    fn carry_out<D>(group: &Group, way: Way, operation: Operation<D>) -> Option<Result<(), CollectiveError>> {
        match way {
            Way::Run => Some(group.run(operation)),
            Way::Prepare => Some(match group.prepare(operation) {
                Ok(mut call) => call.run(),
                Err(refused) => Err(refused.error),
            }),
            // A borrow is not owned: not to be started, says the compiler. Added to a batch it was
            // with other memory.
            _ => None,
        }
    }
    Some(match case.form {
        Form::InPlace => carry_out(group, way, case.in_place(group, &mut whole[..]))?.map(|()| (None, whole)),
        Form::Apart => {
            let operation = case.apart(group, &input[..], &mut result[..]);
            carry_out(group, way, operation)?.map(|()| (Some(input), result))
        }
    })
}

fn try_all(group: &Group, level: Reproducible, space: Space) {
    let rank = group.rank();
    for case in cases(rank) {
        if case.collective == Collective::Barrier || takes_no_part(rank, case.collective) {
            continue;
        }
        for way in WAYS {
            let refusal = case.refusal(way, space, level);
            let found: Vec<_> = if space == Space::Host {
                let slices = on_slices(group, &case, way);
                [on_owned::<Vec<f32>>(group, &case, way), on_owned::<Buffer<f32>>(group, &case, way)]
                    .into_iter()
                    .chain(slices)
                    .collect()
            } else {
                vec![on_owned::<GpuBuffer<f32>>(group, &case, way)]
            };
            for found in found {
                match (found, refusal) {
                    (Ok(found), None) => check(rank, &case.collective, case.op, &case.counts, level, &found)
                        .unwrap_or_else(|wrong| {
                            panic!("rank {rank}, {way:?}, {space}, {level:?}: {case:?}: {wrong}")
                        }),
                    (Err(error), Some(is_right)) => {
                        assert!(is_right(&error), "{way:?}, {space}, {level:?}: {case:?}: {error}");
                    }
                    (found, refusal) => panic!(
                        "rank {rank}, {way:?}, {space}, {level:?}: {case:?}: {found:?}, refused: {}",
                        refusal.is_some()
                    ),
                }
            }
        }
    }
    barriers(group);
}

/// Of a message two ranks alone take part.
fn takes_no_part(rank: u32, collective: Collective) -> bool {
    matches!(collective, Collective::SendRecv { from, to } if rank != from && rank != to)
}

fn barriers(group: &Group) {
    group.run(Operation::barrier()).expect("run");
    group.start(Operation::barrier()).expect("started").wait().expect("ends");
    let mut call = group.prepare(Operation::barrier()).expect("prepared");
    call.run().expect("run");
    let call = call.start().expect("started").wait().expect("ends");
    assert_eq!(call.into_data(), ());
    let mut batch = group.batch();
    batch.add(Operation::barrier()).expect("added");
    batch.run().expect("run");
    let started = group.batch().start((), |batch, ()| batch.add(Operation::barrier()).map(drop));
    started.expect("started").wait().expect("ends");
}

const LEVELS: [Reproducible; 3] = [Reproducible::No, Reproducible::PerWorldSize, Reproducible::Exact];

fn on_host(fabric: Fabric) {
    for level in LEVELS {
        with_group(
            fabric,
            RANKS,
            |options| options.reproducible = level,
            |group| {
                try_all(&group, level, Space::Host);
                group.close().expect("closed");
            },
        );
    }
}

#[test]
fn every_combination_on_host_memory_over_shm() {
    on_host(Fabric::Shm);
}

#[test]
fn every_combination_on_host_memory_over_tcp() {
    on_host(Fabric::Tcp);
}

#[test]
fn every_combination_on_gpu_memory() {
    fake_cuda::load();
    let gpu: Arc<Gpu> = Gpu::open(0).expect("the fake driver has a GPU");
    for level in LEVELS {
        let adjust = |options: &mut pleach_collectives::Options| {
            options.space = GPU;
            options.reproducible = level;
        };
        with_group(Fabric::Shm, RANKS, adjust, |group| {
            let stream = Stream::new(&gpu).expect("a stream");
            try_all(&group.on(&stream), level, GPU);
            group.close().expect("closed");
        });
    }
}

/// 36 for calls and settings, two for late ranks (`partial`, `line`), and one for histograms of
/// programs (`histogram_metric`). C and Python add four: the caller's registered memory
/// (`register`, `deregister`), the caller's store (`join_in`), and signals (`interrupted_by`).
/// Sessions add three: sums of several contributions of a rank (`all_reduce_many`), and the ranks
/// that contribute while one heals (`contributes`, `contributors`).
const METHODS_MAX: usize = 46;

#[test]
fn a_group_has_few_methods() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/group");
    let mut methods = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("read").path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let text = text.split("\n#[cfg(test)]").next().expect("one part at least");
        // Top-level blocks end with a brace in the first column.
        for block in text.split("\nimpl Group {").skip(1) {
            let body = block.split("\n}").next().expect("one part at least");
            let of = |line: &str| {
                line.strip_prefix("    pub fn ")
                    .map(|rest| rest.split(['(', '<']).next().unwrap_or("").to_owned())
            };
            methods.extend(body.lines().filter_map(of));
        }
    }
    methods.sort();
    assert!(
        (20..=METHODS_MAX).contains(&methods.len()),
        "{} public methods of Group: {methods:?}",
        methods.len()
    );
}
