//! Calls of a group: memory and lengths become an untyped operation, which is run or started.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_collectives::{Collective, DataType, Operation, RawData, RawPair, ReduceOp};
use pyo3::prelude::*;

use crate::error::{self, argument};
use crate::group::Inner;
use crate::memory::Memory;
use crate::pending::{Pending, Started, UnderWay};
use crate::types::{ElementType, Kind};

/// How a call is made.
#[derive(Clone, Copy, Default)]
pub(crate) struct Manner {
    /// In seconds.
    pub(crate) timeout: Option<f64>,
    pub(crate) tag: u32,
    pub(crate) is_started: bool,
}

/// Elements of blocks, where they are of different lengths.
#[derive(Default)]
pub(crate) enum Blocks {
    #[default]
    Equal,
    Listed(Vec<usize>),
    Between(Vec<usize>, Vec<usize>),
}

/// A call with its memory.
pub(crate) struct Call {
    pub(crate) collective: Collective,
    pub(crate) op: ReduceOp,
    pub(crate) input: Option<Memory>,
    pub(crate) output: Option<Memory>,
    /// The output is the input.
    pub(crate) is_in_place: bool,
    pub(crate) blocks: Blocks,
}

impl Call {
    pub(crate) fn new(collective: Collective, input: Option<Memory>, output: Option<Memory>) -> Self {
        let (op, blocks) = (ReduceOp::Sum, Blocks::Equal);
        Self { collective, op, input, output, is_in_place: false, blocks }
    }

    pub(crate) fn in_place(collective: Collective, data: Memory) -> Self {
        Self { is_in_place: true, ..Self::new(collective, Some(data), None) }
    }

    pub(crate) fn with_op(self, op: ReduceOp) -> Self {
        Self { op, ..self }
    }

    pub(crate) fn with_blocks(self, blocks: Blocks) -> Self {
        Self { blocks, ..self }
    }

    fn element(&self, py: Python<'_>) -> PyResult<ElementType> {
        let types = [&self.input, &self.output].map(|memory| memory.as_ref().map(|memory| memory.element));
        match types {
            [Some(input), Some(output)] if input != output => {
                let text = format!(
                    "data has elements of {}, and out of {}; give both the same",
                    input.name(),
                    output.name()
                );
                Err(argument(py, text))
            }
            [Some(element), _] | [None, Some(element)] => Ok(element),
            [None, None] => Ok(ElementType { data_type: DataType::U8, kind: Kind::Number }),
        }
    }

    /// Carries the call out, or starts it. `result` is what the caller is given.
    pub(crate) fn carry_out(
        self,
        py: Python<'_>,
        group: &Arc<Inner>,
        manner: Manner,
        result: Py<PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let element = self.element(py)?;
        if self.collective.reduces() {
            element.expect(py, self.op)?;
        }
        let lanes = element.lanes();
        let scaled =
            |counts: Vec<usize>| counts.into_iter().map(|count| count.saturating_mul(lanes)).collect();
        let blocks = match self.blocks {
            Blocks::Listed(counts) => Blocks::Listed(scaled(counts)),
            Blocks::Between(send, receive) => Blocks::Between(scaled(send), scaled(receive)),
            Blocks::Equal => Blocks::Equal,
        };
        let data = |memory: &Option<Memory>| {
            memory.as_ref().map(|memory| group.raw_data(memory.address, memory.count * lanes))
        };
        let input = data(&self.input);
        let output = if self.is_in_place { input.clone() } else { data(&self.output) };
        let raw = RawCall {
            collective: self.collective,
            data_type: element.data_type,
            op: self.op,
            input,
            output,
            blocks,
        };
        // SAFETY: the memory is held until the call has returned, or by the started operation; that
        // nobody else writes there is the caller's promise, as of every library that fills arrays.
        unsafe { raw.carry_out(py, group, manner, [self.input, self.output], None, result) }
    }
}

/// A call on addresses.
pub(crate) struct RawCall {
    pub(crate) collective: Collective,
    pub(crate) data_type: DataType,
    pub(crate) op: ReduceOp,
    pub(crate) input: Option<RawData>,
    pub(crate) output: Option<RawData>,
    pub(crate) blocks: Blocks,
}

impl RawCall {
    /// Carries out or starts a call on addresses that another library gives. The address of an
    /// integer cannot be checked: the caller of `Group.start` promises the memory, as of ctypes.
    pub(crate) fn carry_out_foreign(
        self,
        py: Python<'_>,
        inner: &Arc<Inner>,
        manner: Manner,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        // SAFETY: the promise of the caller of `Group.start`.
        unsafe { self.carry_out(py, inner, manner, [None, None], keep, py.None()) }
    }

    /// Carries the call out, or starts it and keeps the memory until it has ended.
    ///
    /// # Safety
    ///
    /// Input and output are memory of so many elements until the call has ended.
    pub(crate) unsafe fn carry_out(
        self,
        py: Python<'_>,
        inner: &Arc<Inner>,
        manner: Manner,
        memory: [Option<Memory>; 2],
        keep: Option<Py<PyAny>>,
        result: Py<PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let group = inner.group(py, manner)?;
        let Self { collective, data_type, op, input, output, blocks } = self;
        let fail = |error| error::collective(py, inner.info(), &error);
        // SAFETY: the caller's promise.
        let operation = unsafe { Operation::<RawPair>::from_raw(collective, data_type, op, input, output) };
        let operation = match (operation.map_err(fail)?, blocks) {
            (operation, Blocks::Equal) => operation,
            (operation, Blocks::Listed(counts)) => operation.with_counts(&counts),
            (operation, Blocks::Between(send, receive)) => {
                operation.with_send_and_receive_counts(&send, &receive)
            }
        };
        if !manner.is_started {
            let ended = py.detach(|| group.run(operation));
            return ended.map_err(|error| error::collective(py, inner.info(), &error)).map(|()| result);
        }
        let started = py.detach(|| {
            inner.reap();
            group.start(operation).map_err(|error| error.error)
        });
        let operation = started.map_err(|error| error::collective(py, inner.info(), &error))?;
        let started = Arc::new(Started::new(UnderWay { operation, memory, keep }));
        inner.keep(Arc::clone(&started));
        Ok(Py::new(py, Pending::new(started, Arc::clone(inner), result))?.into_any())
    }
}
