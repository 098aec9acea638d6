//! GPU memory, with the CUDA driver if this machine has one.
//!
//! A [`Gpu`] is one device of the driver. [`CudaMemory`] is GPU memory that pleach allocates, and
//! that can be shared with other processes of this host as a file descriptor; [`ForeignMemory`] is
//! GPU memory of another allocator. A [`Stream`] is a CUDA stream and a [`CudaEvent`] an event in
//! it; [`PinnedMemory`] is host memory that kernels can access; a [`Module`] is a set of kernels,
//! which the driver compiles for the GPU. [`ImportedMemory`] is memory of another process.
//!
//! **Invariants:**
//!
//! * The driver's library is loaded at run time, and every function that is not optional is looked
//!   up before the first one is called ([`driver`]). Without a driver [`Gpu::open`] returns an
//!   error and nothing else happens. Nothing of the toolkit is needed, at build time or later.
//! * The only wait for a GPU is [`CudaEvent::wait`], which has a limit. Work that is put into a
//!   stream is not waited for; there is no hidden synchronisation. For a result, record an event
//!   and query it.
//! * A value that refers to memory keeps the memory, and its GPU, alive; host code never
//!   dereferences an address of [`Space::Gpu`](crate::Space::Gpu).
//! * After every call the thread's current context is what it was before.
//!
//! # NICs and this memory (GPUDirect RDMA)
//!
//! A NIC accesses GPU memory in one of two ways, and the verbs device tries them in this order:
//!
//! * as a **dma-buf** ([`CudaMemory::as_dma_buf`], `cuMemGetHandleForAddressRange`), which the
//!   kernel gives to the NIC's driver (`ibv_reg_dmabuf_mr`): NVIDIA's open kernel modules, Linux
//!   5.12;
//! * by its **address**, like host memory (`ibv_reg_mr`), which works where the module
//!   nvidia-peermem is loaded. Memory is allocated for this (`gpuDirectRDMACapable`).
//!
//! If neither works, registration is an error that names both with a remedy, and groups stage it
//! through [`PinnedMemory`] as for every other fabric. A NIC's writes are **visible only after a
//! flush**: [`Gpu::flush`] returns whether the GPU orders such writes itself or the host must flush
//! ([`Gpu::flush_writes`]), and the verbs device flushes between polling completions and handling
//! them. A GPU that has neither is refused. The other direction needs no flush: a put from GPU
//! memory is submitted after the [`CudaEvent`] behind the writing work, and by then the memory can
//! be read.
//!
//! Contexts are the devices' primary ones, which the CUDA runtime, and so PyTorch and JAX, use too.
#![allow(unsafe_code)]

mod copy;
mod dma_buf;
mod driver;
mod gpu;
mod memory;
mod module;
mod pinned;
mod pointer;
mod stream;

pub use copy::CudaCopy;
pub use dma_buf::CudaDmaBuf;
pub use driver::{CudaError, CudaErrorCode, driver_version, gpus};
pub use gpu::{FlushMethod, FlushScope, Gpu, GpuId};
pub use memory::{CudaMemory, ImportedMemory, SharedAllocation};
pub use module::{Kernel, Module};
pub use pinned::PinnedMemory;
pub use pointer::ForeignMemory;
pub use stream::{CudaEvent, Stream};
