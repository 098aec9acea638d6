//! Memory of GPUs, by the CUDA driver where this machine has one.
//!
//! A [`Gpu`] is one device of the driver. [`CudaMemory`] is memory of it that pleach allocates,
//! whose allocation can be handed to other processes of this host as a file descriptor;
//! [`ForeignMemory`] is memory that somebody else allocated. A [`Stream`] is an order of work on
//! the GPU and a [`Mark`] a place in it; [`Pinned`] is host memory that kernels reach; a [`Module`]
//! is kernels, made for the GPU by the driver. [`Imported`] is memory of another process.
//!
//! **Invariants:**
//!
//! * The driver's library is opened at run time, and every function that is not optional is looked
//!   up before the first one is called ([`driver`]): where there is no driver, [`Gpu::open`] says
//!   so and nothing else happens. Nothing of the toolkit is needed, at build time or later.
//! * Nothing here waits for a GPU but [`Mark::wait`], which has a limit. What is put into a stream
//!   is only put there; there is no hidden synchronisation, so who needs a result marks the stream
//!   and asks the mark.
//! * A value that names memory keeps it, and its GPU, alive; host code never dereferences an
//!   address of [`Space::Gpu`](crate::Space::Gpu).
//! * The context that was current on a thread is so again after every call.
//!
//! # NICs and this memory (GPUDirect RDMA)
//!
//! A NIC reaches memory of a GPU by one of two ways, and the verbs device tries them in this order:
//!
//! * as a **dma-buf** ([`CudaMemory::as_dma_buf`], `cuMemGetHandleForAddressRange`), which the
//!   kernel hands to the NIC's driver (`ibv_reg_dmabuf_mr`): NVIDIA's open kernel modules,
//!   Linux 5.12;
//! * by its **address**, as if it were the host's (`ibv_reg_mr`), which the kernel gives to NICs
//!   where the module nvidia-peermem is loaded. Memory is allocated so that it may be
//!   (`gpuDirectRDMACapable`).
//!
//! Where neither works registering it is an error that names both and what to load, and groups
//! stage it through [`Pinned`] memory as for every other fabric. What a NIC wrote is **shown only
//! after a flush**: [`Gpu::flush`] says whether the GPU orders such writes itself or the host has
//! to ([`Gpu::flush_writes`]), and the verbs device does so between taking completions and telling
//! what they say. A GPU that has neither is refused. The other way round nothing is needed: who
//! puts from a GPU's memory has seen the [`Mark`] behind what wrote it, and by then it can be read.
//!
//! Contexts are the devices' primary ones, which the CUDA runtime, and so PyTorch and JAX, use too.
#![allow(unsafe_code)]

mod dma_buf;
mod driver;
mod gpu;
mod memory;
mod module;
mod peer;
mod pinned;
mod pointer;
mod stream;

pub use dma_buf::DmaBuf;
pub use driver::{CudaError, CudaErrorCode, driver_version};
pub use gpu::{Flush, Gpu, GpuId, Readers, gpus};
pub use memory::{CudaMemory, SharedAllocation};
pub use module::{Kernel, Module};
pub use peer::Imported;
pub use pinned::Pinned;
pub use pointer::ForeignMemory;
pub use stream::{Mark, Stream};
