//! Tensors that this program makes in lendable memory, and tensors that it receives.
//!
//! **Invariant:** the program that makes a tensor writes it until the first call that sends it, and
//! nobody writes it afterwards. A C program must keep to this by itself. If it does not, receivers
//! see other numbers.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use pleach_exchange::endpoint::DIMENSIONS_MAX;
use pleach_exchange::{ReceivedTensor, SharedTensor, TensorMemoryError, TensorShape, TensorWay};
use pleach_vocabulary::DataType;

use super::{OpenEndpoint, find, pleachEndpoint_t};
use crate::handles::{Handles, Held};
use crate::result::{Failed, guarded, out, pleachResult_t, struct_size};
use crate::types::{self, pleachDataType_t};

/// A tensor. Its contents are opaque to the caller.
pub struct pleachTensor(());

/// A tensor of the exchange, which this program has made or received. NULL is no tensor.
pub type pleachTensor_t = *mut pleachTensor;

/// Most dimensions of a tensor.
pub const PLEACH_DIMENSIONS_MAX: usize = 8;
const _: () = assert!(PLEACH_DIMENSIONS_MAX == DIMENSIONS_MAX);

/// This program has made the tensor.
pub const pleachTensorOwn: c_int = 0;
/// The tensor was received and lies in the memory of its sender.
pub const pleachTensorInPlace: c_int = 1;
/// The tensor was received into memory of this program.
pub const pleachTensorInline: c_int = 2;
/// The tensor was received from this program itself, and lies where it was made.
pub const pleachTensorLocal: c_int = 3;

/// The properties of a tensor. Begin with PLEACH_TENSOR_INFO_INITIALIZER, which sets `size`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pleachTensorInfo_t {
    /// sizeof(pleachTensorInfo_t).
    pub size: usize,
    /// The elements, in the order of C: the last dimension changes fastest. They are aligned to 64
    /// bytes in lendable memory, and to 8 bytes elsewhere. The elements of a tensor that was
    /// received or sent must not be written.
    pub data: *const c_void,
    /// The length of all elements, in bytes.
    pub bytes: usize,
    /// The type of the elements.
    pub datatype: pleachDataType_t,
    /// One of the constants pleachTensorOwn to pleachTensorLocal.
    pub way: c_int,
    /// The number of dimensions.
    pub ndim: usize,
    /// The length of each dimension, the slowest first.
    pub dims: [usize; PLEACH_DIMENSIONS_MAX],
}

/// The tensor behind a handle.
pub(crate) struct HeldTensor {
    endpoint: Arc<OpenEndpoint>,
    data: usize,
    shape: TensorShape,
    content: Content,
}

enum Content {
    /// A tensor of this program. The caller writes its elements through their address, until the
    /// first call that sends the tensor.
    Own(SharedTensor),
    Received(ReceivedTensor),
}

pub(crate) static TENSORS: Handles<HeldTensor> = Handles::new("tensor", "tensor");

impl HeldTensor {
    /// A tensor that was received.
    pub(crate) fn received(endpoint: &Arc<OpenEndpoint>, tensor: ReceivedTensor) -> Self {
        let data = tensor.as_bytes().as_ptr().expose_provenance();
        let shape = tensor.shape().clone();
        Self { endpoint: endpoint.clone(), data, shape, content: Content::Received(tensor) }
    }

    /// The tensor in the form that an endpoint sends.
    pub(crate) fn shared(&self, endpoint: &OpenEndpoint) -> Result<SharedTensor, Failed> {
        let Content::Own(own) = &self.content else {
            return Err(Failed::argument(
                "tensor was received; send a tensor of pleachTensorAlloc, or its data by \
                 pleachEndpointSendMemory",
            ));
        };
        if !std::ptr::eq(endpoint, &*self.endpoint) {
            return Err(Failed::argument("tensor was made for another endpoint"));
        }
        Ok(own.clone())
    }

    fn way(&self) -> c_int {
        match &self.content {
            Content::Own(_) => pleachTensorOwn,
            Content::Received(tensor) => match tensor.way() {
                TensorWay::InPlace => pleachTensorInPlace,
                TensorWay::Local => pleachTensorLocal,
                _ => pleachTensorInline,
            },
        }
    }
}

/// The tensor of a handle.
pub(crate) fn find_tensor(tensor: pleachTensor_t) -> Result<Held<HeldTensor>, Failed> {
    let found = TENSORS.find(tensor)?;
    found.endpoint.expect_process()?;
    Ok(found)
}

pub(crate) fn memory_failure(error: &TensorMemoryError) -> Failed {
    let result = match error {
        TensorMemoryError::TooManyDimensions { .. } | TensorMemoryError::TooManyElements { .. } => {
            pleachResult_t::pleachInvalidArgument
        }
        TensorMemoryError::Limit(_) => pleachResult_t::pleachInvalidUsage,
        _ => pleachResult_t::pleachSystemError,
    };
    Failed { result, text: error.to_string() }
}

/// Reads the shape that a caller gives.
///
/// # Safety
///
/// `dims` is null or has `ndim` numbers.
pub(crate) unsafe fn shape(
    data_type: DataType,
    ndim: usize,
    dims: *const usize,
) -> Result<TensorShape, Failed> {
    if ndim > PLEACH_DIMENSIONS_MAX {
        let error = TensorMemoryError::TooManyDimensions { dimensions: ndim };
        return Err(memory_failure(&error));
    }
    let dimensions = match ndim {
        0 => &[][..],
        _ if dims.is_null() => return Err(Failed::argument("dims is NULL")),
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(dims, ndim) },
    };
    TensorShape::new(data_type, dimensions).map_err(|error| memory_failure(&error))
}

/// Makes a tensor in lendable memory. Receivers on this host read the tensor there, without a copy.
/// The tensor holds zeros, or bytes of earlier tensors of this program. `data`, if not NULL, gets
/// the address of the elements. The caller may write the elements until the first call that sends
/// the tensor.
///
/// Ownership: `dims` has `ndim` lengths, the slowest dimension first, and is read before the
/// function returns; it may be NULL where `ndim` is 0. `tensor` is NULL or points to a
/// pleachTensor_t; the caller releases the tensor with pleachTensorRelease. `data` is NULL or
/// points to a pointer; the address is valid until the release. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if an argument cannot be right;
/// pleachInvalidUsage if lendable memory is used up, 65536 tensors exist already, or this process
/// was forked from the one that opened the endpoint; pleachSystemError if the system has no memory;
/// pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachTensorAlloc(
    endpoint: pleachEndpoint_t,
    datatype: pleachDataType_t,
    ndim: usize,
    dims: *const usize,
    data: *mut *mut c_void,
    tensor: *mut pleachTensor_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(tensor, "tensor") }?;
        *stored = std::ptr::null_mut();
        let endpoint = find(endpoint)?;
        // SAFETY: the caller's promise.
        let shape = unsafe { shape(types::data_type(datatype)?, ndim, dims) }?;
        let made = endpoint.endpoint.untyped_tensor(&shape);
        let mut made = made.map_err(|error| memory_failure(&error))?;
        let address: *mut c_void = made.as_bytes_mut().as_mut_ptr().cast();
        let content = Content::Own(made.share());
        *stored = TENSORS.keep(HeldTensor { endpoint, data: address.expose_provenance(), shape, content })?;
        // SAFETY: the caller's promise.
        if let Some(data) = unsafe { data.as_mut() } {
            *data = address;
        }
        Ok(())
    })
}

/// Stores the properties of a tensor: the type, the dimensions, and the address of its elements.
///
/// Ownership: `info` is NULL or points to a struct that began with PLEACH_TENSOR_INFO_INITIALIZER.
/// Its `data` is valid until the tensor is released. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such tensor, or `info` is NULL or
/// its size is not that of the struct; pleachInvalidUsage if this process was forked from the one
/// that opened the endpoint; pleachInternalError after a mistake of the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachTensorGetInfo(
    tensor: pleachTensor_t,
    info: *mut pleachTensorInfo_t,
) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let size = unsafe { struct_size(info, "info", "PLEACH_TENSOR_INFO_INITIALIZER") }?;
        let held = find_tensor(tensor)?;
        let dimensions = held.shape.dimensions();
        let mut dims = [0; PLEACH_DIMENSIONS_MAX];
        dims[..dimensions.len()].copy_from_slice(dimensions);
        let found = pleachTensorInfo_t {
            size,
            data: std::ptr::with_exposed_provenance(held.data),
            bytes: held.shape.bytes(),
            datatype: types::number_of(held.shape.data_type()),
            way: held.way(),
            ndim: dimensions.len(),
            dims,
        };
        // SAFETY: it is as long as its size says.
        unsafe { *info = found };
        Ok(())
    })
}

/// Releases a tensor. A tensor that was sent stays available to its receivers. The memory of a
/// tensor that was received in place goes back to its sender.
///
/// Ownership: the handle goes back to the library and is invalid from now on; the elements must not
/// be read or written by their address any more. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if there is no such tensor; pleachInvalidUsage if
/// this process was forked from the one that opened the endpoint; pleachInternalError after a
/// mistake of the library.
#[unsafe(no_mangle)]
pub extern "C" fn pleachTensorRelease(tensor: pleachTensor_t) -> pleachResult_t {
    guarded(|| {
        find_tensor(tensor)?;
        TENSORS.take(tensor).map(drop)
    })
}
