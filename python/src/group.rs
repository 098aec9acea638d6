//! The group as a Python class: its methods, the operations that are under way, and the registered
//! memory that calls find by its address.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use pleach_collectives::{Buffer, Collective, CollectiveError, GroupInfo, RawData, RawPartial, ReduceOp};
use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::mutex::lock;
use pyo3::intern;
use pyo3::prelude::*;

use crate::calls::{Blocks, Call, Manner, RawCall};
use crate::error::{self, argument};
use crate::interrupt::interrupted;
use crate::memory::Memory;
use crate::partial::{self, Partial};
use crate::pending::Started;
use crate::registered::Registered;
use crate::types::{ElementType, reduction};
use crate::window::Window;

/// How long the end of the interpreter waits for operations that are under way.
const SHUTDOWN_TIME: Duration = Duration::from_secs(5);

/// Longest time that a caller may name, in seconds: a year.
const SECONDS_MAX: f64 = 365.0 * 86_400.0;

/// The groups of this process, which leave when the interpreter ends.
static GROUPS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Memory that Python reaches by its address; the lock makes the type one that threads may share.
pub(crate) type RegisteredMemory = Mutex<Buffer<u8>>;

/// A group and its operations that are under way.
pub(crate) struct Inner {
    /// `None` when it is closed.
    group: Mutex<Option<pleach_collectives::Group>>,
    info: GroupInfo,
    /// Started operations that may not have ended.
    started: Mutex<Vec<Arc<Started>>>,
    /// Registered memory by its address, with its length in bytes.
    registered: Mutex<BTreeMap<usize, (usize, Weak<RegisteredMemory>)>>,
}

/// A time that a caller gives in seconds, as the argument of this name.
pub(crate) fn limit(py: Python<'_>, name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if (0.0..=SECONDS_MAX).contains(&seconds) => Ok(Some(Duration::from_secs_f64(seconds))),
        Some(other) => Err(argument(py, format!("{name} is {other}; give seconds from 0 to {SECONDS_MAX}"))),
    }
}

impl Inner {
    /// The group for a call.
    pub(crate) fn group(&self, py: Python<'_>, manner: Manner) -> PyResult<pleach_collectives::Group> {
        let group = lock(&self.group).clone();
        let Some(mut group) = group else {
            return Err(error::collective(py, self.info(), &CollectiveError::Closed));
        };
        if let Some(limit) = limit(py, "timeout", manner.timeout)? {
            group = group.within(limit);
        }
        Ok(if manner.tag == 0 { group } else { group.tagged(manner.tag) })
    }

    /// The facts that do not change, also when the group is closed.
    pub(crate) fn info(&self) -> &GroupInfo {
        &self.info
    }

    /// The elements at an address, as registered memory if they are in it.
    pub(crate) fn raw_data(&self, address: usize, count: usize) -> RawData {
        let registered = lock(&self.registered);
        if let Some((&start, (bytes, memory))) = registered.range(..=address).next_back()
            && address - start < *bytes
            && let Some(memory) = memory.upgrade()
            && let Some(data) = RawData::within(&lock(&memory), address - start, count)
        {
            return data;
        }
        RawData::at(std::ptr::with_exposed_provenance_mut::<c_void>(address), count)
    }

    pub(crate) fn remember(&self, address: usize, bytes: usize, memory: &Arc<Mutex<Buffer<u8>>>) {
        lock(&self.registered).insert(address, (bytes, Arc::downgrade(memory)));
    }

    /// Calls on this memory copy nothing from now on. Each place: an address and its length in
    /// bytes.
    pub(crate) fn lend(&self, places: impl IntoIterator<Item = (usize, usize, Weak<RegisteredMemory>)>) {
        let mut registered = lock(&self.registered);
        registered.extend(places.into_iter().map(|(address, bytes, memory)| (address, (bytes, memory))));
    }

    pub(crate) fn forget(&self, address: usize) {
        lock(&self.registered).remove(&address);
    }

    pub(crate) fn keep(&self, started: Arc<Started>) {
        lock(&self.started).push(started);
    }

    /// Releases operations that have ended. Called without the GIL.
    pub(crate) fn reap(&self) {
        let all = std::mem::take(&mut *lock(&self.started));
        // An operation that only this list holds is polled here, as no other code polls it.
        let is_under_way = |started: &Arc<Started>| {
            let has_ended = started.has_ended()
                || Arc::strong_count(started) == 1 && started.poll(Duration::ZERO).is_some();
            !has_ended
        };
        let (left, ended): (Vec<_>, Vec<_>) = all.into_iter().partition(is_under_way);
        lock(&self.started).extend(left);
        // Memory goes back to Python without a lock of this group.
        drop(ended);
    }

    /// Waits for all operations until `until`; returns whether all have ended. Called without the
    /// GIL.
    fn wait_for_all(&self, until: Option<Nanos>) -> bool {
        let all = lock(&self.started).clone();
        let has_ended = |started: &Arc<Started>| match until {
            None => started.poll(Duration::MAX / 4).is_some(),
            Some(until) => started.poll(until.since(now())).is_some(),
        };
        let ended = all.iter().all(has_ended);
        self.reap();
        ended
    }
}

impl Inner {
    /// Leaves the group: waits 5 s for operations that are under way, and aborts the group if any
    /// has not ended then. Called without the GIL.
    fn leave(&self) {
        let group = lock(&self.group).take();
        if !self.wait_for_all(Some(now() + SHUTDOWN_TIME))
            && let Some(group) = &group
        {
            group.abort();
            self.wait_for_all(None);
        }
        drop(group);
    }
}

/// Leaves all groups of this process; called when the interpreter ends.
#[pyfunction]
pub(crate) fn leave_all(py: Python<'_>) {
    py.detach(|| {
        let groups = std::mem::take(&mut *lock(&GROUPS));
        groups.iter().filter_map(Weak::upgrade).for_each(|group| group.leave());
    });
}

impl Drop for Inner {
    fn drop(&mut self) {
        let started = std::mem::take(&mut *lock(&self.started));
        let group = lock(&self.group).take();
        let mut both = Some((started, group));
        // Operations under way may need other threads of Python to end.
        let _ = Python::try_attach(|py| py.detach(|| drop(both.take())));
        drop(both);
    }
}

/// This rank's place in a group of ranks. All ranks call the same operations in the same order;
/// send and recv match pair by pair. Threads may share a group. ``with`` closes it.
///
/// Arrays are NumPy arrays, or any objects with the buffer protocol or DLPack on the CPU,
/// contiguous in C order. A call that would write to read-only memory raises ArgumentError. Memory
/// of ``group.buffer`` is used without a copy.
///
/// The first failure ends the group on all ranks: every later call raises its cause, a GroupError.
/// Ctrl-C during a call that waits aborts the group and raises KeyboardInterrupt. Each call takes
/// ``timeout`` in seconds, in place of the group's timeout, and ``async_=True``, which starts the
/// operation and returns a Pending.
#[pyclass(frozen, weakref, module = "pleach._native", name = "Group")]
pub(crate) struct Group {
    inner: Arc<Inner>,
    /// The timeout of calls without one, in seconds.
    timeout: Option<f64>,
}

impl Group {
    pub(crate) fn new(group: pleach_collectives::Group) -> Self {
        let group = group.interrupted_by(interrupted);
        let inner = Inner {
            info: group.info(),
            group: Mutex::new(Some(group)),
            started: Mutex::default(),
            registered: Mutex::default(),
        };
        let inner = Arc::new(inner);
        let mut groups = lock(&GROUPS);
        groups.retain(|known| known.strong_count() > 0);
        groups.push(Arc::downgrade(&inner));
        drop(groups);
        Self { inner, timeout: None }
    }

    /// The group, for a caller that makes several calls.
    pub(crate) fn handle(&self, py: Python<'_>) -> PyResult<pleach_collectives::Group> {
        self.inner.group(py, self.manner(None, 0, false))
    }

    /// The group with its operations, which outlive this object where something else needs them.
    pub(crate) fn inner(&self) -> Arc<Inner> {
        Arc::clone(&self.inner)
    }

    /// Ends the group of an epoch for Python: operations that were started end with an error.
    pub(crate) fn end_epoch(&self, py: Python<'_>) {
        py.detach(|| {
            let group = lock(&self.inner.group).take();
            drop(group);
            self.inner.reap();
        });
    }

    /// Whether it is closed.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.inner.group).is_none()
    }

    fn manner(&self, timeout: Option<f64>, tag: u32, is_started: bool) -> Manner {
        Manner { timeout: timeout.or(self.timeout), tag, is_started }
    }

    fn ranks(&self) -> usize {
        self.inner.info.name.world_size as usize
    }

    fn expect_root(&self, py: Python<'_>, root: u32) -> PyResult<bool> {
        if root as usize >= self.ranks() {
            let text = format!("rank {root} is not in this group of {}", self.ranks());
            return Err(argument(py, text));
        }
        Ok(root == self.inner.info.name.rank)
    }

    /// A new array of this shape, and its memory.
    pub(crate) fn new_array<'py>(
        py: Python<'py>,
        shape: &[usize],
        element: ElementType,
    ) -> PyResult<(Bound<'py, PyAny>, Memory)> {
        let empty = py.import(intern!(py, "pleach._arrays"))?.getattr(intern!(py, "empty"))?;
        let made = empty.call1((shape.to_vec(), element.name()))?;
        let memory = Memory::of(&made, "out", true)?;
        Ok((made, memory))
    }

    /// The output of a call: the caller's, or a new array of this shape.
    fn output<'py>(
        &self,
        py: Python<'py>,
        out: Option<Bound<'py, PyAny>>,
        shape: &[usize],
        element: ElementType,
    ) -> PyResult<(Bound<'py, PyAny>, Memory)> {
        let Some(made) = out else { return Self::new_array(py, shape, element) };
        let memory = Memory::of(&made, "out", true)?;
        let expected: usize = shape.iter().product();
        if memory.count != expected {
            let text = format!(
                "out has shape {:?}, which is {} elements, not {expected}",
                memory.shape(),
                memory.count
            );
            return Err(argument(py, text));
        }
        Ok((made, memory))
    }
}

/// A shape with the ranks as its first dimension.
fn stacked(ranks: usize, shape: &[usize]) -> Vec<usize> {
    std::iter::once(ranks).chain(shape.iter().copied()).collect()
}

fn expect_shape(py: Python<'_>, expected: &[usize], memory: &Memory) -> PyResult<()> {
    if memory.shape() == expected {
        return Ok(());
    }
    Err(argument(py, format!("out has shape {:?}, not {expected:?} as data", memory.shape())))
}

/// A shape divided by the ranks along its first dimension.
fn divided(py: Python<'_>, ranks: usize, shape: &[usize]) -> PyResult<Vec<usize>> {
    match shape {
        [first, rest @ ..] if first.is_multiple_of(ranks) => {
            Ok(std::iter::once(first / ranks).chain(rest.iter().copied()).collect())
        }
        _ => Err(argument(
            py,
            format!("data has shape {shape:?}; its first dimension must be a multiple of the {ranks} ranks"),
        )),
    }
}

fn sum(py: Python<'_>, counts: &[usize]) -> PyResult<usize> {
    let all = counts.iter().try_fold(0_usize, |all, count| all.checked_add(*count));
    all.filter(|all| isize::try_from(*all).is_ok()).ok_or_else(|| argument(py, "the counts are too large"))
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "arguments of Python")]
impl Group {
    /// This rank, from 0.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.info.name.rank
    }

    /// The number of ranks.
    #[getter]
    fn world_size(&self) -> u32 {
        self.inner.info.name.world_size
    }

    /// Whether this rank contributes. In a step of a session with heal="hidden" a process that
    /// reads the states does not: the neutral element stands for its input, so it need not compute
    /// that.
    #[getter]
    fn contributes(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.handle(py)?.contributes())
    }

    /// The fabric: shm, tcp, shm+tcp, verbs or shm+verbs.
    #[getter]
    fn fabric(&self) -> Option<String> {
        self.inner.info.fabric.map(|fabric| fabric.to_string())
    }

    /// Whether the group is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.has_ended()
    }

    /// The host of a rank, counted from 0 among the hosts of the group.
    fn host_of(&self, py: Python<'_>, rank: u32) -> PyResult<u32> {
        self.expect_root(py, rank)?;
        Ok(self.inner.info.hosts.host(rank))
    }

    /// The same group, whose calls wait at most ``timeout`` seconds.
    fn within(&self, py: Python<'_>, timeout: f64) -> PyResult<Self> {
        limit(py, "timeout", Some(timeout))?;
        Ok(Self { inner: Arc::clone(&self.inner), timeout: Some(timeout) })
    }

    /// A new group of the ranks that pass the same colour, ordered by key and then by rank; None
    /// for a rank whose colour is None. All ranks call it.
    #[pyo3(signature = (color, key=0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: u32) -> PyResult<Option<Self>> {
        let group = self.inner.group(py, self.manner(None, 0, false))?;
        let part = py.detach(|| group.split(color, key));
        Ok(part.map_err(|error| error::split(py, self.inner.info(), error))?.map(Self::new))
    }

    /// Replaces ``data`` on every rank by the reduction of all ranks' ``data``, or stores it in
    /// ``out``, which has the shape of ``data``. Returns what was written.
    #[pyo3(signature = (data, op=None, *, out=None, timeout=None, async_=false))]
    fn all_reduce<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let op = op.map_or(Ok(ReduceOp::Sum), reduction)?;
        let input = Memory::of(data, "data", out.is_none())?;
        let (call, result) = match out {
            None => (Call::in_place(Collective::AllReduce, input), data),
            Some(out) => {
                let output = Memory::of(out, "out", true)?;
                expect_shape(py, &input.shape(), &output)?;
                (Call::new(Collective::AllReduce, Some(input), Some(output)), out)
            }
        };
        let manner = self.manner(timeout, 0, async_);
        call.with_op(op).carry_out(py, &self.inner, manner, result.clone().unbind())
    }

    /// Replaces ``data`` of the root by the reduction of all ranks' ``data``, or stores it in
    /// ``out`` of the root, which has the shape of ``data``. Returns what was written, None on
    /// other ranks.
    #[pyo3(signature = (data, root=0, op=None, *, out=None, timeout=None, async_=false))]
    fn reduce<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        root: u32,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let op = op.map_or(Ok(ReduceOp::Sum), reduction)?;
        let is_root = self.expect_root(py, root)?;
        let collective = Collective::Reduce { root };
        let input = Memory::of(data, "data", is_root && out.is_none())?;
        let (call, result) = match out {
            _ if !is_root => (Call::new(collective, Some(input), None), py.None()),
            None => (Call::in_place(collective, input), data.clone().unbind()),
            Some(out) => {
                let output = Memory::of(out, "out", true)?;
                expect_shape(py, &input.shape(), &output)?;
                (Call::new(collective, Some(input), Some(output)), out.clone().unbind())
            }
        };
        call.with_op(op).carry_out(py, &self.inner, self.manner(timeout, 0, async_), result)
    }

    /// Replaces ``data`` on every rank by that of the root. Returns ``data``.
    #[pyo3(signature = (data, root=0, *, timeout=None, async_=false))]
    fn broadcast<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        root: u32,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let call = match self.expect_root(py, root)? {
            true => Call::in_place(Collective::Broadcast { root }, Memory::of(data, "data", true)?),
            false => Call::new(Collective::Broadcast { root }, None, Some(Memory::of(data, "data", true)?)),
        };
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), data.clone().unbind())
    }

    /// Stores the ``data`` of every rank in ``out`` of every rank, in rank order. ``out`` has as
    /// many elements as all ``data`` together; without it a new array of shape (ranks,
    /// \*data.shape) is returned. With ``counts``, a list of elements by rank, ``data`` may have
    /// different lengths; a new ``out`` has one dimension then. In place: ``data`` is this rank's
    /// part of ``out``.
    #[pyo3(signature = (data, *, out=None, counts=None, timeout=None, async_=false))]
    fn all_gather<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let input = Memory::of(data, "data", false)?;
        let (shape, blocks) = match counts {
            None => (stacked(self.ranks(), &input.shape()), Blocks::Equal),
            Some(counts) => (vec![sum(py, &counts)?], Blocks::Listed(counts)),
        };
        let (out, output) = self.output(py, out, &shape, input.element)?;
        let call = Call::new(Collective::AllGather, Some(input), Some(output)).with_blocks(blocks);
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), out.unbind())
    }

    /// Stores block r of the reduction of all ranks' ``data`` in ``out`` of rank r. The first
    /// dimension of ``data`` is divided among the ranks; a new ``out`` has the shape of a block.
    /// With ``counts``, a list of elements by rank, blocks may have different lengths; a new
    /// ``out`` has one dimension then. In place: ``out`` is this rank's block of ``data``.
    #[pyo3(signature = (data, op=None, *, out=None, counts=None, timeout=None, async_=false))]
    fn reduce_scatter<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        op: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let op = op.map_or(Ok(ReduceOp::Sum), reduction)?;
        let input = Memory::of(data, "data", false)?;
        let (shape, blocks) = self.block_of(py, &input, counts)?;
        let (out, output) = self.output(py, out, &shape, input.element)?;
        let call = Call::new(Collective::ReduceScatter, Some(input), Some(output));
        let call = call.with_op(op).with_blocks(blocks);
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), out.unbind())
    }

    /// Stores block r of ``data`` of rank s as block s of ``out`` of rank r. The first dimension of
    /// ``data`` is divided among the ranks, and ``out`` has the shape of ``data``. With
    /// ``send_counts`` and ``receive_counts``, lists of elements by rank, blocks may have different
    /// lengths; a new ``out`` has one dimension then. There is no form in place.
    #[pyo3(signature = (data, *, out=None, send_counts=None, receive_counts=None, timeout=None, async_=false))]
    fn all_to_all<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        send_counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let input = Memory::of(data, "data", false)?;
        let (shape, blocks) = match (send_counts, receive_counts) {
            (None, None) => {
                divided(py, self.ranks(), &input.shape())?;
                (input.shape(), Blocks::Equal)
            }
            (Some(send), Some(receive)) => (vec![sum(py, &receive)?], Blocks::Between(send, receive)),
            _ => return Err(argument(py, "give both send_counts and receive_counts, or none of them")),
        };
        let (out, output) = self.output(py, out, &shape, input.element)?;
        let call = Call::new(Collective::AllToAll, Some(input), Some(output)).with_blocks(blocks);
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), out.unbind())
    }

    /// Stores the ``data`` of every rank in ``out`` of the root, in rank order; as ``all_gather``.
    /// Returns ``out`` of the root, and None on other ranks.
    #[pyo3(signature = (data, root=0, *, out=None, counts=None, timeout=None, async_=false))]
    fn gather<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        root: u32,
        out: Option<Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let is_root = self.expect_root(py, root)?;
        let input = Memory::of(data, "data", false)?;
        let (shape, blocks) = match counts {
            None => (stacked(self.ranks(), &input.shape()), Blocks::Equal),
            Some(counts) => (vec![sum(py, &counts)?], Blocks::Listed(counts)),
        };
        let (result, output) = match is_root {
            true => {
                let (out, output) = self.output(py, out, &shape, input.element)?;
                (out.unbind(), Some(output))
            }
            false => (py.None(), None),
        };
        let call = Call::new(Collective::Gather { root }, Some(input), output).with_blocks(blocks);
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), result)
    }

    /// Stores block r of ``data`` of the root in ``out`` of rank r; ``data`` of other ranks is not
    /// used. The first dimension of ``data`` is divided among the ranks. Ranks other than the root
    /// need ``out``. With ``counts``, a list of elements by rank, blocks may have different
    /// lengths. Returns ``out``.
    #[pyo3(signature = (data=None, root=0, *, out=None, counts=None, timeout=None, async_=false))]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        data: Option<&Bound<'py, PyAny>>,
        root: u32,
        out: Option<Bound<'py, PyAny>>,
        counts: Option<Vec<usize>>,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let collective = Collective::Scatter { root };
        let (call, out) = if self.expect_root(py, root)? {
            let data = data.ok_or_else(|| argument(py, "data is None; the root needs it"))?;
            let input = Memory::of(data, "data", false)?;
            let (shape, blocks) = self.block_of(py, &input, counts)?;
            let (out, output) = self.output(py, out, &shape, input.element)?;
            (Call::new(collective, Some(input), Some(output)).with_blocks(blocks), out)
        } else {
            let out = out.ok_or_else(|| argument(py, "out is None; ranks other than the root need it"))?;
            let output = Memory::of(&out, "out", true)?;
            let blocks = counts.map_or(Blocks::Equal, Blocks::Listed);
            (Call::new(collective, None, Some(output)).with_blocks(blocks), out)
        };
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), out.unbind())
    }

    /// Sends ``data`` to a rank, which receives as many elements of the same type with the same
    /// tag. Messages of two ranks match in their order. A tag does not select a message: another
    /// tag is a MismatchError. A send of more than 8 KiB returns when the receiver has made its
    /// call.
    #[pyo3(signature = (data, to, *, tag=0, timeout=None, async_=false))]
    fn send<'py>(
        &self,
        data: &Bound<'py, PyAny>,
        to: u32,
        tag: u32,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = data.py();
        let collective = Collective::SendRecv { from: self.rank(), to };
        let call = Call::new(collective, Some(Memory::of(data, "data", false)?), None);
        call.carry_out(py, &self.inner, self.manner(timeout, tag, async_), py.None())
    }

    /// Receives into ``out`` from a rank, which sends as many elements of the same type with the
    /// same tag. Returns ``out``.
    #[pyo3(signature = (out, source, *, tag=0, timeout=None, async_=false))]
    fn recv<'py>(
        &self,
        out: &Bound<'py, PyAny>,
        source: u32,
        tag: u32,
        timeout: Option<f64>,
        async_: bool,
    ) -> PyResult<Py<PyAny>> {
        let py = out.py();
        let collective = Collective::SendRecv { from: source, to: self.rank() };
        let call = Call::new(collective, None, Some(Memory::of(out, "out", true)?));
        call.carry_out(py, &self.inner, self.manner(timeout, tag, async_), out.clone().unbind())
    }

    /// Returns when every rank has called it.
    #[pyo3(signature = (*, timeout=None, async_=false))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>, async_: bool) -> PyResult<Py<PyAny>> {
        let call = Call::new(Collective::Barrier, None, None);
        call.carry_out(py, &self.inner, self.manner(timeout, 0, async_), py.None())
    }

    /// Rounds of a partial all-reduce of arrays of this shape: sums that do not wait for late
    /// ranks, and say whose data are in them. All ranks call it alike.
    ///
    /// activation: when a round opens: all, solo, majority, quorum:K, quorum:K+GRACE, deadline:D or
    /// deadline:pN, with times as 20ms and the percentile of a learned deadline as p95. late: what
    /// becomes of late contributions: carry, drop or correct. divisor: none, world or contributors.
    /// op: sum, avg, prod, min, max, and, or, xor, or a PremulSum. staleness_max: how many rounds
    /// in a row a rank may be left out. Those left out are as the activation says.
    #[pyo3(signature = (shape, dtype=None, activation="all", *, op=None, late=None, divisor=None,
                        staleness_max=None, timeout=None))]
    fn partial<'py>(
        &self,
        py: Python<'py>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
        activation: &str,
        op: Option<&Bound<'py, PyAny>>,
        late: Option<&str>,
        divisor: Option<&str>,
        staleness_max: Option<u32>,
        timeout: Option<f64>,
    ) -> PyResult<Partial> {
        let (shape, name): (Vec<usize>, String) =
            py.import("pleach._arrays")?.getattr("described")?.call1((shape, dtype))?.extract()?;
        let Some(element) = ElementType::named(&name) else {
            return Err(argument(py, format!("{name:?} is no element type")));
        };
        let op = op.map_or(Ok(ReduceOp::Sum), reduction)?;
        element.expect(py, op)?;
        let activation = partial::activation(py, activation, late, divisor, staleness_max)?.combined_by(op);
        let len = shape.iter().try_fold(element.lanes(), |len, length| len.checked_mul(*length));
        let Some(len) = len else { return Err(argument(py, "the shape is too large")) };
        let group = self.inner.group(py, self.manner(timeout, 0, false))?.interrupted_by(interrupted);
        let raw = py.detach(|| RawPartial::new(&group, len, element.data_type, activation));
        let raw = raw.map_err(|error| partial::exception(py, &self.inner, error))?;
        Ok(Partial::new(raw, Arc::clone(&self.inner), shape, element))
    }

    /// One-sided memory: each rank publishes an array of this shape and type, which its peers read,
    /// and has ``slots`` slots at each peer, into which it writes. All ranks call this with the
    /// same arguments.
    #[pyo3(signature = (shape, dtype=None, slots=1, *, timeout=None))]
    fn window<'py>(
        &self,
        py: Python<'py>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
        slots: u16,
        timeout: Option<f64>,
    ) -> PyResult<Window> {
        let (shape, name): (Vec<usize>, String) =
            py.import("pleach._arrays")?.getattr("described")?.call1((shape, dtype))?.extract()?;
        let Some(element) = ElementType::named(&name) else {
            return Err(argument(py, format!("{name:?} is no element type")));
        };
        let group = self.inner.group(py, self.manner(timeout, 0, false))?.interrupted_by(interrupted);
        Window::make(py, &group, Arc::clone(&self.inner), (shape, element), slots)
    }

    /// A NumPy array of zeros over registered memory: calls on it, and on its contiguous parts,
    /// copy nothing. The memory stays as long as the array, its views, or an operation on it.
    #[pyo3(signature = (shape, dtype=None))]
    fn buffer<'py>(
        &self,
        py: Python<'py>,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let arrays = py.import("pleach._arrays")?;
        let bytes: usize = arrays.getattr("bytes_of")?.call1((shape, &dtype))?.extract()?;
        let registered = self.register(py, bytes)?;
        arrays.getattr("over")?.call1((registered, shape, dtype))
    }

    /// ``nbytes`` zeroed bytes of registered memory.
    fn register(&self, py: Python<'_>, nbytes: usize) -> PyResult<Registered> {
        let group = self.inner.group(py, Manner::default())?;
        let made = py.detach(|| group.buffer::<u8>(nbytes.max(1)));
        let buffer = made.map_err(|error| error::collective(py, self.inner.info(), &error))?;
        Ok(Registered::new(buffer, Arc::clone(&self.inner)))
    }

    /// A call on addresses, for other libraries: `start` returns a Pending, or None if `blocking`.
    ///
    /// collective: all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather,
    /// scatter, send, recv or barrier. dtype: a name of NumPy. input and output: addresses of
    /// input_count and output_count elements, which stay until the operation has ended. Both are
    /// ignored where the rank has no part in them; in place they are the same. root: the root, or
    /// the other rank of a message. counts: elements by rank. For an all_to_all, counts are the
    /// elements to each rank, and receive_counts the elements from it. keep: an object that is held
    /// until the operation has ended.
    #[pyo3(signature = (collective, dtype, op, input, input_count, output, output_count, *, root=0,
                        counts=None, receive_counts=None, tag=0, timeout=None, keep=None, blocking=false))]
    fn start<'py>(
        &self,
        py: Python<'py>,
        collective: &str,
        dtype: &str,
        op: Option<&Bound<'py, PyAny>>,
        input: usize,
        input_count: usize,
        output: usize,
        output_count: usize,
        root: u32,
        counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
        keep: Option<Py<PyAny>>,
        blocking: bool,
    ) -> PyResult<Py<PyAny>> {
        let rank = self.rank();
        let (collective, has_input, has_output) = match collective {
            "all_reduce" => (Collective::AllReduce, true, true),
            "reduce" => (Collective::Reduce { root }, true, root == rank),
            "broadcast" => (Collective::Broadcast { root }, root == rank, true),
            "all_gather" => (Collective::AllGather, true, true),
            "reduce_scatter" => (Collective::ReduceScatter, true, true),
            "all_to_all" => (Collective::AllToAll, true, true),
            "gather" => (Collective::Gather { root }, true, root == rank),
            "scatter" => (Collective::Scatter { root }, root == rank, true),
            "send" => (Collective::SendRecv { from: rank, to: root }, true, false),
            "recv" => (Collective::SendRecv { from: root, to: rank }, false, true),
            "barrier" => (Collective::Barrier, false, false),
            other => return Err(argument(py, format!("{other:?} is no collective"))),
        };
        let op = op.map_or(Ok(ReduceOp::Sum), reduction)?;
        let Some(element) = ElementType::named(dtype) else {
            return Err(argument(py, format!("{dtype:?} is no element type")));
        };
        if collective.reduces() {
            element.expect(py, op)?;
        }
        let lanes = element.lanes();
        let scaled =
            |counts: Vec<usize>| counts.into_iter().map(|count| count.saturating_mul(lanes)).collect();
        let data = |address, count: usize| self.inner.raw_data(address, count.saturating_mul(lanes));
        let call = RawCall {
            collective,
            data_type: element.data_type,
            op,
            input: has_input.then(|| data(input, input_count)),
            output: has_output.then(|| data(output, output_count)),
            blocks: match (counts, receive_counts) {
                (Some(send), Some(receive)) => Blocks::Between(scaled(send), scaled(receive)),
                (Some(counts), None) => Blocks::Listed(scaled(counts)),
                _ => Blocks::Equal,
            },
        };
        let manner = self.manner(timeout, tag, !blocking);
        call.carry_out_foreign(py, &self.inner, manner, keep)
    }

    /// Ends the group's work on all ranks: calls under way, here and there, raise AbortedError.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.inner.group(py, Manner::default())?;
        py.detach(|| group.abort());
        Ok(())
    }

    /// Waits for operations that are under way, meets all ranks once more and leaves the group.
    /// Later calls raise ClosedError. Does nothing when the group is closed.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let left = py.detach(|| {
            let group = lock(&self.inner.group).take();
            self.inner.wait_for_all(None);
            group.map_or(Ok(()), pleach_collectives::Group::close)
        });
        left.map_err(|error| error::collective(py, self.inner.info(), &error))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Closes the group; after an exception the other ranks are told by an abort.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() {
            return self.close(py);
        }
        py.detach(|| {
            let group = lock(&self.inner.group).take();
            if let Some(group) = group {
                group.abort();
            }
        });
        Ok(())
    }

    fn __repr__(&self) -> String {
        let name = &self.inner.info.name;
        format!("<pleach.Group: rank {} of {}>", name.rank, name.world_size)
    }
}

impl Group {
    /// The shape of this rank's block of an input, and the lengths of all blocks.
    fn block_of(
        &self,
        py: Python<'_>,
        input: &Memory,
        counts: Option<Vec<usize>>,
    ) -> PyResult<(Vec<usize>, Blocks)> {
        Ok(match counts {
            None => (divided(py, self.ranks(), &input.shape())?, Blocks::Equal),
            Some(counts) => {
                let own = counts.get(self.rank() as usize).copied();
                let Some(own) = own.filter(|_| counts.len() == self.ranks()) else {
                    let text =
                        format!("there are {} counts, not {}, one for each rank", counts.len(), self.ranks());
                    return Err(argument(py, text));
                };
                (vec![own], Blocks::Listed(counts))
            }
        })
    }
}
