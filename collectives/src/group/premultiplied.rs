//! Calls in which a rank gives something else than its input: its input times a factor, in a
//! premultiplied sum, or the neutral element, where it takes part without a contribution
//! ([`Contributors`](super::contributors::Contributors)).
//!
//! A rank makes it, each product rounded once to its type, before any peer can see it. So the
//! schedules and their proofs stay what they are, whoever reads whose memory. It costs one more
//! pass over the rank's own data. It is made where the result is to be; where a rank has no result
//! of that length, in memory of the call's own, so the input stays as it is.
#![allow(unsafe_code)]

use half::{bf16, f16};

use super::bound::BoundCall;
use super::data::private;
use crate::compute::{F8E4M3, F8E5M2, Scale};
use crate::engine::Address;
use crate::partial::neutral;
use pleach_vocabulary::{DataType, Factor, ReduceOp};

/// Memory of a call's own, to be kept until it has ended; any element is aligned there.
pub(super) type Products = Vec<u64>;

/// What a rank gives in place of its input.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Given {
    /// Its input times this.
    Products(Factor),
    /// The neutral element of this operation.
    Neutral(ReduceOp),
}

impl Given {
    /// Stores it, where the elements have this type. Memory as in [`Scaling::products`].
    pub(crate) fn make(self, data_type: DataType, from: Address, into: Address, bytes: usize) {
        match self {
            Self::Products(factor) => Scaling { data_type, factor }.products(from, into, bytes),
            Self::Neutral(op) => fill(into, bytes, &neutral(data_type, op)),
        }
    }
}

impl BoundCall {
    /// Makes what this rank gives in place of its input, if it does. From here on that is its
    /// input.
    pub(super) fn premultiply(&mut self) -> Products {
        let Some(given) = self.given.take() else { return Products::new() };
        let bytes = self.input.len();
        if self.output.len() == bytes {
            given.make(self.data_type, self.input.base(), self.output.base(), bytes);
            self.input = self.output.clone();
            return Products::new();
        }
        let mut products = vec![0u64; bytes.div_ceil(size_of::<u64>())];
        let base = products.as_mut_ptr().cast();
        given.make(self.data_type, self.input.base(), Address(base), bytes);
        self.input = private(base, bytes);
        products
    }
}

/// How elements are multiplied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scaling {
    pub(super) data_type: DataType,
    pub(super) factor: Factor,
}

impl Scaling {
    /// Stores the products of the elements in place or elsewhere. Both memories belong to one
    /// call that nobody else touches now: the caller's, or the call's own.
    pub(super) fn products(self, from: Address, into: Address, bytes: usize) {
        // The factor fits the elements: looked at when the call was bound.
        let float = self.factor.float().unwrap_or_default();
        let single = float as f32;
        let integer = self.factor.integer().unwrap_or_default();
        match self.data_type {
            DataType::F64 => products::<f64>(from, into, bytes, float),
            DataType::F32 => products::<f32>(from, into, bytes, single),
            DataType::F16 => products::<f16>(from, into, bytes, single),
            DataType::Bf16 => products::<bf16>(from, into, bytes, single),
            DataType::F8E4M3 => products::<F8E4M3>(from, into, bytes, single),
            DataType::F8E5M2 => products::<F8E5M2>(from, into, bytes, single),
            DataType::I32 => products::<i32>(from, into, bytes, integer as i32),
            DataType::I64 => products::<i64>(from, into, bytes, integer as i64),
            DataType::I16 => products::<i16>(from, into, bytes, integer as i16),
            DataType::U16 => products::<u16>(from, into, bytes, integer as u16),
            DataType::I8 => products::<i8>(from, into, bytes, integer as i8),
            DataType::U32 => products::<u32>(from, into, bytes, integer as u32),
            DataType::U64 => products::<u64>(from, into, bytes, integer),
            DataType::U8 => products::<u8>(from, into, bytes, integer as u8),
        }
    }
}

/// Stores this element again and again.
fn fill(into: Address, bytes: usize, element: &[u8]) {
    if bytes == 0 {
        return;
    }
    // SAFETY: as many bytes of the call's memory, which no other code accesses now; any bytes are
    // elements.
    let into = unsafe { std::slice::from_raw_parts_mut(into.0, bytes) };
    into.chunks_exact_mut(element.len()).for_each(|into| into.copy_from_slice(element));
}

fn products<T: Scale>(from: Address, into: Address, bytes: usize, factor: T::Factor) {
    let (from, into, len) = (from.0.cast_const().cast::<T>(), into.0.cast::<T>(), bytes / size_of::<T>());
    if len == 0 {
        return;
    }
    assert!(from.is_aligned() && into.is_aligned(), "data are aligned");
    if std::ptr::eq(from, into) {
        // SAFETY: `len` aligned elements of the call's memory, which no other code accesses now.
        let elements = unsafe { std::slice::from_raw_parts_mut(into, len) };
        elements.iter_mut().for_each(|element| *element = element.scaled(factor));
        return;
    }
    // SAFETY: as above; input and output are the same or apart (`expect_apart_or_in_place`), and
    // the call's own memory is apart from both.
    let (from, into) =
        unsafe { (std::slice::from_raw_parts(from, len), std::slice::from_raw_parts_mut(into, len)) };
    from.iter().zip(into).for_each(|(from, into)| *into = from.scaled(factor));
}
